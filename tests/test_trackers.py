"""Trackers get the metrics of every run of a study, in one group."""

import json
import os
import sys
from pathlib import Path

import pytest
from console import finish
from waiting import launch

from sngm.errors import UsageError
from sngm.training import trackers

STUDY = "compare --methods msgd,sngm --batches 128 --lrs 0.1 --epochs 2 --seeds 1 --set width=2 --jobs 2 --out study"


def compare(tracker: str, **environment: str) -> list[Path]:
    """Run a study with a tracker in a process of its own; return the folders of its runs."""
    words = [sys.executable, "-m", "sngm", *STUDY.split(), "--track", tracker]
    shown = finish(launch(words, env={**os.environ, **environment}))
    assert shown.code == 0, shown.err
    folders = sorted(Path("study/runs").iterdir())
    assert len(folders) == 2
    return folders


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_runs_of_two_studies_have_ids_of_their_own(monkeypatch, tmp_path):
    class Wandb:
        def init(self, **given):
            given["own"] = self
            calls.append(given)

    calls: list[dict] = []
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    for group in (None, "first", "second"):
        trackers.open_tracker("wandb", tmp_path, "abc", {}, group)
    assert [(call["id"], call["group"], call["name"]) for call in calls] == [
        ("abc", None, "abc"), ("first-abc", "first", "abc"), ("second-abc", "second", "abc"),
    ]  # fmt: skip


def test_only_mlflow_prepares_a_group(monkeypatch):
    class MLflow:
        set_experiment = staticmethod(lambda name: prepared.append(name))

    prepared: list[str] = []
    monkeypatch.setitem(sys.modules, "mlflow", MLflow())
    monkeypatch.setitem(sys.modules, "wandb", object())  # has no experiments
    for tracker in ("mlflow", "wandb", None):
        trackers.prepare_group(tracker, "study")
    assert prepared == ["sngm study"]


def test_only_the_first_process_needs_the_tracker(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("RANK", "1")
    trackers.check_tracker("wandb")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="wandb is not installed"):
        trackers.check_tracker("wandb")


@pytest.mark.nightly
def test_tensorboard_gets_the_metrics_of_every_run():
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for folder in compare("tensorboard"):
        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        found = [(event.step, event.value) for event in events.Scalars("test_accuracy")]
        assert found == [(line["step"], pytest.approx(line["test_accuracy"])) for line in metrics(folder)]


@pytest.mark.nightly
def test_wandb_offline_gets_every_run_in_one_group():
    pytest.importorskip("wandb")
    for folder in compare("wandb", WANDB_MODE="offline", WANDB_SILENT="true"):
        (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        content = file.read_bytes()
        assert file.name.startswith("run-study-")
        assert all(word in content for word in (b"study", b"test_accuracy"))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of MLflow's imports
@pytest.mark.parametrize("store", ["sqlite:///mlflow.db", "file:mlruns"])
def test_mlflow_gets_every_run_in_one_experiment(store, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folders = compare("mlflow", MLFLOW_TRACKING_URI=store)
    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("sngm study")
    found = {run.info.run_id: run for run in client.search_runs([experiment.experiment_id])}
    assert len(found) == 2
    for folder in folders:
        run = found[(folder / "mlflow_run").read_text()]
        assert run.data.metrics["test_accuracy"] == pytest.approx(metrics(folder)[-1]["test_accuracy"])
        history = client.get_metric_history(run.info.run_id, "test_accuracy")
        assert [point.step for point in history] == [line["step"] for line in metrics(folder)]
