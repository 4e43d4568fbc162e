"""The trainer on a GPU."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from sngm.train import Options, checkpoint, load, resolve, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
METHODS = {"msgd": 0.1, "sngm": 0.1, "lars": 30.0, "clars": 3.0, "extrap-sgd": 0.1, "adam": 0.01, "lamb": 0.03}


def command(folder, *more):
    return [
        sys.executable, "-m", "sngm", "train", "digits", "--method", "sngm", "--lr", "0.1", "--batch", "128",
        "--epochs", "30", "--deterministic", "--device", "cuda", "--checkpoint-every", "7", "--out", str(folder), *more,
    ]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_on_a_gpu(tmp_path, method):
    config = resolve("digits", method, lr=METHODS[method], batch=128, workers=4 if method == "clars" else 1)
    record = train(config, tmp_path, Options(device="cuda"))
    assert record["result"]["test_accuracy"] > 0.8
    assert record["hardware"]["device"] == "cuda"
    assert next(load(tmp_path).parameters()).device.type == "cpu"


def test_a_run_on_a_gpu_goes_as_on_the_cpu(tmp_path):
    config = resolve("digits", "sngm", lr=0.1, batch=256, epochs=3, workers=4, micro=32, precision="float64")
    on = {d: train(config, tmp_path / d, Options(device=d))["result"] for d in ("cpu", "cuda")}
    assert on["cuda"] == pytest.approx(on["cpu"], rel=1e-9)


def test_a_run_killed_on_a_gpu_ends_bit_identical_under_deterministic(tmp_path):
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    subprocess.run(command(tmp_path / "whole"), check=True, env=environment)
    for wait in (0.3, 0.6):
        process = subprocess.Popen(command(tmp_path / "broken"), env=environment)
        while not list((tmp_path / "broken").glob("checkpoint-*.pt")) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command(tmp_path / "broken"), check=True, env=environment)
    whole, broken = (checkpoint.load(tmp_path / name) for name in ("whole", "broken"))
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "broken/metrics.jsonl").read_bytes()
    torch.testing.assert_close(whole["model"], broken["model"], rtol=0, atol=0)
    torch.testing.assert_close(whole["optimizer"]["state"], broken["optimizer"]["state"], rtol=0, atol=0)
