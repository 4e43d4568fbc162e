"""Section 6: what dividing each block by its own norm does to the bound, for block-wise SNGM and for LARS.

Arguments, conditions and what a `_best` returns are as in `bounds`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from .bounds import kappa
from .sums import ROUNDING, Best, Floats, Number, Sum, largest, number, read

LARS_CONDITION = "8 * eta * kappa * lam * rho * blocks * gamma_u**2 / gamma_l <= 1"


def block_bound(
    gap: Floats,
    eta: Floats,
    steps: Floats,
    batch: Floats,
    L: Floats,
    sigma: Floats,
    beta: Floats,
    lam: Floats,
    blocks: Floats,
    rho: Floats,
) -> Number:
    """Theorem 3: block-wise SNGM with S blocks, each divided by its own norm, if ``8 eta kappa lam rho S <= 1``.

    ``2 rho (1-beta) gap / (eta T) + 8 L kappa rho S eta + 2 sigma (1 + rho sqrt(S)) / sqrt(B)``. Assumes what Theorem 2
    does, and that rho is at least ``||g|| / sum of the norms of its blocks`` for every gradient g of the run, so
    ``1/sqrt(S) <= rho <= 1``. One block with rho = 1 is Theorem 2.

    >>> block_bound(gap=1, eta=0.0625, steps=100, batch=16, L=1, sigma=1, beta=0, lam=1, blocks=4, rho=0.5)
    2.16
    """
    return _block(gap, steps, batch, L, sigma, beta, lam, blocks, rho).at(eta)


def block_best(
    gap: Floats,
    steps: Floats,
    batch: Floats,
    L: Floats,
    sigma: Floats,
    beta: Floats,
    lam: Floats,
    blocks: Floats,
    rho: Floats,
) -> Best:
    """Theorem 3 at its best learning rate: Theorem 2's divided by sqrt(S), or, if less, ``1 / (8 kappa lam rho S)``.

    The bound is never below that of `relaxed_best`, and equal to it if ``rho = 1/sqrt(S)`` (Section 6).

    >>> block_best(gap=2, steps=100, batch=16, L=1, sigma=1, beta=0, lam=5, blocks=4, rho=1)
    Best(eta=0.00625, bound=8.1)
    """
    return _block(gap, steps, batch, L, sigma, beta, lam, blocks, rho).best()


def lars_bound(
    gap: Floats,
    eta: Floats,
    steps: Floats,
    batch: Floats,
    L: Floats,
    sigma: Floats,
    beta: Floats,
    lam: Floats,
    blocks: Floats,
    rho: Floats,
    gamma_l: Floats,
    gamma_u: Floats,
) -> Number:
    """The remark on Theorem 3: LARS with ``gamma_l <= phi(||w||) <= gamma_u``.

    If ``8 eta kappa lam rho S gamma_u^2 / gamma_l <= 1``:
    ``2 rho (1-beta) gap / (gamma_l eta T) + 8 L kappa rho S eta gamma_u^2 / gamma_l
    + 2 sigma (1 + rho sqrt(S) gamma_u / gamma_l) / sqrt(B)``. The remark prints no formula: this is what its recipe
    gives, every +eta in the proof replaced by eta gamma_u and every -eta by -eta gamma_l. Assumes what Theorem 3 does,
    and momentum on phi g / ||g||. With gamma_l = gamma_u it is Theorem 3 at ``gamma eta``.

    >>> lars_bound(1, 0.03125, 100, 16, 1, 1, 0, 1, 4, 0.5, gamma_l=2, gamma_u=2)
    2.16
    """
    return _block(gap, steps, batch, L, sigma, beta, lam, blocks, rho, gamma_l, gamma_u, LARS_CONDITION).at(eta)


def lars_best(
    gap: Floats,
    steps: Floats,
    batch: Floats,
    L: Floats,
    sigma: Floats,
    beta: Floats,
    lam: Floats,
    blocks: Floats,
    rho: Floats,
    gamma_l: Floats,
    gamma_u: Floats,
) -> Best:
    """`lars_bound` at its best learning rate: Theorem 3's divided by gamma_u, or the condition's limit if less.

    >>> lars_best(1, 100, 16, 1, 1, 0, 0, 4, 0.5, gamma_l=1, gamma_u=2)
    Best(eta=0.0125, bound=3.1)
    """
    return _block(gap, steps, batch, L, sigma, beta, lam, blocks, rho, gamma_l, gamma_u, LARS_CONDITION).best()


def _block(
    gap: Number,
    steps: Number,
    batch: Number,
    L: Number,
    sigma: Number,
    beta: Number,
    lam: Number,
    blocks: Number,
    rho: Number,
    gamma_l: Number = 1.0,
    gamma_u: Number = 1.0,
    condition: str = "8 * eta * kappa * lam * rho * blocks <= 1",
) -> Sum:
    """The remark on LARS; Theorem 3 where both gammas are 1."""
    gap, steps, batch, L, sigma, beta, lam, blocks, rho, gamma_l, gamma_u = read(
        gap=gap,
        steps=steps,
        batch=batch,
        L=L,
        sigma=sigma,
        beta=beta,
        lam=lam,
        blocks=blocks,
        rho=rho,
        gamma_l=gamma_l,
        gamma_u=gamma_u,
    )
    low = 1 / np.sqrt(blocks)
    if np.any(rho < low * (1 - ROUNDING)):
        raise ValueError(f"rho must be at least 1 / sqrt(blocks), which is {float(np.max(low))}, and at most 1")
    if np.any(gamma_l > gamma_u):
        raise ValueError("gamma_l must be at most gamma_u")
    spread = gamma_u / gamma_l
    return Sum(
        over=2 * rho * (1 - beta) * gap / (gamma_l * steps),
        times=8 * L * kappa(beta) * rho * blocks * gamma_u * spread,
        rest=2 * sigma * (1 + rho * np.sqrt(blocks) * spread) / np.sqrt(batch),
        limit=largest(8 * kappa(beta) * lam * rho * blocks * gamma_u * spread),
        condition=condition,
    )


def rho(norms: ArrayLike) -> Number:
    """||g|| over the sum of its blocks' norms, of which the last axis of `norms` has one each (Theorem 3).

    Between 1/sqrt(S), for equal norms, and 1, for one block. The theorem's constant is the largest of a run:
    ``rho(norms).max()``, with a row a step.

    >>> rho([3.0, 4.0])
    0.7142857142857143
    >>> rho([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 5.0, 0.0]])
    array([0.5, 1. ])
    """
    norms = np.asarray(norms, dtype=np.float64)
    if norms.ndim == 0 or norms.shape[-1] == 0:
        raise ValueError("norms must have one entry a block along its last axis")
    top = norms.max(axis=-1, keepdims=True)
    if not np.all((norms >= 0) & (norms < math.inf) & (top > 0)):
        raise ValueError("norms must be finite and at least 0, and some block must have one above 0")
    shares = norms / top  # so that no square overflows or vanishes
    value = np.sqrt(np.square(shares).sum(axis=-1)) / shares.sum(axis=-1)
    return number(np.clip(value, 1 / math.sqrt(norms.shape[-1]), 1.0))


def cos_angle(norms: ArrayLike) -> Number:
    """The cosine between g and the block-wise direction n = (g_s / ||g_s||), by the norms of g's blocks (Section 6).

    ``sum of norms / (sqrt(S) ||g||)``, that is ``1 / (sqrt(S) rho(norms))``: 1 for equal norms, 1/sqrt(S) when one
    block has all of the gradient. As in the paper every block counts in S, also one of norm 0.

    >>> round(cos_angle([3.0, 4.0]), 4)
    0.9899
    """
    share = np.asarray(rho(norms))
    return number(np.minimum(1.0, 1 / (math.sqrt(np.shape(norms)[-1]) * share)))
