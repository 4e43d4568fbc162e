"""Hostile arguments, environments and records: each ends with a one-line error and an exit code, never a traceback."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from console import OWN_TASK, refused, sngm

from sngm import environment, memory, tasks
from sngm.errors import UsageError
from sngm.files import read_json
from sngm.optim import registry
from sngm.parsing import value_of
from sngm.study.grid import StudyConfig
from sngm.training import checkpoint, resolve

pytestmark = pytest.mark.usefixtures("in_one_process")

QUICK = "--batch 128 --epochs 1 --set width=2 --device cpu"
STUDY = "compare --methods msgd --lrs 0.1 --batches 512 --seeds 1 --epochs 1 --set width=2 --device cpu"
TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def in_a_shell(words, **environment):
    """Run ``sngm ...`` in a shell, with redirections."""
    line = f'exec "{sys.executable}" -m sngm {words}'
    usual = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}  # as users have it
    environment = {**usual, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["sh", "-c", line], capture_output=True, env=environment, timeout=120)


# ---------------------------------------------------------------- streams


@pytest.fixture
def study(tmp_path):
    """Return a folder with two finished runs, enough to show a spread."""
    assert sngm(STUDY.replace("--seeds 1", "--seeds 2") + " --out study").code == 0
    return tmp_path / "study"


@pytest.mark.slow
def test_a_report_is_written_and_shown_where_stdout_is_ascii(study):
    (study / "report.html").unlink()
    done = in_a_shell("report study", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"+-" in done.stdout
    assert done.stdout.isascii()
    assert (study / "report.html").exists()
    assert sngm("report study").out.replace("±", "+-") == done.stdout.decode()


@pytest.mark.slow
def test_a_name_that_is_not_utf_8_is_printed():
    done = in_a_shell(f"train digits {QUICK} --out \"$(printf 'r\\377n')\"", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0
    assert b"r\\udcffn" in done.stdout


RUN = f"train digits {QUICK} --out run"


@pytest.mark.parametrize(
    ("words", "code", "closed"),
    [("--version", 0, ">&-"), ("trian digits", 2, "2>&-"), ("trian digits", 2, ">&- 2>&-"), (RUN, 0, "<&- >&- 2>&-")],
)
@pytest.mark.slow
def test_closed_descriptors_end_quietly_with_the_usual_code(words, code, closed):
    done = in_a_shell(f"{words} {closed}")
    assert done.returncode == code
    assert b"Traceback" not in done.stdout + done.stderr
    if "2>&-" in closed:
        assert b"sngm:" not in done.stdout  # messages do not go to stdout
    if words == RUN:
        assert json.loads(Path("run/run.json").read_text())["status"] == "finished"


def test_a_full_stderr_changes_no_exit_code():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    assert in_a_shell("trian digits 2>/dev/full").returncode == 2


# ---------------------------------------------------------------- literals


@pytest.mark.parametrize(
    "text", ["{[]:1}", "{{}}", "{[1]}", "{{1:2}:3}", "{1}", "b'1'", "1j", "...", "{1:2}", "(1,{2})", "-" * 9999 + "1"]
)
def test_a_literal_that_records_cannot_hold_is_text(text):
    assert value_of(text) == text


def test_literals_give_no_warnings(recwarn):
    assert value_of(r"'\d'") == r"\d"
    assert value_of("1or 2") == "1or 2"
    assert not recwarn


def test_unhashable_literals_are_refused_wherever_settings_are_read():
    text = "{[]:1}"
    refused(sngm(f"train digits --set 'momentum={text}'"), "momentum must be a number", text)
    refused(sngm(f"train digits --set 'width={text}'"), "width must be of type int", text)
    refused(sngm(f"train digits --method 'sngm(momentum={text})'"), "momentum must be a number", text)
    refused(sngm(f"train digits --schedule 'polynomial(power={text})'"), "power must be a number", text)
    refused(sngm(f"advise digits --from-sgd 'lr={text},batch=32' --to-batch 64"), "lr must be a finite number", text)


# ---------------------------------------------------------------- the environment of processes


@pytest.mark.parametrize("value", ["", "abc", "0", "-1", "1.5", "1_0", "9" * 5000, "٣"])
def test_a_world_size_that_is_no_number_is_refused(value, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(UsageError, match=r"WORLD_SIZE must be a whole number from 1 to .* torchrun"):
        environment.ranks()


@pytest.mark.parametrize("line", [f"train digits {QUICK} --out run", f"{STUDY} --out run", "probe digits --out run"])
def test_a_verb_that_needs_the_world_size_refuses_a_wrong_one_before_it_writes(line, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    refused(sngm(line), "WORLD_SIZE must be a whole number from 1 to", "torchrun")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "RANK must be a whole number from 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK must be a whole number from 0 to 1"),
        ({"RANK": "1"}, "RANK must be a whole number from 0 to 0"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"}, "from 0 to 65535"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be a whole number"),
    ],
)
def test_an_environment_of_torchrun_that_does_not_fit_is_refused(given, said, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    refused(sngm(f"train digits {QUICK} --out run"), said, "torchrun")
    assert not Path("run").exists()


def test_the_place_of_a_process_is_read_from_its_environment(monkeypatch):
    assert environment.launch() == (0, 1, 0)
    for name, value in zip(TORCHRUN, ("4", "3", "1", "2", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert environment.launch() == (3, 4, 1)
    assert environment.local_ranks() == 2


def test_a_verb_that_needs_no_processes_does_not_mind_their_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert sngm("methods").code == 0


# ---------------------------------------------------------------- names and addresses


@pytest.mark.parametrize("name", ["..:X", ".:X", ".a:X", "a..b:X", "a-b:X", "a." * 2000 + "a:X", "1:X"])
def test_a_module_that_cannot_be_one_is_refused(name):
    with pytest.raises(UsageError, match=r"no task at .*package\.module:Class"):
        tasks.find(name)
    with pytest.raises(ValueError, match="no optimizer class at"):
        registry.find(name)


def test_a_verb_refuses_a_module_that_cannot_be_one():
    refused(sngm("train '..:X'"), "no task at", "package.module:Class")
    refused(sngm("probe '..:X'"))
    refused(sngm("train digits --method '..:X'"), "no optimizer class at")


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("verb", "width"),
    [
        ("train", 99999999999),
        ("probe", 2**31),
        ("compare", 2**63 - 1),
        ("train --dry-run", 2**70),
        ("train", 10**400),
        ("probe", 10**400),
    ],
)
def test_a_model_larger_than_the_memory_is_refused(verb, width):
    refused(
        sngm(f"{verb} digits --set width={width} --out run --device cpu"), "digits(width=", "GB of memory", "smaller"
    )
    assert not Path("run").exists()


def test_a_recorded_model_larger_than_the_memory_is_refused():
    sngm(f"train digits {QUICK} --out run")
    record = json.loads(Path("run/run.json").read_text())
    record["config"]["task_settings"]["width"] = 99999999999
    del record["digest"]
    Path("run/run.json").write_text(json.dumps(record))
    state = checkpoint.load(Path("run"))
    del state["config"]  # as in older checkpoints
    checkpoint.save(Path("run"), state["run"]["step"], state)
    refused(sngm("eval run"), "run/run.json", "GB of memory")


def test_an_own_model_that_fits_is_not_refused(monkeypatch):
    Path("own.py").write_text(OWN_TASK)
    monkeypatch.setattr(memory, "total_bytes", lambda: 24)  # three weights of 4 bytes, and their gradients
    assert sngm("train own.py:Line --epochs 1 --lr 0.1 --out run --device cpu").code == 0
    monkeypatch.setattr(memory, "total_bytes", lambda: 23)
    refused(sngm("train own.py:Line --epochs 1 --lr 0.1 --out other --device cpu"), "own.py:Line", "GB of memory")


def test_an_allocation_that_fails_is_one_line():
    Path("own.py").write_text(OWN_TASK.replace("nn.Linear(2, 1)", "torch.tensor(0.0).expand(2**60).contiguous()"))
    refused(sngm("train own.py:Line --epochs 1 --lr 0.1 --device cpu"), "not enough memory", code=1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"probe digits {QUICK} --points {2**70}", "points must be at least 2"),
        (f"probe digits {QUICK} --points 10001", "at most 10,000"),
        (f"probe digits {QUICK} --iterations {2**70}", "--iterations must be at least 1 and at most 10,000"),
        (f"train digits --batch {10**30} --micro 7", "batch must be at most 1,000,000,000,000"),
        (f"train digits --epochs {10**30}", "epochs must be at most 1,000,000,000"),
        (f"train digits --epochs {10**30} --dry-run", "epochs must be at most 1,000,000,000"),
        (f"{STUDY} --jobs 3000000000", "--jobs must be a whole number from 1 to 1,024, got 3000000000"),
        (f"{STUDY} --jobs 3000000000 --dry-run", "--jobs must be a whole number from 1 to 1,024"),
        ("paper run table-2 --jobs 3000000000 --dry-run", "--jobs must be a whole number from 1 to 1,024"),
    ],
)
def test_an_absurd_size_is_refused_with_its_limit(line, said):
    refused(sngm(line if line.startswith("paper") else f"{line} --out run"), said)
    assert not Path("run").exists()


def test_the_nearest_sizes_of_a_large_batch_are_found_at_once():
    with pytest.raises(UsageError, match="nearest: 5 or 8"):
        resolve("digits", "sngm", lr=0.1, batch=10**12, micro=7)


# ---------------------------------------------------------------- records


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5000, "[" * 2000 + "]" * 2000, "9" * 5000, b"\xff"])
def test_deep_and_broken_json_is_refused_by_name(text):
    Path("a.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=r"a\.json is"):
        read_json(Path("a.json"))
    for name, line in (("run.json", f"train digits {QUICK}"), ("study.json", STUDY)):
        Path("there").mkdir(exist_ok=True)
        Path("there", name).write_bytes(Path("a.json").read_bytes())
        refused(sngm(f"{line} --out there"), f"there/{name}")
        Path("there", name).unlink()
        Path("there/.lock").unlink(missing_ok=True)


def test_json_of_a_usual_depth_is_read():
    Path("a.json").write_text("[" * 100 + "]" * 100)
    assert read_json(Path("a.json")) is not None


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert sngm(f"train digits {QUICK} --out {folder}").code == 0
    return folder


def without_digest(folder):
    """Return the record of a run as an older version wrote it."""
    record = json.loads((folder / "run.json").read_text())
    del record["digest"]
    return record


WRONG = (3, "text", [], [3], {"a": []}, None, True, -1.5)
FIELDS = ("status", "label", "result", "timing", "data", "made_before", "started", "config")


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), [(key, WRONG[i + k - 8]) for i, key in enumerate(FIELDS) for k in (0, 3)])
def test_a_field_of_the_wrong_type_in_a_record_is_no_traceback(key, value, finished):
    record = without_digest(finished)
    record[key] = value
    shutil.copytree(finished, "run")
    Path("run/run.json").write_text(json.dumps(record))
    for path in Path("run").glob("checkpoint*"):  # the record would be restored from them
        path.unlink()
    wrong = key not in ("made_before", "started", "data", "label") or value is None
    for line in (f"train digits {QUICK} --out run", "eval run", "probe run"):
        done = sngm(line)
        assert done.code in (0, 2), (line, done)
        if wrong and not (key in ("result", "config") and isinstance(value, dict)):
            assert done.code == 2, (line, done)
    assert sngm("report run").code in (0, 2)


@pytest.mark.slow
def test_a_field_of_the_wrong_type_in_a_config_is_named(finished):
    record = without_digest(finished)
    kept = dict(record["config"])
    shutil.copytree(finished, "run")
    chosen = {key: WRONG[i % len(WRONG)] for i, key in enumerate(kept)}
    for key, value in ((key, value) for key, value in chosen.items() if kept[key] != value):
        record["config"] = {**kept, key: value}
        Path("run/run.json").write_text(json.dumps(record))
        for line in ("eval run", "probe run"):
            done = sngm(line)
            assert done.code == 2, (key, line, done)
            assert "run.json" in done.err or "They differ in" in done.err  # the config differs from the checkpoint's
            assert "Error" not in done.err
        assert sngm("report run").code in (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["format", "task", "methods", "batches", "cells", "study", "metric", "epochs"])
def test_a_field_of_the_wrong_type_in_a_study_is_no_traceback(key):
    text = (
        '{"format": 1, "task": "digits", "methods": ["msgd"], "batches": [512], "seeds": 1, "epochs": 1, "cells": [], '
        '"metric": "accuracy", "study": {"task": "digits", "methods": ["msgd"]}}'
    )
    Path("study").mkdir()
    for value in WRONG:
        Path("study/study.json").write_text(json.dumps({**json.loads(text), key: value}))
        assert sngm(f"{STUDY} --out study").code == 2
        assert sngm("report study").code in (0, 2)


# ---------------------------------------------------------------- nonsense that used to be accepted


@pytest.mark.parametrize("seed", [2**64, 2**64 + 1, 10**400])
def test_seeds_that_would_wrap_are_refused(seed):
    refused(sngm(f"train digits --seed {seed} --out run"), "seed must be at most 18,446,744,073,709,551,615")
    refused(sngm(f"probe digits --seed {seed} --out run"), "seed must be at most")
    assert resolve("digits", "sngm", lr=0.1, seed=2**64 - 1).seed == 2**64 - 1


@pytest.mark.parametrize("option", ["--L -0", "--L 0", "--L -0.0", "--L 0 --lam -0"])
def test_numbers_that_give_no_learning_rate_are_refused(option):
    numbers = {"--gap": "2", "--L": "20"} | {option.split()[0]: option.split()[1]}
    given = " ".join(f"{name} {value}" for name, value in numbers.items())
    lam = option.partition(" --lam")[2]
    line = f"advise --gradients 1e4 --sigma 1 {given}" + (f" --lam{lam}" if lam else "")
    refused(sngm(f"{line} --out advice"), "--L must be > 0")
    assert not Path("advice").exists()


def test_l_may_be_zero_with_relaxed_smoothness():
    done = sngm("advise --gradients 1e4 --sigma 1 --gap 1 --L -0 --lam 1 --json --out advice")
    assert done.code == 0
    assert all(0 < method["lr"] < 1e9 for method in done.json["methods"] if method.get("lr") is not None)


@pytest.mark.parametrize(
    ("methods", "named"),
    [
        ("sngm,msgd,sngm", "sngm is there twice"),
        ("sngm,sngm()", "sngm is there twice"),
        ("sngm,sngm(momentum=0.9)", "sngm and sngm(momentum=0.9) are the same method"),
        ("msgd,torch.optim:SGD(momentum=0.9)", "msgd and torch.optim:SGD(momentum=0.9) are the same method"),
        ("block-sngm,sngm(scope=tensor)", "block-sngm and sngm(scope=tensor) are the same method"),
    ],
)
def test_the_same_method_twice_is_refused_by_name(methods, named):
    refused(sngm(f"compare --methods '{methods}' --lrs 0.1 --batches 512 --out study"), named)
    assert not Path("study").exists()


def test_other_settings_are_other_methods():
    study = StudyConfig("digits", ("sngm", "sngm(momentum=0.8)", "sngd", "block-sngm"), (512,), 1, 1, lrs=(0.1,))
    assert len(study.cells()) == 4


@pytest.mark.parametrize("cells", ["SNGM@", "@8192", "@", "SNGM@8192,MSGD@", "SNGM@@8192", "SNGM@8192@"])
def test_half_a_cell_is_refused(cells):
    refused(sngm(f"paper run table-2 --cells {cells} --dry-run"), "--cells")


@pytest.mark.parametrize("columns", ["99999999999", "200000000", "0", "x"])
def test_an_absurd_width_of_the_terminal_is_ignored(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    done = sngm("train --help")
    assert done.code == 0
    assert len(done.out) < 100_000


def test_a_line_break_in_a_path_makes_no_second_line():
    for verb in ("report", "eval"):
        refused(sngm(f"{verb} 'a\nb'"), "a\\nb")


@pytest.mark.parametrize("setting", ["momentum=1e400", "momentum=-1e400"])
def test_a_setting_that_no_record_can_hold_is_refused(setting):
    refused(sngm(f"train digits {QUICK} --set {setting} --out run"), "momentum")
    refused(sngm(f"train digits {QUICK} --set task.width=1e400 --out run"), "width")
    assert not Path("run").exists()


@pytest.mark.parametrize("verb", ["eval run", "report run"])
def test_an_edited_result_is_not_repeated(verb, finished):
    shutil.copytree(finished, "run")
    text = Path("run/run.json").read_text()
    Path("run/run.json").write_text(re.sub(r'("test_accuracy": )[0-9.]+', r"\g<1>0.9999", text))
    done = sngm(verb)
    assert done.code == 2
    assert "0.9999" not in done.out
