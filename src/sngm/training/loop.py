"""One run, from its config to its record."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataMissing, Interrupted, UsageError
from ..files import check_writable, locked, remove_leftovers
from ..options import Execution, at_least
from ..tasks import Moment, Task
from . import checkpoint, rng
from .build import Setup, prepare
from .config import RunConfig
from .data_loading import place
from .distributed import Processes, join, set_numerics
from .evaluate import data_of, evaluate, order_of, samples_of
from .optimizer import set_rates
from .run_folder import FINISHED, LASTING, RunFolder, describe, final, goes_on
from .timing import Clock
from .trackers import check_tracker, open_sink

CHECK_EVERY = 50  # steps between looks at the loss, which make the host wait for the device
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Execution):
    """How one run is executed, with functions that it calls."""

    checkpoint_every: int | None = None  # steps; None: about once a minute
    tracker: str | None = None
    restart: bool = False  # discard what the folder holds of the run, and train from the start
    progress: Callable[[int, int, Record], None] = lambda step, steps, metrics: None
    should_stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        Execution.__post_init__(self)
        if self.checkpoint_every is not None and not at_least(self.checkpoint_every, 1):
            raise UsageError(f"`checkpoint_every` must be a whole number of steps >= 1, got {self.checkpoint_every!r}")
        check_tracker(self.tracker)


@dataclass(slots=True)
class State:
    """All that a run is in the middle of, besides model, optimizer and what streams carry."""

    step: int = 0
    loss_sum: float = 0.0  # of this epoch's steps so far
    seconds: Record = field(default_factory=dict)  # what the clock says
    history: list[Record] = field(default_factory=list)
    best_model: dict[str, Tensor] | None = None  # of the best epoch so far, where the result is of that one

    def scores(self, task: Task) -> list[float]:
        """The validation score of each epoch, where there are any."""
        key = f"validation_{task.metric}"
        return [metrics[key] for metrics in self.history if key in metrics]

    def best(self, task: Task) -> int:
        """Where in the history the best validation score is, the first of equal ones; the last without any."""
        scores = self.scores(task)
        order = max if task.higher_is_better else min
        # a score that is no number is never the best
        known = [s for s in scores if not math.isnan(s)]
        return scores.index(order(known)) if known else -1

    def pack(self, record: Record, setup: Setup, carried: list[Tensor]) -> Record:
        own = {"step": self.step, "loss_sum": self.loss_sum, "seconds": self.seconds, "history": self.history}
        lasting = {"model": setup.model.state_dict(), "optimizer": setup.optimizer.state_dict(), "carried": carried}
        # plain values: a checkpoint can hold no others
        whose = json.loads(json.dumps({key: record[key] for key in ("config", "data", *LASTING) if key in record}))
        return {"run": own, **lasting, "best_model": self.best_model, **whose}

    @classmethod
    def unpack(cls, packed: Record | None, setup: Setup) -> State:
        """Put all that lasts back as it was, and say where the run is: at its start without a checkpoint."""
        if packed is None:
            return cls()
        setup.model.load_state_dict(packed["model"])
        setup.optimizer.load_state_dict(packed["optimizer"])
        setup.carried.put_back(packed["carried"])
        return cls(**packed["run"], best_model=packed.get("best_model"))


def train(config: RunConfig, path: Path, options: Options | None = None) -> Record:
    """Train, or go on where a run stopped; return its record. A finished run is not repeated, if it is whole.

    Raises:
        UsageError: `path` holds another run, or one on other data.
    """
    options = options or Options()
    with join(options.device) as processes:
        folder = RunFolder(path)
        # a process that torchrun starts again goes on from what it has reached since
        restart = options.restart and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        record, whole = processes.ask_first(lambda: _find(config, folder, restart))
        if whole:
            with contextlib.suppress(DataMissing):  # which a finished run can do without
                folder.check_data(record, data_of(*samples_of(config.build_task(options.data_dir), config)))
            return dict(record)
        set_numerics(processes.device, options.deterministic)
        setup = prepare(config, processes, options)
        processes.any(False, step=0)  # all are ready: one that failed before would leave an empty folder
        if not processes.first:
            return _run(config, setup, folder, options, processes, restart)
        path.mkdir(parents=True, exist_ok=True)
        with locked(path):
            return _run(config, setup, folder, options, processes, restart)


def _find(config: RunConfig, folder: RunFolder, restart: bool) -> tuple[Record, bool]:
    """The record of this run as it is in the folder, and whether nothing is left to do."""
    record = folder.open(config, restart)
    if record.get("status") in FINISHED and not restart and not checkpoint.is_broken(folder.path):
        state = checkpoint.load(folder.path)
        if state is not None:
            folder.check_checkpoint(state, record, config)
        folder.mend_metrics(record, state)
        return record, True
    check_writable(folder.path)
    return record, False


def _begin(config: RunConfig, setup: Setup, folder: RunFolder, restart: bool) -> tuple[Record, Record | None]:
    """The record and the checkpoint that this run goes on from, read with the lock held."""
    record, state = folder.open(config, restart), checkpoint.load(folder.path)
    if state is not None and ("config" in state or not restart):
        folder.check_checkpoint(state, record, config)
    if restart:
        remove_leftovers(folder.path)
        folder.discard()
        return {}, None
    for there in (record, state or {}):
        folder.check_data(there, setup.data)
    remove_leftovers(folder.path)  # not before: a folder of another run is left as it is
    if not record and folder.file.exists():
        warnings.warn(f"{folder.file} is broken, or was changed since written; it is written anew", stacklevel=2)
    return record or {key: state[key] for key in LASTING if state and key in state}, state


def _run(
    config: RunConfig, setup: Setup, folder: RunFolder, options: Options, processes: Processes, restart: bool
) -> Record:
    task, model, optimizer, per_epoch = setup.task, setup.model, setup.optimizer, setup.per_epoch
    processes.start_alike(model)
    before, packed = processes.ask_first(lambda: _begin(config, setup, folder, restart))
    state = State.unpack(packed, setup)
    record = describe(config, model, processes, setup.data, task.metric)
    if before:
        record |= goes_on(before, record)
    journal = Journal(config, folder, record, state, options) if processes.first else None
    loss_sum = torch.tensor(state.loss_sum, dtype=torch.float64, device=processes.device)
    held_out = {name: place(samples, processes.device) for name, samples in setup.held_out.items()}
    clock = Clock(state.seconds)

    @functools.lru_cache(maxsize=2)
    def order_in(epoch: int) -> Tensor:
        return order_of(setup.training, config.seed, rng.ORDER, epoch)

    def save() -> None:
        state.loss_sum = loss_sum.item()
        clock.trained()
        state.seconds = clock.pack()
        carried = setup.carried.pack()
        if journal:
            checkpoint.save(folder.path, state.step, state.pack(record, setup, carried))
        clock.wrote()

    def due() -> bool:
        """Whether to write a checkpoint, all processes at the same step, though each has a clock of its own."""
        mine = clock.due(options.checkpoint_every, state.step)
        return mine if options.checkpoint_every else processes.any(mine, state.step)

    def close(status: str, **more: Any) -> Record:
        record.update(status=status, timing=clock.timing() | {"step": setup.stepper.mode}, **more)
        if journal:
            journal.close()
        return record

    try:
        for epoch in range(state.step // per_epoch, config.epochs):
            first, scores = state.step % per_epoch, state.scores(task)
            clock.begin_epoch(whole=first == 0)
            order = setup.feed.begin(order_in(epoch), epoch, first)
            if first == 0:
                setup.carried.begin_epoch()
            for i in range(first, per_epoch):
                factor = setup.schedule(
                    Moment(state.step, setup.steps, epoch, config.epochs, scores, task.higher_is_better)
                )
                set_rates(optimizer, factor)
                batch = order[i * config.batch : (i + 1) * config.batch]
                loss_sum += setup.stepper(batch, epoch=epoch, step=state.step)
                state.step += 1
                ends = i + 1 == per_epoch
                if ends:
                    order_in(epoch + 1)  # while the device is at work
                if (ends or state.step % CHECK_EVERY == 0) and not math.isfinite(loss_sum.item()):
                    clock.trained()
                    return close("diverged", diverged_at_step=state.step)
                if ends:
                    metrics: Record = {"epoch": epoch + 1, "step": state.step, "lr": config.lr * factor}
                    metrics["train_loss"] = loss_sum.item() / per_epoch
                    clock.trained(epoch_ends=True)
                    how = options.pass_size, options.loaders
                    scored = evaluate(task, model, held_out, config, *how) if processes.first else None
                    metrics |= processes.share(scored)
                    clock.evaluated()
                    if not all(math.isfinite(v) for k, v in metrics.items() if k.endswith("_loss")):
                        return close("diverged", diverged_at_step=state.step)
                    state.history.append(metrics)
                    if task.result_of == "best" and state.best(task) in (-1, epoch):
                        state.best_model = {name: t.clone() for name, t in model.state_dict().items()}
                    loss_sum.zero_()
                    if journal:
                        journal.note(metrics)
                options.progress(state.step, setup.steps, state.history[-1] if state.history else {})
                if processes.any(options.should_stop(), state.step):
                    save()
                    close("interrupted")
                    raise Interrupted(
                        f"stopped at step {state.step} of {setup.steps}; the same command"
                        f"{' without --restart' if options.restart else ''} goes on from there"
                    )
                if state.step == setup.steps or due():
                    save()
        counts = state.history[state.best(task) if task.result_of == "best" else -1]
        record = close("finished", result=final(counts), result_of=task.result_of, result_epoch=counts["epoch"])
    except Exception as error:
        if not isinstance(error, Interrupted):
            with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
                close("failed", error="".join(traceback.format_exception_only(error)).strip())
        raise
    finally:
        setup.feed.close()
    for name in (f"{part}_{task.metric}" for part in held_out):
        if not math.isfinite(counts[name]):
            warnings.warn(f"{name} is {counts[name]}, which is no result", stacklevel=2)
    return record


class Journal:
    """What the first process writes down while a run goes on."""

    def __init__(self, config: RunConfig, folder: RunFolder, record: Record, state: State, options: Options) -> None:
        self.folder, self.record, self.history = folder, record, state.history
        self.sink = open_sink(options.tracker, folder.path, config.hash, config.as_dict())
        folder.write(record)
        folder.rewrite(state.history)

    def note(self, metrics: Record) -> None:
        self.folder.append(metrics)
        if self.sink:
            self.sink.log(metrics)

    def close(self) -> None:
        self.folder.close(self.record, self.history)
        if self.sink:
            self.sink.close()
