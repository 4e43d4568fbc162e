"""Time to accuracy: how soon each method reaches a target score, which the best method reaches at every batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from .records import Run
from .summary import Summary


class Reached(NamedTuple):
    """How soon one method at one batch size reaches the target, averaged over the seeds that reach it."""

    method: str
    batch: int
    seeds: int
    """Number of seeds that reach the target, out of `of`."""
    of: int
    epochs: float | None
    steps: float | None
    samples: float | None
    seconds: float | None
    """Training time without evaluation: that of the whole run times the fraction of its steps taken by then."""


def target(summary: Summary) -> float | None:
    """Return the score that every seed of the best method reaches at each batch size, rounded to three digits.

    The result is None if no run of the best methods has a curve, for example because metrics.jsonl is missing.
    """
    ranked = [ranking[0] for batch in summary.batches if (ranking := summary.ranking(batch))]
    worst, best = (min, max) if summary.higher_is_better else (max, min)
    runs = [run for cell in ranked for run in cell.runs if run.seed in cell.values]
    known = [best(scores) for run in runs if (scores := _scores(run, summary))]
    return _rounded(worst(known), summary.higher_is_better) if known else None


def time_to(summary: Summary, goal: float) -> list[Reached]:
    """Return how soon each method at each batch size first reaches a score on test data."""
    found = []
    for cell in summary.cells.values():
        ended = [run for run in cell.runs if run.status in ("finished", "diverged")]
        firsts = [first for run in ended if (first := _first(run, summary, goal))]
        if not ended:
            continue
        epochs, steps, seconds = (_mean(first[i] for first in firsts) for i in range(3))
        samples = None if steps is None else steps * cell.batch
        found.append(Reached(cell.method, cell.batch, len(firsts), len(ended), epochs, steps, samples, seconds))
    return found


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return fmean(known) if known else None


def _scores(run: Run, summary: Summary) -> list[float]:
    values = (entry.get(run.key(summary.metric), math.nan) for entry in run.curve)
    return [value for value in values if math.isfinite(value)]


def _first(run: Run, summary: Summary, goal: float) -> tuple[float, float, float] | None:
    """Return epoch, step and training seconds of the first epoch that reaches the goal; None if no epoch does."""
    sign = 1 if summary.higher_is_better else -1
    for entry in run.curve:
        if sign * entry.get(run.key(summary.metric), -sign * math.inf) >= sign * goal and "step" in entry:
            share = entry["step"] / run.curve[-1].get("step", math.nan)
            return entry["epoch"], entry["step"], share * (run.training_seconds or math.nan)
    return None


def _rounded(value: float, down: bool) -> float:
    """Round a target to three significant digits so that it is easier to reach: down, or up if lower scores are better.

    >>> _rounded(0.98765, True), _rounded(117.83, False), _rounded(0.5, True)
    (0.987, 118.0, 0.5)
    """
    if value == 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return float(f"{(math.floor(value / unit + 1e-9) if down else math.ceil(value / unit - 1e-9)) * unit:.3g}")
