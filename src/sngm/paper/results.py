"""The results folder: one line for each run in ``results/<task>/runs.jsonl``, or in ``repeated.jsonl`` for repeats."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from .. import tasks
from ..errors import UsageError
from ..files import finite, locked, metrics_changed, read_record, write_atomically
from ..parsing import set_flags, sorted_label
from ..report.records import BROKEN
from ..training.config import RunConfig, resolve
from ..training.run_folder import FINISHED, differences

FOLDER = Path("results")
FILE, REPEATED = "runs.jsonl", "repeated.jsonl"
KEPT = (
    "config", "label", "hash", "status", "result", "result_of", "result_epoch", "data", "started", "versions",
    "hardware", "commit",
)  # fmt: skip
TIMES = ("seconds", "seconds_per_epoch", "step")
NOT_OF_A_CURVE = ("epoch", "step", "lr")
DIGITS = 5  # significant digits in a curve
NAMED = "with committed code installed by pip install -e from its clone, or with SNGM_COMMIT set"


@dataclass(frozen=True)
class Line:
    """A run in the results folder: the record from its run folder, and its training curve as lists by metric."""

    record: dict[str, Any]

    @cached_property
    def config(self) -> RunConfig:
        return RunConfig.from_dict(self.record["config"])

    @property
    def hash(self) -> str:
        return str(self.record["hash"])

    @property
    def result(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.record["result"])

    @property
    def curve(self) -> dict[str, list[float | None]]:
        return cast(dict[str, list[float | None]], self.record["curve"])

    @property
    def hardware(self) -> str:
        return str(self.record["hardware"]["name"])

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key of lines in a file, independent of the order in which they were added."""
        c = self.config
        return c.method, c.batch, c.part, c.lr, c.seed, self.hash, str(self.record["commit"]), self.made

    @cached_property
    def made(self) -> tuple[Any, ...]:
        """A sort key for runs of the same config. The run with the smallest key is the result: the one that started
        first, or one without a date."""
        timing, hardware = (json.dumps(self.record[key], sort_keys=True) for key in ("timing", "hardware"))
        return str(self.record.get("started", "")), str(self.record["commit"]), timing, hardware

    @cached_property
    def text(self) -> str:
        return json.dumps(finite(self.record), sort_keys=True, allow_nan=False, separators=(", ", ": "))

    def value(self, metric: str) -> float | None:
        """Return the value of a metric, or None if the run has none; a diverged run has at most "seconds".

        "seconds" is the time of an epoch, and "train_loss" the loss of the last epoch. Other metrics are scores on test
        data, unless their names begin with "validation_".
        """
        if metric == "seconds":
            found = self.record["timing"].get("seconds_per_epoch")
        elif self.record["status"] != "finished":
            return None
        elif metric == "train_loss":
            found = self.curve[metric][-1]
        else:
            found = self.result.get(metric if metric.startswith("validation_") else f"test_{metric}")
        return None if found is None else float(found)


class Results:
    """All runs in the results folder, for all tasks: one run per config, and further runs that repeat a config."""

    def __init__(self, lines: Iterable[Line]) -> None:
        # a file may hold a run twice if git merged it or if writing it was interrupted
        by_run: dict[tuple[Any, ...], Line] = {}
        for line in lines:
            first = by_run.setdefault((line.hash, *line.made), line)
            if first is not line and first.text != line.text:
                raise UsageError(
                    f"{line.config.task}, run {line.hash}: two lines describe it and differ; restore the file from git"
                )
        firsts = {line.hash: line for line in sorted(by_run.values(), key=lambda line: line.made, reverse=True)}
        every = sorted(by_run.values(), key=lambda line: line.order)
        self.lines = {line.hash: line for line in every if firsts[line.hash] is line}
        self.repeated = [line for line in every if firsts[line.hash] is not line]
        _check_data(every)

    def of(self, config: RunConfig) -> Line | None:
        """Return the run of a config, or None.

        If the task has its own validation data, a full run (part "full") also counts as the trial run (part "select"):
        it holds out no training data and has validation scores.
        """
        if found := self.lines.get(config.hash):
            return found
        full = self.lines.get(replace(config, part="full").hash) if config.part == "select" else None
        return full if full and "validation" in full.record["data"] else None

    def of_task(self, task: str) -> list[Line]:
        return [line for line in self.lines.values() if line.config.task == task]


def read(folder: Path = FOLDER) -> Results:
    """Read all runs in a results folder."""
    folders = sorted(path for path in folder.glob("*") if path.is_dir())
    return Results(line for task in folders for line in _of_task(task))


def _of_task(folder: Path) -> list[Line]:
    """Read both files of a task, if they exist, and check that the runs are of that task."""
    lines = []
    for path in (folder / FILE, folder / REPEATED):
        lines += read_lines(path) if path.exists() else []
        if other := next((line for line in lines if line.config.task != folder.name), None):
            raise UsageError(f"{path}: run {other.hash} is of {other.config.task}; move it to the folder of that name")
    return lines


def read_lines(path: Path) -> list[Line]:
    """Read the runs of one file."""
    lines, where = [], str(path)
    try:
        for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
            where = f"{path}, line {number}"
            lines.append(validated(Line(json.loads(text, parse_constant=_not_a_number))))
    except (*BROKEN, UsageError) as error:
        raise UsageError(f"{where}: not a valid record of a run ({explain(error)}); restore it from git") from error
    return lines


def _not_a_number(text: str) -> None:
    raise ValueError(f"{text} is not a finite number")


def explain(error: Exception) -> str:
    """Describe the error that a broken record of a run raised."""
    if isinstance(error, KeyError):
        return f"no {error.args[0]}"
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON at character {error.colno}"
    return str(error) if isinstance(error, (ValueError, UsageError, OSError)) else "a value has the wrong type"


def validated(line: Line) -> Line:
    """Return the line if it is complete and consistent; else raise an exception of `BROKEN`, mostly ValueError."""
    for wrong, why in _checks(line):
        if wrong:
            raise ValueError(why)
    return line


def _checks(line: Line) -> Iterator[tuple[Any, str]]:
    """Yield conditions that must be false, each with an error message. A condition may rely on those before it."""
    line.order, line.made, line.hardware  # noqa: B018  raise KeyError for a missing entry
    record, result, curve, task = line.record, line.result, line.curve, line.config.task
    yield task not in tasks.names(), f"of {task}, a task of your own; only runs of built-in tasks are kept"
    for name in ("result", "curve", "data", "timing", "versions"):
        yield not isinstance(record[name], dict), f"{name} is not a mapping"
    yield line.config.hash != line.hash, "the hash is not that of the config"
    yield sorted_label(record["label"]) != line.config.label, "the label is not that of the config"
    yield (why := unnamed(record["commit"])), why or ""
    ended, of = record["status"], record.get("result_of", "last")
    yield ended not in FINISHED or of not in ("last", "best"), f"not a finished run: {ended}, {of}"
    yield not isinstance(record["command"], str), "no command"
    datetime.fromisoformat(record.get("started", "2000-01-01"))  # the oldest runs have no "started"
    times = [record["timing"].get(key) for key in TIMES[:2]]
    values = [*result.values(), *times, *(value for column in curve.values() for value in column)]
    others = [value for value in values if value is not None and not isinstance(value, (int, float))]
    yield others, f"not a number: {others[:1]}"
    yield any(value is not None and value < 0 for value in times), "a time below zero"
    if ended != "finished":
        return
    metric = tasks.find(task).metric
    score = f"{'validation' if line.config.part == 'select' else 'test'}_{metric}"
    yield score not in result, f"no {score} in the result"
    outside = metric in ("accuracy", "auc") and not 0 <= (result[score] or 0) <= 1
    yield outside, f"{score} must be between 0 and 1, got {result[score]}"
    for key in ("train_loss", *result):
        yield key not in curve, f"no {key} in the curve"
    for key, value in result.items():
        there = curve[key][record["result_epoch"] - 1 :][:1]
        yield (
            there != [rounded(value)],
            f"{key} is {value} in the result, and {there[0] if there else 'missing'} in the curve",
        )


def from_folder(path: Path) -> Line:
    """Read a finished run from its run folder, and return it as a line for the results folder.

    Raises:
        UsageError: the run is not finished, its files were changed, or it cannot be reproduced.
    """
    record = read_record(path / "run.json")
    if record.get("status") not in FINISHED:
        raise UsageError(f"{path}: the run has not finished; resume it first")
    if record.get("made_before"):
        raise UsageError(f"{path}: resumed with other code or on other hardware; run it again in another folder")
    if why := unnamed(record.get("commit")):
        raise UsageError(f"{path}: {why}, so it cannot be reproduced; run it again in another folder, {NAMED}")
    try:
        if metrics_changed(path, record):
            raise ValueError("metrics.jsonl was changed")
        epochs = [json.loads(line) for line in (path / "metrics.jsonl").read_text("utf-8").splitlines()]
        columns = [key for key in epochs[0] if key not in NOT_OF_A_CURVE] if epochs else []
        kept = {key: record[key] for key in KEPT if key in record}
        timing = {key: record["timing"][key] for key in TIMES if key in record.get("timing", {})}
        curve = {key: [rounded(epoch.get(key)) for epoch in epochs] for key in columns}
        command = command_of(RunConfig.from_dict(record["config"]))
        return validated(Line({**kept, "timing": timing, "curve": curve, "command": command}))
    except BROKEN as error:
        raise UsageError(f"{path}: not a valid run ({explain(error)}); run it again in another folder") from error


def unnamed(commit: Any) -> str | None:
    """Return why a commit does not identify the code of a run, or None if it does."""
    if not commit or not isinstance(commit, str):
        return "its record names no commit"
    return "the code had uncommitted changes" if commit.endswith("+") else None


def rounded(value: float | None) -> float | None:
    """Round a value of a curve to `DIGITS` significant digits."""
    return None if value is None else float(f"{value:.{DIGITS}g}")


def keep(lines: Collection[Line], folder: Path = FOLDER) -> tuple[int, int]:
    """Add runs to the files of their tasks; return how many were new, and how many repeats this adds.

    Of runs with the same config, the one that started first is the result, and the others are repeats.
    """
    new = repeated = 0
    for task in sorted({folder / line.config.task for line in lines}):
        task.mkdir(parents=True, exist_ok=True)
        with locked(task, waiting=lambda: None):  # another process may be adding runs too
            before = _of_task(task)
            there, merged = Results(before), Results([*before, *(x for x in lines if x.config.task == task.name)])
            # written in this order, so that an interruption leaves a run in both files rather than in none
            for name, kept in ((REPEATED, merged.repeated), (FILE, merged.lines.values())):
                if kept or (task / name).exists():
                    write_atomically(task / name, "".join(line.text + "\n" for line in kept).encode())
        repeated += len(merged.repeated) - len(there.repeated)
        new += len(merged.lines) + len(merged.repeated) - len(there.lines) - len(there.repeated)
    return new, repeated


def check_new_data(config: RunConfig, data: dict[str, Any], results: Results) -> None:
    """Raise UsageError if a run of this config on `data` could not join the results, which were made on other data."""
    key = _data_key(config)
    for line in results.lines.values():
        if _data_key(line.config) == key:
            _check_same(f"{config.task}: these are different data than those of run {line.hash}", line, data)
            return


def _check_data(lines: Iterable[Line]) -> None:
    """Raise UsageError if two runs used different data although their task, part and task setting `files` are equal.

    The part is "select" for trial runs, which hold out validation data, and "full" for the other runs.
    """
    seen: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        other = seen.setdefault(_data_key(line.config), line)
        message = f"{line.config.task}, run {line.hash}: trained on different data than run {other.hash}, which is kept"
        _check_same(message, other, line.record["data"])


def _data_key(config: RunConfig) -> tuple[str, str, str]:
    return config.task, config.part, str(config.task_settings.get("files"))


def _check_same(message: str, line: Line, data: dict[str, Any]) -> None:
    if differing := differences(line.record["data"], data):
        raise UsageError(f"{message}: {'; '.join(differing)}")


def command_of(config: RunConfig) -> str:
    """Return the command that repeats this run on a GPU, with the settings that differ from the task's defaults there.

    >>> from sngm.training import resolve
    >>> command_of(resolve("digits", "sngm", lr=0.3, batch=512, seed=1, method_settings={"weight_decay": 8e-4}))
    'sngm train digits --method sngm --lr 0.3 --batch 512 --seed 1 --set weight_decay=0.0008'
    """
    usual = resolve(config.task, config.method, lr=config.lr, batch=config.batch, device="cuda")
    words = ["sngm", "train", config.task, "--method", config.method, "--lr", repr(config.lr)]
    words += ["--batch", str(config.batch)]
    for name in (field.name for field in fields(RunConfig)):
        value = getattr(config, name)
        if value != getattr(usual, name) and name not in ("method_settings", "task_settings", "task_source"):
            words += [f"--{name.replace('_', '-')}", "inf" if value is None else str(value)]

    def special(name: str) -> dict[str, Any]:
        given, default = getattr(config, name), getattr(usual, name)  # by repr: 0 and 0.0 make different records
        return {key: given[key] for key in sorted(given) if repr(given[key]) != repr(default.get(key))}

    return shlex.join(words + set_flags(special("method_settings"), special("task_settings")))
