"""EXTRAP-SGD: momentum SGD on the mean of the workers' gradients at their extrapolated points."""

import itertools
import math

import pytest
import torch
from harness import (
    DTYPES,
    LOW,
    MANY,
    PATHS,
    TOLERANCE,
    UNSUPPORTED,
    make_params,
    pairwise,
    same_states,
    same_tensors,
    spacing,
    states,
    weights,
)

from sngm import ExtrapSGD
from sngm.optim import reference


class Workers:
    """Quadratic losses 0.5 * ||A_k (w - t_k)||^2 of three workers, over two blocks."""

    def __init__(self, dtype=torch.float64):
        generator = torch.Generator().manual_seed(3)
        self.start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((6, 11), (9,))]
        self.curvature = [
            [1 + torch.rand(b.shape, generator=generator, dtype=torch.float64) for b in self.start] for _ in range(3)
        ]
        self.target = [
            [torch.randn(b.shape, generator=generator, dtype=torch.float64) for b in self.start] for _ in range(3)
        ]
        self.params = [torch.nn.Parameter(b.to(dtype, copy=True)) for b in self.start]
        self.calls = []

    def loss(self, k, w):
        terms = zip(self.curvature[k], w, self.target[k], strict=True)
        return sum(0.5 * (h.to(p.dtype) * (p - t.to(p.dtype)) ** 2).sum() for h, p, t in terms)

    def closure(self, k, fail_on=None):
        def closure():
            self.calls.append(k)
            loss = self.loss(k, self.params)
            loss.backward()
            if fail_on == len(self.calls):
                raise RuntimeError("worker lost")
            return loss

        return closure

    def gradient(self, k):
        return lambda w: [h * (p - t) for h, p, t in zip(self.curvature[k], w, self.target[k], strict=True)]


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float64),
        ({}, torch.float32),
        ({"nesterov": True}, torch.float64),
        ({"maximize": True, "lr": 0.005}, torch.float64),
        ({"momentum": 0.0, "weight_decay": 0.0}, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["single", "foreach", "default"])
def test_extrap_sgd_equals_its_reference(settings, path, dtype):
    workers = Workers(dtype)
    settings = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.03, **settings}
    groups = [{"params": workers.params[:1], "inner_lr": 0.2}, {"params": workers.params[1:]}]
    optimizer = ExtrapSGD(groups, inner_lr=0.1, **settings, **PATHS[path])
    w, v = workers.start, [torch.zeros_like(b) for b in workers.start]
    if dtype == torch.float32:
        w = [p.detach().double() for p in workers.params]
    for _ in range(6):
        optimizer.step([workers.closure(k) for k in range(3)])
        w, v = reference.extrap_sgd(
            w, v, [workers.gradient(k) for k in range(3)], eta=settings["lr"], inner_eta=[0.2, 0.1],
            beta=settings["momentum"], wd=settings["weight_decay"],
            nesterov=settings.get("nesterov", False), maximize=settings.get("maximize", False),
        )  # fmt: skip
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for p, b, s in zip(workers.params, w, workers.start, strict=True):
        assert (p.detach().double() - b).norm() <= tolerance * (b - s).norm()
    if settings["momentum"]:
        for p, b in zip(workers.params, v, strict=True):
            assert (optimizer.state[p]["momentum_buffer"].double() - b).norm() <= tolerance * b.norm()
    assert workers.calls == [0, 0, 1, 1, 2, 2] * 6


@pytest.mark.parametrize(
    ("path", "dtype", "flag", "large"),
    pairwise(PATHS, DTYPES, (None, "nesterov", "maximize"), (False, True), without=UNSUPPORTED),
)
def test_extrap_sgd_looks_ahead_and_steps_as_its_reference_for_every_dtype_and_size(path, dtype, flag, large):
    """With given gradients, low precision costs one rounding of the extrapolation and one of the step."""
    settings, shapes = {flag: True} if flag else {}, [(65537,), (129, 130)] if large else MANY
    params = make_params(dtype, shapes, size=0.001)
    optimizer = ExtrapSGD(params, lr=0.05, inner_lr=0.2, weight_decay=0.03, **settings, **PATHS[path])
    generator = torch.Generator().manual_seed(2)
    w = [p.detach().double().clone() for p in params]
    start, v = w, [torch.zeros_like(b) for b in w]

    def close(p, b, before, start):
        """Return whether p is b: to one rounding in low precision, else relative to the distance from the start."""
        if dtype in LOW:
            float32_arithmetic = 2.0**-20 * (before.abs() + (b - before).abs().max()) if b.numel() else 0.0
            return ((p.double() - b).abs() <= 0.5 * spacing(b, dtype) + float32_arithmetic).all()
        return (p.double() - b).norm() <= TOLERANCE[dtype] * (b - start).norm()

    for _ in range(3):
        looks = [
            [(torch.randn(p.shape, generator=generator) * 0.01 + 0.01).to(dtype) for p in params] for _ in range(4)
        ]
        seen = []  # the points at which the reference computes gradients

        def gradient(there, looks=looks, seen=seen):
            seen.append(there)
            return [g.double() for g in looks[len(seen) - 1]]

        before = w
        w, v = reference.extrap_sgd(
            w, v, [gradient, gradient], eta=0.05, inner_eta=0.2, beta=0.9, wd=0.03,
            nesterov=settings.get("nesterov", False), maximize=settings.get("maximize", False),
        )  # fmt: skip
        calls = iter(range(4))

        def closure(before=before, seen=seen, looks=looks, calls=calls):
            call = next(calls)
            for p, b, s, there, g in zip(params, before, start, seen[call], looks[call], strict=True):
                assert call % 2 == 0 or close(p.detach(), there, b, s)
                p.grad = g.clone()

        optimizer.step([closure, closure])
        assert all(close(p.detach(), *those) for p, *those in zip(params, w, before, start, strict=True))
        if dtype in LOW:  # the reference continues from the rounded values
            w = [p.detach().double() for p in params]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for p, u in zip(params, v, strict=True):
        assert (optimizer.state[p]["momentum_buffer"].double() - u).norm() <= tolerance * u.norm()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_extrap_sgd_takes_the_same_step_with_the_gradients_of_all_workers_at_once(dtype, maximize):
    """A function of stacked parameters, made by torch.func, takes the steps of one closure per worker."""
    settings = {"lr": 0.05, "inner_lr": 0.1, "weight_decay": 0.03, "nesterov": True, "maximize": maximize}
    targets = torch.arange(3, dtype=dtype)
    start = [torch.linspace(-1, 1, 4, dtype=dtype), torch.full((2, 3), 0.5, dtype=dtype), torch.ones(2, dtype=dtype)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    ours[2].requires_grad_(False)
    theirs[2].requires_grad_(False)

    def loss(params, target):
        return ((params[0] - target) ** 2).sum() + (params[1] * target).sin().sum() * params[0].mean()

    def closure(target):
        value = loss(theirs, target)
        value.backward()
        return value

    def of(workers):
        def gradients(points):
            found, values = torch.func.vmap(torch.func.grad_and_value(loss))(points, targets[workers])
            return values.mean(), found

        return gradients

    pairs = [(of(slice(2)), 2), (of(slice(2, 3)), 1)]
    one, other = ExtrapSGD(ours, **settings), ExtrapSGD(theirs, **settings)
    for _ in range(4):
        mean = one.step(gradients=pairs)
        wanted = other.step([lambda target=target: closure(target) for target in targets])
        torch.testing.assert_close(mean, wanted.to(mean))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-9)
        assert p.grad is None


def test_gradients_of_several_workers_that_make_no_sense_are_refused():
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = ExtrapSGD([w], lr=0.1, inner_lr=0.1)

    def same(points):
        return None, points

    with pytest.raises(ValueError, match="got neither"):
        optimizer.step()
    with pytest.raises(ValueError, match="got both"):
        optimizer.step([lambda: None], gradients=[(same, 1)])
    with pytest.raises(TypeError, match="gradients must be a list of pairs"):
        optimizer.step(gradients=same)
    with pytest.raises(ValueError, match=r"the number of workers must be >= 1, got \[2, 0\]"):
        optimizer.step(gradients=[(same, 2), (same, 0)])
    with pytest.raises(ValueError, match="must return the loss and a list of gradients, got 1"):
        optimizer.step(gradients=[(lambda _: 1, 3)])
    for wrong in ([], [torch.ones(2)], iter([])):
        with pytest.raises(ValueError, match=r"of the shapes \[\(3, 2\)\]"):
            optimizer.step(gradients=[(lambda _, wrong=wrong: (0.0, wrong), 3)])
    assert optimizer.step(gradients=[(lambda _: (None, [None]), 3)]) is None
    assert torch.equal(w.detach(), torch.ones(2))


def test_the_loss_is_that_of_the_first_computation_even_if_the_function_reuses_its_tensor():
    w = torch.nn.Parameter(torch.ones(2))
    kept = torch.zeros(())

    def gradients(points):
        (found,) = torch.autograd.grad(points[0].requires_grad_().square().sum(), points)
        return kept.copy_(points[0].detach().square().sum()), [found]

    assert ExtrapSGD([w], lr=0.1, inner_lr=0.1).step(gradients=[(gradients, 1)]) == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extrap_sgd_returns_the_mean_loss_at_the_weights_before_the_step(dtype):
    workers = Workers(dtype)
    optimizer = ExtrapSGD(workers.params, lr=0.05, inner_lr=0.1)
    expected = sum(float(workers.loss(k, workers.params).detach()) for k in range(3)) / 3
    loss = optimizer.step([workers.closure(k) for k in range(3)])
    assert float(loss) == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-2)
    assert not loss.requires_grad
    assert optimizer.step([lambda: None, lambda: None]) is None
    assert optimizer.step([lambda: 1.0, lambda: 2.0]) == 1.5


@pytest.mark.parametrize("fail_on", range(1, 7))
def test_extrap_sgd_puts_weights_and_gradients_back_when_a_worker_fails(fail_on):
    workers = Workers()
    optimizer = ExtrapSGD(workers.params, lr=0.05, inner_lr=0.1)
    optimizer.step([workers.closure(k) for k in range(3)])
    workers.calls.clear()
    grads = [torch.full_like(p, 7.0) for p in workers.params]
    for p, g in zip(workers.params, grads, strict=True):
        p.grad = g
    before, state = weights(workers.params), states(optimizer)
    with pytest.raises(RuntimeError, match="worker lost"):
        optimizer.step([workers.closure(k, fail_on) for k in range(3)])
    assert len(workers.calls) == fail_on
    assert same_tensors(workers.params, before)
    assert same_states(states(optimizer), state)
    assert all(p.grad is g and bool((g == 7.0).all()) for p, g in zip(workers.params, grads, strict=True))
    assert optimizer.skipped.item() == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_extrap_sgd_that_does_not_look_ahead_is_torch_sgd(nesterov, path):
    workers, plain = Workers(), Workers()
    settings = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.03, "nesterov": nesterov}
    optimizer = ExtrapSGD(workers.params, inner_lr=0.0, **settings, **PATHS[path])
    sgd = torch.optim.SGD(plain.params, **settings)
    for _ in range(6):
        optimizer.step([workers.closure(k) for k in range(3)])
        sgd.zero_grad()
        (sum(plain.loss(k, plain.params) for k in range(3)) / 3).backward()
        sgd.step()
    for p, q in zip(workers.params, plain.params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("second_look", [False, True])
def test_extrap_sgd_skips_a_step_whose_gradients_are_not_finite_in_either_look(second_look, path):
    workers = Workers()
    optimizer = ExtrapSGD(workers.params, lr=0.05, inner_lr=0.1, **PATHS[path])
    optimizer.step([workers.closure(k) for k in range(3)])
    before, state = weights(workers.params), states(optimizer)
    calls = itertools.count()

    def spoiled():
        loss = workers.closure(1)()
        if next(calls) == int(second_look):
            workers.params[0].grad[2, 3] = math.inf
        return loss

    optimizer.step([workers.closure(0), spoiled])
    assert same_tensors(workers.params, before)
    assert same_states(states(optimizer), state)
    assert optimizer.skipped.item() == 1
    optimizer.step([workers.closure(k) for k in range(3)])
    assert optimizer.skipped.item() == 1
    assert not same_tensors(workers.params, before)


def test_extrap_sgd_leaves_parameters_that_no_worker_uses_alone():
    workers = Workers()
    unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    optimizer = ExtrapSGD([*workers.params, unused, frozen], lr=0.05, inner_lr=0.1, weight_decay=0.1)
    optimizer.step([workers.closure(k) for k in range(3)])
    assert torch.equal(unused, torch.ones_like(unused))
    assert torch.equal(frozen, torch.ones_like(frozen))
    assert not optimizer.state[unused]["momentum_buffer"].any()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_extrap_sgd_ignores_gradients_of_frozen_parameters(path, given):
    workers, alone = Workers(), Workers()
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    frozen.grad = grad = torch.full_like(frozen, 7.0) if given else None
    settings = {"lr": 0.05, "inner_lr": 0.1, "weight_decay": 0.1, **PATHS[path]}
    optimizer, other = ExtrapSGD([*workers.params, frozen], **settings), ExtrapSGD(alone.params, **settings)

    def closure():
        assert torch.equal(frozen, torch.ones_like(frozen))
        frozen.grad = torch.full_like(frozen, math.inf)
        return workers.closure(0)()

    optimizer.step([closure, closure])
    other.step([alone.closure(0)] * 2)
    assert torch.equal(frozen, torch.ones_like(frozen))
    assert frozen.grad is grad
    assert same_tensors(workers.params, alone.params)
    assert optimizer.skipped.item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_extrap_sgd_looks_ahead_with_one_rounding(dtype):
    w = torch.nn.Parameter(torch.linspace(-1, 1, 4001).to(dtype))
    g = torch.linspace(-3, 2, 4001).to(dtype)
    seen = []

    def closure():
        seen.append(w.detach().clone())
        w.grad = g.clone()

    ExtrapSGD([w], lr=0.1, inner_lr=0.37).step([closure])
    assert torch.equal(seen[1], (seen[0].float() - 0.37 * g.float()).to(dtype))
