"""CLARS: LARS with the mean of micro-batch gradient norms in place of the norm of the mean gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import checks, norms
from .base import LargeBatchOptimizer, settings_in
from .buckets import Closure, Work, evaluate
from .heavy_ball import heavy_ball
from .lars import adapted_rate, plain_momentum, ratio_limit


class CLARS(LargeBatchOptimizer):
    r"""Complete layer-wise adaptive rate scaling.

    For each tensor w with gradient g and momentum buffer v, let :math:`d = g + \lambda w`, and let :math:`\bar n` be
    the norm of the tensor's micro-batch gradients, averaged over micro-batches. Then a step is:

    .. math::
        r = \min(r_{\max},\; c\,\|w\| / \bar n), \qquad v = m v + d, \qquad w = w - \eta r v

    LARS divides by the norm of the mean gradient, which is small when the gradients of samples disagree, as early in
    training. The mean of the norms is not, so early steps are small without a warm-up. The caller measures
    :math:`\bar n` and passes it to :meth:`step`, or calls :meth:`measure_norms` once.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate :math:`\eta`, a number or a one-element tensor.
        momentum: m, in [0, 1).
        weight_decay: :math:`\lambda`, at least 0.
        trust_coefficient: c.
        max_ratio: :math:`r_{\max}`, or None for no limit.
        maximize, foreach, fused, capturable, stochastic_rounding, norm_group: as in :class:`SNGM`.

    The group key `adapt` works as in :class:`LARS`. For a tensor of zeros, and for a mean norm of zero, the ratio r is
    :math:`\min(1, r_{\max})`.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(2, 2))
        >>> optimizer = CLARS([w], lr=1.0)
        >>> micro_batches = [1.0, 3.0]
        >>> gradients = [torch.autograd.grad((a * w).sum(), w)[0] for a in micro_batches]
        >>> w.grad = sum(gradients) / len(gradients)
        >>> optimizer.step(mean_norms=[sum(g.norm() for g in gradients) / len(gradients)])
        >>> w.data  # ||w|| = 2, the mean norm is 4: the ratio is 0.005
        tensor([[0.9900, 0.9900],
                [0.9900, 0.9900]])

    Cost: 4 bytes of state per float32 parameter. A step of the CUDA kernels, or a fused step on the CPU, reads and
    writes 28 bytes of memory per parameter (SGD: 20). The norms of each micro-batch's gradient must be computed too.

    Reference: Huo, Gu and Huang, "Large Batch Optimization for Deep Learning Using New Complete Layer-Wise Adaptive
    Rate Scaling", AAAI 2021. `max_ratio=0.1`, c = 0.01 and the position of momentum follow the authors' public code.
    """

    KERNEL = "clars"
    _measured: dict[Tensor, Tensor] | None = None  # sums of norms since the last step, if `measure_norms` was called
    _measure_group: dist.ProcessGroup | None = None
    TORCH_KEYS: ClassVar[dict[str, Any]] = {"dampening": 0.0, "nesterov": False}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 0.01,
        max_ratio: float | None = 0.1,
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
        checks.number("trust_coefficient", group["trust_coefficient"], include_low=False)  # None is an error

    def _kernel_settings(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        return {**super()._kernel_settings(group), "max_ratio": ratio_limit(group)}

    def step(
        self, closure: Closure | None = None, *, mean_norms: Sequence[float | Tensor] | Tensor | None = None
    ) -> Any:
        """Take one step. With a closure, first call the closure, and return its loss.

        Args:
            closure: computes the loss and its gradients.
            mean_norms: one value per parameter, in the order of the parameter groups: the norm of the parameter's
                (unscaled) gradient, averaged over micro-batches. Values of parameters without a gradient are not read.
                If one of the other values is NaN or infinite, the step is skipped. For sharded tensors, pass the norms
                of the unsharded tensors, equal on all ranks, such as ``p.grad.norm().full_tensor()`` of a DTensor.
                Required unless :meth:`measure_norms` was called.
        """
        if self._measured is not None and mean_norms is None:
            loss = evaluate(closure)
            self._take_step(self._check_norms(self._take_measured()))
            return loss
        given = self._check_norms(mean_norms)
        loss = evaluate(closure)
        self._take_step(given)
        return loss

    def measure_norms(self, group: dist.ProcessGroup | None = None) -> None:
        """Measure the mean norms in every `backward` from now on, so that `step` needs no `mean_norms`.

        Call this method if a trainer calls `step`. Each `backward` must be called on the loss of one micro-batch,
        divided by the number of micro-batches in a step, as trainers do. DTensors are not supported. Neither is a
        GradScaler, because the norms would include its scale.

        Args:
            group: process group of the data-parallel ranks over which norms are averaged; None for this rank alone.
        """
        if self._measured is not None:
            raise RuntimeError("measure_norms() was called before")
        self._measured, self._measure_group = {}, group
        for param_group in self.param_groups:
            for p in param_group["params"]:
                if p.requires_grad:
                    p.register_hook(functools.partial(_add_norm, self._measured, p))

    def _take_measured(self) -> list[Any]:
        """Return the mean norm measured for each parameter since the last step, and reset the measurement."""
        assert self._measured is not None
        params = [p for param_group in self.param_groups for p in param_group["params"]]
        lacking = [i for i, p in enumerate(params) if p.grad is not None and p not in self._measured]
        if lacking:
            raise RuntimeError(
                f"no norm was measured for {len(lacking)} parameters with a gradient (first params[{lacking[0]}])"
                "; measure_norms() needs plain parameters that are in the groups when it is called"
            )
        zero = torch.zeros((), dtype=self._grad_norm.dtype, device=self._grad_norm.device)
        found = torch.stack([self._measured.get(p, zero).to(zero) for p in params])
        self._measured.clear()
        if self._measure_group is not None:
            dist.all_reduce(found, group=self._measure_group)
            found /= dist.get_world_size(self._measure_group)
        return list(found.unbind())

    def _step(self, work: Work, given: Sequence[Any] | Tensor) -> None:
        means = [self._means(given, bucket.indices, work, bucket.device) for bucket in work.buckets]
        parts = []
        for bucket, mean in zip(work.buckets, means, strict=True):
            # if a mean norm overflowed, a gradient overflowed
            g_square = torch.where(mean.isfinite(), norms.squares(bucket.grads), math.inf)
            parts.append(torch.stack([g_square, norms.squares(bucket.params)]))
        parts, total = work.tensor_squares(parts, kinds=2)
        skip = self._skip(work, total)
        if skip is True:
            return
        for bucket, (_, w_square), mean in zip(work.buckets, parts, means, strict=True):
            w_norm = w_square.sqrt()
            ratio = bucket.group["trust_coefficient"] * w_norm / mean
            rate = adapted_rate(self, bucket, ratio, (w_norm > 0) & (mean > 0), ratio_limit(bucket.group))
            bucket, rule = plain_momentum(bucket, work.scale)
            heavy_ball(bucket, replace(rule, rate=rate), skip)

    def _check_norms(self, mean_norms: Sequence[float | Tensor] | Tensor | None) -> Sequence[Any] | Tensor:
        count = sum(len(group["params"]) for group in self.param_groups)
        if mean_norms is None:
            raise TypeError(
                f"step() needs mean_norms, a list of one number per parameter ({count} here), got None; if a trainer "
                "calls step(), call sngm.integrations.measure_norms(optimizer) once"
            )
        if not isinstance(mean_norms, (Sequence, Tensor)):
            raise TypeError(f"mean_norms must be a list of numbers or a 1-d tensor, got {type(mean_norms).__name__}")
        if isinstance(mean_norms, Tensor) and mean_norms.ndim != 1:
            raise ValueError(f"mean_norms must be a 1-d tensor, got shape {tuple(mean_norms.shape)}")
        if len(mean_norms) != count:
            raise ValueError(f"mean_norms must hold one number for each of {count} parameters, got {len(mean_norms)}")
        if not isinstance(mean_norms, Tensor):
            for i, norm in enumerate(mean_norms):
                if isinstance(norm, bool) or not isinstance(norm, (Real, Tensor)):
                    raise TypeError(f"mean_norms must hold numbers or one-element tensors; mean_norms[{i}] is {norm!r}")
                if isinstance(norm, Tensor) and norm.numel() != 1:
                    shape = tuple(norm.shape)
                    raise ValueError(f"mean_norms must hold one number per parameter, but [{i}] has shape {shape}")
        return mean_norms

    @staticmethod
    def _means(given: Sequence[Any] | Tensor, indices: list[int], work: Work, device: torch.device) -> Tensor:
        dtype = norms.sum_dtype(device)
        if isinstance(given, Tensor):
            given = given.to(device=device, dtype=dtype).unbind()
        chosen = [given[i] for i in indices]
        if any(isinstance(norm, Tensor) for norm in chosen):
            mean = torch.stack([torch.as_tensor(norm, dtype=dtype, device=device).reshape(()) for norm in chosen])
        else:
            mean = torch.tensor(chosen, dtype=dtype, device=device)
        if work.on_host and bool((mean < 0).any()):
            raise ValueError(f"mean_norms must be at least 0, got {mean.min().item():g}")
        return mean


def _add_norm(sums: dict[Tensor, Tensor], p: Tensor, grad: Tensor) -> None:
    """Add the norm of `grad`, a new gradient of `p`, to ``sums[p]``."""
    norm = torch.linalg.vector_norm(grad.detach().to(torch.promote_types(grad.dtype, torch.float32)))
    sums[p] = sums[p] + norm if p in sums else norm
