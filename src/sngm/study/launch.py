"""Run a study in worker processes, several runs at a time."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from .. import tasks
from ..environment import ranks
from ..errors import BrokenRecord, Failed, UsageError
from ..files import locked, metrics_changed, read_record, remove_leftovers, write_record
from ..options import Cluster, Execution
from ..tasks import Splits
from ..training import checkpoint
from ..training.build import prepare
from ..training.config import RunConfig
from ..training.distributed import Processes, choose_device
from ..training.loop import Options
from ..training.run_folder import FINISHED, NothingLeft, RunFolder, command, differences
from ..training.trackers import prepare_group
from ..training.validation import config_of
from . import executors
from .executors import Executor, open_remote
from .executors.local import default_jobs, open_local
from .grid import Cell, StudyConfig, run_name
from .search import hidden_by

MOST_JOBS = 1024
LOCAL = Cluster()  # runs in processes of this machine
Record = dict[str, Any]


@dataclass
class Progress:
    """Progress of a study, for display."""

    cells: list[Cell]
    planned: int  # number of runs
    done: list[tuple[RunConfig, Record]] = field(default_factory=list)
    running: list[Cell] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    repeated: int = 0  # number of runs that were already finished

    @property
    def failed(self) -> list[tuple[RunConfig, Record]]:
        return [(config, record) for config, record in self.done if record["status"] == "failed"]

    @property
    def seconds_left(self) -> float | None:
        """The estimated time left, at the mean pace so far; None before the first run has finished."""
        made = len(self.done) - self.repeated
        if not made:
            return None
        return (time.monotonic() - self.started) / made * (self.planned - len(self.done))


def compare(
    study: StudyConfig,
    folder: Path,
    *,
    options: Options,
    jobs: int | None = None,
    show: Callable[[Progress], None],
    known: Callable[[RunConfig, Record], Record | None] = lambda config, data: None,
    cluster: Cluster = LOCAL,
) -> Progress:
    """Train every unfinished run of a study in `folder`, and keep study.json up to date.

    `show` is called with the progress. `known` gets a run's config and a description of its data, and returns the
    record of this run if it was trained in another folder, or None. `cluster` says where runs are executed.
    """
    check_jobs(jobs, cluster)
    executors.check_usable(cluster.executor)
    if ranks() > 1:
        raise UsageError("a study starts its own processes; run it without torchrun, and with WORLD_SIZE unset")
    cells = study.cells()
    here = cluster.here(options)
    data = check(cells, here, load_data(study, here))
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        remove_leftovers(folder)
        _check_folder(folder, study, cells)
        folder = folder.absolute()  # because the working directory of worker processes may differ
        prepare_group(options.track, folder.name)
        options = cluster.there(replace(options, data_dir=options.data_dir and options.data_dir.absolute()))
        return _Launcher(study, cells, folder, options, jobs, show, known, cluster, data).run()


def check_jobs(jobs: int | None, cluster: Cluster = LOCAL) -> None:
    """Raise UsageError if `jobs` is out of range, or given for a cluster, which has its own queue."""
    if jobs is not None and cluster.remote:
        raise UsageError(f"`jobs` is for runs on this machine; {cluster.executor} starts as many as it has room for")
    if jobs is not None and not 1 <= jobs <= MOST_JOBS:
        raise UsageError(f"`jobs` must be a whole number from 1 to {MOST_JOBS:,}, got {jobs}")


def load_data(study: StudyConfig, options: Options) -> Splits:
    """Load the data of a study's task."""
    return tasks.build(study.task, study.task_settings, options.data_dir).data()


def check(cells: list[Cell], options: Options, splits: Splits) -> dict[str, Record]:
    """Raise UsageError if a run of a cell is invalid; return a description of the data for each `RunConfig.part`."""
    single = Processes(0, 1, choose_device(options.device))
    data: dict[str, Record] = {}
    for cell in cells:
        for part in ("select", "full") if len(cell.grid) > 1 else ("full",):
            config, *_ = [cell.config(lr, part, 0) for lr in cell.grid]  # building a config validates it
            data[part] = prepare(config, single, options, splits).data
    return data


def _check_folder(folder: Path, study: StudyConfig, cells: list[Cell]) -> None:
    """Raise UsageError if the folder contains a single run, another study, or a run of another study."""
    path = folder / "study.json"
    if (folder / "run.json").exists() and not path.exists():
        raise UsageError(f"{folder} holds a run; name another folder with `out`")
    here = study.identity()
    there: Any = here
    try:
        there = read_record(path).get("study")
    except FileNotFoundError:
        pass
    except BrokenRecord:  # study.json is written again if the runs belong to this study
        if not (folder / "runs").is_dir():
            raise UsageError(f"{path} is broken; name another folder with `out`") from None
        warnings.warn(f"{path} is broken, or was changed since written; it is written anew", stacklevel=2)
    if not isinstance(there, dict):
        raise UsageError(f"{path} is not the record of a study; name another folder with `out`")
    if lines := differences(there, here):
        raise UsageError(
            f"{folder} holds another study; name another folder with `out`. They differ in\n  " + "\n  ".join(lines)
        )
    # Check each run, because reports include all runs of the folder. Even if study.json is the same, runs of an older
    # version of sngm may have other defaults.
    for file in sorted(folder.glob("runs/*/run.json")):
        try:
            config = config_of(RunFolder(file.parent).read(), file)
        except BrokenRecord:  # this run is trained again
            continue
        if not any(cell.owns(config) for cell in cells):
            others = f"{folder} holds runs of another study, such as {file.parent.name}"
            raise UsageError(f"{others}; name another folder with `out`")


@dataclass
class _Launcher:
    """The runs of a study in progress. The first fields are the arguments of `compare`."""

    study: StudyConfig
    cells: list[Cell]
    folder: Path
    options: Options
    jobs: int | None
    show: Callable[[Progress], None]
    known: Callable[[RunConfig, Record], Record | None]
    cluster: Cluster
    data: dict[str, Record]  # the result of `check`
    executor: Executor | None = None  # opened for the first run that is not finished
    futures: dict[Future[Record], tuple[Cell, RunConfig]] = field(default_factory=dict)
    ended: bool = False
    elsewhere: int = 0  # number of runs that `known` returned; their folders are elsewhere
    checked: bool = False  # whether all finished runs in the folder were found to belong to this study

    def __post_init__(self) -> None:
        self.task = tasks.build(self.study.task, self.study.task_settings)
        self.progress = Progress(self.cells, sum(cell.least_runs for cell in self.cells))

    def run(self) -> Progress:
        try:
            for cell in self.cells:
                self._submit(cell, cell.first_runs())
            self.checked = True
            self._write()
            while self.futures:
                self.progress.running = [cell for future, (cell, _) in self.futures.items() if future.running()]
                self.show(self.progress)
                for future in wait(self.futures, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    cell, config = self.futures.pop(future)
                    self._finish(cell, config, future.result())
            self.ended = True
            return self.progress
        except BrokenProcessPool:
            raise Failed(
                "a worker process was killed, perhaps for lack of memory; the same command resumes the study, `jobs` 1 "
                "needs the least memory"
            ) from None
        except BaseException:
            if self.executor:
                self.executor.stop()
            raise
        finally:
            self.progress.running.clear()
            if self.executor:
                self.executor.shutdown()
            self._write()

    def _open(self) -> Executor:
        if self.cluster.remote:
            return open_remote(self.cluster, self.folder, command())
        device = choose_device(self.options.device)
        jobs = self.jobs or default_jobs(self.study.batches, device)
        return open_local(self.study.task, jobs, device.type == "cuda")

    def _submit(self, cell: Cell, configs: list[RunConfig]) -> None:
        options = {field.name: getattr(self.options, field.name) for field in fields(Execution)}
        options |= {"track": self.options.track, "group": self.folder.name}
        for config in configs:
            path = self.folder / "runs" / run_name(config)
            elsewhere = self.known(config, self.data[config.part])
            self.elsewhere += elsewhere is not None
            finished = elsewhere or _finished(path, config, self.data[config.part])
            if finished:
                self.progress.repeated += 1
                self._finish(cell, config, finished)
            else:
                self.executor = self.executor or self._open()
                future = self.executor.submit(config, path, options, os.environ.get("SNGM_COMMIT"))
                self.futures[future] = cell, config

    def _finish(self, cell: Cell, config: RunConfig, record: Record) -> None:
        if record["status"] == "interrupted":
            raise KeyboardInterrupt
        self.progress.done.append((config, record))
        if record["status"] == "failed":  # this cell has no result; other cells continue
            self.show(self.progress)
            return
        before = len(cell.scores)
        next_runs = cell.take(config, record, self.task.metric, self.task.higher_is_better)
        if next_runs and next_runs[0].part == "select":  # the grid was extended
            self.progress.planned += 1
        if before != len(cell.scores) and cell.chosen and cell.lr is None:
            self.progress.planned -= self.study.seeds  # all learning rates diverged, so the seeds are not run
        self._submit(cell, next_runs)
        self._write()
        self.show(self.progress)

    def _write(self) -> None:
        if not self.checked:  # do not overwrite the record of a finished study on different data
            return
        better = self.task.higher_is_better
        study = {
            "format": 1,
            "task": self.study.task,
            "methods": list(dict.fromkeys(cell.label for cell in self.cells)),
            "batches": list(self.study.batches),
            "seeds": self.study.seeds,
            "planned": self.progress.planned - self.elsewhere,
            "ended": self.ended,
            "epochs": self.study.epochs,
            "metric": self.task.metric,
            "higher_is_better": better,
            "command": command(),
            "cells": [cell.summary(better) for cell in self.cells],
            "study": self.study.identity(),
        }
        if self.study.search:
            study["searched"] = sorted(hidden_by(self.study.search))
        write_record(self.folder / "study.json", study)


def _finished(path: Path, config: RunConfig, data: Record) -> Record | None:
    """Return the record of the run in the folder `path`; None if the run is not finished, and must be trained."""
    folder = RunFolder(path)
    if not folder.file.exists():
        return None
    try:
        record = folder.open(config)
    except NothingLeft:  # safe to delete, because the folder name has the hash of this run
        folder.discard()
        return None
    folder.check_data(record, data)
    if record.get("status") not in FINISHED:
        return None
    if metrics_changed(path, record):
        folder.repair_metrics(record, checkpoint.load(path))
    return record


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread in the ``with`` block, as worker processes do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
