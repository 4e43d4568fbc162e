"""Check whether Triton kernels can process a tensor: on a GPU, or on the CPU in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from .optim.kernels import DEVICES, ONE_ROUNDING, installed

__all__ = ["LARGEST", "ONE_ROUNDING", "kernels_support"]

LARGEST = 2**31  # elements; the kernels use 32-bit indices


def kernels_support(x: Tensor, ndim: int = 4) -> bool:
    """Return whether Triton kernels can process `x`, which must have `ndim` dimensions; False under torch.compile."""
    if torch.compiler.is_compiling() or x.ndim != ndim or x.numel() >= LARGEST:
        return False  # torch.compile fuses torch's own operations instead
    return x.device.type in DEVICES and installed()
