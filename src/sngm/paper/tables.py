"""The paper's results as data: the numbers of every table, the content of each figure, and the claims of the text.

"Stochastic Normalized Gradient Descent with Momentum for Large-Batch Training", Science China Information Sciences.
Tables and figures are numbered in order of appearance. Accuracies and AUCs are fractions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

MSGD, LARS, EXTRAP, CLARS, SNGM, ADAM, LAMB = "MSGD", "LARS", "EXTRAP-SGD", "CLARS", "SNGM", "ADAM", "LAMB"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the paper: curves over training, without numbers."""

    name: str
    title: str
    where: str
    task: str
    metrics: tuple[str, ...]
    """Names in a run's curve."""
    batches: tuple[int, ...]
    methods: tuple[str, ...]
    item: str
    """The experiment whose runs it shows."""

    @property
    def pictures(self) -> dict[str, str]:
        """The file name, without suffix, for each metric."""
        if len(self.metrics) == 1:
            return {self.metrics[0]: self.name}
        return {metric: f"{self.name}-{metric.replace('_', '-')}" for metric in self.metrics}


Cell = tuple[str, int]  # a row and a batch


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the paper that can be tested, and the pairs of cells that test it.

    `kind` is what each pair must show: "better", the first is better than the second; "similar", they differ by no more
    than the tolerance. All pairs must show it at `share` of the batch sizes, which are those of the first cells.
    """

    item: str
    text: str
    pairs: tuple[tuple[Cell, Cell], ...]
    kind: str = "better"
    share: float = 1.0
    metric: str = ""
    """Compared in place of the item's metric."""
    also: tuple[str, ...] = ()
    """Further metrics to compare, such as "train_loss", that of the last epoch."""
    note: str = ""
    """Which part of the sentence is tested, if not all of it."""
    by_paper: bool = True
    """False for a question of our own."""


def each(methods: Sequence[str], others: Sequence[str], batches: Sequence[int]) -> tuple[tuple[Cell, Cell], ...]:
    """Return all pairs of a method and another method, at each batch."""
    return tuple(((m, b), (o, b)) for b in batches for m in methods for o in others)


def falling(method: str, batches: Sequence[int]) -> tuple[tuple[Cell, Cell], ...]:
    """Return the pairs of each batch and the one before."""
    return tuple(((method, b), (method, a)) for a, b in itertools.pairwise(batches))


LARGE = (1024, 2048, 4096, 8192)
CIFAR = (128, *LARGE)
VIT = (128, 1024, 4096, 8192, 16384)
NUMBERS = {  # by table, method and batch; of the tables of times, the paper has only SNGM's
    table: {method: dict(zip(batches, values, strict=True)) for method, values in rows.items()}
    for table, batches, rows in (
        ("table-2", CIFAR, {
            MSGD: (0.9242, 0.9062, 0.8978, 0.8781, 0.8393),
            LARS: (0.9247, 0.9190, 0.9105, 0.9042, 0.8707),
            EXTRAP: (0.9190, 0.9041, 0.8914, 0.8835, 0.8578),
            CLARS: (0.9140, 0.9122, 0.9109, 0.8999, 0.8706),
            SNGM: (0.9252, 0.9219, 0.9180, 0.9103, 0.8923),
        }),
        ("table-3", CIFAR, {SNGM: (13.95, 2.15, 1.78, 1.6, 1.49)}),
        ("table-4", (1024, 32768), {LARS: (0.7677, 0.7577), SNGM: (0.7672, 0.7616)}),
        ("table-5-cifar10", VIT, {
            MSGD: (0.9896, 0.9902, 0.9893, 0.9881, 0.9840),
            LARS: (0.9908, 0.9897, 0.9894, 0.9885, 0.9836),
            SNGM: (0.9900, 0.9912, 0.9898, 0.9900, 0.9882),
        }),
        ("table-5-cifar100", VIT, {
            MSGD: (0.9291, 0.9299, 0.9286, 0.9157, 0.8584),
            LARS: (0.9259, 0.9257, 0.9180, 0.9217, 0.9036),
            SNGM: (0.9306, 0.9299, 0.9293, 0.9236, 0.9048),
        }),
        ("table-6", (20, 1000, 2000), {
            MSGD: (113.26, 114.34, 118.50), LARS: (115.71, 116.29, 119.35), SNGM: (113.74, 112.90, 115.65),
        }),
        ("table-7", (20, 1000, 2000), {SNGM: (69.8, 24.44, 15.22)}),
        ("table-8", (1024, 8192), {
            MSGD: (0.7397, 0.5), ADAM: (0.7311, 0.6666), LARS: (0.6065, 0.6006), LAMB: (0.7066, 0.6811),
            SNGM: (0.7489, 0.7514),
        }),
    )
}  # fmt: skip

FIVE = (MSGD, LARS, EXTRAP, CLARS, SNGM)
FIGURES = (
    Figure(
        "figure-1", "MSGD with a small and a large batch, a net of two convolutions on CIFAR-10",
        "Figure 1, Introduction",
        "cifar10-convnet", ("train_loss", "test_accuracy"), (128, 8192), (MSGD,), "figure-1",
    ),
    Figure(
        "figure-2", "Training loss and test accuracy of ResNet20 on CIFAR-10", "Figure 2, Image Classification",
        "cifar10-resnet20", ("train_loss", "test_accuracy"), (128, 8192), FIVE, "table-2",
    ),
    Figure(
        "figure-3", "Validation perplexity of an LSTM on WikiText-2", "Figure 3, NLP", "wikitext2-lstm",
        ("validation_perplexity",), (20, 2000), (MSGD, LARS, SNGM), "table-6",
    ),
    Figure(
        "figure-4", "Validation AUC of DeepFM on Criteo", "Figure 4, Click-Through Rate Prediction", "criteo-deepfm",
        ("validation_auc",), (1024, 8192), (MSGD, ADAM, LARS, LAMB, SNGM), "table-8",
    ),
)  # fmt: skip

ALMOST_ALL = 0.8  # of the batch sizes
OF_FIGURE_3 = "(Figure 3, batches 20 and 2000. Rates are chosen by the same data.)"
CLAIMS = (
    Claim("figure-1", "large-batch training indeed degrades the test accuracy and increases the training loss",
          (((MSGD, 128), (MSGD, 8192)),), also=("train_loss",)),
    Claim("table-2", "for almost all batch sizes, the methods that adopt normalized gradients, including LARS, CLARS, "
          "and SNGM, achieve better performance than others", each((LARS, CLARS, SNGM), (MSGD, EXTRAP), CIFAR),
          share=ALMOST_ALL),
    Claim("table-2", "Compared to LARS and CLARS, SNGM achieves better test accuracy for different batch sizes.",
          each((SNGM,), (LARS, CLARS), CIFAR)),
    Claim("table-2", "in the small-batch training, SNGM and other large-batch training methods achieve similar "
          "performance in terms of training loss and test accuracy as MSGD",
          each((LARS, EXTRAP, CLARS, SNGM), (MSGD,), (128,)), "similar", note="Tested by test accuracy alone."),
    Claim("table-2", "In large-batch training, SNGM achieves better training loss and test accuracy than the four "
          "baselines.", each((SNGM,), (MSGD, LARS, EXTRAP, CLARS), (8192,)), also=("train_loss",)),
    Claim("table-3", "the training time decreases with the increasing batch size", falling(SNGM, CIFAR)),
    Claim("table-3", "EXTRAP-SGD requires more time than other methods to tune hyperparameters and train models.",
          each((SNGM,), (EXTRAP,), CIFAR), note="Tested by the time of an epoch, against SNGM."),
    Claim("table-3", "CLARS needs to compute extra mini-batch gradients [...], which requires more training time",
          each((SNGM,), (CLARS,), CIFAR), note="Tested by the time of an epoch, against SNGM."),
    Claim("table-4", "SNGM and LARS achieve almost similar performance in small-batch training.",
          each((SNGM,), (LARS,), (1024,)), "similar"),
    Claim("table-4", "In large-batch training, SNGM outperforms LARS", each((SNGM,), (LARS,), (32768,))),
    *(Claim(f"table-5-{data}", "SNGM achieves the best performance for almost all batch size settings.",
            each((SNGM,), (MSGD, LARS), VIT), share=ALMOST_ALL)
      for data in ("cifar10", "cifar100")),
    Claim("table-6", "for small batch size, SNGM achieves test perplexity comparable to that of MSGD",
          each((SNGM,), (MSGD,), (20,)), "similar"),
    Claim("table-6", "for large batch size, SNGM is better than MSGD", each((SNGM,), (MSGD,), (1000, 2000))),
    Claim("table-6", "SNGM outperforms LARS for different batch sizes.", each((SNGM,), (LARS,), (20, 1000, 2000))),
    Claim("table-6", "In small-batch training, SNGM and LARS achieve validation perplexity comparable to that of MSGD.",
          each((SNGM, LARS), (MSGD,), (20,)), "similar", metric="validation_perplexity", note=OF_FIGURE_3),
    Claim("table-6", "in large-batch training, SNGM achieves better performance than MSGD and LARS",
          each((SNGM,), (MSGD, LARS), (2000,)), metric="validation_perplexity", note=OF_FIGURE_3),
    Claim("table-7", "larger batch sizes can reduce the training time", falling(SNGM, (20, 1000, 2000))),
    Claim("table-8", "SNGM achieves better performance than the other methods, especially in large-batch training.",
          each((SNGM,), (MSGD, ADAM, LARS, LAMB), (1024, 8192))),
)  # fmt: skip

TABLE_1 = {  # for an L-smooth function and C gradients in all
    "learning rate": {MSGD: "B / sqrt(C)", SNGM: "sqrt(B) / sqrt(C)"},
    "batch size": {MSGD: "min(sqrt(C) / L, C^(1/4))", SNGM: "sqrt(C)"},
    "bound on the mean gradient norm": {MSGD: "sqrt(O(1 / sqrt(C)) + O(B^2 / C))", SNGM: "O(1 / C^(1/4))"},
}
