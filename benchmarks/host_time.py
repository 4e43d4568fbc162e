"""Host time of an optimizer step, by tensor size and by what host and GPU did before it.

Steps on the same number of equal tensors, small and large, are timed in five conditions:

- after other work: another optimizer of the same kind took a step before, and the GPU is idle. The processor's caches
  hold the code of the step, but not its objects.
- after a wait: the same, and then the host waited for some milliseconds, as it does for steps of large tensors.
- in a row: the same optimizer took steps just before. The GPU has finished those of small tensors, but not those of
  large ones. A plain loop over step() measures this condition.
- in a row after a wait: the same, after the host has waited, as it does between rows of large tensors.
- in a row, GPU busy: the same behind an idle kernel of that duration, so that the GPU is as busy with small tensors as
  with large ones.

If host time depends on tensor size, sizes differ within one condition; if it depends on waits or on a busy GPU, small
tensors show it too. All optimizers and conditions alternate in random order, so that other work of the machine affects
all equally. Optimizers are rebuilt several times, in random order too, because the time of a step differs between
builds.

A step of ours has three timed phases: checking whether tensors have moved, the launch of a CUDA graph by the driver,
and the rest after the launch. For comparison, a loop only reads the addresses of its tensors and launches nothing: any
change of its time comes from the host.

The parts of the first phase are measured on a model with many tensors, ViT-B/16: each check of all tensors separately,
and whole steps.

With --device cpu nothing is launched: only the first and the last phase are measured, on any machine.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from cells import DOCS, need_gpu, take, write_docs
from sizes import SIZES

import sngm
from sngm.optim import kernels
from sngm.optim.kernels import replay
from sngm.optim.kernels.look import look

EXAMPLES = """examples:
  python benchmarks/host_time.py --out build/bench              three minutes on a GPU, 85 GB of its memory
  python benchmarks/host_time.py --write-docs build/bench/host_time.json
  python benchmarks/host_time.py --device cpu                   four minutes without a GPU, 6 GB of memory
"""
PAGE = DOCS / "performance.md"
TENSORS = 65
SMALL, LARGE = 4_000, {"cuda": 15_000_000, "cpu": 1_000_000}  # elements of a tensor
WAIT = 6  # ms
OTHERS, WAITED, IN_A_ROW, ROW_AFTER_WAIT, BUSY = CONDITIONS = (
    "after other work", "after a wait", "in a row", "in a row after a wait", "in a row, GPU busy"
)  # fmt: skip
STEPS_IN_A_ROW = 3  # before the timed step
BUILDS = 24  # builds differ in speed: all optimizers are rebuilt this often, in random order
ROUNDS = 120  # timed steps of each optimizer in each condition
FIRST = 3  # warm-up rounds of each build
BEFORE = 0  # instead of a number of elements: the small tensors stepped before the timed ones
LIMIT_US, LIMIT_RATIO = 150, 1.1  # of our slowest step; of large over small tensors in one condition
CELL, PARTS_CELL = "conditions", "parts of a step"
MANY = SIZES["vit_b16"]  # tensors
WHOLE, REST = "a whole step", "the rest"
PHASES = ("before the launch", "launch", "after")


class LookUps:
    """A loop that only reads the addresses of every parameter and gradient, as a step of ours does too."""

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


class Machine:
    """The host, and the GPU if there is one."""

    def __init__(self, device: str) -> None:
        self.has_gpu = device == "cuda"
        for _ in range(2 if self.has_gpu else 0):  # the first loads the kernel and raises the GPU's clock
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.cuda._sleep(100_000_000)
            torch.cuda.synchronize()
            self.cycles_a_ms = 100_000_000 / (time.perf_counter() - start) / 1e3

    def rest(self, ms: int = 0) -> None:
        """Wait until the GPU is idle, and `ms` milliseconds longer."""
        if self.has_gpu:
            if ms:
                self.keep_busy(ms)
            torch.cuda.synchronize()
        elif ms:
            time.sleep(ms / 1e3)

    def keep_busy(self, ms: int) -> None:
        """Launch a kernel that takes `ms` milliseconds, without waiting for it."""
        if self.has_gpu:
            torch.cuda._sleep(int(ms * self.cycles_a_ms))

    def bring_into(self, condition: str, own: Step, others: Step) -> None:
        """Establish the condition for the timed step."""
        self.rest()
        if condition in (OTHERS, WAITED):
            others()
            self.rest(WAIT if condition == WAITED else 0)
            return
        if condition == ROW_AFTER_WAIT:
            self.rest(WAIT)
        if condition == BUSY:
            self.keep_busy(WAIT)
        for _ in range(STEPS_IN_A_ROW):
            own()


def host_us(rounds: int, device: str) -> dict[str, dict[str, Any]]:
    """Return median and quartiles of each optimizer's host time, by tensor size and condition."""
    launches = watch_launches()
    sizes = (SMALL, LARGE[device])
    contenders = [name for name in CONTENDERS if device == "cuda" or name != SGD]  # on a CPU it would compute the step
    cases = [
        (name, n, where)
        for name in contenders
        for n in sizes
        for where in CONDITIONS[: None if device == "cuda" else -1]
    ]
    taken: dict[tuple[str, int, str], list[list[list[float]]]] = {case: [] for case in cases}  # lists by build
    sets = [(name, elements) for name in contenders for elements in (BEFORE, *sizes)]
    shuffle = random.Random(0).shuffle
    machine = Machine(device)
    for build in range(1 + BUILDS):  # the first fills torch's memory cache, so that later builds need no driver calls
        shuffle(sets)
        steps = {key: stepper(key, device) for key in sets}
        for builds in taken.values():
            builds.append([])
        for i in range(FIRST + -(-rounds // BUILDS) if build else 0):
            shuffle(cases)
            for name, elements, condition in cases:
                machine.bring_into(condition, steps[name, elements], steps[name, BEFORE])
                times = timed(steps[name, elements], launches)
                if i >= FIRST:
                    taken[name, elements, condition][-1].append(times)
        machine.rest()
        del steps
        gc.collect()
    found: dict[str, dict[str, Any]] = {name: {} for name in contenders}
    for (name, elements, condition), builds in taken.items():
        spans = [[us(b - a) for a, b in pairwise(step)] for steps in builds for step in steps]
        values: dict[str, Any] = dict(
            zip(("low", "median", "high"), statistics.quantiles(map(sum, spans), n=4), strict=True)
        )
        values["builds"] = [statistics.median(us(step[-1] - step[0]) for step in steps) for steps in builds if steps]
        replayed = [span for span in spans if len(span) == len(PHASES)]
        values["not replayed"] = len(spans) - len(replayed)
        if replayed:
            values |= zip(PHASES, map(statistics.median, zip(*replayed, strict=True)), strict=True)
        found[name][f"{elements} {condition}"] = values
    return found


def parts_us(rounds: int, device: str) -> dict[str, dict[str, list[float]]]:
    """Return the median times of whole steps of ours and of their parts in each build, for a model of many tensors."""
    machine, shuffle = Machine(device), random.Random(0).shuffle
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ("SNGM", "LARS", "LAMB")}
    names = list(found)
    for _ in range(BUILDS):
        shuffle(names)
        parts = [(name, part, work) for name in names for part, work in parts_of(many_tensors(name, device)).items()]
        taken: dict[tuple[str, str], list[float]] = {(name, part): [] for name, part, _ in parts}
        for _ in range(-(-rounds // BUILDS)):
            shuffle(parts)
            for name, part, work in parts:
                machine.bring_into(IN_A_ROW, work, work)
                begin, end = timed(work, [])
                taken[name, part].append(us(end - begin))
        for (name, part), values in taken.items():
            found[name].setdefault(part, []).append(statistics.median(values))
        machine.rest()
        del parts, work
        gc.collect()
    return found


def many_tensors(name: str, device: str) -> Any:
    parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in MANY.shapes()]
    for p in parameters:
        p.grad = torch.ones_like(p)
    return CONTENDERS[name](parameters)


def parts_of(optimizer: Any) -> dict[str, Step]:
    """Return a whole step and its parts as functions, by name."""
    for _ in range(FIRST + 2):  # until steps replay a CUDA graph
        optimizer.step()
    parameters, plan = optimizer.param_groups[0]["params"], optimizer._plan
    grads = [p.grad for p in parameters]
    return {
        WHOLE: optimizer.step,
        "the gradients themselves": lambda: list(map(attrgetter("grad"), parameters)),
        "gradients: where they lie, and how": partial(look, grads),
        "parameters: where they lie, and how": partial(look, parameters),
        "state: whether it is the same": partial(plan._state_is_where_it_was, optimizer),
        "parameters: a new version for autograd": partial(torch.autograd.graph.increment_version, parameters),
        "launch, and finding its graph": partial(plan._work, optimizer),
    }


def timed(step: Step, launches: list[float]) -> list[float]:
    """Return the times at which a step began, each of its launches began and ended, and the step ended."""
    launches.clear()
    start = time.perf_counter()
    step()
    return [start, *launches, time.perf_counter()]


def us(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def watch_launches() -> list[float]:
    """Return a list to which launches of our CUDA graphs append their start and end times."""
    times: list[float] = []
    launch = replay.Graph.__call__

    def watched(graph: replay.Graph, stream: int | None) -> bool:
        times.append(time.perf_counter())
        done = launch(graph, stream)
        times.append(time.perf_counter())
        return done

    replay.Graph.__call__ = watched  # type: ignore[method-assign]
    return times


def launch_nothing() -> None:
    """Make steps on a CPU do all that steps on a GPU do, except launches."""
    from sngm.optim.kernels import place

    kernels.DEVICES = ("cpu",)
    place.serves = lambda device: True
    place.Launch.__call__ = lambda self, pool, stream: None  # type: ignore[method-assign]
    replay.Graph.__init__ = lambda self, launches, pool: None  # type: ignore[method-assign]
    replay.Graph.__call__ = lambda self, stream: True  # type: ignore[method-assign]


def stepper(key: tuple[str, int], device: str) -> Step:
    name, elements = key
    values = torch.randn(elements or SMALL, device=device)
    parameters = [torch.nn.Parameter(values.clone()) for _ in range(TENSORS)]
    for p in parameters:
        p.grad = values.clone()
    return CONTENDERS[name](parameters).step


def page(record: dict[str, Any]) -> str:
    found, where = record["cells"][CELL], record["about"]
    keys = list(found[LOOK_UPS])
    sizes = sorted({int(key.split(" ", 1)[0]) for key in keys})
    conditions = [condition for condition in CONDITIONS if f"{SMALL} {condition}" in keys]

    def table(names: list[str], cell: Callable[[dict[str, float]], str]) -> list[str]:
        lines = ["| | elements | " + " | ".join(conditions) + " |", "|---" * (len(conditions) + 2) + "|"]
        for name in names:
            for n in sizes:
                cells = [cell(found[name][f"{n} {condition}"]) for condition in conditions]
                lines.append(f"| {name} | {TENSORS * n:,} | " + " | ".join(cells) + " |")
        return lines

    lines = [
        f"One {where['device']}, torch {where['torch']}, commit {where['commit']}:",
        "", "```", where["command"], "```", "",
        *table(list(found), lambda cell: f"{cell['median']:.0f} ({cell['low']:.0f}-{cell['high']:.0f})"),
    ]  # fmt: skip
    ours = [name for name in found if name not in (LOOK_UPS, SGD)]
    seen = [name for name in ours if all(PHASES[0] in cell for cell in found[name].values())]
    if seen:
        lines += ["", "Phases of our steps: " + ", ".join(PHASES) + ".", ""]
        lines += table(seen, lambda cell: " + ".join(f"{cell[phase]:.0f}" for phase in PHASES))
    grown = {
        (name, condition): growth(found[name][f"{SMALL} {condition}"], found[name][f"{sizes[-1]} {condition}"])
        for name in found
        for condition in conditions
    }
    lines += ["", "Large over small, within builds: the median of their ratios, and its quartiles.", ""]
    lines += ["| | " + " | ".join(conditions) + " |", "|---" * (len(conditions) + 1) + "|"]
    for name in found:
        quartiles = [grown[name, condition] for condition in conditions]
        lines.append(f"| {name} | " + " | ".join(f"{q[1]:.2f} ({q[0]:.2f}-{q[2]:.2f})" for q in quartiles) + " |")
    limits = []
    for condition in conditions:
        ratio, grows = max((grown[name, condition][1], name) for name in ours)
        limit = f"large over small, {condition} <= {LIMIT_RATIO}x: {ratio:.2f}x, {grows}"
        limits.append(f"- {passed(ratio, LIMIT_RATIO)}  {limit}")
    if SGD in found:  # a GPU run: times include launches
        slowest, slow = max((cell["median"], name) for name in ours for cell in found[name].values())
        limits.append(f"- {passed(slowest, LIMIT_US)}  slowest of ours <= {LIMIT_US} us: {slowest:.1f} us, {slow}")
    apart, name = max(
        (max(cell["builds"]) / min(cell["builds"]), name) for name in ours for cell in found[name].values()
    )
    limits.append(f"- medians of single builds differ by up to {apart:.2f}x in one condition, {name}")
    if SGD in found:
        launched = sum(cell["not replayed"] for name in ours for cell in found[name].values())
        limits.append(f"- steps of ours that were launched, not replayed: {launched:.0f}")
    lines += ["", *parts_page(record["cells"][PARTS_CELL]), "", *limits]
    return "\n".join([*lines, ""])


def page_of_gpu(record: dict[str, Any]) -> str:
    """Return the page for the docs; exit unless the results are from a GPU with enough rounds."""
    if record["about"]["measured_on"] != "cuda" or record["about"]["rounds"] < ROUNDS:
        sys.exit(f"the page is of a GPU, and of at least {ROUNDS} rounds; these results are not")
    return page(record)


def parts_page(found: dict[str, dict[str, list[float]]]) -> list[str]:
    # from the fastest build, because the machine's speed differs between builds
    fastest = {
        name: {part: builds[of[WHOLE].index(min(of[WHOLE]))] for part, builds in of.items()}
        for name, of in found.items()
    }
    for of in fastest.values():
        of[REST] = of[WHOLE] - sum(value for part, value in of.items() if part != WHOLE)
    lines = [
        f"{MANY.label}'s {MANY.tensors} tensors, in a row: a step in the fastest build, and each of its parts alone.",
        "",
        "| us | " + " | ".join(fastest) + " |",
        "|---" * (len(fastest) + 1) + "|",
    ]
    for part in next(iter(fastest.values())):
        lines.append(f"| {part} | " + " | ".join(f"{of[part]:.0f}" for of in fastest.values()) + " |")
    cells = [f"{min(of[WHOLE]):.0f} to {max(of[WHOLE]):.0f}" for of in found.values()]
    return [*lines, f"| {WHOLE}, single builds | " + " | ".join(cells) + " |"]


def growth(small: dict[str, Any], large: dict[str, Any]) -> list[float]:
    """Return the quartiles, over builds, of the ratio of a step's time with large and with small tensors.

    Ratios are taken within builds because host speed differs between them.
    """
    ratios = [b / a for a, b in zip(small["builds"], large["builds"], strict=True)]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios


def passed(value: float, limit: float) -> str:
    return "PASS" if value <= limit else "MISS"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for host_time.json")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"steps timed in each condition, at least (default: {ROUNDS})"
    )
    parser.add_argument("--write-docs", type=Path, metavar="JSON", help="write results into docs/performance.md")
    parser.add_argument("--device", choices=sorted(LARGE), default="cuda", help="cpu: nothing is launched")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.write_docs:
        write_docs(parser, PAGE, args.write_docs, page_of_gpu)
        return
    if args.device == "cuda":
        need_gpu(parser, "; with --device cpu it measures the host's part alone")
    else:
        launch_nothing()
    cells = [
        (PARTS_CELL, partial(parts_us, args.rounds, args.device)),
        (CELL, partial(host_us, args.rounds, args.device)),
    ]
    path = args.out and args.out / "host_time.json"
    print(page(take(cells, path, measured_on=args.device, rounds=args.rounds)))


if __name__ == "__main__":
    main()
