"""Write the report of a study: tables, figures, and one page that opens offline."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..files import finite, write_atomically
from ..progress import duration
from .drawing import standalone
from .figures import Figure, by_batch, by_rate, by_trials, curves
from .headline import headline
from .html import render, words
from .summary import Summary, count_of, summarise_tasks
from .tables import caption, details, footnotes, table, tables
from .targets import target

FIGURES: dict[str, tuple[Callable[[Summary], Figure], str]] = {
    "batch": (
        by_batch,
        "Bars are 95 % intervals over at least three seeds; with two seeds, dots are the seeds. "
        "A cross marks a batch size at which every run diverged.",
    ),
    "curves": (curves, "Thick: the mean over finished seeds. Thin: each seed. The first, steep part is cut off."),
    "lr": (
        by_rate,
        "Each point is one trial on validation data. A ring marks the chosen learning rate, a cross one that diverged, "
        "a hollow marker at the edge a worse value than the axis shows.",
    ),
}
TRIALS = (
    by_trials,
    "Thick: the mean, over all choices of k trials, of their best validation score. Thin: what 10 % and 90 % of the "
    "choices reach. The sooner a line is near its best value, the easier the method is to tune.",
)


def write(folder: Path, path: Path | None = None, answer: str = "") -> Path:
    """Write table.md, figures, tables and report.html into a folder that holds records.

    The figures are curves.svg, batch.svg, lr.svg and, for searches, trials.svg. Every table is a CSV file, and
    report.json holds all tables. If the runs are of several tasks, the names of figures and CSV files contain
    the task. All files in the folder are computed before the first of them is replaced.

    Args:
        folder: the folder of the records.
        path: also write the page to this path; its folder is created.
        answer: the headline of the page. Default: which method is best at the largest batch size; if there are several
            tasks, their number.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: the folder holds no record.
    """
    folder = Path(folder)
    parts = summarise_tasks(folder)
    files = {"table.md": "\n".join(f"## {part.task}\n\n" * (len(parts) > 1) + table(part) for part in parts)}
    for part in parts:
        tail = ("-" + re.sub(r"[^\w.-]+", "-", part.task)) * (len(parts) > 1)
        files |= {f"{name}{tail}.svg": standalone(figure(part)) for name, (figure, _) in figures_of(part).items()}
        files |= {f"{name}{tail}.csv": found.csv() for name, found in tables(part).items()}
    data = {part.task: {name: found.records() for name, found in tables(part).items()} for part in parts}
    files["report.json"] = json.dumps(finite(data), indent=2, allow_nan=False) + "\n"
    files["report.html"] = html(parts, answer=answer)
    for name, text in files.items():
        write_atomically(folder / name, text.encode("utf-8", "replace"))
    if path is None:
        return folder / "report.html"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(path), html(parts, os.path.relpath(folder, Path(path).parent), answer=answer).encode())
    return Path(path)


def figures_of(summary: Summary) -> dict[str, tuple[Callable[[Summary], Figure], str]]:
    """Return the figures of a report, with the text below each; a study with a search has one more figure."""
    searched = any(cell.search for cell in summary.cells.values())
    return {**FIGURES, "trials": TRIALS} if searched else FIGURES


def html(parts: Sequence[Summary], home: str = "", live: bool = False, answer: str = "") -> str:
    """Return the HTML of the report page.

    Args:
        parts: a summary for each task.
        home: the folder of the records, relative to the folder of the page, for links.
        live: whether the browser loads the page again every few seconds, until all runs of a study have ended.
        answer: the headline. Default: that of the only summary; if there are several, their number.
    """
    runs = [run for part in parts for run in part.records.runs]
    counts = {"task": len(parts)} if len(parts) > 1 else {}
    counts |= {"method": len({method for part in parts for method in part.methods})}
    counts |= {"batch size": len({batch for part in parts for batch in part.batches}), "run": len(runs)}
    size = [count_of(count, word) for word, count in counts.items()]
    names, progress = [part.task for part in parts], _progress(parts)
    return render(
        "study",
        title=f"{', '.join(names)}: large-batch study",
        subject=" · ".join([*names, *size]),
        answer=answer or (headline(parts[0]) if len(parts) == 1 else f"Results of {len(parts)} tasks"),
        parts=[_part(part) for part in parts],
        home="" if home in ("", ".") else quote(os.fsencode(home)) + "/",
        progress=progress,
        failed=[run for run in runs if run.status == "failed"],
        live=live and (bool(progress) or any(part.records.study is None for part in parts)),
    )


def _part(summary: Summary) -> dict[str, Any]:
    """Return the values that the template shows for one task."""
    runs, study = summary.records.runs, summary.records.study
    seconds = [run.seconds for run in runs if run.seconds is not None]
    goal = target(summary)
    return {
        "headline": headline(summary),
        "answer": summary.answer(),
        "summary": summary,
        "tables": tables(summary),
        "goal": None if goal is None else summary.text(goal) + " %" * summary.percent,
        "headings": [f"batch {batch}" for batch in summary.batches],
        "details": details,
        "caption": caption(summary),
        "footnotes": footnotes(summary),
        "figures": [(figure(summary), note) for figure, note in figures_of(summary).values()],
        "cells": [cell for cell in summary.cells.values() if cell.grid],
        "searched": [cell for cell in summary.cells.values() if cell.search],
        "origin": {
            "parameters": _tally(f"{run.parameters:,}" if run.parameters else "" for run in runs),
            "hardware": _tally(words(run.hardware) for run in runs),
            "versions": _tally(words(run.versions) for run in runs),
            "commit": _tally(run.commit or "" for run in runs),
            "time": f"{duration(sum(seconds))} in {count_of(len(seconds), 'run')}" if seconds else "not recorded",
        },
        "commands": [study.command] if study and study.command else sorted({r.command for r in runs if r.command}),
    }


def _progress(parts: Sequence[Summary]) -> str:
    """Return a sentence on how many runs have ended and how far the others are; empty if all have ended."""
    runs = [run for part in parts for run in part.records.runs]
    counts = Counter(run.status for run in runs)
    ended = sum(counts[status] for status in ("finished", "diverged", "failed"))
    studies = [part.records.study for part in parts if part.records.study]
    planned = max(len(runs), sum(study.planned or 0 for study in studies))
    if ended == len(runs) and all(study.ended for study in studies):
        return ""
    going = [f"{run.name} at epoch {len(run.curve)} of {run.epochs}" for run in runs if run.status == "running"]
    tally = ", ".join(f"{counts[status]} {status}" for status in sorted(counts))
    return f"{ended} of {planned} runs have ended ({tally}){': ' if going else ''}{', '.join(going)}."


def _tally(values: Iterable[str]) -> str:
    """Return the distinct values as text; if there are several, each is followed by its number of runs."""
    counts = Counter(value or "not recorded" for value in values)
    if len(counts) < 2:
        return next(iter(counts), "not recorded")
    return "; ".join(f"{value} ({count} runs)" for value, count in counts.most_common())
