"""Corollaries 1 and 2: how SNGM's gradient norm falls as the budget of gradients grows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import theory
from ...report.figures import Series
from .findings import Array, Finding, chart, digits, interval, under
from .problems import COSH, QUARTIC, Problem, even, quadratic, simulate
from .theorems import RULE

SHARPNESS = (1.0, 4.0, 16.0, 64.0)
HEAD = ("function", "momentum", "gradients", "batch", "measured", "bound")


def sharp(L: float) -> Problem:
    """Return a noisy quadratic that starts 1/2 above its minimum.

    Four coordinates have curvature 1. A fifth has curvature L and starts at its minimum.
    """
    start = np.array([0.5, 0.5, 0.5, 0.5, 0.0])
    return quadratic(f"L = {L:g}", np.array([1.0, 1.0, 1.0, 1.0, L]), start, even(1.0, 5))


def powers(budgets: Sequence[float], norms: Array) -> tuple[Array, Array]:
    """Fit norm = constant * budget^power to each column of `norms`; return the powers and the relative residuals.

    The fit is a least-squares line through the logarithms; `norms` has a row for each budget.

    >>> power, off = powers([1, 16, 256], np.array([[8.0], [4.0], [2.0]]))
    >>> round(float(power.item()), 3), bool(np.abs(off).max() < 1e-9)
    (-0.25, True)
    """
    x, y = np.log(budgets), np.log(norms)
    slope, level = np.polyfit(x, y, 1)
    return slope, np.expm1(y - np.outer(x, slope) - level)


@dataclass(frozen=True, slots=True)
class Growth:
    """Runs of SNGM with the settings of a corollary, for growing budgets C; arrays have an entry for each budget."""

    label: str
    beta: float
    budgets: list[int]
    batches: list[int]
    norms: Array
    """Mean gradient norms, with a row for each budget and a column for each seed."""
    bound: Array

    @property
    def mean(self) -> Array:
        return interval(self.norms)[0]

    def power(self) -> str:
        """Describe the fitted power of C with its interval over seeds, and how far the means deviate from the fit."""
        mean, _, high = interval(powers(self.budgets, self.norms)[0])
        _, off = powers(self.budgets, self.mean[:, None])
        return f"{mean:.3f} ± {high - mean:.3f} (off by up to {np.abs(off).max():.1%}) for {self.label}"

    def rows(self) -> list[list[object]]:
        numbers = zip(self.budgets, self.batches, map(digits, self.mean), map(digits, self.bound), strict=True)
        return [[self.label, self.beta, *row] for row in numbers]


def grow(label: str, problem: Problem, beta: float, exponents: Iterable[int], seeds: int) -> Growth:
    """Run SNGM at batch sqrt(C) and learning rate C^(-1/4), for budgets of C = 4^k gradients with k in `exponents`."""
    budgets, batches, norms, bound = [4**k for k in exponents], [], [], []
    constants = {"gap": problem.gap, "L": problem.L, "sigma": problem.sigma, "beta": beta, "lam": problem.lam}
    for budget in budgets:
        found = theory.plan(budget, "sngm", **constants)
        batches.append(found.whole_batch)
        runs = simulate(problem, "sngm", np.array([found.lr]), beta, batches[-1], found.whole_steps, seeds)
        norms.append(runs.norm[0])
        bound.append(found.bound)
    return Growth(label, beta, budgets, batches, np.array(norms), np.array(bound))


def series(growths: Sequence[Growth]) -> list[Series]:
    """Return a line of a plot for each function: the mean gradient norm against the batch size."""
    return [
        Series(each.label, slot, list(zip(map(float, each.batches), each.mean.tolist(), strict=True)))
        for slot, each in enumerate(growths)
    ]


def of_order(growths: Sequence[Growth]) -> dict[str, Any]:
    """Return the fields rule, verdict and measured of a corollary's finding.

    The verdict compares the norms with the corollary's bound; it does not use the fitted power of C, the budget.
    """
    bound = np.concatenate([each.bound for each in growths])
    _, low, high = interval(np.concatenate([each.norms for each in growths]))
    momenta = {each.beta for each in growths}
    told = [each.power() + (f" at momentum {each.beta:g}" if len(momenta) > 1 else "") for each in growths]
    return {
        "rule": (
            f"{RULE.replace('the bound', 'the bound of the corollary')} That bound is a constant times C^(-1/4). The "
            "fitted power of C is not judged, since finite budgets neither prove nor refute an order; it "
            "is given with its 99 % interval over seeds, and with the largest deviation of the means from the fit."
        ),
        "verdict": under(low, high, bound),
        "measured": (
            f"{len(bound)} points, upper limit over bound at most {(high / bound).max():.4f}; the norm goes as C to "
            f"the power {', '.join(told)}"
        ),
    }


def corollary_1(seeds: int) -> Finding:
    """Check Corollary 1 (SNGM at batch sqrt(C), for budgets C) on functions of growing L; run MSGD for comparison."""
    beta = 0.9
    growths, rows, lost = [], [], []
    for problem in map(sharp, SHARPNESS):
        growth = grow(problem.name, problem, beta, range(6, 13), seeds)
        growths.append(growth)
        runs = (
            simulate(problem, "msgd", np.array([batch / np.sqrt(budget)]), beta, batch, budget // batch, seeds)
            for budget, batch in zip(growth.budgets, growth.batches, strict=True)
        )
        norms = [interval(each.norm)[0].item() for each in runs]
        diverged = problem.diverges(norms)
        reached = ["diverged" if gone else f"{norm:.3g}" for gone, norm in zip(diverged, norms, strict=True)]
        rows += [[*row, other] for row, other in zip(growth.rows(), reached, strict=True)]
        lost += [problem.name] if diverged.all() else []
    found = of_order(growths)
    found["measured"] += f"; at that batch and η = B / sqrt(C) MSGD diverges for {', '.join(lost) or 'none of them'}"
    return Finding(
        "Corollary 1: with batch sqrt(C) and η = C^(-1/4) the mean gradient norm of SNGM is of order C^(-1/4), "
        "whatever L.",
        **found,
        head=(*HEAD, "MSGD at that batch"),
        rows=rows,
        figures={"corollary-1": chart(
            "Corollary 1: SNGM at batch sqrt(C)",
            "The mean gradient norm of SNGM at batch sqrt(C) falls with the budget C for every L.",
            "batch, sqrt(C)", "mean gradient norm", {f"quadratics, momentum {beta:g}": series(growths)}, log="xy",
        )},
    )  # fmt: skip


def corollary_2(seeds: int) -> Finding:
    """Check Corollary 2, for relaxed smoothness: SNGM at batch sqrt(C), for budgets C that satisfy its condition."""
    functions = {"cosh(x) - 1": COSH, "x⁴ / 4": QUARTIC}
    pairs = {
        beta: [grow(label, problem, beta, exponents, seeds) for label, problem in functions.items()]
        for beta, exponents in ((0.0, range(6, 13)), (0.5, range(12, 16)))
    }
    growths = [each for pair in pairs.values() for each in pair]
    return Finding(
        "Corollary 2: SNGM's mean gradient norm is also of order C^(-1/4) on (L, λ)-smooth functions, if 8 η κ λ ≤ 1.",
        **of_order(growths),
        head=HEAD,
        rows=[row for each in growths for row in each.rows()],
        figures={"corollary-2": chart(
            "Corollary 2: SNGM at batch sqrt(C) on functions that are not L-smooth",
            "The mean gradient norm of SNGM at batch sqrt(C) falls with the budget C.",
            "batch, sqrt(C)", "mean gradient norm",
            {f"momentum {beta:g}": series(pair) for beta, pair in pairs.items()}, log="xy",
        )},
    )  # fmt: skip
