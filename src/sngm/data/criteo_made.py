"""Made-up rows in Criteo's form, as many as one likes and with a truth that is known: for tests and benchmarks."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from .criteo_text import CATEGORIES, FIELDS, INTEGERS, KEY, MINUS, NEWLINE, TAB, ZERO, Array
from .hashing import BITS, mix

AT_ONCE = 1 << 16  # rows that are made up at once
HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


@dataclass(frozen=True, slots=True)
class Made:
    """Made-up rows: what their text says, and the truth behind it.

    Attributes:
        labels: bool, drawn with the probability sigmoid(logits).
        integers: int64 of shape (n, 13).
        categories: int64 of shape (n, 26): 0 is a field's most frequent one.
        missing: bool of shape (n, 39): the text leaves these out. The truth then counts an integer as 0, and a
            category as nothing.
        logits: float64.
    """

    labels: Array
    integers: Array
    categories: Array
    missing: Array
    logits: Array


def cardinalities(total: int) -> tuple[int, ...]:
    """Sizes of 26 fields that sum to `total`: from a few to most of it, as Criteo's do.

    >>> sum(cardinalities(5_000_000)), min(cardinalities(5_000_000)), max(cardinalities(5_000_000)) > 10**6
    (5000000, 3, True)
    """
    if total < 3 * CATEGORIES:
        raise ValueError(f"total must be at least {3 * CATEGORIES}, got {total}")
    low, high = 0.0, 1.0  # each field has as many times those of the one before as makes the sum right
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(3 * np.exp(rate * i) for i in range(CATEGORIES)) < total else (low, rate)
    sizes = [int(3 * np.exp(low * i)) for i in range(CATEGORIES)]
    return (*sizes[:-1], total - sum(sizes[:-1]))


@dataclass(frozen=True, slots=True)
class CriteoLike:
    """Made-up rows in Criteo's form, with a logistic truth that is linear in what DeepFM's linear part sees.

    A row is a function of the seed and its number alone, so any part of any size can be made by itself.

    Args:
        rows: how many.
        seed: of all that is drawn.
        sizes: how many categories each of the 26 fields has; the k-th is drawn about as often as 1/sqrt(k).
        missing: the share of all values that is left out.
        strength: of the truth: 0 is none, at 1 the best AUC there can be is about 0.8.
    """

    rows: int
    seed: int = 0
    sizes: Sequence[int] = cardinalities(2_000)
    missing: float = 0.1
    strength: float = 1.0

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}")
        if len(self.sizes) != CATEGORIES or not all(1 <= size <= 1 << 32 for size in self.sizes):
            raise ValueError(f"sizes must be {CATEGORIES} numbers from 1 to 2**32, got {self.sizes}")
        if not 0 <= self.missing < 1:
            raise ValueError(f"missing must be at least 0 and less than 1, got {self.missing}")

    def block(self, start: int, stop: int) -> Made:
        """The rows from `start` to before `stop`."""
        rows = torch.arange(start, min(stop, self.rows))
        integers = np.empty((len(rows), INTEGERS), np.int64)
        categories = np.empty((len(rows), CATEGORIES), np.int64)
        missing = np.empty((len(rows), INTEGERS + CATEGORIES), bool)
        logits = np.full(len(rows), -1.1)
        for column in range(INTEGERS + CATEGORIES):
            bits = mix(self.seed, column, rows)
            # the highest 53 bits say which value, the 9 below them whether it is there
            drawn, gone = _unit(bits), ((bits & 511) < self.missing * 512).numpy()
            missing[:, column] = gone
            if column < INTEGERS:
                value = (100 * drawn**2).astype(np.int64) - 2 * (column == 1)  # Criteo's second has negatives too
                integers[:, column] = value
                effect = 0.01 * value * (_unit(mix(self.seed, -1, torch.tensor([column]))) - 0.5)
            else:
                field = column - INTEGERS
                size = self.sizes[field]
                value = np.minimum((size * drawn**2).astype(np.int64), size - 1)
                categories[:, field] = value
                effect = _unit(mix(self.seed, ~column, torch.from_numpy(value))) - 0.5
            logits += self.strength * np.where(gone, 0, effect)
        labels = _unit(mix(self.seed, FIELDS, rows)) < 1 / (1 + np.exp(-logits))
        return Made(labels, integers, categories, missing, logits)

    def text(self, start: int, stop: int) -> bytes:
        """The same rows as the lines of a file; a category is 8 hexadecimal digits."""
        made = self.block(start, stop)
        width = 4  # -2 to 99, and the tab
        table = np.zeros((len(made.labels), 2 + width * INTEGERS + (KEY + 1) * CATEGORIES), np.uint8)
        table[:, 0], table[:, 1] = ZERO + made.labels, TAB
        numbers = table[:, 2 : 2 + width * INTEGERS].reshape(-1, INTEGERS, width)  # a copy
        size = np.abs(made.integers)
        numbers[..., 0] = np.where(made.integers < 0, MINUS, 0)
        numbers[..., 1] = np.where(size >= 10, ZERO + size // 10, 0)
        numbers[..., 2] = ZERO + size % 10
        numbers[made.missing[:, :INTEGERS]] = 0
        numbers[..., 3] = TAB
        table[:, 2 : 2 + width * INTEGERS] = numbers.reshape(len(table), -1)
        # an odd factor gives each category of a field a number of its own below 2**32, far from its neighbours'
        hashed = (made.categories * 2_654_435_761 + np.arange(CATEGORIES) * 40_503) & 0xFFFFFFFF
        names = np.empty((len(table), CATEGORIES, KEY + 1), np.uint8)
        for digit in range(KEY):
            names[..., digit] = HEX[(hashed >> (28 - 4 * digit)) & 15]
        names[made.missing[:, INTEGERS:]] = 0
        names[..., KEY] = TAB
        names[:, -1, KEY] = NEWLINE
        table[:, 2 + width * INTEGERS :] = names.reshape(len(table), -1)
        flat = table.ravel()
        return bytes(flat[flat != 0])

    def write(self, path: Path, start: int = 0, stop: int | None = None) -> None:
        """Rows as a file, gzip if its name ends with .gz; ranges of rows make several files."""
        if path.exists():
            raise UsageError(f"{path} is there already; delete it or name another")
        stop = self.rows if stop is None else min(stop, self.rows)
        part = path.with_name(f".{path.name}.part")
        try:
            with open(part, "wb") as file:
                packed = gzip.GzipFile("", "wb", 1, file, mtime=0) if path.suffix == ".gz" else None
                for begin in range(start, stop, AT_ONCE):
                    (packed or file).write(self.text(begin, min(begin + AT_ONCE, stop)))
                if packed:
                    packed.close()
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def _unit(bits: Tensor) -> Array:
    """Evenly spread in [0, 1)."""
    found: Array = (bits >> (BITS - 53)).double().mul_(2.0**-53).numpy()
    return found
