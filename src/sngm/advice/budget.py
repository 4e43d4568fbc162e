"""Largest batch and learning rate of each method for a fixed total of gradients (the budget), by the paper's bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import theory
from ..errors import UsageError
from .facts import GIVEN, MEASURED, RULE, THEORY, Fact, fact

NEAR_LOWEST = 1.1  # a batch is allowed if its bound is at most this factor times the lowest bound of all methods
ROUNDING = 1e-9  # relative difference of bounds that may be a rounding error
NUMBERS = ("batch", "lr", "steps", "bound", "best_batch", "best_bound")
Record = dict[str, Any]


class Constants(NamedTuple):
    """Constants of the convergence bounds in `sngm.theory`.

    Attributes:
        gap: the loss at the start minus its minimum.
        sigma: the standard deviation of a sample's gradient.
        beta: momentum.
        L: the largest norm of the Hessian; None if only relaxed smoothness is known.
        relaxed: pairs (lambda, L) with lambda > 0 and ``||H|| <= L + lambda ||g||`` for the Hessian H and gradient g.
        start: the norm of the gradient at the start, if measured.
        flat_L: the Hessian's norm at the point with the smallest gradient, if measured: a lower limit of every L in
            `relaxed`.
        samples: the number of training samples, if known, which is the largest batch.
        doubts: warnings about constants that were not measured reliably.
    """

    gap: float
    sigma: float
    beta: float
    L: float | None
    relaxed: tuple[tuple[float, float], ...] = ()
    start: float | None = None
    flat_L: float = 0.0
    samples: float = math.inf
    doubts: tuple[str, ...] = ()

    @classmethod
    def of_probe(cls, found: Record) -> Constants:
        """Return the constants measured by a pilot (a short run), given the result of :func:`sngm.probes.along`.

        `found` may also be the content of probe.json. The minimum of the loss is assumed to be 0. Sigma is the upper
        end of its interval. The few measured points of a pilot may satisfy relaxed smoothness with L = 0, but at a
        minimum, where the gradient is zero, L must be at least the norm of the Hessian. So every L is raised to at
        least the norm of the Hessian at the point with the smallest gradient.
        """
        try:
            if found["status"] != "finished":
                raise UsageError("the pilot diverged; make another with sngm probe and a smaller `lr`")
            first, frontier = found["points"][0], [(entry["lambda"], entry["L"]) for entry in found["frontier"]]
            beta = found["config"]["method_settings"].get("momentum", 0.9)
            flat_L = min(found["points"], key=lambda point: point["gradient_norm"])["hessian_norm"]
            pairs = tuple((lam, max(L, flat_L)) for lam, L in frontier if lam > 0)
            sigma, doubts = found["sigma_high"], []
            if sigma is None or not math.isfinite(sigma):
                sigma = found["sigma"]
                doubts.append(
                    "There were too few groups for an interval of sigma, so it may be larger than this estimate: "
                    "probe with more samples."
                )
            if not found["L_settled"]:
                doubts.append(
                    "L may be far too small: the Hessian-vector products ended before its norm had converged. Learning "
                    "rates and bounds computed from it are not reliable; probe with more iterations."
                )
            start, samples = first["gradient_norm"], found["training_samples"]
            return cls(first["loss"], sigma, beta, found["L"], pairs, start, flat_L, samples, tuple(doubts))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UsageError(
                "this is no record of a pilot by this version of sngm probe: a field is missing; make another with "
                "sngm probe TASK"
            ) from None

    def facts(self, measured: bool) -> list[Fact]:
        """Return the constants as rows of a table, with their sources; set `measured` if a pilot measured them."""
        source = MEASURED if measured else GIVEN
        most = "the largest of the points visited" if measured else ""
        highest = "the high end of its 95 % interval, where it has one; " if measured else ""
        floor = "the Hessian's norm where the gradient is smallest; the points visited alone would allow less"
        facts = [
            fact(
                "gap",
                self.gap,
                RULE if measured else GIVEN,
                "the loss at the start; its minimum is taken as 0" * measured,
            ),
            fact("sigma", self.sigma, source, highest + most),
            fact("beta", self.beta, GIVEN, ""),
        ]
        if self.L is not None:
            facts.append(fact("L", self.L, source, most))
        for lam, L in self.relaxed:
            floored = measured and self.flat_L == L
            facts.append(fact(f"L at lambda {lam:g}", L, RULE if floored else source, floor if floored else most))
        return facts


class Curve(NamedTuple):
    """Bound of a method on the mean gradient norm, and the learning rate with the lowest bound, for each batch."""

    method: str
    statement: str
    batches: list[int]
    bounds: list[float]
    rates: list[float]
    target: float
    """The largest bound at which a batch is allowed, the same for all methods."""

    @property
    def best(self) -> int:
        """The index of the lowest bound."""
        return int(np.argmin(self.bounds))

    @property
    def largest(self) -> int | None:
        """The index of the largest allowed batch; None if no batch is allowed."""
        return max((i for i, bound in enumerate(self.bounds) if bound <= self.target), default=None)

    def below(self, other: Curve) -> bool:
        """Return True if this bound is lower than the bound of another curve at every batch."""
        pairs = zip(self.bounds, other.bounds, strict=True)
        return all(mine < (1 - ROUNDING) * its for mine, its in pairs)


def budget_curves(gradients: float, constants: Constants) -> list[Curve]:
    """Return the bounds of each method for a budget: at each power of two as the batch, with the best learning rate.

    A batch is allowed if the bound is at most the target: 1.1 times the lowest bound of any method. If each method had
    its own target, a method that is bad at small batches would seem to allow large batches. The third term of MSGD's
    bound is divided by the batch size (slip 1 in docs/theory.md); the bound stays valid and is lower than the paper's.

    Args:
        gradients: the budget: the number of single-sample gradients, epochs times samples.
        constants: constants of the bounds, such as L and sigma.

    >>> for curve in budget_curves(2**20, Constants(gap=1, sigma=1, beta=0, L=1)):
    ...     print(curve.method, curve.largest if curve.largest is None else curve.batches[curve.largest])
    msgd 64
    sngm None
    """
    if not 1 <= gradients < math.inf:
        raise UsageError(f"`gradients` must be a number of at least 1, got {gradients:g}")
    top = min(gradients, constants.samples)
    batches = 2.0 ** np.arange(math.floor(math.log2(top)) + 1)
    steps = gradients / batches
    gap, sigma, beta, L, relaxed = constants[:5]
    found: list[tuple[str, str, Any, Any]] = []  # method, statement of the paper, learning rates, bounds
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # results are checked below
            if L is not None:
                # treat a batch of B samples as one sample with noise sigma / sqrt(B)
                squared = theory.msgd_best(gap, steps, 1, L, sigma / np.sqrt(batches), beta)
                found.append(("msgd", "Section 3", squared.eta, np.sqrt(squared.bound)))
                found.append(("sngm", "Theorem 1", *theory.smooth_best(gap, steps, batches, L, sigma, beta)))
            if relaxed:
                tried = [theory.relaxed_best(gap, steps, batches, own, sigma, beta, lam) for lam, own in relaxed]
                bounds, rates = np.stack([t.bound for t in tried]), np.stack([t.eta for t in tried])
                # Take the lowest bound over the pairs: the best case, since a pair may fail where nothing was measured.
                at = bounds.argmin(axis=0), np.arange(len(batches))
                found.append(("sngm (relaxed)", "Theorem 2", rates[at], bounds[at]))
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not all(np.isfinite(bounds).all() for *_, bounds in found):
        raise UsageError("a bound is not finite with these numbers; gap, L or sigma is too large")
    target = NEAR_LOWEST * min(float(bounds.min()) for *_, bounds in found)
    whole = [int(batch) for batch in batches]
    return [
        Curve(method, statement, whole, bounds.tolist(), rates.tolist(), target)
        for method, statement, rates, bounds in found
    ]


def advise_budget(gradients: float, constants: Constants, measured: bool) -> Record:
    """Return advice for a budget, as a dict for `text` and `page`; set `measured` if a pilot measured the constants."""
    curves = budget_curves(gradients, constants)
    rows = [_row(curve, gradients) for curve in curves]
    return {
        "format": 1,
        "kind": "budget",
        "gradients": gradients,
        "constants": constants.facts(measured),
        "methods": rows,
        "curves": curves,
        "warnings": _warnings(constants, curves),
        "notes": _notes(gradients, constants, curves, measured),
    }


def _row(curve: Curve, gradients: float) -> Record:
    """Return the table row of a method; its batch, lr, steps and bound are None if no batch is allowed."""
    at = curve.largest
    return {
        "method": curve.method,
        "statement": curve.statement,
        "batch": None if at is None else curve.batches[at],
        "lr": None if at is None else curve.rates[at],
        "steps": None if at is None else math.ceil(gradients / curve.batches[at]),
        "bound": None if at is None else curve.bounds[at],
        "best_batch": curve.batches[curve.best],
        "best_bound": curve.bounds[curve.best],
        "sources": {key: RULE if key == "batch" else GIVEN if key == "steps" else THEORY for key in NUMBERS},
    }


def _warnings(constants: Constants, curves: Sequence[Curve]) -> list[str]:
    """Return warnings about unreliable constants, and about bounds that give no reason to choose a method."""
    found = list(constants.doubts)
    if constants.start is not None and (empty := [c.method for c in curves if min(c.bounds) >= constants.start]):
        found.append(
            f"Of {', '.join(empty)} no bound is below the gradient's norm at the start, {constants.start:.3g}: for "
            "this budget they promise nothing."
        )
    for lower in curves:
        # compare only MSGD with SNGM, because Theorems 1 and 2 are both about SNGM
        over = [other.method for other in curves if "msgd" in (lower.method, other.method) and lower.below(other)]
        if over:
            found.append(
                f"The bound of {lower.method} lies below that of {' and of '.join(over)} at every batch: these bounds "
                f"give no reason to take {' or '.join(over)}, at any batch."
            )
    return found


def _notes(gradients: float, constants: Constants, curves: Sequence[Curve], measured: bool) -> list[str]:
    notes = [
        "Theory: bounds, rates and the batch of the lowest bound. Rule of thumb: that a batch is tolerated up to "
        f"{NEAR_LOWEST:g} times the lowest bound of any method; a method that never comes so low tolerates none. "
        "Batches are powers of two.",
        "A bound is a promise for the worst function with these constants, and its rates are as a rule far below those "
        "that train best: for a learning rate to train with, give a recipe of SGD.",
    ]
    if measured:
        notes.append(
            "The promise is only as good as the constants. L and sigma are the largest of a few points, and may be "
            "larger elsewhere: no rate here is certain to be safe."
        )
    if constants.L is not None:
        notes.append(
            "MSGD's bound is that of Section 3 with its third term divided by the batch, which holds too and is lower."
        )
        table = ", ".join(
            f"{method} {theory.plan(gradients, method, L=constants.L, beta=constants.beta).whole_batch:,}"
            for method in ("msgd", "sngm")
        )
        notes.append(f"Table 1 of the paper, an order with every constant taken as 1, has the batches {table}.")
    if any(curve.largest is not None and curve.batches[curve.largest] * 2 > constants.samples for curve in curves):
        notes.append(f"There are {constants.samples:,.0f} samples to train on, which no batch can exceed.")
    return notes
