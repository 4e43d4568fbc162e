"""Helpers to wait for other processes: long enough for a busy machine, but only while they are alive."""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO, TypeVar

Found = TypeVar("Found")

PATIENCE = 300.0  # seconds until a hanging test fails; a busy machine has taken over 60 for what takes 15

endings: list[Callable[[], None]] = []  # each ends a process of the current test, if it is still running


def launch(words: Sequence[Any], **options: Any) -> "subprocess.Popen[str]":
    """Start a process in its own process group, which ends with the test."""
    process = subprocess.Popen(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    endings.append(partial(end, process))
    return process


def kill_group(process: "subprocess.Popen[str]") -> None:
    """Kill a launched process and its children, which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end(process: "subprocess.Popen[str]") -> None:
    """End a launched process and its children."""
    kill_group(process)
    process.wait()
    process.stdout.close()
    process.stderr.close()


def end_all() -> None:
    """End all processes that a test has left running, so that they do not slow down later tests."""
    while endings:
        endings.pop()()


def next_line(stream: TextIO) -> str:
    """Return the next line of a launched process. If two lines may come at once, the second would be lost."""
    assert select.select([stream], [], [], PATIENCE)[0], "it says nothing"
    return stream.readline()


def wait_for(condition: Callable[[], Found], alive: Callable[[], bool] = lambda: True, pause: float = 0.02) -> Found:
    """Wait until the condition is true and return its value; raise an error when the processes are no longer alive."""
    end = time.monotonic() + PATIENCE
    while True:
        lives = alive() and time.monotonic() < end  # checked first: a process may fulfil the condition and end
        if found := condition():
            return found
        assert lives, "not in time" if alive() else "ended before what was waited for"
        time.sleep(pause)
