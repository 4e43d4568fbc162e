"""Folders that are searched for datasets, and the folder in which new datasets are stored."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ..errors import DataMissing, DataWarning


def data_roots(chosen: Path | None = None) -> list[Path]:
    """Return the folders that may hold datasets: `chosen`, else SNGM_DATA, else ./.data and ~/.cache/sngm."""
    if chosen is None and os.environ.get("SNGM_DATA"):
        chosen = Path(os.environ["SNGM_DATA"])
    return [chosen.expanduser()] if chosen is not None else [Path(".data"), Path.home() / ".cache" / "sngm"]


def data_root(chosen: Path | None = None) -> Path:
    """Return the folder for a new dataset: the first of `data_roots` that exists, or the last if none exists."""
    roots = data_roots(chosen)
    return next((root for root in roots if root.is_dir()), roots[-1])


def find_folder(
    title: str,
    chosen: Path | None,
    forms: Sequence[tuple[str, Sequence[str]]],
    wanted: Iterable[str],
    command: str | None = None,
    present: Callable[[Path], bool] = Path.is_file,
) -> tuple[Path, int]:
    """Return the first folder that holds one published form of a dataset, and the index of that form.

    For each form, the form's own folder in a data folder is searched first, then the data folder itself. No file is
    read.

    Args:
        title: name of the dataset in messages.
        chosen: data folder that the user named; None for the default folders.
        forms: for each form, the name of its folder and the names of the files that must be in this folder.
        wanted: alternatives of what to put into a data folder, for the error message.
        command: command line that downloads the dataset; None if the user must provide it.
        present: function that returns whether a path exists, such as Path.is_dir for a folder.

    Raises:
        DataMissing: no form is complete.
    """
    incomplete: list[str] = []
    parent = Path()  # parent of the first incomplete folder
    for root in data_roots(chosen):
        for index, (name, files) in enumerate(forms):
            for folder in (root / name, root):
                absent = [file for file in files if not present(folder / file)]
                if not absent:
                    return folder, index
                if folder.name == name and len(absent) < len(files):
                    parent = parent if incomplete else folder.parent
                    incomplete.append(f"{folder} lacks {', '.join(absent)}")
    if incomplete:
        again = f"delete the folder and run '{command} --data-dir {shlex.quote(str(parent))}'"
        fix = again if command else "put the missing ones there"
        raise DataMissing(f"{'; '.join(incomplete)}; {fix}")
    raise missing(title, chosen, wanted, command)


def missing(title: str, chosen: Path | None, wanted: Iterable[str], command: str | None = None) -> DataMissing:
    """Return the error for a dataset that was not found; see `find_folder` for the arguments."""
    roots = data_roots(chosen)
    for root in roots:
        if root.exists() and not root.is_dir():
            return DataMissing(f"{root} is a file; name the folder that holds {title} with `data_dir`")
    fetch = f"run '{command} --data-dir {shlex.quote(str(data_root(chosen)))}', or " if command else ""
    other = "" if chosen else ", or name the folder that holds it with `data_dir` or SNGM_DATA"
    return DataMissing(f"no {title} in {' and '.join(map(str, roots))}; {fetch}put {' or '.join(wanted)} there{other}")


def warn_if_odd(folder: Path, what: str, counts: Mapping[str, tuple[int, int]], stacklevel: int = 3) -> None:
    """Warn if numbers of a dataset differ from the published ones; `counts` has pairs (number, published number)."""
    odd = [f"{name} {count:,}, not {official:,}" for name, (count, official) in counts.items() if count != official]
    if odd:
        text = f"{folder} does not hold the official {what}: {'; '.join(odd)}"
        warnings.warn(text, DataWarning, stacklevel=stacklevel)
