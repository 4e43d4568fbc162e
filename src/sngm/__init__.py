"""sngm: train with large batches in PyTorch without losing accuracy."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# import name and package name of each package of the extra sngm[train], except those that torch installs too
_TRAIN = {"matplotlib": "matplotlib", "rich": "rich", "sklearn": "scikit-learn", "scipy": "scipy", "typer": "typer"}


def _missing_packages() -> list[str]:
    """Return the packages of the extra sngm[train] that are not installed."""
    return [package for module, package in _TRAIN.items() if find_spec(module) is None]


__all__ = [
    "CLARS", "LAMB", "LARS", "NSGDM", "SNGM", "ExtrapSGD", "Run", "SpectralSNGM", "Study", "Task", "check",
    "integrations", "load", "load_run", "optim", "register",
]  # fmt: skip
if not _missing_packages():  # else `from sngm import *` would raise ImportError
    __all__ += ["advise", "advise_model", "compare", "load_study", "probe", "train"]

if TYPE_CHECKING:
    from . import integrations, optim
    from .advising import advise, advise_model
    from .api import compare, load_run, load_study, train
    from .checkup import check
    from .measure import probe
    from .optim import CLARS, LAMB, LARS, NSGDM, SNGM, ExtrapSGD, SpectralSNGM
    from .optim.registry import register
    from .results import Run, Study
    from .tasks import Task
    from .training import load_model as load

# The module that defines each name. A module is imported when one of its names is first used, so that the optimizers
# need only torch and --help answers at once.
_HOMES = {
    ".optim": ("CLARS", "LAMB", "LARS", "NSGDM", "SNGM", "ExtrapSGD", "SpectralSNGM"),
    ".optim.registry": ("register",),
    ".tasks": ("Task",),
    ".api": ("compare", "load_run", "load_study", "train"),
    ".results": ("Run", "Study"),
    ".advising": ("advise", "advise_model"),
    ".checkup": ("check",),
    ".measure": ("probe",),
}


def __getattr__(name: str) -> Any:
    if name in ("integrations", "optim"):
        return importlib.import_module(f".{name}", __name__)
    if name == "load":  # kept for older code; load_run(...).model replaces it
        return importlib.import_module(".training", __name__).load_model
    for home, names in _HOMES.items():
        if name in names:
            if name not in __all__ and (packages := _missing_packages()):
                raise ImportError(f"sngm.{name} needs {', '.join(packages)}: run pip install 'sngm[train]'")
            value = globals()[name] = getattr(importlib.import_module(home, __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
