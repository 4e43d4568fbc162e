"""Byte-pair vocabularies: make them from a text, store them in a file, and encode any text into their tokens."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path

from ..environment import is_first
from ..errors import UsageError
from ..files import read_record, write_record
from .fetch import tell

BYTES = 256  # the first tokens are the single bytes
# A piece is a word with the space before it, or white space up to that space; tokens never span two pieces. `\s` is
# the white space of str.split(), so the words are those of str.split().
PIECES = re.compile(r" ?\S+|\s+(?!\S)|\s+")
FIRST_LINE, INTERVAL = 2.0, 10.0  # seconds to the first line of progress, and between lines

Pair = tuple[int, int]
Show = Callable[[str], None]


class BytePairs:
    """A byte-pair vocabulary: 256 bytes, then one token for each merge, in the order of the merges.

    >>> vocabulary = BytePairs([(97, 98), (256, 99)])
    >>> vocabulary.encode("abcab é"), vocabulary.tokens[257]
    ([257, 256, 32, 195, 169], b'abc')
    >>> vocabulary.decode(vocabulary.encode("abcab é"))
    'abcab é'
    """

    def __init__(self, merges: Iterable[Pair]) -> None:
        self.merges = list(merges)
        self.tokens = [bytes([byte]) for byte in range(BYTES)]
        self._numbers: dict[Pair, int] = {}
        for first, second in self.merges:
            self._numbers[first, second] = len(self.tokens)
            self.tokens.append(self.tokens[first] + self.tokens[second])
        self._known: dict[str, list[int]] = {}  # pieces encoded before: a text repeats its words

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Their bytes, joined, are the text in UTF-8."""
        return [token for piece in self.encode_pieces(PIECES.findall(text)) for token in piece]

    def encode_pieces(self, pieces: Iterable[str]) -> list[list[int]]:
        """Return the tokens of each piece of a text, where pieces are matches of `PIECES`."""
        known, found = self._known, []
        for piece in pieces:
            if piece not in known:
                known[piece] = self._encode(piece.encode())
            found.append(known[piece])
        return found

    def _encode(self, piece: bytes) -> list[int]:
        tokens = list(piece)
        while len(tokens) > 1:
            number = min(self._numbers.get(pair, len(self.tokens)) for pair in pairwise(tokens))
            if number == len(self.tokens):
                break
            tokens = merged(tokens, self.merges[number - BYTES], number)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Incomplete UTF-8 characters, as at a cut, become U+FFFD."""
        return b"".join(self.tokens[token] for token in tokens).decode(errors="replace")


def merged(tokens: Sequence[int], pair: Pair, number: int) -> list[int]:
    """Return the tokens with each occurrence of a pair replaced by the token `number`, from left to right.

    >>> merged([7, 7, 7, 1], (7, 7), 9)
    [9, 7, 1]
    """
    found: list[int] = []
    for token in tokens:
        if token == pair[1] and found and found[-1] == pair[0]:
            found[-1] = number
        else:
            found.append(token)
    return found


def train_byte_pairs(text: str, size: int, show: Show = tell) -> BytePairs:
    """Make a vocabulary of `size` tokens by merging the most frequent pair of adjacent tokens, again and again.

    Of equally frequent pairs, the one with the smallest numbers is merged first, so the result depends only on the text
    and the size. Only the counts of words that contain a merged pair are computed again.

    Args:
        text: the text to count pairs in.
        size: number of tokens, at least 256.
        show: called with a line of progress after two seconds, then every ten seconds.

    Raises:
        UsageError: the size is below 256, or the text has no more pairs to merge.
    """
    if size < BYTES:
        raise UsageError(f"vocabulary must be at least {BYTES}, the number of bytes, got {size}")
    length = len(text.encode())
    if size > BYTES + length:  # each merge shortens the text by at least one token
        raise UsageError(
            f"vocabulary must be at most {BYTES + length:,}, and usually far less, for a text of {length:,} bytes, "
            f"got {size}"
        )
    counted = Counter(PIECES.findall(text))
    words, often = [list(piece.encode()) for piece in counted], list(counted.values())
    counts: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)  # words that contain a pair, or did before a merge
    for i, word in enumerate(words):
        for pair in pairwise(word):
            counts[pair] += often[i]
            where[pair].add(i)
    heap = [(-count, pair) for pair, count in counts.items()]  # may hold outdated counts, which are corrected below
    heapify(heap)
    merges: list[Pair] = []
    due = time.monotonic() + FIRST_LINE
    while len(merges) < size - BYTES:
        if not heap:
            most = BYTES + len(merges)
            raise UsageError(f"vocabulary must be at most {most:,} for a text of {length:,} bytes, got {size}")
        count, pair = heappop(heap)
        if -count != counts[pair]:
            if counts[pair]:
                heappush(heap, (-counts[pair], pair))
            continue
        number = BYTES + len(merges)
        merges.append(pair)
        new: set[Pair] = set()
        for i in where.pop(pair):
            before, after = words[i], merged(words[i], pair, number)
            words[i] = after
            for old in pairwise(before):
                counts[old] -= often[i]
            for one in pairwise(after):
                counts[one] += often[i]
                if number in one:
                    where[one].add(i)
                    new.add(one)
        for one in new:
            heappush(heap, (-counts[one], one))
        if time.monotonic() > due:
            due = time.monotonic() + INTERVAL
            show(f"making a vocabulary of {size:,} byte pairs: {number + 1:,} so far")
    return BytePairs(merges)


# ---------------------------------------------------------------- the file of a vocabulary


def load_byte_pairs(text: str, size: int, folders: Sequence[Path]) -> BytePairs:
    """Return the vocabulary of a text: read its file if one of the folders holds it, else make it and write the file.

    The name of the file has the size and a checksum of the text. A damaged file is made again.

    Args:
        text: the text that the vocabulary is made from.
        size: number of tokens.
        folders: where to search for the file. It is written to the first folder that is writable. Processes that start
            together, or that have no writable folder, each make the vocabulary; the results are equal.
    """
    checksum = hashlib.sha256(text.encode()).hexdigest()
    name = f"byte-pairs-{size}-{checksum[:16]}.json"
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # missing or damaged
            merges = [line.split() for line in read_record(folder / name)["merges"]]
            if len(merges) == size - BYTES:
                return BytePairs((int(first), int(second)) for first, second in merges)
    made = train_byte_pairs(text, size, tell if is_first() else lambda line: None)
    record = {"size": size, "text": checksum, "merges": [f"{first} {second}" for first, second in made.merges]}
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_record(folder / name, record)
            break
    return made
