"""Everything a run needs before its first step. What could not be run is refused here, before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..tasks import Samples, Schedule, Task
from . import rng
from .batch import BatchPlan
from .config import RunConfig
from .evaluate import HeldOut, samples_of, schedule_of, steps_per_epoch
from .optimizer import build_optimizer
from .processes import Processes
from .step import Stepper


@dataclass(frozen=True, slots=True)
class Setup:
    """A run about to begin. `training` is what it trains on, `held_out` what it is scored on."""

    task: Task
    training: Samples
    held_out: HeldOut
    per_epoch: int  # steps
    steps: int
    schedule: Schedule
    plan: BatchPlan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    stepper: Stepper


def prepare(config: RunConfig, processes: Processes, data_dir: Path | None = None) -> Setup:
    """Data, batch plan, schedule, model and optimizer of a run."""
    config.check_source()
    task = config.build_task(data_dir)
    training, held_out = samples_of(task, config)
    per_epoch = steps_per_epoch(config, len(training))
    schedule = schedule_of(config, held_out)
    plan = BatchPlan.of(config.batch, config.workers, config.micro, config.bn_group, processes.ranks)
    rng.seed_torch(config.seed, rng.MODEL)
    model = task.model().to(processes.device, getattr(torch, config.precision))
    optimizer = build_optimizer(config, model)
    stepper = Stepper(config, task, training, model, optimizer, plan, processes.device, processes.rank)
    return Setup(
        task, training, held_out, per_epoch, per_epoch * config.epochs, schedule, plan, model, optimizer, stepper
    )
