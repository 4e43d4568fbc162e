"""One run: its config, its batch plan, its loop, its records."""

from __future__ import annotations

import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..memory import MemoryLimit
from . import checkpoint
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
    """The trained model of a run's folder, in evaluation mode. The code of the run's task is run to build it.

    It is the one that the run's result is of: of the last epoch, or of the best one where the task says so.

    Args:
        folder: where ``sngm train`` or ``sngm compare`` put the run.
        device: where the model shall be.
        data_dir: the folder that holds datasets, for a task whose model depends on them.
        partial: also take the model of a run that has not finished, as its last checkpoint has it.
    """
    model, _ = load_model_and_config(Path(folder), device, None if data_dir is None else Path(data_dir), partial)
    return model.eval()


def score(folder: Path, device: torch.device, data_dir: Path | None = None) -> dict[str, float]:
    """The scores of a run's trained model, computed anew."""
    set_numerics(device)
    model, config = load_model_and_config(folder, device, data_dir)
    task = config.build_task(data_dir)
    training, held_out = samples_of(task, config)
    there, here = RunFolder(folder).read().get("data"), data_of(training, held_out)
    if there not in (None, here):
        warnings.warn(
            f"{folder}: the run's data were others than these: {'; '.join(differences(there, here))}", stacklevel=2
        )
    return evaluate(task, model, held_out, config)


def load_model_and_config(
    folder: Path, device: str | torch.device, data_dir: Path | None, partial: bool = False
) -> tuple[nn.Module, RunConfig]:
    """The model of a run's folder as it was trained, and what the run was."""
    place = RunFolder(folder)
    if not place.file.exists():
        raise UsageError(f"{folder} holds no run (no run.json)")
    record = place.read()
    config = config_of(record, place.file)
    broken = record["status"] == "finished" and checkpoint.is_broken(folder)
    if broken and not partial:
        raise UsageError(
            f"{folder}: its last checkpoint is broken; the command that made it trains it to its end again"
        )
    state = checkpoint.load(folder)
    if state is None:
        raise UsageError(f"{folder} holds no checkpoint: the run is {record['status']}{_remedy(record)}")
    place.check_checkpoint(state, record, config)
    step = state["run"]["step"]
    if not partial and (record["status"] != "finished" or len(state["run"]["history"]) < config.epochs):
        raise UsageError(
            f"{folder}: the run is {record['status']}, its last whole checkpoint at step {step}{_remedy(record)}"
        )
    config.check_source()
    with MemoryLimit(f"{place.file}: {config.task_in_words}"):
        model = config.build_task(data_dir).model().to(dtype=config.dtype)
    try:
        model.load_state_dict(state.get("best_model") or state["model"])
    except RuntimeError as error:  # its lines name each tensor that does not fit
        why = str(error).splitlines()[-1].strip()
        raise UsageError(
            f"{folder}: the task builds another model now than was trained, perhaps from other data: {why}"
        ) from error
    return model.to(device), config


def _remedy(record: dict[str, Any]) -> str:
    """What helps where the model of a run is not there."""
    return "; train it again with --restart" if record["status"] in FINISHED else "; finish it first"
