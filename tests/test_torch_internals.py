"""Without the private names of torch that sngm uses, steps use fallbacks with the same results."""

import importlib

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from sngm.optim import LAMB, SNGM, heavy_ball, hooks, lamb, torch_internals

USERS = {"fused_sgd_": heavy_ball, "fused_adam_": lamb, "profiler_enabled": hooks, "GLOBAL_HOOKS": hooks}


@pytest.fixture
def poorer_torch(monkeypatch):
    """Remove private names from torch and reload the modules that use them; restore everything at the end."""
    with monkeypatch.context() as patch:
        patch.delattr(torch, "_fused_sgd_")
        patch.delattr(torch, "_fused_adam_")
        patch.delattr(torch.autograd, "_profiler_enabled")
        patch.delattr(torch_optimizer, "_global_optimizer_pre_hooks")
        patch.delattr(torch_optimizer, "_global_optimizer_post_hooks")
        importlib.reload(torch_internals)
    for name, module in USERS.items():
        monkeypatch.setattr(module, name, getattr(torch_internals, name))
    yield
    importlib.reload(torch_internals)


class Sub(torch.Tensor):
    pass


OTHERS = {
    "type": torch.zeros(2, 3).as_subclass(Sub),
    "dtype": torch.zeros(2, 3, dtype=torch.int32),
    "device": torch.zeros(2, 3, device="meta"),
    "dimensions": torch.zeros(1, 2, 3),
    "shape": torch.zeros(3, 2),
    "strides": torch.zeros(3, 2).t(),
    "conjugated lazily": torch.zeros(2, 3, dtype=torch.complex64).conj(),
    "negated lazily": torch._neg_view(torch.zeros(2, 3)),
    "zeros without memory": torch._efficientzerotensor((2, 3)),
    "requires_grad": torch.zeros(2, 3, requires_grad=True),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=list(OTHERS))
@pytest.mark.parametrize("guards", [True, False], ids=["torch's guards", "fallback"])
def test_tensors_with_other_metadata_are_noticed(guards, other, monkeypatch):
    if not guards:
        monkeypatch.setattr(torch_internals, "tensor_guards", None)
    same = torch_internals.same_metadata([torch.zeros(4), torch.zeros(2, 3)])
    assert same(torch.ones(4), torch.ones(2, 3))
    assert not same(torch.ones(4), other)


def trained(cls):
    """Return the parameters after three steps, and the number of calls of a hook."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(40, 7)), torch.nn.Parameter(torch.randn(40))]
    optimizer, calls = cls(params, lr=0.1, weight_decay=0.01), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(3):
        for p in params:
            p.grad = p.detach().sin()
        optimizer.step()
    return params, len(calls)


@pytest.mark.parametrize("cls", [SNGM, LAMB])
def test_steps_are_the_same_without_private_names_of_torch(cls, request):
    expected, _ = trained(cls)
    request.getfixturevalue("poorer_torch")
    assert heavy_ball.fused_sgd_ is None
    assert lamb.fused_adam_ is None
    assert hooks.profiler_enabled()
    assert any(hooks.GLOBAL_HOOKS)
    params, calls = trained(cls)
    torch.testing.assert_close(params, expected)
    assert calls == 3
