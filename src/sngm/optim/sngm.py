"""SNGM: momentum SGD on the normalised gradient."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import checks, norms
from .base import LargeBatchOptimizer, lr_of, settings_in
from .buckets import Bucket, Work
from .heavy_ball import Rule, heavy_ball
from .kernels.table_schema import MODES

SCOPES = ("global", "group", "tensor")
MIN_EPS = 1e-19  # smallest eps, because squares of smaller norms underflow float32


class SNGM(LargeBatchOptimizer):
    r"""Stochastic normalised gradient descent with momentum.

    For parameters :math:`w_t` with gradient :math:`g_t` and momentum buffer :math:`u_t`, let
    :math:`d_t = g_t + \lambda w_t` if `weight_decay_mode` is "coupled", else :math:`d_t = g_t`. Then a step is:

    .. math::
        u_{t+1} = \beta u_t + d_t / \max(\|d_t\|, \epsilon), \qquad w_{t+1} = w_t - \eta u_{t+1}

    The norm is taken over all parameters that have a gradient, in all parameter groups. So the norm of a step is at
    most :math:`\eta/(1-\beta)`, however large the gradient is (except with :math:`\lambda > 0` and a mode other than
    "coupled"). Scaling the loss by a positive constant does not change the steps (except with coupled decay).
    With ``momentum=0`` the method is SNGD; ``scope="tensor"`` is the block-wise variant of the paper.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate :math:`\eta`, a number or a one-element tensor.
        momentum: :math:`\beta`, in [0, 1).
        weight_decay: :math:`\lambda`, at least 0.
        weight_decay_mode: "coupled" adds :math:`\lambda w` to the gradient inside the norm, as if it were part
            of the loss; "after_norm" adds it to the normalised gradient; "decoupled" scales w by
            :math:`1 - \eta\lambda` and keeps weight decay out of the momentum buffer.
        scope: "global" divides all gradients by one norm, "group" divides the gradients of each parameter group by the
            norm of the group, "tensor" divides each gradient by its own norm. All groups have the same scope.
        nesterov: step by :math:`\beta u_{t+1} + d_t/\max(\|d_t\|, \epsilon)` instead of :math:`u_{t+1}`.
        eps: lower limit of the norm, so that a zero gradient gives a zero update.
        maximize: maximise the objective instead of minimising it.
        foreach, fused: implementation of the step, as in torch.optim; None chooses the fastest correct implementation.
        capturable: never read a value on the host, so that a CUDA graph can capture the step.
        stochastic_rounding: round bfloat16 parameters up or down at random, so that small updates are not lost. The
            random bits depend only on the step, the parameter's index and the element's position in memory. Other
            dtypes are not affected.
        norm_group: process group whose ranks each hold a part of the parameters; squared norms are summed over its
            ranks. DTensors (FSDP2, tensor parallelism) do not need a norm_group.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = SNGM([w], lr=1.0, momentum=0.0)
        >>> (0.5 * w.square().sum()).backward()
        >>> optimizer.step()
        >>> w.data, optimizer.grad_norm
        (tensor([2.4000, 3.2000]), tensor(5.))

    Cost: 4 bytes of state per float32 parameter. Bytes of memory that a step reads and writes per parameter (SGD: 20):

    - CUDA kernels: 24, or 28 with coupled decay;
    - fused step on the CPU: 24, or 36 with coupled decay, or 32 with decoupled decay.

    Reference: Zhao, Shi, Xie and Li, "Stochastic Normalized Gradient Descent with Momentum for Large-Batch
    Training", Algorithm 1 and Section 6.
    """

    KERNEL = "sngm"
    CHOICES: ClassVar = {"weight_decay_mode": MODES}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        weight_decay_mode: str = "coupled",
        scope: str = "global",
        nesterov: bool = False,
        eps: float = 1e-12,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        stochastic_rounding: bool = False,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        checks.choice("scope", scope, SCOPES)
        self.scope = scope
        super().__init__(params, settings_in(locals(), but="scope"), norm_group=norm_group)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group.get("scope", self.scope) != self.scope:
            raise ValueError(f"scope belongs to the whole optimizer, not to a group; got scope={group['scope']!r}")

    def _kernel_settings(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        return {
            **super()._kernel_settings(group),
            "eps": max(group["eps"], MIN_EPS),
            "mode": MODES.index(group["weight_decay_mode"]),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "scope": self.scope}

    def _step(self, work: Work) -> None:
        parts, total = self._divisor_squares(work)
        skip = self._skip(work, total)
        if skip is True:
            return
        for bucket, square in zip(work.buckets, parts, strict=True):
            group = bucket.group
            n = bounded_norm(max(group["eps"], MIN_EPS), square, work)
            wd, mode = group["weight_decay"], group["weight_decay_mode"]
            rule = Rule(
                momentum=group["momentum"],
                gain=1.0 / (n * work.scale),  # with a loss scale s, the stored gradients are s * g
                rate=lr_of(group),
                decay={"coupled": wd / n, "after_norm": wd, "decoupled": 0.0}[mode] if wd else 0.0,
                decoupled_decay=wd if mode == "decoupled" else 0.0,
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )
            heavy_ball(bucket, rule, skip)

    def _squares(self, bucket: Bucket, work: Work) -> Tensor:
        """Return the squared norm of each gradient (plus coupled decay), or only their sum if that suffices."""
        group = bucket.group
        squares = norms.squares if self.scope == "tensor" or work.shards.active else norms.square
        wd = group["weight_decay"]
        if wd and group["weight_decay_mode"] == "coupled":
            return squares(bucket.grads, bucket.params, (-wd if group["maximize"] else wd) * work.scale)
        return squares(bucket.grads)

    def _divisor_squares(self, work: Work) -> tuple[list[Tensor], Tensor]:
        """Return the squared norms that the gradients of each bucket are divided by, and the squared global norm."""
        if (square := self._whole_square) is not None:
            return [square.to(bucket.device) for bucket in work.buckets], square
        parts = [self._squares(bucket, work) for bucket in work.buckets]
        if self.scope == "tensor":
            whole, total = work.tensor_squares([part[None] for part in parts], kinds=1)
            return [part[0] for part in whole], total
        by_group = self.scope == "group"
        sums = work.sums(parts, by_group=by_group)
        return [sums[b.position if by_group else 0].to(b.device) for b in work.buckets], sums.sum()


def bounded_norm(least: float, square: Tensor, work: Work) -> float | Tensor:
    """Return the root of `square` divided by the loss scale, at least `least`; as a number if the host can read it."""
    if work.on_host and square.ndim == 0:
        return max(math.sqrt(square.item()) / work.scale, least)
    return (square.sqrt() / work.scale).clamp_min(least)
