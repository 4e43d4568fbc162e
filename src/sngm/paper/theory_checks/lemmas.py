"""Lemmas 1 to 3 and the counter-example to LARS, with the optimizers of the package, and the lemmas on a training."""

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
from .findings import MET_WITHIN, Array, Finding, judge
from .problems import BOWL, COSH, EXP, QUADRATIC, QUARTIC, UNEVEN, WAVES, Problem, length, over

LEMMA_BETAS = (0.0, 0.5, 0.9, 0.99)
NOT_EXCEEDED = (
    f"Holds if the limit is nowhere exceeded by more than rounding (a relative {MET_WITHIN:g}), fails otherwise."
)
# z is a difference of weights divided by 1-β, so that rounding grows with the weights over the length of a step.
TRAINED_WITHIN = 1e-6
AT_0 = 1e-6  # LARS is this near to 0 after the steps given to it, and no start is


@dataclass(frozen=True, slots=True)
class Trace:
    """What an optimizer did: a row a step. w and u begin before the first step, g is what each step was given."""

    w: Array
    u: Array
    g: Array
    eta: float
    beta: float


def trace(
    gradient: Callable[[Array], Array], start: Array, eta: float, beta: float, steps: int, blocks: Sequence[int] = ()
) -> Trace:
    """Steps of the package's SNGM in float64; with blocks of these sizes, of its block-wise form."""
    sizes = list(blocks) or [len(start)]
    params = [torch.nn.Parameter(part.clone()) for part in torch.split(torch.from_numpy(start.copy()), sizes)]
    optimizer = SNGM(params, lr=eta, momentum=beta, scope="tensor" if blocks else "global")
    w, u, g = [start], [np.zeros_like(start)], []
    for _ in range(steps):
        g.append(np.asarray(gradient(w[-1])))
        for p, part in zip(params, torch.split(torch.from_numpy(g[-1]), sizes), strict=True):
            p.grad = part.clone()
        optimizer.step()
        w.append(torch.cat([p.detach() for p in params]).numpy())
        if beta:  # without momentum there is no buffer
            u.append(torch.cat([optimizer.state[p]["momentum_buffer"] for p in params]).numpy().copy())
        else:
            u.append((w[-2] - w[-1]) / eta)
    return Trace(np.array(w), np.array(u), np.array(g), eta, beta)


def noisy(problem: Problem, seed: int = 0) -> Callable[[Array], Array]:
    """The gradient of a batch of one, with noise that goes on from call to call."""
    random = np.random.default_rng(seed)
    return lambda w: problem.gradient(w) + problem.draw(random, 1, 1)[0]


# ---------------------------------------------------------------- Lemma 1


def lemma_1(seeds: int) -> Finding:
    """How fast a gradient can grow with the distance, over random pairs of points and along runs."""
    random = np.random.default_rng(1)
    draws = 2000 * seeds
    rows, lines, worst = [], [], 0.0
    shown = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0])  # each for the distances around it
    functions = {"x² / 2": BOWL, "1 - cos(x)": WAVES, "cosh(x) - 1": COSH, "x⁴ / 4": QUARTIC, "exp(x)": EXP}
    for slot, (label, problem) in enumerate(functions.items()):
        size = len(problem.start)
        w = random.normal(size=(draws, size)) * 10 ** random.uniform(-2, 0.7, size=(draws, 1))
        distance = 10 ** random.uniform(-3, 1, size=(draws, 1))
        way = random.normal(size=(draws, size))
        apart = ratios(problem, w, w + distance * over(way, length(way)[..., None]))
        eta = 0.1 / (8 * theory.kappa(0.9) * max(problem.lam, 1))
        run = trace(noisy(problem), problem.start, eta, 0.9, 200)
        z = auxiliary(run)
        followed = np.concatenate([ratios(problem, run.w[:-1], run.w[1:]), ratios(problem, run.w[1:], z[1:])])
        rows.append([problem.name, problem.L, problem.lam, float(apart.max()), float(followed.max())])
        worst = max(worst, float(apart.max()), float(followed.max()))
        nearest = np.abs(np.log(distance / shown)).argmin(axis=1)
        points = [(float(x), float(apart[nearest == i].max())) for i, x in enumerate(shown)]
        lines.append(Series(label, slot, points))
    figure = Figure(
        title="Lemma 1: the gradient over its limit",
        description="The largest ratio of a gradient's norm to Lemma 1's limit, by the distance of the two points.",
        x_label="distance α", y_label="largest ratio", panels={"random pairs of points": lines}, log_x=True,
        worst_at_bottom=False,
    )  # fmt: skip
    return Finding(
        name="lemma-1",
        statement="Lemma 1: at distance α the gradient of an (L, λ)-smooth h is at most (L α + ||∇h||) e^(λ α) long.",
        rule=NOT_EXCEEDED,
        verdict=judge(worst <= 1 + MET_WITHIN, worst > 1 + MET_WITHIN),
        measured=(
            f"{draws} random pairs of points for each of {len(rows)} functions, and runs of SNGM: gradient over limit "
            f"at most {worst:.6f}"
        ),
        head=("function", "L", "lambda", "random pairs", "along a run"),
        rows=[[*row[:3], *(float(f"{x:.6g}") for x in row[3:])] for row in rows],
        figures={"lemma-1": figure},
    )


def ratios(problem: Problem, w: Array, u: Array) -> Array:
    """The gradient's norm at u over what the lemma allows, with the least alpha it is stated for."""
    alpha = length(u - w)
    with np.errstate(over="ignore"):
        limit = (problem.L * alpha + length(problem.gradient(w))) * np.exp(problem.lam * alpha)
        return over(length(problem.gradient(u)), limit)


# ---------------------------------------------------------------- Lemmas 2 and 3


def auxiliary(run: Trace) -> Array:
    """Lemma 3's z for every w, with w_{-1} = w_0."""
    before = np.concatenate([run.w[:1], run.w[:-1]])
    return (run.w - run.beta * before) / (1 - run.beta)


def lemma_2(_: int) -> Finding:
    """The buffer under gradients of all sizes, and under one that never turns, which is the worst."""
    random = np.random.default_rng(2)
    rows, lines, worst = [], [], 0.0
    for slot, beta in enumerate(LEMMA_BETAS):
        steady = trace(lambda w: np.ones_like(w), np.zeros(10), 0.1, beta, 500)
        wild = trace(lambda w: random.normal(size=10) * 10 ** random.uniform(-9, 9), np.zeros(10), 0.1, beta, 500)
        blocks = trace(noisy(UNEVEN), UNEVEN.start, 0.1, beta, 300, UNEVEN.blocks)
        by_block = np.stack([length(part) for part in np.split(blocks.u, 4, axis=-1)])
        found = [float(norms.max()) * (1 - beta) for norms in (length(steady.u), length(wild.u), by_block)]
        rows.append([beta, *(float(f"{x:.12g}") for x in found)])
        worst = max(worst, *found)
        shown = [1, 2, 3, 5, 10, 20, 50, 100, 200, 500]
        norms = length(steady.u)
        lines.append(Series(f"momentum {beta:g}", slot, [(float(t), float(norms[t])) for t in shown]))
    figure = Figure(
        title="Lemma 2: the norm of the buffer",
        description="Under a gradient that never turns the norm of u grows to 1 / (1 - momentum) and not beyond.",
        x_label="step", y_label="||u||", panels={"the worst case: one direction": lines}, log_x=True, log_y=True,
        worst_at_bottom=False,
    )  # fmt: skip
    return Finding(
        name="lemma-2",
        statement="Lemma 2: the norm of SNGM's buffer u is at most 1 / (1-β).",
        rule=NOT_EXCEEDED,
        verdict=judge(worst <= 1 + MET_WITHIN, worst > 1 + MET_WITHIN),
        measured=f"(1-β) ||u|| at most {worst:.9f}, with the package's SNGM under gradients of norms from 1e-9 to 1e9",
        head=("momentum", "one direction", "random", "block by block"),
        rows=rows,
        figures={"lemma-2": figure},
    )


def lemma_3(_: int) -> Finding:
    """The auxiliary sequence, for SNGM and in its block-wise form."""
    rows, worst = [], 0.0
    for beta in LEMMA_BETAS:
        for problem, blocks in ((QUADRATIC, ()), (COSH, ()), (UNEVEN, UNEVEN.blocks), (COSH, COSH.blocks)):
            run = trace(noisy(problem), problem.start, 0.01, beta, 200, blocks)
            missed = float(residuals(run, blocks).max())
            rows.append([problem.name, len(blocks) or 1, beta, float(f"{missed:.2g}")])
            worst = max(worst, missed)
    return Finding(
        name="lemma-3",
        figures={"lemma-3": moves()},
        statement="Lemma 3: z = (w_t - β w_{t-1}) / (1-β) moves by exactly -η / (1-β) times the normalised gradient.",
        rule=f"Holds if no move differs by more than rounding (a relative {MET_WITHIN:g}), fails otherwise.",
        verdict=judge(worst <= MET_WITHIN, worst > MET_WITHIN),
        measured=f"the move of z differs from the lemma by at most {worst:.1g} of its length, over {len(rows)} runs",
        head=("function", "blocks", "momentum", "largest difference"),
        rows=rows,
    )


def moves() -> Figure:
    """What the lemma is for: w speeds up and slows down, z does not."""
    beta, eta = LEMMA_BETAS[2], 0.01
    run = trace(noisy(QUADRATIC), QUADRATIC.start, eta, beta, 200)
    lines = []
    for slot, (label, way) in enumerate((("w", run.w), ("z", auxiliary(run)))):
        lengths = length(np.diff(way, axis=0)) * (1 - beta) / eta
        points = [(float(t), float(x)) for t, x in enumerate(lengths, 1)]
        lines.append(Series(label, slot, points, marks=False))
    return Figure(
        title="Lemma 3: how far w and z move in a step",
        description="Each step of z has the length η / (1-β). The steps of w are shorter, and vary.",
        x_label="step", y_label="length of the move, times (1-β) / η", worst_at_bottom=False,
        panels={f"SNGM on a noisy quadratic, momentum {beta:g}": lines},
    )  # fmt: skip


def residuals(run: Trace, blocks: Sequence[int] = ()) -> Array:
    """How far z ends up from where Lemma 3 has it, over the length of its move."""
    cuts = list(np.cumsum(blocks))[:-1]
    direction = np.concatenate([over(g, length(g)[..., None]) for g in np.split(run.g, cuts, axis=-1)], axis=-1)
    z, move = auxiliary(run), run.eta / (1 - run.beta)
    return length(z[1:] - z[:-1] + move * direction) / (move * length(direction))


def training(_: int) -> Finding:
    """Lemmas 2 and 3 on the digits task, by a hook that watches the optimizer of the trainer."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from ...training import Options, resolve, train

    w: list[Array] = []
    u: list[Array] = []
    g: list[Array] = []

    def flat(tensors: list[torch.Tensor]) -> Array:
        return torch.cat([t.detach().flatten() for t in tensors]).numpy().copy()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if not w:
            w.append(flat(params))
            u.append(np.zeros_like(w[0]))
        g.append(flat([p.grad for p in params if p.grad is not None]))

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        w.append(flat(params))
        u.append(flat([optimizer.state[p]["momentum_buffer"] for p in params]))

    eta, beta = 0.1, 0.9
    # Lemma 3 needs a constant rate, and the paper's theory has no weight decay.
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
    run = Trace(np.array(w), np.array(u), np.array(g), eta, beta)
    norms = length(run.u)
    steps = length(np.diff(run.w, axis=0))
    missed = float(residuals(run).max())
    largest = float(norms.max()) * (1 - beta)
    points = [(float(t), float(x)) for t, x in enumerate(norms)]
    limit = [(0.0, 1 / (1 - beta)), (float(len(g)), 1 / (1 - beta))]
    figure = Figure(
        title="Lemma 2 on a training",
        description=f"The norm of SNGM's buffer over {len(g)} steps of the digits task, under its limit of 10.",
        x_label="step", y_label="||u||", worst_at_bottom=False,
        panels={"digits, momentum 0.9": [Series("||u||", 0, points, marks=False), Series("1 / (1-β)", 1, limit)]},
    )  # fmt: skip
    holds = largest <= 1 + MET_WITHIN and missed <= TRAINED_WITHIN
    return Finding(
        name="training",
        statement="Lemmas 2 and 3 on a real run: the digits task, trained by SNGM at a constant learning rate.",
        rule=(
            f"Holds if (1-β) ||u|| is at most 1 and z moves as Lemma 3 says up to {TRAINED_WITHIN:g} of its length, "
            "fails otherwise."
        ),
        verdict=judge(holds, not holds),
        measured=(
            f"{len(g)} steps to {record['result']['test_accuracy']:.1%} test accuracy: (1-β) ||u|| at most "
            f"{largest:.4f}, the longest step {steps.max() * (1 - beta) / eta:.4f} of η / (1-β), the move of z off "
            f"by at most {missed:.1g} of its length"
        ),
        head=("steps", "(1-beta) ||u||", "z off by"),
        rows=[[len(g), float(f"{largest:.6g}"), float(f"{missed:.2g}")]],
        figures={"training": figure},
    )


# ---------------------------------------------------------------- LARS


def lars(_: int) -> Finding:
    """Where LARS with phi(z) = z stops on its way to the minimum of (x+1)^2 / 2, and SNGM does not."""
    rows: list[list[object]] = []
    stuck, arrived, panel = [], [], []
    for eta in (0.05, 0.1, 0.5):
        for start in (0.1, 1.0, 10.0):
            steps = round(20 / eta)
            by_lars, by_sngm = (descend(method, start, eta, steps) for method in ("lars", "sngm"))
            forecast = start * (1 - eta) ** steps
            stuck.append(abs(by_lars[-1] - forecast) <= MET_WITHIN and abs(by_lars[-1]) < AT_0)
            arrived.append(abs(by_sngm[-1] + 1) <= eta * (1 + MET_WITHIN))
            rows.append([eta, start, steps, float(f"{by_lars[-1]:.3g}"), float(f"{by_sngm[-1]:.4g}")])
            if (eta, start) == (0.1, 1.0):
                panel = [
                    Series(label, slot, [(float(t), x) for t, x in enumerate(way[:61])], marks=False)
                    for slot, (label, way) in enumerate((("SNGM", by_sngm), ("LARS, φ(z) = z", by_lars)))
                ]
    figure = Figure(
        title="LARS on (x + 1)² / 2",
        description="From x = 1, LARS goes to 0 and stays there; SNGM goes to the minimum at -1.",
        x_label="step", y_label="x", panels={"learning rate 0.1, from x = 1": panel},
    )  # fmt: skip
    right = np.array(stuck) & np.array(arrived)
    return Finding(
        name="lars",
        statement="Section 4: from x > 0, LARS with φ(z) = z and η < 1 goes to 0 on (x+1)² / 2, not to its minimum -1.",
        rule=(
            f"Holds if LARS ends at (1-η)^T x_0, within {AT_0:g} of 0, and SNGM within η of -1, for every η and start, "
            "fails otherwise."
        ),
        verdict=judge(right, ~right),
        measured=(
            f"{sum(stuck)} of {len(rows)} runs of LARS end at 0, where the gradient is 1; "
            f"{sum(arrived)} of {len(rows)} runs of SNGM end within η of -1"
        ),
        head=("eta", "start", "steps", "LARS ends at", "SNGM ends at"),
        rows=rows,
        figures={"lars": figure},
    )


def descend(method: str, start: float, eta: float, steps: int) -> list[float]:
    """Every x on the way down (x+1)^2 / 2 without momentum, by the package's optimizers."""
    x = torch.nn.Parameter(torch.tensor([start], dtype=torch.float64))
    optimizer: torch.optim.Optimizer = SNGM([x], lr=eta, momentum=0.0)
    if method == "lars":
        optimizer = LARS([{"params": [x], "adapt": True}], lr=eta, momentum=0.0, trust_coefficient=1.0)
    way = [start]
    for _ in range(steps):
        x.grad = (x + 1).detach()
        optimizer.step()
        way.append(x.item())
    return way
