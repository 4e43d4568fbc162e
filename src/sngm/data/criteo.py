"""Criteo's clicks: text of any size, converted once into memory-mapped arrays, and the splits of the paper's example.

The rules are those of DeepCTR-Torch's ``run_classification_criteo.py``, which the paper seems to have followed: a
missing integer is 0, integers are scaled to [0, 1] by their least and greatest value, a missing category is one of its
own, and the split is random, 64 % to train, 16 % to validate and 20 % to test. With the default seed the rows of each
split are those of that script. It differs in one thing: the script takes scales and categories from all rows, this
from the training rows alone. So a value of the other splits may lie outside [0, 1], and a category may be one that
training has not seen; those of a field share one number.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataMissing, Failed, UsageError
from ..files import locked, write_json
from .criteo_convert import (
    CATEGORIES,
    FACTS,
    FIELDS,
    INTEGERS,
    KEY,
    MINUS,
    NEWLINE,
    SETTLED,
    SPLITS,
    TAB,
    VERSION,
    ZERO,
    Array,
    Show,
    convert,
    say,
)  # fmt: skip
from .fetch import digest
from .fingerprint import fingerprint
from .hashing import BITS, mix
from .places import data_roots, missing

DEFAULT = ("dac_sample_80k.tsv",)
SEED = 2020  # of the split in DeepCTR-Torch's example


class Rows:
    """Samples in tensors, which may be mapped from files: integers, categories and labels, a sample a row.

    It has what :class:`sngm.tasks.Tensors` has, so that a trainer can take it to a GPU. Mapped rows are read from disk
    as they are asked for, and sent to another process as the name of their folder.

    Attributes:
        tensors: float32 of shape (n, 13), int32 of shape (n, 26), and float32 of shape (n,).
    """

    def __init__(self, tensors: tuple[Tensor, Tensor, Tensor], mapped: tuple[Path, str] | None = None) -> None:
        self.tensors = tensors
        self._mapped = mapped

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return self.tensors[0].device

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[indices.to(t.device)] for t in self.tensors)

    def rows(self, indices: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Where samples lie: the tensors that hold them, and the rows there."""
        return self.tensors, indices.to(self.device)

    def fingerprint(self) -> str:
        """What tells these samples from others."""
        return fingerprint(self.tensors)

    def to(self, device: torch.device | str) -> Rows:
        """The same samples in memory, on a device."""
        dense, categories, labels = (t.to(device, copy=self._mapped is not None) for t in self.tensors)
        return Rows((dense, categories, labels))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Rows, (self.tensors,)) if self._mapped is None else (_map, self._mapped)


@dataclass(frozen=True, slots=True)
class Criteo:
    """The converted rows.

    Attributes:
        field_sizes: how many numbers the categories of each field have: 0 for a missing one, 1 for one that training
            has not seen, then those of the training rows in the order of their bytes.
        facts: what the conversion found: sources with checksums, rows, malformed rows, missing and unseen values,
            scales, and the checksums of the arrays.
        folder: where all of it is; vocabulary.npy there has the categories of one field after the other, as 8 bytes.
    """

    train: Rows
    validation: Rows
    test: Rows
    field_sizes: list[int]
    facts: dict[str, Any]
    folder: Path

    @property
    def spans(self) -> list[float]:
        """What each integer, less its least value, was divided by: the greatest less the least, 1 where that is 0."""
        return [float(most - least) or 1.0 for least, most in zip(self.facts["least"], self.facts["most"], strict=True)]


def find_criteo(root: Path | None = None, files: Sequence[str | Path] | None = None) -> list[Path]:
    """The text files, in the order given. They are looked for in criteo in the data folder, and in that itself."""
    if files is not None and (isinstance(files, (str, Path)) or not files):
        raise UsageError(f"files must be a list of at least one name, got {files!r}")
    names = [Path(name).expanduser() for name in files or DEFAULT]
    folders = [folder for place in data_roots(root) for folder in (place / "criteo", place)]
    found: list[Path] = []
    for name in names:
        try:
            path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        except PermissionError as error:
            raise DataMissing(f"{error.filename or name} cannot be read: {error.strerror}") from error
        if path is None:
            raise (
                missing("Criteo rows", root, [f"criteo/{name}"])
                if not name.is_absolute()
                else DataMissing(f"{name} is not there")
            )
        found.append(path)
    for i, path in enumerate(found):
        if any(os.path.samefile(path, other) for other in found[:i]):
            raise UsageError(f"{path} is given twice; its rows would be trained on and tested on")
    return found


def load_criteo(
    root: Path | None = None,
    files: Sequence[str | Path] | None = None,
    *,
    split_seed: int = SEED,
    show: Show | None = None,
) -> Criteo:
    """Training, validation and test rows. The first call converts the text, later ones take what it made.

    What is made goes into ``.sngm`` beside the first file, or below ``~/.cache/sngm`` where that cannot be written. It
    is made anew where a file has other content. Of two processes one waits for the other. Lines that are malformed
    are left out, with a warning; a file with more of them than of good ones is refused.

    Args:
        root: the data folder; None: see :func:`sngm.data.places.data_roots`.
        files: names of files, plain or gzip, in the folder criteo there, or paths; None: the sample of 80,000 rows.
        split_seed: of the random split; the default gives the rows that DeepCTR-Torch's example has.
        show: gets a line of progress now and then; None: they go to stderr.
    """
    if not 0 <= split_seed < 2**32:
        raise UsageError(f"split_seed must be from 0 to 2**32 - 1, got {split_seed}")
    paths = find_criteo(root, files)
    found = _made(paths, split_seed, show or say)
    bad = found.facts["malformed"]
    if bad["rows"]:
        first, total = bad["first"][0], bad["rows"] + sum(found.facts["rows"].values())
        warnings.warn(
            f"{bad['rows']:,} malformed of {total:,} rows are left out; the first "
            f"is line {first['line']:,} of {first['file']}, with {first['why']}; {found.folder / FACTS} has more",
            stacklevel=2,
        )
    return found


def verify(folder: Path) -> list[str]:
    """What is wrong with converted arrays by their checksums, all of which are read."""
    facts = json.loads((folder / FACTS).read_text())
    return [
        f"{folder / name} has the SHA256 {found}, not {wanted['sha256']}; delete {folder}, and it is made anew"
        for name, wanted in facts["arrays"].items()
        if (found := digest(folder / name, "sha256")) != wanted["sha256"]
    ]


# ---------------------------------------------------------------- where the converted form is, and whether it holds


def _made(paths: list[Path], seed: int, show: Show) -> Criteo:
    """The converted form, opened; it is made if it is not there."""
    parent = paths[0].parent.resolve()
    names = [os.path.relpath(path.resolve(), parent) for path in paths]
    beside, cache = parent / ".sngm", Path.home() / ".cache" / "sngm" / "criteo" / ".sngm"
    for place, of in ((beside, ""), (cache, str(parent))):
        key = hashlib.sha256(json.dumps([VERSION, seed, names, of]).encode()).hexdigest()[:16]
        target = place / key
        if not _writable(place, key):
            if facts := _facts(target, paths):  # made by somebody who may
                return _opened(target, facts)
            continue
        with locked(place, f".{key}.lock", waiting=lambda: show("another process is converting Criteo's rows")):
            facts = _facts(target, paths)
            if facts is None:
                with _whole(target) as aside:
                    convert(paths, names, seed, aside, show)
                facts = json.loads((target / FACTS).read_text())
            return _opened(target, facts)  # before another process may take it away
    raise Failed(f"neither {beside} nor {cache} can be written, and Criteo's rows have to be converted")


def _writable(place: Path, key: str) -> bool:
    try:
        place.mkdir(parents=True, exist_ok=True)
        with open(place / f".{key}.lock", "a"):
            return True
    except OSError:
        return False


def _facts(folder: Path, paths: list[Path]) -> dict[str, Any] | None:
    """What is known of the converted form, or None if there is none, it is not whole, or the text has changed."""
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
        if any((folder / name).stat().st_size != array["bytes"] for name, array in facts["arrays"].items()):
            return None
        touched = False
        for path, known in zip(paths, facts["sources"], strict=True):
            state = path.stat()
            if state.st_size != known["bytes"]:
                return None
            if state.st_mtime_ns != known["mtime_ns"]:
                if digest(path, "sha256") != known["sha256"]:
                    return None
                known["mtime_ns"] = _settled(state)
                touched = known["mtime_ns"] is not None or touched
        if touched:
            with contextlib.suppress(OSError):  # it may be somebody else's
                write_json(folder / FACTS, facts)
        return facts
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _settled(state: os.stat_result) -> int | None:
    """A file's time, or None while a change might not show in it."""
    return state.st_mtime_ns if time.time() - state.st_mtime > SETTLED else None


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `target` once it is whole, and goes if it does not get so."""
    aside, old = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.old")
    for left in (aside, old):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        if target.exists():
            os.replace(target, old)
        os.replace(aside, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Failed(f"no space left for {target}; converting takes about 500 bytes a row there") from error
        raise
    finally:
        for left in (aside, old):
            shutil.rmtree(left, ignore_errors=True)


def _opened(folder: Path, facts: dict[str, Any]) -> Criteo:
    train, validation, test = (_map(folder, split) for split in SPLITS)
    return Criteo(train, validation, test, facts["field_sizes"], facts, folder)


def _map(folder: Path, split: str) -> Rows:
    """One split, mapped from its files."""
    # "c": a tensor may be written to, so torch must not get a mapping that may not; nothing reaches the file
    dense, categories = (
        torch.from_numpy(np.load(folder / f"{split}-{kind}.npy", mmap_mode="c")) for kind in ("dense", "categories")
    )
    labels = torch.from_numpy(np.load(folder / f"{split}-labels.npy")).float()
    return Rows((dense, categories, labels), (folder, split))


# ---------------------------------------------------------------- made-up rows


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


AT_ONCE = 1 << 16  # rows that are made up at once
HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


def _unit(bits: Tensor) -> Array:
    """Evenly spread in [0, 1)."""
    found: Array = (bits >> (BITS - 53)).double().mul_(2.0**-53).numpy()
    return found
