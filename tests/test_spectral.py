"""SpectralSNGM: its float64 reference on every path, its bounds, its limits, shards, compilation and checkpoints."""

import copy

import pytest
import torch

from sngm import SpectralSNGM
from sngm.optim import reference, spectral
from sngm.optim.spectral import POLAR, newton_schulz, polar_factors, row_norms

SHAPES = [(8, 5), (5, 8), (4, 3, 3, 3), (7,), (), (8, 5)]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
PATHS = {"default": {}, "foreach": {"foreach": True}, "single": {"foreach": False}, "capturable": {"capturable": True}}


def make(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def gradients(t, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + t)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.3, "nesterov": True},
        {"order": "after", "weight_decay": 0.3},
        {"order": "after", "nesterov": True, "maximize": True},
        {"order": "after", "momentum": 0.0},
        {"momentum": 0.0, "maximize": True, "vector_scale": 1.0},
        {"polar": "polar-express", "weight_decay": 0.1},
    ],
    ids=str,
)
def test_every_path_equals_the_reference(settings, path):
    params = make()
    w, u = [p.detach().clone() for p in params], [torch.zeros_like(p) for p in params]
    optimizer = SpectralSNGM(params, lr=0.1, **settings, **PATHS[path])
    names = {"momentum": "beta", "weight_decay": "wd", "vector_scale": "rho"}
    rule = {names.get(key, key): value for key, value in settings.items() if key != "polar"}
    triples = POLAR[settings.get("polar", "muon")]
    for t in range(4):
        grads = gradients(t)
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))
        w, u = reference.spectral_sngm(w, u, grads, eta=0.1, triples=triples, **rule)
    for p, there in zip(params, w, strict=True):
        assert (p - there).norm() <= 1e-11 * there.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row_beta", [0.0, 0.9])
@pytest.mark.parametrize("settings", [{}, {"order": "after", "nesterov": True}, {"maximize": True}], ids=str)
def test_each_group_has_its_own_ball(settings, row_beta, path, device):
    params = [torch.nn.Parameter(p.detach().to(device)) for p in make()]
    balls = ["rows", "euclidean", "rows", "rows", None, "spectral"]
    w, u = [p.detach().clone() for p in params], [torch.zeros_like(p) for p in params]
    groups = [{"params": [p], "ball": ball} for p, ball in zip(params, balls, strict=True)]
    optimizer = SpectralSNGM(groups, lr=0.1, weight_decay=0.2, row_beta=row_beta, **settings, **PATHS[path])
    rows = [{} for _ in params]
    settings = {**settings, "balls": balls, "rows": rows, "row_beta": row_beta}
    for t in range(5):
        grads = [(g * 3.0**t).to(device) for g in gradients(t)]
        grads[0][3 + t % 2] = 0.0  # a token that is not in the batch
        grads[2][t % 4] = torch.nan if t == 3 else 0.0
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
        if t != 3:  # the NaN makes the optimizer skip this step
            w, u = reference.spectral_sngm(w, u, grads, eta=0.1, wd=0.2, triples=POLAR["muon"], **settings)
    for i, (p, there) in enumerate(zip(params, w, strict=True)):
        assert (p - there).norm() <= 1e-11 * there.norm()
        kept = optimizer.state[p].get("row_norm", torch.zeros(0)).flatten().tolist()
        assert kept == pytest.approx([rows[i].get(k, 0.0) for k in range(len(kept))], rel=1e-12)
        assert len(kept) == (len(p) if row_beta and balls[i] == "rows" and p.ndim > 1 else 0)


@pytest.mark.parametrize(("row_beta", "limit"), [(0.0, 1.0), (0.75, 2.0)])
def test_rows_stay_in_their_ball(row_beta, limit):
    w = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    optimizer = SpectralSNGM([w], lr=0.1, momentum=0.0, ball="rows", row_beta=row_beta)
    lengths = []
    for t in range(20):
        before = w.detach().clone()
        w.grad = gradients(t)[0][:3, :2] * 10.0 ** (30 * (t % 5 == 4))
        optimizer.step()
        lengths.append((w - before).norm(dim=1).max().item() / 0.1)
    assert max(lengths) == pytest.approx(limit, rel=1e-6)


@pytest.mark.parametrize("order", ["before", "after"])
def test_polar_express_is_the_exact_polar_factor(order):
    params = make()
    w, u = [p.detach().clone() for p in params], [torch.zeros_like(p) for p in params]
    optimizer = SpectralSNGM(params, lr=0.1, polar="polar-express", order=order)
    for t in range(3):
        for p, g in zip(params, gradients(t), strict=True):
            p.grad = g
        optimizer.step()
        w, u = reference.spectral_sngm(w, u, gradients(t), eta=0.1, order=order)
    for p, there in zip(params, w, strict=True):
        assert (p - there).norm() <= 1e-10 * there.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ball", [None, "rows"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_low_precision_parameters_have_float32_state_and_one_rounding(order, ball, dtype):
    params, exact = make(dtype), [p.detach().double() for p in make(dtype)]
    optimizer = SpectralSNGM(params, lr=0.1, order=order, ball=ball)
    state = [torch.zeros_like(p) for p in exact]
    grads = gradients(0, dtype)
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer.step()
    w, _ = reference.spectral_sngm(
        exact, state, [g.double() for g in grads], eta=0.1, order=order, balls=[ball] * 6, triples=POLAR["muon"]
    )
    for p, there in zip(params, w, strict=True):
        allowed = {torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps)
        assert (p.double() - there).abs().max() <= allowed * there.abs().max()
        assert all(value.dtype == torch.float32 for value in optimizer.state[p].values())


@pytest.mark.parametrize(("polar", "most"), [("polar-express", 1.0), ("muon", 1.203)])
def test_the_buffer_stays_in_its_ball_whatever_the_gradients(polar, most):
    params = make()
    optimizer = SpectralSNGM(params, lr=0.1, momentum=0.8, polar=polar)
    for t in range(50):
        for p, g in zip(params, gradients(t), strict=True):
            p.grad = g * 10.0 ** (t % 9 - 4)
        optimizer.step()
    for p in params:
        u = optimizer.state[p]["momentum_buffer"]
        if p.ndim < 2:
            assert u.norm() <= 0.3 / 0.2 + 1e-9
        else:
            m = u.reshape(u.shape[0], -1)
            limit = most * max(1.0, m.shape[0] / m.shape[1]) ** 0.5 / 0.2
            assert torch.linalg.matrix_norm(m, 2) <= limit * (1 + 1e-9)


@pytest.mark.parametrize(("polar", "most", "s"), [("polar-express", 1.0, 1.0), ("muon", 1.2024, 0.00411)])
def test_the_buffer_reaches_its_limit_and_no_more(polar, most, s):
    w = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = SpectralSNGM([w], lr=0.1, momentum=0.8, polar=polar)
    for _ in range(60):
        w.grad = torch.diag(torch.tensor([1.0, s], dtype=torch.float64))
        optimizer.step()
    norm = torch.linalg.matrix_norm(optimizer.state[w]["momentum_buffer"], 2)
    assert 0.999 * most / 0.2 <= norm <= most / 0.2 * (1 + 1e-4)


def test_the_norms_of_rows_of_an_empty_shard_are_zero():
    assert torch.equal(row_norms(torch.zeros(3, 0), None), torch.zeros(3, 1))


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_gradient_that_is_not_finite_changes_nothing(order, bad, capturable):
    params = make()
    optimizer = SpectralSNGM(params, lr=0.1, weight_decay=0.1, order=order, capturable=capturable)
    for t in range(3):
        for p, g in zip(params, gradients(t), strict=True):
            p.grad = g
        if t == 1:
            params[2].grad[0, 0, 0, 0] = bad
        before = copy.deepcopy((params, [optimizer.state[p]["momentum_buffer"] for p in params]))
        optimizer.step()
        unchanged = all(map(torch.equal, before[0], params))
        unchanged &= all(
            torch.equal(b, optimizer.state[p]["momentum_buffer"]) for b, p in zip(before[1], params, strict=True)
        )
        assert unchanged == (t == 1)
    assert optimizer.skipped == 1


def test_a_zero_gradient_gives_no_update():
    params = make()
    before = copy.deepcopy(params)
    optimizer = SpectralSNGM(params, lr=0.1)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(map(torch.equal, before, params))
    assert optimizer.skipped == 0


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 2.0**20), (torch.float32, 2.0**70)])
@pytest.mark.parametrize("ball", ["spectral", "rows", "euclidean"])
def test_the_scale_of_the_loss_does_not_matter(ball, dtype, scale):
    """Also if squares overflow float32, as those of 2^70 do."""
    runs = []
    for factor in (1.0, scale):
        params = make(dtype)
        optimizer = SpectralSNGM(params, lr=0.1, ball=ball)
        for t in range(3):
            for p, g in zip(params, gradients(t), strict=True):
                p.grad = g.to(dtype) * factor
            optimizer.step()
        runs.append(params)
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("ball", ["spectral", "rows"])
def test_a_changing_loss_scale_does_not_matter(ball, capturable, device):
    runs = []
    for scales in ([1.0] * 4, [2.0**10, 1.0, 2.0**-20, 2.0**30]):
        params = [torch.nn.Parameter(p.detach().to(device)) for p in make()]
        optimizer = SpectralSNGM(params, lr=0.1, ball=ball, capturable=capturable)
        for t, scale in enumerate(scales):
            for p, g in zip(params, gradients(t), strict=True):
                p.grad = g.to(device) * scale
            optimizer.grad_scale = torch.tensor(scale, device=device)  # as torch.amp.GradScaler does
            optimizer.step()
        runs.append([*params, *(s["row_norm"] for s in optimizer.state.values() if "row_norm" in s)])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("ball", ["spectral", "rows"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_captured_steps_equal_eager_ones_that_never_wait_for_the_device(ball):
    runs = []
    for captured in (False, True):
        params = [torch.nn.Parameter(p.detach().cuda()) for p in make(torch.float32)]
        optimizer = SpectralSNGM(params, lr=0.1, ball=ball, capturable=True)
        steps = [[g.cuda() for g in gradients(t, torch.float32)] for t in range(5)]
        for p, g in zip(params, steps[0], strict=True):
            p.grad = g.clone()
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for grads in steps[1:]:
            for p, g in zip(params, grads, strict=True):
                p.grad.copy_(g)
            torch.cuda.set_sync_debug_mode("error")
            try:
                graph.replay() if captured else optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        runs.append(params)
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


def test_polar_factors_of_a_matrix_whose_squares_overflow_float32():
    """With more elements than a norm sums in float64 from the start."""
    g = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(polar_factors([g * 2.0**70], "muon"), polar_factors([g], "muon"))


def test_a_group_may_have_the_euclidean_ball():
    params = make()
    groups = [{"params": params[:1], "ball": "euclidean"}, {"params": params[1:]}]
    optimizer = SpectralSNGM(groups, lr=1.0, momentum=0.0, vector_scale=0.5)
    before = copy.deepcopy(params)
    for p, g in zip(params, gradients(0), strict=True):
        p.grad = g
    optimizer.step()
    torch.testing.assert_close(before[0] - params[0], 0.5 * params[0].grad / params[0].grad.norm())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"order": "first"}, "order must be one of 'before', 'after'"),
        ({"polar": "svd"}, "polar must be one of 'muon', 'polar-express'"),
        ({"ball": "sign"}, "ball must be one of None, 'spectral', 'rows', 'euclidean'"),
        ({"row_beta": 1.0}, r"row_beta must be a finite number in \[0, 1\)"),
        ({"vector_scale": -1.0}, "vector_scale must be a finite number"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov=True needs momentum > 0"),
        ({"lr": -1.0}, "lr must be a finite number"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        SpectralSNGM(make(), **{"lr": 0.1, **settings})


def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match="complex"):
        SpectralSNGM([torch.zeros(2, 2, dtype=torch.complex64, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize("settings", [{}, {"ball": "rows"}, {"ball": "rows", "momentum": 0.0}], ids=str)
def test_a_checkpoint_goes_on_to_the_bit(settings):
    params = make()
    optimizer = SpectralSNGM(params, lr=0.1, **settings)
    twins, twin = None, None
    for t in range(4):
        if t == 2:
            twins = copy.deepcopy(params)
            twin = SpectralSNGM(twins, lr=0.7, **settings)
            twin.load_state_dict(optimizer.state_dict())  # which shares memory with the first optimizer
        for some, o in ((params, optimizer), (twins, twin)):
            if some:
                for p, g in zip(some, gradients(t), strict=True):
                    p.grad = g.clone()
                o.step()
    assert all(map(torch.equal, params, twins))


def test_a_checkpoint_without_row_norms_starts_them_at_the_next_gradient():
    params = make()
    older = SpectralSNGM(params, lr=0.1, ball="rows", row_beta=0.0)
    saved = older.state_dict()
    for group in saved["param_groups"]:
        del group["row_beta"]
    newer = SpectralSNGM(params, lr=0.1, ball="rows")
    newer.load_state_dict(saved)
    for p, g in zip(params, gradients(0), strict=True):
        p.grad = g
    newer.step()
    torch.testing.assert_close(newer.state[params[0]]["row_norm"], gradients(0)[0].norm(dim=1, keepdim=True))


def test_rows_whose_norm_overflows_do_not_move_and_go_on():
    w = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = SpectralSNGM([w], lr=0.1, momentum=0.0, ball="rows")
    for entry in (1.0, 3e38, 1.0):
        w.grad = torch.tensor([[entry] * 3, [1.0] * 3])
        optimizer.step()
    assert optimizer.skipped == 0
    torch.testing.assert_close(w.norm(dim=1), torch.tensor([0.2, 0.3]))


def test_row_norms_of_frozen_parameters_and_of_a_model_on_the_meta_device():
    w = torch.nn.Parameter(torch.empty(4, 3, device="meta"))
    optimizer = SpectralSNGM([w], lr=0.1, ball="rows")
    torch.utils.swap_tensors(w, torch.nn.Parameter(torch.ones(4, 3)))
    w.grad = torch.ones(4, 3)
    optimizer.step()
    assert optimizer.state[w]["row_norm"].flatten().tolist() == pytest.approx([3**0.5] * 4)
    frozen = torch.nn.Parameter(torch.ones(4, 3), requires_grad=False)
    optimizer.add_param_group({"params": [frozen]})
    assert optimizer.state[frozen] == {}


def test_row_norms_follow_a_model_that_is_moved_and_refuse_another_shape():
    w = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = SpectralSNGM([w], lr=0.1, ball="rows", momentum=0.0)
    for dtype in (torch.float32, torch.float64):
        w.data = w.data.to(dtype)
        w.grad = torch.ones_like(w)
        optimizer.step()
        assert optimizer.state[w]["row_norm"].dtype == dtype
    w.data = torch.ones(5, 3)
    w.grad = torch.ones_like(w)
    with pytest.raises(ValueError, match=r"row_norm has shape \(4, 1\), but its parameter has \(5, 3\)"):
        optimizer.step()
    w.data, w.grad = torch.ones(4, 3), torch.ones(4, 3)
    optimizer.param_groups[0]["ball"] = None
    optimizer.step()


@pytest.mark.parametrize("shape", [(3, 64, 64), (5, 16, 144), (2, 144, 16), (1, 7, 1)], ids=str)
def test_a_batch_of_matrices_equals_one_after_the_other(shape):
    batch = torch.randn(shape, dtype=torch.float64)
    together = newton_schulz(batch, "muon")
    for one, x in zip(batch, together, strict=True):
        torch.testing.assert_close(newton_schulz(one[None], "muon")[0], x, rtol=1e-12, atol=1e-13)


def test_large_batches_are_split(monkeypatch):
    tensors = [g for g in gradients(0) if g.ndim > 1]
    whole = polar_factors(tensors, "muon")
    sizes = []
    monkeypatch.setattr(
        spectral, "newton_schulz", lambda batch, *rest: sizes.append(len(batch)) or newton_schulz(batch, *rest)
    )
    for largest, expected in ((1 << 20, [2, 1, 1]), (80, [2, 1, 1]), (79, [1, 1, 1, 1]), (1, [1, 1, 1, 1])):
        monkeypatch.setattr(spectral, "LARGEST_BATCH", largest)
        torch.testing.assert_close(polar_factors(tensors, "muon"), whole, rtol=1e-12, atol=1e-13)
        assert sizes == expected
        sizes.clear()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_compiled_step_has_the_numbers_of_an_eager_one(order):
    runs = []
    for compiled in (False, True):
        params = make(torch.float32)
        optimizer = SpectralSNGM(params, lr=torch.tensor(0.1), order=order, weight_decay=0.1, capturable=True)
        step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True) if compiled else optimizer.step
        for t in range(3):
            for p, g in zip(params, gradients(t, torch.float32), strict=True):
                p.grad = g
            step()
        runs.append(params)
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("polar", POLAR)
@pytest.mark.parametrize(
    "matrix",
    [
        torch.ones(1, 40),
        torch.randn(1, 40, generator=torch.Generator().manual_seed(0)),
        torch.ones(64, 64),
        torch.diag(torch.tensor([1.0, 1e-3, 1e-3])),
        torch.randn(64, 64, generator=torch.Generator().manual_seed(0)),
    ],
    ids=["row of ones", "row", "rank 1", "diagonal", "square"],
)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of a CPU without bfloat16 instructions
def test_newton_schulz_is_stable_in_bfloat16(matrix, polar):
    x = newton_schulz(matrix[None].bfloat16(), polar)[0].float()
    square = x.double() @ x.double().T  # by eigenvalues: on aarch64, torch's SVD of a constant matrix is NaN
    assert torch.linalg.eigvalsh(square).max().sqrt() <= 1.25


@pytest.mark.parametrize("eps", [0.0, 1e-300, 1e-40])
def test_a_tiny_eps_makes_no_nan_of_a_zero_gradient(eps):
    params = make(torch.float32)
    optimizer = SpectralSNGM(params, lr=0.1, eps=eps)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(p.isfinite().all() for p in params)


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    optimizer = SpectralSNGM(make(), lr=0.1)
    with pytest.raises(TypeError, match="complex"):
        optimizer.add_param_group({"params": [torch.zeros(2, 2, dtype=torch.complex64, requires_grad=True)]})
    assert len(optimizer.state_dict()["param_groups"]) == 1
