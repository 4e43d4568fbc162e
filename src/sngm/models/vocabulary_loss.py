"""Cross entropy over a large vocabulary whose logits are never all there at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import kernels

AT_ONCE = 1 << 26  # logits: 256 MiB in float32
# By kernels, which keep them in the dtype of products: 512 MiB in bfloat16. The more rows, the better a GPU is used by
# the gradient of features, and the less often that of the weight is added up.
AT_ONCE_BY_KERNELS = 1 << 28

Gradients = list[Tensor | None]  # of features, weight and bias


def vocabulary_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """``cross_entropy(linear(features, weight, bias), targets)``, in chunks of rows.

    The gradients are computed along with the loss, chunk by chunk, so that no logits are kept for `backward`: what is
    kept has the sizes of features, weight and bias. Where no gradients are wanted, none are computed.

    Products are in the dtype of autocast where that is on, else in that of the arguments. Softmax, the loss and sums
    over chunks are in float32, or in float64 where `weight` is.

    Args:
        features: of shape (N, H).
        weight: of shape (V, H).
        bias: of shape (V,).
        targets: of shape (N,), whole numbers from 0 to V - 1. Rows of negative ones are left out: they have no loss
            and no gradient. Larger ones are an error, which on a GPU may show as a loss that is not a number.
        reduction: "mean" over the rows that are not left out, or "sum". It is 0 if all are.
        chunk: rows at once; None: as many as make 2**26 logits, or 2**28 on a GPU: in bfloat16, 512 MiB.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if features.ndim != 2 or weight.ndim != 2 or features.shape[1] != weight.shape[1]:
        raise ValueError(f"features and weight must be (N, H) and (V, H), got {_shapes(features, weight)}")
    if bias.shape != weight.shape[:1] or targets.shape != features.shape[:1]:
        raise ValueError(f"bias and targets must be (V,) and (N,), got {_shapes(bias, targets)}")
    if not len(targets):
        raise ValueError("there are no rows to take the loss of")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be whole numbers, got {targets.dtype}")
    train = torch.is_grad_enabled()  # asked out here: within an autograd function it is off
    total: Tensor = _Sum.apply(features, weight, bias, targets.long(), chunk, train)  # type: ignore[no-untyped-call]
    return total / (targets >= 0).sum().clamp(min=1) if reduction == "mean" else total


class _Sum(torch.autograd.Function):
    """The loss summed over rows. It keeps its gradients, which `backward` has only to scale."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, chunk: int | None, train: bool
    ) -> Tensor:
        kind = features.device.type
        low = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(kind) if low else weight.dtype
        # without autocast, features of another dtype than weight's are refused by the product
        x = features.to(dtype) if low else features
        wanted = [train and needed for needed in ctx.needs_input_grad[:3]]
        loss = _by_kernels if _served(x, dtype) else _by_torch
        with torch.autocast(kind, enabled=False):
            total, grads = loss(x, weight, bias, targets, chunk, dtype, wanted)
        ctx.save_for_backward(*grads)
        ctx.dtypes = [given.dtype for given in (features, weight, bias)]
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: what is kept would pass for constants
            raise RuntimeError("vocabulary_loss has no second derivatives; use cross_entropy for those")
        kept = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if one is None else (one * grad).to(dtype) for one, dtype in kept), None, None, None


def _by_torch(
    x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, chunk: int | None, dtype: torch.dtype, wanted: list[bool]
) -> tuple[Tensor, Gradients]:
    exact = torch.promote_types(weight.dtype, torch.float32)
    grads: Gradients = [
        torch.zeros_like(given, dtype=kept) if needed else None
        for given, kept, needed in zip((x, weight, bias), (x.dtype, exact, exact), wanted, strict=True)
    ]
    w, b = weight.to(dtype), bias.to(dtype)
    total = torch.zeros((), dtype=exact, device=x.device)
    chunk = chunk or max(1, AT_ONCE // len(w))
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        of_rows = None if grads[0] is None else grads[0][rows]
        # not in place: compiled by torch 2.11, a result that was made as zeros has no gradient
        total = total + _chunk(x[rows], w, b, targets[rows, None], exact, of_rows, grads[1], grads[2])
    return total, grads


def _chunk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    exact: torch.dtype,
    of_x: Tensor | None,
    of_weight: Tensor | None,
    of_bias: Tensor | None,
) -> Tensor:
    """The loss summed over some rows; the gradients wanted are written to `of_x` and added to the other two."""
    left_out, targets = targets < 0, targets.clamp(min=0)
    logs = torch.log_softmax(torch.addmm(bias, x, weight.t()), 1, dtype=exact)
    picked = logs.gather(1, targets)
    loss = -picked.masked_fill(left_out, 0.0).sum()
    if of_x is None and of_weight is None and of_bias is None:
        return loss
    same = weight.dtype == exact
    # The gradient of the logits is p, less 1 at the target: there it is expm1(log p).
    slopes = torch.exp(logs, out=logs if same else torch.empty_like(logs, dtype=weight.dtype))
    slopes.scatter_(1, targets, picked.expm1().to(slopes.dtype)).masked_fill_(left_out, 0.0)
    if of_x is not None:
        of_x.copy_(slopes @ weight)
    if of_weight is not None:
        if same:
            of_weight.addmm_(slopes.t(), x)
        else:
            of_weight += slopes.t() @ x
    if of_bias is not None:
        of_bias += slopes.sum(0, dtype=exact)
    return loss


def _served(x: Tensor, dtype: torch.dtype) -> bool:
    if not kernels.serve(x, ndim=2) or x.dtype != dtype:
        return False
    from .kernels import softmax

    return dtype in softmax.DTYPES


def _by_kernels(
    x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, chunk: int | None, dtype: torch.dtype, wanted: list[bool]
) -> tuple[Tensor, Gradients]:
    """The same with each chunk's logits overwritten by their gradients.

    The bias is one more column of the weight, and the features have a column of ones for it. So the product that gives
    the logits adds it, and that which gives the gradient of the weight gives the bias's too. Rows of logits, weight
    and features begin at multiples of 16 bytes: products of others take times as long.
    """
    from .kernels import softmax

    (n, width), words = x.shape, len(weight)
    w = x.new_zeros(_up(words), _up(width + 1))
    w[:words, :width], w[:words, width] = weight, bias
    ones = x.new_zeros(n, w.shape[1])
    ones[:, :width], ones[:, width] = x, 1
    chunk = min(n, chunk or max(1, AT_ONCE_BY_KERNELS // len(w)))
    logits, losses = x.new_empty(chunk, len(w)), x.new_empty(n, dtype=torch.float32)
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
    of_both: Tensor | None = None
    for start in range(0, n, chunk):
        rows = slice(start, start + chunk)
        slopes = torch.mm(ones[rows], w.t(), out=logits[: n - start])
        softmax.cross_entropy(slopes, targets[rows], losses[rows], words, slopes=any(wanted))
        if of_x is not None:
            torch.mm(slopes, w[:, :width], out=of_x[rows])
        if wanted[1] or wanted[2]:
            product = wide_product(slopes.t(), ones[rows])
            of_both = product if of_both is None else of_both.add_(product)
    grads: Gradients = [of_x, None, None]
    if of_both is not None:
        grads[1:] = of_both[:words, :width] if wanted[1] else None, of_both[:words, width] if wanted[2] else None
    return losses.sum(), grads


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """In float32, in which it is summed up; on a CPU it is rounded in between."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else (a @ b).float()


def _up(size: int) -> int:
    """To a multiple of 8: of 16 bytes, or of 32."""
    return -(-size // 8) * 8


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(tuple(t.shape)) for t in tensors)
