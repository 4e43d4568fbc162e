"""Making the runs of a table that are missing, and keeping each as soon as it is there."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

from ..errors import UsageError
from ..study import launch
from ..study.grid import Study, run_name
from ..train.config import RunConfig
from ..train.loop import Options
from ..train.record import commit
from .items import Item, Planned
from .results import FOLDER, Results, keep, of_folder, read
from .verdicts import Outcome, look

Show = Callable[[Study], AbstractContextManager[Callable[[launch.Progress], None]]]  # how far a study is


def select(item: Item, cells: Sequence[str] | None) -> list[Planned]:
    """The cells of an item that were asked for: by row, batch, or both as ROW@BATCH."""
    planned = list(item.cells())
    if not cells:
        return planned
    chosen = []
    for word in cells:
        name, _, batch = (part.strip().lower() for part in word.partition("@"))
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
) -> list[Outcome]:
    """Make what is missing of these cells, one after the other, until all is there or the budget is used up.

    Raises:
        KeyboardInterrupt: asked to stop. What is done is kept, and a run that was under way goes on later.
    """
    name = commit()
    if not name or name.endswith("+"):
        why = "the code has changes that are in no commit" if name else "no commit is known for this code"
        raise UsageError(f"{why}, so nobody could repeat these runs; commit first, or set SNGM_COMMIT")
    end = None if budget is None else time.monotonic() + budget
    for cell in planned:
        if not look(cell, read(results), seeds).missing:
            continue
        if end is not None and time.monotonic() + cell.seconds() > end:
            break
        with _until(end):
            try:
                _make(cell, out, options, seeds, jobs, results, show)
            except OutOfTime:
                break
    there = read(results)
    return [look(cell, there, seeds) for cell in planned]


def _make(
    planned: Planned,
    out: Path,
    options: Options,
    seeds: int | None,
    jobs: int | None,
    results: Path,
    show: Show,
) -> None:
    """One cell, as a study. Runs of other machines count, and are not made again."""
    there: Results = read(results)
    folder = out / planned.item.name / f"{planned.row.name}-{planned.batch}".lower().replace(" ", "-")
    kept = 0
    study = planned.study(seeds)

    def known(config: RunConfig) -> launch.Record | None:
        line = there.of(config)
        return None if line is None else line.record

    def keep_new(progress: launch.Progress) -> None:
        nonlocal kept
        for config, _ in progress.done[kept:]:
            path = folder / "runs" / run_name(config)
            if there.of(config) is None and path.exists():
                keep([of_folder(path)], results)
        kept = len(progress.done)
        say(progress)

    alone = 1 if planned.item.metric == "seconds" else jobs  # times are of runs that have the machine to themselves
    with show(study) as say:
        launch.compare(study, folder, options=options, jobs=alone, known=known, show=keep_new)


class OutOfTime(Exception):
    """The budget is used up."""


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
