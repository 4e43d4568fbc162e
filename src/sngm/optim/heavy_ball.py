"""The one update that all momentum methods here share, in three speeds.

    d = g + decay * w                   (g with its sign turned for `maximize`)
    x = gain * d
    v = momentum * v + x
    w = w - rate * (v + pull * w)       (`nesterov`: momentum * v + x in place of v)

Methods differ only in the coefficients: SNGM has gain = 1/||d||, LARS has lr * ratio as gain or as rate.
A coefficient is a number, a 0-d tensor, or a 1-d tensor with one value for each parameter of the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .norms import wide
from .torch_internals import fused_sgd_
from .work import Bucket

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
    on_host: bool = True  # coefficients may be read without waiting for a device

    def unless(self, skip: Tensor, dtype: torch.dtype) -> Rule:
        """This rule where `skip` is false, and one that changes nothing where it is true."""

        def choose(value: Coefficient, instead: float) -> Tensor:
            if isinstance(value, Tensor):
                return torch.where(skip, instead, value.to(skip.device, dtype))
            # filled on the device: a copy from the host would wait, and could not be captured
            full = torch.full((), value, dtype=dtype, device=skip.device)
            return torch.where(skip, torch.full_like(full, instead), full)

        return replace(
            self,
            momentum=choose(self.momentum, 1.0),
            gain=choose(self.gain, 0.0),
            rate=None if self.rate is None else choose(self.rate, 0.0),
            decay=choose(self.decay, 0.0) if isinstance(self.decay, Tensor) else self.decay,
            on_host=False,
        )

    def of(self, which: int | slice | list[int]) -> Rule:
        """This rule for one, or some, of the bucket's tensors."""

        def pick(c: Any) -> Any:
            return c[which] if isinstance(c, Tensor) and c.ndim else c

        return replace(self, gain=pick(self.gain), rate=pick(self.rate), decay=pick(self.decay))

    def known(self, coefficient: Coefficient) -> Any:
        """`coefficient` as the number, or list of numbers, that a kernel can be called with."""
        return coefficient.tolist() if self.on_host and isinstance(coefficient, Tensor) else coefficient

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
        bucket = replace(bucket, grads=[g.masked_fill(skip, 0.0) for g in bucket.grads])  # 0 * inf would be NaN
    elif (fused or (fused is None and foreach is None)) and not bucket.low_precision and rule.rate is not None:
        return _fused(bucket, rule)
    # torch 2.13 loses what a compiled step writes into a 0-d float64 tensor on the CPU by add_ or copy_, not by foreach
    if foreach is False and not fused and not torch.compiler.is_compiling():
        _single_tensor(bucket, rule)
    elif not bucket.low_precision:
        _foreach(bucket, rule)
    else:
        start = 0
        for part in bucket.slices(SLICE):
            stop = start + len(part.params)
            copies = [wide(p) for p in part.params]
            _foreach(replace(part, params=copies, grads=[wide(g) for g in part.grads]), rule.of(slice(start, stop)))
            if rule.rate is not None:
                torch._foreach_copy_(part.params, part.rounded(copies))  # the one rounding
            start = stop


def _single_tensor(bucket: Bucket, rule: Rule) -> None:
    buffers = bucket.buffers.get(BUFFER)
    for i, (p, g) in enumerate(zip(bucket.params, bucket.grads, strict=True)):
        one = rule.of(i) if rule.per_tensor else rule
        w = wide(p)
        d = -wide(g) if one.maximize else wide(g)
        if one.decays:
            d = d + one.known(one.decay) * w
        x = one.known(one.gain) * d
        v = x
        if buffers is not None:
            v = buffers[i].mul_(one.momentum).add_(x)
            if one.nesterov:
                v = one.momentum * v + x
        if one.rate is not None:
            if one.pull:
                v = v + one.pull * w
            p.copy_(bucket.some([i]).rounded([w - one.known(one.rate) * v])[0])


def _foreach(bucket: Bucket, rule: Rule) -> None:
    params, grads, buffers = bucket.params, bucket.grads, bucket.buffers.get(BUFFER)
    gain, rate = rule.gain, rule.rate
    to_grads = rule.known(-gain if rule.maximize else gain)
    to_params = rule.known(gain * rule.decay)
    if buffers is None:
        assert rate is not None, "without buffers there is nothing but the parameters to update"
        if rule.decays or rule.pull:
            axpy_(params, rule.known(-rate * (gain * rule.decay + rule.pull)), params)
        axpy_(params, rule.known(rate * (gain if rule.maximize else -gain)), grads)
        return
    torch._foreach_mul_(buffers, rule.momentum)
    axpy_(buffers, to_grads, grads)
    if rule.decays:
        axpy_(buffers, to_params, params)
    if rate is None:
        return
    steps: Tensors = buffers
    if rule.nesterov:
        steps = list(torch._foreach_mul(buffers, rule.momentum))
        axpy_(steps, to_grads, grads)
        if rule.decays:
            axpy_(steps, to_params, params)
    if rule.pull:  # w - c * w, not (1 - c) * w: rounding 1 - c would bias the decay the same way every step
        axpy_(params, rule.known(-rate * rule.pull), params)
    axpy_(params, rule.known(-rate), steps)


def _fused(bucket: Bucket, rule: Rule) -> None:
    """torch's CPU kernel for SGD where its arithmetic is ours; foreach for the rest.

    The kernel walks memory in order without checking that all tensors lie alike, so we do. Its nesterov step
    would use the raw gradient, and its gain is 1 - dampening (see LEAST_FUSED_GAIN).
    """
    buffers = bucket.buffers.get(BUFFER)
    served: list[int] = []
    if not rule.nesterov and fused_sgd_ is not None:
        gains, count = rule.known(rule.gain), len(bucket.params)
        gains = gains if isinstance(gains, list) else [gains] * count
        least = 0.0 if buffers is None else LEAST_FUSED_GAIN[bucket.params[0].dtype]
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
            weight_decay=decay,
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


def move(bucket: Bucket, rates: list[float] | Tensor, directions: Tensors) -> None:
    """Step each parameter by ``rates[i] * directions[i]``, with one rounding."""
    if bucket.rounding is None:
        axpy_(bucket.params, rates, directions)
    else:
        copies = [wide(p) for p in bucket.params]
        axpy_(copies, rates, directions)
        torch._foreach_copy_(bucket.params, bucket.rounded(copies))


def axpy_(ys: Tensors, alpha: float | list[float] | Tensor, xs: Tensors) -> None:
    """``ys[i] += alpha[i] * xs[i]`` for all i."""
    if not isinstance(alpha, Tensor):
        most = torch.finfo(xs[0].dtype).max  # torch refuses a number that the dtype cannot hold
    if isinstance(alpha, list):
        for y, x, a in zip(ys, xs, alpha, strict=True):
            y.add_(x, alpha=max(min(a, most), -most))
    elif not isinstance(alpha, Tensor):
        torch._foreach_add_(ys, xs, alpha=max(min(alpha, most), -most))
    elif alpha.ndim == 0:
        torch._foreach_add_(ys, torch._foreach_mul(xs, alpha))
    else:
        torch._foreach_add_(ys, [x * a for x, a in zip(xs, alpha.unbind(), strict=True)])
