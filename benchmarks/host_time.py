"""Host time of an optimizer step, by the number of elements and by how long the host waited before it.

The same number of equal tensors, small and large. Steps of large tensors keep the GPU busy for milliseconds, which the
host spends waiting before the next step is timed; small tensors are therefore stepped with such a wait too, made of a
kernel that does nothing. If the wait and not the elements makes a step slower to start, both show it, for torch's own
fused SGD as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cells import DOCS, Cells, take, write_docs

import sngm

EXAMPLES = """examples:
  python benchmarks/host_time.py --out build/bench              half a minute on a GPU
  python benchmarks/host_time.py --write-docs build/bench/host_time.json
"""
PAGE = DOCS / "performance.md"
TENSORS = 65
SMALL, MIDDLE, LARGE = 4_000, 400_000, 15_000_000  # elements of one
STEPS = 200
LIMIT_US = 150

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
CONTENDERS: dict[str, Make] = {
    "torch SGD fused": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
    "SNGM": partial(sngm.SNGM, lr=1e-3),
    "SNGM with decay": partial(sngm.SNGM, lr=1e-3, weight_decay=1e-4),
    "SNGM block-wise": partial(sngm.SNGM, lr=1e-3, weight_decay=1e-4, scope="tensor"),
    "LARS": partial(sngm.LARS, lr=1e-3, weight_decay=1e-4),
    "LAMB": partial(sngm.LAMB, lr=1e-5, weight_decay=1e-4),
}


def host_us(make: Make, elements: int, wait: float = 0.0) -> dict[str, float]:
    """Of a step that begins when the GPU has nothing left to do: median and quartiles, and the GPU's part after it."""
    parameters = [torch.nn.Parameter(torch.randn(elements, device="cuda")) for _ in range(TENSORS)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer = make(parameters)
    cycles = int(wait * cycles_a_second()) if wait else 0
    host, waited = [], []
    for i in range(STEPS + 10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        launched = time.perf_counter()
        if cycles:
            torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        if i >= 10:
            host.append(launched - start)
            waited.append(time.perf_counter() - launched)
    low, median, high = (1e6 * quartile for quartile in statistics.quantiles(host, n=4))
    found = {"low": low, "median": median, "high": high, "waited": 1e6 * statistics.median(waited)}
    del parameters, optimizer, p
    torch.cuda.empty_cache()
    return {key: round(value, 1) for key, value in found.items()}


def cycles_a_second() -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    return 100_000_000 / (time.perf_counter() - start)


def cells() -> Cells:
    for name, make in CONTENDERS.items():
        for elements in (SMALL, MIDDLE, LARGE):
            yield f"{name}/{elements}", partial(host_us, make, elements)
        for wait in (2, 6):
            yield f"{name}/{SMALL}, {wait} ms", partial(host_us, make, SMALL, wait / 1e3)
        yield f"{name}/{SMALL}, again", partial(host_us, make, SMALL)


def page(record: dict[str, Any]) -> str:
    found, where = record["cells"], record["about"]
    columns = list(dict.fromkeys(key.split("/")[1] for key in found))
    heads = [f"{TENSORS * int(column.split(',')[0]):,}{column[len(column.split(',')[0]) :]}" for column in columns]
    lines = [
        f"One {where['device']}, torch {where['torch']}, commit {where['commit']}:",
        "", "```", where["command"], "```", "",
        "| elements | " + " | ".join(heads) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]  # fmt: skip
    for name in CONTENDERS:
        lines.append(f"| {name} | " + " | ".join(cell(found[f"{name}/{column}"]) for column in columns) + " |")
    waits = (f"{found[f'SNGM/{column}']['waited'] / 1e3:.2f}" for column in columns)
    lines.append("| ms waited, SNGM | " + " | ".join(waits) + " |")
    return "\n".join([*lines, "", *verdicts(found), ""])


def cell(found: dict[str, float]) -> str:
    return f"{found['median']:.0f} ({found['low']:.0f}-{found['high']:.0f})"


def verdicts(found: dict[str, Any]) -> Iterator[str]:
    slowest, name = max((row["median"], name) for name, row in found.items() if not name.startswith("torch"))
    yield f"- {'PASS' if slowest <= LIMIT_US else 'MISS'}  slowest of ours <= {LIMIT_US} us: {slowest:.0f} us, {name}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for host_time.json")
    parser.add_argument("--write-docs", type=Path, metavar="JSON", help="write results into docs/performance.md")
    args = parser.parse_args()
    if args.write_docs:
        if not args.write_docs.is_file():
            parser.error(f"no file {args.write_docs}")
        write_docs(PAGE, args.write_docs, page)
        return
    if not torch.cuda.is_available():
        parser.exit(2, "this measures a GPU, and torch sees none here\n")
    print(page(take(cells(), args.out and args.out / "host_time.json")))


if __name__ == "__main__":
    main()
