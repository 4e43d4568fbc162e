"""How the command line ends: from errors to one clear line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from itertools import pairwise
from types import TracebackType
from typing import Any, NoReturn

import typer

from .errors import DataMissing, Failed, Interrupted, UsageError

OK, FAILED, USAGE, NO_DATA, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130
CODES = """Exit codes: 0 ok, 1 failed, 2 usage (an unknown method, task or setting too), 3 data missing or broken,
4 diverged, 130 interrupted."""

PARSER_ERROR: Any = typer.BadParameter.__mro__[2]  # ClickException, of the click that typer came with


def leave(code: int, text: str) -> NoReturn:
    """Say why, and go."""
    print(f"sngm: {text}", file=sys.stderr, flush=True)  # people's words go where they spoil no data
    sys.exit(code)


def show_warning_once() -> Callable[..., None]:
    """Warnings as lines for people: each once, and of several processes from the first."""
    told: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in told and os.environ.get("RANK", "0") == "0":
            told.add(str(message))
            print(f"sngm: {message}", file=sys.stderr, flush=True)

    return show


def refuse_empty(words: list[str]) -> None:
    """An empty path would be the current folder, and is often a variable that is not set."""
    for before, word in pairwise(["sngm", *words]):
        name, equals, value = word.partition("=")
        if not word:
            raise UsageError(f"what follows {before} is empty; give it a value, or leave it out")
        if name.startswith("--") and equals and not value:
            raise UsageError(f"{name} is empty; give it a value, or leave it out")


def run_verb(app: typer.Typer) -> None:
    """Run a verb. Every error the user can mend is one clear line and its own exit code."""
    warnings.showwarning = show_warning_once()
    try:
        refuse_empty(sys.argv[1:])
        if app(standalone_mode=False) == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()  # here, where a reader that has gone away is dealt with
    except PARSER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help
            error.show()
            sys.exit(USAGE)
        leave(USAGE, " ".join(error.format_message().split()))
    except (Interrupted, KeyboardInterrupt) as error:
        leave(INTERRUPTED, f"interrupted; {error}" if str(error) else "interrupted")
    except DataMissing as error:
        leave(NO_DATA, str(error))
    except UsageError as error:
        leave(USAGE, str(error))
    except Failed as error:
        leave(FAILED, str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except FileNotFoundError as error:
        leave(USAGE, f"{error.strerror}: {error.filename}" if error.filename else str(error))
    except (FileExistsError, NotADirectoryError) as error:
        leave(USAGE, f"{error.filename} is no folder; name another with --out")
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        leave(FAILED, f"{error.strerror or error}{where}; what was written before is still there")
    except Exception as error:
        fail(error)


def fail(error: Exception) -> NoReturn:
    """Show where an error came from that is ours, or that of a task somebody wrote."""
    traceback.print_exception(error.with_traceback(within_verb(error.__traceback__)))
    sys.exit(FAILED)


def within_verb(trace: TracebackType | None) -> TracebackType | None:
    """A trace from the verb on: how the command line came to it helps nobody."""
    frame, verb = trace, trace
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__", "").startswith("typer."):
            verb = frame.tb_next
        frame = frame.tb_next
    return verb or trace
