"""The worker processes of a study: their code and signal handlers, and what the parent sends and receives."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from .. import tasks
from ..errors import Interrupted, UsageError
from ..optim import registry
from ..progress import step_progress, stopping_signals
from ..training.config import RunConfig
from ..training.loop import Options, train

# Windows has neither SIGALRM nor signal masks
INTERRUPTS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM") if hasattr(signal, name)
)


def mask_signals(how: str, signals: Iterable[int]) -> set[Any]:
    """Change the signal mask of this thread, if the system supports it; return the previous mask."""
    return signal.pthread_sigmask(getattr(signal, how), signals) if hasattr(signal, "pthread_sigmask") else set()


# whether to stop the run; whether to end the process after that; whether a run has begun but made no step yet
_stop = _end = _starting = False


def pack_local() -> bytes | None:
    """Return the tasks and methods that worker processes cannot import, pickled by value; None if there are none."""
    methods = {name: method for name, method in registry.METHODS.items() if name not in registry.BUILT_IN}
    if not tasks.LOCAL and not methods:
        return None
    try:
        import cloudpickle
    except ImportError:  # older versions of joblib, a dependency of scikit-learn, include a copy
        from joblib.externals import cloudpickle

    packed: bytes = cloudpickle.dumps((tasks.LOCAL, methods))
    return packed


def warm_up(local: bytes | None = None) -> None:
    """Prepare a new worker process: register the parent's tasks and methods, use one thread, set signal handlers."""
    if local is not None:
        found, methods = pickle.loads(local)
        tasks.LOCAL.update(found)
        registry.METHODS.update(methods)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # the parent process has loaded the same data and given these warnings already
    warnings.filterwarnings("ignore", message=".*does not hold the official (records|words)")
    torch.set_num_threads(1)  # whatever --jobs is, because the number of threads changes the last digits
    for number in stopping_signals():
        signal.signal(number, on_signal)
    mask_signals("SIG_UNBLOCK", INTERRUPTS)


def _exit_with_parent() -> None:
    """Exit when the parent process ends, to release the locks of run folders."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def on_signal(number: int, _: Any) -> None:
    """Stop the run at its next step. On SIGTERM, exit after that, or at once if the run has made no step yet.

    A signal between runs does not end the process: the process may hold a lock of the pool, or be sending a record to
    the parent process, which would wait forever for the rest.
    """
    global _stop, _end
    _stop, _end = True, _end or number == signal.SIGTERM
    if _end and _starting:
        os._exit(0)


def stop_runs_here(stop: bool) -> None:
    """Set or clear the request that the run in this process stops at its next step."""
    global _stop, _end
    _stop, _end = stop, False


def _should_stop() -> bool:
    """Return whether to stop the run. It is called after each step; before the first call, SIGTERM exits at once."""
    global _starting
    _starting = False
    return _stop


def make(config: RunConfig, path: Path, options: dict[str, Any], commit: str | None) -> dict[str, Any]:
    """Train one run; return its record, or a record with the status "interrupted" or "failed"."""
    global _starting
    if commit is not None:  # SNGM_COMMIT may have changed since the fork server started
        os.environ["SNGM_COMMIT"] = commit
    _starting = True
    try:
        if _stop:
            return {"status": "interrupted"}
        return train(config, path, Options(**options, should_stop=_should_stop))
    except Interrupted:
        return {"status": "interrupted"}
    except (UsageError, OSError):  # the next run would fail in the same way
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return {"status": "failed", "error": f"{type(error).__name__}: {error}", "traceback": text, "result": {}}
    finally:
        _starting = False
        if _end:
            os._exit(0)


def make_elsewhere(
    local: bytes | None,
    command: str,
    config: RunConfig,
    path: Path,
    options: dict[str, Any],
    commit: str | None,
    *,
    handlers: Mapping[int, Callable[[int, Any], None]] | None = None,
) -> dict[str, Any] | Exception:
    """Train one run in a process of a cluster; return its record, or an error that ends the study.

    The output goes to log.txt in the run folder. If another process still trains in that folder, for example after a
    lost connection, this process waits for it. `local` is the result of `pack_local`, `command` the command line for
    the record. `handlers` maps signals to handlers, in addition to those of `warm_up`.
    """
    stop_runs_here(False)  # a process may train several runs
    warm_up(local)
    for number, handler in (handlers or {}).items():
        signal.signal(number, handler)
    os.environ["SNGM_COMMAND"] = command
    try:
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(open(path / "log.txt", "a", buffering=1, encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(log))
            stack.enter_context(contextlib.redirect_stderr(log))
            progress = stack.enter_context(step_progress())
            return make(config, path, {**options, "progress": progress, "wait": True}, commit)
    except (UsageError, OSError) as error:
        return error


def settle(future: Future[dict[str, Any]], outcome: dict[str, Any] | Exception) -> None:
    """Set the result or the exception of a future to `outcome`, which `make_elsewhere` returned."""
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
