"""CIFAR-10 and CIFAR-100 from the folders of their official archives, in the binary form and in the Python one."""

from __future__ import annotations

import pickle
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import DataMissing, UsageError
from .data_dirs import data_roots, missing

Array = np.ndarray[Any, np.dtype[Any]]

PIXELS = 3 * 32 * 32  # bytes an image: red, green, blue, each row by row
COARSE = 20  # superclasses of CIFAR-100, whose label comes before the class's in the binary form


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of one published form."""

    classes: int
    form: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return self.train + self.test

    def official(self, name: str) -> int:
        """How many records a file of the official archive holds."""
        return 50_000 if self.classes == 100 and name in self.train else 10_000


TENS = tuple(f"data_batch_{i}" for i in range(1, 6))
LAYOUTS = (  # in the order of preference: the binary form is read faster
    Layout(10, "binary", "cifar-10-batches-bin", tuple(f"{name}.bin" for name in TENS), ("test_batch.bin",)),
    Layout(10, "python", "cifar-10-batches-py", TENS, ("test_batch",)),
    Layout(100, "binary", "cifar-100-binary", ("train.bin",), ("test.bin",)),
    Layout(100, "python", "cifar-100-python", ("train",), ("test",)),
)


def layouts(classes: int) -> list[Layout]:
    """The published forms of one of the two datasets."""
    found = [layout for layout in LAYOUTS if layout.classes == classes]
    if not found:
        raise UsageError(f"there is CIFAR-10 and CIFAR-100; got classes={classes}")
    return found


def find_cifar(root: Path | None, classes: int = 10) -> tuple[Layout, Path]:
    """The form that is there, with its folder. Nothing is read; :class:`DataMissing` says what is not there."""
    lacking: list[str] = []
    for place in data_roots(root):
        for layout in layouts(classes):
            # the folder itself will do as well as the one that holds it
            folder = place if place.name == layout.folder else place / layout.folder
            absent = [name for name in layout.files if not (folder / name).is_file()]
            if not absent:
                return layout, folder
            if folder.is_dir():
                lacking.append(f"{folder} lacks {', '.join(absent)}")
    if lacking:
        raise DataMissing(f"{'; '.join(lacking)}; delete the folder and run '{command(classes)}' with its --data-dir")
    raise missing(f"CIFAR-{classes}", root, [layout.folder for layout in layouts(classes)], command(classes))


def command(classes: int) -> str:
    """What fetches it."""
    return f"sngm data get cifar{classes}"


def load_cifar(root: Path | None = None, classes: int = 10) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images, uint8 of shape (N, 3, 32, 32), each with its labels, int64.

    Files with fewer or more records than the official ones are read with a warning: they may be a sample made for a
    trial. A file that ends within a record is refused.

    Args:
        root: the folder that holds cifar-10-batches-bin and the like; None: see :func:`sngm.data.data_dirs.data_roots`.
        classes: 10, or 100 for the fine labels of CIFAR-100.
    """
    layout, folder = find_cifar(root, classes)
    (train, test), counts = read(layout, folder)
    odd = [f"{name} {n:,}" for name, n in counts.items() if n != layout.official(name)]
    if odd:
        warnings.warn(f"{folder} does not hold the official records: {', '.join(odd)}", stacklevel=2)
    return train, test


def read(layout: Layout, folder: Path) -> tuple[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], dict[str, int]]:
    """Both splits as :func:`load_cifar` gives them, and how many records each file holds."""
    parse = _binary if layout.form == "binary" else _pickled
    counts: dict[str, int] = {}

    def split(names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        parts = [parse(layout, folder / name) for name in names]
        counts.update(zip(names, (len(labels) for _, labels in parts), strict=True))
        images = np.empty((sum(len(labels) for _, labels in parts), PIXELS), np.uint8)
        np.concatenate([pixels for pixels, _ in parts], out=images)
        labels = np.concatenate([labels for _, labels in parts]).astype(np.int64)
        return torch.from_numpy(images).view(-1, 3, 32, 32), torch.from_numpy(labels)

    return (split(layout.train), split(layout.test)), counts


def _binary(layout: Layout, path: Path) -> tuple[Array, Array]:
    """Pixels and labels: views of the file's bytes."""
    head = 2 if layout.classes == 100 else 1
    record = head + PIXELS
    size = path.stat().st_size
    if size == 0 or size % record:
        wanted = layout.official(path.name)
        raise _broken(
            layout, path, f"it has {size:,} bytes, no whole number of records of {record}; expected {wanted * record:,}"
        )
    rows = np.fromfile(path, np.uint8).reshape(-1, record)
    if head == 2:
        _within(layout, path, rows[:, 0], COARSE, "coarse label")
    _within(layout, path, rows[:, head - 1], layout.classes, "label")
    return rows[:, head:], rows[:, head - 1]


def _pickled(layout: Layout, path: Path) -> tuple[Array, Array]:
    """Pixels and labels from a pickled dictionary, of which no code is run."""
    size, wanted = path.stat().st_size, layout.official(path.name)
    try:
        with open(path, "rb") as file:
            found = _Plain(file, encoding="latin1").load()
    except DataMissing:
        raise
    except OSError:  # of the disk, not of what is on it
        raise
    except Exception as error:  # broken pickles fail in any way there is
        least = f"{size:,} bytes, where {wanted:,} records take more than {wanted * PIXELS:,}"
        why = " ".join(str(error).split())  # may quote the file, line breaks and all
        raise _broken(layout, path, f"it cannot be read as a pickle ({why}); it has {least}") from error
    if not isinstance(found, dict):
        raise _broken(layout, path, f"it holds a {type(found).__name__}, not a dictionary")
    found = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in found.items()}
    key = "fine_labels" if layout.classes == 100 else "labels"
    pixels, labels = getattr(found.get("data"), "array", None), found.get(key)
    if not (
        isinstance(pixels, np.ndarray)
        and pixels.ndim == 2
        and pixels.shape[1] == PIXELS
        and isinstance(labels, list)
        and all(type(label) is int and label.bit_length() < 64 for label in labels)
        and len(labels) == len(pixels) > 0
    ):
        raise _broken(layout, path, f"its 'data' must be rows of {PIXELS} bytes and its {key!r} as many whole numbers")
    numbers = np.array(labels)
    _within(layout, path, numbers, layout.classes, "label")
    return pixels, numbers


def _within(layout: Layout, path: Path, labels: Array, classes: int, word: str) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = wrong[0]
        raise _broken(layout, path, f"record {first} has the {word} {labels[first]}, not one of 0 to {classes - 1}")


def _broken(layout: Layout, path: Path, why: str) -> DataMissing:
    root = path.parent.parent
    return DataMissing(
        f"{path} is broken: {why}; delete {path.parent} and run '{command(layout.classes)} --form {layout.form} "
        f"--data-dir {shlex.quote(str(root))}'"
    )


def _latin1(text: str, encoding: str) -> bytes:
    """What pickles of Python 3 in an old protocol write bytes as."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it wants the encoding {encoding!r}")
    return text.encode("latin1")


class _Pixels:
    """What a pickle gets for NumPy's types and functions: NumPy itself would take any flag and address from it."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if self.arguments[:1] == ("u1",):  # a dtype, of which bytes need to know no more
            return
        match state:  # version, shape, dtype, whether by columns, elements
            case (_, shape, _Pixels(arguments=("u1", *_)), False, str() | bytes() as raw):
                raw = raw.encode("latin1") if isinstance(raw, str) else raw
                self.array = np.frombuffer(raw, np.uint8).reshape(shape)
            case _:
                raise pickle.UnpicklingError("its array is not one of bytes, row by row")


class _Plain(pickle.Unpickler):
    """Reads dictionaries, lists, numbers, texts and arrays of bytes; anything else that a pickle names is refused."""

    known: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Pixels,
        ("numpy._core.multiarray", "_reconstruct"): _Pixels,
        ("numpy", "ndarray"): _Pixels,
        ("numpy", "dtype"): _Pixels,
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR file needs")
        return self.known[module, name]
