"""Host time of an optimizer step, by the number of elements and by how long the host waited before it.

The same number of equal tensors, small and large, each stepped right after other work and after a wait of some
milliseconds, as steps of large tensors impose it. All optimizers in all four conditions take turns in shuffled order,
so that whatever the machine does meanwhile falls on all alike; all are made several times anew, in shuffled order too,
because the time of a step depends on where its objects lie in the host's memory. The work before each step is one of
another optimizer of the same kind, so that code is in the processor's caches and the objects of the step are not. The
wait is made by a kernel that does nothing. If host time depends on the elements, it does so at equal waits; if it
depends on the wait, small tensors show it too.

A step of ours has three phases, and their times say which of them depends on what: looking whether anything has moved,
the launch of a graph by CUDA's driver, and what remains once the GPU is at work. Beside the optimizers stands a loop
that only asks where its tensors are and gives the GPU nothing to do: whatever changes its time is the host's.

With --device cpu nothing is launched, so that the first and the last phase are measured alone, on any machine.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cells import DOCS, need_gpu, take, write_docs

import sngm
from sngm.optim import kernels
from sngm.optim.kernels import replay

EXAMPLES = """examples:
  python benchmarks/host_time.py --out build/bench              a minute on a GPU, 85 GB of its memory
  python benchmarks/host_time.py --write-docs build/bench/host_time.json
  python benchmarks/host_time.py --device cpu                   two minutes without a GPU, 6 GB of memory
"""
PAGE = DOCS / "performance.md"
TENSORS = 65
SMALL, LARGE = 4_000, {"cuda": 15_000_000, "cpu": 1_000_000}  # elements of one
WAITS = (0, 6)  # ms
BUILDS = 8  # where the objects of a step lie matters: all are made so often anew, in another order
FIRST = 5  # rounds of each build that do not count
BEFORE = 0  # in place of elements: the small set that is stepped before another
LIMIT_US, LIMIT_RATIO = 150, 1.1  # of our steps: the slowest, and large tensors over small ones at equal waits
CELL = "us"
PHASES = ("before the launch", "launch", "after")


class LookUps:
    """Asks every parameter and its gradient for their addresses, as a step of ours does among other things."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        for p in self.parameters:
            p.data_ptr(), p.grad.data_ptr()


Make = Callable[[list[torch.nn.Parameter]], LookUps | torch.optim.Optimizer]
Step = Callable[[], Any]
LOOK_UPS, SGD = "look-ups alone", "torch SGD fused"
CONTENDERS: dict[str, Make] = {
    LOOK_UPS: LookUps,
    SGD: partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
    "SNGM": partial(sngm.SNGM, lr=1e-3),
    "SNGM with decay": partial(sngm.SNGM, lr=1e-3, weight_decay=1e-4),
    "SNGM block-wise with decay": partial(sngm.SNGM, lr=1e-3, weight_decay=1e-4, scope="tensor"),
    "LARS": partial(sngm.LARS, lr=1e-3, weight_decay=1e-4),
    "LAMB": partial(sngm.LAMB, lr=1e-5, weight_decay=1e-4),
}


def host_us(rounds: int, device: str) -> dict[str, dict[str, dict[str, float]]]:
    """Of steps that begin when the GPU has nothing left to do: median and quartiles in each condition."""
    launches = watch_launches(device)
    sizes = (SMALL, LARGE[device])
    contenders = [name for name in CONTENDERS if device == "cuda" or name != SGD]  # on a CPU it would do its work
    conditions = [(name, elements, wait) for name in contenders for elements in sizes for wait in WAITS]
    taken: dict[tuple[str, int, int], list[list[float]]] = {condition: [] for condition in conditions}
    sets = [(name, elements) for name in contenders for elements in (BEFORE, *sizes)]
    shuffle = random.Random(0).shuffle
    rest = sleeper(device)
    for build in range(1 + BUILDS):  # the first for torch to get its memory: later no call of the driver comes between
        shuffle(sets)
        steps = {key: stepper(key, device) for key in sets}
        for i in range(FIRST + -(-rounds // BUILDS) if build else 0):
            shuffle(conditions)
            for name, elements, wait in conditions:
                rest(0)
                steps[name, BEFORE]()  # the host has just been at work
                rest(wait)
                launches.clear()
                start = time.perf_counter()
                steps[name, elements]()
                end = time.perf_counter()
                if i >= FIRST:
                    taken[name, elements, wait].append([start, *launches, end])
        rest(0)
        del steps
        gc.collect()
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in contenders}
    for (name, elements, wait), times in taken.items():
        spans = [[b - a for a, b in pairwise(step)] for step in times]
        values = dict(zip(("low", "median", "high"), statistics.quantiles(map(sum, spans), n=4), strict=True))
        replayed = [span for span in spans if len(span) == len(PHASES)]
        if replayed:
            values |= zip(PHASES, map(statistics.median, zip(*replayed, strict=True)), strict=True)
        found[name][f"{elements}, {wait} ms"] = {key: round(1e6 * value, 1) for key, value in values.items()}
    return found


def watch_launches(device: str) -> list[float]:
    """A list that gets the times at which launches of our graphs begin and end; on a CPU nothing is launched."""
    times: list[float] = []
    launch = replay.Graph.__call__

    def watched(graph: replay.Graph, stream: int | None) -> bool:
        times.append(time.perf_counter())
        done = device == "cpu" or launch(graph, stream)
        times.append(time.perf_counter())
        return done

    replay.Graph.__call__ = watched  # type: ignore[method-assign]
    if device == "cpu":
        from sngm.optim.kernels import place

        kernels.DEVICES = ("cpu",)
        place.serves = lambda device: True
        place.Launch.__call__ = lambda self, pool, stream: None  # type: ignore[method-assign]
        replay.Graph.__init__ = lambda self, launches, pool: None  # type: ignore[method-assign]
    return times


def sleeper(device: str) -> Callable[[int], None]:
    """A function that waits for the GPU, and so many milliseconds longer."""
    if device == "cpu":
        return lambda wait: time.sleep(wait / 1e3) if wait else None
    cycles = cycles_a_second() / 1e3

    def rest(wait: int) -> None:
        if wait:
            torch.cuda._sleep(int(wait * cycles))
        torch.cuda.synchronize()

    return rest


def cycles_a_second() -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    return 100_000_000 / (time.perf_counter() - start)


def stepper(key: tuple[str, int], device: str) -> Step:
    name, elements = key
    values = torch.randn(elements or SMALL, device=device)
    parameters = [torch.nn.Parameter(values.clone()) for _ in range(TENSORS)]
    for p in parameters:
        p.grad = values.clone()
    return CONTENDERS[name](parameters).step


def page(record: dict[str, Any]) -> str:
    found, where = record["cells"][CELL], record["about"]
    large = max(int(condition.split(",")[0]) for condition in found[LOOK_UPS])
    columns = [f"{elements}, {wait} ms" for wait in WAITS for elements in (SMALL, large)]
    heads = [f"{TENSORS * elements:,}, {wait} ms" for wait in WAITS for elements in (SMALL, large)]
    lines = [
        f"One {where['device']}, torch {where['torch']}, commit {where['commit']}:",
        "", "```", where["command"], "```", "",
        "| elements, wait | " + " | ".join(heads) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]  # fmt: skip
    for name, row in found.items():
        lines.append(f"| {name} | " + " | ".join(cell(row[column]) for column in columns) + " |")
    ours = {name: row for name, row in found.items() if name not in (LOOK_UPS, SGD)}
    seen = {name: row for name, row in ours.items() if all(PHASES[0] in row[column] for column in columns)}
    if seen:
        lines += ["", "Phases of our steps: " + ", ".join(PHASES) + ".", ""]
        lines += ["| elements, wait | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in seen.items():
        phases = (" + ".join(f"{row[column][phase]:.0f}" for phase in PHASES) for column in columns)
        lines.append(f"| {name} | " + " | ".join(phases) + " |")
    slowest, slow = max((row[column]["median"], name) for name, row in ours.items() for column in columns)
    ratio, grows = max(
        (row[f"{large}, {wait} ms"]["median"] / row[f"{SMALL}, {wait} ms"]["median"], name)
        for name, row in ours.items()
        for wait in WAITS
    )
    limits = [
        f"- {passed(ratio, LIMIT_RATIO)}  large over small, at equal waits <= {LIMIT_RATIO}x: {ratio:.2f}x, {grows}"
    ]
    if SGD in found:  # launches are in it
        limits.append(f"- {passed(slowest, LIMIT_US)}  slowest of ours <= {LIMIT_US} us: {slowest:.1f} us, {slow}")
    return "\n".join([*lines, "", *limits, ""])


def passed(value: float, limit: float) -> str:
    return "PASS" if value <= limit else "MISS"


def cell(found: dict[str, float]) -> str:
    return f"{found['median']:.0f} ({found['low']:.0f}-{found['high']:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for host_time.json")
    parser.add_argument(
        "--rounds", type=int, default=200, help="steps timed in each condition, at least (default: 200)"
    )
    parser.add_argument("--write-docs", type=Path, metavar="JSON", help="write results into docs/performance.md")
    parser.add_argument("--device", choices=sorted(LARGE), default="cuda", help="cpu: nothing is launched")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.write_docs:
        write_docs(parser, PAGE, args.write_docs, page)
        return
    if args.device == "cuda":
        need_gpu(parser)
    print(page(take([(CELL, partial(host_us, args.rounds, args.device))], args.out and args.out / "host_time.json")))


if __name__ == "__main__":
    main()
