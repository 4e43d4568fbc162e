"""sngm: train with large batches in PyTorch without losing accuracy."""

from . import optim
from .optim import CLARS, LAMB, LARS, SNGM, ExtrapSGD

__version__ = "0.1.0"

__all__ = ["CLARS", "LAMB", "LARS", "SNGM", "ExtrapSGD", "optim"]
