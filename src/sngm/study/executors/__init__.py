"""Where the runs of a study are executed: in processes of this machine, on a Ray cluster, or as SLURM jobs.

The study decides which runs to train; an executor only trains them.
"""

from __future__ import annotations

import importlib.util
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from ...errors import UsageError
from ...options import EXECUTORS, Cluster
from ...training.config import RunConfig
from ...training.distributed import cores
from .. import worker

Record = dict[str, Any]
PACKAGES = {"ray": "ray", "slurm": "submitit"}  # the package that each extra of sngm installs
PATIENCE = 60.0  # seconds that stopped runs of a cluster have to write their checkpoints


class Executor(Protocol):
    """Interface of an executor."""

    def submit(self, config: RunConfig, path: Path, options: dict[str, Any], commit: str | None) -> Future[Record]:
        """Start a run, now or when resources are free; the arguments are those of :func:`sngm.study.worker.make`."""

    def stop(self) -> None:
        """Ask the runs that have begun to write a checkpoint and stop; drop the runs that have not begun."""

    def shutdown(self) -> None:
        """Release processes and connections; after `stop`, first wait until the runs have ended."""


def open_remote(cluster: Cluster, folder: Path, command: str) -> Executor:
    """Return the executor for a cluster, connected to it.

    Args:
        cluster: the executor, and the resources of each run.
        folder: the folder of the study, on a file system that all machines share.
        command: the command of this process, for the records.

    Raises:
        UsageError: this machine cannot use the executor, or a task or method cannot be pickled.
    """
    try:
        local = worker.pack_local()
    except Exception as error:
        raise UsageError(f"`executor` {cluster.executor}: the task or a method cannot be pickled: {error}") from error
    if cluster.executor == "ray":
        from .on_ray import OnRay

        return OnRay(cluster, local, command)
    from .on_slurm import OnSlurm

    return OnSlurm(cluster, folder, local, command)


def check_usable(name: str) -> None:
    """Raise UsageError if this machine cannot use the executor `name`."""
    usable, why = _usable(name)
    if not usable:
        raise UsageError(f"`executor` {name}: {why}")


def executors_usable() -> list[tuple[str, bool, str]]:
    """Return (name, whether this machine can use it, reason) for each executor.

    >>> executors_usable()[0][:2]
    ('local', True)
    """
    return [(name, *_usable(name)) for name in EXECUTORS]


def _usable(name: str) -> tuple[bool, str]:
    if name == "local":
        return True, f"processes on the {cores()} CPU cores of this machine, or on its GPUs"
    package = PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        return False, f"{package} is not installed; pip install 'sngm[{name}]'"
    if name == "slurm" and shutil.which("srun") is None:
        return False, "there is no srun here; use a login node of a SLURM cluster"
    where = "the cluster of `ray_address` or $RAY_ADDRESS, else one on this machine" if name == "ray" else "sbatch"
    return True, f"{package} is installed; runs go to {where}"
