"""Small convolutional networks."""

from torch import nn


def digits_net(width: int = 16) -> nn.Sequential:
    """Two convolutions with BatchNorm and a linear layer, for 8 x 8 images of one channel (9,978 parameters)."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )
