"""Datasets by name: whether one is there, and whether what is there is what was published."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DataMissing, UsageError
from .cifar import Layout, find_cifar, layouts, read
from .criteo import find_criteo, load_criteo, verify
from .data_dirs import data_roots
from .fetch import Show, digest
from .imagenet import CLASSES, OFFICIAL, ImageFolder, find_imagenet
from .wikitext import FOLDER, TOKENS, WORDS, find_wikitext2, load_wikitext2

NAMES = ("cifar10", "cifar100", "imagenet", "wikitext2", "criteo")
OWN_FOLDERS = {"imagenet": "imagenet", "wikitext2": FOLDER}  # where there is one, it is meant to hold the dataset
CRITEO_ROWS = 80_000  # of the sample, as its name has it

SUMS = {  # of unpacked files
    "cifar-10-batches-bin": (
        "sha256",
        {
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
    ),
    "cifar-10-batches-py": (
        "md5",
        {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
    ),
    "cifar-100-binary": (
        "sha256",
        {
            "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        },
    ),
    "cifar-100-python": (
        "md5",
        {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    ),
}

# How pictures begin, and what stands near their end. One of the official files is a PNG by another name.
PICTURES = {b"\xff\xd8": b"\xff\xd9", b"\x89PNG": b"IEND"}
TAIL = 64  # bytes: some programs leave a few after the end
THREADS = 16  # a disk, above all one across a network, answers many at a time
SLICE = 500  # files a thread looks at before progress shows


@dataclass(slots=True)
class Finding:
    """What was found of one dataset in one folder: all that is wrong, or else what was seen to be right.

    `doubtful` are files that may be cut short: their last bytes are not those of a picture's end, which is no proof.
    """

    dataset: str
    folder: str
    seen: str = ""
    wrong: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)


def find(dataset: str, root: Path | None) -> Path:
    """The folder of a dataset, by its name; `DataMissing` if it is not there. Nothing is read."""
    if dataset not in NAMES:
        raise UsageError(f"no dataset is called {dataset!r}; there are {', '.join(NAMES)}")
    if dataset == "criteo":
        return find_criteo(root)[0].parent
    if dataset == "wikitext2":
        return find_wikitext2(root)[0].parent
    return find_imagenet(root) if dataset == "imagenet" else find_cifar(root, int(dataset[5:]))[1]


def check(dataset: str, root: Path | None, show: Show = lambda done, total: None) -> list[Finding]:
    """Read all of a dataset, in each form that is there, and hold it against what was published.

    `show` is told how many files have been looked at, where they are many.
    """
    if dataset in ("cifar10", "cifar100"):
        forms = layouts(int(dataset[5:]))
        every = [(form, r if r.name == form.folder else r / form.folder) for r in data_roots(root) for form in forms]
        if there := [(form, folder) for form, folder in every if folder.is_dir()]:
            return [_cifar(form, folder) for form, folder in there]
    try:
        folder = find(dataset, root)
    except DataMissing as error:
        own = OWN_FOLDERS.get(dataset)
        begun = [place / own for place in data_roots(root) if own and (place / own).is_dir()]
        if not begun:
            raise
        return [Finding(dataset, str(begun[0]), wrong=[_words(error)])]  # some of it is there
    if dataset == "imagenet":
        return [_imagenet(folder, show)]
    return [_criteo(folder, root) if dataset == "criteo" else _wikitext2(folder, root)]


def _cifar(layout: Layout, folder: Path) -> Finding:
    finding = Finding(f"cifar{layout.classes}", str(folder))
    absent = [name for name in layout.files if not (folder / name).is_file()]
    if absent:
        finding.wrong.append(f"{folder} lacks {', '.join(absent)}")
        return finding
    try:
        splits, counts = read(layout, folder)
    except OSError as error:
        finding.wrong.append(_words(error))
        return finding
    algorithm, sums = SUMS[layout.folder]
    for name, n in counts.items():
        if n != layout.official(name):
            finding.wrong.append(f"{folder / name} holds {n:,} records, not {layout.official(name):,}")
        elif (found := digest(folder / name, algorithm)) != sums[name]:
            finding.wrong.append(f"{folder / name} has the {algorithm.upper()} {found}, not {sums[name]}")
    for word, (images, labels) in zip(("training", "test"), splits, strict=True):
        often = labels.bincount(minlength=layout.classes)
        if often.min() != often.max():
            least, most = int(often.argmin()), int(often.argmax())
            finding.wrong.append(
                f"{folder}: {word} class {least} is there {often[least]} times and class {most} {often[most]} times"
            )
        if images.min() != 0 or images.max() != 255:
            finding.wrong.append(f"{folder}: {word} pixels go from {images.min()} to {images.max()}, not from 0 to 255")
    total = sum(counts.values())
    if not finding.wrong:
        finding.seen = f"{total:,} images, each class equally often, {algorithm.upper()} sums as on record"
    return finding


def _criteo(folder: Path, root: Path | None) -> Finding:
    """The sample that tasks take by default, converted; there is no published sum to hold it against."""
    finding = Finding("criteo", str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it warns of is said below
            found = load_criteo(root)
        finding.wrong = verify(found.folder)
    except OSError as error:
        finding.wrong.append(_words(error))
        return finding
    rows, bad = sum(found.facts["rows"].values()), found.facts["malformed"]
    if bad["rows"]:  # training leaves them out; a file that was cut short has one
        first = bad["first"][0]
        where = f"line {first['line']:,} of {folder / first['file']}"
        finding.wrong.append(f"{bad['rows']:,} of {rows + bad['rows']:,} rows malformed, first {where}: {first['why']}")
    if not finding.wrong:
        odd = "" if rows == CRITEO_ROWS else f" (the sample has {CRITEO_ROWS:,})"
        finding.seen = f"{rows:,} rows, 0 malformed{odd}, converted arrays as their sums say"
    return finding


def _wikitext2(folder: Path, root: Path | None) -> Finding:
    """By the number of words in each file, as published."""
    finding = Finding("wikitext2", str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it warns of is said below
            found = load_wikitext2(root)
    except OSError as error:
        finding.wrong.append(_words(error))
        return finding
    for split, wanted in TOKENS.items():
        if (count := len(getattr(found, split))) != wanted:
            finding.wrong.append(f"{folder}: {split} holds {count:,} words, not {wanted:,}")
    if len(found.words) != WORDS:
        finding.wrong.append(f"{folder}: the vocabulary has {len(found.words):,} words, not {WORDS:,}")
    if not finding.wrong:
        finding.seen = f"{sum(TOKENS.values()):,} words, a vocabulary of {WORDS:,}, as published"
    return finding


def _imagenet(folder: Path, show: Show) -> Finding:
    """Every file's first and last bytes; decoding them all would take hours."""
    finding, splits = Finding("imagenet", str(folder)), []
    for split, wanted in OFFICIAL.items():
        try:
            images = ImageFolder(folder, split)
        except OSError as error:
            finding.wrong.append(_words(error))
            continue
        splits.append(images)
        if len(images.classes) != CLASSES:
            finding.wrong.append(f"{folder / split} holds {len(images.classes):,} classes, not {CLASSES:,}")
        if len(images) != wanted:
            finding.wrong.append(f"{folder / split} holds {len(images):,} images, not {wanted:,}")
    parts = [(images, range(len(images))[at : at + SLICE]) for images in splits for at in range(0, len(images), SLICE)]
    done, total = 0, sum(map(len, splits))
    pool = ThreadPoolExecutor(THREADS)
    try:
        for (_, part), (wrong, doubtful) in zip(parts, pool.map(_look, parts), strict=True):
            finding.wrong += wrong
            finding.doubtful += doubtful
            done += len(part)
            show(done, total)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for a million files
    finding.seen = f"{total:,} images of {CLASSES:,} classes, all with the first bytes of a picture"
    return finding


def _look(part: tuple[ImageFolder, range]) -> tuple[list[str], list[str]]:
    """What is wrong with some files, and which of them may be cut short."""
    images, indices = part
    wrong: list[str] = []
    doubtful: list[str] = []
    for index in indices:
        path = images.file(index)
        try:
            with open(path, "rb", buffering=0) as file:
                begins = file.read(8)
                file.seek(max(0, file.seek(0, 2) - TAIL))
                ends = file.read(TAIL)
        except OSError as error:
            wrong.append(f"{path}: {error.strerror}")
            continue
        end = next((end for begin, end in PICTURES.items() if begins.startswith(begin)), None)
        if end is None:
            wrong.append(f"{path} is no JPEG and no PNG file")
        elif end not in ends:
            doubtful.append(path)
    return wrong, doubtful


def _words(error: OSError) -> str:
    """Our own errors say it all; the system's name a file, if any."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
