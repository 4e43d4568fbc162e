"""Line charts as SVG, written by hand: they need no library, follow the reader's light or dark theme, and stay small.

A :class:`Figure` is a row of panels that share axes and a legend. :func:`inline` gives it as HTML whose panels flow
with the page; :func:`standalone` as one SVG file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from html import escape
from statistics import fmean

from .stats import Summary

WIDTH, HEIGHT = 360, 250
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 26, 40

# Colours that differ in lightness as well as in hue, so that they remain apart for colour-blind readers and in print.
LIGHT = ["#0063a6", "#c2410c", "#00795b", "#9d3c8c", "#7a5c00", "#4338ca", "#4b5563"]
DARK = ["#5cb8f0", "#fb923c", "#34d399", "#f0a3dc", "#facc15", "#a5b4fc", "#cbd5e1"]
MARKS = [
    "M-3.6,0a3.6,3.6 0 1,0 7.2,0a3.6,3.6 0 1,0 -7.2,0Z",
    "M-3.3,-3.3H3.3V3.3H-3.3Z",
    "M0,-4.4L4.2,3.2H-4.2Z",
    "M0,-4.8L4.4,0L0,4.8L-4.4,0Z",
    "M0,4.4L4.2,-3.2H-4.2Z",
    "M-1.5,-4.2H1.5V-1.5H4.2V1.5H1.5V4.2H-1.5V1.5H-4.2V-1.5H-1.5Z",
]

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One line. Its slot decides colour and mark, so that a method looks the same everywhere."""

    label: str
    slot: int
    points: Points
    errors: list[float | None] = field(default_factory=list)
    faint: list[Points] = field(default_factory=list)
    """Lines behind the main one, such as its seeds."""
    marks: bool = True
    lost: list[float] = field(default_factory=list)
    """Where there is an x but no y: drawn as crosses on the worst edge."""
    ring: float | None = None
    """The x of a point to circle."""

    @property
    def plotted(self) -> list[tuple[float | None, ...]]:
        """Its points as numbers, with their errors where it has any."""
        if not any(self.errors):
            return list(self.points)
        return [(*point, error) for point, error in zip(self.points, self.errors, strict=True)]


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels, by title, that share their axes."""

    title: str
    description: str
    x_label: str
    y_label: str
    panels: dict[str, list[Series]]
    log_x: bool = False
    log_y: bool = False
    worst_at_bottom: bool = True
    cut: float = 0.0
    """The share of the worst values to leave outside the axes, so that the start of a training hides not its end."""
    dodge: float = 0.0
    """Pixels between the series at one x, so that error bars do not hide each other."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high = self._warp(self.low), self._warp(self.high)
        return self.start + (self._warp(value) - low) / (high - low) * (self.end - self.start)

    def _warp(self, value: float) -> float:
        return math.log10(value) if self.log else value


def css(selector: str) -> str:
    """The style of all charts, its variables defined on the selector."""
    light = "".join(f"--s{i}:{colour};" for i, colour in enumerate(LIGHT))
    dark = "".join(f"--s{i}:{colour};" for i, colour in enumerate(DARK))
    slots = "".join(f".s{i}{{--c:var(--s{i})}}" for i in range(len(LIGHT)))
    return (
        f"{selector}{{--ink:#1a2230;--soft:#566072;--rule:#dde2ea;--paper:#ffffff;{light}}}"
        f"@media (prefers-color-scheme:dark){{{selector}{{"
        f"--ink:#e8ecf3;--soft:#a3aec0;--rule:#323b4a;--paper:#12161d;{dark}}}}}"
        "svg text{font:11.5px system-ui,sans-serif;fill:var(--soft)}svg .head{font-weight:600;fill:var(--ink)}"
        f".grid{{stroke:var(--rule);stroke-width:1}}.axis{{stroke:var(--soft);stroke-width:1}}{slots}"
        ".line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}"
        ".faint{fill:none;stroke:var(--c);stroke-width:1;opacity:.4}"
        ".mark{fill:var(--c);stroke:var(--paper);stroke-width:1}.bar{fill:none;stroke:var(--c);stroke-width:1.5}"
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two values.

    >>> ticks(0.0, 97.0)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _axes(figure: Figure) -> tuple[Axis, list[float], Axis, list[float]]:
    everything = [series for panel in figure.panels.values() for series in panel]
    lines = [line for series in everything for line in (series.points, *series.faint)]
    xs = sorted({x for line in lines for x, _ in line} | {x for series in everything for x in series.lost})
    ys = [y for line in lines for _, y in line]
    log_y = figure.log_y and min(ys) > 0
    floor = min(ys) / 1.25 if log_y else -math.inf  # a bar that reaches to 0 would need an endless log axis
    for series in everything:
        for (_, y), error in zip(series.points, series.errors, strict=False):
            ys += [max(y - (error or 0), floor), y + (error or 0)]
    low, high = min(ys), max(ys)
    if figure.cut:
        ends = [series.points[-1][1] for series in everything if series.points]
        worst = sorted(ys, reverse=not figure.worst_at_bottom)[int(figure.cut * len(ys))]
        low, high = (min([worst, *ends]), high) if figure.worst_at_bottom else (low, max([worst, *ends]))
    if log_y:
        low, high = low / 1.15, high * 1.15
    else:
        margin = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
        low, high = low - margin, high + margin
    left, right = xs[0], xs[-1]
    if figure.log_x:
        pad = (right / left) ** 0.06 if right > left else 2.0
        x_axis = Axis(left / pad, right * pad, LEFT, WIDTH - RIGHT, True)
        x_ticks: list[float] = []
        for x in xs:  # the values themselves, as far as there is room
            if not x_ticks or x_axis(x) - x_axis(x_ticks[-1]) > 32:
                x_ticks.append(x)
    else:
        x_axis = Axis(left - (right == left), right + (right == left), LEFT, WIDTH - RIGHT, False)
        x_ticks = [tick for tick in ticks(x_axis.low, x_axis.high) if tick == int(tick)]
    y_axis = Axis(low, high, HEIGHT - BOTTOM, TOP, log_y)
    powers = [f * 10.0**k for k in range(-12, 13) for f in (1, 2, 5) if low <= f * 10.0**k <= high]
    decades = [power for power in powers if f"{power:e}".startswith("1.")]
    y_ticks = (decades if len(decades) > 3 else powers) if log_y and len(powers) > 1 else ticks(low, high)
    return x_axis, x_ticks, y_axis, y_ticks


def _panel(figure: Figure, title: str, panel: list[Series]) -> str:
    """The inside of one panel's SVG: the frame, and in it an inner svg, which clips what the axes cut."""
    x_axis, x_ticks, y_axis, y_ticks = _axes(figure)
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    out = [f'<text class="head" x="{LEFT}" y="15">{escape(title)}</text>']
    for y in y_ticks:
        out.append(f'<path class="grid" d="M{LEFT},{y_axis(y):.1f}H{right}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y_axis(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    out.append(f'<path class="axis" d="M{LEFT},{floor}H{right}"/>')
    for x in x_ticks:
        out.append(f'<path class="axis" d="M{x_axis(x):.1f},{floor}v4"/>')
        out.append(f'<text x="{x_axis(x):.1f}" y="{floor + 16}" text-anchor="middle">{x:g}</text>')
    below = f"translate({(LEFT + right) / 2},{HEIGHT - 6})"
    beside = f"translate(12,{(TOP + floor) / 2}) rotate(-90)"
    for place, text in ((below, figure.x_label), (beside, figure.y_label)):
        out.append(f'<text transform="{place}" text-anchor="middle">{escape(text)}</text>')
    top = TOP - (0 if figure.cut else 8)  # a line that leaves the axes must not run into the title
    width, height = WIDTH - LEFT, floor - top
    box = f'x="{LEFT}" y="{top}" width="{width}" height="{height}" viewBox="{LEFT} {top} {width} {height}"'
    middle = (len(panel) - 1) / 2
    lines = [_series(figure, series, order - middle, x_axis, y_axis) for order, series in enumerate(panel)]
    return f"{''.join(out)}<svg {box}>{''.join(lines)}</svg>"


def _series(figure: Figure, series: Series, order: float, x_axis: Axis, y_axis: Axis) -> str:
    shift = figure.dodge * order
    out = [f'<g class="s{series.slot % len(LIGHT)}"><title>{escape(series.label)}</title>']
    out += [_line("faint", line, x_axis, y_axis, shift) for line in series.faint]
    for (x, y), error in zip(series.points, series.errors, strict=False):
        if error:
            clipped = y_axis.log and y - error < y_axis.low
            px, high, low = x_axis(x) + shift, y_axis(y + error), HEIGHT if clipped else y_axis(y - error)
            out.append(f'<path class="bar" d="M{px - 3:.1f},{high:.1f}h6m-3,0V{low:.1f}m-3,0h6"/>')
    out.append(_line("line", series.points, x_axis, y_axis, shift))
    for x, y in series.points if series.marks else series.points[-1:]:
        place = f'transform="translate({x_axis(x) + shift:.1f},{y_axis(y):.1f})"'
        out.append(f'<path class="mark" {place} d="{MARKS[series.slot % len(MARKS)]}"/>')
        if series.ring and math.isclose(x, series.ring, rel_tol=1e-9):
            out.append(f'<circle class="bar" {place} r="7.5"/>')
    edge = HEIGHT - BOTTOM - 6 if figure.worst_at_bottom else TOP + 6
    for x in series.lost:
        out.append(f'<path class="bar" d="M{x_axis(x) + 7 * order - 3:.1f},{edge - 3}l6,6m0,-6l-6,6"/>')
    return "".join(out) + "</g>"


def _line(kind: str, points: Points, x_axis: Axis, y_axis: Axis, shift: float) -> str:
    if len(points) < 2:
        return ""
    return f'<path class="{kind}" d="M{"L".join(f"{x_axis(x) + shift:.1f},{y_axis(y):.1f}" for x, y in points)}"/>'


def _legend(figure: Figure) -> dict[str, int]:
    """Labels in the order of their looks, whichever panel has them first."""
    series = (series for panel in figure.panels.values() for series in panel)
    return {s.label: s.slot for s in sorted(series, key=lambda s: s.slot)}


def _key(slot: int) -> str:
    mark = f'<path class="mark" transform="translate(12,8)" d="{MARKS[slot % len(MARKS)]}"/>'
    return f'<g class="s{slot % len(LIGHT)}"><path class="line" d="M0,8H24"/>{mark}</g>'


def inline(figure: Figure, name: str) -> str:
    """The figure as HTML: a legend and a grid of panels, for a page that has :func:`css`."""
    keys = "".join(
        f'<li><svg aria-hidden="true" viewBox="0 0 24 16" width="24" height="16">{_key(slot)}</svg>{escape(label)}</li>'
        for label, slot in _legend(figure).items()
    )
    drawn = []
    for i, (title, panel) in enumerate(figure.panels.items()):
        ids = f"{name}-{i}"
        drawn.append(
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{ids}-t {ids}-d">'
            f'<title id="{ids}-t">{escape(f"{figure.title}, {title}")}</title>'
            f'<desc id="{ids}-d">{escape(figure.description)}</desc>{_panel(figure, title, panel)}</svg>'
        )
    size = "one" if len(drawn) == 1 else "many"
    grid = f'<div class="panels {size}" style="--n:{_columns(figure)}">{"".join(drawn)}</div>'
    return f'<ul class="legend">{keys}</ul>{grid}'


def _columns(figure: Figure) -> int:
    return 2 if len(figure.panels) in (2, 4) else 1 if len(figure.panels) < 2 else 3


def standalone(figure: Figure) -> str:
    """The figure as the text of an SVG file that carries its own style."""
    columns = _columns(figure)
    width, y = columns * WIDTH + 24, 48
    body = [f'<text class="head" x="12" y="24" style="font-size:15px">{escape(figure.title)}</text>']
    x = 12.0
    for label, slot in _legend(figure).items():
        short = label if len(label) <= 44 else label[:43] + "…"
        if x > 12 and x + 30 + 6.6 * len(short) > width:
            x, y = 12.0, y + 20
        body.append(
            f'<g transform="translate({x:.0f},{y - 12})">{_key(slot)}<text x="30" y="12">{escape(short)}</text></g>'
        )
        x += 50 + 6.6 * len(short)
    y += 14
    for i, (title, panel) in enumerate(figure.panels.items()):
        place = f"translate({12 + i % columns * WIDTH},{y + i // columns * HEIGHT})"
        body.append(f'<g transform="{place}">{_panel(figure, title, panel)}</g>')
    if not figure.panels:
        body.append(f'<text x="12" y="{y}">No run to draw here yet.</text>')
    height = y + math.ceil(len(figure.panels) / columns) * HEIGHT + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">'
        f"<title>{escape(figure.title)}</title><desc>{escape(figure.description)}</desc><style>{css('svg')}</style>"
        f'<rect width="100%" height="100%" style="fill:var(--paper)"/>{"".join(body)}</svg>\n'
    )


def by_batch(summary: Summary) -> Figure:
    """The metric against the batch size."""
    panel = []
    for slot, method in enumerate(summary.methods):
        cells = [summary.cells[method, batch] for batch in summary.batches]
        points = [(float(cell.batch), _shown(summary, cell.mean)) for cell in cells if cell.mean is not None]
        errors = [None if (half := cell.half_width) is None else _shown(summary, half) for cell in cells if cell.values]
        lost = [float(cell.batch) for cell in cells if cell.only_diverged]
        if points or lost:
            panel.append(Series(method, slot, points, errors, lost=lost))
    figure = _figure(summary, "against batch size", "global batch", {summary.task: panel}, log_x=True)
    return replace(figure, dodge=5.0)


def curves(summary: Summary) -> Figure:
    """The metric against the epoch: a panel a batch size, thick the mean of the finished seeds, thin the seeds."""
    panels = {}
    for batch in summary.batches:
        panel = []
        for slot, method in enumerate(summary.methods):
            lines, finished = [], []
            for run in summary.cells[method, batch].runs:
                values = {entry["epoch"]: entry.get(run.key(summary.metric), math.nan) for entry in run.curve}
                line = {epoch: _shown(summary, value) for epoch, value in values.items() if math.isfinite(value)}
                lines += [list(line.items())] if line and run.status != "diverged" else []
                finished += [line] if run.status == "finished" else []
            shared = sorted(set(finished[0]).intersection(*finished[1:])) if finished else []
            means = [(epoch, fmean([line[epoch] for line in finished])) for epoch in shared]
            if lines:
                faint = lines if len(lines) > 1 or not means else []
                panel.append(Series(method, slot, means, faint=faint, marks=False))
        if panel:
            panels[f"batch {batch}"] = panel
    return replace(_figure(summary, "over training", "epoch", panels), cut=0.15)


def by_rate(summary: Summary) -> Figure:
    """The validation metric against the learning rate: a panel a batch size."""
    panels = {}
    for batch in summary.batches:
        panel = []
        for slot, method in enumerate(summary.methods):
            cell = summary.cells[method, batch]
            points = [(lr, _shown(summary, value)) for lr, value in cell.selection.items() if math.isfinite(value)]
            lost = [lr for lr, value in cell.selection.items() if not math.isfinite(value)]
            if cell.selection:
                panel.append(Series(method, slot, points, lost=lost, ring=cell.lr))
        if panel:
            panels[f"batch {batch}"] = panel
    return _figure(summary, "against learning rate", "learning rate", panels, part="validation", log_x=True)


def _shown(summary: Summary, value: float) -> float:
    return 100 * value if summary.percent else value


def _figure(
    summary: Summary,
    what: str,
    x_label: str,
    panels: dict[str, list[Series]],
    part: str = "test",
    log_x: bool = False,
) -> Figure:
    metric = f"{part} {summary.metric}"
    every = [
        y for panel in panels.values() for series in panel for line in (series.points, *series.faint) for _, y in line
    ]
    spread = bool(every) and min(every) > 0 and max(every) > 20 * min(every)
    ends = [
        f"{s.label} ends at {s.points[-1][1]:.4g} ({title})"
        for title, panel in panels.items()
        for s in panel
        if s.points
    ]
    return Figure(
        title=f"{metric.capitalize()} {what}",
        description=f"{summary.task}: {metric} {what}. " + "; ".join(ends),
        x_label=x_label,
        y_label=metric + (" (%)" if summary.percent else ""),
        panels=panels if every else {},
        log_x=log_x,
        log_y=spread and not summary.higher_is_better,
        worst_at_bottom=summary.higher_is_better,
    )
