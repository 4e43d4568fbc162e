"""Fine-tuning of a vision transformer on CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data.cifar import load_cifar
from ..data.hashing import BITS, mix
from ..errors import UsageError
from ..models.vit import load_vit
from .base import Batch, Samples, Splits, Task, Tensors

SIDE = 32  # pixels of an image
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a crop: its part of the area, its width to its height
GRID = 512  # steps in which either is drawn
AUGMENTS = ("resized-crop", "flip")


class CifarViT(Task):
    """A trained ViT fine-tuned: 20 epochs, linear decay, no warm-up.

    The paper gives these and the batches, and names the model and the framework, Hugging Face's transformers. Rates,
    weight decay and clipping are ours. The framework clips gradients to a norm of 1 unless told not to, so that the
    paper's MSGD was probably clipped: ``--clip 1`` does that. Its script holds out 15 % of a dataset that has no
    validation set; here all 50,000 images are trained on.

    Images stay 32 x 32 bytes until they are where the model is, and are scaled up there, not rounded to bytes again.
    Settings: `model`, a folder or a name on the hub; `size`, pixels a side that images are scaled to; `augment`,
    "resized-crop" for crops of random size and shape and mirroring, as the framework's script, or "flip" for
    mirroring alone.
    """

    classes: ClassVar[int]
    epochs = 20
    batches = (128, 1024, 4096, 8192, 16384)
    schedule = "linear"
    workers = 8
    micro = 128
    precision_on_gpu = "bfloat16"
    pass_size = 128
    step = "eager"  # captured, ViT-B/16 takes nearly twice as long: see docs/speed.md
    holdout = 0.1
    lrs = {  # noqa: RUF012
        "msgd": (0.003, 0.01, 0.03, 0.1),  # recalled, not looked up: the ViT paper has 0.001 to 0.03 at batch 512
        "adam": (1e-5, 3e-5, 1e-4, 3e-4),  # the framework's default is 5e-5, at batch 8
        # Guesses from here on: SNGM as MSGD, as if gradients had norms of about one, which is not measured; block-wise
        # that over the root of the number of tensors, 200; LARS, LAMB so that a tensor changes by 0.03 to 1 % a step.
        "sngm": (0.003, 0.01, 0.03, 0.1),
        "block-sngm": (0.0003, 0.001, 0.003, 0.01),
        "sngd": (0.01, 0.03, 0.1, 0.3),
        "lars": (0.3, 1.0, 3.0, 10.0),
        "lars-unscaled": (0.3, 1.0, 3.0, 10.0),
        "lars-momentum": (0.0003, 0.001, 0.003, 0.01),
        "clars": (0.03, 0.1, 0.3, 1.0),
        "extrap-sgd": (0.003, 0.01, 0.03, 0.1),
        "lamb": (0.0003, 0.001, 0.003, 0.01),
    }

    def __init__(
        self, model: str = "google/vit-base-patch16-224-in21k", size: int = 224, augment: str = "resized-crop"
    ) -> None:
        if size < SIDE:
            raise ValueError(f"size must be at least {SIDE}, the images' own, got {size}")
        if augment not in AUGMENTS:
            raise ValueError(f"augment must be one of {', '.join(AUGMENTS)}, got {augment!r}")
        self.source, self.size, self.augment = model, size, augment

    def settings(self) -> dict[str, Any]:
        return {"model": self.source, "size": self.size, "augment": self.augment}

    def data(self) -> Splits:
        train, test = load_cifar(self.data_dir, self.classes)
        return Splits(Tensors(*train), Tensors(*test))

    def model(self) -> nn.Module:
        model = load_vit(self.source, self.classes)
        if self.size % model.patch:
            raise UsageError(f"size={self.size} is no multiple of the model's patches of {model.patch} pixels")
        return model

    def batch(self, samples: Samples, indices: Tensor, *, seed: int, epoch: int) -> Batch:
        """Images and labels as they are, and a number for each that its crop follows from."""
        images, labels = samples[indices]
        return images, labels, mix(seed, epoch, indices.to(images.device))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels, numbers = batch
        return cross_entropy(model(self._inputs(model, images, numbers)), labels)

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        return super().scores(model, (self._inputs(model, images), labels))

    def _inputs(self, model: nn.Module, images: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Pixels from 0 to 1, cropped and mirrored as `numbers` say, of the size that the model gets."""
        pixels = images.to(next(model.parameters()).dtype) / 255
        if numbers is None:
            numbers = torch.zeros(1, dtype=torch.int64, device=images.device)
            return resized(pixels, whole(numbers), torch.zeros_like(numbers, dtype=torch.bool), self.size)
        boxes = random_boxes(numbers) if self.augment == "resized-crop" else whole(numbers)
        mirrored = mix(numbers, 3) >> (BITS - 1) == 1
        return resized(pixels, boxes, mirrored, self.size)


class Cifar10ViT(CifarViT):
    """A trained ViT fine-tuned on CIFAR-10: 20 epochs, linear decay, no warm-up."""

    dataset = "cifar10"
    classes = 10


class Cifar100ViT(CifarViT):
    """A trained ViT fine-tuned on CIFAR-100: 20 epochs, linear decay, no warm-up."""

    dataset = "cifar100"
    classes = 100


# ---------------------------------------------------------------- crops of many images at once


def whole(numbers: Tensor) -> Tensor:
    """The box of a whole image for each number."""
    none, all_of_it = torch.zeros_like(numbers), torch.full_like(numbers, SIDE)
    return torch.stack([none, none, all_of_it, all_of_it], 1)


def random_boxes(numbers: Tensor) -> Tensor:
    """Top, left, height and width of a crop for each number, by the rule of torchvision's ``RandomResizedCrop``.

    All of it is done on integers, so that every device gets the same boxes.
    """
    sizes = crop_sizes(numbers.device)
    size = sizes[mix(numbers, 0) % len(sizes)].long()
    room = SIDE + 1 - size
    corner = torch.stack([mix(numbers, 1), mix(numbers, 2)], 1) % room
    return torch.cat([corner, size], 1)


@functools.cache
def crop_sizes(device: torch.device) -> Tensor:
    """Heights and widths that are equally likely: areas and, on a log scale, shapes are even; all fit the image.

    torchvision draws again what does not fit, up to ten times, which comes to the same.
    """
    at = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    area = SIDE**2 * (SCALE[0] + (SCALE[1] - SCALE[0]) * at)[:, None]
    low, high = map(math.log, RATIO)
    ratio = torch.exp(low + (high - low) * at)
    sizes = torch.stack([(area / ratio).sqrt().round(), (area * ratio).sqrt().round()], -1).flatten(0, 1)
    return sizes[(sizes <= SIDE).all(1)].to(device, torch.uint8)


def resized(pixels: Tensor, boxes: Tensor, mirrored: Tensor, size: int) -> Tensor:
    """What is in each box (top, left, height, width), scaled up bilinearly to `size` x `size`, and mirrored or not.

    Each direction is a matrix for each image, with the two weights of the neighbours in a row. One box may serve all
    images.
    """
    top, left, height, width = boxes.unbind(1)
    down = _weights(top, height, size, pixels)
    across = _weights(left, width, size, pixels)
    across = torch.where(mirrored[:, None, None], across.flip(1), across)
    with torch.autocast(pixels.device.type, enabled=False):  # positions between pixels need more than 8 bits
        return down[:, None] @ pixels @ across[:, None].mT


def _weights(start: Tensor, length: Tensor, size: int, pixels: Tensor) -> Tensor:
    """What each of the image's pixels counts for in each of `size` that cover `length` from `start`."""
    centre = 2 * torch.arange(size, device=pixels.device) + 1
    at = (centre * length[:, None] - size).to(pixels.dtype) / (2 * size)  # the centre of each, in the box
    at = start[:, None] + torch.minimum(at.clamp(min=0), length[:, None] - 1)
    apart = (at[..., None] - torch.arange(pixels.shape[-1], device=pixels.device)).abs()
    return (1 - apart).clamp(min=0)
