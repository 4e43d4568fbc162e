"""One norm for several optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import Work
from .sharded_norms import Shards


class SharedNorm:
    """One norm over the parameters of several SNGM optimizers, such as one optimizer for each part of a pipeline.

    Call each optimizer's `step` as usual, in any order. The first `step` computes the norm of all gradients, and every
    optimizer divides by this norm. So all gradients must be ready before the first step, and every optimizer must step
    once before any of them steps again. With a GradScaler, call `scaler.unscale_` for every optimizer before the first
    step.

    Args:
        optimizers: SNGM optimizers with scope "global" and without a `norm_group`.
        norm_group: process group whose ranks hold other parts of the model; squared norms are summed over its ranks.

    Raises:
        TypeError: `optimizers` is not iterable, or one of them is not SNGM with scope "global".
        ValueError: `optimizers` is empty or holds an optimizer twice, or one of them has a `norm_group` or already has
            a shared norm.

    Examples:
        >>> import torch
        >>> from sngm import SNGM
        >>> parts = [torch.nn.Parameter(torch.tensor([3.0])), torch.nn.Parameter(torch.tensor([4.0]))]
        >>> optimizers = [SNGM([p], lr=1.0, momentum=0.0) for p in parts]
        >>> norm = SharedNorm(optimizers)
        >>> for p in parts:
        ...     (0.5 * p.square().sum()).backward()
        >>> for optimizer in optimizers:
        ...     optimizer.step()
        >>> [optimizer.grad_norm.item() for optimizer in optimizers]
        [5.0, 5.0]
    """

    def __init__(self, optimizers: Iterable[Any], norm_group: dist.ProcessGroup | None = None) -> None:
        if not isinstance(optimizers, Iterable):
            raise TypeError(f"optimizers must be a list of optimizers, got {type(optimizers).__name__}")
        self.optimizers = list(optimizers)
        self.norm_group = norm_group
        for i, optimizer in enumerate(self.optimizers):
            check_part(optimizer, f"optimizers[{i}]")
            if any(optimizer is other for other in self.optimizers[:i]):
                raise ValueError(f"optimizers[{i}] is in the list twice; pass each optimizer once")
        if not self.optimizers:
            raise ValueError("optimizers must hold at least one optimizer, got none")
        self._shards = Shards(())
        self._square: Tensor
        self._waiting: set[int] = set()  # indices of the optimizers that have not stepped since the norm was computed
        for optimizer in self.optimizers:
            optimizer.shared_norm = self

    @torch.no_grad()
    def square(self, optimizer: Any) -> Tensor:
        """Return the squared norm of the gradients of all optimizers, for a step of `optimizer`, one of them.

        The first optimizer that steps computes it for all.
        """
        (index,) = (i for i, part in enumerate(self.optimizers) if part is optimizer)
        if not self._waiting:
            self._square = self._measure()
            self._waiting = set(range(len(self.optimizers)))
        if index not in self._waiting:
            raise RuntimeError(
                f"optimizers[{index}] of a SharedNorm steps again, but {sorted(self._waiting)} have not stepped since "
                "the norm was computed; let each optimizer step once"
            )
        self._waiting.remove(index)
        return self._square

    def _measure(self) -> Tensor:
        works = [optimizer._gather() for optimizer in self.optimizers]
        params = [p for work in works for p in work.shards.params]
        if not self._shards.matches(params, self.norm_group):
            self._shards = Shards(params, self.norm_group)
        whole = Work([], works[0].home, False, 1.0, None, self._shards, [len(params)])
        parts, start = [], 0
        for optimizer, work in zip(self.optimizers, works, strict=True):
            for bucket in work.buckets:
                whole.buckets.append(replace(bucket, indices=[start + i for i in bucket.indices]))
                parts.append(optimizer._squares(bucket, whole))
            start += len(work.shards.params)
        return whole.sums(parts)[0]


def check_part(optimizer: Any, name: str) -> None:
    """Raise an error unless `optimizer` can have a shared norm; errors call the optimizer `name`."""
    from .sngm import SNGM

    if not isinstance(optimizer, SNGM) or optimizer.scope != "global":
        kind = f"SNGM(scope={optimizer.scope!r})" if isinstance(optimizer, SNGM) else type(optimizer).__name__
        raise TypeError(f"{name} must be SNGM with scope='global', got {kind}, which has no norm over all parameters")
    if optimizer.norm_group is not None:
        raise ValueError(f"{name} has a norm_group; pass it to SharedNorm instead")
    if optimizer.shared_norm is not None:
        raise ValueError(f"{name} already has a shared norm")
