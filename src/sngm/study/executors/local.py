"""Executors on this machine: worker processes, or a thread for tasks that cannot be sent to a process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ...progress import handling
from ...training.distributed import cores
from .. import worker
from . import Executor, Record

SMALL, SHARING = 128, 4  # the largest batch at which runs share a GPU, and how many then do, see docs/speed.md


def default_jobs(batches: Sequence[int], device: torch.device) -> int:
    """Return the default number of parallel runs: one per CPU core; on a GPU, `SHARING` or one.

    On a GPU the number is `SHARING` if all batches are at most `SMALL` and NVIDIA's Multi-Process Service is running.
    Without the service, processes on a GPU take turns, which is hardly faster.
    """
    if device.type != "cuda":
        return cores()
    return SHARING if max(batches) <= SMALL and mps_runs() else 1


def mps_runs() -> bool:
    """Return whether NVIDIA's Multi-Process Service is running. It has a pid file, which it deletes when it exits."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    try:
        os.kill(int((folder / "nvidia-cuda-mps-control.pid").read_text()), 0)  # signal 0 only checks existence
    except PermissionError:  # the process or file of another user
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def open_local(task: str, jobs: int, on_gpu: bool) -> Executor:
    """Return an executor with `jobs` worker processes, or with a thread if the task or a method cannot be pickled."""
    try:
        local = worker.pack_local()
    except Exception as error:
        warnings.warn(
            f"runs go one after another in this process: worker processes cannot be sent {task} "
            f"or a method ({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return InThread()
    return InProcesses(jobs, on_gpu, local)


class InThread:
    """Executor that trains one run after another in a thread, while the main thread shows progress."""

    def __init__(self) -> None:
        # with one torch thread, as in a worker process
        self.pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def submit(self, *job: Any) -> Future[Record]:
        return self.pool.submit(worker.make, *job)

    def stop(self) -> None:
        worker.stop_runs_here(True)

    def shutdown(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        worker.stop_runs_here(False)


class InProcesses:
    """Executor with a pool of worker processes."""

    def __init__(self, jobs: int, on_gpu: bool, local: bytes | None) -> None:
        # fork workers from a server process that has torch loaded
        forks = not on_gpu and "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            from multiprocessing import forkserver

            context.set_forkserver_preload(["sngm.study.launch"])
            # The server and its helper inherit the ignored signals. They must survive Ctrl-C and a closed terminal, to
            # clean up.
            with handling(signal.SIGINT, signal.SIGHUP, by=signal.SIG_IGN):
                forkserver.ensure_running()
        self.pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=worker.warm_up, initargs=(local,))
        self.others = set(multiprocessing.active_children())

    def submit(self, *job: Any) -> Future[Record]:
        with _signals_deferred(), _main_hidden():  # submit() may start a process
            return self.pool.submit(worker.make, *job)

    def stop(self) -> None:
        for child in set(multiprocessing.active_children()) - self.others:
            child.terminate()  # the worker writes a checkpoint first, see worker.on_signal

    def shutdown(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer signals such as Ctrl-C until the ``with`` block ends; in processes that it starts, until `warm_up` runs."""
    came: list[int] = []
    deferred = [number for number in worker.INTERRUPTS if signal.getsignal(number) is not signal.SIG_IGN]
    with handling(*deferred, by=lambda number, _: came.append(number)):
        # child processes inherit the mask; other threads of this process still receive the signals
        mask = worker.mask_signals("SIG_BLOCK", worker.INTERRUPTS)
        try:
            yield
        finally:
            worker.mask_signals("SIG_SETMASK", mask)
    for late in came:
        signal.raise_signal(late)


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep worker processes from importing the user's script again; the tasks and methods they need are pickled."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file
