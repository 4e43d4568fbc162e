"""The comparison behind ``sngm advise --verify``: a recipe and the advised settings, over seeds."""

from __future__ import annotations

from pathlib import Path

from .. import report
from ..report.stats import difference
from ..report.summary import welch


def compare_runs(folder: Path, sides: list[tuple[str, int]]) -> tuple[str, Path]:
    """Compare the runs of two methods, each at its batch; return the result as a sentence, and the path of the report.

    Args:
        folder: folder that contains the run folders.
        sides: label and batch of the recipe, and label and batch of the advised settings.
    """
    page, summary = report.write(folder), report.summarise(folder)
    before, after = (summary.cells[side] for side in sides)
    values = []
    for cell in (before, after):
        lost = f", {cell.diverged} diverged" if cell.diverged else ""
        score = "no score" if cell.mean is None else summary.text(cell.mean, cell.half_width) + " %" * summary.percent
        values.append(f"{score} with {cell.method} at batch {cell.batch}{lost}")
    text = f"test {summary.metric} is {values[0]}, and {values[1]} ({before.n} and {after.n} seeds)"
    p, gap = welch(after, before), difference(list(after.values.values()), list(before.values.values()))
    if p is None or gap is None:
        return f"{text}: no test is possible.", page
    if p >= 0.05:
        return f"{text}: no measurable difference (p = {p:.2g}).", page
    better = (gap[0] > 0) == summary.higher_is_better
    return f"{text}: {summary.gap(abs(gap[0]))} {'better' if better else 'worse'} (p = {p:.2g}).", page
