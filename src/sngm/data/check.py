"""Find datasets by name, and compare their files with the published sizes and checksums."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from ..errors import DataMissing, Failed, UsageError
from . import tiny_imagenet
from .cifar import Layout, find_cifar, layouts, read
from .conversion import verify
from .criteo import find_criteo, load_criteo
from .data_dirs import data_roots
from .fetch import Show, digest
from .imagenet import CLASSES, OFFICIAL, ImageFolder, find_imagenet, in_threads
from .tiny_imagenet import find_tiny_imagenet, load_tiny_imagenet
from .wikitext import FOLDER, TOKENS, WORDS, find_wikitext2, load_wikitext2

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
    """Read a whole dataset, in each published form that is present, and compare it with published sizes and checksums.

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
    inspect = {
        "imagenet": partial(_imagenet, show),
        "tiny-imagenet": _tiny_imagenet,
        "criteo": _criteo,
        "wikitext2": _wikitext2,
    }
    return [_check(dataset, folder, inspect[dataset])]


def _check(dataset: str, folder: Path, inspect: Callable[[Finding, Path], str]) -> Finding:
    """Return a finding that `inspect` has filled in; if a file cannot be read, the finding has that error."""
    finding = Finding(dataset, str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the finding has the same messages as the warnings
            seen = inspect(finding, folder)
        finding.seen = "" if finding.wrong else seen
    except (OSError, UsageError, Failed) as error:  # of a decoder that is not installed, or a full disk
        named = isinstance(error, OSError) and error.filename
        finding.wrong.append(f"{error.filename}: {error.strerror}" if named else str(error))
    return finding


def _check_balance(finding: Finding, split: str, labels: Tensor, classes: Sequence[int | str]) -> None:
    """Add an error to a finding unless all classes are equally frequent."""
    often = labels.bincount(minlength=len(classes)).tolist()
    least, most = min(often), max(often)
    if least != most:
        rare, frequent = classes[often.index(least)], classes[often.index(most)]
        finding.wrong.append(f"{split} class {rare} occurs {least} times and class {frequent} {most} times")


def _cifar(layout: Layout, finding: Finding, folder: Path) -> str:
    splits, counts = read(layout, folder)
    algorithm = "sha256" if layout.form == "binary" else "md5"
    for (name, n), checksum in zip(counts.items(), layout.checksums.split(), strict=True):
        if n != layout.official(name):
            finding.wrong.append(f"{folder / name} holds {n:,} records, not {layout.official(name):,}")
        elif (found := digest(folder / name, algorithm)) != checksum:
            finding.wrong.append(f"{folder / name} has the {algorithm.upper()} {found}, not {checksum}")
    for word, (images, labels) in zip(("training", "test"), splits, strict=True):
        _check_balance(finding, f"{folder}: {word}", labels, range(layout.classes))
        if images.min() != 0 or images.max() != 255:
            finding.wrong.append(f"{folder}: {word} pixels go from {images.min()} to {images.max()}, not from 0 to 255")
    return f"{sum(counts.values()):,} images, each class equally often, {algorithm.upper()} checksums as published"


def _criteo(finding: Finding, folder: Path) -> str:
    """Check the arrays converted from the default sample; there is no published checksum of the sample itself."""
    found = load_criteo(folder)
    finding.wrong = verify(found.folder)
    rows, bad = sum(found.facts["rows"].values()), found.facts["malformed"]
    if bad["rows"]:  # malformed rows, which training leaves out; a truncated file has one
        first = bad["first"][0]
        where = f"line {first['line']:,} of {folder / first['file']}"
        finding.wrong.append(f"{bad['rows']:,} of {rows + bad['rows']:,} rows malformed, first {where}: {first['why']}")
    odd = "" if rows == CRITEO_ROWS else f" (the sample has {CRITEO_ROWS:,})"
    return f"{rows:,} rows, 0 malformed{odd}, checksums of the converted arrays right"


def _tiny_imagenet(finding: Finding, folder: Path) -> str:
    """Check the numbers of images, and checksums of the decoded images, which are decoded first if necessary."""
    found = load_tiny_imagenet(folder)
    finding.wrong = verify(found.folder)
    if len(found.classes) != tiny_imagenet.CLASSES:
        finding.wrong.append(f"{folder} holds {len(found.classes)} classes, not {tiny_imagenet.CLASSES}")
    for (split, wanted), samples in zip(tiny_imagenet.OFFICIAL.items(), (found.train, found.val), strict=True):
        if len(samples) != wanted:
            finding.wrong.append(f"{folder / split} holds {len(samples):,} images, not {wanted:,}")
        _check_balance(finding, f"{folder / split}:", samples.tensors[1], found.classes)
    total = sum(tiny_imagenet.OFFICIAL.values())
    return f"{total:,} images, each class equally often, checksums of the decoded images right"


def _wikitext2(finding: Finding, folder: Path) -> str:
    """Compare the number of words in each file with the published number."""
    found = load_wikitext2(folder)
    for split, wanted in TOKENS.items():
        if (count := len(getattr(found, split))) != wanted:
            finding.wrong.append(f"{folder}: {split} holds {count:,} words, not {wanted:,}")
    if len(found.words) != WORDS:
        finding.wrong.append(f"{folder}: the vocabulary has {len(found.words):,} words, not {WORDS:,}")
    return f"{sum(TOKENS.values()):,} words, a vocabulary of {WORDS:,}, as published"


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
