"""The paper's experiments as data: every table, what each figure shows, and what the text claims of them.

"Stochastic Normalized Gradient Descent with Momentum for Large-Batch Training", Science China Information Sciences.
Tables and figures are numbered in order of appearance. Accuracies and AUCs are fractions.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence about a table that runs can speak for or against.

    `kind` says what must be seen: `better`: `method` beats each of `others` at each batch; `similar`: it differs from
    each by no more than what counts as the same number; `falls`: its times fall from each batch to the next.
    """

    table: str
    text: str
    kind: str
    method: str
    others: tuple[str, ...]
    batches: tuple[int, ...]


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
        "cifar10-convnet", ("train_loss", "test_accuracy"), (128, 8192), (MSGD,),
    ),
    Figure(
        "figure-2", "Training loss and test accuracy of ResNet20 on CIFAR-10", "Figure 2, Image Classification",
        "cifar10-resnet20", ("train_loss", "test_accuracy"), (128, 8192), FIVE,
    ),
    Figure(
        "figure-3", "Validation perplexity of an LSTM on WikiText-2", "Figure 3, NLP", "wikitext2-lstm",
        ("validation_perplexity",), (20, 2000), (MSGD, LARS, SNGM),
    ),
    Figure(
        "figure-4", "Validation AUC of DeepFM on Criteo", "Figure 4, Click-Through Rate Prediction", "criteo-deepfm",
        ("validation_auc",), (1024, 8192), (MSGD, ADAM, LARS, LAMB, SNGM),
    ),
)  # fmt: skip

CLAIMS = (
    Claim("table-2", "Compared to LARS and CLARS, SNGM achieves better test accuracy for different batch sizes.",
          "better", SNGM, (LARS, CLARS), CIFAR),
    Claim("table-2", "In small-batch training SNGM achieves similar performance as MSGD.",
          "similar", SNGM, (MSGD,), (128,)),
    Claim("table-2", "In large-batch training SNGM achieves better test accuracy than the four baselines.",
          "better", SNGM, (MSGD, LARS, EXTRAP, CLARS), (8192,)),
    Claim("table-3", "The training time decreases with the increasing batch size.", "falls", SNGM, (), CIFAR),
    Claim("table-4", "SNGM and LARS achieve almost similar performance in small-batch training.",
          "similar", SNGM, (LARS,), (1024,)),
    Claim("table-4", "In large-batch training, SNGM outperforms LARS.", "better", SNGM, (LARS,), (32768,)),
    *(Claim(f"table-5-{data}", "SNGM achieves the best performance for almost all batch size settings.",
            "better", SNGM, (MSGD, LARS), (4096, 8192, 16384)) for data in ("cifar10", "cifar100")),
    Claim("table-6", "For small batch size, SNGM achieves test perplexity comparable to that of MSGD.",
          "similar", SNGM, (MSGD,), (20,)),
    Claim("table-6", "For large batch size, SNGM is better than MSGD.", "better", SNGM, (MSGD,), (1000, 2000)),
    Claim("table-6", "SNGM outperforms LARS for different batch sizes.", "better", SNGM, (LARS,), (20, 1000, 2000)),
    Claim("table-7", "Larger batch sizes can reduce the training time.", "falls", SNGM, (), (20, 1000, 2000)),
    Claim("table-8", "SNGM achieves better performance than the other methods.",
          "better", SNGM, (MSGD, ADAM, LARS, LAMB), (1024, 8192)),
)  # fmt: skip
