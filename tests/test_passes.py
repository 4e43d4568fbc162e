"""Results do not depend on how steps are computed: passes of many BatchNorm groups, data loaders, compiled steps."""

import copy
import itertools
import multiprocessing
import os
import shlex
import signal
import time
from pathlib import Path

import pytest
import runs
import torch
from console import sngm
from runs import assert_near_end, assert_same_end, config, ended, metrics, record, state
from torch import Tensor, nn
from torch._dynamo.utils import counters
from waiting import endings, wait_for

from sngm.data.hashing import random_bits
from sngm.errors import Failed, Interrupted, UsageError
from sngm.models.ghost_norm import GhostBatchNorm2d
from sngm.options import Execution
from sngm.tasks import Splits, Task, Tensors
from sngm.training import Options, compiled_step, train
from sngm.training.build import prepare
from sngm.training.cuda_graph_step import choose
from sngm.training.data_loading import Loader, loaders_of
from sngm.training.distributed import Processes

TASK = "test_passes:Pictures"
EXACT = 1e-12
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.*is deprecated:DeprecationWarning")  # of inductor
NORMS = {"ghost": GhostBatchNorm2d, "batch": nn.BatchNorm2d}


def pictures(count: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, 4, 4, generator=generator, dtype=torch.float64)
    return Tensors(x, (x[:, 0].sum((1, 2)) > 0).long())


class Pictures(Task):
    """64 random images of two classes, shifted at random; two convolutions."""

    epochs = 2
    batches = (32,)
    pass_size = 8
    stacks = True

    def __init__(
        self, norm: str = "ghost", dropout: float = 0.0, bad: int = -1, slow: float = 0.0, bias: bool = False
    ) -> None:
        self.norm, self.dropout, self.bad, self.slow, self.bias = norm, dropout, bad, slow, bias

    def data(self) -> Splits:
        return Splits(pictures(64, 1), pictures(32, 2), pictures(32, 3))

    def model(self) -> nn.Module:
        norm = NORMS[self.norm]
        return nn.Sequential(
            *(nn.Conv2d(2, 3, 3, bias=False), norm(3), nn.Tanh(), nn.Dropout(self.dropout)),
            nn.Conv2d(3, 3, 2, bias=self.bias),
            nn.Identity() if self.bias else norm(3, momentum=0.3),
            *(nn.Flatten(), nn.Linear(3, 2, bias=not self.bias)),
        )

    def batch(self, samples, indices: Tensor, *, seed, epoch):
        if self.slow:
            time.sleep(self.slow)
        if self.bad >= 0 and bool((indices == self.bad).any()):
            raise OSError(f"picture-{self.bad}.png is truncated")
        x, y = samples[indices]
        size = random_bits(seed, epoch, indices) % 5
        return x + 0.1 * size[:, None, None, None], y


class Streaming(Pictures):
    loaders = 2


class Penalised(Pictures):
    """A loss with a penalty on the parameters, which a pass with several copies of them would add up."""

    def loss(self, model: nn.Module, batch) -> Tensor:
        return super().loss(model, batch) + sum(p.square().sum() for p in model.parameters())


def made(folder: Path, wanted, *, stop_at: int | None = None, **how):
    reached = [0]
    options = Options(
        device="cpu",
        progress=lambda step, *_: reached.__setitem__(0, step),
        should_stop=lambda: reached[0] == stop_at,
        **how,
    )
    return train(wanted, folder, options)


def wanted(method: str = "msgd", norm: str = "ghost", task: str = TASK, **given):
    settings = {"norm": norm, **given.pop("settings", {})}
    return config(method, task=task, settings=settings, **{"batch": 32, "micro": 4, **given})


def assert_equal_ends(ours: Path, theirs: Path) -> None:
    assert_near_end(ours, theirs, EXACT)
    for key, value in state(theirs)["model"].items():
        if key.endswith("num_batches_tracked"):
            assert torch.equal(state(ours)["model"][key], value)


# ---------------------------------------------------------------- passes of many groups


@pytest.mark.parametrize("stats", ["first", "mean"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_merged_passes_give_what_one_group_after_another_gives(stats, workers, tmp_path):
    usual = {"workers": workers, "running_stats": stats, "clip": 1.0}
    made(tmp_path / "apart", wanted(norm="batch", **usual))
    # every pair of stats, workers and pass size
    for pass_size in (1, 12) if (stats == "first") != (workers == 2) else (8, 100):
        made(tmp_path / str(pass_size), wanted(**usual), pass_size=pass_size)
        assert_equal_ends(tmp_path / str(pass_size), tmp_path / "apart")


@pytest.mark.parametrize(
    ("method", "stats"),
    list(zip(["sngm", "lars", "lamb", "adam", "clars", "extrap-sgd"], itertools.cycle(["first", "mean"]))),
)
def test_merged_passes_serve_every_method(method, stats, tmp_path):
    usual = {"method": method, "lr": 0.03, "workers": 4, "running_stats": stats}
    clip = None if method == "extrap-sgd" else 0.3
    for given, pass_size in (({}, 24), ({"bn_group": 2, "settings": {"bias": True}, "clip": clip}, 16)):
        given |= {"batch": 48, "last_batch": "keep"}  # 64 samples: a batch of 48 and one of 16
        apart, merged = (tmp_path / f"{kind} {pass_size}" for kind in ("apart", "merged"))
        made(apart, wanted(norm="batch", **usual, **copy.deepcopy(given)))
        made(merged, wanted(**usual, **copy.deepcopy(given)), pass_size=pass_size)
        assert_equal_ends(merged, apart)


@pytest.mark.parametrize(
    ("method", "stats"),
    [
        ("clars", "mean"),
        pytest.param("sngm", "first", marks=pytest.mark.slow),
        pytest.param("extrap-sgd", "mean", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_two_processes_merge_their_parts_and_equal_one(method, stats, tmp_path):
    usual = ["train", TASK, "--method", method, "--lr", 0.05, "--batch", 32, "--workers", 4, "--micro", 4, "--device"]
    usual += ["cpu", "--precision", "float64", "--running-stats", stats, "--out"]
    assert sngm(shlex.join(map(str, [*usual, tmp_path / "1"]))).code == 0
    codes = runs.ranks(2, *usual, tmp_path / "2", "--pass-size", 8, log=tmp_path / "log")
    assert codes == [0, 0], [path.read_text() for path in tmp_path.glob("log.*")]
    assert_near_end(tmp_path / "2", tmp_path / "1", 1e-10)


def passes(wanted_config, **how) -> list[int]:
    """Return the number of samples of each pass of a step."""
    setup = prepare(wanted_config, Processes(0, 1, torch.device("cpu")), Execution(**how))
    return [piece.stop - piece.start for own in setup.stepper.worker_passes for piece in own.passes]


def test_passes_are_as_large_as_the_task_or_the_user_says():
    assert passes(wanted(workers=4)) == [8] * 4
    assert passes(wanted(workers=4), pass_size=100) == [32]
    assert passes(wanted(workers=4), pass_size=12) == [8, 12, 12]
    assert passes(wanted(workers=4), pass_size=1) == [4] * 8


def test_passes_of_clars_and_extrap_sgd_have_stacks_of_whole_micro_batches_or_workers():
    assert passes(wanted("clars", workers=4), pass_size=100) == [32]
    assert passes(wanted("clars", workers=4, bn_group=2), pass_size=11) == [8] * 4
    assert passes(wanted("clars", workers=4, bn_group=2), pass_size=7) == [2] * 16  # no two micro-batches fit
    assert passes(wanted("clars", workers=4, task="test_passes:Penalised"), pass_size=100) == [4] * 8
    assert passes(wanted("clars", workers=4)) == [4] * 8  # on a CPU only if the user asks for large passes
    assert passes(wanted("extrap-sgd", workers=4), pass_size=100) == [32]
    assert passes(wanted("extrap-sgd", workers=4), pass_size=27) == [16] * 2
    assert passes(wanted("extrap-sgd", workers=2), pass_size=20) == [16] * 2


@pytest.mark.parametrize("given", [{"norm": "batch"}, {"settings": {"dropout": 0.2}}])
def test_models_that_would_mix_groups_or_draw_numbers_take_one_group_a_pass(given):
    assert passes(wanted(**given)) == [4] * 8
    with pytest.raises(UsageError, match="one BatchNorm group per pass"):
        passes(wanted(**given), pass_size=8)


def test_dropout_of_nothing_is_no_obstacle():
    assert passes(wanted(settings={"dropout": 0.0})) == [8] * 4


# ---------------------------------------------------------------- data loaders


@pytest.mark.parametrize("method", ["sngm", pytest.param("extrap-sgd", marks=pytest.mark.slow)])
def test_loaders_change_no_number(method, tmp_path):
    made(tmp_path / "none", wanted(method, workers=2))
    for loaders in (0, 2):
        made(tmp_path / str(loaders), wanted(method, task="test_passes:Streaming", workers=2), loaders=loaders)
        a, b = state(tmp_path / str(loaders)), state(tmp_path / "none")
        runs.assert_same(a["model"], b["model"])
        assert metrics(tmp_path / str(loaders)) == metrics(tmp_path / "none")
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_run_with_loaders_goes_on_in_the_middle_of_an_epoch(tmp_path):
    streaming = wanted(task="test_passes:Streaming", batch=16, workers=2)
    made(tmp_path / "whole", streaming, loaders=0)
    with pytest.raises(Interrupted):
        made(tmp_path / "broken", streaming, stop_at=2)
    assert not multiprocessing.active_children()
    made(tmp_path / "broken", streaming)
    assert_same_end(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_sample_that_cannot_be_loaded_is_named(loaders, tmp_path):
    with pytest.raises(Failed, match=r"training sample 17 cannot be loaded: OSError: picture-17.png is truncated"):
        made(tmp_path, wanted(task="test_passes:Streaming", settings={"bad": 17}), loaders=loaders)
    assert record(tmp_path)["status"] == "failed"
    assert not multiprocessing.active_children()


def test_loaders_end_with_a_run_that_diverges(tmp_path):
    found = made(tmp_path, wanted(lr=1e300, task="test_passes:Streaming"))
    assert found["status"] == "diverged"
    assert not multiprocessing.active_children()


def endless(folder: str) -> None:
    from sngm.progress import stop_on_signal

    slow = wanted(task="test_passes:Streaming", epochs=1000, settings={"slow": 0.01})
    with pytest.raises(Interrupted), stop_on_signal() as should_stop:
        train(slow, Path(folder), Options(device="cpu", loaders=2, should_stop=should_stop))
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_an_interrupt_of_a_whole_terminal_stops_the_run_and_its_loaders(tmp_path):
    process = runs.SERVER.Process(target=in_a_group, args=(str(tmp_path),))  # daemons cannot have loaders
    process.start()
    endings.append(process.kill)
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and metrics(tmp_path), process.is_alive)
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process) == 0
    assert record(tmp_path)["status"] == "interrupted"


def in_a_group(folder: str) -> None:
    os.setpgrp()
    torch.set_num_threads(1)
    endless(folder)


class Deadly:
    def __call__(self, item):
        os._exit(1)


def test_a_loader_that_was_killed_is_told_of():
    loader = Loader(Deadly(), 1, torch.device("cpu"))
    with pytest.raises(Failed, match="a process that loads data ended"):
        next(loader.over([1]))
    loader.close()


def test_there_are_no_more_loaders_than_cores():
    cores = len(os.sched_getaffinity(0))
    assert loaders_of(Streaming(), None) == min(2, cores)
    assert loaders_of(Streaming(), 1000) == cores
    assert loaders_of(Streaming(), 0) == 0


# ---------------------------------------------------------------- kinds of steps


@pytest.fixture
def _traced(monkeypatch):
    """Use torch.compile without its code generator, which takes seconds."""
    monkeypatch.setattr(compiled_step, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    compiled_step._compile.cache_clear()
    counters.clear()
    yield
    torch._dynamo.reset()
    compiled_step._compile.cache_clear()


def compilations() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize(
    ("task", "stats"),
    [
        (TASK, "first"),
        ("test_passes:Streaming", "mean"),
    ],
)
@pytest.mark.slow
def test_compiled_steps_equal_eager_ones_and_a_second_run_compiles_nothing(task, stats, tmp_path):
    usual = {"workers": 2, "running_stats": stats, "task": task}
    for step in ("eager", "compiled"):
        found = made(tmp_path / step, wanted(**usual), step=step, loaders=0)
        assert found["timing"]["step"] == step
    assert_equal_ends(tmp_path / "compiled", tmp_path / "eager")
    before = compilations()
    assert before <= 3  # BatchNorm differs in the first, the next and the last passes
    made(tmp_path / "again", wanted(seed=1, **usual), step="compiled", loaders=0)
    assert compilations() == before


@pytest.mark.usefixtures("_traced")
@pytest.mark.slow
def test_compiled_steps_draw_the_random_numbers_of_eager_ones(tmp_path):
    for step in ("eager", "compiled"):
        made(tmp_path / step, wanted(settings={"dropout": 0.3}, batch=8), step=step)
    assert_equal_ends(tmp_path / "compiled", tmp_path / "eager")


class Opaque(Pictures):
    def loss(self, model, batch):
        if super().loss(model, batch).item() > 1e9:  # synchronises with the device
            raise RuntimeError
        return super().loss(model, batch)


@pytest.mark.usefixtures("_traced")
def test_a_task_that_cannot_be_compiled_is_refused_or_goes_on_eagerly(tmp_path, monkeypatch):
    opaque = wanted(task="test_passes:Opaque")
    with pytest.raises(Failed, match=r"`step` compiled: torch cannot compile this task: .+") as refusal:
        made(tmp_path / "asked", opaque, step="compiled")
    assert "\n" not in str(refusal.value)
    made(tmp_path / "eager", opaque)
    monkeypatch.setattr("sngm.training.build.choose", lambda *_: "compiled")
    with pytest.warns(UserWarning, match="cannot be compiled, falling back to uncompiled steps"):
        found = made(tmp_path / "auto", opaque)
    assert found["timing"]["step"] == "eager"
    assert_same_end(tmp_path / "auto", tmp_path / "eager")


@pytest.mark.slow
@pytest.mark.nightly
def test_the_code_generator_gives_the_same_numbers(tmp_path):
    compiled_step._compile.cache_clear()
    for step in ("eager", "compiled"):
        made(tmp_path / step, wanted(), step=step)
    assert_near_end(tmp_path / "compiled", tmp_path / "eager", 1e-10)


CUDA = torch.device("cuda")


def test_what_steps_are_made_of_by_default():
    task, model = Pictures(), Pictures().model()

    def chosen(task=task, model=model, device=CUDA, ranks=1, not_on_gpu="", passes=8):
        return choose("auto", task, model, device, ranks, not_on_gpu, passes)

    assert chosen() == "captured"
    assert chosen(device=torch.device("cpu")) == "eager"
    assert chosen(ranks=2) == chosen(not_on_gpu="on disk") == chosen(model=Pictures(dropout=0.5).model()) == "eager"
    assert chosen(model=Pictures(dropout=0.5).model(), passes=1) == "captured", "one seed a step will do"
    assert chosen(task=runs.Blobs()) == "eager"
    task.step = "compiled+captured"
    assert chosen() == "compiled+captured"
    assert chosen(ranks=2) == "compiled"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"device": torch.device("cpu")}, "this run is on cpu"),
        ({"ranks": 2}, "between 2 processes"),
        ({"not_on_gpu": "samples are on disk"}, "samples are on disk; a CUDA graph needs the samples in GPU memory"),
        ({"task": runs.Blobs()}, "sets no pass_size"),
        ({"model": nn.Dropout(0.1)}, "has dropout"),
    ],
)
def test_capture_that_is_asked_for_and_cannot_be_is_refused(given, told):
    usual = {"task": Pictures(), "model": Pictures().model(), "device": CUDA, "ranks": 1, "not_on_gpu": "", "passes": 8}
    with pytest.raises(UsageError, match=told):
        choose("captured", **(usual | given))


def test_kinds_of_steps_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(UsageError, match="`step` must be one of auto, eager, compiled"):
        made(tmp_path, wanted(), step="fast")
    with pytest.raises(UsageError, match="CUDA graphs are for GPUs"):
        made(tmp_path, wanted(), step="captured")


def test_the_record_tells_training_from_evaluation(tmp_path):
    timing = made(tmp_path, wanted(epochs=3))["timing"]
    assert timing["step"] == "eager"
    assert timing["training_seconds"] > 0
    assert timing["evaluation_seconds"] > 0
    assert timing["training_seconds"] + timing["evaluation_seconds"] <= timing["seconds"] + 1e-3
    assert 0 < timing["seconds_per_epoch"] <= timing["training_seconds"]
    assert len(state(tmp_path)["run"]["seconds"]["epochs"]) == 3
