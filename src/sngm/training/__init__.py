"""Training of one run: config, batch plan, training loop, records."""

from __future__ import annotations

import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..memory import MemoryLimit
from . import checkpoint, sharding
from .batch_plan import BatchPlan
from .config import RunConfig, resolve
from .distributed import set_numerics
from .evaluate import data_of, evaluate, samples_of
from .loop import Options, train
from .run_folder import FINISHED, RunFolder, differences
from .validation import config_of

__all__ = ["BatchPlan", "Options", "RunConfig", "RunFolder", "load_model", "resolve", "score", "train"]


def load_model(
    folder: str | PathLike[str],
    device: str | torch.device = "cpu",
    *,
    partial: bool = False,
    data_dir: str | PathLike[str] | None = None,
) -> nn.Module:
    """Return the trained model of a run folder, in evaluation mode. This runs the code of the task.

    The model has the weights of the last epoch, or of the best epoch if the task has ``result_of = "best"``. With
    `ema`, these are the averaged weights.

    Args:
        folder: the folder of the run, written by ``sngm train`` or ``sngm compare``.
        device: the device to load the model onto.
        data_dir: the folder of datasets, for tasks whose model depends on the data.
        partial: also accept an unfinished run, and load its last checkpoint.
    """
    model, _ = load_model_and_config(Path(folder), device, None if data_dir is None else Path(data_dir), partial)
    return model.eval()


def score(folder: Path, device: torch.device, data_dir: Path | None = None) -> dict[str, float]:
    """Evaluate the trained model of a run folder again and return its scores."""
    set_numerics(device)
    model, config = load_model_and_config(folder, device, data_dir)
    task = config.build_task(data_dir)
    training, held_out = samples_of(task, config)
    there, here = RunFolder(folder).read().get("data"), data_of(training, held_out)
    if there not in (None, here):
        warnings.warn(
            f"{folder}: this run was trained on different data: {'; '.join(differences(there, here))}", stacklevel=2
        )
    return evaluate(task, model, held_out, config)


def load_model_and_config(
    folder: Path, device: str | torch.device, data_dir: Path | None, partial: bool = False
) -> tuple[nn.Module, RunConfig]:
    """Return the trained model of a run folder and the config of the run."""
    run = RunFolder(folder)
    run.check_exists()
    record = run.read()
    config = config_of(record, run.file)
    broken = record["status"] == "finished" and checkpoint.is_broken(folder)
    if broken and not partial:
        raise UsageError(
            f"{folder}: its last checkpoint is broken; the command that made it trains it to its end again"
        )
    state = checkpoint.load(folder)
    if state is None:
        raise UsageError(f"{folder} holds no checkpoint: the run is {record['status']}{_remedy(record)}")
    run.check_checkpoint(state, record, config)
    step = state["run"]["step"]
    if not partial and (record["status"] != "finished" or len(state["run"]["history"]) < config.epochs):
        raise UsageError(
            f"{folder}: the run is {record['status']}, its last whole checkpoint at step {step}{_remedy(record)}"
        )
    config.check_source()
    with MemoryLimit(f"{run.file}: {config.task_in_words}"):
        model = config.build_task(data_dir).model().to(dtype=config.dtype)
    try:
        if "shards" in state:
            weights = sharding.load_weights(folder / state["shards"], model, state["has_best"])
        else:
            weights = state.get("best_model") or state["model"]
        model.load_state_dict(weights)
    except RuntimeError as error:  # its message has one line for each tensor that does not fit
        why = str(error).splitlines()[-1].strip()
        raise UsageError(
            f"{folder}: the task builds another model now than was trained, perhaps from other data: {why}"
        ) from error
    return model.to(device), config


def _remedy(record: dict[str, Any]) -> str:
    """Return what the user can do about a run without a usable model, as the end of an error message."""
    return "; train it again with `restart`" if record["status"] in FINISHED else "; finish it first"
