"""Runs and studies as objects: their records, results and models, shown in notebooks."""

from __future__ import annotations

import functools
import html
import json
import warnings
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from . import report
from .errors import UsageError
from .files import metrics_changed
from .progress import in_words
from .training import RunConfig, RunFolder, load_model
from .training.validation import config_of

Folder = str | PathLike[str]


class Run:
    """One training run: its folder, its result and its model."""

    def __init__(self, folder: Folder, record: dict[str, Any] | None = None, data_dir: Path | None = None) -> None:
        self.folder = Path(folder)
        self.record = RunFolder(self.folder).read() if record is None else record
        self._data_dir = data_dir

    @property
    def status(self) -> str:
        """The state of the run: "finished", "diverged", "interrupted", "failed" or "running"."""
        return str(self.record["status"])

    @property
    def result(self) -> dict[str, float]:
        """Scores of the trained model, such as ``run.result["test_accuracy"]``; empty if the run did not finish."""
        return dict(self.record["result"])

    @property
    def config(self) -> RunConfig:
        return config_of(self.record, self.folder / "run.json")

    @property
    def history(self) -> list[dict[str, Any]]:
        """The metrics of each epoch, as a list of dicts."""
        file = self.folder / "metrics.jsonl"
        if metrics_changed(self.folder, self.record):
            warnings.warn(
                f"{file} was lost, or changed after it was written; the command that made the run restores it from the "
                "checkpoint",
                stacklevel=2,
            )
        try:
            return [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise UsageError(f"{file} is broken: {error}") from error

    @functools.cached_property
    def model(self) -> nn.Module:
        """The trained model, in evaluation mode on the CPU."""
        return load_model(self.folder, data_dir=self._data_dir)

    def __repr__(self) -> str:
        config = self.record["config"]
        scores = in_words(self.result) or self.status
        return f"Run({self.record['label']}, batch {config['batch']}, lr {config['lr']:g}: {scores}; {self.folder})"

    def _repr_html_(self) -> str:
        config = self.record["config"]
        rows = {"task": config["task"], "method": self.record["label"], "status": self.status}
        rows |= {key: config[key] for key in ("lr", "batch", "epochs", "seed")}
        rows |= {key.replace("_", " "): f"{value:.4g}" for key, value in self.result.items() if value is not None}
        return _table([[key, str(value)] for key, value in {**rows, "folder": self.folder}.items()])


class Best(NamedTuple):
    """The best method at a batch size: its `mean` metric over `n` seeds; the 95 % interval is mean ± `half_width`."""

    method: str
    batch: int
    lr: float | None
    mean: float | None
    half_width: float | None
    n: int


class Study:
    """A comparison of methods: its folder, its runs and its table of results."""

    def __init__(self, folder: Folder) -> None:
        self.folder = Path(folder)
        self.summary = report.summarise(self.folder)

    @functools.cached_property
    def runs(self) -> list[Run]:
        """All runs, including the trial runs that chose learning rates."""
        return [Run(path.parent) for path in sorted((self.folder / "runs").glob("*/run.json"))]

    def table(self) -> str:
        """Return the results as a Markdown table, with mean and 95 % interval over seeds."""
        return report.table(self.summary, escape=False)

    def answer(self) -> str:
        """Return sentences: which method is best at the largest batch size, and how significant the difference is."""
        return self.summary.answer()

    def best(self, batch: int | None = None) -> Best:
        """Return the method with the best mean at a batch size, by default at the largest."""
        batch = self.summary.batches[-1] if batch is None else batch
        if batch not in self.summary.batches:
            raise ValueError(f"batch must be one of {', '.join(map(str, self.summary.batches))}, got {batch!r}")
        ranking = self.summary.ranking(batch)
        if not ranking:
            raise ValueError(f"no method has a result at batch {batch}: every run failed or diverged")
        cell = ranking[0]
        return Best(cell.method, cell.batch, cell.lr, cell.mean, cell.half_width, cell.n)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per run."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_frame() needs pandas: pip install pandas") from error
        keys = ("task", "method", "batch", "lr", "seed", "part", "epochs")
        rows = [
            {**{key: run.record["config"][key] for key in keys}, "method": run.record["label"], "status": run.status}
            | run.result
            | {"seconds": run.record.get("timing", {}).get("seconds"), "folder": str(run.folder)}
            for run in self.runs
        ]
        return pandas.DataFrame(rows)

    def report(self, path: Folder | None = None) -> Path:
        """Write the report and return the path of its page, which opens offline; by default report.html in `folder`."""
        return report.write(self.folder, None if path is None else Path(path))

    def __repr__(self) -> str:
        return f"Study({self.folder}): {self.answer()}\n\n{self.table()}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.answer())}</p>" + _table(report.rows(self.summary), header=True)


def _table(rows: list[list[str]], header: bool = False) -> str:
    lines = []
    for i, row in enumerate(rows):
        cell = "th" if header and i == 0 else "td"
        lines.append("<tr>" + "".join(f"<{cell}>{html.escape(text)}</{cell}>" for text in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"
