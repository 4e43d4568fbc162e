"""Fault injection: seeded cases that kill runs, break files, fill disks and pass hostile arguments.

``make campaign MINUTES=10`` runs it. Each kind of case is a module with a function ``case(random, folder)`` that raises
`Wrong` where a promise of docs/reliability.md does not hold, and returns what it has counted.
"""


class Wrong(AssertionError):
    """A promise that did not hold."""
