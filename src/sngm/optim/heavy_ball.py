"""The one update that all momentum methods here share, in three speeds.

    x = gain * g + decay * w            (g with its sign turned for `maximize`)
    v = momentum * v + x
    w = w - rate * (v + pull * w)       (`nesterov`: momentum * v + x in place of v)

Methods differ only in the coefficients: SNGM has gain = 1/norm, LARS has lr * ratio as gain or as rate. The gain does
not multiply the decay, because for small gains g + decay / gain * w overflows float32.
A coefficient is a number, a 0-d tensor, or a 1-d tensor with one value for each parameter of the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .buckets import Bucket
from .norms import wide
from .torch_internals import fused_sgd_

Coefficient = float | Tensor
Tensors = list[Tensor]

# torch's fused kernel takes the gain as 1 - dampening, which in double precision is off by up to 2**-53.
# A gain below these would lose more than the dtype can show, and goes through foreach.
LEAST_FUSED_GAIN = {torch.float32: 2.0**-26, torch.float64: 2.0**-8}
BUFFER = "momentum_buffer"
SLICE = 1 << 24  # low-precision parameters are worked on as float32 copies, about this many elements at a time


@dataclass(frozen=True, slots=True)
class Rule:
    """The coefficients of one step. `rate` None: update the buffers only."""

    momentum: Coefficient
    gain: Coefficient = 1.0
    rate: Coefficient | None = 1.0
    decay: Coefficient = 0.0
    pull: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    skip: Tensor | None = None  # 0-d bool: where only the device knows whether the step may be taken

    def unless(self, skip: Tensor, dtype: torch.dtype) -> Rule:
        """Return this rule with coefficients on the device of `skip`, to change nothing where `skip` is true."""

        def there(value: Any) -> Any:
            return value.to(skip.device) if isinstance(value, Tensor) else value

        # filled on the device: a copy from the host would wait, and could not be captured
        momentum = torch.full((), float(self.momentum), dtype=dtype, device=skip.device)
        return replace(
            self,
            momentum=torch.where(skip, torch.ones_like(momentum), momentum),
            gain=there(self.gain),
            rate=there(self.rate),
            decay=there(self.decay),
            skip=skip,
        )

    def times(self, factor: Coefficient) -> Rule:
        """Return this rule with `factor` times the gradient and the decay."""
        return replace(self, gain=self.gain * factor, decay=self.decay * factor if self.decays else 0.0)

    def of(self, which: int | slice | list[int]) -> Rule:
        """This rule for one, or some, of the bucket's tensors."""

        def pick(c: Any) -> Any:
            return c[which] if isinstance(c, Tensor) and c.ndim else c

        return replace(self, gain=pick(self.gain), rate=pick(self.rate), decay=pick(self.decay))

    def known(self, coefficient: Coefficient) -> Any:
        """`coefficient` as the number, or list of numbers, that a kernel can be called with."""
        return coefficient.tolist() if self.skip is None and isinstance(coefficient, Tensor) else coefficient

    @property
    def decays(self) -> bool:
        return isinstance(self.decay, Tensor) or self.decay != 0.0

    @property
    def per_tensor(self) -> bool:
        return any(isinstance(c, Tensor) and c.ndim > 0 for c in (self.gain, self.rate, self.decay))


def heavy_ball(bucket: Bucket, rule: Rule, skip: Tensor | bool = False) -> None:
    """Take one step of `rule` in the way the group's flags ask for.

    `skip` is a 0-d bool tensor where only the device knows whether the step may be taken.
    """
    foreach, fused = bucket.group["foreach"], bucket.group["fused"]
    if isinstance(skip, Tensor):
        skip = skip.to(bucket.device)
        rule = rule.unless(skip, torch.float64 if bucket.params[0].dtype == torch.float64 else torch.float32)
    elif (fused or (fused is None and foreach is None)) and not bucket.low_precision and rule.rate is not None:
        return _fused(bucket, rule)
    one_by_one = foreach is False and not fused
    if not one_by_one and not bucket.low_precision:
        return _foreach(bucket, rule)
    start = 0
    for part in bucket.slices(1 if one_by_one else SLICE):
        stop = start + len(part.params)
        copies = [wide(p) for p in part.params]  # the parameters themselves where they are wide
        _foreach(replace(part, params=copies), rule.of(slice(start, stop)))
        if bucket.low_precision and rule.rate is not None:
            torch._foreach_copy_(part.params, part.rounded(copies))  # the one rounding
        start = stop


def _foreach(bucket: Bucket, rule: Rule) -> None:
    params, grads, buffers = bucket.params, [wide(g) for g in bucket.grads], bucket.buffers.get(BUFFER)
    gain, rate, decay, skip = -rule.gain if rule.maximize else rule.gain, rule.rate, rule.decay, rule.skip
    if buffers is None:
        assert rate is not None, "without buffers there is nothing but the parameters to update"
        if rule.decays or rule.pull:
            axpy_(params, rule.known(-rate * (decay + rule.pull)), params, skip)
        axpy_(params, rule.known(-rate * gain), grads, skip)
        return
    torch._foreach_mul_(buffers, rule.momentum)
    axpy_(buffers, rule.known(gain), grads, skip)
    if rule.decays:
        axpy_(buffers, rule.known(decay), params, skip)
    if rate is None:
        return
    steps: Tensors = buffers
    if rule.nesterov:
        steps = list(torch._foreach_mul(buffers, rule.momentum))
        axpy_(steps, rule.known(gain), grads, skip)
        if rule.decays:
            axpy_(steps, rule.known(decay), params, skip)
    if rule.pull:  # w - c * w, not (1 - c) * w: rounding 1 - c would bias the decay the same way every step
        axpy_(params, rule.known(-rate * rule.pull), params, skip)
    axpy_(params, rule.known(-rate), steps, skip)


def _fused(bucket: Bucket, rule: Rule) -> None:
    """torch's CPU kernel for SGD where its arithmetic is ours; foreach for the rest.

    The kernel walks memory in order without checking that all tensors lie alike, so we do. Its nesterov step
    would use the raw gradient, and its gain is 1 - dampening (see LEAST_FUSED_GAIN). It adds decay / gain * w to the
    gradient, which a small gain would make too large.
    """
    buffers = bucket.buffers.get(BUFFER)
    served: list[int] = []
    if not rule.nesterov and fused_sgd_ is not None:
        gains, count = rule.known(rule.gain), len(bucket.params)
        gains = gains if isinstance(gains, list) else [gains] * count
        least = LEAST_FUSED_GAIN[bucket.params[0].dtype]
        alike = all_lie_alike(bucket.params, bucket.grads, buffers or bucket.params)
        served = [i for i, fits in enumerate(alike) if fits and gains[i] >= least]
    if len(served) < len(bucket.params):
        rest = sorted(set(range(len(bucket.params))) - set(served))
        _foreach(bucket.some(rest), rule.of(rest))
        if not served:
            return
        bucket, rule = bucket.some(served), rule.of(served)
        buffers = bucket.buffers.get(BUFFER)
    assert rule.rate is not None
    if rule.pull:
        axpy_(bucket.params, rule.known(-rule.rate * rule.pull), bucket.params)
    coefficients = [rule.known(c) for c in (rule.gain, rule.rate, rule.decay)]
    runs = [(bucket.params, bucket.grads, buffers or [], *coefficients)]
    if rule.per_tensor:
        count = len(bucket.params)
        each = [c if isinstance(c, list) else [c] * count for c in coefficients]
        lists = ([[t] for t in tensors] for tensors in (bucket.params, bucket.grads))
        runs = list(zip(*lists, [[v] for v in buffers] if buffers else [[]] * count, *each, strict=True))
    for params, grads, some, gain, rate, decay in runs:
        fused_sgd_(
            params,
            grads,
            some,
            weight_decay=decay / gain,
            momentum=float(rule.momentum) if some else 0.0,
            lr=rate if some else rate * gain,
            dampening=1.0 - gain if some else 0.0,
            nesterov=False,
            maximize=rule.maximize,
            is_first_step=False,
        )


def all_lie_alike(params: Tensors, grads: Tensors, buffers: Tensors) -> list[bool]:
    """For each parameter, whether gradient and buffer have its dtype and all are dense in memory in the same order."""
    if all(map(Tensor.is_contiguous, [*params, *grads, *buffers])) and {g.dtype for g in grads} == {params[0].dtype}:
        return [True] * len(params)
    return [g.dtype == p.dtype and lie_alike(p, g, v) for p, g, v in zip(params, grads, buffers, strict=True)]


def lie_alike(a: Tensor, b: Tensor, c: Tensor) -> bool:
    """Whether all are dense in memory in the same order."""
    if a.is_contiguous() and b.is_contiguous() and c.is_contiguous():
        return True
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(a.ndim)
    return form is not None and all(t.is_contiguous(memory_format=form) for t in (a, b, c))


def move(bucket: Bucket, rates: list[float] | Tensor, directions: Tensors, skip: Tensor | None = None) -> None:
    """Step each parameter by ``rates[i] * directions[i]``, with one rounding; leave all as they are where `skip`."""
    if bucket.rounding is None:
        axpy_(bucket.params, rates, directions, skip)
    else:
        copies = [wide(p) for p in bucket.params]
        axpy_(copies, rates, directions, skip)
        torch._foreach_copy_(bucket.params, bucket.rounded(copies))


def axpy_(ys: Tensors, alpha: float | list[float] | Tensor, xs: Tensors, skip: Tensor | None = None) -> None:
    """``ys[i] += alpha[i] * xs[i]`` for all i; nothing where `skip`, a 0-d bool tensor, is true.

    An alpha that the dtype cannot hold is replaced by the largest number that it can.
    """
    most = torch.finfo(xs[0].dtype).max
    if isinstance(alpha, list):
        for y, x, a in zip(ys, xs, alpha, strict=True):
            y.add_(x, alpha=max(min(a, most), -most))
        return
    if isinstance(alpha, Tensor):
        alpha = alpha.to(xs[0].device, xs[0].dtype).clamp(-most, most)
    else:
        alpha = max(min(alpha, most), -most)
        if skip is None:
            return torch._foreach_add_(ys, xs, alpha=alpha)
    products = torch._foreach_mul(xs, list(alpha.unbind()) if isinstance(alpha, Tensor) and alpha.ndim else alpha)
    if skip is not None:
        for product in products:
            product.masked_fill_(skip, 0.0)  # not a product with 0, which for inf and NaN is NaN
    torch._foreach_add_(ys, products)
