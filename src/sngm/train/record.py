"""What a run leaves behind: a folder with run.json, metrics.jsonl and checkpoints."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sngm

from ..errors import UsageError
from ..files import finite, read_json, write_atomically, write_json
from .config import RunConfig, completed
from .processes import Processes

FINISHED = ("finished", "diverged")


class RunFolder:
    """The folder of one run. `open` refuses a folder that belongs to another run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "run.json"
        self.metrics = path / "metrics.jsonl"

    def open(self, config: RunConfig) -> dict[str, Any]:
        """Find this run in the folder; return what run.json says ({} for a new run)."""
        if not self.file.exists():
            if (self.path / "study.json").exists():
                raise UsageError(f"{self.path} holds a study; name another folder with --out")
            return {}
        record = self.read()
        there = completed(record["config"])
        if there != config.as_dict():
            lines = differences(there, config.as_dict())
            raise UsageError(
                f"{self.path} holds another run; name another folder with --out or delete it. They differ in\n  "
                + "\n  ".join(lines)
            )
        return record

    def check_data(self, data: dict[str, Any]) -> None:
        """Refuse to go on, on other data than the run began with; records of older versions say nothing of it."""
        there = self.read().get("data", data) if self.file.exists() else data
        if lines := differences(there, data):
            raise UsageError(
                f"{self.path} holds a run on other data; name another folder with --out, or delete it. They differ:\n  "
                + "\n  ".join(lines)
            )

    def read(self) -> dict[str, Any]:
        record: dict[str, Any] = read_json(self.file)
        if not isinstance(record, dict) or record.get("format") != 1 or not isinstance(record.get("config"), dict):
            raise UsageError(f"{self.file} is not the record of a run, or of another version of sngm")
        return record

    def write(self, record: dict[str, Any]) -> None:
        write_json(self.file, record)

    def append(self, metrics: dict[str, Any]) -> None:
        """One line of metrics.jsonl, handed to the system before the next step."""
        with open(self.metrics, "a") as file:
            file.write(json.dumps(finite(metrics), allow_nan=False) + "\n")
            file.flush()

    def rewrite(self, history: list[dict[str, Any]]) -> None:
        """Cut metrics.jsonl back to what a checkpoint knows of."""
        lines = [json.dumps(finite(metrics), allow_nan=False) + "\n" for metrics in history]
        write_atomically(self.metrics, "".join(lines).encode())


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Field by field.

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
    config: RunConfig, model: nn.Module, processes: Processes, data: dict[str, Any], metric: str
) -> dict[str, Any]:
    """The record of a run that begins."""
    return {
        "format": 1,
        "status": "running",
        "config": config.as_dict(),
        "label": config.label,
        "hash": config.hash,
        "parameters": sum(p.numel() for p in model.parameters()),
        "processes": processes.ranks,
        "data": data,
        "metric": metric,
        "result": {},
        "timing": {},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(processes.device),
    }


def goes_on(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What the record of a run that goes on keeps of its beginning: when that was, and what else it was made with."""
    kept = {"started": before["started"]} if "started" in before else {}
    made = {key: before.get(key) for key in ("commit", "hardware", "versions")}
    others = before.get("made_before", []) + ([made] if any(made[key] != now[key] for key in made) else [])
    return {**kept, "made_before": others} if others else kept


def final(metrics: dict[str, Any]) -> dict[str, Any]:
    """What counts of an epoch's metrics: its scores, and nothing that depends on where or when it ran."""
    return {k: finite(v) for k, v in metrics.items() if k not in ("epoch", "step", "lr")}


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, hardware, commit and command."""
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
    """The command line that was given, as one would type it."""
    import shlex

    name = Path(sys.argv[0]).name
    return shlex.join(["sngm" if name in ("sngm", "__main__.py") else name, *sys.argv[1:]])


@functools.cache
def cpu_name() -> str:
    """What the processor calls itself."""
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
    """The commit of the code that runs, from SNGM_COMMIT or git; "+" says there were changes besides."""
    given = os.environ.get("SNGM_COMMIT")
    if given:
        return given
    here = Path(__file__).parent.parent  # the package: every part of it makes a run what it is

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        if not git("ls-files", __file__):  # installed inside somebody else's repository
            return None
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
