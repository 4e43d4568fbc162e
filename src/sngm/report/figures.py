"""Figures as data, and the figures of a study's report; :mod:`.drawing` turns them into SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from .summary import Cell, Summary

Points = list[tuple[float, float]]
LOOKS = ("msgd", "lars", "sngm", "clars", "extrap-sgd", "adam", "lamb")  # same colour and marker in every study
POSSIBLE = {"accuracy": (0.0, 100.0), "auc": (0.0, 100.0), "perplexity": (1.0, math.inf)}


@dataclass(frozen=True, slots=True)
class Series:
    """A line with markers. Its slot (a number) selects colour and marker."""

    label: str
    slot: int
    points: Points
    """A NaN as y interrupts the line."""
    errors: list[float | None] = field(default_factory=list)
    """Half the length of each point's error bar."""
    faint: list[Points] = field(default_factory=list)
    """Thin lines behind the main line, such as single seeds; a line of one point is a dot."""
    marks: bool = True
    """Whether every point has a marker; otherwise only the last point has one."""
    lost: list[float] = field(default_factory=list)
    """Each x at which a run diverged, so that there is no y; drawn as a cross at the worst end of the y axis."""
    ring: float | None = None
    """The x of a point to circle."""

    @property
    def plotted(self) -> list[tuple[float | None, ...]]:
        """A tuple (x, y) for each point with a finite y, or (x, y, error) if there are errors."""
        errors = [(error,) for error in self.errors] if any(self.errors) else [()] * len(self.points)
        return [(*point, *error) for point, error in zip(self.points, errors, strict=True) if math.isfinite(point[1])]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as data: panels, by title, that share their axes."""

    title: str
    description: str
    x_label: str
    y_label: str
    panels: dict[str, list[Series]]
    log_x: bool = False
    decades: bool = False
    """Whether the ticks of a logarithmic x axis are powers of 10; otherwise they are values of x."""
    log_y: bool = False
    worst_at_bottom: bool = True
    cut: float = 0.0
    """The fraction of values (the worst) left outside the axes, so that large early losses do not hide the end."""
    dodge: float = 0.0
    """Pixels between series at the same x, so that error bars do not hide each other."""
    possible: tuple[float, float] = (-math.inf, math.inf)
    """The lowest and the highest possible y, at which axis and error bars end."""
    worst: dict[str, float] = field(default_factory=dict)
    """Panel title -> the worst y on the panel's own y axis. Worse values are drawn as hollow markers at the edge."""


def slots(methods: Sequence[str]) -> dict[str, int]:
    """Assign a slot (colour and marker) to each method of a study; the order of the methods does not matter.

    >>> slots(["sngm", "mine", "msgd(momentum=0.8)"])
    {'sngm': 2, 'mine': 1, 'msgd(momentum=0.8)': 0}
    """
    found: dict[str, int] = {}
    for method in sorted(methods):
        name = method.partition("(")[0]
        if name in LOOKS and LOOKS.index(name) not in found.values():
            found[method] = LOOKS.index(name)
    free = iter(sorted(set(range(len(LOOKS) + len(methods))) - set(found.values())))
    found |= {method: next(free) for method in sorted(methods) if method not in found}
    return {method: found[method] for method in methods}


def by_batch(summary: Summary) -> Figure:
    """Return a figure of the metric against the batch size; with two seeds, dots replace the confidence interval."""
    panel = []
    for method, slot in slots(summary.methods).items():
        cells = [summary.cells[method, batch] for batch in summary.batches]
        points = [(float(cell.batch), math.nan if cell.mean is None else _shown(summary, cell.mean)) for cell in cells]
        errors = [_shown(summary, cell.half_width or 0.0) if cell.n > 2 else None for cell in cells]
        dots: list[Points] = [[(c.batch, _shown(summary, v))] for c in cells if c.n == 2 for v in c.values.values()]
        lost = [float(cell.batch) for cell in cells if cell.only_diverged]
        panel += [Series(method, slot, points, errors, dots, lost=lost)]
    figure = _figure(summary, "against batch size", "global batch", {summary.task: panel}, log_x=True)
    return replace(figure, dodge=5.0, possible=POSSIBLE.get(summary.metric, figure.possible))


def curves(summary: Summary) -> Figure:
    """Return a figure of the metric against the epoch: each seed and the mean over finished seeds, by batch size."""

    def series(method: str, slot: int, cell: Cell) -> Series | None:
        lines, finished = [], []
        for run in cell.runs:
            values = {entry["epoch"]: entry.get(run.key(summary.metric), math.nan) for entry in run.curve}
            line = {epoch: _shown(summary, value) for epoch, value in values.items() if math.isfinite(value)}
            lines += [list(line.items())] if line and run.status != "diverged" else []
            finished += [line] if run.status == "finished" else []
        shared = sorted(set(finished[0]).intersection(*finished[1:])) if finished else []
        means = [(epoch, fmean(line[epoch] for line in finished)) for epoch in shared]
        faint = lines if len(lines) > 1 or not means else []
        return Series(method, slot, means, faint=faint, marks=False) if lines else None

    return replace(_figure(summary, "over training", "epoch", _by_batch_size(summary, series)), cut=0.15)


def by_rate(summary: Summary) -> Figure:
    """Return a figure of the validation metric against the learning rate, with a panel for each batch size."""

    def series(method: str, slot: int, cell: Cell) -> Series | None:
        points = [(lr, _shown(summary, value)) for lr, value in cell.selection.items() if math.isfinite(value)]
        lost = [lr for lr, value in cell.selection.items() if not math.isfinite(value)]
        return Series(method, slot, points, lost=lost, ring=cell.lr) if cell.selection else None

    panels = _by_batch_size(summary, series)
    figure = _figure(summary, "against learning rate", "learning rate", panels, part="validation", log_x=True)
    return replace(_near_the_best(summary, figure), decades=True)


def _near_the_best(summary: Summary, figure: Figure) -> Figure:
    """Limit y axes to 10 points below the best value of a percentage, or to 3 times the best if lower is better."""
    worst = {}
    for title, panel in figure.panels.items():
        ys = [y for one in panel for _, y in one.points]
        if ys and summary.percent:
            worst[title] = max(ys) - 10
        elif ys and min(ys) > 0 and not summary.higher_is_better:
            worst[title] = 3 * min(ys)
    limits = POSSIBLE.get(summary.metric, figure.possible)
    return replace(figure, worst=worst, possible=limits, log_y=figure.log_y and not worst)


def by_trials(summary: Summary) -> Figure:
    """Return a figure of the best validation metric after k trials of a search, with a panel for each batch size.

    Every set of k trials of a method has a best value; the figure shows, for each k, the mean and the 10 % and 90 %
    quantiles of these values over all sets. A trial that diverged counts as the worst finite value of all methods at
    its batch size.
    """
    sign = 1 if summary.higher_is_better else -1

    def scores_of(cell: Cell) -> list[float]:
        return [trial["score"] for trial in cell.search.trials] if cell.search else []

    def series(method: str, slot: int, cell: Cell) -> Series | None:
        scores = scores_of(cell)
        if not any(map(math.isfinite, scores)):
            return None
        panel = [score for name in summary.methods for score in scores_of(summary.cells[name, cell.batch])]
        worst = min(filter(math.isfinite, panel), key=lambda s: sign * s)
        ranked = sorted((score if math.isfinite(score) else worst for score in scores), key=lambda s: sign * s)
        mean, low, high = zip(*(best_of(k, ranked) for k in range(1, len(ranked) + 1)), strict=True)
        lines: list[Points] = [[(k, _shown(summary, y)) for k, y in enumerate(line, 1)] for line in (mean, low, high)]
        return Series(method, slot, lines[0], faint=lines[1:])

    panels = _by_batch_size(summary, series)
    figure = _figure(summary, "after k trials", "trials", panels, part="best validation")
    return _near_the_best(summary, figure)


def best_of(k: int, ranked: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, 10 % and 90 % quantile of the best of k values, over all choices of k from `ranked` (worst first).

    >>> best_of(1, [1.0, 2.0, 3.0]), best_of(3, [1.0, 2.0, 3.0])
    ((2.0, 1.0, 3.0), (3.0, 3.0, 3.0))
    """
    # fractions of the sets of k values whose best value is ranked[i]
    shares = [math.comb(i, k - 1) / math.comb(len(ranked), k) for i in range(len(ranked))]
    reached = list(itertools.accumulate(shares))
    quantiles = (next(v for v, r in zip(ranked, reached, strict=True) if r >= q - 1e-9) for q in (0.1, 0.9))
    low, high = quantiles
    return sum(v * share for v, share in zip(ranked, shares, strict=True)), low, high


def _by_batch_size(summary: Summary, series: Any) -> dict[str, list[Series]]:
    looks = slots(summary.methods)
    panels = {
        f"batch {batch}": [one for m in looks if (one := series(m, looks[m], summary.cells[m, batch]))]
        for batch in summary.batches
    }
    return {title: panel for title, panel in panels.items() if panel}


def _shown(summary: Summary, value: float) -> float:
    return 100 * value if summary.percent else value


def _figure(
    summary: Summary, what: str, x_label: str, panels: dict[str, list[Series]], part: str = "test", log_x: bool = False
) -> Figure:
    metric = f"{part} {summary.metric}"
    every = [y for panel in panels.values() for s in panel for line in (s.points, *s.faint) for _, y in line]
    every = [y for y in every if math.isfinite(y)]
    ends = [
        f"{s.label} ends at {s.plotted[-1][1]:.4g} ({title})"
        for title, panel in panels.items()
        for s in panel
        if s.plotted
    ]
    return Figure(
        title=f"{metric.capitalize()} {what}",
        description=f"{summary.task}: {metric} {what}. " + "; ".join(ends),
        x_label=x_label,
        y_label=metric + (" (%)" if summary.percent else ""),
        panels=panels if every else {},
        log_x=log_x,
        log_y=bool(every) and 0 < 20 * min(every) < max(every) and not summary.higher_is_better,
        worst_at_bottom=summary.higher_is_better,
    )
