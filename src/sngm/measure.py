"""Probe a task and advise a batch size and learning rate, from Python."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from . import tasks
from .api import Folder, MethodLike, TaskLike, file_name, plan_run
from .errors import UsageError
from .files import check_folder, finite, read_json, results_in, short_hash, write_atomically, write_json
from .options import BudgetOptions, Execution, ProbeOptions, RecipeOptions, RunOptions, as_dict, takes
from .progress import note, step_progress
from .training import RunConfig
from .training.distributed import choose_device


class Measurement(Mapping[str, Any]):
    """What `probe` or `advise` found: a mapping that is shown as a table."""

    def __init__(self, values: dict[str, Any], text: str) -> None:
        self._values, self._text = values, text

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self._text)}</pre>"


# ---------------------------------------------------------------- probe


def are_runs(what: Sequence[Any]) -> bool:
    """Return whether folders of runs are named, and not a task; refuse what is neither."""
    if len(what) == 1 and not isinstance(what[0], (str, Path)):
        return False
    words = [str(word) for word in what]
    if len(words) == 1 and (words[0] in tasks.names() or (":" in words[0] and not Path(words[0]).is_dir())):
        return False
    for word in words:
        if Path(word).is_dir():
            continue
        if len(words) > 1 or "/" in word:
            raise UsageError(
                f"{word} is not a folder of a run" + ("; only one task at a time" if len(words) > 1 else "")
            )
        tasks.find(word)  # refuses it with the names that there are
    return True


def plan_pilot(
    task: TaskLike,
    method: MethodLike,
    settings: dict[str, Any] | None,
    run: RunOptions,
    recipe: RecipeOptions,
    device: str | None,
) -> RunConfig:
    """Return the config of a pilot run: as that of a run, but one epoch by default."""
    once = recipe if recipe.epochs is not None else RecipeOptions(**{**as_dict(recipe), "epochs": 1})
    return plan_run(task, method, settings, run, once, device)


def probe_folder(config: RunConfig, probe: ProbeOptions) -> Path:
    """Return runs/ and a name that says what is in it."""
    return Path("runs") / f"probe-{file_name(config.task)}-{short_hash([config.hash, as_dict(probe)])}"


def probe_task(config: RunConfig, options: ProbeOptions, execution: Execution, progress: bool) -> Measurement:
    """Measure along a pilot run."""
    from .probes import pilot
    from .probes.text import in_words

    with step_progress(progress, on_cpu=choose_device(execution.device).type == "cpu") as show:
        how: dict[str, Any] = {"progress": show, "say": teller(progress)}
        where: dict[str, Any] = {"device": execution.device, "data_dir": execution.data_dir}
        found = pilot.along(config, **as_dict(options), **where, **how)
    return Measurement(found, in_words(found))


def probe_runs(
    folders: Sequence[Folder],
    method: Any,
    probe: ProbeOptions,
    run: RunOptions,
    recipe: RecipeOptions,
    settings: dict[str, Any] | None,
    execution: Execution,
    progress: bool,
) -> Measurement:
    """Measure the last checkpoints of runs; refuse options that only a pilot has."""
    from .probes import pilot
    from .probes.text import in_words

    given = ["method"] * (method is not None) + ["settings"] * bool(settings)
    for options, allowed in ((run, ()), (recipe, ("bn_group",)), (probe, ("samples", "iterations"))):
        given += [f.name for f in fields(options) if f.name not in allowed and getattr(options, f.name) != f.default]
    if given:
        names = ", ".join(f"`{name}`" for name in given)
        raise UsageError(f"{names} set the pilot run of a task; these runs have been made already")
    how: dict[str, Any] = {"samples": probe.samples, "iterations": probe.iterations, "bn_group": recipe.bn_group}
    how |= {"device": execution.device, "data_dir": execution.data_dir, "say": teller(progress)}
    found = pilot.of_runs([str(folder) for folder in folders], **how)
    return Measurement(found, in_words(found))


def teller(wanted: bool) -> Any:
    """Return a function that prints messages to stderr, or one that prints none."""
    return note if wanted else lambda text: None


def write_probe(folder: Path, found: dict[str, Any]) -> None:
    """Write probe.json; of a pilot, also a line per step in steps.jsonl."""
    with results_in(folder):
        if "steps" in found:
            lines = [json.dumps(finite(step), allow_nan=False) + "\n" for step in found["steps"]]
            write_atomically(folder / "steps.jsonl", "".join(lines).encode())
        write_json(folder / "probe.json", {key: value for key, value in found.items() if key != "steps"})


@takes(ProbeOptions, RunOptions, RecipeOptions, Execution)
def probe(
    what: TaskLike | Sequence[Folder],
    method: MethodLike | None = None,
    *,
    settings: dict[str, Any] | None = None,
    out: Folder | None = None,
    progress: bool = True,
    probeoptions: ProbeOptions,
    runoptions: RunOptions,
    recipeoptions: RecipeOptions,
    execution: Execution,
) -> Measurement:
    """Measure the constants of the theory: sigma and the gradient noise scale, L, rho and cos.

    Args:
        what: a task, which is measured along a short pilot run; or a list of folders of runs, which are measured at
            their last checkpoints.
        method: of the pilot run. Default: "msgd".
        (options)
        settings: settings of the method or the task, by name.
        out: folder for probe.json. Default: none is written.
        progress: print what it costs, and each point.

    Returns:
        A mapping; docs/probes.md lists its keys.
    """
    several: list[Any] = list(what) if isinstance(what, (list, tuple)) else [what]
    folder = None if out is None else Path(out)
    if folder is not None:
        check_folder(folder, "probe.json")
    if are_runs(several):
        found = probe_runs(several, method, probeoptions, runoptions, recipeoptions, settings, execution, progress)
    else:
        config = plan_pilot(several[0], method or "msgd", settings, runoptions, recipeoptions, execution.device)
        found = probe_task(config, probeoptions, execution, progress)
    if folder is not None:
        write_probe(folder, dict(found))
    return found


# ---------------------------------------------------------------- advise


@takes(BudgetOptions)
def advise(
    task: TaskLike | Path | None = None,
    *,
    from_sgd: Mapping[str, Any] | None = None,
    to_batch: int | None = None,
    pilot_steps: int | None = None,
    settings: dict[str, Any] | None = None,
    out: Folder | None = None,
    data_dir: Folder | None = None,
    device: str | None = None,
    progress: bool = True,
    budgetoptions: BudgetOptions,
) -> Measurement:
    """Advise on batch size and learning rate.

    With `from_sgd` and `to_batch`, carry an SGD recipe over to SNGM at a larger batch: the result has "lr",
    "weight_decay", "batch" and the "command" to train by. With `gradients`, say how large a batch each method's bound
    allows. Each number says whether it is measured, theory or a rule of thumb.

    Args:
        task: a name, a :class:`sngm.Task` class or instance, "file.py:Class", or a folder that `probe` wrote.
        from_sgd: the SGD recipe, such as ``dict(lr=0.1, batch=128, weight_decay=1e-4, momentum=0.9, epochs=160)``.
        to_batch: batch of SNGM.
        (options)
        pilot_steps: end the pilot run after this many steps.
        settings: settings of the task, by name.
        out: folder for the page and its record. Default: none is written.
        data_dir: folder that holds datasets.
        device: cpu, cuda or cuda:1. Default: the GPU if there is one.
        progress: print the cost, and show a progress bar.
    """
    found = advice_for(
        task, from_sgd, to_batch, budgetoptions, pilot_steps, settings,
        Execution(device=device, data_dir=None if data_dir is None else Path(data_dir)), progress,
    )  # fmt: skip
    if out is not None:
        from .advice.page import write

        check_folder(Path(out), "advice.json")
        write(Path(out), dict(found))
    return found


def advice_for(
    task: TaskLike | Path | None,
    from_sgd: Mapping[str, Any] | None,
    to_batch: int | None,
    budget: BudgetOptions,
    pilot_steps: int | None,
    settings: dict[str, Any] | None,
    execution: Execution,
    progress: bool,
) -> Measurement:
    """Return advice from a pilot run or from numbers."""
    from .advice import Recipe, carry_recipe
    from .advice.text import in_words

    check_advice(task, from_sgd, to_batch, budget, pilot_steps, settings)
    if task is None:
        found = _from_numbers(budget)
    elif isinstance(task, (str, Path)) and Path(task).is_dir():
        found = _from_folder(Path(task), budget.gradients or 0.0)
    else:
        name, own = tasks.name_of(task)  # type: ignore[arg-type]
        tasks.find(name)
        of_task = {**own, **_settings_of(name, settings)}
        on_cpu = choose_device(execution.device).type == "cpu"
        with step_progress(progress, on_cpu=on_cpu) as show:
            how: dict[str, Any] = {"device": execution.device, "data_dir": execution.data_dir}
            how |= {"task_settings": of_task, "say": teller(progress), "progress": show, "pilot_steps": pilot_steps}
            if from_sgd is not None and to_batch is not None:
                found = carry_recipe(name, Recipe.of(from_sgd), to_batch, **how)
            else:
                found = _from_pilot(name, budget.gradients or 0.0, **how)
    return Measurement(found | _numbers_of(found), in_words(found))


def _numbers_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the advised numbers by name, for a recipe."""
    if found["kind"] != "recipe":
        return {}
    values = {fact.name.replace(" ", "_"): fact.value for fact in found["facts"]}
    return {"lr": values.pop("learning_rate"), **values}


def check_advice(
    task: Any,
    from_sgd: Mapping[str, Any] | None,
    to_batch: int | None,
    budget: BudgetOptions,
    pilot_steps: int | None,
    settings: dict[str, Any] | None,
) -> None:
    """Refuse arguments that do not go together, before anything is run."""
    gradients = budget.gradients
    constants = {name: value for name, value in as_dict(budget).items() if name != "gradients" and value is not None}
    is_folder = isinstance(task, (str, Path)) and Path(task).is_dir()
    if (from_sgd is None) == (gradients is None):
        raise UsageError("give either `from_sgd` and `to_batch`, or `gradients`")
    if (from_sgd is None) != (to_batch is None):
        missing = "to_batch" if from_sgd is not None else "from_sgd"
        raise UsageError(f"`from_sgd` and `to_batch` go together; `{missing}` is missing")
    if pilot_steps is not None and pilot_steps < 1:
        raise UsageError(f"`pilot_steps` must be at least 1, got {pilot_steps}")
    if gradients is not None and not 1 <= gradients < math.inf:
        raise UsageError(f"`gradients` must be a finite number >= 1, got {gradients:g}")
    if settings and (task is None or is_folder):
        raise UsageError("`settings`: there is no task to set them for")
    if pilot_steps is not None and (task is None or is_folder):
        raise UsageError(
            "`pilot_steps`: " + ("there is no pilot without a task" if task is None else "it has been run")
        )
    if task is not None:
        if constants:
            names = ", ".join(f"`{name}`" for name in constants)
            raise UsageError(f"{names}: given without a task only; the pilot of a task measures them")
        return
    if from_sgd is not None:
        raise UsageError("`from_sgd` needs a task, whose gradient is measured")
    if missing_names := [f"`{name}`" for name in ("gap", "L", "sigma") if name not in constants]:
        raise UsageError(f"without a task {' and '.join(missing_names)} must be given")
    if budget.L == 0 and budget.gap != 0 and not (budget.lam or 0) > 0:  # -0 too
        raise UsageError("`L` must be > 0 where `gap` is above 0 and `lam` is 0, got 0: any learning rate would do")


def _settings_of(task: str, settings: dict[str, Any] | None) -> dict[str, Any]:
    from .study.grid import split_settings

    return split_settings(task, [], settings or {})[1]


def _from_numbers(budget: BudgetOptions) -> dict[str, Any]:
    from .advice import Constants
    from .advice.budget import advise_budget

    beta = 0.9 if budget.beta is None else budget.beta
    # Theorem 1 and MSGD's bound know no lambda
    smooth: dict[str, Any] = {"L": None, "relaxed": ((budget.lam, budget.L),)} if budget.lam else {"L": budget.L}
    assert budget.gap is not None
    assert budget.sigma is not None
    constants = Constants(budget.gap, budget.sigma, beta, **smooth)
    return advise_budget(budget.gradients or 0.0, constants, measured=False)


def _from_folder(folder: Path, gradients: float) -> dict[str, Any]:
    """Return advice from a folder that `probe` wrote."""
    if not (folder / "probe.json").exists():
        raise UsageError(f"{folder} holds no probe.json: name a task, or a folder that sngm probe wrote")
    found = read_json(folder / "probe.json")
    if not isinstance(found, dict) or found.get("kind") != "pilot":
        raise UsageError(f"{folder} holds probes of runs, and advice needs those of a task")
    return _of_probe(str(folder), found, gradients)


def _from_pilot(
    task: str, gradients: float, *, task_settings: Any, pilot_steps: int | None, **how: Any
) -> dict[str, Any]:
    from .probes import pilot
    from .training import resolve

    device = choose_device(how["device"])
    lr = tasks.middle_rate(task, "msgd")
    config = resolve(task, "msgd", lr=lr, epochs=1, device=device, task_settings=task_settings)
    return _of_probe(task, pilot.along(config, steps=pilot_steps, **how), gradients)


def _of_probe(what: str, found: dict[str, Any], gradients: float) -> dict[str, Any]:
    from .advice import Constants
    from .advice.budget import advise_budget

    made = {key: found.get(key) for key in ("versions", "hardware", "commit")}
    return {"task": what, **advise_budget(gradients, Constants.of_probe(found), measured=True), **made}
