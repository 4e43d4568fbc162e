"""Stochastic rounding: a number between two of bfloat16's goes to either with a chance that is right on average.

Updates smaller than half the distance between neighbours vanish in every rounding to the nearest; here they add up.
The random bits are a function of the step, the parameter's place among all and the element's place in it, so a
resumed run, another path of computation and every process with a copy of the parameter round alike.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A permutation of 32-bit numbers, held in int64, in which each bit moves half of all bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def rounded(values: Tensor, index: int, step: Tensor) -> Tensor:
    """float32 `values` of the parameter at `index`, as float32 that bfloat16 can hold.

    >>> values = rounded(torch.full((10_000,), 1.001), 0, torch.tensor(1))
    >>> values.unique().tolist(), round(values.double().mean().item(), 4)
    ([1.0, 1.0078125], 1.001)
    """
    key = mix((mix(step & WORD) + index) & WORD)
    # in memory, not among the indices: a kernel sees nothing else
    place = torch.arange(values.numel(), device=values.device).as_strided(values.shape, values.stride())
    chance = mix((mix((place & WORD) ^ key) + (place >> 32)) & WORD) & 0xFFFF
    bits = values.view(torch.int32)
    finite = (bits & 0x7F800000) != 0x7F800000
    return torch.where(finite, (bits + chance.to(torch.int32)) & -0x10000, bits).view(torch.float32)
