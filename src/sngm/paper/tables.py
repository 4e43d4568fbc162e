"""The paper's results, read from tables.toml: the numbers of its tables, its figures, and the claims of its text."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the paper that shows training curves, for which the paper states no numbers."""

    name: str
    title: str
    where: str
    task: str
    metrics: Sequence[str]
    """Names of the plotted metrics in a run's curve."""
    batches: Sequence[int]
    methods: Sequence[str]
    item: str
    """The experiment whose runs the figure shows."""

    @property
    def pictures(self) -> dict[str, str]:
        """The file name, without suffix, for each metric."""
        several = len(self.metrics) > 1
        return {m: f"{self.name}-{m.replace('_', '-')}" if several else self.name for m in self.metrics}


Cell = tuple[str, int]  # name of a table row, such as a method, and batch size


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the paper that can be tested, and the pairs of cells that test it.

    `kind` is what each pair must show: "better" means that the first cell is better than the second, "similar" that the
    two differ by no more than the tolerance. The claim holds if all pairs show this at no less than a fraction `share`
    of the batch sizes of the first cells.
    """

    item: str
    text: str
    pairs: tuple[tuple[Cell, Cell], ...]
    kind: str = "better"
    share: float = 1.0
    metric: str = ""
    """The metric to compare in place of the item's metric."""
    also: Sequence[str] = ()
    """Further metrics to compare, such as "train_loss", the training loss of the last epoch."""
    note: str = ""
    """Which part of the sentence is tested, if not the whole sentence."""
    by_paper: bool = True
    """Whether the paper makes the claim; False for a question of our own."""


def _claim(
    methods: Sequence[str] = (), others: Sequence[str] = (), batches: Sequence[int] = (), pairs: Any = (), **rest: Any
) -> Claim:
    """Build a claim of tables.toml, which compares `methods` with `others` at `batches`, or the cells of `pairs`."""
    cells = pairs or [((method, batch), (other, batch)) for batch in batches for method in methods for other in others]
    return Claim(pairs=tuple((tuple(a), tuple(b)) for a, b in cells), **rest)


PAPER = tomllib.loads(Path(__file__).with_name("tables.toml").read_text("utf-8"))
TABLES: dict[str, dict[str, Any]] = PAPER["tables"]
NUMBERS: dict[str, dict[str, dict[int, float]]] = {  # by table, method and batch
    name: {method: dict(zip(table["batches"], values, strict=True)) for method, values in table["numbers"].items()}
    for name, table in TABLES.items()
}
FIGURES = tuple(Figure(**figure) for figure in PAPER["figures"])
CLAIMS = tuple(_claim(**claim) for claim in PAPER["claims"])
TABLE_1: dict[str, dict[str, str]] = PAPER["table-1"]
