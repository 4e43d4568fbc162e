"""Advice: the rule by its own derivation, the budget by sngm.theory, both through the command line."""

import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from console import OWN_TASK, refused, sngm
from runs import strict_json

from sngm import probes, theory
from sngm.advise import Constants, Recipe, bearable, carry_over
from sngm.advise.budget import BORNE
from sngm.errors import UsageError
from sngm.train import resolve, train

SUMMED = OWN_TASK + "\n    def scale(self, batch):\n        return float(batch)\n"
ZERO = OWN_TASK.replace('return self.scores(model, batch)["loss"].mean()', "return 0.0 * model(batch[0]).sum()")
BROKEN = OWN_TASK.replace('return self.scores(model, batch)["loss"].mean()', 'return model.weight.sum() * float("nan")')


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN_TASK)


def advice(line):
    result = sngm(f"advise {line} --json")
    assert result.code == 0, result.err
    return strict_json(result.out)


def facts(found):
    return {fact["name"]: fact["value"] for fact in found["facts"]}


# ---------------------------------------------------------------- an SGD recipe


@pytest.mark.parametrize("growth", [1, 2, 64, 100])
def test_an_epoch_leads_as_far_and_decays_as_much(growth):
    lr, decay, norm, steps = 0.1, 1e-4, 1.7, 6400
    found = carry_over(lr, decay, norm, growth)
    assert steps / growth * found.lr**2 == pytest.approx(steps * (lr * norm) ** 2, rel=0.01)
    assert steps / growth * found.lr * found.weight_decay / norm == pytest.approx(steps * lr * decay, rel=0.01)


def test_the_norm_is_that_of_the_epoch_with_the_longest_steps():
    found = advice("own.py:Line --from-sgd lr=0.01,batch=8 --to-batch 32 --device cpu")
    along = probes.along(resolve("own.py:Line", "msgd", lr=0.01, batch=8), points=2, iterations=1, device="cpu")
    epochs = [along["steps"][i : i + 12] for i in range(0, 36, 12)]
    lengths = [math.hypot(*(step["lr"] * n for step in steps for n in step["block_norms"])) for steps in epochs]
    assert lengths[0] > lengths[1], "the pilot ends with the second epoch"
    norm = lengths[0] / math.hypot(*(step["lr"] for step in epochs[0]))
    values = facts(found)
    assert values["gradient norm"] == pytest.approx(norm, rel=1e-5)
    assert values["learning rate"] == pytest.approx(0.01 * norm * 2, rel=0.006)
    assert values["weight decay"] == 2e-4
    assert values["steps"] == 9
    assert len(found["norms"]) == 24
    assert {fact["source"] for fact in found["facts"]} == {"given", "measured", "rule of thumb"}


def test_the_pilot_goes_on_while_steps_grow():
    recipe = "own.py:Line --from-sgd lr=0.001,batch=8,epochs=8"
    assert len(advice(f"{recipe} --to-batch 32 --device cpu")["norms"]) % 12 == 0
    (Path.cwd() / "late.py").write_text(OWN_TASK.replace("epochs = 3", "epochs = 6\n    warmup = 3.0"))
    found = advice("late.py:Line --from-sgd lr=1e-4,batch=8 --to-batch 32 --device cpu")
    assert len(found["norms"]) > 36, "warm-up is passed, where steps grow with the rate"
    short = advice("late.py:Line --from-sgd lr=1e-4,batch=8 --to-batch 32 --device cpu --pilot-steps 5")
    assert len(short["norms"]) == 5


def test_a_loss_that_is_a_sum_is_advised_as_its_mean():
    (Path.cwd() / "summed.py").write_text(SUMMED)
    mean = advice("own.py:Line --from-sgd lr=0.008,batch=8,weight_decay=1e-4 --to-batch 32 --device cpu")
    # the same steps: gradients are 8 times as long at batch 8, and 32 times at batch 32
    summed = advice("summed.py:Line --from-sgd lr=0.001,batch=8,weight_decay=8e-4 --to-batch 32 --device cpu")
    assert facts(summed)["learning rate"] == pytest.approx(facts(mean)["learning rate"], rel=0.01)
    assert facts(summed)["weight decay"] == pytest.approx(32 * facts(mean)["weight decay"], rel=0.01)


def test_what_is_printed_can_be_run_as_it_is_and_the_page_says_the_same(tmp_path):
    recipe = "lr=0.03,batch=32,weight_decay=1e-3,momentum=0.8,epochs=2"
    result = sngm(f"advise digits --from-sgd {recipe} --to-batch 128 --pilot-steps 4 --device cpu --out here")
    assert result.code == 0, result.err
    assert "40 steps and 1,280 gradients of single samples each" in result.err
    command = next(line for line in result.out.splitlines() if line.startswith("sngm train"))
    plan = sngm(f"{command.removeprefix('sngm ')} --device cpu --dry-run --json").json["config"]
    assert (plan["method"], plan["batch"], plan["epochs"]) == ("sngm", 128, 2)
    record = strict_json((tmp_path / "here" / "advice.json").read_text())
    values = facts(record)
    assert plan["lr"] == values["learning rate"]
    assert plan["method_settings"] == {"momentum": 0.8, "weight_decay": values["weight decay"]}
    assert values["weight decay"] == 2e-3
    assert any("--bn-group 32" in note for note in record["notes"])
    page = (tmp_path / "here" / "report.html").read_text()
    assert command in page
    assert "rule of thumb" in page
    assert not re.search(r"<script|https?://(?!www\.w3\.org)|\bnan\b", page)
    for word in ("measured", "rule of thumb", "given"):
        assert word in result.out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch=32", "needs lr"),
        ("lr=0.1", "needs batch"),
        ("lr=0.1,batch=32,nesterov=True", "knows no 'nesterov'"),
        ("lr=a,batch=32", "lr must be a number"),
        ("lr=0.1,batch=32,momentum=1", "momentum must be"),
        ("lr=0.1,batch=32,weight_decay=-1", "weight_decay must be"),
        ("lr=0.1,,batch=32", "separated by commas"),
        ("lr=0.1,lr=0.2,batch=32", "lr is set twice"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(text, words):
    with pytest.raises(UsageError, match=words):
        Recipe.parse(text)


def test_what_cannot_be_advised_is_one_line(tmp_path):
    def line(text, *words, code=2):
        refused(sngm(f"advise {text} --device cpu"), *words, code=code)

    line("digits", "either --from-sgd")
    line("digits --from-sgd lr=0.1,batch=32 --gradients 100 --to-batch 64", "either --from-sgd")
    line("digits --from-sgd lr=0.1,batch=32", "--to-batch is missing")
    line("digits --gradients 100 --to-batch 64", "--from-sgd is missing")
    line("--from-sgd lr=0.1,batch=32 --to-batch 64", "needs a task")
    line("digit --from-sgd lr=0.1,batch=32 --to-batch 64", "did you mean 'digits'")
    line("digit --gradients 100", "did you mean 'digits'")
    line("digits --from-sgd lr=0.1,batch=32 --to-batch 16", "--to-batch 16 is below")
    line("digits --from-sgd lr=0.1,batch=32 --to-batch 2000", "at most 1280")
    line("digits --from-sgd lr=0.1,batch=32.5 --to-batch 64", "batch must be a whole number")
    line("digits --from-sgd lr=-1,batch=32 --to-batch 64", "lr must be a positive number")
    line("digits --from-sgd lr=0.1,batch=32 --to-batch 64 --sigma 1", "--sigma")
    line("digits --from-sgd lr=0.1,batch=32 --to-batch 64 --pilot-steps 0", "--pilot-steps must be")
    line("cifar10-resnet20 --from-sgd lr=0.1,batch=100 --to-batch 800 --data-dir .", "cannot be shared out")
    line("cifar10-resnet20 --from-sgd lr=0.1,batch=128 --to-batch 8192 --data-dir .", "cifar", code=3)
    line("digits --gradients 100 --L 1", "--L: numbers are for advice without a task")
    line("digits --gradients nan", "--gradients must be")
    line("--gradients 0.5 --gap 1 --L 1 --sigma 1", "--gradients must be")
    line("--gradients 100 --gap 1", "--L and --sigma are needed")
    line("--gradients 100 --gap -1 --L 1 --sigma 1", "gap must be")
    line("--gradients 100 --gap 1 --L 1 --sigma 1 --beta 1", "beta must be")
    line("--gradients 100 --gap 1 --L 1 --sigma 1 --pilot-steps 3", "no pilot")
    (tmp_path / "empty").mkdir()
    line("empty --gradients 100", "holds no probe.json")
    (tmp_path / "empty" / "probe.json").write_text('{"kind": "runs"}')
    line("empty --gradients 100", "probes of runs")
    (tmp_path / "empty" / "probe.json").write_text('{"kind": "pilot", "status": "finished"}')
    line("empty --gradients 100", "a field is missing")
    assert not (tmp_path / "runs").exists(), "what is refused writes nothing"


def test_gradients_that_are_zero_or_no_numbers_are_refused(tmp_path):
    (tmp_path / "zero.py").write_text(ZERO)
    (tmp_path / "broken.py").write_text(BROKEN)
    for task, words in (("zero", "every gradient of the pilot is zero"), ("broken", "not finite")):
        result = sngm(f"advise {task}.py:Line --from-sgd lr=0.1,batch=8 --to-batch 32 --device cpu")
        assert result.code == 2
        assert result.out == ""
        assert words in result.err.splitlines()[-1]
    result = sngm("advise own.py:Line --from-sgd lr=1e30,batch=8 --to-batch 32 --device cpu")
    assert result.code == 2
    assert "is the recipe's lr right?" in result.err.splitlines()[-1]


# ---------------------------------------------------------------- a budget


def test_each_curve_is_the_best_bound_of_the_theory_and_the_largest_batch_is_within_reach_of_its_lowest():
    budget, gap, sigma, beta, L = 1e6, 2.0, 3.0, 0.9, 5.0
    constants = Constants(gap, sigma, beta, L, ((0.1, 4.0), (10.0, 0.0)))
    msgd, sngm_, relaxed = bearable(budget, constants)
    assert msgd.batches == [2**k for k in range(20)]
    for i in (0, 7, 19):
        batch, steps = msgd.batches[i], budget / msgd.batches[i]
        best = theory.msgd_best(gap, steps, batch, L, sigma, beta)
        assert (msgd.rates[i], msgd.bounds[i] ** 2) == pytest.approx((best.eta, best.bound))
        assert (sngm_.rates[i], sngm_.bounds[i]) == pytest.approx(
            tuple(theory.smooth_best(gap, steps, batch, L, sigma, beta))
        )
        both = [theory.relaxed_best(gap, steps, batch, own, sigma, beta, lam) for lam, own in constants.relaxed]
        assert relaxed.bounds[i] == pytest.approx(min(best.bound for best in both))
    for curve in (msgd, sngm_, relaxed):
        bounds = np.array(curve.bounds)
        assert bounds[curve.largest] <= BORNE * bounds.min()
        assert (bounds[curve.largest + 1 :] > BORNE * bounds.min()).all()
        assert bounds[curve.best] == bounds.min()
    assert max(bearable(budget, constants, most=1000)[0].batches) == 512


def test_numbers_are_advised_on_without_a_task():
    found = advice("--gradients 8e6 --gap 2.3 --L 20 --sigma 15")
    assert [row["method"] for row in found["methods"]] == ["msgd", "sngm"]
    for row in found["methods"]:
        assert row["steps"] == math.ceil(8e6 / row["batch"])
        assert row["sources"]["lr"] == "theory"
        assert row["sources"]["batch"] == "rule of thumb"
    assert found["methods"][0]["batch"] < found["methods"][1]["batch"]
    assert Path(found["report"]).is_file()
    relaxed = advice("--gradients 8e6 --gap 2.3 --L 20 --sigma 15 --lam 1 --beta 0.5")
    assert [row["method"] for row in relaxed["methods"]] == ["sngm (relaxed)"]
    still = advice("--gradients 100 --gap 0 --L 0 --sigma 0")
    assert [row["bound"] for row in still["methods"]] == [0, 0]


def test_a_pilot_and_the_folder_of_a_probe_give_the_same_advice(tmp_path):
    probe = sngm("probe own.py:Line --device cpu --lr 0.03 --out probed")
    assert probe.code == 0, probe.err
    folder = advice("probed --gradients 5000")
    result = sngm("advise own.py:Line --gradients 5000 --device cpu --out piloted")
    assert result.code == 0, result.err
    assert "5 points" in result.err
    pilot = strict_json((tmp_path / "piloted" / "advice.json").read_text())
    assert pilot["constants"] == folder["constants"]
    assert {entry["name"]: entry["source"] for entry in pilot["constants"]}["sigma"] == "measured"
    assert max(curve["batches"][-1] for curve in pilot["curves"]) == 64, "no batch is above the 96 samples"
    page = (tmp_path / "piloted" / "report.html").read_text()
    assert "Bound against batch" in page
    assert not re.search(r"<script|https?://(?!www\.w3\.org)|\bnan\b", page)


# ---------------------------------------------------------------- does it work?


@pytest.mark.slow
def test_digits_trained_as_advised_are_within_half_a_point_of_the_small_batch(tmp_path):
    command = advice("digits --from-sgd lr=0.03,batch=32 --to-batch 512 --device cpu")["command"]
    small, large = [], []
    for seed in range(5):
        record = train(resolve("digits", "msgd", lr=0.03, batch=32, seed=seed), tmp_path / f"small{seed}")
        small.append(100 * record["result"]["test_accuracy"])
        result = sngm(f"{command.removeprefix('sngm ')} --seed {seed} --device cpu --out large{seed} --json")
        assert result.code == 0, result.err
        large.append(100 * result.json["result"]["test_accuracy"])
    assert statistics.mean(large) >= statistics.mean(small) - 0.5, (small, large)
