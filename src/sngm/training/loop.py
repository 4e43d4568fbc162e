"""The training loop of a run, with checkpoints and records."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataMissing, Interrupted, UsageError
from ..files import check_writable, locked, remove_leftovers
from ..optim.external import set_mode
from ..options import Execution, at_least
from ..progress import note
from ..tasks import Moment, Task
from . import checkpoint, rng, sharding
from .build import Setup, check_new, prepare, set_rates
from .config import RunConfig
from .data_loading import to_device_if_fits
from .distributed import Processes, join, set_numerics
from .evaluate import data_of, evaluate, order_of, samples_of
from .run_folder import FINISHED, RESUMED, RunFolder, describe, final, resumed_fields
from .scored_model import ScoredModel
from .timing import Clock, peak_memory
from .trackers import check_tracker, open_tracker

CHECK_EVERY = 50  # steps between checks of the loss, each of which synchronises with the device
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Execution):
    """Options that decide how one run is executed, and callbacks."""

    checkpoint_every: int | None = None  # steps between checkpoints; None for about one per minute
    track: str | None = None  # the name of a tracker
    group: str | None = None  # the name of the study, for the tracker
    restart: bool = False  # delete the run in the folder and train from the start
    wait: bool = False  # wait for another process that trains in the folder, instead of raising an error
    progress: Callable[[int, int, Record], None] = lambda step, steps, metrics: None  # called after each step
    should_stop: Callable[[], bool] = lambda: False  # called after each step; True stops the run

    def __post_init__(self) -> None:
        Execution.__post_init__(self)
        if self.checkpoint_every is not None and not at_least(self.checkpoint_every, 1):
            raise UsageError(f"`checkpoint_every` must be a whole number of steps >= 1, got {self.checkpoint_every!r}")
        check_tracker(self.track)


@dataclass(slots=True)
class State:
    """Progress of a run. A checkpoint stores it, and also model, optimizer and recurrent state."""

    step: int = 0
    loss_sum: float = 0.0  # sum over the steps of the current epoch
    seconds: Record = field(default_factory=dict)  # the result of `Clock.pack`
    history: list[Record] = field(default_factory=list)
    best_model: dict[str, Tensor] | None = None  # weights that gave the result, if not the final weights

    def scores(self, task: Task) -> list[float]:
        """Return the validation scores so far; an empty list without a validation set."""
        key = f"validation_{task.metric}"
        return [metrics[key] for metrics in self.history if key in metrics]

    def best(self, task: Task) -> Record:
        """Return the metrics of the first epoch with the best validation score; of the last epoch if none has one."""
        key = f"validation_{task.metric}"
        scored = [metrics for metrics in self.history if not math.isnan(metrics.get(key, math.nan))]
        order = max if task.higher_is_better else min
        return order(scored, key=itemgetter(key)) if scored else self.history[-1]

    def pack(
        self, record: Record, setup: Setup, carried: list[Tensor], averages: list[Tensor], folder: Path, first: bool
    ) -> Record:
        """Return a checkpoint. All processes must call this for a sharded model, to write their shards to `folder`."""
        own = {"step": self.step, "loss_sum": self.loss_sum, "seconds": self.seconds, "history": self.history}
        # only JSON types, because torch.load(weights_only=True) rejects others
        whose = json.loads(json.dumps({key: record[key] for key in ("config", "data", *RESUMED) if key in record}))
        packed: Record = {"run": own, "carried": carried, "averages": averages, **whose}
        if not sharding.is_sharded(setup.model):
            lasting = {"model": setup.model.state_dict(), "optimizer": setup.optimizer.state_dict()}
            return {**packed, **lasting, "best_model": self.best_model}
        shards = checkpoint.shards_of(self.step)
        sharding.save(folder / shards, setup.model, setup.optimizer, self.best_model, first)
        whole = {"shards": shards, "shard_sizes": checkpoint.sizes_of(folder / shards)}
        return {**packed, "model": {}, "optimizer": {}, **whole, "has_best": self.best_model is not None}

    @classmethod
    def unpack(cls, packed: Record | None, setup: Setup, folder: Path) -> State:
        """Load the checkpoint `packed`, if it is not None, into `setup`; return the progress of the run."""
        if packed is None:
            return cls()
        setup.recurrent_state.load(packed["carried"])
        if "shards" in packed:
            best = sharding.load(folder / packed["shards"], setup.model, setup.optimizer, packed["has_best"])
            return cls(**packed["run"], best_model=best)
        if sharding.is_sharded(setup.model):
            raise UsageError(f"{folder} holds a run that was begun without `shard`; continue it without, or restart it")
        setup.model.load_state_dict(packed["model"])
        try:
            setup.optimizer.load_state_dict(packed["optimizer"])
        except ValueError as error:  # torch: a different number of parameters or groups
            raise UsageError(f"{folder} holds a run of another version of sngm ({error}); restart it") from error
        return cls(**packed["run"], best_model=packed.get("best_model"))


def train(config: RunConfig, path: Path, options: Options | None = None) -> Record:
    """Train a run in the folder `path`, or resume it from its last checkpoint, and return its record.

    A finished run is not trained again.

    Raises:
        UsageError: `path` holds another run, or this run on different data.
    """
    options = options or Options()
    with join(options.device, options.hang_timeout) as processes:
        folder = RunFolder(path)
        # a process restarted by torchrun resumes, and must not delete the run again
        restart = options.restart and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        record, whole = processes.call_in_first(lambda: _find(config, folder, restart))
        if whole:
            with contextlib.suppress(DataMissing):  # a finished run does not need its data
                folder.check_data(record, data_of(*samples_of(config.build_task(options.data_dir), config)))
            return dict(record)
        set_numerics(processes.device, options.deterministic)
        setup = prepare(config, processes, options)
        check_new(config, setup.model)
        processes.heartbeat.advance()
        processes.any(False, step=0)  # wait for all processes, so that no folder is created if one has failed
        waiting = functools.partial(note, f"another process is training in {path}; waiting for it")
        with contextlib.ExitStack() as stack:

            def lock() -> None:
                path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(path, waiting=waiting if options.wait else None))

            processes.call_in_first(lock)
            return _run(config, setup, folder, options, processes, restart)


def _find(config: RunConfig, folder: RunFolder, restart: bool) -> tuple[Record, bool]:
    """Return the record of this run in the folder ({} if there is none), and whether the run is complete."""
    record = folder.open(config, restart)
    if record.get("status") in FINISHED and not restart and not checkpoint.is_broken(folder.path):
        state = checkpoint.load(folder.path)
        if state is not None:
            folder.check_checkpoint(state, record, config)
        folder.repair_metrics(record, state)
        return record, True
    check_writable(folder.path)
    return record, False


def _begin(config: RunConfig, setup: Setup, folder: RunFolder, restart: bool) -> tuple[Record, Record | None]:
    """Return the record and the checkpoint to resume from; {} and None if they do not exist. `restart` deletes both.

    The caller must hold the lock of the folder.
    """
    record, state = folder.open(config, restart), checkpoint.load(folder.path)
    if state is not None and ("config" in state or not restart):
        folder.check_checkpoint(state, record, config)
    if restart:
        remove_leftovers(folder.path)
        folder.discard()
        return {}, None
    for there in (record, state or {}):
        folder.check_data(there, setup.data)
    remove_leftovers(folder.path)  # not earlier, so that a folder of another run is not changed
    if not record and folder.file.exists():
        warnings.warn(f"{folder.file} is broken, or was changed since written; it is written anew", stacklevel=2)
    return record or {key: state[key] for key in RESUMED if state and key in state}, state


def _run(
    config: RunConfig, setup: Setup, folder: RunFolder, options: Options, processes: Processes, restart: bool
) -> Record:
    task, model, per_epoch = setup.task, setup.model, setup.per_epoch
    if not sharding.is_sharded(model):
        processes.broadcast_tensors(model.state_dict().values())
    before, packed = processes.call_in_first(lambda: _begin(config, setup, folder, restart))
    state = State.unpack(packed, setup, folder.path)
    scored = ScoredModel(config, setup)
    if packed is not None:
        scored.load(packed.get("averages", []))
    record = describe(config, model, processes, setup.data, task)
    if before:
        record |= resumed_fields(before, record)
    journal = Journal(config, folder, record, state, options) if processes.first else None
    loss_sum = torch.tensor(state.loss_sum, dtype=torch.float64, device=processes.device)
    held_out = {name: to_device_if_fits(samples, processes.device) for name, samples in setup.held_out.items()}
    clock = Clock(state.seconds)
    if processes.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(processes.device)

    @functools.lru_cache(maxsize=2)
    def order_in(epoch: int) -> Tensor:
        return order_of(setup.training, config.seed, rng.ORDER, epoch)

    def save() -> None:
        state.loss_sum = loss_sum.item()
        clock.trained()
        state.seconds = clock.pack()
        carried = setup.recurrent_state.gather()
        if sharding.is_sharded(model):
            processes.broadcast_tensors(model.buffers())  # any process may save the buffers to the checkpoint
        if processes.first or sharding.is_sharded(model):
            packed = state.pack(record, setup, carried, scored.averages, folder.path, processes.first)
            if processes.first:
                checkpoint.save(folder.path, state.step, packed)
        clock.wrote()

    def due() -> bool:
        """Return whether to write a checkpoint. All processes get the same answer, although their clocks differ."""
        mine = clock.due(options.checkpoint_every, state.step)
        return mine if options.checkpoint_every else processes.any(mine, state.step)

    def close(status: str, **more: Any) -> Record:
        timing = clock.timing() | {"step": setup.stepper.mode} | peak_memory(processes.device)
        record.update(status=status, timing=timing, **more)
        if journal:
            journal.close()
        return record

    try:
        for epoch in range(state.step // per_epoch, config.epochs):
            first, scores = state.step % per_epoch, state.scores(task)
            clock.begin_epoch(whole=first == 0)
            for loss, lr in steps_of_epoch(config, setup, order_in(epoch), epoch, first, scores):
                loss_sum += loss
                state.step += 1
                scored.follow(state.step)
                ends = state.step % per_epoch == 0
                if ends:
                    order_in(epoch + 1)  # computed here and cached, while the device is busy
                if (ends or state.step % CHECK_EVERY == 0) and not math.isfinite(loss_sum.item()):
                    clock.trained()
                    why = "the loss is NaN or infinite; lower the learning rate"
                    why += ", or check the data for NaN" if state.step <= CHECK_EVERY else ""
                    return close("diverged", diverged_at_step=state.step, error=why)
                if ends:
                    metrics: Record = {"epoch": epoch + 1, "step": state.step, "lr": lr}
                    metrics["train_loss"] = loss_sum.item() / per_epoch
                    clock.trained(epoch_ends=True)
                    set_mode(setup.optimizer, training=False)
                    how = options.pass_size, options.loaders
                    processes.heartbeat.advance()
                    processes.broadcast_tensors(model.buffers())  # the first worker's BatchNorm statistics
                    tested = scored.prepare(epoch)
                    if tested is not model:
                        processes.broadcast_tensors(tested.buffers())
                    metrics |= evaluate(task, tested, held_out, config, *how, processes)
                    clock.evaluated()
                    if bad := [k for k, v in metrics.items() if k.endswith("_loss") and not math.isfinite(v)]:
                        why = f"{' and '.join(bad)} is NaN or infinite; lower the learning rate, or check the data"
                        return close("diverged", diverged_at_step=state.step, error=f"{why} for NaN")
                    state.history.append(metrics)
                    counts_last = task.result_of == "last" and epoch == config.epochs - 1 and tested is not model
                    if counts_last or (task.result_of == "best" and state.best(task) is metrics):
                        state.best_model = {name: t.clone() for name, t in tested.state_dict().items()}
                    loss_sum.zero_()
                    if journal:
                        journal.note(metrics)
                options.progress(state.step, setup.steps, state.history[-1] if state.history else {})
                if processes.any(options.should_stop(), state.step):
                    save()
                    close("interrupted")
                    raise Interrupted(
                        f"stopped at step {state.step} of {setup.steps}; the same command"
                        f"{' without `restart`' if options.restart else ''} resumes from there"
                    )
                if state.step == setup.steps or due():
                    save()
        counts = state.best(task) if task.result_of == "best" else state.history[-1]
        record = close("finished", result=final(counts), result_of=task.result_of, result_epoch=counts["epoch"])
    except Exception as error:
        if not isinstance(error, Interrupted):
            with contextlib.suppress(OSError):  # a full disk must not hide the first error
                close("failed", error="".join(traceback.format_exception_only(error)).strip())
        raise
    finally:
        setup.data_source.close()
    for name in (f"{part}_{task.metric}" for part in held_out):
        if not math.isfinite(counts[name]):
            warnings.warn(f"{name} is {counts[name]}, the run has no valid result", stacklevel=2)
    return record


def steps_of_epoch(
    config: RunConfig, setup: Setup, order: Tensor, epoch: int, first: int, scores: list[float]
) -> Iterator[tuple[Tensor, float]]:
    """Take the steps of one epoch from its batch `first` on, and yield the loss and learning rate of each step.

    Args:
        config: the config of the run.
        setup: the result of `prepare` for this run.
        order: the indices of the samples, in the order of this epoch.
        epoch: the epoch, counted from 0.
        first: the number of batches of this epoch that a resumed run has already seen.
        scores: validation scores of earlier epochs, for schedules that need them.
    """
    set_mode(setup.optimizer, training=True)
    order = setup.data_source.begin(order, epoch, first)
    if first == 0:
        setup.recurrent_state.reset()
    for i in range(first, setup.per_epoch):
        step = epoch * setup.per_epoch + i
        factor = setup.schedule(Moment(step, setup.steps, epoch, config.epochs, scores, setup.task.higher_is_better))
        set_rates(setup.optimizer, factor)
        batch = order[i * config.batch : (i + 1) * config.batch]
        stepper = setup.stepper
        if setup.rest_stepper is not None and i == setup.per_epoch - 1:
            batch, stepper = batch[: setup.rest], setup.rest_stepper
        yield stepper(batch, epoch=epoch, step=step), config.lr * factor


class Journal:
    """Writer of a run's record, metrics and tracker. Only the first process has one."""

    def __init__(self, config: RunConfig, folder: RunFolder, record: Record, state: State, options: Options) -> None:
        self.folder, self.record, self.history = folder, record, state.history
        self.tracker = open_tracker(options.track, folder.path, config.hash, config.as_dict(), options.group)
        folder.write(record)
        folder.rewrite(state.history)

    def note(self, metrics: Record) -> None:
        self.folder.append(metrics)
        if self.tracker:
            self.tracker.log(metrics)

    def close(self) -> None:
        self.folder.close(self.record, self.history)
        if self.tracker:
            self.tracker.close()
