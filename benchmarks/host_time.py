"""Host time of an optimizer step, by the number of elements and by how long the host waited before it.

The same number of equal tensors, small and large, each stepped right after other work and after a wait of some
milliseconds, as steps of large tensors impose it. All optimizers in all four conditions take turns in shuffled order,
so that whatever the machine does meanwhile falls on all alike. The work before each step is one of another optimizer of
the same kind, so that code is in the processor's caches and the objects of the step are not. The wait is made by a
kernel that does nothing. If host time depends on the elements, it does so at equal waits; if it depends on the wait,
small tensors show it too.

A step of ours has three phases, and their times say which of them depends on what: looking whether anything has moved,
the launch of a graph by CUDA's driver, and what remains once the GPU is at work. Beside the optimizers stands a loop
that only looks up where its tensors are and gives the GPU nothing to do: whatever changes its time is the host's.

--look-ups times that loop alone, on the CPU: sets of tensors each in a row, and taking turns. In turns a set finds that
others have had the caches, and its time depends on where its objects lie.
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
from sngm.optim.kernels import replay

EXAMPLES = """examples:
  python benchmarks/host_time.py --out build/bench              a minute on a GPU, 85 GB of its memory
  python benchmarks/host_time.py --write-docs build/bench/host_time.json
  python benchmarks/host_time.py --look-ups                     some seconds, without a GPU
"""
PAGE = DOCS / "performance.md"
TENSORS = 65
SMALL, LARGE = 4_000, 15_000_000  # elements of one
WAITS = (0, 6)  # ms
FIRST = 10  # rounds that do not count
LIMIT_US, LIMIT_RATIO = 150, 1.1  # of our steps: the slowest, and large tensors over small ones at equal waits
CELL = "us"
SETS = 14  # with --look-ups
PHASES = ("before the launch", "launch", "after")


class LookUps:
    """What a step of ours asks of its tensors, and nothing else."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        for p in self.parameters:
            assert p.grad is not None
            p.data_ptr(), p.grad.data_ptr()


Make = Callable[[list[torch.nn.Parameter]], LookUps | torch.optim.Optimizer]
Step = Callable[[], Any]
LOOK_UPS, SGD = "look-ups alone", "torch SGD fused"
CONTENDERS: dict[str, Make] = {
    LOOK_UPS: LookUps,
    SGD: partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
    "SNGM": partial(sngm.SNGM, lr=1e-3),
    "SNGM with decay": partial(sngm.SNGM, lr=1e-3, weight_decay=1e-4),
    "SNGM block-wise": partial(sngm.SNGM, lr=1e-3, weight_decay=1e-4, scope="tensor"),
    "LARS": partial(sngm.LARS, lr=1e-3, weight_decay=1e-4),
    "LAMB": partial(sngm.LAMB, lr=1e-5, weight_decay=1e-4),
}


def host_us(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Of steps that begin when the GPU has nothing left to do: median and quartiles in each condition."""
    steppers()
    gc.collect()  # now torch has all the memory, and no call of the driver will come between objects of either size
    before, steps = steppers()
    conditions = [(*key, wait) for key in steps for wait in WAITS]
    taken: dict[tuple[str, int, int], list[list[float]]] = {condition: [] for condition in conditions}
    cycles = cycles_a_second() / 1e3
    launches = watch_launches()
    shuffle = random.Random(0).shuffle
    for i in range(FIRST + rounds):
        shuffle(conditions)
        for name, elements, wait in conditions:
            torch.cuda.synchronize()
            before[name]()  # the host has just been at work
            if wait:
                torch.cuda._sleep(int(wait * cycles))
            torch.cuda.synchronize()
            launches.clear()
            start = time.perf_counter()
            steps[name, elements]()
            end = time.perf_counter()
            if i >= FIRST:
                taken[name, elements, wait].append([start, *launches, end])
    torch.cuda.synchronize()
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in CONTENDERS}
    for (name, elements, wait), times in taken.items():
        spans = [[b - a for a, b in pairwise(step)] for step in times]
        values = dict(zip(("low", "median", "high"), statistics.quantiles(map(sum, spans), n=4), strict=True))
        replayed = [span for span in spans if len(span) == len(PHASES)]
        if replayed:
            values |= zip(PHASES, map(statistics.median, zip(*replayed, strict=True)), strict=True)
        found[name][f"{elements}, {wait} ms"] = {key: round(1e6 * value, 1) for key, value in values.items()}
    return found


def watch_launches() -> list[float]:
    """A list that gets the times at which launches of our graphs begin and end."""
    times: list[float] = []
    launch = replay.Graph.__call__

    def watched(graph: replay.Graph, stream: int | None) -> bool:
        times.append(time.perf_counter())
        done = launch(graph, stream)
        times.append(time.perf_counter())
        return done

    replay.Graph.__call__ = watched  # type: ignore[method-assign]
    return times


def steppers() -> tuple[dict[str, Step], dict[tuple[str, int], Step]]:
    before = {name: stepper(make, SMALL) for name, make in CONTENDERS.items()}
    return before, {(name, n): stepper(make, n) for name, make in CONTENDERS.items() for n in (SMALL, LARGE)}


def stepper(make: Make, elements: int) -> Step:
    return make(tensors(elements, "cuda")).step


def tensors(elements: int, device: str) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(TENSORS)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


def look_ups_us(rounds: int) -> dict[str, list[float]]:
    """Medians of the loop over each of several equal sets of tensors, in the order in which they were made."""
    look_up_sets()
    gc.collect()  # as in host_us
    optimizers = look_up_sets()
    loops = [LookUps(optimizer.param_groups[0]["params"]).step for optimizer in optimizers]
    order = list(range(SETS))
    shuffle = random.Random(0).shuffle
    found: dict[str, list[list[float]]] = {"in a row": [[] for _ in order], "taking turns": [[] for _ in order]}
    for _ in range(rounds):
        shuffle(order)
        for i in order:
            optimizers[(i + SETS // 2) % SETS].step()  # other work
            found["taking turns"][i].append(seconds(loops[i]))
    for loop, times in zip(loops, found["in a row"], strict=True):
        times += [seconds(loop) for _ in range(rounds)]
    return {name: [round(1e6 * statistics.median(times), 1) for times in sets] for name, sets in found.items()}


def look_up_sets() -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(tensors(SMALL, "cpu"), lr=1e-3, momentum=0.9) for _ in range(SETS)]


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def cycles_a_second() -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    return 100_000_000 / (time.perf_counter() - start)


def page(record: dict[str, Any]) -> str:
    found, where = record["cells"][CELL], record["about"]
    columns = [f"{elements}, {wait} ms" for wait in WAITS for elements in (SMALL, LARGE)]
    heads = [f"{TENSORS * elements:,}, {wait} ms" for wait in WAITS for elements in (SMALL, LARGE)]
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
        (row[f"{LARGE}, {wait} ms"]["median"] / row[f"{SMALL}, {wait} ms"]["median"], name)
        for name, row in ours.items()
        for wait in WAITS
    )
    return "\n".join([
        *lines, "",
        f"- {passed(slowest, LIMIT_US)}  slowest of ours <= {LIMIT_US} us: {slowest:.0f} us, {slow}",
        f"- {passed(ratio, LIMIT_RATIO)}  large over small, at equal waits <= {LIMIT_RATIO}x: {ratio:.2f}x, {grows}",
        "",
    ])  # fmt: skip


def passed(value: float, limit: float) -> str:
    return "PASS" if value <= limit else "MISS"


def cell(found: dict[str, float]) -> str:
    return f"{found['median']:.0f} ({found['low']:.0f}-{found['high']:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for host_time.json")
    parser.add_argument("--rounds", type=int, default=200, help="steps timed in each condition (default: 200)")
    parser.add_argument("--write-docs", type=Path, metavar="JSON", help="write results into docs/performance.md")
    parser.add_argument("--look-ups", action="store_true", help="time the loop of look-ups alone, on the CPU")
    args = parser.parse_args()
    if args.write_docs:
        write_docs(parser, PAGE, args.write_docs, page)
        return
    if args.look_ups:
        for name, medians in look_ups_us(args.rounds).items():
            print(f"{name}, us:", *medians)
        return
    need_gpu(parser)
    print(page(take([(CELL, partial(host_us, args.rounds))], args.out and args.out / "host_time.json")))


if __name__ == "__main__":
    main()
