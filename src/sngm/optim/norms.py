"""Euclidean norms that can be trusted: float32 or better for any dtype, size and values.

torch's CPU norm of a float32 tensor adds all its squares up in float32, on one core: 4e-3 off at 25M random
elements, 1e-4 at 1M equal ones. Rows of 1024 squares added in float32, and the rows in float64, were
right to 1e-8 for random values, 1e-6 for equal ones and 8e-6 for the worst pattern tried, and use every core.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

LOW_PRECISION = (torch.float16, torch.bfloat16)
ROW = 1024
LONG = 1 << 14  # below this, adding up many tensors in float64 in one call is faster than rows
PIECE = 1 << 22  # elements of a temporary sum or copy


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype sums of squares are kept in: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def squares(tensors: Sequence[Tensor], others: Sequence[Tensor] = (), alpha: float | Tensor = 0.0) -> Tensor:
    """Squared norm of each tensor of a list on one device, as a 1-d float64 tensor.

    With `others`: of each ``tensors[i] + alpha * others[i]``.

    >>> squares([torch.tensor([3.0, 4.0]), torch.ones(2, 2)]).tolist()
    [25.0, 4.0]
    """
    device = tensors[0].device
    if device.type != "cpu":
        if others:
            tensors = [add(wide(t), alpha, wide(o)) for t, o in zip(tensors, others, strict=True)]
        dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype)).to(sum_dtype(device)).square()
    out = torch.empty(len(tensors), dtype=torch.float64)
    short: list[int] = []
    middle: list[int] = []
    long: list[int] = []
    for i, t in enumerate(tensors):
        size = t.numel()
        (short if size <= ROW else middle if size < LONG else long).append(i)
    at_least_float32 = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    for some, dtype in ((short, at_least_float32), (middle, torch.float64)):
        if some:
            few = [tensors[i] for i in some]
            if others:
                few = [add(wide(t), alpha, wide(others[i])) for i, t in zip(some, few, strict=True)]
            out[some] = torch.stack(torch._foreach_norm(few, 2, dtype)).double()
    if long:
        rows = [_row_norms(tensors[i], others[i] if others else None, alpha) for i in long]
        out[long] = torch.stack(torch._foreach_norm(rows, 2, torch.float64))
    return out.square_()


def _row_norms(t: Tensor, other: Tensor | None, alpha: float | Tensor) -> Tensor:
    """Norms of the rows of ROW elements, and of the rest, that make up a tensor."""
    if other is None and t.dtype not in LOW_PRECISION:
        return _norms_of(flat(t))
    if other is not None and other.stride() != t.stride():
        t, other = t.contiguous(), other.contiguous()
    norms = []
    for i, piece in enumerate(torch.split(flat(t), PIECE)):
        values = wide(piece)
        if other is not None:
            values = add(values, alpha, wide(flat(other)[i * PIECE : (i + 1) * PIECE]))
        norms.append(_norms_of(values))
    return torch.cat(norms)


def _norms_of(values: Tensor) -> Tensor:
    rest = values.numel() % ROW
    whole = values[:-rest] if rest else values
    norms: Tensor = torch.linalg.vector_norm(whole.view(-1, ROW), dim=1)
    return torch.cat([norms, torch.linalg.vector_norm(values[-rest:])[None]]) if rest else norms


def add(a: Tensor, alpha: float | Tensor, b: Tensor) -> Tensor:
    """``a + alpha * b``, in one pass where alpha is a number."""
    return a + alpha * b if isinstance(alpha, Tensor) else torch.add(a, b, alpha=alpha)


def flat(t: Tensor) -> Tensor:
    """All elements in the order they lie in memory: a view where they lie without gaps, else a copy."""
    if t.is_contiguous():
        return t.view(-1)
    return t.permute(sorted(range(t.ndim), key=t.stride, reverse=True)).reshape(-1)


def wide(t: Tensor) -> Tensor:
    """`t` in float32 or better."""
    return t.float() if t.dtype in LOW_PRECISION else t
