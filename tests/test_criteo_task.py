"""DeepFM on synthetic rows of a known model, through the command line."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from console import refused, sngm
from criteo_synthetic import CriteoLike
from runs import assert_same_end, metrics
from runs import state as end_of

from sngm import tasks
from sngm.data.criteo import load_criteo
from sngm.errors import Interrupted
from sngm.training import Options, resolve, train

LINE = "train criteo-deepfm --device cpu --data-dir data --set files=rows.tsv"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return a data folder with 2,000 rows, converted already."""
    data = tmp_path_factory.mktemp("data")
    (data / "criteo").mkdir()
    CriteoLike(2000, seed=0, sizes=[5] * 26, strength=3.0).write(data / "criteo" / "rows.tsv")
    load_criteo(data, ["rows.tsv"])
    return data


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(converted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(converted, tmp_path / "data")


def test_it_learns_the_rule_that_made_the_rows(tmp_path):
    found = sngm(f"{LINE} --method adam --lr 0.02 --batch 64 --epochs 3 --json --out run")
    assert found.code == 0
    assert found.json["result"]["test_auc"] > 0.75
    assert found.json["data"]["training"]["samples"] == 1280
    assert [m["validation_auc"] for m in metrics(tmp_path / "run")][-1] > 0.75


def test_it_learns_with_a_log_scale_and_larger_weights_too(tmp_path):
    line = f"{LINE} --method sngm --lr 0.03 --batch 64 --epochs 3 --set integers=log --set init=he --json --out run"
    found = sngm(line)
    assert found.code == 0
    assert found.json["result"]["test_auc"] > 0.75
    assert found.json["config"]["task_settings"] == {"files": "rows.tsv", "integers": "log", "init": "he"}
    other = sngm(line.replace("integers=log", "integers=minmax"))
    assert (other.code, "task_settings.integers: log there, minmax here" in other.err) == (2, True)


def test_on_a_log_scale_counts_lie_between_the_least_and_the_greatest_of_training_rows(tmp_path):
    made = [[-2, 0, 7], [10**6, 0, 7], [3, 5, 7], [0, 0, 7], [-9, 10**9, 8]]
    rows = made * 400
    text = ["\t".join(map(str, [i % 2, *row, *[0] * 10, *["ab"] * 26])) for i, row in enumerate(rows)]
    (tmp_path / "data" / "criteo" / "counts.tsv").write_text("\n".join(text) + "\n")
    task = tasks.build("criteo-deepfm", {"files": "counts.tsv", "integers": "log"}, tmp_path / "data")
    seen = []
    model = task.model().double()
    model.linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    dense, categories, _ = task.data().train.tensors
    model(dense.double(), categories)
    least, most = (-9, 0, 7), (10**6, 10**9, 8)
    wanted = {
        tuple(
            round(math.log1p(x - low) / math.log1p(high - low), 5)
            for x, low, high in zip(row, least, most, strict=True)
        )
        for row in made
    }
    assert {tuple(round(x, 5) for x in row[:3]) for row in seen[0].tolist()} == wanted
    assert not seen[0][:, 3:].any()  # constant columns
    model(torch.full((1, 13), -0.1).double(), categories[:1])  # below the fitted range
    assert not seen[1].any()


def test_weights_of_the_perceptron_begin_small_or_as_he_has_it(tmp_path):
    for init, wanted in (("small", 1e-4), ("he", (2 / (26 * 4 + 13)) ** 0.5)):
        torch.manual_seed(0)
        model = tasks.build("criteo-deepfm", {"files": "rows.tsv", "init": init}, Path("data")).model()
        assert model.dnn[0].weight.std().item() == pytest.approx(wanted, rel=0.05)
        assert model.embeddings[0].abs().max() < 1e-3


def test_a_decay_of_the_embeddings_alone_is_part_of_the_mean_loss(tmp_path):
    grads = {}
    for decay in (0.0, 0.25):
        task = tasks.build("criteo-deepfm", {"files": "rows.tsv", "embedding_l2": decay}, tmp_path / "data")
        torch.manual_seed(0)
        model = task.model().double()
        dense, categories, labels = (part[:64] for part in task.data().train.tensors)
        task.loss(model, (dense.double(), categories, labels)).backward()
        grads[decay] = {name: p.grad.clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        wanted = grads[0.0][name] + (0.25 * parameter.detach() if name.startswith("embeddings") else 0.0)
        torch.testing.assert_close(grads[0.25][name], wanted, rtol=1e-12, atol=1e-15)
    refused(sngm(f"{LINE} --lr 0.1 --set embedding_l2=-1"), "embedding_l2 must be a finite number >= 0, got -1")


def test_of_methods_that_divide_by_the_norm_a_sum_is_a_mean(tmp_path):
    line = f"{LINE} --method sngm --lr 0.01 --batch 256 --epochs 1 --precision float64 --set weight_decay=0"
    for reduction in ("sum", "mean"):
        assert sngm(f"{line} --set reduction={reduction} --out {reduction}").code == 0
    ours, theirs = (end_of(tmp_path / name)["model"] for name in ("sum", "mean"))
    for key in ours:
        assert torch.allclose(ours[key], theirs[key], rtol=1e-9, atol=1e-12)
    losses = [metrics(tmp_path / name)[-1]["train_loss"] for name in ("sum", "mean")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)  # the mean is reported in both


@pytest.mark.parametrize(("method", "more"), [("msgd", ""), ("extrap-sgd", " --workers 2")])
def test_a_sum_is_a_mean_of_so_many_times_the_gradient(tmp_path, method, more):
    line = f"{LINE} --batch 256 --epochs 1 --precision float64 --set weight_decay=0{more} --method {method}"
    inner = " --set inner_lr={}" if method == "extrap-sgd" else ""
    for name, lr in (("sum", 0.001), ("mean", 0.256)):
        assert sngm(f"{line} --lr {lr}{inner.format(lr / 8)} --set reduction={name} --out {name}").code == 0
    ours, theirs = (end_of(tmp_path / name)["model"] for name in ("sum", "mean"))
    for key in ours:
        assert torch.allclose(ours[key], theirs[key], rtol=1e-9, atol=1e-12)


def test_in_a_step_of_clars_a_sum_moves_weights_as_a_mean_and_biases_as_many_times_farther(tmp_path):
    line = f"{LINE} --method clars --lr 0.001 --batch 1280 --workers 2 --epochs 1 --precision float64"
    for name in ("sum", "mean"):
        # max_ratio would limit only the mean, whose gradients are smaller
        options = f"--set weight_decay=0 --set max_ratio=1e9 --set reduction={name} --out {name}"
        assert sngm(f"{line} {options}").code == 0
    ours, theirs = (end_of(tmp_path / name)["model"] for name in ("sum", "mean"))
    for key in (f"{part}.{field}" for part in ("embeddings", "weights") for field in range(26)):
        assert torch.allclose(ours[key], theirs[key], rtol=1e-9, atol=0)
    assert torch.allclose(ours["bias"], 1280 * theirs["bias"], rtol=1e-9, atol=0)  # it starts at zero


@pytest.mark.parametrize("more", [{}, {"integers": "log", "init": "he"}])
def test_a_run_stopped_goes_on_to_the_same_end(tmp_path, more):
    settings = {"files": "rows.tsv", **more}
    config = resolve("criteo-deepfm", "lamb", lr=0.01, batch=256, epochs=2, task_settings=settings)
    steps = iter(range(6))
    stop = Options(device="cpu", data_dir=tmp_path / "data", should_stop=lambda: next(steps, None) is None)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", stop)
    for name in ("cut", "whole"):
        train(config, tmp_path / name, Options(device="cpu", data_dir=tmp_path / "data"))
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # warnings of the compiler
@pytest.mark.parametrize("step", ["captured", "compiled", "compiled+captured"])
@pytest.mark.parametrize("method", ["sngm", "lamb", "adam"])
def test_steps_on_a_gpu_train_as_eager_ones_on_the_cpu(tmp_path, method, step):
    settings = {"files": "rows.tsv"}
    # in a CUDA graph torch's own methods use a float32 learning rate; this one is exact in float32
    config = resolve(
        "criteo-deepfm", method, lr=2**-7, batch=128, epochs=2, precision="float64", task_settings=settings
    )
    for device, how in (("cpu", "eager"), ("cuda", step)):
        record = train(config, tmp_path / device, Options(device=device, step=how, data_dir=tmp_path / "data"))
        assert record["timing"]["step"] == how
    ours, theirs = (end_of(tmp_path / device)["model"] for device in ("cuda", "cpu"))
    for key in ours:  # in a CUDA graph torch's own optimizers use float32 learning rates
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-8, check_device=False)


def test_all_methods_have_the_papers_rates():
    task = tasks.find("criteo-deepfm")
    assert task.usual_lrs == (0.001, 0.01, 0.1)
    assert not task.lrs
    assert (task.epochs, task.batches, task.weight_decay, task.schedule) == (10, (1024, 8192), 1e-3, "constant")


def test_what_is_wrong_is_said(tmp_path):
    refused(sngm("train criteo-deepfm --lr 0.1 --device cpu --data-dir data"), "dac_sample_80k.tsv", code=3)
    refused(sngm(f"{LINE} --lr 0.1 --set reduction=max"), "reduction must be one of sum, mean")
    refused(sngm(f"{LINE} --lr 0.1 --set integers=LOG"), "integers must be one of minmax, log, got 'LOG'")
    refused(sngm(f"{LINE} --lr 0.1 --set integers="), "integers")
    refused(sngm(f"{LINE} --lr 0.1 --set integers=1"), "integers must be of type str")
    refused(sngm(f"{LINE} --lr 0.1 --set init=xavier"), "init must be one of small, he, got 'xavier'")
    refused(sngm("data check criteo --data-dir data"), "dac_sample_80k.tsv", code=3)


def test_the_data_verb_looks_and_checks(tmp_path):
    (tmp_path / "data" / "criteo" / "rows.tsv").rename(tmp_path / "data" / "criteo" / "dac_sample_80k.tsv")
    shutil.rmtree(tmp_path / "data" / "criteo" / ".sngm")
    listed = {entry["task"]: entry for entry in sngm("data --data-dir data --json").json}
    assert listed["criteo-deepfm"]["ready"]
    assert not (tmp_path / "data" / "criteo" / ".sngm").exists()  # validated, not converted
    found = sngm("data check criteo --data-dir data --json")
    assert found.code == 0
    assert found.json[0]["seen"].startswith("2,000 rows, 0 malformed")
