"""Crop and flip small images at random, on their device. The randomness depends only on seed, epoch and sample."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..triton_support import kernels_support
from .hashing import random_bits

PAD = 4  # black pixels added on each side, before a crop of the original size


def crop_flip(images: Tensor, indices: Tensor, seed: int, epoch: int | Tensor, pad: int = PAD) -> Tensor:
    """Return the uint8 images at `indices`, randomly cropped, and flipped horizontally with probability 1/2.

    >>> images = torch.arange(2 * 3 * 8 * 8).reshape(2, 3, 8, 8).to(torch.uint8)
    >>> one = crop_flip(images, torch.tensor([0, 1]), seed=0, epoch=3)[1]
    >>> bool((one == crop_flip(images, torch.tensor([1]), seed=0, epoch=3)[0]).all())
    True
    """
    height, width = images.shape[2:]
    drawn: Tensor = random_bits(seed, epoch, indices)
    span = 2 * pad + 1
    top, left, flip = drawn % span - pad, drawn // span % span - pad, drawn // span**2 % 2 == 1
    rows = torch.arange(height, device=images.device) + top[:, None]
    columns = torch.arange(width, device=images.device).expand(len(indices), -1)
    columns = torch.where(flip[:, None], width - 1 - columns, columns) + left[:, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    # channels last, which is also the memory layout of the result
    picked = images.movedim(1, -1)[
        indices[:, None, None], rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]
    ]
    return (picked * inside[..., None]).movedim(-1, 1)


def normalise(images: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``(images / 255 - mean) / std``, per channel."""
    mean, std = mean.to(images.device)[:, None, None], std.to(images.device)[:, None, None]
    return images.to(mean.dtype).sub(255 * mean).div(255 * std).to(dtype)


def training_batch(
    images: Tensor,
    indices: Tensor,
    seed: int,
    epoch: int | Tensor,
    mean: Tensor,
    std: Tensor,
    dtype: torch.dtype,
    pad: int = PAD,
) -> Tensor:
    """Return images cropped and flipped by `crop_flip`, then normalised by `normalise`.

    One Triton kernel does this for channels-last images on a GPU, if `epoch` is a tensor.
    """
    channels_last = images.is_contiguous(memory_format=torch.channels_last)
    if kernels_support(images) and channels_last and isinstance(epoch, Tensor):
        from .augment_kernel import crop_flip_normalise

        done: Tensor = crop_flip_normalise(images, indices, seed, epoch, mean, std, dtype, pad)  # type: ignore[no-untyped-call]
        return done
    return normalise(crop_flip(images, indices, seed, epoch, pad), mean, std, dtype)


Channels = tuple[float, float, float]  # a number for each of red, green and blue


@functools.cache  # a CUDA graph cannot capture a copy to the device
def on_device(values: Channels, device: torch.device) -> Tensor:
    """Return the values of channels as a float32 tensor on a device."""
    return torch.tensor(values, device=device)


def batch_of(
    samples: Any, indices: Tensor, seed: int, epoch: int | Tensor, mean: Channels, std: Channels, pad: int | None = PAD
) -> tuple[Tensor, Tensor]:
    """Return training images (augmented, normalised, and in autocast's dtype) and their labels.

    Args:
        samples: uint8 images and labels, as :class:`sngm.data.tensors.Tensors`, or a subset of them.
        pad: black pixels on each side before a random crop and flip; None for no augmentation.
    """
    (images, labels), rows = samples.rows(indices)
    kind = images.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    scale = on_device(mean, images.device), on_device(std, images.device)
    if pad is None:
        return normalise(images[rows], *scale, dtype), labels[rows]
    return training_batch(images, rows, seed, epoch, *scale, dtype, pad), labels[rows]
