"""BatchNorm over groups of samples within one forward pass, as if each group were computed by its own worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from ..triton_support import kernels_support


class GhostBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that normalises `group` samples at a time, and can fuse a shortcut and a ReLU.

    A forward pass of N samples consists of N / group contiguous groups, each with its own mean and variance, as if
    each were a pass of its own. Parameters, buffers and evaluation are the same as in :class:`torch.nn.BatchNorm2d`. On
    a GPU a layer must be called on one CUDA stream at a time.

    Attributes:
        group: number of samples that share statistics; None for all samples of a pass.
        weights: weight of each group of a pass in the running statistics. None: groups update the statistics one after
            another, as BatchNorm does in passes of one group each.
        keep: factor of the old running statistics, if `weights` are given.
        batches: number that a pass adds to `num_batches_tracked`; None: the number of groups of the pass.

    >>> norm = GhostBatchNorm2d(3)
    >>> norm.group = 2
    >>> x = torch.randn(6, 3, 4, 4)
    >>> bool((norm(x)[2:4] - nn.BatchNorm2d(3)(x[2:4])).abs().max() < 1e-5)
    True
    """

    group: int | None = None
    weights: Tensor | None = None
    keep: float = 0.0
    batches: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._usual: dict[Any, tuple[Tensor, float]] = {}
        self._counters: list[Tensor] = []  # counts of finished programs in a kernel; zero between launches

    def forward(self, x: Tensor, shortcut: Tensor | None = None, relu: bool = False) -> Tensor:
        """Normalise `x`, add `shortcut` if given, and apply a ReLU if `relu`."""
        if self.training and self._has_kernels(x):
            return self._by_kernels(x, shortcut, relu)
        if not self.training:
            y = super().forward(x)
        elif x.device.type == "cpu" and self._as_torch(x) and not torch.compiler.is_compiling():
            y = self._by_torch(x)
        else:
            y = self._normalise(x)
        if shortcut is not None:
            y = y.add_(shortcut) if y.dtype == shortcut.dtype else y + shortcut
        return y.relu_() if relu else y

    def _groups(self, x: Tensor) -> int:
        group = self.group or len(x)
        if len(x) % group:
            raise ValueError(f"the samples of a pass must be a multiple of group={group}, got {len(x)}")
        if group * x[0, 0].numel() == 1:
            raise ValueError(f"training needs more than one value per channel and group, got shape {tuple(x.shape)}")
        return len(x) // group

    def _counts(self, groups: int, device: torch.device) -> tuple[Tensor, float, int]:
        """Return the weight of each group in the running statistics, the factor of the old values, and `batches`."""
        batches = groups if self.batches is None else self.batches
        if self.weights is not None:
            if len(self.weights) != groups:
                raise ValueError(
                    f"weights must have one value per BatchNorm group ({groups} in this pass), got {len(self.weights)}"
                )
            return self.weights, self.keep, batches
        if self.momentum is None:
            raise ValueError("momentum must be a number, got None: GhostBatchNorm2d has no cumulative mean")
        key = groups, self.momentum, device
        if key not in self._usual:  # cached: a CUDA graph cannot capture a copy to the device
            weights, keep = one_after_another(groups, self.momentum)
            self._usual[key] = weights.to(device), keep
        return *self._usual[key], batches

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the caches, which copies and pickles do not need."""
        return {**self.__dict__, "_usual": {}, "_counters": []}

    def _has_kernels(self, x: Tensor) -> bool:
        if not (kernels_support(x) and self.affine and x.is_contiguous(memory_format=torch.channels_last)):
            return False
        from .kernels.norm import Plan

        known = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and self.weight.dtype == torch.float32
        return known and Plan.fits(self.num_features)

    def _by_kernels(self, x: Tensor, shortcut: Tensor | None, relu: bool) -> Tensor:
        from .kernels.norm import Normalise

        groups = self._groups(x)
        if shortcut is not None:
            shortcut = shortcut.to(x.dtype).expand_as(x).contiguous(memory_format=torch.channels_last)
        running = None
        if self.track_running_stats:
            running = self.running_mean, self.running_var, self.num_batches_tracked, *self._counts(groups, x.device)
        needed = (groups + 1) * -(-self.num_features // 64)
        usable = [c for c in self._counters if len(c) >= needed and c.device == x.device]
        if not usable:  # counters that are too small are kept, because a CUDA graph may use their addresses
            usable = [torch.zeros(needed, dtype=torch.int32, device=x.device)]
            self._counters.append(usable[0])
        gamma, beta = for_groups(self.weight, groups), for_groups(self.bias, groups)
        y: Tensor = Normalise.apply(  # type: ignore[no-untyped-call]
            x, shortcut, gamma, beta, groups, relu, self.eps, usable[0], running
        )
        return y

    def _as_torch(self, x: Tensor) -> bool:
        return x.dtype in (torch.float32, torch.float64) and (not self.affine or self.weight.dtype == x.dtype)

    def _by_torch(self, x: Tensor) -> Tensor:
        """Normalise each group by torch's BatchNorm, which is the fastest way on a CPU."""
        groups = self._groups(x)
        statistics: Any = [(None, None)] * groups
        if self.track_running_stats:  # with momentum 1, torch's running statistics are those of the group
            means, variances = x.new_zeros(2, groups, x.shape[1])
            statistics = list(zip(means, variances, strict=True))
        weights, biases = (
            [p] * groups if p is None or p.ndim == 1 else list(for_groups(p, groups)) for p in (self.weight, self.bias)
        )
        y = torch.cat(
            [
                batch_norm(part, mean, variance, weight, bias, True, 1.0, self.eps)
                for part, (mean, variance), weight, bias in zip(
                    torch.split(x, len(x) // groups), statistics, weights, biases, strict=True
                )
            ]
        )
        if self.track_running_stats:
            self._follow(means, variances)
        return y

    def _normalise(self, x: Tensor) -> Tensor:
        group = len(x) // self._groups(x)
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        grouped: Tensor = x.unflatten(0, (-1, group)).to(wide)  # type: ignore[no-untyped-call]
        # reduce over several dimensions, because flattening them would copy a channels_last tensor
        var, mean = torch.var_mean(grouped, dim=(1, 3, 4), correction=0, keepdim=True)
        scale = torch.rsqrt(var + self.eps)
        if self.affine:
            scale = scale * for_groups(self.weight, len(grouped)).to(wide)[..., None, :, None, None]
        y = (grouped - mean) * scale
        if self.affine:
            y = y + for_groups(self.bias, len(grouped)).to(wide)[..., None, :, None, None]
        if self.track_running_stats:
            count = group * x[0, 0].numel()
            self._follow(mean.detach().flatten(1), var.detach().flatten(1) * (count / (count - 1)))
        return y.flatten(0, 1).to(x.dtype)

    @torch.no_grad()
    def _follow(self, means: Tensor, variances: Tensor) -> None:
        """Update the running statistics with the means and unbiased variances of the groups."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        weights, keep, batches = self._counts(len(means), means.device)
        weights = weights.to(means)
        for running, found in ((self.running_mean, means), (self.running_var, variances)):
            # a group of weight 0 may hold NaN
            moved = torch.where(weights[:, None] != 0, weights[:, None] * found, 0.0).sum(0)
            running.mul_(keep).add_(moved.to(running.dtype))
        self.num_batches_tracked.add_(batches)


def for_groups(parameter: Tensor, groups: int) -> Tensor:
    """Return a parameter of shape (channels,) unchanged, and expand a stack of copies to one row for each group.

    A stack has shape (copies, channels), the result (groups, channels). Copy i is repeated for the groups in the i-th
    of `copies` equal parts of the groups.
    """
    return parameter if parameter.ndim == 1 else parameter.repeat_interleave(groups // len(parameter), 0)


def one_after_another(groups: int, momentum: float) -> tuple[Tensor, float]:
    """Return the weight of each group in running statistics that are updated group by group, and that of the old ones.

    >>> one_after_another(3, 0.5)
    (tensor([0.1250, 0.2500, 0.5000], dtype=torch.float64), 0.125)
    """
    powers = torch.arange(groups - 1, -1, -1, dtype=torch.float64)
    return momentum * (1 - momentum) ** powers, (1 - momentum) ** groups
