"""Results of probes as tables for a terminal."""

from __future__ import annotations

import math
from typing import Any


def in_words(found: dict[str, Any]) -> str:
    """Return the result of `sngm.probes.along` or `of_runs` as text: a table, a legend and, for `along`, a summary."""
    if found["kind"] == "runs":
        return _table(found["runs"], RUNS) + _legend(RUNS)
    points = [{"samples": found["samples"], **point} for point in found["points"]]
    return _table(points, POINTS) + _legend(POINTS) + _pilot_in_words(found) + _follows(found)


def _interval(point: dict[str, Any]) -> str:
    low, high = point["sigma_interval"]
    return f"{point['sigma']:.3g}" + (f" ({low:.3g} to {high:.3g})" if low == low else "")


def _relative(point: dict[str, Any]) -> str:
    return f"{point['hessian_norm'] * point['weight_norm'] ** 2:.3g}"


def _noise_scale(point: dict[str, Any]) -> str:
    """Format the noise scale with two digits; with "~" and one digit if it is above the number of samples."""
    digits = 1 if _rough(point) else 2
    return "~" * _rough(point) + f"{float(format(point['noise_scale'], f'.{digits}g')):g}"


def _rough(point: dict[str, Any]) -> bool:
    return bool(point["samples"] < point["noise_scale"] < math.inf)


def _unsettled(point: dict[str, Any]) -> bool:
    return not point["settled"]


def _downwards(point: dict[str, Any]) -> bool:
    return bool(point["eigenvalue"] < 0)


NOTES: dict[str, Any] = {
    "> the iterations ended before |H| had converged: it is at least this; take more iterations": _unsettled,
    "* the eigenvalue is negative: a direction in which the loss bends down": _downwards,
    "~ above the number of samples: at best the order of magnitude is right; take more samples": _rough,
}
SHARED = {
    "loss": lambda p: f"{p['loss']:.4g}",
    "|g|": lambda p: f"{p['gradient_norm']:.3g}",
    "|H|": lambda p: (">" * _unsettled(p)) + f"{p['hessian_norm']:.3g}" + "*" * _downwards(p),
    "sigma": _interval,
    "noise scale": _noise_scale,
    "rho": lambda p: f"{p['rho']:.3f}",
    "cos": lambda p: f"{p['cos']:.3f}",
}
POINTS: dict[str, Any] = {"step": lambda p: str(p["step"]), **SHARED}
RUNS: dict[str, Any] = {
    "run": lambda p: p["folder"],
    "method": lambda p: p["label"],
    "batch": lambda p: str(p["config"]["batch"]),
    "step": lambda p: str(p["step"]),
    **SHARED,
    "|H| |w|^2": _relative,
}


COLUMNS = {
    "|g|": "norm of the gradient of all samples",
    "|H|": "norm of the Hessian: gradient descent without momentum is stable up to lr 2 / |H|",
    "sigma": "standard deviation of one sample's gradient, with its 95 % interval",
    "noise scale": "sigma^2 / |g|^2, estimated without bias: the batch at which noise and gradient are equally strong",
    "rho": "|g| / sum of the norms of its tensors; 1 if one tensor has it all",
    "cos": "of the angle between the gradient and the block-wise direction",
    "|H| |w|^2": "curvature for steps in proportion to the weights, which normalisation layers do not change",
}


def _legend(columns: dict[str, Any]) -> str:
    lines = [f"{name}: {text}" for name, text in COLUMNS.items() if name in columns]
    return "\n" + "\n".join(lines) + "\n"


def _follows(found: dict[str, Any]) -> str:
    """Return a sentence on the batch sizes that the noise scale allows: up to its median over the later half of points.

    If this median is above the number of samples, the sentence says "at least" that number: such a scale only means
    that the mean gradient of the samples is mostly noise.
    """
    points, samples = found["points"], found["samples"]
    scales = [scale for p in points[len(points) // 2 :] if (scale := p["noise_scale"]) == scale]
    if not scales:
        return ""
    scale = sorted(scales)[len(scales) // 2]
    size = f"at least {samples:,}" if scale > samples else f"about {float(format(scale, '.1g')):,.0f}"
    return (
        f"\nWhat follows: with SGD or SNGM a batch of up to {size} loses nothing measurable; sngm advise converts your "
        "recipe.\n"
    )


def _table(rows: list[dict[str, Any]], columns: dict[str, Any]) -> str:
    cells = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    notes = [text for text, holds in NOTES.items() if any(map(holds, rows))]
    return "\n".join([*lines, *notes]) + "\n"


def _pilot_in_words(found: dict[str, Any]) -> str:
    frontier = ", ".join(f"{entry['L']:.4g} at lambda {entry['lambda']:g}" for entry in found["frontier"])
    over = f" over groups of {found['group']}, which BatchNorm normalises together" if found["batchnorm"] else ""
    lines = [f"{'L' if found['L_settled'] else 'L, not settled, at least'} {frontier}"]
    lines.append(f"sigma {found['sigma']:.4g}, at the high end of the intervals {found['sigma_high']:.4g}{over}")
    lines.append("both are the largest of the points visited; between and beyond them they may be larger")
    if found["rho"] is not None:
        count = len(found["step_blocks"])
        lines.append(f"rho(S) {found['rho']:.4g} for S = {count} tensors, the largest of all steps")
    if found["status"] == "diverged":
        lines.append("diverged: the loss is NaN or infinite; lower the learning rate")
    return "\n" + "\n".join(lines) + "\n"
