"""Checks that raise an error if a norm would cover only some parameters, because a wrapper hides or splits others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .sharded_norms import is_dtensor

SHARE = "call sngm.integrations.deepspeed.share_norm(engine) after deepspeed.initialize"


def check_whole(optimizer: Any, params: Sequence[Tensor]) -> None:
    """Raise ValueError if a step on these parameters would use the norm of only a part of the gradient.

    This function is called before the first step, and whenever the parameters in the groups have changed.
    """
    spans = optimizer._norm_spans()
    if spans == "none":
        return
    seen, added = sum(bool(group["params"]) for group in optimizer.param_groups), optimizer._groups_added
    if spans == "global" and seen < added:
        raise ValueError(
            f"step() sees {seen} of the {added} parameter groups, so its norm would not be that of the whole gradient; "
            + (
                f"DeepSpeed ZeRO calls step() once for each group: {SHARE}"
                if "deepspeed" in sys.modules
                else "leave all groups in param_groups, or, to remove one for good, build a new optimizer without it"
            )
        )
    former = optimizer._shards.params
    flattened = flattened_by_deepspeed(former, params)
    if flattened and spans == "tensor":
        raise ValueError(
            f"{type(optimizer).__name__} needs the norm of each tensor, but DeepSpeed has flattened the parameters of "
            "each group into one tensor; use FSDP2, or SNGM with scope='global'"
        )
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if flattened and any(hasattr(p, "ds_numel") for p in former):
        raise ValueError(
            "DeepSpeed ZeRO 3 gives each rank a part of the parameters, with padding of any value, so norms would be "
            "wrong; " + SHARE
        )
    if optimizer.norm_group is not None:
        return
    if flattened and sum(p.numel() for p in params) < sum(p.numel() for p in former):
        raise ValueError(
            "DeepSpeed ZeRO gives each rank a part of the parameters, so the norm would be that of this rank's part; "
            + SHARE
        )
    if sharded_by_fsdp1(params):
        raise ValueError(
            "FSDP1 (FullyShardedDataParallel) gives each rank a part of the parameters, so the norm would be that of "
            "this rank's part; pass norm_group=, the process group that FSDP1 shards over, or use FSDP2 (fully_shard)"
        )


def flattened_by_deepspeed(former: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Return whether DeepSpeed seems to have replaced the `former` parameters by flat ones.

    That is: it is imported, and `params` are all new and one-dimensional.
    """
    return (
        "deepspeed" in sys.modules
        and bool(params)
        and not set(params) & set(former)
        and all(p.ndim == 1 and not is_dtensor(p) for p in params)
    )


def sharded_by_fsdp1(params: Sequence[Tensor]) -> bool:
    """Return whether FSDP1 has sharded the parameters, which makes them one-dimensional."""
    marked = [p for p in params if getattr(p, "_fsdp_flattened", False)]
    return bool(marked) and all(p.ndim == 1 for p in marked)
