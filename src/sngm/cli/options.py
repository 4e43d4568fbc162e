"""What the verbs of the command line share: how their help looks, and the options that many have."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

JSON = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")]
DATA = Annotated[Path | None, typer.Option("--data-dir", envvar="SNGM_DATA", help="Folder that holds datasets.")]
DRY = Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would be run, and run nothing.")]
DEVICE = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the GPU if there is one.")]


def examples(*lines: str) -> str:
    """The first thing that --help shows."""
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"[cyan]{line}[/cyan]" for line in lines)


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def verbs(app: typer.Typer) -> Callable[..., Decorator]:
    """What makes functions verbs of an application."""

    def verb(*lines: str, name: str | None = None) -> Decorator:
        """A verb of the command line, with examples above what its docstring says."""

        def decorate(function: Callable[..., None]) -> Callable[..., None]:
            about = " ".join((function.__doc__ or "").split())
            short = re.split(r"(?<=[.?]) ", about)[0]
            app.command(name, help=f"{examples(*lines)}\n\n{about}", short_help=short)(function)
            return function

        return decorate

    return verb
