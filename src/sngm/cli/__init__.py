"""The command line: verbs only. Torch is imported when a verb needs it, so that --help is there at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..environment import launch, ranks
from ..errors import Failed, Interrupted, UsageError
from ..files import check_writable
from ..parsing import numbers, parse_call, parse_settings, split_list, whole_numbers
from . import advise, check_theory, data, lists, paper, probe
from .exit_codes import CODES, DIVERGED, run_verb
from .options import DATA, DEVICE, DRY, JSON, examples, verbs

app = typer.Typer(
    name="sngm",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=CODES.replace("\n", " "),
)
verb = verbs(app)

OUT = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the records. Default: runs/ and a name.")]
SET = Annotated[list[str] | None, typer.Option("--set", help="key=value: a setting of the method or the task.")]
EPOCHS = Annotated[int | None, typer.Option(help="Passes over the training set. Default: the task's.")]
WORKERS = Annotated[
    int | None, typer.Option(help="Data-parallel workers, virtual where processes are fewer. Default: the task's.")
]
MICRO = Annotated[
    int | None, typer.Option(help="Samples of a micro-batch. Default: the task's, or a worker's whole share.")
]
BN_GROUP = Annotated[
    int | None, typer.Option("--bn-group", help="Samples BatchNorm normalises together. Default: micro.")
]
STATS = Annotated[
    str | None, typer.Option("--running-stats", help="BatchNorm statistics of the 'first' worker, or their 'mean'.")
]
SCHEDULE = Annotated[
    str | None, typer.Option(help="constant, cosine, linear, polynomial(power=2) or plateau(factor=4,patience=0).")
]
WARMUP = Annotated[float | None, typer.Option(help="Epochs over which the learning rate first grows linearly.")]
CLIP = Annotated[float | None, typer.Option(help="Clip the gradient's norm to this; inf: do not, where the task does.")]
DECAY_ON = Annotated[
    str | None, typer.Option("--decay-on", help="Weight decay on 'weights' (no biases, no norms) or on 'all'.")
]
BIAS_LR = Annotated[
    str | None, typer.Option("--bias-lr", help="LARS and CLARS: rate of biases and norms, 'scaled' or 'full'.")
]
DETERMINISTIC = Annotated[bool, typer.Option("--deterministic", help="Bit-identical reruns on a GPU, slower.")]
PRECISION = Annotated[
    str | None, typer.Option(help="float32, float64 or bfloat16 (autocast). Default: the task's on a GPU, or float32.")
]
STEP = Annotated[
    str,
    typer.Option(
        "--step", help="auto, eager, compiled, captured or compiled+captured. Default: auto, as task and device let."
    ),
]
LOADERS = Annotated[
    int | None, typer.Option("--loaders", help="Processes that prepare batches ahead. Default: the task's.")
]
PASS_SIZE = Annotated[
    int | None, typer.Option("--pass-size", help="The most samples through the model at once. Default: the task's.")
]


@app.callback(
    invoke_without_command=True,
    help=examples(
        "sngm compare",
        "sngm train digits --method sngm --lr 0.1 --batch 512",
        "sngm compare digits --methods msgd,sngm --batches 32,512 --seeds 5",
        "torchrun --nproc-per-node 2 -m sngm train digits --method sngm --lr 0.1 --batch 512",
    )
    + "\n\nTrain with large batches without losing accuracy, and compare the methods that promise it.",
)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Before any verb."""
    if version:
        print(f"sngm {__version__}")
        raise typer.Exit


# ---------------------------------------------------------------- train and eval


@verb(
    "sngm train digits --method sngm --lr 0.1 --batch 512",
    "sngm train digits --method lars --lr 30 --batch 512 --workers 8 --set trust_coefficient=0.002",
    "sngm train cifar10-resnet20 --method sngm --lr 0.8 --batch 8192 --data-dir ~/datasets",
    "sngm train my_task.py:MyTask --method msgd --lr 0.1 --dry-run",
)
def train(
    task: Annotated[str, typer.Argument(help="A task by name (sngm tasks), or your own as file.py:Class.")],
    method: Annotated[str, typer.Option(help="A method by name (sngm methods), or package.module:Class.")] = "sngm",
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: the middle of the task's grid.")] = None,
    batch: Annotated[int | None, typer.Option(help="Global batch, over all workers. Default: the task's.")] = None,
    seed: Annotated[int, typer.Option(help="Of first weights, sample order, augmentation and dropout.")] = 0,
    part: Annotated[str, typer.Option(help="Train on 'full' data and test, or hold out some to 'select' by.")] = "full",
    epochs: EPOCHS = None,
    workers: WORKERS = None,
    micro: MICRO = None,
    bn_group: BN_GROUP = None,
    running_stats: STATS = None,
    schedule: SCHEDULE = None,
    warmup: WARMUP = None,
    clip: CLIP = None,
    decay_on: DECAY_ON = None,
    bias_lr: BIAS_LR = None,
    precision: PRECISION = None,
    settings: SET = None,
    out: OUT = None,
    data_dir: DATA = None,
    device: DEVICE = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps. Default: about once a minute.")] = None,
    track: Annotated[str | None, typer.Option(help="Also write to tensorboard, wandb or mlflow.")] = None,
    deterministic: DETERMINISTIC = False,
    step: STEP = "auto",
    loaders: LOADERS = None,
    pass_size: PASS_SIZE = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what --out holds of this run.")] = False,
    as_json: JSON = False,
    dry_run: DRY = False,
) -> None:
    """Train once. The same command again goes on where a run stopped, and does not repeat a finished one."""
    from .. import tasks
    from ..study.grid import split_settings
    from ..training import Options, resolve
    from ..training import train as run
    from ..training.distributed import choose_device
    from ..training.trackers import check_tracker
    from .console import outcome, show_plan, step_progress, stop_on_signal, warn_of_slow

    name, own = parse_call(method)
    of_method, of_task = split_settings(task, [method], parse_settings(settings or []))
    lr = tasks.middle_rate(task, name) if lr is None else lr
    place = choose_device(device)
    config = resolve(
        task, name, lr=lr, batch=batch, seed=seed, part=part, epochs=epochs, workers=workers, micro=micro,
        bn_group=bn_group, running_stats=running_stats, schedule=schedule, warmup=warmup, clip=clip,
        decay_on=decay_on, bias_lr=bias_lr, precision=precision, method_settings={**of_method, **own},
        task_settings=of_task, device=place, processes=ranks(),
    )  # fmt: skip
    if checkpoint_every is not None and checkpoint_every < 1:
        raise UsageError(f"--checkpoint-every must be at least 1 step, got {checkpoint_every}")
    check_tracker(track)
    folder = (
        out
        or Path("runs") / f"{config.task.rpartition('/')[2].replace(':', '-')}-{name.replace(':', '-')}-{config.hash}"
    )
    options = Options(
        device=device, data_dir=data_dir, checkpoint_every=checkpoint_every, tracker=track,
        deterministic=deterministic, restart=restart, should_stop=stop_on_signal(),
        progress=step_progress(on_cpu=place.type == "cpu"),
        **step_options(step, loaders, pass_size),
    )  # fmt: skip
    warn_of_slow(place, precision, step)
    if dry_run:
        show_plan(config, folder, options, as_json)
        return
    first = launch().rank == 0
    record = run(config, folder, options)
    if first:
        if as_json:
            print(json.dumps({**record, "folder": str(folder)}, indent=2))
        else:
            print(outcome(record, folder))
    if record["status"] == "diverged":
        sys.exit(DIVERGED)


def step_options(step: str, loaders: int | None, pass_size: int | None) -> dict[str, Any]:
    """Options that change how steps are computed, not what they compute; bad ones are refused."""
    from ..training.cuda_graph_step import STEPS

    if step not in STEPS:
        raise UsageError(f"--step must be one of {', '.join(STEPS)}, got {step!r}")
    for name, value, least in (("--loaders", loaders, 0), ("--pass-size", pass_size, 1)):
        if value is not None and value < least:
            raise UsageError(f"{name} must be at least {least}, got {value}")
    return {"step": step, "loaders": loaders, "pass_size": pass_size}


@verb(
    "sngm eval runs/digits-sngm-1a2b3c4d5e6f",
    name="eval",
)
def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    data_dir: DATA = None,
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Test the trained model of a run again, and hold it against the record."""
    from ..files import finite
    from ..training import RunFolder, score
    from ..training.distributed import choose_device

    scores = score(folder, choose_device(device), data_dir)
    recorded = RunFolder(folder).read()["result"]
    if as_json:
        print(json.dumps({"folder": str(folder), "scores": finite(scores), "recorded": recorded}, indent=2))
        return
    for key, value in scores.items():
        then = recorded.get(key)
        print(f"{key.replace('_', ' ')}: {value:.6g}" + (f" (recorded: {then:.6g})" if then is not None else ""))


# ---------------------------------------------------------------- compare and report


@verb(
    "sngm compare",
    "sngm compare digits --methods msgd,sngm --batches 32,128,512 --seeds 5",
    'sngm compare --methods "sngm,sngm(weight_decay=8e-4)" --lrs 0.1,0.3,1 --out runs/decay',
    "sngm compare my_task.py:MyTask --dry-run",
)
def compare(
    task: Annotated[str, typer.Argument(help="A task by name (sngm tasks), or your own as file.py:Class.")] = "digits",
    methods: Annotated[str, typer.Option(help="Names, by commas, with settings in brackets.")] = "msgd,lars,sngm",
    batches: Annotated[str | None, typer.Option(help="Global batches, by commas. Default: the task's.")] = None,
    lrs: Annotated[str | None, typer.Option(help="Learning rates to try, by commas. Default: the task's.")] = None,
    seeds: Annotated[int, typer.Option(help="How many runs a result is over.")] = 3,
    epochs: EPOCHS = None,
    workers: WORKERS = None,
    micro: MICRO = None,
    bn_group: BN_GROUP = None,
    running_stats: STATS = None,
    schedule: SCHEDULE = None,
    warmup: WARMUP = None,
    clip: CLIP = None,
    decay_on: DECAY_ON = None,
    bias_lr: BIAS_LR = None,
    precision: PRECISION = None,
    settings: SET = None,
    out: OUT = None,
    data_dir: DATA = None,
    device: DEVICE = None,
    deterministic: DETERMINISTIC = False,
    step: STEP = "auto",
    loaders: LOADERS = None,
    pass_size: PASS_SIZE = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time. Default: one a core; one on a GPU, four small ones with MPS.")
    ] = None,
    as_json: JSON = False,
    dry_run: DRY = False,
) -> None:
    """Which method keeps its accuracy at your batch size? Each method at each batch size gets as many learning
    rates to try on a validation split; the best is trained on the whole training set with every seed and tested.
    """

    from .. import tasks
    from ..files import short_hash
    from ..study import Study
    from ..study.grid import split_settings
    from ..study.launch import check_jobs
    from ..study.launch import compare as make_runs
    from ..training import Options
    from ..training.config import usual_precision
    from ..training.distributed import choose_device

    cls = tasks.find(task)
    names = split_list(methods)
    of_methods, of_task = split_settings(task, names, parse_settings(settings or []))
    sizes = tuple(whole_numbers("--batches", batches)) if batches is not None else cls.batches
    place = choose_device(device)
    usual = usual_precision(task, sizes[0], place)
    if precision is None and usual != "float32":  # said, so that runs on a CPU and on a GPU do not mix
        precision = usual
    given = {
        "workers": workers, "micro": micro, "bn_group": bn_group, "running_stats": running_stats,
        "schedule": schedule, "warmup": warmup, "clip": clip, "precision": precision, "decay_on": decay_on,
        "bias_lr": bias_lr,
    }  # fmt: skip
    study = Study(
        task=task,
        methods=tuple(names),
        batches=sizes,
        seeds=seeds,
        epochs=cls.epochs if epochs is None else epochs,
        lrs=tuple(numbers("--lrs", lrs)) if lrs is not None else None,
        method_settings=of_methods,
        task_settings=of_task,
        settings={k: v for k, v in given.items() if v is not None},
    )
    check_jobs(jobs)
    key = short_hash(study.identity())
    folder = out or Path("runs") / f"compare-{task.rpartition('/')[2].replace(':', '-')}-{key}"
    options = Options(
        device=device, data_dir=data_dir, deterministic=deterministic, **step_options(step, loaders, pass_size)
    )  # fmt: skip
    from .console import interrupt_on_signal, show_study, study_progress, warn_of_slow

    warn_of_slow(place, precision, step)
    if dry_run:
        show_study(study, folder, options, as_json, jobs)
        return
    from .. import report

    check_writable(folder)
    interrupt_on_signal()
    with study_progress(study) as show:
        try:
            done = make_runs(study, folder, options=options, jobs=jobs, show=show)
        except KeyboardInterrupt:
            raise Interrupted(f"what is done is in {folder}; the same command goes on from there") from None
    page = report.write(folder)
    summary = report.summarise(folder)
    if as_json:
        print(json.dumps({**summary.as_dict(), "folder": str(folder), "report": str(page)}, indent=2))
    else:
        print(f"\n{report.table(summary)}\n\n{summary.answer()}\n\nReport: {page}")
    if done.failed:
        config, record = done.failed[0]
        print(record["traceback"], file=sys.stderr)
        raise Failed(
            f"{len(done.failed)} runs failed, the first {config.label} at batch {config.batch}: {record['error']}; "
            "the rest is done, and the same command tries those again"
        )


@verb(
    "sngm report runs/compare-digits-1a2b3c4d",
)
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a study, of several runs or of one.")],
    as_json: JSON = False,
) -> None:
    """Write table.md, figures and report.html from the records in a folder."""
    from .. import report as reports

    summary = reports.summarise(folder)
    if not as_json:  # first, so that a folder that cannot be written to has shown what is in it
        print(f"{reports.table(summary)}\n\n{summary.answer()}\n")
    page = reports.write(folder)
    print(json.dumps({**summary.as_dict(), "report": str(page)}, indent=2) if as_json else f"Report: {page}")


verb(*probe.EXAMPLES)(probe.probe)
verb(*advise.EXAMPLES)(advise.advise)
verb(*check_theory.EXAMPLES, name="check-theory")(check_theory.check_theory)


# ---------------------------------------------------------------- what there is


verb("sngm tasks", "sngm tasks --json")(lists.tasks)
verb("sngm methods")(lists.methods)
verb("sngm doctor")(lists.doctor)
app.add_typer(data.app, name="data")
app.add_typer(paper.app, name="paper")


def main() -> None:
    """What the command sngm calls."""
    run_verb(app)
