"""Write advice as advice.json and a self-contained HTML page in the style of a study's report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import results_in, write_atomically, write_json
from ..report.figures import Figure, Series, slots
from ..report.html import render
from .facts import RULE, THEORY, table_rows

MOST = 400  # the most points of a line in a figure
Record = dict[str, Any]


def write(folder: Path, advice: Record) -> Path:
    """Write advice.json and report.html into a folder, and return the path of report.html."""
    with results_in(folder):
        write_json(folder / "advice.json", plain(advice))
        write_atomically(folder / "report.html", html(advice).encode())
    return folder / "report.html"


def plain(advice: Record) -> Record:
    """Return the advice with its curves as dicts, for JSON."""
    return {**advice, "curves": [curve._asdict() for curve in advice["curves"]]} if "curves" in advice else advice


def answer(advice: Record) -> str:
    """Return the advice as one sentence."""
    if advice["kind"] == "recipe":
        measured = str(advice.get("verified", "")).partition(". ")[0]
        return f"Verified: {measured.removesuffix('.')}." if measured else str(advice["answer"])
    tolerated = "; ".join(
        f"{row['method']} none" if row["batch"] is None else f"{row['method']} {row['batch']:,} at lr {row['lr']:.3g}"
        for row in advice["methods"]
    )
    return f"Largest batches for {advice['gradients']:,.0f} gradients: {tolerated}."


def methods_table(advice: Record) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table with the largest batch of each method."""
    said = {"largest batch": RULE, "lr": THEORY, "steps": "counted", "bound": THEORY, "lowest bound": THEORY}
    head = ["method", *(f"{name} ({source})" for name, source in said.items()), "by"]
    rows = [
        [row["method"], *(["none", "", "", ""] if row["batch"] is None else
         [f"{row['batch']:,}", f"{row['lr']:.3g}", f"{row['steps']:,}", f"{row['bound']:.3g}"]),
         f"{row['best_bound']:.3g} at {row['best_batch']:,}", row["statement"]]
        for row in advice["methods"]
    ]  # fmt: skip
    return head, rows


def html(advice: Record) -> str:
    """Return the advice as an HTML page."""
    recipe = advice["kind"] == "recipe"
    head, rows = ([], []) if recipe else methods_table(advice)
    title = f"Advice for {advice.get('task') or 'your numbers'}"
    ring = "Each at its best admissible learning rate. A ring marks the largest batch of a method, if there is one."
    return render(
        "advice",
        title=title,
        subject=title,
        answer=answer(advice),
        advice=advice,
        facts=table_rows(advice["facts" if recipe else "constants"]),
        head=head,
        rows=rows,
        figure=_norms(advice["norms"]) if recipe else _bounds(advice),
        note="Each step of the pilot." if recipe else ring,
        origin={key: advice[key] for key in ("versions", "hardware", "commit") if advice.get(key)},
    )


def _norms(norms: Sequence[float]) -> Figure:
    every = -(-len(norms) // MOST)
    points = [(float(step), norm) for step, norm in enumerate(norms)][::every]
    return Figure(
        "Gradient norm of the pilot",
        f"From {norms[0]:.3g} at the first step to {norms[-1]:.3g} at the last.",
        "step",
        "gradient norm",
        {"pilot": [Series("recipe", 0, points, marks=False)]},
        log_y=min(norms) > 0,
    )


def _bounds(advice: Record) -> Figure:
    panel = []
    looks = slots([curve.method for curve in advice["curves"]])
    for curve in advice["curves"]:
        points = [(float(b), bound) for b, bound in zip(curve.batches, curve.bounds, strict=True)]
        ring = None if curve.largest is None else float(curve.batches[curve.largest])
        panel.append(Series(curve.method, looks[curve.method], points, ring=ring))
    lows = "; ".join(f"{row['method']} {row['best_bound']:.3g} at {row['best_batch']}" for row in advice["methods"])
    everything = [y for series in panel for _, y in series.points]
    return Figure(
        "Bound against batch",
        f"Bounds on the mean gradient norm for {advice['gradients']:,.0f} gradients. Lowest: {lows}.",
        "batch",
        "bound",
        {f"{advice['gradients']:,.0f} gradients": panel},
        log_x=True,
        log_y=min(everything) > 0,
        worst_at_bottom=False,
    )
