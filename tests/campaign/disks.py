"""Full and read-only disks: writes fail at some point; then the same command on a disk that works."""

import random
from collections import Counter
from pathlib import Path

from . import Wrong
from .commands import sngm
from .faults import Fault
from .records import (
    COMMANDS,
    FOLDER,
    STUDY,
    check_finished,
    check_progress,
    copied,
    progress,
    reference,
    run,
    shown,
    unfinished,
)

NUMBERS = ["advise", "--gradients", "8e6", "--gap", "2.3", "--L", "20", "--sigma", "15", "--out", "page"]


def case(draw: random.Random, folder: Path, counted: Counter[str]) -> None:
    kind = draw.choice(["run"] * 8 + ["finished", "page"])
    if kind == "page":
        page(draw, folder, counted)
        return
    command = STUDY if kind == "run" and draw.random() < 0.05 else draw.choice(COMMANDS)
    there = reference(command)
    if kind == "finished":
        copied(there.folder, folder)
        counted["read-only disks"] += 1
        ended = run(command, folder, fault=Fault(read_only_after=0)).checked()
        if ended.code != there.code or shown(ended) != there.shown:
            raise Wrong(f"a finished run on a read-only disk is not shown: {ended.err[-300:]!r}")
        return
    if draw.random() < 0.5 and command != STUDY:
        copied(unfinished(command, draw.choice([0.3, 0.5, 0.7, 0.9])), folder)
    for _ in range(draw.randint(1, 2)):
        before = progress(folder / FOLDER)
        full = draw.random() < 0.6
        fault = Fault(bytes_left=draw.randrange(there.bytes)) if full else None
        ended = run(command, folder, fault=fault or Fault(read_only_after=draw.randrange(there.operations))).checked()
        counted["full disks" if full else "read-only disks"] += 1
        if ended.code not in (1, 2, there.code):
            raise Wrong(f"exit code {ended.code}: {ended.err[-300:]!r}")
        check_progress(folder / FOLDER, before, ended)
    check_finished(command, folder)


def page(draw: random.Random, folder: Path, counted: Counter[str]) -> None:
    """A verb that writes all at its end leaves nothing of it on a full disk."""
    counted["full disks"] += 1
    ended = sngm(NUMBERS, folder, fault=Fault(bytes_left=draw.randrange(2000))).checked()
    if ended.code != 1:
        raise Wrong(f"exit code {ended.code} on a full disk: {ended.err[-300:]!r}")
    if not [path for path in folder.rglob("*") if path.is_file()] and (folder / "page").exists():
        raise Wrong("left an empty folder on a full disk")
    if sngm(NUMBERS, folder).checked().code != 0:
        raise Wrong("fails with space again")
