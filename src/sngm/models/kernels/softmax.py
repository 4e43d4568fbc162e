"""Cross entropy of rows of logits. The kernel reads the logits twice, and can overwrite them with their gradients."""

# Triton compiles these functions: they have no type annotations, and upper-case names are compile-time constants.
# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor

from ...triton_support import ONE_ROUNDING

BLOCK = 4096  # logits loaded at once: 32 bytes per thread in bfloat16
WARPS = 8


@triton.jit(do_not_specialize=["words"])
def differentiate(logits, targets, losses, words, STRIDE: tl.constexpr, BLOCK: tl.constexpr, SLOPES: tl.constexpr):
    """Compute the loss of one row; with SLOPES, overwrite its logits with the gradient, softmax minus 1 at the target.

    The first pass reads the logits from memory, the second from the cache, which is large enough for the rows of all
    running programs.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * STRIDE
    target = tl.load(targets + row)
    if target < 0:  # the row is ignored
        tl.store(losses + row, 0.0)
        if SLOPES:
            for start in range(0, STRIDE, BLOCK):
                n = start + tl.arange(0, BLOCK)
                tl.store(logits + n, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=n < STRIDE)
    else:
        # the loss is NaN for a target beyond the vocabulary, whose logit would be outside the row
        chosen = tl.load(logits + target, mask=target < words, other=float("nan")).to(tl.float32)
        # The sum excludes the target, so p - 1 = -others / all loses no digits if p is close to 1.
        largest, others = tl.maximum(chosen, -3e38), 0.0
        for start in range(0, STRIDE, BLOCK):
            n = start + tl.arange(0, BLOCK)
            # the mask is true for whole vectors, so that loads stay vectorised
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
    """Write the loss of each row to `losses`; with `slopes`, overwrite the logits with the gradient.

    Rows may be padded beyond the number of words: the gradients of the padding are 0. Rows with a negative target
    have no loss.
    """
    sizes = {"STRIDE": logits.stride(0), "BLOCK": BLOCK, "SLOPES": slopes, "num_warps": WARPS}
    differentiate[(len(logits),)](logits, targets, losses, words, **sizes, **ONE_ROUNDING)
