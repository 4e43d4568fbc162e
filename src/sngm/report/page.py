"""One page that says what a study found: no network, no scripts, nothing in it that the records do not hold."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sized
from html import escape
from pathlib import Path

from ..progress import duration
from .figures import Figure, by_batch, by_rate, curves, inline, standalone
from .html import box, document, fact_list, section, table_row
from .stats import Summary, summarise
from .tables import caption, details, footnotes, table


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
    except OSError as error:
        named = {str(draft): str(path) for draft, path in drafts.items()}  # nobody has heard of the drafts
        error.filename, error.filename2 = named.get(str(error.filename), error.filename), None
        raise
    finally:
        for draft in drafts:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
    return folder / "report.html"


def html(summary: Summary) -> str:
    """The page. All text is escaped."""
    parts = [_head(summary), _table(summary)]
    parts += [_figure(summary, *figure) for figure in FIGURES]
    parts += [_rates(summary), _provenance(summary)]
    return document(f"{summary.task}: large-batch study", "".join(parts))


def _head(summary: Summary) -> str:
    counts: dict[str, Sized] = {"method": summary.methods, "batch size": summary.batches, "run": summary.records.runs}
    size = " · ".join(f"{len(things)} {word}{'s'[: len(things) != 1]}" for word, things in counts.items())
    return f'<header><p class="soft">{escape(summary.task)} · {size}</p><h1>{escape(summary.answer())}</h1></header>'


def _table(summary: Summary) -> str:
    best = {(cell.method, batch) for batch in summary.batches for cell in summary.ranking(batch)[:1]}
    body = []
    for method in summary.methods:
        row = table_row(method)
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
    return section("Results", box("Results", head, body) + notes)


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
        return section(figure.title, '<p class="soft">No run to draw here yet.</p>')
    return section(figure.title, f'<p class="soft">{escape(note)}</p>{inline(figure, name)}')


def _rates(summary: Summary) -> str:
    """How the rates were chosen, in a form that lets a reader doubt them."""
    cells = [cell for cell in summary.cells.values() if cell.grid]
    trials = [run for run in summary.records.runs if run.part == "select"]
    if not cells:
        return section("How the rates were chosen", "<p>No record of a search: the rates were given.</p>")
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
        table_row(
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
    listing = f"<details><summary>Each choice</summary>{box('Each choice', head, body, kind='runs')}</details>"
    return section("How the rates were chosen", intro + fact_list(facts) + listing)


def _provenance(summary: Summary) -> str:
    """What was run where: enough to run it again."""
    runs, study = summary.records.runs, summary.records.study
    commands = [study.command] if study and study.command else sorted({run.command for run in runs if run.command})
    seconds = [run.seconds for run in runs if run.seconds is not None]
    facts = {
        "hardware": _tally(", ".join(f"{k} {v}" for k, v in run.hardware.items()) for run in runs),
        "versions": _tally(", ".join(f"{k} {v}" for k, v in run.versions.items()) for run in runs),
        "commit": _tally(run.commit or "not recorded" for run in runs),
        "time": f"{duration(sum(seconds))} in {len(seconds)} runs" if seconds else "not recorded",
    }
    lines = "<br>".join(f"<code>{escape(command)}</code>" for command in commands[:3])
    more = f"<br>and {len(commands) - 3} more" if len(commands) > 3 else ""
    command = f"<dt>command</dt><dd>{lines or 'not recorded'}{more}</dd>"
    body = [
        table_row(
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
    listing = f"<details><summary>All {len(runs)} runs</summary>{box('All runs', head, body, kind='runs')}</details>"
    return section("What was run where", fact_list(facts, command) + listing)


def _tally(words: Iterable[str]) -> str:
    """Each distinct word, with its count if there are several."""
    counts = Counter(word or "not recorded" for word in words)
    if len(counts) < 2:
        return next(iter(counts), "not recorded")
    return "; ".join(f"{word} ({count} runs)" for word, count in counts.most_common())
