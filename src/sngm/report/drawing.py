"""Draw figures as SVG with matplotlib: no network, hover values, and the reader's light or dark theme."""

from __future__ import annotations

import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import Figure, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from matplotlib.lines import Line2D
    from matplotlib.transforms import Bbox

WIDTH, HEIGHT = 360, 250  # size of a panel in pixels
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 30, 40
INNER = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
TEMPLATES = Path(__file__).with_name("templates")
CSS = (TEMPLATES / "figures.css").read_text("utf-8")
VARIABLES = {colour: name for name, colour in re.findall(r"(--\w+):(#\w{6})", CSS)}
COLOURS = [colour for colour, name in VARIABLES.items() if re.fullmatch(r"--s\d", name)][:7]  # for the light theme
PAPER = "#ffffff"
MARKERS = "os^DvP"
HOVER = "hover: "  # prefix of an artist's gid (in SVG, an id); the rest of the gid becomes the element's <title>


def inline(figure: Figure) -> dict[str, Any]:
    """Return a figure as SVGs for a page with the style `CSS`: a dict of "legend", pairs (label, SVG), and "panels"."""
    from matplotlib.transforms import Bbox

    with _matplotlib():
        canvas, panels = _canvas(figure), []
        for axes, title in zip(list(canvas.axes), figure.panels, strict=True):
            for artist in canvas.get_children():
                artist.set_visible(artist is axes)
            x, y = axes.get_position().min * canvas.get_size_inches()
            box = Bbox.from_bounds(x - LEFT / 72, y - BOTTOM / 72, WIDTH / 72, HEIGHT / 72)
            label = f"{figure.title}, {title}. {figure.description}"
            panels.append(_svg(canvas, {"class": "chart", "role": "img", "aria-label": label}, box))
        return {"legend": [(label, _key(slot)) for label, slot in _legend(figure).items()], "panels": panels}


def standalone(figure: Figure) -> str:
    """Return a figure as the text of an SVG file, with its title and legend."""
    about = {"xmlns": "http://www.w3.org/2000/svg", "role": "img"}
    with _matplotlib():
        svg = _svg(_canvas(figure), about | {"aria-label": f"{figure.title}. {figure.description}"})
    return svg.replace(">", f"><style>{CSS}</style>", 1) + "\n"


@contextmanager
def _matplotlib() -> Iterator[None]:
    """Use only our style, and ignore warnings, such as of glyphs missing in a font: the SVG uses the reader's fonts."""
    from matplotlib import style

    with warnings.catch_warnings(), style.context(["default", TEMPLATES / "figures.mplstyle"]):
        warnings.simplefilter("ignore")
        yield


def _svg(canvas: Canvas, about: dict[str, str], box: Bbox | None = None) -> str:
    """Return a canvas as one SVG element with the attributes `about` and without references to other files."""
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="svg", bbox_inches=box, metadata={"Date": None})
    root = ET.fromstring(buffer.getvalue())
    for element in root.iter():
        for child in [child for child in element if child.tag.endswith(("metadata", "style"))]:
            element.remove(child)
        element.tag, element.tail = element.tag.rpartition("}")[2], None
        element.text = element.text if element.tag in ("text", "title") else None
        element.attrib = {key.rpartition("}")[2]: " ".join(value.split()) for key, value in element.attrib.items()}
        if look := re.sub(r"font-family: [^;]*; ", "", element.get("style", "")):
            element.set("style", re.sub("#[0-9a-f]{6}", lambda hit: f"var({VARIABLES.get(hit[0], '--ink')})", look))
        if element.tag == "g" and (name := element.attrib.pop("id", "")).startswith(HOVER):
            element.insert(0, ET.Element("title"))
            element[0].text = name.removeprefix(HOVER)
    width, height = root.attrib["viewBox"].split()[2:]
    root.attrib = about | {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    return ET.tostring(root, encoding="unicode")


def _legend(figure: Figure) -> dict[str, int]:
    every = (series for panel in figure.panels.values() for series in panel)
    return {series.label: series.slot for series in sorted(every, key=lambda series: series.slot)}


def _key(slot: int) -> str:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(24 / 72, 16 / 72), facecolor="none")
    canvas.add_artist(_line(slot, [(0, 0.5), (0.5, 0.5), (1, 0.5)], markevery=[1]))
    return _svg(canvas, {"aria-hidden": "true"})


def _line(slot: int, points: Sequence[tuple[float, float]] = (), **settings: Any) -> Line2D:
    from matplotlib.lines import Line2D

    looks = {"color": COLOURS[slot % len(COLOURS)], "marker": MARKERS[slot % len(MARKERS)]}
    return Line2D([x for x, _ in points], [y for _, y in points], **(looks | settings))


def _canvas(figure: Figure) -> Canvas:
    """Return a matplotlib figure with the title, the legend and all panels of a figure."""
    from matplotlib.figure import Figure as Canvas

    count = len(figure.panels)
    columns = {0: 2, 1: 1, 2: 2, 4: 2}.get(count, 3)
    width = columns * WIDTH + 24
    keys = {label if len(label) < 45 else f"{label[:43]}…": slot for label, slot in _legend(figure).items()}
    across = max(1, width // (55 + 7 * max(map(len, keys), default=1)))
    head = 42 + 20 * math.ceil(len(keys) / across)
    height = head + HEIGHT * math.ceil(count / columns) + 8
    canvas = Canvas(figsize=(width / 72, height / 72))
    canvas.text(12 / width, 1 - 24 / height, figure.title, size=15, weight="bold")
    canvas.text(12 / width, 12 / height, "" if count else "No run to draw yet.")
    lines = [_line(slot, label=label) for label, slot in keys.items()]
    canvas.legend(handles=lines, loc="upper left", bbox_to_anchor=(12 / width, 1 - 36 / height), ncols=across)
    for i, title in enumerate(figure.panels):
        x, y = 12 + i % columns * WIDTH + LEFT, height - head - i // columns * HEIGHT - HEIGHT + BOTTOM
        axes = canvas.add_axes((x / width, y / height, INNER[0] / width, INNER[1] / height), title=title)
        axes.set(xlabel=figure.x_label, ylabel=figure.y_label)
        axes.xaxis.set_label_coords(0.5, -22 / INNER[1])
        axes.yaxis.set_label_coords(-34 / INNER[0], 0.5)
        _set_limits(axes, figure, title)
        for order, series in enumerate(figure.panels[title]):
            _draw(axes, figure, series, order - (len(figure.panels[title]) - 1) / 2, figure.worst.get(title))
    return canvas


def _set_limits(axes: Axes, figure: Figure, title: str) -> None:
    """Set scales, limits and ticks of a panel. All panels share them, except the y axes of those in `figure.worst`."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

    every = [series for panel in figure.panels.values() for series in panel]
    xs = sorted({x for s in every for x in (*s.lost, *(x for line in (s.points, *s.faint) for x, _ in line))})
    every, worst = figure.panels[title] if title in figure.worst else every, figure.worst.get(title)
    ys = [y for s in every for line in (s.points, *s.faint) for _, y in line if math.isfinite(y)]
    log_y = figure.log_y and min(ys) > 0
    floor = min(ys) / 1.25 if log_y else -math.inf  # an error bar that reaches 0 would need an endless log axis
    errors = [(y, e) for s in every for (_, y), e in zip(s.points, s.errors, strict=False) if e]
    ys += [max(y - error, floor) for y, error in errors] + [y + error for y, error in errors]
    if figure.cut:
        edge = sorted(ys, reverse=not figure.worst_at_bottom)[int(figure.cut * len(ys))]
        worst = (min if figure.worst_at_bottom else max)([edge, *(s.points[-1][1] for s in every if s.points)])
    ends = [min(ys), max(ys)]
    if worst is not None:
        ends[0 if figure.worst_at_bottom else 1] = worst
    axes.set(xscale="log" if figure.log_x else "linear", yscale="log" if log_y else "linear")
    axes.update_datalim([(xs[0], ends[0]), (xs[-1], ends[1])])
    axes.autoscale_view()
    if not figure.log_x:
        axes.set_xlim(xs[0] - (xs[0] == xs[-1]), xs[-1] + (xs[0] == xs[-1]))
    elif figure.decades:
        left, right = (math.log10(end) for end in axes.get_xlim())
        if math.floor(right) - math.ceil(left) < 1:  # fewer than two ticks
            axes.set_xlim(10.0 ** max(math.floor(left), -307), 10.0 ** min(math.ceil(right), 308))
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, figure.possible[0]), min(high, figure.possible[1]))
    whole, linear = (MaxNLocator(6, steps=[1, 2, 5, 10], integer=integer) for integer in (True, False))
    ticks = xs[:1]
    for x in xs:  # keep the x values whose labels do not overlap
        pixels = (axes.transData.transform((x, low)) - axes.transData.transform((ticks[-1], low)))[0]
        if pixels > 12 + 3.6 * len(f"{x:g}{ticks[-1]:g}"):
            ticks.append(x)
    powers_of_10 = LogLocator(numticks=7) if figure.decades else FixedLocator(ticks)
    axes.xaxis.set_major_locator(powers_of_10 if figure.log_x else whole)
    few = LogLocator(subs=(1, 2, 5) if log_y and high / low < 1000 else (1,))
    axes.yaxis.set_major_locator(few if log_y and high / low > 3 else linear)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(FixedLocator([]))


def _draw(axes: Axes, figure: Figure, series: Series, place: float, worst: float | None) -> None:
    """Draw a series, shifted to the right by `place` times `figure.dodge` pixels and cut off at the y value `worst`."""
    from matplotlib.transforms import Affine2D

    def draw(points: Sequence[tuple[float, float]], hover: str = "", **settings: Any) -> None:
        shifted = axes.transData + Affine2D().translate(figure.dodge * place, 0)
        own = {"gid": f"{HOVER}{series.label}{hover}", "transform": shifted, "clip_on": False}
        axes.add_artist(_line(series.slot, points, **(own | settings)))

    low, high = axes.get_ylim()
    edge = {"markeredgecolor": _line(series.slot).get_color(), "markeredgewidth": 1.5}
    limit = max if figure.worst_at_bottom else min
    lines = [*series.faint, series.points]
    *faint, shown = lines if worst is None else [[(x, limit(y, worst)) for x, y in line] for line in lines]
    for line in faint:
        draw(line, marker="o" if len(line) == 1 else "", markersize=5, linewidth=1, alpha=0.4, clip_on=figure.cut > 0)
    draw(shown, marker="", clip_on=figure.cut > 0)
    errors = series.errors or [None] * len(shown)
    for (x, y), (_, true), error in list(zip(shown, series.points, errors, strict=True))[0 if series.marks else -1 :]:
        hover = f": {true:.4g}{f' ± {error:.2g}' if error else ''} at {x:g}"
        if error and math.isfinite(y):
            draw([(x, max(y - error, low)), (x, min(y + error, high))], hover, marker="_", linewidth=1.5, **edge)
        if math.isfinite(y):
            hollow = {"markerfacecolor": PAPER, **edge} if y != true else {}
            draw([(x, y)], hover, linestyle="", **hollow)
        if series.ring and math.isclose(x, series.ring, rel_tol=1e-9):
            draw([(x, y)], f"{hover}, ringed", marker="o", linestyle="", markersize=15, markerfacecolor="none", **edge)
    aside = axes.get_xaxis_transform() + Affine2D().translate(7 * place, 0)
    for x in series.lost:
        at = (x, 0.04 if figure.worst_at_bottom else 0.96)
        draw([at], f": diverged at {x:g}", marker="x", linestyle="", markersize=6, transform=aside, **edge)
