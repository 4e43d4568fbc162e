"""Preparation of a run: everything before its first step. Invalid runs raise here, before any file is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError
from ..memory import MemoryLimit
from ..options import Execution
from ..tasks import Samples, Schedule, Splits, Task
from . import rng
from .batch_plan import BatchPlan
from .batchnorm_stats import GhostStatistics, PerGroupStatistics, may_merge
from .config import RunConfig
from .cuda_graph_step import CapturedStepper, choose, without_capture
from .data_loading import Resident, Streamed, fits, loaders_of
from .distributed import Processes
from .evaluate import HeldOut, data_of, in_streams, samples_of, schedule_of, steps_per_epoch
from .optimizer import build_optimizer, can_capture
from .recurrent_state import RecurrentState
from .step import Stepper, worker_passes_of


@dataclass(frozen=True, slots=True)
class Setup:
    """A prepared run. `training` are the samples to train on, `held_out` those to score, by name."""

    task: Task
    training: Samples
    held_out: HeldOut
    data: dict[str, Any]  # their description in the record
    per_epoch: int  # steps
    steps: int
    schedule: Schedule
    plan: BatchPlan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data_source: Resident | Streamed
    recurrent_state: RecurrentState
    stepper: Stepper | CapturedStepper


def prepare(
    config: RunConfig,
    processes: Processes,
    execution: Execution | None = None,
    splits: Splits | None = None,
) -> Setup:
    """Prepare a run: data, batch plan, schedule, model, optimizer and training step.

    Raises:
        UsageError: the run is not possible with this config, task or device.
    """
    execution = execution or Execution()
    step, loaders = execution.step, execution.loaders
    config.check_source()
    task = config.build_task(execution.data_dir)
    training, held_out = samples_of(task, config, splits)
    data = data_of(training, held_out)
    training = in_streams(training, config.batch)
    per_epoch = steps_per_epoch(config, len(training))
    schedule = schedule_of(config, held_out)
    plan = BatchPlan.of(config.batch, config.workers, config.micro, config.bn_group, processes.ranks)
    model = build_model(config, task, processes.device)
    if plan.bn_group == 1 and any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
        raise UsageError(
            "BatchNorm over a single sample: take a larger --batch, fewer --workers, or a larger --bn-group"
        )
    streams = task.loaders > 0 or bool(loaders)
    not_on_gpu = why_not_on_gpu(training, streams, processes.device)
    # EXTRAP-SGD computes each worker's gradient twice
    passes = plan.batch // plan.bn_group * (2 if config.method == "extrap-sgd" else 1)
    mode = choose(step, task, model, processes.device, processes.ranks, not_on_gpu, passes)
    optimizer = build_optimizer(config, model, tensor_rates="captured" in mode)
    if "captured" in mode and not can_capture(optimizer):
        if step != "auto":
            raise UsageError(f"--step {step}: {config.method} cannot be captured")
        mode = without_capture(mode)
        optimizer = build_optimizer(config, model)
    most = largest_pass_size(task, model, processes.device, execution.pass_size)
    own = worker_passes_of(plan, processes.rank, optimizer, most)
    pieces = [piece for each in own for piece in each.passes]
    statistics: GhostStatistics | PerGroupStatistics = PerGroupStatistics(model, plan, config.running_stats)
    if most is not None:
        statistics = GhostStatistics(model, plan, config.running_stats, processes.rank, pieces, config.dtype)
    source: Resident | Streamed = Resident(training, processes.device)
    if streams:
        count = loaders_of(task, loaders)
        source = Streamed(task, training, config.seed, pieces, config.batch, processes.device, count)
    state = RecurrentState(task, model, plan, processes.rank)
    plain = Stepper(
        config, task, source, model, optimizer, plan, processes.device, own, statistics, state, mode, step != "auto"
    )
    stepper = CapturedStepper(plain, config.batch, processes.device) if "captured" in mode else plain
    steps = per_epoch * config.epochs
    return Setup(
        task, training, held_out, data, per_epoch, steps, schedule, plan, model, optimizer, source, state, stepper
    )


def build_model(config: RunConfig, task: Task, device: torch.device) -> nn.Module:
    """Return the task's model, initialised with the config's seed, on its device and in its dtype."""
    rng.seed_torch(config.seed, rng.MODEL)
    with MemoryLimit(config.task_in_words, copies=1 if device.type == "cuda" else 2) as limit:
        model = task.model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"task {config.task}: model() must return a torch.nn.Module, got {model!r}")
    limit.check(model)
    model = model.to(device, config.dtype)
    if device.type == "cuda" and config.precision == "bfloat16":  # the layout that tensor cores use
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def why_not_on_gpu(samples: Samples, streams: bool, device: torch.device) -> str:
    """Return why samples cannot be in GPU memory, as text; empty if they can."""
    if streams:
        return "batches come from other processes"
    if getattr(samples, "device", None) is None:
        return "samples are not tensors in memory"
    return "" if fits(samples, device) else "samples take more than half of the GPU's free memory"


def largest_pass_size(task: Task, model: nn.Module, device: torch.device, asked: int | None) -> int | None:
    """Return the most samples of a pass of several BatchNorm groups; None for one group per pass."""
    if may_merge(task, model):
        usual = task.pass_size if device.type == "cuda" else min(task.pass_size or 0, task.pass_size_on_cpu)
        return usual if asked is None else asked
    if asked is not None:
        raise UsageError(
            "pass_size is for tasks that set one and models whose samples meet in GhostBatchNorm2d alone; "
            "this one takes a BatchNorm group at a time"
        )
    return None
