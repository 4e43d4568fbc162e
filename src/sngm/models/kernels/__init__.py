"""Triton kernels for what small networks spend their time on; imported where Triton is."""

from ...kernels import serve

__all__ = ["serve"]
