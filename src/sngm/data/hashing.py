"""Random numbers computed by hashing seed, epoch and sample: the same in any process, order and batch."""

from typing import Any

import torch
from torch import Tensor

GOLDEN = -0x61C8864680B583EB  # constants of splitmix64, as signed 64-bit integers
FIRST = -0x40A7B892E31B1A47
SECOND = -0x6B2FB644ECCEEE15
BITS = 62  # bits of a result; the two highest of 64 bits are dropped, so that the result is never negative


def random_bits(*values: int | Tensor) -> Any:
    """Hash values, from left to right, to an int uniform in [0, 2**62), or to an int64 tensor of such ints.

    Ints and integer tensors give the same bits and may be combined; tensors are broadcast. The order and number of
    values matter. On tensors only +, \\*, ^, >> and & are used, which torch.compile supports. If a seed or
    epoch changes, pass it to compiled code as a 0-d tensor; otherwise torch may compile the code again for each value.

    >>> random_bits(0, 3, 17)
    2164258931680428043
    >>> random_bits(0, 3, torch.tensor([17, 18]))[0].item() == random_bits(0, 3, 17)
    True
    """
    if not values:
        raise ValueError("random_bits needs at least one value")
    state: Any = 0
    for value in values:
        state = wrapped((state ^ wrapped(value)) + GOLDEN)
        state = wrapped((state ^ _shifted(state, 30)) * FIRST)
        state = wrapped((state ^ _shifted(state, 27)) * SECOND)
        state = state ^ _shifted(state, 31)
    return state & ((1 << BITS) - 1)


def wrapped(value: Any) -> Any:
    """Return a value modulo 2**64 as a signed 64-bit integer; int64 tensors wrap by themselves."""
    if isinstance(value, Tensor):
        return value if value.dtype == torch.int64 else value.long()
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _shifted(value: Any, by: int) -> Any:
    """Shift right and fill with zeros; `>>` alone would repeat the sign bit."""
    return (value >> by) & ((1 << (64 - by)) - 1)
