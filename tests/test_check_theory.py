"""`sngm check-theory`: its functions have the stated properties, its verdicts follow the numbers, and it can fail."""

import functools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from console import refused, sngm
from scipy import stats

from sngm import LARS, SNGM, theory
from sngm.cli.check_theory import NAMES as NAMES_IN_HELP
from sngm.paper import theory_checks
from sngm.paper.theory_checks import batches, corollaries, findings, lemmas, problems, theorems
from sngm.paper.theory_checks.problems import Phi, simulate

FOUND = [*vars(problems).values(), *vars(batches).values(), corollaries.sharp(16.0)]
EVERY = list({id(each): each for each in FOUND if isinstance(each, problems.Problem)}.values())
NAMES = [problem.name for problem in EVERY]


# ---------------------------------------------------------------- the functions and the iterations


@pytest.mark.parametrize("problem", EVERY, ids=NAMES)
def test_every_function_has_the_constants_it_claims(problem):
    random = np.random.default_rng(0)
    size, step = len(problem.start), 1e-5
    for scale in (0.01, 0.3, 1.0, 3.0):
        w = problem.start * random.uniform(-1, 1) + scale * random.normal(size=size)
        gradient = problem.gradient(w)
        moved = [(w + step * axis, w - step * axis) for axis in np.eye(size)]
        by_loss = [(problem.loss(a) - problem.loss(b)) / (2 * step) for a, b in moved]
        np.testing.assert_allclose(gradient, by_loss, rtol=1e-5, atol=1e-6)
        hessian = np.array([(problem.gradient(a) - problem.gradient(b)) / (2 * step) for a, b in moved])
        limit = problem.L + problem.lam * np.linalg.norm(gradient)
        assert np.linalg.norm(hessian, 2) <= limit * (1 + 1e-6)
        assert problem.loss(w) >= 0  # 0 is the infimum in the definition of the gap


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("problem", EVERY, ids=NAMES)
def test_the_noise_has_the_variance_it_claims(problem, batch):
    noise = problem.draw(np.random.default_rng(0), 40_000, batch)
    assert np.mean((noise**2).sum(axis=-1)) == pytest.approx(problem.sigma**2 / batch, rel=0.03)
    assert np.abs(noise.mean(axis=0)).max() <= 0.03


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("method", ["msgd", "sngm", "block-sngm", "lars"])
def test_the_iterations_are_those_of_the_optimizers(method, beta):
    # the norms of its blocks are about 2, so that phi is clipped at its upper end for some of them only
    problem, eta, steps = replace(problems.COUPLED, phi=Phi(0.5, 1.9)), 0.05, 8
    runs = simulate(problem, method, np.array([eta, 0.2]), beta, 4, steps, seeds=3, seed=5)
    random = np.random.default_rng(5)
    noise = [problem.draw(random, 3, 4) for _ in range(steps)]
    for lane in range(3):
        params = [torch.nn.Parameter(part.clone()) for part in torch.from_numpy(problem.start).split(problem.blocks)]
        if method == "msgd":
            optimizer = torch.optim.SGD(params, lr=eta, momentum=beta)
        elif method == "lars":
            groups = [{"params": params, "adapt": True}]
            optimizer = LARS(groups, lr=eta, momentum=beta, trust_coefficient=1.0, phi=(0.5, 1.9))
        else:
            optimizer = SNGM(params, lr=eta, momentum=beta, scope="global" if method == "sngm" else "tensor")
        norms, ratios = [], []
        for each in noise:
            gradient = problem.gradient(torch.cat([p.detach() for p in params]).numpy())
            norms.append(np.linalg.norm(gradient))
            parts = torch.from_numpy(gradient + each[lane]).split(problem.blocks)
            ratios.append(theory.rho([part.norm().item() for part in parts]))
            for p, part in zip(params, parts, strict=True):
                p.grad = part.clone()
            optimizer.step()
        assert runs.norm[0, lane] == pytest.approx(np.mean(norms), rel=1e-12)
        assert runs.square[0, lane] == pytest.approx(np.mean(np.square(norms)), rel=1e-12)
        if method in ("block-sngm", "lars"):
            assert runs.rho[0, lane] == pytest.approx(max(ratios), rel=1e-12)


@pytest.mark.slow
def test_lars_climbs_the_stairs_in_long_steps_and_falls_in_short_ones():
    stairs = problems.STAIRS
    count = int(stairs.start.item()) - 64
    up, down = (
        simulate(stairs, "lars", np.array([1 / 128]), 0.0, 1, steps, 1).norm.item() for steps in (count, 21_600)
    )
    assert up == pytest.approx(0.1 / (2 * np.pi))  # the slope at the points that steps reach
    assert down > 500 * up
    assert 0 < stairs.gap < 0.2  # it falls only by what it has climbed


def test_a_run_that_diverges_is_infinite_and_breaks_every_bound():
    runs = simulate(corollaries.sharp(64.0), "msgd", np.array([1.0]), 0.9, 1, 2000, seeds=2)
    assert np.isinf(runs.norm).all()
    mean, low, high = findings.interval(runs.norm)
    assert np.isinf([mean, low, high]).all()
    assert findings.under(low, high, 1e300) == "fails"


# ---------------------------------------------------------------- the verdicts


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.8, 0.9, "holds"), (0.9, 1.1, "open"), (1.1, 1.2, "fails"), (1.0, 1.0, "holds")]
)
def test_a_verdict_follows_the_ends_of_the_interval(low, high, verdict):
    assert findings.under([0.1, low], [0.2, high], 1.0) == verdict


SIMULATED = {}


def remembered(problem, method, etas, *rest):
    key = (problem.name, method, tuple(etas), *rest)
    if key not in SIMULATED:
        SIMULATED[key] = simulate(problem, method, etas, *rest)
    return SIMULATED[key]


@pytest.fixture
def at_batch_1(monkeypatch):
    """Cache runs of the theorems at batch 1, where every part of a bound matters: tests differ only in the bounds."""
    monkeypatch.setattr(theorems, "BATCHES", (1,))
    monkeypatch.setattr(theorems, "simulate", remembered)


def without(part, right):
    """Return a bound without one of its parts."""

    @functools.wraps(right)
    def bound(**given):
        def changed(**change):
            return right(**{**given, **change})

        whole, flat, free = changed(), changed(L=0.0), changed(gap=0.0)
        second_only = free - changed(gap=0.0, batch=1e300)  # of MSGD: the term divided by the batch size
        low, high = (given.get(key, 1.0) for key in ("gamma_l", "gamma_u"))
        even = changed(gap=0.0, L=0.0, **({"gamma_u": low} if "gamma_u" in given else {}))
        return {
            "no part": whole,
            "gap": free,
            "L": flat,
            "noise": changed(sigma=0.0),
            "kappa": flat + (whole - flat) / theory.kappa(given["beta"]),
            "blocks": flat + (whole - flat) / given.get("blocks", 1),
            "momentum": flat + (whole - flat) * (1 - given["beta"]) ** 2,
            "term 2": whole - second_only,
            "term 3": whole - free + second_only,
            "low gamma of the gap": free + (whole - free) * low,
            "gammas of L": flat + (whole - flat) * low / high**2,
            "spread of L": flat + (whole - flat) * low / high,
            "spread of the noise": changed(sigma=0.0) + even,
            "gammas": changed(**{key: 1.0 for key in ("gamma_l", "gamma_u") if key in given}),
        }[part]

    return bound


def times(factor, right):
    """Return a bound multiplied by a factor."""
    return functools.wraps(right)(lambda **given: factor * right(**given))


SLOW = ("theorem-2", "theorem-3", "lars-bound")


def theorem(name, *more):
    return pytest.param(name, *more, marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize(
    ("name", "bound", "part", "verdict"),
    [
        theorem(
            name, bound, part, {"no part": "holds", "term 3": "open", "spread of the noise": "holds"}.get(part, "fails")
        )
        for name, bound, parts in (
            ("theorem-1", "smooth_bound", ("gap", "L", "noise", "kappa")),
            ("theorem-2", "relaxed_bound", ("gap", "L", "noise", "kappa")),
            ("theorem-3", "block_bound", ("gap", "L", "noise", "kappa", "blocks")),
            # the measurement nearly reaches the bound without term 3, so its absence is not noticed: see docs/theory.md
            ("msgd-bound", "msgd_bound", ("gap", "noise", "momentum", "term 2", "term 3")),
            # nor is the absence of the spread of phi in the noise term: see docs/theory.md
            (
                "lars-bound",
                "lars_bound",
                (
                    "gap",
                    "L",
                    "noise",
                    "low gamma of the gap",
                    "gammas of L",
                    "spread of L",
                    "spread of the noise",
                    "gammas",
                ),
            ),
        )
        for part in ("no part", *parts)
    ],
)
def test_a_bound_without_one_of_its_parts_fails(name, bound, part, verdict, at_batch_1, monkeypatch):
    monkeypatch.setattr(theory, bound, without(part, getattr(theory, bound)))
    (finding,) = theory_checks.check([name], seeds=10)
    assert finding.verdict == verdict


@pytest.mark.parametrize("name", [theorem(name) for name in ("theorem-1", *SLOW, "msgd-bound")])
def test_a_theorem_says_how_much_of_each_part_is_needed(name, at_batch_1):
    (finding,) = theory_checks.check([name], seeds=10)
    told = finding.measured.split("needed of each part: ")[1].split(";")[0].split(", ")
    needed = {part: float(share) for part, share in (each.rsplit(" ", 1) for each in told)}
    unseen = {"msgd-bound": {"term 3"}, "lars-bound": {"γ_u/γ_l of the noise"}}  # see docs/theory.md
    assert {part for part, share in needed.items() if share == 0} == unseen.get(name, set())
    assert max(needed.values()) <= 1 + 1e-9


def test_theorem_1_and_msgd_are_met_with_equality_so_nothing_smaller_passes(at_batch_1, monkeypatch):
    for name, bound in (("theorem-1", "smooth_bound"), ("msgd-bound", "msgd_bound")):
        monkeypatch.setattr(theory, bound, times(0.999, getattr(theory, bound)))
        assert theory_checks.check([name], seeds=10)[0].verdict == "fails"


def test_a_failed_verdict_is_exit_code_1(at_batch_1, monkeypatch, tmp_path):
    monkeypatch.setattr(theory, "smooth_bound", times(0.01, theory.smooth_bound))
    result = sngm(f"check-theory --only theorem-1 --seeds 10 --out {tmp_path}")
    assert result.code == 1
    assert "fails" in result.out
    assert result.err.splitlines()[-1] == "sngm: these verdicts contradict docs/theory.md: theorem-1"
    assert "documented: holds" in (tmp_path / "report.html").read_text()


class Decaying(SNGM):
    """Not the paper's SNGM: it pulls towards 0."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, weight_decay=0.5, weight_decay_mode="after_norm")


class Growing(SNGM):
    """Not the paper's SNGM: its buffer grows by itself."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            if "momentum_buffer" in state:  # absent without momentum
                state["momentum_buffer"] *= 1.001


def test_a_function_that_is_not_as_smooth_as_it_claims_makes_lemma_1_fail(monkeypatch):
    monkeypatch.setattr(lemmas, "EXP", replace(problems.EXP, lam=0.9))
    assert theory_checks.check(["lemma-1"], seeds=2)[0].verdict == "fails"


@pytest.mark.parametrize(("name", "optimizer"), [("lemma-2", Growing), ("lemma-3", Decaying), ("lars", Decaying)])
@pytest.mark.slow
def test_an_optimizer_that_is_not_the_papers_makes_the_check_fail(name, optimizer, monkeypatch):
    monkeypatch.setattr(lemmas, "LEMMA_BETAS", (0.9,))
    monkeypatch.setattr(lemmas, "SNGM", optimizer)
    assert theory_checks.check([name], seeds=2)[0].verdict == "fails"


def test_a_lars_that_reaches_the_minimum_makes_the_check_fail(monkeypatch):
    def bounded(groups, lr, momentum, trust_coefficient):  # phi is 1
        return SNGM([p for group in groups for p in group["params"]], lr=lr, momentum=momentum, scope="tensor")

    monkeypatch.setattr(lemmas, "LARS", bounded)
    (finding,) = theory_checks.check(["lars"], seeds=2)
    assert finding.verdict == "fails"
    assert finding.measured.startswith("0 of 9 runs of LARS end at 0")


# ---------------------------------------------------------------- orders, batches and blocks


def test_the_power_of_a_budget_is_fitted_for_each_seed():
    budgets = [4**k for k in range(6, 13)]
    norms = np.array([[3 * budget**-0.2, budget**-0.3] for budget in budgets])
    power, off = corollaries.powers(budgets, norms)
    assert power == pytest.approx([-0.2, -0.3])
    assert np.abs(off).max() <= 1e-12
    norms[3, 0] *= 1.5
    assert np.abs(corollaries.powers(budgets, norms)[1][:, 0]).max() == pytest.approx(0.416, abs=1e-3)  # 1.5^(6/7) - 1


def verdicts_of_corollaries(monkeypatch, level, spread=0.0):
    """Return the verdicts if every mean norm is this fraction of the bound, and seeds differ by `spread` of it."""

    def made_up(problem, method, etas, beta, batch, steps, seeds):
        bound = theory.plan(
            batch * steps, "sngm", gap=problem.gap, L=problem.L, sigma=problem.sigma, beta=beta, lam=problem.lam
        ).bound
        norm = bound * np.tile(level + spread * np.linspace(-1, 1, seeds), (len(etas), 1))
        return problems.Runs(norm, norm, norm)

    monkeypatch.setattr(corollaries, "simulate", made_up)
    return [corollaries.corollary_1(5).verdict, corollaries.corollary_2(5).verdict]


def test_a_corollary_is_judged_by_its_bound_and_worse_data_never_help(monkeypatch):
    assert verdicts_of_corollaries(monkeypatch, 0.9) == ["holds", "holds"]
    assert verdicts_of_corollaries(monkeypatch, 1.1) == ["fails", "fails"]
    assert verdicts_of_corollaries(monkeypatch, 0.9, spread=0.03) == ["holds", "holds"]
    for spread in (0.2, 0.5, 0.8):  # seeds that differ more show less
        assert verdicts_of_corollaries(monkeypatch, 0.9, spread) == ["open", "open"]


def test_the_power_has_its_interval_over_seeds_and_is_not_judged():
    budgets = [4**k for k in range(6, 13)]
    factors = np.array([1.0, 1.1, 0.9, 1.2])
    flat = np.outer([0.01 * (1.02 if k % 2 else 1) for k in range(7)], factors)  # does not fall with the budget
    growth = corollaries.Growth("a", 0.9, budgets, [1] * 7, flat, np.ones(7))
    found = corollaries.of_order([growth])
    assert found["verdict"] == "holds"
    assert "is not judged" in found["rule"]
    assert "the power 0.000 ± 0.000 (off by up to 1.1%) for a" in found["measured"].replace("-0.000", "0.000")


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [0.97, 0.98, 0.96, 0.91]])
def test_the_interval_is_by_students_t(values):
    wanted = stats.t.interval(findings.LEVEL, len(values) - 1, np.mean(values), stats.sem(values))
    mean, low, high = findings.interval(np.array(values))
    assert mean == pytest.approx(np.mean(values), rel=1e-12)
    assert (low, high) == pytest.approx(wanted, rel=1e-12)


def norms(*largest, unsure=()):
    """Return norms for each L: 1 up to its largest batch, 9 above; with an interval up to 9 at the unsure batches."""
    grid = np.array(batches.TRIED_BATCHES)
    mean = np.where(grid <= np.array(largest)[:, None], 1.0, 9.0)
    high = np.where(np.isin(grid, unsure), 9.0, mean)
    return findings.Interval(mean, mean, high)


def test_the_largest_batch_borne_and_the_largest_possible_one():
    found = batches.limits(norms(1024, 64, 4, 2, unsure=[1024, 512]), 2.0)
    assert found.sure.tolist() == [256, 64, 4, 0]
    assert found.possible.tolist() == [1024, 64, 4, 0]
    assert batches.in_words(found) == "256 to 1024, 64, 4 and 0"


def test_beyond_the_grid_nothing_is_known():
    found = batches.limits(norms(16384, 64), 2.0)
    assert found.possible.tolist() == [np.inf, 64]
    assert batches.in_words(found) == "16384 or more and 64"
    assert batches.falls(found) == (True, False)
    assert batches.falls(batches.limits(norms(16384, 16384), 2.0)) == (False, False)


@pytest.mark.parametrize(
    ("largest", "unsure", "yes", "no"),
    [
        ((1024, 16), (), True, False),
        ((64, 64), (), False, True),
        ((64, 128), (), False, True),
        ((64, 32), (64,), False, False),  # the first may be 32 or 64
    ],
)
def test_whether_a_limit_falls(largest, unsure, yes, no):
    assert batches.falls(batches.limits(norms(*largest, unsure=unsure), 2.0)) == (yes, no)


def verdicts(monkeypatch, msgd, sngm):
    """Return the verdicts on batches for these measurements."""
    monkeypatch.setattr(batches, "measure", lambda rates, seeds: {"msgd": msgd, "sngm": sngm})
    checks = (batches.batch_limit_msgd, batches.batch_limit_sngm, batches.batch_larger, batches.batch_larger_tuned)
    return [check(2).verdict for check in checks]


def test_the_verdicts_on_batches_follow_the_limits(monkeypatch):
    down, level = norms(1024, 256, 64, 16), norms(2048, 2048, 2048, 2048)
    assert verdicts(monkeypatch, down, level) == ["holds", "holds", "holds", "holds"]
    assert verdicts(monkeypatch, level, down) == ["fails", "fails", "fails", "fails"]
    unsure = norms(2048, 2048, 2048, 64, unsure=[32, 64])
    assert verdicts(monkeypatch, down, unsure) == ["holds", "fails", "open", "open"]


def test_where_the_reference_diverges_the_verdicts_are_open(monkeypatch):
    lost = norms(1024, 256, 64, 16)
    lost.mean[-1], lost.low[-1], lost.high[-1] = np.inf, np.inf, np.inf
    found = batches.tolerated({"msgd": lost, "sngm": norms(2048, 2048, 2048, 2048)})
    assert batches.in_words(found["msgd"]).endswith("and unknown")
    assert verdicts(monkeypatch, lost, norms(2048, 2048, 2048, 2048)) == ["open", "open", "open", "open"]


def test_side_by_side_is_one_after_another():
    etas = np.array([0.01, 0.1])
    together = simulate(batches.all_sharp(2), "sngm", np.tile(etas, 4), 0.9, 4, 20, seeds=3)
    alone = [simulate(corollaries.sharp(L), "sngm", etas, 0.9, 4, 20, seeds=3).norm for L in corollaries.SHARPNESS]
    np.testing.assert_allclose(together.norm, np.concatenate(alone), rtol=1e-12)


def test_a_race_is_decided_where_the_intervals_are_apart():
    def race(low, high):
        return batches.Race("a", 1, etas, [], [batches.Best(0.1, 1.0, 0.9, 1.1), batches.Best(0.1, low, low, high)])

    etas = np.array([0.1])
    assert (race(0.6, 0.8).faster, race(0.6, 0.8).not_faster) == (True, False)
    assert (race(0.8, 1.0).faster, race(0.8, 1.0).not_faster) == (False, False)
    assert (race(1.2, 1.4).faster, race(1.2, 1.4).not_faster) == (False, True)


def test_block_wise_steps_can_be_faster_without_noise():
    found = batches.race(batches.NO_NOISE, 1, batches.NO_NOISE_RATES, 0.0, 500, 2)
    assert found.faster
    for eta, *_ in found.best:
        assert batches.NO_NOISE_RATES[0] < eta < batches.NO_NOISE_RATES[-1]  # the best learning rate is inside the grid


def test_a_gradient_of_0_stays_0_block_by_block():
    at_0 = replace(problems.BOWLS, start=np.zeros(64))
    runs = simulate(at_0, "block-sngm", np.array([0.1]), 0.9, 1, 3, seeds=1)
    assert runs.norm.item() == 0
    assert runs.rho.item() == pytest.approx(1 / 8)


def test_a_claim_that_is_known_to_fail_is_told_and_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "RACE_RATES", batches.RACE_RATES[::6])
    monkeypatch.setattr(batches, "NO_NOISE_RATES", batches.NO_NOISE_RATES[::20])
    monkeypatch.setattr(batches, "QUIET_BATCHES", (1,))
    result = sngm(f"check-theory --only block-speed,block-bounds --seeds 3 --out {tmp_path} --json")
    speed, bound = result.json["findings"]
    assert (speed["verdict"], speed["expected"], speed["surprising"]) == ("fails", "fails", False)
    assert "slip 4" in speed["why"]
    assert bound["verdict"] == "holds"
    assert result.code == 0


@pytest.mark.parametrize(
    ("verdict", "expected", "surprising"),
    [("holds", "fails", True), ("open", "holds", False), ("open", "fails", False), ("fails", "fails", False)],
)
def test_only_a_verdict_against_the_documented_one_is_surprising(verdict, expected, surprising):
    finding = findings.Finding("a", "b", verdict, "c", expected=expected)
    assert finding.surprising is surprising


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    folder = tmp_path_factory.mktemp("few")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theorems, "BATCHES", (1,))
        patch.setattr(theorems, "simulate", remembered)
        return sngm(f"check-theory --only lemma-1,lars,theorem-1,training --seeds 10 --out {folder} --json"), folder


@pytest.mark.slow
def test_json_has_every_finding_with_its_numbers(few):
    result, folder = few
    assert result.code == 0
    assert [(f["name"], f["verdict"]) for f in result.json["findings"]] == [
        (name, "holds") for name in ("lemma-1", "lars", "theorem-1", "training")
    ]
    theorem = result.json["findings"][2]
    assert max(row["upper limit / bound"] for row in theorem["numbers"]) <= 1
    assert {row["function"] for row in theorem["numbers"]} == {"bowl", "quadratic", "waves", "slope"}
    assert result.json["seeds"] == 10
    assert json.loads((folder / "findings.json").read_text())["findings"] == result.json["findings"]


@pytest.mark.slow
def test_progress_goes_to_stderr(few):
    lines = few[0].err.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"lemma-1: holds \(.* s\)", lines[0])


@pytest.mark.slow
def test_the_page_needs_nothing_but_itself(few):
    page = (few[1] / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page
    assert "Of 4 checks of the paper&#39;s statements 4 hold, 0 fail and 0 are left open." in page
    for name in ("lemma-1", "lars", "theorem-1", "training"):
        assert f'<section id="{name}">' in page
        assert (few[1] / f"{name}.svg").read_text().startswith("<svg")


def test_the_table_is_printed_and_a_part_of_the_checks_leaves_the_page_of_all_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = sngm("check-theory --only block-bounds --seeds 2")
    assert "block-bounds" in result.out
    assert "holds" in result.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "check-theory-block-bounds-2-seeds"
    assert f"Report: runs/{folder.name}/report.html" in result.out


def test_what_cannot_be_run_is_refused(tmp_path):
    refused(sngm(f"check-theory --only theorem-4 --out {tmp_path}"), "theorem-4", "did you mean", "theorem-1")
    refused(sngm(f"check-theory --seeds 1 --out {tmp_path}"), "--seeds must be a whole number >= 2")
    (tmp_path / "file").write_text("")
    refused(sngm(f"check-theory --only lars --out {tmp_path / 'file'}"), "is not a folder")


def test_the_theory_still_needs_no_torch():
    code = "import sys, sngm.theory, sngm.cli; sys.exit(bool({'torch', 'sngm.paper.theory_checks'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def documented():
    """Return the names and verdicts of the table in docs/theory.md."""
    page = (Path(__file__).parents[1] / "docs" / "theory.md").read_text()
    return dict(re.findall(r"^\| `([a-z0-9-]+)` \|.*\| \**(holds|fails)\** \|", page, re.MULTILINE))


def test_every_check_is_documented():
    assert list(documented()) == list(theory_checks.CHECKS) == list(NAMES_IN_HELP)


@pytest.mark.slow
@pytest.mark.nightly
def test_all_verdicts_are_the_documented_ones(tmp_path):
    result = sngm(f"check-theory --out {tmp_path} --json")
    assert result.code == 0
    assert {finding["name"]: finding["verdict"] for finding in result.json["findings"]} == documented()
