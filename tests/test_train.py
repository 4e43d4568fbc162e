"""Single runs: gradients and statistics compared with plain loops, samples, records and ways to end."""

import copy
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from runs import Blobs, assert_near, assert_same_end, config, ended, metrics, record, run, state, strict_json
from torch import nn
from torch.func import functional_call

import sngm
from sngm.errors import Interrupted, UsageError
from sngm.optim import reference
from sngm.tasks import Moment, Schedule, Splits, Tensors
from sngm.training import Options, RunConfig, rng, score, train
from sngm.training import load_model as load
from sngm.training.build import build_optimizer, set_rates
from sngm.training.evaluate import samples_of
from sngm.training.loop import CHECK_EVERY, State

EXACT = 1e-10
RATES = {"msgd": 0.1, "sngm": 0.1, "lars": 30.0, "lamb": 0.01, "adam": 0.01, "clars": 3.0, "extrap-sgd": 0.1}


def first_model(wanted: RunConfig) -> nn.Module:
    rng.seed_torch(wanted.seed, rng.MODEL)
    return wanted.build_task().model().double()


def batches_of(wanted: RunConfig):
    """Return the global batches of a run in order."""
    samples = wanted.build_task().data().train
    for epoch in range(wanted.epochs):
        order = rng.permutation(len(samples), wanted.seed, rng.ORDER, epoch)
        for i in range(len(samples) // wanted.batch):
            yield samples[order[i * wanted.batch : (i + 1) * wanted.batch]]


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    ("method", "workers", "micro"),
    [(method, 4, 2) for method in ("msgd", "sngm", "lars", "lamb", "adam")] + [("sngm", 1, 4), ("sngm", 4, 4)],
)
def test_accumulation_equals_one_pass_over_the_batch(method, workers, micro, tmp_path):
    wanted = config(method, lr=RATES[method], epochs=2, workers=workers, micro=micro)
    model = first_model(wanted)
    optimizer = build_optimizer(wanted, model)
    losses = []
    for x, y in batches_of(wanted):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    run(tmp_path, wanted)
    assert_near(state(tmp_path)["model"], model.state_dict(), EXACT)
    per_epoch = len(losses) // wanted.epochs
    means = [sum(losses[i : i + per_epoch]) / per_epoch for i in range(0, len(losses), per_epoch)]
    assert [line["train_loss"] for line in metrics(tmp_path)] == pytest.approx(means, rel=EXACT)


def gradients_at(model: nn.Module, weights: list, x, y) -> list:
    """Return the gradients of the mean loss of these samples at these weights."""
    leaves = [w.detach().clone().requires_grad_() for w in weights]
    names = [name for name, _ in model.named_parameters()]
    output = functional_call(model, dict(zip(names, leaves, strict=True)), x)
    return list(torch.autograd.grad(nn.functional.cross_entropy(output, y), leaves))


def by_hand(wanted: RunConfig, step) -> dict[str, torch.Tensor]:
    """Return the weights after all steps; ``step(model, weights, momenta, x, y)`` returns new weights and momenta."""
    model = first_model(wanted)
    weights = [p.detach().clone() for p in model.parameters()]
    momenta = [torch.zeros_like(w) for w in weights]
    for x, y in batches_of(wanted):
        weights, momenta = step(model, weights, momenta, x, y)
    return dict(zip([name for name, _ in model.named_parameters()], weights, strict=True))


@pytest.mark.parametrize(("workers", "bn_group", "clip"), [(1, 4, None), (2, 4, 0.05), (1, 1, 0.05), (2, 2, 50.0)])
def test_clars_gets_the_mean_norms_of_micro_batches(workers, bn_group, clip, tmp_path):
    usual = {"epochs": 1, "method_settings": {"weight_decay": 0.01, "max_ratio": None}}
    wanted = config("clars", lr=3.0, workers=workers, micro=4, bn_group=bn_group, clip=clip, **usual)

    def step(model, weights, momenta, x, y):
        parts = [gradients_at(model, weights, *pair) for pair in zip(x.split(4), y.split(4), strict=True)]
        mean = [sum(gs) / len(parts) for gs in zip(*parts, strict=True)]
        norms = [float(sum(g.norm() for g in gs)) / len(parts) for gs in zip(*parts, strict=True)]
        if clip:
            factor = (clip / (torch.cat([g.flatten() for g in mean]).norm() + 1e-6)).clamp(max=1.0)
            assert (factor < 1) == (clip < 1)
            mean, norms = [factor * g for g in mean], [float(factor) * norm for norm in norms]
        eta = [3.0 if w.ndim > 1 else 3.0 * 0.01 for w in weights]  # biases: trust_coefficient * lr
        wd = [0.01 if w.ndim > 1 else 0.0 for w in weights]
        return reference.clars(weights, momenta, mean, norms, eta=eta, wd=wd, max_ratio=None)

    run(tmp_path, wanted)
    assert_near(state(tmp_path)["model"], by_hand(wanted, step), EXACT)


def test_extrap_sgd_looks_ahead_along_each_workers_own_gradient(tmp_path):
    settings = {"weight_decay": 0.01, "inner_lr": 0.5}
    wanted = config("extrap-sgd", lr=0.2, epochs=1, workers=4, micro=2, method_settings=settings)

    def step(model, weights, momenta, x, y):
        workers = [
            lambda at, pair=pair: gradients_at(model, at, *pair) for pair in zip(x.split(4), y.split(4), strict=True)
        ]
        wd = [0.01 if w.ndim > 1 else 0.0 for w in weights]
        return reference.extrap_sgd(weights, momenta, workers, eta=0.2, inner_eta=0.5, wd=wd)

    run(tmp_path, wanted)
    assert_near(state(tmp_path)["model"], by_hand(wanted, step), EXACT)


def test_clip_limits_the_norm_of_the_whole_gradient(tmp_path):
    wanted = config("msgd", clip=0.05, epochs=1, micro=4, method_settings={"weight_decay": 0.0})

    def step(model, weights, momenta, x, y):
        grads = gradients_at(model, weights, x, y)
        size = torch.cat([g.flatten() for g in grads]).norm()
        assert size > 0.05
        return reference.msgd(weights, momenta, [g * 0.05 / (size + 1e-6) for g in grads], eta=0.1)

    run(tmp_path, wanted)
    assert_near(state(tmp_path)["model"], by_hand(wanted, step), EXACT)


def test_clip_and_extrap_sgd_do_not_go_together(tmp_path):
    with pytest.raises(UsageError, match="`clip` cannot reach"):
        run(tmp_path, config("extrap-sgd", clip=1.0))


# ---------------------------------------------------------------- BatchNorm


@pytest.mark.parametrize("running_stats", ["first", "mean"])
def test_batch_norm_follows_micro_batches_and_keeps_the_statistics_asked_for(running_stats, tmp_path):
    wanted = config("msgd", epochs=1, workers=4, micro=2, settings={"norm": True}, running_stats=running_stats)
    model = first_model(wanted)
    optimizer = build_optimizer(wanted, model)
    for x, y in batches_of(wanted):
        optimizer.zero_grad()
        ends = []
        for worker in range(4):
            own = copy.deepcopy(model)
            for i in (0, 2):
                piece = slice(worker * 4 + i, worker * 4 + i + 2)
                own.zero_grad()
                nn.functional.cross_entropy(own(x[piece]), y[piece]).backward()
                for p, q in zip(model.parameters(), own.parameters(), strict=True):
                    p.grad = q.grad / 8 if p.grad is None else p.grad + q.grad / 8
            ends.append([b.clone() for b in own.buffers()])
        for b, *of_workers in zip(model.buffers(), *ends, strict=True):
            mean = running_stats == "mean" and b.is_floating_point()
            b.copy_(sum(of_workers) / 4 if mean else of_workers[0])
        optimizer.step()
    run(tmp_path, wanted)
    assert_near(state(tmp_path)["model"], model.state_dict(), EXACT)


def test_extrap_sgd_keeps_the_statistics_of_the_second_look(tmp_path):
    wanted = config("extrap-sgd", epochs=1, batch=96, workers=2, settings={"norm": True})
    model = first_model(wanted)
    (x, y), *_ = batches_of(wanted)
    own, (x, y) = copy.deepcopy(model), (x[:48], y[:48])
    nn.functional.cross_entropy(own(x), y).backward()
    ahead = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(ahead.parameters(), own.parameters(), strict=True):
            p -= wanted.method_settings["inner_lr"] * q.grad
    ahead(x)
    run(tmp_path, wanted)
    assert_near(
        {k: v for k, v in state(tmp_path)["model"].items() if k.startswith("1.running")},
        {k: v for k, v in ahead.state_dict().items() if k.startswith("1.running")},
        EXACT,
    )


# ---------------------------------------------------------------- learning rates


@pytest.mark.parametrize(("schedule", "warmup"), [("cosine", 0.0), ("linear", 0.0), ("polynomial(power=3)", 1.5)])
def test_every_step_has_the_rate_of_its_schedule(schedule, warmup, tmp_path, monkeypatch):
    rates = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)))
    run(tmp_path, config(schedule=schedule, warmup=warmup))
    expected = [0.1 * Schedule(schedule, warmup)(Moment(t, 18, t // 6, 3)) for t in range(18)]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert [line["lr"] for line in metrics(tmp_path)] == pytest.approx(expected[5::6], rel=1e-12)


def test_plateau_divides_the_rate_by_the_recorded_scores(tmp_path, monkeypatch):
    scores = iter([0.5, 0.4, 0.6, 0.6, 0.7])
    evaluate = Blobs.evaluate
    monkeypatch.setattr(
        Blobs,
        "evaluate",
        lambda self, model, held: (
            evaluate(self, model, held) | ({"accuracy": next(scores)} if validating() else {"accuracy": 0.0})
        ),
    )
    turn = [0]

    def validating() -> bool:
        turn[0] += 1
        return turn[0] % 2 == 1

    run(tmp_path, config(schedule="plateau(factor=10)", epochs=5))
    assert [line["validation_accuracy"] for line in metrics(tmp_path)] == [0.5, 0.4, 0.6, 0.6, 0.7]
    assert [line["lr"] for line in metrics(tmp_path)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])


def test_the_best_epoch_is_the_first_with_the_best_score_even_if_some_epochs_have_none():
    scores = {1: None, 2: 0.5, 3: math.nan, 4: 0.7, 5: 0.7, 6: None}
    history = [{"epoch": e} if s is None else {"epoch": e, "validation_accuracy": s} for e, s in scores.items()]
    assert State(history=history).best(Blobs())["epoch"] == 4
    assert State(history=history[::5]).best(Blobs())["epoch"] == 6


def test_plateau_without_a_validation_set_is_refused(tmp_path):
    with pytest.raises(UsageError, match="needs a validation set"):
        run(tmp_path, config(schedule="plateau", settings={"validation": False}))
    assert run(tmp_path, config(schedule="plateau", settings={"validation": False}, part="select"))["result"]


# ---------------------------------------------------------------- seeds and samples


@pytest.fixture
def seen(monkeypatch):
    """Return the inputs of each micro-batch, a row per sample."""
    taken: list[list[tuple[float, ...]]] = []
    batch = Blobs.batch

    def note(self, samples, indices, **place):
        x, y = batch(self, samples, indices, **place)
        taken.append([tuple(row) for row in x.tolist()])
        return x, y

    monkeypatch.setattr(Blobs, "batch", note)
    return taken


def draws_and_order(folder: Path, seen: list, monkeypatch, seed: int, **given):
    """Return random numbers drawn in the loss, and the samples in order."""
    seen.clear()
    drawn = []
    monkeypatch.setattr(
        Blobs, "loss", lambda self, model, batch: (drawn.append(torch.rand(2).tolist()), nn_loss(model, batch))[1]
    )
    torch.manual_seed(len(str(folder)))
    run(folder, config(seed=seed, **given))
    return list(drawn), list(seen)


def nn_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_order_dropout_and_first_weights_are_functions_of_the_seed(tmp_path, seen, monkeypatch):
    once = draws_and_order(tmp_path / "a", seen, monkeypatch, 0, workers=2)
    torch.rand(7)
    again = draws_and_order(tmp_path / "longer", seen, monkeypatch, 0, workers=2)
    other = draws_and_order(tmp_path / "c", seen, monkeypatch, 1, workers=2)
    assert once == again
    assert_same_end(tmp_path / "a", tmp_path / "longer")
    assert once[0] != other[0]
    assert once[1] != other[1]
    assert len({tuple(draw) for draw in once[0]}) == len(once[0]) == 3 * 6 * 2
    assert once[1][:12] != once[1][12:24], "every epoch has its own order"
    assert not torch.equal(first_model(config(seed=0))[0].weight, first_model(config(seed=1))[0].weight)


def test_a_resumed_run_draws_the_same_numbers(tmp_path, seen, monkeypatch):
    whole = draws_and_order(tmp_path / "a", seen, monkeypatch, 0)
    seen.clear()
    with pytest.raises(Interrupted):
        run(tmp_path / "b", config(), stop_at=8)
    rest = draws_and_order(tmp_path / "b", seen, monkeypatch, 0)
    assert rest == (whole[0][8:], whole[1][8:])


def test_first_weights_are_those_of_the_seed_whatever_ran_before(tmp_path):
    torch.manual_seed(5)
    run(tmp_path, config(lr=1e-300, schedule="constant", method_settings={"weight_decay": 0.0}))
    assert_near(state(tmp_path)["model"], first_model(config()).state_dict(), EXACT)


def test_full_runs_train_on_everything_once_an_epoch(tmp_path, seen):
    run(tmp_path, config(micro=4))
    everything = sorted(tuple(row) for row in runs.points(96, 1).tensors[0].tolist())
    rows = [row for micro in seen for row in micro]
    for epoch in range(3):
        assert sorted(rows[epoch * 96 : (epoch + 1) * 96]) == everything


class Sealed:
    """A dataset that raises an error when a sample is read."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, indices):
        raise AssertionError("the test set was looked at")


@pytest.mark.parametrize("validation", [True, False])
def test_runs_that_select_never_see_the_test_set(validation, tmp_path, monkeypatch, seen):
    data = Blobs.data
    monkeypatch.setattr(Blobs, "data", lambda self: Splits(data(self).train, Sealed(), data(self).validation))
    wanted = config(part="select", settings={"validation": validation}, batch=11)
    result = run(tmp_path, wanted)["result"]
    assert set(result) == {"train_loss", "validation_loss", "validation_accuracy"}
    trained = {row for micro in seen for row in micro}
    _, held = samples_of(wanted.build_task(), wanted)
    validated = {tuple(row) for row in held["validation"][torch.arange(len(held["validation"]))][0].tolist()}
    assert not trained & validated
    if not validation:
        assert len(validated) == 19
        assert trained | validated == {tuple(row) for row in runs.points(96, 1).tensors[0].tolist()}


def test_the_held_out_part_is_the_same_for_every_seed():
    parts = []
    for seed in range(2):
        wanted = config(part="select", settings={"validation": False}, seed=seed)
        parts.append(samples_of(wanted.build_task(), wanted)[1]["validation"].indices)
    assert torch.equal(*parts)


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"batch": 97}, 96),
        ({"batch": 1024, "workers": 8}, 96),
        ({"batch": 100, "workers": 10}, 90),
        ({"batch": 78, "part": "select", "settings": {"validation": False}}, 77),
    ],
)
def test_a_batch_larger_than_the_data_is_refused_naming_the_largest(given, most, tmp_path):
    with pytest.raises(UsageError, match=rf"batch={given['batch']} is more than the \d+ samples .* at most {most}$"):
        run(tmp_path / "a", config(**given))
    assert run(tmp_path / "b", config(**{**given, "batch": most}))["status"] == "finished"


# ---------------------------------------------------------------- divergence


@pytest.mark.parametrize("settings", [{}, {"norm": True}])
def test_divergence_is_a_result(settings, tmp_path):
    found = run(tmp_path, config(lr=1e300, settings=settings))
    assert found["status"] == record(tmp_path)["status"] == "diverged"
    assert record(tmp_path)["result"] == {}
    assert 0 < record(tmp_path)["diverged_at_step"] <= 18
    assert len(metrics(tmp_path)) == (record(tmp_path)["diverged_at_step"] - 1) // 6
    before = (tmp_path / "run.json").stat().st_mtime_ns
    assert run(tmp_path, config(lr=1e300, settings=settings))["status"] == "diverged"
    assert (tmp_path / "run.json").stat().st_mtime_ns == before


def test_divergence_is_noticed_within_a_long_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(Blobs, "loss", lambda self, model, batch: nn_loss(model, batch) * torch.nan)
    found = run(tmp_path, config(batch=1))
    assert (found["status"], found["diverged_at_step"]) == ("diverged", CHECK_EVERY)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_number_become_null(value, tmp_path, monkeypatch):
    scores = Blobs.scores
    monkeypatch.setattr(
        Blobs,
        "scores",
        lambda self, model, batch: scores(self, model, batch) | {"odd": torch.full((len(batch[0]),), value)},
    )
    found = run(tmp_path, config())
    assert found["status"] == "finished"
    assert strict_json(json.dumps(found))["result"]["test_odd"] is None
    assert record(tmp_path)["result"]["test_odd"] is None
    assert [line["test_odd"] for line in metrics(tmp_path)] == [None] * 3
    assert record(tmp_path)["result"]["test_accuracy"] == found["result"]["test_accuracy"] > 0


def test_scores_of_numpy_or_torch_are_kept_and_resumed(tmp_path, monkeypatch):
    evaluate = Blobs.evaluate
    monkeypatch.setattr(
        Blobs,
        "evaluate",
        lambda self, model, held: evaluate(self, model, held) | {"f1": np.float32(0.25), "auc": torch.tensor(0.5)},
    )
    with pytest.raises(Interrupted):
        run(tmp_path, config(), stop_at=8)
    assert run(tmp_path, config())["result"]["test_f1"] == 0.25
    assert metrics(tmp_path)[0]["test_auc"] == 0.5


def test_a_loss_that_is_not_one_number_is_refused(tmp_path, monkeypatch):
    loss = Blobs.loss
    monkeypatch.setattr(Blobs, "loss", lambda self, model, batch: loss(self, model, batch).repeat(3))
    with pytest.raises(UsageError, match=r"loss\(\) must return one number, as a tensor, got a tensor of shape \(3,\)"):
        run(tmp_path, config())


def test_scores_without_the_metric_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Blobs, "metric", "bleu")
    with pytest.raises(UsageError, match="gives loss, accuracy but not its metric bleu"):
        run(tmp_path, config())
    assert record(tmp_path)["status"] == "failed"


def test_an_error_of_the_task_is_raised_and_recorded_and_the_run_goes_on_after(tmp_path, monkeypatch):
    run(tmp_path / "whole", config())
    with monkeypatch.context() as patch:
        batch = Blobs.batch

        def fail(self, samples, indices, *, seed, epoch):
            if epoch == 1:
                raise RuntimeError("the disk came off")
            return batch(self, samples, indices, seed=seed, epoch=epoch)

        patch.setattr(Blobs, "batch", fail)
        with pytest.raises(RuntimeError, match="the disk came off"):
            run(tmp_path / "a", config(), every=2)
    assert record(tmp_path / "a")["status"] == "failed"
    assert record(tmp_path / "a")["error"] == "RuntimeError: the disk came off"
    run(tmp_path / "a", config(), every=2)
    assert_same_end(tmp_path / "a", tmp_path / "whole")


# ---------------------------------------------------------------- the folder


def test_a_finished_run_is_not_repeated(tmp_path):
    found = run(tmp_path, config())
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert run(tmp_path, config()) == strict_json(json.dumps(found))
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_another_config_in_the_folder_is_refused_field_by_field(tmp_path):
    run(tmp_path, config())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError) as refusal:
        run(tmp_path, config("sngm", lr=0.2, settings={"norm": True}))
    for line in ("method: msgd there, sngm here", "lr: 0.1 there, 0.2 here", "task_settings.norm: not set there, True"):
        assert line in str(refusal.value)
    assert "batch" not in str(refusal.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\xff"])
def test_a_folder_whose_record_is_broken_is_refused(text, tmp_path):
    (tmp_path / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"run\.json (is (not|broken)|must contain a JSON object)"):
        run(tmp_path, config())


def test_the_record_holds_the_config_and_the_scores_as_fractions(tmp_path):
    run(tmp_path, config("sngm"))
    found = record(tmp_path)
    assert RunConfig.from_dict(found["config"]) == config("sngm")
    assert found["hash"] == config("sngm").hash
    assert set(found["result"]) == {
        "train_loss", "test_loss", "test_accuracy", "validation_loss", "validation_accuracy"
    }  # fmt: skip
    assert 0 < found["result"]["test_accuracy"] <= 1
    assert found["parameters"] == sum(p.numel() for p in first_model(config()).parameters())
    assert found["timing"]["seconds"] > 0
    assert {"versions", "hardware", "commit", "command"} <= set(found)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"method": "sgnm"}, "got 'sgnm' (did you mean 'signum' or 'sngm'?)"),
        ({"task": "digit"}, "got 'digit' (did you mean 'digits'?)"),
        ({"task": "runs:points"}, "must name a subclass of sngm.Task"),
        ({"task": "nowhere.py:Task"}, "no task at 'nowhere.py:Task'"),
        ({"settings": {"depth": 3}}, "has no setting 'depth'; it has norm, dropout, widths, spare, validation"),
        ({"settings": {"norm": 1}}, "norm must be of type bool, got 1"),
        ({"settings": {"dropout": "much"}}, "dropout must be of type float, got 'much'"),
        ({"method_settings": {"momentun": 0.5}}, "no setting 'momentun'"),
        ({"lr": 0.0}, "`lr` must be a finite number > 0"),
        ({"lr": float("nan")}, "`lr` must be a finite number > 0"),
        ({"batch": 0}, "`batch` must be a whole number >= 1"),
        ({"epochs": 0}, "`epochs` must be a whole number >= 1"),
        ({"seed": -1}, "`seed` must be a whole number >= 0"),
        ({"part": "half"}, "`part` must be one of full, select"),
        ({"running_stats": "last"}, "`running_stats` must be one of first, mean"),
        ({"precision": "float8"}, "`precision` must be one of float32, float64"),
        ({"clip": -1.0}, "`clip` must be a finite number > 0"),
        ({"schedule": "cosin"}, "`schedule` must be one of"),
        ({"warmup": -1.0}, "`warmup` must be"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused(given, told, tmp_path):
    with pytest.raises(UsageError) as refusal:
        run(tmp_path, config(**given))
    assert told in str(refusal.value)
    assert not (tmp_path / "run.json").exists()


def test_devices_that_are_not_there_are_refused(tmp_path):
    for device in ("gpu", "meta"):
        with pytest.raises(UsageError, match=device):
            train(config(), tmp_path, Options(device=device))


def test_a_config_survives_its_record():
    wanted = config("adam", settings={"widths": (4,)}, method_settings={"betas": (0.8, 0.9)})
    back = RunConfig.from_dict(json.loads(json.dumps(wanted.as_dict())))
    assert back.hash == wanted.hash
    assert back.method_settings == wanted.method_settings
    assert back.build_task().widths == (4,)


# ---------------------------------------------------------------- the trained model


def test_load_gives_the_trained_model_with_its_outputs(tmp_path):
    wanted = config("sngm", settings={"norm": True, "dropout": 0.5, "widths": (5,)})
    found = run(tmp_path, wanted)
    model = sngm.load(tmp_path)
    assert not model.training
    x, y = runs.points(32, 2).tensors
    own = wanted.build_task().model().double().eval()
    own.load_state_dict(state(tmp_path)["model"])
    assert torch.equal(model(x), own(x))
    assert (model(x).argmax(1) == y).double().mean().item() == found["result"]["test_accuracy"]


def test_scoring_again_equals_the_record(tmp_path):
    result = run(tmp_path, config(settings={"norm": True}, precision="float32"))["result"]
    again = score(tmp_path, torch.device("cpu"))
    assert again == {key: value for key, value in result.items() if key != "train_loss"}


def test_load_says_what_is_missing(tmp_path):
    with pytest.raises(UsageError, match=r"holds no run \(no run.json\)"):
        load(tmp_path)
    run(tmp_path / "a", config(lr=1e300))
    with pytest.raises(UsageError, match="holds no checkpoint: the run is diverged"):
        load(tmp_path / "a")


OWN = '''
import torch
from torch import nn
from sngm.tasks import Splits, Task, Tensors


class Mine(Task):
    """A line through noise."""

    metric = "error"
    higher_is_better = False
    epochs = 4

    def data(self):
        x = torch.linspace(-1, 1, 64)[:, None]
        y = 2 * x + 0.1 * torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
        return Splits(Tensors(x[::2], y[::2]), Tensors(x[1::4], y[1::4]), Tensors(x[3::4], y[3::4]))

    def model(self):
        return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def scores(self, model, batch):
        error = (model(batch[0]) - batch[1]).abs().mean(1)
        return {"loss": error.square(), "error": error}
'''


@pytest.mark.slow
def test_a_task_of_the_users_own_file_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "task.py").write_text(OWN)
    monkeypatch.chdir(tmp_path / "here")
    out = tmp_path / "out"
    result = run(out, config("sngm", task="task.py:Mine", batch=8))["result"]
    assert set(result) == {"train_loss", "test_loss", "test_error", "validation_loss", "validation_error"}
    monkeypatch.chdir(tmp_path / "there")
    log = tmp_path / "log"
    assert ended(runs.sngm("eval", os.path.relpath(out), "--device", "cpu", "--json", log=log)) == 0
    shown = strict_json(log.read_text())
    assert shown["recorded"] == result
    assert shown["scores"] == {key: value for key, value in result.items() if key != "train_loss"}
    assert sngm.load(out)(torch.zeros(1, 1, dtype=torch.float64)).shape == (1, 1)


@pytest.mark.slow
def test_an_edited_task_is_not_taken_for_the_old_one(tmp_path):
    path = tmp_path / "task.py"
    path.write_text(OWN)
    arguments = ["train", f"{path}:Mine", "--batch", 8, "--device", "cpu", "--out", tmp_path / "run"]
    assert ended(runs.sngm(*arguments)) == 0
    path.write_text(OWN.replace("2 * x", "3 * x"))
    log = tmp_path / "log"
    assert ended(runs.sngm(*arguments, log=log)) == 2
    assert "task_source: " in log.read_text()


def test_samples_must_have_as_many_rows_as_each_other():
    with pytest.raises(ValueError, match="equal numbers of rows"):
        Tensors(torch.zeros(3), torch.zeros(4))


# ---------------------------------------------------------------- mistakes that must be detected


@pytest.mark.parametrize("given", [{"micro": None}, {"micro": 16, "bn_group": 4}])
def test_clars_is_refused_a_single_micro_batch_where_it_would_be_lars(given, tmp_path):
    with pytest.raises(UsageError, match=r"clars .* `workers` or `micro`"):
        run(tmp_path / "run", config("clars", lr=3.0, workers=1, **given))
    assert not (tmp_path / "run").exists()


def test_evaluation_leaves_frozen_layers_frozen(monkeypatch, tmp_path):
    built = []

    def frozen(task):
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        model[1].eval()
        built.append(model)
        return model

    monkeypatch.setattr(Blobs, "model", frozen)
    run(tmp_path, config("msgd", epochs=3))
    assert [module.training for module in built[0]] == [True, False, True]
    assert torch.equal(state(tmp_path)["model"]["1.running_mean"], torch.zeros(4, dtype=torch.float64))


def test_an_unfinished_run_is_loaded_only_when_that_is_asked_for(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, config("sngm"), stop_at=3)
    with pytest.raises(UsageError, match="interrupted, its last whole checkpoint at step 3"):
        load(tmp_path)
    assert not load(tmp_path, partial=True).training


def test_the_inner_rate_of_extrap_sgd_follows_the_schedule():
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(sngm.training.resolve("digits", "extrap-sgd", lr=0.8), model)
    set_rates(optimizer, 0.5)
    assert [(group["lr"], group["inner_lr"]) for group in optimizer.param_groups] == [(0.4, 0.05)] * 2
