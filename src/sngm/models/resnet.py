"""ResNet-50 with torchvision's structure and names, so that state dicts load in either."""

from __future__ import annotations

from torch import Tensor, nn

from .ghost_norm import GhostBatchNorm2d

WIDEN = 4  # ratio of the channels of a block's last convolution to those of the others
STEMS = {"7x7": (7, 2, True), "3x3-pool": (3, 1, True), "3x3": (3, 1, False)}  # kernel size, stride, max pooling


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions and a shortcut. The 3 x 3 convolution has the stride, as in ResNet "v1.5"."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = width * WIDEN
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = GhostBatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = GhostBatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = GhostBatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), GhostBatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn1(self.conv1(x), relu=True)
        x = self.bn2(self.conv2(x), relu=True)
        return self.bn3(self.conv3(x), shortcut=shortcut, relu=True)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A convolution, the stem, followed by stages of bottleneck blocks; initialised as in torchvision.

    Convolution weights are drawn from N(0, 2 / fan_out). All BatchNorm layers, also the last of a block, start with
    scale 1 and bias 0. The linear layer has torch's default initialisation.

    Args:
        blocks: number of blocks of each stage.
        classes: number of outputs.
        stem: "7x7", a 7 x 7 convolution of stride 2 and max pooling, as in torchvision; for smaller images "3x3-pool",
            a 3 x 3 convolution of stride 1 and max pooling, or "3x3", without the pooling. Compared with "7x7", feature
            maps have 4 times as many pixels with "3x3-pool" and 16 times as many with "3x3".
    """

    def __init__(self, blocks: tuple[int, int, int, int], classes: int = 1000, stem: str = "7x7") -> None:
        super().__init__()
        if stem not in STEMS:
            raise ValueError(f"stem must be one of {', '.join(STEMS)}, got {stem!r}")
        size, stride, pool = STEMS[stem]
        self.conv1 = nn.Conv2d(3, 64, size, stride=stride, padding=size // 2, bias=False)
        self.bn1 = GhostBatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if pool else nn.Identity()
        self.layer1 = _layer(64, 64, blocks[0])
        self.layer2 = _layer(256, 128, blocks[1], stride=2)
        self.layer3 = _layer(512, 256, blocks[2], stride=2)
        self.layer4 = _layer(1024, 512, blocks[3], stride=2)
        self.fc = nn.Linear(512 * WIDEN, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x), relu=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def _layer(inputs: int, width: int, blocks: int, stride: int = 1) -> nn.Sequential:
    first = Bottleneck(inputs, width, stride)
    return nn.Sequential(first, *(Bottleneck(width * WIDEN, width) for _ in range(blocks - 1)))


def resnet50(classes: int = 1000, stem: str = "7x7") -> ResNet:
    """Return a ResNet-50, as in the SNGM paper's ImageNet experiments (25,557,032 parameters with 1,000 classes)."""
    return ResNet((3, 4, 6, 3), classes, stem)
