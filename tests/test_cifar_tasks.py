"""The CIFAR-10 tasks through the command line, on small datasets; their crops, and the paper's settings."""

import json
import shlex

import pytest
import runs
import torch
from console import refused, sngm
from runs import assert_near_end, assert_same_end
from test_image_tasks import write_cifar

from sngm import tasks
from sngm.data.augment import crop_flip
from sngm.errors import Interrupted
from sngm.tasks.cifar import MEAN, STD
from sngm.training import Options, resolve, train
from sngm.training.evaluate import Part

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not hold the official records"),
    pytest.mark.usefixtures("in_one_process"),
]
NET = "train cifar10-convnet --device cpu --method sngm --lr 0.05 --batch 16 --workers 4 --data-dir {}"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_cifar(root, 10)
    return root


@pytest.mark.slow
def test_a_dry_run_shows_what_each_of_the_papers_settings_comes_to(data):
    plan = sngm(f"train cifar10-resnet20 --batch 80 --lr 0.8 --dry-run --json --device cpu --data-dir {data}").json
    config = plan["config"]
    assert plan["parameters"] == 269_722
    assert (config["epochs"], config["schedule"], config["warmup"]) == (160, "cosine", 0.0)
    assert (config["workers"], config["micro"], config["bn_group"]) == (8, 10, 10)
    assert (config["decay_on"], config["bias_lr"]) == ("all", "full")
    assert config["method_settings"]["weight_decay"] == 1e-4
    assert plan["bn_groups"]["count"] == 8
    assert plan["steps"] == 160
    assert next(iter(plan["lr_at_step"].values())) == 0.8
    assert len(plan["lr_at_step"]) == len(set(plan["lr_at_step"])) == 5
    assert {"memory", "time"} <= plan.keys()
    text = sngm(f"train cifar10-resnet20 --batch 16 --lr 0.8 --dry-run --device cpu --data-dir {data}").out
    for words in ("269722", "8 workers", "weight decay: 0.0001 on 269722 of 269722", "an epoch, from one pass of"):
        assert words in text


def test_micro_batches_are_of_at_most_128(data):
    config = tasks.find("cifar10-resnet20").usual(8192)
    assert (config["workers"], config["micro"]) == (8, 128)
    for batch, group in ((128, 16), (1024, 128), (2048, 128), (8192, 128)):
        found = resolve("cifar10-resnet20", "sngm", lr=0.1, batch=batch)
        assert (found.micro, found.bn_group) == (group, group)


@pytest.mark.parametrize("method", ["sngm", "clars", "extrap-sgd"])
def test_a_net_learns_to_tell_bright_from_dark(data, tmp_path, method):
    found = sngm(NET.format(data).replace("sngm", method) + " --epochs 3 --json")
    assert found.code == 0
    assert found.json["result"]["test_accuracy"] > 0.9


@pytest.mark.slow
def test_resnet20_trains_in_merged_passes_as_in_passes_of_a_group(data, tmp_path):
    line = f"train cifar10-resnet20 --device cpu --lr 0.1 --batch 16 --epochs 1 --precision float64 --data-dir {data}"
    assert sngm(f"{line} --out merged").code == 0
    assert sngm(f"{line} --out apart --pass-size 2").code == 0
    assert_near_end(tmp_path / "merged", tmp_path / "apart", 1e-9)


def test_a_run_stopped_in_the_middle_of_an_epoch_goes_on_to_the_same_end(data, tmp_path):
    config = resolve("cifar10-convnet", "sngm", lr=0.05, batch=16, workers=4, epochs=2)
    steps = iter(range(7))
    stop = Options(device="cpu", data_dir=data, should_stop=lambda: next(steps, None) is None)
    with pytest.raises(Interrupted, match="step 8 of 10"):
        train(config, tmp_path / "cut", stop)
    for name in ("cut", "whole"):
        train(config, tmp_path / name, Options(device="cpu", data_dir=data))
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_see_the_same_crops_as_one(data, tmp_path):
    words = [*NET.format(data).split(), "--epochs", 2, "--precision", "float64"]
    assert sngm(shlex.join(map(str, [*words, "--out", tmp_path / "1"]))).code == 0
    assert runs.ranks(2, *words, "--out", tmp_path / "2", log=tmp_path / "log") == [0, 0]
    assert_near_end(tmp_path / "2", tmp_path / "1", 1e-10)


def test_a_crop_follows_from_seed_epoch_and_sample_alone():
    images = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    indices = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    whole = crop_flip(images, indices, 5, 7)
    assert torch.equal(whole[11:13], crop_flip(images, indices[11:13], 5, 7))
    assert torch.equal(
        whole, crop_flip(images.contiguous(memory_format=torch.channels_last), indices, 5, torch.tensor(7))
    )
    assert not torch.equal(whole, crop_flip(images, indices, 6, 7))
    assert not torch.equal(whole, crop_flip(images, indices, 5, 8))


def test_crops_are_those_of_a_black_border_of_four_and_all_of_them_come():
    image = torch.randint(1, 256, (1, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(image[0], (4, 4, 4, 4))
    cut = {(t, x): padded[:, t : t + 32, x : x + 32] for t in range(9) for x in range(9)}
    places = {
        part.numpy().tobytes(): (*place, flip)
        for place, crop in cut.items()
        for flip, part in ((0, crop), (1, crop.flip(2).contiguous()))
    }
    found = crop_flip(image.expand(2000, -1, -1, -1), torch.arange(2000), 0, 0).contiguous()
    seen = [places[crop.numpy().tobytes()] for crop in found]  # KeyError unless each is one of the crops
    assert len(set(seen)) == 162
    assert 900 < sum(flip for *_, flip in seen) < 1100


def test_a_part_of_the_samples_is_cropped_as_in_the_whole(data):
    task = tasks.build("cifar10-convnet", data_dir=data)
    train = task.data().train
    part = Part(train, torch.tensor([3, 50, 20]))
    whole = task.batch(train, torch.tensor([50, 20]), seed=0, epoch=1)
    some = task.batch(part, torch.tensor([1, 2]), seed=0, epoch=1)
    assert torch.equal(whole[0], some[0])
    assert torch.equal(whole[1], some[1])


@pytest.mark.slow
def test_a_study_holds_out_images_and_runs(data, tmp_path):
    line = f"compare cifar10-convnet --methods sngm --batches 16 --lrs 0.03,0.1 --seeds 1 --epochs 1 --data-dir {data}"
    found = sngm(f"{line} --out study --json --device cpu")
    assert found.code == 0
    chosen = json.loads((tmp_path / "study" / "study.json").read_text())["cells"][0]
    assert chosen["batch"] == 16


def test_without_augmentation_images_are_as_they_are(data):
    task = tasks.build("cifar10-convnet", {"augment": False}, data_dir=data)
    train = task.data().train
    images, _ = task.batch(train, torch.tensor([5, 1]), seed=0, epoch=0)
    raw = train[torch.tensor([5, 1])][0]
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    assert torch.allclose(images, (raw / 255 - mean[:, None, None]) / std[:, None, None], atol=1e-5)


def test_missing_data_says_what_to_run(tmp_path):
    found = sngm(f"train cifar10-resnet20 --lr 0.1 --device cpu --data-dir {tmp_path}")
    refused(found, f"sngm data get cifar10 --data-dir {tmp_path}", code=3)
