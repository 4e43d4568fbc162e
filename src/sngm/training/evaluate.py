"""The training and held-out samples of a run, and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UsageError
from ..tasks import Batch, Samples, Schedule, Splits, Task
from ..tasks.base import mean_scores
from . import rng
from .config import RunConfig
from .data_loading import Loader, loaders_of, to_device
from .distributed import Processes
from .sharding import is_sharded

EVAL_BATCH = 1024
LOADED_BATCH = 128
HeldOut = dict[str, Samples]
How = tuple[torch.device, torch.dtype, int, int]  # device, dtype, batch size and loaders of an evaluation


class Part:
    """A subset of samples, given by indices."""

    def __init__(self, samples: Samples, indices: Tensor) -> None:
        self.samples, self.indices = samples, indices

    @property
    def device(self) -> torch.device | None:
        """The device of the samples, if they have one."""
        return getattr(self.samples, "device", None)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, indices: Tensor) -> Batch:
        return self.samples[self.indices.to(indices.device)[indices]]

    def rows(self, indices: Tensor) -> tuple[Batch, Tensor]:
        """Return the underlying tensors and each sample's index in them, as :meth:`sngm.tasks.Tensors.rows` does."""
        found: tuple[Batch, Tensor] = self.samples.rows(self.indices.to(indices.device)[indices])  # type: ignore[attr-defined]
        return found

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the underlying samples, if they have one."""
        return fingerprint(self.samples)

    def to(self, device: torch.device | str) -> Part:
        """Return the same samples on a device; return self if the underlying samples cannot be moved."""
        move = getattr(self.samples, "to", None)
        return self if move is None else Part(move(device), self.indices.to(device))


def samples_of(task: Task, config: RunConfig, splits: Splits | None = None) -> tuple[Samples, HeldOut]:
    """Return the training samples, and a dict of the splits to score.

    If `config.part` is "select", the test set is left out. `splits` are the data of the task if they are loaded.
    """
    splits = task.data() if splits is None else splits
    if not isinstance(splits, Splits):
        raise UsageError(f"task {config.task}: data() must return sngm.tasks.Splits, got {type(splits).__name__}")
    for part in ("train", "validation", "test"):
        samples = getattr(splits, part)
        if samples is not None and not (part == "test" and config.part == "select"):
            check_samples(f"task {config.task}: data(): {part}", samples)
    if config.part == "full":
        return splits.train, ({"validation": splits.validation} if splits.validation else {}) | {"test": splits.test}
    if splits.validation is not None:
        return splits.train, {"validation": splits.validation}
    if hasattr(splits.train, "in_streams"):
        raise UsageError(
            f"task {config.task}: samples that follow one another cannot be held out; give it a validation set"
        )
    if not task.holdout:
        raise UsageError(f"task {config.task}: choosing learning rates needs a validation set, or a `holdout` above 0")
    count = len(splits.train)
    held = max(1, round(count * task.holdout))
    order = rng.permutation(count, rng.HOLDOUT)  # the same for all seeds and methods
    return Part(splits.train, order[:-held]), {"validation": Part(splits.train, order[-held:])}


def check_samples(name: str, samples: Any) -> None:
    """Raise UsageError if `samples` is empty or cannot be indexed with a tensor."""
    if hasattr(samples, "in_streams"):
        return
    kind = type(samples)
    if kind in (list, tuple, dict, str) or not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        raise UsageError(
            f"{name} must have __len__, and __getitem__ that takes a tensor of indices, as "
            f"sngm.tasks.Tensors(inputs, labels) has; got a {kind.__name__}"
        )
    if not len(samples):
        raise UsageError(f"{name} holds no samples")


def in_streams(samples: Samples, batch: int) -> Samples:
    """Return sequential samples, such as text, as `batch` parallel streams; return other samples unchanged."""
    cut = getattr(samples, "in_streams", None)
    return samples if cut is None else cut(batch)


def order_of(samples: Samples, *key: int) -> Tensor:
    """Return the indices of samples in the order of an epoch: sequential for streams, else random, seeded by `key`."""
    return torch.arange(len(samples)) if hasattr(samples, "streams") else rng.permutation(len(samples), *key)


def fingerprint(samples: Samples) -> str | None:
    """Return the fingerprint of samples, a short hash, or None if they have no method `fingerprint`."""
    say = getattr(samples, "fingerprint", None)
    return None if say is None else str(say())


def data_of(training: Samples, held_out: HeldOut) -> dict[str, Any]:
    """Return the number and fingerprint of the samples of each split, for a record."""
    return {
        name: {"samples": len(samples), "fingerprint": fingerprint(samples)}
        for name, samples in {"training": training, **held_out}.items()
    }


def steps_per_epoch(config: RunConfig, count: int) -> int:
    """Return the number of full batches in `count` samples; raise UsageError if there is none."""
    if config.batch > count:
        most = count // config.workers * config.workers or count
        rest = ", the rest being held out to choose a learning rate by" if config.part == "select" else ""
        raise UsageError(f"batch={config.batch} is more than the {count} samples to train on{rest}; at most {most}")
    return count // config.batch


def schedule_of(config: RunConfig, held_out: HeldOut) -> Schedule:
    """Return the learning rate schedule; raise UsageError if it needs validation scores without a validation set."""
    schedule = Schedule(config.schedule, config.warmup)
    if schedule.needs_history and "validation" not in held_out:
        raise UsageError(
            f"schedule {config.schedule} needs a validation set, and {config.task} has none: "
            "add one to its Splits, or choose another schedule"
        )
    return schedule


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    held_out: HeldOut,
    config: RunConfig,
    pass_size: int | None = None,
    loaders: int | None = None,
    processes: Processes | None = None,
) -> dict[str, float]:
    """Evaluate a model on the held-out splits; return all scores, such as ``test_accuracy``.

    Afterwards each layer is in its former mode again, training or evaluation. All `processes` must call this function.
    They share the batches of each split, and the scores are bit for bit the same as with one process. If a task
    overrides `evaluate`, the first process evaluates all batches and sends the scores to the others; with a sharded
    model, every process evaluates all batches.
    """
    device = next(model.parameters()).device
    size = EVAL_BATCH
    if device.type == "cuda":  # small batches would not keep a GPU busy
        size = max(size, 1 << (task.pass_size or 1).bit_length() - 1)
    size = size if pass_size is None else min(size, pass_size)
    count = loaders_of(task, loaders) if task.loaders or loaders else 0
    processes = processes or Processes(0, 1, device)
    together = processes.ranks > 1 and type(task).evaluate is Task.evaluate
    evaluates = processes.first or is_sharded(model)  # every forward of a sharded model is a collective
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        scores: dict[str, float] = {}
        for name, samples in held_out.items():
            how = device, config.dtype, size, count
            with config.autocast(device):
                if together:
                    found = _evaluate_together(task, model, samples, how, processes)
                else:
                    own = task.evaluate(model, _alive(batches(samples, *how), processes)) if evaluates else None
                    found = processes.broadcast(own)
            if not isinstance(found, Mapping):
                raise UsageError(f"task {config.task}: evaluate() must return a dict of numbers, got {found!r}")
            if task.metric not in found:
                raise UsageError(
                    f"task {config.task}: scores() gives {', '.join(found)} but not its metric {task.metric}"
                )
            # floats, because torch.load(weights_only=True) rejects other types
            scores |= {f"{name}_{key}": float(value) for key, value in found.items()}
        return scores
    finally:
        for module, flag in training:  # a task may keep layers in evaluation mode, such as frozen BatchNorm
            module.training = flag


def _evaluate_together(
    task: Task, model: nn.Module, samples: Samples, how: How, processes: Processes
) -> dict[str, float]:
    """Evaluate every `ranks`-th batch in this process; return the mean scores over the batches of all processes."""
    own = batches(samples, *how, processes.rank, processes.ranks)
    mine = [task.score_sums(model, batch) for batch in _alive(own, processes)]
    total = len(batch_indices(samples, how[2], how[3]))
    if is_sharded(model) and len(mine) < -(-total // processes.ranks):
        # Compute a batch whose result is not used: another process has one more batch, and every forward pass of a
        # sharded model is a collective.
        for batch in batches(samples, *how, 0, total):
            task.score_sums(model, batch)
    processes.heartbeat.advance()
    names: list[str] = processes.broadcast(list(mine[0]) if mine else [])  # the first process has the first batch
    sums = torch.zeros(total, len(names), dtype=torch.float64, device=processes.device)
    for i, found in enumerate(mine):
        sums[processes.rank + i * processes.ranks] = torch.stack([found[name].to(sums.device) for name in names])
    dist.all_reduce(sums)  # exact, because all but one process add zero
    return mean_scores([dict(zip(names, row, strict=True)) for row in sums])


def _alive(found: Iterator[Batch], processes: Processes) -> Iterator[Batch]:
    """Yield batches, and tell the other processes after each batch that this process is active."""
    for batch in found:
        processes.heartbeat.act()
        yield batch


def batch_indices(samples: Samples, size: int, loaders: int) -> Sequence[Tensor]:
    """Return the indices of each batch of a split, on the device of the samples."""
    own_device = getattr(samples, "device", None)
    size = getattr(samples, "streams", size)  # streams have a fixed batch size
    if loaders and own_device is None:
        size = min(size, LOADED_BATCH)  # small, because each loader process holds several batches
    return torch.split(torch.arange(len(samples), device=own_device), size)


def batches(
    samples: Samples,
    device: torch.device,
    dtype: torch.dtype,
    size: int = EVAL_BATCH,
    loaders: int = 0,
    first: int = 0,
    stride: int = 1,
) -> Iterator[Batch]:
    """Yield samples in order, in batches on a device: all batches, or every `stride`-th batch from the `first` on.

    Unless the samples are in memory, `loaders` processes load them ahead of time.
    """
    pieces = list(batch_indices(samples, size, loaders)[first::stride])
    if not loaders or getattr(samples, "device", None) is not None:
        for indices in pieces:
            yield to_device(samples[indices], device, dtype)
        return
    loader = Loader(lambda indices: samples[indices], loaders, device)
    try:
        for batch in loader.over(pieces):
            yield to_device(batch, device, dtype)
    finally:
        loader.close()
