"""One training step: the mean gradient over passes, workers and processes, then the optimizer's step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import Failed, UsageError
from ..optim import CLARS, ExtrapSGD
from ..tasks import Batch, Task
from . import rng
from .batch_plan import BatchPlan
from .batchnorm_stats import GhostStatistics, PerGroupStatistics, draws
from .compiled_step import NotCompiled, compiled
from .config import RunConfig
from .data_loading import Resident, Streamed, to_device
from .distributed import Processes
from .gradient_sum import GradientSum
from .recurrent_state import RecurrentState
from .sharding import is_sharded
from .stacked_weights import stacked_loss


@dataclass(frozen=True, slots=True)
class WorkerPasses:
    """Forward-backward passes of `worker`, or of all workers of a process from `worker` on, as slices of the batch.

    If `unit` is given, there is one pass, in which each parameter is a stack (see `stacked_weights`) with a copy for
    every `unit` samples.
    """

    worker: int
    passes: list[slice]
    unit: int | None = None

    @property
    def copies(self) -> int:
        """The number of copies of each parameter in the only pass."""
        (only,) = self.passes
        return 1 if self.unit is None else (only.stop - only.start) // self.unit


def worker_passes_of(
    plan: BatchPlan, rank: int, optimizer: torch.optim.Optimizer, most: int | None, stacks: bool = False
) -> list[WorkerPasses]:
    """Return the passes of a process in one step. A pass is one forward and backward through the model.

    Args:
        plan, rank, optimizer: the batch plan of the run, the rank of this process, and the optimizer.
        most: the most samples in a pass with several BatchNorm groups; None for one group per pass.
        stacks: whether parameters may be stacks, see `stacked_weights`.

    CLARS needs the gradient of each micro-batch, and EXTRAP-SGD that of each worker. Without stacks, none of CLARS's
    passes has samples of two micro-batches, and none of EXTRAP-SGD's has samples of two workers.
    """
    mine = plan.workers_of(rank)
    unit = plan.micro if isinstance(optimizer, CLARS) else plan.share if isinstance(optimizer, ExtrapSGD) else None
    if most is not None and unit is None:
        return [WorkerPasses(mine.start, plan.merged(mine, most))]
    if most is not None and unit is not None and stacks and 2 * unit <= min(most, len(mine) * plan.share):
        return [WorkerPasses(piece.start // plan.share, [piece], unit) for piece in plan.merged(mine, most, unit)]
    if most is None or isinstance(optimizer, CLARS):
        return [WorkerPasses(worker, plan.pieces(worker)) for worker in mine]
    return [WorkerPasses(worker, plan.merged(range(worker, worker + 1), most)) for worker in mine]


def pieces_of(worker_passes: list[WorkerPasses]) -> list[slice]:
    """Return the slice of the global batch that each pass processes, in the order of the passes."""
    return [piece for own in worker_passes for piece in own.passes]


@dataclass(eq=False)
class Stepper:
    """The training step of a run, as a callable. Its lasting state is in model, optimizer and `recurrent_state`."""

    config: RunConfig
    task: Task
    data_source: Resident | Streamed
    model: nn.Module
    optimizer: torch.optim.Optimizer
    plan: BatchPlan
    processes: Processes
    worker_passes: list[WorkerPasses]
    statistics: PerGroupStatistics | GhostStatistics
    recurrent_state: RecurrentState
    mode: str
    asked: bool  # the user chose this mode, so do not fall back to another

    def __post_init__(self) -> None:
        plan, optimizer = self.plan, self.optimizer
        if self.config.clip is not None and isinstance(optimizer, ExtrapSGD):
            raise UsageError("extrap-sgd takes its gradients inside its step, where `clip` cannot reach them")
        if isinstance(optimizer, CLARS) and plan.batch == plan.micro:
            raise UsageError("clars takes the mean of several micro-batches' norms; give it `workers` or `micro`")
        self.device = self.processes.device
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        names = {p: name for name, p in self.model.named_parameters()}
        self.names = [names.get(p, "") for p in self.params]
        self.sharded = is_sharded(self.model)
        # FSDP2 and EXTRAP-SGD sum gradients over ranks themselves
        several = plan.ranks > 1 and not self.sharded and not isinstance(optimizer, ExtrapSGD)
        self.gradient_sum = GradientSum(self.params, plan.ranks) if several else None
        self.draws = draws(self.task, self.model)
        self.scale = self.task.scale(plan.batch)  # scales the gradients, not the recorded loss
        if self.sharded:  # FSDP2 divides the sum over processes by their number
            self.scale *= plan.ranks

    def __call__(self, indices: Tensor, *, epoch: int | Tensor, step: int) -> Tensor:
        """Train on the global batch, the samples at `indices`, and return their mean loss."""
        if isinstance(self.optimizer, ExtrapSGD):
            return self._extrapolate(indices, epoch, step)
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        micro_batches = _MicroBatchGradients(self.params) if isinstance(self.optimizer, CLARS) else None
        last = self.worker_passes[-1].passes[-1]
        self.statistics.begin()
        for own in self.worker_passes:
            with self.statistics.tracking(own.worker):
                for i, piece in enumerate(own.passes):
                    size = piece.stop - piece.start
                    inputs, key = self.data_source.take(indices[piece]), (step, own.worker, i)
                    if micro_batches is not None and own.unit is not None:
                        stacks = [p.expand(own.copies, *p.shape) for p in self.params]
                        part, found = self._stacked_gradients(stacks, epoch, inputs, piece, key)
                        micro_batches.add([g if g is None else g.unbind() for g in found], own.unit / self.plan.batch)
                        loss += part * (size / self.plan.batch)
                        continue
                    part = self._loss(inputs, piece, epoch, key)
                    if self.gradient_sum and micro_batches is None and piece == last:
                        self.gradient_sum.begin()
                    whole = self.plan.batch if micro_batches is None else self.plan.micro
                    (part * (size / whole * self.scale)).backward()
                    # the last pass of a micro-batch: every worker's part of the batch is a multiple of micro
                    if micro_batches is not None and piece.stop % self.plan.micro == 0:
                        grads = [p.grad if p.grad is None else [p.grad] for p in self.params]
                        micro_batches.add(grads, self.plan.micro / self.plan.batch)
                        self.optimizer.zero_grad(set_to_none=True)
                    loss += part.detach() * (size / self.plan.batch)
        mean_norms = micro_batches.finish() if micro_batches is not None else None
        self._reduce(loss, mean_norms)
        self.statistics.end()
        if (clip := self.config.clip) is not None:
            norm = nn.utils.clip_grad_norm_(self.params, clip)
            if mean_norms is not None:  # clip the norms by the same factor as clip_grad_norm_
                mean_norms = mean_norms * (clip / (norm + 1e-6)).clamp(max=1.0)
        if mean_norms is None:
            self.optimizer.step()
        else:
            self.optimizer.step(mean_norms=mean_norms)  # type: ignore[call-overload]
        return loss

    def _extrapolate(self, indices: Tensor, epoch: int | Tensor, step: int) -> Tensor:
        """Take a step of EXTRAP-SGD, which computes each worker's gradient twice.

        Running statistics and recurrent states are updated by the second computation only.
        """
        self.statistics.begin()
        seen: dict[int, list[Tensor | Batch]] = {}

        def passes(own: WorkerPasses) -> Iterator[tuple[Tensor | Batch, slice, tuple[int, int, int], bool]]:
            """Yield the inputs, slice and key of each pass, and whether this is the second computation."""
            second = own.worker in seen
            if not second:
                seen[own.worker] = [self.data_source.take(indices[piece]) for piece in own.passes]
            with self.statistics.tracking(own.worker if second else None):
                for i, (piece, inputs) in enumerate(zip(own.passes, seen[own.worker], strict=True)):
                    yield inputs, piece, (step, own.worker, i), second
            if second:
                seen[own.worker] = []

        def closure(own: WorkerPasses) -> Tensor:
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            for inputs, piece, key, second in passes(own):
                weight = (piece.stop - piece.start) / self.plan.share
                part = self._loss(inputs, piece, epoch, key, update_state=second)
                (part * (weight * self.scale)).backward()
                loss += part.detach() * weight
            return loss

        def gradients(own: WorkerPasses, stacks: list[Tensor]) -> tuple[Tensor, Sequence[Tensor | None]]:
            (found,) = [self._stacked_gradients(stacks, epoch, *one) for one in passes(own)]
            return found

        group = dist.group.WORLD if self.plan.ranks > 1 else None
        assert isinstance(self.optimizer, ExtrapSGD)
        closures = [partial(closure, own) for own in self.worker_passes if own.unit is None]
        stacked = [(partial(gradients, own), own.copies) for own in self.worker_passes if own.unit is not None]
        loss: Tensor = self.optimizer.step(closures, group, gradients=stacked)
        if group is not None:
            dist.all_reduce(loss.div_(self.plan.ranks))
        self.statistics.end()
        return loss

    def _stacked_gradients(
        self,
        stacks: list[Tensor],
        epoch: int | Tensor,
        inputs: Tensor | Batch,
        piece: slice,
        key: tuple[int, int, int],
        update_state: bool = True,
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the mean loss of a pass with `stacks` as parameters, and the gradient of each part's mean loss."""
        stacks = [stack.detach().requires_grad_() for stack in stacks]
        loss = self._loss(inputs, piece, epoch, key, update_state, dict(zip(self.names, stacks, strict=True)))
        return loss.detach(), torch.autograd.grad(loss * (len(stacks[0]) * self.scale), stacks, allow_unused=True)

    def _loss(
        self,
        inputs: Tensor | Batch,
        piece: slice,
        epoch: int | Tensor,
        key: tuple[int, int, int],
        update_state: bool = True,
        stacks: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the mean loss of a pass over the slice `piece` of the batch, seeded by `key`: (step, worker, pass)."""
        self.statistics.set_pass(piece)
        with self.config.autocast(self.device):
            loss, after = self._forward(inputs, self.recurrent_state.rows_of(piece), epoch, key, stacks)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise UsageError(f"task {self.config.task}: loss() must return one number, as a tensor, got {got}")
        self.processes.heartbeat.advance()
        if update_state:
            self.recurrent_state.update(piece, after)
        return loss.reshape(())

    def _forward(
        self,
        inputs: Tensor | Batch,
        carried: Batch,
        epoch: int | Tensor,
        key: tuple[int, int, int],
        stacks: dict[str, Tensor] | None,
    ) -> tuple[Tensor, Batch]:
        if self.mode.startswith("compiled"):
            self.seed(*key)
            samples = self.data_source.samples
            try:
                return compiled(self.task, self.model, samples, inputs, carried, self.config, epoch, self.device)
            except NotCompiled as error:
                self._fall_back(error)
        if isinstance(inputs, Tensor):
            inputs = self.task.batch(self.data_source.samples, inputs, seed=self.config.seed, epoch=cast(int, epoch))
        self.seed(*key)
        batch = to_device(inputs, self.device, self.config.dtype)
        if stacks is not None:
            return stacked_loss(self.task, self.model, stacks, batch), ()
        return self.task.follow(self.model, batch, carried)

    def seed(self, step: int, worker: int, number: int = 0) -> None:
        """Seed the random numbers of a pass. Do nothing in a CUDA graph capture: CapturedStepper seeds each replay."""
        if self.draws and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            rng.seed_torch(self.config.seed, rng.DROPOUT, step, worker, number)

    def _fall_back(self, error: NotCompiled) -> None:
        """Fall back to passes that are not compiled, or raise Failed if the user asked for compiled ones."""
        if self.asked:
            raise Failed(f"`step` {self.mode}: torch cannot compile this task: {error}") from error
        warnings.warn(f"this task cannot be compiled, falling back to uncompiled steps: {error}", stacklevel=3)
        self.mode = self.mode.removeprefix("compiled").removeprefix("+") or "eager"

    def _reduce(self, loss: Tensor, mean_norms: Tensor | None) -> None:
        """Sum gradients and loss, already weighted by their share of the batch, over processes; average the norms."""
        if self.sharded:
            dist.all_reduce(loss)
        if self.gradient_sum is None:
            return
        self.gradient_sum.finish(loss)
        if mean_norms is not None:
            dist.all_reduce(mean_norms.div_(self.plan.ranks))


class _MicroBatchGradients:
    """Accumulator for CLARS: the weighted sum of micro-batch gradients, and each parameter's mean norm over them."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.sums: dict[int, Tensor] = {}
        self.norms = torch.zeros(len(params), dtype=torch.float64, device=params[0].device)
        self.count = 0

    def add(self, grads: Sequence[Sequence[Tensor] | None], weight: float) -> None:
        """Add the gradients of micro-batches, each multiplied by `weight`.

        `grads` has, for each parameter, a gradient of each micro-batch, or None if it has no gradient.
        """
        found = {i: list(parts) for i, parts in enumerate(grads) if parts is not None}
        count = len(next(iter(found.values())))
        norms = torch._foreach_norm([grad for parts in found.values() for grad in parts], 2, torch.float64)
        # stacked on the device, without synchronisation
        sums = torch.stack([norm.to(self.norms.device) for norm in norms]).view(-1, count).sum(1)
        columns = [self.norms.new_zeros(())] * len(self.params)
        for i, norm in zip(found, sums.unbind(), strict=True):
            columns[i] = norm
        self.norms += torch.stack(columns)
        for i in found.keys() - self.sums.keys():
            self.sums[i] = torch.zeros_like(found[i][0])
        for own in zip(*found.values(), strict=True):
            torch._foreach_add_([self.sums[i] for i in found], own, alpha=weight)
        self.count += count

    def finish(self) -> Tensor:
        """Set each ``p.grad`` to the mean gradient; return the mean gradient norm of each parameter."""
        for i, p in enumerate(self.params):
            p.grad = self.sums.get(i)
        return self.norms / self.count
