"""Registry of methods by name, and the usual parameter groups of a model."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import checks
from .clars import CLARS
from .digest import digest_of
from .extrap import ExtrapSGD
from .lamb import LAMB
from .lars import LARS
from .sngm import SNGM
from .spectral import SpectralSNGM


@dataclass(frozen=True, slots=True)
class Method:
    """An optimizer class or function with the default settings of a registered method."""

    build: Callable[..., torch.optim.Optimizer]
    settings: dict[str, Any] = field(default_factory=dict)


MAX_MODULE_DEPTH = 50  # names in a module's path: Python imports packages recursively

METHODS = {
    "adam": Method(torch.optim.Adam),
    "block-sngm": Method(SNGM, {"scope": "tensor"}),
    "clars": Method(CLARS),
    "extrap-sgd": Method(ExtrapSGD),
    "lamb": Method(LAMB),
    "lars": Method(LARS),
    "lars-momentum": Method(LARS, {"variant": "momentum"}),
    # as in the code that the SNGM paper compared with
    "lars-unscaled": Method(LARS, {"variant": "unscaled", "max_ratio": 50.0, "clamp_grad": 10.0}),
    "msgd": Method(torch.optim.SGD, {"momentum": 0.9}),
    "sngd": Method(SNGM, {"momentum": 0.0}),
    "sngm": Method(SNGM),
    "spectral-sngm": Method(SpectralSNGM),
}


def names() -> list[str]:
    """Return the names that :func:`create` accepts.

    >>> names()[:3]
    ['adam', 'block-sngm', 'clars']
    """
    return sorted(METHODS)


BUILT_IN = frozenset(METHODS)


def register(name: str, build: Callable[..., torch.optim.Optimizer], settings: dict[str, Any] | None = None) -> Method:
    """Register a method: afterwards its name works wherever the name of a built-in method does.

    Args:
        name: letters, digits, ``-``, ``_`` and ``.``; not the name of a built-in method.
        build: an optimizer class, or a function ``(params, lr, ...) -> optimizer``. Its arguments after `params` are
            the settings of the method.
        settings: default arguments of the method; users can override them.

    >>> _ = register("rmsprop-9", torch.optim.RMSprop, {"momentum": 0.9})
    >>> create("rmsprop-9", [torch.nn.Parameter(torch.zeros(2))], lr=0.1).defaults["momentum"]
    0.9
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise ValueError(f"name must consist of letters, digits, '-', '_' and '.', got {name!r}")
    if name in BUILT_IN:
        raise ValueError(f"{name!r} is a built-in method; register yours under another name")
    if not callable(build):
        raise TypeError(f"build must be an optimizer class or a function (params, lr), got {build!r}")
    known = list(inspect.signature(build).parameters)
    if "lr" not in known:
        raise TypeError(
            f"build must have an argument 'lr', as in (params, lr); {name} has {', '.join(known) or 'none'}"
        )
    METHODS[name] = Method(build, dict(settings or {}))
    return METHODS[name]


def name_of(method: Any) -> str:
    """Return the name of a method given as a name, an optimizer class or a function ``(params, lr) -> optimizer``.

    Classes and functions that worker processes cannot import are registered under their own name.

    >>> name_of(SNGM), name_of(torch.optim.RMSprop)
    ('sngm', 'torch.optim.rmsprop:RMSprop')
    """
    if isinstance(method, str):
        return method
    if not callable(method):
        raise TypeError(f"a method is a name, an optimizer class or a function (params, lr), got {method!r}")
    for name, known in METHODS.items():
        if known.build is method and not known.settings:
            return name
    if isinstance(method, type) and importable(method):
        return f"{method.__module__}:{method.__qualname__}"
    name = getattr(method, "__name__", type(method).__name__).strip("<>")
    register(name, method)
    return name


def source_of(name: str) -> str | None:
    """Return a checksum of the source code of a user's registered method; None for others, which have versions."""
    return digest_of(METHODS[name].build, METHODS[name].settings) if name in METHODS and name not in BUILT_IN else None


def importable(thing: Any) -> bool:
    """Return whether another process can import a class or function by its module and name."""
    found: Any = sys.modules.get(thing.__module__) if thing.__module__ != "__main__" else None
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is thing


def create(name: str, params: Any, **settings: Any) -> torch.optim.Optimizer:
    """Build an optimizer by name.

    Args:
        name: one of :func:`names`, or any optimizer class as ``'package.module:Class'``.
        params: parameters or parameter groups, as for any torch optimizer.
        settings: arguments of the class, such as `lr`. They override the settings registered under the name.

    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> type(create("block-sngm", [w], lr=0.1)).__name__
    'SNGM'
    >>> type(create("torch.optim:RMSprop", [w], lr=0.1)).__name__
    'RMSprop'
    """
    build = builder(name, settings)
    lr = inspect.signature(build).parameters.get("lr")
    if lr is not None and lr.default is lr.empty:
        raise TypeError(f"{name} needs a value for 'lr'")
    return build(params)


def builder(name: str, settings: dict[str, Any]) -> functools.partial[torch.optim.Optimizer]:
    """Return a function ``(params, lr=...) -> optimizer`` that builds a method with these settings.

    Raises:
        TypeError: the method does not have one of the settings, or needs another besides `lr`.

    >>> builder("msgd", {"nesterov": True}).keywords
    {'momentum': 0.9, 'nesterov': True}
    """
    method = find(name)
    arguments = {**method.settings, **settings}
    signature = inspect.signature(method.build)
    allowed = settings_of(name)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key in arguments:
        if key not in allowed and not takes_any:
            raise TypeError(f"{name} has no setting {key!r}{nearest(key, allowed)}; it has {', '.join(allowed)}")
    for key, parameter in signature.parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if key in allowed and needed and key not in (*arguments, "lr"):
            raise TypeError(f"{name} needs a value for {key!r}")
    return functools.partial(method.build, **arguments)


def settings_of(name: str) -> list[str]:
    """Return the names of a method's settings.

    >>> settings_of("msgd")[:2]
    ['lr', 'momentum']
    """
    return list(inspect.signature(find(name).build).parameters)[1:]  # the first takes the parameters


def find(name: str) -> Method:
    """Return the method of this name; raise ValueError with the closest known name if there is none."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    if ":" not in name:
        if name not in METHODS:
            raise ValueError(
                f"method must be one of {', '.join(names())}, or any class as 'package.module:Class', "
                f"got {name!r}{nearest(name, names())}"
            )
        return METHODS[name]
    module, _, attribute = name.partition(":")
    if not is_module_name(module):
        raise ValueError(f"no optimizer class at {name[:80]!r}: write package.module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"no optimizer class at {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise TypeError(f"{name!r} must name a subclass of torch.optim.Optimizer, got {found!r}")
    return Method(found)


def is_module_name(text: str) -> bool:
    """Return whether text is a valid module path: identifiers joined by dots, at most MAX_MODULE_DEPTH.

    >>> is_module_name("torch.optim"), is_module_name(".."), is_module_name("a..b")
    (True, False, False)
    """
    names = text.split(".")
    return len(names) <= MAX_MODULE_DEPTH and all(name.isidentifier() for name in names)


def nearest(word: str, words: list[str]) -> str:
    """Return " (did you mean ...?)" for an error message if one of the words is close to `word`, else ""."""
    word = word.lower()  # names of methods and tasks are
    near = difflib.get_close_matches(word, words)
    alike = [difflib.SequenceMatcher(None, word, other).ratio() for other in near]
    best = [repr(other) for other, ratio in zip(near, alike, strict=True) if ratio == alike[0]]
    return f" (did you mean {' or '.join(best)}?)" if best else ""


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups of a model: one with weight decay; biases and normalisation layers without.

    Parameters of at most one dimension count as biases, since scales and gains should not decay either. SNGM's global
    norm spans both groups.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    >>> [(len(group["params"]), group["weight_decay"]) for group in decay_groups(model, 1e-4)]
    [(1, 0.0001), (3, 0.0)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    checks.number("weight_decay", weight_decay, 0.0)
    decayed: list[Tensor] = []
    exempt: list[Tensor] = []
    seen: set[int] = set()
    for module in model.modules():
        is_norm = re.search("[Nn]orm(?![a-z])", type(module).__name__)  # LayerNorm2d, not NormalLinear
        for name, p in module.named_parameters(recurse=False):
            if id(p) not in seen:
                seen.add(id(p))
                (exempt if is_norm or p.ndim <= 1 or "bias" in name else decayed).append(p)
    groups: Iterable[tuple[list[Tensor], float]] = ((decayed, weight_decay), (exempt, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
