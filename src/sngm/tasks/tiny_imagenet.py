"""Tiny-ImageNet: the SNGM paper's ImageNet experiment at a size for one GPU, and pretraining of a small ViT."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..data.augment import batch_of
from ..data.tiny_imagenet import CLASSES, SIDE, load_tiny_imagenet
from ..models.resnet import STEMS, resnet50
from ..models.vit import new_vit
from .base import Batch, Samples, Splits
from .imagenet import MEAN, STD, ImageNetResNet50


class TinyImageNetResNet50(ImageNetResNet50):
    """ResNet-50 on Tiny-ImageNet (200 classes, 64 x 64 pixels): 10 epochs, two of them warm-up.

    This experiment is not in the SNGM paper. Loss, label smoothing, the form of the schedule, weight decay, BatchNorm
    groups and scores are those of `imagenet-resnet50`, whose 90 epochs have 50 times as many steps at the same batch.

    Images stay uint8 on the device, and are augmented and normalised there. A training image is padded with 8 black
    pixels on each side, the same proportion as in CIFAR-10's recipe, cropped at random to 64 x 64, and flipped at
    random. ImageNet's random resized crop would enlarge parts of as few as 18 x 18 pixels.

    Args:
        stem: first layers of the model, see :class:`sngm.models.resnet.ResNet`. "7x7" leaves feature maps of 2 x 2
            pixels in the last stage, "3x3-pool" 4 x 4 and "3x3" 8 x 8; each costs 4 times as much as the one before.
        smoothing: label smoothing, as in `imagenet-resnet50`.
        augment: whether training images are cropped and flipped at random.
    """

    dataset = "tiny-imagenet"
    epochs = 10
    batches: ClassVar[tuple[int, ...]] = (256, 4096, 16384)
    pass_size = 512  # 2.9 GiB on an H200 with the stem 7x7; the default stem has four times the activations
    pass_size_on_cpu = 128
    loaders = 0
    holdout = 0.1
    lrs = {  # noqa: RUF012
        **ImageNetResNet50.lrs,
        # around those chosen with 7 steps of warm-up; momentum SGD's are higher, because warm-up allows that
        "msgd": (0.05, 0.1, 0.2, 0.4),
        "sngm": (0.5, 1.0, 2.0, 4.0),
        "spectral-sngm": (0.03, 0.06, 0.12, 0.24),
    }

    def __init__(self, stem: str = "3x3-pool", smoothing: float = 0.1, augment: bool = True) -> None:
        if stem not in STEMS:
            raise ValueError(f"stem must be one of {', '.join(STEMS)}, got {stem!r}")
        super().__init__(SIDE, SIDE, smoothing, CLASSES)
        self.stem, self.augment = stem, augment

    @classmethod
    def usual(cls, batch: int) -> dict[str, Any]:
        return {**super().usual(batch), "warmup": 2.0}

    def data(self) -> Splits:
        found = load_tiny_imagenet(self.data_dir)
        return Splits(found.train, found.val)

    def model(self) -> nn.Module:
        return resnet50(self.classes, self.stem)

    def batch(self, samples: Samples, indices: Tensor, *, seed: int, epoch: int) -> Batch:
        return batch_of(samples, indices, seed, epoch, MEAN, STD, SIDE // 8 if self.augment else None)

    def _inputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Normalise the images of an evaluation; those of training are normalised already."""
        return super()._inputs(model, batch) if batch[0].dtype == torch.uint8 else batch[0]


class TinyImageNetViT(TinyImageNetResNet50):
    """Pretrain a small ViT on Tiny-ImageNet (2.8 million parameters), to fine-tune it with `cifar10-vit`.

    This experiment is not in the SNGM paper. Images are augmented as in `tiny-imagenet-resnet50`.

    Args:
        width: numbers per token.
        depth: number of transformer blocks.
        heads: attention heads per block.
        patch: width and height in pixels of a patch, which becomes one token.
        smoothing: label smoothing, as in `imagenet-resnet50`.
    """

    epochs = 60
    batches = (512,)
    schedule = "cosine"
    workers = 1
    micro = None
    bias_lr = "scaled"
    pass_size_on_cpu = 256
    lrs = {"adamw": (0.0005, 0.001, 0.002, 0.004), "spectral-sngm": (0.005, 0.01, 0.02, 0.04)}  # noqa: RUF012  guesses

    def __init__(
        self, width: int = 192, depth: int = 6, heads: int = 3, patch: int = 8, smoothing: float = 0.1
    ) -> None:
        if min(width, depth, heads, patch) < 1 or width % heads or SIDE % patch:
            raise ValueError(
                f"width must be a multiple of heads, and {SIDE} of patch, all at least 1, got width={width}, "
                f"depth={depth}, heads={heads}, patch={patch}"
            )
        super().__init__(smoothing=smoothing)
        self.width, self.depth, self.heads, self.patch = width, depth, heads, patch

    @classmethod
    def usual(cls, batch: int) -> dict[str, Any]:
        return {**super().usual(batch), "warmup": 5.0}

    def model(self) -> nn.Module:
        return new_vit(
            self.classes,
            image_size=SIDE,
            patch_size=self.patch,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.depth,
            num_attention_heads=self.heads,
        )

    def batch(self, samples: Samples, indices: Tensor, *, seed: int, epoch: int) -> Batch:
        return batch_of(samples, indices, seed, epoch, (0.0,) * 3, (1.0,) * 3, SIDE // 8)

    def _inputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return pixels in [0, 1], as `cifar10-vit` does; the ViT normalises them."""
        return batch[0].to(next(model.parameters()).dtype) / 255 if batch[0].dtype == torch.uint8 else batch[0]
