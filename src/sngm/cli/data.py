"""The verbs of `sngm data`: which datasets there are, fetching them, and checking them."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DataMissing, Interrupted, UsageError
from .options import DATA, JSON, examples, verbs

if TYPE_CHECKING:
    from ..data.fetch import Say, Show

app = typer.Typer(
    invoke_without_command=True,
    short_help="Say which datasets the tasks need and which are there, fetch them, and check them.",
)
verb = verbs(app)

# of a verb after `data`: SNGM_DATA has been read before, and must not go over a --data-dir that stood there
OWN_DATA = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder that holds datasets. Default: that of SNGM_DATA.")
]


@app.callback(
    help=examples("sngm data", "sngm data --data-dir ~/datasets", "sngm data get cifar10", "sngm data check")
    + "\n\nSay which datasets the tasks need, and which are there."
)
def overview(context: typer.Context, data_dir: DATA = None, as_json: JSON = False) -> None:
    """Without a verb of its own; what is given before one counts for it."""
    context.obj = (data_dir, as_json)
    if context.invoked_subcommand is not None:
        return
    from .. import tasks as room
    from ..data.check import find

    found: list[dict[str, Any]] = []
    for name in room.names():
        dataset = getattr(room.find(name), "dataset", None)
        try:
            if dataset is not None:  # large ones are not read merely to be listed
                found.append({"task": name, "ready": True, "dataset": dataset, "folder": str(find(dataset, data_dir))})
                continue
            splits = room.build(name, data_dir=data_dir).data()
            found.append({"task": name, "ready": True, "train": len(splits.train), "test": len(splits.test)})
        except (DataMissing, OSError) as error:
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
    data_dir: OWN_DATA = None,
    as_json: JSON = False,
) -> None:
    """Fetch a dataset from its official address, check it and unpack it. The same command goes on where it stopped.
    Mirrors of your own go into SNGM_MIRRORS: base addresses separated by spaces, which are tried first.
    """
    from ..data import fetch
    from ..data.data_dirs import data_root
    from ..data.imagenet import WANTED

    root = data_root(data_dir or context.obj[0])
    if dataset == "imagenet":
        raise UsageError(f"ImageNet is yours to bring, its terms let nobody pass it on; put {WANTED} into {root}")
    archive = fetch.archive_of(dataset, form)
    kept = f"what has come is kept in {root}; the same command goes on from there"
    with _stoppable(kept), _progress("MB") as (show, say):
        folder = fetch.get(archive, root, show, say)
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
    dataset: Annotated[
        str, typer.Argument(help="cifar10, cifar100, imagenet, criteo, wikitext2, or all that are there.")
    ] = "all",
    data_dir: OWN_DATA = None,
    as_json: JSON = False,
) -> None:
    """Read a dataset to its end and hold it against what was published: checksums, counts, labels and pixels.
    Anything that is wrong is named, and the exit code is 3.
    """
    from ..data import check as room
    from ..data.data_dirs import data_roots
    from ..data.fetch import tell

    root = data_dir or context.obj[0]
    as_json = as_json or context.obj[1]
    found: list[room.Finding] = []
    for name in room.NAMES if dataset == "all" else (dataset,):
        try:
            with _progress("files") as (show, _):
                new = room.check(name, root, show)
        except DataMissing:
            if dataset != "all":
                raise
            continue
        found += new
        for finding in new:
            if finding.doubtful:
                doubt = f"{len(finding.doubtful):,} files do not end as pictures do and may be cut short"
                tell(f"{finding.folder}: {doubt}: {_first(finding.doubtful, ', ')}")
            if not finding.wrong and not as_json:  # at once: the next may take long
                print(f"{finding.dataset}: {finding.folder}: {finding.seen}", flush=True)
    if not found:
        raise DataMissing(f"no dataset in {' and '.join(map(str, data_roots(root)))}; there is 'sngm data get cifar10'")
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    if wrong := [problem for finding in found for problem in finding.wrong]:
        raise DataMissing(_first(wrong, "; "))


SHOWN = 10  # problems in one message; --json has all


def _first(words: list[str], between: str) -> str:
    return between.join([*words[:SHOWN], *([f"and {len(words) - SHOWN:,} more"] if words[SHOWN:] else [])])


# ---------------------------------------------------------------- while it takes its time


@contextlib.contextmanager
def _stoppable(what_is_kept: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM end it, and say what is kept."""
    import signal

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(what_is_kept) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress(unit: str) -> Iterator[tuple[Show, Say]]:
    """What shows how far it is, bytes as "MB" or "files", and what says something meanwhile.

    That is a bar on a terminal, which appears with the first piece, and a line every few seconds elsewhere.
    """
    if not sys.stderr.isatty():
        from ..data.fetch import tell

        yield _lines(unit), tell
        return
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    columns: list[progress.ProgressColumn] = [progress.MofNCompleteColumn(), progress.TextColumn(unit)]
    if unit == "MB":
        columns = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    columns = [progress.BarColumn(), *columns, progress.TimeRemainingColumn()]
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", visible=False)
        # said above the bar, which a print would go through; unwrapped, so that an address can be copied
        yield (
            lambda done, total: bar.update(task, completed=done, total=total, visible=True),
            lambda text: console.print(Text(f"sngm: {text}"), soft_wrap=True),
        )


EVERY = 5.0  # seconds


def _lines(unit: str) -> Show:
    last = [time.monotonic()]
    size, digits = (1e6, 1) if unit == "MB" else (1, 0)

    def show(done: int, total: int) -> None:
        if time.monotonic() - last[0] >= EVERY:
            last[0] = time.monotonic()
            print(f"{done / size:,.{digits}f} of {total / size:,.{digits}f} {unit}", file=sys.stderr, flush=True)

    return show
