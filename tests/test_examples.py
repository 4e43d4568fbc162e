"""Outputs printed in the documentation are those of the commands above them.

Numbers, times and hashes may differ from machine to machine; the words may not. ``SNGM_WRITE_EXAMPLES=1`` writes what
the commands print into the pages.
"""

import os
import re
import shlex

import pytest
from console import DOCS, sngm

from sngm.tasks.digits import Digits

WRITE = os.environ.get("SNGM_WRITE_EXAMPLES") == "1"
EXAMPLE = re.compile(r"^```sh\n((?:sngm [^\n;#]*(?:; echo \$\?)?\n)+)```\n\n```\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def words(text: str) -> list[str]:
    """Return the words of an output, sorted, as the lines of a cell depend on numbers; without numbers and hashes."""
    text = re.sub(r"^At batch .*Welch's test.*", "At batch", text, flags=re.MULTILINE)  # numbers decide its words
    text = re.sub(r"[┏┳┓┃┡╇┩│└┴┘━─]", " ", text)
    text = re.sub(r"-(?=[0-9a-f]*\d)[0-9a-f]{8,12}\b|[~>±*]|\d[\d.,]*(e[-+]?\d+)?", " ", text)
    text = re.sub(r"\b(s|min|h|KiB|MiB|GiB|inf)\b", " ", text)  # units depend on the numbers
    return sorted(text.split())


@pytest.mark.slow
@pytest.mark.usefixtures("in_one_process")
@pytest.mark.parametrize("name", sorted(page.name for page in DOCS.glob("*.md") if EXAMPLE.search(page.read_text())))
def test_examples_print_what_the_page_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    if name == "quick-start.md" and not WRITE:  # `sngm compare` trains for a minute; only numbers depend on its epochs
        monkeypatch.setattr(Digits, "epochs", 3)
    page = DOCS / name
    text = page.read_text()
    for example in list(EXAMPLE.finditer(text)):
        out = ""
        for line in example[1].splitlines():
            command, echo, _ = line.partition("; echo $?")
            command, _, pattern = command.partition(" | grep ")
            done = sngm(command.removeprefix("sngm "))
            shown = [text for text in (done.out or done.err).splitlines() if pattern in text]
            out = "\n".join([*shown, *([str(done.code)] if echo else [])]) + "\n"
            assert done.code == 0 or echo, done.err
        if WRITE:
            lines = [line.rstrip() for line in out.strip("\n").splitlines()]
            text = text.replace(
                example[0], example[0].replace(f"```\n{example[2]}```", "```\n" + "\n".join([*lines, "```"]))
            )
        else:
            assert words(out) == words(example[2]), shlex.join(["sngm", name, example[1]])
    if WRITE:
        page.write_text(text)


def test_the_pages_have_examples():
    found = [match[1] for page in DOCS.glob("*.md") for match in EXAMPLE.finditer(page.read_text())]
    assert len(found) >= 8
