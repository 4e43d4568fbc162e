"""Sums of squares over tensors that are split among processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

# groups made here, by their ranks, for as long as the default group lives
_made: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


class Shards:
    """Where the pieces of an optimizer's parameters lie, and how sums over all of them are taken.

    The ranks of the largest mesh among the DTensors are the universe; without DTensors it is this rank alone. Any
    other mesh must be a part of it, with copies of its tensors on the other parts, and a plain tensor has a copy on
    every rank. So a tensor in n pieces is there (universe / n) times over: each rank puts in n / universe of the
    square of its piece, and one all-reduce over the universe is right for every placement. All ranks then hold the
    same bits, and decide alike whether a step is skipped.

    `norm_group` adds up what its ranks hold: other parameters, or slices of the same.
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
                "contains all those ranks or meets them in one rank only, such as that of the pipeline stages"
            )
        self._over_mesh = len(universe) > 1 and len(shared) <= 1
        self._over_group = len(others) > 1
        self._constants: dict[Any, Tensor] = {}
        self._counted = not self._over_group

    def serves(self, params: Sequence[Tensor], norm_group: Any) -> bool:
        """Whether this was built for these very parameters."""
        return norm_group is self.norm_group and len(params) == len(self.params) and all(map(is_, params, self.params))

    @property
    def active(self) -> bool:
        """Whether ranks have anything to exchange."""
        return self._over_mesh or self._over_group

    def tensors(self, packed: Tensor) -> Tensor:
        """Squares of whole tensors from those of the pieces here, (kinds, parameters); zero where there is no gradient.

        With a `norm_group`, its ranks must hold slices of the same tensors in the same order.
        """
        if not self._counted:
            self._count(packed.device)
        return self._sum(self._weighed(packed))

    def spans(self, packed: Tensor, positions: Sequence[int], count: int) -> Tensor:
        """Sums over all that is in each of `count` spans, parameter i being in span ``positions[i]``.

        `packed` is (parameters,), the squares of the pieces here; zero where there is no gradient.
        """
        weighed = self._weighed(packed)
        if count == 1:
            return self._sum(weighed.sum().reshape(1))
        key = (tuple(positions), count, packed.device)
        if key not in self._constants:
            within = torch.tensor(positions, device="cpu") == torch.arange(count, device="cpu")[:, None]
            self._constants[key] = within.to(packed.device)
        return self._sum(torch.where(self._constants[key], weighed, 0.0).sum(1))

    def _weighed(self, packed: Tensor) -> Tensor:
        if self._mesh is None:
            return packed
        if packed.device not in self._constants:  # kept there: a copy would wait for the device
            self._constants[packed.device] = torch.tensor(self._weights, dtype=packed.dtype, device=packed.device)
        return packed * self._constants[packed.device]

    def _sum(self, values: Tensor) -> Tensor:
        values = values.contiguous()
        if self._over_mesh:
            dist.all_reduce(values, group=_group(self._mesh))
        if self._over_group:
            dist.all_reduce(values, group=self.norm_group)
        return values

    def _count(self, device: torch.device) -> None:
        """Refuse ranks with unlike numbers of parameters, which would wait for one another forever."""
        here = len(self.params)
        limits = torch.tensor([here, -here], device=device)
        dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=self.norm_group)
        most, least = limits[0].item(), -limits[1].item()
        if most != least:
            raise ValueError(
                f"norms of single tensors over norm_group need a slice of every tensor on every rank, in the same "
                f"order, but its ranks hold from {least} to {most} parameters ({here} here); where each rank owns "
                "whole tensors, leave norm_group out"
            )
        self._counted = True


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor, without importing that class, which takes a second."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """The piece of a DTensor that lies here, sharing its memory; a plain tensor as it is."""
    # to_local() would wrap a parameter's piece anew for autograd's sake on every call
    return getattr(tensor, "_local_tensor", tensor)


def aligned(p: Any, grad: Any) -> Any:
    """The gradient laid out as its parameter is: sums that are still in parts on several ranks are made."""
    if is_dtensor(p) and not is_dtensor(grad):
        raise TypeError("the gradient of a DTensor must be one too; distribute it as the parameter is distributed")
    if is_dtensor(p) and grad.placements != p.placements:
        return grad.redistribute(placements=p.placements)
    return grad


def local_gradient(p: Tensor, grad: Tensor) -> Tensor:
    """The piece of the gradient that belongs to the piece of `p` here, once it has arrived."""
    piece: Tensor = arrived(local(aligned(p, grad)))
    return piece


def arrived(tensor: Any) -> Any:
    """The tensor itself, where it is still on its way from other processes."""
    return tensor.wait() if hasattr(tensor, "wait") else tensor  # an AsyncCollectiveTensor


def like(p: Any, tensor: Any) -> Any:
    """A whole or otherwise sharded tensor laid out as `p` is; what each rank holds whole must be the same."""
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
    """The mesh whose ranks contain those of all others."""
    ranks = {mesh: _ranks(mesh) for mesh in meshes if mesh is not None}
    if not ranks:
        return None
    largest = max(ranks, key=lambda mesh: (len(ranks[mesh]), -mesh.ndim))
    for mesh, some in ranks.items():
        if dist.get_rank() not in some:
            raise ValueError(
                f"a parameter lies on {mesh}, which rank {dist.get_rank()} is not part of; give each rank's optimizer "
                "the parameters that have a piece there, and a norm_group if norms must span them all"
            )
        if not some <= ranks[largest]:
            raise ValueError(
                f"parameters lie on {largest} and on {mesh}, neither of which contains the other; lay the one or the "
                "other out on a mesh that spans both, with Replicate() along the dimension it is not cut along"
            )
    return largest


def _group(mesh: Any) -> Any:
    """The group of all ranks of a mesh. Making one, at most once, takes all of them."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(sorted(_ranks(mesh)))
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    made = _made.setdefault(dist.group.WORLD, {})
    if ranks not in made:  # ranks outside, such as other pipeline stages, need not take part
        made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return made[ranks]
