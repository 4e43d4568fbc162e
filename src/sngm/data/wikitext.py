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
from .data_dirs import data_roots, missing
from .fingerprint import fingerprint

FOLDER = "wikitext-2"
SPLITS = ("train", "valid", "test")
FORMS = (  # the files of pytorch/examples, and of the official archive: the same text by other names
    tuple(f"{split}.txt" for split in SPLITS),
    tuple(f"wiki.{split}.tokens" for split in SPLITS),
)
END = "<eos>"  # stands at the end of each line
TOKENS = {"train": 2_088_628, "valid": 217_646, "test": 245_569}  # as published
WORDS = 33_278
BPTT = 35  # tokens that a window looks back, in word_language_model


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The words of each split, int64, as their places in `words`, which are in order of first appearance."""

    train: Tensor
    valid: Tensor
    test: Tensor
    words: tuple[str, ...]


def find_wikitext2(root: Path | None) -> list[Path]:
    """The files of train, valid and test: in wikitext-2 in one of the data folders, or in the data folder itself.

    Nothing is read; :class:`DataMissing` says what is not there.
    """
    lacking: list[str] = []
    for place in data_roots(root):
        for folder in (place / FOLDER, place):
            for names in FORMS:
                absent = [name for name in names if not (folder / name).is_file()]
                if not absent:
                    return [folder / name for name in names]
                # a train.txt alone may be of any dataset
                if len(absent) < len(names) and (folder.name == FOLDER or names == FORMS[1]):
                    lacking.append(f"{folder} lacks {', '.join(absent)}")
    if lacking:
        raise DataMissing(f"{'; '.join(lacking)}; put the files there that belong to those")
    raise missing(
        "WikiText-2",
        root,
        [
            f"{FOLDER}/{{{','.join(FORMS[0])}}} (from word_language_model/data of github.com/pytorch/examples)",
            f"{FOLDER}/{{{','.join(FORMS[1])}}} (from the official wikitext-2-v1.zip)",
        ],
    )


def load_wikitext2(root: Path | None = None) -> Corpus:
    """All three splits, tokenised as word_language_model does.

    Words are what stands between white space, with `<eos>` after each line, empty ones too. Case is kept. The
    vocabulary is that of train, valid and test together. Files with other counts than the official ones are read with
    a warning: they may be a sample made for a trial, or the raw form, which is another dataset.

    Args:
        root: the folder that holds wikitext-2, or its files; None: see :func:`sngm.data.data_dirs.data_roots`.
    """
    paths = find_wikitext2(root)
    return _load(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths))


@functools.lru_cache(maxsize=1)
def _load(files: tuple[tuple[Path, int, int], ...]) -> Corpus:
    """Once for files of this size and age: a study asks for them for each of its runs."""
    paths = [path for path, _, _ in files]
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__  # a new word's number: how many were known before it
    train, valid, test = (_numbered(_words(path), numbers) for path in paths)
    counts = dict(zip(SPLITS, map(len, (train, valid, test)), strict=True))
    odd = [f"{path.name} {n:,}" for path, (split, n) in zip(paths, counts.items(), strict=True) if n != TOKENS[split]]
    if len(numbers) != WORDS:
        odd.append(f"vocabulary {len(numbers):,}")
    if odd:
        warnings.warn(f"{paths[0].parent} does not hold the official words: {', '.join(odd)}", stacklevel=3)
    return Corpus(train, valid, test, tuple(numbers))


def _words(path: Path) -> list[str]:
    try:
        text = path.read_text("utf-8-sig")  # the mark that some editors put at the start is no word
    except UnicodeDecodeError as error:
        raise _broken(path, f"it is not UTF-8 at byte {error.start:,}") from error
    # Read as text, \r\n and \r have become \n. Other breaks, such as U+2028, are white space and end no line.
    lines = text.removesuffix("\n").split("\n") if text else []
    if not any(map(str.strip, lines)):
        raise _broken(path, f"it has no words in {path.stat().st_size:,} bytes")
    return f" {END} ".join([*lines, ""]).split()


def _numbered(words: list[str], numbers: defaultdict[str, int]) -> Tensor:
    return torch.from_numpy(np.fromiter(map(numbers.__getitem__, words), np.int64, len(words)))


def _broken(path: Path, why: str) -> DataMissing:
    return DataMissing(f"{path} is broken: {why}; put the official file there")


def streams(tokens: Tensor, batch: int) -> Tensor:
    """The text as so many streams of equal length, one a row: a view of shape (batch, length).

    Row b holds the tokens from b * length on. The last ``len(tokens) % batch`` are dropped. Where workers share a
    batch each holds neighbouring rows, so ``streams(tokens, batch)[piece]`` is what a piece of a
    :class:`sngm.training.batch_plan.BatchPlan` reads, at all steps of an epoch.

    >>> streams(torch.arange(11), 3)
    tensor([[0, 1, 2],
            [3, 4, 5],
            [6, 7, 8]])
    """
    if tokens.ndim != 1:
        raise UsageError(f"tokens must be one text, a tensor of one dimension; got shape {tuple(tokens.shape)}")
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


def windows(rows: Tensor, bptt: int = BPTT) -> int:
    """How many windows the streams have: the steps of an epoch.

    >>> windows(torch.zeros(20, 104_431))  # the training set at batch 20
    2984
    """
    if bptt < 1:
        raise UsageError(f"bptt must be at least 1, got {bptt}")
    return math.ceil((rows.shape[1] - 1) / bptt)


class Text:
    """A text that is read in windows of `bptt` tokens, by as many streams as a batch has samples."""

    def __init__(self, tokens: Tensor, bptt: int = BPTT) -> None:
        self.tokens, self.bptt = tokens, bptt

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self.tokens.device

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, indices: Tensor) -> tuple[Tensor, ...]:
        return (self.tokens[indices],)

    def fingerprint(self) -> str:
        """What tells this text from others."""
        return fingerprint([self.tokens])

    def in_streams(self, batch: int) -> Windows:
        """What an epoch reads with this batch."""
        return Windows(streams(self.tokens, batch), self.bptt)


class Windows:
    """The windows of streams, in the order in which they are read: sample ``i * streams + s`` is window i of stream s.

    A window is inputs and targets of `bptt` tokens; a target is the token after its input. A stream's first token is no
    target and its last no input. The last window holds what is left, from 1 to `bptt` tokens, and -1 for targets from
    there on: it is kept, as in word_language_model, and its mean loss is one step as any other's.

    >>> inputs, targets = Windows(streams(torch.arange(12), 2), bptt=3)[torch.tensor([2, 3])]
    >>> inputs.tolist(), targets.tolist()
    ([[3, 4, 4], [9, 10, 10]], [[4, 5, -1], [10, 11, -1]])
    """

    def __init__(self, rows: Tensor, bptt: int) -> None:
        self.tensors, self.bptt = (rows,), bptt
        self.streams, self.length = rows.shape
        self.count = windows(rows, bptt)

    @property
    def device(self) -> torch.device:
        """Where the streams are."""
        return self.tensors[0].device

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

    def fingerprint(self) -> str:
        """What tells these windows from others."""
        return fingerprint(self.tensors)

    def to(self, device: torch.device | str) -> Windows:
        """The same windows on a device."""
        return Windows(self.tensors[0].to(device), self.bptt)
