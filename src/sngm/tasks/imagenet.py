"""ResNet-50 on ImageNet, from folders of images."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data.imagenet import CLASSES, ImageFolder, need_pillow
from ..errors import DataMissing
from ..models.resnet import resnet50
from .base import Batch, Samples, Splits, Task

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageNetResNet50(Task):
    """ResNet-50 on ImageNet: 90 epochs with warm-up, polynomial decay and label smoothing.

    The SNGM paper states the epochs, "warm-up and polynomial learning rate strategy", the batches of 1,024 and 32,768
    and, for all its experiments on images, weight decay 1e-4. The other settings follow the code from which the paper
    took LARS, NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch: label smoothing, learning rate decay of power 2, and, for LARS:

    =======  =======  ===============
    batch    lr       warm-up, epochs
    =======  =======  ===============
    512      2^2      10/2^6
    1,024    2^2.5    10/2^5
    4,096    2^3.5    10/2^3
    8,192    2^4      10/2^2
    16,384   2^4.5    5
    32,768   2^5      14
    =======  =======  ===============

    At these batches, the warm-ups of the table are the defaults of this task. There are two differences: that code
    decays the learning rate over the epochs after the warm-up, this task over all epochs; and in that code the first
    step has a learning rate of 0, in this task no step has. At batch 32,768 that code has BatchNorm groups of 64
    samples: use ``--bn-group 64``.

    Label smoothing follows that code too: the target of the true class is 1 - smoothing, and the other classes share
    `smoothing`. In torch the true class also gets an equal share of the smoothing, so that torch's 0.1 corresponds to
    0.0999 in this task. Test losses have no label smoothing.

    Args:
        size: width and height of the model's input in pixels.
        resize: pixels of the shorter side before the central crop of evaluation.
        smoothing: label smoothing, see above.
        classes: number of classes of the dataset.
    """

    dataset = "imagenet"
    epochs = 90
    batches: ClassVar[tuple[int, ...]] = (1024, 32768)
    schedule = "polynomial"
    workers = 8
    micro: ClassVar[int | None] = 128
    bias_lr = "full"  # as in the runs of the table above
    precision_on_gpu = "bfloat16"
    pass_size = 128
    loaders = 8
    holdout = 0.04  # 51,000 images, about as many as the test set has
    lrs = {  # noqa: RUF012  LARS: from the table. "Recalled": from memory of a paper, not verified
        "msgd": (0.4, 0.8, 1.6, 3.2),  # recalled, Goyal et al.: 0.1 per 256 samples, up to batch 8,192
        "lars": (4.0, 8.0, 16.0, 32.0),
        "lars-unscaled": (4.0, 8.0, 16.0, 32.0),
        "lars-momentum": (0.004, 0.008, 0.016, 0.032),  # this method's trust coefficient is 1, not 0.001
        "lamb": (0.005, 0.01, 0.02, 0.04),  # recalled, the LAMB paper: batches from 512 to 32,768
        # The rest are guesses. SNGM: the good range of ResNet-20, 0.3 to 1.6, times the ratio of the initial weight
        # norms, 268 / 46; block-sngm: SNGM's divided by the square root of the number of tensors, 161.
        "sngm": (1.0, 2.0, 4.0, 8.0),
        "block-sngm": (0.08, 0.16, 0.32, 0.64),
        "sngd": (4.0, 8.0, 16.0, 32.0),
        "clars": (0.4, 0.8, 1.6, 3.2),
        "extrap-sgd": (0.4, 0.8, 1.6, 3.2),
        "adam": (0.0005, 0.001, 0.002, 0.004),
    }

    def __init__(self, size: int = 224, resize: int = 256, smoothing: float = 0.1, classes: int = CLASSES) -> None:
        if not 1 <= size <= resize:
            raise ValueError(f"size must be at least 1 and at most resize, got size={size}, resize={resize}")
        if not 0 <= smoothing <= 0.5:
            raise ValueError(f"smoothing must be from 0 to 0.5, got {smoothing}")
        if classes < 2:
            raise ValueError(f"classes must be at least 2, got {classes}")
        self.size, self.resize, self.smoothing, self.classes = size, resize, smoothing, classes

    @classmethod
    def usual(cls, batch: int) -> dict[str, Any]:
        return {**super().usual(batch), "warmup": 14.0 if batch >= 32768 else 10 * batch / 32768}

    def data(self) -> Splits:
        need_pillow()  # raises here instead of in a worker process
        train, test = (
            ImageFolder(self.data_dir, split, size=self.size, resize=self.resize) for split in ("train", "val")
        )
        found = len(train.classes)
        if found != self.classes:
            raise DataMissing(
                f"{train.folder} holds {found} classes, not {self.classes}; if it is complete, give `settings` "
                f"classes={found}"
            )
        return Splits(train, test)

    def model(self) -> nn.Module:
        return resnet50(self.classes)

    def batch(self, samples: Samples, indices: Tensor, *, seed: int, epoch: int) -> Batch:
        whole: Any = samples
        if not isinstance(whole, ImageFolder):  # a subset: some are held out
            whole, indices = whole.samples, whole.indices[indices]
        augmented: Batch = whole.training(indices, seed, epoch)
        return augmented

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(self._inputs(model, batch))
        # with smoothing s, torch's target of each of the K - 1 other classes is s/K; here it is smoothing/(K - 1)
        smoothing = self.smoothing * self.classes / (self.classes - 1)
        return cross_entropy(outputs, batch[1], label_smoothing=smoothing)

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        outputs, labels = model(self._inputs(model, batch)), batch[1]
        first = outputs.topk(min(5, self.classes)).indices == labels[:, None]
        loss = cross_entropy(outputs, labels, reduction="none")
        return {"loss": loss, "accuracy": first[:, 0], "top5": first.any(1)}

    def _inputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Normalise uint8 images on the model's device; copying them there takes a quarter of float32's bandwidth."""
        like = next(model.parameters())
        mean, std = _mean_and_std(like.device, like.dtype)
        return (batch[0].to(like.dtype) - mean) / std


@functools.cache  # because a copy to the device synchronises with it
def _mean_and_std(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    mean, std = (255 * torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (MEAN, STD))
    return mean.to(device, dtype), std.to(device, dtype)
