"""Kills: SIGKILL at a file operation or at any time, SIGINT, SIGTERM and SIGHUP; then the same command to its end."""

import random
import signal
from collections import Counter
from pathlib import Path

from . import Wrong
from .commands import Ended
from .faults import Fault
from .records import COMMANDS, FOLDER, STUDY, check_finished, check_progress, progress, reference, run


def case(draw: random.Random, folder: Path, counted: Counter[str]) -> None:
    command = STUDY if draw.random() < 0.08 else draw.choice(COMMANDS)
    for _ in range(draw.randint(1, 5)):
        before = progress(folder / FOLDER)
        ended, killed = disturb(command, folder, draw)
        counted["killed processes"] += killed
        check_progress(folder / FOLDER, before, ended)
    check_finished(command, folder)


def disturb(command: tuple[str, ...], folder: Path, draw: random.Random) -> tuple[Ended, bool]:
    """Run a command and kill it somewhere; also return whether it was killed before it ended."""
    there = reference(command)
    how = draw.choice(["operation"] * 5 + ["SIGKILL", "SIGINT", "SIGTERM", "SIGHUP"])
    if how == "operation":
        fault = Fault(kill_at=draw.randint(1, there.operations), when=draw.choice(["before", "half", "after"]))
        ended = run(command, folder, fault=fault)
        if command == STUDY and ended.code == 1:  # a worker was killed
            return ended.checked(), True
    else:
        real = draw.random() < 0.05
        moment = draw.uniform(0, 5 if real else there.seconds)
        number = signal.Signals[how]
        ended = run(command, folder, signal_after=(number, moment), to_group=draw.random() < 0.5, real=real)
        if how != "SIGKILL" and ended.code in (130, -number):  # -number: before its handlers were there
            return ended, True
        if real and "Fatal Python error: init_" in ended.err:  # Python itself had not started yet
            return ended, True
    if ended.code not in (-signal.SIGKILL, there.code):
        raise Wrong(f"exit code {ended.code} of a run disturbed by {how}: {ended.err[-300:]!r}")
    return ended, ended.code == -signal.SIGKILL
