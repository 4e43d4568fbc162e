"""Results of a benchmark: measure them one by one, save each at once, and write them into a page of the docs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from arena import commit, make_folder, progress

from sngm.training import Options, resolve, train

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"
Cells = Iterable[tuple[str, Callable[[], Any]]]  # names, and the functions that measure them


def about() -> dict[str, Any]:
    """Return the device, versions, commit and command of a measurement."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "cpus": len(os.sched_getaffinity(0)),
    }


def take(cells: Cells, path: Path | None, **more: Any) -> dict[str, Any]:
    """Measure the cells that are not in the file yet, and save each at once; `more` is added to `about`."""
    record: dict[str, Any] = {"about": about() | more, "cells": {}}
    if path:
        make_folder(path.parent)
    if path and path.exists():
        there = json.loads(path.read_text())
        if all(there["about"].get(key) == value for key, value in record["about"].items() if key != "command"):
            record = there
    for name, work in cells:
        if name in record["cells"]:
            continue
        progress(name)
        start = time.perf_counter()
        record["cells"][name] = work()
        progress(f"{name}: {time.perf_counter() - start:.0f} s", passing=True)
        if path:
            path.write_text(json.dumps(record, indent=2))
    found: dict[str, Any] = json.loads(json.dumps(record))  # as --write-docs reads it
    return found


def measure(task: str, method: str, batch: int, step: str, data_dir: Path | None, epochs: int, **more: Any) -> Any:
    """Return the timing that `sngm train` reports of a short run, and its peak memory."""
    progress(f"{task}, {method}, batch {batch}, {step}")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    more = {"lr": 0.1, "precision": "bfloat16", **more}
    config = resolve(task, method, batch=batch, epochs=epochs, **more)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            record = train(config, Path(folder) / "run", Options(data_dir=data_dir, step=step))
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:200]}
    if record["status"] != "finished":
        return {"failed": record["status"]}
    timing = record["timing"]
    return {
        "seconds_per_epoch": timing["seconds_per_epoch"],
        "mode": timing["step"],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_epoch_seconds": round(timing["training_seconds"] - (epochs - 1) * timing["seconds_per_epoch"], 1),
        "all_seconds": round(time.perf_counter() - start, 1),
    }


def by_kind(kinds: dict[str, tuple[str, ...]], work: Callable[[], Any], steps: int) -> dict[str, float]:
    """Return milliseconds per step by kind of kernel; a kernel is of the first kind with a part of its name."""
    found: dict[str, float] = dict.fromkeys([*kinds, "other"], 0.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as kernels:
        work()
        torch.cuda.synchronize()
    for event in kernels.key_averages():
        kind = next((k for k, parts in kinds.items() if any(part in event.key for part in parts)), "other")
        found[kind] += event.self_device_time_total / 1e3 / steps
    return found | {"busy": sum(found.values())}


def verdict(what: str, limit: str, value: float | None, holds: Callable[[float], bool], text: str) -> tuple[str, ...]:
    """Return a row of the table of limits: what, the limit, the measured value, and whether it holds."""
    if value is None:
        return what, limit, "not measured", ""
    return what, limit, text.format(value), "yes" if holds(value) else "NO"


def heading(record: dict[str, Any], verdicts: Iterator[tuple[str, ...]]) -> list[str]:
    """Return the top of a page: machine, command and the table of limits."""
    where = record["about"]
    return [
        f"One {where['device']}, torch {where['torch']}, {where['cpus']} CPU cores, commit {where['commit']}:",
        "", "```", where["command"], "```", "",
        "| what | limit | measured | holds |", "|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in verdicts), "",
    ]  # fmt: skip


def write_docs(parser: argparse.ArgumentParser, page: Path, path: Path, text: Callable[[dict[str, Any]], str]) -> None:
    """Write results between the markers of a page."""
    if not path.is_file():
        parser.error(f"no file {path}")
    head, rest = page.read_text().split(BEGIN, 1)
    try:
        shown = text(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError):
        parser.error(f"{path} is not what this benchmark writes")
    page.write_text(f"{head}{BEGIN}{shown.rstrip()}\n\n{END}{rest.split(END, 1)[1]}")


def need_gpu(parser: argparse.ArgumentParser, instead: str = "") -> None:
    if not torch.cuda.is_available():
        parser.exit(2, f"this measures a GPU, and torch sees none here{instead}\n")


# ---------------------------------------------------------------- benchmarks of language models


def cell(found: Any) -> str:
    """Return seconds per epoch and peak memory for a table; "" if they were not measured."""
    if found is None or "failed" in found:
        return "" if found is None else f"failed: {found['failed']}"
    return f"{found['seconds_per_epoch']:.2f} ({found['peak_gib']})"


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def epoch_parser(description: str | None, examples: str, page: Path) -> argparse.ArgumentParser:
    """Return a parser with the options that these benchmarks share."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, epilog=examples, formatter_class=style)
    parser.add_argument("--data-dir", type=Path, help="folder that holds wikitext-2/")
    parser.add_argument("--epochs", type=int, default=3, help="of each run; the first is not counted")
    parser.add_argument("--out", type=Path, help="folder for the results; what is in it is not measured again")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a limit is missed")
    parser.add_argument("--write-docs", type=Path, metavar="JSON", help=f"write results into docs/{page.name}")
    return parser


def take_epochs(
    parser: argparse.ArgumentParser,
    where: Path,
    cells: Callable[[argparse.Namespace], Cells],
    verdicts: Callable[[dict[str, Any]], Iterator[tuple[str, ...]]],
    page: Callable[[dict[str, Any]], str],
) -> None:
    """Measure and print the cells that the arguments ask for, or write earlier results into the page `where`."""
    args = parser.parse_args()
    if args.write_docs:
        write_docs(parser, where, args.write_docs, page)
        return
    need_gpu(parser)
    if args.epochs < 2:
        parser.error("--epochs: at least 2")
    record = take(cells(args), args.out and args.out / f"{Path(sys.argv[0]).stem}.json")
    print(page(record))
    if args.check and any(row[-1] == "NO" for row in verdicts(record["cells"])):
        sys.exit(1)
