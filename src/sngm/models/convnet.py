"""Small convolutional networks."""

from torch import nn


def digits_net(width: int = 16) -> nn.Sequential:
    """Return two convolutions with BatchNorm and a linear layer, for 8 x 8 images of one channel (9,978 parameters)."""
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


def two_conv_net(classes: int = 10) -> nn.Sequential:
    """Return the network of the SNGM paper's Figure 1, for 32 x 32 images of three channels (62,006 parameters).

    The paper only says that the network has two convolutional layers. We chose the layers of LeNet-5, without
    BatchNorm, as in PyTorch's CIFAR-10 tutorial.
    """
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 25, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )
