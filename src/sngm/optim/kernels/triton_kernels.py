"""The kernels of a step. Each program works on one chunk of one tensor, which it looks up in tables on the device.

`measure` sums squares: each program writes its chunk's sum, the last program of a tensor adds up its chunks, and the
last of all adds up the tensors. The order of every sum is fixed, so equal inputs give equal bits. `update` then
computes the coefficients of its tensor from these sums and takes the step. Methods that need the norm of their update
(LAMB, and LARS "momentum") measure it in `moments` or `update`, and `apply` takes their step.

The host does not know the norms, the loss scale, or whether the step is skipped.
"""

# Triton compiles these functions. They have no type annotations; names in capitals are compile-time constants.
# mypy: ignore-errors

import triton
import triton.language as tl

from . import table_schema
from .device_functions import apply_direction, lamb_moments, load, mix, rounded, squares, store

PARAM, GRAD, BUFFER, SECOND_BUFFER, COUNT = map(tl.constexpr, range(len(table_schema.ADDRESSES)))
ELEMENTS, FIRST_CHUNK, CHUNKS, GROUP, ADAPTS, INDEX = map(tl.constexpr, range(len(table_schema.FIELDS)))
SCALE, FOUND_INF = map(tl.constexpr, range(len(table_schema.STEP)))
SETTINGS = tl.constexpr(len(table_schema.SETTINGS))
LR, MOMENTUM, DECAY, EPS, SIGN, NESTEROV, MODE, TRUST, PHI_LOW, PHI_HIGH, MAX_RATIO, CLAMP, BETA2, MAX_NORM, \
    BIAS_CORRECTION, STOCHASTIC_ROUNDING = map(tl.constexpr, range(len(table_schema.SETTINGS)))  # fmt: skip
COUPLED, AFTER_NORM, DECOUPLED = map(tl.constexpr, range(len(table_schema.MODES)))
YOU2017, UNSCALED, AVERAGED = map(tl.constexpr, range(len(table_schema.VARIANTS)))
OF_GRAD, OF_PARAM, OF_DIRECTION = map(tl.constexpr, range(len(table_schema.SQUARES)))
LANES = tl.constexpr(256)

# compiled once for each combination of constants; other numbers and addresses need no recompilation
kernel = triton.jit(
    do_not_specialize=["base", "chunks", "tensors", "groups"],
    do_not_specialize_on_alignment=[
        "words", "table", "owners", "sums", "partial", "spans", "counters", "rounds", "means", "norm", "skipped",
    ],
)  # fmt: skip


@triton.jit
def _parts(words, groups):
    """Return pointers into `words`: to the addresses, and to the float64 numbers (of the step, then of each group)."""
    return words + 2 + groups * SETTINGS, words.to(tl.pointer_type(tl.float64))


@triton.jit
def _chunk(table, owners, chunk, tensors, CHUNK: tl.constexpr):
    """Return the tensor index of a chunk, its offset in the tensor, and the number of elements from there on."""
    i = tl.load(owners + chunk)
    start = (chunk - tl.load(table + FIRST_CHUNK * tensors + i)) * CHUNK
    return i, start, tl.load(table + ELEMENTS * tensors + i) - start


@triton.jit
def _at(addresses, field: tl.constexpr, tensors, i, start, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to element `start` of a `field` of tensor i: its parameter, its gradient or a buffer."""
    there = tl.load(addresses + field * tensors + i).to(tl.pointer_type(dtype))
    if ALIGNED:
        there = tl.multiple_of(there, 16)  # allows wide loads
    return there + start


@triton.jit
def _own(numbers, table, tensors, i):
    """Return the pointer to the settings of the parameter group of tensor i."""
    return numbers + 2 + tl.load(table + GROUP * tensors + i) * SETTINGS


@triton.jit
def _finish(table, partial, sums, counters, i, chunks, tensors, KINDS: tl.constexpr, ROW: tl.constexpr):
    """Count this program. The last program of tensor i adds up its chunks, resets the counter and returns True."""
    first = tl.load(table + FIRST_CHUNK * tensors + i)
    count = tl.load(table + CHUNKS * tensors + i).to(tl.int32)
    tl.debug_barrier()  # wait until all threads have stored their sums before one of them counts
    last = tl.atomic_add(counters + i, 1, sem="acq_rel") == count - 1
    if last:
        for kind in tl.static_range(KINDS):
            total = tl.zeros([LANES], tl.float64)
            for at in range(0, count, LANES):
                o = at + tl.arange(0, LANES)
                # bypass the L1 cache, which does not contain what other processors wrote
                total += tl.load(partial + kind * chunks + first + o, mask=o < count, other=0.0, cache_modifier=".cg")
            tl.store(sums + (ROW + kind) * tensors + i, tl.sum(total))
        tl.store(counters + i, 0)
    return last


@triton.jit
def _sum_spans(table, sums, spans, tensors, groups, BY_GROUP: tl.constexpr):
    """Set spans[0] to the sum of squares of all tensors and, if BY_GROUP, spans[1 + group] to that of each group."""
    for group in range(-1, groups if BY_GROUP else 0):  # -1: all tensors
        total = tl.zeros([LANES], tl.float64)
        for at in range(0, tensors, LANES):
            o = at + tl.arange(0, LANES)
            of = tl.load(table + GROUP * tensors + o, mask=o < tensors, other=-2)
            within = (o < tensors) & ((group < 0) | (of == group))
            total += tl.load(sums + o, mask=within, other=0.0, cache_modifier=".cg")
        tl.store(spans + 1 + group, tl.sum(total))


@kernel
def measure(
    words, table, owners, sums, partial, spans, counters, means, base, chunks, tensors, groups,
    COUPLED_DECAY: tl.constexpr, PARAM_NORMS: tl.constexpr, MEANS: tl.constexpr, BY_GROUP: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the squares of each gradient g (COUPLED_DECAY: of g + decay * w) and, if PARAM_NORMS, of each parameter w."""
    addresses, numbers = _parts(words, groups)
    chunk = base + tl.program_id(0)
    i, start, left = _chunk(table, owners, chunk, tensors, CHUNK)
    g = _at(addresses, GRAD, tensors, i, start, G, ALIGNED)
    w = _at(addresses, PARAM, tensors, i, start, P, ALIGNED)
    decay = tl.full((), 0.0, tl.float64)
    if COUPLED_DECAY:
        own = _own(numbers, table, tensors, i)
        coupled = tl.load(own + DECAY) * tl.load(own + SIGN) * tl.load(numbers + SCALE)
        decay = tl.where(tl.load(own + MODE) == COUPLED, coupled, 0.0)
    of_grad, of_param = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for WHOLE in tl.static_range(2):
        if (left >= CHUNK) == WHOLE:
            if COUPLED_DECAY and decay != 0.0:
                of_grad, of_param = squares(g, w, decay.to(WIDE), left, True, True, WIDE, WHOLE, CHUNK, BLOCK)
            else:
                of_grad, of_param = squares(g, w, decay.to(WIDE), left, PARAM_NORMS, False, WIDE, WHOLE, CHUNK, BLOCK)
    if MEANS:  # if a mean norm overflowed, a gradient overflowed
        mean = tl.load(means + tl.load(table + INDEX * tensors + i))
        of_grad = tl.where(tl.abs(mean) < float("inf"), of_grad, float("inf"))
    tl.store(partial + chunk, of_grad)
    if PARAM_NORMS:
        tl.store(partial + chunks + chunk, of_param)
    if _finish(table, partial, sums, counters, i, chunks, tensors, 2 if PARAM_NORMS else 1, OF_GRAD):
        tl.debug_barrier()
        if tl.atomic_add(counters + tensors, 1, sem="acq_rel") == tensors - 1:
            tl.debug_barrier()
            _sum_spans(table, sums, spans, tensors, groups, BY_GROUP)
            tl.store(counters + tensors, 0)


@triton.jit
def _finite(numbers, spans):
    """Return whether the step is taken: the norm is finite, nothing overflowed, and the loss scale is above 0."""
    return (tl.load(spans) < float("inf")) & (tl.load(numbers + FOUND_INF) == 0.0) & (tl.load(numbers + SCALE) > 0.0)


@triton.jit
def _report(chunk, numbers, spans, norm, skipped):
    """In the program of the first chunk, write the norm of the gradient, and count the step if it is skipped."""
    if chunk == 0:
        tl.store(norm, tl.sqrt(tl.load(spans)) / tl.load(numbers + SCALE))
        tl.store(skipped, tl.load(skipped) + tl.where(_finite(numbers, spans), 0, 1))


@triton.jit
def _ratio(own, adapts, size, below):
    """Return trust * phi(size) / below (1 if either is 0), but at most max_ratio; return 1 if not `adapts`."""
    size = tl.minimum(tl.maximum(size, tl.load(own + PHI_LOW)), tl.load(own + PHI_HIGH))
    defined = (size > 0.0) & (below > 0.0)
    ratio = tl.where(defined, tl.load(own + TRUST) * size / tl.where(defined, below, 1.0), 1.0)
    return tl.where(adapts != 0, tl.minimum(ratio, tl.load(own + MAX_RATIO)), 1.0)


@triton.jit
def _key(table, tensors, i, rounds, STOCHASTIC: tl.constexpr):
    """Return the key of the random bits of tensor i in this step, for stochastic rounding."""
    key = tl.full((), 0, tl.uint32)
    if STOCHASTIC:
        key = mix(mix(tl.load(rounds).to(tl.uint32)) + tl.load(table + INDEX * tensors + i).to(tl.uint32))
    return key


@triton.jit
def coefficients(
    table, own, sums, spans, means, i, tensors, scale, METHOD: tl.constexpr, SCOPE: tl.constexpr, AVERAGES: tl.constexpr
):  # fmt: skip
    """Return the coefficients (unscale, decay, boost, rate, pull) of the step of tensor i, which is:

        d = boost * clamp(unscale * (sign * g + decay * w))
        v = momentum * v + d
        w = w - rate * (v + pull * w)

    `g` is the gradient times the loss scale. A METHOD without its own branch gets the coefficients of momentum SGD.
    """
    lr, wd, mode = tl.load(own + LR), tl.load(own + DECAY), tl.load(own + MODE)
    zero, one = tl.full((), 0.0, tl.float64), tl.full((), 1.0, tl.float64)
    unscale, decay, boost, rate, pull = one / scale, wd * scale, one, lr, zero
    if METHOD == "sngm":
        square = tl.load(spans)
        if SCOPE == "group":
            square = tl.load(spans + 1 + tl.load(table + GROUP * tensors + i))
        if SCOPE == "tensor":
            square = tl.load(sums + OF_GRAD * tensors + i)
        n = tl.maximum(tl.sqrt(square) / scale, tl.load(own + EPS))
        unscale = one / (n * scale)
        decay = tl.where(mode == COUPLED, decay, tl.where(mode == AFTER_NORM, decay * n, 0.0))
        pull = tl.where(mode == DECOUPLED, wd, 0.0)
    elif METHOD == "lars" or METHOD == "clars":
        size = tl.sqrt(tl.load(sums + OF_PARAM * tensors + i))
        if METHOD == "clars":
            below = tl.load(means + tl.load(table + INDEX * tensors + i))
        else:
            below = tl.sqrt(tl.load(sums + OF_GRAD * tensors + i)) / scale + wd * size + tl.load(own + EPS)
        adapted = lr * _ratio(own, tl.load(table + ADAPTS * tensors + i), size, below)
        rate = adapted
        if METHOD == "lars":
            inside = mode == YOU2017  # the ratio multiplies the input of the buffer
            boost = tl.where(inside, adapted, one)
            rate = tl.where(inside, one, adapted)
            if AVERAGES:
                boost = tl.where(mode == AVERAGED, 1.0 - tl.load(own + MOMENTUM), boost)
    return unscale, decay, boost, rate, pull


@triton.jit
def heavy_ball(
    g, w, v, left, start, key, stochastic, sign, decay, unscale, clamp, boost, momentum, rate, pull, nesterov, averaged,
    BUFFERED: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr, AVERAGES: tl.constexpr, CLAMPS: tl.constexpr,
    STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a chunk of v and, unless `averaged`, of w, by the formulas of `coefficients`.

    If AVERAGES, return the sum of squares of the new v, else 0.
    """
    direction_square = tl.zeros([BLOCK], WIDE)
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
            direction_square += step * step
        if not AVERAGES or not averaged:
            x -= rate * (step + pull * x)
            store(w, at, rounded(x, P, at, start, key, STOCHASTIC, stochastic), left, WHOLE)
    return tl.sum(direction_square.to(tl.float64))


@kernel
def update(
    words, table, owners, sums, partial, spans, counters, rounds, means, norm, skipped, base, chunks, tensors, groups,
    METHOD: tl.constexpr, SCOPE: tl.constexpr, AVERAGES: tl.constexpr, CLAMPS: tl.constexpr,
    STOCHASTIC: tl.constexpr, BUFFERED: tl.constexpr, P: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the step of a momentum method; for groups of LARS "momentum" (AVERAGES), update only the buffers."""
    # in reverse order, because the gradients that `measure` read last may still be in the cache
    addresses, numbers = _parts(words, groups)
    chunk = base + tl.num_programs(0) - 1 - tl.program_id(0)
    _report(chunk, numbers, spans, norm, skipped)
    if _finite(numbers, spans):
        i, start, left = _chunk(table, owners, chunk, tensors, CHUNK)
        own = _own(numbers, table, tensors, i)
        unscale, decay, boost, rate, pull = coefficients(
            table, own, sums, spans, means, i, tensors, tl.load(numbers + SCALE), METHOD, SCOPE, AVERAGES
        )
        g = _at(addresses, GRAD, tensors, i, start, G, ALIGNED)
        w = _at(addresses, PARAM, tensors, i, start, P, ALIGNED)
        v = w.to(tl.pointer_type(WIDE))
        if BUFFERED:
            v = _at(addresses, BUFFER, tensors, i, start, WIDE, ALIGNED)
        sign, clamp, nesterov = tl.load(own + SIGN).to(WIDE), tl.load(own + CLAMP).to(WIDE), tl.load(own + NESTEROV)
        momentum, stochastic = tl.load(own + MOMENTUM).to(WIDE), tl.load(own + STOCHASTIC_ROUNDING)
        key = _key(table, tensors, i, rounds, STOCHASTIC)
        decay, unscale, boost = decay.to(WIDE), unscale.to(WIDE), boost.to(WIDE)
        rate, pull, averaged = rate.to(WIDE), pull.to(WIDE), tl.load(own + MODE) == AVERAGED
        square = tl.full((), 0.0, tl.float64)
        for WHOLE in tl.static_range(2):
            if (left >= CHUNK) == WHOLE:
                square = heavy_ball(
                    g, w, v, left, start, key, stochastic, sign, decay, unscale, clamp, boost, momentum, rate, pull,
                    nesterov, averaged, BUFFERED, P, WIDE, AVERAGES, CLAMPS, STOCHASTIC, WHOLE, CHUNK, BLOCK,
                )  # fmt: skip
        if AVERAGES:
            tl.store(partial + chunk, square)
            _finish(table, partial, sums, counters, i, chunks, tensors, 1, OF_DIRECTION)


@triton.jit
def _lamb_corrections(own, t, WIDE: tl.constexpr):
    """Return 1 - beta**t for both betas, or ones without bias correction."""
    corrects = tl.load(own + BIAS_CORRECTION) != 0.0
    first = tl.where(corrects, 1.0 - tl.exp(t * tl.log(tl.load(own + MOMENTUM))), 1.0)
    second = tl.where(corrects, 1.0 - tl.exp(t * tl.log(tl.load(own + BETA2))), 1.0)
    return first.to(WIDE), second.to(WIDE)


@kernel
def moments(
    words, table, owners, sums, partial, spans, counters, norm, skipped, base, chunks, tensors, groups,
    P: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update LAMB's moments, and sum the squares of its direction q and of the parameters."""
    addresses, numbers = _parts(words, groups)
    chunk = base + tl.num_programs(0) - 1 - tl.program_id(0)
    _report(chunk, numbers, spans, norm, skipped)
    if _finite(numbers, spans):
        i, start, left = _chunk(table, owners, chunk, tensors, CHUNK)
        own = _own(numbers, table, tensors, i)
        length = tl.sqrt(tl.load(spans)) / tl.load(numbers + SCALE)
        clip = tl.minimum(tl.load(own + MAX_NORM) / tl.where(length > 0.0, length, 1.0), 1.0)
        clip = tl.where(length > 0.0, clip, 1.0)  # squares of gradients may underflow
        factor = (tl.load(own + SIGN) * clip / tl.load(numbers + SCALE)).to(WIDE)
        count = tl.load(addresses + COUNT * tensors + i).to(tl.pointer_type(tl.float32))
        t = tl.load(count) + 1.0
        correction1, correction2 = _lamb_corrections(own, t.to(tl.float64), WIDE)
        beta1, beta2 = tl.load(own + MOMENTUM), tl.load(own + BETA2)
        g = _at(addresses, GRAD, tensors, i, start, G, ALIGNED)
        w = _at(addresses, PARAM, tensors, i, start, P, ALIGNED)
        m = _at(addresses, BUFFER, tensors, i, start, WIDE, ALIGNED)
        v = _at(addresses, SECOND_BUFFER, tensors, i, start, WIDE, ALIGNED)
        rest1, rest2 = (1.0 - beta1).to(WIDE), (1.0 - beta2).to(WIDE)
        beta1, beta2 = beta1.to(WIDE), beta2.to(WIDE)
        eps, decay = tl.load(own + EPS).to(WIDE), tl.load(own + DECAY).to(WIDE)
        of_param, of_direction = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
        for WHOLE in tl.static_range(2):
            if (left >= CHUNK) == WHOLE:
                of_param, of_direction = lamb_moments(
                    g, w, m, v, left, factor, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay,
                    WIDE, WHOLE, CHUNK, BLOCK,
                )  # fmt: skip
        tl.store(partial + chunk, of_param)
        tl.store(partial + chunks + chunk, of_direction)
        if _finish(table, partial, sums, counters, i, chunks, tensors, 2, OF_PARAM):
            tl.store(count, t)  # safe: every program of the tensor has read the old count


@kernel
def apply(
    words, table, owners, sums, spans, rounds, base, tensors, groups,
    LAMB: tl.constexpr, STOCHASTIC: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Subtract lr * phi(||w||) / ||q|| * q from w, where q is LAMB's direction or the buffer of LARS "momentum"."""
    addresses, numbers = _parts(words, groups)
    chunk = base + tl.program_id(0)
    i, start, left = _chunk(table, owners, chunk, tensors, CHUNK)
    own = _own(numbers, table, tensors, i)
    steps = _finite(numbers, spans)
    if not LAMB:
        steps = steps & (tl.load(own + MODE) == AVERAGED)
    if steps:
        size = tl.sqrt(tl.load(sums + OF_PARAM * tensors + i))
        below = tl.sqrt(tl.load(sums + OF_DIRECTION * tensors + i))
        rate = (tl.load(own + LR) * _ratio(own, tl.load(table + ADAPTS * tensors + i), size, below)).to(WIDE)
        correction1, correction2 = rate, rate  # not used unless LAMB
        if LAMB:
            t = tl.load(tl.load(addresses + COUNT * tensors + i).to(tl.pointer_type(tl.float32)))
            correction1, correction2 = _lamb_corrections(own, t.to(tl.float64), WIDE)
        eps, decay = tl.load(own + EPS).to(WIDE), tl.load(own + DECAY).to(WIDE)
        stochastic = tl.load(own + STOCHASTIC_ROUNDING)
        key = _key(table, tensors, i, rounds, STOCHASTIC)
        w = _at(addresses, PARAM, tensors, i, start, P, ALIGNED)
        m = _at(addresses, BUFFER, tensors, i, start, WIDE, ALIGNED)
        v = m
        if LAMB:
            v = _at(addresses, SECOND_BUFFER, tensors, i, start, WIDE, ALIGNED)
        for WHOLE in tl.static_range(2):
            if (left >= CHUNK) == WHOLE:
                apply_direction(
                    w, m, v, left, start, key, stochastic, rate, correction1, correction2, eps, decay,
                    LAMB, P, WIDE, STOCHASTIC, WHOLE, CHUNK, BLOCK,
                )  # fmt: skip
