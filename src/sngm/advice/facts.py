"""The numbers behind advice, with their sources."""

from __future__ import annotations

from dataclasses import dataclass

GIVEN, MEASURED, THEORY, RULE = "given", "measured", "theory", "rule of thumb"


@dataclass(frozen=True, slots=True)
class Fact:
    """A number behind advice, with its source: a row of the table that the advice shows.

    Attributes:
        name: name of the number.
        value: the number.
        source: "given" (by the user, or counted from given numbers), "measured" (in the pilot, a short run), "theory"
            or "rule of thumb".
        why: how the number was obtained, in a few words.
    """

    name: str
    value: float
    source: str
    why: str

    @property
    def text(self) -> str:
        """The number, formatted for display."""
        whole = isinstance(self.value, int) or (1000 <= self.value < 1e15 and self.value == int(self.value))
        return f"{int(self.value):,}" if whole else f"{self.value:.4g}"
