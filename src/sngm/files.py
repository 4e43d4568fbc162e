"""Atomic file writes, records with digests, JSON, and locks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import BrokenRecord, UsageError

LEFTOVER = re.compile(r"\.[\w-]+\.(csv|json|jsonl|pt|html|md|svg)\.\d+\.tmp")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: after a crash it has either its old or its new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno:  # name this file, not the temporary file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def short_hash(value: Any) -> str:
    """Return a short hash of settings, for folder names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON, with null for NaN and infinity."""
    write_atomically(path, (json.dumps(finite(value), indent=2, allow_nan=False) + "\n").encode())


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record with a digest of its values."""
    write_json(path, {**record, "digest": digest(record)})


def read_record(path: Path) -> dict[str, Any]:
    """Read a record and check its digest. Records of older versions have no digest.

    Raises:
        BrokenRecord: the file is not a JSON object, or does not match its digest.
    """
    record = read_json(path)
    if not isinstance(record, dict):
        raise BrokenRecord(
            f"{path} must contain a JSON object written by sngm, got {type(record).__name__}; choose another folder"
        )
    if record.pop("digest", None) not in (None, digest(record)):
        raise BrokenRecord(f"{path} was changed after it was written: its digest does not match", record)
    return record


def digest(record: dict[str, Any]) -> str:
    """Return the SHA256 of a record as JSON, independent of the order of keys."""
    plain = json.loads(json.dumps(finite(record)))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def metrics_digest(folder: Path) -> str | None:
    """Return the SHA256 of the metrics.jsonl of a run; None if there is no such file."""
    try:
        return hashlib.sha256((folder / "metrics.jsonl").read_bytes()).hexdigest()
    except OSError:
        return None


def metrics_changed(folder: Path, record: dict[str, Any]) -> bool:
    """Return whether metrics.jsonl was changed after the run ended; False if an older version wrote the record."""
    return "metrics_digest" in record and record["metrics_digest"] != metrics_digest(folder)


@contextlib.contextmanager
def results_in(folder: Path) -> Iterator[None]:
    """Create a folder for the ``with`` block to write into; remove it if the block fails and leaves it empty."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if new:
            with contextlib.suppress(OSError):  # the folder is not empty
                folder.rmdir()
        raise


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files of killed processes. The caller must hold the lock of the folder."""
    for path in folder.glob(".*.tmp"):
        if LEFTOVER.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def check_folder(folder: Path, mark: str) -> None:
    """Raise UsageError if results cannot be written to a folder. Nothing is created.

    The folder must be writable. If it exists and is not empty, it must hold the file `mark`, such as advice.json, which
    earlier results contain.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / mark).exists():
        raise UsageError(f"{folder} holds other things than a {mark}; name another folder with `out`")
    check_writable(folder)


def check_writable(folder: Path, argument: str = "out") -> None:
    """Raise UsageError if a folder is not writable or cannot be created. Nothing is created.

    `argument` is the name of the argument that the message says to change.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{there} is not a folder; name another with `{argument}`")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UsageError(f"{there}: {error.strerror}; name another folder with `{argument}`") from error


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        BrokenRecord: the file is not JSON, or is nested too deeply to be processed.
    """
    try:
        value = json.loads(path.read_bytes())  # bytes, because JSON is UTF-8 in any locale
        finite(value)  # raises RecursionError here, not later
        return value
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise BrokenRecord(f"{path} is not readable as JSON ({why})") from error


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, which JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


@contextlib.contextmanager
def locked(folder: Path, name: str = ".lock", waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock `name` of a folder; the operating system releases it when the process ends.

    Args:
        folder, name: the folder and the file name of the lock.
        waiting: called once before waiting for another process that holds the lock.

    Raises:
        UsageError: another process holds the lock, and `waiting` is None.
    """
    from filelock import FileLock, Timeout  # imported here to keep --help fast

    lock = FileLock(folder / name)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        if waiting is None:
            raise UsageError(f"another process is training in {folder}; wait for it, or name another folder") from None
        waiting()
        held = lock.acquire()
    with held:
        yield
