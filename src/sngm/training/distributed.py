"""The processes of a run, started by torchrun, and their device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import environment
from ..errors import Failed, UsageError
from .heartbeat import Heartbeat

EXCHANGE_EVERY = 10  # steps between exchanges of flags in `Processes.any`
LONGEST_WAIT = timedelta(hours=2)  # timeout of collectives, as long as evaluation may take; `Heartbeat` detects hangs


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a run, seen from one of them: its rank, their number, its device and heartbeat."""

    rank: int
    ranks: int
    device: torch.device
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Return the first process's value in all processes."""
        if self.ranks == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def call_in_first(self, function: Callable[[], Any]) -> Any:
        """Call a function in the first process only; return its value, or raise its UsageError, in all processes."""
        value: Any = None
        error: Any = None
        if self.first:
            try:
                value = function()
            except UsageError as refused:
                error = refused
        value, error = self.broadcast((value, error))
        if error is not None:
            error.of_first_process = not self.first
            raise error
        return value

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors, such as the buffers of a model, with those of the first process."""
        if self.ranks > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def any(self, flag: bool, step: int) -> bool:
        """Return whether `flag` is set in any process. With several processes, only every 10th step can return True."""
        if self.ranks == 1:
            return flag
        if step % EXCHANGE_EVERY:
            return False
        said = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return bool(said.item())


def set_numerics(device: torch.device, deterministic: bool = False) -> None:
    """Turn off TF32 in torch; turn on deterministic algorithms if `deterministic`, else cuDNN autotuning on a GPU."""
    backends: Any = torch.backends
    for backend in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        backend.fp32_precision = "ieee"  # no TF32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = device.type == "cuda" and not deterministic


@contextlib.contextmanager
def join(device: str | None = None, hang_timeout: float = 1800.0) -> Iterator[Processes]:
    """Join the process group for the ``with`` block if torchrun started this process; else yield this process alone."""
    rank, ranks, local = environment.launch()
    chosen = choose_device(device)
    if ranks == 1:
        yield Processes(0, 1, chosen)
        return
    if chosen.type == "cuda":
        if local >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise UsageError(f"process {local} of this machine has no GPU of its own; there are {count}")
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    own = chosen if chosen.type == "cuda" else None
    try:
        how: dict[str, Any] = {"device_id": own, "timeout": LONGEST_WAIT}
        if _restarts_here(ranks):
            how |= {"store": _open_store("group", LONGEST_WAIT), "rank": rank, "world_size": ranks}
        dist.init_process_group("nccl" if own else "gloo", **how)
    except (ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise Failed(f"process {rank} of {ranks} could not join the others: {why}; start them with torchrun") from error
    heartbeat = Heartbeat(rank, ranks, hang_timeout, _open_store("heartbeat", timedelta(minutes=1)))
    try:
        yield Processes(rank, ranks, chosen, heartbeat)
    finally:
        heartbeat.end()
        dist.destroy_process_group()


def _restarts_here(ranks: int) -> bool:
    """Return whether one torchrun agent, on this machine, started all processes: a restart keeps its store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.local_ranks() == ranks


def _open_store(name: str, timeout: timedelta) -> Any:
    """Return a new connection to torchrun's key-value store, whose keys get a prefix with `name`.

    If one torchrun agent started all processes, the prefix also has the number of the restart. torchrun keeps its store
    when it restarts a job, so with the same keys gloo and NCCL would find addresses of ended processes in the store.
    """
    stores: Any = dist  # Any, because the type stubs lack the classes
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # each machine has its own count
    prefix = f"sngm/{name}/{restart if _restarts_here(environment.ranks()) else ''}"
    return stores.PrefixStore(prefix, stores.TCPStore(address, port, is_master=False, timeout=timeout))


def choose_device(name: str | None) -> torch.device:
    """Return the device called `name`; for None, the GPU if there is one, else the CPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"`device` must be cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"`device` must be cpu on this machine, where torch finds no GPU, got {name!r}")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"`device` must be cpu, cuda or cuda:N, got {name!r}")
    return device
