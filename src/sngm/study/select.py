"""Choice of a learning rate by validation score. The grid is extended if the best learning rate is at its edge."""

from __future__ import annotations

import math
from collections.abc import Mapping

EXTENSIONS = 3  # the most learning rates added to a grid, the same for every method

# validation (metric, loss) by learning rate; None if the run diverged
Scores = Mapping[float, tuple[float, float] | None]


def best_rate(scores: Scores, higher_is_better: bool = True) -> float | None:
    """Return the learning rate with the best metric; None if all runs diverged.

    If metrics are equal, the lower loss decides; if losses are equal too, the lower learning rate.

    >>> best_rate({0.1: (0.9, 0.5), 0.3: (0.9, 0.4), 1.0: None})
    0.3
    """
    finished = {lr: score for lr, score in scores.items() if score and not any(map(math.isnan, score))}
    if not finished:
        return None
    sign = -1.0 if higher_is_better else 1.0
    return min(finished, key=lambda lr: (sign * finished[lr][0], finished[lr][1], lr))


def at_edge(scores: Scores, higher_is_better: bool = True) -> bool:
    """Return whether the best learning rate is the lowest or highest one tried, or all runs diverged.

    The result is False if only one learning rate was tried.
    """
    best = best_rate(scores, higher_is_better)
    return len(scores) > 1 and (best is None or best in (min(scores), max(scores)))


def next_rate(scores: Scores, higher_is_better: bool = True, first: int = 0) -> float | None:
    """Return the learning rate to try next, one grid step beyond the lowest or highest; None to stop.

    Args:
        scores: scores of the learning rates tried so far.
        higher_is_better: whether a higher metric is better.
        first: the number of learning rates in the original grid.

    >>> next_rate({0.1: (0.8, 1.0), 0.3: (0.9, 0.5)}, first=2)
    0.9
    >>> next_rate({0.1: (0.8, 1.0), 0.3: (0.9, 0.5), 0.9: (0.7, 2.0)}, first=2) is None
    True
    """
    if len(scores) < 2 or len(scores) - first >= EXTENSIONS or not at_edge(scores, higher_is_better):
        return None
    rates = sorted(scores)
    best = best_rate(scores, higher_is_better)
    low, high = rates[0], rates[-1]
    beyond = high * (high / rates[-2]) if best == high else low * (low / rates[1])
    rounded = float(f"{beyond:.3g}")
    return None if rounded in scores else rounded  # in a very fine grid, rounding may repeat a learning rate
