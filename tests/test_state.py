"""Optimizer state: exists from the start, in float32 or better, and is unchanged by saving, loading and copying."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import (
    BUFFERS,
    DTYPES,
    KINDS,
    LOW,
    PATHS,
    RULES,
    SHAPES,
    build,
    clone_params,
    combinations,
    gradients,
    make_params,
    run,
    same,
    same_states,
    same_tensors,
    states,
    step,
    through_disk,
    weights,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from sngm import CLARS, LAMB, LARS, NSGDM, SNGM, ExtrapSGD
from sngm.optim import reference

HEAVY_BALL = {  # methods with the state of torch's SGD
    "sngm": SNGM,
    "lars": LARS,
    "clars": CLARS,
    "extrap-sgd": ExtrapSGD,
}


SAVED = [  # every path in the usual dtypes, and the default path in all
    *combinations(dtypes=[torch.float32, torch.bfloat16]),
    *((rule, "default", dtype) for rule in RULES for dtype in (torch.float64, torch.float16)),
]


def keys(rule):
    cls, settings = RULES[rule]
    return BUFFERS.get(cls, {"momentum_buffer"} if settings.get("momentum", 0.9) else set())


def split(params):
    """Split parameters into two groups, so that a checkpoint has more than one."""
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]


def resumed(rule, path, optimizer, params, state_dict):
    twins = clone_params(params)
    twin = build(rule, split(twins), path)
    twin.load_state_dict(state_dict)
    return twin, twins


@pytest.fixture
def group(tmp_path):
    """Return a process group with one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# -------------------------------------------------------------------- initial state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", KINDS)
def test_zero_state_in_float32_or_better_exists_before_the_first_step(rule, dtype):
    params = make_params(dtype)
    optimizer = build(rule, params)
    for p in params:
        state = dict(optimizer.state[p])
        if RULES[rule][0] is LAMB:
            t = state.pop("step")
            assert t.shape == ()
            assert t.item() == 0.0
        assert state.keys() == keys(rule)
        for buffer in state.values():
            assert buffer.dtype == (torch.float32 if dtype in LOW else dtype)
            assert buffer.shape == p.shape
            assert not buffer.any()


@pytest.mark.parametrize(("rule", "path", "dtype"), combinations(KINDS, [torch.bfloat16]))
def test_state_of_low_precision_parameters_stays_float32_while_training(rule, path, dtype):
    params = make_params(dtype)
    optimizer = build(rule, params, path)
    run(optimizer, params)
    for p in params:
        for buffer in keys(rule):
            assert optimizer.state[p][buffer].dtype == torch.float32
            # and it is used in float32: rounded to the parameter's dtype it would differ
            assert p.numel() < 9 or not torch.equal(
                optimizer.state[p][buffer].to(dtype).float(), optimizer.state[p][buffer]
            )


@pytest.mark.parametrize("rule", KINDS)
def test_a_frozen_parameter_has_no_state_until_it_thaws_and_then_trains(rule):
    params = make_params()
    frozen = params[2]
    frozen.requires_grad_(False)
    before = frozen.clone()
    optimizer = build(rule, params)
    assert optimizer.state[frozen] == {}
    run(optimizer, params)
    assert optimizer.state[frozen] == {}
    assert torch.equal(frozen, before)

    # the same for an optimizer created while the parameter was trainable, without a gradient
    twins = make_params()
    twin = build(rule, twins)
    for t in range(2):
        step(twin, twins, [None if i == 2 else g for i, g in enumerate(gradients(twins, t))])
    frozen.requires_grad_(True)
    run(optimizer, params, start=2)
    run(twin, twins, start=2)
    assert not torch.equal(frozen, before)
    assert set(optimizer.state[frozen]) - {"step"} == keys(rule)
    assert same(optimizer, params, twin, twins)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", KINDS)
def test_freezing_mid_run_leaves_weight_and_state_alone_and_outside_the_norm(rule, path):
    params = make_params(torch.float64)
    optimizer = build(rule, params, path, weight_decay=0.0)
    run(optimizer, params)
    params[0].requires_grad_(False)
    params[0].grad = None
    before, state = params[0].clone(), copy.deepcopy(optimizer.state[params[0]])
    for t in range(2, 4):
        grads = [None, *gradients(params, t)[1:]]
        step(optimizer, params, grads)
        expected = torch.cat([g.flatten() for g in grads[1:]]).norm()
        assert torch.allclose(optimizer.grad_norm, expected, rtol=1e-13)
    assert torch.equal(params[0], before)
    assert same_states([optimizer.state[params[0]]], [state])


@pytest.mark.parametrize("rule", KINDS)
def test_a_group_added_in_the_middle_trains_as_if_it_had_always_been_there_without_gradients(rule):
    params, twins = make_params(), make_params()
    optimizer = build(rule, params[:3])
    twin = build(rule, [{"params": twins[:3]}, {"params": twins[3:], "lr": 0.02}])
    run(optimizer, params[:3])
    for t in range(2):
        grads = gradients(twins[:3], t)
        step(twin, twins, [*grads, None, None])
    optimizer.add_param_group({"params": params[3:], "lr": 0.02})
    for p in params[3:]:
        assert set(optimizer.state[p]) - {"step"} == keys(rule)
    run(optimizer, params, start=2)
    run(twin, twins, start=2)
    assert same(optimizer, params, twin, twins)
    assert not torch.equal(params[4], make_params()[4])


def test_add_param_group_fills_in_the_callers_dict_and_takes_a_single_tensor():
    params = make_params()
    optimizer = build("sngm", params[:3])
    added = {"params": params[3]}
    optimizer.add_param_group(added)
    assert optimizer.param_groups[1]["params"] == [params[3]]
    assert added["lr"] == 0.1
    assert added["momentum"] == 0.9


@pytest.mark.parametrize("rule", KINDS)
def test_named_parameters_train_alike_and_their_names_are_saved(rule):
    params, twins = make_params(), make_params()
    labels = [f"layer.{i}" for i in range(len(params))]
    optimizer = build(rule, params)
    named = build(rule, zip(labels, twins, strict=True))
    assert named.param_groups[0]["param_names"] == labels
    run(optimizer, params)
    run(named, twins)
    assert same(optimizer, params, named, twins)
    assert named.state_dict()["param_groups"][0]["param_names"] == labels
    named.load_state_dict(optimizer.state_dict())  # a checkpoint without names keeps them
    assert named.param_groups[0]["param_names"] == labels


@pytest.mark.parametrize("path", ["default", "capturable"])
@pytest.mark.parametrize("rule", KINDS)
def test_a_model_built_on_the_meta_device_trains_once_it_is_materialised(rule, path):
    meta = [torch.nn.Parameter(torch.empty(s, device="meta")) for s in SHAPES]
    optimizer = build(rule, meta, path)
    params = make_params()
    twin = build(rule, params, path)
    for late, real in zip(meta, params, strict=True):
        # as modules do when they are moved, so that parameters stay the same objects
        torch.utils.swap_tensors(late, torch.nn.Parameter(real.detach().clone()))
    run(optimizer, meta)
    run(twin, params)
    assert same(optimizer, meta, twin, params)
    step(optimizer, meta, [torch.full_like(p, torch.inf) for p in meta])
    assert same(optimizer, meta, twin, params)
    assert optimizer.grad_norm.device.type == "cpu"
    assert optimizer.skipped.item() == 1


@pytest.mark.parametrize("rule", KINDS)
def test_parameters_replaced_in_a_group_get_their_state_at_the_next_step(rule):
    params, twins = make_params(), make_params()
    optimizer, twin = build(rule, [torch.nn.Parameter(torch.zeros(3))]), build(rule, twins)
    optimizer.param_groups[0]["params"] = list(params)  # as sharding wrappers do
    run(optimizer, params)
    run(twin, twins)
    assert same(optimizer, params, twin, twins)


# -------------------------------------------------------------------- saving and loading


@pytest.mark.parametrize(("rule", "path", "dtype"), SAVED)
def test_a_run_resumed_from_a_saved_state_dict_continues_bit_for_bit(rule, path, dtype):
    params = make_params(dtype)
    optimizer = build(rule, split(params), path)
    run(optimizer, params)
    twin, twins = resumed(rule, path, optimizer, params, through_disk(optimizer.state_dict()))
    assert same(optimizer, params, twin, twins)
    start = weights(params)
    run(optimizer, params, start=2)
    run(twin, twins, start=2)
    assert same(optimizer, params, twin, twins)
    assert not same_tensors(params, start)


@pytest.mark.parametrize("rule", KINDS)
def test_a_fresh_optimizers_checkpoint_loads_and_changes_nothing(rule):
    params = make_params()
    optimizer = build(rule, split(params))
    twin, twins = resumed(rule, "default", optimizer, params, through_disk(optimizer.state_dict()))
    run(optimizer, params)
    run(twin, twins)
    assert same(optimizer, params, twin, twins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", KINDS)
def test_loading_does_not_share_buffers_with_the_source(rule, dtype):
    params = make_params(dtype)
    optimizer = build(rule, split(params), lr=torch.tensor(0.1))
    run(optimizer, params)
    twins = clone_params(params)
    twin = build(rule, split(twins), lr=torch.tensor(0.1))
    twin.load_state_dict(optimizer.state_dict())
    before, after = states(twin), weights(twins)
    run(optimizer, params, start=2)
    optimizer.param_groups[0]["lr"].fill_(7.0)
    assert same_states(states(twin), before)
    assert same_tensors(twins, after)
    assert twin.param_groups[0]["lr"].item() == pytest.approx(0.1)
    ours = states(optimizer)
    run(twin, twins, start=2)
    assert same_states(states(optimizer), ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", KINDS)
def test_loading_ones_own_state_dict_changes_nothing_and_keeps_float32(rule, dtype):
    params, twins = make_params(dtype), make_params(dtype)
    optimizer, twin = build(rule, params), build(rule, twins)
    run(optimizer, params)
    run(twin, twins)
    optimizer.load_state_dict(optimizer.state_dict())
    assert same(optimizer, params, twin, twins)
    run(optimizer, params, start=2)
    run(twin, twins, start=2)
    assert same(optimizer, params, twin, twins)


def test_a_checkpoint_with_low_precision_state_loads_as_float32():
    params = make_params(torch.bfloat16)
    optimizer = build("sngm", params)
    run(optimizer, params)
    saved = optimizer.state_dict()
    expected = []
    for entry in saved["state"].values():
        entry["momentum_buffer"] = entry["momentum_buffer"].bfloat16()
        expected.append(entry["momentum_buffer"].float())
    optimizer.load_state_dict(saved)
    assert same_tensors([optimizer.state[p]["momentum_buffer"] for p in params], expected)


@pytest.mark.parametrize("rule", KINDS)
def test_a_contiguous_checkpoint_resumes_in_a_channels_last_model(rule):
    params = make_params(torch.float64, [(4, 3, 5, 5)])
    optimizer = build(rule, params)
    run(optimizer, params)
    twins = [torch.nn.Parameter(p.detach().clone(memory_format=torch.channels_last)) for p in params]
    twin = build(rule, twins)
    twin.load_state_dict(optimizer.state_dict())
    run(optimizer, params, start=2)
    run(twin, twins, start=2)
    assert torch.allclose(params[0], twins[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_lacking_newer_settings_takes_this_optimizers_values(rule):
    changes = {
        SNGM: {"weight_decay_mode": "decoupled", "eps": 0.25, "nesterov": True, "momentum": 0.7},
        NSGDM: {"weight_decay_mode": "decoupled", "eps": 0.25, "momentum": 0.7},
        LARS: {"variant": "unscaled", "eps": 0.25, "phi": (0.5, 2.0), "max_ratio": 3.0, "clamp_grad": 2.0},
        CLARS: {"trust_coefficient": 0.5, "max_ratio": 0.3},
        LAMB: {"phi": (0.5, 2.0), "max_grad_norm": 0.5, "bias_correction": False},
        ExtrapSGD: {"inner_lr": 0.25, "nesterov": True},
    }[RULES[rule][0]]
    params = make_params()
    optimizer = build(rule, params, momentum=0.5) if "momentum" in changes else build(rule, params)
    run(optimizer, params)
    saved = optimizer.state_dict()
    kept = {"params", "lr", "betas"}
    saved["param_groups"] = [{k: v for k, v in g.items() if k in kept} for g in saved["param_groups"]]
    saved["param_groups"][0]["lr"] = 0.03
    twins, others = clone_params(params), clone_params(params)
    twin = build(rule, twins, maximize=True, **changes)
    twin.load_state_dict(saved)
    expected = {**changes, "maximize": True, "lr": 0.03, "weight_decay": RULES[rule][1].get("weight_decay", 0.0)}
    assert {k: twin.param_groups[0][k] for k in expected} == expected
    # and steps use them
    other = build(rule, others, maximize=True, **{**changes, "lr": 0.03})
    for p, q in zip(params, others, strict=True):
        for key, value in optimizer.state[p].items():
            other.state[q][key].copy_(value)
    run(twin, twins, start=2)
    run(other, others, start=2)
    assert same_tensors(twins, others)


@pytest.mark.parametrize("saved_by", PATHS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", ["sngm", "lamb"])
def test_how_a_step_is_computed_stays_as_constructed_whatever_the_checkpoint_says(rule, path, saved_by):
    params = make_params()
    source = build(rule, params, saved_by, lr=0.07)
    run(source, params)
    optimizer = build(rule, make_params(), path)
    flags = {k: optimizer.param_groups[0][k] for k in ("foreach", "fused", "capturable")}
    optimizer.load_state_dict(source.state_dict())
    assert {k: optimizer.param_groups[0][k] for k in flags} == flags
    assert flags == {"foreach": None, "fused": None, "capturable": False, **PATHS[path]}
    assert optimizer.param_groups[0]["lr"] == 0.07
    assert optimizer._step_supports_amp_scaling is (path == "fused")


@pytest.mark.parametrize("rule", ["sngm", "lamb", "extrap-sgd"])
def test_the_users_own_load_hooks_see_and_change_plain_tensors(rule):
    params = make_params(torch.bfloat16)
    source = build(rule, params)
    run(source, params)
    optimizer = build(rule, make_params(torch.bfloat16))
    seen = []
    key = min(keys(rule))

    def halve(opt, state_dict):
        assert opt is optimizer
        state = {
            i: {k: v * 0.5 if k == key else v for k, v in entry.items()} for i, entry in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def look(opt):
        seen.extend(opt.state[p][key].clone() for g in opt.param_groups for p in g["params"])

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(look)
    expected = [source.state[p][key] * 0.5 for p in params]
    for count in (1, 2):  # twice: no hook of ours remains registered
        optimizer.load_state_dict(source.state_dict())
        assert len(seen) == count * len(params)
        assert same_tensors(seen[-len(params) :], expected)
        assert same_tensors([entry[key] for entry in states(optimizer)], expected)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize("rule", ["sngm", "lars", "clars", "lamb", "extrap-sgd"])
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_is_touched(rule):
    params = make_params()
    optimizer = build(rule, params)
    run(optimizer, params)
    before, groups = states(optimizer), [dict(g) for g in optimizer.param_groups]

    def refused(saved, match):
        with pytest.raises(ValueError, match=match):
            optimizer.load_state_dict(saved)
        assert same_states(states(optimizer), before)
        assert optimizer.param_groups == groups
        assert not optimizer._optimizer_load_state_dict_pre_hooks

    others = make_params(shapes=[*SHAPES[:-1], (9, 1)])
    wrong = build(rule, others, lr=0.9)
    run(wrong, others)
    refused(wrong.state_dict(), rf"{min(keys(rule))} of shape \(9, 1\).*\(1, 9\)")
    refused(build(rule, params[:-1], lr=0.9).state_dict(), "group")
    refused(build(rule, [{"params": params[:1]}, {"params": params[1:]}], lr=0.9).state_dict(), "group")


# -------------------------------------------------------------------- torch's own checkpoints


def sgd_run(params, steps=2, **settings):
    optimizer = torch.optim.SGD(params, **{"lr": 0.05, "momentum": 0.8, "weight_decay": 0.02, **settings})
    for t in range(steps):
        for p, g in zip(params, gradients(params, t), strict=True):
            p.grad = g
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_torch_sgd_checkpoint_continues_as_sngm_from_its_momentum(nesterov, path):
    params = make_params(torch.float64)
    sgd = sgd_run(params, nesterov=nesterov)
    optimizer = SNGM(clone_params(params), lr=9.0, **PATHS[path])
    optimizer.load_state_dict(through_disk(sgd.state_dict()))
    group = optimizer.param_groups[0]
    assert {k: group[k] for k in ("lr", "momentum", "weight_decay", "nesterov", "dampening")} == {
        "lr": 0.05, "momentum": 0.8, "weight_decay": 0.02, "nesterov": nesterov, "dampening": 0.0
    }  # fmt: skip
    ours = group["params"]
    u = [sgd.state[p]["momentum_buffer"] for p in params]
    assert same_tensors([optimizer.state[p]["momentum_buffer"] for p in ours], u)
    w = weights(ours)
    for t in range(2, 4):
        grads = gradients(w, t)
        step(optimizer, ours, grads)
        w, u = reference.sngm(w, u, grads, eta=0.05, beta=0.8, wd=0.02, nesterov=nesterov)
    for a, b in zip(ours, w, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", HEAVY_BALL)
def test_torch_sgd_continues_from_our_checkpoint(rule, path):
    params = make_params(torch.float64)
    optimizer = build(rule, split(params), path)
    run(optimizer, params)
    ours = clone_params(params)
    sgd = torch.optim.SGD(split(ours), lr=9.0, momentum=0.1)
    sgd.load_state_dict(through_disk(optimizer.state_dict()))
    w, v = weights(params), [optimizer.state[p]["momentum_buffer"].clone() for p in params]
    rates = [optimizer.param_groups[0]["lr"]] * 2 + [0.05] * (len(params) - 2)
    for t in range(2, 4):
        grads = gradients(w, t)
        step(sgd, ours, grads)
        w, v = reference.msgd(w, v, grads, eta=rates, beta=0.9, wd=0.01)
    for a, b in zip(ours, w, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", ["sngm", "extrap-sgd"])
def test_torch_sgd_takes_nesterov_from_our_checkpoint(rule):
    params = make_params(torch.float64)
    optimizer = build(rule, params, nesterov=True)
    run(optimizer, params)
    ours = clone_params(params)
    sgd = torch.optim.SGD(ours, lr=9.0)
    sgd.load_state_dict(optimizer.state_dict())
    w, v = weights(params), [optimizer.state[p]["momentum_buffer"].clone() for p in params]
    grads = gradients(w, 2)
    step(sgd, ours, grads)
    w, v = reference.msgd(w, v, grads, eta=0.1, beta=0.9, wd=0.01, nesterov=True)
    for a, b in zip(ours, w, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", HEAVY_BALL)
def test_dampening_in_a_torch_checkpoint_is_ignored_with_a_warning(rule):
    params = make_params(torch.float64)
    sgd = sgd_run(params, dampening=0.5)
    ours = clone_params(params)
    optimizer = build(rule, ours)
    with pytest.warns(UserWarning, match=r"dampening.*0\.5"):
        optimizer.load_state_dict(sgd.state_dict())
    assert optimizer.param_groups[0]["dampening"] == 0.0
    assert same_tensors(
        [optimizer.state[p]["momentum_buffer"] for p in ours], [sgd.state[p]["momentum_buffer"] for p in params]
    )


@pytest.mark.parametrize("rule", ["lars", "clars"])
def test_nesterov_in_a_torch_checkpoint_warns_where_the_method_has_none(rule):
    sgd = sgd_run(make_params(), nesterov=True)
    optimizer = build(rule, make_params())
    with pytest.warns(UserWarning, match="nesterov"):
        optimizer.load_state_dict(sgd.state_dict())
    assert optimizer.param_groups[0]["nesterov"] is False


@pytest.mark.parametrize("rule", HEAVY_BALL)
def test_a_fresh_torch_sgd_checkpoint_resets_momentum_to_zero(rule):
    params, twins = make_params(), make_params()
    fresh = torch.optim.SGD(make_params(), lr=0.05, momentum=0.8, weight_decay=0.02).state_dict()
    assert fresh["state"] == {}
    optimizer = build(rule, params)
    run(optimizer, params)
    optimizer.load_state_dict(fresh)
    for p in params:
        assert not optimizer.state[p]["momentum_buffer"].any()
    for p, q in zip(params, twins, strict=True):
        q.data.copy_(p)
    twin = build(rule, twins, lr=0.05, momentum=0.8, weight_decay=0.02)
    run(optimizer, params, start=2)
    run(twin, twins, start=2)
    assert same(optimizer, params, twin, twins)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", HEAVY_BALL)
def test_a_torch_checkpoint_without_momentum_trains_without_until_it_is_turned_on(rule, path):
    params = make_params()
    sgd = sgd_run(params, momentum=0.0)
    saved = sgd.state_dict()
    assert all(entry["momentum_buffer"] is None for entry in saved["state"].values())
    ours, twins = clone_params(params), clone_params(params)
    optimizer = build(rule, ours, path)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["momentum"] == 0.0
    twin = build(rule, twins, path, lr=0.05, momentum=0.0, weight_decay=0.02)
    for start in (2, 4):
        run(optimizer, ours, start=start)
        run(twin, twins, start=start)
        assert same_tensors(ours, twins)
        for group in (*optimizer.param_groups, *twin.param_groups):
            group["momentum"] = 0.9
    assert all(optimizer.state[p]["momentum_buffer"].any() for p in ours)


@pytest.mark.parametrize("path", [p for p in PATHS if p != "capturable"])  # torch's Adam does not support it on the CPU
def test_adam_and_lamb_continue_from_each_others_checkpoints(path):
    params = make_params(torch.float64)
    adam = torch.optim.Adam(params, lr=0.05, betas=(0.8, 0.95), weight_decay=0.02)
    run(adam, params)
    ours = clone_params(params)
    lamb = LAMB(ours, lr=9.0, max_grad_norm=0.5, **PATHS[path])
    lamb.load_state_dict(through_disk(adam.state_dict()))
    moments = [[adam.state[p][k].clone() for p in params] for k in ("exp_avg", "exp_avg_sq")]
    w, (m, v) = weights(ours), moments
    for t in range(2, 4):
        grads = gradients(w, t)
        step(lamb, ours, grads)
        w, m, v = reference.lamb(
            w, m, v, grads, t + 1, eta=0.05, betas=(0.8, 0.95), eps=1e-8, wd=0.02, max_grad_norm=0.5
        )
    for a, b in zip(ours, w, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)

    back = clone_params(ours)
    there = torch.optim.Adam(back, lr=9.0)
    there.load_state_dict(through_disk(lamb.state_dict()))
    twins = clone_params(ours)
    twin = torch.optim.Adam(twins, lr=0.05, betas=(0.8, 0.95), weight_decay=0.02, foreach=False)
    run(twin, clone_params(ours), 0)
    step(twin, twins, [torch.zeros_like(p) for p in twins])  # creates the state to be overwritten
    for p, q, s in zip(ours, twins, lamb.state.values(), strict=True):
        q.data.copy_(p)
        for key, value in s.items():
            twin.state[q][key].copy_(value)
    assert twin.state[twins[0]]["step"].item() == 4.0
    run(there, back, start=4)
    run(twin, twins, start=4)
    for a, b in zip(back, twins, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


# -------------------------------------------------------------------- torch.distributed.checkpoint


class Net(torch.nn.Module):
    """A network in bfloat16, whose state has another dtype, and partly frozen."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ParameterList(make_params(torch.bfloat16))
        self.layers[1].requires_grad_(False)


@pytest.mark.parametrize(
    ("weight_decay", "lr", "flat"), [(0.0, 0.1, False), (0.1, 0.1, True), (0.1, torch.tensor(0.1), False)]
)
@pytest.mark.parametrize("rule", KINDS)
def test_a_distributed_checkpoint_of_a_fresh_optimizer_changes_nothing(rule, weight_decay, lr, flat):
    net, plain = Net(), Net()
    settings = {"weight_decay": weight_decay, "lr": lr}
    optimizer = build(rule, net.parameters(), **settings)
    twin = build(rule, plain.parameters(), **settings)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = get_optimizer_state_dict(net, optimizer, options=options)
    assert same(optimizer, list(net.parameters()), twin, list(plain.parameters()))
    assert all(p.grad is None for p in net.parameters())
    set_optimizer_state_dict(net, optimizer, saved, options=options)
    assert same(optimizer, list(net.parameters()), twin, list(plain.parameters()))
    assert optimizer.skipped.item() == 0
    run(optimizer, list(net.parameters()))
    run(twin, list(plain.parameters()))
    assert same(optimizer, list(net.parameters()), twin, list(plain.parameters()))


@pytest.mark.parametrize("rule", KINDS)
def test_a_run_resumed_from_a_distributed_checkpoint_on_disk_continues_bit_for_bit(rule, tmp_path, group):
    net = Net()
    optimizer = build(rule, net.parameters())
    run(optimizer, list(net.parameters()))
    dcp.save(
        {"net": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=tmp_path / "x"
    )

    other = Net()
    twin = build(rule, other.parameters())
    loaded = {"net": other.state_dict(), "optimizer": get_optimizer_state_dict(other, twin)}
    dcp.load(loaded, checkpoint_id=tmp_path / "x")
    other.load_state_dict(loaded["net"])
    set_optimizer_state_dict(other, twin, loaded["optimizer"])
    assert same(optimizer, list(net.parameters()), twin, list(other.parameters()))
    run(optimizer, list(net.parameters()), start=2)
    run(twin, list(other.parameters()), start=2)
    assert same(optimizer, list(net.parameters()), twin, list(other.parameters()))


# -------------------------------------------------------------------- copies


def by_deepcopy(both):
    return copy.deepcopy(both)


def by_pickle(both):
    return pickle.loads(pickle.dumps(both))


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
@pytest.mark.parametrize("path", ["default", "capturable"])
@pytest.mark.parametrize("rule", KINDS)
def test_a_copy_of_an_optimizer_goes_on_by_itself_exactly_like_the_original(rule, path, copied):
    params = make_params()
    optimizer = build(rule, split(params), path)
    run(optimizer, params)
    step(optimizer, params, [torch.full_like(p, torch.nan) for p in params])
    run(optimizer, params, start=2)
    twins, twin = copied((params, optimizer))
    assert type(twin) is type(optimizer)
    assert getattr(twin, "scope", None) == getattr(optimizer, "scope", None)
    assert twin.skipped.item() == 1
    assert torch.equal(twin.grad_norm, optimizer.grad_norm)
    assert twin.grad_norm is not optimizer.grad_norm
    before, state = weights(params), states(optimizer)
    run(twin, twins, start=4)
    step(twin, twins, [torch.full_like(p, torch.nan) for p in twins])
    assert twin.skipped.item() == 2
    assert optimizer.skipped.item() == 1
    assert same_tensors(params, before)
    assert same_states(states(optimizer), state)
    run(optimizer, params, start=4)
    assert same(optimizer, params, twin, twins)
    assert not same_tensors(params, before)


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle])
def test_a_copy_still_takes_step_and_load_hooks_and_schedulers(copied):
    params, optimizer = copied((p := make_params(), build("sngm", p)))
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("load"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run(optimizer, params, 1)
    scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["step", "load"]
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("rule", KINDS)
def test_the_process_group_is_kept_by_deepcopy_and_left_out_of_pickles_and_checkpoints(rule, group):
    params, twins = make_params(), make_params()
    optimizer, twin = build(rule, params, norm_group=group), build(rule, twins)
    run(optimizer, params)
    run(twin, twins)
    assert same(optimizer, params, twin, twins)
    assert copy.deepcopy(optimizer).norm_group is group
    restored_params, restored = by_pickle((params, optimizer))
    assert restored.norm_group is None
    run(restored, restored_params, start=2)
    run(twin, twins, start=2)
    assert same(restored, restored_params, twin, twins)
    saved = optimizer.state_dict()
    assert "norm_group" not in saved
    assert all("norm_group" not in g for g in saved["param_groups"])
    optimizer.load_state_dict(saved)
    assert optimizer.norm_group is group


def test_a_checkpoint_with_settings_no_rule_knows_is_refused_and_changes_nothing():
    params = make_params()
    optimizer = build("sngm", params)
    run(optimizer, params)
    before, state = copy.deepcopy(optimizer.state_dict()), states(optimizer)
    broken = copy.deepcopy(before)
    broken["param_groups"][0]["momentum"] = 1.5
    with pytest.raises(ValueError, match=r"momentum.*1\.5"):
        optimizer.load_state_dict(broken)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert same_states(states(optimizer), state)


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        ({}, "'state' and 'param_groups'"),
        (None, "'state' and 'param_groups'.*NoneType"),
        ({"model": {}, "optimizer": {}}, r"'model', 'optimizer'"),
        ({"state": {0: {"momentum_buffer": "x"}}, "param_groups": []}, "momentum_buffer of parameter 0.*'x'"),
        ({"state": {0: 5}, "param_groups": []}, "parameter 0.*5"),
        ({"state": {}, "param_groups": 3}, "param_groups must be a list of dicts, got 3"),
        ({"state": {}, "param_groups": [None]}, r"param_groups must be a list of dicts, got \[None\]"),
    ],
    ids=repr,
)
def test_what_is_no_checkpoint_is_refused_by_name_and_changes_nothing(broken, match):
    params = make_params()
    optimizer = build("sngm", params)
    run(optimizer, params)
    before = states(optimizer)
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(broken)
    assert same_states(states(optimizer), before)


def test_a_broken_part_is_found_behind_a_stranger_s():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = SNGM(params, lr=0.1)
    state = optimizer.state_dict()
    state["state"] = {0: {"exp_avg": torch.ones(3)}, 1: {"momentum_buffer": "x"}}
    with pytest.raises(ValueError, match="momentum_buffer of parameter 1"), pytest.warns(UserWarning, match="exp_avg"):
        optimizer.load_state_dict(state)


def test_a_checkpoint_of_a_stranger_loads_with_a_warning():
    w = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([w])
    w.grad = torch.ones(3)
    adam.step()
    with pytest.warns(UserWarning, match=r"exp_avg.* but no momentum_buffer"):
        SNGM([w], lr=0.1).load_state_dict(adam.state_dict())


def test_numbers_of_numpy_are_kept_as_numbers_of_python():
    numpy = pytest.importorskip("numpy")
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = SNGM([{"params": [w], "weight_decay": numpy.float32(0.5)}], lr=numpy.float64(0.1))
    assert through_disk(optimizer.state_dict())["param_groups"][0]["lr"] == 0.1
    assert type(optimizer.param_groups[0]["weight_decay"]) is float


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("count", [7, 7.0, torch.tensor(7)])
def test_a_number_put_in_the_place_of_lambs_count_of_steps_is_counted_on_from(count, path):
    params, others = make_params(), make_params()
    optimizer, other = build("lamb", params, path), build("lamb", others, path)
    for p, q in zip(params, others, strict=True):
        optimizer.state[p]["step"] = count
        other.state[q]["step"] = torch.tensor(7.0)
    run(optimizer, params, 2)
    run(other, others, 2)
    assert same_tensors(params, others)
    assert all(optimizer.state[p]["step"].item() == 9.0 for p in params)


@pytest.mark.parametrize("path", PATHS)
def test_a_count_of_steps_that_was_deleted_starts_from_zero(path):
    params = make_params()
    optimizer = build("lamb", params, path)
    run(optimizer, params, 2)
    for p in params:
        del optimizer.state[p]["step"]
    run(optimizer, params, 1)
    assert all(optimizer.state[p]["step"].item() == 1.0 for p in params)


@pytest.mark.parametrize(
    ("theirs", "ours", "named"),
    [
        ("lars", "sngm", "trust_coefficient, variant"),
        ("sngm", "lars", "weight_decay_mode"),
        ("sngm", "clars", "eps, weight_decay_mode"),
        ("extrap-sgd", "sngm", "inner_lr"),
        ("clars", "extrap-sgd", "max_ratio"),
    ],
)
def test_settings_of_another_method_in_a_checkpoint_are_told(theirs, ours, named):
    params = make_params()
    saved = build(theirs, params).state_dict()
    with pytest.warns(UserWarning, match=f"groups hold .*{named}.* does not know. Is it another optimizer's") as told:
        build(ours, params).load_state_dict(saved)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_a_lars_checkpoint_is_not_loaded_where_its_eps_would_be_a_division_by_zero():
    params = make_params()
    optimizer = build("lamb", params)
    before = copy.deepcopy(optimizer.state_dict())
    saved = build("lars", params).state_dict()
    refused = pytest.raises(ValueError, match=r"eps must be .* got 0.0; is it another optimizer's checkpoint\?")
    with refused, pytest.warns(UserWarning, match="no exp_avg"):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
