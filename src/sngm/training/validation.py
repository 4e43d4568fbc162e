"""Validation of run.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import BrokenRecord, UsageError
from ..options import short
from .config import RunConfig

STATUSES = ("running", "interrupted", "failed", "finished", "diverged")
TYPES: dict[str, type] = {
    "label": str, "hash": str, "processes": int, "parameters": int, "metric": str, "started": str, "error": str,
    "data": dict, "result": dict, "timing": dict, "versions": dict, "hardware": dict, "made_before": list,
    "diverged_at_step": int, "result_of": str, "result_epoch": int, "config": dict, "status": str,
}  # fmt: skip
NEEDED = {"finished": ("label", "result", "timing"), "diverged": ("label", "diverged_at_step")}


def check_record(record: dict[str, Any], file: Path) -> None:
    """Raise UsageError if fields of a record are missing or of the wrong type; the message names `file`."""
    if record.get("format", 1) != 1:
        raise UsageError(
            f"{file}: format must be 1, got {short(record['format'])}; open it with the version of sngm that wrote it"
        )
    if "format" not in record or "config" not in record:
        raise BrokenRecord(f"{file} is not the record of a run")
    for name, kind in TYPES.items():
        if name in record and (not isinstance(record[name], kind) or isinstance(record[name], bool)):
            _refuse(file, f"{name} must be of type {kind.__name__}, got {short(record[name])}")
    status = record.get("status")
    if status not in STATUSES:
        _refuse(file, f"status must be one of {', '.join(STATUSES)}, got {short(status)}")
    for name in NEEDED.get(str(status), ()):
        if name not in record:
            _refuse(file, f"{name} is missing")
    numbers = {f"result.{key}": value for key, value in record.get("result", {}).items()}
    if status == "finished":
        numbers["timing.seconds"] = record["timing"].get("seconds")
        if numbers["timing.seconds"] is None:
            _refuse(file, "timing.seconds is missing")
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            _refuse(file, f"{name} must be a number, got {short(value)}")


def config_of(record: dict[str, Any], file: Path) -> RunConfig:
    """Return the config of a record.

    Raises:
        UsageError: the config is invalid; the message names `file`.
    """
    try:
        return RunConfig.from_dict(record["config"])
    except UsageError as error:
        text = str(error).replace("`", "")  # the names are fields of the record, not arguments
        raise UsageError(f"{file}: {text}") from error


def _refuse(file: Path, why: str) -> None:
    raise BrokenRecord(f"{file} is not the record of a run: {why}")
