"""Print the plans of runs and studies (``--dry-run``), and format the line that reports the outcome of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environment import is_first, ranks
from ..progress import duration, in_words, note

if TYPE_CHECKING:
    import torch

    from ..options import Cluster, Execution
    from ..study import StudyConfig
    from ..study.grid import Cell
    from ..tasks import Splits
    from ..training import Options, RunConfig
    from ..training.build import Setup


def warn_of_slow(execution: Execution, precision: str | None) -> None:
    """Warn if options made for GPUs are used on a CPU."""
    from ..training.distributed import choose_device

    asked = {"--precision bfloat16": precision == "bfloat16", "--step compiled": execution.step == "compiled"}
    slow = [option for option, there in asked.items() if there]
    if slow and choose_device(execution.device).type == "cpu" and is_first():
        note(f"sngm: {' and '.join(slow)}: made for GPUs; on most CPUs this is slower than the default, often by far")


def outcome(record: dict[str, Any], folder: Path) -> str:
    """Return the outcome of a run as one line of text."""
    if record["status"] == "diverged":
        why = record.get("error", "the loss is NaN or infinite")  # older records have no "error"
        return f"diverged, seen at step {record['diverged_at_step']}: {why} ({folder})"
    seconds, batch = record["timing"]["seconds"], record["config"]["batch"]
    return f"{record['label']} at batch {batch}: {in_words(record['result'])} ({seconds:.1f} s, {folder})"


def plan_of(
    config: RunConfig, options: Options, *, measured: bool = False, splits: Splits | None = None
) -> dict[str, Any]:
    """Return what a run would do and, if `measured`, its time and memory. Raise an error if the run is impossible."""
    from torch.nn.modules.batchnorm import _BatchNorm

    from ..tasks import Moment
    from ..training.build import for_embeddings, prepare
    from ..training.distributed import Processes, choose_device

    device = choose_device(options.device)
    alone = Processes(0, ranks(), device)
    setup = prepare(config, alone, options, splits)
    plan, steps, per_epoch = setup.plan, setup.steps, setup.per_epoch
    points = [0, steps // 4, steps // 2, 3 * steps // 4, steps - 1]
    rates = {p: config.lr * setup.schedule(Moment(p, steps, p // per_epoch, config.epochs)) for p in points}
    groups, special = setup.optimizer.param_groups, for_embeddings(config)
    decayed = [p for group in groups if group.get("weight_decay") for p in group["params"]]
    tables = [p for group in groups if special and special.items() <= group.items() for p in group["params"]]
    normalises = any(isinstance(module, _BatchNorm) for module in setup.model.modules())
    found = {
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "training_samples": len(setup.training),
        **setup.task.facts(),
        "batch_plan": plan.describe(normalises),
        "workers": plan.workers,
        "micro_batches": {"count": plan.batch // plan.micro, "of_each_worker": plan.share // plan.micro,
                          "samples": plan.micro},
        "bn_groups": {"count": plan.batch // plan.bn_group, "samples": plan.bn_group} if normalises else None,
        "weight_decay": {"on": config.decay_on, "parameters": sum(p.numel() for p in decayed),
                         "value": config.method_settings.get("weight_decay", 0.0)},
        **({"embeddings": {"parameters": sum(p.numel() for p in tables), **special}} if tables else {}),
        "precision": config.precision,
        "step": setup.stepper.mode,
        "steps_per_epoch": per_epoch,
        "steps": steps,
        "lr_at_step": rates,
        "device": str(device),
    }  # fmt: skip
    return found | (_measured(config, setup, device, options) if measured else {})


def _measured(config: RunConfig, setup: Setup, device: torch.device, options: Options) -> dict[str, Any]:
    """Return time and memory of a run. If measuring fails, return the reason: a plan is useful without them."""
    from ..training.cost import measure

    try:
        found = measure(config, setup, device, options.loaders)
    except Exception as error:
        return {"not_measured": f"{type(error).__name__}: {error}".splitlines()[0]}
    epoch = found.epoch_seconds(setup)
    return {
        "memory": {f"{name}_bytes": size for name, size in found.memory.items()} | {"pass_samples": found.largest},
        "time": {"seconds_per_epoch": epoch, "seconds": epoch * config.epochs, "from_samples": found.samples},
    }


def show_plan(config: RunConfig, folder: Path, options: Options, as_json: bool) -> None:
    """Print what a run would do."""
    plan = plan_of(config, options, measured=True)
    found = {"config": config.as_dict(), "hash": config.hash, **plan, "folder": str(folder)}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        if key in IN_WORDS:
            print(f"{key.replace('_', ' ')}: {IN_WORDS[key](value, found)}")
        elif isinstance(value, dict):
            print(f"{key.replace('_', ' ')}:")
            for k, v in value.items():
                print(f"  {k}: {v:.6g}" if isinstance(v, float) else f"  {k}: {v}")
        else:
            print(f"{key.replace('_', ' ')}: {value}")


def _micro_batches(value: dict[str, int], _: Any) -> str:
    return f"{value['count']} of {value['samples']}, {value['of_each_worker']} for each worker"


def _weight_decay(value: dict[str, Any], plan: dict[str, Any]) -> str:
    if not value["parameters"]:
        return "none"
    on = "weights; biases and normalisation layers have none" if value["on"] == "weights" else "all parameters"
    return f"{value['value']:g} on {value['parameters']} of {plan['parameters']} parameters: {on}"


def _memory(value: dict[str, int], _: Any) -> str:
    parts = {name: size(value[f"{name}_bytes"]) for name in ("parameters", "gradients", "optimizer", "activations")}
    parts |= {"samples": size(value["samples_bytes"])} if value["samples_bytes"] else {}
    listed = ", ".join(f"{name} {text}" for name, text in parts.items())
    return f"about {size(value['total_bytes'])}: {listed}; passes of {value['pass_samples']}"


def _time(value: dict[str, Any], plan: dict[str, Any]) -> str:
    each = f"{duration(value['seconds_per_epoch'])} an epoch"
    device = plan["device"]
    where = "" if device == "cpu" else ", in eager steps: captured and compiled ones are faster"
    return (
        f"about {duration(value['seconds'])} of training on this machine ({device}), {each}, "
        f"from one pass of {value['from_samples']} samples{where}"
    )


IN_WORDS: dict[str, Callable[[Any, dict[str, Any]], str]] = {
    "micro_batches": _micro_batches,
    "bn_groups": lambda value, _: f"{value['count']} of {value['samples']}" if value else "none, no BatchNorm",
    "weight_decay": _weight_decay,
    "memory": _memory,
    "time": _time,
}


def size(count: int) -> str:
    """Return a number of bytes as readable text.

    >>> size(512), size(40_000), size(3_210_000_000)
    ('0.001 MB', '0.04 MB', '3.21 GB')
    """
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{max(count, 1000) / 1e6:.3g} MB"


def show_study(
    study: StudyConfig, folder: Path, options: Options, as_json: bool, jobs: int | None, cluster: Cluster
) -> None:
    """Print what a study would do; for SLURM, also the job script.

    Time and memory are measured at each batch size with the first method only, because more would take too long.
    """
    from ..study.executors import check_usable
    from ..study.launch import check, load_data, one_thread
    from ..study.search import names_in

    check_usable(cluster.executor)
    options = cluster.here(options)
    script = _job_script(cluster, folder)
    cells = study.cells()
    splits = load_data(study, options)
    check(cells, options, splits)
    plans: list[dict[str, Any]] = []
    for i, cell in enumerate(cells):  # the first method's cells (one per batch) are first
        config = cell.config(cell.grid[0], "full", 0)
        said = {"method": cell.label, "batch": cell.batch, "lrs": list(cell.grid), "first_config": config.as_dict()}
        if study.search:
            said |= {"ranges": study.ranges(cell.method, cell.batch), "trials": list(cell.searched.values())}
        with one_thread():
            plans.append({**said, **plan_of(config, options, measured=i < len(study.batches), splits=splits)})
    runs = sum(cell.least_runs for cell in cells)
    time = _study_time(cells, plans[: len(study.batches)], options, jobs)
    found = {"study": asdict(study), "cells": plans, "runs_at_least": runs, **time, "folder": str(folder)}
    found |= {"sbatch": script} if script else {}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    least = "" if study.search else "at least "  # a grid of learning rates may grow
    print(f"{study.task}, {study.epochs} epochs, {study.seeds} seeds; {least}{runs} runs into {folder}")
    for plan in plans:
        if "ranges" in plan:
            ranges = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in plan["ranges"].items())
            missing = [name for name in names_in(study.search) if name not in plan["ranges"]]
            tried = f"{len(plan['trials'])} trials over {ranges}" + f" (it has no {', '.join(missing)})" * bool(missing)
        else:
            tried = f"lr {', '.join(f'{lr:g}' for lr in plan['lrs'])}"
        print(f"  {plan['method']} at batch {plan['batch']}: {tried}")
        print(f"    {_recipe(plan['first_config'], searched=study.search)}")
        rates = ", ".join(f"{rate / plan['lrs'][0]:.3g} at {step}" for step, rate in plan["lr_at_step"].items())
        print(f"    {plan['steps']} steps of {plan['batch_plan']}; {plan['parameters']} parameters")
        print(f"    share of lr at steps: {rates}")
    print(f"time: {_study_time_in_words(found)}")
    if script:
        print(f"sbatch script of each run:\n\n{script}")


def _job_script(cluster: Cluster, folder: Path) -> str:
    """Return the script with which runs are submitted to SLURM; empty for other executors."""
    if cluster.executor != "slurm":
        return ""
    from ..study.executors.on_slurm import job_script

    return job_script(cluster, folder.absolute())


def _recipe(config: dict[str, Any], searched: Collection[str]) -> str:
    """Return as text weight decay, momentum, schedule and warm-up of a config, except those that are searched."""
    settings = config["method_settings"]
    values = {
        "weight_decay": f"weight decay {settings['weight_decay']:g}" if "weight_decay" in settings else "",
        "momentum": f"momentum {settings['momentum']:g}" if "momentum" in settings else "",
        "schedule": f"schedule {config['schedule']}",
        "warmup": f"warm-up {config['warmup']:g} epochs",
    }
    return ", ".join(text for name, text in values.items() if text and name not in searched)


def _study_time(
    cells: list[Cell], measured: list[dict[str, Any]], options: Options, jobs: int | None
) -> dict[str, Any]:
    """Return the estimated seconds of training of a study, or the reason why they cannot be estimated.

    Runs on a GPU are counted one after another, even if they share the GPU.
    """
    from ..training.distributed import choose_device, cores

    failed = [plan["not_measured"] for plan in measured if "not_measured" in plan]
    if failed:
        return {"not_measured": failed[0]}
    one = {plan["batch"]: plan["time"]["seconds"] for plan in measured}
    at_once = 1 if choose_device(options.device).type == "cuda" else min(jobs or cores(), cores())
    seconds = sum(cell.least_runs * one[cell.batch] for cell in cells) / at_once
    return {"time": {"seconds": seconds, "runs_at_once": at_once, "method": cells[0].label, "seconds_of_a_run": one}}


def _study_time_in_words(found: dict[str, Any]) -> str:
    if "not_measured" in found:
        return f"not measured, {found['not_measured']}"
    time, device = found["time"], found["cells"][0]["device"]
    pace = f"{time['runs_at_once']} runs at a time" if time["runs_at_once"] > 1 else "one run after another"
    pace += "" if device == "cpu" else ", in eager steps: captured and compiled ones are faster"
    grid = "" if found["study"]["search"] else ", and rates beyond the grid,"
    return (
        f"about {duration(time['seconds'])} of training on this machine ({device}), {pace}; from one pass of "
        f"{time['method']} at each batch; tests{grid} come on top"
    )
