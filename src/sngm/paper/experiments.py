"""The runs planned for each table of the paper: methods, batches, learning rates, seeds, and their cost.

Every method gets three learning rates, a factor of two apart, around one known to work; where the best one is at an
edge, the grid is extended by the same rule for all. Learning rates are chosen on validation data with one seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import tasks
from ..errors import UsageError
from ..study.grid import Cell, Study
from .tables import ADAM, CLARS, EXTRAP, FIGURES, LAMB, LARGE, LARS, MSGD, NUMBERS, SNGM, VIT, Claim, each

Rates = Mapping[int, float]  # by batch
START = 20.0  # seconds before the first epoch of a run: compiling kernels and loading data
COSTS_ON = "one NVIDIA H200"
ADVISED, WARMED = "SNGM with advised decay", "MSGD with that decay and warm-up"  # rows that are not in the paper
NESTEROV, LARS_2017 = "Nesterov MSGD with that decay and warm-up", "LARS (you2017) with that decay and warm-up"
ON_MEAN = " on the mean loss"  # suffix of rows that use the mean loss in place of the paper's sum


@dataclass(frozen=True, slots=True)
class Row:
    """A method in a table, with the settings of its runs."""

    name: str
    method: str
    rates: Rates
    """The middle of the grid of learning rates."""
    seeds: int = 3
    paper: str | None = None
    """The row of the paper's table to compare with; None: a row of our own."""
    grows: bool = False
    """Whether weight decay is that of batch 128 times sqrt(batch / 128), as `sngm advise` recommends."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    task_settings: Mapping[str, Any] = field(default_factory=dict)
    seconds: Rates | None = None
    """Seconds per epoch, if not the item's."""


@dataclass(frozen=True, slots=True)
class Item:
    """An experiment: a table, or a figure with runs of its own."""

    name: str
    title: str
    where: str
    task: str
    metric: str
    rows: tuple[Row, ...]
    batches: tuple[int, ...]
    """The most important first."""
    seconds: Rates
    """Per epoch, at the batches where it was measured."""
    factor: float = 2.0
    """Between neighbouring learning rates of a grid."""
    extend: bool = True
    epochs: int | None = None
    search: bool = True
    """Whether to search for a learning rate; not for tables of times."""
    needs: str = ""
    """What the user must provide."""
    apart: str = ""
    """Why its numbers cannot be compared with the paper's, if they cannot."""
    guesses: str = ""
    """What the paper leaves open, in short; docs/deviations.md has more."""

    def cells(self) -> Iterator[Planned]:
        """Yield the cells in the order in which they are run."""
        for batch in self.batches:
            for row in self.rows:
                if batch in row.rates:
                    yield Planned(self, row, batch)

    @property
    def numbers(self) -> Mapping[str, Mapping[int, float]]:
        """The paper's, by row and batch."""
        return NUMBERS.get(self.name, {})

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
        """As --cells takes it."""
        return f"{self.row.name}@{self.batch}"

    @property
    def paper(self) -> float | None:
        return None if self.row.paper is None else self.item.numbers.get(self.row.paper, {}).get(self.batch)

    def study(self, seeds: int | None = None) -> Study:
        """Return the study of this cell alone."""
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
        """Return the approximate duration of a run."""
        known = self.row.seconds or self.item.seconds
        epochs = self.item.epochs or tasks.find(self.item.task).epochs
        return START + epochs * between(known, self.batch)


def between(known: Rates, batch: int) -> float:
    """Interpolate linearly between the known batches, both axes logarithmic; beyond them, use the nearest.

    >>> between({128: 0.4, 2048: 0.1}, 512)
    0.2
    """
    batches = sorted(known)
    value = np.exp(np.interp(math.log(batch), np.log(batches), np.log([known[b] for b in batches])))
    return float(f"{value:.6g}")


def _same(rate: float, *batches: int) -> Rates:
    return dict.fromkeys(batches, rate)


# Seconds per epoch: docs/speed.md and docs/language.md. Those of figure-1 at 128 and of table-8 are estimates.
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
    Item(
        "table-2", "Test accuracy of ResNet20 on CIFAR-10", "Table 2, Image Classification", "cifar10-resnet20",
        "accuracy", (
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
    Item(
        "table-3", "Seconds an epoch of SNGM, ResNet20 on CIFAR-10", "Table 3, Image Classification",
        "cifar10-resnet20", "seconds", (
            Row(SNGM, "sngm", _same(0.1, 128, *LARGE), paper=SNGM),
            *(Row(name, method, _same(0.1, 128, *LARGE), seconds=SLOW[name])
              for name, method in ((CLARS, "clars"), (EXTRAP, "extrap-sgd"))),
        ),
        (128, *LARGE), RESNET20, epochs=5, search=False,
    ),
    Item(
        "table-4", "Test accuracy of ResNet50 on ImageNet", "Table 4, Image Classification", "imagenet-resnet50",
        "accuracy", (
            Row(LARS, "lars-unscaled", {1024: 4.0, 32768: 32.0}, paper=LARS),
            Row(SNGM, "sngm", {1024: 1.0, 32768: 5.0}, paper=SNGM),
        ),
        (32768, 1024), {1024: 380.0}, needs="ImageNet",
        guesses="Warm-up, power of the decay and label smoothing are those of the code that LARS is from.",
    ),
    *(
        Item(
            f"table-5-{data.lower().replace('-', '')}", f"Test accuracy of a ViT fine-tuned on {data}",
            "Table 5, Image Classification", f"{data.lower().replace('-', '')}-vit", "accuracy",
            (
                Row(MSGD, "msgd", _same(0.01, *VIT), paper=MSGD),
                Row(LARS, "lars-unscaled", _same(2.0, *VIT), paper=LARS),
                Row(SNGM, "sngm", _same(0.1, *VIT), paper=SNGM),
            ),
            (16384, 128, 1024, 4096, 8192), {128: 20.0}, needs="the weights of google/vit-base-patch16-224-in21k",
        )
        for data in ("CIFAR-10", "CIFAR-100")
    ),
    Item(
        "table-6", "Test perplexity of an LSTM on WikiText-2", "Table 6, NLP", "wikitext2-lstm", "perplexity",
        (
            Row(MSGD, "msgd", {20: 2.0, 1000: 8.0, 2000: 8.0}, paper=MSGD),
            Row(LARS, "lars-unscaled", {20: 0.8, 1000: 8.0, 2000: 8.0}, paper=LARS),
            Row(SNGM, "sngm", {20: 0.28, 1000: 2.0, 2000: 2.8}, paper=SNGM),
        ),
        (2000, 20, 1000), LSTM_TESTED,
        guesses="Momentum, rates, schedule (linear from batch 1000 on, divide-on-plateau below) and clipping to 0.25. "
        "SNGM's grid at 2000 is around the best of a search that tried more rates of SNGM than of the others.",
    ),
    Item(
        "table-7", "Seconds an epoch of SNGM, LSTM on WikiText-2", "Table 7, NLP", "wikitext2-lstm", "seconds",
        (Row(SNGM, "sngm", _same(1.0, 20, 1000, 2000), paper=SNGM),), (20, 1000, 2000), LSTM,
        epochs=3, search=False,
    ),
    Item(
        "table-8", "Test AUC of DeepFM on Criteo", "Table 8, Click-Through Rate Prediction", "criteo-deepfm", "auc",
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


QUESTIONS = tuple(
    Claim("table-2", text, pairs, note="(Our question.)", by_paper=False)
    for text, pairs in (
        (f"{ADVISED} is better than {WARMED}.", each((ADVISED,), (WARMED,), LARGE)),
        (
            f"{ADVISED} is better than MSGD with Nesterov momentum and LARS (you2017), both with that decay and "
            "warm-up.",
            each((ADVISED,), (NESTEROV, LARS_2017), (8192,)),
        ),
    )
)
"""Comparisons that the paper does not make, for which our own rows were run."""


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
    raise UsageError(f"no item is called {name!r}{hint}; there are {', '.join(names)}")
