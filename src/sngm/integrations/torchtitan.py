"""torchtitan: `OptimizersContainer`, with one norm over all parts of the model. torchtitan is imported at first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import optim
from ..optim.shared_norm import SharedNorm

METHODS = ("SNGM", "SpectralSNGM", "LARS", "LAMB")


def __getattr__(name: str) -> Any:
    if name == "OptimizersContainer":
        return _container()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _container() -> Any:
    from torchtitan.components.optimizer import OptimizersContainer as Titan

    class OptimizersContainer(Titan):  # type: ignore[misc]
        """torchtitan's container, which also accepts the optimizers of this package by their class names.

        It has one optimizer for each part of the model. The SNGM optimizers with scope "global" share one norm. With
        pipeline parallelism, pass a process group with one rank of each stage as
        ``optimizer_factory_kwargs_by_name={"SNGM": {"norm_group": group}}``.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(Titan.Config):  # type: ignore[misc]
            """torchtitan's own config; its `build` makes this container."""

        def __init__(self, config: Any, *, model_parts: list[Any]) -> None:
            super().__init__(config, model_parts=model_parts)
            parts = [part for part in self.optimizers if isinstance(part, optim.SNGM) and part.scope == "global"]
            if parts:
                norm_group = parts[0].norm_group
                for part in parts:
                    part.norm_group = None
                self.shared_norm = SharedNorm(parts, norm_group)

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
            if name in METHODS:
                return functools.partial(_build, getattr(optim, name))
            return Titan._resolve_optimizer_factory(name)  # type: ignore[no-any-return]

    return OptimizersContainer


def _build(cls: Any, groups: list[dict[str, Any]], **settings: Any) -> Any:
    """Build an optimizer from torchtitan's parameter groups; `settings` are further arguments, such as `norm_group`.

    The constructor requires an `lr`, so it gets that of the first group; every group's own `lr` takes precedence.
    """
    return cls(groups, **{"lr": groups[0]["lr"], **settings})
