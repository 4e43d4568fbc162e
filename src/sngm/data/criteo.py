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
from .criteo_convert import FACTS, SETTLED, SPLITS, VERSION, Show, convert, say
from .data_dirs import data_roots, missing
from .fetch import digest
from .tensors import Tensors

DEFAULT = ("dac_sample_80k.tsv",)
SEED = 2020  # of the split in DeepCTR-Torch's example


class Rows(Tensors):
    """Samples in tensors, which may be mapped from files: integers, categories and labels, a sample a row.

    Mapped rows are read from disk as they are asked for, and sent to another process as the name of their folder.

    Attributes:
        tensors: float32 of shape (n, 13), int32 of shape (n, 26), and float32 of shape (n,).
    """

    def __init__(self, tensors: tuple[Tensor, Tensor, Tensor], mapped: tuple[Path, str] | None = None) -> None:
        super().__init__(*tensors)
        self._mapped = mapped

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
        root: the data folder; None: see :func:`sngm.data.data_dirs.data_roots`.
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
