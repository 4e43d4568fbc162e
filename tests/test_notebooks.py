"""The notebooks run as scripts, and their output is as described."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
SHOWN = {
    "first_comparison": "Best(method=",
    "own_model_and_data": "'test_loss':",
    "sgd_to_large_batch": "SNGM at batch 8192:",
}


@pytest.mark.slow
@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert SHOWN[name] in capsys.readouterr().out


def test_every_notebook_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SHOWN)
