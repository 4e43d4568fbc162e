"""Where passes get their samples: from memory of the device, or from processes that prepare them ahead.

``task.batch(samples, indices, seed=, epoch=)`` makes the batch of a pass. Of samples on the device, `indices` is an
int64 tensor there. In captured steps `epoch`, and in compiled ones `seed` too, is an int64 tensor without dimensions,
because a number would be a constant of the code; everywhere else both are ints. Batches for a stream are made on the
host, with `indices` there.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..environment import local_ranks
from ..errors import DataMissing, Failed, UsageError
from ..tasks import Batch, Samples, Task
from .distributed import cores

AHEAD = 4  # batches that each process makes before they are wanted
ROOM = 0.5  # of a GPU's free memory that samples may take
WIDE = (torch.float32, torch.float64)
OURS = {kind.__name__: kind for kind in (DataMissing, Failed, UsageError)}


def place(samples: Samples, device: torch.device) -> Samples:
    """The samples on the device, if they are tensors in memory and there is room; else as they are."""
    move = getattr(samples, "to", None)
    if move is None or device.type != "cuda" or not fits(samples, device):
        return samples
    moved: Samples = move(device)
    return moved


def fits(samples: Samples, device: torch.device) -> bool:
    """Whether there is room for the samples on the device, and as much for all else."""
    return device.type != "cuda" or size_of(samples) <= ROOM * torch.cuda.mem_get_info(device)[0]


def size_of(samples: Any) -> int:
    """Bytes, of tensors or a part of them."""
    held = getattr(samples, "samples", samples)
    return sum(t.nbytes for t in getattr(held, "tensors", ()))


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """A batch where the model is, floating-point inputs in its precision; those of fewer bits stay as they are."""
    return tuple(t.to(device, dtype if t.dtype in WIDE else t.dtype, non_blocking=True) for t in batch)


class Resident:
    """Samples that are gathered when their pass comes: from the device's memory if they fit, else from the host's."""

    streams = False

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self.samples, self.device = samples, device
        self.placed = self.on_gpu = False
        self.pinned: Tensor | None = None

    def begin(self, order: Tensor, epoch: int, first: int) -> Tensor:
        """An epoch begins at its step `first`: its order, sent to where samples are gathered."""
        if not self.placed:
            self.samples, self.placed = place(self.samples, self.device), True
            self.on_gpu = getattr(getattr(self.samples, "device", None), "type", "cpu") == "cuda"
        if not self.on_gpu:
            return order
        if self.pinned is None:  # once: to pin memory takes longer than the copy, which is done when an epoch ends
            self.pinned = torch.empty_like(order, pin_memory=True)
        return self.pinned.copy_(order).to(self.device, non_blocking=True)

    def take(self, indices: Tensor) -> Tensor | Batch:
        """What the next pass reads: indices, to be gathered by the pass itself."""
        return indices

    def close(self) -> None:
        """There is nothing to stop."""


class Streamed:
    """Batches that other processes make ahead, in the order of this process's passes."""

    streams = True

    def __init__(
        self, task: Task, samples: Samples, seed: int, passes: Sequence[slice], batch: int, device: torch.device,
        loaders: int,
    ) -> None:  # fmt: skip
        self.samples, self.passes, self.batch, self.device = samples, passes, batch, device
        self.loader = Loader(Fetch(task, samples, seed), loaders, device)
        self.coming: Iterator[Batch] = iter(())

    def begin(self, order: Tensor, epoch: int, first: int) -> Tensor:
        """An epoch begins at its step `first`: all its passes from there on are known, and work on them starts."""
        starts = range(first * self.batch, len(order) // self.batch * self.batch, self.batch)
        pieces = [slice(s + piece.start, s + piece.stop) for s in starts for piece in self.passes]
        self.coming = self.loader.over([(epoch, order[piece].tolist()) for piece in pieces])
        return order

    def take(self, indices: Tensor) -> Tensor | Batch:
        """The batch of the next pass, on its way to the device."""
        return tuple(t.to(self.device, non_blocking=True) for t in next(self.coming))

    def close(self) -> None:
        """Stop the other processes."""
        self.loader.close()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Makes the batch of an epoch and some samples."""

    task: Task
    samples: Samples
    seed: int

    def __call__(self, item: tuple[int, list[int]]) -> Batch:
        epoch, indices = item
        return self.task.batch(self.samples, torch.tensor(indices), seed=self.seed, epoch=epoch)

    def culprit(self, item: tuple[int, list[int]]) -> str:
        """Which sample the error comes from, in words."""
        epoch, indices = item
        for index in indices:
            try:
                self((epoch, [index]))
            except Exception:
                return f"training sample {index}"
        return f"training samples {indices[0]} and others"


class Loader:
    """What `fetch` makes of some items, in their order: in this process, or ahead of time in `loaders` others.

    Those are started at the first item and live until `close`. Numbers do not depend on how many there are.
    """

    def __init__(self, fetch: Callable[[Any], Batch], loaders: int, device: torch.device) -> None:
        self.items: list[Any] = []
        self.loader: Any = DataLoader(
            _Fetched(fetch),
            sampler=self.items,
            batch_size=None,
            num_workers=loaders,
            collate_fn=_as_it_is,
            pin_memory=device.type == "cuda",
            worker_init_fn=_deaf_to_interrupts,
            multiprocessing_context="fork" if loaders and sys.platform == "linux" else None,  # tasks need no pickling
            generator=torch.Generator(),  # the default one is the model's
            persistent_workers=loaders > 0,
            prefetch_factor=AHEAD if loaders else None,
        )
        self.iterator: Any = None

    def over(self, items: list[Any]) -> Iterator[Batch]:
        """The batches of these items. Work on them begins at once."""
        self.items[:] = items
        # A forked process must not collect what it has inherited: to free a tensor of a GPU there is to crash.
        gc.collect()
        gc.freeze()
        try:
            self.iterator = iter(self.loader)
        finally:
            gc.unfreeze()
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        try:
            for found in self.iterator:
                if isinstance(found, _Trouble):
                    found.tell()
                yield tuple(found)
        except RuntimeError as error:
            if "DataLoader worker" in str(error):  # killed, for want of memory as a rule
                raise Failed(f"a process that loads data ended: {str(error).splitlines()[0]}") from error
            raise

    def close(self) -> None:
        """Stop the other processes, busy or not."""
        stop = getattr(self.iterator, "_shutdown_workers", None)
        self.iterator = self.loader = None
        if stop is not None:
            stop()


def loaders_of(task: Task, asked: int | None) -> int:
    """How many processes shall make batches ahead: as asked for, or as the task wants; no more than there are cores."""
    if asked is not None and asked < 0:
        raise UsageError(f"loaders must be at least 0, got {asked}")
    if multiprocessing.current_process().daemon:  # which may not start processes
        return 0
    here = local_ranks()
    return min(task.loaders if asked is None else asked, max(1, cores() // here))


class _Fetched(Dataset[Any]):
    """Items are looked up by themselves; an error is handed over as a value, to be told in one line."""

    def __init__(self, fetch: Callable[[Any], Batch]) -> None:
        self.fetch = fetch

    def __getitem__(self, item: Any) -> Any:
        try:
            return self.fetch(item)
        except Exception as error:
            name = getattr(self.fetch, "culprit", lambda item: "data")(item)
            reason = traceback.format_exception_only(error)[-1].strip()
            if type(error).__name__ in OURS:
                return _Trouble(type(error).__name__, str(error), traceback.format_exc())
            return _Trouble("Failed", f"{name} cannot be loaded: {reason}", traceback.format_exc())


@dataclass(frozen=True, slots=True)
class _Trouble:
    """What went wrong in another process."""

    kind: str
    text: str
    trace: str

    def tell(self) -> None:
        raise OURS[self.kind](self.text) from RuntimeError(self.trace)


def _as_it_is(found: Any) -> Any:
    return found


def _deaf_to_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the first one decides when to stop, and stops the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
