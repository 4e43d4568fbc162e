"""Argument checks. Every error names the argument, its value and the allowed values."""

import difflib
import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def number(
    name: str, value: Any, low: float = 0.0, high: float = math.inf, *, include_low: bool = True, none: bool = False
) -> None:
    """Raise an error unless `value` is a finite number in [low, high), or in (low, high) if not `include_low`.

    None is allowed too if `none` is true.
    """
    if none and value is None:
        return
    allowed = f"a finite number in {'[' if include_low else '('}{low:g}, {high:g})"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {allowed}, got {value!r} of type {type(value).__name__}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an int beyond the range of float
        finite = False
    if not (finite and (value >= low if include_low else value > low) and value < high):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def rate(name: str, value: Any) -> None:
    """Raise an error unless a learning rate is a number >= 0 or a one-element tensor with such a number."""
    if not isinstance(value, Tensor):
        number(name, value)
    elif value.numel() != 1 or not value.is_floating_point():
        raise ValueError(
            f"{name} must be a number >= 0 or a floating-point tensor with one element, "
            f"got a {value.dtype} tensor of shape {tuple(value.shape)}"
        )
    elif value.device.type == "cpu":  # not on a GPU, where reading the value would synchronise
        number(name, value.item())


def rates(groups: list[dict[str, Any]]) -> None:
    """Raise TypeError if a group's learning rate is neither a number nor a tensor, before the step changes anything."""
    for i, group in enumerate(groups):
        lr = group["lr"]
        if not isinstance(lr, (float, Tensor, int)) and not isinstance(lr, Real):  # Real is slow to check
            raise TypeError(f"lr in param_groups[{i}] must be a number or a tensor, got {lr!r}")


def gradient(grad: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError unless a gradient has its parameter's shape and device, and memory if it is a plain tensor.

    Otherwise kernels could read past its end.
    """
    if grad.size() != shape:
        raise ValueError(
            f"a gradient has shape {tuple(grad.shape)}, but its parameter has {tuple(shape)}; "
            "call zero_grad() and run backward() again"
        )
    if grad.device != device:
        raise ValueError(
            f"a gradient is on {grad.device}, but its parameter on {device}; call zero_grad() and run backward() again"
        )
    if torch.compiler.is_compiling() or type(grad) is not Tensor or grad.layout != torch.strided or grad.is_meta:
        return
    if not grad.data_ptr() and grad.numel():
        raise ValueError("the memory of a gradient has been freed; call zero_grad() and run backward() again")


def numpy_to_python(settings: dict[str, Any]) -> None:
    """Convert NumPy values to Python numbers and lists in place, because torch.load rejects NumPy in checkpoints."""
    for key, value in settings.items():
        if type(value).__module__ == "numpy" and hasattr(value, "item"):
            settings[key] = value.item() if value.size == 1 else value.tolist()


def flag(name: str, value: Any, *, none: bool = False) -> None:
    """Raise TypeError unless `value` is a bool, or None if `none` is true."""
    if not (isinstance(value, bool) or (none and value is None)):
        raise TypeError(f"{name} must be True{', False or None' if none else ' or False'}, got {value!r}")


def choice(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def bounds(name: str, value: Any) -> None:
    """Raise an error unless `value` is None or a pair (low, high) with 0 < low <= high."""
    if value is None:
        return
    if not (isinstance(value, (tuple, list)) and len(value) == 2):
        raise TypeError(f"{name} must be None or a pair (low, high), got {value!r}")
    number(f"{name}[0]", value[0], include_low=False)
    number(f"{name}[1]", value[1], include_low=False)
    if value[0] > value[1]:
        raise ValueError(f"{name} must be a pair (low, high) with low <= high, got {value!r}")


def betas(name: str, value: Any) -> None:
    """Raise an error unless `value` is a pair of numbers in [0, 1)."""
    if not (isinstance(value, (tuple, list)) and len(value) == 2):
        raise TypeError(f"{name} must be a pair (beta1, beta2), got {value!r}")
    for i, beta in enumerate(value):
        number(f"{name}[{i}]", beta, high=1.0)


flag_or_none = partial(flag, none=True)
positive_or_none = partial(number, include_low=False, none=True)
# the check of each setting, the same for every method that has it; LAMB and CLARS check some settings further
CHECKS: dict[str, Callable[[str, Any], None]] = {
    "lr": rate,
    "inner_lr": rate,
    "momentum": partial(number, high=1.0),
    "row_beta": partial(number, high=1.0),
    "betas": betas,
    "weight_decay": number,
    "eps": number,
    "vector_scale": number,
    "trust_coefficient": positive_or_none,
    "max_ratio": positive_or_none,
    "clamp_grad": positive_or_none,
    "max_grad_norm": positive_or_none,
    "phi": bounds,
    "adapt": flag_or_none,
    "bias_correction": flag,
    "nesterov": flag,
    "maximize": flag,
    "foreach": flag_or_none,
    "fused": flag_or_none,
    "capturable": flag,
    "stochastic_rounding": flag,
}


def settings(group: dict[str, Any]) -> None:
    """Raise an error if a setting of a group is invalid, or if two settings contradict each other."""
    for name, check in CHECKS.items():
        if name in group:
            check(name, group[name])
    if group["foreach"] and group["fused"]:
        raise ValueError("foreach and fused must not both be True")
    if group.get("nesterov") and group.get("momentum") == 0:
        raise ValueError("nesterov=True needs momentum > 0, got momentum=0")


def keys(group: dict[str, Any], known: list[str]) -> None:
    """Raise ValueError for a group key that looks like a misspelt known key.

    Other unknown keys are allowed, because schedulers and trainers store values in groups.
    """
    for key in group:
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.85)
        if key not in known and near:
            raise ValueError(f"a parameter group has no {key!r}; did you mean {near[0]!r}?")


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Return the names of dtypes for an error message.

    >>> dtype_names((torch.float32, torch.float64))
    'float32, float64'
    """
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def used(name: str, defaults: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raise ValueError if a non-zero setting of the optimizer has no effect, because every group has its own value."""
    if defaults[name] and all(group[name] != defaults[name] for group in groups):
        values = ", ".join(map(repr, dict.fromkeys(group[name] for group in groups)))
        raise ValueError(
            f"{name}={defaults[name]!r} has no effect, because every parameter group has its own {name} ({values}); "
            "leave it out or change the groups (in Hugging Face's Trainer, whose groups have args.weight_decay, use "
            "sngm.integrations.huggingface.trainer_optimizer)"
        )


def parameters(params: list[Any], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise an error for parameters that are duplicate or unsupported, or whose dtype is not one of `dtypes`.

    torch itself rejects values that are not tensors.
    """
    seen: set[int] = set()
    for i, p in enumerate(params):
        if not isinstance(p, Tensor):
            continue
        if torch.nn.parameter.is_lazy(p):
            raise ValueError(f"params[{i}] has no shape yet: let some input through the model before")
        if p.dtype not in dtypes:
            raise TypeError(f"params must have dtype {dtype_names(dtypes)}; params[{i}] is {p.dtype}")
        if p.layout != torch.strided:
            raise TypeError(f"params must be dense; params[{i}] has layout {p.layout}")
        placements = getattr(p, "placements", ())  # only DTensors have placements
        if any(placement.is_partial() for placement in placements):
            raise TypeError(f"params must be whole or sharded; params[{i}] is a DTensor of partial sums: {placements}")
        if any(stride == 0 and size > 1 for size, stride in zip(p.shape, p.stride(), strict=True)):
            raise ValueError(f"params must not overlap themselves in memory; params[{i}] is an expanded view")
        if p.is_conj():
            raise ValueError(f"params must not be conjugated views; use params[{i}].resolve_conj()")
        if id(p) in seen:
            raise ValueError(f"params must not repeat a parameter; params[{i}] appears twice in its group")
        seen.add(id(p))
