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
    "sngm advise digits --from-sgd lr=0.03,batch=32",
    "sngm advise digits --from-sgd lr=0.03,batch=32 --to-batch 512 --verify",
    "sngm advise digits --from-adamw lr=0.003,batch=32,weight_decay=0.01 --to-batch 128",
    "sngm advise digits --from-spectral lr=0.02,batch=32,weight_decay=0.5 --to-batch 512",
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
    from_adamw: Annotated[
        str | None, typer.Option("--from-adamw", help="Your AdamW recipe: lr=..,batch=.. and weight_decay, epochs.")
    ] = None,
    from_spectral: Annotated[
        str | None,
        typer.Option(
            "--from-spectral", help="Your recipe of spectral SNGM: lr=..,batch=.. and weight_decay, momentum, epochs."
        ),
    ] = None,
    to_batch: Annotated[
        int | None, typer.Option("--to-batch", help="Target batch size. Default: twice the recipe's.")
    ] = None,
    last_batch: Annotated[
        str | None,
        typer.Option(
            "--last-batch", help="What an epoch of the larger batch does with its last samples: drop (default) or keep."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", metavar="", help="Train the recipe, the advice and, from SGD, SGD scaled linearly; compare."
        ),
    ] = False,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Seeds of each run of --verify. Default: 3.")] = None,
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
    """Say whether your batch can grow, and what to change. With a recipe (--from-sgd, --from-adamw, --from-spectral),
    measure the gradient noise and norms in a short run of it, and convert it to a larger batch. With --gradients,
    compute how large a batch each method's error bound allows. Every number is marked as given, measured, theory or
    rule of thumb.
    """
    from .. import advising, tasks
    from ..advice.page import plain
    from ..files import finite, short_hash

    given = {"msgd": from_sgd, "adamw": from_adamw, "spectral-sngm": from_spectral}
    recipes = {method: None if text is None else parse_settings(split_list(text)) for method, text in given.items()}
    chosen = parse_settings(settings or [])
    asked = advising.Asked(what, recipes, to_batch, budget, pilot_steps, chosen, verify, seeds, last_batch)
    advising.check_advice(asked)
    name = (what or "numbers").rstrip("/").rpartition("/")[2].replace(":", "-")
    goal = f"b{to_batch or 'double'}" if budget.gradients is None else f"{budget.gradients:g}"
    where = what and (str(Path(what).resolve()) if Path(what).is_dir() else tasks.canonical(what))
    key = short_hash([where, to_batch, as_dict(budget), given, pilot_steps, chosen, last_batch])
    folder = out or Path("runs") / f"advise-{name}-{goal}-{key}"
    execution = Execution(device=device, data_dir=data_dir)
    show = (lambda advice: None) if as_json else (lambda advice: print(f"{advice}\n"))
    advice = advising.advise_into(folder, asked, execution, progress=True, show=show)
    page = folder / "report.html"
    if as_json:
        print(json.dumps({**finite(plain(dict(advice))), "report": str(page)}, indent=2))
    else:
        print(f"Verified: {advice['verified']}" if verify else advice)
        print(f"\nReport: {page}")
