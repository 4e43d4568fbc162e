"""What every method here shares: checked groups, gathering a step's tensors, and skipping a non-finite step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import checks, kernels
from .buckets import Bucket, Closure, Work, as_dense, evaluate, state_dtype
from .hooks import unwatched
from .sharded_norms import local, local_gradient
from .state import KeepsState

grad_of = attrgetter("grad")


class LargeBatchOptimizer(KeepsState):
    """Base of the methods. Subclasses say which buffers they keep and write `_step`.

    Attributes:
        norm_group: process group over whose ranks norms are summed, or None; DTensors need none. Not part of
            saved state.
    """

    FUSED_DTYPES: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64, torch.complex64, torch.complex128)

    KERNEL: ClassVar[str | None] = None  # the rule our own kernels know this method by

    _watched = False  # while hooks and profilers see a step
    _captured: tuple[Any, ...] = ()  # plans that CUDA graphs were made of

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "step" in cls.__dict__:
            cls.step = unwatched(cls.__dict__["step"])  # type: ignore[method-assign]

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, norm_group: Any = None) -> None:
        if norm_group is not None and not (dist.is_available() and isinstance(norm_group, dist.ProcessGroup)):
            raise TypeError(f"norm_group must be None or a torch.distributed process group, got {norm_group!r}")
        self.norm_group = norm_group
        checks.plain(defaults)
        self._check_group(defaults)
        if not isinstance(params, Iterable):
            raise TypeError(
                f"params must be an iterable of parameters or groups, got {type(params).__name__}"
                + ("; pass module.parameters()" if isinstance(params, torch.nn.Module) else "")
            )
        if not isinstance(params, Tensor):  # torch refuses a lone tensor by itself
            params = cast(ParamsT, list(params))
            if not params:
                raise ValueError("params must hold at least one parameter, got an empty iterable")
        super().__init__(params, {**defaults, **self.FOREIGN})
        owners = [p for group in self.param_groups for p in group["params"]]
        if not owners and norm_group is None:
            raise ValueError("params must hold at least one parameter, got only empty groups")
        home = torch.device("cpu")
        if owners:
            home = owners[0].device
        elif dist.get_backend(norm_group) == "nccl":  # which exchanges nothing that is on the host
            home = torch.device("cuda", torch.cuda.current_device())
        if home.type == "meta":  # the model will be materialised later, these are read from the start
            home = torch.device("cpu")
        exact = any(p.dtype in (torch.float64, torch.complex128) for p in owners)
        self._grad_norm = torch.zeros((), dtype=torch.float64 if exact else torch.float32, device=home)
        self._skipped = torch.zeros((), dtype=torch.int64, device=home)

    @property
    def grad_norm(self) -> Tensor:
        """0-d tensor on the device: the norm the last step divided by.

        For methods and scopes with many norms, or another one, that of the whole gradient. Reading it does not
        wait for the device.
        """
        return self._grad_norm.clone()  # steps write into the one we keep

    @property
    def skipped(self) -> Tensor:
        """0-d tensor on the device: how many steps were skipped because that norm was not finite."""
        return self._skipped.clone()

    # ---------------------------------------------------------------- groups

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse bad hyper-parameters. Subclasses add their own."""
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
        """Add a group. A refused group leaves the optimizer as it was."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"param_group must be a dict with a 'params' entry, got {param_group!r}")
        params = param_group["params"]
        if not isinstance(params, (Tensor, set)):  # a generator can be gone through only once
            params = list(params)
        tensors = [params] if isinstance(params, Tensor) else [p[1] if isinstance(p, tuple) else p for p in params]
        checks.parameters(tensors)
        checks.keys(param_group, [*self.defaults, "params", "param_names"])
        checks.plain(param_group)
        filled = {**self.defaults, **param_group}
        self._check_group(filled)
        for key, known in self.FOREIGN.items():
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
            self._rounding_step(param_group["params"][0].device)  # from the start, so that every checkpoint has it

    def _check_fused(self, params: list[Any]) -> None:
        for i, p in enumerate(params):
            if not isinstance(p, Tensor) or (p.device.type in kernels.DEVICES and self.KERNEL and kernels.serve([p])):
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
        # torch.amp.GradScaler then leaves unscaling and skipping to step(); only where fused is asked for,
        # because trainers refuse to clip gradients of optimizers that say so. Not with a norm_group: scalers that ask
        # other ranks for overflows ask when they unscale, and with scales that differ there is no common norm.
        return self.norm_group is None and all(group["fused"] for group in self.param_groups)

    # ---------------------------------------------------------------- one step

    @unwatched
    def step(self, closure: Closure | None = None) -> Any:
        """Take one step; with a closure, compute and return its loss first."""
        loss = evaluate(closure)
        self._take_step()
        return loss

    def _take_step(self, *given: Any) -> None:
        plan = self._plan_step()
        if plan is not None:
            try:
                plan.step(self, *given)
            except BaseException:  # kernels that did not run left counters behind
                self._plan = None
                raise
        else:
            with torch.no_grad():
                self._step(*given)

    def _step(self, *given: Any) -> None:
        """The step in torch's own operations, for tensors on any device."""
        raise NotImplementedError

    def _adapts(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Whether the step of `p` is scaled by a ratio of norms."""
        adapt: bool | None = group.get("adapt", False)
        return p.ndim > 1 if adapt is None else adapt

    def _kernel_settings(self, group: dict[str, Any]) -> dict[str, float]:
        """A group's settings as `kernels.layout` names them."""
        return {
            "momentum": group.get("momentum", 0.0),
            "weight_decay": group["weight_decay"],
            "sign": -1.0 if group["maximize"] else 1.0,
            "stochastic": group.get("stochastic_rounding", False),
        }

    def _rounding_step(self, device: torch.device) -> Tensor:
        """The number of steps so far with stochastic rounding, on the device where it is to be counted.

        It is kept with the first group, to be saved with it.
        """
        group = self.param_groups[0]
        step = group.get("rounding_step")
        if not isinstance(step, Tensor) or step.device != device:  # the first time, loaded, or the model was moved
            there = 0 if step is None else step
            step = group["rounding_step"] = torch.as_tensor(there, dtype=torch.int64, device=device)
        return step

    def _wants_kernels(self) -> bool:
        """Whether the groups leave the choice to us, or ask for fused steps."""
        return self.KERNEL is not None and all(
            group["fused"] or (group["fused"] is None and group["foreach"] is None) for group in self.param_groups
        )

    def _plan_step(self) -> Any:
        """A plan of this step for our own kernels, or None where they do not serve."""
        if torch.compiler.is_compiling():
            return None
        try:
            return self._make_plan()
        except BufferError as error:  # a tensor wraps others, which kernels know nothing of
            if any(group["fused"] for group in self.param_groups):
                raise ValueError(f"fused=True, but {error}; use fused=None") from error
            return None

    def _make_plan(self) -> Any:
        params = self.param_groups[0]["params"]
        if len(self.param_groups) > 1:
            params = [p for group in self.param_groups for p in group["params"]]
        plan, self._plan = self._plan, None
        if plan is not None:
            grads = pieces_of_gradients(params, plan.sharded)
            if plan.ready(self, params, grads):
                self._plan = plan
                if not plan.capturing():
                    return plan
                plan = plan.for_capture()
                self._captured += (plan,)  # a graph needs its memory for as long as it may be replayed
                return plan
        if not (self._wants_kernels() and params and kernels.serve(params)):
            return None
        from .kernels.plan import Plan  # not before a GPU is used: it needs Triton

        self._find_shards(params)
        if plan is None or plan.sharded != self._shards.sharded:
            grads = pieces_of_gradients(params, self._shards.sharded)
        plan = Plan(self, params, grads)
        if plan.capturing():  # its tables are filled when the graph runs, and are nothing to go by until then
            self._captured += (plan,)
        else:
            self._plan = plan
        return plan

    def _gather(self, grads: Mapping[Tensor, Tensor] | None = None) -> Work:
        """Everything with a gradient (its own, or one in `grads`), in buckets; of DTensors the pieces here."""
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
                        or buffer.shape != shape  # torch's fused kernels would go past its end
                    ):
                        buffer = self._make_state(p, group)[key]
                    bucket.buffers[key].append(local(buffer) if sharded else buffer)
                if sharded:
                    grad = local_gradient(p, grad)
                bucket.owners.append(p)
                bucket.params.append(local(p) if sharded else p)
                bucket.indices.append(index)
                # inline, because it is asked once a tensor; the compiler cannot ask for signs left to be changed
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
        # torch.amp.GradScaler sets these for the time of a step, as tensors of one element
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            scale = float(scale) if on_host else scale.reshape(()).to(home, self._grad_norm.dtype)
        lengths = [len(group["params"]) for group in self.param_groups]
        return Work(parts, home, on_host, 1.0 if scale is None else scale, found_inf, self._shards, lengths)

    def _skip(self, work: Work, total: Tensor) -> bool | Tensor:
        """Record the norm whose square is `total`; say whether this step must change nothing.

        A bool where the host may know, else a 0-d bool tensor, for steps that never wait for the device.
        """
        if self._grad_norm.device != work.home and not torch.compiler.is_compiling():  # the model was moved since
            self._grad_norm, self._skipped = self._grad_norm.to(work.home), self._skipped.to(work.home)
        # in place: what a CUDA graph or a compiled step assigns to an optimizer's attributes is lost
        # (and so is what copy_ writes into a 0-d float64 tensor on the CPU, in a step compiled by torch 2.13)
        norm = total.sqrt() / work.scale
        # shown as not finite only where the step is skipped
        shown = torch.where(norm.isinf(), norm, norm.clamp_max(torch.finfo(self._grad_norm.dtype).max))
        torch._foreach_copy_([self._grad_norm], [shown])
        if work.on_host:
            overflow = work.found_inf is not None and float(work.found_inf) != 0.0
            skip = overflow or not math.isfinite(total) or work.scale == 0.0  # 0: halved until nothing was left
            if skip:
                self._skipped += 1
            return skip
        bad = ~torch.isfinite(total)
        if work.found_inf is not None:  # a sum over devices: any value but zero is an overflow
            bad = bad | (work.found_inf.to(total.device) != 0).reshape(())
        if isinstance(work.scale, Tensor):
            bad = bad | (work.scale.to(total.device) == 0)
        self._skipped.add_(bad.to(self._skipped.device))
        return bad


def pieces_of_gradients(params: list[Tensor], sharded: bool) -> list[Any]:
    """The gradients, of DTensors the pieces here; None where there is none."""
    grads = list(map(grad_of, params))
    if sharded:
        return [None if g is None else local_gradient(p, g) for p, g in zip(params, grads, strict=True)]
    return grads
