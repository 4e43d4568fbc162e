"""Cross entropy over a large vocabulary whose logits are never all there at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

AT_ONCE = 1 << 26  # logits: 256 MiB in float32, which is work enough for a GPU


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
    over chunks are in float32, or in float64 where `weight` is. No target is ignored.

    Args:
        features: of shape (N, H).
        weight: of shape (V, H).
        bias: of shape (V,).
        targets: of shape (N,), whole numbers from 0 to V - 1.
        reduction: "mean" over rows, or "sum".
        chunk: rows at once; None: as many as make 2**26 logits.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if features.ndim != 2 or weight.ndim != 2 or features.shape[1] != weight.shape[1]:
        raise ValueError(f"features and weight must be (N, H) and (V, H), got {_shapes(features, weight)}")
    if bias.shape != weight.shape[:1] or targets.shape != features.shape[:1]:
        raise ValueError(f"bias and targets must be (V,) and (N,), got {_shapes(bias, targets)}")
    if not len(targets):
        raise ValueError("there are no rows to take the loss of")
    if chunk is None:
        chunk = max(1, AT_ONCE // len(weight))
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be whole numbers, got {targets.dtype}")
    train = torch.is_grad_enabled()  # asked out here: within an autograd function it is off
    total: Tensor = _Sum.apply(features, weight, bias, targets.long(), chunk, train)  # type: ignore[no-untyped-call]
    return total / len(targets) if reduction == "mean" else total


class _Sum(torch.autograd.Function):
    """The loss summed over rows. It keeps its gradients, which `backward` has only to scale."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, chunk: int, train: bool
    ) -> Tensor:
        kind = features.device.type
        exact = torch.promote_types(weight.dtype, torch.float32)
        low = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(kind) if low else weight.dtype
        wanted = [train and needed for needed in ctx.needs_input_grad[:3]]
        grads = [
            torch.zeros_like(given, dtype=kept) if needed else None
            for given, kept, needed in zip(
                (features, weight, bias), (features.dtype, exact, exact), wanted, strict=True
            )
        ]
        with torch.autocast(kind, enabled=False):
            # without autocast, features of another dtype than weight's are refused by the product
            x = features.to(dtype) if low else features
            w, b = weight.to(dtype), bias.to(dtype)
            total = torch.zeros((), dtype=exact, device=features.device)
            for start in range(0, len(x), chunk):
                rows = slice(start, start + chunk)
                of_rows = None if grads[0] is None else grads[0][rows]
                total += _chunk(x[rows], w, b, targets[rows, None], exact, of_rows, grads[1], grads[2])
        ctx.save_for_backward(*grads)
        ctx.dtypes = [given.dtype for given in (features, weight, bias)]
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: what is kept would pass for constants
            raise RuntimeError("vocabulary_loss has no second derivatives; use cross_entropy for those")
        kept = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if one is None else (one * grad).to(dtype) for one, dtype in kept), None, None, None


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
    logs = torch.log_softmax(torch.addmm(bias, x, weight.t()), 1, dtype=exact)
    picked = logs.gather(1, targets)
    loss = -picked.sum()
    if of_x is None and of_weight is None and of_bias is None:
        return loss
    same = weight.dtype == exact
    # The gradient of the logits is p, less 1 at the target: there it is expm1(log p).
    slopes = torch.exp(logs, out=logs if same else torch.empty_like(logs, dtype=weight.dtype))
    slopes.scatter_(1, targets, picked.expm1().to(slopes.dtype))
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


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(tuple(t.shape)) for t in tensors)
