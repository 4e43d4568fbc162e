"""Times as people say them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds in the unit one would use.

    >>> duration(0.43), duration(7), duration(200), duration(9000)
    ('0.43 s', '7 s', '3 min', '2.5 h')
    """
    if seconds < 9.5:
        return f"{seconds:.2g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
