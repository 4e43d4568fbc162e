"""What makes a run the run it is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import tasks
from ..errors import UsageError
from ..optim import registry
from ..spec import format_call
from ..tasks import Schedule, Task
from .batch import BatchPlan

PARTS = ("full", "select")
RUNNING_STATS = ("first", "mean")
PRECISIONS = ("float32", "float64")
INNER = 1 / 16  # of lr, EXTRAP-SGD's inner rate: the middle of 1/64 to 1/4, the range worth trying


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One training, resolved: two runs with equal configs give the same numbers on the same machine.

    Attributes:
        task, task_settings, task_source: what is trained; a checksum of the user's own file.
        method, method_settings: the optimizer.
        part: "full" trains on the whole training set and tests; "select" holds out a validation part and scores that.
        running_stats: whose BatchNorm statistics a model keeps: of the "first" worker, as DDP does, or their "mean".
        The others are named as on the command line.
    """

    task: str
    method: str
    lr: float
    batch: int
    epochs: int
    seed: int = 0
    part: str = "full"
    workers: int = 1
    micro: int | None = None
    bn_group: int | None = None
    running_stats: str = "first"
    schedule: str = "cosine"
    warmup: float = 0.0
    clip: float | None = None
    precision: str = "float32"
    method_settings: dict[str, Any] = field(default_factory=dict)
    task_settings: dict[str, Any] = field(default_factory=dict)
    task_source: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lr, bool) or not isinstance(self.lr, (int, float)) or not 0 < self.lr < math.inf:
            raise UsageError(f"lr must be a positive number, got {self.lr!r}")
        for name, least in (("batch", 1), ("epochs", 1), ("seed", 0), ("workers", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
        for name, allowed in (("part", PARTS), ("running_stats", RUNNING_STATS), ("precision", PRECISIONS)):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise UsageError(f"clip must be a positive number, got {self.clip!r}")
        if self.warmup > self.epochs:
            raise UsageError(f"warmup={self.warmup:g} is longer than the run's {self.epochs} epochs")
        Schedule(self.schedule, self.warmup)

    @property
    def hash(self) -> str:
        """Short, and the same for the same settings in any order."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """What to call the method: its name, with the settings that differ from the task's usual ones."""
        usual = {"weight_decay": tasks.find(self.task).weight_decay, "inner_lr": self.lr * INNER}
        special = {k: v for k, v in self.method_settings.items() if usual.get(k) != v}
        return format_call(self.method, special)

    def as_dict(self) -> dict[str, Any]:
        """As JSON would give it back."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """The inverse of :meth:`as_dict`; lists become the tuples that settings such as betas are."""
        missing = {f.name for f in dataclasses.fields(cls)} ^ values.keys()
        if missing:
            raise UsageError(f"not the config of a run of this version: {', '.join(sorted(missing))} differ")
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in values["method_settings"].items()}
        return cls(**{**values, "method_settings": settings})

    def check_source(self) -> None:
        """Refuse to go on with a task that is not the one this run began with."""
        now = tasks.source_of(self.task)
        if now != self.task_source:
            raise UsageError(f"{self.task} was edited since this run began; undo that, or begin another run")

    def build_task(self, data_dir: Path | None = None) -> Task:
        return tasks.build(self.task, self.task_settings, data_dir)


def resolve(
    task: str,
    method: str,
    *,
    method_settings: dict[str, Any] | None = None,
    task_settings: dict[str, Any] | None = None,
    **given: Any,
) -> RunConfig:
    """The config that follows from what the user said and the task's defaults. None means: not said."""
    cls = tasks.find(task)
    settings = {k: v for k, v in given.items() if v is not None}
    task = tasks.canonical(task)
    settings["task_source"] = tasks.source_of(task)
    settings.setdefault("epochs", cls.epochs)
    settings.setdefault("batch", cls.batches[0])
    settings.setdefault("schedule", cls.schedule)
    chosen = dict(method_settings or {})
    known = method_settings_of(method)
    if "weight_decay" in known:
        chosen.setdefault("weight_decay", cls.weight_decay)
    if method == "extrap-sgd" and "lr" in settings:
        chosen.setdefault("inner_lr", settings["lr"] * INNER)
    plan = BatchPlan.of(settings["batch"], settings.get("workers"), settings.get("micro"), settings.get("bn_group"))
    settings |= {"workers": plan.workers, "micro": plan.micro, "bn_group": plan.bn_group}
    return RunConfig(
        task=task, method=method, method_settings=chosen, task_settings=dict(task_settings or {}), **settings
    )


def method_settings_of(method: str) -> list[str]:
    """The settings a method has, besides lr."""
    try:
        return [name for name in registry.settings_of(method) if name != "lr"]
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
