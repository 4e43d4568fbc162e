"""Probes: measure the constants of the paper's convergence bounds at the current weights of a model.

- `noise` measures sigma and the gradient noise scale.
- `curvature` measures the norm of the Hessian.
- `frontier` returns pairs (L, lambda) with ``||Hessian|| <= L + lambda ||gradient||`` at the measured weights.
- `blocks` measures the norm of each tensor of a gradient, and rho and cos, which say how uneven these norms are.
- `along` takes these measurements during a short training of a task, `of_runs` at the last checkpoint of each run.

The first four work with any model and loss.
"""

from .blocks import Blocks, blocks, frontier
from .curvature import Curvature, curvature
from .noise import Noise, noise
from .pilot import along, of_runs

__all__ = ["Blocks", "Curvature", "Noise", "along", "blocks", "curvature", "frontier", "noise", "of_runs"]
