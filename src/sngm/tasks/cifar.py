"""The SNGM paper's experiments on CIFAR-10: ResNet20, and a network of two convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..data.augment import PAD, batch_of, normalise, on_device
from ..data.cifar import load_cifar
from ..models.convnet import two_conv_net
from ..models.resnet_cifar import resnet20
from .base import Batch, Splits, Task, Tensors

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of each channel of the training images


class Cifar10(Task):
    """Base class of tasks on CIFAR-10. Images are stored on the device as uint8, and augmented and normalised there.

    Args:
        augment: crop training images at random, after padding by 4 pixels, and flip them at random.
    """

    dataset = "cifar10"
    epochs = 160
    batches = (128, 1024, 2048, 4096, 8192)
    workers = 8
    micro = 128
    decay_on = "all"
    bias_lr = "full"
    holdout = 0.1
    precision_on_gpu = "bfloat16"
    pass_size = 4096
    stacks = True

    def __init__(self, augment: bool = True) -> None:
        self.augment = augment

    def data(self) -> Splits:
        train, test = load_cifar(self.data_dir)
        # channels_last is the memory layout of the crops, and convolutions are fastest with it
        return Splits(*(Tensors(i.contiguous(memory_format=torch.channels_last), y) for i, y in (train, test)))

    def batch(self, samples: Any, indices: Tensor, *, seed: int, epoch: int) -> Batch:
        return batch_of(samples, indices, seed, epoch, MEAN, STD, PAD if self.augment else None)

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        mean, std = on_device(MEAN, images.device), on_device(STD, images.device)
        return super().scores(model, (normalise(images, mean, std, next(model.parameters()).dtype), labels))


class Cifar10ResNet20(Cifar10):
    """ResNet20 (option A, 269,722 parameters) on CIFAR-10: 160 epochs, cosine by epoch, no warm-up.

    The SNGM paper states these settings, the batches, momentum 0.9, weight decay 1e-4, eight workers and micro-batches
    of at most 128, which are also BatchNorm's groups. The paper leaves the following open; our choice is in brackets:

    - the learning rates (`lrs`)
    - whether an incomplete last batch is used (no)
    - whose running statistics are used in evaluation (the first worker's, as in PyTorch's data parallelism)
    - which parameters have weight decay (all, as in the public code that the authors probably used)
    """

    lrs = {  # noqa: RUF012  around the best learning rates at batch 8192 in trials with one seed
        "msgd": (0.05, 0.1, 0.2, 0.4),
        "adam": (0.001, 0.003, 0.01, 0.03),
        "adamw": (0.001, 0.003, 0.01, 0.03),
        "muon": (0.003, 0.01, 0.03, 0.1),
        "nesterov": (0.05, 0.1, 0.2, 0.4),
        "nsgdm": (2.0, 4.0, 8.0, 16.0),
        "lars": (1.0, 2.0, 4.0, 8.0),
        "lars-unscaled": (1.0, 2.0, 4.0, 8.0),
        "lars-momentum": (0.01, 0.03, 0.1, 0.3),
        "clars": (1.0, 2.0, 4.0, 8.0),
        "extrap-sgd": (0.05, 0.1, 0.2, 0.4),
        "lamb": (0.003, 0.01, 0.03, 0.1),
        "sngm": (0.2, 0.4, 0.8, 1.6),
        "spectral-sngm": (0.01, 0.02, 0.04, 0.08),
        "sngd": (1.0, 2.0, 4.0, 8.0),
        "block-sngm": (0.025, 0.05, 0.1, 0.2),
    }

    def model(self) -> nn.Module:
        return resnet20()


class Cifar10ConvNet(Cifar10):
    """The network of two convolutions of the SNGM paper's Figure 1 on CIFAR-10 (62,006 parameters).

    The paper states no settings for that figure, so this task uses those of the paper's ResNet20. This network has no
    BatchNorm, so workers and micro-batches affect only the speed, except with CLARS and EXTRAP-SGD.
    """

    lrs = {  # noqa: RUF012  guesses
        "msgd": (0.01, 0.03, 0.1, 0.3),
        "sngm": (0.01, 0.03, 0.1, 0.3),
        "lars": (1.0, 3.0, 10.0, 30.0),
        "adam": (0.0003, 0.001, 0.003, 0.01),
        "lamb": (0.001, 0.003, 0.01, 0.03),
    }

    def model(self) -> nn.Module:
        return two_conv_net()
