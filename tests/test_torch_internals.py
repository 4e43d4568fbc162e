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
