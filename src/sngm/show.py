"""What people see while runs go on, and before they do: progress, plans and outcomes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .study import Study
    from .study.launch import Progress
    from .train import Options, RunConfig


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


def duration(seconds: float) -> str:
    """For people.

    >>> duration(7), duration(200), duration(9000)
    ('7 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def note(text: str) -> None:
    """For people: on stderr, where it spoils no data."""
    print(text, file=sys.stderr, flush=True)


def outcome(record: dict[str, Any], folder: Path) -> str:
    """What a run came to, in a line."""
    if record["status"] == "diverged":
        step = record["diverged_at_step"]
        return f"diverged at step {step}: the loss is no number any more; try a smaller lr ({folder})"
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


def step_progress() -> Any:
    """A line that is overwritten on a terminal, one every ten seconds elsewhere; nothing on other ranks."""
    terminal = sys.stderr.isatty()
    last = [time.monotonic()]

    def show(step: int, steps: int, metrics: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - last[0] < (0.2 if terminal else 10.0) and not (terminal and step == steps):
            return
        last[0] = now
        scores = ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in metrics.items() if "_" in k and v is not None)
        text = f"step {step} of {steps}" + (f", epoch {metrics['epoch']}: {scores}" if metrics else "")
        if terminal:
            print(f"\r\033[K{text}", end="\n" if step == steps else "", file=sys.stderr, flush=True)
        else:
            note(text)

    return show if os.environ.get("RANK", "0") == "0" else lambda *_: None


def plan_of(config: RunConfig, options: Options) -> dict[str, Any]:
    """What a run would do. What could not be run is refused."""
    from .tasks import Moment
    from .train.processes import Processes, choose_device
    from .train.setup import prepare

    device = choose_device(options.device)
    setup = prepare(config, Processes(0, int(os.environ.get("WORLD_SIZE", "1")), device), options.data_dir)
    steps, per_epoch = setup.steps, setup.per_epoch
    points = [0, steps // 4, steps // 2, 3 * steps // 4, steps - 1]
    rates = {p: config.lr * setup.schedule(Moment(p, steps, p // per_epoch, config.epochs)) for p in points}
    return {
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "training_samples": len(setup.training),
        "batch_plan": setup.plan.describe(),
        "steps_per_epoch": per_epoch,
        "steps": steps,
        "lr_at_step": rates,
        "device": str(device),
    }


def show_plan(config: RunConfig, folder: Path, options: Options, as_json: bool) -> None:
    """Say what a run would do."""
    plan = plan_of(config, options)
    found = {"config": config.as_dict(), "hash": config.hash, **plan, "folder": str(folder)}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        if isinstance(value, dict):
            print(f"{key.replace('_', ' ')}:")
            for k, v in value.items():
                print(f"  {k}: {v:.6g}" if isinstance(v, float) else f"  {k}: {v}")
        else:
            print(f"{key.replace('_', ' ')}: {value}")


def show_study(study: Study, folder: Path, options: Options, as_json: bool) -> None:
    """Say what a study would do."""
    from .study.launch import check

    cells = study.cells()
    check(study, cells, options)
    runs = sum(study.seeds + (len(cell.grid) if len(cell.grid) > 1 else 0) for cell in cells)
    plans: list[dict[str, Any]] = []
    for cell in cells:
        config = cell.config(cell.grid[0], "full", 0)
        said = {"method": cell.label, "batch": cell.batch, "lrs": list(cell.grid), "first_config": config.as_dict()}
        plans.append({**said, **plan_of(config, options)})
    found = {"study": study.as_dict(), "cells": plans, "runs_at_least": runs, "folder": str(folder)}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{study.task}, {study.epochs} epochs, {study.seeds} seeds; at least {runs} runs into {folder}")
    for plan in plans:
        print(f"  {plan['method']} at batch {plan['batch']}: lr {', '.join(f'{lr:g}' for lr in plan['lrs'])}")
        rates = ", ".join(f"{rate / plan['lrs'][0]:.3g} at {step}" for step, rate in plan["lr_at_step"].items())
        print(f"    {plan['steps']} steps of {plan['batch_plan']}; {plan['parameters']} parameters")
        print(f"    of lr, by step: {rates}")
