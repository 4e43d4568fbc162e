"""The tensors that all contenders of one size share, and the ways to watch a contender step them."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contenders import Activity, Contender
from sizes import Size
from torch import Tensor

# Where buffers happen to lie makes a step on the CPU up to 5 % slower, and the host's part of a step on a GPU differs
# more than that between builds: all is laid out anew after so many rounds.
ROUNDS_A_BUILD = {"cpu": 8, "cuda": 2}
WARM_UP = 3  # steps: the first makes the state, and a kernel may be compiled again for the second's arguments
SAMPLE_SECONDS = 0.02  # of steps in a row on a GPU: many times the launch of the first, which nothing overlaps
WAIT_CYCLES, BUSY_CYCLES = 40_000_000, 6_000_000  # of a GPU's clock, some 20 and 3 ms: before steps on the host
FEWEST_IN_A_ROW, MOST_IN_A_ROW = 4, 100
PROFILED_STEPS = 4


class Arena:
    """The tensors of one size, and the ways to watch a contender step them."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        shapes = size.shapes()

        def draw() -> list[Tensor]:
            return [torch.randn(shape, generator=generator, device=device).mul_(0.05) for shape in shapes]

        self.params: list[Tensor] = [torch.nn.Parameter(p) for p in draw()]
        self.spare_grads = draw()  # the values of the gradients, and another place for them
        self.grads = [g.clone() for g in self.spare_grads]
        self.old_grads: list[Tensor | None] = []
        self.point_at(self.grads)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def point_at(self, grads: Sequence[Tensor | None]) -> None:
        for p, g in zip(self.params, grads, strict=True):
            p.grad = g

    @contextlib.contextmanager
    def keeping_grads(self, contender: Contender) -> Iterator[None]:
        yield
        if contender.spoils_grads:
            torch._foreach_copy_(self.grads, self.spare_grads)

    def prepare(self, contender: Contender) -> str:
        """Build it and let it make its state; say why it cannot run here, if it cannot."""
        try:
            step = contender.build(self.params)
            with self.keeping_grads(contender):
                for _ in range(WARM_UP):
                    step()
            self.wait()
        except Exception as error:  # whatever fails in one of them, the others are still worth measuring
            reason = str(error).strip().splitlines() or [""]
            return reason[0] if isinstance(error, ImportError | ValueError) else f"{error!r:.300}"
        contender.step = step
        return ""

    def rebuild(self, order: list[Contender]) -> None:
        """New state for each, elsewhere in memory, and new objects for the same parameters and gradients."""
        for contender in order:
            contender.step = None
        gc.collect()  # optimizers can be cycles, and the memory is needed
        self.params = [torch.nn.Parameter(p.detach()) for p in self.params]
        self.grads, self.spare_grads = [g.detach() for g in self.grads], [g.detach() for g in self.spare_grads]
        self.point_at(self.grads)
        for contender in order:
            contender.step = contender.build(self.params)
            with self.keeping_grads(contender):
                for _ in range(WARM_UP if self.on_gpu else 1):
                    contender.step()

    def seconds_a_step(self, contender: Contender, steps: int) -> float:
        assert contender.step is not None
        with self.keeping_grads(contender):
            self.wait()
            start = time.perf_counter()
            for _ in range(steps):
                contender.step()
            self.wait()
            return (time.perf_counter() - start) / steps

    def seconds_on_host(self, contender: Contender) -> list[float]:
        """Samples of the time until step() returns, in steps that follow one another without a wait.

        For `new_grads` a backward pass comes before each, outside the clock: as in training, the host has then had
        other work, and gradients are tensors that Python has not met yet, elsewhere in memory.

        The first two are left out: a processor that has slept takes up to four times as long over them. All sizes are
        stepped after the same wait and behind the same kernel, which keeps the GPU busy for longer than our steps take:
        else those of large tensors alone would come after a wait and be launched behind others.
        """
        assert contender.step is not None
        seconds = []
        with self.keeping_grads(contender):
            torch.cuda._sleep(WAIT_CYCLES)
            self.wait()
            torch.cuda._sleep(BUSY_CYCLES)
            for _ in range(8):
                if contender.new_grads:
                    self.compute_grads()
                start = time.perf_counter()
                contender.step()
                seconds.append(time.perf_counter() - start)
        self.old_grads = []
        self.point_at(self.grads)
        return seconds[2:]

    def compute_grads(self) -> None:
        """Gradients as a backward pass leaves them after `zero_grad`: new tensors, which Python has not met yet.

        Those of the step before are kept for so long, so that the new ones have other addresses.
        """
        self.old_grads = [p.grad for p in self.params]
        self.point_at([None] * len(self.params))
        torch.autograd.backward(self.params, self.spare_grads)

    def race(self, entrants: list[Contender], fewest: int, rounds: int, deadline: float) -> int:
        """Take as many rounds as the deadline leaves time for, within bounds, and say how many it were."""
        order, done = list(entrants), 0
        rounds_a_build = ROUNDS_A_BUILD[self.device.type]
        shuffle = random.Random(0).shuffle
        if self.on_gpu:
            for contender in order:
                steps = math.ceil(SAMPLE_SECONDS / self.seconds_a_step(contender, 1))
                contender.in_a_row = min(max(steps, FEWEST_IN_A_ROW), MOST_IN_A_ROW)
        while order and done < rounds and (done < fewest or time.perf_counter() < deadline):
            progress(f"round {done + 1} of {rounds}", passing=done % 10 > 0)
            if done % rounds_a_build == rounds_a_build - 1:
                self.rebuild(order)
            shuffle(order)
            for contender in order:
                if not contender.new_grads:  # Python's giving them to the parameters would be in the time
                    contender.wall.append(self.seconds_a_step(contender, contender.in_a_row))
                if self.on_gpu:
                    contender.host += self.seconds_on_host(contender)
            done += 1
        return done

    def peak_memory(self, contender: Contender) -> int:
        """The most bytes live during a step beyond those live before it."""
        assert contender.step is not None
        with self.keeping_grads(contender):
            if self.on_gpu:
                self.wait()
                before = torch.cuda.memory_allocated(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
                contender.step()
                self.wait()
                return torch.cuda.max_memory_allocated(self.device) - before
            # the CPU allocator reports each block it hands out and takes back to the profiler
            cpu = [torch.profiler.ProfilerActivity.CPU]
            with quiet(), torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
                contender.step()
        blocks = [e for e in raw_events(profiler) if e.name() == "[memory]"]
        live = peak = 0
        for block in sorted(blocks, key=lambda e: int(e.start_ns())):
            live += block.nbytes()
            peak = max(peak, live)
        return peak

    def activity(self, contender: Contender) -> Activity:
        """What the GPU did in a step, and how often the host waited for it."""
        assert contender.step is not None
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.wait()
        with quiet(), torch.profiler.profile(activities=kinds) as profiler:
            with torch.profiler.record_function(WINDOW):
                for i in range(PROFILED_STEPS):
                    if contender.new_grads:
                        self.point_at(self.grads if i % 2 else self.spare_grads)
                    contender.step()
            time.sleep(0.002)  # apart from the range above even if the clocks of host and GPU differ a little
            self.wait()
        if contender.spoils_grads:
            torch._foreach_copy_(self.grads, self.spare_grads)
        return count_activity(
            [
                Event(e.name(), e.start_ns(), e.duration_ns(), e.device_type().name == "CUDA")
                for e in raw_events(profiler)
            ],
            PROFILED_STEPS,
        )


# ---------------------------------------------------------------- what the profiler saw

WINDOW = "the steps measured"  # the name of their range in the profiler's events
WAITS = re.compile(r"cu(da)?((Stream|Device|Event|Ctx)Synchronize|Memcpy(2D|3D|HtoD|DtoH|DtoD)?(_v2)?)(_.*)?$")


class Event(NamedTuple):
    name: str
    start: int  # nanoseconds, and the next
    duration: int
    on_gpu: bool


def count_activity(events: Iterable[Event], steps: int) -> Activity:
    """Per step, of what the profiler saw. Nothing where it saw no GPU at work, as without permission to trace it."""
    events = list(events)
    host = [e for e in events if not e.on_gpu]
    # The profiler repeats the host's named ranges, such as "Optimizer.step#SGD.step", on the GPU's time line.
    ranges = {e.name for e in host}
    gpu = [e for e in events if e.on_gpu and e.name not in ranges]
    window = next((e for e in host if e.name == WINDOW), None)
    if not gpu or window is None:
        return Activity(None, None, None, None)
    copies = sum(e.name.startswith(("Memcpy", "Memset")) for e in gpu)
    end = window.start + window.duration  # the profiler waits for the GPU after it
    syncs = sum(bool(WAITS.match(e.name)) for e in host if window.start <= e.start <= end)
    launches = len(gpu) - copies
    return Activity(sum(e.duration for e in gpu) / 1e3 / steps, launches / steps, copies / steps, syncs / steps)


def raw_events(profiler: torch.profiler.profile) -> list[Any]:
    assert profiler.profiler is not None
    return list(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]


# ---------------------------------------------------------------- the machine


def output_of(*command: str) -> str:
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit() -> str:
    """Of the code measured; SNGM_COMMIT names it where a copy without its history is run."""
    if given := os.environ.get("SNGM_COMMIT"):
        return given
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no", "..")
    return (output_of("git", "rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of copying a tensor far larger than any cache."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)

    def seconds(copies: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(copies):
            target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / copies

    seconds(2)
    copies = 20 if device.type == "cuda" else 1
    return 2 * source.nbytes / min(seconds(copies) for _ in range(7))


def release(device: torch.device) -> None:
    """Give memory back: optimizers that nothing uses any more can be cycles, which only the collector frees."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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


def make_folder(path: Path) -> None:
    """Where results will go: before hours are spent on them."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(path, os.W_OK) else "may not be written to"
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        print(f"--out {path}: {problem}; name a folder for the results", file=sys.stderr)
        sys.exit(2)


def progress(text: str, passing: bool = False) -> None:
    """On a terminal, one line that the next overwrites; elsewhere lines that stay, without the passing ones."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text and not passing:
        print(text, file=sys.stderr, flush=True)
