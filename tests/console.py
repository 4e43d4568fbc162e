"""The command line for its tests: in this process where that will do, in one of its own where it is the point."""

import contextlib
import io
import json
import os
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
        """What stdout holds, which must be one document and nothing else."""
        return json.loads(self.out)


def comes_out(error: Exception) -> None:
    raise error


def sngm(line: str) -> Result:
    """A command line, in this process. An error that is no exit comes out as it is."""
    for name in [name for name in sys.modules if name.startswith("sngm_task_")]:
        del sys.modules[name]  # a process of its own would read the user's file anew
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
    """A command line in a process group of its own, which ends with the test."""
    return launch(
        [SCRIPT, *shlex.split(line)],
        env={**os.environ, **environment},
        # tests that run in the background of a shell are deaf to Ctrl-C, and what they start would be too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def until(process: "subprocess.Popen[str]", condition: Callable[[], Any]) -> None:
    """Wait for something that a launched process does."""
    try:
        wait_for(condition, lambda: process.poll() is None)
    except AssertionError as error:
        kill_group(process)
        raise AssertionError(f"{error}: {finish(process)}") from None


def finish(process: "subprocess.Popen[str]") -> Result:
    """Wait for it to end."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"still running, and said {late.stdout!r} {late.stderr!r}") from None
    return Result(process.returncode, out, err)


def refused(result: Result, *words: str, code: int = 2) -> None:
    """One clear line with these words on stderr, nothing on stdout, and the exit code."""
    assert result.code == code, result
    assert result.out == ""
    assert result.err.startswith("sngm: ")
    assert result.err.endswith("\n")
    assert result.err.count("\n") == 1, result.err
    for word in words:
        assert word in result.err, result.err
