"""The paper's theorems and corollaries as functions of floats or numpy arrays, without torch.

`bounds` has Theorems 1 to 3 and the bounds of momentum SGD (MSGD) and LARS; `plans` has the corollaries and Table 1.
docs/theory.md explains these functions, and the errors in the paper.

>>> import sngm.theory
>>> sngm.theory.plan(10**8, "sngm", beta=0.0).batch
10000.0
"""

from .bounds import (
    block_best,
    block_bound,
    cos_angle,
    kappa,
    lars_best,
    lars_bound,
    msgd_best,
    msgd_bound,
    relaxed_best,
    relaxed_bound,
    rho,
    smooth_best,
    smooth_bound,
)  # fmt: skip
from .plans import Plan, extrap_order, least_gradients, plan
from .terms import Best

__all__ = [
    "Best", "Plan", "block_best", "block_bound", "cos_angle", "extrap_order", "kappa", "lars_best", "lars_bound",
    "least_gradients", "msgd_best", "msgd_bound", "plan", "relaxed_best", "relaxed_bound", "rho", "smooth_best",
    "smooth_bound",
]  # fmt: skip
