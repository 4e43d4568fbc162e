"""ImageNet as folders of pictures: one folder a class under train and val. Any other tree of that form will do."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import time
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataMissing, UsageError
from ..files import write_atomically
from .data_dirs import data_roots, missing
from .hashing import BITS, mix

if TYPE_CHECKING:
    from PIL.Image import Image

Array = np.ndarray[Any, np.dtype[Any]]

SPLITS = ("train", "val")
OFFICIAL = {"train": 1_281_167, "val": 50_000}  # images
CLASSES = 1_000
ENDINGS = (b".jpeg", b".jpg", b".png")
SCALE = (0.08, 1.0)  # of the picture's area, that a training crop takes
RATIO = (3 / 4, 4 / 3)  # of its width to its height
TRIES = 10  # to find a crop within the picture
DRAWS = 4  # random numbers a try
WANTED = "imagenet/train/<class>/*.JPEG and imagenet/val/<class>/*.JPEG"  # in a data folder
SETTLED = 2.0  # seconds after which a folder's time tells two states of it apart, on any file system


def find_imagenet(root: Path | None) -> Path:
    """The folder that holds train and val: imagenet in one of the data folders, or the data folder itself."""
    for place in data_roots(root):
        for folder in (place / "imagenet", place):
            if all((folder / split).is_dir() for split in SPLITS):
                return folder
        lacking = [split for split in SPLITS if not (place / "imagenet" / split).is_dir()]
        if len(lacking) == 1:
            raise DataMissing(f"{place / 'imagenet'} lacks the folder {lacking[0]}, with a folder for each class")
    raise missing("ImageNet", root, [WANTED])


class ImageFolder:
    """The pictures of one split, decoded as they are asked for. Classes are numbered by their folders' sorted names.

    Indexing gives the view for evaluation: the shorter side scaled to `resize`, then the middle `size` x `size`.
    :meth:`training` gives the augmented view. Both scale bilinearly with antialiasing, by the rules of torchvision's
    ``Resize``, ``CenterCrop`` and ``RandomResizedCrop``. It holds no open file and can be sent to other processes.

    Args:
        root: the data folder, see :func:`find_imagenet`.
        split: "train" or "val".
        size: pixels a side of what it gives.
        resize: pixels of the shorter side before the middle is cut out.
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
        other = _classes(folder / SPLITS[1 - SPLITS.index(split)])
        if odd := sorted(set(self.classes) ^ set(other)):
            raise DataMissing(
                f"train and val in {folder} must hold the same classes; {odd[0]} is in one alone"
                + (f", as are {len(odd) - 1} others" if odd[1:] else "")
            )
        # A million Python strings would be copied into each worker: one text, and where each name begins.
        counts, self._names = _listing(folder, split, self.classes)
        ends = np.flatnonzero(np.frombuffer(self._names, np.uint8) == 0)
        self._begins = np.concatenate([[0], ends + 1])
        self.labels = torch.repeat_interleave(torch.arange(len(self.classes)), torch.from_numpy(counts))

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        """Short, and another for other files or classes; what is in them is not read."""
        return hashlib.sha256(repr((self.classes, self.size, self.resize)).encode() + self._names).hexdigest()[:12]

    def path(self, index: int) -> Path:
        """The file of a sample."""
        return Path(self.file(index))

    def file(self, index: int) -> str:
        """As `path`, without making a Path, which takes longer than all the rest."""
        name = self._names[self._begins[index] : self._begins[index + 1] - 1]
        return os.path.join(self.folder, self.classes[int(self.labels[index])], os.fsdecode(name))

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images, uint8 of shape (n, 3, size, size), and labels: the view for evaluation."""
        return self._gather(indices, lambda index, image: self._middle(image))

    def training(self, indices: Tensor, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Images and labels, each cropped and mirrored at random: by seed, epoch and sample, and nothing else."""
        return self._gather(indices, lambda index, image: self._crop(image, seed, epoch, index))

    def _gather(self, indices: Tensor, view: Any) -> tuple[Tensor, Tensor]:
        chosen = indices.cpu().long()
        if len(chosen) and not -len(self) <= int(chosen.min()) <= int(chosen.max()) < len(self):
            raise IndexError(f"there are {len(self)} images, got indices {int(chosen.min())} to {int(chosen.max())}")
        chosen = chosen % len(self)
        pillow = need_pillow()
        images = np.empty((len(chosen), 3, self.size, self.size), np.uint8)
        for row, index in enumerate(chosen.tolist()):
            path = self.file(index)
            try:
                with pillow.open(path) as image:
                    images[row] = np.asarray(view(index, image)).transpose(2, 0, 1)
            except FileNotFoundError as error:
                raise DataMissing(f"{path} is no longer there; fetch it again") from error
            except MemoryError:
                raise
            except Exception as error:  # Pillow has many, of struct and zlib too
                if isinstance(error, OSError) and error.errno is not None:  # of the disk or the system: no picture's
                    error.filename = error.filename or path
                    raise
                raise DataMissing(
                    f"{path} cannot be read as a picture: {error}; fetch it again or delete it"
                ) from error
        return torch.from_numpy(images), self.labels[chosen]

    def _middle(self, image: Image) -> Image:
        width, height = image.size
        short = min(width, height)
        width, height = int(self.resize * width / short), int(self.resize * height / short)
        image = _rgb(image).resize((width, height), need_pillow().Resampling.BILINEAR)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return image.crop((left, top, left + self.size, top + self.size))

    def _crop(self, image: Image, seed: int, epoch: int, index: int) -> Image:
        pillow = need_pillow()
        left, top, width, height = crop_box(*image.size, seed, epoch, index)
        # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size in a fraction of the time. That happens where the crop
        # still has a pixel for each that is asked for, so that no detail of the result is made up. It averages squares
        # where the filter would weigh them, so the evaluation, which others' numbers are held against, goes without.
        factor = next((f for f in (8, 4, 2) if min(width, height) >= f * self.size), 1)
        edges = (left, top, left + width, top + height)
        if factor > 1 and image.draft(None, (image.size[0] // factor, image.size[1] // factor)):
            box = (edges[0] / factor, edges[1] / factor, edges[2] / factor, edges[3] / factor)
            image = _rgb(image).resize((self.size, self.size), pillow.Resampling.BILINEAR, box)
        else:  # cut out first, as torchvision does: the filter sees no pixel from outside
            image = _rgb(image).crop(edges).resize((self.size, self.size), pillow.Resampling.BILINEAR)
        flip = mix(seed, epoch, index, DRAWS * TRIES) >> (BITS - 1)
        return image.transpose(pillow.Transpose.FLIP_LEFT_RIGHT) if flip else image


def crop_box(width: int, height: int, seed: int, epoch: int, index: int) -> tuple[int, int, int, int]:
    """Left, top, width and height of a training crop, by the rule of torchvision's ``RandomResizedCrop``.

    >>> left, top, width, height = crop_box(500, 375, seed=0, epoch=0, index=0)
    >>> 0 <= left <= 500 - width and 0 <= top <= 375 - height
    True
    """
    for attempt in range(TRIES):
        area, shape, across, down = (
            (mix(seed, epoch, index, DRAWS * attempt + draw) >> (BITS - 53)) * 2.0**-53 for draw in range(DRAWS)
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


def _rgb(image: Image) -> Image:
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns of doing both at once
    return image.convert("RGB")


def need_pillow() -> Any:
    """Pillow's Image, or an error that says how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError("Pillow is not installed; pip install 'sngm[images]'") from error
    return Image


# ---------------------------------------------------------------- which files there are


def _classes(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataMissing(f"{folder} holds no folders; it wants one for each class, with that class's pictures in it")
    return names


def _listing(folder: Path, split: str, classes: list[str]) -> tuple[Array, bytes]:
    """How many pictures each class has, and all their names, each ended by a zero byte.

    Reading a million names takes minutes on some disks, so they are kept in .sngm, and read again where a class's
    folder has changed since.
    """
    times = np.array([os.stat(folder / split / name).st_mtime_ns for name in classes])
    kept = folder / ".sngm" / f"{split}.npz"
    known = b"\0".join(map(os.fsencode, classes))
    broken = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
    with contextlib.suppress(*broken), open(kept, "rb") as stream, np.load(stream, allow_pickle=False) as file:
        counts, names = file["counts"], file["names"].tobytes()
        same = file["classes"].tobytes() == known and np.array_equal(file["times"], times)
        if same and len(counts) == len(classes) and names.count(b"\0") == counts.sum() and b"/" not in names:
            return counts, names
    found = [_pictures(folder / split / name) for name in classes]
    counts = np.array([len(one) for one in found])
    names = b"".join(name + b"\0" for one in found for name in one)
    if time.time() - times.max() / 1e9 > SETTLED:  # or a file that comes in the same tick would never be seen
        content = io.BytesIO()
        np.savez(
            content,
            classes=np.frombuffer(known, np.uint8),
            times=times,
            counts=counts,
            names=np.frombuffer(names, np.uint8),
        )
        with contextlib.suppress(OSError):  # the data may be shared and read-only
            kept.parent.mkdir(exist_ok=True)
            write_atomically(kept, content.getvalue())
    return counts, names


def _pictures(folder: Path) -> list[bytes]:
    names = sorted(
        entry.name
        for entry in os.scandir(os.fsencode(folder))
        if entry.name.lower().endswith(ENDINGS) and not entry.name.startswith(b".")
    )
    if not names:
        raise DataMissing(f"{folder} holds no pictures (.JPEG, .jpg or .png); delete it, or fetch them")
    return names
