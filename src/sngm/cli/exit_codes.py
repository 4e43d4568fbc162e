"""Error handling of the command line: turn errors into a one-line message and an exit code."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import re
import signal
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
from ..progress import note

OK, FAILED, USAGE, NO_DATA, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130
CODES = """Exit codes: 0 ok, 1 failed, 2 usage error (also an unknown method, task or setting), 3 data missing or
broken, 4 diverged, 130 interrupted."""

PARSER_ERROR: Any = typer.BadParameter.__mro__[2]  # ClickException of the click that typer contains


def leave(code: int, text: str) -> NoReturn:
    """Print a message on stderr, so that stdout stays machine-readable, and exit."""
    note(f"sngm: {one_line(text)}")
    try:
        sys.stderr.flush()
    except OSError:  # for example a full disk; Python would try again at exit, and exit with 120
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.exit(code)


def one_line(text: str) -> str:
    r"""Return a message with control characters escaped, except line breaks before indented lines.

    >>> one_line("a\nb differ in\n  lr: 1")
    'a\\nb differ in\n  lr: 1'
    """
    return re.sub(r"\n(?! )|[\x00-\x09\x0b-\x1f\x7f]", lambda found: repr(found[0])[1:-1], text)


SPELLED = {"±": "+-", "×": "x", "–": "-", "—": "-", "…": "...", "’": "'"}


def spell(error: UnicodeError) -> tuple[str, int]:
    r"""Codecs error handler for characters that an encoding lacks: replace ± by +-, others by escape sequences.

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

    A closed file descriptor is replaced by the null device, so that no file opened later gets its number. Characters
    that the encoding of a stream lacks are replaced.
    """
    codecs.register_error("sngm.spell", spell)
    width = os.environ.get("COLUMNS", "")
    if not (width.isascii() and width.isdigit() and len(width) < 5 and 20 <= int(width) <= 1000):
        os.environ.pop("COLUMNS", None)  # rich would pad every line to this width
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # tests replace the streams
            stream.reconfigure(errors="sngm.spell")


def show_warning_once() -> Callable[..., None]:
    """Return a replacement for `warnings.showwarning` that prints each warning once, and only on rank 0."""
    told: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in told and is_first():
            told.add(str(message))
            note(f"sngm: {one_line(str(message))}")

    return show


def check_none_empty(words: list[str]) -> None:
    """Raise UsageError if an argument is empty, for example because a shell variable is not set.

    An empty path would mean the current folder.
    """
    for before, word in pairwise(["sngm", *words]):
        name, equals, value = word.partition("=")
        if not word:
            raise UsageError(f"what follows {before} is empty; give it a value, or leave it out")
        if name.startswith("--") and equals and not value:
            raise UsageError(f"{name} is empty; give it a value, or leave it out")


def run_verb(app: typer.Typer) -> None:
    """Run a command. For errors that the user can fix, print one line, and exit with the code of the kind of error."""
    secure_streams()
    warnings.showwarning = show_warning_once()
    interrupted: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupted.append(number)
        signal.default_int_handler(number, frame)

    with contextlib.suppress(ValueError):  # this is not the main thread
        signal.signal(signal.SIGINT, interrupt)
    try:
        check_none_empty(sys.argv[1:])
        try:
            if app(standalone_mode=False) == INTERRUPTED:  # typer's result for Ctrl-C
                raise KeyboardInterrupt
        except Exception as error:
            if interrupted and not isinstance(error, Interrupted):  # imports and pools turn Ctrl-C into other errors
                raise KeyboardInterrupt from error
            raise
        sys.stdout.flush()  # flush here, because BrokenPipeError is handled here
    except PARSER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help
            error.show()
            sys.exit(USAGE)
        leave(USAGE, " ".join(error.format_message().split()))
    except (Interrupted, KeyboardInterrupt) as error:
        leave(INTERRUPTED, f"interrupted; {with_flags(str(error))}" if str(error) else "interrupted")
    except DataMissing as error:
        leave(NO_DATA, with_flags(str(error)))
    except UsageError as error:
        if getattr(error, "of_first_process", False):  # the first process prints it
            sys.exit(USAGE)
        leave(USAGE, with_flags(str(error)))
    except Failed as error:
        leave(FAILED, with_flags(str(error)))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except FileNotFoundError as error:
        leave(USAGE, f"{error.strerror}: {error.filename}" if error.filename else str(error))
    except (FileExistsError, NotADirectoryError) as error:
        leave(USAGE, f"{error.filename} is not a folder; name another with --out")
    except OSError as error:
        if error.errno is None:  # raised by the user's code, not by the operating system
            fail(error)
        if error.errno == errno.ENAMETOOLONG:
            leave(USAGE, f"{error.strerror}: {str(error.filename)[:80]}...; give a shorter one")
        where = f": {error.filename}" if error.filename else ""
        leave(FAILED, f"{error.strerror or error}{where}; what was written before is still there")
    except Exception as error:
        if is_out_of_memory(error):
            why = str(error).partition("\n")[0] or type(error).__name__
            leave(FAILED, f"not enough memory: {why}; take a smaller batch, --pass-size or model")
        fail(error)


FLAGS = {"settings": "--set"}  # flags that differ from the argument's name


def with_flags(text: str) -> str:
    """Return a message of the library with arguments in backticks replaced by command-line flags.

    >>> with_flags("`bn_group` must be at least 1, got 0")
    '--bn-group must be at least 1, got 0'
    """
    return re.sub("`([A-Za-z_]+)`", lambda found: FLAGS.get(found[1], "--" + found[1].replace("_", "-")), text)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the error is a failed allocation, without importing torch."""
    if isinstance(error, MemoryError) or "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from ..memory import is_out_of_memory

    return is_out_of_memory(error)


def fail(error: Exception) -> NoReturn:
    """Print the traceback of an unexpected error in sngm or in a user's task, and exit."""
    traceback.print_exception(error.with_traceback(within_verb(error.__traceback__)))
    sys.exit(FAILED)


def within_verb(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of the traceback inside the command's function, without the frames of the command line."""
    frame, verb = trace, trace
    while frame is not None:
        name = frame.tb_frame.f_globals.get("__name__", "")
        if name.startswith("typer.") or name == "sngm.cli.options":
            verb = frame.tb_next
        frame = frame.tb_next
    return verb or trace
