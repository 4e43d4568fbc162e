"""The verb `sngm probe`: sigma, L, lambda, rho and cos of a task along a short run, or where runs have come to."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from ..parsing import numbers, parse_call, parse_settings
from .exit_codes import DIVERGED
from .options import DATA, DEVICE, JSON

EXAMPLES = (
    "sngm probe digits",
    "sngm probe digits --method sngm --lr 0.1 --batch 512 --bn-group 32 --epochs 5 --points 6",
    "sngm probe my_task.py:MyTask --method msgd --lr 0.1 --samples 2048 --out probes/mine",
    "sngm probe runs/small-batch runs/large-batch --out probes/sharpness",
)


def probe(
    what: Annotated[list[str], typer.Argument(help="A task, by name or as file.py:Class; or the folders of runs.")],
    method: Annotated[str | None, typer.Option(help="Of the pilot run. Default: msgd.")] = None,
    lr: Annotated[float | None, typer.Option(help="Its rate. Default: the middle of the task's grid.")] = None,
    batch: Annotated[int | None, typer.Option(help="Its global batch. Default: the task's smallest.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Its passes over the training set. Default: 1.")] = None,
    steps: Annotated[int | None, typer.Option(help="End it after so many steps, if it has more.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of its weights, sample order and so on. Default: 0.")] = None,
    workers: Annotated[int | None, typer.Option(help="Its data-parallel workers. Default: the task's.")] = None,
    micro: Annotated[int | None, typer.Option(help="Its samples of a micro-batch. Default: the task's.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of its rate. Default: the task's.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of its steps; probes are float64. Default: the task's on a GPU, or float32.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value: a setting of its method or the task.")
    ] = None,
    points: Annotated[
        int | None, typer.Option(help="Where to measure: start, end, and steps between. Default: 5.")
    ] = None,
    lambdas: Annotated[
        str | None, typer.Option(help="Of the frontier L(lambda), by commas. Default: 0,0.1,1,10,100.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Training samples that a point looks at.")] = 256,
    iterations: Annotated[int, typer.Option(help="The most Hessian-vector products of a point.")] = 20,
    bn_group: Annotated[
        int | None,
        typer.Option(
            "--bn-group", help="Samples BatchNorm normalises together. Default: the run's; of runs, the least."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the record. Default: runs/ and a name, for a task.")
    ] = None,
    data_dir: DATA = None,
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Measure what the theory speaks of: sigma and the gradient noise scale, L, the frontier of relaxed smoothness,
    rho and cos of the blocks. Of a task, along a short pilot run; of runs, at their last checkpoints, to compare how
    sharp the minima are. What it will cost is said before it begins.
    """
    own = {
        "--method": method, "--lr": lr, "--batch": batch, "--epochs": epochs, "--steps": steps, "--seed": seed,
        "--workers": workers, "--micro": micro, "--schedule": schedule, "--precision": precision, "--set": settings,
        "--points": points, "--lambdas": lambdas,
    }  # fmt: skip
    how: dict[str, Any] = {"samples": samples, "iterations": iterations, "device": device, "data_dir": data_dir}
    if _are_runs(what):
        if given := [option for option, value in own.items() if value not in (None, [])]:
            raise UsageError(f"{', '.join(given)}: of a task's pilot; a run has been made already")
        from ..probes import of_runs

        folder = out
        _check_out(folder)
        found = of_runs(what, bn_group=bn_group, say=say_over_steps, **how)
        text = _table(found["runs"], RUNS)
    else:
        from .. import tasks
        from ..files import short_hash
        from ..probes import along
        from ..probes.pilot import LAMBDAS
        from ..study.grid import split_settings
        from ..training import resolve
        from ..training.distributed import choose_device

        (task,) = what
        name, with_it = parse_call(method or "msgd")
        of_method, of_task = split_settings(task, [method or "msgd"], parse_settings(settings or []))
        place = choose_device(device)
        config = resolve(
            task, name, lr=tasks.middle_rate(task, name) if lr is None else lr, batch=batch, seed=seed or 0,
            epochs=1 if epochs is None else epochs, workers=workers, micro=micro, bn_group=bn_group, schedule=schedule,
            precision=precision, method_settings={**of_method, **with_it}, task_settings=of_task, device=place,
        )  # fmt: skip
        # zero is one too: plain smoothness
        how["lambdas"] = LAMBDAS if lambdas is None else numbers("--lambdas", lambdas, zero=True)
        how["points"] = 5 if points is None else points
        key = short_hash([config.hash, steps, how["points"], how["lambdas"], samples, iterations])
        folder = out or Path("runs") / f"probe-{config.task.rpartition('/')[2].replace(':', '-')}-{key}"
        _check_out(folder)
        found = along(config, steps=steps, say=say_over_steps, progress=_steps(), **how)
        text = _table([{"samples": found["samples"], **point} for point in found["points"]], POINTS)
        text += _pilot_in_words(found)
    if folder is not None:
        _write(folder, found)
    found.pop("steps", None)
    if as_json:
        from ..files import finite

        print(json.dumps({**finite(found), "folder": None if folder is None else str(folder)}, indent=2))
    else:
        print(text + (f"\nRecord: {folder / 'probe.json'}" if folder is not None else ""))
    if found.get("status") == "diverged":
        sys.exit(DIVERGED)


def _are_runs(what: list[str]) -> bool:
    """Whether folders are named, and not a task; something that is neither is refused."""
    from .. import tasks

    if len(what) == 1 and (what[0] in tasks.names() or (":" in what[0] and not Path(what[0]).is_dir())):
        return False
    for word in what:
        if Path(word).is_dir():
            continue
        if len(what) > 1 or "/" in word:
            raise UsageError(f"{word} is no folder of a run" + ("; only one task at a time" if len(what) > 1 else ""))
        tasks.find(word)  # which knows how to say what there is
    return True


def say_over_steps(text: str) -> None:
    """A line, in place of that which counts steps."""
    from .console import note

    note(f"\r\033[K{text}" if sys.stderr.isatty() else text)


def _steps() -> Callable[..., None]:
    """How far training is. Not when it will end, since points take longer than steps."""
    terminal, last = sys.stderr.isatty(), [time.monotonic()]

    def show(step: int, steps: int, _: Any) -> None:
        if time.monotonic() - last[0] < (0.2 if terminal else 10.0):
            return
        last[0] = time.monotonic()
        start, end = ("\r\033[K", "") if terminal else ("", "\n")
        print(f"{start}step {step} of {steps}", end=end, file=sys.stderr, flush=True)

    return show


def _check_out(folder: Path | None) -> None:
    from ..files import check_folder

    if folder is not None:
        check_folder(folder, "probe.json")


def _write(folder: Path, found: dict[str, Any]) -> None:
    """probe.json; of a pilot, also a line a step in steps.jsonl."""
    from ..files import finite, results_in, write_atomically, write_json

    with results_in(folder):
        if "steps" in found:
            lines = [json.dumps(finite(step), allow_nan=False) + "\n" for step in found["steps"]]
            write_atomically(folder / "steps.jsonl", "".join(lines).encode())
        write_json(folder / "probe.json", {key: value for key, value in found.items() if key != "steps"})


def _interval(point: dict[str, Any]) -> str:
    low, high = point["sigma_interval"]
    return f"{point['sigma']:.3g}" + (f" ({low:.3g} to {high:.3g})" if low == low else "")


def _relative(point: dict[str, Any]) -> str:
    return f"{point['hessian_norm'] * point['weight_norm'] ** 2:.3g}"


def _noise_scale(point: dict[str, Any]) -> str:
    """With no more digits than it has: none beyond its order where it is above the number of samples."""
    digits = 1 if _rough(point) else 2
    return "~" * _rough(point) + f"{float(format(point['noise_scale'], f'.{digits}g')):g}"


def _rough(point: dict[str, Any]) -> bool:
    return bool(point["samples"] < point["noise_scale"] < math.inf)


def _unsettled(point: dict[str, Any]) -> bool:
    return not point["settled"]


def _downwards(point: dict[str, Any]) -> bool:
    return bool(point["eigenvalue"] < 0)


NOTES: dict[str, Any] = {
    "> the iterations ended before it had settled: at least this; take more --iterations": _unsettled,
    "* the eigenvalue is negative: a direction in which the loss bends down": _downwards,
    "~ more noise than these samples can average away: good for its order at best; take more --samples": _rough,
}
SHARED = {
    "loss": lambda p: f"{p['loss']:.4g}",
    "|g|": lambda p: f"{p['gradient_norm']:.3g}",
    "|H|": lambda p: (">" * _unsettled(p)) + f"{p['hessian_norm']:.3g}" + "*" * _downwards(p),
    "sigma": _interval,
    "noise scale": _noise_scale,
    "rho": lambda p: f"{p['rho']:.3f}",
    "cos": lambda p: f"{p['cos']:.3f}",
}
POINTS: dict[str, Any] = {"step": lambda p: str(p["step"]), **SHARED}
RUNS: dict[str, Any] = {
    "run": lambda p: p["folder"],
    "method": lambda p: p["label"],
    "batch": lambda p: str(p["config"]["batch"]),
    "step": lambda p: str(p["step"]),
    **SHARED,
    "|H| |w|^2": _relative,
}


def _table(rows: list[dict[str, Any]], columns: dict[str, Any]) -> str:
    cells = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    notes = [text for text, holds in NOTES.items() if any(map(holds, rows))]
    return "\n".join([*lines, *notes]) + "\n"


def _pilot_in_words(found: dict[str, Any]) -> str:
    frontier = ", ".join(f"{entry['L']:.4g} at lambda {entry['lambda']:g}" for entry in found["frontier"])
    over = f" over groups of {found['group']}, which BatchNorm normalises together" if found["batchnorm"] else ""
    lines = [f"{'L' if found['L_settled'] else 'L, not settled, at least'} {frontier}"]
    lines.append(f"sigma {found['sigma']:.4g}, at the high end of the intervals {found['sigma_high']:.4g}{over}")
    lines.append("both are the largest of the points visited; between and beyond them they may be larger")
    if found["rho"] is not None:
        count = len(found["step_blocks"])
        lines.append(f"rho(S) {found['rho']:.4g} for S = {count} tensors, the largest of all steps")
    if found["status"] == "diverged":
        lines.append("diverged: the loss is no number any more; try a smaller lr")
    return "\n" + "\n".join(lines) + "\n"
