"""DeepFM: a linear model, a factorization machine and a perceptron over the same categories, summed to one logit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class DeepFM(nn.Module):
    """DeepFM with the defaults of DeepCTR-Torch, on which the paper's CTR experiment seems to rest.

    The categories of all fields are rows of one table, the first column of which is the weight of the linear part, the
    others the embedding. A step thus reads and writes one tensor instead of 52. Layer-wise methods (LARS, LAMB) take
    that tensor for one layer, where DeepCTR-Torch has a layer for each field and part.

    Embeddings and all weights but that of the last layer begin as normal numbers of `init_std`, the hidden layers'
    biases and the last layer as torch has them, the bias of the logit as 0.

    Args:
        field_sizes: how many categories each field has; those of a field are numbered from 0.
        dense: how many numbers a sample has besides.
        dim: of an embedding.
        hidden: widths of the perceptron's hidden layers.
        init_std: see above.
        dropout: of the hidden layers' outputs.
        l2_linear, l2_embedding, l2_dnn: what :meth:`penalty` weighs the parts with.
        sparse: whether the table's gradient is sparse; then `l2_linear` and `l2_embedding` must be 0, as they act on
            every row of it.
    """

    offsets: Tensor

    def __init__(
        self,
        field_sizes: Sequence[int],
        dense: int = 13,
        *,
        dim: int = 4,
        hidden: Sequence[int] = (256, 128),
        init_std: float = 1e-4,
        dropout: float = 0.0,
        l2_linear: float = 1e-5,
        l2_embedding: float = 1e-5,
        l2_dnn: float = 0.0,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        if not field_sizes or min(field_sizes) < 1:
            raise ValueError(f"field_sizes must be positive numbers, got {list(field_sizes)}")
        if dim < 1 or dense < 1 or not hidden or min(hidden) < 1:
            raise ValueError(f"dim, dense and hidden must be positive, got {dim}, {dense} and {tuple(hidden)}")
        if sparse and (l2_linear or l2_embedding):
            raise ValueError(
                "sparse=True needs l2_linear=0 and l2_embedding=0: their gradient is that of every row; "
                f"got {l2_linear} and {l2_embedding}"
            )
        total = sum(field_sizes)
        begins = torch.tensor([0, *field_sizes[:-1]]).cumsum(0)
        narrow = torch.int32 if total <= torch.iinfo(torch.int32).max else torch.int64
        self.register_buffer("offsets", begins.to(narrow), persistent=False)
        self.field_sizes, self.dim = list(field_sizes), dim
        self.l2_linear, self.l2_embedding, self.l2_dnn = l2_linear, l2_embedding, l2_dnn
        self.table = nn.Embedding(total, 1 + dim, sparse=sparse)
        self.linear = nn.Linear(dense, 1, bias=False)
        layers: list[nn.Module] = []
        width = len(field_sizes) * dim + dense
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
            width = size
        self.dnn = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))
        for weight in (self.table.weight, self.linear.weight, *self._dnn_weights()):
            nn.init.normal_(weight, std=init_std)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Logits of shape (n,), from numbers of shape (n, dense) and categories of shape (n, fields)."""
        found: Tensor = self.table(categories + self.offsets)
        weights, embeddings = found[..., 0], found[..., 1:]
        logits: Tensor = weights.sum(1) + fm(embeddings) + self.linear(dense).squeeze(1)
        deep: Tensor = self.head(self.dnn(torch.cat([embeddings.flatten(1), dense], 1)))
        return logits.add(deep.squeeze(1)).add(self.bias)

    def penalty(self) -> Tensor:
        """What DeepCTR-Torch adds to its loss, which is the sum over the batch: each part's `l2` times its squares.

        Divide it by the batch to add it to a loss that is a mean. Biases are free, the last layer is part of the dnn.
        """
        total = self.bias.new_zeros(())
        table = self.table.weight
        if self.l2_linear:
            total = total + self.l2_linear * (table[:, 0].square().sum() + self.linear.weight.square().sum())
        if self.l2_embedding:
            total = total + self.l2_embedding * table[:, 1:].square().sum()
        if self.l2_dnn:
            squares = [weight.square().sum() for weight in (*self._dnn_weights(), self.head.weight)]
            total = total + self.l2_dnn * torch.stack(squares).sum()
        return total

    def _dnn_weights(self) -> list[Tensor]:
        return [layer.weight for layer in self.dnn if isinstance(layer, nn.Linear)]


def fm(embeddings: Tensor) -> Tensor:
    """The sum of the inner products of all pairs of a sample's embeddings, (n, fields, dim) to (n,).

    It is half of the square of their sum less the sum of their squares: linear in the number of fields.
    """
    return 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1)


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
