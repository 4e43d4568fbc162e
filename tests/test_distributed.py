"""Several processes give the results of one process with as many virtual workers, and fail together."""

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import runs
import torch
import torch.distributed as dist
from console import documented, sngm
from filelock import FileLock
from harness import pairwise
from runs import assert_near, assert_near_end, assert_same_end, config, metrics, record, run, state
from test_study import linux, living
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from waiting import PATIENCE, launch, wait_for

from sngm.errors import UsageError
from sngm.files import write_record
from sngm.models.resnet_cifar import CifarResNet
from sngm.tasks.digits import Digits
from sngm.training import gradient_sum, load_model, rng
from sngm.training.build import build_optimizer
from sngm.training.distributed import Processes
from sngm.training.evaluate import evaluate

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


class SmallResNet(Digits):
    """A small ResNet with BatchNorm on digits."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 3, 1), CifarResNet(blocks=1))


def train_in(count: int, folder: Path, *arguments) -> None:
    """Run ``sngm train`` with 4 workers in `count` processes; a single one is the test's own."""
    if count > 1:
        train_in_processes(count, folder, *arguments)
    else:
        assert sngm(shlex.join(map(str, words_of(folder, *arguments)))).code == 0


def train_in_processes(count: int, folder: Path, *arguments) -> None:
    """Run ``sngm train`` with 4 workers in `count` new processes."""
    codes = runs.ranks(count, *words_of(folder, *arguments), log=folder.with_suffix(".log"))
    assert codes == [0] * count, [path.read_text() for path in folder.parent.glob("*.log.*")]
    assert record(folder)["processes"] == count


def words_of(folder: Path, *arguments) -> list:
    return ["train", *arguments, "--workers", 4, "--device", "cpu", "--out", folder]


@pytest.mark.parametrize("stats", [pytest.param("first", marks=pytest.mark.slow), "mean"])
def test_two_processes_equal_one_with_two_virtual_workers(stats, tmp_path):
    usual = ["--batch", 16, "--micro", 4, "--precision", "float64", "--running-stats", stats]
    usual += ["--set", "norm=true", "--set", "dropout=0.3", "--clip", 1.0]
    for count in (1, 2):
        train_in(count, tmp_path / str(count), runs.TASK, "--method", "sngm", "--lr", 0.1, *usual)
    assert_near_end(tmp_path / "2", tmp_path / "1", 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["extrap-sgd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("msgd", "clars", "adam"))]
)
def test_weights_without_gradients_are_left_alone_by_several_processes_too(method, tmp_path):
    usual = ["--method", method, "--lr", 0.1, "--batch", 16, "--precision", "float64"]
    usual += ["--set", "spare=true", "--set", "weight_decay=0.1"]
    for count in (1, 2):
        train_in(count, tmp_path / str(count), runs.TASK, *usual)
        for name in ("frozen", "unused"):
            assert torch.equal(state(tmp_path / str(count))["model"][f"unused.{name}"], torch.ones(2, 2).double())
    assert_near_end(tmp_path / "2", tmp_path / "1", 1e-10)


@pytest.mark.slow
def test_processes_start_from_the_same_weights_however_a_task_makes_them(tmp_path):
    (tmp_path / "own.py").write_text(
        """import os
import runs

class Lopsided(runs.Blobs):
    def model(self):
        model = super().model()
        if os.environ.get("RANK") == "1":
            for p in model.parameters():
                p.data.add_(1.0)
        return model
"""
    )
    usual = [f"{tmp_path}/own.py:Lopsided", "--method", "sngm", "--lr", 0.1, "--batch", 16, "--precision", "float64"]
    for count in (1, 2):
        train_in(count, tmp_path / str(count), *usual)
    assert_near_end(tmp_path / "2", tmp_path / "1", 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "precision", "stats", "counts"),
    [("sngm", "float32", "mean", (2, 4)), ("clars", "float64", "first", (4,)), ("extrap-sgd", "float64", "mean", (2,))],
)
def test_the_number_of_processes_changes_nothing_on_digits(method, precision, stats, counts, tmp_path):
    lr = {"sngm": 0.1, "clars": 3.0, "extrap-sgd": 0.1}[method]
    usual = ["--method", method, "--lr", lr, "--batch", 256, "--micro", 32, "--epochs", 1]
    for count in (1, *counts):
        folder = tmp_path / str(count)
        train_in(count, folder, "digits", *usual, "--precision", precision, "--running-stats", stats)
        assert_near_end(folder, tmp_path / "1", TOLERANCE[precision])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "precision", "dropout"),
    pairwise(["sngm", "clars", "extrap-sgd", "lars", "lamb", "msgd"], TOLERANCE, [0.0, 0.3]),
)
def test_the_number_of_processes_changes_nothing_with_dropout_either(method, precision, dropout, tmp_path):
    usual = ["--method", method, "--lr", 0.05, "--batch", 32, "--micro", 4, "--set", "norm=true"]
    for count in (1, 2, 4):
        folder = tmp_path / str(count)
        train_in(count, folder, runs.TASK, *usual, "--precision", precision, "--set", f"dropout={dropout}")
        assert_near_end(folder, tmp_path / "1", TOLERANCE[precision])


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    usual = ["--method", "adam", "--lr", 0.01, "--batch", 16, "--precision", "float64", "--set", "norm=true"]
    train_in(1, tmp_path / "whole", runs.TASK, *usual)
    wanted = config("adam", lr=0.01, workers=4, settings={"norm": True}, schedule="cosine")
    with pytest.raises(Exception, match="stopped at step 8"):
        run(tmp_path / "moved", wanted, stop_at=8)
    train_in(2, tmp_path / "moved", runs.TASK, *usual)
    assert_near_end(tmp_path / "moved", tmp_path / "whole", 1e-10)


# ---------------------------------------------------------------- torch's DDP


def plain_ddp(path: str) -> None:
    """Run one rank of the DDP loop from torch's documentation."""
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    wanted = config("msgd", workers=count, settings={"norm": True})
    task = wanted.build_task()
    samples = task.data().train
    rng.seed_torch(wanted.seed, rng.MODEL)
    model = task.model().double()
    parallel = DistributedDataParallel(model)
    optimizer = build_optimizer(wanted, model)
    for epoch in range(wanted.epochs):
        order = rng.permutation(len(samples), wanted.seed, rng.ORDER, epoch)
        for i in range(0, len(samples), wanted.batch):
            x, y = samples[order[i : i + wanted.batch].chunk(count)[rank]]
            optimizer.zero_grad()
            nn.functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    # Exit at once: DDP's reducer, freed while holding the GIL, joins a gloo thread that may wait for the GIL.
    os._exit(0)


def test_virtual_workers_equal_torchs_ddp_with_batch_norm_in_each_process(tmp_path):
    runs.call_ranks(2, plain_ddp, str(tmp_path / "ddp.pt"))
    run(tmp_path / "run", config("msgd", workers=2, settings={"norm": True}))
    assert_near(state(tmp_path / "run")["model"], torch.load(tmp_path / "ddp.pt"), 1e-10)


# ---------------------------------------------------------------- torchrun

FRAGILE = """
import os
from pathlib import Path
import torch
from torch import nn
from sngm.tasks import Splits, Task, Tensors


class Fragile(Task):
    epochs = 4

    def data(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        samples = Tensors(x, (x[:, 0] > 0).long())
        return Splits(samples, samples)

    def model(self):
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def batch(self, samples, indices, *, seed, epoch):
        if epoch == 2 and os.environ.get("RANK") == "1" and Path(__file__).with_name("broken").exists():
            raise RuntimeError("the second machine is on fire")
        return samples[indices]
"""


def torchrun(count: int, *arguments, restarts: int = 0) -> subprocess.CompletedProcess:
    words = torchrun_words(count, *arguments, restarts=restarts)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False)


def torchrun_words(count: int, *arguments, restarts: int = 0) -> list[str]:
    words = [*TORCHRUN, "--nproc-per-node", str(count), "--max-restarts", str(restarts), "-m", "sngm"]
    return [*words, *map(str, arguments)]


@pytest.mark.slow
def test_a_rank_that_dies_fails_the_job_with_its_traceback_and_the_job_goes_on_after(tmp_path):
    (tmp_path / "task.py").write_text(FRAGILE)
    usual = ["train", f"{tmp_path}/task.py:Fragile", "--method", "sngm", "--lr", 0.1, "--batch", 16, "--device", "cpu"]
    usual += ["--checkpoint-every", 1]
    assert runs.ranks(2, *usual, "--out", tmp_path / "whole", log=tmp_path / "log") == [0, 0]
    (tmp_path / "broken").touch()
    failed = torchrun(2, *usual, "--out", tmp_path / "run")
    assert failed.returncode == 1
    assert "RuntimeError: the second machine is on fire" in failed.stderr
    assert 'task.py", line' in failed.stderr
    assert record(tmp_path / "run")["status"] in ("failed", "running")
    assert state(tmp_path / "run")["run"]["step"] == 8
    (tmp_path / "broken").unlink()
    assert runs.ranks(2, *usual, "--out", tmp_path / "run", log=tmp_path / "log") == [0, 0]
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_torchrun_trains_digits_prints_once_and_does_not_repeat_a_finished_run(tmp_path):
    usual = ["train", "digits", "--method", "sngm", "--lr", 0.1, "--batch", 256, "--epochs", 1, "--device", "cpu"]
    first = torchrun(2, *usual, "--out", tmp_path / "run")
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("test accuracy") == 1
    assert (record(tmp_path / "run")["processes"], record(tmp_path / "run")["config"]["workers"]) == (2, 2)
    before = (tmp_path / "run" / "run.json").stat().st_mtime_ns
    assert runs.ranks(2, *usual, "--out", tmp_path / "run", log=tmp_path / "log") == [0, 0]
    assert (tmp_path / "run" / "run.json").stat().st_mtime_ns == before


# ---------------------------------------------------------------- overlap and evaluation


def sum_in_buckets(reentrant: bool) -> None:
    """Compare gradients summed during the backward pass with those summed after it, in buckets of one layer."""
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(5)]
    params = [p for layer in layers for p in layer.parameters()]
    summed = gradient_sum.GradientSum(params, count, elements=20)

    def through(some, x):
        for layer in some:
            x = torch.tanh(layer(x))
        return x

    for step in range(3):
        x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        used = layers[1:] if step == 1 and rank else layers  # another process lacks gradients
        used = used[:2] + used[3:] if step == 2 else used  # no process has those of the third layer
        for p in params:
            p.grad = None
        if reentrant:  # the last layer gets its gradient in two parts
            x = checkpoint(through, layers[4:], x.requires_grad_(), use_reentrant=True)
        loss = through(used, x).square().sum()
        summed.begin()
        loss.backward()
        assert len(summed.begun) == ([5, 5 - rank, 2][step] if summed.overlaps else 0)
        own = [None if p.grad is None else p.grad.clone() for p in params]
        total = loss.detach().clone()
        summed.finish(total)
        for p, mine in zip(params, own, strict=True):
            found, expected = torch.tensor(float(mine is not None)), torch.zeros_like(p) if mine is None else mine
            for tensor in (found, expected):
                dist.all_reduce(tensor)
            assert p.grad is None if not found else torch.equal(p.grad, expected)
        expected = loss.detach().clone()
        dist.all_reduce(expected)
        assert torch.equal(total, expected)
        assert summed.overlaps != reentrant
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_summed_during_the_backward_pass_equal_those_summed_after_it(reentrant):
    runs.call_ranks(2, sum_in_buckets, reentrant)


def evaluate_together() -> None:
    dist.init_process_group("gloo")
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    wanted = config(settings={"norm": True})
    task = wanted.build_task()
    model = task.model().double()
    processes.broadcast_tensors(model.state_dict().values())
    model[1].running_mean.add_(processes.rank)  # only the first process updates them
    processes.broadcast_tensors(model.buffers())
    held_out = {str(count): runs.points(count, count) for count in (1000, 7)}  # 16 batches, and one
    alone = evaluate(task, model, held_out, wanted, 64)
    assert evaluate(task, model, held_out, wanted, 64, processes=processes) == alone
    own_way = OwnEvaluation()
    assert evaluate(own_way, model, held_out, wanted, 64, processes=processes) == evaluate(
        own_way, model, held_out, wanted, 64
    )
    assert own_way.batches == (34 if processes.first else 17)
    shared, used = CountsBatches(), 17 // processes.ranks + (processes.rank < 17 % processes.ranks)
    evaluate(shared, model, held_out, wanted, 64, processes=processes)
    assert abs(shared.batches - used) <= 1
    total = torch.tensor(shared.batches)
    dist.all_reduce(total)
    assert total == 17
    dist.barrier()
    dist.destroy_process_group()


class CountsBatches(runs.Blobs):
    batches = 0

    def scores(self, model, batch):
        self.batches += 1
        return super().scores(model, batch)


class OwnEvaluation(CountsBatches):
    def evaluate(self, model, batches):
        return super().evaluate(model, batches)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_evaluate_every_sample_once_with_the_scores_of_one(count):
    runs.call_ranks(count, evaluate_together)


# ---------------------------------------------------------------- restarts and time-outs

HANGS = """
import os, signal, time
from pathlib import Path
import runs

class Hangs(runs.Blobs):
    def batch(self, samples, indices, *, seed, epoch):
        mark = Path(__file__).with_name("hung")
        if epoch == 1 and os.environ.get("RANK") == os.environ["HANGS"] and not mark.exists():
            mark.touch()
            if os.environ["HOW"] == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)
        return samples[indices]
"""


@pytest.mark.nightly  # torchrun waits 30 s before it kills a process that hangs
@pytest.mark.parametrize(("hung", "how"), [(1, "asleep"), (0, "asleep"), (1, "stopped")])
def test_a_process_that_hangs_is_named_and_the_job_restarts_from_its_checkpoint(hung, how, tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(HANGS)
    monkeypatch.setenv("HANGS", str(hung))
    monkeypatch.setenv("HOW", how)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    usual = ["train", f"{tmp_path}/task.py:Hangs", "--lr", 0.1, "--batch", 16, "--device", "cpu", "--workers", 2]
    usual += ["--checkpoint-every", 1, "--hang-timeout", 12]
    ended = torchrun(2, *usual, "--out", tmp_path / "run", restarts=1)
    assert ended.returncode == 0, ended.stderr
    assert f"sngm: process {hung} of 2 hangs (process id " in ended.stderr
    assert re.search(documented("distributed.md", "sngm: process"), ended.stderr)
    assert torchrun(2, *usual, "--out", tmp_path / "whole").returncode == 0
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_two_jobs_in_one_folder_are_refused_in_every_process(tmp_path):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        words = ["train", runs.TASK, "--lr", 0.1, "--batch", 16, "--device", "cpu", "--out", tmp_path / "run"]
        assert runs.ranks(2, *words, log=tmp_path / "log") == [2, 2]
    said = [(tmp_path / f"log.{rank}").read_text() for rank in range(2)]
    assert f"another process is training in {tmp_path / 'run'}" in said[0]
    assert said[1] == "", "the first process says it for all"
    assert not (tmp_path / "run" / "run.json").exists()


@linux
@pytest.mark.nightly
@pytest.mark.parametrize(("task", "settings"), [("digits", []), (f"{__file__}:SmallResNet", [])])
@pytest.mark.parametrize("count", [2, 4])
def test_a_job_whose_processes_are_killed_restarts_and_ends_with_the_same_bits(task, settings, count, tmp_path):
    usual = ["train", task, "--lr", 0.1, "--batch", 64, "--epochs", 3, "--device", "cpu", "--workers", 4, *settings]
    usual += ["--precision", "float64", "--checkpoint-every", 5]
    began = time.monotonic()
    assert torchrun(count, *usual, "--out", tmp_path / "whole").returncode == 0
    seconds = time.monotonic() - began
    train_in(1, tmp_path / "one", *usual[1:])
    assert_near_end(tmp_path / "whole", tmp_path / "one", 1e-10)
    chance = random.Random(count)
    for trial in range(5):
        mark, folder = f"SNGM_TEST_{uuid.uuid4().hex}", tmp_path / f"run-{trial}"
        words = torchrun_words(count, *usual, "--out", folder, restarts=3)
        job = launch(words, env={**os.environ, mark: "1", "OMP_NUM_THREADS": "1"})
        wait_for(lambda f=folder: list(f.glob("checkpoint-*.pt")), lambda j=job: j.poll() is None)
        time.sleep(chance.uniform(0.0, 0.3 * seconds))
        ranks = [pid for pid in living(mark) if pid != job.pid and b"RANK=" in environment_of(pid)]
        if ranks and job.poll() is None:
            os.kill(chance.choice(ranks), signal.SIGKILL)
        _, said = job.communicate(timeout=PATIENCE)
        assert job.returncode == 0, said
        assert_same_end(folder, tmp_path / "whole")


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


# ---------------------------------------------------------------- sharded models


@pytest.mark.slow
@pytest.mark.parametrize(("method", "counts"), [("sngm", (1, 4)), ("lamb", (1,)), ("adam", (4,)), ("msgd", (1,))])
def test_a_sharded_model_trains_as_a_whole_one_and_resumes_on_other_numbers_of_processes(method, counts, tmp_path):
    usual = [runs.TASK, "--method", method, "--lr", 0.05, "--batch", 16, "--precision", "float64", "--clip", 1.0]
    usual += ["--set", "norm=true", "--checkpoint-every", 4]
    train_in(1, tmp_path / "whole", *usual)
    train_in(2, tmp_path / "two", *usual, "--shard")
    assert_near(load_model(tmp_path / "two").state_dict(), load_model(tmp_path / "whole").state_dict(), 1e-10)
    for mine, other in zip(metrics(tmp_path / "two"), metrics(tmp_path / "whole"), strict=True):
        assert mine == pytest.approx(other, rel=1e-9)
    for count in counts:  # break the last checkpoint, and go on from the one before it
        folder = tmp_path / str(count)
        shutil.copytree(tmp_path / "two", folder)
        record_without_end = {**record(folder), "status": "running"}
        write_record(folder / "run.json", {k: v for k, v in record_without_end.items() if k != "digest"})
        max(folder.glob("shards-*/*.distcp")).write_bytes(b"")
        train_in_processes(count, folder, *usual, *(["--shard"] if count > 1 else []))
        assert_near(load_model(folder).state_dict(), load_model(tmp_path / "whole").state_dict(), 1e-10)


@pytest.mark.parametrize("method", ["clars", "extrap-sgd"])
def test_methods_that_need_the_gradient_of_each_worker_cannot_be_sharded(method, tmp_path):
    with pytest.raises(UsageError, match=r"`shard`: .* needs the gradient of each worker"):
        run(tmp_path / "run", config(method, workers=2), shard=True)


def test_weights_that_are_unfrozen_between_steps_are_summed_over_processes(monkeypatch):
    class Sum:
        def wait(self):
            pass

    def double(tensor, async_op=False):  # two processes with the same gradients
        tensor.mul_(2)
        return Sum()

    monkeypatch.setattr("sngm.training.gradient_sum.dist.all_reduce", double)
    first, second = (torch.nn.Parameter(torch.ones(n)) for n in (2, 3))
    second.requires_grad_(False)
    total = gradient_sum.GradientSum([first, second], ranks=2)
    for frozen in (True, False):
        second.requires_grad_(not frozen)
        first.grad = second.grad = None
        total.begin()
        (first.sum() + second.sum()).backward()
        total.finish(torch.zeros(()))
        assert first.grad.tolist() == [2.0, 2.0]
    assert second.grad.tolist() == [2.0, 2.0, 2.0]
