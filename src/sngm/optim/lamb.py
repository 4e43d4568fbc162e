"""LAMB: layer-wise adaptive learning rates for Adam."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import checks, norms
from .base import LargeBatchOptimizer, settings_in
from .buckets import Bucket, Work
from .heavy_ball import Coefficient, axpy_, same_layout, update_params
from .lars import adapted_rate, bounds, clip
from .norms import upcast
from .torch_internals import fused_adam_

SLICE = 1 << 22  # number of elements whose direction is computed at a time, to limit the memory of a step


class LAMB(LargeBatchOptimizer):
    r"""Layer-wise adaptive moments.

    For each tensor w with gradient g and moments m and v, step t is:

    .. math::
        m = \beta_1 m + (1-\beta_1) g, \quad v = \beta_2 v + (1-\beta_2) g^2, \quad
        q = \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon} + \lambda w, \quad
        w = w - \eta \frac{\phi(\|w\|)}{\|q\|} q

    If :math:`\phi(\|w\|)` or :math:`\|q\|` is zero, their ratio is replaced by 1, and the step is :math:`-\eta q`.
    The group key ``adapt=False`` replaces the ratio by 1 for all tensors of a group; with None or True, the ratio
    applies to every tensor, as published.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate :math:`\eta`, a number or a one-element tensor.
        betas: :math:`\beta_1` and :math:`\beta_2`, each in [0, 1).
        eps: :math:`\epsilon`, added to the root of the second moment; more than 0.
        weight_decay: :math:`\lambda`, at least 0.
        bias_correction: divide the moments by :math:`1-\beta^t`.
        phi: the limits (low, high) to which :math:`\phi` clips :math:`\|w\|`; None for :math:`\phi(\|w\|) = \|w\|`.
        max_grad_norm: clip the gradients of all parameters to this global norm before the step; None for no clipping.
            Some libraries clip to 1 by default.
        maximize, foreach, fused, capturable, stochastic_rounding, norm_group: as in :class:`SNGM`.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = LAMB([w], lr=0.1)
        >>> (w * torch.tensor([[1.0, -1.0]])).sum().backward()
        >>> optimizer.step()  # q = (1, -1), ||w|| = 5: a step of length 0.5
        >>> w.data
        tensor([[2.6464, 4.3536]])

    Cost: 8 bytes of state per float32 parameter. A step of the CUDA kernels reads and writes 44 bytes of memory per
    parameter (Adam: 28), and a fused step on the CPU 60 bytes.

    Reference: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020,
    Algorithm 2.
    """

    KERNEL = "lamb"
    BUFFERS = ("exp_avg", "exp_avg_sq")
    COUNTS = ("step",)
    TORCH_KEYS: ClassVar[dict[str, Any]] = {}  # torch's Adam fills in missing keys

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        phi: tuple[float, float] | None = None,
        max_grad_norm: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        stochastic_rounding: bool = False,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, settings_in(locals()) | {"adapt": None}, norm_group=norm_group)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        # eps = 0 would give 0 / 0 for an element that never had a gradient
        checks.number("eps", group["eps"], torch.finfo(torch.float32).tiny)

    def _needs_buffers(self, group: dict[str, Any]) -> bool:
        return True

    def _adapts(self, bucket: Bucket) -> list[bool]:
        return [bucket.group["adapt"] is not False] * len(bucket.owners)

    def _kernel_settings(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        beta1, beta2 = group["betas"]
        return {**super()._kernel_settings(group), **bounds(group["phi"]), "momentum": beta1, "beta2": beta2}

    def _step(self, work: Work) -> None:
        total = work.sums([self._squares(bucket, work.scale) for bucket in work.buckets])[0]
        skip = self._skip(work, total)
        if skip is True:
            return
        norm = total.sqrt() / work.scale
        slices = [part for bucket in work.buckets for part in bucket.slices(1 if bucket.one_by_one else SLICE)]
        # shards need one all-reduce for the norms of all tensors; else compute slice by slice, to save memory
        for round in [work.buckets] if work.shards.active else [[part] for part in slices]:
            directions = [self._direction(bucket, norm, work.scale, skip) for bucket in round]
            squares = [
                torch.stack([norms.squares(b.params), norms.squares(q)]) for b, q in zip(round, directions, strict=True)
            ]
            squares, _ = work.tensor_squares(squares, kinds=2, buckets=round)
            for bucket, q, (w_square, q_square) in zip(round, directions, squares, strict=True):
                size, q_norm = clip(w_square.sqrt(), bucket.group["phi"]), q_square.sqrt()
                rate = adapted_rate(self, bucket, size / q_norm, (size > 0) & (q_norm > 0), limit=math.inf)
                update_params(bucket, -rate, q, skip)

    def _squares(self, bucket: Bucket, scale: float | Tensor) -> Tensor:
        """Return the squared norm of each gradient, or inf (which skips the step) if exp_avg_sq could overflow."""
        squares = norms.squares(bucket.grads)
        if bucket.group["max_grad_norm"] is not None:
            return squares
        if isinstance(scale, Tensor):
            scale = scale.to(bucket.device)
        most = math.sqrt(torch.finfo(bucket.buffers["exp_avg_sq"][0].dtype).max)
        return torch.where(squares.sqrt() / scale > most, math.inf, squares)

    def _direction(self, bucket: Bucket, norm: Tensor, scale: float | Tensor, skip: Tensor | bool) -> list[Tensor]:
        """Update the moments, and return q (see the class) for each tensor; `norm` is the norm of all gradients."""
        group = bucket.group
        grads = [g.to(m.dtype) for g, m in zip(bucket.grads, bucket.buffers["exp_avg"], strict=True)]
        factor: Coefficient = 1.0 / scale
        if group["max_grad_norm"] is not None:
            factor = factor * (group["max_grad_norm"] / norm.to(bucket.device)).clamp_max(1.0)
        if not isinstance(skip, Tensor):
            factor = float(factor)
        if isinstance(factor, Tensor) or factor != 1.0:
            grads = [g * factor for g in grads]
        if isinstance(skip, Tensor):  # after the multiplication, because the factor may be NaN too
            grads = [g.masked_fill(skip.to(bucket.device), 0.0) for g in grads]
            taken = (~skip).to(bucket.device, torch.float32)
            if torch.compiler.is_compiling():  # see `_gather`: a count has one element
                for count in bucket.counts:
                    count += taken
            else:
                torch._foreach_add_(bucket.counts, [taken] * len(grads))
        else:
            torch._foreach_add_(bucket.counts, 1.0)
            if bucket.fused and _fused_serves(bucket, grads):
                return _fused(bucket, grads)
        return _foreach(bucket, grads, skip)


def _foreach(bucket: Bucket, grads: list[Tensor], skip: Tensor | bool) -> list[Tensor]:
    group = bucket.group
    ms, vs = bucket.buffers["exp_avg"], bucket.buffers["exp_avg_sq"]
    keep1, keep2 = group["betas"]
    if isinstance(skip, Tensor):  # a skipped step keeps the moments as they are
        there = skip.to(bucket.device)
        keep1, keep2 = (torch.where(there, ms[0].new_ones(()), ms[0].new_full((), beta)) for beta in group["betas"])
    torch._foreach_mul_(ms, keep1)
    torch._foreach_add_(ms, grads, alpha=(group["betas"][0] - 1.0) if group["maximize"] else 1.0 - group["betas"][0])
    torch._foreach_mul_(vs, keep2)
    torch._foreach_addcmul_(vs, grads, grads, value=1.0 - group["betas"][1])
    correction1, correction2 = _corrections(group, torch.stack(bucket.counts))
    qs = list(torch._foreach_sqrt(vs))
    _scale_(qs, correction2**-0.5)
    torch._foreach_add_(qs, group["eps"])
    torch._foreach_reciprocal_(qs)
    torch._foreach_mul_(qs, ms)
    _scale_(qs, 1.0 / correction1)
    if group["weight_decay"]:
        axpy_(qs, group["weight_decay"], [upcast(p) for p in bucket.params])
    return qs


def _fused_serves(bucket: Bucket, grads: list[Tensor]) -> bool:
    """Return whether torch's fused Adam, which reads memory in order, can take the step of all tensors."""
    quads = zip(bucket.params, grads, *bucket.buffers.values(), strict=True)
    return fused_adam_ is not None and all(
        g.dtype == p.dtype and same_layout(p, g, m) and same_layout(p, m, v) for p, g, m, v in quads
    )


def _fused(bucket: Bucket, grads: list[Tensor]) -> list[Tensor]:
    """Update the moments and return weight_decay * w + Adam's direction, which torch's fused Adam adds if lr is -1."""
    group = bucket.group
    ms, vs = bucket.buffers["exp_avg"], bucket.buffers["exp_avg_sq"]
    qs = list(torch._foreach_mul(bucket.params, group["weight_decay"]))
    steps = bucket.counts
    if not group["bias_correction"]:
        steps = [torch.full_like(step, math.inf) for step in steps]  # beta**inf = 0: no correction
    fused_adam_(
        qs,
        grads,
        ms,
        vs,
        [],
        steps,
        lr=-1.0,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )
    return qs


def _corrections(group: dict[str, Any], step: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 - beta**step for both betas, or ones without bias correction."""
    if not group["bias_correction"]:
        return torch.ones_like(step), torch.ones_like(step)
    step = step.to(norms.sum_dtype(step.device)).clamp_min(1.0)  # the count is 0 if every step so far was skipped
    return 1.0 - group["betas"][0] ** step, 1.0 - group["betas"][1] ** step


def _scale_(tensors: list[Tensor], by: Tensor) -> None:
    """Multiply tensors[i] by by[i], in place."""
    if by.device.type == "cpu" and not torch.compiler.is_compiling():
        torch._foreach_mul_(tensors, by.tolist())
    else:
        torch._foreach_mul_(tensors, list(by.to(tensors[0].dtype).unbind()))
