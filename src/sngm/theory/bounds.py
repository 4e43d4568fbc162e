"""Theorems 1 and 2 and the bound of MSGD: how small the gradient gets on average.

The arguments, here and in `blocks` the same, by position or keyword, floats or arrays that broadcast:

- ``gap``: F(w_0) - F(w*), how far the loss at the start is above its minimum
- ``eta``: the learning rate, constant over the run
- ``steps``, ``batch``: T and B
- ``L``, ``lam``: smoothness. The Hessian's norm is at most ``L + lam * ||grad F||``
- ``sigma``: E||grad f_i - grad F||^2 <= sigma^2 for a random sample i
- ``beta``: momentum
- ``blocks``, ``rho``: S, and the largest ``||g|| / sum of the norms of its blocks`` of a run

A bound is a number that the mean of E||grad F(w_t)|| over t = 0 ... T-1 does not exceed (for MSGD, of its square).
Floats give a float, arrays an array. A condition that is violated is a ValueError with the largest admissible eta;
one that is met with equality may be missed by rounding, up to 1e-12.

Each `_best` returns ``Best(eta, bound)``, the admissible eta with the lowest bound. Where no eta is best, it is the
limit: with gap = 0 every smaller eta is better, and eta is 0; where nothing grows with eta (L = 0; for MSGD also
sigma = 0) it is the largest admissible eta, infinite if there is no condition. The bound is the bound's limit.
"""

from __future__ import annotations

import numpy as np

from .sums import Best, Floats, Number, Sum, largest, number, read


def kappa(beta: Floats) -> Number:
    """(1 + beta) / (1 - beta)^2, the price of momentum in every bound.

    >>> round(kappa(0.9), 9)
    190.0
    """
    (beta,) = read(beta=beta)
    return number((1 + beta) / np.square(1 - beta))  # not ** 2, whose last digit is another one for arrays


def smooth_bound(
    gap: Floats, eta: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats
) -> Number:
    """Theorem 1: SNGM on an L-smooth function, with any learning rate.

    ``(1-beta) gap / (eta T) + L kappa eta / 2 + 2 sigma / sqrt(B)``. Assumes gradients that are L-Lipschitz and samples
    of variance at most sigma^2.

    >>> smooth_bound(gap=1, eta=0.1, steps=100, batch=16, L=1, sigma=1, beta=0)
    0.65
    """
    return _smooth(gap, steps, batch, L, sigma, beta).at(eta)


def smooth_best(gap: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats) -> Best:
    """Theorem 1 at its best learning rate, ``sqrt(2 (1-beta) gap / (L kappa T))``.

    eta is 0 with gap = 0 and infinite with L = 0; the bound then is its limit, ``2 sigma / sqrt(B)``.

    >>> smooth_best(gap=2, steps=64, batch=16, L=1, sigma=1, beta=0)
    Best(eta=0.25, bound=0.75)
    """
    return _smooth(gap, steps, batch, L, sigma, beta).best()


def _smooth(gap: Number, steps: Number, batch: Number, L: Number, sigma: Number, beta: Number) -> Sum:
    gap, steps, batch, L, sigma, beta = read(gap=gap, steps=steps, batch=batch, L=L, sigma=sigma, beta=beta)
    return Sum(
        over=(1 - beta) * gap / steps,
        times=L / 2 * kappa(beta),
        rest=2 * sigma / np.sqrt(batch),
    )


def relaxed_bound(
    gap: Floats, eta: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats, lam: Floats
) -> Number:
    """Theorem 2: SNGM on an (L, lam)-smooth function, if ``8 eta kappa lam <= 1``.

    ``2 (1-beta) gap / (eta T) + 8 L kappa eta + 4 sigma / sqrt(B)``. Assumes a Hessian of norm at most
    ``L + lam ||grad F||`` and samples of variance at most sigma^2.

    >>> relaxed_bound(gap=1, eta=0.125, steps=100, batch=16, L=1, sigma=1, beta=0, lam=1)
    2.16
    """
    return _relaxed(gap, steps, batch, L, sigma, beta, lam).at(eta)


def relaxed_best(
    gap: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats, lam: Floats
) -> Best:
    """Theorem 2 at its best learning rate, ``sqrt((1-beta) gap / (4 L kappa T))`` or, if less, ``1 / (8 kappa lam)``.

    >>> relaxed_best(gap=1, steps=100, batch=16, L=1, sigma=1, beta=0, lam=5)
    Best(eta=0.025, bound=2.0)
    """
    return _relaxed(gap, steps, batch, L, sigma, beta, lam).best()


def _relaxed(gap: Number, steps: Number, batch: Number, L: Number, sigma: Number, beta: Number, lam: Number) -> Sum:
    gap, steps, batch, L, sigma, beta, lam = read(
        gap=gap, steps=steps, batch=batch, L=L, sigma=sigma, beta=beta, lam=lam
    )
    return Sum(
        over=2 * (1 - beta) * gap / steps,
        times=8 * L * kappa(beta),
        rest=4 * sigma / np.sqrt(batch),
        limit=largest(8 * kappa(beta) * lam),
        condition="8 * eta * kappa * lam <= 1",
    )


def msgd_bound(
    gap: Floats, eta: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats
) -> Number:
    """Section 3: momentum SGD on an L-smooth function, if ``eta <= (1-beta)^2 / ((1+beta) L)``. Of the SQUARED norm.

    ``2 (1-beta) gap / (eta T) + L eta sigma^2 / ((1-beta)^2 B) + 4 L^2 eta^2 sigma^2 / (1-beta)^2`` bounds the mean of
    E||grad F||^2; its square root bounds the mean of E||grad F||. Assumes what Theorem 1 does.

    >>> msgd_bound(gap=1, eta=0.1, steps=100, batch=10, L=1, sigma=1, beta=0)
    0.25
    """
    return _msgd(gap, steps, batch, L, sigma, beta).at(eta)


def msgd_best(gap: Floats, steps: Floats, batch: Floats, L: Floats, sigma: Floats, beta: Floats) -> Best:
    """`msgd_bound` at its best learning rate: the root of a cubic, or the condition's limit if that is less.

    Without noise (sigma = 0) that is ``(1-beta)^2 / ((1+beta) L)``; with L = 0 it is infinite.

    >>> msgd_best(gap=1, steps=100, batch=1, L=0.5, sigma=0, beta=0)
    Best(eta=2.0, bound=0.01)
    """
    return _msgd(gap, steps, batch, L, sigma, beta).best()


def _msgd(gap: Number, steps: Number, batch: Number, L: Number, sigma: Number, beta: Number) -> Sum:
    gap, steps, batch, L, sigma, beta = read(gap=gap, steps=steps, batch=batch, L=L, sigma=sigma, beta=beta)
    return Sum(
        over=2 * (1 - beta) * gap / steps,
        times=L * np.square(sigma) / (np.square(1 - beta) * batch),
        square=4 * np.square(L) * np.square(sigma) / np.square(1 - beta),
        rest=0.0,
        limit=largest(kappa(beta) * L),
        condition="eta <= (1 - beta)**2 / ((1 + beta) * L)",
    )
