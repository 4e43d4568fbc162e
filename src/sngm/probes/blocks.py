"""Norms of the tensors (blocks) of a gradient, and the frontier: pairs (L, lambda) with relaxed smoothness."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import theory
from ..errors import UsageError
from .gradients import norm


@dataclass(frozen=True, slots=True)
class Blocks:
    """Norms of the tensors of a gradient, which are the blocks of block-wise methods.

    Attributes:
        norms: the norm of each tensor.
        rho: ``||g|| / sum of norms`` for the gradient g; the paper's rho(S) is the maximum over a run.
        cos: cosine of the angle between the gradient and the block-wise direction, in which each tensor is divided by
            its norm: ``1 / (sqrt(S) rho)`` for S tensors.

    Both rho and cos are NaN if the gradient is zero or not finite.
    """

    norms: list[float]
    rho: float
    cos: float


def blocks(params: Iterable[Tensor]) -> Blocks:
    """Return the norm of each ``p.grad``, with rho and cos; parameters without a gradient are not counted.

    >>> a, b = torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    >>> (3 * a[0] + 4 * b).sum().backward()
    >>> found = blocks([a, b])
    >>> found.norms, round(found.rho, 4), round(found.cos, 4)
    ([3.0, 4.0], 0.7143, 0.9899)
    """
    found = [norm(p.grad) for p in params if p.grad is not None]
    if not found:
        raise UsageError("no parameter has a gradient; call backward() first")
    return of_norms(torch.stack([n.to(found[0].device) for n in found]).tolist())


def of_norms(norms: Sequence[float]) -> Blocks:
    """Return the result of `blocks` for a gradient whose tensors have these norms."""
    known = any(norms) and all(map(math.isfinite, norms))
    rho, cos = (theory.rho(norms), theory.cos_angle(norms)) if known else (math.nan, math.nan)
    return Blocks(list(norms), float(rho), float(cos))


def frontier(
    curvatures: Sequence[float], gradient_norms: Sequence[float], lambdas: Sequence[float]
) -> dict[float, float]:
    """Return, for each lambda, the least L with ``||H|| <= L + lambda ||g||`` at all given points (model weights).

    At other points this inequality, called relaxed smoothness, may not hold.

    Args:
        curvatures: ||H||, the norm of the Hessian at each point.
        gradient_norms: ||g||, the norm of the gradient of the same function at the same points.
        lambdas: values of lambda to find L for.

    >>> frontier([10.0, 100.0], [0.5, 8.0], [0.0, 10.0, 20.0])
    {0.0: 100.0, 10.0: 20.0, 20.0: 0.0}
    """
    if not curvatures or len(curvatures) != len(gradient_norms):
        raise UsageError(f"a frontier needs both norms at one point or more, got {len(curvatures)} curvatures")
    for name, values in (("curvatures", curvatures), ("gradient_norms", gradient_norms), ("lambdas", lambdas)):
        if not all(0 <= value < math.inf for value in values):
            raise UsageError(f"{name} must be finite and at least 0")
    pairs = list(zip(curvatures, gradient_norms, strict=True))
    return {lam: max(0.0, *(h - lam * g for h, g in pairs)) for lam in lambdas}
