"""The optimizer of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..optim import CLARS, LARS, create, decay_groups
from ..optim.base import LargeBatchOptimizer
from ..optim.lars import trust
from ..optim.state import EXECUTION_FLAGS
from .config import RunConfig

RATES = ("lr", "inner_lr")  # schedules scale EXTRAP-SGD's inner_lr too
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # those of torch with fused steps on CUDA


def build_optimizer(config: RunConfig, model: nn.Module, *, tensor_rates: bool = False) -> torch.optim.Optimizer:
    """Build the optimizer of a run, with its parameter groups.

    LARS and CLARS multiply the learning rate of weights by a trust ratio, often about 0.001. Biases and normalisation
    layers have no trust ratio and would diverge at the full rate, so they train at ``trust_coefficient * lr``, unless
    the config has ``bias_lr="full"``.

    Args:
        config: of the run.
        model: on the device it is trained on.
        tensor_rates: keep learning rates in tensors on the device, which :func:`set_rates` fills, so that each replay
            of a CUDA graph reads the current values. Checkpoints do not depend on it.
    """
    settings = dict(config.method_settings)
    try:
        groups = decay_groups(model, settings.get("weight_decay", 0.0))
        if config.decay_on == "all":
            groups = [{**group, "weight_decay": settings.get("weight_decay", 0.0)} for group in groups]
        if "weight_decay" not in settings:
            groups = [{"params": group["params"]} for group in groups]
        optimizer = create(config.method, groups, lr=config.lr, **settings)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{config.method}: {error}") from error
    if isinstance(optimizer, (LARS, CLARS)) and config.bias_lr == "scaled":
        _scale_vectors(optimizer)
    for group in optimizer.param_groups:
        group |= {f"initial_{key}": group[key] for key in RATES if key in group}
    _choose_kernels(optimizer, tensor_rates)
    if tensor_rates:
        _hold_rates_in_tensors(optimizer)
    return optimizer


def _scale_vectors(optimizer: LARS | CLARS) -> None:
    """Move tensors of at most one dimension to groups with the learning rate trust_coefficient * lr."""
    for group in list(optimizer.param_groups):
        vectors = [p for p in group["params"] if p.ndim <= 1]
        if group["adapt"] is not None or not vectors:
            continue
        rate = group["lr"] * trust(group)
        if len(vectors) == len(group["params"]):
            group["lr"] = rate
        else:
            group["params"] = [p for p in group["params"] if p.ndim > 1]
            optimizer.add_param_group({**group, "params": vectors, "lr": rate})


def can_capture(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a CUDA graph can capture this optimizer's step, given learning rates in tensors."""
    return isinstance(optimizer, (LargeBatchOptimizer, *FUSED))


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set learning rates to their initial values times a schedule's factor. Tensors are filled in place."""
    changed = getattr(optimizer, "rate_factor", None) != factor
    for group in optimizer.param_groups:
        for key in RATES:
            if key not in group:
                continue
            rate = group[f"initial_{key}"] * factor
            if not isinstance(group[key], Tensor):
                group[key] = rate
            elif changed:
                group[key].fill_(rate)
    optimizer.rate_factor = factor  # type: ignore[attr-defined]


def _choose_kernels(optimizer: torch.optim.Optimizer, capture: bool) -> None:
    """Turn on torch's fused steps on a GPU, unless the settings choose otherwise."""
    for group in optimizer.param_groups:
        if not isinstance(optimizer, FUSED) or any(p.device.type != "cuda" for p in group["params"]):
            continue
        if group["fused"] is None and not group["foreach"] and not group["differentiable"]:
            group["fused"] = True
        if capture and "capturable" in group:
            group["capturable"] = True
    how = [{key: group[key] for key in EXECUTION_FLAGS if key in group} for group in optimizer.param_groups]

    def keep(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Keep `fused`, `foreach` and the like when a checkpoint of another device is loaded."""
        if len(state["param_groups"]) != len(how):  # torch raises ValueError
            return state
        return {**state, "param_groups": [g | own for g, own in zip(state["param_groups"], how, strict=True)]}

    optimizer.register_load_state_dict_pre_hook(keep)


def _hold_rates_in_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Hold learning rates in tensors that survive `load_state_dict`; checkpoints hold plain numbers instead."""
    held: list[dict[str, Tensor]] = []
    for group in optimizer.param_groups:
        device = group["params"][0].device
        # torch's fused kernels read lr as float32, whatever its dtype
        exact = torch.float32 if isinstance(optimizer, FUSED) and device.type == "cuda" else torch.float64
        held.append({k: torch.tensor(group[k], dtype=exact, device=device) for k in RATES if k in group})
        group |= held[-1]

    def pairs() -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
        return zip(optimizer.param_groups, held, strict=True)

    def as_numbers(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        factor = getattr(optimizer, "rate_factor", 1.0)
        rates = [{k: group[f"initial_{k}"] * factor for k in tensors} for group, tensors in pairs()]
        return {**state, "param_groups": [g | r for g, r in zip(state["param_groups"], rates, strict=True)]}

    def back_into_tensors(_: torch.optim.Optimizer) -> None:
        for group, tensors in pairs():
            for key, tensor in tensors.items():
                tensor.fill_(group[key])
            group |= tensors
        optimizer.__dict__.pop("rate_factor", None)  # so that set_rates fills the tensors again

    optimizer.register_state_dict_post_hook(as_numbers)
    optimizer.register_load_state_dict_post_hook(back_into_tensors)
