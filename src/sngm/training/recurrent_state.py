"""Recurrent state carried from one step to the next, such as the hidden state of an LSTM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..tasks import Batch, Task
from .batch_plan import BatchPlan


class RecurrentState:
    """Recurrent state of a run: a tuple of tensors, whose first dimension counts the samples of the global batch.

    The tensors are updated in place, so that a CUDA graph can refer to them. In each process, only the state of its own
    workers' samples is valid. The tuple is empty for tasks without recurrent state.
    """

    def __init__(self, task: Task, model: nn.Module, plan: BatchPlan, rank: int) -> None:
        self.initial = task.start(model, plan.batch)
        # contiguous, for all_reduce
        self.rows = tuple(t.clone(memory_format=torch.contiguous_format) for t in self.initial)
        own = plan.workers_of(rank)
        self.own = slice(own.start * plan.share, own.stop * plan.share)
        self.ranks = plan.ranks

    def reset(self) -> None:
        """Set the recurrent state to that at the start of an epoch."""
        self.load(self.initial)

    def rows_of(self, piece: slice) -> Batch:
        """Return the recurrent state of the samples `piece` of the batch.

        It is a copy, because `update` overwrites the state before the backward pass.
        """
        return tuple(t[piece].clone() for t in self.rows)

    @torch.no_grad()
    def update(self, piece: slice, after: Batch) -> None:
        """Store `after`, the new recurrent state of the samples `piece` of the batch."""
        for t, new in zip(self.rows, after, strict=True):
            t[piece] = new

    def gather(self) -> list[Tensor]:
        """Return the recurrent state of the global batch, from all processes. All processes must call this."""
        if self.ranks == 1:
            return list(self.rows)
        packed = [torch.zeros_like(t) for t in self.rows]
        for whole, t in zip(packed, self.rows, strict=True):
            whole[self.own] = t[self.own]
            dist.all_reduce(whole)
        return packed

    def load(self, rows: Sequence[Tensor]) -> None:
        """Load a recurrent state that `gather` returned."""
        for t, old in zip(self.rows, rows, strict=True):
            t.copy_(old)
