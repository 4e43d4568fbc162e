"""The kernels of the CIFAR networks and augmentation compared with torch in float64, interpreted or on a GPU."""

import copy

import pytest
import torch
from harness import pairwise
from interpreter import close, on_devices
from torch.nn.functional import conv2d, pad

import sngm.triton_support
from sngm.data import augment
from sngm.models.conv import Conv3x3
from sngm.models.ghost_norm import GhostBatchNorm2d, one_after_another
from sngm.models.resnet_cifar import resnet20

pytest.importorskip("triton")
LAST = torch.channels_last
device = on_devices(
    "sngm.models.kernels.conv",
    "sngm.models.kernels.norm",
    "sngm.models.kernels.shortcut",
    "sngm.data.augment_kernel",
)


def draw(*shape, device="cpu", dtype=torch.float32, grad=True, shift=0.0):
    seed = sum(shape) + grad  # BatchNorm would cancel a gradient equal to the values
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + shift
    values = values.to(device, dtype)
    return (values.to(memory_format=LAST) if values.ndim == 4 else values).requires_grad_(grad)


# ---------------------------------------------------------------- convolutions


def convolution(device):
    """Return a function for a layer's output, its dtype and tolerance: the interpreter has no bfloat16 products."""
    if device == "cuda":

        def by_layer(layer, x):
            with torch.autocast(device, torch.bfloat16):
                return layer(x)

        return by_layer, torch.bfloat16, 1e-2  # one rounding to 8 bits
    from sngm.models.kernels.conv import Convolve

    return lambda layer, x: Convolve.apply(x, layer.weight), torch.float32, 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "size", "layout"),
    [
        ((3, 16), (8, 8), LAST),
        ((1, 16), (5, 7), LAST),
        ((16, 16), (8, 8), LAST),
        ((16, 16), (5, 7), torch.contiguous_format),
        ((16, 32), (4, 4), LAST),
        ((32, 32), (5, 7), LAST),
        ((64, 16), (4, 4), LAST),
        pytest.param((64, 64), (3, 4), torch.contiguous_format, marks=pytest.mark.slow),
    ],
)
def test_convolutions_and_their_gradients_are_those_of_float64(device, channels, size, layout):
    inputs, outputs = channels
    apply, dtype, tolerance = convolution(device)
    x = draw(3, inputs, *size, device=device, dtype=dtype)
    layer = Conv3x3(inputs, outputs).to(device, memory_format=layout)
    y = apply(layer, x)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=LAST)
    assert "Convolve" in y.grad_fn.name()
    grad = draw(*y.shape, device=device, dtype=dtype, grad=False)
    y.backward(grad)
    wide, weight = x.detach().double().requires_grad_(), layer.weight.detach().to(dtype).double().requires_grad_()
    wanted = conv2d(wide, weight, padding=1)
    wanted.backward(grad.double())
    close(y, wanted, tolerance)
    close(x.grad, wide.grad, tolerance)
    close(layer.weight.grad, weight.grad, 1e-5)
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.stride() == layer.weight.stride()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "outputs", "equal"), [(3, 16, True), (16, 32, False), (32, 16, True), (64, 16, False)]
)
def test_a_stack_of_weights_serves_each_part_of_the_samples_with_its_own_copy(device, inputs, outputs, equal):
    apply, dtype, tolerance = convolution(device)
    x = draw(6, inputs, 16, 8, device=device, dtype=dtype, grad=inputs > 3)  # 256 pixels in each of three parts
    layer = Conv3x3(inputs, outputs).to(device, memory_format=LAST)
    weight = layer.weight.detach()
    stack = (weight.expand(3, *weight.shape) if equal else torch.stack([weight, -weight, weight * 2])).requires_grad_()
    layer._parameters["weight"] = stack
    y = apply(layer, x)
    grad = draw(*y.shape, device=device, dtype=dtype, grad=False)
    of_stack, *of_x = torch.autograd.grad(y, [stack, x][: 1 + x.requires_grad], grad)
    assert all(part.stride() == weight.stride() for part in of_stack)
    for i, part in enumerate(x.detach().double().chunk(3)):
        wide, own = part.requires_grad_(), stack[i].detach().to(dtype).double().requires_grad_()
        wanted = conv2d(wide, own, padding=1)
        by_hand = torch.autograd.grad(wanted, [own, wide], grad.double().chunk(3)[i])
        close(y.chunk(3)[i], wanted, tolerance)
        close(of_stack[i], by_hand[0], 1e-5)
        for found in of_x:
            close(found.chunk(3)[i], by_hand[1], tolerance)


def test_stacks_that_the_kernels_do_not_know_go_to_torch(device):
    from sngm.models.kernels.conv import fits

    assert fits(torch.empty(6, 16, 16, 8), torch.zeros(3, 16, 16, 3, 3), (1, 1))
    assert not fits(torch.empty(6, 16, 8, 8), torch.zeros(3, 16, 16, 3, 3), (1, 1))  # a program would need two copies
    images = torch.empty(6, 3, 16, 8)
    assert fits(images, torch.zeros(3, 16, 3, 3, 3), (1, 1))
    assert not fits(images.requires_grad_(), torch.zeros(3, 16, 3, 3, 3), (1, 1))


@pytest.mark.parametrize(
    ("with_shortcut", "relu", "group", "equal"),
    [(False, True, 2, True), (True, True, 4, True), (True, False, 2, False)],
)
def test_a_stack_of_norm_parameters_serves_each_part_of_the_groups(device, with_shortcut, relu, group, equal):
    x = draw(8, 4, 3, 5, device=device)
    shortcut = draw(8, 4, 3, 5, device=device, shift=0.5) if with_shortcut else None
    norm = GhostBatchNorm2d(4).to(device)
    norm.group = group
    stacks = [draw(2, 4, device=device, shift=i) for i in (1, 0)]  # two copies, for two or four groups
    if equal:  # one copy, expanded: as in a step of CLARS, and in the first computation of EXTRAP-SGD
        stacks = [stack.detach()[:1].expand(2, 4).requires_grad_() for stack in stacks]
    norm._parameters |= dict(zip(("weight", "bias"), stacks, strict=True))
    y = norm(x.contiguous(memory_format=LAST), shortcut, relu)
    assert "Normalise" in y.grad_fn.name()
    grad = draw(*y.shape, device=device, grad=False)
    inputs = [x, *stacks, *([] if shortcut is None else [shortcut])]
    found = torch.autograd.grad(y, inputs, grad)
    twin = GhostBatchNorm2d(4).to(device).double()
    halves = []
    for i in range(2):
        twin.group = group
        twin._parameters |= {name: stack[i].double() for name, stack in zip(("weight", "bias"), stacks, strict=True)}
        rows = slice(4 * i, 4 * i + 4)
        halves.append(twin(x[rows].double(), None if shortcut is None else shortcut[rows].double(), relu))
    wanted = torch.cat(halves)
    close(y, wanted, 1e-5)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, inputs, grad.double()), strict=True):
        close(ours, theirs, 1e-4)


def test_what_the_kernels_do_not_know_goes_to_torch(device):
    x = draw(2, 16, 6, 6, device=device)
    assert "Convolve" not in Conv3x3(16, 16).to(device)(x).grad_fn.name()  # float32
    with torch.autocast(device, torch.bfloat16):
        for layer in (Conv3x3(16, 16, stride=2), Conv3x3(16, 24), Conv3x3(16, 16).double().float().bfloat16()):
            assert "Convolve" not in layer.to(device)(x).grad_fn.name()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_input_of_float32_in_another_layout_is_served_too():
    x = torch.randn(2, 16, 6, 6, device="cuda")
    layer = Conv3x3(16, 16).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    assert "Convolve" in y.grad_fn.name()
    close(y, conv2d(x.bfloat16().double(), layer.weight.bfloat16().double(), padding=1), 1e-2)


# ---------------------------------------------------------------- BatchNorm over groups


@pytest.mark.parametrize(
    ("shape", "with_shortcut", "relu"),
    pairwise([(16, (8, 8), 3), (4, (3, 5), 2), (192, (3, 3), 6)], [False, True], [False, True]),
)
def test_group_norm_and_its_gradients_are_those_of_float64(device, shape, with_shortcut, relu):
    channels, size, group = shape
    x = draw(6, channels, *size, device=device, shift=5.0)
    shortcut = draw(6, channels, *size, device=device, shift=0.5) if with_shortcut else None
    norm = GhostBatchNorm2d(channels).to(device)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        norm.bias.normal_()
    twin = GhostBatchNorm2d(channels).to(device, torch.float64)
    twin.load_state_dict(norm.state_dict())
    norm.group = twin.group = group
    grad = draw(*x.shape, device=device, grad=False)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, shortcut)]
    for _ in range(2):  # counters are reset between passes
        y, wanted = norm(x, shortcut, relu), twin(*wide, relu)
        assert "Normalise" in y.grad_fn.name()
        y.backward(grad)
        wanted.backward(grad.double())
        close(y, wanted, 1e-5)
    close(x.grad, wide[0].grad, 2e-5)
    close(norm.weight.grad, twin.weight.grad, 1e-5)
    close(norm.bias.grad, twin.bias.grad, 1e-5)
    if with_shortcut:
        close(shortcut.grad, wide[1].grad, 1e-6)
    close(norm.running_mean, twin.running_mean, 1e-5)
    close(norm.running_var, twin.running_var, 1e-5)
    assert norm.num_batches_tracked == twin.num_batches_tracked == 2 * 6 // group


def test_running_statistics_follow_the_weights_alone(device):
    x = draw(6, 16, 4, 4, device=device)
    norm = GhostBatchNorm2d(16).to(device)
    norm.group, norm.keep, norm.batches = 2, 0.25, 7
    norm.weights = torch.tensor([0.0, 0.75, 0.0], device=device)
    with torch.no_grad():
        x[:2] = float("nan")  # a group with weight 0
    y = norm(x)
    middle = x[2:4].detach().double()
    close(norm.running_mean, 0.75 * middle.mean((0, 2, 3)), 1e-5)
    close(norm.running_var, 0.25 + 0.75 * middle.var((0, 2, 3)), 1e-5)
    assert norm.num_batches_tracked == 7
    assert y[:2].isnan().all()
    assert y[2:].isfinite().all()
    norm.track_running_stats = False
    before = norm.running_mean.clone()
    norm(x)
    assert torch.equal(norm.running_mean, before)


def test_without_kernels_a_group_of_no_weight_may_hold_anything_too():
    norm = GhostBatchNorm2d(3)
    norm.group, norm.keep, norm.weights = 2, 0.5, torch.tensor([0.0, 0.5])
    x = draw(4, 3, 2, 2, grad=False)
    x[:2] = float("nan")
    norm(x)
    close(norm.running_mean, 0.5 * x[2:].double().mean((0, 2, 3)), 1e-5)


@pytest.mark.parametrize("cut", ["strided", "of one pixel"])
def test_a_shortcut_with_gaps_or_to_be_spread_is_read_rightly(device, cut):
    x, wide = draw(2, 16, 4, 4, device=device), draw(2, 16, 8, 8, device=device)
    shortcut = wide[:, :, ::2, ::2] if cut == "strided" else wide[:, :, :1, :1]
    norm, twin = GhostBatchNorm2d(16).to(device), GhostBatchNorm2d(16).double().to(device)
    y = norm(x, shortcut, relu=True)
    assert "Normalise" in y.grad_fn.name()
    close(y, twin(x.double(), shortcut.double(), relu=True), 1e-5)
    grad = draw(*x.shape, device=device, grad=False)
    found = torch.autograd.grad(y, wide, grad)[0]
    wanted = torch.autograd.grad(twin(x.double(), shortcut.double(), relu=True), wide, grad.double())[0]
    close(found, wanted, 1e-5)


def test_what_makes_no_sense_is_refused(device):
    norm = GhostBatchNorm2d(16).to(device)
    norm.group = 2
    with pytest.raises(ValueError, match="multiple of group=2, got 5"):
        norm(draw(5, 16, 2, 2, device=device))
    norm.weights = torch.ones(1, device=device)
    with pytest.raises(ValueError, match=r"one value per BatchNorm group \(2 in this pass\), got 1"):
        norm(draw(4, 16, 2, 2, device=device))
    norm.group, norm.weights = 1, None
    with pytest.raises(ValueError, match="more than one value"):
        norm(draw(4, 16, 1, 1, device=device))
    with pytest.raises(ValueError, match="momentum must be a number"):
        GhostBatchNorm2d(16, momentum=None).to(device)(draw(4, 16, 2, 2, device=device))


def test_a_copy_counts_for_itself(device):
    norm = GhostBatchNorm2d(16).to(device)
    x = draw(4, 16, 4, 4, device=device)
    first = norm(x)
    twin = copy.deepcopy(norm)
    assert torch.equal(twin(x), first)
    assert not {t.data_ptr() for t in twin._counters} & {t.data_ptr() for t in norm._counters}


def test_not_a_number_passes_the_relu(device):
    x = draw(2, 16, 4, 4, device=device, grad=False)
    x[0, 3, 0, 0] = float("nan")
    assert GhostBatchNorm2d(16).to(device)(x, relu=True)[:, 3].isnan().all()


def test_a_mean_far_from_zero_costs_no_digits(device):
    x = draw(4, 16, 8, 8, device=device, shift=1000.0)
    norm = GhostBatchNorm2d(16).to(device)
    close(norm(x), GhostBatchNorm2d(16).double()(x.detach().double().cpu()), 1e-4)  # x has seven digits


def test_one_group_after_another_is_the_default(device):
    x = draw(8, 16, 4, 4, device=device)
    norm, plain = GhostBatchNorm2d(16).to(device), torch.nn.BatchNorm2d(16).to(device)
    norm.group = 2
    norm(x)
    for part in x.split(2):
        plain(part)
    close(norm.running_mean, plain.running_mean, 1e-5)
    close(norm.running_var, plain.running_var, 1e-5)
    weights, keep = one_after_another(4, 0.1)
    assert weights.sum() + keep == pytest.approx(1.0)


# ---------------------------------------------------------------- other kernels, and whole networks


def test_the_thinned_shortcut_is_that_of_slices_and_zeros(device):
    from sngm.models.kernels.shortcut import Subsample

    x = draw(3, 16, 8, 4, device=device)
    y, wanted = Subsample.apply(x, 32), pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8))
    assert torch.equal(y, wanted)
    grad = draw(*y.shape, device=device, grad=False)
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(wanted, x, grad)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_augmented_images_are_the_same_pixels(device, dtype):
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=draws).to(device, memory_format=LAST)
    indices = torch.tensor([3, 39, 0, 7, 7], device=device)
    mean, std = torch.tensor([0.49, 0.48, 0.44], device=device), torch.tensor([0.25, 0.24, 0.26], device=device)
    for seed, epoch in ((0, 0), (1, 1), (7, 159), (2**40, 3), (2**63 + 5, 2)):
        at = torch.tensor(epoch, device=device)
        found = augment.training_batch(images, indices, seed, at, mean, std, dtype)
        wanted = augment.normalise(augment.crop_flip(images, indices, seed, epoch), mean, std)
        assert found.is_contiguous(memory_format=LAST)
        close(found, wanted, 1e-6 if dtype == torch.float32 else 1e-2)
        on_host = augment.crop_flip(images.cpu(), indices.cpu(), seed, epoch)
        assert torch.equal(augment.crop_flip(images, indices, seed, epoch).cpu(), on_host)


@pytest.mark.slow
def test_resnet20_with_kernels_learns_what_it_learns_without(device, monkeypatch):
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # as in the trainer
    model = resnet20().to(device, memory_format=LAST)
    twin = resnet20().to(device)
    twin.load_state_dict(model.state_dict())
    x = draw(4, 3, 16, 16, device=device, grad=False)
    for net, devices in ((model, sngm.triton_support.DEVICES), (twin, ())):
        monkeypatch.setattr(sngm.triton_support, "DEVICES", devices)
        for norm in (m for m in net.modules() if isinstance(m, GhostBatchNorm2d)):
            norm.group = 2
        net(x).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        close(p.grad, q.grad, 2e-4)
    for b, c in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(b.double(), c.double(), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_large_pass_in_bfloat16_is_as_exact_as_torchs_own(monkeypatch):
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # as in the trainer
    torch.manual_seed(0)
    model = resnet20().cuda().to(memory_format=LAST)
    for norm in (m for m in model.modules() if isinstance(m, GhostBatchNorm2d)):
        norm.group, norm.track_running_stats = 128, False
    x = torch.randn(2048, 3, 32, 32, device="cuda").to(memory_format=LAST)
    labels = torch.randint(0, 10, (2048,), device="cuda")

    def gradients(devices, low=True):
        monkeypatch.setattr(sngm.triton_support, "DEVICES", devices)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            torch.nn.functional.cross_entropy(model(x).float(), labels).backward()
        return [p.grad.double() for p in model.parameters()]

    exact = gradients((), low=False)
    errors = [
        torch.stack([(g - e).norm() / e.norm() for g, e in zip(gradients(devices), exact, strict=True)])
        for devices in (("cuda",), ())
    ]
    assert errors[0].mean() < 1.1 * errors[1].mean(), errors  # the kernels do not round more often
    assert (errors[0] < 3 * errors[1] + 0.01).all(), errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_give_the_same_bits_again():
    from sngm.models.kernels.conv import gradient_of_weight

    x, grad = (draw(1024, 16, 32, 32, device="cuda", dtype=torch.bfloat16, grad=g) for g in (True, False))
    weight, norm = draw(16, 16, 3, 3, device="cuda", grad=False), GhostBatchNorm2d(16).cuda()
    norm.group = 128

    def results():
        y = norm(x, grad, relu=True)
        return [y, gradient_of_weight(x.detach(), grad, weight), *torch.autograd.grad(y, [x, norm.weight], grad)]

    first = results()
    for _ in range(5):
        assert all(map(torch.equal, results(), first))
