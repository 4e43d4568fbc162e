"""Progress on stderr (a bar in a terminal or notebook, a line every few seconds in a log file), and signal handlers."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .environment import is_first

if TYPE_CHECKING:
    from rich.console import Console

LONG = 600.0  # seconds; a run on a CPU that takes longer is announced at its start
EVERY = 10.0  # seconds between the lines of a log
Steps = Callable[[int, int, dict[str, Any]], None]


def duration(seconds: float) -> str:
    """Return a duration as text, in a suitable unit.

    >>> duration(0.43), duration(7), duration(200), duration(9000)
    ('0.43 s', '7 s', '3 min', '2.5 h')
    """
    if seconds < 9.5:
        return f"{seconds:.2g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def note(text: str) -> None:
    """Print a message to stderr, so that stdout stays machine-readable; errors in writing it are ignored."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def console() -> Console:
    """Return the console that progress is shown on."""
    from rich.console import Console

    return Console(stderr=True)


def is_live(shown: Console) -> bool:
    """Return whether a console can redraw lines: a terminal can, and so can a notebook if ipywidgets is installed."""
    from importlib.util import find_spec

    return shown.is_terminal or (shown.is_jupyter and find_spec("ipywidgets") is not None)


class Pace:
    """Estimate of the time left in a run, from its speed in the last two minutes, or 240 steps if they take longer."""

    WARM_UP = 3  # number of first steps to leave out, because they may compile code

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = 0.0
        self.first: int | None = None
        self.marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=240)

    def left(self, step: int, steps: int) -> float | None:
        """Return the estimated seconds left, or None before there is an estimate. Call it after every step."""
        now = self.clock()
        if self.first is None:  # time before the first call, such as loading data, is not counted
            self.first, self.began = step, now
        if step - self.first < self.WARM_UP:
            slow = now - self.began > 10.0  # a rough estimate is better than none
            return (now - self.began) / (step - self.first) * (steps - step) if slow else None
        if not self.marks or now - self.marks[-1][0] >= 0.5:
            self.marks.append((now, step))
        then, earlier = self.marks[0]
        return (now - then) / (step - earlier) * (steps - step) if step - earlier >= 2 else None


@contextlib.contextmanager
def step_progress(
    wanted: bool = True, *, on_cpu: bool = False, clock: Callable[[], float] = time.monotonic
) -> Iterator[Steps]:
    """Yield a function that shows progress, to be called after each step of a run; only rank 0 shows anything.

    If a run on a CPU is estimated to take long, a message says so as soon as possible.
    """
    if not wanted or not is_first():
        yield lambda step, steps, metrics: None
        return
    pace, told, shown, last = Pace(clock), not on_cpu, console(), clock()
    live = is_live(shown)
    with _bar(shown) if live else contextlib.nullcontext(lambda step, steps, text: note(text)) as show:

        def update(step: int, steps: int, metrics: dict[str, Any]) -> None:
            nonlocal told, last
            left = pace.left(step, steps)
            if left is not None and not told:
                told = True
                if left > LONG:
                    note(f"about {duration(left)} on this CPU, at the pace of the first steps; Ctrl-C loses nothing")
            if clock() - last < (0.1 if live else EVERY) and not (live and step == steps):
                return
            last = clock()
            text = f"step {step} of {steps}" + (f", {duration(left)} left" if left is not None and step < steps else "")
            show(step, steps, text + (f", epoch {metrics['epoch']}: {in_words(metrics)}" if metrics else ""))

        yield update


def in_words(metrics: dict[str, Any]) -> str:
    """Return scores as readable text.

    >>> in_words({"epoch": 3, "test_accuracy": 0.97512, "test_loss": None})
    'test accuracy 0.9751'
    """
    return ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in metrics.items() if "_" in k and v is not None)


@contextlib.contextmanager
def _bar(shown: Console) -> Iterator[Callable[[int, int, str], None]]:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = BarColumn(bar_width=24), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=shown, refresh_per_second=5) as bar:
        line = bar.add_task("")
        yield lambda step, steps, text: bar.update(line, completed=step, total=steps, description=text)


def stopping_signals() -> list[int]:
    """Return the signals that stop a run: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (closed terminal) if not ignored."""
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has no SIGHUP
    ignored = hang_up is None or signal.getsignal(hang_up) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if hang_up is None or ignored else [hang_up])]


@contextlib.contextmanager
def handling(*signals: int, by: Callable[[int, Any], None] | signal.Handlers) -> Iterator[None]:
    """Handle signals with a function, or ignore them, inside a ``with`` block; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, by) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a run was asked to stop, by Ctrl-C, SIGTERM or a closed terminal.

    If the same signal comes a second time, the process ends at once.

    torchrun forwards a Ctrl-C and sends SIGTERM right after it; these two signals count as one request.
    """
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        if number in asked:
            os._exit(130)
        asked.append(number)
        if len(asked) == 1:
            note("stopping at the next step; once more to end at once")

    with handling(*stopping_signals(), by=ask):
        yield lambda: bool(asked)


@contextlib.contextmanager
def interrupt_on_signal() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first signal of `stopping_signals`; a second signal ends the process at once."""
    asked: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        if asked:
            os._exit(130)
        asked.append(number)
        note("stopping at the next step of each run; once more to end at once")
        raise KeyboardInterrupt

    with handling(*stopping_signals(), by=interrupt):
        yield
