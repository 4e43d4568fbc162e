"""Generate from the results folder alone: results/README.md, a page of runs for each task, the figures, and the first
table of the project's README."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import tasks
from ..errors import UsageError
from ..files import write_atomically
from ..progress import duration
from ..report.drawing import standalone
from ..report.figures import Figure
from ..report.stats import half_width
from ..training.config import RunConfig
from .drawing import by_batch, drawn
from .experiments import COSTS_ON, ITEMS, ON_MEAN, Item, find
from .results import FILE, REPEATED, Line, Results, command_of, read
from .tables import CLAIMS, FIGURES, TABLE_1, Claim
from .verdicts import SEEDS, Outcome, by_cell, of_claim, of_number, outcomes_of, text_of, values_of

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
MADE = "<!-- Made by `sngm paper report` from the runs; edit those, or the code, not this. -->"
FIRST_ITEM = "table-2"
MOST_NAMES = 9  # the most cells with missing runs that a sentence names


def pages(results: Results) -> dict[str, str]:
    """Return the text of every generated file, by its path in the results folder: pages, figures, plotted numbers."""
    outcomes = {item.name: outcomes_of(item, results) for item in ITEMS}
    tables = {_pictures(item)[0]: by_batch(item, outcomes[item.name]) for item in ITEMS}
    pictures = drawn(outcomes) | {name: figure for name, figure in tables.items() if figure}
    found = {"README.md": _readme(results, outcomes, pictures)}
    for task in sorted({line.config.task for line in results.lines.values()}):
        found[f"{task}/runs.md"] = _runs(task, results)
    for name, figure in pictures.items():
        plotted = {title: {s.label: s.plotted for s in panel} for title, panel in figure.panels.items()}
        found[f"{name}.json"] = json.dumps(plotted, indent=1) + "\n"
        found[f"{name}.svg"] = standalone(figure)
    return found


def block(results: Results) -> str:
    """Return the first table of the project's README, with the markers around it."""
    item = find(FIRST_ITEM)
    outcomes = outcomes_of(item, results)
    rows = [
        [
            str(o.planned.batch), o.planned.row.name, _lr(o), text_of(o.planned.paper, item.metric), _ours(o),
            _interval(o), _link(o, "results/"), _hardware(o),
        ]
        for o in _by_batch(outcomes)
        if o.tried
    ]  # fmt: skip
    if not rows:
        return f"{BEGIN}\nNo run has been kept yet.\n{END}"
    text = (
        "Mean over n seeds, at a rate chosen on validation data; an asterisk marks one at the edge of those tried. "
        "Each n leads to its runs. The paper's other tables, verdicts, and what is missing are in "
        "[results](results/README.md)."
    )
    head = ["batch", "method", "lr", "paper", "ours", "95 % interval", "n", "hardware"]
    picture = by_batch(item, outcomes)
    shown = [f"![{picture.description}](results/{_pictures(item)[0]}.svg)\n"] if picture else []
    return "\n".join([BEGIN, *shown, _table(head, rows), "", text, END])


def _pictures(item: Item) -> list[str]:
    """Return the names of all figures of an experiment; the first figure shows the results against the batch size."""
    return [f"{item.name}-by-batch", *(name for f in FIGURES if f.item == item.name for name in f.pictures.values())]


def _wanted(folder: Path, readme: Path | None) -> dict[Path, str]:
    results = read(folder)
    first = {} if readme is None else {readme: _with_block(readme, block(results))}
    return {folder / name: text for name, text in pages(results).items()} | first


def write(folder: Path, readme: Path | None = None) -> list[Path]:
    """Write all pages and figures, remove outdated files, and return the changed files."""
    wanted = _wanted(folder, readme)
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, wanted[path].encode())
    outdated = _outdated(folder, wanted)
    for path in outdated:
        path.unlink()
    return changed + outdated


def stale(folder: Path, readme: Path | None = None) -> list[Path]:
    """Return the generated files that do not match the runs: changed, missing or outdated.

    For figures, the plotted numbers and the text are compared, not the drawing.
    """

    def differs(path: Path, text: str) -> bool:
        both = path.read_text("utf-8", errors="replace") if path.exists() else "", text
        there, wanted = (re.findall(r">([^<>{}]+)<", x) for x in both) if path.suffix == ".svg" else both
        return there != wanted

    wanted = _wanted(folder, readme)
    return [path for path, text in wanted.items() if differs(path, text)] + _outdated(folder, wanted)


def _outdated(folder: Path, wanted: Collection[Path]) -> list[Path]:
    """Return the existing files that would no longer be generated from the runs."""
    there = [folder / f"{name}.{kind}" for item in ITEMS for name in _pictures(item) for kind in ("svg", "json")]
    pages = [path for path in folder.glob("*/runs.md") if path.read_text("utf-8", errors="replace").startswith(MADE)]
    return [path for path in (*there, *sorted(pages)) if path.exists() and path not in wanted]


def has_block(readme: Path) -> bool:
    """Return whether a page has one of the markers around the table of `block`."""
    text = readme.read_text("utf-8")
    return BEGIN in text or END in text


def _with_block(readme: Path, text: str) -> str:
    before = readme.read_text("utf-8")
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        raise UsageError(f"{readme} must hold {BEGIN} and {END} once each; the table is written between them")
    return before[: before.index(BEGIN)] + text + before[before.index(END) + len(END) :]


# ---------------------------------------------------------------- the page of all results


def _readme(results: Results, outcomes: dict[str, list[Outcome]], pictures: dict[str, Figure]) -> str:
    intro = Path(__file__).with_name("introduction.md").read_text("utf-8")
    parts = [MADE, intro.format(FILE=FILE, SEEDS=SEEDS).strip(), theory()]
    for item in ITEMS:
        parts += section(item, outcomes[item.name])
        parts += [f"![{pictures[name].description}]({name}.svg)" for name in _pictures(item) if name in pictures]
    parts.append(_repeated(results))
    return "\n\n".join(part for part in parts if part) + "\n"


def theory() -> str:
    """Return the section on the paper's Table 1, which needs no training runs."""
    rows = [[of, bounds["MSGD"], bounds["SNGM"]] for of, bounds in TABLE_1.items()]
    return (
        "## table-1: MSGD and SNGM, for an L-smooth function and C gradients in all\n\n"
        f"{_table(['', 'MSGD', 'SNGM'], rows)}\n\n"
        "There is nothing to train: `sngm check-theory` measures what these bounds say; [theory](../docs/theory.md) "
        "has what it found."
    )


def pictures_of(item: Item, folder: Path) -> list[Path]:
    """Return the paths of the figures of an experiment that are in the folder."""
    return [path for name in _pictures(item) if (path := folder / f"{name}.svg").exists()]


def as_data(item: Item, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the content of an experiment's section as a dict for JSON."""
    return {
        "item": item.name, "title": item.title, "task": item.task, "metric": item.metric,
        "cells": [
            {
                "method": o.planned.row.name, "batch": o.planned.batch, "paper": o.planned.paper, "lr": o.lr,
                "validation": o.validation, "searched": o.searched,
                "values": o.values, "half_width": half_width(o.values), "runs": [line.hash for line in o.lines],
                "verdict": of_number(o), "diverged": o.diverged, "all_rates_diverged": o.nothing_trains,
                "lr_at_edge": o.at_edge, "hardware": sorted({line.hardware for line in o.lines}),
                "best_on_test": [line.hash for line in o.on_test], "missing_runs": o.to_come,
            }
            for o in outcomes
        ],
        "claims": [
            {"text": claim.text, "note": claim.note, "verdict": verdict, "from": why}
            for claim, verdict, why in _claims(item, outcomes)
        ],
    }  # fmt: skip


def section(item: Item, outcomes: list[Outcome]) -> list[str]:
    """Return the paragraphs of an experiment's section."""
    where = f"{item.where} of the paper." if item.where else "Not in the paper."
    parts = [f"## {item.name}: {item.title}", f"{where} Task `{item.task}`. {item.about}".strip()]
    if item.apart:
        parts.append(f"These numbers cannot be compared with the paper's: {item.apart}. Its claims are tested on ours.")
    if item.guesses:
        parts.append(f"Guessed: {item.guesses} More in [deviations](../docs/deviations.md).")
    rows = [
        _row(o)
        for o in _by_batch(outcomes)
        if o.planned.paper is not None or o.tried or o.on_test or (item.search and o.lr) or (item.trials and o.trials)
    ]
    if rows:
        head = ["batch", "method", "lr", "paper", "ours", "n", "difference", "verdict", "best on test"]
        if item.metric == "seconds":
            head = ["batch", "method", "paper, eight V100", "ours", "n", "hardware"]
        elif item.trials:
            head = ["batch", "method", "lr", "weight decay", "validation", "test", "n", "steps", "seconds", "hardware"]
        parts.append(_table(head, rows))
    claims = _claims(item, outcomes)
    if "open" in [*(of_number(o) for o in outcomes), *(verdict for _, verdict, _ in claims)]:
        parts.append(f"*open*: too few runs to decide (a verdict needs {SEEDS} seeds), or their spread is too large.")
        if any("to decide" in why for _, _, why in claims):
            parts[-1] += " The number of seeds to decide is an estimate from the spread and difference so far."
    if claims:
        said = [
            [f'"{c.text}" {c.note}'.strip() if c.by_paper else f"{c.text} {c.note}", *found] for c, *found in claims
        ]
        parts.append(_table(["the paper says" if item.where else "claim", "verdict", "from"], said))
    return [*parts, _missing(item, outcomes)]


def _claims(item: Item, outcomes: list[Outcome]) -> list[tuple[Claim, str, str]]:
    """Return the claims on an experiment, each with its verdict and the reason.

    If an experiment has runs with the summed loss and runs with the mean loss, each claim is judged once on each.
    """
    claims = [claim for claim in CLAIMS if claim.item == item.name]
    if any(row.name.endswith(ON_MEAN) for row in item.rows):
        claims = [
            replace(
                claim,
                note=f"{claim.note} {note}".strip(),
                pairs=tuple(((a + loss, x), (b + loss, y)) for (a, x), (b, y) in claim.pairs),
            )
            for claim in claims
            for note, loss in (("On the sum.", ""), ("On the mean.", ON_MEAN))
        ]
    there = by_cell(outcomes)
    return [(claim, *of_claim(claim, item, there)) for claim in claims]


def _row(outcome: Outcome) -> list[str]:
    planned, metric, values = outcome.planned, outcome.planned.item.metric, outcome.values
    first = [str(planned.batch), planned.row.name]
    paper, ours, n = text_of(planned.paper, metric), _ours(outcome, _interval(outcome)), _link(outcome)
    if metric == "seconds":
        return [*first, paper, ours, n, _hardware(outcome)]
    if planned.item.trials:
        return [*first, *_searched(outcome), ours, n, *_effort(outcome.lines), _hardware(outcome)]
    gap = on_test = ""
    if values and planned.paper and not planned.item.apart:
        gap = text_of(fmean(values) - planned.paper, metric, signed=True)
    if there := outcome.on_test:
        mean = text_of(fmean(values_of(there, metric)), metric)
        on_test = f"{mean} (lr {there[0].config.lr:g}, n={_link(replace(outcome, lines=there))})"
    return [*first, _lr(outcome), paper, ours, n, gap, of_number(outcome) or "", on_test]


def _searched(outcome: Outcome) -> list[str]:
    """Return the learning rate and weight decay that a search chose, and their validation score.

    If it has not chosen yet, return the number of its finished trials instead.
    """
    if outcome.lr is None:
        return [f"{outcome.trials} of {outcome.planned.item.trials} trials", "", ""]
    return [
        f"{outcome.lr:g}",
        f"{outcome.searched['weight_decay']:g}",
        text_of(outcome.validation, outcome.planned.item.metric),
    ]


def _effort(lines: list[Line]) -> list[str]:
    """Return the steps per run and the mean duration in seconds of these runs, which have the same config, as text."""
    if not lines:
        return ["", ""]
    config, samples = lines[0].config, lines[0].record["data"]["training"]["samples"]
    seconds = fmean(line.record["timing"]["seconds"] for line in lines)
    per_epoch = samples // config.batch + (config.last_batch == "keep" and samples % config.batch > 0)
    return [str(per_epoch * config.epochs), f"{seconds:.1f}"]


def _by_batch(outcomes: list[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: outcome.planned.batch)


def _lr(outcome: Outcome) -> str:
    return "" if outcome.lr is None else f"{outcome.lr:g}{'*' * outcome.at_edge}"


def _ours(outcome: Outcome, interval: str = "") -> str:
    """Return the mean of a cell, its interval, and the number of diverged runs; or why there is no mean."""
    if not outcome.tried:
        begun = outcome.trials or outcome.on_test
        return "rate not chosen yet" if outcome.lr is None and begun else "not run yet"
    if not outcome.values:
        return "diverged"
    mean = text_of(fmean(outcome.values), outcome.planned.item.metric)
    left_out = f"({outcome.diverged} diverged)" if outcome.diverged else ""
    return " ".join(part for part in (mean, interval, left_out) if part)


def _missing(item: Item, outcomes: list[Outcome]) -> str:
    """Describe the missing runs and the least time they take. More runs may follow, because a grid may be extended."""
    missing = [outcome for outcome in outcomes if outcome.to_come]
    if not missing:
        return "All of it has been run."
    seconds = sum(outcome.to_come * outcome.planned.seconds() for outcome in missing)
    names = [outcome.planned.name for outcome in missing]
    if len(names) > MOST_NAMES:
        names[MOST_NAMES:] = [f"{len(names) - MOST_NAMES} other cells"]
    return (
        f"Missing: {sum(outcome.to_come for outcome in missing)} runs, about {duration(seconds)} on {COSTS_ON} one "
        f"after the other, of {', '.join(names)}. "
        f"`sngm paper run {item.name}` makes them." + (f" It needs {item.needs}." if item.needs else "")
    )


def _repeated(results: Results) -> str:
    """Return the section on runs that were made again with the same config."""
    if not results.repeated:
        return ""
    rows = []
    for again in results.repeated:
        first = results.lines[again.hash]
        metric = tasks.find(first.config.task).metric
        shown = [text_of(line.value(metric), metric) or "none" for line in (first, again)]
        commits = [f"`{line.record['commit']}`" for line in (first, again)]
        rows.append([f"`{again.hash}`", f"`{command_of(first.config)}`", *shown, *commits])
    head = ["run", "command", "result", "result again", "commit", "commit again"]
    where = f"Their lines are in `<task>/{REPEATED}`. The oldest runs have no date, so either of two may be the first."
    return f"## Runs made again\n\n{where}\n\n{_table(head, rows)}"


# ---------------------------------------------------------------- the runs of a task


def _runs(task: str, results: Results) -> str:
    groups: dict[tuple[int, str], list[Line]] = {}
    for line in results.of_task(task):
        groups.setdefault((line.config.batch, _title(line.config)), []).append(line)
    parts = [
        MADE,
        f"# Runs of {task}",
        f"{sum(map(len, groups.values()))} runs, as kept in [{FILE}]({FILE}) with their "
        "curves. Seconds an epoch may be of runs that shared a GPU with others.",
    ]
    head = ["run", "lr", "settings", "part", "seed", "epochs", "result", "s/epoch", "hardware", "commit"]
    for (_, title), runs in sorted(groups.items()):
        commands = "\n".join(command_of(line.config) for line in runs)
        parts += [f"## {title}", _table(head, map(_run, runs)), f"```\n{commands}\n```"]
    return "\n\n".join(parts) + "\n"


def _run(line: Line) -> list[str]:
    c = line.config
    shown = {key: value for key, value in line.result.items() if not key.endswith("_loss")} or line.result
    scores = (f"{key.replace('_', ' ')} {'none' if value is None else f'{value:.5g}'}" for key, value in shown.items())
    special = [f"warm-up {c.warmup:g}"] if c.warmup else []
    settings = ", ".join([c.schedule, *special, *(f"{key}={value}" for key, value in sorted(c.task_settings.items()))])
    pace = line.record["timing"].get("seconds_per_epoch")
    return [
        f"`{line.hash}`", f"{c.lr:g}", settings, c.part, str(c.seed), str(c.epochs),
        "diverged" if line.record["status"] == "diverged" else ", ".join(scores),
        "" if pace is None else f"{pace:.3g}", line.hardware, f"`{line.record['commit']}`",
    ]  # fmt: skip


def _title(config: RunConfig) -> str:
    """Return the heading of a run: its method, its batch, and the task settings that differ from the defaults."""
    usual = tasks.build(config.task).settings()
    other = [f", {key} {value}" for key, value in sorted(config.task_settings.items()) if value != usual[key]]
    return f"{config.label} at batch {config.batch}{''.join(other)}"


def _link(outcome: Outcome, before: str = "") -> str:
    """Return the number of seeds that did not diverge, as a link to their runs (to the trial runs if there are no full
    runs)."""
    count = str(len(outcome.values))
    if not outcome.lines and not outcome.trials:
        return count
    cell = outcome.planned.cell()
    title = _title(cell.config(outcome.lr or cell.grid[0], "full", 0))
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")  # the anchor that GitHub makes from a heading
    return f"[{count}]({before}{outcome.planned.item.task}/runs.md#{anchor})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


def _interval(outcome: Outcome) -> str:
    half = half_width(outcome.values)
    return "" if half is None else f"± {text_of(half, outcome.planned.item.metric)}"


def _hardware(outcome: Outcome) -> str:
    return ", ".join(name for name, _ in Counter(line.hardware for line in outcome.lines).most_common())
