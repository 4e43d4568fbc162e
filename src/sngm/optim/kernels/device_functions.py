"""Device functions that process one chunk (the part of a tensor that one program processes), block by block.

A WHOLE chunk is processed without masks; only the last chunk of a tensor needs them.
"""

# Triton compiles these functions. They have no type annotations; names in capitals are compile-time constants.
# mypy: ignore-errors
# ruff: noqa: SIM108

import triton
import triton.language as tl


@triton.jit
def load(there, at, left, WIDE: tl.constexpr, WHOLE: tl.constexpr):
    """Load the elements at offsets `at` and convert them to the dtype WIDE; return zeros at offsets >= `left`."""
    # a whole chunk has no mask, because a mask of unknown alignment would prevent wide loads
    if WHOLE:
        values = tl.load(there + at)
    else:
        values = tl.load(there + at, mask=at < left, other=0.0)
    return values.to(WIDE)


@triton.jit
def store(there, at, values, left, WHOLE: tl.constexpr):
    """Store `values` at the offsets `at`, but none at offsets >= `left`, the end of the tensor."""
    if WHOLE:
        tl.store(there + at, values)
    else:
        tl.store(there + at, values, mask=at < left)


@triton.jit
def mix(x):
    """Hash 32-bit numbers by a permutation in which each input bit flips about half of the output bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def rounded(values, dtype: tl.constexpr, at, start, key, STOCHASTIC: tl.constexpr, stochastic):
    """Round to the nearest value of `dtype`; if `stochastic`, round to bfloat16 at random, with exact mean."""
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        added = 0x7FFF + ((bits >> 16) & 1)  # ties to even
        if STOCHASTIC:
            position = start + at
            chance = mix(mix(position.to(tl.uint32) ^ key) + (position >> 32).to(tl.uint32)) & 0xFFFF
            added = tl.where(stochastic != 0.0, chance, added)
        values = tl.where(finite, (bits + added) & 0xFFFF0000, bits).to(tl.float32, bitcast=True)
    return values.to(dtype)


@triton.jit
def squares(
    g, w, decay, left, READS_PARAMS: tl.constexpr, ADDS_DECAY: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sums of squares of a chunk of the gradient and of the parameter (0 unless READS_PARAMS).

    With ADDS_DECAY, return that of gradient + decay * parameter, and 0.
    """
    grad_square = tl.zeros([BLOCK], WIDE)
    param_square = tl.zeros([BLOCK], WIDE)
    end = CHUNK if WHOLE else tl.minimum(left, CHUNK).to(tl.int32)
    for start in range(0, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        d = load(g, at, left, WIDE, WHOLE)
        if READS_PARAMS:
            x = load(w, at, left, WIDE, WHOLE)
            if ADDS_DECAY:
                d += decay * x
            else:
                param_square += x * x
        grad_square += d * d
    return tl.sum(grad_square.to(tl.float64)), tl.sum(param_square.to(tl.float64))


@triton.jit
def lamb_direction(m, v, x, correction1, correction2, eps, decay):
    """Return the direction q of LAMB (see its class) for a parameter x with moments m and v."""
    return (m / correction1) / (tl.sqrt(v / correction2) + eps) + decay * x


@triton.jit
def lamb_moments(
    g, w, m, v, left, factor, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay,
    WIDE: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a chunk of LAMB's moments m and v; return the sums of squares of the parameter and the direction q."""
    param_square = tl.zeros([BLOCK], WIDE)
    direction_square = tl.zeros([BLOCK], WIDE)
    end = CHUNK if WHOLE else tl.minimum(left, CHUNK).to(tl.int32)
    for from_ in range(0, end, BLOCK):
        at = from_ + tl.arange(0, BLOCK)
        d = factor * load(g, at, left, WIDE, WHOLE)
        x = load(w, at, left, WIDE, WHOLE)
        first = beta1 * load(m, at, left, WIDE, WHOLE) + rest1 * d
        second = beta2 * load(v, at, left, WIDE, WHOLE) + rest2 * (d * d)
        store(m, at, first, left, WHOLE)
        store(v, at, second, left, WHOLE)
        q = lamb_direction(first, second, x, correction1, correction2, eps, decay)
        param_square += x * x
        direction_square += q * q  # past the end of the tensor, q is 0
    return tl.sum(param_square.to(tl.float64)), tl.sum(direction_square.to(tl.float64))


@triton.jit
def apply_direction(
    w, m, v, left, start, key, stochastic, rate, correction1, correction2, eps, decay,
    LAMB: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Subtract rate * q from a chunk of the parameter, where q is LAMB's direction, or the buffer m if not LAMB."""
    end = CHUNK if WHOLE else tl.minimum(left, CHUNK).to(tl.int32)
    for from_ in range(0, end, BLOCK):
        at = from_ + tl.arange(0, BLOCK)
        x = load(w, at, left, WIDE, WHOLE)
        q = load(m, at, left, WIDE, WHOLE)
        if LAMB:
            q = lamb_direction(q, load(v, at, left, WIDE, WHOLE), x, correction1, correction2, eps, decay)
        store(w, at, rounded(x - rate * q, P, at, start, key, STOCHASTIC, stochastic), left, WHOLE)
