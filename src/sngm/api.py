"""Train models, compare methods, and load runs and studies, from Python; the command line calls these functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import tasks
from .environment import ranks
from .errors import Failed, Interrupted, UsageError
from .files import check_writable, short_hash
from .optim import registry
from .options import Cluster, Execution, RecipeOptions, RunOptions, as_dict, at_least, plain, takes, typed
from .parsing import parse_call
from .progress import interrupt_on_signal, note, step_progress, stop_on_signal
from .results import Folder, Run, Study
from .study import StudyConfig, launch
from .study.display import study_progress
from .study.grid import split_settings
from .study.search import check_search
from .tasks import Task
from .training import Options, RunConfig, RunFolder, resolve
from .training import train as run_training
from .training.config import usual_precision
from .training.distributed import choose_device

TaskLike = str | type[Task] | Task
MethodLike = str | Callable[..., torch.optim.Optimizer]
Rates = Sequence[float] | Mapping[Any, Sequence[float]]  # learning rates for all methods, or by method
Search = Sequence[str] | Mapping[str, tuple[float, float] | None]


# ---------------------------------------------------------------- one run


def plan_run(
    task: TaskLike,
    method: MethodLike,
    settings: dict[str, Any] | None,
    run: RunOptions,
    recipe: RecipeOptions,
    device: str | None = None,
) -> RunConfig:
    """Return the config of a run, with every default filled in."""
    name, own_of_task = tasks.name_of(task)
    text = registry.name_of(method)
    method_name, own = parse_call(text)
    of_method, of_task = split_settings(name, [text], settings or {})
    given = as_dict(run) | recipe.given()
    if given["lr"] is None:
        given["lr"] = tasks.middle_rate(name, method_name)
    return resolve(
        name, method_name, method_settings={**of_method, **own}, task_settings={**own_of_task, **of_task},
        device=choose_device(device), processes=ranks(), **given,
    )  # fmt: skip


def default_folder(config: RunConfig) -> Path:
    """Return the default folder of a run, runs/<task>-<method>-<hash of the config>."""
    return Path("runs") / f"{file_name(config.task)}-{file_name(config.method)}-{config.hash}"


def file_name(name: str) -> str:
    """Return the name of a task or a method as it is used in folder names.

    >>> file_name("/home/me/my_task.py:MyTask")
    'my_task.py-MyTask'
    """
    return name.rpartition("/")[2].replace(":", "-")


@takes(RunOptions, RecipeOptions, Execution)
def train(
    task: TaskLike,
    method: MethodLike = "sngm",
    *,
    settings: dict[str, Any] | None = None,
    out: Folder | None = None,
    restart: bool = False,
    checkpoint_every: int | None = None,
    track: str | None = None,
    progress: bool = True,
    runoptions: RunOptions,
    recipeoptions: RecipeOptions,
    execution: Execution,
) -> Run:
    """Train a model once. The same call resumes a stopped run, and loads a finished run.

    Args:
        task: a task name, a :class:`sngm.Task` class or instance, or "file.py:Class".
        method: a method name, a name with settings such as "sngm(momentum=0.8)", an optimizer class, or a function
            ``(params, lr) -> optimizer``.
        (options)
        settings: settings of the method or the task, as a dict.
        out: folder for the run's files. Default: runs/<task>-<method>-<hash of the config>.
        restart: delete the results of this run in the folder, and train from the start.
        checkpoint_every: steps between checkpoints. Default: about once a minute.
        track: also write to "tensorboard", "wandb" or "mlflow".
        progress: show a progress bar.

    Returns:
        The run, which has finished or diverged.

    Raises:
        sngm.errors.Interrupted: the run was stopped by Ctrl-C; the same call resumes it.
    """
    config = plan_run(task, method, settings, runoptions, recipeoptions, execution.device)
    folder = default_folder(config) if out is None else _folder(out)
    options = Options(**as_dict(execution), restart=restart, checkpoint_every=checkpoint_every, track=track)
    run = run_config(config, folder, options, progress)
    if run.status == "diverged":
        warnings.warn(f"the run diverged: {run.record.get('error', 'the loss is NaN or infinite')}", stacklevel=3)
    return run


def run_config(config: RunConfig, folder: Path, options: Options, progress: bool) -> Run:
    """Train the run that a config describes, with progress on stderr. After Ctrl-C, the run can be resumed."""
    on_cpu = choose_device(options.device).type == "cpu"
    with step_progress(progress, on_cpu=on_cpu) as show, stop_on_signal() as should_stop:
        record = run_training(config, folder, replace(options, progress=show, should_stop=should_stop))
    return Run(folder, record, options.data_dir)


def load_run(folder: Folder, *, task: Task | type[Task] | None = None, data_dir: Folder | None = None) -> Run:
    """Load a run from its folder.

    Args:
        folder: the folder that ``sngm.train`` or ``sngm train`` wrote.
        task: the task of the run, needed only for ``run.model``, and only if the task cannot be imported from a file or
            package.
        data_dir: the folder that holds the datasets, for a task whose model depends on the data.
    """
    folder = typed("folder", folder, Folder)
    name = None if task is None else tasks.name_of(task)[0]
    RunFolder(Path(folder)).check_exists()
    run = Run(folder, data_dir=None if data_dir is None else Path(data_dir))
    if name is not None and not tasks.is_same(name, run.config.task):
        raise UsageError(f"{folder} holds a run of {run.config.task}; `task` is {name}: another task, or a changed one")
    return run


# ---------------------------------------------------------------- many runs


def plan_study(
    task: TaskLike,
    methods: Sequence[MethodLike],
    batches: Sequence[int] | None,
    lrs: Rates | None,
    seeds: int,
    settings: dict[str, Any] | None,
    recipe: RecipeOptions,
    execution: Execution,
    cluster: Cluster,
    search: Search | None = None,
    trials: int | None = None,
) -> StudyConfig:
    """Return the config of a study, with every default filled in."""
    by_method = {registry.name_of(key): one for key, one in lrs.items()} if isinstance(lrs, Mapping) else {"": lrs}
    batches, grids = plain(batches), {method: plain(grid) for method, grid in by_method.items()}
    for name, values in (("methods", methods), ("batches", batches), *(("lrs", grid) for grid in grids.values())):
        optional = values is None and name != "methods"
        if isinstance(values, str) or not (optional or isinstance(values, Sequence)):
            raise TypeError(f"{name} must be a list, got {values!r}")
        if values is not None and not values:
            raise UsageError(f"`{name}` is empty; give at least one, or leave it out")
    if any(lr is None for grid in grids.values() for lr in grid or ()):
        raise UsageError("`lrs` must hold numbers > 0, got None")
    for batch in batches or ():
        if not at_least(batch, 1):
            raise UsageError(f"`batches` must hold whole numbers >= 1, got {batch!r}")
    if trials is not None and search is None:
        raise UsageError("`trials` is the number of points of a search; give `search` too, such as lr,weight_decay")
    name, own_of_task = tasks.name_of(task)
    cls = tasks.find(name)
    names = [registry.name_of(method) for method in methods]
    of_methods, of_task = split_settings(name, names, settings or {})
    sizes = tuple(cls.batches if batches is None else batches)
    given = recipe.given()
    epochs = given.pop("epochs", cls.epochs)
    there = cluster.there(execution).device
    device = torch.device(there) if cluster.remote and there else choose_device(there)  # this machine may have no GPU
    usual = usual_precision(name, sizes[0], device)
    if usual != "float32":  # stored in the config, so that a study does not mix runs on a CPU and on a GPU
        given.setdefault("precision", usual)
    rates = {method: tuple(grid) for method, grid in grids.items() if grid is not None}
    return StudyConfig(
        task=name, methods=tuple(names), batches=sizes, seeds=seeds, epochs=epochs,
        lrs=rates if isinstance(lrs, Mapping) else rates.get(""),
        method_settings=of_methods, task_settings={**own_of_task, **of_task}, settings=given,
        search={} if search is None else check_search(search, trials), trials=trials,
    )  # fmt: skip


def _folder(out: Folder) -> Path:
    if not str(out):
        raise UsageError("`out` is empty; name a folder, or leave it out")
    return Path(out)


def study_folder(config: StudyConfig) -> Path:
    """Return the default folder of a study, runs/compare-<task>-<hash of the config>."""
    return Path("runs") / f"compare-{file_name(config.task)}-{short_hash(config.identity())}"


@takes(RecipeOptions, Execution, Cluster)
def compare(
    task: TaskLike = "digits",
    methods: Sequence[MethodLike] = ("msgd", "lars", "sngm"),
    batches: Sequence[int] | None = None,
    *,
    lrs: Rates | None = None,
    search: Search | None = None,
    trials: int | None = None,
    seeds: int = 3,
    settings: dict[str, Any] | None = None,
    out: Folder | None = None,
    jobs: int | None = None,
    track: str | None = None,
    progress: bool = True,
    recipeoptions: RecipeOptions,
    execution: Execution,
    cluster: Cluster,
) -> Study:
    """Compare methods across batch sizes. The same call resumes a study, and repeats no finished run.

    For each method and batch size, the same number of learning rates is tried, and the best is chosen on a validation
    split. With the best learning rate, one model per seed is trained on the whole training set and tested.

    Args:
        task: a task name, a :class:`sngm.Task` class or instance, or "file.py:Class".
        methods: method names, names with settings such as "sngm(weight_decay=8e-4)", optimizer classes, or functions
            ``(params, lr) -> optimizer``.
        batches: global batch sizes. Default: the batch sizes of the task.
        lrs: learning rates to try, as a list for all methods or a dict of lists by method. Default: the task's
            learning rates for each method.
        search: settings to search instead of trying a grid of learning rates. Give a list with some of "lr",
            "weight_decay", "momentum" and "warmup", or a dict with a range for each (None for its default range), as
            in ``{"lr": (0.01, 1), "weight_decay": None}``.
        trials: number of quasi-random combinations that a search tries, the same for every method and batch size.
        seeds: number of runs, with different seeds, over which each result is averaged.
        (options)
        settings: settings of the methods or the task, as a dict.
        out: folder for the study's files. Default: runs/compare-<task>-<hash of the config>.
        jobs: number of runs in parallel. Default: one per CPU core. On a GPU the default is 1, or 4 if all batches are
            at most 128 and NVIDIA's Multi-Process Service is running.
        track: also write to "tensorboard", "wandb" or "mlflow", with all runs in one group.
        progress: show a table of the runs as they finish.

    Raises:
        sngm.errors.Failed: some runs failed. The other runs are finished; the same call repeats only the failed runs.
        sngm.errors.Interrupted: the study was stopped by Ctrl-C; the same call resumes it.
    """
    config = plan_study(task, methods, batches, lrs, seeds, settings, recipeoptions, execution, cluster, search, trials)
    folder = study_folder(config) if out is None else _folder(out)
    options = Options(**as_dict(execution), track=track)
    study, failed = run_study(config, folder, options, jobs=jobs, progress=progress, cluster=cluster)
    if failed:
        raise failure(failed)
    return study


Failures = list[tuple[RunConfig, dict[str, Any]]]


def run_study(
    config: StudyConfig, folder: Path, options: Options, *, jobs: int | None, progress: bool, cluster: Cluster
) -> tuple[Study, Failures]:
    """Train the unfinished runs of a study; return the study, and a pair (config, record) for each failed run."""
    check_writable(folder)
    with study_progress(progress) as show, interrupt_on_signal():
        try:
            done = launch.compare(config, folder, options=options, jobs=jobs, show=show, cluster=cluster)
        except KeyboardInterrupt:
            raise Interrupted(f"finished runs are in {folder}; the same command resumes") from None
    if progress and done.repeated:
        note(f"{done.repeated} of {len(done.done)} runs were finished already, in {folder}")
    return Study(folder), done.failed


def failure(failed: Failures) -> Failed:
    """Return the exception that reports failed runs."""
    config, record = failed[0]
    count = f"{len(failed)} runs failed, the first" if len(failed) > 1 else "1 run failed,"
    error = Failed(
        f"{count} {config.label} at batch {config.batch}: {record['error']}; finished runs are kept, and the same "
        "command repeats only those that failed"
    )
    error.add_note(record["traceback"])  # the traceback of the worker process
    return error


def load_study(folder: Folder) -> Study:
    """Load a study from its folder."""
    return Study(typed("folder", folder, Folder))
