"""The results in writing, made from the kept runs alone: results/README.md, the runs of each task, the figures, and the
first table of the project's README."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import tasks
from ..durations import duration
from ..errors import UsageError
from ..files import write_atomically
from ..report.drawing import standalone
from ..report.figures import Figure
from ..report.stats import half_width
from .drawing import by_batch, drawn
from .experiments import ASKED, COSTS_ON, ITEMS, ON_MEAN, Item, find
from .results import FILE, REPEATED, Line, Results, command_of, read
from .runs_page import MADE, heading, markdown_table, runs_page
from .tables import CLAIMS, FIGURES, MSGD, SNGM, TABLE_1, Claim
from .verdicts import NOT_REPRODUCED, RULES, Outcome, by_cell, look, of_claim, of_number, text_of, values_of

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
FIRST_ITEM = "table-2"


def pages(results: Results) -> dict[str, str]:
    """Every file of the results folder that is made, by its path in it: pages, figures and what they plot."""
    outcomes = {item.name: [look(planned, results) for planned in item.cells()] for item in ITEMS}
    tables = {_picture(item): by_batch(item, outcomes[item.name]) for item in ITEMS}
    pictures = drawn(outcomes) | {name: figure for name, figure in tables.items() if figure}
    found = {"README.md": _readme(results, outcomes, pictures)}
    for task in sorted({line.config.task for line in results.lines.values()}):
        found[f"{task}/runs.md"] = runs_page(task, results)
    for name, figure in pictures.items():
        plotted = {title: {s.label: s.plotted for s in panel} for title, panel in figure.panels.items()}
        found[f"{name}.json"] = json.dumps(plotted, indent=1) + "\n"
        found[f"{name}.svg"] = standalone(figure)
    return found


def block(results: Results) -> str:
    """The first table of the project's README."""
    rows = []
    item = find(FIRST_ITEM)
    outcomes = [look(planned, results) for planned in item.cells()]
    for outcome in sorted(outcomes, key=lambda outcome: outcome.planned.batch):
        planned = outcome.planned
        if outcome.tried:
            rows.append([
                str(planned.batch), planned.row.name, _rate(outcome), _number(planned.paper, item), _ours(outcome),
                _interval(outcome.values, item), _link(outcome, "results/"), _hardware(outcome.lines),
            ])  # fmt: skip
    if not rows:
        return f"{BEGIN}\nNo run has been kept yet.\n{END}"
    text = (
        "Mean over n seeds, at a rate chosen on validation data; an asterisk marks one at the edge of those tried. "
        "Each n leads to its runs. The paper's other tables, verdicts, and what is missing are in "
        "[results](results/README.md)."
    )
    head = ["batch", "method", "lr", "paper", "ours", "95 % interval", "n", "hardware"]
    picture = by_batch(item, outcomes)
    shown = [f"![{picture.description}](results/{_picture(item)}.svg)", ""] if picture else []
    return "\n".join([BEGIN, *shown, *markdown_table(head, rows), "", text, END])


def _picture(item: Item) -> str:
    """The name of a table's figure."""
    return f"{item.name}-by-batch"


def _pictures(item: Item) -> list[str]:
    """All that may be drawn of an item."""
    return [_picture(item), *(name for f in FIGURES if f.item == item.name for name in f.pictures.values())]


def write(folder: Path, readme: Path | None = None) -> list[Path]:
    """Write all of it, and remove figures and pages that are no more. Returns what changed."""
    results = read(folder)
    wanted = {folder / name: text for name, text in pages(results).items()}
    if readme is not None:
        wanted[readme] = _with_block(readme, block(results))
    changed = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, wanted[path].encode())
    for path in _left_over(folder, wanted):
        path.unlink()
        changed.append(path)
    return changed


def stale(folder: Path, readme: Path | None = None) -> list[Path]:
    """Files that do not say what the runs say: changed, missing, or left over from runs that are no more.

    Of pictures the numbers plotted and the words count, not how they are drawn.
    """
    results = read(folder)
    found, wanted = [], pages(results)
    for name, text in wanted.items():
        path = folder / name
        there = path.read_text("utf-8", errors="replace") if path.exists() else ""
        if (_words(there) != _words(text)) if path.suffix == ".svg" else (there != text):
            found.append(path)
    found += _left_over(folder, [folder / name for name in wanted])
    if readme is not None and readme.read_text("utf-8") != _with_block(readme, block(results)):
        found.append(readme)
    return found


def _left_over(folder: Path, wanted: Collection[Path]) -> list[Path]:
    names = [name for item in ITEMS for name in _pictures(item)]
    there = [folder / f"{name}.{kind}" for name in names for kind in ("svg", "json")]
    pages = [path for path in folder.glob("*/runs.md") if path.read_text("utf-8", errors="replace").startswith(MADE)]
    return [path for path in (*there, *sorted(pages)) if path.exists() and path not in wanted]


def _words(picture: str) -> list[str]:
    return re.findall(r">([^<>{}]+)<", picture)


def has_block(readme: Path) -> bool:
    """Whether a page has a place for the table, or had one."""
    text = readme.read_text("utf-8")
    return BEGIN in text or END in text


def _with_block(readme: Path, text: str) -> str:
    before = readme.read_text("utf-8")
    if before.count(BEGIN) != 1 or before.count(END) != 1:
        raise UsageError(f"{readme} must hold {BEGIN} and {END}, once each, for the table to stand between")
    return before[: before.index(BEGIN)] + text + before[before.index(END) + len(END) :]


# ---------------------------------------------------------------- the page of all results


def _readme(results: Results, outcomes: dict[str, list[Outcome]], pictures: dict[str, Figure]) -> str:
    parts = [
        MADE,
        "# The paper's results, and ours",
        "Each table of the paper, with our runs beside it. Every number comes from the runs kept here, one line a run "
        f"in `<task>/{FILE}`; the number of seeds, n, leads to them, with the command that makes each again.",
        RULES,
        "Rates are chosen on validation data: of ResNet20, on 5,000 training images held out; results are of training "
        "on all, after the last epoch (of the LSTM, where the validation perplexity is best). *Best on test* is the "
        "paper's likely reading: of the rates with full runs, none of which diverged, the best on test data. An "
        "asterisk marks a rate at the edge of those tried. What was guessed about the paper's set-up is in "
        "[deviations](../docs/deviations.md).",
    ]
    parts.append(theory())
    for item in ITEMS:
        parts += _section(item, outcomes[item.name])
        parts += [f"![{pictures[name].description}]({name}.svg)" for name in _pictures(item) if name in pictures]
    parts.append(_repeated(results))
    return "\n\n".join(part for part in parts if part) + "\n"


def theory() -> str:
    """Table 1, which has nothing to train."""
    rows = [[of, bounds[MSGD], bounds[SNGM]] for of, bounds in TABLE_1.items()]
    return "\n\n".join([
        "## table-1: MSGD and SNGM, for an L-smooth function and C gradients in all",
        "\n".join(markdown_table(["", MSGD, SNGM], rows)),
        "There is nothing to train: `sngm check-theory` measures what these bounds say; [theory](../docs/theory.md) "
        "has what it found.",
    ])  # fmt: skip


def section(item: Item, results: Results) -> list[str]:
    """What the page says of one item."""
    return _section(item, [look(planned, results) for planned in item.cells()])


def pictures_of(item: Item, folder: Path) -> list[Path]:
    """The files that show its runs."""
    return [path for name in _pictures(item) if (path := folder / f"{name}.svg").exists()]


def as_data(item: Item, results: Results) -> dict[str, Any]:
    """The same for programs."""
    outcomes = [look(planned, results) for planned in item.cells()]
    there = by_cell(outcomes)
    return {
        "item": item.name, "title": item.title, "task": item.task, "metric": item.metric,
        "cells": [
            {
                "method": o.planned.row.name, "batch": o.planned.batch, "paper": o.planned.paper, "lr": o.lr,
                "values": o.values, "half_width": half_width(o.values), "runs": [line.hash for line in o.lines],
                "verdict": _verdict(o), "diverged": o.diverged, "all_rates_diverged": o.nothing_trains,
                "lr_at_edge": o.at_edge, "hardware": sorted({line.hardware for line in o.lines}),
                "best_on_test": [line.hash for line in o.on_test], "missing_runs": o.to_come,
            }
            for o in outcomes
        ],
        "claims": [
            {"text": claim.text, "note": claim.note, "verdict": verdict, "from": why}
            for claim in _claims(item)
            for verdict, why in [of_claim(claim, item, there)]
        ],
    }  # fmt: skip


def _section(item: Item, outcomes: list[Outcome]) -> list[str]:
    parts = [f"## {item.name}: {item.title}", f"{item.where} of the paper. Task `{item.task}`."]
    if item.apart:
        parts.append(f"These numbers cannot be held against the paper's: {item.apart}. Its claims are tested on ours.")
    if item.guesses:
        parts.append(f"Guessed: {item.guesses} More in [deviations](../docs/deviations.md).")
    shown = [
        outcome
        for outcome in outcomes
        if outcome.planned.paper is not None or outcome.tried or outcome.on_test or (item.search and outcome.lr)
    ]
    if shown:
        head = ["batch", "method", "lr", "paper", "ours", "n", "difference", "verdict", "best on test"]
        if item.metric == "seconds":
            head = ["batch", "method", "paper, eight V100", "ours", "n", "hardware"]
        ordered = sorted(shown, key=lambda outcome: outcome.planned.batch)
        parts.append("\n".join(markdown_table(head, [_row(outcome) for outcome in ordered])))
    there = by_cell(outcomes)
    if claims := _claims(item):
        rows = [[_said(claim), *of_claim(claim, item, there)] for claim in claims]
        parts.append("\n".join(markdown_table(["the paper says", "verdict", "from"], rows)))
    return [*parts, _missing(item, outcomes)]


def _claims(item: Item) -> list[Claim]:
    """The paper's on this item, and ours; where we ran its methods on another loss too, once more on that."""
    claims = [claim for claim in (*CLAIMS, *ASKED) if claim.item == item.name]
    if not any(row.name.endswith(ON_MEAN) for row in item.rows):
        return claims
    versions = []
    for claim in claims:
        pairs = tuple(((a + ON_MEAN, x), (b + ON_MEAN, y)) for (a, x), (b, y) in claim.pairs)
        for note, chosen in (("On the sum.", claim.pairs), ("On the mean.", pairs)):
            versions.append(replace(claim, note=f"{claim.note} {note}".strip(), pairs=chosen))
    return versions


def _said(claim: Claim) -> str:
    text = f'"{claim.text}"' if claim.by_paper else claim.text
    return f"{text} {claim.note}".strip()


def _row(outcome: Outcome) -> list[str]:
    planned, item, values = outcome.planned, outcome.planned.item, outcome.values
    ours = _ours(outcome, _interval(values, item))
    first = [str(planned.batch), planned.row.name]
    if item.metric == "seconds":
        return [*first, _number(planned.paper, item), ours, _link(outcome), _hardware(outcome.lines)]
    gap, verdict = "", _verdict(outcome) or ""
    if values and planned.paper and not item.apart:
        gap = text_of(fmean(values) - planned.paper, item.metric, signed=True)
    on_test = ""
    if there := outcome.on_test:
        mean = text_of(fmean(values_of(there, item.metric)), item.metric)
        on_test = f"{mean} (lr {there[0].config.lr:g}, n={_link(replace(outcome, lines=there))})"
    paper, n = _number(planned.paper, item), _link(outcome)
    return [*first, _rate(outcome), paper, ours, n, gap, verdict, on_test]


def _rate(outcome: Outcome) -> str:
    return "" if outcome.lr is None else f"{outcome.lr:g}{'*' * outcome.at_edge}"


def _ours(outcome: Outcome, interval: str = "") -> str:
    """The mean of a cell, its interval, and how many runs these leave out; or why there is none."""
    if not outcome.tried:
        begun = outcome.trials or outcome.on_test
        return "rate not chosen yet" if outcome.lr is None and begun else "not run yet"
    if not outcome.values:
        return "diverged"
    mean = text_of(fmean(outcome.values), outcome.planned.item.metric)
    left_out = f"({outcome.diverged} diverged)" if outcome.diverged else ""
    return " ".join(part for part in (mean, interval, left_out) if part)


def _verdict(outcome: Outcome) -> str | None:
    planned, item = outcome.planned, outcome.planned.item
    if planned.paper is None or item.apart:
        return None
    if outcome.nothing_trains:
        return NOT_REPRODUCED
    return of_number(outcome.values, planned.paper, item.metric, outcome.diverged)


def _missing(item: Item, outcomes: list[Outcome]) -> str:
    """What has not been run, and what it would cost: at the least, since a grid may grow."""
    runs, seconds, cells = 0, 0.0, []
    for outcome in outcomes:
        count = outcome.to_come
        if count:
            runs += count
            seconds += count * outcome.planned.seconds()
            cells.append(outcome.planned.name)
    if not cells:
        return "All of it has been run."
    needs = f" It needs {item.needs}." if item.needs else ""
    return (
        f"Missing: {runs} runs, about {duration(seconds)} on {COSTS_ON} one after the other, of {', '.join(cells)}. "
        f"`sngm paper run {item.name}` makes them.{needs}"
    )


def _repeated(results: Results) -> str:
    """Runs that were made again, with their printed command."""
    if not results.repeated:
        return ""
    rows = []
    for again in results.repeated:
        first = results.lines[again.hash]
        metric = tasks.find(first.config.task).metric
        scores = (line.value(metric) for line in (first, again))
        shown = ["none" if score is None else text_of(score, metric) for score in scores]
        commits = [f"`{line.record['commit']}`" for line in (first, again)]
        rows.append([f"`{again.hash}`", f"`{command_of(first.config)}`", *shown, *commits])
    head = ["run", "command", "result", "result again", "commit", "commit again"]
    where = f"Their lines are in `<task>/{REPEATED}`. The earliest runs have no date: of those either may be the first."
    return f"## Runs made again\n\n{where}\n\n" + "\n".join(markdown_table(head, rows))


def _link(outcome: Outcome, before: str = "") -> str:
    """The number of seeds, leading to their runs, or to the trials where there are no others."""
    item, cell = outcome.planned.item, outcome.planned.cell()
    count = str(len(outcome.values))
    if not outcome.lines and not outcome.trials:
        return count
    # as GitHub makes it of a heading
    title = heading(cell.config(cell.grid[0], "full", 0))
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return f"[{count}]({before}{item.task}/runs.md#{anchor})"


# ---------------------------------------------------------------- small things


def _number(value: float | None, item: Item) -> str:
    return "" if value is None else text_of(value, item.metric)


def _interval(values: Sequence[float], item: Item) -> str:
    half = half_width(values)
    return "" if half is None else f"± {text_of(half, item.metric)}"


def _hardware(lines: Sequence[Line]) -> str:
    return ", ".join(name for name, _ in Counter(line.hardware for line in lines).most_common())
