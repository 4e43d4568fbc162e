"""What is run for each table of the paper: methods, batches, grids, seeds, and what that costs.

Every method gets three learning rates, a factor of two apart, around one known to work; where the best lies at an edge
the grid grows, for all by the same rule. Rates are chosen on validation data with one seed, results are over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import tasks
from ..errors import UsageError
from ..study.grid import Cell, Study
from .tables import ADAM, CLARS, EXTRAP, FIGURES, LAMB, LARGE, LARS, MSGD, SNGM, TABLES, Claim, Table, each

Rates = Mapping[int, float]  # the middle of the grid at each batch
START = 20.0  # seconds of a run before its first epoch, with kernels to compile and data to load
COSTS_ON = "one NVIDIA H200"
ADVISED, WARMED = "SNGM with advised decay", "MSGD with that decay and warm-up"  # rows that the paper lacks
NESTEROV, LARS_2017 = "Nesterov MSGD with that decay and warm-up", "LARS (you2017) with that decay and warm-up"
ON_MEAN = " on the mean loss"  # what the name of a row ends in where the loss is not the paper's


@dataclass(frozen=True, slots=True)
class Row:
    """A method as a table has it."""

    name: str
    method: str
    rates: Rates
    seeds: int = 3
    paper: str | None = None
    """The row of the paper's table that it is held against; None: a row of our own."""
    grows: bool = False
    """Whether weight decay grows with the root of the batch, as `sngm advise` has it, from batch 128 on."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    task_settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: Rates | None = None
    """An epoch's, where not the item's."""


@dataclass(frozen=True, slots=True)
class Item:
    """A table, or a figure with runs of its own."""

    name: str
    title: str
    where: str
    task: str
    metric: str
    rows: tuple[Row, ...]
    batches: tuple[int, ...]
    """Those that matter the most first."""
    seconds: Rates
    """An epoch's, at the batches where it was measured."""
    numbers: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """The paper's."""
    factor: float = 2.0
    """Between the rates of a grid."""
    extend: bool = True
    epochs: int | None = None
    search: bool = True
    """Whether the rate matters: it does not for times."""
    needs: str = ""
    """What a user must bring, where that is not easily had."""
    apart: str = ""
    """Why its numbers cannot be held against the paper's, if they cannot."""
    guesses: str = ""
    """What of the set-up the paper leaves open, in short; docs/deviations.md has more."""

    def cells(self) -> Iterator[Planned]:
        """In the order in which they are run."""
        for batch in self.batches:
            for row in self.rows:
                if batch in row.rates:
                    yield Planned(self, row, batch)

    @property
    def higher_is_better(self) -> bool:
        return self.metric != "seconds" and tasks.find(self.task).higher_is_better


@dataclass(frozen=True, slots=True)
class Planned:
    """One method at one batch size."""

    item: Item
    row: Row
    batch: int

    @property
    def name(self) -> str:
        """For --cells."""
        return f"{self.row.name}@{self.batch}"

    @property
    def paper(self) -> float | None:
        return None if self.row.paper is None else self.item.numbers.get(self.row.paper, {}).get(self.batch)

    def study(self, seeds: int | None = None) -> Study:
        """The study of this cell alone."""
        item, row, cls = self.item, self.row, tasks.find(self.item.task)
        usual = cls.usual(self.batch)
        middle, factor = row.rates[self.batch], item.factor
        rates = (middle / factor, middle, middle * factor) if item.search else (middle,)
        method = row.method
        if row.grows:
            method += f"(weight_decay={usual['weight_decay'] * math.sqrt(self.batch / 128):.3g})"
        return Study(
            task=item.task,
            methods=(method,),
            batches=(self.batch,),
            seeds=row.seeds if seeds is None else seeds,
            epochs=item.epochs or cls.epochs,
            lrs=tuple(float(f"{rate:.3g}") for rate in rates),
            method_settings=dict(row.method_settings),
            task_settings=dict(row.task_settings),
            settings={"precision": usual["precision_on_gpu"], **row.settings},  # the same on every machine
            extend=item.extend,
        )

    def cell(self, seeds: int | None = None) -> Cell:
        (cell,) = self.study(seeds).cells()
        return cell

    def seconds(self) -> float:
        """What a run takes, about."""
        known = self.row.seconds or self.item.seconds
        epochs = self.item.epochs or tasks.find(self.item.task).epochs
        return START + epochs * between(known, self.batch)


def between(known: Rates, batch: int) -> float:
    """On a straight line between the batches measured, both on logarithmic scales; beyond them as at the nearest.

    >>> between({128: 0.4, 2048: 0.1}, 512)
    0.2
    """
    batches = sorted(known)
    low = max((b for b in batches if b <= batch), default=batches[0])
    high = min((b for b in batches if b >= batch), default=batches[-1])
    if low == high:
        return known[low]
    share = math.log(batch / low) / math.log(high / low)
    return float(f"{known[low] * (known[high] / known[low]) ** share:.6g}")


def _table(name: str) -> Table:
    return next(table for table in TABLES if table.name == name)


def _item(name: str, rows: Sequence[Row], batches: Sequence[int], seconds: Rates, **more: Any) -> Item:
    table = _table(name)
    return Item(
        table.name, table.title, table.where, table.task, table.metric, tuple(rows), tuple(batches), seconds,
        numbers=table.rows, **more,
    )  # fmt: skip


def _same(rate: float, *batches: int) -> Rates:
    return dict.fromkeys(batches, rate)


# Seconds an epoch: docs/speed.md and docs/language.md. Those of figure-1 at 128 and of table-8 are guesses.
RESNET20 = {128: 0.447, 1024: 0.185, 8192: 0.149}
SLOW = {CLARS: {128: 2.14, 1024: 0.449, 8192: 0.446}, EXTRAP: {128: 5.85, 1024: 1.10, 8192: 0.382}}
LSTM = {20: 3.2, 1000: 0.48, 2000: 0.42}
LSTM_TESTED = {batch: seconds + 0.4 for batch, seconds in LSTM.items()}  # validated and tested after each epoch
SNGM_RATES = {128: 0.1, 1024: 0.28, 2048: 0.4, 4096: 0.57, 8192: 0.8}
MSGD_RATES = {128: 0.1} | dict(_same(0.2, *LARGE))
LARS_RATES = {128: 1.0} | dict(_same(2.0, *LARGE))

ITEMS = (
    Item(
        "figure-1", FIGURES[0].title, FIGURES[0].where, FIGURES[0].task, "accuracy",
        (Row(MSGD, "msgd", {128: 0.02, 8192: 0.1}),), (8192, 128), {128: 0.2, 8192: 0.046},
        guesses="The net, its rates, and all settings: those of ResNet20.",
    ),
    _item(
        "table-2",
        (
            Row(MSGD, "msgd", MSGD_RATES, paper=MSGD),
            Row(LARS, "lars-unscaled", LARS_RATES, paper=LARS),
            Row(SNGM, "sngm", SNGM_RATES, paper=SNGM),
            Row(ADVISED, "sngm", {b: SNGM_RATES[b] for b in LARGE}, grows=True),
            Row(WARMED, "msgd", _same(0.4, *LARGE), grows=True, settings={"warmup": 5.0}),
            Row(
                NESTEROV, "msgd", {8192: 0.8}, grows=True, settings={"warmup": 5.0}, method_settings={"nesterov": True}
            ),
            Row(LARS_2017, "lars", {8192: 4.0}, grows=True, settings={"warmup": 5.0}),
            Row(CLARS, "clars", _same(2.0, 128, *LARGE), paper=CLARS, seconds=SLOW[CLARS]),
            Row(EXTRAP, "extrap-sgd", MSGD_RATES, paper=EXTRAP, seconds=SLOW[EXTRAP]),
        ),
        (8192, 128, 1024, 2048, 4096), RESNET20,
        guesses="The last part of an epoch is left out; the first worker's BatchNorm statistics are tested; all "
        "weights decay; LARS is the \"unscaled\" one; CLARS takes norms of micro-batches; EXTRAP-SGD is rebuilt.",
    ),
    _item(
        "table-3",
        (
            Row(SNGM, "sngm", _same(0.1, 128, *LARGE), paper=SNGM),
            *(Row(name, method, _same(0.1, 128, *LARGE), seconds=SLOW[name])
              for name, method in ((CLARS, "clars"), (EXTRAP, "extrap-sgd"))),
        ),
        (128, *LARGE), RESNET20, epochs=5, search=False,
    ),
    _item(
        "table-4",
        (
            Row(LARS, "lars-unscaled", {1024: 4.0, 32768: 32.0}, paper=LARS),
            Row(SNGM, "sngm", {1024: 1.0, 32768: 5.0}, paper=SNGM),
        ),
        (32768, 1024), {1024: 380.0}, needs="ImageNet",
        guesses="Warm-up, power of the decay and label smoothing are those of the code that LARS is from.",
    ),
    *(
        _item(
            f"table-5-{data}",
            (
                Row(MSGD, "msgd", _same(0.01, 128, 1024, 4096, 8192, 16384), paper=MSGD),
                Row(LARS, "lars-unscaled", _same(2.0, 128, 1024, 4096, 8192, 16384), paper=LARS),
                Row(SNGM, "sngm", _same(0.1, 128, 1024, 4096, 8192, 16384), paper=SNGM),
            ),
            (16384, 128, 1024, 4096, 8192), {128: 20.0}, needs="the weights of google/vit-base-patch16-224-in21k",
        )
        for data in ("cifar10", "cifar100")
    ),
    _item(
        "table-6",
        (
            Row(MSGD, "msgd", {20: 2.0, 1000: 8.0, 2000: 8.0}, paper=MSGD),
            Row(LARS, "lars-unscaled", {20: 0.8, 1000: 8.0, 2000: 8.0}, paper=LARS),
            Row(SNGM, "sngm", {20: 0.28, 1000: 2.0, 2000: 2.8}, paper=SNGM),
        ),
        (2000, 20, 1000), LSTM_TESTED,
        guesses="Momentum, rates, schedule (linear from batch 1000 on, divide-on-plateau below) and clipping to 0.25. "
        "SNGM's grid at 2000 is around the best of a search that tried more rates of SNGM than of the others.",
    ),
    _item(
        "table-7", (Row(SNGM, "sngm", _same(1.0, 20, 1000, 2000), paper=SNGM),), (20, 1000, 2000), LSTM,
        epochs=3, search=False,
    ),
    _item(
        "table-8",
        tuple(
            Row(
                name if reduction == "sum" else name + ON_MEAN, method, _same(0.01, 1024, 8192),
                paper=name if reduction == "sum" else None,
                task_settings={} if reduction == "sum" else {"reduction": reduction},
            )
            for reduction in ("sum", "mean")
            for name, method in (
                (MSGD, "msgd"), (ADAM, "adam"), (LARS, "lars-unscaled"), (LAMB, "lamb"), (SNGM, "sngm")
            )
        ),
        (1024, 8192), {1024: 0.4, 8192: 0.2}, factor=10.0, extend=False,
        apart="the paper's are of ten million rows of Criteo's terabyte, ours of 80,000 rows of the older set",
        guesses="The loss is the sum over a batch, as in the library the paper names.",
    ),
)  # fmt: skip


ASKED = (
    Claim(
        "table-2",
        f"{ADVISED} is better than {WARMED}.",
        each((ADVISED,), (WARMED,), LARGE),
        note="(Our question.)",
        by_paper=False,
    ),
    Claim(
        "table-2",
        f"{ADVISED} is better than MSGD with Nesterov momentum and LARS (you2017), both with that decay and warm-up.",
        each((ADVISED,), (NESTEROV, LARS_2017), (8192,)),
        note="(Our question.)",
        by_paper=False,
    ),
)
"""What the paper does not say, and our own rows were run for."""


def find(name: str) -> Item:
    """An item by its name."""
    named = name.strip().lower()
    for item in ITEMS:
        if item.name == named:
            return item
    from ..optim.registry import nearest

    names = list(dict.fromkeys([*(figure.name for figure in FIGURES), "table-1", *(item.name for item in ITEMS)]))
    if alias := next((figure.item for figure in FIGURES if figure.name == named), None):
        return find(alias)  # drawn from the runs of a table
    if named == "table-1":
        raise UsageError("table-1 is theory, with nothing to train: see docs/theory.md and sngm check-theory")
    parts = [item.name for item in ITEMS if named and item.name.startswith(f"{named}-")]
    asked = f" (did you mean {' or '.join(parts)}?)" if parts else nearest(named, names)
    raise UsageError(f"no item is called {name!r}{asked}; there are {', '.join(names)}")
