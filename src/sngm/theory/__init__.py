"""The paper's statements as plain functions of floats or numpy arrays; torch is not needed.

`bounds` has Theorems 1 and 2 and the bound of MSGD, `blocks` Theorem 3 and LARS, `plans` the corollaries and Table 1.
The page docs/theory.md goes through them one by one, and through the places where the paper slips.

>>> import sngm.theory
>>> sngm.theory.plan(10**8, "sngm", beta=0.0).batch
10000.0
"""

from .blocks import block_best, block_bound, cos_angle, lars_best, lars_bound, rho
from .bounds import kappa, msgd_best, msgd_bound, relaxed_best, relaxed_bound, smooth_best, smooth_bound
from .plans import Plan, extrap_order, least_gradients, plan
from .sums import Best

__all__ = [
    "Best",
    "Plan",
    "block_best",
    "block_bound",
    "cos_angle",
    "extrap_order",
    "kappa",
    "lars_best",
    "lars_bound",
    "least_gradients",
    "msgd_best",
    "msgd_bound",
    "plan",
    "relaxed_best",
    "relaxed_bound",
    "rho",
    "smooth_best",
    "smooth_bound",
]
