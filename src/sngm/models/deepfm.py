"""DeepFM: a linear model, a factorization machine and a perceptron over the same categories, summed to one logit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding


class DeepFM(nn.Module):
    """DeepFM with the defaults of DeepCTR-Torch, on which the paper's CTR experiment seems to rest.

    As there, each field has a table of embeddings and one of weights, which layer-wise methods (LARS, LAMB) take for
    layers. A pass copies the tables of all fields into one and looks all categories up at once, so that a GPU is given
    a few kernels in place of hundreds. Gradients are dense, and parts of one tensor: momentum and weight decay move
    every row at every step, so leaving rows out would be another method.

    Embeddings and all weights but that of the last layer begin as normal numbers of `init_std`, the hidden layers'
    biases and the last layer as torch has them, the bias of the logit as 0. So small a perceptron passes next to no
    gradient on, and plain steps along gradients leave it as it is for long; with `he` its weights, and the last
    layer's, begin as He et al. have it, normal numbers of the variance 2 / inputs.

    Args:
        field_sizes: how many categories each field has; those of a field are numbered from 0.
        dense: how many numbers a sample has besides.
        dim: of an embedding.
        hidden: widths of the perceptron's hidden layers.
        init_std: see above.
        he: see above.
        log_spans: None takes the numbers as they are; with spans it is those of :func:`log_scaled`.
        dropout: of the hidden layers' outputs.
        l2_linear, l2_embedding, l2_dnn: what :meth:`penalty` weighs the parts with.
    """

    offsets: Tensor
    log_spans: Tensor | None

    def __init__(
        self,
        field_sizes: Sequence[int],
        dense: int = 13,
        *,
        dim: int = 4,
        hidden: Sequence[int] = (256, 128),
        init_std: float = 1e-4,
        he: bool = False,
        log_spans: Sequence[float] | None = None,
        dropout: float = 0.0,
        l2_linear: float = 1e-5,
        l2_embedding: float = 1e-5,
        l2_dnn: float = 0.0,
    ) -> None:
        super().__init__()
        if not field_sizes or min(field_sizes) < 1:
            raise ValueError(f"field_sizes must be positive numbers, got {list(field_sizes)}")
        if dim < 1 or dense < 1 or not hidden or min(hidden) < 1:
            raise ValueError(f"dim, dense and hidden must be positive, got {dim}, {dense} and {tuple(hidden)}")
        if log_spans is not None and (len(log_spans) != dense or not all(0 < span < math.inf for span in log_spans)):
            raise ValueError(f"log_spans must be {dense} positive numbers, got {list(log_spans)}")
        total = sum(field_sizes)
        begins = torch.tensor([0, *field_sizes[:-1]]).cumsum(0)
        narrow = torch.int32 if total <= torch.iinfo(torch.int32).max else torch.int64
        self.register_buffer("offsets", begins.to(narrow), persistent=False)
        spans = None if log_spans is None else torch.tensor(log_spans, dtype=torch.get_default_dtype())
        self.register_buffer("log_spans", spans, persistent=False)
        self.field_sizes, self.dim = list(field_sizes), dim
        self.l2_linear, self.l2_embedding, self.l2_dnn = l2_linear, l2_embedding, l2_dnn
        self.embeddings = nn.ParameterList(torch.empty(size, dim) for size in field_sizes)
        self.weights = nn.ParameterList(torch.empty(size, 1) for size in field_sizes)
        self.linear = nn.Linear(dense, 1, bias=False)
        layers: list[nn.Module] = []
        width = len(field_sizes) * dim + dense
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
            width = size
        self.dnn = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))
        for weight in (*self.embeddings, *self.weights, self.linear.weight, *self._dnn_weights()):
            nn.init.normal_(weight, std=init_std)
        if he:
            for weight in (*self._dnn_weights(), self.head.weight):
                nn.init.kaiming_normal_(weight, nonlinearity="relu")

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Logits of shape (n,), from numbers of shape (n, dense) and categories of shape (n, fields)."""
        if self.log_spans is not None:
            dense = log_scaled(dense, self.log_spans)
        rows = categories + self.offsets
        weights, embeddings = look_up(self.weights, rows).squeeze(2), look_up(self.embeddings, rows)
        logits: Tensor = weights.sum(1) + fm(embeddings) + self.linear(dense).squeeze(1)
        deep: Tensor = self.head(self.dnn(torch.cat([embeddings.flatten(1), dense], 1)))
        return logits.add(deep.squeeze(1)).add(self.bias)

    def penalty(self) -> Tensor:
        """What DeepCTR-Torch adds to its loss, which is the sum over the batch: each part's `l2` times its squares.

        Divide it by the batch to add it to a loss that is a mean. Biases are free, the last layer is part of the dnn.
        """
        total = self.bias.new_zeros(())
        parts = (
            (self.l2_linear, (*self.weights, self.linear.weight)),
            (self.l2_embedding, self.embeddings),
            (self.l2_dnn, (*self._dnn_weights(), self.head.weight)),
        )
        for l2, weights in parts:
            if l2:
                total = total + l2 * torch.stack([weight.square().sum() for weight in weights]).sum()
        return total

    def _dnn_weights(self) -> list[Tensor]:
        return [layer.weight for layer in self.dnn if isinstance(layer, nn.Linear)]


def look_up(tables: Iterable[Tensor], rows: Tensor) -> Tensor:
    """What the rows say of tables that follow one another: any shape, and the width of the tables.

    On a GPU the gradient of `index_select` is added up by atomics. That of `embedding` is sorted first, by a dozen
    kernels: the same at each run, but slower. On a CPU it is the one that uses every core.
    """
    table = torch.cat(list(tables))
    if table.is_cuda and not torch.are_deterministic_algorithms_enabled():
        return table.index_select(0, rows.flatten()).view(*rows.shape, -1)
    return embedding(rows, table)


def fm(embeddings: Tensor) -> Tensor:
    """The sum of the inner products of all pairs of a sample's embeddings, (n, fields, dim) to (n,).

    It is half of the square of their sum less the sum of their squares: linear in the number of fields.
    """
    return 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1)


def log_scaled(dense: Tensor, spans: Tensor) -> Tensor:
    """Counts on a log scale, log(1 + count) / log(1 + span), from counts divided by their spans.

    Counts of most kinds lie close to 0 with a few far from it, where a share of the greatest tells little.

    >>> log_scaled(torch.tensor([-0.5, 0.0, 0.01, 1.0]), torch.tensor(900.0)).round(decimals=2)
    tensor([0.0000, 0.0000, 0.3400, 1.0000])
    """
    counts = dense.clamp(min=0) * spans  # what is below the least of the rows that were fitted counts as that
    return counts.log1p() / spans.log1p()


def parameter_count(
    field_sizes: Sequence[int], dense: int = 13, *, dim: int = 4, hidden: Sequence[int] = (256, 128)
) -> int:
    """How many parameters a :class:`DeepFM` has, without making one.

    >>> parameter_count([10] * 26), parameter_count([200_000] * 26)
    (64546, 26063246)
    """
    widths = [len(field_sizes) * dim + dense, *hidden]
    layers = sum((before + 1) * after for before, after in pairwise(widths))
    return sum(field_sizes) * (1 + dim) + dense + layers + widths[-1] + 1
