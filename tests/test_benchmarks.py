"""Statistics that the benchmarks compute from their samples."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import results


def row(*samples, slow=False):
    times = {"min": min(samples), "median": sorted(samples)[len(samples) // 2], "samples": len(samples)}
    return {"slow": slow, "wall_us": times, "wall_us_of_rounds": list(samples), "unavailable": ""}


def record(statistic):
    return {"about": {"statistic": statistic}}


def test_a_ratio_on_a_gpu_is_of_rounds_and_does_not_go_by_how_fast_the_machine_is_in_each():
    ours, theirs = row(2.0, 40.0, 6.0), row(1.0, 20.0, 3.0)
    assert results.times_as_long(record("median"), ours, theirs) == pytest.approx(2.0)
    assert results.times_as_long(record("median"), row(2.0, 4.0, 90.0), row(1.0, 20.0, 3.0)) == pytest.approx(2.0)
    assert results.times_as_long(record("median"), ours, theirs, theirs) == pytest.approx(1.0)


def test_a_ratio_of_what_was_not_measured_together_is_of_medians_and_on_a_cpu_of_the_fastest():
    ours, slow, short = row(2.0, 4.0, 90.0), row(1.0, 8.0, 9.0, slow=True), row(1.0, 8.0)
    for other in (slow, short):
        assert results.times_as_long(record("median"), ours, other) == pytest.approx(0.5)
        assert results.times_as_long(record("min"), ours, other) == pytest.approx(2.0)


def test_there_is_no_ratio_without_all_of_its_times():
    absent = {**row(1.0), "wall_us": None}
    for rows in ((None, row(1.0)), (row(1.0), None), (row(1.0), row(1.0), absent), (absent, row(1.0))):
        assert results.times_as_long(record("median"), *rows) is None
