"""The findings as a self-contained HTML page, in the style of a study's report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...files import results_in, write_atomically, write_json
from ...report.figures import inline, standalone
from ...report.html import box, document, fact_list, section, table_row, words
from .findings import FAILS, HOLDS, OPEN, Finding

OWN_STYLE = """
.said tbody th{white-space:nowrap;min-width:0}
.said a{color:inherit}
.holds{color:var(--s2)}.fails{color:var(--s1)}.open{color:var(--soft)}
section p{max-width:54rem}
"""


def write(folder: Path, findings: Sequence[Finding], facts: dict[str, Any]) -> Path:
    """Write findings.json, an SVG for each figure, and report.html; return the path of the last."""
    with results_in(folder):
        write_json(folder / "findings.json", {**facts, "findings": [finding.as_dict() for finding in findings]})
        for finding in findings:
            for name, figure in finding.figures.items():
                write_atomically(folder / f"{name}.svg", standalone(figure).encode())
        write_atomically(folder / "report.html", html(findings, facts).encode())
    return folder / "report.html"


def summary(findings: Sequence[Finding]) -> str:
    """Count the verdicts in a sentence.

    >>> summary([]).split(". ")[0]
    "Of 0 checks of the paper's statements 0 hold, 0 fail and 0 are left open"
    """
    holds, fails, left = (sum(finding.verdict == verdict for finding in findings) for verdict in (HOLDS, FAILS, OPEN))
    odd = [f"{finding.name} {finding.verdict}" for finding in findings if finding.surprising]
    news = f"Against what is documented: {', '.join(odd)}." if odd else "No verdict differs from the documented ones."
    checks = "1 check" if len(findings) == 1 else f"{len(findings)} checks"
    return f"Of {checks} of the paper's statements {holds} hold, {fails} fail and {left} are left open. {news}"


def html(findings: Sequence[Finding], facts: dict[str, Any]) -> str:
    """Return the page; it loads nothing and has no scripts."""
    head = f'<header><p class="soft">The paper, checked</p><h1>{escape(summary(findings))}</h1></header>'
    body = [
        f'<th scope="row"><a href="#{finding.name}">{finding.name}</a></th><td>{_verdict(finding)}</td>'
        f"<td>{escape(finding.statement)}</td>"
        for finding in findings
    ]
    table = box("Verdicts", ["check", "verdict", "statement"], body, kind="said")
    parts = [head, section("Verdicts", table), *map(_finding, findings)]
    parts.append(section("How it was run", fact_list({key: words(value) for key, value in facts.items()})))
    return document("The paper's statements, checked", "".join(parts), OWN_STYLE)


def _verdict(finding: Finding) -> str:
    word = f'<b class="{finding.verdict}">{finding.verdict}</b>'
    if finding.surprising:
        return f"{word}, documented: {finding.expected}"
    return word + (", as documented" if finding.verdict == FAILS else "")


def _finding(finding: Finding) -> str:
    why = f"<p>Known: {escape(finding.why)}.</p>" if finding.why else ""
    figures = "".join(
        f'<h3 class="soft">{escape(figure.title)}</h3>{inline(figure, name)}'
        for name, figure in finding.figures.items()
    )
    rows = [table_row(words(first), *map(words, rest)) for first, *rest in finding.rows]
    grid = box(f"Numbers of {finding.name}", finding.head, rows, kind="runs")
    numbers = f"<details><summary>The numbers</summary>{grid}</details>" if rows else ""
    return (
        f'<section id="{finding.name}"><h2>{finding.name}: {_verdict(finding)}</h2><p>{escape(finding.statement)}</p>'
        f'<p>Measured: {escape(finding.measured)}.</p>{why}<p class="soft">{escape(finding.rule)}</p>{figures}{numbers}'
        "</section>"
    )
