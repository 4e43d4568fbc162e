"""Checks of the largest batch of each method for a fixed number of gradients, and of block-wise normalisation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import theory
from ...report.figures import Figure, Series
from .corollaries import SHARPNESS, sharp
from .findings import ROUNDING, Array, Finding, Interval, chart, digits, interval, judge
from .problems import UNEVEN, Problem, even, quadratic, simulate

Flags = NDArray[np.bool_]

BUDGET = 2**18  # C, the number of gradients; sqrt(C) is 512
TRIED_BATCHES = [2**k for k in range(2, 15)]
SLACK = 2.0  # a batch is tolerated if it increases the gradient norm by at most this factor
FIXED = (0.15, 0.25, 0.5, 1.0)  # target norms, for a second definition of "tolerated"; the initial norm is 1
BETA = 0.9
TUNING_RATES = np.array([float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 2, 5)])
RACE_RATES = np.geomspace(1e-5, 0.5, 60)  # with twice as many learning rates, no norm changes by more than 0.3 %
TABLE, TUNED = "the learning rates of Table 1", f"the best of {len(TUNING_RATES)} learning rates"
TOLERATES = (
    f"A method tolerates a batch if its mean gradient norm is at most {SLACK:g} times that of MSGD at batch "
    f"{TRIED_BATCHES[0]} on the same function, with C = {BUDGET} gradients in all. A batch is undecided if the 99 % "
    f"interval over seeds includes that limit; all are undecided if MSGD diverges at batch {TRIED_BATCHES[0]}."
)


class Limits(NamedTuple):
    """Lower and upper limit of the largest tolerated batch, for each L.

    `sure` is the largest batch whose gradient norm has its whole confidence interval below the target norm, or 0.
    `possible` is the largest batch whose interval has its lower end below the target norm, or 0. `possible` is infinite
    if this is the largest batch of the grid, because a larger batch may be tolerated as well.
    """

    sure: Array
    possible: Array


def limits(ends: Interval, target: Any) -> Limits:
    """Return the limits of the largest batch that reaches the target norm; `target` is a number, or one for each L.

    The arrays of `ends`, the gradient norms, have a row for each L and a column for each batch.

    >>> two = np.array([[0.1] * 5 + [0.9] * 8, [0.1] * 2 + [0.4] * 2 + [0.9] * 9])
    >>> in_words(limits(Interval(two, two - 0.01, two + 0.01), 0.4))
    '64 and 8 to 32'
    """
    target = np.broadcast_to(target, len(ends.mean))[:, None]
    known = np.isfinite(target)
    sure = np.max(np.where(known & (ends.high <= target), TRIED_BATCHES, 0), axis=1)
    possible = np.max(np.where(~known | (ends.low <= target), [*TRIED_BATCHES[:-1], np.inf], 0), axis=1)
    return Limits(sure.astype(float), possible)


@lru_cache(maxsize=2)
def measure(rates: str, seeds: int) -> dict[str, Interval]:
    """Return the gradient norms of SNGM and MSGD at each L and batch, with the learning rates `TABLE` or `TUNED`."""
    measured: dict[str, list[list[Array]]] = {"msgd": [], "sngm": []}
    for method, by_batch in measured.items():
        for batch in TRIED_BATCHES:
            of_table = batch / np.sqrt(BUDGET) if method == "msgd" else np.sqrt(batch / BUDGET)
            etas = np.array([of_table]) if rates == TABLE else TUNING_RATES
            every = np.tile(etas, len(SHARPNESS))
            runs = simulate(all_sharp(len(etas)), method, every, BETA, batch, BUDGET // batch, seeds)
            mean, low, high = (end.reshape(len(SHARPNESS), -1) for end in interval(runs.norm))
            best = np.arange(len(SHARPNESS)), mean.argmin(axis=1)
            by_batch.append([mean[best], low[best], high[best]])
    return {method: Interval(*np.array(by_batch).transpose(1, 2, 0)) for method, by_batch in measured.items()}


def all_sharp(rates: int) -> Problem:
    """Return the quadratics `sharp(L)` for every L as one vectorised problem, each repeated for all learning rates."""
    curvature = np.repeat([sharp(L).gradient(np.ones(5)) for L in SHARPNESS], rates, axis=0)[:, None]
    return replace(sharp(1.0), gradient=lambda w: curvature * w)


def tolerated(ends: dict[str, Interval]) -> dict[str, Limits]:
    """Return the largest tolerated batches of both methods, by the rule `TOLERATES`."""
    target = SLACK * ends["msgd"].mean[:, 0]
    return {method: limits(each, target) for method, each in ends.items()}


def in_words(found: Limits) -> str:
    """Format the largest batch for each L, such as "1024, 256, 64 and 16"."""
    return listed(
        "unknown" if not sure and np.isinf(possible)
        else f"{sure:.0f} or more" if np.isinf(possible)
        else f"{sure:.0f}" if sure == possible
        else f"{sure:.0f} to {possible:.0f}"
        for sure, possible in zip(*found, strict=True)
    )  # fmt: skip


def listed(words: Iterable[str]) -> str:
    """Join words with commas and "and", such as "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


EACH_L = f"L = {listed(f'{L:g}' for L in SHARPNESS)}"


def falls(found: Limits) -> tuple[bool, bool]:
    """Return whether the largest batch is certainly smaller at the largest L than at the smallest, or certainly not."""
    return bool(found.possible[-1] < found.sure[0]), bool(found.sure[-1] >= found.possible[0])


def above(found: dict[str, Limits]) -> tuple[Flags, Flags]:
    """Return, for each L, whether SNGM's largest batch is certainly above MSGD's, and whether it certainly is not."""
    return found["sngm"].sure > found["msgd"].possible, found["sngm"].possible <= found["msgd"].sure


AT_FIXED = f"if a batch is instead tolerated up to a fixed norm of {', '.join(f'{norm:g}' for norm in FIXED)}"


def at_fixed_norms(ends: dict[str, Interval]) -> tuple[str, str]:
    """Describe how SNGM's largest batch that reaches a norm in `FIXED` changes with L, and compare it with MSGD's."""
    found = [{method: limits(each, norm) for method, each in ends.items()} for norm in FIXED]
    falling = sum(falls(each["sngm"])[0] for each in found)
    reached = np.array([np.maximum(each["sngm"].possible, each["msgd"].possible) > 0 for each in found])
    larger, not_larger = (np.array(side) & reached for side in zip(*map(above, found), strict=True))
    return (
        f"SNGM's largest one falls as L grows for {falling} of the {len(FIXED)} norms",
        f"{AT_FIXED}, SNGM's largest one is above MSGD's at {larger.sum()} of the {reached.sum()} pairs of norm and L "
        f"that one of the two reaches, and not above it at {not_larger.sum()}",
    )


def batch_limit_msgd(seeds: int) -> Finding:
    """Check whether MSGD's largest tolerated batch falls as L grows, at Table 1's learning rates."""
    ends = measure(TABLE, seeds)
    found = tolerated(ends)
    return Finding(
        "Table 1 read with constants: at a fixed number of gradients, MSGD's largest batch falls as L grows.",
        f"{TOLERATES} Holds if the largest batch at L = 64 is below that at L = 1, fails if not, open if undecided.",
        judge(*falls(found["msgd"])),
        f"with {TABLE}, MSGD tolerates {in_words(found['msgd'])} at {EACH_L}",
        **numbers(TABLE, ends, found),
    )


def batch_limit_sngm(seeds: int) -> Finding:
    """Check whether SNGM's largest tolerated batch falls as L grows, at Table 1's learning rates."""
    ends = measure(TABLE, seeds)
    found = tolerated(ends)["sngm"]
    lost = {method: int(sharp(1.0).diverges(each.mean).sum()) for method, each in ends.items()}
    return Finding(
        "Table 1 read with constants: at a fixed number of gradients, SNGM's largest batch does not fall as L grows.",
        f"{TOLERATES} Fails if the largest batch at L = 64 is below that at L = 1, holds if not, open if undecided.",
        judge(*falls(found)[::-1]),
        f"with {TABLE}, SNGM tolerates {in_words(found)} at {EACH_L}; it diverges at {lost['sngm']} of "
        f"the {ends['sngm'].mean.size} points, MSGD at {lost['msgd']}; {AT_FIXED}, {at_fixed_norms(ends)[0]}",
        expected="fails",
        why="docs/theory.md, What the orders hide: the order in C does not depend on L, but its constant does",
    )


def batch_larger(seeds: int, rates: str = TABLE) -> Finding:
    """Compare SNGM's largest tolerated batch with MSGD's."""
    ends = measure(rates, seeds)
    found = tolerated(ends)
    return Finding(
        "Table 1 read with constants: at the same number of gradients, SNGM tolerates a larger batch than MSGD.",
        f"{TOLERATES} Holds if SNGM's largest batch is above MSGD's at every L, fails if not at one, open otherwise.",
        judge(*above(found)),
        f"with {rates}, SNGM tolerates {in_words(found['sngm'])} and MSGD {in_words(found['msgd'])} at {EACH_L}; "
        f"{at_fixed_norms(ends)[1]}",
    )


def batch_larger_tuned(seeds: int) -> Finding:
    """Compare SNGM's largest tolerated batch with MSGD's, with the best learning rate of each method and batch."""
    found, ends = batch_larger(seeds, TUNED), measure(TUNED, seeds)
    return replace(
        found,
        statement=found.statement.replace("constants: at", "constants, every learning rate tuned: at"),
        measured=f"{found.measured}; {at_fixed_norms(ends)[0]}",
        expected="fails",
        why="docs/theory.md, What the orders hide: tuned, MSGD has the lower bound, and noise costs SNGM more",
        **numbers(TUNED, ends, tolerated(ends)),
    )


def numbers(rates: str, ends: dict[str, Interval], found: dict[str, Limits]) -> dict[str, Any]:
    """Return the table and the figure of gradient norms by batch, as fields of a finding."""
    rows: list[list[object]] = []
    panels = {}
    for method, each in ends.items():
        series = panels[method.upper()] = list[Series]()
        for slot, (L, norms, sure) in enumerate(zip(SHARPNESS, each.mean, found[method].sure, strict=True)):
            pairs = list(zip(TRIED_BATCHES, norms.tolist(), strict=True))
            lost = [batch for batch, norm in pairs if sharp(L).diverges(norm)]
            points = [(float(batch), norm) for batch, norm in pairs if batch not in lost]
            rows += [[method, L, int(batch), digits(norm)] for batch, norm in points]
            rows += [[method, L, batch, "diverged"] for batch in lost]
            series.append(Series(f"L = {L:g}", slot, points, lost=[float(batch) for batch in lost], ring=float(sure)))
    figure = chart(
        f"Gradient norm against batch size, with {rates}",
        f"{BUDGET} gradients on quadratics. Rings mark the largest batch tolerated, crosses divergence.",
        "batch", "mean gradient norm", panels, log="xy",
    )  # fmt: skip
    name = "batch-table-1" if rates == TABLE else "batch-tuned"
    return {"head": ("method", "L", "batch", "norm"), "rows": rows, "figures": {name: figure}}


# ---------------------------------------------------------------- block-wise


def block_bounds(_: int) -> Finding:
    """Compare the bounds of Theorems 2 and 3, as Section 6 of the paper does, for random constants."""
    random = np.random.default_rng(6)
    count = 100_000

    def decades(low: float, high: float) -> Array:
        return 10 ** random.uniform(low, high, count)

    blocks = np.floor(decades(0, 3))
    rho = np.exp(random.uniform(0, 1, count) * -0.5 * np.log(blocks))  # between 1/sqrt(S) and 1
    lam = np.where(random.random(count) < 0.5, 0.0, decades(-3, 3))
    shared = {
        "gap": decades(-3, 3), "steps": decades(0, 6), "batch": decades(0, 5), "L": decades(-3, 3),
        "sigma": decades(-3, 3), "beta": random.uniform(0, 0.99, count), "lam": lam,
    }  # fmt: skip
    ratios = theory.block_best(**shared, blocks=blocks, rho=rho).bound / theory.relaxed_best(**shared).bound
    right = ratios >= 1 - ROUNDING
    return Finding(
        "Section 6: at the best η of each, Theorem 3's bound is never below Theorem 2's.",
        f"Holds if it is not for any of the draws, up to rounding (a relative {ROUNDING:g}), fails otherwise.",
        judge(right, ~right),
        f"{count} random draws: block-wise bound over global from {ratios.min():.6f} to {ratios.max():.4g}",
    )


# One block is at its minimum and has all the noise. The other block has no noise and starts far from its minimum.
QUIET = quadratic(
    "noise in one block", np.append(np.ones(10), 0.01), np.append(np.zeros(10), 10.0),
    np.append(even(1.0, 10), 0.0), blocks=(10, 1),
)  # fmt: skip
QUIET_BATCHES = (1, 4, 16, 64, 256, 1024)
# All blocks have the same curvature and the same distance to the minimum.
ALIKE = quadratic("blocks alike", np.ones(20), np.ones(20), even(0.1, 20), blocks=(5, 5, 5, 5))
# Found by a random search: a quadratic on which block-wise steps are faster without any noise.
NO_NOISE = quadratic(
    "no noise", np.array([0.1429, 0.0845, 0.1796, 1.0, 0.0032, 0.0265, 0.0314, 0.0045]),
    np.array([31.443, 31.443, 7.386, 7.386, 0.076, 0.076, 5.524, 5.524]), np.zeros(8), blocks=(2, 2, 2, 2),
)  # fmt: skip
LABELS = ("SNGM", "block-wise SNGM")
# Without noise the minimum over learning rates is narrow. With momentum 0.9 it is so narrow that a finer grid could
# change the order of the two methods, so NO_NOISE is run with less momentum.
NO_NOISE_RATES = np.geomspace(0.1, 3, 400)


class Best(NamedTuple):
    """The learning rate with the lowest mean gradient norm, and this norm with its confidence interval."""

    eta: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Race:
    """SNGM and block-wise SNGM on one function: the mean gradient norm at each learning rate, and the lowest ones."""

    name: str
    batch: int
    rates: Array
    means: list[Array]
    best: list[Best]

    @property
    def faster(self) -> bool:
        """Whether the confidence interval of block-wise SNGM's norm is below that of SNGM's."""
        return self.best[1].high < self.best[0].low

    @property
    def not_faster(self) -> bool:
        """Whether the confidence interval of block-wise SNGM's norm is above that of SNGM's."""
        return self.best[1].low >= self.best[0].high

    @property
    def ratio(self) -> float:
        """The lowest gradient norm of block-wise SNGM divided by that of SNGM."""
        return self.best[1].mean / self.best[0].mean

    def row(self) -> list[Any]:
        best = (digits(x, 3) for each in self.best for x in (each.mean, each.eta))
        return [self.name, self.batch, *best, round(self.ratio, 3)]


def race(problem: Problem, batch: int, rates: Array, beta: float, steps: int, seeds: int) -> Race:
    """Run SNGM and block-wise SNGM at the same learning rates, with the same noise."""
    means, best = [], []
    for method in ("sngm", "block-sngm"):
        mean, *ends = interval(simulate(problem, method, rates, beta, batch, steps, seeds).norm)
        i = int(np.argmin(mean))
        means.append(mean)
        best.append(Best(*(float(values[i]) for values in (rates, mean, *ends))))
    return Race(problem.name, batch, rates, means, best)


def block_speed(seeds: int) -> Finding:
    """Compare the gradient norms that SNGM and block-wise SNGM reach on quadratics, each at its best learning rate."""
    uneven = replace(UNEVEN, name="blocks of uneven curvature")
    noisy = [race(problem, 1, RACE_RATES, BETA, 2000, seeds) for problem in (uneven, ALIKE, QUIET)]
    quiet = [noisy[-1], *(race(QUIET, batch, RACE_RATES, BETA, 2000, seeds) for batch in QUIET_BATCHES[1:])]
    without = [
        race(replace(NO_NOISE, name=f"no noise, momentum {beta:g}"), 1, NO_NOISE_RATES, beta, 500, seeds=2)
        for beta in (0.0, 0.5)
    ]
    races = [*noisy, *quiet[1:], *without]
    rows = [each.row() for each in races]
    told = "; ".join(f"{row[0]} {row[2]} against {row[4]}" for row in (*rows[:3], *rows[-2:]))
    return Finding(
        'Section 6: "block-wise updates will actually slow down the convergence rate".',
        f"Each method at the best of {len(RACE_RATES)} learning rates, or {len(NO_NOISE_RATES)} without noise. "
        "Fails if the block-wise gradient norm is below the global one on one of the functions (99 % intervals "
        "apart), holds if not on any, open otherwise.",
        judge([each.not_faster for each in races], [each.faster for each in races]),
        f"mean gradient norm, one norm against a norm a block: {told}. With noise in one block, the block-wise "
        f"norm is {listed(f'{each.ratio:.2f}' for each in quiet)} of the global one at batch "
        f"{listed(str(each.batch) for each in quiet)}",
        expected="fails",
        why="docs/theory.md, slip 4: a worse bound is not a slower method",
        head=("function", "batch", "one norm", "eta", "a norm a block", "its eta", "ratio"),
        rows=rows,
        figures={"block-speed": by_rate(noisy), "block-batch": by_batch(quiet)},
    )


def by_rate(races: list[Race]) -> Figure:
    """Plot gradient norms against learning rates, a panel for each function, with rings at the best learning rates."""
    panels = {}
    for each in races:
        lines = panels[each.name] = list[Series]()
        for slot, (label, mean, best) in enumerate(zip(LABELS, each.means, each.best, strict=True)):
            # every third learning rate, so that marks do not overlap, and the best one
            shown = [i for i, eta in enumerate(each.rates) if i % 3 == 0 or eta == best.eta]
            points = [(float(np.log10(each.rates[i])), float(mean[i])) for i in shown]
            lines.append(Series(label, slot, points, ring=float(np.log10(best.eta))))
    return chart(
        "SNGM and block-wise SNGM at batch 1, by learning rate",
        "The mean gradient norm of both on three quadratics. Rings mark the best learning rate of each.",
        "learning rate, as a power of 10", "mean gradient norm", panels, log="y",
    )  # fmt: skip


def by_batch(races: list[Race]) -> Figure:
    """Plot the gradient norm at the best learning rate against the batch size, for both methods."""
    lines = [
        Series(label, slot, [(float(each.batch), each.best[slot].mean) for each in races])
        for slot, label in enumerate(LABELS)
    ]
    return chart(
        "Where one block has all the noise",
        "The mean gradient norm at the best learning rate, by batch: the two come together as noise fades.",
        "batch", "mean gradient norm", {"each at its best learning rate": lines}, log="xy",
    )  # fmt: skip
