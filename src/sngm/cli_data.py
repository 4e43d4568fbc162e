"""The verbs of `sngm data`: which datasets there are, fetching them, and checking them."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_words import DATA, JSON, examples, verbs
from .errors import DataMissing, Interrupted

if TYPE_CHECKING:
    from .data.fetch import Show

app = typer.Typer(
    invoke_without_command=True,
    short_help="Say which datasets the tasks need and which are there, fetch them, and check them.",
)
verb = verbs(app)


@app.callback(
    help=examples("sngm data", "sngm data --data-dir ~/datasets", "sngm data get cifar10", "sngm data check")
    + "\n\nSay which datasets the tasks need, and which are there."
)
def overview(context: typer.Context, data_dir: DATA = None, as_json: JSON = False) -> None:
    """Without a verb of its own; what is given before one counts for it."""
    context.obj = (data_dir, as_json)
    if context.invoked_subcommand is not None:
        return
    from . import tasks as room
    from .data.check import find

    found: list[dict[str, Any]] = []
    for name in room.names():
        dataset = getattr(room.find(name), "dataset", None)
        try:
            if dataset is not None:  # large ones are not read merely to be listed
                found.append({"task": name, "ready": True, "dataset": dataset, "folder": str(find(dataset, data_dir))})
                continue
            splits = room.build(name, data_dir=data_dir).data()
            found.append({"task": name, "ready": True, "train": len(splits.train), "test": len(splits.test)})
        except DataMissing as error:
            found.append({"task": name, "ready": False, "missing": str(error)})
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for entry in found:
        if "train" in entry:
            state = f"ready, {entry['train']} samples to train on and {entry['test']} to test"
        else:
            state = f"ready, in {entry['folder']}" if entry["ready"] else entry["missing"]
        print(f"{entry['task']}: {state}")


@verb(
    "sngm data get cifar10",
    "sngm data get cifar100 --form python --data-dir ~/datasets",
)
def get(
    context: typer.Context,
    dataset: Annotated[str, typer.Argument(help="cifar10 or cifar100.")],
    form: Annotated[str, typer.Option(help="binary or python: as published; both hold the same.")] = "binary",
    data_dir: DATA = None,
    as_json: JSON = False,
) -> None:
    """Fetch a dataset from its official address, check it and unpack it. The same command goes on where it stopped.
    Mirrors of your own go into SNGM_MIRRORS: base addresses separated by spaces, which are tried first.
    """
    from .data import fetch
    from .data.places import data_root

    root = data_root(data_dir or context.obj[0])
    archive = fetch.archive_of(dataset, form)
    with _stoppable(f"what has come is kept in {root}; the same command goes on from there"), _progress() as show:
        folder = fetch.get(archive, root, show)
    if as_json or context.obj[1]:
        print(json.dumps({"dataset": dataset, "form": form, "folder": str(folder)}, indent=2))
    else:
        print(f"{dataset}: {folder}")


@verb(
    "sngm data check",
    "sngm data check cifar10 --data-dir ~/datasets",
)
def check(
    context: typer.Context,
    dataset: Annotated[str, typer.Argument(help="cifar10, cifar100, imagenet, or all that are there.")] = "all",
    data_dir: DATA = None,
    as_json: JSON = False,
) -> None:
    """Read a dataset to its end and hold it against what was published: checksums, counts, labels and pixels.
    Anything that is wrong is named, and the exit code is 3.
    """
    from .data import check as room
    from .data.places import data_roots

    root = data_dir or context.obj[0]
    found: list[room.Finding] = []
    for name in room.NAMES if dataset == "all" else (dataset,):
        try:
            found += room.check(name, root)
        except DataMissing:
            if dataset != "all":
                raise
    if not found:
        raise DataMissing(f"no dataset in {' and '.join(map(str, data_roots(root)))}; there is 'sngm data get cifar10'")
    wrong = [problem for finding in found for problem in finding.wrong]
    if as_json or context.obj[1]:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        for finding in found:
            if not finding.wrong:
                print(f"{finding.dataset}: {finding.folder}: {finding.seen}")
    if wrong:
        shown = "; ".join(wrong[:SHOWN])
        raise DataMissing(shown + (f"; and {len(wrong) - SHOWN:,} more" if wrong[SHOWN:] else ""))


SHOWN = 10  # problems in one message; --json has all


# ---------------------------------------------------------------- while a file comes


@contextlib.contextmanager
def _stoppable(what_is_kept: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM end it, and say what is kept."""
    import signal

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(what_is_kept) from None


@contextlib.contextmanager
def _progress() -> Iterator[Show]:
    """A bar on a terminal, a line every few seconds elsewhere."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


EVERY = 5.0  # seconds


def _lines() -> Show:
    last = [time.monotonic()]

    def show(done: int, total: int | None) -> None:
        if time.monotonic() - last[0] >= EVERY:
            last[0] = time.monotonic()
            of = f" of {total / 1e6:,.1f}" if total else ""
            print(f"{done / 1e6:,.1f}{of} MB", file=sys.stderr, flush=True)

    return show
