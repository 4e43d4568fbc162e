"""Triton kernels for a step on a GPU: a few launches whatever the number of tensors, and nothing read on the host."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

# Triton's interpreter runs the same kernels on the CPU, slowly: for tests
DEVICES: tuple[str, ...] = ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
# a * b + c rounded once, whatever Triton's default is: another one would give other bits after a resume
ONE_ROUNDING = {"enable_fp_fusion": True}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@functools.cache
def installed() -> bool:
    """Whether Triton is there to compile the kernels."""
    return importlib.util.find_spec("triton") is not None


def serve(params: list[Any]) -> bool:
    """Whether the kernels can step all of these parameters."""
    return all(p.device.type in DEVICES and p.dtype in DTYPES for p in params) and installed()
