"""Test settings of all methods, one function that takes a step of any of them, and a comparison with the reference.

`RULES` and `build` are for tests of steps and state. `CASES` and `Twin` compare a method with its float64 reference.
"""

import copy
import functools
import io
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import sngm
from sngm import CLARS, LAMB, LARS, NSGDM, SNGM, ExtrapSGD
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
    "NSGDM": ("NSGDM", {"lr": 0.3, "weight_decay": 0.05}),
    "NSGDM decoupled": ("NSGDM", {"lr": 0.3, "weight_decay": 0.05, "weight_decay_mode": "decoupled", "momentum": 0.7}),
    "NSGDM maximize": ("NSGDM", {"lr": 0.3, "weight_decay": 0.05, "maximize": True, "momentum": 0.0}),
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
KERNEL_CASES = {case: found for case, found in CASES.items() if getattr(sngm, found[0]).KERNEL}
RULES: dict[str, tuple[type, dict[str, Any]]] = {
    "sngm": (SNGM, {"lr": 0.1, "weight_decay": 0.01}),
    "sngm-after-norm": (SNGM, {"lr": 0.1, "weight_decay": 0.01, "weight_decay_mode": "after_norm"}),
    "sngm-decoupled": (SNGM, {"lr": 0.1, "weight_decay": 0.01, "weight_decay_mode": "decoupled"}),
    "sngm-nesterov": (SNGM, {"lr": 0.1, "weight_decay": 0.01, "nesterov": True}),
    "sngm-group": (SNGM, {"lr": 0.1, "scope": "group"}),
    "block-sngm": (SNGM, {"lr": 0.1, "scope": "tensor"}),
    "sngd": (SNGM, {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.01}),
    "nsgdm": (NSGDM, {"lr": 0.1, "weight_decay": 0.01}),
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
MANY = [(1,), (7,), (2, 4), (3, 3), (64,), (5, 13), (3, 4, 2, 2), (0,), ()]
LARGE = [(65537,), (1, 65537), (1024, 1024)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
UNSUPPORTED = {("fused", dtype) for dtype in LOW}  # see test_arguments


# -------------------------------------------------------------------- parametrisation


def pairwise(*columns: Iterable[Hashable], without: Iterable[tuple[Any, Any]] = ()) -> list[Any]:
    """Return few rows of one value per column that contain every pair of values of any two columns.

    A single column gives its values. No row contains a pair of `without`.
    """
    lists, forbidden = [list(column) for column in columns], {frozenset(pair) for pair in without}
    if len(lists) == 1:
        return lists[0]
    cells = [(k, value) for k, values in enumerate(lists) for value in values]
    missing = {
        frozenset((a, b)): (a, b)
        for a, b in itertools.combinations(cells, 2)
        if a[0] != b[0] and frozenset((a[1], b[1])) not in forbidden
    }
    used: Counter[tuple[int, Any]] = Counter()
    rows = []
    while missing:
        row = dict(missing.pop(next(iter(missing))))
        for k in (k for k in range(len(lists)) if k not in row):
            fitting = [v for v in lists[k] if not any(frozenset((v, w)) in forbidden for w in row.values())]
            if not fitting:  # no row can contain this pair
                break
            new = {v: sum(frozenset(((k, v), cell)) in missing for cell in row.items()) for v in fitting}
            row[k] = max(fitting, key=lambda v: (new[v], -used[k, v]))
        else:
            for pair in itertools.combinations(row.items(), 2):
                missing.pop(frozenset(pair), None)
            used.update(row.items())
            rows.append(tuple(row[k] for k in range(len(lists))))
    return rows


def combinations(rules: Iterable[str] = tuple(RULES), dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[Any]:
    """Return rows (rule, path, dtype) with every supported pair of them, for `pytest.mark.parametrize`."""
    return pairwise(rules, PATHS, dtypes, without=UNSUPPORTED)


# -------------------------------------------------------------------- parameters and steps


def make_params(
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    seed: int = 0,
    size: float = 1.0,
    device: str = "cpu",
) -> list[Tensor]:
    """Return parameters with normally distributed values of standard deviation `size`."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = [torch.randn(shape, generator=generator, dtype=wide) * size for shape in shapes]
    return [torch.nn.Parameter(value.to(device=device, dtype=dtype)) for value in values]


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


# -------------------------------------------------------------------- the float64 reference


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
        self.largest = [torch.zeros((), dtype=torch.float64) for _ in self.params]  # norm of the state so far
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
        if self.name not in ("SNGM", "NSGDM"):
            common["adapt"] = s.get("adapt")
        if self.name == "SNGM":
            w, u = reference.sngm(
                w, u, given, **common, beta=s.get("momentum", 0.9), mode=s.get("weight_decay_mode", "coupled"),
                scope=s.get("scope", "global"), groups=[self.group_of[i] for i in have],
                nesterov=s.get("nesterov", False), eps=s.get("eps", 1e-12),
            )  # fmt: skip
        elif self.name == "NSGDM":
            rule = {"beta": s.get("momentum", 0.9), "mode": s.get("weight_decay_mode", "coupled")}
            w, u = reference.nsgdm(w, u, given, **common, **rule, eps=s.get("eps", 1e-12))
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
            self.largest[i] = torch.maximum(self.largest[i], u[k].norm())
            if self.params[i].dtype in LOW:
                # Each step may be off by one rounding; the reference continues from the rounded value.
                ours = self.params[i].detach().double()
                change = (w[k] - before[k]).abs()
                float32_arithmetic = 2.0**-20 * (before[k].abs() + (change.max() if change.numel() else 0.0))
                allowed = 0.5 * spacing(w[k], self.params[i].dtype) + float32_arithmetic
                assert ((ours - w[k]).abs() <= allowed).all()
                self.blocks[i] = ours

    def buffers(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return triples (optimizer state, reference state, norm that errors are relative to)."""
        first, second = ("exp_avg", "exp_avg_sq") if self.name == "LAMB" else ("momentum_buffer", None)
        out = []
        for p, u, v, largest in zip(self.params, self.state, self.second, self.largest, strict=True):
            state = self.optimizer.state[p]
            if first in state:
                out.append((state[first], u, largest))
            if second in state:
                out.append((state[second], v, v.norm()))
        return out

    def check(self, stored_to: float = 0.0) -> None:
        """Compare both; `stored_to` is the relative error that storing the parameter in each step may add."""
        for p, w, change in zip(self.params, self.blocks, self.moved, strict=True):
            error = (p.detach().double() - w).norm()
            allowed = TOLERANCE.get(p.dtype, 0.0) * change + stored_to * w.norm()
            assert error <= allowed, f"off by {error / change:.1e} of the change"
        for ours, theirs, norm in self.buffers():
            assert ours.dtype in (torch.float32, torch.float64)
            tolerance = 1e-12 if ours.dtype == torch.float64 else 1e-5
            assert (ours.double() - theirs).norm() <= tolerance * norm.clamp_min(1e-30)

    def run(
        self,
        steps: int = 20,
        lay: Callable[[Tensor], Tensor] = lambda g: g,
        size: float = 1.0,
        stored_to: float = 0.0,
    ) -> None:
        """Take `steps` steps of both with gradients that have a common drift, multiplied by `size`, and compare."""
        recipes = drifting_gradients(tuple(p.shape for p in self.params))
        for t in range(steps):
            self.step([size * g.to(self.params[0].device) for g in recipes[t % len(recipes)]], lay)
        self.check(stored_to)


@functools.cache
def drifting_gradients(shapes: tuple[torch.Size, ...]) -> list[list[Tensor]]:
    """Return a few gradients with a common drift, to be used repeatedly."""
    generator = torch.Generator().manual_seed(1)
    drift = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [[d + torch.randn(d.shape, generator=generator, dtype=torch.float64) for d in drift] for _ in range(5)]


def make_twin(
    case: str,
    path: str = "default",
    dtype: torch.dtype = torch.float64,
    shapes: Sequence[tuple[int, ...]] = MANY,
    *,
    size: float = 0.1,
    device: str = "cpu",
    lay: Callable[[Tensor], Tensor] = lambda p: p,
    **options: Any,
) -> Twin:
    """Return the twin of a case; `lay` sets the memory layout of the parameters, every second is in another group."""
    name, settings = CASES[case]
    params = [torch.nn.Parameter(lay(p.detach())) for p in make_params(dtype, shapes, size=size, device=device)]
    groups = [list(range(len(params)))[k::2] for k in range(2)] if len(params) > 1 else None
    return Twin(name, params, {**settings, **options}, path, groups)
