"""Triton kernels for a step on a GPU: a few launches for any number of tensors, without synchronisation."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

# Triton's interpreter runs the kernels on the CPU; it is slow and used only in tests
DEVICES: tuple[str, ...] = ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
# always round a * b + c once: with Triton's default, a new version of Triton could change the results of a resumed run
ONE_ROUNDING = {"enable_fp_fusion": True}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


class Unsupported(Exception):
    """Raised if the kernels cannot take a step: a tensor is not dense or has no storage, or devices are mixed."""


@functools.cache
def installed() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def support(tensors: Sequence[Tensor]) -> bool:
    """Return True if all tensors are on one device, and the kernels support this device and the dtypes."""
    devices, dtypes = {t.device for t in tensors}, {t.dtype for t in tensors}
    return len(devices) == 1 and devices.pop().type in DEVICES and dtypes <= {*DTYPES} and installed()
