"""Commands that are disturbed, what they leave when undisturbed, and whether a folder holds the same."""

import functools
import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import Wrong
from .commands import Ended, sngm
from .faults import Fault

GRID = "--methods msgd,sngm --batches 256 --lrs 0.1,0.3 --seeds 2 --epochs 1 --jobs 2"
TINY = "train digits --set width=4 --checkpoint-every 2"
COMMANDS = tuple(
    tuple(f"{TINY} {rest}".split())
    for rest in (
        "--method sngm --lr 0.1 --batch 256 --epochs 2",
        "--method sngm --lr 0.7 --batch 256 --epochs 2",
        "--method msgd --lr 0.1 --batch 256 --epochs 3 --part select",
        "--method lamb --lr 0.01 --batch 256 --workers 2 --epochs 2 --schedule cosine",
        "--method extrap-sgd --lr 0.1 --batch 512 --workers 2 --epochs 3 --precision float64",
        "--method msgd --lr 1e30 --batch 128 --epochs 3",  # diverges
    )
)
STUDY = tuple(f"compare digits --set width=4 {GRID}".split())
FOLDER = "zq7"  # of a run: letters that no message has by chance
ROOT = Path(tempfile.gettempdir())  # the driver names a folder of its own


@dataclass(frozen=True)
class Reference:
    folder: Path  # holds it as the folder FOLDER
    code: int
    shown: Any  # what --json says of the result
    results: dict[str, Any]
    operations: int
    bytes: int
    seconds: float


def run(command: tuple[str, ...], folder: Path, **how: Any) -> Ended:
    """Run a command with its records in folder/FOLDER."""
    return sngm([*command, "--out", FOLDER, "--json"], folder, **how)


@functools.cache
def reference(command: tuple[str, ...]) -> Reference:
    """The undisturbed run."""
    folder = Path(tempfile.mkdtemp(prefix="reference-", dir=ROOT))
    ended = run(command, folder).checked()
    if ended.code not in (0, 4):
        raise Wrong(f"{' '.join(command)}: {ended.err}")
    written = sum(int(line.split()[1]) for line in ended.log if line.startswith("bytes "))
    operations = sum(not line.startswith("bytes ") for line in ended.log)
    found = results(folder / FOLDER)
    return Reference(folder, ended.code, shown(ended), found, operations, written, ended.seconds)


@functools.cache
def unfinished(command: tuple[str, ...], part: float) -> Path:
    """A folder whose run was killed at this part of its file operations."""
    folder = Path(tempfile.mkdtemp(prefix="unfinished-", dir=ROOT))
    run(command, folder, fault=Fault(kill_at=max(1, int(part * reference(command).operations))))
    return folder


def copied(there: Path, folder: Path) -> None:
    shutil.copytree(there / FOLDER, folder / FOLDER)


def shown(ended: Ended) -> Any:
    """What a command printed about its result, without what depends on when and where it ran."""
    document = json.loads(ended.out)
    if "cells" not in document:
        return document.get("status"), document.get("result")
    return [{key: value for key, value in cell.items() if key != "seconds"} for cell in document["cells"]]


def results(folder: Path, weights: bool = True) -> dict[str, Any]:
    """All that must be the same to the bit: results, metrics and weights of every run, choices and table of a study."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("run.json")):
        record = json.loads(path.read_text())
        name = str(path.parent.relative_to(folder))
        found[name] = [record["status"], record["result"], (path.parent / "metrics.jsonl").read_bytes()]
        if weights and record["status"] == "finished":  # the last checkpoint of a diverged run is from any step before
            found[name].append(_weights(path.parent))
    if (folder / "study.json").exists():
        found["study"] = json.loads((folder / "study.json").read_text())["cells"], (folder / "table.md").read_bytes()
    return found


def _weights(folder: Path) -> str | None:
    last = max(folder.glob("checkpoint-*.pt"), default=None)
    if last is None:
        return None
    model = torch.load(last, weights_only=True)["model"]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.values())).hexdigest()


def progress(folder: Path) -> dict[str, int]:
    """The step of the newest whole checkpoint of each run; those in the index, or without one those that load."""
    return {str(path.relative_to(folder)): _step(path) for path in {p.parent for p in folder.rglob("checkpoint-*.pt")}}


def _step(folder: Path) -> int:
    try:
        index = json.loads((folder / "checkpoints.json").read_text())
    except (OSError, ValueError):
        index = None
    for path in sorted(folder.glob("checkpoint-*.pt"), reverse=True):
        try:
            if index is not None and hashlib.sha256(path.read_bytes()).hexdigest() != index.get(path.name):
                continue
            return int(torch.load(path, weights_only=True)["run"]["step"])
        except Exception:
            continue
    return 0


def check_progress(folder: Path, before: dict[str, int], ended: Ended) -> None:
    """Raise Wrong if a command went back behind a whole checkpoint that was there before it."""
    after = progress(folder)
    for name, step in before.items():
        if after.get(name, 0) < step:
            raise Wrong(f"lost progress in {name}: step {step} before, {after.get(name, 0)} after")
        start = f"replace {folder / name}/checkpoint-"
        written = [int(line[len(start) :].partition(".")[0]) for line in ended.log if line.startswith(start)]
        if written and written[0] < step:
            raise Wrong(
                f"lost progress in {name}: step {step} was there, the first checkpoint after it is {written[0]}"
            )


def check_finished(command: tuple[str, ...], folder: Path) -> None:
    """Run a command undisturbed to its end; raise Wrong unless it is that of a run that never was disturbed."""
    before = progress(folder / FOLDER)
    ended = run(command, folder).checked()
    there = reference(command)
    if ended.code != there.code:
        raise Wrong(f"exit code {ended.code} where {there.code} was right: {ended.err[-300:]!r}")
    check_progress(folder / FOLDER, before, ended)
    if shown(ended) != there.shown:
        raise Wrong(f"shows {shown(ended)}, and an undisturbed run {there.shown}")
    found = results(folder / FOLDER)
    if wrong := [name for name in {**there.results, **found} if found.get(name) != there.results.get(name)]:
        raise Wrong(f"differs from an undisturbed run in {', '.join(wrong)}: {[found.get(name) for name in wrong]}")
    if left := sorted(str(path.relative_to(folder)) for path in folder.rglob("*.tmp")):
        raise Wrong(f"temporary files left: {', '.join(left)}")
