"""The last two checkpoints of a run, each with a checksum: a broken one is noticed, and the one before it used."""

from __future__ import annotations

import hashlib
import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from ..files import read_json, write_atomically, write_json

KEEP = 2
INDEX = "checkpoints.json"


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint, note its checksum, and drop those before the last two."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    path = folder / f"checkpoint-{step:08d}.pt"
    write_atomically(path, content)
    # later ones belong to a course that was given up: they were broken, and the run went back before them
    before = {name: checksum for name, checksum in _index(folder).items() if name < path.name}
    kept = dict(sorted(before.items())[1 - KEEP :]) | {path.name: hashlib.sha256(content).hexdigest()}
    write_json(folder / INDEX, kept)
    for old in folder.glob("checkpoint-*.pt"):
        if old.name not in kept:
            old.unlink(missing_ok=True)
    return path


def discard(folder: Path) -> None:
    """Remove all checkpoints of a folder; its index last, so that no part of them is taken for a whole."""
    for path in [*folder.glob("checkpoint-*.pt"), folder / INDEX]:
        path.unlink(missing_ok=True)


def load(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any] | None:
    """The newest checkpoint that is whole, or None. A broken one gets a warning."""
    for name, checksum in sorted(_index(folder).items(), reverse=True):
        path = folder / name
        try:
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != checksum:
                raise ValueError("its checksum is wrong")
        except (OSError, ValueError) as error:
            warnings.warn(
                f"checkpoint {path} cannot be used ({error}); taking an older one, or beginning anew", stacklevel=2
            )
            continue
        # weights_only: a checkpoint is data, and must not be able to run code
        state: dict[str, Any] = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
        return state
    return None


def whole(folder: Path) -> bool:
    """Whether any checkpoint is as it was written."""
    return any(_checksum(folder / name) == checksum for name, checksum in _index(folder).items())


def is_broken(folder: Path) -> bool:
    """Whether the last checkpoint is there, and is not what was written; one that was deleted is not broken."""
    name, checksum = max(_index(folder).items(), default=("", ""))
    return _checksum(folder / name) not in (None, checksum)


def _checksum(path: Path) -> str | None:
    """The SHA256 of a file's content; None if there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _index(folder: Path) -> dict[str, str]:
    """The checksums of checkpoints by name.

    An index that is missing, broken or of other files is made again from the checkpoints that load.
    """
    path = folder / INDEX
    try:
        index = read_json(path)
        if any((folder / name).is_file() for name in index):
            return {str(name): str(checksum) for name, checksum in index.items()}
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, AttributeError):
        warnings.warn(f"{path} is broken; the checkpoints that can be read are taken", stacklevel=3)
    contents = {path.name: path.read_bytes() for path in folder.glob("checkpoint-*.pt")}
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items() if _loads(content)}


def _loads(content: bytes) -> bool:
    """Whether this is a checkpoint whose parts all have the CRC-32 that was written beside them."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            if parts.testzip() is not None:  # torch.load does not look
                return False
        return isinstance(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True), dict)
    except Exception:  # of many kinds: the content may be anything
        return False
