"""What takes how long in a run, over restarts too."""

from __future__ import annotations

import statistics
import time
from typing import Any

SECONDS_BETWEEN_CHECKPOINTS = 60.0


class Clock:
    """Seconds of training, of evaluation and of all, and when the next checkpoint is due.

    A device works on when the host has gone ahead, so these are called only after the host has waited for it.
    """

    def __init__(self, before: dict[str, Any]) -> None:
        now = time.perf_counter()
        before = {"all": 0.0, "training": 0.0, "evaluation": 0.0, "epochs": [], **before}
        self.start = now - before["all"]
        self.training, self.evaluation = before["training"], before["evaluation"]
        self.epochs: list[float] = list(before["epochs"])  # training alone, of epochs made at a stretch
        self.epoch: float | None = None  # so far, if from its first step on
        self.mark = self.saved = now

    def begin_epoch(self, whole: bool) -> None:
        """Training begins or goes on; `whole`: from the epoch's first step."""
        self._lap()
        self.epoch = 0.0 if whole else None

    def trained(self, *, epoch_ends: bool = False) -> None:
        """What went by since the last call was training."""
        seconds = self._lap()
        self.training += seconds
        self.epoch = None if self.epoch is None else self.epoch + seconds
        if epoch_ends and self.epoch is not None:
            self.epochs.append(self.epoch)

    def evaluated(self) -> None:
        """What went by since the last call was evaluation."""
        self.evaluation += self._lap()

    def wrote(self) -> None:
        """What went by since the last call was neither: a checkpoint was written."""
        self._lap()
        self.saved = self.mark

    def due(self, every: int | None, step: int) -> bool:
        """Whether to write a checkpoint: every so many steps, or about once a minute."""
        return step % every == 0 if every else time.perf_counter() - self.saved >= SECONDS_BETWEEN_CHECKPOINTS

    def pack(self) -> dict[str, Any]:
        """For a checkpoint."""
        everything = time.perf_counter() - self.start
        return {"all": everything, "training": self.training, "evaluation": self.evaluation, "epochs": self.epochs}

    def timing(self) -> dict[str, float]:
        """For the record. The first epoch compiles and warms up, and counts only where there is no other."""
        found = {
            "seconds": time.perf_counter() - self.start,
            "training_seconds": self.training,
            "evaluation_seconds": self.evaluation,
        }
        if self.epochs:
            found["seconds_per_epoch"] = statistics.median(self.epochs[1:] or self.epochs)
        return {name: round(seconds, 4) for name, seconds in found.items()}

    def _lap(self) -> float:
        now = time.perf_counter()
        self.mark, last = now, self.mark
        return now - last
