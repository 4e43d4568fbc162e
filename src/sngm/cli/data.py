"""The commands of `sngm data`: list which datasets are present, download them, and check them."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DataMissing, Interrupted, UsageError
from ..options import DATA_DIR
from ..progress import note
from .exit_codes import with_flags
from .options import DATA, JSON, examples, verbs

if TYPE_CHECKING:
    from ..data.fetch import Say, Show

app = typer.Typer(
    invoke_without_command=True,
    short_help="List which datasets the tasks need and which are present, download them, and check them.",
)
verb = verbs(app)

# --data-dir of the commands of `sngm data`. It does not read SNGM_DATA, which would override `sngm data --data-dir`.
OWN_DATA = Annotated[Path | None, typer.Option("--data-dir", help=DATA_DIR)]
MAX_SHOWN = 10  # problems in one message; --json lists all


@app.callback(
    help="List which datasets the tasks need, and which are present.\n\n"
    + examples("sngm data", "sngm data --data-dir ~/datasets", "sngm data get cifar10", "sngm data check")
)
def overview(context: typer.Context, data_dir: DATA = None, as_json: JSON = False) -> None:
    """List the datasets of all tasks; options given before a command of `sngm data` apply to that command."""
    context.obj = (data_dir, as_json)
    if context.invoked_subcommand is not None:
        return
    from .. import tasks
    from ..data.check import find

    if data_dir is not None and data_dir.is_file():
        raise UsageError(f"`data_dir` must be a folder; {data_dir} is a file")
    found: list[dict[str, Any]] = []
    for name in tasks.names():
        dataset = getattr(tasks.find(name), "dataset", None)
        try:
            if dataset is not None:  # list it without reading the files, which may be large
                found.append({"task": name, "ready": True, "dataset": dataset, "folder": str(find(dataset, data_dir))})
            else:
                splits = tasks.build(name, data_dir=data_dir).data()
                found.append({"task": name, "ready": True, "train": len(splits.train), "test": len(splits.test)})
        except (DataMissing, OSError) as error:
            found.append({"task": name, "ready": False, "missing": with_flags(str(error))})
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
    form: Annotated[str, typer.Option(help="Archive format, binary or python; same content.")] = "binary",
    data_dir: OWN_DATA = None,
    as_json: JSON = False,
) -> None:
    """Download a dataset from its official address, verify it and unpack it. An interrupted download is resumed by
    the same command. SNGM_MIRRORS may hold your own mirrors: base URLs separated by spaces, which are tried first.
    """
    from ..data import cifar, fetch
    from ..data.data_dirs import data_root
    from ..data.imagenet import WANTED

    root = data_root(data_dir or context.obj[0])
    if dataset == "imagenet":
        raise UsageError(f"ImageNet cannot be downloaded: its terms forbid passing it on; put {WANTED} into {root}")
    archive = cifar.archive_of(dataset, form)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _progress("MB") as (show, say):
            folder = fetch.get(archive, root, show, say)
    except KeyboardInterrupt:
        raise Interrupted(f"received bytes are kept in {root}; run the same command to resume") from None
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
        str,
        typer.Argument(help="cifar10, cifar100, imagenet, tiny-imagenet, criteo, wikitext2, or all that are present."),
    ] = "all",
    data_dir: OWN_DATA = None,
    as_json: JSON = False,
) -> None:
    """Compare a dataset with what was published: checksums, counts, labels and pixels. Of ImageNet's images, only the
    first and last bytes are read. The first ten problems are listed; --json lists all. Exit code 3 if there are any.
    """
    from ..data import check as checks
    from ..data.data_dirs import data_roots
    from ..data.fetch import tell

    root = data_dir or context.obj[0]
    as_json = as_json or context.obj[1]
    found: list[checks.Finding] = []
    for name in checks.NAMES if dataset == "all" else (dataset,):
        try:
            with _progress("files") as (show, _):
                new = checks.check(name, root, show)
        except DataMissing:
            if dataset != "all":
                raise
            continue
        found += new
        for finding in new:
            if finding.doubtful:
                doubt = f"{len(finding.doubtful):,} files do not end as images do and may be truncated"
                tell(f"{finding.folder}: {doubt}: {_first(finding.doubtful, ', ')}")
            if not finding.wrong and not as_json:  # print now, because the next dataset may take long
                print(f"{finding.dataset}: {finding.folder}: {finding.seen}", flush=True)
    if not found:
        raise DataMissing(f"no dataset in {' and '.join(map(str, data_roots(root)))}; run 'sngm data get cifar10'")
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    if wrong := [problem for finding in found for problem in finding.wrong]:
        raise DataMissing(_first(wrong, "; "))


def _first(items: list[str], separator: str) -> str:
    more = [f"and {len(items) - MAX_SHOWN:,} more"] if items[MAX_SHOWN:] else []
    return separator.join([*items[:MAX_SHOWN], *more])


@contextlib.contextmanager
def _progress(unit: str) -> Iterator[tuple[Show, Say]]:
    """Yield a function that shows progress, in bytes for "MB" or in "files", and a function that prints a message.

    On a terminal, progress is a bar from the first call on; elsewhere it is a line every few seconds.
    """
    if not sys.stderr.isatty():
        from ..data.conversion import throttled
        from ..data.fetch import tell

        line = throttled(note)
        size, digits = (1e6, 1) if unit == "MB" else (1, 0)
        yield lambda done, total: line(f"{done / size:,.{digits}f} of {total / size:,.{digits}f} {unit}"), tell
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
        # messages are printed above the bar, without line breaks, so that a URL can be copied
        yield (
            lambda done, total: bar.update(task, completed=done, total=total, visible=True),
            lambda text: console.print(Text(f"sngm: {text}"), soft_wrap=True),
        )
