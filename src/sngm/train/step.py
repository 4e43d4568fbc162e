"""One step: the mean gradient of the global batch over micro-batches, workers and processes; then the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError
from ..optim import CLARS, ExtrapSGD
from ..tasks import Batch, Samples, Task
from . import rng
from .batch import BatchPlan
from .config import RunConfig


class Stepper:
    """Takes the steps of one run. Nothing in here is state: all that lasts is in the model and the optimizer."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        samples: Samples,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: BatchPlan,
        device: torch.device,
        rank: int = 0,
    ) -> None:
        if config.clip is not None and isinstance(optimizer, ExtrapSGD):
            raise UsageError("extrap-sgd takes its gradients inside its step, where clip cannot reach them")
        if isinstance(optimizer, CLARS) and plan.batch == plan.bn_group:
            raise UsageError("clars takes the mean of several micro-batches' norms; give it --workers or --micro")
        self.config, self.task, self.samples, self.model = config, task, samples, model
        self.optimizer, self.plan, self.device, self.rank = optimizer, plan, device, rank
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self.dtype = getattr(torch, config.precision)

    def __call__(self, indices: Tensor, *, epoch: int, step: int) -> Tensor:
        """Take a step on the samples of the global batch; return their mean loss."""
        mine = self.plan.workers_of(self.rank)
        if isinstance(self.optimizer, ExtrapSGD):
            return self._extrapolate(indices, mine, epoch, step)
        self.optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        apart = _Apart(self.params) if isinstance(self.optimizer, CLARS) else None
        before = self._statistics()
        kept: list[list[Tensor]] = []
        for worker in mine:
            self._restore(before)
            weight = self.plan.bn_group / self.plan.batch
            with self._statistics_of(worker):
                for i, piece in enumerate(self.plan.pieces(worker)):
                    part = self._loss(indices[piece], epoch, step, worker, i)
                    if apart is None:
                        (part * weight).backward()  # type: ignore[no-untyped-call]
                    else:
                        part.backward()  # type: ignore[no-untyped-call]
                        apart.take(weight)
                    loss += part.detach() * weight
            kept.append(self._statistics())
        if apart is not None:
            apart.give_back()
        mean_norms = apart.norms if apart is not None else None
        self._reduce(loss, mean_norms)
        self._keep(kept)
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.params, self.config.clip)
        if mean_norms is None:
            self.optimizer.step()
        else:
            self.optimizer.step(mean_norms=mean_norms)  # type: ignore[call-overload]
        return loss

    def _loss(self, indices: Tensor, epoch: int, step: int, worker: int, i: int) -> Tensor:
        batch = self.task.batch(self.samples, indices, seed=self.config.seed, epoch=epoch)
        rng.seed_torch(self.config.seed, rng.DROPOUT, step, worker, i)
        return self.task.loss(self.model, to_device(batch, self.device, self.dtype))

    def _extrapolate(self, indices: Tensor, mine: range, epoch: int, step: int) -> Tensor:
        """EXTRAP-SGD asks each worker for its gradient twice; BatchNorm's statistics follow the second look."""
        before = self._statistics()
        kept: list[list[Tensor]] = []
        looks = dict.fromkeys(mine, 0)

        def closure(worker: int) -> Tensor:
            looks[worker] += 1
            self._restore(before)
            loss = torch.zeros((), dtype=torch.float64, device=self.device)
            weight = self.plan.bn_group / self.plan.share
            with self._statistics_of(worker if looks[worker] == 2 else None):
                for i, piece in enumerate(self.plan.pieces(worker)):
                    part = self._loss(indices[piece], epoch, step, worker, i)
                    (part * weight).backward()  # type: ignore[no-untyped-call]
                    loss += part.detach() * weight
            if looks[worker] == 2:
                kept.append(self._statistics())
            return loss

        group = dist.group.WORLD if self.plan.ranks > 1 else None
        assert isinstance(self.optimizer, ExtrapSGD)
        loss: Tensor = self.optimizer.step([lambda w=w: closure(w) for w in mine], group=group)  # type: ignore[misc]
        if group is not None:
            dist.all_reduce(loss.div_(self.plan.ranks))
        self._keep(kept)
        return loss

    # ---------------------------------------------------------------- over processes

    def _reduce(self, loss: Tensor, mean_norms: list[Tensor] | None) -> None:
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
            packed = torch.stack(mean_norms) / self.plan.ranks
            dist.all_reduce(packed)
            mean_norms[:] = list(packed)

    # ---------------------------------------------------------------- BatchNorm's running statistics

    @contextlib.contextmanager
    def _statistics_of(self, worker: int | None) -> Iterator[None]:
        """Within, running statistics follow the worker's batches if they are to be kept, else stay as they are."""
        follow = worker == 0 if self.config.running_stats == "first" else worker is not None
        for norm in self.norms:
            norm.track_running_stats = follow
        try:
            yield
        finally:
            for norm in self.norms:
                norm.track_running_stats = True

    def _statistics(self) -> list[Tensor]:
        if self.config.running_stats == "first":
            return []
        return [b.clone() for norm in self.norms for b in norm.buffers()]

    def _restore(self, statistics: list[Tensor]) -> None:
        """Every worker starts from the same statistics."""
        if statistics:
            for b, old in zip((b for norm in self.norms for b in norm.buffers()), statistics, strict=True):
                b.copy_(old)

    def _keep(self, workers: list[list[Tensor]]) -> None:
        """The mean over workers of the statistics each has come to."""
        if self.config.running_stats == "first":
            return
        for i, b in enumerate(b for norm in self.norms for b in norm.buffers()):
            if not b.is_floating_point():  # the number of batches seen, equal for all
                continue
            mean = torch.stack([statistics[i] for statistics in workers]).sum(0) / self.plan.workers
            if self.plan.ranks > 1:
                dist.all_reduce(mean)
            b.copy_(mean)


class _Apart:
    """Gradients of micro-batches taken one by one: their weighted sum, and the mean of each tensor's norm."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.sums: dict[int, Tensor] = {}
        self.norms = [torch.zeros((), dtype=torch.float64, device=p.device) for p in params]
        self.count = 0

    def take(self, weight: float) -> None:
        found = [i for i, p in enumerate(self.params) if p.grad is not None]
        grads = [g for p in self.params if (g := p.grad) is not None]
        torch._foreach_add_([self.norms[i] for i in found], list(torch._foreach_norm(grads, 2, torch.float64)))
        torch._foreach_mul_(grads, weight)
        known = [(self.sums[i], g) for i, g in zip(found, grads, strict=True) if i in self.sums]
        if known:
            torch._foreach_add_(*map(list, zip(*known, strict=True)))
        self.sums |= {i: g for i, g in zip(found, grads, strict=True) if i not in self.sums}
        for p in self.params:
            p.grad = None
        self.count += 1

    def give_back(self) -> None:
        for i, p in enumerate(self.params):
            p.grad = self.sums.get(i)
        self.norms = [n / self.count for n in self.norms]


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """A batch where the model is, floating-point inputs in its precision."""
    return tuple(t.to(device, dtype if t.is_floating_point() else t.dtype, non_blocking=True) for t in batch)


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
