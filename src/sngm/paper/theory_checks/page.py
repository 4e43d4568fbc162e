"""Write the findings as one page that opens offline, in the style of a study's report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...files import results_in, write_atomically, write_json
from ...report.drawing import standalone
from ...report.html import render
from .findings import FAILS, HOLDS, OPEN, Finding


def write(folder: Path, findings: Sequence[Finding], facts: dict[str, Any]) -> Path:
    """Write findings.json, an SVG for each figure, and report.html; return the path of report.html."""
    with results_in(folder):
        write_json(folder / "findings.json", {**facts, "findings": [finding.as_dict() for finding in findings]})
        for finding in findings:
            for name, figure in finding.figures.items():
                write_atomically(folder / f"{name}.svg", standalone(figure).encode())
        write_atomically(folder / "report.html", html(findings, facts).encode())
    return folder / "report.html"


def summary(findings: Sequence[Finding]) -> str:
    """Return how many findings have each verdict, and which verdicts differ from docs/theory.md, in two sentences.

    >>> summary([]).split(". ")[0]
    "Of 0 checks of the paper's statements 0 hold, 0 fail and 0 are left open"
    """
    holds, fails, left = (sum(finding.verdict == verdict for finding in findings) for verdict in (HOLDS, FAILS, OPEN))
    odd = [f"{finding.name} {finding.verdict}" for finding in findings if finding.surprising]
    news = f"Against what is documented: {', '.join(odd)}." if odd else "No verdict differs from the documented ones."
    checks = "1 check" if len(findings) == 1 else f"{len(findings)} checks"
    return f"Of {checks} of the paper's statements {holds} hold, {fails} fail and {left} are left open. {news}"


def html(findings: Sequence[Finding], facts: dict[str, Any]) -> str:
    """Return the findings as an HTML page; `facts` are seeds, duration, versions and hardware."""
    title = "The paper's statements, checked"
    return render("theory", title=title, subject=title, answer=summary(findings), findings=findings, facts=facts)
