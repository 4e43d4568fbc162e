"""The tensors that all contenders of one size share, and measurements of a contender's steps on them."""

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
from contenders import Activity, Contender, Step
from sizes import Size
from torch import Tensor

# Memory placement changes the time of a step on the CPU by up to 5 %, and the host time of a step on a GPU by more:
# optimizers are rebuilt after this many rounds.
ROUNDS_A_BUILD = {"cpu": 8, "cuda": 2}
WARM_UP = 3  # steps: the first creates the state, the second may compile a kernel again for other arguments
SAMPLE_SECONDS = 0.02  # of a loop on a GPU
FEWEST_IN_A_ROW, MOST_IN_A_ROW = 4, 60
PROFILED_STEPS = 4


class Arena:
    """The tensors of one size, and measurements of a contender's steps on them."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        shapes = size.shapes()

        def draw() -> list[Tensor]:
            return [torch.randn(shape, generator=generator, device=device).mul_(0.05) for shape in shapes]

        self.params: list[Tensor] = [torch.nn.Parameter(p) for p in draw()]
        self.spare_grads = draw()  # the gradients' original values
        self.grads = [g.clone() for g in self.spare_grads]
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
        """Build a contender and take warm-up steps. Return why it cannot run here, or an empty string."""
        try:
            step = contender.build(self.params)
            with self.keeping_grads(contender):
                for _ in range(WARM_UP):
                    step()
            self.wait()
        except Exception as error:  # the other contenders are still measured
            reason = str(error).strip().splitlines() or [""]
            return reason[0] if isinstance(error, ImportError | ValueError) else f"{error!r:.300}"
        contender.step = step
        return ""

    def rebuild(self, order: list[Contender]) -> None:
        """Rebuild all contenders with new state at other addresses, and new tensor objects on the same memory."""
        for contender in order:
            contender.step = None
        gc.collect()  # optimizers can be reference cycles
        self.params = [torch.nn.Parameter(p.detach()) for p in self.params]
        self.grads, self.spare_grads = [g.detach() for g in self.grads], [g.detach() for g in self.spare_grads]
        self.point_at(self.grads)
        for contender in order:
            contender.step = contender.build(self.params)
            with self.keeping_grads(contender):
                for _ in range(WARM_UP if self.on_gpu else 1):
                    contender.step()

    def seconds_a_step(self, contender: Contender) -> float:
        """Return the time that a step takes, or on a GPU what it adds to a loop of backward passes."""
        assert contender.step is not None
        if self.on_gpu:
            alone = self.seconds_a_loop(lambda: None, contender.in_a_row)[0]
            seconds, on_host = self.seconds_a_loop(contender.step, contender.in_a_row)
            contender.host += on_host
            return seconds - alone
        with self.keeping_grads(contender):
            start = time.perf_counter()
            contender.step()
            return time.perf_counter() - start

    def seconds_a_loop(self, step: Step, steps: int) -> tuple[float, list[float]]:
        """Return the time of a backward pass and a step, and the times until each step() returned."""
        on_host = []
        self.compute_grads()
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.compute_grads()
            before = time.perf_counter()
            step()
            on_host.append(time.perf_counter() - before)
        self.wait()
        seconds = (time.perf_counter() - start) / steps
        self.point_at(self.grads)
        return seconds, on_host

    def compute_grads(self) -> None:
        """Compute gradients as a backward pass after `zero_grad` does, in new tensors."""
        self.point_at([None] * len(self.params))
        torch.autograd.backward(self.params, self.spare_grads)

    def race(self, entrants: list[Contender], fewest: int, rounds: int, deadline: float) -> int:
        """Run rounds until the deadline, at least `fewest` and at most `rounds`, and return their number."""
        order, done = list(entrants), 0
        rounds_a_build = ROUNDS_A_BUILD[self.device.type]
        shuffle = random.Random(0).shuffle
        if self.on_gpu:
            for contender in order:
                assert contender.step is not None
                steps = math.ceil(SAMPLE_SECONDS / self.seconds_a_loop(contender.step, 1)[0])
                contender.in_a_row = min(max(steps, FEWEST_IN_A_ROW), MOST_IN_A_ROW)
        while order and done < rounds and (done < fewest or time.perf_counter() < deadline):
            progress(f"round {done + 1} of {rounds}", passing=done % 10 > 0)
            if done % rounds_a_build == rounds_a_build - 1:
                self.rebuild(order)
            shuffle(order)
            for contender in order:
                contender.wall.append(self.seconds_a_step(contender))
            done += 1
        return done

    def peak_memory(self, contender: Contender) -> int:
        """Return the peak memory of a step in bytes, beyond what is allocated before it."""
        assert contender.step is not None
        with self.keeping_grads(contender):
            if self.on_gpu:
                self.wait()
                before = torch.cuda.memory_allocated(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
                contender.step()
                self.wait()
                return torch.cuda.max_memory_allocated(self.device) - before
            # the CPU allocator reports each allocation and release to the profiler
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
        """Return the GPU activity of a step, and how often the host waited for the GPU."""
        assert contender.step is not None
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.wait()
        with quiet(), torch.profiler.profile(activities=kinds) as profiler:
            with torch.profiler.record_function(WINDOW):
                for _ in range(PROFILED_STEPS):
                    contender.step()
            time.sleep(0.002)  # keeps the synchronisation below out of the range if the clocks differ
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


# ---------------------------------------------------------------- profiler events

WINDOW = "the steps measured"  # name of the profiler range around them
WAITS = re.compile(r"cu(da)?((Stream|Device|Event|Ctx)Synchronize|Memcpy(2D|3D|HtoD|DtoH|DtoD)?(_v2)?)(_.*)?$")


class Event(NamedTuple):
    name: str
    start: int  # nanoseconds, as is duration
    duration: int
    on_gpu: bool


def count_activity(events: Iterable[Event], steps: int) -> Activity:
    """Return the activity per step from profiler events; all None if there are no GPU events, as without permission."""
    events = list(events)
    host = [e for e in events if not e.on_gpu]
    # The profiler repeats the host's named ranges, such as "Optimizer.step#SGD.step", on the GPU's timeline.
    ranges = {e.name for e in host}
    gpu = [e for e in events if e.on_gpu and e.name not in ranges]
    window = next((e for e in host if e.name == WINDOW), None)
    if not gpu or window is None:
        return Activity(None, None, None, None)
    copies = sum(e.name.startswith(("Memcpy", "Memset")) for e in gpu)
    end = window.start + window.duration  # the profiler synchronises after it
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
    """Return the commit of the measured code; SNGM_COMMIT overrides it for copies without a git history."""
    if given := os.environ.get("SNGM_COMMIT"):
        return given
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no", "..")
    return (output_of("git", "rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def copy_bandwidth(device: torch.device) -> float:
    """Return the bandwidth of copying a large tensor, in bytes read and written per second."""
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
    """Free unused memory: unused optimizers can be reference cycles, which only the garbage collector frees."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what C++ code, such as torch's profiler, writes to stderr."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def make_folder(path: Path) -> None:
    """Create the folder for results; exit if it is not writable, before time is spent on measurements."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(path, os.W_OK) else "may not be written to"
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        print(f"--out {path}: {problem}; name a folder for the results", file=sys.stderr)
        sys.exit(2)


def progress(text: str, passing: bool = False) -> None:
    """Print progress: on a terminal one line that is overwritten, elsewhere separate lines without `passing` ones."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text and not passing:
        print(text, file=sys.stderr, flush=True)
