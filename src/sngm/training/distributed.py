"""The processes of one run, as torchrun starts them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import environment
from ..errors import Failed, UsageError

ASK_EVERY = 10  # steps


def cores() -> int:
    """Those that this process may use; all of them where the system cannot tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Processes:
    """Which of how many this one is, and the device it computes on."""

    rank: int
    ranks: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, value: Any) -> Any:
        """The first process's value, in all of them."""
        if self.ranks == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def ask_first(self, function: Callable[[], Any]) -> Any:
        """Call a function in the first process; return its value, or raise its UsageError, in all of them."""
        value: Any = None
        error: Any = None
        if self.first:
            try:
                value = function()
            except UsageError as refused:
                error = refused
        value, error = self.share((value, error))
        if error is not None:
            error.of_first_process = not self.first
            raise error
        return value

    def start_alike(self, model: nn.Module) -> None:
        """Give every process the first one's weights and buffers, however a task makes its model."""
        if self.ranks > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)

    def any(self, flag: bool, step: int) -> bool:
        """Whether any process says so. Several ask each other only now and then, and act at the same step."""
        if self.ranks == 1:
            return flag
        if step % ASK_EVERY:
            return False
        said = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return bool(said.item())


def set_numerics(device: torch.device, deterministic: bool = False) -> None:
    """How this process computes, for training, scoring and measuring alike."""
    backends: Any = torch.backends
    for backend in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        backend.fp32_precision = "ieee"  # float32 means float32: no rounding of inputs to TF32
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = device.type == "cuda" and not deterministic


@contextlib.contextmanager
def join(device: str | None = None) -> Iterator[Processes]:
    """Join the other processes if torchrun started this one; else be the only one."""
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
    # the others wait while the first one evaluates
    try:
        dist.init_process_group("nccl" if own else "gloo", device_id=own, timeout=timedelta(hours=2))
    except (ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise Failed(f"process {rank} of {ranks} could not join the others: {why}; start them with torchrun") from error
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        dist.destroy_process_group()


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or the GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"no device is called {name!r}; there are cpu, cuda, cuda:0 and so on") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device cuda was asked for, but torch sees no GPU here")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"runs are made for cpu and cuda, got {name!r}")
    return device
