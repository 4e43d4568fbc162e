"""Data loading: samples in device memory, or batches prepared ahead by worker processes.

``task.batch(samples, indices, seed=, epoch=)`` makes the batch of a forward-backward pass. `indices` is an int64
tensor on the device of the samples; worker processes make batches on the host. In eager steps, `seed` and `epoch` are
ints. In captured steps, `epoch` is a 0-d int64 tensor; in compiled steps, both are such tensors. An int would be a
constant of the graph.
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

PREFETCH = 4  # batches that each worker process prepares ahead
MEMORY_FRACTION = 0.5  # the fraction of free GPU memory that samples may use
CAST_DTYPES = (torch.float32, torch.float64)


def to_device_if_fits(samples: Samples, device: torch.device) -> Samples:
    """Return the samples, moved to a GPU if they are tensors in memory and fit into its memory."""
    move = getattr(samples, "to", None)
    if move is None or device.type != "cuda" or not fits(samples, device):
        return samples
    moved: Samples = move(device)
    return moved


def fits(samples: Samples, device: torch.device) -> bool:
    """Return whether the samples take at most `MEMORY_FRACTION` of the free memory of a GPU; always True on a CPU."""
    return device.type != "cuda" or size_of(samples) <= MEMORY_FRACTION * torch.cuda.mem_get_info(device)[0]


def size_of(samples: Any) -> int:
    """Return the bytes of samples that are tensors in memory, else 0; a `Part` has the size of its `samples`."""
    held = getattr(samples, "samples", samples)
    return sum(t.nbytes for t in getattr(held, "tensors", ()))


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """Return a batch on a device, with float32 and float64 tensors cast to `dtype`."""
    return tuple(t.to(device, dtype if t.dtype in CAST_DTYPES else t.dtype, non_blocking=True) for t in batch)


class Resident:
    """Samples that this process loads itself, in each forward-backward pass.

    Tensors are moved to the memory of a GPU if they fit.
    """

    streams = False

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self.samples, self.device = samples, device
        self.moved = self.on_gpu = False
        self.pinned: Tensor | None = None

    def begin(self, order: Tensor, epoch: int, first: int) -> Tensor:
        """Start an epoch at its step `first`; return `order`, the sample indices in the order of this epoch.

        They are returned on the device of the samples.
        """
        if not self.moved:
            self.samples, self.moved = to_device_if_fits(self.samples, self.device), True
            self.on_gpu = getattr(getattr(self.samples, "device", None), "type", "cpu") == "cuda"
        if not self.on_gpu:
            return order
        # Pin once, because pinning is slow. The copy to the GPU ends before the next epoch overwrites the buffer.
        if self.pinned is None:
            self.pinned = torch.empty_like(order, pin_memory=True)
        return self.pinned.copy_(order).to(self.device, non_blocking=True)

    def take(self, indices: Tensor) -> Tensor | Batch:
        """Return the indices unchanged, because the pass itself gathers the samples."""
        return indices

    def close(self) -> None:
        """Do nothing, because there are no worker processes."""


class Streamed:
    """Batches that worker processes prepare ahead: one for each forward-backward pass of this process, in order."""

    streams = True

    def __init__(
        self, task: Task, samples: Samples, seed: int, passes: Sequence[slice], batch: int, device: torch.device,
        loaders: int,
    ) -> None:  # fmt: skip
        self.samples, self.passes, self.batch, self.device = samples, passes, batch, device
        self.loader = Loader(Fetch(task, samples, seed), loaders, device)
        self.batches: Iterator[Batch] = iter(())

    def begin(self, order: Tensor, epoch: int, first: int) -> Tensor:
        """Start an epoch at its step `first`; return `order`, the sample indices in the order of this epoch.

        The indices of all remaining passes of the epoch are sent to the worker processes.
        """
        starts = range(first * self.batch, len(order) // self.batch * self.batch, self.batch)
        pieces = [slice(s + piece.start, s + piece.stop) for s in starts for piece in self.passes]
        self.batches = self.loader.over([(epoch, order[piece].tolist()) for piece in pieces])
        return order

    def take(self, indices: Tensor) -> Tensor | Batch:
        """Return the batch of the next pass, copied to the device asynchronously. Its indices were given to `begin`."""
        return tuple(t.to(self.device, non_blocking=True) for t in next(self.batches))

    def close(self) -> None:
        """Stop the worker processes."""
        self.loader.close()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Callable that takes a pair (epoch, indices) and returns the training batch of these samples."""

    task: Task
    samples: Samples
    seed: int

    def __call__(self, item: tuple[int, list[int]]) -> Batch:
        epoch, indices = item
        return self.task.batch(self.samples, torch.tensor(indices), seed=self.seed, epoch=epoch)

    def failing_sample(self, item: tuple[int, list[int]]) -> str:
        """Return the name of the first sample in `item` that cannot be loaded, such as "training sample 7"."""
        epoch, indices = item
        for index in indices:
            try:
                self((epoch, [index]))
            except Exception:
                return f"training sample {index}"
        return f"training samples {indices[0]} and others"


class Loader:
    """DataLoader that calls `fetch` on each item in order, in this process or ahead of time in `loaders` processes.

    Workers start with the first call of `over` and run until `close`. Results do not depend on their number.
    """

    def __init__(self, fetch: Callable[[Any], Batch], loaders: int, device: torch.device) -> None:
        self.items: list[Any] = []
        self.loader: Any = DataLoader(
            _Fetched(fetch),
            sampler=self.items,
            batch_size=None,
            num_workers=loaders,
            collate_fn=_identity,
            pin_memory=device.type == "cuda",
            worker_init_fn=_ignore_sigint,
            multiprocessing_context="fork" if loaders and sys.platform == "linux" else None,  # tasks are not pickled
            generator=torch.Generator(),  # not the default generator, which the model uses
            persistent_workers=loaders > 0,
            prefetch_factor=PREFETCH if loaders else None,
        )
        self.iterator: Any = None

    def over(self, items: list[Any]) -> Iterator[Batch]:
        """Start the workers on these items and return an iterator over the batches."""
        self.items[:] = items
        # A forked process must not garbage-collect inherited objects, because freeing a CUDA tensor in it crashes.
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
                if isinstance(found, Exception):
                    raise found
                yield tuple(found)
        except RuntimeError as error:
            if "DataLoader worker" in str(error):  # the worker was killed, usually for lack of memory
                raise Failed(f"a process that loads data ended: {str(error).splitlines()[0]}") from error
            raise

    def close(self) -> None:
        """Stop the worker processes, even if they are busy."""
        stop = getattr(self.iterator, "_shutdown_workers", None)
        self.iterator = self.loader = None
        if stop is not None:
            stop()


def loaders_of(task: Task, asked: int | None) -> int:
    """Return the number of data-loading processes: `asked`, or the task's default; at most this rank's cores."""
    if multiprocessing.current_process().daemon:  # daemons cannot start processes
        return 0
    here = local_ranks()
    return min(task.loaders if asked is None else asked, max(1, cores() // here))


class _Fetched(Dataset[Any]):
    """Dataset whose indices are the items to fetch. It returns errors as values, which `Loader` raises."""

    def __init__(self, fetch: Callable[[Any], Batch]) -> None:
        self.fetch = fetch

    def __getitem__(self, item: Any) -> Any:
        try:
            return self.fetch(item)
        except Exception as error:
            found = error
            if type(error) not in (DataMissing, Failed, UsageError):
                name = getattr(self.fetch, "failing_sample", lambda item: "data")(item)
                found = Failed(f"{name} cannot be loaded: {traceback.format_exception_only(error)[-1].strip()}")
            found.add_note(traceback.format_exc())  # pickled with the error, unlike its traceback
            return found


def _identity(found: Any) -> Any:
    return found


def _ignore_sigint(worker: int) -> None:
    """Ignore Ctrl-C in a worker process. The terminal sends it to all processes; the main process stops the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
