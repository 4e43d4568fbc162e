"""The options of a run, as dataclasses.

The arguments of the Python functions and the flags of the command line are generated from these dataclasses. No module
imported here imports torch, so ``sngm --help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .errors import UsageError

DATA_DIR = "Dataset folder. Default: $SNGM_DATA, else .data or ~/.cache/sngm."
EXECUTORS = ("local", "ray", "slurm")
STEPS = ("auto", "eager", "compiled", "captured", "compiled+captured")


def option(help: str, default: Any = None, **more: Any) -> Any:
    """Declare a field with its help text; `more` is passed to ``typer.Option`` on the command line."""
    return dataclasses.field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options that decide what one run computes; None stands for the task's default."""

    lr: float | None = option("Learning rate. Default: the middle one of the task's learning rates.")
    batch: int | None = option("Global batch, over all workers. Default: the first of the task's batches.")
    seed: int = option("Seed of initial weights, sample order, augmentation and dropout.", 0)
    part: str = option(
        "full: train on the whole training set and score the test set. select: score a validation set, and do not use "
        "the test set; if the task has no validation set, a part of the training set is held out.",
        "full",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """Options that all runs of a study have in common; None stands for the task's default."""

    epochs: int | None = option("Passes over the training set. Default: the task's; for probe, 1.")
    workers: int | None = option("Data-parallel workers; more than one per process are simulated. Default: the task's.")
    micro: int | None = option(
        "Samples per micro-batch. Default: the task's, else the worker's whole part of the batch."
    )
    bn_group: int | None = option("Samples that BatchNorm normalises together. Default: the micro-batch.")
    last_batch: str | None = option(
        "What an epoch does with the samples that fill no whole batch: 'drop' them, or 'keep' those that fill "
        "micro-batches of every worker, as a smaller last batch. Default: drop."
    )
    running_stats: str | None = option(
        "BatchNorm running statistics: of the first worker, as in DDP ('first'), or averaged over workers ('mean'). "
        "Default: the task's."
    )
    schedule: str | None = option(
        "Learning rate schedule: constant, cosine, linear, polynomial(power=2) or plateau(factor=4,patience=0). "
        "Default: the task's."
    )
    warmup: float | None = option("Epochs of linear learning rate warm-up. Default: the task's.")
    clip: float | None = option(
        "Clip the gradient norm to this value; inf turns off the task's clipping. Default: the task's."
    )
    decay_on: str | None = option(
        "Apply weight decay to 'weights' (not to biases and norm layers) or to 'all' parameters. Default: the task's."
    )
    bias_lr: str | None = option(
        "Learning rate of biases and norm layers with LARS and CLARS: 'scaled' (trust_coefficient * lr) or 'full' "
        "(lr). Default: the task's."
    )
    ema: float | None = option(
        "Score an exponential moving average of the weights, which keeps this share (> 0 and < 1) of itself in each "
        "step, such as 0.99. BatchNorm statistics are then estimated again (`bn_samples`). Default: off."
    )
    bn_samples: int | None = option(
        "Before each test, estimate BatchNorm statistics again on about this many training samples (whole BatchNorm "
        "groups, at most one epoch). Default: off; 10000 with `ema` and with schedule-free."
    )
    label_smoothing: float | None = option("Label smoothing of cross-entropy, >= 0 and < 1. Default: 0.")
    precision: str | None = option(
        "float32, float64 or bfloat16 (autocast). Default: the task's on a GPU, float32 on a CPU."
    )

    def given(self) -> dict[str, Any]:
        """Return the options that were set."""
        return {name: value for name, value in as_dict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Options that decide how runs are executed, not what they compute. (Device and threads change the last digits.)"""

    data_dir: Path | None = option(DATA_DIR, envvar="SNGM_DATA", show_envvar=False)
    device: str | None = option("cpu, cuda or cuda:1. Default: the GPU if there is one.")
    deterministic: bool = option("Bit-identical reruns on a GPU, slower.", False)
    step: str = option(
        "How a step is executed: eager, compiled (torch.compile), captured (CUDA graph) or compiled+captured. auto: "
        "the task's choice on a GPU, eager on a CPU.",
        "auto",
    )
    loaders: int | None = option("Data-loading processes, like num_workers of a DataLoader. Default: the task's.")
    pass_size: int | None = option("Maximum samples per forward pass. Default: the task's.")
    shard: bool = option(
        "Under torchrun: shard the model over the processes with FSDP2, for models too large for one.", False
    )
    hang_timeout: float = option(
        "Under torchrun: end the job when a process makes no progress for this many seconds while others wait for it.",
        1800.0,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.hang_timeout, (int, float)) or not 0 < self.hang_timeout < math.inf:
            raise UsageError(f"`hang_timeout` must be a number of seconds > 0, got {self.hang_timeout!r}")
        if self.step not in STEPS:
            raise UsageError(f"`step` must be one of {', '.join(STEPS)}, got {self.step!r}")
        for name, least in (("loaders", 0), ("pass_size", 1)):
            if (value := getattr(self, name)) is not None and not at_least(value, least):
                raise UsageError(f"`{name}` must be a whole number >= {least}, got {value!r}")


E = TypeVar("E", bound=Execution)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where the runs of a study are executed."""

    executor: str = option("local (processes of this machine), ray or slurm. See docs/clusters.md.", "local")
    cpus: int = option("CPU cores of each run on Ray or SLURM.", 1)
    gpus: float = option(
        "GPUs of each run on Ray or SLURM; 0 for runs on the CPU. On Ray, 0.25 lets four share one.", 0
    )
    ray_address: str | None = option("Address of the Ray cluster. Default: $RAY_ADDRESS, else one on this machine.")
    slurm_partition: str | None = option("SLURM partition. Default: the cluster's.")
    slurm_time: int = option("Time limit of a SLURM job in minutes; a run that needs longer is requeued.", 60)
    slurm_options: str = option("Other options of sbatch, separated by commas: account=physics,mem=16G.", "")

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise UsageError(f"`executor` must be one of {', '.join(EXECUTORS)}, got {self.executor!r}")
        for name in ("cpus", "slurm_time"):
            if not at_least(value := getattr(self, name), 1):
                raise UsageError(f"`{name}` must be a whole number >= 1, got {value!r}")
        if not isinstance(self.gpus, (int, float)) or not 0 <= self.gpus < math.inf:
            raise UsageError(f"`gpus` must be a number >= 0, got {self.gpus!r}")
        self.sbatch_options()
        for field in dataclasses.fields(self)[1:]:  # without `executor`
            prefix = field.name.partition("_")[0]
            needed = [prefix] if prefix in EXECUTORS else ["ray", "slurm"]
            if self.executor not in needed and getattr(self, field.name) != field.default:
                add = f"add `executor` {' or '.join(needed)}"
                raise UsageError(f"`{field.name}` is for runs on a cluster; {add}, or leave it out")

    @property
    def remote(self) -> bool:
        """Whether runs are executed by a cluster."""
        return self.executor != "local"

    def sbatch_options(self) -> dict[str, str]:
        """Return `slurm_options` as a dict from name to value."""
        pairs = [part.partition("=") for part in self.slurm_options.split(",") if part]
        for name, _, value in pairs:
            if not name.strip() or not value.strip():
                raise UsageError(f"`slurm_options` must be name=value, separated by commas, got {self.slurm_options!r}")
        return {name.strip().removeprefix("--"): value.strip() for name, _, value in pairs}

    def there(self, execution: E) -> E:
        """Return the execution options for runs on the cluster. If no device is set, `gpus` decides it."""
        if not self.remote or execution.device is not None:
            return execution
        return dataclasses.replace(execution, device="cuda" if self.gpus else "cpu")

    def here(self, execution: E) -> E:
        """Return the options to check a run on this machine. If a cluster will execute it, the device is the CPU."""
        return dataclasses.replace(execution, device="cpu", step="auto") if self.remote else execution


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """Options that decide at which steps, and how precisely, a task is measured."""

    points: int = option("Number of points of the pilot run to measure: its start, its end, and evenly between.", 5)
    steps: int | None = option("End the pilot run after this many steps.")
    lambdas: tuple[float, ...] = option(
        "Values of lambda for L(lambda), separated by commas.", (0.0, 0.1, 1.0, 10.0, 100.0)
    )
    samples: int = option("Training samples that each point is measured on.", 256)
    iterations: int = option("Maximum Hessian-vector products per point.", 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOptions:
    """A budget of gradients; for advice without a task, also the constants of the problem."""

    gradients: float | None = option(
        "Budget in per-sample gradients: epochs * samples. For text, a sample is a window of bptt words: epochs * "
        "steps per epoch * batch."
    )
    gap: float | None = option("Initial loss minus minimal loss.")
    L: float | None = option("Smoothness constant: the largest absolute eigenvalue of the Hessian.")
    sigma: float | None = option("Standard deviation of a per-sample gradient.")
    beta: float | None = option("Momentum. Default: 0.9.")
    lam: float | None = option("lambda of relaxed smoothness, L + lam |g|. Default: 0.")


WORDS = {
    str: "a string", int: "a whole number", float: "a number", bool: "True or False", Path: "a path",
    os.PathLike: "a path", dict: "a dict whose keys are strings", tuple: "a list of numbers", type(None): "None",
}  # fmt: skip


def misfit(value: Any, kind: Any) -> str:
    """If a value does not fit an annotation, return a text that says what it should be; else return "".

    Annotations that this function does not support count as fitting.

    >>> misfit("32", int | None), misfit(1, float), misfit(None, int | None)
    ('a whole number or None', '', '')
    """
    kinds, allowed = _kinds_of(kind)
    if not allowed:
        return ""
    fits = isinstance(value, allowed) and (bool in kinds or not isinstance(value, bool))
    if isinstance(value, dict):
        fits = fits and all(isinstance(key, str) for key in value)
    if isinstance(value, (list, tuple)):
        fits = fits and not any(misfit(one, float) for one in value)
    return "" if fits else " or ".join(WORDS[one] for one in kinds)


@functools.cache
def _kinds_of(kind: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the classes of an annotation, and all classes that fit it; both empty if the annotation is unsupported."""
    union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    kinds = [typing.get_origin(one) or one for one in (typing.get_args(kind) if union else (kind,))]
    if any(one not in WORDS for one in kinds):
        return [], ()
    also = {float: (int,), Path: (str, os.PathLike), tuple: (list,)}
    return kinds, (*kinds, *(more for one in kinds for more in also.get(one, ())))


def plain(value: Any) -> Any:
    """Return NumPy numbers, arrays and tensors as Python's numbers and lists, also in lists, tuples and mappings.

    >>> import numpy as np
    >>> plain({"lr": np.float32(0.1), "batches": (np.int64(32), 512)})
    {'lr': 0.1, 'batches': (32, 512)}
    """
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, range):
        return list(value)
    if not hasattr(value, "tolist") or not hasattr(value, "shape"):
        return value
    if value.shape:
        return [plain(one) for one in value]
    found = value.tolist()
    return float(str(found if hasattr(value, "layout") else value)) if isinstance(found, float) else found


def typed(name: str, value: Any, kind: Any) -> Any:
    """Return an argument with NumPy numbers converted to Python's; raise UsageError if it does not fit its type."""
    if type(value).__name__ == "device":  # a torch.device; torch is not imported here
        value = str(value)
    value = plain(value)
    if wanted := misfit(value, kind):
        raise UsageError(f"`{name}` must be {wanted.removesuffix(' or None')}, got {short(value)}")
    return Path(value) if isinstance(value, str) and Path in typing.get_args(kind) else value


def short(value: Any) -> str:
    """Return the repr of a value, truncated to 80 characters; a description if Python cannot print the value."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a value of type {type(value).__name__} that is too long to print"
    return text if len(text) <= 80 else f"{text[:77]}..."


def at_least(value: Any, least: int) -> bool:
    """Return whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def as_dict(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without copying their values."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as keyword parameters."""
    hints = typing.get_type_hints(group)
    return [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(group)
    ]


def takes(*groups: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a function the fields of dataclasses as keyword arguments.

    The decorated function receives one instance of each dataclass as a keyword argument named after its class in lower
    case, such as ``runoptions``. The signature and docstring that users see list the fields.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        names = {group: group.__name__.lower() for group in groups}
        kept = [p for p in inspect.signature(function).parameters.values() if p.name not in names.values()]
        fields = [parameter for group in groups for parameter in parameters_of(group)]
        kinds = {**typing.get_type_hints(function), **{field.name: field.annotation for field in fields}}

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            check_names(function.__name__, given, [p.name for p in (*kept, *fields)])
            given |= {name: typed(name, value, kinds.get(name)) for name, value in given.items() if value is not None}
            for group, name in names.items():
                own = {field.name: given.pop(field.name, None) for field in dataclasses.fields(group)}
                given[name] = group(**{key: value for key, value in own.items() if value is not None})
            return function(*args, **given)

        keywords = [p for p in kept if p.kind is p.KEYWORD_ONLY]
        first = [p for p in kept if p.kind is not p.KEYWORD_ONLY]
        call.__signature__ = inspect.Signature([*first, *fields, *keywords])  # type: ignore[attr-defined]
        lines = [f"    {f.name}: {f.metadata['help']}" for group in groups for f in dataclasses.fields(group)]
        del call.__wrapped__  # else documentation generators would show the signature and docstring of `function`
        call.__doc__ = (inspect.getdoc(function) or "").replace("    (options)", "\n".join(lines))
        return call

    return decorate


# names that other libraries use, and ours
USUAL = {
    "learning_rate": "lr", "batch_size": "batch", "optimizer": "method", "n_epochs": "epochs", "num_epochs": "epochs",
}  # fmt: skip


def check_names(function: str, given: Iterable[str], known: list[str]) -> None:
    """Raise TypeError for an unknown keyword argument; the message suggests the most similar known name."""
    for name in given:
        if name not in known:
            near = [USUAL[name]] if USUAL.get(name) in known else difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise TypeError(f"{function}() has no argument {name!r}{hint}; it has {', '.join(known)}")
