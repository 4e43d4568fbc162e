"""Optimizers for large-batch training, as drop-in torch.optim classes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import reference
    from .clars import CLARS
    from .extrap import ExtrapSGD
    from .lamb import LAMB
    from .lars import LARS
    from .nsgdm import NSGDM
    from .registry import create, decay_groups, names
    from .shared_norm import SharedNorm
    from .sngm import SNGM
    from .spectral import SpectralSNGM

__all__ = [
    "CLARS", "LAMB", "LARS", "NSGDM", "SNGM", "ExtrapSGD", "SharedNorm", "SpectralSNGM", "create", "decay_groups",
    "names", "reference",
]  # fmt: skip

# Methods are imported on first access, because importing one method takes half the time of importing all.
_MODULES = {"CLARS": "clars", "LAMB": "lamb", "LARS": "lars", "SNGM": "sngm", "ExtrapSGD": "extrap"}
_MODULES |= {"NSGDM": "nsgdm", "SharedNorm": "shared_norm", "SpectralSNGM": "spectral"}
_MODULES |= dict.fromkeys(("create", "decay_groups", "names"), "registry")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_MODULES.get(name, name)}", __name__)
    value = getattr(module, name) if name in _MODULES else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
