"""Whether Triton kernels can work on images and activations: on a GPU, or on the CPU in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from .optim.kernels import DEVICES, ONE_ROUNDING, installed

__all__ = ["LARGEST", "ONE_ROUNDING", "serve"]

LARGEST = 2**31  # elements: they are counted in 32 bits


def serve(x: Tensor, ndim: int = 4) -> bool:
    """Whether kernels can work on these images, or on activations of so many dimensions."""
    if torch.compiler.is_compiling() or x.ndim != ndim or x.numel() >= LARGEST:
        return False  # a compiler fuses torch's operations by itself
    return x.device.type in DEVICES and installed()
