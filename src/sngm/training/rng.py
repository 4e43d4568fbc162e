"""Random seeds computed from run, epoch and step, so that restarts and the number of processes do not change them."""

from __future__ import annotations

import torch
from torch import Tensor

ORDER, DROPOUT, MODEL, HOLDOUT = range(4)  # purposes of random numbers; the purpose is a part of the seed
MASK = (1 << 64) - 1


def fold(*values: int) -> int:
    """Mix integers into one seed with splitmix64, the same on every machine.

    >>> fold(0, 1) != fold(1, 0)
    True
    """
    state = 0
    for value in values:
        state = (state ^ (value & MASK)) + 0x9E3779B97F4A7C15 & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state >> 1  # torch needs a seed below 2**63


def permutation(n: int, *key: int) -> Tensor:
    """Return a random permutation of n indices, seeded by `key`."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(fold(*key)))


def seed_torch(*key: int) -> None:
    """Seed torch's generators of the CPU and of all GPUs in use with a hash of `key`."""
    seed = fold(*key)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also seeds other backends, which is 30 times slower
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
