"""Argument checks: every refusal names the argument, the value and what is allowed."""

import difflib
import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

PARAMETER_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def number(name: str, value: Any, low: float, high: float = math.inf, *, include_low: bool = True) -> None:
    """Refuse `value` unless it is a finite real number in [low, high) (or (low, high))."""
    allowed = f"a finite number in {'[' if include_low else '('}{low:g}, {high:g})"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {allowed}, got {value!r} of type {type(value).__name__}")
    try:
        x = float(value)
    except OverflowError:  # an int no float can hold
        x = math.inf
    if not (math.isfinite(x) and (x >= low if include_low else x > low) and x < high):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def rate(name: str, value: Any) -> None:
    """Refuse a learning rate unless it is a number >= 0 or a tensor holding one such number."""
    if not isinstance(value, Tensor):
        number(name, value, 0.0)
    elif value.numel() != 1 or not value.is_floating_point():
        raise ValueError(
            f"{name} must be a number >= 0 or a floating-point tensor with one element, "
            f"got a {value.dtype} tensor of shape {tuple(value.shape)}"
        )
    elif value.device.type == "cpu":  # reading a GPU's value would wait for it
        number(name, value.item(), 0.0)


def rates(groups: list[dict[str, Any]]) -> None:
    """Refuse to step with a learning rate that is none, before anything has changed."""
    for i, group in enumerate(groups):
        lr = group["lr"]
        if not isinstance(lr, (float, Tensor, int)) and not isinstance(lr, Real):  # the latter is slow to ask
            raise TypeError(f"lr in param_groups[{i}] must be a number or a tensor, got {lr!r}")


def gradient(grad: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse a gradient of another shape or place than its parameter has by now: kernels would go past its end."""
    if grad.size() != shape:
        raise ValueError(
            f"a gradient has shape {tuple(grad.shape)}, but its parameter has {tuple(shape)}; "
            "call zero_grad() and compute it anew"
        )
    if grad.device != device:
        raise ValueError(
            f"a gradient is on {grad.device}, but its parameter on {device}; call zero_grad() and compute it anew"
        )


def plain(settings: dict[str, Any]) -> None:
    """Turn numpy's numbers into Python's, in place: torch.load refuses checkpoints that hold the former."""
    for key, value in settings.items():
        if type(value).__module__ == "numpy" and hasattr(value, "item"):
            settings[key] = value.item()


def flag(name: str, value: Any, *, none: bool = False) -> None:
    """Refuse `value` unless it is a bool (or None, where that means "choose for me")."""
    if not (isinstance(value, bool) or (none and value is None)):
        raise TypeError(f"{name} must be True{', False or None' if none else ' or False'}, got {value!r}")


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse `value` unless it is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def bounds(name: str, value: Any) -> None:
    """Refuse `value` unless it is None or a pair (low, high) with 0 < low <= high."""
    if value is None:
        return
    if not (isinstance(value, (tuple, list)) and len(value) == 2):
        raise TypeError(f"{name} must be None or a pair (low, high), got {value!r}")
    number(f"{name}[0]", value[0], 0.0, include_low=False)
    number(f"{name}[1]", value[1], 0.0, include_low=False)
    if value[0] > value[1]:
        raise ValueError(f"{name} must be a pair (low, high) with low <= high, got {value!r}")


def keys(group: dict[str, Any], known: list[str]) -> None:
    """Refuse a group key that is nearly one we know. Others pass: schedulers and trainers keep notes in groups."""
    for key in group:
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.85)
        if key not in known and near:
            raise ValueError(f"a parameter group has no {key!r}; did you mean {near[0]!r}?")


def parameters(params: list[Any]) -> None:
    """Refuse duplicates and dtypes no rule here is defined for. Non-tensors are torch's to refuse."""
    seen: set[int] = set()
    for i, p in enumerate(params):
        if not isinstance(p, Tensor):
            continue
        if torch.nn.parameter.is_lazy(p):
            raise ValueError(f"params[{i}] has no shape yet: let some input through the model before")
        if p.dtype not in PARAMETER_DTYPES:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in PARAMETER_DTYPES)
            raise TypeError(f"params must have dtype {allowed}; params[{i}] is {p.dtype}")
        if p.layout != torch.strided:
            raise TypeError(f"params must be dense; params[{i}] has layout {p.layout}")
        placements = getattr(p, "placements", ())  # of a DTensor
        if any(placement.is_partial() for placement in placements):
            raise TypeError(f"params must be whole or sharded; params[{i}] is a DTensor of partial sums: {placements}")
        if any(stride == 0 and size > 1 for size, stride in zip(p.shape, p.stride(), strict=True)):
            raise ValueError(f"params must not overlap themselves in memory; params[{i}] is an expanded view")
        if p.is_conj():
            raise ValueError(f"params must not be conjugated views; use params[{i}].resolve_conj()")
        if id(p) in seen:
            raise ValueError(f"params must not repeat a parameter; params[{i}] appears twice in its group")
        seen.add(id(p))
