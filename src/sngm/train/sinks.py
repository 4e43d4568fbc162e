"""Trackers, imported only when asked for. The files of a run are the record; these are copies for other tools."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

from ..errors import UsageError

TRACKERS = ("tensorboard", "wandb", "mlflow")


class Sink(Protocol):
    """Takes each line of metrics.jsonl as it is written."""

    def log(self, metrics: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any]) -> None:
        _import("tensorboard", "tensorboard")
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

    def __init__(self, folder: Path, name: str, config: dict[str, Any]) -> None:
        wandb = _import("wandb", "wandb")
        self.run = wandb.init(project="sngm", name=name, id=name, resume="allow", dir=str(folder), config=config)

    def log(self, metrics: dict[str, Any]) -> None:
        self.run.log(metrics, step=metrics["step"])

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """An MLflow run, where MLFLOW_TRACKING_URI says."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any]) -> None:
        self.mlflow = _import("mlflow", "mlflow")
        self.mlflow.set_experiment("sngm")
        self.mlflow.start_run(run_name=name)
        self.mlflow.log_params(config)

    def log(self, metrics: dict[str, Any]) -> None:
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float)) and k != "step"}
        self.mlflow.log_metrics(numbers, step=metrics["step"])

    def close(self) -> None:
        self.mlflow.end_run()


def open_sink(tracker: str | None, folder: Path, name: str, config: dict[str, Any]) -> Sink | None:
    """The tracker of this name."""
    if tracker is None:
        return None
    if tracker not in TRACKERS:
        raise UsageError(f"no tracker is called {tracker!r}; there are {', '.join(TRACKERS)}")
    kinds: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}
    sink: Sink = kinds[tracker](folder, name, config)
    return sink


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{module} is not installed; pip install 'sngm[{extra}]'") from error
