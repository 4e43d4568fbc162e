"""Training steps as CUDA graphs, and the choice between eager, compiled and captured steps."""

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

WARM_UP = 3  # steps without a graph before capture; they create optimizer state, pointer tables and compiled code


def choose(
    asked: str, task: Task, model: nn.Module, device: torch.device, ranks: int, not_on_gpu: str, passes: int
) -> str:
    """Return the step mode of a run: "eager", "compiled", "captured" or "compiled+captured".

    Args:
        asked: the mode that the user chose, one of `sngm.options.STEPS`.
        task, model, device, ranks: task, model, device and number of processes of the run.
        not_on_gpu: the reason why the samples are not in GPU memory; an empty string if they are.
        passes: the number of forward-backward passes in a step if each has one BatchNorm group.

    Raises:
        UsageError: `asked` names a captured mode that this run does not support.
    """
    mode = asked
    if asked == "auto":
        mode = task.step if device.type == "cuda" else "eager"
    if mode == "auto":
        mode = "eager" if task.pass_size is None else "captured"
    if "captured" not in mode:
        return mode
    obstacle = why_not(task, model, device, ranks, not_on_gpu, passes)
    if obstacle and asked != "auto":
        raise UsageError(f"`step`={asked!r}: {obstacle}")
    return without_capture(mode) if obstacle else mode


def why_not(task: Task, model: nn.Module, device: torch.device, ranks: int, not_on_gpu: str, passes: int) -> str:
    """Return the reason why a CUDA graph cannot capture the steps of a run; an empty string if it can."""
    if device.type != "cuda":
        return f"CUDA graphs are for GPUs, and this run is on {device.type}"
    if ranks > 1:
        return f"captured steps do not support the exchange between {ranks} processes"
    if not_on_gpu:
        return f"{not_on_gpu}; a CUDA graph needs the samples in GPU memory"
    if passes > 1 and draws(task, model):
        source = "the task's loss may draw random numbers (it sets no pass_size)"
        source = source if task.pass_size is None else "the model has dropout, which draws random numbers"
        return f"{source}, and a graph of {passes} passes cannot seed each; take fewer `workers` or a larger `micro`"
    return ""


def without_capture(mode: str) -> str:
    """Return the step mode that is like `mode`, but without a CUDA graph.

    >>> without_capture("compiled+captured"), without_capture("captured")
    ('compiled', 'eager')
    """
    return mode.removesuffix("captured").removesuffix("+") or "eager"


class CapturedStepper:
    """The training step of a run as a CUDA graph, captured from a :class:`Stepper`.

    The first `WARM_UP` steps run without a graph, on a side stream. Then one step is captured, and this step and all
    later steps replay the graph. Values that Python code sets for each step are in tensors: `indices`, `epoch` and
    the optimizer's learning rates. Other Python values are constants of the graph.
    """

    def __init__(self, stepper: Stepper, batch: int, device: torch.device) -> None:
        self.stepper, self.device = stepper, device
        self.indices = torch.zeros(batch, dtype=torch.int64, device=device)
        self.epoch = torch.zeros((), dtype=torch.int64, device=device)
        self.epoch_on_device = 0
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss: Tensor | None = None
        self.warm_up_steps = 0
        self.capture_failed = False

    @property
    def mode(self) -> str:
        """The step mode in use. After a fallback, it differs from the mode that `choose` returned."""
        return without_capture(self.stepper.mode) if self.capture_failed else self.stepper.mode

    def __call__(self, indices: Tensor, *, epoch: int, step: int) -> Tensor:
        """Train on the global batch; return its mean loss, in a tensor that the next step overwrites."""
        self.indices.copy_(indices, non_blocking=True)
        if epoch != self.epoch_on_device:
            self.epoch.fill_(epoch)
            self.epoch_on_device = epoch
        if self.graph is None and not self.capture_failed and self.warm_up_steps == WARM_UP:
            self._capture(step)
        if self.graph is not None and self.loss is not None:
            self.stepper.seed(step, self.stepper.worker_passes[0].worker)
            self.graph.replay()
            return self.loss
        self.warm_up_steps += 1
        with self._on_side_stream():
            return self.stepper(self.indices, epoch=self.epoch, step=step)

    def _capture(self, step: int) -> None:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        try:
            # on the stream of the warm-up steps, because autograd's AccumulateGrad nodes are bound to this stream
            with torch.cuda.graph(graph, stream=self.stream):
                self.loss = self.stepper(self.indices, epoch=self.epoch, step=step)
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a failed capture does not restore the stream
            reason = in_one_line(error)
            if self.stepper.asked:
                raise Failed(f"`step` {self.stepper.mode}: a step of this run cannot be captured: {reason}") from error
            warnings.warn(
                f"a step cannot be captured, falling back to steps without CUDA graph: {reason}", stacklevel=3
            )
            self.capture_failed = True
            return
        self.graph = graph

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Run the ``with`` block on the side stream.

        The block starts after the work queued on the current stream, which then waits for the block.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)
