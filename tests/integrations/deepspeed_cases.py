"""DeepSpeed's ZeRO 1 to 3: one norm over all groups and ranks, checkpoints, and errors where it cannot be had."""

import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from common import STEPS, distance, groups, loss_of, message, model, plain, report, share

import sngm
from sngm import LAMB, LARS, SNGM
from sngm.integrations.deepspeed import share_norm

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
dtype = torch.float32


def engine(stage: int, *, cls=SNGM, one_group=False, shared=True, offload=False, settings=None, **config):
    network = model(dtype)
    params = network.parameters() if one_group else groups(network)
    optimizer = cls(params, **{"lr": 0.1, **(settings or {})})
    sub_group = {"sub_group_size": 20} if stage == 3 else {}  # ZeRO 3 steps once for each
    whole = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8 // dist.get_world_size(),
        "zero_optimization": {
            "stage": stage,
            **sub_group,
            **({"offload_optimizer": {"device": "cpu"}} if offload else {}),
        },
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **config,
    }
    made = deepspeed.initialize(model=network, optimizer=optimizer, config=whole)[0]
    if shared:
        share_norm(made)
    return made


def train(made, steps) -> None:
    for step in steps:
        made.backward(loss_of(made, *share(step, dist.get_rank(), dist.get_world_size(), dtype)))
        made.step()


def off(made, expected) -> float:
    with deepspeed.zero.GatheredParameters(list(made.module.parameters())):
        return distance(made.module, expected)


def steps(stage: int) -> float:
    made = engine(stage)
    train(made, range(STEPS))
    return off(made, plain(dtype=dtype))


def decoupled(stage: int) -> float:
    settings = {"weight_decay_mode": "decoupled", "nesterov": True}
    made = engine(stage, settings=settings)
    train(made, range(STEPS))
    return off(made, plain(dtype=dtype, **settings))


def offloaded(stage: int) -> float:
    made = engine(stage, offload=True)
    train(made, range(STEPS))
    return off(made, plain(dtype=dtype))


def clipped(stage: int) -> float:
    made = engine(stage, gradient_clipping=0.1)
    train(made, range(STEPS))
    expected = model(dtype)
    optimizer = SNGM(groups(expected), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(expected, *share(step, i, 2, dtype)) for i in range(2)) / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        optimizer.step()
    return off(made, expected)


def resumed(stage: int) -> float:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    made = engine(stage)
    train(made, range(2))
    made.save_checkpoint(folder[0])
    again = engine(stage)
    again.load_checkpoint(folder[0])
    train(again, range(2, STEPS))
    return off(again, plain(dtype=dtype))


def hidden_groups(stage: int) -> str:
    return message(lambda: train(engine(stage, shared=False), [0]))


def parts(stage: int) -> str:
    return message(lambda: train(engine(stage, shared=False, one_group=True), [0]))


def layerwise(stage: int) -> list[str]:
    kinds = [(LARS, {}), (LAMB, {}), (SNGM, {"scope": "tensor"})]
    return [message(lambda k=k: train(engine(stage, cls=k[0], settings=k[1], shared=False), [0])) for k in kinds]


def check(stage: int) -> list[str]:
    """Return the faults of ZeRO with gradient_clipping."""
    made = engine(stage, gradient_clipping=0.01)
    return [finding.name for finding in sngm.check(made.module, made.optimizer, lambda: train(made, [0])).faults]


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    stage = int(sys.argv[1])
    cases = [steps, decoupled, offloaded, clipped, resumed, hidden_groups, parts, layerwise, check]
    report(dist.get_rank(), {case.__name__: (lambda case=case: case(stage)) for case in cases})
