"""Trackers, which copy metrics.jsonl to TensorBoard, Weights & Biases or MLflow, each imported only if used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ..environment import is_first
from ..errors import UsageError
from ..files import write_atomically


class Tracker(Protocol):
    """Interface of a tracker: `log` is called with each line of metrics.jsonl, as a dict."""

    def log(self, metrics: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard event files in the run folder."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], group: str | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("config", str(config))

    def log(self, metrics: dict[str, Any]) -> None:
        for key, value in metrics.items():
            if isinstance(value, (int, float)) and key != "step":
                self.writer.add_scalar(key, value, metrics["step"])

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A Weights & Biases run; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], group: str | None = None) -> None:
        wandb = _import("wandb")
        own = name if group is None else f"{group}-{name}"  # two studies may contain the same run
        where: dict[str, Any] = {"project": "sngm", "group": group, "dir": str(folder)}
        self.run = wandb.init(**where, name=name, id=own, resume="allow", config=config)

    def log(self, metrics: dict[str, Any]) -> None:
        self.run.log(metrics, step=metrics["step"])

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """An MLflow run at MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], group: str | None = None) -> None:
        self.mlflow = _import("mlflow")
        self.mlflow.set_experiment(_experiment(group))
        kept = folder / "mlflow_run"  # MLflow's run id, to resume the same run
        if not kept.exists():
            write_atomically(kept, self.mlflow.start_run(run_name=name).info.run_id.encode())
            self.mlflow.log_params(config)
            return
        try:
            self.mlflow.start_run(run_id=kept.read_text())
            self.mlflow.log_params(config)
        except self.mlflow.exceptions.MlflowException as error:  # the run was deleted, or belongs to another URI
            raise UsageError(f"MLflow cannot resume ({error}); delete {kept} to begin a new run there") from error

    def log(self, metrics: dict[str, Any]) -> None:
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float)) and k != "step"}
        self.mlflow.log_metrics(numbers, step=metrics["step"])

    def close(self) -> None:
        self.mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, str, dict[str, Any], str | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}


def check_tracker(name: str | None) -> None:
    """Raise UsageError unless `name` is None or the name of a tracker, installed where the first process runs."""
    if name not in (None, *TRACKERS):
        raise UsageError(f"`track` must be one of {', '.join(TRACKERS)}, got {name!r}")
    if name is not None and is_first():  # only the first process opens a tracker
        _import(name)


def open_tracker(
    tracker: str | None, folder: Path, name: str, config: dict[str, Any], group: str | None = None
) -> Tracker | None:
    """Return the tracker with the name `tracker`; None if `tracker` is None.

    `name` is the name of the run. `group` is the name of its study, which becomes a W&B group or an MLflow experiment.
    TensorBoard uses neither.
    """
    return None if tracker is None else TRACKERS[tracker](folder, name, config, group)


def prepare_group(tracker: str | None, group: str) -> None:
    """Create the MLflow experiment of a study before its runs start at once; for other trackers do nothing."""
    if tracker == "mlflow":  # it creates its database with the first experiment
        _import(tracker).set_experiment(_experiment(group))


def _experiment(group: str | None) -> str:
    return "sngm" if group is None else f"sngm {group}"


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} is not installed; pip install 'sngm[{name}]'") from error
