"""Words that CONTRIBUTING.md retired do not come back in the package and its pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RETIRED = {
    r"\bsinks?\b": "tracker",
    r"\bfeed(s|ing)?\b": "data loading",
    "no number any more|numbers .* that are none": "NaN or infinite",
    r"\blies? alike\b|how (it|they) lie\b": "memory layout",
    r"nobody (watches|behind)|before it speaks|\bspoils?\b": "say what the code does",
    "one small step ahead": "an extrapolated point",
    r"\bborne\b|\bbears\b|\bbearable\b": "allowed, allows",
    "is no search|all noise over B|of lr, by step|of four, the third": "say it in plain words",
    r"\bgo(es|ing)? on\b": "resume, continue",
    r"\b(bytes a parameter|ms a step)\b": "per parameter, per step",
    "(?<!earning )rates tried": "learning rates tried, lrs tried",
    "refuse_": "check_, as in check_size",
    r"\bknows? no\b": "unsupported",
    "new compilation": "recompilation",
    "record folder|folder of records": "run folder",
    "give the samples at a tensor of indices|look-ups in C": "name the method or the cost",
}
PAGES = [*(ROOT / "src" / "sngm").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]


@pytest.mark.parametrize("words", RETIRED)
def test_a_retired_word_is_used_nowhere(words):
    kernels = ROOT / "src" / "sngm" / "optim" / "kernels"
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in PAGES
        if kernels not in path.parents
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(words, line)
    ]
    assert not found, f"write {RETIRED[words]!r}:\n" + "\n".join(found)
