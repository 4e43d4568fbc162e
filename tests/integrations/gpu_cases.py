"""Accelerate with FSDP2 and Lightning with FSDP on one GPU: float32, bfloat16, and float16 with a GradScaler."""

from common import STEPS, batch, distance, groups, loss_of, model, report  # isort: skip
import sys
import tempfile
import warnings

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs
from torch import nn
from torch.distributed.fsdp import fully_shard

import sngm
from sngm import SNGM

try:
    from lightning import pytorch as lightning
except ModuleNotFoundError:  # the other name of the same package
    import pytorch_lightning as lightning

DEVICE = torch.device("cuda")
OVERFLOW = 1e30  # makes the gradients of a step infinite in float16, and the scaler skip it


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(step, torch.float32)
    return x.to(DEVICE), y.to(DEVICE)


def plain() -> nn.Sequential:
    """Train in float32 without any framework."""
    network = model(torch.float32).to(DEVICE)
    optimizer = SNGM(groups(network), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(network, *samples(step)).backward()
        optimizer.step()
    return network


def with_accelerate(precision: str) -> dict[str, float]:
    """Return distances from plain training: of an unbroken run, and of one that was saved and resumed."""

    def prepared():
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_offload=False)
        scaler = GradScalerKwargs(init_scale=2.0**10)
        accelerator = Accelerator(mixed_precision=precision, fsdp_plugin=plugin, kwargs_handlers=[scaler])
        network = model(torch.float32).to(DEVICE)
        return accelerator, *accelerator.prepare(network, SNGM(groups(network), lr=0.1))

    def train(accelerator, network, optimizer, steps) -> None:
        for step in steps:
            optimizer.zero_grad()
            accelerator.backward(loss_of(network, *samples(step)))
            optimizer.step()

    accelerator, network, optimizer = prepared()
    assert all(hasattr(p, "device_mesh") for p in network.parameters()), "not sharded"
    if accelerator.scaler is not None:
        before = [p.full_tensor().clone() for p in network.parameters()]
        accelerator.backward(OVERFLOW * loss_of(network, *samples(0)))
        optimizer.step()
        assert optimizer.step_was_skipped
        assert all(torch.equal(p.full_tensor(), q) for p, q in zip(network.parameters(), before, strict=True))
    train(accelerator, network, optimizer, range(STEPS))
    found = {"steps": distance(network, plain())}
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {torch.float32}

    accelerator, network, optimizer = prepared()
    train(accelerator, network, optimizer, range(2))
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator, network, optimizer = prepared()
        accelerator.load_state(folder)
    train(accelerator, network, optimizer, range(2, STEPS))
    found["resumed"] = distance(network, plain())
    faults = sngm.check(network, optimizer, lambda: train(accelerator, network, optimizer, [0])).faults
    return {**found, "faults": [fault.text for fault in faults]}


class Net(lightning.LightningModule):
    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.sharded = sharded
        self.layers = model(torch.float32)

    def configure_model(self) -> None:
        if self.sharded and not hasattr(self.layers, "unshard"):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, *_):
        return loss_of(self.layers, *samples(self.trainer.global_step))

    def configure_optimizers(self):
        return SNGM(groups(self), lr=0.1)


def with_lightning(strategy: str, precision: str) -> dict[str, float]:
    """Return the same distances for Lightning, by FSDP ("fsdp") or FSDP2 ("model-parallel")."""

    def train(steps: int, path: str | None = None) -> tuple[lightning.Trainer, Net]:
        chosen = (
            lightning.strategies.FSDPStrategy(state_dict_type="full")
            if strategy == "fsdp"
            else lightning.strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
        )
        trainer = lightning.Trainer(
            max_steps=steps, accelerator=DEVICE.type, devices=1, strategy=chosen, precision=precision, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        network = Net(strategy != "fsdp")
        trainer.fit(network, torch.utils.data.DataLoader(range(STEPS), batch_size=None), ckpt_path=path)
        assert all(hasattr(p, "device_mesh") for p in network.parameters()) == network.sharded
        return trainer, network

    def differs(trainer: lightning.Trainer) -> float:
        found = trainer.strategy.lightning_module_state_dict()
        expected = {f"layers.{name}": p for name, p in plain().state_dict().items()}
        assert found.keys() == expected.keys()
        values = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in found.items()}
        return max((values[name].to(DEVICE) - expected[name]).abs().max().item() for name in expected)

    trainer, _ = train(STEPS)
    found = {"steps": differs(trainer)}
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = train(2)
        trainer.save_checkpoint(folder + "/half.ckpt")
        trainer, _ = train(STEPS, folder + "/half.ckpt")
    return {**found, "resumed": differs(trainer)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    library, *arguments = sys.argv[1:]
    report(0, {"found": lambda: (with_accelerate if library == "accelerate" else with_lightning)(*arguments)})
