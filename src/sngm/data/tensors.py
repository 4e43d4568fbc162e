"""Samples stored as tensors, and their fingerprints (short hashes)."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ..errors import UsageError

FINGERPRINT_ROWS = 256


class Tensors:
    """Samples stored as tensors, whose first dimension is the sample.

    >>> Tensors(torch.zeros(4, 2), torch.arange(4))[torch.tensor([3, 1])][1]
    tensor([3, 1])
    """

    def __init__(self, *tensors: Tensor) -> None:
        if len({len(t) for t in tensors}) != 1:
            raise UsageError(f"tensors must have equal numbers of rows, got {[len(t) for t in tensors]}")
        self.tensors = tensors

    @property
    def device(self) -> torch.device:
        """The device that holds the samples."""
        return self.tensors[0].device

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, ...]:
        return tuple(t[indices.to(t.device)] for t in self.tensors)

    def rows(self, indices: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the underlying tensors, and the row numbers in them of the samples at `indices`."""
        return self.tensors, indices.to(self.device)

    def fingerprint(self) -> str:
        """Return a short hash of the samples, to detect different data."""
        return fingerprint(self.tensors)

    def to(self, device: torch.device | str) -> Self:
        """Return the same samples on a device."""
        moved = copy.copy(self)
        moved.tensors = tuple(t.to(device) for t in self.tensors)
        return moved


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """Return a short hash of the shapes and dtypes of tensors, and of 256 evenly spaced rows (of all, below 512).

    The last rows may be left out: of 1,001 rows 236, as the 256 are 3 apart. Runs are only compared if their
    fingerprints agree, so with another algorithm new runs could not join committed ones.

    >>> fingerprint([torch.zeros(1000)]) == fingerprint([torch.zeros(1000)]) != fingerprint([torch.ones(1000)])
    True
    """
    digest = hashlib.sha256()
    for t in tensors:
        rows = torch.arange(len(t))
        if len(t) >= 2 * FINGERPRINT_ROWS:
            rows = rows[:: len(t) // FINGERPRINT_ROWS][:FINGERPRINT_ROWS]
        digest.update(f"{tuple(t.shape)} {t.dtype}".encode())
        digest.update(t[rows.to(t.device)].cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
