"""The norm of the Hessian, computed from Hessian-vector products by Lanczos' method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from .gradients import NOT_FINITE, NotFinite, flat, gradients, norm, parts, trained

PRODUCT = 3  # a Hessian-vector product takes the time of about three gradients
# Step of finite differences, relative to the norm of the parameters. The step is short, because a step that moves an
# activation across the kink of a ReLU adds the jump of the gradient, divided by the step, to the curvature.
STEP = 1e-11
# Stop after at least 8 products, the last 3 of them accurate, because early estimates may be near a smaller eigenvalue.
LEAST, IN_A_ROW = 8, 3

Loss = Callable[[], Tensor | Iterable[Tensor]]


@dataclass(frozen=True, slots=True)
class Curvature:
    """Result of `curvature`.

    Attributes:
        norm: norm of the Hessian: the largest absolute value of its eigenvalues. The paper's L is at least the maximum
            of this norm over a run.
        eigenvalue: the eigenvalue with the largest absolute value, with its sign.
        error: bound on the distance from `eigenvalue` to the nearest true eigenvalue; usually far above the true error.
        products: the number of Hessian-vector products.
        by: how the products were computed: by second "derivatives", or by "differences" of gradients.
    """

    norm: float
    eigenvalue: float
    error: float
    products: int
    by: str


def curvature(
    loss: Loss,
    params: Iterable[Tensor],
    *,
    iterations: int = 30,
    tolerance: float = 0.01,
) -> Curvature:
    """Return the norm of the loss's Hessian and the eigenvalue with this absolute value, by Lanczos' method.

    Only Hessian-vector products are computed, never the whole Hessian. Each product is a double backward, which takes
    about the time of three gradients. If torch has no second derivatives, as for cuDNN's LSTM, a product is a finite
    difference of two gradients, which needs float64. This difference is accurate to five digits if the loss is smooth.
    With ReLUs it may be far too large, because a kink between the two points counts as curvature.

    The memory needed is that of the loss and its derivatives, and of seven vectors of the size of the parameters. Each
    product synchronises once with the device. The parameters are unchanged afterwards. Every evaluation of the loss
    draws the same random numbers, for example for dropout.

    Args:
        loss: function that returns the loss, always of the same samples. It may also be a generator function that
            yields tensors whose sum is the loss; then only one of these tensors is in memory at a time.
        params: parameters, such as ``model.parameters()``. The parameters of ``copy.deepcopy(model).double()`` give
            full precision, and the copy leaves the running statistics of the model unchanged.
        iterations: the largest number of products; there are never more than parameters.
        tolerance: stop when the error was at most this fraction of the eigenvalue for the last three products, but not
            before the eighth product.

    >>> w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    >>> found = curvature(lambda: (torch.tensor([1.0, -4.0, 2.0]) * w**2).sum() / 2, [w])
    >>> round(found.norm, 4), round(found.eigenvalue, 4), found.products
    (4.0, -4.0, 3)
    """
    params = trained(params)
    if iterations < 1:
        raise UsageError(f"`iterations` must be a whole number >= 1, got {iterations}")
    start = flat(params, params)
    try:
        return _lanczos(lambda v: _product(loss, params, v), start, iterations, tolerance)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if any(p.dtype != torch.float64 for p in params):
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(
                f"torch cannot differentiate this loss twice ({reason}); in float64 differences of gradients would do: "
                "take copy.deepcopy(model).double()"
            ) from error
    step = (STEP * norm(start).clamp(min=1.0)).item()
    here = _gradient(loss, params)

    def difference(v: Tensor) -> Tensor:
        _put(start + step * v, params)
        return (_gradient(loss, params) - here) / step

    try:
        return replace(_lanczos(difference, start, iterations, tolerance), by="differences")
    finally:
        _put(start, params)


def _lanczos(product: Callable[[Tensor], Tensor], like: Tensor, iterations: int, tolerance: float) -> Curvature:
    """Run Lanczos' method without reorthogonalisation; `like` is a vector with the size, dtype and device to use.

    Rounding errors make the vectors lose their orthogonality. This adds copies of the extreme eigenvalues, but does not
    change their values.
    """
    generator = torch.Generator(like.device).manual_seed(0)
    v = torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
    v /= norm(v)
    before, off = torch.zeros_like(v), torch.zeros((), dtype=v.dtype, device=v.device)
    diagonal: list[float] = []
    beside: list[float] = []
    eigenvalue, error, settled = math.nan, math.inf, 0
    for _ in range(min(iterations, len(like))):
        u = product(v).sub_(off * before)
        on = u @ v
        u -= on * v
        before, off = v, norm(u)
        a, b = torch.stack([on.double(), off]).tolist()
        if not (math.isfinite(a) and math.isfinite(b)):
            raise NotFinite(NOT_FINITE)
        diagonal.append(a)
        matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        values, vectors = np.linalg.eigh(matrix)
        top = int(np.argmax(np.abs(values)))
        eigenvalue, error = float(values[top]), float(b * abs(vectors[-1, top]))
        settled = settled + 1 if error <= tolerance * abs(eigenvalue) else 0
        if b == 0 or (settled >= IN_A_ROW and len(diagonal) >= LEAST):
            break
        beside.append(b)
        v = u / off
    return Curvature(abs(eigenvalue), eigenvalue, error, len(diagonal), "derivatives")


def _product(loss: Loss, params: Sequence[Tensor], v: Tensor) -> Tensor:
    """Return the product of the loss's Hessian with `v`, by double backward."""
    total = torch.zeros_like(v)
    along = parts(v, params)
    for part in _parts_of(loss, params):
        pairs = zip(gradients(part, params, create_graph=True), along, strict=True)
        slopes = [(g * u).sum() for g, u in pairs if g is not None and g.requires_grad]
        if slopes:  # empty for a linear function
            total += flat(torch.autograd.grad(torch.stack(slopes).sum(), params, allow_unused=True), params)
        total += 0 * part.detach()  # propagates a NaN or infinite loss
    return total


def _gradient(loss: Loss, params: Sequence[Tensor]) -> Tensor:
    """Return the gradient of the loss as one vector."""
    total = flat([None] * len(params), params)
    for part in _parts_of(loss, params):
        total += flat(gradients(part, params), params)
    return total


@torch.no_grad()
def _put(vector: Tensor, params: Sequence[Tensor]) -> None:
    """Set the parameters to the entries of a vector."""
    for p, part in zip(params, parts(vector, params), strict=True):
        p.copy_(part)


def _parts_of(loss: Loss, params: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors whose sum is the loss. Each call draws the same random numbers, and restores the generators."""
    with torch.random.fork_rng([params[0].device] if params[0].is_cuda else []):
        found = loss()
        yield from found if isinstance(found, Iterable) and not isinstance(found, Tensor) else [found]
