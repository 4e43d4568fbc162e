"""Exceptions. The command line maps each to an exit code."""

from typing import Any


class UsageError(ValueError):
    """An argument is invalid, or names something that does not exist."""


class BrokenRecord(UsageError):
    """A record is truncated, or was changed after it was written. If the file is JSON, `record` is its content."""

    def __init__(self, message: str, record: dict[str, Any] | None = None) -> None:
        super().__init__(f"{message}; the command that made it writes it again")
        self.record = record


class DataMissing(FileNotFoundError):
    """A dataset was not found."""


class DataWarning(UserWarning):
    """A dataset differs from the published one."""


class Failed(RuntimeError):
    """A failure outside the program, such as a killed process."""


class Interrupted(Exception):
    """The run was stopped on request; its progress is saved."""
