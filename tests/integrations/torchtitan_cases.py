"""torchtitan's OptimizersContainer: one norm over the parts of a model, on one rank and over pipeline stages."""

import os

import torch
import torch.distributed as dist
from common import STEPS, batch, distance, loss_of, model, plain, report
from torch import nn
from torchtitan.components.optimizer import ParamGroupConfig

import sngm
from sngm.integrations.torchtitan import OptimizersContainer

PATTERNS = {r"bias$": 0.0, ".*": 0.1}


def container(parts: list[nn.Module], **factory) -> OptimizersContainer:
    groups = [
        ParamGroupConfig(pattern=p, optimizer_name="SNGM", optimizer_kwargs={"lr": 0.1, "weight_decay": decay})
        for p, decay in PATTERNS.items()
    ]
    config = OptimizersContainer.Config(param_groups=groups, optimizer_factory_kwargs_by_name={"SNGM": factory})
    return config.build(model_parts=parts)


class Part(nn.Module):
    """A model of which only some layers are here; names stay those of the whole."""

    def __init__(self, network: nn.Module, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, getattr(network, name))


def train(network: nn.Module, optimizers: OptimizersContainer, steps) -> None:
    for step in steps:
        network.zero_grad()
        loss_of(network, *batch(step)).backward()
        optimizers.step()


def steps() -> float:
    network = model()
    train(network, container([Part(network, "first"), Part(network, "second")]), range(STEPS))
    return distance(network, plain())


def resumed() -> float:
    network = model()
    parts = [Part(network, "first"), Part(network, "second")]
    before = container(parts)
    train(network, before, range(2))
    after = container(parts)
    after.load_state_dict({key: torch.clone(v) if torch.is_tensor(v) else v for key, v in before.state_dict().items()})
    train(network, after, range(2, STEPS))
    return distance(network, plain())


def pipeline() -> float:
    """Each rank has one stage; both compute the whole gradient, and step their own part."""
    network, rank = model(), dist.get_rank()
    own = container([Part(network, ("first", "second")[rank])], norm_group=dist.group.WORLD)
    for step in range(STEPS):
        train(network, own, [step])
        for name, source in (("first", 0), ("second", 1)):
            for p in getattr(network, name).parameters():
                dist.broadcast(p.data, source)
    return distance(network, plain())


def check_pipeline() -> list[str]:
    """Return the faults of a pipeline stage whose norm is that of its own part."""
    network = model()
    own = container([Part(network, ("first", "second")[dist.get_rank()])])
    return [finding.name for finding in sngm.check(own.model_parts[0], own, lambda: train(network, own, [0])).faults]


if __name__ == "__main__":
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
        report(dist.get_rank(), {"pipeline": pipeline, "check_pipeline": check_pipeline})
        dist.destroy_process_group()
    else:
        report(0, {"steps": steps, "resumed": resumed})
