"""The tables of a report: the results as text and as Markdown, and every table as data for CSV and JSON."""

from __future__ import annotations

import csv
import html
import inspect
import io
import math
import re
from statistics import fmean
from typing import Any, NamedTuple

from .summary import Cell, Summary
from .targets import target, time_to


class Table(NamedTuple):
    """A table of numbers and text. In a row, None is a missing value, and a list holds several values."""

    name: str
    """The name of the table's files."""
    head: list[str]
    rows: list[list[Any]]

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each row."""
        return [dict(zip(self.head, row, strict=True)) for row in self.rows]

    def csv(self) -> str:
        """Return the table as CSV. The values of a list are separated by spaces."""
        text = io.StringIO()
        lines = [[" ".join(map(str, v)) if isinstance(v, list) else v for v in row] for row in self.rows]
        csv.writer(text, lineterminator="\n").writerows([self.head, *lines])
        return text.getvalue()


def tables(summary: Summary) -> dict[str, Table]:
    """Return the tables of a report by name."""
    found = [_results(summary), _time(summary), _settings(summary), _choices(summary), _runs(summary)]
    return {table.name: table for table in found}


def _results(summary: Summary) -> Table:
    names = ["method", "batch", "mean", "half_width", "n", "lr", "diverged", "at_edge", "values"]
    leaders = {batch: summary.leaders(batch) for batch in summary.batches}
    rows = [
        [*(getattr(cell, name) for name in names[:-1]), list(cell.values.values()), cell.method in leaders[cell.batch]]
        for cell in summary.cells.values()
        if cell.runs
    ]
    return Table("results", [*names, "best_or_not_told_apart"], rows)


def _time(summary: Summary) -> Table:
    goal = target(summary)
    rows = [] if goal is None else [list(row) for row in time_to(summary, goal)]
    head = ["method", "batch", "seeds_that_reach_it", "of", "epochs", "steps", "samples", "seconds"]
    return Table("time-to-target", ["target", *head], [[goal, *row] for row in rows])


def _settings(summary: Summary) -> Table:
    head = ["method", "batch", "lr", "weight_decay", "momentum", "schedule", "warmup"]
    head += ["train_loss", "seconds", "peak_memory"]
    rows = []
    for cell in summary.cells.values():
        if not cell.runs:
            continue
        own = cell.runs[0].settings
        decay, momentum = (own.get(key, _default(cell.method, key)) for key in ("weight_decay", "momentum"))
        ended = [run for run in cell.runs if run.status == "finished"]
        losses = [value for run in ended if math.isfinite(value := run.result.get("train_loss", math.nan))]
        memory = max((run.peak_memory for run in ended if run.peak_memory is not None), default=None)
        schedule = [own.get("schedule"), own.get("warmup")]
        measured = [fmean(losses) if losses else None, cell.seconds, memory]
        rows.append([cell.method, cell.batch, cell.lr, decay, momentum, *schedule, *measured])
    return Table("settings", head, rows)


def _choices(summary: Summary) -> Table:
    head = ["method", "batch", "chosen", "tried", "extended", "at_edge", "diverged"]
    rows = [
        [c.method, c.batch, c.lr, c.grid, c.extensions, c.at_edge, sum(map(math.isnan, c.selection.values()))]
        for c in summary.cells.values()
        if c.grid
    ]
    return Table("choices", head, rows)


def _runs(summary: Summary) -> Table:
    head = ["run", "method", "batch", "lr", "seed", "part", "status", summary.metric, "seconds", "hash", "command"]
    rows = []
    for run in summary.records.runs:
        score, part = run.score(summary.metric), "trial" if run.part == "select" else run.part
        value = score if score is not None and math.isfinite(score) else None
        about = [run.name, run.method, run.batch, run.lr, run.seed, part, run.status, value, run.seconds]
        rows.append([*about, run.hash[:8], run.again])
    return Table("runs", head, rows)


def _default(method: str, key: str) -> Any:
    """Return a method's default value of a setting, for records that lack the setting; None if it is not a number."""
    from ..optim import registry  # imports torch

    try:
        build = registry.builder(method.partition("(")[0], {})
        found = inspect.signature(build).parameters[key].default
    except (KeyError, TypeError, ValueError):
        return None
    return found if isinstance(found, int | float) else None


def rows(summary: Summary) -> list[list[str]]:
    """Return the results table as text: a header and one row for each method, with a column for each batch size."""
    header = ["method", *(f"batch {batch}" for batch in summary.batches)]
    return [header] + [
        [method, *(cell_text(summary, summary.cells[method, batch]) for batch in summary.batches)]
        for method in summary.methods
    ]


def cell_text(summary: Summary, cell: Cell) -> str:
    """Return a cell as text, such as "97.1 ± 0.4 (n=3, lr 0.3)"."""
    if cell.mean is None:
        return "diverged" if cell.only_diverged else "-"
    return f"{summary.text(cell.mean, cell.half_width)} ({', '.join(details(cell))})"


def details(cell: Cell) -> list[str]:
    """Return the number of seeds behind a mean, the chosen settings, and how many runs diverged."""
    lr = f"lr {cell.lr:g}" + "*" * cell.at_edge + "†" * cell.chosen_on_test
    others = [
        f"{k.replace('_', ' ')} {v:g}" for k, v in (cell.search.chosen if cell.search else {}).items() if k != "lr"
    ]
    return [f"n={cell.n}", lr, *others] + ([f"{cell.diverged} diverged"] if cell.diverged else [])


def caption(summary: Summary) -> str:
    """Return the caption of the results table, which says what the numbers are."""
    unit = " in %" if summary.percent else ""
    sense = "higher" if summary.higher_is_better else "lower"
    when = "at the epoch with the best validation score" if summary.of_best_epoch else "after the last epoch"
    return (
        f"Test {summary.metric}{unit} on {summary.task} {when} ({sense} is better): "
        "mean ± 95 % interval by Student's t over n seeds, at the chosen settings."
    )


def footnotes(summary: Summary) -> list[str]:
    """Return the meaning of each mark in the table, and what was left out."""
    shown = [cell for cell in summary.cells.values() if cell.values]
    notes = []
    if any(cell.at_edge for cell in shown):
        notes.append("* the learning rate is at the edge of its grid: one beyond it might be better.")
    if any(cell.chosen_on_test for cell in shown):
        notes.append(
            "† no learning rate was chosen on validation data: this is the best on test data, which is optimistic."
        )
    return notes + summary.notes


def table(summary: Summary, escape: bool = True) -> str:
    """Return the results table in Markdown, with caption and footnotes; for a terminal, set `escape` to False."""
    show = _escape if escape else str
    head, *body = [[show(text) for text in row] for row in rows(summary)]
    lines = [head, ["---"] * len(head), *body]
    notes = [caption(summary), *footnotes(summary)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n" + "\n\n".join(map(show, notes)) + "\n"


def _escape(text: str) -> str:
    r"""Escape text so that Markdown shows it unchanged; an underscore within a word needs no escape.

    >>> _escape("a|b <i> * weight_decay")
    'a\\|b &lt;i&gt; \\* weight_decay'
    """
    for mark in "\\|*`[]":
        text = text.replace(mark, "\\" + mark)
    return html.escape(re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text), quote=False)
