"""Tiny-ImageNet: decoding, the folder of decoded images, and the task, on small datasets made here."""

import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from console import finish, refused, sngm
from interpreter import on_devices
from runs import assert_same_end
from torch import nn
from waiting import launch, next_line

from sngm import load_run, tasks
from sngm.data import augment, conversion, tiny_imagenet
from sngm.data.tiny_imagenet import SIDE, load_tiny_imagenet
from sngm.errors import DataMissing, Failed, Interrupted, UsageError
from sngm.models.ghost_norm import GhostBatchNorm2d
from sngm.models.resnet import resnet50
from sngm.tasks import tiny_imagenet as tiny_task
from sngm.tasks.imagenet import MEAN, STD
from sngm.training import Options, resolve, train
from sngm.training.evaluate import Part

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore:.*does not hold the official records")
device = on_devices("sngm.data.augment_kernel")

IDS = ("n03", "n01", "n02")  # as in the official wnids.txt, not sorted
GREY = "train/n02/images/n02_1.JPEG"
FOLDER = Path("data/tiny-imagenet-200")
VAL = [(f"val_{i}.JPEG", IDS[i % 3]) for i in (3, 0, 10, 5, 2, 1)]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SNGM_DATA", raising=False)
    write()


def write(folder=FOLDER):
    """Write the official layout: three classes with four training images each, one of them grey, and six to test."""
    draws = np.random.default_rng(0)
    for name in [f"train/{c}/images/{c}_{i}.JPEG" for c in IDS for i in range(4)] + [f"val/images/{n}" for n, _ in VAL]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (SIDE, SIDE) if name == GREY else (SIDE, SIDE, 3)
        Image.fromarray(draws.integers(0, 256, shape, dtype=np.uint8)).save(path, quality=80)
    (folder / "wnids.txt").write_text("\n".join(IDS))
    (folder / "val/val_annotations.txt").write_text("".join(f"{n}\t{c}\t0\t32\t44\t62\n" for n, c in VAL))


def load(root="data", show=lambda text: None):
    return load_tiny_imagenet(Path(root), show)


def everything(found):
    return [t.tolist() for samples in (found.train, found.val) for t in samples.tensors]


def pixels(name):
    with Image.open(FOLDER / name) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def never(*_):
    raise AssertionError("decoded again")


# ---------------------------------------------------------------- decoding


def test_images_are_pillows_pixels_with_the_labels_of_their_classes():
    found = load()
    assert found.classes == ["n01", "n02", "n03"]
    images, labels = found.train.tensors
    assert (images.dtype, images.shape, labels.dtype) == (torch.uint8, (12, 3, SIDE, SIDE), torch.int64)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    names = [f"train/{c}/images/{c}_{i}.JPEG" for c in found.classes for i in range(4)]
    assert torch.equal(images, torch.stack([pixels(name) for name in names]))
    grey = images[names.index(GREY)]
    assert torch.equal(grey[0], grey[1])
    assert torch.equal(grey[0], grey[2])
    images, labels = found.val.tensors
    assert labels.tolist() == [found.classes.index(name) for _, name in VAL]
    assert torch.equal(images, torch.stack([pixels(f"val/images/{name}") for name, _ in VAL]))


def test_images_are_decoded_once_and_again_when_a_file_changes(monkeypatch):
    wanted = everything(load())
    with monkeypatch.context() as patch:
        patch.setattr(tiny_imagenet, "_pixels", never)
        assert everything(load()) == wanted
        assert everything(load(FOLDER)) == wanted, "the folder itself may be named"
    shutil.copy(FOLDER / GREY, FOLDER / "train/n01/images/n01_0.JPEG")
    assert everything(load()) != wanted


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "images.npy").write_bytes((folder / "images.npy").read_bytes()[:-1]),
        lambda folder: (folder / "labels.npy").unlink(),
        lambda folder: (folder / "facts.json").write_text('{"arrays": {'),
        lambda folder: (folder / "facts.json").write_text("[]"),
        lambda folder: (folder / "facts.json").unlink(),
        shutil.rmtree,
    ],
)
def test_an_incomplete_decoded_form_is_made_again(damage):
    first = load()
    wanted = everything(first)
    damage(first.folder)
    assert everything(load()) == wanted
    assert conversion.verify(first.folder) == []


def test_an_interrupted_decode_leaves_nothing_and_is_done_again(monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tiny_imagenet, "flushed", stop)
        with pytest.raises(KeyboardInterrupt):
            load()
    assert [path for path in (FOLDER / ".sngm").iterdir() if path.is_dir()] == []
    assert len(load().train) == 12


def test_a_read_only_dataset_is_decoded_into_the_cache(tmp_path, monkeypatch):
    (FOLDER / ".sngm").write_text("")  # so that not even root can create a folder here
    found = load()
    assert found.folder.is_relative_to(tmp_path / "home/.cache/sngm/tiny-imagenet")
    monkeypatch.setattr(tiny_imagenet, "_pixels", never)
    assert everything(load()) == everything(found)
    monkeypatch.setattr(conversion, "writable", lambda folder, name: False)
    assert load().folder == found.folder, "decoded by another user"
    shutil.rmtree(tmp_path / "home")
    with pytest.raises(Failed, match=r"neither .* is writable, and tiny-imagenet must be converted"):
        load()


def test_a_full_disk_is_an_error_that_says_how_much_space_it_takes(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny_imagenet, "flushed", full)
    with pytest.raises(Failed, match=r"no space left for .*about 1\.4 GB"):
        load()


SLOWLY = """
import time
from pathlib import Path
from sngm.data import tiny_imagenet
decode = tiny_imagenet._decode
def slow(*arguments):
    print("decoding", flush=True)
    while not Path("go").exists():
        time.sleep(0.01)
    return decode(*arguments)
tiny_imagenet._decode = slow
found = tiny_imagenet.load_tiny_imagenet(Path("data"))
print(len(found.train), found.folder.stat().st_ino)
"""


@pytest.mark.slow
def test_of_two_processes_one_decodes_and_a_killed_one_leaves_no_decoded_form():
    command = [sys.executable, "-W", "ignore", "-c", SLOWLY]
    killed = launch(command)
    assert next_line(killed.stdout) == "decoding\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    first = launch(command)
    assert next_line(first.stdout) == "decoding\n"
    second = launch(command)
    assert "tiny-imagenet: another process is converting the data" in next_line(second.stderr)
    Path("go").touch()
    shown = [finish(process) for process in (first, second)]
    assert [result.code for result in shown] == [0, 0], shown
    assert shown[0].out == shown[1].out, "the same folder, and only the first has decoded"
    assert [path.suffix for path in (FOLDER / ".sngm").iterdir() if path.is_dir()] == [""]


# ---------------------------------------------------------------- errors


def truncate(path):
    path.write_bytes(path.read_bytes()[:700])


def without_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


@pytest.mark.parametrize(
    ("path", "damage", "told"),
    [
        ("train/n03/images/n03_2.JPEG", truncate, r"n03_2\.JPEG cannot be decoded: .*truncated"),
        ("val/images/val_5.JPEG", lambda path: path.write_bytes(b"<html>"), r"val_5\.JPEG cannot be decoded"),
        (
            "val/images/val_5.JPEG",
            lambda path: Image.new("RGB", (SIDE, 40)).save(path),
            r"val_5\.JPEG cannot be decoded: it has 64 x 40 pixels, not 64 x 64",
        ),
        ("train/n02", shutil.rmtree, r"train lacks n02, listed in wnids\.txt"),
        ("train/n02/images/n02_0.JPEG", lambda path: [p.unlink() for p in path.parent.iterdir()], "holds no .JPEG"),
        ("val/images/val_10.JPEG", Path.unlink, r"images lacks val_10\.JPEG, listed in val_annotations\.txt"),
        ("val/val_annotations.txt", without_line, r"val_annotations\.txt lacks the class of val_3\.JPEG"),
        ("wnids.txt", without_line, r"val_3\.JPEG is of class 'n03', which wnids\.txt does not list"),
        ("val/val_annotations.txt", lambda path: path.write_text("zzz"), "zzz is of class '', which wnids"),
        ("wnids.txt", lambda path: path.write_text(""), r"wnids\.txt lists no classes"),
        ("val/val_annotations.txt", Path.unlink, r"tiny-imagenet-200 lacks val/val_annotations\.txt"),
    ],
)
def test_an_error_names_the_file(path, damage, told):
    damage(FOLDER / path)
    with pytest.raises(DataMissing, match=told):
        load()


def test_files_that_change_while_they_are_decoded_are_not_loaded(monkeypatch):
    def pixels(*arguments):
        image = FOLDER / "val" / "images" / "val_3.JPEG"
        image.write_bytes(image.read_bytes() + b"0")
        return decode(*arguments)

    decode = tiny_imagenet._pixels
    monkeypatch.setattr(tiny_imagenet, "_pixels", pixels)
    with pytest.raises(Failed, match="changed while it was read"):
        load()


def test_facts_that_are_damaged_are_made_again():
    facts = load().folder / "facts.json"
    for damaged in ("{}", "[]", '{"arrays": []}', '{"arrays": {}}'):
        facts.write_text(damaged)
        assert len(load().train) == 12


def test_without_pillow_it_says_what_to_install(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "PIL", None)
        with pytest.raises(UsageError, match=r"Pillow is not installed; pip install 'sngm\[images\]'"):
            load()
        refused(sngm("data check --data-dir data"), "pip install 'sngm[images]'", code=3)
    wanted = everything(load())
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert everything(load()) == wanted, "decoded images need no Pillow"


def test_the_commands_for_data_support_it(monkeypatch):
    ready = "tiny-imagenet-resnet50: ready, in data/tiny-imagenet-200\n"
    assert ready in sngm("data --data-dir data").out
    refused(sngm("data check tiny-imagenet --data-dir elsewhere"), "put tiny-imagenet-200 (unpacked from", code=3)
    shown = sngm("data check tiny-imagenet --data-dir data")
    assert "train 12, not 100,000; val 6, not 10,000; classes 3, not 200" in shown.err
    monkeypatch.setattr(tiny_imagenet, "CLASSES", 3)
    monkeypatch.setattr(tiny_imagenet, "OFFICIAL", {"train": 12, "val": 6})
    shown = sngm("data check --data-dir data")
    assert (shown.code, "18 images, each class equally often" in shown.out) == (0, True), shown
    folder = load().folder
    content = bytearray((folder / "images.npy").read_bytes())
    content[-1] ^= 1
    (folder / "images.npy").write_bytes(content)
    refused(sngm("data check --data-dir data"), "images.npy has the SHA256", "delete", code=3)
    (FOLDER / "train/n01/images/n01_0.JPEG").rename(FOLDER / "train/n02/images/n02_9.JPEG")
    assert "train: class n01 occurs 3 times and class n02 5 times" in sngm("data check --data-dir data").err


# ---------------------------------------------------------------- the task


def task_of(**settings):
    return tasks.build("tiny-imagenet-resnet50", settings, Path("data"))


def as_bytes(images):
    """Undo the normalisation."""
    mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images.float().cpu() * std + mean).round().to(torch.uint8)


def test_kernels_make_the_images_of_the_cpu(device, monkeypatch):
    task = task_of()
    samples, indices = task.data().train, torch.tensor([3, 11, 0, 7, 7])
    there = samples.to(device)
    assert there.tensors[0].is_contiguous(memory_format=torch.channels_last)
    for seed, epoch in ((0, 0), (7, 29), (2**40, 3)):
        wanted, labels = task.batch(samples, indices, seed=seed, epoch=epoch)
        with monkeypatch.context() as patch:
            patch.setattr(augment, "crop_flip", never)  # the kernel must be used
            now = torch.tensor(epoch, device=device)
            found, same = task.batch(there, indices.to(device), seed=seed, epoch=now)
        assert torch.equal(as_bytes(found), as_bytes(wanted))
        assert torch.equal(as_bytes(wanted), augment.crop_flip(samples.tensors[0], indices, seed, epoch, 8))
        assert same.tolist() == labels.tolist() == [0, 2, 0, 1, 1]


def test_crops_are_those_of_a_black_border_of_eight_pixels():
    task = task_of()
    samples = task.data().train
    border = torch.nn.functional.pad(samples.tensors[0][5], (8, 8, 8, 8))
    crops = {}
    for top in range(17):
        for left in range(17):
            crop = border[:, top : top + SIDE, left : left + SIDE].contiguous()
            crops |= {crop.numpy().tobytes(): (top, left, 0), crop.flip(2).numpy().tobytes(): (top, left, 1)}
    found = [task.batch(samples, torch.tensor([5]), seed=0, epoch=epoch)[0] for epoch in range(200)]
    seen = [crops[as_bytes(images)[0].contiguous().numpy().tobytes()] for images in found]  # KeyError for any other
    assert [len(set(values)) for values in zip(*seen, strict=True)] == [17, 17, 2]
    part = Part(samples, torch.tensor([9, 5]))
    assert torch.equal(task.batch(part, torch.tensor([1]), seed=0, epoch=199)[0], found[-1])
    images, _ = task_of(augment=False).batch(samples, torch.tensor([5]), seed=0, epoch=0)
    assert torch.equal(as_bytes(images)[0], samples.tensors[0][5])


def test_training_and_evaluation_give_the_model_the_same_values():
    task = task_of(augment=False)
    samples = task.data().train
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, x):
            seen.append(x)
            return torch.zeros(len(x), 200)

    scores = task.scores(Model(1, 1), samples[torch.arange(3)])
    task.loss(Model(1, 1), task.batch(samples, torch.arange(3), seed=0, epoch=0))
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-6, atol=1e-6)
    assert scores.keys() == {"loss", "accuracy", "top5"}


@pytest.mark.parametrize(
    ("stem", "pixels", "parameters"), [("7x7", 2, 23_917_832), ("3x3-pool", 4, 23_910_152), ("3x3", 8, 23_910_152)]
)
def test_a_stem_leaves_feature_maps_of_its_size(stem, pixels, parameters):
    shapes = []
    with torch.device("meta"), torch.no_grad():
        model = resnet50(200, stem).eval()
        assert sum(p.numel() for p in model.parameters()) == parameters
        model.layer4.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
        assert model(torch.zeros(1, 3, SIDE, SIDE)).shape == (1, 200)
    assert shapes == [(1, 2048, pixels, pixels)]


def test_defaults_are_those_of_imagenet_but_for_the_length():
    large, small = (resolve("tiny-imagenet-resnet50", "sngm", lr=1.0, batch=batch) for batch in (16384, 256))
    assert (large.epochs, large.schedule, large.decay_on, large.bias_lr) == (10, "polynomial", "weights", "full")
    assert (large.bn_group, small.bn_group, large.workers) == (128, 32, 8)
    assert large.warmup == small.warmup == 2
    refused(sngm("train tiny-imagenet-resnet50 --data-dir data --set stem=5x5"), "stem", "7x7, 3x3-pool, 3x3")
    assert task_of(stem="7x7").settings() == {"stem": "7x7", "smoothing": 0.1, "augment": True}


@pytest.mark.slow
def test_resnet50_takes_two_steps():
    shown = sngm(
        "train tiny-imagenet-resnet50 --device cpu --data-dir data --set stem=7x7 --batch 6 --workers 1 --epochs 1 "
        "--lr 0.5 --out run --json"
    )
    assert shown.code == 0, shown.err
    result = shown.json["result"]
    assert result.keys() == {"train_loss", "test_loss", "test_accuracy", "test_top5"}
    assert 0 < result["train_loss"] < 20


def small_net(classes, stem):
    layers = nn.Conv2d(3, 8, 8, stride=8), GhostBatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, classes)
    return nn.Sequential(*layers)


def test_a_run_stopped_between_its_steps_resumes_to_the_same_end(monkeypatch):
    monkeypatch.setattr(tiny_task, "resnet50", small_net)
    config = resolve("tiny-imagenet-resnet50", "sngm", lr=0.5, batch=4, workers=2, epochs=2)
    steps = iter(range(3))
    stop = Options(device="cpu", data_dir=Path("data"), should_stop=lambda: next(steps, None) is None)
    with pytest.raises(Interrupted, match="step 4 of 6"):
        train(config, Path("cut"), stop)
    for name in ("cut", "whole"):
        record = train(config, Path(name), Options(device="cpu", data_dir=Path("data")))
    assert_same_end(Path("cut"), Path("whole"))
    assert record["data"]["test"]["samples"] == 6


def test_a_vit_is_pretrained_and_becomes_the_start_of_a_fine_tuning():
    pytest.importorskip("transformers")
    shown = sngm(
        "train tiny-imagenet-vit --method adamw --device cpu --data-dir data --batch 6 --epochs 1 --lr 0.01 --out run "
        "--set width=16 --set depth=1 --set heads=2 --set patch=16"
    )
    assert shown.code == 0, shown.err
    pretrained = load_run("run").model
    pretrained.network.save_pretrained("data/small-vit")
    tuned = tasks.build("cifar10-vit", {"model": "small-vit", "size": 64}, Path("data")).model()
    assert tuned.network.classifier.out_features == 10
    pixels = torch.rand(2, 3, SIDE, SIDE)
    assert torch.equal(tuned.network.vit(pixels)[0], pretrained.network.vit(pixels)[0])
    refused(sngm("train tiny-imagenet-vit --data-dir data --set heads=5"), "width must be a multiple of heads")


def test_the_pixels_of_a_vit_are_the_images_divided_by_255():
    task = tasks.build("tiny-imagenet-vit", {}, Path("data"))
    samples, model = task.data().train, nn.Linear(1, 1)
    images = samples.tensors[0][:3]
    augmented, _ = task.batch(samples, torch.arange(3), seed=0, epoch=0)
    assert torch.equal(
        (255 * augmented).round().to(torch.uint8), augment.crop_flip(samples.tensors[0], torch.arange(3), 0, 0, 8)
    )
    assert torch.equal(task._inputs(model, (images,)), images / 255)
    assert torch.equal(task._inputs(model, (augmented,)), augmented)
