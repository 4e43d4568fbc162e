"""What the runs say of a number or a claim of the paper, by rules that were written down before the runs were made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ..report.paper import Claim
from ..report.stats import contrast, half_width
from ..train.config import RunConfig
from .items import Item, Planned
from .results import Line, Results

REPRODUCED, NOT_REPRODUCED, HOLDS, CONTRADICTED, OPEN = (
    "reproduced", "not reproduced", "holds", "contradicted", "open",
)  # fmt: skip
SEEDS = 3  # the fewest that a verdict on a number rests on
LEVEL = 0.05  # of Welch's test
RULES = f"""A number of the paper is *reproduced* if ours, the mean over at least {SEEDS} seeds, differs from it by at
most 0.5 points of accuracy, 1 % of a perplexity or 0.005 of an AUC, and half of our 95 % interval (Student's t) is no
wider than that. It is *not reproduced* if the interval lies beyond that distance as a whole; else, or with fewer seeds,
the verdict is *open*. A claim that one method is better than another *holds* if Welch's test says so at 5 % at every
batch it is about, is *contradicted* if the test says the opposite at one of them, and is *open* otherwise. A claim that
two are similar holds if the 95 % interval of their difference lies within the distance above, and is contradicted if it
lies outside. Times depend on the hardware: beside the paper's, on eight V100, they get no verdict, but what is said of
them does."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is there of a cell: the rate chosen, the results at it, and the runs that are missing."""

    planned: Planned
    lr: float | None
    lines: list[Line]
    missing: list[RunConfig]
    at_edge: bool
    on_test: list[Line]
    """The paper's own reading: of the rates with full runs, the runs of that with the best mean on test data."""

    @property
    def values(self) -> list[float]:
        return values_of(self.lines, self.planned.item)

    @property
    def diverged(self) -> int:
        return len(self.lines) - len(self.values)


def value_of(line: Line, item: Item) -> float | None:
    """What a run says in this table."""
    if item.metric == "seconds":
        found = line.record["timing"].get("seconds_per_epoch")
        return None if found is None else float(found)
    return line.value(item.metric)


def values_of(lines: Iterable[Line], item: Item) -> list[float]:
    """Of the runs that did not diverge."""
    return [value for line in lines if (value := value_of(line, item)) is not None]


def look(planned: Planned, results: Results, seeds: int | None = None) -> Outcome:
    """Go through a cell as a study would, with the runs that are there."""
    item, cell = planned.item, planned.cell(seeds)
    todo, lines, missing = cell.first_runs(), list[Line](), list[RunConfig]()
    while todo:
        config = todo.pop(0)
        line = results.of(config)
        if line is None:
            missing.append(config)
            continue
        lines += [line] if config.part == "full" else []
        todo += cell.take(config, line.record, item.metric, item.higher_is_better)
    summary = cell.summary(item.higher_is_better)
    like = cell.config(cell.grid[0], "full", 0)
    return Outcome(planned, cell.lr, lines, missing, summary["at_edge"], _best_on_test(like, results, item))


def _best_on_test(like: RunConfig, results: Results, item: Item) -> list[Line]:
    by_rate: dict[float, list[Line]] = {}
    for line in results.of_task(item.task):
        if value_of(line, item) is not None and _but_for_rate(line.config) == _but_for_rate(like):
            by_rate.setdefault(line.config.lr, []).append(line)
    sign = 1 if item.higher_is_better else -1
    return max(by_rate.values(), key=lambda lines: sign * fmean(values_of(lines, item)), default=[])


def _but_for_rate(config: RunConfig) -> RunConfig:
    settings = {key: value for key, value in config.method_settings.items() if key != "inner_lr"}
    return replace(config, lr=1.0, seed=0, method_settings=settings)


def tolerance(metric: str, paper: float) -> float:
    """By how much a number may differ from the paper's and count as the same."""
    return 0.01 * paper if metric == "perplexity" else 0.005


def of_number(values: Sequence[float], paper: float, metric: str) -> str:
    """Whether these runs give the paper's number.

    >>> of_number([0.891, 0.892, 0.893], 0.8923, "accuracy"), of_number([0.891], 0.8923, "accuracy")
    ('reproduced', 'open')
    >>> of_number([0.851, 0.852, 0.853], 0.8923, "accuracy")
    'not reproduced'
    """
    half = half_width(values)
    if half is None or len(values) < SEEDS or metric == "seconds":
        return OPEN
    difference, allowed = abs(fmean(values) - paper), tolerance(metric, paper)
    if difference <= allowed and half <= allowed:
        return REPRODUCED
    return NOT_REPRODUCED if difference - half > allowed else OPEN


def of_claim(claim: Claim, item: Item, outcomes: Mapping[tuple[str, int], Outcome]) -> tuple[str, str]:
    """The verdict on a claim, and the numbers it rests on."""
    if claim.kind == "falls":
        return _falls(claim, outcomes)
    found: list[str] = []
    numbers: list[str] = []
    for batch in claim.batches:
        ours = _values(outcomes, claim.method, batch)
        for other in claim.others:
            theirs = _values(outcomes, other, batch)
            judge = _better if claim.kind == "better" else _similar
            found.append(judge(ours, theirs, item))
            p = contrast((1, ours), (-1, theirs))
            if ours and theirs:
                gap = text_of(fmean(ours) - fmean(theirs), item.metric, signed=True)
                sure = "too few seeds to test" if p is None else f"p = {p:.2g}"
                numbers.append(f"{claim.method} - {other} at {batch}: {gap} ({sure})")
    return _together(found), "; ".join(numbers) or "no runs yet"


def _values(outcomes: Mapping[tuple[str, int], Outcome], row: str, batch: int) -> list[float]:
    outcome = outcomes.get((row, batch))
    return outcome.values if outcome else []


def _better(ours: list[float], theirs: list[float], item: Item) -> str:
    p = contrast((1, ours), (-1, theirs))
    if p is None or p >= LEVEL:
        return OPEN
    ahead = fmean(ours) > fmean(theirs)
    return HOLDS if ahead == item.higher_is_better else CONTRADICTED


def _similar(ours: list[float], theirs: list[float], item: Item) -> str:
    """By the interval of the difference: twice the one-sided tests of equivalence, at 2.5 % each."""
    if len(ours) < SEEDS or len(theirs) < SEEDS:
        return OPEN
    gap, allowed = fmean(ours) - fmean(theirs), tolerance(item.metric, fmean(theirs))
    beyond = [contrast((1, ours), (-1, [value + sign * allowed for value in theirs])) for sign in (-1, 1)]
    sure = all(p is not None and p < LEVEL for p in beyond)
    if not sure:
        return OPEN
    return HOLDS if abs(gap) < allowed else CONTRADICTED


def _falls(claim: Claim, outcomes: Mapping[tuple[str, int], Outcome]) -> tuple[str, str]:
    means = {batch: fmean(values) for batch in claim.batches if (values := _values(outcomes, claim.method, batch))}
    numbers = ", ".join(f"{value:.3g} s at {batch}" for batch, value in means.items()) or "no runs yet"
    if len(means) < len(claim.batches):
        return OPEN, numbers
    times = list(means.values())
    return (HOLDS if times == sorted(times, reverse=True) else CONTRADICTED), numbers


def _together(found: Sequence[str]) -> str:
    if CONTRADICTED in found:
        return CONTRADICTED
    return HOLDS if found and set(found) == {HOLDS} else OPEN


def text_of(value: float, metric: str, signed: bool = False) -> str:
    """A result as tables show it.

    >>> text_of(0.89234, "accuracy"), text_of(117.83, "perplexity"), text_of(-0.0012, "auc", signed=True)
    ('89.23', '117.83', '-0.0012')
    """
    sign = "+" if signed else ""
    if metric == "accuracy":
        return f"{100 * value:{sign}.2f}"
    if metric == "perplexity":
        return f"{value:{sign}.2f}" if abs(value) < 1e4 else f"{value:{sign}.2g}"
    return f"{value:{sign}.4f}" if metric == "auc" else f"{value:{sign}.3g}"
