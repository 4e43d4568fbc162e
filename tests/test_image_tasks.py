"""ImageNet and ViT tasks: trained end to end on small generated datasets; crops compared with torch's own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from console import refused, sngm
from runs import metrics
from torch.nn.functional import interpolate, log_softmax

from sngm import tasks
from sngm.data.hashing import random_bits
from sngm.data.imagenet import ImageFolder
from sngm.tasks.vit import RATIO, SCALE, SIDE, crop_sizes, random_boxes, resized, whole

CPU = torch.device("cpu")
IMAGENET = "train imagenet-resnet50 --device cpu --data-dir {} --set size=32 --set resize=36"
SMALL_VIT = "--workers 1 --batch 16 --epochs 2 --device cpu"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not hold the official records"),
    pytest.mark.usefixtures("in_one_process"),
]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Write a folder like ImageNet's: three classes of different colours, eight training and two test images each."""
    image = pytest.importorskip("PIL.Image")
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2)):
        for label in range(3):
            folder = root / "imagenet" / split / f"n0{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 100, (40, 48, 3), dtype=np.uint8)
                pixels[..., label] += 150
                image.fromarray(pixels).save(folder / f"{i}.JPEG")
    return root


def write_cifar(root: Path, classes: int, count: int = 16) -> None:
    """Write CIFAR's binary format with `count` records per file; an image's label is its brightness."""
    random = np.random.default_rng(0)
    if classes == 10:
        folder, names = "cifar-10-batches-bin", [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    else:
        folder, names = "cifar-100-binary", ["train.bin", "test.bin"]
    (root / folder).mkdir(parents=True)
    for name in names:
        labels = np.arange(count) % 2
        pixels = (random.integers(0, 100, (count, 3 * SIDE**2)) + 150 * labels[:, None]).astype(np.uint8)
        heads = [labels.astype(np.uint8)] if classes == 10 else [np.zeros(count, np.uint8), labels.astype(np.uint8)]
        (root / folder / name).write_bytes(np.concatenate([np.stack(heads, 1), pixels], 1).tobytes())


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    root = tmp_path_factory.mktemp("cifar")
    write_cifar(root, 10)
    write_cifar(root, 100, 32)
    return root


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a folder with a small ViT for 32 x 32 images."""
    vit = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = vit.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
    )
    folder = tmp_path_factory.mktemp("vit")
    vit.ViTForImageClassification(config).save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- ImageNet


@pytest.mark.slow
def test_resnet50_trains_on_folders_of_pictures(pictures):
    line = IMAGENET.format(pictures) + " --set classes=3 --batch 12 --workers 1 --micro 6 --epochs 1 --lr 0.1 --out run"
    shown = sngm(f"{line} --json")
    assert shown.code == 0, shown.err
    result = shown.json["result"]
    assert result.keys() == {"train_loss", "test_loss", "test_accuracy", "test_top5"}
    assert result["test_top5"] == 1.0  # there are only three classes
    assert 0 < result["train_loss"] < 10


def imagenet(root: Path, **settings):
    return tasks.build("imagenet-resnet50", {"size": 32, "resize": 36, "classes": 3, **settings}, root)


def test_training_pictures_are_augmented_by_seed_epoch_and_sample(pictures):
    task = imagenet(pictures)
    train = task.data().train
    some = torch.tensor([5, 17, 2])
    images, labels = task.batch(train, some, seed=1, epoch=2)
    assert (images.dtype, tuple(images.shape), labels.tolist()) == (torch.uint8, (3, 3, 32, 32), [0, 2, 0])
    again, _ = task.batch(train, some[1:], seed=1, epoch=2)
    assert torch.equal(again, images[1:])
    other, _ = task.batch(train, some, seed=1, epoch=3)
    assert not torch.equal(other, images)


def test_a_part_of_the_pictures_is_augmented_as_the_whole_is(pictures):
    from sngm.training.evaluate import Part

    task = imagenet(pictures)
    train = task.data().train
    part = Part(train, torch.tensor([9, 3, 4]))
    found, _ = task.batch(part, torch.tensor([2, 0]), seed=0, epoch=0)
    wanted, _ = train.training(torch.tensor([4, 9]), 0, 0)
    assert torch.equal(found, wanted)


def test_pictures_are_scaled_where_the_model_is(pictures):
    task = imagenet(pictures)
    images, labels = ImageFolder(pictures, "val", size=32, resize=36)[torch.arange(4)]
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, x):
            seen.append(x)
            return torch.eye(3, dtype=x.dtype)[labels]

    model = Model(1, 1).double()
    scores = task.scores(model, (images, labels))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    wanted = (images.double() / 255 - mean.double().view(3, 1, 1)) / std.double().view(3, 1, 1)
    torch.testing.assert_close(seen[0], wanted, rtol=1e-6, atol=1e-6)
    assert scores["accuracy"].all()
    assert scores["loss"].shape == (4,)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_smoothing_shares_it_among_the_other_classes(smoothing):
    task = tasks.build("imagenet-resnet50", {"smoothing": smoothing, "classes": 4})
    outputs, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 3, 0])

    class Model(torch.nn.Linear):
        def forward(self, x):
            return outputs

    targets = torch.full((6, 4), smoothing / 3, dtype=torch.float64)
    targets[torch.arange(6), labels] = 1 - smoothing
    wanted = -(targets * log_softmax(outputs, 1)).sum(1).mean()
    found = task.loss(Model(1, 1).double(), (torch.zeros(6, 3, 1, 1, dtype=torch.uint8), labels))
    torch.testing.assert_close(found, wanted)


def test_the_warm_up_is_that_of_the_batch():
    usual = tasks.find("imagenet-resnet50").usual
    assert [usual(batch)["warmup"] for batch in (512, 1024, 4096, 8192, 16384, 32768)] == [
        10 / 2**6, 10 / 2**5, 10 / 2**3, 10 / 2**2, 5, 14
    ]  # fmt: skip


def test_a_folder_without_pictures_is_missing_data(tmp_path):
    refused(sngm(IMAGENET.format(tmp_path) + " --batch 8 --workers 1"), "ImageNet", str(tmp_path), code=3)


def test_another_number_of_classes_is_refused(pictures):
    line = IMAGENET.format(pictures) + " --batch 8 --workers 1"
    refused(sngm(line), "holds 3 classes, not 1000", "--set classes=3", code=3)
    refused(sngm(f"{line} --set classes=5"), "holds 3 classes, not 5", code=3)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("size=64", "size"),
        ("size=0", "size"),
        ("smoothing=0.9", "smoothing"),
        ("smoothing=-0.1", "smoothing"),
        ("classes=1", "classes"),
        ("depth=101", "depth"),
    ],
)
def test_settings_that_cannot_be_are_refused(pictures, setting, told):
    refused(sngm(IMAGENET.format(pictures) + f" --batch 8 --workers 1 --set {setting}"), told)


# ---------------------------------------------------------------- ViT


@pytest.mark.parametrize(("name", "augment"), [("cifar10-vit", "resized-crop"), ("cifar100-vit", "flip")])
def test_a_vit_is_fine_tuned(name, augment, tiny, cifar):
    settings = f"--set model={tiny} --set size=32 --set augment={augment} --method adam --lr 0.01"
    batch = SMALL_VIT if name == "cifar10-vit" else SMALL_VIT.replace("--batch 16", "--batch 8")
    shown = sngm(f"train {name} --data-dir {cifar} {settings} {batch} --out run --json")
    assert shown.code == 0, shown.err
    first, second = [line["train_loss"] for line in metrics(Path("run"))]
    assert second < first < 1.1 * np.log(100 if "100" in name else 10)
    assert shown.json["config"]["task_settings"]["model"] == str(tiny)
    assert shown.json["config"]["schedule"] == "linear"


def test_a_fine_tuned_vit_is_scored_again(tiny, cifar):
    line = f"train cifar10-vit --data-dir {cifar} --set model={tiny} --set size=32 {SMALL_VIT} --lr 0.03 --out run"
    trained = sngm(f"{line} --json")
    assert trained.code == 0, trained.err
    again = sngm(f"eval run --data-dir {cifar} --device cpu --json")
    assert again.code == 0, again.err
    for key, value in again.json["scores"].items():
        assert value == pytest.approx(trained.json["result"][key], abs=1e-6)


def test_pictures_larger_than_the_models_do(tiny, cifar):
    line = f"train cifar10-vit --data-dir {cifar} --set model={tiny} --set size=48 {SMALL_VIT} --lr 0.03"
    assert sngm(line).code == 0


def test_the_settings_of_a_vit_task_are_its_own():
    settings = tasks.build("cifar100-vit", {"size": 64}).settings()
    assert settings == {"model": "google/vit-base-patch16-224-in21k", "size": 64, "augment": "resized-crop"}


@pytest.mark.parametrize(
    ("setting", "told", "code"),
    [
        ("model=./nothing", "no folder", 3),
        ("model=small-vit", "are named owner/name", 3),  # at once, without asking the hub
        ("model={empty}", "holds no model", 3),
        ("model={corrupt}", "cannot be read as a ViT", 3),
        ("size=36", "multiple of the model's patch size, 8, got 36", 2),
        ("size=16", "at least 32", 2),
        ("augment=cutout", "resized-crop, flip", 2),
    ],
)
def test_vits_that_cannot_be_are_refused(setting, told, code, tiny, cifar, tmp_path):
    empty, corrupt = tmp_path / "empty", tmp_path / "corrupt"
    empty.mkdir()
    corrupt.mkdir()
    for file in tiny.iterdir():
        (corrupt / file.name).write_bytes(file.read_bytes()[:200])
    setting = setting.format(empty=empty, corrupt=corrupt)
    usual = "" if setting.startswith("model") else f"--set model={tiny}"
    shown = sngm(f"train cifar10-vit --data-dir {cifar} --set {setting} {usual} {SMALL_VIT} --lr 0.1 --out run")
    refused(shown, told, code=code)
    assert not Path("run").exists()


def test_cifar_that_is_not_there_is_missing_data(tiny, tmp_path):
    refused(sngm(f"train cifar10-vit --data-dir {tmp_path} --set model={tiny} {SMALL_VIT}"), "CIFAR-10", code=3)


# ---------------------------------------------------------------- crops


def by_hand(image, box, mirrored: bool, size: int):
    top, left, height, width = box.tolist()
    crop = image[None, :, top : top + height, left : left + width]
    out = interpolate(crop, size=(size, size), mode="bilinear", align_corners=False)[0]
    return out.flip(-1) if mirrored else out


@pytest.mark.parametrize("size", [32, 48, 224])
def test_crops_are_scaled_as_torch_scales_them(size):
    images = torch.rand(24, 3, SIDE, SIDE, dtype=torch.float64)
    boxes = random_boxes(random_bits(0, 0, torch.arange(24)))
    mirrored = torch.arange(24) % 2 == 0
    found = resized(images, boxes, mirrored, size)
    wanted = torch.stack([by_hand(*each, size) for each in zip(images, boxes, mirrored, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(resized(images.float(), boxes, mirrored, size), wanted.float(), rtol=1e-5, atol=1e-5)


def test_a_whole_image_of_its_own_size_is_itself():
    images = torch.rand(5, 3, SIDE, SIDE)
    no = torch.zeros(1, dtype=torch.bool)
    assert torch.equal(resized(images, whole(torch.zeros(1, dtype=torch.int64)), no, SIDE), images)


def test_boxes_follow_from_their_numbers_alone():
    numbers = random_bits(3, 4, torch.arange(1000))
    boxes = random_boxes(numbers)
    assert torch.equal(random_boxes(numbers[300:310]), boxes[300:310])
    top, left, height, width = boxes.unbind(1)
    assert (boxes[:, :2] >= 0).all()
    assert (height >= 1).all()
    assert (width >= 1).all()
    assert (top + height <= SIDE).all()
    assert (left + width <= SIDE).all()


def test_boxes_are_distributed_as_by_drawing_again_what_does_not_fit():
    generator = torch.Generator().manual_seed(0)
    area, shape = torch.rand(2, 200_000, generator=generator, dtype=torch.float64)
    area = SIDE**2 * (SCALE[0] + (SCALE[1] - SCALE[0]) * area)
    low, high = np.log(RATIO)
    ratio = torch.exp(low + (high - low) * shape)
    drawn = torch.stack([(area / ratio).sqrt().round(), (area * ratio).sqrt().round()], 1)
    drawn = drawn[(drawn <= SIDE).all(1)]
    boxes = random_boxes(random_bits(0, 0, torch.arange(200_000))).double()
    torch.testing.assert_close(boxes[:, 2:].mean(0), drawn.mean(0), rtol=0, atol=0.06)
    torch.testing.assert_close(boxes[:, 2:].std(0), drawn.std(0), rtol=0, atol=0.06)
    middle = boxes[:, :2] + boxes[:, 2:] / 2
    torch.testing.assert_close(middle.mean(0), torch.full((2,), SIDE / 2, dtype=torch.float64), rtol=0, atol=0.06)
    assert crop_sizes(CPU).amin() >= 7


def test_a_batch_of_a_vit_task_carries_what_its_crops_follow_from(cifar, tiny):
    task = tasks.build("cifar10-vit", {"model": str(tiny), "size": 32}, cifar)
    train = task.data().train
    images, _, numbers = task.batch(train, torch.arange(40), seed=1, epoch=2)
    assert images.dtype == torch.uint8
    assert torch.equal(numbers, random_bits(1, 2, torch.arange(40)))
    model = task.model()
    inputs = task._inputs(model, images, numbers)
    assert inputs.shape == (40, 3, 32, 32)
    assert 0 <= inputs.min() <= inputs.max() <= 1
    parts = [task._inputs(model, images[i : i + 10], numbers[i : i + 10]) for i in range(0, 40, 10)]
    torch.testing.assert_close(torch.cat(parts), inputs)
    passes = {size: tasks.build("cifar10-vit", {"size": size}).pass_size for size in (32, 64, 224, 384, 4096)}
    assert passes == {32: 6272, 64: 1568, 224: 128, 384: 43, 4096: 1}  # as many pixels each
    flips = tasks.build("cifar10-vit", {"model": str(tiny), "size": 32, "augment": "flip"}, cifar)
    pixels = images.float() / 255
    same = [torch.equal(a, b) for a, b in zip(flips._inputs(model, images, numbers), pixels, strict=True)]
    turned = [torch.equal(a, b.flip(-1)) for a, b in zip(flips._inputs(model, images, numbers), pixels, strict=True)]
    assert all(a or b for a, b in zip(same, turned, strict=True))
    assert 8 < sum(same) < 32
