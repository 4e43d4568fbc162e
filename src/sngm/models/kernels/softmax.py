"""Cross entropy of rows of logits, which are replaced by their gradients: read twice and written once."""

# Triton compiles these functions: they have no types, and names in capitals are constants of a compilation.
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...triton_support import ONE_ROUNDING

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 4096  # logits at once: 32 bytes a thread in bfloat16
WARPS = 8


@triton.jit(do_not_specialize=["words"])
def differentiate(logits, targets, losses, words, STRIDE: tl.constexpr, BLOCK: tl.constexpr, SLOPES: tl.constexpr):
    """The loss of one row; SLOPES: the logits become its gradient, which is p, less 1 at the target.

    In the first pass the logits are read from memory; of those of the programs at work, the cache then has them still.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * STRIDE
    target = tl.load(targets + row)
    if target < 0:  # left out
        tl.store(losses + row, 0.0)
        if SLOPES:
            for start in range(0, STRIDE, BLOCK):
                n = start + tl.arange(0, BLOCK)
                tl.store(logits + n, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=n < STRIDE)
    else:
        # what is no word would be read from beyond the row: its loss is no number
        chosen = tl.load(logits + target, mask=target < words, other=float("nan")).to(tl.float32)
        # The sum leaves the target out. So p - 1, which is -others / all, has all its digits where p is close to 1.
        largest, others = tl.maximum(chosen, -3e38), 0.0
        for start in range(0, STRIDE, BLOCK):
            n = start + tl.arange(0, BLOCK)
            # the mask is of whole vectors, which keeps loads wide
            value = tl.load(logits + n, mask=n < STRIDE, other=0.0).to(tl.float32)
            value = tl.where((n < words) & (n != target), value, float("-inf"))
            larger = tl.maximum(largest, tl.max(value, 0))
            others = others * tl.exp(largest - larger) + tl.sum(tl.exp(value - larger), 0)
            largest = larger
        whole = others + tl.exp(chosen - largest)
        tl.store(losses + row, tl.log(whole) - (chosen - largest))
        if SLOPES:
            scale = 1.0 / whole
            for start in range(0, STRIDE, BLOCK):
                n = start + tl.arange(0, BLOCK)
                value = tl.load(logits + n, mask=n < STRIDE, other=0.0).to(tl.float32)
                slope = tl.where(n < words, tl.exp(value - largest) * scale, 0.0)
                slope = tl.where(n == target, -others * scale, slope)
                tl.store(logits + n, slope.to(logits.dtype.element_ty), mask=n < STRIDE)


def cross_entropy(logits: Tensor, targets: Tensor, losses: Tensor, words: int, slopes: bool) -> None:
    """Write the loss of each row to `losses`, and with `slopes` its gradient over the logits.

    Rows may be longer than there are words: gradients are zeros there. Those of a negative target have no loss.
    """
    differentiate[(len(logits),)](
        logits,
        targets,
        losses,
        words,
        STRIDE=logits.stride(0),
        BLOCK=BLOCK,
        SLOPES=slopes,
        num_warps=WARPS,
        **ONE_ROUNDING,
    )
