"""The paper's statements as experiments, each with a verdict derived from measurements.

`theorems` checks the theorems, `corollaries` the corollaries, `lemmas` the lemmas and the counter-example to LARS, and
`batches` the paper's conclusions about batch sizes and blocks. `sngm check-theory` runs the checks; docs/theory.md has
the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from . import batches, corollaries, lemmas, theorems
from .findings import Finding

__all__ = ["CHECKS", "Finding", "check"]

Show = Callable[[str, Finding | None], None]

CHECKS: dict[str, Callable[[int], Finding]] = {  # in the paper's order; each takes the number of seeds
    "lemma-1": lemmas.lemma_1,
    "msgd-bound": theorems.MSGD,
    "lemma-2": lemmas.lemma_2,
    "lars": lemmas.lars,
    "lemma-3": lemmas.lemma_3,
    "training": lemmas.training,
    "theorem-1": theorems.THEOREM_1,
    "corollary-1": corollaries.corollary_1,
    "batch-limit-msgd": batches.batch_limit_msgd,
    "batch-limit-sngm": batches.batch_limit_sngm,
    "batch-larger": batches.batch_larger,
    "batch-larger-tuned": batches.batch_larger_tuned,
    "theorem-2": theorems.THEOREM_2,
    "corollary-2": corollaries.corollary_2,
    "theorem-3": theorems.THEOREM_3,
    "lars-bound": theorems.LARS,
    "block-bounds": batches.block_bounds,
    "block-speed": batches.block_speed,
}


def check(names: Iterable[str] = CHECKS, seeds: int = 20, show: Show = lambda name, finding: None) -> list[Finding]:
    """Run the checks with these names, and return their findings.

    Args:
        names: keys of `CHECKS`.
        seeds: number of runs behind every mean, at least 2.
        show: called with (name, None) before each check, and with (name, finding) after it.
    """
    found = []
    for name in names:
        show(name, None)
        began = time.monotonic()
        finding = replace(CHECKS[name](seeds), name=name, seconds=round(time.monotonic() - began, 2))
        show(name, finding)
        found.append(finding)
    return found
