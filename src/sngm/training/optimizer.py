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
from ..optim.state import HOW
from .config import RunConfig

RATES = ("lr", "inner_lr")  # EXTRAP-SGD looks less far ahead as it takes smaller steps
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # torch's own that we know to have fused steps on CUDA


def build_optimizer(config: RunConfig, model: nn.Module, *, tensor_rates: bool = False) -> torch.optim.Optimizer:
    """The method with its settings; decay on weights or on all parameters, as the config says.

    LARS and CLARS multiply the rate of weights by a trust ratio, often a thousandth, and leave biases and
    normalisation layers at the full rate, where they would explode. Those train at ``trust_coefficient * lr`` here,
    unless the config asks for the full rate.

    Args:
        config: of the run.
        model: where it shall be trained.
        tensor_rates: keep rates in tensors on the device, which :func:`set_rates` fills: a captured step reads them
            anew at each replay. Checkpoints are the same with and without.
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
    """Train tensors of one dimension at trust_coefficient * lr, in a group apart from matrices."""
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


def captures(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a CUDA graph may hold a step of this optimizer, once its rates are tensors."""
    return isinstance(optimizer, (LargeBatchOptimizer, *FUSED))


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the rates a run began with by a schedule's factor. Tensors are filled, if the factor is a new one."""
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
    """Torch's fused steps on a GPU, where the user's settings leave the choice open."""
    for group in optimizer.param_groups:
        if not isinstance(optimizer, FUSED) or any(p.device.type != "cuda" for p in group["params"]):
            continue
        if group["fused"] is None and not group["foreach"] and not group["differentiable"]:
            group["fused"] = True
        if capture and "capturable" in group:
            group["capturable"] = True
    how = [{key: group[key] for key in HOW if key in group} for group in optimizer.param_groups]

    def keep(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint may come from another device; how steps are computed is for this one to say."""
        if len(state["param_groups"]) != len(how):  # torch will say so
            return state
        return {**state, "param_groups": [g | own for g, own in zip(state["param_groups"], how, strict=True)]}

    optimizer.register_load_state_dict_pre_hook(keep)


def _hold_rates_in_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Rates in tensors that stay the same ones when a checkpoint is loaded, and that checkpoints know nothing of."""
    held: list[dict[str, Tensor]] = []
    for group in optimizer.param_groups:
        device = group["params"][0].device
        # torch's fused kernels read a float32 there, whatever it is
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
        optimizer.__dict__.pop("rate_factor", None)  # whatever it was, the next one is new

    optimizer.register_state_dict_post_hook(as_numbers)
    optimizer.register_load_state_dict_post_hook(back_into_tensors)
