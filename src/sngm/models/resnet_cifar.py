"""The ResNets for CIFAR of He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..triton_support import kernels_support
from .conv import Conv3x3
from .ghost_norm import GhostBatchNorm2d


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut without parameters: option A of He et al."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.stride, self.extra = stride, (outputs - inputs) // 2
        self.conv1 = Conv3x3(inputs, outputs, stride)
        self.norm1 = GhostBatchNorm2d(outputs)
        self.conv2 = Conv3x3(outputs, outputs)
        self.norm2 = GhostBatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x), relu=True)
        y = self.norm2(self.conv2(y), shortcut=self.shortcut(x), relu=True)
        return y  # type: ignore[no-any-return]

    def shortcut(self, x: Tensor) -> Tensor:
        """Return the input; if the block halves the image, return every other pixel, padded with channels of zeros."""
        if self.stride == 1:
            return x
        even = not (x.shape[2] | x.shape[3]) & 1
        if even and kernels_support(x) and x.is_contiguous(memory_format=torch.channels_last):
            from .kernels.shortcut import Subsample

            return Subsample.apply(x, x.shape[1] + 2 * self.extra)  # type: ignore[no-any-return,no-untyped-call]
        return pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra, self.extra))


class CifarResNet(nn.Module):
    """A convolution, three stages of blocks with 16, 32 and 64 channels, the mean over pixels, a linear layer.

    Weights of convolutions and of the linear layer are drawn from N(0, 2 / fan_in), as in akamaster's published code.

    Args:
        blocks: number of blocks per stage; the network has ``6 * blocks + 2`` layers.
        classes: number of outputs.
    """

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv = Conv3x3(3, 16)
        self.norm = GhostBatchNorm2d(16)
        self.stage1 = _stage(16, 16, blocks)
        self.stage2 = _stage(16, 32, blocks)
        self.stage3 = _stage(32, 64, blocks)
        self.linear = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x), relu=True)
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


def _stage(inputs: int, outputs: int, blocks: int) -> nn.Sequential:
    first = Block(inputs, outputs, stride=1 if inputs == outputs else 2)
    return nn.Sequential(first, *(Block(outputs, outputs) for _ in range(blocks - 1)))


def resnet20(classes: int = 10) -> CifarResNet:
    """Return the network of the paper's CIFAR-10 experiments (269,722 parameters)."""
    return CifarResNet(3, classes)
