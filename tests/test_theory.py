"""Functions of sngm.theory compared with the paper's formulas, written again here and evaluated in exact fractions."""

import inspect
import math
import random
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from sngm import theory

# The paper's formulas. Only square roots are rounded.


def sqrt(x):
    return Fraction(math.sqrt(x))


def k(beta):
    return (1 + beta) / (1 - beta) ** 2


def theorem_1(gap, eta, T, B, L, sigma, beta):
    return (1 - beta) * gap / (eta * T) + L / 2 * k(beta) * eta + 2 * sigma / sqrt(B)


def theorem_2(gap, eta, T, B, L, sigma, beta, lam):
    return 2 * (1 - beta) * gap / (eta * T) + 8 * L * k(beta) * eta + 4 * sigma / sqrt(B)


def theorem_3(gap, eta, T, B, L, sigma, beta, lam, S, rho):
    noise = 2 * sigma * (1 + rho * sqrt(S)) / sqrt(B)
    return 2 * rho * (1 - beta) * gap / (eta * T) + 8 * L * k(beta) * rho * S * eta + noise


def lars_remark(gap, eta, T, B, L, sigma, beta, lam, S, rho, low, high):
    """Return the bound of Theorem 3's proof with eta * high where eta is added and eta * low where it is subtracted."""
    noise = 2 * sigma * (1 + rho * sqrt(S) * high / low) / sqrt(B)
    return 2 * rho * (1 - beta) * gap / (low * eta * T) + 8 * L * k(beta) * rho * S * eta * high**2 / low + noise


def section_3(gap, eta, T, B, L, sigma, beta):
    noise = L * eta * sigma**2 / ((1 - beta) ** 2 * B) + 4 * L**2 * eta**2 * sigma**2 / (1 - beta) ** 2
    return 2 * (1 - beta) * gap / (eta * T) + noise


def per_eta(name, a):
    """Return the factor c of the statement's condition ``c * eta <= 1``."""
    if name == "smooth":
        return 0
    if name == "msgd":
        return (1 + a["beta"]) * a["L"] / (1 - a["beta"]) ** 2
    factor = 8 * k(a["beta"]) * a["lam"]
    if name == "relaxed":
        return factor
    factor *= a["rho"] * a["blocks"]
    return factor if name == "block" else factor * a["gamma_u"] ** 2 / a["gamma_l"]


PAPER = {
    "smooth": theorem_1,
    "relaxed": theorem_2,
    "block": theorem_3,
    "lars": lars_remark,
    "msgd": section_3,
}
NAMES = {
    "smooth": "gap eta steps batch L sigma beta",
    "relaxed": "gap eta steps batch L sigma beta lam",
    "block": "gap eta steps batch L sigma beta lam blocks rho",
    "lars": "gap eta steps batch L sigma beta lam blocks rho gamma_l gamma_u",
    "msgd": "gap eta steps batch L sigma beta",
}
drawn = settings(max_examples=20, deadline=None)
every_statement = pytest.mark.parametrize("name", NAMES)


def bound(name, arguments):
    return getattr(theory, f"{name}_bound")(**arguments)


def best(name, arguments):
    return getattr(theory, f"{name}_best")(**{key: value for key, value in arguments.items() if key != "eta"})


def exact(name, arguments):
    return PAPER[name](*(Fraction(value) for value in arguments.values()))


def or_zero(strategy):
    return st.just(0.0) | strategy


@st.composite
def arguments_of(draw, name, zeros=True):
    """Draw admissible arguments: eta up to the condition's limit, and often equal to it."""
    or_zero = st.just(0.0).__or__ if zeros else lambda strategy: strategy
    a = {
        "gap": draw(or_zero(st.floats(1e-3, 1e3))),
        "eta": draw(st.floats(1e-6, 1e2)),
        "steps": draw(st.integers(1, 10**6)),
        "batch": draw(st.integers(1, 10**5)),
        "L": draw(or_zero(st.floats(1e-3, 1e3))),
        "sigma": draw(or_zero(st.floats(1e-3, 1e2))),
        "beta": draw(or_zero(st.floats(0.0, 0.999))),
        "lam": draw(or_zero(st.floats(1e-3, 1e2))),
        "blocks": draw(st.integers(1, 200)),
        "gamma_l": draw(st.floats(1e-2, 1.0)),
    }
    a["gamma_u"] = a["gamma_l"] * draw(st.floats(1.0, 100.0))
    low = 1 / math.sqrt(a["blocks"])
    a["rho"] = min(1.0, low + draw(st.just(0.0) | st.just(1.0) | st.floats(0.0, 1.0)) * (1 - low))
    slope = per_eta(name, a)
    if slope * a["eta"] > 1:
        a["eta"] = draw(st.just(1.0) | st.floats(1e-3, 1.0)) / slope
    return {key: a[key] for key in NAMES[name].split()}


# Return values.


@every_statement
@drawn
@given(data=st.data())
def test_a_bound_is_the_papers_formula(name, data):
    a = data.draw(arguments_of(name))
    found = bound(name, a)
    assert type(found) is float
    assert found == pytest.approx(float(exact(name, a)), rel=1e-12)
    assert found == getattr(theory, f"{name}_bound")(*a.values()), "by position as by keyword"


@every_statement
@drawn
@given(data=st.data())
def test_the_best_bound_is_that_of_a_numeric_minimisation(name, data):
    a = data.draw(arguments_of(name))
    found = best(name, a)
    assert type(found.eta) is float
    assert type(found.bound) is float
    slope = per_eta(name, a)
    top = math.log(1 / slope) if slope else 60.0

    def at(log_eta):
        return float(PAPER[name](*a_with(math.exp(log_eta)).values()))

    def a_with(eta):
        return {key: Fraction(eta if key == "eta" else value) for key, value in a.items()}

    bottom = -100.0  # if only eta remains of a bound, its factor may be as large as 1e14
    lowest = minimize_scalar(at, bounds=(bottom, top), method="bounded", options={"xatol": 1e-9})
    numeric = min(lowest.fun, at(top))
    assert found.bound == pytest.approx(numeric, rel=1e-6, abs=1e-12)


@every_statement
@drawn
@given(data=st.data())
def test_the_best_eta_is_right_to_six_digits(name, data):
    a = data.draw(arguments_of(name, zeros=False))
    found = best(name, a)
    slope = per_eta(name, a)
    limit = 1 / slope if slope else math.inf
    assert found.eta <= limit * (1 + 1e-12)

    def at(eta):
        return exact(name, {**a, "eta": eta})

    assert at(found.eta) <= at(found.eta * (1 - 1e-6))
    if found.eta < limit * (1 - 1e-12):
        assert at(found.eta) <= at(found.eta * (1 + 1e-6))
    assert bound(name, {**a, "eta": found.eta}) == pytest.approx(found.bound, rel=1e-12)


def one(name, **changed):
    """Return valid arguments, with some of them changed."""
    plain = {"gap": 2.0, "eta": 1e-3, "steps": 100, "batch": 16, "L": 3.0, "sigma": 0.5, "beta": 0.5, "lam": 0.0}
    plain |= {"blocks": 4, "rho": 0.75, "gamma_l": 0.5, "gamma_u": 2.0}
    return {key: (plain | changed)[key] for key in NAMES[name].split()}


@every_statement
def test_without_a_gap_the_best_eta_is_zero_and_the_bound_its_limit(name):
    a = one(name, gap=0.0)
    eta, value = best(name, a)
    assert eta == 0.0
    assert value == pytest.approx(bound(name, {**a, "eta": 1e-300}), rel=1e-12)


@every_statement
def test_without_curvature_the_best_eta_is_infinite_and_the_bound_its_limit(name):
    for gap in (2.0, 0.0):
        a = one(name, L=0.0, gap=gap)
        eta, value = best(name, a)
        assert eta == math.inf
        assert value == pytest.approx(bound(name, {**a, "eta": 1e300}), rel=1e-12, abs=1e-290)
        assert value == bound(name, {**a, "eta": math.inf})


@pytest.mark.parametrize("name", ["relaxed", "block", "lars"])
def test_without_curvature_the_condition_alone_holds_eta_back(name):
    a = one(name, L=0.0, lam=0.25)
    eta, value = best(name, a)
    assert eta == pytest.approx(1 / per_eta(name, a), rel=1e-12)
    assert value == bound(name, {**a, "eta": eta})


def test_msgd_without_noise_is_best_at_the_end_of_its_condition():
    eta, value = theory.msgd_best(gap=1, steps=100, batch=1, L=2, sigma=0, beta=0.5)
    assert eta == pytest.approx(0.5**2 / (1.5 * 2), rel=1e-12)
    assert value == pytest.approx(2 * 0.5 / (eta * 100), rel=1e-12)


@every_statement
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_arrays_give_element_by_element_what_floats_give(name, data):
    rows = data.draw(st.lists(arguments_of(name), min_size=2, max_size=4))
    stacked = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    values = bound(name, stacked)
    assert isinstance(values, np.ndarray)
    assert values.tolist() == [bound(name, row) for row in rows]
    eta, lowest = best(name, stacked)
    assert list(zip(eta.tolist(), lowest.tolist(), strict=True)) == [tuple(best(name, row)) for row in rows]


@every_statement
def test_arrays_broadcast_over_every_argument(name):
    a = one(name)
    for key in a:
        column = np.array([[a[key]], [a[key]]])
        row = np.full(3, 10)
        assert bound(name, {**a, "gap": row} | {key: column}).shape == ((2, 1) if key == "gap" else (2, 3))
        if key != "eta":
            eta, lowest = best(name, {**a, key: column})
            assert eta.shape == lowest.shape == (2, 1), key
            eta[0] = 1.0  # the caller may change its array


@every_statement
def test_the_arguments_have_these_names_in_this_order(name):
    names = NAMES[name].split()
    assert list(inspect.signature(getattr(theory, f"{name}_bound")).parameters) == names
    names.remove("eta")
    assert list(inspect.signature(getattr(theory, f"{name}_best")).parameters) == names


# Errors.


@pytest.mark.parametrize("name", ["relaxed", "block", "lars", "msgd"])
@drawn
@given(data=st.data())
def test_an_eta_above_the_condition_is_refused_with_the_largest_that_is_not(name, data):
    a = data.draw(arguments_of(name, zeros=False))
    slope = per_eta(name, a)
    with pytest.raises(ValueError, match=r"the statement needs .* <= .*largest admissible eta is") as caught:
        bound(name, {**a, "eta": 1.000001 / slope})
    largest = float(str(caught.value).rpartition(" ")[2])
    assert largest == pytest.approx(1 / slope, rel=1e-12)
    bound(name, {**a, "eta": largest})


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("relaxed", "8 * eta * kappa * lam <= 1"),
        ("block", "8 * eta * kappa * lam * rho * blocks <= 1"),
        ("lars", "8 * eta * kappa * lam * rho * blocks * gamma_u**2 / gamma_l <= 1"),
        ("msgd", "eta <= (1 - beta)**2 / ((1 + beta) * L)"),
    ],
)
def test_the_refusal_states_the_condition(name, condition):
    with pytest.raises(ValueError, match=re.escape(f"the statement needs {condition}: eta is 9.0, and the largest")):
        bound(name, one(name, eta=9.0, lam=1.0))


def test_one_element_above_the_condition_is_enough_to_refuse():
    with pytest.raises(
        ValueError, match=r"1 of 3 elements violate it, and the largest admissible eta for all of them is 0.125"
    ):
        theory.relaxed_bound(1, np.array([0.1, 0.125, 0.13]), 10, 10, 1, 1, 0, 1)


@every_statement
@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_numbers_out_of_their_range_are_refused(name, bad):
    for key in NAMES[name].split():
        for value in (bad, np.array([one(name)[key], bad])):
            with pytest.raises(ValueError, match=f"^{key} must be .*, got {bad}$"):
                bound(name, one(name) | {key: value})
            if key != "eta":
                with pytest.raises(ValueError, match=f"^{key} must be"):
                    best(name, one(name) | {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eta", 0.0),
        ("steps", 0),
        ("steps", math.inf),
        ("batch", 0),
        ("beta", 1.0),
        ("blocks", 0.5),
        ("rho", 1.01),
        ("rho", 0.0),
        ("gamma_l", 0.0),
        ("gap", math.inf),
        ("L", math.inf),
    ],
)
def test_the_ends_of_the_ranges_are_refused(key, value):
    with pytest.raises(ValueError, match=f"^{key} must be"):
        bound("lars", one("lars") | {key: value})


def test_rho_must_suit_the_number_of_blocks():
    theory.block_bound(**one("block", blocks=3, rho=math.sqrt(3) / 3))
    theory.block_bound(**one("block", blocks=3, rho=theory.rho([0.1, 0.1, 0.1])))
    with pytest.raises(ValueError, match=r"rho must be at least 1 / sqrt\(blocks\), which is 0.5, and at most 1"):
        theory.block_bound(**one("block", blocks=4, rho=0.49))
    with pytest.raises(ValueError, match="gamma_l must be at most gamma_u"):
        theory.lars_bound(**one("lars", gamma_l=2.0, gamma_u=1.0))


# Relations between the statements.


@drawn
@given(data=st.data())
def test_block_wise_with_one_block_is_theorem_2(data):
    a = data.draw(arguments_of("relaxed"))
    single = {**a, "blocks": 1, "rho": 1.0}
    assert bound("block", single) == pytest.approx(bound("relaxed", a), rel=1e-12)
    assert best("block", single) == pytest.approx(best("relaxed", a), rel=1e-12)


@drawn
@given(data=st.data())
def test_block_wise_is_never_better_and_equal_only_for_equal_norms(data):
    a = data.draw(arguments_of("block"))
    whole = best("relaxed", {key: a[key] for key in NAMES["relaxed"].split()})
    assert best("block", a).bound >= whole.bound * (1 - 1e-12)
    equal = best("block", {**a, "rho": 1 / math.sqrt(a["blocks"])})
    assert equal.bound == pytest.approx(whole.bound, rel=1e-9)
    assert equal.eta * math.sqrt(a["blocks"]) == pytest.approx(whole.eta, rel=1e-9)


@drawn
@given(data=st.data())
def test_without_noise_tuned_msgd_and_tuned_sngm_have_one_bound(data):
    a = data.draw(arguments_of("smooth")) | {"sigma": 0.0}
    assert best("smooth", a).bound == pytest.approx(math.sqrt(best("msgd", a).bound), rel=1e-12)


@drawn
@given(data=st.data(), gamma=st.floats(0.01, 100.0))
def test_lars_with_a_constant_phi_is_block_wise_sngm_with_another_eta(data, gamma):
    a = data.draw(arguments_of("block"))
    lars = {**a, "eta": a["eta"] / gamma, "gamma_l": gamma, "gamma_u": gamma}
    assert bound("lars", lars) == pytest.approx(bound("block", a), rel=1e-12)


def test_a_run_of_lars_can_need_the_spread_of_phi_in_the_noise_term():
    """The check `lars-bound` tests every other gamma of the bound; the run for this one is too long for it.

    Noise hides the sign of a gradient, so that long steps (phi = 64) climb a slope of 64. Beyond its top, phi is 1, and
    the loss falls again in short steps at gradients of up to 4900. The curvature is at most 1.
    """
    draw = random.Random(0).random
    slope, top, spread, steps = 64.0, 1e6, 64, 1_260_000
    foot = top + 0.6 * steps / 2  # half of the steps climb: 0.8 of those go up and 0.2 down
    peak = math.sqrt(slope * (foot - top))  # largest gradient beyond the top, for a fall of that height
    x, total = foot, 0.0
    for _ in range(steps):
        beyond = top - x
        if beyond < 0:
            gradient = -slope if x < foot else x - foot - slope
        else:
            gradient = beyond - slope if beyond < peak + slope else 2 * peak + slope - beyond
        noise = 65.0 if draw() < 0.8 else -260.0
        phi = spread if beyond < 0 else 1
        x -= math.copysign(phi / spread, gradient + noise)
        total += abs(gradient)
    sigma = math.sqrt(0.8 * 65**2 + 0.2 * 260**2)
    run = {"gap": slope**2 / 2, "eta": 1 / spread, "steps": steps, "batch": 1, "beta": 0, "lam": 0, "blocks": 1}
    whole = theory.lars_bound(**run, L=1, sigma=sigma, rho=1, gamma_l=1, gamma_u=spread)
    no_noise = theory.lars_bound(**run, L=1, sigma=0, rho=1, gamma_l=1, gamma_u=spread)
    assert no_noise + 2 * sigma * (1 + 1) < total / steps < whole


# kappa, rho and the angle.


@drawn
@given(beta=or_zero(st.floats(0.0, 0.999)))
def test_kappa_is_the_papers(beta):
    assert theory.kappa(beta) == pytest.approx(float(k(Fraction(beta))), rel=1e-12)
    assert theory.kappa(np.array([beta, 0.0]))[0] == theory.kappa(beta)
    assert theory.kappa(np.array([0.0])).tolist() == [1.0]


@drawn
@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4), min_size=1, max_size=8),
    st.sampled_from([1e-200, 1.0, 1e200]),
)
def test_rho_and_the_angle_are_those_of_the_vectors(blocks, scale):
    blocks = [np.array(block) for block in blocks]
    norms = np.array([np.linalg.norm(block) for block in blocks])
    assume(norms.min() > 1e-3)
    g, n = np.concatenate(blocks), np.concatenate([block / np.linalg.norm(block) for block in blocks])
    assert theory.rho(norms * scale) == pytest.approx(np.linalg.norm(g) / norms.sum(), rel=1e-12)
    assert theory.cos_angle(norms * scale) == pytest.approx(g @ n / np.linalg.norm(g) / np.linalg.norm(n), rel=1e-12)
    assert 1 / math.sqrt(len(blocks)) <= theory.rho(norms) <= 1
    assert theory.cos_angle(norms) <= 1
    assert type(theory.rho(norms)) is type(theory.cos_angle(list(norms))) is float


def test_rho_and_the_angle_of_several_steps_come_one_a_row():
    norms = np.array([[1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 4.0, 0.0], [7.0, 0.0, 0.0, 0.0]])
    assert theory.rho(norms) == pytest.approx([1 / 2, 5 / 7, 1])
    assert theory.cos_angle(norms) == pytest.approx([1, 7 / 10, 1 / 2])


@pytest.mark.parametrize("norms", [[], 1.0, [0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_norms_that_have_no_ratio_are_refused(norms):
    for function in (theory.rho, theory.cos_angle):
        with pytest.raises(ValueError, match=r"^norms must"):
            function(norms)


# Corollaries and Table 1.

budgets = st.integers(1, 10**12) | st.floats(1.0, 1e15)
constants = {
    "gap": or_zero(st.floats(1e-3, 1e3)),
    "L": or_zero(st.floats(1e-3, 1e3)),
    "sigma": or_zero(st.floats(1e-3, 1e2)),
    "beta": or_zero(st.floats(0.0, 0.99)),
}


@drawn
@given(C=budgets, **constants)
def test_sngms_plan_is_corollary_1(C, gap, L, sigma, beta):
    found = theory.plan(C, "sngm", gap=gap, L=L, sigma=sigma, beta=beta)
    B = math.sqrt(C)
    assert found.batch == pytest.approx(B, rel=1e-12)
    assert found.lr == pytest.approx(math.sqrt(B / C), rel=1e-12)
    assert found.steps == math.ceil(C / B)
    corollary = ((1 - beta) * gap + L * (1 + beta) / (2 * (1 - beta) ** 2) + 2 * sigma) / C**0.25
    assert found.bound == pytest.approx(corollary, rel=1e-12)
    assert found.bound >= theory.smooth_bound(gap, found.lr, found.steps, B, L, sigma, beta) * (1 - 1e-12)
    assert found.least_gradients == 0
    assert found.proved is True
    assert {type(value) for value in found} == {float}


@drawn
@given(more=st.just(1.0) | st.floats(1.0, 1e3), lam=st.floats(1e-2, 10.0), **constants)
def test_sngms_plan_on_relaxed_smooth_functions_is_corollary_2(more, lam, gap, L, sigma, beta):
    least = float((8 * k(Fraction(beta)) * Fraction(lam)) ** 4)
    C = least * more
    found = theory.plan(C, "sngm", gap=gap, L=L, sigma=sigma, beta=beta, lam=lam)
    assert found.batch == pytest.approx(math.sqrt(C), rel=1e-12)
    assert found.lr == pytest.approx(C**-0.25, rel=1e-12)
    corollary = (2 * (1 - beta) * gap + 8 * L * (1 + beta) / (1 - beta) ** 2 + 4 * sigma) / C**0.25
    assert found.bound == pytest.approx(corollary, rel=1e-12)
    assert found.least_gradients == theory.least_gradients(beta, lam) == pytest.approx(least, rel=1e-12)
    assert found.proved is True
    condition = r"8 \* eta \* kappa \* lam <= 1, that is at least .* gradients \(Corollary 2\)"
    with pytest.raises(ValueError, match=f"{condition}: .*largest admissible eta") as caught:
        theory.plan(least * 0.999, "sngm", gap=gap, L=L, sigma=sigma, beta=beta, lam=lam)
    named = re.search(r"at least (\S+) gradients", str(caught.value))
    assert float(named[1]) == pytest.approx(least, rel=1e-12)
    theory.plan(float(named[1]), "sngm", beta=beta, lam=lam)


@drawn
@given(C=budgets, **constants)
def test_msgds_plan_is_table_1(C, gap, L, sigma, beta):
    found = theory.plan(C, "msgd", gap=gap, L=L, sigma=sigma, beta=beta)
    B = min(math.sqrt(C) / L, C**0.25) if L else C**0.25
    assert found.batch == pytest.approx(B, rel=1e-12)
    assert found.lr == pytest.approx(B / math.sqrt(C), rel=1e-12)
    assert found.steps in {math.ceil(C / B * (1 + slack)) for slack in (-3e-12, 0, 3e-12)}
    square = section_3(*map(Fraction, (gap, B / math.sqrt(C), C / B, B, L, sigma, beta)))
    assert found.bound == pytest.approx(math.sqrt(square), rel=1e-12)
    limit = (1 - beta) ** 2 / ((1 + beta) * L) if L else math.inf
    if not math.isclose(found.lr, limit, rel_tol=1e-9):
        assert found.proved is (found.lr < limit)
    if found.proved:
        assert found.bound**2 == pytest.approx(
            theory.msgd_bound(gap, found.lr, C / B, found.batch, L, sigma, beta), rel=1e-9
        )


def test_msgds_plan_at_its_exact_limit_is_proved():
    assert theory.plan(10**6, "msgd", L=100, beta=0).proved, "without momentum, lr = 1/L is admissible"
    assert not theory.plan(10**6, "msgd", L=100, beta=0.1).proved
    assert theory.plan(190.0**4, "msgd").proved
    assert not theory.plan(189.0**4, "msgd").proved


def test_msgds_batch_falls_with_the_curvature_and_sngms_does_not():
    L = np.array([1.0, 10.0, 100.0, 1000.0])
    assert theory.plan(10**8, "msgd", L=L).batch.tolist() == [100.0, 100.0, 100.0, 10.0]
    assert theory.plan(10**8, "sngm", L=L).batch.tolist() == [10**4] * 4


def test_a_plan_has_whole_numbers_for_a_run():
    found = theory.plan(1000, "sngm")
    assert found.batch == pytest.approx(31.6227766)
    assert found.steps == 32
    assert (found.whole_batch, found.whole_steps) == (31, 33)
    assert type(found.whole_batch) is type(found.whole_steps) is int
    assert theory.plan(0.5, "sngm").whole_batch == 1
    many = theory.plan(np.array([1000, 10**8]), "SNGM", lam=0.0)
    assert many.whole_batch.tolist() == [31, 10**4]
    assert many.whole_steps.tolist() == [33, 10**4]
    assert many.proved.tolist() == [True, True]


@pytest.mark.parametrize(
    ("arguments", "settings", "told"),
    [
        ((10**6, "lars"), {}, "method must be 'msgd' or 'sngm', got 'lars'"),
        ((0, "sngm"), {}, "gradients must be a finite number above 0, got 0.0"),
        ((10**6, "msgd"), {"lam": 0.1}, "lam must be 0"),
        ((10**6, "sngm"), {"lam": -1}, "lam must be a finite number of at least 0, got -1.0"),
        ((np.array([1e3, 1e5]), "sngm"), {"lam": 1, "beta": 0}, "at least 4096.0 gradients.*1 of 2 elements"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(arguments, settings, told):
    with pytest.raises(ValueError, match=told):
        theory.plan(*arguments, **settings)


@drawn
@given(C=budgets, eta=st.floats(1e-6, 10.0), batch=st.integers(1, 10**5))
def test_the_order_of_extrap_sgd_is_that_of_section_3(C, eta, batch):
    C_, eta_, batch_ = Fraction(C), Fraction(eta), Fraction(batch)
    order = batch_ / (eta_ * C_) + (eta_ + eta_**2) / batch_
    assert theory.extrap_order(C, eta, batch, 1 / eta) == pytest.approx(float(order), rel=1e-12)
    assert theory.extrap_order(C, eta, batch, 0.0) == pytest.approx(float(order), rel=1e-12)
    with pytest.raises(ValueError, match=r"eta <= 1 / L: eta is .*, and the largest admissible eta is"):
        theory.extrap_order(C, eta, batch, 1.001 / eta)


def test_at_an_infinite_rate_a_bound_that_grows_is_infinite():
    assert theory.smooth_bound(1, math.inf, 100, 16, 1, 1, 0) == math.inf
    assert theory.relaxed_bound(1, math.inf, 100, 16, 1, 1, 0, 0) == math.inf


def test_whole_numbers_of_steps_are_met():
    assert theory.plan(1e4, "msgd", L=71).steps == 7100
