"""Advise on a batch size and a learning rate, from Python."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import tasks
from .advice.recipe import RECIPES
from .api import TaskLike, run_config
from .errors import UsageError
from .files import check_folder, read_json, short_hash
from .measure import Measurement, teller
from .options import BudgetOptions, Execution, as_dict, takes
from .parsing import set_flags
from .progress import note, step_progress
from .results import Folder
from .training import Options, RunConfig
from .training.distributed import choose_device


@takes(BudgetOptions)
def advise(
    task: TaskLike | Path | None = None,
    *,
    from_sgd: Mapping[str, Any] | None = None,
    from_adamw: Mapping[str, Any] | None = None,
    from_spectral: Mapping[str, Any] | None = None,
    to_batch: int | None = None,
    pilot_steps: int | None = None,
    last_batch: str | None = None,
    verify: bool = False,
    seeds: int | None = None,
    settings: dict[str, Any] | None = None,
    out: Folder | None = None,
    data_dir: Folder | None = None,
    device: str | None = None,
    progress: bool = True,
    budgetoptions: BudgetOptions,
) -> Measurement:
    """Advise on batch size and learning rate.

    Give `from_sgd`, `from_adamw` or `from_spectral` the settings that you train with now, called a recipe. Then the
    result says how far the batch can grow and what to change. It has the keys "answer" (a sentence), "lr",
    "weight_decay", "batch", "diff" (the changes to your own training loop) and "command" (trains with the advised
    settings). With `gradients` instead of a recipe, the result says how large a batch each method's error bound allows.
    Each number is marked as given, measured, theory or rule of thumb. :func:`sngm.advise_model` gives advice on a
    recipe without a task.

    Args:
        task: a task name, a :class:`sngm.Task` class or instance, "file.py:Class", or a folder that `probe` wrote.
        from_sgd: the SGD recipe, such as ``dict(lr=0.1, batch=128, weight_decay=1e-4, momentum=0.9, epochs=160)``.
        from_adamw: the AdamW recipe, such as ``dict(lr=1e-3, batch=64, weight_decay=0.01, epochs=30)``.
        from_spectral: the recipe of spectral SNGM, such as ``dict(lr=0.02, batch=1024, weight_decay=0.5)``.
        to_batch: the larger batch size. Default: twice the batch size of the recipe.
        last_batch: what an epoch of the larger batch does with the samples that fill no whole batch: "drop" (default)
            or "keep", as in `train`.
        verify: train with the recipe and with the advised settings, and compare the results. With `from_sgd`, also
            train SGD at the larger batch with the learning rate scaled linearly.
        seeds: number of runs that `verify` makes with each of these settings. Default: 3.
        (options)
        pilot_steps: end the pilot run, the short training that measures the gradient, after this many steps.
        settings: settings of the task, as a dict.
        out: folder for the report page and advice.json. Default: neither is written.
        data_dir: folder that holds the datasets.
        device: cpu, cuda or cuda:1. Default: the GPU if there is one.
        progress: print the cost of the pilot run, and show a progress bar.
    """
    execution = Execution(device=device, data_dir=None if data_dir is None else Path(data_dir))
    recipes = {"msgd": from_sgd, "adamw": from_adamw, "spectral-sngm": from_spectral}
    asked = Asked(task, recipes, to_batch, budgetoptions, pilot_steps, settings, verify, seeds, last_batch)
    check_advice(asked)
    return advise_into(None if out is None else Path(out), asked, execution, progress)


def advise_model(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    loader: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    *,
    to_batch: int | None = None,
    steps: int | None = None,
) -> Measurement:
    """Say whether the batch of your own training loop can grow, and what to change in it.

    Copies of model and optimizer are trained for some steps, to measure gradient norms and the gradient noise scale.
    The copies use the learning rate from before any scheduler changed it (with OneCycleLR, the highest learning rate).
    Your own model and optimizer are not changed.

    Args:
        model: your model, on its device, untrained or partly trained.
        loss_fn: returns the mean loss of a batch, such as
            ``lambda model, batch: cross_entropy(model(batch[0]), batch[1])``.
        loader: your DataLoader, or any iterable of batches.
        optimizer: your optimizer, which must be SGD, Adam, AdamW or :class:`SpectralSNGM`.
        to_batch: the larger batch size. Default: twice the batch size of the loader.
        steps: the number of steps to train the copy. Default: two epochs, but at most 200 steps. The measured norm is
            most accurate with an epoch or more.

    Returns:
        A mapping with "answer", "lr", "weight_decay", "batch" and "diff". Printing it shows the advice as text.

    >>> x, y = torch.randn(512, 8), torch.randn(512, 1)
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> loader = list(zip(x.split(32), y.split(32)))
    >>> advice = advise_model(model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), loader, sgd)
    >>> advice["batch"]
    64
    """
    from .advice.model import carry_model
    from .advice.text import in_words

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # every call then uses the same batches and gives the same advice
        found = carry_model(model, loss_fn, loader, optimizer, to_batch, steps)
    return Measurement(found | _numbers_of(found), in_words(found))


class Asked(NamedTuple):
    """The arguments of `advise`."""

    task: TaskLike | Path | None
    recipes: Mapping[str, Mapping[str, Any] | None]
    """The recipe of each method in `advice.recipe.RECIPES`, or None."""
    to_batch: int | None
    budget: BudgetOptions
    pilot_steps: int | None
    settings: dict[str, Any] | None
    verify: bool = False
    seeds: int | None = None
    last_batch: str | None = None

    @property
    def recipe(self) -> tuple[str, Mapping[str, Any]] | None:
        """The method of the recipe, and the recipe itself; None if there is no recipe."""
        return next(((method, value) for method, value in self.recipes.items() if value is not None), None)


def advise_into(
    folder: Path | None,
    asked: Asked,
    execution: Execution,
    progress: bool,
    show: Callable[[Measurement], None] = lambda advice: None,
) -> Measurement:
    """Return advice for arguments that `check_advice` accepts, and write it into `folder`, if given.

    If `asked.verify`, also call `show` with the advice, and then verify the advice by training.
    """
    from .advice.page import write

    if folder is not None:
        check_folder(folder, "advice.json")
    found = advice_for(asked, execution, progress)
    if folder is not None:
        write(folder, dict(found))
    if asked.verify:
        show(found)
        found = verified(found, folder or Path("runs"), asked.seeds or SEEDS, execution, progress)
        if folder is not None:
            write(folder, dict(found))
    return found


def advice_for(asked: Asked, execution: Execution, progress: bool) -> Measurement:
    """Return advice from a pilot run, from a folder that `probe` wrote, or from given numbers."""
    from .advice.text import in_words

    if asked.task is None:
        found = _from_numbers(asked.budget)
    elif isinstance(asked.task, (str, Path)) and Path(asked.task).is_dir():
        found = _of_probe(str(asked.task), _pilot_in(Path(asked.task)), asked.budget.gradients)
    else:
        found = _from_task(asked, execution, progress)
    return Measurement(found | _numbers_of(found), in_words(found))


def _from_task(asked: Asked, execution: Execution, progress: bool) -> dict[str, Any]:
    """Return advice from a pilot run of a task."""
    from .advice import Recipe, carry_recipe
    from .probes import pilot
    from .study.grid import split_settings
    from .training import resolve

    task, own = tasks.name_of(asked.task)  # type: ignore[arg-type]
    tasks.find(task)
    settings = {**own, **split_settings(task, [], asked.settings or {})[1]}
    device = choose_device(execution.device)
    with step_progress(progress, on_cpu=device.type == "cpu") as show:
        how: dict[str, Any] = {"device": execution.device, "data_dir": execution.data_dir}
        how |= {"say": teller(progress), "progress": show}
        if asked.recipe is None:
            lr = tasks.middle_rate(task, "msgd")
            config = resolve(task, "msgd", lr=lr, epochs=1, device=device, task_settings=settings)
            return _of_probe(task, pilot.along(config, steps=asked.pilot_steps, **how), asked.budget.gradients)
        method, given = asked.recipe
        recipe = Recipe.of(given, method)
        how |= {"task_settings": settings, "pilot_steps": asked.pilot_steps, "last_batch": asked.last_batch}
        found = carry_recipe(task, recipe, asked.to_batch, **how)
    return found if asked.verify else {**found, "check": check_command(asked, execution.data_dir)}


def _numbers_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the advised numbers by name; {} if the advice is not on a recipe."""
    if found["kind"] != "recipe":
        return {}
    values = {fact["name"].replace(" ", "_"): fact["value"] for fact in found["facts"]}
    return {"lr": values.pop("learning_rate"), **values}


def check_command(asked: Asked, data_dir: Path | None) -> str:
    """Return the Python call or the shell command that verifies advice on a recipe."""
    assert asked.recipe is not None
    method, given = asked.recipe
    name = RECIPES[method]
    if not isinstance(asked.task, str):
        to_batch = "" if asked.to_batch is None else f", to_batch={asked.to_batch}"
        last_batch = "" if asked.last_batch is None else f", last_batch={asked.last_batch!r}"
        return f"sngm.advise(task, {name}={dict(given)!r}{to_batch}{last_batch}, verify=True)"
    whole = {key: int(value) for key, value in given.items() if isinstance(value, float) and value.is_integer()}
    recipe = ",".join(f"{key}={value}" for key, value in {**given, **whole}.items())  # batch=1e3 as 1000
    words = ["sngm", "advise", asked.task, f"--{name.replace('_', '-')}", recipe]
    words += [] if asked.to_batch is None else ["--to-batch", str(asked.to_batch)]
    words += [] if asked.last_batch is None else ["--last-batch", asked.last_batch]
    words += [] if asked.pilot_steps is None else ["--pilot-steps", str(asked.pilot_steps)]
    words += set_flags({}, asked.settings or {})
    words += [] if data_dir is None else ["--data-dir", str(data_dir)]
    return shlex.join([*words, "--verify"])


SEEDS = 3  # default number of runs of each config in a verification


def verified(found: Measurement, folder: Path, seeds: int, execution: Execution, progress: bool) -> Measurement:
    """Train with every config in ``found["configs"]`` and every seed, and return the advice with a comparison added.

    The configs are those of the recipe, of the advised settings and, for an SGD recipe, of SGD at the larger batch with
    a linearly scaled learning rate. The runs are stored in a subfolder of `folder` whose name contains a hash of the
    configs.
    """
    from .advice.verify import compare_runs

    configs = [RunConfig.from_dict(config) for config in found["configs"]]
    folder = folder / f"verify-{short_hash(found['configs'])}"
    for config, seed in itertools.product(configs, range(seeds)):
        own = replace(config, seed=seed)
        if progress:
            note(f"verify: {own.label} at batch {own.batch}, lr {own.lr:g}, seed {seed}")
        run_config(own, folder / f"{own.method}-b{own.batch}-{own.hash}", Options(**as_dict(execution)), progress)
    said, page = compare_runs(folder, [(config.label, config.batch) for config in configs])
    pages = {"verified_report": str(page), "verified_page": f"{folder.name}/{page.name}"}  # the second is a link
    return Measurement({**found, "verified": said, **pages}, f"{found}\n\nVerified: {said}")


def check_advice(asked: Asked) -> None:
    """Raise UsageError for arguments that are invalid or cannot be combined, before anything is run."""
    task, budget, pilot_steps, settings = asked.task, asked.budget, asked.pilot_steps, asked.settings
    gradients, recipe = budget.gradients, asked.recipe
    constants = {name: value for name, value in as_dict(budget).items() if name != "gradients" and value is not None}
    is_folder = isinstance(task, (str, Path)) and Path(task).is_dir()
    if sum(value is not None for value in (*asked.recipes.values(), gradients)) != 1:
        raise UsageError(f"give one of {', '.join(f'`{name}`' for name in RECIPES.values())} and `gradients`")
    if recipe is None and (asked.to_batch is not None or asked.last_batch is not None or asked.verify):
        names = " or ".join(f"`{name}`" for name in RECIPES.values())
        raise UsageError(f"`to_batch`, `last_batch` and `verify` need a recipe: {names}")
    if asked.seeds is not None and asked.seeds < 1:
        raise UsageError(f"`seeds` must be at least 1, got {asked.seeds}")
    if asked.seeds is not None and not asked.verify:
        raise UsageError("`seeds` is the number of runs that `verify` makes: give `verify` too")
    if recipe is not None and is_folder:
        raise UsageError(f"`{RECIPES[recipe[0]]}` needs a task, whose gradient is measured, and not a folder")
    if pilot_steps is not None and pilot_steps < 1:
        raise UsageError(f"`pilot_steps` must be at least 1, got {pilot_steps}")
    if gradients is not None and not 1 <= gradients < math.inf:
        raise UsageError(f"`gradients` must be a finite number >= 1, got {gradients:g}")
    if settings and (task is None or is_folder):
        raise UsageError("`settings`: there is no task to set them for")
    if pilot_steps is not None and (task is None or is_folder):
        raise UsageError(
            "`pilot_steps`: " + ("there is no pilot without a task" if task is None else "the pilot has been run")
        )
    if task is not None:
        if constants:
            names = ", ".join(f"`{name}`" for name in constants)
            raise UsageError(f"{names}: given without a task only; the pilot of a task measures them")
        return
    if recipe is not None:
        raise UsageError(f"`{RECIPES[recipe[0]]}` needs a task, whose gradient is measured")
    if missing_names := [f"`{name}`" for name in ("gap", "L", "sigma") if name not in constants]:
        raise UsageError(f"without a task {' and '.join(missing_names)} must be given")
    if budget.L == 0 and budget.gap != 0 and not (budget.lam or 0) > 0:  # also for -0.0
        raise UsageError("`L` must be > 0 where `gap` is above 0 and `lam` is 0, got 0: any learning rate would do")


def _from_numbers(budget: BudgetOptions) -> dict[str, Any]:
    from .advice import Constants
    from .advice.budget import advise_budget

    beta = 0.9 if budget.beta is None else budget.beta
    # with lambda, L is None, because Theorem 1 and MSGD's bound do not contain lambda
    smooth: dict[str, Any] = {"L": None, "relaxed": ((budget.lam, budget.L),)} if budget.lam else {"L": budget.L}
    assert budget.gap is not None
    assert budget.sigma is not None
    constants = Constants(budget.gap, budget.sigma, beta, **smooth)
    return advise_budget(budget.gradients or 0.0, constants, measured=False)


def _pilot_in(folder: Path) -> dict[str, Any]:
    """Return the record of the pilot in a folder that `probe` wrote."""
    if not (folder / "probe.json").exists():
        raise UsageError(f"{folder} holds no probe.json: name a task, or a folder that sngm probe wrote")
    found = read_json(folder / "probe.json")
    if not isinstance(found, dict) or found.get("kind") != "pilot":
        raise UsageError(f"{folder} holds probes of runs, and advice needs those of a task")
    return found


def _of_probe(what: str, found: dict[str, Any], gradients: float | None) -> dict[str, Any]:
    from .advice import Constants
    from .advice.budget import advise_budget

    made = {key: found.get(key) for key in ("versions", "hardware", "commit")}
    return {"task": what, **advise_budget(gradients or 0.0, Constants.of_probe(found), measured=True), **made}
