"""The advice as a folder: a record, and one page that opens offline, in the style of a study's report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import results_in, write_atomically, write_json
from ..report.figures import Figure, Series, inline
from ..report.html import box, document, fact_list, section, table_row, words
from .facts import RULE, THEORY, Fact

MOST = 400  # points of a drawn line
OWN_STYLE = "pre{overflow-x:auto;white-space:pre-wrap}"
Record = dict[str, Any]


def write(folder: Path, advice: Record) -> Path:
    """Write advice.json and report.html, whose path is returned."""
    with results_in(folder):
        write_json(folder / "advice.json", plain(advice))
        write_atomically(folder / "report.html", html(advice).encode())
    return folder / "report.html"


def plain(advice: Record) -> Record:
    """As JSON can have it."""
    found = dict(advice)
    for key in ("facts", "constants"):
        if key in found:
            found[key] = [fact.as_dict() for fact in found[key]]
    if "curves" in found:
        found["curves"] = [curve._asdict() for curve in found["curves"]]
    return found


def answer(advice: Record) -> str:
    """The advice in a sentence."""
    if advice["kind"] == "recipe":
        value = {fact.name: fact.text for fact in advice["facts"]}
        return (
            f"SNGM at batch {value['batch']}: learning rate {value['learning rate']}, weight decay "
            f"{value['weight decay']}, {value['steps']} steps."
        )
    borne = "; ".join(
        f"{row['method']} none" if row["batch"] is None else f"{row['method']} {row['batch']:,} at lr {row['lr']:.3g}"
        for row in advice["methods"]
    )
    return f"Largest batches for {advice['gradients']:,.0f} gradients: {borne}."


def methods_table(advice: Record) -> tuple[list[str], list[list[str]]]:
    """Head and cells of what the bounds say."""
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
    """The page. It loads nothing and runs nothing."""
    title = f"Advice for {advice.get('task') or 'your numbers'}"
    parts = [f'<header><p class="soft">{escape(title)}</p><h1>{escape(answer(advice))}</h1></header>']
    if advice["warnings"]:
        parts.append(section("Beware", "".join(f"<p>{escape(text)}</p>" for text in advice["warnings"])))
    if advice["kind"] == "recipe":
        parts.append(section("To train by", f"<pre><code>{escape(advice['command'])}</code></pre>"))
        parts.append(section("Where the numbers come from", _table(advice["facts"])))
        figure, note = _norms(advice["norms"]), "Each step of the pilot, with SGD."
    else:
        head, rows = methods_table(advice)
        parts.append(section("What each method bears", box("Methods", head, [table_row(*row) for row in rows])))
        figure, note = (
            _bounds(advice),
            "Each at its best admissible learning rate. A ring marks the largest batch borne, if there is one.",
        )
    parts.append(section(figure.title, f'<p class="soft">{escape(note)}</p>{inline(figure, "advice")}'))
    if advice["kind"] == "budget":
        parts.append(section("The constants", _table(advice["constants"])))
    parts.append(section("How to read it", "".join(f"<p>{escape(text)}</p>" for text in advice["notes"])))
    made = {key: words(advice[key]) for key in ("versions", "hardware", "commit") if advice.get(key)}
    parts.append(section("How it was made", fact_list(made)) if made else "")
    return document(title, "".join(parts), OWN_STYLE)


def _table(facts: Sequence[Fact]) -> str:
    rows = [table_row(fact.name, fact.text, fact.source, fact.why) for fact in facts]
    return box("Numbers", ["number", "value", "source", "how"], rows, kind="said")


def _norms(norms: Sequence[float]) -> Figure:
    every = -(-len(norms) // MOST)
    points = [(float(step), norm) for step, norm in enumerate(norms)][::every]
    return Figure(
        "Gradient norm of the pilot",
        f"From {norms[0]:.3g} at the first step to {norms[-1]:.3g} at the last.",
        "step",
        "gradient norm",
        {"pilot": [Series("SGD", 0, points, marks=False)]},
        log_y=min(norms) > 0,
    )


def _bounds(advice: Record) -> Figure:
    panel = []
    for slot, curve in enumerate(advice["curves"]):
        points = [(float(b), bound) for b, bound in zip(curve.batches, curve.bounds, strict=True)]
        ring = None if curve.largest is None else float(curve.batches[curve.largest])
        panel.append(Series(curve.method, slot, points, ring=ring))
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
