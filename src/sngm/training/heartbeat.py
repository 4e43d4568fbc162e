"""Detection of a process that hangs while the other processes of a run wait for it."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from ..progress import note

EVERY = 5.0  # seconds between exchanges, at most


@dataclass(slots=True)
class Sign:
    """The last counts that a process published, its host and process id, and the time of the last change."""

    progress: int = 0
    activity: int = 0
    who: str = ""
    since: float = 0.0


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
        signs = {rank: Sign(since=time.monotonic()) for rank in others}
        me = f"{socket.gethostname()} {os.getpid()}"
        while True:
            store.set(str(self.rank), f"{self.progress} {self.activity} {me}")
            for rank, sign in signs.items():
                if not store.check([str(rank)]):
                    continue
                progress, activity, who = store.get(str(rank)).decode().split(" ", 2)
                if (int(progress), int(activity), who) != (sign.progress, sign.activity, sign.who):
                    signs[rank] = Sign(int(progress), int(activity), who, time.monotonic())
            self._judge(signs)
            if self.ended.wait(min(EVERY, self.timeout / 4)):
                return

    def _judge(self, signs: dict[int, Sign]) -> None:
        most = max([self.progress, *(sign.progress for sign in signs.values())])
        for rank, sign in signs.items():
            silent = time.monotonic() - sign.since
            if sign.progress < most and silent > self.timeout and not self.ended.is_set():
                host, _, pid = sign.who.partition(" ")
                note(
                    f"sngm: process {rank} of {self.ranks} hangs (process id {pid or 'unknown'} on "
                    f"{host or 'an unknown host'}): it has made no progress for {silent:.0f} s, and the others wait "
                    "for it. The job ends; the same command resumes, as torchrun --max-restarts does by itself"
                )
                os._exit(1)
