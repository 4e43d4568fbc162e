"""A number with where it comes from, which no advice leaves out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

GIVEN, MEASURED, THEORY, RULE = "given", "measured", "theory", "rule of thumb"


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of the table.

    Attributes:
        name: what it is.
        value: a number.
        source: "given" by you, or counted from what is; "measured" in the pilot; "theory"; or a "rule of thumb".
        why: how it was found, in a few words.
    """

    name: str
    value: float
    source: str
    why: str

    @property
    def text(self) -> str:
        """The number for people."""
        whole = isinstance(self.value, int) or (self.value == int(self.value) and 1000 <= self.value < 1e15)
        return f"{int(self.value):,}" if whole else f"{self.value:.4g}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
