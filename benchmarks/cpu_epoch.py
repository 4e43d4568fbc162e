"""Time of an epoch of ResNet20 on a CPU: the trainer's steps compared with a plain PyTorch loop, in turns.

The plain loop is that of tutorials: contiguous (NCHW) images, each cropped, flipped and normalised by itself in a
DataLoader, torch's BatchNorm over the whole batch, torch.optim.SGD. The trainer normalises groups of samples, as the
paper does. The images are random; this does not change the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from epoch import Pictures, with_plain_norms
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from sngm.models.resnet_cifar import resnet20
from sngm.options import Execution
from sngm.tasks import Splits, Tensors
from sngm.tasks.cifar import Cifar10ResNet20
from sngm.training import resolve
from sngm.training.build import prepare
from sngm.training.distributed import Processes

IMAGES = 50_000


class RandomImages(Cifar10ResNet20):
    """ResNet20 on random images of CIFAR-10's size."""

    def data(self) -> Splits:
        images, labels = random_images(2048)
        images = images.contiguous(memory_format=torch.channels_last)
        return Splits(Tensors(images, labels), Tensors(images[:256], labels[:256]))


def random_images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, 10, (count,), generator=generator)


def trainer(method: str, batch: int) -> Callable[[int], None]:
    """Return a function that takes a number of the trainer's steps."""
    config = resolve(f"{__file__}:RandomImages", method, lr=0.1, batch=batch)
    stepper = prepare(config, Processes(0, 1, torch.device("cpu")), Execution()).stepper

    def run(steps: int) -> None:
        for step in range(steps):
            stepper(torch.randint(0, 2048, (batch,)), epoch=0, step=step)

    return run


def plain_loop(batch: int) -> Callable[[int], None]:
    """Return a function that takes a number of steps of the plain loop, without worker processes."""
    images, labels = random_images(2048)
    loader = DataLoader(Pictures(images, labels), batch, shuffle=True, drop_last=True)
    model: nn.Module = with_plain_norms(resnet20())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4)

    def run(steps: int) -> None:
        done = 0
        while done < steps:
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                done += 1
                if done == steps:
                    break

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--methods", nargs="+", default=["sngm", "msgd"])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each, in turns")
    parser.add_argument("--images", type=int, default=2048, help="images in a measurement")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.images} images, {args.rounds} rounds")
    print("| batch | method | s per epoch | plain loop | ratio | ratios |\n|---|---|---|---|---|---|")
    for batch in args.batches:
        contenders = {"plain": plain_loop(batch)} | {method: trainer(method, batch) for method in args.methods}
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for run in contenders.values():
            run(1)
        for _ in range(args.rounds):
            for name, run in contenders.items():
                start = time.perf_counter()
                run(args.images // batch)
                seconds[name].append((time.perf_counter() - start) * IMAGES / (args.images // batch * batch))
        for method in args.methods:
            ratios = [ours / plain for ours, plain in zip(seconds[method], seconds["plain"], strict=True)]
            times = " | ".join(f"{statistics.median(seconds[name]):.0f}" for name in (method, "plain"))
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {batch} | {method} | {times} | {statistics.median(ratios):.2f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
