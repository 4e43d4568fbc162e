"""Lightning: DDP and ModelParallel (FSDP2), checkpoints, and CLARS."""

from common import STEPS, distance, groups, loss_of, model, plain, report, share  # isort: skip
import tempfile

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from sngm import CLARS, SNGM
from sngm.integrations import measure_norms


class Net(lightning.LightningModule):
    def __init__(self, sharded: bool = False, clars: bool = False) -> None:
        super().__init__()
        self.sharded, self.clars = sharded, clars
        self.layers = model()

    def configure_model(self) -> None:
        if self.sharded and not hasattr(self.layers, "unshard"):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, *_):
        return loss_of(self.layers, *share(self.trainer.global_step, self.global_rank, self.trainer.world_size))

    def configure_optimizers(self):
        if not self.clars:
            return SNGM(groups(self.layers), lr=0.1)
        optimizer = CLARS(self.layers.parameters(), lr=1.0)
        measure_norms(optimizer)
        return optimizer


def train(network: Net, steps: int, **options) -> lightning.Trainer:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if network.sharded else DDPStrategy()
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(network, torch.utils.data.DataLoader(range(STEPS), batch_size=None), **options)
    return trainer


def ddp() -> float:
    network = Net()
    train(network, STEPS)
    return distance(network.layers, plain())


def sharded() -> float:
    network = Net(sharded=True)
    train(network, STEPS)
    return distance(network.layers, plain())


def resumed() -> float:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = folder[0] + "/checkpoint.ckpt"
    train(Net(), 2).save_checkpoint(path)
    network = Net()
    train(network, STEPS, ckpt_path=path)
    return distance(network.layers, plain())


def clars() -> float:
    network, expected = Net(clars=True), model()
    trainer = train(network, STEPS)
    reference = CLARS(expected.parameters(), lr=1.0)
    for step in range(STEPS):
        params = list(expected.parameters())
        parts = [torch.autograd.grad(loss_of(expected, *share(step, i, 2)), params) for i in range(2)]
        for p, *of_ranks in zip(params, *parts, strict=True):
            p.grad = sum(of_ranks) / 2
        reference.step(mean_norms=[sum(g.norm() for g in pair) / 2 for pair in zip(*parts, strict=True)])
    assert trainer.global_step == STEPS
    return distance(network.layers, expected)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    report(dist.get_rank(), {case.__name__: case for case in (ddp, resumed, sharded, clars)})
