"""Verdicts, Markdown, a figure and a docs page from the record of measurements, which is also the JSON file.

A record holds `about` (machine and versions), `bandwidth` (bytes per second), for each size its contenders by name, the
verdicts on the `limits`, and a `warning` if the numbers are not reliable.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sizes import SIZES

Record = dict[str, Any]
Row = dict[str, Any]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance-results.md"
SUMMARY = PAGE.with_name("performance.md")

# Limits: at this size, the wall time of a contender is at most this factor times the sum of others.
Limit = tuple[str, str, float, tuple[str, ...]]
ON_CPU: list[Limit] = [
    ("resnet50", "sngm.SNGM fused", 1.6, ("SGD fused",)),
    ("resnet50", "sngm.SNGM foreach", 1.3, ("SGD foreach", "norm alone foreach")),
    ("resnet50", "sngm.LARS decay default", 1.0, ("pytorch_optimizer.LARS decay default",)),
    ("resnet50", "sngm.LAMB decay default", 1.0, ("pytorch_optimizer.Lamb decay default",)),
    ("resnet50", "sngm.CLARS decay default", 1.1, ("sngm.LARS decay default",)),
]
OURS = ("sngm.SNGM default", "sngm.SNGM decay default", "sngm.SNGM block-wise decay default", "sngm.LARS decay default")
ON_CUDA: list[Limit] = [
    ("vit_b16", "sngm.SNGM default", 1.0, ("SGD fused",)),
    ("1b", "sngm.SNGM default", 1.06, ("SGD fused",)),
    ("1b", "sngm.SNGM decay default", 1.22, ("SGD fused",)),
    *((size, name, 1.1, ("sngm.SNGM decay default",)) for size in ("vit_b16", "1b") for name in OURS[2:]),
    ("1b", "sngm.LAMB decay default", 1.3, ("Adam fused",)),
]
MOST_EXTRA = 100  # microseconds of host time beyond torch's fused SGD, which needs no pointer table
MOST_TIMES = 1.1  # host time over that of torch's fused SGD; of about 1, as it varies by a tenth from run to run


# ---------------------------------------------------------------- verdicts


def judge(record: Record) -> list[Row]:
    """Return each limit with its measurement: PASS, MISS, or SKIP if a size or another library did not run."""
    if record["about"]["device"] == "cpu":
        return [ratio(record, *limit) for limit in ON_CPU]
    return [ratio(record, *limit) for limit in ON_CUDA] + host_limits(record)


def verdict(what: str, limit: float, unit: str, measured: float | None, broken: bool) -> Row:
    word = "MISS" if broken else "SKIP" if measured is None else "PASS" if measured <= limit else "MISS"
    return {"what": what, "limit": limit, "unit": unit, "measured": measured, "verdict": word}


def ratio(record: Record, size: str, name: str, limit: float, others: tuple[str, ...]) -> Row:
    found = record["sizes"].get(size, {"contenders": {}})
    rows = [found["contenders"].get(n) for n in (name, *others)]
    what = f"{SIZES[size].label}: {name} / ({' + '.join(others)})"
    return verdict(what, limit, "x", times_as_long(record, *rows), is_broken(rows[0]))


def host_limits(record: Record) -> list[Row]:
    """Return the verdicts on host time, against torch's fused SGD: the difference for ResNet-20, else the ratio."""
    verdicts = []
    for key, size in record["sizes"].items():
        sgd = size["contenders"].get("SGD fused")
        for name in OURS:
            row = size["contenders"].get(name)
            what, factor = f"{size['label']}: host time of {name}", host_ratio(row, sgd)
            if key == "resnet20":
                extra = None if factor is None else (factor - 1) * sgd["host_us"]["median"]
                verdicts.append(verdict(f"{what} - SGD fused", MOST_EXTRA, " us", extra, is_broken(row)))
            else:
                verdicts.append(verdict(f"{what} / SGD fused", MOST_TIMES, "x", factor, is_broken(row)))
    return verdicts


def host_ratio(row: Row | None, other: Row | None) -> float | None:
    times = [found["host_us"]["median"] for found in (row, other) if found and found["host_us"]]
    return times[0] / times[1] if len(times) == 2 else None


def is_broken(row: Row | None) -> bool:
    return row is not None and bool(row["unavailable"])


def wall(record: Record, row: Row | None) -> float | None:
    """Return the wall time in microseconds: the minimum on the CPU, the median on a GPU."""
    return float(row["wall_us"][record["about"]["statistic"]]) if row and row["wall_us"] else None


def times_as_long(record: Record, row: Row | None, *others: Row | None) -> float | None:
    """Return the wall time of one contender divided by the sum of others.

    On a GPU it is the median over rounds if all were measured in the same rounds: the speed of a host can halve within
    a minute, which affects all contenders of a round equally.
    """
    own, *theirs = (wall(record, r) for r in (row, *others))
    if row is None or own is None or None in theirs:
        return None
    if (
        record["about"]["statistic"] == "median"
        and len({(r["slow"], r["wall_us"]["samples"]) for r in (row, *others)}) == 1
    ):
        rounds = zip(*(r["wall_us_of_rounds"] for r in (row, *others)), strict=True)
        return statistics.median(each[0] / sum(each[1:]) for each in rounds)
    return own / sum(theirs)


def spoken(row: Row) -> str:
    digits = 0 if row["unit"].strip() == "us" else 2
    measured = "not measured" if row["measured"] is None else f"{row['measured']:.{digits}f}{row['unit']}"
    return f"{row['verdict']}  {row['what']} <= {row['limit']:g}{row['unit']}: {measured}"


# ---------------------------------------------------------------- Markdown


def tables(record: Record) -> str:
    """Return a Markdown table for each size."""
    return "\n\n".join(table(record, size) for size in record["sizes"].values())


def table(record: Record, size: Row) -> str:
    parameters, statistic = size["parameters"], record["about"]["statistic"]
    rows = list(size["contenders"].values())
    measured = [row for row in rows if not row["unavailable"]]
    sgd = size["contenders"].get("SGD fused")

    def floor(row: Row) -> float:
        return float(1e6 * row["bytes"] * parameters / record["bandwidth"])

    def of_wall(compute: Callable[[Row, float], str]) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            time = wall(record, row)
            return "" if time is None else compute(row, time)

        return cell

    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("method", lambda row: row["method"]),
        ("path", lambda row: row["path"]),
        (f"wall ms ({statistic})", of_wall(lambda row, time: f"{time / 1e3:.3f}")),
        ("spread", of_wall(lambda row, time: spread(row["wall_us"]))),
        ("x SGD fused", lambda row: "" if (x := times_as_long(record, row, sgd)) is None else f"{x:.2f}"),
        ("host us", lambda row: f"{row['host_us']['median']:.0f}" if row["host_us"] else ""),
        ("GPU ms", lambda row: "" if row["gpu_us"] is None else f"{row['gpu_us'] / 1e3:.3f}"),
        ("B/param", lambda row: f"{row['bytes']}"),
        ("bound ms", lambda row: f"{floor(row) / 1e3:.3f}"),
        ("wall / bound", of_wall(lambda row, time: f"{time / floor(row):.2f}")),
        *((kind, counter(kind)) for kind in ("launches", "copies", "syncs")),
        ("extra MB", lambda row: "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.1f}"),
    ]
    cells = [[cell(row) for row in measured] for _, cell in columns]
    kept = [(title, column) for (title, _), column in zip(columns, cells, strict=True) if any(column)]
    widths = [max(map(len, (title, *column))) for title, column in kept]
    lines = [
        f"### {size['label']}: {parameters:,} parameters in {size['tensors']} tensors",
        "",
        line([title for title, _ in kept], widths),
        "|" + "|".join("-" * (w + 2) if i < 2 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|",
        *(line(row, widths) for row in zip(*(column for _, column in kept), strict=True)),
    ]
    absent = [f"{row['method']} {row['path']}: {row['unavailable']}" for row in rows if row["unavailable"]]
    if absent:
        lines += ["", "Not available:", "", *(f"- {reason}" for reason in absent)]
    return "\n".join(lines)


def counter(kind: str) -> Callable[[Row], str]:
    return lambda row: "" if row[kind] is None else f"{row[kind]:g}"


def line(cells: Sequence[str], widths: list[int]) -> str:
    sized = zip(cells, widths, strict=True)
    return "| " + " | ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(sized)) + " |"


def spread(times: Row) -> str:
    """Return the interquartile range of the samples relative to their median, as text."""
    return f"{100 * (times['q3'] - times['q1']) / times['median']:.1f} %"


def legend(record: Record) -> str:
    words = [
        "spread: the middle half of the samples over their median.",
        f"bound: the bytes a step must move (B/param) over the measured copy bandwidth, "
        f"{record['bandwidth'] / 1e9:,.0f} GB/s; tensors that fit into a cache can beat it.",
        "extra: the most memory a step needs beyond what it keeps.",
    ]
    if record["about"]["device"] != "cpu":
        words += [
            "wall: what a step adds to a loop of backward passes, each of which makes new gradients.",
            "x SGD fused, and the limits: medians of the ratios within a round, of the slow ones ratios of medians.",
            "host: until step() returns, in that loop.",
            "GPU: durations of all kernels and copies of a step, summed, as the profiler reports them.",
            "launches, copies, syncs: kernels run, copies and fills, and calls that wait for the GPU, a step.",
        ]
    return " ".join(words)


def headline(record: Record) -> str:
    return ", ".join(f"{key} {value}" for key, value in record["about"].items() if value)


def markdown(record: Record) -> str:
    verdicts = [f"- {spoken(row)}" for row in record["limits"]]
    warning = [f"**{record['warning']}**", ""] if record["warning"] else []
    return "\n".join([headline(record), "", *warning, tables(record), "", legend(record), "", *verdicts, ""])


# ---------------------------------------------------------------- the figure

STYLE = (
    "svg{--ink:#1a2230;--soft:#566072;--rule:#dde2ea;--paper:#fff;--ours:#0063a6}"
    "@media (prefers-color-scheme:dark){"
    "svg{--ink:#e8ecf3;--soft:#a3aec0;--rule:#323b4a;--paper:#12161d;--ours:#5cb8f0}}"
    "text{font:11.5px system-ui,sans-serif;fill:var(--soft)}.head{font-weight:600;fill:var(--ink)}"
    ".rule{stroke:var(--rule)}.dot{fill:var(--soft)}.ours .dot{fill:var(--ours)}.ours text{fill:var(--ink)}"
    ".bound{stroke:var(--ink);stroke-width:1.5}"
)
NAMES, PLOT, LINE = 240, 380, 17  # pixels: the column of names, the plot beside it, the height of a row


def figure(record: Record) -> str:
    """Return an SVG with a panel for each size: a dot at each contender's wall time (log axis), a tick at its bound."""
    body, y = [], 46
    for size in record["sizes"].values():
        panel, height = draw_panel(record, size)
        body.append(f'<g transform="translate(10,{y})">{panel}</g>')
        y += height
    title = f"Wall time of one optimizer step on {record['about']['hardware']}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {NAMES + PLOT + 50} {y}" role="img">'
        f"<title>{escape(title)}</title><desc>Dots: measured. Ticks: bytes to move over copy bandwidth.</desc>"
        f'<style>{STYLE}</style><rect width="100%" height="100%" style="fill:var(--paper)"/>'
        f'<text class="head" x="10" y="18">{escape(title)}</text>'
        f'<text x="10" y="34">dots: measured; ticks: the bytes it must move, at the speed of a copy</text>'
        f"{''.join(body)}</svg>\n"
    )


def draw_panel(record: Record, size: Row) -> tuple[str, int]:
    timed = [(time, row) for row in size["contenders"].values() if (time := wall(record, row))]
    timed.sort(key=lambda pair: pair[0])
    bounds = [1e6 * row["bytes"] * size["parameters"] / record["bandwidth"] for _, row in timed]
    if not timed:
        return "", 0
    low = math.log10(min([*bounds, timed[0][0]])) - 0.05
    high = math.log10(max([*bounds, timed[-1][0]])) + 0.05

    def x(microseconds: float) -> float:
        return NAMES + PLOT * (math.log10(microseconds) - low) / (high - low)

    bottom = 22 + LINE * len(timed)
    out = [f'<text class="head" x="0" y="14">{escape(size["label"])}</text>']
    decades = range(math.floor(low), math.ceil(high) + 1)
    factors = (1, 2, 5) if high - low < 2 else (1,)
    for mark in (factor * 10.0**power for power in decades for factor in factors):
        if low <= math.log10(mark) <= high:
            out.append(f'<path class="rule" d="M{x(mark):.1f},20V{bottom}"/>')
            out.append(f'<text x="{x(mark):.1f}" y="{bottom + 14}" text-anchor="middle">{mark / 1e3:g} ms</text>')
    for i, ((time, row), bound) in enumerate(zip(timed, bounds, strict=True)):
        y = 22 + LINE * (i + 0.5)
        out.append(
            f'<g class="{"ours" if row["ours"] else "theirs"}">'
            f'<text x="{NAMES - 8}" y="{y + 4}" text-anchor="end">{escape(row["method"])} {escape(row["path"])}</text>'
            f'<path class="bound" d="M{x(bound):.1f},{y - 5}v10"/>'
            f'<circle class="dot" cx="{x(time):.1f}" cy="{y}" r="4"/></g>'
        )
    return "".join(out), bottom + 34


# ---------------------------------------------------------------- the page


def write_page(record: Record, page: Path = PAGE) -> None:
    """Write the results between the page's markers for their device, and the figure next to the page."""
    device = record["about"]["device"].partition(":")[0]
    picture = page.with_name(f"performance-{device}.svg")
    picture.write_text(figure(record))
    known = [(key, str(value).replace("|", r"\|")) for key, value in record["about"].items() if value]
    facts = "\n".join(f"| {key} | {value} |" for key, value in known)
    limits = "\n".join(f"- {spoken(row)}" for row in record["limits"])
    warning = f"\n\n**{record['warning']}**" if record["warning"] else ""
    section = (
        f"{warning}\n\n| run | |\n|---|---|\n{facts}\n\n![Wall time of a step]({picture.name})\n\n"
        f"{tables(record)}\n\n{legend(record)}\n\nLimits:\n\n{limits}\n\n"
    )
    replace_between(page, f"results {device}", section)
    if device == "cuda":
        replace_between(SUMMARY, "summary", f"\n\n{summary(record)}\n\n")


def summary(record: Record) -> str:
    """Return one table of wall and host times, for all sizes, as multiples of torch's fused optimizer."""
    lines = ["| wall, host | " + " | ".join(size["label"] for size in record["sizes"].values()) + " |"]
    lines.append("|---" * (1 + len(record["sizes"])) + "|")
    for name, rival in [*((name, "SGD fused") for name in OURS), ("sngm.LAMB decay default", "Adam fused")]:
        cells = []
        for size in record["sizes"].values():
            ours, theirs = size["contenders"].get(name), size["contenders"].get(rival)
            of_wall = times_as_long(record, ours, theirs)
            cells.append("" if of_wall is None else f"{of_wall:.2f}, {host_ratio(ours, theirs):.2f}")
        label = name.removeprefix("sngm.").removesuffix(" default")
        lines.append(f"| {label} / {rival.removesuffix(' fused')} | " + " | ".join(cells) + " |")
    about = record["about"]
    lines += ["", f"{about['hardware']}, torch {about['torch']}, commit {about['commit']}, `{about['command']}`"]
    return "\n".join(lines)


def replace_between(page: Path, name: str, section: str) -> None:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text()
    if begin not in text or end not in text:
        raise SystemExit(f"{page} has no place for the results: {begin} ... {end}")
    page.write_text(re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: begin + section + end, text, flags=re.S))
