"""Samples as tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UsageError
from .fingerprint import fingerprint


class Tensors:
    """Samples held in memory: tensors with a sample a row.

    >>> Tensors(torch.zeros(4, 2), torch.arange(4))[torch.tensor([3, 1])][1]
    tensor([3, 1])
    """

    def __init__(self, *tensors: Tensor) -> None:
        if len({len(t) for t in tensors}) != 1:
            raise UsageError(f"tensors must have as many rows as each other, got {[len(t) for t in tensors]}")
        self.tensors = tensors

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return self.tensors[0].device

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[indices.to(t.device)] for t in self.tensors)

    def rows(self, indices: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Where samples lie: the tensors that hold them, and the rows there."""
        return self.tensors, indices.to(self.device)

    def fingerprint(self) -> str:
        """What tells these samples from others."""
        return fingerprint(self.tensors)

    def to(self, device: torch.device | str) -> Tensors:
        """The same samples on a device."""
        return Tensors(*(t.to(device) for t in self.tensors))
