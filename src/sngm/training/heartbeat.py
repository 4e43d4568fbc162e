"""Detection of a process that hangs while the other processes of a run wait for it."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

from ..progress import note

EVERY = 5.0  # seconds between exchanges, at most
NOTHING_YET = "0 0 unknown an unknown host"  # progress, activity, process id and host, until a process publishes them


class Heartbeat:
    """Counter of the progress of this process. It ends the job if another process makes none for `timeout` seconds.

    Every process publishes its counts in torchrun's store. The first process checks all other processes, and the
    second process checks the first. A process hangs if its counts do not change although other processes are ahead of
    it and wait.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, timeout: float = 0.0, store: Any = None) -> None:
        self.rank, self.ranks, self.timeout, self.store = rank, ranks, timeout, store
        self.progress = 0  # forward-backward passes and other events that every process has equally often
        self.activity = 0  # other events, such as batches evaluated by one process
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        if store is not None:
            self.thread.start()

    def advance(self) -> None:
        """Count an event that every process has equally often, such as a forward-backward pass."""
        self.progress += 1

    def act(self) -> None:
        """Count an event of this process alone, such as a batch that only it evaluates."""
        self.activity += 1

    def end(self) -> None:
        """Stop the thread, because Python would crash if the thread used the store while Python exits."""
        self.ended.set()
        if self.store is not None:
            self.thread.join(2 * EVERY)

    def _run(self) -> None:
        try:
            self._watch()
        except RuntimeError:  # the store is closed, because the job is ending
            return

    def _watch(self) -> None:
        store = self.store
        others = {0: range(1, self.ranks), 1: range(1)}.get(self.rank, range(0))
        seen = {rank: (NOTHING_YET, time.monotonic()) for rank in others}  # what each published, and since when
        while True:
            store.set(str(self.rank), f"{self.progress} {self.activity} {os.getpid()} {socket.gethostname()}")
            for rank, (published, _) in seen.items():
                now = store.get(str(rank)).decode() if store.check([str(rank)]) else NOTHING_YET
                if now != published:
                    seen[rank] = now, time.monotonic()
            self._judge(seen)
            if self.ended.wait(min(EVERY, self.timeout / 4)):
                return

    def _judge(self, seen: dict[int, tuple[str, float]]) -> None:
        most = max([self.progress, *(int(published.split()[0]) for published, _ in seen.values())])
        for rank, (published, since) in seen.items():
            progress, _, pid, host = published.split(" ", 3)
            silent = time.monotonic() - since
            if int(progress) < most and silent > self.timeout and not self.ended.is_set():
                note(
                    f"sngm: process {rank} of {self.ranks} hangs (process id {pid} on {host}): it has made no progress "
                    f"for {silent:.0f} s, and the others wait for it. The job ends; the same command resumes, as "
                    "torchrun --max-restarts does by itself"
                )
                os._exit(1)
