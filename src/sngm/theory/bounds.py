"""Theorems 1 to 3, the remark on LARS and the bound of momentum SGD (MSGD): bounds on a run's mean gradient norm.

All functions take the following arguments, by position or keyword, as floats or arrays that broadcast:

- ``gap``: F(w_0) - F(w*), the loss at the start minus its minimum
- ``eta``: the learning rate, constant over the run
- ``steps``, ``batch``: T, the number of steps, and B, the batch size
- ``L``, ``lam``: constants of smoothness: the Hessian's norm is at most ``L + lam * ||grad F||``
- ``sigma``: E||grad f_i - grad F||^2 <= sigma^2, where f_i is the loss of a random sample i
- ``beta``: momentum
- ``blocks``: S, the number of blocks (tensors)
- ``rho``: the largest ratio ``||g|| / sum of the norms of the blocks of g`` over the gradients g of a run
- ``gamma_l``, ``gamma_u``: the lower and upper limit of phi(||w||), by which LARS multiplies the step of a block w

In the formulas, kappa is ``kappa(beta)``.
A bound is an upper limit of the mean of E||grad F(w_t)|| over t = 0 ... T-1 (for MSGD, of E||grad F(w_t)||^2).
The result is a float if all arguments are floats, else an array. If eta violates the condition of a theorem, ValueError
is raised with the largest admissible eta; conditions have a relative tolerance of 1e-12.

Each function ``*_best`` returns ``Best(eta, bound)``: the admissible eta with the lowest bound, and that bound. If the
bound has no minimum, the function returns a limit: eta is 0 if gap = 0. If no term grows with eta (L = 0; for MSGD also
sigma = 0), eta is the largest admissible value, which is infinite without a condition.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from .terms import ROUNDING, Best, Floats, Number, Terms, as_number, largest_eta, validate


def kappa(beta: Floats) -> Number:
    """Return (1 + beta) / (1 - beta)^2, a factor in the bounds that grows with the momentum beta.

    >>> round(kappa(0.9), 9)
    190.0
    """
    (beta,) = validate(beta=beta)
    return as_number((1 + beta) / np.square(1 - beta))  # ** 2 would round differently for arrays


def smooth_bound(
    gap: Floats, eta: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats
) -> Number:
    """Return the bound of Theorem 1 on SNGM's mean gradient norm, for an L-smooth function and any learning rate.

    The mean of E||grad F|| over the steps is at most ``(1-beta) gap / (eta T) + L kappa eta / 2 + 2 sigma / sqrt(B)``,
    where T is `steps`, B is `batch` and kappa is ``kappa(beta)``. The theorem assumes that the gradient of the loss F
    is L-Lipschitz and that single-sample gradients have a variance of at most sigma^2. `gap` is the loss at the start
    minus its minimum.

    >>> smooth_bound(gap=1, eta=0.1, steps=100, batch=16, L=1, sigma=1, beta=0)
    0.65
    """
    return _smooth(gap, steps, batch, L, sigma, beta).at(eta)


def smooth_best(gap: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats) -> Best:
    """Return the learning rate with the lowest `smooth_bound`, and that bound.

    The learning rate is ``sqrt(2 (1-beta) gap / (L kappa T))``, where T is `steps` and kappa is ``kappa(beta)``. It is
    0 if gap = 0 and infinite if L = 0; in both cases the returned bound is a limit, ``2 sigma / sqrt(batch)``.

    >>> smooth_best(gap=2, steps=64, batch=16, L=1, sigma=1, beta=0)
    Best(eta=0.25, bound=0.75)
    """
    return _smooth(gap, steps, batch, L, sigma, beta).best()


def _smooth(gap: Number, steps: Number, batch: Number, L: Number, sigma: Number, beta: Number) -> Terms:
    gap, steps, batch, L, sigma, beta = validate(**locals())
    return Terms(inverse=(1 - beta) * gap / steps, linear=L / 2 * kappa(beta), constant=2 * sigma / np.sqrt(batch))


def relaxed_bound(
    gap: Floats, eta: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats, lam: Floats
) -> Number:
    """Return the bound of Theorem 2 on SNGM's mean gradient norm, for an (L, lam)-smooth function.

    If ``8 eta kappa lam <= 1``, the mean of E||grad F|| over the steps is at most
    ``2 (1-beta) gap / (eta T) + 8 L kappa eta + 4 sigma / sqrt(B)``, where T is `steps`, B is `batch` and kappa is
    ``kappa(beta)``; a larger eta raises ValueError. The theorem assumes that the norm of the Hessian of the loss F is
    at most ``L + lam ||grad F||`` and that single-sample gradients have a variance of at most sigma^2.

    >>> relaxed_bound(gap=1, eta=0.125, steps=100, batch=16, L=1, sigma=1, beta=0, lam=1)
    2.16
    """
    return _relaxed(gap, steps, batch, L, sigma, beta, lam).at(eta)


def relaxed_best(
    gap: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats, lam: Floats
) -> Best:
    """Return the learning rate with the lowest `relaxed_bound`, and that bound.

    The learning rate is the smaller of ``sqrt((1-beta) gap / (4 L kappa T))`` and ``1 / (8 kappa lam)``, where T is
    `steps` and kappa is ``kappa(beta)``.

    >>> relaxed_best(gap=1, steps=100, batch=16, L=1, sigma=1, beta=0, lam=5)
    Best(eta=0.025, bound=2.0)
    """
    return _relaxed(gap, steps, batch, L, sigma, beta, lam).best()


def _relaxed(gap: Number, steps: Number, batch: Number, L: Number, sigma: Number, beta: Number, lam: Number) -> Terms:
    gap, steps, batch, L, sigma, beta, lam = validate(**locals())
    return Terms(
        inverse=2 * (1 - beta) * gap / steps,
        linear=8 * L * kappa(beta),
        constant=4 * sigma / np.sqrt(batch),
        limit=largest_eta(8 * kappa(beta) * lam),
        condition="8 * eta * kappa * lam <= 1",
    )


def msgd_bound(
    gap: Floats, eta: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats
) -> Number:
    """Return the bound of Section 3 on momentum SGD's mean SQUARED gradient norm, for an L-smooth function.

    If ``eta <= (1-beta)^2 / ((1+beta) L)``, the mean of E||grad F||^2 over the steps is at most
    ``2 (1-beta) gap / (eta T) + L eta sigma^2 / ((1-beta)^2 B) + 4 L^2 eta^2 sigma^2 / (1-beta)^2``, where T is `steps`
    and B is `batch`; a larger eta raises ValueError. The square root of the bound is a bound on the mean of
    E||grad F||. The assumptions are those of Theorem 1, see `smooth_bound`.

    >>> msgd_bound(gap=1, eta=0.1, steps=100, batch=10, L=1, sigma=1, beta=0)
    0.25
    """
    return _msgd(gap, steps, batch, L, sigma, beta).at(eta)


def msgd_best(gap: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats) -> Best:
    """Return the learning rate with the lowest `msgd_bound`, and that bound.

    The learning rate is the root of a cubic, but at most ``(1-beta)^2 / ((1+beta) L)``, the largest learning rate for
    which the bound holds. Without noise (sigma = 0) it is this limit. If L = 0 it is infinite.

    >>> msgd_best(gap=1, steps=100, batch=1, L=0.5, sigma=0, beta=0)
    Best(eta=2.0, bound=0.01)
    """
    return _msgd(gap, steps, batch, L, sigma, beta).best()


def _msgd(gap: Number, steps: Number, batch: Number, L: Number, sigma: Number, beta: Number) -> Terms:
    gap, steps, batch, L, sigma, beta = validate(**locals())
    return Terms(
        inverse=2 * (1 - beta) * gap / steps,
        linear=L * np.square(sigma) / (np.square(1 - beta) * batch),
        square=4 * np.square(L) * np.square(sigma) / np.square(1 - beta),
        constant=0.0,
        limit=largest_eta(kappa(beta) * L),
        condition="eta <= (1 - beta)**2 / ((1 + beta) * L)",
    )


def block_bound(
    gap: Floats, eta: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats, lam: Floats,
    blocks: Floats, rho: Floats,
) -> Number:  # fmt: skip
    """Return the bound of Theorem 3 on the mean gradient norm of SNGM that divides each block by the block's own norm.

    If ``8 eta kappa lam rho S <= 1``, the mean of E||grad F|| over the steps is at most
    ``2 rho (1-beta) gap / (eta T) + 8 L kappa rho S eta + 2 sigma (1 + rho sqrt(S)) / sqrt(B)``, where S is `blocks`,
    T is `steps`, B is `batch` and kappa is ``kappa(beta)``; a larger eta raises ValueError. The theorem makes the
    assumptions of Theorem 2, see `relaxed_bound`. It also assumes that rho is at least
    ``||g|| / sum of the norms of the blocks of g`` for every gradient g of the run, so ``1/sqrt(S) <= rho <= 1``. With
    one block and rho = 1 this is Theorem 2.

    >>> block_bound(gap=1, eta=0.0625, steps=100, batch=16, L=1, sigma=1, beta=0, lam=1, blocks=4, rho=0.5)
    2.16
    """
    return _block(gap, steps, batch, L, sigma, beta, lam, blocks, rho).at(eta)


def block_best(
    gap: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats, lam: Floats, blocks: Floats,
    rho: Floats,
) -> Best:  # fmt: skip
    """Return the learning rate with the lowest `block_bound`, and that bound.

    The learning rate is the smaller of ``sqrt((1-beta) gap / (4 L kappa T S))`` and ``1 / (8 kappa lam rho S)``, where
    T is `steps`, S is `blocks` and kappa is ``kappa(beta)``. The bound is never below the bound of `relaxed_best`, and
    both are equal if ``rho = 1/sqrt(S)`` (Section 6).

    >>> block_best(gap=2, steps=100, batch=16, L=1, sigma=1, beta=0, lam=5, blocks=4, rho=1)
    Best(eta=0.00625, bound=8.1)
    """
    return _block(gap, steps, batch, L, sigma, beta, lam, blocks, rho).best()


def _block(*arguments: Number) -> Terms:
    return _lars(*arguments)._replace(condition="8 * eta * kappa * lam * rho * blocks <= 1")


def lars_bound(
    gap: Floats, eta: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats, lam: Floats,
    blocks: Floats, rho: Floats, gamma_l: Floats, gamma_u: Floats,
) -> Number:  # fmt: skip
    """Return a bound on LARS's mean gradient norm, by the remark on Theorem 3.

    LARS multiplies the step of a block w by phi(||w||), with ``gamma_l <= phi <= gamma_u``. If
    ``8 eta kappa lam rho S gamma_u^2 / gamma_l <= 1``, the mean of E||grad F|| over the steps is at most
    ``2 rho (1-beta) gap / (gamma_l eta T) + 8 L kappa rho S eta gamma_u^2 / gamma_l
    + 2 sigma (1 + rho sqrt(S) gamma_u / gamma_l) / sqrt(B)``, with the symbols of `block_bound`. The remark has no
    formula. This formula follows the instructions of the remark, which are to replace every +eta in the proof by
    eta gamma_u and every -eta by -eta gamma_l. The assumptions are those of Theorem 3, for LARS whose momentum buffer
    sums phi g / ||g||. With gamma_l = gamma_u = gamma the bound is that of Theorem 3 at learning rate ``gamma eta``.

    >>> lars_bound(1, 0.03125, 100, 16, 1, 1, 0, 1, 4, 0.5, gamma_l=2, gamma_u=2)
    2.16
    """
    return _lars(gap, steps, batch, L, sigma, beta, lam, blocks, rho, gamma_l, gamma_u).at(eta)


def lars_best(
    gap: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats, lam: Floats, blocks: Floats,
    rho: Floats, gamma_l: Floats, gamma_u: Floats,
) -> Best:  # fmt: skip
    """Return the learning rate with the lowest `lars_bound`, and that bound.

    The learning rate is the smaller of ``sqrt((1-beta) gap / (4 L kappa T S)) / gamma_u`` and the largest one that the
    condition of `lars_bound` allows. T is `steps`, S is `blocks` and kappa is ``kappa(beta)``.

    >>> lars_best(1, 100, 16, 1, 1, 0, 0, 4, 0.5, gamma_l=1, gamma_u=2)
    Best(eta=0.0125, bound=3.1)
    """
    return _lars(gap, steps, batch, L, sigma, beta, lam, blocks, rho, gamma_l, gamma_u).best()


def _lars(
    gap: Number, steps: Number, batch: Number, L: Number, sigma: Number, beta: Number, lam: Number, blocks: Number,
    rho: Number, gamma_l: Number = 1.0, gamma_u: Number = 1.0,
) -> Terms:  # fmt: skip
    gap, steps, batch, L, sigma, beta, lam, blocks, rho, gamma_l, gamma_u = validate(**locals())
    low = 1 / np.sqrt(blocks)
    if np.any(rho < low * (1 - ROUNDING)):
        raise ValueError(f"rho must be at least 1 / sqrt(blocks), which is {float(np.max(low))}, and at most 1")
    if np.any(gamma_l > gamma_u):
        raise ValueError("gamma_l must be at most gamma_u")
    spread = gamma_u / gamma_l
    return Terms(
        inverse=2 * rho * (1 - beta) * gap / (gamma_l * steps),
        linear=8 * L * kappa(beta) * rho * blocks * gamma_u * spread,
        constant=2 * sigma * (1 + rho * np.sqrt(blocks) * spread) / np.sqrt(batch),
        limit=largest_eta(8 * kappa(beta) * lam * rho * blocks * gamma_u * spread),
        condition="8 * eta * kappa * lam * rho * blocks * gamma_u**2 / gamma_l <= 1",
    )


def rho(norms: ArrayLike) -> Number:
    """Return ||g|| divided by the sum of the norms of g's blocks, for a gradient g (Theorem 3).

    The last axis of `norms` has the norms of the blocks of one gradient. The ratio is 1/sqrt(S) for S blocks of equal
    norms, and 1 if all blocks but one are zero. The constant rho of the theorem is the maximum over a run:
    ``rho(norms).max()``, with a row of `norms` for each step.

    >>> rho([3.0, 4.0])
    0.7142857142857143
    >>> rho([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 5.0, 0.0]])
    array([0.5, 1. ])
    """
    norms = np.asarray(norms, dtype=np.float64)
    if norms.ndim == 0 or norms.shape[-1] == 0:
        raise ValueError("norms must have one entry per block along its last axis")
    top = norms.max(axis=-1, keepdims=True)
    if not np.all((norms >= 0) & (norms < math.inf) & (top > 0)):
        raise ValueError("norms must be finite and at least 0, and some block must have one above 0")
    shares = norms / top  # avoids overflow and underflow of the squares
    value = np.sqrt(np.square(shares).sum(axis=-1)) / shares.sum(axis=-1)
    return as_number(np.clip(value, 1 / math.sqrt(norms.shape[-1]), 1.0))


def cos_angle(norms: ArrayLike) -> Number:
    """Return the cosine of the angle between a gradient and the direction of block-wise SNGM.

    `norms` are the norms of the gradient's blocks g_s, and the direction consists of the blocks g_s / ||g_s||. By
    Section 6 the cosine is ``sum of norms / (sqrt(S) ||g||)`` for S blocks, that is ``1 / (sqrt(S) rho(norms))``: 1 for
    equal norms, and 1/sqrt(S) if all blocks but one are zero. As in the paper, S also counts blocks of norm 0.

    >>> round(cos_angle([3.0, 4.0]), 4)
    0.9899
    """
    share = np.asarray(rho(norms))
    return as_number(np.minimum(1.0, 1 / (math.sqrt(np.shape(norms)[-1]) * share)))
