"""The command `sngm doctor`: check the installation, or one step of the user's own training code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .exit_codes import FAILED, with_flags
from .options import JSON

EXAMPLES = (
    "sngm doctor",
    "sngm doctor --script train.py:set_up",
    "torchrun --nproc-per-node 2 -m sngm doctor --script train.py:set_up",
)
FRAMEWORKS = ("accelerate", "deepspeed", "lightning", "timm", "torchtitan", "transformers")


def doctor(
    script: Annotated[
        str | None,
        typer.Option(help="file.py:function, which returns your model, optimizer and a function that takes one step."),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Print versions and hardware, and train one epoch of the digits task as a test of the installation. With --script,
    take one step of your own training code instead. Check that the norm is computed over the whole gradient and is the
    same on all ranks, and look for other mistakes; the exit code is 1 if a check fails. These are the checks of
    sngm.check.
    """
    if script is not None:
        return _check_script(script, as_json)
    found = _provenance() | {name: check() for name, check in CHECKS.items()}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        if isinstance(value, dict):
            value = [f"{name} ({text})" if " " in str(text) else f"{name} {text}" for name, text in value.items()]
        print(f"{key.replace('_', ' ')}: {', '.join(value) or 'none' if isinstance(value, list) else value}")


def _check_script(script: str, as_json: bool) -> None:
    from ..checkup import check
    from ..environment import is_first
    from ..errors import UsageError

    made = _of_user(script, _function(script))
    kinds = [type(part).__name__ for part in made] if isinstance(made, tuple) else []
    if not (len(kinds) == 3 and callable(made[2])):
        got = f"({', '.join(kinds)})" if isinstance(made, tuple) else type(made).__name__
        raise UsageError(f"--script {script}: the function must return (model, optimizer, step), got {got}")
    try:
        found = _of_user(script, lambda: check(*made), TypeError)
    except TypeError as error:  # an argument of check is wrong; errors in the step are findings
        raise UsageError(f"--script {script}: {error}") from error
    if is_first():
        print(json.dumps([finding._asdict() for finding in found.findings], indent=2) if as_json else found)
    if not found.ok:
        sys.exit(FAILED)


def _function(script: str) -> Callable[[], Any]:
    """Return the function that file.py:function names; raise UsageError unless it can be called without arguments."""
    import inspect

    from ..errors import UsageError
    from ..optim.external import load_file

    place, _, name = script.rpartition(":")
    if not place.endswith(".py"):
        raise UsageError(f"--script must be file.py:function, got {script!r}")
    try:
        module = _of_user(script, lambda: load_file(Path(place)), (ImportError, OSError, SyntaxError))
    except (ImportError, OSError, SyntaxError) as error:
        raise UsageError(f"--script {script}: {error}") from error
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        named = ", ".join(key for key in own if inspect.isfunction(getattr(module, key))) or "none"
        raise UsageError(f"--script {script}: {place} has no function {name!r}; its functions: {named}")
    function: Callable[[], Any] = getattr(module, name)
    if not callable(function):
        raise UsageError(f"--script {script}: {name} must be a function, got {type(function).__name__}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UsageError(f"--script {script}: {name} must be a function without arguments: {error}") from error
    except ValueError:  # a builtin without a signature
        pass
    return function


def _of_user(script: str, call: Callable[[], Any], passed: Any = ()) -> Any:
    """Call the user's code.

    Errors of the types in `passed` are raised again. For others, print a traceback without sngm's frames, and raise
    UsageError.
    """
    import traceback

    from ..errors import UsageError

    try:
        return call()
    except passed:
        raise
    except Exception as error:
        shown = traceback.TracebackException.from_exception(error)
        ours = str(Path(__file__).parents[1])
        own = [frame for frame in shown.stack if not frame.filename.startswith((ours, "<frozen importlib"))]
        if not own:
            raise
        shown.stack = traceback.StackSummary.from_list(own)
        sys.stderr.write("".join(shown.format(chain=False)))
        raise UsageError(f"--script {script}: the script raised {type(error).__name__}: {error}") from error


def _provenance() -> dict[str, Any]:
    import torch

    from ..training.run_folder import provenance

    found = provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found.pop("command")
    return found


def _disk_free_gb() -> float:
    import shutil

    return round(shutil.disk_usage(Path.cwd()).free / 1e9, 1)


def _gpu_kernels() -> str:
    """Return "Triton" if steps on a GPU can use the Triton kernels, else why they cannot."""
    from ..optim import kernels

    return "Triton" if kernels.installed() else "none: Triton is not installed"


def _trackers() -> list[str]:
    import importlib.util

    from ..training.trackers import TRACKERS

    return [name for name in TRACKERS if importlib.util.find_spec(name) is not None]


def _executors() -> dict[str, str]:
    """Return, for each executor, how this machine can use it or why it cannot."""
    from ..study.executors import executors_usable

    return {name: with_flags(why if usable else f"unusable: {why}") for name, usable, why in executors_usable()}


def _frameworks() -> dict[str, str]:
    """Return the training frameworks that are installed, with their versions."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in FRAMEWORKS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _trains() -> bool:
    """Return whether one epoch of digits can be trained."""
    import tempfile

    from ..training import resolve, train

    with tempfile.TemporaryDirectory() as folder:
        record = train(resolve("digits", "sngm", lr=0.1, batch=128, epochs=1), Path(folder))
    return bool(record["status"] == "finished")


# the checks of an installation, by the name under which they are printed
CHECKS: dict[str, Callable[[], Any]] = {
    "disk_free_gb": _disk_free_gb,
    "gpu_kernels": _gpu_kernels,
    "trackers": _trackers,
    "frameworks": _frameworks,
    "executors": _executors,
    "trains": _trains,
}
