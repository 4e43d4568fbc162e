"""Warnings and notes about advice on a recipe: what the rule assumes, does not know, or has not been tried on."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..training import RunConfig
from ..training.build import Setup

GROWING = 1.05  # steps still grow if they are longer by this factor than in the previous epoch
MAY_DIFFER = ("schedule", "warmup", "clip")  # settings that the rule assumes equal at both batches; defaults may vary
TOO_LONG = 5  # a recipe probably does not train if a step can be longer than the norm of the weights times this
FEW_STEPS = 200  # with fewer steps, BatchNorm's running statistics may be far from those of the last weights


class Epoch(NamedTuple):
    """Root mean squares over the steps of one epoch of the pilot, the short run of the recipe."""

    step: float
    """Length of SGD's steps: learning rate times norm of the gradient."""
    norm: float
    """Norm of the gradient, each step weighted by its squared learning rate."""


def warnings_of_recipe(
    setup: Setup, small: RunConfig, large: RunConfig, epochs: list[Epoch], part: int | None, weights: float
) -> list[str]:
    """Return warnings for cases in which the rule is known to fail, or its assumptions do not hold."""
    found = []
    if large.method == "sngm" and (longest := _longest_step(large)) > TOO_LONG * weights:
        found.append(
            f"A step may be {longest / weights:.2g} times as long as all weights together: the lr of the recipe is "
            "probably so large that it does not train, and then this advice is worthless."
        )
    pairs = [(name, getattr(small, name), getattr(large, name)) for name in MAY_DIFFER]
    if differ := [f"{name} {_said(old)} before, {_said(new)} now" for name, old, new in pairs if old != new]:
        found.append(
            f"The task does not train both alike: {'; '.join(differ)}. The rule takes them to be the same, and where "
            "they are not it has hardly been tried."
        )
    if small.method != "msgd":  # the other rules use no gradient norm
        return found
    cut = "--pilot-steps ended the pilot" if len(epochs) < small.epochs else "the recipe ended"
    if part is not None:
        found.append(
            f"--pilot-steps ended the pilot after {part} of an epoch's {setup.per_epoch:,} steps. The gradient norm "
            "over these steps may be far from that over an epoch, which the rule needs: leave out --pilot-steps."
        )
    elif len(epochs) == 1:
        found.append(f"{cut.capitalize()} after one epoch: whether its steps are the longest is not known.")
    elif epochs[-1].step >= GROWING * epochs[-2].step:
        found.append(f"Steps were still growing when {cut}, after {len(epochs)} epochs: the rate may be too small.")
    return found


def _said(value: float | str | None) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def notes_on(model: nn.Module, small: RunConfig, large: RunConfig, weights: float, steps: int) -> list[str]:
    """Return notes on what the rule does not take into account."""
    half, double = large.lr / 2, large.lr * 2
    trains = double * large.method_settings.get("weight_decay", 0.0) < 1  # else the weights would change their sign
    others = f"{half:.3g} and {double:.3g}" if trains else f"{half:.3g}"
    notes = [f"This learning rate is an estimate; with time for more runs, try {others} too."]
    normed = any(isinstance(m, _BatchNorm) for m in model.modules())
    if normed and steps < FEW_STEPS and not large.bn_samples:
        again = "sngm train --bn-samples 10000 estimates them again before each test."
        notes.append(f"BatchNorm's running statistics lag behind the weights in a run of {steps} steps: {again}")
    if normed and small.bn_group != large.bn_group:
        notes.append(
            f"BatchNorm takes {large.bn_group} samples together at batch {large.batch}, and {small.bn_group} in the "
            f"recipe; sngm train --bn-group {small.bn_group} keeps that."
        )
    longest = _longest_step(large)
    if large.method == "sngm" and longest > weights:
        notes.append(
            f"A step may be as long as lr / (1 - momentum) = {longest:.3g}, and all weights together are {weights:.3g} "
            "at the start: if the loss jumps about, take a smaller lr."
        )
    if large.method in ("sngm", "spectral-sngm") and large.schedule == "constant":
        notes.append("The schedule is constant, but SNGM's steps do not shrink by themselves: try --schedule cosine.")
    return notes


def left_out(large: RunConfig, left: int, count: int) -> list[str]:
    """Return a note if an epoch of the larger batch leaves out more than a tenth of the samples."""
    if large.last_batch == "keep" or left <= count / 10:
        return []
    return [
        f"Each epoch leaves out {left:,} of {count:,} samples, which fill no whole batch; for runs that take them as a "
        "smaller batch, set last-batch to keep."
    ]


def _longest_step(config: RunConfig) -> float:
    """Return the largest possible norm of an update of SNGM: learning rate / (1 - momentum)."""
    return float(config.lr / (1 - config.method_settings.get("momentum", 0.9)))
