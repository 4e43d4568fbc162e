"""Preparation of a run, up to its first step. An invalid run raises an error here, before any file is written."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError
from ..memory import MemoryLimit
from ..optim import CLARS, LARS, SpectralSNGM, decay_groups
from ..optim.base import LargeBatchOptimizer
from ..optim.external import restores_its_state, set_mode
from ..optim.lars import trust
from ..optim.registry import BUILT_IN, METHODS, builder
from ..optim.state import EXECUTION_FLAGS
from ..options import Execution
from ..tasks import Samples, Schedule, Splits, Task
from . import rng, sharding
from .batch_plan import BatchPlan
from .batchnorm_stats import GhostStatistics, PerGroupStatistics, may_merge
from .config import RunConfig
from .cuda_graph_step import CapturedStepper, choose, without_capture
from .data_loading import Resident, Streamed, fits, loaders_of
from .distributed import Processes
from .evaluate import HeldOut, data_of, in_streams, samples_of, schedule_of, steps_per_epoch
from .recurrent_state import RecurrentState
from .stacked_weights import may_stack
from .step import Stepper, pieces_of, worker_passes_of

RATES = ("lr", "inner_lr")  # schedules scale EXTRAP-SGD's inner_lr too
CHECKED: set[tuple[str, str | None]] = set()  # user-defined methods whose `state_dict` has been checked
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # torch's optimizers with fused steps on CUDA


@dataclass(frozen=True, slots=True)
class Setup:
    """A prepared run. `training` has the samples to train on, `held_out` the samples of each split that is scored."""

    task: Task
    training: Samples
    held_out: HeldOut
    data: dict[str, Any]  # description of the samples, for the record
    per_epoch: int  # number of steps in an epoch
    steps: int  # number of steps in the run
    schedule: Schedule
    plan: BatchPlan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data_source: Resident | Streamed
    recurrent_state: RecurrentState
    stepper: Stepper | CapturedStepper
    rest: int = 0  # samples in the last, smaller batch of an epoch; 0 if this batch is dropped
    rest_stepper: Stepper | CapturedStepper | None = None


def prepare(
    config: RunConfig,
    processes: Processes,
    execution: Execution | None = None,
    splits: Splits | None = None,
) -> Setup:
    """Prepare a run: data, batch plan, schedule, model, optimizer and training step.

    Raises:
        UsageError: the run is not possible with this config, task or device.
    """
    execution = execution or Execution()
    step = execution.step
    config.check_source()
    task = config.build_task(execution.data_dir)
    training, held_out = samples_of(task, config, splits)
    data = data_of(training, held_out)
    training = in_streams(training, config.batch)
    if config.bn_samples and hasattr(training, "streams"):
        raise UsageError("`bn_samples` needs samples in any order, and those of this task follow one another")
    per_epoch = steps_per_epoch(config, len(training))
    schedule = schedule_of(config, held_out)
    plan = BatchPlan.of(config.batch, config.workers, config.micro, config.bn_group, processes.ranks)
    shards = execution.shard and processes.ranks > 1 and dist.is_initialized()  # a dry run has no process group
    model = build_model(config, task, torch.device("cpu") if shards else processes.device)
    if shards:
        sharding.shard(model, processes.device, processes.ranks)
    if plan.bn_group == 1 and any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
        raise UsageError(
            "BatchNorm over a single sample: use a larger `batch`, fewer `workers`, or a larger `bn_group`"
        )
    streams = task.loaders > 0 or bool(execution.loaders)
    not_on_gpu = why_not_on_gpu(training, streams, processes.device)
    # EXTRAP-SGD computes each worker's gradient twice
    passes = plan.batch // plan.bn_group * (2 if config.method == "extrap-sgd" else 1)
    mode = choose(step, task, model, processes.device, processes.ranks, not_on_gpu, passes)
    optimizer = build_optimizer(config, model, tensor_rates="captured" in mode)
    if "captured" in mode and not can_capture(optimizer):
        if step != "auto":
            raise UsageError(f"`step` {step}: {config.method} cannot be captured in a CUDA graph")
        mode = without_capture(mode)
        optimizer = build_optimizer(config, model)
    if isinstance(optimizer, SpectralSNGM):
        shrinking = config.lr * max(group["weight_decay"] for group in optimizer.param_groups)
        if shrinking >= 1:
            warnings.warn(
                f"lr * weight_decay is {shrinking:g}: a step subtracts this fraction of the weights, so choose a "
                "smaller lr or weight_decay",
                stacklevel=2,
            )
    if execution.shard:
        sharding.check(config, optimizer)
    most = largest_pass_size(task, model, processes.device, execution.pass_size)
    # on a CPU one pass of many copies is not faster than a pass for each
    asked = execution.pass_size is not None or processes.device.type == "cuda"
    stacks = asked and not mode.startswith("compiled") and not shards and may_stack(task, model)
    source: Resident | Streamed = Resident(training, processes.device)
    if streams:
        pieces = pieces_of(worker_passes_of(plan, processes.rank, optimizer, most, stacks))
        count = loaders_of(task, execution.loaders)
        source = Streamed(task, training, config.seed, pieces, config.batch, processes.device, count)
    state = RecurrentState(task, model, plan, processes.rank)

    def stepper_of(plan: BatchPlan) -> Stepper | CapturedStepper:
        own = worker_passes_of(plan, processes.rank, optimizer, most, stacks)
        statistics: GhostStatistics | PerGroupStatistics = PerGroupStatistics(model, plan, config.running_stats)
        if most is not None:
            policy, rank = config.running_stats, processes.rank
            statistics = GhostStatistics(model, plan, policy, rank, pieces_of(own), config.dtype)
        plain = Stepper(
            config, task, source, model, optimizer, plan, processes, own, statistics, state, mode, step != "auto"
        )
        return CapturedStepper(plain, plan.batch, processes.device) if "captured" in mode else plain

    rest_stepper, rest = None, 0
    left = len(training) % plan.batch if config.last_batch == "keep" else 0
    small = plan.for_rest(left)
    if small is not None and isinstance(optimizer, CLARS) and small.batch == small.micro:
        small = None  # CLARS needs several micro-batches
    if dropped := left - (small.batch if small else 0):
        warnings.warn(
            f"{dropped} of the last {left} samples of an epoch fill no micro-batch of every worker and are dropped",
            stacklevel=2,
        )
    if small is not None:
        if streams or state.rows:
            raise UsageError("`last_batch` keep needs samples in memory that do not follow one another")
        rest_stepper, rest, per_epoch = stepper_of(small), small.batch, per_epoch + 1
    stepper = stepper_of(plan)  # last, because GhostStatistics sets `group` of the BatchNorm layers
    steps = per_epoch * config.epochs
    return Setup(
        task, training, held_out, data, per_epoch, steps, schedule, plan, model, optimizer, source, state, stepper,
        rest, rest_stepper,
    )  # fmt: skip


# parameters that runs in this process have trained, by id
TRAINED: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


def check_new(config: RunConfig, model: nn.Module) -> None:
    """Raise UsageError if an earlier run in this process trained a parameter of the model: its weights are not new."""
    params = [p for p in model.parameters() if p.requires_grad]
    if any(TRAINED.get(id(p)) is p for p in params):
        raise UsageError(
            f"task {config.task}: model() must build a new model at every call; this one was trained before"
        )
    TRAINED.update({id(p): p for p in params})


def build_model(config: RunConfig, task: Task, device: torch.device) -> nn.Module:
    """Return the task's model, initialised with the config's seed, on `device` and in the config's dtype."""
    rng.seed_torch(config.seed, rng.MODEL)
    with MemoryLimit(config.task_in_words, copies=1 if device.type == "cuda" else 2) as limit:
        model = task.model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"task {config.task}: model() must return a torch.nn.Module, got {model!r}")
    limit.check(model)
    model = model.to(device, config.dtype)
    if device.type == "cuda" and config.precision == "bfloat16":  # channels-last, the layout that tensor cores use
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def why_not_on_gpu(samples: Samples, streams: bool, device: torch.device) -> str:
    """Return the reason why samples cannot be stored in GPU memory; an empty string if they can."""
    if streams:
        return "batches come from other processes"
    if getattr(samples, "device", None) is None:
        return "samples are not tensors in memory"
    return "" if fits(samples, device) else "samples take more than half of the GPU's free memory"


def largest_pass_size(task: Task, model: nn.Module, device: torch.device, asked: int | None) -> int | None:
    """Return the most samples in a forward-backward pass; None if each pass must be exactly one BatchNorm group."""
    if may_merge(task, model):
        usual = task.pass_size if device.type == "cuda" else min(task.pass_size or 0, task.pass_size_on_cpu)
        return usual if asked is None else asked
    if asked is not None:
        raise UsageError(
            "`pass_size` needs a task that sets one and a model whose samples interact only in GhostBatchNorm2d; "
            "this run computes one BatchNorm group per pass"
        )
    return None


def build_optimizer(config: RunConfig, model: nn.Module, *, tensor_rates: bool = False) -> torch.optim.Optimizer:
    """Build the optimizer of a run, with its parameter groups.

    LARS and CLARS multiply the learning rate of weights by a trust ratio, often about 0.001. Biases and normalisation
    layers have no trust ratio and would diverge at the full learning rate. So they train at ``trust_coefficient * lr``,
    unless the config has ``bias_lr="full"``.

    Args:
        config: the config of the run.
        model: the model, on the device it is trained on.
        tensor_rates: keep learning rates in tensors on the device, which :func:`set_rates` fills, so that each replay
            of a CUDA graph reads the current values. Checkpoints are the same with and without it.
    """
    settings = dict(config.method_settings)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            f"task {config.task}: no parameter of the model requires a gradient, so nothing can be trained"
        )
    try:
        groups = decay_groups(model, settings.get("weight_decay", 0.0), embeddings=for_embeddings(config))
        if config.decay_on == "all":
            groups = [{**group, "weight_decay": settings.get("weight_decay", 0.0)} for group in groups]
        if not any(group["weight_decay"] for group in groups):  # the model has only vectors
            settings |= dict.fromkeys(settings.keys() & {"weight_decay"}, 0.0)
        if "weight_decay" not in settings:
            for group in groups:
                del group["weight_decay"]
        build = builder(config.method, settings)
        optimizer = build(groups, lr=config.lr)
    except (TypeError, ValueError) as error:
        named = str(error).startswith(config.method)
        raise UsageError(str(error) if named else f"{config.method}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{config.method}: must return a torch.optim.Optimizer, got {optimizer!r}")
    own = config.label, config.method_source
    if config.method not in BUILT_IN and own not in CHECKED:
        _check_function(config, model, optimizer, build)
        if not restores_its_state(functools.partial(build, lr=config.lr)):
            warnings.warn(
                f"{config.label}: state_dict() lacks something that its step uses, so a resumed run would differ from "
                "an unbroken one; see docs/your-own-optimizer.md",
                stacklevel=2,
            )
        CHECKED.add(own)
    set_mode(optimizer, training=True)
    if isinstance(optimizer, (LARS, CLARS)) and config.bias_lr == "scaled":
        _scale_vectors(optimizer)
    for group in optimizer.param_groups:
        group |= {f"initial_{key}": group[key] for key in RATES if key in group}
    _choose_kernels(optimizer, tensor_rates)
    if tensor_rates:
        _hold_rates_in_tensors(optimizer)
    return optimizer


def for_embeddings(config: RunConfig) -> dict[str, Any]:
    """Return the method's special settings for embeddings; {} if the user chose one of these settings."""
    special = METHODS[config.method].embeddings if config.method in METHODS else {}
    return {} if special.keys() & config.method_settings.keys() else special


def _check_function(
    config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer, build: Callable[..., torch.optim.Optimizer]
) -> None:
    """Check a user's own optimizer.

    Raise UsageError if it has parameters that are not the model's. Warn if it lacks some of the model's parameters, or
    ignores lr.
    """
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if theirs - {id(p) for p in model.parameters()}:
        raise UsageError(f"{config.method}: the optimizer has parameters that it was not given")
    trained = [p for p in model.parameters() if p.requires_grad]
    if left_out := [p for p in trained if id(p) not in theirs]:
        said = f"{len(left_out)} of {len(trained)} parameters are not in the optimizer, so they are not trained"
        warnings.warn(f"{config.label}: {said}", stacklevel=2)
    try:
        smaller = build([nn.Parameter(torch.ones(2, 2))], lr=config.lr / 2)
    except Exception:  # the user's code may need the model's own parameters; then nothing is compared
        return
    rates = [{group.get("lr") for group in one.param_groups} for one in (optimizer, smaller)]
    if rates[0] == rates[1] != {None}:
        warnings.warn(f"{config.label}: the optimizer ignores the learning rate that it is given", stacklevel=2)


def _scale_vectors(optimizer: LARS | CLARS) -> None:
    """Move parameters of at most one dimension to groups whose learning rate is trust_coefficient * lr."""
    for group in list(optimizer.param_groups):
        vectors = [p for p in group["params"] if p.ndim <= 1]
        if group["adapt"] is not None or not vectors:
            continue
        rate = group["lr"] * trust(group)
        if len(vectors) == len(group["params"]):
            group["lr"] = rate
        else:
            group["params"] = [p for p in group["params"] if p.ndim > 1]
            optimizer.add_param_group({**group, "params": vectors, "lr": rate})


def can_capture(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a CUDA graph can capture this optimizer's step if its learning rates are in tensors."""
    # not a user's subclass, because a replayed graph would skip its Python code
    own = isinstance(optimizer, LargeBatchOptimizer) and type(optimizer).__module__.startswith("sngm.")
    return own or type(optimizer) in FUSED


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each learning rate to its initial value times the schedule's `factor`. Tensors are filled in place."""
    changed = getattr(optimizer, "rate_factor", None) != factor
    for group in optimizer.param_groups:
        for key in RATES:
            if key not in group:
                continue
            rate = group[f"initial_{key}"] * factor
            if not isinstance(group[key], Tensor):
                group[key] = rate
            elif changed:
                group[key].fill_(rate)
    optimizer.rate_factor = factor  # type: ignore[attr-defined]


def _choose_kernels(optimizer: torch.optim.Optimizer, capture: bool) -> None:
    """On a GPU, turn on torch's fused steps, unless the settings choose otherwise.

    Also turn on `capturable` if `capture`, and keep these flags when a checkpoint is loaded.
    """
    for group in optimizer.param_groups:
        if type(optimizer) not in FUSED or any(p.device.type != "cuda" for p in group["params"]):
            continue
        if group["fused"] is None and not group["foreach"] and not group["differentiable"]:
            group["fused"] = True
        if capture and "capturable" in group:
            group["capturable"] = True
    how = [{key: group[key] for key in EXECUTION_FLAGS if key in group} for group in optimizer.param_groups]

    def keep(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Keep this optimizer's flags, such as `fused`, when a checkpoint from another device is loaded."""
        if len(state["param_groups"]) != len(how):  # torch itself raises ValueError
            return state
        return {**state, "param_groups": [g | own for g, own in zip(state["param_groups"], how, strict=True)]}

    optimizer.register_load_state_dict_pre_hook(keep)


def _hold_rates_in_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Replace learning rates by tensors, which `load_state_dict` fills in place; `state_dict` returns plain numbers."""
    held: list[dict[str, Tensor]] = []
    for group in optimizer.param_groups:
        device = group["params"][0].device
        # torch's fused kernels read lr as float32, whatever its dtype
        exact = torch.float32 if isinstance(optimizer, FUSED) and device.type == "cuda" else torch.float64
        held.append({k: torch.tensor(group[k], dtype=exact, device=device) for k in RATES if k in group})
        group |= held[-1]

    def pairs() -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
        return zip(optimizer.param_groups, held, strict=True)

    def as_numbers(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        factor = getattr(optimizer, "rate_factor", 1.0)
        rates = [{k: group[f"initial_{k}"] * factor for k in tensors} for group, tensors in pairs()]
        return {**state, "param_groups": [g | r for g, r in zip(state["param_groups"], rates, strict=True)]}

    def back_into_tensors(_: torch.optim.Optimizer) -> None:
        for group, tensors in pairs():
            for key, tensor in tensors.items():
                tensor.fill_(group[key])
            group |= tensors
        optimizer.__dict__.pop("rate_factor", None)  # so that set_rates fills the tensors again

    optimizer.register_state_dict_post_hook(as_numbers)
    optimizer.register_load_state_dict_post_hook(back_into_tensors)
