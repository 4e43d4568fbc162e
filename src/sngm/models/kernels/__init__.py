"""Triton kernels for the models; import them only where Triton is installed."""
