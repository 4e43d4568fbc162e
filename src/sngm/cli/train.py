"""The command `sngm train`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..environment import is_first
from ..options import Execution, RecipeOptions, RunOptions, as_dict
from ..parsing import parse_settings
from .exit_codes import DIVERGED
from .options import DRY, JSON, SET, TASK, TRACK

EXAMPLES = (
    "sngm train digits --method sngm --lr 0.1 --batch 512",
    "sngm train digits --method lars --lr 30 --batch 512 --workers 8 --set trust_coefficient=0.002",
    "sngm train cifar10-resnet20 --method sngm --lr 0.8 --batch 8192 --data-dir ~/datasets",
    "sngm train my_task.py:MyTask --method msgd --lr 0.1 --dry-run",
)


def train(
    task: TASK,
    *,
    method: Annotated[str, typer.Option(help="A method by name (sngm methods), or package.module:Class.")] = "sngm",
    run: RunOptions,
    recipe: RecipeOptions,
    settings: SET = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output folder. Default: runs/TASK-METHOD-HASH.")
    ] = None,
    execution: Execution,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints. Default: about one checkpoint a minute.")
    ] = None,
    track: TRACK = None,
    restart: Annotated[
        bool, typer.Option("--restart", metavar="", help="Delete this run's files in --out and train from the start.")
    ] = False,
    as_json: JSON = False,
    dry_run: DRY = False,
) -> None:
    """Train a model once. Run the same command again to resume a stopped run; a finished run is not repeated."""
    from .. import api
    from ..training import Options
    from .plans import outcome, show_plan, warn_of_slow

    chosen = parse_settings(settings or [])
    config = api.plan_run(task, method, chosen, run, recipe, execution.device)
    folder = out or api.default_folder(config)
    options = Options(**as_dict(execution), restart=restart, checkpoint_every=checkpoint_every, track=track)
    warn_of_slow(execution, recipe.precision)
    if dry_run:
        show_plan(config, folder, options, as_json)
        return
    made = api.run_config(config, folder, options, progress=True)
    if is_first():
        text = json.dumps({**made.record, "folder": str(folder)}, indent=2) if as_json else outcome(made.record, folder)
        print(text)
    if made.status == "diverged":
        sys.exit(DIVERGED)
