"""The rules that scale learning rate and weight decay to a larger batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from ..errors import UsageError

DIGITS = 3  # significant digits of advised numbers
ENOUGH = 20  # steps; with fewer, `check_trains` does not judge a recipe
# of spectral SNGM, times 1 / (1 - momentum); on ResNet20 at batch 2048 and the same lr * weight_decay, decays of 0.6,
# 1.2, 1.7, 2.4, 3.4 and 4.8 gave 92.8, 92.6, 92.4, 92.1, 91.4 and 89.3 %
MOST_DECAY = 0.12
RISE = 0.25  # relative rise of the loss that small batches may have by chance


class Carried(NamedTuple):
    """Learning rate and weight decay at the larger batch."""

    lr: float
    weight_decay: float


def carry_over(lr: float, weight_decay: float, norm: float, growth: float) -> Carried:
    """Return SNGM's learning rate and coupled weight decay for a batch `growth` times that of an SGD recipe.

    - Learning rate: an epoch of SGD has n steps of length ``lr * norm``; an epoch of SNGM has n / growth steps, whose
      length is SNGM's learning rate. (The length of a step is the norm of the change of the weights.) Steps in random
      directions cover a distance equal to the root of the sum of their squared lengths. Both methods cover the same
      distance if SNGM's learning rate is ``lr * norm * sqrt(growth)``. Momentum and schedule have the same effect on
      both methods.
    - Weight decay: a step of SGD shrinks the weights by the fraction ``lr * weight_decay``; a step of SNGM shrinks the
      weights by SNGM's own ``lr * weight_decay`` divided by the norm of the gradient. Over an epoch, both methods
      shrink the weights equally if SNGM's weight decay is ``weight_decay * sqrt(growth)`` and the norm of the gradient
      is the same at both batches.

    Args:
        lr, weight_decay: learning rate and weight decay of the SGD recipe.
        norm: root mean square over an epoch of the norm of SGD's gradient, as the optimizer gets it.
        growth: the new batch divided by the old one.

    >>> carry_over(lr=0.1, weight_decay=1e-4, norm=1.5, growth=64)
    Carried(lr=1.2, weight_decay=0.0008)
    """
    return Carried(rounded(lr * norm * math.sqrt(growth)), rounded(weight_decay * math.sqrt(growth)))


def carry_adamw(lr: float, weight_decay: float, growth: float) -> Carried:
    """Return AdamW's learning rate and decoupled weight decay for a batch `growth` times that of an AdamW recipe.

    - Learning rate: AdamW's steps have nearly the same length at every batch. So to cover the same distance in an epoch
      of steps in random directions, the learning rate is multiplied by the square root of `growth`, as for SNGM.
      Malladi et al. (arXiv 2205.10287) scale it in the same way, but also change the betas and epsilon.
    - Weight decay: a step shrinks the weights by the fraction ``lr * weight_decay``. Over an epoch, the weights shrink
      as much as in the recipe if the weight decay is ``weight_decay * sqrt(growth)``.

    >>> carry_adamw(lr=1e-3, weight_decay=0.01, growth=16)
    Carried(lr=0.004, weight_decay=0.04)
    """
    return Carried(rounded(lr * math.sqrt(growth)), rounded(weight_decay * math.sqrt(growth)))


def carry_spectral(
    lr: float, weight_decay: float, growth: float, momentum: float = 0.9, fewer: float | None = None
) -> Carried:
    """Return spectral SNGM's learning rate and decoupled weight decay for a batch `growth` times that of a recipe.

    - Product: a step multiplies the weights by ``1 - lr * weight_decay``, and there are `fewer` times fewer steps. The
      weights shrink as much as in the recipe if the new factor is the old one to the power of `fewer`.
    - Weight decay is multiplied by the square root of `growth`, as for AdamW, but not raised above
      ``0.12 / (1 - momentum)``. With more, weights without a normalisation layer behind them become too small.
    - Learning rate: what the product and the weight decay leave. Without weight decay, it is multiplied by the square
      root of `growth`.

    `fewer` differs from `growth`, the default, if the last samples of an epoch are left out or are a smaller batch.

    >>> carry_spectral(lr=0.01, weight_decay=0.5, growth=4), carry_spectral(lr=0.01, weight_decay=1.0, growth=16)
    (Carried(lr=0.0199, weight_decay=1.0), Carried(lr=0.124, weight_decay=1.2))
    """
    if lr * weight_decay >= 1:
        raise UsageError(
            f"lr {lr:g} times weight decay {weight_decay:g} is {lr * weight_decay:g}, and must be below 1: it is the "
            "fraction by which a step shrinks the weights; lower one of them"
        )
    if not weight_decay:
        return Carried(rounded(lr * math.sqrt(growth)), 0.0)
    decay = rounded(min(weight_decay * math.sqrt(growth), max(weight_decay, MOST_DECAY / (1 - momentum))))
    shrinks = min(-math.expm1((fewer or growth) * math.log1p(-lr * weight_decay)), 0.99)  # below 1 also when rounded
    return Carried(rounded(shrinks / decay), decay)


def rounded(value: float) -> float:
    """Round an advised number to `DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")


def check_trains(losses: Sequence[float]) -> None:
    """Raise UsageError if a recipe does not train, judged by the losses of its steps.

    It does not train if there are at least 20 losses and the mean of their last quarter exceeds the first loss by more
    than 25 %. A smaller rise is allowed, because small batches have noisy losses, and the loss may not fall during
    warm-up.

    >>> check_trains([2.3] * 10 + [1.9] * 10)
    >>> check_trains([-2.3] * 10 + [-2.4] * 10)
    """
    first, last = losses[0], fmean(losses[-len(losses) // 4 :])
    if len(losses) >= ENOUGH and last > first + RISE * abs(first):
        raise UsageError(
            f"the recipe does not train: the loss is {first:.3g} at the start of the pilot and {last:.3g} at its end; "
            "change its lr"
        )
