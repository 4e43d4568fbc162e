"""Where tensors lie, and how: asked of all of a model's in one call.

A step asks this of every parameter and of every gradient, because it must not write where a parameter no longer is.
From Python each question costs about as much as a tensor's whole look in C (look.c), which is compiled as Triton
compiles its own parts of the host: once, into Triton's cache. Where that fails, as without a C compiler, the questions
are asked one by one.
"""

from __future__ import annotations

import struct
import sysconfig
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# addresses, 8 bytes each and 0 for None; device, dtype, shape and strides of all, to be compared; the bits set in any
# address
Look = tuple[bytes, Any, int]
Tensors = Sequence[Tensor | None]


def look_one_by_one(tensors: Tensors) -> Look:
    """What `look` sees, without a compiler."""
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    forms = [None if t is None else (t.device, t.dtype, t.shape, t.stride()) for t in tensors]
    return struct.pack(f"{len(addresses)}q", *addresses), forms, reduce(or_, addresses, 0)


def compiled() -> Callable[[Tensors], Look]:
    """`look` in C."""
    from triton.runtime.build import compile_module_from_src

    headers = Path(torch.__file__).parent / "include"
    for header in (Path(sysconfig.get_paths()["include"]) / "Python.h", headers / "ATen" / "dlpack.h"):
        if not header.exists():  # before a compiler complains of it, on the user's screen
            raise FileNotFoundError(header)
    source = Path(__file__).with_suffix(".c").read_text()
    module = compile_module_from_src(src=source, name="sngm_look", include_dirs=[str(headers)])
    found: Callable[[Tensors], Look] = module.look
    return found


try:
    look = compiled()
except Exception:  # whatever is missing: the same is seen, in more time
    look = look_one_by_one
