"""Waiting for other processes: as long as a busy machine may need, and no longer than they live."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

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
    endings.append(partial(kill_group, process))
    return process


def kill_group(process: "subprocess.Popen[str]") -> None:
    """Kill a launched process and what it has started, which may live on where it does not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def end_all() -> None:
    """End what a test has left running: one that failed takes no cores from those that follow."""
    while endings:
        endings.pop()()


def wait_for(condition: Callable[[], Found], alive: Callable[[], bool] = lambda: True, pause: float = 0.02) -> Found:
    """What the condition gives, once that is true; an error as soon as nobody is alive who could make it so."""
    end = time.monotonic() + PATIENCE
    while True:
        lives = alive() and time.monotonic() < end  # asked first: what ended may have done it before
        if found := condition():
            return found
        assert lives, "not in time" if alive() else "ended before what was waited for"
        time.sleep(pause)
