"""The host side of a step: look up the tensors' addresses, copy them to the device as a table, launch the kernels.

Addresses are looked up at every step. A `Layout`, which assigns programs to tensors and has scratch memory, is reused
while the addresses of parameters and state, and the shapes, strides and dtypes of all tensors, stay the same.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain, compress, groupby, zip_longest
from operator import itemgetter, or_
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from ..buckets import Bucket, Work
from ..sharded_norms import Shards, local
from ..torch_internals import same_metadata
from . import ONE_ROUNDING, Unsupported, support
from . import triton_kernels as kernels
from .table_schema import FIELDS, SETTINGS, SQUARES, VARIANTS

Columns = list[list[Any]]  # parameters, gradients, then each kind of state
Rows = list[list[int]]  # their addresses
BLOCK = 1024  # number of elements that a program processes at a time
WIDEST_LOAD = 16  # bytes; tensors that do not start at a multiple of this are launched separately
OF_GRAD, OF_PARAM, OF_DIRECTION = range(len(SQUARES))
TRITON_DTYPES = {getattr(torch, name): getattr(tl, name) for name in ("float16", "bfloat16", "float32", "float64")}


@dataclass
class KernelStep:
    """Inputs of the kernels for one step of an optimizer."""

    method: str  # "lamb", or a branch of `triton_kernels.coefficients`
    scope: str  # scope of SNGM's norm
    home: torch.device
    params: list[Any]  # parameters of all groups, in order
    grads: list[Any]  # None for a parameter without a gradient
    states: list[dict[str, Any]]
    keys: list[tuple[str, ...]]  # for each group, the names of its buffers and counts in `states`
    lengths: list[int]  # number of parameters of each group
    settings: Sequence[Mapping[str, float | Tensor]]  # for each group, named as in table_schema.SETTINGS
    adapt: list[bool | None]  # for each group
    shards: Shards
    grad_norm: Tensor
    skipped: Tensor
    scale: Tensor | None
    found_inf: Tensor | None
    rounding: Tensor | None  # counter of steps, if a group rounds stochastically
    mean_norms: Sequence[float | Tensor] | Tensor | None  # CLARS only: one mean norm for each parameter
    whole_square: Tensor | None  # squared norm of the whole gradient, if the optimizer has only some parameters
    captured: bool  # whether the step is captured in a CUDA graph
    held: list[Any] = field(default_factory=list)  # memory that the graph uses when it is replayed

    def __post_init__(self) -> None:
        self.has = [grad is not None for grad in self.grads]


def take_step(
    step: KernelStep, layout: Layout | None, gather: Callable[[], Work], adapts: Callable[[Bucket], list[bool]]
) -> Layout:
    """Take one step, and return the layout for the next one.

    Args:
        step: the inputs of the step.
        layout: the layout that the last step returned, or None.
        gather: function that checks all tensors and creates missing state; called if the layout cannot be reused.
        adapts: function that returns, for each tensor of a bucket, whether a ratio of norms scales its step.

    Raises:
        Unsupported: a tensor is not dense or has no storage.
    """
    columns = local_columns(step)
    rows = [] if columns is None else addresses(columns)
    if layout is None or columns is None or not layout.fits(step, columns, rows):
        with torch.no_grad():
            layout = Layout(step, gather(), adapts)
        layout.remember(step, local_columns(step))  # looked up again, because missing state has been created
        rows = layout.rows
    numbers: list[Any] = [1.0 if step.scale is None else step.scale, 0.0 if step.found_inf is None else step.found_inf]
    for own in step.settings:
        numbers += map(own.get, SETTINGS, SETTINGS.values())
    if layout.order is not None:
        rows = [[row[i] for i in layout.order] for row in rows]
    values = {
        "words": send(step, numbers, rows),
        "norm": step.grad_norm,
        "skipped": step.skipped,
        "rounds": step.skipped if step.rounding is None else step.rounding,
        "means": step.grad_norm if step.mean_norms is None else mean_norms(step, step.mean_norms),
    }
    on_other = step.home.type == "cuda" and step.home.index != torch.cuda.current_device()
    with torch.cuda.device(step.home) if on_other else contextlib.nullcontext():
        launch(step, values, layout)
    # torch's own in-place operations do this too, so that autograd rejects graphs from before the step
    torch.autograd.graph.increment_version(list(compress(step.params, step.has)))
    step.held += [values, layout.copies]
    layout.copies = []
    return layout


def local_columns(step: KernelStep) -> Columns | None:
    """Return the tensors that have a gradient: parameters, gradients, then each kind of state; shards of DTensors.

    Return None if the optimizer's `_gather` must prepare them first: create state, or redistribute gradients.
    """
    params, states, grads = step.params, step.states, step.grads
    if not all(step.has):
        params, states, grads = (list(compress(column, step.has)) for column in (params, states, grads))
    try:
        state = [list(map(itemgetter(key), states)) for key in step.keys[0]]
    except KeyError:
        return None
    columns = [params, grads, *state]
    if step.shards.sharded:
        placed = [[getattr(tensor, "placements", None) for tensor in column] for column in (params, grads)]
        if placed[0] != placed[1]:
            return None
        columns = [list(map(local, column)) for column in columns]
    return columns


def addresses(columns: Columns) -> Rows:
    """Return the address of each tensor; 0 if it has no memory."""
    try:
        return [list(map(Tensor.data_ptr, column)) for column in columns]
    except (RuntimeError, TypeError):  # a tensor subclass that wraps other tensors, or not a tensor
        return [[0] * len(column) for column in columns]


class Layout:
    """The assignment of Triton programs to tensors, and scratch memory; both are kept from step to step."""

    def __init__(self, step: KernelStep, work: Work, adapts: Callable[[Bucket], list[bool]]) -> None:
        if work.home != step.home or not support([bucket.params[0] for bucket in work.buckets]):
            raise Unsupported("the parameters are on several devices, or on one without kernels")
        self.facts: Any = None  # what `fits` compares; None if the layout is for one step only
        self.same_metadata: Any = None  # compares what `facts` lacks
        self.copies: list[Tensor] = []  # copies of gradients, needed until the step is taken
        self.launches: dict[Any, Any] = {}  # compiled kernels with their arguments
        found = []  # of each tensor: index, kind (all tensors of a launch have the same), addresses, size, group, adapt
        for bucket in work.buckets:
            bucket.match_layouts()
            self.copies += bucket.grads
            columns = [c for c in (bucket.params, bucket.grads, *bucket.buffers.values(), bucket.counts) if c]
            rows = addresses(columns)
            if any(not at and t.numel() for at, t in zip(chain(*rows), chain(*columns), strict=True)):
                raise Unsupported("a tensor has no memory of its own")
            for k, (adapt, *at) in enumerate(zip(adapts(bucket), *rows, strict=True)):
                p = bucket.params[k]
                aligned = not any(a % WIDEST_LOAD for a in at[:4])
                kind = p.dtype, bucket.grads[k].dtype, bool(bucket.buffers), aligned
                found.append((bucket.indices[k], kind, at, p.numel(), bucket.position, adapt))
        found.sort(key=itemgetter(0))
        self.rows = list(map(list, zip_longest(*(at for _, _, at, *_ in found), fillvalue=0)))
        order = sorted(range(len(found)), key=lambda i: str(found[i][1]))
        self.order = None if order == sorted(order) else order
        found = [found[i] for i in order]
        table = np.zeros((len(FIELDS), len(found)), np.int64)
        row = dict(zip(FIELDS, table, strict=True))
        row["index"][:], _, _, row["elements"][:], row["group"][:], row["adapts"][:] = zip(*found, strict=True)
        chunk = chunk_size(int(row["elements"].sum()))
        row["chunks"][:] = np.maximum(-(-row["elements"] // chunk), 1)
        ends = np.cumsum(row["chunks"])
        row["first_chunk"][:] = ends - row["chunks"]
        self.sections: list[dict[str, Any]] = []  # one launch for each kind
        base = tensors = 0
        for (param, grad, buffered, aligned), alike in groupby(found, key=itemgetter(1)):
            tensors += len(list(alike))
            end = int(ends[tensors - 1])
            wide = tl.float64 if param == torch.float64 else tl.float32
            dtypes = {"P": TRITON_DTYPES[param], "G": TRITON_DTYPES[grad], "WIDE": wide}
            self.sections.append({**dtypes, "BUFFERED": buffered, "ALIGNED": aligned, "base": base, "end": end})
            base = end
        zeros = partial(torch.zeros, dtype=torch.float64, device=step.home)
        self.values: dict[str, Any] = {
            "table": to_device(step, torch.from_numpy(table)),
            "owners": to_device(step, torch.from_numpy(np.repeat(np.arange(tensors, dtype=np.int32), row["chunks"]))),
            "sums": zeros(len(SQUARES), tensors),
            "partial": zeros(2, base),
            "spans": zeros(1 + len(step.lengths)),
            "counters": zeros(tensors + 1, dtype=torch.int32),
            "chunks": base,
            "tensors": tensors,
            "groups": len(step.lengths),
            "CHUNK": chunk,
            "BLOCK": BLOCK,
        }

    def remember(self, step: KernelStep, columns: Columns | None) -> None:
        """Let `fits` accept steps like this one, unless gradients were copied or converted for it."""
        if columns is not None and addresses(columns) == self.rows:
            self.facts = facts(step, self.rows)
            self.same_metadata = same_metadata(list(chain.from_iterable(columns)))

    def fits(self, step: KernelStep, columns: Columns, rows: Rows) -> bool:
        """Return whether a step can use this layout: everything is as remembered except addresses of gradients."""
        # in this order: torch's guards raise TypeError for another number of tensors
        return bool(self.facts == facts(step, rows) and self.same_metadata(*chain.from_iterable(columns)))


def facts(step: KernelStep, rows: Rows) -> tuple[Any, ...]:
    """Return what must not change between two steps with the same layout, except the metadata of tensors."""
    params, grads, *state = rows
    aligned = reduce(or_, grads) % WIDEST_LOAD == 0 or [at % WIDEST_LOAD == 0 for at in grads]
    empty = grads.count(0)  # without memory, for example freed since the last step
    return step.has, step.lengths, step.keys, step.adapt, step.shards, params, state, aligned, empty


def chunk_size(elements: int) -> int:
    """Return the number of elements per program, such that the programs for `elements` in total can fill a GPU."""
    return 1024 if elements < 1 << 22 else 4096 if elements < 1 << 26 else 8192


def constants(step: KernelStep) -> dict[str, Any]:
    """Return the compile-time constants of the kernels that do not depend on the kind of tensors."""
    settings = step.settings
    return {
        "METHOD": step.method,
        "SCOPE": step.scope,
        "LAMB": step.method == "lamb",
        "BY_GROUP": step.scope == "group",
        "COUPLED_DECAY": step.method == "sngm" and any(own["weight_decay"] and not own["mode"] for own in settings),
        "PARAM_NORMS": step.method in ("lars", "clars"),
        "MEANS": step.method == "clars",
        "AVERAGES": step.method == "lars" and any(own["mode"] == VARIANTS.index("momentum") for own in settings),
        "CLAMPS": any(math.isfinite(own.get("clamp_grad", math.inf)) for own in settings),
        "STOCHASTIC": step.rounding is not None,
    }


def send(step: KernelStep, numbers: Sequence[Any], rows: Rows) -> Tensor:
    """Copy float64 numbers and addresses to the device in one transfer of 8-byte words, and return the copy."""
    there = {i: value for i, value in enumerate(numbers) if isinstance(value, Tensor)}
    known = [0.0 if i in there else number for i, number in enumerate(numbers)]
    words = struct.pack(f"{len(known)}d{sum(map(len, rows))}q", *known, *chain.from_iterable(rows))
    sent = to_device(step, torch.frombuffer(bytearray(words), dtype=torch.int64))
    for i, value in there.items():  # copied within the device
        sent.view(torch.float64)[i] = value.reshape(())
    return sent


def mean_norms(step: KernelStep, given: Sequence[float | Tensor] | Tensor) -> Tensor:
    """Return CLARS's mean norms as one float64 tensor on the device."""
    if isinstance(given, Tensor):
        return given.to(step.home, torch.float64).contiguous()
    return send(step, given, []).view(torch.float64)


def to_device(step: KernelStep, values: Tensor) -> Tensor:
    """Return a copy of a tensor on the device of the step, without waiting for the device."""
    if step.captured:
        values = values.pin_memory()
        step.held.append(values)  # the graph copies from this tensor at every replay
    return values.to(step.home, non_blocking=True, copy=True)


def launch(step: KernelStep, values: dict[str, Any], layout: Layout) -> None:
    """Launch each kernel of the method once for every kind of tensor; between kernels, sum squared norms over ranks."""
    fixed = constants(step)
    addresses = {name: value.data_ptr() for name, value in values.items()}

    def run(kernel: Any) -> None:
        # Triton's own look-up by the types of all arguments takes three times as long as the launch
        key = kernel.__name__, step.grad_norm.dtype, *fixed.values()
        if key in layout.launches:
            for runner, arguments, changing in layout.launches[key]:
                for i, name in changing:
                    arguments[i] = addresses[name]
                runner(*arguments)
            return
        ready = []
        for section in layout.sections:
            every = {**layout.values, **fixed, **values, **section}
            grid = section["end"] - section["base"], 1, 1
            compiled = kernel[grid](*(every[name] for name in kernel.arg_names), num_warps=4, **ONE_ROUNDING)
            if compiled is not None:  # None in the interpreter, which compiles nothing
                addressed = {name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in every.items()}
                changing = [(i, name) for i, name in enumerate(kernel.arg_names) if name in values]
                ready.append((compiled[grid], [addressed[name] for name in kernel.arg_names], changing))
        if ready:
            layout.launches[key] = ready

    run(kernels.measure)
    if step.method in ("lars", "clars"):
        sum_rows(step, layout.values, OF_GRAD, OF_PARAM)
    elif step.scope == "tensor":
        sum_rows(step, layout.values, OF_GRAD, OF_GRAD)
    else:
        sum_spans(step, layout.values)
    if step.method == "lamb":
        run(kernels.moments)
        sum_rows(step, layout.values, OF_PARAM, OF_DIRECTION)
        run(kernels.apply)
    else:
        run(kernels.update)
        if fixed["AVERAGES"]:
            sum_rows(step, layout.values, OF_DIRECTION, OF_DIRECTION)
            run(kernels.apply)


def sum_spans(step: KernelStep, values: dict[str, Any]) -> None:
    """In ``values["spans"]``, sum squared norms over ranks (all, or by group), or store the step's `whole_square`."""
    if step.whole_square is not None:
        values["spans"][:2] = step.whole_square
    elif step.shards.active:
        of_grad = per_parameter(step, values, OF_GRAD, OF_GRAD)[0]
        spans = step.shards.spans(of_grad, step.lengths, by_group=step.scope == "group")
        values["spans"][0] = spans.sum()
        values["spans"][1 : 1 + len(spans)] = spans


def sum_rows(step: KernelStep, values: dict[str, Any], first: int, last: int) -> None:
    """In ``values["sums"]``, sum the rows `first` to `last` (see SQUARES) over ranks, separately for each tensor."""
    if step.shards.active:
        packed = step.shards.tensors(per_parameter(step, values, first, last))
        values["sums"][first : last + 1] = packed[:, values["table"][FIELDS.index("index")]]
        if first == OF_GRAD:
            values["spans"][0] = packed[0].sum()  # a tensor without a gradient here may have one on another rank


def per_parameter(step: KernelStep, values: dict[str, Any], first: int, last: int) -> Tensor:
    """Return rows `first` to `last` of ``values["sums"]`` with a column for each parameter, zero without a gradient."""
    packed = torch.zeros(last + 1 - first, len(step.params), dtype=torch.float64, device=step.home)
    packed[:, values["table"][FIELDS.index("index")]] = values["sums"][first : last + 1]
    return packed
