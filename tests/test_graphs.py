"""CUDA graphs of whole training steps."""

import pytest
import torch
from harness import RULES

from sngm import CLARS, ExtrapSGD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # gradients are accumulated on the warm-up's stream, then on the capture's
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]
WARM_UP = 3
BATCH = (16, 4)


class Trainer:
    """A small model, its optimizer, and the input tensor that every step reads."""

    def __init__(self, rule):
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        self.model = torch.nn.Sequential(*layers).cuda()
        self.params = list(self.model.parameters())
        cls, settings = RULES[rule]
        self.lr = torch.tensor(settings["lr"], device="cuda")
        self.optimizer = cls(self.params, **{**settings, "lr": self.lr}, capturable=True)
        self.x = torch.zeros(BATCH, device="cuda")

    def backward(self):
        (self.model(self.x) - self.x.sum(1, keepdim=True)).square().mean().backward()

    def step(self):
        if isinstance(self.optimizer, ExtrapSGD):
            self.optimizer.step([self.backward, self.backward])
            return
        self.backward()
        norms = {}
        if isinstance(self.optimizer, CLARS):
            norms["mean_norms"] = torch.stack([p.grad.norm() + 0.5 for p in self.params])
        self.optimizer.step(**norms)

    def capture(self, batches):
        """Take steps on these batches on a side stream, then capture one step, which changes nothing."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for x in batches:
                self.optimizer.zero_grad(set_to_none=True)
                self.x.copy_(x)
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)  # so that gradients are allocated in the graph's memory pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, generator=generator).cuda() for _ in range(count)]


@pytest.mark.parametrize("overflow", [False, True], ids=["finite", "overflow"])
@pytest.mark.parametrize("rule", RULES)
def test_a_replayed_training_step_trains_as_an_eager_one(rule, overflow):
    captured, eager = Trainer(rule), Trainer(rule)
    data = batches(WARM_UP + 6)
    graph = captured.capture(data[:WARM_UP])
    for t, x in enumerate(data):
        if overflow and t == WARM_UP + 2:
            x[0, 0] = torch.inf
        eager.optimizer.zero_grad(set_to_none=True)
        eager.x.copy_(x)
        eager.step()
        if t >= WARM_UP:
            before = [p.detach().clone() for p in captured.params]
            captured.x.copy_(x)
            graph.replay()
            unchanged = all(map(torch.equal, before, captured.params))
            assert unchanged == (overflow and t == WARM_UP + 2)
            torch.testing.assert_close(
                captured.optimizer.grad_norm, eager.optimizer.grad_norm, rtol=1e-5, atol=0.0, equal_nan=True
            )
            for trainer in (captured, eager):
                trainer.lr.fill_(float(trainer.lr) * 0.8)
    assert int(captured.optimizer.skipped) == int(eager.optimizer.skipped) == overflow
    for a, b in zip(captured.params, eager.params, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


@pytest.mark.parametrize("rule", ["sngm", "lars-momentum", "lamb"])
def test_eager_steps_and_replays_take_turns(rule):
    captured, eager = Trainer(rule), Trainer(rule)
    data = batches(WARM_UP + 6)
    graph = captured.capture(data[:WARM_UP])
    held = [p.grad for p in captured.params]  # in the graph's memory
    for t, x in enumerate(data):
        eager.optimizer.zero_grad(set_to_none=True)
        eager.x.copy_(x)
        eager.step()
        if t < WARM_UP:
            continue
        captured.x.copy_(x)
        if t % 2:
            graph.replay()
        else:  # with gradients at other addresses than the graph's
            captured.optimizer.zero_grad(set_to_none=True)
            captured.step()
            for p, grad in zip(captured.params, held, strict=True):
                p.grad = grad
    for a, b in zip(captured.params, eager.params, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


@pytest.mark.parametrize("rule", ["sngm", "lamb"])
def test_replays_go_on_after_the_model_was_moved_in_memory(rule):
    """The graph writes to the memory that it captured, and that memory is held."""
    trainer = Trainer(rule)
    data = batches(WARM_UP + 2)
    graph = trainer.capture(data[:WARM_UP])
    before = [p.data for p in trainer.params]
    after = [p.clone() for p in before]
    for p in trainer.params:
        p.data = p.data.clone()
    torch.cuda.empty_cache()
    trainer.x.copy_(data[WARM_UP])
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, trainer.params, after))
    assert not any(map(torch.equal, before, after))
