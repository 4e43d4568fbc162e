"""Advice: the scaling rule checked by random walks of both methods, the budget by sngm.theory; and the command."""

import collections
import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from console import OWN_TASK, refused, sngm
from runs import strict_json

from sngm import SNGM, SpectralSNGM, advise, advise_model, probes, theory
from sngm.advice import Constants, Recipe, budget_curves, carry_over, verify
from sngm.advice.budget import NEAR_LOWEST, advise_budget
from sngm.advice.model import _moved
from sngm.advice.recipe import convert
from sngm.advice.rules import carry_spectral
from sngm.advice.verdict import Settings, conclude, has_normalisation
from sngm.errors import UsageError
from sngm.optim import decay_groups
from sngm.paper import experiments
from sngm.parsing import parse_settings, split_list
from sngm.probes.noise import Noise
from sngm.report.summary import Cell
from sngm.tasks import Splits, Task, Tensors
from sngm.training import resolve, train

SUMMED = OWN_TASK + "\n    def scale(self, batch):\n        return float(batch)\n"
ZERO = OWN_TASK.replace('return self.scores(model, batch)["loss"].mean()', "return 0.0 * model(batch[0]).sum()")
BROKEN = OWN_TASK.replace('return self.scores(model, batch)["loss"].mean()', 'return model.weight.sum() * float("nan")')


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN_TASK)


def advice(line):
    """Return what the command prints as JSON; the page is left empty, since drawing takes longer than the advice."""
    with mock.patch("sngm.advice.page.html", return_value=""):
        result = sngm(f"advise {line} --json")
    assert result.code == 0, result.err
    return strict_json(result.out)


def facts(found):
    return {fact["name"]: fact["value"] for fact in found["facts"]}


# ---------------------------------------------------------------- an SGD recipe


def epoch(optimizer, lr, weight_decay, steps):
    """Take steps with gradients of equal norm and zero mean; return how much the start decays and the walk's length."""
    generator = torch.Generator().manual_seed(0)
    size, start = 2000, 500.0
    w = torch.nn.Parameter(torch.zeros(size))
    w.data[0] = start
    method = optimizer([w], lr=lr, momentum=0.9, weight_decay=weight_decay)
    for _ in range(steps):
        w.grad = torch.randn(size, generator=generator) * (NORM / math.sqrt(size))
        method.step()
    return math.log(start / w[0].item()), w[1:].norm().item()


NORM = 1.7


def test_an_epoch_of_both_methods_leads_as_far_and_decays_as_much():
    """Run the optimizers with momentum, with a quarter and a sixteenth of the steps."""
    lr, decay, steps = 0.1, 1e-4, 2400
    decayed, led = epoch(torch.optim.SGD, lr, decay, steps)
    for growth in (4, 16):
        carried = carry_over(lr, decay, NORM, growth)
        found = epoch(SNGM, carried.lr, carried.weight_decay, steps // growth)
        assert found == pytest.approx((decayed, led), rel=0.08)
    for power in (0.4, 0.6):  # instead of the rule's 1/2
        other = 16**power
        less_far = epoch(SNGM, lr * NORM * other, carried.weight_decay, steps // 16)[1]
        decays = epoch(SNGM, carried.lr, decay * other, steps // 16)[0]
        assert less_far != pytest.approx(led, rel=0.16), "the walk would notice another power of the batch"
        assert decays != pytest.approx(decayed, rel=0.16)


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
    found = advice(f"{recipe} --to-batch 32 --device cpu")
    assert len(found["norms"]) == 2 * 12, "the second epoch's steps are no longer than the first's"
    assert not any("growing" in text or "--pilot-steps" in text for text in found["warnings"])
    (Path.cwd() / "late.py").write_text(OWN_TASK.replace("epochs = 3", "epochs = 6\n    warmup = 3.0"))
    found = advice("late.py:Line --from-sgd lr=1e-4,batch=8 --to-batch 32 --device cpu")
    assert len(found["norms"]) == 4 * 12, "warm-up is passed, where steps grow with the rate"
    assert "still growing" not in " ".join(found["warnings"])


def test_a_pilot_that_was_cut_short_says_so():
    (Path.cwd() / "late.py").write_text(OWN_TASK.replace("epochs = 3", "epochs = 6\n    warmup = 3.0"))
    recipe = "late.py:Line --from-sgd lr=1e-4,batch=8 --to-batch 32 --device cpu"
    short = advice(f"{recipe} --pilot-steps 5")
    assert len(short["norms"]) == 5
    assert "first 5 of 12 steps of an epoch" in short["facts"][0]["why"]
    assert any("after 5 of an epoch's 12 steps" in text for text in short["warnings"])
    one = advice(f"{recipe} --pilot-steps 15")
    assert "in epoch 1" in one["facts"][0]["why"]
    assert any("--pilot-steps ended the pilot after one epoch" in text for text in one["warnings"])
    two = advice(f"{recipe} --pilot-steps 24")
    assert any("still growing when --pilot-steps ended the pilot, after 2" in text for text in two["warnings"])
    (Path.cwd() / "whole.py").write_text(
        OWN_TASK.replace("epochs = 3", "epochs = 3\n    warmup = 3.0\n    schedule = 'constant'")
    )
    whole = advice("whole.py:Line --from-sgd lr=1e-4,batch=8 --to-batch 32 --device cpu")
    assert any("still growing when the recipe ended, after 3" in text for text in whole["warnings"])


def test_an_adamw_recipe_keeps_adamw_and_scales_by_the_square_root():
    found = advice("own.py:Line --from-adamw lr=0.01,batch=8,weight_decay=0.02 --to-batch 32 --device cpu")
    values = facts(found)
    assert (values["learning rate"], values["weight decay"]) == (0.02, 0.04)
    assert found["diff"][1] == (
        "+ optimizer = torch.optim.AdamW(sngm.optim.decay_groups(model, weight_decay=0.04), lr=0.02)"
    )
    assert found["command"].startswith("sngm train own.py:Line --method adamw --lr 0.02 --batch 32")
    assert "no normalisation layer" in found["warnings"][0]
    refused(sngm("advise own.py:Line --from-adamw lr=0.01,batch=8,momentum=0.9"), "has no 'momentum'")
    refused(sngm("advise own.py:Line --from-adamw lr=0.01,batch=8 --from-sgd lr=0.1,batch=8"), "one of")


def test_a_recipe_of_spectral_sngm_keeps_the_shrinking_of_a_run():
    line = "own.py:Line --to-batch 32 --device cpu --from-spectral"
    found = advice(f"{line} lr=0.01,batch=8,weight_decay=0.25,momentum=0.8")
    assert found["diff"][1] == (
        "+ optimizer = sngm.SpectralSNGM(sngm.optim.decay_groups(model, weight_decay=0.5), lr=0.0199, momentum=0.8)"
    )
    assert found["command"].startswith("sngm train own.py:Line --method spectral-sngm --lr 0.0199 --batch 32")
    assert "--from-spectral lr=0.01,batch=8,weight_decay=0.25,momentum=0.8 --to-batch 32" in found["check"]
    assert "batch=8 " in advice(f"{line} lr=0.01,batch=0.8e1")["check"]
    refused(sngm("advise own.py:Line --from-spectral lr=0.01,batch=8,beta=0.9"), "--from-spectral has no 'beta'")
    refused(sngm(f"advise {line} lr=1,batch=8,weight_decay=1"), "lr 1 times weight decay 1 is 1, and must be below 1")


@pytest.mark.parametrize(
    ("recipe", "decay", "why"),
    [
        ({"weight_decay": 0.5}, 1.0, "0.5 * sqrt(32 / 8)"),
        ({"weight_decay": 0.7}, 1.2, "0.7 * sqrt(32 / 8), at most 1.2"),
        ({"weight_decay": 1.2}, 1.2, "as before, as it is raised to 1.2 at most"),
        ({"weight_decay": 0.2, "momentum": 0.5}, 0.24, "0.2 * sqrt(32 / 8), at most 0.24"),
        ({"weight_decay": 3.0}, 3.0, "as before, as it is raised to 1.2 at most"),
        ({"weight_decay": 0.0}, 0.0, "none before"),
    ],
)
def test_weight_decay_of_spectral_sngm_grows_to_a_limit(recipe, decay, why):
    given = Recipe(lr=0.01, batch=8, method="spectral-sngm", **recipe)
    carried, found = convert(given, 32, 1.0, "", measured(1000.0, samples=100), torch.nn.BatchNorm1d(2), 100)
    assert carried.weight_decay == decay
    assert [fact["why"] for fact in found["facts"] if fact["name"] == "weight decay"] == [why]
    shrunk = (1 - 0.01 * recipe["weight_decay"]) ** 4
    assert 1 - carried.lr * carried.weight_decay == pytest.approx(shrunk, abs=3e-3 * (1 - shrunk))
    assert decay or carried.lr == 0.02


def test_the_rule_of_spectral_sngm_counts_the_steps_of_both_runs():
    # of 96 samples, batch 40 leaves out 16 in each epoch: 6 times fewer steps than batch 8, not 5
    found = advice("own.py:Line --to-batch 40 --device cpu --from-spectral lr=0.01,batch=8,weight_decay=0.5")
    assert found["lr"] * found["weight_decay"] == pytest.approx(1 - 0.995**6, rel=2e-3)
    assert "Each epoch leaves out 16 of 96 samples" in found["notes"][-1]
    # if they are kept, batch 40 has 3 steps and batch 8 has 12
    line = "own.py:Line --to-batch 40 --last-batch keep --device cpu --from-spectral"
    kept = advice(f"{line} lr=0.01,batch=8,weight_decay=0.5")
    assert kept["lr"] * kept["weight_decay"] == pytest.approx(1 - 0.995**4, rel=2e-3)
    assert kept["steps"] * 2 == found["steps"] * 3
    assert "leaves out" not in str(kept["notes"])
    assert "--batch 40 --last-batch keep" in kept["command"]
    assert "--to-batch 40 --last-batch keep" in kept["check"]
    assert kept["diff"][-1].endswith("drop_last=False)")
    assert advice(f"{line.replace('40', '95')} lr=0.01,batch=8,weight_decay=0.5,epochs=1")["steps"] == 1
    whole = advice(f"{line.replace('40', '48')} lr=0.01,batch=8,weight_decay=0.5")
    assert whole["lr"] * whole["weight_decay"] == pytest.approx(1 - 0.995**6, rel=2e-3)
    refused(sngm("advise own.py:Line --gradients 1000 --last-batch keep"), "--last-batch and --verify need a recipe")
    refused(sngm(f"advise {line.replace('keep', 'stay')} lr=0.01,batch=8"), "stay")


@pytest.fixture
def small():
    """Return a model, its loss and a loader of 12 batches of 8."""
    data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    return model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), loader


def test_advice_on_a_model_counts_the_steps_of_its_loader(small):
    found = advise_model(*small, SpectralSNGM(small[0].parameters(), lr=0.01, weight_decay=0.5), to_batch=40)
    assert found["lr"] * found["weight_decay"] == pytest.approx(1 - 0.995**6, rel=2e-3)


def test_steps_of_a_batch_sampler_are_not_counted_by_another_sampler(small):
    model, loss_fn, loader = small
    half = torch.utils.data.SubsetRandomSampler(range(48))
    own = torch.utils.data.DataLoader(
        loader.dataset, batch_sampler=torch.utils.data.BatchSampler(half, 8, drop_last=False)
    )
    found = advise_model(model, loss_fn, own, SpectralSNGM(model.parameters(), 0.01, weight_decay=0.5), to_batch=40)
    assert found["lr"] * found["weight_decay"] == pytest.approx(1 - 0.995**5, rel=2e-3)


def test_each_group_of_spectral_sngm_gets_its_own_advice(small):
    first, second = ({"params": small[0][i].weight, "weight_decay": decay} for i, decay in ((0, 0.1), (2, 1.0)))
    bias = {"params": [small[0][0].bias], "weight_decay": 0.0}
    found = advise_model(*small, SpectralSNGM([first, second, bias], lr=0.06), to_batch=48)
    one, two = carry_spectral(0.06, 0.1, 6), carry_spectral(0.06, 1.0, 6)
    assert f"[({one.lr:g}, {one.weight_decay:g}), ({two.lr:g}, 1.2), ({one.lr:g}, 0)]" in found["diff"][1]
    assert [warning for warning in found["warnings"] if "shrinks" in warning] == found["warnings"][-1:]
    assert "Each step shrinks weights by up to 31% (lr * weight_decay)" in found["warnings"][-1]
    assert found["answer"].startswith("At batch 48 expect a loss; ")
    bad = {"params": small[0][2].weight, "weight_decay": 20.0}
    with pytest.raises(UsageError, match="times weight decay 20 is"):
        advise_model(small[0], lambda *_: pytest.fail("trained first"), small[2], SpectralSNGM([first, bad], lr=0.06))


@pytest.mark.parametrize("scale", [1e9, 0.0])
def test_advice_with_too_much_decay_promises_nothing(scale):
    given = Recipe(lr=0.1, batch=8, weight_decay=1.2, method="spectral-sngm")
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    _, found = convert(given, 32, 1.0, "", measured(scale, samples=1000), model, 1000)
    assert found["answer"].startswith("At batch 32 expect a loss; use SpectralSNGM")
    assert "shrinks weights by up to 40%" in found["warnings"][0]


def test_the_carried_settings_in_the_results_are_those_of_the_rule():
    (carried,) = (row for row in experiments.find("spectral-rule").rows if row.name == "carried")
    for batch, fewer in ((8192, 8), (16384, 16), (32768, 24)):
        assert carry_spectral(0.00354, 1.19, batch / 1024, fewer=fewer) == (carried.rates[batch], 1.2)
    assert carried.method_settings == {"weight_decay": 1.2}
    for row in experiments.find("spectral-decay").rows:
        product = carry_spectral(0.00354, 1.19, 2)
        lr, decay = row.rates[2048], row.method_settings["weight_decay"]
        assert lr * decay == pytest.approx(product.lr * product.weight_decay, rel=5e-3)


def test_no_step_of_spectral_sngm_shrinks_the_weights_to_less_than_nothing():
    carried = carry_spectral(lr=0.05, weight_decay=2.0, growth=40)
    assert 0.9 < carried.lr * carried.weight_decay < 1
    carried = carry_spectral(lr=0.4, weight_decay=2.0, growth=16)
    assert 0.9 < carried.lr * carried.weight_decay < 1
    found = advice("own.py:Line --to-batch 48 --device cpu --from-spectral lr=0.05,batch=8,weight_decay=2")
    assert (
        "Each step shrinks weights by up to 47% (lr * weight_decay): batch 48 has too few steps" in found["warnings"][1]
    )
    assert "the rule of spectral SNGM has hardly been tried" in found["warnings"][0]
    assert found["notes"][0].endswith("try 0.117 and 0.468 too.")
    found = advice("own.py:Line --to-batch 48 --device cpu --from-spectral lr=0.1,batch=8,weight_decay=2")
    assert found["notes"][0].endswith("try 0.184 too."), "twice the rate would change the sign of the weights"


def measured(*scales, samples):
    return [Noise(1.0, 1.0, 1.0, scale, scale / 2, scale * 2, 1.0, 1.0, [], 16, samples) for scale in scales]


@pytest.mark.parametrize(
    ("scales", "normalised", "said"),
    [
        ([500.0, 2000.0], True, "Yes: up to batch 512 you should lose nothing measurable; at batch 256 use SNGM"),
        ([50.0, 200.0], True, "Up to batch 64 you should lose nothing measurable; at batch 256 expect a small loss"),
        ([9.0], True, "At batch 256 expect a small loss"),
        ([math.nan], True, "At batch 256 expect a small loss"),
        ([math.inf], True, "Yes: up to at least batch 512 you should lose nothing measurable"),
        ([50.0, 200.0], False, "Batch 256 is a risk, as the model has no normalisation layer: use SNGM with lr 0.4"),
        ([500.0, 2000.0], False, "Yes, but check it, as the model has no normalisation layer: up to batch 512"),
    ],
)
def test_the_noise_scale_decides_how_far_the_batch_can_grow(scales, normalised, said):
    before = Settings("msgd", 32, {"lr": 0.1})
    found = conclude(before, Settings("sngm", 256, {"lr": 0.4}), measured(*scales, samples=2000), normalised, 1000)
    assert found["answer"].startswith(said)
    assert "SNGM with lr 0.4" in found["answer"]
    assert len(found["diff"]) == 3


def test_adamw_stays_further_below_the_noise_scale():
    before, after = (Settings("adamw", batch, {"lr": 0.1}) for batch in (32, 256))
    assert "up to batch 128" in conclude(before, after, measured(600.0, samples=1000), True, 1000)["answer"].lower()
    assert "is a risk" in conclude(before, after, measured(600.0, samples=1000), False, 1000)["answer"]


@pytest.mark.parametrize("scale", [math.inf, 1e9])
def test_a_noise_scale_above_the_samples_it_was_measured_on_counts_as_their_number(scale):
    before, after = Settings("msgd", 32, {"lr": 0.1}), Settings("sngm", 128, {"lr": 0.4})
    found = conclude(before, after, measured(scale, 64.0, samples=256), True, 60_000)
    assert found["answer"].startswith("Yes: up to at least batch 128")
    assert found["facts"][0]["value"] == pytest.approx(128)
    assert found["facts"][0]["why"].startswith("at least, as 256 samples show no more")
    assert "64 (32 to 130)" in found["facts"][0]["why"]


def test_normalisation_layers_are_told_from_names_and_parametrizations():
    class NormalNet(torch.nn.Sequential):
        pass

    weight_norm = torch.nn.utils.parametrizations.weight_norm
    assert not has_normalisation(NormalNet(weight_norm(torch.nn.Linear(2, 2))))
    for layer in (torch.nn.LayerNorm(2), torch.nn.BatchNorm1d(2), torch.nn.GroupNorm(1, 2)):
        assert has_normalisation(NormalNet(torch.nn.Linear(2, 2), layer))


def test_without_a_batch_the_question_is_whether_to_double():
    found = advice("own.py:Line --from-sgd lr=0.01,batch=8 --device cpu")
    assert facts(found)["batch"] == 16
    assert [line[0] for line in found["diff"]] == ["-", "+", "+"]
    assert found["check"] == "sngm advise own.py:Line --from-sgd lr=0.01,batch=8 --verify"


def test_verify_trains_all_and_compares_them(tmp_path):
    recipe = "lr=0.01,batch=8,epochs=1"
    line = f"advise own.py:Line --from-sgd {recipe} --to-batch 32 --device cpu --out here --verify --seeds 2"
    result = sngm(line)
    assert result.code == 0, result.err
    assert re.search(
        r"Verified: test error is .* with msgd at batch 8, and .* with sngm.* at batch 32 \(seeds: 2 and 2\): .*\. "
        r"Your own method has .* with msgd at batch 32 \(seeds: 2\), with linear scaling \(lr 0.04\). "
        r"Compared with that, sngm.*: "
        r"(.* \(p = .*\); (switching helps|keep msgd)"
        r"|undecided, between .* worse and .* better \(95 %, p = .*\); more seeds may decide)\.",
        result.out,
    )
    (home,) = (tmp_path / "here").glob("verify-*")
    records = [strict_json(path.read_text()) for path in home.glob("*/run.json")]
    assert sorted((r["config"]["method"], r["config"]["batch"], r["config"]["seed"]) for r in records) == [
        (method, batch, seed) for method, batch in (("msgd", 8), ("msgd", 32), ("sngm", 32)) for seed in range(2)
    ]
    assert (home / "report.html").is_file()
    page = (tmp_path / "here/report.html").read_text()
    assert f'href="{home.name}/report.html"' in page
    assert "Your own method has" in page
    assert "<h1>Verified: test error is" in page
    assert "Compared with msgd at the same batch" in (home / "report.html").read_text()


def test_verify_says_that_adamw_stays():
    line = "advise own.py:Line --to-batch 64 --device cpu --verify --from-adamw lr=0.1,batch=32,epochs=1"
    assert "no other was tried" in sngm(line).out


def test_runs_that_diverged_on_either_side_are_not_compared_by_their_means():
    good = Cell("msgd", 32, values={0: 0.9, 1: 0.91, 2: 0.9})
    lost = Cell("sngm", 32, runs=[None] * 3, diverged=3)
    some = Cell("sngm", 32, values={0: 0.9, 1: 0.91}, diverged=1)
    assert verify._difference(None, good, lost) == ("every run of sngm diverged", 1)
    assert verify._difference(None, lost, good) == ("every run of sngm diverged", -1)
    assert verify._difference(None, lost, lost)[1] is None
    assert verify._difference(None, some, good) == verify._difference(None, good, some)
    assert verify._difference(None, some, good)[1] is None


def test_an_interrupted_verification_can_be_repeated_and_has_a_folder_of_its_own(tmp_path, monkeypatch):
    compared = []

    def interrupted(folder, sides):
        compared.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr("sngm.advising.run_config", lambda *given: None)
    monkeypatch.setattr("sngm.advice.verify.compare_runs", interrupted)
    for lr in (0.01, 0.01, 0.02):
        for out in ("here", None):
            with pytest.raises(KeyboardInterrupt):
                advise(
                    f"{tmp_path}/own.py:Line", from_sgd={"lr": lr, "batch": 8}, out=out, verify=True,
                    pilot_steps=2, device="cpu", progress=False,
                )  # fmt: skip
        assert (tmp_path / "here" / "advice.json").is_file()
    first, again, other = compared[1::2]
    assert first == again != other
    assert first.parent == Path("runs")


# ---------------------------------------------------------------- a model in one's own loop


def own_loop(optimizer, layer=True, batch=32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 8, generator=generator)
    y = x.sum(1, keepdim=True) + torch.randn(512, 1, generator=generator)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), *[torch.nn.BatchNorm1d(16)] * layer, torch.nn.ReLU(), torch.nn.Linear(16, 1)]
    model = torch.nn.Sequential(*layers)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch, shuffle=True)
    return model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), data, optimizer(model.parameters())


def test_a_model_of_ones_own_is_advised_on_and_left_as_it_was():
    parts = own_loop(lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-3))
    before = {name: value.clone() for name, value in parts[0].state_dict().items()}
    found = advise_model(*parts, to_batch=128, steps=40)
    assert all(torch.equal(value, parts[0].state_dict()[name]) for name, value in before.items())
    assert not parts[3].state
    norm = {fact["name"]: fact["value"] for fact in found["facts"]}["gradient norm"]
    assert found["lr"] == pytest.approx(0.01 * norm * 2, rel=0.01)
    assert found["weight_decay"] == 2e-3
    epochs = [math.hypot(*found["norms"][i : i + 16]) / 4 for i in (0, 16)]
    assert norm == pytest.approx(max(epochs)), "of the epoch with the longest steps, as for a task"
    assert "from_sgd=dict(lr=0.01, batch=32, weight_decay=0.001, momentum=0.9), to_batch=128" in found["check"]
    assert found["answer"] in repr(found)
    assert "\n".join(found["diff"]) in repr(found)
    assert found["diff"][2] == "+ loader = DataLoader(dataset, batch_size=128, shuffle=True, drop_last=True)"


def test_models_with_adamw_and_without_normalisation():
    adamw = advise_model(*own_loop(lambda params: torch.optim.AdamW(params, lr=1e-3)), steps=4)
    assert adamw["lr"] == pytest.approx(1e-3 * math.sqrt(2), rel=1e-2)
    bare = advise_model(*own_loop(lambda params: torch.optim.SGD(params, lr=0.01), layer=False), steps=4)
    assert "no normalisation layer" in bare["warnings"][0]


def test_a_part_of_an_epoch_and_the_rate_of_a_scheduler():
    model, loss_fn, loader, sgd = own_loop(lambda params: torch.optim.SGD(params, 0.01, momentum=0.9, nesterov=True))
    torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: step / 10)  # warm-up: the rate is 0 now
    found = advise_model(model, loss_fn, loader, sgd, steps=4)
    assert "in the first 4 of 16 steps" in found["facts"][0]["why"]
    assert "4 of an epoch's 16 steps" in found["warnings"][0]
    assert found["diff"][0].endswith("SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0, nesterov=True)")
    assert "nesterov=True" in found["diff"][1]
    assert sgd.param_groups[0]["lr"] == 0


def test_adam_with_coupled_weight_decay_is_noted_and_stays_adam():
    settings = {"lr": 1e-3, "betas": (0.9, 0.95)}
    adam = advise_model(*own_loop(lambda params: torch.optim.Adam(params, weight_decay=0.1, **settings)), steps=4)
    assert adam["diff"][0] == (
        "- optimizer = torch.optim.Adam(model.parameters(), lr=0.001, weight_decay=0.1, betas=(0.9, 0.95))"
    )
    assert adam["diff"][1].startswith("+ optimizer = torch.optim.Adam(")
    assert any("(coupled)" in note for note in adam["notes"])
    for optimizer in (torch.optim.Adam, torch.optim.AdamW):
        decay = {} if optimizer is torch.optim.AdamW else {"weight_decay": 0.0}
        found = advise_model(*own_loop(lambda params: optimizer(params, **settings, **decay)), steps=4)  # noqa: B023
        assert not any("(coupled)" in note for note in found["notes"])


def test_spectral_sngm_in_ones_own_loop():
    found = advise_model(*own_loop(lambda params: SpectralSNGM(params, 0.02, weight_decay=0.5, nesterov=True)), steps=4)
    assert [line.partition("sngm.")[2] for line in found["diff"][:2]] == [
        "SpectralSNGM(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.5, nesterov=True)",
        "SpectralSNGM(sngm.optim.decay_groups(model, weight_decay=0.707), lr=0.0281, momentum=0.9, nesterov=True)",
    ]
    assert (found["lr"], found["weight_decay"]) == (0.0281, 0.707)
    assert "from_spectral=dict(lr=0.02, batch=32, weight_decay=0.5, momentum=0.9)" in found["check"]
    grouped = own_loop(list)
    biases, weights = ([p for p in grouped[0].parameters() if (p.ndim > 1) == many] for many in (False, True))
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.5}]
    found = advise_model(*grouped[:3], SpectralSNGM(groups, 0.02), steps=4)
    assert found["weight_decay"] == 0.707, "of the largest group"
    groups = [{"params": weights[:1], "weight_decay": 0.5}, {"params": biases, "order": "after"}]
    with pytest.raises(UsageError, match='the rule is for spectral SNGM with order="before"'):
        advise_model(*grouped[:3], SpectralSNGM(groups, 0.02), steps=4)


@pytest.mark.parametrize("embedding", [{"ball": "rows"}, {"ball": "rows", "weight_decay": 0.0}], ids=str)
def test_advice_on_groups_says_what_to_change_in_each(embedding):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(500, 8), torch.nn.Flatten(), torch.nn.Linear(32, 8), torch.nn.LayerNorm(8)
    )
    words = torch.randint(500, (512, 4))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(words), 32)
    optimizer = SpectralSNGM(decay_groups(model, 0.5, embeddings=embedding), 0.02)
    found = advise_model(
        model, lambda model, batch: (model(batch[0]) - 1).square().mean(), loader, optimizer, to_batch=128, steps=4
    )
    assert "+ optimizer = sngm.SpectralSNGM(groups, lr=0.0394, momentum=0.9, weight_decay=1)" in found["diff"]
    assert json.loads(json.dumps(found))["lr"] == 0.0394


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, SpectralSNGM])
@pytest.mark.parametrize("rates", [(None, None), (0.05, 0.005)])
def test_the_diff_sets_the_settings_of_each_group(cls, rates):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    x = torch.randn(512, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 32)

    def groups():
        found = decay_groups(model, 0.05)
        return [group if lr is None else {**group, "lr": lr} for group, lr in zip(found, rates, strict=True)]

    optimizer = cls(groups(), lr=0.05)
    torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[rate or 0.05 for rate in rates], total_steps=99, cycle_momentum=False
    )
    found = advise_model(
        model, lambda model, batch: (model(batch[0]) - 1).square().mean(), loader, optimizer, to_batch=128, steps=4
    )
    there = {"torch": torch, "sngm": sys.modules["sngm"], "groups": groups()}
    exec("\n".join(line[2:] for line in found["diff"] if line[0] == "+" and "loader" not in line), there)
    large, small = there["optimizer"].param_groups
    assert (large["lr"], large["weight_decay"]) == (found["lr"], found["weight_decay"])
    assert small["lr"] == pytest.approx(found["lr"] if rates[0] is None else found["lr"] / 10, rel=1e-2)
    assert small["weight_decay"] == 0.0
    assert f"max_lr=[{large['lr']:g}, {small['lr']:g}]" in " ".join(found["notes"])


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.01)]
)
def test_advice_is_the_same_wherever_onecyclelr_stands(make):
    lines = []
    for steps in (0, 30, 60):
        model, loss_fn, loader, optimizer = own_loop(make)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=100, base_momentum=0.8)
        optimizer.step()
        for _ in range(steps):
            schedule.step()
        found = advise_model(model, loss_fn, loader, optimizer, steps=16)
        lines.append(found["diff"][1])
        notes = " ".join(found["notes"])
        assert f"and the momentum: build it with max_lr={found['lr']:g} and the new number of steps" in notes
        assert "update_bn(loader, model) before each test" in notes
    assert lines[0] == lines[1] == lines[2]
    assert "momentum=0.8" in lines[0] or "betas=(0.8, 0.999)" in lines[0]


def test_a_learning_rate_that_may_be_lower_than_at_first_is_reported():
    model, loss_fn, loader, sgd = own_loop(lambda params: torch.optim.SGD(params, 0.01, momentum=0.9))
    assert not any(
        "built with" in warning for warning in advise_model(model, loss_fn, loader, sgd, steps=4)["warnings"]
    )
    sgd.param_groups[0]["lr"] = 0.001
    found = advise_model(model, loss_fn, loader, sgd, steps=4)
    assert any("built with lr 0.01" in warning and "0.001" in warning for warning in found["warnings"])
    torch.optim.lr_scheduler.CyclicLR(sgd, 0.001, 0.2)
    with pytest.raises(UsageError, match="CyclicLR"):
        advise_model(model, loss_fn, loader, sgd, steps=4)


def test_an_optimizer_of_a_part_of_the_model_is_advised_on_for_this_part():
    model, loss_fn, loader, _ = own_loop(torch.optim.SGD)
    head = torch.optim.SGD(model[-1].parameters(), 0.01, momentum=0.9)
    found = advise_model(model, loss_fn, loader, head, steps=4)
    assert found["diff"][1].startswith("+ optimizer = sngm.SNGM(params, ")
    assert "`params` is what your optimizer is given now." in found["notes"]
    for p in model[:-1].parameters():
        p.requires_grad_(False)
    frozen = advise_model(model, loss_fn, loader, head, steps=4)
    assert frozen["facts"] == found["facts"], "also the gradient noise is that of the trained part"
    assert frozen["diff"][1].startswith("+ optimizer = sngm.SNGM(model.parameters(), ")


def test_unusual_models_and_losses_are_advised_on_or_refused():
    model, loss_fn, loader, sgd = own_loop(lambda params: torch.optim.SGD(params, 0.01, momentum=0.9))
    slow, up = (torch.optim.SGD(model.parameters(), 0.002, 0.9, maximize=up) for up in (False, True))
    plain = advise_model(model, loss_fn, loader, slow, steps=80)
    risen = advise_model(model, lambda model, batch: -loss_fn(model, batch), loader, up, steps=80)
    assert risen["lr"] == pytest.approx(plain["lr"])
    with torch.no_grad(), pytest.raises(UsageError, match=r"gradients are disabled here \(torch.no_grad\)"):
        advise_model(model, loss_fn, loader, sgd, steps=4)
    with pytest.raises(UsageError, match="Does `loss_fn` use the model that it is given"):
        advise_model(model, lambda _, batch: loss_fn(model, batch), loader, sgd, steps=4)
    model.kept = model(next(iter(loader))[0])
    with pytest.raises(UsageError, match="`model` cannot be copied"):
        advise_model(model, loss_fn, loader, sgd, steps=4)


def test_the_advice_is_for_the_largest_group_that_trains():
    model, loss_fn, loader, _ = own_loop(torch.optim.SGD)
    model[0].requires_grad_(False)
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[-1].parameters(), "lr": 0.02}]
    found = advise_model(model, loss_fn, loader, torch.optim.SGD(groups, 0.1, momentum=0.9), steps=4)
    assert "SGD(groups, lr=0.02," in found["diff"][0]


def test_a_recipe_of_spectral_sngm_that_the_rule_refuses_is_refused_before_training():
    model, _, loader, spectral = own_loop(lambda params: SpectralSNGM(params, lr=1.0, weight_decay=1.0))
    with pytest.raises(UsageError, match="must be below 1"):
        advise_model(model, lambda model, batch: pytest.fail("trained"), loader, spectral)


class Words(Task):
    """Two words, and whether the second follows the first in the alphabet."""

    epochs = 1
    batches = (8, 32)

    def data(self):
        words = torch.randint(20, (128, 2), generator=torch.Generator().manual_seed(0))
        parts = Tensors(words, (words[:, 1] > words[:, 0]).float())
        return Splits(parts, parts)

    def model(self):
        return torch.nn.Sequential(torch.nn.Embedding(20, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))

    def loss(self, model, batch):
        return self.scores(model, batch)["loss"].mean()

    def scores(self, model, batch):
        logits, labels = model(batch[0]).squeeze(1), batch[1]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return {"loss": loss, "accuracy": ((logits > 0) == labels).float()}


@pytest.mark.parametrize(
    ("recipe", "groups"),
    [
        ("from_spectral", 'sngm.optim.decay_groups(model, weight_decay=1, embeddings={"ball": "rows"})'),
        ("from_adamw", "sngm.optim.decay_groups(model, weight_decay=0.02)"),
        ("from_sgd", "model.parameters()"),
    ],
)
def test_the_diff_for_a_task_has_the_groups_that_the_task_trains_with(recipe, groups):
    decay = {"from_spectral": 0.5, "from_adamw": 0.01, "from_sgd": 1e-4}[recipe]
    settings = {recipe: {"lr": 0.01, "batch": 8, "weight_decay": decay}}
    found = advise(Words(), **settings, to_batch=32, progress=False, device="cpu")
    assert f"({groups}, lr=" in found["diff"][1]


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_a_model_with_sparse_or_complex_gradients_is_advised_on(kind):
    torch.manual_seed(0)
    model = torch.nn.Embedding(50, 8, sparse=True)
    data = torch.randint(50, (512, 4))
    if kind == "complex":
        model, data = torch.nn.Linear(4, 8, dtype=torch.cfloat), torch.randn(512, 4, dtype=torch.cfloat)
    loader = torch.utils.data.DataLoader(data, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    found = advise_model(model, lambda model, batch: model(batch).abs().square().mean(), loader, optimizer, steps=4)
    assert found["lr"] > 0


def test_further_settings_of_the_optimizer_are_kept_or_named():
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "amsgrad": True, "foreach": False}
    adamw = advise_model(*own_loop(lambda params: torch.optim.AdamW(params, **settings)), steps=4)
    for line in adamw["diff"][:2]:
        assert line.endswith("betas=(0.9, 0.95), eps=1e-06, amsgrad=True, foreach=False)")
    betas = (torch.tensor(0.8), torch.tensor(0.95))
    tensors = advise_model(*own_loop(lambda params: torch.optim.AdamW(params, 1e-3, betas, foreach=False)), steps=4)
    assert "betas=(0.8, 0.95)" in tensors["diff"][1]
    assert "The check below trains without betas, eps, amsgrad, which `from_adamw` does not take." in adamw["notes"]
    settings = {"momentum": 0.9, "foreach": True}
    damped = advise_model(*own_loop(lambda params: torch.optim.SGD(params, 0.01, dampening=0.1, **settings)), steps=4)
    plain = advise_model(*own_loop(lambda params: torch.optim.SGD(params, 0.009, **settings)), steps=4)
    assert "lr=0.01, momentum=0.9, weight_decay=0, dampening=0.1, foreach=True)" in damped["diff"][0]
    assert damped["diff"][1].endswith("momentum=0.9, weight_decay=0)")
    assert damped["lr"] == pytest.approx(plain["lr"], rel=0.02), "only the first step differs"
    assert damped["check"] == plain["check"]
    assert any("lr * (1 - dampening) = 0.009" in note for note in damped["notes"])
    nesterov = advise_model(
        *own_loop(lambda params: torch.optim.SGD(params, 0.01, momentum=0.9, nesterov=True)), steps=4
    )
    assert "The check below trains without nesterov, which `from_sgd` does not take." in nesterov["notes"]


def test_a_loader_without_a_batch_size_is_read_if_its_items_are_batches():
    model, loss_fn, loader, sgd = own_loop(lambda params: torch.optim.SGD(params, lr=0.01))
    data = torch.utils.data
    sampler = data.BatchSampler(data.SequentialSampler(loader.dataset), 32, drop_last=True)
    own = data.DataLoader(loader.dataset, batch_size=None, sampler=sampler)
    assert advise_model(model, loss_fn, own, sgd, steps=4)["batch"] == 64


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        return ((torch.randn(8, generator=generator), torch.ones(1)) for _ in range(96))


def test_a_stream_of_batches_of_any_kind():
    model, _, _, sgd = own_loop(lambda params: torch.optim.SGD(params, lr=0.01))
    collate = torch.utils.data.default_collate
    loader = torch.utils.data.DataLoader(Stream(), 32, collate_fn=lambda rows: Pair(*collate(rows)))
    found = advise_model(model, lambda model, batch: (model(batch.x) - batch.y).square().mean(), loader, sgd, steps=4)
    assert "in steps 1 to 4" in found["facts"][0]["why"]


def test_batches_are_moved_with_their_types():
    class Own:
        def to(self, device):
            return device

    meta, x = torch.device("meta"), torch.ones(2)
    assert _moved(Own(), meta) == meta
    pair = _moved(Pair(x, (x, [Own()])), meta)
    assert isinstance(pair, Pair)
    assert (pair.x.device, pair.y[0].device, pair.y[1]) == (meta, meta, [meta])
    assert _moved(collections.UserDict(x=x), meta)["x"].device == meta


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss_fn": torch.nn.MSELoss()}, "(model, batch) -> loss, got MSELoss"),
        ({"optimizer": torch.optim.RMSprop([torch.nn.Parameter(torch.ones(1))])}, "SGD, Adam or AdamW"),
        ({"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)}, "the optimizer of this model?"),
        ({"model": torch.nn.Linear}, "`model` must be an nn.Module with parameters, got type"),
        ({"model": torch.nn.ReLU()}, "`model` must be an nn.Module with parameters, got ReLU"),
        ({"loss_fn": 3}, "(model, batch) -> loss, got int"),
        ({"loss_fn": torch.nn.functional.mse_loss}, "`loss_fn` is called as loss_fn(model, batch), and raised "),
        ({"loss_fn": lambda model, batch: 1.0}, "a loss must be a tensor with one number, got float"),
        ({"loss_fn": lambda model, batch: model(batch[0])}, "a tensor with one number, got shape (32, 1)"),
        (
            {"optimizer": "sgd"},
            "of torch's SGD, Adam or AdamW, or of sngm.SpectralSNGM, whose recipe the rule converts, got str",
        ),
        ({"loader": 3}, "`loader` must be a DataLoader or another iterable of batches, got int"),
        ({"loader": torch.utils.data.TensorDataset(torch.ones(9, 8))}, "iterable of batches, got TensorDataset"),
        ({"loader": iter([])}, "`loader` can be read only once; pass the DataLoader itself"),
        ({"loader": ["text"]}, "a batch must hold tensors, in a tuple, a list or a dict, got str"),
        ({"loader": []}, "`loader` has no batches"),
        ({"loader": torch.utils.data.DataLoader(range(9), batch_size=None)}, "give the DataLoader a `batch_size`"),
        ({"to_batch": 8}, "at least the batch of the loader, 32"),
        ({"to_batch": 64.0}, "`to_batch` must be a whole number of at least 1, got 64.0"),
        ({"to_batch": 513}, "`to_batch` must be at most the 512 samples of the loader's dataset, got 513"),
        ({"steps": 1}, "`steps` must be a whole number of at least 2"),
        ({"steps": "all"}, "`steps` must be a whole number of at least 2, got 'all'"),
    ],
)
def test_a_loop_that_cannot_be_advised_on_is_refused(change, words):
    names = ("model", "loss_fn", "loader", "optimizer")
    parts = dict(zip(names, own_loop(lambda params: torch.optim.SGD(params, lr=0.01)), strict=True))
    with pytest.raises(UsageError, match=re.escape(words)):
        advise_model(**{**parts, "steps": 4, **change})


def test_advice_on_a_loop_is_the_same_again_and_leaves_the_random_numbers_alone():
    parts = own_loop(lambda params: torch.optim.SGD(params, lr=0.01))
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(advise_model(*parts, steps=4)["norms"])
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]


def test_a_recipe_that_diverges_is_refused():
    for lr, steps in ((1e30, 4), (1.0, 200)):  # within a few steps; and after many, without normalisation
        parts = own_loop(lambda params: torch.optim.SGD(params, lr), layer=False)  # noqa: B023
        with pytest.raises(UsageError, match=rf"the recipe diverges: .* with lr {re.escape(f'{lr:g}')}, .* lower"):
            advise_model(*parts, steps=steps)
    model, _, loader, sgd = own_loop(lambda params: torch.optim.SGD(params, 0.01))
    with pytest.raises(UsageError, match=r"NaN or infinite at step 1 .* check the data for NaN"):
        advise_model(model, lambda model, batch: model(batch[0] * math.nan).mean(), loader, sgd, steps=4)


@pytest.mark.parametrize("layer", [True, False])
def test_a_loss_of_a_model_that_is_a_sum_is_advised_as_its_mean(layer):
    model, loss, loader, _ = own_loop(lambda params: torch.optim.SGD(params, 0.1), layer)

    def advised(loss_fn, scale):
        torch.manual_seed(0)
        sgd = torch.optim.SGD(model.parameters(), 0.01 / scale, weight_decay=1e-3 * scale)
        return advise_model(model, loss_fn, loader, sgd, to_batch=128, steps=16)

    mean = advised(loss, 1)
    summed = advised(lambda model, batch: loss(model, batch) * len(batch[0]), 32)
    assert summed["lr"] == pytest.approx(mean["lr"], rel=0.01)
    assert summed["weight_decay"] == pytest.approx(128 * mean["weight_decay"], rel=0.01)
    assert summed["noise_scale"] == pytest.approx(mean["noise_scale"], rel=0.01)
    assert summed["check"] == mean["check"]
    assert any("is a sum over the batch" in note for note in summed["notes"])
    assert not any("is a sum over the batch" in note for note in mean["notes"])


def test_nets_without_normalisation_are_warned_of_in_the_output_and_on_the_page(tmp_path):
    result = sngm("advise own.py:Line --from-sgd lr=0.01,batch=8 --to-batch 32 --device cpu --out bare")
    assert "Beware: The model has no normalisation layer" in result.out
    assert "39.75 %" in result.out
    page = (tmp_path / "bare" / "report.html").read_text()
    assert page.index("has no normalisation layer") < page.index("Train with it")
    normed = OWN_TASK.replace("return nn.Linear(2, 1)", "return nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 1))")
    (tmp_path / "normed.py").write_text(normed)
    assert advice("normed.py:Line --from-sgd lr=0.01,batch=8 --to-batch 32 --device cpu")["warnings"] == []


def test_what_the_task_sets_by_batch_or_method_is_said(tmp_path):
    by_batch = """
    clip = {"msgd": 0.25}

    @classmethod
    def usual(cls, batch):
        return {**super().usual(batch), "schedule": "cosine" if batch < 16 else "linear", "warmup": batch / 16}
"""
    (tmp_path / "odd.py").write_text(OWN_TASK + by_batch)
    found = advice("odd.py:Line --from-sgd lr=0.01,batch=8 --to-batch 32 --device cpu")
    (said,) = [text for text in found["warnings"] if "train both alike" in text]
    assert "schedule cosine before, linear now; warmup 0.5 before, 2 now; clip 0.25 before, none now" in said
    plain = advice("own.py:Line --from-sgd lr=0.01,batch=8 --to-batch 32 --device cpu")
    assert not any("train both alike" in text for text in plain["warnings"])


def test_a_loss_that_is_a_sum_is_advised_as_its_mean():
    (Path.cwd() / "summed.py").write_text(SUMMED)
    mean = advice("own.py:Line --from-sgd lr=0.008,batch=8,weight_decay=1e-4 --to-batch 32 --device cpu")
    # the same steps: gradients are 8 times as large at batch 8, and 32 times at batch 32
    summed = advice("summed.py:Line --from-sgd lr=0.001,batch=8,weight_decay=8e-4 --to-batch 32 --device cpu")
    assert facts(summed)["learning rate"] == pytest.approx(facts(mean)["learning rate"], rel=0.01)
    assert facts(summed)["weight decay"] == pytest.approx(32 * facts(mean)["weight decay"], rel=0.01)


def test_what_is_printed_can_be_run_as_it_is_and_the_page_says_the_same(tmp_path):
    recipe = "lr=0.03,batch=32,weight_decay=1e-3,momentum=0.8,epochs=2"
    line = f"advise digits --set width=4 --from-sgd {recipe} --to-batch 128 --pilot-steps 4 --device cpu --out here"
    result = sngm(line)
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
        ("lr=0.1,batch=32,nesterov=True", "has no 'nesterov'"),
        ("lr=a,batch=32", "lr must be a finite number"),
        ("lr=-1,batch=32", "from_sgd`: lr must be a finite number > 0"),
        ("lr=0.1,batch=0", "batch must be a whole number > 0"),
        ("lr=0.1,batch=32.5", "batch must be a whole number > 0"),
        ("lr=0.1,batch=32,momentum=1", "momentum must be"),
        ("lr=0.1,batch=32,weight_decay=-1", "weight_decay must be"),
        ("lr=0.1,,batch=32", "separated by commas"),
        ("lr=0.1,lr=0.2,batch=32", "lr is set twice"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(text, words):
    with pytest.raises(UsageError, match=words):
        Recipe.of(parse_settings(split_list(text)))


def test_whole_numbers_of_a_recipe_may_have_an_exponent():
    recipe = Recipe.of(parse_settings(split_list("lr=0.1,batch=1e3,epochs=2e1")))
    assert (recipe.batch, recipe.epochs) == (1000, 20)
    assert isinstance(recipe.batch, int)


def test_what_cannot_be_advised_is_one_line(tmp_path):
    def line(text, *words, code=2):
        refused(sngm(f"advise {text} --device cpu"), *words, code=code)

    line("digits", "give one of --from-sgd, --from-adamw, --from-spectral and --gradients")
    line("digits --from-sgd lr=0.1,batch=32 --gradients 100 --to-batch 64", "give one of --from-sgd")
    line("digits --gradients 100 --to-batch 64", "--to-batch, --last-batch and --verify need a recipe")
    line("digits --gradients 100 --verify", "--to-batch, --last-batch and --verify need a recipe")
    line(
        "digits --from-sgd lr=0.1,batch=32 --seeds 5",
        "--seeds is the number of runs that --verify makes: give --verify too",
    )
    line("digits --from-sgd lr=0.1,batch=32 --verify --seeds 0", "--seeds must be at least 1")
    line("--from-sgd lr=0.1,batch=32 --to-batch 64", "needs a task")
    line("digit --from-sgd lr=0.1,batch=32 --to-batch 64", "did you mean 'digits'")
    line("digit --gradients 100", "did you mean 'digits'")
    line("digits --from-sgd lr=0.1,batch=32 --to-batch 16", "--to-batch must be at least")
    line("digits --from-sgd lr=0.1,batch=32 --to-batch 2000", "at most 1280")
    line("digits --from-sgd lr=0.1,batch=32.5 --to-batch 64", "batch must be a whole number")
    line("digits --from-sgd lr=-1,batch=32 --to-batch 64", "lr must be a finite number > 0")
    line("digits --from-sgd lr=0.1,batch=32 --to-batch 64 --sigma 1", "--sigma")
    line("digits --from-sgd lr=0.1,batch=32 --to-batch 64 --pilot-steps 0", "--pilot-steps must be")
    line("cifar10-resnet20 --from-sgd lr=0.1,batch=100 --to-batch 800 --data-dir .", "must be a multiple of")
    line("cifar10-resnet20 --from-sgd lr=0.1,batch=128 --to-batch 8192 --data-dir .", "cifar", code=3)
    line("digits --gradients 100 --L 1", "--L: given without a task only")
    line("digits --gradients nan", "--gradients must be")
    line("--gradients 0.5 --gap 1 --L 1 --sigma 1", "--gradients must be")
    line("--gradients 100 --gap 1", "--L and --sigma must be given")
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
    for task, words in (("zero", "every gradient of the pilot is zero"), ("broken", "diverges")):
        result = sngm(f"advise {task}.py:Line --from-sgd lr=0.1,batch=8 --to-batch 32 --device cpu")
        assert result.code == 2
        assert result.out == ""
        assert words in result.err.splitlines()[-1]
    result = sngm("advise own.py:Line --from-sgd lr=1e30,batch=8 --to-batch 32 --device cpu")
    assert result.code == 2
    assert "the recipe diverges: the loss or its gradient is NaN or infinite" in result.err.splitlines()[-1]
    result = sngm("advise digits --from-sgd lr=5,batch=32 --to-batch 64 --device cpu")
    assert result.code == 2
    assert "the recipe does not train: the loss is 2." in result.err.splitlines()[-1]


# ---------------------------------------------------------------- a budget


def test_each_curve_is_the_best_bound_of_the_theory_and_all_are_held_to_one_target():
    budget, gap, sigma, beta, L = 1e6, 2.0, 3.0, 0.9, 5.0
    constants = Constants(gap, sigma, beta, L, ((0.1, 4.0), (10.0, 0.5)))
    msgd, sngm_, relaxed = budget_curves(budget, constants)
    assert msgd.batches == [2**k for k in range(20)]
    for i in (0, 7, 19):
        batch, steps = msgd.batches[i], budget / msgd.batches[i]
        printed = theory.msgd_best(gap, steps, batch, L, sigma, beta)
        mended = theory.msgd_best(gap, steps, 1, L, sigma / math.sqrt(batch), beta)
        assert (msgd.rates[i], msgd.bounds[i] ** 2) == pytest.approx((mended.eta, mended.bound))
        assert mended.bound <= printed.bound
        assert (sngm_.rates[i], sngm_.bounds[i]) == pytest.approx(
            tuple(theory.smooth_best(gap, steps, batch, L, sigma, beta))
        )
        both = [theory.relaxed_best(gap, steps, batch, own, sigma, beta, lam) for lam, own in constants.relaxed]
        assert relaxed.bounds[i] == pytest.approx(min(best.bound for best in both))
    target = NEAR_LOWEST * min(min(curve.bounds) for curve in (msgd, sngm_, relaxed))
    for curve in (msgd, sngm_, relaxed):
        tolerated = [batch for batch, bound in zip(curve.batches, curve.bounds, strict=True) if bound <= target]
        assert (curve.largest is None) == (not tolerated)
        assert curve.largest is None or curve.batches[curve.largest] == tolerated[-1]
        assert curve.bounds[curve.best] == min(curve.bounds)
    assert msgd.largest is not None
    assert max(budget_curves(budget, constants._replace(samples=1000))[0].batches) == 512


def test_a_method_that_is_bad_at_small_batches_does_not_bear_larger_ones_for_it():
    """Compared with its own lowest bound, SNGM was given batch 4,096 here, with more than twice MSGD's bound."""
    found = advise_budget(8e6, Constants(2.3, 15, 0.9, 20), measured=False)
    assert [row["batch"] for row in found["methods"]] == [1024, None]
    # with hardly any noise the bounds are nearly equal, and so are the largest batches
    quiet = budget_curves(2**20, Constants(gap=1, sigma=1e-5, beta=0, L=1))
    assert quiet[1].bounds[0] > quiet[0].bounds[0]
    assert [curve.largest for curve in quiet] == [0, 0]


def test_the_bound_of_msgd_is_never_above_that_of_theorem_1():
    """Check the derivation in docs/advise.md with random constants."""
    generator = np.random.default_rng(0)
    for beta in (0.0, 0.05, 0.5, 0.9, 0.99):
        gap, sigma, L = 10 ** generator.uniform(-4, 4, (3, 100))
        for values in zip(gap, sigma, L, strict=True):
            msgd, sngm_ = budget_curves(1e6, Constants(values[0], values[1], beta, values[2]))
            assert (np.array(msgd.bounds) <= np.array(sngm_.bounds) * (1 + 1e-9)).all(), (beta, values)


def test_a_bound_below_the_other_at_every_batch_is_said_in_the_output_and_on_the_page(tmp_path):
    result = sngm("advise --gradients 8e6 --gap 2.3 --L 20 --sigma 15 --out here")
    words = "The bound of msgd lies below that of sngm at every batch"
    page = (tmp_path / "here" / "report.html").read_text()
    assert words in result.out
    assert words in page
    assert "msgd 1,024 at lr 0.000263; sngm none" in page
    same = advice("--gradients 8e6 --gap 2.3 --L 20 --sigma 0")
    assert not any("below that of" in text for text in same["warnings"]), "without noise both bounds are equal"


def test_numbers_are_advised_on_without_a_task():
    found = advice("--gradients 8e6 --gap 2.3 --L 20 --sigma 0.01")
    assert [row["method"] for row in found["methods"]] == ["msgd", "sngm"]
    for row in found["methods"]:
        assert row["batch"] is None or row["steps"] == math.ceil(8e6 / row["batch"])
        assert row["sources"]["lr"] == "theory"
        assert row["sources"]["batch"] == "rule of thumb"
    assert Path(found["report"]).is_file()
    relaxed = advice("--gradients 8e6 --gap 2.3 --L 20 --sigma 15 --lam 1 --beta 0.5")
    assert [row["method"] for row in relaxed["methods"]] == ["sngm (relaxed)"]
    assert relaxed["methods"][0]["batch"] > 1
    still = advice("--gradients 100 --gap 0 --L 0 --sigma 0")
    assert [row["bound"] for row in still["methods"]] == [0, 0]


PILOT = {
    "status": "finished",
    "config": {"method_settings": {"momentum": 0.9}},
    "points": [
        {"loss": 2.0, "gradient_norm": 3.0, "hessian_norm": 20.0},
        {"loss": 0.1, "gradient_norm": 0.1, "hessian_norm": 0.5},
    ],
    "frontier": [{"lambda": 0.0, "L": 20.0}, {"lambda": 1.0, "L": 17.0}, {"lambda": 10.0, "L": 0.0}],
    "L": 20.0,
    "L_settled": True,
    "training_samples": 1000,
    "sigma": 5.0,
    "sigma_high": 6.0,
}


def test_what_a_pilot_measured_is_taken_with_care():
    found = Constants.of_probe(PILOT)
    assert found.relaxed == ((1.0, 17.0), (10.0, 0.5)), "no L below what the Hessian has near a minimum"
    assert found.sigma == 6.0, "the high end of the interval"
    assert found.doubts == ()
    facts = {fact["name"]: fact["source"] for fact in found.facts(measured=True)}
    assert (facts["L at lambda 1"], facts["L at lambda 10"]) == ("measured", "rule of thumb")
    assert not any("are safe" in text for text in advise_budget(1e6, found, measured=True)["notes"])
    for high in (None, math.nan):
        rough = Constants.of_probe(PILOT | {"sigma_high": high})
        assert rough.sigma == 5.0
        assert "more samples" in rough.doubts[0]
    for later in ("L_settled", "sigma_high", "training_samples"):  # older records do not have these
        with pytest.raises(UsageError, match="make another with sngm probe"):
            Constants.of_probe({key: value for key, value in PILOT.items() if key != later})


def test_an_L_that_had_not_settled_is_warned_of(tmp_path):
    small = "--set width=4 --iterations 2 --samples 128 --points 2 --steps 2"
    probe = sngm(f"probe digits --device cpu {small} --out rough")
    assert probe.code == 0, probe.err
    assert "L, not settled, at least" in probe.out
    result = sngm("advise rough --gradients 1e7 --out said")
    assert "Beware: L may be far too small" in result.out
    assert "L may be far too small" in (tmp_path / "said" / "report.html").read_text()
    found = advice("rough --gradients 1e7")
    assert max(found["curves"][0]["batches"]) == 1024, "digits have 1,280 samples to train on"


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
    for found in (pilot, folder):
        assert max(curve["batches"][-1] for curve in found["curves"]) == 64, "no batch is above the 96 samples"
    page = (tmp_path / "piloted" / "report.html").read_text()
    assert "Bound against batch" in page
    assert not re.search(r"<script|https?://(?!www\.w3\.org)|\bnan\b", page)


# ---------------------------------------------------------------- advice put into practice


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


def test_folders_are_refused_before_the_work(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out in ("docs", "file"):
        refused(sngm(f"advise --gradients 1e6 --gap 1 --L 1 --sigma 1 --out {out}"), out, "--out")
        refused(sngm(f"probe digits --out {out}"), out, "--out")
        refused(sngm(f"check-theory --only lars --out {out}"), out, "--out")
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["page.md"]


def test_numbers_beyond_all_bounds_are_refused():
    refused(sngm("advise --gradients 8e6 --gap 2.3 --L 1e300 --sigma 1e300"), "not finite")


def test_settings_of_a_task_are_carried_over_and_the_data_folder_too(tmp_path):
    line = "digits --from-sgd lr=0.1,batch=64 --to-batch 256 --set width=4 --data-dir here --device cpu"
    found = advice(f"{line} --pilot-steps 5")
    assert found["command"].endswith("--set width=4 --data-dir here")
    assert found["check"].endswith("--to-batch 256 --pilot-steps 5 --set width=4 --data-dir here --verify")
    refused(sngm(f"advise {line.replace('width=4', 'nosuch=4')}"), "nosuch", "width")
    refused(sngm("advise --gradients 1e6 --gap 1 --L 1 --sigma 1 --set width=4"), "--set: there is no task")


def test_advice_from_other_numbers_has_a_folder_of_its_own():
    lines = ("8e6 --sigma 1", "8e6 --sigma 2", "8000001 --sigma 1", "8e6 --sigma 1")
    reports = [advice(f"--gap 2.3 --L 10 --gradients {numbers}")["report"] for numbers in lines]
    assert reports[0] == reports[3]
    assert len(set(reports)) == 3
