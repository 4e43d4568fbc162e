"""Triton kernels for what small convolutional networks spend their time on; imported where Triton is."""

from ...kernels import serve

__all__ = ["serve"]
