"""Summarise the records of a study: mean and confidence interval per method and batch size, and a short answer."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ..parsing import without_settings
from .records import Choice, Records, Run, higher_is_better, read
from .stats import contrast, half_width


@dataclass(frozen=True, slots=True)
class Cell:
    """One method at one batch size: the chosen learning rate, and the results of the runs with this learning rate."""

    method: str
    batch: int
    lr: float | None = None
    runs: list[Run] = field(default_factory=list)
    """The full runs with this learning rate, one for each seed."""
    values: dict[int, float] = field(default_factory=dict)
    """Seed -> the metric of the run with this seed, for finished runs."""
    diverged: int = 0
    grid: list[float] = field(default_factory=list)
    extensions: int | None = None
    at_edge: bool = False
    selection: dict[float, float] = field(default_factory=dict)
    """Learning rate -> validation metric; NaN where the run diverged."""
    chosen_on_test: bool = False
    search: Choice | None = None
    """Ranges, trials and chosen settings, if settings were searched."""

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float | None:
        return fmean(self.values.values()) if self.values else None

    @property
    def half_width(self) -> float | None:
        return half_width(list(self.values.values()))

    @property
    def seconds(self) -> float | None:
        times = [run.seconds for run in self.runs if run.status == "finished" and run.seconds is not None]
        return fmean(times) if times else None

    def as_dict(self) -> dict[str, Any]:
        """Return the cell with JSON types only."""
        names = ["method", "batch", "lr", "mean", "half_width", "n", "values", "diverged", "grid"]
        found = {name: getattr(self, name) for name in (*names, "extensions", "at_edge", "seconds")}
        search = {"ranges": self.search.ranges, "trials": self.search.trials} if self.search else {}
        return found | {"values": list(self.values.values())} | search

    @property
    def loss_rose(self) -> bool:
        """Whether every run's training loss stayed at or above that of its first epoch; perhaps nothing was learnt."""
        curves = [[entry["train_loss"] for entry in run.curve if "train_loss" in entry] for run in self.runs]
        return bool(curves) and all(len(losses) > 1 and min(losses[1:]) >= losses[0] for losses in curves)

    @property
    def only_diverged(self) -> bool:
        """Whether every full run diverged; if there are no full runs, whether every trial run diverged."""
        if self.runs:
            return self.diverged == len(self.runs)
        return self.lr is None and bool(self.selection) and all(map(math.isnan, self.selection.values()))


@dataclass(frozen=True, slots=True)
class Summary:
    """The content of a report on one task."""

    task: str
    metric: str
    higher_is_better: bool
    methods: list[str]
    batches: list[int]
    cells: dict[tuple[str, int], Cell]
    records: Records
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the summary with JSON types only."""
        cells = [cell.as_dict() for cell in self.cells.values()]
        return {"task": self.task, "metric": self.metric, "answer": self.answer(), "cells": cells, "notes": self.notes}

    @property
    def percent(self) -> bool:
        return self.metric in ("accuracy", "auc")

    @property
    def of_best_epoch(self) -> bool:
        """Whether results are from the epoch with the best validation score, not from the last epoch."""
        return any(run.result_of == "best" for cell in self.cells.values() for run in cell.runs)

    def text(self, value: float, half: float | None = None) -> str:
        """Format a value and its half-width, to the digits that the half-width makes significant."""
        if self.percent:
            value, half = 100 * value, None if half is None else 100 * half
            digits = 1 if half is None or half >= 0.1 else 2
        elif half:
            digits = min(max(1 - math.floor(math.log10(half)), 0), 6)
        else:
            digits = min(max(3 - math.floor(math.log10(abs(value) or 1)), 0), 6)
        if abs(value) >= 1e6:
            return f"{value:.3g}" + ("" if half is None else f" ± {half:.2g}")
        return f"{value:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")

    def answer(self) -> str:
        """Return sentences on which method is best at the largest batch, and which lost least as the batch grew."""
        if not self.reached:
            return self._nothing()
        sentences = [f"{self.beyond}." if self.beyond else "", self._best(self.ranking(self.reached[-1]))]
        if len(self.reached) > 1:
            sentences.append(self._cost(self.reached[0], self.reached[-1]))
        return " ".join(filter(None, sentences))

    @property
    def reached(self) -> list[int]:
        """The batch sizes at which a method has a result."""
        return [batch for batch in self.batches if self.ranking(batch)]

    @property
    def beyond(self) -> str:
        """Why the largest batch size has no result; empty if it has one."""
        largest = self.batches[-1]
        if self.ranking(largest):
            return ""
        lost = all(self.cells[method, largest].only_diverged for method in self.methods)
        return f"At batch {largest} {'every run diverged' if lost else 'nothing has finished yet'}"

    def ranking(self, batch: int) -> list[Cell]:
        """Return the cells (methods) of a batch size that have a mean, best first."""
        cells = [self.cells[method, batch] for method in self.methods if self.cells[method, batch].values]
        return sorted(cells, key=lambda cell: cell.mean or 0.0, reverse=self.higher_is_better)

    def leaders(self, batch: int) -> set[str]:
        """Return the best method at a batch size, and those that do not differ significantly from it by Welch's test.

        A method that cannot be tested (a single seed, or all seeds equal) is included only if its mean is the best.
        """
        best, *others = self.ranking(batch) or [Cell("", batch)]
        same = [cell for cell in others if cell.mean == best.mean or (welch(best, cell) or 0.0) >= 0.05]
        return {cell.method for cell in (best, *same)}

    def _nothing(self) -> str:
        full = [run for run in self.records.runs if run.part != "select"]
        if self.cells and all(cell.only_diverged for cell in self.cells.values()):
            some = any(run.status == "diverged" for run in self.records.runs)
            what = (
                f"Every run on {self.task} diverged" if some else f"The {self.metric} of every run is NaN or infinite"
            )
            return f"{what}, so there is nothing to compare."
        if self.records.runs and all(run.status == "failed" for run in self.records.runs):
            error = self.records.runs[0].error or "an unknown error"
            return f"Every run on {self.task} failed, the first with {error}."
        if self.records.runs and not full:
            done = count_of(sum(run.status in ("finished", "diverged") for run in self.records.runs), "trial")
            return f"No full run has finished yet: learning rates are still being chosen ({done} done)."
        return f"No run has finished yet ({len(full)} begun), so there is no answer."

    def _best(self, ranked: list[Cell]) -> str:
        """Return a sentence on the best method of a batch size, and whether it differs from the second best."""
        best, at, aside = ranked[0], f"At batch {ranked[0].batch},", self._aside(ranked[0].batch)
        unit = f"{' %' if self.percent else ''} test {self.metric}"
        means = [cell.mean or 0.0 for cell in ranked]
        value = self.text(means[0], best.half_width)
        if len(ranked) == 1:
            seeds = "one seed" if best.n == 1 else f"{best.n} seeds"
            return f"{at} {best.method} reaches {value}{unit} on {self.task} ({seeds}){aside}."
        tied = [cell.method for cell, mean in zip(ranked, means, strict=True) if _same(mean, means[0])]
        if len(tied) > 1:
            return f"{at} {join(tied)} tie on {self.task}: {self.text(means[0])}{unit}{aside}."
        second, p = ranked[1], welch(best, ranked[1])
        tested = "" if p is None else f"({_p(p)}, Welch's test over {best.n} and {second.n} seeds)"
        if p is not None and p >= 0.05:
            both = f"{self.text(means[0])} and {self.text(means[1])}{unit}"
            return (
                f"{at} {best.method} and {second.method} are too close to call on {self.task}: {both} {tested}{aside}."
            )
        head = f"{at} {best.method} is {'ahead' if p is None else 'best'} on {self.task} with {value}{unit}"
        head += f", {self.lead(best, second)} {second.method}"
        if p is not None:
            return f"{head}: a clear difference {tested}{aside}."
        why = "with one seed" if min(best.n, second.n) < 2 else "as the seeds show no spread"
        return f"{head}, but {why} no test can tell that from chance{aside}."

    def lead(self, best: Cell, second: Cell) -> str:
        """Return by how much a cell is better than another, such as "4.0 points above"."""
        gap = self.gap(abs((best.mean or 0.0) - (second.mean or 0.0)))
        return f"{gap} {'above' if self.higher_is_better else 'below'}"

    def _aside(self, batch: int) -> str:
        """Return a text that lists the runs and methods that the ranking of a batch size does not include."""
        cells = [self.cells[method, batch] for method in self.methods]
        some = [f"{c.diverged} of {len(c.runs)} runs of {c.method}" for c in cells if c.n and c.diverged]
        gone = [cell.method for cell in cells if cell.only_diverged]
        missing = [cell.method for cell in cells if not cell.n and not cell.only_diverged]
        have = "have" if len(missing) > 1 else "has"
        said = {"diverged and do not count": some, "diverged": gone, f"{have} no finished run there": missing}
        return "".join(f"; {join(names)} {what}" for what, names in said.items() if names)

    def _cost(self, small: int, large: int) -> str:
        sign = 1 if self.higher_is_better else -1
        means = {method: (self.cells[method, small].mean, self.cells[method, large].mean) for method in self.methods}
        costs = sorted((sign * (a - b), method) for method, (a, b) in means.items() if a is not None and b is not None)
        if not costs:
            return ""
        head = f"From batch {small} to {large},"
        least, method = costs[0]
        tied = [name for cost, name in costs if _same(cost, least)]
        if len(costs) == 1:
            p = welch(self.cells[method, small], self.cells[method, large])
            sure = f" ({_p(p)}, too close to call)" if p is not None and p >= 0.05 else ""
            return f"{head} {method} {'gained' if least < 0 else 'lost'} {self._size(least)}{sure}."
        if len(tied) > 1:
            least_lost = "gained the same and most" if least < 0 else "lost the same and least"
            return f"{head} {join(tied)} {least_lost} ({self._size(least)})."
        second, other = costs[1]
        weights = {(method, small): 1, (method, large): -1, (other, small): -1, (other, large): 1}
        p = contrast(*((weight, list(self.cells[key].values.values())) for key, weight in weights.items()))
        sure = "" if p is None else f"; {_p(p)}{', too close to call' if p >= 0.05 else ''}"
        first = "gained most" if least < 0 else "lost least"
        also = f"a loss of {self.gap(second)}" if least < 0 < second else self._size(second)
        return f"{head} {method} {first} ({self._size(least)}), then {other} ({also}{sure})."

    def gap(self, gap: float) -> str:
        """Format a difference, in percentage points if the metric is a percentage."""
        if self.percent:
            gap *= 100
            return f"{gap:.{1 if gap >= 0.1 else 2}f} points"
        return f"{gap:.2g}"

    def _size(self, change: float) -> str:
        return self.gap(abs(change)) if change else "nothing"


def welch(one: Cell, other: Cell) -> float | None:
    """Return the p-value of Welch's test between two cells; None if no test is possible."""
    return contrast((1, list(one.values.values())), (-1, list(other.values.values())))


def join(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _same(a: float, b: float) -> bool:
    """Return whether two numbers are equal up to rounding."""
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def summarise(folder: Path) -> Summary:
    """Read the records in a folder and return the content of its report, for the most frequent task in it.

    Raises:
        FileNotFoundError: the folder holds no record.
    """
    return summarise_tasks(folder)[0]


def summarise_tasks(folder: Path) -> list[Summary]:
    """Read the records in a folder and return the content of a report for each task in it; a study has one task.

    Raises:
        FileNotFoundError: the folder holds no record.
    """
    records = read(folder)
    if records.study:
        return [_summarise(records, records.study.task)]
    count = Counter(sorted(run.task for run in records.runs))
    return [
        _summarise(replace(records, runs=[run for run in records.runs if run.task == task]), task)
        for task, _ in count.most_common()
    ]


def _summarise(records: Records, task: str) -> Summary:
    study, runs = records.study, records.runs
    if study and study.searched:  # remove these settings from the labels, so that all trials of a method have one label
        runs = [replace(run, method=without_settings(run.method, study.searched)) for run in runs]
        records = replace(records, runs=runs)
    notes = []
    metric = study.metric if study else _metric(runs)
    known = [study.higher_is_better] if study else [run.higher_is_better for run in runs if run.metric == metric]
    better = known[0] if known else higher_is_better(metric)
    epochs = study.epochs if study else None
    of_task = [run for run in runs if run.task == task]
    ours = [run for run in of_task if not epochs or run.epochs in (None, epochs) or run.part == "select"]
    if len(of_task) < len(runs):
        notes.append(f"{count_of(len(runs) - len(of_task), 'run')} of other tasks left out.")
    if len(ours) < len(of_task):
        notes.append(f"{count_of(len(of_task) - len(ours), 'run')} of other lengths than {epochs} epochs left out.")
    lengths = sorted({run.epochs for run in ours if run.epochs and run.part != "select"})
    if len(lengths) > 1:
        notes.append(f"The runs differ in length ({join([*map(str, lengths)])} epochs): the comparison is not even.")
    methods = list(dict.fromkeys((study.methods if study else []) + sorted({run.method for run in ours})))
    batches = sorted({run.batch for run in ours} | set(study.batches if study else []))
    choices = {(choice.method, choice.batch): choice for choice in (study.choices if study else [])}
    cells = {}
    for key in itertools.product(methods, batches):
        mine = [run for run in ours if (run.method, run.batch) == key]
        cells[key] = _cell(*key, mine, choices.get(key), metric, better)
    if extra := sum(run.part != "select" for run in ours) - sum(len(cell.runs) for cell in cells.values()):
        why = "another learning rate than the chosen one, or a seed run twice"
        notes.append(f"{count_of(extra, 'run')} left out of the table: {why}.")
    if failed := [run.name for run in ours if run.status == "failed"]:
        notes.append(f"{count_of(len(failed), 'run')} failed: {', '.join(failed)}.")
    if odd := sum(run.status == "finished" and not math.isfinite(run.score(metric) or 0.0) for run in ours):
        why = f"the {metric} is NaN or infinite although the loss is finite; check how it is computed"
        notes.append(f"{count_of(odd, 'finished run')} counted as diverged: {why}.")
    for batch in batches:
        idle = [method for method in methods if cells[method, batch].loss_rose]
        if idle:
            notes.append(f"At batch {batch}, the training loss of {join(idle)} did not fall after the first epoch.")
    if broken := records.unreadable:
        are = "records are" if len(broken) > 1 else "record is"
        notes.append(f"{len(broken)} {are} broken, or changed since written: {', '.join(broken)}.")
    return Summary(task.rpartition("/")[2], metric, better, methods, batches, cells, records, notes)


def _cell(method: str, batch: int, runs: list[Run], choice: Choice | None, metric: str, better: bool) -> Cell:
    def rank(score: float) -> float:
        return (score if better else -score) if math.isfinite(score) else -math.inf

    trials = {run.lr: s for run in runs if run.part == "select" and (s := run.score(metric)) is not None}
    selection = {lr: score if math.isfinite(score) else math.nan for lr, score in sorted(trials.items())}
    full = [run for run in runs if run.part != "select"]
    rates = sorted({run.lr for run in full})
    lr, on_test = choice.lr if choice else rates[0] if rates else None, False
    if not choice and len(rates) > 1:  # choose by validation score; without it by test score, which the report marks
        on_test = not any(math.isfinite(selection.get(rate, math.nan)) for rate in rates)
        scores = {rate: [run.score(metric) for run in full if run.lr == rate] for rate in rates}
        test = {rate: fmean(math.nan if score is None else score for score in scores[rate]) for rate in rates}
        lr = max(rates, key=lambda rate: rank((test if on_test else selection).get(rate, math.nan)))
    by_seed = {run.seed: run for run in full if lr is not None and math.isclose(run.lr, lr, rel_tol=1e-9)}
    chosen = [by_seed[seed] for seed in sorted(by_seed)]
    ended = {run.seed: score for run in chosen if (score := run.score(metric)) is not None}
    values = {seed: score for seed, score in ended.items() if math.isfinite(score)}
    grid = sorted(set(choice.grid if choice else []) or selection)
    return Cell(
        method=method,
        batch=batch,
        lr=lr,
        runs=chosen,
        values=values,
        diverged=len(ended) - len(values),
        grid=grid,
        extensions=choice.extensions if choice else None,
        at_edge=choice.at_edge if choice else lr is not None and len(grid) > 1 and lr in (grid[0], grid[-1]),
        selection=selection,
        chosen_on_test=on_test,
        search=choice if choice and choice.ranges else None,
    )


def _metric(runs: list[Run]) -> str:
    """Return the metric of runs without a study: the recorded one or, in older records, one of their scores."""
    if said := [run.metric for run in runs if run.metric]:
        return _most(said)
    names = Counter(
        key.partition("_")[2]
        for run in runs
        for key in {*run.result, *(run.curve[-1] if run.curve else {})}
        if key.startswith(("test_", "validation_"))
    )
    known = [name for name in ("accuracy", "auc", "perplexity", "loss") if name in names]
    return known[0] if known else _most(list(names.elements())) if names else "loss"


def _most(words: list[str]) -> str:
    return Counter(sorted(words)).most_common(1)[0][0] if words else "unknown task"


def count_of(count: int, word: str) -> str:
    """Return a count and a noun, such as "1 run" or "2 runs"."""
    return f"{count} {word}{'s' * (count != 1)}"
