"""Base class of the optimizers: validates groups, gathers the tensors of a step, skips steps with non-finite norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter, is_
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import checks, kernels, partial_norms
from .buckets import Bucket, Closure, Work, as_dense, evaluate, state_dtype
from .hooks import with_hooks_if_any
from .kernels.table_schema import SETTINGS
from .norms import LOW_PRECISION, sum_dtype
from .sharded_norms import aligned, arrived, local
from .state import StatefulOptimizer

grad_of = attrgetter("grad")


def lr_of(group: dict[str, Any], key: str = "lr") -> float | Tensor:
    """Return a group's learning rate: a number, or a 0-d tensor if it is a tensor on a GPU or in a compiled step."""
    lr: float | Tensor = group[key]
    if not isinstance(lr, Tensor):
        return lr
    if lr.device.type == "cpu" and not torch.compiler.is_compiling():
        return lr.item()
    return lr.reshape(()).to(sum_dtype(lr.device))  # products with other settings must not be rounded to float32


def settings_in(arguments: dict[str, Any], but: str = "") -> dict[str, Any]:
    """Return the arguments of an optimizer's `__init__` that parameter groups can set, given the `locals()` there.

    `but` names an argument to leave out, because it belongs to the whole optimizer.
    """
    others = {"self", "__class__", "params", "norm_group", but}  # `super()` adds __class__ to the locals
    return {name: value for name, value in arguments.items() if name not in others}


class LargeBatchOptimizer(StatefulOptimizer):
    """Base class of the optimizers. Subclasses declare their buffers and implement `_step`.

    Attributes:
        norm_group: process group over whose ranks squared norms are summed, or None. DTensors do not need a group.
            Checkpoints do not contain it.
    """

    DTYPES: ClassVar[tuple[torch.dtype, ...]] = kernels.DTYPES  # supported dtypes of parameters
    CHOICES: ClassVar[dict[str, tuple[str | None, ...]]] = {}  # allowed values of settings that are words
    NORM_SPANS: ClassVar[str] = "tensor"  # what one norm covers: "global" (all parameters), "tensor", or "none"
    KERNEL: ClassVar[str | None] = None  # name of the method in the Triton kernels, if the kernels support it

    _whole_square: Tensor | None = None  # squared norm of the whole gradient, from `shared_norm`
    _checked_shards: Any = None  # value of `_shards` when the parameters were last checked
    _inside_hooks = False  # True while a step runs under hooks or a profiler
    _layout: Any = None  # what the Triton kernels keep for the next step; None if they did not take the last one
    _captured: tuple[Any, ...] = ()  # memory that captured CUDA graphs use

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "step" in cls.__dict__:
            cls.step = with_hooks_if_any(cls.__dict__["step"])  # type: ignore[method-assign]

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, norm_group: Any = None) -> None:
        if norm_group is not None and not (dist.is_available() and isinstance(norm_group, dist.ProcessGroup)):
            raise TypeError(f"norm_group must be None or a torch.distributed process group, got {norm_group!r}")
        self.norm_group = norm_group
        checks.numpy_to_python(defaults)
        self._check_group(defaults)
        if not isinstance(params, Iterable):
            raise TypeError(
                f"params must be an iterable of parameters or groups, got {type(params).__name__}"
                + ("; pass module.parameters()" if isinstance(params, torch.nn.Module) else "")
            )
        super().__init__(params, {**defaults, **self.TORCH_KEYS})
        checks.used("weight_decay", defaults, self.param_groups)
        owners = [p for group in self.param_groups for p in group["params"]]
        if not owners and norm_group is None:
            raise ValueError("params must hold at least one parameter, got only empty groups")
        home = torch.device("cpu")
        if owners:
            home = owners[0].device
        elif dist.get_backend(norm_group) == "nccl":  # NCCL needs tensors on a GPU
            home = torch.device("cuda", torch.cuda.current_device())
        if home.type == "meta":  # the counters need real memory before the model is materialised
            home = torch.device("cpu")
        exact = any(p.dtype in (torch.float64, torch.complex128) for p in owners)
        self._grad_norm = torch.zeros((), dtype=torch.float64 if exact else torch.float32, device=home)
        self._skipped = torch.zeros((), dtype=torch.int64, device=home)

    @property
    def grad_norm(self) -> Tensor:
        """The norm that the last step divided by, as a 0-d tensor on the device.

        If the method or scope divides by several norms, by none (EXTRAP-SGD), or by the norm of another tensor (NSGDM:
        the momentum), this is the norm of the whole gradient (for SNGM with coupled decay, of gradient + decay *
        parameter). Reading this property does not synchronise with the device.
        """
        return self._grad_norm.clone()  # steps update the original in place

    @property
    def skipped(self) -> Tensor:
        """The number of steps skipped for a NaN or infinite norm, an overflow or a bad loss scale, as a 0-d tensor."""
        return self._skipped.clone()

    # ---------------------------------------------------------------- groups

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise an error if a hyper-parameter of the group is invalid."""
        checks.settings(group)
        for name, allowed in self.CHOICES.items():
            checks.choice(name, group[name], allowed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. If the group is invalid, raise an error and leave the optimizer unchanged."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"param_group must be a dict with a 'params' entry, got {param_group!r}")
        params = param_group["params"]
        if not isinstance(params, (Tensor, set)):  # a generator can be iterated only once
            params = list(params)
        tensors = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
        checks.parameters(tensors, self.DTYPES)
        checks.keys(param_group, [*self.defaults, "params", "param_names"])
        checks.numpy_to_python(param_group)
        filled = {**self.defaults, **param_group}
        self._check_group(filled)
        for key, known in self.TORCH_KEYS.items():
            if filled.get(key, known) != known:
                raise ValueError(f"{type(self).__name__} has no {key}; a group may only hold {known!r} for it")
        if filled["fused"]:
            self._check_fused(tensors)
        param_group["params"] = params
        super().add_param_group(param_group)
        for p in param_group["params"]:
            self._make_state(p, param_group)
        self._groups_added = sum(bool(group["params"]) for group in self.param_groups)
        self._find_shards([p for group in self.param_groups for p in group["params"]])
        self._rounding_step()  # create the counter now, so that every checkpoint contains it

    def _check_fused(self, params: list[Any]) -> None:
        served = tuple(dtype for dtype in self.DTYPES if dtype not in LOW_PRECISION)
        for i, p in enumerate(params):
            if not isinstance(p, Tensor) or (self.KERNEL and kernels.support([p])):
                continue
            if p.device.type != "cpu" or p.dtype not in served:
                lacking = "" if kernels.installed() else " (its kernels for CUDA need Triton, which is not installed)"
                raise ValueError(
                    f"fused=True supports {checks.dtype_names(served)} on cpu{lacking}, but params[{i}] is {p.dtype} "
                    f"on {p.device}; use fused=None to get the fastest path that is right for each tensor"
                )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # If True, torch.amp.GradScaler leaves unscaling and skipping to step(). True only with fused=True, because
        # trainers raise an error when they should clip the gradients of an optimizer that unscales. False with a
        # norm_group or shared norm, because sharded scalers exchange overflows when they unscale, and ranks with
        # different scales have no common norm.
        return (
            self.norm_group is None and self.shared_norm is None and all(group["fused"] for group in self.param_groups)
        )

    # ---------------------------------------------------------------- one step

    @with_hooks_if_any
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step. With a closure, first call the closure, and return its loss."""
        loss = evaluate(closure)
        self._take_step()
        return loss

    def _norm_spans(self) -> str:
        """Return what one norm covers: "global" (all parameters), "group" or "tensor"; "none" if there is no norm."""
        return getattr(self, "scope", self.NORM_SPANS)

    def _check_parameters(self, params: list[Tensor]) -> None:
        """Raise an error if a norm would miss some parameters; create state for parameters that a wrapper added."""
        if torch.compiler.is_compiling():
            return
        if self._checked_shards is self._shards and self._shards.matches(params, self.norm_group):
            return
        if self.shared_norm is None:
            partial_norms.check_whole(self, params)
        self._follow_parameters(params)
        self._find_shards(params)
        self._checked_shards = self._shards

    def _take_step(self, *given: Any) -> None:
        if self.shared_norm is not None:
            self._whole_square = self.shared_norm.square(self)
        if (rounding := self._rounding_step()) is not None:
            rounding.add_(1)
        if not self._step_by_kernels(*given):
            if self._layout is not None:  # assign only if necessary, because a compiled step cannot
                self._layout = None
            with torch.no_grad():
                self._step(self._gather(), *given)

    def _step(self, work: Work, *given: Any) -> None:
        """Take a step with torch operations, for tensors on any device."""
        raise NotImplementedError

    def _adapts(self, bucket: Bucket) -> list[bool]:
        """Return for each parameter of the bucket whether its step is scaled by a ratio of norms, as in LARS."""
        adapt: bool | None = bucket.group.get("adapt", False)
        return [p.ndim > 1 if adapt is None else adapt for p in bucket.owners]

    # ---------------------------------------------------------------- Triton kernels

    def _kernel_settings(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        """Return a group's settings, named as in `kernels.table_schema`; omitted ones get the defaults listed there."""
        own = {key: group[key] for key in self.defaults if key in SETTINGS and group[key] is not None}
        return {**own, "lr": lr_of(group), "sign": -1.0 if group["maximize"] else 1.0}

    def _step_by_kernels(self, mean_norms: Any = None) -> bool:
        """Take a step with the Triton kernels, if they are enabled and support it; return whether it was taken."""
        groups = self.param_groups
        params: list[Any] = [p for group in groups for p in group["params"]]
        if (
            self.KERNEL is None
            or torch.compiler.is_compiling()
            or not (params and params[0].device.type in kernels.DEVICES and kernels.installed())
            or any(not group["fused"] and (group["fused"] is False or group["foreach"] is not None) for group in groups)
        ):
            return False
        from .kernels.device_tables import KernelStep, take_step  # imported here, because it needs Triton

        grads: list[Tensor | None] = list(map(grad_of, params))
        if all(grad is None for grad in grads):
            return False
        checks.rates(groups)
        self._check_parameters(params)
        home = params[0].device
        self._move_counters(home)
        rounding, state = self._rounding_step(), self.state
        in_order = len(state) == len(params) and all(map(is_, state, params))  # the usual case, which needs no look-up
        step = KernelStep(
            method=self.KERNEL,
            scope=getattr(self, "scope", "global"),
            home=home,
            params=params,
            grads=grads,
            states=list(state.values()) if in_order else [state[p] for p in params],
            keys=[self.BUFFERS + self.COUNTS if self._needs_buffers(group) else () for group in groups],
            lengths=[len(group["params"]) for group in groups],
            settings=[self._kernel_settings(group) for group in groups],
            adapt=[group.get("adapt") for group in groups],
            shards=self._shards,
            grad_norm=self._grad_norm,
            skipped=self._skipped,
            scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            rounding=None if rounding is None else rounding.to(home),
            mean_norms=mean_norms,
            whole_square=self._whole_square,
            captured=home.type == "cuda" and torch.cuda.is_current_stream_capturing(),
        )
        layout, self._layout = self._layout, None  # an interrupted step would leave wrong counters in the layout
        try:
            layout = take_step(step, layout, self._gather, self._adapts)
        except kernels.Unsupported as error:
            if any(group["fused"] for group in groups):
                raise ValueError(f"fused=True, but {error}; use fused=None") from error
            return False
        if step.captured:
            self._captured += (step, layout)  # a layout allocated in a graph's memory cannot be used outside the graph
        else:
            self._layout = layout
        return True

    def _move_counters(self, home: torch.device) -> None:
        if self._grad_norm.device != home and not torch.compiler.is_compiling():  # the model was moved since
            self._grad_norm, self._skipped = self._grad_norm.to(home), self._skipped.to(home)

    # ---------------------------------------------------------------- torch operations

    def _rounding_step(self) -> Tensor | None:
        """Return the counter of steps, or None if no group rounds stochastically.

        The counter is on the device of the first parameter that is rounded stochastically. It is stored in the first
        parameter group, so checkpoints contain it.
        """
        params = [p for group in self.param_groups if group.get("stochastic_rounding") for p in group["params"]]
        if not params:
            return None
        group = self.param_groups[0]
        step = group.get("rounding_step")
        if not isinstance(step, Tensor) or step.device != params[0].device:  # first step, or just loaded or moved
            there = 0 if step is None else step
            step = group["rounding_step"] = torch.as_tensor(there, dtype=torch.int64, device=params[0].device)
        return step

    def _gather(self, grads: Mapping[Tensor, Tensor] | None = None) -> Work:
        """Return the inputs of a step: parameters with a gradient, in a `Bucket` for each group, device and dtype.

        Gradients are the parameters' `.grad`, or the values in `grads` if given. DTensors are replaced by their local
        shards.
        """
        checks.rates(self.param_groups)
        self._check_parameters([p for group in self.param_groups for p in group["params"]])
        buckets: dict[tuple[Any, ...], Bucket] = {}
        index = -1
        eager = not torch.compiler.is_compiling()
        for position, group in enumerate(self.param_groups):
            keys = self.BUFFERS if self._needs_buffers(group) else ()
            for p in group["params"]:
                index += 1
                grad = p.grad if grads is None else grads.get(p)
                if grad is None:
                    continue
                checks.gradient(grad, p.shape, p.device)
                # Inductor may compute a coefficient in the part of a foreach kernel that updates a one-element tensor,
                # while the parts of other tensors already read it. So compiled steps take such tensors one by one.
                alone = index if not eager and local(p).numel() == 1 else None
                kind = position, p.device, p.dtype
                bucket = buckets.get((*kind, alone))
                if bucket is None:
                    bucket = buckets[(*kind, alone)] = Bucket(group, *kind, buffers={key: [] for key in keys})
                self._add_to(bucket, p, grad, index)
        parts = list(buckets.values())
        for bucket in parts:
            if bucket.dtype.is_complex:
                bucket.view_as_real()
        home = parts[0].device if parts else self._grad_norm.device
        if (step := self._rounding_step()) is not None:
            for bucket in parts:
                if bucket.dtype == torch.bfloat16 and bucket.group.get("stochastic_rounding"):
                    bucket.rounding = step.to(bucket.device)
        # include `home` even if this rank has no gradient, because all ranks must take part in the same collectives
        on_host = eager and all(device.type == "cpu" for device in {home, *(b.device for b in parts)})
        on_host = on_host and not any(group["capturable"] for group in self.param_groups)
        # torch.amp.GradScaler sets these during a step, as one-element tensors
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            scale = float(scale) if on_host else scale.reshape(()).to(home, self._grad_norm.dtype)
        lengths = [len(group["params"]) for group in self.param_groups]
        return Work(parts, home, on_host, 1.0 if scale is None else scale, found_inf, self._shards, lengths)

    def _add_to(self, bucket: Bucket, p: Tensor, grad: Tensor, index: int) -> None:
        """Add one parameter to its bucket; convert state and gradient if necessary."""
        state = self.state[p]
        for key, buffers in bucket.buffers.items():
            buffer = state.get(key)
            # torch's fused kernels would read past the end of a buffer of another shape
            if buffer is None or (buffer.device, buffer.dtype) != (p.device, state_dtype(p)) or buffer.shape != p.shape:
                buffer = self._make_state(p, bucket.group)[key]
            buffers.append(local(buffer))
        for key in self.COUNTS:
            count = state.get(key)
            if not isinstance(count, Tensor) or (count.device, count.dtype) != (p.device, torch.float32):
                count = self._make_state(p, bucket.group)[key]
            bucket.counts.append(count)
        if self._shards.sharded:
            grad = arrived(local(aligned(p, grad)))
        # torch.compile does not support is_neg()
        if grad.layout != torch.strided or (not torch.compiler.is_compiling() and grad.is_neg()):
            grad = as_dense(grad)
        bucket.owners.append(p)
        bucket.indices.append(index)
        bucket.states.append(state)
        bucket.params.append(local(p))
        bucket.grads.append(grad)

    def _skip(self, work: Work, total: Tensor) -> bool | Tensor:
        """Set `grad_norm` to the root of `total` divided by the loss scale, and return whether to skip this step.

        Returns:
            A bool if the value may be read on the host, else a 0-d bool tensor, to avoid a device synchronisation.
        """
        self._move_counters(work.home)
        # in place, because attributes assigned in a CUDA graph or a compiled step are lost (and torch 2.13 loses what
        # a compiled step writes by copy_ into a 0-d float64 tensor on the CPU)
        norm = total.sqrt() / work.scale
        # the reported norm is infinite only if the step is skipped
        shown = torch.where(norm.isinf(), norm, norm.clamp_max(torch.finfo(self._grad_norm.dtype).max))
        torch._foreach_copy_([self._grad_norm], [shown])
        if work.on_host:
            overflow = work.found_inf is not None and float(work.found_inf) != 0.0
            skip = overflow or not math.isfinite(total) or not work.scale > 0.0  # the scale may be 0 (underflow) or NaN
            if skip:
                self._skipped += 1
            return skip
        bad = ~torch.isfinite(total)
        if work.found_inf is not None:  # a sum over devices, so any non-zero value means an overflow
            bad = bad | (work.found_inf.to(total.device) != 0).reshape(())
        if isinstance(work.scale, Tensor):
            bad = bad | ~(work.scale.to(total.device) > 0)
        self._skipped.add_(bad.to(self._skipped.device))
        return bad
