"""Advice as text for a terminal."""

from __future__ import annotations

import io
from typing import Any

from .page import methods_table


def in_words(advice: dict[str, Any]) -> str:
    """Return the numbers with their sources, warnings, notes and the command to train with."""
    from rich.console import Console

    recipe = advice["kind"] == "recipe"
    facts = advice["facts"] if recipe else advice["constants"]
    stream = io.StringIO()
    console = Console(file=stream, width=Console().width)
    head = ["number", "value", "source", "how"]
    console.print(_table(head, [[fact.name, fact.text, fact.source, fact.why] for fact in facts]))
    if not recipe:
        console.print(_table(*methods_table(advice)))
    parts = [stream.getvalue().rstrip("\n"), *(f"Beware: {warning}" for warning in advice["warnings"])]
    return "\n\n".join([*parts, *advice["notes"], *([advice["command"]] if recipe else [])])


def _table(head: list[str], rows: list[list[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(*head)
    for row in rows:
        table.add_row(*map(Text, row))  # as Text, so that brackets are not parsed as markup
    return table
