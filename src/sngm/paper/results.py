"""The runs behind every number: ``results/<task>/runs.jsonl``, one line a run, small enough for git."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from .. import tasks
from ..errors import UsageError
from ..files import finite, locked, metrics_changed, read_record, write_atomically
from ..report.records import BROKEN
from ..training.config import RunConfig, resolve
from ..training.run_folder import FINISHED, differences

FOLDER = Path("results")
FILE, REPEATED = "runs.jsonl", "repeated.jsonl"
KEPT = (
    "config", "label", "hash", "status", "result", "result_of", "result_epoch", "data", "started", "versions",
    "hardware",
)  # fmt: skip
TIMES = ("seconds", "seconds_per_epoch", "step")
NOT_OF_A_CURVE = ("epoch", "step", "lr")
DIGITS = 5  # of a curve's numbers
NAMED = "with code that is committed and installed by pip install -e from its clone, or with SNGM_COMMIT set"


@dataclass(frozen=True)
class Line:
    """One run as it is kept: the record of its folder, and its curve by columns."""

    record: dict[str, Any]

    @cached_property
    def config(self) -> RunConfig:
        return RunConfig.from_dict(self.record["config"])

    @property
    def hash(self) -> str:
        return str(self.record["hash"])

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = self.record["result"]
        return found

    @property
    def curve(self) -> dict[str, list[float | None]]:
        found: dict[str, list[float | None]] = self.record["curve"]
        return found

    @property
    def hardware(self) -> str:
        return str(self.record["hardware"]["name"])

    @property
    def order(self) -> tuple[Any, ...]:
        """Of lines in a file: the same whichever machine's came first."""
        c = self.config
        return c.method, c.batch, c.part, c.lr, c.seed, self.hash, str(self.record["commit"]), self.text

    @cached_property
    def made(self) -> tuple[Any, ...]:
        """What tells a run from the same one made again; the one that was begun first counts."""
        times, place = (json.dumps(self.record[key], sort_keys=True) for key in ("timing", "hardware"))
        return str(self.record.get("started", "")), str(self.record["commit"]), times, place

    @cached_property
    def text(self) -> str:
        return json.dumps(finite(self.record), sort_keys=True, allow_nan=False, separators=(", ", ": "))

    def value(self, metric: str) -> float | None:
        """The test score, None if the run diverged or has none."""
        found = self.result.get(f"test_{metric}") if self.record["status"] == "finished" else None
        return None if found is None else float(found)


class Results:
    """All committed runs of all tasks: one a config, and those that were made again."""

    def __init__(self, lines: Iterable[Line], repeated: Iterable[Line] = ()) -> None:
        # files that git has merged, or that a stop has left, may hold two of one config, and one run twice
        every = sorted(_by_run([*lines, *repeated]).values(), key=lambda line: line.made)
        first = {line.hash: line for line in reversed(every)}
        self.lines = {line.hash: line for line in sorted(first.values(), key=lambda line: line.order)}
        self.repeated = sorted((line for line in every if first[line.hash] is not line), key=lambda line: line.order)

    def of(self, config: RunConfig) -> Line | None:
        """The run of a config. A trial whose task keeps validation data of its own is a full run as well."""
        if found := self.lines.get(config.hash):
            return found
        if config.part == "select":
            full = self.lines.get(replace(config, part="full").hash)
            if full and "validation" in full.record["data"]:
                return full
        return None

    def of_task(self, task: str) -> list[Line]:
        return [line for line in self.lines.values() if line.config.task == task]


def read(folder: Path = FOLDER) -> Results:
    """All runs kept in a folder."""
    there: dict[str, list[Line]] = {FILE: [], REPEATED: []}
    for task in sorted(path for path in folder.glob("*") if path.is_dir()):
        for name, lines in there.items():
            lines += _of_task(task / name)
        _check_data([line for lines in there.values() for line in lines if line.config.task == task.name])
    return Results(there[FILE], there[REPEATED])


def _of_task(path: Path) -> list[Line]:
    """The lines of a file, if it is there: all of the task that its folder is named for."""
    lines = read_lines(path) if path.exists() else []
    if other := next((line for line in lines if line.config.task != path.parent.name), None):
        raise UsageError(f"{path}: run {other.hash} is of {other.config.task}, and belongs in the folder of that name")
    return lines


def read_lines(path: Path) -> list[Line]:
    """The runs of one file."""
    lines, where = [], str(path)
    try:
        for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
            where = f"{path}, line {number}"
            lines.append(whole(Line(json.loads(text, parse_constant=_no_number))))
    except (*BROKEN, UsageError) as error:
        raise UsageError(
            f"{where}: not a run as it was kept ({in_words(error)}); git may have the file as it was"
        ) from error
    return lines


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def in_words(error: Exception) -> str:
    """What is wrong with a record; Python's own words say nothing to people."""
    if isinstance(error, KeyError):
        return f"no {error.args[0]}"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON from its character {error.colno} on"
    return str(error) if isinstance(error, (ValueError, UsageError, OSError)) else "a part of it is of another kind"


def whole(line: Line) -> Line:
    """The line itself, if all parts are there and say the same; what is not is a ValueError, or another of BROKEN."""
    line.order, line.made, line.hardware  # noqa: B018  read all that is needed
    record, result, curve = line.record, line.result, line.curve
    if line.config.task not in tasks.names():  # whose code would be run, to know its metric
        raise ValueError(f"of {line.config.task}, a task of your own; only those that come with sngm are kept")
    for name in ("result", "curve", "data", "timing", "versions"):
        if not isinstance(record[name], dict):
            raise ValueError(f"{name} is no mapping")
    if line.config.hash != line.hash or record["label"] != line.config.label:
        raise ValueError("the config is not the one that its hash and label are of")
    if why := unnamed(record["commit"]):
        raise ValueError(why)
    if record["status"] not in FINISHED or record.get("result_of", "last") not in ("last", "best"):
        raise ValueError(f"not a run that has finished: {record['status']}, {record.get('result_of')}")
    if not isinstance(record["command"], str):
        raise ValueError("no command")
    datetime.fromisoformat(record.get("started", "2000-01-01"))  # the first runs that were kept have none
    times = [record["timing"].get(key) for key in TIMES[:2]]
    for value in [*result.values(), *times, *(value for column in curve.values() for value in column)]:
        if value is not None and not isinstance(value, (int, float)):
            raise ValueError(f"{value!r} is no number")
    if any(value is not None and value < 0 for value in times):
        raise ValueError("a time below zero")
    if record["status"] == "finished":
        of = "validation" if line.config.part == "select" else "test"
        metric = tasks.find(line.config.task).metric
        if (score := f"{of}_{metric}") not in result:
            raise ValueError(f"no {score} in the result")
        if metric in ("accuracy", "auc") and not 0 <= (result[score] or 0) <= 1:
            raise ValueError(f"{score} is {result[score]}, and should be between 0 and 1")
        for key in {"train_loss", *result}:
            if key not in curve:
                raise ValueError(f"no {key} in the curve")
        for key in result:
            there = curve[key][record["result_epoch"] - 1 :][:1]
            if there != [rounded(result[key])]:
                raise ValueError(
                    f"{key} is {result[key]} in the result, and {there[0] if there else 'not'} in the curve"
                )
    return line


def of_folder(path: Path) -> Line:
    """A finished run's folder as a line to keep. Refused: what cannot be made again."""
    record = read_record(path / "run.json")
    if record.get("status") not in FINISHED:
        raise UsageError(f"{path}: not a run that has finished; go on with it first")
    if record.get("made_before"):
        raise UsageError(
            f"{path}: made in pieces with other code or on other hardware; make it again in another folder, in one go"
        )
    commit = record.get("commit")
    if why := unnamed(commit):
        raise UsageError(f"{path}: {why}, so nobody could repeat it; make it again in another folder, {NAMED}")
    try:
        if metrics_changed(path, record):
            raise ValueError("metrics.jsonl was changed")
        epochs = [json.loads(line) for line in (path / "metrics.jsonl").read_text("utf-8").splitlines()]
        columns = [key for key in epochs[0] if key not in NOT_OF_A_CURVE] if epochs else []
        kept = {key: record[key] for key in KEPT if key in record}
        timing = {key: record["timing"][key] for key in TIMES if key in record.get("timing", {})}
        curve = {key: [rounded(epoch.get(key)) for epoch in epochs] for key in columns}
        line = Line({**kept, "timing": timing, "commit": commit, "curve": curve})
        return whole(Line({**line.record, "command": command_of(line.config)}))
    except BROKEN as error:
        raise UsageError(
            f"{path}: not as it was written ({in_words(error)}); make it again in another folder"
        ) from error


def unnamed(commit: Any) -> str | None:
    """Why this does not name the code of a run, if it does not."""
    if not commit or not isinstance(commit, str):
        return "its record names no commit"
    return "the code had changes that are in no commit" if commit.endswith("+") else None


def rounded(value: float | None) -> float | None:
    """To so many digits that a curve can be drawn."""
    return None if value is None else float(f"{value:.{DIGITS}g}")


class Kept(NamedTuple):
    """How many runs were new, and how many of those repeat one that is kept."""

    new: int
    repeated: int


def keep(lines: Iterable[Line], folder: Path = FOLDER) -> Kept:
    """Add runs to the files of their tasks; say how many were new.

    Of runs with the same config, the one that was begun first is the result, and the others are that run repeated.
    """
    by_task: dict[str, list[Line]] = {}
    for line in lines:
        by_task.setdefault(line.config.task, []).append(line)
    counts = [_keep_of_task(folder / task, new) for task, new in by_task.items()]
    return Kept(sum(count.new for count in counts), sum(count.repeated for count in counts))


def _keep_of_task(folder: Path, new: list[Line]) -> Kept:
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / name for name in (FILE, REPEATED)}
    with locked(folder, waiting=lambda: None):  # another process may be keeping runs too
        there = _by_run(line for path in files.values() for line in _of_task(path))
        every = _by_run([*there.values(), *new])
        _check_data(list(every.values()))
        ordered = sorted(every.values(), key=lambda line: line.made)
        first = {line.hash: line for line in reversed(ordered)}
        for name, path in reversed(files.items()):  # stopped between the two, a run may stand in both, but not in none
            lines = [line for line in ordered if (first[line.hash] is line) == (name == FILE)]
            if lines or path.exists():
                text = "".join(line.text + "\n" for line in sorted(lines, key=lambda line: line.order))
                write_atomically(path, text.encode())
    repeated = len(every) - len(first) - (len(there) - len({line.hash for line in there.values()}))
    return Kept(len(every) - len(there), repeated)


def _run(line: Line) -> tuple[Any, ...]:
    """The same of two lines that tell of one run."""
    return line.hash, *line.made


def _by_run(lines: Iterable[Line]) -> dict[tuple[Any, ...], Line]:
    found: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        if found.setdefault(_run(line), line).text != line.text:
            raise UsageError(
                f"{line.config.task}, run {line.hash}: two lines tell of it and differ; git may have the file as it was"
            )
    return found


def _check_data(lines: list[Line]) -> None:
    """Runs of one task are only comparable on the same data."""
    seen: dict[tuple[str, str], Line] = {}
    for line in lines:
        key = line.config.part, str(line.config.task_settings.get("files"))
        other = seen.setdefault(key, line)
        if differing := differences(other.record["data"], line.record["data"]):
            raise UsageError(
                f"{line.config.task}, run {line.hash}: on other data than run {other.hash}, which is kept: "
                + "; ".join(differing)
            )


def command_of(config: RunConfig) -> str:
    """The command that makes this run again: what differs from the task's defaults on a GPU.

    >>> from sngm.train import resolve
    >>> command_of(resolve("digits", "sngm", lr=0.3, batch=512, seed=1, method_settings={"weight_decay": 8e-4}))
    'sngm train digits --method sngm --lr 0.3 --batch 512 --seed 1 --set weight_decay=0.0008'
    """
    usual = resolve(config.task, config.method, lr=config.lr, batch=config.batch, device="cuda")
    words = ["sngm", "train", config.task, "--method", config.method, "--lr", repr(config.lr), "--batch"]
    words.append(str(config.batch))
    for field in fields(RunConfig):
        name = field.name
        value, default = getattr(config, name), getattr(usual, name)
        if value == default or name in ("method_settings", "task_settings", "task_source"):
            continue
        shown = "inf" if value is None else str(value)
        words += [f"--{name.replace('_', '-')}", shown]
    for settings, defaults in (
        (config.method_settings, usual.method_settings),
        (config.task_settings, usual.task_settings),
    ):
        for key, value in sorted(settings.items()):
            if repr(value) != repr(defaults.get(key)):  # 0 and 0.0 make different records
                words += ["--set", f"{key}={value}"]
    return shlex.join(words)
