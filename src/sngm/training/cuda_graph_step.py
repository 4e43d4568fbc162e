"""Steps as CUDA graphs: recorded once, then launched as a whole. And which kind of step a run is made of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import Failed, UsageError
from ..tasks import Task
from .batchnorm_stats import draws
from .compiled_step import in_one_line
from .step import Stepper

WARM_UP = 3  # ordinary steps before the recording, which make state, tables and compiled code


def choose(
    asked: str, task: Task, model: nn.Module, device: torch.device, ranks: int, elsewhere: str, passes: int
) -> str:
    """How steps are made; what was asked for and cannot be is refused.

    Args:
        asked: one of `sngm.options.STEPS`.
        task, model, device, ranks: of the run.
        elsewhere: why no GPU holds the samples, in words.
        passes: that a step would take if each drew random numbers of its own.
    """
    mode = asked
    if asked == "auto":
        mode = task.step if device.type == "cuda" else "eager"
    if mode == "auto":
        mode = "eager" if task.pass_size is None else "captured"
    if "captured" not in mode:
        return mode
    obstacle = why_not(task, model, device, ranks, elsewhere, passes)
    if obstacle and asked != "auto":
        raise UsageError(f"`step`={asked!r}: {obstacle}")
    return without_capture(mode) if obstacle else mode


def why_not(task: Task, model: nn.Module, device: torch.device, ranks: int, elsewhere: str, passes: int) -> str:
    """What keeps steps of a run from being captured, in words; empty if nothing does."""
    if device.type != "cuda":
        return f"CUDA graphs are for GPUs, and this run is on {device.type}"
    if ranks > 1:
        return f"a graph cannot hold the exchange between {ranks} processes"
    if elsewhere:
        return f"{elsewhere}, where a graph cannot get them"
    if passes > 1 and draws(task, model):
        source = "the task's loss may draw random numbers (it sets no pass_size)"
        source = source if task.pass_size is None else "the model has dropout, which draws random numbers"
        return f"{source}, and a graph of {passes} passes cannot seed each; take fewer `workers` or a larger `micro`"
    return ""


def without_capture(mode: str) -> str:
    """The same mode step by step.

    >>> without_capture("compiled+captured"), without_capture("captured")
    ('compiled', 'eager')
    """
    return mode.removesuffix("captured").removesuffix("+") or "eager"


class Captured:
    """Takes the steps of one run by a CUDA graph of :class:`Stepper`'s.

    The first steps are ordinary ones, on a stream of their own. Then one is recorded, which computes nothing; from
    there on each is a replay. What changes from step to step is in tensors: `indices`, `epoch` and the optimizer's
    rates. All else is a constant of the recording.
    """

    def __init__(self, stepper: Stepper, batch: int, device: torch.device) -> None:
        self.stepper, self.device = stepper, device
        self.indices = torch.zeros(batch, dtype=torch.int64, device=device)
        self.epoch = torch.zeros((), dtype=torch.int64, device=device)
        self.epoch_there = 0
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss: Tensor | None = None
        self.taken = 0
        self.gave_up = False

    @property
    def mode(self) -> str:
        """As it turned out: what cannot be captured or compiled goes on without."""
        return without_capture(self.stepper.mode) if self.gave_up else self.stepper.mode

    def __call__(self, indices: Tensor, *, epoch: int, step: int) -> Tensor:
        """Take a step on the samples of the global batch; return their mean loss, to be read before the next step."""
        self.indices.copy_(indices, non_blocking=True)
        if epoch != self.epoch_there:
            self.epoch.fill_(epoch)
            self.epoch_there = epoch
        if self.graph is None and not self.gave_up and self.taken == WARM_UP:
            self._capture(step)
        if self.graph is not None and self.loss is not None:
            self.stepper.seed(step, self.stepper.turns[0].worker)
            self.graph.replay()
            return self.loss
        self.taken += 1
        with self._aside():
            return self.stepper(self.indices, epoch=self.epoch, step=step)

    def _capture(self, step: int) -> None:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        try:
            # on the stream of the first steps, where autograd has its nodes that add gradients up
            with torch.cuda.graph(graph, stream=self.stream):
                self.loss = self.stepper(self.indices, epoch=self.epoch, step=step)
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a recording that fails leaves its own in place
            reason = in_one_line(error)
            if self.stepper.asked:
                raise Failed(f"--step {self.stepper.mode}: a step of this run cannot be captured: {reason}") from error
            warnings.warn(f"a step cannot be captured, going on without: {reason}", stacklevel=3)
            self.gave_up = True
            return
        self.graph = graph

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On the stream of our own, after what went before and before what comes after."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)
