"""Norms over parameters that are split among processes equal those of one process."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import sngm

SHAPES = [(6, 4), (8,), (4, 2, 2)]
STEPS = 5
CASES = {
    "SNGM, whole tensors": ("SNGM", {"lr": 0.1, "weight_decay": 0.05}, "owners"),
    "SNGM by group, whole tensors": ("SNGM", {"lr": 0.1, "scope": "group"}, "owners"),
    "SNGM, slices": ("SNGM", {"lr": 0.1, "weight_decay": 0.05}, "slices"),
    "block-wise SNGM, slices": ("SNGM", {"lr": 0.1, "scope": "tensor"}, "slices"),
    "LARS, slices": ("LARS", {"lr": 5.0, "weight_decay": 0.05}, "slices"),
    "LARS momentum, slices": ("LARS", {"lr": 0.05, "variant": "momentum"}, "slices"),
    "LAMB, slices": ("LAMB", {"lr": 0.05, "max_grad_norm": 0.5}, "slices"),
}


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def share(whole: list[Tensor], rank: int, split: str) -> list[Tensor]:
    """What one of two ranks holds: half the tensors, or half of each."""
    if split == "owners":
        return whole[rank::2]
    return [t.chunk(2)[rank].clone() for t in whole]


def train(name: str, settings: dict, params: list[Tensor], grads_of, **group) -> list[Tensor]:
    leaves = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = getattr(sngm, name)(leaves, **settings, **group)
    for t in range(STEPS):
        for p, g in zip(leaves, grads_of(t), strict=True):
            p.grad = g.clone()
        optimizer.step()
    assert optimizer.skipped == 1  # the step on which only the first rank's gradient overflows
    return [p.detach() for p in leaves]


def gradients(t: int) -> list[Tensor]:
    whole = tensors(100 + t)
    if t == 2:
        whole[0][0, 0] = torch.inf
    return whole


def worker(rank: int, case: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    name, settings, split = CASES[case]
    ours = share(tensors(0), rank, split)
    end = train(name, settings, ours, lambda t: share(gradients(t), rank, split), norm_group=dist.group.WORLD)
    torch.save(end, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_with_a_part_each_take_the_steps_of_one_with_all(case, tmp_path):
    name, settings, split = CASES[case]
    mp.spawn(worker, (case, str(tmp_path)), nprocs=2)
    alone = train(name, settings, tensors(0), gradients)
    for rank in range(2):
        for ours, theirs in zip(torch.load(tmp_path / f"{rank}.pt"), share(alone, rank, split), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
