"""Runs for the trainer's tests: a fast task, and runs in separate processes that can be killed.

Processes are forked from a server that has imported torch; each runs the command line with its arguments.
"""

import contextlib
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from waiting import PATIENCE, endings

from sngm.tasks import Splits, Task, Tensors
from sngm.training import Options, RunConfig, compiled_step, resolve, train
from sngm.training import checkpoint as checkpoints
from sngm.training.run_folder import RESUMED

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "torch._dynamo", "sngm.cli", "sngm.api", "sklearn.datasets"])
TASK = "runs:Blobs"


def points(count: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return Tensors(x, (x[:, 0] + 0.5 * torch.randn(count, generator=generator) > 0).long() + (x[:, 1] > 0.5))


class Blobs(Task):
    """96 points of three kinds and a net of two layers. SNGM_TEST_PAUSE: seconds that each micro-batch takes."""

    epochs = 3
    batches = (16,)

    def __init__(
        self,
        norm: bool = False,
        dropout: float = 0.0,
        widths: tuple[int, ...] = (8,),
        spare: bool = False,
        validation: bool = True,
    ) -> None:
        self.norm, self.dropout, self.widths, self.spare, self.validation = norm, dropout, widths, spare, validation

    def data(self) -> Splits:
        return Splits(points(96, 1), points(32, 2), points(32, 3) if self.validation else None)

    def model(self) -> nn.Module:
        (width,) = self.widths
        first = nn.Linear(6, width, bias=not self.norm)  # before BatchNorm the gradient of a bias is rounding noise
        net = nn.Sequential(first, nn.Tanh(), nn.Linear(width, 3))
        if self.norm:
            net.insert(1, nn.BatchNorm1d(width))
        if self.dropout:
            net.insert(len(net) - 1, nn.Dropout(self.dropout))
        if self.spare:
            net.register_module("unused", Unused())
        return net

    def batch(self, samples: Any, indices: Tensor, *, seed: int, epoch: int) -> Any:
        time.sleep(float(os.environ.get("SNGM_TEST_PAUSE", "0")))
        return samples[indices]


class Unused(nn.Module):
    """A module with a frozen weight and one that the loss does not depend on; it returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x


def config(
    method: str = "msgd", *, task: str = TASK, settings: dict[str, Any] | None = None, **given: Any
) -> RunConfig:
    usual = {"lr": 0.1, "batch": 16, "precision": "float64", "schedule": "constant"}
    return resolve(task, method, task_settings=settings, **{**usual, **given})


def run(
    folder: Path, wanted: RunConfig, *, stop_at: int | None = None, every: int | None = None, **more: Any
) -> dict[str, Any]:
    """Train in this process; `stop_at` simulates a request to stop after that step."""
    reached = [0]

    def progress(step: int, steps: int, metrics: Any) -> None:
        reached[0] = step

    options = Options(
        device="cpu", checkpoint_every=every, progress=progress, should_stop=lambda: reached[0] == stop_at, **more
    )
    return train(wanted, folder, options)


# ---------------------------------------------------------------- results of runs


def state(folder: Path) -> dict[str, Any]:
    """Return the newest checkpoint."""
    found = checkpoints.load(folder)
    assert found is not None
    return found


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [strict_json(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def record(folder: Path) -> dict[str, Any]:
    return strict_json((folder / "run.json").read_text())


def strict_json(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def assert_same_end(ours: Path, theirs: Path) -> None:
    """Assert that weights, optimizer state, metrics and result are bitwise equal."""
    a, b = state(ours), state(theirs)
    for part in (a, b):
        part["run"].pop("seconds")
        for key in RESUMED:
            part.pop(key, None)
    assert_same(a, b)
    assert (ours / "metrics.jsonl").read_bytes() == (theirs / "metrics.jsonl").read_bytes()
    assert record(ours)["result"] == record(theirs)["result"]
    assert record(ours)["status"] == record(theirs)["status"] == "finished"


def assert_same(ours: Any, theirs: Any, where: str = "state") -> None:
    assert type(ours) is type(theirs), where
    if torch.is_tensor(theirs):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=where)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for i, value in enumerate(theirs):
            assert_same(ours[i], value, f"{where}.{i}")
    else:
        assert ours == theirs, where


def assert_near_end(ours: Path, theirs: Path, tolerance: float) -> None:
    """Assert that weights, BatchNorm buffers, optimizer state and metrics are close, relative to their size."""
    a, b = state(ours), state(theirs)
    assert_near(a["model"], b["model"], tolerance)
    for mine, other in zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values(), strict=True):
        assert_near(mine, other, tolerance)
    for mine, other in zip(metrics(ours), metrics(theirs), strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert abs(mine[key] - value) <= tolerance * max(abs(value), 1e-3), key


def assert_compiled_is_eager(monkeypatch: Any, folder: Path, wanted: RunConfig, **more: Any) -> None:
    """Assert that compiled steps end near eager ones; the backend needs no C compiler."""
    monkeypatch.setattr(compiled_step, "BACKEND", "aot_eager")
    compiled_step._compile.cache_clear()
    for step in ("eager", "compiled"):
        assert run(folder / step, wanted, step=step, **more)["timing"]["step"] == step
    compiled_step._compile.cache_clear()
    assert_near_end(folder / "compiled", folder / "eager", 1e-11)


def assert_near(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if torch.is_tensor(value):
            difference = (ours[key].double() - value.double()).norm()
            assert difference <= tolerance * value.double().norm(), f"{key}: {difference:.2e}"


# ---------------------------------------------------------------- processes


def sngm(*arguments: Any, log: Path | None = None, pause: float = 0.0, **environment: Any) -> BaseProcess:
    """Start ``sngm ...`` in a process; its output goes to `log`."""
    words = [str(argument) for argument in arguments]
    return _start(_main, words, log or Path(os.devnull), {"SNGM_TEST_PAUSE": pause, **environment})


def ranks(count: int, *arguments: Any, log: Path, **environment: Any) -> list[int | None]:
    """Run ``sngm ...`` in several processes as torchrun does, and return their exit codes."""
    return together(
        [
            sngm(*arguments, log=log.with_suffix(f".{rank}"), **rank_environment(rank, count, port), **environment)
            for port in [free_port()]
            for rank in range(count)
        ]
    )


def call_ranks(count: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function of this or a test's module in several processes; if one fails, show what they print."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(count)]
        processes = [
            _start(function, arguments, log, rank_environment(rank, count, port)) for rank, log in enumerate(logs)
        ]
        codes = together(processes)
        assert codes == [0] * count, "\n\n".join(log.read_text() for log in logs)


def together(processes: Sequence[BaseProcess]) -> list[int | None]:
    return [ended(process) for process in processes]


def ended(process: BaseProcess) -> int | None:
    """Wait for a process to end, and return its exit code."""
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"still running after {PATIENCE:g} s")
    return process.exitcode


def rank_environment(rank: int, count: int, port: int) -> dict[str, Any]:
    return {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port
    }  # fmt: skip


def free_port() -> int:
    """Return a free port below the system's ephemeral range, so that no other connection takes it meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _start(function: Callable[..., None], arguments: Sequence[Any], log: Path, environment: Any) -> BaseProcess:
    process = SERVER.Process(target=_call, args=(function, arguments, str(log), environment), daemon=True)
    process.start()
    endings.append(process.kill)
    return process


def _main(*words: str) -> None:
    from sngm.cli import main

    sys.argv = ["sngm", *words]
    main()


def _call(function: Callable[..., None], arguments: Sequence[Any], log: str, environment: dict[str, Any]) -> None:
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update({k: str(v) for k, v in environment.items()})
    torch.set_num_threads(1)
    function(*arguments)
