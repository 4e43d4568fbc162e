"""What can go wrong, by what the user can do about it. The command line maps each to its exit code."""

from typing import Any


class UsageError(ValueError):
    """Something asked for does not exist or does not fit: mend the command."""


class BrokenRecord(UsageError):
    """A record is not as it was written: cut short, or changed. `record` is what it says, where that is JSON."""

    def __init__(self, message: str, record: dict[str, Any] | None = None) -> None:
        super().__init__(f"{message}; the command that made it writes it again")
        self.record = record


class DataMissing(FileNotFoundError):
    """A dataset is not where it was looked for: fetch it, or say where it is."""


class Failed(RuntimeError):
    """Something outside the program went wrong, such as a process that was killed: try again."""


class Interrupted(Exception):
    """Asked to stop; what was done is on disk."""
