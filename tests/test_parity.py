"""Every implementation of every method equals its float64 reference."""

import functools
import itertools
import math

import pytest
import torch
from harness import (
    CASES,
    DTYPES,
    PATHS,
    UNSUPPORTED,
    Twin,
    drifting_gradients,
    make_params,
    make_twin,
    pairwise,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st

import sngm
from sngm.optim import heavy_ball, lamb, norms, nsgdm, reference

KINDS = ["SNGM coupled global", "SNGM after_norm tensor", "LARS you2017", "LARS unscaled", "CLARS", "LAMB"]


@pytest.mark.parametrize(("case", "path", "dtype"), pairwise(CASES, PATHS, DTYPES, without=UNSUPPORTED))
def test_every_path_equals_the_reference(case, path, dtype):
    make_twin(case, path, dtype).run(3, stored_to=torch.finfo(dtype).eps)


@pytest.mark.parametrize("case", KINDS)
def test_the_default_path_equals_the_reference_over_twenty_steps(case):
    make_twin(case, dtype=torch.float32).run(20)


@pytest.mark.parametrize(("case", "path", "dtype"), pairwise(KINDS, PATHS, DTYPES, without=UNSUPPORTED))
def test_every_path_equals_the_reference_on_large_tensors(case, path, dtype):
    shapes = [(65537,), (1, 65537), (300, 301)]
    make_twin(case, path, dtype, shapes, size=0.001).run(2, size=0.01, stored_to=torch.finfo(dtype).eps)


def transposed(g: torch.Tensor) -> torch.Tensor:
    return g.mT.contiguous().mT if g.ndim > 1 else g


def strided(g: torch.Tensor) -> torch.Tensor:
    """Return the values as every second element of a larger tensor."""
    return torch.stack([g, torch.full_like(g, torch.nan)], dim=-1)[..., 0]


def channels_last(g: torch.Tensor) -> torch.Tensor:
    return g.contiguous(memory_format=torch.channels_last) if g.ndim == 4 else g


LAYOUTS = {"contiguous": lambda g: g, "transposed": transposed, "strided": strided, "channels_last": channels_last}


@pytest.mark.parametrize(
    ("case", "path", "dtype", "of_params", "of_grads"),
    pairwise(KINDS, PATHS, [torch.float64, torch.bfloat16], LAYOUTS, LAYOUTS, without=UNSUPPORTED),
)
def test_parameters_and_hand_set_gradients_of_any_layout_equal_the_reference(case, path, dtype, of_params, of_grads):
    shapes = [(4, 3, 5, 2), (33, 65), (70,), (2, 128, 9, 9)]
    make_twin(case, path, dtype, shapes, lay=LAYOUTS[of_params]).run(3, lay=LAYOUTS[of_grads])


@pytest.mark.parametrize("path", ["foreach", "default"])
@pytest.mark.parametrize("case", ["SNGM coupled tensor", "LARS unscaled", "CLARS", "LAMB", "NSGDM"])
def test_low_precision_parameters_worked_on_slice_by_slice_equal_the_reference(case, path, monkeypatch):
    monkeypatch.setattr(heavy_ball, "SLICE", 30)
    monkeypatch.setattr(lamb, "SLICE", 30)
    monkeypatch.setattr(nsgdm, "SLICE", 30)
    make_twin(case, path, torch.bfloat16).run()


@st.composite
def situations(draw):
    """Draw a method with random settings, path, dtype, shapes, layouts and groups; gradients to omit; their layout."""
    name = draw(st.sampled_from(["SNGM", "LARS", "CLARS", "LAMB"]))
    number = functools.partial(st.floats, allow_nan=False, width=32)
    # below 1, so that no method reaches exactly w = 0, where ratios are discontinuous
    arguments = {"lr": draw(number(0.0625, 0.375)), "weight_decay": draw(st.sampled_from([0.0, 0.015625, 0.25]))}
    arguments["maximize"] = draw(st.booleans())
    if name != "LAMB":
        arguments["momentum"] = draw(st.sampled_from([0.0, 0.5, 0.9, 0.99]))
    if name == "SNGM":
        arguments["weight_decay_mode"] = draw(st.sampled_from(["coupled", "after_norm", "decoupled"]))
        arguments["scope"] = draw(st.sampled_from(["global", "group", "tensor"]))
        arguments["nesterov"] = draw(st.booleans()) and arguments["momentum"] > 0
        arguments["eps"] = draw(st.sampled_from([0.0, 1e-12, 0.5]))
    if name == "LARS":
        arguments["variant"] = draw(st.sampled_from(["you2017", "unscaled", "momentum"]))
        arguments["trust_coefficient"] = draw(number(0.25, 1.0))
        arguments["eps"] = draw(st.sampled_from([0.0, 0.125]))
        arguments["max_ratio"] = draw(st.none() | number(0.25, 1.0))
        arguments["clamp_grad"] = draw(st.none() | number(0.125, 4.0))
    if name == "CLARS":
        arguments["trust_coefficient"] = draw(number(0.25, 1.0))
        arguments["max_ratio"] = draw(st.none() | number(0.25, 1.0))
    if name == "LAMB":
        arguments["betas"] = (draw(st.sampled_from([0.0, 0.9])), draw(st.sampled_from([0.0, 0.5, 0.999])))
        arguments["bias_correction"] = draw(st.booleans())
        arguments["max_grad_norm"] = draw(st.none() | number(0.125, 4.0))
    if name in ("LARS", "LAMB"):
        arguments["phi"] = draw(st.none() | st.just((0.5, 2.0)))
    shapes = draw(st.lists(st.lists(st.integers(1, 12), max_size=4).map(tuple), min_size=2, max_size=5))
    cut = draw(st.integers(1, len(shapes) - 1))
    groups = [list(range(cut)), list(range(cut, len(shapes)))]
    overrides = [{}, {"lr": draw(number(0.0625, 0.375)), "weight_decay": draw(st.sampled_from([0.0, 0.125]))}]
    missing = draw(st.lists(st.integers(0, len(shapes) - 1), max_size=2))
    dtype = draw(st.sampled_from(DTYPES))
    path = draw(st.sampled_from([path for path in PATHS if (path, dtype) not in UNSUPPORTED]))
    params = make_params(dtype, shapes, seed=draw(st.integers(0, 2**16)), size=0.1)
    layouts = [draw(st.sampled_from(sorted(LAYOUTS))) for _ in params]
    params = [torch.nn.Parameter(LAYOUTS[name](p.detach())) for name, p in zip(layouts, params, strict=True)]
    return (
        Twin(name, params, arguments, path, groups, overrides),
        missing,
        LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))],
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(situations())
def test_random_settings_paths_dtypes_layouts_groups_and_missing_gradients_equal_the_reference(situation):
    twin, missing, lay = situation
    generator = torch.Generator().manual_seed(0)
    for t in range(6):
        grads = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in twin.params]
        twin.step([None if i in missing and t % 2 else g for i, g in enumerate(grads)], lay)
    twin.check(stored_to=6 * torch.finfo(twin.params[0].dtype).eps)  # some parameters barely change


@pytest.mark.parametrize("size", [1e36, 5e37])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mode", ["coupled", "after_norm", "decoupled"])
@pytest.mark.parametrize("path", PATHS)
def test_sngm_equals_the_reference_for_gradients_near_the_largest_float32(path, mode, momentum, size):
    params = make_params(shapes=[(7,), (3, 3), (64,)], size=10.0)
    settings = {"lr": 0.3, "momentum": momentum, "weight_decay": 1.0, "weight_decay_mode": mode}
    twin = Twin("SNGM", params, settings, path)
    for grads in drifting_gradients(tuple(p.shape for p in params))[:3]:
        twin.step([size * g for g in grads])
    twin.check(stored_to=3 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("path", PATHS)
def test_a_rate_of_lamb_that_float32_cannot_hold_is_the_largest_that_it_can(path):
    w = torch.nn.Parameter(torch.full((2, 2), 1e3))
    optimizer = sngm.LAMB([w], lr=0.5, betas=(0.0, 0.999), **PATHS[path])
    w.grad = torch.full_like(w, 1e3)
    optimizer.step()
    before = w.detach().clone()
    w.grad = torch.tensor([[1e-35, 0.0], [0.0, 0.0]])
    optimizer.step()
    q = 1e-35 / math.sqrt((0.999 * 0.001 * 1e6) / (1.0 - 0.999**2))
    assert w[0, 0].item() == pytest.approx(before[0, 0].item() - torch.finfo(torch.float32).max * q)
    assert torch.equal(w[0, 1:], before[0, 1:])
    assert torch.equal(w[1], before[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("path", PATHS)
def test_low_precision_gradients_of_float32_parameters_equal_the_reference(path, momentum, dtype):
    w = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4))
    w.grad_dtype = None
    w.grad = (torch.linspace(3.0, -2.0, 12).view(3, 4) * 1e-6).to(dtype)
    blocks, u = [w.detach().double()], [torch.zeros(3, 4, dtype=torch.float64)]
    optimizer = sngm.SNGM([w], lr=0.3, momentum=momentum, **PATHS[path])
    for _ in range(3):
        optimizer.step()
        blocks, u = reference.sngm(blocks, u, [w.grad.double()], eta=0.3, beta=momentum)
    torch.testing.assert_close(w.double(), blocks[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("values", ["random", "equal", "one large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_norms_are_right_for_any_size_and_values_on_every_core(dtype, values, every_core):
    sizes = [0, 1, 511, 512, 513, 2047, 2048, 2049, 2560, 65537, 1 << 20, (1 << 20) + 1, 2_100_001]
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        x = torch.randn(size, generator=generator) if values == "random" else torch.full((size,), 0.1)
        if values == "one large" and size:
            x[0] = 1000.0
        x = x.to(dtype)
        exact = x.double().square().sum()
        tolerance = 1e-12 if dtype == torch.float64 else 8e-6 if values == "one large" else 4e-6  # of the square
        assert abs(norms.squares([x])[0] - exact) <= tolerance * exact
        assert abs(norms.square([x, x]) - 2 * exact) <= tolerance * 2 * exact
        assert abs(norms.square([x, x], [x, x], 0.5) - 4.5 * exact) <= max(tolerance, 4e-6) * 4.5 * exact
        assert abs(norms.squares([x], [x], 0.5)[0] - 2.25 * exact) <= max(tolerance, 4e-6) * 2.25 * exact


@pytest.mark.parametrize("with_others", [False, True])
@pytest.mark.parametrize(
    "kinds", list(itertools.permutations([torch.float32, torch.float16, torch.float64], 2)), ids=str
)
def test_norms_of_gradients_of_several_dtypes_do_not_depend_on_their_order(kinds, with_others):
    generator = torch.Generator().manual_seed(0)
    size = 4000.0 if torch.float16 in kinds else 1e25 if kinds == (torch.float32, torch.float64) else 1.0
    tensors = [torch.randn(5000, generator=generator, dtype=torch.float64) for _ in kinds]
    tensors = [(t * size if k != torch.float32 else t).to(k) for t, k in zip(tensors, kinds, strict=True)]
    others = tensors[::-1] if with_others else []
    added = others or [torch.zeros(()) for _ in tensors]
    sums = [t.double() + 0.25 * o.double() for t, o in zip(tensors, added, strict=True)]
    exact = torch.stack([t.square().sum() for t in sums])
    torch.testing.assert_close(norms.squares(tensors, others, 0.25), exact, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(norms.square(tensors, others, 0.25), exact.sum(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("value", [1e19, 1e25, 3e37])
@pytest.mark.parametrize("size", [10, 2048, 2049, 100_000])
def test_values_whose_squares_float32_cannot_hold_have_finite_norms(size, value):
    x = torch.full((size,), value)
    torch.testing.assert_close(norms.squares([x]), x.double().square().sum()[None], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(norms.square([x], [x], 1.0), 4 * x.double().square().sum(), rtol=1e-6, atol=0.0)
