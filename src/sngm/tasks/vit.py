"""Fine-tuning of a vision transformer on CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data.cifar import load_cifar
from ..data.data_dirs import data_roots
from ..data.hashing import BITS, random_bits
from ..data.imagenet import RATIO, SCALE
from ..errors import UsageError
from ..models.vit import load_vit
from .base import Batch, Samples, Splits, Task, Tensors

SIDE = 32  # width and height of an image in pixels
GRID = 512  # number of areas, and of aspect ratios, from which crops are drawn
AUGMENTS = ("resized-crop", "flip")
PASS = 128  # samples per pass of images scaled to 224 x 224 pixels


class CifarViT(Task):
    """Fine-tune a pretrained ViT: 20 epochs, linear decay, no warm-up.

    The SNGM paper states these settings and the batches, and names the model and the framework, Hugging Face's
    transformers. Learning rates, weight decay and clipping are our choice. The framework clips gradients to a norm of 1
    by default, so the paper's MSGD probably had clipped gradients; ``--clip 1`` does the same. The framework's script
    holds out 15 % of a dataset that has no validation set; this task trains on all 50,000 images.

    Images are stored as uint8 of 32 x 32 pixels. They are scaled up on the model's device, without rounding to uint8.

    Args:
        model: a folder, a folder in the data folder, or a name on the Hugging Face hub.
        size: width and height in pixels that images are scaled to.
        augment: "resized-crop" for crops of random size and aspect ratio and random flips, as in the framework's
            script, or "flip" for random flips alone.
    """

    classes: ClassVar[int]
    epochs = 20
    batches = (128, 1024, 4096, 8192, 16384)
    schedule = "linear"
    workers = 8
    micro = 128
    precision_on_gpu = "bfloat16"
    pass_size = PASS
    step = "eager"  # steps captured as a CUDA graph take nearly twice as long with ViT-B/16: see docs/speed.md
    holdout = 0.1
    lrs = {  # noqa: RUF012
        "msgd": (0.003, 0.01, 0.03, 0.1),  # recalled, not verified: 0.001 to 0.03 at batch 512 in the ViT paper
        "adam": (1e-5, 3e-5, 1e-4, 3e-4),  # the framework's default is 5e-5, at batch 8
        # The rest are guesses. SNGM: as for MSGD, assuming gradient norms of about 1; block-sngm: SNGM's divided by the
        # square root of the number of tensors, 200; LARS and LAMB: so that a tensor changes by 0.03 to 1 % per step.
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
            raise ValueError(f"size must be at least {SIDE}, the size of the images, got {size}")
        if augment not in AUGMENTS:
            raise ValueError(f"augment must be one of {', '.join(AUGMENTS)}, got {augment!r}")
        self.source, self.size, self.augment = model, size, augment
        self.pass_size = max(1, PASS * 224**2 // size**2)  # as many pixels per pass at every size

    def settings(self) -> dict[str, Any]:
        return {"model": self.source, "size": self.size, "augment": self.augment}

    def data(self) -> Splits:
        train, test = load_cifar(self.data_dir, self.classes)
        return Splits(Tensors(*train), Tensors(*test))

    def model(self) -> nn.Module:
        folders = (root / self.source for root in [Path(), *data_roots(self.data_dir)])
        model = load_vit(next((str(folder) for folder in folders if folder.is_dir()), self.source), self.classes)
        if self.size % model.patch:
            raise UsageError(f"size must be a multiple of the model's patch size, {model.patch}, got {self.size}")
        return model

    def batch(self, samples: Samples, indices: Tensor, *, seed: int, epoch: int) -> Batch:
        """Return unchanged images and labels, and for each image a random number that determines its crop."""
        images, labels = samples[indices]
        return images, labels, random_bits(seed, epoch, indices.to(images.device))

    @property
    def smooths_labels(self) -> bool:
        return True

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels, numbers = batch
        return cross_entropy(model(self._inputs(model, images, numbers)), labels, label_smoothing=self.label_smoothing)

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        return super().scores(model, (self._inputs(model, images), labels))

    def _inputs(self, model: nn.Module, images: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return images with pixels in [0, 1], cropped, flipped, and scaled to `self.size` pixels.

        `numbers` has a random number for each image, which determines its crop and flip; None for neither.
        """
        pixels = images.to(next(model.parameters()).dtype) / 255
        if numbers is None:
            numbers = torch.zeros(1, dtype=torch.int64, device=images.device)
            return resized(pixels, whole(numbers), torch.zeros_like(numbers, dtype=torch.bool), self.size)
        boxes = random_boxes(numbers) if self.augment == "resized-crop" else whole(numbers)
        flipped = random_bits(numbers, 3) >> (BITS - 1) == 1
        return resized(pixels, boxes, flipped, self.size)


class Cifar10ViT(CifarViT):
    """Fine-tune a pretrained ViT on CIFAR-10: 20 epochs, linear decay, no warm-up."""

    dataset = "cifar10"
    classes = 10


class Cifar100ViT(CifarViT):
    """Fine-tune a pretrained ViT on CIFAR-100: 20 epochs, linear decay, no warm-up."""

    dataset = "cifar100"
    classes = 100


# ---------------------------------------------------------------- crops of a batch


def whole(numbers: Tensor) -> Tensor:
    """Return the crop box of a whole image, (top, left, height, width), once for each element of `numbers`."""
    return numbers.new_tensor([0, 0, SIDE, SIDE]).expand(len(numbers), -1)


def random_boxes(numbers: Tensor) -> Tensor:
    """Return top, left, height and width of a crop for each number, by the rule of torchvision's RandomResizedCrop.

    All computations are in integers, so that every device gives the same boxes.
    """
    sizes = crop_sizes(numbers.device)
    size = sizes[random_bits(numbers, 0) % len(sizes)].long()
    room = SIDE + 1 - size
    corner = torch.stack([random_bits(numbers, 1), random_bits(numbers, 2)], 1) % room
    return torch.cat([corner, size], 1)


@functools.cache
def crop_sizes(device: torch.device) -> Tensor:
    """Return equally likely crop sizes (height, width), with uniform areas and log-uniform aspect ratios.

    Sizes that exceed the image are left out. torchvision draws again in that case, up to ten times, which has the same
    effect.
    """
    at = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    area = SIDE**2 * (SCALE[0] + (SCALE[1] - SCALE[0]) * at)[:, None]
    low, high = map(math.log, RATIO)
    ratio = torch.exp(low + (high - low) * at)
    sizes = torch.stack([(area / ratio).sqrt().round(), (area * ratio).sqrt().round()], -1).flatten(0, 1)
    return sizes[(sizes <= SIDE).all(1)].to(device, torch.uint8)


def resized(pixels: Tensor, boxes: Tensor, flipped: Tensor, size: int) -> Tensor:
    """Return the part of each image in its box (top, left, height, width), scaled up to `size` x `size`, and flipped.

    Each direction is scaled by multiplying each image by a matrix. Each row of the matrix holds the bilinear
    interpolation weights of two neighbouring pixels. A single box applies to all images.
    """
    top, left, height, width = boxes.unbind(1)
    down = _weights(top, height, size, pixels)
    across = _weights(left, width, size, pixels)
    across = torch.where(flipped[:, None, None], across.flip(1), across)
    with torch.autocast(pixels.device.type, enabled=False):  # interpolation weights need more than 8 bits
        return down[:, None] @ pixels @ across[:, None].mT


def _weights(start: Tensor, length: Tensor, size: int, pixels: Tensor) -> Tensor:
    """Return the weight of each image pixel in each of `size` output pixels that cover `length` pixels from `start`."""
    centre = 2 * torch.arange(size, device=pixels.device) + 1
    at = (centre * length[:, None] - size).to(pixels.dtype) / (2 * size)  # the centre of each output pixel in the box
    at = start[:, None] + torch.minimum(at.clamp(min=0), length[:, None] - 1)
    apart = (at[..., None] - torch.arange(pixels.shape[-1], device=pixels.device)).abs()
    return (1 - apart).clamp(min=0)
