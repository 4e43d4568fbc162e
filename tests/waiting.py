"""Waiting for other processes: as long as a busy machine may need, and no longer than they live."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

PATIENCE = 300.0  # seconds that end a test which hangs; what takes 15 has taken more than 60 on a busy machine

started: list["subprocess.Popen[str]"] = []  # by the test that runs, each in a process group of its own


def wait_for(condition: Callable[[], Found], alive: Callable[[], bool] = lambda: True, pause: float = 0.02) -> Found:
    """What the condition gives, once that is true; an error as soon as nobody is alive who could make it so."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        lives = alive()  # asked first: what ended may have done it before
        if found := condition():
            return found
        assert lives, "ended before what was waited for"
        time.sleep(pause)
    raise AssertionError(f"not in {PATIENCE:g} s")


def end_all() -> None:
    """End what a test has left running: one that failed takes no cores from those that follow."""
    while started:
        process = started.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
