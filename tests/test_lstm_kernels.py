"""The kernels of the word LSTM and its loss compared with torch in float64, in the interpreter or on a GPU."""

import copy

import pytest
import torch
from interpreter import close, on_devices
from torch import nn
from torch.nn.functional import linear

import sngm.triton_support
from sngm.models.lstm import Layer, WordLSTM
from sngm.models.vocabulary_loss import vocabulary_loss

pytest.importorskip("triton")
device = on_devices(
    "sngm.models.kernels.lstm",
    "sngm.models.kernels.softmax",
)


def draw(*shape, device="cpu", dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(*shape, generator=generator).mul_(scale).to(device, dtype)


# ---------------------------------------------------------------- one layer


def layer_of(inputs, width, device="cpu"):
    torch.manual_seed(inputs + width)
    return Layer(inputs, width).to(device)


def results(layer, steps, streams, dtype=torch.float32, low=None, name="Recur"):
    """Return outputs, last output and cell, and the gradients of x, h, c and all parameters."""
    weight, width = layer.weight_hh_l0, layer.hidden_size
    shapes = (steps, streams, layer.input_size), (1, streams, width), (1, streams, width)
    x, h, c = (draw(*s, device=weight.device, dtype=dtype, seed=i).requires_grad_() for i, s in enumerate(shapes))
    with torch.autocast(weight.device.type, low or torch.bfloat16, enabled=low is not None):
        y, (h_after, c_after) = layer(x, (h, c))
    assert (name in y.grad_fn.name()) == (dtype != torch.float64)  # float64 uses torch
    grads = [draw(*t.shape, device=weight.device, dtype=t.dtype, seed=3) for t in (y, h_after, c_after)]
    found = torch.autograd.grad([y, h_after, c_after], [x, h, c, *layer.parameters()], grads)
    assert [g.dtype for g in found] == [t.dtype for t in (x, h, c, *layer.parameters())]
    return [y, h_after, c_after, *found]


def compare(layer, steps, streams, tolerance, low=None):
    exact = copy.deepcopy(layer).double()
    wanted = results(exact, steps, streams, dtype=torch.float64)
    for found, of_float64 in zip(results(layer, steps, streams, low=low), wanted, strict=True):
        close(found, of_float64, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "streams", "inputs", "width"),
    [
        (1, 3, 5, 8),  # smaller than a matrix product's tile
        (3, 1, 1, 1),
        (3, 17, 7, 33),  # two programs, and sizes that are no multiples of tiles
        (4, 16, 16, 16),
        (2, 20, 8, 200),
        (2, 2, 3, 256),
    ],
)
def test_a_layer_and_all_gradients_are_those_of_float64(device, steps, streams, inputs, width):
    compare(layer_of(inputs, width, device), steps, streams, 3e-6)


def test_in_half_precision_sums_and_cells_are_float32(device):
    layer = layer_of(7, 33, device)
    compare(layer, 3, 17, 2e-3, low=torch.float16)
    found = results(layer, 3, 17, low=torch.float16)
    assert [t.dtype for t in found[:3]] == [torch.float16, torch.float16, torch.float32]


def test_parameters_of_half_precision(device):
    layer = layer_of(5, 16, device).half()
    exact = copy.deepcopy(layer).double()
    for found, wanted in zip(results(layer, 3, 4, torch.float16), results(exact, 3, 4, torch.float64), strict=True):
        close(found, wanted, 4e-3)


def test_tanh_has_float32_s_precision_everywhere(device):
    from sngm.models.kernels import lstm

    # without weights a cell is i * g with i = 1 / 2, so cells are exactly tanh(g) / 2
    sizes = torch.logspace(-30, 1.9, 500, dtype=torch.float64)
    g = torch.cat([-sizes, torch.zeros(12, dtype=torch.float64), sizes]).to(device, torch.float32).view(-1, 11)
    streams, width = g.shape
    gates = torch.zeros(1, streams, 4 * width, device=device)
    gates[0, :, 2 * width : 3 * width] = g
    outputs, cells = torch.zeros(2, 2, streams, width, device=device)
    weight = torch.zeros(width, 4 * width, device=device)
    lstm._launch((lstm.run_forward, None), lstm.FORWARD, gates, weight, outputs, cells, shape=(1, streams, width))
    wanted = g.double().tanh() / 2
    error = (cells[1].double() - wanted).abs() / wanted.abs().clamp(min=1e-45)
    assert error.max() < 4e-7
    assert cells[1].abs().max() <= 0.5


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # in a sigmoid, which is 0 then
def test_large_gates_are_no_trouble(device):
    layer = layer_of(3, 8, device)
    with torch.no_grad():
        layer.bias_ih_l0.copy_(1e4 * draw(32, device=device).sign())
    assert all(torch.isfinite(t).all() for t in results(layer, 3, 4))


def test_only_the_gradients_asked_for_come_back(device):
    layer, x = layer_of(4, 8, device), draw(3, 2, 4, device=device)
    hidden = tuple(torch.zeros(1, 2, 8, device=device) for _ in range(2))
    layer.weight_ih_l0.requires_grad_(False)
    y, after = layer(x, hidden)
    (y.sum() + after[0].sum()).backward()  # the last cell is unused
    assert layer.weight_ih_l0.grad is None
    assert torch.equal(layer.bias_ih_l0.grad, layer.bias_hh_l0.grad)
    assert layer.bias_ih_l0.grad.data_ptr() != layer.bias_hh_l0.grad.data_ptr()
    with torch.no_grad():
        assert torch.equal(layer(x, hidden)[0], y)


def test_backward_twice_adds_up_and_second_derivatives_are_refused(device):
    layer, x = layer_of(4, 8, device), draw(3, 2, 4, device=device).requires_grad_()
    y, _ = layer(x, tuple(torch.zeros(1, 2, 8, device=device) for _ in range(2)))
    y.sum().backward(retain_graph=True)
    first = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * first)
    y, _ = layer(x, tuple(torch.zeros(1, 2, 8, device=device) for _ in range(2)))
    slope = torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_views_are_read_rightly(device):
    layer, streams = layer_of(4, 8, device), 5
    x = draw(streams, 6, 8, device=device)[:, ::2, ::2].transpose(0, 1)
    hidden = tuple(draw(1, 8, streams, device=device).transpose(1, 2) for _ in range(2))
    wanted = copy.deepcopy(layer).double()(x.double(), tuple(h.double().contiguous() for h in hidden))  # as cuDNN needs
    found = layer(x, hidden)
    close(found[0], wanted[0], 1e-6)
    wide = draw(3, streams, 16, device=device)[:, :, ::2]
    found_grads = torch.autograd.grad(found[0], layer.parameters(), wide)
    again = layer(x.contiguous(), tuple(h.contiguous() for h in hidden))[0]
    for a, b in zip(found_grads, torch.autograd.grad(again, layer.parameters(), wide.contiguous()), strict=True):
        assert torch.equal(a, b)


def test_what_the_kernels_do_not_know_goes_to_torch(device):
    def by_kernels(layer, x, **kwargs):
        hidden = tuple(torch.zeros(1, x.shape[1], layer.hidden_size, device=device, dtype=x.dtype) for _ in range(2))
        return "Recur" in str(layer(x, hidden)[0].grad_fn)

    assert by_kernels(layer_of(4, 256, device), draw(2, 3, 4, device=device))
    assert not by_kernels(layer_of(4, 257, device), draw(2, 3, 4, device=device))
    assert not by_kernels(layer_of(4, 8, device).double(), draw(2, 3, 4, device=device, dtype=torch.float64))
    layer = layer_of(4, 8, device)
    with pytest.raises(RuntimeError):
        layer(draw(0, 3, 4, device=device), tuple(torch.zeros(1, 3, 8, device=device) for _ in range(2)))
    with pytest.raises(RuntimeError, match="Expected hidden"):
        layer(draw(2, 3, 4, device=device), tuple(torch.zeros(1, 4, 8, device=device) for _ in range(2)))
    with pytest.raises(RuntimeError, match="input"):
        layer(draw(2, 3, 5, device=device), tuple(torch.zeros(1, 3, 8, device=device) for _ in range(2)))


# ---------------------------------------------------------------- the loss


def loss_and_gradients(tensors, targets, by_torch=False, **how):
    given = [t.detach().requires_grad_() for t in tensors]
    if by_torch:  # in float64, with ignored rows removed
        counts = targets >= 0
        losses = nn.functional.cross_entropy(linear(*given)[counts], targets[counts], reduction="sum")
        loss = losses / counts.sum() if how.get("reduction", "mean") == "mean" else losses
    else:
        loss = vocabulary_loss(*given, targets, **how)
    loss.backward()
    return [loss.detach(), *(t.grad for t in given)]


@pytest.fixture
def block(device, monkeypatch):
    from sngm.models.kernels import softmax

    monkeypatch.setattr(softmax, "BLOCK", 64)  # so that small rows need several blocks


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    ("n", "width", "words", "chunk", "reduction"),
    [(13, 5, 11, None, "mean"), (7, 8, 130, 3, "sum"), (3, 1, 64, 1, "mean"), (6, 7, 65, 6, "mean")],
)
@pytest.mark.usefixtures("block")
def test_the_loss_and_its_gradients_are_those_of_float64(device, dtype, tolerance, n, width, words, chunk, reduction):
    tensors = [draw(*s, device=device, dtype=dtype) for s in ((n, width), (words, width), (words,))]
    targets = torch.randint(words, (n,), generator=torch.Generator().manual_seed(n)).to(device)
    targets[1], targets[-1] = -1, -100
    found = loss_and_gradients(tensors, targets, chunk=chunk, reduction=reduction)
    wanted = loss_and_gradients([t.double() for t in tensors], targets, by_torch=True, reduction=reduction)
    assert [t.dtype for t in found] == [torch.float32, dtype, dtype, dtype]
    for a, b in zip(found, wanted, strict=True):
        close(a, b, tolerance)
    assert not found[1][targets < 0].any()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1e4])
@pytest.mark.usefixtures("block")
def test_sure_and_unsure_predictions_have_all_their_digits(device, scale):
    tensors = [draw(*s, device=device, scale=scale) for s in ((4, 5), (100, 5), (100,))]
    with torch.no_grad():  # in two rows the target is the most likely word
        targets = linear(*tensors).argmax(1) - torch.tensor([0, 0, 1, 1], device=device)
    targets = targets.clamp(min=0)
    found = loss_and_gradients(tensors, targets, reduction="sum")
    wanted = loss_and_gradients([t.double() for t in tensors], targets, by_torch=True, reduction="sum")
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5 * max(1, scale) * float(b.abs().max()) * 0.1 + 1e-30)


def test_one_less_than_a_probability_close_to_one_is_exact(device):
    # visible as the gradient of a bias in a single row: logits 0 and -20
    bias = torch.tensor([0.0, -20.0], device=device)
    tensors = torch.zeros(1, 3, device=device), torch.zeros(2, 3, device=device), bias
    found = loss_and_gradients(tensors, torch.tensor([0], device=device))[3].double().cpu()
    slope = torch.sigmoid(torch.tensor(-20.0, dtype=torch.float64))
    assert torch.allclose(found, torch.stack([-slope, slope]), rtol=1e-5, atol=0)


@pytest.mark.usefixtures("block")
def test_if_no_target_counts_there_is_no_loss_and_no_gradient(device):
    tensors = [draw(*s, device=device) for s in ((3, 5), (100, 5), (100,))]
    for reduction in ("mean", "sum"):
        found = loss_and_gradients(tensors, torch.full((3,), -1, device=device), reduction=reduction)
        assert not any(t.any() for t in found)


@pytest.mark.usefixtures("block")
def test_without_gradients_there_is_but_the_loss(device):
    features, weight, bias = (draw(*s, device=device) for s in ((3, 5), (100, 5), (100,)))
    targets = torch.tensor([4, -1, 99], device=device)
    wanted = loss_and_gradients((features, weight, bias), targets)
    with torch.no_grad():
        assert torch.equal(vocabulary_loss(features, weight, bias, targets), wanted[0])
    features.requires_grad_()
    vocabulary_loss(features, weight, bias, targets).backward()
    assert torch.equal(features.grad, wanted[1])
    assert weight.grad is bias.grad is None
    bias.requires_grad_()
    vocabulary_loss(features.detach(), weight, bias, targets).backward()
    assert torch.equal(bias.grad, wanted[3])


@pytest.mark.usefixtures("block")
def test_what_is_not_finite_or_no_word_shows(device):
    features, weight, bias = (draw(*s, device=device) for s in ((3, 5), (100, 5), (100,)))
    targets = torch.tensor([4, 50, 99], device=device)
    for target in (100, 104, 10**9):
        assert vocabulary_loss(features, weight, bias, targets.where(targets != 50, target)).isnan()
    features[1, 1] = torch.nan
    assert vocabulary_loss(features, weight, bias, targets).isnan()
    features[1, 1] = 0.0
    bias[4] = -torch.inf  # a word with probability 0, which occurs
    assert vocabulary_loss(features, weight, bias, targets) == torch.inf
    bias[4], bias[5:] = 0.0, -torch.inf
    found = vocabulary_loss(features, weight, bias, torch.tensor([4, 0, 3], device=device))
    exact = [t.double() for t in (features, weight, bias)]
    wanted = nn.functional.cross_entropy(linear(*exact), torch.tensor([4, 0, 3], device=device))
    close(found, wanted, 1e-6)


def test_autocast_keeps_the_dtypes_of_parameters(device):
    tensors = [draw(*s, device=device) for s in ((9, 5), (100, 5), (100,))]
    targets = torch.arange(9, device=device)
    wanted = loss_and_gradients([t.double() for t in tensors], targets, by_torch=True)
    with torch.autocast(device, torch.bfloat16):
        found = loss_and_gradients(tensors, targets, chunk=4)
        half = [tensors[0].bfloat16(), *tensors[1:]]
        assert [t.dtype for t in loss_and_gradients(half, targets)][1:3] == [torch.bfloat16, torch.float32]
    assert {t.dtype for t in found} == {torch.float32}
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 1e-2)
    with pytest.raises(RuntimeError, match="dtype"):
        vocabulary_loss(*half, targets)  # as in linear


# ---------------------------------------------------------------- the model


def test_the_model_with_kernels_learns_what_it_learns_without(device, monkeypatch):
    torch.manual_seed(0)
    model = WordLSTM(40, 6, 10, layers=2, dropout=0.0).to(device)
    exact = copy.deepcopy(model).double()
    assert list(model.state_dict()) == list(exact.state_dict())
    tokens = torch.randint(40, (2, 3, 2 * 4), device=device)

    def losses(model):
        """Return the losses of two windows, with the hidden state passed from the first to the second."""
        hidden, total = None, 0
        for part in tokens.split(4, dim=-1):
            features, hidden = model(part[0], hidden)
            total = total + model.loss(features, part[1])
        return total

    found = losses(model)
    found.backward()
    monkeypatch.setattr(sngm.triton_support, "DEVICES", ())
    wanted = losses(exact)
    wanted.backward()
    close(found, wanted, 1e-6)
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert p.grad.dtype == torch.float32, name
        close(p.grad, q.grad, 1e-5)


# ---------------------------------------------------------------- full sizes on a GPU


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


@gpu
@pytest.mark.parametrize("streams", [20, 70, 1000, 2000])  # programs share the first two
@pytest.mark.parametrize(("low", "tolerance"), [(torch.bfloat16, 1.5e-2), (None, 2e-5)])
def test_the_paper_s_layer_on_a_gpu(streams, low, tolerance):
    compare(layer_of(200, 200, "cuda"), 35, streams, tolerance, low=low)


@gpu
@pytest.mark.parametrize("low", [torch.bfloat16, None])
def test_the_same_bits_again_and_out_of_a_cuda_graph(low):
    torch.manual_seed(0)
    model = WordLSTM(dropout=0.0).cuda()
    tokens, targets = torch.randint(33_278, (2, 20, 35), device="cuda")
    targets[3, 5:] = -1
    hidden = tuple(torch.randn_like(h) for h in model.start(20))

    def step():
        with torch.autocast("cuda", low or torch.bfloat16, enabled=low is not None):
            features, after = model(tokens, hidden)
            loss = model.loss(features, targets)
        loss.backward()
        return loss.detach(), *(h.detach() for h in after)

    def gradients():  # an embedding's gradient is summed in no fixed order
        return [p.grad.clone() for name, p in model.named_parameters() if name != "encoder.weight"]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model.zero_grad()
            wanted = [*(t.clone() for t in step()), *gradients()]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        graph.replay()
        assert all(map(torch.equal, [*found, *gradients()], wanted))


@gpu
@pytest.mark.parametrize(("low", "tolerance"), [(torch.bfloat16, 1e-2), (None, 1e-5)])
def test_the_loss_over_all_words_on_a_gpu(low, tolerance):
    n, width, words = 700, 200, 33_278
    tensors = draw(n, width, device="cuda"), draw(words, width, device="cuda", scale=0.1), draw(words, device="cuda")
    targets = torch.randint(words, (n,), device="cuda")
    targets[::9] = -1
    wanted = loss_and_gradients([t.double() for t in tensors], targets, by_torch=True)
    for chunk in (None, 123):
        with torch.autocast("cuda", low or torch.bfloat16, enabled=low is not None):
            found = loss_and_gradients(tensors, targets, chunk=chunk)
        for a, b in zip(found, wanted, strict=True):
            assert (a.double() - b).norm() < tolerance * b.norm()
