"""The host side of a step: gather addresses into one table, copy it to the device, launch the kernels.

No address is kept after the step that looked it up. What is kept (`Layout`) depends on the sizes of the tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from torch import Tensor

from .. import sharded_norms
from ..buckets import Bucket, Work
from . import ONE_ROUNDING, Unsupported
from . import triton_kernels as kernels
from .table_schema import ADDRESSES, FIELDS, SETTINGS, SQUARES, STEP, VARIANTS

Int64s = npt.NDArray[np.int64]
WIDEST_LOAD = 16  # bytes; tensors that do not start at a multiple of it get their own launch
OF_GRAD, OF_PARAM, OF_DIRECTION = range(len(SQUARES))
TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@dataclass
class KernelStep:
    """All that the kernels know about one step of an optimizer."""

    method: str  # "lamb", or a branch of `triton_kernels.coefficients`
    scope: str  # what a norm of SNGM spans
    work: Work
    settings: Sequence[Mapping[str, float | Tensor]]  # for each group, named as in table_schema.SETTINGS
    adapts: list[bool]  # whether a ratio of norms scales the step; for each tensor, in the order of the buckets
    grad_norm: Tensor
    skipped: Tensor
    mean_norms: Sequence[float | Tensor] | Tensor | None = None  # CLARS: for each parameter
    held: list[Any] = field(default_factory=list)  # memory that a captured CUDA graph reads when it is replayed


class Layout:
    """Which program works on which tensor, and scratch memory. Valid as long as the sizes are the same."""

    def __init__(self, chunks: Int64s, groups: int, step: KernelStep) -> None:
        self.chunks, self.groups = chunks, groups
        tensors, programs, device = len(chunks), int(chunks.sum()), step.work.home

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.values: dict[str, Any] = {
            "owners": to_device(np.repeat(np.arange(tensors, dtype=np.int32), chunks), step),
            "sums": zeros(len(SQUARES), tensors),
            "partial": zeros(2, programs),
            "spans": zeros(1 + groups),
            "counters": zeros(tensors + 1, dtype=torch.int32),
            "chunks": programs,
            "tensors": tensors,
            "groups": groups,
        }

    def fits(self, chunks: Int64s, groups: int, device: torch.device) -> bool:
        here = self.values["sums"].device
        return groups == self.groups and device == here and np.array_equal(chunks, self.chunks)


def take_step(step: KernelStep, layout: Layout | None) -> Layout:
    """Take one step, and return the layout for the next one, which may be the given one.

    Raises:
        Unsupported: a tensor has no memory that can be read in order. Nothing was changed.
    """
    work, groups = step.work, len(step.settings)
    for bucket in work.buckets:
        match_layouts(bucket)
    table, sections, sizes = gather(step)
    chunks = table[FIELDS.index("chunks")]
    if layout is None or not layout.fits(chunks, groups, work.home):
        layout = Layout(chunks, groups, step)
    values = {**layout.values, **sizes, **constants(step)}
    send(step, table, values)
    rounding = [bucket.rounding for bucket in work.buckets if bucket.rounding is not None]
    values |= {"norm": step.grad_norm, "skipped": step.skipped, "rounds": rounding[0] if rounding else step.skipped}
    values["means"] = values["numbers"] if step.mean_norms is None else mean_norms(step.mean_norms, step)
    with torch.cuda.device(work.home) if work.home.type == "cuda" else torch.no_grad():
        launch(step, values, sections)
    # as torch's own in-place operations do, so that autograd rejects graphs from before the step
    torch.autograd.graph.increment_version([p for bucket in work.buckets for p in bucket.owners])
    step.held += [values, work.buckets]
    return layout


def launch(step: KernelStep, values: dict[str, Any], sections: list[dict[str, Any]]) -> None:
    """Launch the kernels of the method, one launch for each section of tensors; sum over ranks in between."""

    def run(kernel: Any) -> None:
        for section in sections:
            every = values | section
            arguments = [every[name] for name in kernel.arg_names]
            kernel[(section["programs"],)](*arguments, num_warps=4, **ONE_ROUNDING)

    run(kernels.measure)
    if step.method == "lamb" or (step.method == "sngm" and step.scope != "tensor"):
        sum_spans(step, values)
    else:
        sum_rows(step, values, OF_GRAD, OF_GRAD if step.method == "sngm" else OF_PARAM)
    if step.method == "lamb":
        run(kernels.moments)
        sum_rows(step, values, OF_PARAM, OF_DIRECTION)
        run(kernels.apply)
    else:
        run(kernels.update)
        if values["AVERAGES"]:
            sum_rows(step, values, OF_DIRECTION, OF_DIRECTION)
            run(kernels.apply)


def sum_spans(step: KernelStep, values: dict[str, Any]) -> None:
    """Sum over ranks what the norms span."""
    if not step.work.shards.active:
        return
    by_group, lengths = step.scope == "group", step.work.lengths
    positions = [i if by_group else 0 for i, length in enumerate(lengths) for _ in range(length)]
    packed = per_parameter(step, values, OF_GRAD, OF_GRAD)[0]
    spans = step.work.shards.spans(packed, positions, len(lengths) if by_group else 1)
    values["spans"][0] = spans.sum()
    values["spans"][1 : 1 + len(spans)] = spans


def sum_rows(step: KernelStep, values: dict[str, Any], first: int, last: int) -> None:
    """Sum rows of squares over ranks, for each tensor."""
    if not step.work.shards.active:
        return
    packed = step.work.shards.tensors(per_parameter(step, values, first, last))
    values["sums"][first : last + 1] = packed[:, values["indices"]]
    if first == OF_GRAD:
        values["spans"][0] = packed[0].sum()  # a tensor without a gradient here may have one on another rank


def per_parameter(step: KernelStep, values: dict[str, Any], first: int, last: int) -> Tensor:
    """Return rows of squares with one column for each parameter, zero without a gradient."""
    packed = torch.zeros(last + 1 - first, len(step.work.shards.params), dtype=torch.float64, device=step.work.home)
    packed[:, values["indices"]] = values["sums"][first : last + 1]
    return packed


def constants(step: KernelStep) -> dict[str, Any]:
    """Return what the kernels are compiled for, besides the kinds of tensors."""
    settings = [{**SETTINGS, **own} for own in step.settings]
    return {
        "METHOD": step.method,
        "SCOPE": step.scope,
        "LAMB": step.method == "lamb",
        "BY_GROUP": step.scope == "group",
        "COUPLED_DECAY": step.method == "sngm" and any(own["weight_decay"] and not own["mode"] for own in settings),
        "PARAM_NORMS": step.method in ("lars", "clars"),
        "MEANS": step.method == "clars",
        "AVERAGES": step.method == "lars" and any(own["mode"] == VARIANTS.index("momentum") for own in settings),
        "CLAMPS": any(math.isfinite(own["clamp"]) for own in settings),
        "STOCHASTIC": any(own["stochastic"] for own in settings),
    }


def gather(step: KernelStep) -> tuple[Int64s, list[dict[str, Any]], dict[str, int]]:
    """Return the table of the step's tensors, sorted by kind; a section for each kind; and the sizes of chunks."""
    buckets = step.work.buckets
    columns: dict[str, list[Tensor]] = {"param": [p for b in buckets for p in b.params]}
    columns["grad"] = [g for b in buckets for g in b.grads]
    empty = torch.empty(0, device="cpu")
    for name, key in (("buffer", 0), ("second_buffer", 1)):
        columns[name] = [t for b in buckets for t in ([*b.buffers.values(), *[[empty] * len(b.params)] * 2][key])]
    columns["count"] = [t for b in buckets for t in (b.counts or [empty] * len(b.params))]
    table = np.zeros((len(FIELDS), len(columns["param"])), np.int64)
    of = dict(zip(FIELDS, table, strict=True))
    try:
        for name in ADDRESSES:
            of[name][:] = np.fromiter(map(Tensor.data_ptr, columns[name]), np.int64)
    except RuntimeError as error:  # a tensor subclass that wraps other tensors
        raise Unsupported("a parameter has no memory of its own") from error
    of["elements"][:] = np.fromiter(map(Tensor.numel, columns["param"]), np.int64)
    if (of["param"] == 0).any() and of["elements"][of["param"] == 0].any():
        raise Unsupported("a parameter has no memory of its own")
    of["group"][:] = np.repeat([b.position for b in buckets], [len(b.params) for b in buckets])
    of["index"][:] = list(chain.from_iterable(b.indices for b in buckets))
    of["adapts"][:] = step.adapts
    sizes = chunk_sizes(int(of["elements"].sum()))
    of["chunks"][:] = np.maximum(-(-of["elements"] // sizes["CHUNK"]), 1)
    aligned = np.bitwise_or.reduce(table[: len(ADDRESSES) - 1]) % WIDEST_LOAD == 0
    dtypes = [(b.params[0].dtype, g.dtype, bool(b.buffers)) for b in buckets for g in b.grads]
    kinds = list(zip(dtypes, aligned.tolist(), strict=True))
    distinct = sorted(set(kinds), key=str)
    if len(distinct) > 1:
        table = table[:, sorted(range(len(kinds)), key=lambda i: str(kinds[i]))]
    ends = np.cumsum(table[FIELDS.index("chunks")])
    table[FIELDS.index("first_chunk")] = ends - table[FIELDS.index("chunks")]
    sections, base, tensors = [], 0, 0
    for kind in distinct:
        tensors += kinds.count(kind)
        end = int(ends[tensors - 1])
        sections.append({**compiled_for(*kind), "base": base, "programs": end - base})
        base = end
    return table, sections, sizes


def compiled_for(dtypes: tuple[torch.dtype, torch.dtype, bool], aligned: bool) -> dict[str, Any]:
    """Return the constants of one kind of tensors."""
    param, grad, buffered = dtypes
    wide = tl.float64 if param == torch.float64 else tl.float32
    return {
        "P": TRITON_DTYPES[param],
        "G": TRITON_DTYPES[grad],
        "WIDE": wide,
        "ALIGNED": aligned,
        "BUFFERED": buffered,
    }


def chunk_sizes(elements: int) -> dict[str, int]:
    """Return the number of elements of a program, and of one iteration: enough programs to fill a GPU, few more."""
    chunk = 1024 if elements < 1 << 22 else 4096 if elements < 1 << 26 else 8192
    return {"CHUNK": chunk, "BLOCK": 1024}


def send(step: KernelStep, table: Int64s, values: dict[str, Any]) -> None:
    """Copy the table and the settings to the device together; values that are on the device already are copied there."""
    names, work = list(SETTINGS), step.work
    numbers: list[Any] = [work.scale, 0.0 if work.found_inf is None else work.found_inf]
    for own in step.settings:
        numbers += ({**SETTINGS, **own}[name] for name in names)
    there = {i: value for i, value in enumerate(numbers) if isinstance(value, Tensor)}
    on_host = np.array([0.0 if i in there else value for i, value in enumerate(numbers)], np.float64)
    words = to_device(np.concatenate([table.ravel(), on_host.view(np.int64)]), step)
    values["table"], values["numbers"] = words[: table.size], words[table.size :].view(torch.float64)
    values["indices"] = values["table"].view(table.shape)[FIELDS.index("index")]
    for i, value in there.items():
        values["numbers"][i] = value.reshape(())


def mean_norms(given: Sequence[float | Tensor] | Tensor, step: KernelStep) -> Tensor:
    """Return CLARS's mean norms as one float64 tensor on the device."""
    device = step.work.home
    if isinstance(given, Tensor):
        return given.to(device, torch.float64).contiguous()
    norms = to_device(np.array([0.0 if isinstance(norm, Tensor) else norm for norm in given], np.float64), step)
    for i, norm in enumerate(given):
        if isinstance(norm, Tensor):
            norms[i] = norm.reshape(())
    return norms


def to_device(array: npt.NDArray[Any], step: KernelStep) -> Tensor:
    """Copy an array to the device without waiting for it."""
    tensor = torch.from_numpy(array)
    if step.work.home.type == "cuda":
        tensor = tensor.pin_memory()
    step.held.append(tensor)  # a captured copy reads from there at every replay
    return tensor.to(step.work.home, non_blocking=True)


# ---------------------------------------------------------------- memory layouts


def match_layouts(bucket: Bucket) -> None:
    """Make gradients and buffers dense, with their elements in the order of the parameter's."""
    tensors = [*bucket.params, *bucket.grads, *chain.from_iterable(bucket.buffers.values())]
    if all(map(Tensor.is_contiguous, tensors)) and {*map(type, bucket.grads)} == {Tensor}:
        return
    for i, p in enumerate(bucket.params):
        if not p.permute(sorted(range(p.ndim), key=p.stride, reverse=True)).is_contiguous():
            raise Unsupported("a parameter has gaps in memory")
        grad = sharded_norms.arrived(bucket.grads[i])
        bucket.grads[i] = grad if alike(grad, p) else laid_out_as(p, grad)
        for key, buffers in bucket.buffers.items():
            if not alike(buffers[i], p):
                owner, state = sharded_norms.local(bucket.owners[i]), bucket.states[i]
                state[key] = laid_out_as(owner, state[key])
                buffer = sharded_norms.local(state[key])
                buffers[i] = torch.view_as_real(buffer) if buffer.is_complex() else buffer


def alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape have their elements in the same order."""
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)) or not a.numel()


def laid_out_as(layout: Tensor, tensor: Any) -> Any:
    """Return a copy of a tensor with its elements in the order of `layout`."""
    if sharded_norms.is_dtensor(tensor):
        tensor._local_tensor = laid_out_as(layout, tensor._local_tensor)
        return tensor
    return torch.empty_like(layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
