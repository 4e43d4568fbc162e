"""What is the same for every method besides the optimizer: averaged weights, BatchNorm statistics, label smoothing."""

import copy
import json

import pytest
import torch
from console import OWN_TASK, refused, sngm
from torch import nn
from torch.nn.functional import cross_entropy

import sngm as package
from sngm.errors import Interrupted
from sngm.training import Options, resolve, rng, train
from sngm.training.build import prepare
from sngm.training.config import RunConfig
from sngm.training.distributed import Processes
from sngm.training.evaluate import order_of
from sngm.training.loop import steps_of_epoch
from sngm.training.scored_model import ScoredModel

SMALL = {"lr": 0.1, "batch": 128, "epochs": 2, "task_settings": {"width": 2}}
ONE = Processes(0, 1, torch.device("cpu"))


def config(method="sngm", **more):
    return resolve("digits", method, **{**SMALL, **more})


def steps(setup, made, scored=None):
    """Take the steps of the first epoch; yield after each."""
    order = order_of(setup.training, made.seed, rng.ORDER, 0)
    for number, _ in enumerate(steps_of_epoch(made, setup, order, 0, 0, []), 1):
        if scored is not None:
            scored.follow(number)
        yield number


def test_averaged_weights_are_those_of_the_recurrence():
    made = config(ema=0.6)
    setup = prepare(made, ONE)
    scored = ScoredModel(made, setup)
    expected = [p.detach().double() for p in setup.model.parameters()]
    for number in steps(setup, made, scored):
        keep = min(0.6, number / (number + 10))
        expected = [
            keep * e + (1 - keep) * p.detach().double() for e, p in zip(expected, setup.model.parameters(), strict=True)
        ]
    assert number > 5
    for ours, there in zip(scored.averages, expected, strict=True):
        torch.testing.assert_close(ours.double(), there, rtol=1e-5, atol=1e-6)


def test_new_statistics_are_the_means_over_training_batches():
    made = config(bn_samples=512, part="full")
    setup = prepare(made, ONE)
    scored = ScoredModel(made, setup)
    list(steps(setup, made))
    trained = copy.deepcopy(setup.model.state_dict())
    tested = scored.prepare(0)
    assert tested is not setup.model
    assert all(torch.equal(trained[name], t) for name, t in setup.model.state_dict().items())
    order = order_of(setup.training, made.seed, rng.ORDER, 0)[:512]
    twin = copy.deepcopy(setup.model).eval()
    norm = next(m for m in twin.modules() if isinstance(m, nn.BatchNorm2d))
    seen = []
    norm.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    for indices in torch.split(order, 128):
        twin(setup.training[indices][0])
    means = torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0)
    variances = torch.stack([x.var((0, 2, 3)) for x in seen]).mean(0)
    ours = next(m for m in tested.modules() if isinstance(m, nn.BatchNorm2d))
    torch.testing.assert_close(ours.running_mean, means, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.running_var, variances, rtol=1e-4, atol=1e-5)
    assert not ours.training


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(config(), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("more", [{"ema": 0.5}, {"bn_samples": 256}, {"label_smoothing": 0.1}], ids=str)
def test_a_resumed_run_ends_as_an_unbroken_one_and_keeps_what_was_scored(more, plain, tmp_path):
    made = config(**more)
    whole = train(made, tmp_path / "whole")
    calls = iter(range(100))
    with pytest.raises(Interrupted):
        train(made, tmp_path / "cut", Options(should_stop=lambda: next(calls) == 12, checkpoint_every=1))
    resumed = train(made, tmp_path / "cut")
    assert resumed["result"] == whole["result"]
    assert whole["config"] | more == whole["config"]
    score = sngm(f"eval {tmp_path / 'whole'} --json")
    assert score.json["scores"]["test_accuracy"] == pytest.approx(whole["result"]["test_accuracy"]), score.err
    assert plain["result"] != whole["result"]


def test_frozen_layers_keep_their_statistics():
    made = config(bn_samples=256)
    setup = prepare(made, ONE)
    next(m for m in setup.model.modules() if isinstance(m, nn.BatchNorm2d)).eval()
    tested = ScoredModel(made, setup).prepare(0)
    pairs = zip(setup.model.modules(), tested.modules(), strict=True)
    same = [torch.equal(a.running_mean, b.running_mean) for a, b in pairs if isinstance(a, nn.BatchNorm2d)]
    assert same == [True, False]


def test_averaging_brings_new_statistics_unless_told_otherwise():
    assert config(ema=0.9).bn_samples == 10_000
    assert config(ema=0.9, bn_samples=0).bn_samples == 0
    assert config().bn_samples is None


def test_older_records_have_the_same_hash():
    values = config().as_dict()
    for name in ("ema", "bn_samples", "label_smoothing"):
        del values[name]
    assert RunConfig.from_dict(values).hash == config().hash


def test_label_smoothing_reaches_the_loss_and_leaves_the_scores():
    made = config(label_smoothing=0.2)
    task = made.build_task()
    setup = prepare(made, ONE)
    batch = setup.training[torch.arange(16)]
    outputs = setup.model.eval()(batch[0])
    assert task.loss(setup.model, batch) == cross_entropy(outputs, batch[1], label_smoothing=0.2)
    torch.testing.assert_close(task.scores(setup.model, batch)["loss"].mean(), cross_entropy(outputs, batch[1]))


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ("--ema 1", "`ema`|--ema"),
        ("--ema -0.5", "--ema"),
        ("--bn-samples -1", "--bn-samples"),
        ("--label-smoothing 1", "--label-smoothing"),
        ("--label-smoothing -0.1", "--label-smoothing"),
    ],
)
def test_values_out_of_range_are_refused(more, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(sngm(f"train digits {more} --dry-run"), word.split("|")[-1])


def test_a_task_with_a_loss_of_its_own_has_no_label_smoothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN_TASK)
    refused(sngm("train own.py:Line --label-smoothing 0.1 --dry-run"), "label-smoothing", "has none")
    refused(sngm("train imagenet-resnet50 --label-smoothing 0.1 --dry-run"), "use its setting smoothing")


def test_schedule_free_is_scored_at_its_averaged_weights(tmp_path):
    pytest.importorskip("schedulefree")
    made = resolve("digits", "schedule-free", **SMALL)
    assert made.schedule == "constant"
    assert made.bn_samples == 10_000
    setup = prepare(made, ONE)
    scored = ScoredModel(made, setup)
    list(steps(setup, made))
    weight = next(setup.model.parameters())
    trained = weight.detach().clone()
    z = setup.optimizer.state[weight]["z"]
    package.optim.external.set_mode(setup.optimizer, training=False)
    beta = setup.optimizer.param_groups[0]["betas"][0]
    expected = (trained - (1 - beta) * z) / beta  # y = (1 - beta) z + beta x
    torch.testing.assert_close(next(scored.prepare(0).parameters()).detach(), expected, rtol=1e-4, atol=1e-6)
    record = train(made, tmp_path / "run")
    assert record["status"] == "finished"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["schedule"] == "constant"


def test_the_last_batch_of_an_epoch_is_a_step_of_its_own(tmp_path):
    """1280 training samples of digits at batch 512: two whole batches, and one of 256."""
    kept, dropped = config(batch=512, last_batch="keep"), config(batch=512)
    setup = prepare(kept, ONE)
    assert (setup.per_epoch, setup.rest) == (3, 256)
    assert prepare(dropped, ONE).per_epoch == 2
    twin = prepare(kept, ONE)
    list(steps(setup, kept))
    order = order_of(twin.training, kept.seed, rng.ORDER, 0)
    inputs = [order[:512], order[512:1024], order[1024:]]
    for indices in inputs:  # the loop that a reader would write
        twin.optimizer.zero_grad()
        twin.task.loss(twin.model, twin.training[indices]).backward()
        twin.optimizer.step()
    for ours, there in zip(setup.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(ours, there)
    whole = train(kept, tmp_path / "whole")
    assert whole["status"] == "finished"
    assert kept.hash != dropped.hash
    calls = iter(range(100))
    with pytest.raises(Interrupted):
        train(kept, tmp_path / "cut", Options(should_stop=lambda: next(calls) == 2, checkpoint_every=1))
    assert train(kept, tmp_path / "cut")["result"] == whole["result"]


def test_a_last_batch_that_cannot_be_kept_is_told():
    with pytest.warns(UserWarning, match="the last 2 samples of an epoch"):
        setup = prepare(config(batch=639, workers=3, last_batch="keep"), ONE)
    assert setup.rest == 0
    with pytest.warns(UserWarning, match="30 of the last 280 samples of an epoch"):
        setup = prepare(config(batch=500, workers=1, micro=250, last_batch="keep"), ONE)
    assert setup.rest == 250


@pytest.mark.slow
def test_a_last_batch_in_merged_passes_has_the_groups_of_its_own():
    """ResNet20's GhostBatchNorm computes several groups in a pass."""
    usual = {"batch": 64, "epochs": 1, "workers": 2, "micro": 16, "last_batch": "keep", "precision": "float64"}
    made = resolve("cifar10-resnet20", "sngm", lr=0.1, **usual)
    data = package.tasks.Splits(*(tensors(count) for count in (96, 8)))
    setup = prepare(made, ONE, splits=data)
    assert (setup.per_epoch, setup.rest) == (2, 32)
    list(steps(setup, made))
    apart = prepare(made, ONE, execution=package.options.Execution(pass_size=16), splits=data)
    list(steps(apart, made))
    for ours, there in zip(setup.model.state_dict().values(), apart.model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, there, rtol=1e-9, atol=1e-9)


def tensors(count):
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 255, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return package.tasks.Tensors(images.contiguous(memory_format=torch.channels_last), torch.arange(count) % 10)
