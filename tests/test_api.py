"""The Python API, used as in a notebook."""

import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import console
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import sngm
from sngm import tasks
from sngm.cli import exit_codes
from sngm.errors import DataMissing, Failed, UsageError
from sngm.optim import registry
from sngm.study import launch, worker
from sngm.study.executors.local import open_local

torch.manual_seed(0)
X = torch.randn(240, 4)
Y = (X[:, 0] > 0).long()
TRAIN, TEST = TensorDataset(X[:160], Y[:160]), TensorDataset(X[160:], Y[160:])
QUIET = {"progress": False, "device": "cpu"}

pytestmark = pytest.mark.usefixtures("in_one_process")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    methods, local = dict(registry.METHODS), dict(tasks.LOCAL)
    yield
    for now, before in ((registry.METHODS, methods), (tasks.LOCAL, local)):
        now.clear()
        now.update(before)


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def task(**more) -> sngm.Task:
    return sngm.Task.from_torch(linear, TRAIN, TEST, **{"epochs": 2, "batches": (20, 40)} | more)


def plain(params, lr):
    return torch.optim.SGD(params, lr=lr)


# ---------------------------------------------------------------- train


def test_train_returns_result_history_and_model():
    run = sngm.train("digits", method="sngm", lr=0.1, batch=512, epochs=2, seed=0, settings={"width": 2}, **QUIET)
    assert run.status == "finished"
    assert run.result["test_accuracy"] == run.history[-1]["test_accuracy"]
    assert [epoch["epoch"] for epoch in run.history] == [1, 2]
    assert not run.model.training
    assert run.folder.parent == Path("runs")
    assert json.loads((run.folder / "run.json").read_text())["result"] == run.result
    assert "test accuracy" in repr(run)
    assert "<table>" in run._repr_html_()


def test_changed_or_lost_metrics_are_told():
    folder = sngm.train(task(), lr=0.1, **QUIET).folder
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole.replace("test_accuracy", "test_accurate"))
    with pytest.warns(UserWarning, match=r"metrics.jsonl was lost, or changed after it was written"):
        assert "test_accurate" in sngm.load_run(folder).history[0]
    metrics.unlink()
    with pytest.warns(UserWarning, match=r"metrics.jsonl was lost, or changed"):
        assert sngm.load_run(folder).history == []
    metrics.write_text(whole + "x{")
    with pytest.warns(UserWarning, match="was lost"), pytest.raises(UsageError, match=r"metrics.jsonl is broken"):
        print(sngm.load_run(folder).history)


def test_a_diverged_run_says_why():
    inputs, labels = TRAIN.tensors
    bad = TensorDataset(torch.full_like(inputs, torch.nan), labels)
    with pytest.warns(UserWarning, match="the run diverged: the loss is NaN or infinite; lower the learning rate, or"):
        assert (
            sngm.train(sngm.Task.from_torch(linear, bad, TEST, epochs=1, batches=(20,)), lr=0.1, **QUIET).result == {}
        )
    with pytest.warns(UserWarning, match="the run diverged: test_loss is NaN or infinite"):
        sngm.train(sngm.Task.from_torch(linear, TRAIN, bad, epochs=1, batches=(20,)), lr=0.1, **QUIET)


def test_targets_may_be_class_probabilities():
    inputs, labels = TRAIN.tensors
    soft = TensorDataset(inputs, torch.nn.functional.one_hot(labels).float())
    by_number, by_probability = (
        sngm.train(sngm.Task.from_torch(linear, data, data, epochs=2, batches=(20,)), lr=0.1, **QUIET).result
        for data in (TRAIN, soft)
    )
    assert by_probability == pytest.approx(by_number)


def test_the_folder_of_a_study_is_no_run(tmp_path):
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds no run .* it holds a study, whose runs are in .*runs"):
        sngm.load_run(tmp_path)


def test_train_is_the_command_line(tmp_path):
    ours = sngm.train("digits", "sngm(momentum=0.8)", lr=0.1, batch=512, epochs=1, settings={"width": 2}, **QUIET)
    words = "train digits --method 'sngm(momentum=0.8)' --lr 0.1 --batch 512 --epochs 1 --set width=2 --device cpu"
    theirs = console.sngm(f"{words} --json --out {tmp_path / 'theirs'}").json
    assert theirs["config"] == ours.record["config"]
    assert theirs["hash"] == ours.record["hash"]


def test_the_same_call_loads_the_finished_run():
    first = sngm.train(task(), lr=0.1, batch=20, **QUIET)
    started = (first.folder / "run.json").stat().st_mtime_ns
    again = sngm.train(task(), lr=0.1, batch=20, **QUIET)
    assert again.folder == first.folder
    assert (first.folder / "run.json").stat().st_mtime_ns == started
    assert sngm.load_run(str(first.folder)).result == first.result


@pytest.mark.parametrize("folder", [None, 3])
def test_a_folder_that_is_no_path_is_named(folder):
    for load in (sngm.load_run, sngm.load_study):
        with pytest.raises(UsageError, match=f"`folder` must be a string or a path, got {folder}"):
            load(folder)


def test_another_model_is_another_run():
    first = sngm.train(task(), lr=0.1, batch=20, **QUIET)
    wide = sngm.Task.from_torch(lambda: nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2)), TRAIN, TEST, name="linear")
    assert sngm.train(wide, lr=0.1, batch=20, epochs=2, **QUIET).folder != first.folder


def test_the_model_of_a_run_needs_the_task_of_the_run(monkeypatch):
    run = sngm.train(task(), lr=0.1, batch=20, **QUIET)
    wide = sngm.Task.from_torch(lambda: nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2)), TRAIN, TEST, name="wide")
    words = r"holds a run of linear-.*; `task` is {}: another task, or a changed one"
    for other, name in ((wide, "wide-.*"), (Mine, "test_api:Mine"), ("digits", "digits")):
        with pytest.raises(UsageError, match=words.format(name)):
            sngm.load_run(run.folder, task=other)
    monkeypatch.setattr(tasks, "LOCAL", {})  # as in a new process
    with pytest.raises(UsageError, match=words.format("wide-.*")):
        sngm.load_run(run.folder, task=wide)
    assert isinstance(sngm.load_run(run.folder, task=task()).model, nn.Linear)


def test_a_task_may_have_two_names(monkeypatch):
    Path("line.py").write_text(console.OWN_TASK)
    monkeypatch.syspath_prepend(".")
    run = sngm.train("line.py:Line", lr=0.1, batch=8, epochs=1, **QUIET)
    from line import Line

    assert sngm.load_run(run.folder, task=Line).folder == run.folder
    with pytest.raises(UsageError, match=r"line.py:Line; `task` is digits"):
        sngm.load_run(run.folder, task="digits")


def test_a_run_of_other_data_in_the_same_folder_is_refused():
    sngm.train(task(), lr=0.1, batch=20, out="here", **QUIET)
    other = sngm.Task.from_torch(linear, TensorDataset(-X[:160], Y[:160]), TEST, epochs=2)
    with pytest.raises(UsageError, match=r"holds (another run|a run on other data)"):
        sngm.train(other, lr=0.1, batch=20, out="here", **QUIET)


class Mine(sngm.Task):
    """A class that no other process can import under this name."""

    epochs = 1
    batches = (20,)

    def __init__(self, width: int = 3):
        self.width = width

    def data(self):
        return tasks.Splits(tasks.Tensors(X[:160], Y[:160]), tasks.Tensors(X[160:], Y[160:]))

    def model(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.Linear(self.width, 2))


def test_classes_and_instances_are_tasks():
    by_class = sngm.train(Mine, lr=0.1, settings={"width": 5}, **QUIET)
    by_instance = sngm.train(Mine(5), lr=0.1, **QUIET)
    assert by_class.record["hash"] == by_instance.record["hash"]
    assert sngm.train(tasks.find("digits")(width=2), lr=0.1, batch=512, epochs=1, **QUIET).record["config"]["task"] == (
        "digits"
    )


class Noisy(Dataset):
    """Samples with random noise that differs at each access."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return X[i] + 0.1 * torch.randn(4), int(Y[i])


def test_random_samples_of_a_dataset_are_those_of_an_unbroken_run(tmp_path):
    noisy = sngm.Task.from_torch(linear, Noisy(), TEST, epochs=3)
    whole = sngm.train(noisy, lr=0.1, batch=16, out="whole", **QUIET)
    from sngm.errors import Interrupted
    from sngm.training import Options
    from sngm.training import train as loop

    steps = []
    options = Options(device="cpu", progress=lambda step, *_: steps.append(step), should_stop=lambda: steps[-1] == 7)
    with pytest.raises(Interrupted):
        loop(whole.config, tmp_path / "broken", options)
    again = sngm.train(noisy, lr=0.1, batch=16, out="broken", **QUIET)
    assert again.result == whole.result
    for ours, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_regression_has_its_own_loss_and_metric():
    data = TensorDataset(X[:160], X[:160, :1] * 3), TensorDataset(X[160:], X[160:, :1] * 3)

    def error(outputs, target):
        return (outputs - target).abs().mean(1)

    made = sngm.Task.from_torch(
        lambda: nn.Linear(4, 1), *data, loss=nn.functional.mse_loss, metric=error, higher_is_better=False, epochs=1
    )
    result = sngm.train(made, lr=0.1, batch=20, **QUIET).result
    assert result["test_error"] > 0
    assert result["test_loss"] > 0


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"lr": "fast"}, UsageError, "`lr` must be a number"),
        ({"lr": float("nan")}, UsageError, "`lr` must be"),
        ({"epochs": 1.5}, UsageError, "`epochs` must be"),
        ({"step": "fast"}, UsageError, "`step` must be one of"),
        ({"ephocs": 3}, TypeError, "did you mean 'epochs'"),
        ({"method": 3}, TypeError, "a method is a name"),
        ({"method": "sgnm"}, UsageError, "did you mean 'signum' or 'sngm'"),
        ({"track": "paper"}, UsageError, "`track` must be one of"),
        ({"settings": {"nobody": 1}}, UsageError, "no setting 'nobody'"),
    ],
)
def test_a_wrong_argument_is_named(given, error, words):
    with pytest.raises(error, match=words):
        sngm.train("digits", **{"lr": 0.1, **given}, **QUIET)
    assert not Path("runs").exists()


@pytest.mark.parametrize("wrong", [3, nn.Linear, nn.Linear(2, 2), None])
def test_something_that_is_no_task_is_refused(wrong):
    with pytest.raises(TypeError, match="task must be a name"):
        sngm.train(wrong)


def test_from_torch_refuses_what_it_cannot_use():
    with pytest.raises(TypeError, match="function that builds a new model"):
        sngm.Task.from_torch(nn.Linear(4, 2), TRAIN, TEST)
    with pytest.raises(UsageError, match="test_dataset must be a map-style dataset"):
        sngm.Task.from_torch(linear, TRAIN, iter([]))
    for empty in ([], TensorDataset(X[:0], Y[:0])):
        with pytest.raises(UsageError, match="test_dataset has no samples"):
            sngm.Task.from_torch(linear, TRAIN, empty)
    with pytest.raises(TypeError, match="has no argument 'epoch'"):
        task(epoch=3)
    with pytest.raises(ValueError, match="metric must be"):
        task(metric="auc")
    with pytest.raises(UsageError, match=r"tuple \(input, target\)"):
        sngm.train(sngm.Task.from_torch(linear, X, TEST), lr=0.1, **QUIET)


# ---------------------------------------------------------------- compare


def test_compare_takes_names_classes_and_functions(monkeypatch):
    methods = ["sngm(weight_decay=8e-4)", torch.optim.AdamW, plain]
    study = sngm.compare(task(), methods=methods, batches=[20], lrs=[0.1], seeds=2, **QUIET)
    assert [cell.method for cell in study.summary.cells.values()] == [
        "sngm(weight_decay=0.0008)", "adamw", "plain",
    ]  # fmt: skip
    assert study.best(batch=20) == study.best()
    assert study.best().n == 2
    assert len(study.runs) == 6
    assert "| plain |" in study.table()
    assert "<th>batch 20</th>" in study._repr_html_()
    assert study.report("page.html") == Path("page.html")
    assert "</html>" in Path("page.html").read_text()
    assert study.report("new/folder/page.html").is_file()
    with pytest.raises(ValueError, match="batch must be one of 20"):
        study.best(batch=21)
    before = {run.folder: run.result for run in study.runs}
    monkeypatch.setattr(worker, "make", None)  # nothing is run again
    assert {run.folder: run.result for run in sngm.load_study(study.folder).runs} == before
    assert sngm.compare(task(), methods=methods, batches=[20], lrs=[0.1], seeds=2, **QUIET).folder == study.folder


def test_worker_processes_give_the_numbers_of_this_process(monkeypatch):
    def own(params, lr):  # no other process can import it
        return plain(params, lr)

    monkeypatch.setattr(launch, "open_local", open_local)
    given = {"methods": [own], "batches": [20], "lrs": [0.1], "seeds": 1, **QUIET}
    apart = sngm.compare(task(), out="apart", **given)
    monkeypatch.setattr(worker, "pack_local", lambda: (_ for _ in ()).throw(TypeError("cannot pickle")))
    with pytest.warns(UserWarning, match="runs go one after another in this process"):
        here = sngm.compare(task(), out="here", **given)
    assert [run.result for run in here.runs] == [run.result for run in apart.runs]


def test_a_study_as_a_frame_has_a_row_for_each_run():
    pandas = pytest.importorskip("pandas")
    study = sngm.compare(task(), methods=["sngm"], batches=[20], lrs=[0.1], seeds=2, **QUIET)
    frame = study.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["seed"]) == [0, 1]
    assert frame["test_accuracy"].between(0, 1).all()


def test_to_frame_says_what_to_install(monkeypatch):
    study = sngm.compare(task(), methods=["sngm"], batches=[20], lrs=[0.1], seeds=1, **QUIET)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        study.to_frame()


def test_a_failing_method_is_named():
    def broken(params, lr):
        raise RuntimeError("of my own")

    with pytest.raises((UsageError, Failed, RuntimeError), match="of my own"):
        sngm.compare(task(), methods=[broken], batches=[20], lrs=[0.1], seeds=1, **QUIET)


def test_other_data_or_another_loss_is_another_study():
    def accuracy(dataset, loss):
        made = sngm.Task.from_torch(linear, dataset, TEST, loss=loss, epochs=2, batches=(20,))
        study = sngm.compare(made, methods=["sngm"], lrs=[0.1], seeds=1, **QUIET)
        return study.folder, study.runs[0].result["test_accuracy"]

    flipped = TensorDataset(X[:160], 1 - Y[:160])
    found = [accuracy(TRAIN, nn.CrossEntropyLoss()), accuracy(flipped, nn.CrossEntropyLoss())]
    found.append(accuracy(TRAIN, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0]))))
    assert len({folder for folder, _ in found}) == 3
    assert found[0][1] > 0.8
    assert found[1][1] < 0.2
    assert accuracy(TRAIN, nn.CrossEntropyLoss()) == found[0]


def test_a_study_of_other_data_leaves_the_one_in_the_folder_whole():
    settings = {"methods": ["sngm"], "lrs": [0.1, 0.3], "seeds": 1, "out": "s", **QUIET}

    class Own(sngm.Task):
        epochs, batches, labels = 1, (20,), Y

        def data(self):
            return tasks.Splits(train=tasks.Tensors(X[:160], self.labels[:160]), test=tasks.Tensors(X[160:], Y[160:]))

        def model(self):
            return linear()

        def loss(self, model, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        def scores(self, model, batch):
            return {"accuracy": model(batch[0]).argmax(1) == batch[1], "loss": torch.zeros(len(batch[1]))}

    study = sngm.compare(Own, **settings)
    before = (study.folder / "study.json").read_text(), study.table()
    Own.labels = 1 - Y
    with pytest.raises(UsageError, match=r"holds (another study|a run on other data)"):
        sngm.compare(Own, **settings)
    assert ((study.folder / "study.json").read_text(), sngm.load_study("s").table()) == before


def test_what_a_users_function_raised_is_shown_with_its_traceback():
    def broken(outputs, target):
        raise RuntimeError("my loss broke")

    with pytest.raises(Failed, match=r"1 run failed, sngm at batch 20: RuntimeError: my loss broke") as caught:
        sngm.compare(task(loss=broken), methods=["sngm"], batches=[20], lrs=[0.1], seeds=1, **QUIET)
    assert "in broken" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"methods": []}, "`methods` is empty"),
        ({"lrs": []}, "`lrs` is empty"),
        ({"batches": []}, "`batches` is empty"),
        ({"seeds": [1, 2]}, r"`seeds` must be a whole number, got \[1, 2\]"),
        ({"seeds": 0}, "must be at least 1 and at most 10,000, got 0"),
        ({"methods": None}, "methods must be a list, got None"),
        ({"epochs": "2"}, "`epochs` must be a whole number, got '2'"),
        ({"workers": "a"}, "`workers` must be a whole number"),
        ({"jobs": 1.5}, "`jobs` must be a whole number, got 1.5"),
        ({"deterministic": "no"}, "`deterministic` must be True or False"),
        ({"out": 1}, "`out` must be a string or a path, got 1"),
        ({"settings": {1: 2}}, "`settings` must be a dict whose keys are strings"),
        ({"seeds": 2.5}, "`seeds`.* must be"),
        ({"batches": [50.5]}, "`batches` must hold whole numbers >= 1, got 50.5"),
        ({"settings": [1]}, r"`settings` must be a dict whose keys are strings, got \[1\]"),
    ],
    ids=str,
)
def test_values_of_the_wrong_kind_are_named(given, words):
    with pytest.raises((UsageError, TypeError), match=words):
        sngm.compare(task(), **{"methods": ["sngm"], "batches": [20], "lrs": [0.1], "seeds": 1, **given}, **QUIET)


@pytest.mark.parametrize(
    ("argument", "call", "given"),
    [
        ("track", "train", {"track": "paper"}),
        ("out", "train", {"out": "study"}),
        ("out", "train", {"out": "file"}),
        ("out", "train", {"out": "broken"}),
        ("restart", "train", {"out": "broken"}),
        ("lr", "train", {"method": "sngm(lr=0.1)"}),
        ("micro", "train", {"method": "clars", "batch": 32}),
        ("clip", "train", {"method": "extrap-sgd", "batch": 32, "workers": 2, "clip": 1.0}),
        ("data_dir", "train", {"task": "wikitext2-lstm", "data_dir": Path("file")}),
        ("out", "compare", {"out": "broken"}),
        ("out", "compare", {"out": "study"}),
        ("jobs", "compare", {"jobs": 0}),
        ("seeds", "compare", {"seeds": 10**9}),
        ("methods", "compare", {"methods": ["sngm", "sngm"]}),
        ("search", "compare", {"search": ["lr", "lr"], "trials": 2}),
        ("samples", "probe", {"samples": 0}),
        ("out", "probe", {"out": "study"}),
        ("gradients", "advise", {"gradients": 0.5}),
    ],
    ids=str,
)
def test_a_message_names_the_argument_and_the_command_line_its_flag(argument, call, given):
    Path("file").touch()
    for folder, record in (("study", "study.json"), ("broken", "run.json")):
        Path(folder).mkdir()
        Path(folder, record).write_text("{}")
    rest = dict(given)
    name = rest.pop("task", "digits")
    with pytest.raises((UsageError, DataMissing)) as caught:
        getattr(sngm, call)(name, **rest, **QUIET)
    assert f"`{argument}`" in str(caught.value)
    assert " --" not in f" {caught.value}"
    shown = exit_codes.with_flags(str(caught.value))
    assert f"--{argument.replace('_', '-')}" in shown
    assert "`" not in shown


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train digits --track paper", "--track must be one of"),
        ("train digits --out file", "name another with --out"),
        ("train wikitext2-lstm --data-dir file", "with --data-dir"),
        ("compare digits --methods sngm --jobs 0", "--jobs must be"),
    ],
)
def test_the_command_line_shows_flags(line, words):
    Path("file").touch()
    console.refused(console.sngm(f"{line} --device cpu"), words, code=3 if "data-dir" in line else 2)


def test_the_first_argument_of_an_optimizer_function_may_have_any_name():
    study = sngm.compare(
        task(), methods=[lambda p, lr: torch.optim.SGD(p, lr)], batches=[20], lrs=[0.1], seeds=1, **QUIET
    )
    assert study.runs[0].status == "finished"


def test_numbers_of_numpy_are_numbers():
    run = sngm.train(
        task(), lr=np.float32(0.1), batch=np.int64(20), seed=None, epochs=1, **QUIET | {"device": torch.device("cpu")}
    )
    assert (run.config.lr, run.config.batch, run.config.seed) == (0.1, 20, 0)
    grids = {"sngm": np.array([0.1]), "msgd": [np.float64(0.1)]}
    study = sngm.compare(task(), ["sngm", "msgd"], np.array([20]), lrs=grids, seeds=1, epochs=1, **QUIET)
    assert study.best(20).lr == 0.1


def test_a_model_that_was_trained_before_is_refused():
    net = linear()
    shared = sngm.Task.from_torch(lambda: nn.Sequential(net), TRAIN, TEST)
    sngm.train(shared, lr=0.1, batch=20, epochs=1, **QUIET)
    with pytest.raises(UsageError, match="must build a new model at every call"):
        sngm.train(shared, lr=0.1, batch=20, epochs=1, seed=1, **QUIET)


def test_an_optimizer_function_that_misses_parameters_or_the_rate_is_named():
    def own(method):
        return sngm.train(task(), method, lr=0.1, batch=20, epochs=1, **QUIET)

    def foreign(params, lr):
        return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr)

    for _ in range(2):
        with pytest.raises(UsageError, match="parameters that it was not given"):
            own(foreign)
    with pytest.warns(UserWarning, match="of . parameters are not in the optimizer"):
        own(lambda params, lr: torch.optim.SGD(list(params)[:1], lr))
    with pytest.warns(UserWarning, match="ignores the learning rate"):
        own(lambda params, lr: torch.optim.SGD(params, 0.5))


def test_the_held_out_part_is_part_of_a_task():
    names = {tasks.name_of(task(holdout=holdout))[0] for holdout in (0.2, 0.3)}
    assert len(names) == 2
    with pytest.raises(UsageError, match="choosing learning rates needs a validation set, or a `holdout` above 0"):
        sngm.train(task(holdout=0), part="select", **QUIET)
    with pytest.raises(UsageError, match="holdout must be a number >= 0 and < 1, got 2"):
        sngm.train(task(holdout=2), **QUIET)


def test_the_direction_of_a_known_metric_cannot_be_wrong():
    with pytest.raises(ValueError, match="higher_is_better=True is wrong for the metric loss"):
        task(metric="loss", higher_is_better=True)


def test_a_metric_may_not_take_the_name_of_the_loss():
    def loss(outputs, target):
        return outputs.argmax(1) == target

    with pytest.raises(ValueError, match="another name than loss"):
        task(metric=loss)


def mae(outputs, target):
    return (outputs.argmax(1) - target).abs().float().mean()


def test_the_direction_of_a_metric_must_be_said_and_is_kept_with_each_run(tmp_path):
    with pytest.raises(TypeError, match="pass higher_is_better=True or False with the metric mae"):
        task(metric=mae)
    with pytest.raises(TypeError, match="higher_is_better must be True or False, got 'no'"):
        task(metric=mae, higher_is_better="no")
    own = task(metric=mae, higher_is_better=False)
    study = sngm.compare(own, methods=["sngm", "msgd"], batches=[20], lrs=[1e-6, 0.3], seeds=1, out=tmp_path, **QUIET)
    scores = {run.record["label"]: run.result["test_mae"] for run in study.runs if "test_mae" in run.result}
    assert study.best().mean == min(scores.values()) < max(scores.values())
    assert sngm.load_study(tmp_path / "runs").best()[:2] == study.best()[:2]  # without the record of the study
    page = study.report().read_text()
    assert "made in a Python session" in page
    assert "sngm train linear" not in page


def test_a_loss_of_one_element_is_a_number_and_a_model_without_parameters_is_refused():
    def loss(outputs, target):
        return nn.functional.cross_entropy(outputs, target)[None]

    assert sngm.train(task(loss=loss), lr=0.1, batch=20, **QUIET).result["test_loss"] > 0
    frozen = sngm.Task.from_torch(lambda: nn.Linear(4, 2).requires_grad_(False), TRAIN, TEST)
    with pytest.raises(UsageError, match="no parameter of the model requires a gradient"):
        sngm.train(frozen, lr=0.1, batch=20, **QUIET)
    with pytest.raises(UsageError, match="`out` is empty"):
        sngm.train(task(), lr=0.1, batch=20, out="", **QUIET)
    with pytest.raises(UsageError, match="`lrs` must hold numbers > 0, got None"):
        sngm.compare(task(), methods=["sngm"], lrs=[0.1, None], **QUIET)


SCRIPT = """
import torch, sngm
from torch import nn
from sngm.tasks import Splits, Tensors

class Own(sngm.Task):
    def data(self):
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        return Splits(Tensors(x, (x.sum(1) > 0).long()), Tensors(x, (x.sum(1) > 0).long()))
    def model(self):
        return nn.Linear(3, 2)

study = sngm.compare(Own, ["sngm"], [32], lrs=[0.1, 0.3], seeds=2, epochs=1, jobs=2, progress=False)
print(study.runs[0].folder)
"""


@pytest.mark.slow
def test_a_class_of_a_script_is_compared_in_worker_processes():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(UsageError, match=r"was made in another process; .*load_run\(folder, task=task\)"):
        _ = sngm.load_run(done.stdout.splitlines()[-1]).model


def test_lists_must_be_lists():
    with pytest.raises(TypeError, match="methods must be a list"):
        sngm.compare(task(), methods="sngm")
    with pytest.raises(TypeError, match="batches must be a list"):
        sngm.compare(task(), methods=["sngm"], batches=32)


# ---------------------------------------------------------------- the user's own methods


def test_a_registered_method_is_like_a_built_in_one():
    sngm.register("heavy", torch.optim.SGD, {"momentum": 0.9, "nesterov": True})
    run = sngm.train(task(), "heavy(momentum=0.8)", lr=0.1, batch=20, **QUIET)
    assert run.record["label"] == "heavy(momentum=0.8)"
    assert run.record["config"]["method_source"]
    assert "heavy" in sngm.optim.names()


@pytest.mark.parametrize(
    ("name", "build", "words"),
    [("sngm", plain, "built-in"), ("a b", plain, "letters, digits"), ("mine", 3, "build must be"),
     ("mine", lambda params: None, "argument 'lr'")],
)  # fmt: skip
def test_a_method_that_cannot_be_registered_is_refused(name, build, words):
    with pytest.raises((ValueError, TypeError), match=words):
        sngm.register(name, build)


def test_an_edited_method_is_another_run():
    namespace = {"torch": torch}
    folders = []
    for momentum in ("0.5", "0.9"):
        path = Path(f"m{momentum[-1]}.py")
        path.write_text(f"import torch\ndef own(params, lr): return torch.optim.SGD(params, lr, momentum={momentum})\n")
        exec(compile(path.read_text(), str(path.resolve()), "exec"), namespace)
        folders.append(sngm.train(task(), namespace["own"], lr=0.1, batch=20, **QUIET).folder)
    assert folders[0] != folders[1]


# ---------------------------------------------------------------- probe and advise


def test_probe_measures_a_task_and_runs(capsys):
    found = sngm.probe(task(), batch=20, lr=0.1, samples=32, iterations=2, points=2, out="probe", **QUIET)
    assert found["sigma"] > 0
    assert "sigma" in repr(found)
    assert "sigma" in found._repr_html_()
    assert json.loads(Path("probe/probe.json").read_text())["sigma"] == found["sigma"]
    run = sngm.train(task(), lr=0.1, batch=20, **QUIET)
    assert len(sngm.probe([run.folder], samples=32, iterations=2, **QUIET)["runs"]) == 1
    assert capsys.readouterr() == ("", "")


def test_bool_labels_are_refused_by_name():
    x = torch.randn(40, 4)
    data = TensorDataset(x, x[:, 0] > 0)
    own = sngm.Task.from_torch(lambda: nn.Linear(4, 2), data, data, epochs=1, batches=(20,))
    with pytest.raises(UsageError, match=r"labels are bool.*labels.long\(\)"):
        sngm.train(own, lr=0.1, **QUIET)


def test_advise_carries_a_recipe_over():
    advice = sngm.advise(task(), from_sgd={"lr": 0.1, "batch": 20, "weight_decay": 1e-4}, to_batch=80, **QUIET)
    assert advice["batch"] == 80
    assert advice["lr"] > 0
    assert advice["weight_decay"] == pytest.approx(2e-4)
    assert advice["command"] == f'sngm.train(task, "sngm(weight_decay=0.0002)", lr={advice["lr"]:g}, batch=80)'
    budget = sngm.advise(gradients=8e6, gap=2.3, L=20, sigma=15, progress=False)
    assert {row["method"] for row in budget["methods"]} == {"msgd", "sngm"}
    with pytest.raises(UsageError, match="`to_batch`, `last_batch` and `verify` need a recipe"):
        sngm.advise(gradients=8e6, to_batch=20)


# ---------------------------------------------------------------- the package


def test_no_submodule_hides_a_function():
    modules = {module.name for module in pkgutil.iter_modules(sngm.__path__)}
    assert modules & set(sngm.__all__) == {"integrations", "optim"}
    for name in ("train", "compare", "probe", "advise", "load_run", "load_study", "register", "load"):
        assert inspect.isfunction(getattr(sngm, name)), name


def test_signatures_and_docstrings_list_every_option():
    for function in (sngm.train, sngm.compare, sngm.probe):
        names = list(inspect.signature(function).parameters)
        assert {"epochs", "precision", "device", "progress", "out"} <= set(names)
        assert "options" not in names
        for name in names:
            assert f"{name}:" in inspect.getdoc(function), name


CORE = f"""
import sys
sys.modules.update(dict.fromkeys({[*sngm._TRAIN]!r}))  # as if they were not installed

from sngm import SNGM
assert "sngm.api" not in sys.modules, "the optimizers need no trainer"

from sngm import *
assert CLARS and load_run and "compare" not in globals()

import sngm
assert "load_run" in dir(sngm) and "compare" not in dir(sngm)
try:
    sngm.compare
except ImportError as error:
    print(error)
"""


def test_a_core_install_has_the_optimizers_and_names_the_extra_that_is_missing():
    done = subprocess.run([sys.executable, "-c", CORE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    packages = "matplotlib, rich, scikit-learn, scipy, typer"
    assert done.stdout == f"sngm.compare needs {packages}: run pip install 'sngm[train]'\n"


def test_the_package_exports_everything_if_all_is_installed():
    assert {"SNGM", "train", "compare", "load_study", "probe", "advise", "advise_model"} <= set(sngm.__all__)
    assert set(sngm.__all__) <= set(dir(sngm))
