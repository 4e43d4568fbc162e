"""Functions whose constants are known exactly, and the paper's iterations on them, for many seeds and rates at once.

The iterations are written in numpy, since thousands of runs side by side are then as fast as a few; a test holds them
to the optimizers of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import theory
from .findings import Array

DIVERGED = 1e3  # times the gradient norm at the start: noise and overshooting stay far below, divergence passes it soon


@dataclass(frozen=True, slots=True)
class Phi:
    """What LARS multiplies a block's step by, given the norm of the block's weights: from `low` to `high`."""

    low: float
    high: float
    radius: float | None = None
    """None: the norm itself, cut at both ends, as the paper's example has it. Else it jumps from low to high here."""

    def __call__(self, norms: Array) -> Array:
        """
        >>> Phi(1.0, 3.0)(np.array([0.5, 2.0, 9.0])), Phi(1.0, 3.0, radius=2.0)(np.array([0.5, 2.0, 9.0]))
        (array([1., 2., 3.]), array([1., 1., 3.]))
        """
        if self.radius is None:
            return np.clip(norms, self.low, self.high)
        return np.where(norms <= self.radius, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Problem:
    """A function of the last axis of an array, with noise of known variance on its gradient."""

    name: str
    formula: str
    loss: Callable[[Array], Array]
    gradient: Callable[[Array], Array]
    """In an array of its own, which a step may write to."""
    start: Array
    L: float
    noise: Array
    """The standard deviation of one sample's gradient, by coordinate: normal noise, or a coin's."""
    lam: float = 0.0
    blocks: tuple[int, ...] = ()
    """The sizes of the blocks, one after another; none: all is one block."""
    coin: bool = False
    """Noise that is plus or minus its deviation, rather than normal: the sign of a gradient then can be pure chance."""
    phi: Phi | None = None
    """For runs of LARS."""

    @property
    def gap(self) -> float:
        """What the loss at the start is above its infimum, which is 0 for every function here."""
        return float(self.loss(self.start))

    @property
    def sigma(self) -> float:
        """The paper's sigma."""
        return float(np.linalg.norm(self.noise))

    def diverges(self, norm: Any) -> Any:
        """Whether a mean gradient norm is so far above the start's that the run must have left for good."""
        return np.greater(norm, DIVERGED * np.linalg.norm(self.gradient(self.start)))

    def draw(self, random: np.random.Generator, seeds: int, batch: int) -> Array:
        """The noise of the mean gradient of a batch, for each seed."""
        if self.coin:
            mean: Array = 2 * random.binomial(batch, 0.5, size=(seeds, 1)) / batch - 1
        else:
            mean = random.normal(size=(seeds, len(self.start))) / np.sqrt(batch)
        return self.noise * mean


@dataclass(frozen=True, slots=True)
class Runs:
    """What is measured along runs, each an array with a row for each learning rate and a column for each seed."""

    norm: Array
    """The mean of ||grad F(w_t)|| over the steps; infinite where a run diverged."""
    square: Array
    """The mean of ||grad F(w_t)||^2."""
    rho: Array
    """The largest ||g_t|| / sum of the norms of its blocks."""


def simulate(
    problem: Problem, method: str, etas: Array, beta: float, batch: int, steps: int, seeds: int, seed: int = 0
) -> Runs:
    """Runs of "msgd", "sngm", "block-sngm" or "lars" from u = 0. All learning rates meet the same noise."""
    random = np.random.default_rng(seed)
    lanes = (len(etas), seeds)
    w = np.broadcast_to(problem.start, (*lanes, len(problem.start))).copy()
    u = np.zeros_like(w)
    total, square, rho = np.zeros(lanes), np.zeros(lanes), np.zeros(lanes)
    sizes = problem.blocks or (len(problem.start),)
    offsets = np.cumsum((0, *sizes[:-1]))
    with np.errstate(over="ignore", invalid="ignore"):  # divergence is a result
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
                # a gradient of 0 has no ratio: it counts as equal norms, whose ratio is the least
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
    """The Euclidean norm over the last axis."""
    return np.asarray(np.sqrt(np.einsum("...i,...i->...", vectors, vectors)))


def block_norms(vectors: Array, offsets: NDArray[np.int_]) -> Array:
    """The norms of the blocks that begin at these offsets of the last axis."""
    return np.asarray(np.sqrt(np.add.reduceat(vectors * vectors, offsets, axis=-1)))


def or_1(norms: Array) -> Array:
    """What to divide by: a gradient of norm 0 stays 0."""
    return np.where(norms == 0, 1.0, norms)


def over(g: Array, norms: Array) -> Array:
    """Divided by the norm, where there is one."""
    return np.divide(g, norms, out=np.zeros_like(g), where=norms > 0)


# ---------------------------------------------------------------- the functions


def quadratic(
    name: str, curvature: Array, start: Array, noise: Array, blocks: tuple[int, ...] = (), turn: Array | None = None
) -> Problem:
    """Half the sum of curvature times square. With `turn`, an orthogonal matrix, the coordinates are coupled."""
    if turn is None:
        loss, gradient = (lambda w: 0.5 * (curvature * w * w).sum(axis=-1)), (lambda w: curvature * w)
    else:
        matrix = turn.T @ np.diag(curvature) @ turn
        loss, gradient = (lambda w: 0.5 * ((w @ matrix) * w).sum(axis=-1)), (lambda w: w @ matrix)
    formula = f"quadratic, {len(start)} coordinates, curvature {curvature.min():g} to {curvature.max():g}"
    return Problem(name, formula, loss, gradient, start, float(curvature.max()), noise, blocks=blocks)


def even(sigma: float, size: int) -> Array:
    """Noise that is alike in all coordinates."""
    return np.full(size, sigma / np.sqrt(size))


BOWL = quadratic("bowl", np.ones(1), np.ones(1), np.zeros(1))

# All that it ever has is noise: its gap is 0.
STILL = quadratic("quadratic at its minimum", np.ones(40), np.zeros(40), even(1.0, 40))

# Every block does what the bowl does.
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

SLOPES = Problem(
    "slopes", "the slope twice, a block each, under one coin",
    SLOPE.loss, SLOPE.gradient, np.array([5.0, 0.5]), 1.0, np.ones(2), blocks=(1, 1), coin=True,
)  # fmt: skip

# cosh'' = sqrt(1 + sinh^2) <= 1 + |cosh'|, and of a sum the largest counts: (1, 1)-smooth
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

# Every block stays where phi is `low`, and the way down takes 1 / low times the steps.
SLOW_BOWLS = replace(BOWLS, name="bowls, φ low", phi=Phi(0.125, 0.25, radius=2.0))
SCALED_UNEVEN = replace(UNEVEN, name="uneven, φ cut", phi=Phi(0.5, 2.0))
SCALED_SLOPES = replace(SLOPES, name="slopes, φ cut", phi=Phi(0.5, 1.0))


def stairs(edge: float = 64.0, half_fall: float = 30.0) -> Problem:
    """Steps of 1 climb these stairs, and what they climb is then lost in small steps down a slope.

    At every whole number on the stairs the function rises a little to the right, so that a step goes to the left, where
    the next stair is higher. With phi `high` on the stairs and `low` below their edge, LARS gains height at gradients
    near 0 in a few long steps, and loses it in many short ones at large gradients. It is L-smooth with L = 1.
    """
    swing, lean = 1 / (2 * np.pi), 0.9  # slopes of the stairs are swing (cos - lean): a curvature of 1, and uphill
    landing = swing * (1 - lean)  # the slope where steps land
    bottom = 2 * half_fall + landing  # the slope grows over half of the fall and shrinks over the other
    height = landing * half_fall + half_fall**2 / 2 + (landing + half_fall) ** 2 / 2
    count = int((height - 0.01) / (swing * lean))  # so many stairs that the start is just above the foot of the slope
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
