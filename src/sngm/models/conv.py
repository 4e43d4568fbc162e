"""The 3 x 3 convolution of the CIFAR networks, with Triton kernels where they are faster."""

import torch
from torch import Tensor, nn

from ..triton_support import kernels_support


class Conv3x3(nn.Conv2d):
    """A 3 x 3 convolution with zero padding and without a bias, because the BatchNorm after it has a bias."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if kernels_support(x) and in_bfloat16(x):
            from .kernels import conv

            if conv.fits(x, self.weight, self.stride):
                x = x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
                return conv.Convolve.apply(x, self.weight)  # type: ignore[no-any-return,no-untyped-call]
        return super().forward(x)


def in_bfloat16(x: Tensor) -> bool:
    """Return True if autocast computes convolutions in bfloat16."""
    kind = x.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
