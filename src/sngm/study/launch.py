"""Making the runs of a study, several at a time in warm processes that have torch loaded already."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .. import tasks
from ..environment import ranks
from ..errors import BrokenRecord, Failed, Interrupted, UsageError
from ..files import locked, read_record, remove_leftovers, write_record
from ..optim import registry
from ..options import Execution
from ..tasks import Splits
from ..training.build import prepare
from ..training.config import RunConfig
from ..training.distributed import Processes, choose_device, cores
from ..training.loop import Options, train
from ..training.run_folder import FINISHED, NothingLeft, RunFolder, command, differences
from ..training.validation import config_of
from .grid import Cell, StudyConfig, run_name

MOST_JOBS = 1024
Record = dict[str, Any]


@dataclass
class Progress:
    """What a study has done so far, for whoever shows it."""

    cells: list[Cell]
    planned: int
    done: list[tuple[RunConfig, Record]] = field(default_factory=list)
    running: dict[str, RunConfig] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    failed: list[tuple[RunConfig, Record]] = field(default_factory=list)
    repeated: int = 0  # found finished

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far."""
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
    """Make every run of a study that is not there yet, and keep study.json up to date.

    `known` gives the record of a run that was made elsewhere, if there is one.
    """
    check_jobs(jobs)
    if ranks() > 1:
        raise UsageError("a study starts its own processes; run it without torchrun, and with WORLD_SIZE unset")
    cells = study.cells()
    data = check(study, cells, options, load_data(study, options))
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        remove_leftovers(folder)
        _claim(folder, study, cells)
        return _Launcher(study, cells, folder, options, jobs, show, data, known).run()


def check_jobs(jobs: int | None) -> None:
    """Refuse a number of worker processes that cannot be started."""
    if jobs is not None and not 1 <= jobs <= MOST_JOBS:
        raise UsageError(f"--jobs must be a whole number from 1 to {MOST_JOBS:,}, got {jobs}")


def load_data(study: StudyConfig, options: Options) -> Splits:
    """The data of a study, to be checked with all its cells."""
    return tasks.build(study.task, study.task_settings, options.data_dir).data()


def check(study: StudyConfig, cells: list[Cell], options: Options, splits: Splits) -> dict[str, Record]:
    """Refuse what could not be run before anything is: every method, batch and setting. Returns each part's data."""
    alone = Processes(0, 1, choose_device(options.device))
    data: dict[str, Record] = {}
    for cell in cells:
        for part in ("select", "full") if len(cell.grid) > 1 else ("full",):
            config = cell.config(cell.grid[0], part, 0)
            data[part] = prepare(config, alone, options, splits).data
    return data


SMALL, SHARING = 128, 4  # batches that do not fill a GPU, and runs that share one: measured, see docs/speed.md


def default_jobs(batches: Sequence[int], device: torch.device) -> int:
    """Runs at a time where the user says nothing: one a core; on a GPU one, or four small ones where MPS runs.

    Without MPS processes take turns on a GPU, and nothing is won.
    """
    if device.type != "cuda":
        return cores()
    return SHARING if max(batches) <= SMALL and mps_runs() else 1


def mps_runs() -> bool:
    """Whether NVIDIA's Multi-Process Service runs here; of its files this is the one that goes when it ends."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    try:
        os.kill(int((folder / "nvidia-cuda-mps-control.pid").read_text()), 0)  # signal 0: only asks
    except PermissionError:  # another user's process, or file, is there
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _claim(folder: Path, study: StudyConfig, cells: list[Cell]) -> None:
    """Refuse a folder that belongs to another study, or to a run."""
    path = folder / "study.json"
    if (folder / "run.json").exists() and not path.exists():
        raise UsageError(f"{folder} holds a run; name another folder with --out")
    try:
        there = read_record(path).get("study")
        if not isinstance(there, dict):
            raise UsageError(f"{path} is not the record of a study; name another folder with --out")
    except (FileNotFoundError, BrokenRecord) as error:  # it is made again from the runs, if they are this study's
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
    """Refuse runs of another study: a report would count them in."""
    for file in sorted(folder.glob("runs/*/run.json")):
        try:
            config = config_of(RunFolder(file.parent).read(), file)
        except BrokenRecord:  # it is made again
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
        # absolute: worker processes start in the folder that this process was started in
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

    def run(self) -> Progress:
        try:
            local = _pack_local()
        except Exception as error:
            warnings.warn(
                f"runs go one after another in this process: worker processes cannot be sent {self.study.task} "
                f"or a method ({type(error).__name__}: {error})",
                stacklevel=2,
            )
            # a thread, so that progress is shown; the number of threads of torch is that of a worker process
            return self._run_in(ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)))
        # a server process that has torch loaded forks the workers: they start in no time
        forks = not self.on_gpu and "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            from multiprocessing import forkserver

            context.set_forkserver_preload(["sngm.study.launch"])
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server inherits it: Ctrl-C is not for it
            forkserver.ensure_running()
            signal.signal(signal.SIGINT, before)
        how_to_start: Any = {"mp_context": context, "initializer": _warm_up, "initargs": (local,)}
        return self._run_in(ProcessPoolExecutor(self.jobs, **how_to_start))

    def _run_in(self, pool: Executor) -> Progress:
        others = set(multiprocessing.active_children())
        try:
            for cell in self.progress.cells:
                self._submit(pool, cell, cell.first_runs())
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
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()  # it keeps what it has done, see _ask_to_stop
            _stop_runs_here(True)
            raise
        finally:
            self.progress.running.clear()
            pool.shutdown(wait=True, cancel_futures=True)
            _stop_runs_here(False)
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
                with _undisturbed(), _main_hidden():  # it may start a process
                    future = pool.submit(_make, config, path, options, os.environ.get("SNGM_COMMIT"))
                self.futures[future] = cell, config

    def _finish(self, pool: Executor, cell: Cell, config: RunConfig, record: Record) -> None:
        if record["status"] == "interrupted":
            raise KeyboardInterrupt
        self.progress.done.append((config, record))
        if record["status"] == "failed":  # the others go on; this cell stays without a result
            self.progress.failed.append((config, record))
            self.show(self.progress)
            return
        before = len(cell.scores)
        following = cell.take(config, record, self.task.metric, self.task.higher_is_better)
        extended = bool(following) and following[0].part == "select"
        self.progress.planned += extended  # the grid grew
        if before != len(cell.scores) and cell.chosen and cell.lr is None:
            self.progress.planned -= self.study.seeds  # every rate diverged: there is nothing to run
        self._submit(pool, cell, following)
        self._write()
        self.show(self.progress)

    def _update_running(self) -> None:
        self.progress.running = {
            run_name(config): config for future, (_, config) in self.futures.items() if future.running()
        }

    def _write(self) -> None:
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
        write_record(self.folder / "study.json", study)


def _finished(path: Path, config: RunConfig, data: Record) -> Record | None:
    folder = RunFolder(path)
    if not folder.file.exists():
        return None
    try:
        record = folder.open(config)
    except NothingLeft:  # in a folder with this run's hash in its name
        folder.discard()
        return None
    folder.check_data(record, data)
    if record.get("status") not in FINISHED:
        return None
    folder.repair_metrics(record, config)
    return record


# Windows has neither SIGALRM nor masks of signals
INTERRUPTS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))


def _mask(how: str, signals: Iterable[int]) -> set[Any]:
    return signal.pthread_sigmask(getattr(signal, how), signals) if hasattr(signal, "pthread_sigmask") else set()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep Ctrl-C, SIGTERM and the end of a budget waiting: here, and in processes spawned until they are ready."""
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in INTERRUPTS}
    # for the processes: other threads of this one hear them
    mask = _mask("SIG_BLOCK", INTERRUPTS)
    try:
        yield
    finally:
        _mask("SIG_SETMASK", mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep worker processes from running the user's script again: they are sent what they need of it."""
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
    """Compute as a worker process does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- in a worker process

_stop = _end = _steps = False  # asked to stop, asked to end, has made steps that are worth keeping


def _pack_local() -> bytes | None:
    """Return tasks and methods that a worker cannot import, pickled by value; None if there are none."""
    methods = {name: method for name, method in registry.METHODS.items() if name not in registry.BUILT_IN}
    if not tasks.LOCAL and not methods:
        return None
    try:
        import cloudpickle
    except ImportError:  # older versions of joblib, which scikit-learn depends on, bring their own
        from joblib.externals import cloudpickle

    packed: bytes = cloudpickle.dumps((tasks.LOCAL, methods))
    return packed


def _warm_up(local: bytes | None = None) -> None:
    if local is not None:
        found, methods = pickle.loads(local)
        tasks.LOCAL.update(found)
        registry.METHODS.update(methods)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # told of by the parent, which has loaded the same data
    warnings.filterwarnings("ignore", message=".*does not hold the official (records|words)")
    torch.set_num_threads(1)  # whatever --jobs says: the number of threads changes the last digits of a result
    signal.signal(signal.SIGINT, _ask_to_stop)
    signal.signal(signal.SIGTERM, _ask_to_stop)
    _mask("SIG_UNBLOCK", INTERRUPTS)


def _end_with_parent() -> None:
    """A killed parent leaves nobody behind who would hold the folders."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ask_to_stop(number: int, _: Any) -> None:
    """Ctrl-C asks for a stop at the next step; SIGTERM for the process to end then, or at once if nothing is lost."""
    global _stop, _end
    _stop, _end = True, _end or number == signal.SIGTERM
    if _end and not _steps:
        os._exit(0)


def _stop_runs_here(stop: bool) -> None:
    """Ask a run in a thread of this process to stop at the next step."""
    global _stop
    _stop = stop


def _should_stop() -> bool:
    """Asked after each step. What comes before the first, such as compiling, may be long, and is not waited for."""
    global _steps
    _steps = True
    return _stop


def _make(config: RunConfig, path: Path, options: dict[str, Any], commit: str | None) -> Record:
    global _steps
    if commit is not None:  # the server that forks has the environment of when it was started
        os.environ["SNGM_COMMIT"] = commit
    try:
        if _stop:
            return {"status": "interrupted"}
        return train(config, path, Options(**options, should_stop=_should_stop))
    except Interrupted:
        return {"status": "interrupted"}
    except (UsageError, OSError):  # the next run would fail likewise
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return {"status": "failed", "error": f"{type(error).__name__}: {error}", "traceback": text, "result": {}}
    finally:
        _steps = False
        if _end:
            os._exit(0)
