"""torch's hooks and marks for profilers around a step, at no cost to steps that nobody watches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer

from .torch_internals import GLOBAL_HOOKS, profiler_enabled

Step = TypeVar("Step", bound=Callable[..., Any])


def unwatched(step: Step) -> Step:
    """`step` with torch's hooks and its mark for profilers, which take 15 us, only where someone looks."""
    watched = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or profiler_enabled()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or any(GLOBAL_HOOKS)
        ):
            if torch.compiler.is_compiling():
                return watched(self, *args, **kwargs)
            if not self._watched:  # a subclass's step may call this one
                self._watched = True
                try:
                    return watched(self, *args, **kwargs)
                finally:
                    self._watched = False
        return step(self, *args, **kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]  # or torch would wrap it again
    return wrapper  # type: ignore[return-value]
