"""Hugging Face's Trainer: FSDP2 with checkpoints, and the weight decay that was asked for."""

from common import BATCH, STEPS, batch, distance, loss_of, message, model, report  # isort: skip
import tempfile

import fsdp_on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

import sngm
from sngm import SNGM
from sngm.integrations.huggingface import trainer_optimizer

dtype = torch.float32  # Accelerate's FSDP2 casts to it


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model(dtype)

    def forward(self, x, labels):
        return {"loss": loss_of(self.layers, x, labels)}


def samples() -> list[dict]:
    return [{"x": x, "labels": y} for step in range(STEPS) for x, y in zip(*batch(step, dtype), strict=True)]


class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(
    folder: str, *, steps: int = STEPS, optimizer, micro: int = BATCH, accumulate: int = 1, fsdp=False, network=None
):
    world = dist.get_world_size() if dist.is_initialized() else 1
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=micro // world,
        gradient_accumulation_steps=accumulate,
        max_steps=steps,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        save_strategy="steps" if fsdp else "no",
        save_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **({"fsdp": "full_shard", "fsdp_config": {"version": 2}} if fsdp else {}),
    )
    return InOrder(network or Net(), args, train_dataset=samples(), optimizer_cls_and_kwargs=optimizer)


def expected() -> nn.Module:
    network = Net()
    named = list(network.named_parameters())
    decayed = [p for name, p in named if name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for n, p in named if n.endswith("bias")]}]
    optimizer = SNGM(groups, lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(network.layers, *batch(step, dtype)).backward()
        optimizer.step()
    return network


def sharded() -> float:
    asked = trainer_optimizer(SNGM, lr=0.1, weight_decay=0.1)
    found = trainer(shared_folder(), optimizer=asked, fsdp=True)
    found.train()
    assert all(hasattr(p, "device_mesh") for p in found.model.parameters())
    return distance(found.model, expected())


def resumed() -> float:
    folder = shared_folder()
    asked = trainer_optimizer(SNGM, lr=0.1, weight_decay=0.1)
    trainer(folder, steps=2, optimizer=asked, fsdp=True).train()
    again = trainer(folder, optimizer=asked, fsdp=True)
    again.train(resume_from_checkpoint=True)
    return distance(again.model, expected())


def decay() -> float:
    found = trainer(tempfile.mkdtemp(), optimizer=trainer_optimizer(SNGM, lr=0.1, weight_decay=0.1))
    found.train()
    return distance(found.model, expected())


def accumulated() -> float:
    asked = trainer_optimizer(SNGM, lr=0.1, weight_decay=0.1)
    found = trainer(tempfile.mkdtemp(), optimizer=asked, micro=BATCH // 2, accumulate=2)
    found.train()
    return distance(found.model, expected())


class Kwargs(Net):
    """A model that takes, and ignores, what the Trainer expects losses to be divided by."""

    def forward(self, x, labels, **_):
        return super().forward(x, labels)


class Mended(Kwargs):
    accepts_loss_kwargs = False


def check_of(cls: type[Net]) -> list[str]:
    """Return the faults of a step of two micro-batches."""
    asked = trainer_optimizer(SNGM, lr=0.1, weight_decay=0.1)
    found = trainer(tempfile.mkdtemp(), steps=1, optimizer=asked, micro=BATCH // 2, accumulate=2, network=cls())
    found.create_optimizer()
    return [finding.name for finding in sngm.check(found.model, found.optimizer, found.train).faults]


def check_summed() -> list[str]:
    return check_of(Kwargs)


def check_averaged() -> list[str]:
    return check_of(Mended)


def ignored_decay() -> str:
    return message(trainer(tempfile.mkdtemp(), optimizer=(SNGM, {"lr": 0.1, "weight_decay": 0.1})).train)


def shared_folder() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


if __name__ == "__main__":
    import os

    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
        report(dist.get_rank(), {case.__name__: case for case in (sharded, resumed)})
        dist.destroy_process_group()
    else:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
        report(0, {case.__name__: case for case in (decay, accumulated, check_summed, check_averaged, ignored_decay)})
