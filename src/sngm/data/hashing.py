"""Random numbers without a generator: a hash of seed, epoch and sample, the same in any process, order and batch."""

from typing import Any, overload

import torch
from torch import Tensor

GOLDEN = -0x61C8864680B583EB  # splitmix64's constants, as the signed 64-bit numbers that torch has
FIRST = -0x40A7B892E31B1A47
SECOND = -0x6B2FB644ECCEEE15
BITS = 62  # of a result; the two above them are dropped, so that it is never negative


@overload
def mix(*values: int) -> int: ...  # type: ignore[overload-overlap]  # an int is no tensor


@overload
def mix(*values: int | Tensor) -> Tensor: ...


def mix(*values: int | Tensor) -> int | Tensor:
    """Fold values, left to right, into evenly spread bits: an int in [0, 2**62), or a tensor of such.

    Ints and tensors of integers give the same bits and may be mixed; tensors are broadcast. Order and number of the
    values count. With tensors this is only +, \\*, ^, >> and & on int64, to be compiled for any device. Compiled code
    should get a seed or an epoch that changes as a tensor without dimensions, or it is compiled again for each.

    >>> mix(0, 3, 17)
    2164258931680428043
    >>> mix(0, 3, torch.tensor([17, 18]))[0].item() == mix(0, 3, 17)
    True
    """
    if not values:
        raise ValueError("mix wants at least one value")
    state: Any = 0
    for value in values:
        state = wrapped((state ^ wrapped(value)) + GOLDEN)
        state = wrapped((state ^ _shifted(state, 30)) * FIRST)
        state = wrapped((state ^ _shifted(state, 27)) * SECOND)
        state = state ^ _shifted(state, 31)
    result: int | Tensor = state & ((1 << BITS) - 1)
    return result


def wrapped(value: Any) -> Any:
    """What is left in a signed 64-bit number; tensors wrap by themselves."""
    if isinstance(value, Tensor):
        return value if value.dtype == torch.int64 else value.long()
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _shifted(value: Any, by: int) -> Any:
    """Shifted right with zeros coming in; `>>` alone repeats the sign."""
    return (value >> by) & ((1 << (64 - by)) - 1)
