"""Single steps: gradients, norms, layouts, groups and learning rates; and convergence of many steps."""

import itertools
import math

import pytest
import torch
from harness import (
    KINDS,
    PATHS,
    RULES,
    UNSUPPORTED,
    build,
    combinations,
    gradients,
    make_params,
    pairwise,
    run,
    same,
    same_states,
    same_tensors,
    states,
    step,
    weights,
)
from torch.optim import lr_scheduler
from torch.profiler import ProfilerActivity, profile

from sngm import CLARS, LAMB, LARS, SNGM, ExtrapSGD
from sngm.optim import create, norms, reference

OWN_GRADS = [rule for rule in RULES if rule != "extrap-sgd"]  # the methods that read .grad
READING = [rule for rule in KINDS if rule in OWN_GRADS]


def close(ours, theirs, tolerance=1e-12):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), float((a - b).detach().abs().max())


def total_norm(tensors):
    return math.sqrt(sum(float(t.detach().abs().double().square().sum()) for t in tensors))


# -------------------------------------------------------------------- gradients are not modified


@pytest.mark.parametrize(("rule", "path", "dtype"), combinations(READING, [torch.float64]))
def test_gradients_whose_sign_is_left_to_be_changed_are_read_with_it(rule, path, dtype):
    memory = torch.tensor([1.0 - 2.0j, 0.5 + 1.0j], dtype=torch.complex128)
    lazy = [memory.conj().imag[:1], memory.conj().imag]
    assert all(g.is_neg() for g in lazy)
    twins = [make_params(dtype, [(1,), (2,)]) for _ in range(2)]
    for params, grads in zip(twins, (lazy, [g.resolve_neg() for g in lazy]), strict=True):
        step(build(rule, params, path), params, grads)
    close(*twins)


@pytest.mark.parametrize(("rule", "path", "dtype"), combinations(READING, [torch.float64]))
def test_a_gradient_of_another_shape_than_its_parameters_is_refused(rule, path, dtype):
    (p,) = params = make_params(dtype, [(6,)])
    optimizer = build(rule, params, path)
    run(optimizer, params, 1)
    grad = p.grad
    p.data = torch.ones(40, dtype=dtype)
    del optimizer.state[p]
    with pytest.raises(ValueError, match=r"a gradient has shape \(6,\), but its parameter has \(40,\)"):
        optimizer.step(**({"mean_norms": [1.0]} if rule == "clars" else {}))
    assert p.grad is grad
    assert p.data.eq(1).all()


@pytest.mark.parametrize(("rule", "path", "dtype"), combinations(READING, [torch.float64]))
def test_a_gradient_whose_memory_was_freed_is_refused(rule, path, dtype):
    (p,) = params = make_params(dtype, [(6,)])
    optimizer = build(rule, params, path)
    run(optimizer, params, 1)
    before = p.detach().clone()
    p.grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="the memory of a gradient has been freed"):
        optimizer.step(**({"mean_norms": [1.0]} if rule == "clars" else {}))
    assert p.equal(before)


@pytest.mark.parametrize(("rule", "path", "dtype"), combinations(dtypes=[torch.float32, torch.bfloat16]))
def test_a_step_leaves_grad_as_it_was_bit_for_bit(rule, path, dtype):
    params = make_params(dtype)
    optimizer = build(rule, params, path)
    for t in range(2):
        kept = gradients(params, t)
        copies = [g.clone() for g in kept]
        if rule == "extrap-sgd":
            for p, g in zip(params, kept, strict=True):
                p.grad = g

            def worker():
                for p in params:
                    p.grad = p.detach() * 2

            optimizer.step([worker, worker])
        else:
            step(optimizer, params, kept)
        assert all(p.grad is g for p, g in zip(params, kept, strict=True))
        assert same_tensors(kept, copies)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", KINDS)
def test_without_any_gradient_nothing_changes(rule, path):
    params = make_params()
    optimizer = build(rule, params, path)
    run(optimizer, params)
    before, state = weights(params), states(optimizer)
    step(optimizer, params, [None] * len(params))
    assert same_tensors(params, before)
    assert same_states(states(optimizer), state)
    assert optimizer.grad_norm.item() == 0.0
    assert optimizer.skipped.item() == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", KINDS)
def test_zero_gradients_move_nothing_from_fresh_state_without_decay(rule, path):
    params = make_params()
    params[0].data.zero_()
    before = weights(params)
    optimizer = build(rule, params, path, weight_decay=0.0)
    for _ in range(2):
        step(optimizer, params, [torch.zeros_like(p) for p in params])
    assert same_tensors(params, before)
    for state in states(optimizer):
        assert not any(v.any() for k, v in state.items() if k != "step")
    assert optimizer.grad_norm.item() == 0.0
    assert optimizer.skipped.item() == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("max_ratio", [0.1, None])
def test_zero_gradients_with_zero_mean_norms_give_clars_no_nan(max_ratio, path):
    params = make_params()
    before = weights(params)
    optimizer = CLARS(params, lr=0.1, max_ratio=max_ratio, **PATHS[path])
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step(mean_norms=[0.0] * len(params))
    assert same_tensors(params, before)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", KINDS)
def test_zero_gradients_with_momentum_and_decay_give_no_nan(rule, path):
    params = make_params()
    optimizer = build(rule, params, path, weight_decay=0.1)
    run(optimizer, params)
    before = weights(params)
    for _ in range(2):
        step(optimizer, params, [torch.zeros_like(p) for p in params])
    assert all(p.isfinite().all() for p in params)
    assert not any(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", KINDS)
def test_weights_that_are_all_zero_can_leave_zero(rule, path):
    params = [torch.nn.Parameter(torch.zeros(4, 5)), torch.nn.Parameter(torch.zeros(7))]
    optimizer = build(rule, params, path)
    step(optimizer, params, [torch.ones_like(p) for p in params])
    assert all((p < 0).all() and p.isfinite().all() for p in params)


@pytest.mark.parametrize(("rule", "path", "dtype"), combinations(dtypes=[torch.float32, torch.bfloat16]))
def test_one_inf_or_nan_anywhere_skips_the_step_and_the_next_one_is_taken(rule, path, dtype):
    params, twins = make_params(dtype), make_params(dtype)
    optimizer, twin = build(rule, params, path), build(rule, twins, path)
    skips = 0
    # in the first step, and in the first, a middle and the last tensor
    for t, (where, bad) in enumerate([(0, math.nan), (2, math.inf), (-1, -math.inf)]):
        before, state = weights(params), states(optimizer)
        grads = gradients(params, t)
        grads[where].view(-1)[-1] = bad
        step(optimizer, params, grads)
        skips += 1
        assert same_tensors(params, before)
        assert same_states(states(optimizer), state)
        assert optimizer.skipped.item() == skips
        assert not optimizer.grad_norm.isfinite()
        run(optimizer, params, 1, start=t)
        run(twin, twins, 1, start=t)
        assert optimizer.grad_norm.isfinite()
        assert same_tensors(params, twins)
        assert same_states(states(optimizer), states(twin))
    assert optimizer.skipped.item() == skips
    assert twin.skipped.item() == 0
    assert not same_tensors(params, make_params(dtype))


@pytest.mark.parametrize(("rule", "capturable", "foreach"), pairwise(RULES, [False, True], [None, True, False]))
def test_a_skipped_step_changes_nothing_where_decay_weights_or_state_overflow(rule, capturable, foreach):
    params = make_params()
    optimizer = build(rule, params, weight_decay=1e30, capturable=capturable, foreach=foreach)
    with torch.no_grad():
        params[0][0, :3] = torch.tensor([1e20, math.inf, -math.inf])
        params[1].fill_(1e20)
    for state in optimizer.state.values():
        for buffer in state.values():
            buffer.view(-1)[0] = math.inf
    before, state = weights(params), states(optimizer)
    grads = gradients(make_params(), 0)
    grads[2].view(-1)[0] = math.nan
    step(optimizer, params, grads)
    assert same_tensors(params, before)
    assert same_states(states(optimizer), state)
    assert optimizer.skipped.item() == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_mean_norm_that_is_not_finite_skips_the_step_of_clars(bad, path):
    params = make_params()
    optimizer = build("clars", params, path)
    run(optimizer, params)
    before, state = weights(params), states(optimizer)
    optimizer.step(mean_norms=[1.0, 1.0, bad, 1.0, 1.0])
    assert same_tensors(params, before)
    assert same_states(states(optimizer), state)
    assert optimizer.skipped.item() == 1
    params[2].grad = None  # its mean norm is not read then
    optimizer.step(mean_norms=[1.0, 1.0, bad, 1.0, 1.0])
    assert optimizer.skipped.item() == 1
    assert torch.equal(params[2], before[2])
    assert not torch.equal(params[0], before[0])


# -------------------------------------------------------------------- grad_norm


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scope": "group"},
        {"scope": "tensor"},
        {"weight_decay": 0.3},
        {"weight_decay": 0.3, "scope": "group"},
        {"weight_decay": 0.3, "scope": "tensor"},
        {"weight_decay": 0.3, "maximize": True},
        {"weight_decay": 0.3, "weight_decay_mode": "after_norm"},
        {"weight_decay": 0.3, "weight_decay_mode": "decoupled"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", PATHS)
def test_grad_norm_of_sngm_is_the_norm_it_divides_by(settings, path):
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
        if path == "fused" and dtype == torch.bfloat16:
            continue
        params = make_params(dtype)
        groups = [
            {"params": params[:2]},
            {"params": params[2:], **({"weight_decay": 0.7} if "weight_decay" in settings else {})},
        ]
        optimizer = SNGM(groups, lr=0.1, **settings, **PATHS[path])
        for t in range(2):
            grads = gradients(params, t)
            inside = [g.double() for g in grads]
            if settings.get("weight_decay_mode", "coupled") == "coupled":
                sign = -1.0 if settings.get("maximize") else 1.0
                wd = [optimizer.param_groups[0 if i < 2 else 1]["weight_decay"] for i in range(len(params))]
                inside = [sign * g + c * p.detach().double() for g, c, p in zip(inside, wd, params, strict=True)]
            step(optimizer, params, grads)
            assert optimizer.grad_norm.shape == ()
            assert optimizer.skipped.shape == ()
            assert optimizer.grad_norm.item() == pytest.approx(total_norm(inside), rel=tolerance)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", ["lars", "lars-unscaled", "lars-momentum", "clars", "lamb", "extrap-sgd"])
def test_grad_norm_of_the_other_methods_is_that_of_the_whole_gradient(rule, path):
    params = make_params(torch.float64)
    optimizer = build(rule, params, path)
    for t in range(2):
        grads = gradients(params, t)
        step(optimizer, params, grads)
        assert optimizer.grad_norm.shape == ()
        assert optimizer.grad_norm.item() == pytest.approx(total_norm(grads), rel=1e-13)


@pytest.mark.parametrize("path", [p for p in PATHS if p != "fused"])
@pytest.mark.parametrize("rule", READING)
def test_the_norm_spans_parameters_of_several_dtypes_and_does_not_overflow_in_half_precision(rule, path):
    params = [p for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64) for p in make_params(d)]
    optimizer = build(rule, params, path, weight_decay=0.0)
    grads = [torch.full_like(p, 3e4) for p in params]  # the norm of two elements overflows float16
    step(optimizer, params, grads)
    assert optimizer.grad_norm.item() == pytest.approx(total_norm(grads), rel=1e-6)
    assert optimizer.skipped.item() == 0
    assert not torch.equal(params[-2], make_params(torch.float64)[-2])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", KINDS)
def test_a_kept_grad_norm_keeps_its_value(rule, path):
    params = make_params()
    optimizer = build(rule, params, path)
    kept, values = [optimizer.grad_norm], [optimizer.grad_norm.item()]
    for t in range(3):
        run(optimizer, params, 1, start=t)
        kept.append(optimizer.grad_norm)
        values.append(optimizer.grad_norm.item())
    assert [k.item() for k in kept] == values
    assert len(set(values)) == 4


SIZES = [(127,), (1025,), (31, 33), (16385,), (128, 128), (200, 201), (8, 16, 20, 20)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_norms_of_large_tensors_are_right_however_they_lie_in_memory(decay, dtype):
    starts = make_params(dtype, SIZES)
    layouts = [
        lambda t: t,
        lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
        lambda t: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t,
        lambda t: t[:1].expand(t.shape),
    ]
    for lay_param, lay_grad in itertools.product(layouts[:3], layouts):
        params = [torch.nn.Parameter(lay_param(p.detach().clone())) for p in starts]
        optimizer = SNGM(params, lr=0.0, weight_decay=decay, scope="tensor", momentum=0.0)
        for p in params:
            p.grad = lay_grad(p.detach().flip(0) + 1.0)
        optimizer.step()
        inside = [p.grad.double() + decay * p.detach().double() for p in params]
        assert optimizer.grad_norm.item() == pytest.approx(
            total_norm(inside), rel=1e-13 if dtype == torch.float64 else 2e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_norm_of_five_million_elements_is_right(decay, dtype):
    p = torch.nn.Parameter(torch.linspace(-2.0, 5.0, 5_000_001).to(dtype))
    p.grad = torch.linspace(3.0, 0.5, 5_000_001).square().to(dtype)
    optimizer = SNGM([p], lr=0.0, weight_decay=decay, momentum=0.0)
    optimizer.step()
    expected = total_norm([p.grad.double() + decay * p.detach().double()])
    assert optimizer.grad_norm.item() == pytest.approx(expected, rel=1e-6)


# -------------------------------------------------------------------- layouts


def sliced(g):
    wide = torch.full((*g.shape[:-1], 2 * g.shape[-1]), 7.0, dtype=g.dtype)
    wide[..., ::2] = g
    return wide[..., ::2]


PARAM_LAYOUTS = {
    "contiguous": lambda w: w,
    "channels_last": lambda w: w.to(memory_format=torch.channels_last),
    "transposed": lambda w: w.mT.contiguous().mT,
    "sliced": sliced,
}
GRAD_LAYOUTS = {
    **PARAM_LAYOUTS,
    "reversed": lambda g: g.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "expanded": lambda g: g.flatten()[0].expand(g.shape),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", READING)
def test_strides_of_parameters_and_gradients_do_not_matter(rule, path):
    pairs = list(itertools.product(PARAM_LAYOUTS, GRAD_LAYOUTS))
    twins = make_params(torch.float64, [(4, 3, 6, 6)] * len(pairs))
    params = [
        torch.nn.Parameter(PARAM_LAYOUTS[lay](q.detach().clone())) for (lay, _), q in zip(pairs, twins, strict=True)
    ]
    strides = [p.stride() for p in params]
    assert len(set(strides)) == len(PARAM_LAYOUTS)
    optimizer, twin = build(rule, params, path), build(rule, twins, "single")
    for t in range(2):
        laid = [GRAD_LAYOUTS[lay](g) for (_, lay), g in zip(pairs, gradients(twins, t), strict=True)]
        copies = [g.clone() for g in laid]
        step(optimizer, params, laid)
        assert same_tensors(laid, copies)
        step(twin, twins, [g.contiguous() for g in laid])
    close(params, twins)
    assert [p.stride() for p in params] == strides


@pytest.mark.parametrize("path", ["single", "foreach", "default"])
@pytest.mark.parametrize("rule", ["sngm", "lars-momentum", "lamb"])
def test_gradients_may_have_another_dtype_than_their_parameters(rule, path):
    params, twins = (make_params(torch.float64, [(4, 3), (5,)]) for _ in range(2))
    optimizer, twin = build(rule, params, path), build(rule, twins, path)
    params[0].grad_dtype = torch.float32
    for t in range(2):
        first, second = gradients(twins, t)
        step(optimizer, params, [first.float(), second])
        step(twin, twins, [first.float().double(), second])
    close(params, twins)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", KINDS)
def test_sparse_gradients_act_like_dense_ones_and_stay_sparse(rule, path):
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(11, 5, sparse=sparse, dtype=torch.float64)
        head = torch.nn.Linear(5, 2, dtype=torch.float64)
        params = [table.weight, *head.parameters()]
        optimizer = build(rule, params, path)

        def closure(table=table, head=head):
            for p in (table.weight, *head.parameters()):
                p.grad = None
            loss = head(table(torch.tensor([1, 4, 4, 9]))).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            if rule == "extrap-sgd":
                optimizer.step([closure, closure])
                continue
            closure()
            if rule == "clars":
                optimizer.step(mean_norms=[p.grad.to_dense().norm() for p in params])
            else:
                optimizer.step()
            assert table.weight.grad.is_sparse is sparse
        ends.append(params)
    close(*ends)


@pytest.mark.parametrize(("rule", "path", "dtype"), pairwise(KINDS, PATHS, [torch.complex64, torch.complex128]))
def test_complex_parameters_train_as_pairs_of_reals(rule, path, dtype):
    params = make_params(dtype, [(4, 5), (3, 2, 3)])
    pairs = [torch.nn.Parameter(torch.view_as_real(p.detach()).clone()) for p in params]
    optimizer, twin = build(rule, params, path), build(rule, pairs, path)
    for t in range(3):
        grads = gradients(params, t)
        step(optimizer, params, grads)
        step(twin, pairs, [torch.view_as_real(g) for g in grads])
    close([torch.view_as_real(p) for p in params], pairs, 1e-13 if dtype == torch.complex128 else 1e-6)
    assert optimizer.grad_norm.item() == pytest.approx(twin.grad_norm.item(), rel=1e-6)
    for p in params:
        for key, value in optimizer.state[p].items():
            assert value.dtype == (torch.float32 if key == "step" else dtype)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", ["lars", "clars"])
def test_a_vector_of_complex_numbers_has_one_dimension_and_no_ratio(rule, path):
    (vector,) = make_params(torch.complex128, [(7,)])
    pairs = torch.nn.Parameter(torch.view_as_real(vector.detach()).clone())
    optimizer = build(rule, [vector], path)
    twin = build(rule, [{"params": [pairs], "adapt": False}], path)
    grads = gradients([vector], 0)
    step(optimizer, [vector], grads)
    step(twin, [pairs], [torch.view_as_real(g) for g in grads])
    close([torch.view_as_real(vector)], [pairs])


# -------------------------------------------------------------------- groups


@pytest.mark.parametrize("path", PATHS)
def test_order_and_grouping_of_parameters_do_not_change_global_sngm(path):
    params = make_params(torch.float64)
    whole = build("sngm", params, path)
    order = [3, 0, 4, 2, 1]
    shuffled = make_params(torch.float64)
    permuted = build("sngm", [shuffled[i] for i in order], path)
    parts = make_params(torch.float64)
    grouped = build("sngm", [{"params": [parts[i] for i in ids]} for ids in ((4,), (1, 3), (0, 2))], path)
    for t in range(10):
        grads = gradients(params, t)
        for optimizer, ps in ((whole, params), (permuted, shuffled), (grouped, parts)):
            step(optimizer, ps, [g.clone() for g in grads])
        assert permuted.grad_norm.item() == pytest.approx(whole.grad_norm.item(), rel=1e-14)
        assert grouped.grad_norm.item() == pytest.approx(whole.grad_norm.item(), rel=1e-14)
    close(shuffled, params, 1e-13)
    close(parts, params, 1e-13)
    by_group = make_params(torch.float64)
    run(build("sngm", [{"params": by_group[:2]}, {"params": by_group[2:]}], path, scope="group"), by_group, 10)
    assert not torch.allclose(by_group[0], params[0], rtol=1e-3)


# -------------------------------------------------------------------- learning rates


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1.0 / (1 + t)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


def replay(rule, path, settings):
    """Repeat a run with a new optimizer for every step, built with the settings of that step."""
    params = make_params(torch.float64)
    before = None
    for t, chosen in enumerate(settings):
        optimizer = build(rule, params, path, **chosen)
        if before is not None:
            for p in params:
                for key, value in before.state[p].items():
                    optimizer.state[p][key].copy_(value)
        run(optimizer, params, 1, start=t)
        before = optimizer
    return params


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("path", ["default", "capturable"])
@pytest.mark.parametrize("rule", ["sngm", "lars", "clars", "lamb", "extrap-sgd"])
def test_schedules_set_the_rate_of_each_step_whether_lr_is_a_number_or_a_tensor(rule, path, scheduler):
    for shape in (None, (), (1,)):
        params = make_params(torch.float64)
        lr = 0.2 if shape is None else torch.full(shape, 0.2, dtype=torch.float64)
        optimizer = build(rule, params, path, lr=lr)
        schedule = SCHEDULERS[scheduler](optimizer)
        used = []
        for t in range(4):
            (group,) = optimizer.param_groups
            used.append({"lr": float(group["lr"]), **{k: group[k] for k in ("momentum", "betas") if k in group}})
            run(optimizer, params, 1, start=t)
            schedule.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
        assert len({one["lr"] for one in used}) > 2
        if shape is None:
            expected, first = replay(rule, path, used), used
        else:
            assert optimizer.param_groups[0]["lr"] is lr  # changed in place, as CUDA graphs need
            assert [one["lr"] for one in used] == pytest.approx([one["lr"] for one in first], rel=1e-14)
        close(params, expected, 1e-13)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", KINDS)
def test_a_tensor_lr_changed_in_place_holds_from_the_next_step(rule, path):
    lr = torch.tensor(0.25, dtype=torch.float64)
    params = make_params(torch.float64)
    optimizer = build(rule, params, path, lr=lr)
    run(optimizer, params, 1)
    lr.fill_(0.0625)
    run(optimizer, params, 1, start=1)
    close(params, replay(rule, path, [{"lr": 0.25}, {"lr": 0.0625}]), 1e-13)


# -------------------------------------------------------------------- closures, hooks, maximize


@pytest.mark.parametrize("rule", OWN_GRADS)
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(rule):
    params, twins = make_params(), make_params()
    optimizer, twin = build(rule, params), build(rule, twins)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(1)
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in params)
        loss.backward()
        return loss

    extra = {"mean_norms": torch.arange(1.0, 6.0)} if rule == "clars" else {}
    expected = sum(float((p * p).sum().detach()) for p in params)
    with torch.no_grad():
        loss = optimizer.step(closure, **extra)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert calls == [1]
    for p in twins:
        p.grad = 2 * p.detach()
    assert twin.step(**extra) is None
    assert same_tensors(params, twins)


@pytest.mark.parametrize("rule", RULES)
def test_step_hooks_run_before_and_after(rule):
    params = make_params()
    optimizer = build(rule, params)
    start, seen = weights(params), []
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(("before", opt, weights(params))))
    optimizer.register_step_post_hook(lambda opt, *_: seen.append(("after", opt, weights(params))))
    run(optimizer, params, 1)
    (one, first, before), (other, second, after) = seen
    assert (one, other) == ("before", "after")
    assert first is second is optimizer
    assert same_tensors(before, start)
    assert same_tensors(after, params)
    assert not same_tensors(after, start)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", KINDS)
def test_maximizing_is_minimizing_the_negated_loss(rule, path):
    params, twins = make_params(), make_params()
    optimizer = build(rule, params, path, weight_decay=0.0, maximize=True)
    twin = build(rule, twins, path, weight_decay=0.0)
    for t in range(3):
        step(optimizer, params, gradients(params, t))
        step(twin, twins, [-g for g in gradients(twins, t)])
        assert optimizer.grad_norm.item() == twin.grad_norm.item()
    assert same_tensors(params, twins)


# -------------------------------------------------------------------- memory


def peak_bytes(work):
    """Return the peak memory of `work` in bytes, beyond what was allocated before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        work()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(sizes))


def test_the_memory_meter_sees_a_temporary_copy():
    x = torch.ones(1 << 16)
    assert 4 << 16 <= peak_bytes(lambda: (x * 2).sum()) < 5 << 16


@pytest.mark.parametrize(
    ("cls", "settings", "limit"),
    [
        (SNGM, {}, 0.05),
        (SNGM, {"weight_decay": 0.1, "weight_decay_mode": "decoupled"}, 0.05),
        (SNGM, {"weight_decay": 0.1}, 0.1),
        (LARS, {"weight_decay": 0.1}, 0.05),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["foreach", "fused"])
def test_a_step_needs_next_to_no_memory_of_its_own(cls, settings, limit, path):
    params = [torch.nn.Parameter(torch.randn(200, 200)) for _ in range(40)]
    optimizer = cls(params, lr=0.1, **settings, **PATHS[path])
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert peak_bytes(optimizer.step) < limit * sum(p.numel() * 4 for p in params)


# -------------------------------------------------------------------- convergence

CONVERGENCE = {  # class, settings, decay of lr per step, final distance relative to the initial one
    "sngm": (SNGM, {"lr": 0.3}, 0.95, 1e-5),
    "sngm nesterov": (SNGM, {"lr": 0.3, "nesterov": True}, 0.95, 1e-5),
    "sngm coupled": (SNGM, {"lr": 0.1, "weight_decay": 0.5}, 0.95, 1e-5),
    "sngm per tensor": (SNGM, {"lr": 0.1, "scope": "tensor"}, 0.95, 1e-5),
    "sngd": (SNGM, {"lr": 1.0, "momentum": 0.0}, 0.95, 1e-5),
    "lars": (LARS, {"lr": 0.1, "trust_coefficient": 1.0}, 0.95, 1e-4),
    "lars decayed": (LARS, {"lr": 0.3, "trust_coefficient": 1.0, "weight_decay": 0.5}, 0.95, 1e-2),
    "lars unscaled": (LARS, {"lr": 0.03, "trust_coefficient": 1.0, "variant": "unscaled"}, 0.95, 2e-3),
    "lars momentum": (LARS, {"lr": 0.3, "variant": "momentum"}, 0.95, 1e-4),
    "clars": (CLARS, {"lr": 3.0}, 0.95, 1e-2),
    "lamb": (LAMB, {"lr": 0.3}, 0.95, 1e-4),
    "extrap-sgd": (ExtrapSGD, {"lr": 0.05, "inner_lr": 0.1}, 1.0, 1e-3),
}


@pytest.mark.parametrize("case", CONVERGENCE)
def test_every_method_settles_in_the_optimum_of_a_strongly_convex_quadratic(case):
    cls, settings, factor, left = CONVERGENCE[case]
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 13), (3, 4), (2, 3, 2, 2)]
    target = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    curvature = [1 + 3 * torch.rand(s, generator=generator, dtype=torch.float64) for s in shapes]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]
    decay = settings.get("weight_decay", 0.0)
    optimum = [h * t / (h + decay) for h, t in zip(curvature, target, strict=True)]

    def distance():
        return total_norm([p - o for p, o in zip(params, optimum, strict=True)])

    def gradient(shift=0.0):
        for p, h, t in zip(params, curvature, target, strict=True):
            p.grad = h * (p.detach() - t - shift)

    start = distance()
    optimizer = cls(params, **settings)
    schedule = lr_scheduler.ExponentialLR(optimizer, factor)
    for _ in range(200):
        if cls is ExtrapSGD:  # workers with different losses, whose mean is correct
            optimizer.step([lambda: gradient(1.0), lambda: gradient(-1.0)])
        else:
            gradient()
            optimizer.step(**({"mean_norms": [p.grad.norm() for p in params]} if cls is CLARS else {}))
        schedule.step()
    assert distance() <= left * start


# -------------------------------------------------------------------- extremes


@pytest.mark.parametrize("path", ["single", "foreach", "fused"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_torch_sgd_equals_the_reference_of_momentum_sgd(nesterov, path):
    params = make_params(torch.float64)
    sgd = torch.optim.SGD(params, lr=0.05, momentum=0.8, weight_decay=0.03, nesterov=nesterov, **PATHS[path])
    w, v = weights(params), [torch.zeros_like(p) for p in params]
    for t in range(20):
        grads = gradients(w, t)
        step(sgd, params, grads)
        w, v = reference.msgd(w, v, grads, eta=0.05, beta=0.8, wd=0.03, nesterov=nesterov)
    close(params, w)


@pytest.mark.parametrize("path", ["single", "foreach", "default"])
@pytest.mark.parametrize("name", ["lars", "lars-unscaled", "lars-momentum", "lamb"])
def test_a_run_that_blows_up_does_so_in_the_weights_not_with_an_error_of_torch(name, path):
    w = torch.nn.Parameter(torch.full((64, 64), 3e37))
    w.grad = torch.full((64, 64), 1e-3)
    settings = {"max_ratio": None} if name == "lars-unscaled" else {}
    optimizer = create(name, [w], lr=30.0, **settings, **PATHS[path])
    optimizer.step()
    assert optimizer.skipped.item() == 0
    assert not torch.equal(w, torch.full_like(w, 3e37))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["sngm", "lars", "lamb"])
def test_gradients_that_autograd_left_conjugated_are_read_as_they_are(name, path):
    a = torch.tensor([1 + 2j, -3j, 0.5 + 0j])
    lazy, plain = (torch.nn.Parameter(torch.tensor([1j, 1 + 1j, 2 - 1j])) for _ in range(2))
    (lazy.conj() * a).real.sum().backward()
    assert lazy.grad.is_conj()
    plain.grad = lazy.grad.resolve_conj().clone()
    for w in (lazy, plain):
        create(name, [w], lr=0.1, **PATHS[path]).step()
    assert torch.equal(lazy, plain)


@pytest.mark.parametrize("path", ["single", "foreach", "default"])
@pytest.mark.parametrize("name", ["sngm", "lars", "lamb"])
def test_a_model_cast_after_the_optimizer_was_built_takes_its_state_along(name, path):
    model = torch.nn.Linear(4, 3)
    optimizer = create(name, model.parameters(), lr=30.0 if name == "lars" else 0.1, **PATHS[path])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model.to(dtype)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        for p in model.parameters():
            for key in optimizer.BUFFERS:
                kept = optimizer.state[p][key]
                assert kept.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
                assert kept.abs().sum() > 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["coupled", "after_norm", "decoupled"])
def test_eps_zero_divides_no_zero_and_keeps_tiny_gradients_from_exploding(mode, path):
    w = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = SNGM([w], lr=1.0, eps=0.0, weight_decay=0.1, weight_decay_mode=mode, **PATHS[path])
    for g in (0.0, 1e-25):
        w.grad = torch.full_like(w, g)
        optimizer.step()
        assert w.isfinite().all()
        assert w.norm() <= 1.0


def test_a_zero_gradient_leaves_lars_the_ratio_of_its_formula():
    w = torch.nn.Parameter(torch.full((3, 4), 2.0))
    w.grad = torch.zeros_like(w)
    LARS([w], lr=1.0, weight_decay=0.01, trust_coefficient=0.001).step()
    torch.testing.assert_close(w.detach(), torch.full((3, 4), 2.0 * (1 - 0.001)))  # c * ||w|| / (wd * ||w||) * wd * w


@pytest.mark.parametrize("size", [1e-24, 1e-15, 1e-8, 1e25])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_norms_are_right_where_squares_are_less_or_more_than_float32_holds(size, decay):
    tensors = [torch.full((64, 64), size), torch.full((64, 65), 3.0), torch.zeros(70, 70), torch.full((5,), size)]
    others = [t.clone() for t in tensors] if decay else []
    exact = torch.tensor([t.double().mul(1.0 + decay).square().sum() for t in tensors])
    torch.testing.assert_close(norms.squares(tensors, others, decay), exact, rtol=4e-6, atol=0.0)
    few = [0, 2, 3]
    found = norms.square([tensors[i] for i in few], [others[i] for i in few] if others else [], decay)
    torch.testing.assert_close(found, exact[few].sum(), rtol=4e-6, atol=0.0)


@pytest.mark.parametrize("size", [1e25, 0.0])
def test_norms_taken_again_need_little_memory(size):
    tensors = [torch.full((3 * norms.PIECE,), size, dtype=torch.bfloat16) for _ in range(2)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        found = norms.squares(tensors)
    torch.testing.assert_close(
        found.sqrt(), torch.full((2,), float(tensors[0][0]) * math.sqrt(3 * norms.PIECE)).double()
    )
    assert max(event.self_cpu_memory_usage for event in seen.events()) <= 8 * norms.PIECE + 4096


@pytest.mark.parametrize("scale", [None, 2.0**16])
@pytest.mark.parametrize("path", ["single", "foreach", "default", "capturable"])
def test_a_gradient_whose_squares_lamb_cannot_keep_skips_the_step(path, scale):
    w = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = LAMB([w], lr=0.01, **PATHS[path])
    steps = []
    for g in (1.0, 1e25, 1.0, 1.0):
        if scale:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
        w.grad = torch.full((4, 4), g * (scale or 1.0))
        before = w.detach().clone()
        optimizer.step()
        steps.append(float((w.detach() - before).norm()))
    assert steps[1] == 0.0
    assert min(steps[0], *steps[2:]) > 0.01
    assert optimizer.skipped == 1
    clipped = LAMB([w], lr=0.01, max_grad_norm=1.0, **PATHS[path])
    w.grad.fill_(1e25)
    clipped.step()
    assert clipped.skipped == 0
    assert clipped.state[w]["exp_avg_sq"].isfinite().all()


@pytest.mark.parametrize("path", ["single", "default", "capturable"])
@pytest.mark.parametrize("rule", ["lars", "lars-unscaled", "lars-momentum", "clars"])
def test_gradients_as_small_as_numbers_can_be_make_no_weight_infinite(rule, path):
    ends = []
    for how in (path, "foreach"):
        w = torch.nn.Parameter(torch.ones(4, 4))
        optimizer = build(rule, [w], how, lr=10.0, weight_decay=0.0, max_ratio=None)
        w.grad = torch.full((4, 4), 1e-43)
        optimizer.step(**({"mean_norms": [4e-43]} if rule == "clars" else {}))
        assert w.isfinite().all()
        ends.append(w)
    torch.testing.assert_close(ends[0], ends[1])


@pytest.mark.parametrize("path", ["single", "foreach", "default"])
@pytest.mark.parametrize("rule", [rule for rule in OWN_GRADS if rule != "lamb"])
def test_a_norm_is_shown_as_infinite_only_where_the_step_was_skipped(rule, path):
    w = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = build(rule, [w], path)
    w.grad = torch.full((4, 4), 3e38)
    optimizer.step(**({"mean_norms": [1.0]} if rule == "clars" else {}))
    assert (float(optimizer.grad_norm), optimizer.skipped) == (torch.finfo(torch.float32).max, 0)
    w.grad = torch.full((4, 4), math.inf)
    optimizer.step(**({"mean_norms": [1.0]} if rule == "clars" else {}))
    assert (optimizer.grad_norm, optimizer.skipped) == (math.inf, 1)


@pytest.mark.parametrize(
    ("rule", "path", "dtype", "size"),  # squares of the smaller size underflow float32
    pairwise(KINDS, PATHS, [torch.float32, torch.bfloat16], [1.0, 1e-12], without=UNSUPPORTED),
)
def test_a_default_device_has_no_part_in_a_step(rule, path, dtype, size):
    shapes = [(5, 13), (3000,)]  # one is long enough to be summed in pieces
    params, others = make_params(dtype, shapes), make_params(dtype, shapes)
    ours, theirs = build(rule, params, path), build(rule, others, path)
    for t in range(2):
        grads = [g * size for g in gradients(others, t)]
        with torch.device("meta"):
            step(ours, params, grads)
        step(theirs, others, grads)
    assert same(ours, params, theirs, others)
