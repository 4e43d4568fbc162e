"""The default task: scikit-learn's digits and a small convolutional network with BatchNorm."""

from torch import nn

from ..data.digits import load_digits
from ..models.convnet import digits_net
from .base import Splits, Task, Tensors


class Digits(Task):
    """scikit-learn's 8 x 8 digits, a network of two convolutions with BatchNorm; nothing to download."""

    epochs = 15
    batches = (32, 512)
    lrs = {  # noqa: RUF012  four per method, half a decade apart
        "msgd": (0.03, 0.1, 0.3, 1.0),
        "adam": (0.003, 0.01, 0.03, 0.1),
        "adamw": (0.003, 0.01, 0.03, 0.1),
        "lion": (0.001, 0.003, 0.01, 0.03),
        "signum": (0.001, 0.003, 0.01, 0.03),
        "muon": (0.003, 0.01, 0.03, 0.1),
        "nesterov": (0.03, 0.1, 0.3, 1.0),
        "nsgdm": (0.1, 0.3, 1.0, 3.0),
        "lars": (10.0, 30.0, 100.0, 300.0),
        "lars-unscaled": (10.0, 30.0, 100.0, 300.0),
        "lars-momentum": (0.01, 0.03, 0.1, 0.3),
        "clars": (1.0, 3.0, 10.0, 30.0),
        "extrap-sgd": (0.03, 0.1, 0.3, 1.0),
        "lamb": (0.003, 0.01, 0.03, 0.1),
        "sngm": (0.03, 0.1, 0.3, 1.0),
        "sngd": (0.1, 0.3, 1.0, 3.0),
        "block-sngm": (0.01, 0.03, 0.1, 0.3),
        "spectral-sngm": (0.003, 0.01, 0.03, 0.1),
    }

    def __init__(self, width: int = 16) -> None:
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.width = width

    def data(self) -> Splits:
        train, test = load_digits()
        return Splits(Tensors(*train), Tensors(*test))

    def model(self) -> nn.Module:
        return digits_net(self.width)
