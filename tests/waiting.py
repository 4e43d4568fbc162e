"""Waiting for other processes: as long as a busy machine may need, and no longer than they live."""

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

PATIENCE = 300.0  # seconds until a test that hangs fails; what takes 15 alone has taken over 60 on a busy machine

endings: list[Callable[[], None]] = []  # each ends a process that the current test has started, if it still runs


def launch(words: Sequence[Any], **options: Any) -> "subprocess.Popen[str]":
    """A process with a group of its own, which ends with the test."""
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
    """Kill a launched process and what it has started, which may live on where it does not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end(process: "subprocess.Popen[str]") -> None:
    """Leave nothing of a launched process."""
    kill_group(process)
    process.wait()
    process.stdout.close()
    process.stderr.close()


def end_all() -> None:
    """End what a test has left running: one that failed takes no cores from those that follow."""
    while endings:
        endings.pop()()


def next_line(stream: TextIO) -> str:
    """What a launched process says next. Not for two lines that may come at once: the second would be missed."""
    assert select.select([stream], [], [], PATIENCE)[0], "it says nothing"
    return stream.readline()


def wait_for(condition: Callable[[], Found], alive: Callable[[], bool] = lambda: True, pause: float = 0.02) -> Found:
    """What the condition gives, once that is true; an error as soon as nobody is alive who could make it so."""
    end = time.monotonic() + PATIENCE
    while True:
        lives = alive() and time.monotonic() < end  # asked first: what ended may have done it before
        if found := condition():
            return found
        assert lives, "not in time" if alive() else "ended before what was waited for"
        time.sleep(pause)
