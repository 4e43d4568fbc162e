"""Advice as text for a terminal."""

from __future__ import annotations

import io
from typing import Any

from .facts import table_rows
from .page import methods_table


def in_words(advice: dict[str, Any]) -> str:
    """Return advice as text: numbers with sources, warnings and notes; for a recipe also the answer and the changes."""
    from rich.console import Console

    recipe = advice["kind"] == "recipe"
    facts = advice["facts"] if recipe else advice["constants"]
    stream = io.StringIO()
    console = Console(file=stream, width=Console().width)
    head = ["number", "value", "source", "how"]
    console.print(_table(head, table_rows(facts)))
    if not recipe:
        console.print(_table(*methods_table(advice)))
    parts = [stream.getvalue().rstrip("\n"), *(f"Beware: {warning}" for warning in advice["warnings"])]
    return "\n\n".join([*parts, *advice["notes"], *(_answer(advice) if recipe else [])])


def _answer(advice: dict[str, Any]) -> list[str]:
    check = [f"Check it with three seeds of each:\n{advice['check']}"] if advice.get("check") else []
    train = [f"Train with it:\n{advice['command']}"] if advice.get("command") else []
    return [advice["answer"], "\n".join(advice["diff"]), f"Evidence: {advice['evidence']}", *train, *check]


def _table(head: list[str], rows: list[list[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(*head)
    for row in rows:
        table.add_row(*map(Text, row))  # as Text, so that brackets are not parsed as markup
    return table
