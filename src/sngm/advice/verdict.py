"""The answer to "can I grow my batch?": how far the gradient noise scale allows it, what to expect, what to change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..probes.noise import Noise
from .facts import MEASURED, RULE, fact

WITHOUT_NORMALISATION = (
    "The model has no normalisation layer, and on such nets this rule did badly: cifar10-convnet came to 39.75 % at "
    "batch 8192, where SGD with a searched rate has 64.8 %; wikitext2-lstm to a perplexity of 184 at batch 2000, where "
    "a search found 121 (mean of three seeds); three linear layers on digits lost 0.1 to 0.5 points from batch 32 to "
    "128 and 1.8 to 8.4 at 512, with AdamW 0.1 to 0.9 and 2.2 to 7.4. Start a search from this learning rate."
)
NOT_TRIED = (
    "The model has no normalisation layer, and for such models the rule of spectral SNGM has hardly been tried: start "
    "a search from this learning rate."
)
EVIDENCE = {
    "msgd": (
        "trained as advised, without a search, digits lost 0.2 to 0.4 points from batch 32 to 512 (5 seeds), but 4.5 "
        "from a rate that was too large for SGD. ResNet20 on CIFAR-10 reached 92.0, 92.6 and 92.3 % at batch 1024, "
        "2048 and 4096 (1 seed) and 91.3 % at 8192 (3 seeds), where SGD with searched rates has 92.0 % at batch 128, "
        "and at 8192 87.8 % with the same decay, 82.3 % with the old one. For nets without normalisation layers it is "
        "worse: up to 0.5 points lost at 4 times the batch on digits, 8.4 at 16 times."
    ),
    "adamw": (
        "square-root scaling follows Malladi et al. (arXiv 2205.10287). Trained as advised, digits lost 0.2 to 0.3 "
        "points from batch 32 to 128, and 1.4 to 2.4 at 512 (5 seeds); without BatchNorm 0.1 to 0.9, and 2.2 to 7.4. "
        "On Criteo's mean loss ADAM with searched rates kept its AUC from batch 1024 to 8192 (0.7335 and 0.7298), as "
        "SNGM did; LAMB was 0.025 to 0.026 lower."
    ),
    "spectral-sngm": (
        "trained as advised, digits lost up to 0.3 points from batch 32 to 128, up to 0.6 at 256 and 0.4 to 0.6 at 512 "
        "(three recipes, 5 seeds). ResNet20 on CIFAR-10, carried from the best of 8 trials at batch 1024 (92.5 %), "
        "reached 92.5, 91.6 and 90.7 % at 8192, 16384 and 32768, where the best of 8 trials each reached 92.2, 91.7 "
        "and 91.2 % (3 seeds): 0.2 points more, and 0.05 and 0.45 less (intervals of 0.6 to 0.7)."
    ),
}
MARGIN = {
    "msgd": 1,
    "adamw": 4,
    "spectral-sngm": 2,
}  # the batch is at most the noise scale divided by this; at the noise scale AdamW lost 1.4 points, spectral SNGM 0.6
# growth of the batch up to which the loss was small on every task tried with normalisation layers, except for AdamW and
# from learning rates that were too large for SGD
TRIED = 16
MOST_SHRINKING = 0.25  # runs with 10 % trained well, some with 25 % and more lost several points
CLASSES = {
    "msgd": "torch.optim.SGD",
    "adamw": "torch.optim.AdamW",
    "sngm": "sngm.SNGM",
    "spectral-sngm": "sngm.SpectralSNGM",
}
EVERY, OWN_GROUPS, OWN_PARAMS = "model.parameters()", "groups", "params"
# biases and normalisation layers do not decay
DECAYING = "sngm.optim.decay_groups(model, weight_decay={})"
# as our tasks treat embeddings with spectral SNGM
DECAYING_ROWS = 'sngm.optim.decay_groups(model, weight_decay={}, embeddings={{"ball": "rows"}})'


class Settings(NamedTuple):
    """The settings of a training loop: optimizer, batch size and the optimizer's arguments."""

    method: str
    batch: int
    arguments: dict[str, Any]
    own_class: str | None = None
    """The user's optimizer class, such as "torch.optim.Adam", if it is not the method's own class."""
    params: str = EVERY
    """What the optimizer is given: `EVERY`, `OWN_GROUPS`, `OWN_PARAMS`, or one of the templates for `decay_groups`."""

    @property
    def optimizer(self) -> str:
        """The name of the optimizer's class."""
        return self.own_class or CLASSES[self.method]

    @property
    def line(self) -> str:
        """The line of Python that builds the optimizer."""
        values = {name: _shown(value) for name, value in self.arguments.items()}
        params = self.params.format(values.pop("weight_decay")) if "{}" in self.params else self.params
        return f"optimizer = {self.optimizer}({params}, {', '.join(f'{key}={value}' for key, value in values.items())})"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    value = value.item() if isinstance(value, Tensor) else value
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _with_interval(noise: Noise) -> str:
    """Format a noise scale and its interval with two digits."""
    scale, low, high = (f"{float(format(x, '.2g')):g}" for x in (noise.scale, noise.scale_low, noise.scale_high))
    return scale if math.isnan(noise.scale_low) else f"{scale} ({low} to {high})"


def lossless_batch(scale: float, batch: int, most: float = math.inf) -> int:
    """Return the largest ``batch * 2**k`` that is at most `scale` (the noise scale) and `most`, or else `batch`.

    >>> lossless_batch(500, 32), lossless_batch(20, 32), lossless_batch(math.inf, 32, most=1000)
    (256, 32, 512)
    """
    while 2 * batch <= min(scale, most):
        batch *= 2
    return batch


def has_normalisation(model: nn.Module) -> bool:
    """Return whether a model has a normalisation layer, judged by class names, which also finds custom layers.

    The name of the model's own class does not count, and neither do parametrizations such as weight_norm.
    """
    layers = (module for name, module in model.named_modules() if name and "parametrizations" not in name.split("."))
    return any("norm" in type(module).__name__.lower() for module in layers)


def warnings_of(after: Settings, normalised: bool, shrinks: float) -> list[str]:
    """Return warnings about the advised settings of a model with or without normalisation layers.

    `shrinks` is the largest fraction by which a step of spectral SNGM shrinks weights.
    """
    if after.method != "spectral-sngm":
        return [] if normalised else [WITHOUT_NORMALISATION]
    found = [] if normalised else [NOT_TRIED]
    if shrinks > MOST_SHRINKING:
        found.append(
            f"Each step shrinks weights by up to {shrinks:.0%} (lr * weight_decay): batch {after.batch:,} has too few "
            "steps for the weight decay of this recipe."
        )
    return found


def conclude(
    before: Settings,
    after: Settings,
    noises: Sequence[Noise],
    normalised: bool,
    samples: float,
    drop_last: bool = True,
    shrinks: float = 0.0,
) -> dict[str, Any]:
    """Return a dict: facts, the answer in one sentence, a diff for the user's training loop, the evidence for the rule.

    Args:
        before, after: the recipe and the advised settings.
        noises: gradient noise measured along the pilot. A noise scale is NaN if both gradient and noise are zero. If a
            scale is infinite or above the number of samples that it was measured on, the gradient of these samples is
            mostly noise, and the number of samples is used in place of the scale.
        normalised: whether the model has normalisation layers.
        samples: number of training samples, which is the largest batch.
        drop_last: whether to leave out the last samples of an epoch.
        shrinks: the largest fraction by which a step of spectral SNGM shrinks weights.
    """
    scales, measured_on = [one.scale for one in noises], min(one.samples for one in noises)
    known = [min(scale, measured_on) for scale in scales if scale == scale]
    # rounded, so that a rounding error does not change an exact power of two
    scale = round(geometric_mean(known), 6) if known and min(known) > 0 else 0.0
    least = any(scale > measured_on for scale in scales)
    margin = MARGIN[before.method]
    limit = lossless_batch(scale / margin, before.batch, samples)
    lossless = f"up to {'at least ' * least}batch {limit:,} you should lose nothing measurable"
    arguments = ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in after.arguments.items())
    use = f"use {after.optimizer.rpartition('.')[2]} with {arguments}"
    tried = shrinks <= MOST_SHRINKING
    if after.batch <= limit and tried:
        yes = "Yes" if normalised else "Yes, but check it, as the model has no normalisation layer"
        text = f"{yes}: {lossless}; at batch {after.batch:,} {use}."
    elif not normalised:
        text = (
            f"Batch {after.batch:,} is a risk, as the model has no normalisation layer: {use}, and search around that "
            f"rate, or stay at batch {before.batch:,}."
        )
    else:
        small = "small " * (tried and before.method != "adamw" and after.batch <= TRIED * before.batch)
        text = (
            f"{f'{lossless}; ' * (tried and limit > before.batch)}at batch {after.batch:,} expect a {small}loss; {use}."
        )
        text = text[0].upper() + text[1:]
    in_turn = ", ".join(map(_with_interval, noises))
    facts = [
        fact(
            "noise scale",
            scale,
            MEASURED,
            f"{f'at least, as {measured_on:,} samples show no more; ' * least}along the pilot, with 95 % intervals: "
            f"{in_turn}; low, as it grows during training",
        ),
        fact(
            "lossless batch",
            limit,
            RULE,
            f"the largest doubling of {before.batch} up to the noise scale{f' / {margin}' * (margin > 1)}",
        ),
    ]
    diff = [
        f"- {before.line}",
        f"+ {after.line}",
        f"+ loader = DataLoader(dataset, batch_size={after.batch}, shuffle=True, drop_last={drop_last})",
    ]
    warnings = warnings_of(after, normalised, shrinks)
    return {"answer": text, "facts": facts, "diff": diff, "evidence": EVIDENCE[before.method], "warnings": warnings}
