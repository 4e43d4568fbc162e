"""The kernels. A program works on one chunk of one tensor, and tables on the device say which.

`measure` sums squares. Each chunk's sum is written to its own place; the last program of a tensor adds up the
tensor's, the last of all the tensors': the order of every sum is fixed, so equal input gives equal bits. `update`
then computes the coefficients of its tensor from those sums and the groups' settings, and takes the step. Rules
that need the norm of what they have just computed (LAMB, LARS "momentum") measure it on the way, and `along` takes
their step.

Nothing is known on the host: not the norms, nor whether the step must be skipped, nor the loss scale.
"""

# Triton compiles these functions: they have no types, and names in capitals are constants of a compilation.
# mypy: ignore-errors

import triton
import triton.language as tl

from . import layout
from .chunks import follow, heavy_ball, lamb_moments, mix, pointer, squares

FIELDS = tl.constexpr(len(layout.FIELDS))
PARAM, BUFFER, SECOND_BUFFER, STEP, ELEMENTS, FIRST_CHUNK, CHUNKS, GROUP = map(tl.constexpr, range(len(layout.FIELDS)))

SETTINGS = tl.constexpr(len(layout.SETTINGS))
LR, MOMENTUM, DECAY, EPS, SIGN, NESTEROV, MODE, TRUST, PHI_LOW, PHI_HIGH, MAX_RATIO, CLAMP, BETA2, MAX_NORM, \
    BIAS_CORRECTION, STOCHASTIC = map(tl.constexpr, range(len(layout.SETTINGS)))  # fmt: skip
COUPLED, AFTER_NORM, DECOUPLED = map(tl.constexpr, range(len(layout.MODES)))
YOU2017, UNSCALED, AVERAGED = map(tl.constexpr, range(len(layout.VARIANTS)))

OF_GRAD, OF_PARAM, OF_DIRECTION = map(tl.constexpr, range(len(layout.ROWS)))
LANES = tl.constexpr(256)

# a kernel is compiled once for a kind of tensors, whatever the numbers and addresses
kernel = triton.jit(
    do_not_specialize=["base", "chunks", "tensors", "groups", "busy"],
    do_not_specialize_on_alignment=[
        "table", "grads", "owners", "settings", "rates", "sums", "whole", "partial", "spans", "counters", "rounds",
        "means", "scale", "found_inf", "norm", "skipped",
    ],
)  # fmt: skip


@triton.jit
def _finish(partial, sums, counters, i, first, count, chunks, tensors, KINDS: tl.constexpr, ROW: tl.constexpr):
    """Count this program; the last one of a tensor adds up its chunks. Returns whether it was the last."""
    tl.debug_barrier()  # every thread has stored before one of them counts
    last = tl.atomic_add(counters + i, 1, sem="acq_rel") == count - 1
    if last:
        for kind in tl.static_range(KINDS):
            total = tl.zeros([LANES], tl.float64)
            for at in range(0, count, LANES):
                o = at + tl.arange(0, LANES)
                # past the first cache, which does not know what other processors wrote
                total += tl.load(partial + kind * chunks + first + o, mask=o < count, other=0.0, cache_modifier=".cg")
            tl.store(sums + (ROW + kind) * tensors + i, tl.sum(total))
        tl.store(counters + i, 0)  # ready for the next step
    return last


@triton.jit
def _spans(table, sums, spans, tensors, groups, BY_GROUP: tl.constexpr):
    """spans[0] = the sum over all tensors; BY_GROUP: spans[1 + group] = the sum over the group's."""
    total = tl.zeros([LANES], tl.float64)
    for at in range(0, tensors, LANES):
        o = at + tl.arange(0, LANES)
        total += tl.load(sums + o, mask=o < tensors, other=0.0, cache_modifier=".cg")
    tl.store(spans, tl.sum(total))
    if BY_GROUP:
        for group in range(groups):
            part = tl.zeros([LANES], tl.float64)
            for at in range(0, tensors, LANES):
                o = at + tl.arange(0, LANES)
                inside = o < tensors
                belongs = (tl.load(table + o * FIELDS + GROUP, mask=inside, other=-1) >> 1) == group
                part += tl.load(sums + o, mask=inside & belongs, other=0.0, cache_modifier=".cg")
            tl.store(spans + 1 + group, tl.sum(part))


@kernel
def measure(
    table, grads, owners, settings, sums, partial, spans, counters, rounds, means, scale,
    base, chunks, tensors, groups, busy,
    COUPLED_DECAY: tl.constexpr, PARAM_NORMS: tl.constexpr, MEANS: tl.constexpr, BY_GROUP: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Squared norms of gradients, with COUPLED_DECAY of g + decay * w; with PARAM_NORMS of parameters too.

    `busy` is the number of tensors that have chunks.
    """
    chunk = base + tl.program_id(0)
    i = tl.load(owners + chunk)
    fields = table + i * FIELDS
    first, count = tl.load(fields + FIRST_CHUNK).to(tl.int32), tl.load(fields + CHUNKS).to(tl.int32)
    address = tl.load(grads + i)
    of_grad, of_param = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    if address != 0:  # a tensor without a gradient counts as zero
        start = (chunk - first).to(tl.int64) * CHUNK
        left = tl.load(fields + ELEMENTS) - start
        g = pointer(address, G, ALIGNED) + start
        w = pointer(tl.load(fields + PARAM), P, ALIGNED) + start
        decay = tl.full((), 0.0, tl.float64)
        if COUPLED_DECAY:
            own = settings + (tl.load(fields + GROUP) >> 1) * SETTINGS
            if tl.load(own + MODE) == COUPLED:
                decay = tl.load(own + DECAY) * tl.load(own + SIGN) * tl.load(scale).to(tl.float64)
        if COUPLED_DECAY and decay != 0.0:
            of_grad, of_param = squares(g, w, decay.to(WIDE), left, True, True, WIDE, CHUNK, BLOCK)
        else:
            of_grad, of_param = squares(g, w, decay.to(WIDE), left, PARAM_NORMS, False, WIDE, CHUNK, BLOCK)
        if MEANS:  # a mean norm that overflowed tells of a gradient that did
            of_grad = tl.where(tl.abs(tl.load(means + i)) < float("inf"), of_grad, float("inf"))
    tl.store(partial + chunk, of_grad)
    if PARAM_NORMS:
        tl.store(partial + chunks + chunk, of_param)
    if _finish(partial, sums, counters, i, first, count, chunks, tensors, 2 if PARAM_NORMS else 1, OF_GRAD):
        tl.debug_barrier()
        if tl.atomic_add(counters + tensors, 1, sem="acq_rel") == busy - 1:
            tl.debug_barrier()
            _spans(table, sums, spans, tensors, groups, BY_GROUP)
            tl.store(rounds, tl.load(rounds) + 1)
            tl.store(counters + tensors, 0)


@triton.jit
def _rate(rates, settings, group):
    """The group's learning rate: its setting, or what lies at an address (below zero: a double's)."""
    lr = tl.load(settings + group * SETTINGS + LR)
    address = tl.load(rates + group)
    if address > 0:
        lr = tl.load(address.to(tl.pointer_type(tl.float32))).to(tl.float64)
    if address < 0:
        lr = tl.load((-address).to(tl.pointer_type(tl.float64)))
    return lr


@triton.jit
def _ratio(own, adapts, size, below):
    """trust * phi(size) / below, 1 where that is not defined; no more than the limit; 1 for tensors left alone."""
    size = tl.minimum(tl.maximum(size, tl.load(own + PHI_LOW)), tl.load(own + PHI_HIGH))
    defined = (size > 0.0) & (below > 0.0)
    ratio = tl.where(defined, tl.load(own + TRUST) * size / tl.where(defined, below, 1.0), 1.0)
    return tl.where(adapts != 0, tl.minimum(ratio, tl.load(own + MAX_RATIO)), 1.0)


@triton.jit
def _key(i, rounds, STOCHASTICALLY: tl.constexpr):
    key = tl.full((), 0, tl.uint32)
    if STOCHASTICALLY:
        key = mix(mix(tl.load(rounds).to(tl.uint32)) + i.to(tl.uint32))
    return key


@kernel
def update(
    table, grads, owners, settings, rates, sums, whole, partial, spans, counters, rounds, means, scale, found_inf,
    norm, skipped, base, chunks, tensors,
    METHOD: tl.constexpr, SCOPE: tl.constexpr, AVERAGES: tl.constexpr, CLAMPS: tl.constexpr,
    STOCHASTICALLY: tl.constexpr, BUFFERED: tl.constexpr, P: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The step of SNGM, LARS or CLARS; of groups of LARS that average (AVERAGES), the buffers only."""
    # backwards: the gradients `measure` read last may still be in the cache
    chunk = base + tl.num_programs(0) - 1 - tl.program_id(0)
    total = tl.load(spans)
    loss_scale = tl.load(scale).to(tl.float64)
    sound = (total < float("inf")) & (tl.load(found_inf) == 0.0)
    if chunk == 0:
        tl.store(norm, tl.sqrt(total) / loss_scale)
        tl.store(skipped, tl.load(skipped) + tl.where(sound, 0, 1))
    i = tl.load(owners + chunk)
    address = tl.load(grads + i)
    if sound & (address != 0):
        fields = table + i * FIELDS
        adapts = tl.load(fields + GROUP) & 1
        group = tl.load(fields + GROUP) >> 1
        own = settings + group * SETTINGS
        first, count = tl.load(fields + FIRST_CHUNK).to(tl.int32), tl.load(fields + CHUNKS).to(tl.int32)
        start = (chunk - first).to(tl.int64) * CHUNK
        left = tl.load(fields + ELEMENTS) - start
        lr = _rate(rates, settings, group)
        wd = tl.load(own + DECAY)
        mode = tl.load(own + MODE)
        averaged = mode == AVERAGED
        unscale, decay, boost, rate, pull = 1.0 / loss_scale, wd * loss_scale, lr * 0.0 + 1.0, lr, lr * 0.0
        if METHOD == "sngm":
            square = total
            if SCOPE == "group":
                square = tl.load(spans + 1 + group)
            if SCOPE == "tensor":
                square = tl.load(whole + OF_GRAD * tensors + i)
            # with a loss scale s the gradients are s*g: norm, eps and decay are taken s times as large
            n = tl.maximum(tl.sqrt(square) / loss_scale, tl.load(own + EPS))
            unscale = 1.0 / (n * loss_scale)
            decay = tl.where(mode == COUPLED, decay, tl.where(mode == AFTER_NORM, decay * n, 0.0))
            pull = tl.where(mode == DECOUPLED, wd, 0.0)
        else:
            size = tl.sqrt(tl.load(whole + OF_PARAM * tensors + i))
            if METHOD == "clars":
                below = tl.load(means + i)
            else:
                below = tl.sqrt(tl.load(whole + OF_GRAD * tensors + i)) / loss_scale + wd * size + tl.load(own + EPS)
            ratio = _ratio(own, adapts, size, below)
            if METHOD == "lars":
                if mode == YOU2017:
                    boost, rate = lr * ratio, lr * 0.0 + 1.0
                else:
                    rate = lr * ratio
                if AVERAGES:
                    boost = tl.where(averaged, 1.0 - tl.load(own + MOMENTUM), boost)
            else:
                rate = lr * ratio
        g = pointer(address, G, ALIGNED) + start
        w = pointer(tl.load(fields + PARAM), P, ALIGNED) + start
        v = w.to(tl.pointer_type(WIDE))
        if BUFFERED:
            v = pointer(tl.load(fields + BUFFER), WIDE, ALIGNED) + start
        sign, clamp, nesterov = tl.load(own + SIGN).to(WIDE), tl.load(own + CLAMP).to(WIDE), tl.load(own + NESTEROV)
        momentum, stochastic = tl.load(own + MOMENTUM).to(WIDE), tl.load(own + STOCHASTIC)
        key = _key(i, rounds, STOCHASTICALLY)
        decay, unscale, boost = decay.to(WIDE), unscale.to(WIDE), boost.to(WIDE)
        rate, pull = rate.to(WIDE), pull.to(WIDE)
        if left >= CHUNK:
            square = heavy_ball(
                g, w, v, left, start, key, stochastic, sign, decay, unscale, clamp, boost, momentum, rate, pull,
                nesterov, averaged, BUFFERED, P, WIDE, AVERAGES, CLAMPS, STOCHASTICALLY, True, CHUNK, BLOCK,
            )  # fmt: skip
        else:
            square = heavy_ball(
                g, w, v, left, start, key, stochastic, sign, decay, unscale, clamp, boost, momentum, rate, pull,
                nesterov, averaged, BUFFERED, P, WIDE, AVERAGES, CLAMPS, STOCHASTICALLY, False, CHUNK, BLOCK,
            )  # fmt: skip
        if AVERAGES:
            tl.store(partial + chunk, square)
            _finish(partial, sums, counters, i, first, count, chunks, tensors, 1, OF_DIRECTION)


@triton.jit
def _lamb_corrections(own, t):
    """1 - beta**t for both betas, or ones."""
    corrects = tl.load(own + BIAS_CORRECTION) != 0.0
    first = tl.where(corrects, 1.0 - tl.exp(t * tl.log(tl.load(own + MOMENTUM))), 1.0)
    second = tl.where(corrects, 1.0 - tl.exp(t * tl.log(tl.load(own + BETA2))), 1.0)
    return first, second


@kernel
def moments(
    table, grads, owners, settings, sums, partial, spans, counters, scale, found_inf, norm, skipped,
    base, chunks, tensors,
    P: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """LAMB's moments, and the norms of its direction and of the parameters."""
    chunk = base + tl.num_programs(0) - 1 - tl.program_id(0)
    total = tl.load(spans)
    loss_scale = tl.load(scale).to(tl.float64)
    length = tl.sqrt(total) / loss_scale
    sound = (total < float("inf")) & (tl.load(found_inf) == 0.0)
    if chunk == 0:
        tl.store(norm, length)
        tl.store(skipped, tl.load(skipped) + tl.where(sound, 0, 1))
    i = tl.load(owners + chunk)
    address = tl.load(grads + i)
    if sound & (address != 0):
        fields = table + i * FIELDS
        own = settings + (tl.load(fields + GROUP) >> 1) * SETTINGS
        first, count = tl.load(fields + FIRST_CHUNK).to(tl.int32), tl.load(fields + CHUNKS).to(tl.int32)
        start = (chunk - first).to(tl.int64) * CHUNK
        left = tl.load(fields + ELEMENTS) - start
        clip = tl.minimum(
            tl.where(length > 0.0, tl.load(own + MAX_NORM) / tl.where(length > 0.0, length, 1.0), 1.0), 1.0
        )
        factor = (tl.load(own + SIGN) * clip / loss_scale).to(WIDE)
        taken = tl.load(fields + STEP).to(tl.pointer_type(tl.float32))
        t = tl.load(taken) + 1.0
        correction1, correction2 = _lamb_corrections(own, t.to(tl.float64))
        beta1, beta2 = tl.load(own + MOMENTUM), tl.load(own + BETA2)
        g = pointer(address, G, ALIGNED) + start
        w = pointer(tl.load(fields + PARAM), P, ALIGNED) + start
        m = pointer(tl.load(fields + BUFFER), WIDE, ALIGNED) + start
        v = pointer(tl.load(fields + SECOND_BUFFER), WIDE, ALIGNED) + start
        rest1, rest2 = (1.0 - beta1).to(WIDE), (1.0 - beta2).to(WIDE)
        beta1, beta2 = beta1.to(WIDE), beta2.to(WIDE)
        correction1, correction2 = correction1.to(WIDE), correction2.to(WIDE)
        eps, decay = tl.load(own + EPS).to(WIDE), tl.load(own + DECAY).to(WIDE)
        if left >= CHUNK:
            of_param, of_direction = lamb_moments(
                g, w, m, v, left, factor, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay,
                WIDE, True, CHUNK, BLOCK,
            )  # fmt: skip
        else:
            of_param, of_direction = lamb_moments(
                g, w, m, v, left, factor, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay,
                WIDE, False, CHUNK, BLOCK,
            )  # fmt: skip
        tl.store(partial + chunk, of_param)
        tl.store(partial + chunks + chunk, of_direction)
        if _finish(partial, sums, counters, i, first, count, chunks, tensors, 2, OF_PARAM):
            tl.store(taken, t)  # every program of the tensor has read it


@kernel
def along(
    table, grads, owners, settings, rates, whole, spans, rounds, found_inf, base, tensors,
    LAMB: tl.constexpr, STOCHASTICALLY: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step by lr * phi(||w||) / ||q|| along -q: LAMB's direction, or the buffer of LARS "momentum"."""
    chunk = base + tl.program_id(0)
    i = tl.load(owners + chunk)
    fields = table + i * FIELDS
    adapts = tl.load(fields + GROUP) & 1
    group = tl.load(fields + GROUP) >> 1
    own = settings + group * SETTINGS
    sound = (tl.load(spans) < float("inf")) & (tl.load(found_inf) == 0.0) & (tl.load(grads + i) != 0)
    if not LAMB:
        sound = sound & (tl.load(own + MODE) == AVERAGED)
    if sound:
        start = (chunk - tl.load(fields + FIRST_CHUNK)) * CHUNK
        left = tl.load(fields + ELEMENTS) - start
        size = tl.sqrt(tl.load(whole + OF_PARAM * tensors + i))
        below = tl.sqrt(tl.load(whole + OF_DIRECTION * tensors + i))
        rate = (_rate(rates, settings, group) * _ratio(own, adapts, size, below)).to(WIDE)
        correction1, correction2 = tl.full((), 1.0, tl.float64), tl.full((), 1.0, tl.float64)
        if LAMB:
            t = tl.load(tl.load(fields + STEP).to(tl.pointer_type(tl.float32)))
            correction1, correction2 = _lamb_corrections(own, t.to(tl.float64))
        correction1, correction2 = correction1.to(WIDE), correction2.to(WIDE)
        eps, decay = tl.load(own + EPS).to(WIDE), tl.load(own + DECAY).to(WIDE)
        stochastic = tl.load(own + STOCHASTIC)
        key = _key(i, rounds, STOCHASTICALLY)
        w = pointer(tl.load(fields + PARAM), P, ALIGNED) + start
        m = pointer(tl.load(fields + BUFFER), WIDE, ALIGNED) + start
        v = m
        if LAMB:
            v = pointer(tl.load(fields + SECOND_BUFFER), WIDE, ALIGNED) + start
        if left >= CHUNK:
            follow(
                w, m, v, left, start, key, stochastic, rate, correction1, correction2, eps, decay,
                LAMB, P, WIDE, STOCHASTICALLY, True, CHUNK, BLOCK,
            )  # fmt: skip
        else:
            follow(
                w, m, v, left, start, key, stochastic, rate, correction1, correction2, eps, decay,
                LAMB, P, WIDE, STOCHASTICALLY, False, CHUNK, BLOCK,
            )  # fmt: skip
