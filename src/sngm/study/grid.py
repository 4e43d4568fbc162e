"""A study: methods x batches x learning rates x seeds on one task."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import tasks
from ..errors import UsageError
from ..optim import registry
from ..options import at_least
from ..parsing import parse_call, without_settings
from ..training.config import RunConfig, method_settings_of, resolve
from .search import Ranges, as_settings, hidden_by, names_in, points, ranges_of, split_entry
from .select import at_edge, best_rate, next_rate

MOST_SEEDS = 10_000


@dataclass(frozen=True)
class StudyConfig:
    """Config of a study, as given by the user.

    Attributes:
        methods: names, optionally with settings, such as ``sngm(weight_decay=8e-4)``.
        lrs: learning rates to try, for all methods or by method; None for the grid that the task has for each method.
        settings: fields of the config of every run, such as workers or schedule.
        extend: whether to extend the grid if the best learning rate is its lowest or highest one.
        search: settings to search instead of a grid of learning rates, each with a range or None for the default range;
            see `sngm.study.search`.
        trials: number of points (combinations of settings) that the search tries for each cell.
    """

    task: str
    methods: tuple[str, ...]
    batches: tuple[int, ...]
    seeds: int
    epochs: int
    lrs: tuple[float, ...] | dict[str, tuple[float, ...]] | None = None
    method_settings: dict[str, Any] = field(default_factory=dict)
    task_settings: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    extend: bool = True
    search: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    trials: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", tasks.canonical(self.task))
        if not at_least(self.seeds, 1) or self.seeds > MOST_SEEDS:
            raise UsageError(
                f"`seeds`, the number of runs of each result, must be at least 1 and at most {MOST_SEEDS:,}, got "
                f"{self.seeds!r}"
            )
        grids = self.lrs.values() if isinstance(self.lrs, dict) else [self.lrs or ()]
        for name, values in (("methods", self.methods), ("batches", self.batches), *(("lrs", grid) for grid in grids)):
            if len(set(values)) < len(values):
                again = next(value for i, value in enumerate(values) if value in values[:i])
                raise UsageError(f"`{name}` lists something twice: {again} is there twice; leave one out")
        if self.search and self.lrs:
            raise UsageError("give either `lrs`, a grid of learning rates, or `search`")
        names = {text: parse_call(text)[0] for text in self.methods}
        for entry in self.search:
            if (method := split_entry(entry)[1]) and method not in names.values():
                raise UsageError(f"`search` has a range for {method}, which is not one of the methods compared")
        if isinstance(self.lrs, dict):
            for text, name in names.items():
                if not self.lrs.keys() & {text, name}:
                    raise UsageError(f"`lrs` has no learning rates for {text}; give them for each method")
            if others := sorted(self.lrs.keys() - names.keys() - {*names.values()}):
                raise UsageError(f"`lrs` has learning rates for {others[0]}, which is not one of the methods compared")

    def cells(self) -> list[Cell]:
        """Return the cells of the study: one for each method at each batch size."""
        cells = []
        for text in self.methods:
            name, own = parse_call(text)
            known = method_settings_of(name)
            common = {k: v for k, v in self.method_settings.items() if k in known}
            for batch in self.batches:
                grid, searched = self.trials_of(text, {**common, **own}, batch)
                cells.append(Cell(self, name, {**common, **own}, batch, grid, searched))
        first = [cell for cell in cells if cell.batch == self.batches[0]]
        if len({len(cell.grid) for cell in cells}) > 1:
            sizes = ", ".join(f"{cell.label} {len(cell.grid)}" for cell in first)
            given = "`lrs` has" if self.lrs else "without `lrs` the task gives"
            raise UsageError(f"every method must have the same number of learning rates to try, but {given} {sizes}")
        for a, b in itertools.combinations(first, 2):
            if a.label == b.label or a.computes() == b.computes():
                both = f"{a.label} and {b.label} are the same method"
                same = f"{a.label} is there twice" if a.label == b.label else both
                raise UsageError(f"`methods` lists something twice: {same}; leave one out")
        return cells

    def ranges(self, method: str, batch: int) -> Ranges:
        """Return the range of each setting that is searched for this method at this batch size."""
        return ranges_of(self.task, method, batch, self.epochs, self.search)

    def trials_of(
        self, text: str, settings: dict[str, Any], batch: int
    ) -> tuple[tuple[float, ...], dict[float, dict[str, float]]]:
        """Return the learning rates to try, and a dict from each to its point in the search ({} without a search)."""
        method = parse_call(text)[0]
        if not self.search:
            grid = self.lrs.get(text, self.lrs.get(method)) if isinstance(self.lrs, dict) else self.lrs
            return grid or tasks.rates_of(self.task, method), {}
        given = {**settings, **self.settings}
        for name in names_in(self.search):
            if name in given or (name == "momentum" and "betas" in given):
                raise UsageError(f"{name} is searched, but also set for {method}; do one of the two")
        assert self.trials is not None
        found = points(self.ranges(method, batch), self.trials)
        return tuple(point["lr"] for point in found), {point["lr"]: point for point in found}

    def identity(self) -> dict[str, Any]:
        """Return the fields that identify the study, as JSON types, without the number of seeds, which may grow."""
        source = tasks.source_of(self.task, self.task_settings)
        identity: dict[str, Any] = json.loads(json.dumps({**asdict(self), "source": source}))
        registered = {name: registry.source_of(name) for name in (parse_call(text)[0] for text in self.methods)}
        if own := {name: digest for name, digest in registered.items() if digest}:
            identity["method_sources"] = own
        del identity["seeds"]
        if self.extend:  # left out if True, because older studies extended their grids and have no such field
            del identity["extend"]
        if not self.search:
            del identity["search"], identity["trials"]
        return identity


@dataclass(eq=False)
class Cell:
    """One method at one batch size: the learning rates to try, their scores, and the chosen learning rate."""

    study: StudyConfig
    method: str
    method_settings: dict[str, Any]
    batch: int
    grid: tuple[float, ...]
    searched: dict[float, dict[str, float]] = field(default_factory=dict)
    """The point (all searched settings) of each trial, by its learning rate; {} without a search."""
    scores: dict[float, tuple[float, float] | None] = field(default_factory=dict)
    lr: float | None = None
    chosen: bool = False
    tested: list[dict[str, Any]] = field(default_factory=list)
    """The records of the "full" runs that have ended."""

    @functools.cached_property
    def label(self) -> str:
        label = self.config(self.grid[0], "select", 0).label
        return without_settings(label, hidden_by(self.study.search)) if self.study.search else label

    @property
    def least_runs(self) -> int:
        """The least number of runs: one for each learning rate, if there are several to try, and one for each seed."""
        return self.study.seeds + (len(self.grid) if len(self.grid) > 1 else 0)

    def computes(self) -> tuple[Any, ...]:
        """Return what defines the method: its class or function, all settings with defaults, clipping and schedule."""
        method = registry.find(self.method)
        defaults = {key: p.default for key, p in inspect.signature(method.build).parameters.items()}
        config = self.config(self.grid[0], "select", 0)
        return method.build, {**defaults, **method.settings, **config.method_settings}, config.clip, config.schedule

    def config(self, lr: float, part: str, seed: int) -> RunConfig:
        study, point = self.study, self.searched.get(lr, {})
        given = {**study.settings, **({"warmup": point["warmup"]} if "warmup" in point else {})}
        settings = {**self.method_settings, **as_settings(self.method, point)}
        return resolve(
            study.task, self.method, lr=lr, batch=self.batch, epochs=study.epochs, seed=seed, part=part,
            method_settings=settings, task_settings=study.task_settings, **given,
        )  # fmt: skip

    def owns(self, config: RunConfig) -> bool:
        """Return whether a run with this config belongs to this cell."""
        return config.batch == self.batch and self.config(config.lr, config.part, config.seed) == config

    def first_runs(self) -> list[RunConfig]:
        """Return the runs to start with: one for each learning rate of the grid; if there is only one, one per seed."""
        if len(self.grid) == 1:
            return self.choose(self.grid[0])
        return [self.config(lr, "select", 0) for lr in self.grid]

    def take(self, config: RunConfig, record: dict[str, Any], metric: str, higher_is_better: bool) -> list[RunConfig]:
        """Store the score of a run that has ended; return the runs to start next."""
        if config.part == "full":
            self.tested.append(record)
            return []
        score, loss = (record["result"].get(f"validation_{name}") for name in (metric, "loss"))
        diverged = record["status"] == "diverged" or score is None
        self.scores[config.lr] = None if diverged else (score, float("inf") if loss is None else loss)
        if len(self.scores) < len(self.grid):
            return []
        extends = self.study.extend and not self.study.search  # all methods get equally many trials
        beyond = next_rate(self.scores, higher_is_better, len(self.grid)) if extends else None
        if beyond is not None:
            return [self.config(beyond, "select", 0)]
        best = best_rate(self.scores, higher_is_better)
        self.chosen = True
        return [] if best is None else self.choose(best)

    def choose(self, lr: float) -> list[RunConfig]:
        self.lr, self.chosen = lr, True
        return [self.config(lr, "full", seed) for seed in range(self.study.seeds)]

    def summary(self, higher_is_better: bool) -> dict[str, Any]:
        """Return the entry of this cell in study.json; a search adds its ranges, finished trials and chosen point."""
        scores, searches = self.scores, bool(self.study.search)
        summary = {
            "method": self.label,
            "batch": self.batch,
            "lr": self.lr,
            "grid": sorted(scores) or list(self.grid),
            "extensions": max(0, len(scores) - len(self.grid)),
            "at_edge": self.chosen and not searches and at_edge(scores, higher_is_better),
        }
        if searches:
            summary["ranges"] = self.study.ranges(self.method, self.batch)
            finished = [lr for lr in self.grid if lr in scores]
            summary["trials"] = [{**self.searched[lr], "score": (scores[lr] or [None])[0]} for lr in finished]
            summary["chosen"] = None if self.lr is None else self.searched[self.lr]
        return summary


def run_name(config: RunConfig) -> str:
    """Return the name of a run's folder: readable, and unique by the hash of the config."""
    words = f"{config.method}-b{config.batch}-lr{config.lr:g}-s{config.seed}-{config.part}"
    return f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', words)}-{config.hash}"


def split_settings(task: str, methods: list[str], settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `settings` into the settings of the methods and those of the task.

    Write ``method.key`` or ``task.key`` for a key that both have. The types of method settings are checked, including
    settings in a method name such as ``sngm(momentum=0.8)``.

    Raises:
        UsageError: neither a method nor the task has the key, both have it, or a value has the wrong type.
    """
    of_task = tasks.settings_of(task)
    of_methods = {name: method_settings_of(name) for name in (parse_call(text)[0] for text in methods)}
    for_methods: dict[str, Any] = {}
    for_task: dict[str, Any] = {}
    for key, value in settings.items():
        where, _, bare = key.rpartition(".")
        if where not in ("", "task", "method"):
            raise UsageError(f"names in `settings` must be key, task.key or method.key, got {key!r}")
        in_task = bare in of_task and where != "method"
        in_methods = any(bare in known for known in of_methods.values()) and where != "task"
        if in_task and in_methods:
            raise UsageError(f"{bare} is a setting of the task and of a method; write task.{bare} or method.{bare}")
        if not in_task and not in_methods:
            known = {f"task {task}": of_task, **of_methods}
            names = "; ".join(f"{name} has {', '.join(own) or 'none'}" for name, own in known.items())
            raise UsageError(f"no setting {bare!r}: {names}")
        (for_task if in_task else for_methods)[bare] = value
    for text in methods:
        name, own = parse_call(text)
        check_types(name, {**{k: v for k, v in for_methods.items() if k in of_methods[name]}, **own})
    return for_methods, for_task


def check_types(method: str, settings: dict[str, Any]) -> None:
    """Raise UsageError if a setting has another type than its default: torch would treat the string "no" as True.

    >>> check_types("msgd", {"momentum": 0.8, "nesterov": True})
    """
    try:
        parameters = inspect.signature(registry.find(method).build).parameters
    except ValueError as error:  # such as a library that is not installed
        raise UsageError(str(error)) from error
    for key, value in settings.items():
        if key == "lr":
            raise UsageError(f"{method}: lr is not a setting; give it as `lr` or `lrs`")
        if key not in parameters or value == (default := parameters[key].default):
            continue
        if isinstance(default, bool) or (default is None and "bool" in str(parameters[key].annotation)):
            fits, wanted = isinstance(value, bool), "True or False"
        elif isinstance(default, (int, float)):
            fits, wanted = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
        elif isinstance(default, tuple):
            fits, wanted = isinstance(value, tuple) and len(value) == len(default), f"like {default}"
        else:
            continue
        if not fits:
            raise UsageError(f"{method}: {key} must be {wanted}, got {value!r}")
