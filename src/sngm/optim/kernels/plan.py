"""A step on a device: tables that say where everything lies, kept from step to step, and the launches."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import is_, itemgetter, methodcaller, or_
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .. import shards
from . import device as kernels
from .layout import FIELDS, ROWS, SETTINGS, VARIANTS

data_ptr, numel, is_contiguous = Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous
params_of = itemgetter("params")
NO_CONTEXT = contextlib.nullcontext()
WIDEST_LOAD = 16  # bytes; tensors that do not begin at a multiple of it are served apart
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
OF_GRAD, OF_PARAM, OF_DIRECTION = range(len(ROWS))
CHANGING = (
    "rounds",
    "scale",
    "found_inf",
    "means",
    "norm",
    "skipped",
)  # arguments that may be other tensors at each step


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
        compiled = self.kernel[self.grid](*arguments, num_warps=pool["warps"])
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
        self.ready: dict[Any, list[Launch]] = {}

    def update(self, name: str, values: list[Any]) -> None:
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
            return values.to(self.device, torch.float64)
        there = torch.empty(len(values), dtype=torch.float64, device=self.device)
        if any(isinstance(value, Tensor) for value in values):
            for place, value in zip(there.unbind(), values, strict=True):
                place.copy_(value.reshape(())) if isinstance(value, Tensor) else place.fill_(value)
        else:
            self._send(list(values), there)
        return there

    def _send(self, values: list[Any], to: Tensor) -> None:
        pinned = send(values, to)
        if self.capturing():
            self.kept.append(pinned)  # a graph copies from there at every replay

    def capturing(self) -> bool:
        """Whether what happens here is being recorded into a CUDA graph."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def stream(self) -> int | None:
        """The stream that launches go to, as Triton wants it named."""
        return torch._C._cuda_getCurrentRawStream(self.device.index) if self.device.type == "cuda" else None

    def here(self) -> Any:
        """The context in which launches go to this device."""
        current = self.device.type != "cuda" or self.device.index == torch._C._cuda_getDevice()
        return NO_CONTEXT if current else torch.cuda.device(self.device)


class Plan:
    """The tables of one optimizer, and its step on them.

    Building one takes milliseconds, so it is kept until something moves: parameters, state, or the layout of
    gradients. New addresses of gradients alone, as `zero_grad` makes them, are sent to the device, 8 bytes each.
    It keeps no tensor alive that is not the optimizer's own, and does not keep the optimizer.
    """

    values: list[list[Any]]
    needs_and_adapt: list[tuple[bool, Any]]
    present: list[int]
    grad_dtypes: list[Any]
    unchangeable = False
    scope = ""
    needs: Sequence[bool] = ()
    constants: dict[str, Any] = {}  # noqa: RUF012
    places: Sequence[Place] = ()

    @torch.no_grad()
    def __init__(self, optimizer: Any, params: list[Tensor], grads: list[Any]) -> None:
        groups = optimizer.param_groups
        self.params = list(params)
        self.norm_group = optimizer.norm_group
        self.positions = [position for position, group in enumerate(groups) for _ in group["params"]]
        self.lengths = list(map(len, map(params_of, groups)))
        pieces = [shards.local(p) for p in params]
        self.sharded = any(map(shards.is_dtensor, params))
        self.complex = any(p.is_complex() for p in params)
        self.addresses, self.sizes = list(map(data_ptr, pieces)), list(map(numel, pieces))
        self.empty = [i for i, piece in enumerate(pieces) if not piece.numel()]
        self.matrices = [p for p, piece in zip(params, pieces, strict=True) if piece.ndim > 1 and piece.is_contiguous()]
        self.odd = [i for i, piece in enumerate(pieces) if not piece.is_contiguous()]
        self.odd_strides = [pieces[i].stride() for i in self.odd]
        # the kernels walk memory in order: a parameter with gaps is worked on as a copy
        self.staged = {i: torch.empty_like(piece) for i, piece in enumerate(pieces) if not dense(piece)}
        self.layouts = [torch.empty_like(self.staged.get(i, piece), device="meta") for i, piece in enumerate(pieces)]
        self._read_settings(optimizer)
        self._learn_state(optimizer)
        self.found: list[int] = []
        self.kinds: list[Kind] = []
        self.held: list[Any] = []  # copies the tables point to, until the step is taken
        self._find_gradients(grads)
        entries = [optimizer.state[p] for p in params]
        self.kinds = [self._kind(optimizer, i, entries[i], grads[i]) for i in range(len(params))]
        self.all_aligned = all(kind.aligned for kind in self.kinds)
        self.grads_like_params = all(kind.param == kind.grad for kind in self.kinds)
        places: list[Place] = []
        for device in dict.fromkeys(piece.device for piece in pieces):
            kinds = {i: kind for i, kind in enumerate(self.kinds) if pieces[i].device == device}
            rows = [
                self._fields(optimizer, i, entries[i]) if i in kinds else [0] * len(FIELDS) for i in range(len(params))
            ]
            places.append(Place(device, kinds, rows, len(groups)))
        self.places = places
        self.exchanges = len(self.places) > 1 or optimizer._shards.active
        for place in self.places:
            if self.exchanges:
                place.pool["whole"] = torch.zeros_like(place.pool["sums"])

    # ---------------------------------------------------------------- what the tables hold

    def _fields(self, optimizer: Any, i: int, state: dict[str, Any]) -> list[int]:
        p, position = self.params[i], self.positions[i]
        buffers = [address(state.get(key)) for key in optimizer.BUFFERS]
        values = {
            "param": address(self.staged[i]) if i in self.staged else self.addresses[i],
            "buffer": buffers[0],
            "second_buffer": buffers[-1],
            "step": address(state.get("step")),
            "elements": self.layouts[i].numel() * (2 if p.is_complex() else 1),
            "group": 2 * position + optimizer._adapts(p, optimizer.param_groups[position]),
        }
        return [values.get(name, 0) for name in FIELDS]

    def _kind(self, optimizer: Any, i: int, state: dict[str, Any], grad: Tensor | None) -> Kind:
        buffers = [address(state.get(key)) for key in optimizer.BUFFERS]
        dtype = self.params[i].dtype
        of_grad = dtype if grad is None else grad.dtype
        home = 0 if i in self.staged else self.addresses[i]
        aligned = all(a % WIDEST_LOAD == 0 for a in (self.found[i], home, *buffers))
        buffered = self.needs[self.positions[i]] and buffers[0] != 0
        return Kind(REAL.get(dtype, dtype), REAL.get(of_grad, of_grad), aligned, buffered)

    def _learn_state(self, optimizer: Any) -> None:
        """Make what state is missing, lay it out as the parameters are, and note where it is."""
        for layout, p, position in zip(self.layouts, self.params, self.positions, strict=True):
            state = optimizer._make_state(p, optimizer.param_groups[position])
            for key in optimizer.BUFFERS:
                if key in state and not alike(shards.local(state[key]), layout):
                    state[key] = laid_out_as(layout, state[key])
        states = optimizer.state.values()
        self.entries = len(states)
        self.known: list[tuple[Any, list[int], int, int]] = []
        for key in (*optimizer.BUFFERS, "step"):
            tensors = [state.get(key) for state in states]
            if any(tensor is not None for tensor in tensors):
                look_up = itemgetter(key) if all(tensor is not None for tensor in tensors) else methodcaller("get", key)
                self.known.append((look_up, list(map(id, tensors)), address(tensors[0]), address(tensors[-1])))

    # ---------------------------------------------------------------- before each step

    def ready(self, optimizer: Any, params: list[Tensor], grads: list[Any]) -> bool:
        """Bring the tables up to this step; False where that takes a new plan."""
        groups = optimizer.param_groups
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return False
        if optimizer.norm_group is not self.norm_group or list(map(len, map(params_of, groups))) != self.lengths:
            return False
        pieces = [shards.local(p) for p in params] if self.sharded else params
        if list(map(data_ptr, pieces)) != self.addresses:
            return False
        # at the same place, but fewer; where there is state it must have been replaced with them
        if not all(self.needs) and list(map(numel, pieces)) != self.sizes:
            return False
        # at the same place, but in another order; vectors have only one
        if not all(map(is_contiguous, self.matrices)):
            return False
        if self.odd and [pieces[i].stride() for i in self.odd] != self.odd_strides:
            return False
        return self._state_is_where_it_was(optimizer) and self._read_settings(optimizer) and self._find_gradients(grads)

    def _state_is_where_it_was(self, optimizer: Any) -> bool:
        states = optimizer.state.values()
        if len(states) != self.entries:
            return False
        try:
            for look_up, ids, first, last in self.known:
                tensors = list(map(look_up, states))
                if list(map(id, tensors)) != ids:
                    return False
                # who swaps the .data of state, to keep it elsewhere for a while, swaps that of all
                if address(tensors[0]) != first or address(tensors[-1]) != last:
                    return False
        except KeyError:  # someone deleted one
            return False
        return True

    def _read_settings(self, optimizer: Any) -> bool:
        """Read the groups' settings; False where other state, or another path, goes with them."""
        groups = optimizer.param_groups
        scope = getattr(optimizer, "scope", "global")
        if (
            self.unchangeable
            and scope == self.scope
            and all(
                len(group) == len(values) and all(map(is_, group.values(), values))
                for group, values in zip(groups, self.values, strict=True)
            )
        ):
            return True
        self.scope = scope
        self.values = [list(group.values()) for group in groups]
        # a list, or a number on the host, may change and still be the same object
        kinds = {type(value) for group in groups for key, value in group.items() if key != "params"}
        self.unchangeable = list not in kinds and not any(on_host(group["lr"]) for group in groups)
        needs = [(optimizer._needs_buffers(group), group.get("adapt")) for group in groups]
        if self.needs and (needs != self.needs_and_adapt or not optimizer._wants_kernels()):
            return False
        self.needs_and_adapt, self.needs = needs, [need for need, _ in needs]
        self.rates = [None if not isinstance(lr := group["lr"], Tensor) or on_host(lr) else lr for group in groups]
        lrs = [0.0 if rate is not None else float(group["lr"]) for rate, group in zip(self.rates, groups, strict=True)]
        self.rows = [
            list({**SETTINGS, **optimizer._kernel_settings(group), "lr": lr}.values())
            for group, lr in zip(groups, lrs, strict=True)
        ]
        self._choose_constants(optimizer)
        return True

    def _choose_constants(self, optimizer: Any) -> None:
        """What the kernels are compiled for, beside the kind of tensors."""
        of = dict(zip(SETTINGS, zip(*self.rows, strict=True), strict=True))
        method = optimizer.KERNEL
        coupled = any(wd and not mode for wd, mode in zip(of["weight_decay"], of["mode"], strict=True))
        constants = {
            "METHOD": method,
            "SCOPE": self.scope,
            "LAMB": method == "lamb",
            "BY_GROUP": self.scope == "group",
            "COUPLED_DECAY": method == "sngm" and coupled,
            "PARAM_NORMS": method in ("lars", "clars"),
            "MEANS": method == "clars",
            "AVERAGES": method == "lars" and VARIANTS.index("momentum") in of["mode"],
            "CLAMPS": any(map(math.isfinite, of["clamp"])),
            "STOCHASTICALLY": any(of["stochastic"]),
        }
        if constants != self.constants:  # more than other numbers, such as another learning rate
            self.constants = constants
            for place in self.places:
                place.ready.clear()

    def _find_gradients(self, grads: list[Any]) -> bool:
        """Find the address of each gradient, 0 where there is none; False where one is not of the kind expected."""
        self.held = []
        if self.kinds and not self.sharded and not self.complex and self._lie_as_before(grads):
            if len(self.present) == len(grads):
                found = list(map(data_ptr, grads))
            else:
                found = [0 if g is None else g.data_ptr() for g in grads]
            if found == self.found:
                return True
            dtypes = [None if g is None else g.dtype for g in grads]
            if self.all_aligned and reduce(or_, found) % WIDEST_LOAD == 0 and dtypes == self.grad_dtypes:
                self.found = found
                return True
        grads = [None if g is None else usable(layout, g) for layout, g in zip(self.layouts, grads, strict=True)]
        found = [0 if g is None else g.data_ptr() for g in grads]
        for i in range(len(grads)) if self.kinds else ():
            kind, g = self.kinds[i], grads[i]
            if g is None:
                continue
            if REAL.get(g.dtype, g.dtype) != kind.grad or (kind.aligned and found[i] % WIDEST_LOAD):
                return False
            if self.needs[self.positions[i]] and not kind.buffered and g.numel():
                return False  # it was frozen, and has a gradient now
        self.held, self.found = grads, found
        self.grad_dtypes = [None if g is None else g.dtype for g in grads]
        self.present = [i for i, g in enumerate(grads) if g is not None]
        stepped = [self.params[i] for i in self.present]
        self.marked = [p for p in stepped if p.ndim > 1] or stepped
        self.odd_grads = [i for i in self.odd if grads[i] is not None]
        self.odd_grad_strides = [grads[i].stride() for i in self.odd_grads]
        odd = set(self.odd_grads)
        self.even_grads = [i for i in self.present if i not in odd]
        return True

    def _lie_as_before(self, grads: list[Any]) -> bool:
        """Whether the same parameters have gradients, in the same order in memory."""
        try:
            if len(self.even_grads) == len(grads):
                alike = all(map(is_contiguous, grads))
            else:
                alike = (
                    all(map(is_contiguous, [grads[i] for i in self.even_grads]))
                    and [grads[i].stride() for i in self.odd_grads] == self.odd_grad_strides
                    and sum(g is not None for g in grads) == len(self.present)
                )
            # torch gives a gradient the parameter's dtype, unless told otherwise
            return alike and (self.grads_like_params or [g and g.dtype for g in grads] == self.grad_dtypes)
        except (AttributeError, RuntimeError, TypeError):  # one is None now, or sparse
            return False

    # ---------------------------------------------------------------- CUDA graphs

    def capturing(self) -> bool:
        """Whether this step is being recorded into a CUDA graph."""
        return self.places[0].capturing()

    def for_capture(self) -> Plan:
        """A plan for one CUDA graph: what it reads at a replay stays as it is now, whatever happens outside."""
        twin = copy.copy(self)
        twin.places = [copy.copy(place) for place in self.places]
        for place in twin.places:
            place.kept, place.pool = list(place.kept), dict(place.pool)
            place.renew()
        return twin

    # ---------------------------------------------------------------- the step

    def step(self, optimizer: Any, means: Sequence[Any] | Tensor | None = None) -> None:
        """Take the optimizer's step. `means` are CLARS's mean norms, one a parameter."""
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for place in self.places:
            place.update("grads", self.found)
            place.update("settings", self.rows)
            place.update("rates", [0 if r is None else self._rate_address(r, place.device) for r in self.rates])
            place.pool["scale"] = place.one if scale is None else place.scalar(scale)
            place.pool["found_inf"] = place.zero if found_inf is None else place.scalar(found_inf)
            if means is not None:
                place.pool["means"] = place.numbers(means)
        first = self.places[0]
        if optimizer._grad_norm.device != first.device:  # the model was moved since
            optimizer._grad_norm = optimizer._grad_norm.to(first.device)
            optimizer._skipped = optimizer._skipped.to(first.device)
        first.pool["norm"], first.pool["skipped"] = optimizer._grad_norm, optimizer._skipped
        self._count_roundings(optimizer)
        for i, twin in self.staged.items():
            twin.copy_(shards.local(self.params[i]).detach())
        self._launch(kernels.measure)
        method, by_tensor = optimizer.KERNEL, self.constants["SCOPE"] == "tensor"
        if (method == "sngm" and not by_tensor) or method == "lamb":
            self._exchange_spans(optimizer)
        else:
            self._exchange(optimizer, OF_GRAD, OF_GRAD if method == "sngm" else OF_PARAM)
        if method == "lamb":
            self._launch(kernels.moments)
            self._exchange(optimizer, OF_PARAM, OF_DIRECTION)
            self._launch(kernels.along)
        else:
            self._launch(kernels.update)
            if self.constants["AVERAGES"]:
                self._exchange(optimizer, OF_DIRECTION, OF_DIRECTION)
                self._launch(kernels.along)
        for i, twin in self.staged.items():
            shards.local(self.params[i]).detach().copy_(twin)
        self._note_for_empty_tensors(optimizer)
        # Autograd must see that a graph of before the step is no longer good, as where torch's own operations change
        # the parameters. There is no layer with vectors alone, so matrices will do, and take a third of the time.
        torch.autograd.graph.increment_version(self.marked)
        self.held = []

    def _launch(self, kernel: Any) -> None:
        for place in self.places:
            if kernel not in place.ready:
                values = [place.pool | section | self.constants for section in place.sections]
                place.ready[kernel] = [Launch(kernel, some) for some in values]
            with place.here():
                for launch in place.ready[kernel]:
                    launch(place.pool, place.stream())

    def _rate_address(self, rate: Tensor, device: torch.device) -> int:
        if rate.device != device or rate.dtype not in (torch.float32, torch.float64):
            rate = rate.to(device, torch.float64)
            self.held.append(rate)
        return -rate.data_ptr() if rate.dtype == torch.float64 else rate.data_ptr()

    def _count_roundings(self, optimizer: Any) -> None:
        """Let `measure` count in the tensor that is saved, and on other devices in copies of it."""
        at_random = self.constants["STOCHASTICALLY"]
        for place in self.places:
            place.pool["rounds"] = optimizer._rounding_step(place.device) if at_random else place.unsaved_rounds

    def _packed(self, first: int, last: int) -> Tensor:
        """Rows of sums over all devices; zero for a tensor without a gradient, of which they are an old step's."""
        packed = torch.zeros(last + 1 - first, len(self.params), dtype=torch.float64, device=self.places[0].device)
        for place in self.places:
            rows = place.pool["sums"][first : last + 1]
            packed += torch.where(place.pool["grads"] != 0, rows, 0.0).to(packed.device)
        return packed

    def _exchange_spans(self, optimizer: Any) -> None:
        """The sums that norms span, over devices and processes, where `measure` could not see all."""
        if self.exchanges:
            by_group = self.constants["BY_GROUP"]
            positions = self.positions if by_group else [0] * len(self.params)
            count = len(self.needs) if by_group else 1
            self._set_spans(optimizer._shards.spans(self._packed(OF_GRAD, OF_GRAD)[0], positions, count))

    def _exchange(self, optimizer: Any, first: int, last: int) -> None:
        """Rows of sums of whole tensors, likewise."""
        if self.exchanges:
            packed = optimizer._shards.tensors(self._packed(first, last))
            for place in self.places:
                place.pool["whole"][first : last + 1].copy_(packed)
            if first == OF_GRAD:
                self._set_spans(packed[0].sum().reshape(1))

    def _set_spans(self, spans: Tensor) -> None:
        for place in self.places:
            place.pool["spans"][0].copy_(spans.sum())
            place.pool["spans"][1 : 1 + len(spans)].copy_(spans)

    def _note_for_empty_tensors(self, optimizer: Any) -> None:
        """Write down what programs would have, had there been an element for them to work on."""
        moved = [optimizer.state[self.params[i]] for i in self.empty if self.params[i].grad is not None]
        steps = [state["step"] for state in moved if "step" in state]  # LAMB's
        if self.places[0].sections and not steps:
            return
        pool = self.places[0].pool
        total = pool["spans"][0]
        sound = total.isfinite() & (pool["found_inf"] == 0).reshape(())
        for step in steps:
            step.add_(sound.to(step.device))
        if not self.places[0].sections:
            optimizer._grad_norm.copy_(total.sqrt() / pool["scale"])
            optimizer._skipped.add_(~sound)


def chunk_sizes(elements: int) -> dict[str, int]:
    """How many elements a program works on, and how many at once: enough programs to fill a GPU, and not many more."""
    if elements < 1 << 22:
        return {"CHUNK": 1024, "BLOCK": 1024, "warps": 4}
    if elements < 1 << 26:
        return {"CHUNK": 4096, "BLOCK": 1024, "warps": 4}
    return {"CHUNK": 8192, "BLOCK": 1024, "warps": 4}


def send(values: list[Any], to: Tensor) -> Tensor:
    """Copy a list to a device without waiting for it; returns the memory it is copied from."""
    pinned = torch.tensor(values, dtype=to.dtype, pin_memory=to.device.type == "cuda")
    to.copy_(pinned, non_blocking=True)
    return pinned


def on_host(value: Any) -> bool:
    """Whether this is a tensor whose value the host can read without waiting."""
    return isinstance(value, Tensor) and value.device.type == "cpu"


def address(tensor: Tensor | None) -> int:
    """Where the piece of a tensor that lies here begins; 0 for none."""
    return 0 if tensor is None else shards.local(tensor).data_ptr()


def dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).is_contiguous()


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one shape have their elements in the same order."""
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)) or not a.numel()


def laid_out_as(layout: Tensor, tensor: Any) -> Any:
    """A copy of a tensor with its elements in the order of `layout`."""
    if shards.is_dtensor(tensor):
        tensor._local_tensor = laid_out_as(layout, tensor._local_tensor)
        return tensor
    return torch.empty_like(layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@torch.no_grad()
def usable(layout: Tensor, grad: Tensor) -> Tensor:
    """The gradient as the kernels can read it: dense, in the order of `layout`, with nothing left to be done lazily."""
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    grad = grad.resolve_conj().resolve_neg()
    return grad if dense(grad) and alike(grad, layout) else laid_out_as(layout, grad)
