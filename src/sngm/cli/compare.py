"""The commands `sngm compare` and `sngm report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..options import Execution, RecipeOptions, as_dict
from ..parsing import numbers, parse_settings, split_list, whole_numbers
from .options import DRY, JSON, OUT, SET, TASK

EXAMPLES = (
    "sngm compare",
    "sngm compare digits --methods msgd,sngm --batches 32,128,512 --seeds 5",
    'sngm compare --methods "sngm,sngm(weight_decay=8e-4)" --lrs 0.1,0.3,1 --out runs/decay',
    "sngm compare my_task.py:MyTask --dry-run",
)


def compare(
    task: TASK = "digits",
    *,
    methods: Annotated[str, typer.Option(help="Names, by commas, with settings in brackets.")] = "msgd,lars,sngm",
    batches: Annotated[str | None, typer.Option(help="Global batches, by commas. Default: the task's.")] = None,
    lrs: Annotated[str | None, typer.Option(help="Learning rates to try, by commas. Default: the task's.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of runs that a result is the mean of.")] = 3,
    recipe: RecipeOptions,
    settings: SET = None,
    out: OUT = None,
    execution: Execution,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time. Default: one a core; one on a GPU, four small ones with MPS.")
    ] = None,
    as_json: JSON = False,
    dry_run: DRY = False,
) -> None:
    """Which method keeps its accuracy at your batch size? Each method at each batch size gets as many learning
    rates to try on a validation split; the best is trained on the whole training set with every seed and tested.
    """
    from .. import api
    from ..study.launch import check_jobs
    from ..training import Options
    from .plans import show_study, warn_of_slow

    sizes = None if batches is None else whole_numbers("--batches", batches)
    rates = None if lrs is None else numbers("--lrs", lrs)
    chosen = parse_settings(settings or [])
    study = api.plan_study(task, split_list(methods), sizes, rates, seeds, chosen, recipe, execution.device)
    check_jobs(jobs)
    folder = out or api.study_folder(study)
    warn_of_slow(execution, recipe.precision)
    if dry_run:
        show_study(study, folder, Options(**as_dict(execution)), as_json, jobs)
        return
    made, failed = api.run_study(study, folder, execution, jobs=jobs, progress=True)
    page = made.report()
    if as_json:
        print(json.dumps({**made.summary.as_dict(), "folder": str(folder), "report": str(page)}, indent=2))
    else:
        print(f"\n{made.table()}\n\n{made.answer()}\n\nReport: {page}")
    if failed:
        print(failed[0][1]["traceback"], file=sys.stderr)
        raise api.failure(failed)


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a study, of several runs or of one.")],
    as_json: JSON = False,
) -> None:
    """Write table.md, figures and report.html from the records in a folder."""
    from .. import report as reports

    summary = reports.summarise(folder)
    if not as_json:  # printed first, in case the folder is not writable
        print(f"{reports.table(summary)}\n\n{summary.answer()}\n")
    page = reports.write(folder)
    print(json.dumps({**summary.as_dict(), "report": str(page)}, indent=2) if as_json else f"Report: {page}")
