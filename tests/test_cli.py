"""The command line: output, errors and exit codes."""

import errno
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from console import OWN_TASK, SCRIPT, documented, finish, refused, sngm, start

import sngm as package
from sngm import tasks, training
from sngm.cli.exit_codes import within_verb
from sngm.errors import UsageError
from sngm.optim import kernels, registry
from sngm.parsing import format_call, parse_call, parse_settings, split_list, value_of

pytestmark = pytest.mark.usefixtures("in_one_process")

VERBS = (
    "train", "eval", "compare", "report", "watch", "probe", "advise", "check-theory", "tasks", "methods", "data",
    "doctor",
)  # fmt: skip
QUICK = "--batch 128 --epochs 1 --set width=2"
METHODS = [  # the paper's, and our own
    "msgd", "sngm", "block-sngm", "sngd", "lars", "lars-unscaled", "lars-momentum", "clars",
    "extrap-sgd", "adam", "adamw", "lamb", "lion", "nesterov", "nsgdm", "schedule-free", "signum", "spectral-sngm",
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def write(text, name="own.py"):
    Path(name).write_text(text)
    return f"{name}:Line"


# ---------------------------------------------------------------- help and versions


def imports_of(*words):
    """Run Python; return its CPU time, which concurrent tests do not affect, its output, and what it imported."""
    before = os.times()
    done = subprocess.run([sys.executable, "-X", "importtime", *words], capture_output=True, text=True)
    after = os.times()
    assert done.returncode == 0, done.stderr
    return sum(after[2:4]) - sum(before[2:4]), done.stdout, re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE)


def test_help_comes_at_once_and_without_torch():
    of_parser, _, _ = imports_of("-c", "import typer, typer.rich_utils")
    seconds, shown, imported = imports_of("-m", "sngm", "--help")
    assert "Exit codes" in shown
    assert seconds < 2.5 * of_parser  # a limit in seconds would depend on the machine
    assert "sngm.cli" in imported
    assert not {"torch", "numpy", "scipy", "sklearn"} & set(imported)


@functools.cache
def help_of(verb):
    return sngm(f"{verb} --help")


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_says_what_the_command_does_then_shows_examples_before_options(verb):
    shown = help_of(verb)
    assert shown.code == 0
    assert shown.err == ""
    usage, _, about = shown.out.partition("Examples")[0].strip().partition("\n")
    assert usage.startswith("Usage:")
    assert re.match(r"\s*[A-Z][^.]+\.", about)
    assert 0 < shown.out.index("Examples") < shown.out.index(f"sngm {verb}", shown.out.index("Examples"))
    assert shown.out.index("Examples") < shown.out.index("Options")


@pytest.mark.parametrize("verb", ["train", "compare", "probe"])
def test_help_groups_the_flags_of_commands_that_train(verb):
    shown = help_of(verb).out
    panels = re.findall(r"╭─ ([A-Z][a-z ]+?) ─", shown)
    assert panels[:2] == ["Arguments", "Options"]
    usual = [p for p in panels[2:] if p not in ("Measurement", "Cluster")]
    assert usual == ["Run", "Recipe", "Batch split", "Execution", "Output"]
    options = shown[shown.index("╭─ Options") : shown.index("╭─ Run")]
    assert set(re.findall(r"--[a-z-]+", options)) == {"--help"}, "every other flag has a panel"
    assert not re.search(r"--(json|deterministic|dry-run|restart) .*<bool>", shown)


def test_every_verb_is_listed_with_one_sentence():
    listed = help_of("").out
    for verb in VERBS:
        assert re.search(rf"│ {verb} +[A-Z]([^.?]|\.(html|md))*[.?] +│", listed), verb


def test_the_version_is_the_packages():
    assert sngm("--version").out == f"sngm {package.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "sngm", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sngm {package.__version__}\n", "")


def test_no_arguments_show_the_help():
    shown = sngm("")
    assert shown.code in (0, 2)
    assert "Examples" in shown.out + shown.err


# ---------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_the_digits_by_default(method):
    workers = 8 if method == "clars" else 1  # with one worker CLARS is LARS, and raises an error
    shown = sngm(f"train digits --method {method} --batch 512 --workers {workers} --json")
    assert shown.code == 0
    assert shown.json["result"]["test_accuracy"] > 0.9


def test_the_example_of_the_help_trains():
    shown = sngm("train digits --method sngm --lr 0.1 --batch 512 --out run")
    assert shown.code == 0
    assert float(re.search(r"test accuracy ([\d.]+)", shown.out)[1]) > 0.95
    assert shown.out.count("\n") == 1
    again = re.search(r"test accuracy: ([\d.]+) \(recorded: ([\d.]+)\)", sngm("eval run").out)
    assert again[1] == again[2]


def test_a_finished_run_is_not_repeated():
    first = sngm(f"train digits {QUICK} --out run")
    files = {path: path.stat().st_mtime_ns for path in Path("run").iterdir() if path.name != ".lock"}
    assert sngm(f"train digits {QUICK} --out run").out == first.out
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_the_folder_is_named_after_the_run():
    shown = sngm(f"train digits {QUICK} --json").json
    assert shown["folder"] == f"runs/digits-sngm-{shown['hash']}"
    assert Path(shown["folder"], "run.json").exists()


def test_any_optimizer_of_torch_is_a_method():
    shown = sngm(
        "train digits --method torch.optim:RMSprop --lr 0.003 --set alpha=0.9 --batch 128 --epochs 4 --json"
    ).json
    assert shown["config"]["method_settings"]["alpha"] == 0.9
    assert shown["result"]["test_accuracy"] > 0.8


def test_settings_go_to_the_method_and_the_task_that_have_them():
    config = sngm('train digits --method "sngm(nesterov=true)" --set width=3 --set momentum=0.5 -n --json').json[
        "config"
    ]
    assert config["task_settings"] == {"width": 3}
    assert config["method_settings"] == {"momentum": 0.5, "nesterov": True, "weight_decay": 1e-4}


def test_divergence_has_its_own_exit_code_and_record():
    shown = sngm(f"train digits --method msgd --lr 1e30 {QUICK} --out run")
    assert shown.code == 4
    assert "diverged, seen at step" in shown.out
    assert shown.out.count("\n") == 1
    assert json.loads(Path("run/run.json").read_text())["status"] == "diverged"
    again = sngm(f"train digits --method msgd --lr 1e30 {QUICK} --out run --json")
    assert again.code == 4
    assert again.json["status"] == "diverged"


# ---------------------------------------------------------------- dry runs and JSON


def test_a_dry_run_of_train_says_all_and_does_nothing(tmp_path):
    line = "train digits --lr 0.2 --batch 512 --workers 4 --micro 64 --epochs 10 --dry-run"
    plan = sngm(f"{line} --json").json
    assert plan["parameters"] > 1000
    assert plan["batch_plan"] == "512 = 4 workers x 2 groups of 64; BatchNorm over 64; 1 process"
    assert (plan["steps_per_epoch"], plan["steps"]) == (2, 20)
    rates = plan["lr_at_step"]
    assert list(rates) == ["0", "5", "10", "15", "19"]
    assert rates["0"] == 0.2
    assert rates["10"] == pytest.approx(0.1)
    assert rates["19"] < 0.01
    assert plan["config"]["batch"] == 512
    assert plan["folder"] == f"runs/digits-sngm-{plan['hash']}"
    said = sngm(line).out
    for word in ("parameters: ", "batch plan: 512 = 4 workers", "steps: 20", "folder: runs/digits", "  10: 0.1\n"):
        assert word in said
    assert not any(tmp_path.iterdir())


def test_a_dry_run_of_compare_says_all_and_does_nothing(tmp_path):
    line = "compare --methods msgd,sngm --batches 32,512 --seeds 2 --epochs 3 --dry-run"
    plan = sngm(f"{line} --json").json
    assert plan["runs_at_least"] == 4 * (4 + 2)
    assert [(c["method"], c["batch"]) for c in plan["cells"]] == [
        ("msgd", 32), ("msgd", 512), ("sngm", 32), ("sngm", 512),
    ]  # fmt: skip
    assert plan["cells"][0]["lrs"] == [0.03, 0.1, 0.3, 1.0]
    assert plan["study"]["epochs"] == 3
    for cell in plan["cells"]:
        assert cell["parameters"] > 1000
        assert cell["batch_plan"].startswith(f"{cell['batch']} = 1 worker")
        assert cell["steps"] == 1280 // cell["batch"] * 3
        assert len(cell["lr_at_step"]) == len(set(cell["lr_at_step"])) <= 5
    said = sngm(line).out
    assert "at least 24 runs into runs/compare-digits-" in said
    assert "sngm at batch 512: lr 0.03, 0.1, 0.3, 1" in said
    assert not any(tmp_path.iterdir())


def test_a_dry_run_of_compare_says_how_long_it_takes(monkeypatch):
    measured = []

    class Known:
        memory, samples, largest = {"total": 1}, 8, 8

        def __init__(self, config, *_):
            measured.append((config.method, config.batch, torch.get_num_threads()))

        def epoch_seconds(self, setup):
            return 3200.0 / setup.plan.batch

    monkeypatch.setattr("sngm.training.cost.measure", Known)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    line = "compare --methods msgd,sngm --batches 32,512 --seeds 2 --epochs 3 --dry-run"
    threads = torch.get_num_threads()
    time = sngm(f"{line} --json").json["time"]
    assert measured == [("msgd", 32, 1), ("msgd", 512, 1)], "one cell a batch, as workers of a study compute"
    assert torch.get_num_threads() == threads
    assert time["seconds_of_a_run"] == {"32": 300.0, "512": 18.75}
    assert (time["method"], time["runs_at_once"]) == ("msgd", 2)
    assert time["seconds"] == 2 * (4 + 2) * (300.0 + 18.75) / 2
    assert sngm(f"{line} --jobs 1 --json").json["time"]["seconds"] == 2 * time["seconds"]
    said = "time: about 32 min of training on this machine (cpu), 2 runs at a time; from one pass of msgd at each batch"
    assert said in sngm(line).out
    monkeypatch.delattr(os, "sched_getaffinity")  # as on systems other than Linux
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert sngm(f"{line} --json").json["time"]["runs_at_once"] == 3
    assert "about 64 min of training on this machine (cpu), one run after another; " in sngm(f"{line} --jobs 1").out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", ""),
        ("--precision float64 --step eager", ""),
        ("--precision bfloat16", "sngm: --precision bfloat16: made for GPUs"),
        ("--step compiled", "sngm: --step compiled: made for GPUs"),
        ("--precision bfloat16 --step compiled", "sngm: --precision bfloat16 and --step compiled: made for GPUs"),
    ],
)
def test_what_is_slow_on_a_cpu_is_warned_of_in_one_line(flags, said, monkeypatch):
    for verb in (f"train {write(OWN_TASK)}", f"compare {write(OWN_TASK)} --methods msgd"):
        shown = sngm(f"{verb} --device cpu {flags} -n")
        assert shown.code == 0
        assert shown.err.startswith(said)
        assert shown.err.count("\n") == bool(said)
    monkeypatch.setenv("RANK", "1")
    assert sngm(f"train own.py:Line --device cpu {flags} -n").err == "", "the first process has said it"


def test_train_eval_and_report_give_one_json_document():
    record = sngm(f"train digits {QUICK} --out run --json").json
    assert record["status"] == "finished"
    assert record["folder"] == "run"
    tested = sngm("eval run --json").json
    assert tested["scores"]["test_accuracy"] == tested["recorded"]["test_accuracy"] == record["result"]["test_accuracy"]
    assert sngm("report run --json").json["report"] == "run/report.html"


@pytest.mark.parametrize(
    ("verb", "complete"),
    [
        ("methods", lambda found: {entry["name"] for entry in found} == {*registry.names()}),
        ("tasks", lambda found: [entry["name"] for entry in found] == tasks.names()),
        ("data", lambda found: {"task": "digits", "ready": True, "train": 1280, "test": 517} in found),
        ("doctor", lambda found: found["trains"] is True and list(found["executors"]) == ["local", "ray", "slurm"]),
    ],
)
def test_what_there_is_comes_whole_as_json_and_as_text(verb, complete):
    found = sngm(f"{verb} --json")
    assert found.code == 0
    assert complete(found.json)
    said = sngm(verb)
    assert said.code == 0
    assert not said.out.startswith(("{", "["))


def test_an_installation_that_does_not_train_fails_the_check(monkeypatch):
    monkeypatch.setattr(training, "train", lambda config, folder: {"status": "diverged"})
    found = sngm("doctor --json")
    assert (found.code, found.json["trains"], found.json["error"]) == (1, False, "diverged")
    monkeypatch.setattr(training, "train", lambda config, folder: [][1])
    found = sngm("doctor")
    assert found.code == 1
    assert "torch 2" in found.out
    assert "error: IndexError: list index out of range\n" in found.out


def test_a_method_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.optim", None)  # importing it raises ImportError
    monkeypatch.setattr(registry, "is_installed", lambda name: name != "muon")
    assert "\nmuon: needs: pip install timm\n" in sngm("methods").out


def test_doctor_checks_one_step_of_a_script(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(
        """import torch, sngm

def set_up(clip=False):
    model = torch.nn.Linear(3, 2)
    optimizer = sngm.SNGM(model.parameters(), lr=0.1, weight_decay=0.1)

    def step():
        model(torch.ones(4, 3)).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    return model, optimizer, step

def clipped():
    return set_up(clip=True)

def wrong():
    return 1
"""
    )
    assert all(finding["ok"] for finding in sngm(f"doctor --script {script}:set_up --json").json)
    found = sngm(f"doctor --script {script}:clipped")
    assert found.code == 1
    assert "FAULT clipping: on, at 0.01" in found.out
    assert "must be file.py:function" in sngm(f"doctor --script {script}").err


WRONG_SCRIPT = """import torch, sngm
from torch.nn import Linear
value = 1

def number():
    return 1

def pair():
    return Linear(3, 2), None

def no_step():
    model = Linear(3, 2)
    return model, sngm.SNGM(model.parameters(), lr=0.1), None

def foreign():
    model = Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), lambda: None

def needs(path):
    return path

def raises():
    return sngm.SNGM(Linear(3, 2).parameters(), lr=-1.0)

def step_raises():
    model = Linear(3, 2)
    return model, sngm.SNGM(model.parameters(), lr=0.1), lambda: model.nosuch
"""


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "number": ["must return (model, optimizer, step), got int"],
        "pair": ["must return (model, optimizer, step), got (Linear, NoneType)"],
        "no_step": ["got (Linear, SNGM, NoneType)"],
        "foreign": ["optimizer must be, wrap or contain an optimizer of sngm, got SGD"],
        "nosuch": [
            "has no function 'nosuch'; its functions: number, pair, no_step, foreign, needs, raises, step_raises"
        ],
        "value": ["'int' object is not callable"],
        "needs": ["needs() missing 1 required positional argument: 'path'"],
    }.items(),
)
def test_doctor_names_what_is_wrong_with_a_script_in_one_line(tmp_path, name, words):
    (tmp_path / "own.py").write_text(WRONG_SCRIPT)
    refused(sngm(f"doctor --script {tmp_path}/own.py:{name}"), "own.py", *words)


@pytest.mark.parametrize(("name", "error"), [("raises", "ValueError: lr must"), ("step_raises", "AttributeError: ")])
def test_doctor_shows_where_a_script_raises_without_frames_of_its_own(tmp_path, name, error):
    (tmp_path / "own.py").write_text(WRONG_SCRIPT)
    found = sngm(f"doctor --script {tmp_path}/own.py:{name}")
    assert found.code == 2
    assert f"{tmp_path}/own.py" in found.err
    assert "src/sngm" not in found.err
    assert f"the script raised {error}" in found.err.splitlines()[-1]


def test_doctor_says_how_steps_on_a_gpu_would_be_taken(monkeypatch):
    pytest.importorskip("triton")
    assert sngm("doctor --json").json["gpu_kernels"] == "Triton"
    monkeypatch.setattr(kernels, "installed", lambda: False)
    assert "Triton is not installed" in sngm("doctor").out


# ---------------------------------------------------------------- errors: train

REFUSED = {
    "": ["task"],
    "nosuch": ["nosuch", "digits"],
    "digits --method nosuch": ["nosuch", "lars"],
    "digits --method sngmm": ["did you mean 'sngm'"],
    "digits --method sgd": ["did you mean 'sngd' or 'msgd'"],
    "mine.py": ["name the task in this file, a class or an instance, as mine.py:Name"],
    "digits --method os:system": ["Optimizer"],
    "digits --method no.such.module:Class": ["no.such.module"],
    "digits --method 'sngm('": ["sngm("],
    "digits --method 'sngm(lr=3)'": ["--lr"],
    "digits --method 'sngm(nosuch=3)'": ["nosuch"],
    "digits --lr abc": ["--lr"],
    "digits --lr 0": ["--lr", "finite number > 0"],
    "digits --lr -1": ["--lr", "finite number > 0"],
    "digits --lr nan": ["--lr", "finite number > 0"],
    "digits --lr 1e39": ["lr", "float32"],
    "digits --lr 0.1 --set weight_decay=1e300": ["weight_decay", "float32"],
    f"digits --lr 0.1 --set weight_decay=1{'0' * 400}": ["weight_decay", "2**63"],
    "digits --method msgd --set weight_decay=18446744073709551616": ["weight_decay", "2**63"],
    "digits --method lars --set 'phi=(0,1e300)'": ["phi", "float32"],
    "digits --out ''": ["follows --out is empty"],
    "digits --data-dir=": ["--data-dir is empty"],
    "''": ["follows train is empty"],
    "digits --lr inf": ["--lr", "finite number > 0"],
    "digits --batch 0": ["batch", ">= 1"],
    "digits --batch -3": ["batch", ">= 1"],
    "digits --batch 1e9": ["--batch"],
    "digits --batch 1000000000": ["at most 1280"],
    "digits --batch 100 --workers 3": ["99 or 102"],
    "digits --batch 512 --micro 100": ["64 or 128"],
    "digits --batch 512 --bn-group 1000": ["512"],
    "digits --workers 0": ["workers", ">= 1"],
    "digits --epochs 0": ["epochs", ">= 1"],
    "digits --epochs 1.5": ["--epochs"],
    "digits --seed -1": ["seed", ">= 0"],
    "digits --schedule nosuch": ["nosuch", "cosine"],
    "digits --schedule 'cosine(power=2)'": ["power"],
    "digits --schedule 'polynomial(power=-1)'": ["power"],
    "digits --schedule plateau": ["validation"],
    "digits --warmup -1": ["warmup"],
    "digits --warmup nan": ["warmup"],
    "digits --clip 0": ["clip"],
    "digits --precision float16": ["float32, float64"],
    "digits --running-stats both": ["first, mean"],
    "digits --track nosuch": ["nosuch", "tensorboard, wandb, mlflow"],
    "digits --device nosuch": ["nosuch", "cpu"],
    "digits --device meta": ["meta", "cpu"],
    "digits --checkpoint-every 0": ["--checkpoint-every"],
    "digits --set momentum": ["key=value", "momentum"],
    "digits --set =1": ["key=value"],
    "digits --set momentum=": ["key=value"],
    "digits --set 'a;b=1'": ["key=value"],
    "digits --set momentum=0.5 --set momentum=0.6": ["momentum", "twice"],
    "digits --set nosuch=1": ["nosuch", "width", "momentum"],
    "digits --set optimizer.momentum=1": ["task.key or method.key"],
    "digits --set momentum=abc": ["momentum", "number", "abc"],
    "digits --set momentum=1": ["momentum", "[0, 1)"],
    "digits --set momentum=true": ["momentum", "number"],
    "digits --set weight_decay=nan": ["weight_decay", "number"],
    "digits --set weight_decay=-1": ["weight_decay"],
    "digits --set width=1.5": ["width", "int", "1.5"],
    "digits --set width=0": ["width"],
    "digits --set nesterov=maybe": ["nesterov", "maybe"],
    "digits --method msgd --set nesterov=maybe": ["nesterov", "maybe"],
    "digits --method msgd --set fused=maybe": ["fused", "maybe"],
    "digits --method adam --set 'betas=(0.9,)'": ["betas"],
    "digits --method adam --set betas=0.9": ["betas"],
    "digits --set \"momentum=__import__('os').mkdir('hacked')\"": ["momentum"],
    "digits --set 'scope=<script>'": ["scope", "tensor"],
    "digits --nosuch 1": ["--nosuch"],
    "digits more": ["more"],
    "missing.py:Line": ["no Python file", "missing.py"],
    "digits.Line": ["digits.Line"],
    "'no.such.module:Line'": ["no.such.module"],
    "':'": ["':'"],
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_train_refuses_in_one_line(arguments):
    refused(sngm(f"train {arguments} --out run"), *REFUSED[arguments])
    assert not Path("run/run.json").exists()
    assert not Path("hacked").exists()


@pytest.mark.parametrize(
    "arguments",  # refused by the parser, the method, the config, the device, the batch plan, the schedule, the task
    [
        "digits --lr abc",
        "digits --method os:system",
        "digits --method adam --set betas=0.9",
        "digits --lr nan",
        "digits --lr 1e39",
        "digits --track nosuch",
        "digits --device nosuch",
        "digits --batch 1000000000",
        "digits --batch 512 --micro 100",
        "digits --schedule plateau",
        "digits --set weight_decay=-1",
        "digits --set width=1.5",
    ],
)
def test_a_dry_run_refuses_the_same(arguments):
    refused(sngm(f"train {arguments} --dry-run"), *REFUSED[arguments])


def test_an_unknown_verb_is_refused_in_one_line():
    refused(sngm("trian digits"), "trian")


def test_a_tracker_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for line in (f"train digits {QUICK}", f"train digits {QUICK} --dry-run", "compare digits --methods sngm --dry-run"):
        refused(sngm(f"{line} --track wandb"), "wandb is not installed", "sngm[wandb]")


# ---------------------------------------------------------------- errors: folders


@pytest.mark.parametrize("line", [f"train digits {QUICK}", "compare --methods msgd --batches 512 --epochs 1"])
def test_a_folder_that_is_a_file_is_refused(line):
    Path("file").write_text("mine")
    refused(sngm(f"{line} --out file"), "file is not a folder", "--out")
    refused(sngm(f"{line} --out file/run"), "file", "not a folder")
    assert Path("file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("line", [f"train digits {QUICK}", "compare --methods msgd --batches 512 --epochs 1"])
def test_a_folder_that_cannot_be_written_is_named(line):
    Path("locked").mkdir(mode=0o500)
    refused(sngm(f"{line} --out locked"), "Permission denied", "locked", "--out")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"config": 3}', "\0", '"run"'])
def test_a_broken_record_is_named(text):
    Path("run").mkdir()
    Path("run/run.json").write_text(text)
    refused(sngm(f"train digits {QUICK} --out run"), "run/run.json")
    refused(sngm("eval run"), "run/run.json")
    refused(sngm("report run"), "cannot read the record: run/run.json ")
    assert Path("run/run.json").read_text() == text


@pytest.mark.parametrize("name", ["run.json", "study.json", "one/run.json"])
def test_a_record_of_another_format_is_named_once_with_the_reason(name):
    Path("made/one").mkdir(parents=True)
    Path("made", name).write_text('{"format": 99}')
    done = sngm("report made")
    refused(done, f"made/{name}: format must be 1, got 99; open it with the version of sngm that wrote it")
    assert done.err.count("made") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"study": 3}'])
def test_a_broken_study_is_named(text):
    Path("study").mkdir()
    Path("study/study.json").write_text(text)
    refused(sngm("compare --methods msgd --batches 512 --epochs 1 --out study"), "study/study.json")
    assert Path("study/study.json").read_text() == text


def test_runs_and_studies_do_not_share_a_folder():
    study = "compare --methods msgd --lrs 0.1 --batches 512 --seeds 1 --epochs 1 --set width=2"
    sngm(f"train digits {QUICK} --out run")
    refused(sngm(f"{study} --out run"), "run holds a run; name another folder with --out")
    assert not Path("run/study.json").exists()
    sngm(f"{study} --out study")
    refused(sngm(f"train digits {QUICK} --out study"), "study holds a study; name another folder with --out")
    shown = sngm("report study").out
    shutil.copy("run/run.json", "study/run.json")  # as earlier versions could leave it
    assert sngm("report study").out == shown
    assert sngm(f"{study} --out study").code == 0


def test_a_report_that_cannot_be_written_is_shown():
    sngm(f"train digits {QUICK} --out run")
    Path("run/table.md").mkdir()  # so that the file cannot be written
    shown = sngm("report run")
    assert shown.code == 1
    assert "| sngm |" in shown.out
    assert shown.err.startswith("sngm: Is a directory: run/table.md")


def test_another_run_in_the_folder_is_refused_with_the_difference():
    sngm(f"train digits {QUICK} --out run")
    before = Path("run/run.json").read_bytes()
    other = sngm("train digits --batch 64 --epochs 1 --set width=2 --set momentum=0.5 --lr 0.7 --out run")
    assert (other.code, other.out) == (2, "")
    head, *lines = other.err.splitlines()
    assert head.startswith("sngm: run holds another run; name another folder with --out")
    assert {"  batch: 128 there, 64 here", "  lr: 0.3 there, 0.7 here"} <= set(lines)
    assert "  method_settings.momentum: not set there, 0.5 here" in lines
    assert not any("width" in line or "epochs" in line for line in lines)
    assert Path("run/run.json").read_bytes() == before


@pytest.mark.parametrize("verb", ["eval", "report"])
def test_a_folder_without_records_is_refused(verb):
    Path("empty").mkdir()
    refused(sngm(f"{verb} empty"), "empty holds no r")
    refused(sngm(f"{verb} nowhere"), "nowhere")
    Path("file").write_text("")
    refused(sngm(f"{verb} file"), "file")


def test_a_run_without_a_checkpoint_cannot_be_tested():
    sngm(f"train digits --method msgd --lr 1e30 {QUICK} --out run")
    refused(sngm("eval run"), "run holds no checkpoint", "diverged")


# ---------------------------------------------------------------- the user's own tasks


def test_a_task_of_forty_lines_trains():
    task = write(OWN_TASK)
    assert len(OWN_TASK.strip().splitlines()) <= 42
    shown = sngm(f"train {task} --method msgd --lr 0.03 --epochs 5 --set noise=0.0 --set samples=256 --out run --json")
    assert shown.json["result"]["test_error"] < 0.1
    assert shown.json["config"]["task_settings"] == {"noise": 0.0, "samples": 256}
    assert sngm("eval run --json").json["scores"]["test_error"] == shown.json["result"]["test_error"]
    refused(sngm(f"train {task} --set samples=many"), "samples", "int", "many")
    refused(sngm(f"train {task} --set width=3"), "width", "noise, samples")


FROM_TORCH = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sngm

data = TensorDataset(torch.arange(128.0).view(64, 2) / 128, torch.arange(64) % 2)
task = sngm.Task.from_torch(lambda: nn.Linear(2, 2), data, data, epochs=1, batches=(8,))
"""


def test_an_instance_in_a_file_is_a_task():
    write(FROM_TORCH, "made.py")
    found = sngm("compare made.py:task --methods msgd --lrs 0.1 --seeds 2 --jobs 2 --device cpu --json")
    assert found.code == 0, found.err
    assert sngm("train made.py:task --method sngm --lr 0.1 --device cpu --out run --json").code == 0
    assert "test_accuracy" in sngm("eval run --json").json["scores"]
    refused(sngm("train made.py:task --set width=3"), "width")
    refused(sngm("train made.py:data"), "must name a subclass of sngm.Task or an instance of one", "has task")
    write(f"{OWN_TASK}\n\nline = Line(noise=0.0, samples=64)\n")
    assert tasks.build("own.py:line").settings() == {"noise": 0.0, "samples": 64}
    assert tasks.build("own.py:line", {"samples": 32}).settings() == {"noise": 0.0, "samples": 32}


def test_an_edited_task_is_another_run():
    sngm(f"train {write(OWN_TASK)} --out run")
    Path("own.py").write_text(OWN_TASK + "\n# edited\n")
    again = sngm("train own.py:Line --out run")
    assert again.code == 2
    assert "task_source: " in again.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def broken(:\n", ["broken.py"]),
        ("import no_such_module\n", ["no_such_module"]),
        ("Other = 3\n", ["Line"]),
        ("Line = 3\n", ["subclass of sngm.Task"]),
        ("class Line: pass\n", ["subclass of sngm.Task"]),
        ("raise ValueError('mine')\n", ["mine"]),
    ],
)
def test_a_file_without_a_task_is_refused(text, words):
    refused(sngm(f"train {write(text, 'broken.py')} --dry-run"), "broken.py:Line", *words)


def test_missing_data_has_its_own_exit_code():
    missing = "raise __import__('sngm.errors').errors.DataMissing('no cats in ' + str(self.data_dir))"
    task = write(re.sub(r"(def data\(self\):\n)", rf"\1        {missing}\n", OWN_TASK))
    for line in (f"train {task}", f"compare {task} --methods msgd", f"train {task} --dry-run"):
        refused(sngm(f"{line} --data-dir pets"), "no cats in pets", code=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
        ("raise OSError('no sample 3')", "OSError: no sample 3"),  # not the operating system's
    ],
)
def test_a_loss_that_fails_shows_its_own_traceback(line, told):
    task = write(OWN_TASK.replace('return self.scores(model, batch)["loss"].mean()', f"{line}  # my line"))
    shown = finish(start(f"train {task} --out run"))
    assert (shown.code, shown.out) == (1, "")
    first, *_ = shown.err[shown.err.index("  File") :].splitlines()
    assert first.endswith("in train")  # the traceback starts at the command's function
    assert "own.py" in shown.err
    assert f"{line}  # my line" in shown.err
    assert shown.err.strip().endswith(told)
    assert told.partition(": ")[2] in json.loads(Path("run/run.json").read_text())["error"]


def test_a_trace_may_go_through_code_of_no_module():
    with pytest.raises(ZeroDivisionError) as failed:
        exec("1 / 0", {})
    trace = failed.value.__traceback__
    assert within_verb(trace) is trace


def test_a_run_that_has_not_finished_is_reported_by_its_own_metric():
    task = write(OWN_TASK.replace('metric = "error"', 'metric = "steadiness"'))
    sngm(f"train {task} --out run")  # fails after its first epoch, when its scores are known
    assert "Test steadiness" in sngm("report run").out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return nn.Linear(2, 1)", "return nn.Linear", "model() must return a torch.nn.Module"),
        ("return nn.Linear(2, 1)", "pass", "model() must return a torch.nn.Module, got None"),
        ("def model(", "def no_model(", "must define model()"),
        ("def data(", "def no_data(", "must define data()"),
        ("targets[cut:]))", "targets[cut + 1 :]))", "equal numbers of rows"),
        ('return self.scores(model, batch)["loss"].mean()', "return 0.5", "one number, as a tensor, got 0.5"),
        ('"error": difference.abs()', '"error": 1.0', "scores() must return a dict of tensors"),
        ("def model(", "def evaluate(self, *_): pass\n\n    def model(", "evaluate() must return a dict"),
        ("batches = (8, 32)", "batches = 8", "batches must be a tuple of whole numbers, got 8"),
        ("epochs = 3", "epochs = '3'", "epochs must be a whole number, got '3'"),
        ("epochs = 3", "epochs = 3\n    lrs = {'sngm': 0.1}", "lrs must have a tuple of learning rates"),
        ("usual_lrs = (0.01, 0.03, 0.1)", "usual_lrs = 0.1", "usual_lrs must be a tuple of learning rates, got 0.1"),
        ("def model(", "@classmethod\n    def usual(cls, batch): pass\n\n    def model(", "usual() must return a dict"),
        ("targets[cut:]))", "targets[cut:]).__class__(inputs[:0], targets[:0]))", "test holds no samples"),
        ("return Splits(", "return Splits(test=[1, 2], train=(1, 2)) or (", "that takes a tensor of indices"),
        ("return Splits(", "return Splits((i for i in inputs), None) or (", "got a generator"),
        ("targets[cut:]))", "targets[cut:]), [1, 2])", "validation must have __len__"),
        ("import torch\n", "import sys\nsys.exit(0)\nimport torch\n", "calls sys.exit(0) when it is loaded"),
    ],
)  # fmt: skip
def test_what_a_task_of_the_users_has_wrong_is_one_line(old, new, said):
    assert OWN_TASK.count(old) == 1
    refused(sngm(f"train {write(OWN_TASK.replace(old, new))} --epochs 1"), said)


def test_defaults_of_a_task_may_be_anything_that_holds_numbers():
    text = OWN_TASK.replace("batches = (8, 32)", "batches = range(8, 33, 8)")
    text = text.replace("usual_lrs = (0.01, 0.03, 0.1)", "usual_lrs = torch.logspace(-2, -1, 3).numpy()")
    plan = sngm(f"compare {write(text)} --methods sngm --dry-run --json").json
    assert plan["study"]["batches"] == [8, 16, 24, 32]


def test_a_metric_that_is_no_number_is_told():
    task = write(OWN_TASK.replace('"error": difference.abs()', '"error": difference.abs() * float("nan")'))
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as for users, not as errors
        shown = sngm(f"train {task} --epochs 1")
    assert shown.code == 0
    assert "test_error is nan, the run has no valid result" in shown.err


def test_scores_without_the_metric_are_refused():
    task = write(OWN_TASK.replace('metric = "error"', 'metric = "accuracy"'))
    refused(sngm(f"train {task}"), "scores() gives loss, error but not its metric accuracy")


# ---------------------------------------------------------------- a full disk


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(monkeypatch):
    line = f"train digits {QUICK.replace('--epochs 1', '--epochs 3')} --checkpoint-every 2 --out"
    whole = sngm(f"{line} whole --json").json
    fsync, calls = os.fsync, []

    def full(number):
        calls.append(number)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused(sngm(f"{line} run"), "No space left on device", code=1)
    json.loads(Path("run/run.json").read_text())
    assert not list(Path("run").glob(".*.tmp"))
    assert sngm(f"{line} run --json").json["result"] == whole["result"]


# ---------------------------------------------------------------- signals


def test_an_interrupted_run_says_how_to_go_on_and_ends_the_same(monkeypatch):
    line = f"train digits {QUICK} --out"
    whole = sngm(f"{line} whole --json").json
    asked = iter([False, False, True])
    monkeypatch.setattr("sngm.api.stop_on_signal", lambda: nullcontext(lambda: next(asked)))
    stopped = sngm(f"{line} run")
    refused(stopped, "interrupted; stopped at step 3 of 10; the same command resumes from there", code=130)
    assert re.search(documented("resuming.md", "sngm: interrupted"), stopped.err)
    monkeypatch.setattr("sngm.api.stop_on_signal", lambda: nullcontext(lambda: False))
    assert sngm(f"{line} run --json").json["result"] == whole["result"]


def test_ctrl_c_anywhere_else_is_one_line(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("sngm.tasks.names", interrupt)
    refused(sngm("tasks"), "interrupted", code=130)


def test_an_interrupt_while_the_command_line_is_imported_is_one_line(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("sngm.__main__._missing_packages", interrupt)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("sngm.__main__").main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "sngm: interrupted\n"


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([SCRIPT, "methods"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- names with settings


def test_lists_split_at_commas_outside_brackets():
    assert split_list("msgd,sngm(weight_decay=8e-4,scope=tensor), adam(betas=(0.5,0.9))") == [
        "msgd", "sngm(weight_decay=8e-4,scope=tensor)", "adam(betas=(0.5,0.9))",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", ",", "a,", ",a", "a,,b", "a(", "a)", "a)(b", "'a", "a(b='c)"])
def test_broken_lists_are_refused(text):
    with pytest.raises(UsageError, match="list separated by commas"):
        split_list(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8e-4", 8e-4), ("3", 3), ("True", True), ("false", False), ("none", None), ("tensor", "tensor"),
        ("'3'", "3"), ("(0.5, 1)", (0.5, 1)), ("1+", "1+"), ("__import__('os')", "__import__('os')"),
        ("(" * 9999, "(" * 9999), ("nan", "nan"), ("a b", "a b"), ("3\0", "3\0"),
    ],
)  # fmt: skip
def test_values_are_read_as_python_literals_and_nothing_is_run(text, value):
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


@pytest.mark.parametrize(
    ("name", "settings"), [("sngm", {}), ("sngm", {"weight_decay": 8e-4, "scope": "tensor"}), ("a", {"b": (0.5, 1)})]
)
def test_calls_are_written_as_they_are_read(name, settings):
    assert parse_call(format_call(name, settings)) == (name, settings)


@pytest.mark.parametrize("text", ["", "a b", "a(b)", "a(b=)", "a(=1)", "a(b=1,b=2)", "a(b=1)c", "a=1", "a,b"])
def test_broken_calls_are_refused(text):
    with pytest.raises(UsageError):
        parse_call(text)


def test_a_setting_may_hold_an_equals_sign():
    assert parse_settings(["name=a=b"]) == {"name": "a=b"}
