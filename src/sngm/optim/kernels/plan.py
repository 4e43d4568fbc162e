"""A step on a device: tables that say where everything lies, kept from step to step, and the launches."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from operator import is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from .. import checks, sharded_norms
from ..torch_internals import profiler_enabled
from . import device as kernels
from .layout import FIELDS, ROWS, SETTINGS, VARIANTS
from .look import look
from .memory import address, alike, dense, ids, laid_out_as, numbers, on_host, usable
from .place import Kind, Launch, Place, changing

data_ptr = Tensor.data_ptr
params_of = itemgetter("params")
WIDEST_LOAD = 16  # bytes; tensors that do not begin at a multiple of it are served apart
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
OF_GRAD, OF_PARAM, OF_DIRECTION = range(len(ROWS))


class Plan:
    """The tables of one optimizer, and its step on them.

    Building one takes milliseconds, so it is kept until something moves: parameters, state, or the layout of
    gradients. New addresses of gradients alone, as `zero_grad` makes them, are sent to the device, 8 bytes each.
    It keeps no tensor alive that is not the optimizer's own, and does not keep the optimizer.
    """

    values: list[list[Any]]
    needs_and_adapt: list[tuple[bool, Any]]
    unchangeable = False
    strided = True  # are all gradients
    scope = ""
    needs: Sequence[bool] = ()
    constants: dict[str, Any] = {}  # noqa: RUF012
    places: Sequence[Place] = ()

    @torch.no_grad()
    def __init__(self, optimizer: Any, params: list[Tensor], grads: list[Any]) -> None:
        groups = optimizer.param_groups
        self.params = tuple(params)
        self.ids = ids(self.params)
        self.norm_group = optimizer.norm_group
        self.positions = [position for position, group in enumerate(groups) for _ in group["params"]]
        self.lengths = list(map(len, map(params_of, groups)))
        pieces = [sharded_norms.local(p) for p in params]
        self.sharded = any(map(sharded_norms.is_dtensor, params))
        self.complex = any(p.is_complex() for p in params)
        self.look = look(pieces)
        self.addresses = numbers(self.look[0])
        self.shapes = [piece.shape for piece in pieces]
        self.single = [i for i, piece in enumerate(pieces) if piece.numel() == 1]
        self.empty = [i for i, piece in enumerate(pieces) if not piece.numel()]
        # the kernels walk memory in order: a parameter with gaps is worked on as a copy
        self.staged = {i: torch.empty_like(piece) for i, piece in enumerate(pieces) if not dense(piece)}
        self.layouts = [torch.empty_like(self.staged.get(i, piece), device="meta") for i, piece in enumerate(pieces)]
        self._read_settings(optimizer)
        self._learn_state(optimizer)
        self.found, self.forms = b"", None  # of gradients
        self.kinds: list[Kind] = []
        self.held: list[Any] = []  # copies the tables point to, until the step is taken
        self._find_gradients(grads)
        entries = [optimizer.state[p] for p in params]
        found = numbers(self.found)
        self.kinds = [self._kind(optimizer, i, entries[i], grads[i], found[i]) for i in range(len(params))]
        self.all_aligned = all(kind.aligned for kind in self.kinds)
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
            "step": address(state.get("step")) if optimizer.COUNTS else 0,
            "elements": self.layouts[i].numel() * (2 if p.is_complex() else 1),
            "group": 2 * position + optimizer._adapts(p, optimizer.param_groups[position]),
        }
        return [values.get(name, 0) for name in FIELDS]

    def _kind(self, optimizer: Any, i: int, state: dict[str, Any], grad: Tensor | None, found: int) -> Kind:
        buffers = [address(state.get(key)) for key in optimizer.BUFFERS]
        dtype = self.params[i].dtype
        of_grad = dtype if grad is None else grad.dtype
        home = 0 if i in self.staged else self.addresses[i]
        aligned = all(a % WIDEST_LOAD == 0 for a in (found, home, *buffers))
        buffered = self.needs[self.positions[i]] and buffers[0] != 0
        return Kind(REAL.get(dtype, dtype), REAL.get(of_grad, of_grad), aligned, buffered)

    def _learn_state(self, optimizer: Any) -> None:
        """Make what state is missing, lay it out as the parameters are, and note where it is."""
        for layout, p, position in zip(self.layouts, self.params, self.positions, strict=True):
            state = optimizer._make_state(p, optimizer.param_groups[position])
            for key in optimizer.BUFFERS:
                if key in state and not alike(sharded_norms.local(state[key]), layout):
                    state[key] = laid_out_as(layout, state[key])
        states = optimizer.state.values()
        self.entries = len(states)
        self.known: list[tuple[Any, bytes, int, int]] = []
        self.gone: list[Any] = []  # gets something when a tensor of state dies: another one may have its id then
        self.watched: list[Any] = []
        for key in optimizer.BUFFERS + optimizer.COUNTS:
            tensors = tuple(state.get(key) for state in states)
            if any(tensor is not None for tensor in tensors):
                look_up = itemgetter(key) if all(tensor is not None for tensor in tensors) else methodcaller("get", key)
                self.known.append((look_up, ids(tensors), address(tensors[0]), address(tensors[-1])))
                self.watched += [weakref.ref(tensor, self.gone.append) for tensor in tensors if tensor is not None]

    # ---------------------------------------------------------------- before each step

    def ready(self, optimizer: Any, params: list[Tensor], grads: list[Any]) -> bool:
        """Bring the tables up to this step; False where that takes a new plan."""
        groups = optimizer.param_groups
        if ids(tuple(params)) != self.ids:
            return False
        if optimizer.norm_group is not self.norm_group or list(map(len, map(params_of, groups))) != self.lengths:
            return False
        pieces = [sharded_norms.local(p) for p in params] if self.sharded else params
        try:
            if look(pieces) != self.look:  # elsewhere, or there in another shape, order or dtype
                return False
        except BufferError:  # on the meta device
            return False
        return self._state_is_where_it_was(optimizer) and self._read_settings(optimizer) and self._find_gradients(grads)

    def _state_is_where_it_was(self, optimizer: Any) -> bool:
        states = optimizer.state.values()
        if self.gone or len(states) != self.entries:
            return False
        try:
            for look_up, known, first, last in self.known:
                tensors = tuple(map(look_up, states))
                if ids(tensors) != known:
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
        checks.rates(groups)
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
                place.forget()

    def _find_gradients(self, grads: list[Any]) -> bool:
        """Find the address of each gradient, 0 where there is none; False where one is not of the kind expected."""
        self.held = []
        if self.kinds and self.strided and not self.sharded and not self.complex:
            try:
                found, forms, bits = look(grads)
            except BufferError:  # one is sparse
                forms = None
            # Of one element, the imaginary part of a conjugate lies as any other, with its sign left to be changed.
            if forms == self.forms and not any(grads[i].is_neg() for i in self.single if grads[i] is not None):
                if found == self.found:
                    return True
                if self.all_aligned and bits % WIDEST_LOAD == 0:
                    self.found = found
                    return True
        for p, shape, g in zip(self.params, self.shapes, grads, strict=True):
            if g is not None:
                checks.gradient(g, shape, p.device)
        self.strided = all(g is None or g.layout is torch.strided for g in grads)
        grads = [None if g is None else usable(layout, g) for layout, g in zip(self.layouts, grads, strict=True)]
        found, forms, _ = look(grads)
        for i, at in enumerate(numbers(found)) if self.kinds else ():
            kind, g = self.kinds[i], grads[i]
            if g is None:
                continue
            if REAL.get(g.dtype, g.dtype) != kind.grad or (kind.aligned and at % WIDEST_LOAD):
                return False
            if self.needs[self.positions[i]] and not kind.buffered and g.numel():
                return False  # it was frozen, and has a gradient now
        self.held, self.found, self.forms = grads, found, forms
        self.stepped = [p for p, g in zip(self.params, grads, strict=True) if g is not None]
        return True

    # ---------------------------------------------------------------- CUDA graphs

    def capturing(self) -> bool:
        """Whether this step is being recorded into a CUDA graph."""
        return self.places[0].capturing()

    def for_capture(self) -> Plan:
        """A plan for one CUDA graph: what it reads at a replay stays as it is now, whatever happens outside."""
        twin = copy.copy(self)
        self.held = []  # the copies are the graph's
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
            twin.copy_(sharded_norms.local(self.params[i]).detach())
        self._work(optimizer)
        for i, twin in self.staged.items():
            sharded_norms.local(self.params[i]).detach().copy_(twin)
        self._note_for_empty_tensors(optimizer)
        # Autograd must see that a graph of before the step is no longer good, as where torch's own operations change
        # the parameters.
        torch.autograd.graph.increment_version(self.stepped)
        self.held = []

    def _work(self, optimizer: Any) -> None:
        """The launches, at once where there is a graph of them."""
        first = self.places[0]
        replays = first.replays
        addresses: tuple[int, ...] = ()
        # profilers see launches as such, and whose they are, which they do not see of a graph's
        if replays is not None and not self.exchanges and not profiler_enabled():
            addresses = tuple(map(data_ptr, changing(first.pool)))
            with first.here():
                if replays.run(addresses, first.stream()):
                    return
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
        if replays is not None and addresses:
            with first.here():
                replays.learn(addresses, [launch for some in first.ready.values() for launch in some], first.pool)

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
        saved = optimizer._rounding_step(self.places[0].device) if self.constants["STOCHASTICALLY"] else None
        for place in self.places:
            place.pool["rounds"] = place.unsaved_rounds if saved is None else saved.to(place.device)

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
