"""Datasets: download over HTTP, reading and checking of files; and the hash behind random augmentation."""

import dataclasses
import errno
import functools
import gzip
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from console import Result, finish, refused, sngm, start, until
from criteo_synthetic import CriteoLike
from waiting import PATIENCE, launch, next_line

from sngm import tasks
from sngm.cli import data as cli_data
from sngm.data import check, cifar, conversion, data_dirs, fetch, imagenet, wikitext
from sngm.data.cifar import find_cifar, load_cifar
from sngm.data.fetch import Archive
from sngm.data.hashing import random_bits as bits
from sngm.data.imagenet import ImageFolder, crop_box
from sngm.errors import DataMissing, Failed, UsageError

small = pytest.mark.filterwarnings("ignore:.*does not hold the official records")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Run in an empty folder with its own home, so that no dataset of the user is found."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("SNGM_DATA", "SNGM_MIRRORS", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(fetch, "BACKOFF", 0.01)
    return here


# ---------------------------------------------------------------- the hash


def test_the_hash_of_one_value_is_splitmix64():
    of_zero, of_golden = 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4  # the first two numbers of the published stream
    assert bits(0) == of_zero & (2**62 - 1)
    # the second comes from the state 2 * constant, so from the constant before the addition
    assert bits(0x9E3779B97F4A7C15) == of_golden & (2**62 - 1)


def test_the_hash_stays_as_it_is():
    assert [bits(0, 3, 17), bits(1), bits(1, 0), bits(2**40, 5, 123456789), bits(-7)] == [
        2164258931680428043, 1227844342346046657, 2180211747422036254, 666804615007702216, 3179005205878548848,
    ]  # fmt: skip


EDGES = [0, 1, -1, 17, 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63)]


def test_the_hash_of_tensors_is_that_of_ints():
    samples = torch.tensor(EDGES)
    for seed in EDGES:
        for epoch in (0, 3, 2**40):
            wanted = [bits(seed, epoch, sample) for sample in EDGES]
            assert bits(seed, epoch, samples).tolist() == wanted
            assert bits(torch.tensor(seed), torch.tensor(epoch), samples).tolist() == wanted
            assert bits(torch.tensor(seed), epoch, samples, 5).tolist() == [bits(seed, epoch, s, 5) for s in EDGES]
            assert all(0 <= value < 2**62 for value in wanted)
    assert bits(3, samples.int()[:4]).tolist() == [bits(3, s) for s in EDGES[:4]]
    assert bits(2**64 + 3) == bits(3)
    assert bits(torch.tensor([1])).dtype == torch.int64


def test_order_and_number_of_values_count():
    values = [
        bits(0),
        bits(0, 0),
        bits(0, 0, 0),
        bits(1, 0),
        bits(0, 1),
        bits(1, 2, 3),
        bits(3, 2, 1),
        bits(2, 1, 3),
    ]
    assert len(set(values)) == len(values)
    with pytest.raises(ValueError, match="at least one"):
        bits()


def test_every_bit_of_every_value_turns_half_of_the_result():
    samples = torch.arange(2000)
    for which in range(3):
        for bit in (0, 1, 7, 20, 40, 62):
            flips = [0, 0, 0]
            flips[which] = 1 << bit
            before = bits(5, 6, samples)
            after = bits(5 ^ flips[0], 6 ^ flips[1], samples ^ flips[2])
            differ = before ^ after
            shares = torch.stack([(differ >> b & 1).double().mean() for b in range(62)])
            assert shares.min() > 0.44, (which, bit)  # 5 standard deviations of 2,000 fair coin tosses
            assert shares.max() < 0.56, (which, bit)


def test_neighbouring_samples_are_spread_evenly():
    parts = torch.bincount(bits(0, 0, torch.arange(100_000)) >> 58, minlength=16)
    assert ((parts - 6250).abs() < 400).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script.*is deprecated:DeprecationWarning")  # from inductor's imports
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
def test_the_hash_compiles():
    compiled = torch.compile(lambda seed, epoch, samples: bits(seed, epoch, samples, 2), fullgraph=True)
    samples = torch.arange(-500, 500) * 2**50
    for seed, epoch in ((0, 0), (-3, 7)):
        found = compiled(torch.tensor(seed), torch.tensor(epoch), samples)
        assert found.tolist() == [bits(seed, epoch, sample, 2) for sample in samples.tolist()]


# ---------------------------------------------------------------- CIFAR: small files of both formats


def records(count, classes, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), labels, rng.integers(0, 20, count)


def short(text):
    return b"U" + bytes([len(text)]) + text


def python_2(pixels, labels, key):
    """Return a pickle in the format in which Python 2 and its NumPy wrote the official files."""
    rows = b"M" + struct.pack("<H", len(pixels))
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R"
        b"(K\x01" + rows + b"M\x00\x0c\x86cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03" + short(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<I", pixels.nbytes) + pixels.tobytes()
        + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(key.encode()) + numbers + b"u."


def python_3(pixels, labels, key, protocol=2):
    return pickle.dumps({b"data": pixels, key.encode(): labels.tolist(), b"batch_label": b"small"}, protocol=protocol)


def make(root, classes=10, form="binary", count=12, write=python_2):
    """Write a small dataset with the same records in either format."""
    layout = next(one for one in cifar.layouts(classes) if one.form == form)
    folder = Path(root, layout.folder)
    folder.mkdir(parents=True)
    for number, name in enumerate(layout.files):
        pixels, labels, coarse = records(count + number, classes, number)
        if form == "binary":
            heads = [labels[:, None]] if classes == 10 else [coarse[:, None], labels[:, None]]
            (folder / name).write_bytes(np.concatenate([*heads, pixels], axis=1).astype(np.uint8).tobytes())
        else:
            (folder / name).write_bytes(write(pixels, labels, "labels" if classes == 10 else "fine_labels"))
    return folder


@small
@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("write", [python_2, python_3, lambda *a: python_3(*a, protocol=4)])
def test_both_forms_give_the_same_tensors(classes, write):
    make("a", classes, "binary")
    make("b", classes, "python", write=write)
    both = [load_cifar(Path(root), classes) for root in "ab"]
    for (images, labels), (same_images, same_labels), files in zip(*both, (range(5), range(5, 6)), strict=True):
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert images.shape[1:] == (3, 32, 32)
        assert images.is_contiguous()
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)
        if classes == 10:
            known = [records(12 + number, 10, number) for number in files]
            assert labels.tolist() == np.concatenate([one[1] for one in known]).tolist()
            assert torch.equal(images[0, 2, 31], torch.from_numpy(known[0][0][0, -32:]))


def test_counts_that_are_not_official_are_warned_of_by_file():
    make("data")
    with pytest.warns(UserWarning, match=r"-bin does not.*data_batch_1\.bin 12, not 10,000; .*test_batch\.bin 17, not"):
        load_cifar(Path("data"))


REAL = Path(__file__).parents[1] / ".data"


@pytest.mark.skipif(not (REAL / "cifar-10-batches-bin").is_dir(), reason="needs CIFAR-10 in .data")
def test_the_real_cifar_loads_fast_and_passes_its_check():
    seconds = []
    for _ in range(3):
        before = time.process_time()
        (images, labels), (tested, _) = load_cifar(REAL)
        seconds.append(time.process_time() - before)
    assert min(seconds) < 1
    assert (len(images), len(tested)) == (50_000, 10_000)
    assert labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    means = images.float().mean((0, 2, 3)) / 255
    assert torch.allclose(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=5e-5)
    shown = sngm(f"data check cifar10 --data-dir {REAL}")
    assert (shown.code, shown.err) == (0, "")
    assert "60,000 images, each class equally often, SHA256 checksums as published" in shown.out


# ---------------------------------------------------------------- CIFAR: invalid files


@pytest.mark.parametrize("classes", [10, 100])
def test_a_dataset_that_is_not_there_says_what_to_run(classes):
    with pytest.raises(DataMissing, match=f"no CIFAR-{classes} in pets; run 'sngm data get cifar{classes} --data-dir"):
        load_cifar(Path("pets"), classes)
    with pytest.raises(DataMissing, match=r"in \.data and .*/home/\.cache/sngm; .*`data_dir` or SNGM_DATA"):
        load_cifar(None, classes)
    with pytest.raises(UsageError, match="CIFAR-10 or CIFAR-100"):
        load_cifar(None, 11)


@pytest.mark.parametrize("size", [0, 1, 14 * 3073 - 1, 14 * 3073 + 1, 15 * 3073 - 1])
def test_a_file_that_ends_within_a_record_is_named(size):
    path = make("data") / "data_batch_3.bin"
    path.write_bytes((path.read_bytes() + bytes(3073))[:size])
    with pytest.raises(DataMissing, match=rf"data_batch_3\.bin is broken: it has {size:,} bytes, .* 30,730,000"):
        load_cifar(Path("data"))


def test_a_label_out_of_range_is_named_with_its_record():
    for root, form in (("a", "binary"), ("b", "python")):
        path = make(root, 10, form) / ("test_batch.bin" if form == "binary" else "test_batch")
        pixels, labels, _ = records(17, 10, 5)
        labels[4] = 10
        rows = np.concatenate([labels[:, None], pixels], axis=1).astype(np.uint8)
        path.write_bytes(rows.tobytes() if form == "binary" else python_2(pixels, labels, "labels"))
        with pytest.raises(DataMissing, match=rf"{path.name} is broken: record 4 has the label 10, not one of 0 to 9"):
            load_cifar(Path(root))
    path = make("c", 100) / "train.bin"
    content = bytearray(path.read_bytes())
    content[3074 * 2] = 20
    path.write_bytes(content)
    with pytest.raises(DataMissing, match=r"train\.bin is broken: record 2 has the coarse label 20"):
        load_cifar(Path("c"), 100)


def test_missing_batches_are_named_and_another_whole_form_is_taken():
    folder = make("data")
    for number in (2, 5):
        (folder / f"data_batch_{number}.bin").unlink()
    with pytest.raises(DataMissing, match=r"cifar-10-batches-bin lacks data_batch_2\.bin, data_batch_5\.bin;"):
        load_cifar(Path("data"))
    make("data", form="python")
    assert find_cifar(Path("data"))[0].form == "python"


class Evil:
    def __reduce__(self):
        return os.mkdir, ("hacked",)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (pickle.dumps({"data": Evil(), "labels": []}, protocol=2), r"posix\.mkdir"),
        (b"cos\nmkdir\n(S'hacked'\ntR.", r"os\.mkdir"),
        (b"cbuiltins\neval\n(S'1'\ntR.", r"builtins\.eval"),
        (b"cnumpy\nload\n(S'1'\ntR.", r"numpy\.load"),
        (b"c_codecs\nencode\n(S'a'\nS'rot13'\ntR.", "rot13"),
        (pickle.dumps([1, 2]), "holds a list"),
        (pickle.dumps({"data": np.zeros((2, 5), np.uint8), "labels": [0, 0]}, protocol=2), "rows of 3072 bytes"),
        (pickle.dumps({"data": np.zeros((2, 3072)), "labels": [0, 0]}, protocol=2), "not one of bytes, row by row"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, protocol=2), "as many whole numbers"),
        (pickle.dumps({"labels": [0]}, protocol=2), "rows of 3072 bytes"),
        (python_2(*records(4, 10, 0)[:2], "labels")[:-900], r"truncated\); it has 1\d,\d\d\d bytes, .* 30,720,000"),
        (b"", "it has 0 bytes"),
        (b"\x00\xff" * 99, "cannot be read as a pickle"),
    ],
)
def test_a_pickle_that_is_no_batch_is_refused_and_not_run(content, word):
    (make("data", form="python") / "data_batch_2").write_bytes(content)
    with pytest.raises(DataMissing, match=f"data_batch_2 is broken: .*{word}"):
        load_cifar(Path("data"))
    assert not Path("hacked").exists()


class Forged:
    """An object that is pickled as the given call, arguments and state."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


RECONSTRUCT = np.empty(0).__reduce__()[0]
BYTES = Forged(np.dtype, ("u1", False, True), (3, "|", None, None, None, -1, -1, 0))
OBJECTS = Forged(np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0))  # without the object flag
GOOD = (1, (2, 3072), BYTES, False, bytes(6144))


def batch_of(*state, labels=(0, 0)):
    array = Forged(RECONSTRUCT, (np.ndarray, (0,), b"b"), *state)
    return pickle.dumps({"data": array, "labels": list(labels)}, protocol=2)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_pickle_that_forges_pointers_is_refused_and_does_not_crash():
    """Unpickling would create an object array with an address from the file, and read it: run in a separate process."""
    pointer = Forged(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, (1,), OBJECTS, False, b"A" * 8))
    read = Forged(RECONSTRUCT, (np.ndarray, (1,), b"b"), None, None, iter([([0], pointer)]))
    (make("data", form="python") / "data_batch_1").write_bytes(pickle.dumps(read, protocol=2))
    child = multiprocessing.get_context("fork").Process(target=load_into, args=(Path("error.txt"),))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert "data_batch_1 is broken: it cannot be read as a pickle" in Path("error.txt").read_text()


def load_into(path):
    try:
        load_cifar(Path("data"))
    except DataMissing as error:
        path.write_text(str(error))


@small
def test_a_state_written_out_by_hand_is_read():
    (make("data", form="python") / "test_batch").write_bytes(batch_of(GOOD))
    assert load_cifar(Path("data"))[1][0].shape == (2, 3, 32, 32)


@pytest.mark.parametrize(
    "content",
    [
        batch_of(),
        *(batch_of(state) for state in ((), GOOD[:4], (*GOOD, 1), None, 5, {"array": 1}, {"arguments": 1})),
        *(batch_of((*GOOD[:1], shape, *GOOD[2:]))
          for shape in (None, (), (2,), (3, 3072), (-1, -1), (2, 3072.0), ("2", 3072), 2**70, (2**70,), [BYTES])),
        *(batch_of((*GOOD[:2], kind, *GOOD[3:]))
          for kind in (None, "u1", OBJECTS, np.dtype("i1"), np.ndarray, Forged(np.dtype, ()))),
        *(batch_of((*GOOD[:3], by_column, GOOD[4])) for by_column in (True, 1, "yes")),
        *(batch_of((*GOOD[:4], raw)) for raw in (None, b"", bytes(6143), "\u20ac" * 6144, [0] * 6144, bytearray(6144))),
        batch_of(GOOD, iter([1])),
        batch_of(GOOD, None, iter([(0, 1)])),
        batch_of(GOOD, labels=(2**70, 0)),
        batch_of(GOOD, labels=(0, -(10**5000))),
        pickle.dumps({"data": Forged(np.ndarray, ((2, 3072), "O")), "labels": [0, 0]}, protocol=2),
        b"cnumpy\nndarray\n(tb.",
        b"cnumpy\nndarray\n)\x81(tb.",
        b"\x80\x04\x8c\x05os\n\n\n\x8c\x05a\nb\nc\x93.",
    ],
)  # fmt: skip
def test_an_array_that_is_not_plain_bytes_is_refused_in_one_line(content):
    (make("data", form="python") / "data_batch_1").write_bytes(content)
    with pytest.raises(DataMissing, match=r"data_batch_1 is broken: .* delete data/cifar-10-batches-py") as refusal:
        load_cifar(Path("data"))
    assert "\n" not in str(refusal.value)


# ---------------------------------------------------------------- data folders


def test_a_command_that_is_suggested_can_be_pasted():
    with pytest.raises(DataMissing, match="get cifar10 --data-dir 'my data; ls''"):
        load_cifar(Path("my data; ls"))
    (make("my data", form="python") / "data_batch_1").write_bytes(b"")
    with pytest.raises(DataMissing, match="--form python --data-dir 'my data''"):
        load_cifar(Path("my data"))


def test_a_folder_named_before_the_verb_goes_over_the_environment(monkeypatch):
    monkeypatch.setenv("SNGM_DATA", "a")
    for line, folder in (
        ("--data-dir b check cifar10", "b"),
        ("check cifar10 --data-dir c", "c"),
        ("--data-dir b check cifar10 --data-dir c", "c"),
        ("check cifar10", "a"),
    ):
        refused(sngm(f"data {line}"), f"no CIFAR-10 in {folder};", code=3)


@small
def test_the_folder_chosen_comes_first_then_the_environment_then_the_usual_places(monkeypatch, tmp_path):
    home = tmp_path / "home" / ".cache" / "sngm"
    assert data_dirs.data_root() == home, "where nothing exists, new data is shared by all folders"
    make(home)
    assert find_cifar(None)[1] == home / "cifar-10-batches-bin"
    make(".data/other")
    assert find_cifar(None)[1] == home / "cifar-10-batches-bin", ".data has other datasets"
    assert data_dirs.data_root() == Path(".data")
    make(".data")
    assert find_cifar(None)[1] == Path(".data/cifar-10-batches-bin")
    make("env")
    monkeypatch.setenv("SNGM_DATA", "env")
    assert find_cifar(None)[1] == Path("env/cifar-10-batches-bin")
    with pytest.raises(DataMissing, match="no CIFAR-10 in elsewhere"):
        find_cifar(Path("elsewhere"))


# ---------------------------------------------------------------- downloads


class Server(ThreadingHTTPServer):
    """A server for `files`; the attributes simulate faults."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}
        self.cuts = []  # for each coming request, the bytes after which its connection ends
        self.codes = []  # for each coming request, an HTTP error code
        self.ranges = "honoured"  # or "ignored", "wrong", "short"
        self.claimed = None  # size of files in the headers; 0: no size
        self.pause = 0.0  # seconds between pieces
        self.gate = threading.Event()  # no content is sent until it is set
        self.gate.set()
        self.asked = []  # (path, Range)

    @property
    def base(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server, span = self.server, self.headers.get("Range")
        server.asked.append((self.path, span))
        content = server.files.get(self.path.lstrip("/"))
        code = server.codes.pop(0) if server.codes else None
        if code or content is None:
            self.send_error(code or 404)
            return
        start = int(span[len("bytes=") : -1]) if span and server.ranges != "ignored" else 0
        claimed = len(content) if server.claimed is None else server.claimed
        if start and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        end = min(len(content), start + 1000) if start and server.ranges == "short" else len(content)
        self.send_response(206 if start else 200)
        if start:
            first = start - 1 if server.ranges == "wrong" else start
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{claimed or '*'}")
        if claimed:
            self.send_header("Content-Length", str(end - start + claimed - len(content)))
        # before the headers: a client that rejects them sends a new request at once, which takes the next cut
        stop = min(end, start + server.cuts.pop(0)) if server.cuts else end
        self.end_headers()
        server.gate.wait(PATIENCE)
        try:
            for at in range(start, stop, 4096):
                self.wfile.write(content[at : min(at + 4096, stop)])
                self.wfile.flush()
                time.sleep(server.pause)
        except OSError:
            pass  # the client closed the connection
        self.close_connection = True


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def tarred(folder):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return content.getvalue()


NAME = "cifar-10-binary.tar.gz"
FILES = cifar.LAYOUTS[0].files


@pytest.fixture
def archive(server, tmp_path):
    """Put a small CIFAR-10 archive on the server, and return its description."""
    content = tarred(make(tmp_path / "published"))
    server.files[NAME] = content
    md5 = hashlib.md5(content).hexdigest()
    return Archive(NAME, md5, len(content), "cifar-10-batches-bin", FILES, server.base + "/")


def same_as_published(folder, tmp_path):
    published = tmp_path / "published" / "cifar-10-batches-bin"
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
    assert all((folder / name).read_bytes() == (published / name).read_bytes() for name in FILES)


def left_in(root):
    return sorted(p.name for p in Path(root).iterdir() if not p.name.endswith(".lock"))


@small
def test_an_archive_is_fetched_unpacked_and_not_fetched_again(server, archive, tmp_path):
    seen = []
    folder = fetch.get(archive, Path("new/data"), lambda done, total: seen.append((done, total)))
    same_as_published(folder, tmp_path)
    size = len(server.files[NAME])
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert left_in("new/data") == ["cifar-10-batches-bin"]
    assert load_cifar(Path("new/data"))[0][1].shape == (70,)
    assert fetch.get(archive, Path("new/data")) == folder
    assert server.asked == [(f"/{NAME}", None)]


def test_a_cut_connection_goes_on_where_it_was_cut(server, archive, tmp_path, capsys):
    server.cuts = [100_000, 50_000, 10]
    same_as_published(fetch.get(archive, Path("data")), tmp_path)
    assert [span for _, span in server.asked] == [None, "bytes=100000-", "bytes=150000-", "bytes=150010-"]
    assert (
        f"the connection ended at 100,000 of {len(server.files[NAME]):,} bytes; trying again" in capsys.readouterr().err
    )


def test_a_part_of_an_earlier_call_is_used(server, archive, tmp_path):
    Path("data").mkdir()
    Path("data", f"{NAME}.part").write_bytes(server.files[NAME][:70_000])
    same_as_published(fetch.get(archive, Path("data")), tmp_path)
    assert [span for _, span in server.asked] == ["bytes=70000-"]


def test_a_server_that_gives_less_than_the_rest_is_asked_again(server, archive, tmp_path):
    Path("data").mkdir()
    size = len(server.files[NAME])
    Path("data", f"{NAME}.part").write_bytes(server.files[NAME][: size - 2500])
    server.ranges = "short"
    same_as_published(fetch.get(archive, Path("data")), tmp_path)
    assert [span for _, span in server.asked] == [f"bytes={size - n}-" for n in (2500, 1500, 500)]


def test_a_server_that_ignores_ranges_sends_all(server, archive, tmp_path):
    server.ranges = "ignored"
    server.cuts = [100_000]
    same_as_published(fetch.get(archive, Path("data")), tmp_path)
    assert [span for _, span in server.asked] == [None, "bytes=100000-"]


def test_a_server_that_sends_another_range_is_refused(server, archive):
    server.ranges = "wrong"
    server.cuts = [100_000]
    with pytest.raises(Failed, match=f"it sends bytes 99999-.* not bytes 100000- of {archive.size}"):
        fetch.get(archive, Path("data"))


@pytest.mark.parametrize("longer", [0, 5])
def test_a_part_with_nothing_after_it_is_whole_or_worthless(server, archive, tmp_path, longer):
    Path("data").mkdir()
    Path("data", f"{NAME}.part").write_bytes(server.files[NAME] + bytes(longer))
    same_as_published(fetch.get(archive, Path("data")), tmp_path)
    assert [span for _, span in server.asked] == [None] * bool(longer)


SIGN_IN = b"<html>please log in</html>"


@pytest.mark.parametrize("claimed", [None, 0])
def test_a_network_that_answers_for_the_server_leaves_the_part_alone(server, archive, tmp_path, claimed):
    """A captive portal answers with its own page, with or without its length."""
    Path("data").mkdir()
    part, content = Path("data", f"{NAME}.part"), server.files[NAME]
    part.write_bytes(content[:-1000])
    server.files[NAME], server.ranges, server.claimed = SIGN_IN, "ignored", claimed
    said = "HTTP 200 with 26 bytes" if claimed is None else "HTTP 200 with an unknown number of bytes"
    with pytest.raises(Failed, match=said):
        fetch.get(archive, Path("data"))
    assert part.read_bytes() == content[:-1000]
    assert left_in("data") == [part.name]
    server.files[NAME], server.ranges, server.claimed = content, "honoured", None
    server.asked.clear()
    same_as_published(fetch.get(archive, Path("data")), tmp_path)
    assert [span for _, span in server.asked] == [f"bytes={len(content) - 1000}-"]


def test_a_server_with_another_file_is_refused_by_its_length(server, archive):
    Path("data").mkdir()
    part = Path("data", f"{NAME}.part")
    part.write_bytes(server.files[NAME][:150_000])
    for other in (server.files[NAME] + b"more", server.files[NAME][:100_000]):  # one can be resumed, the other cannot
        server.files[NAME] = other
        with pytest.raises(Failed, match=f"Content-Range|bytes 150000-.*/{len(other)}|HTTP 416"):
            fetch.get(archive, Path("data"))
        assert part.stat().st_size == 150_000


def test_a_data_folder_that_is_a_file_is_refused_by_the_option_that_named_it():
    Path("file").write_text("")
    for folder in ("file", "file/inside"):
        refused(
            sngm(f"data get cifar10 --data-dir {folder}"), f"{folder} is not a folder; name another with --data-dir"
        )


def test_a_part_of_another_version_is_thrown_away(server, archive, tmp_path):
    Path("data").mkdir()
    Path("data", f"{NAME}.part").write_bytes(b"old" * 1000)
    same_as_published(fetch.get(archive, Path("data")), tmp_path)
    assert [span for _, span in server.asked] == ["bytes=3000-", None]


def test_a_wrong_checksum_is_refused_and_nothing_is_unpacked(server, archive):
    server.files[NAME] = bytes(archive.size)
    with pytest.raises(Failed, match=rf"{server.base}/{NAME}: the file it sends has the MD5 \w+, not {archive.md5}"):
        fetch.get(archive, Path("data"))
    assert left_in("data") == []
    assert len(server.asked) == 1


def test_dead_mirrors_are_gone_by(server, archive, tmp_path, monkeypatch):
    dead = "http://127.0.0.1:9"
    monkeypatch.setenv("SNGM_MIRRORS", f"{dead}/a {server.base}/not-here/ file:///no/such/folder")
    same_as_published(fetch.get(archive, Path("data")), tmp_path)
    assert [path for path, _ in server.asked] == [f"/not-here/{NAME}", f"/{NAME}"]


def test_a_folder_is_a_mirror(server, archive, tmp_path, monkeypatch):
    (tmp_path / NAME).write_bytes(server.files[NAME])
    monkeypatch.setenv("SNGM_MIRRORS", tmp_path.as_uri())
    same_as_published(fetch.get(archive, Path("data")), tmp_path)
    assert server.asked == []


@pytest.mark.parametrize(
    "mirror", ["here", "ftp://", "javascript:1", "http://[::1", "http://a:b/", "https://", "http://..", "a" * 9999]
)
def test_a_mirror_that_is_no_address_is_gone_by(server, archive, tmp_path, monkeypatch, mirror):
    monkeypatch.setenv("SNGM_MIRRORS", mirror)
    same_as_published(fetch.get(archive, Path("data")), tmp_path)


def test_errors_of_a_moment_are_tried_again_and_others_are_not(server, archive, tmp_path):
    server.codes = [503, 429]
    same_as_published(fetch.get(archive, Path("one")), tmp_path)
    assert len(server.asked) == 3
    server.codes = [500] * 9
    with pytest.raises(Failed, match="HTTP 500"):
        fetch.get(archive, Path("two"))
    assert len(server.asked) == 3 + fetch.TRIES
    server.codes = [403]
    with pytest.raises(Failed, match="HTTP 403"):
        fetch.get(archive, Path("two"))
    assert len(server.asked) == 3 + fetch.TRIES + 1


def test_being_offline_is_one_error_that_says_what_to_do(archive):
    gone = Archive(archive.name, archive.md5, archive.size, archive.folder, archive.files, "http://127.0.0.1:9/")
    with pytest.raises(
        Failed, match=rf"http://127\.0\.0\.1:9/{NAME}: .*refused.*SNGM_MIRRORS, or put {NAME} into data"
    ):
        fetch.get(gone, Path("data"))


def test_a_silent_server_is_given_up_in_time(server, archive, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.1)
    monkeypatch.setattr(fetch, "TRIES", 2)
    server.pause = 1.0
    with pytest.raises(Failed, match="timed out"):
        fetch.get(archive, Path("data"))


def test_an_archive_that_the_user_brought_is_used_and_kept(server, archive, tmp_path):
    Path("data").mkdir()
    Path("data", NAME).write_bytes(server.files[NAME])
    same_as_published(fetch.get(archive, Path("data")), tmp_path)
    assert left_in("data") == sorted([NAME, "cifar-10-batches-bin"])
    shutil.rmtree("data/cifar-10-batches-bin")
    Path("data", NAME).write_bytes(b"other")
    with pytest.raises(Failed, match=f"{NAME} has the MD5 .* delete it"):
        fetch.get(archive, Path("data"))
    assert server.asked == []


def test_a_folder_that_is_not_whole_is_left_to_the_user(server, archive):
    Path("data/cifar-10-batches-bin").mkdir(parents=True)
    Path("data/cifar-10-batches-bin/mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="cifar-10-batches-bin is incomplete"):
        fetch.get(archive, Path("data"))
    assert Path("data/cifar-10-batches-bin/mine.txt").read_text() == "mine"
    assert server.asked == []


def test_two_processes_fetch_once(server, archive, tmp_path):
    server.gate.clear()
    code = (
        "import sys; from pathlib import Path; from sngm.data.fetch import Archive, get\n"
        f"print(get(Archive({NAME!r}, {archive.md5!r}, {archive.size}, {archive.folder!r}, {FILES!r}, "
        f"{archive.base!r}), Path('data')))"
    )
    first = launch([sys.executable, "-c", code])
    until(first, lambda: server.asked)
    second = launch([sys.executable, "-c", code])
    assert next_line(second.stderr) == f"sngm: another process is fetching {NAME}\n"
    server.gate.set()
    said = [finish(process) for process in (first, second)]
    assert said == [Result(0, "data/cifar-10-batches-bin\n", "")] * 2
    assert len(server.asked) == 1
    same_as_published(Path("data/cifar-10-batches-bin"), tmp_path)


@pytest.mark.slow
def test_ctrl_c_keeps_the_part_and_the_same_command_goes_on(server):
    server.files[NAME] = os.urandom(1_000_000)
    server.claimed = cifar.archive_of("cifar10", "binary").size
    server.pause = 0.05
    process = start("data get cifar10 --data-dir data", SNGM_MIRRORS=server.base)
    part = Path("data", f"{NAME}.part")
    until(process, lambda: part.exists() and part.stat().st_size)
    process.send_signal(signal.SIGINT)
    refused(finish(process), "interrupted; received bytes are kept in data; run the same command", code=130)
    size = part.stat().st_size
    assert 0 < size < 1_000_000
    assert server.files[NAME].startswith(part.read_bytes())
    server.pause, server.claimed = 0.0, None
    with pytest.raises(Failed):  # the checksum differs
        fetch.download(Archive(NAME, "0", 1_000_000, "", (), server.base), Path("data", NAME))
    assert server.asked[1] == (f"/{NAME}", f"bytes={size}-")


def archive_with(path, *entries):
    """Return a tar archive of (name, type) entries; regular files hold four bytes, links point to /etc."""
    with tarfile.open(path, "w:gz") as tar:
        for name, kind in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc"
            entry.size = 4 if kind == tarfile.REGTYPE else 0
            tar.addfile(entry, io.BytesIO(b"evil"))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "{here}/outside",
        "/{here}/outside",
        "cifar-10-batches-bin/../../outside",
        "C:/outside",
        "cifar-10-batches-bin\\..\\..\\outside",
        "cifar-10-batches-bin/" + "outside/" * 1500,
        "cifar-10-batches-bin/" + "outside" * 40,
    ],
)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE])
def test_an_archive_that_reaches_outside_is_refused(tmp_path, name, kind):
    path = archive_with(tmp_path / "evil.tar.gz", (name.format(here=tmp_path), kind))
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(Failed, match=r"evil\.tar\.gz cannot be unpacked: its path .*outside"):
        fetch.unpack(path, "cifar-10-batches-bin", root)
    assert list(root.iterdir()) == []
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_an_archive_are_refused(tmp_path, kind):
    path = archive_with(tmp_path / "evil.tar.gz", ("cifar-10-batches-bin", kind))
    with pytest.raises(Failed, match=r"cannot be unpacked: .* is neither a file nor a folder"):
        fetch.unpack(path, "cifar-10-batches-bin", tmp_path)


@pytest.mark.parametrize("second", ["a/b", "a/b/c/d", "a/b/c/d/e"])
def test_a_file_in_place_of_a_folder_in_an_archive_is_refused(tmp_path, second):
    path = archive_with(tmp_path / "odd.tar.gz", ("a/b/c", tarfile.REGTYPE), (second, tarfile.REGTYPE))
    with pytest.raises(Failed, match=r"odd\.tar\.gz cannot be unpacked"):
        fetch.unpack(path, "a", tmp_path)
    assert not (tmp_path / "a").exists()


def test_an_archive_unpacks_what_it_holds(tmp_path):
    path = archive_with(tmp_path / "good.tar.gz", ("./a/", tarfile.DIRTYPE), ("./a/b/c", tarfile.REGTYPE))
    assert fetch.unpack(path, "a", tmp_path, ["b/c"]) == tmp_path / "a"
    assert (tmp_path / "a/b/c").read_bytes() == b"evil"


def test_an_archive_that_is_none_or_cut_is_named(server, archive, tmp_path):
    path = tmp_path / "cut.tar.gz"
    for content in (b"", b"no archive", server.files[NAME][:60_000]):
        path.write_bytes(content)
        with pytest.raises(Failed, match=r"cut\.tar\.gz cannot be unpacked"):
            fetch.unpack(path, "cifar-10-batches-bin", Path("."))
        assert list(Path(".").iterdir()) == []


# ---------------------------------------------------------------- ImageNet


Image = pytest.importorskip("PIL.Image")


def picture(path, width=40, height=30, mode="RGB", seed=0, kind="JPEG"):
    """Return a smooth image, which JPEG compression hardly changes."""
    y, x = np.mgrid[0:height, 0:width]
    rgb = np.stack([x * 255 // width, y * 255 // height, np.full_like(x, 40 + seed * 30 % 200)], axis=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rgb.astype(np.uint8)).convert(mode).save(path, kind, quality=95)


@pytest.fixture
def tree():
    """Write an image folder with three classes in two splits, and images of all formats."""
    root = Path("data/imagenet")
    for split in ("train", "val"):
        for number, name in enumerate(("n02", "n01", "n03")):
            for index in range(4):
                picture(root / split / name / f"{name}_{index}.JPEG", 40 + 7 * index, 30 + 9 * number, seed=index)
    picture(root / "train/n01/grey.jpg", mode="L")
    picture(root / "train/n01/cmyk.JPEG", mode="CMYK")
    picture(root / "train/n02/palette.png", mode="P", kind="PNG")
    picture(root / "train/n02/png_by_another_name.JPEG", kind="PNG")
    (root / "train/n03/notes.txt").write_text("no picture")
    (root / "train/n03/._n03_0.JPEG").write_text("a Mac's")
    (root / "train/.hidden").mkdir()
    return root


SMALL = {"size": 16, "resize": 20}


def test_classes_are_the_sorted_folders_and_files_the_pictures_in_them(tree):
    images = ImageFolder(Path("data"), "train", **SMALL)
    assert images.classes == ["n01", "n02", "n03"]
    assert images.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 4
    assert [Path(images.file(i)).name for i in (0, 1, 15)] == ["cmyk.JPEG", "grey.jpg", "n03_3.JPEG"]
    assert all(os.path.isfile(images.file(i)) for i in range(len(images)))
    assert len(ImageFolder(tree, "val")) == 12, "the folder itself will do"
    pixels, labels = images[torch.tensor([15, 0, -1])]
    assert pixels.shape == (3, 3, 16, 16)
    assert pixels.dtype == torch.uint8
    assert labels.tolist() == [2, 0, 2]
    assert torch.equal(pixels[0], pixels[2])
    assert images[torch.tensor([], dtype=torch.int64)][0].shape == (0, 3, 16, 16)
    with pytest.raises(IndexError, match="16 images"):
        images[torch.tensor([16])]


def test_the_view_for_evaluation_is_the_middle(tree):
    image = ImageFolder(tree, "val", size=20, resize=30)
    wanted = np.asarray(Image.open(image.file(4)))  # 40 x 30: not resized, so that the crop is exact
    assert wanted.shape == (30, 40, 3)
    assert np.array_equal(image[torch.tensor([4])][0][0].permute(1, 2, 0), wanted[5:25, 10:30])
    half = ImageFolder(tree, "val", size=10, resize=15)[torch.tensor([4])][0][0].float()
    blocks = torch.from_numpy(wanted[4:24, 10:30].astype(np.float32)).view(10, 2, 10, 2, 3).mean((1, 3))
    assert (half.permute(1, 2, 0) - blocks).abs().max() < 6, "antialiased: near the mean of the pixels it stands for"


def test_grey_cmyk_and_palettes_become_rgb(tree):
    images = ImageFolder(tree, "train", **SMALL)
    by_name = {Path(images.file(i)).name: i for i in range(len(images))}
    colour, _ = images[torch.tensor([by_name[n] for n in ("n02_0.JPEG", "png_by_another_name.JPEG", "cmyk.JPEG")])]
    grey, _ = images[torch.tensor([by_name["grey.jpg"], by_name["palette.png"]])]
    picture(Path("same.png"), 40, 39, kind="PNG")
    assert torch.equal(grey[0, 0], grey[0, 1])
    assert (colour[1].float() - colour[2].float()).abs().max() < 20
    assert colour[1, 0, 8].float().diff().min() > 0, "red grows to the right"
    assert colour[2, 1, :, 8].float().diff().min() > 0, "green grows downwards"
    assert (grey[1].float() - colour[1].float()).abs().mean() < 40, "a palette is coarse"


def test_augmentation_is_the_same_however_a_batch_is_split(tree):
    images = ImageFolder(tree, "train", **SMALL)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    whole, labels = images.training(order, seed=3, epoch=5)
    for size in (1, 3, 16):
        parts = [images.training(part, seed=3, epoch=5) for part in order.split(size)]
        assert torch.equal(torch.cat([part for part, _ in parts]), whole)
        assert torch.equal(torch.cat([part for _, part in parts]), labels)
    assert torch.equal(images.training(order - 16, seed=3, epoch=5)[0], whole)
    for other in ({"seed": 4, "epoch": 5}, {"seed": 3, "epoch": 6}):
        assert (images.training(order, **other)[0] != whole).flatten(1).any(1).float().mean() > 0.9


class Batches(torch.utils.data.Dataset):
    """Batches as a data loader's worker receives them."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.images.training(torch.arange(4) + 4 * index, seed=1, epoch=2)[0]


def test_it_works_in_other_processes(tree):
    images = ImageFolder(tree, "train", **SMALL)
    wanted = images.training(torch.arange(16), seed=1, epoch=2)[0]
    assert torch.equal(pickle.loads(pickle.dumps(images)).training(torch.arange(16), seed=1, epoch=2)[0], wanted)
    loader = torch.utils.data.DataLoader(Batches(images), batch_size=None, num_workers=2)
    assert torch.equal(torch.cat(list(loader)), wanted)


def drawn(width, height, rng):
    """Draw crops by the published rule, with another random number generator."""
    while True:
        area, ratio = width * height * rng.uniform(0.08, 1), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if w <= width and h <= height:
            return rng.randint(0, width - w), rng.randint(0, height - h), w, h


def test_crops_are_drawn_as_published():
    boxes = torch.tensor([crop_box(500, 375, seed=0, epoch=1, index=i) for i in range(4000)], dtype=torch.float64)
    left, top, width, height = boxes.T
    assert ((left >= 0) & (left + width <= 500) & (top >= 0) & (top + height <= 375)).all()
    area, ratio = width * height / (500 * 375), width / height
    assert 0.078 < area.min() < 0.1
    assert area.max() > 0.9
    assert 0.73 < ratio.min() < 0.76
    assert 1.32 < ratio.max() < 1.35
    assert left.min() == 0
    assert ((left + width) == 500).any(), "the last place too"
    rng = random.Random(0)
    known = torch.tensor([drawn(500, 375, rng) for _ in range(4000)], dtype=torch.float64)
    assert (boxes.mean(0) - known.mean(0)).abs().max() < 8  # 5 standard deviations of the widths
    assert (boxes.std(0) / known.std(0) - 1).abs().max() < 0.08


def test_pictures_too_long_for_any_crop_give_their_middle():
    assert crop_box(1000, 10, 0, 0, 0) == (493, 0, 13, 10)
    assert crop_box(10, 1000, 0, 0, 0) == (0, 493, 10, 13)
    assert crop_box(1, 1, 0, 0, 0) == (0, 0, 1, 1)


def test_half_are_mirrored():
    picture(Path("data/train/a/wide.JPEG"), 64, 48)
    picture(Path("data/val/a/wide.JPEG"), 64, 48)
    images = ImageFolder(Path("data"), "train", size=8, resize=8)
    red = torch.cat([images.training(torch.tensor([0]), seed, 0)[0][:, 0, 4] for seed in range(200)]).float()
    mirrored = (red[:, 0] > red[:, -1]).float().mean()
    assert 0.4 < mirrored < 0.6


def test_decoding_at_a_fraction_of_the_size_shows_the_same_crop(monkeypatch):
    for split in ("train", "val"):
        picture(Path(f"data/{split}/a/large.JPEG"), 401, 303)
    images = ImageFolder(Path("data"), "train", size=56, resize=56)
    JpegImageFile = pytest.importorskip("PIL.JpegImagePlugin").JpegImageFile
    drafted, draft = [], JpegImageFile.draft

    def note(self, mode, size):
        whole, (_, _, width, height) = self.size, crop_box(*self.size, *now)
        found = draft(self, mode, size)
        factor = round(whole[0] / self.size[0])
        assert min(width, height) // factor >= 56, "a pixel for each asked for"
        drafted.append(factor)
        return found

    for seed in range(30):
        now = (seed, 0, 0)
        with monkeypatch.context() as patch:
            patch.setattr(JpegImageFile, "draft", note)
            fast = images.training(torch.tensor([0]), seed, 0)[0].float()
        with monkeypatch.context() as patch:
            patch.setattr(JpegImageFile, "draft", lambda *_: None)
            exact = images.training(torch.tensor([0]), seed, 0)[0].float()
        assert (fast - exact).abs().max() < 4, seed
    assert {2, 4} <= set(drafted)
    assert len(drafted) < 30, "small crops are decoded whole"
    with monkeypatch.context() as patch:
        patch.setattr(JpegImageFile, "draft", None)  # evaluation must not use it
        images[torch.tensor([0])]


@pytest.mark.parametrize(
    "look", [lambda images: images[torch.arange(16)], lambda images: images.training(torch.arange(16), 0, 0)]
)
@pytest.mark.parametrize("content", ["cut", b"", b"no picture at all", b"\xff\xd8\xff\xe0" + b"\0" * 50, None])
def test_a_broken_picture_is_named(tree, content, look):
    path = tree / "train/n02/n02_1.JPEG"
    images = ImageFolder(tree, "train", **SMALL)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-200] if content == "cut" else content)
    said = "no longer exists" if content is None else "cannot be decoded: .+"
    with pytest.raises(DataMissing, match=rf"train/n02/n02_1\.JPEG {said}; fetch it again"):
        look(images)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES, errno.ESTALE])
def test_errors_of_the_disk_are_not_taken_for_broken_pictures(tree, monkeypatch, code):
    images = ImageFolder(tree, "train", **SMALL)

    def fail(path):
        raise OSError(code, os.strerror(code))  # without a file name, as from read()

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(OSError, match=os.strerror(code)) as error:
        images[torch.tensor([0])]
    assert error.type is not DataMissing
    assert error.value.filename == str(images.file(0)), "which file it was is said all the same"
    monkeypatch.setattr(Image, "open", lambda path: [0] * 2**62)
    with pytest.raises(MemoryError):
        images[torch.tensor([0])]


def test_trees_that_are_not_whole_are_refused_by_name(tree):
    (tree / "train/n04").mkdir()
    with pytest.raises(DataMissing, match="must hold the same classes; n04 is in only one"):
        ImageFolder(tree, "train")
    (tree / "val/n04").mkdir()
    for split in ("train", "val"):
        with pytest.raises(DataMissing, match=f"{split}/n04 holds no images"):
            ImageFolder(tree, split)
    flat = Path("flat")
    (flat / "train").mkdir(parents=True)
    picture(flat / "val/ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(DataMissing, match="holds no folders; it must hold one for each class"):
        ImageFolder(flat, "val")
    with pytest.raises(DataMissing, match="no ImageNet in nowhere"):
        ImageFolder(Path("nowhere"), "val")
    with pytest.raises(ValueError, match="train, val"):
        ImageFolder(tree, "test")
    with pytest.raises(ValueError, match="at most resize"):
        ImageFolder(tree, "val", size=30, resize=20)


def test_the_folder_of_tiny_imagenet_is_not_taken_for_imagenet(tree):
    tiny = Path("data/tiny-imagenet-200")
    for folder in (tiny / "train" / "n01" / "images", tiny / "val" / "images"):
        folder.mkdir(parents=True)
    (tiny / "val" / "val_annotations.txt").touch()
    with pytest.raises(DataMissing, match="no ImageNet in data/tiny-imagenet-200"):
        imagenet.find_imagenet(tiny)
    assert imagenet.find_imagenet(Path("data")) == tree
    refused(sngm(f"data check imagenet --data-dir {tiny}"), "no ImageNet in", code=3)


def test_without_pillow_it_says_what_to_install(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    images = ImageFolder(tree, "val")
    task = tasks.build("imagenet-resnet50", {"classes": 3}, Path("data"))
    for decode in (lambda: images[torch.tensor([0])], lambda: images.training(torch.tensor([0]), 0, 0), task.data):
        with pytest.raises(UsageError, match=r"Pillow is not installed; pip install 'sngm\[images\]'"):
            decode()


def test_a_check_of_everything_needs_no_pillow_and_says_all_it_found(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    make("data")
    monkeypatch.setattr(check, "_cifar", lambda layout, finding, folder: "as it should be")
    shown = sngm("data check --data-dir data")
    assert shown.code == 3
    assert shown.out == "cifar10: data/cifar-10-batches-bin: as it should be\n"
    assert "data/imagenet/val holds 3 classes, not 1,000" in shown.err
    monkeypatch.setattr(imagenet, "_images", lambda folder: os.listdir("data/locked"))
    shown = sngm("data check --data-dir data")
    assert (shown.code, shown.out.count("\n")) == (3, 1)
    assert "data/locked: No such file" in shown.err, "what keeps one from being read does not hide the others"


def age(folder, seconds):
    for path in folder.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


def test_the_listing_is_kept_until_a_folder_changes(tree, monkeypatch):
    ImageFolder(tree, "val")
    assert not (tree / ".sngm").exists(), "folders of this moment may change within the same tick"
    age(tree / "val", 100)
    first = ImageFolder(tree, "val")
    assert (tree / ".sngm/val.npz").is_file()
    with monkeypatch.context() as patch:
        patch.setattr(imagenet, "_images", None)  # the images must not be read again
        again = ImageFolder(tree, "val")
    assert [again.file(i) for i in range(12)] == [first.file(i) for i in range(12)]
    assert torch.equal(again.labels, first.labels)
    picture(tree / "val/n02/new.JPEG")
    assert len(ImageFolder(tree, "val")) == 13
    age(tree / "val", 50)
    assert len(ImageFolder(tree, "val")) == 13
    (tree / "val/n02/new.JPEG").unlink()
    assert len(ImageFolder(tree, "val")) == 12


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken", bytes(range(99)), "empty", "outside"])
def test_a_broken_listing_is_read_anew(tree, content):
    age(tree / "val", 100)
    ImageFolder(tree, "val")
    kept = tree / ".sngm/val.npz"
    if isinstance(content, str):
        with np.load(kept) as file:
            values = dict(file)
        names = b"" if content == "empty" else values["names"].tobytes().replace(b"n01_0.JPEG", b"../../own.")
        values["names"] = np.frombuffer(names, np.uint8)
        np.savez(kept, **values)
    else:
        kept.write_bytes(content)
    images = ImageFolder(tree, "val")
    assert len(images) == 12
    assert all(os.path.isfile(images.file(i)) for i in range(12))


def test_a_listing_that_cannot_be_kept_is_no_error(tree):
    age(tree / "val", 100)
    (tree / ".sngm").write_text("a file where the folder would be")
    assert len(ImageFolder(tree, "val")) == 12


# ---------------------------------------------------------------- the command line


def test_data_get_fetches_and_says_where(server, archive, monkeypatch, tmp_path):
    monkeypatch.setattr(cifar, "archive_of", lambda dataset, form: archive)
    shown = sngm("data get cifar10 --data-dir data")
    assert (shown.code, shown.out, shown.err) == (0, "cifar10: data/cifar-10-batches-bin\n", "")
    same_as_published(Path("data/cifar-10-batches-bin"), tmp_path)
    again = sngm("data --data-dir data --json get cifar10")
    assert again.json == {"dataset": "cifar10", "form": "binary", "folder": "data/cifar-10-batches-bin"}
    assert len(server.asked) == 1
    server.files.clear()
    refused(sngm("data get cifar10 --data-dir other"), "could not fetch", f"{server.base}/{NAME}", "HTTP 404", code=1)


def test_imagenet_is_the_users_to_bring():
    refused(
        sngm("data get imagenet --data-dir 'my data'"), "ImageNet cannot be downloaded",
        "imagenet/train/<class>/*.JPEG", "into my data",
    )  # fmt: skip


@pytest.mark.parametrize("line", ["get", "get nosuch", "get cifar10 --form text", "nosuch", "check no"])
def test_what_does_not_exist_is_a_usage_error(line):
    refused(sngm(f"data {line}"))


def test_the_official_archives():
    found = {(d, f): cifar.archive_of(d, f) for d in ("cifar10", "cifar100") for f in ("binary", "python")}
    assert found["cifar10", "binary"].urls() == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]
    assert found["cifar100", "python"].folder == "cifar-100-python"
    assert found["cifar100", "python"].files == ("train", "test")
    assert len({one.md5 for one in found.values()}) == 4
    sizes = {one.name: one.size for one in found.values()}
    assert sizes == {
        "cifar-10-binary.tar.gz": 170052171, "cifar-10-python.tar.gz": 170498071,
        "cifar-100-binary.tar.gz": 168513733, "cifar-100-python.tar.gz": 169001437,
    }  # fmt: skip
    for layout in cifar.LAYOUTS:
        digits = 64 if layout.form == "binary" else 32
        assert [len(checksum) for checksum in layout.checksums.split()] == [digits] * len(layout.files)


def test_progress_is_a_line_every_few_seconds(monkeypatch, capsys):
    monkeypatch.setattr(conversion, "INTERVAL", 0.0)
    with cli_data._progress("MB") as (show, say):
        show(1_500_000, 170_000_000)
        say("wait")
    with cli_data._progress("files") as (show, _):
        show(2_000, 1_331_167)
    assert capsys.readouterr().err == "1.5 of 170.0 MB\nsngm: wait\n2,000 of 1,331,167 files\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_is_said_beside_a_bar_stays_in_one_line(server, archive, tmp_path, monkeypatch):
    """On a terminal of 80 columns rich would wrap messages that are printed above its bar."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    server.cuts = [100_000]
    with cli_data._progress("MB") as (show, say):
        same_as_published(fetch.get(archive, Path("data"), show, say), tmp_path)
    size = archive.size
    said = f"sngm: {server.base}/{NAME}: the connection ended at 100,000 of {size:,} bytes; trying again in 0.01 s\n"
    assert len(said) > 100
    assert said in screen.getvalue()


def test_data_check_names_what_is_wrong(tree):
    refused(sngm("data check --data-dir nowhere"), "no dataset in nowhere", code=3)
    Path("file").touch()
    refused(sngm("data --data-dir file"), "--data-dir must be a folder; file is a file")
    refused(sngm("data check cifar10 --data-dir data"), "no CIFAR-10 in data", "sngm data get cifar10", code=3)
    folder = make("data")
    shown = sngm("data check cifar10 --data-dir data")
    refused(
        shown, "data_batch_1.bin 12, not 10,000", "test_batch.bin 17, not", "training class", "SHA256", code=3,
    )  # fmt: skip
    (folder / "data_batch_1.bin").write_bytes(b"short")
    refused(sngm("data check cifar10 --data-dir data"), "data_batch_1.bin is broken: it has 5 bytes", code=3)
    (folder / "data_batch_1.bin").unlink()
    refused(sngm("data check --data-dir data"), "data_batch_1.bin: No such file", code=3)
    shutil.rmtree(folder)
    (tree / "train/n01/n01_0.JPEG").write_bytes(b"<html>")
    refused(
        sngm("data check imagenet --data-dir data"), "n01_0.JPEG is no JPEG and no PNG", "3 classes, not 1,000",
        "val holds 12 images, not 50,000", code=3,
    )  # fmt: skip
    shown = sngm("data check imagenet --data-dir data --json")
    assert shown.code == 3
    assert len(shown.json[0]["wrong"]) == 5


@pytest.mark.parametrize("name", ["cifar-10-batches-bin", "mine"])
def test_a_folder_of_cifar_itself_is_checked_as_it_is_read(name):
    folder = make("data").rename(name)
    refused(sngm(f"data check cifar10 --data-dir {folder}"), "data_batch_1.bin 12, not 10,000", code=3)


def test_half_of_imagenet_is_not_passed_over(tree):
    shutil.rmtree(tree / "val")
    refused(sngm("data check --data-dir data"), "data/imagenet lacks val", code=3)


def test_clicks_that_were_cut_short_are_named():
    rows = CriteoLike(60).text(0, 60)
    Path("data/criteo").mkdir(parents=True)
    file = Path("data/criteo/dac_sample_80k.tsv")
    file.write_bytes(rows)
    shown = sngm("data check --data-dir data")
    assert shown.code == 0
    assert "60 rows, 0 malformed (the sample has 80,000)" in shown.out
    file.write_bytes(rows[:-200])
    for line in ("data check --data-dir data", "data check criteo --data-dir data"):
        shown = sngm(line)
        assert (shown.code, shown.out) == (3, "")
        assert f"1 malformed of {len(rows[:-200].splitlines())} rows" in shown.err
        assert f"of {file.name}, with fewer than 40 fields" in shown.err
    file.write_bytes(gzip.compress(rows)[:-20])
    for line in ("data check --data-dir data", "data check criteo --data-dir data"):
        shown = sngm(line)
        assert shown.code == 3
        assert f"{file} is broken: it cannot be unpacked to its end" in shown.err


def test_words_that_were_cut_short_are_named(monkeypatch):
    folder = Path("data/wikitext-2")
    folder.mkdir(parents=True)
    for split in wikitext.SPLITS:
        (folder / f"{split}.txt").write_text("a b c\nd e\n")
    monkeypatch.setattr(wikitext, "TOKENS", dict.fromkeys(wikitext.SPLITS, 7))
    monkeypatch.setattr(wikitext, "WORDS", 6)
    shown = sngm("data check --data-dir data")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == f"wikitext2: {folder}: 21 words, a vocabulary of 6, as published\n"
    (folder / "valid.txt").write_text("a b c\nd")
    for _ in range(2):  # the second time, the words are cached
        refused(sngm("data check --data-dir data"), f"{folder} does not hold", "valid.txt 6, not 7", code=3)
    (folder / "valid.txt").write_bytes(b"\xff")
    refused(sngm("data check wikitext2 --data-dir data"), "valid.txt is broken: it is not UTF-8", code=3)
    (folder / "valid.txt").unlink()
    refused(sngm("data check --data-dir data"), f"{folder} lacks valid.txt", code=3)


def test_every_picture_is_looked_at_and_those_cut_short_are_named(tree, monkeypatch):
    monkeypatch.setattr(imagenet, "SLICE", 3)
    monkeypatch.setattr(check, "CLASSES", 3)
    monkeypatch.setattr(check, "OFFICIAL", {"train": 16, "val": 12})
    cut, longer, empty = (tree / f"train/n0{n}/n0{n}_1.JPEG" for n in (1, 2, 3))
    cut.write_bytes(cut.read_bytes()[:-90])
    longer.write_bytes(longer.read_bytes() + bytes(40))
    png = tree / "train/n02/palette.png"
    png.write_bytes(png.read_bytes()[:-90])
    seen = []
    (finding,) = check.check("imagenet", Path("data"), lambda done, total: seen.append((done, total)))
    assert finding.wrong == []
    assert finding.doubtful == [str(cut), str(png)]
    assert seen == [(n, 28) for n in (3, 6, 9, 12, 15, 16, 19, 22, 25, 28)]
    shown = sngm("data check imagenet --data-dir data")
    assert (shown.code, shown.out.count("\n"), shown.err.count("\n")) == (0, 1, 1)
    assert "28 images of 3 classes" in shown.out
    assert f"2 files do not end as images do and may be truncated: {cut}, {png}" in shown.err
    assert sngm("data check imagenet --data-dir data --json").json[0]["doubtful"] == [str(cut), str(png)]
    empty.write_bytes(b"")
    (tree / "val/n03/n03_3.JPEG").unlink()
    (tree / "val/n03/n03_3.JPEG").symlink_to("nowhere")
    (finding,) = check.check("imagenet", Path("data"))
    assert len(finding.wrong) == 2
    assert "n03_1.JPEG is no JPEG and no PNG" in finding.wrong[0]
    assert "n03_3.JPEG: No such file" in finding.wrong[1]


def test_data_check_passes_what_is_as_published(monkeypatch):
    """Replace the official counts and checksums by those of small files."""
    folder = make("data", count=20)
    sizes = {}
    for name in FILES:
        rows = np.frombuffer((folder / name).read_bytes(), np.uint8).reshape(-1, 3073).copy()
        rows[:, 0] = np.arange(len(rows)) % 2  # two classes
        rows[0, 1:3] = 0, 255
        sizes[name] = len(rows) // 2 * 2
        (folder / name).write_bytes(rows[: sizes[name]].tobytes())
    monkeypatch.setattr(cifar.Layout, "official", lambda self, name: sizes[name])
    sums = " ".join(hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES)
    layout = dataclasses.replace(cifar.LAYOUTS[0], classes=2, checksums=sums)
    inspect = functools.partial(check._cifar, layout)
    finding = check._check("cifar10", folder, inspect)
    assert finding.wrong == []
    assert "each class equally often" in finding.seen
    rows = bytearray((folder / "test_batch.bin").read_bytes())
    rows[0] ^= 1
    (folder / "test_batch.bin").write_bytes(rows)
    wrong = check._check("cifar10", folder, inspect).wrong
    assert len(wrong) == 2
    assert "test_batch.bin has the SHA256" in wrong[0]
    assert "test class" in wrong[1]


TASK = """
from sngm import Task


class Cats(Task):
    '''Cats.'''

    dataset = "cifar10"

    def data(self):
        raise RuntimeError("read merely to be listed")
"""


def test_tasks_that_name_a_dataset_are_listed_without_reading_it(monkeypatch):
    Path("cats.py").write_text(TASK)
    monkeypatch.setattr("sngm.tasks.TASKS", {"cats": "cats.py:Cats"})
    shown = sngm("data --data-dir data")
    assert shown.code == 0
    assert shown.out.startswith("cats: no CIFAR-10 in data; run 'sngm data get cifar10 --data-dir data'")
    make("data")
    assert sngm("data --data-dir data").out == "cats: ready, in data/cifar-10-batches-bin\n"
    assert json.loads(sngm("data --data-dir data --json").out) == [
        {"task": "cats", "ready": True, "dataset": "cifar10", "folder": "data/cifar-10-batches-bin"}
    ]
