"""Stochastic rounding to bfloat16: round up or down at random, so that the expected value is exact.

Round-to-nearest loses updates smaller than half the distance between neighbouring numbers; stochastic rounding keeps
them on average. The random bits are a function of the step, the parameter's index and the element's position in memory,
so that resumed runs, other implementations of a step and all replicas round identically.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """Hash 32-bit numbers (in int64) by a permutation in which each input bit flips about half of the output bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def rounded(values: Tensor, index: int, step: Tensor) -> Tensor:
    """Return float32 `values` of the parameter at `index` rounded at random to bfloat16 numbers, but still as float32.

    >>> values = rounded(torch.full((10_000,), 1.001), 0, torch.tensor(1))
    >>> values.unique().tolist(), round(values.double().mean().item(), 4)
    ([1.0, 1.0078125], 1.001)
    """
    key = mix((mix(step & WORD) + index) & WORD)
    # positions in memory, not logical indices, because the kernels only have memory addresses
    place = torch.arange(values.numel(), device=values.device).as_strided(values.shape, values.stride())
    chance = mix((mix((place & WORD) ^ key) + (place >> 32)) & WORD) & 0xFFFF
    bits = values.view(torch.int32)
    finite = (bits & 0x7F800000) != 0x7F800000
    return torch.where(finite, (bits + chance.to(torch.int32)) & -0x10000, bits).view(torch.float32)
