"""DeepFM on Criteo's click logs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..data.criteo import Criteo, load_criteo
from ..models.deepfm import DeepFM
from .base import Batch, Splits, Task
from .scores import auc, log_loss

CHOICES = {"reduction": ("sum", "mean"), "integers": ("minmax", "log"), "init": ("small", "he")}  # values of settings


class CriteoDeepFM(Task):
    """DeepFM on Criteo's click logs: 10 epochs at a constant learning rate, weight decay 1e-3, AUC.

    The SNGM paper states these settings, the batches, momentum 0.9 and the learning rates to choose from, which are the
    same for all methods. The paper names its library, DeepCTR-Torch, whose loss is the sum over a batch. The gradient
    of a sum grows with the batch, which matters for MSGD and for every weight decay, so a sum is the default of this
    task too. The library adds a small penalty, 1e-5 times the squares of the embeddings. This task does not, because
    the weight decay changes the gradient fifty times as much. The paper trained on 10 million rows of Criteo's terabyte
    dataset. The default of this task is a sample of 80,000 rows of the older Kaggle dataset, so results cannot be
    compared with the paper's table.

    Args:
        files: names of text files, separated by commas, in the folder criteo of the data folder, plain or gzip.
        reduction: "sum" or "mean" of the loss over a batch.
        integers: "minmax" scales integers to [0, 1], as the library's example does; "log" scales them to log(1 + x -
            min) / log(1 + max - min), with minimum and maximum of the training rows.
        init: initial weights of the perceptron: "small" for the library's, about 1e-4, or "he" for those of He et al.
        embedding_l2: additional weight decay of the embeddings alone: ``embedding_l2 / 2`` times the sum of the squared
            embeddings is added to the mean loss, for both reductions.
    """

    dataset = "criteo"
    metric = "auc"
    epochs = 10
    batches = (1024, 8192)
    weight_decay = 1e-3
    schedule = "constant"
    decay_on = "all"
    bias_lr = "full"
    usual_lrs = (0.001, 0.01, 0.1)
    pass_size = 65536
    pass_size_on_cpu = 8192  # not smaller, because every pass reads and writes all tables

    def __init__(
        self,
        files: str = "",
        reduction: str = "sum",
        integers: str = "minmax",
        init: str = "small",
        embedding_l2: float = 0.0,
    ) -> None:
        for (name, allowed), value in zip(CHOICES.items(), (reduction, integers, init), strict=True):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if not 0 <= embedding_l2 < math.inf:
            raise ValueError(f"embedding_l2 must be a finite number >= 0, got {embedding_l2}")
        self.files, self.reduction, self.integers, self.init = files, reduction, integers, init
        self.embedding_l2 = embedding_l2

    @functools.cached_property
    def _rows(self) -> Criteo:
        names = [name.strip() for name in self.files.split(",") if name.strip()]
        return load_criteo(self.data_dir, names or None)

    def data(self) -> Splits:
        return Splits(self._rows.train, self._rows.test, self._rows.validation)

    def model(self) -> nn.Module:
        spans = self._rows.spans if self.integers == "log" else None
        return DeepFM(self._rows.field_sizes, he=self.init == "he", log_spans=spans)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        dense, categories, labels = batch
        loss = binary_cross_entropy_with_logits(model(dense, categories), labels.to(dense.dtype))
        if self.embedding_l2:
            loss = loss + self.embedding_l2 / 2 * cast(DeepFM, model).squared_embeddings()
        return loss

    def scale(self, batch: int) -> float:
        return float(batch) if self.reduction == "sum" else 1.0

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return log loss and AUC, computed over all samples together."""
        found = [(model(dense, categories).float(), labels) for dense, categories, labels in batches]
        logits, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        return {"loss": log_loss(logits, labels).item(), "auc": auc(logits, labels).item()}
