"""Settings: defaults of tasks, older records, and the output and measurements of dry runs."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import runs
import torch
from console import refused, sngm
from runs import Blobs, config, record, run, state
from torch import nn
from torch.utils.data import TensorDataset

from sngm import Task, api, progress
from sngm.errors import UsageError
from sngm.study import StudyConfig, launch
from sngm.study.executors.local import InThread
from sngm.tasks import Moment, Schedule, Tensors
from sngm.training import Options, RunConfig, RunFolder, resolve, train
from sngm.training import load_model as load
from sngm.training.build import RATES, build_optimizer, can_capture, prepare, set_rates
from sngm.training.config import usual_precision
from sngm.training.cost import measure
from sngm.training.distributed import Processes
from sngm.training.evaluate import Part, batches, evaluate

CPU = torch.device("cpu")
PAPER = "test_settings:Paper"


class Paper(Blobs):
    """Defaults other than the usual ones, the warm-up and the workers by the batch."""

    epochs = 4
    batches = (24, 48)
    workers = 4
    micro = 4
    warmup = 1.5
    clip = 2.0
    weight_decay = 0.01
    decay_on = "all"
    bias_lr = "full"
    running_stats = "mean"
    precision_on_gpu = "bfloat16"

    @classmethod
    def usual(cls, batch):
        return super().usual(batch) | ({"warmup": 3.0, "workers": 2} if batch >= 48 else {})


class Unmeasurable(Blobs):
    """A task that trains, but fails on the samples used for measurements."""

    def batch(self, samples, indices, *, seed, epoch):
        raise RuntimeError("no such\nsamples")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fields(line: str) -> dict:
    return sngm(f"train {line} --dry-run --json").json["config"]


# ---------------------------------------------------------------- defaults


def test_what_the_user_does_not_say_is_the_tasks():
    wanted = resolve(PAPER, "sngm", lr=0.1)
    assert (wanted.batch, wanted.epochs, wanted.workers) == (24, 4, 4)
    assert (wanted.micro, wanted.bn_group) == (3, 3)  # each worker has 6 samples
    assert (wanted.warmup, wanted.clip) == (1.5, 2.0)
    assert (wanted.decay_on, wanted.bias_lr, wanted.running_stats) == ("all", "full", "mean")
    assert wanted.method_settings == {"weight_decay": 0.01}
    assert fields(f"{PAPER} --lr 0.1") == wanted.as_dict()


def test_defaults_may_follow_the_batch():
    wanted = resolve(PAPER, "sngm", lr=0.1, batch=48)
    assert (wanted.warmup, wanted.workers, wanted.micro) == (3.0, 2, 4)
    assert resolve(PAPER, "sngm", lr=0.1, batch=48, epochs=2).warmup == 1  # at most half of a shortened run


def test_a_task_that_says_nothing_has_plain_defaults():
    wanted = resolve("digits", "sngm", lr=0.1, batch=512)
    assert (wanted.workers, wanted.micro, wanted.bn_group, wanted.warmup, wanted.clip) == (1, 512, 512, 0.0, None)
    assert (wanted.decay_on, wanted.bias_lr, wanted.running_stats) == ("weights", "scaled", "first")


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--workers 2", {"workers": 2, "micro": 4, "bn_group": 4}), ("--micro 6", {"micro": 6, "bn_group": 6}),
        ("--bn-group 2", {"micro": 2, "bn_group": 2}), ("--epochs 7", {"epochs": 7}), ("--warmup 0", {"warmup": 0.0}),
        ("--clip 0.5", {"clip": 0.5}), ("--clip inf", {"clip": None}), ("--decay-on weights", {"decay_on": "weights"}),
        ("--bias-lr scaled", {"bias_lr": "scaled"}), ("--running-stats first", {"running_stats": "first"}),
        ("--precision float64", {"precision": "float64"}), ("--precision bfloat16", {"precision": "bfloat16"}),
        ("--set weight_decay=0", {"method_settings": {"weight_decay": 0}}),
        ("--schedule linear", {"schedule": "linear"}),
    ],
)  # fmt: skip
def test_what_the_user_says_comes_first(flag, expected):
    usual = resolve(PAPER, "sngm", lr=0.1).as_dict()
    assert fields(f"{PAPER} --lr 0.1 {flag}") == usual | expected


def test_a_study_takes_the_tasks_defaults_for_each_batch():
    plan = sngm(f"compare {PAPER} --methods sngm --lrs 0.1 -n --json").json
    assert [cell["first_config"]["warmup"] for cell in plan["cells"]] == [1.5, 3.0]
    assert [cell["first_config"]["workers"] for cell in plan["cells"]] == [4, 2]
    said = sngm(
        f"compare {PAPER} --methods sngm --lrs 0.1 --decay-on weights --bias-lr scaled --workers 1 -n --json"
    ).json
    for cell in said["cells"]:
        assert [cell["first_config"][name] for name in ("decay_on", "bias_lr", "workers")] == ["weights", "scaled", 1]


@pytest.mark.parametrize(("processes", "workers"), [(1, 4), (2, 4), (3, 6), (4, 4), (6, 6)])
def test_workers_can_be_shared_out_over_the_processes(processes, workers):
    assert resolve(PAPER, "sngm", lr=0.1, processes=processes).workers == workers
    assert resolve(PAPER, "sngm", lr=0.1, processes=processes, workers=12).workers == 12


def test_a_batch_that_does_not_suit_the_tasks_workers_is_refused_with_a_way_out():
    refused(sngm(f"train {PAPER} --batch 26"), "the task's 4 workers", "--workers", "24")
    refused(sngm(f"train {PAPER} --batch 2"), "the task's 4 workers", "a batch of 4")
    assert resolve(PAPER, "sngm", lr=0.1, batch=26, workers=1).micro == 2


def test_precision_is_the_tasks_on_a_gpu_alone():
    assert resolve(PAPER, "sngm", lr=0.1, device="cuda:1").precision == "bfloat16"
    assert resolve(PAPER, "sngm", lr=0.1, device="cuda", precision="float32").precision == "float32"
    assert resolve(PAPER, "sngm", lr=0.1, device="cpu").precision == "float32"
    assert resolve(PAPER, "sngm", lr=0.1).precision == "float32"
    assert usual_precision("digits", 32, CPU) == usual_precision("digits", 32, "cuda") == "float32"


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("flags", "words"),
    {
        "--precision half": ["precision", "float32, float64, bfloat16", "'half'"],
        "--decay-on biases": ["--decay-on", "weights, all", "'biases'"],
        "--bias-lr none": ["--bias-lr", "scaled, full"],
        "--running-stats last": ["--running-stats", "first, mean"],
        "--step foo": ["--step", "auto, eager, compiled, captured", "'foo'"],
        "--step captured --device cpu": ["captured", "cpu"],
        "--loaders -1": ["--loaders", ">= 0"],
        "--loaders many": ["--loaders"],
        "--pass-size 0": ["--pass-size", ">= 1"],
        "--pass-size 1.5": ["--pass-size"],
    }.items(),
)
@pytest.mark.parametrize("verb", ["train", "compare"])
def test_settings_that_make_no_sense_are_refused_before_anything_is_written(verb, flags, words, tmp_path):
    refused(sngm(f"{verb} digits {flags} --set width=2 --out out"), *words)
    assert not any(tmp_path.iterdir())


def test_options_of_how_are_not_part_of_a_run():
    plain = sngm("train digits --batch 128 -n --json").json["hash"]
    assert sngm("train digits --batch 128 --step eager --loaders 0 -n --json").json["hash"] == plain


# ---------------------------------------------------------------- older records


def test_runs_of_older_versions_keep_their_names():
    wanted = resolve("digits", "sngm", lr=0.1, batch=512)
    assert wanted.hash == "7ec7962b931f"  # as in the documentation of version 0.1.0
    others = [dataclasses.replace(wanted, decay_on="all"), dataclasses.replace(wanted, bias_lr="full")]
    assert len({wanted.hash, *(other.hash for other in others)}) == 3


def older(folder: Path) -> None:
    """Convert a record to the format before these fields existed."""
    there = record(folder)
    for name in ("decay_on", "bias_lr"):
        del there["config"][name]
    del there["digest"]
    (folder / "run.json").write_text(json.dumps(there))


def test_an_older_run_is_read_and_not_repeated(tmp_path):
    wanted = config(epochs=1)
    first = run(tmp_path, wanted)
    older(tmp_path)
    there = record(tmp_path)["config"]
    assert "decay_on" not in there
    assert RunConfig.from_dict(there) == wanted
    assert RunConfig.from_dict(there).hash == wanted.hash == first["hash"]
    assert run(tmp_path, wanted)["result"] == first["result"]
    assert isinstance(load(tmp_path), nn.Module)
    assert sngm(f"eval {tmp_path}").code == 0
    with pytest.raises(UsageError, match="decay_on: weights there, all here"):
        RunFolder(tmp_path).open(dataclasses.replace(wanted, decay_on="all"))


def test_an_older_run_goes_on(tmp_path):
    wanted = config()
    run(tmp_path / "whole", wanted)
    with pytest.raises(Exception, match="stopped at step 7"):
        run(tmp_path / "broken", wanted, stop_at=7)
    older(tmp_path / "broken")
    run(tmp_path / "broken", wanted)
    runs.assert_same_end(tmp_path / "broken", tmp_path / "whole")


def test_a_record_of_no_known_version_is_refused():
    values = config().as_dict()
    for broken in ({**values, "unheard_of": 1}, {k: v for k, v in values.items() if k != "lr"}):
        with pytest.raises(UsageError, match="not the config of a run of this version"):
            RunConfig.from_dict(broken)


# ---------------------------------------------------------------- weight decay and learning rates by kind of parameter


def by_name(wanted: RunConfig, **more) -> dict[str, dict]:
    """Return the group of each parameter by name."""
    model = wanted.build_task().model()
    optimizer = build_optimizer(wanted, model, **more)
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("method", ["msgd", "sngm", "lars", "lamb", "adam", "clars", "extrap-sgd"])
def test_decay_acts_on_weights_or_on_all(method):
    common = {"settings": {"norm": True}, "method_settings": {"weight_decay": 0.5}, "workers": 2}
    weights = by_name(config(method, **common))
    everything = by_name(config(method, decay_on="all", **common))
    assert {name for name, group in weights.items() if group["weight_decay"]} == {"0.weight", "3.weight"}
    assert {group["weight_decay"] for group in everything.values()} == {0.5}
    assert weights.keys() == everything.keys()


@pytest.mark.parametrize("decay_on", ["weights", "all"])
def test_parameters_without_a_gradient_of_their_own_shrink_by_the_decay_that_acts_on_them(decay_on):
    wanted = config("msgd", decay_on=decay_on, method_settings={"weight_decay": 0.5}, settings={"norm": True})
    model = wanted.build_task().model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    build_optimizer(wanted, model).step()
    for name, p in model.named_parameters():
        shrinks = decay_on == "all" or p.ndim > 1
        torch.testing.assert_close(p.detach(), before[name] * (1 - 0.1 * 0.5 if shrinks else 1))


@pytest.mark.parametrize(("method", "trust"), [("lars", 1e-3), ("clars", 1e-2), ("lars-unscaled", 1e-3)])
def test_lars_trains_biases_at_a_scaled_rate_or_at_the_full_one(method, trust):
    scaled = by_name(config(method, lr=4.0, workers=2))
    full = by_name(config(method, lr=4.0, workers=2, bias_lr="full"))
    assert {name: group["lr"] for name, group in scaled.items()} == pytest.approx(
        {"0.weight": 4.0, "2.weight": 4.0, "0.bias": 4.0 * trust, "2.bias": 4.0 * trust}
    )
    assert {group["lr"] for group in full.values()} == {4.0}


def test_a_bias_that_is_a_matrix_leaves_the_others_their_scaled_rate():
    model = torch.nn.Linear(3, 2)
    model.position_bias = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = build_optimizer(config("lars", lr=4.0), model)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates == {id(model.weight): 4.0, id(model.position_bias): 4.0, id(model.bias): 0.004}
    assert len(optimizer.state) == 3


# ---------------------------------------------------------------- learning rates in tensors

METHODS = {"msgd": 0.1, "adam": 0.01, "sngm": 0.1, "lars": 30.0, "lars-momentum": 0.1, "lamb": 0.01, "block-sngm": 0.1}


def trained(wanted: RunConfig, tensor_rates: bool, steps: range = range(12), start: dict | None = None):
    """Take steps along a schedule; return the optimizer, the learning rates, and the final state as in a checkpoint."""
    torch.manual_seed(0)
    model = wanted.build_task().model().double()
    optimizer = build_optimizer(wanted, model, tensor_rates=tensor_rates)
    if start is not None:
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
    x, y = wanted.build_task().data().train[torch.arange(32)]
    seen = []
    for step in steps:
        set_rates(optimizer, Schedule(wanted.schedule, 1.0)(Moment(step, 12, step // 3, 4)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seen.append([float(group[key]) for group in optimizer.param_groups for key in RATES if key in group])
    return optimizer, seen, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schedule", ["cosine", "polynomial"])
def test_rates_in_tensors_are_the_same_to_the_bit_and_so_are_checkpoints(method, schedule):
    wanted = config(method, lr=METHODS[method], schedule=schedule)
    _, numbers, theirs = trained(wanted, False)
    optimizer, tensors, ours = trained(wanted, True)
    assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
    assert can_capture(optimizer)
    assert tensors == numbers
    runs.assert_same(ours, theirs)
    assert not any(
        isinstance(value, torch.Tensor) for group in ours["optimizer"]["param_groups"] for value in group.values()
    )


def test_extrap_sgd_has_both_rates_in_tensors():
    wanted = config("extrap-sgd", lr=0.2)
    model = wanted.build_task().model()
    optimizer = build_optimizer(wanted, model, tensor_rates=True)
    set_rates(optimizer, 0.5)
    for group in optimizer.param_groups:
        assert (float(group["lr"]), float(group["inner_lr"])) == (0.1, 0.1 / 8)


def test_a_tensor_is_filled_only_for_a_new_factor_and_stays_the_same_one():
    optimizer, _, saved = trained(config("sngm"), True)
    held = [group["lr"] for group in optimizer.param_groups]
    set_rates(optimizer, 0.25)
    versions = [rate._version for rate in held]
    set_rates(optimizer, 0.25)
    assert [rate._version for rate in held] == versions
    set_rates(optimizer, 0.5)
    assert [rate._version for rate in held] == [version + 1 for version in versions]
    optimizer.load_state_dict(saved["optimizer"])
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, held, strict=True))
    assert [float(rate) for rate in held] == [group["lr"] for group in saved["optimizer"]["param_groups"]]
    set_rates(optimizer, 0.5)
    assert {float(rate) for rate in held} == {0.05}


@pytest.mark.parametrize("method", ["msgd", "adam", "sngm", "lars"])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_a_checkpoint_goes_on_with_rates_of_the_other_kind(method, before, after):
    wanted = config(method, lr=METHODS[method], schedule="cosine")
    _, _, whole = trained(wanted, False)
    _, _, half = trained(wanted, before, range(6))
    _, _, ours = trained(wanted, after, range(6, 12), half)
    runs.assert_same(ours, whole)


def test_a_checkpoint_does_not_say_how_steps_are_computed_here():
    wanted = config("adam", lr=0.01)
    optimizer, _, saved = trained(wanted, False)
    for group in saved["optimizer"]["param_groups"]:
        group.update(capturable=True, fused=True)  # as in a checkpoint from a GPU
    optimizer.load_state_dict(saved["optimizer"])
    assert {(group["capturable"], group["fused"]) for group in optimizer.param_groups} == {(False, None)}


def test_optimizers_of_others_are_not_captured():
    wanted = config("torch.optim:RMSprop")
    assert not can_capture(build_optimizer(wanted, wanted.build_task().model()))


# ---------------------------------------------------------------- bfloat16


def test_bfloat16_computes_products_in_it_and_keeps_weights_and_state_in_float32(tmp_path, monkeypatch):
    seen = []
    loss = Blobs.loss

    def note(self, model, batch):
        hook = model[0].register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
        try:
            return loss(self, model, batch)
        finally:
            hook.remove()

    monkeypatch.setattr(Blobs, "loss", note)
    end = run(tmp_path, config("sngm", precision="bfloat16", settings={"norm": True}))
    assert end["status"] == "finished"
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    kept = state(tmp_path)
    tensors = [*kept["model"].values(), *(s["momentum_buffer"] for s in kept["optimizer"]["state"].values())]
    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}
    model = load(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_bfloat16_learns_and_is_scored_as_it_was_trained():
    shown = sngm("train digits --precision bfloat16 --batch 128 --lr 0.1 --epochs 3 --out run --json")
    assert shown.code == 0
    assert "mkldnn" not in shown.err
    assert shown.json["result"]["test_accuracy"] > 0.85
    tested = sngm("eval run --json").json
    assert tested["scores"] == {k: tested["recorded"][k] for k in tested["scores"]}


def test_precisions_give_different_numbers(tmp_path):
    losses = {}
    for precision in ("float32", "float64", "bfloat16"):
        losses[precision] = run(tmp_path / precision, config(precision=precision, epochs=1))["result"]["train_loss"]
    assert len(set(losses.values())) == 3
    assert losses["bfloat16"] == pytest.approx(losses["float64"], rel=0.02)


# ---------------------------------------------------------------- scoring


def test_scores_are_means_however_the_samples_are_cut():
    task = Blobs()
    model = task.model().double()
    samples = task.data().test
    whole = task.scores(model, samples[torch.arange(32)])
    expected = {name: values.double().mean().item() for name, values in whole.items()}
    for size in (1, 5, 32, 100):
        found = task.evaluate(model, batches(samples, CPU, torch.float64, size))
        assert found == pytest.approx(expected, rel=1e-12)
        assert all(type(value) is float for value in found.values())


def test_samples_are_moved_with_their_parts():
    samples = Tensors(torch.arange(8.0), torch.arange(8))
    part = Part(samples, torch.tensor([5, 1, 7]))
    there = part.to("cpu")
    assert there.device == samples.to("cpu").device == CPU
    assert there[torch.tensor([2, 0])][1].tolist() == [7, 5]
    fixed = Part([1, 2, 3], torch.tensor([0]))  # cannot be moved to a device
    assert fixed.to("cpu") is fixed
    assert fixed.device is None


def test_evaluation_leaves_modes_and_random_numbers_alone():
    wanted = config(settings={"dropout": 0.5})
    model = wanted.build_task().model().double()
    model[-2].eval()
    before = torch.get_rng_state()
    evaluate(wanted.build_task(), model, {"test": wanted.build_task().data().test}, wanted)
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model] == [True, True, False, True]


# ---------------------------------------------------------------- dry runs


def test_a_dry_run_says_how_the_batch_is_computed_and_what_it_takes(tmp_path):
    line = "train digits --lr 0.2 --batch 512 --workers 4 --micro 64 --bn-group 32 --set width=4 --dry-run"
    plan = sngm(f"{line} --json").json
    assert plan["workers"] == 4
    assert plan["micro_batches"] == {"count": 8, "of_each_worker": 2, "samples": 64}
    assert plan["bn_groups"] == {"count": 16, "samples": 32}
    assert (plan["precision"], plan["step"], plan["device"]) == ("float32", "eager", "cpu")
    decay = plan["weight_decay"]
    assert (decay["on"], decay["value"]) == ("weights", 1e-4)
    assert 0 < decay["parameters"] < plan["parameters"]
    memory, time = plan["memory"], plan["time"]
    parts = ("parameters", "gradients", "optimizer", "activations", "samples")
    assert memory["total_bytes"] == sum(memory[f"{part}_bytes"] for part in parts)
    assert memory["gradients_bytes"] == memory["optimizer_bytes"] == 4 * plan["parameters"]
    assert memory["activations_bytes"] > 32 * 64 * 4  # at least the inputs of a pass
    assert time["seconds"] == pytest.approx(15 * time["seconds_per_epoch"])
    assert 0 < time["seconds"] < 600
    assert time["from_samples"] == memory["pass_samples"] == 32
    said = sngm(line).out
    for words in (
        "workers: 4\n", "micro batches: 8 of 64, 2 for each worker\n", "bn groups: 16 of 32\n",
        "parameters: weights; biases and normalisation layers have none\n", "precision: float32\n", "step: eager\n",
        "memory: about ", "time: about ", " of training on this machine (cpu), ", "from one pass of 32 samples\n",
    ):  # fmt: skip
        assert words in said
    assert not any(tmp_path.iterdir())


def test_a_dry_run_of_a_model_without_batchnorm_names_no_groups_of_it(monkeypatch):
    shown = sngm(f"train {runs.TASK} --lr 0.1 --batch 32 --workers 2 -n")
    assert "batch plan: 32 = 2 workers x 1 group of 16; 1 process\n" in shown.out
    assert "bn groups: none, no BatchNorm\n" in shown.out
    assert sngm(f"train {runs.TASK} --lr 0.1 --batch 32 -n --json").json["bn_groups"] is None
    shown = sngm(f"train {runs.TASK} --lr 0.1 --batch 32 --workers 2 --set norm=true -n")
    assert "of 16; BatchNorm over 16; 1 process\n" in shown.out
    assert "bn groups: 2 of 16\n" in shown.out


def test_a_dry_run_of_all_decayed_and_of_none():
    assert "on 9978 of 9978 parameters: all parameters\n" in sngm("train digits --decay-on all -n").out
    assert "weight decay: none\n" in sngm("train digits --set weight_decay=0 -n").out


@pytest.mark.parametrize("method", ["msgd", "adam", "clars", "extrap-sgd", "torch.optim:RMSprop", "torch.optim:Rprop"])
def test_every_method_can_be_measured(method):
    wanted = config(method, lr=0.01, batch=32, workers=2, settings={"norm": True, "dropout": 0.1})
    setup = prepare(wanted, Processes(0, 1, CPU))
    found = measure(wanted, setup, CPU)
    assert found.samples == found.largest == 16
    assert found.epoch_seconds(setup) > 0
    assert all(size >= 0 for size in found.memory.values())


def test_spectral_sngm_warns_of_a_learning_rate_whose_decay_removes_the_weights():
    with pytest.warns(UserWarning, match=r"lr \* weight_decay is 1: .* choose a smaller lr"):
        prepare(config("spectral-sngm", lr=1.0, method_settings={"weight_decay": 1.0}), Processes(0, 1, CPU))
    prepare(config("spectral-sngm", lr=0.9, method_settings={"weight_decay": 1.0}), Processes(0, 1, CPU))


def test_memory_for_activations_grows_with_the_pass():
    sizes = []
    for batch in (16, 32, 96):
        wanted = config(batch=batch)
        sizes.append(measure(wanted, prepare(wanted, Processes(0, 1, CPU)), CPU).memory["activations"])
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.1)
    assert sizes[2] == pytest.approx(6 * sizes[0], rel=0.1)


def test_measuring_leaves_the_run_as_it_was():
    wanted = config("msgd", settings={"norm": True})
    setup = prepare(wanted, Processes(0, 1, CPU))
    model = {k: v.clone() for k, v in setup.model.state_dict().items()}
    saved = json.dumps(setup.optimizer.state_dict(), default=str)
    measure(wanted, setup, CPU)
    runs.assert_same(dict(setup.model.state_dict()), model)
    assert json.dumps(setup.optimizer.state_dict(), default=str) == saved
    assert all(p.grad is None for p in setup.model.parameters())


def test_what_cannot_be_measured_is_said_and_the_rest_is_there(tmp_path):
    plan = sngm("train test_settings:Unmeasurable -n --json").json
    assert plan["not_measured"] == "RuntimeError: no such"
    assert "time" not in plan
    assert plan["steps"] == 18
    assert "not measured: RuntimeError: no such\n" in sngm("train test_settings:Unmeasurable -n").out
    assert not any(tmp_path.iterdir())


# ---------------------------------------------------------------- time left


class Time:
    """A clock that tests set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def play(clock, steps, seconds, first=1, **given):
    """Call progress for every step; `seconds(step)` is the duration of each."""
    with progress.step_progress(clock=clock, **given) as show_step:
        for step in range(first, steps + 1):
            clock.now += seconds(step)
            show_step(step, steps, {"epoch": 1, "test_accuracy": 0.5} if step > steps // 2 else {})


def test_progress_says_what_time_is_left(capsys):
    play(Time(), 100, lambda step: 30.0 if step == 1 else 1.0)  # the first step compiles
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step 1 of 100", "reading data and compiling say nothing about the pace"
    assert lines[1] == "step 11 of 100, 89 s left"
    assert lines[2] == "step 21 of 100, 79 s left"
    assert lines[6] == "step 61 of 100, 39 s left, epoch 1: test accuracy 0.5"


def test_the_pace_is_that_of_late(capsys):
    pace = progress.Pace(clock := Time())
    for step in range(1, 2001):
        clock.now += 10.0 if step < 1000 else 1.0
        left = pace.left(step, 4000)
    assert left == pytest.approx(2000, rel=0.01)


def test_a_resumed_run_counts_its_own_steps_alone():
    pace = progress.Pace(clock := Time())
    found = []
    for step in range(501, 508):
        clock.now += 2.0
        found.append(pace.left(step, 600))
    assert found[:2] == [None, None]
    assert found[-1] == pytest.approx(2.0 * 93)


@pytest.mark.parametrize(("seconds", "on_cpu", "told"), [(60.0, True, True), (60.0, False, False), (0.1, True, False)])
def test_a_long_run_on_a_cpu_says_so_at_its_start(seconds, on_cpu, told, capsys):
    play(Time(), 100, lambda step: seconds, on_cpu=on_cpu)
    lines = [line for line in capsys.readouterr().err.splitlines() if "on this CPU" in line]
    assert len(lines) == told
    if told:
        assert lines[0].startswith("about 98 min on this CPU")


def test_other_ranks_say_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    play(Time(), 50, lambda step: 20.0, on_cpu=True)
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------- studies


def test_jobs_are_one_a_core_or_one_on_a_gpu_unless_said():
    assert launch.default_jobs((16,), CPU) == len(os.sched_getaffinity(0))
    assert launch.default_jobs((16,), torch.device("cuda", 0)) == 1


def test_small_runs_share_a_gpu_where_mps_runs(tmp_path, monkeypatch):
    gpu, file = torch.device("cuda", 0), tmp_path / "nvidia-cuda-mps-control.pid"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()  # remains after MPS ends
    assert launch.default_jobs((128,), gpu) == 1
    file.write_text(f"{os.getpid()}\n")
    assert launch.default_jobs((16, 128), gpu) == 4
    assert launch.default_jobs((16, 129), gpu) == 1, "a large batch fills the GPU"
    assert launch.default_jobs((16,), CPU) == len(os.sched_getaffinity(0))
    for text in ("", "no number", str(2**22 + 1), str(2**70)):  # beyond Linux's largest process id
        file.write_text(text)
        assert launch.default_jobs((128,), gpu) == 1, text
    file.write_text("1")  # another user's process, unless this is root
    assert launch.default_jobs((128,), gpu) == 4


def test_a_study_that_cannot_be_measured_says_so():
    line = "compare test_settings:Unmeasurable --methods msgd --batches 16 --lrs 0.1 -n"
    plan = sngm(f"{line} --json").json
    assert (plan["not_measured"], plan["runs_at_least"]) == ("RuntimeError: no such", 3)
    assert "time" not in plan
    assert sngm(line).out.endswith("time: not measured, RuntimeError: no such\n")


def test_workers_of_a_study_are_told_how_to_compute(tmp_path, monkeypatch):
    handed = []

    class Pool(InThread):
        def submit(self, wanted, path, options, commit):
            handed.append((options, commit))
            raise KeyboardInterrupt

    monkeypatch.setattr(launch, "open_local", lambda task, jobs, on_gpu: Pool())
    monkeypatch.setenv("SNGM_COMMIT", "feedbee")
    study = StudyConfig(task=runs.TASK, methods=("sngm",), batches=(16,), seeds=1, epochs=1, lrs=(0.1,))
    options = Options(device="cpu", deterministic=True, step="eager", loaders=0)
    with pytest.raises(KeyboardInterrupt):
        launch.compare(study, tmp_path / "study", options=options, jobs=3, show=lambda _: None)
    ((given, commit),) = handed
    assert commit == "feedbee"  # worker processes may have been started with another
    assert given == {
        "device": "cpu", "data_dir": None, "deterministic": True, "step": "eager", "loaders": 0, "pass_size": None,
        "shard": False, "hang_timeout": 1800.0, "track": None, "group": "study",
    }  # fmt: skip
    assert train(
        study.cells()[0].config(0.1, "full", 0), tmp_path / "run", Options(**{**given, "deterministic": False})
    )


def test_a_model_without_weights_to_decay_trains(tmp_path):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.factors

    samples = TensorDataset(torch.randn(64, 2), torch.arange(64) % 2)
    task = Task.from_torch(Scale, samples, samples, epochs=1)
    assert api.train(task, "sngm", lr=0.1, batch=16, out=tmp_path / "run", progress=False).status == "finished"
