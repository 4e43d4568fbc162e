"""DeepSpeed: the norm of the whole gradient under ZeRO, which steps the optimizer with a part of it at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim import norms
from ..optim.shared_norm import check_part
from . import unwrap


def share_norm(engine: Any) -> None:
    """Let SNGM divide by the norm of the whole gradient under ZeRO 1, 2 or 3.

    Call this once, after ``deepspeed.initialize``, before or after loading a checkpoint. Without ZeRO it does nothing,
    because the optimizer then has the whole gradient.

    Args:
        engine: the first result of ``deepspeed.initialize``, or the model that Accelerate prepared with DeepSpeed.

    Raises:
        TypeError: `engine` is not an engine, or its optimizer is not SNGM with scope "global". (ZeRO flattens
            parameters, so the norms of single tensors are not available.)
        ValueError: the engine uses groups of experts, tensor parallelism, or the GradScaler of torch_autocast, or the
            optimizer has a `norm_group` or already has a shared norm.
    """
    if not (isinstance(engine, torch.nn.Module) and hasattr(engine, "optimizer")):
        raise TypeError(f"engine must be what deepspeed.initialize returned first, got {type(engine).__name__}")
    wrapper: Any = engine.optimizer
    (optimizer,) = unwrap(wrapper)
    if wrapper is optimizer or type(wrapper).__name__ in ("FP16_Optimizer", "FP16_UnfusedOptimizer"):
        return  # each rank has the whole gradient
    check_part(optimizer, "the optimizer of DeepSpeed's engine")
    tensor_parallel = getattr(wrapper, "model_parallel_group", None)
    if tensor_parallel is not None and dist.get_world_size(tensor_parallel) > 1:
        raise ValueError("share_norm does not support model parallelism; use FSDP2 with tensor parallelism")
    if any("moe" in group for group in optimizer.param_groups):
        raise ValueError("share_norm does not support groups of experts")
    if getattr(wrapper, "torch_autocast_gradscaler", None):
        raise ValueError("share_norm does not support torch_autocast with float16; use bfloat16 or DeepSpeed's fp16")
    if type(wrapper).__name__ == "BF16_Optimizer":  # steps the optimizer once, with a part of every group
        optimizer.norm_group = wrapper.dp_process_group
        return
    norm = ZeroNorm(wrapper)
    wrapper.step, wrapper.unscale_and_clip_grads = norm.step, norm.unscale_and_clip_grads
    optimizer.shared_norm = norm


class ZeroNorm:
    """The norm over all parameter groups and ranks, computed once in each step of ZeRO, before it uses a gradient."""

    hides_parameters = True  # ZeRO gives the optimizer only some of its parameters at a time

    def __init__(self, zero: Any) -> None:
        self.zero = zero
        self._step, self._unscale = zero.step, zero.unscale_and_clip_grads
        self._square: Tensor | None = None

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Call ZeRO's own `step`, which calls the optimizer's `step` for each parameter group, or part of one."""
        self._square = None
        return self._step(*arguments, **options)

    def unscale_and_clip_grads(self, which: Any, total_norm: Any) -> None:
        """Unscale and clip one group's gradient; before the first group, compute the norm over all groups."""
        if self._square is None:
            self._square = self._measure(total_norm)
        self._unscale(which, total_norm)

    def square(self, optimizer: Any) -> Tensor:
        """Return the squared norm of the whole gradient, unscaled and clipped."""
        assert self._square is not None, "ZeRO steps the optimizer before it unscales gradients"
        return self._square.to(optimizer._grad_norm.device)

    @torch.no_grad()
    def _measure(self, total_norm: Any) -> Tensor:
        zero = self.zero
        scale = zero.loss_scale
        if zero.clip_grad > 0.0:  # as in DeepSpeed's own unscale_and_clip_grads
            scale = torch.clamp((total_norm / scale + 1e-6) / zero.clip_grad, min=1.0) * scale
        total: Any = 0.0
        for grads, params, group in self._parts():
            if not grads:
                continue
            decay = group["weight_decay"] if group["weight_decay_mode"] == "coupled" else 0.0
            alpha = (-decay if group["maximize"] else decay) * scale
            total = total + norms.square(grads, params if decay else (), alpha)
        from deepspeed.accelerator import get_accelerator

        device = torch.device(get_accelerator().current_device_name())
        whole: Tensor = torch.as_tensor(total, dtype=norms.sum_dtype(device), device=device) / scale**2
        dist.all_reduce(whole, group=zero.dp_process_group)
        return whole

    def _parts(self) -> Iterator[tuple[list[Tensor], list[Tensor], dict[str, Any]]]:
        """Yield the gradients, values and group of each of ZeRO's flat parameters, in pieces without padding."""
        zero = self.zero
        third = hasattr(zero, "fp32_partitioned_groups_flat")  # ZeRO 3
        flats = zero.fp32_partitioned_groups_flat if third else zero.single_partition_of_fp32_groups
        rank = dist.get_rank(zero.dp_process_group)
        for i, flat in enumerate(flats):
            pieces = [flat.grad] if flat.grad is not None else zero.averaged_gradients[i]
            grads = [grad.reshape(-1) for grad in pieces if grad is not None]
            if third:  # a piece may end with padding of arbitrary values; `lengths` leave it out
                sizes = [p.partition_numel() for p in zero.fp16_groups[i]]
                lengths = [
                    min(max(p.ds_numel - rank * n, 0), n) for p, n in zip(zero.fp16_groups[i], sizes, strict=True)
                ]
                if flat.grad is not None:
                    grads = list(flat.grad.split(sizes))
            else:
                sizes = lengths = [grad.numel() for grad in grads]
            params = flat.detach()[: sum(sizes)].split(sizes)
            kept = [(grad[:n], p[:n]) for grad, p, n in zip(grads, params, lengths, strict=True) if n]
            group = zero.optimizer.param_groups[zero.sub_group_to_group_id[i] if third else i]
            yield [grad for grad, _ in kept], [p for _, p in kept], group
