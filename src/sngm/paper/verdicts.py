"""Verdicts on the numbers and claims of the paper, from the results folder, by the rules stated in introduction.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean, variance

from ..progress import duration
from ..report.stats import difference, half_width
from ..study.grid import Cell
from ..training.config import RunConfig
from .experiments import COSTS_ON, Item, Planned
from .results import Line, Results
from .tables import Claim

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
HOLDS, CONTRADICTED, OPEN = "holds", "contradicted", "open"
SEEDS = 3  # the fewest seeds for a verdict
LEVEL = 0.05  # significance level of Welch's test
MOST_SEEDS = 100  # larger estimates are not shown


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of a table cell (a method at a batch size): the chosen learning rate, its results, and missing runs."""

    planned: Planned
    lr: float | None
    lines: list[Line]
    """The full runs (on all training data) at the chosen learning rate, with consecutive seeds from 0."""
    missing: list[RunConfig]
    seeds: int
    """The planned number of seeds."""
    rates: tuple[float, ...] = ()
    """All learning rates that were tried or are still to be tried."""
    trials: int = 0
    """The number of finished trial runs, whose validation scores choose the learning rate."""
    validation: float | None = None
    """The validation score of the chosen trial."""
    searched: dict[str, float] = field(default_factory=dict)
    """The chosen values of all searched settings."""
    at_edge: bool = False
    """Whether the best learning rate of the grid is the lowest or highest that was tried, or all of them diverged."""
    nothing_trains: bool = False
    """Whether every learning rate that was tried diverged."""
    on_test: list[Line] = field(default_factory=list)
    """The full runs at the learning rate with the best mean on test data, among those at which no run diverged."""

    @property
    def values(self) -> list[float]:
        return values_of(self.lines, self.planned.item.metric)

    @property
    def tried(self) -> bool:
        return bool(self.lines) or self.nothing_trains

    @property
    def diverged(self) -> int:
        return len(self.lines) - len(self.values)

    @property
    def to_come(self) -> int:
        """The number of runs still needed, including the seeds to run after a learning rate is chosen."""
        waiting = self.seeds if self.lr is None and self.missing else 0
        return len(self.missing) + waiting


def by_cell(outcomes: Iterable[Outcome]) -> dict[tuple[str, int], Outcome]:
    """Return outcomes in a dict by (method, batch), the names of cells in claims and figures."""
    return {(outcome.planned.row.name, outcome.planned.batch): outcome for outcome in outcomes}


def by_worth(outcomes: Sequence[Outcome], claims: Iterable[Claim]) -> list[Outcome]:
    """Return the outcomes of an experiment's cells, those first whose missing runs lead to most verdicts per minute.

    Each open verdict, on a cell's own number or on a claim, counts for its cells with missing runs, weighted by 1 /
    (time of all its missing runs). Claims that no affordable number of runs would decide do not count.
    """
    item, there = outcomes[0].planned.item, by_cell(outcomes)
    worth = dict.fromkeys(there, 0.0)
    undecided = [{key} for key, o in there.items() if of_number(o) == OPEN and item.metric != "seconds"]
    for claim in claims:
        if claim.item == item.name:
            verdict, _, wanted = _judge(claim, item, there)
            if verdict == OPEN and math.inf not in wanted.values():
                undecided.append({cell for cell in wanted if cell in there})
    for cells in undecided:
        seconds = {cell: there[cell].to_come * there[cell].planned.seconds() for cell in cells}
        for cell in cells:
            worth[cell] += 1 / sum(seconds.values()) if seconds[cell] else 0.0
    return sorted(outcomes, key=lambda o: -worth[o.planned.row.name, o.planned.batch])


def values_of(lines: Iterable[Line], metric: str) -> list[float]:
    """Return the values of a metric for the runs that did not diverge."""
    return [value for line in lines if (value := line.value(metric)) is not None]


def outcomes_of(item: Item, results: Results) -> list[Outcome]:
    """Return the outcome of every cell of an experiment, from the runs in the results folder."""
    return [outcome_of(planned, results) for planned in item.cells()]


def outcome_of(planned: Planned, results: Results, seeds: int | None = None) -> Outcome:
    """Return the outcome of a cell: choose a learning rate as a study would, from the runs in the results folder."""
    item, cell = planned.item, planned.cell(seeds)
    todo, missing, trials = cell.first_runs(), list[RunConfig](), 0
    while todo:
        config = todo.pop(0)
        line = results.of(config)
        if line is None:
            missing.append(config)
        else:
            trials += config.part == "select"
            todo += cell.take(config, line.record, item.metric, item.higher_is_better)
    lines = []
    if cell.lr is not None:  # seeds beyond the planned number count too
        found = (results.of(cell.config(cell.lr, "full", seed)) for seed in itertools.count())
        lines = [line for line in itertools.takewhile(bool, found) if line]
    return Outcome(
        planned, cell.lr, lines, missing, cell.study.seeds,
        rates=tuple(sorted({*cell.grid, *cell.scores, *(config.lr for config in missing)})),
        trials=trials,
        validation=None if cell.lr is None else (cell.scores.get(cell.lr) or [None])[0],
        searched={} if cell.lr is None else cell.searched.get(cell.lr, {}),
        at_edge=cell.summary(item.higher_is_better)["at_edge"],
        nothing_trains=cell.chosen and cell.lr is None,
        on_test=_best_on_test(cell, results, item),
    )  # fmt: skip


def _best_on_test(cell: Cell, results: Results, item: Item) -> list[Line]:
    by_rate: dict[float, list[Line]] = {}
    like = cell.config(cell.grid[0], "full", 0)
    wanted = _but_for_rate(like)
    for line in results.of_task(item.task):
        config = line.config
        if not item.search and config.lr not in cell.grid:  # a run of another row
            continue
        if (config.method, config.batch) == (like.method, like.batch) and _but_for_rate(config) == wanted:
            by_rate.setdefault(line.config.lr, []).append(line)
    trained = [lines for lines in by_rate.values() if len(values_of(lines, item.metric)) == len(lines)]
    sign = 1 if item.higher_is_better else -1
    return max(trained, key=lambda lines: sign * fmean(values_of(lines, item.metric)), default=[])


def _but_for_rate(config: RunConfig) -> RunConfig:
    settings = dict(config.method_settings)
    if "inner_lr" in settings:  # EXTRAP-SGD's inner_lr is proportional to lr
        settings["inner_lr"] = float(f"{settings['inner_lr'] / config.lr:.6g}")
    return replace(config, lr=1.0, seed=0, method_settings=settings)


def tolerance(metric: str, value: float) -> float:
    """Return the largest difference from `value` at which two results count as equal: 1 % of a perplexity or a time,
    0.005 of an accuracy or an AUC, and 0 for other metrics, of which no two results count as equal."""
    metric = metric.removeprefix("validation_")
    return 0.01 * value if metric in ("perplexity", "seconds") else 0.005 if metric in ("accuracy", "auc") else 0.0


def of_number(outcome: Outcome) -> str | None:
    """Return the verdict on whether a cell reproduces the paper's number; None if there is nothing to compare."""
    planned = outcome.planned
    if planned.paper is None or planned.item.apart:
        return None
    if outcome.nothing_trains:
        return NOT_REPRODUCED
    return judge_number(outcome.values, planned.paper, planned.item.metric, outcome.diverged)


def judge_number(values: Sequence[float], paper: float, metric: str, diverged: int = 0) -> str:
    """Return the verdict on whether runs with these values, and `diverged` further runs, reproduce the paper's number.

    >>> judge_number([0.891, 0.892, 0.893], 0.8923, "accuracy"), judge_number([0.891], 0.8923, "accuracy")
    ('reproduced', 'open')
    >>> judge_number([0.851, 0.852, 0.853], 0.8923, "accuracy")
    'not reproduced'
    """
    if len(values) + diverged < SEEDS or metric == "seconds":
        return OPEN
    half = half_width(values)
    if diverged or half is None:
        return NOT_REPRODUCED
    difference, allowed = abs(fmean(values) - paper), tolerance(metric, paper)
    if difference <= allowed and half <= allowed:
        return REPRODUCED
    return NOT_REPRODUCED if difference - half > allowed else OPEN


@dataclass(frozen=True, slots=True)
class Pair:
    """The verdict on whether one pair of cells shows a claim, the reason, and the seeds that would decide it."""

    verdict: str
    why: str
    seeds: float = 0
    """If the verdict is open, about how many seeds both cells need; infinite if more than `MOST_SEEDS`, or if more
    seeds cannot decide it."""


def of_claim(claim: Claim, item: Item, outcomes: Mapping[tuple[str, int], Outcome]) -> tuple[str, str]:
    """Return the verdict on a claim, and the numbers behind it as text. For an open claim, they end with the runs that
    would decide all its pairs."""
    verdict, numbers, wanted = _judge(claim, item, outcomes)
    if verdict == OPEN:
        numbers += _price(wanted, outcomes)
    return verdict, "; ".join(numbers)


def _judge(
    claim: Claim, item: Item, outcomes: Mapping[tuple[str, int], Outcome]
) -> tuple[str, list[str], dict[tuple[str, int], float]]:
    """Return the verdict on a claim, the numbers behind it, and the seeds that each of its cells needs."""
    found: dict[int, list[str]] = {}  # by batch
    numbers: list[str] = []
    left = 0
    wanted: dict[tuple[str, int], float] = {}
    for metric, (first, second) in itertools.product((claim.metric or item.metric, *claim.also), claim.pairs):
        ours, theirs = outcomes.get(first), outcomes.get(second)
        if ours is None or theirs is None or not (ours.tried and theirs.tried):
            pair = Pair(OPEN, "", SEEDS)
            left += 1
        else:
            pair = _pair(claim.kind, ours, theirs, metric)
            of = "" if metric == item.metric else f"{metric.replace('_', ' ')} of "
            numbers.append(f"{of}{first[0]} at {first[1]} - {second[0]} at {second[1]}: {pair.why}")
        found.setdefault(first[1], []).append(pair.verdict)
        for cell in (first, second):
            wanted[cell] = max(wanted.get(cell, 0), pair.seeds)
    if left:
        numbers.append(f"{left} comparison{'s' * (left > 1)} not run yet" if numbers else "no runs yet")
    needed = claim.share * len(found)
    if sum(CONTRADICTED in verdicts for verdicts in found.values()) > len(found) - needed:
        return CONTRADICTED, numbers, wanted
    holding = sum(set(verdicts) == {HOLDS} for verdicts in found.values())
    return (HOLDS if holding >= needed else OPEN), numbers, wanted


def _price(wanted: Mapping[tuple[str, int], float], outcomes: Mapping[tuple[str, int], Outcome]) -> list[str]:
    """Return what it would cost to have these numbers of seeds, as text; nothing if no run is missing."""
    if math.inf in wanted.values():
        return ["no affordable number of runs would decide all of it"]
    count, seconds = 0.0, 0.0
    for cell, seeds in wanted.items():
        if (outcome := outcomes.get(cell)) is None:
            continue
        runs = max(seeds - len(outcome.lines), 0)
        if outcome.lr is None:  # the search comes before the seeds
            runs = outcome.to_come + max(seeds - outcome.seeds, 0)
        count += runs
        seconds += runs * outcome.planned.seconds()
    if not count:
        return []
    most = f"{max(wanted.values()):.0f}"
    return [f"to decide all of it: about {count:.0f} more runs (--seeds {most}), {duration(seconds)} on {COSTS_ON}"]


def _pair(kind: str, ours: Outcome, theirs: Outcome, metric: str) -> Pair:
    item, (a, b) = ours.planned.item, (values_of(cell.lines, metric) for cell in (ours, theirs))
    if any(not values and cell.values for values, cell in ((a, ours), (b, theirs))):
        return Pair(OPEN, f"no {metric.replace('_', ' ')} in their records", math.inf)
    if not (a and b) or ours.diverged or theirs.diverged:
        why = " and ".join(
            "all rates" if cell.nothing_trains else f"{cell.diverged} of {len(cell.lines)}" for cell in (ours, theirs)
        )
        sure = all(cell.nothing_trains or len(cell.lines) >= SEEDS for cell in (ours, theirs))
        worse = sure and not a and b and not theirs.diverged
        better = sure and not b and a and not ours.diverged
        if better and kind == "better":
            return Pair(HOLDS, f"{why} diverged")
        if worse or better:
            return Pair(CONTRADICTED, f"{why} diverged")
        return Pair(OPEN, f"{why} diverged", math.inf if sure else SEEDS)
    gap = text_of(fmean(a) - fmean(b), metric, signed=True)
    if min(len(a), len(b)) < SEEDS:
        return Pair(OPEN, f"{gap}, too few seeds", SEEDS)
    if metric == "seconds" and len({line.hardware for line in (*ours.lines, *theirs.lines)}) > 1:
        return Pair(OPEN, f"{gap}, on different hardware", math.inf)
    found = difference(a, b)
    if found is None:
        return Pair(OPEN, f"{gap}, no spread", math.inf)
    apart, half, p = found
    allowed = tolerance(metric, fmean(b))
    equal = abs(apart) + half < allowed
    shown = f"{gap} ± {text_of(half, metric)}"
    if kind == "similar":
        verdict = HOLDS if equal else CONTRADICTED if abs(apart) - half > allowed else OPEN
        return _undecided(shown, seeds_to_decide(a, b, allowed)) if verdict == OPEN else Pair(verdict, shown)
    if p < LEVEL:
        higher = item.higher_is_better and metric.removeprefix("validation_") == item.metric
        return Pair(HOLDS if (apart > 0) == higher else CONTRADICTED, f"{gap}, p = {p:.2g}")
    if equal:
        return Pair(CONTRADICTED, f"{shown}, similar")
    shows_equal = seeds_to_decide(a, b, allowed) if abs(apart) < allowed else math.inf
    return _undecided(f"{gap}, p = {p:.2g}", min(seeds_to_decide(a, b), shows_equal))


def _undecided(shown: str, seeds: float) -> Pair:
    many = f"more than {MOST_SEEDS}" if seeds == math.inf else f"about {seeds:.0f}"
    return Pair(OPEN, f"{shown}, {many} seeds to decide", seeds)


def seeds_to_decide(a: Sequence[float], b: Sequence[float], allowed: float = 0.0) -> float:
    """Return how many seeds of each cell show the difference of `a` and `b` with a power of about 80 %; infinity if it
    is more than `MOST_SEEDS`.

    If `allowed` is given, it is the number of seeds that show whether the difference is below or above `allowed`.

    >>> seeds_to_decide([0.91, 0.92, 0.93], [0.90, 0.91, 0.92])
    17
    >>> seeds_to_decide([0.91, 0.92, 0.93], [0.911, 0.921, 0.931])
    inf
    >>> seeds_to_decide([0.9, 0.9], [0.9, 0.9])
    inf
    """
    difference, quantile = abs(fmean(a) - fmean(b)), NormalDist().inv_cdf
    # below `allowed`, both ends of the interval must turn out to be below it
    level, power = quantile(1 - LEVEL / 2), quantile(0.9 if difference < allowed else 0.8)
    distance = (difference - allowed) ** 2
    # the last term corrects for the t distribution
    seeds = (level + power) ** 2 * (variance(a) + variance(b)) / distance + level**2 / 4 if distance else math.inf
    return math.inf if seeds > MOST_SEEDS else max(math.ceil(seeds), len(a) + 1, len(b) + 1)


def text_of(value: float | None, metric: str, signed: bool = False) -> str:
    """Format a result for tables; "" for None.

    >>> text_of(0.89234, "accuracy"), text_of(117.83, "perplexity"), text_of(-0.0012, "auc", signed=True)
    ('89.23', '117.83', '-0.0012')
    """
    if value is None:
        return ""
    sign, metric = "+" if signed else "", metric.removeprefix("validation_")
    if metric == "accuracy":
        return f"{100 * value:{sign}.2f}"
    if metric == "perplexity":
        return f"{value:{sign}.2f}" if abs(value) < 1e4 else f"{value:{sign}.2g}"
    digits = {"auc": ".4f", "bits_per_byte": ".3f"}.get(metric, ".4g")
    return f"{value:{sign}{digits}}"
