"""How the command line ends: from errors to one clear line and an exit code."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from itertools import pairwise
from types import TracebackType
from typing import Any, NoReturn

import typer

from ..environment import is_first
from ..errors import DataMissing, Failed, Interrupted, UsageError

OK, FAILED, USAGE, NO_DATA, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130
CODES = """Exit codes: 0 ok, 1 failed, 2 usage (an unknown method, task or setting too), 3 data missing or broken,
4 diverged, 130 interrupted."""

PARSER_ERROR: Any = typer.BadParameter.__mro__[2]  # ClickException, of the click that typer came with


def leave(code: int, text: str) -> NoReturn:
    """Print why on stderr, so that stdout stays machine-readable, and exit."""
    with contextlib.suppress(OSError):  # stderr may be a full disk, or a pipe without a reader
        print(f"sngm: {text}", file=sys.stderr, flush=True)
    sys.exit(code)


SPELLED = {"±": "+-", "×": "x", "–": "-", "—": "-", "…": "...", "’": "'"}


def spell(error: UnicodeError) -> tuple[str, int]:
    r"""Replace what an encoding lacks, as an error handler of codecs: ± by +-, and others by their numbers.

    >>> codecs.register_error("sngm.spell", spell)
    >>> "0.97 ± 0.01, \u03c3".encode("ascii", "sngm.spell")
    b'0.97 +- 0.01, \\u03c3'
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    known = (SPELLED.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking)
    return "".join(known), error.end


def secure_streams() -> None:
    """Make stdout and stderr safe to print any text to.

    A closed descriptor is replaced by the null device, so that no file that is opened later gets its number. Characters
    that the encoding of a stream lacks are spelled out.
    """
    codecs.register_error("sngm.spell", spell)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tests put others in their place
            stream.reconfigure(errors="sngm.spell")


def show_warning_once() -> Callable[..., None]:
    """Warnings as lines for people: each once, and of several processes from the first."""
    told: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in told and is_first():
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
    secure_streams()
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
        if error.errno == errno.ENAMETOOLONG:
            leave(USAGE, f"{error.strerror}: {str(error.filename)[:80]}...; give a shorter one")
        where = f": {error.filename}" if error.filename else ""
        leave(FAILED, f"{error.strerror or error}{where}; what was written before is still there")
    except Exception as error:
        if is_out_of_memory(error):
            why = str(error).partition("\n")[0] or type(error).__name__
            leave(FAILED, f"not enough memory: {why}; take a smaller batch, --pass-size or model")
        fail(error)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed; without importing torch, if nothing has."""
    if isinstance(error, MemoryError) or "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from ..memory import is_out_of_memory

    return is_out_of_memory(error)


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
