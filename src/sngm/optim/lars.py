"""LARS in its three published versions: layer-wise adaptive learning rates for momentum SGD."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import norms
from .base import LargeBatchOptimizer, lr_of, settings_in
from .buckets import Bucket, Work
from .heavy_ball import Rule, heavy_ball, update_params
from .kernels.table_schema import VARIANTS

MAX_RATIO = 1e35  # largest ratio, so that lr times the ratio does not overflow float32


class LARS(LargeBatchOptimizer):
    r"""Layer-wise adaptive rate scaling.

    For each tensor w with gradient g and momentum buffer v, let :math:`d = g + \lambda w` and
    :math:`r = c\,\phi(\|w\|) / (\|g\| + \lambda\|w\| + \epsilon)`. Then a step is:

    =============  =====================================================  =======================================
    variant        rule                                                   source
    =============  =====================================================  =======================================
    "you2017"      :math:`v = mv + \eta r d,\; w = w - v`                 You, Gitman and Ginsburg, 2017
    "unscaled"     :math:`v = mv + d,\; w = w - \eta r v`                 the code the SNGM paper names, with
                                                                          ``max_ratio=50, clamp_grad=10``
    "momentum"     :math:`v = mv + (1-m)d,\;                              You et al., 2020, Algorithm 1 (beside
                   w = w - \eta c\,\phi(\|w\|)/\|v\|\; v`                 LAMB); no :math:`\epsilon`
    =============  =====================================================  =======================================

    The group key `adapt` selects the tensors whose step is scaled by the ratio r: True selects all tensors, False none,
    None (the default) those of more than one dimension. The other tensors take plain momentum steps with the group's
    `lr` and weight decay. With the usual c = 0.001, a typical `lr` of LARS is many times that of momentum SGD. If this
    is too large for the other tensors, put them into a group with a smaller `lr`.

    If :math:`\phi(\|w\|)` or the denominator is zero, r is 1, as in the published code; with r = 0, a tensor of zeros
    would never change. (If the gradient is zero and weight decay is not, the published code uses 1 too, but this class
    uses the formula.)

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate :math:`\eta`, a number or a one-element tensor.
        momentum: m, in [0, 1).
        weight_decay: :math:`\lambda`, at least 0.
        variant: "you2017", "unscaled" or "momentum".
        trust_coefficient: c; None stands for 0.001, or for 1.0 with variant "momentum".
        phi: the limits (low, high) to which :math:`\phi` clips :math:`\|w\|`; None for :math:`\phi(\|w\|) = \|w\|`.
        eps: :math:`\epsilon` in the denominator of r, at least 0.
        max_ratio: upper limit of r (of :math:`c\,\phi(\|w\|)/\|v\|` for "momentum"); None for no limit.
        clamp_grad: clamp each element of d to [-clamp_grad, clamp_grad]; None for no clamping.
        maximize, foreach, fused, capturable, stochastic_rounding, norm_group: as in :class:`SNGM`. On a CPU, variant
            "momentum" has no fused step and uses foreach.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(2, 2))
        >>> optimizer = LARS([w], lr=1.0, trust_coefficient=0.1)
        >>> (10.0 * w).sum().backward()
        >>> optimizer.step()  # ||w|| = 2, ||g|| = 20: the ratio is 0.01
        >>> w.data
        tensor([[0.9000, 0.9000],
                [0.9000, 0.9000]])

    Cost: 4 bytes of state per float32 parameter. A step of the CUDA kernels, or a fused step on the CPU without
    `clamp_grad`, reads and writes 28 bytes of memory per parameter (SGD: 20). With variant "momentum" a step of the
    CUDA kernels moves 36 bytes.

    References: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017; You et al.,
    "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020.
    """

    KERNEL = "lars"
    CHOICES: ClassVar = {"variant": VARIANTS}
    TORCH_KEYS: ClassVar[dict[str, Any]] = {"dampening": 0.0, "nesterov": False}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        variant: str = "you2017",
        trust_coefficient: float | None = None,
        phi: tuple[float, float] | None = None,
        eps: float = 0.0,
        max_ratio: float | None = None,
        clamp_grad: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        stochastic_rounding: bool = False,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, settings_in(locals()) | {"adapt": None}, norm_group=norm_group)

    def _needs_buffers(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"]) or group["variant"] == "momentum"

    def _kernel_settings(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        return {
            **super()._kernel_settings(group),
            **bounds(group["phi"]),
            "mode": VARIANTS.index(group["variant"]),
            "trust_coefficient": trust(group),
            "max_ratio": ratio_limit(group),
        }

    def _step(self, work: Work) -> None:
        parts = [torch.stack([norms.squares(b.grads), norms.squares(b.params)]) for b in work.buckets]
        parts, total = work.tensor_squares(parts, kinds=2)
        skip = self._skip(work, total)
        if skip is True:
            return
        averaged = []
        for bucket, (g_square, w_square) in zip(work.buckets, parts, strict=True):
            group = bucket.group
            trusted, rule = plain_momentum(bucket, work.scale, group["clamp_grad"])
            if group["variant"] == "momentum":
                heavy_ball(trusted, replace(rule.times(1.0 - group["momentum"]), rate=None), skip)
                averaged.append((bucket, w_square))
                continue
            g_norm, w_norm = g_square.sqrt() / work.scale, w_square.sqrt()
            size = clip(w_norm, group["phi"])
            below = g_norm + group["weight_decay"] * w_norm + group["eps"]
            ratio = trust(group) * size / below
            rate = adapted_rate(self, bucket, ratio, (size > 0) & (below > 0), ratio_limit(group))
            inside = group["variant"] == "you2017"  # the ratio scales the buffer's input; else the step
            rule = rule.times(rate) if inside else replace(rule, rate=rate)
            heavy_ball(trusted, rule, skip)
        self._step_along_average(work, averaged, skip)

    def _step_along_average(self, work: Work, averaged: list[tuple[Bucket, Tensor]], skip: Tensor | bool) -> None:
        """Update the parameters for variant "momentum", whose ratio depends on the norms of the new buffers.

        `averaged` holds the buckets with this variant, each with the squared norms of its parameters.
        """
        if not any(group["variant"] == "momentum" for group in self.param_groups):
            return
        buckets = [bucket for bucket, _ in averaged]
        parts = [norms.squares(b.buffers["momentum_buffer"])[None] for b in buckets]
        parts, _ = work.tensor_squares(parts, kinds=1, buckets=buckets)
        for (bucket, w_square), (v_square,) in zip(averaged, parts, strict=True):
            size, v_norm = clip(w_square.sqrt(), bucket.group["phi"]), v_square.sqrt()
            ratio = trust(bucket.group) * size / v_norm
            rate = adapted_rate(self, bucket, ratio, (size > 0) & (v_norm > 0), ratio_limit(bucket.group))
            update_params(bucket, -rate, bucket.buffers["momentum_buffer"], skip)


def trust(group: dict[str, Any]) -> float:
    """Return the group's trust coefficient, or the default of its variant if it is None."""
    given: float | None = group["trust_coefficient"]
    if given is not None:
        return given
    return 1.0 if group["variant"] == "momentum" else 1e-3


def clip(norm: Tensor, phi: tuple[float, float] | None) -> Tensor:
    """Return the norm clipped to the limits (low, high) in `phi`, or the norm itself if `phi` is None."""
    return norm if phi is None else norm.clamp(*phi)


def bounds(phi: tuple[float, float] | None) -> dict[str, float]:
    """Return the limits in `phi` as settings of the kernels, or no settings if `phi` is None."""
    return {} if phi is None else {"phi_low": phi[0], "phi_high": phi[1]}


def adapted_rate(
    optimizer: LargeBatchOptimizer, bucket: Bucket, ratio: Tensor, defined: Tensor, limit: float
) -> Tensor:
    """Return lr * ratio for each tensor of a bucket, or lr if the step of the tensor is not scaled by a ratio.

    A ratio is replaced by 1 where `defined` is False, and is at most `limit`.
    """
    ratio = torch.where(defined, ratio, 1.0).clamp_max(limit)
    chosen = optimizer._adapts(bucket)
    if not all(chosen):
        if ratio.device.type == "cpu":
            ratio = torch.where(torch.tensor(chosen, device="cpu"), ratio, 1.0)
        else:
            one = torch.ones_like(ratio[0])  # selected on the device, because copying a mask to it would synchronise
            ratio = torch.stack([r if adapt else one for r, adapt in zip(ratio.unbind(), chosen, strict=True)])
    return lr_of(bucket.group) * ratio


def ratio_limit(group: dict[str, Any]) -> float:
    """Return the group's `max_ratio`, but at most MAX_RATIO, which only the ratios of tiny gradients reach."""
    given: float | None = group["max_ratio"]
    return MAX_RATIO if given is None else min(given, MAX_RATIO)


def plain_momentum(bucket: Bucket, scale: float | Tensor, clamp: float | None = None) -> tuple[Bucket, Rule]:
    """Return a bucket and the rule that takes a step of momentum SGD with learning rate 1 on it.

    The gradients in the given bucket have been multiplied by `scale`. With `clamp`, the gradients in the returned
    bucket are g + weight_decay * w with each element clamped to [-clamp, clamp].
    """
    group = bucket.group
    wd = group["weight_decay"]
    if clamp is None:
        return bucket, Rule(group["momentum"], 1.0 / scale, decay=wd, maximize=group["maximize"])
    sign = -1.0 if group["maximize"] else 1.0
    pairs = zip(bucket.grads, bucket.params, strict=True)
    clamped = [
        (norms.upcast(g) * (sign / scale)).add_(norms.upcast(w), alpha=wd).clamp_(-clamp, clamp) for g, w in pairs
    ]
    return replace(bucket, grads=clamped), Rule(group["momentum"])
