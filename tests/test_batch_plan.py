"""Batch plans: pieces cover the global batch exactly, and errors name values that are possible."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sngm.errors import UsageError
from sngm.training import BatchPlan

small = st.integers(1, 12)
maybe = st.none() | small


@settings(deadline=None)
@given(*[st.integers(1, 4)] * 5)
def test_pieces_cover_the_batch_once_in_order_and_each_worker_holds_a_contiguous_part(
    groups, per_micro, per_share, each, ranks
):
    workers, micro = each * ranks, groups * per_micro
    plan = BatchPlan.of(micro * per_share * workers, workers, micro, groups, ranks)
    covered = []
    for rank in range(ranks):
        for worker in plan.workers_of(rank):
            own = [i for piece in plan.pieces(worker) for i in range(piece.start, piece.stop)]
            assert own == list(range(worker * plan.share, (worker + 1) * plan.share))
            assert {piece.stop - piece.start for piece in plan.pieces(worker)} == {plan.bn_group}
            covered += own
    assert covered == list(range(plan.batch))


@settings(deadline=None)
@given(batch=st.integers(1, 60), workers=maybe, micro=maybe, bn_group=maybe, ranks=st.integers(1, 4))
def test_following_the_refusals_leads_to_a_plan(batch, workers, micro, bn_group, ranks):
    given = {"batch": batch, "workers": workers, "micro": micro, "bn_group": bn_group}
    said = {name for name, value in given.items() if value is not None}
    refused = []
    for _ in range(5):
        try:
            plan = BatchPlan.of(**given, ranks=ranks)
        except UsageError as error:
            name, values = advice(error)
            assert name in said
            assert name not in refused
            refused.append(name)
            given[name] = values[0]
        else:
            assert all(getattr(plan, name) == value for name, value in given.items() if value is not None)
            return
    pytest.fail(f"refused {refused}")


@settings(deadline=None)
@given(batch=st.integers(1, 60), workers=maybe, micro=maybe, bn_group=maybe, ranks=st.integers(1, 4))
def test_every_value_that_a_refusal_names_is_accepted_there(batch, workers, micro, bn_group, ranks):
    given = {"batch": batch, "workers": workers, "micro": micro, "bn_group": bn_group}
    try:
        BatchPlan.of(**given, ranks=ranks)
    except UsageError as error:
        name, values = advice(error)
    else:
        assume(False)
    order = ["workers", "batch", "micro", "bn_group"]  # order of the checks; later arguments are not checked yet
    later = dict.fromkeys(order[order.index(name) + 1 :])
    for value in values:
        fits = {**given, **later, "batch": 60 * value if name == "workers" else batch, name: value}
        assert getattr(BatchPlan.of(**fits, ranks=ranks), name) == value


@settings(deadline=None)
@given(share=st.integers(1, 60), micro=st.integers(1, 70))
def test_the_nearest_divisors_are_named(share, micro):
    assume(share % micro)
    with pytest.raises(UsageError) as refusal:
        BatchPlan.of(share, micro=micro)
    divisors = [d for d in range(1, share + 1) if share % d == 0]
    nearest = [max(d for d in divisors if d < micro), *sorted(d for d in divisors if d > micro)[:1]]
    assert advice(refusal.value) == ("micro", nearest)


@pytest.mark.parametrize("name", ["batch", "workers", "micro", "bn_group"])
@pytest.mark.parametrize("value", [0, -4])
def test_numbers_below_one_are_refused(name, value):
    with pytest.raises(UsageError, match=f"`{name}` must be a whole number >= 1, got {value}"):
        BatchPlan.of(**{"batch": 16, name: value})


def test_what_is_not_said_follows_from_the_rest():
    assert BatchPlan.of(32) == BatchPlan(32, 1, 32, 32, 1)
    assert BatchPlan.of(32, ranks=2) == BatchPlan(32, 2, 16, 16, 2)
    assert BatchPlan.of(32, 2, bn_group=4) == BatchPlan(32, 2, 4, 4, 1)
    assert BatchPlan.of(32, 2, micro=8, bn_group=4) == BatchPlan(32, 2, 8, 4, 1)


def advice(error: UsageError) -> tuple[str, list[int]]:
    """Return the field that an error names, and the values that it suggests."""
    found = re.fullmatch(r"`(\w+)`=\d+ .*nearest: (\d+)(?: or (\d+))?", str(error))
    assert found, error
    return found[1], [int(value) for value in found.groups()[1:] if value]


@pytest.mark.parametrize(
    ("plan", "count", "expected"),
    [
        (BatchPlan.of(32768, 8, 128), 17232, (16384, 128, 128)),
        (BatchPlan.of(512), 256, (256, 256, 256)),
        (BatchPlan.of(512, 2), 255, (254, 127, 127)),
        (BatchPlan.of(512, 1, 128, 32), 100, (96, 96, 32)),
        (BatchPlan.of(512, 1, 128, 32), 31, None),
        (BatchPlan.of(512, 8), 8, None),
        (BatchPlan.of(512), 0, None),
    ],
)
def test_the_rest_of_an_epoch_keeps_the_groups(plan, count, expected):
    found = plan.for_rest(count)
    assert expected == (found and (found.batch, found.micro, found.bn_group))
