"""Find datasets by name, and compare their files with the published sizes and checksums."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from ..errors import DataMissing, DataWarning, Failed, UsageError
from . import tiny_imagenet
from .cifar import Layout, find_cifar, layouts, read
from .conversion import verify
from .criteo import find_criteo, load_criteo
from .data_dirs import data_roots
from .fetch import Show, digest
from .imagenet import CLASSES, OFFICIAL, ImageFolder, find_imagenet, in_threads
from .tiny_imagenet import find_tiny_imagenet, load_tiny_imagenet
from .wikitext import FOLDER, find_wikitext2, load_wikitext2

FINDERS: dict[str, Callable[[Path | None], Path]] = {
    "cifar10": lambda root: find_cifar(root, 10)[1],
    "cifar100": lambda root: find_cifar(root, 100)[1],
    "imagenet": find_imagenet,
    "tiny-imagenet": find_tiny_imagenet,
    "wikitext2": lambda root: find_wikitext2(root)[0].parent,
    "criteo": lambda root: find_criteo(root)[0].parent,
}
NAMES = tuple(FINDERS)
# folders whose existence means that the dataset should be in them
OWN_FOLDERS = {"imagenet": "imagenet", "tiny-imagenet": tiny_imagenet.FOLDER, "wikitext2": FOLDER}
CRITEO_ROWS = 80_000  # rows of the default sample

# First bytes of an image file, and bytes near the end of the file. One of the official .JPEG files is a PNG.
SIGNATURES = {b"\xff\xd8": b"\xff\xd9", b"\x89PNG": b"IEND"}
TAIL = 64  # bytes searched at the end of a file: some programs append a few bytes after the end of the image


@dataclass(slots=True)
class Finding:
    """Result of checking a dataset in one folder: errors in `wrong`; a summary in `seen` if there are no errors.

    `doubtful` lists image files that may be truncated, because their last bytes do not contain the end marker.
    """

    dataset: str
    folder: str
    seen: str = ""
    wrong: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)


def find(dataset: str, root: Path | None) -> Path:
    """Return the folder of the dataset with this name, or raise :class:`DataMissing`. No file is read."""
    if dataset not in FINDERS:
        raise UsageError(f"unknown dataset {dataset!r}; allowed are {', '.join(NAMES)}")
    return FINDERS[dataset](root)


def check(dataset: str, root: Path | None, show: Show = lambda done, total: None) -> list[Finding]:
    """Check a dataset in each published form that is present: number of records or files, labels, known checksums.

    Of ImageNet's images, only the first and last bytes are read.

    Args:
        show: for datasets of many files, called with the number of files read so far and the total number.
    """
    if dataset in ("cifar10", "cifar100"):
        classes = int(dataset.removeprefix("cifar"))
        forms = [
            (layout, r if r.name == layout.folder else r / layout.folder)
            for r in data_roots(root)
            for layout in layouts(classes)
        ]
        present = [(layout, folder) for layout, folder in forms if folder.is_dir()] or [find_cifar(root, classes)]
        return [_check(dataset, folder, partial(_cifar, layout)) for layout, folder in present]
    try:
        folder = find(dataset, root)
    except DataMissing as error:
        own = OWN_FOLDERS.get(dataset)
        begun = [r / own for r in data_roots(root) if own and (r / own).is_dir()]
        if not begun:
            raise
        return [Finding(dataset, str(begun[0]), wrong=[str(error)])]  # an incomplete dataset
    inspect: dict[str, Callable[[Finding, Path], str]] = {
        "imagenet": partial(_imagenet, show),
        "tiny-imagenet": _tiny_imagenet,
        "criteo": _criteo,
        "wikitext2": _wikitext2,
    }
    return [_check(dataset, folder, inspect[dataset])]


def _check(dataset: str, folder: Path, inspect: Callable[[Finding, Path], str]) -> Finding:
    """Return a finding that `inspect` has filled in, with the warnings of the loader and an error of reading a file."""
    finding, seen = Finding(dataset, str(folder)), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", DataWarning)
        try:
            seen = inspect(finding, folder)
        except (OSError, UsageError, Failed) as error:  # such as Pillow not installed, or a full disk
            if isinstance(error, OSError) and error.filename:
                finding.wrong.append(f"{error.filename}: {error.strerror}")
            else:
                finding.wrong.append(str(error))
    finding.wrong = [*(str(warning.message) for warning in caught), *finding.wrong]
    finding.seen = "" if finding.wrong else seen
    return finding


def _check_balance(finding: Finding, split: str, labels: Tensor, classes: Sequence[int | str]) -> None:
    """Add an error to a finding unless all classes are equally frequent."""
    often = labels.bincount(minlength=len(classes)).tolist()
    least, most = min(often), max(often)
    if least != most:
        rare, frequent = classes[often.index(least)], classes[often.index(most)]
        finding.wrong.append(f"{split} class {rare} occurs {least} times and class {frequent} {most} times")


def _cifar(layout: Layout, finding: Finding, folder: Path) -> str:
    splits = read(layout, folder)
    algorithm = "sha256" if layout.form == "binary" else "md5"
    for name, checksum in zip(layout.files, layout.checksums.split(), strict=True):
        if (found := digest(folder / name, algorithm)) != checksum:
            finding.wrong.append(f"{folder / name} has the {algorithm.upper()} {found}, not {checksum}")
    for word, (images, labels) in zip(("training", "test"), splits, strict=True):
        _check_balance(finding, f"{folder}: {word}", labels, range(layout.classes))
        if images.min() != 0 or images.max() != 255:
            finding.wrong.append(f"{folder}: {word} pixels go from {images.min()} to {images.max()}, not from 0 to 255")
    total = sum(len(labels) for _, labels in splits)
    return f"{total:,} images, each class equally often, {algorithm.upper()} checksums as published"


def _criteo(finding: Finding, folder: Path) -> str:
    """Check the arrays converted from the default sample; there is no published checksum of the sample itself."""
    found = load_criteo(folder)
    finding.wrong = verify(found.folder)
    rows = sum(found.facts["rows"].values())
    odd = "" if rows == CRITEO_ROWS else f" (the sample has {CRITEO_ROWS:,})"
    return f"{rows:,} rows, 0 malformed{odd}, checksums of the converted arrays right"


def _tiny_imagenet(finding: Finding, folder: Path) -> str:
    """Check the numbers of images, and checksums of the decoded images, which are decoded first if necessary."""
    found = load_tiny_imagenet(folder)
    finding.wrong = verify(found.folder)
    for split, samples in (("train", found.train), ("val", found.val)):
        _check_balance(finding, f"{folder / split}:", samples.tensors[1], found.classes)
    return (
        f"{len(found.train) + len(found.val):,} images, each class equally often, checksums of the decoded images right"
    )


def _wikitext2(finding: Finding, folder: Path) -> str:
    """Read the words; the loader compares their numbers with the published ones."""
    found = load_wikitext2(folder)
    words = len(found.train) + len(found.valid) + len(found.test)
    return f"{words:,} words, a vocabulary of {len(found.words):,}, as published"


def _imagenet(show: Show, finding: Finding, folder: Path) -> str:
    """Check the first and last bytes of every file; decoding them all would take hours."""
    splits = [ImageFolder(folder, split) for split in OFFICIAL]
    for images, wanted in zip(splits, OFFICIAL.values(), strict=True):
        if len(images.classes) != CLASSES:
            finding.wrong.append(f"{images.folder} holds {len(images.classes):,} classes, not {CLASSES:,}")
        if len(images) != wanted:
            finding.wrong.append(f"{images.folder} holds {len(images):,} images, not {wanted:,}")
    done, total = 0, sum(map(len, splits))
    for images in splits:
        for count, wrong, doubtful in in_threads(partial(_check_files, images), range(len(images))):
            finding.wrong += wrong
            finding.doubtful += doubtful
            done += count
            show(done, total)
    return f"{total:,} images of {CLASSES:,} classes, all with the first bytes of an image file"


def _check_files(images: ImageFolder, indices: range) -> tuple[int, list[str], list[str]]:
    """Return the number of some files, their errors, and the paths of those that may be truncated."""
    wrong: list[str] = []
    doubtful: list[str] = []
    for path in map(images.file, indices):
        try:
            with open(path, "rb", buffering=0) as file:
                first = file.read(8)
                file.seek(max(0, file.seek(0, 2) - TAIL))
                last = file.read(TAIL)
        except OSError as error:
            wrong.append(f"{path}: {error.strerror}")
            continue
        end = next((end for start, end in SIGNATURES.items() if first.startswith(start)), None)
        if end is None:
            wrong.append(f"{path} is no JPEG and no PNG file")
        elif end not in last:
            doubtful.append(path)
    return len(indices), wrong, doubtful
