"""The optimizers to compare, each with each of its implementations, and the least memory traffic of a step."""

from __future__ import annotations

import importlib
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sngm

Step = Callable[[], object]
Row = dict[str, Any]
MOMENTUM, DECAY = 0.9, 1e-4
LR = 1e-3  # parameters barely change over a whole run, yet LARS's lr * ratio stays normal
LR_OF_ADAM, LR_OF_LAMB = 1e-6, 1e-5  # likewise; LAMB's steps are relative to the parameter, so they compound


class Activity(NamedTuple):
    """GPU activity of a step: microseconds in kernels and copies; numbers of kernels, of copies and fills, of waits."""

    gpu_us: float | None
    launches: float | None
    copies: float | None
    syncs: float | None


@dataclass
class Contender:
    """An optimizer to measure.

    `build` takes the parameters and returns a function that takes one step; `bytes` is the least memory traffic per
    parameter.
    """

    method: str
    path: str
    bytes: int
    build: Callable[[list[Tensor]], Step]
    slow: bool = False  # on a GPU: measured later in few rounds, to leave time and memory to the others
    spoils_grads: bool = False  # the step changes gradients; on the CPU they are restored outside the timing
    step: Step | None = None
    unavailable: str = ""
    in_a_row: int = 1
    wall: list[float] = field(default_factory=list)  # seconds, as is host
    host: list[float] = field(default_factory=list)
    peak: int | None = None  # bytes
    activity: Activity | None = None

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    def row(self) -> Row:
        counts = self.activity or Activity(None, None, None, None)
        return {
            "method": self.method,
            "path": self.path,
            "ours": self.method.startswith("sngm."),
            "bytes": self.bytes,
            "unavailable": self.unavailable,
            "slow": self.slow,
            "wall_us": in_microseconds(self.wall),
            "wall_us_of_rounds": [round(1e6 * s, 3) for s in self.wall],
            "host_us": in_microseconds(self.host),
            "steps_in_a_row": self.in_a_row,
            "peak_bytes": self.peak,
            **counts._asdict(),
        }


def in_microseconds(seconds: list[float]) -> Row | None:
    if not seconds:
        return None
    times = [1e6 * s for s in seconds]
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else 3 * times
    values = {"median": median, "min": min(times), "q1": q1, "q3": q3}
    return {**{key: round(value, 3) for key, value in values.items()}, "samples": len(times)}


def using(build: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[list[Tensor]], Step]:
    return lambda params: build(params, **{"lr": LR, **settings}).step


def clipped_sgd(**how: bool) -> Callable[[list[Tensor]], Step]:
    def build(params: list[Tensor]) -> Step:
        optimizer = torch.optim.SGD(params, LR, MOMENTUM, **how)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=True)  # multiplies by 1, at the usual cost
            optimizer.step()

        return step

    return build


def norm_alone(params: list[Tensor]) -> Step:
    return lambda: torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], foreach=True)


def clars(params: list[Tensor]) -> Step:
    optimizer = sngm.CLARS(params, LR, MOMENTUM, DECAY)
    mean_norms = torch.stack([p.grad.norm() for p in params if p.grad is not None])
    return lambda: optimizer.step(mean_norms=mean_norms)


def theirs(module: str, name: str, **settings: Any) -> Callable[[list[Tensor]], Step]:
    def build(params: list[Tensor]) -> Step:
        return using(getattr(importlib.import_module(module), name), weight_decay=DECAY, **settings)(params)

    return build


def contenders(pattern: str = "") -> list[Contender]:
    """Return the contenders whose name matches the pattern."""
    heavy = {"momentum": MOMENTUM}
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    slow_adam, lamb = {"lr": LR_OF_ADAM}, {"lr": LR_OF_LAMB}
    decay = {"weight_decay": DECAY}
    everyone = [
        Contender("SGD", "for-loop", 20, using(sgd, **heavy, foreach=False), slow=True),
        Contender("SGD", "foreach", 20, using(sgd, **heavy, foreach=True), slow=True),
        Contender("SGD", "fused", 20, using(sgd, **heavy, fused=True)),
        Contender("Adam", "for-loop", 28, using(adam, **slow_adam, foreach=False), slow=True),
        Contender("Adam", "foreach", 28, using(adam, **slow_adam, foreach=True), slow=True),
        Contender("Adam", "fused", 28, using(adam, **slow_adam, fused=True)),
        Contender("norm alone", "foreach", 4, norm_alone),
        Contender("clip + SGD", "foreach", 24, clipped_sgd(foreach=True), slow=True),
        Contender("clip + SGD", "fused", 24, clipped_sgd(fused=True)),
        Contender("sngm.SNGM", "for-loop", 24, using(sngm.SNGM, foreach=False), slow=True),
        Contender("sngm.SNGM", "foreach", 24, using(sngm.SNGM, foreach=True), slow=True),
        Contender("sngm.SNGM", "fused", 24, using(sngm.SNGM, fused=True)),
        Contender("sngm.SNGM", "default", 24, using(sngm.SNGM)),
        Contender("sngm.SNGM decay", "default", 28, using(sngm.SNGM, **decay)),
        Contender("sngm.SNGM block-wise", "default", 24, using(sngm.SNGM, scope="tensor")),
        Contender("sngm.SNGM block-wise decay", "default", 28, using(sngm.SNGM, **decay, scope="tensor")),
        Contender("sngm.LARS decay", "default", 28, using(sngm.LARS, **decay)),
        Contender("sngm.LARS decay", "foreach", 28, using(sngm.LARS, **decay, foreach=True), slow=True),
        Contender("sngm.CLARS decay", "default", 28, clars),
        Contender("sngm.LAMB decay", "default", 44, using(sngm.LAMB, **lamb, **decay)),
        Contender("sngm.LAMB decay", "foreach", 44, using(sngm.LAMB, **lamb, **decay, foreach=True), slow=True),
        Contender("timm.Lars decay", "default", 28, theirs("timm.optim", "Lars", **heavy), slow=True),
        # clips by default, unlike ours
        Contender(
            "timm.Lamb decay", "default", 44, theirs("timm.optim", "Lamb", **lamb, max_grad_norm=None), slow=True
        ),
        Contender(
            "pytorch_optimizer.LARS decay",
            "default",
            28,
            theirs("pytorch_optimizer", "LARS", **heavy),
            slow=True,
            spoils_grads=True,
        ),
        Contender(
            "pytorch_optimizer.Lamb decay",
            "default",
            44,
            theirs("pytorch_optimizer", "Lamb", **lamb),
            slow=True,
            spoils_grads=True,
        ),
    ]
    return [c for c in everyone if re.search(pattern, c.name)]
