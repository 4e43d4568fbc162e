"""What the paper's bounds say of a budget of gradients: the largest batch that each method bears, and its rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import theory
from ..errors import UsageError
from .facts import GIVEN, MEASURED, RULE, THEORY, Fact

NEAR_LOWEST = 1.1  # a batch is borne where the bound is at most this many times the lowest of all methods
CLEARLY = 1e-9  # a part by which one bound is below another, and not by rounding
NUMBERS = ("batch", "lr", "steps", "bound", "best_batch", "best_bound")
Record = dict[str, Any]


class Constants(NamedTuple):
    """What the bounds speak of.

    Attributes:
        gap: how far the loss at the start is above its minimum.
        sigma: the noise of a sample's gradient.
        beta: momentum.
        L: the largest norm of the Hessian; None where only relaxed smoothness is known.
        relaxed: pairs (lambda, L) with a Hessian of norm at most L + lambda ||g||, and lambda above 0.
        start: the gradient's norm at the start, if that was measured.
        flat_L: the least L of `relaxed`, if that was measured: the Hessian's norm where the gradient is smallest.
        samples: there are to train on, if that is known: no batch is larger.
        doubts: what was not measured well enough to rely on, in words.
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
        """Of a pilot, by what :func:`sngm.probes.pilot` or its probe.json says.

        The least loss is taken to be 0. Sigma is at the high end of its interval. A few points may all be covered by
        lambda alone, with L = 0, but no function with a minimum is: where the gradient is zero, L has to cover the
        Hessian. So no L is taken to be below the Hessian's norm at the point whose gradient is smallest.
        """
        try:
            if found["status"] != "finished":
                raise UsageError("the pilot diverged; make another with sngm probe and a smaller --lr")
            first, frontier = found["points"][0], [(entry["lambda"], entry["L"]) for entry in found["frontier"]]
            beta = found["config"]["method_settings"].get("momentum", 0.9)
            flat_L = min(found["points"], key=lambda point: point["gradient_norm"])["hessian_norm"]
            pairs = tuple((lam, max(L, flat_L)) for lam, L in frontier if lam > 0)
            sigma, doubts = found["sigma_high"], []
            if sigma is None or not math.isfinite(sigma):
                sigma = found["sigma"]
                doubts.append(
                    "There were too few groups for an interval of sigma, so it may be larger than this estimate: "
                    "probe with more --samples."
                )
            if not found["L_settled"]:
                doubts.append(
                    "L may be far too small: the probe's products ended before the Hessian's norm had settled. Rates "
                    "and bounds that follow from it promise nothing; probe with more --iterations."
                )
            start, samples = first["gradient_norm"], found["training_samples"]
            return cls(first["loss"], sigma, beta, found["L"], pairs, start, flat_L, samples, tuple(doubts))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UsageError(
                "no pilot of this version of sngm probe: a field is missing; make another with sngm probe TASK"
            ) from None

    def facts(self, measured: bool) -> list[Fact]:
        """As lines of a table."""
        source = MEASURED if measured else GIVEN
        most = "the largest of the points visited" if measured else ""
        highest = "the high end of its 95 % interval, where it has one; " if measured else ""
        floor = "the Hessian's norm where the gradient is smallest; the points visited alone would allow less"
        facts = [
            Fact(
                "gap",
                self.gap,
                RULE if measured else GIVEN,
                "the loss at the start; its least is taken as 0" * measured,
            ),
            Fact("sigma", self.sigma, source, highest + most),
            Fact("beta", self.beta, GIVEN, ""),
        ]
        if self.L is not None:
            facts.append(Fact("L", self.L, source, most))
        for lam, L in self.relaxed:
            floored = measured and self.flat_L == L
            facts.append(Fact(f"L at lambda {lam:g}", L, RULE if floored else source, floor if floored else most))
        return facts


class Curve(NamedTuple):
    """A method's bound on the mean gradient norm, and its best rate, for each batch."""

    method: str
    statement: str
    batches: list[int]
    bounds: list[float]
    rates: list[float]
    target: float
    """What a bound may be at most for its batch to be borne: the same for all methods."""

    @property
    def best(self) -> int:
        """Where in the lists the bound is lowest."""
        return int(np.argmin(self.bounds))

    @property
    def largest(self) -> int | None:
        """Where the largest batch is that the method bears; None if it bears none."""
        return max((i for i, bound in enumerate(self.bounds) if bound <= self.target), default=None)

    def below(self, other: Curve) -> bool:
        """Whether this bound is the lower one at every batch."""
        pairs = zip(self.bounds, other.bounds, strict=True)
        return all(mine < (1 - CLEARLY) * its for mine, its in pairs)


def bearable(gradients: float, constants: Constants) -> list[Curve]:
    """Each method's bound for a budget, at all batches that are powers of two, each at its best learning rate.

    All are held to one target, 1.1 times the lowest bound of any method. Held to its own lowest, a method would seem to
    bear a large batch because it is bad at small ones. MSGD's bound is the one with its third term divided by the batch
    (slip 1 in docs/theory.md): it holds too, and is the lower one.

    Args:
        gradients: of single samples, in all: epochs times samples.
        constants: of the problem.

    >>> for curve in bearable(2**20, Constants(gap=1, sigma=1, beta=0, L=1)):
    ...     print(curve.method, curve.largest if curve.largest is None else curve.batches[curve.largest])
    msgd 64
    sngm None
    """
    if not 1 <= gradients < math.inf:
        raise UsageError(f"--gradients must be a number of at least 1, got {gradients:g}")
    top = min(gradients, constants.samples)
    batches = 2.0 ** np.arange(math.floor(math.log2(top)) + 1)
    steps = gradients / batches
    gap, sigma, beta, L, relaxed = constants[:5]
    found: list[tuple[str, str, Any, Any]] = []  # method, statement, rates, bounds
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # told of below
            if L is not None:
                # a batch of B is one sample of another problem, whose noise is that of a mean
                squared = theory.msgd_best(gap, steps, 1, L, sigma / np.sqrt(batches), beta)
                found.append(("msgd", "Section 3, all noise over B", squared.eta, np.sqrt(squared.bound)))
                found.append(("sngm", "Theorem 1", *theory.smooth_best(gap, steps, batches, L, sigma, beta)))
            if relaxed:
                tried = [theory.relaxed_best(gap, steps, batches, own, sigma, beta, lam) for lam, own in relaxed]
                bounds, rates = np.stack([t.bound for t in tried]), np.stack([t.eta for t in tried])
                # Each pair fits the points visited, none is known to hold elsewhere: the lowest bound is the best case.
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
    """The record that the table and the page are made of."""
    curves = bearable(gradients, constants)
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
    """What a method bears; None where it bears nothing."""
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
    """What must not be overlooked."""
    found = list(constants.doubts)
    if constants.start is not None and (empty := [c.method for c in curves if min(c.bounds) >= constants.start]):
        found.append(
            f"Of {', '.join(empty)} no bound is below the gradient's norm at the start, {constants.start:.3g}: for "
            "this budget they promise nothing."
        )
    for lower in curves:
        # Theorems 1 and 2 are of one method, and not held against each other
        over = [other.method for other in curves if "msgd" in (lower.method, other.method) and lower.below(other)]
        if over:
            found.append(
                f"The bound of {lower.method} lies below that of {' and of '.join(over)} at every batch: these bounds "
                f"give no reason to take {over[0]}, at any batch."
            )
    return found


def _notes(gradients: float, constants: Constants, curves: Sequence[Curve], measured: bool) -> list[str]:
    notes = [
        "Theory: bounds, rates and the batch of the lowest bound. Rule of thumb: that a batch is borne up to "
        f"{NEAR_LOWEST:g} times the lowest bound of any method; a method that never comes so low bears none. Batches "
        "are powers of two.",
        "A bound is a promise for the worst function with these constants, and its rates are as a rule far below those "
        "that train best: for a rate to train with, see --from-sgd.",
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
