"""The headline of a report: one short sentence about the largest batch size."""

from __future__ import annotations

from .summary import Summary, join, welch


def headline(summary: Summary) -> str:
    """Return one sentence, without p-values, that names the best methods at the largest batch size with results."""
    if not summary.reached:
        return summary.answer()
    batch = summary.reached[-1]
    ranked, leaders = summary.ranking(batch), summary.leaders(batch)
    best, unit = ranked[0], f"{' %' if summary.percent else ''} test {summary.metric}"
    values = [summary.text(cell.mean or 0.0) for cell in ranked]
    where = f"{summary.beyond}; at batch {batch}" if summary.beyond else f"At batch {batch}"
    if len(ranked) == 1:
        return f"{where}, {best.method} reaches {values[0]}{unit}."
    same = [i for i, cell in enumerate(ranked) if cell.method in leaders]
    if len(same) > 1:
        names, shown = join([ranked[i].method for i in same]), join([values[i] for i in same])
        return f"{where}, {names} are too close to call: {shown}{unit}."
    second = ranked[1].method
    if welch(best, ranked[1]) is None:
        return f"{where}, {best.method} is ahead of {second}, untested: {values[0]} to {values[1]}{unit}."
    return f"{where}, {best.method} is best: {values[0]}{unit}, {summary.lead(best, ranked[1])} {second}."
