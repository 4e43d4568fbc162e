"""Theorems 1 to 3, Section 3's bound of MSGD and Corollary 1, on functions whose constants are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import theory
from ..report.figures import Figure, Series
from .findings import Array, Finding, interval, under
from .problems import (
    BOWL,
    COSH,
    COUPLED,
    EXP,
    QUADRATIC,
    QUARTIC,
    SLOPE,
    UNEVEN,
    WAVES,
    Problem,
    Runs,
    even,
    quadratic,
    simulate,
)  # fmt: skip

BETAS = (0.0, 0.5, 0.9)
BATCHES = (1, 16, 256)
RATES = np.array([1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0])  # where any rate is admitted
SHARES = np.array([0.01, 0.03, 0.1, 0.3, 1.0])  # of the largest rate, where there is a condition
RULE = (
    "Holds if the upper end of the 99 % interval over seeds is under the bound at every point of the grid, "
    "fails if the lower end is above it at one, open otherwise."
)


@dataclass(frozen=True, slots=True)
class Line:
    """One problem, momentum and batch size: what was measured at each learning rate, and the bound."""

    problem: Problem
    beta: float
    batch: int
    etas: Array
    mean: Array
    low: Array
    high: Array
    bound: Array

    @property
    def tightest(self) -> int:
        """Where the measured value comes closest to the bound."""
        return int(np.argmax(self.high / self.bound))

    def row(self) -> list[object]:
        i = self.tightest
        numbers = (self.etas[i], self.mean[i], self.bound[i], self.high[i] / self.bound[i])
        return [self.problem.name, self.beta, self.batch, *(float(f"{number:.4g}") for number in numbers)]


HEAD = ("function", "momentum", "batch", "eta", "measured", "bound", "upper limit / bound")
Etas = Callable[[Problem, float], Array]
Bound = Callable[[Problem, Array, float, int, Runs], Array]


def sweep(
    problems: Sequence[Problem], method: str, etas: Etas, bound: Bound, steps: int, seeds: int, squared: bool = False
) -> list[Line]:
    """The grid of a theorem. Without noise all seeds are alike, and so are all batch sizes."""
    lines = []
    for problem in problems:
        for beta in BETAS:
            rates = etas(problem, beta)
            for batch in BATCHES if problem.sigma else BATCHES[:1]:
                runs = simulate(problem, method, rates, beta, batch, steps, seeds if problem.sigma else 2)
                measured = interval(runs.square if squared else runs.norm)
                lines.append(Line(problem, beta, batch, rates, *measured, bound(problem, rates, beta, batch, runs)))
    return lines


def conclude(
    name: str,
    statement: str,
    lines: list[Line],
    drawn: Problem,
    more: str = "",
    unit: str = "norm",
    shares: Array | None = None,
) -> Finding:
    """The verdict over all lines, with the one problem drawn."""
    low, high, bound = (np.concatenate([getattr(line, key) for line in lines]) for key in ("low", "high", "bound"))
    ratios = high / bound
    closest = max(lines, key=lambda line: float((line.high / line.bound).max()))
    return Finding(
        name=name,
        statement=statement,
        rule=RULE,
        verdict=under(low, high, bound),
        measured=(
            f"{len(ratios)} points, upper limit over bound at most {ratios.max():.4f} ({closest.problem.name}, "
            f"momentum {closest.beta:g}, batch {closest.batch}, eta {closest.etas[closest.tightest]:.3g}), "
            f"median {np.median(ratios):.2g}{more}"
        ),
        head=HEAD,
        rows=[line.row() for line in lines],
        figures={name: picture(lines, drawn, statement.split(":")[0], unit, shares)},
    )


def picture(lines: list[Line], drawn: Problem, title: str, unit: str, shares: Array | None) -> Figure:
    """Measured and bound against the learning rate, or its share of the largest one, for the ends of the grid."""
    panels = {}
    for line in lines:
        if line.problem is drawn and line.beta in (BETAS[0], BETAS[-1]) and line.batch in (BATCHES[0], BATCHES[-1]):
            etas = (line.etas if shares is None else shares).tolist()
            half = (line.high - line.mean).tolist()
            panels[f"momentum {line.beta:g}, batch {line.batch}"] = [
                Series("measured", 0, list(zip(etas, line.mean.tolist(), strict=True)), half),
                Series("bound", 1, list(zip(etas, line.bound.tolist(), strict=True))),
            ]
    return Figure(
        title=f"{title} on {drawn.name}",
        description=f"The measured mean gradient {unit} of {drawn.formula} and its bound, against the learning rate.",
        x_label="learning rate" if shares is None else "learning rate / largest admissible one",
        y_label=f"mean gradient {unit}",
        panels=panels,
        log_x=True,
        log_y=True,
        worst_at_bottom=False,
    )


def constants(problem: Problem, steps: int) -> dict[str, float]:
    """What every bound takes from a problem."""
    return {"gap": problem.gap, "steps": steps, "L": problem.L, "sigma": problem.sigma}


def theorem_1(seeds: int) -> Finding:
    """SNGM on smooth functions, at any learning rate."""
    steps = 400

    def bound(problem: Problem, etas: Array, beta: float, batch: int, _: Runs) -> Array:
        return np.asarray(theory.smooth_bound(**constants(problem, steps), eta=etas, batch=batch, beta=beta))

    def rates(problem: Problem, _: float) -> Array:
        # the bowl's start is 1: a step of 2 goes to -1, and back, for ever, which is all that the bound allows
        return np.array([0.02, 0.1, 0.5, 2.0, 10.0]) if problem is BOWL else RATES

    lines = sweep((BOWL, QUADRATIC, WAVES, SLOPE), "sngm", rates, bound, steps, seeds)
    said = (
        "Theorem 1: the mean gradient norm of SNGM is under (1-β) gap / (η T) + L κ η / 2 + 2 σ / sqrt(B), for any η."
    )
    return conclude("theorem-1", said, lines, QUADRATIC)


def theorem_2(seeds: int) -> Finding:
    """SNGM on relaxed-smooth functions."""
    steps = 1000

    def bound(problem: Problem, etas: Array, beta: float, batch: int, _: Runs) -> Array:
        given = constants(problem, steps)
        return np.asarray(theory.relaxed_bound(**given, eta=etas, batch=batch, beta=beta, lam=problem.lam))

    def rates(problem: Problem, beta: float) -> Array:
        return np.asarray(SHARES / (8 * theory.kappa(beta) * problem.lam))

    lines = sweep((COSH, QUARTIC, EXP), "sngm", rates, bound, steps, seeds)
    said = (
        "Theorem 2: on (L, λ)-smooth functions it is under 2 (1-β) gap / (η T) + 8 L κ η + 4 σ / sqrt(B), "
        "if 8 η κ λ ≤ 1."
    )
    return conclude("theorem-2", said, lines, COSH, shares=SHARES)


def theorem_3(seeds: int) -> Finding:
    """Block-wise SNGM; rho is the largest of all runs at a learning rate."""
    steps = 400

    def bound(problem: Problem, etas: Array, beta: float, batch: int, runs: Runs) -> Array:
        given = {**constants(problem, steps), "lam": problem.lam, "blocks": len(problem.blocks)}
        return np.asarray(theory.block_bound(**given, eta=etas, batch=batch, beta=beta, rho=runs.rho.max(axis=-1)))

    def rates(problem: Problem, beta: float) -> Array:
        # rho is not known before the run, but it is at most 1
        limit = 8 * theory.kappa(beta) * problem.lam * len(problem.blocks)
        return np.asarray(SHARES / limit) if problem.lam else RATES[:-1]

    lines = sweep((UNEVEN, COUPLED, COSH, QUARTIC), "block-sngm", rates, bound, steps, seeds)
    said = (
        "Theorem 3: that of block-wise SNGM is under 2 ρ (1-β) gap / (η T) + 8 L κ ρ S η "
        "+ 2 σ (1 + ρ sqrt(S)) / sqrt(B), if 8 η κ λ ρ S ≤ 1."
    )
    return conclude("theorem-3", said, lines, UNEVEN)


def msgd(seeds: int) -> Finding:
    """Section 3's bound of the squared norm; slip 1's sharper form is measured beside it."""
    steps = 400
    sharper: list[Array] = []

    def bound(problem: Problem, etas: Array, beta: float, batch: int, runs: Runs) -> Array:
        given: dict[str, Any] = {**constants(problem, steps), "eta": etas, "beta": beta}
        one = {**given, "sigma": problem.sigma / np.sqrt(batch)}
        sharper.append(interval(runs.square)[2] / theory.msgd_bound(**one, batch=1))
        return np.asarray(theory.msgd_bound(**given, batch=batch))

    def rates(problem: Problem, beta: float) -> Array:
        return np.asarray(SHARES / (theory.kappa(beta) * problem.L))

    lines = sweep((BOWL, QUADRATIC, WAVES, SLOPE), "msgd", rates, bound, steps, seeds, squared=True)
    more = f"; with the last term divided by B (slip 1) at most {np.concatenate(sharper).max():.4f}"
    said = (
        "MSGD (Section 3): the mean squared gradient norm is under 2 (1-β) gap / (η T) + L η σ² / ((1-β)² B) "
        "+ 4 L² η² σ² / (1-β)², if η ≤ (1-β)² / ((1+β) L)."
    )
    return conclude("msgd-bound", said, lines, QUADRATIC, more, unit="norm, squared", shares=SHARES)


SHARPNESS = (1.0, 4.0, 16.0, 64.0)


def sharp(L: float) -> Problem:
    """Four coordinates of curvature 1 with a way to go, and one of curvature L that is at its minimum: gap 1/2."""
    start = np.array([0.5, 0.5, 0.5, 0.5, 0.0])
    return quadratic(f"L = {L:g}", np.array([1.0, 1.0, 1.0, 1.0, L]), start, even(1.0, 5))


def corollary_1(seeds: int) -> Finding:
    """The batch sqrt(C) for budgets that grow, on functions of growing L."""
    budgets = [4**k for k in range(6, 13)]
    rows: list[list[object]] = []
    ends, lines, powers, lost = [], [], [], []
    for slot, L in enumerate(SHARPNESS):
        problem, points, diverged = sharp(L), [], []
        for budget in budgets:
            found = theory.plan(budget, "sngm", gap=problem.gap, L=L, sigma=problem.sigma, beta=0.9)
            batch, steps = found.whole_batch, found.whole_steps
            mean, low, high = interval(simulate(problem, "sngm", np.array([found.lr]), 0.9, batch, steps, seeds).norm)
            rate = np.array([batch / np.sqrt(budget)])
            other = interval(simulate(problem, "msgd", rate, 0.9, batch, steps, seeds).norm)[0].item()
            diverged.append(other > 1e3 * problem.gap)
            reached = "diverged" if diverged[-1] else f"{other:.3g}"
            rows.append([L, budget, batch, *(float(f"{x:.4g}") for x in (mean.item(), found.bound)), reached])
            ends.append((low.item(), high.item(), found.bound))
            points.append((float(batch), mean.item()))
        lines.append(Series(problem.name, slot, points))
        logs = np.log(np.array(points))
        power = np.polyfit(2 * logs[:, 0], logs[:, 1], 1)[0]  # the budget is the batch squared
        powers.append(f"{power:.2f} for L = {L:g}")
        lost += [f"L = {L:g}"] if all(diverged) else []
    low, high, bound = np.array(ends).T
    figure = Figure(
        title="Corollary 1: SNGM at batch sqrt(C)",
        description="The mean gradient norm of SNGM at batch sqrt(C) falls with the budget C for every L.",
        x_label="batch, sqrt(C)", y_label="mean gradient norm", panels={"quadratics": lines},
        log_x=True, log_y=True, worst_at_bottom=False,
    )  # fmt: skip
    return Finding(
        name="corollary-1",
        statement=(
            "Corollary 1: with batch sqrt(C) and η = C^(-1/4) the mean gradient norm of SNGM is of order C^(-1/4), "
            "whatever L."
        ),
        rule=RULE.replace("the bound", "Corollary 1's bound"),
        verdict=under(low, high, bound),
        measured=(
            f"{len(rows)} points, upper limit over bound at most {(high / bound).max():.4f}; the norm falls as C to "
            f"the power {', '.join(powers)}; at that batch and η = B / sqrt(C) MSGD diverges for "
            f"{', '.join(lost) or 'none of them'}"
        ),
        head=("L", "gradients", "batch", "measured", "bound", "MSGD at that batch"),
        rows=rows,
        figures={"corollary-1": figure},
    )
