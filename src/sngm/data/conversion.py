"""Convert datasets to arrays once, into a folder beside the data or in the user's cache.

This folder is always complete or absent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from ..environment import is_first
from ..errors import Failed
from ..files import locked
from .fetch import digest, tell

Show = Callable[[str], None]
T = TypeVar("T")

FACTS = "facts.json"
INTERVAL = 5.0  # seconds between two lines of progress


def load_or_convert(
    source: Path,
    dataset: str,
    key: Sequence[Any],
    load: Callable[[Path, dict[str, Any]], T | None],
    convert: Callable[[Path, Show], None],
    *,
    space: str,
    show: Show | None,
) -> T:
    """Load the converted form of a dataset; if it is missing, incomplete or outdated, convert the dataset first.

    The result is written to ``.sngm`` in `source`, or below ``~/.cache/sngm`` if ``.sngm`` is not writable. While
    another process converts the same dataset, this function waits.

    Args:
        source: folder of the dataset.
        dataset: name of the dataset in messages, and of its folder in ``~/.cache/sngm``.
        key: values, of JSON types, that the converted arrays depend on besides the content of `source`.
        load: returns the converted form in a folder, given the content of its facts.json; None if it is outdated.
        convert: writes the arrays and facts.json into a folder, and calls its second argument with lines of progress.
        space: the disk space that a conversion takes, for the message about a full disk.
        show: called with messages for the user; None: print them on stderr.
    """
    shown = show or (lambda text: tell(f"{dataset}: {text}"))

    def loaded(folder: Path) -> T | None:
        try:
            facts = _read_facts(folder)
            return None if facts is None else load(folder, facts)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # missing or damaged
            return None

    beside, cache = source / ".sngm", Path.home() / ".cache" / "sngm" / dataset / ".sngm"
    for folder, of in ((beside, ""), (cache, str(source))):
        name = hashlib.sha256(json.dumps([*key, of]).encode()).hexdigest()[:16]
        target = folder / name
        if not writable(folder, name):
            if (found := loaded(target)) is not None:  # converted by another user
                return found
            continue
        with locked(
            folder,
            f".{name}.lock",
            waiting=lambda: shown("another process is converting the data") if is_first() else None,
        ):
            found = loaded(target)
            if found is None:
                with _atomic_folder(target, space) as aside:
                    convert(aside, shown)
                found = loaded(target)  # before the lock is released, so that no process replaces it
            if found is None:
                raise Failed(f"{source} changed while it was read; try again")
            return found
    raise Failed(f"neither {beside} nor {cache} is writable, and {dataset} must be converted; make one writable")


def writable(folder: Path, name: str) -> bool:
    """Create a folder if it is missing, and return whether the lock file of `name` can be created in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f".{name}.lock", "a"):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def _atomic_folder(target: Path, space: str) -> Iterator[Path]:
    """Yield a folder to fill. It replaces `target` when the ``with`` block ends, and is removed if the block raises."""
    aside, old = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.old")
    for left in (aside, old):  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        if target.exists():
            os.replace(target, old)
        os.replace(aside, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Failed(f"no space left for {target}; a conversion takes {space} there") from error
        raise
    finally:
        for left in (aside, old):
            shutil.rmtree(left, ignore_errors=True)


def new_array(stack: contextlib.ExitStack, path: Path, shape: tuple[int, ...], dtype: str) -> IO[bytes]:
    """Open a new .npy file and write its header; the caller then writes the elements in order."""
    file = stack.enter_context(path.open("wb"))
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)  # type: ignore[no-untyped-call,unused-ignore]
    return file


def flushed(files: Iterable[IO[bytes]]) -> dict[str, dict[str, Any]]:
    """Write all buffered bytes of open files to disk, and return the size and SHA256 of each file by its name."""
    found = {}
    for file in files:
        file.flush()
        os.fsync(file.fileno())
        found[Path(file.name).name] = {"bytes": file.tell(), "sha256": digest(Path(file.name), "sha256")}
    return found


def _read_facts(folder: Path) -> dict[str, Any] | None:
    """Return the content of facts.json in a converted form; None if an array is incomplete."""
    facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
    whole = all((folder / name).stat().st_size == array["bytes"] for name, array in facts["arrays"].items())
    return facts if whole else None


def verify(folder: Path) -> list[str]:
    """Read all converted arrays, and return a message for each whose checksum is wrong."""
    facts = json.loads((folder / FACTS).read_text())
    return [
        f"{folder / name} has the SHA256 {found}, not {wanted['sha256']}; delete {folder}, and it is made again"
        for name, wanted in facts["arrays"].items()
        if (found := digest(folder / name, "sha256")) != wanted["sha256"]
    ]


def throttled(show: Show) -> Show:
    """Return a function that calls `show` with a line of progress at most every few seconds."""
    last = time.monotonic()

    def progress(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            show(text)

    return progress
