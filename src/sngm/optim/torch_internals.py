"""Private names of torch that sngm uses, each with a fallback for torch versions without it.

`torch._foreach_*` are not listed, because torch documents them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

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
