"""Optimizers for large-batch training, as drop-in torch.optim classes."""

from typing import TYPE_CHECKING, Any

from .clars import CLARS
from .extrap import ExtrapSGD
from .lamb import LAMB
from .lars import LARS
from .registry import create, decay_groups, names
from .sngm import SNGM

if TYPE_CHECKING:
    from . import reference

__all__ = ["CLARS", "LAMB", "LARS", "SNGM", "ExtrapSGD", "create", "decay_groups", "names", "reference"]


def __getattr__(name: str) -> Any:
    if name == "reference":  # nothing here needs it
        import importlib

        return importlib.import_module(".reference", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
