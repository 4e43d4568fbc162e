"""A fixed sample of a task's training data, and measurements of a model on it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError
from ..progress import duration
from ..tasks import Batch, Samples, Task
from ..training import rng
from ..training.batchnorm_stats import track
from ..training.data_loading import to_device
from .blocks import of_norms
from .curvature import PRODUCT, curvature
from .noise import Noise, noise

PROBE = 4  # key of the random numbers of probes, in addition to the keys of sngm.training.rng
GROUPS = 16  # the number of groups if the model has no BatchNorm
PASS = 64  # samples per forward-backward pass if groups may be merged
LEAST = 4  # the fewest groups, if BatchNorm groups are large
WINDOWS = 4  # the fewest consecutive windows per stream
MOST_ITERATIONS = 10_000
SETTLED = 0.05  # relative error of the Hessian's norm that counts as converged
Point = dict[str, Any]
Group = tuple[Batch, Batch]  # samples, and their recurrent state


class Sample:
    """Fixed groups of samples, and a float64 copy of the model, which is measured on them.

    With BatchNorm, a group is the samples that BatchNorm normalises together, because the gradient of a sample depends
    on its group. Without BatchNorm, there are about 16 groups. The measured function is the mean loss over all
    groups, with the augmentation of epoch 0 and without weight decay. Dropout masks of a group are the same in every
    measurement.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        training: Samples,
        bn_group: int,
        samples: int,
        iterations: int,
        say: Callable[[str], None],
    ) -> None:
        if samples < 1:
            raise UsageError(f"`samples` must be at least 1, got {samples}")
        if not 1 <= iterations <= MOST_ITERATIONS:
            raise UsageError(f"`iterations` must be at least 1 and at most {MOST_ITERATIONS:,}, got {iterations}")
        self.task, self.iterations, self.say, self.announced = task, iterations, say, False
        # the most gradients over all samples that one point may take: one for the noise, the rest for the Hessian
        self.evaluations = 1 + PRODUCT * iterations
        self.draws = False  # whether the loss has drawn random numbers so far, as dropout does
        self.twin = copy.deepcopy(model).to(torch.float64)
        norms = [m for m in self.twin.modules() if isinstance(m, _BatchNorm)]
        track(norms, False)  # do not update running statistics
        trained = {name: p for name, p in self.twin.named_parameters() if p.requires_grad}
        self.names, self.params = list(trained), list(trained.values())
        self.normalises = any(norm.training for norm in norms)
        if self.normalises and bn_group == 1:
            raise UsageError("BatchNorm over a single sample: take a larger `bn_group`")
        indices = chains(training, samples, bn_group if self.normalises else None)
        # The batches stay in their own dtype, because float64 would take twice the memory.
        self.chains = [[task.batch(training, i, seed=0, epoch=0) for i in chain] for chain in indices]
        self.sizes = [len(i) for chain in indices for i in chain]
        self.group, self.samples = max(self.sizes), sum(self.sizes)

    def measure(self, model: nn.Module) -> Point:
        """Load the weights of `model` into the float64 copy, and return all measurements at these weights."""
        start = time.monotonic()
        found = self.noise(model)
        groups = self._groups()
        if not self.announced:
            self.announced = True
            self.say(f"at most about {duration((time.monotonic() - start) * self.evaluations)} a point")
        # Merged groups would draw other dropout masks, and the Hessian would be that of a different function.
        separate = self.normalises or self.draws
        merged = groups if separate else _merged(groups, max(1, PASS // self.group))
        shares = [len(batch[0]) / self.samples for batch, _ in merged]

        def parts() -> Iterator[Tensor]:
            return (self._loss(i, *group) * share for i, (group, share) in enumerate(zip(merged, shares, strict=True)))

        steep = curvature(parts, self.params, iterations=self.iterations)
        own = of_norms([n for n in found.block_norms if n is not None])
        weights = math.sqrt(sum(n * n for n in torch.stack([p.detach().norm() for p in self.params]).tolist()))
        return {
            "loss": found.loss,
            "gradient_norm": found.gradient_norm,
            "weight_norm": weights,
            "sigma": found.sigma,
            "sigma_interval": [found.low, found.high],
            "noise_scale": found.scale,
            "hessian_norm": steep.norm,
            "eigenvalue": steep.eigenvalue,
            "eigenvalue_error": steep.error,
            "settled": steep.error <= SETTLED * steep.norm,
            "products": steep.products,
            "by": steep.by,
            "rho": own.rho,
            "cos": own.cos,
            "block_norms": found.block_norms,
            "seconds": time.monotonic() - start,
        }

    def noise(self, model: nn.Module) -> Noise:
        """Load the weights of `model` into the float64 copy, and return the gradient noise at these weights."""
        self.twin.load_state_dict(model.state_dict())
        groups = self._groups()
        return noise(lambda i: self._loss(i, *groups[i]), self.params, range(len(groups)), self.sizes)

    def _groups(self) -> list[Group]:
        """Return each batch with its recurrent state, computed at the current weights without gradients."""
        groups: list[Group] = []
        with torch.no_grad():
            for chain in self.chains:
                carried = self.task.start(self.twin, len(chain[0][0]))
                for batch in chain:
                    groups.append((batch, carried))
                    if batch is not chain[-1]:
                        carried = self._follow(len(groups) - 1, batch, carried)[1]
        return groups

    def _loss(self, number: int, batch: Batch, carried: Batch) -> Tensor:
        return self._follow(number, batch, carried)[0]

    def _follow(self, number: int, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
        device = self.params[0].device
        rng.seed_torch(PROBE, number)
        before = _random_state(device)
        found = self.task.follow(self.twin, to_device(batch, device, torch.float64), carried)
        self.draws = self.draws or not torch.equal(before, _random_state(device))
        return found


def _random_state(device: torch.device) -> Tensor:
    """Return the state, on the CPU, of the random generators that a loss on this device may draw from."""
    host = torch.get_rng_state()
    return torch.cat([host, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else host


def _merged(groups: list[Group], count: int) -> list[Group]:
    """Merge each `count` consecutive groups into one: large forward-backward passes are faster than many small ones."""
    found: list[Group] = []
    for start in range(0, len(groups), count):
        batches, carried = zip(*groups[start : start + count], strict=True)
        found.append((_joined(batches), _joined(carried)))
    return found


def _joined(batches: Sequence[Batch]) -> Batch:
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def chains(training: Samples, samples: int, bn_group: int | None) -> list[list[Tensor]]:
    """Return the sample indices of disjoint groups, as a list of chains.

    For text, the groups of a chain are consecutive windows of the same streams; otherwise a chain is one group.
    """
    count = len(training)
    streams: int | None = getattr(training, "streams", None)
    samples = min(samples, count)
    group = max(1, samples // GROUPS) if bn_group is None else bn_group
    wanted = max(samples // group, LEAST)
    if streams is None:
        if count < 2 * group:
            fitting = max((n for n in range(1, count // 2 + 1) if group % n == 0), default=1)
            raise UsageError(
                f"the noise is measured between BatchNorm groups, and {count} training samples make no two groups of "
                f"{group}; take groups of {fitting}, or a batch of at most {count // 2}"
            )
        order = rng.permutation(count, PROBE)  # the same for every run, so that runs can be compared
        return [[order[i * group : (i + 1) * group]] for i in range(min(wanted, count // group))]
    group = min(group, streams)
    side_by_side = max(1, min(streams // group, wanted // WINDOWS))
    windows = min(count // streams, math.ceil(wanted / side_by_side))
    if side_by_side * windows < 2:
        raise UsageError("the noise is measured between groups of samples, and this text gives only one group")
    return [
        [torch.arange(i * group, (i + 1) * group) + step * streams for step in range(windows)]
        for i in range(side_by_side)
    ]
