"""Conversion of Criteo's text, a click per line, to arrays: labels, scaled integers and numbered categories.

The first pass reads the text into a temporary file of fixed-size rows. The second pass finds scales and categories in
this file, and the third encodes the rows. Every pass works on blocks of rows, so that memory holds only a block, the
distinct categories, and a byte for each row (9 while the rows are assigned to splits).
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import DataMissing, Failed, UsageError
from ..files import write_json
from .conversion import FACTS, Show, flushed, new_array, throttled
from .criteo_text import CATEGORIES, INTEGERS, REASONS, ROW, Array, parse, whole_lines
from .fetch import digest

VERSION = 1  # of the converted arrays; those of another version are made again
SPLITS = ("train", "validation", "test")
MISSING, UNSEEN, FIRST = 0, 1, 2  # numbers for a missing category, an unseen one, and the first category of a field
NAMES = (*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))
# The arrays of a split: dtype, and the shape of a row.
KINDS = {"dense": ("<f4", (INTEGERS,)), "categories": ("<i4", (CATEGORIES,)), "labels": ("|u1", ())}

BLOCK = 1 << 17  # rows that are processed at once
MAX_NAMED = 10  # malformed lines that messages list


def convert(paths: list[Path], names: list[str], seed: int, folder: Path, show: Show) -> None:
    """Convert text files: write the arrays of all splits, vocabulary.npy and facts.json into `folder`."""
    began = time.monotonic()
    progress = throttled(show)
    show(f"converting {len(paths)} file{'s' * (len(paths) > 1)} of Criteo's rows once, into {folder.parent}")
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        sources, malformed, absent = _read(paths, names, raw, progress)
        rows = sum(source["rows"] for source in sources)
        if rows < 3:
            raise DataMissing(f"{paths[0]} holds {rows} good rows; a split into three takes at least 3")
        splits = split_of(rows, seed)
        least, most, words = _fit(raw, splits, progress)
        counts = np.bincount(splits, minlength=3).tolist()
        arrays = {
            f"{split}-{kind}.npy": new_array(stack, folder / f"{split}-{kind}.npy", (count, *shape), dtype)
            for split, count in zip(SPLITS, counts, strict=True)
            for kind, (dtype, shape) in KINDS.items()
        }
        unseen = _encode(raw, splits, least, most, words, arrays, progress)
        every = np.concatenate(words)
        arrays["vocabulary.npy"] = new_array(stack, folder / "vocabulary.npy", every.shape, "<u8")
        arrays["vocabulary.npy"].write(every.tobytes())
        facts = {
            "version": VERSION,
            "split_seed": seed,
            "rows": dict(zip(SPLITS, counts, strict=True)),
            "field_sizes": [FIRST + len(field) for field in words],
            "malformed": malformed,
            "missing": dict(zip(NAMES, absent.tolist(), strict=True)),
            "unseen": {
                split: dict(zip(NAMES[INTEGERS:], field.tolist(), strict=True))
                for split, field in zip(SPLITS[1:], unseen[1:], strict=True)
            },
            "least": least.tolist(),
            "most": most.tolist(),
            "sources": sources,
            "arrays": flushed(arrays.values()),
        }
    write_json(folder / FACTS, facts)
    show(f"converted {rows:,} rows with {len(every):,} categories in {time.monotonic() - began:.0f} s")


def split_of(rows: int, seed: int) -> Array:
    """Return the split of each row, as 0 (train), 1 (validation) or 2 (test).

    The split is that of scikit-learn's ``train_test_split(test_size=0.2, random_state=seed)``, but the last fifth of
    its training rows, in their random order, is for validation. The peak memory is 9 bytes per row.

    >>> np.bincount(split_of(100, 0)).tolist()
    [64, 16, 20]
    """
    order = np.random.RandomState(seed).permutation(rows)  # a generator whose numbers never change
    test = math.ceil(0.2 * rows)
    train = int((rows - test) * 0.8)
    splits = np.ones(rows, np.uint8)
    splits[order[:test]] = 2
    splits[order[test : test + train]] = 0
    return splits


def _read(
    paths: list[Path], names: list[str], raw: IO[bytes], progress: Show
) -> tuple[list[dict[str, Any]], dict[str, Any], Array]:
    """Write all good rows to `raw`; return facts on files, facts on malformed lines, and missing values per column."""
    total, before = sum(path.stat().st_size for path in paths), 0
    sources: list[dict[str, Any]] = []
    first: list[dict[str, Any]] = []
    reasons, absent = np.zeros(1 + len(REASONS), np.int64), np.zeros(INTEGERS + CATEGORIES, np.int64)
    for path, name in zip(paths, names, strict=True):
        counts, state = np.zeros_like(reasons), path.stat()
        for text, done in whole_lines(path):
            lines = parse(text)
            raw.write(lines.rows.tobytes())
            absent += lines.missing
            for index in np.flatnonzero(lines.verdicts)[: MAX_NAMED - len(first)].tolist():
                why = REASONS[lines.verdicts[index] - 1]
                first.append({"file": name, "line": int(counts.sum()) + index + 1, "why": why})
            counts += np.bincount(lines.verdicts, minlength=len(counts))
            progress(f"{(before + done) / max(total, 1):.0%} read, {reasons[0] + counts[0]:,} rows")
        good, bad = int(counts[0]), int(counts[1:].sum())
        if not good + bad:
            raise DataMissing(f"{path} is empty")
        if bad > good:
            raise DataMissing(
                f"{path} does not hold Criteo's rows: {bad:,} of {good + bad:,} lines are malformed, most with "
                f"{REASONS[counts[1:].argmax()]}; a row is a label, 13 integers and 26 categories, separated by tabs"
            )
        checksum, now = digest(path, "sha256"), path.stat()
        if (now.st_size, now.st_mtime_ns) != (state.st_size, state.st_mtime_ns):
            raise Failed(f"{path} changed while it was read; try again")
        if same := [other["name"] for other in sources if other["sha256"] == checksum]:
            raise UsageError(f"{path} and {same[0]} hold the same rows, which would be in several splits; name one")
        source = {"name": name, "bytes": state.st_size, "mtime_ns": state.st_mtime_ns}
        sources.append({**source, "sha256": checksum, "rows": good})
        reasons += counts
        before += state.st_size
    wrong = {reason: int(n) for reason, n in zip(REASONS, reasons[1:], strict=True) if n}
    return sources, {"rows": int(reasons[1:].sum()), "reasons": wrong, "first": first}, absent


def _blocks(raw: IO[bytes], splits: Array) -> Iterator[tuple[slice, Array, Array, Array]]:
    """Yield blocks of rows: a slice of row numbers, labels, and integers and category keys of shape (columns, rows)."""
    raw.seek(0)
    for start in range(0, len(splits), BLOCK):
        rows = np.frombuffer(raw.read(BLOCK * ROW.itemsize), ROW)
        yield slice(start, start + len(rows)), rows["label"], rows["integers"].T.copy(), rows["keys"].T.copy()


def _fit(raw: IO[bytes], splits: Array, progress: Show) -> tuple[Array, Array, list[Array]]:
    """Return, for the training rows, minimum and maximum of each integer column, and each field's sorted categories."""
    limits = np.iinfo(np.int64)
    least, most = np.full(INTEGERS, limits.max), np.full(INTEGERS, limits.min)
    words = [[np.empty(0, np.uint64)] for _ in range(CATEGORIES)]  # the merged categories, then those of later blocks
    for where, _, integers, keys in _blocks(raw, splits):
        train = splits[where] == 0
        np.minimum(least, integers.min(1, where=train, initial=limits.max), out=least)
        np.maximum(most, integers.max(1, where=train, initial=limits.min), out=most)
        for field, column in zip(words, keys, strict=True):
            field.append(np.unique(column[train]))
            # merge rarely, because each merge sorts all categories
            if sum(map(len, field[1:])) > max(len(field[0]), 1 << 16):
                field[:] = [np.unique(np.concatenate(field))]
        progress(f"{where.stop / len(splits):.0%} fitted")
    merged = (np.unique(np.concatenate(field)) for field in words)
    return least, most, [field[field != 0] for field in merged]  # 0 is a missing category


def _encode(
    raw: IO[bytes],
    splits: Array,
    least: Array,
    most: Array,
    words: list[Array],
    arrays: dict[str, IO[bytes]],
    progress: Show,
) -> Array:
    """Write the arrays of all splits, and return the counts of unseen categories by split and field."""
    low, span = least.astype(np.float64)[:, None], (most.astype(np.float64) - least)[:, None]
    span[span == 0] = 1  # a constant column becomes 0, as in scikit-learn
    unseen = np.zeros((3, CATEGORIES), np.int64)
    for where, labels, integers, keys in _blocks(raw, splits):
        categories = np.stack([_numbers(column, field) for column, field in zip(keys, words, strict=True)], 1)
        dense = ((integers - low) / span).T.astype(np.float32)
        for index, split in enumerate(SPLITS):
            chosen = splits[where] == index
            for (kind, (dtype, _)), values in zip(KINDS.items(), (dense, categories, labels), strict=True):
                arrays[f"{split}-{kind}.npy"].write(values[chosen].astype(dtype, copy=False).tobytes())
            unseen[index] += (categories[chosen] == UNSEEN).sum(0)
        progress(f"{where.stop / len(splits):.0%} written")
    return unseen


def _numbers(keys: Array, known: Array) -> Array:
    """Return the numbers that encode `keys`, categories of one field; `known` are those of training rows, sorted."""
    ids = np.full(len(keys), UNSEEN, np.int32)
    if len(known):
        at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        ids = np.where(known[at] == keys, at + FIRST, UNSEEN).astype(np.int32)
    ids[keys == 0] = MISSING
    return ids
