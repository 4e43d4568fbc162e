"""DeepFM on Criteo's clicks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..data.criteo import Criteo, load_criteo
from ..models.deepfm import DeepFM
from .base import Batch, Splits, Task
from .scores import auc, log_loss

REDUCTIONS = ("sum", "mean")
INTEGERS = ("minmax", "log")
INITS = ("small", "he")


class CriteoDeepFM(Task):
    """DeepFM on Criteo's clicks: 10 epochs at a constant rate, weight decay 1e-3, AUC.

    The paper gives these, the batches, momentum 0.9 and the rates to choose from, the same for all methods. It names
    the library, DeepCTR-Torch, whose loss is the sum over a batch: a gradient there grows with the batch, which matters
    to MSGD and to every weight decay. So that is the default here, and ``reduction=mean`` the other choice. The
    library's own small penalty, 1e-5 of the squares of the embeddings, is left out: weight decay does a hundred times
    as much. The paper trained on 10 million rows of Criteo's terabyte; the default is a sample of 80,000 rows of the
    older Kaggle set, so results cannot be held against its table.

    Settings: `files`, names of text files separated by commas, in the folder criteo of the data folder, plain or gzip;
    `reduction`, "sum" or "mean"; `integers`, "minmax" for those scaled to [0, 1] as the library's example does, or
    "log" for log(1 + x - least) / log(1 + greatest - least), with both of the training rows; `init`, "small" for the
    library's, where the perceptron's weights begin as 1e-4, or "he" for He et al.'s; `embedding_l2`, which adds half of
    it times the squares of the embeddings to the mean loss: a weight decay of the embeddings alone, besides the
    method's and the same for both reductions.
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
    pass_size_on_cpu = 8192  # the tables are read and written in every pass

    def __init__(
        self,
        files: str = "",
        reduction: str = "sum",
        integers: str = "minmax",
        init: str = "small",
        embedding_l2: float = 0.0,
    ) -> None:
        for name, value, known in (
            ("reduction", reduction, REDUCTIONS),
            ("integers", integers, INTEGERS),
            ("init", init, INITS),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        if not 0 <= embedding_l2 < math.inf:
            raise ValueError(f"embedding_l2 must be a number of at least 0, got {embedding_l2}")
        self.files, self.reduction, self.integers, self.init = files, reduction, integers, init
        self.embedding_l2 = embedding_l2
        self._loaded: Criteo | None = None

    def _rows(self) -> Criteo:
        if self._loaded is None:
            names = [name.strip() for name in self.files.split(",") if name.strip()]
            self._loaded = load_criteo(self.data_dir, names or None)
        return self._loaded

    def data(self) -> Splits:
        rows = self._rows()
        return Splits(rows.train, rows.test, rows.validation)

    def model(self) -> nn.Module:
        rows = self._rows()
        spans = rows.spans if self.integers == "log" else None
        return DeepFM(
            rows.field_sizes, he=self.init == "he", log_spans=spans,
            l2_linear=0.0, l2_embedding=self.embedding_l2 / 2,
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        dense, categories, labels = batch
        loss = binary_cross_entropy_with_logits(model(dense, categories), labels.to(dense.dtype))
        return loss + model.penalty() if self.embedding_l2 else loss  # type: ignore[operator]

    def scale(self, batch: int) -> float:
        return float(batch) if self.reduction == "sum" else 1.0

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """AUC and log loss over all samples at once."""
        found = [(model(dense, categories).float(), labels) for dense, categories, labels in batches]
        logits, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        return {"loss": log_loss(logits, labels).item(), "auc": auc(logits, labels).item()}
