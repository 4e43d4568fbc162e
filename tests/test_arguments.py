"""Invalid arguments raise errors with the argument's name and the allowed values, before anything is changed."""

import math
import re

import pytest
import torch
from harness import RULES, SHAPES, build, make_params, run, same_states, states

from sngm import CLARS, LAMB, LARS, NSGDM, SNGM, ExtrapSGD

NEEDED = {SNGM: {"lr": 0.1}, LARS: {"lr": 0.1}, CLARS: {"lr": 0.1}, LAMB: {}, ExtrapSGD: {"lr": 0.1, "inner_lr": 0.1}}
ALL = list(NEEDED)
MOMENTUM = [SNGM, LARS, CLARS, ExtrapSGD]
# (classes, settings, error, what the message must contain besides the argument's name)
NOT_A_RATE = [
    (-0.1, ValueError, "-0.1"),
    (math.nan, ValueError, "nan"),
    (math.inf, ValueError, "inf"),
    ("0.1", TypeError, "'0.1'"),
    (True, TypeError, "True"),
    (None, TypeError, "None"),
    (1j, TypeError, "1j"),
    ([0.1], TypeError, "[0.1]"),
    (torch.tensor(-0.5), ValueError, "-0.5"),
    (torch.tensor(math.nan), ValueError, "nan"),
    (torch.tensor([0.1, 0.2]), ValueError, "(2,)"),
    (torch.tensor([]), ValueError, "(0,)"),
    (torch.tensor(1), ValueError, "torch.int64"),
]
NOT_NEGATIVE = [(-0.1, ValueError, "-0.1"), (math.nan, ValueError, "nan"), (math.inf, ValueError, "inf"),
                ("0", TypeError, "'0'"), (False, TypeError, "False"), (None, TypeError, "None")]  # fmt: skip
POSITIVE = [(0.0, ValueError, "0.0"), *(case for case in NOT_NEGATIVE if case[0] is not None)]
BELOW_ONE = [(1.0, ValueError, "1.0"), (1.5, ValueError, "1.5"), *NOT_NEGATIVE]
NOT_A_FLAG = [(1, TypeError, "1"), ("yes", TypeError, "'yes'")]
NOT_A_CHOICE = [("couple", ValueError, "'couple'"), (None, ValueError, "None"), (1, ValueError, "1")]
NOT_BOUNDS = [(1.0, TypeError, "1.0"), ((1.0,), TypeError, "(1.0,)"), ((2.0, 1.0), ValueError, "(2.0, 1.0)"),
              ((0.0, 1.0), ValueError, "0.0"), ((-1.0, 1.0), ValueError, "-1.0"), ((1.0, math.inf), ValueError, "inf"),
              (("a", 1.0), TypeError, "'a'"), ((1.0, math.nan), ValueError, "nan")]  # fmt: skip
NOT_BETAS = [(0.9, TypeError, "0.9"), ((0.9,), TypeError, "(0.9,)"), ((0.9, 1.0), ValueError, "1.0"),
             ((-0.1, 0.9), ValueError, "-0.1"), ((0.9, math.nan), ValueError, "nan"), (("a", 0.9), TypeError, "'a'"),
             ((0.9, 0.9, 0.9), TypeError, "(0.9, 0.9, 0.9)")]  # fmt: skip
BAD = [
    (ALL, "lr", NOT_A_RATE),
    ([ExtrapSGD], "inner_lr", NOT_A_RATE),
    (MOMENTUM, "momentum", BELOW_ONE),
    (ALL, "weight_decay", NOT_NEGATIVE),
    ([SNGM, LARS], "eps", NOT_NEGATIVE),
    ([LAMB], "eps", [(1e-40, ValueError, "1e-40"), *POSITIVE]),
    ([LARS, CLARS], "trust_coefficient", POSITIVE),
    ([CLARS], "trust_coefficient", [(None, TypeError, "None")]),
    ([LARS, CLARS], "max_ratio", POSITIVE),
    ([LARS], "clamp_grad", POSITIVE),
    ([LAMB], "max_grad_norm", POSITIVE),
    ([LARS, LAMB], "phi", NOT_BOUNDS),
    ([LAMB], "betas", NOT_BETAS),
    ([LAMB], "bias_correction", NOT_A_FLAG),
    ([SNGM], "weight_decay_mode", NOT_A_CHOICE),
    ([SNGM], "scope", NOT_A_CHOICE),
    ([LARS], "variant", NOT_A_CHOICE),
    ([SNGM, ExtrapSGD], "nesterov", [*NOT_A_FLAG, (None, TypeError, "None")]),
    (ALL, "maximize", [*NOT_A_FLAG, (None, TypeError, "None")]),
    (ALL, "capturable", [*NOT_A_FLAG, (None, TypeError, "None")]),
    (ALL, "foreach", NOT_A_FLAG),
    (ALL, "fused", NOT_A_FLAG),
    (ALL, "learning_rate", [(0.1, TypeError, "unexpected")]),
    ([SNGM], "dampening", [(0.1, TypeError, "unexpected")]),
]
CASES = [
    pytest.param(cls, name, value, error, held, id=f"{cls.__name__} {name}={value!r}")
    for classes, name, values in BAD
    for cls in classes
    for value, error, held in values
]


def message(name, *held):
    """Return a pattern for pytest.raises that matches all of these, in any order."""
    return "".join(f"(?=.*{re.escape(text)})" for text in (name, *held))


@pytest.mark.parametrize(("cls", "name", "value", "error", "held"), CASES)
def test_a_bad_argument_is_refused_by_name_and_so_is_a_group_with_it(cls, name, value, error, held):
    params = make_params()
    with pytest.raises(error, match=message(name, held)):
        cls(params, **{**NEEDED[cls], name: value})
    if name in ("scope", "learning_rate", "dampening"):
        return
    optimizer = cls(params[:3], **NEEDED[cls])
    groups = [dict(g) for g in optimizer.param_groups]
    added = {"params": params[3:], name: value}
    with pytest.raises(error, match=message(name, held)):
        optimizer.add_param_group(added)
    assert optimizer.param_groups == groups
    assert set(optimizer.state) == set(params[:3])
    assert added.keys() == {"params", name}


@pytest.mark.parametrize("cls", ALL)
def test_a_misspelt_group_key_is_answered_with_the_right_one(cls):
    params = make_params()
    with pytest.raises(ValueError, match=message("'wieght_decay'", "'weight_decay'")):
        cls([{"params": params, "wieght_decay": 0.1}], **NEEDED[cls])
    optimizer = cls(params[:3], **NEEDED[cls])
    with pytest.raises(ValueError, match=message("'maximise'", "'maximize'")):
        optimizer.add_param_group({"params": params[3:], "maximise": True})
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state) == set(params[:3])


@pytest.mark.parametrize("cls", ALL)
def test_notes_that_schedulers_and_trainers_keep_in_groups_are_let_through(cls):
    params = make_params()
    notes = {"name": "head", "lr_scale": 0.5, "layer": 3, "swa_lr": 0.01, "group_names": ["a"]}
    optimizer = cls([{"params": params, **notes}], **NEEDED[cls])
    assert {k: optimizer.param_groups[0][k] for k in notes} == notes
    # groups of another optimizer, with keys that a scheduler added
    for other in (torch.optim.SGD(params, lr=0.1, momentum=0.9), torch.optim.AdamW(params, lr=0.1)):
        torch.optim.lr_scheduler.OneCycleLR(other, max_lr=0.2, total_steps=5)
        taken = cls([dict(g) for g in other.param_groups], **NEEDED[cls])
        assert taken.param_groups[0]["max_lr"] == 0.2
        assert taken.param_groups[0]["initial_lr"] == pytest.approx(0.008)


@pytest.mark.parametrize("name", ["weight_decay_mode", "scope", "variant"])
def test_an_unknown_choice_is_answered_with_the_known_ones(name):
    cls = LARS if name == "variant" else SNGM
    known = {
        "weight_decay_mode": ("'coupled'", "'after_norm'", "'decoupled'"),
        "scope": ("'global'", "'group'", "'tensor'"),
        "variant": ("'you2017'", "'unscaled'", "'momentum'"),
    }[name]
    with pytest.raises(ValueError, match=message(name, "'what'", *known)):
        cls(make_params(), lr=0.1, **{name: "what"})


@pytest.mark.parametrize(
    ("name", "allowed"), [("lr", "[0, inf)"), ("momentum", "[0, 1)"), ("weight_decay", "[0, inf)"), ("eps", "[0, inf)")]
)
def test_a_number_out_of_range_is_answered_with_the_range(name, allowed):
    with pytest.raises(ValueError, match=message(name, "-3", allowed)):
        SNGM(make_params(), **{"lr": 0.1, name: -3})


@pytest.mark.parametrize("cls", [SNGM, ExtrapSGD])
def test_nesterov_without_momentum_is_refused(cls):
    for settings in ({"momentum": 0.0, "nesterov": True}, {"momentum": 0, "nesterov": True}):
        with pytest.raises(ValueError, match=r"nesterov.*momentum"):
            cls(make_params(), **NEEDED[cls], **settings)
    optimizer = cls(make_params(), **NEEDED[cls], nesterov=True)
    with pytest.raises(ValueError, match=r"nesterov.*momentum"):
        optimizer.add_param_group({"params": make_params(), "momentum": 0.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", ALL)
def test_foreach_and_fused_together_are_refused(cls):
    with pytest.raises(ValueError, match=r"foreach.*fused"):
        cls(make_params(), **NEEDED[cls], foreach=True, fused=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cls", ALL)
def test_fused_refuses_a_dtype_its_kernels_are_wrong_for(cls, dtype):
    with pytest.raises(ValueError, match=message("fused", str(dtype), "float32", "float64")):
        cls([*make_params(), *make_params(dtype)], **NEEDED[cls], fused=True)
    optimizer = cls(make_params(), **NEEDED[cls])
    with pytest.raises(ValueError, match=message("fused", str(dtype), "float32", "float64")):
        optimizer.add_param_group({"params": make_params(dtype), "fused": True})
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.state) == len(SHAPES)


@pytest.mark.parametrize("cls", ALL)
def test_fused_refuses_a_device_it_cannot_serve(cls):
    with pytest.raises(ValueError, match=message("fused", "meta", "cpu")):
        cls([torch.nn.Parameter(torch.zeros(3, device="meta"))], **NEEDED[cls], fused=True)


@pytest.mark.parametrize("cls", ALL)
def test_scope_is_for_the_whole_optimizer(cls):
    if cls is not SNGM:
        with pytest.raises(TypeError, match="scope"):
            cls(make_params(), **NEEDED[cls], scope="tensor")
        return
    with pytest.raises(ValueError, match=message("scope", "'tensor'", "group")):
        SNGM([{"params": make_params(), "scope": "tensor"}], lr=0.1)
    optimizer = SNGM(make_params(), lr=0.1)
    with pytest.raises(ValueError, match=message("scope", "'tensor'", "group")):
        optimizer.add_param_group({"params": make_params(), "scope": "tensor"})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", ALL)
def test_no_parameters_at_all_are_refused(cls):
    for nothing in ([], iter(()), [{"params": []}], [{"params": []}, {"params": []}]):
        with pytest.raises(ValueError, match=r"param.*(?:empty|at least one)|empty param"):
            cls(nothing, **NEEDED[cls])


def test_an_empty_group_beside_a_full_one_is_allowed():
    params = make_params()
    optimizer = SNGM([{"params": []}, {"params": params}], lr=0.1)
    run(optimizer, params)
    assert optimizer.grad_norm > 0


@pytest.mark.parametrize("cls", ALL)
def test_a_repeated_parameter_is_refused_within_a_group_and_across_groups(cls):
    params = make_params()
    with pytest.raises(ValueError, match=r"param.*(?:repeat|twice)"):
        cls([params[0], params[1], params[0]], **NEEDED[cls])
    with pytest.raises(ValueError, match=r"param.*(?:repeat|twice)"):
        cls([("a", params[0]), ("b", params[0])], **NEEDED[cls])
    with pytest.raises(ValueError, match=r"param.*more than one"):
        cls([{"params": params[:2]}, {"params": params[1:]}], **NEEDED[cls])


@pytest.mark.parametrize("cls", ALL)
def test_parameters_that_cannot_be_trained_are_refused(cls):
    for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn):
        numbers = torch.nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
        with pytest.raises(TypeError, match=message("params", "params[1]", str(dtype), "float32")):
            cls([torch.nn.Parameter(torch.zeros(3)), numbers], **NEEDED[cls])
    with pytest.raises(ValueError, match="non-leaf"):
        cls([torch.nn.Parameter(torch.zeros(3)) * 2], **NEEDED[cls])


@pytest.mark.parametrize("cls", ALL)
def test_things_that_are_not_lists_of_parameters_are_refused(cls):
    p = torch.nn.Parameter(torch.zeros(3))
    for wrong in (p, [3.0], ["weight"], [{"weights": [p]}], [{"params": {p}}], None, 3, [[p]]):
        with pytest.raises(TypeError):
            cls(wrong, **NEEDED[cls])


@pytest.mark.parametrize(
    ("added", "error", "match"),
    [
        ("repeat", ValueError, "more than one"),
        ("twice", ValueError, "repeat|twice"),
        ("integers", TypeError, r"params.*torch\.int64"),
        ("names", ValueError, "names"),
        ("number", TypeError, "param_group.*3"),
        ("unnamed", TypeError, "param_group.*params"),
        ("strings", TypeError, "Tensor"),
        ("set", TypeError, "set"),
        ("nonleaf", ValueError, "non-leaf"),
    ],
)
@pytest.mark.parametrize("rule", ["sngm", "lars", "clars", "lamb", "extrap-sgd"])
def test_a_refused_group_leaves_the_optimizer_as_it_was(rule, added, error, match):
    params = make_params()
    optimizer = build(rule, params[:3])
    run(optimizer, params[:3])
    fresh = torch.nn.Parameter(torch.zeros(3))
    group = {
        "repeat": {"params": [fresh, params[0]]},
        "twice": {"params": [fresh, fresh]},
        "integers": {"params": [fresh, torch.zeros(3, dtype=torch.int64)]},
        "names": {"params": [("fresh", fresh)]},
        "number": 3,
        "unnamed": {"parameters": [fresh]},
        "strings": {"params": [fresh, "weight"]},
        "set": {"params": {fresh}},
        "nonleaf": {"params": [fresh, fresh * 2]},
    }[added]
    groups, before = [dict(g) for g in optimizer.param_groups], states(optimizer)
    with pytest.raises(error, match=match):
        optimizer.add_param_group(group)
    assert [dict(g) for g in optimizer.param_groups] == groups
    assert set(optimizer.state) == set(params[:3])
    assert same_states(states(optimizer), before)
    run(optimizer, params[:3], start=2)


@pytest.mark.parametrize("cls", [c for c in ALL if c is not LAMB])
def test_lr_is_required(cls):
    with pytest.raises(TypeError, match="lr"):
        cls(make_params())


@pytest.mark.parametrize(("foreach", "value"), [(True, None), (False, "x"), (None, None), (None, "x")])
@pytest.mark.parametrize("cls", ALL)
def test_a_rate_that_became_none_is_refused_before_anything_changes(cls, foreach, value):
    params = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = cls([{"params": [p]} for p in params], **NEEDED[cls], foreach=foreach)
    for p in params:
        p.grad = torch.ones(2, 2)
    optimizer.param_groups[1]["lr"] = value
    before = states(optimizer)
    given = {CLARS: {"mean_norms": [1.0, 1.0]}, ExtrapSGD: {"closures": [lambda: sum(params).sum().backward()]}}
    with pytest.raises(TypeError, match=rf"lr in param_groups\[1\] must be a number or a tensor, got {value!r}"):
        optimizer.step(**given.get(cls, {}))
    assert all(p.equal(torch.ones(2, 2)) for p in params)
    assert same_states(states(optimizer), before)


def test_flags_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        SNGM(make_params(), 0.1, 0.9, 0.0, "decoupled")


# -------------------------------------------------------------------- arguments of step()


@pytest.mark.parametrize(
    ("mean_norms", "error", "match"),
    [
        (None, TypeError, "5"),
        ([1.0] * 4, ValueError, "(?=.*5)(?=.*4)"),
        ([1.0] * 6, ValueError, "(?=.*5)(?=.*6)"),
        (torch.ones(4), ValueError, "(?=.*5)(?=.*4)"),
        (torch.ones(5, 1), ValueError, r"\(5, 1\)"),
        (torch.tensor(1.0), ValueError, r"\(\)"),
        ([1.0, 1.0, -2.0, 1.0, 1.0], ValueError, "-2"),
        (torch.tensor([1.0, 1.0, -2.0, 1.0, 1.0]), ValueError, "-2"),
        ("12345", TypeError, "'1'"),
        (["1", "2", "3", "4", "5"], TypeError, "'1'|str"),
        ([1.0, 1.0, None, 1.0, 1.0], TypeError, "None"),
        ([1.0, 1.0, torch.ones(2), 1.0, 1.0], ValueError, r"\(2,\)|one number"),
        (3.0, TypeError, "float"),
        (dict.fromkeys(range(5), 1.0), TypeError, "dict"),
    ],
    ids=repr,
)
def test_clars_names_what_is_wrong_with_mean_norms_and_changes_nothing(mean_norms, error, match):
    params = make_params()
    optimizer = build("clars", params)
    run(optimizer, params)
    before, state = [p.detach().clone() for p in params], states(optimizer)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(error, match=f"(?=.*mean_norms)(?=.*(?:{match}))"):
        optimizer.step(mean_norms=mean_norms)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert same_states(states(optimizer), state)
    assert optimizer.skipped.item() == 0


def test_clars_without_mean_norms_says_so():
    optimizer = build("clars", make_params())
    with pytest.raises(TypeError, match="mean_norms"):
        optimizer.step()


@pytest.mark.parametrize(
    ("closures", "error"),
    [
        ([], ValueError),
        ((), ValueError),
        (None, TypeError),
        (lambda: 0.0, TypeError),
        ("ab", TypeError),
        ([lambda: 0.0, 3], TypeError),
        (3, TypeError),
    ],
    ids=["empty list", "empty tuple", "None", "one function", "string", "a number among them", "number"],
)
def test_extrap_sgd_names_what_is_wrong_with_closures_and_changes_nothing(closures, error):
    params = make_params()
    optimizer = build("extrap-sgd", params)
    for p in params:
        p.grad = torch.ones_like(p)
    before, state = [p.detach().clone() for p in params], states(optimizer)
    with pytest.raises(error, match="closures"):
        optimizer.step(closures)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in params)
    assert same_states(states(optimizer), state)


@pytest.mark.parametrize("rule", RULES)
def test_good_values_at_the_edges_are_taken(rule):
    cls, usual = RULES[rule]
    edges = {"lr": 0, "weight_decay": 0, "maximize": False, "foreach": None, "fused": None, "capturable": False}
    more = {
        SNGM: {"momentum": 0, "eps": 0},
        NSGDM: {"momentum": 0, "eps": 0},
        LARS: {"momentum": 0, "eps": 0, "phi": (1.0, 1.0), "trust_coefficient": 1e-30},
        CLARS: {"momentum": 0, "max_ratio": None},
        LAMB: {"betas": (0.0, 0.0), "phi": [0.5, 0.5], "max_grad_norm": 1},
        ExtrapSGD: {"inner_lr": torch.tensor([0.0]), "momentum": 0},
    }[cls]
    params = make_params()
    optimizer = build(
        rule, params, **{**edges, **more, "nesterov": False} if "nesterov" in usual else {**edges, **more}
    )
    before = [p.detach().clone() for p in params]
    run(optimizer, params)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))  # lr = 0


@pytest.mark.parametrize("rule", RULES)
def test_parameters_without_a_shape_are_refused_with_the_way_to_get_one(rule):
    with pytest.raises(ValueError, match=r"params\[0\] has no shape yet: let some input through the model before"):
        build(rule, torch.nn.LazyLinear(3).parameters())


@pytest.mark.parametrize("params", [None, 3, torch.nn.Linear(2, 2)], ids=["None", "3", "module"])
def test_params_that_cannot_be_gone_through_are_named(params):
    with pytest.raises(TypeError, match=f"params.*{type(params).__name__}"):
        SNGM(params, lr=0.1)


def test_settings_that_would_do_nothing_are_refused_in_groups():
    w = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="LARS has no nesterov"):
        LARS([{"params": [w], "nesterov": True}], lr=0.1)
    with pytest.raises(ValueError, match="SNGM has no dampening"):
        SNGM([{"params": [w], "dampening": 0.5}], lr=0.1)


def test_a_process_group_is_asked_for_by_name():
    with pytest.raises(TypeError, match=r"norm_group.*process group.*3"):
        SNGM([torch.nn.Parameter(torch.zeros(2))], lr=0.1, norm_group=3)


def test_lamb_takes_over_groups_of_a_torch_sgd():
    w = torch.nn.Parameter(torch.ones(2, 2))
    groups = [dict(group) for group in torch.optim.SGD([w], lr=0.1).param_groups]
    optimizer = LAMB(groups)
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert optimizer.state[w]["step"] == 1


@pytest.mark.parametrize(
    ("param", "error", "match"),
    [
        (torch.nn.Parameter(torch.eye(3).to_sparse()), TypeError, "dense.*sparse_coo"),
        (torch.ones(1).expand(3), ValueError, "expanded"),
        (torch.ones(2, dtype=torch.complex64).conj(), ValueError, "resolve_conj"),
    ],
    ids=["sparse", "expanded", "conjugated"],
)
def test_parameters_no_rule_could_update_are_refused_at_once(param, error, match):
    with pytest.raises(error, match=rf"params.*{match}"):
        SNGM([param], lr=0.1)


def test_a_number_no_float_can_hold_is_refused_like_any_other():
    with pytest.raises(ValueError, match="lr must be a finite number"):
        SNGM([torch.nn.Parameter(torch.zeros(2))], lr=10**400)
