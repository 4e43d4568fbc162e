"""Search over several settings of each method with quasi-random trials. Every method has equally many trials."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .. import tasks
from ..errors import UsageError
from ..optim import registry
from ..options import at_least

SEARCHED = ("lr", "weight_decay", "momentum", "warmup")
MOST_TRIALS = 1024
Ranges = dict[str, tuple[float, float]]


def check_search(search: Any, trials: Any) -> dict[str, tuple[float, float] | None]:
    """Validate a search; return the searched settings, each with its range or with None for the default range.

    Args:
        search: names of settings, or a dict from names to (lowest, highest) or None; ``lr[adamw]`` is for adamw only.
        trials: the number of trials of each method at each batch size.

    >>> check_search({"lr": (0.01, 1), "lr[adamw]": (1e-3, 0.1)}, 8)
    {'lr': (0.01, 1.0), 'lr[adamw]': (0.001, 0.1)}
    """
    if isinstance(search, str) or not isinstance(search, (Mapping, Sequence)):
        raise TypeError(f"search must be a list of names, or a dict of names and ranges, got {search!r}")
    if trials is None:
        raise UsageError("`search` needs `trials`, the number of points to try, such as 8")
    if not at_least(trials, 2) or trials > MOST_TRIALS:
        raise UsageError(f"`trials` must be a whole number from 2 to {MOST_TRIALS:,}, got {trials!r}")
    found: dict[str, tuple[float, float] | None] = {}
    entries = [str(entry) for entry in search]
    for entry in entries:
        name, method = split_entry(entry)
        if name not in SEARCHED:
            meant = registry.nearest(name, list(SEARCHED))
            raise UsageError(f"`search` takes {', '.join(SEARCHED)}, got {entry!r}{meant}")
        limits = search[entry] if isinstance(search, Mapping) else None
        if entries.count(entry) > 1:
            raise UsageError(f"`search` lists {entry} twice; leave one out")
        if method and limits is None:
            raise UsageError(f"`search` needs a range for {entry}, as {entry}=0.01:1")
        found.setdefault(name, None)
        found[entry] = None if limits is None else _check_range(name, limits)
    if "lr" not in found:
        raise UsageError("`search` must include lr: no setting can be judged at one learning rate")
    return found


def split_entry(entry: str) -> tuple[str, str]:
    """Split an entry of a search into the name of a setting and the method that it is for ("" for all methods).

    >>> split_entry("lr[adamw]"), split_entry("lr")
    (('lr', 'adamw'), ('lr', ''))
    """
    name, _, method = entry.partition("[")
    return (name, method[:-1]) if len(method) > 1 and method.endswith("]") else (entry, "")


def names_in(search: Iterable[str]) -> list[str]:
    """Return the names of the searched settings, without entries for one method such as ``lr[adamw]``."""
    return [entry for entry in search if not split_entry(entry)[1]]


def _check_range(name: str, limits: Any) -> tuple[float, float]:
    most = {"momentum": 1.0}.get(name, math.inf)
    try:
        low, high = (float(value) for value in limits)
        fits = (low >= 0 if name == "warmup" else low > 0) and low < high < most
    except (TypeError, ValueError):
        fits = False
    if not fits:
        within = {"momentum": ", above 0 and below 1", "warmup": ", at least 0"}.get(name, ", above 0")
        example = "momentum=0.8:0.99" if name == "momentum" else f"{name}=0.01:1"
        got = ":".join(map(str, limits)) if isinstance(limits, (tuple, list)) else repr(limits)
        raise UsageError(f"the range of {name} in `search` must be two rising numbers{within}, as {example}; got {got}")
    return low, high


def parse_search(text: str) -> dict[str, tuple[float, float] | None]:
    """Parse a search such as ``lr,weight_decay=1e-5:1e-3``. A name without a range gets None, for the default range.

    >>> parse_search("lr,weight_decay=1e-5:1e-3,lr[adamw]=1e-3:1e-2")
    {'lr': None, 'weight_decay': ('1e-5', '1e-3'), 'lr[adamw]': ('1e-3', '1e-2')}
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, limits = part.strip().partition("=")
        if name in found:
            raise UsageError(f"`search` lists {name} twice; leave one out")
        found[name] = tuple(limits.split(":")) if equals else None
    return found


def ranges_of(
    task: str, method: str, batch: int, epochs: int, search: Mapping[str, tuple[float, float] | None]
) -> Ranges:
    """Return the range of each searched setting that a method has.

    It is the range given for ``name[method]``, else that given for ``name``, else the default range.

    The default ranges are:

    - learning rate: the method's grid, and half a grid step beyond each end;
    - weight decay: a tenth to ten times the method's usual value, or of 1e-4 if that is 0;
    - momentum: 0.7 to 0.99;
    - warm-up: 0 to a fifth of the epochs.

    >>> ranges_of("digits", "sngm", 512, 15, {"lr": None, "weight_decay": None})
    {'lr': (0.0164, 1.83), 'weight_decay': (1e-05, 0.001)}
    """
    # a setting that a method fixes at 0 is not searched: momentum 0 defines "sngd"
    fixed = {name for name, value in registry.find(method).settings.items() if value == 0}
    known = {"lr", "warmup", *registry.settings_of(method)} - fixed
    if "betas" in known:
        known.add("momentum")  # stands for the first of the betas
    rates = sorted(tasks.rates_of(task, method))
    step = math.sqrt(rates[1] / rates[0]) if len(rates) > 1 else math.sqrt(10.0)
    decay = registry.usual_decay(method, tasks.find(task).usual(batch)["weight_decay"]) or 1e-4
    own = {
        "lr": (rates[0] / step, rates[-1] * step),
        "weight_decay": (decay / 10, decay * 10),
        "momentum": (0.7, 0.99),
        "warmup": (0.0, epochs / 5),
    }
    chosen = {
        name: search.get(f"{name}[{method}]") or search[name] or own[name] for name in names_in(search) if name in known
    }
    return {name: (rounded(low), rounded(high)) for name, (low, high) in chosen.items()}


def rounded(value: float, digits: int = 3) -> float:
    """Round a number to `digits` significant digits."""
    return float(f"{value:.{digits}g}")


def points(ranges: Ranges, trials: int) -> list[dict[str, float]]:
    """Return the points to try: a Sobol sequence over the ranges, whose first point is the middle of every range.

    Learning rates, weight decays and 1 - momentum are spaced logarithmically, warm-up evenly. A search with more trials
    begins with the same points.

    >>> points({"lr": (0.01, 1.0), "warmup": (0.0, 4.0)}, 3)
    [{'lr': 0.1, 'warmup': 2.0}, {'lr': 0.316, 'warmup': 1.0}, {'lr': 0.0316, 'warmup': 3.0}]
    """
    # skip the first point, the lower end of all ranges
    engine = torch.quasirandom.SobolEngine(len(ranges)).fast_forward(1)  # type: ignore[no-untyped-call]
    rows = engine.draw(trials, dtype=torch.float64).tolist()
    for digits in (3, 6):  # trials are identified by their learning rates, so a narrow range needs more digits
        found = [
            {name: rounded(_between(name, *ranges[name], x), digits) for name, x in zip(ranges, row, strict=True)}
            for row in rows
        ]
        if len({point["lr"] for point in found}) == trials:
            return found
    raise UsageError(f"the range of lr, {ranges['lr'][0]:g} to {ranges['lr'][1]:g}, is too narrow for {trials} trials")


def _between(name: str, low: float, high: float, share: float) -> float:
    if name == "warmup":
        return low + share * (high - low)
    if name == "momentum":
        return 1 - (1 - low) * math.pow((1 - high) / (1 - low), share)
    return low * math.pow(high / low, share)


def as_settings(method: str, point: Mapping[str, float]) -> dict[str, Any]:
    """Return a method's settings at a point of a search. For a method with betas, momentum is the first of them.

    >>> as_settings("adamw", {"lr": 0.1, "momentum": 0.8})
    {'betas': (0.8, 0.999)}
    """
    found: dict[str, Any] = {name: value for name, value in point.items() if name not in ("lr", "warmup")}
    if "momentum" in found and "momentum" not in registry.settings_of(method):
        known = registry.find(method)
        betas = known.settings.get("betas", inspect.signature(known.build).parameters["betas"].default)
        found["betas"] = (found.pop("momentum"), *betas[1:])
    return found


def hidden_by(search: Iterable[str]) -> set[str]:
    """Return the settings that a method's label omits in a search, because they differ from trial to trial.

    >>> sorted(hidden_by(["lr", "momentum"]))
    ['betas', 'lr', 'momentum']
    """
    return {*names_in(search), *(["betas"] if "momentum" in search else [])}
