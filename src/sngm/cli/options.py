"""Shared parts of the commands: help pages, common options, and flags generated from dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import parameters_of
from ..parsing import numbers

JSON = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
DRY = Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be run, and run nothing.")]
DATA = Annotated[Path | None, typer.Option("--data-dir", envvar="SNGM_DATA", help="Folder that holds datasets.")]
DEVICE = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the GPU if there is one.")]
OUT = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the records. Default: runs/ and a name.")]
SET = Annotated[list[str] | None, typer.Option("--set", help="key=value: a setting of the method or the task.")]
TASK = Annotated[str, typer.Argument(help="A task by name (sngm tasks), or your own as file.py:Class.")]

Verb = Callable[..., None]


def examples(*lines: str) -> str:
    """Return the examples at the top of a help page."""
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"[cyan]{line}[/cyan]" for line in lines)


def verbs(app: typer.Typer) -> Callable[..., Callable[[Verb], Verb]]:
    """Return a decorator that adds functions to an application as commands."""

    def verb(*lines: str, name: str | None = None) -> Callable[[Verb], Verb]:
        """Add a function as a command, whose help shows these examples above the function's docstring."""

        def decorate(function: Verb) -> Verb:
            about = " ".join((function.__doc__ or "").split())
            short = re.split(r"(?<=[.?]) ", about)[0]
            app.command(name, help=f"{examples(*lines)}\n\n{about}", short_help=short)(with_flags(function))
            return function

        return decorate

    return verb


def with_flags(function: Verb) -> Verb:
    """Replace each parameter that is annotated with a dataclass by a flag for each of its fields."""
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += [_flag(group_parameter, groups[name]) for group_parameter in parameters_of(groups[name])]
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=kind, annotation=hints[name]))

    def call(**given: Any) -> None:
        built = {}
        for name, group in groups.items():
            own = {p.name: given.pop(p.name) for p in parameters_of(group)}
            for p in parameters_of(group):
                if isinstance(p.default, tuple) and isinstance(own[p.name], str):
                    own[p.name] = tuple(numbers(f"--{p.name}", own[p.name], zero=True))
            built[name] = group(**own)
        function(**given, **built)

    call.__doc__ = function.__doc__
    call.__name__ = function.__name__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _flag(parameter: inspect.Parameter, group: Any) -> inspect.Parameter:
    """Return a dataclass field as a typer parameter; a tuple of numbers becomes comma-separated text."""
    (field,) = [f for f in dataclasses.fields(group) if f.name == parameter.name]
    kind, default = parameter.annotation, parameter.default
    if isinstance(default, tuple):
        kind, default = str, ",".join(f"{value:g}" for value in default)
    option = typer.Option(f"--{parameter.name.replace('_', '-')}", **field.metadata)
    return parameter.replace(annotation=Annotated[kind, option], default=default)
