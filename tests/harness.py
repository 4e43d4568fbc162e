"""All methods with test settings, and one function that takes a step of any of them."""

import copy
import io
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from methods import LOW, PATHS
from torch import Tensor

from sngm import CLARS, LAMB, LARS, SNGM, ExtrapSGD

RULES: dict[str, tuple[type, dict[str, Any]]] = {
    "sngm": (SNGM, {"lr": 0.1, "weight_decay": 0.01}),
    "sngm-after-norm": (SNGM, {"lr": 0.1, "weight_decay": 0.01, "weight_decay_mode": "after_norm"}),
    "sngm-decoupled": (SNGM, {"lr": 0.1, "weight_decay": 0.01, "weight_decay_mode": "decoupled"}),
    "sngm-nesterov": (SNGM, {"lr": 0.1, "weight_decay": 0.01, "nesterov": True}),
    "sngm-group": (SNGM, {"lr": 0.1, "scope": "group"}),
    "block-sngm": (SNGM, {"lr": 0.1, "scope": "tensor"}),
    "sngd": (SNGM, {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.01}),
    "lars": (LARS, {"lr": 1.0, "weight_decay": 0.01, "trust_coefficient": 0.05}),
    "lars-unscaled": (LARS, {"lr": 0.1, "weight_decay": 0.01, "variant": "unscaled", "clamp_grad": 1.0}),
    "lars-momentum": (LARS, {"lr": 0.1, "weight_decay": 0.01, "variant": "momentum"}),
    "clars": (CLARS, {"lr": 0.5, "weight_decay": 0.01}),
    "lamb": (LAMB, {"lr": 0.1, "weight_decay": 0.01, "max_grad_norm": 2.0}),
    "extrap-sgd": (ExtrapSGD, {"lr": 0.1, "inner_lr": 0.05, "weight_decay": 0.01}),
}
BUFFERS = {LAMB: {"exp_avg", "exp_avg_sq"}}  # the others: momentum_buffer
KINDS = ["sngm", "block-sngm", "sngd", "lars", "lars-momentum", "clars", "lamb", "extrap-sgd"]  # of state or step
SHAPES = [(5, 13), (7,), (2, 3, 2, 2), (), (1, 9)]  # more and fewer elements than a SIMD register holds
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def combinations(rules: Sequence[str] = tuple(RULES), dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[Any]:
    """Return (rule, path, dtype) for every path that supports the dtype, for `pytest.mark.parametrize`."""
    return [
        pytest.param(rule, path, dtype, id=f"{rule}-{path}-{dtype}")
        for rule, path, dtype in itertools.product(rules, PATHS, dtypes)
        if not (path == "fused" and dtype in LOW)
    ]


def make_params(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=wide).to(dtype)) for s in shapes]


def clone_params(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in params]


def build(rule: str, params: Any, path: str = "default", **settings: Any) -> Any:
    cls, usual = RULES[rule]
    return cls(params, **{**usual, **PATHS[path], **settings})


def gradients(params: Sequence[Tensor], t: int) -> list[Tensor]:
    """Return the gradients of step t: noise that depends on t, and a pull of the parameters towards 0."""
    generator = torch.Generator().manual_seed(t + 1)
    wide = [torch.complex128 if p.dtype.is_complex else torch.float64 for p in params]
    noise = [torch.randn(p.shape, generator=generator, dtype=d) for p, d in zip(params, wide, strict=True)]
    return [(n + p.detach().to(n.dtype)).to(p.dtype) for n, p in zip(noise, params, strict=True)]


def step(optimizer: Any, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Any:
    """Take one step with these gradients, passed in the way that the method needs."""
    if isinstance(optimizer, ExtrapSGD):

        def worker() -> float:
            for p, g in zip(params, grads, strict=True):
                p.grad = None if g is None else g.clone()
            return 0.0

        return optimizer.step([worker, worker])
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    if isinstance(optimizer, CLARS):
        return optimizer.step(mean_norms=[0.5 if g is None else float(g.abs().double().norm()) + 0.5 for g in grads])
    return optimizer.step()


def run(optimizer: Any, params: Sequence[Tensor], steps: int = 2, start: int = 0) -> None:
    for t in range(start, start + steps):
        step(
            optimizer,
            params,
            [g if p.requires_grad else None for p, g in zip(params, gradients(params, t), strict=True)],
        )


def weights(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def states(optimizer: Any) -> list[dict[str, Any]]:
    """Return a copy of the state of each parameter, in order."""
    return [copy.deepcopy(dict(optimizer.state[p])) for g in optimizer.param_groups for p in g["params"]]


def same_tensors(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether tensors are bitwise equal, including dtypes."""
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def same_states(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> bool:
    return all(
        a.keys() == b.keys() and same_tensors(list(a.values()), [b[k] for k in a])
        for a, b in zip(ours, theirs, strict=True)
    )


def same(optimizer: Any, params: Sequence[Tensor], other: Any, others: Sequence[Tensor]) -> bool:
    """Return whether weights and states of two runs are bitwise equal."""
    return same_tensors(params, others) and same_states(states(optimizer), states(other))


def through_disk(saved: Any) -> Any:
    """Return the object after `torch.save` and `torch.load` with weights_only."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
