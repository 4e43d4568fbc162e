"""The paper's figures, and figures of its tables, from the runs in the results folder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean

from ..report.figures import LOOKS, Figure, Points, Series
from ..report.stats import half_width
from .experiments import ON_MEAN, Item
from .results import Line
from .tables import FIGURES
from .verdicts import SEEDS, Outcome, by_cell

AXES = {
    "train_loss": "training loss",
    "test_accuracy": "test accuracy, %",
    "test_perplexity": "test perplexity, log scale",
    "test_auc": "test AUC",
    "validation_perplexity": "validation perplexity, log scale",
    "validation_auc": "validation AUC",
}


def drawn(outcomes: dict[str, list[Outcome]]) -> dict[str, Figure]:
    """Return the paper's figures, by file name, drawn from our runs.

    Each line is the mean over seeds for a method. There is a panel for each batch and each loss (sum or mean).
    """
    found = {}
    for figure in FIGURES:
        for metric, name in figure.pictures.items():
            panels = {}
            there = by_cell(outcomes[figure.item])
            for loss, batch in itertools.product(("", ON_MEAN), figure.batches):
                cells = [(method, there.get((method + loss, batch))) for method in figure.methods]
                panel = [line for method, cell in cells if cell and (line := _series(method, cell, metric))]
                if any(line.points for line in panel):
                    panels[f"batch {batch}{loss}"] = panel
            if panels:
                found[name] = Figure(
                    f"{figure.where.split(',')[0]}, our runs of {figure.task}",
                    f"{figure.title}: {AXES[metric]} over training, thick the mean over at least three seeds or as "
                    "many as said, thin the seeds",
                    "epoch", AXES[metric], panels, worst_at_bottom="loss" not in metric and "perplexity" not in metric,
                    cut=0.15, log_y="perplexity" in metric,
                )  # fmt: skip
    return found


def by_batch(item: Item, outcomes: Sequence[Outcome]) -> Figure | None:
    """Plot a table's metric against the batch size: the paper's numbers, our means, and crosses for divergence.

    Return None if there are no results of ours to plot, or no numbers of the paper to compare them with.
    """
    metric = f"test_{item.metric}"
    theirs, ours = [], []
    for row in item.rows:
        numbers = item.numbers.get(row.paper or "")
        if numbers is None or item.apart or item.metric == "seconds":
            continue
        slot = LOOKS.index(row.name.lower())
        theirs.append(Series(row.name, slot, [(float(b), _shown(y, metric)) for b, y in sorted(numbers.items())]))
        cells = sorted((o for o in outcomes if o.planned.row is row), key=lambda o: o.planned.batch)
        by_x = [(float(cell.planned.batch), cell) for cell in cells]
        means = [_shown(fmean(cell.values), metric) if cell.values else math.nan for cell in cells]
        enough = [cell.values if len(cell.values) >= SEEDS else [] for cell in cells]
        errors = [_shown(half, metric) if (half := half_width(values)) is not None else None for values in enough]
        dots: list[Points] = [[(x, _shown(y, metric))] for x, c in by_x if len(c.values) == 2 for y in c.values]
        points = [(x, mean) for (x, _), mean in zip(by_x, means, strict=True)]
        lost = [x for x, cell in by_x if cell.diverged or cell.nothing_trains]
        if any(map(math.isfinite, means)) or lost:
            ours.append(Series(row.name, slot, points, errors, dots, lost=lost))
    if not ours:
        return None
    bare = {len(series.faint) for series in ours if len(series.plotted) > sum(e is not None for e in series.errors)}
    single = f"; without a bar: {'one or two seeds' if any(bare) else 'one seed'}" if bare else ""
    return Figure(
        f"{item.title}, against the batch size",
        f"{item.title}, against the batch size: the paper's numbers, and our means over seeds with their 95 % "
        "intervals, or single runs",
        "global batch", AXES[metric], {"the paper": theirs, f"ours{single}": ours}, log_x=True,
        worst_at_bottom=item.higher_is_better, dodge=3.0, log_y="perplexity" in metric,
        possible=(0.0, 100.0 if item.metric == "accuracy" else math.inf),
    )  # fmt: skip


def _shown(value: float, metric: str) -> float:
    """Round a value to five digits; convert an accuracy to a percentage."""
    return float(f"{100 * value if metric.endswith('accuracy') else value:.5g}")


def _series(name: str, cell: Outcome, metric: str) -> Series | None:
    """Return the mean curve of a method and the curve of each seed, with a cross at the last epoch if every run
    diverged; None if there is nothing to plot."""
    slot = LOOKS.index(name.lower())
    if cell.tried and not cell.values:
        return Series(f"{name}, diverged", slot, [], lost=[float(cell.planned.cell().study.epochs)])
    finished = [line for line in cell.lines if line.record["status"] == "finished" and metric in line.curve]
    points, few = _mean_curve(finished, metric), len(finished) < SEEDS
    label = f"{name}, {len(finished)} seed{'s' * (len(finished) > 1)}" if few else name
    label += f", {cell.diverged} diverged" if cell.diverged else ""
    seeds = [curve for line in finished if (curve := _mean_curve([line], metric))] if len(finished) > 1 else []
    return Series(label, slot, points, faint=seeds, marks=False) if points else None


def _mean_curve(lines: Sequence[Line], metric: str) -> Points:
    columns = enumerate(zip(*(line.curve[metric] for line in lines), strict=False), 1)
    return [(float(epoch), _shown(fmean(values), metric)) for epoch, values in columns if None not in values]
