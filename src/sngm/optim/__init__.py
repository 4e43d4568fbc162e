"""Optimizers for large-batch training, as drop-in torch.optim classes."""

from . import reference
from .clars import CLARS
from .extrap import ExtrapSGD
from .lamb import LAMB
from .lars import LARS
from .registry import create, decay_groups, names
from .sngm import SNGM

__all__ = ["CLARS", "LAMB", "LARS", "SNGM", "ExtrapSGD", "create", "decay_groups", "names", "reference"]
