"""A step on a device: tables that say where everything lies, kept from step to step, and the launches."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, is_, itemgetter, methodcaller, or_
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .. import shards
from . import device as kernels
from .layout import FIELDS, ROWS, SETTINGS, VARIANTS

data_ptr, is_contiguous, stride = Tensor.data_ptr, Tensor.is_contiguous, Tensor.stride
grad_of, params_of = attrgetter("grad"), itemgetter("params")
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
CHANGING = ("scale", "found_inf", "means", "norm", "skipped")  # arguments that may be other tensors at each step


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


def _unmoved(tensors: list[Any], addresses: list[int], which: list[int]) -> bool:
    """Whether those tensors begin where they did."""
    return all(tensors[i].data_ptr() == addresses[i] for i in which)


# torch's own in C++, where it was built for CUDA: a step asks this of every parameter and every gradient
unmoved = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _unmoved)


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
            "rounds": zeros(1, dtype=torch.int64),
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
            self.kept.append(send(values, self.pool[name]))
            if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                self.kept.pop()  # a graph copies from there at every replay

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
    """

    @torch.no_grad()
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        groups = optimizer.param_groups
        self.params = [p for group in groups for p in group["params"]]
        self.positions = [position for position, group in enumerate(groups) for _ in group["params"]]
        self.locals = [shards.local(p) for p in self.params]
        self.addresses = list(map(data_ptr, self.locals))
        self.everyone = list(range(len(self.params)))
        self.empty = [i for i, p in enumerate(self.locals) if not p.numel()]
        self.sharded = any(map(shards.is_dtensor, self.params))
        self.quick = not self.sharded and not any(p.is_complex() for p in self.params)
        # the kernels walk memory in order: a parameter with gaps is worked on as a copy
        self.homes = [p.detach() if dense(p) else torch.empty_like(p.detach()) for p in self.locals]
        self.staged = [(p.detach(), twin) for p, twin in zip(self.locals, self.homes, strict=True) if not dense(p)]
        self.odd = [i for i, home in enumerate(self.homes) if not home.is_contiguous()]
        self.even_matrices = [p for p in self.locals if p.ndim > 1 and p.is_contiguous()]
        self.odd_params = [p for p in self.locals if not p.is_contiguous()]
        self.strides = list(map(stride, self.odd_params))
        self.needs = [optimizer._needs_buffers(group) for group in groups]
        self.adapt = [group.get("adapt") for group in groups]
        self.states = [optimizer._make_state(p, groups[at]) for p, at in zip(self.params, self.positions, strict=True)]
        for home, state in zip(self.homes, self.states, strict=True):
            for key in optimizer.BUFFERS:
                if key in state and not alike(shards.local(state[key]), home):
                    state[key] = laid_out_as(home, state[key])
        self.lengths = list(map(len, map(params_of, groups)))
        self.entries = len(optimizer.state)
        self.known: list[tuple[Any, list[Any]]] = []  # how to look up what the tables point to in the state
        for key in (*optimizer.BUFFERS, "step"):
            tensors = [state.get(key) for state in optimizer.state.values()]
            if any(tensor is not None for tensor in tensors):
                everywhere = all(key in state for state in optimizer.state.values())
                self.known.append((itemgetter(key) if everywhere else methodcaller("get", key), tensors))
        self.found: list[int] = []
        self.grad_dtypes: list[Any] = []
        self.present: list[int] = []
        self.even_present: list[int] = []
        self.odd_present: list[int] = []
        self.odd_strides: list[Any] = []
        self.held: list[Any] = []  # copies the tables point to, until the step is taken
        self.chosen_for: Any = None
        self.constants: dict[str, Any] = {}
        self.kinds: list[Kind] = []
        self._find_gradients()
        self.kinds = [self._kind(i) for i in range(len(self.params))]
        self.all_aligned = all(kind.aligned for kind in self.kinds)
        self.places: list[Place] = []
        for device in dict.fromkeys(home.device for home in self.homes):
            kinds = {i: kind for i, kind in enumerate(self.kinds) if self.homes[i].device == device}
            rows = [self._fields(i) if i in kinds else [0] * len(FIELDS) for i in range(len(self.params))]
            self.places.append(Place(device, kinds, rows, len(groups)))
        self.exchanges = len(self.places) > 1 or optimizer._shards.active
        for place in self.places:
            if self.exchanges:
                place.pool["whole"] = torch.zeros_like(place.pool["sums"])

    # ---------------------------------------------------------------- tables

    def _fields(self, i: int) -> list[int]:
        p, state = self.params[i], self.states[i]
        buffers = [address(state.get(key)) for key in self.optimizer.BUFFERS]
        group = self.optimizer.param_groups[self.positions[i]]
        adapts = self.optimizer._adapts(p, group)
        values = {
            "param": address(self.homes[i]),
            "buffer": buffers[0],
            "second_buffer": buffers[1] if len(buffers) > 1 else 0,
            "step": address(state.get("step")),
            "elements": self.homes[i].numel() * (2 if p.is_complex() else 1),
            "group": 2 * self.positions[i] + adapts,
        }
        return [values.get(name, 0) for name in FIELDS]

    def _kind(self, i: int) -> Kind:
        buffers = [address(self.states[i].get(key)) for key in self.optimizer.BUFFERS]
        addresses = [self.found[i], address(self.homes[i]), *buffers]
        dtype = self.params[i].dtype
        grad = dtype if self.params[i].grad is None else self.params[i].grad.dtype
        aligned = all(a % WIDEST_LOAD == 0 for a in addresses)
        buffered = self.needs[self.positions[i]] and buffers[0] != 0
        return Kind(REAL.get(dtype, dtype), REAL.get(grad, grad), aligned, buffered)

    def ready(self) -> bool:
        """Bring the tables up to this step; False where that takes a new plan."""
        optimizer = self.optimizer
        groups = optimizer.param_groups
        params = groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return False
        if list(map(len, map(params_of, groups))) != self.lengths:
            return False
        states = optimizer.state.values()
        if len(states) != self.entries:
            return False
        try:
            for look_up, tensors in self.known:
                if not all(map(is_, map(look_up, states), tensors)):
                    return False
        except KeyError:  # someone deleted one
            return False
        if self.sharded:
            self.locals = [shards.local(p) for p in params]
        if not unmoved(self.locals, self.addresses, self.everyone):
            return False
        # at the same place, but in another order; vectors have only one
        if not all(map(is_contiguous, self.even_matrices)) or list(map(stride, self.odd_params)) != self.strides:
            return False
        if [optimizer._needs_buffers(group) for group in groups] != self.needs:
            return False
        if [group.get("adapt") for group in groups] != self.adapt:
            return False
        return self._find_gradients()

    def _find_gradients(self) -> bool:
        """Find the address of each gradient, 0 where there is none; False where one is not of the kind expected."""
        grads = list(map(grad_of, self.params))
        if self.quick and self.kinds and self._lie_as_before(grads):
            if unmoved(grads, self.found, self.present):
                return True
            found = [0 if g is None else g.data_ptr() for g in grads]
            if self.all_aligned and reduce(or_, found) % WIDEST_LOAD == 0 and self._have_dtypes_as_before(grads):
                self.found = found
                return True
        else:
            triples = zip(self.params, self.homes, grads, strict=True)
            self.held = grads = [None if g is None else usable(p, home, g) for p, home, g in triples]
            found = [0 if g is None else g.data_ptr() for g in grads]
        for i in range(len(grads)) if self.kinds else ():
            kind, g = self.kinds[i], grads[i]
            if g is None:
                continue
            if REAL.get(g.dtype, g.dtype) != kind.grad or (kind.aligned and found[i] % WIDEST_LOAD):
                return False
            if self.needs[self.positions[i]] and not kind.buffered:
                return False  # it was frozen, and has a gradient now
        self.found = found
        self.grad_dtypes = [None if g is None else g.dtype for g in grads]
        self.present = [i for i, g in enumerate(grads) if g is not None]
        self.odd_present = [i for i in self.odd if grads[i] is not None]
        self.odd_strides = [grads[i].stride() for i in self.odd_present]
        odd = set(self.odd_present)
        self.even_present = [i for i in self.present if i not in odd]
        return True

    def _have_dtypes_as_before(self, grads: list[Any]) -> bool:
        return [None if g is None else g.dtype for g in grads] == self.grad_dtypes

    def _lie_as_before(self, grads: list[Any]) -> bool:
        """Whether the same parameters have gradients, in the same order in memory. This runs at every step."""
        try:
            if len(self.even_present) == len(grads):
                return all(map(is_contiguous, grads))
            return (
                all(map(is_contiguous, [grads[i] for i in self.even_present]))
                and [grads[i].stride() for i in self.odd_present] == self.odd_strides
                and sum(g is not None for g in grads) == len(self.present)
            )
        except (AttributeError, RuntimeError, TypeError):  # one is None now, or sparse
            return False

    def _send_settings(self) -> None:
        """Send the groups' settings and the addresses of learning rates that live on a device."""
        rows: list[list[float]] = []
        rates: list[Tensor | None] = []
        for group in self.optimizer.param_groups:
            lr = group["lr"]
            rates.append(None)
            if isinstance(lr, Tensor):
                if lr.device.type == "cpu":
                    lr = lr.item()
                else:
                    rates[-1], lr = lr, 0.0
            rows.append(list({**SETTINGS, **self.optimizer._kernel_settings(group), "lr": float(lr)}.values()))
        for place in self.places:
            place.update("grads", self.found)
            place.update("rates", [0 if rate is None else self._rate_address(rate, place.device) for rate in rates])
            place.update("settings", rows)
        scope = getattr(self.optimizer, "scope", "global")
        if (rows, scope) != self.chosen_for:
            self.chosen_for = (rows, scope)
            self._choose_constants(rows, scope)

    def _choose_constants(self, rows: list[list[float]], scope: str) -> None:
        """What the kernels are compiled for, beside the kind of tensors."""
        of = dict(zip(SETTINGS, zip(*rows, strict=True), strict=True))
        method = self.optimizer.KERNEL
        constants = {
            "METHOD": method,
            "SCOPE": scope,
            "LAMB": method == "lamb",
            "BY_GROUP": scope == "group",
            "COUPLED_DECAY": method == "sngm"
            and any(wd and not mode for wd, mode in zip(of["weight_decay"], of["mode"], strict=True)),
            "PARAM_NORMS": method in ("lars", "clars"),
            "MEANS": method == "clars",
            "AVERAGES": method == "lars" and VARIANTS.index("momentum") in of["mode"],
            "CLAMPS": any(map(math.isfinite, of["clamp"])),
            "STOCHASTICALLY": any(of["stochastic"]),
        }
        if constants == self.constants:
            return  # other numbers, such as another learning rate
        self.constants = constants
        self.by_tensor = method != "sngm" or scope == "tensor"
        for place in self.places:
            place.ready.clear()
        if constants["STOCHASTICALLY"]:
            step = self.optimizer._rounding_step(self.places[0].device)
            for place in self.places:
                place.pool["rounds"] = step if place is self.places[0] else step.to(place.device)

    def _rate_address(self, rate: Tensor, device: torch.device) -> int:
        if rate.device != device or rate.dtype not in (torch.float32, torch.float64):
            rate = rate.to(device, torch.float64)
            self.held.append(rate)
        return -rate.data_ptr() if rate.dtype == torch.float64 else rate.data_ptr()

    def capturing(self) -> bool:
        """Whether this step is being recorded into a CUDA graph."""
        return self.places[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def for_capture(self) -> Plan:
        """A plan for one CUDA graph: what it reads at a replay stays as it is now, whatever happens outside."""
        twin = copy.copy(self)
        twin.places = [copy.copy(place) for place in self.places]
        for place in twin.places:
            place.kept, place.pool = list(place.kept), dict(place.pool)
            place.renew()
        return twin

    # ---------------------------------------------------------------- the step

    def step(self, means: Sequence[Any] | Tensor | None = None) -> None:
        """Take the optimizer's step. `means` are CLARS's mean norms, one a parameter."""
        optimizer = self.optimizer
        self._send_settings()
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for place in self.places:
            place.pool["scale"] = place.one if scale is None else scale.to(place.device, torch.float32)
            place.pool["found_inf"] = place.zero if found_inf is None else found_inf.to(place.device, torch.float32)
            if means is not None:
                place.pool["means"] = on_device(means, place.device)
        first = self.places[0]
        if optimizer._grad_norm.device != first.device:  # the model was moved since
            optimizer._grad_norm = optimizer._grad_norm.to(first.device)
            optimizer._skipped = optimizer._skipped.to(first.device)
        first.pool["norm"], first.pool["skipped"] = optimizer._grad_norm, optimizer._skipped
        for parameter, twin in self.staged:
            twin.copy_(parameter)
        self._launch(kernels.measure)
        self._exchange(OF_GRAD, OF_PARAM)
        if optimizer.KERNEL == "lamb":
            self._launch(kernels.moments)
            self._exchange(OF_PARAM, OF_DIRECTION)
            self._launch(kernels.along)
        else:
            self._launch(kernels.update)
            if self.constants["AVERAGES"]:
                self._exchange(OF_DIRECTION, OF_DIRECTION)
                self._launch(kernels.along)
        for parameter, twin in self.staged:
            parameter.copy_(twin)
        self._note_for_empty_tensors()
        self.held.clear()

    def _note_for_empty_tensors(self) -> None:
        """Write down what programs would have, had there been an element for them to work on."""
        optimizer, pool = self.optimizer, self.places[0].pool
        moved = [self.states[i] for i in self.empty if self.params[i].grad is not None]
        steps = [state["step"] for state in moved if "step" in state]  # LAMB's
        if self.places[0].sections and not steps:
            return
        total = pool["spans"][0]
        sound = total.isfinite() & (pool["found_inf"] == 0).reshape(())
        for step in steps:
            step.add_(sound.to(step.device))
        if not self.places[0].sections:
            optimizer._grad_norm.copy_(total.sqrt() / pool["scale"])
            optimizer._skipped.add_(~sound)

    def _launch(self, kernel: Any) -> None:
        for place in self.places:
            if kernel not in place.ready:
                values = [place.pool | section | self.constants for section in place.sections]
                place.ready[kernel] = [Launch(kernel, some) for some in values]
            with place.here():
                for launch in place.ready[kernel]:
                    launch(place.pool, place.stream())

    def _exchange(self, first: int, last: int) -> None:
        """Add up rows of sums over devices and processes, and with the gradients' row what the norms span."""
        if not self.exchanges:
            return  # `measure` has done it
        home = self.places[0].device
        rows = slice(first, last + 1)
        packed = self.places[0].pool["sums"][rows].clone()
        for place in self.places[1:]:
            packed += place.pool["sums"][rows].to(home)
        if self.by_tensor:
            packed = self.optimizer._shards.tensors(packed)
            spans = packed[0].sum().reshape(1)
        else:
            by_group = self.constants["SCOPE"] == "group"
            positions = self.positions if by_group else [0] * len(self.params)
            spans = self.optimizer._shards.spans(packed[0], positions, len(self.needs) if by_group else 1)
        for place in self.places:
            if self.by_tensor:
                place.pool["whole"][rows].copy_(packed)
            if first == OF_GRAD:
                place.pool["spans"][0].copy_(spans.sum())
                place.pool["spans"][1 : 1 + len(spans)].copy_(spans)


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


def on_device(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """Numbers, or tensors of one element, as one tensor there; numbers are copied without waiting."""
    if isinstance(values, Tensor):
        return values.to(device, torch.float64)
    there = torch.empty(len(values), dtype=torch.float64, device=device)
    if any(isinstance(value, Tensor) for value in values):
        places = there.unbind()
        for i, value in enumerate(values):
            places[i].copy_(value.reshape(())) if isinstance(value, Tensor) else places[i].fill_(value)
    else:
        send(list(values), there)
    return there


def address(tensor: Tensor | None) -> int:
    """Where the piece of a tensor that lies here begins; 0 for none."""
    return 0 if tensor is None else shards.local(tensor).data_ptr()


def dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).is_contiguous()


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one shape have their elements in the same order."""
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True)) or not a.numel()


def laid_out_as(home: Tensor, tensor: Any) -> Any:
    """A copy of a tensor with its elements in the order of `home`."""
    if shards.is_dtensor(tensor):
        tensor._local_tensor = laid_out_as(home, tensor._local_tensor)
        return tensor
    return torch.empty_like(home, dtype=tensor.dtype).copy_(tensor)


@torch.no_grad()
def usable(p: Tensor, home: Tensor, grad: Tensor) -> Tensor:
    """The gradient as the kernels can read it: dense, in the order of `home`, with nothing left to be done lazily."""
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    grad = shards.local_gradient(p, grad).resolve_conj().resolve_neg()
    return grad if dense(grad) and alike(grad, home) else laid_out_as(home, grad)
