"""Measure gradient noise and curvature of a task or of finished runs, from Python."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from . import tasks
from .api import MethodLike, TaskLike, file_name, plan_run
from .errors import UsageError
from .files import check_folder, finite, results_in, short_hash, write_atomically, write_json
from .options import Execution, ProbeOptions, RecipeOptions, RunOptions, as_dict, takes
from .progress import note, step_progress
from .results import Folder
from .training import RunConfig
from .training.distributed import choose_device


class Measurement(dict[str, Any]):
    """The result of `probe` or `advise`: a dictionary that is shown as readable text."""

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self._text)}</pre>"


def are_runs(what: Sequence[Any]) -> bool:
    """Return True if `what` are run folders, False if it is a task; raise UsageError for anything else."""
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
        tasks.find(word)  # raises an error that lists the known names
    return True


def plan_pilot(
    task: TaskLike,
    method: MethodLike,
    settings: dict[str, Any] | None,
    run: RunOptions,
    recipe: RecipeOptions,
    device: str | None,
) -> RunConfig:
    """Return the config of a pilot run, a short run for measurements. By default it has one epoch."""
    once = recipe if recipe.epochs is not None else RecipeOptions(**{**as_dict(recipe), "epochs": 1})
    return plan_run(task, method, settings, run, once, device)


def probe_folder(config: RunConfig, probe: ProbeOptions) -> Path:
    """Return the default folder of a probe, runs/probe-<task>-<hash of config and options>."""
    return Path("runs") / f"probe-{file_name(config.task)}-{short_hash([config.hash, as_dict(probe)])}"


def probe_task(config: RunConfig, options: ProbeOptions, execution: Execution, progress: bool) -> Measurement:
    """Measure gradient noise and curvature of a task along a pilot run."""
    from .probes import pilot
    from .probes.text import in_words

    with step_progress(progress, on_cpu=choose_device(execution.device).type == "cpu") as show:
        where: dict[str, Any] = {"device": execution.device, "data_dir": execution.data_dir}
        found = pilot.along(config, **as_dict(options), **where, progress=show, say=teller(progress))
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
    """Measure gradient noise and curvature at the last checkpoints of runs.

    Raises:
        UsageError: an option was set that applies only to a pilot run.
    """
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
    """Return a function that prints messages to stderr, or, if not `wanted`, does nothing."""
    return note if wanted else lambda text: None


def write_probe(folder: Path, found: dict[str, Any]) -> None:
    """Write probe.json; for a pilot run, also steps.jsonl with one line per step."""
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
    """Measure gradient noise and curvature, the constants of the theory.

    These are sigma, the standard deviation of a per-sample gradient, and the gradient noise scale; L, the norm of the
    Hessian H; L(lambda), the least L with ``||H|| <= L + lambda ||g||`` at all measured points, for the gradient g; and
    rho and cos of the norms of the gradient's tensors, which docs/probes.md defines.

    Args:
        what: a task, which is measured along a short pilot run; or a list of run folders, which are measured at their
            last checkpoints.
        method: method of the pilot run. Default: "msgd".
        (options)
        settings: settings of the method or the task, as a dict.
        out: folder for probe.json. Default: no file is written.
        progress: print the expected number of gradients, and the results at each measured step.

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
