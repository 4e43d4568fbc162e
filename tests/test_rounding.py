"""Stochastic rounding: unbiased, and identical in every implementation and after a resume.

The default implementation is that of the kernels here, in Triton's interpreter.
"""

import copy
import itertools

import pytest
import torch
from harness import build, gradients, make_params, run, same, step, through_disk, weights
from test_kernels import tables  # noqa: F401  # a fixture that runs kernels in the interpreter
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from sngm import CLARS, LAMB, LARS, SNGM
from sngm.optim.rounding import rounded

RULES = ["sngm", "lars-momentum", "clars", "lamb"]
SHAPES = [(5, 13), (70,), (4, 3, 3, 3), ()]
MANY = 1 << 16


def build_rounding(rule, params, path="default", **settings):
    return build(rule, params, path, stochastic_rounding=True, **{"lr": 0.01, **settings})


def low_params(form=torch.contiguous_format):
    params = make_params(torch.bfloat16, SHAPES)
    for p in params:
        if p.ndim == 4:
            p.data = p.data.to(memory_format=form)
    return params


def count(optimizer):
    return int(optimizer.param_groups[0]["rounding_step"])


# ---------------------------------------------------------------- numbers


def neighbours(value):
    """Return the two bfloat16 numbers around a float32 number, the one closer to zero first."""
    bits = torch.tensor(value).view(torch.int32) & -0x10000
    return sorted(x.view(torch.float32).item() for x in (bits, bits + 0x10000))


@pytest.mark.parametrize("value", [1.001, -1.001, 1.0077, 0.3, -1e-30, 3e-39, -1e-40, 3.3e38, -12345.678])
def test_a_number_goes_to_either_neighbour_and_keeps_its_mean(value):
    values = rounded(torch.full((MANY,), value), 3, torch.tensor(5))
    low, high = neighbours(value)
    exact = torch.tensor(value).double().item()
    assert values.unique().tolist() == [low, high]
    assert torch.equal(values.bfloat16().float(), values)
    chance = (exact - low) / (high - low)
    error = (chance * (1 - chance) / MANY) ** 0.5
    assert abs((values == high).double().mean().item() - chance) < 4 * error


@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.5, -(2.0**-130)])
def test_numbers_of_bfloat16_and_those_that_are_none_stay_bit_for_bit(value):
    values = torch.full((1000,), value)
    for t in range(3):
        assert torch.equal(rounded(values, t, torch.tensor(t)).view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, -1], ids=hex)
def test_a_nan_stays_one_whatever_its_bits(bits):
    values = torch.full((1000,), bits, dtype=torch.int32).view(torch.float32)
    assert rounded(values, 0, torch.tensor(1)).isnan().all()


def test_steps_parameters_and_elements_are_rounded_independently():
    halfway = torch.full((MANY,), 1.0 + 2.0**-8)
    ups = [rounded(halfway, i, torch.tensor(t)) > 1.0 for i, t in itertools.product((0, 1), (1, 2))]
    ups += [ups[0].roll(shift) for shift in (1, 2, 256, 1024)]
    for a, b in itertools.combinations(ups, 2):
        assert abs((a == b).double().mean().item() - 0.5) < 4 * 0.5 / MANY**0.5


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("path", ["default", "foreach", "single"])
def test_small_updates_add_up_where_rounding_to_the_nearest_loses_them(path):
    steps, size = 10, 512
    lr = 2.0**-7 / 10 * size**0.5  # each step is a tenth of the distance from 1 to the next bfloat16 number
    for at_random in (True, False):
        weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16))
        optimizer = build("sngd", [weight], path, lr=lr, weight_decay=0.0, eps=0.0, stochastic_rounding=at_random)
        weight.grad = torch.full_like(weight, -1.0)
        for _ in range(steps):
            optimizer.step()
        if at_random:  # a walk on 1, ..., 1 + 10 spacings, up with probability 0.1
            moved = (weight.detach().double() - 1.0) * 2**7
            assert abs(moved.mean().item() - 0.1 * steps) < 4 * (0.09 * steps / size) ** 0.5
        else:
            assert (weight == 1.0).all()


@pytest.mark.parametrize(
    ("rule", "form"), list(zip(RULES, itertools.cycle((torch.contiguous_format, torch.channels_last))))
)
def test_every_path_rounds_alike(rule, form):
    runs = {}
    for path in ("default", "foreach", "single"):
        params = low_params(form)
        optimizer = build_rounding(rule, params, path)
        for t in range(3):
            grads = gradients(low_params(), t)
            if t == 1:
                grads[0][0, 0] = torch.inf
            step(optimizer, params, grads)
        assert (optimizer._layout is not None) == (path == "default")
        assert count(optimizer) == 3
        runs[path] = params
    for path, params in runs.items():
        assert all(map(torch.equal, params, runs["default"])), path


def without_gradients(optimizer, params):
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()


def with_another_count(optimizer, params):
    optimizer.param_groups[0]["rounding_step"] = torch.tensor(100)


def with_rounding_to_the_nearest(optimizer, params):
    optimizer.param_groups[0]["stochastic_rounding"] = False
    run(optimizer, params, 1, start=1)
    optimizer.param_groups[0]["stochastic_rounding"] = True


@pytest.mark.parametrize(
    "between", [without_gradients, with_another_count, with_rounding_to_the_nearest], ids=lambda f: f.__name__
)
def test_every_path_counts_alike(between):
    runs = []
    for path in ("default", "foreach"):
        params = low_params()
        runs.append((build_rounding("sngm", params, path), params))
        run(*runs[-1], 1)
        between(*runs[-1])
        run(*runs[-1], 1, start=2)
    assert count(runs[0][0]) == count(runs[1][0])
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


@pytest.mark.parametrize("path", ["foreach", "default"])
@pytest.mark.parametrize("rule", RULES)
def test_a_skipped_step_changes_no_weight(rule, path):
    params = low_params()
    optimizer = build_rounding(rule, params, path)
    run(optimizer, params, 1)
    before, grads = weights(params), gradients(params, 1)
    grads[0][0, 0] = torch.nan
    step(optimizer, params, grads)
    assert optimizer.skipped == 1
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_other_dtypes_are_rounded_to_the_nearest(rule, dtype):
    runs = []
    for at_random in (True, False):
        params = make_params(dtype, SHAPES[:2])
        runs.append((build(rule, params, stochastic_rounding=at_random), params))
        run(*runs[-1])
    assert same(*runs[0], *runs[1])


def test_each_group_has_its_own_choice():
    params, others = low_params(), low_params()
    ours = SNGM([{"params": params[:2], "stochastic_rounding": True}, {"params": params[2:]}], lr=0.01)
    theirs = SNGM([{"params": others[:2]}, {"params": others[2:]}], lr=0.01)
    for t in range(3):
        grads = gradients(low_params(), t)
        step(ours, params, grads)
        step(theirs, others, grads)
    assert [torch.equal(p, q) for p, q in zip(params, others, strict=True)] == [False, False, True, True]


@pytest.mark.parametrize("cls", [SNGM, LARS, LAMB, CLARS])
@pytest.mark.parametrize("wrong", [None, 1, "yes", 0.5])
def test_anything_but_a_bool_is_refused(cls, wrong):
    with pytest.raises(TypeError, match=f"stochastic_rounding must be True or False, got {wrong!r}"):
        cls(low_params(), lr=0.1, stochastic_rounding=wrong)
    optimizer = cls(low_params(), lr=0.1)
    with pytest.raises(TypeError, match="stochastic_rounding must be True or False"):
        optimizer.add_param_group({"params": low_params(), "stochastic_rounding": wrong})


# ---------------------------------------------------------------- copies and checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("path", ["foreach", "default"])
@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_rounds_as_if_it_had_never_stopped(rule, path):
    params = low_params()
    optimizer = build_rounding(rule, params, path)
    run(optimizer, params)
    saved = through_disk({"params": weights(params), "optimizer": optimizer.state_dict()})
    run(optimizer, params, 2, start=2)
    twins = [nn.Parameter(p) for p in saved["params"]]
    twin = build_rounding(rule, twins, path)
    twin.load_state_dict(saved["optimizer"])
    assert count(twin) == 2
    run(twin, twins, 2, start=2)
    assert count(twin) == count(optimizer) == 4
    assert same(optimizer, params, twin, twins)


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("rule", ["sngm", "lamb"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about a single process
def test_a_run_resumed_through_distributed_checkpoints_rounds_as_before(rule, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = nn.Linear(9, 7).bfloat16()
    params = list(model.parameters())
    optimizer = build_rounding(rule, params)
    run(optimizer, params)
    twin_model = copy.deepcopy(model)
    saved = through_disk(get_optimizer_state_dict(model, optimizer, options=options))
    run(optimizer, params, 2, start=2)
    twins = list(twin_model.parameters())
    twin = build_rounding(rule, twins)
    set_optimizer_state_dict(twin_model, twin, saved, options=options)
    run(twin, twins, 2, start=2)
    assert count(twin) == count(optimizer) == 4
    assert same(optimizer, params, twin, twins)


@pytest.mark.parametrize("path", ["foreach", "default"])
def test_a_copy_counts_and_rounds_by_itself(path):
    params = low_params()
    optimizer = build_rounding("sngm", params, path)
    run(optimizer, params)
    twins, twin = copy.deepcopy((params, optimizer))
    run(twin, twins, 2, start=2)
    assert (count(optimizer), count(twin)) == (2, 4)
    run(optimizer, params, 2, start=2)
    assert same(optimizer, params, twin, twins)
