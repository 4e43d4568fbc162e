"""What streams hand on from one step to the next, such as the hidden state of an LSTM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..tasks import Batch, Task
from .batch_plan import BatchPlan


class Carried:
    """Tensors with a row for each sample of the batch, always the same ones, so that a captured step may hold them.

    A process knows the rows of its own workers. For tasks that carry nothing there are no tensors.
    """

    def __init__(self, task: Task, model: nn.Module, plan: BatchPlan, rank: int) -> None:
        self.at_first = task.start(model, plan.batch)
        # contiguous, as an exchange between GPUs wants them
        self.rows = tuple(t.clone(memory_format=torch.contiguous_format) for t in self.at_first)
        own = plan.workers_of(rank)
        self.own = slice(own.start * plan.share, own.stop * plan.share)
        self.ranks = plan.ranks

    def begin_epoch(self) -> None:
        """Streams begin anew."""
        self.put_back(self.at_first)

    def of(self, piece: slice) -> Batch:
        """The rows of a part of the batch: copies, because `keep` is called before their gradients are computed."""
        return tuple(t[piece].clone() for t in self.rows)

    @torch.no_grad()
    def keep(self, piece: slice, after: Batch) -> None:
        """Hand on what a part of the batch has come to."""
        for t, new in zip(self.rows, after, strict=True):
            t[piece] = new

    def pack(self) -> list[Tensor]:
        """All rows, of all processes, which must call this together."""
        if self.ranks == 1:
            return list(self.rows)
        packed = [torch.zeros_like(t) for t in self.rows]
        for whole, t in zip(packed, self.rows, strict=True):
            whole[self.own] = t[self.own]
            dist.all_reduce(whole)
        return packed

    def put_back(self, rows: Sequence[Tensor]) -> None:
        """Go on from here."""
        for t, old in zip(self.rows, rows, strict=True):
            t.copy_(old)
