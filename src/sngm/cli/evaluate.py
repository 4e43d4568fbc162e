"""The command `sngm eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .options import DATA, DEVICE, JSON

EXAMPLES = ("sngm eval runs/digits-sngm-1a2b3c4d5e6f",)


def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    data_dir: DATA = None,
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Evaluate the trained model of a run again, and print the scores beside the recorded ones."""
    from ..files import finite
    from ..training import RunFolder, score
    from ..training.distributed import choose_device

    scores = score(folder, choose_device(device), data_dir)
    recorded = RunFolder(folder).read()["result"]
    if as_json:
        print(json.dumps({"folder": str(folder), "scores": finite(scores), "recorded": recorded}, indent=2))
        return
    for key, value in scores.items():
        then = recorded.get(key)
        print(f"{key.replace('_', ' ')}: {value:.6g}" + (f" (recorded: {then:.6g})" if then is not None else ""))
