"""Byte-pair vocabularies: compared with a naive trainer, exact decoding, and their files."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sngm.data import byte_pairs
from sngm.data.byte_pairs import PIECES, BytePairs, load_byte_pairs, train_byte_pairs
from sngm.errors import UsageError

TEXT = "a rose is a rose , is a rose .\n\n the thorns of the roses are thorns \n aaa aaaa aaaaa\n"
MERGES = train_byte_pairs(TEXT, 280).merges


def naive(text, size):
    """Return the merges of a trainer that counts all pairs again after each merge."""
    words = [(list(piece.encode()), n) for piece, n in Counter(PIECES.findall(text)).items()]
    merges = []
    while len(merges) < size - 256:
        counts = Counter()
        for word, n in words:
            for i in range(len(word) - 1):
                counts[word[i], word[i + 1]] += n
        if not counts:
            return None
        merges.append(min(counts, key=lambda pair: (-counts[pair], pair)))
        for word, _ in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == merges[-1]:
                    word[i : i + 2] = [255 + len(merges)]
                i += 1
    return merges


@settings(deadline=None)
@given(st.text(st.sampled_from("aab \n"), max_size=40), st.integers(256, 280))
def test_merges_are_those_of_a_naive_trainer(text, size):
    wanted = naive(text, size)
    if wanted is None:
        with pytest.raises(UsageError, match="vocabulary must be at most"):
            train_byte_pairs(text, size)
    else:
        assert train_byte_pairs(text, size).merges == wanted


def test_merges_by_hand_and_for_a_longer_text():
    assert train_byte_pairs("abab ab", 258).merges == [
        (97, 98),
        (32, 256),
    ]
    assert train_byte_pairs(TEXT * 3, 280).merges == naive(TEXT * 3, 280)


@settings(deadline=None)
@given(st.text())
def test_any_text_is_decoded_as_it_was(text):
    vocabulary = BytePairs(MERGES)
    tokens = vocabulary.encode(text)
    assert b"".join(vocabulary.tokens[token] for token in tokens) == text.encode()
    assert vocabulary.decode(tokens) == text


@settings(deadline=None)
@given(st.text(st.sampled_from("ab é \n\t\u2028\u2800\x1c")))
def test_pieces_that_are_not_white_space_are_the_words_of_split(text):
    pieces = PIECES.findall(text)
    assert "".join(pieces) == text
    assert [piece.strip() for piece in pieces if not piece.isspace()] == text.split()


def test_a_text_is_encoded_by_its_merges_in_their_order():
    vocabulary = BytePairs([(98, 99), (97, 98), (97, 97)])
    assert vocabulary.encode("abc") == [97, 256]  # not ab, c: bc was merged first
    assert vocabulary.encode("aaaaa") == [258, 258, 97]


def test_a_vocabulary_of_impossible_size_is_an_error():
    with pytest.raises(UsageError, match="at least 256, the number of bytes, got 255"):
        train_byte_pairs(TEXT, 255)
    with pytest.raises(UsageError, match=r"at most 258 for a text of 4 bytes, got 260"):
        train_byte_pairs("abc\n", 260)
    assert len(train_byte_pairs("abc\n", 258).tokens) == 258


def test_a_vocabulary_larger_than_its_text_is_refused_before_pairs_are_counted(monkeypatch):
    monkeypatch.setattr(byte_pairs, "Counter", None)
    with pytest.raises(UsageError, match=r"at most 266, and usually far less, for a text of 10 bytes, got 1000000000"):
        train_byte_pairs("é b c d\nf", 10**9)


def test_a_vocabulary_that_takes_long_shows_progress(monkeypatch):
    monkeypatch.setattr(byte_pairs, "FIRST_LINE", -1.0)
    lines = []
    train_byte_pairs(TEXT, 280, lines.append)
    assert lines == ["making a vocabulary of 280 byte pairs: 257 so far"]


@pytest.fixture
def made(monkeypatch):
    """Return a list that gets the sizes of the vocabularies that are made."""
    sizes = []

    def train(text, size, show):
        sizes.append(size)
        return train_byte_pairs(text, size, show)

    monkeypatch.setattr(byte_pairs, "train_byte_pairs", train)
    return sizes


def test_a_vocabulary_is_made_once_per_text_and_size(made, tmp_path):
    folders = [tmp_path / "a" / "b", tmp_path / "c"]
    found = [load_byte_pairs(text, size, folders) for text in (TEXT, TEXT + "b") for size in (270, 280, 270)]
    assert made == [270, 280, 270, 280]
    assert found[0].merges == found[2].merges == train_byte_pairs(TEXT, 270).merges
    assert len(list(folders[0].iterdir())) == 4
    assert not folders[1].exists()


DAMAGE = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "another number": lambda content: content.replace(b'"97 ', b'"98 ', 1),
    "not an object": lambda content: b"[1, 2]",
    "no merges": lambda content: b"{}",
    "no digest and few merges": lambda content: b'{"merges": ["97 98"]}',
    "a late token": lambda content: b'{"merges": ["99 279"]}',
    "numbers": lambda content: b'{"merges": [5]}',
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(made, tmp_path, damage):
    load_byte_pairs(TEXT, 280, [tmp_path / "kept"])
    (path,) = (tmp_path / "kept").iterdir()
    content = path.read_bytes()
    broken = DAMAGE[damage](content)
    assert broken != content
    path.write_bytes(broken)
    assert load_byte_pairs(TEXT, 280, [tmp_path / "kept"]).merges == MERGES
    assert path.read_bytes() == content
    assert made == [280, 280]


def test_folders_that_are_not_writable_are_left_out(made, tmp_path):
    (tmp_path / "file").touch()
    unwritable, other = tmp_path / "file" / "folder", tmp_path / "other"
    for _ in range(2):
        assert len(load_byte_pairs(TEXT, 270, [unwritable]).tokens) == 270
        assert len(load_byte_pairs(TEXT, 271, [unwritable, other]).tokens) == 271
    assert made == [270, 271, 270]
