"""Exceptions, each of which the command line maps to an exit code, and a warning."""

from typing import Any


class UsageError(ValueError):
    """An argument is invalid, or names something that does not exist."""


class BrokenRecord(UsageError):
    """A record, such as the file run.json of a run, is truncated or was changed after it was written.

    `record` is the content of the file if it is a JSON object whose digest does not match, else None.
    """

    def __init__(self, message: str, record: dict[str, Any] | None = None) -> None:
        super().__init__(f"{message}; the command that made it writes it again")
        self.record = record


class DataMissing(FileNotFoundError):
    """A dataset is missing, incomplete or broken."""


class DataWarning(UserWarning):
    """A dataset differs from the published one."""


class Failed(RuntimeError):
    """Something failed although all arguments are valid, such as a run of a study, a download or a worker process."""


class Interrupted(Exception):
    """The run was stopped on request; its progress is saved."""
