"""What people see while runs go on, and before they do: progress, plans and outcomes."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..durations import duration
from ..environment import is_first, ranks

if TYPE_CHECKING:
    import torch

    from ..study import Study
    from ..study.grid import Cell
    from ..study.launch import Progress
    from ..tasks import Splits
    from ..training import Options, RunConfig
    from ..training.build import Setup

LONG = 600.0  # seconds; a run that takes more says so at its start


@contextlib.contextmanager
def study_progress(study: Study) -> Iterator[Callable[[Progress], None]]:
    """Something to call with the progress so far, as often as one likes."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=5, transient=True) as live:
        yield lambda progress: live.update(_table(progress))


def _lines() -> Callable[[Progress], None]:
    seen = [0]

    def show(progress: Progress) -> None:
        for config, record in progress.done[seen[0] :]:
            seen[0] += 1
            left = progress.seconds_left
            result = next((f"{k.replace('_', ' ')} {v:.4f}" for k, v in _scores(record)), record["status"])
            where = f"{config.label} batch {config.batch} lr {config.lr:g} seed {config.seed}"
            eta = f", {duration(left)} left" if left is not None else ""
            print(f"[{seen[0]}/{progress.planned}] {where}: {result}{eta}", file=sys.stderr, flush=True)

    return show


def _scores(record: dict[str, Any]) -> list[tuple[str, float]]:
    named = [(k, v) for k, v in record["result"].items() if v is not None and not k.endswith("loss")]
    return named or [(k, v) for k, v in record["result"].items() if v is not None]


def _table(progress: Progress) -> Any:
    from rich.table import Table

    left = progress.seconds_left
    eta = f", {duration(left)} left" if left is not None else ""
    table = Table(title=f"{len(progress.done)} of {progress.planned} runs{eta}", title_justify="left")
    for column in ("method", "batch", "rates tried", "chosen lr", "tested seeds", "so far"):
        table.add_column(column)
    for cell in progress.cells:
        tested = [r for c, r in progress.done if c.part == "full" and c.batch == cell.batch and c.label == cell.label]
        values = [_scores(r)[0][1] for r in tested if _scores(r)]
        running = any(c.batch == cell.batch and c.label == cell.label for c in progress.running.values())
        table.add_row(
            cell.label,
            str(cell.batch),
            f"{len(cell.scores)}",
            "" if cell.lr is None else f"{cell.lr:g}",
            f"{len(tested)} of {cell.study.seeds}",
            f"{sum(values) / len(values):.4f}" if values else ("running" if running else ""),
        )
    return table


def note(text: str) -> None:
    """For people: on stderr, where it spoils no data."""
    print(text, file=sys.stderr, flush=True)


def warn_of_slow(device: torch.device, precision: str | None, step: str) -> None:
    """Say so where what was asked for is made for GPUs."""
    asked = {"--precision bfloat16": precision == "bfloat16", "--step compiled": step == "compiled"}
    slow = [option for option, there in asked.items() if there]
    if slow and device.type == "cpu" and is_first():
        note(f"sngm: {' and '.join(slow)}: made for GPUs; on most CPUs this is slower than the default, often by far")


def outcome(record: dict[str, Any], folder: Path) -> str:
    """What a run came to, in a line."""
    if record["status"] == "diverged":
        step = record["diverged_at_step"]
        from ..training.loop import CHECK_EVERY

        why = "the loss is no number any more; try a smaller lr"
        if step <= CHECK_EVERY:
            why += ", and if that does not help, look for numbers in the data that are none"
        return f"diverged, seen at step {step}: {why} ({folder})"
    result, batch = record["result"], record["config"]["batch"]
    scores = ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in result.items() if value is not None)
    return f"{record['label']} at batch {batch}: {scores} ({record['timing']['seconds']:.1f} s, {folder})"


def stop_on_signal() -> Any:
    """Ask a run to stop on the first Ctrl-C or SIGTERM; a second of the same kind ends the process at once.

    torchrun passes a Ctrl-C on and sends SIGTERM right after it: that is one request, not two.
    """
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        if number in asked:
            os._exit(130)
        asked.append(number)
        if len(asked) > 1:
            return
        note("stopping at the next step; once more to end at once")

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    return lambda: bool(asked)


def interrupt_on_signal() -> None:
    """End a study on the first Ctrl-C or SIGTERM, as batch systems send it; the second ends the process at once."""
    asked: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        if asked:
            os._exit(130)
        asked.append(number)
        note("stopping at the next step of each run; once more to end at once")
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


class Pace:
    """How long the rest of a run will take, at the pace of its last two minutes or so."""

    WARM_UP = 3  # steps that also compile and record, and so say nothing

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.first: int | None = None
        self.marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=240)

    def left(self, step: int, steps: int) -> float | None:
        """Seconds, once there is something to go by. To be called after every step."""
        now = self.clock()
        if self.first is None:
            self.first = step - 1
        if step - self.first < self.WARM_UP:
            slow = now - self.began > 10.0  # better a rough word than none
            return (now - self.began) / (step - self.first) * (steps - step) if slow else None
        if not self.marks or now - self.marks[-1][0] >= 0.5:
            self.marks.append((now, step))
        then, earlier = self.marks[0]
        return (now - then) / (step - earlier) * (steps - step) if step - earlier >= 2 else None


def step_progress(on_cpu: bool = False, clock: Callable[[], float] = time.monotonic) -> Any:
    """A line that is overwritten on a terminal, one every ten seconds elsewhere; nothing on other ranks.

    A run that will take long on a CPU says so as soon as that is known.
    """
    terminal = sys.stderr.isatty()
    last = [clock()]
    pace = Pace(clock)
    told = [not on_cpu]

    def show(step: int, steps: int, metrics: dict[str, Any]) -> None:
        now, left = clock(), pace.left(step, steps)
        if left is not None and not told[0]:
            told[0] = True
            if left > LONG:
                note(f"about {duration(left)} on this CPU, at the pace of the first steps; Ctrl-C loses nothing")
        if now - last[0] < (0.2 if terminal else 10.0) and not (terminal and step == steps):
            return
        last[0] = now
        scores = ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in metrics.items() if "_" in k and v is not None)
        text = f"step {step} of {steps}" + (f", {duration(left)} left" if left is not None and step < steps else "")
        text += f", epoch {metrics['epoch']}: {scores}" if metrics else ""
        if terminal:
            print(f"\r\033[K{text}", end="\n" if step == steps else "", file=sys.stderr, flush=True)
        else:
            note(text)

    return show if is_first() else lambda *_: None


def plan_of(
    config: RunConfig, options: Options, *, measured: bool = False, splits: Splits | None = None
) -> dict[str, Any]:
    """What a run would do, and with `measured` what time and memory it would take. What could not be run is refused."""
    from torch.nn.modules.batchnorm import _BatchNorm

    from ..study.launch import how
    from ..tasks import Moment
    from ..training.build import prepare
    from ..training.distributed import Processes, choose_device

    device = choose_device(options.device)
    alone = Processes(0, ranks(), device)
    setup = prepare(config, alone, options.data_dir, splits=splits, **how(options))
    plan, steps, per_epoch = setup.plan, setup.steps, setup.per_epoch
    points = [0, steps // 4, steps // 2, 3 * steps // 4, steps - 1]
    rates = {p: config.lr * setup.schedule(Moment(p, steps, p // per_epoch, config.epochs)) for p in points}
    decayed = [p for group in setup.optimizer.param_groups if group.get("weight_decay") for p in group["params"]]
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
        "precision": config.precision,
        "step": setup.stepper.mode,
        "steps_per_epoch": per_epoch,
        "steps": steps,
        "lr_at_step": rates,
        "device": str(device),
    }  # fmt: skip
    return found | (_measured(config, setup, device, options) if measured else {})


def _measured(config: RunConfig, setup: Setup, device: torch.device, options: Options) -> dict[str, Any]:
    """Time and memory, or why they are not known. A plan is of use without them."""
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
    """Say what a run would do."""
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
    """Bytes, for people.

    >>> size(512), size(40_000), size(3_210_000_000)
    ('0.001 MB', '0.04 MB', '3.21 GB')
    """
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{max(count, 1000) / 1e6:.3g} MB"


def show_study(study: Study, folder: Path, options: Options, as_json: bool, jobs: int | None = None) -> None:
    """Say what a study would do."""
    from ..study.launch import check, load_data

    cells = study.cells()
    splits = load_data(study, options)
    check(study, cells, options, splits)
    plans: list[dict[str, Any]] = []
    for cell in cells:
        config = cell.config(cell.grid[0], "full", 0)
        said = {"method": cell.label, "batch": cell.batch, "lrs": list(cell.grid), "first_config": config.as_dict()}
        plans.append({**said, **plan_of(config, options, splits=splits)})
    runs = sum(map(_runs, cells))
    time = _study_time(study, cells, options, splits, jobs)
    found = {"study": study.as_dict(), "cells": plans, "runs_at_least": runs, **time, "folder": str(folder)}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{study.task}, {study.epochs} epochs, {study.seeds} seeds; at least {runs} runs into {folder}")
    for plan in plans:
        print(f"  {plan['method']} at batch {plan['batch']}: lr {', '.join(f'{lr:g}' for lr in plan['lrs'])}")
        rates = ", ".join(f"{rate / plan['lrs'][0]:.3g} at {step}" for step, rate in plan["lr_at_step"].items())
        print(f"    {plan['steps']} steps of {plan['batch_plan']}; {plan['parameters']} parameters")
        print(f"    of lr, by step: {rates}")
    print(f"time: {_study_time_in_words(found)}")


def _runs(cell: Cell) -> int:
    """That it takes at least: a seed each, and a rate each where there is something to choose."""
    return cell.study.seeds + (len(cell.grid) if len(cell.grid) > 1 else 0)


def _study_time(
    study: Study, cells: list[Cell], options: Options, splits: Splits, jobs: int | None
) -> dict[str, dict[str, Any] | str]:
    """Seconds of training, or why they are not known: as for one run, measured at each batch with the first method.

    Every method at every batch would take too long. Runs on a GPU are counted one after another, whatever shares it.
    """
    from ..study.launch import default_jobs, one_thread
    from ..training.distributed import choose_device, cores

    device = choose_device(options.device)
    one: dict[int, float] = {}  # seconds of a run, by batch
    for cell in cells[: len(study.batches)]:  # those of the first method
        with one_thread():
            plan = plan_of(cell.config(cell.grid[0], "full", 0), options, measured=True, splits=splits)
        if "not_measured" in plan:
            return {"not_measured": plan["not_measured"]}
        one[cell.batch] = plan["time"]["seconds"]
    at_once = 1 if device.type == "cuda" else min(jobs or default_jobs(study.batches, device), cores())
    seconds = sum(_runs(cell) * one[cell.batch] for cell in cells) / at_once
    return {"time": {"seconds": seconds, "runs_at_once": at_once, "method": cells[0].label, "seconds_of_a_run": one}}


def _study_time_in_words(found: dict[str, Any]) -> str:
    if "not_measured" in found:
        return f"not measured, {found['not_measured']}"
    time, device = found["time"], found["cells"][0]["device"]
    pace = f"{time['runs_at_once']} runs at a time" if time["runs_at_once"] > 1 else "one run after another"
    pace += "" if device == "cpu" else ", in eager steps: captured and compiled ones are faster"
    return (
        f"about {duration(time['seconds'])} of training on this machine ({device}), {pace}; from one pass of "
        f"{time['method']} at each batch; tests, and rates beyond the grid, come on top"
    )
