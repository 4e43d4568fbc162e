"""Load the user's own code and optimizer classes of other libraries by name."""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MAX_MODULE_DEPTH = 50  # most names in a module path, because Python imports packages recursively
INSTALL = {"timm": "timm", "pytorch_optimizer": "pytorch-optimizer", "schedulefree": "schedulefree"}


def load(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return an optimizer class, and the default settings that its library registers for the name.

    Args:
        name: ``package.module:Class``, ``file.py:Class``, or a name in the registry of timm or pytorch_optimizer, such
            as ``timm:nadamw``.

    Raises:
        ValueError: there is no such class; the message says which library to install if one is missing.
        TypeError: the class is not an optimizer.
    """
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py") and not is_module_name(place):
        raise ValueError(f"no optimizer class at {name[:80]!r}: write package.module:Class or file.py:Class")
    try:
        module = _import(place)
        found, settings = _registered(module, attribute)
    except (ImportError, AttributeError, ValueError, TypeError, OSError, SyntaxError) as error:
        raise ValueError(f"no optimizer class at {name!r}: {error}") from error
    if found is None:
        raise ValueError(f"no optimizer class at {name!r}: {place} has no {attribute!r}")
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise TypeError(f"{name!r} must name a subclass of torch.optim.Optimizer, got a {type(found).__name__}")
    return found, settings


def _import(place: str) -> Any:
    """Return the module at ``file.py`` or ``package.module``.

    Raises:
        ImportError: a library that sngm uses fails to import; its own error may be of any type.
    """
    if place.endswith(".py"):
        return load_file(Path(place))
    library = place.partition(".")[0]
    try:
        return importlib.import_module(place)
    except Exception as error:
        if library not in INSTALL:
            raise
        missing = getattr(error, "name", None)  # perhaps another library, which this one needs
        install = f"; pip install {INSTALL[missing]}" if missing in INSTALL else ""
        raise ImportError(f"{library} cannot be imported: {error}{install}") from error


def _registered(module: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the class that the library's registry has under `name`, and its defaults; else the module's attribute."""
    if module.__name__ == "timm":
        from timm import optim

        if name.lower() in optim.list_optimizers():
            defaults = optim.get_optimizer_info(name).defaults or {}
            return optim.get_optimizer_class(name, bind_defaults=False), dict(defaults)
        module = optim
    elif module.__name__ == "pytorch_optimizer" and name.lower() in module.get_supported_optimizers():
        return module.load_optimizer(name), {}
    return getattr(module, name, None), {}


def in_torch(name: str) -> type[torch.optim.Optimizer] | None:
    """Return torch's optimizer class for a name such as ``AdamW`` or ``torch.optim.AdamW``; None if there is none.

    >>> in_torch("torch.optim.AdamW") is in_torch("AdamW") is torch.optim.AdamW
    True
    """
    found = getattr(torch.optim, name.removeprefix("torch.optim."), None)
    return found if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) else None


def is_module_name(text: str) -> bool:
    """Return whether text is a valid module path: at most MAX_MODULE_DEPTH identifiers joined by dots.

    >>> is_module_name("torch.optim"), is_module_name(".."), is_module_name("a..b")
    (True, False, False)
    """
    names = text.split(".")
    return len(names) <= MAX_MODULE_DEPTH and all(name.isidentifier() for name in names)


def canonical(name: str) -> str:
    """Return ``file.py:Class`` with the absolute path of the file; return other names unchanged."""
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).resolve()}:{attribute}" if place.endswith(".py") else name


def checksum_of(name: str) -> str | None:
    """Return the checksum that the file of ``file.py:Class`` had when it was loaded; None for other names."""
    place = name.rpartition(":")[0]
    return str(load_file(Path(place)).__checksum__) if place.endswith(".py") else None


def load_file(path: Path) -> Any:
    """Return a Python file as a module; only the first call executes the file."""
    path = path.resolve()
    module_name = f"sngm_file_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no Python file at {path}")
    module = importlib.util.module_from_spec(spec)
    module.__checksum__ = hashlib.sha256(path.read_bytes()).hexdigest()[:16]  # type: ignore[attr-defined]
    sys.modules[module_name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the file may import modules from its own folder
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def restores_its_state(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer resumes exactly: a new one that loads its `state_dict` takes the same next steps.

    Also return True, without a comparison, if `step` fails without arguments, for example because it needs a closure.
    """

    def take_steps(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], numbers: range) -> None:
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()

    def twin(params: list[nn.Parameter]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        copies = [nn.Parameter(p.detach().clone()) for p in params]
        optimizer = build(copies)
        set_mode(optimizer, training=True)
        return copies, optimizer

    with torch.random.fork_rng(devices=[]):
        params, optimizer = twin([nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))])
        try:
            take_steps(optimizer, params, range(3))
        except Exception:
            return True
        try:
            saved = copy.deepcopy(optimizer.state_dict())
            others, restored = twin(params)
            restored.load_state_dict(saved)
            for one, weights in ((optimizer, params), (restored, others)):
                torch.manual_seed(0)
                take_steps(one, weights, range(3, 5))
        except Exception:
            return False
        return all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def set_mode(optimizer: torch.optim.Optimizer, *, training: bool) -> None:
    """Switch a schedule-free optimizer between training and evaluation weights; do nothing for other optimizers."""
    switch = getattr(optimizer, "train" if training else "eval", None)
    if callable(switch):
        switch()
