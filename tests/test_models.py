"""The networks: their layers, option A computed by hand, and BatchNorm by groups compared with a loop over groups."""

import copy
import json
import sys

import pytest
import torch
from harness import pairwise
from torch import nn
from torch.nn.functional import cross_entropy

from sngm.errors import DataMissing, UsageError
from sngm.models.conv import Conv3x3
from sngm.models.convnet import digits_net, two_conv_net
from sngm.models.ghost_norm import GhostBatchNorm2d, one_after_another
from sngm.models.resnet import resnet50
from sngm.models.resnet_cifar import Block, CifarResNet, resnet20

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------- layers and parameters


def test_resnet20_is_the_published_one():
    model = resnet20()
    assert parameters(model) == 269_722
    assert len(list(model.parameters())) == 59
    assert sum(isinstance(m, Conv3x3) for m in model.modules()) == 19
    assert parameters(resnet20(classes=100)) == 269_722 + 90 * 65
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_a_deeper_cifar_resnet_has_the_published_size():
    assert parameters(CifarResNet(9)) == 853_018  # ResNet-56


def test_resnet20_is_drawn_by_fan_in():
    torch.manual_seed(0)
    model = resnet20()
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            fan_in = module.weight[0].numel()
            assert module.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.15)
        if isinstance(module, nn.BatchNorm2d):
            assert module.weight.eq(1).all()
            assert module.bias.eq(0).all()
    assert model.linear.bias.abs().max() > 0
    norm = sum(p.square().sum() for p in model.parameters()) ** 0.5
    assert norm.item() == pytest.approx(45.7, abs=0.5)


def test_option_a_takes_every_other_pixel_between_channels_of_zeros():
    x = torch.arange(2 * 4 * 4.0).view(1, 2, 4, 4)
    out = Block(2, 4, stride=2).shortcut(x)
    zeros = [[0, 0], [0, 0]]
    assert out[0].tolist() == [zeros, [[0, 2], [8, 10]], [[16, 18], [24, 26]], zeros]
    assert Block(4, 4).shortcut(x) is x


def test_a_block_adds_its_input_before_the_last_relu():
    block = Block(2, 4, stride=2).double().eval()
    x = torch.randn(3, 2, 8, 8, dtype=torch.float64)
    y = block.norm2(block.conv2(block.norm1(block.conv1(x)).relu()))
    torch.testing.assert_close(block(x), (y + block.shortcut(x)).relu(), **EXACT)


def test_layouts_of_memory_give_the_same_numbers():
    model = resnet20().double()
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), model(x), **EXACT)


def test_two_conv_net_has_two_convolutions():
    model = two_conv_net()
    assert parameters(model) == 62_006
    assert sum(isinstance(m, nn.Conv2d) for m in model) == 2
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert two_conv_net(100)(torch.randn(2, 3, 32, 32)).shape == (2, 100)
    assert parameters(digits_net()) == 9_978


def torchvision_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of torchvision's resnet50, by name."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, norm: str, out: int, inputs: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (out, inputs, kernel, kernel)
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (out,)

    conv("conv1", "bn1", 64, 3, 7)
    inputs = 64
    for layer, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for i in range(blocks):
            at = f"layer{layer}.{i}"
            conv(f"{at}.conv1", f"{at}.bn1", width, inputs, 1)
            conv(f"{at}.conv2", f"{at}.bn2", width, width, 3)
            conv(f"{at}.conv3", f"{at}.bn3", 4 * width, width, 1)
            if i == 0:
                conv(f"{at}.downsample.0", f"{at}.downsample.1", 4 * width, inputs, 1)
            inputs = 4 * width
    return shapes | {"fc.weight": (1000, 2048), "fc.bias": (1000,)}


def test_resnet50_has_torchvisions_parameters():
    with torch.device("meta"):
        model = resnet50()
    assert parameters(model) == 25_557_032
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == torchvision_shapes()
    assert len(list(model.parameters())) == 161
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 53
    assert len(model.state_dict()) == 320
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    assert buffers == {"running_mean", "running_var", "num_batches_tracked"}


def test_resnet50_has_its_strides_in_the_3x3_convolutions():
    with torch.device("meta"):
        model = resnet50()
    strided = {name for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)}
    later = {f"layer{i}.0.{conv}" for i in (2, 3, 4) for conv in ("conv2", "downsample.0")}
    assert strided == {"conv1"} | later
    assert model(torch.randn(1, 3, 224, 224, device="meta")).shape == (1, 1000)


# ---------------------------------------------------------------- BatchNorm by groups

CHANNELS, GROUP, WORKERS, EACH = 5, 4, 3, 2  # a pass of 3 workers with 2 groups of 4 samples each


def policy(name: str, momentum: float) -> tuple[torch.Tensor | None, float]:
    """Return the weights of groups in the running statistics, and the weight of the old ones, for a named policy."""
    if name == "one after another":
        return None, 0.0
    weights, keep = one_after_another(EACH, momentum)
    if name == "mean":
        return weights.repeat(WORKERS) / WORKERS, keep
    return torch.cat([weights, torch.zeros((WORKERS - 1) * EACH, dtype=torch.float64)]), keep


def by_loop(norm: nn.BatchNorm2d, x, shortcut, relu: bool, name: str):
    """Return output and running statistics of a loop over groups with torch's own BatchNorm."""
    pieces, kept = [], []
    before = norm.running_mean.clone(), norm.running_var.clone()
    for worker in range(WORKERS):
        if name != "one after another":
            norm.running_mean, norm.running_var = (b.clone() for b in before)  # autograd has saved the old ones
        for i in range(worker * EACH, (worker + 1) * EACH):
            part = slice(i * GROUP, (i + 1) * GROUP)
            y = norm(x[part])
            y = y if shortcut is None else y + shortcut[part]
            pieces.append(y.relu() if relu else y)
        kept.append((norm.running_mean.clone(), norm.running_var.clone()))
    mean, var = (torch.stack(values) for values in zip(*kept, strict=True))
    chosen = {"one after another": (mean[-1], var[-1]), "first": (mean[0], var[0]), "mean": (mean.mean(0), var.mean(0))}
    return torch.cat(pieces), *chosen[name]


def two_norms(momentum: float = 0.1) -> tuple[nn.BatchNorm2d, GhostBatchNorm2d]:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(CHANNELS, momentum=momentum).double()
    with torch.no_grad():
        plain.weight.copy_(torch.randn(CHANNELS))
        plain.bias.copy_(torch.randn(CHANNELS))
        plain.running_mean.copy_(torch.randn(CHANNELS))
        plain.running_var.copy_(torch.rand(CHANNELS) + 0.5)
    ghost = GhostBatchNorm2d(CHANNELS, momentum=momentum).double()
    ghost.load_state_dict(plain.state_dict())
    return plain, ghost


def inputs(layout: torch.memory_format) -> torch.Tensor:
    x = torch.randn(WORKERS * EACH * GROUP, CHANNELS, 3, 6, dtype=torch.float64) + 0.3
    return x.contiguous(memory_format=layout).requires_grad_()


@pytest.mark.parametrize(
    ("layout", "with_shortcut", "relu", "by_torch", "name"),
    pairwise(
        [torch.contiguous_format, torch.channels_last],
        *([False, True],) * 3,
        ["one after another", "first", "mean"],
    ),
)
def test_groups_equal_a_loop_over_micro_batches(layout, with_shortcut, relu, by_torch, name, monkeypatch):
    plain, ghost = two_norms(momentum=0.3)
    if not by_torch:  # as on a GPU without kernels, and under torch.compile
        monkeypatch.setattr(ghost, "_as_torch", lambda _: False)
    x, shortcut = inputs(layout), inputs(layout) if with_shortcut else None
    leaves = [x, *([shortcut] if with_shortcut else [])]
    wanted, mean, var = by_loop(plain, x, shortcut, relu, name)
    ghost.group = GROUP
    ghost.weights, ghost.keep = policy(name, 0.3)
    found = ghost(x, shortcut=shortcut, relu=relu)
    torch.testing.assert_close(found, wanted, **EXACT)
    torch.testing.assert_close(ghost.running_mean, mean, **EXACT)
    torch.testing.assert_close(ghost.running_var, var, **EXACT)
    pull = torch.randn_like(wanted)
    theirs = torch.autograd.grad(wanted, [*leaves, *plain.parameters()], pull)
    ours = torch.autograd.grad(found, [*leaves, *ghost.parameters()], pull)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **EXACT)


def test_groups_have_second_derivatives():
    _, ghost = two_norms()
    ghost.group, ghost.track_running_stats = 2, False
    x = torch.randn(4, CHANNELS, 2, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ghost(x, shortcut=x, relu=True), x)


def test_without_a_group_it_is_batch_norm():
    plain, ghost = two_norms()
    x = inputs(torch.contiguous_format)
    torch.testing.assert_close(ghost(x), plain(x), **EXACT)
    assert ghost.state_dict().keys() == plain.state_dict().keys()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(ghost.state_dict()[key], value, **EXACT)


@pytest.mark.parametrize("relu", [False, True])
def test_evaluation_is_batch_norms_and_changes_nothing(relu):
    plain, ghost = two_norms()
    plain.eval(), ghost.eval()
    ghost.group = GROUP
    x, shortcut = inputs(torch.channels_last), inputs(torch.channels_last)
    y = plain(x) + shortcut
    torch.testing.assert_close(ghost(x, shortcut, relu), y.relu() if relu else y, **EXACT)
    torch.testing.assert_close(ghost(x[:3]), plain(x[:3]), **EXACT)  # also without a whole number of groups
    for key, value in plain.state_dict().items():
        assert torch.equal(ghost.state_dict()[key], value)


def test_states_of_batch_norm_load_both_ways():
    plain, ghost = two_norms()
    ghost.group = GROUP
    ghost(inputs(torch.contiguous_format))
    plain.load_state_dict(ghost.state_dict())
    x = inputs(torch.contiguous_format)
    torch.testing.assert_close(plain.eval()(x), ghost.eval()(x), **EXACT)


def test_statistics_stay_where_they_are_not_tracked():
    _, ghost = two_norms()
    ghost.group = GROUP
    before = copy.deepcopy(ghost.state_dict())
    ghost.track_running_stats = False  # as the trainer sets it for workers without statistics
    ghost(inputs(torch.contiguous_format))
    for key, value in before.items():
        assert torch.equal(ghost.state_dict()[key], value)


def test_a_pass_that_is_not_made_of_groups_is_refused():
    _, ghost = two_norms()
    ghost.group = 5
    with pytest.raises(ValueError, match=r"multiple of group=5, got 24"):
        ghost(inputs(torch.contiguous_format))


def test_resnet20_in_one_pass_of_groups_equals_passes_of_a_group():
    torch.manual_seed(0)
    model = resnet20().double()
    x, labels = torch.randn(8, 3, 32, 32, dtype=torch.float64), torch.arange(8)
    looped = copy.deepcopy(model)
    for part in (slice(0, 4), slice(4, 8)):
        (cross_entropy(looped(x[part]), labels[part]) / 2).backward()
    for module in model.modules():
        if isinstance(module, GhostBatchNorm2d):
            module.group = 4
    cross_entropy(model(x), labels).backward()
    for mine, other in zip(model.parameters(), looped.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-8, atol=1e-10)
    for (key, mine), other in zip(model.state_dict().items(), looped.state_dict().values(), strict=True):
        if "running" in key:
            torch.testing.assert_close(mine, other, **EXACT)


# ---------------------------------------------------------------- ViT


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a folder with a small ViT for 32 x 32 images and 4 classes."""
    vit = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = vit.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        image_size=32, patch_size=8, num_labels=4,
    )  # fmt: skip
    vit.ViTForImageClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def own(tiny, tmp_path):
    """Return a copy of the folder, to be modified."""
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(*arguments):
    from sngm.models.vit import load_vit

    return load_vit(*arguments)


@pytest.mark.slow
def test_vit_b16_is_the_published_one():
    pytest.importorskip("transformers")
    from sngm.models.vit import vit_b16

    with torch.device("meta"):
        model = vit_b16(1000)
    assert parameters(model) == 86_567_656
    assert model.patch == 16
    assert model(torch.randn(1, 3, 224, 224, device="meta")).shape == (1, 1000)


@pytest.mark.parametrize("classes", [4, 7])
def test_a_vit_comes_with_its_weights_and_a_new_head(tiny, classes):
    from transformers import ViTForImageClassification

    old = ViTForImageClassification.from_pretrained(tiny)
    torch.manual_seed(1)
    model = load(str(tiny), classes)
    assert model.training
    new = model.network.state_dict()
    for key, value in old.state_dict().items():
        if not key.startswith("classifier"):
            assert torch.equal(new[key], value), key
    assert new["classifier.bias"].tolist() == [0.0] * classes
    assert new["classifier.weight"].shape == (classes, 16)
    assert 0 < new["classifier.weight"].std() < 0.03
    if classes == 4:
        assert not torch.equal(new["classifier.weight"], old.state_dict()["classifier.weight"])
    torch.manual_seed(1)
    again = load(str(tiny), classes).state_dict()
    assert all(torch.equal(again[key], value) for key, value in model.state_dict().items())


def test_a_vit_scales_pixels_as_its_file_says(own):
    x = torch.rand(2, 3, 32, 32)
    usual = load(str(own), 3)
    torch.testing.assert_close(usual(x), usual.network(pixel_values=2 * x - 1).logits)
    (own / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 4]}))
    model = load(str(own), 3)
    scaled = (x - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
    torch.testing.assert_close(model(x), model.network(pixel_values=scaled).logits)


def test_a_vit_takes_pictures_of_other_sizes(tiny):
    model = load(str(tiny), 3)
    assert model(torch.rand(2, 3, 48, 48)).shape == (2, 3)
    model.double()(torch.rand(2, 3, 48, 48, dtype=torch.float64)).sum().backward()


def test_loading_a_vit_says_nothing(tiny, capfd):
    load(str(tiny), 3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("model.safetensors", b"", "cannot be read as a ViT"),
        ("model.safetensors", b"\xff" * 100, "cannot be read as a ViT"),
        ("model.safetensors", None, "cannot be read as a ViT"),
        ("config.json", None, "holds no model"),
        ("config.json", b"{", "cannot be read as a ViT"),
        ("preprocessor_config.json", b"[]", "is broken"),
        ("preprocessor_config.json", b'{"image_std": [1, 0, 1]}', "3 numbers each"),
        ("preprocessor_config.json", b'{"image_mean": [1]}', "3 numbers each"),
    ],
)
def test_folders_that_hold_no_whole_vit_are_refused(own, file, content, told):
    (own / file).unlink(missing_ok=True)
    if content is not None:
        (own / file).write_bytes(content)
    with pytest.raises(DataMissing, match=told):
        load(str(own), 3)


def test_a_vit_that_lacks_weights_is_not_drawn_at_random(own):
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(DataMissing, match=r"lack the weights vit\..* and \d+ others"):
        load(str(own), 3)


def test_another_model_is_no_vit(tmp_path):
    vit = pytest.importorskip("transformers")
    config = vit.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=8
    )
    vit.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(DataMissing, match="cannot be read as a ViT"):
        load(str(tmp_path), 3)


def test_a_model_of_the_hub_that_cannot_be_had_says_what_to_run(monkeypatch):
    vit = pytest.importorskip("transformers")
    asked = []

    def unreachable(source, *, local_files_only, **_):
        asked.append(local_files_only)
        raise OSError("We couldn't connect to 'https://huggingface.co'\nCheck your internet connection")

    monkeypatch.setattr(vit.ViTForImageClassification, "from_pretrained", unreachable)
    with pytest.raises(DataMissing, match=r"couldn't connect .*; .* 'hf download google/x --local-dir FOLDER'") as told:
        load("google/x", 3)
    assert asked == [True, False]
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("source", ["./nothing", "/no/such/folder", "~/nothing here", "a/b/c"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(source):
    pytest.importorskip("transformers")
    with pytest.raises(DataMissing, match="no folder"):
        load(source, 3)


def test_without_transformers_the_command_to_install_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'sngm\[vit\]'"):
        load("google/x", 3)
