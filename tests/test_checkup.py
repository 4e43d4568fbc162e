"""`sngm.check` finds each fault of a set-up by name, and none where there is none."""

import pytest
import torch
from torch import nn

import sngm
from sngm import CLARS, LAMB, LARS, NSGDM, SNGM, SpectralSNGM
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
    clip = stepping(model, optimizer, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e3))
    assert "?     clipping: on, but without effect on this step" in str(sngm.check(model, optimizer, clip))
    model, optimizer = build()
    assert "ok    clipping: none seen" in str(sngm.check(model, optimizer, stepping(model, optimizer)))


@pytest.mark.parametrize(
    ("cls", "settings", "matters"),
    [
        (SpectralSNGM, {"weight_decay": 0.1}, False),
        (SpectralSNGM, {"order": "after"}, True),
        (SpectralSNGM, {"ball": "rows"}, True),
        (SpectralSNGM, {"ball": "rows", "row_beta": 0.0}, False),
        (NSGDM, {}, True),
        (LAMB, {}, True),
    ],
)
def test_clipping_matters_unless_each_gradient_is_normalised_before_anything_is_added(cls, settings, matters):
    model, _ = build()
    optimizer = cls(model.parameters(), lr=0.1, **settings)
    clip = stepping(model, optimizer, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    assert ("clipping" in faults(model, optimizer, clip)) is matters


def mean(outputs):
    return outputs.square().mean()


def divide_gradients(model):
    for p in model.parameters():
        p.grad /= 3


# of three micro-batches: the loss, the arguments of backward, what follows the last one, whether the result is a mean
ACCUMULATED = {
    "mean": (lambda y: mean(y) / 3, (), None, True),
    "mean by two factors": (lambda y: mean(y) * 1.0 * (1 / 3), (), None, True),
    "mean by a tensor on the left": (lambda y: torch.tensor(1 / 3) * mean(y), (), None, True),
    "mean by a tensor of bfloat16": (lambda y: torch.tensor(1 / 3).bfloat16() * mean(y), (), None, True),
    "mean by the gradient of backward": (mean, (torch.tensor(1 / 3, dtype=torch.float64),), None, True),
    "mean by divided gradients": (mean, (), divide_gradients, True),
    "mean, cast, of a loss of terms": (lambda y: ((mean(y) + mean(y)) / 3).float(), (), None, True),
    "sum": (mean, (), None, False),
    "sum, multiplied by 1": (lambda y: mean(y) * 1.0, (), None, False),
    "sum by nn.functional": (lambda y: nn.functional.mse_loss(y, torch.zeros_like(y)), (), None, False),
    "doubled": (lambda y: 2 * mean(y), (), None, None),
    "halved": (lambda y: mean(y) / 2, (), None, None),
    "divided twice": (lambda y: mean(y) / 3, (), divide_gradients, None),
    "sum over samples": (lambda y: y.square().sum() / 3, (), None, None),
    "sum over samples by nn.functional": (
        lambda y: nn.functional.mse_loss(y, torch.zeros_like(y), reduction="sum") / 36,
        (),
        None,
        None,
    ),
    "an own last operation": (lambda y: mean(y).sqrt(), (), None, None),
    "product of losses": (lambda y: mean(y) * mean(y), (), None, None),
}


def accumulated(model, optimizer, case):
    """Return the finding about a step of three micro-batches."""
    loss, arguments, after, _ = ACCUMULATED[case]

    def step():
        for _ in range(3):
            loss(model(torch.randn(6, 4, dtype=torch.float64))).backward(*arguments)
        if after:
            after(model)
        optimizer.step()

    (found,) = (f for f in sngm.check(model, optimizer, step).findings if f.name == "accumulation")
    return found


@pytest.mark.parametrize("case", ACCUMULATED)
def test_a_sum_over_micro_batches_is_told_from_a_mean_where_the_loss_tells_it(case):
    found = accumulated(*build(), case)
    assert found.ok is ACCUMULATED[case][-1]
    if found.ok is False:
        assert "weight decay is 3 times too weak" in found.text
    else:
        assert ("not known" if found.ok is None else "mean over 3 micro-batches") in found.text


@pytest.mark.parametrize(
    ("cls", "settings", "ok"),
    [
        (LAMB, {"weight_decay": 0.1}, True),
        (SpectralSNGM, {"weight_decay": 0.1}, True),
        (NSGDM, {"weight_decay": 0.1, "weight_decay_mode": "decoupled"}, True),
        (SNGM, {"weight_decay": 0.1, "weight_decay_mode": "decoupled"}, True),
        (SNGM, {}, True),
        (NSGDM, {"weight_decay": 0.1}, False),
        (LARS, {}, False),
    ],
)
def test_a_sum_is_no_fault_of_methods_whose_steps_do_not_depend_on_it(cls, settings, ok):
    model, _ = build()
    found = accumulated(model, cls(model.parameters(), lr=0.1, **settings), "sum")
    assert found.ok is ok
    assert ("because the step is normalised" if ok else "3 times too") in found.text


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


def test_processes_without_a_process_group_are_found(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for cls in (SNGM, LARS):
        model, _ = build()
        optimizer = cls(model.parameters(), lr=0.1)
        text = faults(model, optimizer, stepping(model, optimizer))["ranks"]
        assert "WORLD_SIZE is 2, but there is no process group" in text
        assert "init_process_group() and wrap the model in DDP or FSDP" in text


def test_a_step_without_a_gradient_is_found():
    model, optimizer = build()
    found = faults(model, optimizer, optimizer.step)
    assert found == {"step": "no parameter has a gradient: backward was not called before the step"}
    found = faults(model, optimizer, stepping(model, optimizer, before=optimizer.zero_grad))
    assert "cleared before the step" in found["step"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_a_gradient_that_is_not_finite_is_named(value, scope):
    model, optimizer = build(scope=scope)
    found = faults(model, optimizer, stepping(model, optimizer, before=lambda: model[0].weight.grad.fill_(value)))
    assert list(found) == ["norm"]
    assert "the gradient is NaN or infinite, so the step was skipped" in found["norm"]
    assert optimizer.skipped == 1


def test_a_step_that_a_grad_scaler_skipped_is_named():
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(model(torch.full((6, 4), torch.inf, dtype=torch.float64)).sum()).backward()
        scaler.step(optimizer)

    assert "a GradScaler skipped it because the gradient is NaN or infinite" in faults(model, optimizer, step)["step"]


def test_two_steps_are_found():
    model, optimizer = build()
    found = faults(model, optimizer, stepping(model, optimizer, before=optimizer.step))
    assert found == {"step": "the step function took 2 steps and must take one"}


def test_arguments_of_another_kind_are_errors():
    model, optimizer = build()
    with pytest.raises(TypeError, match="step_fn must be a function without arguments, got NoneType"):
        sngm.check(model, optimizer, None)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        sngm.check(list(model.parameters()), optimizer, stepping(model, optimizer))


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
