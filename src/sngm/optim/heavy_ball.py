"""The update that all momentum methods share, in three implementations: single-tensor, foreach and fused.

    x = gain * g + decay * w            (-g for `maximize`)
    v = momentum * v + x
    w = w - rate * (v + decoupled_decay * w)       (`nesterov`: momentum * v + x instead of v)

Here g is the gradient, w the parameter and v the momentum buffer.
Methods differ only in the coefficients. For SNGM, gain is 1/norm; for LARS, gain or rate is lr * ratio. The formula is
not gain * (g + decay / gain * w), because decay / gain * w overflows float32 for small gains.
A coefficient is a number, a 0-d tensor, or a 1-d tensor with one value for each parameter of the bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .buckets import Bucket
from .norms import upcast
from .torch_internals import fused_sgd_

Coefficient = float | Tensor
Tensors = list[Tensor]

# torch's fused kernel takes the gain as 1 - dampening, which in double precision has an error of up to 2**-53. At these
# limits, that is a relative error of up to 2**-27 for float32 and 2**-45 for float64. Smaller gains use foreach.
LEAST_FUSED_GAIN = {torch.float32: 2.0**-26, torch.float64: 2.0**-8}
BUFFER = "momentum_buffer"
SLICE = 1 << 24  # number of elements of low-precision parameters that are copied to float32 at a time


@dataclass(frozen=True, slots=True)
class Rule:
    """The coefficients of one step, named as in the module's docstring. If `rate` is None, only buffers are updated."""

    momentum: Coefficient
    gain: Coefficient = 1.0
    rate: Coefficient | None = 1.0
    decay: Coefficient = 0.0
    decoupled_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    skip: Tensor | None = None  # 0-d bool tensor on the device, true if the step must be skipped

    def with_skip(self, skip: Tensor, dtype: torch.dtype) -> Rule:
        """Return this rule with coefficients on the device of `skip`; if `skip` is true, the step changes nothing."""
        # filled on the device, because a copy from the host would synchronise and could not be captured
        momentum = torch.full((), float(self.momentum), dtype=dtype, device=skip.device)
        momentum = torch.where(skip, torch.ones_like(momentum), momentum)
        return replace(self._with_tensors(lambda c: c.to(skip.device)), momentum=momentum, skip=skip)

    def times(self, factor: Coefficient) -> Rule:
        """Return this rule with `gain` and `decay` multiplied by `factor`."""
        return replace(self, gain=self.gain * factor, decay=self.decay * factor if self.decays else 0.0)

    def select(self, which: int | slice | list[int]) -> Rule:
        """Return this rule for only the tensors at these indices of its bucket."""
        return self._with_tensors(lambda c: c[which] if c.ndim else c)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> Rule:
        """Return this rule with `change` applied to the coefficients that are tensors."""
        values = {"gain": self.gain, "rate": self.rate, "decay": self.decay}
        changed: dict[str, Any] = {name: change(c) for name, c in values.items() if isinstance(c, Tensor)}
        return replace(self, **changed)

    def as_numbers(self, coefficient: Coefficient) -> Any:
        """Return a coefficient as a number or a list of numbers; with `skip`, return it unchanged, on the device."""
        return coefficient.tolist() if self.skip is None and isinstance(coefficient, Tensor) else coefficient

    @property
    def decays(self) -> bool:
        return isinstance(self.decay, Tensor) or self.decay != 0.0

    @property
    def per_tensor(self) -> bool:
        return any(isinstance(c, Tensor) and c.ndim > 0 for c in (self.gain, self.rate, self.decay))


def heavy_ball(bucket: Bucket, rule: Rule, skip: Tensor | bool = False) -> None:
    """Take one step of `rule` on a bucket, with the implementation that the group's `foreach` and `fused` select.

    `skip` is a 0-d bool tensor if only the device knows whether the step must be skipped.
    """
    if isinstance(skip, Tensor):
        skip = skip.to(bucket.device)
        rule = rule.with_skip(skip, torch.float64 if bucket.params[0].dtype == torch.float64 else torch.float32)
    elif bucket.fused and rule.rate is not None:
        return _fused(bucket, rule)
    if not bucket.one_by_one and not bucket.low_precision:
        return _foreach(bucket, rule)
    start = 0
    for part in bucket.slices(1 if bucket.one_by_one else SLICE):
        stop = start + len(part.params)
        copies = [upcast(p) for p in part.params]  # the parameters themselves if they are float32 or better
        _foreach(replace(part, params=copies), rule.select(slice(start, stop)))
        if bucket.low_precision and rule.rate is not None:
            torch._foreach_copy_(part.params, part.rounded(copies))  # the only rounding
        start = stop


def _foreach(bucket: Bucket, rule: Rule) -> None:
    params, grads, buffers = bucket.params, [upcast(g) for g in bucket.grads], bucket.buffers.get(BUFFER)
    gain, rate, decay, skip = -rule.gain if rule.maximize else rule.gain, rule.rate, rule.decay, rule.skip
    if buffers is None:
        assert rate is not None, "without buffers there is nothing but the parameters to update"
        if rule.decays or rule.decoupled_decay:
            axpy_(params, rule.as_numbers(-rate * (decay + rule.decoupled_decay)), params, skip)
        axpy_(params, rule.as_numbers(-rate * gain), grads, skip)
        return
    torch._foreach_mul_(buffers, rule.momentum)
    axpy_(buffers, rule.as_numbers(gain), grads, skip)
    if rule.decays:
        axpy_(buffers, rule.as_numbers(decay), params, skip)
    if rate is None:
        return
    steps: Tensors = buffers
    if rule.nesterov:
        steps = list(torch._foreach_mul(buffers, rule.momentum))
        axpy_(steps, rule.as_numbers(gain), grads, skip)
        if rule.decays:
            axpy_(steps, rule.as_numbers(decay), params, skip)
    if rule.decoupled_decay:  # w - c * w, not (1 - c) * w, because rounding 1 - c would bias the decay
        axpy_(params, rule.as_numbers(-rate * rule.decoupled_decay), params, skip)
    axpy_(params, rule.as_numbers(-rate), steps, skip)


def _fused(bucket: Bucket, rule: Rule) -> None:
    """Step with torch's fused CPU kernel for SGD; use foreach for tensors whose step the kernel would compute wrongly.

    The kernel reads memory in order without checking that all tensors have the same layout, so this function checks it.
    Nesterov steps use foreach, because the kernel ignores their gain. Gains below LEAST_FUSED_GAIN use foreach too,
    because the kernel takes the gain as 1 - dampening and adds decay / gain * w to the gradient, which overflows for
    small gains.
    """
    buffers = bucket.buffers.get(BUFFER)
    served: list[int] = []
    if not rule.nesterov and fused_sgd_ is not None:
        gains, count = rule.as_numbers(rule.gain), len(bucket.params)
        gains = gains if isinstance(gains, list) else [gains] * count
        least = LEAST_FUSED_GAIN[bucket.params[0].dtype]
        alike = matching_layouts(bucket.params, bucket.grads, buffers or bucket.params)
        served = [i for i, fits in enumerate(alike) if fits and gains[i] >= least]
    if len(served) < len(bucket.params):
        rest = sorted(set(range(len(bucket.params))) - set(served))
        _foreach(bucket.select(rest), rule.select(rest))
        if not served:
            return
        bucket, rule = bucket.select(served), rule.select(served)
        buffers = bucket.buffers.get(BUFFER)
    assert rule.rate is not None
    if rule.decoupled_decay:
        axpy_(bucket.params, rule.as_numbers(-rule.rate * rule.decoupled_decay), bucket.params)
    coefficients = [rule.as_numbers(c) for c in (rule.gain, rule.rate, rule.decay)]
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


def matching_layouts(params: Tensors, grads: Tensors, buffers: Tensors) -> list[bool]:
    """Return for each parameter whether its gradient has its dtype, and its gradient and buffer have its layout."""
    if all(map(Tensor.is_contiguous, [*params, *grads, *buffers])) and {g.dtype for g in grads} == {params[0].dtype}:
        return [True] * len(params)
    return [g.dtype == p.dtype and same_layout(p, g, v) for p, g, v in zip(params, grads, buffers, strict=True)]


def same_layout(a: Tensor, b: Tensor, c: Tensor) -> bool:
    """Return whether all three tensors are contiguous, or all are channels-last."""
    if a.is_contiguous() and b.is_contiguous() and c.is_contiguous():
        return True
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(a.ndim)
    return form is not None and all(t.is_contiguous(memory_format=form) for t in (a, b, c))


def update_params(bucket: Bucket, rates: Coefficient, directions: Tensors, skip: Tensor | bool) -> None:
    """Add ``rates[i] * directions[i]`` to each parameter, with one rounding, unless `skip` (as in `heavy_ball`)."""
    on_device = skip.to(bucket.device) if isinstance(skip, Tensor) else None
    by = rates.tolist() if on_device is None and isinstance(rates, Tensor) and rates.ndim else rates
    if bucket.rounding is None:
        axpy_(bucket.params, by, directions, on_device)
    else:
        copies = [upcast(p) for p in bucket.params]
        axpy_(copies, by, directions, on_device)
        torch._foreach_copy_(bucket.params, bucket.rounded(copies))


def axpy_(ys: Tensors, alpha: float | list[float] | Tensor, xs: Tensors, skip: Tensor | None = None) -> None:
    """Compute ``ys[i] += alpha[i] * xs[i]`` for all i, unless `skip`, a 0-d bool tensor, is true.

    `alpha` may also be one number for all i. Values outside the range of the dtype are clamped to it.
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
            product.masked_fill_(skip, 0.0)  # not multiplied by 0, because inf * 0 is NaN
    torch._foreach_add_(ys, products)
