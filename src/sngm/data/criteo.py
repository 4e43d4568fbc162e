"""Load Criteo's click logs: convert text of any size once to memory-mapped arrays, and split the rows at random.

The rules follow DeepCTR-Torch's ``run_classification_criteo.py``, which the SNGM paper seems to have used:

- A missing integer is 0, and integers are scaled to [0, 1] by their minimum and maximum.
- A missing category is a category of its own.
- The split is random: 64 % training, 16 % validation and 20 % test. With the default seed, each split has the same rows
  as in that script.

There is one difference: the script takes scales and categories from all rows, this module from the training rows alone.
So in the other splits a value may be outside [0, 1], and a category may be unseen in training; all unseen categories of
a field share one number.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ..errors import DataMissing, DataWarning, UsageError
from ..files import write_json
from .conversion import FACTS, Show, load_or_convert
from .criteo_convert import SPLITS, VERSION, convert
from .data_dirs import data_roots, missing
from .fetch import digest
from .tensors import Tensors

DEFAULT = ("dac_sample_80k.tsv",)
SEED = 2020  # seed of the split in DeepCTR-Torch's example


class Rows(Tensors):
    """Samples of integers, categories and labels, which may be memory-mapped.

    Memory-mapped rows are read from disk when they are indexed. A pickle of such rows holds only the path of the
    folder and the name of the split.

    Attributes:
        tensors: integers, float32 of shape (n, 13); categories, int32 of shape (n, 26); labels, float32 of shape (n,).
    """

    def __init__(self, tensors: tuple[Tensor, Tensor, Tensor], mapped: tuple[Path, str] | None = None) -> None:
        super().__init__(*tensors)
        self._mapped = mapped

    def to(self, device: torch.device | str) -> Self:
        """Return the same samples in memory, on a device."""
        dense, categories, labels = (t.to(device, copy=self._mapped is not None) for t in self.tensors)
        return type(self)((dense, categories, labels))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Rows, (self.tensors,)) if self._mapped is None else (_map, self._mapped)


@dataclass(frozen=True, slots=True)
class Criteo:
    """Criteo's rows, converted to arrays and split.

    Attributes:
        field_sizes: how many numbers encode the categories of each field: 0 stands for a missing category, 1 for a
            category unseen in training; the categories of the training rows follow, in the order of their bytes.
        facts: content of facts.json, which the conversion wrote: sources with checksums, rows, malformed rows, missing
            and unseen values, scales, and the checksums of the arrays.
        folder: folder of the arrays and of facts.json; vocabulary.npy in this folder lists the categories field by
            field, 8 bytes each.
    """

    train: Rows
    validation: Rows
    test: Rows
    field_sizes: list[int]
    facts: dict[str, Any]
    folder: Path

    @property
    def spans(self) -> list[float]:
        """What each integer column was divided by: its maximum minus its minimum, or 1 if the column is constant."""
        return [float(most - least) or 1.0 for least, most in zip(self.facts["least"], self.facts["most"], strict=True)]


def find_criteo(root: Path | None = None, files: Sequence[str | Path] | None = None) -> list[Path]:
    """Return the paths of Criteo's text files: in each data folder, search first in "criteo", then in itself."""
    if files is not None and (isinstance(files, (str, Path)) or not files):
        raise UsageError(f"files must be a list of at least one name, got {files!r}")
    folders = [folder for parent in data_roots(root) for folder in (parent / "criteo", parent)]
    found: list[Path] = []
    for name in (Path(name).expanduser() for name in files or DEFAULT):
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None:
            absolute = DataMissing(f"{name} does not exist")
            raise absolute if name.is_absolute() else missing("Criteo rows", root, [f"criteo/{name}"])
        found.append(path)
    return found


def load_criteo(
    root: Path | None = None,
    files: Sequence[str | Path] | None = None,
    *,
    split_seed: int = SEED,
    show: Show | None = None,
) -> Criteo:
    """Return training, validation and test rows. The first call converts the text, later calls reuse the arrays.

    The arrays are written to ``.sngm`` beside the first file, or below ``~/.cache/sngm`` if ``.sngm`` is not writable.
    The text is converted again when the content of a file changes. While another process converts it, this
    function waits. Malformed lines are left out, with a warning; a file with more malformed than good lines is an
    error.

    Args:
        root: data folder; None: see :func:`sngm.data.data_dirs.data_roots`.
        files: paths, or names of files (plain or gzip) in the folder "criteo" of `root`; None: the sample of 80,000
            rows.
        split_seed: seed of the random split; with the default, the splits are the same as in DeepCTR-Torch's example.
        show: called with a line of progress every few seconds; None: print the lines on stderr.
    """
    if not 0 <= split_seed < 2**32:
        raise UsageError(f"split_seed must be from 0 to 2**32 - 1, got {split_seed}")
    paths = find_criteo(root, files)
    parent = paths[0].parent.resolve()
    names = [os.path.relpath(path.resolve(), parent) for path in paths]

    def load(folder: Path, facts: dict[str, Any]) -> Criteo | None:
        if not _is_current(folder, facts, paths):
            return None
        train, validation, test = (_map(folder, split) for split in SPLITS)
        return Criteo(train, validation, test, facts["field_sizes"], facts, folder)

    found = load_or_convert(
        parent,
        "criteo",
        [VERSION, split_seed, names],
        load,
        lambda folder, shown: convert(paths, names, split_seed, folder, shown),
        space="about 500 bytes per row",
        show=show,
    )
    bad = found.facts["malformed"]
    if bad["rows"]:
        first, total = bad["first"][0], bad["rows"] + sum(found.facts["rows"].values())
        warnings.warn(
            f"{bad['rows']:,} malformed of {total:,} rows are left out; the first "
            f"is line {first['line']:,} of {first['file']}, with {first['why']}; {found.folder / FACTS} has more",
            DataWarning,
            stacklevel=2,
        )
    return found


# ---------------------------------------------------------------- the folder of the converted form


def _is_current(folder: Path, facts: dict[str, Any], paths: list[Path]) -> bool:
    """Return whether the text files still have the content from which they were converted."""
    for path, known in zip(paths, facts["sources"], strict=True):
        state = path.stat()
        if state.st_size != known["bytes"]:
            return False
        if state.st_mtime_ns != known["mtime_ns"]:
            if digest(path, "sha256") != known["sha256"]:
                return False
            known["mtime_ns"] = state.st_mtime_ns
            with contextlib.suppress(OSError):  # the file may belong to another user
                write_json(folder / FACTS, facts)
    return True


def _map(folder: Path, split: str) -> Rows:
    """Return the rows of one split, with integers and categories memory-mapped."""
    # mode "c" (copy on write), because torch warns about read-only arrays
    dense, categories = (
        torch.from_numpy(np.load(folder / f"{split}-{kind}.npy", mmap_mode="c")) for kind in ("dense", "categories")
    )
    labels = torch.from_numpy(np.load(folder / f"{split}-labels.npy")).float()
    return Rows((dense, categories, labels), (folder, split))
