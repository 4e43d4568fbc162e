"""Registry of tasks: built-in tasks by name, and the user's own classes."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..errors import UsageError
from ..optim import registry
from ..optim.digest import digest_of
from ..optim.external import canonical, checksum_of, is_module_name, load_file
from ..optim.registry import importable, nearest
from ..options import plain
from ..parsing import value_of
from .base import Batch, Samples, Splits, Task, Tensors
from .schedules import Moment, Schedule

__all__ = [
    "Batch",
    "Moment",
    "Samples",
    "Schedule",
    "Splits",
    "Task",
    "Tensors",
    "build",
    "canonical",
    "name_of",
    "names",
    "settings_of",
    "source_of",
]

TASKS = {
    "cifar10-convnet": "sngm.tasks.cifar:Cifar10ConvNet",
    "cifar10-resnet20": "sngm.tasks.cifar:Cifar10ResNet20",
    "cifar10-vit": "sngm.tasks.vit:Cifar10ViT",
    "cifar100-vit": "sngm.tasks.vit:Cifar100ViT",
    "criteo-deepfm": "sngm.tasks.criteo:CriteoDeepFM",
    "digits": "sngm.tasks.digits:Digits",
    "imagenet-resnet50": "sngm.tasks.imagenet:ImageNetResNet50",
    "tiny-imagenet-resnet50": "sngm.tasks.tiny_imagenet:TinyImageNetResNet50",
    "tiny-imagenet-vit": "sngm.tasks.tiny_imagenet:TinyImageNetViT",
    "wikitext2-gpt": "sngm.tasks.gpt:WikiText2GPT",
    "wikitext2-lstm": "sngm.tasks.wikitext:WikiText2LSTM",
}


# Tasks that worker processes cannot import: classes defined in a notebook, and instances that hold datasets.
LOCAL: dict[str, type[Task] | Task] = {}


def name_of(task: str | type[Task] | Task) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a task given by name, as a class or as an instance.

    A task that cannot be imported by its name is stored in `LOCAL`.
    """
    if isinstance(task, str):
        return task, {}
    cls = _class_of(task)
    if not issubclass(cls, Task):
        raise TypeError(f"task must be a name, a subclass of sngm.Task or an instance of one, got {task!r}")
    name = f"{cls.__module__}:{cls.__qualname__}"
    settings = {} if isinstance(task, type) else task.settings()
    if "parts" in vars(task) or value_of(repr(settings)) != settings:
        name, settings = f"{cls.__name__}-{source_digest(cast(Task, task))[:8]}", {}
        LOCAL[name] = task
    elif importable(cls):
        name = next((known for known, where in TASKS.items() if where == name), name)
    else:
        LOCAL[name] = cls
    _check_defaults(name, cls)
    return name, settings


def source_digest(task: Task) -> str:
    """Return a checksum of the code, settings and model architecture of a task without a file (as in a notebook)."""
    with torch.random.fork_rng(devices=[]):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"the function that builds the model must return a torch.nn.Module, got {model!r}")
    return digest_of(*task.sources(), [type(module) for module in model.modules()], repr(model), task.settings())


@functools.cache
def _class_digest(cls: Any, settings: str) -> str:
    return source_digest(cls(**value_of(settings)))


def names() -> list[str]:
    """Return the names of the built-in tasks."""
    return sorted(TASKS)


def build(name: str, settings: dict[str, Any] | None = None, data_dir: Path | None = None) -> Task:
    """Build a task by name; the user's own tasks are named ``file.py:Class`` or ``package.module:Class``.

    If the name is that of an instance in a file, return this instance; with settings, build a new one of its class.

    >>> build("digits", {"width": 8}).settings()
    {'width': 8}
    """
    found = _load(name)
    if isinstance(found, Task) and not settings:
        if data_dir is None or data_dir == found.data_dir:
            return found
        task = copy.copy(found)  # so that the user's instance is not changed
        task.data_dir = data_dir
        return task
    cls = _class_of(found)
    parameters = inspect.signature(cls).parameters
    chosen = dict(settings or {})
    for key, value in chosen.items():
        if key not in parameters:
            known = ", ".join(parameters) or "none"
            raise UsageError(f"task {name} has no setting {key!r}; it has {known}")
        default = parameters[key].default
        if isinstance(value, (list, tuple)):  # a record in JSON holds tuples as lists
            chosen[key] = value = list(value) if isinstance(default, list) else tuple(value)
        if default is not parameters[key].empty and default is not None and not _fits(value, default):
            wanted = type(default).__name__
            raise UsageError(f"task {name}: {key} must be of type {wanted}, got {value!r}")
    if isinstance(found, Task):
        chosen = {**found.settings(), **chosen}
    try:
        task = cls(**chosen)
    except (TypeError, ValueError) as error:
        raise UsageError(f"task {name}: {error}") from error
    task.data_dir = data_dir
    return task


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, (int, float) if isinstance(default, float) else type(default))


def find(name: str) -> type[Task]:
    """Return the class of a task by name."""
    return _class_of(_load(name))


def _class_of(task: type[Task] | Task) -> type[Task]:
    return task if isinstance(task, type) else type(task)


def _load(name: str) -> type[Task] | Task:
    """Return the class or the instance that a name stands for."""
    if name in LOCAL:
        return LOCAL[name]
    built_in = ":" not in name
    if built_in:
        if name not in TASKS:
            if name.endswith(".py"):
                raise UsageError(f"{name}: name the task in this file, a class or an instance, as {name}:Name")
            known = ", ".join(names())
            meant = nearest(name, names())
            raise UsageError(f"task must be one of {known}, or your own as 'file.py:Class', got {name!r}{meant}")
        name = TASKS[name]
    place, _, attribute = name.rpartition(":")
    in_file = place.endswith(".py")
    if not in_file and not is_module_name(place):
        raise UsageError(f"no task at {name[:80]!r}: write file.py:Class or package.module:Class")
    try:
        module = load_file(Path(place)) if in_file else importlib.import_module(place)
        found: Any = getattr(module, attribute, None)
    except (ImportError, AttributeError, OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"no task at {name!r}: {error}") from error
    except SystemExit as left:
        raise UsageError(f"no task at {name!r}: the file calls sys.exit({left.code!r}) when it is loaded") from left
    # an instance in a module is not allowed, because it would have no checksum
    if not issubclass(_class_of(found), Task) or (isinstance(found, Task) and not in_file):
        tasks = [k for k, v in vars(module).items() if issubclass(_class_of(v), Task) and v is not Task]
        own = ", ".join(tasks) or "none"
        raise UsageError(
            f"{name!r} must name a subclass of sngm.Task{' or an instance of one' * in_file}; {place} has {own}"
        )
    if not built_in:
        _check_defaults(name, _class_of(found))
    return cast("type[Task] | Task", found)


def _check_defaults(name: str, cls: type[Task]) -> None:
    """Raise UsageError if a default of a task is invalid; convert ranges and arrays in the defaults to tuples."""

    def several(value: Any, kind: type) -> bool:
        return isinstance(value, Collection) and len(value) > 0 and all(isinstance(one, kind) for one in value)

    rates = cls.lrs if isinstance(cls.lrs, Mapping) else {"": None}
    wrong = {
        "epochs": not isinstance(cls.epochs, Integral) and "must be a whole number",
        "batches": not several(cls.batches, Integral) and "must be a tuple of whole numbers",
        "usual_lrs": not several(cls.usual_lrs, Real) and "must be a tuple of learning rates",
        "holdout": not (isinstance(cls.holdout, Real) and 0 <= cls.holdout < 1) and "must be a number >= 0 and < 1",
        "lrs": not all(several(some, Real) for some in rates.values())
        and "must have a tuple of learning rates for each method it names",
    }
    for attribute, why in wrong.items():
        if why:
            raise UsageError(f"task {name}: {attribute} {why}, got {getattr(cls, attribute)!r}")
    for attribute in ("batches", "usual_lrs"):  # set only if changed: checksums of classes cover these
        if (listed := as_list(value := getattr(cls, attribute))) is not value:
            setattr(cls, attribute, listed)
    if not all(isinstance(some, (list, tuple)) for some in cls.lrs.values()):
        cls.lrs = {method: as_list(some) for method, some in cls.lrs.items()}


def as_list(numbers: Any) -> Any:
    """Return a range or array as a tuple of numbers for JSON; return a list or tuple of Python numbers as it is."""
    if isinstance(numbers, (list, tuple)) and all(type(number) in (int, float) for number in numbers):
        return numbers
    return tuple(plain(numbers))


def is_known(name: str) -> bool:
    """Return True if this process can find the task of this name."""
    place, _, attribute = name.rpartition(":")
    in_main = place == "__main__" and hasattr(sys.modules["__main__"], attribute)
    return name in LOCAL or name in TASKS or in_main or place not in ("", "__main__")


def is_same(name: str, other: str) -> bool:
    """Return whether two names stand for the same task, as file.py:Class and module:Class may."""
    if name == other or not is_known(other) or {name, other} <= LOCAL.keys():
        return name == other
    places = {
        (getattr(sys.modules.get(cls.__module__), "__file__", None), cls.__qualname__)
        for cls in map(find, (name, other))
    }
    return len(places) == 1


def settings_of(name: str) -> list[str]:
    """Return the names of the settings of a task."""
    return list(inspect.signature(find(name)).parameters)


def source_of(name: str, settings: dict[str, Any] | None = None) -> str | None:
    """Return a checksum of the user's own code, to distinguish runs of an edited task from earlier runs.

    The checksum of a file is computed when the file is loaded. Tasks of installed packages have no checksum.
    """
    if isinstance(LOCAL.get(name), Task):
        return name.rpartition("-")[2]
    if name in LOCAL or name.startswith("__main__:"):
        cls: Any = find(name)
        return _class_digest(cls, repr(settings or {}))
    return checksum_of(name)


def rates_of(task: str, method: str) -> tuple[float, ...]:
    """Return the learning rates to try: the task's `lrs` of the method, or `usual_lrs` times the method's `lr_scale`.

    >>> rates_of("digits", "sngm"), rates_of("digits", "schedule-free")
    ((0.03, 0.1, 0.3, 1.0), (0.001, 0.003, 0.01, 0.03))
    """
    cls = find(task)
    if method in cls.lrs:
        return tuple(cls.lrs[method])
    known = registry.METHODS.get(method)
    return tuple(float(f"{lr * (known.lr_scale if known else 1.0):.3g}") for lr in cls.usual_lrs)


def middle_rate(task: str, method: str) -> float:
    """Return the middle one of the learning rates to try for a task and a method, or the larger of two middle ones."""
    grid = rates_of(task, method)
    return float(sorted(grid)[len(grid) // 2])
