"""The commands of `sngm paper`: compare the paper's tables with our results, and make the runs behind them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import Failed, Interrupted, UsageError
from ..progress import duration, note
from .options import DATA, DEVICE, DRY, JSON, examples, verbs

if TYPE_CHECKING:
    from ..paper.experiments import Item

app = typer.Typer(
    no_args_is_help=True,
    short_help="Compare the paper's tables with our results, and run the missing experiments.",
)
verb = verbs(app)

ITEM = Annotated[str, typer.Argument(help="An experiment, such as table-2; sngm paper list shows all.")]
RESULTS = Annotated[Path, typer.Option("--results", help="The results folder, with a file of runs for each task.")]
FOLDER = Path("results")
NARROWEST = 100  # columns; in a narrower table, rich would cut words
PIPED_WIDTH = 160  # columns of a table that is piped to a file or a pager
UNITS = {"s": 1, "m": 60, "h": 3600}


@app.callback(
    help="Compare the paper's tables with our results, and run the missing experiments.\n\n"
    + examples("sngm paper list", "sngm paper show table-2", "sngm paper run table-2 --cells SNGM@8192 --dry-run")
)
def top() -> None:
    """Set the help of `sngm paper`."""


@verb("sngm paper list", "sngm paper list --json", name="list")
def list_items(results: RESULTS = FOLDER, as_json: JSON = False) -> None:
    """List the tables and figures, how much of each has been run, and the cost of the rest."""
    from ..paper import experiments
    from ..paper.results import read
    from ..paper.tables import FIGURES
    from ..paper.verdicts import outcomes_of

    there = read(_to_show(results))
    found: list[dict[str, Any]] = [
        {
            "item": item.name, "title": item.title, "task": item.task, "cells": len(outcomes),
            "complete": sum(not o.to_come for o in outcomes), "missing_runs": sum(o.to_come for o in outcomes),
            "missing_hours": round(sum(o.to_come * o.planned.seconds() for o in outcomes) / 3600, 4),
            "needs": item.needs,
        }
        for item in experiments.ITEMS
        for outcomes in [outcomes_of(item, there)]
    ]  # fmt: skip
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for entry in found:
        hours = duration(3600 * entry["missing_hours"])
        missing = f"; {entry['missing_runs']} runs missing, about {hours}" if entry["missing_runs"] else ""
        needs = f"; needs {entry['needs']}" if entry["needs"] else ""
        state = f"{entry['complete']} of {entry['cells']} cells{missing}{needs}"
        print(f"{entry['item']}: {entry['title']}\n  {state}")
    drawn = ", ".join(f"{f.name} from those of {f.item}" for f in FIGURES if f.name != f.item)
    print(f"\nOther figures are drawn from these runs: {drawn}.")
    print(f"Times are of {experiments.COSTS_ON}. Table 1 is theory: sngm check-theory, docs/theory.md.")


@verb("sngm paper show table-2", "sngm paper show table-6 --json")
def show(item: ITEM, results: RESULTS = FOLDER, as_json: JSON = False) -> None:
    """Show a table of the paper beside our results: learning rates, seeds, intervals and verdicts."""
    from ..paper import document, experiments
    from ..paper.results import read
    from ..paper.tables import TABLE_1
    from ..paper.verdicts import outcomes_of

    if item == "table-1":
        if as_json:
            print(json.dumps(TABLE_1, indent=2))
        else:
            _print([document.theory()])
        return
    found = experiments.find(item)
    if found.name != item.strip().lower():
        note(f"sngm: {item} shows runs of {found.name}")
    outcomes = outcomes_of(found, read(_to_show(results)))
    if as_json:
        print(json.dumps(document.as_data(found, outcomes), indent=2))
        return
    _print(document.section(found, outcomes))
    if drawn := sorted(path.as_posix() for path in document.pictures_of(found, results)):
        print("\nDrawn in " + ", ".join(drawn))


def _print(paragraphs: list[str]) -> None:
    """Print Markdown, with its tables, for reading in a terminal. Only the text of a link is printed."""
    from rich.console import Console
    from rich.markdown import Markdown

    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", "\n\n".join(filter(None, paragraphs)))
    console = Console(file=sys.stdout, highlight=False)
    console.width = max(console.width, NARROWEST) if sys.stdout.isatty() else PIPED_WIDTH
    console.print(Markdown(text))


@verb(
    "sngm paper run table-2 --dry-run",
    "sngm paper run table-2 --cells SNGM@8192,MSGD@8192 --budget 25m --data-dir ~/datasets",
    "sngm paper run table-6 --cells 2000 --seeds 3",
)
def run(
    item: ITEM,
    cells: Annotated[
        str | None, typer.Option(help="Table cells: ROW, BATCH or ROW@BATCH, separated by commas. Default: all.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds per result. Default: the experiment's.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Stop after this time, such as 25m; the same command resumes.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Working folder of the runs.")] = Path("runs/paper"),
    results: RESULTS = FOLDER,
    data_dir: DATA = None,
    device: DEVICE = None,
    jobs: Annotated[int | None, typer.Option(help="Runs of a cell in parallel; always 1 for tables of times.")] = None,
    as_json: JSON = False,
    dry_run: DRY = False,
) -> None:
    """Train the missing runs of an experiment and add each to --results as it finishes. Needs a git checkout whose
    package has no uncommitted changes. Run the same command again to resume. Runs from other machines in --results are
    not repeated.
    """
    from ..paper import experiments
    from ..paper import run as making
    from ..paper.results import read
    from ..paper.verdicts import outcome_of
    from ..study.launch import check_jobs

    found = experiments.find(item)
    check_jobs(jobs)
    limit = None if budget is None else duration_of(budget)
    there = read(results)
    planned = making.select(found, None if cells is None else cells.split(","), there, seeds)
    missing = _is_missing(results)
    if dry_run:
        outcomes = [outcome_of(one, there, seeds) for one in planned]
        if missing:
            others = f"; --results {kept} has the runs that come with sngm" if (kept := _of_package()) else ""
            note(f"sngm: no folder results here, so every run is missing{others}")
        _plan(found, outcomes, as_json)
        return
    from ..progress import interrupt_on_signal
    from ..study.display import study_progress
    from ..training.loop import Options

    try:
        with interrupt_on_signal():
            outcomes, failed = making.run(
                planned, out=out, options=Options(device=device, data_dir=data_dir), seeds=seeds, jobs=jobs,
                budget=limit, results=results, show=study_progress,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise Interrupted(f"finished runs are in {results}; the same command resumes") from None
    left = sum(outcome.to_come for outcome in outcomes)
    if as_json:
        print(json.dumps({"item": found.name, "missing_runs": left, "results": str(results)}, indent=2))
    else:
        more = f"{left} runs still missing; the same command makes them" if left else "no run is missing"
        print(f"{found.name}: {more}\nsngm paper report writes the pages")
    if failed:
        config, record = failed[0]
        raise Failed(f"{len(failed)} runs failed, the first {config.label} at batch {config.batch}: {record['error']}")


@verb("sngm paper add runs/table-2/*", "sngm paper add ../other/results")
def add(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs, of studies, or of results.")],
    results: RESULTS = FOLDER,
) -> None:
    """Add finished runs to --results, from run folders, studies or another results folder.

    Unfinished runs are skipped.
    """
    from ..files import check_writable, read_record
    from ..paper.results import FILE, REPEATED, from_folder, keep, read_lines
    from ..training.run_folder import FINISHED

    check_writable(results, "results")
    lines, unfinished = [], 0
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"no folder {folder}")
        kept = [*folder.glob(f"*/{FILE}"), *folder.glob(f"*/{REPEATED}")]
        made = sorted(Path(root) for root, _, files in os.walk(folder) if "run.json" in files)
        if not kept and not made:
            raise UsageError(f"{folder} holds no run (run.json) and no results (<task>/{FILE})")
        for path in kept:
            lines += read_lines(path)
        ended = [path for path in made if read_record(path / "run.json").get("status") in FINISHED]
        lines += [from_folder(path) for path in ended]
        unfinished += len(made) - len(ended)
    if not lines:
        raise UsageError(f"none of the {unfinished} runs has finished; resume them first")
    new, repeated = keep(lines, results)
    of_these = f", {repeated} of them a repeat of another" if repeated else ""
    left_out = f"; {unfinished} unfinished ones were skipped" if unfinished else ""
    print(f"{new} of {len(lines)} runs are new in {results}{of_these}{left_out}")


@verb("sngm paper report", "sngm paper report --check")
def report(
    results: RESULTS = FOLDER,
    readme: Annotated[Path | None, typer.Option(help="Page with the table. Default: README.md by the results.")] = None,
    check: Annotated[
        bool, typer.Option("--check", metavar="", help="Write nothing; fail if a page is not up to date.")
    ] = False,
) -> None:
    """Write the result pages: results/README.md, one page per task, figures, and the table in the README."""
    from ..files import check_writable
    from ..paper import document

    if readme is not None and not readme.is_file():
        raise UsageError(f"--readme {readme}: no such file")
    if not results.is_dir():
        raise UsageError(f"no folder {results}; run this where results/ is, or name it with --results")
    beside = results.parent / "README.md"
    page = readme if readme is not None else beside if beside.exists() and document.has_block(beside) else None
    if check:
        if wrong := document.stale(results, page):
            raise UsageError(
                f"these files differ from the runs in the results folder: {', '.join(map(str, wrong))}; if the runs "
                "are right (see git diff), sngm paper report writes them again"
            )
        print(f"every page agrees with the runs{'' if page else '; no README.md has markers for the table'}")
        return
    check_writable(results, "results")
    changed = document.write(results, page)
    print("\n".join(f"{'wrote' if path.exists() else 'removed'} {path}" for path in changed) or "nothing has changed")


def _is_missing(results: Path) -> bool:
    """Return whether the default results folder is missing; raise UsageError if another folder is."""
    if results.is_dir():
        return False
    if results != FOLDER or results.exists():
        raise UsageError(f"no folder {results}; name the results folder with --results, or create it")
    return True


def _to_show(results: Path) -> Path:
    """Return the results folder or, if the default is missing, the runs that come with the package; a note says so."""
    if not _is_missing(results):
        return results
    kept = _of_package()
    shown = "showing the runs that come with sngm" if kept else "no run is known"
    note(f"sngm: no folder results here; {shown}")
    return kept or results


def _of_package() -> Path | None:
    """Return the folder of the runs that come with the package, installed or in a checkout."""
    package = Path(__file__).parents[1]
    return next(filter(Path.is_dir, (package / "paper" / "runs", package.parents[1] / "results")), None)


def duration_of(text: str) -> float:
    """Return the seconds of a duration such as 90, 90s, 25m or 1.5h.

    >>> duration_of("25m"), duration_of("1.5h")
    (1500.0, 5400.0)
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(number) * UNITS[unit]) < 1e9:
            return seconds
    raise UsageError(f"--budget {text}: not a duration; use a form such as 90s, 25m or 1.5h")


def _plan(item: Item, outcomes: list[Any], as_json: bool) -> None:
    from ..paper.experiments import COSTS_ON

    plan = [
        {
            "cell": outcome.planned.name, "grid": list(outcome.rates), "lr": outcome.lr,
            "runs": outcome.to_come, "seconds_each": round(outcome.planned.seconds(), 1),
        }
        for outcome in outcomes
    ]  # fmt: skip
    total = sum(entry["runs"] * entry["seconds_each"] for entry in plan)
    if as_json:
        print(json.dumps({"item": item.name, "cells": plan, "hours": round(total / 3600, 3)}, indent=2))
        return
    for entry in plan:
        rates = ", ".join(f"{rate:g}" for rate in entry["grid"])
        chosen = "" if entry["lr"] is None else f", {entry['lr']:g} chosen"
        what = f"{entry['runs']} runs of {entry['seconds_each']:.0f} s" if entry["runs"] else "complete"
        print(f"{entry['cell']}: {what} (rates {rates}{chosen})")
    runs = sum(entry["runs"] for entry in plan)
    print(f"{runs} runs, about {duration(total)} on {COSTS_ON}, one after the other" if runs else "no run is missing")
