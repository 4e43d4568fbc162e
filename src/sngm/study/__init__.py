"""Studies: grids of runs, the choice of learning rates, and parallel worker processes."""

from .grid import Cell, StudyConfig
from .launch import compare

__all__ = ["Cell", "StudyConfig", "compare"]
