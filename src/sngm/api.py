"""Train, compare, probe and advise from Python; the command line calls these functions."""

from __future__ import annotations

import functools
import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from . import report, tasks
from .environment import ranks
from .errors import Failed, Interrupted, UsageError
from .files import check_writable, short_hash
from .optim import registry
from .options import Cluster, Execution, RecipeOptions, RunOptions, as_dict, at_least, takes
from .parsing import parse_call
from .progress import in_words, interrupt_on_signal, note, step_progress, stop_on_signal, study_progress
from .study import StudyConfig, launch
from .study.executors import device_of_runs
from .study.grid import split_settings
from .study.search import check_search
from .tasks import Task
from .training import Options, RunConfig, RunFolder, load_model, resolve
from .training import train as run_training
from .training.config import usual_precision
from .training.distributed import choose_device
from .training.validation import config_of

Folder = str | PathLike[str]
TaskLike = str | type[Task] | Task
MethodLike = str | Callable[..., torch.optim.Optimizer]
Rates = Sequence[float] | Mapping[Any, Sequence[float]]  # by method
Search = Sequence[str] | Mapping[str, tuple[float, float] | None]


class Run:
    """One training: its folder, its result and its model."""

    def __init__(self, folder: Folder, record: dict[str, Any] | None = None, data_dir: Path | None = None) -> None:
        self.folder = Path(folder)
        self.record = RunFolder(self.folder).read() if record is None else record
        self._data_dir = data_dir

    @property
    def status(self) -> str:
        """ "finished", "diverged", "interrupted", "failed" or "running"."""
        return str(self.record["status"])

    @property
    def result(self) -> dict[str, float]:
        """Scores of the trained model, such as ``run.result["test_accuracy"]``; empty if the run did not finish."""
        return dict(self.record["result"])

    @property
    def config(self) -> RunConfig:
        return config_of(self.record, self.folder / "run.json")

    @property
    def history(self) -> list[dict[str, Any]]:
        """The metrics of each epoch."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    @functools.cached_property
    def model(self) -> nn.Module:
        """The trained model, in evaluation mode on the CPU."""
        return load_model(self.folder, data_dir=self._data_dir)

    def __repr__(self) -> str:
        config = self.record["config"]
        scores = in_words(self.result) or self.status
        return f"Run({self.record['label']}, batch {config['batch']}, lr {config['lr']:g}: {scores}; {self.folder})"

    def _repr_html_(self) -> str:
        config = self.record["config"]
        rows = {"task": config["task"], "method": self.record["label"], "status": self.status}
        rows |= {key: config[key] for key in ("lr", "batch", "epochs", "seed")}
        rows |= {key.replace("_", " "): f"{value:.4g}" for key, value in self.result.items() if value is not None}
        return _table([[key, str(value)] for key, value in {**rows, "folder": self.folder}.items()])


class Best(NamedTuple):
    """The best method at a batch size: `mean` of the metric over `n` seeds, give or take `half_width` (95 %)."""

    method: str
    batch: int
    lr: float | None
    mean: float | None
    half_width: float | None
    n: int


class Study:
    """A comparison: its folder, its runs and its table."""

    def __init__(self, folder: Folder) -> None:
        self.folder = Path(folder)
        self.summary = report.summarise(self.folder)

    @functools.cached_property
    def runs(self) -> list[Run]:
        """All runs, also those that chose learning rates."""
        return [Run(path.parent) for path in sorted((self.folder / "runs").glob("*/run.json"))]

    def table(self) -> str:
        """The results as a Markdown table, with mean and 95 % interval over seeds."""
        return report.table(self.summary)

    def answer(self) -> str:
        """Which method is best at the largest batch size, and how significant the difference is."""
        return self.summary.answer()

    def best(self, batch: int | None = None) -> Best:
        """The method with the best mean at a batch size, by default the largest."""
        batch = self.summary.batches[-1] if batch is None else batch
        if batch not in self.summary.batches:
            raise ValueError(f"batch must be one of {', '.join(map(str, self.summary.batches))}, got {batch!r}")
        ranking = self.summary.ranking(batch)
        if not ranking:
            raise ValueError(f"no method has a result at batch {batch}: every run failed or diverged")
        cell = ranking[0]
        return Best(cell.method, cell.batch, cell.lr, cell.mean, cell.half_width, cell.n)

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row for each run."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_frame() needs pandas: pip install pandas") from error
        keys = ("task", "method", "batch", "lr", "seed", "part", "epochs")
        rows = [
            {**{key: run.record["config"][key] for key in keys}, "method": run.record["label"], "status": run.status}
            | run.result
            | {"seconds": run.record.get("timing", {}).get("seconds"), "folder": str(run.folder)}
            for run in self.runs
        ]
        return pandas.DataFrame(rows)

    def report(self, path: Folder | None = None) -> Path:
        """Write the report, one HTML page that opens offline; by default report.html in the study's folder."""
        return report.write(self.folder, None if path is None else Path(path))

    def __repr__(self) -> str:
        return f"Study({self.folder}): {self.answer()}\n\n{self.table()}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.answer())}</p>" + _table(report.rows(self.summary), header=True)


def _table(rows: list[list[str]], header: bool = False) -> str:
    lines = []
    for i, row in enumerate(rows):
        cell = "th" if header and i == 0 else "td"
        lines.append("<tr>" + "".join(f"<{cell}>{html.escape(text)}</{cell}>" for text in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


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
    of_task = {**own_of_task, **of_task}
    of_method = {**of_method, **own}
    where: dict[str, Any] = {"device": choose_device(device), "processes": ranks()}
    return resolve(name, method_name, method_settings=of_method, task_settings=of_task, **where, **given)


def default_folder(config: RunConfig) -> Path:
    """Return the default folder of a run, runs/<task>-<method>-<hash of the config>."""
    return Path("runs") / f"{file_name(config.task)}-{config.method.replace(':', '-')}-{config.hash}"


def file_name(task: str) -> str:
    """Return the name of a task as it is used in folder names.

    >>> file_name("/home/me/my_task.py:MyTask")
    'my_task.py-MyTask'
    """
    return task.rpartition("/")[2].replace(":", "-")


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
    """Train a model once. The same call resumes a run that was stopped, and loads one that has finished.

    Args:
        task: a name, a :class:`sngm.Task` class or instance, or "file.py:Class".
        method: a name, a name with settings such as "sngm(momentum=0.8)", an optimizer class, or a function
            ``(params, lr) -> optimizer``.
        (options)
        settings: settings of the method or the task, by name.
        out: folder for the records. Default: runs/<task>-<method>-<hash of the config>.
        restart: delete the results of this run in the folder, and train from the start.
        checkpoint_every: steps between checkpoints. Default: about once a minute.
        track: also write to "tensorboard", "wandb" or "mlflow".
        progress: show a progress bar.

    Returns:
        The finished or diverged run.

    Raises:
        sngm.errors.Interrupted: stopped by Ctrl-C; the same call resumes.
    """
    config = plan_run(task, method, settings, runoptions, recipeoptions, execution.device)
    folder = default_folder(config) if out is None else Path(out)
    given = as_dict(execution) | {"restart": restart, "checkpoint_every": checkpoint_every, "tracker": track}
    return run_config(config, folder, Options(**given), progress)


def run_config(config: RunConfig, folder: Path, options: Options, progress: bool) -> Run:
    """Train the run of a config, with progress on stderr; Ctrl-C stops it and keeps its progress."""
    on_cpu = choose_device(options.device).type == "cpu"
    with step_progress(progress, on_cpu=on_cpu) as show, stop_on_signal() as should_stop:
        record = run_training(config, folder, replace(options, progress=show, should_stop=should_stop))
    return Run(folder, record, options.data_dir)


def load_run(folder: Folder, *, task: Task | type[Task] | None = None, data_dir: Folder | None = None) -> Run:
    """Load a run from its folder.

    Args:
        folder: the folder that ``sngm.train`` or ``sngm train`` wrote.
        task: the task of the run, if it is not in a file or package; only ``run.model`` needs it.
        data_dir: the folder that holds datasets, for a task whose model depends on them.
    """
    if task is not None:
        tasks.name_of(task)
    if not (Path(folder) / "run.json").exists():
        raise UsageError(f"{folder} holds no run (no run.json)")
    return Run(folder, data_dir=None if data_dir is None else Path(data_dir))


# ---------------------------------------------------------------- many runs


def plan_study(
    task: TaskLike,
    methods: Sequence[MethodLike],
    batches: Sequence[int] | None,
    lrs: Rates | None,
    seeds: int,
    settings: dict[str, Any] | None,
    recipe: RecipeOptions,
    device: str | torch.device | None = None,
    search: Search | None = None,
    trials: int | None = None,
) -> StudyConfig:
    """Return the config of a study, with every default filled in. A torch.device may be one of another machine."""
    by_method = {registry.name_of(method): grid for method, grid in lrs.items()} if isinstance(lrs, Mapping) else None
    grids: list[Any] = [lrs] if by_method is None else list(by_method.values())
    for name, values in (("methods", methods), ("batches", batches), *(("lrs", grid) for grid in grids)):
        if isinstance(values, str) or not isinstance(values, (Sequence, type(None))):
            raise TypeError(f"{name} must be a list, got {values!r}")
        if values is not None and not values:
            raise UsageError(f"`{name}` is empty; give at least one, or leave it out")
    if not at_least(seeds, 1):
        raise UsageError(f"`seeds` must be the number of runs of each result, such as 3, got {seeds!r}")
    for batch in batches or ():
        if not at_least(batch, 1):
            raise UsageError(f"`batches` must hold whole numbers >= 1, got {batch!r}")
    if settings is not None and not isinstance(settings, dict):
        raise TypeError(f"settings must be a dict, got {settings!r}")
    if trials is not None and search is None:
        raise UsageError("`trials` is the number of points of a search; give `search` too, such as lr,weight_decay")
    name, own_of_task = tasks.name_of(task)
    cls = tasks.find(name)
    names = [registry.name_of(method) for method in methods]
    of_methods, of_task = split_settings(name, names, settings or {})
    sizes = tuple(cls.batches if batches is None else batches)
    given = recipe.given()
    epochs = given.pop("epochs", cls.epochs)
    usual = usual_precision(name, sizes[0], device if isinstance(device, torch.device) else choose_device(device))
    if usual != "float32":  # part of the study, so that runs on a CPU and on a GPU do not mix
        given.setdefault("precision", usual)
    return StudyConfig(
        task=name, methods=tuple(names), batches=sizes, seeds=seeds, epochs=epochs,
        lrs=tuple(grids[0] or ()) or None if by_method is None else {k: tuple(grid) for k, grid in by_method.items()},
        method_settings=of_methods, task_settings={**own_of_task, **of_task}, settings=given,
        search={} if search is None else check_search(search, trials), trials=trials,
    )  # fmt: skip


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
    split. With the best one, a model is trained on the whole training set for every seed, and tested.

    Args:
        task: a name, a :class:`sngm.Task` class or instance, or "file.py:Class".
        methods: names, names with settings such as "sngm(weight_decay=8e-4)", optimizer classes, or functions
            ``(params, lr) -> optimizer``.
        batches: global batch sizes. Default: the task's.
        lrs: learning rates to try: a list for all methods, or a dict of lists by method. Default: the task's for each.
        search: settings to search in place of a grid of learning rates: a list of "lr", "weight_decay", "momentum" and
            "warmup", or a dict with their ranges, as in ``{"lr": (0.01, 1), "weight_decay": None}``.
        trials: number of quasi-random points of the search, the same for every method at every batch size.
        seeds: number of runs, with different seeds, over which each result is averaged.
        (options)
        settings: settings of the methods or the task, by name.
        out: folder for the records. Default: runs/compare-<task>-<hash of the config>.
        jobs: number of runs in parallel. Default: one per CPU core; on a GPU 1, or 4 at batches up to 128 if NVIDIA's
            Multi-Process Service is running.
        track: also write to "tensorboard", "wandb" or "mlflow", as one group.
        progress: show a table of the runs as they finish.

    Raises:
        sngm.errors.Failed: some runs failed. The others are finished; the same call repeats only the failed ones.
        sngm.errors.Interrupted: stopped by Ctrl-C; the same call resumes.
    """
    device = device_of_runs(execution, cluster)
    config = plan_study(task, methods, batches, lrs, seeds, settings, recipeoptions, device, search, trials)
    folder = study_folder(config) if out is None else Path(out)
    options = Options(**as_dict(execution), tracker=track)
    study, failed = run_study(config, folder, options, jobs=jobs, progress=progress, cluster=cluster)
    if failed:
        raise failure(failed)
    return study


Failures = list[tuple[RunConfig, dict[str, Any]]]


def run_study(
    config: StudyConfig, folder: Path, options: Options, *, jobs: int | None, progress: bool, cluster: Cluster
) -> tuple[Study, Failures]:
    """Train the unfinished runs of a study; return the study, and (config, record) of each failed run."""
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
    if "traceback" in record:  # of the worker process
        error.add_note(record["traceback"])
    return error


def load_study(folder: Folder) -> Study:
    """Load a study from its folder."""
    return Study(folder)
