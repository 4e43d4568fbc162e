"""Tiny-ImageNet: JPEGs of 64 x 64 pixels in the folders of the official archive, decoded once to one array of bytes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import DataMissing
from ..files import write_json
from .conversion import FACTS, Show, flushed, load_or_convert, new_array, throttled
from .data_dirs import find_folder, warn_if_odd
from .imagenet import Array, decode, in_threads, need_pillow, rgb
from .tensors import Tensors

FOLDER = "tiny-imagenet-200"
FILES = ("wnids.txt", "train", "val/images", "val/val_annotations.txt")
WANTED = f"{FOLDER} (unpacked from http://cs231n.stanford.edu/tiny-imagenet-200.zip)"
CLASSES = 200
SIDE = 64  # pixels
OFFICIAL = {"train": 100_000, "val": 10_000}  # images
VERSION = 1  # of the decoded arrays; those of another version are made again


@dataclass(frozen=True, slots=True)
class TinyImageNet:
    """The decoded images, memory-mapped.

    Attributes:
        train, val: images, uint8 of shape (n, 3, 64, 64) in channels_last format, and labels, int64. The labels of the
            official test set are not published, so `val` serves as the test set.
        classes: WordNet ids, sorted; a label is an index of this list.
        folder: folder of the arrays, and of facts.json, which has their sizes and checksums.
    """

    train: Tensors
    val: Tensors
    classes: list[str]
    folder: Path


@dataclass(frozen=True, slots=True)
class Listing:
    """The image files of a dataset. `files` has the path, size in bytes and label of each, training images first."""

    folder: Path
    classes: list[str]
    files: list[tuple[str, int, int]]
    counts: dict[str, int]
    """The number of images of each split."""

    def digest(self) -> str:
        """Return the SHA256 of the list: it changes when a file is added, removed or changes its size or label."""
        return hashlib.sha256(json.dumps(self.files).encode("utf-8", "surrogateescape")).hexdigest()


def find_tiny_imagenet(root: Path | None) -> Path:
    """Return the folder tiny-imagenet-200 of a data folder, or the data folder itself if it holds train and val."""
    return find_folder("Tiny-ImageNet", root, [(FOLDER, FILES)], [WANTED], present=Path.exists)[0]


def load_tiny_imagenet(root: Path | None = None, show: Show | None = None) -> TinyImageNet:
    """Return training and validation images. The first call decodes the JPEGs, later ones memory-map the result.

    :func:`sngm.data.conversion.load_or_convert` chooses the folder of the result, 1.35 GB. The JPEGs are decoded again
    when a file is added, removed or changes its size. A dataset with other numbers of images than the official one is
    read with a warning, so that small samples work.

    Args:
        root: folder that holds tiny-imagenet-200; None: see :func:`sngm.data.data_dirs.data_roots`.
        show: called with a line of progress every few seconds; None: print the lines on stderr.
    """
    listing = list_files(find_tiny_imagenet(root).resolve())
    counts = {split: (count, OFFICIAL[split]) for split, count in listing.counts.items()}
    warn_if_odd(listing.folder, "records", counts | {"classes": (len(listing.classes), CLASSES)})
    return load_or_convert(
        listing.folder,
        "tiny-imagenet",
        [VERSION],
        functools.partial(_open, listing),
        functools.partial(_decode, listing),
        space="about 1.4 GB",
        show=show,
    )


def list_files(folder: Path) -> Listing:
    """List the images that wnids.txt and val_annotations.txt name; no image is read.

    Raises:
        DataMissing: a class folder or an image is missing, a class is unknown, or a class has no images.
    """
    classes = sorted((folder / "wnids.txt").read_text().split())
    if not classes:
        raise DataMissing(f"{folder / 'wnids.txt'} lists no classes; fetch the dataset again")
    if absent := [name for name in classes if not (folder / "train" / name / "images").is_dir()]:
        raise DataMissing(f"{folder / 'train'} lacks {_first(absent)}, listed in wnids.txt; fetch the dataset again")
    labels = {name: label for label, name in enumerate(classes)}
    files = []
    for name, label in labels.items():
        inside = f"train/{name}/images"
        sizes = _sizes(folder / inside)
        if not sizes:
            raise DataMissing(f"{folder / inside} holds no .JPEG files; fetch the dataset again")
        files += [(f"{inside}/{file}", size, label) for file, size in sorted(sizes.items())]
    train = len(files)
    sizes = _sizes(folder / "val" / "images")
    notes = folder / "val" / "val_annotations.txt"
    lines = [line for line in notes.read_text().splitlines() if line.strip()]
    named = dict(f"{line}\t".split("\t")[:2] for line in lines)  # the class of a truncated line is ""
    if odd := [file for file, name in named.items() if name not in labels]:
        raise DataMissing(f"{notes}: {odd[0][:80]} is of class {named[odd[0]]!r}, which wnids.txt does not list")
    if absent := [file for file in named if file not in sizes]:
        raise DataMissing(f"{folder / 'val' / 'images'} lacks {_first(absent)}, listed in {notes.name}; fetch it again")
    if odd := sorted(sizes.keys() - named.keys()):
        raise DataMissing(f"{notes} lacks the class of {_first(odd)}; fetch it again")
    files += [(f"val/images/{file}", sizes[file], labels[name]) for file, name in named.items()]
    if len(files) == train:
        raise DataMissing(f"{notes} lists no images; fetch it again")
    return Listing(folder, classes, files, {"train": train, "val": len(files) - train})


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of the JPEGs of a folder, by name."""
    with os.scandir(folder) as entries:
        return {e.name: e.stat().st_size for e in entries if e.name.endswith(".JPEG") and not e.name.startswith(".")}


def _first(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} others" if names[1:] else names[0]


def _open(listing: Listing, folder: Path, facts: dict[str, Any]) -> TinyImageNet | None:
    """Memory-map the decoded images; return None if they are not those of the files in `listing`."""
    if facts["files"] != listing.digest():
        return None
    # mode "c", copy on write: torch warns of read-only arrays
    images = torch.from_numpy(np.load(folder / "images.npy", mmap_mode="c")).permute(0, 3, 1, 2)
    labels = torch.from_numpy(np.load(folder / "labels.npy"))
    train = listing.counts["train"]
    parts = (Tensors(images[:train], labels[:train]), Tensors(images[train:], labels[train:]))
    return TinyImageNet(*parts, listing.classes, folder)


def _decode(listing: Listing, folder: Path, show: Show) -> None:
    """Decode all images of a listing, and write images.npy, labels.npy and facts.json into `folder`."""
    need_pillow()
    began, count, done = time.monotonic(), len(listing.files), 0
    show(f"decoding {count:,} images once, into {folder.parent}")
    progress = throttled(show)
    with contextlib.ExitStack() as stack:
        # written in order, not through a memory map: a full disk is then an error, not a crash
        images = new_array(stack, folder / "images.npy", (count, SIDE, SIDE, 3), "|u1")
        for pixels in in_threads(functools.partial(_pixels, listing.folder), listing.files):
            images.write(pixels.data)
            done += len(pixels)
            progress(f"{done:,} of {count:,} images decoded")
        labels = new_array(stack, folder / "labels.npy", (count,), "<i8")
        labels.write(np.array([label for _, _, label in listing.files], "<i8").tobytes())
        arrays = flushed((images, labels))
    now = list_files(listing.folder).digest()  # if files changed during the decoding, the images are not loaded
    write_json(folder / FACTS, {"files": now, "arrays": arrays})
    seconds = time.monotonic() - began
    show(f"decoded {count:,} images in {seconds:.0f} s, {count / seconds:,.0f} per second")


def _pixels(folder: Path, files: Sequence[tuple[str, int, int]]) -> Array:
    """Decode image files to RGB, uint8 of shape (n, 64, 64, 3)."""
    found = np.empty((len(files), SIDE, SIDE, 3), np.uint8)
    for pixels, (path, _, _) in zip(found, files, strict=True):
        pixels[:] = decode(os.path.join(folder, path), _checked)
    return found


def _checked(image: Any) -> Any:
    if image.size != (SIDE, SIDE):
        raise ValueError(f"it has {image.size[0]} x {image.size[1]} pixels, not {SIDE} x {SIDE}")
    return rgb(image)
