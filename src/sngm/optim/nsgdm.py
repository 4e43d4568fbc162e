"""NSGDM: SGD along the normalised momentum."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import norms
from .base import LargeBatchOptimizer, lr_of, settings_in
from .buckets import Work
from .heavy_ball import BUFFER, SLICE, Rule, heavy_ball, update_params
from .norms import upcast
from .sngm import MIN_EPS


class NSGDM(LargeBatchOptimizer):
    r"""Normalised SGD with momentum: average the gradients, then normalise the average. (SNGM normalises first.)

    For parameters :math:`w_t` with gradient :math:`g_t` and momentum buffer :math:`m_t`, let
    :math:`d_t = g_t + \lambda w_t` if `weight_decay_mode` is "coupled", else :math:`d_t = g_t`. Then a step is:

    .. math::
        m_{t+1} = \beta m_t + (1-\beta) d_t, \qquad w_{t+1} = w_t - \eta\, m_{t+1} / \max(\|m_{t+1}\|, \epsilon)

    The norm is taken over all parameters that have a gradient, so the norm of every step is :math:`\eta` (plus
    decoupled weight decay). The norm of a step of SNGM is up to :math:`\eta/(1-\beta)`, less if gradients disagree: for
    momentum 0.9, start with three times the learning rate of SNGM.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate :math:`\eta`, a number or a one-element tensor.
        momentum: :math:`\beta`, in [0, 1).
        weight_decay: :math:`\lambda`, at least 0.
        weight_decay_mode: "coupled" adds :math:`\lambda w` to the gradient; "decoupled" scales w by
            :math:`1 - \eta\lambda` and keeps weight decay out of the momentum buffer.
        eps: lower limit of the norm, so that a buffer of zeros gives a zero update.
        maximize, foreach, fused, capturable, stochastic_rounding, norm_group: as in :class:`SNGM`. This method has no
            CUDA kernels.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = NSGDM([w], lr=1.0)
        >>> (0.5 * w.square().sum()).backward()
        >>> optimizer.step()
        >>> w.data
        tensor([2.4000, 3.2000])

    Cost: 4 bytes of state per float32 parameter.

    Reference: Cutkosky and Mehta, "Momentum Improves Normalized SGD", ICML 2020, Section 3.
    """

    CHOICES: ClassVar = {"weight_decay_mode": ("coupled", "decoupled")}
    NORM_SPANS = "global"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        weight_decay_mode: str = "coupled",
        eps: float = 1e-12,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        stochastic_rounding: bool = False,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, settings_in(locals()), norm_group=norm_group)

    def _needs_buffers(self, group: dict[str, Any]) -> bool:
        return True  # also for momentum 0, because the step normalises the content of the buffer

    def _step(self, work: Work) -> None:
        skip = self._skip(work, work.sums([norms.squares(bucket.grads) for bucket in work.buckets])[0])
        if skip is True:
            return
        for bucket in work.buckets:
            group = bucket.group
            new = 1.0 - group["momentum"]
            decay = group["weight_decay"] if group["weight_decay_mode"] == "coupled" else 0.0
            rule = Rule(group["momentum"], new / work.scale, rate=None, decay=new * decay, maximize=group["maximize"])
            heavy_ball(bucket, rule, skip)
        momenta = [bucket.buffers[BUFFER] for bucket in work.buckets]
        total = work.sums([norms.squares(buffers) for buffers in momenta])[0]
        for bucket, buffers in zip(work.buckets, momenta, strict=True):
            group = bucket.group
            eps = max(group["eps"], MIN_EPS)
            inverse = 1.0 / (max(math.sqrt(total), eps) if work.on_host else total.sqrt().clamp_min(eps))
            if isinstance(inverse, Tensor):
                inverse = inverse.to(bucket.device, buffers[0].dtype)
            decay = group["weight_decay"] if group["weight_decay_mode"] == "decoupled" else 0.0
            for part in bucket.slices(SLICE):
                directions = list(torch._foreach_mul(part.buffers[BUFFER], inverse))
                if decay:
                    directions = [x.add_(upcast(p), alpha=decay) for x, p in zip(directions, part.params, strict=True)]
                update_params(part, -lr_of(group), directions, skip)
