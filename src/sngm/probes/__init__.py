"""Probes: measure the constants of the paper's convergence bounds at the current weights of a model.

`noise` measures sigma and the gradient noise scale, `curvature` the norm of the Hessian, `frontier` the pairs
(L, lambda) of relaxed smoothness, `blocks` the norm of each tensor of a gradient, with the constants rho and cos. These
four work with any model and loss. `along` measures during a short training of a task, `of_runs` at the last checkpoints
of runs.
"""

from .blocks import Blocks, blocks, frontier
from .curvature import Curvature, curvature
from .noise import Noise, noise
from .pilot import along, of_runs

__all__ = ["Blocks", "Curvature", "Noise", "along", "blocks", "curvature", "frontier", "noise", "of_runs"]
