"""Time spent on training and evaluation in a run, including time before it was resumed."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

SECONDS_BETWEEN_CHECKPOINTS = 60.0


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return the peak GPU memory of tensors in this process, in bytes, as a field for the record; {} on a CPU."""
    return {"peak_memory": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


class Clock:
    """Seconds of training, of evaluation and in total, and when the next checkpoint is due.

    A lap is the time from one call of `begin_epoch`, `trained`, `evaluated` or `wrote` to the next. CUDA kernels run
    asynchronously, so call these methods only after a synchronisation with the device.
    """

    def __init__(self, before: dict[str, Any]) -> None:
        now = time.perf_counter()
        before = {"all": 0.0, "training": 0.0, "evaluation": 0.0, "epochs": [], **before}
        self.start = now - before["all"]
        self.training, self.evaluation = before["training"], before["evaluation"]
        self.epochs: list[float] = list(before["epochs"])  # training seconds of each epoch that was not interrupted
        self.epoch: float | None = None  # seconds of the current epoch; None if the run was resumed within this epoch
        self.mark = self.saved = now

    def begin_epoch(self, whole: bool) -> None:
        """Start timing an epoch; `whole` is whether the epoch starts at its first step."""
        self._lap()
        self.epoch = 0.0 if whole else None

    def trained(self, *, epoch_ends: bool = False) -> None:
        """End a lap, and count it as training."""
        seconds = self._lap()
        self.training += seconds
        self.epoch = None if self.epoch is None else self.epoch + seconds
        if epoch_ends and self.epoch is not None:
            self.epochs.append(self.epoch)

    def evaluated(self) -> None:
        """End a lap, and count it as evaluation."""
        self.evaluation += self._lap()

    def wrote(self) -> None:
        """End a lap in which a checkpoint was written. It counts as neither training nor evaluation."""
        self._lap()
        self.saved = self.mark

    def due(self, every: int | None, step: int) -> bool:
        """Return whether to write a checkpoint: every `every` steps, or about once a minute if `every` is None."""
        return step % every == 0 if every else time.perf_counter() - self.saved >= SECONDS_BETWEEN_CHECKPOINTS

    def pack(self) -> dict[str, Any]:
        """Return the times for a checkpoint."""
        everything = time.perf_counter() - self.start
        return {"all": everything, "training": self.training, "evaluation": self.evaluation, "epochs": self.epochs}

    def timing(self) -> dict[str, float]:
        """Return the times for the record. The time per epoch is a median, without the first epoch if possible."""
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
