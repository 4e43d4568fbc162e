"""`sngm.check` finds each fault of a set-up by name, and none where there is none."""

import pytest
import torch
from torch import nn

import sngm
from sngm import CLARS, SNGM
from sngm.optim import SharedNorm


class Wrapper:
    """A wrapper as Accelerate's, which calls `step` without arguments."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


def build(**settings):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return model, SNGM(model.parameters(), **{"lr": 0.1, "weight_decay": 0.1, **settings})


def backward(model):
    model(torch.randn(6, 4, dtype=torch.float64)).square().mean().backward()


def faults(model, optimizer, step) -> dict[str, str]:
    found = sngm.check(model, optimizer, step)
    assert found.ok == (not found.faults)
    for finding in found.findings:
        assert finding.text in str(found)
    return {finding.name: finding.text for finding in found.faults}


def stepping(model, optimizer, *, before=lambda: None):
    def step():
        optimizer.zero_grad()
        backward(model)
        before()
        optimizer.step()

    return step


@pytest.mark.parametrize("settings", [{}, {"scope": "tensor"}, {"weight_decay_mode": "decoupled"}, {"maximize": True}])
def test_a_right_set_up_has_no_fault(settings):
    model, optimizer = build(**settings)
    assert faults(model, Wrapper(optimizer), stepping(model, optimizer)) == {}
    assert "_take_step" not in vars(optimizer)


def test_parts_that_do_not_share_their_norm_are_found_and_those_that_do_are_right():
    model, _ = build()
    parts = [SNGM(part.parameters(), lr=0.1) for part in (model[0], model[2])]

    def step():
        model.zero_grad()
        backward(model)
        for part in parts:
            part.step()

    assert "SharedNorm" in faults(model, parts, step)["norm"]
    SharedNorm(parts)
    assert faults(model, parts, step) == {}


def test_clipping_is_found_where_it_matters():
    model, optimizer = build()
    clip = stepping(model, optimizer, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    assert "at 0.001" in faults(model, optimizer, clip)["clipping"]
    model, optimizer = build(weight_decay=0.0)
    clip = stepping(model, optimizer, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    assert faults(model, optimizer, clip) == {}
    for decay in (0.1, 0.0):
        model, optimizer = build(weight_decay=decay)
        clip = stepping(model, optimizer, before=lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-3))  # noqa: B023
        assert "single entries, at 0.001" in faults(model, optimizer, clip)["clipping"]
    model, optimizer = build()
    assert "ok    clipping: none seen" in str(sngm.check(model, optimizer, stepping(model, optimizer)))


@pytest.mark.parametrize("factors", [[1 / 3], [1.0, 1 / 3], [], [1.0]])
def test_a_sum_over_micro_batches_is_told_from_a_mean(factors):
    model, optimizer = build()

    def step():
        for _ in range(3):
            loss = model(torch.randn(6, 4, dtype=torch.float64)).square().mean()
            for factor in factors:
                loss = loss * factor
            loss.backward()
        optimizer.step()

    found = faults(model, optimizer, step)
    assert found == {} if 1 / 3 in factors else "3 times too weak" in found["accumulation"]


@pytest.mark.parametrize(("decay", "ok"), [(0.1, None), (0.0, True)])
@pytest.mark.parametrize("kind", ["sum", "scaler"])
def test_an_accumulation_that_cannot_be_judged_is_not_known(kind, decay, ok):
    model, optimizer = build(weight_decay=decay)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=kind == "scaler")
    before = torch.amp.GradScaler.scale

    def step():
        for _ in range(3):
            loss = model(torch.randn(6, 4, dtype=torch.float64)).square().mean()
            scaler.scale(loss / 3 + loss / 3 if kind == "sum" else loss).backward()
        scaler.step(optimizer)

    found = sngm.check(model, optimizer, step)
    assert found.ok
    (finding,) = (finding for finding in found.findings if finding.name == "accumulation")
    assert finding.ok is ok
    assert ("?     accumulation: not known" in str(found)) == (ok is None)
    assert torch.amp.GradScaler.scale is before


def test_a_scheduler_that_cycles_the_momentum_is_found():
    model, optimizer = build()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    assert "cycle_momentum=False" in faults(model, optimizer, stepping(model, optimizer))["momentum"]


def test_parameters_of_another_model_or_of_none_are_found():
    model, optimizer = build()
    other, _ = build()
    assert "not the model's" in faults(other, optimizer, stepping(model, optimizer))["state"]
    part = SNGM(model[0].parameters(), lr=0.1)
    assert "2 parameters" in faults(model, part, stepping(model, part))["parameters"]


def test_stale_state_is_found():
    model, optimizer = build()
    optimizer.state[nn.Parameter(torch.ones(2))] = {"momentum_buffer": torch.ones(2)}
    assert "1 parameters" in faults(model, optimizer, stepping(model, optimizer))["state"]


def test_a_step_that_fails_is_reported_with_its_message():
    model, _ = build()
    optimizer = CLARS(model.parameters(), lr=0.1)
    assert "measure_norms(optimizer)" in faults(model, optimizer, stepping(model, optimizer))["step"]
    model, optimizer = build()
    assert "did not call" in faults(model, optimizer, lambda: None)["step"]


def test_clars_measures_its_norms_where_a_trainer_calls_step():
    model, _ = build()
    twin, _ = build()
    twin.load_state_dict(model.state_dict())
    ours, reference = CLARS(model.parameters(), lr=1.0), CLARS(twin.parameters(), lr=1.0)
    sngm.integrations.measure_norms(Wrapper(ours))
    for step in range(3):
        batches = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        ours.zero_grad()
        for x in batches:
            (model(x).square().mean() / 2).backward()
        ours.step()
        parts = [torch.autograd.grad(twin(x).square().mean(), list(twin.parameters())) for x in batches]
        for p, a, b in zip(twin.parameters(), *parts, strict=True):
            p.grad = (a + b) / 2
        reference.step(mean_norms=[(a.norm() + b.norm()) / 2 for a, b in zip(*parts, strict=True)])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="is for CLARS"):
        sngm.integrations.measure_norms(build()[1])
