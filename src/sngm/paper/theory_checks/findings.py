"""What an experiment leaves: a verdict by a stated rule, and the numbers it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...report.figures import Figure

Array = NDArray[np.float64]

HOLDS, FAILS, OPEN = "holds", "fails", "open"
LEVEL = 0.99  # of the intervals over seeds
MET_WITHIN = 1e-9  # relative: a statement that is met with equality may seem exceeded by this much


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement of the paper, and what measurements say about it."""

    name: str
    statement: str
    rule: str
    """When it holds, when it fails, and when the numbers leave it open."""
    verdict: str
    measured: str
    expected: str = HOLDS
    """The verdict that docs/theory.md explains: "fails" for what is known not to hold as the check reads it."""
    why: str = ""
    """Where another verdict than "holds" is expected: the reason."""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    figures: dict[str, Figure] = field(default_factory=dict)
    """By the names of their files."""
    seconds: float = 0.0

    @property
    def surprising(self) -> bool:
        """Whether it contradicts what is proved or documented; one that is left open does not."""
        return self.verdict not in (self.expected, OPEN)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the figures."""
        found = {key: value for key, value in asdict(self).items() if key not in ("figures", "head", "rows")}
        numbers = [dict(zip(self.head, row, strict=True)) for row in self.rows]
        return {**found, "surprising": self.surprising, "numbers": numbers}


def interval(values: Array) -> tuple[Array, Array, Array]:
    """Mean and ends of the 99 % interval by Student's t, over the seeds along the last axis; infinite if one is.

    >>> [round(float(x), 2) for x in interval(np.array([1.0, 2.0, 3.0]))]
    [2.0, -3.73, 7.73]
    """
    from scipy.special import stdtrit

    count = values.shape[-1]
    finite = np.asarray(np.isfinite(values).all(axis=-1))
    values = np.where(finite[..., None], values, 0.0)
    mean = values.mean(axis=-1)
    half = stdtrit(count - 1, (1 + LEVEL) / 2) * values.std(axis=-1, ddof=1) / np.sqrt(count)
    low, high = (np.where(finite, end, np.inf) for end in (mean - half, mean + half))
    return np.where(finite, mean, np.inf), low, high


def judge(holds: Any, fails: Any) -> str:
    """The verdict where some things must all hold, and one that fails is enough.

    >>> judge([True, True], [False, False]), judge([True, False], [False, True]), judge([True, False], [False, False])
    ('holds', 'fails', 'open')
    """
    return FAILS if np.any(fails) else HOLDS if np.all(holds) else OPEN


def under(low: Any, high: Any, bound: Any) -> str:
    """The verdict on values that must lie under a bound, by the ends of their intervals."""
    limit = np.multiply(bound, 1 + MET_WITHIN)
    return judge(np.less_equal(high, limit), np.greater(low, limit))
