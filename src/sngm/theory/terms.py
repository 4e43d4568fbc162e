"""Argument validation, and bounds as functions of eta, the learning rate, with the eta that minimises a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = float | NDArray[Any]
Number: TypeAlias = Any  # a float if every argument was a float, otherwise an array

ROUNDING = 1e-12  # relative tolerance: equality in a condition must not fail because of rounding

_AT_LEAST_0 = ("a finite number of at least 0", lambda x: (x >= 0) & (x < math.inf))
_ABOVE_0 = ("a finite number above 0", lambda x: (x > 0) & (x < math.inf))
RANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("gap", "L", "sigma", "lam"), _AT_LEAST_0),
    **dict.fromkeys(("steps", "batch", "gradients", "gamma_l", "gamma_u"), _ABOVE_0),
    "eta": ("above 0", lambda x: x > 0),  # inf is allowed, because it is the best eta if no term grows with eta
    "beta": ("at least 0 and less than 1", lambda x: (x >= 0) & (x < 1)),
    "blocks": ("a finite number of at least 1", lambda x: (x >= 1) & (x < math.inf)),
    "rho": ("above 0 and at most 1", lambda x: (x > 0) & (x <= 1 + ROUNDING)),
}


def validate(**arguments: Floats) -> list[Any]:
    """Return the arguments as float64 arrays, broadcast to one shape.

    Raises:
        ValueError: an argument is outside its range in `RANGES`.
    """
    arrays = [np.asarray(value, dtype=np.float64) + 0.0 for value in arguments.values()]  # + 0.0 turns -0.0 into 0.0
    for name, array in zip(arguments, arrays, strict=True):
        allowed, in_range = RANGES[name]
        if not np.all(in_range(array)):
            raise ValueError(f"{name} must be {allowed}, got {array[~in_range(array)].flat[0]}")
    return list(np.broadcast_arrays(*arrays))


def as_number(value: Number) -> Number:
    """Return a Python float for a scalar, and a writable copy of an array."""
    return float(value) if np.ndim(value) == 0 else np.array(value)


def largest_eta(slope: Number) -> Number:
    """Return the largest eta with ``eta * slope <= 1``; it is infinite if slope is 0."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.divide(1.0, slope)


def check_condition(eta: Number, limit: Number, condition: str) -> None:
    """Raise ValueError if eta is above its limit; the message states the condition and the largest admissible eta."""
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
    """The admissible learning rate with the lowest bound, and that bound."""

    eta: Number
    bound: Number


class Terms(NamedTuple):
    """The bound ``inverse / eta + linear * eta + square * eta**2 + constant``, which holds for eta up to `limit`."""

    inverse: Number
    linear: Number
    constant: Number
    limit: Number = math.inf
    condition: str = ""
    """The condition that sets `limit`, for error messages."""
    square: Number = 0.0

    def at(self, eta: Floats) -> Number:
        """Return the bound at eta.

        Raises:
            ValueError: eta is not admissible.
        """
        (eta,) = validate(eta=eta)
        check_condition(eta, self.limit, self.condition)
        return as_number(self._value(eta))

    def best(self) -> Best:
        """Return the admissible eta with the lowest bound, in closed form, and that bound.

        The derivative is zero where ``2 * square * eta**3 + linear * eta**2 == inverse``. For x = 1/eta this is the
        cubic ``x**3 == 3 * p * x + 2 * p**1.5 * t``, with 3 * p = linear / inverse and p**1.5 * t = square / inverse.
        Its only positive root is ``x = 2 * sqrt(p) * cos(arccos(t) / 3)`` (Viète); for t above 1, cosh and arcosh
        replace cos and arccos. If square = 0, t is 0 and eta is sqrt(inverse / linear).
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            root = np.sqrt(self.inverse) / np.sqrt(self.linear)  # the ratio itself could overflow
            t = math.sqrt(27) * self.square / self.linear * root
            third = np.where(t <= 1, np.cos(np.arccos(np.minimum(t, 1)) / 3), np.cosh(np.arccosh(np.maximum(t, 1)) / 3))
            stationary = root * np.where(t > 0, math.sqrt(0.75) / third, 1.0)
        # If no term grows with eta (square > 0 implies linear > 0), the largest eta is the best.
        eta = np.minimum(np.where(self.linear > 0, stationary, math.inf), self.limit)
        return Best(as_number(eta), as_number(self._value(eta)))

    def _value(self, eta: Number) -> Number:
        def term(factor: Number, value: Number) -> Number:
            return np.where(np.equal(factor, 0), 0.0, value)  # 0 even if eta is 0 or inf

        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            grows = term(self.linear, self.linear * eta) + term(self.square, self.square * eta * eta)
            return term(self.inverse, self.inverse / eta) + grows + self.constant
