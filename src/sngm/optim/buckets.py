"""Inputs of one step: the tensors of the parameter groups, sorted into buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .kernels import Unsupported
from .norms import LOW_PRECISION, sum_dtype
from .rounding import rounded
from .sharded_norms import Shards, arrived, is_dtensor, local

Closure = Callable[[], Any]


@dataclass(slots=True)
class Bucket:
    """Parameters of one group, device and dtype, with their gradients and state; complex tensors are viewed as real."""

    group: dict[str, Any]
    position: int  # index of the group
    device: torch.device
    dtype: torch.dtype  # dtype of `owners`
    owners: list[Tensor] = field(default_factory=list)  # the user's parameters, before view_as_real and local()
    indices: list[int] = field(default_factory=list)  # indices of `owners` among all parameters
    states: list[dict[str, Any]] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    buffers: dict[str, list[Tensor]] = field(default_factory=dict)
    counts: list[Tensor] = field(default_factory=list)  # LAMB's step counts, one-element float32 tensors
    rounding: Tensor | None = None  # step counter, if rounding is stochastic

    def view_as_real(self) -> None:
        """View complex tensors as pairs of reals, which changes neither their norms nor a linear update."""
        self.params = [torch.view_as_real(p) for p in self.params]
        self.grads = [torch.view_as_real(g.resolve_conj()) for g in self.grads]  # autograd conjugates lazily
        self.buffers = {key: [torch.view_as_real(b) for b in some] for key, some in self.buffers.items()}

    def match_layouts(self) -> None:
        """Make gradients and buffers dense, in the memory order of their parameters, as the kernels require."""
        for i, p in enumerate(self.params):
            if not p.permute(sorted(range(p.ndim), key=p.stride, reverse=True)).is_contiguous():
                raise Unsupported("a parameter has gaps in memory")
            grad = arrived(self.grads[i])
            self.grads[i] = grad if alike(grad, p) else laid_out_as(p, grad)
            for key, buffers in self.buffers.items():
                if not alike(buffers[i], p):
                    state = self.states[i]
                    state[key] = laid_out_as(local(self.owners[i]), state[key])
                    buffer = local(state[key])
                    buffers[i] = torch.view_as_real(buffer) if buffer.is_complex() else buffer

    @property
    def low_precision(self) -> bool:
        return self.dtype in LOW_PRECISION

    @property
    def fused(self) -> bool:
        """Whether the settings select torch's fused CPU kernels, for tensors that these kernels support."""
        foreach, fused = self.group["foreach"], self.group["fused"]
        return bool(fused or (fused is None and foreach is None)) and not self.low_precision

    @property
    def one_by_one(self) -> bool:
        """Whether the step updates one tensor at a time."""
        return self.group["foreach"] is False and not self.group["fused"]

    def rounded(self, values: list[Tensor]) -> list[Tensor]:
        """Return `values`, the new values of the parameters, stochastically rounded if the group enables it."""
        if self.rounding is None:
            return values
        return [rounded(value, i, self.rounding) for value, i in zip(values, self.indices, strict=True)]

    def select(self, which: Iterable[int]) -> Bucket:
        """Return a bucket with only the tensors at these indices of this bucket."""

        def pick(tensors: list[Any]) -> list[Any]:
            return [tensors[i] for i in which] if tensors else []

        which = list(which)
        names = ("owners", "indices", "states", "params", "grads", "counts")
        lists: dict[str, Any] = {name: pick(getattr(self, name)) for name in names}
        return replace(self, **lists, buffers={key: pick(tensors) for key, tensors in self.buffers.items()})

    def slices(self, elements: int) -> Iterator[Bucket]:
        """Split this bucket into buckets of up to `elements` elements (or one larger tensor), to save memory."""
        run: list[int] = []
        size = 0
        for i, p in enumerate(self.params):
            if run and size + p.numel() > elements:
                yield self.select(run)
                run, size = [], 0
            run.append(i)
            size += p.numel()
        if run:
            yield self.select(run)


@dataclass(slots=True)
class Work:
    """Inputs of one step. The gradients have been multiplied by `scale`, such as a GradScaler's loss scale."""

    buckets: list[Bucket]
    home: torch.device  # the device on which sums over several devices are computed
    on_host: bool  # values can be read without synchronising with a device
    scale: float | Tensor
    found_inf: Tensor | None
    shards: Shards  # placement of all parameters, with or without a gradient
    lengths: list[int]  # number of parameters of each group

    def tensor_squares(
        self, parts: list[Tensor], *, kinds: int, buckets: list[Bucket] | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Return the squared norms of the unsharded tensors, given those of their local shards.

        Args:
            parts: parts[i], of shape (kinds, tensors), holds the squared norms of the local shards of bucket i.
            kinds: number of rows of parts[i], such as 2 for gradients and parameters.
            buckets: the buckets that `parts` belong to; all by default.

        Returns:
            A list like `parts` with the squared norms of the unsharded tensors, and the sum of row 0 over all tensors.
        """
        if not self.shards.active:
            return parts, self._total([part[0] for part in parts])
        buckets = self.buckets if buckets is None else buckets
        packed = self.shards.tensors(self._packed(buckets, parts, kinds))
        columns = packed.unbind(1)
        whole = [torch.stack([columns[i] for i in bucket.indices], 1).to(bucket.device) for bucket in buckets]
        # sum all columns, because a tensor without a gradient here may have one on another rank, and ranks must agree
        return whole, packed[0].sum()

    def sums(self, parts: list[Tensor], *, by_group: bool = False) -> Tensor:
        """Return the sum of squared norms over all buckets and ranks (one element), or one sum per group if `by_group`.

        parts[i] holds the squared norms of the tensors of bucket i. If sums over ranks are needed, it must hold one
        value per local shard; else it may hold only their sum.
        """
        if self.shards.active:
            packed = self._packed(self.buckets, [part[None] for part in parts], 1)
            return self.shards.spans(packed[0], self.lengths, by_group=by_group)
        if not by_group:
            return self._total(parts).reshape(1)
        sums = torch.zeros(len(self.lengths), dtype=sum_dtype(self.home), device=self.home)
        for bucket, part in zip(self.buckets, parts, strict=True):
            sums[bucket.position] += part.sum().to(self.home)
        return sums

    def _packed(self, buckets: list[Bucket], parts: list[Tensor], kinds: int) -> Tensor:
        """Return `parts` as one tensor with a column for each parameter of the optimizer, zero without a gradient."""
        zero = torch.zeros(kinds, dtype=sum_dtype(self.home), device=self.home)
        columns = [zero] * len(self.shards.params)
        for bucket, part in zip(buckets, parts, strict=True):
            for i, column in zip(bucket.indices, part.to(self.home).unbind(1), strict=True):
                columns[i] = column
        # stacked instead of indexed, because copying an index list to a device would synchronise with it
        return torch.stack(columns, 1) if columns else zero[:, None][:, :0]

    def _total(self, parts: list[Tensor]) -> Tensor:
        if not parts:
            return torch.zeros((), dtype=sum_dtype(self.home), device=self.home)
        first, *rest = [part.sum().to(self.home) for part in parts]
        return sum(rest, first)


def evaluate(closure: Closure | None) -> Any:
    """Return the closure's loss, computed with gradients enabled, or None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def state_dtype(p: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's state: float32 for float16 and bfloat16, else the parameter's own dtype."""
    return torch.float32 if p.dtype in LOW_PRECISION else p.dtype


def as_dense(grad: Tensor) -> Tensor:
    """Return the gradient as a dense tensor, with lazy negation resolved."""
    return (grad if grad.layout == torch.strided else grad.to_dense()).resolve_neg()


def alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same shape have the same strides, except in dimensions of size 1."""
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)) or not a.numel()


def laid_out_as(layout: Tensor, tensor: Any) -> Any:
    """Return `tensor` with its elements copied into the memory order of `layout`; a DTensor is changed in place."""
    if is_dtensor(tensor):
        tensor._local_tensor = laid_out_as(layout, tensor._local_tensor)
        return tensor
    return torch.empty_like(layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
