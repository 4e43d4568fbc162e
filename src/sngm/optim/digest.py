"""Checksums of user code: functions, classes and objects, with all values that their results depend on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import re
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")}
    | {str(Path(__file__).resolve().parents[1])}
)
OF_MODULE = {*vars(nn.Module())} - {"training"}


def digest_of(*things: Any) -> str:
    """Return a checksum of values, functions and classes, which changes if their code or a value they use changes.

    The checksum covers the defaults, closures and global variables of the user's own functions, the attributes of
    objects, and tensors. For functions and classes of installed packages, it covers only the names.

    >>> digest_of({"scale": torch.ones(2)}) == digest_of({"scale": torch.zeros(2)})
    False
    """
    checksum = hashlib.sha256()
    seen: dict[int, Any] = {}
    for thing in things:
        try:
            for text in describe(thing, seen):
                checksum.update(text.encode(errors="replace") + b"\0")
        except RecursionError:
            checksum.update(f"{type(thing)}, nested too deeply".encode())
    return checksum.hexdigest()[:16]


def describe(thing: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Yield texts that together describe a value. `seen` holds the values described so far, to stop at cycles."""
    if isinstance(thing, (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        yield repr(thing)
        return
    if id(thing) in seen:
        yield f"again {list(seen).index(id(thing))}"
        return
    seen[id(thing)] = thing  # keep a reference, so that no other value gets the same id
    if isinstance(thing, Tensor):
        yield f"{thing.dtype} {tuple(thing.shape)} {thing.layout}"
        if thing.layout == torch.strided and not thing.is_meta:
            plain = thing.detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield hashlib.sha256(plain.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        elif not thing.is_meta:
            whole = thing.detach().cpu().to_sparse().coalesce()
            yield from each(seen, whole.indices(), whole.values())
    elif isinstance(thing, np.ndarray) and thing.dtype != object:
        yield f"{thing.dtype} {thing.shape} {hashlib.sha256(thing.tobytes()).hexdigest()}"
    elif isinstance(thing, logging.Logger):
        yield thing.name
    elif isinstance(thing, types.ModuleType):
        yield thing.__name__
        if not in_library(getattr(thing, "__file__", None) or str(Path(__file__))):
            yield from describe({k: v for k, v in vars(thing).items() if not k.startswith("__")}, seen)
    elif isinstance(thing, property):
        yield from each(seen, thing.fget, thing.fset, thing.fdel)
    elif isinstance(thing, (set, frozenset)):
        yield from sorted(digest_of(element) for element in thing)
    elif isinstance(thing, types.MethodType):
        yield from each(seen, thing.__func__, thing.__self__)
    elif isinstance(thing, types.FunctionType):
        yield from describe_function(thing, seen)
    elif isinstance(thing, functools.partial):
        yield from each(seen, thing.func, thing.args, thing.keywords)
    elif isinstance(thing, type):
        yield f"{thing.__module__}.{thing.__qualname__}"
        if is_own(thing):
            yield from each(seen, *thing.__bases__)
            for name, value in sorted(vars(thing).items()):
                if not name.startswith("__") or isinstance(value, types.FunctionType):
                    yield name
                    yield from describe(getattr(value, "__func__", value), seen)
    elif isinstance(thing, dict):
        yield str(len(thing))
        for key, value in thing.items():
            yield from each(seen, key, value)
    elif isinstance(thing, (list, tuple)):
        yield str(len(thing))
        yield from each(seen, *thing)
    elif isinstance(thing, nn.Module):
        tensors = [dict(thing.named_parameters(recurse=False)), dict(thing.named_buffers(recurse=False))]
        yield from each(seen, type(thing), *tensors, dict(thing.named_children()))
        yield from describe({name: value for name, value in vars(thing).items() if name not in OF_MODULE}, seen)
    elif isinstance(getattr(thing, "__dict__", None), dict):
        yield from each(seen, type(thing), vars(thing))
    elif slots := [name for cls in type(thing).__mro__ for name in vars(cls).get("__slots__", ())]:
        yield from each(seen, type(thing), {name: getattr(thing, name, None) for name in slots})
    else:
        yield without_addresses(repr(thing))


def each(seen: dict[int, Any], *things: Any) -> Iterator[str]:
    """Yield the descriptions of several values."""
    for thing in things:
        yield from describe(thing, seen)


def describe_function(function: types.FunctionType, seen: dict[int, Any]) -> Iterator[str]:
    """Yield the code of a function, and the values that it uses."""
    yield f"{function.__module__}.{function.__qualname__}"
    if not is_own(function):
        return
    code, source = function.__code__, ""
    if Path(code.co_filename).is_file():  # worker processes lack the source of notebooks and prompts
        with contextlib.suppress(OSError):  # the file is shorter now
            source = inspect.getsource(code)
    yield source
    if not source or function.__name__ == "<lambda>":  # several lambdas may be on one line
        yield from describe_code(code)
    yield from each(seen, function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield from describe(cell.cell_contents, seen)
        except ValueError:  # an empty closure cell
            yield "empty"
    for name in sorted(names_in(function.__code__)):
        if name in function.__globals__:
            yield name
            yield from describe(function.__globals__[name], seen)


def describe_code(code: types.CodeType) -> Iterator[str]:
    """Yield the bytecode, names and constants of a function, for functions whose source is missing or ambiguous."""
    yield f"{code.co_code.hex()} {code.co_names}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from describe_code(constant)
        else:
            # the repr of a set differs between processes
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of the global variables and attributes that a function, or a function inside it, uses."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names}.union(*inner)


def is_own(thing: Any) -> bool:
    """Return whether a class or function is the user's own, not from an installed package."""
    file = getattr(sys.modules.get(thing.__module__), "__file__", None)
    if file is None:
        return thing.__module__ not in sys.builtin_module_names
    return not in_library(file)


def in_library(file: str) -> bool:
    """Return whether a file belongs to Python, an installed package or sngm."""
    return str(Path(file).resolve()).startswith(LIBRARIES)


def without_addresses(text: str) -> str:
    """Return `text`, the repr of an object, without memory addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", text, flags=re.IGNORECASE)
