"""One LSTM layer in one kernel launch forward and one backward, for any number of time steps.

Streams (samples of the batch) are independent, so a program processes some streams through all time steps. The program
reads the recurrent weights from the GPU's cache at each step, and writes outputs to memory, from which the matrix
product of the next step reads them in blocks. Whatever does not depend on the preceding step is computed by torch for
all steps at once: the products of inputs and weights in the gates, and the gradients of the weights.

With few streams, most of a GPU would be idle. In that case several programs share the same streams: each program
computes some of the hidden units, keeps the weights of these units, and waits at each step until the other programs
have stored their outputs.
"""

# Triton compiles these functions: they have no type annotations, and upper-case names are compile-time constants.
# mypy: ignore-errors

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...triton_support import LARGEST, ONE_ROUNDING
from ..vocabulary_loss import wide_product

WIDEST = 256  # the most hidden units, because all their gates must fit into the registers
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Cut(NamedTuple):
    """Block sizes of a kernel launch."""

    rows: int  # streams per program; a matrix product needs at least 16
    depth: int  # inner dimension of the blocks over which a product is accumulated
    warps: int
    stages: int  # number of blocks that are prefetched


# Block sizes for elements of 2 and 4 bytes. In the forward pass, a block of weights has depth x 1024 elements, and the
# four accumulators of 16 x 256 take 64 registers per thread, with 8 warps. In the backward pass there is one
# accumulator, and a block of weights has depth x 256 elements. A block of outputs, rows x depth, is prefetched if it
# has >= 4 bytes per thread.
FORWARD = {2: Cut(16, 32, 8, 3), 4: Cut(16, 16, 8, 2)}
BACKWARD = {2: Cut(16, 64, 8, 4), 4: Cut(16, 16, 8, 4)}
PRECISION = "ieee"  # precision of float32 products; other dtypes ignore it
UNITS, WARPS = 32, 4  # hidden units and warps per program if programs share streams: 8 units of each gate per warp


@triton.jit
def tanh(x):
    """Return tanh to the precision of float32; near zero by a series, because the other formula loses digits there."""
    size = tl.abs(x)
    z = tl.minimum(x * x, 1.0)
    series = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1  # from Cephes
    near = x + x * z * (series * z - 3.33332819422e-1)
    falling = tl.exp(-2.0 * size)
    far = (1.0 - falling) / (1.0 + falling)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def four(gates, inside, H: tl.constexpr):
    """Load the values of the input, forget, cell and output gate."""
    i, f = tl.load(gates, mask=inside, other=0.0), tl.load(gates + H, mask=inside, other=0.0)
    g, o = tl.load(gates + 2 * H, mask=inside, other=0.0), tl.load(gates + 3 * H, mask=inside, other=0.0)
    return i, f, g, o


@triton.jit
def plus(total, x, PRECISION: tl.constexpr):
    """Return the sum of a matrix product and of values from memory, whose layouts over threads differ.

    Values of 16 bits are multiplied by the identity matrix to get the product's layout, which is exact for finite
    values. Triton's own conversion of the layout would synchronise threads more often.
    """
    if x.dtype == tl.float32:
        return total + x
    rows: tl.constexpr = x.shape[0]
    ones = (tl.arange(0, rows)[:, None] == tl.arange(0, rows)[None, :]).to(x.dtype)
    return tl.dot(ones, x, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["steps", "streams"])
def run_forward(
    gates, weight, outputs, cells, steps, streams,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute outputs and cell states of all steps, from the initial ones in ``outputs[0]`` and ``cells[0]``.

    `gates`, of shape (steps, streams, 4 H), has what inputs and biases add to the gates; `weight` is (H, 4 H);
    `outputs` and `cells` are (steps + 1, streams, H). HP is H, rounded up to a power of two.
    """
    row, n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HP), tl.arange(0, K)
    there, known = (row < streams)[:, None], (n < H)[None, :]
    inside = there & known
    at, at_gates = row[:, None] * H + n[None, :], row[:, None] * (4 * H) + n[None, :]
    none = tl.zeros((ROWS, HP), tl.float32)
    c = tl.load(cells + at, mask=inside, other=0.0)
    given_i, given_f, given_g, given_o = four(gates + at_gates, inside, H)
    for t in range(steps):
        i, f = plus(none, given_i, PRECISION), plus(none, given_f, PRECISION)
        g, o = plus(none, given_g, PRECISION), plus(none, given_o, PRECISION)
        # values of the next step are loaded before the product and used after it; the last step has no next step
        to = tl.minimum(t + 1, steps - 1) * streams
        given_i, given_f, given_g, given_o = four(gates + to * (4 * H) + at_gates, inside, H)
        before = outputs + t * streams * H + row[:, None] * H
        for start in tl.range(0, H, K, num_stages=STAGES):
            unit = start + k
            # bypass the L1 cache, because other threads of this program have just written these values
            h = tl.load(before + unit[None, :], mask=there & (unit < H)[None, :], other=0.0, cache_modifier=".cg")
            wi, wf, wg, wo = four(weight + unit[:, None] * (4 * H) + n[None, :], (unit < H)[:, None] & known, H)
            i = tl.dot(h, wi, i, input_precision=PRECISION)
            f = tl.dot(h, wf, f, input_precision=PRECISION)
            g = tl.dot(h, wg, g, input_precision=PRECISION)
            o = tl.dot(h, wo, o, input_precision=PRECISION)
        c = tl.sigmoid(f) * c + tl.sigmoid(i) * tanh(g)
        after = (t + 1) * streams * H + at
        tl.store(outputs + after, (tl.sigmoid(o) * tanh(c)).to(outputs.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # the next step reads the stores of all threads
        tl.store(cells + after, c, mask=inside)


@triton.jit(do_not_specialize=["steps", "streams"])
def run_backward(
    gates, grad, weight, cells, of_output, of_cell, steps, streams,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Overwrite `gates`, the values before sigmoid or tanh, with their gradients; write `of_output` and `of_cell`.

    The last two receive the gradients of the output and the cell state before the first step. When the kernel starts,
    `of_cell` has the gradient of the last cell state. `grad` is the gradient of the outputs, and `weight` is (4 H, H).
    """
    row, n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HP), tl.arange(0, K)
    there, known = (row < streams)[:, None], (n < H)[None, :]
    inside = there & known
    at, at_gates = row[:, None] * H + n[None, :], row[:, None] * (4 * H) + n[None, :]
    none = tl.zeros((ROWS, HP), tl.float32)
    dc, dh = tl.load(of_cell + at, mask=inside, other=0.0), none
    c = tl.load(cells + steps * streams * H + at, mask=inside, other=0.0)
    last = steps - 1
    given_i, given_f, given_g, given_o = four(gates + last * streams * (4 * H) + at_gates, inside, H)
    given = tl.load(grad + last * streams * H + at, mask=inside, other=0.0)
    c_before = tl.load(cells + last * streams * H + at, mask=inside, other=0.0)
    for back in range(steps):
        t = last - back
        dh = plus(dh, given, PRECISION)
        i, f = tl.sigmoid(plus(none, given_i, PRECISION)), tl.sigmoid(plus(none, given_f, PRECISION))
        g, o = tanh(plus(none, given_g, PRECISION)), tl.sigmoid(plus(none, given_o, PRECISION))
        squashed = tanh(c)
        dc += dh * o * (1.0 - squashed * squashed)
        step = gates + t * streams * (4 * H)
        out = step + at_gates
        tl.store(out, (dc * g * i * (1.0 - i)).to(gates.dtype.element_ty), mask=inside)
        tl.store(out + H, (dc * c_before * f * (1.0 - f)).to(gates.dtype.element_ty), mask=inside)
        tl.store(out + 2 * H, (dc * i * (1.0 - g * g)).to(gates.dtype.element_ty), mask=inside)
        tl.store(out + 3 * H, (dh * squashed * o * (1.0 - o)).to(gates.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # the product reads the stores of all threads
        dc *= f
        c = c_before
        # values of the next step are loaded before the product and used after it; the last step has no next step
        to = tl.maximum(t - 1, 0) * streams
        given_i, given_f, given_g, given_o = four(gates + to * (4 * H) + at_gates, inside, H)
        given = tl.load(grad + to * H + at, mask=inside, other=0.0)
        c_before = tl.load(cells + to * H + at, mask=inside, other=0.0)
        dh = none
        for start in tl.range(0, 4 * H, K, num_stages=STAGES):
            unit = start + k
            stored, whole = step + row[:, None] * (4 * H) + unit[None, :], unit < 4 * H
            a = tl.load(stored, mask=there & whole[None, :], other=0.0, cache_modifier=".cg")
            b = tl.load(weight + unit[:, None] * H + n[None, :], mask=whole[:, None] & known, other=0.0)
            dh = tl.dot(a, b, dh, input_precision=PRECISION)
    tl.store(of_output + at, dh, mask=inside)
    tl.store(of_cell + at, dc, mask=inside)


@triton.jit
def wait_for_all(counter, arrivals):
    """Add 1 to a counter that programs share, and wait until the counter has reached `arrivals`."""
    tl.debug_barrier()  # the stores of all threads must be visible before the new count
    seen = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    while seen < arrivals:
        seen = tl.atomic_add(counter, 0, sem="acquire")


@triton.jit(do_not_specialize=["steps", "streams"])
def run_forward_shared(
    gates, weight, outputs, cells, counters, steps, streams,
    H: tl.constexpr, HP: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the same as :func:`run_forward`, with UNITS hidden units per program.

    `counters` has a zero for each block of ROWS streams: the programs of a block count there to wait for each other.
    """
    row, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    k = tl.arange(0, HP)
    there, known = (row < streams)[:, None], (n < H)[None, :]
    inside = there & known
    at, at_gates = row[:, None] * H + n[None, :], row[:, None] * (4 * H) + n[None, :]
    wi, wf, wg, wo = four(weight + k[:, None] * (4 * H) + n[None, :], (k < H)[:, None] & known, H)
    c = tl.load(cells + at, mask=inside, other=0.0)
    given_i, given_f, given_g, given_o = four(gates + at_gates, inside, H)
    for t in range(steps):
        before = outputs + t * streams * H + row[:, None] * H + k[None, :]
        h = tl.load(before, mask=there & (k < H)[None, :], other=0.0, cache_modifier=".cg")
        i, f = tl.dot(h, wi) + given_i.to(tl.float32), tl.dot(h, wf) + given_f.to(tl.float32)
        g, o = tl.dot(h, wg) + given_g.to(tl.float32), tl.dot(h, wo) + given_o.to(tl.float32)
        to = tl.minimum(t + 1, steps - 1) * streams
        given_i, given_f, given_g, given_o = four(gates + to * (4 * H) + at_gates, inside, H)
        c = tl.sigmoid(f) * c + tl.sigmoid(i) * tanh(g)
        after = (t + 1) * streams * H + at
        tl.store(outputs + after, (tl.sigmoid(o) * tanh(c)).to(outputs.dtype.element_ty), mask=inside)
        tl.store(cells + after, c, mask=inside)
        wait_for_all(counters + tl.program_id(0), (t + 1) * tl.num_programs(1))


@triton.jit(do_not_specialize=["steps", "streams"])
def run_backward_shared(
    gates, grad, weight, cells, of_output, of_cell, counters, steps, streams,
    H: tl.constexpr, HP: tl.constexpr, UNITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the same as :func:`run_backward`, with UNITS hidden units per program.

    `counters` as in :func:`run_forward_shared`.
    """
    row, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    k = tl.arange(0, HP)
    there, known = (row < streams)[:, None], (n < H)[None, :]
    inside, whole = there & known, there & (k < H)[None, :]
    at, at_gates = row[:, None] * H + n[None, :], row[:, None] * (4 * H) + n[None, :]
    wi, wf, wg, wo = four(weight + k[:, None] * H + n[None, :], (k < H)[:, None] & known, H * H)
    dc, dh = tl.load(of_cell + at, mask=inside, other=0.0), tl.zeros((ROWS, UNITS), tl.float32)
    c = tl.load(cells + steps * streams * H + at, mask=inside, other=0.0)
    for back in range(steps):
        t = steps - 1 - back
        step = gates + t * streams * (4 * H)
        out = step + at_gates
        given_i, given_f, given_g, given_o = four(out, inside, H)
        dh += tl.load(grad + t * streams * H + at, mask=inside, other=0.0).to(tl.float32)
        c_before = tl.load(cells + t * streams * H + at, mask=inside, other=0.0)
        i, f = tl.sigmoid(given_i.to(tl.float32)), tl.sigmoid(given_f.to(tl.float32))
        g, o = tanh(given_g.to(tl.float32)), tl.sigmoid(given_o.to(tl.float32))
        squashed = tanh(c)
        dc += dh * o * (1.0 - squashed * squashed)
        tl.store(out, (dc * g * i * (1.0 - i)).to(gates.dtype.element_ty), mask=inside)
        tl.store(out + H, (dc * c_before * f * (1.0 - f)).to(gates.dtype.element_ty), mask=inside)
        tl.store(out + 2 * H, (dc * i * (1.0 - g * g)).to(gates.dtype.element_ty), mask=inside)
        tl.store(out + 3 * H, (dh * squashed * o * (1.0 - o)).to(gates.dtype.element_ty), mask=inside)
        wait_for_all(counters + tl.program_id(0), (back + 1) * tl.num_programs(1))
        dc *= f
        c = c_before
        stored = step + row[:, None] * (4 * H) + k[None, :]
        di = tl.load(stored, mask=whole, other=0.0, cache_modifier=".cg")
        df = tl.load(stored + H, mask=whole, other=0.0, cache_modifier=".cg")
        dg = tl.load(stored + 2 * H, mask=whole, other=0.0, cache_modifier=".cg")
        do = tl.load(stored + 3 * H, mask=whole, other=0.0, cache_modifier=".cg")
        dh = (tl.dot(di, wi) + tl.dot(df, wf)) + (tl.dot(dg, wg) + tl.dot(do, wo))
    tl.store(of_output + at, dh, mask=inside)
    tl.store(of_cell + at, dc, mask=inside)


def fits(x: Tensor, width: int, dtype: torch.dtype) -> bool:
    """Return True if the kernels support a layer of this width, in this dtype, for `x` of (time, streams, features)."""
    if dtype not in DTYPES or not x.numel() or width > WIDEST or (len(x) + 1) * x.shape[1] * 4 * width >= LARGEST:
        return False
    if x.is_cuda:
        return _memory(width, dtype) <= torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin
    return dtype != torch.bfloat16  # Triton's interpreter does not support matrix products in bfloat16


def _memory(width: int, dtype: torch.dtype) -> int:
    """Return an upper limit of the bytes of shared memory that a program needs, for prefetch and layout conversions."""
    units, most = _padded(width), 0
    for cuts, sums in ((FORWARD, 4), (BACKWARD, 1)):
        cut = cuts[dtype.itemsize]
        most = max(most, cut.stages * cut.depth * (sums * units + cut.rows) * dtype.itemsize + 4 * cut.rows * units)
    return most


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


class Recur(torch.autograd.Function):
    """An LSTM layer: map `x` of shape (time, streams, features) to outputs in `dtype` and the last cells in float32.

    `h` and `c` are the initial outputs and cell states; `of_input`, `of_output`, `bias` and `bias_too` are the weights
    of inputs and outputs and the two biases, as in torch.nn.LSTM.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h: Tensor, c: Tensor, of_input: Tensor, of_output: Tensor, bias: Tensor, bias_too: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        steps, streams, width = len(x), x.shape[1], of_output.shape[1]
        ctx.dtypes = [given.dtype for given in (x, h, c, of_input, of_output, bias, bias_too)]
        x, of_input = x.to(dtype), of_input.to(dtype)
        turned = x.new_empty((width, 4 * width)).copy_(of_output.t())  # for coalesced reads
        with torch.autocast(x.device.type, enabled=False):
            gates = torch.addmm((bias + bias_too).to(dtype), x.flatten(0, 1), of_input.t())
        outputs = x.new_empty((steps + 1, streams, width))
        cells = x.new_empty((steps + 1, streams, width), dtype=torch.float32)
        outputs[0], cells[0] = h, c
        _launch(
            (run_forward, run_forward_shared), FORWARD, gates, turned, outputs, cells, shape=(steps, streams, width)
        )
        ctx.save_for_backward(x, of_input, turned, gates, outputs, cells)
        return outputs[1:], cells[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_cell: Tensor) -> tuple[Tensor | None, ...]:
        x, of_input, turned, gates, outputs, cells = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):  # recompute the gates for all steps at once
            of_gates = torch.addmm(gates, outputs[:-1].flatten(0, 1), turned)
        of_h, of_c = torch.empty_like(cells[0]), grad_cell.clone(memory_format=torch.contiguous_format)
        _launch(
            (run_backward, run_backward_shared), BACKWARD, of_gates, grad.contiguous(), turned.t().contiguous(), cells,
            of_h, of_c, shape=(len(x), *cells[0].shape),
        )  # fmt: skip
        wanted = ctx.needs_input_grad
        grads: list[Tensor | None] = [None, of_h, of_c, None, None, None, None]
        with torch.autocast(x.device.type, enabled=False):
            if wanted[0]:
                grads[0] = (of_gates @ of_input).view_as(x)
            if wanted[3]:
                grads[3] = wide_product(of_gates.t(), x.flatten(0, 1))
            if wanted[4]:
                grads[4] = wide_product(of_gates.t(), outputs[:-1].flatten(0, 1))
        if wanted[5] or wanted[6]:
            grads[5] = grads[6] = of_gates.sum(0, dtype=torch.float32)
        kept = zip(grads, ctx.dtypes, wanted[:7], strict=True)
        return *(one.to(dtype) if needed else None for one, dtype, needed in kept), None


def _launch(
    kernels: tuple[Any, Any], cuts: dict[int, Cut], gates: Tensor, *tensors: Tensor, shape: tuple[int, int, int]
) -> None:
    """Launch the second kernel if elements have 2 bytes and its programs can all run at once, else the first."""
    steps, streams, width = shape
    alone, shared = kernels
    cut = cuts[gates.element_size()]
    tiles, parts = triton.cdiv(streams, cut.rows), triton.cdiv(width, UNITS)
    sizes = {"H": width, "HP": _padded(width), "ROWS": cut.rows}
    if gates.element_size() == 2 and tiles * parts <= _concurrent(gates):
        counters = gates.new_zeros(tiles, dtype=torch.int32)
        shared[(tiles, parts)](
            gates, *tensors, counters, steps, streams, **sizes, UNITS=UNITS, num_warps=WARPS, num_stages=1,
            **ONE_ROUNDING,
        )  # fmt: skip
        return
    alone[(tiles,)](
        gates, *tensors, steps, streams, **sizes, K=cut.depth, STAGES=cut.stages, PRECISION=PRECISION,
        num_warps=cut.warps, **ONE_ROUNDING,
    )  # fmt: skip


def _concurrent(x: Tensor) -> int:
    """Return the largest number of programs that may wait for each other: a quarter of the multiprocessors.

    All programs that wait for each other must run at the same time, one per multiprocessor. The rest of the GPU is left
    for such programs of other processes, under NVIDIA's Multi-Process Service. Triton's interpreter runs one program
    after another.
    """
    return torch.cuda.get_device_properties(x.device).multi_processor_count // 4 if x.is_cuda else 1
