"""Memory limit while a model is built: a tensor that does not fit in memory raises an error before it is allocated."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .errors import UsageError

SIZED: tuple[Callable[..., Any], ...] = (
    torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn,
)  # fmt: skip
CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "Storage size calculation overflowed")


def total_bytes() -> float:
    """Return the memory of the machine or container in bytes; infinity if the size is unknown."""
    found = math.inf
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP:
        with contextlib.suppress(ValueError, OSError):  # the file contains "max" if there is no limit
            found = min(found, int(path.read_text()))
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation: a MemoryError, or a RuntimeError of torch."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


class MemoryLimit(TorchFunctionMode):
    """Context manager that raises UsageError if a new tensor on the CPU exceeds the memory.

    Args:
        what: the name of the model in the message, with the settings that make it large.
        copies: number of copies of each tensor that must fit in memory, such as 2 for weights and their gradients.

    Raises:
        UsageError: a tensor, or the model in `check`, is larger than the memory divided by `copies`.
    """

    def __init__(self, what: str, copies: int = 1) -> None:
        super().__init__()
        self.what, self.copies, self.limit = what, copies, total_bytes()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SIZED and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            self._check_call(func, args, kwargs)
        return func(*args, **kwargs)

    def _check_call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        size = kwargs.get("size", args[:1] if func is torch.full else args)
        if len(size) == 1 and isinstance(size[0], (tuple, list)):
            (size,) = size
        if not all(isinstance(length, int) and length >= 0 for length in size):
            return  # torch itself raises an error for an invalid size
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        self._check_size(math.prod(size) * dtype.itemsize)

    def check(self, model: nn.Module) -> None:
        """Raise UsageError if the parameters and buffers of a model together exceed the memory."""
        tensors = itertools.chain(model.parameters(), model.buffers())
        self._check_size(sum(t.numel() * t.element_size() for t in tensors if t.device.type == "cpu"))

    def _check_size(self, size: int) -> None:
        needed = self.copies * size
        if needed > self.limit:
            raise UsageError(
                f"{self.what}: the model needs at least {_gigabytes(needed)} GB of memory"
                f"{', its gradients included' if self.copies > 1 else ''}, and there are {_gigabytes(self.limit)} GB; "
                "choose smaller settings"
            )


def _gigabytes(count: float) -> str:
    """Return bytes as text in GB, without a conversion to float, which fails for integers beyond 1e308."""
    whole = int(count) // 10**9
    return f"{whole:,}" if whole < 10**15 else f"1e{len(str(whole)) - 1}" if whole < 10**4000 else "1e4000"
