"""What one device holds of a plan: its tables, the launches over them, and graphs of those."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..torch_internals import raw_stream
from . import ONE_ROUNDING
from .layout import FIELDS, ROWS, SETTINGS
from .replay import Replays, serves

NO_CONTEXT = contextlib.nullcontext()
TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
CODES = {torch.int32: "i", torch.int64: "q", torch.float64: "d"}  # of numbers in tables, as `struct` names them
# arguments that may be other tensors at each step
CHANGING = ("rounds", "scale", "found_inf", "means", "norm", "skipped")
changing = itemgetter(*CHANGING)


@dataclass(frozen=True)
class Kind:
    """What the tensors of one launch have in common; complex ones count as pairs of reals."""

    param: torch.dtype
    grad: torch.dtype
    aligned: bool
    buffered: bool

    def constants(self) -> dict[str, Any]:
        """What the kernels are compiled for."""
        wide = torch.float64 if self.param == torch.float64 else torch.float32
        return {
            "P": TRITON_DTYPES[self.param],
            "G": TRITON_DTYPES[self.grad],
            "WIDE": TRITON_DTYPES[wide],
            "ALIGNED": self.aligned,
            "BUFFERED": self.buffered,
        }


class Launch:
    """One kernel over the tensors of one kind."""

    def __init__(self, kernel: Any, values: dict[str, Any]) -> None:
        self.kernel = kernel
        self.grid = (values["programs"], 1, 1)
        self.arguments = [values[name] for name in kernel.arg_names]
        self.changing = [(i, name) for i, name in enumerate(kernel.arg_names) if name in CHANGING]
        self.compiled: Any = None

    def __call__(self, pool: dict[str, Any], stream: int | None) -> None:
        arguments = self.arguments
        if self.compiled is not None:
            for i, name in self.changing:
                arguments[i] = pool[name].data_ptr()
            self.compiled(*arguments, stream=stream)
            return
        for i, name in self.changing:
            arguments[i] = pool[name]
        compiled = self.kernel[self.grid](*arguments, num_warps=pool["warps"], **ONE_ROUNDING)
        if compiled is not None:  # the interpreter has none
            # From now on past Triton's look-up by types, which do not change, and with addresses in place of tensors,
            # which would be asked for theirs: both cost more than the launch. `pool` keeps the memory.
            self.compiled = compiled[self.grid]
            self.arguments = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]


class Place:
    """The tables on one device."""

    def __init__(self, device: torch.device, kinds: dict[int, Kind], rows: list[list[int]], groups: int) -> None:
        self.device = device
        elements, first_chunk, chunks = (FIELDS.index(name) for name in ("elements", "first_chunk", "chunks"))
        sizes = chunk_sizes(sum(rows[i][elements] for i in kinds))
        owners: list[int] = []
        self.sections: list[dict[str, Any]] = []  # one launch each
        for kind in sorted(set(kinds.values()), key=str):
            base = len(owners)
            for i in (i for i, own in kinds.items() if own == kind):
                count = -(-rows[i][elements] // sizes["CHUNK"])
                rows[i][first_chunk], rows[i][chunks] = len(owners), count
                owners += [i] * count
            if len(owners) > base:
                self.sections.append({**kind.constants(), "base": base, "programs": len(owners) - base})

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        sums = zeros(len(ROWS), len(rows))
        self.unsaved_rounds = zeros(1, dtype=torch.int64)  # for `measure` to count in where none is at random
        self.one, self.zero = torch.ones((), device=device), torch.zeros((), device=device)
        self.pool: dict[str, Any] = {
            **sizes,
            "table": zeros(len(rows), len(FIELDS), dtype=torch.int64),
            "owners": zeros(max(len(owners), 1), dtype=torch.int32),
            "sums": sums,
            "whole": sums,  # another tensor where sums of several places or processes must be added up
            "partial": zeros(2, max(len(owners), 1)),
            "spans": zeros(1 + groups),
            "counters": zeros(len(rows) + 1, dtype=torch.int32),
            "rounds": self.unsaved_rounds,
            "means": sums,
            "norm": zeros(1),
            "skipped": zeros(1, dtype=torch.int64),
            "chunks": len(owners),
            "tensors": len(rows),
            "groups": groups,
            "busy": len(set(owners)),
        }
        self.kept = [send(rows, self.pool["table"]), send(owners or [0], self.pool["owners"])]
        self.renew()

    def renew(self) -> None:
        """Make tables of what may differ from step to step."""
        tensors, groups = self.pool["tensors"], self.pool["groups"]
        self.pool["grads"] = torch.zeros(tensors, dtype=torch.int64, device=self.device)
        self.pool["settings"] = torch.zeros(groups, len(SETTINGS), dtype=torch.float64, device=self.device)
        self.pool["rates"] = torch.zeros(groups, dtype=torch.int64, device=self.device)
        self.sent: dict[str, Any] = {}
        self.forget()

    def forget(self) -> None:
        """Drop the launches, which are compiled for some constants."""
        self.ready: dict[Any, list[Launch]] = {}  # by kernel, in the order of the step
        self.replays = Replays() if serves(self.device) else None

    def update(self, name: str, values: bytes | list[Any]) -> None:
        """Send `values` to one of those tables, unless they are there already."""
        if self.sent.get(name) != values:
            self.sent[name] = values
            self._send(values, self.pool[name])

    def scalar(self, value: Tensor | float) -> Tensor:
        """A GradScaler's number here."""
        return torch.as_tensor(value, dtype=torch.float32, device=self.device)

    def numbers(self, values: Sequence[Any] | Tensor) -> Tensor:
        """Numbers, or tensors of one element, as one tensor here; numbers are copied without waiting."""
        if isinstance(values, Tensor):
            return values.to(self.device, torch.float64).contiguous()  # the kernels know no strides
        there = torch.empty(len(values), dtype=torch.float64, device=self.device)
        if any(isinstance(value, Tensor) for value in values):
            for place, value in zip(there.unbind(), values, strict=True):
                place.copy_(value.reshape(())) if isinstance(value, Tensor) else place.fill_(value)
        else:
            self._send(list(values), there)
        return there

    def _send(self, values: bytes | list[Any], to: Tensor) -> None:
        pinned = send(values, to)
        if self.capturing():
            self.kept.append(pinned)  # a graph copies from there at every replay

    def capturing(self) -> bool:
        """Whether what happens here is being recorded into a CUDA graph."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def stream(self) -> int | None:
        """The stream that launches go to, as Triton wants it named."""
        return raw_stream(self.device) if self.device.type == "cuda" else None

    def here(self) -> Any:
        """The context in which launches go to this device."""
        current = self.device.type != "cuda" or self.device.index == torch.cuda.current_device()
        return NO_CONTEXT if current else torch.cuda.device(self.device)


def chunk_sizes(elements: int) -> dict[str, int]:
    """How many elements a program works on, and how many at once: enough programs to fill a GPU, and not many more."""
    chunk = 1024 if elements < 1 << 22 else 4096 if elements < 1 << 26 else 8192
    return {"CHUNK": chunk, "BLOCK": 1024, "warps": 4}


def send(values: bytes | list[Any], to: Tensor) -> Tensor:
    """Copy numbers, or rows of them, to a device without waiting for it; returns the memory they are copied from."""
    packed = values if isinstance(values, bytes) else pack(values, to)
    count = len(packed) // to.element_size()  # of another one than `to` has, copy_ would complain
    pinned = torch.empty(count, dtype=to.dtype, device="cpu", pin_memory=to.device.type == "cuda")
    start = pinned.data_ptr()
    if packed and not start:  # under a FakeTensorMode
        raise RuntimeError("a step needs memory for its tables, and torch gives none here")
    ctypes.memmove(start, packed, len(packed))
    to.view(-1).copy_(pinned, non_blocking=True)
    return pinned


def pack(values: list[Any], to: Tensor) -> bytes:
    """Numbers, or rows of them, as `to` holds them, in a fraction of torch.tensor's time."""
    numbers = values if to.ndim == 1 else list(chain.from_iterable(values))
    return struct.pack(f"{len(numbers)}{CODES[to.dtype]}", *numbers)
