"""Statements of the paper about SNGM and LARS, tested with the optimizers.

The paper is "Stochastic Normalized Gradient Descent with Momentum for Large-Batch Training"; lemmas, theorems and
equations have its numbers. Everything runs in float64, with every implementation of a step.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sngm import LARS, SNGM

PATHS = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
BETAS = [0.0, 0.5, 0.9, 0.99]
ETA = 0.1
LAMBDA = 0.3
STEPS = 8
EVER_SO_LITTLE = 1 + 1e-12  # for bounds that hold with equality

paths = pytest.mark.parametrize("path", PATHS)
random = settings(deadline=None, max_examples=12)


def on_paths_in_turn(names: str, *values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize over every pair of values, and of a value and a path; over the paths in turn for one list."""
    cases = pairwise(*values, PATHS) if len(values) > 1 else list(zip(*values, itertools.cycle(PATHS)))
    return pytest.mark.parametrize(f"{names}, path", cases)


# ------------------------------------------------------------------------------------------------ problems


@dataclass(frozen=True, eq=False)
class Problem:
    """A starting point, the loss at step t, and its gradient, the paper's g_t (None: by autograd)."""

    start: Sequence[Tensor]
    loss: Callable[[Sequence[Tensor], int], Tensor]
    slope: Callable[[Sequence[Tensor], int], Sequence[Tensor]] | None = None
    steps: int = STEPS

    @property
    def sizes(self) -> list[int]:
        return [w.numel() for w in self.start]

    def params(self) -> list[Tensor]:
        return [torch.nn.Parameter(w.clone()) for w in self.start]

    def gradient(self, params: Sequence[Tensor], t: int, c: float = 1.0) -> list[Tensor]:
        """Return the gradient of c times the loss."""
        if self.slope is None:
            return list(torch.autograd.grad(c * self.loss(params, t), params))
        return [c * g for g in self.slope([p.detach() for p in params], t)]

    def value(self, w: Tensor) -> float:
        return float(self.loss(w.split(self.sizes), 0))


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tanh_net() -> Problem:
    """Return a non-convex problem: a two-layer net with a random mini-batch of 16 of 64 samples per step."""
    x, y = gaussian(64, 5, seed=0), gaussian(64, 3, seed=1)
    start = [gaussian(8, 5, seed=2) / 2, gaussian(8, seed=3) / 10, gaussian(3, 8, seed=4) / 4, gaussian(3, seed=5) / 10]
    batches = [torch.randperm(64, generator=torch.Generator().manual_seed(t))[:16] for t in range(STEPS)]

    def loss(w: Sequence[Tensor], t: int) -> Tensor:
        b = batches[t]
        return ((x[b] @ w[0].T + w[1]).tanh() @ w[2].T + w[3] - y[b]).square().sum(1).mean()

    return Problem(start, loss)


def separable(start: Sequence[Tensor], weights: Sequence[Tensor], f: Any, slope: Any) -> Problem:
    """Return the problem of the sum of a f(x) over all elements x with weights a."""

    def loss(w: Sequence[Tensor], t: int) -> Tensor:
        return torch.stack([(a * f(b)).sum() for a, b in zip(weights, w, strict=True)]).sum()

    return Problem(start, loss, lambda w, t: [a * slope(b) for a, b in zip(weights, w, strict=True)])


def quadratic() -> Problem:
    """Return a quadratic with condition number 1e3, whose blocks differ much in curvature."""
    start = [gaussian(3, 2, seed=6), gaussian(4, seed=7), gaussian(1, seed=8)]
    curvatures = torch.logspace(1, -2, 11, dtype=torch.float64)
    weights = [curvatures[:6].view(3, 2), curvatures[6:10], curvatures[10:]]
    return separable(start, weights, lambda x: x.square() / 2, lambda x: x)


def linear(start: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> Problem:
    """Return a loss whose gradient at step t is gradients[t], or the last one, for any w."""

    def now(t: int) -> Sequence[Tensor]:
        return gradients[min(t, len(gradients) - 1)]

    def loss(w: Sequence[Tensor], t: int) -> Tensor:
        return torch.stack([(a * b).sum() for a, b in zip(now(t), w, strict=True)]).sum()

    return Problem(start, loss, lambda w, t: now(t), len(gradients))


def adversary() -> Problem:
    """Return gradients with block norms from 1e-4 to 1e4, some of which reverse and grow at the same time."""
    start = [gaussian(4, 3, seed=9), gaussian(5, seed=10), gaussian(1, 2, seed=11), gaussian(1, seed=12)]
    gradients: list[list[Tensor]] = []
    for t in range(STEPS):
        sizes = 10.0 ** (8 * torch.rand(4, generator=torch.Generator().manual_seed(t), dtype=torch.float64) - 4)
        fresh = [s * gaussian(*w.shape, seed=100 * t + i) for i, (s, w) in enumerate(zip(sizes, start, strict=True))]
        fresh = [f + s * f.sign() / 10 for f, s in zip(fresh, sizes, strict=True)]  # none close to zero
        gradients.append([-2 * g for g in gradients[-1]] if t % 3 == 2 else fresh)
    return linear(start, gradients)


PROBLEMS = {"tanh net": tanh_net(), "quadratic": quadratic(), "adversary": adversary()}
problems = pytest.mark.parametrize("name", PROBLEMS)
cases = on_paths_in_turn("name, beta", list(PROBLEMS), BETAS)

SHAPES = [(1,), (3,), (2, 2)]


def sequences(least: float = 1e-6, most: float = 1e6, zeros: bool = False) -> st.SearchStrategy[Problem]:
    """Draw sequences of gradients for three blocks of different norms, some alternating; with `zeros`, some zero."""
    size = st.floats(math.log10(least), math.log10(most)).map(lambda e: 10.0**e)
    size = size | size.map(lambda x: -x) | (st.just(0.0) if zeros else st.nothing())
    return st.lists(st.tuples(st.integers(0, 99), size, size, size), min_size=1, max_size=6).map(from_sizes)


def from_sizes(drawn: Sequence[tuple[int, float, float, float]]) -> Problem:
    gradients = [
        [
            size * unit(gaussian(*shape, seed=3 * seed + i))
            for i, (size, shape) in enumerate(zip(sizes, SHAPES, strict=True))
        ]
        for seed, *sizes in drawn
    ]
    return linear([gaussian(*shape, seed=i) for i, shape in enumerate(SHAPES)], gradients)


# ------------------------------------------------------------------------------------------------- running


@dataclass
class Trajectory:
    """All blocks as one vector: w[t] and u[t] for t = 0..T, g[t] and eta[t] for t = 0..T-1."""

    w: list[Tensor]
    g: list[Tensor]
    u: list[Tensor]
    eta: list[float]

    @property
    def steps(self) -> list[Tensor]:
        return [after - before for before, after in itertools.pairwise(self.w)]

    @property
    def length(self) -> float:
        """Return the largest distance from the start."""
        return float(max((w - self.w[0]).norm() for w in self.w))

    def two_points(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return (w_{t-1}, w_t, w_{t+1}, g_t) for all t, with w_{-1} = w_0."""
        return list(zip([self.w[0], *self.w[:-2]], self.w[:-1], self.w[1:], self.g, strict=True))

    def z_steps(self, beta: float) -> list[Tensor]:
        """Return z_{t+1} - z_t with z_t = w_t/(1-beta) - beta w_{t-1}/(1-beta)."""
        z = [(w - beta * before) / (1 - beta) for before, w in zip([self.w[0], *self.w[:-1]], self.w, strict=True)]
        return [after - before for before, after in itertools.pairwise(z)]


def flat(blocks: Sequence[Tensor]) -> Tensor:
    return torch.cat([b.detach().reshape(-1) for b in blocks])


def in_two_groups(params: list[Tensor]) -> list[dict[str, Any]]:
    """Split parameters into two groups, which must not affect a norm over all parameters."""
    return [{"params": params[:1]}, {"params": params[1:]}] if len(params) > 1 else [{"params": params}]


def one_a_group(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": [p]} for p in params]


def follow(
    problem: Problem,
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    steps: int | None = None,
    *,
    times: float | Sequence[float] = 1.0,
    schedule: Callable[[int], float] | None = None,
) -> Trajectory:
    """Train on `times` the loss; with one number per block, on that multiple of the block's gradient."""
    params = problem.params()
    optimizer = make(params)
    groups = optimizer.param_groups
    out = Trajectory([flat(params)], [], [torch.zeros_like(flat(params))], [])
    for t in range(problem.steps if steps is None else steps):
        for group in groups if schedule else []:
            group["lr"] = schedule(t)
        grads = problem.gradient(params, t, times if isinstance(times, float) else 1.0)
        if not isinstance(times, float):
            grads = [c * g for c, g in zip(times, grads, strict=True)]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        out.g.append(flat(grads))
        out.eta.append(float(groups[0]["lr"]))
        optimizer.step()
        out.w.append(flat(params))
        if groups[0]["momentum"]:
            out.u.append(flat([optimizer.state[p]["momentum_buffer"] for p in params]))
        else:  # without a buffer, u is computed from the step
            pull = groups[0]["weight_decay"] if groups[0].get("weight_decay_mode") == "decoupled" else 0.0
            out.u.append((out.w[-2] - out.w[-1]) / out.eta[-1] - pull * out.w[-2])
    return out


@functools.cache
def sngm(problem: Problem, path: str, beta: float, steps: int | None = None, **more: Any) -> Trajectory:
    """Run SNGM with lr=ETA on two parameter groups; arguments of `follow` go there, others to the optimizer."""
    driven = {key: more.pop(key) for key in ("times", "schedule") if key in more}
    groups = more.pop("groups", in_two_groups)
    arguments = {"lr": ETA, "momentum": beta, **PATHS[path], **more}
    return follow(problem, lambda params: SNGM(groups(params), **arguments), steps, **driven)


def lars(problem: Problem, path: str, beta: float, *, adapt: bool | None = True, **more: Any) -> Trajectory:
    """Run LARS with lr=ETA and trust coefficient 1, all tensors adapted."""
    driven = {key: more.pop(key) for key in ("schedule", "steps") if key in more}
    arguments = {"lr": ETA, "momentum": beta, "trust_coefficient": 1.0, **PATHS[path], **more}
    return follow(problem, lambda params: LARS([{"params": params, "adapt": adapt}], **arguments), **driven)


def unit(g: Tensor) -> Tensor:
    return g / g.norm()


def blocks(v: Tensor, problem: Problem) -> tuple[Tensor, ...]:
    return v.split(problem.sizes)


def block_unit(g: Tensor, problem: Problem) -> Tensor:
    """Return the n_t of Section 6."""
    return torch.cat([unit(block) for block in blocks(g, problem)])


def assert_near(a: Tensor, b: Tensor, scale: float | Tensor, tolerance: float) -> None:
    off = (a - b).norm()
    assert off <= tolerance * scale, f"off by {off:.1e}, {off / scale:.1e} of the scale"


def assert_same_way(a: Trajectory, b: Trajectory, tolerance: float = 1e-11) -> None:
    for one, other in zip(a.w, b.w, strict=True):
        assert_near(one, other, a.length, tolerance)


def distance(a: Trajectory, b: Trajectory) -> float:
    """Return the largest distance between two trajectories, relative to their lengths."""
    return float(max((one - other).norm() for one, other in zip(a.w, b.w, strict=True))) / a.length


def test_the_slopes_written_down_here_are_those_of_the_losses():
    for each in [*PROBLEMS.values(), *(problem for problem, _ in SMOOTH.values()), RELAXED, shifted_parabola(1.0)]:
        params = each.params()
        torch.testing.assert_close(
            each.gradient(params, 3), list(torch.autograd.grad(each.loss(params, 3), params)), rtol=1e-12, atol=0.0
        )


# ------------------------------------------------------------------------- Lemma 2: the momentum is bounded


DECAYS = {
    "no decay": {},
    "coupled": {"weight_decay": LAMBDA, "weight_decay_mode": "coupled"},
    "decoupled": {"weight_decay": LAMBDA, "weight_decay_mode": "decoupled"},
}


@on_paths_in_turn("name, beta, decay", PROBLEMS, BETAS, DECAYS)
def test_the_momentum_is_never_longer_than_one_over_one_minus_beta(name, beta, path, decay):
    """Lemma 2, which requires only that what enters the buffer in equation (7) has norm 1."""
    run = sngm(PROBLEMS[name], path, beta, **DECAYS[decay])
    assert all(u.norm() <= EVER_SO_LITTLE / (1 - beta) for u in run.u)
    assert run.u[1].norm() == pytest.approx(1.0, rel=1e-12)


@paths
@random
@given(
    problem=sequences(1e-150, 1e150, zeros=True),
    beta=st.sampled_from(BETAS) | st.floats(0.0, 0.999),
    decay=st.sampled_from(list(DECAYS)),
    scope=st.sampled_from(["global", "group", "tensor"]),
    nesterov=st.booleans(),
)
def test_the_momentum_is_bounded_for_every_sequence_of_gradients(path, problem, beta, decay, scope, nesterov):
    """Lemma 2 for gradients of any size, including zeros; k blocks of norm at most 1 have a norm of at most sqrt(k)."""
    run = sngm(problem, path, beta, scope=scope, nesterov=nesterov and beta > 0, **DECAYS[decay])
    root_k = math.sqrt({"global": 1, "group": 2, "tensor": 3}[scope])
    assert all(u.norm() <= root_k * EVER_SO_LITTLE / (1 - beta) for u in run.u)
    if decay != "decoupled":
        assert all(step.norm() <= root_k * ETA / (1 - beta) * (1 + 1e-9) for step in run.steps)


@on_paths_in_turn("beta, decay", BETAS, list(DECAYS))
def test_the_bounds_on_momentum_and_step_are_attained_in_the_limit_for_constant_gradients(beta, decay, path):
    """Lemma 2 is sharp: for one gradient repeated, u_t is (1 - beta^t)/(1 - beta) of its direction.

    The same holds with coupled decay while w is parallel to the gradient, since their sum keeps its direction.
    """
    g = gaussian(6, seed=0)
    problem = linear([1e4 * g[:2], 1e4 * g[2:]], [[g[:2], g[2:]]])
    steps = math.ceil(math.log(0.3) / math.log(beta)) if beta else 1
    run = sngm(problem, path, beta, steps, **DECAYS[decay])
    for t, u in enumerate(run.u):
        assert_near(u, (1 - beta**t) / (1 - beta) * unit(g), 1 / (1 - beta), 1e-12 if beta else 1e-9)
    assert run.u[-1].norm() > 0.7 / (1 - beta)
    if decay != "decoupled":
        assert run.steps[-1].norm() > 0.7 * ETA / (1 - beta)


@on_paths_in_turn("beta", BETAS)
def test_the_bound_on_the_momentum_fails_for_decay_added_after_the_norm(beta, path):
    """Lemma 2 does not apply to weight_decay_mode "after_norm": lambda w enters the buffer unnormalised."""
    g, size = unit(gaussian(4, seed=0)), 1e3
    problem = linear([size * g[:2], size * g[2:]], [[g[:2], g[2:]]] * 3)
    run = sngm(problem, path, beta, weight_decay=LAMBDA, weight_decay_mode="after_norm")
    assert_near(run.u[1], (1 + LAMBDA * size) * g, LAMBDA * size, 1e-12)
    assert run.u[1].norm() > 3 / (1 - beta)
    assert run.steps[0].norm() > 3 * ETA / (1 - beta)
    for mode in ("coupled", "decoupled"):
        tame = sngm(problem, path, beta, weight_decay=LAMBDA, weight_decay_mode=mode)
        assert all(u.norm() <= (1 + 1e-9) / (1 - beta) for u in tame.u)


# ---------------------------------------------------------------- the length of a step, in w and in the rate


def jumping(t: int) -> float:
    """Return a learning rate that drops to a hundredth, recovers and drops: the buffer must not depend on old rates."""
    return [1.0, 1.0, 0.01, 0.01, 0.3, 0.003][t % 6]


def assert_bounded_steps(run: Trajectory, beta: float) -> None:
    for t, step in enumerate(run.steps):
        rounding = 1e-14 * run.w[t].norm()
        assert step.norm() <= run.eta[t] / (1 - beta) * EVER_SO_LITTLE + rounding
        assert_near(step, -run.eta[t] * run.u[t + 1], run.eta[t] / (1 - beta) + run.w[t].norm(), 1e-14)


@on_paths_in_turn("name, beta, decay", PROBLEMS, BETAS, ["no decay", "coupled"])
def test_no_step_is_longer_than_eta_over_one_minus_beta(name, beta, path, decay):
    """The proof of Theorem 1: ||w_{t+1} - w_t|| <= eta/(1-beta), since the step is -eta u_{t+1} (equation (8))."""
    assert_bounded_steps(sngm(PROBLEMS[name], path, beta, **DECAYS[decay]), beta)


@on_paths_in_turn("name, beta, decay", PROBLEMS, BETAS, ["no decay", "coupled"])
def test_under_a_schedule_no_step_is_longer_than_its_own_eta_over_one_minus_beta(name, beta, path, decay):
    """Lemma 2 does not depend on the learning rate, so the bound of a step has the rate of that step."""
    run = sngm(PROBLEMS[name], path, beta, schedule=jumping, **DECAYS[decay])
    assert run.eta == [jumping(t) for t in range(STEPS)]
    assert_bounded_steps(run, beta)


# ------------------------------------------------------ equation (9), Lemma 3 and its block-wise equation (15)


def assert_two_point_form(run: Trajectory, beta: float) -> None:
    for before, w, after, g in run.two_points():
        assert_near(after, w - ETA * unit(g) + beta * (w - before), ETA + w.norm(), 1e-14)


@cases
def test_sngm_is_the_two_point_method_of_the_paper(name, beta, path):
    """Equation (9): w_{t+1} = w_t - eta g_t/||g_t|| + beta (w_t - w_{t-1}), with w_{-1} = w_0."""
    assert_two_point_form(sngm(PROBLEMS[name], path, beta), beta)


@paths
@random
@given(problem=sequences(), beta=st.sampled_from(BETAS) | st.floats(0.0, 0.99))
def test_every_sequence_of_gradients_drives_the_two_point_method(path, problem, beta):
    """Equation (9) for gradients from 1e-6 to 1e6."""
    assert_two_point_form(sngm(problem, path, beta), beta)


@cases
def test_the_z_sequence_takes_plain_normalised_steps(name, beta, path):
    """Lemma 3: z_{t+1} = z_t - eta/(1-beta) g_t/||g_t||: longer steps without momentum."""
    run = sngm(PROBLEMS[name], path, beta)
    for step, g, w in zip(run.z_steps(beta), run.g, run.w[1:], strict=True):
        assert_near(step, -ETA / (1 - beta) * unit(g), (ETA + w.norm()) / (1 - beta), 1e-14)


@cases
def test_the_z_sequence_of_every_block_takes_plain_normalised_steps(name, beta, path):
    """Equation (15), and ||z_t - w_t|| <= sqrt(S) eta beta/(1-beta)^2 from the proof of Theorem 3."""
    problem = PROBLEMS[name]
    run = sngm(problem, path, beta, scope="tensor")
    for vectors in zip(run.z_steps(beta), run.g, run.w[1:], strict=True):
        for step, g, w in zip(*(blocks(v, problem) for v in vectors), strict=True):
            assert_near(step, -ETA / (1 - beta) * unit(g), (ETA + w.norm()) / (1 - beta), 1e-14)
    for before, w, _, _ in run.two_points():
        away = beta / (1 - beta) * (w - before).norm()
        assert away <= math.sqrt(len(problem.sizes)) * ETA * beta / (1 - beta) ** 2 * (1 + 1e-9)


@paths
@random
@given(problem=sequences(), beta=st.sampled_from(BETAS), scope=st.sampled_from(["global", "tensor"]))
def test_the_z_lemma_holds_for_every_sequence_of_gradients(path, problem, beta, scope):
    """Lemma 3 and equation (15) for gradients from 1e-6 to 1e6."""
    run = sngm(problem, path, beta, scope=scope)
    for step, g, w in zip(run.z_steps(beta), run.g, run.w[1:], strict=True):
        n = unit(g) if scope == "global" else block_unit(g, problem)
        assert_near(step, -ETA / (1 - beta) * n, (ETA + w.norm()) / (1 - beta), 1e-14)


# ---------------------------------------------------------------------- invariance to the scale of the loss


@on_paths_in_turn("name, beta, mode", PROBLEMS, BETAS, [None, "after_norm", "decoupled"])
def test_the_scale_of_the_loss_leaves_the_trajectory_unchanged(name, beta, path, mode):
    """Equation (7) depends only on the direction of g_t, also with decay that is not inside the norm."""
    decay = {"weight_decay": LAMBDA, "weight_decay_mode": mode} if mode else {}
    plain = sngm(PROBLEMS[name], path, beta, **decay)
    for c in (1e-6, 30.0, 1e6):
        assert_same_way(plain, sngm(PROBLEMS[name], path, beta, times=c, **decay))


@cases
def test_the_scale_of_the_loss_matters_to_coupled_decay_unless_the_decay_is_scaled_too(name, beta, path):
    """Coupled decay is a part of the loss, lambda/2 ||w||^2: scaling only the rest changes the loss."""
    plain = sngm(PROBLEMS[name], path, beta, **DECAYS["coupled"])
    for c in (1e-6, 1e6):
        assert distance(plain, sngm(PROBLEMS[name], path, beta, times=c, weight_decay=LAMBDA)) > 1e-2
        assert_same_way(plain, sngm(PROBLEMS[name], path, beta, times=c, weight_decay=c * LAMBDA))


@on_paths_in_turn("beta", BETAS)
def test_only_the_block_wise_variant_is_blind_to_a_scale_for_each_block(beta, path):
    """Equation (13) normalises block by block, equation (7) all blocks at once."""
    problem, scales = PROBLEMS["adversary"], (1e-3, 50.0, 1.0, 1e3)
    by_tensor, whole = ({"scope": "tensor"}, {})
    assert_same_way(sngm(problem, path, beta, **by_tensor), sngm(problem, path, beta, times=scales, **by_tensor))
    assert distance(sngm(problem, path, beta, **whole), sngm(problem, path, beta, times=scales, **whole)) > 1e-2


# --------------------------------------------------------------------------------------- beta = 0 is SNGD


@paths
@problems
def test_without_momentum_every_step_has_length_eta_along_minus_the_gradient(name, path):
    """ "When beta = 0, SNGM will degenerate to SNGD": w_{t+1} = w_t - eta g_t/||g_t||."""
    run = sngm(PROBLEMS[name], path, 0.0)
    for w, g, step in zip(run.w, run.g, run.steps, strict=False):
        assert step.norm() == pytest.approx(ETA, rel=1e-12)
        assert_near(step, -ETA * unit(g), ETA + w.norm(), 1e-15)


@paths
@random
@given(problem=sequences(), eta=st.floats(1e-3, 1e3))
def test_sngd_takes_steps_of_length_eta_for_every_sequence_of_gradients(path, problem, eta):
    """SNGD for gradients from 1e-6 to 1e6 and rates from 1e-3 to 1e3."""
    run = sngm(problem, path, 0.0, lr=eta)
    for w, g, step in zip(run.w, run.g, run.steps, strict=False):
        assert_near(step, -eta * unit(g), eta + w.norm(), 1e-15)


# -------------------------------------------------------------------------------------------------- LARS


LOW, HIGH = 0.5, 2.0  # gamma_l and gamma_u


@on_paths_in_turn("name, how", list(PROBLEMS), ["matrices", "all", "clipped"])
def test_the_two_published_versions_of_lars_agree_without_momentum_and_decay(name, how, path):
    """The footnote of Section 4.2: normalising the gradient and normalising the momentum are then the same.

    With adapt=None vectors take plain steps, which both versions agree on too.
    """
    more = {
        "matrices": {"adapt": None, "lr": 1e-4},  # the length of plain steps depends on the gradient
        "all": {"adapt": True},
        "clipped": {"adapt": True, "phi": (LOW, HIGH)},
    }[how]
    first, second = (
        lars(PROBLEMS[name], path, 0.0, variant=variant, trust_coefficient=0.5, **more)
        for variant in ("you2017", "momentum")
    )
    assert_same_way(first, second)


@paths
@problems
def test_the_two_published_versions_of_lars_differ_with_momentum_or_decay(name, path):
    """The footnote of Section 4.2 requires beta = 0 and no decay; both are necessary.

    From u_0 = 0 the first step is the same in both versions even for beta = 0.9.
    """
    for beta, wd in ((0.9, 0.0), (0.0, LAMBDA)):
        first, second = (
            lars(PROBLEMS[name], path, beta, steps=6, variant=variant, weight_decay=wd)
            for variant in ("you2017", "momentum")
        )
        assert distance(first, second) > 1e-2
        if wd == 0.0:
            assert_near(first.w[1], second.w[1], first.steps[0].norm(), 1e-12)


def phi(w: Tensor) -> float:
    return min(max(float(w.detach().norm()), LOW), HIGH)


@on_paths_in_turn("name, variant, c", list(PROBLEMS), ["you2017", "momentum", "unscaled"], [1.0, 0.3])
def test_lars_with_a_clipped_phi_is_block_wise_sngm_at_a_rate_of_its_own_for_each_block(name, variant, c, path):
    """Section 4.2: w_s steps by eta_t along g_s/||g_s||, with eta gamma_l <= eta_t <= eta gamma_u."""
    problem = PROBLEMS[name]
    layer_wise = lars(problem, path, 0.0, variant=variant, phi=(LOW, HIGH), trust_coefficient=c)
    params = problem.params()
    block_wise = SNGM(one_a_group(params), lr=ETA, momentum=0.0, scope="tensor", **PATHS[path])
    phis = []
    for t in range(STEPS):
        for p, g, group in zip(params, problem.gradient(params, t), block_wise.param_groups, strict=True):
            phis.append(phi(p))
            p.grad, group["lr"] = g, ETA * c * phis[-1]
        block_wise.step()
        assert_near(flat(params), layer_wise.w[t + 1], layer_wise.length, 1e-12)
        for step in blocks(layer_wise.steps[t], problem):
            assert ETA * c * LOW * (1 - 1e-9) <= step.norm() <= ETA * c * HIGH * (1 + 1e-9)
    assert {LOW, HIGH} < set(phis)  # both limits and values between them occur


@on_paths_in_turn("name, beta", list(PROBLEMS), [0.5, 0.9, 0.99])
def test_the_z_sequence_of_lars_takes_normalised_steps_at_the_rate_of_each_block(name, beta, path):
    """The remark to Theorem 3: z_s steps by eta phi(||w_s||)/(1-beta), for the version that normalises gradients."""
    problem = PROBLEMS[name]
    run = lars(problem, path, beta, phi=(LOW, HIGH))
    for vectors in zip(run.z_steps(beta), run.g, run.w, run.w[1:], strict=False):
        for step, g, w, after in zip(*(blocks(v, problem) for v in vectors), strict=True):
            assert_near(step, -ETA * phi(w) / (1 - beta) * unit(g), (ETA + after.norm()) / (1 - beta), 1e-14)


def shifted_parabola(x0: float) -> Problem:
    """Return the problem of equation (10): F(x) = (x + 1)^2/2, with its minimum at -1."""
    one = torch.ones(1, dtype=torch.float64)
    return separable([x0 * one], [one], lambda x: (x + 1).square() / 2, lambda x: x + 1)


@on_paths_in_turn("variant, start", ["you2017", "momentum"], [(1.0, 0.1, 60), (5.0, 0.01, 10), (0.3, 0.5, 10)])
def test_lars_with_phi_the_identity_shrinks_to_zero_and_misses_the_minimum(path, variant, start):
    """Equation (10) and the text after it: from x_0 > 0 the iteration is x <- (1 - eta) x for any gradient."""
    x0, eta, steps = start
    run = lars(shifted_parabola(x0), path, 0.0, lr=eta, variant=variant, steps=steps)
    for before, after in itertools.pairwise(run.w):
        assert float(after) == pytest.approx((1 - eta) * float(before), rel=1e-14)
    assert float(run.w[-1]) == pytest.approx(x0 * (1 - eta) ** steps, rel=1e-12)


def falling(first: float) -> Callable[[int], float]:
    return lambda t: first * 0.9**t


@on_paths_in_turn("beta", [0.0, 0.5, 0.9])
def test_sngm_with_a_falling_rate_finds_the_minimum_that_lars_misses(beta, path):
    """Equation (10): SNGM converges to -1 from a start from which LARS converges to 0."""
    run = sngm(shifted_parabola(1.0), path, beta, 50, schedule=falling(0.3))
    assert float(run.w[-1]) == pytest.approx(-1.0, abs=0.01)


@paths
@pytest.mark.parametrize("variant", ["you2017", "momentum"])
def test_lars_with_a_clipped_phi_finds_the_minimum_too(path, variant):
    """Section 4.2: LARS fails to converge because phi may vanish; gamma_l > 0 prevents that."""
    problem, how = shifted_parabola(1.0), {"variant": variant, "schedule": falling(0.5), "steps": 50}
    assert float(lars(problem, path, 0.0, phi=(LOW, HIGH), **how).w[-1]) == pytest.approx(-1.0, abs=0.01)
    assert 0 < float(lars(problem, path, 0.0, **how).w[-1]) < 0.02


# ------------------------------------------------------------------------------ Section 6: block-wise steps


@cases
def test_a_block_wise_step_is_never_longer_than_sqrt_s_eta_over_one_minus_beta(name, beta, path):
    """The proof of Theorem 3; and the step of each block is within the bound of a whole step of SNGM."""
    problem = PROBLEMS[name]
    root_s = math.sqrt(len(problem.sizes))
    run = sngm(problem, path, beta, scope="tensor")
    for step in run.steps:
        assert step.norm() <= root_s * ETA / (1 - beta) * (1 + 1e-9)
        assert all(part.norm() <= ETA / (1 - beta) * (1 + 1e-9) for part in blocks(step, problem))
    assert run.steps[0].norm() == pytest.approx(root_s * ETA, rel=1e-12)


@on_paths_in_turn("beta", BETAS)
def test_the_bound_on_a_block_wise_step_is_attained_in_the_limit_for_constant_gradients(beta, path):
    """The proof of Theorem 3, with gradients of quite different norms in the blocks."""
    g = [1e3 * gaussian(2, seed=0), gaussian(1, 3, seed=1), 1e-3 * gaussian(2, 2, seed=2)]
    steps = math.ceil(math.log(0.3) / math.log(beta)) if beta else 1
    run = sngm(linear([0 * b for b in g], [g]), path, beta, steps, scope="tensor")
    most = math.sqrt(3) * ETA / (1 - beta)
    assert 0.7 * most <= run.steps[-1].norm() <= most * EVER_SO_LITTLE


@on_paths_in_turn("name, beta, decay", PROBLEMS, BETAS, ["no decay", "coupled"])
def test_a_norm_for_each_tensor_is_a_norm_for_each_group_of_one_tensor(name, beta, path, decay):
    """Equation (13): blocks are tensors with scope="tensor" and parameter groups with scope="group"."""
    problem, decay = PROBLEMS[name], DECAYS[decay]
    by_tensor = sngm(problem, path, beta, scope="tensor", **decay)
    assert_same_way(by_tensor, sngm(problem, path, beta, scope="group", groups=one_a_group, **decay))
    assert distance(by_tensor, sngm(problem, path, beta, **decay)) > 1e-2


@cases
def test_a_norm_for_each_group_is_sngm_on_each_group_by_itself(name, beta, path):
    """Equations (13) and (14) with the two parameter groups as blocks."""
    problem = PROBLEMS[name]
    together = sngm(problem, path, beta, scope="group")
    assert distance(together, sngm(problem, path, beta)) > 1e-2
    assert distance(together, sngm(problem, path, beta, scope="tensor")) > 1e-2
    params = problem.params()
    alone = [SNGM(g["params"], lr=ETA, momentum=beta, **PATHS[path]) for g in in_two_groups(params)]
    for t in range(STEPS):
        for p, g in zip(params, problem.gradient(params, t), strict=True):
            p.grad = g
        for optimizer in alone:
            optimizer.step()
        assert_near(flat(params), together.w[t + 1], together.length, 1e-12)


@on_paths_in_turn("beta", BETAS)
def test_with_one_block_the_block_wise_variant_is_sngm(beta, path):
    """Section 6 with S = 1."""
    problem = linear([gaussian(3, 4, seed=9)], [[10.0**e * gaussian(3, 4, seed=e)] for e in range(-3, 4)])
    whole, by_group, by_tensor = (
        sngm(problem, path, beta, scope=scope, weight_decay=LAMBDA) for scope in ("global", "group", "tensor")
    )
    assert_same_way(whole, by_group, 1e-13)
    assert_same_way(whole, by_tensor, 1e-13)


def rho(g: Tensor, problem: Problem) -> float:
    """Return ||g|| / sum_s ||g_s||, whose maximum over a run is the rho(S) of Theorem 3."""
    return float(g.norm() / sum(block.norm() for block in blocks(g, problem)))


def cos(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


@paths
@random
@given(problem=sequences(1e-3, 1e3), beta=st.sampled_from(BETAS))
def test_the_first_block_wise_step_makes_the_angle_of_the_paper_with_the_gradient(path, problem, beta):
    """Section 6: cos(g, n) = sum_s ||g_s|| / (sqrt(S) ||g||), and 1/sqrt(S) <= rho <= 1."""
    root_s = math.sqrt(len(SHAPES))
    run = sngm(problem, path, beta, 1, scope="tensor")
    g, n = run.g[0], -run.steps[0] / ETA
    assert_near(n, block_unit(g, problem), root_s + run.w[0].norm() / ETA, 1e-14)
    assert cos(g, n) == pytest.approx(1 / (root_s * rho(g, problem)), rel=1e-12)
    assert 1 / root_s <= rho(g, problem) * EVER_SO_LITTLE
    assert rho(g, problem) <= EVER_SO_LITTLE
    assert 1 / root_s <= cos(g, n) * EVER_SO_LITTLE
    assert cos(g, -sngm(problem, path, beta, 1).steps[0]) == pytest.approx(1.0, rel=1e-12)  # SNGM steps along -g


@cases
def test_no_block_wise_step_turns_further_from_the_gradient_than_rho_allows(name, beta, path):
    """Section 6: cos(g_t, n_t) >= 1/(sqrt(S) rho(S)), with equality where the supremum in rho(S) is attained."""
    problem = PROBLEMS[name]
    root_s = math.sqrt(len(problem.sizes))
    run = sngm(problem, path, beta, scope="tensor")
    rhos = [rho(g, problem) for g in run.g]
    angles = [cos(g, w - after + beta * (w - before)) for before, w, after, g in run.two_points()]
    assert 1 / root_s <= max(rhos) * EVER_SO_LITTLE
    assert max(rhos) <= EVER_SO_LITTLE
    assert min(angles) == pytest.approx(1 / (root_s * max(rhos)), rel=1e-9)
    assert all(angle == pytest.approx(1 / (root_s * r), rel=1e-9) for angle, r in zip(angles, rhos, strict=True))


@on_paths_in_turn("s", [1, 2, 3, 16])
def test_the_angle_vanishes_for_equal_norms_and_is_widest_when_one_block_rules(path, s):
    """Section 6: rho = 1/sqrt(S) and cos = 1 for equal ||g_s||; rho -> 1 and cos -> 1/sqrt(S) for one large block."""
    even = [unit(gaussian(1 + i, seed=i)) for i in range(s)]
    ruled = [(1.0 if i == 0 else 1e-9) * g for i, g in enumerate(even)]
    for gradient, wanted_rho, wanted_cos in ((even, 1 / math.sqrt(s), 1.0), (ruled, 1.0, 1 / math.sqrt(s))):
        problem = linear([0 * g for g in even], [gradient])
        run = sngm(problem, path, 0.9, 1, scope="tensor")
        assert rho(run.g[0], problem) == pytest.approx(wanted_rho, rel=1e-6)
        assert cos(run.g[0], -run.steps[0]) == pytest.approx(wanted_cos, rel=1e-6)
        assert cos(run.g[0], -sngm(problem, path, 0.9, 1).steps[0]) == pytest.approx(1.0, rel=1e-12)


# ------------------------------------------------------------------------------ Theorems 1 to 3 on real runs


CURVATURES = torch.logspace(1, -2, 6, dtype=torch.float64)
FAR = gaussian(6, seed=20).sign() * 3


def in_two_blocks(weights: Tensor, f: Any, slope: Any) -> Problem:
    return separable(FAR.split(3), weights.split(3), f, slope)


# each with its smallest L; all have their minimum at 0, with value 0
SMOOTH = {
    "quadratic": (in_two_blocks(CURVATURES, lambda x: x.square() / 2, lambda x: x), 10.0),
    "non-convex": (
        in_two_blocks(CURVATURES, lambda x: x.square() / (1 + x.square()), lambda x: 2 * x / (1 + x.square()).square()),
        20.0,
    ),
}
# (1, 1)-smooth: cosh'' is at most 1 + |sinh|, and the Hessian norm of the sum is the largest second derivative
RELAXED = in_two_blocks(torch.ones_like(FAR), lambda x: torch.cosh(x) - 1, torch.sinh)


def kappa(beta: float) -> float:
    return (1 + beta) / (1 - beta) ** 2


def mean_norm(gradients: Sequence[Tensor]) -> float:
    return float(torch.stack(list(gradients)).norm(dim=1).mean())


def theorem_1(gap: float, smoothness: float, beta: float, eta: float, steps: int) -> float:
    """Return the right-hand side of equation (11) without noise."""
    return (1 - beta) * gap / (eta * steps) + smoothness / 2 * kappa(beta) * eta


def msgd_limit(beta: float, smoothness: float) -> float:
    """Return the largest learning rate of Section 3's bound for MSGD: (1-beta)^2/((1+beta)L)."""
    return 1 / (kappa(beta) * smoothness)


@on_paths_in_turn("name, beta, times", list(SMOOTH), BETAS, [1.0, 30.0, 3000.0])
def test_the_mean_gradient_norm_is_below_theorem_1_at_any_rate(name, beta, path, times):
    """Theorem 1 without noise, at the largest rate that MSGD's convergence allows and far above."""
    problem, smoothness = SMOOTH[name]
    eta = times * msgd_limit(beta, smoothness)
    run = sngm(problem, path, beta, 30, lr=eta)
    assert mean_norm(run.g) <= theorem_1(problem.value(run.w[0]), smoothness, beta, eta, 30)


@on_paths_in_turn("size, beta", [0.0, 0.5], [0.0, 0.5, 0.9])
def test_the_mean_gradient_norm_is_below_theorem_1_at_its_best_rate_whatever_the_noise(size, beta, path):
    """Theorem 1 before taking the expectation: twice the mean ||grad F(w_t) - g_t|| replaces 2 sigma/sqrt(B).

    At the rate that minimises it, the bound is below the first gradient norm, so the test is not vacuous.
    """
    clean, smoothness = SMOOTH["quadratic"]
    noise = [size * 2.0 ** (t % 5 - 2) * gaussian(6, seed=1000 + t) for t in range(60)]
    gap = clean.value(flat(clean.start))
    eta = math.sqrt(2 * (1 - beta) * gap / (len(noise) * smoothness * kappa(beta)))

    def slope(w: Sequence[Tensor], t: int) -> list[Tensor]:
        return [g + e for g, e in zip(clean.gradient(w, t), noise[t].split(3), strict=True)]

    run = sngm(Problem(clean.start, clean.loss, slope, len(noise)), path, beta, lr=eta)
    true = [g - e for g, e in zip(run.g, noise, strict=True)]
    bound = theorem_1(gap, smoothness, beta, eta, len(noise)) + 2 * mean_norm(noise)
    assert mean_norm(true) <= bound < true[0].norm()


@paths
def test_theorem_1_is_sharp_in_its_second_term(path):
    """On (L/2) x^2 from eta/2 SNGD alternates between eta/2 and -eta/2: the mean gradient norm stays L eta/2."""
    smoothness, eta, steps = 10.0, 0.7, 40
    one = torch.ones(1, dtype=torch.float64)
    problem = separable([eta / 2 * one], [smoothness * one], lambda x: x.square() / 2, lambda x: x)
    run = sngm(problem, path, 0.0, steps, lr=eta)
    bound = theorem_1(problem.value(run.w[0]), smoothness, 0.0, eta, steps)
    assert 0.99 * bound <= mean_norm(run.g) <= bound


@on_paths_in_turn("beta", BETAS)
def test_theorem_1_is_sharp_in_its_first_term(beta, path):
    """With small steps that just reach the minimum, the sum of eta/(1-beta) ||g_t|| is nearly the gap."""
    one = torch.ones(1, dtype=torch.float64)
    problem = separable([one], [one], lambda x: x.square() / 2, lambda x: x)
    steps = 100
    eta = (1 - beta) / steps
    mean = mean_norm(sngm(problem, path, beta, steps, lr=eta).g)
    bound = theorem_1(0.5, 1.0, beta, eta, steps)
    assert mean <= bound * EVER_SO_LITTLE  # equal up to rounding without momentum
    if beta <= 0.9:
        assert mean >= 0.95 * bound


@on_paths_in_turn("beta, factor", BETAS, [8.0, 100.0])
def test_where_msgd_diverges_sngm_does_not(beta, factor, path):
    """Sections 3 and 5.1: far above (1-beta)^2/((1+beta)L) MSGD diverges; Theorem 1 has no condition on eta."""
    problem, smoothness = SMOOTH["quadratic"]
    eta, steps = factor * (1 + beta) / smoothness, 40
    assert eta >= 0.999 * factor * msgd_limit(beta, smoothness)
    wild = follow(problem, lambda params: torch.optim.SGD(params, lr=eta, momentum=beta), steps)
    tame = sngm(problem, path, beta, steps, lr=eta)
    bound = theorem_1(problem.value(tame.w[0]), smoothness, beta, eta, steps)
    assert mean_norm(tame.g) <= bound < 1e-9 * mean_norm(wild.g)
    assert all(g.norm() <= tame.g[0].norm() + smoothness * kappa(beta) * eta for g in tame.g)


@on_paths_in_turn("beta, scope", [0.0, 0.5], ["global", "tensor"])
def test_the_mean_gradient_norm_is_below_theorems_2_and_3_for_a_relaxed_smooth_loss(beta, scope, path):
    """Theorem 2, and Theorem 3 for the block-wise variant, at the largest rates they allow, without noise."""
    steps, s = (200 if beta else 80), (2 if scope == "tensor" else 1)
    eta = 1 / (8 * kappa(beta) * s)  # lambda = 1, rho <= 1
    run = sngm(RELAXED, path, beta, steps, lr=eta, scope=scope)
    r = max(rho(g, RELAXED) for g in run.g) if scope == "tensor" else 1.0
    bound = 2 * r * (1 - beta) * RELAXED.value(run.w[0]) / (eta * steps) + 8 * kappa(beta) * r * s * eta
    assert mean_norm(run.g) <= bound < run.g[0].norm()


# ---------------------------------------------------------- equation (18): block-wise bounds are no better


def least(f: Callable[[float], float], near: float) -> float:
    """Return the minimum over a grid of learning rates around `near`."""
    return min(f(near * 2.0 ** (i / 16)) for i in range(-160, 161))


def least_bounds(x: float, y: float, z: float, s: int, r: float) -> tuple[float, float]:
    """Return the minima of P(eta) and Q(eta, S) over rates around their best ones, sqrt(x/y) and sqrt(x/(S y))."""
    p = least(lambda eta: x / eta + eta * y + z, math.sqrt(x / y))
    q = least(lambda eta: r * x / eta + eta * r * s * y + 0.5 * (1 + r * math.sqrt(s)) * z, math.sqrt(x / (s * y)))
    return p, q


@random
@given(
    x=st.floats(1e-3, 1e3),
    y=st.floats(1e-3, 1e3),
    z=st.floats(0.0, 1e3),
    s=st.integers(1, 200),
    between=st.floats(0.0, 1.0),
)
def test_the_best_block_wise_bound_is_never_below_the_best_bound_of_sngm(x, y, z, s, between):
    """Equation (18): min Q(eta, S) >= min P(eta), with equality for rho = 1/sqrt(S), so for S = 1."""
    root_s = math.sqrt(s)
    r = (1 - between) / root_s + between
    p, q = least_bounds(x, y, z, s, r)
    assert p == pytest.approx(2 * math.sqrt(x * y) + z, rel=1e-12)
    assert q == pytest.approx(2 * r * root_s * math.sqrt(x * y) + 0.5 * (1 + r * root_s) * z, rel=1e-12)
    assert q > p or r * root_s == pytest.approx(1.0, rel=1e-9)
    assert least_bounds(x, y, z, s, 1 / root_s)[1] == pytest.approx(p, rel=1e-12)


def test_the_gradients_of_a_net_make_the_best_block_wise_bound_strictly_worse():
    """Equation (18) with the rho(S) of a real block-wise run: the norms of the blocks of a net are not equal."""
    problem = PROBLEMS["tanh net"]
    run = sngm(problem, "single", 0.9, scope="tensor")
    r, s = max(rho(g, problem) for g in run.g), len(problem.sizes)
    p, q = least_bounds(1.0, 1.0, 1.0, s, r)
    assert 1.05 / math.sqrt(s) < r < 1
    assert q > 1.05 * p
