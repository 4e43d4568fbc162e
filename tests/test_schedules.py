"""Learning rate schedules at points computed by hand."""

import math

import pytest

from sngm.errors import UsageError
from sngm.tasks import Moment, Schedule


def factor(text: str, step: int = 0, *, warmup: float = 0.0, history=(), higher: bool = True) -> float:
    """Return the factor at a step of a run of 10 epochs with 10 steps each."""
    return Schedule(text, warmup)(Moment(step, 100, step // 10, 10, history, higher))


@pytest.mark.parametrize(
    ("text", "step", "expected"),
    [
        ("constant", 99, 1.0),
        ("cosine", 0, 1.0),
        ("cosine", 9, 1.0),
        ("cosine", 10, (1 + math.cos(math.pi / 10)) / 2),
        ("cosine", 50, 0.5),
        ("cosine", 99, (1 - math.cos(math.pi / 10)) / 2),
        ("linear", 0, 1.0),
        ("linear", 30, 0.7),
        ("linear", 99, 0.01),
        ("polynomial", 30, 0.49),
        ("polynomial(power=3)", 90, 0.001),
        ("polynomial(power=0)", 90, 1.0),
    ],
)
def test_a_schedule_has_this_value_here(text, step, expected):
    assert factor(text, step) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("warmup", "step", "expected"),
    [
        (2, 0, 0.05),
        (2, 9, 0.5),
        (2, 19, 1.0),
        (2, 20, 1.0),
        (0.5, 0, 0.2),
        (0.5, 4, 1.0),
        (0.01, 0, 1.0),
        (20, 99, 0.5),
    ],
)
def test_warm_up_grows_in_a_straight_line_to_the_full_rate(warmup, step, expected):
    assert factor("constant", step, warmup=warmup) == pytest.approx(expected, rel=1e-12)


def test_warm_up_multiplies_what_the_schedule_says():
    assert factor("linear", 9, warmup=2) == pytest.approx(0.91 * 0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "history", "expected"),
    [
        ("plateau", [], 1.0),
        ("plateau", [0.5, 0.6, 0.7], 1.0),
        ("plateau", [0.5, 0.5], 1 / 4),
        ("plateau", [0.5, 0.6, 0.55, 0.58], 1 / 16),
        ("plateau", [0.5, 0.4, 0.6, 0.5], 1 / 16),
        ("plateau(factor=10)", [0.5, 0.4], 1 / 10),
        ("plateau(patience=1)", [0.5, 0.4], 1.0),
        ("plateau(patience=1)", [0.5, 0.4, 0.5], 1 / 4),
        ("plateau(patience=1)", [0.5, 0.4, 0.6, 0.5], 1.0),
        ("plateau(factor=2,patience=2)", [0.5, 0.4, 0.4, 0.4, 0.4, 0.4], 1 / 2),
        ("plateau", [math.nan, 0.5, math.nan], 1 / 16),
    ],
)
def test_plateau_divides_when_the_score_gets_no_better(text, history, expected):
    assert factor(text, history=history) == expected
    assert factor(text, history=[-score for score in history], higher=False) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "cosin",
            "must be one of constant, cosine, linear, polynomial, plateau, got 'cosin' (did you mean 'cosine'?)",
        ),
        ("cosine(power=2)", "cosine has no setting 'power'; it has none"),
        ("plateau(wait=2)", "plateau has no setting 'wait'; it has factor, patience"),
        ("polynomial(power=-1)", "power must be a number of at least 0.0, got -1"),
        ("polynomial(power=nan)", "power must be a number"),
        ("polynomial(power=true)", "power must be a number"),
        ("plateau(factor=0.5)", "factor must be a number of at least 1.0, got 0.5"),
        ("plateau(patience=-1)", "patience must be a number of at least 0, got -1"),
        ("plateau(patience", "expected a name"),
    ],
)
def test_unknown_names_and_settings_are_refused(text, told):
    with pytest.raises(UsageError) as refusal:
        Schedule(text)
    assert told in str(refusal.value)


@pytest.mark.parametrize("warmup", [-1.0, math.nan, math.inf])
def test_a_warm_up_that_is_no_length_is_refused(warmup):
    with pytest.raises(UsageError, match="`warmup` must be a finite number of epochs"):
        Schedule("constant", warmup)
