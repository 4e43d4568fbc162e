"""sngm: train with large batches in PyTorch without losing accuracy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["CLARS", "LAMB", "LARS", "SNGM", "ExtrapSGD", "Task", "load", "optim"]

if TYPE_CHECKING:
    from . import optim
    from .optim import CLARS, LAMB, LARS, SNGM, ExtrapSGD
    from .tasks import Task
    from .training import load

# Where names come from, once they are asked for: the command line answers --help without waiting for torch.
_HOMES = dict.fromkeys(("CLARS", "LAMB", "LARS", "SNGM", "ExtrapSGD"), ".optim") | {
    "Task": ".tasks",
    "load": ".training",
}


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module(".optim", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
