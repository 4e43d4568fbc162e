"""One page that says what a study found: no network, no scripts, nothing in it that the records do not hold."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sized
from html import escape
from pathlib import Path

from .figures import Figure, by_batch, by_rate, css, curves, inline, standalone
from .stats import Summary, summarise
from .tables import caption, details, footnotes, table

STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif;
overflow-wrap:anywhere}
main{max-width:70rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:clamp(1.15rem,1rem + .8vw,1.55rem);line-height:1.4;font-weight:600;margin:.4rem 0 0;max-width:54rem}
h2{font-size:1.15rem;margin:2.75rem 0 .35rem}
p{margin:.35rem 0;max-width:46rem}
.soft,small,dt{color:var(--soft)}
small{font-size:.82rem;white-space:nowrap}
.scroll{overflow-x:auto;max-width:100%;border:1px solid var(--rule);border-radius:8px;margin:.75rem 0}
.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--s0);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.5rem .9rem;border-top:1px solid var(--rule);font-weight:400}
thead th{border-top:0;color:var(--soft);font-size:.88rem;white-space:nowrap}
tbody th{font-weight:600;min-width:8.5rem;max-width:18rem}
td{white-space:nowrap}
td.best b::after{content:" ▲";font-size:.7em;color:var(--s0)}
.runs{font-size:.84rem}.runs th,.runs td{padding:.3rem .7rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;padding:0;margin:.75rem 0 .5rem;font-size:.9rem}
.legend li{display:flex;gap:.5rem;align-items:center;min-width:0}
.legend svg{flex:none}
.panels{display:grid;gap:1rem;
grid-template-columns:repeat(auto-fit,minmax(min(100%,max(18.5rem,100%/var(--n) - 1rem)),1fr))}
.chart{width:100%;height:auto;display:block;max-width:27rem}
.one .chart{max-width:34rem}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.35rem 1.2rem;margin:.75rem 0}
dd{margin:0}
code{font:.88em ui-monospace,SFMono-Regular,Menlo,monospace}
details{margin-top:1rem}
summary{cursor:pointer;padding:.3rem 0}
@media (max-width:30rem){main{padding:1.25rem .9rem 3rem}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.6rem}
th,td{padding:.45rem .6rem}}
@media print{main{max-width:none;padding:0}.scroll{overflow:visible}.chart,tr{break-inside:avoid}
h2{break-after:avoid}td{white-space:normal}}
"""


def write(folder: Path) -> Path:
    """Write table.md, curves.svg, batch.svg, lr.svg and report.html into a folder of records.

    Everything is made before anything is replaced, so that a reader never sees half a report.

    Returns:
        The path of report.html.

    Raises:
        FileNotFoundError: the folder holds no record.
    """
    folder = Path(folder)
    summary = summarise(folder)
    files = {
        "table.md": table(summary),
        "curves.svg": standalone(curves(summary)),
        "batch.svg": standalone(by_batch(summary)),
        "lr.svg": standalone(by_rate(summary)),
        "report.html": html(summary),
    }
    drafts = {folder / f".{name}.{os.getpid()}.tmp": folder / name for name in files}
    try:
        for draft, path in drafts.items():
            draft.write_text(files[path.name], encoding="utf-8", newline="\n")
        for draft, path in drafts.items():
            os.replace(draft, path)
    finally:
        for draft in drafts:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
    return folder / "report.html"


def html(summary: Summary) -> str:
    """The page. All text is escaped; should that ever fail, the policy in the head still lets nothing load or run."""
    parts = [_head(summary), _table(summary)]
    parts += [_figure(summary, *figure) for figure in FIGURES]
    parts += [_rates(summary), _provenance(summary)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(summary.task)}: large-batch study</title><style>{css(':root')}{STYLE}</style></head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _head(summary: Summary) -> str:
    counts: dict[str, Sized] = {"method": summary.methods, "batch size": summary.batches, "run": summary.records.runs}
    size = " · ".join(f"{len(things)} {word}{'s'[: len(things) != 1]}" for word, things in counts.items())
    return f'<header><p class="soft">{escape(summary.task)} · {size}</p><h1>{escape(summary.answer())}</h1></header>'


def _table(summary: Summary) -> str:
    best = {(cell.method, batch) for batch in summary.batches for cell in summary.ranking(batch)[:1]}
    body = []
    for method in summary.methods:
        row = _row(method)
        for batch in summary.batches:
            cell = summary.cells[method, batch]
            if cell.mean is None:
                row += f"<td>{'diverged' if cell.only_diverged else '–'}</td>"
                continue
            mark = ' class="best"' if (method, batch) in best and len(summary.methods) > 1 else ""
            value, _, half = summary.text(cell.mean, cell.half_width).partition(" ± ")
            interval = f" ± {half}" if half else ""
            row += f"<td{mark}><b>{value}</b>{interval}<br><small>{escape(' · '.join(details(cell)))}</small></td>"
        body.append(row)
    mark = " ▲ marks the best mean of a column." if len(summary.methods) > 1 else ""
    head = ["method", *(f"batch {batch}" for batch in summary.batches)]
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in [caption(summary) + mark, *footnotes(summary)])
    return _section("Results", _grid("Results", head, body) + notes)


def _grid(name: str, head: Iterable[str], body: Iterable[str], kind: str = "") -> str:
    """A table in a box of its own that scrolls, so that the page never has to."""
    columns = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table class="{kind}">'
        f"<thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _row(head: str, *cells: object) -> str:
    """Escaped cells; a long name may break inside its settings."""
    name = escape(head).replace("(", "(<wbr>").replace("_", "_<wbr>")
    return f'<th scope="row">{name}</th>' + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"


FIGURES: list[tuple[str, Callable[[Summary], Figure], str]] = [
    ("batch", by_batch, "Bars are 95 % intervals over seeds. A cross marks a batch size at which everything diverged."),
    (
        "curves",
        curves,
        "Thick: the mean over finished seeds. Thin: each seed. The first, steep part is cut off.",
    ),
    (
        "lr",
        by_rate,
        "Each point is one trial on validation data. A ring marks the chosen rate, a cross a rate that diverged.",
    ),
]


def _figure(summary: Summary, name: str, draw: Callable[[Summary], Figure], note: str) -> str:
    figure = draw(summary)
    if not figure.panels:
        return _section(figure.title, '<p class="soft">No run to draw here yet.</p>')
    return _section(figure.title, f'<p class="soft">{escape(note)}</p>{inline(figure, name)}')


def _rates(summary: Summary) -> str:
    """How the rates were chosen, in a form that lets a reader doubt them."""
    cells = [cell for cell in summary.cells.values() if cell.grid]
    trials = [run for run in summary.records.runs if run.part == "select"]
    if not cells:
        return _section("How the rates were chosen", "<p>No record of a search: the rates were given.</p>")
    sizes = sorted({len(cell.grid) for cell in cells})
    extended = [cell.extensions for cell in cells if cell.extensions is not None]
    edges, lost = (
        [cell.at_edge for cell in cells if cell.lr is not None],
        sum(run.status == "diverged" for run in trials),
    )
    facts = {
        "grid": f"{' to '.join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))} rates for each method and batch size",
        "extended": f"{sum(extended)} times in all, {max(extended)} at most" if extended else "not recorded",
        "at the edge": f"{sum(edges)} of {len(edges)} chosen rates lie at the edge of their grid",
        "diverged": f"{lost} of {len(trials)} trials",
    }
    intro = "<p>Every rate was chosen on validation data, with one seed; the results are those of full runs at it.</p>"
    body = [
        _row(
            cell.method,
            cell.batch,
            "–" if cell.lr is None else f"{cell.lr:g}",
            ", ".join(f"{lr:g}" for lr in cell.grid),
            "–" if cell.extensions is None else cell.extensions,
            "yes" if cell.at_edge else "no",
            sum(map(math.isnan, cell.selection.values())),
        )
        for cell in cells
    ]
    head = ["method", "batch", "chosen", "rates tried", "extended", "at edge", "diverged"]
    listing = f"<details><summary>Each choice</summary>{_grid('Each choice', head, body, kind='runs')}</details>"
    return _section("How the rates were chosen", intro + _facts(facts) + listing)


def _facts(facts: dict[str, str], more: str = "") -> str:
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    return f"<dl>{items}{more}</dl>"


def _provenance(summary: Summary) -> str:
    """What was run where: enough to run it again."""
    runs, study = summary.records.runs, summary.records.study
    commands = [study.command] if study and study.command else sorted({run.command for run in runs if run.command})
    seconds = [run.seconds for run in runs if run.seconds is not None]
    facts = {
        "hardware": _tally(", ".join(f"{k} {v}" for k, v in run.hardware.items()) for run in runs),
        "versions": _tally(", ".join(f"{k} {v}" for k, v in run.versions.items()) for run in runs),
        "commit": _tally(run.commit or "not recorded" for run in runs),
        "time": f"{_duration(sum(seconds))} in {len(seconds)} runs" if seconds else "not recorded",
    }
    lines = "<br>".join(f"<code>{escape(command)}</code>" for command in commands[:3])
    more = f"<br>and {len(commands) - 3} more" if len(commands) > 3 else ""
    command = f"<dt>command</dt><dd>{lines or 'not recorded'}{more}</dd>"
    body = [
        _row(
            run.name,
            run.method,
            run.batch,
            f"{run.lr:g}",
            run.seed,
            "trial" if run.part == "select" else run.part,
            run.status,
            "–" if (score := run.score(summary.metric)) is None or not math.isfinite(score) else summary.text(score),
            "–" if run.seconds is None else f"{run.seconds:.1f}",
            run.hash[:8],
        )
        for run in runs
    ]
    head = ["run", "method", "batch", "lr", "seed", "part", "status", summary.metric, "seconds", "hash"]
    listing = f"<details><summary>All {len(runs)} runs</summary>{_grid('All runs', head, body, kind='runs')}</details>"
    return _section("What was run where", _facts(facts, command) + listing)


def _tally(words: Iterable[str]) -> str:
    """Each distinct word, with its count if there are several."""
    counts = Counter(word or "not recorded" for word in words)
    if len(counts) < 2:
        return next(iter(counts), "not recorded")
    return "; ".join(f"{word} ({count} runs)" for word, count in counts.most_common())


def _duration(seconds: float) -> str:
    """Seconds in the unit a person would use.

    >>> _duration(12.3), _duration(600), _duration(9000)
    ('12.3 s', '10.0 min', '2.5 h')
    """
    return (
        f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
