"""3 x 3 convolutions of few channels in bfloat16; with 16, cuDNN reaches only a seventh of the memory bandwidth.

Activations are channels_last. A program applies all nine taps (filter positions) to some pixels, so that it reads
neighbouring pixels from the cache. The gradient of the weights is summed over parts of the pixels, then over the parts,
in a fixed order.

A weight may also be a stack of shape (copies, *shape). The samples are then divided into `copies` equal parts of
`per_copy` pixels each, and copy i is the weight for part i.
"""

# Triton compiles these functions: they have no type annotations, and upper-case names are compile-time constants.
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
def neighbours(
    x, p, pixels, down, right,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Load TAPS adjacent pixels of one image row for each pixel in `p`; they are contiguous in memory.

    The first one is `down` rows below and `right` columns to the right of the pixel. K is TAPS * C or a padded size.
    """
    k = tl.arange(0, K)
    row, column = p // W % H + down, (p % W)[:, None] + (right + k // C)[None, :]
    there = ((row >= 0) & (row < H) & (p < pixels))[:, None] & (column >= 0) & (column < W) & (k < TAPS * C)[None, :]
    return tl.load(x + (p + down * W + right)[:, None] * C + k[None, :], mask=there, other=0.0)


@triton.jit
def convolve(
    x, w, y, pixels, per_copy, by_copy, by_out, by_in, by_row, by_column,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of BLOCK pixels; with BACK, the gradient of the input: a convolution with reversed taps."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w += tl.program_id(0) * BLOCK // per_copy * by_copy
    i, o = tl.arange(0, CIN)[:, None], tl.arange(0, COUT)[None, :]
    total = tl.zeros((BLOCK, COUT), tl.float32)
    for tap in tl.static_range(9):
        a = neighbours(x, p, pixels, tap // 3 - 1, tap % 3 - 1, H, W, CIN, CIN, 1)
        if BACK:
            b = tl.load(w + i * by_out + o * by_in + (2 - tap // 3) * by_row + (2 - tap % 3) * by_column)
        else:
            b = tl.load(w + i * by_in + o * by_out + tap // 3 * by_row + tap % 3 * by_column)
        total = tl.dot(a, b.to(a.dtype), total)
    tl.store(y + p[:, None] * COUT + o, total.to(y.dtype.element_ty), mask=(p < pixels)[:, None])


@triton.jit
def pixels_of(part, parts, each, per_copy):
    """Return the first pixel of a part, and the pixel after its last: each copy has `parts` parts of `each` pixels."""
    first = part // parts * per_copy
    begin = first + part % parts * each
    return begin, tl.minimum(begin + each, first + per_copy)


@triton.jit
def correlate(
    x, grad, partial, parts, each, per_copy,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of the weights over one part of the pixels, for one row of taps (ROWS = 1) or for all three."""
    part = tl.program_id(0) // (3 // ROWS)
    down = tl.program_id(0) % 3 - 1 if ROWS == 1 else -1
    begin, end = pixels_of(part, parts, each, per_copy)
    k, o = tl.arange(0, K), tl.arange(0, COUT)
    first = tl.zeros((K, COUT), tl.float32)
    second = tl.zeros((K, COUT), tl.float32)
    third = tl.zeros((K, COUT), tl.float32)
    for start in range(begin, end, BLOCK):
        p = start + tl.arange(0, BLOCK)
        g = tl.load(grad + p[:, None] * COUT + o[None, :], mask=(p < end)[:, None], other=0.0)
        a = neighbours(x, p, end, down, -1, H, W, CIN, K, 3)
        first = tl.dot(tl.trans(a), g, first)
        if ROWS == 3:
            a = neighbours(x, p, end, 0, -1, H, W, CIN, K, 3)
            second = tl.dot(tl.trans(a), g, second)
            a = neighbours(x, p, end, 1, -1, H, W, CIN, K, 3)
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
    partial, out, parts, by_copy, by_out, by_in, by_row, by_column,
    CIN: tl.constexpr, COUT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the sums of all parts of the pixels, and write the result in the memory layout of the weights.

    A column of `partial` is one weight: a tap, an input channel and an output channel.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    size = 9 * CIN * COUT
    partial += tl.program_id(1) * parts * size
    out += tl.program_id(1) * by_copy
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
    """Load the 3 x 3 neighbourhood of each pixel `p` as a row of 9 * C values, padded with zeros to K.

    This is for inputs of few channels: `tl.dot` needs at least 16 columns.
    """
    k = tl.arange(0, K)
    down, right, c = k // (3 * C) - 1, k // C % 3 - 1, k % C
    row, column = (p // W % H)[:, None] + down[None, :], (p % W)[:, None] + right[None, :]
    there = (row >= 0) & (row < H) & (column >= 0) & (column < W) & (p < pixels)[:, None] & (k < 9 * C)[None, :]
    return tl.load(x + (p[:, None] + (down * W + right)[None, :]) * C + c[None, :], mask=there, other=0.0)


@triton.jit
def convolve_few(
    x, w, y, pixels, per_copy, by_copy, by_out, by_in, by_row, by_column,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the same as `convolve`, for images (inputs of few channels)."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w += tl.program_id(0) * BLOCK // per_copy * by_copy
    k, o = tl.arange(0, K), tl.arange(0, COUT)
    a = taps_of(x, p, pixels, H, W, CIN, K)
    at = k // (3 * CIN) * by_row + k // CIN % 3 * by_column + k % CIN * by_in
    b = tl.load(w + at[:, None] + o[None, :] * by_out, mask=(k < 9 * CIN)[:, None], other=0.0)
    total = tl.dot(a, b.to(a.dtype))
    tl.store(y + p[:, None] * COUT + o[None, :], total.to(y.dtype.element_ty), mask=(p < pixels)[:, None])


@triton.jit
def correlate_few(
    x, grad, partial, parts, each, per_copy,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the same as `correlate`, for images (inputs of few channels) and all taps at once."""
    part = tl.program_id(0)
    begin, end = pixels_of(part, parts, each, per_copy)
    k, o = tl.arange(0, K), tl.arange(0, COUT)
    total = tl.zeros((K, COUT), tl.float32)
    for start in range(begin, end, BLOCK):
        p = start + tl.arange(0, BLOCK)
        g = tl.load(grad + p[:, None] * COUT + o[None, :], mask=(p < end)[:, None], other=0.0)
        total = tl.dot(tl.trans(taps_of(x, p, end, H, W, CIN, K)), g, total)
    at = partial + (part * 9 * CIN + k)[:, None] * COUT + o[None, :]
    tl.store(at, total, mask=(k < 9 * CIN)[:, None])


WEIGHTS = {16: (64, 4, 3), 32: (64, 4, 1), 64: (64, 4, 1)}  # channels -> pixels at once, warps, rows of taps
PROGRAMS = 528  # programs for the gradient of the weights: four per multiprocessor of a large GPU
MANY = 1 << 18  # forward and gradient of the input use cuDNN from this many pixels on with 32 channels, always with 64


def fits(x: Tensor, weight: Tensor, stride: tuple[int, ...]) -> bool:
    """Return whether the kernels support a convolution of this input with this weight, or stack of weights."""
    outputs, inputs, *kernel = weight.shape[-4:]
    known = outputs in CHANNELS and (inputs in CHANNELS or inputs <= 3)
    few_enough = x.numel() // inputs * max(inputs, outputs) < LARGEST
    if weight.ndim == 5:
        # a program of `convolve` reads one copy; cuDNN, which computes the gradients of images, supports no stacks
        most = max(map(_forward_size, (inputs, outputs)))
        known &= x.numel() // inputs // len(weight) % most == 0 and (inputs in CHANNELS or not x.requires_grad)
        known &= weight.numel() < LARGEST and len(weight) < 1 << 16  # the limit of a grid's second dimension
    return known and few_enough and kernel == [3, 3] and stride == (1, 1) and weight.dtype == torch.float32


def forward(x: Tensor, weight: Tensor, by_library: bool) -> Tensor:
    """Return the convolution of channels_last activations, with padding 1; by cuDNN if `by_library`."""
    if by_library:
        return torch.conv2d(x, weight.to(x.dtype), padding=1)
    return _convolve(x, weight, weight.shape[-4], back=False)


def gradient_of_input(grad: Tensor, x: Tensor, weight: Tensor, by_library: bool) -> Tensor:
    """Return the gradient of the input `x`."""
    inputs = weight.shape[-3]
    if by_library or inputs not in CHANNELS:  # the gradient of an image is rarely needed
        sizes = [1, 1], [1, 1], [1, 1], False, [0, 0], 1  # stride, padding, dilation, not transposed, groups
        weight = weight.to(grad.dtype)
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *sizes, [True, False, False])[0]
    return _convolve(grad, weight, inputs, back=True)


def gradient_of_weight(x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the weight, or of each copy in a stack of weights, in float32."""
    outputs, inputs = weight.shape[-4:-2]
    one, copies = (weight, 1) if weight.ndim == 4 else (weight[0], len(weight))
    per_copy = grad.numel() // outputs // copies
    few = inputs not in CHANNELS
    block, warps, rows = (128, 4, 3) if few else WEIGHTS[inputs]
    parts = min(triton.cdiv(per_copy, block), max(1, PROGRAMS * rows // 3 // copies))
    each = triton.cdiv(triton.cdiv(per_copy, parts), block) * block
    parts = triton.cdiv(per_copy, each)
    partial = torch.empty((copies * parts, one.numel()), dtype=torch.float32, device=x.device)
    how = {"K": _columns(9 if few else 3, inputs), "BLOCK": block, **ONE_ROUNDING}
    if not few:
        how |= {"ROWS": rows, "num_warps": warps, "num_stages": 3 if inputs < 64 else 2}
    (correlate_few if few else correlate)[(copies * parts * 3 // rows,)](
        x, grad, partial, parts, each, per_copy, **_sizes(x, outputs), **how
    )
    strides = one.numel(), *torch.empty_like(one).stride()  # each copy in the memory layout of the weight
    out = weight.new_empty_strided((copies, *one.shape), strides)
    grid = triton.cdiv(one.numel(), 32), copies
    add_parts[grid](partial, out, parts, *strides, CIN=inputs, COUT=outputs, COLUMNS=32, BLOCK=32, **ONE_ROUNDING)
    return out if weight.ndim == 5 else out[0]


def _convolve(x: Tensor, weight: Tensor, outputs: int, back: bool) -> Tensor:
    pixels, inputs = x.numel() // x.shape[1], x.shape[1]
    shape = (len(x), outputs, *x.shape[2:])
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    strides = (0, *weight.stride())[-5:]  # by copy, and of one copy
    per_copy = pixels if weight.ndim == 4 else pixels // len(weight)
    few = inputs not in CHANNELS
    block = _forward_size(inputs)
    how = {"K": _columns(9, inputs)} if few else {"BACK": back}
    (convolve_few if few else convolve)[(triton.cdiv(pixels, block),)](
        x, weight, y, pixels, per_copy, *strides, **_sizes(x, outputs), BLOCK=block, **how, **ONE_ROUNDING
    )
    return y


def _forward_size(channels: int) -> int:
    """Return the number of pixels that a program of `convolve` computes from inputs of this many channels."""
    return 256 if channels == 16 else 128


def _sizes(x: Tensor, outputs: int) -> dict[str, int]:
    return {"H": x.shape[2], "W": x.shape[3], "CIN": x.shape[1], "COUT": outputs}


def _columns(taps: int, channels: int) -> int:
    return max(16, triton.next_power_of_2(taps * channels))


class Convolve(torch.autograd.Function):
    """A 3 x 3 convolution with stride 1, padding 1 and no bias, computed by cuDNN or by our kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        channels, pixels = max(weight.shape[-4:-2]), x.numel() // x.shape[1]
        by_library = weight.ndim == 4 and (channels == 64 or (channels == 32 and pixels >= MANY))
        used = weight.to(x.dtype) if by_library else weight
        ctx.save_for_backward(x, used)
        ctx.by_library, ctx.weight = by_library, weight  # the weight is used only for its memory layout
        return forward(x, used, by_library)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, used = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        back = gradient_of_input(grad, x, used, ctx.by_library) if ctx.needs_input_grad[0] else None
        return back, gradient_of_weight(x, grad, ctx.weight) if ctx.needs_input_grad[1] else None
