"""torch's step hooks and profiler ranges, at no cost to steps without hooks or an active profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer

from .torch_internals import GLOBAL_HOOKS, profiler_enabled

Step = TypeVar("Step", bound=Callable[..., Any])


def with_hooks_if_any(step: Step) -> Step:
    """Wrap `step` so that torch's hooks and profiler range, which take 15 us, run only if a hook or profiler exists."""
    with_hooks = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return with_hooks(self, *args, **kwargs)
        hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or any(GLOBAL_HOOKS)
        if self._inside_hooks or not (hooked or profiler_enabled()):  # the step of a subclass may call this step
            return step(self, *args, **kwargs)
        self._inside_hooks = True
        try:
            return with_hooks(self, *args, **kwargs)
        finally:
            self._inside_hooks = False

    wrapper.hooked = True  # type: ignore[attr-defined]  # else torch would wrap it again
    return wrapper  # type: ignore[return-value]
