"""Run a method and its float64 reference with the same gradients.

A `Twin` holds the parameters of the optimizer under test and float64 blocks that `sngm.optim.reference` updates.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import sngm
from sngm.optim import reference

# relative to the norm of the change; low precision is checked after each step, to one rounding
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
PATHS = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "default": {},
    "capturable": {"capturable": True},
}
LOW = (torch.float16, torch.bfloat16)
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
    "LAMB not adapted": ("LAMB", {"lr": 0.05, "weight_decay": 0.05, "adapt": False}),
    "LARS adapted throughout": ("LARS", {"lr": 5.0, "weight_decay": 0.05, "trust_coefficient": 0.02, "adapt": True}),
    "CLARS adapted nowhere": ("CLARS", {"lr": 0.05, "weight_decay": 0.05, "adapt": False}),
    "LAMB uncorrected": ("LAMB", {"lr": 0.05, "bias_correction": False, "weight_decay": 0.05, "maximize": True}),
}
SHAPES = [(1,), (7,), (2, 4), (3, 3), (64,), (5, 13), (3, 4, 2, 2), (0,), ()]
LARGE = [(65537,), (1, 65537), (1024, 1024)]


def make_params(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int = 0, size: float = 0.1, device: str = "cpu"
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) * size for shape in shapes]
    return [torch.nn.Parameter(value.to(device=device, dtype=dtype)) for value in values]


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbouring numbers of `dtype` around each element."""
    info = torch.finfo(dtype)
    exponent = x.abs().clamp_min(info.smallest_normal).frexp().exponent  # x = mantissa * 2**exponent, 1/2 <= mantissa
    return info.eps / 2 * torch.exp2(exponent.double())


@dataclass
class Twin:
    """An optimizer and its reference. `settings` are the optimizer's; `rule` maps them to the reference's."""

    name: str
    params: list[Tensor]
    settings: dict[str, Any]
    path: str = "default"
    groups: list[list[int]] | None = None
    group_settings: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = self.groups or [list(range(len(self.params)))]
        overrides = self.group_settings or [{} for _ in layout]
        arguments = {**self.settings, **PATHS[self.path]}
        of_groups = {"adapt": arguments.pop("adapt")} if "adapt" in arguments else {}  # a group key, not an argument
        groups = [
            {"params": [self.params[i] for i in ids], **of_groups, **o}
            for ids, o in zip(layout, overrides, strict=True)
        ]
        self.optimizer = getattr(sngm, self.name)(groups, **arguments)
        self.start = [p.detach().double().clone() for p in self.params]
        self.blocks = [b.clone() for b in self.start]
        self.state = [torch.zeros_like(b) for b in self.blocks]
        self.second = [torch.zeros_like(b) for b in self.blocks]
        self.moved = [torch.zeros((), dtype=torch.float64) for _ in self.params]  # largest distance from the start
        self.steps = [0] * len(self.params)
        self.order = [i for ids in layout for i in ids]  # the optimizer's order of the parameters
        self.group_of = [next(k for k, ids in enumerate(layout) if i in ids) for i in range(len(self.params))]
        self.per_block = {
            key: [float(overrides[k].get(key, self.settings.get(key, 0.0))) for k in self.group_of]
            for key in ("lr", "weight_decay")
        }

    def step(self, grads: Sequence[Tensor | None], lay: Callable[[Tensor], Tensor] = lambda g: g) -> None:
        """Take one step of both with these gradients; `lay` sets their memory layout for the optimizer."""
        for p, g in zip(self.params, grads, strict=True):
            p.grad = None if g is None else lay(g.to(p.dtype))
        have = [i for i, g in enumerate(grads) if g is not None]
        g64 = {i: self.params[i].grad.double() for i in have}
        given = [g64[i] for i in have]
        norms = [0.5 + float(g.norm()) for g in given]
        if self.name == "CLARS":
            everyone = [float("nan")] * len(self.params)
            for i, n in zip(have, norms, strict=True):
                everyone[i] = n
            self.optimizer.step(mean_norms=[everyone[i] for i in self.order])
        else:
            self.optimizer.step()
        for i in have:
            self.steps[i] += 1
        w, u, v = ([x[i] for i in have] for x in (self.blocks, self.state, self.second))
        before = w
        eta, wd = ([self.per_block[k][i] for i in have] for k in ("lr", "weight_decay"))
        s = self.settings
        common = {"eta": eta, "wd": wd, "maximize": s.get("maximize", False)}
        if self.name != "SNGM":
            common["adapt"] = s.get("adapt")
        if self.name == "SNGM":
            w, u = reference.sngm(
                w, u, given, **common, beta=s.get("momentum", 0.9), mode=s.get("weight_decay_mode", "coupled"),
                scope=s.get("scope", "global"), groups=[self.group_of[i] for i in have],
                nesterov=s.get("nesterov", False), eps=s.get("eps", 1e-12),
            )  # fmt: skip
        elif self.name == "LARS":
            w, u = reference.lars(
                w, u, given, **common, m=s.get("momentum", 0.9), variant=s.get("variant", "you2017"),
                c=s.get("trust_coefficient"), phi=s.get("phi"), eps=s.get("eps", 0.0),
                max_ratio=s.get("max_ratio"), clamp=s.get("clamp_grad"),
            )  # fmt: skip
        elif self.name == "CLARS":
            w, u = reference.clars(
                w, u, given, norms, **common, m=s.get("momentum", 0.9),
                c=s.get("trust_coefficient", 0.01), max_ratio=s.get("max_ratio", 0.1),
            )  # fmt: skip
        else:
            w, u, v = reference.lamb(
                w, u, v, given, [self.steps[i] for i in have], **common, betas=s.get("betas", (0.9, 0.999)),
                eps=s.get("eps", 1e-6),
                bias_correction=s.get("bias_correction", True), phi=s.get("phi"),
                max_grad_norm=s.get("max_grad_norm"),
            )  # fmt: skip
        for k, i in enumerate(have):
            self.blocks[i], self.state[i], self.second[i] = w[k], u[k], v[k]
            self.moved[i] = torch.maximum(self.moved[i], (w[k] - self.start[i]).norm())
            if self.params[i].dtype in LOW:
                # Each step may be off by one rounding; the reference continues from the rounded value.
                ours = self.params[i].detach().double()
                change = (w[k] - before[k]).abs()
                float32_arithmetic = 2.0**-20 * (before[k].abs() + (change.max() if change.numel() else 0.0))
                allowed = 0.5 * spacing(w[k], self.params[i].dtype) + float32_arithmetic
                assert ((ours - w[k]).abs() <= allowed).all()
                self.blocks[i] = ours

    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Yield pairs (optimizer state, reference state)."""
        first, second = ("exp_avg", "exp_avg_sq") if self.name == "LAMB" else ("momentum_buffer", None)
        out = []
        for p, u, v in zip(self.params, self.state, self.second, strict=True):
            state = self.optimizer.state[p]
            if first in state:
                out.append((state[first], u))
            if second in state:
                out.append((state[second], v))
        return out

    def check(self, stored_to: float = 0.0) -> None:
        """Compare both; `stored_to` is the relative error that storing the parameter in each step may add."""
        for p, w, change in zip(self.params, self.blocks, self.moved, strict=True):
            error = (p.detach().double() - w).norm()
            allowed = TOLERANCE.get(p.dtype, 0.0) * change + stored_to * w.norm()
            assert error <= allowed, f"off by {error / change:.1e} of the change"
        for ours, theirs in self.buffers():
            assert ours.dtype in (torch.float32, torch.float64)
            tolerance = 1e-12 if ours.dtype == torch.float64 else 1e-5
            assert (ours.double() - theirs).norm() <= tolerance * theirs.norm().clamp_min(1e-30)


@functools.cache
def gradients(shapes: tuple[torch.Size, ...]) -> list[list[torch.Tensor]]:
    """Return a few gradients with a common drift, to be used repeatedly."""
    generator = torch.Generator().manual_seed(1)
    drift = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [[d + torch.randn(d.shape, generator=generator, dtype=torch.float64) for d in drift] for _ in range(5)]


def run(twin: Twin, steps: int = 20, lay=lambda g: g, size: float = 1.0) -> None:
    recipes = gradients(tuple(p.shape for p in twin.params))
    for t in range(steps):
        twin.step([size * g.to(twin.params[0].device) for g in recipes[t % len(recipes)]], lay)
    twin.check()
