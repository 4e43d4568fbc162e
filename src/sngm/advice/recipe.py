"""Conversion of the settings of an optimizer (a recipe) to a larger batch, by one rule for all tasks."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import tasks
from ..errors import UsageError
from ..optim.registry import EMBEDDINGS
from ..options import Execution
from ..parsing import set_flags
from ..probes.gradients import NOT_FINITE, NotFinite
from ..probes.noise import Noise
from ..probes.pilot import Norms, probe_device, training
from ..probes.sample import Sample
from ..training import RunConfig, resolve
from ..training.batch_plan import BatchPlan
from ..training.build import Setup, prepare
from ..training.distributed import Processes
from ..training.evaluate import in_streams, samples_of, steps_per_epoch
from ..training.run_folder import provenance
from .caveats import GROWING, Epoch, left_out, notes_on, warnings_of_recipe
from .facts import GIVEN, MEASURED, RULE, Fact, fact
from .rules import MOST_DECAY, Carried, carry_adamw, carry_over, carry_spectral, check_trains, rounded
from .verdict import DECAYING, DECAYING_ROWS, EVERY, MARGIN, Settings, conclude, has_normalisation

NOT_OF_SNGM = ("dampening", "differentiable", "foreach", "fused")  # SGD's arguments that SNGM lacks or defines anew
NOISE_SAMPLES = 1024  # the fewest samples, if there are as many, to measure the noise scale on after each epoch
Record = dict[str, Any]
# the methods whose recipe the rule converts, and the argument that takes it
RECIPES = {"msgd": "from_sgd", "adamw": "from_adamw", "spectral-sngm": "from_spectral"}
FIELDS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "lr": ((int, float), lambda value: 0 < value < math.inf, "a finite number > 0"),
    "batch": (int, lambda value: value > 0, "a whole number > 0"),
    "weight_decay": ((int, float), lambda value: 0 <= value < math.inf, "a finite number >= 0"),
    "momentum": ((int, float), lambda value: 0 <= value < 1, "a number >= 0 and < 1"),
    "epochs": (int, lambda value: value > 0, "a whole number > 0"),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings that a user trains with now, by one of the methods in `RECIPES`; None means the task's default."""

    lr: float
    batch: int
    weight_decay: float | None = None
    momentum: float = 0.9
    epochs: int | None = None
    method: str = "msgd"

    @classmethod
    def of(cls, given: Mapping[str, Any], method: str = "msgd") -> Recipe:
        """Build a recipe from a dict; raise UsageError if a key or a value is invalid.

        >>> Recipe.of({"lr": 0.1, "batch": 128, "weight_decay": 1e-4})
        Recipe(lr=0.1, batch=128, weight_decay=0.0001, momentum=0.9, epochs=None, method='msgd')
        """
        name = RECIPES[method]
        if not isinstance(given, Mapping):
            raise UsageError(f"`{name}` must be a dict such as dict(lr=0.1, batch=128), got {given!r}")
        known = ["lr", "batch", "weight_decay", *["momentum"] * has_momentum(method), "epochs"]
        own = {}
        for key, value in given.items():
            if key not in known:
                raise UsageError(f"`{name}` has no {key!r}; it takes {', '.join(known)}")
            types, fits, wanted = FIELDS[key]
            own[key] = int(value) if types is int and isinstance(value, float) and value.is_integer() else value  # 1e3
            if isinstance(value, bool) or not isinstance(own[key], types) or not fits(value):
                raise UsageError(f"`{name}`: {key} must be {wanted}, got {value!r}")
        if missing := [key for key in ("lr", "batch") if key not in given]:
            raise UsageError(f"`{name}` needs {' and '.join(missing)}, as in lr=0.1,batch=128")
        return cls(**own, method=method)

    @property
    def settings(self) -> dict[str, float]:
        """The method settings that differ from the defaults; the methods with a momentum have the same default, 0.9."""
        decay = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        return decay if self.momentum == 0.9 else {"momentum": self.momentum, **decay}


def has_momentum(method: str) -> bool:
    """Return whether a recipe of this method has a momentum."""
    return method != "adamw"


def advised_method(method: str) -> str:
    """Return the method that the advice for a recipe of this method is for."""
    return "sngm" if method == "msgd" else method


def carry_recipe(
    task: str,
    recipe: Recipe,
    to_batch: int | None = None,
    *,
    task_settings: Record | None = None,
    pilot_steps: int | None = None,
    last_batch: str | None = None,
    device: str | None = None,
    data_dir: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int, Record], None] = lambda step, steps, metrics: None,
) -> Record:
    """Measure gradient norms and noise in a short run of the recipe, and return settings for the larger batch.

    Args:
        task: name of a task.
        recipe: a recipe of SGD, AdamW or spectral SNGM.
        to_batch: the larger batch. Default: twice the recipe's batch.
        task_settings: settings of the task that differ from its defaults.
        pilot_steps: the most steps of the pilot, the short run of the recipe.
        last_batch: the setting of this name for the larger batch. Default: "drop".
        device, data_dir, say, progress: as in :func:`sngm.probes.along`.

    Returns:
        A dict. Its main keys are "answer", a sentence; "facts", the numbers with their sources; "diff", what to
        change in one's own training loop; "command", which trains with the advised settings; "warnings"; "notes";
        "norms", the gradient norm of each step of the pilot; "configs", the configs of the recipe and of the advised
        run. If the recipe is of SGD, "configs" also has SGD at the larger batch, with its learning rate (for a loss
        that is a sum, its weight decay) scaled linearly.
    """
    to_batch = 2 * recipe.batch if to_batch is None else to_batch
    if to_batch < recipe.batch:
        raise UsageError(f"`to_batch` must be at least the batch of the recipe, {recipe.batch}, got {to_batch}")
    where = probe_device(device)
    new_method = advised_method(recipe.method)
    common: Record = {"lr": recipe.lr, "epochs": recipe.epochs, "device": where, "task_settings": task_settings}
    small = resolve(task, recipe.method, batch=recipe.batch, method_settings=recipe.settings, **common)
    common["last_batch"] = last_batch
    large = resolve(task, new_method, batch=to_batch, method_settings=recipe.settings, **common)
    if recipe.method == "spectral-sngm":
        carry_spectral(recipe.lr, small.method_settings["weight_decay"], 1.0)  # raises now, not after the pilot
    setup = prepare(small, Processes(0, 1, where), Execution(data_dir=data_dir, step="eager"))
    samples = samples_of(setup.task, small)[0]
    # computed before the pilot, because it raises an error if `to_batch` is too large
    count = len(in_streams(samples, to_batch))
    left = count % to_batch
    plan = BatchPlan.of(large.batch, large.workers, large.micro, large.bn_group)
    rest = plan.for_rest(left) if large.last_batch == "keep" else None
    steps = (steps_per_epoch(large, count) + (rest is not None)) * large.epochs
    weights = math.hypot(*(p.detach().double().norm().item() for p in setup.model.parameters()))
    norms, epochs, noises = _pilot(small, setup, where, pilot_steps, say, progress)
    peak = max(epochs, key=lambda epoch: epoch.step)
    part = len(norms) if len(norms) < setup.per_epoch else None  # number of steps, if no epoch was finished
    known = dataclasses.replace(recipe, weight_decay=small.method_settings["weight_decay"], epochs=small.epochs)
    # If the loss is a sum over the batch, its gradient grows with the batch, and coupled weight decay must grow too.
    sums = setup.task.scale(to_batch) / setup.task.scale(recipe.batch) if recipe.method == "msgd" else 1.0
    in_turn = ", ".join(f"{epoch.norm:.3g}" for epoch in epochs)
    which = f"in epoch {epochs.index(peak) + 1}, whose steps are the longest; by epoch {in_turn}"
    if part is not None:
        which = f"in the first {part} of {setup.per_epoch:,} steps of an epoch"
    params = EVERY
    # SGD's decay is too small to matter for biases and normalisation layers; those of other methods are not
    if recipe.method != "msgd" and small.decay_on == "weights":
        embeds = any(isinstance(module, EMBEDDINGS) for module in setup.model.modules())
        params = DECAYING_ROWS if embeds and recipe.method == "spectral-sngm" else DECAYING
    carried, found = convert(
        known, to_batch, peak.norm, which, noises, setup.model, len(samples), sums, params=(params, params),
        fewer=setup.steps / steps, drop_last=large.last_batch == "drop",
    )  # fmt: skip
    facts = [*found.pop("facts"), fact("steps", steps, GIVEN, f"counted; {setup.steps:,} before")]
    advised = {**recipe.settings, "weight_decay": carried.weight_decay}
    large = resolve(task, new_method, batch=to_batch, method_settings=advised, **{**common, "lr": carried.lr})
    configs = [small, large]
    # SGD's linear scaling rule, for comparison; for AdamW the advice is already a scaling rule for AdamW itself
    if recipe.method == "msgd" and to_batch > recipe.batch:
        scaled = {**common, "lr": rounded(recipe.lr * to_batch / recipe.batch / sums)}
        own = {**known.settings, "weight_decay": small.method_settings["weight_decay"] * sums}
        configs.append(resolve(task, "msgd", batch=to_batch, method_settings=own, **scaled))
    return {
        "format": 1,
        "kind": "recipe",
        "task": task,
        "recipe": dataclasses.asdict(known),
        "facts": facts,
        "command": _command(task, recipe, large, data_dir),
        "warnings": found.pop("warnings") + warnings_of_recipe(setup, small, large, epochs, part, weights),
        "notes": notes_on(setup.model, small, large, weights, steps) + left_out(large, left, count),
        "norms": norms,
        "configs": [config.as_dict() for config in configs],
        **found,
        **{key: value for key, value in provenance(where).items() if key != "command"},
    }


def convert(
    recipe: Recipe,
    to_batch: int,
    norm: float,
    which: str,
    noises: Sequence[Noise],
    model: nn.Module,
    samples: float,
    sums: float = 1.0,
    own_class: str | None = None,
    extra: Mapping[str, Any] | None = None,
    params: tuple[str, str] = (EVERY, EVERY),
    fewer: float | None = None,
    drop_last: bool = True,
    shrinks_most: float = 0.0,
) -> tuple[Carried, Record]:
    """Return the advised learning rate and weight decay, and a dict with facts, answer, diff and evidence.

    Args:
        recipe: a recipe with a weight decay and, if it is known, the number of epochs.
        to_batch: the larger batch.
        norm: root mean square of the norm of SGD's gradient, as in `carry_over`.
        which: the steps over which `norm` was measured, in words.
        noises: gradient noise measured along the pilot.
        model: the model, to find whether it has normalisation layers.
        samples: number of training samples.
        sums: factor by which the loss grows with the batch if the loss is a sum over the batch, else 1.
        own_class: the class of the recipe's optimizer, such as "torch.optim.Adam", if it is not the method's own.
        extra: further arguments of the recipe's optimizer; the advised one has those that its class takes. "lr" is that
            of the recipe's optimizer, if it differs from `recipe.lr`.
        params: `Settings.params` of the recipe's optimizer and of the advised one.
        fewer: how many times fewer steps a run has at the larger batch, if it is known.
        drop_last: whether an epoch at the larger batch leaves out the samples that fill no whole batch.
        shrinks_most: the largest fraction by which a step shrinks the weights of any other group of spectral SNGM.
    """
    method, lr, decay, momentum = recipe.method, recipe.lr, recipe.weight_decay or 0.0, recipe.momentum
    growth, root = to_batch / recipe.batch, f"sqrt({to_batch} / {recipe.batch})"
    measured: list[Fact] = []
    how = f"{lr:g} * {root}: as far in an epoch as before"
    summed = "" if sums == 1 else f" * {sums:g}, for a loss that is a sum"
    shrinks = f"{decay:g} * {root}{summed}: shrinks as much an epoch"
    if method == "msgd":
        carried = carry_over(lr, decay * sums, norm, growth)
        measured = [fact("gradient norm", norm, MEASURED, f"SGD at batch {recipe.batch}, root mean square {which}")]
        how = f"{lr:g} * gradient norm * {root}: as far in an epoch as SGD"
    elif method == "adamw":
        carried = carry_adamw(lr, decay, growth)
    else:
        carried = carry_spectral(lr, decay, growth, momentum, fewer)
        how, shrinks = "with weight decay, shrinks the weights as much in a run as before", f"{decay:g} * {root}"
        if not decay:
            how, shrinks = f"{lr:g} * {root}: not tested without weight decay", "none before"
        elif carried.weight_decay < rounded(decay * math.sqrt(growth)):
            most = f"{MOST_DECAY / (1 - momentum):g}"
            kept_decay = carried.weight_decay == rounded(decay)
            shrinks = f"as before, as it is raised to {most} at most" if kept_decay else f"{shrinks}, at most {most}"
    kept = {"momentum": momentum} if has_momentum(method) else {}
    old_arguments: Record = {"lr": lr, **kept, "weight_decay": decay, **(extra or {})}
    new_arguments = {**old_arguments, **carried._asdict()}
    new_method = advised_method(method)
    if new_method == "sngm":
        new_arguments = {name: value for name, value in new_arguments.items() if name not in NOT_OF_SNGM}
    if method == "spectral-sngm":
        shrinks_most = max(shrinks_most, carried.lr * carried.weight_decay)
    old = Settings(method, recipe.batch, old_arguments, own_class, params[0])
    new = Settings(new_method, to_batch, new_arguments, own_class if new_method == method else None, params[1])
    found = conclude(old, new, noises, has_normalisation(model), samples, drop_last, shrinks_most)
    facts = [
        *measured,
        *found["facts"],
        fact("batch", to_batch, GIVEN, f"{recipe.batch} before"),
        fact("learning rate", carried.lr, RULE, how),
        *(fact(name, value, GIVEN, "as before") for name, value in kept.items()),
        fact("weight decay", carried.weight_decay, RULE, shrinks),
        *([] if recipe.epochs is None else [fact("epochs", recipe.epochs, GIVEN, "as before")]),
    ]
    return carried, {**found, "facts": facts}


def _pilot(
    config: RunConfig,
    setup: Setup,
    device: torch.device,
    most: int | None,
    say: Callable[[str], None],
    progress: Callable[[int, int, Record], None],
) -> tuple[list[float], list[Epoch], list[Noise]]:
    """Train with `config` until steps (learning rate times gradient norm) stop growing, or for `most` steps.

    At first, steps may grow from epoch to epoch: during warm-up, or until the model leaves a plateau. SNGM's learning
    rate, the peak of its schedule, corresponds to the epoch with the largest steps.

    Returns:
        The gradient norm of each step, an `Epoch` for each epoch, and the gradient noise after each epoch.
    """
    steps = setup.steps if most is None else min(most, setup.steps)
    each = f"{setup.per_epoch:,} steps and {setup.per_epoch * config.batch:,} gradients of single samples each"
    say(f"pilot: {config.method} at batch {config.batch} and lr {config.lr:g}, usually 2 epochs of {each}")
    recorded, epochs, noises = Norms(setup.model, 1.0), list[Epoch](), list[Noise]()
    samples = max(NOISE_SAMPLES, 2 * MARGIN[config.method] * config.batch)  # enough samples to allow twice the batch
    sample = Sample(setup.task, setup.model, setup.training, setup.plan.bn_group, samples, 1, say)
    walk = training(config, setup, device, recorded)
    try:
        for step in range(1, steps + 1):
            next(walk)
            progress(step, min(steps, 2 * setup.per_epoch if len(epochs) < 2 else step), {})
            if step % setup.per_epoch and (step < steps or epochs):  # only the first epoch may be incomplete
                continue
            first = len(epochs) * setup.per_epoch
            norms, rates = torch.stack(recorded.rows[first:]).norm(dim=1).tolist(), recorded.rates[first:]
            if not all(map(math.isfinite, norms)):
                raise NotFinite(NOT_FINITE)
            length = _rms([lr * norm for lr, norm in zip(rates, norms, strict=True)])
            epochs.append(Epoch(length, length / _rms(rates)))
            noises.append(sample.noise(setup.model))
            if len(epochs) > 1 and epochs[-1].step < GROWING * epochs[-2].step:
                break
    except NotFinite:
        raise UsageError(
            "the recipe diverges: the loss or its gradient is NaN or infinite in the pilot; lower its lr, or check the "
            "data for NaN"
        ) from None
    finally:
        walk.close()
        setup.data_source.close()
    if not any(epoch.step for epoch in epochs):
        raise UsageError("every gradient of the pilot is zero, so no learning rate can be computed")
    check_trains(torch.stack(recorded.losses).tolist())
    return torch.stack(recorded.rows).norm(dim=1).tolist(), epochs, noises


def _command(task: str, recipe: Recipe, large: RunConfig, data_dir: Path | None) -> str:
    lr, decay = f"{large.lr:g}", large.method_settings["weight_decay"]
    if task in tasks.LOCAL:  # such a task has no name on the command line
        momentum = "" if recipe.momentum == 0.9 else f", momentum={recipe.momentum:g}"
        epochs = "" if recipe.epochs is None else f", epochs={recipe.epochs}"
        epochs += ', last_batch="keep"' * (large.last_batch == "keep")
        method = f"{large.method}(weight_decay={decay:g}{momentum})"
        return f'sngm.train(task, "{method}", lr={lr}, batch={large.batch}{epochs})'
    words = ["sngm", "train", task, "--method", large.method, "--lr", lr, "--batch", str(large.batch)]
    words += [] if recipe.epochs is None else ["--epochs", str(recipe.epochs)]
    words += ["--last-batch", "keep"] * (large.last_batch == "keep")
    words += set_flags(dataclasses.replace(recipe, weight_decay=decay).settings, large.task_settings)
    if data_dir is not None:
        words += ["--data-dir", str(data_dir)]
    return shlex.join(words)


def _rms(values: Sequence[float]) -> float:
    return math.hypot(*values) / math.sqrt(len(values))
