"""Advice on the batch size of a model in the user's own training loop, without a task."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..probes.gradients import norm
from ..probes.noise import noise, size_of
from .recipe import Recipe, convert
from .verdict import WITHOUT_NORMALISATION, has_normalisation

NOISE_BATCHES = 16  # the most batches that the noise scale is measured on
Loss = Callable[[nn.Module, Any], Tensor]


def carry_model(
    model: nn.Module,
    loss_fn: Loss,
    loader: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    to_batch: int | None,
    steps: int,
) -> dict[str, Any]:
    """Train a copy of a model for some steps, and return advice as :func:`carry_recipe` does, without a command."""
    given = _settings(optimizer)
    if isinstance(loss_fn, nn.Module) or not callable(loss_fn):
        raise UsageError(f"`loss_fn` must be a function (model, batch) -> loss, got {type(loss_fn).__name__}")
    if steps < 2:
        raise UsageError(f"`steps` must be at least 2, got {steps}")
    twin, own = copy.deepcopy((model, optimizer))  # together: the copied optimizer then has the copy's parameters
    twin.train()
    device = next(twin.parameters()).device
    batches = _cycle(loader)
    lengths, rates, scales, batch = list[float](), list[float](), list[float](), 0
    for _ in range(2):
        for data in itertools.islice(batches, steps // 2):
            batch = batch or size_of(data)
            lengths.append(_step(twin, loss_fn, _moved(data, device), own))
            rates.append(float(own.param_groups[0]["lr"]))
        fresh = (_moved(data, device) for data in itertools.islice(iter(loader), NOISE_BATCHES))
        scales.append(noise(lambda data: loss_fn(twin, data), twin.parameters(), fresh).scale)
    if not all(map(math.isfinite, lengths)):
        raise UsageError("the gradient is NaN or infinite within a few steps; lower the learning rate")
    if not any(lengths) or not any(rates):
        raise UsageError("every gradient or every learning rate is zero, so there is no norm to set a rate by")
    to_batch = 2 * batch if to_batch is None else to_batch
    if to_batch < batch:
        raise UsageError(f"`to_batch` must be at least the batch of the loader, {batch}, got {to_batch}")
    recipe = Recipe(**given, batch=batch)
    each = min(len(loader), len(lengths)) if isinstance(loader, Sized) else len(lengths)
    longest, which = _longest_epoch(rates, lengths, each)
    samples = len(loader.dataset) if isinstance(loader, torch.utils.data.DataLoader) else math.inf  # type: ignore[arg-type]
    _, found = convert(
        recipe, to_batch, recipe.weight_decay or 0.0, longest, which, scales,
        epochs=None, model=model, samples=samples,
    )  # fmt: skip
    bare = recipe.method == "msgd" and not has_normalisation(model)
    notes = ["Keep the number of epochs, and let the learning rate decay to zero at the end."]
    if len(optimizer.param_groups) > 1:
        notes.append(
            "These are the settings of the first parameter group: change those of the others by the same factors."
        )
    about = {
        "format": 1,
        "kind": "recipe",
        "norms": lengths,
        "warnings": [WITHOUT_NORMALISATION] * bare,
        "notes": notes,
    }
    name = "from_sgd" if recipe.method == "msgd" else "from_adamw"
    keys = ["lr", "batch", "weight_decay", *["momentum"] * (recipe.method == "msgd")]
    own_recipe = ", ".join(f"{key}={getattr(recipe, key):g}" for key in keys)
    task = "task = sngm.Task.from_torch(build_model, train_dataset, test_dataset, epochs=...)"
    check = f"{task}\nsngm.advise(task, {name}=dict({own_recipe}), to_batch={to_batch}, verify=True)"
    return {**about, **found, "check": check}


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings of the first parameter group, as a recipe."""
    group = optimizer.param_groups[0]
    known = {"lr": float(group["lr"]), "weight_decay": float(group.get("weight_decay", 0.0))}
    if isinstance(optimizer, torch.optim.SGD):
        return {**known, "momentum": float(group["momentum"]), "method": "msgd"}
    if isinstance(optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        return {**known, "method": "adamw"}
    name = type(optimizer).__name__
    raise UsageError(f"`optimizer` must be torch's SGD, Adam or AdamW, whose recipe the rule converts, got {name}")


def _step(model: nn.Module, loss_fn: Loss, data: Any, optimizer: torch.optim.Optimizer) -> float:
    """Take a step and return the norm of its gradient."""
    optimizer.zero_grad()
    torch.autograd.backward(loss_fn(model, data))
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not grads:
        raise UsageError("no parameter of the optimizer has a gradient: is it the optimizer of this model?")
    length = float(torch.stack([norm(g) for g in grads]).norm())
    optimizer.step()
    return length


def _longest_epoch(rates: list[float], norms: list[float], each: int) -> tuple[float, str]:
    """Return the root mean square of the norms in the epoch with the longest steps, and which steps these are."""
    steps = [lr * norm for lr, norm in zip(rates, norms, strict=True)]
    start = max(range(0, len(steps) - each + 1, each), key=lambda i: math.hypot(*steps[i : i + each]))
    weighted = math.hypot(*steps[start : start + each]) / math.hypot(*rates[start : start + each])
    return weighted, f"in steps {start + 1} to {start + each}, the longest of an epoch"


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
    """Return a batch on a device: a tensor, or tensors in tuples, lists and dicts."""
    if isinstance(data, Tensor):
        return data.to(device)
    if isinstance(data, dict):
        return {key: _moved(value, device) for key, value in data.items()}
    return type(data)([_moved(value, device) for value in data]) if type(data) in (tuple, list) else data
