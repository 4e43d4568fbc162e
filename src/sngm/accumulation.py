"""Judge whether a gradient is the mean over micro-batches, from the last operations that compute each loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .optim import LAMB, NSGDM, SNGM, SpectralSNGM
from .optim.sharded_norms import local

# operations that leave a loss and its gradient unchanged, except perhaps the sign
NEUTRAL = ("AliasBackward0", "CloneBackward0", "NegBackward0", "SqueezeBackward0", "ToCopyBackward0", "ViewBackward0")
TOLERANCE = 4e-3  # allowed relative error of a factor, because the factor may be rounded to bfloat16


class Loss(NamedTuple):
    """A loss as a product: a constant, `factor` (NaN if not known), times a term, which `kind` describes."""

    factor: float
    kind: str  # "mean" or "sum" if the term is a mean or sum over samples, else "other"


UNKNOWN = Loss(math.nan, "other")


def read_loss(tensors: Any, gradients: Any = None) -> Loss:
    """Return the factor and the kind of a loss, given the arguments of `torch.autograd.backward`."""
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = list(gradients) if isinstance(gradients, (list, tuple)) else [gradients] * len(roots)
    found = {_read_one(root, gradient) for root, gradient in zip(roots, given, strict=False)}
    return found.pop() if len(found) == 1 else UNKNOWN


def _read_one(root: Tensor, gradient: Any) -> Loss:
    factor, function = 1.0, root.grad_fn
    constant = gradient
    while True:
        if constant is not None:
            if not isinstance(constant, Tensor) or constant.numel() != 1 or constant.is_complex():
                return UNKNOWN
            factor *= float(constant)
            constant = None
        name = type(function).__name__
        inputs = [source for source, _ in function.next_functions] if function is not None else []
        if name in NEUTRAL:
            function = inputs[0]
        elif name in ("DivBackward0", "MulBackward0") and inputs[1] is None:
            constant = function._saved_other  # type: ignore[union-attr]
            constant = constant.double().reciprocal() if name[0] == "D" and not constant.is_complex() else constant
            function = inputs[0]
        elif name == "MulBackward0" and inputs[0] is None:
            constant, function = function._saved_self, inputs[1]  # type: ignore[union-attr]
        else:
            return Loss(factor, _kind(name, function))


def _kind(name: str, function: Any) -> str:
    reduction = getattr(function, "_saved_reduction", None)
    if name.startswith("MeanBackward") or reduction == 1:
        return "mean"
    return "sum" if name.startswith("SumBackward") or reduction == 2 else "other"


def gradient_size(optimizers: Iterable[Any]) -> float:
    """Return the norm of this rank's gradients, over all parameters of some optimizers."""
    grads = [p.grad for p in params_of(optimizers) if p.grad is not None]
    return math.hypot(*(torch.linalg.vector_norm(exact(local(grad.detach()))).item() for grad in grads))


def params_of(optimizers: Iterable[Any]) -> list[Tensor]:
    """Return the parameters of all groups of some optimizers."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def exact(tensor: Tensor) -> Tensor:
    """Return a tensor as a dense one of float64; complex tensors keep their dtype."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return dense if dense.is_complex() else dense.double()


def depends_on_scale(optimizer: Any) -> bool:
    """Return whether the optimizer's steps may change if all gradients are multiplied by the same number."""
    groups = optimizer.param_groups
    if isinstance(optimizer, (SNGM, NSGDM)):
        return any(group["weight_decay"] and group["weight_decay_mode"] == "coupled" for group in groups)
    if isinstance(optimizer, LAMB):
        return any(group["max_grad_norm"] is not None for group in groups)
    return not isinstance(optimizer, SpectralSNGM)


def judge(optimizers: list[Any], losses: list[Loss], loss_scale: bool, change: float) -> tuple[bool | None, str]:
    """Return whether the gradient is the mean over micro-batches (None if not known), and a sentence that says why.

    Args:
        optimizers: the optimizers that take the step.
        losses: the result of `read_loss` for each micro-batch.
        loss_scale: whether a GradScaler multiplied a loss.
        change: the factor that the gradient was multiplied by between the last backward and the step; NaN if not known.
    """
    count = len(losses)
    if count == 0:
        return None, "not known: no backward was seen during the step"
    if count == 1:
        return True, "one backward per step"
    dependent = [optimizer for optimizer in optimizers if depends_on_scale(optimizer)]
    if not dependent:
        return True, f"{count} micro-batches; their mean or sum gives the same step, because the step is normalised"
    remedy = f"each of the {count} losses should be a mean, divided by {count}"
    if loss_scale:
        return None, f"not known, as a GradScaler multiplies the losses: {remedy}"
    kinds = {loss.kind for loss in losses}
    if "sum" in kinds:
        return None, f"not known, as a loss is a sum over samples: {remedy}"
    total = sum(loss.factor for loss in losses) * (1.0 if math.isnan(change) else change)
    if math.isclose(total, 1.0, rel_tol=TOLERANCE):
        return True, f"mean over {count} micro-batches: the factors of their losses sum to 1"
    if kinds != {"mean"} or math.isnan(total) or math.isnan(change):
        return None, f"not known, as the last operations of a loss do not tell its factor: {remedy}"
    if not all(math.isclose(loss.factor * change, 1.0, rel_tol=TOLERANCE) for loss in losses):
        text = f"not known: the factors of the losses make the gradient {total:.3g} times the mean over {count}"
        return None, f"{text} micro-batches; without a factor of your own in the loss this must be 1"
    effect = "the gradient is {} times too large"
    if all(isinstance(optimizer, (SNGM, NSGDM)) for optimizer in dependent):
        effect = "weight decay is {} times too weak"
    text = f"the gradient is the sum over {count} micro-batches: no loss was divided by {count}, so"
    remedy = "divide it (in Hugging Face's Trainer: set accepts_loss_kwargs = False on the model)"
    return False, f"{text} {effect.format(count)}; {remedy}"
