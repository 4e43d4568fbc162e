"""Batch plan: the split of the global batch into workers, micro-batches and BatchNorm groups."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ..errors import UsageError

MOST_SAMPLES = 10**12  # limit per batch


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one step splits the global batch.

    Attributes:
        batch: number of samples of the global batch, over all workers.
        workers: number of data-parallel workers. Each has a contiguous part of the batch.
        micro: number of samples in a micro-batch. A worker's part of the batch is divided into micro-batches, and each
            micro-batch into BatchNorm groups.
        bn_group: number of samples that BatchNorm normalises together. A pass (one forward and backward) processes one
            such group, or several if the task sets `pass_size`.
        ranks: number of processes. Each process computes ``workers / ranks`` consecutive workers, one after another.

    >>> plan = BatchPlan.of(batch=1024, workers=8, micro=64)
    >>> plan.share, plan.bn_group, len(plan.pieces(0)), plan.pieces(1)[0]
    (128, 64, 2, slice(128, 192, None))
    """

    batch: int
    workers: int
    micro: int
    bn_group: int
    ranks: int = 1

    @classmethod
    def of(
        cls,
        batch: int,
        workers: int | None = None,
        micro: int | None = None,
        bn_group: int | None = None,
        ranks: int = 1,
    ) -> BatchPlan:
        """Return the plan for these arguments; raise UsageError if the batch cannot be divided evenly."""
        workers = ranks if workers is None else workers
        given = {"batch": batch, "workers": workers, "micro": micro, "bn_group": bn_group}
        for name, value in given.items():
            if value is not None and value < 1:
                raise UsageError(f"`{name}` must be a whole number >= 1, got {value}")
            if value is not None and value > MOST_SAMPLES:
                raise UsageError(f"`{name}` must be at most {MOST_SAMPLES:,}, got {value}")
        if workers % ranks:
            raise UsageError(
                f"`workers`={workers} must be a multiple of the {ranks} processes; {_multiples(workers, ranks)}"
            )
        if batch % workers:
            raise UsageError(f"`batch`={batch} must be a multiple of `workers`={workers}; {_multiples(batch, workers)}")
        share = batch // workers
        if micro is None and bn_group is not None and share % bn_group:
            raise UsageError(
                f"`bn_group`={bn_group} must divide a worker's part of the batch, {share}; {_divisors(share, bn_group)}"
            )
        micro = (bn_group or share) if micro is None else micro
        if micro > share or share % micro:
            raise UsageError(
                f"`micro`={micro} must divide a worker's part of the batch, {share}; {_divisors(share, micro)}"
            )
        bn_group = micro if bn_group is None else bn_group
        if bn_group > micro or micro % bn_group:
            raise UsageError(f"`bn_group`={bn_group} must divide `micro`={micro}; {_divisors(micro, bn_group)}")
        return cls(batch, workers, micro, bn_group, ranks)

    def for_rest(self, count: int) -> BatchPlan | None:
        """Return the plan of an epoch's last, smaller batch of at most `count` samples; None if `count` is too small.

        The number of workers stays the same. So does the micro-batch size, if a worker's part of the batch has at least
        that many samples; else the part is one micro-batch. BatchNorm groups keep their size, unless each is a whole
        micro-batch. Samples that do not fill a micro-batch are left out.

        >>> plan = BatchPlan.of(batch=32768, workers=8, micro=128)
        >>> plan.for_rest(50000 - 32768).describe()
        '16384 = 8 workers x 16 groups of 128; BatchNorm over 128; 1 process'
        """
        share = count // self.workers
        micro = min(self.micro, share)
        bn_group = micro if self.bn_group == self.micro else self.bn_group
        micro -= micro % bn_group if bn_group else 0
        if micro < 2:  # a single sample has no variance
            return None
        return BatchPlan.of(share // micro * micro * self.workers, self.workers, micro, bn_group, self.ranks)

    @property
    def share(self) -> int:
        return self.batch // self.workers

    def workers_of(self, rank: int) -> range:
        """Return the workers that a process computes."""
        each = self.workers // self.ranks
        return range(rank * each, (rank + 1) * each)

    def pieces(self, worker: int) -> list[slice]:
        """Return a worker's forward-backward passes as slices of the global batch, one per BatchNorm group."""
        start = worker * self.share
        return [slice(i, i + self.bn_group) for i in range(start, start + self.share, self.bn_group)]

    def merged(self, workers: range, most: int, unit: int | None = None) -> list[slice]:
        """Return the passes of these workers as slices of the batch, as few as possible of at most `most` samples.

        Passes consist of whole units of `unit` samples (default: BatchNorm groups) and have nearly equal sizes. A unit
        larger than `most` is one pass.

        >>> BatchPlan.of(batch=64, workers=2, micro=4).merged(range(2), 24)
        [slice(0, 20, None), slice(20, 40, None), slice(40, 64, None)]
        """
        start, unit = workers.start * self.share, unit or self.bn_group
        units = len(workers) * self.share // unit
        passes = math.ceil(units / max(1, most // unit))
        ends = [start + unit * (units * i // passes) for i in range(passes + 1)]
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def describe(self, normalises: bool = True) -> str:
        """Return the plan as text; `normalises` is whether the model has BatchNorm.

        >>> BatchPlan.of(batch=512, workers=8, micro=32).describe()
        '512 = 8 workers x 2 groups of 32; BatchNorm over 32; 1 process'
        """
        norm = f"BatchNorm over {self.bn_group}; " if normalises else ""
        groups = self.share // self.bn_group
        return (
            f"{self.batch} = {self.workers} worker{'s' * (self.workers > 1)} x {groups} group{'s' * (groups > 1)} "
            f"of {self.bn_group}; {norm}{self.ranks} process{'es' * (self.ranks > 1)}"
        )


def _multiples(value: int, of: int) -> str:
    low = value // of * of
    return f"nearest: {f'{low} or ' if low else ''}{low + of}"


def _divisors(value: int, near: int) -> str:
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    all_of = sorted({*small, *(value // d for d in small)})
    below = [d for d in all_of if d < near][-1:]
    above = [d for d in all_of if d > near][:1]
    return f"nearest: {' or '.join(map(str, below + above))}"
