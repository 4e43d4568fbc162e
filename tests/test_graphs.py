"""A CUDA graph of the whole training step: forward, backward and the optimizer's step, replayed."""

import pytest
import torch
from harness import RULES

from sngm import CLARS, ExtrapSGD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # gradients are accumulated on the stream of the warm-up, then on that of the capture
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]
WARM_UP = 3
BATCH = (16, 4)


class Trainer:
    """A small model, its optimizer and the input that every step reads."""

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
        """Steps on these batches on a side stream, then one step recorded, which changes nothing."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for x in batches:
                self.optimizer.zero_grad(set_to_none=True)
                self.x.copy_(x)
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)  # so that the graph's own memory holds the gradients
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
