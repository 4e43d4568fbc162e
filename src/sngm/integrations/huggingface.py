"""Hugging Face: pass an optimizer to the Trainer, with a weight decay that the Trainer does not override."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def trainer_optimizer(cls: type[Optimizer], **settings: Any) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the argument `optimizer_cls_and_kwargs` of ``transformers.Trainer`` for an optimizer of class `cls`.

    The Trainer makes two parameter groups: one with decay, and one without (biases and normalisation layers). It sets
    ``args.weight_decay``, 0 by default, in the first group, so a `weight_decay` in the optimizer's settings has no
    effect. With the result of this function, the first group gets the `weight_decay` in `settings` instead.
    `args.weight_decay` and `args.learning_rate` are not used.

    Args:
        cls: the optimizer class, such as :class:`sngm.SNGM`.
        settings: the settings of the optimizer; `lr` is required.

    Raises:
        TypeError: `cls` is not an optimizer class, or does not have one of the settings.
        ValueError: a setting has a value that the class does not allow.

    Example:
        >>> from sngm import SNGM
        >>> cls, settings = trainer_optimizer(SNGM, lr=0.1, weight_decay=1e-4)
        >>> settings
        {'lr': 0.1, 'weight_decay': 0.0001}
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        got = repr(cls) if isinstance(cls, (str, type)) else f"an object of {type(cls).__name__}"
        raise TypeError(f"cls must be an optimizer class, such as sngm.SNGM, got {got}")
    if "lr" not in settings:
        raise TypeError("trainer_optimizer() needs lr; the Trainer's learning_rate is not used")
    # check the settings now, because the Trainer builds the optimizer late; not `fused`, which depends on the device
    build: Any = cls
    build([torch.zeros(2, 2, device="cpu", requires_grad=True)], **{k: v for k, v in settings.items() if k != "fused"})

    class ForTrainer(Optimizer):
        """The class that the Trainer calls; an Optimizer, because the Trainer uses other classes as factories."""

        def __new__(cls_: Any, params: list[dict[str, Any]], **given: Any) -> Any:
            if len(params) != 2:
                raise ValueError(
                    f"the Trainer's groups must be one with and one without weight decay, got {len(params)} groups; "
                    "build the optimizer yourself and pass optimizers=(optimizer, None)"
                )
            decayed, rest = params
            decay = given.get("weight_decay", 0.0)
            groups = [{**decayed, "weight_decay": decay}, {**rest, "weight_decay": 0.0}]
            return cls([group for group in groups if group["params"]], **{**given, "weight_decay": 0.0})

    return ForTrainer, settings
