"""Base class of the optimizers: validates groups, gathers the tensors of a step, skips steps with non-finite norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import checks, kernels
from .buckets import Bucket, Closure, Work, as_dense, evaluate, lr_of, state_dtype
from .hooks import with_hooks_if_any
from .sharded_norms import local, local_gradient
from .state import StatefulOptimizer


class LargeBatchOptimizer(StatefulOptimizer):
    """Base class of the optimizers. Subclasses declare their buffers and implement `_step`.

    Attributes:
        norm_group: process group over whose ranks norms are summed, or None; DTensors need none. Not saved in
            checkpoints.
    """

    FUSED_DTYPES: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64, torch.complex64, torch.complex128)

    KERNEL: ClassVar[str | None] = None  # name of the method in the Triton kernels, if they support it

    _inside_hooks = False  # True while a step runs under hooks or a profiler
    _layout: Any = None  # scratch memory of the Triton kernels
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
        if not isinstance(params, Tensor):  # torch rejects a single tensor itself
            params = cast(ParamsT, list(params))
            if not params:
                raise ValueError("params must hold at least one parameter, got an empty iterable")
        super().__init__(params, {**defaults, **self.TORCH_KEYS})
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

        Methods and scopes with several norms, or another kind of norm, report that of the whole gradient. Reading
        this property does not synchronise with the device.
        """
        return self._grad_norm.clone()  # steps update the original in place

    @property
    def skipped(self) -> Tensor:
        """The number of steps skipped because the norm was not finite, as a 0-d tensor on the device."""
        return self._skipped.clone()

    # ---------------------------------------------------------------- groups

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise an error for invalid hyper-parameters. Subclasses check their own too."""
        checks.rate("lr", group["lr"])
        checks.number("weight_decay", group["weight_decay"], 0.0)
        checks.flag("maximize", group["maximize"])
        checks.flag("foreach", group["foreach"], none=True)
        checks.flag("fused", group["fused"], none=True)
        checks.flag("capturable", group["capturable"])
        checks.flag("stochastic_rounding", group.get("stochastic_rounding", False))
        if group["foreach"] and group["fused"]:
            raise ValueError("foreach and fused must not both be True")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. If the group is invalid, raise an error and leave the optimizer unchanged."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"param_group must be a dict with a 'params' entry, got {param_group!r}")
        params = param_group["params"]
        if not isinstance(params, (Tensor, set)):  # a generator can be consumed only once
            params = list(params)
        tensors = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
        checks.parameters(tensors)
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
        self._find_shards([p for group in self.param_groups for p in group["params"]])
        if param_group.get("stochastic_rounding") and param_group["params"]:
            self._rounding_step(param_group["params"][0].device)  # now, so that every checkpoint contains it

    def _check_fused(self, params: list[Any]) -> None:
        for i, p in enumerate(params):
            if not isinstance(p, Tensor) or (self.KERNEL and kernels.support([p])):
                continue
            if p.device.type != "cpu" or p.dtype not in self.FUSED_DTYPES:
                served = ", ".join(str(d).removeprefix("torch.") for d in self.FUSED_DTYPES) or "nothing"
                lacking = (
                    "" if kernels.installed() else " (and its kernels for CUDA need Triton, which is not installed)"
                )
                raise ValueError(
                    f"fused=True serves {served} on cpu{lacking}, but params[{i}] is {p.dtype} on {p.device}; "
                    "use fused=None to get the fastest path that is right for each tensor"
                )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # If True, torch.amp.GradScaler leaves unscaling and skipping to step(). Only with fused=True, because trainers
        # refuse to clip the gradients of such optimizers. Not with a norm_group: sharded scalers exchange overflows
        # when they unscale, and ranks with different scales have no common norm.
        return self.norm_group is None and all(group["fused"] for group in self.param_groups)

    # ---------------------------------------------------------------- one step

    @with_hooks_if_any
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step. With a closure, first compute its loss, and return it."""
        loss = evaluate(closure)
        self._take_step()
        return loss

    def _take_step(self, *given: Any) -> None:
        with torch.no_grad():
            work = self._gather()
            if not (self._wants_kernels() and self._step_by_kernels(work, *given)):
                self._step(work, *given)

    def _step(self, work: Work, *given: Any) -> None:
        """Take a step with torch operations, for tensors on any device."""
        raise NotImplementedError

    def _adapts(self, bucket: Bucket) -> list[bool]:
        """Return for each parameter whether its step is scaled by a ratio of norms."""
        adapt: bool | None = bucket.group.get("adapt", False)
        return [p.ndim > 1 if adapt is None else adapt for p in bucket.owners]

    # ---------------------------------------------------------------- Triton kernels

    def _kernel_settings(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        """Return a group's settings under the names of `kernels.table_schema`."""
        return {
            "lr": lr_of(group),
            "momentum": group.get("momentum", 0.0),
            "weight_decay": group["weight_decay"],
            "sign": -1.0 if group["maximize"] else 1.0,
            "stochastic": group.get("stochastic_rounding", False),
        }

    def _wants_kernels(self) -> bool:
        """Return whether every group has fused=True or leaves the implementation open."""
        return all(
            group["fused"] or (group["fused"] is None and group["foreach"] is None) for group in self.param_groups
        )

    def _step_by_kernels(self, work: Work, mean_norms: Any = None) -> bool:
        """Take this step with the Triton kernels; return False if they do not support its tensors."""
        buckets = work.buckets
        if self.KERNEL is None or torch.compiler.is_compiling() or not kernels.support([p for b in buckets for p in b.params[:1]]):
            return False
        from .kernels.device_tables import KernelStep, take_step  # imported late: needs Triton

        self._move_counters(work.home)
        step = KernelStep(
            method=self.KERNEL,
            scope=getattr(self, "scope", "global"),
            work=work,
            settings=[self._kernel_settings(group) for group in self.param_groups],
            adapts=[adapts for bucket in buckets for adapts in self._adapts(bucket)],
            grad_norm=self._grad_norm,
            skipped=self._skipped,
            mean_norms=mean_norms,
        )
        layout, self._layout = self._layout, None  # an interrupted step leaves its counters in a wrong state
        try:
            layout = take_step(step, layout)
        except kernels.Unsupported as error:
            if any(group["fused"] for group in self.param_groups):
                raise ValueError(f"fused=True, but {error}; use fused=None") from error
            return False
        if work.home.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured += (step, layout)  # a layout made in a graph's memory cannot be used outside
        else:
            self._layout = layout
        return True

    def _move_counters(self, home: torch.device) -> None:
        if self._grad_norm.device != home and not torch.compiler.is_compiling():  # the model was moved since
            self._grad_norm, self._skipped = self._grad_norm.to(home), self._skipped.to(home)

    # ---------------------------------------------------------------- torch operations

    def _rounding_step(self, device: torch.device) -> Tensor:
        """Return the counter of steps with stochastic rounding, as a tensor on `device`.

        It is stored in the first group, and so in checkpoints.
        """
        group = self.param_groups[0]
        step = group.get("rounding_step")
        if not isinstance(step, Tensor) or step.device != device:  # first step, or just loaded, or the model was moved
            there = 0 if step is None else step
            step = group["rounding_step"] = torch.as_tensor(there, dtype=torch.int64, device=device)
        return step

    def _gather(self, grads: Mapping[Tensor, Tensor] | None = None) -> Work:
        """Return all parameters that have a gradient (`.grad`, or an entry of `grads`), in buckets.

        DTensors are replaced by their local shards.
        """
        checks.rates(self.param_groups)
        self._find_shards([p for group in self.param_groups for p in group["params"]])
        sharded = self._shards.sharded
        buckets: dict[tuple[int, torch.device, torch.dtype], Bucket] = {}
        index = -1
        strided, eager = torch.strided, not torch.compiler.is_compiling()
        for position, group in enumerate(self.param_groups):
            keys = self.BUFFERS if self._needs_buffers(group) else ()
            bucket = None
            for p in group["params"]:
                index += 1
                grad = p.grad if grads is None else grads.get(p)
                if grad is None:
                    continue
                device, dtype, shape = p.device, p.dtype, p.shape
                if grad.shape != shape or grad.device != device:
                    checks.gradient(grad, shape, device)
                if bucket is None or bucket.dtype is not dtype or bucket.device != device:
                    bucket = buckets.get((position, device, dtype))
                    if bucket is None:
                        bucket = Bucket(group, position, device, dtype, buffers={key: [] for key in keys})
                        buckets[position, device, dtype] = bucket
                    wanted = state_dtype(p)
                state = self.state[p]
                for key in keys:
                    buffer = state.get(key)
                    if (
                        buffer is None
                        or buffer.dtype is not wanted
                        or buffer.device != device
                        or buffer.shape != shape  # torch's fused kernels would read past its end
                    ):
                        buffer = self._make_state(p, group)[key]
                    bucket.buffers[key].append(local(buffer) if sharded else buffer)
                for key in self.COUNTS:
                    count = state.get(key)
                    if not isinstance(count, Tensor) or count.dtype is not torch.float32 or count.device != device:
                        count = self._make_state(p, group)[key]
                    bucket.counts.append(count)
                if sharded:
                    grad = local_gradient(p, grad)
                bucket.owners.append(p)
                bucket.states.append(state)
                bucket.params.append(local(p) if sharded else p)
                bucket.indices.append(index)
                # inlined because it runs for every tensor; torch.compile does not support is_neg()
                if grad.layout is not strided or (eager and grad.is_neg()):
                    grad = as_dense(grad)
                bucket.grads.append(grad)
        parts = list(buckets.values())
        for bucket in parts:
            if bucket.dtype.is_complex:
                bucket.view_as_real()
        home = parts[0].device if parts else self._grad_norm.device
        if any(group.get("stochastic_rounding") for group in self.param_groups):
            step = self._rounding_step(home).add_(1)
            for bucket in parts:
                if bucket.dtype == torch.bfloat16 and bucket.group.get("stochastic_rounding"):
                    bucket.rounding = step.to(bucket.device)
        on_host = eager and all(b.device.type == "cpu" and not b.group["capturable"] for b in parts)
        # torch.amp.GradScaler sets these during a step, as one-element tensors
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            scale = float(scale) if on_host else scale.reshape(()).to(home, self._grad_norm.dtype)
        lengths = [len(group["params"]) for group in self.param_groups]
        return Work(parts, home, on_host, 1.0 if scale is None else scale, found_inf, self._shards, lengths)

    def _skip(self, work: Work, total: Tensor) -> bool | Tensor:
        """Record the norm whose square is `total`, and return whether this step must be skipped.

        Returns:
            A bool if the value may be read on the host, else a 0-d bool tensor, to avoid a device synchronisation.
        """
        self._move_counters(work.home)
        # in place: attributes assigned in a CUDA graph or a compiled step are lost (and torch 2.13 loses what a
        # compiled step writes by copy_ into a 0-d float64 tensor on the CPU)
        norm = total.sqrt() / work.scale
        # the reported norm is infinite only if the step is skipped
        shown = torch.where(norm.isinf(), norm, norm.clamp_max(torch.finfo(self._grad_norm.dtype).max))
        torch._foreach_copy_([self._grad_norm], [shown])
        if work.on_host:
            overflow = work.found_inf is not None and float(work.found_inf) != 0.0
            skip = overflow or not math.isfinite(total) or not work.scale > 0.0  # halved until it underflowed, or NaN
            if skip:
                self._skipped += 1
            return skip
        bad = ~torch.isfinite(total)
        if work.found_inf is not None:  # a sum over devices: any non-zero value is an overflow
            bad = bad | (work.found_inf.to(total.device) != 0).reshape(())
        if isinstance(work.scale, Tensor):
            bad = bad | ~(work.scale.to(total.device) > 0)
        self._skipped.add_(bad.to(self._skipped.device))
        return bad

