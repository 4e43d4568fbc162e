"""Read and validate the environment variables of torchrun."""

from __future__ import annotations

import os

from .errors import UsageError

MOST_RANKS = 1_000_000
MOST_PORT = 65_535
START = "start the run with torchrun, or unset it"


def is_first() -> bool:
    """Return whether this process has rank 0 or is the only process. Only this process prints messages."""
    return os.environ.get("RANK", "0") == "0"


def ranks() -> int:
    """Return the number of processes of the run, from WORLD_SIZE; 1 if the variable is not set.

    Raises:
        UsageError: WORLD_SIZE is not a whole number of at least 1.
    """
    return _whole("WORLD_SIZE", 1, MOST_RANKS, default=1)


def local_ranks() -> int:
    """Return the number of processes on this machine, from LOCAL_WORLD_SIZE; 1 if the variable is not set."""
    return _whole("LOCAL_WORLD_SIZE", 1, MOST_RANKS, default=1)


def launch() -> tuple[int, int, int]:
    """Return the rank of this process, the number of processes, and the rank of this process on its machine.

    Raises:
        UsageError: one of torchrun's environment variables is missing or invalid, or does not fit the others.
    """
    count = ranks()
    rank = _whole("RANK", 0, count - 1, default=0 if count == 1 else None)
    if count > 1:
        if not os.environ.get("MASTER_ADDR"):
            raise UsageError(
                f"WORLD_SIZE is {count}, but MASTER_ADDR is not set; start the run with torchrun, or unset WORLD_SIZE"
            )
        _whole("MASTER_PORT", 0, MOST_PORT)
    return rank, count, _whole("LOCAL_RANK", 0, MOST_RANKS, default=0)


def _whole(name: str, least: int, most: int, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise UsageError(f"WORLD_SIZE is set, but {name} is not; start the run with torchrun, or unset WORLD_SIZE")
        return default
    digits = text.strip()
    # int() also accepts signs, underscores and non-ASCII digits, and raises for very long strings
    value = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else -1
    if not least <= value <= most:
        raise UsageError(f"{name} must be a whole number from {least} to {most}, got {text[:40]!r}; {START}")
    return value
