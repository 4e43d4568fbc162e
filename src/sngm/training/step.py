"""One step: the mean gradient of the global batch over passes, workers and processes; then the optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import Failed, UsageError
from ..optim import CLARS, ExtrapSGD
from ..tasks import Batch, Task
from . import rng
from .batch_plan import BatchPlan
from .batchnorm_stats import Ghost, OneByOne, draws
from .compiled_step import NotCompiled, compiled
from .config import RunConfig
from .data_loading import Resident, Streamed, to_device
from .recurrent_state import Carried


@dataclass(frozen=True, slots=True)
class Turn:
    """Passes that follow one another: those of a worker, or of all workers of a process, named by the first."""

    worker: int
    passes: list[slice]


def turns_of(plan: BatchPlan, rank: int, optimizer: torch.optim.Optimizer, most: int | None) -> list[Turn]:
    """A process's part of a step. `most`: samples of a pass that may hold many BatchNorm groups; None: one group.

    CLARS looks at each micro-batch's gradient, and EXTRAP-SGD at each worker's.
    """
    mine = plan.workers_of(rank)
    if most is None or isinstance(optimizer, CLARS):
        return [Turn(worker, plan.pieces(worker)) for worker in mine]
    if isinstance(optimizer, ExtrapSGD):
        return [Turn(worker, plan.merged(range(worker, worker + 1), most)) for worker in mine]
    return [Turn(mine.start, plan.merged(mine, most))]


class Stepper:
    """Takes the steps of one run. All that lasts is in the model, in the optimizer, and in `carried`."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        feed: Resident | Streamed,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: BatchPlan,
        device: torch.device,
        turns: list[Turn],
        statistics: OneByOne | Ghost,
        carried: Carried,
        mode: str = "eager",
        asked: bool = False,
    ) -> None:
        if config.clip is not None and isinstance(optimizer, ExtrapSGD):
            raise UsageError("extrap-sgd takes its gradients inside its step, where clip cannot reach them")
        if isinstance(optimizer, CLARS) and plan.batch == plan.bn_group:
            raise UsageError("clars takes the mean of several micro-batches' norms; give it --workers or --micro")
        self.config, self.task, self.feed, self.model = config, task, feed, model
        self.optimizer, self.plan, self.device = optimizer, plan, device
        self.turns, self.statistics, self.carried = turns, statistics, carried
        self.mode, self.asked = mode, asked  # asked: for this mode, so that another will not do
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.draws = draws(task, model)
        self.scale = task.scale(config.batch)  # of gradients, not of the loss that is recorded

    def __call__(self, indices: Tensor, *, epoch: int | Tensor, step: int) -> Tensor:
        """Take a step on the samples of the global batch; return their mean loss."""
        if isinstance(self.optimizer, ExtrapSGD):
            return self._extrapolate(indices, epoch, step)
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        apart = _Apart(self.params) if isinstance(self.optimizer, CLARS) else None
        self.statistics.begin()
        for turn in self.turns:
            with self.statistics.following(turn.worker):
                for i, piece in enumerate(turn.passes):
                    weight = (piece.stop - piece.start) / self.plan.batch
                    part = self._loss(self.feed.take(indices[piece]), piece, epoch, (step, turn.worker, i))
                    if apart is None:
                        (part * (weight * self.scale)).backward()
                    else:
                        (part * self.scale).backward()  # type: ignore[no-untyped-call]
                        apart.take(weight)
                    loss += part.detach() * weight
        mean_norms = apart.give_back() if apart is not None else None
        self._reduce(loss, mean_norms)
        self.statistics.end()
        if (clip := self.config.clip) is not None:
            norm = nn.utils.clip_grad_norm_(self.params, clip)
            if mean_norms is not None:  # of the same gradients, by the factor that torch takes
                mean_norms = mean_norms * (clip / (norm + 1e-6)).clamp(max=1.0)
        if mean_norms is None:
            self.optimizer.step()
        else:
            self.optimizer.step(mean_norms=mean_norms)  # type: ignore[call-overload]
        return loss

    def _extrapolate(self, indices: Tensor, epoch: int | Tensor, step: int) -> Tensor:
        """EXTRAP-SGD asks each worker for its gradient twice; statistics and hidden states follow the second look."""
        self.statistics.begin()
        seen: dict[int, list[Tensor | Batch]] = {}

        def closure(turn: Turn) -> Tensor:
            second = turn.worker in seen
            if not second:
                seen[turn.worker] = [self.feed.take(indices[piece]) for piece in turn.passes]
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            with self.statistics.following(turn.worker if second else None):
                for i, (piece, taken) in enumerate(zip(turn.passes, seen[turn.worker], strict=True)):
                    weight = (piece.stop - piece.start) / self.plan.share
                    part = self._loss(taken, piece, epoch, (step, turn.worker, i), hands_on=second)
                    (part * (weight * self.scale)).backward()
                    loss += part.detach() * weight
            if second:
                seen[turn.worker] = []
            return loss

        group = dist.group.WORLD if self.plan.ranks > 1 else None
        assert isinstance(self.optimizer, ExtrapSGD)
        loss: Tensor = self.optimizer.step([lambda t=turn: closure(t) for turn in self.turns], group=group)  # type: ignore[misc]
        if group is not None:
            dist.all_reduce(loss.div_(self.plan.ranks))
        self.statistics.end()
        return loss

    def _loss(
        self,
        taken: Tensor | Batch,
        piece: slice,
        epoch: int | Tensor,
        place: tuple[int, int, int],
        hands_on: bool = True,
    ) -> Tensor:
        """The mean loss of a pass, which holds this part of the batch; `place`: step, worker and pass."""
        self.statistics.at(piece)
        with self.config.autocast(self.device):
            loss, after = self._forward(taken, self.carried.of(piece), epoch, place)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise UsageError(f"task {self.config.task}: loss() must return one number, as a tensor, got {got}")
        if hands_on:
            self.carried.keep(piece, after)
        return loss

    def _forward(
        self, taken: Tensor | Batch, carried: Batch, epoch: int | Tensor, place: tuple[int, int, int]
    ) -> tuple[Tensor, Batch]:
        if self.mode.startswith("compiled"):
            self.seed(*place)
            samples = self.feed.samples
            try:
                return compiled(self.task, self.model, samples, taken, carried, self.config, epoch, self.device)
            except NotCompiled as error:
                self._do_without(error)
        if isinstance(taken, Tensor):
            taken = self.task.batch(self.feed.samples, taken, seed=self.config.seed, epoch=cast(int, epoch))
        self.seed(*place)
        return self.task.follow(self.model, to_device(taken, self.device, self.config.dtype), carried)

    def seed(self, step: int, worker: int, number: int = 0) -> None:
        """Seed what a worker's pass of this number draws. A graph cannot: whoever replays it does."""
        if self.draws and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            rng.seed_torch(self.config.seed, rng.DROPOUT, step, worker, number)

    def _do_without(self, error: NotCompiled) -> None:
        """Go on with eager passes, unless compiled ones were asked for."""
        if self.asked:
            raise Failed(f"--step {self.mode}: torch cannot compile this task: {error}") from error
        warnings.warn(f"this task cannot be compiled, going on without: {error}", stacklevel=3)
        self.mode = self.mode.removeprefix("compiled").removeprefix("+") or "eager"

    def _reduce(self, loss: Tensor, mean_norms: Tensor | None) -> None:
        """Sum gradients, loss and norms over processes. Each has already been weighted by its part of the batch."""
        if self.plan.ranks == 1:
            return
        trained = [p for p in self.params if p.requires_grad]
        missing = [p.grad is None for p in trained]
        for p in trained:
            if p.grad is None:  # another process may have one
                p.grad = torch.zeros_like(p)
        for bucket in buckets([p.grad for p in trained if p.grad is not None]):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat)
            for g, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                g.copy_(part.view_as(g))
        lacking = torch.tensor(missing, dtype=loss.dtype).to(loss.device, non_blocking=True)
        sums = torch.cat([loss.reshape(1), lacking])
        dist.all_reduce(sums)
        loss.copy_(sums[0])
        if any(missing):
            for p, without in zip(trained, sums[1:].tolist(), strict=True):
                if without == self.plan.ranks:  # no process has one: the optimizer leaves it alone, as with one process
                    p.grad = None
        if mean_norms is not None:
            dist.all_reduce(mean_norms.div_(self.plan.ranks))


class _Apart:
    """Gradients of micro-batches taken one by one: their weighted sum, and the mean of each tensor's norm."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.sums: dict[int, Tensor] = {}
        self.norms = torch.zeros(len(params), dtype=torch.float64, device=params[0].device)
        self.count = 0

    def take(self, weight: float) -> None:
        found = [i for i, p in enumerate(self.params) if p.grad is not None]
        grads = [g for p in self.params if (g := p.grad) is not None]
        columns = [self.norms.new_zeros(())] * len(self.params)
        for i, norm in zip(found, torch._foreach_norm(grads, 2, torch.float64), strict=True):
            columns[i] = norm.to(self.norms.device)
        self.norms += torch.stack(columns)  # one tensor, whose making waits for nothing
        torch._foreach_mul_(grads, weight)
        known = [(self.sums[i], g) for i, g in zip(found, grads, strict=True) if i in self.sums]
        if known:
            torch._foreach_add_(*map(list, zip(*known, strict=True)))
        self.sums |= {i: g for i, g in zip(found, grads, strict=True) if i not in self.sums}
        for p in self.params:
            p.grad = None
        self.count += 1

    def give_back(self) -> Tensor:
        """Put the mean gradient into place; return the mean norms, one a parameter."""
        for i, p in enumerate(self.params):
            p.grad = self.sums.get(i)
        return self.norms / self.count


def buckets(tensors: list[Tensor], elements: int = 1 << 23) -> Iterator[list[Tensor]]:
    """Runs of tensors that are sent together: few messages, and little memory for their copies."""
    bucket: list[Tensor] = []
    size = 0
    for t in tensors:
        if bucket and (size + t.numel() > elements or t.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(t)
        size += t.numel()
    if bucket:
        yield bucket
