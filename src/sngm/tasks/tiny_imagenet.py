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

SHARE = 9  # the epochs of ImageNet's recipe, and those of its warm-up, are divided by this


class TinyImageNetResNet50(ImageNetResNet50):
    """ResNet-50 on Tiny-ImageNet (200 classes, 64 x 64 pixels): 10 epochs of the ImageNet recipe.

    This experiment is not in the SNGM paper. Loss, label smoothing, schedule, weight decay, BatchNorm groups and scores
    are those of `imagenet-resnet50`. The epochs are a ninth of its 90, and the warm-up is a ninth of its warm-up at
    twice the batch, so that batch 16,384 here corresponds to its batch of 32,768. The learning rates are guesses: none
    has been tried.

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
    # Estimate, not measured: a captured step on one H200 trains ResNet-50 on 5,523 images of 224 x 224 per second
    # (docs/speed.md), limited by memory bandwidth. The feature maps here have (32 / 56)^2 = 0.33 times as many pixels,
    # which gives 16,900 images/s, 6 s per epoch, and 3.3 minutes for 30 epochs with tests.
    epochs = 90 // SHARE
    batches: ClassVar[tuple[int, ...]] = (256, 4096, 16384)
    pass_size = 512  # about 11 GB of activations in bfloat16, by an estimate
    pass_size_on_cpu = 128
    loaders = 0
    holdout = 0.1
    lrs = {  # noqa: RUF012
        **ImageNetResNet50.lrs,
        "msgd": (0.2, 0.4, 0.8, 1.6),
        "spectral-sngm": (0.01, 0.02, 0.04, 0.08),  # of ResNet-20 on CIFAR-10
    }

    def __init__(self, stem: str = "3x3-pool", smoothing: float = 0.1, augment: bool = True) -> None:
        if stem not in STEMS:
            raise ValueError(f"stem must be one of {', '.join(STEMS)}, got {stem!r}")
        super().__init__(SIDE, SIDE, smoothing, CLASSES)
        self.stem, self.augment = stem, augment

    @classmethod
    def usual(cls, batch: int) -> dict[str, Any]:
        usual = super().usual(2 * batch)
        return {**usual, "warmup": usual["warmup"] / SHARE}

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
