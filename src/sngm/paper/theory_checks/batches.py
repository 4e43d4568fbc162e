"""How large a batch each method bears at a fixed budget, and block-wise against global at each one's best rate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import theory
from ...report.figures import Figure, Series
from .corollaries import SHARPNESS, sharp
from .findings import MET_WITHIN, Array, Finding, interval, judge
from .problems import UNEVEN, Problem, even, quadratic, simulate

Flags = NDArray[np.bool_]

BUDGET = 2**18  # gradients, so that sqrt(C) is 512
TRIED_BATCHES = [2**k for k in range(2, 15)]
SLACK = 2.0  # a batch is borne if it costs no more than this factor
FIXED = (0.15, 0.25, 0.5, 1.0)  # gradient norms, for another meaning of "borne"; the start's is 1
BETA = 0.9
TUNING_RATES = np.array([float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 2, 5)])
RACE_RATES = np.geomspace(1e-5, 0.5, 60)  # fine enough that twice as many change no norm by more than 0.3 %
TABLE, TUNED = "the learning rates of Table 1", f"the best of {len(TUNING_RATES)} learning rates"
BEARS = (
    f"A method bears a batch if its mean gradient norm is at most {SLACK:g} times that of MSGD at batch "
    f"{TRIED_BATCHES[0]} on the same function, with C = {BUDGET} gradients in all; it is unsure where the 99 % "
    "interval over seeds spans that limit, and all is unsure where MSGD diverges at that batch."
)
HIDDEN = "docs/theory.md, What the orders hide: the order in C is free of L, its constant is not"


@dataclass(frozen=True, slots=True)
class Ends:
    """Mean gradient norms and the ends of their intervals, by L and batch."""

    mean: Array
    low: Array
    high: Array


@dataclass(frozen=True, slots=True)
class Limits:
    """For each L, the largest batch that is surely borne, 0 for none, and the largest that is not surely too large.

    The second is infinite where that is the largest batch of the grid: a larger one may be borne as well.
    """

    sure: Array
    possible: Array


def limits(ends: Ends, target: Any) -> Limits:
    """How large a batch comes to the target, of which there may be one for each L; nothing is known if it is infinite.

    >>> two = np.array([[0.1] * 5 + [0.9] * 8, [0.1] * 2 + [0.4] * 2 + [0.9] * 9])
    >>> found = limits(Ends(two, two - 0.01, two + 0.01), 0.4)
    >>> in_words(found)
    '64 and 8 to 32'
    """
    target = np.broadcast_to(target, len(ends.mean))[:, None]
    known = np.isfinite(target)
    sure = np.max(np.where(known & (ends.high <= target), TRIED_BATCHES, 0), axis=1)
    possible = np.max(np.where(~known | (ends.low <= target), [*TRIED_BATCHES[:-1], np.inf], 0), axis=1)
    return Limits(sure.astype(float), possible)


@lru_cache(maxsize=2)
def measure(rates: str, seeds: int) -> dict[str, Ends]:
    """Both methods on the same functions, with the same noise."""
    measured: dict[str, list[list[Array]]] = {"msgd": [], "sngm": []}
    for method, by_batch in measured.items():
        for batch in TRIED_BATCHES:
            of_table = batch / np.sqrt(BUDGET) if method == "msgd" else np.sqrt(batch / BUDGET)
            etas = np.array([of_table]) if rates == TABLE else TUNING_RATES
            every = np.tile(etas, len(SHARPNESS))
            runs = simulate(side_by_side(len(etas)), method, every, BETA, batch, BUDGET // batch, seeds)
            mean, low, high = (end.reshape(len(SHARPNESS), -1) for end in interval(runs.norm))
            best = np.arange(len(SHARPNESS)), mean.argmin(axis=1)
            by_batch.append([mean[best], low[best], high[best]])
    return {method: Ends(*np.array(by_batch).transpose(1, 2, 0)) for method, by_batch in measured.items()}


def side_by_side(rates: int) -> Problem:
    """`sharp` of every L as one problem, so many lanes for each: numpy then works on all of them at once."""
    curvature = np.repeat([sharp(L).gradient(np.ones(5)) for L in SHARPNESS], rates, axis=0)[:, None]
    return replace(sharp(1.0), gradient=lambda w: curvature * w)


def borne(ends: dict[str, Ends]) -> dict[str, Limits]:
    """The limits of both methods by the rule that the findings state."""
    target = SLACK * ends["msgd"].mean[:, 0]
    return {method: limits(each, target) for method, each in ends.items()}


def in_words(found: Limits) -> str:
    """Such as "1024, 256, 64 and 16"."""
    batches = [
        "unknown" if not sure and np.isinf(possible)
        else f"{sure:.0f} or more" if np.isinf(possible)
        else f"{sure:.0f}" if sure == possible
        else f"{sure:.0f} to {possible:.0f}"
        for sure, possible in zip(found.sure, found.possible, strict=True)
    ]  # fmt: skip
    return listed(batches)


def listed(words: Iterable[str]) -> str:
    """Such as "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def at_each_L() -> str:
    """The values of L, in words."""
    return f"L = {listed(f'{L:g}' for L in SHARPNESS)}"


def falls(found: Limits) -> tuple[bool, bool]:
    """Whether the limit at the largest L is surely below that at the smallest, and whether it surely is not."""
    return bool(found.possible[-1] < found.sure[0]), bool(found.sure[-1] >= found.possible[0])


def above(found: dict[str, Limits]) -> tuple[Flags, Flags]:
    """For each L, whether SNGM's limit is surely above MSGD's, and whether it surely is not."""
    return found["sngm"].sure > found["msgd"].possible, found["sngm"].possible <= found["msgd"].sure


def to_fixed_norms(ends: dict[str, Ends]) -> list[dict[str, Limits]]:
    """The limits if "borne" is to come to a norm that is given, for each of `FIXED`."""
    return [{method: limits(each, norm) for method, each in ends.items()} for norm in FIXED]


AT_FIXED = f"if a batch is borne that comes to a fixed norm, of {', '.join(f'{norm:g}' for norm in FIXED)}"


def fall_at_fixed_norms(ends: dict[str, Ends]) -> str:
    """What becomes of the fall of SNGM's limit by another meaning of "borne"."""
    count = sum(falls(found["sngm"])[0] for found in to_fixed_norms(ends))
    return f"SNGM's largest one falls with L for {count} of the {len(FIXED)} norms"


def above_at_fixed_norms(ends: dict[str, Ends]) -> str:
    """What becomes of the comparison of the two methods by another meaning of "borne"."""
    found = to_fixed_norms(ends)
    reached = np.array([np.maximum(each["sngm"].possible, each["msgd"].possible) > 0 for each in found])
    larger, not_larger = (np.array(side) & reached for side in zip(*map(above, found), strict=True))
    return (
        f"{AT_FIXED}, SNGM's largest one is above MSGD's at {larger.sum()} of the {reached.sum()} pairs of norm and L "
        f"that one of the two reaches, and not above it at {not_larger.sum()}"
    )


def batch_limit_msgd(seeds: int) -> Finding:
    """MSGD's limit, at Table 1's rates."""
    ends = measure(TABLE, seeds)
    found = borne(ends)
    yes, no = falls(found["msgd"])
    return Finding(
        name="batch-limit-msgd",
        statement="Table 1 read with constants: at a fixed number of gradients, MSGD's largest batch falls with L.",
        rule=f"{BEARS} Holds if the largest batch at L = 64 is below that at L = 1, fails if not, open if unsure.",
        verdict=judge(yes, no),
        measured=f"with {TABLE}, MSGD bears {in_words(found['msgd'])} at {at_each_L()}",
        **numbers(TABLE, ends, found),
    )


def batch_limit_sngm(seeds: int) -> Finding:
    """SNGM's limit, at Table 1's rates."""
    ends = measure(TABLE, seeds)
    found = borne(ends)
    yes, no = falls(found["sngm"])
    lost = {method: int(sharp(1.0).diverges(each.mean).sum()) for method, each in ends.items()}
    return Finding(
        name="batch-limit-sngm",
        statement=(
            "Table 1 read with constants: at a fixed number of gradients, SNGM's largest batch does not fall with L."
        ),
        rule=f"{BEARS} Fails if the largest batch at L = 64 is below that at L = 1, holds if not, open if unsure.",
        verdict=judge(no, yes),
        measured=(
            f"with {TABLE}, SNGM bears {in_words(found['sngm'])} at {at_each_L()}; it diverges at {lost['sngm']} of "
            f"the {ends['sngm'].mean.size} points, MSGD at {lost['msgd']}; {AT_FIXED}, {fall_at_fixed_norms(ends)}"
        ),
        expected="fails",
        why=HIDDEN,
    )


def batch_larger(seeds: int, rates: str = TABLE) -> Finding:
    """SNGM's limit against MSGD's."""
    ends = measure(rates, seeds)
    found = borne(ends)
    return Finding(
        name="batch-larger",
        statement="Table 1 read with constants: at the same number of gradients, SNGM bears a larger batch than MSGD.",
        rule=f"{BEARS} Holds if SNGM's largest batch is above MSGD's at every L, fails if not at one, open if unsure.",
        verdict=judge(*above(found)),
        measured=(
            f"with {rates}, SNGM bears {in_words(found['sngm'])} and MSGD {in_words(found['msgd'])} at {at_each_L()}; "
            f"{above_at_fixed_norms(ends)}"
        ),
    )


def batch_larger_tuned(seeds: int) -> Finding:
    """The same, where both methods may choose their rate at every batch."""
    found = batch_larger(seeds, TUNED)
    statement = found.statement.replace("constants: at", "constants, every learning rate tuned: at")
    why = "docs/theory.md, What the orders hide: tuned, both have the same bound, and noise costs SNGM more"
    ends = measure(TUNED, seeds)
    more = {"measured": f"{found.measured}; {fall_at_fixed_norms(ends)}", **numbers(TUNED, ends, borne(ends))}
    return replace(found, name="batch-larger-tuned", statement=statement, expected="fails", why=why, **more)


def numbers(rates: str, ends: dict[str, Ends], found: dict[str, Limits]) -> dict[str, Any]:
    """The table and the figure that the findings on batches share."""
    rows: list[list[object]] = []
    panels = {}
    for method, each in ends.items():
        series = []
        for slot, (L, norms, sure) in enumerate(zip(SHARPNESS, each.mean, found[method].sure, strict=True)):
            lost = [batch for batch, norm in zip(TRIED_BATCHES, norms, strict=True) if sharp(L).diverges(norm)]
            points = [(float(b), float(norm)) for b, norm in zip(TRIED_BATCHES, norms, strict=True) if b not in lost]
            rows += [[method, L, int(batch), float(f"{norm:.4g}")] for batch, norm in points]
            rows += [[method, L, batch, "diverged"] for batch in lost]
            series.append(Series(f"L = {L:g}", slot, points, lost=[float(batch) for batch in lost], ring=float(sure)))
        panels[method.upper()] = series
    figure = Figure(
        title=f"Gradient norm against batch size, with {rates}",
        description=f"{BUDGET} gradients on quadratics. Rings mark the largest batch borne, crosses divergence.",
        x_label="batch", y_label="mean gradient norm", panels=panels, log_x=True, log_y=True, worst_at_bottom=False,
    )  # fmt: skip
    name = "batch-table-1" if rates == TABLE else "batch-tuned"
    return {"head": ("method", "L", "batch", "norm"), "rows": rows, "figures": {name: figure}}


# ---------------------------------------------------------------- block-wise


def block_bounds(_: int) -> Finding:
    """Section 6's comparison of the two bounds, over random constants."""
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
    right = ratios >= 1 - MET_WITHIN
    return Finding(
        name="block-bounds",
        statement="Section 6: at the best η of each, Theorem 3's bound is never below Theorem 2's.",
        rule=f"Holds if it is not for any of the draws, up to rounding (a relative {MET_WITHIN:g}), fails otherwise.",
        verdict=judge(right, ~right),
        measured=f"{count} random draws: block-wise bound over global from {ratios.min():.6f} to {ratios.max():.4g}",
    )


# One block is at its minimum and has all the noise, the other is quiet and has far to go.
QUIET = quadratic(
    "noise in one block", np.append(np.ones(10), 0.01), np.append(np.zeros(10), 10.0),
    np.append(even(1.0, 10), 0.0), blocks=(10, 1),
)  # fmt: skip
QUIET_BATCHES = (1, 4, 16, 64, 256, 1024)
# All blocks have the same curvature and the same way to go.
ALIKE = quadratic("blocks alike", np.ones(20), np.ones(20), even(0.1, 20), blocks=(5, 5, 5, 5))
# Found by a random search: a quadratic on which block-wise steps are faster although there is no noise to fade.
NO_NOISE = quadratic(
    "no noise", np.array([0.1429, 0.0845, 0.1796, 1.0, 0.0032, 0.0265, 0.0314, 0.0045]),
    np.array([31.443, 31.443, 7.386, 7.386, 0.076, 0.076, 5.524, 5.524]), np.zeros(8), blocks=(2, 2, 2, 2),
)  # fmt: skip
LABELS = ("SNGM", "block-wise SNGM")
# Without noise a run is cheap and the best rate sharp. With momentum 0.9 it is so sharp that a finer grid could change
# who is ahead, so that NO_NOISE is raced with less.
NO_NOISE_RATES = np.geomspace(0.1, 3, 400)


@dataclass(frozen=True, slots=True)
class Race:
    """SNGM and block-wise SNGM on one function: their mean gradient norms by learning rate, and at the best one."""

    name: str
    batch: int
    rates: Array
    means: tuple[Array, Array]
    best: tuple[tuple[float, float, float, float], tuple[float, float, float, float]]
    """Of each: the learning rate, and the norm there with both ends of its interval."""

    @property
    def faster(self) -> bool:
        """Whether the block-wise norm is surely below the global one."""
        return self.best[1][3] < self.best[0][2]

    @property
    def not_faster(self) -> bool:
        """Whether it surely is not."""
        return self.best[1][2] >= self.best[0][3]

    @property
    def ratio(self) -> float:
        """The block-wise norm over the global one."""
        return self.best[1][1] / self.best[0][1]


def race(problem: Problem, batch: int, rates: Array, beta: float, steps: int, seeds: int) -> Race:
    """Both methods at the same rates, with the same noise."""
    means, best = [], []
    for method in ("sngm", "block-sngm"):
        mean, low, high = interval(simulate(problem, method, rates, beta, batch, steps, seeds).norm)
        i = int(np.argmin(mean))
        means.append(mean)
        best.append((float(rates[i]), float(mean[i]), float(low[i]), float(high[i])))
    return Race(problem.name, batch, rates, (means[0], means[1]), (best[0], best[1]))


def block_speed(seeds: int) -> Finding:
    """What the two methods do, rather than what their bounds say."""
    noisy = [
        race(problem, 1, RACE_RATES, BETA, 2000, seeds)
        for problem in (replace(UNEVEN, name="blocks of uneven curvature"), ALIKE, QUIET)
    ]
    quiet = [noisy[-1], *(race(QUIET, batch, RACE_RATES, BETA, 2000, seeds) for batch in QUIET_BATCHES[1:])]
    without = [
        race(
            replace(NO_NOISE, name=f"no noise, momentum {beta:g}"), 1, NO_NOISE_RATES, beta, 500, 2
        )  # all seeds are alike
        for beta in (0.0, 0.5)
    ]
    races = [*noisy, *quiet[1:], *without]
    rows = [
        [each.name, each.batch, *(float(f"{x:.3g}") for side in each.best for x in side[1::-1]), round(each.ratio, 3)]
        for each in races
    ]
    told = "; ".join(f"{row[0]} {row[2]} against {row[4]}" for row in (*rows[:3], *rows[-2:]))
    return Finding(
        name="block-speed",
        statement='Section 6: "block-wise updates will actually slow down the convergence rate".',
        rule=(
            f"Each method at the best of {len(RACE_RATES)} learning rates, or {len(NO_NOISE_RATES)} without noise. "
            "Fails if the block-wise gradient norm is below the global one on one of the functions (99 % intervals "
            "apart), holds if not on any, open otherwise."
        ),
        verdict=judge([each.not_faster for each in races], [each.faster for each in races]),
        measured=(
            f"mean gradient norm, one norm against a norm a block: {told}. With noise in one block, the block-wise "
            f"norm is {listed(f'{each.ratio:.2f}' for each in quiet)} of the global one at batch "
            f"{listed(str(each.batch) for each in quiet)}"
        ),
        expected="fails",
        why="docs/theory.md, slip 4: a worse bound is not a slower method",
        head=("function", "batch", "one norm", "eta", "a norm a block", "its eta", "ratio"),
        rows=rows,
        figures={"block-speed": by_rate(noisy), "block-batch": by_batch(quiet)},
    )


def by_rate(races: list[Race]) -> Figure:
    """A panel for each function, with rings at the best rates. Powers of ten, since the rates have too many digits."""
    panels = {}
    for each in races:
        lines = []
        for slot, (label, mean, (best, *_)) in enumerate(zip(LABELS, each.means, each.best, strict=True)):
            # every third rate, so that marks do not run together, and the best one
            shown = [i for i, eta in enumerate(each.rates) if i % 3 == 0 or eta == best]
            points = [(float(np.log10(each.rates[i])), float(mean[i])) for i in shown]
            lines.append(Series(label, slot, points, ring=float(np.log10(best))))
        panels[each.name] = lines
    return Figure(
        title="SNGM and block-wise SNGM at batch 1, by learning rate",
        description="The mean gradient norm of both on three quadratics. Rings mark the best learning rate of each.",
        x_label="learning rate, as a power of 10", y_label="mean gradient norm", panels=panels, log_y=True,
        worst_at_bottom=False,
    )  # fmt: skip


def by_batch(races: list[Race]) -> Figure:
    """The norm at the best rate of each batch."""
    lines = [
        Series(label, slot, [(float(each.batch), each.best[slot][1]) for each in races])
        for slot, label in enumerate(LABELS)
    ]
    return Figure(
        title="Where one block has all the noise",
        description="The mean gradient norm at the best learning rate, by batch: the two come together as noise fades.",
        x_label="batch", y_label="mean gradient norm", panels={"each at its best learning rate": lines},
        log_x=True, log_y=True, worst_at_bottom=False,
    )  # fmt: skip
