"""Recurrent state carried from one step to the next, such as the hidden state of an LSTM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..tasks import Batch, Task
from .batch_plan import BatchPlan


class RecurrentState:
    """Recurrent state of all streams: tensors with one row per sample of the batch.

    The tensors are updated in place, so that a CUDA graph can hold them. A process has valid rows only for its own
    workers. Tasks without recurrent state have no tensors.
    """

    def __init__(self, task: Task, model: nn.Module, plan: BatchPlan, rank: int) -> None:
        self.initial = task.start(model, plan.batch)
        # contiguous, for all_reduce
        self.rows = tuple(t.clone(memory_format=torch.contiguous_format) for t in self.initial)
        own = plan.workers_of(rank)
        self.own = slice(own.start * plan.share, own.stop * plan.share)
        self.ranks = plan.ranks

    def reset(self) -> None:
        """Reset the state to that of the start of an epoch."""
        self.load(self.initial)

    def rows_of(self, piece: slice) -> Batch:
        """Return copies of the rows of a part of the batch, because the rows are overwritten before backward."""
        return tuple(t[piece].clone() for t in self.rows)

    @torch.no_grad()
    def update(self, piece: slice, after: Batch) -> None:
        """Store the new state of a part of the batch."""
        for t, new in zip(self.rows, after, strict=True):
            t[piece] = new

    def gather(self) -> list[Tensor]:
        """Return the recurrent state of the whole batch, from all processes. All processes must call it."""
        if self.ranks == 1:
            return list(self.rows)
        packed = [torch.zeros_like(t) for t in self.rows]
        for whole, t in zip(packed, self.rows, strict=True):
            whole[self.own] = t[self.own]
            dist.all_reduce(whole)
        return packed

    def load(self, rows: Sequence[Tensor]) -> None:
        """Load rows that `gather` returned."""
        for t, old in zip(self.rows, rows, strict=True):
            t.copy_(old)
