"""Fault injection: seeded cases that kill runs, break files, fill disks and pass hostile arguments.

``make campaign MINUTES=10`` runs it. Each kind of case is a module with a function ``case(draw, folder, counted)``
that raises `Wrong` where a promise of docs/reliability.md does not hold, and counts what it does.
"""


class Wrong(AssertionError):
    """A promise that did not hold."""
