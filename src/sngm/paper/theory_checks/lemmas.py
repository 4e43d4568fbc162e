"""Lemmas 1 to 3 and the counter-example to LARS, checked with the optimizers of the package and in a training run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import theory
from ...optim import LARS, SNGM
from ...report.figures import Figure, Series
from .findings import ROUNDING, Array, Finding, chart, digits, judge
from .problems import BOWL, COSH, EXP, QUADRATIC, QUARTIC, UNEVEN, WAVES, Problem, length, or_1

LEMMA_BETAS = (0.0, 0.5, 0.9, 0.99)
NOT_EXCEEDED = (
    f"Holds if the limit is nowhere exceeded by more than rounding (a relative {ROUNDING:g}), fails otherwise."
)
# Relative tolerance for Lemma 3 in a training run. It is above `ROUNDING`, because the lemma's z is a difference of
# weights divided by 1-β, and the rounding error of its moves grows with the ratio of the weights to the steps.
TRAINED_WITHIN = 1e-6
AT_0 = 1e-6  # LARS counts as stopped at 0 if it ends this close to 0; no run starts this close


@dataclass(frozen=True, slots=True)
class Trace:
    """A run of SNGM, with a row per step: weights w, momentum buffer u and gradient g.

    The arrays w and u also have a first row, for the start.
    """

    w: Array
    u: Array
    g: Array
    eta: float
    beta: float


def trace(
    gradient: Callable[[Array], Array], start: Array, eta: float, beta: float, steps: int, blocks: Sequence[int] = ()
) -> Trace:
    """Run the package's SNGM in float64, and return its trace; if `blocks` gives block sizes, run block-wise SNGM."""
    sizes = list(blocks) or [len(start)]
    params = [torch.nn.Parameter(part.clone()) for part in torch.split(torch.from_numpy(start.copy()), sizes)]
    optimizer = SNGM(params, lr=eta, momentum=beta, scope="tensor" if blocks else "global")
    w, u, g = [start], [np.zeros_like(start)], []
    for _ in range(steps):
        g.append(np.asarray(gradient(w[-1])))
        for p, part in zip(params, torch.split(torch.from_numpy(g[-1]), sizes), strict=True):
            p.grad = part.clone()
        optimizer.step()
        w.append(flat(params))
        # without momentum there is no buffer
        u.append(flat([optimizer.state[p]["momentum_buffer"] for p in params]) if beta else (w[-2] - w[-1]) / eta)
    return Trace(np.array(w), np.array(u), np.array(g), eta, beta)


def flat(tensors: Sequence[torch.Tensor]) -> Array:
    """Copy tensors into one vector."""
    return torch.cat([t.detach().flatten() for t in tensors]).numpy().copy()


def noisy(problem: Problem) -> Callable[[Array], Array]:
    """Return a function that computes a single-sample gradient, with new noise at every call."""
    random = np.random.default_rng(0)
    return lambda w: problem.gradient(w) + problem.draw(random, 1, 1)[0]


def points(values: Array, first: int = 0) -> list[tuple[float, float]]:
    """Return (step, value) points of a line in a plot."""
    return [(float(t), float(x)) for t, x in enumerate(values, first)]


def lemma_1(seeds: int) -> Finding:
    """Check Lemma 1, a limit on how fast gradients grow with the distance, at random pairs of points and along runs."""
    random = np.random.default_rng(1)
    draws = 2000 * seeds
    rows, lines, worst = [], [], 0.0
    shown = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0])  # each stands for the distances near it
    functions = {"x² / 2": BOWL, "1 - cos(x)": WAVES, "cosh(x) - 1": COSH, "x⁴ / 4": QUARTIC, "exp(x)": EXP}
    for slot, (label, problem) in enumerate(functions.items()):
        size = len(problem.start)
        w = random.normal(size=(draws, size)) * 10 ** random.uniform(-2, 0.7, size=(draws, 1))
        distance = 10 ** random.uniform(-3, 1, size=(draws, 1))
        way = random.normal(size=(draws, size))
        apart = ratios(problem, w, w + distance * way / length(way)[..., None])
        run = trace(noisy(problem), problem.start, 0.1 / (8 * theory.kappa(0.9) * max(problem.lam, 1)), 0.9, 200)
        along = np.concatenate([ratios(problem, run.w[:-1], run.w[1:]), ratios(problem, run.w[1:], auxiliary(run)[1:])])
        rows.append([problem.name, problem.L, problem.lam, digits(apart.max(), 6), digits(along.max(), 6)])
        worst = max(worst, float(apart.max()), float(along.max()))
        nearest = np.abs(np.log(distance / shown)).argmin(axis=1)
        largest = [(float(x), float(apart[nearest == i].max())) for i, x in enumerate(shown)]
        lines.append(Series(label, slot, largest))
    return Finding(
        "Lemma 1: at distance α the gradient of an (L, λ)-smooth h is at most (L α + ||∇h||) e^(λ α) long.",
        NOT_EXCEEDED,
        judge(worst <= 1 + ROUNDING, worst > 1 + ROUNDING),
        f"{draws} random pairs of points for each of {len(rows)} functions, and runs of SNGM: gradient over limit "
        f"at most {worst:.6f}",
        head=("function", "L", "lambda", "random pairs", "along a run"),
        rows=rows,
        figures={"lemma-1": chart(
            "Lemma 1: the gradient over its limit",
            "The largest ratio of a gradient's norm to Lemma 1's limit, by the distance of the two points.",
            "distance α", "largest ratio", {"random pairs of points": lines}, log="x",
        )},
    )  # fmt: skip


def ratios(problem: Problem, w: Array, u: Array) -> Array:
    """Return the norm of the gradient at u divided by Lemma 1's limit, which depends on w and on ||u - w||."""
    alpha = length(u - w)
    with np.errstate(over="ignore"):
        limit = (problem.L * alpha + length(problem.gradient(w))) * np.exp(problem.lam * alpha)
        return length(problem.gradient(u)) / or_1(limit)


def auxiliary(run: Trace) -> Array:
    """Return Lemma 3's z_t = (w_t - beta w_{t-1}) / (1 - beta) for every t, with w_{-1} = w_0."""
    before = np.concatenate([run.w[:1], run.w[:-1]])
    return (run.w - run.beta * before) / (1 - run.beta)


def lemma_2(_: int) -> Finding:
    """Check Lemma 2, a bound on the norm of SNGM's momentum buffer u.

    The gradients are constant (the worst case), random with norms from about 1e-9 to 1e9, or those of a quadratic on
    which block-wise SNGM runs.
    """
    random = np.random.default_rng(2)
    rows, lines = [], []
    for slot, beta in enumerate(LEMMA_BETAS):
        constant = length(trace(lambda w: np.ones_like(w), np.zeros(10), 0.1, beta, 500).u)
        wild = trace(lambda w: random.normal(size=10) * 10 ** random.uniform(-9, 9), np.zeros(10), 0.1, beta, 500)
        blocks = trace(noisy(UNEVEN), UNEVEN.start, 0.1, beta, 300, UNEVEN.blocks)
        by_block = np.stack([length(part) for part in np.split(blocks.u, 4, axis=-1)])
        rows.append([beta, *(float(norms.max()) * (1 - beta) for norms in (constant, length(wild.u), by_block))])
        shown = [(float(t), float(constant[t])) for t in (1, 2, 3, 5, 10, 20, 50, 100, 200, 500)]
        lines.append(Series(f"momentum {beta:g}", slot, shown))
    worst = max(max(row[1:]) for row in rows)
    return Finding(
        "Lemma 2: the norm of SNGM's buffer u is at most 1 / (1-β).",
        NOT_EXCEEDED,
        judge(worst <= 1 + ROUNDING, worst > 1 + ROUNDING),
        f"(1-β) ||u|| at most {worst:.9f}, with the package's SNGM under gradients of norms from 1e-9 to 1e9",
        head=("momentum", "one direction", "random", "block by block"),
        rows=[[digits(x, 12) for x in row] for row in rows],
        figures={"lemma-2": chart(
            "Lemma 2: the norm of the buffer",
            "Under a gradient that never turns the norm of u grows to 1 / (1 - momentum) and not beyond.",
            "step", "||u||", {"the worst case: one direction": lines}, log="xy",
        )},
    )  # fmt: skip


def lemma_3(_: int) -> Finding:
    """Check Lemma 3, which says how the sequence z (see `auxiliary`) moves, for SNGM and block-wise SNGM."""
    rows, worst = [], 0.0
    for beta in LEMMA_BETAS:
        for problem, blocks in ((QUADRATIC, ()), (COSH, ()), (UNEVEN, UNEVEN.blocks), (COSH, COSH.blocks)):
            run = trace(noisy(problem), problem.start, 0.01, beta, 200, blocks)
            missed = float(residuals(run, blocks).max())
            rows.append([problem.name, len(blocks) or 1, beta, digits(missed, 2)])
            worst = max(worst, missed)
            if problem is QUADRATIC and beta == 0.9:
                figure = step_lengths(run)
    return Finding(
        "Lemma 3: z = (w_t - β w_{t-1}) / (1-β) moves by exactly -η / (1-β) times the normalised gradient.",
        f"Holds if no move differs by more than rounding (a relative {ROUNDING:g}), fails otherwise.",
        judge(worst <= ROUNDING, worst > ROUNDING),
        f"the move of z differs from the lemma by at most {worst:.1g} of its length, over {len(rows)} runs",
        head=("function", "blocks", "momentum", "largest difference"),
        rows=rows,
        figures={"lemma-3": figure},
    )


def step_lengths(run: Trace) -> Figure:
    """Plot how far the weights w move in each step, which varies, and how far Lemma 3's z moves, which does not."""
    unit = (1 - run.beta) / run.eta
    lines = [
        Series(label, slot, points(length(np.diff(way, axis=0)) * unit, 1), marks=False)
        for slot, (label, way) in enumerate((("w", run.w), ("z", auxiliary(run))))
    ]
    return chart(
        "Lemma 3: how far w and z move in a step",
        "Each step of z has the length η / (1-β). The steps of w are shorter, and vary.",
        "step", "length of the move, times (1-β) / η", {f"SNGM on a noisy quadratic, momentum {run.beta:g}": lines},
    )  # fmt: skip


def residuals(run: Trace, blocks: Sequence[int] = ()) -> Array:
    """Return how far each move of Lemma 3's z is from the move that the lemma states, relative to the latter's norm."""
    cuts = list(np.cumsum(blocks))[:-1]
    direction = np.concatenate([g / or_1(length(g))[..., None] for g in np.split(run.g, cuts, axis=-1)], axis=-1)
    z, move = auxiliary(run), run.eta / (1 - run.beta)
    return length(z[1:] - z[:-1] + move * direction) / (move * length(direction))


def training(_: int) -> Finding:
    """Check Lemmas 2 and 3 in a training run of the digits task, whose steps are recorded by optimizer hooks."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from ...training import Options, resolve, train

    w, u, g = list[Array](), list[Array](), list[Array]()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if not w:
            w.append(flat(params))
        g.append(flat([p.grad for p in params]))

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        w.append(flat(params))
        u.append(flat([optimizer.state[p]["momentum_buffer"] for p in params]))

    eta, beta = 0.1, 0.9
    # Lemma 3 needs a constant learning rate, and the paper's theory has no weight decay.
    config = resolve(
        "digits", "sngm", lr=eta, batch=64, epochs=5, schedule="constant", precision="float64",
        method_settings={"weight_decay": 0.0}, device=torch.device("cpu"),
    )  # fmt: skip
    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            record = train(config, Path(folder) / "run", Options(device="cpu"))
    finally:
        for hook in hooks:
            hook.remove()
    run = Trace(np.array(w), np.array([np.zeros_like(w[0]), *u]), np.array(g), eta, beta)
    norms, missed = length(run.u), float(residuals(run).max())
    largest, step = float(norms.max()) * (1 - beta), length(np.diff(run.w, axis=0)).max() * (1 - beta) / eta
    limit = [(0.0, 1 / (1 - beta)), (float(len(g)), 1 / (1 - beta))]
    holds = largest <= 1 + ROUNDING and missed <= TRAINED_WITHIN
    return Finding(
        "Lemmas 2 and 3 on a real run: the digits task, trained by SNGM at a constant learning rate.",
        f"Holds if (1-β) ||u|| is at most 1 and z moves as Lemma 3 says up to {TRAINED_WITHIN:g} of its length, "
        "fails otherwise.",
        judge(holds, not holds),
        f"{len(g)} steps to {record['result']['test_accuracy']:.1%} test accuracy: (1-β) ||u|| at most {largest:.4f}, "
        f"the longest step {step:.4f} of η / (1-β), the move of z off by at most {missed:.1g} of its length",
        head=("steps", "(1-beta) ||u||", "z off by"),
        rows=[[len(g), digits(largest, 6), digits(missed, 2)]],
        figures={"training": chart(
            "Lemma 2 on a training",
            f"The norm of SNGM's buffer over {len(g)} steps of the digits task, under its limit of 10.",
            "step", "||u||",
            {"digits, momentum 0.9": [Series("||u||", 0, points(norms), marks=False), Series("1 / (1-β)", 1, limit)]},
        )},
    )  # fmt: skip


def lars(_: int) -> Finding:
    """Check on (x+1)^2 / 2 that LARS gets stuck at 0, before the minimum -1, and SNGM does not.

    LARS runs with phi(z) = z: the length of its step is eta |x|, which vanishes at 0.
    """
    rows: list[list[object]] = []
    stuck, arrived, panel = [], [], []
    starts = (0.1, 1.0, 10.0)
    for eta in (0.05, 0.1, 0.5):
        steps = round(20 / eta)
        ways = zip(*(descend(method, starts, eta, steps) for method in ("lars", "sngm")), strict=True)
        for start, (by_lars, by_sngm) in zip(starts, ways, strict=True):
            forecast = start * (1 - eta) ** steps
            stuck.append(abs(by_lars[-1] - forecast) <= ROUNDING and abs(by_lars[-1]) < AT_0)
            arrived.append(abs(by_sngm[-1] + 1) <= eta * (1 + ROUNDING))
            rows.append([eta, start, steps, digits(by_lars[-1], 3), digits(by_sngm[-1])])
            if (eta, start) == (0.1, 1.0):
                panel = [
                    Series(label, slot, points(way[:61]), marks=False)
                    for slot, (label, way) in enumerate((("SNGM", by_sngm), ("LARS, φ(z) = z", by_lars)))
                ]
    right = stuck + arrived
    return Finding(
        "Section 4: from x > 0, LARS with φ(z) = z and η < 1 goes to 0 on (x+1)² / 2, not to its minimum -1.",
        f"Holds if LARS ends at (1-η)^T x_0, within {AT_0:g} of 0, and SNGM within η of -1, for every η and start, "
        "fails otherwise.",
        judge(right, np.logical_not(right)),
        f"{sum(stuck)} of {len(rows)} runs of LARS end at 0, where the gradient is 1; "
        f"{sum(arrived)} of {len(rows)} runs of SNGM end within η of -1",
        head=("eta", "start", "steps", "LARS ends at", "SNGM ends at"),
        rows=rows,
        figures={"lars": Figure(
            "LARS on (x + 1)² / 2", "From x = 1, LARS goes to 0 and stays there; SNGM goes to the minimum at -1.",
            "step", "x", {"learning rate 0.1, from x = 1": panel},
        )},
    )  # fmt: skip


def descend(method: str, starts: Sequence[float], eta: float, steps: int) -> Array:
    """Return all iterates x of a package optimizer that minimises (x+1)^2 / 2 without momentum, a row for each start.

    Each x is a tensor with its own norm, so that the runs do not depend on each other.
    """
    params = [torch.nn.Parameter(torch.tensor([start], dtype=torch.float64)) for start in starts]
    optimizer: torch.optim.Optimizer = SNGM(params, lr=eta, momentum=0.0, scope="tensor")
    if method == "lars":
        optimizer = LARS([{"params": params, "adapt": True}], lr=eta, momentum=0.0, trust_coefficient=1.0)
    ways = [flat(params)]
    for _ in range(steps):
        for x in params:
            x.grad = (x + 1).detach()
        optimizer.step()
        ways.append(flat(params))
    return np.array(ways).T
