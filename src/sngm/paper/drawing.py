"""The paper's figures, drawn from the kept runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean

from ..report import figures
from ..report.paper import ADAM, CLARS, EXTRAP, FIGURES, LAMB, LARS, MSGD, SNGM
from .items import ON_MEAN
from .results import Line
from .verdicts import SEEDS, Outcome, by_cell

AXES = {"train_loss": "training loss", "test_accuracy": "test accuracy, %", "validation_perplexity":
        "validation perplexity", "validation_auc": "validation AUC"}  # fmt: skip
LOOKS = (MSGD, LARS, SNGM, CLARS, EXTRAP, ADAM, LAMB)  # a colour and mark each


def drawn(outcomes: dict[str, list[Outcome]]) -> dict[str, figures.Figure]:
    """The paper's figures from our runs: the mean over seeds of each method, a panel a batch, loss and axis."""
    found = {}
    for figure in FIGURES:
        for metric in figure.metrics:
            panels = {}
            there = by_cell(outcomes[figure.item])
            for loss, batch in itertools.product(("", ON_MEAN), figure.batches):
                cells = [(name, there.get((name + loss, batch))) for name in figure.methods]
                panel = [line for name, cell in cells if cell and (line := _series(name, cell, metric))]
                if any(line.points for line in panel):
                    panels[f"batch {batch}{loss}"] = panel
            if panels:
                name = figure.name if len(figure.metrics) == 1 else f"{figure.name}-{metric.replace('_', '-')}"
                found[name] = figures.Figure(
                    f"{figure.where.split(',')[0]}, our runs of {figure.task}",
                    f"{figure.title}: {AXES[metric]} over training, mean over three seeds or as many as said",
                    "epoch", AXES[metric], panels, worst_at_bottom="loss" not in metric and "perplexity" not in metric,
                    cut=0.15,
                )  # fmt: skip
    return found


def _series(name: str, cell: Outcome, metric: str) -> figures.Series | None:
    """A method looks the same in every figure; one of which every rate diverged is a cross at the last epoch."""
    slot = LOOKS.index(name)
    if cell.nothing_trains:
        return figures.Series(f"{name}, diverged", slot, [], lost=[float(cell.planned.cell().study.epochs)])
    finished = [line for line in cell.lines if line.record["status"] == "finished" and metric in line.curve]
    points, few = _mean_curve(finished, metric), len(finished) < SEEDS
    label = f"{name}, {len(finished)} seed{'s' * (len(finished) > 1)}" if few else name
    return figures.Series(label, slot, points, marks=False) if points else None


def _mean_curve(lines: Sequence[Line], metric: str) -> list[tuple[float, float]]:
    if not lines:
        return []
    scale = 100 if metric.endswith("accuracy") else 1
    columns = zip(*(line.curve[metric] for line in lines), strict=False)
    points = []
    for epoch, values in enumerate(columns, 1):
        there = [value for value in values if value is not None]
        if len(there) == len(values):
            points.append((float(epoch), float(f"{scale * fmean(there):.5g}")))
    return points
