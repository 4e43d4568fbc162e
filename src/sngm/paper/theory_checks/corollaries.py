"""The corollaries: how SNGM's norm falls as the budget of gradients grows, on functions whose constants are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import theory
from ...report.figures import Figure, Series
from .bounds import RULE
from .findings import Array, Finding, interval, under
from .problems import COSH, QUARTIC, Problem, even, quadratic, simulate

SHARPNESS = (1.0, 4.0, 16.0, 64.0)


def sharp(L: float) -> Problem:
    """Four coordinates of curvature 1 with a way to go, and one of curvature L that is at its minimum: gap 1/2."""
    start = np.array([0.5, 0.5, 0.5, 0.5, 0.0])
    return quadratic(f"L = {L:g}", np.array([1.0, 1.0, 1.0, 1.0, L]), start, even(1.0, 5))


def powers(budgets: Sequence[float], norms: Array) -> tuple[Array, Array]:
    """The power of the budget that a norm goes with, for each column of norms, and how far these are off it.

    A straight line through the logarithms; a row of `norms` for each budget.

    >>> power, off = powers([1, 16, 256], np.array([[8.0], [4.0], [2.0]]))
    >>> round(float(power.item()), 3), bool(np.abs(off).max() < 1e-9)
    (-0.25, True)
    """
    x, y = np.log(budgets), np.log(norms)
    x, y = x - x.mean(), y - y.mean(axis=0)
    slope = x @ y / (x @ x)
    return slope, np.expm1(y - np.outer(x, slope))


@dataclass(frozen=True, slots=True)
class Growth:
    """SNGM on one function as a corollary sets it, for budgets that grow; an array has an entry a budget."""

    label: str
    beta: float
    budgets: list[int]
    batches: list[int]
    norms: Array
    """A row a budget, a column a seed."""
    bound: Array

    @property
    def mean(self) -> Array:
        return interval(self.norms)[0]

    def power(self) -> str:
        """The power of C with its interval over seeds, and how far the mean norms are off a straight line."""
        mean, _, high = interval(powers(self.budgets, self.norms)[0])
        _, off = powers(self.budgets, self.mean[:, None])
        return f"{mean:.3f} ± {high - mean:.3f} (off by up to {np.abs(off).max():.1%}) for {self.label}"

    def rows(self) -> list[list[object]]:
        numbers = zip(self.budgets, self.batches, self.mean, self.bound, strict=True)
        return [
            [self.label, self.beta, budget, batch, float(f"{mean:.4g}"), float(f"{bound:.4g}")]
            for budget, batch, mean, bound in numbers
        ]

    def series(self, slot: int) -> Series:
        return Series(self.label, slot, list(zip(map(float, self.batches), self.mean.tolist(), strict=True)))


GROWTH_HEAD = ("function", "momentum", "gradients", "batch", "measured", "bound")


def grow(label: str, problem: Problem, beta: float, exponents: Iterable[int], seeds: int) -> Growth:
    """Batch sqrt(C) and learning rate C^(-1/4), for budgets C that are these powers of 4."""
    budgets, batches, norms, bound = [4**k for k in exponents], [], [], []
    constants = {"gap": problem.gap, "L": problem.L, "sigma": problem.sigma, "beta": beta, "lam": problem.lam}
    for budget in budgets:
        found = theory.plan(budget, "sngm", **constants)
        batches.append(found.whole_batch)
        runs = simulate(problem, "sngm", np.array([found.lr]), beta, batches[-1], found.whole_steps, seeds)
        norms.append(runs.norm[0])
        bound.append(found.bound)
    return Growth(label, beta, budgets, batches, np.array(norms), np.array(bound))


def of_order(growths: Sequence[Growth]) -> dict[str, Any]:
    """What a corollary is judged by, its bound; the power of C is told beside it."""
    bound = np.concatenate([each.bound for each in growths])
    _, low, high = interval(np.concatenate([each.norms for each in growths]))
    momenta = {each.beta for each in growths}
    told = [each.power() + (f" at momentum {each.beta:g}" if len(momenta) > 1 else "") for each in growths]
    return {
        "rule": (
            f"{RULE.replace('the bound', 'the bound of the corollary')} That bound is a constant times C^(-1/4), so it "
            "has the order in it. The power of C that fits the norms is not judged, since budgets that end somewhere "
            "neither show nor refute an order; it has its 99 % interval over seeds, and how far the means are off the "
            "straight line."
        ),
        "verdict": under(low, high, bound),
        "measured": (
            f"{len(bound)} points, upper limit over bound at most {(high / bound).max():.4f}; the norm goes as C to "
            f"the power {', '.join(told)}"
        ),
    }


def corollary_1(seeds: int) -> Finding:
    """The batch sqrt(C) for budgets that grow, on functions of growing L, and MSGD at the same batch."""
    beta = 0.9
    growths, rows, lost = [], [], []
    for L in SHARPNESS:
        problem = sharp(L)
        growth = grow(problem.name, problem, beta, range(6, 13), seeds)
        others = []
        for budget, batch in zip(growth.budgets, growth.batches, strict=True):
            rate = np.array([batch / np.sqrt(budget)])
            others.append(interval(simulate(problem, "msgd", rate, beta, batch, budget // batch, seeds).norm)[0].item())
        diverged = problem.diverges(others)
        reached = ["diverged" if gone else f"{other:.3g}" for gone, other in zip(diverged, others, strict=True)]
        rows += [[*row, other] for row, other in zip(growth.rows(), reached, strict=True)]
        growths.append(growth)
        lost += [problem.name] if diverged.all() else []
    found = of_order(growths)
    found["measured"] += f"; at that batch and η = B / sqrt(C) MSGD diverges for {', '.join(lost) or 'none of them'}"
    figure = Figure(
        title="Corollary 1: SNGM at batch sqrt(C)",
        description="The mean gradient norm of SNGM at batch sqrt(C) falls with the budget C for every L.",
        x_label="batch, sqrt(C)", y_label="mean gradient norm", log_x=True, log_y=True, worst_at_bottom=False,
        panels={f"quadratics, momentum {beta:g}": [each.series(slot) for slot, each in enumerate(growths)]},
    )  # fmt: skip
    return Finding(
        name="corollary-1",
        statement=(
            "Corollary 1: with batch sqrt(C) and η = C^(-1/4) the mean gradient norm of SNGM is of order C^(-1/4), "
            "whatever L."
        ),
        head=(*GROWTH_HEAD, "MSGD at that batch"),
        rows=rows,
        figures={"corollary-1": figure},
        **found,
    )


def corollary_2(seeds: int) -> Finding:
    """The same for relaxed smoothness, from the budget on where the corollary's condition is met."""
    growths, panels = [], {}
    for beta, exponents in ((0.0, range(6, 13)), (0.5, range(12, 16))):
        pair = [
            grow(label, problem, beta, exponents, seeds)
            for label, problem in (("cosh(x) - 1", COSH), ("x⁴ / 4", QUARTIC))
        ]
        panels[f"momentum {beta:g}"] = [each.series(slot) for slot, each in enumerate(pair)]
        growths += pair
    figure = Figure(
        title="Corollary 2: SNGM at batch sqrt(C) on functions that are not L-smooth",
        description="The mean gradient norm of SNGM at batch sqrt(C) falls with the budget C.",
        x_label="batch, sqrt(C)", y_label="mean gradient norm", panels=panels, log_x=True, log_y=True,
        worst_at_bottom=False,
    )  # fmt: skip
    return Finding(
        name="corollary-2",
        statement=(
            "Corollary 2: it is also of order C^(-1/4) on (L, λ)-smooth functions, for budgets C with 8 η κ λ ≤ 1."
        ),
        head=GROWTH_HEAD,
        rows=[row for each in growths for row in each.rows()],
        figures={"corollary-2": figure},
        **of_order(growths),
    )
