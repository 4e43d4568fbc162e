"""Try an installed sngm: run in an environment that holds the wheel and what it needs, and nothing else."""

import math
import sysconfig
import warnings
from importlib import metadata, resources
from pathlib import Path

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch would like it; nobody needs it
    import torch
    from torch import Tensor, nn

    import sngm

STEPS = 20


def check_installation() -> None:
    installed = metadata.version("sngm")
    assert sngm.__version__ == installed, f"sngm.__version__ is {sngm.__version__}, the wheel is {installed}"
    here, site = Path(sngm.__file__).resolve(), Path(sysconfig.get_path("purelib")).resolve()
    assert here.is_relative_to(site), f"sngm comes from {here}, not from {site}"
    assert (resources.files("sngm") / "py.typed").is_file(), "py.typed is missing, so its types are not seen"


def train(name: str) -> list[float]:
    """Losses of a small regression before and after a few steps of the method."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(16, 4)
    y = x.square().sum(1, keepdim=True)
    extra = {"inner_lr": 0.01} if name == "extrap-sgd" else {}
    optimizer = sngm.optim.create(name, model.parameters(), lr=0.01, **extra)

    def loss_of(part: slice = slice(None)) -> Tensor:
        return nn.functional.mse_loss(model(x[part]), y[part])

    def worker(part: slice) -> Tensor:
        loss = loss_of(part)
        loss.backward()
        return loss

    losses = [loss_of().item()]
    for _ in range(STEPS):
        optimizer.zero_grad()
        if name == "extrap-sgd":
            optimizer.step([lambda: worker(slice(0, 8)), lambda: worker(slice(8, 16))])
        else:
            loss_of().backward()
            given = {"mean_norms": [p.grad.norm() for p in model.parameters()]} if name == "clars" else {}
            optimizer.step(**given)
        losses.append(loss_of().item())
    return losses


def main() -> None:
    check_installation()
    names = sngm.optim.names()
    for name in names:
        losses = train(name)
        assert all(map(math.isfinite, losses)), f"{name}: losses are not finite: {losses}"
        assert losses[-1] < losses[0], f"{name}: the loss rose from {losses[0]:.4g} to {losses[-1]:.4g}"
    print(f"smoke: {len(names)} methods ok (sngm {sngm.__version__}, torch {torch.__version__})")


if __name__ == "__main__":
    main()
