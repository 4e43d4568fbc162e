"""Probes of a task during a short training, and at the last checkpoints of runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..environment import ranks
from ..errors import UsageError
from ..options import Execution
from ..training import RunConfig, RunFolder, checkpoint, load_model_and_config, rng
from ..training.batch_plan import BatchPlan
from ..training.build import Setup, prepare
from ..training.data_loading import to_device_if_fits
from ..training.distributed import Processes, choose_device, set_numerics
from ..training.evaluate import evaluate, in_streams, order_of, samples_of
from ..training.loop import steps_of_epoch
from ..training.run_folder import provenance
from .blocks import frontier, of_norms
from .curvature import PRODUCT
from .gradients import NotFinite, norm
from .sample import Point, Sample

SAMPLES = 256
MOST_POINTS = 10_000
ITERATIONS = 20
LAMBDAS = (0.0, 0.1, 1.0, 10.0, 100.0)
Record = dict[str, Any]
Say = Callable[[str], None]


def along(
    config: RunConfig,
    *,
    points: int = 5,
    steps: int | None = None,
    samples: int = SAMPLES,
    iterations: int = ITERATIONS,
    lambdas: Sequence[float] = LAMBDAS,
    device: str | None = None,
    data_dir: Path | None = None,
    say: Say = lambda text: None,
    progress: Callable[[int, int, Record], None] = lambda step, steps, metrics: None,
) -> Record:
    """Train with `config` (the pilot), and measure noise and curvature at `points` equally spaced steps.

    The steps are the same as in ``sngm train``; no run folder is written. Every step also records the norm of each
    tensor's gradient after clipping, divided by ``task.scale``, the factor by which a task multiplies the mean loss. So
    all values are those of the mean loss. If the loss becomes NaN or infinite, the pilot ends at the next point; the
    result has the status "diverged" and contains the earlier points.

    Args:
        config: config of the run, from :func:`sngm.training.resolve`.
        points: number of points (steps at which to measure), at least two; the first is the start, the last the end.
        steps: end after this many steps; the learning rate schedule is still that of the whole run.
        samples: number of training samples to measure on at each point, in groups: see :class:`Sample`.
        iterations: the most Hessian-vector products per point; each takes the time of about three gradients of all
            samples.
        lambdas: values of lambda to find L for, see :func:`sngm.probes.frontier`.
        device: device to train on. Default: the GPU if there is one.
        data_dir: the folder of datasets.
        say: called with messages: the expected number of gradients, and the results of each point.
        progress: called after each step, as in :class:`sngm.training.Options`, with empty metrics.

    Returns:
        A dict with the fields listed in docs/probes.md. In JSON, the command line writes NaN and infinity as null.
    """
    if not 2 <= points <= MOST_POINTS:
        raise UsageError(f"points must be at least 2, the start and the end, and at most {MOST_POINTS:,}, got {points}")
    if steps is not None and steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
    frontier([0.0], [0.0], lambdas)  # validate lambdas before training
    where = probe_device(device)
    setup = prepare(config, Processes(0, 1, where), Execution(data_dir=data_dir, step="eager"))
    sample = Sample(setup.task, setup.model, setup.training, setup.plan.bn_group, samples, iterations, say)
    steps = setup.steps if steps is None else min(steps, setup.steps)
    due = sorted({round(i * steps / (points - 1)) for i in range(points)})
    scale = setup.task.scale(config.batch)
    recorded = Norms(setup.model, scale)
    say(cost_text(sample, len(due)) + f"; {steps} steps of training, {steps * config.batch:,} more")
    found: list[Point] = []
    began, status = time.monotonic(), "finished"
    walk = training(config, setup, where, recorded)
    try:
        for step in range(steps + 1):
            if step in due:
                found.append({"step": step, **sample.measure(setup.model)})
                say(f"step {step} of {steps}: {in_words(found[-1])}")
            if step < steps:
                next(walk)
                progress(step + 1, steps, {})
    except NotFinite:
        if not found:
            raise
        status = "diverged"
    finally:
        setup.data_source.close()
    curves, slopes = ([p[key] for p in found] for key in ("hessian_norm", "gradient_norm"))
    step_blocks, each = recorded.read(sample.names)
    known = [row["rho"] for row in each if row["rho"] == row["rho"]]
    return {
        "format": 1,
        "kind": "pilot",
        "status": status,
        "config": config.as_dict(),
        **_about(sample),
        # for text, the samples are the windows of the streams
        "training_samples": len(setup.training),
        "scale": scale,
        "points": found,
        "L": max(curves),
        "L_settled": all(p["settled"] for p in found),
        "sigma": max(p["sigma"] for p in found),
        "sigma_high": max(p["sigma_interval"][1] for p in found),
        "frontier": [{"lambda": lam, "L": L} for lam, L in frontier(curves, slopes, lambdas).items()],
        "rho": max(known, default=None),
        "step_blocks": step_blocks,
        "steps": each,
        "cost": {
            "gradients": sum(sample.samples * (1 + PRODUCT * point["products"]) for point in found),
            "training": len(each) * config.batch,
            "seconds": time.monotonic() - began,
        },
        **provenance(where),
    }


def of_runs(
    folders: Sequence[str | Path],
    *,
    samples: int = SAMPLES,
    iterations: int = ITERATIONS,
    bn_group: int | None = None,
    device: str | None = None,
    data_dir: Path | None = None,
    say: Say = lambda text: None,
) -> Record:
    """Measure the last checkpoint of each run, for example to compare the sharpness of small- and large-batch runs.

    If the task reports the best epoch, the weights of that epoch are measured; "step" is that of the last checkpoint.
    Runs of one task are measured on the same samples. Text is cut into as many parallel streams as the smallest batch
    size among the runs. Runs that were trained on different parts of the data raise UsageError. BatchNorm makes the
    loss depend on how many samples it normalises together, so all runs are measured with the same number, `bn_group`;
    the default is the smallest of the runs' own. The other arguments are those of `along`.
    """
    where = probe_device(device)
    loaded = [(Path(folder), *load_model_and_config(Path(folder), where, data_dir, partial=True)) for folder in folders]
    if not loaded:
        raise UsageError("there are no runs to measure")
    if len(parts := sorted({config.part for _, _, config in loaded})) > 1:
        raise UsageError(
            f"these runs were trained on different parts of the data ({' and '.join(parts)}), so they "
            "cannot be measured on the same samples; measure the runs of each part by themselves"
        )
    streams = min(config.batch for _, _, config in loaded)
    plans = [BatchPlan.of(c.batch, c.workers, c.micro, c.bn_group) for _, _, c in loaded]
    group = min(plan.bn_group for plan in plans) if bn_group is None else bn_group
    if group < 1:
        raise UsageError(f"bn_group must be at least 1, got {group}")
    runs: list[Record] = []
    for folder, model, config in loaded:
        task = config.build_task(data_dir)
        training = in_streams(samples_of(task, config)[0], streams)
        sample = Sample(task, model, training, group, samples, iterations, say)
        if not runs:
            say(cost_text(sample, len(loaded)))
        record, state = RunFolder(folder).read(), checkpoint.load(folder)
        assert state is not None
        try:
            point = sample.measure(model)
        except NotFinite as error:
            raise NotFinite(f"{folder}: {error}") from None
        say(f"{folder}: {in_words(point)}")
        found = {
            "folder": str(folder),
            "label": record.get("label", config.label),
            "status": record["status"],
            "config": config.as_dict(),
            "result": record.get("result", {}),
            **_about(sample),
            "step": state["run"]["step"],
            **point,
        }
        runs.append(found)
    return {"format": 1, "kind": "runs", "runs": runs, **provenance(where)}


def cost_text(sample: Sample, points: int) -> str:
    """Return how many gradients the measurements at this many points need, as text."""
    cost, groups = sample.samples * sample.evaluations, f"{len(sample.sizes)} groups of {sample.group}"
    return (
        f"{points} point{'s' * (points > 1)}, each at most the work of {cost:,} gradients of single samples: "
        f"{sample.samples} samples in {groups}, {sample.evaluations} times"
    )


def in_words(point: Point) -> str:
    """Return the main measurements of a point, as text."""
    return (
        f"loss {point['loss']:.4g}, |g| {point['gradient_norm']:.3g}, "
        f"|H| {'' if point['settled'] else '>'}{point['hessian_norm']:.3g}, sigma {point['sigma']:.3g}"
    )


def _about(sample: Sample) -> Record:
    return {
        "parameters": sum(p.numel() for p in sample.twin.parameters()),
        "blocks": sample.names,
        "samples": sample.samples,
        "groups": len(sample.sizes),
        "group": sample.group,
        "batchnorm": sample.normalises,
    }


def probe_device(device: str | None) -> torch.device:
    """Return the device of a probe, and set torch's numerical options for it; raise UsageError under torchrun."""
    if ranks() != 1:
        raise UsageError("a probe is made by one process; start it without torchrun")
    where = choose_device(device)
    set_numerics(where)
    return where


class Norms:
    """Recorder of loss, learning rate and the gradient norm of each tensor at every step.

    The recorded values stay on the device until `read` is called.
    """

    def __init__(self, model: nn.Module, scale: float) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.scale = scale
        self.used: set[int] = set()  # indices of the parameters that have had a gradient
        self.rows: list[Tensor] = []  # a norm for each parameter, 0 without a gradient
        self.losses: list[Tensor] = []
        self.rates: list[float] = []

    def take(self, loss: Tensor, lr: float) -> None:
        """Record loss, learning rate and norms after a step. Without ``p.grad``, as after EXTRAP-SGD, a norm is 0."""
        self.losses.append(loss.detach().double().clone())
        self.rates.append(lr)
        norms = [self.losses[-1].new_zeros(())] * len(self.params)
        for i, p in enumerate(self.params):
            if p.grad is not None:
                self.used.add(i)
                norms[i] = norm(p.grad) / self.scale
        self.rows.append(torch.stack(norms))

    def read(self, names: list[str]) -> tuple[list[str], list[Record]]:
        """Return the names of the tensors that have had a gradient, and one record per step.

        A record has step, lr, loss, rho, cos, and block_norms in the order of the returned names.
        """
        used, each = sorted(self.used), []
        losses, rows = torch.stack(self.losses).tolist(), torch.stack(self.rows)[:, used].tolist()
        for step, (lr, loss, row) in enumerate(zip(self.rates, losses, rows, strict=True)):
            own = of_norms(row)
            each.append({"step": step, "lr": lr, "loss": loss, "rho": own.rho, "cos": own.cos, "block_norms": row})
        return [names[i] for i in used], each


def training(config: RunConfig, setup: Setup, device: torch.device, recorded: Norms) -> Generator[None, None, None]:
    """Train a run step by step: record each step in `recorded`, then yield."""
    task, scores = setup.task, list[float]()
    held_out = {name: to_device_if_fits(samples, device) for name, samples in setup.held_out.items()}
    for epoch in range(config.epochs):
        order = order_of(setup.training, config.seed, rng.ORDER, epoch)
        for taken, (loss, lr) in enumerate(steps_of_epoch(config, setup, order, epoch, 0, scores), start=1):
            recorded.take(loss, lr)
            if taken == setup.per_epoch and setup.schedule.needs_history:
                found = evaluate(task, setup.model, held_out, config)
                scores = [*scores, found[f"validation_{task.metric}"]]
            yield
