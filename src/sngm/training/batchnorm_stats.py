"""Updates of BatchNorm's running statistics that do not depend on how the batch is split into forward passes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..models.ghost_norm import GhostBatchNorm2d, one_after_another
from ..tasks import Task
from .batch_plan import BatchPlan


def may_merge(task: Task, model: nn.Module) -> bool:
    """Return True if one forward pass may process several BatchNorm groups.

    The task must set `pass_size`, the loss must draw no random numbers, and each BatchNorm layer must be a
    GhostBatchNorm2d with a momentum.
    """
    if task.pass_size is None or draws(task, model):
        return False
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    return all(isinstance(norm, GhostBatchNorm2d) and norm.momentum is not None for norm in norms)


def draws(task: Task, model: nn.Module) -> bool:
    """Return True if the loss may draw random numbers.

    This is so if the task sets no `pass_size`, or if the model has active dropout or an attribute `draws` that is true.
    """
    dropout = any(isinstance(m, _DropoutNd) and m.p > 0 and m.training for m in model.modules())
    return task.pass_size is None or dropout or bool(getattr(model, "draws", False))


class PerGroupStatistics:
    """Running statistics if each pass has one BatchNorm group. Every worker starts from the values before the step.

    `policy` is `RunConfig.running_stats`.
    """

    def __init__(self, model: nn.Module, plan: BatchPlan, policy: str) -> None:
        self.norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self.plan, self.mean = plan, policy == "mean"
        self.before: list[Tensor] = []
        self.kept: list[list[Tensor]] = []

    def begin(self) -> None:
        """Start a step."""
        self.before, self.kept = self._copies(), []

    @contextlib.contextmanager
    def tracking(self, worker: int | None) -> Iterator[None]:
        """In the ``with`` block, update statistics if `worker` is 0, or with the policy "mean" if it is not None."""
        for b, old in zip(self._buffers() if self.before else [], self.before, strict=True):
            b.copy_(old)
        track(self.norms, worker is not None if self.mean else worker == 0)
        try:
            yield
        finally:
            track(self.norms, True)
        if worker is not None:
            self.kept.append(self._copies())

    def set_pass(self, piece: slice) -> None:
        """Do nothing: these statistics need not know which slice of the batch the next pass processes."""

    def end(self) -> None:
        """End a step: with the policy "mean", set the statistics to their mean over workers."""
        for i, b in enumerate(self._buffers() if self.mean else []):
            if not b.is_floating_point():  # num_batches_tracked, equal for all workers
                continue
            mean = torch.stack([copies[i] for copies in self.kept]).sum(0) / self.plan.workers
            if self.plan.ranks > 1:
                dist.all_reduce(mean)
            b.copy_(mean)

    def _buffers(self) -> list[Tensor]:
        return [b for norm in self.norms for b in norm.buffers()]

    def _copies(self) -> list[Tensor]:
        return [b.clone() for b in self._buffers()] if self.mean else []


@dataclass(frozen=True, slots=True)
class Share:
    """How a pass updates running statistics: attributes of GhostBatchNorm2d. With `weights` None, it updates none."""

    weights: Tensor | None
    keep: float = 1.0
    batches: int = 0


class GhostStatistics:
    """Running statistics of GhostBatchNorm2d with several groups per pass; they equal those of `PerGroupStatistics`.

    With momentum m, a worker whose groups 1..n have statistics s_i updates the running statistics r to
    (1-m)^n r + sum_i m (1-m)^(n-i) s_i, so each group has a fixed weight. With the policy "first", the groups of all
    workers but the first have weight 0; with "mean", weights are divided by the number of workers.
    """

    def __init__(
        self, model: nn.Module, plan: BatchPlan, policy: str, rank: int, passes: Sequence[slice], dtype: torch.dtype
    ) -> None:
        self.norms = [m for m in model.modules() if isinstance(m, GhostBatchNorm2d)]
        self.tracked = [norm for norm in self.norms if norm.track_running_stats]
        self.plan, self.mean = plan, policy == "mean"
        for norm in self.norms:
            norm.group = plan.bn_group
        shares = functools.cache(functools.partial(self._shares, rank, passes, dtype))
        self.shares = {norm: shares(norm.momentum, cast(Tensor, norm.running_mean).device) for norm in self.tracked}
        self.tracks = False

    def _shares(
        self, rank: int, passes: Sequence[slice], dtype: torch.dtype, momentum: float, device: torch.device
    ) -> dict[int, Share]:
        """Return the `Share` of each pass, by the index of the pass's first sample.

        Only the first pass with a non-zero weight decays the old statistics.
        """
        each = self.plan.share // self.plan.bn_group  # groups per worker
        weights, keep = one_after_another(each, momentum)
        if self.mean:  # mean over the workers of this process; `end` averages over processes
            weights = weights.repeat(self.plan.workers) / len(self.plan.workers_of(rank))
        else:
            weights = torch.cat([weights, torch.zeros(each * (self.plan.workers - 1), dtype=weights.dtype)])
        shares: dict[int, Share] = {}
        fades = True
        for piece in passes:
            own = weights[piece.start // self.plan.bn_group : piece.stop // self.plan.bn_group].to(device, dtype)
            if not own.any():
                shares[piece.start] = Share(None)
                continue
            shares[piece.start] = Share(own, keep, each) if fades else Share(own)
            fades = False
        return shares

    def begin(self) -> None:
        """Do nothing: these statistics need no preparation at the start of a step."""

    @contextlib.contextmanager
    def tracking(self, worker: int | None) -> Iterator[None]:
        """In the ``with`` block, update statistics unless `worker` is None."""
        self.tracks = worker is not None
        try:
            yield
        finally:
            track(self.tracked, True)

    def set_pass(self, piece: slice) -> None:
        """Prepare the layers for the next pass, which processes the slice `piece` of the batch."""
        for norm in self.norms:
            norm.group = self.plan.bn_group
        for norm in self.tracked:
            share = self.shares[norm][piece.start]
            norm.track_running_stats = self.tracks and share.weights is not None
            norm.weights, norm.keep, norm.batches = share.weights, share.keep, share.batches

    def end(self) -> None:
        """End a step: with the policy "mean", average the statistics over processes."""
        if not self.mean or self.plan.ranks == 1:
            return
        for norm in self.tracked:
            for b in norm.buffers():
                if b.is_floating_point():
                    dist.all_reduce(b.div_(self.plan.ranks))


def track(norms: Sequence[_BatchNorm], follow: bool) -> None:
    """Turn the tracking of running statistics on or off in these layers."""
    for norm in norms:
        norm.track_running_stats = follow
