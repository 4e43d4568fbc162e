"""The command `sngm doctor`: check the installation, or one step of the user's own training code."""

from __future__ import annotations

import contextlib
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
    same on all ranks, and look for other mistakes: these are the checks of sngm.check. The exit code is 1 if a check or
    the training fails.
    """
    if script is not None:
        return _check_script(script, as_json)
    found = _installation()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for key, value in found.items():
            if isinstance(value, dict):
                value = [f"{name} ({text})" if " " in str(text) else f"{name} {text}" for name, text in value.items()]
            print(f"{key.replace('_', ' ')}: {', '.join(value) or 'none' if isinstance(value, list) else value}")
    if not found["trains"]:
        sys.exit(FAILED)


def _check_script(script: str, as_json: bool) -> None:
    from ..checkup import check
    from ..environment import is_first
    from ..errors import UsageError

    made = _of_user(script, lambda: _function(script)())
    kinds = [type(part).__name__ for part in made] if isinstance(made, tuple) else []
    if not (len(kinds) == 3 and callable(made[2])):
        got = f"({', '.join(kinds)})" if isinstance(made, tuple) else type(made).__name__
        raise UsageError(f"--script {script}: the function must return (model, optimizer, step), got {got}")
    found = _of_user(script, lambda: check(*made))
    if is_first():
        print(json.dumps([finding._asdict() for finding in found.findings], indent=2) if as_json else found)
    if not found.ok:
        sys.exit(FAILED)


def _function(script: str) -> Callable[[], Any]:
    """Return the function that file.py:function names."""
    import inspect

    from ..errors import UsageError
    from ..optim.external import load_file

    place, _, name = script.rpartition(":")
    if not place.endswith(".py"):
        raise UsageError(f"--script must be file.py:function, got {script!r}")
    module = load_file(Path(place))
    if not hasattr(module, name):
        named = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise UsageError(f"--script {script}: {place} has no function {name!r}; its functions: {named}")
    function: Callable[[], Any] = getattr(module, name)
    return function


def _of_user(script: str, call: Callable[[], Any]) -> Any:
    """Call the user's code. Raise UsageError for its errors, after printing a traceback without sngm's frames."""
    import traceback

    from ..errors import UsageError

    try:
        return call()
    except Exception as error:
        shown = traceback.TracebackException.from_exception(error)
        ours = str(Path(__file__).parents[1])
        own = [frame for frame in shown.stack if not frame.filename.startswith((ours, "<frozen importlib"))]
        if own:
            shown.stack = traceback.StackSummary.from_list(own)
            sys.stderr.write("".join(shown.format(chain=False)))
            raise UsageError(f"--script {script}: the script raised {type(error).__name__}: {error}") from error
        if isinstance(error, (ImportError, OSError, SyntaxError, TypeError)):  # in loading, or of the call itself
            raise UsageError(f"--script {script}: {error}") from error
        raise


def _installation() -> dict[str, Any]:
    """Return versions, hardware and what this installation can use, and whether it can train an epoch of digits."""
    import shutil
    import tempfile
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    import torch

    from ..optim import kernels
    from ..study.executors import executors_usable
    from ..training import resolve, train
    from ..training.run_folder import provenance
    from ..training.trackers import TRACKERS

    found = provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found.pop("command")
    found["disk_free_gb"] = round(shutil.disk_usage(Path.cwd()).free / 1e9, 1)
    found["gpu_kernels"] = "Triton" if kernels.installed() else "none: Triton is not installed"
    found["trackers"] = [name for name in TRACKERS if find_spec(name) is not None]
    found["frameworks"] = {}
    for name in FRAMEWORKS:
        with contextlib.suppress(PackageNotFoundError):
            found["frameworks"][name] = version(name)
    found["executors"] = {
        name: with_flags(why if usable else f"unusable: {why}") for name, usable, why in executors_usable()
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            record = train(resolve("digits", "sngm", lr=0.1, batch=128, epochs=1), Path(folder))
        except Exception as error:  # of a broken library or device: report it beside their versions
            record = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    found["trains"] = record["status"] == "finished"
    if not found["trains"]:
        found["error"] = record.get("error", record["status"])
    return found
