"""The numbers behind advice, with their sources."""

from __future__ import annotations

from typing import TypedDict

GIVEN, MEASURED, THEORY, RULE = "given", "measured", "theory", "rule of thumb"


class Fact(TypedDict):
    """A number behind advice, with its source: a row of the table that the advice shows.

    A dict and not a class, so that advice can be written as JSON.
    """

    name: str
    value: float
    source: str
    """"given" (by the user, or counted from given numbers), "measured" (in the pilot, a short run), "theory" or "rule
    of thumb"."""
    why: str
    """How the number was obtained, in a few words."""


def fact(name: str, value: float, source: str, why: str) -> Fact:
    """Return a fact.

    >>> fact("batch", 512, GIVEN, "32 before")["value"]
    512
    """
    return {"name": name, "value": value, "source": source, "why": why}


def table_rows(facts: list[Fact]) -> list[list[str]]:
    """Return the rows of a table of facts, with their values formatted.

    >>> table_rows([fact("noise scale", 325.61, MEASURED, "along the pilot")])
    [['noise scale', '325.6', 'measured', 'along the pilot']]
    """
    return [[one["name"], _shown(one["value"]), one["source"], one["why"]] for one in facts]


def _shown(value: float) -> str:
    whole = isinstance(value, int) or (1000 <= value < 1e15 and value == int(value))
    return f"{int(value):,}" if whole else f"{value:.4g}"
