"""Read the records of studies and runs into dataclasses.

Records may come from other machines, other versions and interrupted runs, so each record is validated. An invalid
record is named and left out, and characters that HTML and XML do not allow are removed from text.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import UsageError
from ..files import metrics_changed, read_record
from ..options import RecipeOptions, RunOptions, short
from ..parsing import format_call, set_flags, sorted_label


@dataclass(frozen=True, slots=True)
class Run:
    """One run. Values that are null in the record, because they were NaN or infinite, are NaN in this object."""

    name: str
    status: str
    task: str
    method: str
    lr: float
    batch: int
    seed: int
    part: str
    epochs: int | None
    hash: str
    metric: str
    """The name of the task's metric; empty in records of older versions."""
    higher_is_better: bool
    """Whether higher values of the metric are better; in records of older versions, judged by its name."""
    result: dict[str, float]
    result_of: str
    curve: list[dict[str, float]]
    seconds: float | None
    versions: dict[str, str]
    hardware: dict[str, str]
    commit: str | None
    command: str | None
    link: str
    """The run's folder, relative to the folder of all records, quoted for a link."""
    settings: dict[str, str | float]
    """Settings from the config: schedule, warm-up, and the method's settings, such as weight decay."""
    again: str
    """The command that trains this run alone, with every setting."""
    parameters: int | None
    training_seconds: float | None
    peak_memory: float | None
    """Most bytes allocated on the GPU at any time; None on a CPU."""
    error: str
    """Why the run failed; empty if it did not fail."""

    def score(self, metric: str) -> float | None:
        """Return the run's value of a metric: NaN if the run diverged, None if it has no result (yet)."""
        if self.status == "diverged":
            return math.nan
        return self.result.get(self.key(metric)) if self.status == "finished" else None

    def key(self, metric: str) -> str:
        """Return the key of a metric in this run: trials report it on validation data, full runs on test data."""
        return f"{'validation' if self.part == 'select' else 'test'}_{metric}"


@dataclass(frozen=True, slots=True)
class Choice:
    """How a study chose the learning rate of one method at one batch size."""

    method: str
    batch: int
    lr: float | None
    grid: list[float]
    extensions: int
    at_edge: bool
    ranges: dict[str, tuple[float, float]]
    """The range of each setting of a search; empty for a grid of learning rates."""
    trials: list[dict[str, float]]
    """The settings of each trial of a search, in order, with the "score", which is NaN if the run diverged."""
    chosen: dict[str, float]
    """The settings that a search chose."""


@dataclass(frozen=True, slots=True)
class Study:
    """The settings of a study, and the learning rates that it chose."""

    task: str
    methods: list[str]
    batches: list[int]
    epochs: int | None
    metric: str
    higher_is_better: bool
    command: str | None
    choices: list[Choice]
    searched: list[str]
    """The searched settings, in which the trials of a method differ; empty without a search."""
    planned: int | None
    """The number of runs of the whole study, if the record has it."""
    ended: bool
    """Whether all runs of the study have ended; True for older records, which do not say."""


@dataclass(frozen=True, slots=True)
class Records:
    """All records in a folder; `unreadable` names the files that could not be read."""

    folder: Path
    study: Study | None
    runs: list[Run]
    unreadable: list[str]


BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def read(folder: Path) -> Records:
    """Read a study's folder, a folder of run folders, or the folder of one run.

    Raises:
        FileNotFoundError: the folder holds no record.
        UsageError: none of its records can be read.
    """
    folder = Path(folder)
    has_study = (folder / "study.json").is_file()
    if (folder / "run.json").is_file() and not has_study:
        places = [folder]
    else:
        home = folder / "runs" if (folder / "runs").is_dir() else folder
        places = sorted(path.parent for path in home.glob("*/run.json"))
    if not places and not has_study:
        why = "holds no records" if folder.is_dir() else "is not a folder"
        expected = "expected study.json, runs/<name>/run.json, <name>/run.json or run.json in it"
        if below := sorted({*folder.glob("*/study.json"), *folder.glob("*/*/study.json")}):
            expected = f"name one of the studies in it: {', '.join(str(path.parent) for path in below[:5])}"
        raise FileNotFoundError(f"{folder} {why}: {expected}")
    study, runs, unreadable, reasons = None, [], [], []
    if has_study:
        try:
            study = _study(_record(folder / "study.json"))
        except BROKEN as error:
            unreadable.append("study.json")
            reasons.append(_reason(folder / "study.json", error))
    for place in places:
        try:
            run, whole = _run(place, folder)
            runs.append(run)
            if not whole:
                unreadable.append(f"{run.name}/metrics.jsonl")
        except BROKEN as error:
            unreadable.append(clean(place.resolve().name))
            reasons.append(_reason(place / "run.json", error))
    if not study and not runs:
        raise UsageError(
            f"cannot read {'the record' if len(reasons) == 1 else f'any of {len(reasons)} records'}: {reasons[0]}"
        )
    return Records(folder, study, runs, unreadable)


def clean(value: object) -> str:
    r"""Return a value as text without control characters and lone surrogates, which XML does not allow.

    >>> clean("a\x00b\ud800\n")
    'a b? '
    """
    text = str(value).encode("utf-8", "replace").decode()
    return "".join(" " if ord(c) < 32 or 127 <= ord(c) < 160 or c in "\ufffe\uffff" else c for c in text)


def _record(file: Path) -> dict[str, Any]:
    record = read_record(file)
    if record.get("format", 1) != 1:
        raise UsageError(
            f"{file}: format must be 1, got {short(record['format'])}; open it with the version of sngm that wrote it"
        )
    return record


def _reason(file: Path, error: Exception) -> str:
    """Return why a record could not be read, with the name of its file."""
    if isinstance(error, UsageError):
        return str(error)
    return f"{file} is not a valid record: {short(error)}; the command that made it writes it again"


def _run(place: Path, folder: Path) -> tuple[Run, bool]:
    """Return a run, and True unless its metrics.jsonl was changed after the run ended; a changed file is not read."""
    record = _record(place / "run.json")
    whole = not metrics_changed(place, record)
    config = record["config"]
    timing = _numbers(record.get("timing") or {})
    of_method = config.get("method_settings") or {}
    own = {"schedule": config.get("schedule"), "warmup": config.get("warmup"), **of_method}
    run = Run(
        name=clean(place.resolve().name),
        status=clean(record["status"]),
        task=clean(config["task"]),
        method=sorted_label(clean(record.get("label") or format_call(config["method"], of_method))),
        lr=_rate(config["lr"]),
        batch=_batch(config["batch"]),
        seed=int(config.get("seed") or 0),
        part=clean(config.get("part") or "full"),
        epochs=_count(config.get("epochs")),
        hash=clean(record.get("hash") or ""),
        metric=clean(record.get("metric") or ""),
        higher_is_better=bool(record.get("higher_is_better", higher_is_better(clean(record.get("metric") or "")))),
        result=_numbers(record.get("result") or {}),
        result_of=clean(record.get("result_of") or "last"),
        curve=_curve(place / "metrics.jsonl") if whole else [],
        seconds=timing.get("seconds"),
        versions=_texts(record.get("versions")),
        hardware=_texts(record.get("hardware")),
        commit=clean(record.get("commit") or "") or None,
        command=clean(record.get("command") or "") or None,
        link=quote(os.fsencode(place.relative_to(folder).as_posix() + "/")),
        settings={clean(k): v if isinstance(v, float) else clean(v) for k, v in own.items() if v is not None},
        again=clean(_again(config, record.get("command"))),
        parameters=_count(record.get("parameters")),
        training_seconds=timing.get("training_seconds"),
        peak_memory=timing.get("peak_memory"),
        error=clean(record.get("error") or ""),
    )
    return run, whole


FLAGS = ("method", *(field.name for group in (RunOptions, RecipeOptions) for field in fields(group)))


def _again(config: Mapping[str, Any], command: str | None = None) -> str:
    """Return the command that trains a run of this config; for a task made in Python, the script that made it.

    >>> _again({"task": "digits", "method": "sngm", "lr": 0.1, "clip": None, "method_settings": {"momentum": 0.8}})
    'sngm train digits --method sngm --lr 0.1 --clip inf --set momentum=0.8'
    """
    task = str(config["task"])
    if config.get("task_source") and (":" not in task or task.startswith("__main__:")):
        script = command if command and command.startswith("python ") and "ipykernel" not in command else ""
        return script or "(made in a Python session)"
    words = ["sngm", "train", task]
    for name in FLAGS:
        if name == "clip" and config.get("clip", 0.0) is None:
            words += ["--clip", "inf"]
        elif config.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", str(config[name])]
    return shlex.join(words + set_flags(config.get("method_settings") or {}, config.get("task_settings") or {}))


def _curve(path: Path) -> list[dict[str, float]]:
    """Return the metrics in metrics.jsonl, one dict per epoch. Incomplete lines, of a killed run, are left out."""
    epochs: dict[float, dict[str, float]] = {}
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            entry = _numbers(json.loads(line))
            epochs[entry["epoch"]] = entry
        except BROKEN:
            continue
    return [epochs[epoch] for epoch in sorted(epochs) if math.isfinite(epoch)]


def _study(record: Any) -> Study:
    metric = clean(record["metric"])
    return Study(
        task=clean(record["task"]),
        methods=[sorted_label(clean(method)) for method in record["methods"]],
        batches=sorted({_batch(batch) for batch in record["batches"]}),
        epochs=_count(record.get("epochs")),
        metric=metric,
        higher_is_better=bool(record.get("higher_is_better", higher_is_better(metric))),
        command=clean(record.get("command") or "") or None,
        choices=[
            Choice(
                method=sorted_label(clean(cell["method"])),
                batch=_batch(cell["batch"]),
                lr=None if cell.get("lr") is None else _rate(cell["lr"]),
                grid=sorted(_rate(lr) for lr in cell.get("grid") or []),
                extensions=_count(cell.get("extensions")) or 0,
                at_edge=bool(cell.get("at_edge")),
                ranges={
                    clean(k): (_number(low), _number(high)) for k, (low, high) in (cell.get("ranges") or {}).items()
                },
                trials=[_numbers(trial) for trial in cell.get("trials") or []],
                chosen=_numbers(cell.get("chosen") or {}),
            )
            for cell in record.get("cells") or []
        ],
        searched=[clean(name) for name in record.get("searched") or []],
        planned=_count(record.get("planned")),
        ended=bool(record.get("ended", "planned" not in record)),
    )


def higher_is_better(metric: str) -> bool:
    """Return whether higher values of a metric are better, judged by its name.

    >>> higher_is_better("accuracy"), higher_is_better("test_loss"), higher_is_better("bits_per_byte")
    (True, False, False)
    """
    return not any(word in metric.lower() for word in ("loss", "perplexity", "error", "mse", "nll", "bits"))


def _number(value: object) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a metric must be a number or null, got {value!r}")
    return float(value) if abs(value) < 1e100 else math.nan  # the square of a larger value may overflow


def _rate(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"lr must be a finite number > 0, got {value!r}")
    return float(value)


def _batch(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**12:
        raise ValueError(f"batch must be an integer > 0, got {value!r}")
    return value


def _numbers(record: Mapping[str, object]) -> dict[str, float]:
    return {clean(key): _number(value) for key, value in record.items() if value is None or type(value) in (int, float)}


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) else None


def _texts(record: object) -> dict[str, str]:
    items = record.items() if isinstance(record, dict) else []
    return {clean(key): clean(value) for key, value in items if value is not None}
