"""Studies: which runs they make, how learning rates are selected, and that no run is lost or repeated."""

import itertools
import json
import os
import signal
import subprocess
import uuid
from pathlib import Path

import pytest
from console import OWN_TASK, Result, finish, refused, sngm, start, until
from filelock import FileLock
from waiting import wait_for

from sngm import tasks
from sngm.errors import UsageError
from sngm.optim import registry
from sngm.study import Cell, StudyConfig, display, launch, worker
from sngm.study.grid import check_types, run_name, split_settings
from sngm.study.select import EXTENSIONS, at_edge, best_rate, next_rate
from sngm.tasks.digits import Digits
from sngm.training import Options, RunConfig

pytestmark = pytest.mark.usefixtures("in_one_process")

TINY = "compare --methods msgd,sngm --batches 128 --lrs 0.03,0.1 --epochs 1 --seeds 2 --set width=2 --jobs 2"
LONG = "compare --methods sngm --batches 16 --lrs 0.03,0.1 --epochs 3 --seeds 2 --jobs 2"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def results(folder: str | Path) -> dict[str, dict]:
    """Return the result of each run, by the name of its folder."""
    records = {path.parent.name: json.loads(path.read_text()) for path in Path(folder).glob("runs/*/run.json")}
    return {name: {key: record.get(key) for key in ("status", "result", "config")} for name, record in records.items()}


def cells_of(folder: str | Path) -> list[dict]:
    return json.loads(Path(folder, "study.json").read_text())["cells"]


# ---------------------------------------------------------------- selecting a learning rate


def test_the_best_rate_has_the_best_metric():
    scores = {0.1: (0.8, 0.1), 0.3: (0.9, 0.9), 1.0: (0.7, 0.05)}
    assert best_rate(scores) == 0.3
    assert best_rate(scores, higher_is_better=False) == 1.0


def test_ties_go_to_the_least_loss_and_then_to_the_least_rate():
    assert best_rate({0.1: (0.9, 0.5), 0.3: (0.9, 0.4), 1.0: (0.9, 0.6)}) == 0.3
    assert best_rate({1.0: (0.9, 0.5), 0.3: (0.9, 0.5), 0.1: (0.8, 0.1)}) == 0.3
    assert best_rate({0.3: (5.0, 0.5), 0.1: (5.0, 0.5)}, higher_is_better=False) == 0.1


def test_diverged_rates_are_never_chosen():
    nan = float("nan")
    assert best_rate({0.1: (0.2, 2.0), 0.3: None, 1.0: (nan, 0.1), 3.0: (0.9, nan)}) == 0.1
    assert best_rate({0.1: None, 0.3: None}) is None
    assert best_rate({}) is None


@pytest.mark.parametrize(
    ("best", "beyond"), [(0.03, 0.009), (0.1, None), (0.3, None), (1.0, 3.33)], ids=["low", "inner", "inner2", "high"]
)
def test_the_grid_grows_one_step_beyond_the_edge_that_is_best(best, beyond):
    scores = {lr: (0.9 if lr == best else 0.5, 1.0) for lr in (0.03, 0.1, 0.3, 1.0)}
    assert next_rate(scores, first=4) == beyond
    assert at_edge(scores) == (beyond is not None)
    errors = {lr: (1 - score, loss) for lr, (score, loss) in scores.items()}
    assert next_rate(errors, higher_is_better=False, first=4) == beyond


def test_a_grid_that_diverged_everywhere_grows_downward():
    assert next_rate({0.1: None, 0.3: None}, first=2) == 0.0333
    assert at_edge({0.1: None, 0.3: None})


@pytest.mark.parametrize("rising", [True, False])
def test_a_grid_grows_no_further_than_the_limit(rising):
    scores = {lr: ((lr if rising else -lr), 1.0) for lr in (0.1, 0.2)}
    added = []
    while (lr := next_rate(scores, first=2)) is not None:
        added.append(lr)
        scores[lr] = ((lr if rising else -lr), 1.0)
    assert added == ([0.4, 0.8, 1.6] if rising else [0.05, 0.025, 0.0125])
    assert len(added) == EXTENSIONS
    assert at_edge(scores)


def test_a_grid_too_fine_for_another_step_stays_as_it_is():
    assert next_rate({1.0: (0.8, 0.1), 1.001: (0.9, 0.1)}, first=2) is None


def test_a_single_rate_is_no_grid():
    assert next_rate({0.1: (0.9, 0.1)}, first=1) is None
    assert not at_edge({0.1: (0.9, 0.1)})


@pytest.mark.parametrize("task", tasks.names())
def test_every_method_gets_as_many_rates_of_a_task(task):
    assert len({len(tasks.rates_of(task, name)) for name in registry.names()}) == 1


def test_the_rates_of_the_digits_task_are_half_a_decade_apart():
    grids = [tasks.rates_of("digits", name) for name in registry.names()]
    for rates in grids:
        ratios = [high / low for low, high in itertools.pairwise(rates)]
        assert all(2.9 < ratio < 3.5 for ratio in ratios)


# ---------------------------------------------------------------- which runs a study makes


def study(**changes) -> StudyConfig:
    usual = {"task": "digits", "methods": ("sngm",), "batches": (128,), "seeds": 2, "epochs": 1}
    return StudyConfig(**(usual | {"lrs": (0.1, 0.3, 1.0)} | changes))


def play(cell: Cell, score) -> list[tuple[str, float, int]]:
    """Make a cell's runs without training; return them in order."""
    made, waiting = [], cell.first_runs()
    while waiting:
        config = waiting.pop(0)
        made.append((config.part, config.lr, config.seed))
        value = score(config.lr)
        record = {"status": "diverged", "result": {}}
        if value is not None:
            record = {"status": "finished", "result": {"validation_accuracy": value, "validation_loss": 1.0}}
        waiting += cell.take(config, record, "accuracy", True)
    return made


def test_a_cell_tries_its_rates_and_then_runs_every_seed_at_the_best():
    (cell,) = study().cells()
    assert play(cell, lambda lr: -abs(lr - 0.3)) == [
        ("select", 0.1, 0), ("select", 0.3, 0), ("select", 1.0, 0), ("full", 0.3, 0), ("full", 0.3, 1),
    ]  # fmt: skip
    summary = cell.summary(True)
    assert (summary["lr"], summary["extensions"], summary["at_edge"]) == (0.3, 0, False)


def test_a_cell_whose_best_lies_at_the_edge_tries_beyond():
    (cell,) = study().cells()
    made = play(cell, lambda lr: -abs(lr - 3.33))
    assert made[3:5] == [("select", 3.33, 0), ("select", 11.1, 0)]
    assert made[5:] == [("full", 3.33, 0), ("full", 3.33, 1)]
    assert cell.summary(True)["extensions"] == 2
    assert cell.summary(True)["grid"] == [0.1, 0.3, 1.0, 3.33, 11.1]


def test_a_cell_that_always_diverges_ends_without_a_choice():
    (cell,) = study().cells()
    made = play(cell, lambda lr: None)
    assert [lr for _, lr, _ in made] == [0.1, 0.3, 1.0, 0.0333, 0.0111, 0.0037]
    summary = cell.summary(True)
    assert (summary["lr"], summary["extensions"], summary["at_edge"]) == (None, EXTENSIONS, True)


def test_a_single_rate_needs_no_selection():
    (cell,) = study(lrs=(0.1,)).cells()
    assert play(cell, lambda lr: 0.5) == [("full", 0.1, 0), ("full", 0.1, 1)]
    assert cell.summary(True)["at_edge"] is False


def test_methods_with_settings_are_told_apart():
    cells = study(methods=("sngm", "sngm(weight_decay=8e-4)", "sngm( scope = tensor )"), lrs=None).cells()
    assert [cell.label for cell in cells] == ["sngm", "sngm(weight_decay=0.0008)", "sngm(scope=tensor)"]
    assert [cell.method_settings.get("weight_decay") for cell in cells] == [None, 8e-4, None]
    assert {cell.grid for cell in cells} == {Digits.lrs["sngm"]}
    assert len({run_name(cell.config(0.1, "full", 0)) for cell in cells}) == 3
    (cell,) = study(methods=("sngm(scope=tensor,momentum=0.8)",), lrs=None).cells()
    config = cell.config(0.1, "full", 0)
    again = RunConfig.from_dict(json.loads(json.dumps(config.as_dict(), sort_keys=True)))
    assert again.label == config.label == "sngm(momentum=0.8,scope=tensor)"


def test_a_setting_goes_to_the_methods_that_have_it():
    of_methods, of_task = split_settings("digits", ["msgd", "lars"], {"trust_coefficient": 0.01, "width": 4})
    assert (of_methods, of_task) == ({"trust_coefficient": 0.01}, {"width": 4})
    msgd, lars = study(methods=("msgd", "lars"), method_settings=of_methods).cells()
    assert msgd.method_settings == {}
    assert lars.method_settings == {"trust_coefficient": 0.01}


@pytest.mark.parametrize("methods", [("sngm", "sngm"), ("sngm", "sngm()"), ("sngm", "sngm(weight_decay=1e-4)")])
def test_the_same_method_twice_is_refused_however_it_is_written(methods):
    with pytest.raises(UsageError, match="twice"):
        study(methods=methods).cells()


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("msgd", {"nesterov": "yes"}), ("msgd", {"momentum": True}), ("msgd", {"fused": 1}), ("adam", {"betas": 0.9}),
        ("adam", {"betas": (0.9,)}), ("sngm", {"momentum": "0.9"}), ("torch.optim:RMSprop", {"centered": "no"}),
    ],
)  # fmt: skip
def test_settings_of_another_type_are_refused(method, settings):
    with pytest.raises(UsageError, match=next(iter(settings))):
        check_types(method, settings)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("msgd", {"nesterov": True, "momentum": 0, "fused": None, "foreach": False}),
        ("adam", {"betas": (0.5, 0.9), "eps": 1e-6}),
        ("sngm", {"scope": "tensor", "momentum": 0.5}),
    ],
)
def test_settings_of_the_right_type_are_taken(method, settings):
    check_types(method, settings)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--methods msgd,nosuch", ["nosuch"]),
        ("--methods msgd,,sngm", ["list separated by commas"]),
        ("--methods ''", ["what follows --methods is empty"]),
        ("--methods msgd,msgd", ["methods", "twice"]),
        ("--methods 'msgd,sngm(momentum=abc)'", ["momentum", "abc"]),
        ("--methods 'msgd(lr=1)'", ["--lrs"]),
        ("--batches 32,32", ["batches", "twice"]),
        ("--batches 32,", ["list separated by commas"]),
        ("--batches=", ["--batches is empty"]),
        ("--batches 0", ["--batches", "positive"]),
        ("--batches -3", ["--batches", "positive"]),
        ("--batches 32.5", ["--batches", "whole"]),
        ("--batches abc", ["--batches", "abc"]),
        ("--batches 32,1000000000", ["batch=1000000000", "at most 1024"]),
        ("--batches 30 --workers 4", ["28 or 32"]),
        ("--lrs 0.1,0.10", ["lrs", "twice"]),
        ("--lrs 0", ["--lrs", "positive"]),
        ("--lrs nan", ["--lrs", "positive"]),
        ("--lrs 0.1,inf", ["--lrs", "positive"]),
        ("--lrs ,", ["list separated by commas"]),
        ("--seeds 0", ["seeds"]),
        ("--epochs 0", ["epochs"]),
        ("--jobs 0", ["--jobs"]),
        ("--workers 0", ["workers"]),
        ("--device nosuch", ["nosuch"]),
        ("--set nosuch=1", ["nosuch"]),
        ("--schedule nosuch", ["nosuch"]),
        ("--schedule plateau", ["validation"]),
        ("nosuch", ["nosuch", "digits"]),
    ],
)
def test_compare_refuses_in_one_line_before_anything_is_run(arguments, words, tmp_path):
    refused(sngm(f"compare {arguments}"), *words)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [("--methods msgd,nosuch", "nosuch"), ("--batches 32,1000000000", "at most 1024"), ("--jobs 0", "--jobs"),
     ("--schedule plateau", "validation"), ("--device nosuch", "nosuch")],
)  # fmt: skip
def test_a_dry_run_of_compare_refuses_the_same(arguments, word):
    refused(sngm(f"compare {arguments} --dry-run"), word)


def test_a_dry_run_reads_the_data_once(monkeypatch):
    asked, data = [], Digits.data
    monkeypatch.setattr(Digits, "data", lambda self: asked.append(self) or data(self))
    assert sngm("compare --methods msgd,sngm --batches 128 --epochs 1 --dry-run").code == 0
    assert len(asked) == 1


# ---------------------------------------------------------------- from the command line


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Result]:
    """Run a tiny study, and return it with its output."""
    folder = tmp_path_factory.mktemp("studies") / "tiny"
    return folder, sngm(f"{TINY} --out {folder}")


def test_a_study_leaves_its_records_a_table_and_a_page(whole):
    folder, shown = whole
    assert shown.code == 0
    for name in ("study.json", "table.md", "report.html"):
        assert (folder / name).stat().st_size > 0
    assert list(folder.glob("*.svg"))
    assert {record["status"] for record in results(folder).values()} == {"finished"}
    full = [record for record in results(folder).values() if record["config"]["part"] == "full"]
    assert sorted((r["config"]["method"], r["config"]["seed"]) for r in full) == [
        ("msgd", 0), ("msgd", 1), ("sngm", 0), ("sngm", 1),
    ]  # fmt: skip
    assert all("test_accuracy" in record["result"] for record in full)
    tried = [record for record in results(folder).values() if record["config"]["part"] == "select"]
    assert not any("test" in key for record in tried for key in record["result"])
    assert f"Report: {folder}/report.html" in shown.out
    assert "| msgd" in shown.out


def test_progress_goes_to_stderr_a_line_a_run(whole):
    folder, shown = whole
    lines = shown.err.strip().splitlines()
    assert len(lines) == len(results(folder))
    assert lines[0].startswith("[1/")
    assert " batch 128 lr " in lines[0]
    assert "validation accuracy" in lines[0]


def test_the_same_command_again_repeats_nothing_and_starts_no_process(whole, monkeypatch):
    folder, shown = whole
    monkeypatch.delattr("sngm.study.launch.open_local")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*")}
    again = sngm(f"{TINY} --out {folder}")
    assert again.out == shown.out
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*")} == before


def test_compare_and_report_give_one_json_document(whole):
    folder, _ = whole
    found = sngm(f"{TINY} --out {folder} --json").json
    assert found["folder"] == str(folder)
    assert found["report"] == str(folder / "report.html")
    again = sngm(f"report {folder} --json").json
    assert again["report"] == found["report"]


@pytest.mark.slow
def test_a_run_does_not_depend_on_the_study_it_is_in(whole):
    folder, _ = whole
    sngm(f"{TINY.replace('--seeds 2', '--seeds 1')} --out narrow")
    narrow, wide = results("narrow"), results(folder)
    assert len(narrow) == len(wide) - 2
    assert all(wide[name] == record for name, record in narrow.items())


def test_another_study_in_the_folder_is_refused_with_the_difference(whole):
    folder, _ = whole
    before = (folder / "study.json").read_bytes()
    other = sngm(f"{TINY.replace('--seeds 2', '--seeds 3')} --clip 1 --out {folder}")
    assert (other.code, other.out) == (2, "")
    head, *lines = other.err.splitlines()
    assert "holds another study; name another folder with --out" in head
    assert lines == ["  settings.clip: not set there, 1.0 here"]
    assert (folder / "study.json").read_bytes() == before


@pytest.mark.filterwarnings("default")
def test_broken_records_of_a_study_are_made_again(whole):
    folder, shown = whole
    before = results(folder)
    record = next(folder.glob("runs/*full*/run.json"))
    for path in (record, folder / "study.json"):
        path.write_text(path.read_text()[:100])
    again = sngm(f"{TINY} --out {folder}")
    assert again.out == shown.out
    assert f"sngm: {folder}/study.json is broken, or was changed since written; it is written anew" in again.err
    assert results(folder) == before


def test_a_deleted_run_is_made_again_with_the_same_result(whole):
    folder, shown = whole
    before = results(folder)
    for path in next(folder.glob("runs/sngm*full*")).iterdir():
        path.unlink()
    assert sngm(f"{TINY} --out {folder}").out == shown.out
    assert results(folder) == before


def test_two_processes_in_one_folder_are_refused(whole):
    folder, _ = whole
    with FileLock(folder / ".lock"):
        refused(sngm(f"{TINY} --out {folder}"), "another process", str(folder))


def test_diverged_runs_are_results():
    shown = sngm("compare --methods msgd --batches 128 --lrs 1e30 --epochs 1 --seeds 2 --out study --jobs 1 --json")
    assert shown.code == 0
    assert shown.json
    assert [record["status"] for record in results("study").values()] == ["diverged"] * 2


def test_a_method_that_diverges_at_every_rate_is_a_result():
    shown = sngm(
        "compare --methods msgd,sngm --batches 128 --lrs 1e29,1e30 --epochs 1 --seeds 1 --set width=2 --out study"
    )
    assert shown.code == 0
    msgd = cells_of("study")[0]
    assert (msgd["method"], msgd["lr"], msgd["extensions"]) == ("msgd", None, EXTENSIONS)
    assert "msgd" in shown.out


def test_own_tasks_and_methods_of_torch_can_be_compared():
    Path("own.py").write_text(OWN_TASK)
    line = "compare own.py:Line --methods 'sngm,torch.optim:RMSprop(alpha=0.9)' --batches 8 --epochs 1 --seeds 1"
    shown = sngm(f"{line} --jobs 2 --json")
    assert shown.code == 0, shown.err
    labels = [cell["method"] for cell in cells_of(shown.json["folder"])]
    assert labels == ["sngm", "torch.optim:RMSprop(alpha=0.9)"]
    for cell in cells_of(shown.json["folder"]):
        tried = [
            (record["result"]["validation_error"], record["config"]["lr"])
            for record in results(shown.json["folder"]).values()
            if record["config"]["part"] == "select" and cell["method"].startswith(record["config"]["method"])
        ]
        assert min(tried)[1] == cell["lr"]
    Path("own.py").write_text(OWN_TASK + "# edited\n")
    edited = sngm(f"{line} --out {shown.json['folder']}")
    assert edited.code == 2
    assert "source: " in edited.err


def test_a_run_that_fails_leaves_the_others_their_results_and_is_tried_again():
    fails = 'if len(batch[0]) == 32 and model.training:\n            raise RuntimeError("too large")\n        return'
    Path("own.py").write_text(
        OWN_TASK.replace("        return self.scores(model, batch)", f"        {fails} self.scores(model, batch)")
    )
    line = "compare own.py:Line --methods sngm --batches 8,32 --lrs 0.1 --epochs 1 --seeds 2 --jobs 1"
    shown = sngm(f"{line} --json")
    assert shown.code == 1
    assert "2 runs failed, the first sngm at batch 32: RuntimeError: too large" in shown.err.splitlines()[-1]
    seen = []
    study = StudyConfig("own.py:Line", ("sngm",), (32,), seeds=1, epochs=1, lrs=(0.1,))
    launch.compare(
        study, Path("again"), options=Options(), jobs=1, show=lambda progress: seen.append(len(progress.failed))
    )
    assert seen[-1] == 1, "who looks on is told of the last one too"
    assert [cell["n"] for cell in shown.json["cells"]] == [2, 0]
    assert sngm(f"{line} --json").code == 1


@pytest.mark.slow
def test_seeds_can_be_added_to_a_study():
    few = sngm(f"{TINY} --out study --json").json
    more = sngm(f"{TINY.replace('--seeds 2', '--seeds 3')} --out study --json").json
    for before, after in zip(few["cells"], more["cells"], strict=True):
        assert after["values"][:2] == before["values"]
        assert after["n"] == 3


def test_a_setting_without_a_default_can_be_set():
    Path("own.py").write_text(OWN_TASK.replace("noise: float = 0.01", "noise: float"))
    assert sngm("train own.py:Line --set noise=0.5 --epochs 1 --json").json["config"]["task_settings"] == {"noise": 0.5}
    assert "noise" in sngm("train own.py:Line").err


def test_a_study_under_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shown = sngm(TINY)
    assert (shown.code, shown.out) == (2, "")
    assert "without torchrun" in shown.err


@pytest.mark.slow
def test_a_loss_that_fails_in_a_worker_shows_its_own_traceback():
    Path("own.py").write_text(
        OWN_TASK.replace('return self.scores(model, batch)["loss"].mean()', "return 1 / 0  # my line")
    )
    shown = finish(start("compare own.py:Line --methods msgd --batches 8 --seeds 1 --jobs 1"))
    assert shown.code == 1
    assert "return 1 / 0  # my line" in shown.err
    assert "ZeroDivisionError: division by zero" in shown.err


# ---------------------------------------------------------------- signals and a full disk


def living(mark: str) -> list[int]:
    """Return the processes that have the mark in their environment."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and mark.encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def running(folder: str):
    """Start a study, and wait until one run has finished an epoch."""
    return lambda: any(path.stat().st_size for path in Path(folder).glob("runs/*/metrics.jsonl"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies") / "long"
    assert sngm(f"{LONG} --out {folder}").code == 0
    return results(folder), cells_of(folder)


linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at /proc")


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["ctrl-c", "term", *(pytest.param(how, marks=pytest.mark.nightly) for how in ("int", "term-group", "hup-group"))],
)
def test_an_interrupted_study_says_how_to_go_on_and_ends_the_same(how, uninterrupted):
    mark = f"SNGM_TEST_{uuid.uuid4().hex}"
    process = start(f"{LONG} --out study", **{mark: "1"})
    until(process, running("study"))
    number = {"term": signal.SIGTERM, "hup": signal.SIGHUP}.get(how.partition("-")[0], signal.SIGINT)
    (os.killpg if how in ("ctrl-c", "term-group", "hup-group") else os.kill)(process.pid, number)
    shown = finish(process)
    assert (shown.code, shown.out) == (130, "")
    last = shown.err.strip().splitlines()[-1]
    assert last == "sngm: interrupted; finished runs are in study; the same command resumes"
    assert "Traceback" not in shown.err
    wait_for(lambda: not living(mark))
    assert len(results("study")) < len(uninterrupted[0])
    assert sngm(f"{LONG} --out study").code == 0
    assert (results("study"), cells_of("study")) == uninterrupted


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "how"), [("the server starts", "ctrl-c"), ("workers start", "ctrl-c"), ("workers start", "term")]
)
def test_a_study_interrupted_at_its_start_says_no_more_than_that(when, how):
    mark = f"SNGM_TEST_{uuid.uuid4().hex}"
    process = start(f"{LONG} --out study", **{mark: "1"})
    served = "from multiprocessing.forkserver import main"
    until(process, lambda: any(served in command_line(pid) for pid in living(mark)))
    if when == "workers start":
        until(process, Path("study/study.json").exists)
    else:
        until(process, lambda: hears_ctrl_c(process.pid))  # not while it starts the fork server, which imports torch
    if how == "ctrl-c":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid, signal.SIGTERM)
    shown = finish(process)
    assert (shown.code, shown.out) == (130, "")
    assert shown.err.splitlines() == [
        "stopping at the next step of each run; once more to end at once",
        "sngm: interrupted; finished runs are in study; the same command resumes",
    ]
    wait_for(lambda: not living(mark))


def hears_ctrl_c(pid: int) -> bool:
    (mask,) = (line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@linux
@pytest.mark.slow
def test_a_killed_study_leaves_no_process_behind_and_goes_on(uninterrupted):
    mark = f"SNGM_TEST_{uuid.uuid4().hex}"
    process = start(f"{LONG} --out study", **{mark: "1"})
    until(process, running("study"))
    assert len(living(mark)) >= 4, "the study, the fork server and two workers"
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not living(mark))
    finish(process)
    assert sngm(f"{LONG} --out study").code == 0
    assert (results("study"), cells_of("study")) == uninterrupted


def test_progress_shows_a_test_score_or_else_a_validation_score():
    def shown(**result):
        return display._scores({"result": result})[0][0]

    assert shown(train_loss=1.0, validation_loss=2.0) == "validation_loss"
    assert shown(train_loss=1.0, validation_loss=2.0, test_loss=3.0, test_accuracy=0.5) == "test_accuracy"
    assert shown(train_loss=1.0, validation_bits_per_byte=2.0, test_bits_per_byte=2.1) == "test_bits_per_byte"


@pytest.mark.parametrize(("moment", "exits"), [("starting a run", True), ("training", False), ("between runs", False)])
def test_a_worker_ends_at_once_only_before_the_first_step_of_a_run(monkeypatch, moment, exits):
    # between runs it may be sending a record: half of one would block the parent process forever
    ended = []
    for name, value in {"_stop": False, "_end": False, "_starting": False}.items():
        monkeypatch.setattr(worker, name, value)
    monkeypatch.setattr(os, "_exit", ended.append)

    def train(config, path, options):
        if moment == "training":
            assert not options.should_stop()
        if moment != "between runs":
            worker.on_signal(signal.SIGTERM, None)
            assert ended == [0] * exits
        return {"status": "finished"}

    monkeypatch.setattr(worker, "train", train)
    assert worker.make(None, Path("run"), {}, None) == {"status": "finished"}
    if moment == "between runs":
        worker.on_signal(signal.SIGTERM, None)
        assert not ended
        worker.make(None, Path("run"), {}, None)  # a run that comes after the signal does not start
    assert ended


@linux
@pytest.mark.slow
def test_a_killed_worker_is_one_line_and_the_study_goes_on(uninterrupted):
    mark = f"SNGM_TEST_{uuid.uuid4().hex}"
    process = start(f"{LONG} --out study", **{mark: "1"})
    until(process, running("study"))
    workers = [pid for pid in living(mark) if pid != process.pid and parent_of(pid) != process.pid]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    shown = finish(process)
    assert (shown.code, shown.out) == (1, "")
    assert shown.err.strip().splitlines()[-1].startswith("sngm: a worker process was killed")
    assert "Traceback" not in shown.err
    wait_for(lambda: not living(mark))
    assert sngm(f"{LONG} --out study").code == 0
    assert (results("study"), cells_of("study")) == uninterrupted


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 120 kB; return its path and a function to enlarge it."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> int:
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True).returncode

    try:
        if mount("size=120k"):
            pytest.skip("may not mount a file system here")
    except FileNotFoundError:
        pytest.skip("no mount here")
    yield place, lambda: mount("remount,size=100m")
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.slow
def test_a_full_disk_loses_nothing_that_was_finished(small_disk, whole):
    folder, shown = whole
    place, enlarge = small_disk
    full = sngm(f"{TINY} --out {place}")
    assert (full.code, full.out) == (1, "")
    assert full.err.strip().splitlines()[-1].startswith("sngm: No space left on device")
    finished = {path: path.read_bytes() for path in place.glob("runs/*/run.json") if b'"finished"' in path.read_bytes()}
    assert 0 < len(finished) < len(results(folder))
    enlarge()
    assert sngm(f"{TINY} --out {place}").out == shown.out.replace(str(folder), str(place))
    assert all(path.read_bytes() == content for path, content in finished.items())
    assert results(place) == results(folder)
