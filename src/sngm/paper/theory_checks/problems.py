"""Functions with known constants, and runs of the paper's methods on them, vectorised over seeds and learning rates.

The methods are written in numpy; a test compares them with the optimizers of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import theory
from .findings import Array

DIVERGED = 1e3  # a run has diverged if its gradient norm is this many times the initial norm; noise adds far less


@dataclass(frozen=True, slots=True)
class Phi:
    """LARS's phi, which scales the step of a block: a function of the block's norm, with values in [low, high]."""

    low: float
    high: float
    radius: float | None = None
    """If None, phi is the norm clipped to [low, high], as in the paper; else it jumps from low to high at this norm."""

    def __call__(self, norms: Array) -> Array:
        """Return phi of these norms.

        >>> Phi(1.0, 3.0)(np.array([0.5, 2.0, 9.0])), Phi(1.0, 3.0, radius=2.0)(np.array([0.5, 2.0, 9.0]))
        (array([1., 2., 3.]), array([1., 1., 3.]))
        """
        if self.radius is None:
            return np.clip(norms, self.low, self.high)
        return np.where(norms <= self.radius, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Problem:
    """A function of the last axis of an array, with infimum 0 and noise of known variance on its gradient."""

    name: str
    formula: str
    loss: Callable[[Array], Array]
    gradient: Callable[[Array], Array]
    """Function that returns the gradient as a new array, which a step may modify."""
    start: Array
    L: float
    noise: Array
    """The standard deviation of one sample's gradient, by coordinate."""
    lam: float = 0.0
    blocks: tuple[int, ...] = ()
    """The sizes of consecutive blocks; empty for one block."""
    coin: bool = False
    """Whether noise is plus or minus its standard deviation, not normal. Such noise can hide the sign of a gradient."""
    phi: Phi | None = None
    """The function phi, for runs of LARS."""

    @property
    def gap(self) -> float:
        """The loss at the start minus its infimum, which is 0."""
        return float(self.loss(self.start))

    @property
    def sigma(self) -> float:
        """The paper's sigma, the standard deviation of a single-sample gradient."""
        return float(np.linalg.norm(self.noise))

    def diverges(self, norm: Any) -> Any:
        """Return whether a mean gradient norm is so far above the norm at the start that the run must have diverged."""
        return np.greater(norm, DIVERGED * np.linalg.norm(self.gradient(self.start)))

    def draw(self, random: np.random.Generator, seeds: int, batch: int) -> Array:
        """Draw the noise of the mean gradient of a batch, for each seed."""
        if self.coin:
            mean: Array = 2 * random.binomial(batch, 0.5, size=(seeds, 1)) / batch - 1
        else:
            mean = random.normal(size=(seeds, len(self.start))) / np.sqrt(batch)
        return self.noise * mean


@dataclass(frozen=True, slots=True)
class Runs:
    """Measurements along runs, with a row for each learning rate and a column for each seed."""

    norm: Array
    """The mean of ||grad F(w_t)|| over the steps; infinite where a run diverged."""
    square: Array
    """The mean of ||grad F(w_t)||^2."""
    rho: Array
    """The largest ratio, over the steps, of ||g_t|| to the sum of the norms of the blocks of the gradient g_t."""


def simulate(
    problem: Problem, method: str, etas: Array, beta: float, batch: int, steps: int, seeds: int, seed: int = 0
) -> Runs:
    """Run "msgd", "sngm", "block-sngm" or "lars" at all learning rates `etas`; each of them gets the same noise."""
    random = np.random.default_rng(seed)
    lanes = (len(etas), seeds)
    w = np.broadcast_to(problem.start, (*lanes, len(problem.start))).copy()
    u = np.zeros_like(w)
    total, square, rho = np.zeros(lanes), np.zeros(lanes), np.zeros(lanes)
    sizes = problem.blocks or (len(problem.start),)
    offsets = np.cumsum((0, *sizes[:-1]))
    with np.errstate(over="ignore", invalid="ignore"):  # runs may diverge
        for _ in range(steps):
            g = problem.gradient(w)
            norm = length(g)
            total += norm
            square += norm * norm
            if problem.sigma:
                g += problem.draw(random, seeds, batch)
            if method == "sngm":
                g /= or_1(length(g))[..., None]
            elif method in ("block-sngm", "lars"):
                norms = block_norms(g, offsets)
                # rho of a zero gradient is undefined; equal norms give the smallest value
                rho = np.maximum(rho, theory.rho(np.where(norms.any(axis=-1, keepdims=True), norms, 1.0)))
                g /= np.repeat(or_1(norms), sizes, axis=-1)
                if method == "lars":
                    assert problem.phi is not None
                    g *= np.repeat(problem.phi(block_norms(w, offsets)), sizes, axis=-1)
            u *= beta
            u += g
            w -= etas[:, None, None] * u
    finite = np.isfinite(total)
    return Runs(np.where(finite, total / steps, np.inf), np.where(finite, square / steps, np.inf), rho)


def length(vectors: Array) -> Array:
    """Return the Euclidean norm over the last axis."""
    return np.asarray(np.sqrt(np.einsum("...i,...i->...", vectors, vectors)))


def block_norms(vectors: Array, offsets: NDArray[np.int_]) -> Array:
    """Return the norms of the blocks that begin at these offsets of the last axis."""
    return np.asarray(np.sqrt(np.add.reduceat(vectors * vectors, offsets, axis=-1)))


def or_1(norms: Array) -> Array:
    """Replace norms of 0 by 1, so that division leaves a zero gradient unchanged."""
    return np.where(norms == 0, 1.0, norms)


# ---------------------------------------------------------------- the functions


def quadratic(
    name: str, curvature: Array, start: Array, noise: Array, blocks: tuple[int, ...] = (), turn: Array | None = None
) -> Problem:
    """Return a quadratic: half the sum of curvature times squared coordinate.

    If an orthogonal matrix `turn` is given, the coordinates are multiplied by it first, which couples them.
    """
    if turn is None:
        loss, gradient = (lambda w: 0.5 * (curvature * w * w).sum(axis=-1)), (lambda w: curvature * w)
    else:
        matrix = turn.T @ np.diag(curvature) @ turn
        loss, gradient = (lambda w: 0.5 * ((w @ matrix) * w).sum(axis=-1)), (lambda w: w @ matrix)
    formula = f"quadratic, {len(start)} coordinates, curvature {curvature.min():g} to {curvature.max():g}"
    return Problem(name, formula, loss, gradient, start, float(curvature.max()), noise, blocks=blocks)


def even(sigma: float, size: int) -> Array:
    """Return the standard deviations of noise in each coordinate: all equal, with sigma as their norm."""
    return np.full(size, sigma / np.sqrt(size))


BOWL = quadratic("bowl", np.ones(1), np.ones(1), np.zeros(1))

# Only noise moves a run, because it starts at the minimum.
STILL = quadratic("quadratic at its minimum", np.ones(40), np.zeros(40), even(1.0, 40))

# Every block is a one-dimensional bowl.
BOWLS = quadratic("bowls", np.ones(64), np.ones(64), np.zeros(64), blocks=(1,) * 64)

QUADRATIC = quadratic("quadratic", np.geomspace(0.01, 1, 20), np.ones(20), even(1.0, 20))

WAVES = Problem(
    "waves", "sum of 1 - cos(x), 10 coordinates, not convex",
    lambda w: (1 - np.cos(w)).sum(axis=-1), np.sin, np.full(10, 2.5), 1.0, even(1.0, 10),
)  # fmt: skip

SLOPE = Problem(
    "slope", "sqrt(1 + x^2) - 1, noise of a coin that can hide the gradient's sign",
    lambda w: (np.hypot(1, w) - 1).sum(axis=-1), lambda w: w / np.hypot(1, w), np.full(1, 5.0), 1.0, np.ones(1),
    coin=True,
)  # fmt: skip

SLOPES = replace(
    SLOPE, name="slopes", formula="the slope twice, a block each, under one coin", start=np.array([5.0, 0.5]),
    noise=np.ones(2), blocks=(1, 1),
)  # fmt: skip

# cosh'' = sqrt(1 + sinh^2) <= 1 + |cosh'|; in a sum over coordinates the largest term counts: (1, 1)-smooth
COSH = Problem(
    "cosh", "sum of cosh(x) - 1, 6 coordinates in 2 blocks: (1, 1)-smooth",
    lambda w: (np.cosh(w) - 1).sum(axis=-1), np.sinh, np.array([3.0, 3.0, 3.0, 0.3, 0.3, 0.3]), 1.0, even(1.0, 6),
    lam=1.0, blocks=(3, 3),
)  # fmt: skip

# 3 x^2 - |x|^3 is largest at |x| = 2, where it is 4: (4, 1)-smooth
QUARTIC = Problem(
    "quartic", "sum of x^4 / 4, 4 coordinates in 2 blocks: (4, 1)-smooth",
    lambda w: (w**4).sum(axis=-1) / 4, lambda w: w**3, np.array([2.5, 2.5, 1.0, 1.0]), 4.0, even(1.0, 4),
    lam=1.0, blocks=(2, 2),
)  # fmt: skip

EXP = Problem(
    "exp", "exp(x), which has no minimum: (0, 1)-smooth",
    lambda w: np.exp(w).sum(axis=-1), np.exp, np.ones(1), 0.0, np.zeros(1), lam=1.0,
)  # fmt: skip

UNEVEN = quadratic(
    "uneven", np.repeat([1.0, 0.1, 0.01, 0.001], 5), np.ones(20), even(1.0, 20), blocks=(5, 5, 5, 5)
)  # fmt: skip

COUPLED = quadratic(
    "coupled", np.geomspace(0.01, 1, 12), np.ones(12), even(1.0, 12), blocks=(4, 4, 4),
    turn=np.linalg.qr(np.random.default_rng(12).normal(size=(12, 12)))[0],
)  # fmt: skip

# ---------------------------------------------------------------- for LARS

# phi is `low` in every block, so that the descent takes 1 / low times as many steps as with phi = 1.
SLOW_BOWLS = replace(BOWLS, name="bowls, φ low", phi=Phi(0.125, 0.25, radius=2.0))
SCALED_UNEVEN = replace(UNEVEN, name="uneven, φ cut", phi=Phi(0.5, 2.0))
SCALED_SLOPES = replace(SLOPES, name="slopes, φ cut", phi=Phi(0.5, 1.0))


def stairs(edge: float = 64.0, half_fall: float = 30.0) -> Problem:
    """Return a function that LARS climbs in a few long steps at small gradients, and descends in many short steps.

    From the start, at large x, down to x = `edge` the function is a staircase that rises to the left. At whole numbers
    its gradient is small and positive, so a step goes to the left, onto the next higher stair. To the left of `edge`
    the function falls, with large gradients. LARS's phi is `high` on the staircase, so that steps are long, and `low`
    to the left of the staircase. The function is L-smooth with L = 1.
    """
    swing, lean = 1 / (2 * np.pi), 0.9  # slopes of the stairs are swing (cos - lean), uphill with curvature 1
    landing = swing * (1 - lean)  # the slope where steps land
    bottom = 2 * half_fall + landing  # the slope grows over the first half of the fall and shrinks over the second
    height = landing * half_fall + half_fall**2 / 2 + (landing + half_fall) ** 2 / 2
    count = int((height - 0.01) / (swing * lean))  # so that the start is just above the foot of the slope
    first = edge + count
    low = height - swing * lean * count

    def gradient(x: Array) -> Array:
        down = edge - x
        on_stairs = swing * (np.cos(2 * np.pi * (first - x)) - lean)
        below = np.where(down < half_fall, landing + down, bottom - down)
        return np.where(x > first, landing + x - first, np.where(x > edge, on_stairs, below))

    def loss(w: Array) -> Array:
        x = w[..., 0]
        down, up = edge - x, first - x
        on_stairs = low - swing * (np.sin(2 * np.pi * up) / (2 * np.pi) - lean * up)
        below = np.where(down < half_fall, height - landing * down - down**2 / 2, (bottom - down) ** 2 / 2)
        return np.where(up < 0, low - landing * up + up**2 / 2, np.where(x > edge, on_stairs, below))

    formula = f"{count} stairs up to the left, and a slope down"
    return Problem(
        "stairs", formula, loss, gradient, np.array([first]), 1.0, np.zeros(1), blocks=(1,),
        phi=Phi(0.5, 128.0, radius=edge + 0.5),
    )  # fmt: skip


STAIRS = stairs()
