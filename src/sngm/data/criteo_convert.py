"""Criteo's text, a click a line, made into arrays: labels, scaled integers and numbered categories of each split.

All text is read once into raw arrays on disk, which are then fitted and encoded. Everything works on blocks of rows:
Python never sees a single one, and memory holds a block, the distinct categories, and a byte for each row.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import DataMissing, Failed, UsageError
from ..files import write_json
from .criteo_text import CATEGORIES, INTEGERS, REASONS, Array, Source, parse, whole_lines

Show = Callable[[str], None]

VERSION = 1  # of the converted form: another one is made anew
FACTS = "facts.json"
SPLITS = ("train", "validation", "test")
MISSING, UNSEEN, FIRST = 0, 1, 2  # categories: none, one that training has not, and those that it has
NAMES = (*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))

BLOCK = 1 << 17  # rows that are fitted and encoded at once
SHOWN = 10  # malformed lines that are named
EVERY = 5.0  # seconds between two lines of progress
SETTLED = 2.0  # seconds after which a file's time tells two states of it apart, on any file system


def convert(paths: list[Path], names: list[str], seed: int, folder: Path, show: Show) -> None:
    """Read all text once into raw arrays on disk, then fit and encode those, block by block."""
    progress = Progress(show)
    show(f"converting {len(paths)} file{'s' * (len(paths) > 1)} of Criteo's rows once, into {folder.parent}")
    with contextlib.ExitStack() as stack:
        raw = _Raw(stack, folder)
        sources, malformed, absent = _read(paths, names, raw, progress)
        if raw.rows < 3:
            raise DataMissing(f"{paths[0]} holds {raw.rows} good rows; a split into three takes at least 3")
        splits = split_of(raw.rows, seed)
        least, most, words = _fit(raw, splits, progress)
        counts = np.bincount(splits, minlength=3).tolist()
        arrays = {
            f"{split}-{kind}.npy": _Array(stack, folder / f"{split}-{kind}.npy", (count, *shape), dtype)
            for split, count in zip(SPLITS, counts, strict=True)
            for kind, shape, dtype in (
                ("dense", (INTEGERS,), "<f4"),
                ("categories", (CATEGORIES,), "<i4"),
                ("labels", (), "|u1"),
            )
        }
        unseen, positives = _encode(raw, splits, least, most, words, arrays, progress)
        every = np.concatenate(words)
        arrays["vocabulary.npy"] = _Array(stack, folder / "vocabulary.npy", every.shape, "<u8")
        arrays["vocabulary.npy"].append(every)
        finished = {name: array.finish() for name, array in arrays.items()}
        raw.delete()
    facts = {
        "version": VERSION,
        "split_seed": seed,
        "rows": dict(zip(SPLITS, counts, strict=True)),
        "positives": dict(zip(SPLITS, positives, strict=True)),
        "field_sizes": [FIRST + len(field) for field in words],
        "malformed": malformed,
        "missing": dict(zip(NAMES, absent.tolist(), strict=True)),
        "unseen": {
            split: dict(zip(NAMES[INTEGERS:], field.tolist(), strict=True))
            for split, field in zip(SPLITS, unseen, strict=True)
            if split != "train"
        },
        "least": least.tolist(),
        "most": most.tolist(),
        "sources": sources,
        "arrays": finished,
    }
    write_json(folder / FACTS, facts)
    show(f"converted {raw.rows:,} rows with {len(every):,} categories in {progress.seconds:.0f} s")


def split_of(rows: int, seed: int) -> Array:
    """For each row 0, 1 or 2: train, validation or test.

    As scikit-learn's ``train_test_split(test_size=0.2, random_state=seed)`` with the last fifth of what is left to
    train on, in its random order, for validation. It takes 9 bytes a row for a moment, then 1.

    >>> np.bincount(split_of(100, 0)).tolist()
    [64, 16, 20]
    """
    order = np.random.RandomState(seed).permutation(rows)  # of all generators the one whose numbers never change
    test = math.ceil(0.2 * rows)
    train = int((rows - test) * 0.8)
    splits = np.ones(rows, np.uint8)
    splits[order[:test]] = 2
    splits[order[test : test + train]] = 0
    return splits


class _Raw:
    """Rows as they were read, in files that are gone afterwards."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self.columns = (("labels", np.uint8, 1), ("integers", np.int64, INTEGERS), ("keys", np.uint64, CATEGORIES))
        self.paths = [folder / f"raw-{name}" for name, _, _ in self.columns]
        self.files: list[IO[bytes]] = [stack.enter_context(path.open("w+b")) for path in self.paths]
        self.rows = 0

    def append(self, *arrays: Array) -> None:
        for file, array in zip(self.files, arrays, strict=True):
            file.write(np.ascontiguousarray(array).data)
        self.rows += len(arrays[0])

    def blocks(self) -> Iterator[tuple[slice, list[Array]]]:
        """Which rows, and their labels, integers and keys, the latter two of shape (columns, rows)."""
        for file in self.files:
            file.flush()
            file.seek(0)
        for start in range(0, self.rows, BLOCK):
            count = min(BLOCK, self.rows - start)
            found = [
                np.frombuffer(file.read(count * width * np.dtype(dtype).itemsize), dtype).reshape(count, width).T
                for file, (_, dtype, width) in zip(self.files, self.columns, strict=True)
            ]
            yield slice(start, start + count), [found[0][0], *map(np.ascontiguousarray, found[1:])]

    def delete(self) -> None:
        for path in self.paths:
            path.unlink()


class _Array:
    """A .npy file of known shape that is written from its start to its end, and summed up on the way."""

    def __init__(self, stack: contextlib.ExitStack, path: Path, shape: tuple[int, ...], dtype: str) -> None:
        self.file = stack.enter_context(path.open("w+b"))
        self.dtype = np.dtype(dtype)
        header = {"descr": dtype, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)  # type: ignore[no-untyped-call,unused-ignore]
        self.file.seek(0)
        self.sum = hashlib.sha256(self.file.read())

    def append(self, values: Array) -> None:
        content = np.ascontiguousarray(values, self.dtype).reshape(-1).view(np.uint8).data
        self.sum.update(content)
        self.file.write(content)

    def finish(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        return {"bytes": self.file.tell(), "sha256": self.sum.hexdigest()}


def _read(
    paths: list[Path], names: list[str], raw: _Raw, progress: Progress
) -> tuple[list[dict[str, Any]], dict[str, Any], Array]:
    """All good rows into `raw`; the sources, what is malformed, and how many values are missing in each column."""
    total, before = sum(path.stat().st_size for path in paths), 0
    sources: list[dict[str, Any]] = []
    first: list[dict[str, Any]] = []
    reasons, absent = np.zeros(1 + len(REASONS), np.int64), np.zeros(INTEGERS + CATEGORIES, np.int64)
    for path, name in zip(paths, names, strict=True):
        counts = np.zeros_like(reasons)
        began = time.time()
        try:
            source = Source(path)
        except OSError as error:
            raise DataMissing(f"{path} cannot be read: {error.strerror}") from error
        with source:
            state = os.fstat(source.file.fileno())
            for text in whole_lines(path, source):
                lines = parse(text)
                raw.append(lines.labels, lines.integers, lines.keys)
                absent += lines.missing
                for index in np.flatnonzero(lines.verdicts)[: SHOWN - len(first)].tolist():
                    why = REASONS[lines.verdicts[index] - 1]
                    first.append({"file": name, "line": int(counts.sum()) + index + 1, "why": why})
                counts += np.bincount(lines.verdicts, minlength=len(counts))
                progress(f"{(before + source.done) / max(total, 1):.0%} read, {raw.rows:,} rows")
                if source.done > state.st_size:
                    break  # something writes to it, maybe for ever
        good, bad = int(counts[0]), int(counts[1:].sum())
        if not good + bad:
            raise DataMissing(f"{path} is empty")
        if bad > good:
            most = int(counts[1:].argmax())
            raise DataMissing(
                f"{path} does not hold Criteo's rows: {bad:,} of {good + bad:,} lines are malformed, most with "
                f"{REASONS[most]}; a row is a label, 13 integers and 26 categories with tabs between"
            )
        now = path.stat()
        if (now.st_size, now.st_mtime_ns, source.done) != (state.st_size, state.st_mtime_ns, state.st_size):
            raise Failed(f"{path} changed while it was read; try again")
        found = source.sum.hexdigest()
        same = next((other["name"] for other in sources if other["sha256"] == found), None)
        if same is not None:
            raise UsageError(f"{path} and {same} hold the same; their rows would be trained on and tested on")
        settled = state.st_mtime_ns if began - state.st_mtime > SETTLED else None
        sources.append({"name": name, "bytes": source.done, "mtime_ns": settled, "sha256": found, "rows": good})
        reasons += counts
        before += source.done
    wrong = {reason: int(n) for reason, n in zip(REASONS, reasons[1:], strict=True) if n}
    return sources, {"rows": int(reasons[1:].sum()), "reasons": wrong, "first": first}, absent


def _fit(raw: _Raw, splits: Array, progress: Progress) -> tuple[Array, Array, list[Array]]:
    """Of the training rows: the least and the greatest of each integer, and the sorted categories of each field."""
    limits = np.iinfo(np.int64)
    least, most = np.full(INTEGERS, limits.max), np.full(INTEGERS, limits.min)
    words = [_Distinct() for _ in range(CATEGORIES)]
    for where, (_, integers, keys) in raw.blocks():
        train = splits[where] == 0
        np.minimum(least, integers.min(1, where=train, initial=limits.max), out=least)
        np.maximum(most, integers.max(1, where=train, initial=limits.min), out=most)
        for field, column in zip(words, keys, strict=True):
            field.add(column[train])
        progress(f"{where.stop / raw.rows:.0%} fitted")
    return least, most, [field.sorted() for field in words]


class _Distinct:
    """The distinct numbers of a stream, in memory of a few times their own size."""

    def __init__(self) -> None:
        self.known = np.empty(0, np.uint64)
        self.new: list[Array] = []
        self.waiting = 0

    def add(self, values: Array) -> None:
        self.new.append(np.unique(values))
        self.waiting += len(self.new[-1])
        if self.waiting > max(len(self.known), 1 << 16):  # seldom enough that all merging takes a few sorts
            self.merge()

    def merge(self) -> None:
        self.known = np.unique(np.concatenate([self.known, *self.new]))
        self.new, self.waiting = [], 0

    def sorted(self) -> Array:
        """All but 0, which stands for a missing category."""
        self.merge()
        return self.known[np.searchsorted(self.known, np.uint64(1)) :]


def _encode(
    raw: _Raw,
    splits: Array,
    least: Array,
    most: Array,
    words: list[Array],
    arrays: dict[str, _Array],
    progress: Progress,
) -> tuple[Array, list[int]]:
    """Write all splits; how many categories of each split and field are unseen, and how many labels are 1."""
    low, span = least.astype(np.float64)[:, None], (most.astype(np.float64) - least)[:, None]
    span[span == 0] = 1  # a constant column becomes 0, as in scikit-learn
    unseen, positives = np.zeros((3, CATEGORIES), np.int64), np.zeros(3, np.int64)
    for where, (labels, integers, keys) in raw.blocks():
        ids = np.stack([_numbers(column, field) for column, field in zip(keys, words, strict=True)], 1)
        dense = ((integers - low) / span).T.astype(np.float32)
        for index, split in enumerate(SPLITS):
            chosen = splits[where] == index
            mine = ids[chosen]
            arrays[f"{split}-dense.npy"].append(dense[chosen])
            arrays[f"{split}-categories.npy"].append(mine)
            arrays[f"{split}-labels.npy"].append(labels[chosen])
            unseen[index] += (mine == UNSEEN).sum(0)
            positives[index] += labels[chosen].sum(dtype=np.int64)
        progress(f"{where.stop / raw.rows:.0%} written")
    return unseen, positives.tolist()


def _numbers(keys: Array, known: Array) -> Array:
    """A field's categories as numbers."""
    if not len(known):
        return np.where(keys == 0, MISSING, UNSEEN).astype(np.int32)
    places = np.searchsorted(known, keys)
    np.minimum(places, len(known) - 1, out=places)
    ids = np.where(known[places] == keys, places + FIRST, UNSEEN)
    ids[keys == 0] = MISSING
    return ids.astype(np.int32)


class Progress:
    """A line every few seconds."""

    def __init__(self, show: Show) -> None:
        self.show, self.began = show, time.monotonic()
        self.last = self.began

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def __call__(self, text: str) -> None:
        if time.monotonic() - self.last >= EVERY:
            self.last = time.monotonic()
            self.show(text)


def say(text: str) -> None:
    """A line of progress on stderr."""
    print(f"sngm: criteo: {text}", file=sys.stderr, flush=True)
