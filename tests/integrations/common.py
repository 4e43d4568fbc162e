"""The model and data of the integration tests, the same run in one plain process, and how results are handed back."""

import importlib.util
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from sngm import SNGM

STEPS, BATCH = 4, 8


def declare_operators_of_torchvision() -> None:
    """Let torchvision, which timm, Lightning and transformers import, be imported beside a torch without CUDA.

    Its wheels on PyPI cannot load their library then, and fail where they describe its operators. No test uses them.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or (Path(torch.__file__).parent / "lib" / "libc10_cuda.so").exists():
        return
    text = (Path(found.origin).parent / "_meta_registrations.py").read_text()
    for name in dict.fromkeys(re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"\)', text)):
        torchvision.define(f"{name}(Tensor a) -> Tensor")


torchvision = torch.library.Library("torchvision", "FRAGMENT")
declare_operators_of_torchvision()


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Build a small network, the same in every process."""
    torch.manual_seed(0)
    layers = OrderedDict(first=nn.Linear(5, 7), tanh=nn.Tanh(), second=nn.Linear(7, 3))
    return nn.Sequential(layers).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return the samples of the whole batch of one step."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    return x.to(dtype), y.to(dtype)


def share(step: int, rank: int, world: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return the samples of one rank."""
    x, y = batch(step, dtype)
    return x.chunk(world)[rank], y.chunk(world)[rank]


def loss_of(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (network(x) - y).square().mean()


def groups(network: nn.Module, decay: float = 0.1) -> list[dict]:
    """Return a group with weight decay, of the matrices, and one without."""
    named = list(network.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": decay},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]


def plain(steps: int = STEPS, dtype: torch.dtype = torch.float64, **settings) -> nn.Sequential:
    """Train in one process without any framework."""
    network = model(dtype)
    optimizer = SNGM(groups(network), **{"lr": 0.1, **settings})
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(network, *batch(step, dtype)).backward()
        optimizer.step()
    return network


def distance(network: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two networks' parameters; sharded ones are gathered."""
    with torch.no_grad():
        pairs = zip(network.parameters(), other.parameters(), strict=True)
        return max((whole(p) - whole(q)).abs().max().item() for p, q in pairs)


def whole(p: Tensor) -> Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def message(function: Callable[[], object]) -> str:
    """Return the message of the error that a function raises."""
    try:
        function()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def report(rank: int, cases: dict[str, Callable[[], object]]) -> None:
    """Run all cases; rank 0 prints what each returned as JSON."""
    found = {name: case() for name, case in cases.items()}
    if rank == 0:
        print("RESULTS " + json.dumps(found))
    sys.stdout.flush()
