"""Where tensors lie, and how: asked of all of a model's in one call.

A step asks this of every parameter and gradient, because it must not write where one no longer is.
From Python each question costs about as much as a tensor's whole look in C (look.c), which is compiled as Triton
compiles its own parts of the host: once, into Triton's cache. Where that fails, as without a C compiler, the questions
are asked one by one.

A look has the addresses, 8 bytes each, and 0 for what is no tensor; devices, dtypes, shapes and strides, which are only
good to be compared with another look's; and the bits that are set in any address. BufferError: a tensor has no memory
of its own, because it is sparse, or on the meta device, or wraps others.
"""

from __future__ import annotations

import struct
import sysconfig
from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Look = tuple[bytes, Any, int]


def look_one_by_one(tensors: Iterable[Any]) -> Look:
    """Look at tensors, without a compiler."""
    addresses: list[int] = []
    forms: list[Any] = []
    for t in tensors:
        if not isinstance(t, Tensor):
            addresses.append(0)
            forms.append(None)
            continue
        try:
            addresses.append(t.data_ptr())
        except RuntimeError:
            addresses.append(0)
        if not addresses[-1] and (t.layout is not torch.strided or t.numel()):
            raise BufferError("a tensor has no memory of its own to look at")
        # of one element a stride says nothing
        strides = () if t.is_contiguous() else [n > 1 and s for n, s in zip(t.shape, t.stride(), strict=True)]
        forms.append((t.device, t.dtype, t.shape, strides))
    return struct.pack(f"{len(addresses)}q", *addresses), forms, reduce(or_, addresses, 0)


def compiled() -> Callable[[Iterable[Any]], Look]:
    """`look` in C."""
    from triton.runtime.build import compile_module_from_src

    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton looks for them
    headers = Path(torch.__file__).parent / "include"
    for header in (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h", headers / "ATen" / "dlpack.h"):
        if not header.exists():  # before a compiler complains of it, on the user's screen
            raise FileNotFoundError(header)
    source = Path(__file__).with_suffix(".c").read_text()
    # Triton may know a module by its source alone, and this one is good for one version of torch's headers
    source = f"/* for torch {torch.__version__} */\n{source}"
    module = compile_module_from_src(src=source, name="sngm_look", include_dirs=[str(headers)])
    found: Callable[[Iterable[Any]], Look] = module.look
    return found


try:
    look = compiled()
except Exception:  # whatever is missing: the same is seen, in more time
    look = look_one_by_one
