"""Gradient noise: the paper's sigma, and the gradient noise scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .gradients import NOT_FINITE, NotFinite, flat, gradients, norm, parts, trained

Interval = tuple[float, float]

FOLDED = 4096  # number of elements of random projections of gradients, which preserve distances to about 2 %


@dataclass(frozen=True, slots=True)
class Noise:
    """Result of `noise`.

    Attributes:
        sigma: the standard deviation of a sample's gradient, ``E||grad f_i - grad F||^2 = sigma^2``.
        low, high: 95 % confidence interval of sigma, see `noise`. NaN with only two batches.
        scale: the gradient noise scale ``sigma^2 / ||grad F||^2`` of McCandlish et al. (arXiv 1812.06162): the batch
            size at which the noise of the mean gradient is as large as the gradient. ``||grad F||^2`` is estimated
            without bias; if the estimate is not positive, the scale is inf, or NaN without noise.
        scale_low, scale_high: 95 % confidence interval of the scale, see `noise`. NaN with only two batches.
        loss, gradient_norm: mean loss over all samples, and the norm of its gradient.
        block_norms: the norm of that gradient for each parameter; None if the loss does not depend on the parameter.
        batches, samples: number of batches and samples.
    """

    sigma: float
    low: float
    high: float
    scale: float
    scale_low: float
    scale_high: float
    loss: float
    gradient_norm: float
    block_norms: list[float | None]
    batches: int
    samples: int


def noise(
    loss: Callable[[Any], Tensor],
    params: Iterable[Tensor],
    batches: Iterable[Any],
    sizes: Sequence[int] | None = None,
) -> Noise:
    """Return sigma and the gradient noise scale, from the gradients of disjoint batches.

    If batch k has b_k samples and the gradient g_k, and m is the mean gradient of the N samples before it, then
    ``b_k N / (b_k + N) ||g_k - m||^2`` has the expectation sigma^2 for all batch sizes. Sigma^2 is estimated by the
    mean of these values, which is unbiased. With BatchNorm, a sample's gradient depends on its batch; sigma^2 is then
    the variance of a batch's gradient times the batch size, and holds for batches of that size.

    The interval of sigma is a jackknife interval of log sigma^2, leaving out one batch at a time, with quantiles of
    Student's t. It holds approximately for normally distributed gradients of any covariance. If a few samples
    have by far the largest gradients, the interval is too narrow; docs/probes.md has its measured coverage. The
    interval is computed from random projections of gradients to `FOLDED` numbers, so that only the projections, not the
    gradients, stay in memory. The interval of the scale is a jackknife interval of 1 / scale, which is finite even if
    there is only noise.

    Args:
        loss: function of a batch that returns the mean loss over its samples.
        params: parameters, such as ``model.parameters()``.
        batches: at least two random batches, of any sizes; a few dozen give a narrow interval.
        sizes: the number of samples of each batch. Default: the length of the batch's first tensor.

    >>> w = torch.zeros(1, requires_grad=True)
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])  # three batches of one sample; gradients w - x
    >>> found = noise(lambda batch: ((w - batch) ** 2 / 2).mean(), [w], x)
    >>> found.sigma, found.gradient_norm
    (1.0, 2.0)
    """
    params = trained(params)
    mean: Tensor | None = None
    signs: Tensor | None = None
    estimates: list[Tensor] = []  # each an estimate of sigma^2
    folded: list[Tensor] = []
    losses: list[Tensor] = []
    seen: list[int] = []
    used = [False] * len(params)
    for k, batch in enumerate(batches):
        size = size_of(batch) if sizes is None else sizes[k]
        if size < 1:
            raise UsageError("a batch has no samples")
        value = loss(batch)
        found = gradients(value, params)
        used = [before or g is not None for before, g in zip(used, found, strict=True)]
        g, before = flat(found, params), sum(seen)
        losses.append(value.detach().double().reshape(()) * size)
        seen.append(size)
        signs = _signs(g) if signs is None else signs
        folded.append(_fold(g, signs))
        if mean is None:
            mean = g
            continue
        difference = g - mean
        estimates.append(norm(difference) ** 2 * (size * before / (size + before)))
        mean += difference * (size / (size + before))
    if mean is None or not estimates:
        raise UsageError(f"the noise is measured between batches, so give at least two of them, got {len(seen)}")
    blocks = [norm(part) for part in parts(mean, params)]
    total = sum(seen)
    # the only synchronisation with the device
    numbers = torch.stack(
        [torch.stack(losses).sum() / total, norm(mean), *blocks, *estimates, *_deviations(folded, seen)]
    ).tolist()
    if not all(map(math.isfinite, numbers)):
        raise NotFinite(NOT_FINITE)
    rest = iter(numbers)
    average, length = next(rest), next(rest)
    own, squares, distances, dots = (
        list(islice(rest, count)) for count in (len(params), len(estimates), len(seen), len(seen))
    )
    variance = math.fsum(squares) / len(squares)
    signal = length**2 - variance / total
    sigma_interval, scale_interval = _intervals(length, variance, seen, distances, dots)
    return Noise(
        sigma=math.sqrt(variance),
        low=sigma_interval[0],
        high=sigma_interval[1],
        scale=variance / signal if signal > 0 else math.inf if variance > 0 else math.nan,
        scale_low=scale_interval[0],
        scale_high=scale_interval[1],
        loss=average,
        gradient_norm=length,
        block_norms=[n if there else None for n, there in zip(own, used, strict=True)],
        batches=len(seen),
        samples=total,
    )


def _signs(like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randint(0, 2, like.shape, generator=generator, device=like.device, dtype=torch.int8) * 2 - 1


def _fold(vector: Tensor, signs: Tensor) -> Tensor:
    """Project a vector to `FOLDED` sums of its elements times `signs`; distances between vectors change by about 2 %.

    Distances between vectors of at most `FOLDED` elements do not change.
    """
    signed = torch.nn.functional.pad(vector * signs, (0, -len(vector) % FOLDED))
    found = signed.view(-1, FOLDED).sum(0)
    return (torch.view_as_real(found).flatten() if found.is_complex() else found).double()


def _deviations(folded: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the squared norms of g - m, then the products (g - m) @ m, for projected batch gradients g with mean m."""
    rows = torch.stack(list(folded))
    mean = torch.tensor(sizes, dtype=rows.dtype, device=rows.device) / sum(sizes) @ rows
    return torch.cat([(rows - mean).square().sum(1), (rows - mean) @ mean])


def _intervals(
    length: float, variance: float, sizes: Sequence[int], distances: Sequence[float], dots: Sequence[float]
) -> tuple[Interval, Interval]:
    """Return the jackknife intervals of sigma and of the noise scale.

    The first is computed for log sigma, whose error is nearly symmetric, the second for 1 / scale, which is finite even
    for noise only. `distances` and `dots` are the squared norms and the products that `_deviations` returns.
    """
    count, total = len(sizes), sum(sizes)
    unknown = (math.nan, math.nan)
    if count < 3:
        return unknown, unknown
    if variance == 0:
        return (0.0, 0.0), unknown if length == 0 else (0.0, 0.0)
    parts = [size * distance for size, distance in zip(sizes, distances, strict=True)]
    whole = math.fsum(parts)
    # the sum of squared deviations without each batch in turn
    without = [whole - part * total / (total - size) for part, size in zip(parts, sizes, strict=True)]
    if not min(without) > 1e-12 * whole:  # one batch contributes the whole sum
        return (0.0, math.inf), (0.0, math.inf)
    sigma = math.sqrt(variance)
    factor = math.exp(_half_width([math.log(rest) for rest in without]) / 2)  # / 2 for sigma instead of sigma^2
    inverses = []
    for size, distance, dot, rest in zip(sizes, distances, dots, without, strict=True):
        share = size / (total - size)
        square = length**2 - 2 * share * dot + share**2 * distance  # squared norm of the other batches' mean gradient
        inverses.append(square * (count - 2) / rest - 1 / (total - size))
    inverse, half = length**2 / variance - 1 / total, _half_width(inverses)
    low, high = (1 / end if end > 0 else math.inf for end in (inverse + half, inverse - half))
    return (sigma / factor, sigma * factor), (low, high)


def _half_width(without: Sequence[float]) -> float:
    """Return half the width of a 95 % interval, from the estimates that each leave out one batch."""
    from scipy.special import stdtrit  # Student's t; much quicker to import than scipy.stats

    count = len(without)
    centre = math.fsum(without) / count
    error = math.sqrt((count - 1) / count * math.fsum((value - centre) ** 2 for value in without))
    return float(stdtrit(count - 1, 0.975)) * error


def size_of(batch: Any) -> int:
    """Return the number of samples of a batch: a tensor, or tensors in a tuple, a list or a dict."""
    first = batch
    while not isinstance(first, Tensor):
        if not isinstance(first, (Mapping, Sequence)) or isinstance(first, str) or not first:
            got = f"got {type(batch).__name__}; probes.noise takes others with `sizes`"
            raise UsageError(f"a batch must hold tensors, in a tuple, a list or a dict, {got}")
        first = next(iter(first.values())) if isinstance(first, Mapping) else first[0]
    return len(first)
