"""What one step works on: tensors gathered from the parameter groups, ready for arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .norms import LOW_PRECISION
from .rounding import rounded

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


def dense(grad: Tensor) -> Tensor:
    """Sparse gradients as dense ones: the buffers they meet are dense, and every element of those moves."""
    return grad if grad.layout == torch.strided else grad.to_dense()
