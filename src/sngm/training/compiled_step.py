"""The loss of a forward pass, compiled by torch.compile: augmentation, model and loss in one graph."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..tasks import Batch, Samples, Task
from .config import RunConfig
from .data_loading import to_device

BACKEND = "inductor"
RECOMPILE_LIMIT = 64  # recompilations allowed per process, for new shapes, models and BatchNorm tracking


class NotCompiled(Exception):
    """torch.compile failed; the message is the reason in one line."""


def compiled(
    task: Task,
    model: nn.Module,
    samples: Samples,
    inputs: Tensor | Batch,
    carried: Batch,
    config: RunConfig,
    epoch: int | Tensor,
    device: torch.device,
) -> tuple[Tensor, Batch]:
    """Compute a forward pass with compiled code, and return its loss and the new recurrent state.

    `inputs` are indices of `samples`, or a batch. `carried` is the recurrent state before the pass. Seed and epoch are
    passed as tensors, so that runs with models of the same shape share compiled code.

    Raises:
        NotCompiled: torch.compile does not support this task.
    """
    if not isinstance(inputs, Tensor):
        inputs = to_device(inputs, device, config.dtype)
    here = inputs.device if isinstance(inputs, Tensor) else device
    seed = _number("seed", config.seed, here)
    epoch = epoch if isinstance(epoch, Tensor) else _number("epoch", epoch, here)
    try:
        return _compile()(task, model, samples, inputs, carried, seed, epoch, device, config.dtype)
    except Exception as error:
        if "TorchDynamoException" not in (cls.__name__ for cls in type(error).__mro__):  # private class
            raise
        raise NotCompiled(in_one_line(error)) from error


def in_one_line(error: Exception) -> str:
    """Return the message of an error without the traceback that torch appends.

    >>> in_one_line(RuntimeError("backend='inductor' raised:\\nTypeError: no\\n\\nSet TORCHDYNAMO_VERBOSE=1"))
    "backend='inductor' raised: TypeError: no"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


@functools.lru_cache(maxsize=8)
def _number(name: str, value: int, device: torch.device) -> Tensor:
    """Return an epoch or a seed as a cached tensor.

    `name` makes an epoch and a seed of equal value two tensors: code compiled for two tensors is not valid if both are
    the same object.
    """
    return torch.tensor(value, device=device)


def _loss(
    task: Task,
    model: nn.Module,
    samples: Samples,
    inputs: Tensor | Batch,
    carried: Batch,
    seed: Any,
    epoch: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Batch]:
    batch = task.batch(samples, inputs, seed=seed, epoch=epoch) if isinstance(inputs, Tensor) else inputs
    return task.follow(model, to_device(batch, device, dtype), carried)


@functools.cache
def _compile() -> Callable[..., tuple[Tensor, Batch]]:
    dynamo: Any = importlib.import_module("torch._dynamo").config
    if hasattr(dynamo, "allow_rnn"):
        dynamo.allow_rnn = True
    if hasattr(dynamo, "recompile_limit"):
        dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    # draw the same random numbers as an eager step (on a GPU, dropout still differs)
    options: Any = {"options": {"fallback_random": True}} if BACKEND == "inductor" else {}
    return torch.compile(_loss, fullgraph=True, dynamic=False, backend=BACKEND, **options)
