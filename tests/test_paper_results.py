"""`sngm paper`: the paper's numbers, stored runs, verdicts, and pages that agree with the runs."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from console import refused, sngm

from sngm import tasks
from sngm.errors import UsageError
from sngm.paper import document, drawing, experiments, results, verdicts
from sngm.paper import run as making
from sngm.paper.experiments import Item, Row
from sngm.paper.results import Line, Results, command_of, keep, read
from sngm.paper.tables import CLAIMS, FIGURES, NUMBERS, Claim
from sngm.parsing import parse_settings
from sngm.progress import duration
from sngm.study.grid import run_name
from sngm.training import RunConfig, resolve
from sngm.training.run_folder import commit, provenance

pytestmark = pytest.mark.usefixtures("in_one_process")

HERE = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SNGM_COMMIT", "0123abc")
    monkeypatch.setitem(NUMBERS, "table-9", {"SNGM": {32: 0.9}, "MSGD": {32: 0.8}})  # for small()
    commit.cache_clear()
    yield
    commit.cache_clear()


@pytest.fixture(scope="module")
def ours():
    """Return the runs of this repository."""
    return read(HERE / "results")


# ---------------------------------------------------------------- the paper as data


def test_tables_are_of_tasks_that_have_their_batches():
    for item in experiments.ITEMS:
        batches = {batch for row in item.numbers.values() for batch in row}
        assert batches <= set(tasks.find(item.task).batches), item.name
    count = sum(len(row) for item in experiments.ITEMS for row in item.numbers.values())
    assert count == 25 + 5 + 4 + 30 + 9 + 3 + 10


def test_the_paper_s_claims_hold_of_its_own_numbers():
    """Claims of "better" hold in the claimed number of cells; claims of "similar" have a tolerance."""
    for claim in CLAIMS:
        item, shown = experiments.find(claim.item), {}
        if not (item.numbers and claim.by_paper) or claim.metric or (item.metric == "seconds" and claim.note):
            continue  # figures, and methods without times in the paper
        for (method, batch), (other, beside) in claim.pairs:
            gap = item.numbers[method][batch] - item.numbers[other][beside]
            if claim.kind == "better":
                shown.setdefault(batch, []).append(gap > 0 if item.higher_is_better else gap < 0)
            elif claim.item != "table-2" or method in ("LARS", "SNGM"):
                assert abs(gap) <= verdicts.tolerance(item.metric, item.numbers[other][beside]), claim
        assert sum(map(all, shown.values())) >= claim.share * len(shown), claim.text


def test_every_table_and_figure_has_runs_planned_and_every_number_a_cell():
    for item in experiments.ITEMS:
        compared = {(p.row.paper, p.batch) for p in item.cells() if p.row.paper}
        assert compared == {(row, batch) for row, numbers in item.numbers.items() for batch in numbers}, item.name
    for figure in FIGURES:
        assert experiments.find(figure.name).name == figure.item
        assert set(figure.methods) <= {row.name for row in experiments.find(figure.item).rows}


def test_methods_of_a_table_get_as_many_rates():
    for item in experiments.ITEMS:
        assert len({len(planned.cell().grid) for planned in item.cells()}) == 1, item.name
        widths = {tuple(high / low for low, high in planned.row.ranges.values()) for planned in item.cells()}
        assert len({tuple(round(width, 6) for width in row) for row in widths}) == 1, item.name
    advised = next(p for p in experiments.find("table-2").cells() if p.name == "SNGM with advised decay@8192")
    assert advised.cell().config(0.8, "full", 0).method_settings["weight_decay"] == pytest.approx(8e-4)


def test_settings_of_an_experiment_a_row_and_a_batch_reach_the_runs():
    def settings(name, cell):
        (planned,) = [p for p in experiments.find(name).cells() if p.name == cell]
        config = planned.cell().config(planned.row.rates[planned.batch], "full", 0)
        return config.task_settings, config.method_settings["weight_decay"]

    task, decay = settings("tiny-imagenet", "spectral SNGM@256")
    assert (task["stem"], decay) == ("7x7", 0.125)
    task, decay = settings("small-vit", "spectral SNGM@4096")
    assert (task["model"], task["size"], decay) == ("small-vit", 64, 1.0)
    warmups = {
        p.name: p.study().cells()[0].config(1.0, "full", 0).warmup for p in experiments.find("tiny-imagenet").cells()
    }
    assert (warmups["MSGD@256"], warmups["MSGD with 7 warm-up steps@4096"]) == (2.0, 10 / 4 / 9)
    item = dataclasses.replace(experiments.find("tiny-imagenet"), task_settings={"stem": "3x3", "smoothing": 0.2})
    row = dataclasses.replace(item.rows[0], task_settings={"stem": "7x7"})
    assert experiments.Planned(item, row, 256).study().task_settings == {"stem": "7x7", "smoothing": 0.2}


# ---------------------------------------------------------------- stored runs


def line(lr=0.1, seed=0, part="full", value=0.9, batch=32, method="sngm", commit="0123abc", status="finished",
         data="a", started="2026-01-01", **more):  # fmt: skip
    config = resolve("digits", method, lr=lr, seed=seed, part=part, batch=batch, epochs=2, **more)
    name = "validation_accuracy" if part == "select" else "test_accuracy"
    return Line({
        "config": config.as_dict(), "label": config.label, "hash": config.hash, "status": status,
        "result": {name: value}, "result_epoch": 2, "timing": {"seconds_per_epoch": value}, "versions": {},
        "commit": commit,
        "data": {"training": {"samples": 10, "fingerprint": data}}, "started": started,
        "hardware": {"name": "a machine"}, "curve": {"train_loss": [2.0, 1.0], name: [0.5, value]},
        "command": command_of(config),
    })  # fmt: skip


def small(**more):
    """Return a fast table: digits, one epoch per run."""
    rows = (
        Row("SNGM", "sngm", {32: 0.1}, seeds=2, paper="SNGM"),
        Row("MSGD", "msgd", {32: 0.1}, seeds=1, paper="MSGD"),
    )
    item = Item("table-9", "Digits", "Table 9", "digits", "accuracy", rows, (32,), seconds={32: 0.5}, epochs=2)
    return replace(item, **more)


def test_merging_two_machines_in_either_order_gives_the_same_file(tmp_path):
    a, b = [line(seed=seed) for seed in (0, 1)], [line(seed=2), line(0.2, method="msgd")]
    for name, parts in (("ab", (a, b)), ("ba", (b, a)), ("all", (a + b, a))):
        for part in parts:
            keep(part, tmp_path / name)
    texts = {(tmp_path / name / "digits" / "runs.jsonl").read_text() for name in ("ab", "ba", "all")}
    assert len(texts) == 1
    assert len(texts.pop().splitlines()) == 4


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_a_run_made_twice_the_first_counts_in_whatever_order_they_come(tmp_path, order):
    both = line(value=0.9), line(value=0.91, commit="fedcba9", started="2026-01-02")
    for i in order:
        assert keep([both[i], both[i]], tmp_path) == (1, i != order[0])
    assert keep(both, tmp_path) == (0, 0)
    there = read(tmp_path)
    assert [found.value("accuracy") for found in there.lines.values()] == [0.9]
    assert [found.value("accuracy") for found in there.repeated] == [0.91]


def test_of_two_runs_of_a_config_in_a_merged_file_the_first_counts(tmp_path):
    both = line(value=0.9), line(value=0.91, started="2026-01-02")
    for lines in (both, both[::-1]):
        there = Results([*lines, both[1]])
        assert [found.value("accuracy") for found in there.lines.values()] == [0.9]
        assert [found.value("accuracy") for found in there.repeated] == [0.91]


def test_a_line_that_stands_twice_is_one_run_and_two_that_differ_are_refused(tmp_path):
    path = tmp_path / "digits" / "runs.jsonl"
    keep([line()], tmp_path)
    path.write_text(2 * path.read_text())
    assert keep([line(seed=1)], tmp_path) == (1, 0)
    assert len(path.read_text().splitlines()) == 2
    assert read(tmp_path).repeated == []
    other = Line(
        {
            **line().record,
            "result": {"test_accuracy": 0.99},
            "curve": {"train_loss": [1.0], "test_accuracy": [0.99]},
            "result_epoch": 1,
        }
    )
    with pytest.raises(UsageError, match="two lines describe it and differ"):
        keep([other], tmp_path)
    path.write_text(path.read_text() + other.text + "\n")
    with pytest.raises(UsageError, match="two lines describe it and differ"):
        read(tmp_path)


def test_a_stop_between_the_files_loses_no_run(tmp_path, monkeypatch):
    """The second run, started earlier, replaces the first, which then counts as a repeat."""
    first, second = line(started="2026-01-02"), line(value=0.91)
    keep([first], tmp_path)
    write, written = results.write_atomically, []

    def stopped(path, data):
        if written:
            raise KeyboardInterrupt
        written.append(path)
        write(path, data)

    monkeypatch.setattr(results, "write_atomically", stopped)
    with pytest.raises(KeyboardInterrupt):
        keep([second], tmp_path)
    monkeypatch.undo()
    there = read(tmp_path)
    assert [found.text for found in there.lines.values()] == [first.text]
    assert there.repeated == [], "it stands in both files, and is one run"
    keep([second], tmp_path)
    there = read(tmp_path)
    assert [found.text for found in there.lines.values()] == [second.text]
    assert [found.text for found in there.repeated] == [first.text]


def test_lines_of_another_task_or_on_other_data_are_refused_when_read(tmp_path):
    keep([line()], tmp_path)
    (tmp_path / "digits").rename(tmp_path / "criteo-deepfm")
    with pytest.raises(UsageError, match="is of digits; move it to the folder of that name"):
        read(tmp_path)
    (tmp_path / "criteo-deepfm").rename(tmp_path / "digits")
    path = tmp_path / "digits" / "runs.jsonl"
    path.write_text(path.read_text() + line(seed=1, data="b").text + "\n")
    with pytest.raises(UsageError, match="on different data"):
        read(tmp_path)


def test_runs_on_other_data_are_not_mixed(tmp_path):
    keep([line()], tmp_path)
    with pytest.raises(UsageError, match=r"different data.*fingerprint: a there, b here"):
        keep([line(seed=1, data="b")], tmp_path)
    assert len(read(tmp_path).lines) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r["config"].update(lr=0.3), "hash"),
        (lambda r: r.pop("curve"), "no curve"),
        (lambda r: r.pop("timing"), "no timing"),
        (lambda r: r.pop("data"), "no data"),
        (lambda r: r["config"].pop("batch"), "not a valid record"),
        (lambda r: r.update(hardware=None), "wrong type"),
        (lambda r: r.update(status="running"), "not a finished run: running"),
        (lambda r: r.update(result_of="zebra"), "zebra"),
        (lambda r: r.update(result={}), "no test_accuracy in the result"),
        (lambda r: r.update(commit=""), "names no commit"),
        (lambda r: r.update(commit="abc+"), "uncommitted changes"),
        (lambda r: r.update(command=None), "no command"),
        (lambda r: r.update(started=3), "wrong type"),
        (lambda r: r.update(started="yesterday"), "yesterday"),
        (lambda r: r["timing"].update(seconds_per_epoch=-1), "below zero"),
        (lambda r: r.update(timing=None), "timing is not a mapping"),
        (lambda r: r["timing"].update(seconds_per_epoch="abc"), r"not a number: \['abc'\]"),
        (lambda r: r["result"].update(test_accuracy="x"), r"not a number: \['x'\]"),
        (lambda r: r["result"].update(test_accuracy=0.95), "0.95 in the result, and 0.9 in the curve"),
        (
            lambda r: (r["result"].update(test_accuracy=1.5), r["curve"].update(test_accuracy=[0.5, 1.5])),
            "between 0 and",
        ),
        (lambda r: r["timing"].update(seconds_per_epoch=float("nan")), "NaN is not a finite number"),
        (lambda r: r["curve"].update(train_loss=[1.0, float("inf")]), "Infinity is not a finite number"),
        (lambda r: r.update(label="another"), "label"),
        (lambda r: r["curve"].pop("test_accuracy"), "no test_accuracy in the curve"),
        (lambda r: r["curve"].pop("train_loss"), "no train_loss in the curve"),
        (lambda r: r["curve"].update(test_accuracy=[0.5]), "0.9 in the result, and missing in the curve"),
    ],
)
def test_a_line_that_was_tampered_with_is_refused(tmp_path, change, said):
    record = json.loads(line().text)
    change(record)
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "runs.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(UsageError, match=f"line 1.*{said}"):
        read(tmp_path)


def test_what_is_no_text_or_no_file_is_refused_by_name(tmp_path):
    (tmp_path / "digits").mkdir()
    path = tmp_path / "digits" / "runs.jsonl"
    path.write_bytes(b"\xff\n")
    with pytest.raises(UsageError, match=r"runs.jsonl: not a valid record of a run .*utf-8"):
        read(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match=r"runs.jsonl: not a valid record of a run .*directory"):
        read(tmp_path)


def test_a_folder_of_results_that_is_not_there_is_refused(tmp_path):
    refused(sngm("paper run table-2 --results nowhere"), "no folder nowhere", "--results")
    for verb in ("list", "show table-2", "run table-2 --dry-run"):
        refused(sngm(f"paper {verb} --results nowhere"), "no folder nowhere", "--results")
    Path("results").write_text("")
    refused(sngm("paper list"), "no folder results")


def test_a_plan_without_a_results_folder_says_that_every_run_is_missing_and_where_others_are():
    found, kept = sngm("paper run table-6 --dry-run"), HERE / "results"
    assert found.out.splitlines()[-1].startswith("54 runs")
    assert f"no folder results here, so every run is missing; --results {kept} has the runs" in found.err
    assert sngm(f"paper run table-6 --dry-run --results {kept}").out.endswith("no run is missing\n")


def test_every_table_is_listed_without_importing_scipy(monkeypatch):
    """Importing scipy.stats takes a second."""
    for name in ("scipy", "scipy.stats", "scipy.stats.qmc"):
        monkeypatch.setitem(sys.modules, name, None)  # makes an import fail
    found = sngm("paper list")
    assert "showing the runs that come with sngm" in found.err
    assert "figure-2 from those of table-2" in found.out
    assert all(item.name in found.out for item in experiments.ITEMS)


@pytest.mark.parametrize("cells", [",", "SNGM@8192,", ",8192", "@"])
def test_an_empty_part_of_cells_is_not_everything(cells):
    refused(sngm(f"paper run table-2 --dry-run --cells {cells}"), "--cells")


@pytest.mark.slow
def test_a_change_anywhere_in_the_package_is_seen(tmp_path, monkeypatch):
    """Edit the optimizer in a copy of the package."""
    root = tmp_path / "copy"
    shutil.copytree(HERE / "src" / "sngm", root / "sngm", ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.delenv("SNGM_COMMIT")
    ask = [sys.executable, "-c", "from sngm.training.run_folder import commit; print(commit())"]
    own = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}

    def name():
        done = subprocess.run(ask, env=own, cwd=root, capture_output=True, text=True)
        return done.stdout.strip()

    assert len(name()) == 12
    with open(root / "sngm" / "optim" / "sngm.py", "a") as file:
        file.write("# changed\n")
    assert name().endswith("+")


def test_runs_nobody_could_repeat_are_refused(monkeypatch):
    assert sngm("train digits --lr 0.1 --batch 256 --epochs 1 --device cpu --out run").code == 0
    record = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(json.dumps({**record, "commit": "fedc"}))
    refused(sngm("paper add run"), "run/run.json was changed after it was written")
    del record["digest"]  # as in older records
    for name in (None, "", "0123abc+"):
        Path("run/run.json").write_text(json.dumps({**record, "commit": name}))
        refused(sngm("paper add run"), "SNGM_COMMIT")
    Path("run/run.json").write_text(json.dumps({**record, "status": "interrupted"}))
    refused(sngm("paper add run"), "none of the 1 runs has finished")
    Path("run/run.json").write_text(json.dumps({**record, "config": {**record["config"], "seed": 3}}))
    refused(sngm("paper add run"), "run: not a valid run", "hash")
    Path("run/run.json").write_text(json.dumps({**record, "result": {"test_accuracy": 0.99}}))
    refused(sngm("paper add run"), "0.99 in the result")
    Path("run/run.json").write_text(json.dumps(record))
    metrics = Path("run/metrics.jsonl").read_text()
    Path("run/metrics.jsonl").write_text(metrics[:20])
    refused(sngm("paper add run"), "run: not a valid run")
    Path("run/metrics.jsonl").write_text(metrics)
    assert sngm("paper add run").out == "1 of 1 runs are new in results\n"
    assert sngm("paper add run").out == "0 of 1 runs are new in results\n"
    Path("run/run.json").write_text(json.dumps({**record, "started": "2099-01-01"}))
    assert sngm("paper add run").out == "1 of 1 runs are new in results, 1 of them a repeat of another\n"
    Path("run/run.json").write_text(json.dumps(record))
    refused(sngm("paper add nowhere"), "no folder nowhere")
    refused(sngm("paper add run --results run/run.json"), "is not a folder", "--results")
    Path("odd").mkdir()
    Path("odd/run.json").write_text("[]")
    refused(sngm("paper add odd"), "odd/run.json must contain a JSON object")
    Path("again").mkdir()
    for key, value in (("made_before", [{"commit": "1"}]), ("config", {**record["config"], "task_source": "1234"})):
        Path("again/run.json").write_text(json.dumps({**record, key: value}))
        refused(sngm("paper add again"), "again")
    kept = next(iter(read(Path("results")).lines.values()))
    assert len(kept.curve["test_accuracy"]) == 1
    assert kept.record["commit"] == "0123abc"


KINDS = {float: "lr warmup ema label_smoothing", int: "batch epochs seed workers micro bn_group bn_samples"}
OPTIONS = {name: kind for kind, names in KINDS.items() for name in names.split()}


def from_command(command):
    """Return the config of a command, as `sngm train` resolves it on a GPU."""
    _, _, task, *words = shlex.split(command)
    given, settings = {}, {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        name = option[2:].replace("-", "_")
        if name == "set":
            key = value.partition("=")[0]
            settings[key] = parse_settings([value])[key]
        else:
            given[name] = OPTIONS.get(name, str)(value)
    known = tasks.settings_of(task)
    of_task = {k: v for k, v in settings.items() if k in known}
    of_method = {k: v for k, v in settings.items() if k not in known}
    return resolve(task, given.pop("method"), task_settings=of_task, method_settings=of_method, device="cuda", **given)


def test_printed_commands_make_the_runs_they_stand_beside(ours):
    assert len(ours.lines) > 30
    for kept in ours.lines.values():
        assert kept.record["command"] == command_of(kept.config)
        assert from_command(kept.record["command"]).hash == kept.hash
    for item in experiments.ITEMS:
        for planned in item.cells():
            cell = planned.cell()
            config = cell.config(cell.grid[0], "select", 1)
            assert from_command(command_of(config)).hash == config.hash, planned.name


# ---------------------------------------------------------------- completeness of a cell


def test_a_cell_waits_for_its_trials_then_for_its_seeds():
    planned = next(small().cells())
    trials = [line(lr, part="select", value=value) for lr, value in ((0.05, 0.8), (0.1, 0.9), (0.2, 0.85))]
    first = verdicts.outcome_of(planned, Results([]))
    assert [config.lr for config in first.missing] == [0.05, 0.1, 0.2]
    assert first.to_come == 3 + 2
    assert verdicts.outcome_of(planned, Results([]), seeds=5).to_come == 3 + 5
    chosen = verdicts.outcome_of(planned, Results(trials))
    assert (chosen.lr, [(c.part, c.seed) for c in chosen.missing]) == (0.1, [("full", 0), ("full", 1)])
    done = verdicts.outcome_of(planned, Results([*trials, line(value=0.91), line(seed=1, value=0.93)]))
    assert (done.values, done.missing, done.at_edge) == ([0.91, 0.93], [], False)
    more = [line(value=0.91), line(seed=1, value=0.93), line(seed=2, value=0.95), line(seed=4, value=0.5)]
    assert verdicts.outcome_of(planned, Results([*trials, *more])).values == [0.91, 0.93, 0.95], "more seeds count"


def test_where_no_rate_trains_that_is_what_the_page_says(monkeypatch):
    lost = [line(lr, part="select", status="diverged") for lr in (0.1 / 2**i for i in range(-1, 5))]
    lost += [line(float(f"{0.2 * 2**i:.3g}"), part="select", status="diverged") for i in range(1, 6)]
    found = verdicts.outcome_of(next(small().cells()), Results(lost))
    assert (found.nothing_trains, found.lines, found.missing) == (True, [], [])
    assert document._row(found)[4] == "diverged"
    assert verdicts.of_number(found) == "not reproduced"


def test_a_grid_grows_at_its_edge_but_for_the_paper_s_own():
    trials = [line(lr, part="select", value=value) for lr, value in ((0.05, 0.7), (0.1, 0.8), (0.2, 0.9))]
    grown = verdicts.outcome_of(next(small().cells()), Results(trials))
    assert [config.lr for config in grown.missing] == [0.4]
    fixed = verdicts.outcome_of(next(small(extend=False).cells()), Results(trials))
    assert (fixed.lr, fixed.at_edge, [config.lr for config in fixed.missing]) == (0.2, True, [0.2, 0.2])


def test_a_full_run_that_was_validated_is_a_trial_too():
    kept = line(value=0.9)
    parts = {"training": {}, "validation": {}}
    both = Line({**kept.record, "data": parts, "result": {"validation_accuracy": 0.8, "test_accuracy": 0.9}})
    assert Results([both]).of(replace(both.config, part="select")) is both
    assert Results([kept]).of(replace(kept.config, part="select")) is None


def test_the_best_rate_on_test_data_is_found_among_full_runs():
    runs = [line(0.1, value=0.9), line(0.1, seed=1, value=0.92), line(0.4, value=0.95), line(0.8, batch=64)]
    best = verdicts.outcome_of(next(small().cells()), Results(runs)).on_test
    assert [(found.config.lr, found.value("accuracy")) for found in best] == [(0.4, 0.95)]
    runs.append(line(0.4, seed=1, status="diverged", value=None))
    best = verdicts.outcome_of(next(small().cells()), Results(runs)).on_test
    assert [found.config.lr for found in best] == [0.1, 0.1], "a rate at which one seed diverged is not the best"
    best = verdicts.outcome_of(next(small(search=False).cells()), Results(runs[:3])).on_test
    assert [found.config.lr for found in best] == [0.1, 0.1], "without a search, other rates are of other rows"


def test_a_seed_with_two_inner_rates_is_not_two_seeds():
    (cell,) = [p for p in experiments.find("table-2").cells() if p.name == "EXTRAP-SGD@8192"]
    like = cell.cell().config(0.2, "full", 0)

    def of(**settings):
        config = replace(like, method_settings=like.method_settings | settings)
        return Line({**line().record, "config": config.as_dict(), "hash": config.hash})

    runs = Results([of(), of(inner_lr=0.1)])
    assert [found.config for found in verdicts.outcome_of(cell, runs).on_test] == [like]
    twice = replace(like, lr=0.4, method_settings=like.method_settings | {"inner_lr": 0.05})
    assert verdicts._but_for_rate(twice) == verdicts._but_for_rate(like)


def test_links_lead_to_trials_where_there_is_no_more():
    trials = [line(lr, part="select", value=value) for lr, value in ((0.05, 0.8), (0.1, 0.9))]
    planned = next(small().cells())
    assert document._link(verdicts.outcome_of(planned, Results([]))) == "0"
    assert document._link(verdicts.outcome_of(planned, Results(trials))) == "[0](digits/runs.md#sngm-at-batch-32)"


def test_the_first_table_tells_of_runs_that_diverged_and_of_rates_at_an_edge(monkeypatch):
    monkeypatch.setattr(document, "find", lambda _: small(extend=False))
    runs = [line(lr, part="select", value=value) for lr, value in ((0.05, 0.7), (0.1, 0.8), (0.2, 0.9))]
    runs += [line(0.2, value=0.91), line(0.2, seed=1, status="diverged", value=None)]
    runs += [line(lr, part="select", method="msgd", status="diverged", value=None) for lr in (0.05, 0.1, 0.2)]
    rows = [row for row in document.block(Results(runs)).splitlines() if row.startswith("| 32 ")]
    assert [row.split(" | ")[2:5] for row in rows] == [
        ["0.2*", "90.00", "91.00 (1 diverged)"],
        ["", "80.00", "diverged"],
    ]
    runs.append(line(0.2, seed=2, value=0.92))
    shown = document._row(verdicts.outcome_of(next(small(extend=False).cells()), Results(runs)))
    assert shown[2:5] == ["0.2*", "90.00", "91.50 ± 6.35 (1 diverged)"]


def test_a_table_is_drawn_against_the_batch_size_and_runs_that_diverged_are_crosses():
    runs = [line(lr, part="select", value=value) for lr, value in ((0.05, 0.8), (0.1, 0.9), (0.2, 0.85))]
    runs += [line(value=0.91), line(seed=1, value=0.93)]
    runs += [line(lr, part="select", method="msgd", status="diverged", value=None) for lr in (0.05, 0.1, 0.2)]

    def picture(lines=runs, **more):
        item = small(extend=False, **more)
        return drawing.by_batch(item, [verdicts.outcome_of(planned, Results(lines)) for planned in item.cells()])

    theirs, ours = picture().panels.values()
    assert [(s.label, s.plotted) for s in theirs] == [("SNGM", [(32, 90.0)]), ("MSGD", [(32, 80.0)])]
    assert [(s.label, s.plotted, s.lost) for s in ours] == [("SNGM", [(32, 92.0)], []), ("MSGD", [], [32])]
    assert ours[0].faint == [[(32, 91.0)], [(32, 93.0)]]
    assert "ours; without a bar: one or two seeds" in picture().panels
    ((label, _, _, error),) = [
        (s.label, *s.plotted[0]) for s in picture([*runs, line(seed=2, value=0.92)]).panels["ours"] if s.plotted
    ]
    assert (label, error) == ("SNGM", pytest.approx(2.4841))
    one = picture([*runs[:4], line(seed=1, status="diverged", value=None)]).panels["ours; without a bar: one seed"]
    assert [(s.plotted, s.lost) for s in one] == [([(32, 91.0)], [32])]
    assert picture([]) is None
    assert picture(apart="other data") is None


def test_curves_are_drawn_with_their_seeds_behind_the_mean():
    runs = [line(lr, part="select", value=value) for lr, value in ((0.05, 0.8), (0.1, 0.9), (0.2, 0.85))]
    runs.append(line(value=0.5))

    def series(lines):
        return drawing._series(
            "SNGM", verdicts.outcome_of(next(small(extend=False).cells()), Results(lines)), "test_accuracy"
        )

    alone, both = series(runs), series([*runs, line(seed=1, value=0.75)])
    assert alone.faint == []
    assert [curve[-1][1] for curve in both.faint] == [50.0, 75.0]
    assert both.points[-1][1] == 62.5


def test_reading_results_runs_no_code_that_they_name(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    record = {**line().record, "config": {**line().record["config"], "task": f"{tmp_path}/evil.py:Task"}}
    record["hash"] = RunConfig.from_dict(record["config"]).hash
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "runs.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(UsageError, match="a task of your own"):
        read(tmp_path)


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.9, 0.901, 0.902], "reproduced"),
        ([0.9049, 0.9049, 0.9048], "reproduced"),
        ([0.9, 0.901], "open"),
        ([0.9], "open"),
        ([], "open"),
        ([0.89, 0.9, 0.91], "open"),  # the mean agrees, but the interval is ± 0.025
        ([0.93, 0.931, 0.932], "not reproduced"),
        ([0.907, 0.905, 0.909], "open"),  # the mean is outside, but not significantly
    ],
)
def test_verdicts_on_a_number(values, verdict):
    assert verdicts.judge_number(values, 0.9, "accuracy") == verdict


def test_a_perplexity_may_differ_by_a_hundredth_and_times_by_anything():
    assert verdicts.judge_number([116.0, 116.1, 116.2], 115.65, "perplexity") == "reproduced"
    assert verdicts.judge_number([119.0, 119.1, 119.2], 115.65, "perplexity") == "not reproduced"
    assert verdicts.judge_number([1.0, 1.0, 1.001], 1.0, "seconds") == "open"


def outcomes(ours, theirs, item=None, **more):
    """Return outcomes of SNGM and MSGD at batch 32; None is a run that diverged."""
    cells = list((item or small()).cells())
    made = [
        [
            line(0.1, seed=i, value=v, status="diverged" if v is None else "finished", **more)
            for i, v in enumerate(values)
        ]
        for values in (ours, theirs)
    ]
    return {
        (cell.row.name, 32): verdicts.Outcome(cell, 0.1, lines, [], 3) for cell, lines in zip(cells, made, strict=True)
    }


PAIR = (("SNGM", 32), ("MSGD", 32))
HIGH, LOW = [0.92, 0.921, 0.919], [0.9, 0.901, 0.899]


@pytest.mark.parametrize(
    ("kind", "ours", "theirs", "verdict"),
    [
        ("better", HIGH, LOW, "holds"),
        ("better", LOW, HIGH, "contradicted"),
        ("better", [0.92, 0.9, 0.88], [0.9, 0.89, 0.88], "open"),
        ("better", [0.9, 0.9001, 0.9002], [0.9, 0.9002, 0.9001], "contradicted"),  # they are similar
        ("better", [0.9, 0.9001, 0.9002], [0.899, 0.8991, 0.8992], "holds"),  # similar, but different
        ("better", HIGH[:2], LOW[:2], "open"),
        ("better", [0.99], [0.1], "open"),
        ("better", [], LOW, "open"),
        ("better", HIGH, [None] * 3, "holds"),
        ("better", [None] * 3, LOW, "contradicted"),
        ("better", HIGH, [*LOW, None], "open"),
        ("better", [None] * 3, [None] * 3, "open"),
        ("similar", [0.9, 0.9001, 0.9002], [0.901, 0.9011, 0.9012], "holds"),
        ("similar", [0.9, 0.9001, 0.9002], [0.95, 0.9501, 0.9502], "contradicted"),
        ("similar", [0.9, 0.91, 0.89], [0.9, 0.91, 0.89], "open"),
        ("similar", [0.9, 0.9], [0.9, 0.9], "open"),
    ],
)
def test_verdicts_on_a_claim(kind, ours, theirs, verdict):
    assert verdicts.of_claim(Claim("table-9", "", (PAIR,), kind), small(), outcomes(ours, theirs))[0] == verdict


@pytest.mark.parametrize(
    ("kind", "worse", "verdict"),
    [
        ("better", "MSGD", "holds"), ("better", "SNGM", "contradicted"),
        ("similar", "MSGD", "contradicted"), ("similar", "SNGM", "contradicted"),
    ],
)  # fmt: skip
def test_where_every_rate_diverged_the_other_is_better(kind, worse, verdict):
    there = outcomes(HIGH, HIGH)
    there[worse, 32] = replace(there[worse, 32], lr=None, lines=[], nothing_trains=True)
    found = verdicts.of_claim(Claim("table-9", "", (PAIR,), kind), small(), there)
    assert found[0] == verdict
    assert "all rates" in found[1]
    both = {cell: replace(there[worse, 32], planned=o.planned) for cell, o in there.items()}
    assert verdicts.of_claim(Claim("table-9", "", (PAIR,), kind), small(), both)[0] == "open"


def test_a_claim_that_two_are_similar_is_shown_with_the_interval_it_rests_on():
    a, b = [0.9, 0.91, 0.92], [0.9, 0.9, 0.91]  # their means are apart by nearly the tolerance
    found = verdicts.of_claim(Claim("table-9", "", (PAIR,), "similar"), small(), outcomes(a, b))
    scipy = pytest.importorskip("scipy.stats")
    low, high = scipy.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    gap = f"SNGM at 32 - MSGD at 32: {50 * (low + high):+.2f} ± {50 * (high - low):.2f}"
    none = "no affordable number of runs would decide all of it"
    assert found == ("open", f"{gap}, more than 100 seeds to decide; {none}")


def test_an_open_claim_says_what_it_would_cost_to_decide():
    claim, other = Claim("table-9", "", (PAIR,)), (("LARS", 32), ("SNGM", 32))
    there = outcomes([0.91, 0.92, 0.93], [0.9, 0.91, 0.92])
    slow = replace(there["MSGD", 32].planned.row, seconds={32: 100.0})
    planned = {cell: replace(o.planned, row=slow) if "MSGD" in cell else o.planned for cell, o in there.items()}
    there = {cell: replace(o, planned=planned[cell]) for cell, o in there.items()}
    ours, theirs = (planned[cell].seconds() for cell in PAIR)

    def price(outcomes, *pairs):
        return verdicts.of_claim(replace(claim, pairs=(PAIR, *pairs)), small(), outcomes)[1].rpartition("; ")[2]

    def wanted(runs, seconds, seeds):
        return f"to decide all of it: about {runs} more runs (--seeds {seeds}), {duration(seconds)} on one NVIDIA H200"

    assert verdicts.seeds_to_decide([0.91, 0.92, 0.93], [0.9, 0.91, 0.92]) == 17
    assert price(there) == wanted(28, 14 * (ours + theirs), 17)
    third = replace(there["SNGM", 32], lines=there["SNGM", 32].lines[:1])  # a pair of it needs 3 seeds only
    assert price(there | {("LARS", 32): third}, other) == wanted(30, 14 * (ours + theirs) + 2 * ours, 17)
    two = there | {("MSGD", 32): replace(there["MSGD", 32], lines=there["MSGD", 32].lines[:1])}
    assert price(two) == wanted(2, 2 * theirs, 3)
    nothing = {cell: verdicts.outcome_of(planned[cell], Results([])) for cell in there}
    trials = {"SNGM": 3 + 3, "MSGD": 3 + 3}  # trials, then seeds
    assert price(nothing) == wanted(12, trials["SNGM"] * ours + trials["MSGD"] * theirs, 3)
    assert price(outcomes(HIGH, LOW)).endswith("p = 1.6e-05")
    diverged = there | {("MSGD", 32): outcomes(HIGH, [*LOW, None])["MSGD", 32]}
    assert price(diverged) == "no affordable number of runs would decide all of it"
    lost = replace(there["SNGM", 32], lr=None, lines=[], nothing_trains=True)
    assert "1 more runs" in price({("SNGM", 32): lost, ("MSGD", 32): outcomes(HIGH, LOW[:2])["MSGD", 32]})


def test_the_order_follows_the_kept_results_the_seeds_and_the_claims(monkeypatch):
    monkeypatch.setattr(making, "by_worth", lambda outcomes, claims: seen.append((outcomes, claims)) or outcomes)
    seen, kept = [], Results([line(0.05, part="select", value=0.9)])
    assert making.select(small(), None, kept, seeds=7) == list(small().cells())
    ((found, claims),) = seen
    assert ([o.seeds for o in found], [len(o.missing) for o in found], claims) == ([7, 7], [2, 3], CLAIMS)


def test_seeds_that_would_show_equality_decide_that_neither_is_better():
    a, b = [0.9, 0.902, 0.904], [0.901, 0.903, 0.905]
    shows = verdicts.seeds_to_decide(a, b, 0.005)
    assert len(a) < shows < verdicts.seeds_to_decide(a, b) == 64
    found = verdicts.of_claim(Claim("table-9", "", (PAIR,)), small(), outcomes(a, b))
    assert (found[0], f"about {shows} seeds to decide" in found[1]) == ("open", True)
    assert verdicts.seeds_to_decide(HIGH, LOW) == 4  # one more than there are
    assert verdicts.tolerance("train_loss", 1.0) == verdicts.tolerance("bits_per_byte", 1.0) == 0
    assert verdicts.tolerance("seconds", 2.0) == 0.02


def test_cells_come_in_the_order_in_which_their_runs_decide_most_per_minute():
    rows = tuple(replace(row, rates={32: 0.1, 64: 0.1}) for row in small().rows)
    rows = replace(rows[0], seconds={32: 9.0, 64: 9.0}), rows[1]  # SNGM is slow
    cells = list(small(batches=(32, 64), rows=rows).cells())
    found = {
        (cell.row.name, cell.batch): verdicts.Outcome(cell, None, [], cell.cell().first_runs(), 3) for cell in cells
    }
    both = Claim("table-9", "", ((("MSGD", 64), ("SNGM", 64)),))

    def order(*claims):
        return [(o.planned.row.name, o.planned.batch) for o in verdicts.by_worth(list(found.values()), claims)]

    own = [("MSGD", 32), ("SNGM", 32)]  # the paper has no numbers for batch 64
    assert order()[:2] == own
    assert order(both) == [*own, ("SNGM", 64), ("MSGD", 64)], "both are needed, so they count the same"
    assert order(both)[2:] == order(replace(both, item="table-2"))[2:]
    assert {*order(*[both] * 9)[:2]} == {("MSGD", 64), ("SNGM", 64)}
    twice = Claim("table-9", "", ((("MSGD", 64), ("SNGM", 64)), (("MSGD", 64), ("SNGM", 32))))
    assert order(*[twice] * 20)[:3] == [("SNGM", 32), ("SNGM", 64), ("MSGD", 64)]
    found["SNGM", 64] = replace(found["SNGM", 64], missing=[])
    assert order(*[both] * 9)[0] == ("MSGD", 64)
    assert order(both)[-1] == ("SNGM", 64), "nothing of it is missing"
    lines = outcomes(HIGH, [*LOW, None])
    found = {cell: replace(lines[cell[0], 32], planned=o.planned, missing=o.missing) for cell, o in found.items()}
    assert order(*[both] * 9) == order(), "no number of runs would decide it"
    found = {cell: replace(o, lines=outcomes(HIGH, LOW)[cell[0], 32].lines) for cell, o in found.items()}
    assert order(*[both] * 9) == order(), "it is decided"


def test_a_claim_about_validation_data_is_tested_there():
    claim = Claim("table-9", "", (PAIR,), metric="validation_accuracy")
    there = outcomes(LOW, HIGH)
    verdict, why = verdicts.of_claim(claim, small(), there)
    assert (verdict, "no validation accuracy in their records" in why) == ("open", True)
    for cell, better in zip(there.values(), (0.2, 0.0), strict=True):
        for i, found in enumerate(cell.lines):
            found.record["result"]["validation_accuracy"] = 0.5 + better + i / 1000
    verdict, why = verdicts.of_claim(claim, small(), there)
    assert verdict == "holds"
    assert why.startswith("validation accuracy of SNGM at 32 - MSGD at 32: +20.00, p =")
    assert verdicts.tolerance("validation_perplexity", 100.0) == 1.0


def test_the_paper_s_times_are_shown_as_it_has_them():
    shown = [verdicts.text_of(value, "seconds") for value in (13.95, 24.44, 15.22, 1.6)]
    assert shown == ["13.95", "24.44", "15.22", "1.6"]


def test_a_claim_about_training_loss_looks_at_that_of_the_last_epoch_too():
    claim, there = Claim("table-9", "", (PAIR,), also=("train_loss",)), outcomes(HIGH, LOW)
    for name, losses in (("SNGM", LOW), ("MSGD", HIGH)):
        for made, loss in zip(there[name, 32].lines, losses, strict=True):
            made.curve["train_loss"] = [0.1, loss]
    verdict, why = verdicts.of_claim(claim, small(), there)
    assert verdict == "holds"
    assert "train loss of SNGM at 32 - MSGD at 32: -0.02, p = " in why
    for made in there["SNGM", 32].lines:
        made.curve["train_loss"] = [0.1, 0.95]
    assert verdicts.of_claim(claim, small(), there)[0] == "contradicted"


def test_a_claim_is_tested_on_the_mean_loss_too_where_that_was_run(ours):
    item = experiments.find("table-8")
    claims = document.as_data(item, verdicts.outcomes_of(item, ours))["claims"]
    assert [claim["note"] for claim in claims] == ["On the sum.", "On the mean."]
    assert [claim["from"].count("SNGM on the mean loss at") for claim in claims] == [0, 8]


def test_of_a_metric_that_should_be_low_the_lower_is_better(monkeypatch):
    monkeypatch.setattr(tasks.find("digits"), "higher_is_better", False)
    assert verdicts.of_claim(Claim("table-9", "", (PAIR,)), small(), outcomes(LOW, HIGH))[0] == "holds"


def test_a_claim_about_several_batches_holds_where_as_many_speak_for_it_as_it_says():
    there = {(name, batch): o for (name, _), o in outcomes(HIGH, LOW).items() for batch in range(5)}

    def pair(batch, first="SNGM", second="MSGD"):
        return (first, batch), (second, batch)

    def turned(batch):
        return pair(batch, "MSGD", "SNGM")

    def unknown(batch):
        return pair(batch, "LARS")

    for pairs, share, verdict in (
        ((pair(0), unknown(1)), 1.0, "open"),
        ((pair(0), turned(1)), 1.0, "contradicted"),
        ((*map(pair, range(4)), unknown(4)), 0.8, "holds"),
        ((*map(pair, range(4)), turned(4)), 0.8, "holds"),
        ((*map(pair, range(3)), turned(3), turned(4)), 0.8, "contradicted"),
        ((*map(pair, range(3)), unknown(3), unknown(4)), 0.8, "open"),
        ((*map(pair, [*range(5)] * 3), turned(3), turned(4)), 0.8, "contradicted"),  # 15 of 17 pairs, 3 of 5 batches
        ((*map(pair, range(5)), unknown(4)), 0.8, "holds"),
        ((*map(pair, range(5)), unknown(4)), 1.0, "open"),
    ):
        claim = Claim("table-9", "", pairs, share=share)
        assert verdicts.of_claim(claim, small(), there)[0] == verdict, (pairs, share)


def test_a_time_is_better_if_lower_and_only_on_the_same_hardware():
    item, claim = small(metric="seconds"), Claim("table-9", "", (PAIR,))
    there = outcomes(LOW, HIGH, item)
    assert verdicts.of_claim(claim, item, there)[0] == "holds"
    there["MSGD", 32].lines[0].record["hardware"]["name"] = "another"
    never = "no affordable number of runs would decide all of it"
    assert verdicts.of_claim(claim, item, there) == (
        "open",
        f"SNGM at 32 - MSGD at 32: -0.02, on different hardware; {never}",
    )


def test_a_diverged_seed_is_no_reproduction():
    assert verdicts.judge_number([0.9, 0.901, 0.902], 0.9, "accuracy", diverged=1) == "not reproduced"
    assert verdicts.judge_number([0.9], 0.9, "accuracy", diverged=1) == "open"


# ---------------------------------------------------------------- the pages of this repository


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(HERE / "results", "results")
    shutil.copy(HERE / "README.md", "README.md")
    return Path("results")


def test_the_pages_say_what_the_runs_say(copied):
    found = sngm("paper report --check")
    assert found.code == 0, found.err


def test_a_method_whose_every_seed_diverged_is_a_cross_and_one_that_lost_some_says_so():
    there = outcomes([None, None, None], [0.9, None, 0.91])
    lost, some = (drawing._series(name, cell, "test_accuracy") for (name, _), cell in there.items())
    assert (lost.label, lost.points, lost.lost) == ("SNGM, diverged", [], [2.0])
    assert some.label == "MSGD, 2 seeds, 1 diverged"


def test_a_figure_s_name_leads_to_its_table_and_its_file(copied):
    assert "figure-3 shows runs of table-6" in sngm("paper show figure-3").err
    assert "shows runs" not in sngm("paper show TABLE-6").err
    assert sngm("paper show FIGURE-3").out.rstrip().endswith("results/figure-3.svg, results/table-6-by-batch.svg")
    refused(sngm("paper show table-5"), "did you mean table-5-cifar10 or table-5-cifar100?", "figure-3", "table-1")
    cell = next(
        c for c in sngm("paper show table-8 --json").json["cells"] if (c["method"], c["batch"]) == ("MSGD", 8192)
    )
    assert cell["all_rates_diverged"] is True


def test_table_1_is_shown_and_has_nothing_to_run():
    shown = sngm("paper show table-1").out
    assert ["batch", "size", "min(sqrt(C)", "/", "L,", "C^(1/4))", "sqrt(C)"] in [
        line.split() for line in shown.splitlines()
    ]
    assert "|" not in shown
    assert sngm("paper show table-1 --json").json["learning rate"]["SNGM"] == "sqrt(B) / sqrt(C)"
    refused(sngm("paper run table-1 --dry-run"), "theory", "check-theory")


def test_the_papers_numbers_are_shown_where_we_have_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = sngm("paper show table-4")
    assert "32768 SNGM 76.16 not run yet 0 open" in " ".join(shown.out.split())
    assert "showing the runs that come with sngm" in shown.err
    assert "spectral SNGM 0.04 0.595 92.70 92.25" in " ".join(sngm("paper show rivals").out.split())


def test_links_lead_to_headings_that_are_there(copied):
    for target, anchor in re.findall(r"\]\((?:results/)?([\w-]+/runs\.md)#([\w-]+)\)", Path("README.md").read_text()):
        headings = re.findall(r"^## (.*)$", (copied / target).read_text(), re.M)
        assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


# ---------------------------------------------------------------- the command line


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(experiments, "ITEMS", (small(),))
    monkeypatch.setattr(document, "ITEMS", (small(),))
    for module in (document, drawing):
        monkeypatch.setattr(module, "FIGURES", ())


@pytest.fixture
def written(tiny, monkeypatch):
    """Write the pages of a few runs, and a README with their table."""
    monkeypatch.setattr(document, "FIRST_ITEM", "table-9")
    runs = [line(lr, part="select", value=value) for lr, value in ((0.05, 0.8), (0.1, 0.9), (0.2, 0.85))]
    keep([*runs, line(value=0.91), line(seed=1, value=0.93)], Path("results"))
    Path("README.md").write_text(f"before {document.BEGIN}{document.END} after")
    assert sngm("paper report").code == 0
    assert sngm("paper report --check").code == 0
    return Path("README.md").read_text()


def test_a_changed_record_or_table_is_found(written):
    for name, old, new in (
        ("README.md", "| 92.00 |", "| 99.00 |"),
        ("results/README.md", "92.00", "99.00"),
        ("results/digits/runs.md", "0.93", "0.99"),
        ("results/table-9-by-batch.json", "92.0", "99.0"),
        ("results/table-9-by-batch.svg", ">SNGM", ">MSGD"),
        ("results/digits/runs.jsonl", '"seconds_per_epoch": ', '"seconds_per_epoch": 1'),
    ):
        path = Path(name)
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        refused(sngm("paper report --check"), "differ from the runs in the results folder", "sngm paper report")
        if path.suffix != ".jsonl":
            assert sngm("paper report").out == f"wrote {name}\n"
            assert path.read_text() == text


def test_how_a_picture_is_drawn_does_not_matter_but_it_must_be_there(written):
    picture = Path("results/table-9-by-batch.svg")
    text = picture.read_text()
    picture.write_text(text.replace("stroke-width: 2", "stroke-width: 3"))
    assert sngm("paper report --check").code == 0
    assert ">SNGM" in text
    for changed in ("drawn otherwise", "", text.replace(">SNGM", ">MSGD")):
        picture.write_text(changed)
        refused(sngm("paper report --check"), "table-9-by-batch.svg")
    picture.unlink()
    refused(sngm("paper report --check"), "table-9-by-batch.svg")
    picture.write_text(text)
    Path("results/figure-2-mine.svg").write_text("mine")
    Path("results/other").mkdir()
    Path("results/other/runs.md").write_text("mine")
    assert sngm("paper report --check").code == 0
    Path("results/digits/runs.jsonl").unlink()
    outdated = [f"results/{name}" for name in ("table-9-by-batch.svg", "table-9-by-batch.json", "digits/runs.md")]
    refused(sngm("paper report --check"), *outdated)
    assert sngm("paper report").out.splitlines()[-3:] == [f"removed {name}" for name in outdated]
    assert Path("results/figure-2-mine.svg").exists()
    assert Path("results/other/runs.md").exists()


def test_the_first_table_is_not_taken_for_absent_where_a_mark_of_it_is_missing(written):
    for mark in (document.BEGIN, document.END):
        Path("README.md").write_text(written.replace(mark, ""))
        refused(sngm("paper report --check"), "must hold", mark)
    refused(sngm("paper report --check --readme results"), "--readme results: no such file")
    Path("README.md").write_text("A page of another project.")
    assert "no README.md has markers" in sngm("paper report --check").out
    assert document.BEGIN in (HERE / "README.md").read_text()


def test_other_data_than_those_of_the_results_are_refused_before_training(tiny):
    trials = [line(lr, part="select", value=value) for lr, value in ((0.05, 0.8), (0.1, 0.9), (0.2, 0.85))]
    keep([*trials, line(value=0.91)], Path("results"))
    found = sngm("paper run table-9 --cells sngm --device cpu --jobs 1")
    assert found.code == 2
    assert re.search("digits: these are different data than those of run .*fingerprint: a there", found.err)
    assert not list(Path().rglob("run.json"))


def test_what_is_missing_is_run_kept_and_not_run_again(tiny):
    plan = sngm("paper run table-9 --dry-run --json").json
    assert [(cell["cell"], cell["runs"]) for cell in plan["cells"]] == [
        ("MSGD@32", 4),
        ("SNGM@32", 5),
    ]  # cheapest first
    elsewhere = [line(lr, part="select", value=value) for lr, value in ((0.05, 0.8), (0.1, 0.9), (0.2, 0.85))]
    keep(elsewhere, Path("results"))  # from another machine
    found = sngm("paper run table-9 --cells sngm --device cpu --jobs 1 --json")
    assert (found.code, found.json["missing_runs"]) == (0, 0), found.err
    there = read(Path("results"))
    assert len(there.lines) == 5
    made = sorted(path.parent.name for path in Path("runs/paper").rglob("run.json"))
    assert made == sorted(run_name(line(seed=seed).config) for seed in (0, 1))
    cell = sngm("paper show table-9 --json").json["cells"][0]
    assert (cell["lr"], len(cell["values"]), cell["verdict"]) == (0.1, 2, "open")
    assert "SNGM" in sngm("paper show table-9").out
    assert "1 of 2 cells; 4 runs missing" in sngm("paper list").out
    written = {path: path.stat().st_mtime_ns for path in Path("runs/paper").rglob("run.json")}
    assert sngm("paper run table-9 --cells SNGM@32 --device cpu").code == 0
    assert {path: path.stat().st_mtime_ns for path in Path("runs/paper").rglob("run.json")} == written, "made anew"
    assert len(read(Path("results")).lines) == 5
    assert sngm("paper report").code == 0
    assert "table-9" in Path("results/README.md").read_text()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda r: r.update(commit="fedcba9"), id="code"),
        pytest.param(lambda r: r["hardware"].update(cores=999), id="cores", marks=pytest.mark.slow),
        pytest.param(lambda r: r.update(made_before=[{}]), id="pieces", marks=pytest.mark.slow),
    ],
)
def test_a_run_begun_with_other_code_or_hardware_begins_anew_and_nothing_is_lost(tiny, change):
    trials = [line(lr, part="select", value=value) for lr, value in ((0.05, 0.8), (0.1, 0.9), (0.2, 0.85))]
    keep(trials, Path("results"))
    config = line().config
    folder = Path("runs/paper/table-9/sngm-32")
    path = folder / "runs" / run_name(config)
    path.mkdir(parents=True)
    now = provenance(torch.device("cpu"))
    record = {"format": 1, "config": config.as_dict(), "status": "interrupted", **now, "hardware": {**now["hardware"]}}
    change(record)
    (path / "run.json").write_text(json.dumps(record))
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as for users, not as errors
        found = sngm("paper run table-9 --cells sngm --seeds 1 --device cpu --jobs 1 --json")
    assert found.code == 0, found.err
    assert found.json["missing_runs"] == 0
    assert "starts again" in found.err
    assert json.loads((folder / "aside" / f"{path.name}-1" / "run.json").read_text()) == record
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.slow
def test_a_budget_ends_and_the_rest_is_run_later(tiny):
    found = sngm("paper run table-9 --budget 1s --device cpu --json")
    assert found.code == 0, found.err
    left = found.json["missing_runs"]
    assert left > 0
    assert sngm("paper run table-9 --device cpu --jobs 2 --json").json["missing_runs"] == 0


def test_a_budget_without_the_signal_for_it_is_refused(tiny, monkeypatch):
    monkeypatch.delattr("signal.SIGALRM")  # as on Windows
    refused(sngm("paper run table-9 --budget 1h --device cpu"), "--budget needs the signal SIGALRM")


def test_a_run_that_fails_is_told_and_the_others_are_kept(tiny, tmp_path, monkeypatch):
    def failing(study, folder, *, known, show, **_):
        record = {"status": "failed", "error": "ValueError: no", "result": {}}
        progress = making.launch.Progress([], 1, done=[(line().config, record)])
        show(progress)
        return progress

    monkeypatch.setattr(making.launch, "compare", failing)
    found = sngm("paper run table-9 --device cpu")
    assert found.code == 1
    assert "2 runs failed, the first sngm at batch 32: ValueError: no" in found.err
    assert sngm("paper run table-9 --device cpu --json").code == 1

    def out_of_time(*args, **more):
        failing(*args, **more)
        raise making.OutOfTime

    monkeypatch.setattr(making.launch, "compare", out_of_time)
    assert "1 runs failed" in sngm("paper run table-9 --device cpu --budget 1h").err


def test_a_run_that_another_process_made_meanwhile_is_not_made_again(tiny, monkeypatch):
    answers = []

    def study(study, folder, *, known, show, **_):
        answers.append(known(line().config, line().record["data"]))
        keep([line()], Path("results"))
        answers.append(known(line().config, line().record["data"]))

    monkeypatch.setattr(making.launch, "compare", study)
    assert sngm("paper run table-9 --cells sngm --device cpu").code == 0
    assert answers == [None, line().record]


def test_runs_without_a_commit_are_refused(tiny, monkeypatch):
    monkeypatch.setattr(making, "commit", lambda: "0123abc+")
    refused(sngm("paper run table-9 --device cpu"), "uncommitted changes")
    monkeypatch.setattr(making, "commit", lambda: None)
    refused(sngm("paper run table-9 --device cpu"), "SNGM_COMMIT")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("show table-22", ["table-2", "must be one of"]),
        ("run nosuch", ["item must be one of", "nosuch"]),
        ("run table-2 --cells nosuch@8192", ["rows MSGD"]),
        ("run table-2 --cells SNGM@77", ["batches 128, 1024, 2048"]),
        ("run table-2 --seeds 0", ["at least 1"]),
        ("run table-2 --jobs 0", ["from 1 to"]),
        ("run table-2 --seeds 100000000 --dry-run", ["seeds", "at most"]),
        *((f"run table-2 --budget {text}", ["25m"]) for text in ("soon", "0", "-5m", "nan", "inf", "m", "1e99h")),
        ("report --results nowhere", ["no folder nowhere"]),
    ],
)
def test_what_makes_no_sense_is_refused(words, said):
    refused(sngm(f"paper {words}"), *said)
