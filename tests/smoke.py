"""Smoke test of an installed sngm, for an environment with only the wheel and its dependencies.

With --core the environment has only the optimizers, without sngm[train].
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata, resources
from pathlib import Path

import torch
from torch import Tensor, nn

import sngm

STEPS = 20
COMMAND = str(Path(sysconfig.get_path("scripts")) / "sngm")


def check_installation() -> None:
    installed = metadata.version("sngm")
    assert sngm.__version__ == installed, f"sngm.__version__ is {sngm.__version__}, the wheel is {installed}"
    here, site = Path(sngm.__file__).resolve(), Path(sysconfig.get_path("purelib")).resolve()
    assert here.is_relative_to(site), f"sngm comes from {here}, not from {site}"
    assert (resources.files("sngm") / "py.typed").is_file(), "py.typed is missing, so its types are not seen"


def train(name: str) -> list[float]:
    """Return the losses of a small regression before and after a few steps of the method."""
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


def run(*command: str, folder: str | None = None) -> str:
    """Run a command in a folder, which must succeed, and return its stdout."""
    # isolated like this script with -I: only packages of this environment
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=clean, cwd=folder)
    assert done.returncode == 0, f"{' '.join(command)} gave {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def check_core() -> None:
    """Check that the base install has no trainer, and that the command says how to install it."""
    there = [name for name in ("matplotlib", "typer", "rich", "scipy", "sklearn") if importlib.util.find_spec(name)]
    assert not there, f"the base install brought {', '.join(there)}"
    for command in ([COMMAND], [sys.executable, "-I", "-m", "sngm"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 1, done
        assert done.stdout == "", done
        assert done.stderr.count("\n") == 1, done
        assert "pip install 'sngm[train]'" in done.stderr, done
    for name in ("advise_model", "compare", "train"):
        error = None
        try:
            getattr(sngm, name)
        except ImportError as raised:
            error = raised
        assert "pip install 'sngm[train]'" in str(error), f"sngm.{name}: {error!r}"
    from sngm import theory

    assert theory.kappa(0.9) > 1


def check_command_line() -> None:
    """Check that the commands work."""
    command = COMMAND
    said = run(command, "--version").strip()
    assert said == f"sngm {sngm.__version__}", f"sngm --version says {said!r}"
    with tempfile.TemporaryDirectory() as folder:
        one = ["train", "digits", "--epochs", "1", "--batch", "256", "--method", "sngm", "--json", "--out"]
        record = json.loads(run(sys.executable, "-I", "-m", "sngm", *one, f"{folder}/run"))
        assert record["status"] == "finished", f"sngm train: the run is {record['status']}"
        tiny = "compare --epochs 1 --seeds 1 --lrs 0.1 --methods sngm --batches 256 --json --out"
        study = json.loads(run(command, *tiny.split(), f"{folder}/study"))
        assert study["cells"][0]["n"] == 1, f"sngm compare: {study}"
        assert Path(study["report"]).is_file(), "sngm compare wrote no report"
        cells = json.loads(run(command, "paper", "show", "table-2", "--json", folder=folder))["cells"]
        assert any(cell["values"] for cell in cells), "the runs of sngm paper are not in the wheel"


def main() -> None:
    check_installation()
    if "--core" in sys.argv:
        check_core()
    else:
        check_command_line()
    libraries = {"lion", "muon", "schedule-free", "signum"}  # methods of libraries that sngm does not install
    names = [name for name in sngm.optim.names() if name not in libraries]
    for name in names:
        losses = train(name)
        assert all(map(math.isfinite, losses)), f"{name}: losses are not finite: {losses}"
        assert losses[-1] < losses[0], f"{name}: the loss rose from {losses[0]:.4g} to {losses[-1]:.4g}"
    print(f"smoke: {len(names)} methods ok (sngm {sngm.__version__}, torch {torch.__version__})")


if __name__ == "__main__":
    main()
