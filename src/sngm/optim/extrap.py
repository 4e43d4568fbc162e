"""EXTRAP-SGD: every worker computes its gradient at a point extrapolated along its own gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import norms
from .base import LargeBatchOptimizer, lr_of, settings_in
from .buckets import as_dense, evaluate, state_dtype
from .heavy_ball import heavy_ball
from .lars import plain_momentum
from .norms import upcast
from .sharded_norms import aligned, local

Gradients = Callable[[list[Tensor]], tuple[Any, Sequence[Tensor | None]]]


class ExtrapSGD(LargeBatchOptimizer):
    r"""Momentum SGD on the gradients that workers compute at extrapolated points.

    Let :math:`g_k(w)` be the gradient of worker k = 1..K at the parameters w. Then a step is:

    .. math::
        \bar g = \frac1K \sum_k g_k\big(w - \hat\eta\, g_k(w)\big), \qquad
        v = \beta v + \bar g + \lambda w, \qquad w = w - \eta v

    This follows the published description of the method; the authors' code was not available for comparison.
    Both gradients of a worker come from the same samples, the extrapolation has no weight decay, and the momentum is
    heavy-ball unless `nesterov` is set.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate :math:`\eta`, a number or a one-element tensor.
        inner_lr: learning rate :math:`\hat\eta` of the extrapolation; start with ``lr / K``.
        momentum: :math:`\beta`, in [0, 1).
        weight_decay: :math:`\lambda`, at least 0.
        nesterov: step by :math:`\beta v + \bar g + \lambda w` instead of :math:`v`.
        maximize, foreach, fused, capturable, norm_group: as in :class:`SNGM`.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor(2.0))
        >>> optimizer = ExtrapSGD([w], lr=0.5, inner_lr=0.25, momentum=0.0)
        >>> def worker(target):
        ...     def closure():
        ...         loss = 0.5 * (w - target) ** 2
        ...         loss.backward()
        ...         return loss
        ...     return closure
        >>> optimizer.step([worker(0.0), worker(1.0)])  # gradients 2, 1; then 1.5, 0.75
        tensor(1.2500)
        >>> w.data
        tensor(1.4375)

    Cost: 4 bytes of state per float32 parameter, two gradients per worker and step, and during a step with closures
    memory for a copy of the parameters and a sum of the gradients. A GradScaler cannot be used, because step() computes
    the gradients.

    Reference: Lin, Kong, Stich and Jaggi, "Extrapolation for Large-batch Training in Deep Learning", ICML 2020.
    """

    NORM_SPANS = "none"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        inner_lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, settings_in(locals()), norm_group=norm_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return True  # so that a GradScaler passes its scale to step(), which raises an error

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closures: Sequence[Callable[[], Any]] = (),
        group: dist.ProcessGroup | None = None,
        *,
        gradients: Sequence[tuple[Gradients, int]] = (),
    ) -> Any:
        """Take one step. Each parameter's `.grad` is restored afterwards.

        Args:
            closures: one function for each worker, which computes the loss of that worker's samples and calls
                `backward`. Each function is called twice.
            group: process group whose ranks all run the same number of workers; gradients are averaged over the workers
                of all ranks. A parameter for which no rank has a gradient is not changed.
            gradients: in place of `closures`, pairs of a function that computes the gradients of several workers at
                once, and the number of these workers. The function is called twice, with a list that has one tensor of
                shape ``(workers, *p.shape)`` for each parameter p that requires a gradient, in the order of the groups:
                the values of p at which each worker needs its gradient. The function returns the mean loss of the
                workers and a list of the gradients, of the same shapes (None for a parameter without a gradient).
                DTensors are not supported.

        Returns:
            The mean loss of this rank's workers at the parameters before the step, or None if a closure returns None.
        """
        if "found_inf" in self.__dict__:
            for name in ("found_inf", "grad_scale"):  # the scaler does not remove them if step() raises an error
                delattr(self, name)
            raise TypeError("ExtrapSGD cannot be stepped by a GradScaler: it takes its gradients inside step(closures)")
        if not isinstance(closures, Sequence) or not all(map(callable, closures)):
            raise TypeError(f"closures must be a list of functions, one for each worker, got {closures!r}")
        if bool(closures) == bool(gradients):
            given = "both" if closures else "neither"
            raise ValueError(f"step() needs closures=[a function for each worker], or gradients=, got {given}")
        _check_gradients(gradients)
        workers = len(closures) + sum(count for _, count in gradients)
        losses, sums = self._gradients_at_once(gradients) if gradients else self._extrapolated_gradients(closures)
        ranks = 1
        if group is not None:
            ranks = dist.get_world_size(group)
            places = [p for g in self.param_groups for p in g["params"] if p.requires_grad]  # the same on every rank
            found = torch.tensor([p in sums for p in places], dtype=torch.int32, device=self._grad_norm.device)
            dist.all_reduce(found, group=group)
            for p in (p for p, ranks_with in zip(places, found.tolist(), strict=True) if ranks_with):
                sums.setdefault(p, torch.zeros_like(p, dtype=state_dtype(p)))
                dist.all_reduce(local(sums[p]), group=group)
        work = self._gather(sums)
        work.scale = float(workers * ranks)  # the sum over workers is K times the mean
        skip = self._skip(work, work.sums([norms.squares(b.grads) for b in work.buckets])[0])
        if skip is not True:
            for bucket in work.buckets:
                bucket, rule = plain_momentum(bucket, work.scale)
                heavy_ball(bucket, replace(rule, rate=lr_of(bucket.group), nesterov=bucket.group["nesterov"]), skip)
        return None if any(loss is None for loss in losses) else sum(losses) / len(losses)

    def _gradients_at_once(self, gradients: Sequence[tuple[Gradients, int]]) -> tuple[list[Any], dict[Tensor, Tensor]]:
        """Return a loss at w for each worker, and the sum of the workers' gradients at their extrapolated points.

        A worker's loss is the mean loss of its function's workers.
        """
        places = [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad]
        losses: list[Any] = []
        sums: dict[Tensor, Tensor] = {}
        for function, workers in gradients:
            points = [p.detach().expand(workers, *p.shape) for p, _ in places]
            loss, found = _evaluate_at(function, points)
            losses += [loss] * workers
            for i, ((p, group), grad) in enumerate(zip(places, found, strict=True)):
                if grad is not None:
                    points[i] = (upcast(p.detach()) + upcast(grad) * _inner_step(group)).to(p.dtype)  # rounds only once
            del found
            for (p, _), grad in zip(places, _evaluate_at(function, points)[1], strict=True):
                if grad is not None:
                    total = torch.sum(upcast(grad), 0, out=torch.empty_like(p, dtype=state_dtype(p)))
                    sums[p] = sums[p].add_(total) if p in sums else total
        return losses, sums

    def _extrapolated_gradients(self, closures: Sequence[Callable[[], Any]]) -> tuple[list[Any], dict[Tensor, Tensor]]:
        """Return the loss of each worker at w, and the sum of the workers' gradients at their extrapolated points."""
        grads = {p: p.grad for group in self.param_groups for p in group["params"]}
        places = [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad]
        start = {p: p.clone() for p, _ in places}
        losses: list[Any] = []
        sums: dict[Tensor, Tensor] = {}
        try:
            for closure in closures:
                self.zero_grad()
                loss = evaluate(closure)
                losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
                for p, group in places:
                    if p.grad is not None:
                        ahead = upcast(as_dense(p.grad)) * _inner_step(group)
                        p.copy_(upcast(p) + ahead)  # rounds only once
                self.zero_grad()
                evaluate(closure)
                for p, _ in places:
                    if p.grad is not None:
                        grad = upcast(as_dense(aligned(p, p.grad)))
                        sums[p] = sums[p].add_(grad) if p in sums else grad.clone()
                for p, there in start.items():
                    p.copy_(there)
        finally:
            for p, there in start.items():
                p.copy_(there)
            for p, grad in grads.items():
                p.grad = grad
        return losses, sums


def _inner_step(group: dict[str, Any]) -> float | Tensor:
    """Return c in the extrapolated point w + c * gradient: -inner_lr, or inner_lr with `maximize`."""
    inner_lr = lr_of(group, "inner_lr")
    return inner_lr if group["maximize"] else -inner_lr


def _check_gradients(gradients: Any) -> None:
    pairs = isinstance(gradients, Sequence) and all(isinstance(one, tuple) and len(one) == 2 for one in gradients)
    if not pairs or not all(callable(function) and isinstance(workers, int) for function, workers in gradients):
        raise TypeError(f"gradients must be a list of pairs (function, number of workers), got {gradients!r}")
    if any(workers < 1 for _, workers in gradients):
        raise ValueError(f"gradients: the number of workers must be >= 1, got {[workers for _, workers in gradients]}")


def _evaluate_at(gradients: Gradients, points: list[Tensor]) -> tuple[Any, Sequence[Tensor | None]]:
    """Return the loss and the gradients at these points, as the user's function computes them."""
    with torch.enable_grad():
        result: Any = gradients(list(points))
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"gradients must return the loss and a list of gradients, got {result!r}")
    loss, found = result
    found = [grad if grad is None else as_dense(grad) for grad in found]
    shapes, wanted = [None if grad is None else tuple(grad.shape) for grad in found], [tuple(p.shape) for p in points]
    if len(shapes) != len(wanted) or any(shape not in (None, due) for shape, due in zip(shapes, wanted, strict=True)):
        raise ValueError(f"gradients must return the loss and a list of tensors of the shapes {wanted}, got {shapes}")
    return loss.detach().clone() if isinstance(loss, Tensor) else loss, found
