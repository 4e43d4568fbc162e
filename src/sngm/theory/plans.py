"""Batch size and learning rate for C single-sample gradients (Corollaries 1 and 2, Table 1); EXTRAP-SGD's order."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .bounds import kappa
from .terms import ROUNDING, Floats, Number, as_number, check_condition, largest_eta, validate


class Plan(NamedTuple):
    """Batch size, learning rate and steps for a budget (a number of single-sample gradients), and their bound.

    `batch` is a real number, as in the paper; use `whole_batch` and `whole_steps` for a run. `bound` is a bound on the
    mean of E||grad F|| over the steps, also for MSGD.
    """

    batch: Number
    lr: Number
    steps: Number
    """ceil(gradients / batch), as in the corollaries; these steps may exceed the budget by up to one batch."""
    bound: Number
    least_gradients: Number
    """The smallest budget at which lr satisfies the condition of the bound; 0 if lr satisfies it at every budget."""
    gradients: Number

    @property
    def proved(self) -> Any:
        """Whether lr satisfies the condition of the bound; if not, `bound` is not guaranteed."""
        enough = np.asarray(self.gradients) >= np.asarray(self.least_gradients) * (1 - 4 * ROUNDING)
        return bool(enough) if enough.ndim == 0 else enough

    @property
    def whole_batch(self) -> Any:
        """`batch` rounded down, but at least 1."""
        return _whole(np.maximum(1.0, np.floor(self.batch)))

    @property
    def whole_steps(self) -> Any:
        """The number of steps at batch size `whole_batch` that use up the budget."""
        return _whole(np.ceil(np.divide(self.gradients, self.whole_batch)))


def plan(
    gradients: Floats, method: str, *, gap: Floats = 1.0, L: Floats = 1.0, sigma: Floats = 1.0, beta: Floats = 0.9,
    lam: Floats = 0.0,
) -> Plan:  # fmt: skip
    """Return batch size, learning rate and bound of Table 1, for the method "msgd" or "sngm".

    C is the budget `gradients`, a number of single-sample gradients, and kappa is ``kappa(beta)``.

    - "sngm": ``batch = sqrt(C)`` and ``lr = sqrt(batch / C) = C^(-1/4)``, with the bound of Corollary 1. If lam > 0,
      the bound is that of Corollary 2, which needs ``C >= (8 kappa lam)^4`` (`least_gradients`); a smaller C raises
      ValueError.
    - "msgd": ``batch = min(sqrt(C) / L, C^(1/4))`` and ``lr = batch / sqrt(C)``; the bound is the square root of
      `msgd_bound` at this batch and lr. Table 1 gives only orders, whose constants are taken as 1. So lr violates the
      condition of the bound, ``lr <= 1 / (kappa L)``, unless beta = 0 or ``C >= (kappa L)^4``; see `Plan.proved`.

    The assumptions are those of `smooth_bound`, or of `relaxed_bound` if lam > 0; for "msgd" those of `msgd_bound`,
    and lam must be 0.

    >>> found = plan(10**8, "sngm", gap=1, L=2, sigma=3, beta=0)
    >>> found.batch, found.lr, found.steps, found.bound
    (10000.0, 0.01, 10000.0, 0.08)
    >>> plan(10**8, "msgd", gap=1, L=2, sigma=3, beta=0).batch
    100.0
    """
    gradients, gap, L, sigma, beta, lam = validate(gradients=gradients, gap=gap, L=L, sigma=sigma, beta=beta, lam=lam)
    root = np.sqrt(gradients)
    fourth = np.sqrt(root)  # ** 0.25 would be inexact for whole numbers
    if method.lower() == "sngm":
        batch, lr = root, 1 / fourth
        least = least_gradients(beta, lam)
        enough = f"at least {float(np.max(least))} gradients (Corollary 2)"
        check_condition(lr, largest_eta(8 * kappa(beta) * lam), f"8 * eta * kappa * lam <= 1, that is {enough}")
        smooth = (1 - beta) * gap + L * kappa(beta) / 2 + 2 * sigma
        relaxed = 2 * (1 - beta) * gap + 8 * L * kappa(beta) + 4 * sigma
        bound = np.where(lam > 0, relaxed, smooth) / fourth
    elif method.lower() == "msgd":
        if np.any(lam > 0):
            raise ValueError("the bound of MSGD is for L-smooth functions: lam must be 0")
        with np.errstate(divide="ignore", over="ignore"):
            batch = np.minimum(root / L, fourth)
        lr = batch / root
        # The condition is eta <= 1 / (kappa L), and lr is at most 1/L.
        least = np.where(kappa(beta) <= 1 + ROUNDING, 0.0, _fourth_power(kappa(beta) * L))
        noise = L * np.square(sigma) / root + 4 * np.square(L * sigma * lr)
        bound = np.sqrt(2 * (1 - beta) * gap / root + noise / np.square(1 - beta))
    else:
        raise ValueError(f"method must be 'msgd' or 'sngm', got {method!r}")
    steps = np.ceil(gradients / batch * (1 - ROUNDING))  # so that a rounding error does not add a step
    return Plan(*map(as_number, (batch, lr, steps, bound, least, gradients)))


def least_gradients(beta: Floats, lam: Floats) -> Number:
    """Return the fewest gradients for which Corollary 2 holds, ``(8 kappa lam)^4`` with kappa = ``kappa(beta)``.

    >>> least_gradients(beta=0.0, lam=1.25)
    10000.0
    """
    beta, lam = validate(beta=beta, lam=lam)
    return as_number(_fourth_power(8 * kappa(beta) * lam))


def extrap_order(gradients: Floats, eta: Floats, batch: Floats, L: Floats) -> Number:
    """Return the order that Section 3 states for EXTRAP-SGD, ``B / (eta C) + (eta + eta^2) / B`` if ``eta <= 1 / L``.

    B is `batch` and C is `gradients`, the total number of single-sample gradients. The result is the order of the mean
    of E||grad F||^2, not a bound: every constant that O() hides is taken as 1, and so is the constant of the condition,
    ``eta <= 1 / L``; a larger eta raises ValueError. With eta = B / sqrt(C) the result is of order 1 / sqrt(C) for
    batches up to sqrt(C) / L, where eta is 1 / L.

    >>> extrap_order(gradients=10_000, eta=0.1, batch=10, L=1)
    0.021
    """
    gradients, eta, batch, L = validate(gradients=gradients, eta=eta, batch=batch, L=L)
    check_condition(eta, largest_eta(L), "eta <= 1 / L")
    return as_number(batch / (eta * gradients) + (eta + np.square(eta)) / batch)


def _fourth_power(x: Number) -> Number:
    return np.square(np.square(x))  # ** 4 would round differently for arrays


def _whole(value: Number) -> Any:
    return int(value) if np.ndim(value) == 0 else value.astype(np.int64)
