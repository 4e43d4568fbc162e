"""DeepFM on Criteo's clicks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ..data.criteo import Criteo, load_criteo
from ..models.deepfm import DeepFM
from .base import Batch, Splits, Task
from .scores import auc, log_loss

REDUCTIONS = ("sum", "mean")


class CriteoDeepFM(Task):
    """DeepFM on Criteo's clicks: 10 epochs at a constant rate, weight decay 1e-3, AUC.

    The paper gives these, the batches, momentum 0.9 and the rates to choose from, the same for all methods. It names
    the library, DeepCTR-Torch, whose loss is the sum over a batch: a gradient there grows with the batch, which matters
    to MSGD and to every weight decay. So that is the default here, and ``reduction=mean`` the other choice. The
    library's own small penalty, 1e-5 of the squares of the embeddings, is left out: weight decay does a hundred times
    as much. The paper trained on 10 million rows of Criteo's terabyte; the default is a sample of 80,000 rows of the
    older Kaggle set, so results cannot be held against its table.

    Settings: `files`, names of text files separated by commas, in the folder criteo of the data folder, plain or gzip;
    `reduction`, "sum" or "mean".
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

    def __init__(self, files: str = "", reduction: str = "sum") -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
        self.files, self.reduction = files, reduction
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
        return DeepFM(self._rows().field_sizes, l2_linear=0.0, l2_embedding=0.0)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        dense, categories, labels = batch
        return binary_cross_entropy_with_logits(model(dense, categories), labels.to(dense.dtype))

    def scale(self, batch: int) -> float:
        return float(batch) if self.reduction == "sum" else 1.0

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """AUC and log loss over all samples at once."""
        found = [(model(dense, categories).float(), labels) for dense, categories, labels in batches]
        logits, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        return {"loss": log_loss(logits, labels).item(), "auc": auc(logits, labels).item()}
