"""On a CUDA device: the same references, no waiting for the device, GradScaler, several devices."""

import copy

import pytest
import torch
from methods import CASES, LARGE, PATHS, SHAPES, Twin, make_params, run

import sngm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
WAYS = [path for path in PATHS if path != "fused"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_every_path_equals_the_reference_over_twenty_steps(case, path, dtype):
    name, arguments = CASES[case]
    params = make_params(SHAPES, dtype, device="cuda")
    run(Twin(name, params, arguments, path, groups=[[0, 2, 4, 6, 8], [1, 3, 5, 7]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("case", ["SNGM coupled global", "SNGM coupled tensor", "LARS unscaled", "CLARS", "LAMB"])
def test_every_path_equals_the_reference_on_large_tensors(case, path, dtype):
    name, arguments = CASES[case]
    run(Twin(name, make_params(LARGE, dtype, size=0.001, device="cuda"), arguments, path), size=0.01)


def stepper(case: str, path: str):
    name, arguments = CASES[case]
    params = make_params([(64, 64), (65,), (3, 4, 5, 6)], torch.float32, device="cuda")
    arguments = {**arguments, "lr": torch.tensor(arguments["lr"], device="cuda"), **PATHS[path]}
    of_group = {"adapt": arguments.pop("adapt")} if "adapt" in arguments else {}
    optimizer = getattr(sngm, name)([{"params": params, **of_group}], **arguments)
    for p in params:
        p.grad = torch.randn_like(p)
    norms = {"mean_norms": torch.ones(len(params), device="cuda")} if name == "CLARS" else {}
    return params, optimizer, lambda: optimizer.step(**norms)


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_step_never_waits_for_the_device(case, path):
    params, optimizer, step = stepper(case, path)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
            optimizer.param_groups[0]["lr"].mul_(0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.grad_norm.device.type == "cuda"
    assert int(optimizer.skipped) == 0
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_skipped_step_leaves_weights_and_state_bit_identical(case, path, bad):
    params, optimizer, step = stepper(case, path)
    step()
    before = copy.deepcopy([params, optimizer.state_dict()["state"]])
    good = params[0].grad.clone()
    params[0].grad[0, 0] = bad
    step()
    after = [params, optimizer.state_dict()["state"]]
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    for i, entry in before[1].items():
        assert all(torch.equal(value, after[1][i][key]) for key, value in entry.items())
    assert int(optimizer.skipped) == 1
    params[0].grad = good
    step()
    assert int(optimizer.skipped) == 1
    assert not torch.equal(before[0][0], params[0])


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("mode", ["coupled", "after_norm", "decoupled"])
def test_grad_scaler_overflow_on_the_first_step_costs_nothing_but_the_step(mode, path):
    def build():
        params = make_params([(8, 8), (8,)], torch.float32, device="cuda")
        return params, sngm.SNGM(params, 0.1, weight_decay=0.01, weight_decay_mode=mode, **PATHS[path])

    def loss_of(params):
        return (params[0] @ params[1] - 1.0).square().sum()

    params, optimizer = build()
    twins, twin = build()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)
    for t in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(params)).backward()
        if t == 0:
            params[0].grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if t > 0:
            twin.zero_grad()
            loss_of(twins).backward()
            twin.step()
    assert scaler.get_scale() == 2.0**15
    for a, b in zip(params, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_one_norm_spans_parameters_on_the_host_and_on_the_device():
    here = make_params([(5, 3), (4,)], torch.float32)
    split = [torch.nn.Parameter(here[0].detach().cuda()), torch.nn.Parameter(here[1].detach().clone())]
    one, two = sngm.SNGM(here, 0.1, weight_decay=0.01), sngm.SNGM(split, 0.1, weight_decay=0.01)
    for _ in range(5):
        for a, b in zip(here, split, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.to(b.device)
        one.step()
        two.step()
    for a, b in zip(here, split, strict=True):
        torch.testing.assert_close(a, b.cpu())
    split[1].grad[0] = torch.nan
    before = [p.detach().clone() for p in split]
    two.step()
    assert all(torch.equal(a, b) for a, b in zip(before, split, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_captured_step_replays_with_a_changing_learning_rate(case):
    params, optimizer, step = stepper(case, "capturable")
    twins, twin, twin_step = stepper(case, "capturable")
    with torch.no_grad():
        for a, b in zip(params, twins, strict=True):
            b.copy_(a)
            b.grad.copy_(a.grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    twin_step()  # the capture itself changes nothing
    for t in range(4):
        for a, b in zip(params, twins, strict=True):
            a.grad.normal_()
            if t == 2:
                a.grad.view(-1)[0] = torch.inf
            b.grad.copy_(a.grad)
        for group in (optimizer.param_groups[0], twin.param_groups[0]):
            group["lr"].mul_(0.5)
        graph.replay()
        twin_step()
    assert int(optimizer.skipped) == int(twin.skipped) == 1
    for a, b in zip(params, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
