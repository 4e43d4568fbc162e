"""Measure a live model: the constants that the paper's bounds speak of, as they are where the model is.

`noise` has sigma and the gradient noise scale, `curvature` the norm of the Hessian, `frontier` the pairs (L, lambda) of
relaxed smoothness, `blocks` the norms of a gradient's tensors with rho and cos. They work on any model and loss.
`along` trains a task for a while and measures on the way, `of_runs` measures where runs have come to.
"""

from .blocks import Blocks, blocks, frontier
from .curvature import Curvature, curvature
from .noise import Noise, noise
from .pilot import along, of_runs

__all__ = ["Blocks", "Curvature", "Noise", "along", "blocks", "curvature", "frontier", "noise", "of_runs"]
