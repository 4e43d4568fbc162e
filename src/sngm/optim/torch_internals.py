"""Private names of torch that sngm uses, each with a fallback for torch versions without it.

`torch._foreach_*` are not listed, because torch documents them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

try:
    from torch._C._dynamo import guards as tensor_guards
except ImportError:
    tensor_guards = None  # type: ignore[assignment]

# fused CPU kernels of torch.optim.SGD and Adam; if None, foreach is used
fused_sgd_: Any = getattr(torch, "_fused_sgd_", None)
fused_adam_: Any = getattr(torch, "_fused_adam_", None)


def _always(*_: Any) -> bool:
    return True


# Returns whether a profiler is active. If unknown, assume that one is, so that every step has a profiler range.
profiler_enabled: Any = getattr(torch.autograd, "_profiler_enabled", _always)

# Global optimizer hooks. If unknown, assume that there are some, so that every step runs them.
GLOBAL_HOOKS: tuple[Any, ...] = tuple(
    getattr(torch_optimizer, name, [None]) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
)


def same_metadata(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that says whether its arguments have the metadata of `tensors`.

    Metadata are the type, dtype, device, shape, strides, `requires_grad`, and whether values are negated or conjugated
    lazily. The function may also return False without need: if a tensor is given twice, or if autocast was switched.
    """
    try:  # one call for all tensors, in a sixth of the time
        guards: Any = tensor_guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check
        return check
    except (AttributeError, TypeError):
        pass
    expected = list(map(_metadata, tensors))
    return lambda *found: list(map(_metadata, found)) == expected


def _metadata(t: Tensor) -> tuple[Any, ...]:
    lazy = t.is_neg(), t.is_conj(), t._is_zerotensor()
    return type(t), t.dtype, t.device, t.size(), t.stride(), t.requires_grad, lazy
