"""Train the missing runs of a table, and add each to the results folder as soon as it has finished."""

from __future__ import annotations

import itertools
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import UsageError
from ..files import check_writable
from ..study import launch
from ..study.grid import run_name
from ..training.config import RunConfig
from ..training.distributed import choose_device
from ..training.loop import Options
from ..training.run_folder import FINISHED, RunFolder, commit, provenance
from .experiments import Item, Planned
from .results import FOLDER, NAMED, Results, check_new_data, from_folder, keep, read
from .tables import CLAIMS
from .verdicts import Outcome, by_worth, outcome_of

Failure = tuple[RunConfig, launch.Record]
Show = Callable[[], AbstractContextManager[Callable[[launch.Progress], None]]]  # shows the progress of a study


def select(item: Item, cells: Sequence[str] | None, results: Results, seeds: int | None = None) -> list[Planned]:
    """Return the cells of an experiment chosen by row, batch, or ROW@BATCH.

    If `cells` is None, return all cells, those first whose missing runs lead to most verdicts per minute.
    """
    if cells is None:
        outcomes = [outcome_of(planned, results, seeds) for planned in item.cells()]
        return [outcome.planned for outcome in by_worth(outcomes, CLAIMS)]
    planned = list(item.cells())
    chosen: list[Planned] = []
    for word in cells:
        name, at, batch = (part.strip().lower() for part in word.partition("@"))
        if not name or (at and not batch):
            raise UsageError(f"`cells` {','.join(cells)}: name rows, batches or ROW@BATCH, separated by commas")
        if not at and name.isdigit():
            name, batch = "", name
        found = [p for p in planned if name in ("", p.row.name.lower()) and batch in ("", str(p.batch))]
        if not found:
            names = ", ".join(dict.fromkeys(p.row.name for p in planned))
            batches = ", ".join(map(str, sorted({p.batch for p in planned})))
            raise UsageError(f"`cells` {word}: {item.name} has rows {names} and batches {batches}")
        chosen += [p for p in found if p not in chosen]
    return chosen


def run(
    planned: Sequence[Planned], *, out: Path, options: Options, seeds: int | None = None, jobs: int | None = None,
    budget: float | None = None, results: Path = FOLDER, show: Show,
) -> tuple[list[Outcome], list[Failure]]:  # fmt: skip
    """Train the missing runs of these cells, cell by cell, for at most `budget` seconds.

    Returns:
        The outcomes of the cells, and the runs that failed.

    Raises:
        KeyboardInterrupt: the user interrupted. Finished runs are in the results folder; the next call resumes others.
        UsageError: the commit of the code is unknown, or the code has uncommitted changes.
    """
    name = commit()
    if not name or name.endswith("+"):
        why = "the code has uncommitted changes" if name else "the commit of this code is unknown"
        raise UsageError(f"{why}, so these runs could not be reproduced; run {NAMED}")
    os.environ["SNGM_COMMIT"] = name  # so that worker processes record this commit, even if the code is edited
    check_writable(results, "results")
    failed: list[Failure] = []
    with suppress(OutOfTime), _time_limit(budget) if budget else nullcontext():
        for cell in planned:
            if outcome_of(cell, read(results), seeds).missing:
                _make(cell, out, options, seeds, jobs, results, show, failed)
    there = read(results)
    return [outcome_of(cell, there, seeds) for cell in planned], failed


def _make(
    planned: Planned, out: Path, options: Options, seeds: int | None, jobs: int | None, results: Path, show: Show,
    failed: list[Failure],
) -> None:  # fmt: skip
    """Train the runs of one cell as a study. Runs in the results folder, also from other machines, are not repeated."""
    folder = out / planned.item.name / f"{planned.row.name}-{planned.batch}".lower().replace(" ", "-")
    kept = 0
    from_elsewhere = set[str]()
    study = planned.study(seeds)
    now = provenance(choose_device(options.device))

    def known(config: RunConfig, data: launch.Record) -> launch.Record | None:
        there = read(results)  # read again, because another process may have added the run
        line = there.of(config)
        if line is None:
            check_new_data(config, data, there)  # now, not after minutes of training
            _set_aside_if_not_resumable(folder, run_name(config), now)
            return None
        from_elsewhere.add(config.hash)
        return line.record

    def keep_new(progress: launch.Progress) -> None:
        nonlocal kept
        for config, record in progress.done[kept:]:
            if record["status"] == "failed":
                failed.append((config, record))
            elif config.hash not in from_elsewhere:
                keep([from_folder(folder / "runs" / run_name(config))], results)
        kept = len(progress.done)
        say(progress)

    alone = 1 if planned.item.metric == "seconds" else jobs  # parallel runs would slow each other down
    with show() as say:
        launch.compare(study, folder, options=options, jobs=alone, known=known, show=keep_new)


def _set_aside_if_not_resumable(folder: Path, name: str, now: dict[str, Any]) -> None:
    """Move an unfinished run of other code or hardware to the folder "aside": it could not be added to the results."""
    path = folder / "runs" / name
    if not (path / "run.json").exists():
        return
    there = RunFolder(path).read()
    if there["status"] not in FINISHED and (there.get("made_before") or _made_with(there) != _made_with(now)):
        aside = next(to for i in itertools.count(1) if not (to := folder / "aside" / f"{name}-{i}").exists())
        aside.parent.mkdir(exist_ok=True)
        path.rename(aside)
        warnings.warn(
            f"an unfinished run was started with other code or hardware (commit {there.get('commit')}); it starts "
            f"again, and the old one was moved to {aside}",
            stacklevel=2,
        )


def _made_with(record: dict[str, Any]) -> list[Any]:
    """Return the code version and hardware of a run, without the number of threads, which is 1 in worker processes."""
    hardware = {key: value for key, value in record.get("hardware", {}).items() if key != "threads"}
    return [record.get("commit"), record.get("versions"), hardware]


class OutOfTime(Exception):
    """The time budget is used up."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the ``with`` block after this many seconds; unfinished runs can be resumed."""
    if not hasattr(signal, "SIGALRM"):
        raise UsageError("`budget` needs the signal SIGALRM, which Windows does not have; run without a budget")

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
