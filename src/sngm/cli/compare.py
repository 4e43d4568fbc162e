"""The commands `sngm compare` and `sngm report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..options import Cluster, Execution, RecipeOptions, as_dict
from ..parsing import numbers, parse_settings, split_list, whole_numbers
from .options import DRY, JSON, SET, TASK, TRACK

EXAMPLES = (
    "sngm compare",
    "sngm compare digits --methods msgd,sngm --batches 32,128,512 --seeds 5",
    'sngm compare --methods "sngm,sngm(weight_decay=8e-4)" --lrs 0.1,0.3,1 --out runs/decay',
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
        str | None, typer.Option(help="Learning rates to try, separated by commas. Default: the task's.")
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
    """Compare methods across batch sizes. Every method tries the same number of learning rates on a validation split;
    the best one is trained on the whole training set with every seed and tested. Run the same command again to resume.
    """
    from .. import api
    from ..study.executors import device_of_runs
    from ..study.launch import check_jobs
    from ..training import Options
    from .plans import show_study, warn_of_slow

    sizes = None if batches is None else whole_numbers("--batches", batches)
    rates = None if lrs is None else numbers("--lrs", lrs)
    chosen = parse_settings(settings or [])
    device = device_of_runs(execution, cluster)
    study = api.plan_study(task, split_list(methods), sizes, rates, seeds, chosen, recipe, device)
    check_jobs(jobs, cluster)
    folder = out or api.study_folder(study)
    options = Options(**as_dict(execution), tracker=track)
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
