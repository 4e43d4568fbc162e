"""The sum of gradients over processes, computed while the last backward pass of a step is running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import Failed

BUCKET = 1 << 23  # the most elements that one all-reduce sums, unless a single tensor has more


class GradientSum:
    """Sum of gradients over processes, in buckets: one all-reduce sums the gradients of several parameters.

    The all-reduce of a bucket starts as soon as its gradients are computed and the all-reduces before it have started.
    All processes must start the all-reduces in the same order: from the last bucket, whose gradients are computed
    first, to the first bucket. If a gradient is missing, `finish` sums its bucket and all that follow in this order.
    """

    def __init__(self, params: Sequence[Tensor], ranks: int, elements: int = BUCKET) -> None:
        self.all_params, self.ranks, self.elements = list(params), ranks, elements
        self.params: list[Tensor] = []
        self.hooked: set[Tensor] = set()
        self.awaited: list[set[Tensor]] = []  # parameters of each bucket whose gradients are not yet computed
        self.begun: list[tuple[Tensor, Any]] = []  # flat copies of the started buckets, and handles to wait for
        self.first = self.overlaps = True
        self.active = self.changed = False
        self._find_params()

    def _find_params(self) -> None:
        """Put the parameters that require gradients into buckets; do nothing if they are those of the last step."""
        found = [p for p in self.all_params if p.requires_grad]
        if len(found) == len(self.params) and all(map(is_, found, self.params)):
            return
        self.params = found
        self.buckets = list(buckets(found, self.elements))[::-1]
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        for p in found:
            if p not in self.hooked:
                self.hooked.add(p)
                p.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Let the next backward pass start the sums. Call this before the last backward pass of a step."""
        self._find_params()
        self.awaited = [set(bucket) for bucket in self.buckets]
        self.active = self.overlaps

    def _arrived(self, p: Tensor) -> None:
        if not self.active:
            return
        number = self.bucket_of[p]
        self.changed |= number < len(self.begun)  # a second gradient, as in reentrant activation checkpointing
        self.awaited[number].discard(p)
        while len(self.begun) < len(self.buckets) and not self.awaited[len(self.begun)]:
            self._start()

    def _start(self) -> None:
        grads = [g for p in self.buckets[len(self.begun)] if (g := p.grad) is not None]
        flat = torch.cat([g.reshape(-1) for g in grads])
        self.begun.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self, loss: Tensor) -> None:
        """Sum the remaining buckets and the loss, and set each ``p.grad`` to its sum.

        A gradient that is None in all processes stays None.
        """
        self.active = False
        if not self.begun:  # CLARS sums after its backward passes, without `begin`
            self._find_params()
        missing = [p.grad is None for p in self.params]
        for p, without in zip(self.params, missing, strict=True):
            if without:  # another process may have a gradient
                p.grad = torch.zeros_like(p)
        while len(self.begun) < len(self.buckets):
            self._start()
        flags = torch.tensor([*missing, self.changed], dtype=loss.dtype).to(loss.device, non_blocking=True)
        sums = torch.cat([loss.reshape(1), flags])
        dist.all_reduce(sums)
        loss.copy_(sums[0])
        if self.first:  # only in the first step, because reading a value synchronises with the device
            self.first = False
            if sums[-1].item():  # a gradient changed after it was summed: sum again, and later only in `finish`
                self.overlaps, self.changed, self.begun = False, False, []
                for _ in self.buckets:
                    self._start()
        if self.changed:
            raise Failed("a gradient changed after it was summed; use checkpoint(..., use_reentrant=False)")
        for bucket, (flat, handle) in zip(self.buckets, self.begun, strict=True):
            handle.wait()
            for p, part in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                assert p.grad is not None
                p.grad.copy_(part.view_as(p))
        self.begun = []
        if any(missing):
            for p, without in zip(self.params, sums[1:-1].tolist(), strict=True):
                if without == self.ranks:
                    p.grad = None


def buckets(tensors: list[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """Yield lists of consecutive tensors of one dtype: at most `elements` elements per list, or a single tensor."""
    bucket: list[Tensor] = []
    size = 0
    for t in tensors:
        if bucket and (size + t.numel() > elements or t.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(t)
        size += t.numel()
    if bucket:
        yield bucket
