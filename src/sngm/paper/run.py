"""Making the runs of a table that are missing, and keeping each as soon as it is there."""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import UsageError
from ..files import check_writable
from ..study import launch
from ..study.grid import Study, run_name
from ..training.config import RunConfig
from ..training.distributed import choose_device
from ..training.loop import Options
from ..training.run_folder import FINISHED, RunFolder, commit, provenance
from .experiments import Item, Planned
from .results import FOLDER, NAMED, keep, of_folder, read
from .verdicts import Outcome, look

Failure = tuple[RunConfig, launch.Record]
Show = Callable[[Study], AbstractContextManager[Callable[[launch.Progress], None]]]  # how far a study is


def select(item: Item, cells: Sequence[str] | None) -> list[Planned]:
    """The cells of an item that were asked for: by row, batch, or both as ROW@BATCH."""
    planned = list(item.cells())
    if cells is None:
        return planned
    chosen = []
    for word in cells:
        name, at, batch = (part.strip().lower() for part in word.partition("@"))
        if at and not (name and batch):
            raise UsageError(f"--cells {word}: ROW@BATCH needs a row and a batch; without @, name a row or a batch")
        if not name:
            raise UsageError("--cells has an empty part; name rows, batches or ROW@BATCH, with a comma between two")
        if not batch and name.isdigit():
            name, batch = "", name
        found = [p for p in planned if name in ("", p.row.name.lower()) and batch in ("", str(p.batch))]
        if not found:
            names = ", ".join(dict.fromkeys(p.row.name for p in planned))
            raise UsageError(
                f"--cells {word}: {item.name} has rows {names} and batches {', '.join(map(str, item.batches))}"
            )
        chosen += [p for p in found if p not in chosen]
    return chosen


def run(
    planned: Sequence[Planned],
    *,
    out: Path,
    options: Options,
    seeds: int | None = None,
    jobs: int | None = None,
    budget: float | None = None,
    results: Path = FOLDER,
    show: Show,
) -> tuple[list[Outcome], list[Failure]]:
    """Make what is missing of these cells, one after the other, until all is there or the budget is used up.

    Returns what is there then, and the runs that failed.

    Raises:
        KeyboardInterrupt: asked to stop. What is done is kept, and a run that was under way goes on later.
    """
    name = commit()
    if not name or name.endswith("+"):
        why = "the code has changes that are in no commit" if name else "no commit is known for this code"
        raise UsageError(f"{why}, so nobody could repeat these runs; run {NAMED}")
    check_writable(results, "--results")
    end = None if budget is None else time.monotonic() + budget
    failed: list[Failure] = []
    for cell in planned:
        if end is not None and time.monotonic() > end:
            break
        if look(cell, read(results), seeds).missing:
            try:
                with _named(name), _until(end):
                    _make(cell, out, options, seeds, jobs, results, show, failed)
            except OutOfTime:
                break
    there = read(results)
    return [look(cell, there, seeds) for cell in planned], failed


def _make(
    planned: Planned,
    out: Path,
    options: Options,
    seeds: int | None,
    jobs: int | None,
    results: Path,
    show: Show,
    failed: list[Failure],
) -> None:
    """One cell, as a study. Runs of other machines count, and are not made again."""
    folder = out / planned.item.name / f"{planned.row.name}-{planned.batch}".lower().replace(" ", "-")
    kept = 0
    from_elsewhere = set[str]()
    study = planned.study(seeds)
    now = provenance(choose_device(options.device))

    def known(config: RunConfig) -> launch.Record | None:
        line = read(results).of(config)  # as of now: another process may have made it since the cell was begun
        if line is None:
            _set_aside_if_begun_otherwise(folder, run_name(config), now)
            return None
        from_elsewhere.add(config.hash)
        return line.record

    def keep_new(progress: launch.Progress) -> None:
        nonlocal kept
        for config, record in progress.done[kept:]:
            if record["status"] == "failed":
                failed.append((config, record))
            elif config.hash not in from_elsewhere:
                keep([of_folder(folder / "runs" / run_name(config))], results)
        kept = len(progress.done)
        say(progress)

    alone = 1 if planned.item.metric == "seconds" else jobs  # times are of runs that have the machine to themselves
    with show(study) as say:
        launch.compare(study, folder, options=options, jobs=alone, known=known, show=keep_new)


def _set_aside_if_begun_otherwise(folder: Path, name: str, now: dict[str, Any]) -> None:
    """Move away a run that was begun with other code or hardware: it would go on, and could not be kept in the end."""
    path = folder / "runs" / name
    if not (path / "run.json").exists():
        return
    there = RunFolder(path).read()
    if there["status"] not in FINISHED and (there.get("made_before") or _made_with(there) != _made_with(now)):
        aside = next(to for i in itertools.count(1) if not (to := folder / "aside" / f"{name}-{i}").exists())
        aside.parent.mkdir(exist_ok=True)
        path.rename(aside)
        warnings.warn(
            f"a run was begun with other code or hardware (commit {there.get('commit')}), and begins anew; what there "
            f"was of it is in {aside}",
            stacklevel=2,
        )


def _made_with(record: dict[str, Any]) -> list[Any]:
    hardware = {key: value for key, value in record.get("hardware", {}).items() if key != "threads"}  # a worker's: one
    return [record.get("commit"), record.get("versions"), hardware]


class OutOfTime(Exception):
    """The budget is used up."""


@contextmanager
def _named(commit: str) -> Iterator[None]:
    """The commit of the runs' processes, whatever is edited meanwhile."""
    before = os.environ.get("SNGM_COMMIT")
    os.environ["SNGM_COMMIT"] = commit
    try:
        yield
    finally:
        if before is None:
            del os.environ["SNGM_COMMIT"]
        else:
            os.environ["SNGM_COMMIT"] = before


@contextmanager
def _until(end: float | None) -> Iterator[None]:
    """Stop what is inside when the time comes, as Ctrl-C would: what was begun goes on later."""
    if end is None:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, end - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
