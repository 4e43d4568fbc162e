"""Models sharded over processes with FSDP2, and their checkpoints by torch.distributed.checkpoint."""

from __future__ import annotations

import importlib
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..optim import CLARS, ExtrapSGD
from .config import RunConfig


def shard(model: nn.Module, device: torch.device, ranks: int) -> None:
    """Shard a model over all processes: first each entry of a ModuleList or Sequential, then the rest of the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    blocks = [m for parent in model.modules() if isinstance(parent, (nn.ModuleList, nn.Sequential)) for m in parent]
    for block in reversed(list(dict.fromkeys(blocks))):  # inner blocks before the blocks that contain them
        if any(True for _ in block.parameters()) and not isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters of a model are sharded over processes."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # not imported here, because that is slow; `shard` imports it
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def check(config: RunConfig, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if an option needs a copy of the model, or the method needs the gradient of each worker."""
    if config.ema is not None or config.bn_samples:
        raise UsageError("`shard`: `ema` and `bn_samples` need a copy of the whole model")
    if isinstance(optimizer, (CLARS, ExtrapSGD)):
        raise UsageError(f"`shard`: {type(optimizer).__name__} needs the gradient of each worker, which FSDP2 lacks")


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, best_model: dict[str, Tensor] | None, first: bool
) -> None:
    """Write model and optimizer to a folder. All processes must call this; each process writes its own shards.

    Args:
        path, model, optimizer: the folder to write, the sharded model and its optimizer.
        best_model: the weights of the best epoch; None to write none.
        first: whether this is the first process, which first deletes the folder if it exists.
    """
    if first:
        shutil.rmtree(path, ignore_errors=True)  # left by a process that was killed while it wrote
    torch.distributed.barrier()
    dcp, states = _checkpoints()
    weights, state = states.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "best_model": best_model or {}}, checkpoint_id=path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, best: bool) -> dict[str, Tensor] | None:
    """Load model and optimizer from a folder that `save` wrote, with any number of processes, sharded or not.

    Args:
        path, model, optimizer: the folder, and the model and optimizer to load into.
        best: whether the folder also has the weights of the best epoch.

    Returns:
        The weights of the best epoch; None if the folder has none.
    """
    dcp, states = _checkpoints()
    weights, state = states.get_state_dict(model, optimizer)
    best_model = {name: t.clone() for name, t in weights.items()} if best else {}
    found: dict[str, Any] = {"model": weights, "optimizer": state, "best_model": best_model}
    _read(dcp, found, path)
    states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=found["optimizer"])
    return best_model or None


def load_weights(path: Path, model: nn.Module, best: bool) -> dict[str, Any]:
    """Return the weights in a folder that `save` wrote, for a model in one process; if `best`, of the best epoch."""
    dcp, states = _checkpoints()
    weights: dict[str, Any] = states.get_model_state_dict(model)
    _read(dcp, {"best_model" if best else "model": weights}, path)
    return weights


def _read(dcp: Any, into: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process may load it too
        dcp.load(into, checkpoint_id=path)


def _checkpoints() -> tuple[Any, Any]:
    dcp = importlib.import_module("torch.distributed.checkpoint")
    return dcp, importlib.import_module("torch.distributed.checkpoint.state_dict")
