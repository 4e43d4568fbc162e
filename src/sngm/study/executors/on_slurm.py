"""Runs as SLURM jobs, submitted with submitit."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import Failed, UsageError
from ...options import Cluster
from .. import worker
from . import PATIENCE, Record

RETRIES = 3  # how often a run is submitted again if its job ended without a result
TIMEOUTS = 100  # the most times that a job is requeued at its time limit
PAUSE = 0.5  # seconds between checks of the jobs


class Resumable:
    """A run that submitit requeues when its job is preempted or reaches its time limit."""

    def __call__(self, *arguments: Any) -> Record | Exception:
        requeue: Any = signal.getsignal(signal.SIGUSR2)  # submitit's handler, which ends this process
        came: list[int] = []

        def stop(number: int, _: Any) -> None:
            came.append(number)
            worker.stop_runs_here(True)

        # SLURM sends SIGTERM to a cancelled job. Before a time limit it sends SIGUSR2, and perhaps SIGTERM before that.
        found = worker.make_elsewhere(*arguments, handlers={signal.SIGTERM: stop, signal.SIGUSR2: stop})
        if signal.SIGUSR2 in came and _interrupted(found):
            requeue(signal.SIGUSR2, None)
        return found

    def checkpoint(self, *arguments: Any) -> Any:
        """Return the same run, which will resume from its last checkpoint. submitit calls this to requeue the job."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


def _interrupted(found: Record | Exception | None) -> bool:
    return isinstance(found, dict) and found["status"] == "interrupted"


@dataclass(slots=True)
class Attempt:
    """A run, its current job, and the number of times that the run may still be submitted."""

    arguments: tuple[Any, ...]
    job: Any
    retries: int = RETRIES


class OnSlurm:
    """Executor that submits a SLURM job for each run. Job scripts and logs are in the folder slurm/ of the study."""

    def __init__(self, cluster: Cluster, folder: Path, local: bytes | None, command: str, kind: str = "slurm") -> None:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        self.failed, self.lost = FailedJobError, UncompletedJobError
        self.executor = _executor(cluster, folder, kind)
        self.common = local, command
        self.attempts: dict[Future[Record], Attempt] = {}
        self.ends = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def submit(self, *job: Any) -> Future[Record]:
        future: Future[Record] = Future()
        future.set_running_or_notify_cancel()
        arguments = (*self.common, *job)
        try:
            self.attempts[future] = Attempt(arguments, self.executor.submit(Resumable(), *arguments))
        except self.failed as error:
            why = str(error).strip().splitlines()[-1]
            raise UsageError(
                f"SLURM refused the job: {why}; see `slurm_partition`, `slurm_time` and `slurm_options`"
            ) from error
        return future

    def _watch(self) -> None:
        while not self.ends.wait(PAUSE):
            for future, attempt in list(self.attempts.items()):
                if attempt.job.done():
                    try:
                        self._settle(future, attempt)
                    except Exception as error:  # an error of submitit, for example because SLURM refuses the job
                        del self.attempts[future]
                        future.set_exception(error)

    def _settle(self, future: Future[Record], attempt: Attempt) -> None:
        outcome: Any = None
        try:
            outcome = attempt.job.result()
        except self.failed as error:  # failed before the run began; the run itself returns its errors
            why = str(error).strip().splitlines()[-1]
            raise Failed(f"SLURM job {attempt.job.job_id} failed, see {attempt.job.paths.stderr}: {why}") from error
        except self.lost:  # killed, or its node was lost
            pass
        if outcome is None or _interrupted(outcome):
            if self.ends.is_set():
                return
            if not attempt.retries:
                raise Failed(
                    f"SLURM job {attempt.job.job_id} ended without a result, as did {RETRIES} before it; see "
                    f"{attempt.job.paths.stderr}, and resume with the same command"
                )
            attempt.retries -= 1
            attempt.job = self.executor.submit(Resumable(), *attempt.arguments)
            return
        del self.attempts[future]
        worker.settle(future, outcome)

    def stop(self) -> None:
        self.ends.set()
        for attempt in list(self.attempts.values()):
            attempt.job.cancel(check=False)  # SLURM sends SIGTERM, on which a run writes a checkpoint

    def shutdown(self) -> None:
        self.ends.set()
        end = time.monotonic() + PATIENCE
        jobs = [attempt.job for attempt in list(self.attempts.values())]  # after `stop`, those that had not ended
        while jobs and time.monotonic() < end:
            jobs[0].done(force_check=True)  # asks SLURM about all jobs at once
            jobs = [job for job in jobs if not job.done()]
            if jobs:
                time.sleep(PAUSE)


def job_script(cluster: Cluster, folder: Path) -> str:
    """Return the script with which each run would be submitted to sbatch."""
    executor = _executor(cluster, folder, "slurm")._executor
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


def _executor(cluster: Cluster, folder: Path, kind: str) -> Any:
    import submitit

    if cluster.gpus != int(cluster.gpus):
        raise UsageError(f"`gpus` must be a whole number on SLURM, got {cluster.gpus:g}")
    executor = submitit.AutoExecutor(folder / "slurm", cluster=kind, **{f"{kind}_max_num_timeout": TIMEOUTS})
    executor.update_parameters(
        name="sngm",
        timeout_min=cluster.slurm_time,
        cpus_per_task=cluster.cpus,
        gpus_per_node=int(cluster.gpus) or None,
        slurm_partition=cluster.slurm_partition,
        slurm_additional_parameters=cluster.sbatch_options() or None,
    )
    return executor
