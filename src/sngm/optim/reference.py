"""Reference implementations of the methods as in the papers, with plain loops over the tensors of a model.

They are slow but easy to compare with the papers. The tests compare the optimizers with these functions in float64. The
blocks ``w[0], w[1], ...`` are the tensors of a model, and ``g`` holds their gradients. Each function takes the
parameters and buffers before a step and returns those after the step. The learning rate ``eta`` and the weight decay
``wd`` are one number for all blocks, or one number for each block, to represent parameter groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Blocks = list[Tensor]
PerBlock = float | Sequence[float]


def norm(*blocks: Tensor) -> float:
    """Return the Euclidean norm of all blocks together."""
    return math.sqrt(sum(float((b.abs() ** 2).sum()) for b in blocks))


def each(value: PerBlock, blocks: Blocks) -> list[float]:
    """Return `value` as a list of one number for each block."""
    return [value] * len(blocks) if isinstance(value, (int, float)) else list(value)


def sngm(
    w: Blocks,
    u: Blocks,
    g: Blocks,
    *,
    eta: PerBlock,
    beta: float = 0.9,
    wd: PerBlock = 0.0,
    mode: str = "coupled",
    scope: str = "global",
    groups: Sequence[int] | None = None,
    nesterov: bool = False,
    eps: float = 1e-12,
    maximize: bool = False,
) -> tuple[Blocks, Blocks]:
    """Return w and u after a step of Algorithm 1 of the SNGM paper; scope "tensor" is the variant of its Section 6.

    For scope "group", ``groups[s]`` is the index of the parameter group of block s.
    """
    eta, wd = each(eta, w), each(wd, w)
    spans = {"global": [0] * len(w), "group": list(groups or [0] * len(w)), "tensor": list(range(len(w)))}[scope]
    d = [-g[s] if maximize else g[s] for s in range(len(w))]
    if mode == "coupled":
        d = [d[s] + wd[s] * w[s] for s in range(len(w))]
    new_w, new_u = [], []
    for s in range(len(w)):
        n = max(norm(*(d[r] for r in range(len(w)) if spans[r] == spans[s])), eps)
        x = d[s] / n
        if mode == "after_norm":
            x = x + wd[s] * w[s]
        u_s = beta * u[s] + x
        step = beta * u_s + x if nesterov else u_s
        kept = (1.0 - eta[s] * wd[s]) * w[s] if mode == "decoupled" else w[s]
        new_u.append(u_s)
        new_w.append(kept - eta[s] * step)
    return new_w, new_u


def spectral_sngm(
    w: Blocks,
    u: Blocks,
    g: Blocks,
    *,
    eta: PerBlock,
    beta: float = 0.9,
    wd: PerBlock = 0.0,
    order: str = "before",
    nesterov: bool = False,
    rho: float = 0.3,
    balls: Sequence[str | None] | None = None,
    rows: list[dict[int, float]] | None = None,
    row_beta: float = 0.0,
    triples: Sequence[tuple[float, float, float]] | None = None,
    eps: float = 1e-12,
    maximize: bool = False,
) -> tuple[Blocks, Blocks]:
    """Return w and u after a step of :class:`sngm.SpectralSNGM`.

    `rho` is its `vector_scale`, and ``balls[s]`` the `ball` of block s. With ``balls[s] == "rows"``, ``rows[s][i]`` is
    the running root mean square of the norm of row i, which the step updates; at first ``rows[s]`` is empty. `triples`
    are the coefficients of Newton-Schulz, such as those in `sngm.optim.spectral.POLAR`; None gives the exact polar
    factor.
    """
    eta, wd = each(eta, w), each(wd, w)

    def steepest(s: int, d: Tensor) -> Tensor:
        ball = balls[s] if balls else None
        if d.ndim < 2 or ball == "euclidean":
            return rho * d / max(norm(d), eps)
        if ball == "rows":
            by_row = torch.zeros_like(d)
            for i in range(len(d)):
                if norm(g[s][i]) > 0:  # rows without a gradient do not move
                    n = norm(d[i])
                    if rows and row_beta:
                        n = rows[s][i] = math.sqrt(row_beta * rows[s].get(i, n) ** 2 + (1.0 - row_beta) * n**2)
                    by_row[i] = d[i] / max(n, eps)
            return by_row
        m = d.reshape(d.shape[0], -1)
        left, values, right = torch.linalg.svd(m, full_matrices=False)
        values = values.sign() if triples is None else values / max(norm(m), eps)
        for a, b, c in triples or ():
            values = a * values + b * values**3 + c * values**5
        x: Tensor = left @ torch.diag(values) @ right
        return math.sqrt(max(1.0, m.shape[0] / m.shape[1])) * x.reshape(d.shape)

    new_w, new_u = [], []
    for s in range(len(w)):
        d = -g[s] if maximize else g[s]
        x = steepest(s, d) if order == "before" else d
        u_s = beta * u[s] + x
        step = beta * u_s + x if nesterov else u_s
        new_u.append(u_s)
        if order == "after":
            step = steepest(s, step)
        new_w.append((1.0 - eta[s] * wd[s]) * w[s] - eta[s] * step)
    return new_w, new_u


def nsgdm(
    w: Blocks,
    m: Blocks,
    g: Blocks,
    *,
    eta: PerBlock,
    beta: float = 0.9,
    wd: PerBlock = 0.0,
    mode: str = "coupled",
    eps: float = 1e-12,
    maximize: bool = False,
) -> tuple[Blocks, Blocks]:
    """Return w and m after a step of NSGD with momentum (Cutkosky and Mehta, 2020)."""
    eta, wd = each(eta, w), each(wd, w)
    d = [-g[s] if maximize else g[s] for s in range(len(w))]
    if mode == "coupled":
        d = [d[s] + wd[s] * w[s] for s in range(len(w))]
    m = [beta * m[s] + (1.0 - beta) * d[s] for s in range(len(w))]
    n = max(norm(*m), eps)
    kept = [(1.0 - eta[s] * wd[s]) * w[s] if mode == "decoupled" else w[s] for s in range(len(w))]
    return [kept[s] - eta[s] * m[s] / n for s in range(len(w))], m


def msgd(
    w: Blocks, v: Blocks, g: Blocks, *, eta: PerBlock, beta: float = 0.9, wd: PerBlock = 0.0, nesterov: bool = False
) -> tuple[Blocks, Blocks]:
    """Return w and v after a step of momentum SGD, equations (2) and (3) of the SNGM paper."""
    eta, wd = each(eta, w), each(wd, w)
    d = [g[s] + wd[s] * w[s] for s in range(len(w))]
    v = [beta * v[s] + d[s] for s in range(len(w))]
    step = [beta * v[s] + d[s] for s in range(len(w))] if nesterov else v
    return [w[s] - eta[s] * step[s] for s in range(len(w))], v


def lars(
    w: Blocks,
    v: Blocks,
    g: Blocks,
    *,
    eta: PerBlock,
    m: float = 0.9,
    wd: PerBlock = 0.0,
    variant: str = "you2017",
    c: float | None = None,
    phi: tuple[float, float] | None = None,
    eps: float = 0.0,
    max_ratio: float | None = None,
    clamp: float | None = None,
    adapt: bool | None = None,
    maximize: bool = False,
) -> tuple[Blocks, Blocks]:
    """Return w and v after a step of LARS in one of its three versions (see :class:`sngm.LARS`)."""
    eta, wd = each(eta, w), each(wd, w)
    if c is None:
        c = 1.0 if variant == "momentum" else 1e-3
    new_w, new_v = [], []
    for s in range(len(w)):
        g_s = -g[s] if maximize else g[s]
        d = g_s + wd[s] * w[s]
        if clamp is not None:
            d = d.clamp(-clamp, clamp)
        size = norm(w[s]) if phi is None else min(max(norm(w[s]), phi[0]), phi[1])
        adapted = w[s].ndim > 1 if adapt is None else adapt
        if variant == "momentum":
            v_s = m * v[s] + (1.0 - m) * d
            ratio = trust(c * size, norm(v_s), max_ratio, adapted)
            new_w.append(w[s] - eta[s] * ratio * v_s)
        else:
            ratio = trust(c * size, norm(g_s) + wd[s] * norm(w[s]) + eps, max_ratio, adapted)
            if variant == "you2017":
                v_s = m * v[s] + eta[s] * ratio * d
                new_w.append(w[s] - v_s)
            else:
                v_s = m * v[s] + d
                new_w.append(w[s] - eta[s] * ratio * v_s)
        new_v.append(v_s)
    return new_w, new_v


def trust(above: float, below: float, max_ratio: float | None, adapted: bool) -> float:
    """Return above / below, or 1 if either is zero, but at most `max_ratio`. If not `adapted`, return 1."""
    if not adapted:
        return 1.0
    ratio = above / below if above > 0 and below > 0 else 1.0
    return ratio if max_ratio is None else min(ratio, max_ratio)


def clars(
    w: Blocks,
    v: Blocks,
    g: Blocks,
    mean_norms: Sequence[float],
    *,
    eta: PerBlock,
    m: float = 0.9,
    wd: PerBlock = 0.0,
    c: float = 0.01,
    max_ratio: float | None = 0.1,
    adapt: bool | None = None,
    maximize: bool = False,
) -> tuple[Blocks, Blocks]:
    """Return w and v after a step of CLARS; ``mean_norms[s]`` is the mean over micro-batches of the norm of g[s]."""
    eta, wd = each(eta, w), each(wd, w)
    new_w, new_v = [], []
    for s in range(len(w)):
        d = (-g[s] if maximize else g[s]) + wd[s] * w[s]
        ratio = trust(c * norm(w[s]), mean_norms[s], max_ratio, w[s].ndim > 1 if adapt is None else adapt)
        new_v.append(m * v[s] + d)
        new_w.append(w[s] - eta[s] * ratio * new_v[s])
    return new_w, new_v


def lamb(
    w: Blocks,
    m: Blocks,
    v: Blocks,
    g: Blocks,
    t: PerBlock,
    *,
    eta: PerBlock = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    wd: PerBlock = 0.0,
    bias_correction: bool = True,
    phi: tuple[float, float] | None = None,
    max_grad_norm: float | None = None,
    adapt: bool | None = None,
    maximize: bool = False,
) -> tuple[Blocks, Blocks, Blocks]:
    """Return w and the moments m and v after step t (1, 2, ...) of LAMB; t may differ between blocks."""
    eta, wd, t = each(eta, w), each(wd, w), each(t, w)
    clip = 1.0
    if max_grad_norm is not None and norm(*g) > max_grad_norm:
        clip = max_grad_norm / norm(*g)
    new_w, new_m, new_v = [], [], []
    for s in range(len(w)):
        g_s = (-clip if maximize else clip) * g[s]
        m_s = betas[0] * m[s] + (1.0 - betas[0]) * g_s
        v_s = betas[1] * v[s] + (1.0 - betas[1]) * g_s**2
        m_hat = m_s / (1.0 - betas[0] ** t[s]) if bias_correction else m_s
        v_hat = v_s / (1.0 - betas[1] ** t[s]) if bias_correction else v_s
        q = m_hat / (v_hat.sqrt() + eps) + wd[s] * w[s]
        size = norm(w[s]) if phi is None else min(max(norm(w[s]), phi[0]), phi[1])
        new_w.append(w[s] - eta[s] * trust(size, norm(q), None, adapt is not False) * q)
        new_m.append(m_s)
        new_v.append(v_s)
    return new_w, new_m, new_v


def extrap_sgd(
    w: Blocks,
    v: Blocks,
    workers: Sequence[Callable[[Blocks], Blocks]],
    *,
    eta: PerBlock,
    inner_eta: PerBlock,
    beta: float = 0.9,
    wd: PerBlock = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> tuple[Blocks, Blocks]:
    """Return w and v after a step of EXTRAP-SGD; ``workers[k](w)`` is the gradient of worker k at w."""
    inner = each(inner_eta, w)
    sign = -1.0 if maximize else 1.0
    mean = [torch.zeros_like(block) for block in w]
    for gradient in workers:
        g_k = gradient(w)
        ahead = gradient([w[s] - sign * inner[s] * g_k[s] for s in range(len(w))])
        mean = [mean[s] + sign * ahead[s] / len(workers) for s in range(len(w))]
    return msgd(w, v, mean, eta=eta, beta=beta, wd=wd, nesterov=nesterov)
