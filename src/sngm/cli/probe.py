"""The command `sngm probe`: measure gradient noise and curvature along a short run of a task, or of finished runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..options import Execution, ProbeOptions, RecipeOptions, RunOptions
from ..parsing import parse_settings
from .exit_codes import DIVERGED
from .options import JSON, SET

EXAMPLES = (
    "sngm probe digits",
    "sngm probe digits --method sngm --lr 0.1 --batch 512 --bn-group 32 --epochs 5 --points 6",
    "sngm probe my_task.py:MyTask --method msgd --lr 0.1 --samples 2048 --out probes/mine",
    "sngm probe runs/small-batch runs/large-batch --out probes/sharpness",
)


def probe(
    what: Annotated[list[str], typer.Argument(help="A task, by name or as file.py:Class; or the folders of runs.")],
    *,
    method: Annotated[str | None, typer.Option(help="Method of the pilot run. Default: msgd.")] = None,
    probe: ProbeOptions,
    run: RunOptions,
    recipe: RecipeOptions,
    settings: SET = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output folder. Default for a task: runs/probe-TASK-HASH.")
    ] = None,
    execution: Execution,
    as_json: JSON = False,
) -> None:
    """Measure gradient noise and curvature. For a task, measure along a short pilot run; for run folders, at their last
    checkpoints, to compare the sharpness of minima. Measures sigma and the gradient noise scale, the Hessian norm L,
    L(lambda) of relaxed smoothness, and rho and cos of the per-tensor gradient norms (see docs/probes.md). Prints the
    cost before it starts. With run folders, only --samples, --iterations, --bn-group, --data-dir, --device, --out and
    --json apply.
    """
    from .. import measure
    from ..files import check_folder, finite

    chosen = parse_settings(settings or [])
    if measure.are_runs(what):
        found = measure.probe_runs(what, method, probe, run, recipe, chosen, execution, progress=True)
        folder = out
    else:
        (task,) = what
        config = measure.plan_pilot(task, method or "msgd", chosen, run, recipe, execution.device)
        folder = out or measure.probe_folder(config, probe)
        check_folder(folder, "probe.json")
        found = measure.probe_task(config, probe, execution, progress=True)
    if folder is not None:
        measure.write_probe(folder, dict(found))
    if as_json:
        values = finite({key: value for key, value in found.items() if key != "steps"})
        print(json.dumps({**values, "folder": None if folder is None else str(folder)}, indent=2))
    else:
        print(str(found) + (f"\nRecord: {folder / 'probe.json'}" if folder is not None else ""))
    if found.get("status") == "diverged":
        sys.exit(DIVERGED)
