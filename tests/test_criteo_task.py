"""DeepFM on rows made up by a known rule, through the command line."""

import pytest
import torch
from console import refused, sngm
from runs import assert_same_end, metrics
from runs import state as end_of

from sngm import tasks
from sngm.data.criteo import CriteoLike
from sngm.errors import Interrupted
from sngm.train import Options, resolve, train

LINE = "train criteo-deepfm --device cpu --data-dir data --set files=rows.tsv"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "criteo").mkdir(parents=True)
    CriteoLike(2000, seed=0, sizes=[5] * 26, strength=3.0).write(tmp_path / "data" / "criteo" / "rows.tsv")


def test_it_learns_the_rule_that_made_the_rows(tmp_path):
    found = sngm(f"{LINE} --method adam --lr 0.01 --batch 64 --epochs 6 --json --out run")
    assert found.code == 0
    assert found.json["result"]["test_auc"] > 0.75
    assert found.json["data"]["training"]["samples"] == 1280
    assert [m["validation_auc"] for m in metrics(tmp_path / "run")][-1] > 0.75


def test_of_methods_that_divide_by_the_norm_a_sum_is_a_mean(tmp_path):
    line = f"{LINE} --method sngm --lr 0.01 --batch 64 --epochs 1 --precision float64 --set weight_decay=0"
    for reduction in ("sum", "mean"):
        assert sngm(f"{line} --set reduction={reduction} --out {reduction}").code == 0
    ours, theirs = (end_of(tmp_path / name)["model"] for name in ("sum", "mean"))
    for key in ours:
        assert torch.allclose(ours[key], theirs[key], rtol=1e-9, atol=1e-12)
    losses = [metrics(tmp_path / name)[-1]["train_loss"] for name in ("sum", "mean")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)  # the mean, in both


@pytest.mark.parametrize(("method", "more"), [("msgd", ""), ("extrap-sgd", " --workers 2")])
def test_a_sum_is_a_mean_of_so_many_times_the_gradient(tmp_path, method, more):
    line = f"{LINE} --batch 64 --epochs 1 --precision float64 --set weight_decay=0{more} --method {method}"
    inner = " --set inner_lr={}" if method == "extrap-sgd" else ""
    for name, lr in (("sum", 0.001), ("mean", 0.064)):
        assert sngm(f"{line} --lr {lr}{inner.format(lr / 8)} --set reduction={name} --out {name}").code == 0
    ours, theirs = (end_of(tmp_path / name)["model"] for name in ("sum", "mean"))
    for key in ours:
        assert torch.allclose(ours[key], theirs[key], rtol=1e-9, atol=1e-12)


def test_in_a_step_of_clars_a_sum_moves_weights_as_a_mean_and_biases_as_many_times_farther(tmp_path):
    line = f"{LINE} --method clars --lr 0.001 --batch 1280 --workers 2 --epochs 1 --precision float64"
    for name in ("sum", "mean"):
        # a limit of the ratio would bind with the mean alone, whose gradients are the smaller ones
        options = f"--set weight_decay=0 --set max_ratio=1e9 --set reduction={name} --out {name}"
        assert sngm(f"{line} {options}").code == 0
    ours, theirs = (end_of(tmp_path / name)["model"] for name in ("sum", "mean"))
    for key in (f"{part}.{field}" for part in ("embeddings", "weights") for field in range(26)):
        assert torch.allclose(ours[key], theirs[key], rtol=1e-9, atol=0)
    assert torch.allclose(ours["bias"], 1280 * theirs["bias"], rtol=1e-9, atol=0)  # it began at zero


def test_a_run_stopped_goes_on_to_the_same_end(tmp_path):
    settings = {"files": "rows.tsv"}
    config = resolve("criteo-deepfm", "lamb", lr=0.01, batch=128, epochs=3, task_settings=settings)
    steps = iter(range(13))
    stop = Options(device="cpu", data_dir=tmp_path / "data", should_stop=lambda: next(steps, None) is None)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", stop)
    for name in ("cut", "whole"):
        train(config, tmp_path / name, Options(device="cpu", data_dir=tmp_path / "data"))
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("step", ["captured", "compiled", "compiled+captured"])
@pytest.mark.parametrize("method", ["sngm", "lamb", "adam"])
def test_steps_on_a_gpu_train_as_eager_ones_on_the_cpu(tmp_path, method, step):
    settings = {"files": "rows.tsv"}
    # in a graph the rate of torch's own methods is a float32, which this one is exactly
    config = resolve(
        "criteo-deepfm", method, lr=2**-7, batch=128, epochs=2, precision="float64", task_settings=settings
    )
    for device, how in (("cpu", "eager"), ("cuda", step)):
        record = train(config, tmp_path / device, Options(device=device, step=how, data_dir=tmp_path / "data"))
        assert record["timing"]["step"] == how
    ours, theirs = (end_of(tmp_path / device)["model"] for device in ("cuda", "cpu"))
    for key in ours:  # rates are float32 in a graph of torch's own optimizers
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-8, check_device=False)


def test_all_methods_have_the_papers_rates():
    task = tasks.find("criteo-deepfm")
    assert task.usual_lrs == (0.001, 0.01, 0.1)
    assert not task.lrs
    assert (task.epochs, task.batches, task.weight_decay, task.schedule) == (10, (1024, 8192), 1e-3, "constant")


def test_what_is_wrong_is_said(tmp_path):
    refused(sngm("train criteo-deepfm --lr 0.1 --device cpu --data-dir data"), "dac_sample_80k.tsv", code=3)
    refused(sngm(f"{LINE} --lr 0.1 --set reduction=max"), "reduction must be one of sum, mean")
    refused(sngm("data check criteo --data-dir data"), "dac_sample_80k.tsv", code=3)


def test_the_data_verb_looks_and_checks(tmp_path):
    (tmp_path / "data" / "criteo" / "rows.tsv").rename(tmp_path / "data" / "criteo" / "dac_sample_80k.tsv")
    listed = {entry["task"]: entry for entry in sngm("data --data-dir data --json").json}
    assert listed["criteo-deepfm"]["ready"]
    assert not (tmp_path / "data" / "criteo" / ".sngm").exists()  # looked at, not converted
    found = sngm("data check criteo --data-dir data --json")
    assert found.code == 0
    assert found.json[0]["seen"].startswith("2,000 rows, 0 malformed")
