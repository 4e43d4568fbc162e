"""Student's t intervals and Welch's test for means over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the mean's 95 % interval by Student's t; None for fewer than two values.

    >>> round(half_width([0.97, 0.98, 0.96]), 4)
    0.0248
    """
    return _half_width((1, values))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the difference of two means, half the width of its 95 % interval and its p-value, by Welch.

    The result is None if no test is possible, see `contrast`.

    >>> tuple(round(value, 4) for value in difference([0.97, 0.98, 0.96], [0.93, 0.95, 0.94]))
    (0.03, 0.0227, 0.0213)
    """
    groups = (1, ours), (-1, theirs)
    half, p = _half_width(*groups), contrast(*groups)
    return None if half is None or p is None else (fmean(ours) - fmean(theirs), half, p)


def contrast(*groups: tuple[float, Sequence[float]]) -> float | None:
    """Return the p-value of the hypothesis that a weighted sum of means is zero, by Welch and Satterthwaite.

    Each group is a pair (weight, values). With weights 1 and -1 this is Welch's test. The result is None if no test is
    possible: a group has fewer than two values, or all values within each group are equal.

    >>> round(contrast((1, [0.97, 0.98, 0.96]), (-1, [0.93, 0.95, 0.94])), 3)
    0.021
    """
    from scipy.stats import t  # imported here, because it is slow to import and most commands do not need it

    error, df = _standard_error(groups)
    return float(2 * t.sf(abs(sum(w * fmean(values) for w, values in groups)) / error, df)) if error else None


def _half_width(*groups: tuple[float, Sequence[float]]) -> float | None:
    from scipy.stats import t

    error, df = _standard_error(groups)
    return None if error is None else error * float(t.ppf(0.975, df))


def _standard_error(groups: Sequence[tuple[float, Sequence[float]]]) -> tuple[float | None, float]:
    """Return the standard error of a weighted sum of means (None if it is undefined) and its degrees of freedom."""
    if any(len(values) < 2 for _, values in groups):
        return None, 0
    parts = [(w * w * variance(values) / len(values), len(values) - 1) for w, values in groups]
    square = sum(part for part, _ in parts)
    return math.sqrt(square), square**2 / sum(part**2 / free for part, free in parts) if square > 0 else 1
