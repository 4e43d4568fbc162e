"""The folder of a run: run.json, metrics.jsonl and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sngm

from ..errors import BrokenRecord, UsageError
from ..files import finite, metrics_changed, metrics_digest, read_record, write_atomically, write_record
from ..tasks import Task
from . import checkpoint
from .config import RunConfig, completed
from .distributed import Processes
from .validation import check_record

FINISHED = ("finished", "diverged")


class NothingLeft(UsageError):
    """Neither the record nor a checkpoint of a run can be read."""


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "run.json"
        self.metrics = path / "metrics.jsonl"

    def open(self, config: RunConfig, restart: bool = False) -> dict[str, Any]:
        """Return the record of this run; {} if there is none, or a broken one that a checkpoint or `restart` replaces.

        Raises:
            UsageError: the folder belongs to another run; or its record is broken, no checkpoint can replace it, and
                `restart` is False.
        """
        if not self.file.exists():
            if (self.path / "study.json").exists():
                raise UsageError(f"{self.path} holds a study; name another folder with `out`")
            return {}
        try:
            record = self.read()
        except BrokenRecord as error:
            if checkpoint.whole(self.path):
                return {}  # the checkpoint holds the config to check
            if error.record is not None and isinstance(there := error.record.get("config"), dict):
                self._check_same("another run", completed(there), config.as_dict())
            if not restart:
                raise NothingLeft(
                    f"{self.file} is broken, or was changed since written, and no checkpoint is left to make it from; "
                    "train again with `restart`, or name another folder with `out`"
                ) from None
            return {}
        self._check_same("another run", completed(record["config"]), config.as_dict())
        return record

    def check_exists(self) -> None:
        """Raise UsageError if this is not the folder of a run."""
        if not self.file.exists():
            study = f"; it holds a study, whose runs are in {self.path / 'runs'}"
            is_study = (self.path / "study.json").exists()
            raise UsageError(f"{self.path} holds no run (no run.json){study if is_study else ''}")

    def check_checkpoint(self, state: dict[str, Any], record: dict[str, Any], config: RunConfig) -> None:
        """Raise UsageError if a checkpoint belongs to another run.

        Checkpoints of older versions hold no config; in this case the config of `record` is compared.
        """
        there = state.get("config", record.get("config"))
        if there is None:
            raise UsageError(
                f"{self.path} holds checkpoints of an older version and no readable run.json that says which run "
                "they belong to; name another folder with `out`"
            )
        self._check_same("another run", completed(there), config.as_dict())

    def check_data(self, record: dict[str, Any], data: dict[str, Any]) -> None:
        """Raise UsageError if `record`, a record or checkpoint, was made with data that differ from `data`.

        Records of older versions, which do not describe their data, are not checked.
        """
        self._check_same("a run on other data", record.get("data", data), data)

    def _check_same(self, what: str, there: dict[str, Any], here: dict[str, Any]) -> None:
        if lines := differences(there, here):
            raise UsageError(
                f"{self.path} holds {what}; name another folder with `out`. They differ in\n  " + "\n  ".join(lines)
            )

    def read(self) -> dict[str, Any]:
        record = read_record(self.file)
        check_record(record, self.file)
        return record

    def write(self, record: dict[str, Any]) -> None:
        write_record(self.file, record)

    def discard(self) -> None:
        """Delete record, metrics, checkpoints, and the files of TensorBoard and MLflow."""
        checkpoint.discard(self.path)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        for path in (self.path / "mlflow_run", self.metrics, self.file):
            path.unlink(missing_ok=True)

    def append(self, metrics: dict[str, Any]) -> None:
        """Append the metrics of an epoch to metrics.jsonl, as one line."""
        with open(self.metrics, "a") as file:
            file.write(_lines([metrics]).decode())
            file.flush()

    def close(self, record: dict[str, Any], history: list[dict[str, Any]]) -> None:
        """Write the record of a run that has ended. If metrics.jsonl differs from `history`, write it again."""
        digest = hashlib.sha256(_lines(history)).hexdigest()
        if digest != metrics_digest(self.path):
            self.rewrite(history)
        record["metrics_digest"] = digest
        self.write(record)

    def repair_metrics(self, record: dict[str, Any], state: dict[str, Any] | None) -> None:
        """If metrics.jsonl of a finished run was lost or changed, write it again from the checkpoint, or warn."""
        if self.metrics.exists() and not metrics_changed(self.path, record):
            return
        history = state["run"]["history"] if state else []
        made = hashlib.sha256(_lines(history)).hexdigest()
        if state and record.get("metrics_digest", made) == made:
            with contextlib.suppress(OSError):  # a read-only folder
                self.rewrite(history)
        else:
            warnings.warn(f"{self.metrics} was lost, or changed after it was written", stacklevel=2)

    def rewrite(self, history: list[dict[str, Any]]) -> None:
        """Replace metrics.jsonl by the metrics in `history`, one line per epoch."""
        write_atomically(self.metrics, _lines(history))


def _lines(history: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(finite(metrics), allow_nan=False) + "\n" for metrics in history).encode()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Return one line of text for each field that differs between two dicts.

    >>> differences({"lr": 0.1, "batch": 32, "settings": {"a": 1}}, {"lr": 0.2, "batch": 32, "settings": {}})
    ['lr: 0.1 there, 0.2 here', 'settings.a: 1 there, not set here']
    """
    lines = []
    for key in dict.fromkeys([*old, *new]):
        a, b = (d.get(key, "not set") for d in (old, new))
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a} there, {b} here")
    return lines


def describe(
    config: RunConfig, model: nn.Module, processes: Processes, data: dict[str, Any], task: Task
) -> dict[str, Any]:
    """Return the record that a run has at its start."""
    return {
        "format": 1,
        "status": "running",
        "config": config.as_dict(),
        "label": config.label,
        "hash": config.hash,
        "parameters": sum(p.numel() for p in model.parameters()),
        "processes": processes.ranks,
        "data": data,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "result": {},
        "timing": {},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(processes.device),
    }


RESUMED = ("started", "commit", "hardware", "versions", "made_before")  # fields that `resumed_fields` reads


def resumed_fields(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a resumed run keeps from `before`: start time, and earlier commits, hardware, versions."""
    kept = {"started": before["started"]} if "started" in before else {}
    made = {key: before.get(key) for key in ("commit", "hardware", "versions")}
    others = before.get("made_before", []) + ([made] if any(made[key] != now[key] for key in made) else [])
    return {**kept, "made_before": others} if others else kept


def final(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run: the metrics of an epoch without its number, step and learning rate."""
    return {k: finite(v) for k, v in metrics.items() if k not in ("epoch", "step", "lr")}


def provenance(device: torch.device) -> dict[str, Any]:
    """Return the fields of a record that say how it was made: versions, hardware, commit and command."""
    return {
        "versions": {"sngm": sngm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "hardware": {
            "device": device.type,
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        },
        "commit": commit(),
        "command": os.environ.get("SNGM_COMMAND") or command(),
    }


def command() -> str:
    """Return the command line of this process, quoted for a shell."""
    import shlex

    name = Path(sys.argv[0]).name
    program = ["sngm"] if name in ("sngm", "__main__.py") else ["python", name] if name.endswith(".py") else [name]
    return shlex.join([*program, *sys.argv[1:]])


@functools.cache
def cpu_name() -> str:
    """Return the model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if named:
            return named[0]
        output = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
        return next(line.partition(":")[2].strip() for line in output.splitlines() if line.startswith("Model name"))
    except (OSError, subprocess.CalledProcessError, StopIteration):
        return platform.processor() or platform.machine()


@functools.cache
def commit() -> str | None:
    """Return the commit of this code, from SNGM_COMMIT or git, or None; "+" marks uncommitted changes."""
    given = os.environ.get("SNGM_COMMIT")
    if given:
        return given
    here = Path(__file__).parent.parent  # the folder of the package

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        if not git("ls-files", __file__):  # the package is installed inside another repository
            return None
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
