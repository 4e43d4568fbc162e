"""Optimizer state: initialisation, checkpoints and copies."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .buckets import state_dtype
from .sharded_norms import Shards, is_dtensor, local, redistribute_like

EXECUTION_FLAGS = ("foreach", "fused", "capturable")  # these decide how a step is computed, not its result

SETTINGS: set[str] = set()  # setting names of all methods


class StatefulOptimizer(Optimizer):
    """Base class that creates, saves and loads the state of an optimizer: buffers with the shapes of the parameters."""

    BUFFERS: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    COUNTS: ClassVar[tuple[str, ...]] = ()  # one-element float32 tensors of state
    OTHERS: ClassVar[tuple[str, ...]] = ()  # tensors of other shapes, see `_like`
    # group keys that torch's optimizer needs to load our checkpoints, with the only value supported here
    TORCH_KEYS: ClassVar[dict[str, Any]] = {"dampening": 0.0}

    norm_group: Any
    shared_norm: Any = None  # the SharedNorm that this optimizer is a part of
    _grad_norm: Tensor
    _skipped: Tensor
    _shards = Shards(())  # placement of the parameters at the last step, or when groups were last added
    _groups_added = 0  # number of groups that hold parameters, when groups were last added

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        SETTINGS.update(inspect.signature(cls).parameters.keys() - {"params", "norm_group"})

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise an error for invalid hyper-parameters."""
        raise NotImplementedError

    def _find_shards(self, params: list[Tensor]) -> None:
        # a compiled step cannot assign attributes, so it uses the shards found when groups were added
        if not torch.compiler.is_compiling() and not self._shards.matches(params, self.norm_group):
            self._shards = Shards(params, self.norm_group)

    def _needs_buffers(self, group: dict[str, Any]) -> bool:
        return bool(group.get("momentum", 1.0))

    def _keys(self, p: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the tensors in the state of `p`, without the counts."""
        return self.BUFFERS if self._needs_buffers(group) else ()

    def _like(self, key: str, p: Tensor) -> Tensor:
        """Return a tensor with the shape and the placements of the state `key` of `p`."""
        return p

    def _make_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of `p`: create it as zeros, or move existing state to the device and dtype that `p` needs.

        State is created before the first step, so that a checkpoint of a new optimizer is complete and
        torch.distributed.checkpoint does not take a step to create it.
        """
        state: dict[str, Any] = self.state[p]
        if p.requires_grad or p.grad is not None:  # frozen parameters get state when they are unfrozen
            for key in self._keys(p, group):
                buffer, like = state.get(key), self._like(key, p)
                if buffer is None or buffer.is_meta:
                    state[key] = torch.zeros_like(like, dtype=state_dtype(p))
                elif buffer.shape != like.shape:
                    raise ValueError(
                        f"{key} has shape {tuple(buffer.shape)}, but its parameter has {tuple(p.shape)}; "
                        "a parameter whose shape was changed needs new state: delete optimizer.state[parameter]"
                    )
                elif (buffer.device, buffer.dtype) != (p.device, state_dtype(p)):
                    state[key] = buffer.to(p.device, state_dtype(p))  # the model was moved to another device or dtype
            for key in self.COUNTS:
                # on the parameter's device, because only the device knows whether a step was skipped
                count = 0.0 if getattr(state.get(key), "is_meta", False) else state.get(key, 0.0)
                state[key] = torch.as_tensor(count, dtype=torch.float32, device=p.device)
        return state

    def _follow_parameters(self, params: list[Tensor]) -> None:
        """Create or move state for parameters that a wrapper put into the groups in place of others.

        Accelerate with FSDP2 replaces parameters by DTensors, and DeepSpeed replaces them by flat partitions. During a
        step, DeepSpeed also removes groups temporarily; non-zero state of their parameters is not deleted.

        Raises:
            ValueError: the replaced parameters have taken steps, and their state does not fit the new parameters.
        """
        if all(p in self.state for p in params):
            return
        live = set(params)
        # state of zeros can be dropped, because a parameter that comes back gets the same state again
        for p in [p for p in self.state if isinstance(p, Tensor) and p not in live and not _has_values(self.state[p])]:
            del self.state[p]
        former = self._shards.params
        gone = [p for p in former if p not in live and p in self.state]
        if gone and not self._hides_groups():
            pairs = [(old, p) for old, p in zip(former, params, strict=False) if old is not p]
            if len(former) != len(params) or any(not is_dtensor(p) or p.shape != old.shape for old, p in pairs):
                raise ValueError(
                    f"{len(gone)} parameters that have taken steps were replaced in param_groups by others that their "
                    "state does not fit; let the wrapper (Accelerate, DeepSpeed) shard the model before the first "
                    "step, or delete optimizer.state[parameter] of the old ones to begin again with zero state"
                )
            for old, p in pairs:
                self.state[p] = {
                    key: redistribute_like(self._like(key, p), value) if key in (*self.BUFFERS, *self.OTHERS) else value
                    for key, value in self.state.pop(old, {}).items()
                }
        for group in self.param_groups:
            for p in group["params"]:
                self._make_state(p, group)

    def _hides_groups(self) -> bool:
        """Return whether groups that held parameters were removed or emptied, as DeepSpeed does during a step."""
        if getattr(self.shared_norm, "hides_parameters", False):
            return True
        return sum(bool(group["params"]) for group in self.param_groups) < self._groups_added

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class or of the corresponding torch optimizer.

        Hyper-parameters are taken from the checkpoint. Those that the checkpoint lacks, and `foreach`, `fused` and
        `capturable`, keep their current values. The state of low-precision parameters stays float32.
        """
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            found = list(state_dict) if isinstance(state_dict, dict) else type(state_dict).__name__
            raise ValueError(f"state_dict must be a dict with 'state' and 'param_groups', got {found}")
        groups = state_dict["param_groups"]
        if not (isinstance(groups, (list, tuple)) and all(isinstance(group, dict) for group in groups)):
            raise ValueError(f"state_dict: param_groups must be a list of dicts, got {groups!r}")
        warned, known = False, (*self.BUFFERS, *self.OTHERS)
        for index, entry in state_dict["state"].items():
            for key in known:
                value = entry.get(key) if isinstance(entry, dict) else entry
                if not (value is None or isinstance(value, Tensor)):
                    raise ValueError(f"state_dict: {key} of parameter {index} must be a tensor, got {value!r}")
            if entry and not warned and not any(key in entry for key in known):
                warned = True
                held = ", ".join(map(str, entry))
                warnings.warn(
                    f"the checkpoint holds {held} but no {self.BUFFERS[0]} for parameter {index}; "
                    f"{type(self).__name__} starts from zero there. Is it another optimizer's checkpoint?",
                    stacklevel=2,
                )
        keys = {key for group in groups for key in group}
        if (others := sorted(keys & SETTINGS - self.defaults.keys())) and not warned:
            warnings.warn(
                f"the checkpoint's groups hold {', '.join(others)}, which {type(self).__name__} does not know. "
                "Is it another optimizer's checkpoint?",
                stacklevel=2,
            )
        # torch would cast state to the parameter's dtype (pytorch#43706), so tensors are wrapped while it loads. The
        # hook is registered last, to run after the user's own hooks.
        handle = self.register_load_state_dict_pre_hook(_wrap_tensors)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" in state:  # this object was unpickled or copied
            super().__setstate__(state)
            self.__dict__.setdefault("norm_group", None)
            self._groups_added = sum(bool(group["params"]) for group in self.param_groups)
            self._find_shards([p for group in self.param_groups for p in group["params"]])
            return
        groups = []
        for here, loaded in zip(self.param_groups, state["param_groups"], strict=True):
            group = {**here, **loaded, **{key: here[key] for key in EXECUTION_FLAGS}}
            for key, known in self.TORCH_KEYS.items():
                if group[key] != known:
                    warnings.warn(
                        f"{type(self).__name__} has no {key}; the checkpoint's {group[key]!r} is ignored", stacklevel=6
                    )
                    group[key] = known
            try:
                self._check_group(group)
            except (TypeError, ValueError) as error:
                raise type(error)(f"state_dict: {error}; is it another optimizer's checkpoint?") from None
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
        if key not in (*self.BUFFERS, *self.OTHERS):
            return tensor.clone()
        like = self._like(key, p)
        if tensor.shape != like.shape:
            raise ValueError(f"{key} of shape {tuple(tensor.shape)} does not fit a parameter of {tuple(p.shape)}")
        return redistribute_like(like, tensor).to(device=p.device, dtype=state_dtype(p), copy=True)

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint in torch's format: the parameter groups, and the state of the parameters in them.

        Process groups that wrappers put into the parameter groups are left out.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        self._follow_parameters(params)
        known = set(params)
        hidden = {p: self.state[p] for p in self.state if isinstance(p, Tensor) and p not in known}
        for p in hidden:
            del self.state[p]
        try:
            saved = super().state_dict()
        finally:
            self.state.update(hidden)
        for group in saved["param_groups"]:
            group.pop("norm_group", None)
        return saved

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_grad_norm": self._grad_norm, "_skipped": self._skipped}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.norm_group = self.norm_group  # process groups cannot be copied
        twin._find_shards([p for group in twin.param_groups for p in group["params"]])
        return twin


def _has_values(state: dict[str, Any]) -> bool:
    """Return whether a parameter's state may hold a non-zero value, unlike the state of a new parameter."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True  # the values cannot be read, so they may be non-zero
    return any(not isinstance(v, Tensor) or (not v.is_meta and bool(local(v).any())) for v in state.values())


class _Wrapped:
    """A wrapper for a tensor that torch's load_state_dict must not cast."""

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
