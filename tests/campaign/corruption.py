"""Corruption: files of runs and studies that are cut, flipped, deleted, exchanged, edited or of another run."""

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

from . import Wrong
from .commands import Ended, sngm
from .records import (
    COMMANDS,
    FOLDER,
    STUDY,
    check_finished,
    check_progress,
    copied,
    progress,
    reference,
    results,
    run,
    shown,
    unfinished,
)


def case(draw: random.Random, folder: Path, counted: Counter[str]) -> None:
    command = STUDY if draw.random() < 0.05 else draw.choice(COMMANDS)
    finished = command == STUDY or draw.random() < 0.5
    copied(reference(command).folder if finished else unfinished(command, draw.choice([0.3, 0.5, 0.7, 0.9])), folder)
    kind = draw.choice(["broken file"] * 6 + ["edited", "foreign", "other config", "no index"])
    counted[kind] += 1
    if kind == "other config" and command != STUDY:
        other_config(draw, command, folder)
    elif kind == "no index" and command != STUDY:
        before = progress(folder / FOLDER)
        (folder / FOLDER / "checkpoints.json").unlink(missing_ok=True)
        check_progress(folder / FOLDER, before, run(command, folder).checked())
        check_finished(command, folder)
    else:
        hurt = {"edited": edit, "foreign": mix}.get(kind, damage)(draw, command, folder / FOLDER)
        before = progress(folder / FOLDER)
        ended = run(command, folder).checked()
        check_answer(command, folder, ended, hurt)
        if kind == "broken file" and ended.code == reference(command).code:
            check_progress(folder / FOLDER, before, ended)
        if command != STUDY and draw.random() < 0.3:
            check_eval(command, folder, hurt)


def damage(draw: random.Random, command: tuple[str, ...], folder: Path) -> list[Path]:
    """Break a file, or exchange two; return which."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".pt"))
    path, other = draw.choice(files), draw.choice(files)
    content = path.read_bytes()
    how = draw.choice(["truncate", "flip", "delete", "exchange"])
    if how == "truncate":
        path.write_bytes(content[: draw.randrange(max(1, len(content)))])
    elif how == "flip" and content:
        flipped = bytearray(content)
        for _ in range(draw.randint(1, 8)):
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
    elif how == "delete":
        path.unlink()
    else:
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return [path, other]
    return [path]


def edit(draw: random.Random, command: tuple[str, ...], folder: Path) -> list[Path]:
    """Change a number in a record."""
    path = draw.choice(sorted([*folder.rglob("run.json"), *folder.rglob("metrics.jsonl")]))
    text = path.read_text()
    numbers = list(re.finditer(r'"(?:test|validation|train)_\w+": ([\d.e-]+)', text))
    if numbers:
        chosen = draw.choice(numbers)
        text = text[: chosen.start(1)] + repr(draw.random()) + text[chosen.end(1) :]
        path.write_text(text)
    return [path]


def mix(draw: random.Random, command: tuple[str, ...], folder: Path) -> list[Path]:
    """Replace files by those of a run with another config: one of them, or all checkpoints with their index."""
    other = draw.choice([c for c in COMMANDS if c != command])
    there = draw.choice([reference(other).folder, unfinished(other, 0.5)]) / FOLDER
    into = draw.choice(sorted(path.parent for path in folder.rglob("run.json")) or [folder])
    names = draw.choice([["checkpoints.json", "checkpoint-*.pt"], ["run.json"], ["metrics.jsonl"]])
    for name in names:
        for path in into.glob(name):
            path.unlink()
        for path in there.glob(name):
            shutil.copy(path, into)
    if draw.random() < 0.3:
        (into / "run.json").unlink(missing_ok=True)
    return [into / name.replace("*", "") for name in names] + [into]


def other_config(draw: random.Random, command: tuple[str, ...], folder: Path) -> None:
    """Run another config on the folder, also after run.json was deleted: refused, and nothing is touched."""
    if draw.random() < 0.5 and progress(folder / FOLDER):
        (folder / FOLDER / "run.json").unlink()
    if not (folder / FOLDER / "run.json").exists() and not progress(folder / FOLDER):
        return  # nothing says whose folder it is
    before = {path: path.read_bytes() for path in (folder / FOLDER).iterdir()}
    ended = run(draw.choice([c for c in COMMANDS if c != command]), folder).checked()
    if ended.code != 2:
        raise Wrong(f"another config on the same folder was not refused: exit code {ended.code}")
    if before != {path: path.read_bytes() for path in (folder / FOLDER).iterdir()}:
        raise Wrong("another config was refused, but files have changed")
    check_finished(command, folder)


def check_answer(command: tuple[str, ...], folder: Path, ended: Ended, hurt: list[Path]) -> None:
    """Raise Wrong unless the result is right, or an error line or a warning names a file."""
    there = reference(command)
    named = any(path.name in ended.err or str(path.parent.relative_to(folder)) in ended.err for path in hurt)
    if ended.code not in (0, 4):
        if not named:
            raise Wrong(f"exit code {ended.code}, but no line names {hurt[0].name}: {ended.err[-300:]!r}")
        return
    if ended.code != there.code or shown(ended) != there.shown:
        raise Wrong(f"wrong result after {hurt[0].name} was changed: {shown(ended)} and not {there.shown}")
    try:
        # weights of finished runs in a study are validated when they are read
        where = folder / FOLDER, reference(command).folder / FOLDER
        found, expected = (results(each, weights=command != STUDY) for each in where)
        same = found == expected
    except Exception:  # of files that are broken still
        same = False
    if not same and not named and "--restart" not in ended.err:
        names = " and ".join(sorted({str(path.relative_to(folder)) for path in hurt}))
        raise Wrong(f"after {names} changed, the folder differs from an undisturbed run's, and nothing says so")


def check_eval(command: tuple[str, ...], folder: Path, hurt: list[Path]) -> None:
    """Raise Wrong if ``sngm eval`` repeats a record that is wrong, or fails without naming a file."""
    ended = sngm(["eval", FOLDER, "--json"], folder).checked()
    if ended.code == 0 and json.loads(ended.out)["recorded"] != reference(command).shown[1]:
        raise Wrong(f"eval repeats a wrong result after {hurt[0].name} was changed")
    if ended.code != 0 and FOLDER not in ended.err:
        raise Wrong(f"eval names no file: {ended.err!r}")
