"""Runs that are killed, stopped or find corrupt files end with bitwise the same results as uninterrupted ones."""

import errno
import hashlib
import json
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import sys
import time
import types
import warnings
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import runs
import torch
from console import finish, sngm, until
from runs import assert_same_end, config, ended, metrics, record, run, state, strict_json
from waiting import launch, wait_for

from sngm.errors import Interrupted, UsageError
from sngm.files import locked
from sngm.report.records import read as read_records
from sngm.training import checkpoint, loop
from sngm.training import load_model as load
from sngm.training.checkpoint import KEEP

PLATEAU = ["--method", "adam", "--lr", 0.02, "--schedule", "plateau(factor=2)"]
WARM = ["--method", "sngm", "--lr", 0.1, "--warmup", 2.5, "--set", "norm=true", "--set", "dropout=0.3"]


def command(folder: Path, *more, every: int = 1) -> list:
    usual = ["--batch", 16, "--epochs", 5, "--workers", 2, "--device", "cpu", "--checkpoint-every", every]
    return ["train", runs.TASK, *usual, "--out", folder, *more]


def steps_on_disk(folder: Path) -> int:
    """Return the step of the newest checkpoint, 0 before the first."""
    return max((int(path.stem.rpartition("-")[2]) for path in folder.glob("checkpoint-*.pt")), default=0)


def reached(folder: Path, step: int) -> bool:
    return steps_on_disk(folder) >= step


def broken_at(folder: Path, *points: int, number: int, arguments: list, chance: random.Random) -> None:
    """Start the run and send it a signal at each of these steps."""
    for step in points:
        process = runs.sngm(*arguments, pause=0.02)
        wait_for(partial(reached, folder, step), process.is_alive, pause=0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(process.pid, number)
        assert ended(process) == (130 if number == signal.SIGINT else -number)


@pytest.mark.parametrize(
    ("more", "every"),
    [pytest.param(PLATEAU, 3, id="plateau", marks=pytest.mark.slow), pytest.param(WARM, 1, id="warm-up")],
)
def test_a_killed_run_ends_bit_for_bit_as_an_unbroken_one(more, every, tmp_path):
    chance = random.Random(os.urandom(8))
    points = sorted(chance.sample(range(2, 20), 2))  # of 30, so that there is time to kill it
    arguments = command(tmp_path / "killed", *more, every=every)
    broken_at(tmp_path / "killed", *points, number=signal.SIGKILL, arguments=arguments, chance=chance)
    assert record(tmp_path / "killed")["status"] == "running"
    for words in (arguments, command(tmp_path / "whole", *more)):
        assert sngm(shlex.join(map(str, words))).code == 0
    assert len(metrics(tmp_path / "whole")) == 5
    assert_same_end(tmp_path / "killed", tmp_path / "whole")
    assert len(list((tmp_path / "killed").glob("checkpoint-*.pt"))) <= KEEP
    assert not list((tmp_path / "killed").glob(".checkpoint-*"))


@pytest.mark.parametrize("more", [pytest.param(PLATEAU, id="plateau"), pytest.param(WARM, id="warm-up")])
@pytest.mark.slow
def test_an_interrupted_run_says_so_and_goes_on(more, tmp_path):
    arguments = command(tmp_path / "broken", *more, every=1000)
    log = tmp_path / "log"
    process = runs.sngm(*arguments, log=log, pause=0.02)
    wait_for(
        lambda: (tmp_path / "broken" / "metrics.jsonl").exists() and metrics(tmp_path / "broken"), process.is_alive
    )
    os.kill(process.pid, signal.SIGINT)
    assert ended(process) == 130
    assert "the same command resumes from there" in log.read_text()
    assert record(tmp_path / "broken")["status"] == "interrupted"
    assert 6 <= steps_on_disk(tmp_path / "broken") < 30
    for words in (arguments, command(tmp_path / "whole", *more)):
        assert sngm(shlex.join(map(str, words))).code == 0
    assert_same_end(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.parametrize("method", ["msgd", "sngm", "lars", "clars", "lamb", "adam", "extrap-sgd"])
def test_every_method_goes_on_exactly(method, tmp_path):
    wanted = config(method, workers=2, settings={"norm": True, "dropout": 0.2}, schedule="cosine", warmup=1.5)
    run(tmp_path / "whole", wanted)
    for step in (1, 8, 12):
        with pytest.raises(Interrupted):
            run(tmp_path / "broken", wanted, stop_at=step)
    run(tmp_path / "broken", wanted)
    assert_same_end(tmp_path / "broken", tmp_path / "whole")


def test_a_run_stopped_at_its_last_step_is_finished_by_the_same_command(tmp_path):
    run(tmp_path / "whole", config())
    with pytest.raises(Interrupted):
        run(tmp_path / "broken", config(), stop_at=18)
    run(tmp_path / "broken", config())
    assert_same_end(tmp_path / "broken", tmp_path / "whole")


class FakeMLflow(types.ModuleType):
    """A stand-in for the parts of MLflow that a run uses."""

    exceptions = types.SimpleNamespace(MlflowException=type("MlflowException", (Exception,), {}))

    def __init__(self):
        super().__init__("mlflow")
        self.runs = {}
        self.active = None

    def set_experiment(self, name):
        self.experiment = name

    def start_run(self, run_id=None, run_name=None):
        assert self.active is None
        if run_id is None:
            run_id = f"{run_name}-{len(self.runs)}"
            self.runs[run_id] = {"params": {}, "epochs": []}
        elif run_id not in self.runs:
            raise self.exceptions.MlflowException(f"Run '{run_id}' not found")
        self.active = self.runs[run_id]
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def log_params(self, params):
        for key, value in params.items():
            assert self.active["params"].setdefault(key, value) == value  # MLflow does not allow changes

    def log_metrics(self, metrics, step):
        self.active["epochs"].append((metrics["epoch"], step))

    def end_run(self):
        self.active = None


def test_a_run_that_goes_on_does_so_in_the_same_mlflow_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", fake := FakeMLflow())
    wanted = config(epochs=3)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", wanted, stop_at=8, track="mlflow")
    assert fake.active is None
    run(tmp_path / "run", wanted, track="mlflow")
    run(tmp_path / "another", wanted, track="mlflow")
    assert [found["epochs"] for found in fake.runs.values()] == [[(1, 6), (2, 12), (3, 18)]] * 2
    assert (tmp_path / "run" / "mlflow_run").read_text() == f"{wanted.hash}-0"


def test_a_run_that_mlflow_does_not_know_any_more_is_refused_until_it_may_begin_another(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", fake := FakeMLflow())
    with pytest.raises(Interrupted):
        run(tmp_path, config(), stop_at=8, track="mlflow")
    fake.runs.clear()
    with pytest.raises(UsageError, match=r"not found.* delete .*mlflow_run"):
        run(tmp_path, config(), track="mlflow")
    (tmp_path / "mlflow_run").unlink()
    assert run(tmp_path, config(), track="mlflow")["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["sngm", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("clars", "extrap-sgd", "lamb"))]
)
def test_a_killed_command_on_digits_ends_bit_for_bit_as_an_unbroken_one(method, tmp_path):
    words = ["train", "digits", "--method", method, "--batch", "128", "--epochs", "4", "--workers", "4"]
    words += ["--device", "cpu", "--checkpoint-every", "1", "--out"]
    command = [sys.executable, "-m", "sngm", *words, str(tmp_path / "killed")]
    process = launch(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    step = random.Random(os.urandom(8)).randrange(2, 20)  # of 40, so that there is time to kill it
    until(process, partial(reached, tmp_path / "killed", step))
    process.kill()
    assert finish(process).code == -signal.SIGKILL
    for name in ("killed", "whole"):
        assert sngm(shlex.join([*words, str(tmp_path / name)])).code == 0
    assert_same_end(tmp_path / "killed", tmp_path / "whole")


# ---------------------------------------------------------------- corrupt files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(folder, config("adam"))
    return folder


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Interrupted):
        run(folder, config("adam"), stop_at=8, every=3)
    assert sorted(path.name for path in folder.glob("*.pt")) == ["checkpoint-00000006.pt", "checkpoint-00000008.pt"]
    return folder


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """Return a run stopped at step 8, with the checkpoints of steps 6 and 8."""
    return Path(shutil.copytree(stopped_once, tmp_path, dirs_exist_ok=True))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(os.urandom(8)).randrange(len(content))] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def edit(new: str, path: Path) -> None:
    """Change the accuracy in the record."""
    text = re.sub(r'("test_accuracy": )[0-9.]+', rf"\g<1>{new}", path.read_text())
    assert text != path.read_text()
    path.write_text(text)


DAMAGE = [truncate, flip_a_bit, empty, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_checkpoint_is_noticed_and_the_one_before_it_used(damage, stopped, whole):
    damage(stopped / "checkpoint-00000008.pt")
    with pytest.warns(UserWarning, match="checkpoint-00000008.pt cannot be used") as told:
        assert state(stopped)["run"]["step"] == 6
    assert len(told) == 1
    with pytest.warns(UserWarning, match="taking an older one"):
        run(stopped, config("adam"))
    assert_same_end(stopped, whole)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_finished_run_whose_last_checkpoint_is_broken_is_trained_to_its_end_again(damage, stopped, whole):
    run(stopped, config("adam"))
    last = max(stopped.glob("*.pt"))
    before = last.read_bytes()
    damage(last)
    with pytest.raises(UsageError, match="the command that made it trains it to its end again"):
        load(stopped)
    with pytest.warns(UserWarning, match="taking an older one"):
        run(stopped, config("adam"))
    assert len(last.read_bytes()) == len(before)
    assert_same_end(stopped, whole)
    load(stopped)


def test_without_a_whole_checkpoint_a_run_starts_over(stopped, whole):
    for path in stopped.glob("*.pt"):
        flip_a_bit(path)
    with pytest.warns(UserWarning, match="cannot be used") as told:
        run(stopped, config("adam"))
    assert len(told) == 2
    assert_same_end(stopped, whole)


def test_checkpoints_of_a_run_that_started_over_are_kept(stopped, whole):
    for path in stopped.glob("*.pt"):
        truncate(path)
    with pytest.warns(UserWarning, match="cannot be used"), pytest.raises(Interrupted):
        run(stopped, config("adam"), stop_at=4, every=3)
    assert state(stopped)["run"]["step"] == 4
    assert sorted(json.loads((stopped / "checkpoints.json").read_text())) == [
        "checkpoint-00000003.pt",
        "checkpoint-00000004.pt",
    ]
    run(stopped, config("adam"))
    assert_same_end(stopped, whole)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def overwrite(path):
    path.write_text("no checkpoint")


@pytest.mark.parametrize(("text", "damage"), [("", zero), ("{", truncate), ("[1]", empty), ("\xff\xfe", overwrite)])
def test_a_broken_index_is_made_again_from_the_checkpoints_that_are_whole(text, damage, stopped, whole):
    (stopped / "checkpoints.json").write_text(text, encoding="latin-1")
    damage(stopped / "checkpoint-00000008.pt")
    with pytest.warns(UserWarning, match=r"checkpoints\.json is broken|00000008\.pt cannot be used") as told:
        run(stopped, config("adam"))
    assert len({str(warning.message) for warning in told}) == 2
    assert_same_end(stopped, whole)
    (stopped / "checkpoints.json").write_text(text, encoding="latin-1")
    with pytest.warns(UserWarning, match="the checkpoints that can be read are taken"):
        load(stopped)


@pytest.mark.parametrize("text", [None, "{}", '{"checkpoint-00000001.pt": "0"}'])
def test_a_missing_index_costs_no_progress(text, stopped, whole):
    index = stopped / "checkpoints.json"
    if text is None:
        index.unlink()
    else:
        index.write_text(text)
    assert state(stopped)["run"]["step"] == 8
    flip_a_bit_of_a_tensor(stopped / "checkpoint-00000008.pt")
    with pytest.warns(UserWarning, match="checkpoint-00000008.pt cannot be used"):
        run(stopped, config("adam"))
    assert_same_end(stopped, whole)
    assert strict_json(index.read_text()).keys() == {path.name for path in stopped.glob("*.pt")}


def flip_a_bit_of_a_tensor(path: Path) -> None:
    """Flip a bit that torch.load does not check."""
    with zipfile.ZipFile(path) as parts:
        name = max((p for p in parts.infolist() if "/data/" in p.filename), key=lambda p: p.file_size).filename
        data = parts.read(name)
    content = bytearray(path.read_bytes())
    content[content.index(data)] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)


# ---------------------------------------------------------------- checkpoints and records of other runs


def other(**changes):
    return replace(config("adam"), **changes)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.fixture
def finished(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_checkpoints_of_another_config_are_refused_without_a_record(stopped, whole):
    (stopped / "run.json").unlink()
    before = files_of(stopped)
    with pytest.raises(
        UsageError, match=r"holds another run; name another folder with `out`.*\s+lr: 0\.1 there, 0\.7 here"
    ):
        run(stopped, other(lr=0.7))
    assert files_of(stopped) == before
    run(stopped, config("adam"))
    assert_same_end(stopped, whole)


def test_checkpoints_that_do_not_say_whose_they_are_need_a_record(stopped):
    old = {key: value for key, value in state(stopped).items() if key not in ("config", "data")}
    checkpoint.save(stopped, 8, old)
    kept = (stopped / "run.json").read_bytes()
    (stopped / "run.json").unlink()
    with pytest.raises(UsageError, match=r"holds checkpoints of an older version and no readable run\.json"):
        run(stopped, config("adam"))
    (stopped / "run.json").write_bytes(kept)
    assert run(stopped, config("adam"))["status"] == "finished"


def test_checkpoints_on_other_data_are_refused_without_a_record(stopped):
    kept = torch.load(stopped / "checkpoint-00000008.pt", weights_only=True)
    kept["data"] = {**kept["data"], "training": "others"}
    checkpoint.save(stopped, 8, kept)
    (stopped / "run.json").unlink()
    with pytest.raises(UsageError, match="holds a run on other data"):
        run(stopped, config("adam"))


def test_a_folder_that_another_run_took_meanwhile_is_refused(tmp_path, monkeypatch, whole):
    """Between the first check and the lock, a process with another config trains in the folder."""
    prepare = loop.prepare

    def overtaken(*arguments, **more):
        setup = prepare(*arguments, **more)
        monkeypatch.setattr(loop, "prepare", prepare)
        run(tmp_path / "run", config("adam"))
        return setup

    monkeypatch.setattr(loop, "prepare", overtaken)
    with pytest.raises(UsageError, match=r"lr: 0\.1 there, 0\.7 here"):
        run(tmp_path / "run", other(lr=0.7))
    assert_same_end(tmp_path / "run", whole)


@pytest.mark.parametrize("damage", [truncate, empty, partial(edit, "0.0001")], ids=["cut", "empty", "edited"])
def test_a_broken_record_is_made_again_from_the_checkpoint(damage, finished, whole):
    damage(finished / "run.json")
    with pytest.raises(UsageError, match=r"run\.json"):
        load(finished)
    with pytest.warns(UserWarning, match=r"run\.json is broken, or was changed since written; it is written anew"):
        run(finished, config("adam"))
    assert_same_end(finished, whole)
    damage(finished / "run.json")
    for path in finished.glob("*.pt"):
        path.unlink()
    with pytest.raises(UsageError, match="no checkpoint is left to make it from; train again with `restart`"):
        run(finished, config("adam"))
    run(finished, config("adam"), restart=True)
    assert_same_end(finished, whole)


def test_a_finished_run_without_its_checkpoint_is_trained_again_with_restart(finished, whole):
    max(finished.glob("*.pt")).unlink()
    assert run(finished, config("adam"))["status"] == "finished"
    with pytest.raises(UsageError, match="the run is finished; train it again with `restart`"):
        load(finished)
    before = files_of(finished)
    with pytest.raises(UsageError, match="holds another run"):
        run(finished, other(lr=0.7), restart=True)
    assert files_of(finished) == before
    run(finished, config("adam"), restart=True)
    assert_same_end(finished, whole)
    load(finished)


def lose(path):
    path.unlink()


edited = partial(edit, "0.0001")


@pytest.mark.parametrize("harm", [lose, edited])
def test_metrics_of_a_finished_run_that_were_lost_or_edited_come_back(harm, finished, whole):
    harm(finished / "metrics.jsonl")
    run(finished, config("adam"))
    assert metrics(finished) == metrics(whole)


def test_metrics_that_are_lost_during_a_run_are_whole_at_its_end(tmp_path, whole):
    def lose_once(step, steps, metrics):
        if step == 8:
            (tmp_path / "run" / "metrics.jsonl").unlink()

    options = loop.Options(device="cpu", progress=lose_once)
    loop.train(config("adam"), tmp_path / "run", options)
    assert metrics(tmp_path / "run") == metrics(whole)


@pytest.mark.parametrize("damage", ['"lr": 0.1', "{}", "[" * 100_000 + "]" * 100_000])
def test_a_damaged_config_in_a_record_locks_nobody_out(damage, finished, whole):
    text = (finished / "run.json").read_text()
    (finished / "run.json").write_text(text.replace(damage, '"lr": 0.3') if "lr" in damage else damage)
    assert (finished / "run.json").read_text() != text
    with pytest.raises(UsageError, match=r"lr: 0\.1 there, 0\.3 here"):
        run(finished, other(lr=0.3))
    with pytest.warns(UserWarning, match=r"run\.json is broken, or was changed since written; it is written anew"):
        run(finished, config("adam"))
    assert_same_end(finished, whole)


def test_a_newer_checkpoint_that_the_index_lacks_is_used(stopped, whole):
    """The run was killed between writing a checkpoint and recording its checksum."""
    index = stopped / "checkpoints.json"
    index.write_text(json.dumps({k: v for k, v in json.loads(index.read_text()).items() if "8" not in k}))
    assert state(stopped)["run"]["step"] == 8


def test_a_file_that_is_no_checkpoint_of_ours_is_not_used(stopped):
    (stopped / "checkpoints.json").unlink()
    torch.save({"a": 1}, stopped / "checkpoint-00000009.pt")
    torch.save({"run": 3, "model": {}, "optimizer": {}}, stopped / "checkpoint-00000010.pt")
    with pytest.warns(UserWarning, match="cannot be used"):
        assert state(stopped)["run"]["step"] == 8


def test_restart_discards_what_trackers_kept(tmp_path):
    run(tmp_path / "run", config("adam"), track="tensorboard")
    before = set((tmp_path / "run" / "tensorboard").iterdir())
    run(tmp_path / "run", config("adam"), track="tensorboard", restart=True)
    assert not before & set((tmp_path / "run" / "tensorboard").iterdir())


@pytest.mark.slow
def test_ctrl_c_keeps_the_progress_where_nobody_reads_the_messages(tmp_path):
    """As with `2>&1 | tee log`: Ctrl-C ends tee too."""
    words = ["train", "digits", "--epochs", 2000, "--set", "width=2", "--checkpoint-every", 10**6]
    process = launch([sys.executable, "-m", "sngm", *words, "--out", tmp_path / "run"])
    written = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: written.exists() and written.read_text(), lambda: process.poll() is None)
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert record(tmp_path / "run")["status"] == "interrupted"
    assert state(tmp_path / "run")["run"]["step"] > 0


def test_edited_metrics_that_no_checkpoint_can_mend_are_named_and_not_drawn(finished):
    edited(finished / "metrics.jsonl")
    for path in finished.glob("checkpoint*"):
        path.unlink()
    with pytest.warns(UserWarning, match="metrics.jsonl was lost, or changed after it was written"):
        run(finished, config("adam"))
    found = read_records(finished)
    assert found.runs[0].curve == []
    assert found.unreadable == [f"{finished.name}/metrics.jsonl"]


def test_a_finished_run_is_shown_without_writing(finished, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("sngm.files.write_atomically", refuse)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert run(finished, config("adam"))["status"] == "finished"


def test_temporary_files_of_killed_processes_are_removed(stopped):
    for name in (".run.json.123.tmp", ".checkpoints.json.4.tmp", ".checkpoint-00000009.pt.5.tmp"):
        (stopped / name).write_text("half")
    run(stopped, config("adam"))
    assert [path.name for path in stopped.glob(".*")] == [".lock"]


def test_records_without_a_digest_are_read(finished):
    old = strict_json((finished / "run.json").read_text())
    del old["digest"]
    (finished / "run.json").write_text(json.dumps(old))
    before = files_of(finished)
    assert run(finished, config("adam")) == old
    assert files_of(finished) == before


def test_a_checkpoint_cannot_run_code(stopped):
    content = pickle.dumps(Loaded(), protocol=2)
    (stopped / "checkpoint-00000008.pt").write_bytes(content)
    index = json.loads((stopped / "checkpoints.json").read_text())
    index["checkpoint-00000008.pt"] = hashlib.sha256(content).hexdigest()
    (stopped / "checkpoints.json").write_text(json.dumps(index))
    with pytest.raises(pickle.UnpicklingError):
        run(stopped, config("adam"))
    assert not Loaded.ran


class Loaded:
    ran = False

    def __reduce__(self):
        return setattr, (Loaded, "ran", True)


@pytest.mark.parametrize("extra", ['{"epoch": 2, "step": 12}\n', '{"epoch": 2, "ste', "\n\n", "\0\0\0"])
def test_metrics_are_cut_back_to_the_checkpoint(extra, stopped, whole):
    with open(stopped / "metrics.jsonl", "a") as file:
        file.write(extra)
    run(stopped, config("adam"))
    assert_same_end(stopped, whole)


def test_metrics_that_were_lost_come_back_from_the_checkpoint(stopped, whole):
    (stopped / "metrics.jsonl").unlink()
    run(stopped, config("adam"))
    assert_same_end(stopped, whole)


def test_reading_whole_checkpoints_says_nothing(stopped):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert state(stopped)["run"]["step"] == 8


# ---------------------------------------------------------------- one process per folder


@pytest.mark.slow
def test_a_second_process_in_a_folder_is_refused(tmp_path):
    arguments = command(tmp_path / "run", *WARM)
    first = runs.sngm(*arguments, pause=1.0)  # longer than the second takes to start, even on a busy machine
    wait_for(lambda: steps_on_disk(tmp_path / "run"), first.is_alive)
    log = tmp_path / "log"
    assert ended(runs.sngm(*arguments, log=log)) == 2
    assert "another process is training in" in log.read_text()
    assert first.is_alive()
    first.kill()
    first.join()
    assert ended(runs.sngm(*arguments)) == 0
    assert strict_json((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_a_folder_is_free_again_after_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="no"), locked(tmp_path):
        raise RuntimeError("no")
    with locked(tmp_path), pytest.raises(UsageError, match="another process"), locked(tmp_path):
        pass
