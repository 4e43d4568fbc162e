"""Searches with equal budgets: their points, runs, records, report and errors; learning rates by method."""

import itertools
import json
import math
from pathlib import Path

import pytest
from console import OWN_TASK, refused, sngm

import sngm as package
from sngm.errors import UsageError
from sngm.report.figures import best_of
from sngm.study import StudyConfig
from sngm.study.search import check_search, points, ranges_of

pytestmark = pytest.mark.usefixtures("in_one_process")
SEARCH = (
    "compare own.py:Line --methods sngm,adamw --batches 8 --epochs 1 --seeds 2 "
    "--search lr,weight_decay,momentum --trials 4"
)


@pytest.fixture(autouse=True)
def in_a_folder_with_a_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN_TASK)


def study_of(folder):
    return json.loads(Path(folder, "study.json").read_text())


def configs(folder):
    return [json.loads(path.read_text())["config"] for path in Path(folder).glob("runs/*/run.json")]


def test_points_fill_their_ranges_and_more_trials_begin_with_the_same():
    ranges = {"lr": (0.01, 1.0), "weight_decay": (1e-5, 1e-3), "momentum": (0.7, 0.99), "warmup": (0.0, 5.0)}
    found = points(ranges, 32)
    assert found[:8] == points(ranges, 8)
    assert found[0] == {"lr": 0.1, "weight_decay": 1e-4, "momentum": pytest.approx(0.945, abs=1e-3), "warmup": 2.5}
    for name, (low, high) in ranges.items():
        values = [point[name] for point in found]
        assert low <= min(values)
        assert max(values) <= high
        assert len(set(values)) == 32
    thirds = {(int(3 * math.log(p["lr"] / 0.01, 100)), int(3 * p["warmup"] / 5)) for p in found}
    assert len(thirds) == 9  # every third of one range with every third of the other


def test_trials_in_a_narrow_range_stay_apart():
    assert len({point["lr"] for point in points({"lr": (0.1, 0.12)}, 64)}) == 64
    with pytest.raises(UsageError, match="too narrow"):
        points({"lr": (0.1, 0.1000001)}, 64)


def test_what_makes_a_method_is_not_searched():
    assert "momentum" not in ranges_of("digits", "sngd", 512, 10, {"lr": None, "momentum": None})


def test_ranges_follow_the_method():
    search = {"lr": None, "weight_decay": None, "momentum": None, "warmup": None}
    of_sngm, of_adamw = (ranges_of("digits", name, 512, 10, search) for name in ("sngm", "adamw"))
    assert of_sngm["weight_decay"] == (1e-5, 1e-3)
    assert of_adamw["weight_decay"] == (1e-3, 0.1)  # a tenth to ten times torch's own default
    assert of_adamw["lr"][1] < of_sngm["lr"][1]
    assert of_adamw["momentum"] == of_sngm["momentum"]  # AdamW's first beta
    assert of_sngm["warmup"] == (0.0, 2.0)
    assert ranges_of("digits", "sngm", 512, 10, {"lr": (0.5, 2)}) == {"lr": (0.5, 2.0)}
    search = check_search({"lr": (0.5, 2), "lr[adamw]": (0.01, 0.1), "weight_decay[adamw]": (0.1, 1)}, 4)
    assert ranges_of("digits", "adamw", 512, 10, search) == {"lr": (0.01, 0.1), "weight_decay": (0.1, 1.0)}
    assert ranges_of("digits", "sngm", 512, 10, search) == {"lr": (0.5, 2.0), "weight_decay": (1e-5, 1e-3)}


def test_a_search_gives_every_method_the_same_trials_and_resumes():
    done = sngm(f"{SEARCH} --out s --json")
    assert done.code == 0, done.err
    assert [cell["method"] for cell in done.json["cells"]] == ["sngm", "adamw"]
    cells = {cell["method"]: cell for cell in study_of("s")["cells"]}
    for cell in cells.values():
        assert len(cell["trials"]) == 4
        assert cell["extensions"] == 0
        best = min(cell["trials"], key=lambda trial: math.inf if trial["score"] is None else trial["score"])
        assert cell["chosen"] == {key: value for key, value in best.items() if key != "score"}
        assert cell["lr"] == cell["chosen"]["lr"]
    full = [config for config in configs("s") if config["part"] == "full"]
    assert len(full) == 4
    assert len(configs("s")) == 4 + 2 * 4
    for config in full:
        chosen = cells[config["method"]]["chosen"]
        assert config["lr"] == chosen["lr"]
        assert config["method_settings"]["weight_decay"] == chosen["weight_decay"]
        own = config["method_settings"]
        assert chosen["momentum"] == (own["betas"][0] if config["method"] == "adamw" else own["momentum"])
    again = sngm(f"{SEARCH} --out s")
    assert "12 of 12 runs were finished already" in again.err
    page = Path("s/report.html").read_text()
    assert "How the settings were chosen" in page
    assert "Best validation error after k trials" in page
    assert Path("s/trials.svg").exists()
    # more trials are another study
    other = sngm(f"{SEARCH.replace('--trials 4', '--trials 5')} --out s")
    assert other.code == 2
    assert "holds another study" in other.err


def test_a_dry_run_names_ranges_budget_and_recipe():
    plan = sngm(f"{SEARCH} --dry-run").out
    assert (
        "sngm at batch 8: 4 trials over lr 0.00577 to 0.173, weight_decay 1e-05 to 0.001, momentum 0.7 to 0.99" in plan
    )
    assert "schedule cosine, warm-up 0 epochs" in plan
    assert not any(of_a_grid in plan for of_a_grid in ("at least", "beyond the grid"))
    plan = sngm("compare own.py:Line --methods sngm --lrs 0.1,0.2 --dry-run").out
    assert "weight decay 0.0001, schedule cosine" in plan
    assert all(of_a_grid in plan for of_a_grid in ("at least", "beyond the grid"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--search weight_decay --trials 4", "must include lr"),
        ("--search lr,beta --trials 4", "'beta'"),
        ("--search lr,lr --trials 4", "twice"),
        ("--search lr", "--trials"),
        ("--lrs sngm=", "once"),
        ("--lrs 'sngm=0.1;msgd=0.1;adamw=0.1'", "adamw, which is not one of the methods"),
        ("--search lr --trials 1", "from 2 to"),
        ("--trials 4", "search"),
        ("--search lr=1:0.1 --trials 4", "two rising numbers"),
        ("--search lr=0:1 --trials 4", "two rising numbers"),
        ("--search lr=a:b --trials 4", "two rising numbers"),
        ("--search lr,momentum=0.5:1 --trials 4", "two rising numbers"),
        ("--search lr,lr[msgd] --trials 4", "needs a range for lr[msgd]"),
        ("--search lr,lr[msgd]=1:0.1 --trials 4", "two rising numbers"),
        ("--search lr,lr[adamw]=0.1:1 --trials 4", "adamw, which is not one of the methods"),
        ("--search lr,lr[msgd=0.1:1 --trials 4", "'lr[msgd'"),
        ("--search lr,lr[]=0.1:1 --trials 4", "'lr[]'"),
        ("--search lr --trials 4 --lrs 0.1,0.2", "either"),
        ("--search lr,warmup --trials 4 --warmup 1", "warmup is searched"),
        ("--search lr,weight_decay --trials 4 --set weight_decay=1e-4", "weight_decay is searched"),
        ("--lrs sngm=0.1,0.2", "no learning rates for msgd"),
        ("--lrs 'sngm=0.1,0.2;msgd=0.1'", "same number of learning rates"),
        ("--lrs 'sngm=0.1;sngm=0.2'", "once"),
        ("--lrs 'sngm=0.1;msgd=fast'", "numbers"),
    ],
)
def test_a_wrong_search_is_refused_with_the_way_out(more, words):
    refused(sngm(f"compare digits --methods sngm,msgd {more} --dry-run"), words)


def test_learning_rates_can_be_given_by_method():
    study = package.compare(
        "own.py:Line", [package.SNGM, "AdamW"], [8], lrs={package.SNGM: [0.1, 0.2], "AdamW": [0.01, 0.02]}, seeds=1,
        progress=False,
    )  # fmt: skip
    tried = {cell.method: set(cell.grid[:2]) for cell in study.summary.cells.values()}
    assert tried["sngm"] & {0.1, 0.2}
    assert tried["adamw"] & {0.01, 0.02}
    plan = sngm('compare own.py:Line --methods sngm,adamw --lrs "sngm=0.1,0.3;adamw=1e-3,3e-3" --dry-run --json').json
    assert [cell["lrs"] for cell in plan["cells"]] == [[0.1, 0.3]] * 2 + [[0.001, 0.003]] * 2
    both = "--methods 'sngm,sngm(weight_decay=8e-4)' --lrs 'sngm=0.1;sngm(weight_decay=8e-4)=0.2'"
    plan = sngm(f"compare own.py:Line {both} --batches 8 --dry-run --json").json
    assert [cell["lrs"] for cell in plan["cells"]] == [[0.1], [0.2]]


@pytest.mark.parametrize("search", ["lr", 3, {"lr": 3}, ["lr", "speed"]])
def test_a_wrong_search_in_python_is_named(search):
    with pytest.raises((TypeError, UsageError), match="search"):
        check_search(search, 4)


def test_a_study_without_a_search_is_the_same_as_before():
    identity = StudyConfig("digits", ("sngm",), (512,), 1, 1).identity()
    assert not {"search", "trials"} & identity.keys()


def test_the_best_of_k_trials_is_that_of_all_sets_of_k():
    scores = [0.1, 0.4, 0.5, 0.9]
    for k in range(1, 5):
        best = sorted(max(some) for some in itertools.combinations(scores, k))
        mean, low, high = best_of(k, scores)
        assert mean == pytest.approx(sum(best) / len(best))
        assert low == best[math.ceil(0.1 * len(best)) - 1]
        assert high == best[math.ceil(0.9 * len(best)) - 1]
