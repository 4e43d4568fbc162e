"""Checkpoints with checksums. The last two are kept; if the last one is broken, the one before it is used."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..files import read_json, write_atomically, write_json

KEEP = 2
INDEX = "checkpoints.json"


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint and its checksum, delete all but the last two checkpoints, and return the path."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    path = folder / f"checkpoint-{step:08d}.pt"
    write_atomically(path, content)
    # if there are later checkpoints, they are broken, because the run resumed from an earlier one: drop them
    before = {name: checksum for name, checksum in _index(folder).items() if name < path.name}
    kept = dict(sorted(before.items())[1 - KEEP :]) | {path.name: hashlib.sha256(content).hexdigest()}
    write_json(folder / INDEX, kept)
    for old in _files(folder):
        if old.name not in kept:
            old.unlink(missing_ok=True)
    remove_shards(folder, keep=[Path(name).stem.replace("checkpoint", "shards") for name in kept])
    return path


def shards_of(step: int) -> str:
    """Return the name of the folder that has the model and optimizer of the sharded checkpoint at a step."""
    return f"shards-{step:08d}"


def sizes_of(shards: Path) -> dict[str, int]:
    """Return the size in bytes of each file of a sharded checkpoint, by file name."""
    return {path.name: path.stat().st_size for path in sorted(shards.glob("*")) if path.is_file()}


def remove_shards(folder: Path, keep: Sequence[str] = ()) -> None:
    """Delete the folders of sharded checkpoints in a run folder, except those whose names are in `keep`."""
    for old in folder.glob("shards-*"):
        if re.fullmatch(r"shards-\d{8,}", old.name) and old.name not in keep:
            shutil.rmtree(old, ignore_errors=True)


def discard(folder: Path) -> None:
    """Delete all checkpoints of a run folder, and their index."""
    for path in [*_files(folder), folder / INDEX]:
        path.unlink(missing_ok=True)
    remove_shards(folder)


def load(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any] | None:
    """Return the newest intact checkpoint of a run folder, or None if there is none; warn of broken checkpoints."""
    for content in _whole(folder):
        # weights_only, because a checkpoint must not be able to run code
        state: dict[str, Any] = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
        if "shards" not in state or sizes_of(folder / state["shards"]) == state["shard_sizes"]:
            return state
        warnings.warn(f"{folder / state['shards']} is incomplete; taking an older one if there is one", stacklevel=2)
    return None


def whole(folder: Path) -> bool:
    """Return whether a run folder has an intact checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `load` warns of broken checkpoints
        return any(True for _ in _whole(folder))


def is_broken(folder: Path) -> bool:
    """Return whether the last checkpoint is corrupt, or is missing although an earlier one exists.

    If all checkpoints were deleted, the result is False, because a finished run does not need them.
    """
    index = _index(folder)
    last = max([*index, *(path.name for path in _files(folder))], default=None)
    return last is not None and _read(folder / last, index) is None


def _whole(folder: Path) -> Iterator[bytes]:
    """Yield the contents of intact checkpoints, newest first; if none matches the index, of all that can be loaded."""
    index, found = _index(folder), False
    for name in sorted({*index, *(path.name for path in _files(folder))}, reverse=True):
        content = _read(folder / name, index)
        if content is not None:
            found = True
            yield content
        else:
            why = "its checksum is wrong" if (folder / name).is_file() else "it is missing"
            text = f"checkpoint {folder / name} cannot be used ({why}); taking an older one if there is one"
            warnings.warn(text, stacklevel=3)
    if not found and index:
        for path in sorted(_files(folder), reverse=True):
            if (content := _read(path, {})) is not None:
                yield content


def _read(path: Path, index: dict[str, str]) -> bytes | None:
    """Return the content of a checkpoint if it is intact, else None.

    A file that is missing in the index, because the run was killed before adding it, is checked by its own CRC-32
    checksums.
    """
    if not path.is_file():
        return None
    content = path.read_bytes()
    if path.name in index:
        return content if hashlib.sha256(content).hexdigest() == index[path.name] else None
    return content if _loads(content, int(path.stem.partition("-")[2])) else None


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*.pt") if re.fullmatch(r"checkpoint-\d{8,}\.pt", path.name)]


def _index(folder: Path) -> dict[str, str]:
    """Return checkpoints' checksums by file name; {} if the index is broken or missing, or none of its files exists."""
    path = folder / INDEX
    try:
        index = {str(name): str(checksum) for name, checksum in read_json(path).items()}
        return index if any((folder / name).is_file() for name in index) else {}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        warnings.warn(f"{path} is broken; the checkpoints that can be read are taken", stacklevel=4)
        return {}


def _loads(content: bytes, step: int) -> bool:
    """Return whether the content is a checkpoint of this step, and every file in its zip archive matches its CRC-32."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            if parts.testzip() is not None:  # torch.load does not check the CRC
                return False
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        parts_are_dicts = all(isinstance(state[key], dict) for key in ("run", "model", "optimizer"))
        return parts_are_dicts and isinstance(state["run"]["history"], list) and bool(state["run"]["step"] == step)
    except Exception:  # broken content can raise any error
        return False
