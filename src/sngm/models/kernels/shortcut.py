"""The shortcut of He et al.'s CIFAR ResNets where the image size halves: every other pixel, and channels of zeros."""

# Triton compiles these functions: they have no type annotations, and upper-case names are compile-time constants.
# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...triton_support import ONE_ROUNDING


@triton.jit
def subsample(
    x, y, elements,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Write every other row and column of `x`, of shape (n, H, W, C), to `y`, whose OUT - C further channels are zeros.

    With BACK, `y` has the gradient of the output, and the gradient of the input is written to `x`.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    before: tl.constexpr = (OUT - C) // 2
    if BACK:
        c, column, row, n = at % C, at // C % W, at // (C * W) % H, at // (C * W * H)
        source = ((n * (H // 2) + row // 2) * (W // 2) + column // 2) * OUT + c + before
        value = tl.load(y + source, mask=inside & (row % 2 == 0) & (column % 2 == 0), other=0.0)
        tl.store(x + at, value, mask=inside)
    else:
        c, column = at % OUT - before, at // OUT % (W // 2)
        row, n = at // (OUT * (W // 2)) % (H // 2), at // (OUT * (W // 2) * (H // 2))
        source = ((n * H + 2 * row) * W + 2 * column) * C + c
        tl.store(y + at, tl.load(x + source, mask=inside & (c >= 0) & (c < C), other=0.0), mask=inside)


def _launch(x: Tensor, y: Tensor, back: bool) -> None:
    _, channels, height, width = x.shape
    elements = (x if back else y).numel()
    shape = {"H": height, "W": width, "C": channels, "OUT": y.shape[1]}
    subsample[(triton.cdiv(elements, 1024),)](x, y, elements, **shape, BLOCK=1024, BACK=back, **ONE_ROUNDING)


class Subsample(torch.autograd.Function):
    """Halve the (even) height and width of channels_last activations, and pad channels with zeros up to `channels`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels: int) -> Tensor:
        n, _, height, width = x.shape
        ctx.shape = x.shape
        shape = (n, channels, height // 2, width // 2)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        _launch(x, y, back=False)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous(memory_format=torch.channels_last)
        x = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        _launch(x, grad, back=True)
        return x, None
