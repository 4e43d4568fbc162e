"""One pass through a model in which each part of the samples has its own copy of the parameters.

A *stack* of a parameter w is a tensor of shape (copies, *w.shape). Copy i is used for the i-th of `copies` equal,
contiguous parts of the samples, so the gradient of a stack holds a gradient for each part. CLARS needs the gradients of
micro-batches, EXTRAP-SGD those of workers. On a GPU, one large pass takes less time than a small pass for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ..models.conv import Conv3x3
from ..models.ghost_norm import GhostBatchNorm2d
from ..tasks import Batch, Task

LAYERS = {nn.Linear, nn.Conv2d, Conv3x3, GhostBatchNorm2d}


def may_stack(task: Task, model: nn.Module) -> bool:
    """Return whether the parameters of this model may be stacks.

    The task must set `stacks` and have no loss of its own, all layers with parameters must be of the types in `LAYERS`,
    and all parameters must require gradients.
    """
    usual = task.stacks and type(task).loss is Task.loss and type(task).follow is Task.follow
    owners = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
    return usual and all(type(m) in LAYERS for m in owners) and all(p.requires_grad for p in model.parameters())


def stacked_loss(task: Task, model: nn.Module, stacks: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Return the mean loss of a batch with `stacks`, by the names of the parameters, in place of the parameters."""
    with _CopyForEachPart():
        return task.loss(cast(nn.Module, functools.partial(functional_call, model, dict(stacks))), batch)


class _CopyForEachPart(TorchFunctionMode):
    """Let torch's convolutions and linear layers use stacks. GhostBatchNorm2d and our kernels do so by themselves."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight = args[1] if len(args) > 1 else None
        if func is linear and isinstance(weight, Tensor) and weight.ndim == 3:
            func = _linear
        elif func is torch.conv2d and isinstance(weight, Tensor) and weight.ndim == 5:
            func = _conv2d
        return func(*args, **kwargs or {})


def _linear(x: Tensor, weights: Tensor, biases: Tensor | None = None) -> Tensor:
    parts = x.reshape(len(weights), -1, x.shape[-1])
    y = parts @ weights.mT if biases is None else torch.baddbmm(biases[:, None], parts, weights.mT)
    return y.reshape(*x.shape[:-1], -1)


def _conv2d(x: Tensor, weights: Tensor, biases: Tensor | None = None, *how: Any, **kwargs: Any) -> Tensor:
    parts = zip(x.chunk(len(weights)), weights, repeat(None) if biases is None else biases, strict=False)
    return torch.cat([torch.conv2d(part, weight, bias, *how, **kwargs) for part, weight, bias in parts])
