"""Accelerate: FSDP2, saving and resuming, state from before `prepare`; CLARS under DDP."""

from common import STEPS, batch, distance, groups, loss_of, model, plain, report, share  # isort: skip
import gc
import tempfile
import weakref

import fsdp_on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sngm
from sngm import CLARS, SNGM
from sngm.integrations import measure_norms

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_offload=False)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
rank, world = accelerator.process_index, accelerator.num_processes


def train(network, optimizer, steps) -> None:
    for step in steps:
        optimizer.zero_grad()
        accelerator.backward(loss_of(network, *share(step, rank, world)))
        optimizer.step()


def prepared():
    network = model()
    return accelerator.prepare(network, SNGM(groups(network), lr=0.1))


def steps() -> float:
    network, optimizer = prepared()
    train(network, optimizer, range(STEPS))
    return distance(network, plain())


def resumed() -> float:
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    accelerator._models, accelerator._optimizers = [], []
    network, optimizer = prepared()
    train(network, optimizer, range(2))
    accelerator.save_state(folder[0])
    train(network, optimizer, [7])  # lost again
    accelerator.load_state(folder[0])
    train(network, optimizer, range(2, STEPS))
    return distance(network, plain())


def stepped_before() -> float:
    network = model()
    optimizer = SNGM(groups(network), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(network, *batch(step)).backward()
        optimizer.step()
    optimizer.zero_grad()
    network, optimizer = accelerator.prepare(network, optimizer)
    train(network, optimizer, range(2, STEPS))
    return distance(network, plain())


def checkpoint_of_new() -> int:
    network, optimizer = prepared()
    state = get_optimizer_state_dict(network, optimizer.optimizer)["state"]
    return sum(hasattr(entry["momentum_buffer"], "device_mesh") for entry in state.values())


def stale() -> int:
    """Return how many of the whole parameters, and entries of state for them, are alive after a step."""
    network = model()
    optimizer = SNGM(groups(network), lr=0.1)
    old = [weakref.ref(buffer["momentum_buffer"]) for buffer in optimizer.state.values()]
    network, optimizer = accelerator.prepare(network, optimizer)
    train(network, optimizer, [0])
    gc.collect()
    return sum(ref() is not None for ref in old) + len(optimizer.state) - 4


def clars_in_ddp() -> float:
    network = model()
    optimizer = CLARS(network.parameters(), lr=1.0)
    parallel = torch.nn.parallel.DistributedDataParallel(network)
    measure_norms(optimizer)
    expected = model()
    reference = CLARS(expected.parameters(), lr=1.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(parallel, *share(step, rank, world)).backward()
        optimizer.step()
        parts = []
        for i in range(world):
            parts.append(torch.autograd.grad(loss_of(expected, *share(step, i, world)), list(expected.parameters())))
        for p, *of_ranks in zip(expected.parameters(), *parts, strict=True):
            p.grad = sum(of_ranks) / world
        means = [sum(g.norm() for g in of_ranks) / world for of_ranks in zip(*parts, strict=True)]
        reference.step(mean_norms=means)
    return distance(network, expected)


def check_sharded() -> list[str]:
    network, optimizer = prepared()
    return [finding.name for finding in sngm.check(network, optimizer, lambda: train(network, optimizer, [0])).faults]


def check_copies() -> list[str]:
    """Return the faults of DDP with a norm_group, which adds up the same gradient once for each rank."""
    network = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = SNGM(network.parameters(), lr=0.1, norm_group=dist.group.WORLD)
    return [finding.text for finding in sngm.check(network, optimizer, lambda: train(network, optimizer, [0])).faults]


if __name__ == "__main__":
    cases = [steps, resumed, stepped_before, checkpoint_of_new, stale, clars_in_ddp, check_sharded, check_copies]
    report(rank, {case.__name__: case for case in cases})
    dist.destroy_process_group()
