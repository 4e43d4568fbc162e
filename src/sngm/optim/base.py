"""What every method here shares: checked groups, zero state, checkpoints, and skipping a non-finite step."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from . import checks, norms
from .work import Bucket, Work, state_dtype

HOW = ("foreach", "fused", "capturable")  # how a step is computed, never what it computes


class LargeBatchOptimizer(Optimizer):
    """Base of the methods. Subclasses say which buffers they keep and write `step`.

    Attributes:
        grad_norm: 0-d tensor on the device: the norm the last step divided by, and for methods and scopes
            with many norms, or another one, that of the whole gradient. Reading it does not wait for the device.
        skipped: 0-d tensor, how many steps were skipped because that norm was not finite.
        norm_group: process group over whose shards norms are summed, or None. Not part of saved state.
    """

    BUFFERS: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    FUSED_DTYPES: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    # keys a torch optimizer's checkpoint must hold to load there, with the only value our rules know
    FOREIGN: ClassVar[dict[str, Any]] = {"dampening": 0.0}

    grad_norm: Tensor
    skipped: Tensor

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
        home = owners[0].device if owners else torch.device("cpu")
        if home.type == "meta":  # the model will be materialised later, these are read from the start
            home = torch.device("cpu")
        exact = any(p.dtype in (torch.float64, torch.complex128) for p in owners)
        self.grad_norm = torch.zeros((), dtype=torch.float64 if exact else torch.float32, device=home)
        self.skipped = torch.zeros((), dtype=torch.int64, device=home)

    # ---------------------------------------------------------------- groups

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse bad hyper-parameters. Subclasses add their own."""
        checks.rate("lr", group["lr"])
        checks.number("weight_decay", group["weight_decay"], 0.0)
        checks.flag("maximize", group["maximize"])
        checks.flag("foreach", group["foreach"], none=True)
        checks.flag("fused", group["fused"], none=True)
        checks.flag("capturable", group["capturable"])
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

    def _check_fused(self, params: list[Any]) -> None:
        for i, p in enumerate(params):
            if isinstance(p, Tensor) and (p.device.type != "cpu" or p.dtype not in self.FUSED_DTYPES):
                served = ", ".join(str(d).removeprefix("torch.") for d in self.FUSED_DTYPES) or "nothing"
                raise ValueError(
                    f"fused=True serves {served} on cpu, but params[{i}] is {p.dtype} on {p.device}; "
                    "use fused=None to get the fastest path that is right for each tensor"
                )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler then leaves unscaling and skipping to step(); only where fused is asked for,
        # because trainers refuse to clip gradients of optimizers that say so.
        return all(group["fused"] for group in self.param_groups)

    # ---------------------------------------------------------------- state

    def _needs_buffers(self, group: dict[str, Any]) -> bool:
        return bool(group.get("momentum", 1.0))

    def _make_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Zero state for `p`, as it would be after a step that changed nothing.

        It exists before the first step, so that a checkpoint of a fresh optimizer is complete and
        torch.distributed.checkpoint has no reason to take a step to make it so.
        """
        state: dict[str, Any] = self.state[p]
        if p.requires_grad or p.grad is not None:  # frozen parameters get theirs when they thaw
            for key in self.BUFFERS if self._needs_buffers(group) else ():
                buffer = state.get(key)
                if buffer is None or buffer.is_meta:
                    state[key] = torch.zeros_like(p, dtype=state_dtype(p))
                elif (buffer.device, buffer.dtype) != (p.device, state_dtype(p)):
                    state[key] = buffer.to(p.device, state_dtype(p))  # the model was moved or cast since
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class or of the torch optimizer it extends.

        Hyper-parameters come from the checkpoint; those it lacks, and `foreach`, `fused` and `capturable`,
        stay as they are here. State of low-precision parameters stays float32.
        """
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            found = list(state_dict) if isinstance(state_dict, dict) else type(state_dict).__name__
            raise ValueError(f"state_dict must be a dict with 'state' and 'param_groups', got {found}")
        for index, entry in state_dict["state"].items():
            for key in self.BUFFERS:
                value = entry.get(key) if isinstance(entry, dict) else entry
                if not (value is None or isinstance(value, Tensor)):
                    raise ValueError(f"state_dict: {key} of parameter {index} must be a tensor, got {value!r}")
            if entry and not any(key in entry for key in self.BUFFERS):
                held = ", ".join(map(str, entry))
                warnings.warn(
                    f"the checkpoint holds {held} but no {self.BUFFERS[0]} for parameter {index}; "
                    f"{type(self).__name__} starts from zero there. Is it another optimizer's checkpoint?",
                    stacklevel=2,
                )
                break
        # torch would cast state to the parameter's dtype (pytorch#43706), so tensors pass through it wrapped;
        # the hook is registered last to see what the user's own hooks made of the checkpoint.
        handle = self.register_load_state_dict_pre_hook(_wrap_tensors)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" in state:  # unpickled or copied
            super().__setstate__(state)
            self.__dict__.setdefault("norm_group", None)
            return
        groups = []
        for here, loaded in zip(self.param_groups, state["param_groups"], strict=True):
            group = {**here, **loaded, **{key: here[key] for key in HOW}}
            for key, known in self.FOREIGN.items():
                if group[key] != known:
                    warnings.warn(
                        f"{type(self).__name__} has no {key}; the checkpoint's {group[key]!r} is ignored", stacklevel=6
                    )
                    group[key] = known
            self._check_group(group)
            groups.append(group)
        values = {
            p: {k: self._unwrap(p, k, v) for k, v in entry.items()} if isinstance(p, Tensor) else entry
            for p, entry in state["state"].items()
        }
        state["state"].update(values)
        super().__setstate__({"state": state["state"], "param_groups": groups})
        for group in groups:
            for p in group["params"]:
                self._make_state(p, group)

    def _unwrap(self, p: Tensor, key: str, value: Any) -> Any:
        if not isinstance(value, _Wrapped):
            return value
        tensor = value.tensor
        if key not in self.BUFFERS:
            return tensor.clone()
        if tensor.shape != p.shape:
            raise ValueError(f"{key} of shape {tuple(tensor.shape)} does not fit a parameter of {tuple(p.shape)}")
        return tensor.to(device=p.device, dtype=state_dtype(p), copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "grad_norm": self.grad_norm, "skipped": self.skipped}

    def __deepcopy__(self, memo: dict[int, Any]) -> LargeBatchOptimizer:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.norm_group = self.norm_group  # a process group cannot be copied, and is meant to be shared
        return twin

    # ---------------------------------------------------------------- one step

    def _gather(self, grads: Mapping[Tensor, Tensor] | None = None) -> Work:
        """Everything with a gradient (its own, or one in `grads`), in buckets."""
        buckets: dict[tuple[int, torch.device, torch.dtype], Bucket] = {}
        index = -1
        strided = torch.strided
        for position, group in enumerate(self.param_groups):
            keys = self.BUFFERS if self._needs_buffers(group) else ()
            bucket = None
            for p in group["params"]:
                index += 1
                grad = p.grad if grads is None else grads.get(p)
                if grad is None:
                    continue
                device, dtype = p.device, p.dtype
                if bucket is None or bucket.dtype is not dtype or bucket.device != device:
                    bucket = buckets.get((position, device, dtype))
                    if bucket is None:
                        bucket = Bucket(group, position, device, dtype, buffers={key: [] for key in keys})
                        buckets[position, device, dtype] = bucket
                    wanted = state_dtype(p)
                state = self.state[p]
                for key in keys:
                    buffer = state.get(key)
                    if buffer is None or buffer.dtype is not wanted or buffer.device != device:
                        buffer = self._make_state(p, group)[key]
                    bucket.buffers[key].append(buffer)
                bucket.params.append(p)
                bucket.indices.append(index)
                bucket.grads.append(grad if grad.layout is strided else grad.to_dense())
        parts = list(buckets.values())
        for bucket in parts:
            bucket.owners = bucket.params
            if bucket.dtype.is_complex:
                bucket.view_as_real()
        home = parts[0].device if parts else self.grad_norm.device
        on_host = not torch.compiler.is_compiling() and all(
            b.device.type == "cpu" and not b.group["capturable"] for b in parts
        )
        # torch.amp.GradScaler sets these for the time of a step, as tensors of one element
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            scale = float(scale) if on_host else scale.reshape(()).to(home)
        return Work(parts, home, on_host, 1.0 if scale is None else scale, found_inf)

    def _over_shards(
        self, buckets: list[Bucket], parts: list[Tensor], *, kinds: int, home: torch.device
    ) -> list[Tensor]:
        """Sums over `norm_group` of squared norms, parts[i] being (kinds, tensors of bucket i)."""
        if self.norm_group is None:
            return parts
        # one place a parameter, with or without a gradient here, so that all ranks agree on the places
        count = sum(len(group["params"]) for group in self.param_groups)
        packed = torch.zeros(kinds, count, dtype=norms.sum_dtype(home), device=home)
        for bucket, part in zip(buckets, parts, strict=True):
            packed[:, bucket.indices] = part.to(home)
        dist.all_reduce(packed, group=self.norm_group)
        return [packed[:, b.indices].to(b.device) for b in buckets]

    @staticmethod
    def _total(work: Work, parts: list[Tensor]) -> Tensor:
        if not parts:
            return torch.zeros((), dtype=norms.sum_dtype(work.home), device=work.home)
        total = parts[0].sum().to(work.home)
        for part in parts[1:]:
            total = total + part.sum().to(work.home)
        return total

    def _skip(self, work: Work, total: Tensor) -> bool | Tensor:
        """Record the norm whose square is `total`; say whether this step must change nothing.

        A bool where the host may know, else a 0-d bool tensor, for steps that never wait for the device.
        """
        self.grad_norm = (total.sqrt() / work.scale).to(self.grad_norm.dtype)
        if work.on_host:
            overflow = work.found_inf is not None and float(work.found_inf) != 0.0
            skip = overflow or not math.isfinite(total)
            if skip:
                self.skipped = self.skipped.to(work.home) + 1
            return skip
        bad = ~torch.isfinite(total)
        if work.found_inf is not None:  # a sum over devices: any value but zero is an overflow
            bad = bad | (work.found_inf.to(total.device) != 0).reshape(())
        self.skipped = self.skipped.to(bad.device)
        if any(group["capturable"] for group in self.param_groups):
            self.skipped.add_(bad)  # in place, so that a replayed CUDA graph counts too
        else:
            self.skipped = self.skipped + bad
        return bad


class _Wrapped:
    """A tensor that torch's load_state_dict hands on untouched."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _wrap_tensors(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        i: {k: _Wrapped(v) if isinstance(v, Tensor) else v for k, v in entry.items()}
        if isinstance(entry, dict)
        else entry
        for i, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
