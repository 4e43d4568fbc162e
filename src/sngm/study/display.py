"""The progress of a study on stderr: a table in a terminal or notebook, a line for each run in a log file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..progress import console, duration, is_live, note
from .launch import Progress


@contextlib.contextmanager
def study_progress(wanted: bool = True) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that displays the progress of a study, or one that does nothing if not `wanted`."""
    if not wanted:
        yield lambda progress: None
        return
    shown = console()
    if not is_live(shown):
        yield _lines()
        return
    from rich.live import Live

    with Live(console=shown, refresh_per_second=5, transient=True) as live:
        yield lambda progress: live.update(_table(progress))


def _lines() -> Callable[[Progress], None]:
    seen = [0]

    def show(progress: Progress) -> None:
        for config, record in progress.done[seen[0] :]:
            seen[0] += 1
            left = progress.seconds_left
            result = next((f"{k.replace('_', ' ')} {v:.4f}" for k, v in _scores(record)), record["status"])
            where = f"{config.label} batch {config.batch} lr {config.lr:g} seed {config.seed}"
            eta = f", {duration(left)} left" if left is not None else ""
            note(f"[{seen[0]}/{progress.planned}] {where}: {result}{eta}")

    return show


def _scores(record: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the results of a run as (name, value): test scores first, then validation scores, then losses."""
    found = [(k, v) for k, v in record["result"].items() if v is not None]
    return sorted(found, key=lambda kv: (kv[0].startswith("train_"), kv[0].endswith("loss"), kv[0][:5] != "test_"))


def _table(progress: Progress) -> Any:
    from rich.table import Table

    left = progress.seconds_left
    eta = f", {duration(left)} left" if left is not None else ""
    table = Table(title=f"{len(progress.done)} of {progress.planned} runs{eta}", title_justify="left")
    for column in ("method", "batch", "lrs tried", "chosen lr", "tested seeds", "so far"):
        table.add_column(column)
    for cell in progress.cells:
        values = [_scores(record)[0][1] for record in cell.tested if _scores(record)]
        table.add_row(
            cell.label,
            str(cell.batch),
            f"{len(cell.scores)}",
            "" if cell.lr is None else f"{cell.lr:g}",
            f"{len(cell.tested)} of {cell.study.seeds}",
            f"{sum(values) / len(values):.4f}" if values else ("running" if cell in progress.running else ""),
        )
    return table
