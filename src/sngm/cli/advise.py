"""The verb `sngm advise`: a batch size and a learning rate, from a pilot run or from numbers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from ..files import check_folder, finite, short_hash
from ..parsing import parse_settings
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
        str | None, typer.Argument(help="A task, by name or as file.py:Class; or a folder of sngm probe.")
    ] = None,
    from_sgd: Annotated[
        str | None,
        typer.Option("--from-sgd", help="Your SGD recipe: lr=..,batch=.. and weight_decay, momentum, epochs."),
    ] = None,
    to_batch: Annotated[
        int | None, typer.Option("--to-batch", help="The batch to carry it over to, with SNGM.")
    ] = None,
    gradients: Annotated[
        float | None,
        typer.Option(
            help="A budget: gradients of single samples, epochs times samples. Of a text, a sample is a window of a "
            "stream (bptt words), and an epoch has steps times batch of them."
        ),
    ] = None,
    gap: Annotated[float | None, typer.Option(help="How far the loss at the start is above its minimum.")] = None,
    L: Annotated[float | None, typer.Option("--L", help="Smoothness: the largest norm of the Hessian.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Noise of a sample's gradient, a standard deviation.")] = None,
    beta: Annotated[float | None, typer.Option(help="Momentum. Default: 0.9.")] = None,
    lam: Annotated[float | None, typer.Option(help="Of relaxed smoothness, L + lam |g|. Default: 0.")] = None,
    pilot_steps: Annotated[
        int | None, typer.Option("--pilot-steps", help="End the pilot after so many steps, if it takes more.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value: a setting of the task.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for page and record. Default: runs/advise- and a name.")
    ] = None,
    data_dir: DATA = None,
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Advise on batch size and learning rate. With --from-sgd, carry an SGD recipe over to SNGM at a larger batch; with
    --gradients, say how large a batch each method's bound bears. Each number says whether it is measured, theory or a
    rule of thumb.
    """
    numbers: dict[str, Any] = {"--gap": gap, "--L": L, "--sigma": sigma, "--beta": beta, "--lam": lam}
    _check(what, from_sgd, to_batch, gradients, numbers, pilot_steps)
    how: dict[str, Any] = {"pilot_steps": pilot_steps, "device": device, "data_dir": data_dir}
    if settings:
        how["task_settings"] = _of_task(what, settings)
    name = (what or "numbers").rstrip("/").rpartition("/")[2].replace(":", "-")
    goal = f"b{to_batch}" if gradients is None else f"{gradients:g}"
    key = short_hash([_place(what), to_batch, gradients, from_sgd, numbers, pilot_steps, how.get("task_settings")])
    folder = out or Path("runs") / f"advise-{name}-{goal}-{key}"
    check_folder(folder, "advice.json")
    if what is not None and from_sgd is not None and to_batch is not None:
        advice = _from_sgd(what, from_sgd, to_batch, **how)
    elif what is not None:
        advice = _from_pilot(what, gradients or 0.0, **how)
    else:
        advice = _from_numbers(gradients or 0.0, **{option.strip("-"): value for option, value in numbers.items()})
    from ..advice.page import plain, write

    page = write(folder, advice)
    if as_json:
        print(json.dumps({**finite(plain(advice)), "report": str(page)}, indent=2))
    else:
        _print(advice)
        print(f"\nReport: {page}")


def _place(what: str | None) -> str | None:
    """The same for the same task or folder, from wherever it is named."""
    from .. import tasks

    if what is None:
        return None
    return str(Path(what).resolve()) if Path(what).is_dir() else tasks.canonical(what)


def _check(
    what: str | None,
    from_sgd: str | None,
    to_batch: int | None,
    gradients: float | None,
    numbers: dict[str, Any],
    pilot_steps: int | None,
) -> None:
    """Refuse what does not go together, before anything is run."""
    given = [option for option, value in numbers.items() if value is not None]
    if (from_sgd is None) == (gradients is None):
        raise UsageError("say either --from-sgd and --to-batch, or --gradients")
    if (from_sgd is None) != (to_batch is None):
        raise UsageError(
            f"--from-sgd and --to-batch go together; {'--to-batch' if from_sgd else '--from-sgd'} is missing"
        )
    if pilot_steps is not None and pilot_steps < 1:
        raise UsageError(f"--pilot-steps must be at least 1, got {pilot_steps}")
    if gradients is not None and not 1 <= gradients < math.inf:
        raise UsageError(f"--gradients must be a number of at least 1, got {gradients:g}")
    if what is not None:
        if given:
            raise UsageError(f"{', '.join(given)}: numbers are for advice without a task, whose pilot measures them")
        return
    if from_sgd is not None:
        raise UsageError("--from-sgd needs a task, whose gradient is measured")
    if missing := [option for option in ("--gap", "--L", "--sigma") if option not in given]:
        raise UsageError(f"without a task {' and '.join(missing)} {'are' if missing[1:] else 'is'} needed")
    if numbers["--L"] == 0 and numbers["--gap"] != 0 and not (numbers["--lam"] or 0) > 0:  # -0 too
        raise UsageError("--L must be a number > 0 where --gap is above 0 and --lam is 0, got 0: any rate would do")
    if pilot_steps is not None:
        raise UsageError("--pilot-steps: without a task there is no pilot")


def _of_task(what: str | None, settings: list[str]) -> dict[str, Any]:
    """The settings of a task that were given; others are refused."""
    from ..study.grid import split_settings

    if what is None or Path(what).is_dir():
        raise UsageError("--set is of a task, and none is named")
    return split_settings(what, [], parse_settings(settings))[1]


def _from_sgd(task: str, recipe: str, to_batch: int, **how: Any) -> dict[str, Any]:
    from .. import tasks
    from ..advice import Recipe, carry_recipe
    from ..training.distributed import choose_device
    from .console import step_progress
    from .probe import say_over_steps

    tasks.find(task)
    show = step_progress(on_cpu=choose_device(how["device"]).type == "cpu")
    return carry_recipe(task, Recipe.parse(recipe), to_batch, say=say_over_steps, progress=show, **how)


def _from_numbers(
    gradients: float, gap: float, L: float, sigma: float, beta: float | None, lam: float | None
) -> dict[str, Any]:
    from ..advice import Constants
    from ..advice.budget import advise_budget

    beta = 0.9 if beta is None else beta
    # Theorem 1 and MSGD's bound know no lambda
    smooth = {"L": None, "relaxed": ((lam, L),)} if lam else {"L": L}
    return advise_budget(gradients, Constants(gap, sigma, beta, **smooth), measured=False)


def _from_pilot(
    what: str,
    gradients: float,
    pilot_steps: int | None,
    device: str | None,
    data_dir: Path | None,
    task_settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Of a folder that `sngm probe` wrote, or of a pilot as it would make it."""
    from .. import tasks
    from ..advice import Constants
    from ..advice.budget import advise_budget
    from ..files import read_json
    from ..probes import along
    from ..training import RunConfig, resolve
    from ..training.distributed import choose_device
    from .console import step_progress
    from .probe import say_over_steps

    folder = Path(what)
    if folder.is_dir():
        if pilot_steps is not None:
            raise UsageError("--pilot-steps: the pilot of a folder has been run")
        if not (folder / "probe.json").exists():
            raise UsageError(f"{folder} holds no probe.json: name a task, or a folder that sngm probe wrote")
        found = read_json(folder / "probe.json")
        if not isinstance(found, dict) or found.get("kind") != "pilot":
            raise UsageError(f"{folder} holds probes of runs, and advice needs those of a task")
    else:
        place = choose_device(device)
        config: RunConfig = resolve(
            what, "msgd", lr=tasks.middle_rate(what, "msgd"), epochs=1, device=place, task_settings=task_settings
        )
        show = step_progress(on_cpu=place.type == "cpu")
        found = along(config, steps=pilot_steps, device=device, data_dir=data_dir, say=say_over_steps, progress=show)
    made = {key: found.get(key) for key in ("versions", "hardware", "commit")}
    return {"task": what, **advise_budget(gradients, Constants.of_probe(found), measured=True), **made}


def _print(advice: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..advice.page import methods_table

    console = Console(file=sys.stdout)

    def show(head: list[str], rows: list[list[str]]) -> None:
        table = Table(*head)
        for row in rows:
            table.add_row(*map(Text, row))  # as text: brackets are no markup here
        console.print(table)

    facts = advice["facts"] if advice["kind"] == "recipe" else advice["constants"]
    show(["number", "value", "source", "how"], [[fact.name, fact.text, fact.source, fact.why] for fact in facts])
    if advice["kind"] == "budget":
        show(*methods_table(advice))
    for warning in advice["warnings"]:
        print(f"\nBeware: {warning}")
    for note in advice["notes"]:
        print(f"\n{note}")
    if advice["kind"] == "recipe":
        print(f"\n{advice['command']}")
