"""CUDA graphs: the user's, of a whole training step, and our own, of the launches of an optimizer step."""

import contextlib
import copy
import threading

import pytest
import torch
from harness import RULES, build, clone_params, same, step
from methods import SHAPES, make_params

from sngm import CLARS, ExtrapSGD
from sngm.optim.kernels import replay

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


# ---------------------------------------------------------------- our own graphs

REPLAYED = [rule for rule in RULES if rule not in ("clars", "extrap-sgd")]  # mean norms may have other addresses
FEW = ["sngm", "lars-momentum", "lamb"]


@contextlib.contextmanager
def launched():
    """Disable CUDA graphs in plans made in this context."""
    replay.ENABLED = False
    try:
        yield
    finally:
        replay.ENABLED = True


@pytest.fixture
def replays(monkeypatch):
    """Return a list that grows by one with each replay; no test before may have failed to capture a graph."""
    if replay.driver() is None:
        pytest.skip("needs CUDA 12.6 and its driver")
    monkeypatch.setattr(replay.Graph, "working", True)
    seen, call = [], replay.Graph.__call__

    def counted(self, stream):
        done = call(self, stream)
        seen.append(done)
        return done

    monkeypatch.setattr(replay.Graph, "__call__", counted)
    yield seen
    assert replay.Graph.working


class Both:
    """An optimizer with replayed steps and a twin with launched ones, which must be bitwise equal."""

    def __init__(self, rule, dtype=torch.float32, lr=None, **settings):
        self.params = make_params(SHAPES, dtype, device="cuda")
        self.twins = clone_params(self.params)
        rates = ({}, {}) if lr is None else ({"lr": lr}, {"lr": copy.deepcopy(lr)})
        self.ours = build(rule, self.params, **settings, **rates[0])
        self.theirs = build(rule, self.twins, **settings, **rates[1])
        self.generator = torch.Generator("cuda").manual_seed(0)

    def groups(self):
        return [optimizer.param_groups[0] for optimizer in (self.ours, self.theirs)]

    def gradients(self):
        return [torch.empty_like(p).normal_(generator=self.generator) for p in self.params]

    def step(self, grads=None):
        grads = self.gradients() if grads is None else grads
        step(self.ours, self.params, grads)
        with launched():
            step(self.theirs, self.twins, grads)
        self.check()

    def check(self):
        assert self.theirs._plan.places[0].replays is None
        assert same(self.ours, self.params, self.theirs, self.twins)
        assert torch.equal(self.ours.grad_norm, self.theirs.grad_norm)
        assert self.ours.skipped == self.theirs.skipped


@pytest.mark.parametrize("kind", [float, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rule", REPLAYED)
def test_replayed_steps_equal_launched_ones_while_rates_and_gradients_change(rule, kind, replays):
    both = Both(rule, lr=0.1 if kind is float else torch.tensor(0.1, dtype=kind, device="cuda"))
    kept = []
    for t in range(10):
        for group in both.groups():
            if kind is float:
                group["lr"] = 0.1 * 0.8**t
            else:
                group["lr"].mul_(0.8)
        grads = both.gradients()
        if t == 6:
            grads[3][0, 0] = torch.inf
        both.step(grads)
        if t % 2:
            kept.append(grads)  # so that some addresses are reused, and some are not
    assert replays == [True] * 8
    assert both.ours.skipped == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("rule", FEW)
def test_replayed_steps_equal_launched_ones_in_every_dtype(rule, dtype, replays):
    both = Both(rule, dtype)
    for _ in range(5):
        both.step()
    assert replays == [True] * 3


def test_replayed_steps_round_at_random_as_launched_ones_do(replays):
    both = Both("sngm", torch.bfloat16, stochastic_rounding=True)
    for _ in range(6):
        both.step()
    assert replays == [True] * 4
    assert int(both.groups()[0]["rounding_step"]) == 6


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("rule", FEW)
def test_replayed_steps_follow_backward_passes(rule, to_none, replays):
    both = Both(rule)
    for t in range(10):
        for optimizer, params in ((both.ours, both.params), (both.theirs, both.twins)):
            with contextlib.nullcontext() if optimizer is both.ours else launched():
                optimizer.zero_grad(set_to_none=to_none)
                sum((p - 0.1 * t).square().sum() for p in params).backward()
                optimizer.step()
        both.check()
    assert replays == [True] * 8


@pytest.mark.parametrize("rule", FEW)
def test_a_gradient_may_go_and_come_back_between_replays(rule, replays):
    both = Both(rule)
    for t in range(10):
        both.step([None if t in (4, 5, 8) and i in (0, 5) else g for i, g in enumerate(both.gradients())])
    assert replays == [True] * 8


def load(both):
    for optimizer in (both.ours, both.theirs):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def add(both):
    new = make_params([(65,), (4, 9)], torch.float32, seed=5, device="cuda")
    for optimizer, params, some in ((both.ours, both.params, new), (both.theirs, both.twins, clone_params(new))):
        optimizer.add_param_group({"params": some, "lr": 0.02})
        params += some


def decay(both):
    for group in both.groups():
        group["weight_decay"] = 0.0 if group["weight_decay"] else 0.1


def move(both):
    for p in both.params + both.twins:
        p.data = p.data.clone()


def replace(both):
    for optimizer in (both.ours, both.theirs):
        for state in optimizer.state.values():
            for key, value in state.items():
                state[key] = value.clone()


@pytest.mark.parametrize("change", [load, add, decay, move, replace], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rule", FEW)
def test_what_changes_between_replays_counts(rule, change, replays):
    both = Both(rule)
    for t in range(12):
        if t in (4, 8):
            change(both)
        both.step()
    only_in_a_table = change is decay and rule != "sngm"  # for sngm it changes the compiled kernel
    assert replays == [True] * (10 if only_in_a_table else 6)


@pytest.mark.parametrize("rule", FEW)
def test_a_gradient_scaler_may_come_and_go_between_replays(rule, replays):
    both = Both(rule)
    kept = []
    for t in range(12):
        for optimizer in (both.ours, both.theirs):
            optimizer.grad_scale = optimizer.found_inf = None
            if t in (4, 5, 9):
                optimizer.grad_scale = torch.full((1,), 8.0, device="cuda")
                optimizer.found_inf = torch.full((1,), float(t == 5), device="cuda")
                kept += [optimizer.grad_scale, optimizer.found_inf]
        both.step()
    assert replays == [True] * 7
    assert both.ours.skipped == 1


@pytest.mark.parametrize("rule", FEW)
def test_a_graph_of_the_user_after_replays_of_ours(rule, replays):
    both = Both(rule, lr=torch.tensor(0.1, device="cuda"))
    for _ in range(4):
        both.step()
    assert replays == [True] * 2
    static = both.gradients()
    for p, q, g in zip(both.params, both.twins, static, strict=True):
        p.grad, q.grad = g, g
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both.ours.step()
    both.check()  # capturing ran nothing
    for t in range(6):
        for g in static:
            g.normal_(generator=both.generator)
        if t % 3 == 2:
            both.ours.step()  # replays our graph, between replays of the user's
        else:
            graph.replay()
        with launched():
            both.theirs.step()
        both.check()
        for group in both.groups():
            group["lr"].mul_(0.8)
    assert replays == [True] * 4


def test_optimizers_have_graphs_of_their_own(replays):
    pairs = [Both(rule) for rule in ("sngm", "lamb", "sngm")]
    for _ in range(5):
        for both in pairs:
            both.step()
    assert replays == [True] * 9
    del pairs[0], both
    for _ in range(2):
        for both in pairs:
            both.step()
    assert replays == [True] * 13


@pytest.mark.parametrize("rule", FEW)
def test_a_copy_of_an_optimizer_makes_its_own_graph(rule, replays):
    both = Both(rule)
    for _ in range(4):
        both.step()
    params, optimizer = copy.deepcopy((both.params, both.ours))
    assert optimizer._plan is None
    for _ in range(5):
        grads = both.gradients()
        both.step(grads)
        step(optimizer, params, grads)
        assert same(optimizer, params, both.ours, both.params)
    assert replays == [True] * (2 + 5 + 3)


@pytest.mark.parametrize("rule", FEW)
def test_replays_go_to_the_current_stream(rule, replays):
    both = Both(rule)
    for _ in range(3):
        both.step()
    grads = both.gradients()
    after = [torch.empty_like(p) for p in both.params]
    for p, g in zip(both.params, grads, strict=True):
        p.grad = torch.zeros_like(g)
    side = torch.cuda.Stream()
    for _ in range(3):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # work on another stream would finish long before
            for p, g in zip(both.params, grads, strict=True):
                p.grad.copy_(g)
            both.ours.step()
            for copied, p in zip(after, both.params, strict=True):
                copied.copy_(p.detach())
        torch.cuda.synchronize()
        with launched():
            step(both.theirs, both.twins, grads)
        both.check()
        assert all(map(torch.equal, after, both.twins))
        for g in grads:
            g.normal_(generator=both.generator)
    assert replays == [True] * 4


def in_a_thread(work):
    failures = []

    def guarded():
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    return thread, failures


@pytest.mark.parametrize("rule", FEW)
def test_steps_may_be_taken_by_threads_that_have_not_used_the_device_before(rule, replays):
    both = Both(rule)
    for _ in range(8):
        grads = both.gradients()
        for p, g in zip(both.params, grads, strict=True):
            p.grad = g
        torch.cuda.synchronize()
        thread, failures = in_a_thread(both.ours.step)
        thread.join()
        assert not failures
        torch.cuda.synchronize()
        with launched():
            step(both.theirs, both.twins, grads)
        both.check()
    assert len(replays) == 6  # if the driver fails for lack of a context in the thread, kernels are launched instead


def test_graphs_are_made_while_another_thread_allocates_and_draws_random_numbers(replays):
    both = Both("lamb")
    stop = threading.Event()

    def disturb():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                torch.cuda.empty_cache()
                drawn = torch.nn.functional.dropout(torch.randn(1 << 16, device="cuda"))
                assert drawn.isfinite().all()

    thread, failures = in_a_thread(disturb)
    try:
        for t in range(60):
            if t % 4 == 0:
                both.ours._plan = None
            both.step()
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert replays == [True] * 30


@pytest.mark.parametrize("rule", FEW)
def test_a_capture_that_fails_leaves_the_steps_to_launches(rule, replays, monkeypatch):
    from sngm.optim.kernels.place import Launch

    both = Both(rule)
    launch, captured = Launch.__call__, []

    def failing(self, pool, stream):
        if stream != torch.cuda.current_stream().cuda_stream:
            captured.append(stream)
            if len(captured) == 2:
                raise RuntimeError("not today")
        launch(self, pool, stream)

    monkeypatch.setattr(Launch, "__call__", failing)
    for _ in range(5):
        both.step()
    assert len(captured) == 2
    assert not replay.Graph.working
    torch.cuda.synchronize()
    replay.Graph.working = True
    monkeypatch.setattr(Launch, "__call__", launch)
    for _ in range(3):
        both.step()
    assert replays == [True] * 2


def test_graphs_take_next_to_no_memory_and_are_given_back(replays):
    both = Both("lamb")
    for t in range(400):
        if t % 4 == 0:
            both.ours._plan = None
        both.step()
        if t == 40:
            torch.cuda.synchronize()
            free, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] <= 2**24
    assert torch.cuda.memory_allocated() - allocated <= 2**20
    assert len(replays) == 200


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler")
@pytest.mark.parametrize("rule", FEW)
def test_a_profiler_sees_launches_after_replays(rule, replays):
    both = Both(rule)
    for _ in range(4):
        both.step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(2):  # a second profile crashes if a graph is incompatible with profilers
        with torch.profiler.profile(activities=activities) as profiler:
            both.ours.step()
            torch.cuda.synchronize()
        with launched():
            both.theirs.step()
        names = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        ran = [name for name in names if name in ("measure", "update", "moments", "along")]
        assert len(ran) == (2 if rule == "sngm" else 3)
        both.check()
        both.step()
    assert replays == [True] * 4
