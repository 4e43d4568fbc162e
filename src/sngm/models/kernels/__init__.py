"""Triton kernels for what small networks spend their time on; imported where Triton is."""

from ...triton_support import serve

__all__ = ["serve"]
