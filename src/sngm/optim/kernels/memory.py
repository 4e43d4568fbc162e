"""How tensors lie in memory, and objects."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from .. import sharded_norms
from ..buckets import as_dense

SAMPLE = (None, struct, ctypes)


def ids_within(objects: tuple[Any, ...]) -> bytes:
    """The ids of these objects, as the tuple itself holds them: read at once, not asked for one by one."""
    return ctypes.string_at(id(objects) + tuple.__basicsize__, len(objects) * struct.calcsize("P"))


def ids_one_by_one(objects: tuple[Any, ...]) -> bytes:
    """The same, where tuples are not known to be like that inside."""
    return struct.pack(f"{len(objects)}P", *map(id, objects))


ids = ids_within if ids_within(SAMPLE) == ids_one_by_one(SAMPLE) else ids_one_by_one


def on_host(value: Any) -> bool:
    """Whether this is a tensor whose value the host can read without waiting."""
    return isinstance(value, Tensor) and value.device.type == "cpu"


def address(tensor: Tensor | None) -> int:
    """Where the piece of a tensor that lies here begins; 0 for none."""
    return 0 if tensor is None else sharded_norms.local(tensor).data_ptr()


def numbers(addresses: bytes) -> memoryview:
    """Addresses in a row, as numbers."""
    return memoryview(addresses).cast("q")


def dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).is_contiguous()


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one shape have their elements in the same order."""
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)) or not a.numel()


def laid_out_as(layout: Tensor, tensor: Any) -> Any:
    """A copy of a tensor with its elements in the order of `layout`."""
    if sharded_norms.is_dtensor(tensor):
        tensor._local_tensor = laid_out_as(layout, tensor._local_tensor)
        return tensor
    return torch.empty_like(layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@torch.no_grad()
def usable(layout: Tensor, grad: Tensor) -> Tensor:
    """The gradient as the kernels can read it: dense, in the order of `layout`, with nothing left to be done lazily."""
    grad = as_dense(sharded_norms.arrived(grad)).resolve_conj()
    return grad if dense(grad) and alike(grad, layout) else laid_out_as(layout, grad)
