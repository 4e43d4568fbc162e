"""The model that is evaluated: optionally with averaged weights, and with newly estimated BatchNorm statistics."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..models.ghost_norm import GhostBatchNorm2d
from . import rng
from .build import Setup
from .config import RunConfig
from .data_loading import to_device
from .evaluate import order_of


class ScoredModel:
    """The trained model, or a copy with averaged weights (`ema`), new BatchNorm statistics (`bn_samples`), or both."""

    def __init__(self, config: RunConfig, setup: Setup) -> None:
        self.config, self.setup, self.trained = config, setup, setup.model
        self.copy: nn.Module | None = None
        if config.ema is not None or config.bn_samples:
            self.copy = copy.deepcopy(setup.model)

    @property
    def averages(self) -> list[Tensor]:
        """The averaged weights; empty without `ema`."""
        return [] if self.copy is None or self.config.ema is None else [p.data for p in self.copy.parameters()]

    def load(self, averages: list[Tensor]) -> None:
        """Continue from the averaged weights of a checkpoint."""
        for ours, saved in zip(self.averages, averages, strict=True):
            ours.copy_(saved)

    def follow(self, step: int) -> None:
        """Update the averaged weights after step number `step`. In the first steps, the average covers fewer steps."""
        if self.config.ema is not None:
            keep = min(self.config.ema, step / (step + 10))
            torch._foreach_lerp_(self.averages, [p.data for p in self.trained.parameters()], 1.0 - keep)

    def prepare(self, epoch: int) -> nn.Module:
        """Return the model to evaluate after this epoch, with current weights and statistics."""
        if self.copy is None:
            return self.trained
        if self.config.ema is None:
            self.copy.load_state_dict(self.trained.state_dict())
        else:
            for ours, theirs in zip(self.copy.buffers(), self.trained.buffers(), strict=True):
                ours.copy_(theirs)
        if self.config.bn_samples:
            self._estimate_statistics(self.copy, self.config.bn_samples, epoch)
        return self.copy

    @torch.no_grad()
    def _estimate_statistics(self, model: nn.Module, count: int, epoch: int) -> None:
        """Set BatchNorm's running statistics to their mean over about `count` training samples.

        Each forward pass processes one BatchNorm group.
        """
        pairs = zip(model.modules(), self.trained.modules(), strict=True)
        # without the layers that the task keeps in evaluation mode
        norms: list[Any] = [m for m, t in pairs if isinstance(m, _BatchNorm) and m.track_running_stats and t.training]
        if not norms:
            return
        config, setup = self.config, self.setup
        model.eval()
        for norm in norms:
            norm.train()
            norm.reset_running_stats()
            if isinstance(norm, GhostBatchNorm2d):
                norm.group = norm.weights = norm.batches = None
        samples = getattr(setup.data_source, "samples", setup.training)
        device = next(model.parameters()).device
        size = setup.plan.bn_group
        order = order_of(setup.training, config.seed, rng.ORDER, epoch)[: max(count, size)]
        for i, indices in enumerate(torch.split(order, size)[: len(order) // size]):
            for norm in norms:
                norm.momentum = 1.0 / (i + 1)  # so that the running statistics are the mean so far
            indices = indices.to(getattr(samples, "device", None) or "cpu")
            batch = setup.task.batch(samples, indices, seed=config.seed, epoch=epoch)
            with config.autocast(device):
                setup.task.loss(model, to_device(batch, device, config.dtype))
        model.eval()
