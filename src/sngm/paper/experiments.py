"""The runs planned for each table of the paper, read from experiments.toml, and their expected time.

In most experiments, every method gets three learning rates, a factor of two apart, around one that worked before
or, on tasks without earlier runs, a guess. If the lowest or highest of them is the best, the grid is extended, by the
same rule for all methods of an experiment. Learning rates are chosen on validation data with one seed.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import tasks
from ..errors import UsageError
from ..study.grid import Cell, StudyConfig
from .tables import FIGURES, NUMBERS, TABLES

Rates = Mapping[int, float]  # values by batch
START = 5.0  # seconds that a run takes besides its epochs, for loading data, compiling kernels and testing
COSTS_ON = "one NVIDIA H200"
ON_MEAN = " on the mean loss"  # suffix of rows that use the mean loss in place of the paper's sum


@dataclass(frozen=True, slots=True)
class Row:
    """A method in a table, with the settings of its runs."""

    name: str
    method: str
    rates: Rates = field(default_factory=dict)
    """The middle of the grid of learning rates for each batch; the only learning rate if `Item.search` is False."""
    decays: Rates = field(default_factory=dict)
    """The weight decay for each batch at which it is not that of `method_settings`, nor the default."""
    warmups: Rates = field(default_factory=dict)
    """The warm-up in epochs for each batch at which it is not the task's."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Settings to search instead of the grid, with their ranges at batch 8192; see `at_batch`."""
    seeds: int = 3
    paper: str | None = None
    """The row of the paper's table to compare with; None if the paper has no such row."""
    grows: bool = False
    """Whether the task's weight decay is multiplied by sqrt(batch / 128), as `sngm advise` recommends."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    task_settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: Rates | None = None
    """Seconds per epoch, by batch, if they differ from `Item.seconds`."""


@dataclass(frozen=True, slots=True)
class Item:
    """An experiment: a table of the paper, a figure with runs of its own, or a comparison that is not in the paper."""

    name: str
    title: str
    where: str
    task: str
    metric: str
    rows: tuple[Row, ...]
    batches: Sequence[int]
    """Batch sizes."""
    seconds: Rates
    """Seconds per epoch, for the batches at which they were measured or estimated; see `between` for others."""
    factor: float = 2.0
    """The ratio of neighbouring learning rates in a grid."""
    extend: bool = True
    epochs: int | None = None
    search: bool = True
    """Whether to search for a learning rate; False for tables of times and for `levers`."""
    trials: int | None = None
    """Number of trials in a search over `Row.ranges`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the runs of all rows."""
    task_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the task for all rows."""
    keep_last: Sequence[int] = ()
    """Batches at which the last samples of an epoch are kept as a smaller batch, for all rows."""
    needs: str = ""
    """What the user must provide, such as a dataset."""
    apart: str = ""
    """Why the numbers cannot be compared with the paper's numbers; empty if they can."""
    about: str = ""
    """How the runs were made, mostly for experiments that are not in the paper."""
    guesses: str = ""
    """What the paper does not state, in short; docs/deviations.md has more."""

    def cells(self) -> Iterator[Planned]:
        """Yield the cells: each method at each batch size."""
        for batch in self.batches:
            for row in self.rows:
                if row.ranges or batch in row.rates:
                    yield Planned(self, row, batch)

    @property
    def numbers(self) -> Mapping[str, Mapping[int, float]]:
        """The paper's numbers, by row and batch."""
        return NUMBERS.get(self.name, {})

    @property
    def higher_is_better(self) -> bool:
        return self.metric != "seconds" and tasks.find(self.task).higher_is_better


@dataclass(frozen=True, slots=True)
class Planned:
    """A cell of an experiment: one method at one batch size."""

    item: Item
    row: Row
    batch: int

    @property
    def name(self) -> str:
        """The name of this cell, for the option --cells."""
        return f"{self.row.name}@{self.batch}"

    @property
    def paper(self) -> float | None:
        return None if self.row.paper is None else self.item.numbers.get(self.row.paper, {}).get(self.batch)

    def study(self, seeds: int | None = None) -> StudyConfig:
        """Return the config of a study that has only this cell."""
        item, row, cls = self.item, self.row, tasks.find(self.item.task)
        usual = cls.usual(self.batch)
        method, rates = row.method, None
        if not row.ranges:
            middle, factor = row.rates[self.batch], item.factor
            grid = (middle / factor, middle, middle * factor) if item.search else (middle,)
            rates = tuple(float(f"{rate:.3g}") for rate in grid)
        if row.grows:
            method += f"(weight_decay={usual['weight_decay'] * math.sqrt(self.batch / 128):.3g})"
        decay = {"weight_decay": row.decays[self.batch]} if self.batch in row.decays else {}
        settings = {"precision": usual["precision_on_gpu"], **item.settings, **row.settings}  # on CPUs too
        if self.batch in row.warmups:
            settings["warmup"] = row.warmups[self.batch]
        if self.batch in item.keep_last:
            settings["last_batch"] = "keep"
        return StudyConfig(
            task=item.task,
            methods=(method,),
            batches=(self.batch,),
            seeds=row.seeds if seeds is None else seeds,
            epochs=item.epochs or cls.epochs,
            lrs=rates,
            method_settings={**row.method_settings, **decay},
            task_settings={**item.task_settings, **row.task_settings},
            settings=settings,
            extend=item.extend,
            search=at_batch(row.ranges, self.batch),
            trials=item.trials,
        )

    def cell(self, seeds: int | None = None) -> Cell:
        (cell,) = self.study(seeds).cells()
        return cell

    def seconds(self) -> float:
        """Return the approximate duration of a run in seconds, on the GPU `COSTS_ON`."""
        known = self.row.seconds or self.item.seconds
        epochs = self.item.epochs or tasks.find(self.item.task).epochs
        return START + epochs * between(known, self.batch)


def at_batch(ranges: Mapping[str, tuple[float, float]], batch: int) -> dict[str, tuple[float, float] | None]:
    """Return the ranges of a search at a batch: the ranges at batch 8192 times sqrt(batch / 8192).

    >>> at_batch({"lr": (0.2, 3.2)}, 2048)
    {'lr': (0.1, 1.6)}
    """
    scale = math.sqrt(batch / 8192)
    return {name: (low * scale, high * scale) for name, (low, high) in ranges.items()}


def between(known: Rates, batch: int) -> float:
    """Interpolate a value linearly in log-log scale between known batches; beyond them, take that of the nearest one.

    >>> between({128: 0.4, 2048: 0.1}, 512)
    0.2
    """
    batches = sorted(known)
    value = np.exp(np.interp(math.log(batch), np.log(batches), np.log([known[b] for b in batches])))
    return float(f"{value:.6g}")


def _row_or_item(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row or item of experiments.toml with batches as integers, and settings such as betas as tuples."""
    found = dict(given)
    for key in {"rates", "decays", "warmups", "seconds"} & found.keys():
        found[key] = {int(batch): value for batch, value in found[key].items()}
    if own := found.get("method_settings"):
        found["method_settings"] = {key: tuple(v) if isinstance(v, list) else v for key, v in own.items()}
    return found


def _read() -> Iterator[Item]:
    """Yield the items of experiments.toml; for tables of the paper, `title`, `where`, `task` and `metric` are from
    tables.toml."""
    for name, given in tomllib.loads(Path(__file__).with_name("experiments.toml").read_text("utf-8")).items():
        about = {key: TABLES[name][key] for key in ("title", "where", "task", "metric")} if name in TABLES else {}
        rows = tuple(Row(**_row_or_item(row)) for row in given.pop("rows"))
        yield Item(name=name, rows=rows, **about, **_row_or_item(given))


ITEMS = tuple(_read())


def find(name: str) -> Item:
    """Return an experiment by its name, or by the name of a figure that shows its runs."""
    from ..optim.registry import nearest

    asked = name.strip().lower()
    named = next((figure.item for figure in FIGURES if figure.name == asked), asked)
    if found := next((item for item in ITEMS if item.name == named), None):
        return found
    if named == "table-1":
        raise UsageError("table-1 is theory, with nothing to train: see docs/theory.md and sngm check-theory")
    names = list(dict.fromkeys([*(figure.name for figure in FIGURES), "table-1", *(item.name for item in ITEMS)]))
    parts = [item.name for item in ITEMS if named and item.name.startswith(f"{named}-")]
    hint = f" (did you mean {' or '.join(parts)}?)" if parts else nearest(named, names)
    raise UsageError(f"item must be one of {', '.join(names)}, got {name!r}{hint}")
