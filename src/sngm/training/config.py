"""The config of a run, and how it follows from arguments and the defaults of a task."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import torch

from .. import tasks
from ..errors import UsageError
from ..optim import registry
from ..options import misfit, short
from ..parsing import format_call
from ..tasks import Schedule, Task
from .batch_plan import MOST_SAMPLES, BatchPlan

CHOICES = {
    "part": ("full", "select"),
    "running_stats": ("first", "mean"),
    "precision": ("float32", "float64", "bfloat16"),
    "decay_on": ("weights", "all"),
    "bias_lr": ("scaled", "full"),
    "last_batch": ("drop", "keep"),
}
ADDED_LATER = {
    "decay_on": "weights",
    "bias_lr": "scaled",
    "method_source": None,
    "ema": None,
    "bn_samples": None,
    "label_smoothing": 0.0,
    "last_batch": "drop",
}  # fields that older records lack, with values that give the former behaviour
RANGES = {"batch": (1, MOST_SAMPLES), "epochs": (1, 10**9), "seed": (0, 2**64 - 1), "workers": (1, MOST_SAMPLES)}
BN_SAMPLES = 10_000  # default number of samples on which BatchNorm statistics of averaged weights are estimated
INNER_LR = 1 / 8  # default ratio of EXTRAP-SGD's inner_lr to lr: lr scaled to the batch of one worker of eight


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Complete config of one run: all settings that determine what it computes, but not how it is executed.

    Attributes:
        task, task_settings, task_source: the task, its settings, and a checksum of its code if it is the user's own.
        method, method_settings, method_source: the optimizer, its settings, and a checksum of its code if it is the
            user's own.
        part: "full" trains on the whole training set and scores the test set. "select" scores a validation set, which
            is held out of the training set if the task has none.
        running_stats: keep BatchNorm's running statistics of the "first" worker, as DDP does, or their "mean" over all
            workers.
        precision: dtype of weights and arithmetic. "bfloat16" is autocast: convolutions and matrix products are in
            bfloat16; weights and optimizer state are in float32, and gradient norms are computed in float32 or better.
        decay_on: apply weight decay to "weights" (not to biases and normalisation layers) or to "all" parameters.
        bias_lr: learning rate of biases and normalisation layers with LARS and CLARS: "scaled" for
            ``trust_coefficient * lr``, or "full" for ``lr``, as in the LARS code that the SNGM paper compared with.
        The other fields are the options of the same name on the command line.
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
    decay_on: str = "weights"
    bias_lr: str = "scaled"
    ema: float | None = None
    bn_samples: int | None = None
    label_smoothing: float = 0.0
    last_batch: str = "drop"
    method_settings: dict[str, Any] = field(default_factory=dict)
    task_settings: dict[str, Any] = field(default_factory=dict)
    task_source: str | None = None
    method_source: str | None = None

    def __post_init__(self) -> None:
        for name, kind in _field_types().items():  # an int is a valid float, a bool is not
            if wanted := misfit(getattr(self, name), kind):
                raise UsageError(f"`{name}` must be {wanted}, got {short(getattr(self, name))}")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"`lr` must be a finite number > 0, got {self.lr!r}")
        for name, (least, most) in RANGES.items():
            if (value := getattr(self, name)) < least:
                raise UsageError(f"`{name}` must be a whole number >= {least}, got {value!r}")
            if value > most:
                raise UsageError(f"`{name}` must be at most {most:,}, got {short(value)}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        largest = torch.finfo(self.dtype).max  # torch's optimizers fail for larger numbers
        for name, value in {"lr": self.lr, **self.method_settings}.items():
            for number in value if isinstance(value, (tuple, list)) else (value,):
                shown = "`lr`" if name == "lr" else f"setting {name}"
                if isinstance(number, int) and abs(number) >= 2**63:  # too large for torch's integers
                    raise UsageError(f"{shown} must be below 2**63, or written as a float, got {short(number)}")
                if isinstance(number, float) and largest < abs(number) < math.inf:
                    limit = f"at most {largest:.2g}, the largest number of {self.precision}"
                    raise UsageError(f"{shown} must be {limit}, got {short(number)}")
        for name, value in {**self.method_settings, **self.task_settings}.items():
            try:
                json.dumps(value, allow_nan=False)
            except ValueError:  # JSON would store null, so that different configs look the same
                raise UsageError(f"setting {name} must be finite, got {short(value)}") from None
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise UsageError(f"`clip` must be a finite number > 0, got {self.clip!r}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"`ema` must be above 0 and below 1, got {self.ema!r}")
        if self.bn_samples is not None and self.bn_samples < 0:
            raise UsageError(f"`bn_samples` must be a whole number >= 0, got {self.bn_samples!r}")
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"`label_smoothing` must be at least 0 and below 1, got {self.label_smoothing!r}")
        if self.warmup > self.epochs:
            raise UsageError(f"`warmup` must be at most `epochs`={self.epochs}, got {self.warmup:g}")
        Schedule(self.schedule, self.warmup)

    @property
    def hash(self) -> str:
        """Short hash of the config. It ignores the order of settings, and fields with their `ADDED_LATER` value."""
        values = {k: v for k, v in self.as_dict().items() if k not in ADDED_LATER or v != ADDED_LATER[k]}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and inputs."""
        return torch.float64 if self.precision == "float64" else torch.float32

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that autocasts to bfloat16 if that is the precision, else one that does nothing."""
        if self.precision != "bfloat16":
            return contextlib.nullcontext()
        if device.type == "cpu":  # a CPU without bfloat16 warns, but computes correctly
            warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        # no cache, because a CUDA graph would reuse casts of weights from before the last update
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    @property
    def label(self) -> str:
        """The name of the method, with the settings that differ from the task's defaults, in alphabetical order."""
        usual = {
            "weight_decay": registry.usual_decay(self.method, tasks.find(self.task).usual(self.batch)["weight_decay"]),
            "inner_lr": self.lr * INNER_LR,
        }
        special = {k: v for k, v in sorted(self.method_settings.items()) if usual.get(k) != v}
        return format_call(self.method, special)

    @property
    def task_in_words(self) -> str:
        """The task with its settings, for messages."""
        return format_call(f"task {self.task}", self.task_settings)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """Build a config from the result of :meth:`as_dict` or an older record. Lists, such as betas, become tuples."""
        values = completed(values)
        missing = {f.name for f in dataclasses.fields(cls)} ^ values.keys()
        if missing:
            raise UsageError(f"not the config of a run of this version: {', '.join(sorted(missing))} differ")
        settings = values["method_settings"]
        if isinstance(settings, dict):
            settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        return cls(**{**values, "method_settings": settings})

    def check_source(self) -> None:
        """Raise UsageError if the task's code has changed since this run began, or this process has no such task."""
        if not tasks.is_known(self.task):
            raise UsageError(
                f"task {self.task} was made in another process; make it again and pass it, as "
                "sngm.load_run(folder, task=task).model"
            )
        now = tasks.source_of(self.task, self.task_settings)
        if now != self.task_source:
            raise UsageError(
                f"{self.task} was edited since this run began; undo the edit, or start a new run in another folder"
            )

    def build_task(self, data_dir: Path | None = None) -> Task:
        task = tasks.build(self.task, self.task_settings, data_dir)
        if self.label_smoothing and not task.smooths_labels:
            own = "; use its setting smoothing" if "smoothing" in tasks.settings_of(self.task) else ""
            raise UsageError(f"`label_smoothing`: the loss of task {self.task} has none{own}")
        task.label_smoothing = self.label_smoothing
        return task


@functools.cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(RunConfig)


def completed(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values`, the config in a record, with defaults added for fields that older records lack."""
    return {**ADDED_LATER, **values}


def resolve(
    task: str,
    method: str,
    *,
    method_settings: dict[str, Any] | None = None,
    task_settings: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    processes: int = 1,
    **given: Any,
) -> RunConfig:
    """Return the config that follows from arguments and the task's defaults. An argument None stands for the default.

    Args:
        task, method: names of the task and the method.
        method_settings, task_settings: settings that differ from the defaults.
        device: the device of the run. On a GPU the default precision is the task's `precision_on_gpu`.
        processes: the number of processes. The task's default number of workers is rounded up to a multiple of it.
        given: fields of :class:`RunConfig`.
    """
    cls = tasks.find(task)
    settings = {k: v for k, v in given.items() if v is not None}
    task = tasks.canonical(task)
    settings["task_source"] = tasks.source_of(task, task_settings)
    settings.setdefault("batch", cls.batches[0])
    usual = cls.usual(settings["batch"])
    if not isinstance(usual, Mapping):
        raise UsageError(f"task {task}: usual() must return a dict, got {usual!r}")
    recipe = registry.METHODS[method].recipe if method in registry.METHODS else {}
    for name in ("epochs", "schedule", "decay_on", "bias_lr", "running_stats"):
        settings.setdefault(name, recipe.get(name, usual[name]))
    shortened = settings["epochs"] < usual["epochs"]  # then at most half of the run is warm-up
    settings.setdefault("warmup", min(usual["warmup"], settings["epochs"] / (2 if shortened else 1)))
    averaged = "ema" in settings or "bn_samples" in recipe
    settings.setdefault("bn_samples", recipe.get("bn_samples", BN_SAMPLES) if averaged else None)
    clip = usual["clip"]
    settings.setdefault("clip", clip.get(method) if isinstance(clip, Mapping) else clip)
    if settings["clip"] == math.inf:  # the user turns off clipping that the task has by default
        settings["clip"] = None
    settings.setdefault("precision", usual_precision(task, settings["batch"], device))
    chosen = dict(method_settings or {})
    known = method_settings_of(method)
    if "weight_decay" in known:
        chosen.setdefault("weight_decay", registry.usual_decay(method, usual["weight_decay"]))
    if method == "extrap-sgd" and "lr" in settings:
        chosen.setdefault("inner_lr", settings["lr"] * INNER_LR)
    settings |= _batch_plan(settings, usual, processes)
    return RunConfig(
        task=task,
        method=method,
        method_source=registry.source_of(method),
        method_settings=chosen,
        task_settings=dict(task_settings or {}),
        **settings,
    )


def _batch_plan(settings: dict[str, Any], usual: dict[str, Any], processes: int) -> dict[str, int]:
    """Return `workers`, `micro` and `bn_group` as given in `settings`, else defaults that divide the batch evenly."""
    batch, micro, bn_group = settings["batch"], settings.get("micro"), settings.get("bn_group")
    workers = settings.get("workers")
    if workers is None:
        workers = math.ceil(usual["workers"] / processes) * processes
        if batch % workers and processes == 1:
            below = batch // workers * workers
            raise UsageError(
                f"`batch`={batch} must be a multiple of the task's {workers} workers; set `workers`, "
                f"or use a batch of {f'{below} or ' if below else ''}{below + workers}"
            )
    if micro is None and bn_group is None and usual["micro"] is not None and workers > 0 and batch >= workers:
        micro = largest_divisor(batch // workers, usual["micro"])
    plan = BatchPlan.of(batch, workers, micro, bn_group)
    return {"workers": plan.workers, "micro": plan.micro, "bn_group": plan.bn_group}


def largest_divisor(value: int, most: int) -> int:
    """Return the largest divisor of `value` that is at most `most`.

    >>> largest_divisor(1024, 128), largest_divisor(100, 64)
    (128, 50)
    """
    return next(d for d in range(min(most, value), 0, -1) if value % d == 0)


def usual_precision(task: str, batch: int, device: torch.device | str | None) -> str:
    """Return the default precision of a task on a device."""
    on_gpu = device is not None and torch.device(device).type == "cuda"
    return str(tasks.find(task).usual(batch)["precision_on_gpu"]) if on_gpu else "float32"


def method_settings_of(method: str) -> list[str]:
    """Return the names of the settings of a method, without lr."""
    try:
        return [name for name in registry.settings_of(method) if name != "lr"]
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
