"""Probes give the same results on a GPU as on a CPU: noise, curvature and blocks are in float64 on both."""

import random

import pytest
import torch
from console import sngm

from sngm.models.ghost_norm import GhostBatchNorm2d
from sngm.probes import along, curvature
from sngm.training import resolve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*does not hold the official words"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _with_a_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "wikitext-2"
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for name in ("train", "valid", "test"):
        text = "\n".join(" ".join(f"w{draw.randrange(20)}" for _ in range(9)) for _ in range(60))
        (folder / f"{name}.txt").write_text(text + "\n")


@pytest.mark.parametrize(
    ("task", "given"),
    [
        ("digits", {"batch": 64, "lr": 0.1}),
        ("digits", {"batch": 64, "lr": 0.1, "bn_group": 16}),
        ("wikitext2-lstm", {"batch": 4, "lr": 0.5, "task_settings": {"width": 8, "bptt": 7, "dropout": 0.0}}),
    ],
)
def test_the_first_point_is_that_of_the_cpu(tmp_path, task, given):
    config = resolve(task, "msgd", epochs=1, precision="float32", **given)
    how = {"points": 2, "steps": 2, "samples": 64, "data_dir": tmp_path / "data"}
    here, there = (along(config, device=device, **how)["points"] for device in ("cpu", "cuda"))
    for key in ("loss", "gradient_norm", "sigma", "weight_norm"):
        assert there[0][key] == pytest.approx(here[0][key], rel=1e-9), key
    # finite differences replace second derivatives that torch lacks for a layer on this device
    assert there[0]["hessian_norm"] == pytest.approx(here[0]["hessian_norm"], rel=1e-3)
    assert there[0]["block_norms"] == pytest.approx(here[0]["block_norms"], rel=1e-9, abs=1e-12)
    assert there[1]["hessian_norm"] > 0


def test_curvature_through_ghost_batch_norm():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), GhostBatchNorm2d(4, 8), torch.nn.ReLU()).double()
    x, y = torch.randn(16, 3, 6, 6, dtype=torch.float64), torch.randn(16, 4, 6, 6, dtype=torch.float64)
    found = []
    for device in ("cpu", "cuda"):
        model, inputs, targets = net.to(device), x.to(device), y.to(device)
        loss = lambda m=model, a=inputs, b=targets: [((m(a) - b) ** 2).mean()]  # noqa: E731
        found.append(curvature(loss, list(model.parameters())).norm)
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_the_command_line_probes_on_a_gpu():
    found = sngm("probe digits --device cuda --points 2 --steps 4 --samples 64 --json")
    assert found.code == 0, found.err
    assert found.json["hardware"]["device"] == "cuda"
    assert found.json["L"] > 0
