"""Loss scaling: a scaled run equals the unscaled one, and a step with an overflow changes nothing."""

import math

import pytest
import torch
from harness import (
    KINDS,
    PATHS,
    RULES,
    build,
    gradients,
    make_params,
    pairwise,
    run,
    same_states,
    same_tensors,
    states,
    weights,
)

from sngm import CLARS, ExtrapSGD

SCALABLE = [rule for rule in RULES if rule != "extrap-sgd"]  # it computes gradients inside step()
INVARIANT = {
    "without decay": {"weight_decay": 0.0},
    "after_norm": {"weight_decay": 0.05, "weight_decay_mode": "after_norm"},
    "decoupled": {"weight_decay": 0.05, "weight_decay_mode": "decoupled"},
    "per group": {"weight_decay": 0.05, "weight_decay_mode": "decoupled", "scope": "group"},
    "per tensor": {"weight_decay": 0.05, "weight_decay_mode": "after_norm", "scope": "tensor", "nesterov": True},
}


class Training:
    """A small network; `step` scales its loss if there is a scaler, and multiplies it by inf with `spoil`."""

    def __init__(self, rule, scale=None, **settings):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))
        self.params = list(self.model.parameters())
        self.optimizer = build(rule, self.params, **settings)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2) if scale else None

    def step(self, t, spoil=1.0, clip=None):
        generator = torch.Generator().manual_seed(t)
        data, target = torch.randn(20, 6, generator=generator), torch.randn(20, 3, generator=generator)
        self.optimizer.zero_grad()
        loss = spoil * torch.nn.functional.mse_loss(self.model(data), target)
        scale = self.scaler.get_scale() if self.scaler else 1.0
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        extra = {}
        if isinstance(self.optimizer, CLARS):
            extra["mean_norms"] = [p.grad.norm() / scale + 0.5 for p in self.params]
        if clip is not None:
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.params, clip)
        if self.scaler:
            self.scaler.step(self.optimizer, **extra)
            self.scaler.update()
        else:
            self.optimizer.step(**extra)

    def snapshot(self):
        return weights(self.params), states(self.optimizer)


def agree(ours, theirs):
    return same_tensors(ours[0], theirs[0]) and same_states(ours[1], theirs[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", KINDS)
def test_only_an_explicit_fused_takes_over_from_the_scaler(rule, path):
    optimizer = build(rule, make_params(), path)
    assert optimizer._step_supports_amp_scaling is (path == "fused" or rule == "extrap-sgd")


def test_one_group_that_is_not_fused_leaves_scaling_to_the_scaler():
    params = make_params()
    groups = [{"params": params[:2]}, {"params": params[2:], "fused": False}]
    assert build("sngm", groups, fused=True)._step_supports_amp_scaling is False


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", [rule for rule in KINDS if rule in SCALABLE])
def test_a_scale_that_was_halved_until_it_is_zero_skips_the_step(rule, path):
    """With scale 0 all gradients are zero."""
    optimizer = build(rule, params := make_params(), path)
    before = weights(params), states(optimizer)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.grad_scale, optimizer.found_inf = torch.zeros(1), torch.zeros(1)
    optimizer.step(**({"mean_norms": [1.0] * len(params)} if rule == "clars" else {}))
    assert agree((weights(params), states(optimizer)), before)
    assert optimizer.skipped.item() == 1
    assert not optimizer.grad_norm.isfinite()


@pytest.mark.parametrize(("rule", "fused", "overflows"), pairwise(SCALABLE, [None, True], [(0, 3), (2,)]))
def test_overflowed_steps_leave_no_trace_and_the_rest_equals_the_unscaled_run(rule, fused, overflows):
    plain = Training(rule)
    scaled = Training(rule, scale=2.0**12, fused=fused)
    for t in range(5):
        if t not in overflows:
            plain.step(t)
            scaled.step(t)
            assert scaled.optimizer.grad_norm == plain.optimizer.grad_norm
        else:
            before, scale = scaled.snapshot(), scaled.scaler.get_scale()
            scaled.step(t, spoil=math.inf if t else math.nan)
            assert agree(scaled.snapshot(), before)
            assert scaled.scaler.get_scale() == scale / 2
        assert agree(scaled.snapshot(), plain.snapshot())
    # if the scaler skips, step() is not called
    assert scaled.optimizer.skipped.item() == (len(overflows) if fused else 0)
    start = Training(rule)
    assert not same_tensors(scaled.params, start.params)
    assert not hasattr(scaled.optimizer, "found_inf")


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("rule", ["sngm", "lars", "lamb"])
def test_gradients_unscaled_and_clipped_by_the_user_are_not_unscaled_again(rule, fused):
    plain, scaled = Training(rule), Training(rule, scale=2.0**12, fused=fused)
    for t in range(4):
        if t == 1:
            scaled.step(t, spoil=math.inf, clip=0.25)
            continue
        plain.step(t, clip=0.25)
        scaled.step(t, clip=0.25)
        assert agree(scaled.snapshot(), plain.snapshot())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", [rule for rule in KINDS if rule in SCALABLE and rule != "clars"])
def test_a_scale_costs_no_accuracy_in_double_precision(rule, path):
    params, twins = make_params(torch.float64), make_params(torch.float64)
    optimizer, twin = build(rule, params, path), build(rule, twins, path)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor([1024.0]), torch.zeros(1)
    for t in range(2):
        for p, g in zip(params, gradients(params, t), strict=True):
            p.grad = g * 1024.0
        optimizer.step()
        run(twin, twins, 1, start=t)
    for ours, theirs in zip([*params, optimizer.grad_norm], [*twins, twin.grad_norm], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", SCALABLE)
def test_any_found_inf_but_zero_skips_and_the_gradients_are_divided_by_the_scale(rule, path):
    params, twins = make_params(), make_params()
    optimizer, twin = build(rule, params, path), build(rule, twins, path)

    def scaled_step(t, found_inf):
        shape = () if t < 2 else (1,)  # both shapes are in use
        optimizer.grad_scale = torch.full(shape, 8.0)
        optimizer.found_inf = torch.full(shape, float(found_inf))  # a sum over devices
        grads = gradients(params, t)
        for p, g in zip(params, grads, strict=True):
            p.grad = g * 8.0
        extra = {"mean_norms": [float(g.double().norm()) + 0.5 for g in grads]} if rule == "clars" else {}
        optimizer.step(**extra)

    skips = 0
    for t, found_inf in enumerate([1, 0, 2, 0]):
        before, state = weights(params), states(optimizer)
        scaled_step(t, found_inf)
        if found_inf:
            skips += 1
            assert same_tensors(params, before)
            assert same_states(states(optimizer), state)
        else:
            run(twin, twins, 1, start=t)
            assert not same_tensors(params, before)
            assert torch.equal(optimizer.grad_norm, twin.grad_norm)
        assert optimizer.grad_norm.shape == ()
        assert optimizer.skipped.shape == ()
        assert optimizer.skipped.item() == skips
        assert same_tensors(params, twins)
        assert same_states(states(optimizer), states(twin))


@pytest.mark.parametrize(("case", "scale", "path"), pairwise(INVARIANT, [2.0**8, 2.0**-10], PATHS))
def test_scaling_the_loss_by_a_power_of_two_changes_no_bit_of_an_sngm_run(case, scale, path):
    runs = []
    for factor in (1.0, scale):
        params = make_params()
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer = build("sngm", groups, path, **INVARIANT[case])
        for t in range(4):
            for p, g in zip(params, gradients(params, t), strict=True):
                p.grad = g * factor
            optimizer.step()
        runs.append((params, optimizer))
    assert same_tensors(runs[0][0], runs[1][0])
    assert same_states(states(runs[0][1]), states(runs[1][1]))
    assert torch.equal(runs[0][1].grad_norm * scale, runs[1][1].grad_norm)


@pytest.mark.parametrize("scale", [1e-6, 0.3, 1e9])
@pytest.mark.parametrize("case", INVARIANT)
def test_scaling_the_loss_by_any_number_does_not_change_an_sngm_run(case, scale):
    runs = []
    for factor in (1.0, scale):
        params = make_params(torch.float64)
        optimizer = build("sngm", [{"params": params[:2]}, {"params": params[2:]}], **INVARIANT[case])
        for t in range(10):
            for p, g in zip(params, gradients(params, t), strict=True):
                p.grad = g * factor
            optimizer.step()
        runs.append(params)
    for a, b in zip(*runs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


def test_coupled_decay_is_part_of_the_loss_and_does_see_its_scale():
    runs = []
    for factor in (1.0, 4.0):
        params = make_params(torch.float64)
        optimizer = build("sngm", params, weight_decay=0.05 * factor)
        for t in range(10):
            for p, g in zip(params, gradients(params, t), strict=True):
                p.grad = g * factor
            optimizer.step()
        runs.append(params)
    for a, b in zip(*runs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)
    other = make_params(torch.float64)
    optimizer = build("sngm", other, weight_decay=0.05)
    for t in range(10):
        for p, g in zip(other, gradients(other, t), strict=True):
            p.grad = g * 4.0
        optimizer.step()
    assert not torch.allclose(other[0], runs[0][0], rtol=1e-3)


@pytest.mark.parametrize("given", [True, False])
def test_extrap_sgd_refuses_a_scaler_and_changes_nothing(given):
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = ExtrapSGD([w], lr=0.1, inner_lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(w.sum()).backward()
    with pytest.raises(TypeError, match=r"GradScaler.*step\(closures\)"):
        scaler.step(optimizer, *([[lambda: scaler.scale(w.square().sum()).backward()]] if given else []))
    assert torch.equal(w, torch.ones(3))
    optimizer.step([lambda: w.sum().backward()])  # works without the scaler afterwards
    torch.testing.assert_close(w.detach(), torch.full((3,), 0.9))
