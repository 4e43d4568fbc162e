"""Learning rate schedules: functions from the step to a factor that multiplies the base learning rate.

`plateau` also depends on the recorded validation scores. Schedules have no other state, so a resumed run has the same
learning rates as an uninterrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..optim.registry import nearest
from ..parsing import parse_call


@dataclass(frozen=True, slots=True)
class Moment:
    """Position in a run: `step` of `steps`, `epoch` of `epochs`; `history` has the validation scores of past epochs."""

    step: int
    steps: int
    epoch: int
    epochs: int
    history: Sequence[float] = ()
    higher_is_better: bool = True


def constant(_: Moment) -> float:
    """Return 1 at every step."""
    return 1.0


def cosine(at: Moment) -> float:
    """Return a factor that falls from 1 to 0 as half a cosine, and changes once per epoch, as in the SNGM paper."""
    return 0.5 * (1.0 + math.cos(math.pi * at.epoch / at.epochs))


def linear(at: Moment) -> float:
    """Return a factor that falls linearly from 1 to 0, and changes at every step."""
    return 1.0 - at.step / at.steps


def polynomial(at: Moment, power: float = 2.0) -> float:
    """Return ``(1 - step/steps) ** power``."""
    return float((1.0 - at.step / at.steps) ** power)


def plateau(at: Moment, factor: float = 4.0, patience: int = 0) -> float:
    """Return 1, divided by `factor` each time the validation score has not improved for more than `patience` epochs.

    >>> plateau(Moment(30, 100, 3, 10, history=[0.5, 0.6, 0.55], higher_is_better=True))
    0.25
    """
    best, waited, value = -math.inf, 0, 1.0
    for score in at.history:
        score = score if at.higher_is_better else -score
        if score > best:  # False if the score is NaN
            best, waited = score, 0
        else:
            waited += 1
            if waited > patience:
                value, waited = value / factor, 0
    return value


SCHEDULES: dict[str, Callable[..., float]] = {f.__name__: f for f in (constant, cosine, linear, polynomial, plateau)}
LIMITS = {"power": (0.0, math.inf), "factor": (1.0, math.inf), "patience": (0, math.inf)}


class Schedule:
    """A schedule given by name, with a linear warm-up over the first `warmup` epochs.

    >>> Schedule("cosine", warmup=2)(Moment(step=0, steps=100, epoch=0, epochs=10))
    0.05
    """

    def __init__(self, text: str, warmup: float = 0.0) -> None:
        name, settings = parse_call(text)
        if name not in SCHEDULES:
            meant = nearest(name, list(SCHEDULES))
            raise UsageError(f"`schedule` must be one of {', '.join(SCHEDULES)}, got {name!r}{meant}")
        self.function = SCHEDULES[name]
        self.settings: dict[str, Any] = settings
        allowed = self.function.__code__.co_varnames[1 : self.function.__code__.co_argcount]
        for key, value in settings.items():
            if key not in allowed:
                raise UsageError(f"{name} has no setting {key!r}; it has {', '.join(allowed) or 'none'}")
            low, high = LIMITS[key]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < high:
                raise UsageError(f"{name}: {key} must be a number of at least {low}, got {value!r}")
        if not 0.0 <= warmup < math.inf:
            raise UsageError(f"`warmup` must be a finite number of epochs >= 0, got {warmup!r}")
        self.warmup = warmup
        self.needs_history = self.function is plateau

    def __call__(self, at: Moment) -> float:
        value = self.function(at, **self.settings)
        warm = self.warmup * at.steps / at.epochs
        return value if at.step + 1 >= warm else value * (at.step + 1) / warm
