"""The GPT task: the decoder compared with plain algebra, every token scored once, scores by hand, and runs."""

import copy
import math
import random
from pathlib import Path

import pytest
import torch
from console import refused, sngm
from runs import assert_compiled_is_eager, assert_near_end, assert_same_end, metrics, ranks, run
from torch import nn
from torch.nn.functional import cross_entropy

from sngm import tasks
from sngm.data.wikitext import load_wikitext2, load_wikitext2_tokens
from sngm.errors import Interrupted
from sngm.models.gpt import GPT
from sngm.tasks import gpt
from sngm.training import resolve
from sngm.training.batchnorm_stats import draws
from sngm.training.build import build_optimizer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not hold the official words", "ignore:mkldnn_matmul failed")
SMALL = {"vocabulary": 280, "context": 16, "width": 8, "layers": 2, "heads": 2}
LINE = "train wikitext2-gpt --device cpu --data-dir data " + " ".join(f"--set {k}={v}" for k, v in SMALL.items())


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Write a text of 20 words that are not ASCII, in which each word depends on the previous one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SNGM_DATA", raising=False)
    folder = tmp_path / "data" / "wikitext-2"
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for name, lines in (("train", 60), ("valid", 12), ("test", 13)):
        words = [0]
        while len(words) < 10 * lines:
            words.append((words[-1] + draw.choice([1, 1, 2])) % 20)
        text = [" ".join(f"wé{word}" for word in words[i : i + 10]) for i in range(0, len(words), 10)]
        (folder / f"{name}.txt").write_text(" \n".join(text))  # without a line break at the end


def config(method="sngm", **given):
    usual = {"lr": 0.1, "batch": 4, "epochs": 2, "precision": "float64", "warmup": 0.5}
    return resolve("wikitext2-gpt", method, task_settings=SMALL | given.pop("settings", {}), **(usual | given))


def tiny(dropout=0.0):
    return GPT(tokens=23, width=8, layers=2, heads=2, dropout=dropout).double()


# ---------------------------------------------------------------- the decoder


def test_the_default_decoder_has_ten_million_parameters_and_one_matrix_for_embedding_and_logits():
    model = GPT()
    assert sum(p.numel() for p in model.parameters()) == 9_998_400
    assert [name for name, p in model.named_parameters() if 8192 in p.shape] == ["embedding.weight"]
    for name, p in model.named_parameters():
        ends = name.split(".")[-2] in ("out", "down")
        wanted = 0.02 / math.sqrt(12) if ends else 0.02
        assert (p == 1).all() if "norm" in name else p.std().item() == pytest.approx(wanted, rel=0.02), name


def test_logits_are_products_with_the_embedding():
    model, tokens = tiny(), torch.randint(23, (2, 5))
    features = []
    model.norm.register_forward_hook(lambda module, inputs, output: features.append(output))
    logits = model(tokens)
    torch.testing.assert_close(logits, features[0] @ model.embedding.weight.T)


def test_no_logit_depends_on_a_later_token():
    model = tiny()
    tokens = torch.randint(23, (1, 9))
    before = model(tokens)
    for t in range(9):
        other = tokens.clone()
        other[0, t] = (other[0, t] + 1) % 23
        changed = (model(other) - before).abs().amax(-1)[0]
        assert (changed[:t] < 1e-14).all()
        assert (changed[t:] > 1e-9).all()


def by_definition(model, tokens):
    """Return the logits by plain algebra, one sample and one head at a time, with rotations as complex numbers."""
    p = dict(model.named_parameters())

    def norm(x, gain):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    def rotate(x):
        half = x.shape[1] // 2
        frequencies = torch.tensor([10_000 ** (-i / half) for i in range(half)], dtype=torch.float64)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angles)
        return torch.cat([turned.real, turned.imag], 1)

    found = []
    for row in tokens:
        x = p["embedding.weight"][row]
        for i in range(len(model.blocks)):
            of = {name.removeprefix(f"blocks.{i}."): t for name, t in p.items() if name.startswith(f"blocks.{i}.")}
            y = norm(x, of["norm1.weight"])
            heads = []
            for own in torch.arange(x.shape[1]).chunk(model.blocks[i].heads):
                q, k, v = (y @ of[f"{name}.weight"][own].T for name in ("query", "key", "value"))
                scores = rotate(q) @ rotate(k).T / math.sqrt(len(own))
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).exp()
                heads.append(scores / scores.sum(1, keepdim=True) @ v)
            x = x + torch.cat(heads, 1) @ of["out.weight"].T
            y = norm(x, of["norm2.weight"]) @ of["up.weight"].T
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            x = x + y @ of["down.weight"].T
        found.append(norm(x, p["norm.weight"]) @ p["embedding.weight"].T)
    return torch.stack(found)


def test_the_forward_pass_is_its_definition():
    model, tokens = tiny(), torch.randint(23, (3, 11))
    with torch.no_grad():
        for p in model.parameters():  # larger weights, so that every part matters
            p.copy_(torch.randn_like(p))
    torch.testing.assert_close(model(tokens), by_definition(model, tokens), rtol=1e-10, atol=1e-10)


def test_the_loss_is_the_cross_entropy_of_the_targets_that_are_not_negative():
    model, other = tiny(), tiny()
    other.load_state_dict(model.state_dict())
    tokens, targets = torch.randint(23, (2, 3, 7))
    targets[1, 4:] = -1
    for reduction in ("mean", "sum"):
        loss = model(tokens, targets, reduction=reduction)
        wanted = cross_entropy(other(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    loss.backward()
    wanted.backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"targets must be of shape \(3, 7\), got \(3, 6\)"):
        model(tokens, targets[:, 1:])


def test_lower_precisions_are_near_float64():
    model, tokens = tiny(), torch.randint(23, (2, 12))
    wanted = model(tokens)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            autocast = copy.deepcopy(model).float()(tokens)
        for found in (autocast, copy.deepcopy(model).to(dtype)(tokens)):
            assert found.dtype == dtype
            assert (found - wanted).norm() < tolerance * wanted.norm()


def test_dropout_is_in_training_only_and_is_known_to_draw_random_numbers():
    tokens = torch.randint(23, (2, 6))
    task = tasks.build("wikitext2-gpt", SMALL)
    for dropout in (0.0, 0.5):
        model = tiny(dropout)
        assert draws(task, model) == (dropout > 0) == (not torch.equal(model(tokens), model(tokens)))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"layers": 10**8}, "layers must be at most 1,000, got 100,000,000"),
        ({"width": 30, "heads": 4}, "width must be a multiple of 2 \\* heads = 8, got 30"),
        ({"dropout": 1.0}, "dropout must be >= 0 and < 1, got 1.0"),
    ],
)
def test_sizes_that_make_no_decoder_are_named(sizes, words):
    with pytest.raises(ValueError, match=words):
        GPT(**sizes)


# ---------------------------------------------------------------- windows and scores


@pytest.mark.parametrize("context", [1, 7, 16, 700])
def test_every_token_is_scored_once_after_the_tokens_before_it(context):
    task = tasks.build("wikitext2-gpt", SMALL | {"context": context}, Path("data"))
    corpus, words, splits = load_wikitext2_tokens(Path("data"), 280), load_wikitext2(Path("data")), task.data()
    for text, samples, name in ((corpus.valid, splits.validation, "valid"), (corpus.test, splits.test, "test")):
        inputs, targets, sizes, starts = samples.tensors
        content = Path(f"data/wikitext-2/{name}.txt").read_text() + "\n"
        assert corpus.vocabulary.decode(targets[targets >= 0].tolist()) == content
        stream = torch.cat([text.tokens[-1:], text.tokens])
        assert torch.equal(inputs.flatten()[: len(text.tokens)], stream[:-1])
        assert (targets.flatten()[len(text.tokens) :] == -1).all()
        assert (int(sizes.sum()), int(starts.sum())) == (len(content.encode()), len(getattr(words, name)))
        assert sizes.tolist() == [
            sum(len(corpus.vocabulary.tokens[token]) for token in row if token >= 0) for row in targets.tolist()
        ]
    inputs, targets = splits.train.tensors
    assert len(inputs) == len(corpus.train.tokens) // context
    assert torch.equal(targets.flatten(), corpus.train.tokens[: inputs.numel()])


@pytest.mark.parametrize("vocabulary", [256, 280])
def test_scores_of_a_model_that_guesses_by_hand(vocabulary):
    """All tokens have the probability 1 / vocabulary: with 256 tokens that is 8 bits per byte."""
    task = tasks.build("wikitext2-gpt", SMALL | {"vocabulary": vocabulary}, Path("data"))
    model = task.model().double()
    nn.init.zeros_(model.embedding.weight)
    test = task.data().test
    scores = task.evaluate(model, [test[torch.arange(len(test))]])
    content = Path("data/wikitext-2/test.txt").read_text() + "\n"
    words = len(content.split()) + content.count("\n")
    tokens, size = len(load_wikitext2_tokens(Path("data"), vocabulary).test.tokens), len(content.encode())
    assert (words, tokens == size) == (130 + 13, vocabulary == 256)
    assert scores["bits_per_byte"] == pytest.approx(math.log2(vocabulary) * tokens / size, rel=1e-12)
    assert scores["word_perplexity"] == pytest.approx(vocabulary ** (tokens / words), rel=1e-12)
    assert scores["token_perplexity"] == pytest.approx(vocabulary, rel=1e-12)
    assert scores["loss"] == pytest.approx(math.log(vocabulary), rel=1e-12)


def test_scores_do_not_depend_on_batches_or_passes(monkeypatch):
    task = tasks.build("wikitext2-gpt", SMALL, Path("data"))
    model, test = task.model().double(), task.data().test
    inputs, targets = test.tensors[:2]
    log_p = torch.log_softmax(model(inputs), -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    wanted = -log_p[targets >= 0].sum().item() / math.log(2) / int(test.tensors[2].sum())
    for size, most in ((1, 64), (3, 2), (len(test), 64), (len(test), 1)):
        monkeypatch.setattr(gpt, "TEST_PASS", most)
        batches = [test[indices] for indices in torch.arange(len(test)).split(size)]
        assert task.evaluate(model, batches)["bits_per_byte"] == pytest.approx(wanted, rel=1e-12)


def test_a_diverged_model_has_an_infinite_perplexity():
    task = tasks.build("wikitext2-gpt", SMALL, Path("data"))
    model, test = task.model().double(), task.data().test
    with torch.no_grad():
        model.embedding.weight.normal_(std=1e4)
    assert task.evaluate(model, [test[torch.arange(len(test))]])["word_perplexity"] == math.inf


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_resumed_run_ends_bit_for_bit_as_an_unbroken_one(tmp_path, dropout):
    wanted = config(precision="float32", settings={"dropout": dropout})
    data = {"data_dir": tmp_path / "data"}
    run(tmp_path / "whole", wanted, **data)
    with pytest.raises(Interrupted):  # in the second epoch of 12 steps
        run(tmp_path / "cut", wanted, stop_at=17, **data)
    run(tmp_path / "cut", wanted, **data)
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


def test_micro_batches_and_workers_take_the_same_steps(tmp_path):
    for workers, micro in ((1, 4), (2, 1)):
        wanted = config(workers=workers, micro=micro, epochs=1)
        run(tmp_path / f"{workers}-{micro}", wanted, data_dir=tmp_path / "data", pass_size=2)
    assert_near_end(tmp_path / "2-1", tmp_path / "1-4", 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["", "--shard"])
def test_two_processes_train_and_score_as_one(tmp_path, shard):
    line = f"{LINE} --method sngm --lr 0.1 --batch 4 --epochs 1 --workers 2 --precision float64"
    assert sngm(f"{line} --out one").code == 0
    assert ranks(2, *line.split(), *shard.split(), "--out", "two", log=tmp_path / "log") == [0, 0]
    for ours, theirs in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler instantiates an autograd function
def test_compiled_steps_compute_the_same(tmp_path, monkeypatch):
    assert_compiled_is_eager(monkeypatch, tmp_path, config(epochs=1), data_dir=tmp_path / "data")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adamw", "lamb", "sngm", "spectral-sngm"])
def test_each_method_learns_at_the_middle_of_its_grid(tmp_path, method):
    line = LINE.replace("width=8", "width=32")
    found = sngm(f"{line} --method {method} --batch 4 --epochs 12 --json --out run")
    assert found.code == 0, found.err
    assert found.json["result"]["test_token_perplexity"] < 8  # without context: 27


@pytest.mark.parametrize(("settings", "ball"), [({}, "rows"), ({"ball": "spectral"}, "spectral")])
def test_spectral_sngm_normalises_the_rows_of_the_embedding_unless_told_otherwise(settings, ball):
    model = GPT(tokens=23, width=8, layers=1, heads=2)
    optimizer = build_optimizer(config("spectral-sngm", method_settings=settings), model)
    balls = {id(p): group["ball"] for group in optimizer.param_groups for p in group["params"]}
    assert len(balls) == len(list(model.parameters()))
    assert balls[id(model.embedding.weight)] == ball
    assert balls[id(model.blocks[0].query.weight)] == settings.get("ball")


def test_a_run_of_one_epoch_is_not_all_warm_up():
    assert resolve("wikitext2-gpt", "sngm", lr=0.1, epochs=1).warmup == 0.5
    assert resolve("wikitext2-gpt", "sngm", lr=0.1, epochs=10).warmup == 1.0
    assert resolve("wikitext2-gpt", "sngm", lr=0.1, epochs=1, warmup=1.0).warmup == 1.0


def test_a_dry_run_shows_tokens_and_bytes():
    plan = sngm(f"{LINE} --lr 1 --batch 4 --dry-run --json").json
    corpus = load_wikitext2_tokens(Path("data"), 280)
    assert plan["vocabulary"] == 280
    assert plan["tokens"]["train"] == len(corpus.train.tokens)
    assert plan["bytes"]["test"] == len(Path("data/wikitext-2/test.txt").read_bytes()) + 1
    assert plan["steps_per_epoch"] == len(corpus.train.tokens) // 16 // 4
    assert "embeddings" not in plan
    plan = sngm(f"{LINE} --lr 0.1 --batch 4 --method spectral-sngm --dry-run --json").json
    assert plan["embeddings"] == {"parameters": 280 * 8, "ball": "rows"}


def test_what_is_wrong_is_said():
    refused(sngm("train wikitext2-gpt --device cpu --data-dir nowhere"), "put wikitext-2/{train.txt,", code=3)
    line = "train wikitext2-gpt --device cpu --data-dir data --set"
    most = len(load_wikitext2_tokens(Path("data"), 280).train.tokens)
    refused(sngm(LINE.replace("=16", f"={most + 1}")), f"context must be at most {most:,}", f"got {most + 1}")
    refused(sngm(f"{line} context=0"), "context must be at least 1, got 0")
    refused(sngm(f"{line} vocabulary=255"), "vocabulary must be at least 256")
    refused(sngm(line.removesuffix(" --set")), "vocabulary must be at most", "got 8192")
    refused(sngm(LINE.replace("heads=2", "heads=3")), "width must be a multiple of 2 * heads = 6, got 8")
    refused(sngm(f"{LINE} --label-smoothing 0.1"), "--label-smoothing")
    Path("data/wikitext-2/valid.txt").write_text("")
    refused(sngm(LINE), "valid.txt is broken: it has no words in 0 bytes", code=3)


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_captured_and_compiled_steps_on_a_gpu_are_near_eager_ones(tmp_path, precision):
    line = f"{LINE.replace('cpu', 'cuda')} --method sngm --lr 0.01 --batch 32 --epochs 1 --precision {precision}"
    for step in ("eager", "captured", "compiled+captured"):
        found = sngm(f"{line} --step {step} --json --out {step.replace('+', '-')}")
        assert found.code == 0, found.err
        assert found.json["timing"]["step"] == step
    losses = [metrics(tmp_path / step)[0]["train_loss"] for step in ("eager", "captured", "compiled-captured")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-2 if precision == "bfloat16" else 1e-4)
