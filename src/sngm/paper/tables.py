"""The paper's experiments as data: every table, what each figure shows, and what the text claims of them.

"Stochastic Normalized Gradient Descent with Momentum for Large-Batch Training", Science China Information Sciences.
Tables and figures are numbered in order of appearance. Accuracies and AUCs are fractions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

MSGD, LARS, EXTRAP, CLARS, SNGM, ADAM, LAMB = "MSGD", "LARS", "EXTRAP-SGD", "CLARS", "SNGM", "ADAM", "LAMB"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of numbers, by method and batch size; of times, only SNGM's."""

    name: str
    title: str
    where: str
    task: str
    metric: str
    """As the task calls it, or "seconds" an epoch."""
    rows: dict[str, dict[int, float]]

    @property
    def batches(self) -> list[int]:
        return sorted({batch for row in self.rows.values() for batch in row})


@dataclass(frozen=True, slots=True)
class Figure:
    """Curves over training, which the paper draws and does not give as numbers."""

    name: str
    title: str
    where: str
    task: str
    metrics: tuple[str, ...]
    """Of a run's curve."""
    batches: tuple[int, ...]
    methods: tuple[str, ...]
    item: str
    """Whose runs it draws."""

    @property
    def pictures(self) -> dict[str, str]:
        """What the picture of each metric is called."""
        if len(self.metrics) == 1:
            return {self.metrics[0]: self.name}
        return {metric: f"{self.name}-{metric.replace('_', '-')}" for metric in self.metrics}


Cell = tuple[str, int]  # a row and a batch


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the paper that runs can speak for or against, and the comparisons that it is tested by.

    `kind` says what must be seen of each pair: "better", the first beats the second; "similar", they differ by no more
    than what counts as the same number. At `share` of the batch sizes, which are those of the first cells,
    all pairs must show it.
    """

    item: str
    text: str
    pairs: tuple[tuple[Cell, Cell], ...]
    kind: str = "better"
    share: float = 1.0
    metric: str = ""
    """What is compared in place of the item's metric."""
    also: tuple[str, ...] = ()
    """What else is compared, beside that: "train_loss", that of the last epoch."""
    note: str = ""
    """What of the sentence is tested, where that is not all of it."""
    by_paper: bool = True
    """Or a question of our own."""


def each(methods: Sequence[str], others: Sequence[str], batches: Sequence[int]) -> tuple[tuple[Cell, Cell], ...]:
    """Each of some methods beside each of others, at each batch."""
    return tuple(((m, b), (o, b)) for b in batches for m in methods for o in others)


def falling(method: str, batches: Sequence[int]) -> tuple[tuple[Cell, Cell], ...]:
    """Each batch beside the one before."""
    return tuple(((method, b), (method, a)) for a, b in itertools.pairwise(batches))


LARGE = (1024, 2048, 4096, 8192)
CIFAR = (128, *LARGE)
TABLES = (
    Table(
        "table-2", "Test accuracy of ResNet20 on CIFAR-10", "Table 2, Image Classification", "cifar10-resnet20",
        "accuracy",
        {
            MSGD: dict(zip(CIFAR, (0.9242, 0.9062, 0.8978, 0.8781, 0.8393), strict=True)),
            LARS: dict(zip(CIFAR, (0.9247, 0.9190, 0.9105, 0.9042, 0.8707), strict=True)),
            EXTRAP: dict(zip(CIFAR, (0.9190, 0.9041, 0.8914, 0.8835, 0.8578), strict=True)),
            CLARS: dict(zip(CIFAR, (0.9140, 0.9122, 0.9109, 0.8999, 0.8706), strict=True)),
            SNGM: dict(zip(CIFAR, (0.9252, 0.9219, 0.9180, 0.9103, 0.8923), strict=True)),
        },
    ),
    Table(
        "table-3", "Seconds an epoch of SNGM, ResNet20 on CIFAR-10", "Table 3, Image Classification",
        "cifar10-resnet20", "seconds", {SNGM: dict(zip(CIFAR, (13.95, 2.15, 1.78, 1.6, 1.49), strict=True))},
    ),
    Table(
        "table-4", "Test accuracy of ResNet50 on ImageNet", "Table 4, Image Classification", "imagenet-resnet50",
        "accuracy",
        {LARS: {1024: 0.7677, 32768: 0.7577}, SNGM: {1024: 0.7672, 32768: 0.7616}},
    ),
    *(
        Table(
            f"table-5-{data.lower().replace('-', '')}", f"Test accuracy of a ViT fine-tuned on {data}",
            "Table 5, Image Classification", f"{data.lower().replace('-', '')}-vit", "accuracy",
            {
                method: dict(zip((128, 1024, 4096, 8192, 16384), (value / 10_000 for value in values), strict=True))
                for method, values in rows.items()
            },
        )
        for data, rows in (
            ("CIFAR-10", {
                MSGD: (9896, 9902, 9893, 9881, 9840),
                LARS: (9908, 9897, 9894, 9885, 9836),
                SNGM: (9900, 9912, 9898, 9900, 9882),
            }),
            ("CIFAR-100", {
                MSGD: (9291, 9299, 9286, 9157, 8584),
                LARS: (9259, 9257, 9180, 9217, 9036),
                SNGM: (9306, 9299, 9293, 9236, 9048),
            }),
        )
    ),
    Table(
        "table-6", "Test perplexity of an LSTM on WikiText-2", "Table 6, NLP", "wikitext2-lstm", "perplexity",
        {
            MSGD: {20: 113.26, 1000: 114.34, 2000: 118.50},
            LARS: {20: 115.71, 1000: 116.29, 2000: 119.35},
            SNGM: {20: 113.74, 1000: 112.90, 2000: 115.65},
        },
    ),
    Table(
        "table-7", "Seconds an epoch of SNGM, LSTM on WikiText-2", "Table 7, NLP", "wikitext2-lstm", "seconds",
        {SNGM: {20: 69.8, 1000: 24.44, 2000: 15.22}},
    ),
    Table(
        "table-8", "Test AUC of DeepFM on Criteo", "Table 8, Click-Through Rate Prediction", "criteo-deepfm", "auc",
        {
            MSGD: {1024: 0.7397, 8192: 0.5},
            ADAM: {1024: 0.7311, 8192: 0.6666},
            LARS: {1024: 0.6065, 8192: 0.6006},
            LAMB: {1024: 0.7066, 8192: 0.6811},
            SNGM: {1024: 0.7489, 8192: 0.7514},
        },
    ),
)  # fmt: skip

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
            each((SNGM,), (MSGD, LARS), (128, 1024, 4096, 8192, 16384)), share=ALMOST_ALL)
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
