"""Compare runs for ``sngm advise --verify``: of a recipe, of the advised settings and of the scaled recipe."""

from __future__ import annotations

from pathlib import Path

from .. import report
from ..report.stats import difference
from ..report.summary import Cell, Summary


def compare_runs(folder: Path, sides: list[tuple[str, int]]) -> tuple[str, Path]:
    """Compare the runs of methods, each at its batch; return the result in sentences, and the path of the report.

    Args:
        folder: folder that contains the run folders.
        sides: pairs of a method's label and a batch: one for the recipe, one for the advised settings and, if these
            have another method, one for the recipe's own method at the larger batch.
    """
    summary = report.summarise(folder)
    before, after, *scaled = (summary.cells[side] for side in sides)
    scores = f"{_score(summary, before)}, and {_score(summary, after)} (seeds: {before.n} and {after.n})"
    text = f"test {summary.metric} is {scores}: {_difference(summary, after, before)[0]}."
    headline = text[0].upper() + text[1:]
    for own in scaled:
        found, better = _difference(summary, after, own)
        do = {1: "; switching helps", -1: f"; keep {own.method}"}.get(better or 0, "")
        headline += f" Compared with {own.method} at the same batch: {found}{do}."
        score = f"{_score(summary, own)} (seeds: {own.n}), with linear scaling (lr {own.lr:g})"
        text += f" Your own method has {score}. Compared with that, {after.method}: {found}{do}."
    if before.method.partition("(")[0] == after.method.partition("(")[0]:
        text += " The advised settings are those of your own method, scaled to the larger batch; no other was tried."
    return text, report.write(folder, answer=headline)


def _score(summary: Summary, cell: Cell) -> str:
    lost = f", {cell.diverged} diverged" if cell.diverged else ""
    score = "no score" if cell.mean is None else summary.text(cell.mean, cell.half_width) + " %" * summary.percent
    return f"{score} with {cell.method} at batch {cell.batch}{lost}"


def _difference(summary: Summary, one: Cell, other: Cell) -> tuple[str, int | None]:
    """Return the difference between two cells (a method at a batch) in words, and a number.

    The number is 1 if the first cell is better, -1 if it is worse, 0 if the test does not decide, and None if the cells
    cannot be compared.
    """
    for cell, verdict in ((other, 1), (one, -1)):
        if cell.only_diverged:
            return f"every run of {cell.method} diverged", verdict if one.n or other.n else None
    found = difference(list(one.values.values()), list(other.values.values()))
    if found is None:
        return "no test is possible with so few seeds", None
    if one.diverged or other.diverged:
        return "runs diverged, so the means cannot be compared", None
    gap, half, p = found
    gain = gap if summary.higher_is_better else -gap
    if p >= 0.05:
        worse, better = summary.gap(half - gain), summary.gap(half + gain)
        return f"undecided, between {worse} worse and {better} better (95 %, p = {p:.2g}); more seeds may decide", 0
    return f"{summary.gap(abs(gain))} {'better' if gain > 0 else 'worse'} (p = {p:.2g})", 1 if gain > 0 else -1
