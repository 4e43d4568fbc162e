"""Advice on the batch size of a model in the user's own training loop, without a task."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError
from ..optim import SpectralSNGM
from ..options import at_least
from ..probes.gradients import NOT_FINITE, NotFinite, check_loss, norm
from ..probes.noise import Noise, noise, size_of
from .caveats import FEW_STEPS
from .recipe import RECIPES, Recipe, convert, has_momentum
from .rules import Carried, carry_spectral, check_trains, rounded
from .verdict import DECAYING, EVERY, OWN_GROUPS, OWN_PARAMS

MOST_STEPS = 200  # the most steps, unless the user gives `steps`
NOISE_BATCHES = 16  # the most batches that the noise scale is measured on
COUPLED = (
    "Adam adds its weight decay to the gradient (coupled). The rule and the runs that tested it are for AdamW's, which "
    "is decoupled: search around this weight decay, or change to AdamW, which the check below trains."
)
SUMMED = (
    "The loss is a sum over the batch, not a mean: its gradient grows with the batch, and so does the advised weight "
    "decay. The check below has the lr and weight decay that fit the mean."
)
DAMPED = (
    "SNGM has no dampening: the advice is for SGD with lr * (1 - dampening) = {:g}, whose steps differ only by the "
    "weight of the first gradient."
)
CARRIED = {"lr", "dampening", "decoupled_weight_decay", "foreach", "fused", "capturable", "differentiable"}
"""Arguments of the user's optimizer that the check takes into account otherwise, or that do not change the steps."""
METHODS = {
    torch.optim.SGD: "msgd",
    torch.optim.AdamW: "adamw",  # before Adam, whose subclass it may be
    torch.optim.Adam: "adamw",
    SpectralSNGM: "spectral-sngm",
}
Loss = Callable[[nn.Module, Any], Tensor]


def carry_model(
    model: nn.Module,
    loss_fn: Loss,
    loader: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    to_batch: int | None,
    steps: int | None,
) -> dict[str, Any]:
    """Train a copy of a model for some steps, and return advice on the batch size of the user's training loop.

    The result has the keys of :func:`carry_recipe` that need no task. It also has the key "check": code that compares
    the advised settings with the user's own.
    """
    cls, main = _known_class(optimizer), _main_group(optimizer)
    given = _settings(cls, main)
    if given["method"] == "spectral-sngm":
        for group in map(_unscheduled, optimizer.param_groups):
            carry_spectral(group["lr"], group["weight_decay"], 1.0)  # raises now, not after the copy has trained
    if steps is None:  # two epochs, the usual length of the short run in `carry_recipe`
        steps = max(2, min(MOST_STEPS, 2 * (_length(loader) or MOST_STEPS)))
    first = _first_batch(model, loss_fn, loader, to_batch, steps)
    batch = size_of(first)
    samples = None
    # without a batch sampler, each item of the loader's dataset is a batch
    if isinstance(loader, torch.utils.data.DataLoader) and loader.batch_sampler is not None:
        samples = _length(loader.dataset)
    if to_batch is None:
        to_batch = 2 * batch if samples is None else min(2 * batch, samples)
    if to_batch < batch:
        raise UsageError(f"`to_batch` must be at least the batch of the loader, {batch}, got {to_batch}")
    if samples is not None and to_batch > samples:
        raise UsageError(f"`to_batch` must be at most the {samples:,} samples of the loader's dataset, got {to_batch}")
    try:
        twin, own = copy.deepcopy((model, optimizer))  # together, so that the copies share their parameters
    except RuntimeError as error:  # such as of a tensor that is not a leaf, in old torch.nn.utils.weight_norm
        raise UsageError(f"`model` cannot be copied: {error}") from error
    device = next(twin.parameters()).device
    summed = _is_sum(twin, loss_fn, _moved(first, device), batch)
    scaled = summed and given["method"] == "msgd"  # Adam's steps do not depend on the scale of the loss
    twin.train()
    trains = [p for group in own.param_groups for p in group["params"] if p.requires_grad]
    for group in own.param_groups:
        group.update(_unscheduled(group))

    def mean_loss(data: Any) -> Tensor:
        return loss_fn(twin, data) / (size_of(data) if summed else 1)

    batches = _cycle(loader)
    lengths, losses, noises = list[float](), list[float](), list[Noise]()
    try:
        for half in (steps // 2, steps - steps // 2):
            for data in itertools.islice(batches, half):
                length, loss = _step(twin, loss_fn, _moved(data, device), own)
                lengths.append(length)
                losses.append(loss)
            fresh = (_moved(data, device) for data in itertools.islice(iter(loader), NOISE_BATCHES))
            noises.append(noise(mean_loss, trains, fresh))
    except NotFinite:
        raise UsageError(
            f"the recipe diverges: the loss or its gradient is NaN or infinite at step {len(lengths) + 1} with "
            f"lr {given['lr']:g}, which `optimizer` has before schedulers change it; lower it, or check the data for "
            "NaN"
        ) from None
    if not any(lengths) or not given["lr"]:
        raise UsageError("every gradient or every learning rate is zero, so no learning rate can be computed")
    falling = [-loss for loss in losses] if main.get("maximize") else losses
    check_trains([max(falling[:10]), *falling[10:]])  # a trained model may have a first loss near 0 by chance
    own_class, extra = _class(optimizer), _extra(cls, main)
    recipe = Recipe(**given, batch=batch)
    notes = ["Keep the number of epochs, and let the learning rate decay to zero at the end."]
    if extra.get("dampening") and recipe.momentum:  # without momentum, SGD ignores it
        extra["lr"] = recipe.lr  # for the line of the user's own optimizer
        recipe = dataclasses.replace(recipe, lr=recipe.lr * (1 - extra["dampening"]))
        notes.append(DAMPED.format(recipe.lr))
    per_epoch = _length(loader)
    longest, which = _longest_epoch(lengths, per_epoch)
    sums = to_batch / batch if scaled else 1.0
    several = len(optimizer.param_groups) > 1
    decays = recipe.method == "spectral-sngm" and recipe.weight_decay
    params = EVERY, DECAYING if decays else EVERY
    if several or len(trains) < sum(p.requires_grad for p in model.parameters()):
        params = (OWN_GROUPS, OWN_GROUPS) if several else (OWN_PARAMS, OWN_PARAMS)
        notes.append(f"`{params[0]}` is what your optimizer is given now.")
    growth, fewer = to_batch / batch, None
    drawn = None if samples is None else _length(loader.sampler)  # type: ignore[attr-defined]
    # not of a batch sampler of the user's own, which has another sampler
    if drawn and per_epoch in (drawn // batch, -(-drawn // batch)) and drawn >= to_batch:
        fewer = per_epoch / (drawn // to_batch)
    groups = list(map(_unscheduled, optimizer.param_groups))
    by_rule = [  # of groups that decay, by the rule of spectral SNGM
        carry_spectral(group["lr"], group["weight_decay"], growth, group["momentum"], fewer)
        if recipe.method == "spectral-sngm" and group["weight_decay"]
        else None
        for group in groups
    ]
    carried, found = convert(
        recipe, to_batch, longest, which, noises, model, samples or math.inf, sums, own_class, extra, params,
        fewer, shrinks_most=max(one.lr * one.weight_decay if one else 0.0 for one in by_rule),
    )  # fmt: skip
    warnings = found.pop("warnings")
    if recipe.method == "msgd" and per_epoch is not None and len(lengths) < per_epoch:
        warnings.append(
            f"The copy took {len(lengths)} of an epoch's {per_epoch:,} steps. The gradient norm over these steps may "
            f"be far from that over an epoch, which the rule needs: pass steps={per_epoch}."
        )
    faster, factor = carried.lr / given["lr"], carried.weight_decay / (given["weight_decay"] or 1.0)
    settings = [
        one or Carried(rounded(group["lr"] * faster), rounded(group.get("weight_decay", 0.0) * factor))
        for one, group in zip(by_rule, groups, strict=True)
    ]
    if several:  # settings of a group override those of the optimizer
        listed = ", ".join(f"({lr:g}, {decay:g})" for lr, decay in settings)
        found["diff"].insert(1, f"+ for group, (lr, decay) in zip(groups, [{listed}]):")
        found["diff"].insert(2, "+     group.update(lr=lr, weight_decay=decay)")
    elif params[1] == DECAYING:
        notes.append("decay_groups exempts biases and normalisation layers, for which this weight decay is too large.")
    if "max_lr" in main:
        peak = [lr for lr, _ in settings] if several else carried.lr
        also = " and the momentum" * ("base_momentum" in main)
        notes.append(
            f"OneCycleLR sets the learning rate{also}: build it with max_lr={peak} and the new number of steps."
        )
    elif "initial_lr" in main:
        notes.append("Build your scheduler anew, with the new optimizer and for the new number of steps.")
    elif not several and main["lr"] != float(optimizer.defaults["lr"]):
        warnings.append(
            f"The optimizer was built with lr {float(optimizer.defaults['lr']):g}, and this advice is for its present "
            f"lr, {main['lr']:g}: if a scheduler or your own code lowered it, pass an optimizer with the old one."
        )
    few = samples is not None and samples < FEW_STEPS * to_batch / 10  # in a run of ten epochs
    if few and any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        notes.append(
            f"In a run of fewer than {FEW_STEPS} steps, BatchNorm's running statistics lag behind the weights: call "
            "torch.optim.swa_utils.update_bn(loader, model) before each test."
        )
    if recipe.weight_decay and _is_coupled(optimizer, main):
        notes.append(COUPLED)
    of_mean = recipe
    if scaled:
        notes.append(SUMMED)
        of_mean = dataclasses.replace(recipe, lr=recipe.lr * batch, weight_decay=given["weight_decay"] / batch)
    about = {"format": 1, "kind": "recipe", "norms": lengths, "warnings": warnings, "notes": notes}
    name = RECIPES[recipe.method]
    keys = ["lr", "batch", "weight_decay", *["momentum"] * has_momentum(recipe.method)]
    if lost := [key for key in extra if key not in CARRIED]:
        notes.append(f"The check below trains without {', '.join(lost)}, which `{name}` does not take.")
    own_recipe = ", ".join(f"{key}={getattr(of_mean, key):g}" for key in keys)
    task = "task = sngm.Task.from_torch(build_model, train_dataset, test_dataset, epochs=...)"
    check = f"{task}\nsngm.advise(task, {name}=dict({own_recipe}), to_batch={to_batch}, verify=True)"
    return {**about, **found, "check": check}


def _first_batch(model: nn.Module, loss_fn: Loss, loader: Iterable[Any], to_batch: int | None, steps: int) -> Any:
    """Return the first batch of a loader; raise UsageError if an argument is invalid, or there is no batch."""
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise UsageError(f"`model` must be an nn.Module with parameters, got {type(model).__name__}")
    if isinstance(loss_fn, nn.Module) or not callable(loss_fn):
        raise UsageError(f"`loss_fn` must be a function (model, batch) -> loss, got {type(loss_fn).__name__}")
    if not isinstance(loader, Iterable):  # for example a map-style Dataset
        raise UsageError(f"`loader` must be a DataLoader or another iterable of batches, got {type(loader).__name__}")
    data = torch.utils.data
    if (
        isinstance(loader, data.DataLoader)
        and loader.batch_sampler is None
        and not isinstance(loader.dataset, data.IterableDataset)
        and not isinstance(loader.sampler, data.BatchSampler)
    ):
        raise UsageError(
            "`loader` has batch_size=None, so each item is one sample: give the DataLoader a `batch_size`; if the "
            "items of its dataset are batches, pass a list of them"
        )
    if not at_least(steps, 2):  # half of the steps precede each measurement of the noise
        raise UsageError(f"`steps` must be a whole number of at least 2, got {steps!r}")
    if to_batch is not None and not at_least(to_batch, 1):
        raise UsageError(f"`to_batch` must be a whole number of at least 1, got {to_batch!r}")
    if iter(loader) is loader:
        raise UsageError("`loader` can be read only once; pass the DataLoader itself")
    first = next(iter(loader), None)
    if first is None:
        raise UsageError("`loader` has no batches; if it drops the last one, give it a smaller batch")
    return first


def _is_sum(model: nn.Module, loss_fn: Loss, data: Any, size: int) -> bool:
    """Return True if the loss of a batch is the sum of the losses of its halves; a mean loss is half of that sum."""
    half = size // 2
    model.eval()  # so that a sample's loss depends neither on dropout nor, in BatchNorm, on other samples
    try:
        with torch.no_grad():
            parts = (data, _part(data, slice(half), size), _part(data, slice(half, size), size))
            whole, *halves = (float(loss_fn(model, part)) for part in parts)
    except Exception:  # a model may not support half a batch, or have no loss in this mode
        return False
    return size > 1 and whole != 0 and math.isclose(sum(halves), whole, rel_tol=0.01)


def _settings(cls: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group of an optimizer, as arguments of `Recipe`."""
    method = METHODS[cls]
    known = {"lr": group["lr"], "weight_decay": float(group.get("weight_decay", 0.0)), "method": method}
    return {**known, "momentum": float(group["momentum"])} if has_momentum(method) else known


def _main_group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the parameter group with the most elements of those that decay, or of all if none does.

    Groups of spectral SNGM with another ball, such as embeddings, are taken only if there is no other group.
    """
    if any(group.get("order") == "after" for group in optimizer.param_groups):
        raise UsageError('`optimizer` has order="after"; the rule is for spectral SNGM with order="before"')

    def rank(group: dict[str, Any]) -> tuple[bool, bool, int]:
        spectral = group.get("ball") in (None, "spectral")
        return spectral, bool(group.get("weight_decay")), sum(p.numel() for p in group["params"] if p.requires_grad)

    return _unscheduled(max(optimizer.param_groups, key=rank))


def _known_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class in `METHODS` that an optimizer is an instance of; raise UsageError if there is none."""
    for cls in METHODS:
        if isinstance(optimizer, cls):
            return cls
    name = type(optimizer).__name__
    raise UsageError(
        "`optimizer` must be an instance of torch's SGD, Adam or AdamW, or of sngm.SpectralSNGM, whose recipe the rule "
        f"converts, got {name}"
    )


def _unscheduled(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group with the learning rate from before schedulers changed it.

    For OneCycleLR return its highest learning rate, and the momentum that belongs to it.
    """
    found = {**group, "lr": float(group.get("max_lr", group.get("initial_lr", group["lr"])))}
    if "base_momentum" in group:
        if "max_lr" not in group:
            raise UsageError(
                "`optimizer` is changed by CyclicLR, whose highest learning rate it does not store: pass an optimizer "
                "with that learning rate and without the scheduler"
            )
        momentum = group["base_momentum"]
        found |= {"betas": (momentum, *group["betas"][1:])} if "betas" in group else {"momentum": momentum}
    return found


def _class(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class, as it is written in a script."""
    own = type(optimizer)
    for package in ("torch.optim", "sngm"):
        if own.__module__.startswith(f"{package}."):
            return f"{package}.{own.__name__}"
    return own.__name__


def _extra(cls: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the non-default arguments in a parameter group that `_settings` does not return."""
    known = {"params", "lr", "weight_decay", "momentum"}
    defaults = {name: p.default for name, p in inspect.signature(cls).parameters.items() if name not in known}
    return {name: group[name] for name, default in defaults.items() if group.get(name, default) != default}


def _is_coupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return True if an optimizer is Adam with coupled weight decay, which is added to the gradient."""
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return isinstance(optimizer, torch.optim.Adam) and not decoupled


def _step(model: nn.Module, loss_fn: Loss, data: Any, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Take a step, and return the norm of its gradient and its loss."""
    optimizer.zero_grad()
    try:
        loss = loss_fn(model, data)
    except (TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"`loss_fn` is called as loss_fn(model, batch), and raised {what}") from error
    check_loss(loss)
    torch.autograd.backward(loss)
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not grads:
        raise UsageError(
            "no parameter of the optimizer has a gradient: is it the optimizer of this model? Does `loss_fn` use the "
            "model that it is given?"
        )
    length = float(torch.stack([norm(g) for g in grads]).norm())
    if not math.isfinite(length) or not math.isfinite(loss.item()):
        raise NotFinite(NOT_FINITE)
    optimizer.step()
    return length, loss.item()


def _length(of: Any) -> int | None:
    """Return the length of a loader or a dataset; None if it has none, such as a stream."""
    try:
        return len(of)
    except TypeError:
        return None


def _longest_epoch(norms: list[float], per_epoch: int | None) -> tuple[float, str]:
    """Return the largest root mean square of an epoch's gradient norms, and the steps of that epoch in words."""
    each = len(norms) if per_epoch is None else min(per_epoch, len(norms))
    start = max(range(0, len(norms) - each + 1, each), key=lambda i: math.hypot(*norms[i : i + each]))
    steps = f"in steps {start + 1} to {start + each}"
    if per_epoch is None:
        which = steps
    elif each < per_epoch:
        which = f"in the first {each} of {per_epoch:,} steps of an epoch"
    else:
        which = f"{steps}, the longest of an epoch"
    return math.hypot(*norms[start : start + each]) / math.sqrt(each), which


def _cycle(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield batches, epoch after epoch, until an epoch is empty."""
    while True:
        empty = True
        for data in loader:
            empty = False
            yield data
        if empty:
            return


def _moved(data: Any, device: torch.device) -> Any:
    """Move a batch to a device: each value that has a method `to`, also inside tuples, lists and mappings."""
    return _mapped(data, lambda value: value.to(device) if hasattr(value, "to") else None)


def _part(data: Any, rows: slice, size: int) -> Any:
    """Return a slice of the samples of a batch: `rows` of each tensor whose first dimension is the batch size."""
    return _mapped(data, lambda value: value[rows] if isinstance(value, Tensor) and size in value.shape[:1] else None)


def _mapped(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return `change(data)`; if that is None, return `data` with the values in tuples, lists and mappings changed."""
    changed = change(data)
    if changed is not None:
        return changed
    if isinstance(data, Mapping):
        return {key: _mapped(value, change) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        values = [_mapped(value, change) for value in data]
        return data._make(values) if hasattr(data, "_make") else type(data)(values)
    return data
