"""Studies: grids of runs, the choice of learning rates, and parallel worker processes."""

from .grid import Cell, StudyConfig

__all__ = ["Cell", "StudyConfig"]
