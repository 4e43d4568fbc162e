"""Sums of squares over tensors that are sharded over processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# process groups created here, keyed by their ranks, for the lifetime of the default group
_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


class Shards:
    """The placement of an optimizer's parameters on ranks, with methods that sum squared norms over all shards.

    The ranks of the largest mesh among the DTensors are called the universe. Without DTensors, it is this rank alone.
    Any other mesh must be a subset of the universe. The other ranks of the universe are assumed to have copies of the
    tensors on that mesh, in as many shards, and all ranks to have copies of plain tensors. So in a universe of N ranks,
    a tensor in n shards exists N / n times. Each rank adds n / N times the squared norm of its shard, so that one
    all-reduce over the universe is correct for every placement. All ranks then have identical sums, and agree on
    whether a step is skipped.

    The ranks of `norm_group` hold different parameters, or slices of the same parameters; sums include all these ranks.
    """

    def __init__(self, params: Sequence[Tensor], norm_group: Any = None) -> None:
        self.params = list(params)
        self.norm_group = norm_group
        meshes = [getattr(p, "device_mesh", None) for p in self.params]
        self.sharded = any(mesh is not None for mesh in meshes)
        self._mesh = _largest(meshes)
        universe = set() if self._mesh is None else _ranks(self._mesh)
        copies = max(len(universe), 1)
        self._weights = [_pieces(p) / copies for p in self.params]
        others = set() if norm_group is None else set(dist.get_process_group_ranks(norm_group))
        shared = universe & others
        if len(shared) > 1 and shared != universe:
            raise ValueError(
                f"norm_group has ranks {sorted(others)}, but the DTensors among the parameters lie on ranks "
                f"{sorted(universe)}; leave norm_group out (DTensors need none), or pass a group that either "
                "contains all those ranks or only one of them, such as the group of the pipeline stages"
            )
        self._in_mesh = len(universe) > 1
        self._over_mesh = self._in_mesh and len(shared) <= 1  # else the sum over the group includes the mesh
        self._over_group = len(others) > 1
        self._constants: dict[Any, Tensor] = {}
        self._counted = not self._over_group

    def matches(self, params: Sequence[Tensor], norm_group: Any) -> bool:
        """Return whether this object was built for these parameters (by identity) and this process group."""
        return norm_group is self.norm_group and len(params) == len(self.params) and all(map(is_, params, self.params))

    @property
    def active(self) -> bool:
        """Whether sums need communication between ranks."""
        return self._over_mesh or self._over_group

    def tensors(self, packed: Tensor, *, over_group: bool = True) -> Tensor:
        """Return the squared norms of the unsharded tensors, computed from those of their local shards in `packed`.

        Both have one row for each kind of norm (such as of gradients, of parameters) and one column for each
        parameter, zero without a gradient. The ranks of a `norm_group` must hold slices of the same tensors in the
        same order. If `over_group` is False, sum only over the meshes of DTensors.
        """
        if over_group and not self._counted:
            self._count(packed.device)
        return self._sum(self._weighed(packed), over_group)

    def spans(self, packed: Tensor, lengths: Sequence[int], *, by_group: bool) -> Tensor:
        """Return the sum of squared norms over all parameters (one element), or one sum per group if `by_group`.

        `packed` holds the squared norm of each parameter's local shard, zero without a gradient; ``lengths[i]`` is the
        number of parameters of group i.
        """
        weighed = self._weighed(packed)
        if not by_group:
            return self._sum(weighed.sum().reshape(1))
        key = (tuple(lengths), packed.device)
        if key not in self._constants:
            groups = torch.arange(len(lengths), device="cpu")
            within = groups.repeat_interleave(torch.tensor(lengths, device="cpu")) == groups[:, None]
            self._constants[key] = within.to(packed.device)
        return self._sum(torch.where(self._constants[key], weighed, 0.0).sum(1))

    def _weighed(self, packed: Tensor) -> Tensor:
        if self._mesh is None:
            return packed
        if packed.device not in self._constants:  # cached, because a copy to the device would synchronise
            self._constants[packed.device] = torch.tensor(self._weights, dtype=packed.dtype, device=packed.device)
        return packed * self._constants[packed.device]

    def _sum(self, values: Tensor, over_group: bool = True) -> Tensor:
        values = values.contiguous()
        if self._over_mesh if over_group else self._in_mesh:
            dist.all_reduce(values, group=group_of(self._mesh))
        if self._over_group and over_group:
            dist.all_reduce(values, group=self.norm_group)
        return values

    def _count(self, device: torch.device) -> None:
        """Raise ValueError if ranks of `norm_group` have different numbers of parameters: the sums would deadlock."""
        here = len(self.params)
        limits = torch.tensor([here, -here], device=device)
        dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=self.norm_group)
        most, least = limits[0].item(), -limits[1].item()
        if most != least:
            raise ValueError(
                f"all ranks of norm_group must hold the same number of parameters, got {least} to {most} ({here} on "
                "this rank): norms of single tensors need a slice of every tensor on every rank, in the same order; if "
                "each rank holds whole tensors (ZeRO, pipeline stages), use norm_group=None"
            )
        self._counted = True


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without importing that class, because the import takes a second."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, sharing its memory; return a plain tensor unchanged."""
    # to_local() would create a new autograd wrapper on every call
    return getattr(tensor, "_local_tensor", tensor)


def aligned(p: Any, grad: Any) -> Any:
    """Return the gradient with the placements of its parameter; partial sums are reduced."""
    if is_dtensor(p) and not is_dtensor(grad):
        raise TypeError("the gradient of a DTensor must be one too; distribute it as the parameter is distributed")
    if is_dtensor(p) and grad.placements != p.placements:
        return grad.redistribute(placements=p.placements)
    return grad


def arrived(tensor: Any) -> Any:
    """Wait for an AsyncCollectiveTensor and return its value; return other tensors unchanged."""
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def redistribute_like(p: Any, tensor: Any) -> Any:
    """Return `tensor` with the placements of `p`, or as a plain tensor if `p` is a plain tensor.

    `tensor` is a DTensor, or a plain tensor that is equal on all ranks.
    """
    if not is_dtensor(p):
        return tensor.full_tensor() if is_dtensor(tensor) else tensor
    if not is_dtensor(tensor):
        from torch.distributed.tensor import DTensor, Replicate

        whole = tensor.to(p.device)
        tensor = DTensor.from_local(whole, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)
    return aligned(p, tensor)


def _pieces(p: Any) -> int:
    if not is_dtensor(p):
        return 1
    sizes = zip(p.placements, p.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def _ranks(mesh: Any) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _largest(meshes: list[Any]) -> Any:
    """Return the mesh whose ranks contain those of all other meshes, or None if `meshes` holds only None."""
    ranks = {mesh: _ranks(mesh) for mesh in meshes if mesh is not None}
    if not ranks:
        return None
    largest = max(ranks, key=lambda mesh: (len(ranks[mesh]), -mesh.ndim))
    for mesh, some in ranks.items():
        if dist.get_rank() not in some:
            raise ValueError(
                f"a parameter lies on {mesh}, which rank {dist.get_rank()} is not part of; give each rank's optimizer "
                "the parameters that have a shard there, and a norm_group if norms must span them all"
            )
        if not some <= ranks[largest]:
            raise ValueError(
                f"parameters lie on {largest} and on {mesh}, neither of which contains the other; place one of them on "
                "a mesh that spans both, with Replicate() in the mesh dimension in which it is not sharded"
            )
    return largest


def group_of(mesh: Any) -> Any:
    """Return the process group of all ranks of a mesh. All of them must call this: the first call may create it."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(sorted(_ranks(mesh)))
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    made = _groups.setdefault(dist.group.WORLD, {})
    if ranks not in made:  # ranks outside the mesh, such as other pipeline stages, do not call this
        made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return made[ranks]
