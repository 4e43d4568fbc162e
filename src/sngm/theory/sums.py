"""What every statement needs: checked arguments, and sums like ``a / eta + b * eta + c`` with their lowest point."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = float | NDArray[Any]
Number: TypeAlias = Any  # a float where every argument was one, otherwise an array

ROUNDING = 1e-12  # a condition that is met with equality must not fail by a last digit

_AT_LEAST_0 = ("a finite number of at least 0", lambda x: (x >= 0) & (x < math.inf))
_ABOVE_0 = ("a finite number above 0", lambda x: (x > 0) & (x < math.inf))
RANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("gap", "L", "sigma", "lam"), _AT_LEAST_0),
    **dict.fromkeys(("steps", "batch", "gradients", "gamma_l", "gamma_u"), _ABOVE_0),
    "eta": ("above 0", lambda x: x > 0),  # inf is allowed: it is the best one where nothing holds it back
    "beta": ("at least 0 and less than 1", lambda x: (x >= 0) & (x < 1)),
    "blocks": ("a finite number of at least 1", lambda x: (x >= 1) & (x < math.inf)),
    "rho": ("above 0 and at most 1", lambda x: (x > 0) & (x <= 1 + ROUNDING)),
}


def read(**arguments: Floats) -> list[Any]:
    """The arguments as float64 arrays of one shape; ValueError for one that is out of its range."""
    arrays = [np.asarray(value, dtype=np.float64) + 0.0 for value in arguments.values()]  # + 0.0: -0.0 becomes 0.0
    for name, array in zip(arguments, arrays, strict=True):
        words, fits = RANGES[name]
        if not np.all(fits(array)):
            raise ValueError(f"{name} must be {words}, got {array[~fits(array)].flat[0]}")
    return list(np.broadcast_arrays(*arrays))


def number(value: Number) -> Number:
    """A python float if there is just one value, otherwise an array of its own."""
    return float(value) if np.ndim(value) == 0 else np.array(value)


def largest(slope: Number) -> Number:
    """The largest eta with ``eta * slope <= 1``."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.divide(1.0, slope)


def within(eta: Number, limit: Number, condition: str) -> None:
    """ValueError, with the condition and the largest admissible eta, where eta is above its limit."""
    above = np.greater(eta, limit * (1 + ROUNDING))
    if not np.any(above):
        return
    if np.ndim(above) == 0:
        found = f"eta is {float(eta)}, and the largest admissible eta is {float(limit)}"
    else:
        found = (
            f"{np.count_nonzero(above)} of {above.size} elements violate it, "
            f"and the largest admissible eta for all of them is {float(np.min(limit))}"
        )
    raise ValueError(f"the statement needs {condition}: {found}")


class Best(NamedTuple):
    """The learning rate where a bound is lowest among those its theorem admits, and the bound there."""

    eta: Number
    bound: Number


class Sum(NamedTuple):
    """``over / eta + times * eta + square * eta**2 + rest``, for eta up to `limit`, where `condition` ends."""

    over: Number
    times: Number
    rest: Number
    limit: Number = math.inf
    condition: str = ""
    square: Number = 0.0

    def at(self, eta: Floats) -> Number:
        """The value at eta; ValueError where eta is not admissible."""
        (eta,) = read(eta=eta)
        within(eta, self.limit, self.condition)
        return number(self._value(eta))

    def best(self) -> Best:
        """The admissible eta where the sum is lowest, in closed form.

        The derivative is zero where ``2 * square * eta**3 + times * eta**2 == over``. For x = 1/eta this is the cubic
        ``x**3 == 3 * p * x + 2 * p**1.5 * t`` with 3 * p = times / over, and its one positive root is
        ``x = 2 * sqrt(p) * cos(arccos(t) / 3)`` (Viète), with cosh for t above 1. Without a square, t is 0 and eta is
        sqrt(over / times).
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            root = np.sqrt(self.over) / np.sqrt(self.times)  # not of the ratio, which may overflow
            t = math.sqrt(27) * self.square / self.times * root
            third = np.where(t <= 1, np.cos(np.arccos(np.minimum(t, 1)) / 3), np.cosh(np.arccosh(np.maximum(t, 1)) / 3))
            turn = root * np.where(t > 0, math.sqrt(0.75) / third, 1.0)
        # Where nothing grows with eta (a square never comes without `times`), the largest eta is the best.
        eta = np.minimum(np.where(self.times > 0, turn, math.inf), self.limit)
        return Best(number(eta), number(self._value(eta)))

    def _value(self, eta: Number) -> Number:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            # A term whose factor is 0 is 0, also at the limits eta = 0 and eta = inf.
            falls = np.where(np.equal(self.over, 0), 0.0, self.over / eta)
            grows = np.where(np.equal(self.times, 0), 0.0, self.times * eta)
            grows = grows + np.where(np.equal(self.square, 0), 0.0, self.square * eta * eta)
        return falls + grows + self.rest
