"""Parameter shapes of four models, for benchmarks of optimizer steps without the models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """A model's shapes. `parameters` and `tensors` are its known counts, which the shapes are checked against."""

    label: str
    tensors: int
    parameters: int
    make: Callable[[], list[Shape]]

    def shapes(self) -> list[Shape]:
        shapes = self.make()
        counted = len(shapes), sum(map(prod, shapes))
        assert counted == (self.tensors, self.parameters), f"{self.label}: {counted} is not what the model has"
        return shapes


def conv_and_norm(c_out: int, c_in: int, size: int) -> list[Shape]:
    return [(c_out, c_in, size, size), (c_out,), (c_out,)]  # filters, then scale and shift of BatchNorm


def resnet20() -> list[Shape]:
    """Return the shapes of the ResNet-20 for CIFAR, whose shortcuts have no parameters."""
    shapes = conv_and_norm(16, 3, 3)
    c_in = 16
    for width in (16, 32, 64):
        for _ in range(3):
            shapes += conv_and_norm(width, c_in, 3) + conv_and_norm(width, width, 3)
            c_in = width
    return [*shapes, (10, 64), (10,)]


def resnet50() -> list[Shape]:
    """Return the shapes of torchvision's resnet50, in its order."""
    shapes = conv_and_norm(64, 3, 7)
    c_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += (
                conv_and_norm(width, c_in, 1) + conv_and_norm(width, width, 3) + conv_and_norm(4 * width, width, 1)
            )
            if block == 0:
                shapes += conv_and_norm(4 * width, c_in, 1)
            c_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def vit_b16() -> list[Shape]:
    """Return the shapes of torchvision's vit_b_16: 12 blocks of width 768 for 224 x 224 images."""
    width = 768
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp: list[Shape] = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    patches: list[Shape] = [(1, 1, width), (width, 3, 16, 16), (width,), (1, 197, width)]
    return [*patches, *(12 * (norm + attention + norm + mlp)), *norm, (1000, width), (1000,)]


def one_billion() -> list[Shape]:
    """Return the shapes of 12 transformer blocks of width 2048 with wide MLPs: few large tensors."""
    width, hidden = 2048, 8 * 2048
    return 12 * [(width,), (3 * width, width), (width, width), (hidden, width), (width, hidden)]


SIZES = {
    "resnet20": Size("ResNet-20", 59, 269_722, resnet20),
    "resnet50": Size("ResNet-50", 161, 25_557_032, resnet50),
    "vit_b16": Size("ViT-B/16", 152, 86_567_656, vit_b16),
    "1b": Size("1B", 60, 1_006_657_536, one_billion),
}
