"""The command `sngm check-theory`: check the paper's statements by experiment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import Failed, UsageError
from ..parsing import split_list
from .options import JSON

if TYPE_CHECKING:
    from ..paper.theory_checks import Finding

SEEDS = 20
NAMES = (  # the keys of theory_checks.CHECKS, which is not imported here because it imports torch
    "lemma-1", "msgd-bound", "lemma-2", "lars", "lemma-3", "training", "theorem-1", "corollary-1", "batch-limit-msgd",
    "batch-limit-sngm", "batch-larger", "batch-larger-tuned", "theorem-2", "corollary-2", "theorem-3", "lars-bound",
    "block-bounds", "block-speed",
)  # fmt: skip
EXAMPLES = (
    "sngm check-theory",
    "sngm check-theory --only theorem-1,lars",
    "sngm check-theory --seeds 50 --out runs/theory",
)


def check_theory(
    only: Annotated[
        str | None,
        typer.Option(help=f"Checks to run, separated by commas, of {', '.join(NAMES)}. Default: all."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output folder. Default: a folder in runs/.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs behind every mean, at least 2.")] = SEEDS,
    as_json: JSON = False,
) -> None:
    """Check the paper's statements by experiment. Each statement gets a verdict: holds, fails or open. The exit code is
    1 if a verdict contradicts the one in docs/theory.md, which also explains each known failure.
    """
    import torch

    from ..files import check_folder, finite
    from ..optim.registry import nearest
    from ..paper.theory_checks import CHECKS, check
    from ..paper.theory_checks.page import summary, write
    from ..training.run_folder import provenance

    names = list(CHECKS) if only is None else split_list(only)
    for name in names:
        if name not in CHECKS:
            raise UsageError(f"--only must be of {', '.join(CHECKS)}, got {name!r}{nearest(name, list(CHECKS))}")
    if seeds < 2:
        raise UsageError(f"--seeds must be a whole number >= 2, got {seeds}: an interval needs two values")
    part = "" if only is None else "-" + "-".join(names)
    folder = out or Path("runs") / f"check-theory{part}{'' if seeds == SEEDS else f'-{seeds}-seeds'}"
    check_folder(folder, "findings.json")
    found = check(names, seeds, _show)
    seconds = round(sum(finding.seconds for finding in found), 1)
    facts = {"seeds": seeds, "seconds": seconds, **provenance(torch.device("cpu"))}
    page = write(folder, found, facts)
    if as_json:
        findings = [finding.as_dict() for finding in found]
        print(json.dumps(finite({"findings": findings, **facts, "report": str(page)}), indent=2))
    else:
        _print(found)
        print(f"\n{summary(found)}\n\nReport: {page}")
    if odd := [finding.name for finding in found if finding.surprising]:
        raise Failed(f"these verdicts contradict docs/theory.md: {', '.join(odd)}")


def _print(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"holds": "green", "fails": "red", "open": "yellow"}
    table = Table("check", "verdict", "measured")
    for finding in found:
        known = " (known)" if finding.verdict == finding.expected == "fails" else ""
        verdict = Text(f"{finding.verdict}{known}", style=colours[finding.verdict])
        table.add_row(finding.name, verdict, Text(finding.measured))  # as Text, so that brackets are not markup
    Console(file=sys.stdout).print(table)


def _show(name: str, finding: Finding | None) -> None:
    """Print a check and, when it is done, its verdict to stderr."""
    text = f"{name}: " if finding is None else f"{finding.verdict} ({finding.seconds:.1f} s)\n"
    print(text, end="", file=sys.stderr, flush=True)
