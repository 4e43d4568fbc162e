"""The command `sngm advise`: suggest a batch size and a learning rate, from a pilot run or from given numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..options import BudgetOptions, Execution, as_dict
from ..parsing import parse_settings, split_list
from .options import DATA, DEVICE, JSON

EXAMPLES = (
    "sngm advise digits --from-sgd lr=0.03,batch=32 --to-batch 512",
    "sngm advise cifar10-resnet20 --from-sgd lr=0.1,batch=128,weight_decay=1e-4 --to-batch 8192",
    "sngm advise digits --gradients 20000",
    "sngm advise runs/probe-digits-1a2b3c4d --gradients 1e6",
    "sngm advise --gradients 8e6 --gap 2.3 --L 20 --sigma 15",
)


def advise(
    what: Annotated[
        str | None, typer.Argument(help="A task (name or file.py:Class), or a folder written by sngm probe.")
    ] = None,
    *,
    from_sgd: Annotated[
        str | None,
        typer.Option("--from-sgd", help="Your SGD recipe: lr=..,batch=.. and weight_decay, momentum, epochs."),
    ] = None,
    to_batch: Annotated[int | None, typer.Option("--to-batch", help="Target batch size for SNGM.")] = None,
    budget: BudgetOptions,
    pilot_steps: Annotated[
        int | None, typer.Option("--pilot-steps", help="End the pilot run after this many steps.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, a setting of the task; repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output folder. Default: runs/advise-TASK-GOAL-HASH.")
    ] = None,
    data_dir: DATA = None,
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Suggest a batch size and a learning rate. With --from-sgd and --to-batch, convert an SGD recipe to SNGM at a
    larger batch; with --gradients, compute how large a batch each method's bound allows. Every number is marked as
    given, measured, theory or rule of thumb.
    """
    from .. import measure, tasks
    from ..advice.page import plain, write
    from ..files import check_folder, finite, short_hash

    recipe = None if from_sgd is None else parse_settings(split_list(from_sgd))
    chosen = parse_settings(settings or [])
    measure.check_advice(what, recipe, to_batch, budget, pilot_steps, chosen)
    name = (what or "numbers").rstrip("/").rpartition("/")[2].replace(":", "-")
    goal = f"b{to_batch}" if budget.gradients is None else f"{budget.gradients:g}"
    where = what and (str(Path(what).resolve()) if Path(what).is_dir() else tasks.canonical(what))
    key = short_hash([where, to_batch, as_dict(budget), from_sgd, pilot_steps, chosen])
    folder = out or Path("runs") / f"advise-{name}-{goal}-{key}"
    check_folder(folder, "advice.json")
    execution = Execution(device=device, data_dir=data_dir)
    advice = measure.advice_for(what, recipe, to_batch, budget, pilot_steps, chosen, execution, progress=True)
    page = write(folder, dict(advice))
    print(json.dumps({**finite(plain(dict(advice))), "report": str(page)}, indent=2) if as_json else advice)
    if not as_json:
        print(f"\nReport: {page}")
