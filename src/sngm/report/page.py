"""Write the report of a study: a table, figures, and one page that opens offline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from ..files import write_atomically
from ..progress import duration
from .drawing import standalone
from .figures import Figure, by_batch, by_rate, by_trials, curves
from .html import render, words
from .summary import Summary, summarise
from .tables import caption, details, footnotes, table

FIGURES: dict[str, tuple[Callable[[Summary], Figure], str]] = {
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
TRIALS = (
    by_trials,
    "Thick: the mean, over all choices of k trials, of their best validation score. Thin: what 10 % and 90 % of the "
    "choices reach. The earlier a line is high, the easier the method is to tune.",
)


def write(folder: Path) -> Path:
    """Write table.md, the figures and report.html into a folder of records.

    Every file is made before the first is replaced.

    Returns:
        The path of report.html.

    Raises:
        FileNotFoundError: the folder holds no record.
    """
    folder = Path(folder)
    summary = summarise(folder)
    files = {f"{name}.svg": standalone(figure(summary)) for name, (figure, _) in figures_of(summary).items()}
    files |= {"table.md": table(summary), "report.html": html(summary)}
    for name, text in files.items():
        write_atomically(folder / name, text.encode())
    return folder / "report.html"


def figures_of(summary: Summary) -> dict[str, tuple[Callable[[Summary], Figure], str]]:
    """Return the figures of a report, with the text below each; studies that searched settings have one more."""
    searched = any(cell.search for cell in summary.cells.values())
    return {**FIGURES, "trials": TRIALS} if searched else FIGURES


def html(summary: Summary) -> str:
    """Return the page."""
    runs, study = summary.records.runs, summary.records.study
    counts = {"method": len(summary.methods), "batch size": len(summary.batches), "run": len(runs)}
    size = [f"{count} {word}{'s' * (count != 1)}" for word, count in counts.items()]
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return render(
        "study",
        title=f"{summary.task}: large-batch study",
        subject=" · ".join([summary.task, *size]),
        answer=summary.answer(),
        summary=summary,
        headings=[f"batch {batch}" for batch in summary.batches],
        several=len(summary.methods) > 1,
        details=details,
        caption=caption(summary),
        footnotes=footnotes(summary),
        figures=[(figure(summary), note) for figure, note in figures_of(summary).values()],
        cells=[cell for cell in summary.cells.values() if cell.grid],
        searched=[cell for cell in summary.cells.values() if cell.search],
        origin={
            "hardware": _tally(words(run.hardware) for run in runs),
            "versions": _tally(words(run.versions) for run in runs),
            "commit": _tally(run.commit or "" for run in runs),
            "time": f"{duration(sum(seconds))} in {len(seconds)} runs" if seconds else "not recorded",
        },
        commands=[study.command] if study and study.command else sorted({run.command for run in runs if run.command}),
        runs=runs,
    )


def _tally(values: Iterable[str]) -> str:
    """Return each distinct value, with its count if there are several."""
    counts = Counter(value or "not recorded" for value in values)
    if len(counts) < 2:
        return next(iter(counts), "not recorded")
    return "; ".join(f"{value} ({count} runs)" for value, count in counts.most_common())
