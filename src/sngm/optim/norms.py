"""Euclidean norms that can be trusted: float32 or better for any dtype, size and values.

torch's CPU norm of a float32 tensor adds all its squares up in float32, on one core: 4e-3 off at 25M random
elements, 1e-4 at 1M equal ones. Rows of 128 squares added in float32, and the rows in float64, are right to 1e-7
for any values, and use every core.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

ROW = 128
SMALL = 1 << 14  # below this, one call that adds many tensors up in float64 is faster
PIECE = 1 << 18  # elements of a temporary: small enough to stay in cache


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
    small = [i for i, t in enumerate(tensors) if t.numel() < SMALL]
    large = [i for i, t in enumerate(tensors) if t.numel() >= SMALL]
    if small:
        few = [wide(tensors[i]) for i in small]
        if others:
            few = [add(t, alpha, wide(others[i])) for i, t in zip(small, few, strict=True)]
        out[small] = torch.stack(torch._foreach_norm(few, 2, torch.float64))
    if large:
        rows = [
            torch.cat([_row_norms(piece) for piece in _pieces(tensors[i], others[i] if others else None, alpha)])
            for i in large
        ]
        out[large] = torch.stack(torch._foreach_norm(rows, 2, torch.float64))
    return out.square_()


def _row_norms(flat_piece: Tensor) -> Tensor:
    whole = flat_piece.numel() // ROW * ROW
    norms: Tensor = torch.linalg.vector_norm(flat_piece[:whole].view(-1, ROW), dim=1)
    if whole == flat_piece.numel():
        return norms
    return torch.cat([norms, torch.linalg.vector_norm(flat_piece[whole:])[None]])


def _pieces(t: Tensor, other: Tensor | None, alpha: float | Tensor) -> Iterator[Tensor]:
    """`t`, or ``t + alpha * other``, as flat pieces in float32 or better."""
    if other is None and wide(t) is t:
        yield flat(t)
        return
    if other is not None and other.stride() != t.stride():
        t, other = t.contiguous(), other.contiguous()
    for i, piece in enumerate(torch.split(flat(t), PIECE)):
        if other is None:
            yield wide(piece)
        else:
            yield add(wide(piece), alpha, wide(flat(other)[i * PIECE : (i + 1) * PIECE]))


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
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
