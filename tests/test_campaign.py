"""The fault-injection campaign, for two minutes. `make campaign MINUTES=30` runs it for longer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.nightly
def test_a_campaign_of_two_minutes_finds_nothing():
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, "-m", "campaign", "--minutes", "2", "--seed", "0"],
        cwd=TESTS.parent, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((TESTS.parent / "build" / "campaign" / "seed-0.json").read_text())
    assert found["failures"] == []
    assert all(kind["cases"] for kind in found["kinds"].values())


@pytest.mark.slow
def test_a_case_can_be_run_again_by_its_name(tmp_path):
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-m", "campaign", "--case", "arguments-1"]
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "arguments-1: as promised" in run.stdout
