"""The result of a check: a verdict by a stated rule, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...report.figures import Figure, Series

Array = NDArray[np.float64]

HOLDS, FAILS, OPEN = "holds", "fails", "open"
LEVEL = 0.99  # confidence level of the intervals over seeds
ROUNDING = 1e-9  # relative tolerance for bounds that are reached with equality


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement of the paper, and the verdict on it, with the measurements behind the verdict."""

    statement: str
    rule: str
    """The rule by which the statement holds, fails, or is left open."""
    verdict: str
    measured: str
    expected: str = HOLDS
    """The verdict in docs/theory.md: "fails" if the statement, as this check interprets it, is known not to hold."""
    why: str = ""
    """The reason, if the expected verdict is not "holds"."""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    figures: dict[str, Figure] = field(default_factory=dict)
    """Figures by file name."""
    name: str = ""
    seconds: float = 0.0

    @property
    def surprising(self) -> bool:
        """Whether the verdict contradicts the documented one; "open" does not."""
        return self.verdict not in (self.expected, OPEN)

    def as_dict(self) -> dict[str, Any]:
        """Return the finding for JSON, without the figures."""
        found = {key: value for key, value in asdict(self).items() if key not in ("figures", "head", "rows")}
        numbers = [dict(zip(self.head, row, strict=True)) for row in self.rows]
        return {"name": self.name, **found, "surprising": self.surprising, "numbers": numbers}


def chart(
    title: str, description: str, x_label: str, y_label: str, panels: dict[str, list[Series]], log: str = ""
) -> Figure:
    """Return a figure in which lower values are better; `log` names the logarithmic axes, such as "xy"."""
    return Figure(
        title, description, x_label, y_label, panels, log_x="x" in log, log_y="y" in log, worst_at_bottom=False
    )


def digits(value: float, count: int = 4) -> float:
    """Round to `count` significant digits.

    >>> digits(0.123456), digits(123456, 2)
    (0.1235, 120000.0)
    """
    return float(f"{value:.{count}g}")


class Interval(NamedTuple):
    """Means over the seeds, and the ends of their confidence intervals."""

    mean: Array
    low: Array
    high: Array


def interval(values: Array) -> Interval:
    """Return the mean over the seeds (the last axis), and the ends of its 99 % interval by Student's t.

    All three are infinite if one of the values is infinite.

    >>> [round(float(x), 2) for x in interval(np.array([1.0, 2.0, 3.0]))]
    [2.0, -3.73, 7.73]
    """
    from scipy.special import stdtrit

    count = values.shape[-1]
    finite = np.asarray(np.isfinite(values).all(axis=-1))
    values = np.where(finite[..., None], values, 0.0)
    mean = values.mean(axis=-1)
    half = stdtrit(count - 1, (1 + LEVEL) / 2) * values.std(axis=-1, ddof=1) / np.sqrt(count)
    return Interval(*(np.where(finite, value, np.inf) for value in (mean, mean - half, mean + half)))


def judge(holds: Any, fails: Any) -> str:
    """Return "fails" if any of `fails` is true, "holds" if all of `holds` are true, "open" otherwise.

    >>> judge([True, True], [False, False]), judge([True, False], [False, True]), judge([True, False], [False, False])
    ('holds', 'fails', 'open')
    """
    return FAILS if np.any(fails) else HOLDS if np.all(holds) else OPEN


def under(low: Any, high: Any, bound: Any) -> str:
    """Return the verdict on whether values are at most a bound, from the ends `low` and `high` of their intervals."""
    limit = np.multiply(bound, 1 + ROUNDING)
    return judge(np.less_equal(high, limit), np.greater(low, limit))
