"""Theorems 1 to 3, and the bounds of LARS and MSGD, on functions whose constants are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import theory
from ...report.figures import Figure, Series
from .findings import Array, Finding, interval, under
from .problems import (
    BOWL,
    BOWLS,
    COSH,
    COUPLED,
    EXP,
    QUADRATIC,
    QUARTIC,
    SCALED_SLOPES,
    SCALED_UNEVEN,
    SLOPE,
    SLOPES,
    SLOW_BOWLS,
    STAIRS,
    STILL,
    UNEVEN,
    WAVES,
    Problem,
    Runs,
    simulate,
)  # fmt: skip

SWEPT_BETAS = (0.0, 0.5, 0.9)
SWEPT_BATCHES = (1, 16, 256)
ANY_RATES = np.array([1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0])  # where any rate is admitted
SHARES = np.array([0.01, 0.03, 0.1, 0.3, 1.0])  # of the largest rate, where there is a condition
# The bowl's start is 1: a step of 2 goes to -1, and back, for ever, which is all that Theorem 1 allows.
SWINGING = np.array([0.03, 0.3, 2.0, 10.0])
# Over so few steps, momentum 0.9 runs far past the bowl's minimum at these rates: that is where kappa counts.
SHORT, PASSING = 20, np.array([0.005, 0.01, 0.02, 0.05])
LONG = 4000  # so many steps that noise is the largest term of a bound
MANY = 1e300  # a batch so large that a term divided by it is 0
RULE = (
    "Holds if the upper end of the 99 % interval over seeds is under the bound at every point of the grid, "
    "fails if the lower end is above it at one, open otherwise."
)
NEEDED = (
    " What is needed of a part is the smallest share of it, with all else left whole, that keeps the bound above the "
    "lower ends: where it is above 0, the check would fail without that part."
)


@dataclass(frozen=True, slots=True)
class Case:
    """A function, and how to run on it."""

    problem: Problem
    steps: int
    etas: Array | None = None
    """None: those of the theorem."""
    betas: Sequence[float] = SWEPT_BETAS


def against(value: Array, bound: Array) -> Array:
    """The ratio; infinite for a bound of 0, which is a wrong one and is to be found out."""
    with np.errstate(divide="ignore"):
        return value / bound


@dataclass(frozen=True, slots=True)
class Line:
    """One case, momentum and batch size: what was measured at each learning rate, and the bound."""

    problem: Problem
    steps: int
    beta: float
    batch: int
    etas: Array
    mean: Array
    low: Array
    high: Array
    bound: Array
    without: dict[str, Array]
    """The bound without one of its parts, by the part's name."""

    @property
    def ratios(self) -> Array:
        """The upper end of the interval over the bound."""
        return against(self.high, self.bound)

    @property
    def tightest(self) -> int:
        """Where the measured value comes closest to the bound."""
        return int(np.argmax(self.ratios))

    def row(self) -> list[object]:
        i = self.tightest
        numbers = (self.etas[i], self.mean[i], self.bound[i], self.ratios[i])
        given = (self.problem.name, self.steps, self.beta, self.batch)
        return [*given, *(float(f"{number:.4g}") for number in numbers)]

    def needed(self, part: str) -> float:
        """The share of this part that is needed, at the learning rate where it is the largest."""
        size = self.bound - self.without[part]
        there = size > 0
        shares = (self.low[there] - self.without[part][there]) / size[there]
        return float(shares.max(initial=-np.inf))


HEAD = ("function", "steps", "momentum", "batch", "eta", "measured", "bound", "upper limit / bound")
Etas = Callable[[Problem, float], Array]
Bounds = Callable[[dict[str, Any], Problem, Runs], tuple[Array, dict[str, Array]]]


def sweep(
    cases: Sequence[Case], method: str, etas: Etas, bounds: Bounds, seeds: int, squared: bool = False
) -> list[Line]:
    """The grid of a theorem. Without noise all seeds are alike, and so are all batch sizes."""
    lines = []
    for case in cases:
        problem, steps = case.problem, case.steps
        for beta in case.betas:
            rates = etas(problem, beta) if case.etas is None else case.etas
            for batch in SWEPT_BATCHES if problem.sigma else SWEPT_BATCHES[:1]:
                runs = simulate(problem, method, rates, beta, batch, steps, seeds if problem.sigma else 2)
                measured = interval(runs.square if squared else runs.norm)
                given = {
                    "gap": problem.gap, "steps": steps, "L": problem.L, "sigma": problem.sigma,
                    "eta": rates, "batch": batch, "beta": beta,
                }  # fmt: skip
                lines.append(Line(problem, steps, beta, batch, rates, *measured, *bounds(given, problem, runs)))
    return lines


def in_parts(bound: Callable[..., Any], given: dict[str, Any]) -> tuple[Array, dict[str, Array]]:
    """A bound of SNGM, and what is left of it without its first, second or third term, or without the factor kappa."""
    whole, flat = (np.asarray(bound(**{**given, **change})) for change in ({}, {"L": 0.0}))
    return whole, {
        "gap": np.asarray(bound(**{**given, "gap": 0.0})),
        "L": flat,
        "noise": np.asarray(bound(**{**given, "sigma": 0.0})),
        "κ": flat + (whole - flat) / theory.kappa(given["beta"]),
    }


def conclude(
    name: str,
    statement: str,
    title: str,
    lines: list[Line],
    drawn: Problem,
    more: str = "",
    unit: str = "norm",
    shares: Array | None = None,
) -> Finding:
    """The verdict over all lines, with the one problem drawn."""
    low, high, bound = (np.concatenate([getattr(line, key) for line in lines]) for key in ("low", "high", "bound"))
    ratios = np.concatenate([line.ratios for line in lines])
    closest = max(lines, key=lambda line: float(line.ratios.max()))
    needed = {part: max(0.0, *(line.needed(part) for line in lines)) for part in lines[0].without}
    return Finding(
        name=name,
        statement=statement,
        rule=RULE + NEEDED,
        verdict=under(low, high, bound),
        measured=(
            f"{len(ratios)} points, upper limit over bound at most {ratios.max():.4f} ({closest.problem.name}, "
            f"momentum {closest.beta:g}, batch {closest.batch}, eta {closest.etas[closest.tightest]:.3g}), "
            f"median {np.median(ratios):.2g}; needed of each part: "
            f"{', '.join(f'{part} {share:.3g}' for part, share in needed.items())}{more}"
        ),
        head=HEAD,
        rows=[line.row() for line in lines],
        figures={name: picture(lines, drawn, title, unit, shares)},
    )


def picture(lines: list[Line], drawn: Problem, title: str, unit: str, shares: Array | None) -> Figure:
    """Measured and bound against the learning rate, or its share of the largest one, for the ends of the grid."""
    panels = {}
    for line in lines:
        if (
            line.problem is drawn
            and line.beta in (SWEPT_BETAS[0], SWEPT_BETAS[-1])
            and line.batch in (SWEPT_BATCHES[0], SWEPT_BATCHES[-1])
        ):
            etas = (line.etas if shares is None else shares).tolist()
            half = (line.high - line.mean).tolist()
            panels[f"momentum {line.beta:g}, batch {line.batch}"] = [
                Series("measured", 0, list(zip(etas, line.mean.tolist(), strict=True)), half),
                Series("bound", 1, list(zip(etas, line.bound.tolist(), strict=True))),
            ]
    return Figure(
        title=title,
        description=f"The measured mean gradient {unit} of {drawn.formula} and its bound, against the learning rate.",
        x_label="learning rate" if shares is None else "learning rate / largest admissible one",
        y_label=f"mean gradient {unit}",
        panels=panels,
        log_x=True,
        log_y=True,
        worst_at_bottom=False,
    )


def theorem_1(seeds: int) -> Finding:
    """SNGM on smooth functions, at any learning rate."""
    cases = [
        Case(BOWL, 400, SWINGING), Case(BOWL, SHORT, PASSING), Case(QUADRATIC, 400), Case(WAVES, 400),
        Case(SLOPE, LONG),
    ]  # fmt: skip
    lines = sweep(cases, "sngm", lambda *_: ANY_RATES, lambda given, *_: in_parts(theory.smooth_bound, given), seeds)
    said = (
        "Theorem 1: the mean gradient norm of SNGM is under (1-β) gap / (η T) + L κ η / 2 + 2 σ / sqrt(B), for any η."
    )
    return conclude("theorem-1", said, "Theorem 1: SNGM on a noisy quadratic", lines, QUADRATIC)


def theorem_2(seeds: int) -> Finding:
    """SNGM on relaxed-smooth functions, and at any learning rate on smooth ones, for which λ is 0."""

    def rates(problem: Problem, beta: float) -> Array:
        return np.asarray(SHARES / (8 * theory.kappa(beta) * problem.lam)) if problem.lam else ANY_RATES

    def bounds(given: dict[str, Any], problem: Problem, _: Runs) -> tuple[Array, dict[str, Array]]:
        return in_parts(theory.relaxed_bound, {**given, "lam": problem.lam})

    cases = [
        Case(COSH, 1000), Case(QUARTIC, 1000), Case(EXP, 1000), Case(BOWL, 400, SWINGING), Case(BOWL, SHORT, PASSING),
        Case(QUADRATIC, 400), Case(SLOPE, LONG),
    ]  # fmt: skip
    lines = sweep(cases, "sngm", rates, bounds, seeds)
    said = (
        "Theorem 2: on (L, λ)-smooth functions it is under 2 (1-β) gap / (η T) + 8 L κ η + 4 σ / sqrt(B), "
        "if 8 η κ λ ≤ 1."
    )
    return conclude("theorem-2", said, "Theorem 2: SNGM on a sum of cosh(x) - 1", lines, COSH, shares=SHARES)


def theorem_3(seeds: int) -> Finding:
    """Block-wise SNGM; rho is the largest of all runs at a learning rate."""

    def bounds(given: dict[str, Any], problem: Problem, runs: Runs) -> tuple[Array, dict[str, Array]]:
        blocks = len(problem.blocks)
        given = {**given, "lam": problem.lam, "blocks": blocks, "rho": runs.rho.max(axis=-1)}
        whole, without = in_parts(theory.block_bound, given)
        return whole, {**without, "S": without["L"] + (whole - without["L"]) / blocks}

    def rates(problem: Problem, beta: float) -> Array:
        # rho is not known before the run, but it is at most 1
        limit = 8 * theory.kappa(beta) * problem.lam * len(problem.blocks)
        return np.asarray(SHARES / limit) if problem.lam else ANY_RATES[:-1]

    cases = [
        Case(UNEVEN, 400), Case(COUPLED, 400), Case(COSH, 400), Case(QUARTIC, 400), Case(BOWLS, 400, SWINGING),
        Case(BOWLS, SHORT, PASSING), Case(SLOPES, LONG),
    ]  # fmt: skip
    lines = sweep(cases, "block-sngm", rates, bounds, seeds)
    said = (
        "Theorem 3: that of block-wise SNGM is under 2 ρ (1-β) gap / (η T) + 8 L κ ρ S η "
        "+ 2 σ (1 + ρ sqrt(S)) / sqrt(B), if 8 η κ λ ρ S ≤ 1."
    )
    return conclude("theorem-3", said, "Theorem 3: block-wise SNGM on four blocks of a quadratic", lines, UNEVEN)


def lars_remark(seeds: int) -> Finding:
    """LARS with gamma_l <= phi <= gamma_u, by the bound that the remark on Theorem 3 describes."""

    def bounds(given: dict[str, Any], problem: Problem, runs: Runs) -> tuple[Array, dict[str, Array]]:
        assert problem.phi is not None
        low, high = problem.phi.low, problem.phi.high
        given = {
            **given, "lam": 0.0, "blocks": len(problem.blocks), "rho": runs.rho.max(axis=-1),
            "gamma_l": low, "gamma_u": high,
        }  # fmt: skip
        whole, without = in_parts(theory.lars_bound, given)
        free, flat, quiet = (without[part] for part in ("gap", "L", "noise"))
        even_noise = np.asarray(theory.lars_bound(**{**given, "gap": 0.0, "L": 0.0, "gamma_u": low}))
        return whole, {
            "gap": free,
            "L": flat,
            "noise": quiet,
            "1/γ_l of the gap": free + (whole - free) * low,
            "γ_u²/γ_l of L": flat + (whole - flat) * low / high**2,
            "γ_u/γ_l of L": flat + (whole - flat) * low / high,
            "γ_u/γ_l of the noise": quiet + even_noise,
        }

    cases = [
        Case(SLOW_BOWLS, 400, np.array([0.01, 0.02, 0.03, 0.04])), Case(SCALED_UNEVEN, 400), Case(SCALED_SLOPES, LONG),
        Case(STAIRS, 21_600, np.array([1 / 128]), betas=(0.0,)),  # for the stairs a step must be 1 long
    ]  # fmt: skip
    lines = sweep(cases, "lars", lambda *_: ANY_RATES[:-1], bounds, seeds)
    said = (
        "Remark on Theorem 3, as we derive it: with γ_l ≤ φ ≤ γ_u that of LARS is under 2 ρ (1-β) gap / (γ_l η T) "
        "+ 8 L κ ρ S η γ_u²/γ_l + 2 σ (1 + ρ sqrt(S) γ_u/γ_l) / sqrt(B)."
    )
    title = "The remark on LARS: four blocks of a quadratic, φ from 1/2 to 2"
    return conclude("lars-bound", said, title, lines, SCALED_UNEVEN)


def msgd(seeds: int) -> Finding:
    """Section 3's bound of the squared norm; slip 1's sharper form is measured beside it."""
    sharper: list[Array] = []

    def bounds(given: dict[str, Any], problem: Problem, runs: Runs) -> tuple[Array, dict[str, Array]]:
        def bound(**change: float) -> Array:
            return np.asarray(theory.msgd_bound(**{**given, **change}))

        mended = bound(sigma=problem.sigma / np.sqrt(given["batch"]), batch=1)
        sharper.append(against(interval(runs.square)[2], mended))
        whole, quiet, third = bound(), bound(sigma=0.0), bound(gap=0.0, batch=MANY)
        return whole, {
            "gap": bound(gap=0.0),
            "noise (terms 2 and 3)": quiet,
            "term 2": whole - bound(gap=0.0) + third,
            "term 3": whole - third,
            "1/(1-β)²": quiet + (whole - quiet) * (1 - given["beta"]) ** 2,
        }

    def rates(problem: Problem, beta: float) -> Array:
        return np.asarray(SHARES / (theory.kappa(beta) * problem.L))

    cases = [Case(problem, 400) for problem in (BOWL, QUADRATIC, WAVES, SLOPE, STILL)]
    lines = sweep(cases, "msgd", rates, bounds, seeds, squared=True)
    third = max(float(against(line.mean, line.without["term 3"]).max()) for line in lines if line.problem.sigma)
    more = (
        f"; with term 3 divided by B (slip 1) at most {np.concatenate(sharper).max():.4f} of the bound, and the mean "
        f"at most {third:.4f} of the bound without term 3 where there is noise"
    )
    said = (
        "MSGD (Section 3): the mean squared gradient norm is under 2 (1-β) gap / (η T) + L η σ² / ((1-β)² B) "
        "+ 4 L² η² σ² / (1-β)², if η ≤ (1-β)² / ((1+β) L)."
    )
    title = "Section 3: momentum SGD on a noisy quadratic"
    return conclude("msgd-bound", said, title, lines, QUADRATIC, more, unit="norm, squared", shares=SHARES)
