"""Many runs: which to make, how to choose a learning rate, and making them side by side."""

from .grid import Cell, StudyConfig
from .launch import compare

__all__ = ["Cell", "StudyConfig", "compare"]
