"""Ghost BatchNorm (over groups of samples) with shortcut and ReLU in four launches: two forward, two backward.

An activation is (groups, rows, channels) in memory; a row is one pixel of one image. In each direction, the first
launch sums over parts of the rows, in a fixed order. Its last program sums over all groups. The second launch is
elementwise. Gamma and beta have the shape (channels), or (groups, channels) if each group has its own; `by_group` is
the stride between the values of two groups: the number of channels if each group has its own, else 0.
"""

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
def rows_of(part, parts, rows):
    """Return the first row of part number `part` of `parts`, and the row after its last."""
    size = tl.cdiv(rows, parts)
    return part * size, tl.minimum(part * size + size, rows)


@triton.jit
def is_last(counter, of):
    """Return whether this is the last of `of` programs to arrive here; it can then read what the others have stored."""
    tl.debug_barrier()  # all threads store before one of them increases the counter
    last = tl.atomic_add(counter, 1, sem="acq_rel") == of - 1
    if last:
        tl.store(counter, 0)  # ready for the next launch
    tl.debug_barrier()
    return last


@triton.jit
def totals(partial, group, C: tl.constexpr, PARTS: tl.constexpr, c):
    """Return the two sums of a group over all its parts; bypass the L1 cache, which lacks stores of other programs."""
    part = tl.arange(0, PARTS)
    at = partial + ((group * PARTS + part) * 2 * C)[:, None] + c[None, :]
    return tl.sum(tl.load(at, cache_modifier=".cg"), 0), tl.sum(tl.load(at + C, cache_modifier=".cg"), 0)


@triton.jit
def sum_rows(
    x, partial, saved, counters, running_mean, running_var, seen, weights,
    rows, groups, keep, counted, eps,
    C: tl.constexpr, CB: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, FOLLOW: tl.constexpr,
):  # fmt: skip
    """Compute mean, 1 / standard deviation and variance of each group, and update the running statistics.

    The sums are over differences from a group's first row, so that a mean far from zero loses no precision. The last
    program of a group adds up the parts of the group. The last of all programs multiplies the running statistics by
    `keep`, adds ``weights[i]`` times the statistics of each group i, and adds `counted` to `seen`, the batch counter.
    """
    group, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    x += group.to(tl.int64) * rows * C
    first = tl.load(x + c).to(tl.float32)
    begin, end = rows_of(part, PARTS, rows)
    one, two = tl.zeros((BLOCK, CB), tl.float32), tl.zeros((BLOCK, CB), tl.float32)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = (row < end)[:, None]
        value = tl.load(x + row[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - first, 0.0)
        one += value
        two += value * value
    at = partial + tl.program_id(0) * 2 * C + c
    tl.store(at, tl.sum(one, 0))
    tl.store(at + C, tl.sum(two, 0))
    counters += tl.program_id(1) * (groups + 1)
    if is_last(counters + group, PARTS):
        sum_one, sum_two = totals(partial, group, C, PARTS, c)
        difference = sum_one / rows
        variance = tl.maximum(sum_two / rows - difference * difference, 0.0)
        at = saved + group * 3 * C + c
        tl.store(at, first + difference)
        tl.store(at + C, 1 / tl.sqrt(variance + eps))
        tl.store(at + 2 * C, variance)
        if FOLLOW and is_last(counters + groups, groups):
            means, variances = tl.zeros((32, CB), tl.float32), tl.zeros((32, CB), tl.float32)
            for start_group in range(0, groups, 32):
                g = start_group + tl.arange(0, 32)
                weight = tl.load(weights + g, mask=g < groups, other=0.0).to(tl.float32)[:, None]
                of = saved + g[:, None] * 3 * C + c[None, :]
                mask = (weight != 0) & (g < groups)[:, None]  # a group of weight 0 may hold NaN
                means += weight * tl.load(of, mask=mask, other=0.0, cache_modifier=".cg")
                variances += weight * tl.load(of + 2 * C, mask=mask, other=0.0, cache_modifier=".cg")
            unbiased = tl.sum(variances, 0) * (rows / tl.maximum(rows - 1, 1))
            tl.store(running_mean + c, tl.load(running_mean + c) * keep + tl.sum(means, 0))
            tl.store(running_var + c, tl.load(running_var + c) * keep + unbiased)
            if tl.program_id(1) == 0:
                tl.store(seen, tl.load(seen) + counted)


@triton.jit
def normalise(
    x, shortcut, y, saved, gamma, beta, by_group, rows,
    C: tl.constexpr, CB: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Compute the outputs: normalise, scale and shift `x`; with SHORTCUT add the shortcut, with RELU apply a ReLU."""
    group, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    mean, scale = tl.load(saved + group * 3 * C + c), tl.load(saved + group * 3 * C + C + c)
    own = group * by_group + c
    slope, shift = tl.load(gamma + own).to(tl.float32), tl.load(beta + own).to(tl.float32)
    base = group.to(tl.int64) * rows * C
    begin, end = rows_of(tile, TILES, rows)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = (row < end)[:, None]
        at = base + row[:, None] * C + c[None, :]
        value = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean) * scale * slope + shift
        if SHORTCUT:
            value += tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            value = tl.where(value > 0, value, tl.where(value != value, value, 0.0))  # NaN stays NaN
        tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def sum_gradients(
    grad, x, y, passed, partial, sums, counters, saved, gamma, beta, by_group, grad_gamma, grad_beta,
    rows, groups,
    C: tl.constexpr, CB: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of the ReLU's input, and its product with the normalised input, over each group and all groups.

    The sums over all groups are the gradients of the parameters, unless each group has its own parameters. With
    SHORTCUT and RELU, the gradient of the ReLU's input, which is that of the shortcut too, is written to `passed`.
    """
    group, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    mean, scale = tl.load(saved + group * 3 * C + c), tl.load(saved + group * 3 * C + C + c)
    own = group * by_group + c
    slope, shift = tl.load(gamma + own).to(tl.float32), tl.load(beta + own).to(tl.float32)
    base = group.to(tl.int64) * rows * C
    begin, end = rows_of(part, PARTS, rows)
    one, two = tl.zeros((BLOCK, CB), tl.float32), tl.zeros((BLOCK, CB), tl.float32)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = (row < end)[:, None]
        at = base + row[:, None] * C + c[None, :]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean) * scale
        if RELU:
            if SHORTCUT:
                above = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) > 0
            else:
                above = normal * slope + shift > 0
            g = tl.where(above, g, 0.0)
        if SHORTCUT and RELU:
            tl.store(passed + at, g.to(passed.dtype.element_ty), mask=inside)
        one += g
        two += g * tl.where(inside, normal, 0.0)
    at = partial + tl.program_id(0) * 2 * C + c
    tl.store(at, tl.sum(one, 0))
    tl.store(at + C, tl.sum(two, 0))
    counters += tl.program_id(1) * (groups + 1)
    if is_last(counters + group, PARTS):
        sum_one, sum_two = totals(partial, group, C, PARTS, c)
        tl.store(sums + group * 2 * C + c, sum_one)
        tl.store(sums + group * 2 * C + C + c, sum_two)
        if is_last(counters + groups, groups):
            ones, twos = tl.zeros((32, CB), tl.float32), tl.zeros((32, CB), tl.float32)
            for start_group in range(0, groups, 32):
                g32 = start_group + tl.arange(0, 32)
                of = sums + g32[:, None] * 2 * C + c[None, :]
                mask = (g32 < groups)[:, None]
                ones += tl.load(of, mask=mask, other=0.0, cache_modifier=".cg")
                twos += tl.load(of + C, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(grad_beta + c, tl.sum(ones, 0))
            tl.store(grad_gamma + c, tl.sum(twos, 0))


@triton.jit
def differentiate(
    grad, x, out, sums, saved, gamma, beta, by_group, rows,
    C: tl.constexpr, CB: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the input."""
    group, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    mean, scale = tl.load(saved + group * 3 * C + c), tl.load(saved + group * 3 * C + C + c)
    own = group * by_group + c
    slope, shift = tl.load(gamma + own).to(tl.float32), tl.load(beta + own).to(tl.float32)
    one, two = tl.load(sums + group * 2 * C + c) / rows, tl.load(sums + group * 2 * C + C + c) / rows
    base = group.to(tl.int64) * rows * C
    begin, end = rows_of(tile, TILES, rows)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = (row < end)[:, None]
        at = base + row[:, None] * C + c[None, :]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean) * scale
        if RELU:  # only without a shortcut: if there is a shortcut, `sum_gradients` has applied the ReLU's mask
            g = tl.where(normal * slope + shift > 0, g, 0.0)
        value = (g - one - normal * two) * (scale * slope)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


class Plan:
    """How an activation is divided among the programs of a launch.

    The channels are divided into `columns` blocks, and the rows of a group into `parts` (to sum) or `tiles` (else).
    """

    def __init__(self, x: Tensor, groups: int) -> None:
        n, channels, height, width = x.shape
        self.groups, self.rows = groups, n // groups * height * width
        block_channels = triton.next_power_of_2(channels) if channels <= 64 else 64
        self.shape = {"C": channels, "CB": block_channels, "BLOCK": 2048 // block_channels}
        columns = channels // block_channels
        # enough programs for a GPU of some hundred multiprocessors, and enough rows for each program to be efficient
        most = max(1, self.rows // (2 * self.shape["BLOCK"]))
        self.parts = min(128, power_below(most), power_below(max(1, 1024 // (groups * columns))))
        self.tiles = min(128, power_below(most), power_below(max(1, 4096 // (groups * columns))))
        self.columns = columns

    @staticmethod
    def fits(channels: int) -> bool:
        """Return True if the kernels support this number of channels."""
        return channels % 64 == 0 or (channels < 64 and channels & (channels - 1) == 0)


def power_below(n: int) -> int:
    """Return the largest power of two <= n."""
    return 1 << (n.bit_length() - 1)


def by_group(gamma: Tensor) -> int:
    """Return the stride from the parameters of one group to those of the next."""
    return gamma.shape[1] if gamma.ndim == 2 else 0


class Normalise(torch.autograd.Function):
    """The forward pass of `GhostBatchNorm2d` in training, and its gradients, on channels_last activations.

    `counters` are zeros, (groups + 1) per 64 channels. They belong to the layer, and no two launches may use them at
    the same time. `running` holds arguments of `sum_rows` from `running_mean` to `weights`, `keep` and `counted`; None
    updates no running statistics.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor | None, gamma: Tensor, beta: Tensor, groups: int, relu: bool, eps: float,
        counters: Tensor, running: tuple[Tensor, Tensor, Tensor, Tensor, float, int] | None,
    ) -> Tensor:  # fmt: skip
        plan = Plan(x, groups)
        partial = x.new_empty(groups * plan.parts, 2, x.shape[1], dtype=torch.float32)
        saved = x.new_empty(groups, 3, x.shape[1], dtype=torch.float32)
        y = torch.empty_like(x)
        mean, var, seen, weights, keep, counted = running or (saved, saved, counters, saved, 0.0, 0)
        sum_rows[groups * plan.parts, plan.columns](
            x, partial, saved, counters, mean, var, seen, weights, plan.rows, groups, keep, counted, eps,
            PARTS=plan.parts, FOLLOW=running is not None, **plan.shape, **ONE_ROUNDING,
        )  # fmt: skip
        normalise[groups * plan.tiles, plan.columns](
            x, x if shortcut is None else shortcut, y, saved, gamma, beta, by_group(gamma), plan.rows,
            TILES=plan.tiles, SHORTCUT=shortcut is not None, RELU=relu, **plan.shape, **ONE_ROUNDING,
        )  # fmt: skip
        ctx.save_for_backward(x, y if relu and shortcut is not None else None, saved, gamma, beta, counters)
        ctx.plan, ctx.relu, ctx.shortcut = plan, relu, shortcut is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, saved, gamma, beta, counters = ctx.saved_tensors
        plan: Plan = ctx.plan
        grad = grad.contiguous(memory_format=torch.channels_last)
        partial = x.new_empty(plan.groups * plan.parts, 2, x.shape[1], dtype=torch.float32)
        sums = x.new_empty(plan.groups, 2, x.shape[1], dtype=torch.float32)
        out, grad_gamma, grad_beta = torch.empty_like(x), gamma.new_empty(x.shape[1]), beta.new_empty(x.shape[1])
        passed = torch.empty_like(x) if ctx.shortcut and ctx.relu else grad
        sum_gradients[plan.groups * plan.parts, plan.columns](
            grad, x, x if y is None else y, passed, partial, sums, counters, saved, gamma, beta, by_group(gamma),
            grad_gamma, grad_beta, plan.rows, plan.groups,
            PARTS=plan.parts, SHORTCUT=ctx.shortcut, RELU=ctx.relu, **plan.shape, **ONE_ROUNDING,
        )  # fmt: skip
        differentiate[plan.groups * plan.tiles, plan.columns](
            passed, x, out, sums, saved, gamma, beta, by_group(gamma), plan.rows,
            TILES=plan.tiles, RELU=ctx.relu and not ctx.shortcut, **plan.shape, **ONE_ROUNDING,
        )  # fmt: skip
        if gamma.ndim == 2:
            grad_beta, grad_gamma = sums.unbind(1)
        return out, passed if ctx.shortcut else None, grad_gamma, grad_beta, None, None, None, None, None
