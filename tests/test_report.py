"""Contents of reports, from synthetic records."""

import json
import math
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from console import sngm
from scipy import stats as scipy_stats

from sngm import report
from sngm.report import drawing, figures, page, stats, targets
from sngm.report.headline import headline
from sngm.report.records import read

HOSTILE = "<script>alert('x')</script>|&\"\x00\ud800"


class Folder:
    """A study's folder, to which records are written."""

    def __init__(self, path, metric="accuracy", **config):
        self.path, self.metric, self.count = Path(path), metric, 0
        self.config = {"task": "digits", "epochs": 3, **config}
        self.path.mkdir(parents=True, exist_ok=True)

    def run(self, method, batch, value, lr=0.1, seed=0, part="full", status="finished", home="runs", tail="", **record):
        prefix = "validation" if part == "select" else "test"
        place = self.path / home / f"run{self.count:03}"
        self.count += 1
        place.mkdir(parents=True)
        config = {"method": method, "method_settings": {}, "lr": lr, "batch": batch, "seed": seed, "part": part}
        key = f"{prefix}_{self.metric}"
        text = {
            "format": 1,
            "status": status,
            "config": self.config | config,
            "label": method,
            "hash": "9f" * 8,
            "result": {key: value} if status == "finished" else {},
            "timing": {"seconds": 2.0},
            "versions": {"sngm": "0.1.0"},
            "hardware": {"device": "cpu", "name": "a machine"},
            "commit": "abc1234",
            "command": "sngm train digits",
        }
        (place / "run.json").write_text(json.dumps(text | record))
        share = [None if value is None else value * part for part in (0.5, 0.8, 1.0)]
        lines = [json.dumps({"epoch": e, "step": e, "lr": lr, key: v}) for e, v in enumerate(share, 1)]
        (place / "metrics.jsonl").write_text("\n".join(lines) + "\n" + tail)
        return place

    def runs(self, method, batch, values, **settings):
        for seed, value in enumerate(values):
            self.run(method, batch, value, seed=seed, **settings)
        return self

    def study(self, methods, batches, cells=(), **more):
        record = {"format": 1, "task": "digits", "methods": methods, "batches": batches, "seeds": 3, "epochs": 3}
        record |= {"metric": self.metric, "command": "sngm compare digits", "cells": list(cells)} | more
        (self.path / "study.json").write_text(json.dumps(record))
        return self

    def summary(self):
        return report.summarise(self.path)

    def answer(self):
        return self.summary().answer()


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.mark.parametrize("values", [[0.1, 0.2], [0.97, 0.98, 0.96], [1.0, 1.0, 1.5, 2.0, 9.0, 3.0, 2.5]])
def test_the_interval_is_scipys(values):
    low, high = scipy_stats.t.interval(0.95, len(values) - 1, scipy_stats.tmean(values), scipy_stats.sem(values))
    assert stats.half_width(values) == pytest.approx((high - low) / 2, rel=1e-9)


def test_one_value_has_no_interval_and_equal_values_have_none_to_speak_of():
    assert stats.half_width([0.5]) is None
    assert stats.half_width([0.5, 0.5]) == 0


def test_the_test_is_welchs():
    a, b = [0.97, 0.981, 0.962, 0.97], [0.93, 0.955, 0.94]
    expected = scipy_stats.ttest_ind(a, b, equal_var=False).pvalue
    assert stats.contrast((1, a), (-1, b)) == pytest.approx(expected, rel=1e-9)
    assert stats.contrast((1, a), (-1, [0.5])) is None
    assert stats.contrast((1, [0.5, 0.5]), (-1, [0.6, 0.6])) is None


def test_a_cell_holds_the_full_runs_at_the_chosen_rate(folder):
    for lr, value in [(0.03, 0.90), (0.1, 0.95), (0.3, None)]:
        folder.run("sngm", 32, value, lr=lr, part="select", status="diverged" if value is None else "finished")
    folder.runs("sngm", 32, [0.97, 0.98, 0.96]).run("sngm", 32, 0.99, lr=0.3)
    cell = {"method": "sngm", "batch": 32, "lr": 0.1, "grid": [0.03, 0.1, 0.3], "extensions": 2, "at_edge": False}
    summary = folder.study(["sngm"], [32], [cell]).summary()
    found = summary.cells["sngm", 32]
    assert (found.n, found.mean, found.lr, found.extensions, found.at_edge) == (3, pytest.approx(0.97), 0.1, 2, False)
    assert found.values == {0: 0.97, 1: 0.98, 2: 0.96}
    assert found.half_width == pytest.approx(0.0248, abs=1e-4)
    assert (found.selection[0.03], found.selection[0.1], found.seconds) == (0.90, 0.95, 2.0)
    assert math.isnan(found.selection[0.3])
    assert summary.notes == [
        "1 run left out of the table: another learning rate than the chosen one, or a seed run twice."
    ]


def test_the_table_says_mean_interval_seeds_and_rate(folder):
    folder.runs("sngm", 32, [0.97, 0.98, 0.96], lr=0.3).runs("sngm", 512, [0.9])
    folder.run("msgd", 32, None, status="diverged")
    summary = folder.summary()
    assert report.rows(summary) == [
        ["method", "batch 32", "batch 512"],
        ["msgd", "diverged", "-"],
        ["sngm", "97.0 ± 2.5 (n=3, lr 0.3)", "90.0 (n=1, lr 0.1)"],
    ]
    assert "| sngm | 97.0 ± 2.5 (n=3, lr 0.3) | 90.0 (n=1, lr 0.1) |" in report.table(summary)


def test_a_rate_at_the_edge_has_a_star_and_a_footnote(folder):
    folder.runs("sngm", 32, [0.97, 0.98])
    cell = {"method": "sngm", "batch": 32, "lr": 0.1, "grid": [0.03, 0.1], "extensions": 0, "at_edge": True}
    text = report.table(folder.study(["sngm"], [32], [cell]).summary())
    assert r"lr 0.1\*" in text
    assert "edge of its grid" in text


def test_runs_that_diverged_are_counted_beside_the_mean(folder):
    folder.runs("sngm", 32, [0.97, 0.98]).run("sngm", 32, None, seed=2, status="diverged")
    folder.run("sngm", 32, None, seed=3)  # finished, but with a value that is not finite
    summary = folder.summary()
    assert report.rows(summary)[1][1].endswith("(n=2, lr 0.1, 2 diverged)")
    assert "2 of 4 runs of sngm diverged and do not count" in summary.answer()
    assert summary.notes[0].startswith("1 finished run counted as diverged: the accuracy is NaN or infinite although")


def test_a_clear_difference(folder):
    folder.runs("sngm", 32, [0.980, 0.981, 0.979]).runs("msgd", 32, [0.980, 0.982, 0.981])
    folder.runs("sngm", 512, [0.970, 0.971, 0.972]).runs("msgd", 512, [0.930, 0.932, 0.931])
    assert folder.answer() == (
        "At batch 512, sngm is best on digits with 97.1 ± 0.2 % test accuracy, 4.0 points above msgd: a clear "
        "difference (p < 0.001, Welch's test over 3 and 3 seeds). From batch 32 to 512, sngm lost least (0.9 points), "
        "then msgd (5.0 points; p < 0.001)."
    )


def test_too_close_to_call(folder):
    folder.runs("sngm", 32, [0.97, 0.98, 0.96]).runs("msgd", 32, [0.96, 0.98, 0.955])
    p = scipy_stats.ttest_ind([0.97, 0.98, 0.96], [0.96, 0.98, 0.955], equal_var=False).pvalue
    answer = folder.answer()
    assert f"sngm and msgd are too close to call on digits: 97.0 and 96.5 % test accuracy (p = {p:.2f}" in answer
    assert "best" not in answer
    assert "lost" not in answer


def test_one_seed_proves_nothing(folder):
    folder.run("sngm", 32, 0.97)
    folder.run("msgd", 32, 0.90)
    answer = folder.answer()
    assert "sngm is ahead on digits with 97.0 % test accuracy, 7.0 points above msgd" in answer
    assert "with one seed no test can tell" in answer


def test_seeds_without_spread_prove_nothing(folder):
    assert "no spread" in folder.runs("sngm", 32, [0.97, 0.97]).runs("msgd", 32, [0.9, 0.9]).answer()


def test_a_tie(folder):
    answer = folder.runs("sngm", 32, [0.97, 0.98]).runs("msgd", 32, [0.98, 0.97]).answer()
    assert answer == "At batch 32, msgd and sngm tie on digits: 97.5 % test accuracy."


def test_one_method(folder):
    answer = folder.runs("sngm", 32, [0.97, 0.98]).runs("sngm", 512, [0.98]).answer()
    assert answer.startswith("At batch 512, sngm reaches 98.0 % test accuracy on digits (one seed).")
    assert answer.endswith(" From batch 32 to 512, sngm gained 0.5 points.")


def test_what_the_methods_lost_can_be_too_close_to_call_or_the_same(folder):
    folder.runs("sngm", 32, [0.97, 0.99]).runs("msgd", 32, [0.95, 0.97])
    folder.runs("sngm", 512, [0.95, 0.97]).runs("msgd", 512, [0.925, 0.945])
    answer = folder.answer()
    assert "sngm lost least (2.0 points), then msgd (2.5 points; p = 0.8" in answer
    assert answer.endswith(", too close to call).")
    folder.runs("lars", 32, [0.91, 0.93]).runs("lars", 512, [0.89, 0.91])
    assert folder.answer().endswith("lars and sngm lost the same and least (2.0 points).")
    folder.runs("adam", 32, [0.91, 0.93]).runs("adam", 512, [0.92, 0.94])
    assert "adam gained most (1.0 points), then lars (a loss of 2.0 points; p" in folder.answer()


@pytest.mark.parametrize("lr", [1e-302, 1e300])
def test_no_rate_that_could_be_run_is_beyond_a_report(lr, folder):
    folder.runs("sngm", 32, [0.9], lr=lr).run("msgd", 32, None, lr=lr, status="diverged")
    assert report.rows(folder.summary())[2][1].endswith(f"lr {lr:g})")
    assert report.write(folder.path).exists()


def test_a_method_that_diverged_or_is_missing_at_the_largest_batch_is_named(folder):
    folder.runs("sngm", 512, [0.97, 0.98]).run("msgd", 512, None, status="diverged")
    answer = folder.study(["sngm", "msgd", "lars"], [512]).answer()
    assert answer.endswith("; msgd diverged; lars has no finished run there.")


def test_everything_diverged(folder):
    folder.run("sngm", 32, None, status="diverged")
    folder.run("msgd", 32, None, part="select", status="diverged")
    assert folder.answer() == "Every run on digits diverged, so there is nothing to compare."


def test_a_metric_that_is_nan_in_every_run_is_named(folder):
    folder.run("sngm", 32, None)
    assert folder.answer() == "The accuracy of every run is NaN or infinite, so there is nothing to compare."


def test_the_largest_batch_diverged_and_the_next_is_told(folder):
    folder.runs("sngm", 32, [0.97, 0.98]).run("sngm", 512, None, status="diverged")
    assert folder.answer().startswith("At batch 512 every run diverged. At batch 32, sngm reaches 97.5")


def test_an_interrupted_study_says_how_far_it_came(folder):
    cells = [{"method": "sngm", "batch": 32, "lr": None, "grid": [0.1, 0.3], "extensions": 0, "at_edge": False}]
    folder.study(["sngm"], [32, 512], cells)
    assert folder.answer() == "No run has finished yet (0 begun), so there is no answer."
    folder.run("sngm", 32, 0.9, part="select")
    assert "learning rates are still being chosen (1 trial done)" in folder.answer()
    folder.run("sngm", 32, 0.9, status="running")
    assert "No run has finished yet (1 begun)" in folder.answer()
    assert "No run has finished yet" in report.write(folder.path).read_text("utf-8")


@pytest.mark.parametrize("metric", ["loss", "perplexity"])
def test_where_lower_is_better_the_lowest_wins(tmp_path, metric):
    folder = Folder(tmp_path, metric=metric)
    folder.runs("sngm", 20, [1.10, 1.11, 1.12]).runs("msgd", 20, [1.10, 1.11, 1.12])
    folder.runs("sngm", 2000, [1.20, 1.21, 1.22]).runs("msgd", 2000, [1.50, 1.51, 1.52])
    summary = folder.summary()
    assert not summary.higher_is_better
    assert summary.answer() == (
        f"At batch 2000, sngm is best on digits with 1.210 ± 0.025 test {metric}, 0.3 below msgd: a clear difference "
        "(p < 0.001, Welch's test over 3 and 3 seeds). From batch 20 to 2000, sngm lost least (0.1), then msgd (0.4; "
        "p < 0.001)."
    )
    assert "%" not in report.table(summary).replace("95 %", "")


def test_a_folder_of_runs_and_the_folder_of_one_run_are_read_too(folder):
    place = folder.run("sngm", 32, 0.9, home=".")
    assert len(read(folder.path).runs) == 1
    assert report.summarise(place).answer() == "At batch 32, sngm reaches 90.0 % test accuracy on digits (one seed)."
    assert report.write(place).parent == place


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no records: expected"):
        report.write(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        report.write(tmp_path / "missing")
    (tmp_path / "one").mkdir()
    (tmp_path / "one/study.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"name one of the studies in it: .*one$"):
        report.write(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '"x"', '{"config": {"lr": "fast"}}', "[" * 100_000, "\xff"])
def test_a_broken_record_is_named_and_skipped(folder, text):
    folder.run("sngm", 32, 0.9)
    (folder.run("sngm", 32, 0.9, seed=1) / "run.json").write_text(text, "latin-1")
    summary = folder.summary()
    assert summary.cells["sngm", 32].n == 1
    assert summary.notes == ["1 record is broken, or changed since written: run001."]


def test_a_broken_study_leaves_the_runs(folder):
    folder.run("sngm", 32, 0.9)
    (folder.path / "study.json").write_text('{"methods": 3}')
    summary = folder.summary()
    assert summary.notes == ["1 record is broken, or changed since written: study.json."]
    assert summary.notes[0] in page.html([summary])


def test_a_line_that_was_cut_off_and_values_that_are_not_finite_are_no_points(folder):
    folder.run("sngm", 32, 0.9, tail='{"epoch": 4, "test_accuracy": null}\n{"epoch": 5, "test_acc')
    (series,) = figures.curves(folder.summary()).panels["batch 32"]
    assert series.points == [(1, 45.0), (2, pytest.approx(72.0)), (3, 90.0)]


def test_curves_are_means_over_finished_seeds(folder):
    folder.runs("sngm", 32, [0.9, 0.8]).run("sngm", 32, 0.1, seed=2, status="running")
    (series,) = figures.curves(folder.summary()).panels["batch 32"]
    assert series.points[-1] == (3, pytest.approx(85.0))
    assert len(series.faint) == 3


def test_without_a_study_the_rate_that_was_best_on_validation_data_is_shown(folder):
    folder.run("sngm", 32, 0.95, lr=0.1, part="select")
    folder.run("sngm", 32, 0.90, lr=0.3, part="select")
    folder.run("sngm", 32, 0.5, lr=0.1)
    folder.run("sngm", 32, 0.9, lr=0.3)
    cell = folder.summary().cells["sngm", 32]
    assert (cell.lr, cell.mean, cell.at_edge, cell.chosen_on_test) == (0.1, 0.5, True, False)


def test_a_rate_that_was_chosen_on_test_data_is_called_that(folder):
    folder.run("sngm", 32, 0.5, lr=0.1)
    folder.run("sngm", 32, 0.9, lr=0.3)
    summary = folder.summary()
    assert summary.cells["sngm", 32].lr == 0.3
    assert "† no learning rate was chosen on validation data" in report.table(summary)


def test_uneven_runs_are_pointed_out(folder):
    folder.run("sngm", 32, 0.9)
    folder.config["epochs"] = 9
    folder.run("msgd", 32, 0.9, status="failed")
    notes = folder.summary().notes
    assert notes == ["The runs differ in length (3 and 9 epochs): the comparison is not even.", "1 run failed: run001."]


def write_hostile(path):
    """Write a study in which every text tries to inject HTML into the page."""
    folder = Folder(path, task=HOSTILE)
    more = {"versions": {HOSTILE: HOSTILE}, "hardware": {HOSTILE: HOSTILE}, "commit": HOSTILE, "command": HOSTILE}
    for batch in (32, 512):
        for lr in (0.03, 0.1, 0.3):
            folder.run(HOSTILE, batch, 0.9 - lr, lr=lr, part="select", **more)
        folder.runs(HOSTILE, batch, [0.9, 0.91], hash=HOSTILE, **more).runs("msgd", batch, [0.8, 0.85])
    folder.study([HOSTILE, "msgd"], [32, 512], task=HOSTILE, command=HOSTILE)
    return report.write(path)


def test_hostile_text_is_only_text(tmp_path):
    text = write_hostile(tmp_path).read_text("utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "http" not in text.replace("http-equiv", "")
    table = (tmp_path / "table.md").read_text("utf-8")
    assert "<script" not in table
    assert len({line.replace("\\|", "").count("|") for line in table.splitlines() if line.startswith("|")}) == 1
    for name in ("curves.svg", "batch.svg", "lr.svg"):
        tags = {element.tag.rpartition("}")[2] for element in ET.parse(tmp_path / name).iter()}
        assert tags <= {"svg", "title", "style", "defs", "clipPath", "rect", "g", "path", "use", "text"}


def test_a_report_that_fails_leaves_the_last_one(folder, monkeypatch):
    folder.run("sngm", 32, 0.9)
    path = report.write(folder.path)
    before = path.read_bytes()
    folder.run("sngm", 32, 0.8, seed=1)

    def fail(*_, **__):
        raise RuntimeError

    for owner, name in [(page, "html"), (page, "standalone"), (os, "replace")]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(RuntimeError):
                report.write(folder.path)
    assert path.read_bytes() == before
    assert not [name for name in os.listdir(folder.path) if name.endswith(".tmp")]
    assert report.write(folder.path).read_bytes() != before


SVG = "{http://www.w3.org/2000/svg}"


def texts(svg, tag="text"):
    return [element.text for element in ET.fromstring(svg).iter(SVG + tag)]


@pytest.mark.parametrize("count", [1, 9])
def test_a_figure_has_a_description_hover_values_and_no_reference_to_other_files(folder, count):
    for i in range(count):
        batch = 32 * 2 ** (i % 3)
        folder.runs(f"m{i}", batch, [0.9 - 0.01 * i, 0.92]).run(f"m{i}", batch, 0.9, part="select")
    report.write(folder.path)
    before = {name: (folder.path / name).read_bytes() for name in ("curves.svg", "batch.svg", "lr.svg", "report.html")}
    for name in ("curves.svg", "batch.svg", "lr.svg"):
        text = before[name].decode()
        root = ET.fromstring(text)
        assert root.get("role") == "img"
        assert "m0 ends at 9" in root.get("aria-label")
        assert any(title.startswith("m0: 9") for title in texts(text, "title"))
        assert all(element.get("href", "#").startswith("#") for element in root.iter())
        assert text.count("http") == 1  # the SVG namespace
        assert "nan" not in text
    report.write(folder.path)
    assert all((folder.path / name).read_bytes() == content for name, content in before.items())


def test_a_method_looks_the_same_in_any_order_of_the_methods():
    methods = ["sngm", "mine", "msgd", "sngm(momentum=0.5)"]
    found = figures.slots(methods)
    assert figures.slots(methods[::-1]) == found
    assert len(set(found.values())) == 4
    assert figures.slots(["lars", "sngm"])["sngm"] == found["sngm"]


def drawn(series, **settings):
    return drawing.standalone(figures.Figure("t", "d", "x", "y", {"p": [series]}, **settings))


@pytest.mark.parametrize("error", [399.9, 400.0, 1000.0])
def test_a_log_axis_is_not_stretched_by_an_error_bar_that_reaches_to_zero(error):
    labels = set(texts(drawn(figures.Series("m", 0, [(1.0, 100.0), (2.0, 400.0)], [1.0, error]), log_y=True)))
    assert {"100", "200", "500"} <= labels
    assert not {"0", "0.1", "10", "20", "50"} & labels


def test_an_axis_and_its_error_bars_end_at_possible_values():
    series = figures.Series("m", 0, [(1.0, 50.0), (2.0, 99.0)], [200.0, 200.0])
    canvas = drawing._canvas(figures.Figure("t", "d", "x", "y", {"p": [series]}, possible=(0.0, 100.0)))
    assert canvas.axes[0].get_ylim() == (0, 100)
    bars = [line.get_ydata() for line in canvas.axes[0].lines if line.get_marker() == "_"]
    assert bars == [[0, 100], [0, 100]]


def test_intervals_need_three_seeds_and_lines_end_at_batches_that_were_not_run(folder):
    folder.runs("sngm", 32, [0.9, 0.8]).runs("sngm", 512, [0.9, 0.8, 0.7]).runs("msgd", 128, [0.9])
    found = {series.label: series for series in figures.by_batch(folder.summary()).panels["digits"]}
    assert [x for x, y in found["sngm"].points if math.isfinite(y)] == [32, 512]
    assert math.isnan(found["sngm"].points[1][1])
    assert [bool(error) for error in found["sngm"].errors] == [False, False, True]
    assert found["sngm"].faint == [[(32, 90.0)], [(32, 80.0)]]
    assert [x for x, y in found["msgd"].points if math.isfinite(y)] == [128]


def test_learning_rates_have_decades_as_ticks_and_bad_ones_are_marked_at_the_floor(folder):
    for lr, value in [(0.02, 0.93), (0.2, 0.95), (2.0, 0.2)]:
        folder.run("sngm", 32, value, lr=lr, part="select")
    folder.run("sngm", 32, 0.9, lr=0.2)
    figure = figures.by_rate(folder.summary())
    assert figure.worst == {"batch 32": pytest.approx(85.0)}
    svg = drawing.standalone(figure)
    labels = set(texts(svg))
    assert {"0.1", "1", "86", "90", "94"} <= labels
    assert not {"0.02", "0.2", "2", "20"} & labels
    assert "sngm: 20 at 2" in texts(svg, "title")


@pytest.mark.parametrize(("metric", "worst"), [("accuracy", 10.0), ("loss", 0.9)])
def test_a_diverged_trial_counts_as_the_worst_of_all_methods(tmp_path, metric, worst):
    folder = Folder(tmp_path, metric=metric)
    scores = {"sngm": [0.9, 0.1], "msgd": [0.8, 0.8, None]}
    cells = []
    for method, trials in scores.items():
        folder.run(method, 32, 0.8)
        found = [{"lr": 0.1, "score": score} for score in trials]
        cells.append({"method": method, "batch": 32, "lr": 0.1, "ranges": {"lr": [0.01, 1.0]}, "trials": found})
    figure = figures.by_trials(folder.study([*scores], [32], cells, searched=["lr"]).summary())
    msgd = {series.label: series for series in figure.panels["batch 32"]}["msgd"]
    finite = 80.0 if metric == "accuracy" else 0.8
    assert msgd.points[0][1] == pytest.approx((2 * finite + worst) / 3)


def test_means_that_cannot_be_told_apart_from_the_best_are_shaded_together(folder):
    folder.runs("sngm", 32, [0.97, 0.98, 0.96]).runs("msgd", 32, [0.96, 0.98, 0.955]).runs("lars", 32, [0.5, 0.51, 0.5])
    summary = folder.summary()
    assert summary.leaders(32) == {"sngm", "msgd"}
    assert page.html([summary]).count('class="best"') == 2


def test_runs_of_several_tasks_get_a_section_each(tmp_path):
    """Each task has its own metric."""
    Folder(tmp_path).runs("sngm", 32, [0.9, 0.92, 0.91])
    words = Folder(tmp_path, metric="perplexity", task="words")
    words.count = 10
    words.runs("sngm", 32, [110.0, 112.0])
    first, second = report.summarise_tasks(tmp_path)
    assert (first.task, first.metric, second.task, second.metric) == ("digits", "accuracy", "words", "perplexity")
    text = report.write(tmp_path).read_text("utf-8")
    assert "digits: At batch 32, sngm reaches 91.0 % test accuracy." in text
    assert "words: At batch 32, sngm reaches 111.0 test perplexity." in text
    assert "## words" in (tmp_path / "table.md").read_text()
    assert {"results-digits.csv", "results-words.csv", "lr-words.svg"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sngm": [0.97, 0.98, 0.96], "msgd": [0.9, 0.91, 0.9]}, "sngm is best: 97.0 % test accuracy, 6.7 points"),
        ({"sngm": [0.97, 0.98, 0.96], "msgd": [0.96, 0.98, 0.955]}, "sngm and msgd are too close to call: 97.0 and"),
        ({"sngm": [0.97], "msgd": [0.9]}, "sngm is ahead of msgd, untested: 97.0 to 90.0 % test accuracy"),
        ({"sngm": [0.97]}, "sngm reaches 97.0 % test accuracy"),
    ],
)  # fmt: skip
def test_the_headline_is_one_short_sentence(folder, values, said):
    for method, scores in values.items():
        folder.runs(method, 512, scores)
    text = headline(folder.summary())
    assert text.startswith(f"At batch 512, {said}")
    assert len(text) < 100
    assert "p =" not in text


def test_a_note_says_that_the_loss_did_not_fall(folder):
    for method in ("sngm", "msgd"):
        place = folder.run(method, 512, 0.1)
        lines = [{"epoch": e, "train_loss": loss, "test_accuracy": 0.1} for e, loss in ((1, 2.3), (2, 2.31))]
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = "At batch 512, the training loss of msgd and sngm did not fall after the first epoch."
    assert said in folder.summary().notes


def test_time_to_accuracy_is_of_the_first_epoch_at_the_target(folder):
    """The curves of these runs are 0.5, 0.8 and 1.0 times the result, one step an epoch."""
    for batch in (32, 64):
        folder.runs("sngm", batch, [0.9, 0.8], timing={"seconds": 9.0, "training_seconds": 6.0})
        folder.runs("msgd", batch, [0.7, 0.7])
    summary = folder.summary()
    assert targets.target(summary) == 0.8
    small, large, lost = (
        targets.time_to(summary, 0.7)[2],
        targets.time_to(summary, 0.7)[3],
        targets.time_to(summary, 0.8)[0],
    )
    assert (small.method, small.batch, small.seeds, small.of) == ("sngm", 32, 2, 2)
    assert (small.epochs, small.steps, small.samples, small.seconds) == (2.5, 2.5, 80, 5.0)
    assert large.samples == 160
    assert (lost.method, lost.seeds, lost.of, lost.epochs) == ("msgd", 0, 2, None)


def test_the_target_of_a_metric_to_be_minimised(tmp_path):
    folder = Folder(tmp_path, metric="loss")
    assert targets.target(folder.runs("sngm", 32, [2.0, 3.0]).summary()) == 1.5  # the best epoch of a seed counts
    assert "Time to 1.500 test loss" in report.write(tmp_path).read_text("utf-8")


def test_a_run_without_a_curve_does_not_hide_the_target(folder):
    (folder.run("sngm", 32, 0.5) / "metrics.jsonl").unlink()
    folder.run("sngm", 32, 0.8, seed=1)
    assert targets.target(folder.summary()) == 0.8


def test_tables_are_written_as_csv_and_json(folder):
    folder.runs("sngm", 32, [0.97, 0.98, 0.96], parameters=1234, result={"test_accuracy": 0.5, "train_loss": 0.25})
    report.write(folder.path)
    found = json.loads((folder.path / "report.json").read_text())["digits"]
    assert found["settings"][0]["momentum"] == 0.9  # SNGM's default
    assert found["settings"][0]["train_loss"] == 0.25
    assert found["results"][0]["values"] == [0.5, 0.5, 0.5]
    lines = (folder.path / "runs.csv").read_text().splitlines()
    assert lines[0].startswith("run,method,batch,lr,seed,part,status,accuracy,seconds,hash,command")
    assert len(lines) == 4
    assert "<dd>1,234</dd>" in (folder.path / "report.html").read_text("utf-8")


@pytest.mark.parametrize(("method", "settings"), [("sngm", {"momentum": 0.8}), ("adamw", {"betas": (0.8, 0.95)})])
def test_the_command_of_a_run_trains_the_same_run(tmp_path, method, settings):
    from sngm.training import resolve

    own = {"method_settings": settings, "ema": 0.9, "last_batch": "keep"}
    config = resolve("digits", method, lr=0.3, batch=512, seed=1, part="select", **own)
    place = Folder(tmp_path).run(method, 512, 0.9, part="select", config=config.as_dict())
    (run,) = read(tmp_path).runs
    assert run.link == f"runs/{place.name}/"
    done = sngm(f"{run.again.removeprefix('sngm ')} --dry-run --json")
    assert done.json["hash"] == config.hash


def test_a_failed_run_is_at_the_top_with_its_reason(folder):
    folder.runs("sngm", 32, [0.9]).run("msgd", 32, None, status="failed", error="ValueError: lr <0")
    folder.run("lars", 32, None, status="running")
    text = page.html([folder.summary()])
    assert text.index("ValueError: lr &lt;0") < text.index("Results</h2>")
    assert "2 of 3 runs have ended (1 failed, 1 finished, 1 running): run002 at epoch 3 of 3." in text
