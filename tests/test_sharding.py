"""Steps on sharded parameters equal those of one process with whole parameters."""

import contextlib
import copy
import functools
import io
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interpreter import STEP, interpreted
from runs import call_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from waiting import PATIENCE

import sngm
from sngm.optim import kernels
from sngm.optim.sharded_norms import local

STEPS = 4
POISONED = 2  # the step in which one rank's gradient has an inf: all must skip it
METHODS = {
    "SNGM": ("SNGM", {"lr": 0.1, "weight_decay": 0.05}),
    "SNGM, foreach": ("SNGM", {"lr": 0.1, "weight_decay": 0.05, "weight_decay_mode": "decoupled", "foreach": True}),
    "SNGM by group": ("SNGM", {"lr": 0.1, "scope": "group", "nesterov": True}),
    "block-wise SNGM": ("SNGM", {"lr": 0.1, "scope": "tensor", "foreach": False}),
    "LARS": ("LARS", {"lr": 5.0, "weight_decay": 0.05}),
    "LARS momentum": ("LARS", {"lr": 0.05, "variant": "momentum"}),
    "CLARS": ("CLARS", {"lr": 1.0}),
    "LAMB": ("LAMB", {"lr": 0.05, "max_grad_norm": 0.5, "weight_decay": 0.05}),
}
SPECTRAL = {  # its matrices must be DTensors
    "spectral SNGM": ("SpectralSNGM", {"lr": 0.1, "polar": "polar-express"}),
    "spectral SNGM, after": ("SpectralSNGM", {"lr": 0.1, "order": "after", "nesterov": True}),
    "spectral SNGM, rows": ("SpectralSNGM", {"lr": 0.1, "ball": "rows"}),
}
ANY_SPLIT = ["SNGM", "SNGM, foreach", "SNGM by group"]  # methods without norms of single tensors
RESUMED = ["SNGM", "LARS momentum", "LAMB", "spectral SNGM, rows"]
EXCHANGES = {"LARS momentum": 2, "LAMB": 2, **dict.fromkeys(SPECTRAL, 2)}  # all-reduces per step; others have one
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


class Net(nn.Module):
    """Two layers, and tensors so small that some of 2 or 4 ranks hold no shard of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.unused = nn.Parameter(torch.ones(2))  # never has a gradient
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) * self.gain


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    return (model(x) - y).square().mean()


def grouped(model: nn.Module, **of_matrices) -> list[dict]:
    named = [(name.split("module.")[-1], p) for name, p in model.named_parameters()]
    matrices = [p for name, p in named if name.endswith(".weight")]
    rest = [p for name, p in named if not name.endswith(".weight")]
    return [{"params": matrices, "weight_decay": 0.1, **of_matrices}, {"params": rest}]


def make(method: str, groups: list[dict], **more) -> torch.optim.Optimizer:
    name, settings = (METHODS | SPECTRAL)[method]
    return getattr(sngm, name)(groups, **settings, **more)


def take(optimizer: torch.optim.Optimizer, method: str) -> None:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    optimizer.step(**({"mean_norms": [0.5 + i for i in range(count)]} if method == "CLARS" else {}))


def poison(grad: Tensor) -> None:
    """Put an inf into a gradient, or into its local shard."""
    (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[:1] = torch.inf


def train(model, optimizer, method: str, *, poisoned: bool = True, steps=range(STEPS)) -> int:
    """Train on the same samples on every rank, and return the number of all-reduces of the last optimizer step."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == POISONED and poisoned:
            for p in model.parameters():
                if p.grad is not None and p.grad.numel():
                    poison(p.grad)
        with CommDebugMode() if step == steps[-1] else contextlib.nullcontext() as traffic:
            take(optimizer, method)
    return traffic.get_comm_counts()[torch.ops.c10d.allreduce_]


@functools.cache
def alone(method: str, steps=range(STEPS)) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    model = Net()
    optimizer = make(method, grouped(model))
    train(model, optimizer, method, steps=steps)
    return {name: p.detach() for name, p in model.named_parameters()}, optimizer


def check(model, optimizer, method: str, exchanges: int | None = None, *, poisoned: bool = True) -> None:
    made = train(model, optimizer, method, poisoned=poisoned)
    by_columns = any(getattr(place, "dim", 0) for p in model.parameters() for place in getattr(p, "placements", ()))
    if method != "spectral SNGM, rows" or not by_columns:  # it has one more for each matrix that is split by columns
        assert made == (EXCHANGES.get(method, 1) if exchanges is None else exchanges), f"{made} all-reduces"
    expected, reference = alone(method)
    for name, p in model.named_parameters():
        close(p.detach().full_tensor() if isinstance(p, DTensor) else p.detach(), expected[name], msg=name)
    assert optimizer.skipped == reference.skipped == 1
    close(optimizer.grad_norm, reference.grad_norm)


# ---------------------------------------------------------------- ways to shard a model


def last() -> bool:
    """Return whether this is the last rank, which has the fewest elements."""
    return dist.get_rank() == dist.get_world_size() - 1


def line(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


def fsdp2(method: str) -> None:
    model = Net()
    fully_shard(model.first, mesh=line())
    fully_shard(model, mesh=line())
    optimizer = make(method, grouped(model))
    check(model, optimizer, method, poisoned=last())
    if last():
        assert model.gain.to_local().numel() == 0
    for p, state in optimizer.state.items():
        for buffer in (b for key, b in state.items() if key != "step"):
            assert isinstance(buffer, DTensor)
            assert buffer.placements == p.placements


def fsdp2_beside_plain(method: str) -> None:
    model = Net()
    fully_shard(model, mesh=line(), ignored_params={model.gain, model.first.bias})
    check(model, make(method, grouped(model)), method, poisoned=last())


def fsdp2_with_needless_group(method: str) -> None:
    model = Net()
    fully_shard(model, mesh=line())
    check(model, make(method, grouped(model), norm_group=dist.group.WORLD), method, poisoned=last())


def tensor_parallel(method: str, mesh=None) -> None:
    model = Net()
    mesh = line() if mesh is None else mesh
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    assert not isinstance(model.gain, DTensor)
    check(model, make(method, grouped(model)), method, poisoned=mesh.get_local_rank() == 0)


def hybrid(method: str) -> None:
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    check(model, make(method, grouped(model)), method, poisoned=last())


def tensor_parallel_in_fsdp2(method: str) -> None:
    model = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    assert model.first.weight.device_mesh.ndim == 2
    assert model.gain.device_mesh.ndim == 1
    check(model, make(method, grouped(model)), method, poisoned=last())


def tensor_parallel_in_ddp(method: str) -> None:
    tensor_parallel(method, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"])


def fsdp1(method: str) -> None:
    model = Net()
    del model.unused  # FSDP1 would give it a zero gradient, and weight decay would change it
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"FSDP1 .* pass norm_group="):
        make(method, grouped(model))._gather()
    adapt = {} if method.startswith(("SNGM", "block")) else {"adapt": True}  # every shard is one-dimensional
    optimizer = make(method, grouped(model, **adapt), norm_group=dist.group.WORLD)
    made = train(model, optimizer, method, poisoned=last())
    assert made == EXCHANGES.get(method, 1)
    expected, reference = alone(method)
    with FullyShardedDataParallel.summon_full_params(model):
        for name, p in model.named_parameters():
            close(p.detach(), expected[name.replace("_fsdp_wrapped_module.", "")], msg=name)
    assert optimizer.skipped == reference.skipped == 1
    close(optimizer.grad_norm, reference.grad_norm)


def zero(method: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    model = Net()
    name, settings = METHODS[method]
    optimizer = ZeroRedundancyOptimizer(
        grouped(model), optimizer_class=getattr(sngm, name), norm_group=dist.group.WORLD, **settings
    )
    train(model, optimizer, method)
    expected, reference = alone(method)
    for name, p in model.named_parameters():
        close(p.detach(), expected[name], msg=name)
    assert optimizer.optim.skipped == 1
    close(optimizer.optim.grad_norm, reference.grad_norm)


def pipeline(method: str, stages: int, norm_group, mesh=None, exchanges: int = 1) -> None:
    """Step each stage's own parameters; gradients come from a whole model that is updated by hand."""

    def piece(t: Tensor) -> Tensor:
        return t.clone() if mesh is None else distribute_tensor(t, mesh, [Shard(0), *[Replicate()] * (mesh.ndim - 1)])

    stage = dist.get_rank() * stages // dist.get_world_size()
    whole = Net()
    names = [name for name, _ in whole.named_parameters()]
    owned = [name for name in names if (0 if name.startswith("first") else stages - 1) == stage]
    pieces = {name: nn.Parameter(piece(whole.get_parameter(name).detach())) for name in owned}
    matrices, rest = ([p for n, p in pieces.items() if n.endswith("weight") is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest}]
    optimizer = make(method, groups, norm_group=norm_group)
    for step in range(STEPS):
        whole.zero_grad()
        loss_of(whole, step).backward()
        for name, p in pieces.items():
            grad = whole.get_parameter(name).grad
            p.grad = None if grad is None else piece(grad)
            if step == POISONED and last() and p.grad is not None:
                poison(p.grad)
        with CommDebugMode() as traffic:
            take(optimizer, method)
        assert traffic.get_total_counts() == exchanges
        for name in names:  # instead of communication between stages
            mine = pieces.get(name)
            value = torch.zeros_like(whole.get_parameter(name)) if mine is None else mine.detach()
            value = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            holders = torch.tensor(float(mine is not None))
            dist.all_reduce(value)
            dist.all_reduce(holders)
            whole.get_parameter(name).data.copy_(value / holders)
    expected, reference = alone(method)
    for name, p in whole.named_parameters():
        close(p.detach(), expected[name], msg=name)
    assert optimizer.skipped == 1
    if owned:  # without parameters the norm is in float32
        close(optimizer.grad_norm, reference.grad_norm)


def stages(method: str) -> None:
    pipeline(method, dist.get_world_size(), dist.group.WORLD)  # with 4 stages the middle ones own nothing


def stages_of_fsdp2(method: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline(method, 2, mesh["pp"].get_group(), mesh["dp"], exchanges=2)


def stages_of_a_square_mesh(method: str) -> None:
    """Use a two-dimensional mesh smaller than the world, which needs its own process group."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    pipeline(method, 2, mesh["pp"].get_group(), mesh["dp", "tp"], exchanges=2)


def stages_of_fsdp2_in_one_group(method: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline(method, 2, dist.group.WORLD, mesh["dp"])


# ---------------------------------------------------------------- single cases


def compare(method: str, share, whole=torch.clone, **more) -> None:
    """Compare steps on this rank's share of every tensor with the share of steps on whole tensors."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(8, 4), (9,), (1, 2, 2)]]
        for _ in range(STEPS + 1)
    ]
    grads[POISONED][0][0, 0] = torch.inf  # only in the share of the first rank

    def run(share, **more):
        params = [nn.Parameter(share(p)) for p in start]
        optimizer = make(method, [{"params": params}], **more)
        for at_step in grads:
            for p, g in zip(params, at_step, strict=True):
                p.grad = share(g)
            take(optimizer, method)
        assert optimizer.skipped == 1
        return params, optimizer.grad_norm

    ours, norm = run(share, **more)
    theirs, whole_norm = run(whole)
    close(norm, whole_norm)
    for piece, p in zip(ours, theirs, strict=True):
        pair = piece.detach(), share(p.detach())
        close(*(t.to_local() if isinstance(t, DTensor) else t for t in pair))


def slices_under_norm_group(method: str) -> None:
    """Give rank r the r-th slice of every tensor, as a plain tensor."""
    world, rank = dist.get_world_size(), dist.get_rank()
    compare(method, lambda t: t.tensor_split(world)[rank].clone(), norm_group=dist.group.WORLD)


def on_a_gpu() -> None:
    torch.cuda.set_device(0)  # all ranks share one GPU
    mesh = line("cuda")
    for method in METHODS:
        compare(method, lambda t: distribute_tensor(t.cuda(), mesh, [Shard(0)], src_data_rank=None), torch.Tensor.cuda)


def partial_gradients() -> None:
    """Check that gradients of partial sums are reduced first."""
    world = dist.get_world_size()
    mesh = line()
    value, grad = torch.arange(1.0, 7.0).double(), torch.arange(6.0).double()
    for placements in ([Shard(0)], [Replicate()]):
        p, twin = nn.Parameter(distribute_tensor(value, mesh, placements)), nn.Parameter(value.clone())
        p.grad = DTensor.from_local(grad / world, mesh, [Partial()])
        twin.grad = grad
        for w in (p, twin):
            sngm.SNGM([w], lr=0.1, weight_decay=0.1).step()
        close(p.detach().full_tensor(), twin.detach())


def complex_and_strided() -> None:
    mesh = line()
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.complex128, torch.float64):
        value, grad = (torch.randn(7, 4, 3, 3, generator=generator, dtype=dtype) for _ in range(2))
        value = value.to(memory_format=torch.channels_last)
        p, twin = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])), nn.Parameter(value.clone())
        p.grad, twin.grad = distribute_tensor(grad, mesh, [Shard(0)]), grad
        for w in (p, twin):
            sngm.LARS([w], lr=0.1, weight_decay=0.1, fused=True).step()
        close(p.detach().full_tensor(), twin.detach())


def extrapolation() -> None:
    def run(model):
        optimizer = sngm.ExtrapSGD(grouped(model), lr=0.1, inner_lr=0.05, weight_decay=0.01)

        def closure(step):
            model.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        for step in range(STEPS):
            optimizer.step([partial(closure, step), partial(closure, step + 10)])
        return optimizer

    model, twin = Net(), Net()
    fully_shard(model, mesh=line())
    close(run(model).grad_norm, run(twin).grad_norm)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        close(p.detach().full_tensor(), q.detach())


def scaled_loss() -> None:
    """Use a GradScaler that leaves unscaling to step(), with an overflow on the last rank only."""
    model = Net()
    fully_shard(model, mesh=line())
    optimizer = make("SNGM", grouped(model), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == POISONED and last():
            poison(model.first.weight.grad)
        scaler.step(optimizer)
        scaler.update()
    expected, _ = alone("SNGM")
    for name, p in model.named_parameters():
        close(p.detach().full_tensor(), expected[name], msg=name)
    assert optimizer.skipped == 1
    assert scaler.get_scale() == 32.0


def scaled_loss_over_a_group() -> None:
    """Use a sharded scaler, which exchanges overflows when it unscales, with an overflow on the last rank."""
    p = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = sngm.SNGM([p], lr=0.1, fused=True, norm_group=dist.group.WORLD)
    scaler = ShardedGradScaler(device="cpu", init_scale=64.0, process_group=dist.group.WORLD)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale((p * (torch.inf if step == POISONED and last() else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 32.0
    close(optimizer.grad_norm, torch.tensor(4.0 * dist.get_world_size(), dtype=torch.float64).sqrt())


def copies_and_saved_state() -> None:
    """Check that deep copies, pickles, and whole or otherwise sharded state continue as the original does."""
    for method in ("SNGM", "LAMB"):
        model = Net()
        fully_shard(model, mesh=line())
        optimizer = make(method, grouped(model))
        train(model, optimizer, method, steps=range(2))
        params = [p for group in optimizer.param_groups for p in group["params"]]
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        whole = copy.deepcopy(saved)
        for entry in whole["state"].values():
            entry.update({key: b.full_tensor() for key, b in entry.items() if isinstance(b, DTensor)})
        elsewhere = copy.deepcopy(saved)
        for entry in elsewhere["state"].values():
            for key in [key for key, b in entry.items() if isinstance(b, DTensor)]:
                entry[key] = entry[key].redistribute(placements=[Replicate()])
        for loaded in (saved, whole, elsewhere):
            twin = make(method, [{"params": g["params"]} for g in optimizer.param_groups])
            twin.load_state_dict(loaded)
            for p in params:
                for key, b in optimizer.state[p].items():
                    there = twin.state[p][key]
                    assert type(there) is type(b)
                    assert key == "step" or there.placements == b.placements
                    assert torch.equal(*(t.to_local() if key != "step" else t for t in (there, b)))
        plain = make(method, grouped(Net()))
        plain.load_state_dict(saved)  # sharded state into plain parameters
        for p, q in zip(params, (q for g in plain.param_groups for q in g["params"]), strict=True):
            for key in plain.BUFFERS:
                assert torch.equal(plain.state[q][key], optimizer.state[p][key].full_tensor())
        grads = [p.grad for p in params]
        optimizer.zero_grad()  # torch cannot copy all gradients of FSDP2
        twin = copy.deepcopy(optimizer)
        twins = [p for group in twin.param_groups for p in group["params"]]
        for old, new, grad in zip(params, twins, grads, strict=True):
            old.grad = new.grad = grad
        take(optimizer, method)
        take(twin, method)
        for old, new in zip(params, twins, strict=True):
            assert old is not new
            assert torch.equal(old.detach().to_local(), new.detach().to_local())


def a_fresh_optimizer_asked_for_its_state() -> None:
    model = Net()
    fully_shard(model, mesh=line())
    before = [p.detach().clone() for p in model.parameters()]
    state = get_optimizer_state_dict(model, make("SNGM", grouped(model)))
    assert state["state"]["first.weight"]["momentum_buffer"].placements == (Shard(0),)
    assert all(torch.equal(p.to_local(), q.to_local()) for p, q in zip(model.parameters(), before, strict=True))


def parameters_put_in_place_of_others() -> None:
    """Replace parameters in the groups, as trainers do that shard a model after the optimizer was created."""
    model = Net()
    optimizer = make("SNGM", grouped(model))
    train(model, optimizer, "SNGM", steps=range(1))
    model = Net()
    fully_shard(model, mesh=line())
    for group, new in zip(optimizer.param_groups, grouped(model), strict=True):
        group["params"] = new["params"]
    optimizer.state.clear()
    check(model, optimizer, "SNGM", poisoned=last())


def squares_that_one_rank_cannot_keep() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = sngm.LAMB([p], lr=0.1, norm_group=dist.group.WORLD)
    p.grad = torch.full((2, 2), 1e25) if dist.get_rank() == 0 else None
    optimizer.step()
    assert optimizer.skipped == 1


def refusals() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = line()
    summed = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(TypeError, match=r"params\[0\] is a DTensor of partial sums"):
        sngm.SNGM([nn.Parameter(summed)], lr=0.1)
    own = [nn.Parameter(torch.ones(2)) for _ in range(1 + rank)]
    optimizer = sngm.LARS(own, lr=0.1, norm_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=f"got 1 to {world} .{rank + 1} on this rank.*use norm_group=None"):
        optimizer.step()
    if world != 4:
        return
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = [nn.Parameter(distribute_tensor(torch.ones(4), square[name], [Shard(0)])) for name in ("dp", "tp")]
    with pytest.raises(ValueError, match=r"neither of which contains the other.*spans both"):
        sngm.SNGM(both, lr=0.1).step()
    over_all = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="leave norm_group out"):
        sngm.SNGM([over_all], lr=0.1, norm_group=square["dp"].get_group()).step()


# ---------------------------------------------------------------- the kernels, in Triton's interpreter


def by_halves(t: Tensor, i: int) -> Tensor:
    return t.tensor_split(dist.get_world_size())[dist.get_rank()].clone()


def by_dtensors(t: Tensor, i: int) -> Tensor:
    """Return sharded tensors, the third empty on the last rank; replicated ones; and plain copies on every rank."""
    placement, t = [Shard(0), Shard(-1), Shard(0), Replicate(), None][i], t.clone()
    return t if placement is None else distribute_tensor(t, line(), [placement], src_data_rank=None)


def steps_by(method: str, share, grads: list[list], path: dict, **more) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Take steps on shares of tensors: the first of `grads` are the parameters, the others the gradients."""
    params = [nn.Parameter(share(p, i)) for i, p in enumerate(grads[0])]
    name, settings = METHODS[method]
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}]
    optimizer = getattr(sngm, name)(groups, **{**settings, "foreach": None, **path}, **more)
    for at_step in grads[1:]:
        for i, (p, g) in enumerate(zip(params, at_step, strict=True)):
            p.grad = None if g is None else share(g, i)
        take(optimizer, method)
    return params, optimizer


def kernels_exchange(split, method: str) -> None:
    """Compare kernels on shards with foreach on whole tensors, and with foreach on the same shards."""
    more = {"norm_group": dist.group.WORLD} if split is by_halves else {}
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 4), (9,), (1, 2, 2), (3, 5), (4, 2)]
    grads = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(4)]
    grads[1][1] = grads[3][3] = None
    grads[2][0][0, 0] = torch.nan  # only in the shard of the first rank
    pieces, ours = steps_by(method, split, grads, {}, **more)
    assert ours._shards.active
    whole, theirs = steps_by(method, lambda t, i: t.clone(), grads, {"foreach": True})
    assert ours.skipped == theirs.skipped == 1
    close(ours.grad_norm, theirs.grad_norm)
    for i, (p, q) in enumerate(zip(pieces, whole, strict=True)):
        close(*(local(t.detach()) for t in (p, split(q.detach(), i))), msg=f"{i}")
    grads[2][0].nan_to_num_(1.0)
    for at_step in grads[1:]:
        at_step[2] = None  # an empty gradient on the last rank would cause a new plan
    if last():  # the only rank without these gradients: sums of the previous step must not count
        grads[2][0] = grads[3][0] = grads[3][4] = None
    (pieces, ours), (others, theirs) = (
        steps_by(method, split, grads, path, **more) for path in ({}, {"foreach": True})
    )
    assert ours._layout is not None
    assert theirs._layout is None
    close(ours.grad_norm, theirs.grad_norm)
    for i, (p, q) in enumerate(zip(pieces, others, strict=True)):
        close(local(p.detach()), local(q.detach()), msg=f"{i}, with gradients missing")


def kernels_take_a_group_between_steps() -> None:
    p = nn.Parameter(torch.ones(8))
    optimizer = sngm.SNGM([p], lr=0.1)
    for group, norm in ((None, 8.0), (dist.group.WORLD, 16.0), (None, 8.0)):
        optimizer.norm_group = group
        p.grad = torch.ones(8)
        optimizer.step()
        assert optimizer._layout is not None
        close(optimizer.grad_norm.double().square(), torch.tensor(norm).double(), rtol=1e-6)


def kernels_sum_a_partial_gradient() -> None:
    """The layout of earlier steps, whose gradients were replicated, must not be used for a partial one."""
    mesh, layouts = line(), []
    params = [nn.Parameter(distribute_tensor(torch.ones(8), mesh, [place])) for place in (Replicate(), Shard(0))]
    optimizer = sngm.SNGM(params, lr=0.1)
    for part in (None, None, torch.full((8,), 1.0 / dist.get_world_size())):
        for p in params:
            p.grad = distribute_tensor(torch.ones(8), mesh, p.placements)
        if part is not None:
            params[0].grad = DTensor.from_local(part, mesh, [Partial()])
        optimizer.step()
        layouts.append(optimizer._layout)
        close(optimizer.grad_norm.double(), torch.tensor(4.0).double(), rtol=1e-6)
    assert layouts[0] is layouts[1] is not None


def a_copy_compiled_at_once_uses_the_group() -> None:
    p = nn.Parameter(torch.ones(8))
    twin = copy.deepcopy(sngm.SNGM([p], lr=0.1, norm_group=dist.group.WORLD))
    twin.param_groups[0]["params"][0].grad = torch.ones(8)
    torch.compile(twin.step, backend="eager")()
    assert twin.grad_norm == 4.0


def row_norms_are_where_their_rows_are() -> None:
    """Loaded from a checkpoint of whole tensors, also while frozen, or kept when DTensors take the place of tensors."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(6)]
    for place in (Shard(0), Shard(1), Replicate()):

        def split(t: Tensor) -> DTensor:
            return distribute_tensor(t.clone(), line(), [place])  # noqa: B023

        def steps(optimizer, share, some) -> Tensor:
            p = optimizer.param_groups[0]["params"][0]
            for g in some:
                p.grad = share(g)
                optimizer.step()
            return p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()

        whole = sngm.SpectralSNGM([nn.Parameter(start.clone())], lr=0.1, ball="rows")
        at_half = steps(whole, torch.clone, grads[:2]).clone()
        loaded = nn.Parameter(split(at_half), requires_grad=False)
        optimizer = sngm.SpectralSNGM([loaded], lr=0.1, ball="rows")
        optimizer.load_state_dict(copy.deepcopy(whole.state_dict()))
        replaced = copy.deepcopy(whole)
        replaced.param_groups[0]["params"] = [nn.Parameter(split(at_half))]
        expected = steps(whole, torch.clone, grads[2:])
        loaded.requires_grad_(True)
        for there in (optimizer, replaced):
            close(steps(there, split, grads[2:]), expected)
            row_norm = there.state[there.param_groups[0]["params"][0]]["row_norm"]
            assert row_norm.placements == ((place if place == Shard(0) else Replicate()),)
            close(row_norm.full_tensor(), next(iter(whole.state.values()))["row_norm"])


BY_KERNELS = {
    **{
        f"{split.__name__}, {method}": partial(kernels_exchange, split, method)
        for split in (by_halves, by_dtensors)
        for method in METHODS
        if method != "SNGM, foreach"
    },
    "kernels_take_a_group_between_steps": kernels_take_a_group_between_steps,
    "kernels_sum_a_partial_gradient": kernels_sum_a_partial_gradient,
    "a_copy_compiled_at_once_uses_the_group": a_copy_compiled_at_once_uses_the_group,
}


FACTS = [
    partial_gradients,
    complex_and_strided,
    extrapolation,
    scaled_loss,
    scaled_loss_over_a_group,
    copies_and_saved_state,
    a_fresh_optimizer_asked_for_its_state,
    parameters_put_in_place_of_others,
    row_norms_are_where_their_rows_are,
    squares_that_one_rank_cannot_keep,
    refusals,
    *([on_a_gpu] if torch.cuda.is_available() else []),
]
ALWAYS = [fsdp2, fsdp2_beside_plain, tensor_parallel, fsdp1, slices_under_norm_group]
SPLITS = {
    2: [*ALWAYS, fsdp2_with_needless_group],
    4: [*ALWAYS, hybrid, tensor_parallel_in_fsdp2, tensor_parallel_in_ddp],
}
SPLITS_BY_OWNER = {
    2: [zero, stages],
    4: [zero, stages, stages_of_fsdp2, stages_of_fsdp2_in_one_group, stages_of_a_square_mesh],
}


def cases(world: int) -> dict:
    chosen = {f"{split.__name__}, {method}": partial(split, method) for split in SPLITS[world] for method in METHODS}
    for split in SPLITS_BY_OWNER[world]:
        chosen.update({f"{split.__name__}, {method}": partial(split, method) for method in ANY_SPLIT})
    for split in (split for split in SPLITS[world] if split not in (fsdp1, slices_under_norm_group)):
        chosen.update({f"{split.__name__}, {method}": partial(split, method) for method in SPECTRAL})
    return chosen | {fact.__name__: fact for fact in FACTS}


@contextlib.contextmanager
def joined():
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    yield
    dist.destroy_process_group()


def work(chosen: list[str]) -> None:
    with joined():
        for name, case in (cases(dist.get_world_size()) | BY_KERNELS).items():
            if name in chosen:
                print(name, flush=True)
                case()


def work_by_kernels() -> None:
    with interpreted(*STEP, chooser=kernels):
        work(list(BY_KERNELS))


def test_fsdp2_on_two_processes_takes_the_steps_of_one():
    chosen = [
        "fsdp2, SNGM",
        "fsdp2, LARS",
        "row_norms_are_where_their_rows_are",
        "squares_that_one_rank_cannot_keep",
        "scaled_loss_over_a_group",
    ]
    call_ranks(2, work, chosen)


@pytest.mark.slow
def test_kernels_on_two_processes_take_the_steps_of_one():
    pytest.importorskip("triton")
    call_ranks(2, work_by_kernels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dtensors_on_a_gpu_take_the_steps_of_plain_tensors():
    call_ranks(2, work, ["on_a_gpu"])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_way_to_split_a_model_takes_the_steps_of_one_process(world):
    call_ranks(world, work, list(cases(world)))


# ---------------------------------------------------------------- checkpoints


def go_on(method: str, folder: str, steps: range, *, sharded: bool, load: bool, save: bool) -> dict[str, Tensor]:
    model = Net()
    if load:  # NaN remains in what is not loaded
        for p in model.parameters():
            p.data.fill_(torch.nan)
    if sharded:
        fully_shard(model, mesh=line())
    optimizer = make(method, grouped(model))
    where = f"{folder}/{method}"
    if load:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=where)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    train(model, optimizer, method, steps=steps)
    if save:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=where)
    return {
        name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()
    }


def part(folder: str, steps: range, load: bool) -> None:
    with joined():
        for method in RESUMED:
            end = go_on(method, folder, steps, sharded=True, load=load, save=not load)
            if load:
                for name, expected in alone(method, range(steps.stop))[0].items():
                    close(end[name], expected, msg=f"{method}: {name}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about a single process
def test_a_checkpoint_of_four_processes_goes_on_in_two_and_in_one(tmp_path):
    before, after = range(3), range(3, 5)
    call_ranks(4, part, str(tmp_path), before, False)
    for count in (2, 1):
        call_ranks(count, part, str(tmp_path), after, True)
    for method in RESUMED:
        end = go_on(method, str(tmp_path), after, sharded=False, load=True, save=False)
        for name, expected in alone(method, range(after.stop))[0].items():
            close(end[name], expected, msg=f"{method}: {name}")
