"""The trainer on a GPU."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from sngm.data.hashing import random_bits
from sngm.errors import Failed, Interrupted
from sngm.models.conv import Conv3x3
from sngm.models.ghost_norm import GhostBatchNorm2d
from sngm.tasks import Splits, Task, Tensors
from sngm.training import Options, checkpoint, resolve, rng, train
from sngm.training import load_model as load
from sngm.training.build import prepare
from sngm.training.cuda_graph_step import WARM_UP
from sngm.training.data_loading import Loader
from sngm.training.distributed import Processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
METHODS = {"msgd": 0.1, "sngm": 0.1, "lars": 30.0, "clars": 3.0, "extrap-sgd": 0.1, "adam": 0.01, "lamb": 0.03}


def command(folder, *more):
    return [
        sys.executable, "-m", "sngm", "train", "digits", "--method", "sngm", "--lr", "0.1", "--batch", "128",
        "--epochs", "30", "--deterministic", "--device", "cuda", "--checkpoint-every", "7", "--out", str(folder), *more,
    ]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_on_a_gpu(tmp_path, method):
    config = resolve("digits", method, lr=METHODS[method], batch=128, workers=4 if method == "clars" else 1)
    record = train(config, tmp_path, Options(device="cuda"))
    assert record["result"]["test_accuracy"] > 0.8
    assert record["hardware"]["device"] == "cuda"
    assert next(load(tmp_path).parameters()).device.type == "cpu"


def test_a_run_on_a_gpu_goes_as_on_the_cpu(tmp_path):
    config = resolve("digits", "sngm", lr=0.1, batch=256, epochs=3, workers=4, micro=32, precision="float64")
    on = {d: train(config, tmp_path / d, Options(device=d))["result"] for d in ("cpu", "cuda")}
    assert on["cuda"] == pytest.approx(on["cpu"], rel=1e-9)


def test_a_run_killed_on_a_gpu_ends_bit_identical_under_deterministic(tmp_path):
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    subprocess.run(command(tmp_path / "whole"), check=True, env=environment)
    for wait in (0.3, 0.6):
        process = subprocess.Popen(command(tmp_path / "broken"), env=environment)
        while not list((tmp_path / "broken").glob("checkpoint-*.pt")) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command(tmp_path / "broken"), check=True, env=environment)
    whole, broken = (checkpoint.load(tmp_path / name) for name in ("whole", "broken"))
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "broken/metrics.jsonl").read_bytes()
    torch.testing.assert_close(whole["model"], broken["model"], rtol=0, atol=0)
    torch.testing.assert_close(whole["optimizer"]["state"], broken["optimizer"]["state"], rtol=0, atol=0)


# ---------------------------------------------------------------- captured and compiled steps

SQUARES = "test_gpu_train:Squares"
TOLERANCE = {"float32": 1e-3, "float64": 1e-6}  # in a CUDA graph torch's own optimizers use float32 learning rates


def squares(count, seed):
    """Return images whose left half is darker or brighter, with a fifth of the labels wrong.

    With correct labels the loss would approach zero, and methods that divide by the gradient's norm would amplify
    rounding errors.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 8, 8, generator=generator)
    y = torch.randint(2, (count,), generator=generator)
    x[:, :, :, :4] += 0.5 * (2 * y - 1)[:, None, None, None]
    wrong = torch.rand(count, generator=generator) < 0.2
    return Tensors(x, torch.where(wrong, 1 - y, y))


class Squares(Task):
    epochs = 5
    batches = (128,)
    pass_size = 64

    def data(self):
        return Splits(squares(512, 1), squares(256, 2))

    def model(self):
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3, bias=False), GhostBatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, bias=False), GhostBatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2)),
        )

    def batch(self, samples, indices, *, seed, epoch):
        x, y = samples[indices]
        over = random_bits(seed, epoch, indices) % 2 == 1
        return torch.where(over[:, None, None, None], x.flip(2), x), y


class Opaque(Squares):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss if loss.item() < 1e9 else loss * 0


class Streaming(Squares):
    loaders = 2


class Stacks(Squares):
    """A net for whose layers there are kernels, with and without stacks of weights."""

    stacks = True

    def model(self):
        return nn.Sequential(
            *(Conv3x3(3, 16), GhostBatchNorm2d(16), nn.ReLU(), Conv3x3(16, 16), GhostBatchNorm2d(16), nn.ReLU()),
            *(Conv3x3(16, 32, stride=2), GhostBatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2)),
        )


def wanted(method="sngm", task=SQUARES, **given):
    usual = {"lr": {**METHODS, "lars": 3.0}[method], "batch": 128, "workers": 2, "micro": 16, "epochs": 3}
    return resolve(task, method, **{**usual, "precision": "float32", **given})


def made(folder, config, *, stop_at=None, **how):
    reached = [0]
    options = Options(
        device="cuda",
        progress=lambda step, *_: reached.__setitem__(0, step),
        should_stop=lambda: reached[0] == stop_at,
        **how,
    )
    return train(config, folder, options)


def assert_near_ends(ours, theirs, tolerance):
    a, b = (checkpoint.load(folder)["model"] for folder in (ours, theirs))
    for key, value in b.items():
        assert (a[key].double() - value.double()).norm() <= tolerance * max(value.double().norm(), 1e-3), key


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("stats", ["first", "mean"])
@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_train_as_eager_ones(method, stats, precision, tmp_path):
    config = wanted(method, running_stats=stats, precision=precision, clip=None if method == "extrap-sgd" else 5.0)
    for step in ("eager", "captured"):
        found = made(tmp_path / step, config, step=step)
        assert found["timing"]["step"] == step
    assert_near_ends(tmp_path / "captured", tmp_path / "eager", TOLERANCE[precision])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["clars", "extrap-sgd"])
def test_stacked_passes_train_as_separate_ones(method, precision, tmp_path):
    config = wanted(method, "test_gpu_train:Stacks", workers=8, precision=precision)
    exact = precision == "float32"
    how = {"deterministic": exact}  # else cuDNN takes whichever convolutions are fastest, which differ in rounding
    made(tmp_path / "stacked", config, **how)
    made(tmp_path / "separate", config, pass_size=16, **how)
    assert_near_ends(tmp_path / "stacked", tmp_path / "separate", 1e-5 if exact else 5e-2)


def test_steps_are_captured_by_default_where_the_task_allows_it(tmp_path):
    assert made(tmp_path / "squares", wanted())["timing"]["step"] == "captured"
    assert made(tmp_path / "digits", wanted(task="digits"))["timing"]["step"] == "eager"


@pytest.mark.parametrize("step", ["compiled", "compiled+captured"])
@pytest.mark.parametrize("task", [SQUARES, "test_gpu_train:Streaming"])
@pytest.mark.filterwarnings("ignore")  # warnings of the compiler
def test_compiled_steps_train_as_eager_ones(task, step, tmp_path):
    if "Streaming" in task and "captured" in step:
        pytest.skip("a graph cannot wait for loaders")
    made(tmp_path / "eager", wanted(task=task), step="eager")
    made(tmp_path / "other", wanted(task=task), step=step)
    assert_near_ends(tmp_path / "other", tmp_path / "eager", TOLERANCE["float32"])


@pytest.mark.parametrize("stop_at", [1, WARM_UP, WARM_UP + 1, 7])
@pytest.mark.parametrize("method", ["sngm", "adam", "msgd"])
def test_a_captured_run_goes_on_as_if_it_had_not_stopped(method, stop_at, tmp_path):
    config = wanted(method, precision="float64", schedule="cosine", warmup=1.0)
    made(tmp_path / "whole", config)
    with pytest.raises(Interrupted):
        made(tmp_path / "broken", config, stop_at=stop_at)
    made(tmp_path / "broken", config)
    assert_near_ends(tmp_path / "broken", tmp_path / "whole", 1e-9)


@pytest.mark.parametrize(("before", "after"), [("captured", "eager"), ("eager", "captured")])
@pytest.mark.parametrize("method", ["sngm", "adam", "msgd"])
def test_a_run_goes_on_in_another_mode(method, before, after, tmp_path):
    config = wanted(method, precision="float64")
    made(tmp_path / "whole", config, step="eager")
    with pytest.raises(Interrupted):
        made(tmp_path / "moved", config, step=before, stop_at=6)
    made(tmp_path / "moved", config, step=after)
    assert_near_ends(tmp_path / "moved", tmp_path / "whole", TOLERANCE["float64"])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_replayed_step_never_waits_for_the_device():
    device = torch.device("cuda", torch.cuda.current_device())
    setup = prepare(wanted(), Processes(0, 1, device))
    order = setup.data_source.begin(rng.permutation(512, 0), 0, 0)
    total = torch.zeros((), dtype=torch.float64, device=device)
    try:
        for t in range(WARM_UP + 6):
            if t == WARM_UP + 1:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            total += setup.stepper(order[t % 4 * 128 : (t % 4 + 1) * 128], epoch=t // 4, step=t)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert setup.stepper.graph is not None
    assert 0 < total.item() < 100


def test_what_cannot_be_captured_goes_on_eagerly_or_is_refused(tmp_path):
    opaque = wanted(task="test_gpu_train:Opaque")
    with pytest.warns(UserWarning, match="cannot be captured, falling back to steps without CUDA graph"):
        found = made(tmp_path / "auto", opaque)
    assert (found["status"], found["timing"]["step"]) == ("finished", "eager")
    made(tmp_path / "eager", opaque, step="eager")
    assert_near_ends(tmp_path / "auto", tmp_path / "eager", TOLERANCE["float32"])
    with pytest.raises(Failed, match="`step` captured: a step of this run cannot be captured"):
        made(tmp_path / "asked", opaque, step="captured")


@pytest.mark.parametrize("step", ["eager", "captured"])
def test_a_run_in_bfloat16_learns(step, tmp_path):
    found = made(tmp_path, wanted(precision="bfloat16", epochs=10), step=step)
    assert found["result"]["test_accuracy"] > 0.7
    setup = prepare(wanted(precision="bfloat16"), Processes(0, 1, torch.device("cuda")))
    assert setup.model[0].weight.dtype == torch.float32
    assert setup.model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_loaders_feed_a_gpu_from_pinned_memory(tmp_path):
    for loaders in (0, 2):
        made(tmp_path / str(loaders), wanted(task="test_gpu_train:Streaming", precision="float64"), loaders=loaders)
    made(tmp_path / "none", wanted(precision="float64"), step="eager")
    for folder in ("0", "2"):
        assert_near_ends(tmp_path / folder, tmp_path / "none", 1e-9)
    loader = Loader(lambda item: (torch.ones(item),), 1, torch.device("cuda"))
    (batch,) = next(loader.over([3]))
    assert batch.is_pinned()
    loader.close()


# ---------------------------------------------------------------- built-in tasks


@pytest.mark.filterwarnings("ignore:.*does not hold the official records")
@pytest.mark.parametrize("stats", ["first", "mean"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_resnet20_captured_in_bfloat16_is_what_it_is_step_by_step(tmp_path, stats, deterministic):
    image_tasks = pytest.importorskip("test_image_tasks")
    image_tasks.write_cifar(tmp_path, 10, count=64)
    # seed 1: Triton would specialise on this argument
    given = {"lr": 0.05, "batch": 64, "workers": 4, "epochs": 3, "seed": 1, "running_stats": stats}
    config = resolve("cifar10-resnet20", "sngm", precision="bfloat16", **given)
    try:
        for step in ("captured", "eager"):
            options = Options(device="cuda", data_dir=tmp_path, step=step, pass_size=32, deterministic=deterministic)
            assert train(config, tmp_path / step, options)["timing"]["step"] == step
        options = Options(device="cuda", data_dir=tmp_path, pass_size=32, deterministic=deterministic)
        steps = iter(range(7))
        stopping = dataclasses.replace(options, should_stop=lambda: next(steps, None) is None)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "cut", stopping)
        train(config, tmp_path / "cut", options)
    finally:
        torch.use_deterministic_algorithms(False)
    ends = {name: checkpoint.load(tmp_path / name) for name in ("captured", "eager", "cut")}
    for name in ("eager", "cut"):
        for key, value in ends["captured"]["model"].items():
            other = ends[name]["model"][key]
            assert torch.allclose(value.double(), other.double(), rtol=0.1, atol=0.03), (name, key)
    losses = [[m["train_loss"] for m in end["run"]["history"]] for end in ends.values()]
    for other in losses[1:]:
        assert losses[0] == pytest.approx(other, rel=0.02)
    if deterministic:
        assert losses[0] == losses[2]
        assert all(torch.equal(ends["captured"]["model"][k], v) for k, v in ends["cut"]["model"].items())
