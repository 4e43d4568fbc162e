"""The registry of methods, and the parameter groups of a model."""

import hashlib
import importlib.util
import itertools
import math
import sys
import types
from dataclasses import replace

import console
import pytest
import torch
from harness import make_params, run, same_tensors
from torch import nn

import sngm
from sngm import CLARS, LAMB, LARS, NSGDM, SNGM, ExtrapSGD, SpectralSNGM
from sngm.optim import create, decay_groups, names, registry
from sngm.optim.external import restores_its_state, set_mode
from sngm.training import resolve
from sngm.training.build import build_optimizer

KNOWN = {  # name: the equivalent class and settings
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "block-sngm": lambda p: SNGM(p, lr=0.02, scope="tensor"),
    "clars": lambda p: CLARS(p, lr=0.02),
    "extrap-sgd": lambda p: ExtrapSGD(p, lr=0.02, inner_lr=0.01),
    "lamb": lambda p: LAMB(p, lr=0.02),
    "lars": lambda p: LARS(p, lr=0.02),
    "lars-momentum": lambda p: LARS(p, lr=0.02, variant="momentum"),
    "lars-unscaled": lambda p: LARS(p, lr=0.02, variant="unscaled", max_ratio=50.0, clamp_grad=10.0),
    "lion": lambda p: library("pytorch_optimizer").Lion(p, lr=0.02, weight_decay=0.1),
    "msgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "muon": lambda p: library("timm.optim").Muon(p, lr=0.02, nesterov=True, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "nsgdm": lambda p: NSGDM(p, lr=0.02),
    "schedule-free": lambda p: library("schedulefree").AdamWScheduleFree(p, lr=0.02),
    "signum": lambda p: library("pytorch_optimizer").SignSGD(p, lr=0.02, weight_decay=0.1),
    "sngd": lambda p: SNGM(p, lr=0.02, momentum=0.0),
    "sngm": lambda p: SNGM(p, lr=0.02, momentum=0.9),
    "spectral-sngm": lambda p: SpectralSNGM(p, lr=0.02, weight_decay=1.0),
}
OPTIONAL = {"muon": "timm", "schedule-free": "schedulefree", "lion": "pytorch_optimizer", "signum": "pytorch_optimizer"}


def library(name):
    return pytest.importorskip(name)


def installed():
    """Return the names of the methods whose library is installed."""
    return [name for name in KNOWN if name not in OPTIONAL or importlib.util.find_spec(OPTIONAL[name])]


def needed(name):
    return {"inner_lr": 0.01} if name == "extrap-sgd" else {}


# -------------------------------------------------------------------- names and create


def test_names_are_sorted_and_complete():
    assert sorted(registry.BUILT_IN) == sorted(KNOWN)
    assert names() == sorted(names())
    names().clear()  # a copy
    assert {*KNOWN} <= {*names()}


@pytest.mark.parametrize("name", KNOWN)
def test_create_builds_the_method_its_name_stands_for(name):
    params, twins = make_params(), make_params()
    twin = KNOWN[name](twins)
    optimizer = create(name, params, lr=0.02, **needed(name))
    for one in (optimizer, twin):
        set_mode(one, training=True)
    assert type(optimizer) is type(twin)
    assert getattr(optimizer, "scope", None) == getattr(twin, "scope", None)
    assert optimizer.defaults == twin.defaults
    run(optimizer, params, 3)
    run(twin, twins, 3)
    assert same_tensors(params, twins)
    assert not same_tensors(params, make_params())


def test_no_two_names_stand_for_the_same_rule():
    ends = {}
    for name in installed():
        params = make_params()
        optimizer = create(name, params, lr=0.02, **needed(name))
        set_mode(optimizer, training=True)
        run(optimizer, params, 3)
        ends[name] = params
    for one, other in itertools.combinations(ends, 2):
        assert not same_tensors(ends[one], ends[other]), (one, other)


def test_settings_override_those_the_name_stands_for():
    assert create("msgd", make_params(), lr=0.1, momentum=0.5).defaults["momentum"] == 0.5
    assert create("block-sngm", make_params(), lr=0.1, scope="group").scope == "group"
    assert create("sngm", make_params(), lr=0.1, weight_decay_mode="decoupled", fused=True).defaults["fused"] is True
    assert create("lars", make_params(), lr=0.1, phi=(1.0, 2.0)).defaults["phi"] == (1.0, 2.0)
    # later calls have the defaults again
    assert create("msgd", make_params(), lr=0.1).defaults["momentum"] == 0.9


def test_create_takes_parameter_groups_and_names():
    params = make_params()
    groups = create("sngm", [{"params": params[:2], "lr": 0.5}, {"params": params[2:]}], lr=0.1).param_groups
    assert [g["lr"] for g in groups] == [0.5, 0.1]
    named = create("sngm", [(str(i), p) for i, p in enumerate(params)], lr=0.1)
    assert named.param_groups[0]["param_names"] == ["0", "1", "2", "3", "4"]


def test_create_takes_any_optimizer_class_by_its_path():
    optimizer = create("torch.optim:RMSprop", make_params(), lr=0.1, alpha=0.5)
    assert type(optimizer) is torch.optim.RMSprop
    assert optimizer.defaults["alpha"] == 0.5
    assert type(create("sngm:LAMB", make_params())) is LAMB
    assert type(create("sngm.optim.lars:LARS", make_params(), lr=0.1)) is LARS


@pytest.mark.parametrize("name", ["AdamW", "torch.optim.AdamW", "torch.optim:AdamW", "adamw"])
def test_torch_optimizers_are_known_by_their_class_name(name):
    assert type(create(name, make_params(), lr=0.1)) is torch.optim.AdamW
    assert registry.name_of(f"{name}(eps=1e-6)") in ("adamw(eps=1e-6)", "torch.optim:AdamW(eps=1e-6)")


def test_registries_of_other_libraries_come_before_their_attributes():
    library("pytorch_optimizer")
    lion = create("pytorch_optimizer:lion", make_params(), lr=0.1)
    assert type(lion) is type(create("pytorch_optimizer:Lion", make_params(), lr=0.1))
    with pytest.raises(ValueError, match="pytorch_optimizer:nothing"):
        create("pytorch_optimizer:nothing", make_params(), lr=0.1)


def test_names_of_timm_bring_the_settings_that_it_registers(monkeypatch):
    class Info:
        defaults = {"momentum": 0.5}  # noqa: RUF012

    optim = types.ModuleType("timm.optim")
    optim.list_optimizers = lambda: ["mine"]
    optim.get_optimizer_info = lambda name: Info
    optim.get_optimizer_class = lambda name, bind_defaults: torch.optim.SGD
    optim.Own = torch.optim.RMSprop
    package = types.ModuleType("timm")
    package.optim = optim
    monkeypatch.setitem(sys.modules, "timm", package)
    monkeypatch.setitem(sys.modules, "timm.optim", optim)
    assert create("timm:mine", make_params(), lr=0.1).defaults["momentum"] == 0.5
    assert create("timm:mine", make_params(), lr=0.1, momentum=0.7).defaults["momentum"] == 0.7
    assert type(create("timm:Own", make_params(), lr=0.1)) is torch.optim.RMSprop


def test_a_missing_library_is_named_with_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)  # as if it were not installed
    with pytest.raises(ValueError, match="pip install schedulefree"):
        create("schedule-free", make_params(), lr=0.1)


def test_a_class_in_a_file_is_known_by_its_checksum(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import torch\nclass Mine(torch.optim.SGD):\n    pass\n")
    name = registry.name_of(f"{file}:Mine")
    assert type(create(name, make_params(), lr=0.1)).__name__ == "Mine"
    assert registry.source_of(name) == hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    with pytest.raises(ValueError, match="Other"):
        create(f"{file}:Other", make_params(), lr=0.1)


def test_an_optimizer_that_keeps_state_elsewhere_is_found_out():
    class Forgets(torch.optim.SGD):
        count = 0

        def step(self, closure=None):
            self.count += 1
            for group in self.param_groups:
                group["lr"] = 0.1 / self.count
            super().step(closure)

    assert not restores_its_state(lambda params: Forgets(params, lr=0.1))
    assert restores_its_state(lambda params: torch.optim.Adam(params, lr=0.1))
    assert restores_its_state(lambda params: torch.optim.LBFGS(params))  # needs a closure

    class Nothing(torch.optim.SGD):
        def state_dict(self):
            return None

    assert not restores_its_state(lambda params: Nothing(params, lr=0.1))


@pytest.mark.parametrize(
    ("wrong", "near"), [("sngmm", "sngm"), ("lambs", "lamb"), ("extrap_sgd", "extrap-sgd"), ("blocksngm", "block-sngm")]
)
def test_an_unknown_name_is_answered_with_the_nearest_and_all(wrong, near):
    with pytest.raises(ValueError, match=repr(near)) as caught:
        create(wrong, make_params(), lr=0.1)
    assert repr(wrong) in str(caught.value)
    for name in names():
        assert name in str(caught.value)


def test_a_name_like_no_other_gets_no_suggestion():
    with pytest.raises(ValueError, match="'xyzzy'") as caught:
        create("xyzzy", make_params(), lr=0.1)
    assert "mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "held"),
    [
        ("sngm", {"momentun": 0.9}, ["'momentun'", "'momentum'", "weight_decay_mode", "scope", "eps"]),
        ("lamb", {"beta": (0.9, 0.9)}, ["'beta'", "'betas'", "max_grad_norm"]),
        ("msgd", {"scope": "tensor"}, ["'scope'", "nesterov", "dampening"]),
        ("torch.optim:RMSprop", {"alfa": 0.9}, ["'alfa'", "'alpha'", "centered"]),
    ],
)
def test_an_unknown_setting_is_answered_with_the_allowed_ones(name, settings, held):
    with pytest.raises(TypeError, match=name) as caught:
        create(name, make_params(), lr=0.1, **settings)
    for word in held:
        assert word in str(caught.value)


@pytest.mark.parametrize(("name", "missing"), [("sngm", "lr"), ("lars", "lr"), ("clars", "lr"), ("extrap-sgd", "lr")])
def test_a_missing_setting_is_named(name, missing):
    with pytest.raises(TypeError, match=f"(?=.*{name})(?=.*'{missing}')"):
        create(name, make_params(), **needed(name))
    with pytest.raises(TypeError, match=r"(?=.*extrap-sgd)(?=.*'inner_lr')"):
        create("extrap-sgd", make_params(), lr=0.1)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("torch.nn:Linear", TypeError),
        ("torch:manual_seed", TypeError),
        ("math:pi", TypeError),
        ("torch.optim:Nothing", ValueError),
        ("no.such.module:Class", ValueError),
        ("torch.optim:", ValueError),
        (":SGD", ValueError),
        (":", ValueError),
    ],
)
def test_a_path_that_leads_to_no_optimizer_is_refused_by_name(name, error):
    with pytest.raises(error, match=repr(name)):
        create(name, make_params(), lr=0.1)


@pytest.mark.parametrize("name", [None, 3, SNGM])
def test_a_name_that_is_not_a_string_is_refused(name):
    with pytest.raises(TypeError, match="name"):
        create(name, make_params(), lr=0.1)


def test_bad_values_are_refused_through_create_too():
    with pytest.raises(ValueError, match=r"momentum.*1\.5"):
        create("sngm", make_params(), lr=0.1, momentum=1.5)


def test_the_package_offers_the_methods_and_the_registry():
    for cls in (SNGM, LARS, LAMB, CLARS, ExtrapSGD):
        assert getattr(sngm, cls.__name__) is cls is getattr(sngm.optim, cls.__name__)
        assert issubclass(cls, torch.optim.Optimizer)


# -------------------------------------------------------------------- decay_groups


class RMSNorm(nn.Module):
    """A normalisation layer other than torch's, with a two-dimensional gain."""

    def __init__(self, heads, size):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(heads, size))

    def forward(self, x):
        return self.scale * x / x.square().mean(-1, keepdim=True).sqrt()


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch_norm = nn.BatchNorm2d(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.embedding = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.layer_norm = nn.LayerNorm((2, 8))
        self.lstm = nn.LSTM(8, 8)
        self.rms_norm = RMSNorm(2, 8)
        self.torch_rms_norm = nn.RMSNorm(8)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.layer_scale = nn.Parameter(torch.ones(8))
        self.position = nn.Parameter(torch.zeros(5, 8))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)])
        self.head = nn.Linear(8, 7)
        self.head.weight = self.embedding.weight  # tied


DECAYED = {
    "conv.weight",
    "embedding.weight",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "lstm.weight_ih_l0",
    "lstm.weight_hh_l0",
    "position",
    "blocks.0.0.weight",
    "blocks.1.0.weight",
}


def test_decay_is_for_weights_and_spares_biases_gains_and_norm_layers():
    model = Everything()
    decayed, exempt = decay_groups(model, 0.05)
    label = {p: name for name, p in model.named_parameters()}
    assert {label[p] for p in decayed["params"]} == DECAYED
    assert {label[p] for p in exempt["params"]} == set(label.values()) - DECAYED
    assert decayed["weight_decay"] == 0.05
    assert exempt["weight_decay"] == 0.0


def test_every_parameter_is_in_exactly_one_group_once():
    model = Everything()
    listed = [p for group in decay_groups(model, 0.05) for p in group["params"]]
    assert len(listed) == len(set(listed)) == len(list(model.parameters()))
    assert set(listed) == set(model.parameters())


def test_the_groups_are_alike_from_run_to_run():
    first, second = (decay_groups(Everything(), 0.05) for _ in range(2))
    for ours, theirs in zip(first, second, strict=True):
        assert [p.shape for p in ours["params"]] == [p.shape for p in theirs["params"]]


def test_a_model_with_one_kind_of_parameter_has_one_group():
    assert [g["weight_decay"] for g in decay_groups(nn.Linear(3, 4, bias=False), 0.05)] == [0.05]
    assert [g["weight_decay"] for g in decay_groups(nn.LayerNorm(4), 0.05)] == [0.0]


def test_frozen_parameters_are_listed_too_so_that_they_may_thaw():
    model = Everything()
    model.embedding.requires_grad_(False)
    assert len([p for g in decay_groups(model, 0.05) for p in g["params"]]) == len(list(model.parameters()))


def test_both_groups_stay_inside_the_one_norm_of_sngm():
    runs = []
    for grouped in (False, True):
        torch.manual_seed(0)
        model = Everything().double()
        optimizer = SNGM(decay_groups(model, 0.0) if grouped else model.parameters(), lr=0.1)
        seen = []
        for t in range(3):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(100 * t + i))
            optimizer.step()
            seen.append(optimizer.grad_norm.item())
        runs.append((seen, list(model.parameters())))
    whole = math.sqrt(sum(float(p.grad.square().sum()) for p in runs[0][1]))
    assert runs[0][0][-1] == pytest.approx(whole, rel=1e-13)
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-13)
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-14)


def test_decay_reaches_the_first_group_alone():
    model = Everything().double()
    optimizer = SNGM(decay_groups(model, 0.5), lr=0.1, weight_decay_mode="decoupled")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(p, before[name] * 0.95 if name in DECAYED else before[name], rtol=1e-14, atol=0.0), name


class NormalLinear(nn.Linear):
    """A layer whose name only begins like a normalisation layer's."""


def test_a_layer_is_not_taken_for_a_normalisation_layer_by_half_its_name():
    layer = NormalLinear(3, 2)
    decayed, exempt = sngm.optim.decay_groups(layer, 0.1)
    assert decayed["params"] == [layer.weight]
    assert exempt["params"] == [layer.bias]


def test_embeddings_have_a_group_of_their_own_also_if_an_output_layer_shares_their_weight():
    model = nn.ModuleDict({"head": nn.Linear(4, 9, bias=False), "inner": nn.Linear(4, 4), "table": nn.Embedding(9, 4)})
    model["head"].weight = model["table"].weight
    groups = decay_groups(model, 0.1, embeddings={"ball": "rows"})
    assert [[tuple(p.shape) for p in group.pop("params")] for group in groups] == [[(4, 4)], [(4,)], [(9, 4)]]
    assert groups == [{"weight_decay": 0.1}, {"weight_decay": 0.0}, {"weight_decay": 0.1, "ball": "rows"}]
    (plain,) = decay_groups(nn.Embedding(9, 4), 0.1)
    assert "ball" not in plain
    for wrong in (True, "rows", {"params": []}):
        with pytest.raises(TypeError, match="embeddings must be a dict of settings, such as"):
            decay_groups(model, 0.1, embeddings=wrong)
    computed = nn.utils.parametrizations.weight_norm(nn.Embedding(9, 4))
    listed = [p for group in decay_groups(computed, 0.1, embeddings={"ball": "rows"}) for p in group["params"]]
    assert {*map(id, listed)} == {*map(id, computed.parameters())}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist')", "torchvision::nms does not exist"),
        ("import no_such_library", "No module named 'no_such_library'"),
    ],
)
def test_a_library_that_cannot_be_imported_is_reported_on_one_line(tmp_path, monkeypatch, code, reason):
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm/__init__.py").write_text(code)
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"timm cannot be imported: .*{reason}$"):
        create("timm:nadamw", make_params(), lr=0.1)
    console.refused(console.sngm("train digits --method timm:nadamw"), "timm cannot be imported", reason)
    listed = console.sngm("methods")
    assert listed.code == 0
    assert "timm cannot be imported" in listed.out
    assert "\nsngm (SNGM)" in listed.out


def test_an_error_about_a_file_of_ones_own_names_the_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def helper(): ...")
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\n\nclass Mine(torch.optim.Nope): ...")
    with pytest.raises(ValueError, match=r"has no attribute 'Nope'$"):
        create(f"{broken}:Mine", make_params(), lr=0.1)
    with pytest.raises(ValueError, match=r"mine\.py has no 'Nope'$"):
        create(f"{file}:Nope", make_params(), lr=0.1)
    with pytest.raises(TypeError, match=r"got a function$"):
        create(f"{file}:helper", make_params(), lr=0.1)


def test_a_run_with_a_class_of_ones_own_gets_a_folder_directly_in_runs(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import torch\n\nclass Mine(torch.optim.SGD): ...")
    assert "runs/digits-mine.py-Mine-" in console.sngm(f"train digits --method {file}:Mine --lr 0.1 --dry-run").out


def test_an_error_names_the_method_once():
    assert console.sngm("train digits --method 'sngm(foo=1)' --lr 0.1").err.startswith(
        "sngm: sngm has no setting 'foo'"
    )


def test_muon_leaves_embeddings_to_adamw(monkeypatch):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    monkeypatch.setitem(registry.METHODS, "muon", replace(registry.METHODS["muon"], build=Noted))
    optimizer = build_optimizer(resolve("digits", "muon", lr=0.1), model)
    assert [group.get("use_fallback", False) for group in optimizer.param_groups] == [False, False, True]


class Noted(torch.optim.SGD):
    """An optimizer with settings of timm's Muon."""

    def __init__(self, params, lr, weight_decay=0.0, nesterov=False):
        super().__init__(params, lr, weight_decay=weight_decay)


def test_a_run_with_a_method_whose_library_is_missing_can_be_planned_and_not_made(monkeypatch):
    monkeypatch.setitem(registry.METHODS, "absent", registry.Method("no_such_library:Muon", {"weight_decay": 0.1}))
    assert registry.settings_of("absent") == ["lr", "weight_decay"]
    assert registry.usual_decay("absent", 1e-4) == 0.1
    with pytest.raises(ValueError, match=r"no optimizer class at 'no_such_library:Muon'"):
        create("absent", [nn.Parameter(torch.ones(2))], lr=0.1)
