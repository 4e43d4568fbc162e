"""The optimizer of a run."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import UsageError
from ..optim import CLARS, LARS, create, decay_groups
from ..optim.lars import trust
from .config import RunConfig

RATES = ("lr", "inner_lr")  # EXTRAP-SGD looks less far ahead as it takes smaller steps


def build_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The method with its settings; no decay for biases and normalisation layers.

    LARS and CLARS multiply the rate of weights by a trust ratio, often a thousandth, and leave biases and
    normalisation layers at the full rate, where they would explode. Those train at ``trust_coefficient * lr`` here.
    """
    settings = dict(config.method_settings)
    try:
        groups = decay_groups(model, settings.get("weight_decay", 0.0))
        if "weight_decay" not in settings:
            groups = [{"params": group["params"]} for group in groups]
        optimizer = create(config.method, groups, lr=config.lr, **settings)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{config.method}: {error}") from error
    if isinstance(optimizer, (LARS, CLARS)):
        for group in optimizer.param_groups:
            if all(p.ndim <= 1 for p in group["params"]) and group["adapt"] is None:
                group["lr"] *= trust(group)
    for group in optimizer.param_groups:
        group |= {f"initial_{key}": group[key] for key in RATES if key in group}
    return optimizer


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the rates a run began with by a schedule's factor."""
    for group in optimizer.param_groups:
        group |= {key: group[f"initial_{key}"] * factor for key in RATES if key in group}
