"""ImageNet as folders of images, one folder per class under train and val. Other datasets of that form work too."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import math
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import DataMissing, UsageError
from ..files import write_atomically
from .data_dirs import find_folder
from .hashing import BITS, random_bits

if TYPE_CHECKING:
    from PIL.Image import Image

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")

SPLITS = ("train", "val")
OFFICIAL = {"train": 1_281_167, "val": 50_000}  # images
CLASSES = 1_000
SUFFIXES = (b".jpeg", b".jpg", b".png")
SCALE = (0.08, 1.0)  # area of a training crop, as a fraction of the image
RATIO = (3 / 4, 4 / 3)  # width / height of a training crop
TRIES = 10  # tries to find a crop within the image
DRAWS = 4  # random numbers per try
WANTED = "imagenet/train/<class>/*.JPEG and imagenet/val/<class>/*.JPEG"  # in a data folder
THREADS = 16  # the GIL leaves little to gain from more cores, but slow disks are read in parallel
SLICE = 500  # files per call of a thread
SETTLED = 2.0  # seconds: two changes of a folder this far apart have different modification times on any file system


def find_imagenet(root: Path | None) -> Path:
    """Return the folder that holds train and val: imagenet in a data folder, or the data folder itself.

    Tiny-ImageNet's folder, which also holds train and val, is not ImageNet.
    """
    return find_folder("ImageNet", root, [("imagenet", SPLITS)], [WANTED], present=_is_split)[0]


def _is_split(path: Path) -> bool:
    tiny = all((path.parent / "val" / name).exists() for name in ("images", "val_annotations.txt"))
    return path.is_dir() and not tiny


class ImageFolder:
    """The images of one split, decoded when they are indexed. Classes are numbered by the sorted names of folders.

    Indexing returns images for evaluation: the shorter side is scaled to `resize`, then the central `size` x `size`
    pixels are cropped. :meth:`training` returns augmented images. Both scale bilinearly with antialiasing, by the rules
    of torchvision's ``Resize``, ``CenterCrop`` and ``RandomResizedCrop``. The object holds no open file and can be
    pickled.

    Args:
        root: the data folder, see :func:`find_imagenet`.
        split: "train" or "val".
        size: width and height of the result in pixels.
        resize: pixels of the shorter side before the central crop.
    """

    def __init__(self, root: Path | None, split: str, *, size: int = 224, resize: int = 256) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        if not 1 <= size <= resize:
            raise ValueError(f"size must be at least 1 and at most resize, got size={size}, resize={resize}")
        folder = find_imagenet(root)
        self.folder = folder / split
        self.size, self.resize = size, resize
        self.classes = _classes(self.folder)
        if odd := sorted(set(_classes(folder / "train")) ^ set(_classes(folder / "val"))):
            others = f", as are {len(odd) - 1} others" if odd[1:] else ""
            raise DataMissing(f"train and val in {folder} must hold the same classes; {odd[0]} is in only one{others}")
        # One byte string and the offset of each name, because a million Python strings would be copied to each worker.
        counts, self._names = _listing(folder, split, self.classes)
        ends = np.flatnonzero(np.frombuffer(self._names, np.uint8) == 0)
        self._begins = np.concatenate([[0], ends + 1])
        self.labels = torch.repeat_interleave(torch.arange(len(self.classes)), torch.from_numpy(counts))

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        """Return a short hash of the names of files and classes, `size` and `resize`, without reading the files."""
        return hashlib.sha256(repr((self.classes, self.size, self.resize)).encode() + self._names).hexdigest()[:12]

    def file(self, index: int) -> str:
        """Return the path of a sample's file. It is a str, because creating a Path would take most of the time."""
        name = self._names[self._begins[index] : self._begins[index + 1] - 1]
        return os.path.join(self.folder, self.classes[int(self.labels[index])], os.fsdecode(name))

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return images for evaluation, uint8 of shape (n, 3, size, size), and labels."""
        return self._gather(indices, lambda index, image: self._centre(image))

    def training(self, indices: Tensor, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Return augmented images and labels; crops and flips depend only on seed, epoch and sample index."""
        return self._gather(indices, lambda index, image: self._crop(image, seed, epoch, index))

    def _gather(self, indices: Tensor, view: Any) -> tuple[Tensor, Tensor]:
        chosen = indices.cpu().long()
        if len(chosen) and not -len(self) <= int(chosen.min()) <= int(chosen.max()) < len(self):
            raise IndexError(f"there are {len(self)} images, got indices {int(chosen.min())} to {int(chosen.max())}")
        chosen = chosen % len(self)
        images = np.empty((len(chosen), 3, self.size, self.size), np.uint8)
        for row, index in enumerate(chosen.tolist()):
            images[row] = decode(self.file(index), functools.partial(view, index)).transpose(2, 0, 1)
        return torch.from_numpy(images), self.labels[chosen]

    def _centre(self, image: Image) -> Image:
        short = min(image.size)
        width, height = (int(self.resize * side / short) for side in image.size)
        image = rgb(image).resize((width, height), need_pillow().Resampling.BILINEAR)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return image.crop((left, top, left + self.size, top + self.size))

    def _crop(self, image: Image, seed: int, epoch: int, index: int) -> Image:
        pillow = need_pillow()
        left, top, width, height = crop_box(*image.size, seed, epoch, index)
        box: Any = (left, top, left + width, top + height)
        # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size in a fraction of the time. This is done if the crop
        # still has at least one pixel for each pixel of the result, so that no detail is lost. Such decoding averages
        # blocks of pixels, unlike the bilinear filter, so evaluation does not use it: its results are compared with
        # published results.
        factor = next((f for f in (8, 4, 2) if min(width, height) >= f * self.size), 1)
        if factor > 1 and image.draft(None, (image.size[0] // factor, image.size[1] // factor)):
            image, box = rgb(image), tuple(edge / factor for edge in box)
        else:  # crop first, as in torchvision: the filter must not see pixels outside the crop
            image, box = rgb(image).crop(box), None
        image = image.resize((self.size, self.size), pillow.Resampling.BILINEAR, box)
        flip = random_bits(seed, epoch, index, DRAWS * TRIES) >> (BITS - 1)
        return image.transpose(pillow.Transpose.FLIP_LEFT_RIGHT) if flip else image


def crop_box(width: int, height: int, seed: int, epoch: int, index: int) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a training crop, by the rule of torchvision's ``RandomResizedCrop``.

    >>> left, top, width, height = crop_box(500, 375, seed=0, epoch=0, index=0)
    >>> 0 <= left <= 500 - width and 0 <= top <= 375 - height
    True
    """
    for attempt in range(TRIES):
        area, shape, across, down = (
            (random_bits(seed, epoch, index, DRAWS * attempt + draw) >> (BITS - 53)) * 2.0**-53 for draw in range(DRAWS)
        )
        pixels = width * height * (SCALE[0] + (SCALE[1] - SCALE[0]) * area)
        ratio = math.exp(math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * shape)
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(across * (width - w + 1)), int(down * (height - h + 1)), w, h
    w, h = width, height
    if width / height < RATIO[0]:
        h = round(width / RATIO[0])
    elif width / height > RATIO[1]:
        w = round(height * RATIO[1])
    return (width - w) // 2, (height - h) // 2, w, h


def decode(path: str, view: Callable[[Image], Image]) -> Array:
    """Decode an image file, apply `view`, and return the pixels, uint8 of shape (height, width, channels).

    Raises:
        DataMissing: the file does not exist, or cannot be decoded; the message names it.
        OSError: the disk or the system failed.
    """
    try:
        with need_pillow().open(path) as image:
            return np.asarray(view(image))
    except FileNotFoundError as error:
        raise DataMissing(f"{path} no longer exists; fetch it again") from error
    except (MemoryError, UsageError):
        raise
    except Exception as error:  # Pillow raises many types, also those of struct and zlib
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk, not of the file
            error.filename = error.filename or path
            raise
        raise DataMissing(f"{path} cannot be decoded: {error}; fetch it again or delete it") from error


def in_threads(function: Callable[[Any], T], files: Sequence[Any]) -> Iterator[T]:
    """Yield the results of a function for consecutive slices of `files`, called in threads, in the order of the files.

    At most `THREADS` slices are processed ahead. So memory holds only their results, and Ctrl-C waits only for these.
    """
    slices = [files[at : at + SLICE] for at in range(0, len(files), SLICE)]
    with ThreadPoolExecutor(THREADS) as pool:
        for at in range(0, len(slices), THREADS):
            yield from pool.map(function, slices[at : at + THREADS])


def rgb(image: Image) -> Image:
    """Return an image of any mode as RGB."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns if both conversions are done at once
    return image.convert("RGB")


def need_pillow() -> Any:
    """Return the module PIL.Image, or raise an error that says how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError("Pillow is not installed; pip install 'sngm[images]'") from error
    return Image


# ---------------------------------------------------------------- listing of files


def _classes(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataMissing(f"{folder} holds no folders; it must hold one for each class, with the images of that class")
    return names


def _listing(folder: Path, split: str, classes: list[str]) -> tuple[Array, bytes]:
    """Return the number of images of each class, and the names of all images, each followed by a zero byte.

    Listing a million names takes minutes on some disks, so the listing is cached in .sngm, and renewed when the folder
    of a class has changed.
    """
    times = [os.stat(folder / split / name).st_mtime_ns for name in classes]
    state = np.frombuffer(repr((classes, times)).encode("utf-8", "surrogateescape"), np.uint8)
    cache = folder / ".sngm" / f"{split}.npz"
    broken = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
    with contextlib.suppress(*broken), open(cache, "rb") as stream, np.load(stream, allow_pickle=False) as file:
        counts, names = file["counts"], file["names"].tobytes()
        if np.array_equal(file["state"], state) and names.count(b"\0") == counts.sum() and b"/" not in names:
            return counts, names
    found = [_images(folder / split / name) for name in classes]
    counts = np.array([len(one) for one in found])
    names = b"".join(name + b"\0" for one in found for name in one)
    if time.time() - max(times) / 1e9 > SETTLED:  # else a file added now might not change the folder's time
        content = io.BytesIO()
        np.savez(content, state=state, counts=counts, names=np.frombuffer(names, np.uint8))
        with contextlib.suppress(OSError):  # the data may be shared and read-only
            cache.parent.mkdir(exist_ok=True)
            write_atomically(cache, content.getvalue())
    return counts, names


def _images(folder: Path) -> list[bytes]:
    names = sorted(
        entry.name
        for entry in os.scandir(os.fsencode(folder))
        if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(b".")
    )
    if not names:
        raise DataMissing(f"{folder} holds no images (.JPEG, .jpg or .png); delete it, or fetch them")
    return names
