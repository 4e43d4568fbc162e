"""Gradients, and their conversion to flat vectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import UsageError

NOT_FINITE = "the loss or its gradient is not finite here, so there is nothing to measure"


class NotFinite(UsageError):
    """The loss or its gradient is NaN or infinite at the weights where it is measured."""


def trained(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that require a gradient; raise UsageError if there are none."""
    if isinstance(params, Tensor):
        raise UsageError("params must be a list of tensors, such as model.parameters(), got a tensor")
    found = [p for p in params if p.requires_grad]
    if not found:
        raise UsageError("there are no parameters that require a gradient")
    return found


def check_loss(loss: Tensor) -> None:
    """Raise UsageError unless the loss is a tensor of one element that requires a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(f"a loss must be a tensor with one number, got {what}")
    if not loss.requires_grad:
        why = "" if torch.is_grad_enabled() else ", because gradients are disabled here (torch.no_grad)"
        raise UsageError(f"the loss does not depend on the parameters{why}")


def gradients(loss: Tensor, params: Sequence[Tensor], create_graph: bool = False) -> list[Tensor | None]:
    """Return one dense gradient per parameter; None if the loss does not depend on the parameter."""
    check_loss(loss)
    found = torch.autograd.grad(loss.reshape(()), params, create_graph=create_graph, allow_unused=True)
    if all(g is None for g in found):
        raise UsageError("the loss does not depend on the parameters")
    return [None if g is None else (g.to_dense() if g.layout != torch.strided else g) for g in found]


def flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors into one vector. For None, zeros of the shape of the tensor in `like` are used."""
    pairs = zip(tensors, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if t is None else t.detach()).reshape(-1) for t, p in pairs])


def norm(vector: Tensor) -> Tensor:
    """Return the 2-norm as a float64 tensor, without synchronising with the device."""
    dense = vector if vector.layout == torch.strided else vector.to_dense()
    dtype = torch.complex128 if dense.is_complex() else torch.float64
    found: Tensor = torch.linalg.vector_norm(dense, dtype=dtype)
    return found


def parts(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector made by `flat` into views with the shapes of the tensors in `like`."""
    found = torch.split(vector, [p.numel() for p in like])
    return [part.view(p.shape) for part, p in zip(found, like, strict=True)]
