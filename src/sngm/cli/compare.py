"""The commands `sngm compare` and `sngm report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..options import Cluster, Execution, RecipeOptions, as_dict
from ..parsing import numbers_by_name, parse_settings, split_list, whole_numbers
from .options import DRY, JSON, SET, TASK, TRACK

EXAMPLES = (
    "sngm compare",
    "sngm compare digits --methods msgd,sngm --batches 32,128,512 --seeds 5",
    'sngm compare --methods "sngm,sngm(weight_decay=8e-4)" --lrs 0.1,0.3,1 --out runs/decay',
    "sngm compare --methods adamw,sngm --search lr,weight_decay --trials 8",
    "sngm compare my_task.py:MyTask --dry-run",
    "sngm compare cifar10-resnet20 --executor slurm --gpus 1 --slurm-partition gpu --slurm-time 120",
)


def compare(
    task: TASK = "digits",
    *,
    methods: Annotated[
        str,
        typer.Option(help='Methods, separated by commas; settings in parentheses: "sngm(weight_decay=8e-4)".'),
    ] = "msgd,lars,sngm",
    batches: Annotated[
        str | None, typer.Option(help="Global batch sizes, separated by commas. Default: the task's.")
    ] = None,
    lrs: Annotated[
        str | None,
        typer.Option(
            help="Learning rates to try, separated by commas, for all methods or for each: "
            '"sngm=0.1,0.3;adamw=1e-3,3e-3". Default: the task\'s.'
        ),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            help="Search these settings instead of a grid of learning rates: lr, weight_decay, momentum, warmup; with "
            "ranges as weight_decay=1e-5:1e-3, or for one method as lr\\[adamw]=1e-3:1e-2. Default ranges: around the "
            "usual values of each method."
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Number of quasi-random points of --search, the same for every method.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds per result; the table shows their mean.")] = 3,
    recipe: RecipeOptions,
    settings: SET = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output folder. Default: runs/compare-TASK-HASH.")
    ] = None,
    execution: Execution,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Runs in parallel. Default: one per CPU core; on a GPU 1, or 4 at batches up to 128 if NVIDIA's "
            "Multi-Process Service is running."
        ),
    ] = None,
    cluster: Cluster,
    track: TRACK = None,
    as_json: JSON = False,
    dry_run: DRY = False,
) -> None:
    """Compare methods across batch sizes. Every method tries the same number of learning rates on a validation split,
    then trains with its best one on the whole training set with every seed, and is tested. Run the same command again
    to resume.
    """
    from .. import api
    from .. import report as reports
    from ..study.launch import check_jobs
    from ..study.search import parse_search
    from ..training import Options
    from .plans import show_study, warn_of_slow

    sizes = None if batches is None else whole_numbers("--batches", batches)
    rates = None if lrs is None else numbers_by_name("--lrs", lrs)
    chosen = parse_settings(settings or [])
    sought = None if search is None else parse_search(search)
    study = api.plan_study(
        task, split_list(methods), sizes, rates, seeds, chosen, recipe, execution, cluster, sought, trials
    )
    check_jobs(jobs, cluster)
    folder = out or api.study_folder(study)
    options = Options(**as_dict(execution), track=track)
    if not cluster.remote:
        warn_of_slow(execution, recipe.precision)
    if dry_run:
        show_study(study, folder, options, as_json, jobs, cluster)
        return
    made, failed = api.run_study(study, folder, options, jobs=jobs, progress=True, cluster=cluster)
    page = made.report()
    if as_json:
        print(json.dumps({**made.summary.as_dict(), "folder": str(folder), "report": str(page)}, indent=2))
    else:
        print(f"\n{reports.table(made.summary, escape=False)}\n{made.answer()}\n\nReport: {page}")
    if failed:
        print(failed[0][1]["traceback"], file=sys.stderr)
        raise api.failure(failed)


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a study, of several runs or of one.")],
    as_json: JSON = False,
) -> None:
    """Write table.md, figures, tables as CSV and JSON, and report.html from the records in a folder. If the runs are of
    several tasks, each task has its own section.
    """
    from .. import report as reports

    parts = reports.summarise_tasks(folder)
    if not as_json:  # print first, because the folder may not be writable
        for part in parts:
            print(f"{reports.table(part, escape=False)}\n{part.answer()}\n")
    page = reports.write(folder)
    tasks = {"tasks": [part.as_dict() for part in parts]} if len(parts) > 1 else parts[0].as_dict()
    print(json.dumps({**tasks, "report": str(page)}, indent=2) if as_json else f"Report: {page}")
