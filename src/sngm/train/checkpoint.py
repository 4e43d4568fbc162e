"""The last two checkpoints of a run, each with a checksum: a broken one is noticed, and the one before it used."""

from __future__ import annotations

import hashlib
import io
import warnings
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
    before = {name: checksum for name, checksum in (_index(folder) or {}).items() if name < path.name}
    kept = dict(sorted(before.items())[1 - KEEP :]) | {path.name: hashlib.sha256(content).hexdigest()}
    write_json(folder / INDEX, kept)
    for old in [*folder.glob("checkpoint-*.pt"), *folder.glob(".checkpoint-*.tmp")]:  # .tmp: of a killed process
        if old.name not in kept:
            old.unlink(missing_ok=True)
    return path


def load(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any] | None:
    """The newest checkpoint that is whole, or None. A broken one gets a warning."""
    index = _index(folder)
    paths = folder.glob("checkpoint-*.pt") if index is None else [folder / name for name in index]
    for path in sorted(paths, reverse=True):
        try:
            content = path.read_bytes()
            if index is not None and hashlib.sha256(content).hexdigest() != index[path.name]:
                raise ValueError("its checksum is wrong")
            # weights_only: a checkpoint is data, and must not be able to run code
            state: dict[str, Any] = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
        except Exception as error:
            if index is not None and not isinstance(error, (OSError, ValueError)):
                raise  # it is what was written, and is not to blame
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"checkpoint {path} cannot be used ({reason}); taking an older one, or beginning anew", stacklevel=2
            )
            continue
        return state
    return None


def is_broken(folder: Path) -> bool:
    """Whether the last checkpoint is there, and is not what was written; one that was deleted is not broken."""
    name, checksum = max((_index(folder) or {}).items(), default=("", ""))
    path = folder / name
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != checksum


def _index(folder: Path) -> dict[str, str] | None:
    """The checksums of checkpoints by name; None if they cannot be read."""
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        index = read_json(path)
        if not isinstance(index, dict):
            raise ValueError("it holds no checksums by name")
        return {str(k): str(v) for k, v in index.items()}
    except ValueError as error:
        warnings.warn(f"{path} cannot be used ({error}); the checkpoints are taken as they are", stacklevel=3)
        return None
