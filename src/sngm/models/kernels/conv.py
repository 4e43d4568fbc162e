"""3 x 3 convolutions of few channels in bfloat16, where cuDNN reaches a seventh of what the memory gives.

Activations are channels_last. A program takes some pixels through all nine taps, so that neighbours come from its
cache; the gradient of the weights is summed by parts, in a fixed order.
"""

# Triton compiles these functions: they have no types, and names in capitals are constants of a compilation.
# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...triton_support import LARGEST, ONE_ROUNDING

CHANNELS = (16, 32, 64)


@triton.jit
def beside(
    x, p, pixels, down, right,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """TAPS neighbours of some pixels in one row of the image, which lie side by side in memory too."""
    k = tl.arange(0, K)
    row, column = p // W % H + down, (p % W)[:, None] + (right + k // C)[None, :]
    there = ((row >= 0) & (row < H) & (p < pixels))[:, None] & (column >= 0) & (column < W) & (k < TAPS * C)[None, :]
    return tl.load(x + (p + down * W + right)[:, None] * C + k[None, :], mask=there, other=0.0)


@triton.jit
def convolve(
    x, w, y, pixels, by_out, by_in, by_row, by_column,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Outputs of some pixels; BACK: the gradient of the input, which is the convolution with the taps turned round."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i, o = tl.arange(0, CIN)[:, None], tl.arange(0, COUT)[None, :]
    total = tl.zeros((BLOCK, COUT), tl.float32)
    for tap in tl.static_range(9):
        a = beside(x, p, pixels, tap // 3 - 1, tap % 3 - 1, H, W, CIN, CIN, 1)
        if BACK:
            b = tl.load(w + i * by_out + o * by_in + (2 - tap // 3) * by_row + (2 - tap % 3) * by_column)
        else:
            b = tl.load(w + i * by_in + o * by_out + tap // 3 * by_row + tap % 3 * by_column)
        total = tl.dot(a, b.to(a.dtype), total)
    tl.store(y + p[:, None] * COUT + o, total.to(y.dtype.element_ty), mask=(p < pixels)[:, None])


@triton.jit
def correlate(
    x, grad, partial, pixels, each,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Products of inputs and output gradients, summed over a part of the pixels, for one row of taps or all."""
    part = tl.program_id(0) // (3 // ROWS)
    down = tl.program_id(0) % 3 - 1 if ROWS == 1 else -1
    k, o = tl.arange(0, K), tl.arange(0, COUT)
    first = tl.zeros((K, COUT), tl.float32)
    second = tl.zeros((K, COUT), tl.float32)
    third = tl.zeros((K, COUT), tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, pixels), BLOCK):
        p = start + tl.arange(0, BLOCK)
        g = tl.load(grad + p[:, None] * COUT + o[None, :], mask=(p < pixels)[:, None], other=0.0)
        a = beside(x, p, pixels, down, -1, H, W, CIN, K, 3)
        first = tl.dot(tl.trans(a), g, first)
        if ROWS == 3:
            a = beside(x, p, pixels, 0, -1, H, W, CIN, K, 3)
            second = tl.dot(tl.trans(a), g, second)
            a = beside(x, p, pixels, 1, -1, H, W, CIN, K, 3)
            third = tl.dot(tl.trans(a), g, third)
    size = 3 * CIN * COUT
    at = partial + (part * 3 + down + 1) * size + k[:, None] * COUT + o[None, :]
    mask = (k < 3 * CIN)[:, None]
    tl.store(at, first, mask=mask)
    if ROWS == 3:
        tl.store(at + size, second, mask=mask)
        tl.store(at + 2 * size, third, mask=mask)


@triton.jit
def add_parts(
    partial, out, parts, by_out, by_in, by_row, by_column,
    CIN: tl.constexpr, COUT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over parts, written as the weights are laid out. A column is (tap, input channel, output channel)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    size = 9 * CIN * COUT
    known = column < size
    total = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        at = partial + part[:, None] * size + column[None, :]
        total += tl.load(at, mask=(part < parts)[:, None] & known[None, :], other=0.0)
    o, i, tap = column % COUT, column // COUT % CIN, column // (COUT * CIN)
    at = out + o * by_out + i * by_in + tap // 3 * by_row + tap % 3 * by_column
    tl.store(at, tl.sum(total, 0), mask=known)


@triton.jit
def taps_of(x, p, pixels, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """All nine neighbours of some pixels, side by side: for inputs of fewer channels than a product needs."""
    k = tl.arange(0, K)
    down, right, c = k // (3 * C) - 1, k // C % 3 - 1, k % C
    row, column = (p // W % H)[:, None] + down[None, :], (p % W)[:, None] + right[None, :]
    there = (row >= 0) & (row < H) & (column >= 0) & (column < W) & (p < pixels)[:, None] & (k < 9 * C)[None, :]
    return tl.load(x + (p[:, None] + (down * W + right)[None, :]) * C + c[None, :], mask=there, other=0.0)


@triton.jit
def convolve_few(
    x, w, y, pixels, by_out, by_in, by_row, by_column,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`convolve` for images."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k, o = tl.arange(0, K), tl.arange(0, COUT)
    a = taps_of(x, p, pixels, H, W, CIN, K)
    at = k // (3 * CIN) * by_row + k // CIN % 3 * by_column + k % CIN * by_in
    b = tl.load(w + at[:, None] + o[None, :] * by_out, mask=(k < 9 * CIN)[:, None], other=0.0)
    total = tl.dot(a, b.to(a.dtype))
    tl.store(y + p[:, None] * COUT + o[None, :], total.to(y.dtype.element_ty), mask=(p < pixels)[:, None])


@triton.jit
def correlate_few(
    x, grad, partial, pixels, each,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`correlate` for images, all taps at once."""
    part = tl.program_id(0)
    k, o = tl.arange(0, K), tl.arange(0, COUT)
    total = tl.zeros((K, COUT), tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, pixels), BLOCK):
        p = start + tl.arange(0, BLOCK)
        g = tl.load(grad + p[:, None] * COUT + o[None, :], mask=(p < pixels)[:, None], other=0.0)
        total = tl.dot(tl.trans(taps_of(x, p, pixels, H, W, CIN, K)), g, total)
    at = partial + (part * 9 * CIN + k)[:, None] * COUT + o[None, :]
    tl.store(at, total, mask=(k < 9 * CIN)[:, None])


FORWARD = {16: (256, 4), 32: (128, 4)}  # by channels: pixels a program, warps
WEIGHTS = {16: (64, 4, 3), 32: (64, 4, 1), 64: (64, 4, 1)}  # pixels at once, warps, rows of taps a program
PROGRAMS = 528  # for a gradient of weights: four for each processor of a large GPU
MANY = 1 << 18  # pixels from which cuDNN is faster with 32 channels; with 64 it always is


def fits(x: Tensor, weight: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether the kernels know a convolution of this input with this weight."""
    outputs, inputs, *kernel = weight.shape
    known = outputs in CHANNELS and (inputs in CHANNELS or inputs <= 3)
    few_enough = x.numel() // inputs * max(inputs, outputs) < LARGEST
    return known and few_enough and kernel == [3, 3] and stride == (1, 1) and weight.dtype == torch.float32


def forward(x: Tensor, weight: Tensor, by_library: bool) -> Tensor:
    """The convolution of channels_last activations, with padding 1."""
    if by_library:
        return torch.conv2d(x, weight.to(x.dtype), padding=1)
    y = _empty_like(x, len(weight))
    _convolve(x, weight, y, _sizes(x, weight.shape[1], len(weight)), back=False)
    return y


def gradient_of_input(grad: Tensor, x: Tensor, weight: Tensor, by_library: bool) -> Tensor:
    """What reaches the input `x`."""
    inputs = weight.shape[1]
    if by_library or inputs not in CHANNELS:  # few ask for the gradient of an image
        sizes = [1, 1], [1, 1], [1, 1], False, [0, 0], 1  # stride, padding, dilation, not transposed, groups
        return torch.ops.aten.convolution_backward(grad, x, weight.to(grad.dtype), None, *sizes, [True, False, False])[
            0
        ]
    out = _empty_like(grad, inputs)
    _convolve(grad, weight, out, _sizes(grad, len(weight), inputs), back=True)
    return out


def gradient_of_weight(x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """What reaches the weights, in float32."""
    pixels, outputs, inputs = grad.numel() // grad.shape[1], len(weight), weight.shape[1]
    few = inputs not in CHANNELS
    block, warps, rows = (128, 4, 3) if few else WEIGHTS[inputs]
    parts = min(triton.cdiv(pixels, block), PROGRAMS * rows // 3)
    each = triton.cdiv(triton.cdiv(pixels, parts), block) * block
    parts = triton.cdiv(pixels, each)
    partial = torch.empty((parts, weight.numel()), dtype=torch.float32, device=x.device)
    shape = _sizes(x, inputs, outputs)
    if few:
        correlate_few[(parts,)](
            x, grad, partial, pixels, each, **shape, K=_columns(9, inputs), BLOCK=block, **ONE_ROUNDING
        )
    else:
        how = {"K": _columns(3, inputs), "BLOCK": block, "ROWS": rows, "num_warps": warps, **ONE_ROUNDING}
        correlate[(parts * 3 // rows,)](
            x, grad, partial, pixels, each, **shape, **how, num_stages=3 if inputs < 64 else 2
        )
    out = torch.empty_like(weight)
    grid = (triton.cdiv(weight.numel(), 32),)
    add_parts[grid](partial, out, parts, *out.stride(), CIN=inputs, COUT=outputs, COLUMNS=32, BLOCK=32, **ONE_ROUNDING)
    return out


def _convolve(x: Tensor, weight: Tensor, y: Tensor, shape: dict[str, int], back: bool) -> None:
    pixels, inputs = x.numel() // x.shape[1], shape["CIN"]
    if inputs in CHANNELS:
        block, warps = FORWARD.get(inputs, (128, 4))
        grid = (triton.cdiv(pixels, block),)
        convolve[grid](
            x, weight, y, pixels, *weight.stride(), **shape, BLOCK=block, BACK=back, num_warps=warps, **ONE_ROUNDING
        )
    else:
        grid = (triton.cdiv(pixels, 128),)
        convolve_few[grid](
            x, weight, y, pixels, *weight.stride(), **shape, K=_columns(9, inputs), BLOCK=128, **ONE_ROUNDING
        )


def _sizes(x: Tensor, inputs: int, outputs: int) -> dict[str, int]:
    return {"H": x.shape[2], "W": x.shape[3], "CIN": inputs, "COUT": outputs}


def _columns(taps: int, channels: int) -> int:
    return max(16, triton.next_power_of_2(taps * channels))


def _empty_like(x: Tensor, channels: int) -> Tensor:
    shape = (len(x), channels, *x.shape[2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


class Convolve(torch.autograd.Function):
    """A 3 x 3 convolution with stride 1, padding 1 and no bias, each part of it by whoever is fastest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        channels, pixels = max(weight.shape[:2]), x.numel() // x.shape[1]
        by_library = channels == 64 or (channels == 32 and pixels >= MANY)
        used = weight.to(x.dtype) if by_library else weight
        ctx.save_for_backward(x, used)
        ctx.by_library, ctx.weight = by_library, weight  # the parameter: for its layout alone, nothing changes it
        return forward(x, used, by_library)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, used = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        back = gradient_of_input(grad, x, used, ctx.by_library) if ctx.needs_input_grad[0] else None
        return back, gradient_of_weight(x, grad, ctx.weight) if ctx.needs_input_grad[1] else None
