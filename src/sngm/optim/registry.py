"""Registry of methods by name, and the usual parameter groups of a model."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import checks, external
from .clars import CLARS
from .digest import digest_of
from .extrap import ExtrapSGD
from .lamb import LAMB
from .lars import LARS
from .nsgdm import NSGDM
from .sngm import SNGM
from .spectral import SpectralSNGM

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
signature_of = functools.cache(inspect.signature)  # a study calls it thousands of times


@dataclass(frozen=True, slots=True)
class Method:
    """A registered method.

    Attributes:
        build: an optimizer class or function, or the name of a class in another library, which is imported at first
            use.
        settings: default settings of the method that differ from the defaults of the class.
        lr_scale: the method's usual learning rates divided by those of momentum SGD.
        recipe: options of a run that the method needs, such as a constant learning rate.
        embeddings: settings of the parameter group of embeddings, if the method treats them in a special way.
    """

    build: Callable[..., torch.optim.Optimizer] | str
    settings: dict[str, Any] = field(default_factory=dict)
    lr_scale: float = 1.0
    recipe: dict[str, Any] = field(default_factory=dict)
    embeddings: dict[str, Any] = field(default_factory=dict)


METHODS = {
    "adam": Method(torch.optim.Adam, lr_scale=0.03),
    "adamw": Method(torch.optim.AdamW, lr_scale=0.03),
    "block-sngm": Method(SNGM, {"scope": "tensor"}, lr_scale=0.3),
    "clars": Method(CLARS, lr_scale=30.0),
    "extrap-sgd": Method(ExtrapSGD),
    "lamb": Method(LAMB, lr_scale=0.1),
    "lars": Method(LARS, lr_scale=100.0),
    "lars-momentum": Method(LARS, {"variant": "momentum"}, lr_scale=0.3),
    # as in the code that the SNGM paper compared with
    "lars-unscaled": Method(LARS, {"variant": "unscaled", "max_ratio": 50.0, "clamp_grad": 10.0}, lr_scale=100.0),
    "lion": Method("pytorch_optimizer:Lion", {"weight_decay": 0.1}, lr_scale=0.003),
    "msgd": Method(torch.optim.SGD, {"momentum": 0.9}),
    "muon": Method(
        "timm.optim:Muon", {"nesterov": True, "weight_decay": 0.1}, lr_scale=0.1, embeddings={"use_fallback": True}
    ),
    "nesterov": Method(torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "nsgdm": Method(NSGDM, lr_scale=3.0),
    "schedule-free": Method(
        "schedulefree:AdamWScheduleFree", lr_scale=0.1, recipe={"schedule": "constant", "bn_samples": 10_000}
    ),
    "signum": Method("pytorch_optimizer:SignSGD", {"weight_decay": 0.1}, lr_scale=0.003),
    "sngd": Method(SNGM, {"momentum": 0.0}, lr_scale=10.0),
    "sngm": Method(SNGM),
    "spectral-sngm": Method(SpectralSNGM, {"weight_decay": 1.0}, lr_scale=0.1, embeddings={"ball": "rows"}),
}


class Found(NamedTuple):
    """A method whose class has been imported."""

    build: Callable[..., torch.optim.Optimizer]
    settings: dict[str, Any]


def names() -> list[str]:
    """Return the names of all methods.

    >>> names()[:3]
    ['adam', 'adamw', 'block-sngm']
    """
    return sorted(METHODS)


BUILT_IN = frozenset(METHODS)


def register(name: str, build: Callable[..., torch.optim.Optimizer], settings: dict[str, Any] | None = None) -> Method:
    """Register a method, so that its name can be used like the name of a built-in method.

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
    own = dict(settings or {})
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(build).parameters.values())
    if unknown := [key for key in own if key not in known and not takes_any]:
        raise TypeError(f"settings: {name} has no argument {unknown[0]!r}; it has {', '.join(known)}")
    METHODS[name] = Method(build, own)
    return METHODS[name]


def name_of(method: Any) -> str:
    """Return the name of a method given as a name, an optimizer class or a function ``(params, lr) -> optimizer``.

    Functions, and classes that worker processes cannot import, are registered under their own name.

    >>> name_of(SNGM), name_of(torch.optim.RMSprop), name_of("AdamW(eps=1e-6)")
    ('sngm', 'torch.optim:RMSprop', 'adamw(eps=1e-6)')
    """
    if isinstance(method, str):
        name, bracket, rest = method.partition("(")
        cls = None if name in METHODS else external.in_torch(name.strip())
        return (external.canonical(name) if cls is None else name_of(cls)) + bracket + rest
    if not callable(method):
        raise TypeError(f"a method is a name, an optimizer class or a function (params, lr), got {method!r}")
    for name, registered in METHODS.items():
        if registered.build is method and not registered.settings:
            return name
    if (known := getattr(method, "__name__", "")) and external.in_torch(known) is method:
        return f"torch.optim:{known}"
    if isinstance(method, type) and importable(method):
        return f"{method.__module__}:{method.__qualname__}"
    name = getattr(method, "__name__", type(method).__name__).strip("<>")
    if name == "lambda":
        name = f"lambda-{digest_of(method)[:4]}"  # a study may compare several lambdas
    name = f"own-{name}" if name in BUILT_IN else name
    register(name, method)
    return name


def source_of(name: str) -> str | None:
    """Return a checksum of the source code of a registered method or of ``file.py:Class``.

    Return None for built-in methods, and for classes named by their module, also if the module is the user's own.
    """
    if name in METHODS:
        return None if name in BUILT_IN else digest_of(METHODS[name].build, METHODS[name].settings)
    return external.checksum_of(name)


def importable(thing: Any) -> bool:
    """Return whether another process can import a class or function by its module and name."""
    found: Any = sys.modules.get(thing.__module__) if thing.__module__ != "__main__" else None
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is thing


def create(name: str, params: Any, **settings: Any) -> torch.optim.Optimizer:
    """Build an optimizer by name.

    Args:
        name: one of :func:`names`, a class of torch such as ``'AdamW'``, ``'package.module:Class'``,
            ``'file.py:Class'``, or a name in another registry, such as ``'timm:nadamw'`` or
            ``'pytorch_optimizer:lion'``.
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
        TypeError: the method does not have one of the settings, or requires a setting besides `lr` that is missing.

    >>> builder("msgd", {"nesterov": True}).keywords
    {'momentum': 0.9, 'nesterov': True}
    """
    method = find(name)
    arguments = {**method.settings, **settings}
    signature = signature_of(method.build)
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
    """Return the names of a method's settings: only `lr` and the registered ones if its library is not installed.

    >>> settings_of("msgd")[:2]
    ['lr', 'momentum']
    """
    if name in METHODS and not is_installed(name):
        return ["lr", *METHODS[name].settings]
    return list(signature_of(find(name).build).parameters)[1:]  # the first argument is `params`


def find(name: str) -> Found:
    """Return the class and defaults of a method; for an unknown name, raise ValueError with the closest known name."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    method = METHODS.get(name)
    if method is None:
        in_torch = external.in_torch(name)
        if in_torch is None and ":" not in name:
            raise ValueError(
                f"method must be one of {', '.join(names())}, a class of torch.optim such as 'RMSprop', or any class "
                f"as 'package.module:Class', 'file.py:Class', 'timm:NAME' or 'pytorch_optimizer:NAME', got {name!r}"
                f"{nearest(name, names())}"
            )
        method = Method(in_torch or name)
    if not isinstance(method.build, str):
        return Found(method.build, method.settings)
    cls, settings = external.load(method.build)
    return Found(cls, {**settings, **method.settings})


def is_installed(name: str) -> bool:
    """Return whether the library of a registered method is installed.

    >>> is_installed("sngm")
    True
    """
    build = METHODS[name].build
    return not isinstance(build, str) or importlib.util.find_spec(build.partition(":")[0].partition(".")[0]) is not None


def usual_decay(name: str, of_task: float) -> float:
    """Return a method's default weight decay on a task: its own default or, if that is 0 or absent, `of_task`.

    >>> usual_decay("adamw", 1e-4), usual_decay("sngm", 1e-4)
    (0.01, 0.0001)
    """
    own = METHODS[name].settings.get("weight_decay") if name in METHODS else None
    if own is None:
        method = find(name)
        parameter = signature_of(method.build).parameters.get("weight_decay")
        own = method.settings.get("weight_decay", parameter.default if parameter else None)
    return float(own) if own and isinstance(own, (int, float)) else of_task


def nearest(word: str, words: list[str]) -> str:
    """Return " (did you mean ...?)" for an error message if one of the words is close to `word`, else ""."""
    word = word.lower()  # all names of methods and tasks are lower case
    near = difflib.get_close_matches(word, words)
    alike = [difflib.SequenceMatcher(None, word, other).ratio() for other in near]
    best = [repr(other) for other, ratio in zip(near, alike, strict=True) if ratio >= alike[0] - 0.1]
    return f" (did you mean {' or '.join(best)}?)" if best else ""


def decay_groups(
    model: nn.Module, weight_decay: float, *, embeddings: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups of a model: weights with decay, and biases and normalisation layers without decay.

    Parameters of at most one dimension count as biases, since scales and gains should not decay either. SNGM's global
    norm is taken over all groups.

    Args:
        model: the model.
        weight_decay: the weight decay of the first group.
        embeddings: settings of a third group, to which the weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` then
            belong, such as ``{"ball": "rows"}`` for :class:`SpectralSNGM`. They decay like other weights, unless the
            settings have a `weight_decay`.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    >>> [(len(group["params"]), group["weight_decay"]) for group in decay_groups(model, 1e-4)]
    [(1, 0.0001), (3, 0.0)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    checks.number("weight_decay", weight_decay, 0.0)
    if embeddings is not None and (not isinstance(embeddings, dict) or "params" in embeddings):
        raise TypeError(f"embeddings must be a dict of settings, such as {{'ball': 'rows'}}, got {embeddings!r}")
    decayed: list[Tensor] = []
    exempt: list[Tensor] = []
    # first, because an output layer may share its weight with an embedding
    found = [module for module in model.modules() if isinstance(module, EMBEDDINGS)] if embeddings else []
    tables = list(dict.fromkeys(p for module in found for p in module.parameters(recurse=False)))
    seen = set(map(id, tables))
    for module in model.modules():
        is_norm = re.search("[Nn]orm(?![a-z])", type(module).__name__)  # LayerNorm2d, not NormalLinear
        for name, p in module.named_parameters(recurse=False):
            if id(p) not in seen:
                seen.add(id(p))
                (exempt if is_norm or p.ndim <= 1 or "bias" in name else decayed).append(p)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
        {"params": tables, "weight_decay": weight_decay, **(embeddings or {})},
    ]
    return [group for group in groups if group["params"]]
