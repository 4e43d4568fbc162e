"""Theorems 1 to 3 of the paper, and the bounds of MSGD and LARS, compared with runs on functions of known constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np

from ... import theory
from ...report.figures import Series
from . import problems
from .findings import Array, Finding, chart, digits, interval, under
from .problems import Problem, simulate

MOMENTA = (0.0, 0.5, 0.9)
BATCHES = (1, 16, 256)
ANY_RATES = np.array([1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0])  # for a theorem without a condition on the learning rate
SHARES = np.array([0.01, 0.03, 0.1, 0.3, 1.0])  # fractions of the largest lr that a theorem's condition allows
# The run on the bowl starts at 1. Steps of length 2 go to -1 and back forever, which reaches the bound of Theorem 1.
OSCILLATING = np.array([0.03, 0.3, 2.0, 10.0])
# In these few steps and at these learning rates, momentum 0.9 overshoots the bowl's minimum by far, so kappa matters.
SHORT, OVERSHOOTING = 20, np.array([0.005, 0.01, 0.02, 0.05])
LONG = 4000  # steps; enough that noise is the largest term of a bound
RULE = (
    "Holds if the upper end of the 99 % interval over seeds is under the bound at every point of the grid, "
    "fails if the lower end is above it at one, open otherwise."
)
NEEDED = (
    " What is needed of a part is the smallest share of it with which the bound, otherwise unchanged, is still above "
    "the lower ends of all intervals: if it is above 0, the check would fail without that part."
)
HEAD = ("function", "steps", "momentum", "batch", "eta", "measured", "bound", "upper limit / bound")

Given = dict[str, Any]  # the arguments of a bound
# A part of a bound, such as one factor of a term, as a pair. The first entry is an argument of the bound: if it is 0,
# the term is 0. The second entry returns the factor by which the term changes if the part is left out.
Part = tuple[str, Callable[[Given], Any]]
TERMS: dict[str, Part] = {name: (key, lambda a: 0.0) for name, key in (("gap", "gap"), ("L", "L"), ("noise", "sigma"))}
KAPPA: dict[str, Part] = {"κ": ("L", lambda a: 1 / theory.kappa(a["beta"]))}


@dataclass(frozen=True, slots=True)
class Case:
    """A function, and the settings of the runs on it."""

    problem: Problem
    steps: int
    etas: Array | None = None
    """Learning rates; None for the learning rates of the theorem."""
    betas: Sequence[float] = MOMENTA


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured gradient norms with intervals and bounds, by learning rate, for one case, momentum and batch size."""

    problem: Problem
    given: Given
    mean: Array
    low: Array
    high: Array
    bound: Array
    without: dict[str, Array]
    """The bound without one of its parts, by the name of the part."""

    @property
    def ratios(self) -> Array:
        """The upper end of the interval divided by the bound."""
        return ratio(self.high, self.bound)

    @property
    def tightest(self) -> int:
        """The index of the learning rate where the measured value is closest to the bound."""
        return int(np.argmax(self.ratios))

    def row(self) -> list[object]:
        i = self.tightest
        numbers = (self.given["eta"][i], self.mean[i], self.bound[i], self.ratios[i])
        return [self.problem.name, *(self.given[key] for key in ("steps", "beta", "batch")), *map(digits, numbers)]

    def needed(self, part: str) -> float:
        """Return the smallest fraction of a part with which the bound is still above `low` at all learning rates."""
        size = self.bound - self.without[part]
        there = size > 0
        shares = (self.low[there] - self.without[part][there]) / size[there]
        return float(shares.max(initial=-np.inf))


def ratio(value: Array, bound: Array) -> Array:
    """Return value / bound, infinite for a bound of 0."""
    with np.errstate(divide="ignore"):
        return value / bound


@dataclass(frozen=True, slots=True)
class Theorem:
    """A bound, and the runs that check it."""

    name: str
    statement: str
    title: str
    """Title of the figure."""
    drawn: Problem
    method: str
    bound: str
    """Name of the function in `sngm.theory` that computes the bound."""
    cases: Sequence[Case]
    parts: dict[str, Part]
    slope: Callable[[Problem, float], float] = lambda problem, beta: 0.0
    """The condition on the learning rate is eta * slope(problem, beta) <= 1."""
    rates: Array = field(default_factory=lambda: ANY_RATES)
    """The learning rates to use if the slope is 0."""
    unit: str = "norm"
    more: Callable[[list[Measurement]], str] = lambda lines: ""
    """Function that returns text to add to the description of the measurements."""

    def __call__(self, seeds: int) -> Finding:
        """Run the cases at all momenta, batches and learning rates, and compare the gradient norms with the bound.

        Cases without noise are run with two seeds and one batch.
        """
        lines = [
            self.measure(case, beta, batch, seeds if case.problem.sigma else 2)
            for case in self.cases
            for beta in case.betas
            for batch in (BATCHES if case.problem.sigma else BATCHES[:1])
        ]
        low, high, bound, ratios = (
            np.concatenate([getattr(line, key) for line in lines]) for key in ("low", "high", "bound", "ratios")
        )
        closest = max(lines, key=lambda line: float(line.ratios.max()))
        needed = [f"{part} {max(0.0, *(line.needed(part) for line in lines)):.3g}" for part in self.parts]
        return Finding(
            statement=self.statement,
            rule=RULE + NEEDED,
            verdict=under(low, high, bound),
            measured=(
                f"{len(ratios)} points, upper limit over bound at most {ratios.max():.4f} ({closest.problem.name}, "
                f"momentum {closest.given['beta']:g}, batch {closest.given['batch']}, "
                f"eta {closest.given['eta'][closest.tightest]:.3g}), median {np.median(ratios):.2g}; "
                f"needed of each part: {', '.join(needed)}{self.more(lines)}"
            ),
            head=HEAD,
            rows=[line.row() for line in lines],
            figures={
                self.name: chart(
                    self.title,
                    f"The measured mean gradient {self.unit} of {self.drawn.formula} and its bound, against the "
                    "learning rate.",
                    "learning rate / largest admissible one" if self.slope(self.drawn, 0.0) else "learning rate",
                    f"mean gradient {self.unit}", self.panels(lines), log="xy",
                )
            },
        )  # fmt: skip

    def measure(self, case: Case, beta: float, batch: int, seeds: int) -> Measurement:
        """Run one case at one momentum, one batch and all learning rates."""
        problem, slope = case.problem, self.slope(case.problem, beta)
        etas = case.etas if case.etas is not None else SHARES / slope if slope else self.rates
        runs = simulate(problem, self.method, etas, beta, batch, case.steps, seeds)
        known = {
            "gap": problem.gap, "eta": etas, "steps": case.steps, "batch": batch, "L": problem.L,
            "sigma": problem.sigma, "beta": beta, "lam": problem.lam, "blocks": len(problem.blocks),
            "rho": runs.rho.max(axis=-1),  # the largest value over all runs at a learning rate
            "gamma_l": problem.phi and problem.phi.low, "gamma_u": problem.phi and problem.phi.high,
        }  # fmt: skip
        function = getattr(theory, self.bound)
        given = {name: known[name] for name in signature(function).parameters}

        def bound(**change: float) -> Array:
            return np.asarray(function(**{**given, **change}))

        whole, without = bound(), {}
        for part, (argument, left) in self.parts.items():
            rest = bound(**{argument: 0.0})
            without[part] = rest + (whole - rest) * left(given)
        measured = interval(runs.square if self.method == "msgd" else runs.norm)
        return Measurement(problem, given, *measured, whole, without)

    def panels(self, lines: list[Measurement]) -> dict[str, list[Series]]:
        """Return lines of measured values and bound, for the function `drawn` at the extreme momenta and batches."""
        panels = {}
        for line in lines:
            beta, batch = line.given["beta"], line.given["batch"]
            if line.problem is self.drawn and beta in MOMENTA[::2] and batch in (BATCHES[0], BATCHES[-1]):
                etas = (SHARES if self.slope(self.drawn, beta) else line.given["eta"]).tolist()
                measured, bound = (list(zip(etas, values.tolist(), strict=True)) for values in (line.mean, line.bound))
                panels[f"momentum {beta:g}, batch {batch}"] = [
                    Series("measured", 0, measured, (line.high - line.mean).tolist()),
                    Series("bound", 1, bound),
                ]
        return panels


THEOREM_1 = Theorem(
    "theorem-1",
    "Theorem 1: the mean gradient norm of SNGM is under (1-β) gap / (η T) + L κ η / 2 + 2 σ / sqrt(B), for any η.",
    "Theorem 1: SNGM on a noisy quadratic", problems.QUADRATIC, "sngm", "smooth_bound",
    cases=(
        Case(problems.BOWL, 400, OSCILLATING), Case(problems.BOWL, SHORT, OVERSHOOTING), Case(problems.QUADRATIC, 400),
        Case(problems.WAVES, 400), Case(problems.SLOPE, LONG),
    ),
    parts=TERMS | KAPPA,
)  # fmt: skip

THEOREM_2 = Theorem(
    "theorem-2",
    "Theorem 2: the mean gradient norm of SNGM on (L, λ)-smooth functions is under 2 (1-β) gap / (η T) + 8 L κ η "
    "+ 4 σ / sqrt(B), if 8 η κ λ ≤ 1.",
    "Theorem 2: SNGM on a sum of cosh(x) - 1", problems.COSH, "sngm", "relaxed_bound",
    cases=(
        Case(problems.COSH, 1000), Case(problems.QUARTIC, 1000), Case(problems.EXP, 1000),
        Case(problems.BOWL, 400, OSCILLATING), Case(problems.BOWL, SHORT, OVERSHOOTING), Case(problems.QUADRATIC, 400),
        Case(problems.SLOPE, LONG),
    ),
    parts=TERMS | KAPPA,
    slope=lambda problem, beta: 8 * theory.kappa(beta) * problem.lam,
)  # fmt: skip

THEOREM_3 = Theorem(
    "theorem-3",
    "Theorem 3: the mean gradient norm of block-wise SNGM is under 2 ρ (1-β) gap / (η T) + 8 L κ ρ S η "
    "+ 2 σ (1 + ρ sqrt(S)) / sqrt(B), if 8 η κ λ ρ S ≤ 1.",
    "Theorem 3: block-wise SNGM on four blocks of a quadratic", problems.UNEVEN, "block-sngm", "block_bound",
    cases=(
        Case(problems.UNEVEN, 400), Case(problems.COUPLED, 400), Case(problems.COSH, 400), Case(problems.QUARTIC, 400),
        Case(problems.BOWLS, 400, OSCILLATING), Case(problems.BOWLS, SHORT, OVERSHOOTING), Case(problems.SLOPES, LONG),
    ),
    parts=TERMS | KAPPA | {"S": ("L", lambda a: 1 / a["blocks"])},
    # rho is not known before the run, but it is at most 1
    slope=lambda problem, beta: 8 * theory.kappa(beta) * problem.lam * len(problem.blocks),
    rates=ANY_RATES[:-1],
)  # fmt: skip


def even_noise(a: Given) -> Any:
    """Return the factor by which the noise term of LARS's bound changes if γ_u/γ_l is left out."""
    even = a["rho"] * np.sqrt(a["blocks"])
    return (1 + even) / (1 + even * a["gamma_u"] / a["gamma_l"])


LARS = Theorem(
    "lars-bound",
    "Remark on Theorem 3, as we derive it: with γ_l ≤ φ ≤ γ_u the mean gradient norm of LARS is under "
    "2 ρ (1-β) gap / (γ_l η T) + 8 L κ ρ S η γ_u²/γ_l + 2 σ (1 + ρ sqrt(S) γ_u/γ_l) / sqrt(B).",
    "The remark on LARS: four blocks of a quadratic, φ from 1/2 to 2", problems.SCALED_UNEVEN, "lars", "lars_bound",
    cases=(
        Case(problems.SLOW_BOWLS, 400, np.array([0.01, 0.02, 0.03, 0.04])), Case(problems.SCALED_UNEVEN, 400),
        Case(problems.SCALED_SLOPES, LONG),
        Case(problems.STAIRS, 21_600, np.array([1 / 128]), betas=(0.0,)),  # so that a step on the stairs has length 1
    ),
    parts=TERMS | {
        "1/γ_l of the gap": ("gap", lambda a: a["gamma_l"]),
        "γ_u²/γ_l of L": ("L", lambda a: a["gamma_l"] / a["gamma_u"] ** 2),
        "γ_u/γ_l of L": ("L", lambda a: a["gamma_l"] / a["gamma_u"]),
        "γ_u/γ_l of the noise": ("sigma", even_noise),
    },
    rates=ANY_RATES[:-1],
)  # fmt: skip


def third_over_second(a: Given) -> Any:
    """Return the third term of MSGD's bound divided by the second; both are proportional to sigma squared."""
    return 4 * a["L"] * a["eta"] * a["batch"]


def slip_1(lines: list[Measurement]) -> str:
    """Describe how MSGD's runs compare with its bound if the third term is divided by the batch size or left out."""
    mended, third = [], []
    for line in lines:
        quiet, over = line.without["noise (terms 2 and 3)"], third_over_second(line.given)
        noise = (line.bound - quiet) * (1 + over / line.given["batch"]) / (1 + over)
        mended.append(ratio(line.high, quiet + noise).max())
        if line.problem.sigma:
            third.append(ratio(line.mean, line.without["term 3"]).max())
    return (
        f"; with term 3 divided by B (slip 1) at most {max(mended):.4f} of the bound, and the mean "
        f"at most {max(third):.4f} of the bound without term 3 where there is noise"
    )


MSGD = Theorem(
    "msgd-bound",
    "MSGD (Section 3): the mean squared gradient norm is under 2 (1-β) gap / (η T) + L η σ² / ((1-β)² B) "
    "+ 4 L² η² σ² / (1-β)², if η ≤ (1-β)² / ((1+β) L).",
    "Section 3: momentum SGD on a noisy quadratic", problems.QUADRATIC, "msgd", "msgd_bound",
    cases=[Case(getattr(problems, name), 400) for name in ("BOWL", "QUADRATIC", "WAVES", "SLOPE", "STILL")],
    parts={
        "gap": TERMS["gap"],
        "noise (terms 2 and 3)": TERMS["noise"],
        "term 2": ("sigma", lambda a: 1 - 1 / (1 + third_over_second(a))),
        "term 3": ("sigma", lambda a: 1 / (1 + third_over_second(a))),
        "1/(1-β)²": ("sigma", lambda a: (1 - a["beta"]) ** 2),
    },
    slope=lambda problem, beta: theory.kappa(beta) * problem.L,
    unit="norm, squared",
    more=slip_1,
)  # fmt: skip
