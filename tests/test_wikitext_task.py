"""The language model's task through the command line: streams, recurrent state, and exact resumption."""

import math
import random
from pathlib import Path

import pytest
import torch
from console import refused, sngm
from runs import (
    assert_compiled_is_eager,
    assert_near,
    assert_near_end,
    assert_same_end,
    call_ranks,
    metrics,
    ranks,
    record,
    strict_json,
)
from runs import state as end_of
from torch import nn

from sngm import tasks
from sngm.data.wikitext import load_wikitext2
from sngm.errors import Interrupted
from sngm.models.lstm import WordLSTM
from sngm.training import BatchPlan, Options, resolve, rng, timing, train
from sngm.training.recurrent_state import RecurrentState

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not hold the official words"),
    pytest.mark.usefixtures("in_one_process"),
]
SMALL = {"width": 6, "bptt": 7}
LINE = "train wikitext2-lstm --device cpu --data-dir data --set width=6 --set bptt=7"
METHODS = ("msgd", "sngm", "lars-unscaled", "lamb", "extrap-sgd", "clars")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Write a text of 21 words in which each word depends on the previous one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "wikitext-2"
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for name, lines in (("train", 60), ("valid", 12), ("test", 12)):
        words = [0]
        while len(words) < 10 * lines:
            words.append((words[-1] + draw.choice([1, 1, 2])) % 20)
        text = [" ".join(f"w{word}" for word in words[i : i + 10]) for i in range(0, len(words), 10)]
        (folder / f"{name}.txt").write_text("\n".join(text) + "\n")


def config(method="msgd", **given):
    settings = SMALL | given.pop("settings", {})
    usual = {"lr": 0.5, "batch": 4, "epochs": 2, "precision": "float64", "schedule": "constant"}
    return resolve("wikitext2-lstm", method, task_settings=settings, **(usual | given))


def made(folder, wanted, stop_at=None, **options):
    """Train in this process; `stop_at` simulates a request to stop after that step."""
    reached = [0]

    def progress(step, steps, metrics):
        reached[0] = step

    return train(
        wanted, folder,
        Options(device="cpu", progress=progress, should_stop=lambda: reached[0] == stop_at, **options),
    )  # fmt: skip


# ---------------------------------------------------------------- comparison with word_language_model's loop


def plain_loop(wanted, clip):
    """Return the weights after training and the loss of each step, by a plain loop with torch's own layers."""
    corpus = load_wikitext2()
    rng.seed_torch(wanted.seed, rng.MODEL)
    model = WordLSTM(len(corpus.words), 6, 6, dropout=0.0).double()
    optimizer = torch.optim.SGD(model.parameters(), wanted.lr, momentum=0.9)
    rows = corpus.train[: len(corpus.train) // wanted.batch * wanted.batch].view(wanted.batch, -1)
    losses = []
    for _ in range(wanted.epochs):
        hidden = None
        for start in range(0, rows.shape[1] - 1, 7):
            inputs, targets = rows[:, start : start + 7][:, : rows.shape[1] - 1 - start], rows[:, start + 1 : start + 8]
            features, hidden = model(inputs, hidden)
            hidden = tuple(h.detach() for h in hidden)
            loss = nn.functional.cross_entropy(model.logits(features).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
    return model.state_dict(), losses


@pytest.mark.parametrize(("batch", "clip"), [(4, 0.25), (5, None), pytest.param(1, 0.25, marks=pytest.mark.slow)])
def test_training_is_word_language_models(tmp_path, monkeypatch, batch, clip):
    monkeypatch.setenv("SNGM_DATA", "data")
    wanted = config(batch=batch, settings={"dropout": 0.0}, clip=clip or math.inf)
    assert wanted.clip == clip
    made(tmp_path / "run", wanted)
    weights, losses = plain_loop(wanted, clip)
    assert_near(end_of(tmp_path / "run")["model"], weights, 1e-11)
    each = len(losses) // wanted.epochs
    for line, part in zip(metrics(tmp_path / "run"), (losses[:each], losses[each:]), strict=True):
        assert line["train_loss"] == pytest.approx(sum(part) / each, rel=1e-12)


def test_scores_are_of_the_whole_text_in_ten_streams(tmp_path, monkeypatch):
    monkeypatch.setenv("SNGM_DATA", "data")
    made(tmp_path / "run", config(epochs=1, settings={"dropout": 0.5}))
    corpus = load_wikitext2()
    model = WordLSTM(len(corpus.words), 6, 6).double().eval()
    model.load_state_dict(end_of(tmp_path / "run")["model"])
    for split, tokens in (("validation", corpus.valid), ("test", corpus.test)):
        rows = tokens[: len(tokens) // 10 * 10].view(10, -1)
        logits = model.logits(model(rows[:, :-1])[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
        assert metrics(tmp_path / "run")[-1][f"{split}_loss"] == pytest.approx(loss, rel=1e-12)
        assert metrics(tmp_path / "run")[-1][f"{split}_perplexity"] == pytest.approx(math.exp(loss), rel=1e-12)


def test_scores_do_not_depend_on_how_much_is_read_at_once(tmp_path, monkeypatch):
    from sngm.tasks import wikitext

    for size in (3, 350):
        monkeypatch.setattr(wikitext, "TEST_WINDOW", size)
        assert sngm(f"{LINE} --lr 0.5 --batch 4 --epochs 1 --precision float64 --out run{size}").code == 0
    a, b = (record(tmp_path / f"run{size}")["result"] for size in (3, 350))
    assert a == pytest.approx(b, rel=1e-12)


# ---------------------------------------------------------------- workers, processes, other kinds of steps


@pytest.mark.slow
@pytest.mark.parametrize("method", ["msgd", "sngm"])
def test_workers_and_micro_batches_read_their_own_streams(tmp_path, method):
    for workers, micro in ((1, 4), (2, 2), (4, 1), (1, 2)):
        wanted = config(method, workers=workers, micro=micro, epochs=1, settings={"dropout": 0.0})
        made(tmp_path / f"{workers}-{micro}", wanted, data_dir=tmp_path / "data")
        assert_near_end(tmp_path / f"{workers}-{micro}", tmp_path / "1-4", 1e-11)


@pytest.mark.slow
def test_processes_equal_virtual_workers_and_finish_what_one_began(tmp_path):
    more = "--method sngm --lr 0.5 --batch 4 --epochs 2 --workers 2 --precision float64 --schedule constant"
    line = f"{LINE} {more}"
    assert sngm(f"{line} --out one").code == 0
    with pytest.raises(Interrupted):
        made(tmp_path / "began", config("sngm", workers=2), stop_at=25, data_dir=tmp_path / "data")
    for name in ("two", "began"):
        assert ranks(2, *line.split(), "--out", name, log=tmp_path / "log") == [0, 0]
        assert_near_end(tmp_path / name, tmp_path / "one", 1e-11)
        for ours, theirs in zip(*(end_of(tmp_path / run)["carried"] for run in (name, "one")), strict=True):
            torch.testing.assert_close(ours, theirs)  # in both processes


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_cut_in_the_middle_of_an_epoch_ends_bit_for_bit_as_an_unbroken_one(tmp_path, method):
    more = {"workers": 2} if method in ("extrap-sgd", "clars") else {}
    wanted = config(method, lr=0.05, schedule="plateau", precision="float32", **more)
    made(tmp_path / "whole", wanted, data_dir=tmp_path / "data")
    with pytest.raises(Interrupted):
        made(tmp_path / "cut", wanted, stop_at=25, data_dir=tmp_path / "data")
    outputs, cells = end_of(tmp_path / "cut")["carried"]
    assert outputs.shape == cells.shape == (4, 2, 6)
    assert outputs.abs().min() > 0
    made(tmp_path / "cut", wanted, data_dir=tmp_path / "data")
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


def test_carried_rows_lie_as_an_exchange_between_gpus_wants_them():
    task = tasks.build("wikitext2-lstm", SMALL, Path("data"))
    state = RecurrentState(task, task.model(), BatchPlan.of(4), 0)
    assert [t.shape for t in state.rows] == [(4, 2, 6)] * 2
    assert all(t.is_contiguous() for t in state.gather())


def checkpoints_all_the_time(folder):
    """Train in one of several processes, each with its own clock, with frequent checkpoints."""
    timing.SECONDS_BETWEEN_CHECKPOINTS = 0.0
    made(Path(folder) / "often", config("sngm", workers=2), data_dir=Path(folder) / "data")


@pytest.mark.slow
def test_processes_write_checkpoints_together(tmp_path):
    call_ranks(2, checkpoints_all_the_time, str(tmp_path))
    made(tmp_path / "one", config("sngm", workers=2), data_dir=tmp_path / "data")
    assert_near_end(tmp_path / "often", tmp_path / "one", 1e-11)
    names = sorted(path.name for path in (tmp_path / "often").glob("checkpoint-*.pt"))
    assert names == ["checkpoint-00000040.pt", "checkpoint-00000048.pt"]


def test_a_text_without_a_validation_set_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    line = (
        "compare own.py:Own --methods msgd --batches 4 --lrs 0.1,0.2 --epochs 1 --seeds 1 --device cpu --data-dir data"
    )
    refused(sngm(line), "samples that follow one another cannot be held out; give it a validation set")


OWN = """
from sngm.tasks import Splits
from sngm.tasks.wikitext import WikiText2LSTM

class Own(WikiText2LSTM):
    def data(self):
        splits = super().data()
        return Splits(splits.train, splits.test)
"""


def test_hidden_states_matter_and_begin_anew_with_each_epoch(tmp_path, monkeypatch):
    task = tasks.find("wikitext2-lstm")
    follow = task.follow

    def forgetful(self, model, batch, carried):
        return follow(self, model, batch, tuple(torch.zeros_like(t) for t in carried))

    monkeypatch.setattr(task, "follow", forgetful)
    made(tmp_path / "forgetful", config(epochs=1), data_dir=tmp_path / "data")
    seen = []

    def watching(self, model, batch, carried):
        seen.append(carried[0].abs().max().item())
        return follow(self, model, batch, carried)

    monkeypatch.setattr(task, "follow", watching)
    made(tmp_path / "watched", config(epochs=2), data_dir=tmp_path / "data")
    each = len(seen) // 2
    assert [i for i, most in enumerate(seen) if most == 0] == [0, each]
    losses = [metrics(tmp_path / name)[0]["train_loss"] for name in ("watched", "forgetful")]
    assert abs(losses[0] - losses[1]) > 1e-6


@pytest.mark.slow
def test_an_extrapolation_without_length_is_msgd(tmp_path):
    """Both gradients start from the same recurrent state and dropout; the state of the second is kept."""
    made(tmp_path / "msgd", config(workers=2, clip=math.inf), data_dir=tmp_path / "data")
    wanted = config("extrap-sgd", workers=2, method_settings={"inner_lr": 0.0})
    made(tmp_path / "extrap", wanted, data_dir=tmp_path / "data")
    assert_near(end_of(tmp_path / "extrap")["model"], end_of(tmp_path / "msgd")["model"], 1e-11)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler instantiates an autograd function
def test_compiled_steps_compute_the_same(tmp_path, monkeypatch):
    assert_compiled_is_eager(monkeypatch, tmp_path, config(epochs=1), data_dir=tmp_path / "data")


# ---------------------------------------------------------------- the command line


@pytest.mark.slow
def test_it_learns_and_its_result_is_of_the_best_epoch(tmp_path):
    wide = LINE.replace("width=6", "width=16")
    found = sngm(f"{wide} --method adam --lr 0.05 --batch 2 --epochs 20 --json --out run")
    assert found.code == 0, found.err
    lines = metrics(tmp_path / "run")
    best = min(lines, key=lambda line: line["validation_perplexity"])
    assert found.json["result_epoch"] == best["epoch"]
    assert found.json["result"]["test_perplexity"] == best["test_perplexity"] < 8  # out of 21 words
    rates = [line["lr"] for line in lines]
    assert rates[0] == 0.05
    assert rates[-1] < 0.05 / 3, "divided where an epoch brings nothing"


def test_a_dry_run_shows_the_words():
    plan = sngm(f"{LINE} --lr 1 --batch 4 --dry-run --json").json
    assert (plan["vocabulary"], plan["tokens"]) == (21, {"train": 660, "valid": 132, "test": 132})
    assert plan["steps_per_epoch"] == math.ceil((660 // 4 - 1) / 7)
    assert plan["bn_groups"] is None


def test_the_model_of_the_best_epoch_is_kept_and_tested_again(tmp_path):
    """Use a task for which the highest perplexity, that of the first epoch, is the best."""
    (tmp_path / "own.py").write_text(WORST)
    line = "train own.py:Worst --device cpu --data-dir data --set width=6 --set bptt=7"
    wanted = resolve("own.py:Worst", "adam", lr=0.05, batch=4, epochs=3, schedule="constant", task_settings=SMALL)
    with pytest.raises(Interrupted):  # after the best epoch, which must be kept
        made(tmp_path / "run", wanted, stop_at=60, data_dir=tmp_path / "data")
    assert sngm(f"{line} --method adam --lr 0.05 --batch 4 --epochs 3 --schedule constant --out run").code == 0
    assert record(tmp_path / "run")["result_epoch"] == 1
    first, _, last = metrics(tmp_path / "run")
    found = sngm("eval run --data-dir data --device cpu --json").json["scores"]
    for key, value in found.items():
        assert value == pytest.approx(first[key], rel=1e-5)
    assert found["test_perplexity"] > 1.1 * last["test_perplexity"]


def test_a_model_of_another_vocabulary_is_refused(tmp_path):
    assert sngm(f"{LINE} --lr 0.1 --batch 4 --epochs 1 --out run").code == 0
    with (tmp_path / "data" / "wikitext-2" / "train.txt").open("a") as text:
        text.write("words that were not there\n")
    refused(sngm("eval run --data-dir data --device cpu"), "another model", "decoder")


WORST = """
from sngm.tasks.wikitext import WikiText2LSTM

class Worst(WikiText2LSTM):
    higher_is_better = True
"""


def test_only_msgd_is_clipped_unless_asked():
    clips = {method: resolve("wikitext2-lstm", method, lr=1.0).clip for method in ("msgd", "sngm", "lars", "adam")}
    assert clips == {"msgd": 0.25, "sngm": None, "lars": None, "adam": None}
    assert resolve("wikitext2-lstm", "sngm", lr=1.0, clip=0.5).clip == 0.5
    assert resolve("wikitext2-lstm", "msgd", lr=1.0, clip=math.inf).clip is None


@pytest.mark.slow
def test_a_study_chooses_rates_by_perplexity_and_reports(tmp_path):
    line = "compare wikitext2-lstm --methods msgd,sngm --batches 4 --lrs 0.01,0.3 --epochs 2 --seeds 2 --device cpu"
    assert sngm(f"{line} --data-dir data --set width=6 --set bptt=7 --out study").code == 0
    assert "at the epoch with the best validation score" in sngm("report study").out
    cells = {c["method"]: c for c in strict_json((tmp_path / "study" / "study.json").read_text())["cells"]}
    assert cells["msgd"]["lr"] >= 0.3, "the least perplexity, not the largest"


def test_what_is_wrong_is_said(tmp_path):
    refused(sngm("train wikitext2-lstm --lr 1 --device cpu --data-dir nowhere"), "wikitext-2", code=3)
    refused(sngm(f"{LINE} --lr 1 --batch 500"), "batch=500 needs 1,000 tokens", "enough for batch=330")
    refused(sngm("train wikitext2-lstm --lr 1 --device cpu --data-dir data --set bptt=0"), "at least 1")
    refused(
        sngm("train wikitext2-lstm --lr 1 --device cpu --data-dir data --set bptt=1000000"), "bptt must be less than"
    )
    refused(
        sngm("train wikitext2-lstm --lr 1 --device cpu --data-dir data --set dropout=1"),
        "dropout must be >= 0 and < 1, got 1",
    )
    (tmp_path / "data" / "wikitext-2" / "valid.txt").write_text("")
    refused(sngm(f"{LINE} --lr 1 --batch 4"), "valid.txt", code=3)


# ---------------------------------------------------------------- a GPU

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # warnings of the compiler
]


def on_gpu(folder, wanted, step, stop_at=None):
    reached = [0]

    def progress(step, steps, metrics):
        reached[0] = step

    found = train(
        wanted, folder,
        Options(device="cuda", step=step, data_dir=folder.parent / "data", progress=progress,
                should_stop=lambda: reached[0] == stop_at),
    )  # fmt: skip
    assert found["timing"]["step"] == step


@pytest.mark.parametrize(
    ("other", "step", "dropout"),
    [
        pytest.param("eager", "captured", 0.2, marks=needs_gpu),
        pytest.param("eager", "compiled", 0.0, marks=needs_gpu),  # compiled dropout draws other numbers on a GPU
        pytest.param("compiled", "compiled+captured", 0.2, marks=needs_gpu),
    ],
)
@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
@pytest.mark.parametrize("method", ["msgd", "sngm", "lars-unscaled"])
def test_kinds_of_steps_on_a_gpu_agree(tmp_path, method, precision, tolerance, other, step, dropout):
    # in a CUDA graph torch's own methods use a float32 learning rate; this one is exact in float32
    wanted = config(method, lr=0.0625, precision=precision, settings={"dropout": dropout})
    for how in (other, step):
        on_gpu(tmp_path / how, wanted, how)
    assert_near_end(tmp_path / step, tmp_path / other, tolerance)


@pytest.mark.parametrize("precision", [pytest.param(p, marks=needs_gpu) for p in ("float64", "bfloat16")])
def test_a_captured_run_goes_on_in_the_middle_of_an_epoch(tmp_path, precision):
    wanted = config("sngm", lr=0.05, precision=precision)
    on_gpu(tmp_path / "whole", wanted, "captured")
    with pytest.raises(Interrupted):
        on_gpu(tmp_path / "cut", wanted, "captured", stop_at=25)
    on_gpu(tmp_path / "cut", wanted, "captured")
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize("precision", [pytest.param(p, marks=needs_gpu) for p in ("float32", "bfloat16")])
def test_the_paper_s_widths_train_on_a_gpu_as_on_a_cpu(tmp_path, precision):
    """The GPU uses our kernels, the CPU torch's operations; without dropout, whose random numbers differ."""
    wanted = config("sngm", lr=0.05, epochs=1, precision=precision, settings={"width": 200, "dropout": 0.0})
    on_gpu(tmp_path / "cuda", wanted, "captured")
    made(tmp_path / "cpu", config("sngm", lr=0.05, epochs=1, settings={"width": 200, "dropout": 0.0}),
         data_dir=tmp_path / "data")  # fmt: skip
    ours, theirs = (metrics(tmp_path / where)[0] for where in ("cuda", "cpu"))
    for key in ("train_loss", "validation_loss", "test_loss"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4 if precision == "float32" else 2e-2)
