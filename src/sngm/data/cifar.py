"""Load CIFAR-10 and CIFAR-100 from the folders of their official archives, in the binary or the Python form."""

from __future__ import annotations

import pickle
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import DataMissing, UsageError
from .data_dirs import find_folder, warn_if_odd
from .fetch import Archive

Array = np.ndarray[Any, np.dtype[Any]]
Split = tuple[Tensor, Tensor]  # images and labels

PIXELS = 3 * 32 * 32  # bytes per image: red, green, blue, each in row-major order
COARSE = 20  # superclasses of CIFAR-100; in the binary form the superclass label precedes the class label


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Archive):
    """One published form of CIFAR-10 or CIFAR-100, binary or Python; the last of its files is the test set.

    Attributes:
        checksums: checksums of the files, separated by spaces, in the order of the files: SHA256 for the binary form,
            MD5 for the Python form.
    """

    classes: int
    form: str
    checksums: str

    def official(self, name: str) -> int:
        """Return the number of records of a file in the official archive."""
        return 50_000 if self.classes == 100 and name == self.files[0] else 10_000


TENS = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
LAYOUTS = (  # in order of preference: the binary form is faster to read
    Layout(
        "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171, "cifar-10-batches-bin",
        tuple(f"{name}.bin" for name in TENS), classes=10, form="binary",
        checksums="cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5 "
        "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed "
        "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67 "
        "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48 "
        "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add "
        "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    ),
    Layout(
        "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170_498_071, "cifar-10-batches-py", TENS,
        classes=10, form="python",
        checksums="c99cafc152244af753f735de768cd75f d4bba439e000b95fd0a9bffe97cbabec 54ebc095f3ab1f0389bbae665268c751 "
        "634d18415352ddfa80567beed471001a 482c414d41f54cd18b22e5b47cb7c3cb 40351d587109b95175f43aff81a1287e",
    ),
    Layout(
        "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733, "cifar-100-binary",
        ("train.bin", "test.bin"), classes=100, form="binary",
        checksums="f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29 "
        "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
    ),
    Layout(
        "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437, "cifar-100-python",
        ("train", "test"), classes=100, form="python",
        checksums="16019d7e3df5f24257cddd939b257f8d f0ef6b0ae62326f3e7ffdfab6717acfc",
    ),
)  # fmt: skip


def layouts(classes: int) -> list[Layout]:
    """Return the published forms of CIFAR-10 or CIFAR-100."""
    found = [layout for layout in LAYOUTS if layout.classes == classes]
    if not found:
        raise UsageError(f"classes must be 10 or 100, for CIFAR-10 or CIFAR-100; got {classes}")
    return found


def archive_of(dataset: str, form: str) -> Layout:
    """Return the archive to download for "cifar10" or "cifar100" in one published form."""
    for layout in LAYOUTS:
        if (f"cifar{layout.classes}", layout.form) == (dataset, form):
            return layout
    raise UsageError(
        f"{dataset!r} in the form {form!r} cannot be downloaded; allowed are cifar10 and cifar100, as binary or "
        "python. 'sngm data' says where other datasets come from"
    )


def find_cifar(root: Path | None, classes: int = 10) -> tuple[Layout, Path]:
    """Return the published form that is present, and its folder; raise :class:`DataMissing` if no form is present."""
    known = layouts(classes)
    forms = [(layout.folder, layout.files) for layout in known]
    title, command = f"CIFAR-{classes}", f"sngm data get cifar{classes}"
    folder, index = find_folder(title, root, forms, [layout.folder for layout in known], command)
    return known[index], folder


def load_cifar(root: Path | None = None, classes: int = 10) -> tuple[Split, Split]:
    """Return training and test images, uint8 of shape (N, 3, 32, 32), with int64 labels.

    A file with a different number of records than the official file is read with a warning, so that small samples
    work. A file that ends within a record is an error.

    Args:
        root: folder that holds cifar-10-batches-bin and the like; None: see :func:`sngm.data.data_dirs.data_roots`.
        classes: 10, or 100 for the fine labels of CIFAR-100.
    """
    return read(*find_cifar(root, classes))


def read(layout: Layout, folder: Path) -> tuple[Split, Split]:
    """Return both splits as :func:`load_cifar` does, from a folder in one published form."""
    parse = _binary if layout.form == "binary" else _pickled
    parts = [parse(layout, folder / name) for name in layout.files]
    counts = {name: (len(part[1]), layout.official(name)) for name, part in zip(layout.files, parts, strict=True)}
    warn_if_odd(folder, "records", counts, stacklevel=4)

    def split(some: list[tuple[Array, Array]]) -> Split:
        images = np.empty((sum(len(labels) for _, labels in some), PIXELS), np.uint8)
        np.concatenate([pixels for pixels, _ in some], out=images)
        labels = np.concatenate([labels for _, labels in some]).astype(np.int64)
        return torch.from_numpy(images).view(-1, 3, 32, 32), torch.from_numpy(labels)

    return split(parts[:-1]), split(parts[-1:])


def _binary(layout: Layout, path: Path) -> tuple[Array, Array]:
    """Return pixels and labels as views of the file's bytes."""
    head = 2 if layout.classes == 100 else 1
    record, size = head + PIXELS, path.stat().st_size
    if size == 0 or size % record:
        wanted = layout.official(path.name) * record
        raise _broken(layout, path, f"it has {size:,} bytes, no multiple of a record's {record}; expected {wanted:,}")
    rows = np.fromfile(path, np.uint8).reshape(-1, record)
    if head == 2:
        _check_labels(layout, path, rows[:, 0], COARSE, "coarse label")
    _check_labels(layout, path, rows[:, head - 1], layout.classes, "label")
    return rows[:, head:], rows[:, head - 1]


def _pickled(layout: Layout, path: Path) -> tuple[Array, Array]:
    """Return pixels and labels from a pickled dictionary, without running code from the pickle."""
    try:
        with open(path, "rb") as file:
            found = _Plain(file, encoding="latin1").load()
    except OSError:  # a disk error
        raise
    except Exception as error:  # a broken pickle can raise anything
        size, wanted = path.stat().st_size, layout.official(path.name)
        least = f"{size:,} bytes, where {wanted:,} records take more than {wanted * PIXELS:,}"
        why = " ".join(str(error).split())  # the message may quote the file, with line breaks
        raise _broken(layout, path, f"it cannot be read as a pickle ({why}); it has {least}") from error
    if not isinstance(found, dict):
        raise _broken(layout, path, f"it holds a {type(found).__name__}, not a dictionary")
    found = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in found.items()}
    key = "fine_labels" if layout.classes == 100 else "labels"
    pixels, labels = getattr(found.get("data"), "array", None), found.get(key)
    if not (
        isinstance(pixels, np.ndarray)
        and pixels.shape[1:] == (PIXELS,)
        and isinstance(labels, list)
        and all(type(label) is int and label.bit_length() < 64 for label in labels)
        and len(labels) == len(pixels) > 0
    ):
        raise _broken(layout, path, f"its 'data' must be rows of {PIXELS} bytes and its {key!r} as many whole numbers")
    numbers = np.array(labels)
    _check_labels(layout, path, numbers, layout.classes, "label")
    return pixels, numbers


def _check_labels(layout: Layout, path: Path, labels: Array, classes: int, word: str) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = wrong[0]
        raise _broken(layout, path, f"record {first} has the {word} {labels[first]}, not one of 0 to {classes - 1}")


def _broken(layout: Layout, path: Path, why: str) -> DataMissing:
    command = f"sngm data get cifar{layout.classes} --form {layout.form} --data-dir"
    root = shlex.quote(str(path.parent.parent))
    return DataMissing(f"{path} is broken: {why}; delete {path.parent} and run '{command} {root}'")


def _latin1(text: str, encoding: str) -> bytes:
    """Replacement for codecs.encode, which pickles of bytes in old protocols call."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it wants the encoding {encoding!r}")
    return text.encode("latin1")


class _Pixels:
    """Safe stand-in for NumPy's types and functions, which would trust any flag and address in a pickle."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if self.arguments[:1] == ("u1",):  # the state of a dtype, which is not needed for bytes
            return
        match state:  # version, shape, dtype, whether in column-major order, elements
            case (_, shape, _Pixels(arguments=("u1", *_)), False, str() | bytes() as raw):
                raw = raw.encode("latin1") if isinstance(raw, str) else raw
                self.array = np.frombuffer(raw, np.uint8).reshape(shape)
            case _:
                raise pickle.UnpicklingError("its array is not one of bytes, row by row")


class _Plain(pickle.Unpickler):
    """Unpickler of dictionaries, lists, numbers, strings and arrays of bytes; any other type is an error."""

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
