"""Compiled steps: one graph, compiled once for all learning rates, with the results of eager steps."""

import itertools
import os
import shutil

import pytest
import torch
from harness import CASES, make_params
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import sngm

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
# both use the same tracing, autograd lowering and functionalization; only the generated code differs
BACKEND = {"cpu": "aot_eager", "cuda": "inductor"}
# 16 rounding errors of float32: on a GPU the compiler fuses multiplications and additions
TOLERANCE = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-8, torch.float64: 1e-12}
SHAPES = [(3, 4), (), (70, 70)]  # the last is larger than one piece of norms
# one case for each kind of arithmetic
QUICK = [
    "SNGM coupled global",
    "SNGM after_norm group nesterov",
    "SNGM decoupled tensor",
    "LARS you2017",
    "LARS unscaled",
    "LARS momentum",
    "CLARS",
    "LAMB",
]
FAST = ["SNGM coupled global", "CLARS"]  # the others run in the slow tests, or every night
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # from inductor
    pytest.mark.filterwarnings("ignore:.torch.jit.script.*is deprecated:DeprecationWarning"),  # from inductor's imports
    # schedulers count steps in an attribute of the optimizer, which a compiled step cannot set
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step..` before `optimizer.step"),
]


@pytest.fixture(autouse=True)
def _compile_once():
    """Reset torch.compile, and raise an error on recompilation."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def build(case, dtype, device, **settings):
    """Return parameters and an optimizer with two groups; learning rates are tensors."""
    name, arguments = CASES[case]
    arguments = {**arguments, **settings}
    of_groups = {"adapt": arguments.pop("adapt")} if "adapt" in arguments else {}
    params = make_params(dtype, SHAPES, size=0.1, device=device)
    lrs = [torch.tensor(factor * arguments["lr"], device=device) for factor in (1.0, 0.5)]
    groups = [{"params": some, "lr": lr, **of_groups} for some, lr in zip((params[:2], params[2:]), lrs, strict=True)]
    return params, getattr(sngm, name)(groups, **arguments)


def graphs():
    return counters["stats"]["unique_graphs"]


def same_numbers(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        error = (a.detach().double() - b.detach().double()).norm()
        assert error <= TOLERANCE[a.dtype] * b.detach().double().norm(), f"off by {error / b.double().norm():.1e}"


def follow(case, dtype, device, backend=None, **settings):
    """Compare steps of an eager and a compiled optimizer, with schedulers, cleared gradients and one skipped step."""
    params, optimizer = build(case, dtype, device, **settings)
    twins, twin = build(case, dtype, device, **settings)
    step = torch.compile(twin.step, backend=backend or BACKEND[device], fullgraph=True)
    schedulers = [LambdaLR(o, lambda t: 0.8**t) for o in (optimizer, twin)]
    generator = torch.Generator().manual_seed(1)
    for t in range(5):
        grads = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(device, dtype) for p in params]
        if t == 2:
            grads[0][0, 0] = torch.inf
        for p, q, g in zip(params, twins, grads, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        given = {}
        if CASES[case][0] == "CLARS":
            given["mean_norms"] = torch.stack([g.double().norm() + 0.5 for g in grads])
        before = [p.detach().clone() for p in twins]
        optimizer.step(**given)
        step(**given)
        assert all(map(torch.equal, before, twins)) == (t == 2), (
            "the step that is not finite, and only that, is skipped"
        )
        torch.testing.assert_close(twin.grad_norm, optimizer.grad_norm, rtol=1e-6, atol=0.0)
        for scheduler, o in zip(schedulers, (optimizer, twin), strict=True):
            scheduler.step()
            o.zero_grad(set_to_none=True)
    assert int(twin.skipped) == int(optimizer.skipped) == 1
    assert graphs() == 1
    same_numbers(twins, params)
    for p, q in zip(params, twins, strict=True):
        ours, theirs = twin.state[q], optimizer.state[p]
        assert ours.keys() == theirs.keys()
        same_numbers(ours.values(), theirs.values())


def tier(case):
    if case in FAST:
        return []
    return [pytest.mark.slow if case in QUICK else pytest.mark.nightly]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, marks=tier(case)) for case, dtype in zip(CASES, itertools.cycle(TOLERANCE))],
)
def test_a_compiled_step_has_the_numbers_of_an_eager_one(case, dtype, device):
    follow(case, dtype, device)


@pytest.mark.parametrize("case", ["SNGM coupled global", "NSGDM", "LAMB clipped"])
def test_no_foreach_call_of_a_compiled_step_has_a_one_element_tensor_beside_others(case):
    """On a GPU, inductor's kernel for such a call can read a coefficient before it is written."""
    sizes = []

    def look(graph, _):
        calls = [node.args[0] for node in graph.graph.nodes if "_foreach_" in str(node.target)]
        sizes.extend([tensor.meta["example_value"].numel() for tensor in tensors] for tensors in calls)
        return graph

    params, optimizer = build(case, torch.float32, "cpu")
    for p in params:
        p.grad = torch.ones_like(p)
    torch.compile(optimizer.step, backend=look, fullgraph=True)()
    assert [1] in sizes
    assert not [found for found in sizes if 1 in found and len(found) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case",
    [
        case if case in (*FAST, "LARS momentum", "LAMB") else pytest.param(case, marks=pytest.mark.nightly)
        for case in QUICK
    ],
)
def test_a_compiled_step_has_the_numbers_of_one_that_takes_a_tensor_at_a_time(case, device):
    follow(case, torch.float64, device, foreach=False)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["SNGM coupled global", *(pytest.param(case, marks=pytest.mark.nightly) for case in ("LARS momentum", "LAMB"))],
)
def test_inductor_gives_the_numbers_of_an_eager_step(case):
    follow(case, torch.float32, "cpu", backend="inductor")


def model_and_optimizer(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
    return model, sngm.SNGM(model.parameters(), lr=torch.tensor(0.1, device=device), weight_decay=0.01)


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def compiled_apart(model, optimizer, backend):
    """Compile the model and the step separately."""
    forward = torch.compile(model, backend=backend, fullgraph=True)
    step = torch.compile(optimizer.step, backend=backend, fullgraph=True)

    def train(x):
        loss_of(forward, x).backward()
        step()
        optimizer.zero_grad()

    return train


def compiled_together(model, optimizer, backend):
    """Compile one function, in which torch breaks the graph at backward and at zero_grad."""

    def train(x):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return torch.compile(train, backend=backend)


def compiled_whole(model, optimizer, backend):
    """Compile forward, backward and step into one graph."""

    step = optimizer.step  # before a scheduler wraps it in a function that torch does not trace

    def forward_backward_step(x):
        loss_of(model, x).backward()
        step()

    whole = torch.compile(forward_backward_step, backend=backend, fullgraph=True)

    def train(x):
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            whole(x)
        optimizer.zero_grad()

    return train


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [compiled_apart, compiled_together, compiled_whole])
def test_a_compiled_training_step_trains_as_an_eager_one(compiled, device):
    if compiled is compiled_whole and not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch cannot trace backward")
    model, optimizer = model_and_optimizer(device)
    twin_model, twin = model_and_optimizer(device)
    train = compiled(twin_model, twin, BACKEND[device])
    schedulers = [CosineAnnealingLR(o, 10) for o in (optimizer, twin)]
    generator = torch.Generator().manual_seed(1)
    for t in range(5):
        x = torch.randn(16, 4, generator=generator).to(device)
        if t == 2:
            x[0, 0] = torch.inf
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(x)
        for scheduler in schedulers:
            scheduler.step()
    assert int(twin.skipped) == int(optimizer.skipped) == 1
    torch.testing.assert_close(twin.grad_norm, optimizer.grad_norm, rtol=1e-5, atol=0.0)
    for a, b in zip(twin_model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_learning_rate_that_is_a_number_is_compiled_in():
    params = make_params(torch.float32, [(3, 4)])
    twins = make_params(torch.float32, [(3, 4)])
    optimizer, twin = (sngm.SNGM(some, lr=0.1) for some in (params, twins))
    step = torch.compile(twin.step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for t in range(2):
            for p in (params[0], twins[0]):
                p.grad = torch.ones_like(p)
            for o in (optimizer, twin):
                o.param_groups[0]["lr"] = 0.1 / (t + 1)
            optimizer.step()
            step()
    assert graphs() == 2
    same_numbers(twins, params)


@pytest.mark.slow
def test_a_parameter_that_thaws_is_compiled_in_with_fresh_state():
    params, optimizer = build("SNGM coupled global", torch.float32, "cpu")
    twins, twin = build("SNGM coupled global", torch.float32, "cpu")
    step = torch.compile(twin.step, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for t in range(4):
            for i, (p, q) in enumerate(zip(params, twins, strict=True)):
                if i != 1 or t >= 2:
                    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
            optimizer.step()
            step()
    same_numbers(twins, params)
    same_numbers(
        [twin.state[q]["momentum_buffer"] for q in twins], [optimizer.state[p]["momentum_buffer"] for p in params]
    )
