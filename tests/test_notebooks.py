"""The notebooks run as scripts, and their output is as described."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
SHOWN = {
    "first_comparison": "Best(method=",
    "own_model_and_data": "'test_loss':",
    "sgd_to_large_batch": "SNGM at batch 8192:",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_comparison", "own_model_and_data", "sgd_to_large_batch"])
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout


def test_every_notebook_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SHOWN)
