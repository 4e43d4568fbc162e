"""The page of all runs of a task, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import tasks
from ..training.config import RunConfig
from .results import FILE, Line, Results, command_of

MADE = "<!-- Made by `sngm paper report` from the runs; edit those, or the code, not this. -->"


def runs_page(task: str, results: Results) -> str:
    """Return the page: a section for each method and batch size, with a table and the commands."""
    lines = sorted(results.of_task(task), key=lambda line: line.order)
    parts = [
        MADE,
        f"# Runs of {task}",
        f"{len(lines)} runs, as kept in [{FILE}]({FILE}) with their "
        "curves. Seconds an epoch may be of runs that shared a GPU with others.",
    ]
    groups: dict[tuple[int, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.config.batch, heading(line.config)), []).append(line)
    for (_, title), runs in sorted(groups.items()):
        rows = [_run(line) for line in runs]
        head = ["run", "lr", "settings", "part", "seed", "epochs", "result", "s/epoch", "hardware", "commit"]
        parts.append(f"## {title}")
        parts.append("\n".join(markdown_table(head, rows)))
        parts.append("```\n" + "\n".join(command_of(line.config) for line in runs) + "\n```")
    return "\n\n".join(parts) + "\n"


def _run(line: Line) -> list[str]:
    c = line.config
    shown = {key: value for key, value in line.result.items() if not key.endswith("_loss")} or line.result
    result = ", ".join(f"{key.replace('_', ' ')} {_short(value)}" for key, value in shown.items())
    if line.record["status"] == "diverged":
        result = "diverged"
    special = [f"warm-up {c.warmup:g}"] if c.warmup else []
    settings = ", ".join([c.schedule, *special, *(f"{key}={value}" for key, value in sorted(c.task_settings.items()))])
    pace = line.record["timing"].get("seconds_per_epoch")
    return [
        f"`{line.hash}`", f"{c.lr:g}", settings, c.part, str(c.seed), str(c.epochs), result,
        "" if pace is None else f"{pace:.3g}", line.hardware, f"`{line.record['commit']}`",
    ]  # fmt: skip


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.5g}"


def heading(config: RunConfig) -> str:
    """Return the heading of a run: its method, its batch size, and each setting of the task other than the default."""
    usual = tasks.build(config.task).settings()
    other = [f", {key} {value}" for key, value in sorted(config.task_settings.items()) if value != usual[key]]
    return f"{config.label} at batch {config.batch}{''.join(other)}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines]
