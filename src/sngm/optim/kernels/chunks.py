"""What the kernels do to one chunk of one tensor, in blocks of elements that go through registers.

WHOLE chunks are gone through without masks, the last of a tensor with them.
"""

# Triton compiles these functions: they have no types, and names in capitals are constants of a compilation.
# mypy: ignore-errors
# ruff: noqa: SIM108

import triton
import triton.language as tl


@triton.jit
def pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Of an address; ALIGNED ones begin where wide loads do."""
    there = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        there = tl.multiple_of(there, 16)
    return there


@triton.jit
def load(there, at, left, WIDE: tl.constexpr, WHOLE: tl.constexpr):
    """Elements as WIDE numbers, zeros past the end."""
    # without a mask where the chunk is whole: a mask of unknown alignment would forbid wide loads
    if WHOLE:
        values = tl.load(there + at)
    else:
        values = tl.load(there + at, mask=at < left, other=0.0)
    return values.to(WIDE)


@triton.jit
def store(there, at, values, left, WHOLE: tl.constexpr):
    """Elements, but none past the end."""
    if WHOLE:
        tl.store(there + at, values)
    else:
        tl.store(there + at, values, mask=at < left)


@triton.jit
def mix(x):
    """A permutation of 32-bit numbers in which every bit of the input moves half the bits of the output."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def rounded(values, dtype: tl.constexpr, at, start, key, STOCHASTICALLY: tl.constexpr, stochastic):
    """As `dtype`, to the nearest; bfloat16 on demand up or down at random, with chances that are right on average."""
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        added = 0x7FFF + ((bits >> 16) & 1)  # ties to even
        if STOCHASTICALLY:
            place = start + at
            chance = mix(mix(place.to(tl.uint32) ^ key) + (place >> 32).to(tl.uint32)) & 0xFFFF
            added = tl.where(stochastic != 0.0, chance, added)
        values = tl.where(finite, (bits + added) & 0xFFFF0000, bits).to(tl.float32, bitcast=True)
    return values.to(dtype)


@triton.jit
def _squares(
    g, w, decay, left, READS_PARAMS: tl.constexpr, ADDS_DECAY: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    of_grad = tl.zeros([BLOCK], WIDE)
    of_param = tl.zeros([BLOCK], WIDE)
    end = CHUNK if WHOLE else tl.minimum(left, CHUNK).to(tl.int32)
    for start in range(0, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        d = load(g, at, left, WIDE, WHOLE)
        if READS_PARAMS:
            x = load(w, at, left, WIDE, WHOLE)
            if ADDS_DECAY:
                d += decay * x
            else:
                of_param += x * x
        of_grad += d * d
    return tl.sum(of_grad.to(tl.float64)), tl.sum(of_param.to(tl.float64))


@triton.jit
def squares(
    g, w, decay, left, READS_PARAMS: tl.constexpr, ADDS_DECAY: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Squared norms of one chunk: of the gradient, or of gradient + decay * parameter, and of the parameter."""
    if left >= CHUNK:
        of_grad, of_param = _squares(g, w, decay, left, READS_PARAMS, ADDS_DECAY, WIDE, True, CHUNK, BLOCK)
    else:
        of_grad, of_param = _squares(g, w, decay, left, READS_PARAMS, ADDS_DECAY, WIDE, False, CHUNK, BLOCK)
    return of_grad, of_param


@triton.jit
def heavy_ball(
    g, w, v, left, start, key, stochastic, sign, decay, unscale, clamp, boost, momentum, rate, pull, nesterov, averaged,
    BUFFERED: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr, AVERAGES: tl.constexpr, CLAMPS: tl.constexpr,
    STOCHASTICALLY: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The update of all momentum methods; where it AVERAGES, the squared norm of the direction, else 0."""
    of_direction = tl.zeros([BLOCK], WIDE)
    end = CHUNK if WHOLE else tl.minimum(left, CHUNK).to(tl.int32)
    for from_ in range(0, end, BLOCK):
        at = from_ + tl.arange(0, BLOCK)
        d = load(g, at, left, WIDE, WHOLE)
        x = load(w, at, left, WIDE, WHOLE)
        d = unscale * (sign * d + decay * x)
        if CLAMPS:
            d = tl.minimum(tl.maximum(d, -clamp), clamp)
        d *= boost
        step = d
        if BUFFERED:
            step = momentum * load(v, at, left, WIDE, WHOLE) + d
            store(v, at, step, left, WHOLE)
            step = tl.where(nesterov != 0.0, momentum * step + d, step)
        if AVERAGES:
            of_direction += step * step
        if not AVERAGES or not averaged:
            x -= rate * (step + pull * x)
            store(w, at, rounded(x, P, at, start, key, STOCHASTICALLY, stochastic), left, WHOLE)
    return tl.sum(of_direction.to(tl.float64))


@triton.jit
def lamb_direction(m, v, x, correction1, correction2, eps, decay):
    """What LAMB steps along, from its moments."""
    return (m / correction1) / (tl.sqrt(v / correction2) + eps) + decay * x


@triton.jit
def lamb_moments(
    g, w, m, v, left, factor, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay,
    WIDE: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """LAMB's moments; squared norms of the parameters and of its direction."""
    of_param = tl.zeros([BLOCK], WIDE)
    of_direction = tl.zeros([BLOCK], WIDE)
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
        if not WHOLE:
            q = tl.where(at < left, q, 0.0)  # eps may be 0
        of_param += x * x
        of_direction += q * q
    return tl.sum(of_param.to(tl.float64)), tl.sum(of_direction.to(tl.float64))


@triton.jit
def follow(
    w, m, v, left, start, key, stochastic, rate, correction1, correction2, eps, decay,
    LAMB: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr, STOCHASTICALLY: tl.constexpr, WHOLE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of this rate along -q: LAMB's direction, or the buffer."""
    end = CHUNK if WHOLE else tl.minimum(left, CHUNK).to(tl.int32)
    for from_ in range(0, end, BLOCK):
        at = from_ + tl.arange(0, BLOCK)
        x = load(w, at, left, WIDE, WHOLE)
        q = load(m, at, left, WIDE, WHOLE)
        if LAMB:
            q = lamb_direction(q, load(v, at, left, WIDE, WHOLE), x, correction1, correction2, eps, decay)
        store(w, at, rounded(x - rate * q, P, at, start, key, STOCHASTICALLY, stochastic), left, WHOLE)
