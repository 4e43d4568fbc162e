"""Steepest descent in a norm, with momentum: what holds for every member, and other libraries' versions of some."""

import pytest
import torch
from harness import clone_params, make_params

from sngm import NSGDM, SNGM, SpectralSNGM
from sngm.optim.spectral import polar_factors

SHAPES = [(6, 4), (4, 6), (5,), ()]
BETA, LR = 0.8, 0.1


def exact(p):
    return polar_factors([p], "polar-express")[0]


# member: the optimizer, and x(d) of all gradients of a step
BEFORE = {
    "SNGM": (lambda p: SNGM(p, lr=LR, momentum=BETA), lambda d: [g / whole(d) for g in d]),
    "block-SNGM": (lambda p: SNGM(p, lr=LR, momentum=BETA, scope="tensor"), lambda d: [g / g.norm() for g in d]),
    "spectral SNGM": (
        lambda p: SpectralSNGM(p, lr=LR, momentum=BETA, polar="polar-express"),
        lambda d: [exact(g) if g.ndim > 1 else 0.3 * g / g.norm() for g in d],
    ),
}
NORMS = {  # of the ball, relative to its radius
    "SNGM": lambda u: whole(u),
    "block-SNGM": lambda u: max(v.norm() for v in u),
    "spectral SNGM": lambda u: max(
        torch.linalg.matrix_norm(v, 2) / max(1.0, (v.shape[0] / v.shape[1]) ** 0.5) if v.ndim > 1 else v.norm() / 0.3
        for v in u
    ),
}


def whole(tensors):
    return torch.cat([t.flatten() for t in tensors]).norm()


def random_gradients(t):
    generator = torch.Generator().manual_seed(t)
    size = 10.0 ** (t % 7 - 3)
    return [size * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


@pytest.mark.parametrize("member", BEFORE)
def test_momentum_stays_in_its_ball_and_z_moves_by_the_direction(member):
    """||u|| <= 1 / (1 - beta), and z = w + beta / (1 - beta) (w - previous w) moves by -lr / (1 - beta) x."""
    params = make_params(torch.float64, SHAPES)
    build, directions = BEFORE[member]
    optimizer = build(params)
    before = z = [p.detach().clone() for p in params]
    for t in range(40):
        grads = random_gradients(t)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
        assert NORMS[member](buffers) <= (1 - BETA ** (t + 1)) / (1 - BETA) * (1 + 1e-9)
        now = [p.detach().clone() for p in params]
        moved = [w + BETA / (1 - BETA) * (w - b) for w, b in zip(now, before, strict=True)]
        for there, was, x in zip(moved, z, directions(grads), strict=True):
            torch.testing.assert_close(there, was - LR / (1 - BETA) * x, rtol=1e-8, atol=1e-8)
        before, z = now, moved


@pytest.mark.parametrize("member", BEFORE)
def test_equal_gradients_reach_the_bound(member):
    params = make_params(torch.float64, SHAPES)
    optimizer = BEFORE[member][0](params)
    for _ in range(100):
        for p, g in zip(params, random_gradients(3), strict=True):
            p.grad = g
        optimizer.step()
    reached = NORMS[member]([optimizer.state[p]["momentum_buffer"] for p in params])
    assert reached == pytest.approx(1 / (1 - BETA), rel=1e-6)


@pytest.mark.parametrize("order", ["NSGDM", "spectral"])
def test_after_momentum_every_step_has_the_same_length(order):
    params = make_params(torch.float64, SHAPES)
    settings = {"lr": LR, "momentum": BETA}
    optimizer = (
        NSGDM(params, **settings)
        if order == "NSGDM"
        else SpectralSNGM(params, **settings, order="after", polar="polar-express")
    )
    norm = NORMS["SNGM" if order == "NSGDM" else "spectral SNGM"]
    for t in range(20):
        was = [p.detach().clone() for p in params]
        for p, g in zip(params, random_gradients(t), strict=True):
            p.grad = g
        optimizer.step()
        assert norm([p.detach() - b for p, b in zip(params, was, strict=True)]) == pytest.approx(LR, rel=1e-6)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of a CPU without bfloat16 instructions
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_order_after_is_torchs_muon_for_matrices(nesterov):
    params = make_params(torch.float32, [(8, 6), (6, 8), (5, 5)])
    twins = clone_params(params)
    ours = SpectralSNGM(params, lr=0.05, momentum=0.9, weight_decay=0.2, order="after", nesterov=nesterov)
    theirs = torch.optim.Muon(twins, lr=0.05, momentum=0.9, weight_decay=0.2, nesterov=nesterov)
    for t in range(4):
        generator = torch.Generator().manual_seed(t)
        for p, q in zip(params, twins, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(params, twins, strict=True):
        assert (p - q).norm() <= 0.02 * 4 * 0.05 * 5**0.5  # torch's Newton-Schulz is in bfloat16


def test_sngm_is_optaxs_normalised_update_with_momentum():
    optax = pytest.importorskip("optax")
    import numpy as np

    params = make_params(torch.float32, SHAPES)
    weights = [p.detach().numpy().copy() for p in params]
    chain = optax.chain(optax.normalize_by_update_norm(eps=0.0), optax.trace(decay=0.9), optax.scale(-0.1))
    state = chain.init(weights)
    optimizer = SNGM(params, lr=0.1)
    for t in range(5):
        grads = [g.float() for g in random_gradients(t)]
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()
        updates, state = chain.update([g.numpy() for g in grads], state)
        weights = [w + np.asarray(u) for w, u in zip(weights, updates, strict=True)]
    for p, w in zip(params, weights, strict=True):
        torch.testing.assert_close(p.detach(), torch.from_numpy(np.asarray(w)), rtol=1e-5, atol=1e-6)
