"""The headline of a report: one short sentence about the largest batch size."""

from __future__ import annotations

from .summary import Summary, join, welch


def headline(summary: Summary) -> str:
    """Return one sentence, without p-values, that names the best methods at the largest batch size with results."""
    reached = [batch for batch in summary.batches if summary.ranking(batch)]
    if not reached:
        return summary.answer()
    batch, largest = reached[-1], summary.batches[-1]
    ranked = summary.ranking(batch)
    best, unit = ranked[0], f"{' %' if summary.percent else ''} test {summary.metric}"
    values = [summary.text(cell.mean or 0.0) for cell in ranked]
    where = f"At batch {batch}"
    if batch != largest:
        lost = all(summary.cells[method, largest].only_diverged for method in summary.methods)
        where = f"At batch {largest} {'every run diverged' if lost else 'nothing has finished yet'}; at batch {batch}"
    if len(ranked) == 1:
        return f"{where}, {best.method} reaches {values[0]}{unit}."
    leaders = summary.leaders(batch)
    same = [i for i, cell in enumerate(ranked) if cell.method in leaders]
    if len(same) > 1:
        names, shown = join([ranked[i].method for i in same]), join([values[i] for i in same])
        return f"{where}, {names} are too close to call: {shown}{unit}."
    if welch(best, ranked[1]) is None:
        return f"{where}, {best.method} is ahead of {ranked[1].method}, untested: {values[0]} to {values[1]}{unit}."
    side = "above" if summary.higher_is_better else "below"
    gap = summary.gap(abs((best.mean or 0.0) - (ranked[1].mean or 0.0)))
    return f"{where}, {best.method} is best: {values[0]}{unit}, {gap} {side} {ranked[1].method}."
