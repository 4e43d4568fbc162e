"""Cross entropy over a large vocabulary, without storing all logits at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..triton_support import kernels_support

MAX_LOGITS = 1 << 26  # number of logits in memory at once: 256 MiB in float32
# On a GPU, more logits are in memory, in the dtype of the products: 512 MiB in bfloat16. With more rows per chunk, the
# gradient of the features uses the GPU better, and the gradient of the weight is accumulated less often.
MAX_LOGITS_OF_KERNELS = 1 << 28

Gradients = list[Tensor | None]  # gradients of features, weight and bias


def vocabulary_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    *,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Return ``cross_entropy(linear(features, weight, bias), targets)``, computed in chunks of rows of `features`.

    Gradients are computed together with the loss, chunk by chunk, so that `backward` needs no logits: only tensors of
    the sizes of features, weight and bias are saved. Gradients that are not required are not computed.

    Matrix products are in the dtype of autocast if autocast is enabled, else in the dtype of the arguments. Softmax,
    the loss and sums over chunks are in float32, or in float64 if `weight` is float64.

    Args:
        features: of shape (N, H).
        weight: of shape (V, H).
        bias: of shape (V,).
        targets: of shape (N,), integers from 0 to V - 1. Rows with a negative target are ignored: they have no loss and
            no gradient. A target of V or more is an error; on a GPU the loss may be NaN instead.
        reduction: "mean" over the rows that are not ignored, or "sum". The loss is 0 if all rows are ignored.
        chunk: rows per chunk. None: as many rows as give 2**26 logits, or 2**28 with the Triton kernels on a GPU.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    rows, words, width = len(targets), len(weight), weight.shape[-1]
    shapes = [tuple(t.shape) for t in (features, weight, bias, targets)]
    if shapes != [(rows, width), (words, width), (words,), (rows,)] or not rows:
        raise ValueError(f"features, weight, bias, targets must be (N, H), (V, H), (V,), (N,) with N > 0, got {shapes}")
    if (chunk is not None and chunk < 1) or targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"chunk must be >= 1 and targets integers, got chunk={chunk} and {targets.dtype}")
    train = torch.is_grad_enabled()  # read here, because gradients are disabled within an autograd function
    total: Tensor = _Sum.apply(features, weight, bias, targets.long(), chunk, train)  # type: ignore[no-untyped-call]
    return total / (targets >= 0).sum().clamp(min=1) if reduction == "mean" else total


class _Sum(torch.autograd.Function):
    """The sum of the loss over rows of `features`. `forward` saves the gradients, and `backward` only scales them."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, chunk: int | None, train: bool
    ) -> Tensor:
        kind = features.device.type
        low = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64  # autocast does not convert float64
        dtype = torch.get_autocast_dtype(kind) if low else weight.dtype
        # without autocast, the product raises an error if features and weight have different dtypes
        x = features.to(dtype) if low else features
        wanted = [train and needed for needed in ctx.needs_input_grad[:3]]
        loss = _by_kernels if kernels_support(x, ndim=2) and x.dtype == dtype != torch.float64 else _by_torch
        with torch.autocast(kind, enabled=False):
            total, grads = loss(x, weight, bias, targets, chunk, dtype, wanted)
        ctx.save_for_backward(*grads)
        ctx.dtypes = [given.dtype for given in (features, weight, bias)]
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: the saved gradients would be treated as constants
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
    of_x, of_weight, of_bias = grads
    w, b, same = weight.to(dtype), bias.to(dtype), dtype == exact
    total = torch.zeros((), dtype=exact, device=x.device)
    chunk = chunk or max(1, MAX_LOGITS // len(w))
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        ignored, target = targets[rows, None] < 0, targets[rows, None].clamp(min=0)
        logs = torch.log_softmax(torch.addmm(b, x[rows], w.t()), 1, dtype=exact)
        picked = logs.gather(1, target)
        # not in place: compiled by torch 2.11, a result that was created as zeros would get no gradient
        total = total - picked.masked_fill(ignored, 0.0).sum()
        if not any(wanted):
            continue
        # The gradient of the logits is p, and p - 1 = expm1(log p) at the target.
        slopes = torch.exp(logs, out=logs if same else torch.empty_like(logs, dtype=dtype))
        slopes.scatter_(1, target, picked.expm1().to(dtype)).masked_fill_(ignored, 0.0)
        if of_x is not None:
            of_x[rows] = slopes @ w
        if of_weight is not None:
            if same:
                of_weight.addmm_(slopes.t(), x[rows])
            else:
                of_weight += slopes.t() @ x[rows]
        if of_bias is not None:
            of_bias += slopes.sum(0, dtype=exact)
    return total, grads


def _by_kernels(
    x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, chunk: int | None, dtype: torch.dtype, wanted: list[bool]
) -> tuple[Tensor, Gradients]:
    """Compute loss and gradients with Triton kernels, which overwrite the logits of a chunk by their gradients.

    The bias is an additional column of the weight, and the features have a column of ones for the bias. So the product
    for the logits adds the bias, and the product for the gradient of the weight includes the gradient of the bias. Rows
    of logits, weight and features are padded to multiples of 16 bytes, because other matrix products take several times
    as long.
    """
    from .kernels import softmax

    (n, width), words = x.shape, len(weight)
    w = x.new_zeros(_up(words), _up(width + 1))
    w[:words, :width], w[:words, width] = weight, bias
    ones = x.new_zeros(n, w.shape[1])
    ones[:, :width], ones[:, width] = x, 1
    chunk = min(n, chunk or max(1, MAX_LOGITS_OF_KERNELS // len(w)))
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
    """Return the matrix product in float32. A GPU sums in float32; a CPU rounds it to the inputs' dtype first."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else (a @ b).float()


def _up(size: int) -> int:
    """Round a number of elements up to a multiple of 8, so that rows are multiples of 16 bytes (in float32, of 32)."""
    return -(-size // 8) * 8
