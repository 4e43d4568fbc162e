"""The table of a study, as cells of text and as Markdown."""

from __future__ import annotations

import html

from .summary import Cell, Summary


def rows(summary: Summary) -> list[list[str]]:
    """Return a header and one row for each method, for a table in a terminal."""
    header = ["method", *(f"batch {batch}" for batch in summary.batches)]
    return [header] + [
        [method, *(cell_text(summary, summary.cells[method, batch]) for batch in summary.batches)]
        for method in summary.methods
    ]


def cell_text(summary: Summary, cell: Cell) -> str:
    """Return a cell as text, such as "97.1 ± 0.4 (n=3, lr 0.3)"."""
    if cell.mean is None:
        return "diverged" if cell.only_diverged else "-"
    return f"{summary.text(cell.mean, cell.half_width)} ({', '.join(details(cell))})"


def details(cell: Cell) -> list[str]:
    """Return the number of seeds behind a mean, the chosen settings, and how many runs diverged."""
    lr = f"lr {cell.lr:g}" + "*" * cell.at_edge + "†" * cell.chosen_on_test
    others = [
        f"{k.replace('_', ' ')} {v:g}" for k, v in (cell.search.chosen if cell.search else {}).items() if k != "lr"
    ]
    return [f"n={cell.n}", lr, *others] + ([f"{cell.diverged} diverged"] if cell.diverged else [])


def caption(summary: Summary) -> str:
    """Return what the numbers are."""
    unit = " in %" if summary.percent else ""
    sense = "higher" if summary.higher_is_better else "lower"
    when = "at the epoch with the best validation score" if summary.of_best_epoch else "after the last epoch"
    return (
        f"Test {summary.metric}{unit} on {summary.task} {when} ({sense} is better): "
        "mean ± 95 % interval by Student's t over n seeds, at the chosen learning rate."
    )


def footnotes(summary: Summary) -> list[str]:
    """Return the meaning of each mark in the table, and what was left out."""
    shown = [cell for cell in summary.cells.values() if cell.values]
    notes = []
    if any(cell.at_edge for cell in shown):
        notes.append("* the learning rate is at the edge of its grid: one beyond it might be better.")
    if any(cell.chosen_on_test for cell in shown):
        notes.append(
            "† no learning rate was chosen on validation data: this is the best on test data, which is optimistic."
        )
    return notes + summary.notes


def table(summary: Summary) -> str:
    """Return the table in Markdown, with its caption and footnotes."""
    head, *body = [[_escape(text) for text in row] for row in rows(summary)]
    lines = [head, ["---"] * len(head), *body]
    notes = [caption(summary), *footnotes(summary)]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n" + "\n\n".join(map(_escape, notes)) + "\n"
    )


def _escape(text: str) -> str:
    r"""Escape text so that Markdown shows it unchanged.

    >>> _escape("a|b <i> *")
    'a\\|b &lt;i&gt; \\*'
    """
    for mark in "\\|*_`[]":
        text = text.replace(mark, "\\" + mark)
    return html.escape(text, quote=False)
