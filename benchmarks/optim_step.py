"""Time one optimizer step on the tensors of ResNet-50, against torch.optim and pytorch_optimizer.

Every contender steps the same parameters with the same gradients, and only keeps its own state. Each round takes
one step of each, in shuffled order, so that whatever else the machine does falls on all alike, and the fastest
step of each counts. Compare numbers of one run only, and leave the machine alone while it lasts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sngm

EXAMPLES = """examples:
  python benchmarks/optim_step.py                      the table, and which speed limits hold
  python benchmarks/optim_step.py --repeats 100        steadier numbers on a busy machine
  python benchmarks/optim_step.py --check --json out.json   for CI: status 1 if a limit is missed
"""
Step = Callable[[], object]
MOMENTUM, DECAY = 0.9, 1e-4
ROUNDS_A_BUILD = 8  # where its buffers happen to lie makes a step up to 5 % slower, so they are laid out anew
LR = 1e-3  # parameters move by little over a whole run, yet LARS's lr * ratio stays a usual number


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The 161 parameters of torchvision's resnet50, in its order."""

    def conv(c_out: int, c_in: int, size: int) -> list[tuple[int, ...]]:
        return [(c_out, c_in, size, size), (c_out,), (c_out,)]  # the filters, then BatchNorm's scale and shift

    shapes = conv(64, 3, 7)
    c_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += conv(width, c_in, 1) + conv(width, width, 3) + conv(4 * width, width, 1)
            if block == 0:
                shapes += conv(4 * width, c_in, 1)
            c_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


# ---------------------------------------------------------------- contenders


@dataclass
class Contender:
    """`build` gets the parameters and returns what takes one step. `ideal`: least bytes a parameter to move."""

    method: str
    path: str
    ideal: int
    build: Callable[[list[Tensor]], Step]
    spoils_grads: bool = False  # their old values are put back outside the clock
    step: Step | None = None
    skipped: str = ""
    times: list[float] = field(default_factory=list)  # ms
    peak: int = 0  # bytes

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def best(self) -> float:
        return min(self.times)


def using(build: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[list[Tensor]], Step]:
    return lambda params: build(params, **{"lr": LR, **settings}).step


def clipped_sgd(params: list[Tensor]) -> Step:
    optimizer = torch.optim.SGD(params, LR, MOMENTUM, foreach=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=True)  # multiplies by 1, at the usual cost
        optimizer.step()

    return step


def norm_alone(params: list[Tensor]) -> Step:
    return lambda: torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], foreach=True)


def clars(params: list[Tensor]) -> Step:
    optimizer = sngm.CLARS(params, LR, MOMENTUM, DECAY)
    mean_norms = torch.stack([p.grad.norm() for p in params if p.grad is not None])
    return lambda: optimizer.step(mean_norms=mean_norms)


def theirs(name: str, **settings: Any) -> Callable[[list[Tensor]], Step]:
    def build(params: list[Tensor]) -> Step:
        import pytorch_optimizer

        return using(getattr(pytorch_optimizer, name), **settings)(params)

    return build


def contenders() -> list[Contender]:
    heavy = {"momentum": MOMENTUM}
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    return [
        Contender("SGD", "for-loop", 20, using(sgd, **heavy, foreach=False)),
        Contender("SGD", "foreach", 20, using(sgd, **heavy, foreach=True)),
        Contender("SGD", "fused", 20, using(sgd, **heavy, fused=True)),
        Contender("Adam", "foreach", 28, using(adam, lr=1e-6, foreach=True)),
        Contender("Adam", "fused", 28, using(adam, lr=1e-6, fused=True)),
        Contender("norm alone", "foreach", 4, norm_alone),
        Contender("clip + SGD", "foreach", 24, clipped_sgd),
        Contender("sngm.SNGM", "single", 24, using(sngm.SNGM, foreach=False)),
        Contender("sngm.SNGM", "foreach", 24, using(sngm.SNGM, foreach=True)),
        Contender("sngm.SNGM", "fused", 24, using(sngm.SNGM, fused=True)),
        Contender("sngm.SNGM decay", "fused", 28, using(sngm.SNGM, fused=True, weight_decay=DECAY)),
        Contender("sngm.SNGM block-wise", "fused", 24, using(sngm.SNGM, fused=True, scope="tensor")),
        Contender("sngm.LARS decay", "default", 28, using(sngm.LARS, weight_decay=DECAY)),
        Contender("sngm.CLARS decay", "default", 28, clars),
        Contender("sngm.LAMB decay", "default", 44, using(sngm.LAMB, weight_decay=DECAY)),
        Contender(
            "pytorch_optimizer.LARS decay",
            "default",
            28,
            theirs("LARS", weight_decay=DECAY, **heavy),
            spoils_grads=True,
        ),
        Contender("pytorch_optimizer.Lamb decay", "default", 44, theirs("Lamb", weight_decay=DECAY), spoils_grads=True),
    ]


# what must hold: the time of one, at most so many times the sum of others
LIMITS: list[tuple[str, float, tuple[str, ...]]] = [
    ("sngm.SNGM fused", 1.6, ("SGD fused",)),
    ("sngm.SNGM foreach", 1.3, ("SGD foreach", "norm alone foreach")),
    ("sngm.LARS decay default", 1.0, ("pytorch_optimizer.LARS decay default",)),
    ("sngm.LAMB decay default", 1.0, ("pytorch_optimizer.Lamb decay default",)),
    ("sngm.CLARS decay default", 1.1, ("sngm.LARS decay default",)),
]


# ---------------------------------------------------------------- measuring


class Bench:
    """Parameters, gradients, and the contenders that share them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        shapes = resnet50_shapes()

        def draw() -> list[Tensor]:
            return [0.05 * torch.randn(shape, generator=generator, device=device) for shape in shapes]

        self.params = [torch.nn.Parameter(p) for p in draw()]
        self.grads = draw()
        self.count = sum(p.numel() for p in self.params)
        assert (len(self.params), self.count) == (161, 25_557_032), "not the tensors of ResNet-50"
        for p, g in zip(self.params, self.grads, strict=True):
            p.grad = g.clone()
        self.contenders = contenders()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def keeping_grads(self, contender: Contender) -> Iterator[None]:
        yield
        if contender.spoils_grads:
            torch._foreach_copy_([p.grad for p in self.params], self.grads)

    def build(self) -> None:
        """Build each contender, let it make its state, and measure the memory its second step needs."""
        for i, contender in enumerate(self.contenders):
            progress(f"building {contender.name} ({i + 1} of {len(self.contenders)})", passing=i > 0)
            try:
                step = contender.build(self.params)
            except (ImportError, ValueError) as error:
                contender.skipped = str(error)
                continue
            contender.step = step
            with self.keeping_grads(contender):
                step()
            with self.keeping_grads(contender):
                contender.peak = self.peak_memory(step)

    def rebuild(self, order: list[Contender]) -> None:
        """New state for each, elsewhere in memory."""
        for contender in order:
            contender.step = None
        for contender in order:
            contender.step = contender.build(self.params)
            with self.keeping_grads(contender):
                contender.step()

    def peak_memory(self, step: Step) -> int:
        """The most bytes live during a step beyond those live before it."""
        if self.device.type == "cuda":
            self.wait()
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            step()
            self.wait()
            return torch.cuda.max_memory_allocated(self.device) - before
        # the CPU allocator reports each block it hands out and takes back to the profiler
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with quiet(), torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
            step()
        assert profiler.profiler is not None
        blocks = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        live = peak = 0
        for block in sorted(blocks, key=lambda e: e.start_ns()):
            live += block.nbytes()
            peak = max(peak, live)
        return peak

    def run(self, rounds: int, seconds: float) -> int:
        """Take at most so many rounds in about so many seconds, and say how many it were."""
        end = time.perf_counter() + seconds
        order = [c for c in self.contenders if c.step]
        shuffle = random.Random(0).shuffle
        for i in range(rounds):
            progress(f"round {i + 1} of {rounds}", passing=i % 10 > 0)
            if i % ROUNDS_A_BUILD == ROUNDS_A_BUILD - 1:
                self.rebuild(order)
            shuffle(order)
            for contender in order:
                assert contender.step is not None
                with self.keeping_grads(contender):
                    self.wait()
                    start = time.perf_counter()
                    contender.step()
                    self.wait()
                    contender.times.append(1e3 * (time.perf_counter() - start))
            if time.perf_counter() > end:
                break
        progress("")
        return i + 1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what C++ code writes to stderr, where torch's profiler announces itself."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def progress(text: str, passing: bool = False) -> None:
    """On a terminal, one line that the next overwrites; elsewhere lines that stay, without the passing ones."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text and not passing:
        print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- reporting


def output_of(*command: str) -> str:
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    named = [line for line in output_of("lscpu").splitlines() if line.startswith("Model name:")]
    model = named[0].removeprefix("Model name:").strip() if named else platform.processor()
    return f"{model} ({platform.machine()})"


def about(device: torch.device, threads: int) -> dict[str, Any]:
    return {
        "hardware": hardware(device),
        "device": str(device),
        "threads": threads,
        "torch": torch.__version__,
        "sngm": sngm.__version__,
        "commit": output_of("git", "rev-parse", "--short", "HEAD") or "unknown",
        "load": round(os.getloadavg()[0], 1),  # before the first step: what else the machine is doing
    }


def too_busy(bench: Bench, load: float) -> str:
    """A warning if other work had the machine too, else nothing."""
    jitter = statistics.median(statistics.median(c.times) / c.best for c in bench.contenders if c.times)
    if load < 1.0 and jitter < 1.5:
        return ""
    return f"Do not trust these numbers, the machine is busy: load {load}, medians {jitter:.1f}x the minimums.\n"


def table(bench: Bench) -> str:
    ran = [c for c in bench.contenders if c.times]
    reference = next((c.best for c in ran if c.name == "SGD fused"), float("nan"))
    rows = [("method", "path", "min ms", "median ms", "x SGD fused", "GB/s", "extra MB", "B/param")]
    for c in ran:
        rows.append(
            (
                c.method,
                c.path,
                f"{c.best:.2f}",
                f"{statistics.median(c.times):.2f}",
                f"{c.best / reference:.2f}",
                f"{c.ideal * bench.count / c.best / 1e6:.1f}",
                f"{c.peak / 1e6:.1f}",
                f"{c.peak / bench.count:.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(names + numbers))
    lines.insert(1, "-" * len(lines[0]))
    lines += [f"{c.name}: left out, {c.skipped}" for c in bench.contenders if c.skipped]
    lines.append("GB/s: of the bytes an ideal kernel would move. extra, B/param: peak memory a step needs on top.")
    return "\n".join(lines)


@dataclass
class Verdict:
    """Whether a limit holds; None if a contender it speaks of did not run."""

    what: str
    limit: float
    ratio: float | None

    @property
    def word(self) -> str:
        return "SKIP" if self.ratio is None else "PASS" if self.ratio <= self.limit else "MISS"

    def __str__(self) -> str:
        measured = "not measured" if self.ratio is None else f"{self.ratio:.2f}x"
        return f"{self.word}  {self.what} <= {self.limit:.1f}x: {measured}"


def verdicts(bench: Bench) -> list[Verdict]:
    best = {c.name: c.best for c in bench.contenders if c.times}
    found = []
    for name, limit, others in LIMITS:
        ran = all(n in best for n in (name, *others))
        ratio = best[name] / sum(best[other] for other in others) if ran else None
        found.append(Verdict(f"{name} / ({' + '.join(others)})", limit, ratio))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--threads", type=int, default=2, help="threads torch may use on the CPU (default: 2)")
    parser.add_argument(
        "--repeats", type=int, default=40, help="rounds, each one step of every contender (default: 40)"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="start no round after this time (default: 60)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write every time measured to this file")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a limit is missed")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no CUDA device here")
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    header = about(device, options.threads)
    print("One optimizer step on ResNet-50's 25,557,032 parameters in 161 tensors, float32")
    print(", ".join(f"{key} {value}" for key, value in header.items()), end="\n\n")

    bench = Bench(device)
    bench.build()
    header["rounds"] = bench.run(options.repeats, options.seconds)
    judged = verdicts(bench)
    print(table(bench), f"Minimum and median of {header['rounds']} rounds.", "", sep="\n")
    print(too_busy(bench, header["load"]), *judged, sep="\n")
    if options.json:
        results = [
            {"method": c.method, "path": c.path, "skipped": c.skipped, "ms": c.times, "peak_bytes": c.peak}
            for c in bench.contenders
        ]
        limits = [{**asdict(v), "verdict": v.word} for v in judged]
        options.json.write_text(json.dumps({**header, "results": results, "limits": limits}, indent=1) + "\n")
    missed = any(v.word == "MISS" for v in judged)
    return int(options.check and missed)


if __name__ == "__main__":
    sys.exit(main())
