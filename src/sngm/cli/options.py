"""Shared parts of the commands: help pages, common options, and flags generated from dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import DATA_DIR, RecipeOptions, parameters_of
from ..parsing import numbers
from . import exit_codes

JSON = Annotated[
    bool, typer.Option("--json", metavar="", help="Print the result as JSON on stdout; messages go to stderr.")
]
DRY = Annotated[
    bool,
    typer.Option("--dry-run", "-n", metavar="", help="Print the plan with estimated cost; train nothing."),
]
DATA = Annotated[Path | None, typer.Option("--data-dir", envvar="SNGM_DATA", show_envvar=False, help=DATA_DIR)]
DEVICE = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the GPU if there is one.")]
SET = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, a setting of the method or the task; repeatable.")
]
TRACK = Annotated[str | None, typer.Option(help="Also write to tensorboard, wandb or mlflow.")]
TASK = Annotated[str, typer.Argument(help="A task by name (sngm tasks), or your own as file.py:Class.")]
PANELS = {  # panels on the help pages of commands that train, in this order
    "Run": "method methods lr lrs search trials batch batches seed seeds part epochs",
    "Measurement": "points steps lambdas samples iterations",
    "Recipe": "schedule warmup clip decay_on bias_lr ema bn_samples label_smoothing precision settings",
    "Batch split": "workers micro bn_group last_batch running_stats pass_size",
    "Execution": "device data_dir step loaders deterministic jobs shard hang_timeout",
    "Cluster": "executor cpus gpus ray_address slurm_partition slurm_time slurm_options",
    "Output": "out as_json dry_run track checkpoint_every restart",
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}

Verb = Callable[..., None]


def examples(*lines: str) -> str:
    """Return the examples of a help page."""
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"[cyan]{line}[/cyan]" for line in lines)


def verbs(app: typer.Typer) -> Callable[..., Callable[[Verb], Verb]]:
    """Return a decorator that adds functions to an application as commands."""

    def verb(*lines: str, name: str | None = None) -> Callable[[Verb], Verb]:
        """Add a function as a command, whose help shows the function's docstring and these examples."""

        def decorate(function: Verb) -> Verb:
            about = " ".join((function.__doc__ or "").split())
            short = re.split(r"(?<=[.?]) ", about)[0]
            app.command(name, help=f"{about}\n\n{examples(*lines)}", short_help=short)(with_flags(function))
            return function

        return decorate

    return verb


def with_flags(function: Verb) -> Verb:
    """Replace each parameter that is annotated with a dataclass by a flag for each of its fields.

    The help of commands with `RecipeOptions`, which have many flags, groups the flags into the panels of `PANELS`.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += map(_flag, parameters_of(groups[name]), dataclasses.fields(groups[name]))
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
    if RecipeOptions in groups.values():
        parameters = [_in_panel(parameter) for parameter in parameters]
        order = ["", *PANELS]  # first what is in no panel: the arguments
        parameters.sort(key=lambda parameter: order.index(PANEL_OF.get(parameter.name, "")))

    def call(**given: Any) -> None:
        for name, group in groups.items():
            own = {p.name: given.pop(p.name) for p in parameters_of(group)}
            lists = [p.name for p in parameters_of(group) if isinstance(p.default, tuple)]
            own |= {key: tuple(numbers(f"--{key}", own[key], zero=True)) for key in lists}
            given[name] = group(**own)
        function(**given)

    call.__name__ = function.__name__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _in_panel(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a typer parameter with its help panel. The annotation is copied, because several commands may share it."""
    if parameter.name not in PANEL_OF:
        return parameter
    kind, option = typing.get_args(parameter.annotation)
    option = copy.copy(option)
    option.rich_help_panel = PANEL_OF[parameter.name]
    return parameter.replace(annotation=Annotated[kind, option])


def _flag(parameter: inspect.Parameter, field: dataclasses.Field[Any]) -> inspect.Parameter:
    """Return a dataclass field as a typer parameter; a tuple of numbers becomes comma-separated text."""
    kind, default = parameter.annotation, parameter.default
    if isinstance(default, tuple):
        kind, default = str, ",".join(f"{value:g}" for value in default)
    more: dict[str, Any] = {"metavar": ""} if kind is bool else {}
    more |= {**field.metadata, "help": exit_codes.with_flags(field.metadata["help"])}
    option = typer.Option(f"--{parameter.name.replace('_', '-')}", **more)
    return parameter.replace(annotation=Annotated[kind, option], default=default)
