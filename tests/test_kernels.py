"""The optimizers' Triton kernels in Triton's interpreter: every rule and memory layout, and changes between steps."""

import copy
import gc
import importlib
import itertools
import pickle
import weakref

import pytest
import torch
from harness import (
    DTYPES,
    KERNEL_CASES,
    Twin,
    build,
    clone_params,
    gradients,
    make_params,
    make_twin,
    run,
    same,
    same_states,
    states,
    step,
)
from interpreter import STEP, interpreted
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.two_tensor import TwoTensor

import sngm
from sngm import CLARS, SNGM
from sngm.optim import checks, kernels, sharded_norms
from sngm.optim.base import LargeBatchOptimizer

pytest.importorskip("triton")

RULES = ["sngm", "lars-momentum", "lamb"]  # one pass over the gradients, two, and a second buffer
FEW = [(5, 13), (2, 3, 2, 2)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5}


@pytest.fixture(scope="module", autouse=True)
def tables():
    """Return the module device_tables, with interpreted kernels."""
    with interpreted(*STEP, chooser=kernels):
        yield importlib.import_module(STEP[0])


@pytest.fixture
def chunks(monkeypatch, tables):
    """Return a function that sets the chunk and block sizes; sums of more than 2 numbers then need a loop."""

    def choose(chunk, block):
        monkeypatch.setattr(tables, "chunk_size", lambda _: chunk)
        monkeypatch.setattr(tables, "BLOCK", block)
        monkeypatch.setattr(tables.kernels, "LANES", 2)

    return choose


class Pair:
    """An optimizer that uses the kernels, and one that uses foreach on copies of the parameters."""

    def __init__(self, rule, params=None, groups=({},), **settings):
        self.params = make_params(torch.float64, FEW) if params is None else params
        self.others = clone_params(self.params)
        self.ours, self.theirs = (
            build(rule, [{"params": some[i :: len(groups)], **own} for i, own in enumerate(groups)], path, **settings)
            for some, path in ((self.params, "default"), (self.others, "foreach"))
        )

    def step(self, t, grads=None, by_kernels=True):
        """Step both with these gradients, or those of step t, and compare them."""
        grads = gradients(self.others, t) if grads is None else grads
        before = copy.deepcopy(grads)
        step(self.theirs, self.others, grads)
        step(self.ours, self.params, grads)
        assert (self.ours._layout is not None) == by_kernels
        for p, g, was in zip(self.params, grads, before, strict=True):
            assert p.grad is g
            assert g is None or torch.equal(g.to_dense().nan_to_num(7.0), was.to_dense().nan_to_num(7.0))
        self.check()

    def check(self):
        for a, b in zip(self.params, self.others, strict=True):
            close(a, b)
        for a, b in zip(states(self.ours), states(self.theirs), strict=True):
            assert a.keys() == b.keys()
            for key in a:
                close(a[key], b[key])
        torch.testing.assert_close(self.ours.grad_norm, self.theirs.grad_norm, equal_nan=True)
        assert self.ours.skipped == self.theirs.skipped


def close(a, b):
    assert a.dtype == b.dtype
    assert (a - b).norm() <= TOLERANCE[a.dtype] * b.norm()


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_every_rule_equals_the_reference(case):
    make_twin(case, shapes=[(7,), (3, 3)]).run(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["SNGM coupled global nesterov", "SNGM decoupled tensor", "LARS momentum", "LAMB"])
def test_every_dtype_equals_the_reference(case, dtype):
    make_twin(case, dtype=dtype, shapes=[(7,), (3, 3)]).run(2)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), list(zip(KERNEL_CASES, itertools.cycle(DTYPES))))
def test_every_rule_equals_the_reference_with_tensors_of_every_shape(case, dtype):
    make_twin(case, "fused", dtype).run(6)


@pytest.mark.parametrize("rule", RULES)
def test_kernels_take_the_steps_of_foreach(rule):
    pair = Pair(rule, make_params(torch.float64), ({}, {"lr": 0.05}))
    for t in range(2):
        pair.step(t)


@pytest.mark.parametrize("rule", RULES)
def test_complex_parameters_step_as_pairs_of_reals(rule):
    pair = Pair(rule, make_params(torch.complex64, FEW))
    pair.step(0)
    pair.step(1, [g.conj() for g in gradients(pair.others, 1)])
    pair.step(2, [p.grad.conj() for p in pair.params])  # the same memory


@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_groups_of_sngm_have_their_own_settings(scope):
    groups = (
        {"nesterov": True, "maximize": True},
        {"lr": 0.3, "weight_decay": 0.2, "weight_decay_mode": "decoupled", "momentum": 0.5},
        {"lr": 0.05, "weight_decay": 0.3, "weight_decay_mode": "after_norm", "momentum": 0.0},
    )
    pair = Pair("sngm", make_params(torch.float64, [(7,), (3, 3), (5,), (2, 2)]), groups, scope=scope)
    for t in range(2):
        pair.step(t)


@pytest.mark.parametrize(
    ("rule", "groups"),
    [
        ("lars", ({"variant": "momentum"}, {"momentum": 0.0}, {"variant": "unscaled", "clamp_grad": 0.5})),
        ("lars", ({"variant": "momentum", "momentum": 0.0}, {"phi": (0.5, 1.0)}, {"adapt": False, "maximize": True})),
        ("clars", ({"max_ratio": None}, {"adapt": False, "momentum": 0.0}, {"lr": 0.1, "maximize": True})),
        ("lamb", ({"betas": (0.5, 0.9)}, {"adapt": False, "bias_correction": False}, {"max_grad_norm": None})),
    ],
)
def test_groups_have_their_own_settings(rule, groups):
    pair = Pair(rule, make_params(torch.float64, [(7,), (3, 3), (5, 2), (2, 2)]), groups)
    for t in range(2):
        pair.step(t)


def test_one_norm_spans_parameters_of_several_dtypes():
    params = make_params(torch.bfloat16, [(7,), (3, 3)]) + make_params(shapes=[(7,), (2, 2)], seed=1)
    twin = Twin("SNGM", params, {"lr": 0.3, "weight_decay": 0.05, "momentum": 0.9})
    twin.run(3)
    exact = torch.cat([(p.grad.double() + 0.05 * p.detach().double()).flatten() for p in params])
    twin.optimizer.param_groups[0]["lr"] = 0.0
    twin.optimizer.step()
    torch.testing.assert_close(twin.optimizer.grad_norm.double(), exact.norm(), rtol=1e-6, atol=0.0)


def test_low_precision_parameters_take_float32_gradients():
    params, others = (make_params(torch.bfloat16, FEW) for _ in range(2))
    for p in params:
        p.grad_dtype = torch.float32
    ours, theirs = build("sngm", params), build("sngm", others)
    for t in range(2):
        grads = gradients(others, t)
        step(ours, params, [g.float() for g in grads])
        step(theirs, others, grads)
    assert same(ours, params, theirs, others)


def test_gradients_may_change_their_dtype_where_they_lie():
    (p,), (q,) = (make_params(torch.bfloat16, [(4, 3)]) for _ in range(2))
    ours, theirs = build("sngm", [p]), build("sngm", [q])
    p.grad_dtype = q.grad_dtype = None
    memory = torch.zeros(12)
    for t, dtype in enumerate([torch.bfloat16, torch.float32, torch.bfloat16]):
        (grad,) = gradients([q], t)
        at = memory.view(dtype)[:12].view(4, 3).copy_(grad)
        step(theirs, [q], [grad.to(dtype)])
        step(ours, [p], [at])
        assert p.grad.data_ptr() == memory.data_ptr()
    assert same(ours, [p], theirs, [q])


def test_gradients_whose_sign_is_left_to_be_changed_are_read_with_it():
    pair = Pair("sngm", make_params(torch.float64, [(), (1,), (3, 2)]))
    memory, others = torch.full((2,), 1.0 + 2.0j, dtype=torch.complex128), gradients(pair.others, 0)[2]
    for t in range(3):
        one = (memory.conj() if t else memory).imag  # the same memory, with lazy negation
        assert one[0].is_neg() == one[1:].is_neg() == (t > 0)
        pair.step(t, [one[0], one[1:], others])


class Nesterov(LargeBatchOptimizer):
    """A method as CONTRIBUTING shows how to add one."""

    KERNEL = "msgd"

    def __init__(self, params, lr, nesterov=True):
        flags = {"maximize": False, "foreach": None, "fused": None, "capturable": False}
        super().__init__(params, {"lr": lr, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov, **flags})


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_method_without_a_branch_in_the_kernels_is_momentum_sgd(nesterov):
    params = make_params(torch.float64, FEW)
    twins = clone_params(params)
    ours = Nesterov(params, 0.1, nesterov)
    theirs = torch.optim.SGD(twins, 0.1, 0.9, weight_decay=0.1, nesterov=nesterov)
    for t in range(3):
        for p, q, g in zip(params, twins, gradients(twins, t), strict=True):
            p.grad, q.grad = g, g.clone()
        ours.step()
        theirs.step()
    assert ours._layout is not None
    for p, q in zip(params, twins, strict=True):
        close(p, q)


@pytest.mark.filterwarnings("ignore:divide by zero")  # of NumPy, in the interpreter
@pytest.mark.parametrize("scale", [0.0, torch.nan])
@pytest.mark.parametrize("rule", RULES)
def test_a_loss_scale_of_zero_or_nan_skips_the_step(rule, scale):
    params = make_params(shapes=FEW)
    before = clone_params(params)
    optimizer = build(rule, params, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
    run(optimizer, params, 1)
    assert all(map(torch.equal, params, before))
    assert optimizer.skipped == 1


# ---------------------------------------------------------------- changes between steps


@pytest.mark.parametrize("rule", RULES)
def test_parameters_without_a_gradient_stand_still(rule):
    pair = Pair(rule)
    for t, present in enumerate([(1, 0), (0, 1), (1, 1), (0, 0)]):
        grads = [g if here else None for g, here in zip(gradients(pair.others, t), present, strict=True)]
        pair.step(t, grads, by_kernels=any(present))


@pytest.mark.parametrize("rule", RULES)
def test_a_frozen_parameter_thaws(rule):
    params = make_params(torch.float64, FEW)
    params[0].requires_grad_(False)
    pair = Pair(rule, params)
    pair.step(0, [None, *gradients(pair.others, 0)[1:]])
    assert not pair.ours.state[params[0]]
    for p in (pair.params[0], pair.others[0]):
        p.requires_grad_(True)
    pair.step(1)
    pair.step(2)


def move(p):
    p.data = p.data.clone()


def move_to_channels_last(p):
    p.data = p.data.to(memory_format=torch.channels_last) if p.ndim == 4 else p.data.clone()


def turn_where_it_is(p):
    if p.ndim == 4:  # the same address, other strides
        p.data = torch.as_strided(p.data, p.shape, (12, 1, 6, 3)).copy_(p.data.clone())


@pytest.mark.parametrize("change", [move, move_to_channels_last, turn_where_it_is])
@pytest.mark.parametrize("rule", RULES)
def test_a_parameter_whose_memory_is_replaced_gets_a_new_layout(rule, change):
    pair = Pair(rule)
    pair.step(0)
    layout = pair.ours._layout
    for p in pair.params:
        change(p)
    pair.step(1)
    assert pair.ours._layout is not layout
    pair.step(2)


def stepped(dtype, path):
    params = make_params(dtype, FEW)
    optimizer = build("sngm", params, path)
    run(optimizer, params, 1)
    return optimizer, params


def test_a_parameter_cast_where_it_lies_gets_a_new_layout():
    (ours, params), (theirs, others) = stepped(torch.float64, "default"), stepped(torch.float64, "foreach")
    for p, q in zip(params, others, strict=True):
        p.grad = q.grad = None
        q.data = q.data.float()
        memory = p.data.view(-1)
        p.data = memory.view(torch.float32)[: p.numel()].view(p.shape).copy_(p.data.clone())
        assert p.data_ptr() == memory.data_ptr()
    run(ours, params, 1, start=1)
    run(theirs, others, 1, start=1)
    for a, b in zip(params, others, strict=True):
        close(a, b)


def test_a_parameter_and_its_gradient_cast_where_they_lie_get_a_new_layout():
    (ours, params), (theirs, others) = stepped(torch.float16, "default"), stepped(torch.float16, "foreach")
    for p, q in zip(params, others, strict=True):
        grad = p.grad
        p.grad = q.grad = None
        for tensor in (p, q):
            tensor.data = tensor.data.view(torch.bfloat16).copy_(tensor.data.clone())
        p.grad = grad.view(torch.bfloat16).copy_(grad.clone())
        q.grad = p.grad.clone()
    ours.step()
    theirs.step()
    for a, b in zip(params, others, strict=True):
        assert a.dtype == torch.bfloat16
        close(a.double(), b.double())


@pytest.mark.parametrize("rule", RULES)
def test_a_vector_that_gets_gaps_where_it_lies_gets_a_new_layout(rule):
    pair = Pair(rule, make_params(torch.float64, [(4,)]))
    (p,) = pair.params
    memory = torch.full((8,), 7.0, dtype=torch.float64)
    p.data = memory[:4].copy_(p.data)
    pair.step(0)
    p.data = memory[::2].copy_(p.data.clone())
    memory[1::2] = 7.0
    pair.step(1, by_kernels=False)
    assert memory[1::2].eq(7.0).all()


def grow_the_parameter(p, optimizer):
    p.data = torch.ones(40, dtype=p.dtype)
    del optimizer.state[p]


def swap_the_gradients_memory(p, optimizer):
    p.data.fill_(1.0)
    p.grad.data = torch.ones(6, dtype=p.dtype)


@pytest.mark.parametrize(("elements", "change"), [(6, grow_the_parameter), (40, swap_the_gradients_memory)])
def test_a_gradient_of_another_shape_than_its_parameters_is_refused(elements, change):
    (p,) = params = make_params(torch.float64, [(elements,)])
    optimizer = build("sngm", params)
    run(optimizer, params, 1)
    change(p, optimizer)
    with pytest.raises(ValueError, match=r"a gradient has shape \(6,\), but its parameter has \(40,\)"):
        optimizer.step()
    assert p.data.eq(1).all()


@pytest.mark.parametrize("rule", ["sngm", "lars", "lamb"])
def test_a_count_that_another_optimizer_left_is_no_tensor_to_look_at(rule):
    pair = Pair(rule, make_params(torch.float64, [(3,), (4, 2), (5,)]))
    for optimizer in (pair.ours, pair.theirs):
        for state in optimizer.state.values():
            state["step"] = 3
    for t in range(2):
        grads = gradients(pair.others, t)
        step(pair.ours, pair.params, grads)
        step(pair.theirs, pair.others, grads)
    for a, b in zip(pair.params, pair.others, strict=True):
        close(a, b)


@pytest.mark.parametrize("turn", [lambda data: data.view(3, 4), lambda data: data.view(3, 4).t()])
@pytest.mark.parametrize("shape", [(12,), (2, 6)])
@pytest.mark.parametrize("rule", ["sngm", "lars", "lamb"])
def test_a_parameter_of_another_shape_where_it_lies_is_refused_with_its_old_state(rule, shape, turn):
    (p,) = params = make_params(torch.float64, [shape])
    optimizer = build(rule, params)
    run(optimizer, params, 1)
    before = p.detach().clone()
    p.grad = None
    p.data = turn(p.data)
    with pytest.raises(ValueError, match="a parameter whose shape was changed needs new state"):
        run(optimizer, params, 1)
    assert p.data.equal(turn(before))


def test_a_parameter_that_shrank_where_it_lies_is_refused_with_its_old_state():
    (p,) = params = make_params(torch.float64, [(4, 3)])
    optimizer = build("sngm", params)
    run(optimizer, params, 1)
    memory = p.data
    before = memory.clone()
    p.grad = None
    p.data = memory[:2]
    with pytest.raises(ValueError, match=r"momentum_buffer has shape \(4, 3\)"):
        run(optimizer, params, 1)
    assert memory.equal(before)


def test_a_parameter_that_got_another_shape_where_it_lies_is_adapted_by_that():
    pair = Pair("lars", make_params(torch.float64, [(6,)]), momentum=0.0)
    pair.step(0)
    for (p,) in (pair.params, pair.others):
        p.grad = None
        p.data = p.data.view(2, 3)
    pair.step(1)


@pytest.mark.parametrize("rule", RULES)
def test_fresh_gradients_every_step_need_no_new_layout(rule):
    pair = Pair(rule)
    pair.step(0)
    layout, kept = pair.ours._layout, [p.grad for p in pair.params]
    for t in range(1, 3):
        pair.ours.zero_grad(set_to_none=True)
        pair.step(t)
        kept += [p.grad for p in pair.params]  # so that no address is reused
        assert pair.ours._layout is layout


@pytest.mark.parametrize("rule", RULES)
def test_a_model_that_is_moved_to_the_meta_device_takes_another_path(rule):
    (p,) = params = make_params(torch.float64, [(3, 2)])
    optimizer = build(rule, params)
    run(optimizer, params, 2)
    assert optimizer._layout is not None
    p.grad = None
    torch.utils.swap_tensors(p, torch.nn.Parameter(torch.empty_like(p, device="meta")))
    optimizer.state.clear()
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer._layout is None


@pytest.mark.parametrize("rule", ["sngm", "sngm-group"])  # other rules support such tensors on no path
def test_parameters_that_wrap_others_take_another_path(rule):
    runs = []
    for path in ("default", "foreach"):
        p = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
        optimizer = build(rule, [p], path)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert optimizer._layout is None
        runs.append((p.a, p.b))
    for ours, theirs in zip(*runs, strict=True):
        close(ours, theirs)
        assert not ours.eq(1).any()


def test_fused_refuses_parameters_that_wrap_others():
    p = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    optimizer = SNGM([p], lr=0.1, fused=True)
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="fused=True, but a tensor has no memory of its own; use fused=None"):
        optimizer.step()


@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_that_is_on_its_way_is_waited_for(rule):
    pair = Pair(rule, make_params(torch.float64, FEW))
    for t in range(3):
        grads = gradients(pair.others, t)
        step(pair.theirs, pair.others, grads)
        step(pair.ours, pair.params, [AsyncCollectiveTensor(grads[0]), grads[1]] if t else grads)
        assert pair.ours._layout is not None
        pair.check()


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_whose_memory_was_freed_is_refused(rule, steps):
    params = make_params(torch.float64, [*FEW, (0, 3)])
    optimizer = build(rule, params)
    for t in range(steps + 1):
        for p, g in zip(params, gradients(params, t), strict=True):
            p.grad = g
        if t < steps:
            optimizer.step()
    params[1].grad.untyped_storage().resize_(0)
    before = copy.deepcopy([p.detach() for p in params])
    with pytest.raises(ValueError, match="the memory of a gradient has been freed"):
        optimizer.step()
    assert all(map(torch.equal, before, params))


def test_gradients_elsewhere_than_their_parameter_are_refused():
    with pytest.raises(ValueError, match="a gradient is on meta, but its parameter on cpu"):
        checks.gradient(torch.zeros(3, device="meta"), (3,), torch.device("cpu"))


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_fresh_gradients_of_some_parameters_need_no_new_layout(rule, missing):
    pair = Pair(rule, make_params(torch.float64, [(5, 13), (7,), (3, 4)]))
    steps, layouts = [gradients(pair.others, t) for t in range(3)], []
    for t, grads in enumerate(steps):
        pair.step(t, [None if i == missing else g for i, g in enumerate(grads)])
        layouts.append(pair.ours._layout)
    assert layouts[0] is layouts[1] is layouts[2]


@pytest.mark.parametrize("rule", RULES)
def test_a_default_device_has_no_part_in_a_step(rule):
    pair = Pair(rule)
    for t in range(3):
        grads = gradients(pair.others, t)
        with torch.device("meta"):
            step(pair.ours, pair.params, grads)
        step(pair.theirs, pair.others, grads)
    pair.check()


def replace_buffers(pair):
    for optimizer in (pair.ours, pair.theirs):
        for state in optimizer.state.values():
            state.update({key: value.clone() * 0.5 for key, value in state.items() if key != "step"})


def start_anew(pair):
    for optimizer in (pair.ours, pair.theirs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state[p] = {}


def forget_everything(pair):
    pair.ours.state.clear()
    pair.theirs.state.clear()


def load_a_checkpoint(pair):
    saved = copy.deepcopy(pair.theirs.state_dict())
    for entry in saved["state"].values():
        for key, value in entry.items():
            value.mul_(0.5) if key != "step" else value.add_(3.0)
    pair.ours.load_state_dict(saved)
    pair.theirs.load_state_dict(saved)


def add_a_group(pair):
    new = make_params(torch.float64, [(3, 4), (3,)])
    for optimizer, params, some in ((pair.ours, pair.params, new), (pair.theirs, pair.others, clone_params(new))):
        optimizer.add_param_group({"params": some, "lr": 0.02})
        params += some


@pytest.mark.parametrize(
    "change",
    [replace_buffers, start_anew, forget_everything, load_a_checkpoint, add_a_group],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_goes_on_from_state_that_was_replaced(rule, change):
    pair = Pair(rule)
    pair.step(0)
    change(pair)
    pair.step(1)
    pair.step(2)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_goes_on_from_state_that_has_the_id_of_what_it_replaced(rule):
    pair, kept = Pair(rule, make_params(torch.float64, [(3,), (4, 2), (5,)])), []
    pair.step(0)
    for optimizer, params in ((pair.ours, pair.params), (pair.theirs, pair.others)):
        state, key = optimizer.state[params[1]], optimizer.BUFFERS[0]
        kept.append(state[key].detach())  # so that its memory is not reused
        old, half, tries = id(state[key]), kept[-1] * 0.5, []
        del state[key]
        while not tries or id(tries[-1]) != old:
            assert len(tries) < 10_000
            tries.append(half.clone())
        state[key] = tries[-1]
    pair.step(1)
    pair.step(2)


def test_a_count_of_steps_that_was_replaced_counts():
    pair = Pair("lamb")
    pair.step(0)
    for optimizer in (pair.ours, pair.theirs):
        for state in optimizer.state.values():
            state["step"] = torch.tensor(10.0)
    pair.step(1)
    pair.step(2)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("sngd", {"momentum": 0.9}),
        ("sngm", {"momentum": 0.0}),
        ("sngm", {"weight_decay_mode": "decoupled", "nesterov": True}),
        ("sngm", {"weight_decay": 0.0, "maximize": True}),
        ("sngm", {"lr": 0.7}),
        ("lamb", {"lr": torch.tensor(0.7, dtype=torch.float64)}),
        ("lamb", {"betas": (0.5, 0.8), "eps": 1e-3}),
        ("lars", {"adapt": False}),
        ("lars", {"variant": "momentum", "trust_coefficient": 1.0}),
        ("lars-momentum", {"variant": "you2017", "clamp_grad": 0.3}),
        ("clars", {"lr": torch.tensor(0.7, dtype=torch.float64), "max_ratio": None}),
    ],
    ids=str,
)
def test_settings_may_change_between_steps(rule, changes):
    pair = Pair(rule)
    pair.step(0)
    for optimizer in (pair.ours, pair.theirs):
        optimizer.param_groups[0].update(changes)
    pair.step(1)
    pair.step(2)


def test_a_list_among_the_settings_may_change_where_it_is():
    pair = Pair("lamb", betas=[0.9, 0.99])
    pair.step(0)
    for optimizer in (pair.ours, pair.theirs):
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    pair.step(1)
    for optimizer in (pair.ours, pair.theirs):
        optimizer.param_groups[0]["betas"][0] = 0.5
    pair.step(2)


def test_a_step_without_a_rate_is_refused_and_changes_nothing():
    pair = Pair("sngm", groups=({}, {}))
    pair.step(0)
    before = states(pair.ours), copy.deepcopy(pair.params)
    pair.ours.param_groups[1]["lr"] = None
    with pytest.raises(TypeError, match=r"lr in param_groups\[1\] must be .* got None"):
        pair.ours.step()
    assert all(map(torch.equal, before[1], pair.params))
    assert same_states(states(pair.ours), before[0])
    pair.ours.param_groups[1]["lr"] = pair.ours.param_groups[0]["lr"]
    pair.step(1)


def move_state(optimizer):
    """Replace every state tensor by a copy at another address with half the value; return the old tensors."""
    left = []
    for state in optimizer.state.values():
        for value in state.values():
            left.append(value.data)
            value.data = value.data * 0.5
    return left


@pytest.mark.parametrize("rule", RULES)
def test_state_whose_memory_is_replaced_is_what_the_step_goes_on_with(rule):
    pair = Pair(rule)
    pair.step(0)
    left, _ = move_state(pair.ours), move_state(pair.theirs)
    before = copy.deepcopy(left)
    pair.step(1)
    pair.step(2)
    assert all(map(torch.equal, left, before))


@pytest.mark.parametrize("key", ["exp_avg_sq", "step"])
def test_one_tensor_of_the_state_whose_memory_is_replaced_is_noticed(key):
    pair = Pair("lamb")
    pair.step(0)
    for optimizer in (pair.ours, pair.theirs):
        value = list(optimizer.state.values())[-1][key]
        value.data = value.data + 1.0
    pair.step(1)


def test_a_buffer_turned_where_it_lies_is_noticed():
    pair = Pair("sngm", make_params(torch.float64, [(4, 4)]))
    pair.step(0)
    for optimizer, (p,) in ((pair.ours, pair.params), (pair.theirs, pair.others)):
        optimizer.state[p]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].t()
    pair.step(1)
    pair.step(2)


def test_a_buffer_moved_to_unaligned_memory_is_noticed():
    pair = Pair("sngm", make_params(torch.float64, [(4,)]))
    pair.step(0)
    for optimizer, (p,) in ((pair.ours, pair.params), (pair.theirs, pair.others)):
        optimizer.state[p]["momentum_buffer"] = unaligned(p, optimizer.state[p]["momentum_buffer"])
    pair.step(1)
    assert [section["ALIGNED"] for section in pair.ours._layout.sections] == [False]


def test_a_process_group_given_after_a_step_is_used(monkeypatch):
    params = make_params(torch.float64, FEW)
    optimizer = build("sngm", params, weight_decay=0.0)
    run(optimizer, params, 2)
    norm, layout = float(optimizer.grad_norm), optimizer._layout
    monkeypatch.setattr(sharded_norms.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(
        sharded_norms.dist, "all_reduce", lambda sums, group: sums.mul_(2.0)
    )  # the other rank has the same
    for group, ratio in ((object(), 2.0), (None, 1.0)):
        optimizer.norm_group = group
        optimizer.step()
        assert optimizer._layout is not layout
        assert float(optimizer.grad_norm) == pytest.approx(norm * ratio**0.5)


def test_a_copy_of_an_optimizer_knows_its_process_group_before_any_step(monkeypatch):
    monkeypatch.setattr(sharded_norms.dist, "get_process_group_ranks", lambda group: [0, 1])
    optimizer = build("sngm", make_params())
    optimizer.norm_group = object()
    twin = copy.deepcopy(optimizer)
    assert twin.norm_group is twin._shards.norm_group is optimizer.norm_group
    assert twin._shards.active  # a compiled step cannot detect it


def test_a_learning_rate_that_changes_needs_no_new_layout():
    pair = Pair("sngm", make_params(torch.float64, [(7,), (3, 3)]), ({}, {"lr": 0.3}))
    pair.step(0)
    layout = pair.ours._layout
    for t in range(1, 4):
        for optimizer in (pair.ours, pair.theirs):
            for group in optimizer.param_groups:
                group["lr"] *= 1.7 - t
        pair.step(t)
        assert pair.ours._layout is layout


def test_a_parameter_may_change_its_group():
    pair = Pair("sngm", make_params(torch.float64, [(7,), (3, 3)]), ({"lr": 0.1}, {"lr": 0.7, "nesterov": True}))
    pair.step(0)
    for optimizer in (pair.ours, pair.theirs):
        first, second = optimizer.param_groups
        first["params"].append(second["params"].pop())
    pair.step(1)


def test_the_scope_may_change():
    pair = Pair("sngm", make_params(torch.float64, [(7,), (3, 3)]))
    for t, scope in enumerate(("global", "tensor", "group", "global")):
        pair.ours.scope = pair.theirs.scope = scope
        pair.step(t)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("rule", RULES)
def test_a_copy_of_an_optimizer_goes_on_by_itself(rule, copied):
    params = make_params(shapes=FEW)
    optimizer = build(rule, params)
    run(optimizer, params, 1)
    twins, twin = copied((params, optimizer))
    assert twin._layout is None
    run(twin, twins, 1, start=1)
    assert not same(optimizer, params, twin, twins)
    run(optimizer, params, 1, start=1)
    assert same(optimizer, params, twin, twins)


# ---------------------------------------------------------------- memory layouts


def transposed(p, g):
    return g.t().contiguous().t() if p.ndim == 2 else g


def channels_last(p, g):
    return g.to(memory_format=torch.channels_last) if p.ndim == 4 else g


def with_gaps(p, g):
    return torch.stack([g, g + 1.0], -1)[..., 0]


def unaligned(p, g):
    return torch.cat([g.new_zeros(1), g.flatten()])[1:].view(g.shape)


def expanded(p, g):
    return g.reshape(-1)[0].expand(g.shape)


def sparse(p, g):
    return g.to_sparse()


def of_zeros(p, g):
    return torch.zeros_like(g)


@pytest.mark.parametrize(
    "lay", [transposed, channels_last, with_gaps, unaligned, expanded, sparse, of_zeros], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("rule", ["sngm", "lamb"])
def test_gradients_may_lie_anyhow(rule, lay):
    pair = Pair(rule)
    pair.step(0)
    for t in (1, 2):
        pair.step(t, [lay(p, g) for p, g in zip(pair.params, gradients(pair.others, t), strict=True)])
        if lay is unaligned:  # else a GPU would load 16 bytes from such an address, which the interpreter allows
            assert not any(section["ALIGNED"] for section in pair.ours._layout.sections)
    pair.step(3)
    assert any(section["ALIGNED"] for section in pair.ours._layout.sections)


@pytest.mark.parametrize("rule", ["sngm", "lamb"])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_same_memory_may_be_read_in_another_order(rule, form):
    params = make_params(torch.float64, [(3, 3, 3, 3)])
    params[0].data = params[0].data.to(memory_format=form)
    pair = Pair(rule, params)
    memory = torch.randn(81, dtype=torch.float64)
    grads = [memory.view(3, 3, 3, 3).permute(order) for order in [(0, 1, 2, 3), (1, 0, 3, 2), (0, 3, 1, 2)]]
    for t, i in enumerate([0, 1, 2, 2, 0]):
        memory.normal_()
        pair.step(t, [grads[i]])


@pytest.mark.parametrize("rule", RULES)
def test_parameters_may_lie_anyhow(rule):
    memory = torch.full((200,), 3.0)
    guard = torch.ones(200, dtype=torch.bool)
    layouts = [
        ((9,), (1,), 1),  # offset of 4 bytes
        ((3, 2, 2, 2), (8, 1, 4, 2), 48),  # channels last
        ((2, 3), (1, 2), 101),  # transposed, unaligned
        ((), (), 110),
        ((0, 3), (3, 1), 112),
    ]
    params = []
    for shape, strides, start in layouts:
        leaf = memory.as_strided(shape, strides, start).detach()
        params.append(leaf.copy_(torch.randn(shape)).requires_grad_())
        guard.as_strided(shape, strides, start).fill_(False)
    pair = Pair(rule, params)
    for t in range(3):
        pair.step(t, gradients(pair.others, t) if t < 2 else [p.detach().clone() + 1.0 for p in params])
    assert (memory[guard] == 3.0).all()
    assert {section["ALIGNED"] for section in pair.ours._layout.sections} == {True, False}


@pytest.mark.parametrize("rule", RULES)
def test_parameters_with_gaps_take_another_path(rule):
    memory = torch.full((40,), 3.0, dtype=torch.float64)
    guard = torch.ones(40, dtype=torch.bool)
    params = []
    for shape, strides, start in [((4, 5), (7, 1), 1), ((5,), (2,), 30)]:
        params.append(memory.as_strided(shape, strides, start).detach().copy_(torch.randn(shape)).requires_grad_())
        guard.as_strided(shape, strides, start).fill_(False)
    pair = Pair(rule, params)
    for t in range(2):
        pair.step(t, by_kernels=False)
    assert (memory[guard] == 3.0).all()


@pytest.mark.parametrize("rule", RULES)
def test_nothing_but_empty_tensors_is_no_error(rule):
    params = make_params(torch.float64, [(0,), (3, 0)])
    optimizer = build(rule, params)
    run(optimizer, params)
    assert optimizer.grad_norm == 0.0
    assert optimizer.skipped == 0


def test_empty_tensors_count_their_steps_as_others_do():
    params = make_params(shapes=[(2, 2), (0, 3)])
    optimizer = build("lamb", params, fused=True)
    for overflow in (1.0, 0.0):
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor(overflow)
        run(optimizer, params, 1)
    assert [state["step"].item() for state in states(optimizer)] == [1, 1]
    step(optimizer, params, [torch.ones(2, 2), None])
    assert [state["step"].item() for state in states(optimizer)] == [2, 1]


@pytest.mark.parametrize(("rule", "settings"), [("lars", {"max_ratio": 0.25}), ("clars", {"max_ratio": 0.25})])
def test_a_tensor_of_zeros_has_a_ratio_of_one_within_its_limit(rule, settings):
    pair = Pair(rule, [torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)], **settings, lr=1.0)
    pair.step(0, [torch.ones(2, 3, dtype=torch.float64)])
    close(pair.params[0], torch.full((2, 3), -0.25, dtype=torch.float64))


def test_a_mean_norm_next_to_nothing_makes_no_weight_infinite():
    params = [torch.ones(2, 3, requires_grad=True)]
    optimizer = build("clars", params, lr=10.0, max_ratio=None)
    params[0].grad = torch.full((2, 3), 1e-43)
    optimizer.step(mean_norms=[4e-43])
    assert params[0].isfinite().all()


def test_lamb_does_not_clip_gradients_whose_squares_underflow():
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 1e-24)
    optimizer = sngm.LAMB([weight], lr=0.1, betas=(0.5, 0.5), max_grad_norm=0.25)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.full((4,), 0.5e-24))


def test_tensors_that_are_no_leaves_may_be_stepped():
    leaf = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    product = leaf * 2.0
    product.retain_grad()
    optimizer = build("sngm", [product])
    product.square().sum().backward()
    optimizer.step()
    assert optimizer._layout is not None
    assert (product < 2.0).all()


def test_a_gradient_of_zeros_without_eps_is_no_step():
    pair = Pair("sngm", eps=0.0, weight_decay=0.0)
    before = copy.deepcopy(pair.params)
    pair.step(0, [torch.zeros_like(p) for p in pair.params])
    assert all(map(torch.equal, before, pair.params))


@pytest.mark.parametrize("rule", ["sngm", "sngm-group", "lars-momentum", "clars", "lamb"])
def test_tensors_of_many_chunks_step_right_and_nothing_beside_them_is_touched(rule, chunks):
    chunks(64, 32)
    sizes = [1, 33, 64, 65, 130]
    spaced = [torch.full((3, size + 128), torch.nan, dtype=torch.float64) for size in sizes]
    params = []
    for (w, *_), size in zip(spaced, sizes, strict=True):
        leaf = w[64 : 64 + size].detach()
        params.append(leaf.copy_(torch.linspace(-1.0, 1.0, size)).requires_grad_())
    pair = Pair(rule, params, ({"adapt": True},) if rule in ("lars-momentum", "clars") else ({}, {}))
    for t in range(2):
        grads = [room[1 + t, 64 : 64 + size] for room, size in zip(spaced, sizes, strict=True)]
        for room, value in zip(grads, gradients(pair.others, t), strict=True):
            room.copy_(value)
        pair.step(t, grads)
    assert all(room[0, :64].isnan().all() and room[0, -64:].isnan().all() for room in spaced)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1), (32, 32), (64, 16)], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_the_size_of_chunks_does_not_matter(rule, sizes, chunks):
    chunks(*sizes)
    pair = Pair(rule, make_params(torch.float64, [(65,), (3, 11), (1,)]))
    for t in range(2):
        pair.step(t)


# ---------------------------------------------------------------- steps that must be skipped


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
@pytest.mark.parametrize("rule", ["sngm", "sngm-group", "lars", "lars-momentum", "clars", "lamb"])
def test_a_gradient_that_is_not_finite_changes_no_bit(rule, bad, chunks):
    chunks(16, 8)
    pair = Pair(rule, make_params(torch.float64, [(5, 5), (7,)]))
    for t in range(3):
        grads = gradients(pair.others, t)
        if t != 1:
            pair.step(t, grads)
            continue
        grads[0][4, 1] = bad
        before = copy.deepcopy((pair.params, states(pair.ours)))
        pair.step(t, grads)
        assert all(map(torch.equal, before[0], pair.params))
        assert all(torch.equal(a[k], b[k]) for a, b in zip(before[1], states(pair.ours), strict=True) for k in a)
        assert not pair.ours.grad_norm.isfinite()
    assert pair.ours.skipped == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_norms_may_be_a_column_of_something(dtype):
    params, twins = make_params(torch.float64, FEW), make_params(torch.float64, FEW)
    column = torch.tensor([[1.0, 100.0], [2.0, 100.0]], dtype=dtype)[:, 0]
    for own, path in ((params, "default"), (twins, "foreach")):
        for p in own:
            p.grad = torch.ones_like(p)
        build("clars", own, path).step(mean_norms=column)
    for a, b in zip(params, twins, strict=True):
        close(a, b)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_mean_norm_that_is_not_finite_skips_the_step_unless_its_gradient_is_missing(bad):
    params = make_params(torch.float64, [(3, 3), (2, 2)])
    before = copy.deepcopy(params)
    optimizer = build("clars", params)
    params[0].grad = torch.ones(3, 3, dtype=torch.float64)
    optimizer.step(mean_norms=[bad, 1.0])
    assert all(map(torch.equal, before, params))
    assert optimizer.skipped == 1
    optimizer.step(mean_norms=torch.tensor([1.0, bad]))
    assert optimizer.skipped == 1
    assert not torch.equal(before[0], params[0])


@pytest.mark.parametrize(
    "rule", ["sngm", "sngm-after-norm", "sngm-decoupled", "block-sngm", "lars", "lars-unscaled", "lars-momentum",
    "clars", "lamb"]
)  # fmt: skip
def test_a_loss_scale_is_divided_out_and_any_found_inf_but_zero_skips(rule):
    params, twins = make_params(shapes=FEW), make_params(shapes=FEW)
    optimizer, twin = build(rule, params, fused=True), build(rule, twins)
    for t, found_inf in enumerate([1, 0, 2, 0]):
        grads = gradients(params, t)
        shape = () if t < 2 else (1,)  # both shapes are in use
        optimizer.grad_scale, optimizer.found_inf = torch.full(shape, 8.0), torch.full(shape, float(found_inf))
        for p, g in zip(params, grads, strict=True):
            p.grad = g * 8.0
        norms = {"mean_norms": [float(g.double().norm()) + 0.5 for g in grads]} if isinstance(twin, CLARS) else {}
        optimizer.step(**norms)
        if not found_inf:
            step(twin, twins, grads)
            assert optimizer.grad_norm == twin.grad_norm
        assert same(optimizer, params, twin, twins)
    assert optimizer.skipped == 2


def test_a_gradient_scaler_of_torch_drives_a_fused_optimizer():
    results = []
    for scale in (None, 2.0**10):
        params = make_params(shapes=[(6, 4), (4,)])
        optimizer = build("sngm", params, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for t in range(4):
            if t == 1 and not scale:
                continue
            optimizer.zero_grad()
            loss = (params[0] @ params[1] - 1.0).square().sum()
            scaler.scale(loss * torch.inf if t == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((optimizer, params))
    assert results[1][0].skipped == 1
    assert same(*results[0], *results[1])


# ---------------------------------------------------------------- autograd, memory and hooks


@pytest.mark.parametrize("rule", RULES)
def test_autograd_sees_that_parameters_changed(rule):
    weight, idle = make_params(shapes=[(4, 4), (3,)])
    optimizer = build(rule, [weight, idle])
    versions = weight._version, idle._version
    x = torch.randn(4, requires_grad=True)
    loss = (weight @ x).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert optimizer._layout is not None
    assert weight._version > versions[0]
    assert idle._version == versions[1]  # it had no gradient
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("rule", RULES)
def test_autograd_sees_that_a_vector_changed_too(rule):
    """Autograd saves no other parameter than LayerNorm's weight in this model."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = build(rule, list(model.parameters()))
    loss = model(torch.randn(3, 4)).pow(3).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert optimizer._layout is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("rule", RULES)
def test_an_interrupted_step_spoils_none_after_it(rule, monkeypatch, tables):
    runs = []
    for _ in range(2):
        params = make_params(torch.bfloat16, [(5,)]) + make_params(torch.float32, [(5,)])  # two launches of each kernel
        runs.append((build(rule, params), params))
        run(*runs[-1], 1)
    measure, calls = tables.kernels.measure, []

    class Interrupted:
        arg_names, __name__ = measure.arg_names, measure.__name__

        def __getitem__(self, grid):
            calls.append(grid)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return measure[grid]

    with monkeypatch.context() as patch:
        patch.setattr(tables.kernels, "measure", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            run(*runs[0], 1, start=7)
    assert len(calls) == 2
    for both in runs:
        run(*both, 1, start=1)
    assert runs[0][0].grad_norm == runs[1][0].grad_norm
    assert same(*runs[0], *runs[1])


@pytest.fixture
def no_garbage_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.usefixtures("no_garbage_collector")
def test_an_optimizer_that_is_gone_leaves_nothing_behind(rule):
    params = make_params(shapes=FEW)
    optimizer = build(rule, params)
    run(optimizer, params)
    assert optimizer._layout is not None
    left = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
    left += [weakref.ref(optimizer), weakref.ref(optimizer._layout)]
    del optimizer
    assert not any(ref() is not None for ref in left)


@pytest.mark.parametrize("lay", [lambda p, g: g, transposed], ids=["contiguous", "transposed"])
@pytest.mark.usefixtures("no_garbage_collector")
def test_a_layout_keeps_no_gradient_and_no_tensor_that_was_replaced(lay):
    params = make_params(shapes=FEW)
    optimizer = build("sngm", params)
    for t in range(2):
        step(optimizer, params, [lay(p, g) for p, g in zip(params, gradients(params, t), strict=True)])
        gone = [weakref.ref(p.grad) for p in params]
        optimizer.zero_grad(set_to_none=True)
        assert not any(ref() is not None for ref in gone)
    state = optimizer.state[params[0]]
    buffer = weakref.ref(state["momentum_buffer"])
    state["momentum_buffer"] = state["momentum_buffer"].clone()
    memory = weakref.ref(params[0].data.untyped_storage())
    params[0].data = params[0].data.clone()
    assert optimizer._layout is not None
    assert buffer() is None
    assert memory() is None


def test_an_optimizer_that_leaves_the_kernels_drops_its_layout():
    params = make_params(shapes=FEW)
    optimizer = build("sngm", params)
    run(optimizer, params)
    assert optimizer._layout is not None
    optimizer.param_groups[0]["foreach"] = True
    run(optimizer, params)
    assert optimizer._layout is None


class Wrapping(SNGM):
    def step(self, closure=None):
        return super().step(closure)


@pytest.fixture(params=[SNGM, Wrapping])
def hooked(request):
    """Return an optimizer, optionally of a subclass that calls its base's step, and a list of its hooks' calls."""
    params = make_params(shapes=FEW)
    optimizer = request.param(params, lr=0.1)
    run(optimizer, params, 1)
    return optimizer, []


def test_hooks_of_an_optimizer_run_once_a_step(hooked):
    optimizer, seen = hooked
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for _ in range(2):
        optimizer.step(lambda: seen.append("closure"))
    assert seen == ["before", "closure", "after"] * 2


def test_hooks_run_in_the_step_after_one_that_failed(hooked):
    optimizer, seen = hooked
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.step()
    assert seen == ["after"]


def test_hooks_of_all_optimizers_run_once_a_step(hooked):
    optimizer, seen = hooked
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == ["before", "after"]


def test_a_profiler_sees_a_step_once(hooked):
    optimizer, _ = hooked
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    seen = [event.name for event in profiler.events() if event.name.startswith("Optimizer.step#")]
    assert seen == [f"Optimizer.step#{type(optimizer).__name__}.step"]


def test_parts_with_a_shared_norm_divide_by_it():
    params = make_params(torch.float64, FEW)
    others = clone_params(params)
    rule = {"lr": 0.1, "weight_decay": 0.1}
    parts = [sngm.SNGM(params[i::2], **rule) for i in range(2)]
    sngm.optim.SharedNorm(parts)
    whole = sngm.SNGM(others, foreach=True, **rule)
    for t in range(2):
        for some in (params, others):
            for p, grad in zip(some, gradients(others, t), strict=True):
                p.grad = grad
        whole.step()
        for part in parts:
            part.step()
            assert part._layout is not None
            torch.testing.assert_close(part.grad_norm, whole.grad_norm)
    for a, b in zip(params, others, strict=True):
        close(a, b)
