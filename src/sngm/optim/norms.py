"""Euclidean norms that can be trusted: float32 or better for any dtype, size and values.

torch's CPU norm of a float32 tensor adds all its squares up in float32, on one core: 4e-3 off at 25M random
elements, 1e-4 at 1M equal ones. Rows of 512 squares added in float32, and the rows in float64, were right to 1e-7
for random values, 1e-6 for equal ones and 4e-6 for the worst pattern tried, and use every core.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

LOW_PRECISION = (torch.float16, torch.bfloat16)
ROW = 512
SHORT = 2048  # up to this many elements are squared and added in float64 as they are
LEAST = 1e-20  # of a sum of squares: of less than that, squares below float32's range may be a part
PIECE = 1 << 20  # elements of a temporary sum or copy: few enough to stay in the cache


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype sums of squares are kept in: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def squares(tensors: Sequence[Tensor], others: Sequence[Tensor] = (), alpha: float | Tensor = 0.0) -> Tensor:
    """Squared norm of each tensor of a list on one device, as a 1-d float64 tensor.

    With `others`: of each ``tensors[i] + alpha * others[i]``.

    >>> squares([torch.tensor([3.0, 4.0]), torch.ones(2, 2)]).tolist()
    [25.0, 4.0]
    """
    if tensors[0].device.type != "cpu":
        return _squares_on_device(tensors, others, alpha)
    parts, counts = _reduced(tensors, others, alpha)
    values = torch.cat(parts).double().square_()
    found = torch.segment_reduce(values, "sum", lengths=torch.tensor(counts, device="cpu"), initial=0.0, unsafe=True)
    if torch.compiler.is_compiling():  # it cannot look, and takes them as they are
        return found
    for i, (t, value) in enumerate(zip(tensors, found.tolist(), strict=True)):
        if not LEAST <= value < math.inf and t.numel() > SHORT and t.dtype != torch.float64:
            found[i] = _in_float64(t, others[i] if others else None, alpha)
    return found


def square(tensors: Sequence[Tensor], others: Sequence[Tensor] = (), alpha: float | Tensor = 0.0) -> Tensor:
    """The sum of `squares`, as a 0-d tensor.

    >>> round(square([torch.tensor([3.0, 4.0]), torch.ones(2, 2)]).item(), 9)
    29.0
    """
    if tensors[0].device.type != "cpu":
        return _squares_on_device(tensors, others, alpha).sum()
    parts, _ = _reduced(tensors, others, alpha)
    found: Tensor = torch.linalg.vector_norm(torch.cat(parts), dtype=torch.float64).square()
    if torch.compiler.is_compiling() or LEAST <= found.item() < math.inf:
        return found
    total = sum(_in_float64(t, others[i] if others else None, alpha) for i, t in enumerate(tensors))
    return torch.tensor(total, dtype=torch.float64, device="cpu")


def _in_float64(t: Tensor, other: Tensor | None, alpha: float | Tensor) -> float:
    """The square of one norm: slow, and right where squares are more, or less, than float32 can hold."""
    total = 0.0
    for piece, others in _pieces(t, other):
        if others is not None:
            piece = add(piece.double(), alpha, others.double())
        elif not torch.count_nonzero(piece):  # of zeros, which are more often met than small numbers
            continue
        total += torch.linalg.vector_norm(piece, dtype=torch.float64).square().item()
    return total


def _squares_on_device(tensors: Sequence[Tensor], others: Sequence[Tensor], alpha: float | Tensor) -> Tensor:
    if others:
        tensors = [add(wide(t), alpha, wide(o)) for t, o in zip(tensors, others, strict=True)]
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype)).to(sum_dtype(tensors[0].device)).square()


def _reduced(
    tensors: Sequence[Tensor], others: Sequence[Tensor], alpha: float | Tensor
) -> tuple[list[Tensor], list[int]]:
    """1-d tensors with the same norms, one after another, and how many of their values belong to each tensor."""
    parts: list[Tensor] = []
    counts: list[int] = []
    scratch: Tensor | None = None
    for i, t in enumerate(tensors):
        if t.numel() <= SHORT:
            few = add(wide(t), alpha, wide(others[i])) if others else t
            parts.append(few if t.ndim == 1 else few.reshape(-1))
            counts.append(t.numel())
        elif others or t.dtype in LOW_PRECISION:
            if scratch is None:
                widest = functools.reduce(torch.promote_types, {x.dtype for x in (*tensors, *others)}, torch.float32)
                scratch = torch.empty(min(PIECE, max(x.numel() for x in tensors)), dtype=widest, device="cpu")
            counts.append(_reduce_pieces(t, others[i] if others else None, alpha, parts, scratch))
        else:
            counts.append(_reduce(t, parts))
    return parts, counts


def _reduce(t: Tensor, parts: list[Tensor]) -> int:
    """Append the norms of a tensor's rows, and what makes no whole row, to `parts`; return how many values."""
    size = t.numel()
    rest = size % ROW
    if not rest and t.is_contiguous():
        rows = t.view(-1, ROW)
    else:
        values = flat(t)
        rows = values[: size - rest].view(-1, ROW)
        if rest:
            parts.append(values[-rest:].clone())  # a view would keep a whole written-out piece alive
    parts.append(torch.linalg.vector_norm(rows, dim=1))
    return size // ROW + rest


def _reduce_pieces(t: Tensor, other: Tensor | None, alpha: float | Tensor, parts: list[Tensor], scratch: Tensor) -> int:
    """The same for what must first be written out, wide or as a sum: in pieces that stay in the cache."""
    count = 0
    for piece, others in _pieces(t, other):
        out = scratch[: piece.numel()]
        if others is None:
            out.copy_(piece)
        elif piece.dtype == out.dtype and not isinstance(alpha, Tensor):
            torch.add(piece, others, alpha=alpha, out=out)
        else:
            out.copy_(add(wide(piece), alpha, wide(others)))
        count += _reduce(out, parts)
    return count


def _pieces(t: Tensor, other: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """A tensor in pieces that stay in the cache, each with the same elements of another one, if there is one."""
    if other is not None and other.stride() != t.stride():
        t, other = t.contiguous(), other.contiguous()
    t, other = flat(t), None if other is None else flat(other)
    if t.numel() <= PIECE:  # a slice takes longer than the norm of a short one
        return [(t, other)]
    return [
        (t[at : at + PIECE], None if other is None else other[at : at + PIECE]) for at in range(0, t.numel(), PIECE)
    ]


def add(a: Tensor, alpha: float | Tensor, b: Tensor) -> Tensor:
    """``a + alpha * b``, in one pass where alpha is a number."""
    return (a + alpha * b).to(a.dtype) if isinstance(alpha, Tensor) else torch.add(a, b, alpha=alpha)


def flat(t: Tensor) -> Tensor:
    """All elements in the order they lie in memory: a view where they lie without gaps, else a copy."""
    if t.is_contiguous():
        return t.view(-1)
    return t.permute(sorted(range(t.ndim), key=t.stride, reverse=True)).reshape(-1).contiguous()


def wide(t: Tensor) -> Tensor:
    """`t` in float32 or better."""
    return t.float() if t.dtype in LOW_PRECISION else t
