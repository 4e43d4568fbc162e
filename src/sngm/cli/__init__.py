"""The command line: commands that call the functions of :mod:`sngm.api`.

Commands import torch only when they need it, so that ``--help`` is fast.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import advise, check_theory, compare, data, doctor, evaluate, lists, paper, probe, train, watch
from .exit_codes import CODES, run_verb
from .options import examples, verbs

app = typer.Typer(
    name="sngm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=CODES.replace("\n", " "),
)


@app.callback(
    invoke_without_command=True,
    help="Train with large batches without losing accuracy, and compare methods for it.\n\n"
    + examples(
        "sngm compare",
        "sngm train digits --method sngm --lr 0.1 --batch 512",
        "sngm compare digits --methods msgd,sngm --batches 32,512 --seeds 5",
        "torchrun --nproc-per-node 2 -m sngm train digits --method sngm --lr 0.1 --batch 512",
    ),
)
def top(
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Handle options that are given before a command."""
    if version:
        print(f"sngm {__version__}")
        raise typer.Exit


verb = verbs(app)
verb(*train.EXAMPLES)(train.train)
verb(*evaluate.EXAMPLES, name="eval")(evaluate.evaluate)
verb(*compare.EXAMPLES)(compare.compare)
verb("sngm report runs/compare-digits-1a2b3c4d")(compare.report)
verb(*watch.EXAMPLES)(watch.watch)
verb(*probe.EXAMPLES)(probe.probe)
verb(*advise.EXAMPLES)(advise.advise)
verb(*check_theory.EXAMPLES, name="check-theory")(check_theory.check_theory)
verb("sngm tasks", "sngm tasks --json")(lists.tasks)
verb("sngm methods")(lists.methods)
verb(*doctor.EXAMPLES)(doctor.doctor)
app.add_typer(data.app, name="data")
app.add_typer(paper.app, name="paper")


def main() -> None:
    """Run the command ``sngm``."""
    run_verb(app)
