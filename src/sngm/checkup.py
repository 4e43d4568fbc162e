"""Check a training set-up: take one step of the user's own code, and report what the optimizer saw."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import environment
from .accumulation import Loss, exact, gradient_size, judge, params_of, read_loss
from .integrations import unwrap
from .optim import SNGM, SpectralSNGM
from .optim.sharded_norms import is_dtensor

REMEDY = "pass norm_group, or use sngm.optim.SharedNorm"
TOLERANCE = 1e-3  # norms count as equal up to this relative difference, because gradients are rounded


class Finding(NamedTuple):
    """One result of :func:`check`: what was checked, whether it is right (None if not known), and an explanation."""

    name: str
    ok: bool | None
    text: str


@dataclass
class Checkup:
    """The findings of :func:`check`. Printing this object shows one line for each finding."""

    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Whether no mistake was found."""
        return not self.faults

    @property
    def faults(self) -> list[Finding]:
        """The findings that report a mistake."""
        return [finding for finding in self.findings if finding.ok is False]

    def __str__(self) -> str:
        words = {True: "ok   ", False: "FAULT", None: "?    "}
        return "\n".join(f"{words[ok]} {name}: {text}" for name, ok, text in self.findings)

    __repr__ = __str__


@dataclass
class _Watch:
    """The model and optimizers that :func:`check` examines, and what `_watching` records of their step."""

    model: nn.Module
    optimizers: list[Any]
    zero: Any  # DeepSpeed's ZeRO optimizer if it wraps the optimizer, else None
    squares: list[float] = field(default_factory=list)  # squared norm of the whole gradient of each optimizer
    steps: dict[int, int] = field(default_factory=dict)  # number of steps of each optimizer, by the optimizer's index
    gradients: int = 0  # number of the optimizers' parameters that have a gradient
    strangers: int = 0  # number of the model's parameters that have a gradient but are in no optimizer
    losses: list[Loss] = field(default_factory=list)  # one for each call of `backward`
    made: float = math.nan  # norm of the gradient after the last `backward`
    used: float = math.nan  # norm of the gradient before clipping, or before the step if there is no clipping
    loss_scale: bool = False  # whether a GradScaler multiplied a loss
    clips: list[tuple[float, float]] = field(default_factory=list)  # limit and norm of each clipping
    value_clip: float | None = None  # limit of single entries of the gradient


def check(model: nn.Module, optimizer: Any, step_fn: Callable[[], Any]) -> Checkup:
    """Take one step of your own training code and report whether the optimizer did what its method says.

    It reports the following mistakes: the norm covers only a part of the gradient, the norm differs between ranks, the
    optimizer has state of parameters that were replaced, clipping changes the step, gradients are summed instead of
    averaged over micro-batches, a scheduler changes the momentum, or a parameter with a gradient is in no optimizer. It
    also reports how the step was computed. Call it on all ranks. The step changes the model.

    Args:
        model: the model, as your code trains it.
        optimizer: an sngm optimizer, a framework's wrapper around one, or a container or list of several.
        step_fn: a function without arguments that takes one optimizer step, with all its micro-batches.

    Raises:
        TypeError: an argument has the wrong type.

    Example:
        >>> import torch, sngm
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = sngm.SNGM(model.parameters(), lr=0.1, weight_decay=0.1)
        >>> def step():
        ...     for _ in range(2):
        ...         model(torch.ones(4, 3)).square().mean().backward()
        ...     optimizer.step()
        >>> print(sngm.check(model, optimizer, step).faults[0].name)
        accumulation
    """
    if not callable(step_fn):
        raise TypeError(f"step_fn must be a function without arguments, got {type(step_fn).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    watch = _Watch(model, unwrap(optimizer), _zero_wrapper(optimizer))
    try:
        with _watching(watch):
            step_fn()
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        return Checkup([Finding("step", False, f"{type(error).__name__}: {error}")])
    if (fault := _step_fault(watch)) is not None:
        return Checkup([fault])
    if watch.zero is not None and watch.zero.clip_grad > 0:
        watch.clips.append((float(watch.zero.clip_grad), float(watch.zero._global_grad_norm)))
    change = watch.used / watch.made if watch.made > 0 else math.nan  # of the gradient, between backward and step
    return Checkup(
        [
            *_norms(watch),
            _state(watch),
            _clipping(watch),
            Finding("accumulation", *judge(watch.optimizers, watch.losses, watch.loss_scale, change)),
            _momentum(watch),
            _parameters(watch),
            Finding("path", True, "; ".join(dict.fromkeys(map(_path, watch.optimizers)))),
        ]
    )


def _step_fault(watch: _Watch) -> Finding | None:
    """Return a finding if the user's function took no step, several steps, or a step without any gradient; else None.

    With DeepSpeed's ZeRO, only a missing step is found.
    """
    if not watch.squares:
        scaled = ", or a GradScaler skipped it because the gradient is NaN or infinite" if watch.loss_scale else ""
        return Finding("step", False, f"the step function did not call the optimizer's step(){scaled}")
    if watch.zero is not None:  # it steps once for each part of the parameters, and does not keep gradients in .grad
        return None
    if (most := max(watch.steps.values())) > 1:
        return Finding("step", False, f"the step function took {most} steps and must take one")
    if not any(_gathered(watch.gradients)):
        if not watch.losses:
            return Finding("step", False, "no parameter has a gradient: backward was not called before the step")
        why = "they were cleared before the step, or the loss does not depend on these parameters"
        return Finding("step", False, f"no parameter of the optimizer has a gradient: {why}")
    return None


@contextlib.contextmanager
def _watching(watch: _Watch) -> Iterator[None]:
    """Record in `watch` the losses, clipping, gradients and optimizer steps of the ``with`` block."""
    inner = watch.optimizers
    backward, clip = torch.autograd.backward, torch.nn.utils.clip_grad_norm_
    clip_value, scale = torch.nn.utils.clip_grad_value_, torch.amp.GradScaler.scale

    def watched_backward(tensors: Any, *rest: Any, **options: Any) -> None:
        watch.losses.append(read_loss(tensors, rest[0] if rest else options.get("grad_tensors")))
        backward(tensors, *rest, **options)
        watch.made = gradient_size(inner)

    def note_use() -> None:
        if math.isnan(watch.used):
            watch.used = gradient_size(inner)

    def watched_clip(parameters: Any, max_norm: float, *rest: Any, **options: Any) -> Tensor:
        note_use()
        norm = clip(parameters, max_norm, *rest, **options)
        if math.isfinite(max_norm):  # with an infinite limit, trainers only measure the norm
            watch.clips.append((float(max_norm), float(_whole(norm))))
        return norm

    def watched_value(parameters: Any, clip_to: float, *rest: Any, **options: Any) -> None:
        note_use()
        watch.value_clip = float(clip_to)
        clip_value(parameters, clip_to, *rest, **options)

    def watched_scale(scaler: Any, outputs: Any) -> Any:
        watch.loss_scale |= scaler.is_enabled()
        return scale(scaler, outputs)

    def watched_step(index: int, taken: Callable[..., None]) -> Callable[..., None]:
        def take(*given: Any) -> None:
            watch.steps[index] = watch.steps.get(index, 0) + 1
            if not watch.squares:
                watch.squares = [_square(optimizer) for optimizer in inner]
                note_use()
                owned = {id(p): p for p in params_of(inner)}
                watch.gradients = sum(p.grad is not None for p in owned.values())
                watch.strangers = sum(p.grad is not None and id(p) not in owned for p in watch.model.parameters())
            taken(*given)

        return take

    torch.autograd.backward = watched_backward
    torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_ = watched_clip, watched_value  # type: ignore[assignment]
    torch.amp.GradScaler.scale = watched_scale  # type: ignore[assignment, method-assign]
    for i, optimizer in enumerate(inner):
        optimizer._take_step = watched_step(i, optimizer._take_step)
    try:
        yield
    finally:
        torch.autograd.backward = backward
        torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_ = clip, clip_value
        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
        for optimizer in inner:
            del optimizer._take_step


@torch.no_grad()
def _square(optimizer: Any) -> float:
    """Return the square of the norm that `optimizer.grad_norm` should equal, from unsharded tensors in float64."""
    scale = float(getattr(optimizer, "grad_scale", None) or 1.0)
    total = 0.0
    for group in optimizer.param_groups:
        coupled = isinstance(optimizer, SNGM) and group["weight_decay_mode"] == "coupled"
        decay = group["weight_decay"] if coupled else 0.0
        decay = -decay if group["maximize"] else decay
        for p in group["params"]:
            if p.grad is not None:
                grad, w = exact(_whole(p.grad)), exact(_whole(p))
                total += float(torch.linalg.vector_norm(grad / scale + decay * w)) ** 2
    return total


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return whole


def _zero_wrapper(optimizer: Any) -> Any:
    """Return DeepSpeed's ZeRO optimizer if it wraps the optimizer, else None."""
    while optimizer is not None and not hasattr(optimizer, "unscale_and_clip_grads"):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def _has_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _gathered(value: Any, group: Any = None) -> list[Any]:
    """Return a list with the value of each rank of a group, by default of all ranks."""
    if not _has_process_group():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _norms(watch: _Watch) -> list[Finding]:
    """Return a finding about the norm, followed by the findings of `_ranks`."""
    spanning = [o for o in watch.optimizers if o._norm_spans() == "global"]
    seen = [*watch.squares, *(float(o.grad_norm) for o in watch.optimizers)]
    if not all(_gathered(all(map(math.isfinite, seen)))):
        text = "the gradient is NaN or infinite, so the step was skipped"
        return [Finding("norm", False, f"{text}; lower the learning rate, or check the data for NaN"), *_ranks([])]
    if not spanning:
        return [Finding("norm", True, "each tensor or group has its own norm"), *_ranks([])]
    return [Finding("norm", *_judge_norm(watch, spanning)), *_ranks(spanning)]


def _ranks(spanning: list[Any]) -> list[Finding]:
    """Return a finding that there is no process group, or one on whether all ranks divide by the same norm.

    `spanning` holds the optimizers with one norm for all parameters. If it is empty, norms are not compared.
    """
    if environment.ranks() > 1 and not _has_process_group():
        text = f"WORLD_SIZE is {environment.ranks()}, but there is no process group, so gradients are not averaged"
        remedy = "call torch.distributed.init_process_group() and wrap the model in DDP or FSDP"
        return [Finding("ranks", False, f"{text}; {remedy}")]
    if not spanning:
        return []
    norms = _gathered(float(spanning[0].grad_norm))
    if all(math.isclose(norm, norms[0], rel_tol=TOLERANCE) for norm in norms):
        return [Finding("ranks", True, f"all {len(norms)} ranks divide by the same norm")]
    shown = ", ".join(f"{norm:.6g}" for norm in norms)
    text = f"ranks divide by {shown}; wrap the model in DDP or FSDP; if ranks hold other parts of it, {REMEDY}"
    return [Finding("ranks", False, text)]


def _judge_norm(watch: _Watch, spanning: list[Any]) -> tuple[bool, str]:
    """Return whether the optimizers in `spanning` divide by the norm of the whole gradient, and a text that says so."""
    norms = [float(o.grad_norm) for o in spanning]
    if watch.zero is not None:  # ZeRO gives the optimizer one part of the gradient at a time
        return True, f"{norms[0]:.6g}, over all groups, by share_norm"
    square = sum(s for s, o in zip(watch.squares, watch.optimizers, strict=True) if o in spanning)
    group = next((o.norm_group or getattr(o.shared_norm, "norm_group", None) for o in spanning), None)
    if group is not None:
        if _replicated(spanning, group):
            return False, "norm_group adds up copies of one gradient: leave it out, as with DDP"
        square = sum(_gathered(square, group))
    whole = math.sqrt(square)
    wrong = [norm for norm in norms if not math.isclose(norm, whole, rel_tol=TOLERANCE)]
    if wrong:
        return False, f"the step divides by {wrong[0]:.6g}, but the norm of the whole gradient is {whole:.6g}; {REMEDY}"
    return True, f"{whole:.6g}, that of the whole gradient"


def _replicated(optimizers: list[Any], group: Any) -> bool:
    """Return whether the parameters are equal on all ranks of a group; DTensors are not compared."""
    plain = [p for p in params_of(optimizers) if not is_dtensor(p)]
    prints = [(tuple(p.shape), float(p.detach().double().abs().sum())) for p in plain]
    parts = _gathered(prints, group)
    return len(parts) > 1 and bool(prints) and all(part == parts[0] for part in parts)


def _state(watch: _Watch) -> Finding:
    if watch.zero is None:  # ZeRO replaces the parameters in the groups
        live = {id(p) for p in watch.model.parameters()}
        owned = {id(p) for p in params_of(watch.optimizers)}
        if strange := len(owned - live):
            text = f"{strange} parameters in the groups are not the model's"
            return Finding("state", False, f"{text}; build the optimizer from the model that you train")
        held = {id(p) for o in watch.optimizers for p in o.state if isinstance(p, Tensor)}
        if stale := len(held - owned):
            text = f"state of {stale} parameters that are in no group; delete optimizer.state[p]"
            return Finding("state", False, text)
    return Finding("state", True, "belongs to the parameters of the model")


def _scale_matters(optimizers: list[Any]) -> bool:
    """Return whether clipping, which multiplies the gradient by a factor, may change the update of an optimizer."""

    def normalised(optimizer: Any, group: dict[str, Any]) -> bool:  # before anything is added to the gradient
        if isinstance(optimizer, SpectralSNGM):
            return group["order"] == "before" and not (group["ball"] == "rows" and group["row_beta"])
        coupled = group["weight_decay"] and group["weight_decay_mode"] == "coupled"
        return isinstance(optimizer, SNGM) and not coupled

    return not all(normalised(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups)


def _clipping(watch: _Watch) -> Finding:
    if watch.value_clip is not None:
        text = f"of single entries, at {watch.value_clip:g}; it changes the direction of the gradient; turn it off"
        return Finding("clipping", False, text)
    if not watch.clips:
        return Finding("clipping", True, "none seen")
    limit, norm = min(watch.clips, key=lambda clip: clip[0] / clip[1] if clip[1] > 0 else math.inf)
    if not _scale_matters(watch.optimizers):
        return Finding("clipping", True, f"on, at {limit:g}; without effect, because the step is normalised")
    effect = "shifts the balance with weight decay and with earlier gradients; turn it off"
    if norm <= limit:
        text = f"on, but without effect on this step: the norm {norm:.3g} is below {limit:g}"
        return Finding("clipping", None, f"{text}; where it clips, it {effect}")
    text = f"on, at {limit:g}; it multiplied this gradient by {limit / norm:.3g}"
    return Finding("clipping", False, f"{text} and {effect}")


def _momentum(watch: _Watch) -> Finding:
    for optimizer in watch.optimizers:
        for group in optimizer.param_groups:
            if "max_momentum" in group and "momentum" in group:
                now, built = group["momentum"], optimizer.defaults["momentum"]
                text = f"a scheduler cycles it ({now:g} now, {built:g} when built), which changes the longest step"
                return Finding("momentum", False, f"{text}; pass cycle_momentum=False to OneCycleLR or CyclicLR")
    return Finding("momentum", True, "not changed by a scheduler")


def _parameters(watch: _Watch) -> Finding:
    if watch.strangers:
        text = f"{watch.strangers} parameters of the model have a gradient but are in none of these optimizers"
        return Finding("parameters", False, f"{text}; if another optimizer steps them, this is as intended")
    return Finding("parameters", True, "every parameter with a gradient is in an optimizer")


def _path(optimizer: Any) -> str:
    """Return a text that says how the last step was computed, such as "Triton kernels"."""
    if optimizer._layout is not None:
        return "Triton kernels"
    (foreach, fused), *_ = [(group["foreach"], group["fused"]) for group in optimizer.param_groups]
    device = optimizer._grad_norm.device.type
    if device == "cpu" and (fused or (fused is None and foreach is None)):
        return "fused on the CPU where it applies, else foreach"
    return f"{'single-tensor' if foreach is False else 'foreach'} on {device}"
