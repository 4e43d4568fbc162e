"""Write the report of a study: a table, three figures, and one page that opens offline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..durations import duration
from ..files import write_atomically
from .drawing import standalone
from .figures import by_batch, by_rate, curves
from .html import render
from .records import Run
from .summary import Summary, summarise
from .tables import caption, details, footnotes, table

FIGURES = {
    "batch": (
        by_batch,
        "Bars are 95 % intervals over at least three seeds; with two seeds, dots are the seeds. "
        "A cross marks a batch size at which every run diverged.",
    ),
    "curves": (curves, "Thick: the mean over finished seeds. Thin: each seed. The first, steep part is cut off."),
    "lr": (
        by_rate,
        "Each point is one trial on validation data. A ring marks the chosen learning rate, a cross one that diverged, "
        "a hollow marker at the edge a worse value than the axis shows.",
    ),
}


def write(folder: Path) -> Path:
    """Write table.md, curves.svg, batch.svg, lr.svg and report.html into a folder of records.

    Every file is made before the first is replaced.

    Returns:
        The path of report.html.

    Raises:
        FileNotFoundError: the folder holds no record.
    """
    folder = Path(folder)
    summary = summarise(folder)
    files = {f"{name}.svg": standalone(figure(summary)) for name, (figure, _) in FIGURES.items()}
    files |= {"table.md": table(summary), "report.html": html(summary)}
    for name, text in files.items():
        write_atomically(folder / name, text.encode())
    return folder / "report.html"


def html(summary: Summary) -> str:
    """Return the page."""
    runs, study = summary.records.runs, summary.records.study
    counts = {"method": len(summary.methods), "batch size": len(summary.batches), "run": len(runs)}
    size = [f"{count} {word}{'s' * (count != 1)}" for word, count in counts.items()]
    seconds = [run.seconds for run in runs if run.seconds is not None]
    rule = "Shaded: the best mean of a column, and those that Welch's test does not tell apart from it (p ≥ 0.05)."
    return render(
        "study",
        title=f"{summary.task}: large-batch study",
        subject=" · ".join([summary.task, *size]),
        answer=summary.answer(),
        summary=summary,
        details=details,
        leaders={batch: summary.leaders(batch) for batch in summary.batches},
        notes=[caption(summary), *([rule] if len(summary.methods) > 1 else []), *footnotes(summary)],
        figures=[(figure(summary), note) for figure, note in FIGURES.values()],
        **_search(summary),
        origin={
            "hardware": _tally(", ".join(f"{k} {v}" for k, v in run.hardware.items()) for run in runs),
            "versions": _tally(", ".join(f"{k} {v}" for k, v in run.versions.items()) for run in runs),
            "commit": _tally(run.commit or "" for run in runs),
            "time": f"{duration(sum(seconds))} in {len(seconds)} runs" if seconds else "not recorded",
        },
        commands=[study.command] if study and study.command else sorted({run.command for run in runs if run.command}),
        runs=[
            [run.name, run.method, run.batch, run.lr, run.seed, "trial" if run.part == "select" else run.part,
             run.status, _score(summary, run), "–" if run.seconds is None else f"{run.seconds:.1f}", run.hash[:8]]
            for run in runs
        ],
    )  # fmt: skip


def _score(summary: Summary, run: Run) -> str:
    score = run.score(summary.metric)
    return "–" if score is None or not math.isfinite(score) else summary.text(score)


def _search(summary: Summary) -> dict[str, Any]:
    """Return how the learning rates were chosen: some totals, and a row for each method and batch size."""
    cells = [cell for cell in summary.cells.values() if cell.grid]
    trials = [run.status for run in summary.records.runs if run.part == "select"]
    sizes = sorted({len(cell.grid) for cell in cells})
    extended = [cell.extensions for cell in cells if cell.extensions is not None]
    edges = [cell.at_edge for cell in cells if cell.lr is not None]
    facts = (
        {
            "tried": f"{' to '.join(map(str, dict.fromkeys(sizes[:1] + sizes[-1:])))} for each method and batch size",
            "extended": f"{sum(extended)} times in all, {max(extended)} at most" if extended else "not recorded",
            "at the edge": f"{sum(edges)} of {len(edges)} chosen learning rates are at the edge of their grid",
            "diverged": f"{trials.count('diverged')} of {len(trials)} trials",
        }
        if cells
        else {}
    )
    choices = [
        [cell.method, cell.batch, "–" if cell.lr is None else cell.lr, ", ".join(f"{lr:g}" for lr in cell.grid),
         "–" if cell.extensions is None else cell.extensions, "yes" if cell.at_edge else "no",
         sum(map(math.isnan, cell.selection.values()))]
        for cell in cells
    ]  # fmt: skip
    return {"search": facts, "choices": choices}


def _tally(words: Iterable[str]) -> str:
    """Return each distinct word, with its count if there are several."""
    counts = Counter(word or "not recorded" for word in words)
    if len(counts) < 2:
        return next(iter(counts), "not recorded")
    return "; ".join(f"{word} ({count} runs)" for word, count in counts.most_common())
