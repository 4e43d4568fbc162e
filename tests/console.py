"""Helpers to run the command line in tests: in this process, or in a separate one where the test needs it."""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from waiting import PATIENCE, kill_group, launch, wait_for

from sngm import cli

SCRIPT = Path(sys.executable).with_name("sngm")
DOCS = Path(__file__).parents[1] / "docs"


def documented(page: str, start: str) -> str:
    """Return a regular expression of the line in a page of the documentation; numbers and host names may differ."""
    line = next(line for line in (DOCS / page).read_text().splitlines() if line.startswith(start))
    return re.sub(r"\d+", r"\\d+", re.escape(line).replace("node7", r"\S+"))


OWN_TASK = '''
"""Two features, one line through the origin: a regression of the user's own."""

import torch
from torch import nn

from sngm import Task
from sngm.tasks import Splits, Tensors


class Line(Task):
    """y = 2 a - 3 b, with a little noise."""

    metric = "error"
    higher_is_better = False
    epochs = 3
    batches = (8, 32)
    usual_lrs = (0.01, 0.03, 0.1)

    def __init__(self, noise: float = 0.01, samples: int = 128):
        self.noise = noise
        self.samples = samples

    def data(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.samples, 2, generator=generator)
        noise = self.noise * torch.randn(self.samples, generator=generator)
        targets = inputs @ torch.tensor([2.0, -3.0]) + noise
        cut = self.samples * 3 // 4
        return Splits(Tensors(inputs[:cut], targets[:cut]), Tensors(inputs[cut:], targets[cut:]))

    def model(self):
        return nn.Linear(2, 1)

    def loss(self, model, batch):
        return self.scores(model, batch)["loss"].mean()

    def scores(self, model, batch):
        inputs, targets = batch
        difference = model(inputs).squeeze(1) - targets
        return {"loss": difference**2, "error": difference.abs()}
'''


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return the JSON document on stdout, which must hold nothing else."""
        return json.loads(self.out)


def comes_out(error: Exception) -> None:
    raise error


def sngm(line: str) -> Result:
    """Run a command line in this process. Exceptions other than SystemExit propagate."""
    for name in [name for name in sys.modules if name.startswith("sngm_file_")]:
        del sys.modules[name]  # a new process would read the user's file again
    out, err = io.StringIO(), io.StringIO()
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    code = 0
    try:
        with (
            mock.patch.object(sys, "argv", ["sngm", *shlex.split(line)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch("sngm.cli.exit_codes.fail", comes_out),
        ):
            cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
    return Result(code, out.getvalue(), err.getvalue())


def start(line: str, **environment: str) -> "subprocess.Popen[str]":
    """Start a command line in its own process group, which ends with the test."""
    return launch(
        [SCRIPT, *shlex.split(line)],
        env={**os.environ, **environment},
        # a shell makes background processes ignore SIGINT, and their children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def until(process: "subprocess.Popen[str]", condition: Callable[[], Any]) -> None:
    """Wait until a condition holds, while the launched process is alive."""
    try:
        wait_for(condition, lambda: process.poll() is None)
    except AssertionError as error:
        kill_group(process)
        raise AssertionError(f"{error}: {finish(process)}") from None


def finish(process: "subprocess.Popen[str]", patience: float = PATIENCE) -> Result:
    """Wait for a process to end, and return its output."""
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"still running, and said {late.stdout!r} {late.stderr!r}") from None
    return Result(process.returncode, out, err)


def refused(result: Result, *words: str, code: int = 2) -> None:
    """Assert that a command ended with one line with these words on stderr, nothing on stdout, and the exit code."""
    assert result.code == code, result
    assert result.out == ""
    assert result.err.startswith("sngm: ")
    assert result.err.endswith("\n")
    assert result.err.count("\n") == 1, result.err
    for word in words:
        assert word in result.err, result.err
