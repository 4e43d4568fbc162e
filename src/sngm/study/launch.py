"""Run a study in worker processes, several runs at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .. import tasks
from ..environment import ranks
from ..errors import BrokenRecord, Failed, UsageError
from ..files import locked, metrics_changed, read_record, remove_leftovers, write_record
from ..options import Execution
from ..tasks import Splits
from ..training import checkpoint
from ..training.build import prepare
from ..training.config import RunConfig
from ..training.distributed import Processes, choose_device, cores
from ..training.loop import Options
from ..training.run_folder import FINISHED, NothingLeft, RunFolder, command, differences
from ..training.validation import config_of
from . import worker
from .grid import Cell, StudyConfig, run_name
from .search import hidden_by

MOST_JOBS = 1024
Record = dict[str, Any]


@dataclass
class Progress:
    """Progress of a study, for display."""

    cells: list[Cell]
    planned: int
    done: list[tuple[RunConfig, Record]] = field(default_factory=list)
    running: dict[str, RunConfig] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    failed: list[tuple[RunConfig, Record]] = field(default_factory=list)
    repeated: int = 0  # runs that were finished already

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
    known: Callable[[RunConfig], Record | None] = lambda _: None,
) -> Progress:
    """Train every unfinished run of a study, and keep study.json up to date.

    `known` returns the record of a run that was trained elsewhere, or None.
    """
    check_jobs(jobs)
    if ranks() > 1:
        raise UsageError("a study starts its own processes; run it without torchrun, and with WORLD_SIZE unset")
    cells = study.cells()
    data = check(study, cells, options, load_data(study, options))
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        remove_leftovers(folder)
        _check_folder(folder, study, cells)
        return _Launcher(study, cells, folder, options, jobs, show, data, known).run()


def check_jobs(jobs: int | None) -> None:
    """Raise UsageError if `jobs` is out of range."""
    if jobs is not None and not 1 <= jobs <= MOST_JOBS:
        raise UsageError(f"--jobs must be a whole number from 1 to {MOST_JOBS:,}, got {jobs}")


def load_data(study: StudyConfig, options: Options) -> Splits:
    """Load the data of the task of a study."""
    return tasks.build(study.task, study.task_settings, options.data_dir).data()


def check(study: StudyConfig, cells: list[Cell], options: Options, splits: Splits) -> dict[str, Record]:
    """Raise UsageError if any cell cannot be run; return the data description of each part of the runs."""
    single = Processes(0, 1, choose_device(options.device))
    data: dict[str, Record] = {}
    for cell in cells:
        for part in ("select", "full") if len(cell.grid) > 1 else ("full",):
            config = cell.config(cell.grid[0], part, 0)
            data[part] = prepare(config, single, options, splits).data
    return data


SMALL, SHARING = 128, 4  # the largest batch at which runs share a GPU, and how many do: see docs/speed.md


def default_jobs(batches: Sequence[int], device: torch.device) -> int:
    """Return the default number of parallel runs: one per CPU core; on a GPU `SHARING` or one.

    `SHARING` needs batches of at most `SMALL` and NVIDIA's Multi-Process Service. Without the service, the processes on
    a GPU are time-sliced, which is no faster.
    """
    if device.type != "cuda":
        return cores()
    return SHARING if max(batches) <= SMALL and mps_runs() else 1


def mps_runs() -> bool:
    """Return whether NVIDIA's Multi-Process Service is running, by its pid file, which it deletes when it exits."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    try:
        os.kill(int((folder / "nvidia-cuda-mps-control.pid").read_text()), 0)  # 0 checks that it exists
    except PermissionError:  # the process or file of another user
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _check_folder(folder: Path, study: StudyConfig, cells: list[Cell]) -> None:
    """Raise UsageError if the folder holds another study or a run."""
    path = folder / "study.json"
    if (folder / "run.json").exists() and not path.exists():
        raise UsageError(f"{folder} holds a run; name another folder with --out")
    try:
        there = read_record(path).get("study")
        if not isinstance(there, dict):
            raise UsageError(f"{path} is not the record of a study; name another folder with --out")
    except (FileNotFoundError, BrokenRecord) as error:  # rewritten below if the runs are of this study
        if isinstance(error, BrokenRecord):
            if not (folder / "runs").is_dir():
                raise UsageError(f"{path} is broken; name another folder with --out") from None
            warnings.warn(f"{path} is broken, or was changed since written; it is written anew", stacklevel=2)
        _check_runs(folder, cells)
        return
    if lines := differences(there, study.identity()):
        raise UsageError(
            f"{folder} holds another study; name another folder with --out. They differ in\n  " + "\n  ".join(lines)
        )


def _check_runs(folder: Path, cells: list[Cell]) -> None:
    """Raise UsageError if the folder holds runs of another study, which reports would include."""
    for file in sorted(folder.glob("runs/*/run.json")):
        try:
            config = config_of(RunFolder(file.parent).read(), file)
        except BrokenRecord:  # this run is trained again
            continue
        if all(cell.config(config.lr, config.part, config.seed) != config for cell in cells):
            raise UsageError(f"{folder} holds runs of another study, such as {file.parent.name}; name another folder")


class _Launcher:
    def __init__(
        self,
        study: StudyConfig,
        cells: list[Cell],
        folder: Path,
        options: Options,
        jobs: int | None,
        show: Callable[[Progress], None],
        data: dict[str, Record],
        known: Callable[[RunConfig], Record | None],
    ) -> None:
        # absolute: the working directory of worker processes may differ
        self.study, self.folder, self.show, self.data = study, folder.absolute(), show, data
        self.options = replace(options, data_dir=options.data_dir and options.data_dir.absolute())
        self.known = known
        device = choose_device(options.device)
        self.on_gpu = device.type == "cuda"
        self.jobs = jobs or default_jobs(study.batches, device)
        self.task = tasks.build(study.task, study.task_settings)
        planned = sum(study.seeds + (len(cell.grid) if len(cell.grid) > 1 else 0) for cell in cells)
        self.progress = Progress(cells, planned)
        self.futures: dict[Future[Record], tuple[Cell, RunConfig]] = {}
        self.checked = False  # whether all finished runs in the folder were found to belong to this study

    def run(self) -> Progress:
        try:
            local = worker.pack_local()
        except Exception as error:
            warnings.warn(
                f"runs go one after another in this process: worker processes cannot be sent {self.study.task} "
                f"or a method ({type(error).__name__}: {error})",
                stacklevel=2,
            )
            # in a thread, to show progress meanwhile; with one torch thread, as in a worker process
            return self._run_in(ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)))
        # fork workers from a server process that has torch loaded
        forks = not self.on_gpu and "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            from multiprocessing import forkserver

            context.set_forkserver_preload(["sngm.study.launch"])
            # inherited by the server and its helper, which must outlive Ctrl-C and a closed terminal to clean up
            before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
            try:
                forkserver.ensure_running()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        how_to_start: Any = {"mp_context": context, "initializer": worker.warm_up, "initargs": (local,)}
        return self._run_in(ProcessPoolExecutor(self.jobs, **how_to_start))

    def _run_in(self, pool: Executor) -> Progress:
        others = set(multiprocessing.active_children())
        try:
            for cell in self.progress.cells:
                self._submit(pool, cell, cell.first_runs())
            self.checked = True
            self._write()
            while self.futures:
                self._update_running()
                self.show(self.progress)
                for future in wait(self.futures, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    cell, config = self.futures.pop(future)
                    self._finish(pool, cell, config, future.result())
            return self.progress
        except BrokenProcessPool:
            raise Failed(
                "a worker process was killed, perhaps for lack of memory; the same command goes on from what is done, "
                "--jobs 1 needs the least memory"
            ) from None
        except BaseException:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()  # it writes a checkpoint first, see worker.on_signal
            worker.stop_runs_here(True)
            raise
        finally:
            self.progress.running.clear()
            pool.shutdown(wait=True, cancel_futures=True)
            worker.stop_runs_here(False)
            self._write()

    def _submit(self, pool: Executor, cell: Cell, configs: list[RunConfig]) -> None:
        options = {field.name: getattr(self.options, field.name) for field in dataclasses.fields(Execution)}
        for config in configs:
            path = self.folder / "runs" / run_name(config)
            finished = self.known(config) or _finished(path, config, self.data[config.part])
            if finished:
                self.progress.repeated += 1
                self._finish(pool, cell, config, finished)
            else:
                with _signals_deferred(), _main_hidden():  # submit() may start a process
                    future = pool.submit(worker.make, config, path, options, os.environ.get("SNGM_COMMIT"))
                self.futures[future] = cell, config

    def _finish(self, pool: Executor, cell: Cell, config: RunConfig, record: Record) -> None:
        if record["status"] == "interrupted":
            raise KeyboardInterrupt
        self.progress.done.append((config, record))
        if record["status"] == "failed":  # this cell has no result; other cells continue
            self.progress.failed.append((config, record))
            self.show(self.progress)
            return
        before = len(cell.scores)
        next_runs = cell.take(config, record, self.task.metric, self.task.higher_is_better)
        extended = bool(next_runs) and next_runs[0].part == "select"
        self.progress.planned += extended  # the grid was extended
        if before != len(cell.scores) and cell.chosen and cell.lr is None:
            self.progress.planned -= self.study.seeds  # all learning rates diverged, so the seeds are not run
        self._submit(pool, cell, next_runs)
        self._write()
        self.show(self.progress)

    def _update_running(self) -> None:
        self.progress.running = {
            run_name(config): config for future, (_, config) in self.futures.items() if future.running()
        }

    def _write(self) -> None:
        if not self.checked:  # keep the record of a finished study on different data
            return
        better = self.task.higher_is_better
        study = {
            "format": 1,
            "task": self.study.task,
            "methods": list(dict.fromkeys(cell.label for cell in self.progress.cells)),
            "batches": list(self.study.batches),
            "seeds": self.study.seeds,
            "epochs": self.study.epochs,
            "metric": self.task.metric,
            "higher_is_better": better,
            "command": command(),
            "cells": [cell.summary(better) for cell in self.progress.cells],
            "study": self.study.identity(),
        }
        if self.study.search:
            study["searched"] = sorted(hidden_by(self.study.search))
        write_record(self.folder / "study.json", study)


def _finished(path: Path, config: RunConfig, data: Record) -> Record | None:
    folder = RunFolder(path)
    if not folder.file.exists():
        return None
    try:
        record = folder.open(config)
    except NothingLeft:  # safe to delete: the folder name has the hash of this run
        folder.discard()
        return None
    folder.check_data(record, data)
    if record.get("status") not in FINISHED:
        return None
    if metrics_changed(path, record):
        folder.repair_metrics(record, checkpoint.load(path))
    return record


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer Ctrl-C and other signals: here until the body ends, in processes started by it until `warm_up`."""
    came: list[int] = []
    deferred = [number for number in worker.INTERRUPTS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in deferred}
    # child processes inherit the mask; other threads of this process still receive the signals
    mask = worker.mask_signals("SIG_BLOCK", worker.INTERRUPTS)
    try:
        yield
    finally:
        worker.mask_signals("SIG_SETMASK", mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep worker processes from importing the user's script again; what they need of it is pickled."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread in the body, as worker processes do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
