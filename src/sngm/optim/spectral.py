"""SpectralSNGM: SNGM with the spectral norm of each matrix's gradient in place of the norm of the whole gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import norms
from .base import LargeBatchOptimizer, lr_of, settings_in
from .buckets import Bucket, Work, state_dtype
from .heavy_ball import Rule, axpy_, heavy_ball, update_params
from .norms import upcast
from .sharded_norms import group_of, is_dtensor, local, redistribute_like
from .sngm import MIN_EPS

LARGEST_BATCH = 1 << 26  # elements of the matrices that are multiplied at once, to save memory
MARGIN = 1.01  # bfloat16 may round singular values to above 1, where the polynomials of "polar-express" grow fast
EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


def with_margin(triple: tuple[float, float, float], margin: float) -> tuple[float, float, float]:
    """Return the coefficients of p(s / margin), where p(s) = a s + b s^3 + c s^5 and `triple` is (a, b, c)."""
    a, b, c = triple
    return a / margin, b / margin**3, c / margin**5


# A triple (a, b, c) for each Newton-Schulz step, which maps singular values s to a s + b s^3 + c s^5.
# "muon" (Jordan et al., 2024): five equal steps map values above 0.01 into [0.68, 1.13]; more steps do not bring them
# closer to 1. "polar-express" (Amsel et al., arXiv 2505.16932): the best triple for each step. After eight steps,
# values that were above 0.001 are 1 up to float32 rounding.
POLAR = {
    "muon": ((3.4445, -4.775, 2.0315),) * 5,
    # the first triple has the margin twice, once for the values that Newton-Schulz starts from
    "polar-express": (
        with_margin(EXPRESS[0], MARGIN**2),
        *(with_margin(triple, MARGIN) for triple in EXPRESS[1:-1]),
        EXPRESS[-1],
    ),
}


class SpectralSNGM(LargeBatchOptimizer):
    r"""SNGM in the spectral norm: steps along the orthogonal polar factor of each weight matrix's gradient.

    A tensor :math:`w_t` of two or more dimensions is treated as a matrix of `shape[0]` rows. With the singular value
    decomposition :math:`g_t = U S V^T` of its gradient, and its momentum buffer :math:`u_t`, a step is:

    .. math::
        x_t = \sqrt{\max(1, \text{rows}/\text{columns})}\; U V^T, \qquad
        u_{t+1} = \beta u_t + x_t, \qquad w_{t+1} = (1 - \eta\lambda) w_t - \eta u_{t+1}

    Biases, scales and other vectors, and all tensors of groups with ``ball="euclidean"``, use
    :math:`x_t = \rho\, g_t / \|g_t\|` instead, where :math:`\rho` is the `vector_scale`. In groups with
    ``ball="rows"``, each row of a matrix :math:`x_t` is the row of the gradient divided by :math:`s_t`, a running root
    mean square of the norm of this row, with :math:`\beta_r` = `row_beta` and :math:`s_0 = \|g_0\|`:

    .. math::
        s_t = \sqrt{\beta_r s_{t-1}^2 + (1 - \beta_r) \|g_t\|^2}

    As in SNGM, the norm of :math:`u` is at most :math:`1/(1-\beta)` times the largest norm of an :math:`x` (both in
    the norm that `ball` names), and scaling the loss by a positive constant does not change the steps. A row of
    :math:`x_t` has at most the norm :math:`1/\sqrt{1-\beta_r}`.

    ``order="after"`` computes :math:`x` from the momentum of the gradients, as Muon does:
    :math:`v_{t+1} = \beta v_t + g_t`, :math:`w_{t+1} = (1 - \eta\lambda) w_t - \eta\, x(v_{t+1})`. With
    ``ball="rows"``, rows whose gradient is zero then do not move, except by weight decay.

    Put embeddings into a group with ``ball="rows"``, because each of their rows belongs to one token:
    ``decay_groups(model, weight_decay, embeddings={"ball": "rows"})`` does this. If the embedding is also the output
    layer, each row has a gradient in each batch, which is small if its token does not occur. It then adds little to the
    momentum, because :math:`s_t` is larger, if the token occurred in one of the last :math:`1/(1-\beta_r)` batches. In
    other embeddings the rows of such tokens have no gradient, and keep their :math:`s_t`.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate :math:`\eta`, a number or a one-element tensor.
        momentum: :math:`\beta`, in [0, 1).
        weight_decay: :math:`\lambda`, at least 0. It is decoupled, so it never enters the momentum buffer.
        order: "before" normalises each gradient and then adds it to the momentum (the order of SNGM); "after"
            normalises the momentum of the gradients.
        nesterov: step by :math:`\beta u_{t+1} + x_t`, or in the order "after" by :math:`x(\beta v_{t+1} + g_t)`.
        vector_scale: :math:`\rho`, the norm of :math:`x_t` for vectors and with ``ball="euclidean"``.
        polar: coefficients of the Newton-Schulz iteration that computes :math:`U V^T`, "muon" or "polar-express".
        ball: None or "spectral" normalises matrices in the spectral norm, "rows" each of their rows in the Euclidean
            norm, and "euclidean" whole matrices in the Euclidean norm. Vectors always use the Euclidean norm. Each
            parameter group may have its own value.
        row_beta: :math:`\beta_r`, in [0, 1). With 0 each row is divided by its own norm. Only for ``ball="rows"``. In
            the order "after", :math:`s_t` is a mean of norms of rows of :math:`v_t`.
        eps: lower limit of norms, so that a zero gradient gives a zero update.
        maximize, foreach, capturable, stochastic_rounding, norm_group: as in :class:`SNGM`. A `norm_group` only sums
            `grad_norm` and makes ranks agree on skipped steps. A matrix may be sharded as a DTensor, but not as plain
            tensors on several ranks.
        fused: as in :class:`SNGM`, for the update on the CPU. This method has no CUDA kernels.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = SpectralSNGM([w], lr=1.0, momentum=0.0, polar="polar-express")
        >>> (w * torch.tensor([[3.0, 0.0], [0.0, 0.1]])).sum().backward()
        >>> optimizer.step()  # both singular values become 1
        >>> w.data.round(decimals=2) + 0.0
        tensor([[-1.,  0.],
                [ 0., -1.]])

    Cost: 4 bytes of state per float32 parameter, and 4 per row in groups with ``ball="rows"``. Five steps of
    Newton-Schulz on a matrix of m rows and n >= m columns take about 10 m m (2 n + m) operations, in bfloat16 on CUDA
    and float32 elsewhere (float64 for float64 parameters). Matrices of the same shape in one group are multiplied in
    batches, unless they are sharded. During a step, each float32 parameter of a group takes 4 to 12 more bytes (4 on
    the CPU with the default settings, 8 on CUDA), and each element of a batch up to 16 more. A batch has at most 67
    million elements, or one larger matrix.

    Reference: :class:`SNGM`; Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """

    OTHERS = ("row_norm",)  # s of groups with ball="rows"
    DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # no polar factor of complex matrices
    CHOICES: ClassVar = {
        "order": ("before", "after"),
        "polar": tuple(POLAR),
        "ball": (None, "spectral", "rows", "euclidean"),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        order: str = "before",
        nesterov: bool = False,
        vector_scale: float = 0.3,
        polar: str = "muon",
        ball: str | None = None,
        row_beta: float = 0.99,
        eps: float = 1e-12,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        stochastic_rounding: bool = False,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(params, settings_in(locals()), norm_group=norm_group)

    def _step(self, work: Work) -> None:
        total = work.sums([norms.squares(bucket.grads) for bucket in work.buckets])[0]
        skip = self._skip(work, total)
        if skip is True:
            return
        for bucket in work.buckets:
            group = bucket.group
            rule = Rule(group["momentum"], rate=lr_of(group), decoupled_decay=group["weight_decay"])
            rule = replace(rule, nesterov=group["nesterov"], maximize=group["maximize"])
            if group["order"] == "before":
                directions = self._directions(bucket, bucket.grads, work.scale, skip)
                heavy_ball(replace(bucket, grads=directions), rule, skip)
            else:
                self._step_after(bucket, replace(rule, gain=1.0 / work.scale, rate=None), skip)

    def _step_after(self, bucket: Bucket, rule: Rule, skip: Tensor | bool) -> None:
        """Take a step with order="after": update the momentum buffers, then compute x from them and step along -x."""
        group = bucket.group
        buffers = bucket.buffers.get("momentum_buffer")
        if buffers is None:  # momentum 0
            tensors = [upcast(g) * (-rule.gain if rule.maximize else rule.gain) for g in bucket.grads]
        else:
            heavy_ball(bucket, rule, skip)
            tensors = buffers
            if rule.nesterov:
                tensors = list(torch._foreach_mul(buffers, rule.momentum))
                axpy_(tensors, -rule.gain if rule.maximize else rule.gain, [upcast(g) for g in bucket.grads])
        directions = self._directions(bucket, tensors, 1.0, skip)
        if rule.decoupled_decay:
            decay = rule.decoupled_decay
            directions = [x.add_(upcast(p), alpha=decay) for x, p in zip(directions, bucket.params, strict=True)]
        update_params(bucket, -lr_of(group), directions, skip)

    def _directions(
        self, bucket: Bucket, tensors: list[Tensor], scale: float | Tensor, skip: Tensor | bool
    ) -> list[Tensor]:
        """Return x (see the class) for each of `tensors`, which belong to the parameters of the bucket.

        The tensors have been multiplied by `scale`.
        """
        group, owners = bucket.group, bucket.owners
        eps = max(group["eps"], MIN_EPS) * scale
        found: dict[int, Tensor] = {}
        matrices = [i for i, p in enumerate(owners) if group["ball"] != "euclidean" and p.ndim > 1 and p.numel() > 0]
        vectors = sorted({*range(len(tensors))} - {*matrices})
        if vectors:
            squares = self._whole_squares(bucket, [tensors[i] for i in vectors], vectors)
            factors = group["vector_scale"] / at_least(eps, squares.sqrt())
            for i, factor in zip(vectors, factors.unbind(), strict=True):
                x = upcast(tensors[i])
                found[i] = x * factor.to(x.dtype)
        if group["ball"] == "rows":
            for i in matrices:
                lengths = row_norms(tensors[i], owners[i])
                own = lengths if group["order"] == "before" else row_norms(bucket.grads[i], owners[i])
                present = (own > 0) & lengths.isfinite()
                if group["row_beta"]:
                    lengths = self._running(bucket, i, lengths, present, scale, skip)
                # in the order "after", tokens that are not in the batch have momentum, but must not move
                found[i] = upcast(tensors[i]) / torch.where(present, at_least(eps, lengths), torch.inf)
            matrices = []
        plain = [i for i in matrices if not is_dtensor(owners[i])]
        found.update(zip(plain, polar_factors([tensors[i] for i in plain], group["polar"], eps), strict=True))
        sharded = [(i, owners[i], tensors[i]) for i in matrices if is_dtensor(owners[i])]
        found.update(_sharded_factors(sharded, group["polar"], eps))
        return [found[i] for i in range(len(tensors))]

    def _running(
        self, bucket: Bucket, i: int, lengths: Tensor, present: Tensor, scale: float | Tensor, skip: Tensor | bool
    ) -> Tensor:
        """Update the running root mean square of `lengths`, the norms of the rows of a tensor, and return it."""
        p, beta = bucket.owners[i], bucket.group["row_beta"]
        average: Any = bucket.states[i].get("row_norm")
        there = None if average is None else (average.device, average.dtype, average.shape[0])
        if there != (p.device, state_dtype(p), p.shape[0]):
            average = self._make_state(p, bucket.group)["row_norm"]  # the model was moved, or `ball` was changed
        average = local(average)
        scale = scale.to(lengths) if isinstance(scale, Tensor) else scale
        # hypot, because squares may overflow
        now = torch.hypot(average * math.sqrt(beta), lengths / scale * math.sqrt(1.0 - beta))
        now = torch.where(present, torch.where(average > 0, now, lengths / scale), average)
        average.copy_(torch.where(skip.to(average.device), average, now) if isinstance(skip, Tensor) else now)
        return now * scale

    def _keys(self, p: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        by_row = group["ball"] == "rows" and group["row_beta"] and p.ndim > 1
        return super()._keys(p, group) + (self.OTHERS if by_row else ())

    def _like(self, key: str, p: Tensor) -> Tensor:
        return zero_per_row(p) if key in self.OTHERS else p

    def _whole_squares(self, bucket: Bucket, tensors: list[Tensor], which: list[int]) -> Tensor:
        """Return tensors' squared norms, summed over shards; tensors[k] belongs to parameter which[k] of a bucket."""
        squares = norms.squares(tensors)
        if not self._shards.sharded:
            return squares
        packed = torch.zeros(1, len(self._shards.params), dtype=squares.dtype, device=squares.device)
        packed[0, [bucket.indices[i] for i in which]] = squares
        return self._shards.tensors(packed, over_group=False)[0, [bucket.indices[i] for i in which]]


def row_norms(tensor: Tensor, owner: Any) -> Tensor:
    """Return the norm of each row of a tensor; `tensor` is the local shard if its parameter `owner` is a DTensor."""
    tensor, dim = upcast(tensor), tuple(range(1, tensor.ndim))
    found: Tensor = torch.linalg.vector_norm(tensor, dim=dim, keepdim=True)
    # squares may overflow float32; on other devices than the CPU, the step is then skipped
    if tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not found.isfinite().all():
        found = torch.linalg.vector_norm(tensor, dim=dim, keepdim=True, dtype=torch.float64).to(tensor.dtype)
    split = [k for k, place in enumerate(getattr(owner, "placements", ())) if getattr(place, "dim", 0)]
    if split:  # each row is split over several ranks
        squares = found.to(norms.sum_dtype(found.device)).square()
        for k in split:
            dist.all_reduce(squares, group=owner.device_mesh.get_group(k))
        found = squares.sqrt().to(found.dtype)
    return found


def zero_per_row(p: Any) -> Tensor:
    """Return a zero for each row of a parameter, on the ranks that hold a shard of the row if it is a DTensor."""
    shape = torch.Size((p.shape[0], *[1] * (p.ndim - 1)))
    if not is_dtensor(p):
        return torch.zeros(shape, dtype=state_dtype(p), device=p.device)
    from torch.distributed.tensor import DTensor, Replicate

    places = [place if getattr(place, "dim", None) == 0 else Replicate() for place in p.placements]
    zeros = torch.zeros(local(p).shape[0], *shape[1:], dtype=state_dtype(p), device=p.device)
    return DTensor.from_local(zeros, p.device_mesh, places, run_check=False, shape=shape, stride=(1,) * p.ndim)


def polar_factors(tensors: Sequence[Tensor], polar: str, eps: float | Tensor = 1e-12) -> list[Tensor]:
    """Return sqrt(max(1, rows / columns)) U V^T for each tensor, viewed as a matrix U S V^T of `shape[0]` rows.

    `polar` is a key of `POLAR`. Tensors of the same shape are computed in batches.

    >>> (x,) = polar_factors([torch.tensor([[2.0, 0.0], [0.0, 5.0], [0.0, 0.0]])], "polar-express")
    >>> x.round(decimals=3)  # times the square root of 3/2
    tensor([[1.2250, 0.0000],
            [0.0000, 1.2250],
            [0.0000, 0.0000]])
    """
    by_shape: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        by_shape.setdefault((t.shape[0], t[0].numel(), t.dtype), []).append(i)
    found: dict[int, Tensor] = {}
    for (rows, columns, _), indices in by_shape.items():
        most = max(1, LARGEST_BATCH // (rows * columns))
        for some in (indices[at : at + most] for at in range(0, len(indices), most)):
            batch = torch.stack([upcast(tensors[i]).reshape(rows, columns) for i in some])
            x = newton_schulz(batch, polar, eps).mul_(math.sqrt(max(1.0, rows / columns)))
            found |= {i: one.view(tensors[i].shape) for i, one in zip(some, x.unbind(), strict=True)}
    return [found[i] for i in range(len(tensors))]


def newton_schulz(batch: Tensor, polar: str, eps: float | Tensor = 1e-12) -> Tensor:
    """Return approximately U V^T for each matrix U S V^T of a batch, by the Newton-Schulz steps ``POLAR[polar]``."""
    dtype = batch.dtype
    wide = batch.mT if batch.shape[-2] > batch.shape[-1] else batch  # so that the product with its transpose is small
    # divide by the Frobenius norm, which is at least the spectral norm
    x = wide / at_least(eps, norms.squares(batch.unbind()).sqrt().to(dtype)[:, None, None])
    if batch.device.type == "cuda" and dtype == torch.float32:
        x = x.bfloat16()
    for a, b, c in POLAR[polar]:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if wide is not batch else x).to(dtype).contiguous()


def at_least(least: float | Tensor, values: Tensor) -> Tensor:
    """Return `values` clamped to at least `least`, a number, or a tensor if the loss scale is on the device."""
    return values.clamp_min(least) if not isinstance(least, Tensor) else values.maximum(least.to(values))


def _sharded_factors(
    entries: list[tuple[int, Any, Tensor]], polar: str, eps: float | Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of each entry and this rank's shard of the polar factor of its matrix.

    An entry is an index, a parameter (a DTensor) and the local shard of a matrix that is sharded as the parameter is.
    Every rank gathers every matrix, computes some of the factors and broadcasts them.
    """
    from torch.distributed.tensor import DTensor

    for mesh in dict.fromkeys(p.device_mesh for _, p, _ in entries):
        ranks = mesh.mesh.flatten().tolist()
        own = ranks.index(dist.get_rank())
        there = [entry for entry in entries if entry[1].device_mesh == mesh]
        for start in range(0, len(there), len(ranks)):  # each rank computes one factor at a time
            some = there[start : start + len(ranks)]
            mine = None
            for k, (_, p, shard) in enumerate(some):
                layout = {"shape": p.shape, "stride": p.stride()}
                whole = DTensor.from_local(shard, mesh, p.placements, run_check=False, **layout).full_tensor()
                if k == own:
                    mine = polar_factors([whole], polar, eps)[0]
                del whole  # so that only one gathered matrix exists at a time
            for k, (i, p, shard) in enumerate(some):
                dtype = torch.promote_types(shard.dtype, torch.float32)
                x = torch.empty(p.shape, dtype=dtype, device=shard.device) if k != own or mine is None else mine
                dist.broadcast(x, src=ranks[k], group=group_of(mesh))
                yield i, local(redistribute_like(p, x))
                del x  # before the next gather
