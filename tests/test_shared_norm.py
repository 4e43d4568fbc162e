"""Norms span all parts of a gradient: several optimizers share one, and steps that see a part of it are errors."""

import gc
import sys
import types
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sngm import LAMB, LARS, SNGM
from sngm.integrations.deepspeed import share_norm
from sngm.integrations.huggingface import trainer_optimizer
from sngm.optim import SharedNorm


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def fill(model: nn.Module, step: int) -> None:
    model.zero_grad()
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()


def close(model: nn.Module, other: nn.Module) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["coupled", "after_norm", "decoupled"])
@pytest.mark.parametrize("path", [{}, {"foreach": True}, {"capturable": True}])
def test_parts_with_a_shared_norm_take_the_steps_of_one_optimizer(mode, path):
    settings = {"lr": 0.1, "weight_decay": 0.2, "weight_decay_mode": mode, **path}
    whole, parted = network(), network()
    one = SNGM(whole.parameters(), **settings)
    parts = [SNGM(layer.parameters(), **settings) for layer in (parted[0], parted[2])]
    SharedNorm(parts)
    for step in range(4):
        fill(whole, step)
        fill(parted, step)
        if step == 2:  # an inf in one part skips the step of all
            whole[0].weight.grad[0, 0] = parted[0].weight.grad[0, 0] = torch.inf
        one.step()
        for part in reversed(parts) if step % 2 else parts:
            part.step()
            torch.testing.assert_close(part.grad_norm, one.grad_norm)
    close(parted, whole)
    assert [part.skipped.item() for part in parts] == [1, 1]


def test_a_part_that_steps_twice_is_an_error():
    model = network()
    parts = [SNGM(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    SharedNorm(parts)
    fill(model, 0)
    parts[0].step()
    with pytest.raises(RuntimeError, match=r"optimizers\[0\] of a SharedNorm steps again, but \[1\] have not"):
        parts[0].step()


def test_optimizers_without_a_norm_over_all_parameters_are_refused():
    model = network()
    for wrong in (LARS(model.parameters(), lr=0.1), SNGM(model.parameters(), lr=0.1, scope="tensor")):
        with pytest.raises(TypeError, match=r"optimizers\[0\] must be SNGM with scope='global'"):
            SharedNorm([wrong])
    with pytest.raises(ValueError, match="at least one"):
        SharedNorm([])
    part = SNGM(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="optimizers must be a list of optimizers, got SNGM"):
        SharedNorm(part)
    with pytest.raises(ValueError, match=r"optimizers\[1\] is in the list twice"):
        SharedNorm([part, part])
    SharedNorm([part])
    with pytest.raises(ValueError, match="already has a shared norm"):
        SharedNorm([part])


@pytest.mark.parametrize("wrapped", [False, True])
def test_share_norm_needs_the_engine(wrapped):
    model = network()
    optimizer = SNGM(model.parameters(), lr=0.1)
    zero = types.SimpleNamespace(optimizer=optimizer)  # DeepSpeed's wrapper also has an attribute `optimizer`
    for wrong in (None, model, zero if wrapped else optimizer):
        with pytest.raises(TypeError, match=r"engine must be what deepspeed.initialize returned first, got"):
            share_norm(wrong)


@pytest.mark.parametrize(
    ("cls", "settings", "error", "text"),
    [
        ("sngm", {"lr": 0.1}, TypeError, "cls must be an optimizer class, such as sngm.SNGM, got 'sngm'"),
        (nn.Linear, {"lr": 0.1}, TypeError, "cls must be an optimizer class"),
        (SNGM(network().parameters(), lr=0.1), {"lr": 0.1}, TypeError, "got an object of SNGM"),
        (SNGM, {}, TypeError, "needs lr"),
        (SNGM, {"lr": -1}, ValueError, "lr must be"),
        (SNGM, {"lr": 0.1, "momentun": 0.9}, TypeError, "momentun"),
        (torch.optim.AdamW, {"lr": 0.1, "betas": (2.0, 0.9)}, ValueError, "beta"),
    ],
)
def test_an_optimizer_that_the_trainer_could_not_build_is_an_error_at_once(cls, settings, error, text):
    with pytest.raises(error, match=text):
        trainer_optimizer(cls, **settings)
    for right in (SNGM, torch.optim.AdamW):
        assert trainer_optimizer(right, lr=0.1, fused=True)[1] == {"lr": 0.1, "fused": True}


def groups(model: nn.Module) -> list[dict]:
    return [{"params": list(model[0].parameters()), "weight_decay": 0.1}, {"params": list(model[2].parameters())}]


@pytest.mark.parametrize("hide", ["remove", "empty"])
def test_a_step_that_sees_some_of_the_groups_is_an_error(hide):
    model = network()
    optimizer = SNGM(groups(model), lr=0.1)
    fill(model, 0)
    optimizer.step()
    if hide == "remove":
        optimizer.param_groups = optimizer.param_groups[:1]
    else:
        optimizer.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match=r"step\(\) sees 1 of the 2 parameter groups"):
        optimizer.step()


def test_groups_that_were_empty_from_the_start_are_allowed():
    model = network()
    optimizer = SNGM([{"params": []}, *groups(model)], lr=0.1)
    optimizer.param_groups = optimizer.param_groups[1:]  # as DeepSpeed does
    fill(model, 0)
    optimizer.step()


def test_methods_without_a_norm_over_groups_may_see_some_of_them_and_keep_the_state_of_the_rest():
    model, twin = network(), network()
    ours, reference = SNGM(groups(model), lr=0.1, scope="group"), SNGM(groups(twin), lr=0.1, scope="group")
    for step in range(3):
        fill(model, step)
        fill(twin, step)
        reference.step()
        for group in (every := ours.param_groups):
            ours.param_groups = [group]
            ours.step()
        ours.param_groups = every
    close(model, twin)
    assert ours.state_dict()["state"].keys() == reference.state_dict()["state"].keys()


def flatten(optimizer, monkeypatch) -> None:
    """Replace the parameters of each group by a flat copy, as DeepSpeed does."""
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    for group in optimizer.param_groups:
        flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in group["params"]]))
        flat.grad = torch.cat([p.grad.reshape(-1) for p in group["params"]])
        group["params"] = [flat]


@pytest.mark.parametrize(("cls", "settings"), [(LARS, {}), (LAMB, {}), (SNGM, {"scope": "tensor"})])
def test_layerwise_methods_refuse_flattened_parameters(cls, settings, monkeypatch):
    model = network()
    optimizer = cls(groups(model), lr=0.1, **settings)
    fill(model, 0)
    flatten(optimizer, monkeypatch)
    with pytest.raises(ValueError, match="needs the norm of each tensor, but DeepSpeed has flattened"):
        optimizer.step()


def test_the_global_norm_of_flattened_parameters_is_right_and_their_state_is_saved(monkeypatch):
    model, twin = network(), network()
    optimizer, reference = SNGM(groups(model), lr=0.1), SNGM(groups(twin), lr=0.1)
    fill(model, 0)
    fill(twin, 0)
    flatten(optimizer, monkeypatch)
    assert len(optimizer.state_dict()["state"]) == 2
    reference.step()
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, reference.grad_norm, rtol=1e-12, atol=0.0)
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    expected = [torch.cat([p.reshape(-1) for p in layer.parameters()]) for layer in (twin[0], twin[2])]
    torch.testing.assert_close([p.data for p in flat], [p.data for p in expected], rtol=1e-12, atol=1e-12)
    assert list(optimizer.state) == flat  # nothing of the whole parameters is left


def test_state_that_does_not_fit_the_parameters_that_came_is_never_lost_silently(monkeypatch):
    model = network()
    optimizer = SNGM(groups(model), lr=0.1)
    fill(model, 0)
    optimizer.step()
    flatten(optimizer, monkeypatch)
    for act in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ValueError, match="4 parameters that have taken steps were replaced"):
            act()
    for p in model.parameters():
        del optimizer.state[p]
    optimizer.step()


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("method", [partial(SNGM, lr=0.1), partial(LAMB, lr=0.01)])
def test_state_from_before_sharding_moves_along_with_the_parameters(method, one_rank):
    model, twin = network(), network()
    optimizer, reference = method(groups(model)), method(groups(twin))
    for step in range(2):
        for each, by in ((model, optimizer), (twin, reference)):
            fill(each, step)
            by.step()
    fill(twin, 2)
    reference.step()
    fill(model, 2)
    mesh, old = init_device_mesh("cpu", (1,)), []
    for group in optimizer.param_groups:  # as Accelerate does
        for i, p in enumerate(group["params"]):
            old.append(weakref.ref(p))
            group["params"][i] = nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)]))
            group["params"][i].grad = distribute_tensor(p.grad, mesh, [Shard(0)])
    del model, group, p
    saved = optimizer.state_dict()["state"]
    assert all(isinstance(entry[optimizer.BUFFERS[0]], DTensor) for entry in saved.values())
    optimizer.step()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p, q in zip(params, twin.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-12, atol=1e-12)
    assert list(optimizer.state) == params
    gc.collect()
    assert not any(ref() is not None for ref in old)


def test_a_weight_decay_that_no_group_uses_is_an_error():
    every = [{**group, "weight_decay": 0.0} for group in groups(network())]
    with pytest.raises(ValueError, match=r"weight_decay=0.1 has no effect.*trainer_optimizer"):
        SNGM(every, lr=0.1, weight_decay=0.1)
    SNGM([{**every[0], "weight_decay": 0.1}, every[1]], lr=0.1, weight_decay=0.1)
