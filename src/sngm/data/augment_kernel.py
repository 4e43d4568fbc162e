"""`augment.training_batch` as one Triton kernel."""

# Triton compiles these functions: they have no type annotations, and upper-case names are compile-time constants.
# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from . import hashing

GOLDEN, FIRST, SECOND = map(tl.constexpr, (hashing.GOLDEN, hashing.FIRST, hashing.SECOND))
MASK = tl.constexpr((1 << hashing.BITS) - 1)


@triton.jit
def shifted(value, BY: tl.constexpr):
    """Return `value` shifted right by BY bits, filled with zeros."""
    return (value >> BY) & ((1 << (64 - BY)) - 1)


@triton.jit
def folded(state, value):
    """Return the hash state after `value` is hashed too, as in `hashing.random_bits`."""
    state = (state ^ value) + GOLDEN
    state = (state ^ shifted(state, 30)) * FIRST
    state = (state ^ shifted(state, 27)) * SECOND
    return state ^ shifted(state, 31)


@triton.jit(do_not_specialize=["seed"])  # Triton would compile the kernel again for a seed of 1
def cut_out(
    images, indices, out, seed, epoch, mean, std,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, PIXELS: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Crop, flip and normalise one image per program; input and output are channels_last."""
    row_of_batch = tl.program_id(0).to(tl.int64)
    index = tl.load(indices + row_of_batch)
    state = tl.full((), 0, tl.int64)
    state = folded(folded(folded(state, seed.to(tl.int64)), tl.load(epoch)), index)
    drawn = state & MASK
    span: tl.constexpr = 2 * PAD + 1
    top, left, flip = drawn % span - PAD, drawn // span % span - PAD, drawn // (span * span) % 2
    pixel = tl.arange(0, PIXELS)
    row, column = pixel // W, pixel % W
    column = tl.where(flip == 1, W - 1 - column, column) + left
    row = row + top
    known = pixel < H * W
    inside = known & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    for c in tl.static_range(C):
        byte = tl.load(images + ((index * H + row) * W + column) * C + c, mask=inside, other=0).to(tl.float32)
        value = (byte - 255 * tl.load(mean + c)) / (255 * tl.load(std + c))
        tl.store(out + (row_of_batch * H * W + pixel) * C + c, value.to(out.dtype.element_ty), mask=known)


def crop_flip_normalise(images, indices, seed, epoch, mean, std, dtype, pad):
    """Return the same batch as `augment.training_batch`."""
    _, channels, height, width = images.shape
    shape = (len(indices), channels, height, width)
    out = torch.empty(shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    sizes = {"H": height, "W": width, "C": channels, "PIXELS": triton.next_power_of_2(height * width), "PAD": pad}
    seed = hashing.wrapped(seed)
    cut_out[(len(indices),)](images, indices, out, seed, epoch, mean, std, **sizes)
    return out
