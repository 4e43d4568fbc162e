"""Where datasets are looked for, and where new ones go."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from ..errors import DataMissing


def data_roots(chosen: Path | None = None) -> list[Path]:
    """The folders that may hold datasets: the one chosen, or that of SNGM_DATA, or .data here and ~/.cache/sngm."""
    if chosen is None and os.environ.get("SNGM_DATA"):
        chosen = Path(os.environ["SNGM_DATA"])
    return [chosen.expanduser()] if chosen is not None else [Path(".data"), Path.home() / ".cache" / "sngm"]


def data_root(chosen: Path | None = None) -> Path:
    """The folder that a new dataset goes to: the first of those looked in that exists, or the last."""
    roots = data_roots(chosen)
    return next((root for root in roots if root.is_dir()), roots[-1])


def missing(title: str, chosen: Path | None, wanted: Iterable[str], command: str | None = None) -> DataMissing:
    """The error that says where a dataset was looked for, as what, and what to do.

    Args:
        title: the dataset's name for people.
        chosen: the folder that the user chose, if any.
        wanted: what was looked for in it, any of which would have done.
        command: what fetches it; where nothing can, the user has to put it there.
    """
    for place in data_roots(chosen):
        if place.exists() and not place.is_dir():
            return DataMissing(f"{place} is a file; name the folder that holds {title} with --data-dir")
    places, names = " and ".join(map(str, data_roots(chosen))), " or ".join(wanted)
    fetch = f"run '{command} --data-dir {shlex.quote(str(data_root(chosen)))}', or " if command else ""
    other = "" if chosen else ", or name the folder that holds it with --data-dir or SNGM_DATA"
    return DataMissing(f"no {title} in {places}; {fetch}put {names} there{other}")
