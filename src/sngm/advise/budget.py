"""What the paper's bounds say of a budget of gradients: the largest batch that each method bears, and its rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import theory
from ..errors import UsageError
from .facts import GIVEN, MEASURED, RULE, THEORY, Fact

BORNE = 1.1  # a batch is borne where the bound is at most this many times the method's lowest
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
    """

    gap: float
    sigma: float
    beta: float
    L: float | None
    relaxed: tuple[tuple[float, float], ...] = ()
    start: float | None = None

    @classmethod
    def of_probe(cls, found: Record) -> Constants:
        """Of a pilot, by what :func:`sngm.probes.along` or its probe.json says. The least loss is taken to be 0."""
        try:
            if found["status"] != "finished":
                raise UsageError("the pilot diverged; make another with sngm probe and a smaller --lr")
            first, frontier = found["points"][0], [(entry["lambda"], entry["L"]) for entry in found["frontier"]]
            beta = found["config"]["method_settings"].get("momentum", 0.9)
            pairs = tuple((lam, L) for lam, L in frontier if lam > 0)
            return cls(first["loss"], found["sigma"], beta, found["L"], pairs, first["gradient_norm"])
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UsageError("no pilot of this version of sngm probe: a field is missing") from None

    def facts(self, measured: bool) -> list[Fact]:
        """As lines of a table."""
        source = MEASURED if measured else GIVEN
        most = "the largest of the points visited" if measured else ""
        facts = [
            Fact(
                "gap",
                self.gap,
                RULE if measured else GIVEN,
                "the loss at the start; its least is taken as 0" * measured,
            ),
            Fact("sigma", self.sigma, source, most),
            Fact("beta", self.beta, GIVEN, ""),
        ]
        if self.L is not None:
            facts.append(Fact("L", self.L, source, most))
        return facts + [Fact(f"L at lambda {lam:g}", L, source, most) for lam, L in self.relaxed]


class Curve(NamedTuple):
    """A method's bound on the mean gradient norm, and its best rate, for each batch."""

    method: str
    statement: str
    batches: list[int]
    bounds: list[float]
    rates: list[float]

    @property
    def best(self) -> int:
        """Where in the lists the bound is lowest."""
        return int(np.argmin(self.bounds))

    @property
    def largest(self) -> int:
        """Where the largest batch is that the method bears."""
        return max(i for i, bound in enumerate(self.bounds) if bound <= BORNE * self.bounds[self.best])


def bearable(gradients: float, constants: Constants, most: float = math.inf) -> list[Curve]:
    """Each method's bound for a budget, at all batches that are powers of two, each at its best learning rate.

    Args:
        gradients: of single samples, in all: epochs times samples.
        constants: of the problem.
        most: the largest batch there can be.

    >>> for curve in bearable(2**20, Constants(gap=1, sigma=1, beta=0, L=1)):
    ...     print(curve.method, curve.batches[curve.largest])
    msgd 8
    sngm 2048
    """
    if not 1 <= gradients < math.inf:
        raise UsageError(f"--gradients must be a number of at least 1, got {gradients:g}")
    top = min(gradients, most)
    batches = 2.0 ** np.arange(math.floor(math.log2(top)) + 1)
    steps = gradients / batches
    gap, sigma, beta, L, relaxed, _ = constants
    try:
        curves = []
        if L is not None:
            squared = theory.msgd_best(gap, steps, batches, L, sigma, beta)
            curves.append(_curve("msgd", "the bound of Section 3", batches, squared.eta, np.sqrt(squared.bound)))
            curves.append(
                _curve("sngm", "Theorem 1", batches, *theory.smooth_best(gap, steps, batches, L, sigma, beta))
            )
        if relaxed:
            tried = [theory.relaxed_best(gap, steps, batches, own, sigma, beta, lam) for lam, own in relaxed]
            bounds, rates = np.stack([t.bound for t in tried]), np.stack([t.eta for t in tried])
            at = bounds.argmin(axis=0), np.arange(len(batches))  # every pair holds, so that the lowest bound does
            curves.append(_curve("sngm (relaxed)", "Theorem 2", batches, rates[at], bounds[at]))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return curves


def advise_budget(gradients: float, constants: Constants, most: float, measured: bool) -> Record:
    """The record that the table and the page are made of."""
    curves = bearable(gradients, constants, most)
    rows = [_row(curve, gradients) for curve in curves]
    return {
        "format": 1,
        "kind": "budget",
        "gradients": gradients,
        "constants": constants.facts(measured),
        "methods": rows,
        "curves": curves,
        "notes": _notes(gradients, constants, curves, most),
    }


def _curve(method: str, statement: str, batches: Any, rates: Any, bounds: Any) -> Curve:
    return Curve(method, statement, [int(b) for b in batches], bounds.tolist(), rates.tolist())


def _row(curve: Curve, gradients: float) -> Record:
    batch = curve.batches[curve.largest]
    return {
        "method": curve.method,
        "statement": curve.statement,
        "batch": batch,
        "lr": curve.rates[curve.largest],
        "steps": math.ceil(gradients / batch),
        "bound": curve.bounds[curve.largest],
        "best_batch": curve.batches[curve.best],
        "best_bound": curve.bounds[curve.best],
        "sources": {key: RULE if key == "batch" else GIVEN if key == "steps" else THEORY for key in NUMBERS},
    }


def _notes(gradients: float, constants: Constants, curves: Sequence[Curve], most: float) -> list[str]:
    notes = [
        "Theory: bounds, rates and the batch of the lowest bound. Rule of thumb: that a batch is borne up to "
        f"{BORNE:g} times a method's lowest bound. Batches are powers of two.",
        "A bound is a promise for the worst function with these constants. Its rates are safe, and as a rule far below "
        "those that train best: for a rate to train with, see --from-sgd.",
    ]
    if constants.L is not None:
        table = ", ".join(
            f"{method} {theory.plan(gradients, method, L=constants.L, beta=constants.beta).whole_batch:,}"
            for method in ("msgd", "sngm")
        )
        notes.append(f"Table 1 of the paper, an order with every constant taken as 1, has the batches {table}.")
    if constants.start is not None and (empty := [c.method for c in curves if min(c.bounds) >= constants.start]):
        notes.insert(
            0,
            f"Of {', '.join(empty)} no bound is below the gradient's norm at the start, {constants.start:.3g}: for "
            "this budget they promise nothing.",
        )
    if any(curve.batches[curve.largest] * 2 > most for curve in curves):
        notes.append(f"There are {most:,.0f} samples to train on, which no batch can exceed.")
    return notes
