"""Estimate of the time and memory of a run, from a measured forward and backward pass."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.ghost_norm import GhostBatchNorm2d
from ..optim import CLARS, ExtrapSGD
from .build import Setup, build_optimizer
from .config import RunConfig
from .data_loading import loaders_of, size_of, to_device, to_device_if_fits
from .distributed import set_numerics

MOST_ON_CPU = 128  # most samples in the measured pass on a CPU
SECONDS = 8.0  # about the time of the whole measurement on a CPU
TIMES = 4  # number of passes; the first measures memory, the others measure time
PROBE = 8  # samples in the warm-up pass, whose time decides the size of the measured pass


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured time and memory of a pass (one forward and backward) in this process.

    Attributes:
        samples: number of samples in the measured pass.
        largest: number of samples in the run's largest pass.
        sample_seconds: seconds of the forward and backward pass per sample.
        step_seconds: seconds of an optimizer step.
        memory: peak memory in bytes, by purpose.
    """

    samples: int
    largest: int
    sample_seconds: float
    step_seconds: float
    memory: dict[str, int]

    def epoch_seconds(self, setup: Setup) -> float:
        """Return the estimated seconds of an epoch, without evaluation."""
        gradients = 2 if isinstance(setup.optimizer, ExtrapSGD) else 1
        samples = setup.plan.batch // setup.plan.ranks * gradients
        return setup.per_epoch * (samples * self.sample_seconds + self.step_seconds)


def measure(config: RunConfig, setup: Setup, device: torch.device, loaders: int | None = None) -> Measured:
    """Measure time and memory of a pass and an optimizer step of a prepared run, on a copy of its model."""
    set_numerics(device)
    model = copy.deepcopy(setup.model).train()
    optimizer = build_optimizer(config, model)
    on_gpu = device.type == "cuda"
    training = to_device_if_fits(setup.training, device) if on_gpu and not setup.data_source.streams else setup.training
    here = getattr(training, "device", None)
    task, group = setup.task, setup.plan.bn_group
    largest = samples = _largest_pass(setup)
    preparing = [0.0]

    def take(samples: int) -> float:
        """Run a forward and backward pass over the first `samples` samples; return its seconds."""
        for norm in model.modules():
            if isinstance(norm, GhostBatchNorm2d):
                norm.group, norm.weights = (group if samples % group == 0 else samples), None
        start = _now(device)
        with config.autocast(device):
            batch = task.batch(training, torch.arange(samples, device=here), seed=config.seed, epoch=0)
            batch = to_device(batch, device, config.dtype)
            preparing[0] = _now(device) - start
            loss, _ = task.follow(model, batch, task.start(model, samples))
        loss.backward()  # type: ignore[no-untyped-call]
        return _now(device) - start

    probe = largest if on_gpu else min(largest, PROBE)
    seconds = take(probe)
    if not on_gpu:
        seconds = min(seconds, take(probe))  # the first pass also prepares kernels
        samples = max(probe, min(largest, MOST_ON_CPU, int(SECONDS / TIMES / seconds * probe)))
        samples -= samples % group if samples > group else 0
    optimizer.zero_grad()
    activations = _activations(lambda: take(samples), model, device)
    if samples < largest:  # extrapolate linearly, not in proportion: some activations do not grow with the samples
        few = max(1, samples // 2)
        of_few = _activations(lambda: take(few), model, device)
        activations += round((activations - of_few) / max(1, samples - few) * (largest - samples))
    seconds = statistics.median(take(samples) for _ in range(TIMES - 1))
    if setup.data_source.streams:  # loader processes prepare batches in parallel
        count = loaders_of(task, loaders)
        work = seconds - preparing[0]
        seconds = max(work, preparing[0] / count) if count else seconds
    step_seconds = _step(optimizer, device)
    memory = {
        "parameters": _bytes([*model.parameters(), *model.buffers()]),
        "gradients": _bytes(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer": _bytes(t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)),
        "activations": activations,
        "samples": size_of(training) if on_gpu and here == device else 0,
    }
    return Measured(samples, largest, seconds / samples, step_seconds, memory | {"total": sum(memory.values())})


def _largest_pass(setup: Setup) -> int:
    stepper: Any = setup.stepper
    own = getattr(stepper, "stepper", stepper).worker_passes  # CapturedStepper wraps a Stepper
    return max(int(piece.stop - piece.start) for each in own for piece in each.passes)


def _activations(take: Callable[[], float], model: nn.Module, device: torch.device) -> int:
    """Return the bytes that a pass saves for backward; on a GPU, the peak of all it allocates, without gradients."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        take()
        gradients = _bytes(p.grad for p in model.parameters() if p.grad is not None)
        return max(0, torch.cuda.max_memory_allocated(device) - before - gradients)
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        take()
    return sum(kept.values())


def _step(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Take two optimizer steps; return the seconds of the second. For CLARS and EXTRAP-SGD, take none and return 0."""
    if isinstance(optimizer, (CLARS, ExtrapSGD)):
        return 0.0
    optimizer.step()
    start = _now(device)
    optimizer.step()
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _bytes(tensors: Any) -> int:
    return sum(int(t.nbytes) for t in tensors)
