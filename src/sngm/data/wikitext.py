"""Load WikiText-2: as numbered words, read in streams as by pytorch/examples' word_language_model, or as byte pairs."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import DataMissing, UsageError
from .byte_pairs import PIECES, BytePairs, load_byte_pairs
from .data_dirs import find_folder, warn_if_odd
from .tensors import Tensors

FOLDER = "wikitext-2"
SPLITS = ("train", "valid", "test")
SOURCES = {  # the files of pytorch/examples and of the official archive have the same text under different names
    tuple(f"{split}.txt" for split in SPLITS): "word_language_model/data of github.com/pytorch/examples",
    tuple(f"wiki.{split}.tokens" for split in SPLITS): "the official wikitext-2-v1.zip",
}
END = "<eos>"  # follows each line
TOKENS = {"train": 2_088_628, "valid": 217_646, "test": 245_569}  # as published
WORDS = 33_278
BPTT = 35  # tokens of a window in word_language_model


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The text of each split as int64 indices into `words`, the vocabulary in order of first appearance."""

    train: Tensor
    valid: Tensor
    test: Tensor
    words: tuple[str, ...]


def find_wikitext2(root: Path | None) -> list[Path]:
    """Return the files of train, valid and test, from wikitext-2 in a data folder or from the data folder itself.

    Raises:
        DataMissing: a file is missing. No file is read.
    """
    wanted = [f"{FOLDER}/{{{','.join(names)}}} (from {source})" for names, source in SOURCES.items()]
    folder, index = find_folder("WikiText-2", root, [(FOLDER, names) for names in SOURCES], wanted)
    return [folder / name for name in list(SOURCES)[index]]


def load_wikitext2(root: Path | None = None) -> Corpus:
    """Return all three splits, tokenised as word_language_model does.

    Words are separated by white space, with `<eos>` after each line, including empty lines. Case is kept. The
    vocabulary has the words of all three splits. A file whose number of words differs from the official number is read
    with a warning: it may be a small sample, or the raw form of WikiText-2, which is a different dataset.

    Args:
        root: folder that holds wikitext-2, or its files; None: see :func:`sngm.data.data_dirs.data_roots`.
    """
    paths = find_wikitext2(root)
    corpus = _load(_versions(paths))
    counts = _counts(paths, [len(corpus.train), len(corpus.valid), len(corpus.test)])
    warn_if_odd(paths[0].parent, "words", counts | {"vocabulary": (len(corpus.words), WORDS)})
    return corpus


def _counts(paths: list[Path], words: list[int]) -> dict[str, tuple[int, int]]:
    """Return the number of words of each file, with the published number."""
    return {path.name: (count, TOKENS[split]) for path, count, split in zip(paths, words, SPLITS, strict=True)}


Versions = tuple[tuple[Path, int, int], ...]  # files with sizes and modification times


def _versions(paths: list[Path]) -> Versions:
    """Return the key under which the corpus of these files is cached for later runs in this process."""
    return tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


@functools.lru_cache(maxsize=1)
def _load(files: Versions) -> Corpus:
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__  # a new word gets the next number
    splits: list[Tensor] = []
    for path, _, _ in files:
        words = _words(path)
        splits.append(torch.from_numpy(np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))))
    train, valid, test = splits
    return Corpus(train, valid, test, tuple(numbers))


def _words(path: Path) -> list[str]:
    return f" {END} ".join([*_text(path).removesuffix("\n").split("\n"), ""]).split()


def _text(path: Path) -> str:
    """Return the content of a file, with a line break at its end."""
    # read_text() turns \r\n and \r into \n. Other breaks, such as U+2028, are white space and end no line.
    why = f"it has no words in {path.stat().st_size:,} bytes"
    try:
        text = path.read_text("utf-8-sig")  # without the byte order mark that some editors write
        if text.strip():
            return text if text.endswith("\n") else f"{text}\n"
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 at byte {error.start:,}"
    raise DataMissing(f"{path} is broken: {why}; put the official file there")


# ---------------------------------------------------------------- byte pairs


@dataclass(frozen=True, slots=True, eq=False)
class TokenText:
    """A text as byte-pair tokens: for each token its number, its length in bytes, and how many words begin with it.

    Words are those of :func:`load_wikitext2`. A line break counts as a word, `<eos>`.
    """

    tokens: Tensor
    sizes: Tensor
    words: Tensor

    def windows(self, context: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of shape (windows, context); a target is the token after its input.

        Each token is a target once. For the first token, the input is the last of the text, which ends in a line break.
        The last window is padded with targets of -1.
        """
        return _in_rows(self.tokens.roll(1), context, 0), _in_rows(self.tokens, context, -1)

    def counts(self, context: int) -> tuple[Tensor, Tensor]:
        """Return the number of bytes and of words in the targets of each window."""
        return _in_rows(self.sizes, context, 0).sum(1), _in_rows(self.words, context, 0).sum(1)


def _in_rows(values: Tensor, length: int, padding: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % length), value=padding).view(-1, length)


@dataclass(frozen=True, slots=True, eq=False)
class TokenCorpus:
    """The splits as byte-pair tokens of a vocabulary that was made from the training text."""

    train: TokenText
    valid: TokenText
    test: TokenText
    vocabulary: BytePairs


def load_wikitext2_tokens(root: Path | None = None, size: int = 8192) -> TokenCorpus:
    """Return all three splits as byte-pair tokens. Their bytes are those of the files, with ``\\n`` for line breaks.

    The vocabulary is stored in ``.sngm`` beside the files, or in ``~/.cache/sngm`` if ``.sngm`` is not writable.

    Args:
        root: as for :func:`load_wikitext2`.
        size: number of tokens of the vocabulary.
    """
    paths = find_wikitext2(root)
    corpus = _load_tokens(_versions(paths), size)
    words = [int(split.words.sum()) for split in (corpus.train, corpus.valid, corpus.test)]
    warn_if_odd(paths[0].parent, "words", _counts(paths, words))
    return corpus


@functools.lru_cache(maxsize=1)
def _load_tokens(files: Versions, size: int) -> TokenCorpus:
    paths = [path for path, _, _ in files]
    texts = [_text(path) for path in paths]
    folders = paths[0].parent / ".sngm", Path.home() / ".cache" / "sngm"
    vocabulary = load_byte_pairs(texts[0], size, folders)
    lengths = np.array([len(token) for token in vocabulary.tokens])
    splits: list[TokenText] = []
    for text in texts:
        pieces = PIECES.findall(text)
        encoded = vocabulary.encode_pieces(pieces)
        tokens = np.fromiter(itertools.chain.from_iterable(encoded), np.int64)
        ends = np.cumsum([len(piece) for piece in encoded])
        words = np.zeros(len(tokens), np.int64)
        words[np.append(0, ends[:-1])] = [piece.count("\n") if piece.isspace() else 1 for piece in pieces]
        splits.append(TokenText(*map(torch.from_numpy, (tokens, lengths[tokens], words))))
    train, valid, test = splits
    return TokenCorpus(train, valid, test, vocabulary)


# ---------------------------------------------------------------- streams and windows


def streams(tokens: Tensor, batch: int) -> Tensor:
    """Return the text as `batch` streams of equal length, one per row: a view of shape (batch, length).

    Row b starts at token b * length. The last ``len(tokens) % batch`` tokens are dropped. Each worker reads consecutive
    rows: for a slice `piece` of a :class:`sngm.training.batch_plan.BatchPlan`, the rows are
    ``streams(tokens, batch)[piece]``.

    >>> streams(torch.arange(11), 3)
    tensor([[0, 1, 2],
            [3, 4, 5],
            [6, 7, 8]])
    """
    length = len(tokens) // batch
    if length < 2:
        most = len(tokens) // 2
        raise UsageError(
            f"batch={batch} needs {2 * batch:,} tokens, an input and a target for each stream; there are "
            f"{len(tokens):,}" + (f", enough for batch={most}" if most else "")
        )
    return tokens[: length * batch].view(batch, length)


class Text(Tensors):
    """A text that is read in windows of `bptt` tokens; the number of parallel streams is the batch size."""

    def __init__(self, tokens: Tensor, bptt: int = BPTT) -> None:
        super().__init__(tokens)
        self.bptt = bptt

    def in_streams(self, batch: int) -> Windows:
        """Cut the text into `batch` parallel streams, and return the windows of an epoch in reading order."""
        return Windows(streams(self.tensors[0], batch), self.bptt)


class Windows(Tensors):
    """The windows of streams in reading order: sample ``i * streams + s`` is window i of stream s.

    A window has `bptt` tokens as inputs and `bptt` tokens as targets; a target is the token after its input. The first
    token of a stream is never a target, and the last is never an input. The last window holds the remaining 1 to `bptt`
    tokens, padded with targets of -1. As in word_language_model, this window makes one step with its mean loss, as any
    other window does.

    >>> inputs, targets = Windows(streams(torch.arange(12), 2), bptt=3)[torch.tensor([2, 3])]
    >>> inputs.tolist(), targets.tolist()
    ([[3, 4, 4], [9, 10, 10]], [[4, 5, -1], [10, 11, -1]])
    >>> Windows(torch.zeros(20, 104_431), bptt=35).count  # the training set at batch 20
    2984
    """

    def __init__(self, rows: Tensor, bptt: int) -> None:
        super().__init__(rows)
        self.bptt = bptt
        self.streams, self.length = rows.shape
        self.count = math.ceil((self.length - 1) / bptt)  # windows per stream, which are the steps of an epoch

    def __len__(self) -> int:
        return self.count * self.streams

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.tensors[0]
        indices = indices.to(rows.device)
        stream = (indices % self.streams)[:, None]
        at = (indices // self.streams * self.bptt)[:, None] + torch.arange(self.bptt, device=rows.device)
        last = self.length - 2  # the last token that is an input
        inside, at = at <= last, at.clamp(max=last)
        return rows[stream, at], torch.where(inside, rows[stream, at + 1], -1)
