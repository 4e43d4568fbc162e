"""Every path of every method equals its float64 reference."""

import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from methods import LOW, PATHS, Twin, make_params

CASES = {
    **{
        f"SNGM {mode} {scope}{' nesterov' if nesterov else ''}": (
            "SNGM",
            {"lr": 0.3, "weight_decay": 0.05, "weight_decay_mode": mode, "scope": scope, "nesterov": nesterov},
        )
        for mode, scope, nesterov in itertools.product(
            ("coupled", "after_norm", "decoupled"), ("global", "group", "tensor"), (False, True)
        )
    },
    "SNGM without decay": ("SNGM", {"lr": 0.3}),
    "SNGD": ("SNGM", {"lr": 0.3, "momentum": 0.0, "weight_decay": 0.05}),
    "SNGD decoupled": ("SNGM", {"lr": 0.3, "momentum": 0.0, "weight_decay": 0.05, "weight_decay_mode": "decoupled"}),
    "SNGM maximize": ("SNGM", {"lr": 0.3, "weight_decay": 0.05, "maximize": True}),
    "SNGM maximize nesterov": ("SNGM", {"lr": 0.3, "weight_decay": 0.05, "maximize": True, "nesterov": True}),
    "LARS you2017": ("LARS", {"lr": 5.0, "weight_decay": 0.05, "trust_coefficient": 0.02}),
    "LARS you2017 clipped": (
        "LARS",
        {"lr": 9.0, "phi": (0.5, 1.0), "eps": 0.1, "max_ratio": 0.02, "clamp_grad": 0.5, "trust_coefficient": 0.05},
    ),
    "LARS unscaled": (
        "LARS",
        {"lr": 0.5, "weight_decay": 0.05, "variant": "unscaled", "max_ratio": 50.0, "clamp_grad": 10.0},
    ),
    "LARS unscaled without momentum": (
        "LARS",
        {"lr": 0.5, "momentum": 0.0, "variant": "unscaled", "trust_coefficient": 0.1},
    ),
    "LARS momentum": ("LARS", {"lr": 0.05, "weight_decay": 0.05, "variant": "momentum"}),
    "LARS momentum at zero": ("LARS", {"lr": 0.05, "momentum": 0.0, "variant": "momentum", "maximize": True}),
    "LARS maximize": ("LARS", {"lr": 5.0, "weight_decay": 0.05, "maximize": True, "trust_coefficient": 0.02}),
    "CLARS": ("CLARS", {"lr": 0.5, "weight_decay": 0.05}),
    "CLARS maximize": ("CLARS", {"lr": 0.5, "momentum": 0.5, "maximize": True, "max_ratio": None}),
    "LAMB": ("LAMB", {"lr": 0.05, "weight_decay": 0.05}),
    "LAMB clipped": ("LAMB", {"lr": 0.05, "max_grad_norm": 0.5, "phi": (0.2, 1.0), "betas": (0.8, 0.95)}),
    "LAMB uncorrected": ("LAMB", {"lr": 0.05, "bias_correction": False, "weight_decay": 0.05, "maximize": True}),
}
SHAPES = [(1,), (7,), (2, 4), (3, 3), (64,), (5, 13), (3, 4, 2, 2), (0,), ()]
LARGE = [(65537,), (1, 65537), (1024, 1024)]


@functools.cache
def gradients(shapes: tuple[torch.Size, ...]) -> list[list[torch.Tensor]]:
    """A few gradients with a common drift, to be gone through over and over."""
    generator = torch.Generator().manual_seed(1)
    drift = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [[d + torch.randn(d.shape, generator=generator, dtype=torch.float64) for d in drift] for _ in range(5)]


def run(twin: Twin, steps: int = 20, lay=lambda g: g, size: float = 1.0) -> None:
    recipes = gradients(tuple(p.shape for p in twin.params))
    for t in range(steps):
        twin.step([size * g for g in recipes[t % len(recipes)]], lay)
    twin.check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_every_path_equals_the_reference_over_twenty_steps(case, path, dtype):
    if path == "fused" and dtype in LOW:
        pytest.skip("refused, see test_arguments")
    name, arguments = CASES[case]
    params = make_params(SHAPES, dtype)
    run(Twin(name, params, arguments, path, groups=[[0, 2, 4, 6, 8], [1, 3, 5, 7]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", ["SNGM coupled global", "SNGM coupled tensor", "LARS unscaled", "CLARS", "LAMB"])
def test_every_path_equals_the_reference_on_large_tensors(case, path, dtype):
    if path == "fused" and dtype in LOW:
        pytest.skip("refused, see test_arguments")
    name, arguments = CASES[case]
    run(Twin(name, make_params(LARGE, dtype, size=0.001), arguments, path), size=0.01)
