"""WikiText-2 as numbered words, cut into streams and windows as pytorch/examples' word_language_model does."""

from __future__ import annotations

import functools
import math
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import DataMissing, UsageError
from .data_dirs import find_folder
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
    return _load(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths))


@functools.lru_cache(maxsize=1)
def _load(files: tuple[tuple[Path, int, int], ...]) -> Corpus:
    """Load files, and cache the result by size and modification time, because every run of a study loads them."""
    paths = [path for path, _, _ in files]
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__  # a new word gets the next number
    splits: list[Tensor] = []
    for path in paths:
        words = _words(path)
        splits.append(torch.from_numpy(np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))))
    counts = {path.name: (len(split), TOKENS[name]) for path, name, split in zip(paths, SPLITS, splits, strict=True)}
    odd = [
        f"{name} {n:,}" for name, (n, wanted) in (counts | {"vocabulary": (len(numbers), WORDS)}).items() if n != wanted
    ]
    if odd:
        warnings.warn(f"{paths[0].parent} does not hold the official words: {', '.join(odd)}", stacklevel=3)
    train, valid, test = splits
    return Corpus(train, valid, test, tuple(numbers))


def _words(path: Path) -> list[str]:
    try:
        text = path.read_text("utf-8-sig")  # without the byte order mark that some editors write
    except UnicodeDecodeError as error:
        raise DataMissing(
            f"{path} is broken: it is not UTF-8 at byte {error.start:,}; put the official file there"
        ) from error
    # read_text() turns \r\n and \r into \n. Other line breaks, such as U+2028, are treated as white space.
    lines = text.removesuffix("\n").split("\n") if text else []
    if not text.strip():
        raise DataMissing(
            f"{path} is broken: it has no words in {path.stat().st_size:,} bytes; put the official file there"
        )
    return f" {END} ".join([*lines, ""]).split()


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
    if tokens.ndim != 1:
        raise UsageError(f"tokens must be a tensor of one dimension, got shape {tuple(tokens.shape)}")
    if batch < 1:
        raise UsageError(f"batch must be at least 1, got {batch}")
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
        """Return the samples of an epoch with this batch size."""
        return Windows(streams(self.tensors[0], batch), self.bptt)


class Windows(Tensors):
    """The windows of streams in reading order: sample ``i * streams + s`` is window i of stream s.

    A window has `bptt` tokens as inputs and `bptt` tokens as targets; a target is the token after its input. The first
    token of a stream is never a target, and the last is never an input. The last window holds the remaining 1 to `bptt`
    tokens, padded with targets of -1. As in word_language_model, the mean loss of this window is one step, like that of
    any other window.

    >>> inputs, targets = Windows(streams(torch.arange(12), 2), bptt=3)[torch.tensor([2, 3])]
    >>> inputs.tolist(), targets.tolist()
    ([[3, 4, 4], [9, 10, 10]], [[4, 5, -1], [10, 11, -1]])
    >>> Windows(torch.zeros(20, 104_431), bptt=35).count  # the training set at batch 20
    2984
    """

    def __init__(self, rows: Tensor, bptt: int) -> None:
        if bptt < 1:
            raise UsageError(f"bptt must be at least 1, got {bptt}")
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
