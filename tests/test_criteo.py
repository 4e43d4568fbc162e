"""Criteo: conversion of text to arrays, malformed text, synthetic rows; DeepFM; and AUC."""

import functools
import gzip
import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from console import finish
from criteo_synthetic import CriteoLike, cardinalities
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import MinMaxScaler
from torch.nn.functional import binary_cross_entropy_with_logits
from waiting import launch, next_line

from sngm.data import conversion, criteo, criteo_convert, criteo_text
from sngm.data.conversion import verify
from sngm.data.criteo import find_criteo, load_criteo
from sngm.data.criteo_convert import split_of
from sngm.data.criteo_text import REASONS, parse
from sngm.errors import DataMissing, Failed, UsageError
from sngm.models.deepfm import DeepFM, fm, look_up
from sngm.tasks.scores import auc, log_loss

REAL = Path(__file__).parents[1] / ".data" / "criteo"
real = pytest.mark.skipif(not (REAL / "dac_sample_8k_raw.txt").is_file(), reason="needs Criteo's samples in .data")
quiet = {"show": lambda text: None}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Run in an empty folder with its own home, so that no earlier conversion is found."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SNGM_DATA", raising=False)


def row(label=0, number=3, category="ab", **fields):
    """Return a line of text; fields are given by their names, I1 to C26."""
    values = {name: str(number) for name in criteo_convert.NAMES[:13]} | dict.fromkeys(
        criteo_convert.NAMES[13:], category
    )
    return "\t".join([str(label), *(values | fields).values()])


def put(lines, name="rows.tsv", end="\n", last=True):
    text = end.join(lines) + (end if last else "")
    content = text.encode("latin1")
    Path("criteo").mkdir(exist_ok=True)
    Path("criteo", name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return load(name)


def load(*names, **options):
    return load_criteo(Path(), list(names) or ["rows.tsv"], **(quiet | options))


def many(count=50, begin=0):
    """Return rows with distinct I1 and C1."""
    return [row(i % 2, I1=str(i), C1=f"{i:x}") for i in range(begin, begin + count)]


def everything(found):
    """Return all rows in one sorted table, independent of the split."""
    parts = [torch.cat([t.double().reshape(len(t), -1) for t in rows.tensors], 1) for rows in splits(found)]
    return sorted(torch.cat(parts).tolist())


def splits(found):
    return found.train, found.validation, found.test


# ---------------------------------------------------------------- one by one, as DeepCTR-Torch's script does it


def one_by_one(text, seed=2020):
    """Convert in plain Python with scikit-learn's split; return the arrays of each split, and field sizes."""
    rows = [line.split("\t") for line in text.splitlines()]
    rest, test = train_test_split(rows, test_size=0.2, random_state=seed)
    cut = int(len(rest) * (1.0 - 0.2))
    train, validation = rest[:cut], rest[cut:]
    scaler = MinMaxScaler().fit(np.array([[float(v or 0) for v in r[1:14]] for r in train]))
    words = [{w: i + 2 for i, w in enumerate(sorted({r[14 + f] for r in train} - {""}))} for f in range(26)]
    found = []
    for part in (train, validation, test):
        dense = scaler.transform(np.array([[float(v or 0) for v in r[1:14]] for r in part]))
        ids = [[words[f].get(w, 1) if w else 0 for f, w in enumerate(r[14:])] for r in part]
        found.append((dense, ids, [int(r[0]) for r in part]))
    return found, [len(field) + 2 for field in words]


def same_rows(rows, wanted):
    """Compare rows in any order: a split keeps that of the file."""
    dense, ids, labels = wanted
    mine = torch.cat([t.double().reshape(len(t), -1) for t in rows.tensors], 1).numpy()
    theirs = np.concatenate([dense.astype(np.float32), ids, np.array(labels)[:, None]], 1)
    assert mine.shape == theirs.shape

    def order(table):
        return table[np.lexsort(np.round(table[:, ::-1], 5).T)]

    np.testing.assert_allclose(order(mine), order(theirs), rtol=2e-6, atol=1e-7)


@real
def test_real_rows_come_out_as_by_the_rules_of_deepctrs_script_fitted_on_training_rows(monkeypatch):
    monkeypatch.setattr(criteo_convert, "BLOCK", 3000)  # so that there are several blocks
    monkeypatch.setattr(criteo_text, "CHUNK", 1 << 18)
    shutil.copytree(REAL, "criteo", ignore=shutil.ignore_patterns(".sngm", "*80k*"))
    found = load("dac_sample_8k_raw.txt")
    wanted, sizes = one_by_one(Path("criteo/dac_sample_8k_raw.txt").read_text())
    assert found.field_sizes == sizes
    for rows, each in zip(splits(found), wanted, strict=True):
        same_rows(rows, each)
    facts = found.facts
    assert facts["rows"] == {"train": 5120, "validation": 1280, "test": 1600}
    assert facts["malformed"] == {"rows": 0, "reasons": {}, "first": []}
    assert facts["unseen"]["test"]["C3"] == sum(r[2] == 1 for r in wanted[2][1]) > 0
    assert facts["missing"]["I1"] == 3612
    assert verify(found.folder) == []


@real
def test_the_default_is_the_sample_of_80k():
    Path("criteo").mkdir()
    shutil.copy(REAL / "dac_sample_80k.tsv", "criteo")
    found = load_criteo(Path(), **quiet)
    assert [len(rows) for rows in splits(found)] == [51_200, 12_800, 16_000]
    train = found.train.tensors
    assert (train[0].min(), train[0].max()) == (0, 1), "the scales are those of the training rows"
    assert (found.train.tensors[1] != 1).all(), "no training category is unseen"
    for rows in splits(found):
        assert (rows.tensors[1] < torch.tensor(found.field_sizes)).all()


@pytest.mark.parametrize("rows", [3, 4, 5, 7, 10, 99, 1000, 80_000])
def test_the_split_is_scikit_learns_with_the_last_fifth_for_validation(rows):
    for seed in (0, 2020):
        rest, test = train_test_split(np.arange(rows), test_size=0.2, random_state=seed)
        cut = int(len(rest) * (1.0 - 0.2))
        found = split_of(rows, seed)
        for number, wanted in enumerate((rest[:cut], rest[cut:], test)):
            assert np.flatnonzero(found == number).tolist() == sorted(wanted)


def test_another_seed_is_another_split_with_a_folder_of_its_own():
    a = put(many())
    b = load(split_seed=1)
    assert a.folder != b.folder
    assert sorted(a.train.tensors[0][:, 0].tolist()) != sorted(b.train.tensors[0][:, 0].tolist())
    for seed in (-1, 2**32):
        with pytest.raises(UsageError, match=f"split_seed must be from 0 .*, got {seed}"):
            load(split_seed=seed)


# ---------------------------------------------------------------- text


def test_integers_and_categories_to_their_limits():
    high = "9" * 18
    text = "\n".join(
        [
            row(1, I1="-1", I2=high, I3="-" + high, I4="", I5="007", I6="0", I7="-0", C1="", C2="x", C3="12345678"),
            row(0, C26=""),
            row(1, C1="ä", C2="\u2028"),
        ]
    )
    found = parse(text.encode() + b"\n")
    keys = found.rows["keys"]
    assert found.verdicts.tolist() == [0, 0, 0]
    assert found.rows["label"].tolist() == [1, 0, 1]
    assert found.rows["integers"][0, :8].tolist() == [-1, int(high), -int(high), 0, 7, 0, 0, 3]
    assert keys[0, :4].tolist() == [int.from_bytes(b.ljust(8, b"\0")) for b in (b"", b"x", b"12345678", b"ab")]
    assert keys[1, 25] == 0
    assert keys[2, 0] == int.from_bytes("ä".encode().ljust(8, b"\0"))
    assert (found.missing[3], found.missing[13], found.missing[38], found.missing.sum()) == (1, 1, 1, 3)


BAD = [
    ("oh", "fewer"),
    ("", "fewer"),
    (row().rsplit("\t", 1)[0], "fewer"),
    (row() + "\t", "more"),
    (row() + "\tx", "more"),
    (row().replace("\t", ","), "fewer"),
    (row("", I1="1"), "label"),
    (row(2), "label"),
    (row("01"), "label"),
    (row("-1"), "label"),
    (row("1.0"), "label"),
    ("\t".join(["label", *criteo_convert.NAMES]), "label"),
    ("\ufeff".encode().decode("latin1") + row(1), "label"),
    (row(I1="x"), "no integer"),
    (row(I13="1.0"), "no integer"),
    (row(I2="-"), "no integer"),
    (row(I2="--1"), "no integer"),
    (row(I2="+1"), "no integer"),
    (row(I2=" 1"), "no integer"),
    (row(I2="1e3"), "no integer"),
    (row(I2="0x1"), "no integer"),
    (row(I2="\xb2"), "no integer"),
    (row(I2="NaN"), "no integer"),
    (row(I2="1\r"), "no integer"),
    (row(I3="1" * 19), "18 digits"),
    (row(I3="-" + "1" * 19), "18 digits"),
    (row(I3="0" * 400), "18 digits"),
    (row(C1="123456789"), "8 bytes"),
    (row(C26="x" * 5000), "8 bytes"),
    (row(C5="a\0"), "zero byte"),
    (row(I5="\0"), "zero byte"),
    ("\0" * 90, "zero byte"),
]


@pytest.mark.parametrize(("line", "why"), BAD, ids=range(len(BAD)))
def test_a_malformed_row_is_left_out_counted_and_named(line, why):
    before, after = many(8), many(9, begin=8)
    reason = next(reason for reason in REASONS if why in reason)
    with pytest.warns(UserWarning, match=rf"^1 malformed of 18 rows .* line 9 of rows\.tsv, with {reason}; .*facts"):
        found = put([*before, line, *after])
    assert found.facts["malformed"] == {
        "rows": 1,
        "reasons": {reason: 1},
        "first": [{"file": "rows.tsv", "line": 9, "why": reason}],
    }
    assert everything(found) == rows_without_errors()


@functools.cache
def rows_without_errors():
    return everything(put(many(17), "good.tsv"))


def test_all_malformed_rows_count_and_the_first_ten_are_named_over_pieces_and_files(monkeypatch):
    monkeypatch.setattr(criteo_text, "CHUNK", 1 << 10)
    lines = many(100)
    for at in range(0, 100, 4):
        lines[at] = "short" if at % 8 else row(7)
    with pytest.warns(UserWarning, match="25 malformed of 100"):
        put(lines, "a.tsv")
    Path("criteo/b.tsv").write_text("\n".join([*many(20, begin=100), row(I1="no")]))
    with pytest.warns(UserWarning, match="26 malformed of 121"):
        found = load("a.tsv", "b.tsv")
    bad = found.facts["malformed"]
    assert bad["reasons"] == {REASONS[0]: 12, REASONS[3]: 13, REASONS[4]: 1}
    assert [one["line"] for one in bad["first"]] == list(range(1, 41, 4))
    assert [source["rows"] for source in found.facts["sources"]] == [75, 20]
    Path("criteo/a.tsv").write_text("\n".join(many(100)))
    with pytest.warns(UserWarning, match=r"1 malformed of 121 rows .* line 21 of b\.tsv") as caught:
        load("a.tsv", "b.tsv")
    assert len(caught) == 1


def test_crlf_gzip_pieces_and_a_last_line_without_its_end_change_nothing(monkeypatch):
    lines = [*many(60), row(1, C26=""), row(0, C26="12345678")]
    wanted = everything(put(lines))
    for chunk, end, last, name in (
        (1 << 23, "\r\n", True, "plain.tsv"),
        (1 << 23, "\n", False, "packed.gz"),
        (300, "\n", True, "packed.gz"),
        (300, "\r\n", False, "plain.tsv"),
        (1 << 12, "\r\n", True, "packed.gz"),
        (1 << 12, "\n", False, "plain.tsv"),
    ):
        monkeypatch.setattr(criteo_text, "CHUNK", chunk)
        assert everything(put(lines, name, end, last)) == wanted
    members = b"".join(gzip.compress("\n".join(part).encode() + b"\n") for part in (lines[:9], lines[9:]))
    Path("criteo/two_members").write_bytes(members)
    assert everything(load("two_members")) == wanted
    Path("criteo/a").write_text("\n".join(lines[:31]))  # without a final line break
    Path("criteo/b").write_bytes(gzip.compress("\n".join(lines[31:]).encode()))
    assert everything(load("a", "b")) == wanted


def test_bytes_that_are_no_utf8_are_categories_as_any():
    found = put([row(i % 2, C1="\xff\xfe" if i % 3 else "\x80") for i in range(40)])
    assert found.field_sizes[0] == 4


def test_one_category_in_all_rows_and_none_at_all():
    found = put([row(i % 2, 5, "", C2="same") for i in range(30)])
    assert found.field_sizes == [2, 3, *[2] * 24]
    for rows in splits(found):
        assert (rows.tensors[0] == 0).all(), "a constant column is 0"
        assert (rows.tensors[1] == torch.tensor([0, 2, *[0] * 24])).all()


def test_values_that_training_has_not_seen():
    lines = [row(i % 2) for i in range(20)]
    where = split_of(20, 2020)
    new = int(np.flatnonzero(where == 2)[0])
    lines[new] = row(1, I1="13", C1="new")
    lines[int(np.flatnonzero(where == 0)[0])] = row(1, I1="-7")
    found = put(lines)
    assert found.test.tensors[1][:, 0].tolist().count(1) == found.facts["unseen"]["test"]["C1"] == 1
    assert found.test.tensors[0][:, 0].max() == 2, "(13 + 7) / (3 + 7): not cut off at 1"
    assert sum(sum(fields.values()) for fields in found.facts["unseen"].values()) == 1


# ---------------------------------------------------------------- invalid files


def test_a_file_that_is_empty_or_not_criteos_is_refused_and_nothing_stays():
    Path("criteo").mkdir()
    for content, why in (
        (b"", "is empty"),
        (gzip.compress(b""), "is empty"),
        (
            "\n".join(line.split("\t", 1)[1] for line in many()).encode(),
            "50 of 50 lines are .*most with fewer",
        ),
        (b"id,click,hour\n" * 30, "does not hold Criteo's rows"),
        (bytes(range(256)) * 40, "does not hold Criteo's rows"),
        ("\n".join(many(2)).encode(), "holds 2 good rows; .* at least 3"),
    ):
        Path("criteo/rows.tsv").write_bytes(content)
        with pytest.raises(DataMissing, match=f"rows.tsv {why}|{why}"):
            load()
        assert [path.name for path in Path("criteo/.sngm").iterdir() if not path.name.endswith(".lock")] == []


def test_a_line_without_an_end_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(criteo_text, "CHUNK", 1 << 10)
    with pytest.raises(DataMissing, match="a line of more than 1,024 bytes"):
        put(["x" * 10_000])


def test_gzip_that_is_cut_or_broken_is_refused():
    put(many(300), "rows.gz")
    whole = Path("criteo/rows.gz").read_bytes()
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 255
    for content in (whole[: len(whole) // 2], whole[:-4], whole[:5], bytes(broken), whole + b"rubbish"):
        Path("criteo/rows.gz").write_bytes(content)
        with pytest.raises(DataMissing, match=r"rows\.gz is broken: it cannot be unpacked to its end"):
            load("rows.gz")


def test_files_that_are_not_there_or_there_twice():
    with pytest.raises(DataMissing, match=r"no Criteo rows in nowhere; put criteo/dac_sample_80k\.tsv there"):
        load_criteo(Path("nowhere"))
    put(many())
    with pytest.raises(DataMissing, match="put criteo/b there"):
        load("rows.tsv", "b")
    with pytest.raises(DataMissing, match="/no/such does not exist"):
        load("/no/such")
    for files in ([], "rows.tsv", Path("rows.tsv")):
        with pytest.raises(UsageError, match="files must be a list"):
            find_criteo(Path(), files)
    os.symlink("rows.tsv", "criteo/link")
    for twice in (("rows.tsv", "rows.tsv"), ("rows.tsv", "link"), ("rows.tsv", Path("criteo/rows.tsv").resolve())):
        with pytest.raises(UsageError, match="hold the same rows"):
            load(*twice)
    shutil.copy("criteo/rows.tsv", "criteo/copy")
    with pytest.raises(UsageError, match=r"copy and rows\.tsv hold the same rows"):
        load("rows.tsv", "copy")


# ---------------------------------------------------------------- the cache of conversions


def never(*_, **__):
    raise AssertionError("converted again")


def test_it_is_converted_once_and_again_only_where_content_changes(monkeypatch):
    path = Path("criteo/rows.tsv")
    first = put(many())
    with monkeypatch.context() as patch:
        patch.setattr(criteo, "convert", never)
        assert everything(load()) == everything(first)
        os.utime(path, (1e9, 1e9))
        assert everything(load()) == everything(first), "touched, but the same"
        assert json.loads((first.folder / "facts.json").read_text())["sources"][0]["mtime_ns"] == 10**18
        patch.setattr(criteo, "digest", never)
        assert everything(load()) == everything(first), "of a file with the same time no byte is read"
    path.write_text(path.read_text().replace("\t49\t", "\t48\t"))  # the same size
    second = load()
    assert second.folder == first.folder
    assert everything(second) != everything(first), "the first still has its own"
    path.write_text("\n".join(many(70)))
    assert sum(load().facts["rows"].values()) == 70


def test_a_converted_form_that_is_not_whole_is_made_again():
    first = put(many())
    wanted = everything(first)
    for spoil in (
        lambda: (first.folder / "facts.json").write_text("{"),
        lambda: (first.folder / "facts.json").write_text("[]"),
        lambda: (first.folder / "facts.json").unlink(),
        lambda: (first.folder / "train-dense.npy").unlink(),
        lambda: (first.folder / "test-categories.npy").write_bytes(b"short"),
        lambda: shutil.rmtree(first.folder),
    ):
        spoil()
        assert everything(load()) == wanted
    labels = first.folder / "train-labels.npy"
    content = bytearray(labels.read_bytes())
    content[-1] ^= 1
    labels.write_bytes(content)
    (wrong,) = verify(first.folder)
    assert "train-labels.npy has the SHA256" in wrong


def test_where_the_folder_cannot_be_written_the_cache_is_taken(tmp_path, monkeypatch):
    Path("criteo").mkdir()
    Path("criteo/.sngm").write_text("")  # so that not even root can create a folder here
    found = put(many())
    assert found.folder.is_relative_to(tmp_path / "home" / ".cache" / "sngm")
    monkeypatch.setattr(criteo, "convert", never)
    assert load().folder == found.folder
    shutil.copytree("criteo", "other/criteo")
    with pytest.raises(AssertionError, match="again"):
        load_criteo(Path("other"), ["rows.tsv"], **quiet)  # same name, other folder
    monkeypatch.setattr(conversion, "writable", lambda place, key: False)
    assert load().folder == found.folder, "what another user made will do"
    shutil.rmtree(tmp_path / "home")
    with pytest.raises(Failed, match=r"neither .* is writable"):
        load()


def test_a_full_disk_leaves_nothing(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(criteo_convert, "_encode", full)
    with pytest.raises(Failed, match=r"no space left for .*500 bytes per row"):
        put(many())
    assert [path for path in Path("criteo/.sngm").iterdir() if path.is_dir()] == []


def test_a_file_that_grows_while_it_is_read_is_refused(monkeypatch):
    def slow(text):
        if Path("criteo/rows.tsv").stat().st_size == len(text):
            with open("criteo/rows.tsv", "a") as file:
                file.write(row() + "\n")
        return parse(text)

    monkeypatch.setattr(criteo_convert, "parse", slow)
    with pytest.raises(Failed, match="changed while it was read"):
        put(many())


SLOWLY = """
import time
from pathlib import Path
from sngm.data import criteo_convert
from sngm.data.criteo import load_criteo
fit = criteo_convert._fit
def slow(*args):
    print("fitting", flush=True)
    while not Path("go").exists():
        time.sleep(0.01)
    return fit(*args)
criteo_convert._fit = slow
found = load_criteo(Path(), ["rows.tsv"])
print(len(found.train), found.folder.stat().st_ino)
"""


@pytest.mark.slow
def test_of_two_processes_one_converts_and_a_killed_one_leaves_nothing_half_made():
    Path("criteo").mkdir()
    Path("criteo/rows.tsv").write_text("\n".join(many(60)))
    doomed = launch([sys.executable, "-c", SLOWLY])
    assert next_line(doomed.stdout) == "fitting\n"
    doomed.send_signal(signal.SIGKILL)
    doomed.communicate()
    (left,) = (path for path in Path("criteo/.sngm").iterdir() if path.is_dir())
    assert left.name.endswith(".part")
    first = launch([sys.executable, "-c", SLOWLY])
    assert next_line(first.stdout) == "fitting\n"
    second = launch([sys.executable, "-c", SLOWLY])
    assert "another process is converting" in next_line(second.stderr)
    Path("go").touch()
    shown = [finish(process) for process in (first, second)]
    assert [result.code for result in shown] == [0, 0], shown
    assert shown[0].out == shown[1].out, "the same folder, and only the first has fitted"
    assert ["converted 60 rows" in result.err for result in shown] == [True, False]
    (made,) = (path for path in Path("criteo/.sngm").iterdir() if path.is_dir())
    assert made.suffix == ""
    assert not [path.name for path in made.iterdir() if path.name.startswith("raw")]


def test_progress_goes_to_stderr_and_not_too_often(monkeypatch, capsys):
    monkeypatch.setattr(conversion, "INTERVAL", 0.0)
    lines = []
    put(many())
    Path("criteo/b").write_text("\n".join(many(99)) + "\n")
    load("b", show=lines.append)
    assert lines[0].startswith("converting 1 file of Criteo's rows once, into ")
    assert lines[1:-1] == ["100% read, 99 rows", "100% fitted", "100% written"]
    assert lines[-1].startswith("converted 99 rows with 88 categories in ")  # 63 of C1 and one of each other field
    Path("criteo/c").write_text("\n".join(many(98)))
    load_criteo(Path(), ["c"])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "sngm: criteo: converted 98 rows" in shown.err


# ---------------------------------------------------------------- samples


def test_rows_are_samples_that_move_and_pickle_as_their_folder():
    found = put(many(1000))
    train = found.train
    indices = torch.tensor([5, 0, 5])
    dense, categories, labels = train[indices]
    assert (dense.dtype, categories.dtype, labels.dtype) == (torch.float32, torch.int32, torch.float32)
    assert (dense.shape, categories.shape, labels.shape) == ((3, 13), (3, 26), (3,))
    assert torch.equal(dense[0], train.tensors[0][5])
    held, rows = train.rows(indices)
    assert all(map(torch.equal, (t[rows] for t in held), train[indices]))
    sent = pickle.dumps(train)
    assert len(sent) < 1000
    moved, copied = train.to("cpu"), pickle.loads(sent)
    for other in (moved, copied, pickle.loads(pickle.dumps(moved))):
        assert len(other) == len(train) == 640
        assert all(map(torch.equal, other.tensors, train.tensors))
        assert other.device == torch.device("cpu")
    moved.tensors[0].zero_()
    copied.tensors[0].zero_()
    assert train.tensors[0].any(), "neither writes into the mapped file"
    assert verify(found.folder) == []


# ---------------------------------------------------------------- synthetic rows


def test_made_up_rows_are_a_function_of_seed_and_number():
    made = CriteoLike(3000, seed=1)
    whole = made.text(0, 3000)
    assert whole == b"".join(made.text(at, at + 700) for at in range(0, 3000, 700))
    assert whole != CriteoLike(3000, seed=2).text(0, 3000)
    assert whole.count(b"\n") == 3000
    assert hashlib.sha256(whole).hexdigest()[:16] == "46b3f3ad4d0fdad1", "what it was when this was written"


def test_the_text_of_made_up_rows_says_what_they_are():
    made = CriteoLike(5000, sizes=cardinalities(20_000), missing=0.2)
    truth, found = made.block(0, 5000), parse(made.text(0, 5000))
    assert not found.verdicts.any()
    integers, keys = found.rows["integers"], found.rows["keys"]
    assert (found.rows["label"] == truth.labels).all()
    assert (integers == np.where(truth.missing[:, :13], 0, truth.integers)).all()
    assert (found.missing == truth.missing.sum(0)).all()
    assert ((keys == 0) == truth.missing[:, 13:]).all()
    for field in range(26):
        there = ~truth.missing[:, 13 + field]
        pairs = set(zip(truth.categories[there, field].tolist(), keys[there, field].tolist(), strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    assert integers[:, 1].min() == -2
    assert abs(truth.missing.mean() - 0.2) < 0.01


def test_the_truth_of_made_up_rows_is_logistic():
    truth = CriteoLike(50_000).block(0, 50_000)
    chance = 1 / (1 + np.exp(-truth.logits))
    for low in np.arange(0, 1, 0.1):
        some = (chance >= low) & (chance < low + 0.1)
        assert abs(truth.labels[some].mean() - chance[some].mean()) < 4 * 0.5 / np.sqrt(some.sum())
    assert 0.7 < roc_auc_score(truth.labels, truth.logits) < 0.85
    flat = CriteoLike(10_000, strength=0).block(0, 10_000)
    assert np.ptp(flat.logits) == 0


@pytest.mark.parametrize(
    "wrong", [{"rows": 0}, {"sizes": [3] * 25}, {"sizes": [0] * 26}, {"sizes": [2**33] * 26}, {"missing": 1.0}]
)
def test_made_up_rows_refuse_what_cannot_be(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
        CriteoLike(**({"rows": 5} | wrong))


def test_made_up_files_and_what_they_convert_to(monkeypatch):
    monkeypatch.setattr("criteo_synthetic.BLOCK", 300)
    Path("criteo").mkdir()
    made = CriteoLike(1000, sizes=cardinalities(300), missing=0.05)
    made.write(Path("criteo/all"))
    made.write(Path("criteo/a.gz"), 0, 400)
    made.write(Path("criteo/b.gz"), 400)
    assert everything(load("all")) == everything(load("a.gz", "b.gz"))
    with pytest.raises(FileExistsError):
        made.write(Path("criteo/all"))
    assert sorted(path.name for path in Path("criteo").iterdir()) == [".sngm", "a.gz", "all", "b.gz"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_million_rows_convert_at_two_million_a_minute_in_bounded_memory():
    Path("criteo").mkdir()
    CriteoLike(1_000_000, sizes=cardinalities(1_000_000)).write(Path("criteo/rows.tsv"))
    code = (
        "import re, time; from pathlib import Path; from sngm.data.criteo import load_criteo\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) / 1e3\n"
        "a, t = peak(), time.process_time(); found = load_criteo(Path(), ['rows.tsv'])\n"
        "print(time.process_time() - t, peak() - a, sum(found.field_sizes))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, megabytes, distinct = map(float, done.stdout.split())
    assert seconds < 30
    assert megabytes < 400
    assert distinct > 800_000


# ---------------------------------------------------------------- DeepFM


SIZES = [5, 2, 9, 3]
KINDS = ("weight", "bias")


def batch(count=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(count, 3, generator=generator, dtype=dtype)
    categories = torch.stack([torch.randint(size, (count,), generator=generator) for size in SIZES], 1)
    return dense, categories.int(), torch.randint(2, (count,), generator=generator).to(dtype)


def net(**options):
    torch.manual_seed(0)
    return DeepFM(SIZES, 3, **({"hidden": (6, 5), "init_std": 0.5} | options)).double()


def test_fm_is_the_sum_over_all_pairs():
    embeddings = torch.randn(6, 26, 4, dtype=torch.float64)
    wanted = torch.zeros(6, dtype=torch.float64)
    for i in range(26):
        for j in range(i):
            wanted += (embeddings[:, i] * embeddings[:, j]).sum(1)
    torch.testing.assert_close(fm(embeddings), wanted, rtol=1e-12, atol=1e-12)


def plain(weights, dense, categories):
    """Compute DeepFM by its formula, sample by sample, from a state dict."""
    logits = []
    for numbers, ids in zip(dense, categories.tolist(), strict=True):
        rows = [weights[f"embeddings.{field}"][number] for field, number in enumerate(ids)]
        logit = weights["bias"][0] + weights["linear.weight"][0] @ numbers
        logit = logit + sum(weights[f"weights.{field}"][number, 0] for field, number in enumerate(ids))
        logit = logit + sum(rows[i] @ rows[j] for i in range(4) for j in range(i))
        layer = torch.cat([*rows, numbers])
        for number in (0, 2):
            layer = (weights[f"dnn.{number}.weight"] @ layer + weights[f"dnn.{number}.bias"]).clamp(min=0)
        logits.append(logit + weights["head.weight"][0] @ layer)
    return torch.stack(logits)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_deepfm_is_the_sum_of_its_three_parts_sample_by_sample(compiled):
    model = net()
    weights = {name: value.clone().requires_grad_() for name, value in model.state_dict().items()}
    dense, categories, labels = batch()
    wanted = plain(weights, dense, categories)
    binary_cross_entropy_with_logits(wanted, labels).backward()
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for ids in (categories, categories.long()):
        model.zero_grad()
        found = forward(dense, ids)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        binary_cross_entropy_with_logits(found, labels).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-12, atol=1e-12)


def test_every_field_has_layers_of_its_own_as_in_deepctr_torch():
    shapes = {name: tuple(value.shape) for name, value in net().named_parameters()}
    for field, size in enumerate(SIZES):
        assert shapes.pop(f"embeddings.{field}") == (size, 4)
        assert shapes.pop(f"weights.{field}") == (size, 1)
    assert set(shapes) == {"linear.weight", "head.weight", "bias", *(f"dnn.{i}.{k}" for i in (0, 2) for k in KINDS)}


def test_gradients_are_dense_parts_of_one_tensor():
    model = net()
    dense, categories, _ = batch(1)
    model(dense, categories).sum().backward()
    for tables in (model.embeddings, model.weights):
        assert len({table.grad.untyped_storage().data_ptr() for table in tables}) == 1  # gradients share memory
        for table, number in zip(tables, categories[0].tolist(), strict=True):
            assert table.grad.is_contiguous()
            assert table.grad.any(1).nonzero().flatten().tolist() == [number]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("deterministic", [False, True])
def test_lookups_on_a_gpu_are_those_of_the_cpu(deterministic):
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(size, 4, generator=generator) for size in (3, 1000)]
    rows = torch.randint(1003, (2000, 26), generator=generator, dtype=torch.int32)
    rows[:, 0] = 1  # a row that many samples add to
    grad = torch.randn(2000, 26, 4, generator=generator)
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = []
        for device in ("cpu", "cuda", "cuda"):
            leaves = [table.clone().to(device).requires_grad_() for table in tables]
            looked = look_up(leaves, rows.to(device))
            looked.backward(grad.to(device))
            found.append([looked.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    finally:
        torch.use_deterministic_algorithms(False)
    for on_cpu, once, again in zip(*found, strict=True):
        torch.testing.assert_close(once, on_cpu, rtol=1e-4, atol=1e-4)
        assert torch.equal(once, again) or not deterministic


def test_deepfm_begins_as_deepctr_torch_does():
    model = DeepFM([1000] * 26)
    for weight in (*model.embeddings, *model.weights, model.linear.weight, model.dnn[0].weight, model.dnn[2].weight):
        assert weight.std().item() == pytest.approx(1e-4, rel=0.5 if weight.numel() < 100 else 0.1)
    assert not torch.equal(model.embeddings[0], model.embeddings[1])
    assert [tuple(layer.weight.shape) for layer in (model.dnn[0], model.dnn[2], model.head)] == [
        (256, 117), (128, 256), (1, 128),
    ]  # fmt: skip
    assert model.head.weight.abs().max() > 0.05
    assert model.dnn[0].bias.abs().max() > 0.05
    assert model.bias.tolist() == [0]
    assert "offsets" not in model.state_dict()


def test_deepfm_learns_the_truth_of_made_up_rows():
    Path("criteo").mkdir()
    made = CriteoLike(6000, sizes=[4] * 26, missing=0.05)
    made.write(Path("criteo/rows.tsv"))
    truth = made.block(0, 6000)
    best = roc_auc_score(truth.labels, truth.logits)
    found = load()
    torch.manual_seed(0)
    model = DeepFM(found.field_sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    train = found.train.to("cpu")
    for _ in range(2):
        for indices in torch.randperm(len(train)).split(256):
            dense, categories, labels = train[indices]
            loss = binary_cross_entropy_with_logits(model(dense, categories), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dense, categories, labels = found.test.tensors
    with torch.no_grad():
        assert auc(model(dense, categories), labels) > best - 0.04 > 0.7


# ---------------------------------------------------------------- scores


def agree(scores, labels):
    found = auc(torch.as_tensor(scores), torch.as_tensor(labels))
    assert found.dtype == torch.float64
    assert found.shape == ()
    assert found.item() == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


@pytest.mark.parametrize("values", [2, 10, 10**9])
@pytest.mark.parametrize("count", [2, 3, 1000])
def test_auc_is_scikit_learns_with_many_ties_and_few(values, count):
    rng = np.random.default_rng(values + count)
    for share in (0.02, 0.5, 0.9):
        labels = (rng.random(count) < share).astype(np.int64)
        labels[:2] = 0, 1
        agree(rng.integers(0, values, count) / values, labels)
        agree(rng.integers(0, values, count).astype(np.float32) - values / 2, labels)


def test_auc_at_its_ends():
    labels = np.array([0, 1, 0, 1, 1])
    agree(np.zeros(5), labels)
    agree(np.array([0.0, -0.0, 0.0, 1e-300, 5e-324]), labels)
    agree(labels.astype(float), labels)
    assert auc(torch.ones(4), torch.tensor([0, 1, 1, 0])) == 0.5
    assert auc(torch.tensor([3.0, 1.0]), torch.tensor([0, 1])) == 0
    assert auc(torch.tensor([torch.inf, -torch.inf]), torch.tensor([1.0, 0.0])) == 1
    assert auc(torch.tensor([1, 2]), torch.tensor([False, True])) == 1


def test_auc_that_is_not_defined_is_nan():
    for scores, labels in (
        (torch.rand(5), torch.zeros(5)),
        (torch.rand(5), torch.ones(5)),
        (torch.rand(0), torch.ones(0)),
        (torch.rand(1), torch.ones(1)),
        (torch.tensor([0.1, torch.nan, 0.3]), torch.tensor([0, 1, 1])),
    ):
        assert auc(scores, labels).isnan()
    for labels in (torch.ones(4), torch.ones(5, 1)):
        with pytest.raises(ValueError, match="same shape"):
            auc(torch.rand(5), labels)
    with pytest.raises(ValueError, match="same shape"):
        log_loss(torch.rand(5, 1), torch.rand(5, 1))


def test_auc_of_many_scores_does_not_depend_on_their_order():
    rng = np.random.default_rng(0)
    labels = rng.random(100_000) < 0.03
    for scores in (rng.standard_normal(100_000) + labels, np.round(rng.standard_normal(100_000) + labels, 1)):
        agree(scores, labels)
    order = torch.randperm(100_000)
    a = torch.from_numpy(scores)
    assert auc(a, torch.from_numpy(labels)) == auc(a[order], torch.from_numpy(labels)[order]), "to the last bit"


def test_log_loss_is_scikit_learns_and_finite_for_large_logits():
    rng = np.random.default_rng(0)
    logits, labels = 3 * rng.standard_normal(1000), rng.integers(0, 2, 1000)
    found = log_loss(torch.from_numpy(logits), torch.from_numpy(labels))
    assert found.item() == pytest.approx(sklearn_log_loss(labels, 1 / (1 + np.exp(-logits))), rel=1e-12)
    assert found.dtype == torch.float64
    assert log_loss(torch.tensor([-200.0]), torch.tensor([1])).item() == 200
    assert log_loss(torch.rand(0), torch.rand(0)).isnan()
