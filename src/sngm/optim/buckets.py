"""What one step works on: tensors gathered from the parameter groups, ready for arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .norms import LOW_PRECISION, sum_dtype
from .rounding import rounded
from .sharded_norms import Shards

Closure = Callable[[], Any]


@dataclass(slots=True)
class Bucket:
    """The tensors of one parameter group that share a device and a dtype; complex ones viewed as real."""

    group: dict[str, Any]
    position: int  # the group's place among the groups
    device: torch.device
    dtype: torch.dtype  # of the parameters as the user knows them
    owners: list[Tensor] = field(default_factory=list)  # the parameters as the user knows them
    indices: list[int] = field(default_factory=list)  # their places among all parameters
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    buffers: dict[str, list[Tensor]] = field(default_factory=dict)
    rounding: Tensor | None = None  # the step, where the parameters are rounded at random

    def view_as_real(self) -> None:
        """Complex tensors as pairs of reals: every rule here is linear in them, and norms agree."""
        self.params = [torch.view_as_real(p) for p in self.params]
        self.grads = [torch.view_as_real(g.resolve_conj()) for g in self.grads]  # autograd conjugates lazily
        self.buffers = {key: [torch.view_as_real(b) for b in some] for key, some in self.buffers.items()}

    @property
    def low_precision(self) -> bool:
        return self.dtype in LOW_PRECISION

    def rounded(self, values: list[Tensor]) -> list[Tensor]:
        """New values of the parameters, as they may be copied there."""
        if self.rounding is None:
            return values
        return [rounded(value, i, self.rounding) for value, i in zip(values, self.indices, strict=True)]

    def some(self, which: Iterable[int]) -> Bucket:
        """The bucket of some of these tensors."""

        def pick(tensors: list[Any]) -> list[Any]:
            return [tensors[i] for i in which]

        which = list(which)
        return replace(
            self,
            owners=pick(self.owners),
            indices=pick(self.indices),
            params=pick(self.params),
            grads=pick(self.grads),
            buffers={key: pick(tensors) for key, tensors in self.buffers.items()},
        )

    def slices(self, elements: int) -> Iterator[Bucket]:
        """This bucket in runs of neighbours of at most `elements` elements (or one tensor), to bound copies."""
        run: list[int] = []
        size = 0
        for i, p in enumerate(self.params):
            if run and size + p.numel() > elements:
                yield self.some(run)
                run, size = [], 0
            run.append(i)
            size += p.numel()
        if run:
            yield self.some(run)


@dataclass(slots=True)
class Work:
    """One step's input. `scale` is what the gradients were multiplied by (a GradScaler's loss scale)."""

    buckets: list[Bucket]
    home: torch.device  # where norms that span devices meet
    on_host: bool  # values may be read without waiting for a device
    scale: float | Tensor
    found_inf: Tensor | None
    shards: Shards  # of all parameters, with a gradient or without
    lengths: list[int]  # how many parameters each group has

    def whole(
        self, parts: list[Tensor], *, kinds: int, buckets: list[Bucket] | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Squares of whole tensors, parts[i] being (kinds, pieces of bucket i); and the sum of the first kind."""
        if not self.shards.active:
            return parts, self._total([part[0] for part in parts])
        buckets = self.buckets if buckets is None else buckets
        packed = self.shards.tensors(self._packed(buckets, parts, kinds))
        columns = packed.unbind(1)
        whole = [torch.stack([columns[i] for i in bucket.indices], 1).to(bucket.device) for bucket in buckets]
        # over all columns: a tensor without a gradient here may have one on another rank, which must not decide alone
        return whole, packed[0].sum()

    def sums(self, parts: list[Tensor], *, by_group: bool = False) -> Tensor:
        """Squares summed over all ranks: one sum, or one for each group. parts[i] is of bucket i.

        Where shards are active each part must hold the square of each piece, else it may be their sum.
        """
        count = len(self.lengths) if by_group else 1
        if self.shards.active:
            positions = [i if by_group else 0 for i, length in enumerate(self.lengths) for _ in range(length)]
            packed = self._packed(self.buckets, [part[None] for part in parts], 1)
            return self.shards.spans(packed[0], positions, count)
        if not by_group:
            return self._total(parts).reshape(1)
        sums = torch.zeros(count, dtype=sum_dtype(self.home), device=self.home)
        for bucket, part in zip(self.buckets, parts, strict=True):
            sums[bucket.position] += part.sum().to(self.home)
        return sums

    def _packed(self, buckets: list[Bucket], parts: list[Tensor], kinds: int) -> Tensor:
        """A column a parameter, with or without a gradient here, so that all ranks agree on the places."""
        zero = torch.zeros(kinds, dtype=sum_dtype(self.home), device=self.home)
        columns = [zero] * len(self.shards.params)
        for bucket, part in zip(buckets, parts, strict=True):
            for i, column in zip(bucket.indices, part.to(self.home).unbind(1), strict=True):
                columns[i] = column
        # stacked, not written to places in a list: copying that list to a device would wait for it
        return torch.stack(columns, 1) if columns else zero[:, None][:, :0]

    def _total(self, parts: list[Tensor]) -> Tensor:
        if not parts:
            return torch.zeros((), dtype=sum_dtype(self.home), device=self.home)
        total = parts[0].sum().to(self.home)
        for part in parts[1:]:
            total = total + part.sum().to(self.home)
        return total


def evaluate(closure: Closure | None) -> Any:
    """The closure's loss, computed with gradients on."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def lr_of(group: dict[str, Any], key: str = "lr") -> float | Tensor:
    """The group's learning rate: a number, or a 0-d tensor where only a device knows it."""
    lr: float | Tensor = group[key]
    if not isinstance(lr, Tensor):
        return lr
    return lr.item() if lr.device.type == "cpu" and not torch.compiler.is_compiling() else lr.reshape(())


def state_dtype(p: Tensor) -> torch.dtype:
    """float32 for low-precision parameters, else the parameter's own dtype."""
    return torch.float32 if p.dtype in LOW_PRECISION else p.dtype


def as_dense(grad: Tensor) -> Tensor:
    """Sparse gradients as dense ones, because the buffers they meet are, and with the sign they are yet to get."""
    return (grad if grad.layout == torch.strided else grad.to_dense()).resolve_neg()
