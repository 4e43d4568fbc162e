"""WikiText-2: words, streams and LSTM as in word_language_model, and the loss that does not store logits."""

import copy
import time
from pathlib import Path

import pytest
import torch
from harness import pairwise
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

from sngm.data import wikitext
from sngm.data.wikitext import BPTT, Windows, find_wikitext2, load_wikitext2, streams
from sngm.errors import DataMissing, UsageError
from sngm.models.lstm import WordLSTM
from sngm.models.vocabulary_loss import vocabulary_loss
from sngm.training import rng
from sngm.training.batch_plan import BatchPlan
from sngm.training.batchnorm_stats import draws

# a CPU without bfloat16 warns once
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
small = pytest.mark.filterwarnings("ignore:.*does not hold the official words")
NAMES = ("train.txt", "valid.txt", "test.txt")
OFFICIAL = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
TEXTS = (" \n = A b = \n \n a b . \n", " \n b c <unk> \n", "A d \n\n")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SNGM_DATA", raising=False)


def make(folder="data/wikitext-2", names=NAMES, texts=TEXTS):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, texts, strict=True):
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def windows(rows, bptt=BPTT):
    return Windows(rows, bptt).count


def as_defined(folder, names=NAMES):
    """Return words and their indices by word_language_model's definition, one word at a time."""
    numbers, splits = {}, []
    for name in names:
        split = []
        with open(folder / name, encoding="utf8") as file:
            for line in file:
                for word in [*line.split(), "<eos>"]:
                    split.append(numbers.setdefault(word, len(numbers)))
        splits.append(split)
    return splits, tuple(numbers)


def same(corpus, folder, names=NAMES):
    splits, words = as_defined(folder, names)
    return corpus.words == words and [corpus.train.tolist(), corpus.valid.tolist(), corpus.test.tolist()] == splits


# ---------------------------------------------------------------- words


@small
def test_words_are_numbered_in_order_of_appearance_over_all_splits():
    make()
    corpus = load_wikitext2(Path("data"))
    assert corpus.words == ("<eos>", "=", "A", "b", "a", ".", "c", "<unk>", "d")
    assert corpus.train.tolist() == [0, 1, 2, 3, 1, 0, 0, 4, 3, 5, 0]
    assert corpus.valid.tolist() == [0, 3, 6, 7, 0]
    assert corpus.test.tolist() == [2, 8, 0, 0]
    assert {corpus.train.dtype, corpus.valid.dtype, corpus.test.dtype} == {torch.int64}


HOSTILE = [
    "a b\nc",  # no final line break
    "a\n",
    "\n\n\na\n\n",
    "a\r\nb\r\n\r\nc\r\n",  # Windows
    "a\rb\r\rc",  # classic Mac OS
    "a\r\r\nb\n\r c",
    "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\x1fj\n",  # white space that does not end a line
    "a\u00a0b\u3000c\u2009d\te\n",  # white space other than the space
    "a\u200bb\ufeffc \x00 \x00d\n",  # looks like white space, but is not
    "é e\u0301 \U0001f600 中文 ﷽ \u202eabc\n",  # composed and decomposed: two words
    "<eos> a <eos>\n <eos>\n",  # the end mark as a word of the text
    "a " * 5000 + "\n" * 5000,
    "x" * 100_000,
]


@small
@pytest.mark.parametrize(("text", "place"), [(text, i % 3) for i, text in enumerate(HOSTILE)])
def test_odd_texts_are_read_as_word_language_model_reads_them(text, place):
    folder = make(texts=(*TEXTS[:place], text, *TEXTS[place + 1 :]))
    assert same(load_wikitext2(Path("data")), folder)


@small
def test_a_byte_order_mark_is_no_word():
    make()
    plain = load_wikitext2(Path("data"))
    make("other", texts=[b"\xef\xbb\xbf" + text.encode() for text in TEXTS])
    assert load_wikitext2(Path("other")).words == plain.words


@small
def test_both_names_of_the_files_will_do_and_so_does_their_own_folder(monkeypatch):
    folders = [make("a/wikitext-2"), make("b/wikitext-2", OFFICIAL), make("c"), make("d", OFFICIAL)]
    for folder in folders:
        assert find_wikitext2(Path(folder.parts[0]))[0].parent == folder
        assert load_wikitext2(Path(folder.parts[0])).train.tolist() == [0, 1, 2, 3, 1, 0, 0, 4, 3, 5, 0]
    make("a/wikitext-2", OFFICIAL)
    (folders[0] / "valid.txt").unlink()
    assert [path.name for path in find_wikitext2(Path("a"))] == list(OFFICIAL), "the form that is whole"
    make(".data/wikitext-2")
    assert find_wikitext2(None)[0] == Path(".data/wikitext-2/train.txt")
    monkeypatch.setenv("SNGM_DATA", "b")
    assert find_wikitext2(None)[0] == Path("b/wikitext-2/wiki.train.tokens")


def test_counts_that_are_not_official_are_warned_of_by_file():
    make()
    with pytest.warns(UserWarning, match=r"wikitext-2 does not.*: train\.txt 11, not 2,0.*vocabulary 9, not 33,278$"):
        load_wikitext2(Path("data"))


def test_official_counts_are_not_warned_of(monkeypatch):
    make()
    monkeypatch.setattr(wikitext, "TOKENS", {"train": 11, "valid": 5, "test": 4})
    monkeypatch.setattr(wikitext, "WORDS", 9)
    load_wikitext2(Path("data"))


def test_what_is_not_there_is_named_with_what_to_put_where():
    with pytest.raises(DataMissing, match=r"no WikiText-2 in pets; put wikitext-2/{train\.txt,.*wiki\.test\.tokens"):
        load_wikitext2(Path("pets"))
    with pytest.raises(DataMissing, match=r"in \.data and .*/home/\.cache/sngm; .*`data_dir` or SNGM_DATA"):
        load_wikitext2()
    folder = make()
    for name in NAMES[1:]:
        (folder / name).unlink()
    for root in ("data", "data/wikitext-2"):
        with pytest.raises(DataMissing, match=r"data/wikitext-2 lacks valid\.txt, test\.txt;"):
            load_wikitext2(Path(root))
    (folder / "valid.txt").mkdir()
    with pytest.raises(DataMissing, match=r"lacks valid\.txt, test\.txt;"):
        load_wikitext2(Path("data"))
    make("other", NAMES[:2], TEXTS[:2])
    with pytest.raises(DataMissing, match="no WikiText-2 in other"):
        load_wikitext2(Path("other"))  # may hold any dataset


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "no words in 0 bytes"),
        (b" \n\n \t\r\n", "no words in 7 bytes"),
        (b"\xef\xbb\xbf", "no words in 3 bytes"),
        (b"abc \xff\xfe d\n", "not UTF-8 at byte 4"),
        ("a b\n".encode("utf-16"), "not UTF-8 at byte 0"),
        ("é".encode()[:1], "not UTF-8 at byte 0"),
    ],
)
def test_a_file_without_words_or_of_another_encoding_is_refused(content, word):
    name = NAMES[len(content) % 3]
    (make() / name).write_bytes(content)
    with pytest.raises(DataMissing, match=f"data/wikitext-2/{name} is broken: .*{word}"):
        load_wikitext2(Path("data"))


REAL = Path(__file__).parents[1] / ".data"


@pytest.mark.skipif(not (REAL / "wikitext-2").is_dir(), reason="needs WikiText-2 in .data")
def test_the_real_files_have_the_published_counts_and_load_fast():
    seconds = []
    for _ in range(2):
        before = time.process_time()
        corpus = load_wikitext2(REAL)  # a warning would be an error
        seconds.append(time.process_time() - before)
    assert min(seconds) < 2
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == [2_088_628, 217_646, 245_569]
    assert len(corpus.words) == 33_278
    assert same(corpus, REAL / "wikitext-2")
    assert windows(streams(corpus.train, 1000)) == 60
    assert windows(streams(corpus.train, 2000)) == 30


# ---------------------------------------------------------------- streams and windows


def batchify(data, batch):
    """Return streams as columns, as in word_language_model."""
    length = data.size(0) // batch
    return data.narrow(0, 0, length * batch).view(batch, -1).t().contiguous()


def get_batch(source, i, bptt):
    """Return inputs and targets from position i, as in word_language_model."""
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].view(-1)


def window(rows, i, bptt=35):
    """Return the i-th step's inputs and targets, without the padding of the last window."""
    inputs, targets = Windows(rows, bptt)[torch.arange(i * len(rows), (i + 1) * len(rows))]
    assert inputs.shape == targets.shape == (len(rows), bptt)
    seen = int((targets[0] >= 0).sum())
    assert (targets[:, seen:] == -1).all()
    return inputs[:, :seen], targets[:, :seen]


def test_streams_by_hand():
    letters = torch.arange(26)
    rows = streams(letters, 4)  # the example in word_language_model's words: a..f, g..l, m..r, s..x; y, z are dropped
    assert ["".join(chr(97 + n) for n in row) for row in rows.tolist()] == ["abcdef", "ghijkl", "mnopqr", "stuvwx"]
    assert rows.data_ptr() == letters.data_ptr()
    assert windows(rows, 2) == 3
    parts = [window(rows, i, 2) for i in range(3)]
    assert [part[0][1].tolist() for part in parts] == [[6, 7], [8, 9], [10]]
    assert [part[1][1].tolist() for part in parts] == [[7, 8], [9, 10], [11]]


@pytest.mark.parametrize(
    ("length", "batch", "bptt"), pairwise([2, 7, 70, 71, 72, 105, 106, 107], [1, 2, 3, 20], [1, 2, 35, 1000])
)
def test_windows_are_those_of_word_language_model(length, batch, bptt):
    tokens = torch.randint(50, (length * batch + batch - 1,), generator=torch.Generator().manual_seed(length))
    source, rows = batchify(tokens, batch), streams(tokens, batch)
    places = range(0, source.size(0) - 1, bptt)
    assert windows(rows, bptt) == len(places)
    assert len(Windows(rows, bptt)) == len(places) * batch
    for number, i in enumerate(places):
        data, target = get_batch(source, i, bptt)
        inputs, targets = window(rows, number, bptt)
        assert torch.equal(inputs.t(), data)
        assert torch.equal(targets.t().reshape(-1), target)


def test_a_worker_holds_neighbouring_streams():
    rows = streams(torch.arange(1000), 12)
    plan = BatchPlan.of(batch=12, workers=3, micro=2)
    pieces = [piece for worker in range(3) for piece in plan.pieces(worker)]
    for i in range(windows(rows)):
        inputs, targets = window(rows, i)
        parts = [window(rows[piece], i) for piece in pieces]
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[1] for part in parts]), targets)


def test_streams_need_two_tokens_each():
    tokens = torch.arange(10)
    with pytest.raises(UsageError, match=r"batch=6 needs 12 tokens.* there are 10, enough for batch=5"):
        streams(tokens, 6)
    with pytest.raises(UsageError, match=r"there are 0$"):
        streams(tokens[:0], 1)
    assert windows(streams(tokens, 5)) == 1


# ---------------------------------------------------------------- the loss


def example(n=13, width=5, words=11, dtype=torch.float64, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (n, width), (words, width), (words,)
    tensors = [torch.randn(s, generator=generator, dtype=dtype).mul_(scale).requires_grad_() for s in shapes]
    return *tensors, torch.randint(words, (n,), generator=generator)


def both(tensors, reduction="mean", chunk=None, factor=1.0):
    """Return loss and gradients by torch and by our function."""
    features, weight, bias, targets = tensors
    found = []
    for loss in (
        cross_entropy(linear(features, weight, bias), targets, reduction=reduction),
        vocabulary_loss(*tensors, reduction=reduction, chunk=chunk),
    ):
        found.append([loss.detach(), *torch.autograd.grad(loss * factor, (features, weight, bias))])
    return found


def worst(found):
    return max(float((a - b).abs().max() / (1 + a.abs().max())) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [1, 2, 5, 12, 13, 14, 1000, None])
def test_the_loss_and_its_gradients_are_torch_s(reduction, chunk):
    assert worst(both(example(), reduction, chunk, factor=-0.37)) < 1e-12
    assert worst(both(example(n=64, width=16, words=333, seed=1), reduction, chunk)) < 1e-12
    assert worst(both(example(n=1, width=1, words=1), reduction, chunk)) < 1e-12


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1e4])
def test_sure_and_unsure_predictions(scale):
    assert worst(both(example(scale=scale), chunk=4)) < 1e-12
    of_float32 = both(example(dtype=torch.float32, scale=scale), chunk=4)
    assert all(torch.isfinite(t).all() for t in of_float32[1])
    assert worst(of_float32) < 1e-5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradients_pass_gradcheck(reduction):
    features, weight, bias, targets = example(n=4, width=3, words=6)

    def loss(*args):
        return vocabulary_loss(*args, targets, reduction=reduction, chunk=3)

    assert torch.autograd.gradcheck(loss, (features, weight, bias))


def test_only_the_gradients_asked_for_are_computed():
    whole = both(example())[0]
    for frozen in range(3):
        tensors = example()
        tensors[frozen].requires_grad_(False)
        vocabulary_loss(*tensors, chunk=4).backward()
        for i, (tensor, wanted) in enumerate(zip(tensors[:3], whole[1:], strict=True)):
            assert (tensor.grad is None) if i == frozen else torch.allclose(tensor.grad, wanted, rtol=0, atol=1e-12)
    tensors = example()
    with torch.no_grad():
        loss = vocabulary_loss(*tensors, chunk=4)
    assert not loss.requires_grad
    assert torch.allclose(loss, whole[0], rtol=0, atol=1e-12)


def test_backward_twice_adds_up_and_second_derivatives_are_refused():
    features, *rest = example()
    loss = vocabulary_loss(features, *rest)
    loss.backward(retain_graph=True)
    first = features.grad.clone()
    loss.backward()
    assert torch.equal(features.grad, 2 * first)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(vocabulary_loss(features, *rest), features, create_graph=True)


def test_views_and_shared_weights():
    features, weight, bias, targets = example()
    turned = features.detach().t().contiguous().t().requires_grad_()
    repeated = targets[::2].repeat_interleave(2)[:13].int()
    wanted = torch.autograd.grad(cross_entropy(turned @ weight.t() + bias, repeated.long()), (turned, weight))
    found = torch.autograd.grad(vocabulary_loss(turned, weight, bias, repeated, chunk=3), (turned, weight))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(wanted, found, strict=True))
    tied = weight.detach().clone().requires_grad_()
    cross_entropy(linear(tied[:9], tied, bias), targets[:9]).backward()
    wanted_of_tied, tied.grad = tied.grad, None
    vocabulary_loss(tied[:9], tied, bias, targets[:9], chunk=4).backward()
    assert torch.allclose(tied.grad, wanted_of_tied, rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """A dispatch mode that records the bytes of the largest tensor any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor):
                self.bytes = max(self.bytes, one.numel() * one.element_size())
        return result


def test_no_logits_are_kept_nor_ever_all_there():
    n, width, words, chunk = 512, 8, 2000, 16
    tensors = example(n, width, words, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel() * t.element_size()) or t, lambda t: t
    ):
        cross_entropy(linear(*tensors[:3]), tensors[3])
        by_torch = sum(kept)
        kept.clear()
        with Largest() as largest:
            loss = vocabulary_loss(*tensors, chunk=chunk)
            loss.backward()
    assert by_torch >= 4 * n * words
    # 84 KB, while the logits take 4 MB; and the number of targets
    assert sum(kept) <= 4 * (n * width + words * width + words) + 8
    assert largest.bytes <= 4 * max(chunk * words, n * width, words * width)


def test_the_default_chunk_bounds_the_logits(monkeypatch):
    monkeypatch.setattr("sngm.models.vocabulary_loss.MAX_LOGITS", 100)
    tensors = example(n=64, width=2, words=30)
    with Largest() as largest:
        vocabulary_loss(*tensors)
    assert largest.bytes <= 8 * 130
    monkeypatch.setattr("sngm.models.vocabulary_loss.MAX_LOGITS", 1)  # fewer than the words: one row at a time
    assert worst(both(tensors)) < 1e-12


class Products(TorchDispatchMode):
    """A dispatch mode that records the dtypes of products and softmax."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("addmm", "addmm_", "mm", "_log_softmax"):
            self.seen.add(("softmax" if name == "_log_softmax" else "product", result.dtype))
        return result


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_under_autocast_products_are_low_and_softmax_is_not(low):
    tensors = example(128, 16, 100, torch.float32, scale=0.3)
    wanted = both(tensors)[0]
    with torch.autocast("cpu", low):
        by_torch, ours = both(tensors, chunk=50)
        with Products() as products:
            vocabulary_loss(*tensors)
    assert products.seen == {("product", low), ("softmax", torch.float32)}
    assert {t.dtype for t in ours} == {torch.float32}
    for exact, theirs, found in zip(wanted, by_torch, ours, strict=True):
        error, theirs_error = ((t - exact).norm() / exact.norm() for t in (found, theirs))
        assert error < 0.01
        assert error < 1.5 * theirs_error + 1e-6, "no worse than torch's own in the same dtypes"


def test_autocast_leaves_float64_alone_and_takes_features_of_low_precision():
    with torch.autocast("cpu", torch.bfloat16):
        assert worst(both(example(), chunk=4)) < 1e-12
        features, weight, bias, targets = example(dtype=torch.float32)
        low = features.detach().bfloat16().requires_grad_()
        loss = vocabulary_loss(low, weight, bias, targets)
        assert vocabulary_loss(features, weight.bfloat16(), bias.bfloat16(), targets).isfinite()
    loss.backward()
    with pytest.raises(RuntimeError, match="dtype"):
        vocabulary_loss(low, weight, bias, targets)  # as in linear
    assert (loss.dtype, low.grad.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)


def test_parameters_of_bfloat16_have_gradients_of_bfloat16_summed_in_float32():
    exact = example(n=512, width=8, words=40, dtype=torch.float32)
    low = [t.detach().bfloat16().requires_grad_() for t in exact[:3]]
    same_numbers = [t.detach().double().requires_grad_() for t in low]
    loss = vocabulary_loss(*low, exact[3], chunk=1)
    loss.backward()
    cross_entropy(linear(*same_numbers), exact[3]).backward()
    assert loss.dtype == torch.float32
    for found, wanted in zip(low, same_numbers, strict=True):
        assert found.grad.dtype == torch.bfloat16
        assert (
            found.grad - wanted.grad
        ).norm() < 0.01 * wanted.grad.norm()  # 512 sums in bfloat16 would have a larger error


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"reduction": "none"}, "reduction must be 'mean' or 'sum', got 'none'"),
        ({"chunk": 0}, "chunk must be >= 1 .* got chunk=0"),
        ({"features": torch.zeros(13, 4)}, r"\(N, H\), \(V, H\).*, got \[\(13, 4\), \(11, 5\)"),
        ({"features": torch.zeros(13, 1, 5)}, r"got \[\(13, 1, 5\)"),
        ({"bias": torch.zeros(1)}, r"\(V,\), \(N,\) .*\(1,\), \(13,\)"),
        ({"targets": torch.zeros(12, dtype=torch.int64)}, r"\(11,\), \(12,\)"),
        ({"targets": torch.zeros(13)}, r"targets integers, got .* torch\.float32"),
        ({"features": torch.zeros(0, 5), "targets": torch.zeros(0, dtype=torch.int64)}, "with N > 0"),
    ],
)
def test_wrong_arguments_of_the_loss_are_refused(change, word):
    given = dict(zip(("features", "weight", "bias", "targets"), example(), strict=True))
    with pytest.raises(ValueError, match=word):
        vocabulary_loss(**{**given, **change})


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("target", [-100, -1])
def test_rows_of_negative_targets_are_left_out(target, reduction):
    *tensors, targets = example()
    targets[[0, 3, 4, 12]] = target
    counts = targets >= 0
    wanted = cross_entropy(linear(*tensors)[counts], targets[counts], reduction=reduction)
    for chunk in (2, None):
        found = vocabulary_loss(*tensors, targets, reduction=reduction, chunk=chunk)
        grads = [torch.autograd.grad(loss, tensors, retain_graph=True) for loss in (wanted, found)]
        assert worst([[wanted.detach(), *grads[0]], [found.detach(), *grads[1]]]) < 1e-12
        assert not grads[1][0][~counts].any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_if_no_target_counts_there_is_no_loss(reduction):
    *tensors, targets = example()
    loss = vocabulary_loss(*tensors, targets - 11, reduction=reduction, chunk=4)
    assert loss == 0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, tensors))


def test_a_target_that_is_no_word_is_refused():
    *tensors, targets = example()
    targets[3] = 11
    with pytest.raises(RuntimeError, match="out of bounds"):
        vocabulary_loss(*tensors, targets)


def test_what_is_not_finite_shows():
    features, *rest = example()
    with torch.no_grad():
        features[2, 1] = torch.nan
    assert vocabulary_loss(features, *rest, chunk=2).isnan()


# ---------------------------------------------------------------- the LSTM


def test_the_paper_s_lstm_has_this_many_parameters():
    with torch.device("meta"):
        model = WordLSTM()
    of_lstm = 2 * (4 * 200 * (200 + 200) + 2 * 4 * 200)
    assert sum(p.numel() for p in model.parameters()) == 2 * 33_278 * 200 + 33_278 + of_lstm == 13_987_678


class Example(nn.Module):
    """RNNModel of word_language_model with an LSTM, in its layout: time first."""

    def __init__(self, words, embedding, width, layers, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(words, embedding)
        self.rnn = nn.LSTM(embedding, width, layers, dropout=dropout)
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)), hidden


def test_first_weights_and_outputs_are_word_language_model_s():
    sizes = 50, 7, 6, 3, 0.2
    torch.manual_seed(1111)
    theirs = Example(*sizes)
    torch.manual_seed(1111)
    ours = WordLSTM(*sizes)
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))
    assert ours.encoder.weight.abs().max() <= 0.1
    assert ours.decoder.bias.abs().max() == 0
    tokens = torch.randint(50, (4, 9))
    hidden = tuple(torch.randn(3, 4, 6) for _ in range(2))
    for mode in (False, True):  # with dropout too: a CPU draws the same numbers in the same order
        theirs.train(mode)
        ours.train(mode)
        torch.manual_seed(5)
        logits, after = theirs(tokens.t(), hidden)
        torch.manual_seed(5)
        features, ours_after = ours(tokens, hidden)
        assert features.shape == (4, 9, 6)
        assert torch.allclose(ours.logits(features), logits.transpose(0, 1), atol=1e-6)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(after, ours_after, strict=True))
    # on a GPU nn.LSTM uses cuDNN's dropout, which ignores the seed
    assert all(layer.dropout == 0 for layer in ours.rnn)


def tiny(dropout=0.0, words=23):
    torch.manual_seed(0)
    return WordLSTM(words, 6, 5, 2, dropout).double()


def test_hidden_state_carried_over_windows_is_one_long_pass():
    model, rows = tiny(), streams(torch.randint(23, (4 * 53,)), 4)
    features, last = model(rows[:, :-1], model.start(4))
    hidden, parts, losses = None, [], 0
    for i in range(windows(rows, 7)):
        inputs, targets = window(rows, i, 7)
        part, hidden = model(inputs, hidden)
        parts.append(part)
        losses += model.loss(part, targets, reduction="sum", chunk=5)
    assert [p.shape[1] for p in parts] == [7] * 7 + [3]
    assert torch.allclose(torch.cat(parts, 1), features, rtol=0, atol=1e-13)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(hidden, last, strict=True))
    whole = cross_entropy(model.logits(features).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    assert torch.allclose(losses, whole, rtol=1e-12)
    # nothing was detached: gradients flow through all windows too
    wanted, found = (torch.autograd.grad(loss, list(model.parameters())) for loss in (whole, losses))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-11) for a, b in zip(wanted, found, strict=True))


def test_detached_hidden_states_end_gradients_and_streams_are_computed_apart():
    model, tokens = tiny(), torch.randint(23, (6, 4))
    hidden = model(tokens)[1]
    features, after = model(tokens, tuple(h.detach() for h in hidden))
    for rows in (slice(0, 2), slice(2, 6)):  # as for two workers
        part, part_after = model(tokens[rows], tuple(h[:, rows] for h in hidden))
        assert torch.allclose(part, features[rows], rtol=0, atol=1e-14)
        assert all(torch.allclose(a, b[:, rows], rtol=0, atol=1e-14) for a, b in zip(part_after, after, strict=True))
    loss = features.sum() + after[0].sum()
    found = torch.autograd.grad(loss, hidden, allow_unused=True)
    assert found == (None, None)


def test_dropout_is_a_function_of_torch_s_seed_alone():
    model, tokens = tiny(0.2), torch.randint(23, (3, 5))
    assert draws_numbers(model)
    seen = []
    for key in (1, 2, 1):
        rng.seed_torch(key, rng.DROPOUT)
        seen.append(model(tokens)[0])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    assert 0.05 < (seen[0] == 0).double().mean() < 0.5
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    assert not draws_numbers(model)


def draws_numbers(model):
    from sngm import Task

    class Words(Task):
        pass_size = 1

    return draws(Words(), model)


def test_dropout_falls_on_the_embedding_between_layers_and_on_the_output():
    model = tiny(0.5)
    places = []
    model.drop.register_forward_hook(lambda _, given, __: places.append(given[0].shape[-1]))
    model(torch.zeros(2, 3, dtype=torch.int64))
    assert places == [6, 5, 5]


def test_the_loss_of_a_model_is_the_mean_over_its_targets():
    model, tokens, targets = tiny(), torch.randint(23, (4, 9)), torch.randint(23, (4, 9))
    features = model(tokens)[0]
    for reduction in ("mean", "sum"):
        wanted = cross_entropy(model.logits(features).flatten(0, 1), targets.flatten(), reduction=reduction)
        assert torch.allclose(model.loss(features, targets, reduction=reduction, chunk=7), wanted, rtol=1e-12)
    with pytest.raises(ValueError, match=r"targets must be of shape \(4, 9\), got \(9, 4\)"):
        model.loss(features, targets.t())


def test_wrong_hidden_states_are_refused():
    model, tokens = tiny(), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="argument 2"):
        model(tokens, tuple(torch.zeros(1, 3, 5).double() for _ in range(2)))  # one layer, not two
    with pytest.raises(RuntimeError, match="Expected hidden"):
        model(tokens, tuple(torch.zeros(2, 4, 5).double() for _ in range(2)))  # four streams, not three
    with pytest.raises(IndexError):
        model(tokens + 23)


def test_autocast_and_low_precision_on_a_cpu():
    model = copy.deepcopy(tiny()).float()
    tokens, targets = torch.randint(23, (2, 3, 8))
    wanted = model.loss(model(tokens)[0], targets)
    with torch.autocast("cpu", torch.bfloat16):
        features, hidden = model(tokens, model.start(3))
        loss = model.loss(features, targets)
        model(tokens, hidden)
    loss.backward()
    assert {h.dtype for h in hidden} == {torch.float32}
    assert torch.allclose(loss, wanted, rtol=0.01)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_it_learns_a_text_that_repeats():
    model, rows = tiny(0.1), streams(torch.arange(23).repeat(40), 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(6):
        hidden = None
        for i in range(windows(rows, 10)):
            inputs, targets = window(rows, i, 10)
            features, hidden = model(inputs, hidden)
            hidden = tuple(h.detach() for h in hidden)
            optimizer.zero_grad()
            loss = model.loss(features, targets)
            loss.backward()
            optimizer.step()
    assert loss < 1.5  # guessing gives 3.1


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_seeds_reach_all_dropout_and_the_loss_is_torch_s():
    model = tiny(0.2).float().cuda()
    tokens, targets = torch.randint(23, (2, 3, 8), device="cuda")
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            seen = []
            for key in (1, 2, 1):
                rng.seed_torch(key, rng.DROPOUT)
                features, hidden = model(tokens)
                seen.append(model.loss(features, targets, chunk=5))
            assert seen[0] == seen[2] != seen[1]
            assert {h.dtype for h in hidden} == {torch.float32}
            wanted = cross_entropy(model.logits(features).flatten(0, 1), targets.flatten())
            assert torch.allclose(seen[2], wanted, rtol=1e-5 if dtype is None else 0.02)
        seen[2].backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
