"""Read Criteo's text, a click per line, from files in chunks, and parse it by array operations.

A line is a label, 13 integers and 26 categories, separated by tabs.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataMissing

Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS, CATEGORIES = 13, 26
FIELDS = 1 + INTEGERS + CATEGORIES
# A parsed line: a missing integer is 0; a key is the bytes of a category, the first in the highest bits, 0 if missing.
ROW = np.dtype([("integers", "<i8", INTEGERS), ("keys", "<u8", CATEGORIES), ("label", "u1")], align=True)

CHUNK = 1 << 23  # bytes of text that are read at once; the parsed arrays take about 10 times as much memory
DIGITS = 18  # a number of this many digits always fits into 64 bits
KEY = 8  # the most bytes of a category: 8 bytes fit into 64 bits, and Criteo's hashes have 8
PADDING = bytes(32)  # after the text, so that reading ahead stays in the array
TAB, NEWLINE, RETURN, ZERO, MINUS = b"\t\n\r0-"
# HEADS[n] is the mask of the first n bytes of a key.
HEADS = np.array([((1 << 64) - 1) ^ ((1 << (64 - 8 * n)) - 1) for n in range(KEY + 1)], np.uint64)

REASONS = (
    f"fewer than {FIELDS} fields",
    f"more than {FIELDS} fields",
    "a zero byte",
    "a label that is not 0 or 1",
    "an integer field that is no integer",
    f"an integer of more than {DIGITS} digits",
    f"a category of more than {KEY} bytes",
)
GOOD, FEW, MANY, NUL, LABEL, NUMBER, RANGE, LONG = range(8)  # GOOD, then the errors in the order of REASONS


# ---------------------------------------------------------------- from text to numbers


@dataclass(frozen=True, slots=True)
class Lines:
    """The content of a block of lines.

    Attributes:
        rows: the good lines, of the dtype `ROW`.
        missing: number of missing values in each of the 39 columns.
        verdicts: for each line, 0 if the line is good, else 1 + the index of its error in `REASONS`.
    """

    rows: Array
    missing: Array
    verdicts: Array


def parse(text: bytes) -> Lines:
    """Parse all lines of a text that ends with a newline. A line may end with CR LF; categories are any bytes but 0.

    >>> found = parse(b"1" + 13 * b"\\t-7" + 25 * b"\\tab" + b"\\t\\n" + b"oh\\n")
    >>> found.rows["label"].tolist(), found.rows["integers"][0, 0].item(), found.verdicts.tolist()
    ([1], -7, [0, 1])
    """
    bytes_ = np.frombuffer(text + PADDING, np.uint8)
    body = bytes_[: len(text)]
    marks = np.flatnonzero((body == TAB) | (body == NEWLINE))  # ends of fields
    last = np.flatnonzero(body[marks] == NEWLINE)
    ends = marks[last]  # ends of lines
    fields = np.diff(last, prepend=-1)
    verdicts = np.zeros(len(ends), np.uint8)
    verdicts[fields < FIELDS] = FEW
    verdicts[fields > FIELDS] = MANY
    if not body.all():
        verdicts[np.searchsorted(ends, np.flatnonzero(body == 0))] = NUL
    shaped = verdicts == GOOD
    starts = np.empty((int(shaped.sum()), FIELDS), np.int64)
    stops = (marks if shaped.all() else marks[np.repeat(shaped, fields)]).reshape(-1, FIELDS)
    starts[:, 0] = np.concatenate([[0], ends[:-1] + 1])[shaped]
    starts[:, 1:] = stops[:, :-1] + 1
    lengths = stops - starts
    # if the last field is empty, the byte before it is a tab, so a CR there always belongs to the line ending
    lengths[:, -1] -= bytes_[stops[:, -1] - 1] == RETURN

    labels = bytes_[starts[:, 0]] - ZERO
    found = np.full(len(starts), GOOD, np.uint8)
    found[(lengths[:, -CATEGORIES:] > KEY).any(1)] = LONG
    integers, not_a_number, too_long = _integers(bytes_, starts[:, 1 : 1 + INTEGERS], lengths[:, 1 : 1 + INTEGERS])
    found[too_long] = RANGE
    found[not_a_number] = NUMBER
    found[(lengths[:, 0] != 1) | (labels > 1)] = LABEL
    # read eight bytes from the start of each category as one number, and keep only the bytes of the category
    windows = np.lib.stride_tricks.sliding_window_view(bytes_, KEY)
    keys = windows[starts[:, -CATEGORIES:].ravel()].view(">u8").astype(np.uint64).reshape(-1, CATEGORIES)
    keys &= HEADS[np.minimum(lengths[:, -CATEGORIES:], KEY)]
    verdicts[shaped] = found
    rows, good = np.empty(len(starts), ROW), found == GOOD
    rows["integers"], rows["keys"], rows["label"] = integers, keys, labels
    return Lines(rows[good], (lengths[good, 1:] == 0).sum(0), verdicts)


def _integers(text: Array, starts: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """Return the integers of each row, and masks of the rows with an invalid integer and with one that is too long."""
    minus = (text[starts] == MINUS) & (lengths > 0)
    begins, digits = (starts + minus).ravel(), (lengths - minus).ravel()
    values, wrong = np.zeros(len(begins), np.int64), digits == 0
    wrong &= minus.ravel()
    live = np.flatnonzero(digits)
    for position in range(min(DIGITS, int(digits.max(initial=0)))):
        digit = text[begins[live] + position] - ZERO  # characters below "0" wrap to large numbers
        wrong[live] |= digit > 9
        values[live] = values[live] * 10 + digit
        live = live[digits[live] > position + 1]
    values = values.reshape(starts.shape)
    np.negative(values, out=values, where=minus)
    return values, wrong.reshape(starts.shape).any(1), (digits > DIGITS).reshape(starts.shape).any(1)


# ---------------------------------------------------------------- from files to text


def whole_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield pairs: a chunk of a file's text (plain or gzip) that ends with a newline, and the file's bytes read so far.

    A newline is added to the last line if it has none.
    """
    with open(path, "rb") as file:
        # gzip is recognised by the first bytes, because names of downloads are not reliable
        stream: Any = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        rest, chunk = b"", b" "
        while chunk:
            try:
                chunk = stream.read(CHUNK)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise DataMissing(
                    f"{path} is broken: it cannot be unpacked to its end ({error}); fetch it again or delete it"
                ) from error
            cut = chunk.rfind(b"\n") + 1
            if cut:
                yield rest + chunk[:cut], file.tell()
            rest = chunk[cut:] if cut else rest + chunk
            if len(rest) > CHUNK:
                raise DataMissing(f"{path} has a line of more than {CHUNK:,} bytes; it is not a file of Criteo's rows")
        if rest:
            yield rest + b"\n", file.tell()
