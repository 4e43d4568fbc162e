"""Small helpers for training frameworks, one module for each framework. The optimizers import none of them."""

from __future__ import annotations

from typing import Any

from ..optim.base import LargeBatchOptimizer


def unwrap(optimizer: Any) -> list[LargeBatchOptimizer]:
    """Return the sngm optimizers in `optimizer`: itself, the one that it wraps, or those that it contains.

    Wrappers have the attribute `optimizer` (Accelerate, Lightning, DeepSpeed) or `optim` (ZeroRedundancyOptimizer).
    Containers have the attribute `optimizers` (torchtitan) or are lists.

    Raises:
        TypeError: `optimizer` neither is, nor wraps, nor contains an sngm optimizer.
    """
    found = _inside(optimizer)
    if not found:
        raise TypeError(f"optimizer must be, wrap or contain an optimizer of sngm, got {type(optimizer).__name__}")
    return found


def _inside(optimizer: Any) -> list[LargeBatchOptimizer]:
    if isinstance(optimizer, LargeBatchOptimizer):
        return [optimizer]
    if isinstance(optimizer, (list, tuple)):
        return [inner for part in optimizer for inner in _inside(part)]
    names = [name for name in ("optimizer", "optim", "optimizers") if hasattr(optimizer, name)]
    return [inner for name in names for inner in _inside(getattr(optimizer, name))]


def measure_norms(optimizer: Any) -> None:
    """Make CLARS measure the mean of the micro-batches' gradient norms during `backward`.

    Use it with wrappers whose `step` does not accept these norms as an argument: call it once, after Accelerate's
    `prepare` or in Lightning's `configure_optimizers`. If torch.distributed is initialised, norms are averaged over all
    ranks, which must all be data-parallel.
    """
    import torch.distributed as dist

    from ..optim.clars import CLARS

    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    for inner in unwrap(optimizer):
        if not isinstance(inner, CLARS):
            raise TypeError(f"measure_norms is for CLARS; {type(inner).__name__} needs no mean norms")
        inner.measure_norms(group)
