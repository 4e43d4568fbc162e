"""``sngm ...`` in processes forked from this one, which has torch imported, or in new interpreters."""

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

import typer

from sngm import cli

from . import Wrong
from .faults import Fault, Operations

LIMIT = 120.0  # seconds until a command counts as one that does not end
MEMORY = 12 << 30  # address space: an absurd size must not take the machine's memory
CODES = (0, 1, 2, 3, 4, 130)
SOURCE = Path(cli.__file__).parents[2]
CLOSED = "http://127.0.0.1:9"  # a proxy that nobody listens on: nothing is downloaded
SETTINGS = {"OMP_NUM_THREADS": "1", "SNGM_COMMIT": "campaign", "http_proxy": CLOSED, "https_proxy": CLOSED}
WARM = (
    "train digits --epochs 1 --set width=2 --batch 512 --out r",
    "report r",
    "compare digits --epochs 1 --set width=2 --seeds 1 --methods sngm --batches 512 --dry-run",
    "probe digits --steps 1 --points 2 --samples 8 --iterations 2 --batch 512 --set width=2",
    "advise --gradients 8e6 --gap 2.3 --L 20 --sigma 15",
    "check-theory --only nobody",
    "paper list",
    "doctor",
    "data check",
    "--help",
)
CLEARED = re.compile("SNGM_|WORLD_SIZE|RANK|LOCAL_|MASTER_|PYTEST|COLUMNS")


@dataclass
class Ended:
    code: int | None  # None: it did not end; negative: the signal that ended it
    out: str
    err: str
    seconds: float
    log: list[str] = field(default_factory=list)  # its file operations

    def checked(self, own_file: str | None = None) -> "Ended":
        """Raise Wrong unless the exit code is a known one and every error is one clear line."""
        if self.code is None:
            raise Wrong(f"does not end within {LIMIT:g} s")
        if self.code not in CODES:
            raise Wrong(f"exit code {self.code}: {self.err[-300:]!r}")
        if "Traceback (most recent call last)" in self.err and not (own_file and own_file in self.err):
            raise Wrong(f"traceback, the last line: {self.err.strip().splitlines()[-1][:300]!r}")
        if self.code in (2, 3, 130) and not re.search("^(sngm: | *Usage: )", self.err + self.out, re.MULTILINE):
            raise Wrong(f"exit code {self.code} without an error line: {self.err[-300:]!r}")
        return self


def sngm(
    words: Sequence[str],
    folder: Path,
    *,
    environment: dict[str, str] | None = None,
    fault: Fault | None = None,
    signal_after: tuple[int, float] | None = None,
    to_group: bool = False,
    real: bool = False,
) -> Ended:
    """Run a command in a folder; send it a signal after some seconds, or let it inject a fault.

    Args:
        to_group: the signal goes to the whole process group, as that of Ctrl-C does.
        real: start a new interpreter, in place of a fork of this one. Faults need a fork.
    """
    alive, held = os.pipe()  # whoever the command starts holds one end: the other ends when all have ended
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        stack.callback(os.close, alive)
        began = time.monotonic()
        kept = {name: value for name, value in os.environ.items() if not CLEARED.match(name)}
        settings = {**kept, **SETTINGS, "HOME": str(folder), **(environment or {})}
        if real:
            start = {"stdin": subprocess.DEVNULL, "start_new_session": True, "pass_fds": [held], "preexec_fn": _limit}
            path = {"PYTHONPATH": str(SOURCE)}
            words = [sys.executable, "-m", "sngm", *words]
            out, err, _ = streams
            process = subprocess.Popen(words, cwd=folder, env={**settings, **path}, stdout=out, stderr=err, **start)
            pid = process.pid
        else:
            pid = os.fork()
            if pid == 0:
                _become(words, folder, settings, fault or Fault(), [stream.fileno() for stream in streams])
        os.close(held)
        if signal_after is not None and not select.select([alive], [], [], signal_after[1])[0]:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if to_group else os.kill)(pid, signal_after[0])
        ended = select.select([alive], [], [], LIMIT)[0]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it left running; nothing, if it has ended
        code = process.wait() if real else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for stream in streams:
            stream.seek(0)
            texts.append(stream.read().decode(errors="surrogateescape"))
        seconds = time.monotonic() - began
        return Ended(code if ended else None, texts[0], texts[1], seconds, texts[2].splitlines())


def warm_up() -> None:
    """Import what commands import, and keep the parser, so that forked processes start at once."""
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(cli.app)
    with tempfile.TemporaryDirectory() as folder:
        for line in WARM:
            log = sngm(line.split(), Path(folder), environment={"MODULES": "1"}).log
            for name in [line.split()[1] for line in log if line.startswith("module ")]:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page


def _limit() -> None:
    with contextlib.suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started this


def _become(words: Sequence[str], folder: Path, settings: dict[str, str], fault: Fault, streams: list[int]) -> None:
    """Turn this forked process into ``sngm ...``, and end it."""
    code: object = 1
    try:
        os.setsid()
        _limit()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(streams[0], 1)
        os.dup2(streams[1], 2)
        for number, name in ((1, "stdout"), (2, "stderr")):
            setattr(sys, name, os.fdopen(number, "w", closefd=False, errors="backslashreplace"))
        os.environ.clear()
        os.environ.update(settings)
        os.chdir(folder)
        # workers of a study are forked from here too: their server would take seconds to import torch
        context = multiprocessing.get_context
        multiprocessing.get_context = lambda method=None: context("fork" if method == "forkserver" else method)
        forkserver.ensure_running = lambda: None
        Operations(folder, fault, streams[2]).install()
        sys.argv = ["sngm", *words]
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # before a verb has begun
        code = 130
        print("sngm: interrupted", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command has ended
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if settings.get("MODULES"):
            os.write(streams[2], "".join(f"module {name}\n" for name in sys.modules).encode())
        os._exit(code if isinstance(code, int) else int(code is not None))
