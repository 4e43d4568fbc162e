"""DeepFM: a linear model, a factorization machine and a multilayer perceptron on the same inputs, summed to a logit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding


class DeepFM(nn.Module):
    """DeepFM with the defaults of DeepCTR-Torch, which the SNGM paper's click prediction seems to use.

    As in DeepCTR-Torch, each field has a table of embeddings and a table of linear weights; layer-wise methods (LARS,
    LAMB) treat each table as a layer. A forward pass concatenates the tables of all fields and looks up all categories
    at once, so that a GPU runs a few kernels instead of hundreds. Gradients are dense, and views of one tensor. Sparse
    gradients would be a different method, because momentum and weight decay change every row at every step.

    Embeddings and all weights except those of the last layer are initialised from N(0, init_std^2), biases of hidden
    layers and the last layer by torch's default, and the bias of the logit to 0. With the small default `init_std`,
    gradients of the perceptron are tiny, and SGD barely changes the perceptron for a long time. With `he`, the weights
    of all layers of the perceptron are initialised from N(0, 2 / inputs), as by He et al.

    Args:
        field_sizes: number of categories of each field; the categories of a field are numbered from 0.
        dense: number of real-valued inputs of a sample.
        dim: size of an embedding.
        hidden: widths of the perceptron's hidden layers.
        init_std: standard deviation of the initial weights, see above.
        he: initialise the perceptron as by He et al., see above.
        log_spans: spans for :func:`log_scaled`, which is applied to the real-valued inputs; None for no scaling.
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
    ) -> None:
        super().__init__()
        begins = torch.tensor([0, *field_sizes[:-1]]).cumsum(0)
        narrow = torch.int32 if sum(field_sizes) <= torch.iinfo(torch.int32).max else torch.int64
        self.register_buffer("offsets", begins.to(narrow), persistent=False)
        spans = None if log_spans is None else torch.tensor(log_spans, dtype=torch.get_default_dtype())
        self.register_buffer("log_spans", spans, persistent=False)
        self.embeddings = nn.ParameterList(torch.empty(size, dim) for size in field_sizes)
        self.weights = nn.ParameterList(torch.empty(size, 1) for size in field_sizes)
        self.linear = nn.Linear(dense, 1, bias=False)
        layers: list[nn.Module] = []
        width = len(field_sizes) * dim + dense
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        self.dnn = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))
        weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
        for weight in (*self.embeddings, *self.weights, self.linear.weight, *weights):
            nn.init.normal_(weight, std=init_std)
        if he:
            for weight in (*weights, self.head.weight):
                nn.init.kaiming_normal_(weight, nonlinearity="relu")

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Return logits of shape (n,) for real inputs of shape (n, dense) and categories of shape (n, fields)."""
        if self.log_spans is not None:
            dense = log_scaled(dense, self.log_spans)
        rows = categories + self.offsets
        weights, embeddings = look_up(self.weights, rows).squeeze(2), look_up(self.embeddings, rows)
        logits: Tensor = weights.sum(1) + fm(embeddings) + self.linear(dense).squeeze(1)
        deep: Tensor = self.head(self.dnn(torch.cat([embeddings.flatten(1), dense], 1)))
        return logits.add(deep.squeeze(1)).add(self.bias)

    def squared_embeddings(self) -> Tensor:
        """Return the sum of the squares of all embeddings."""
        return torch.stack([weight.square().sum() for weight in self.embeddings]).sum()


def look_up(tables: Iterable[Tensor], rows: Tensor) -> Tensor:
    """Return rows of concatenated tables, in the shape of `rows` with the width of the tables appended.

    On a GPU this uses `index_select`, which sums the gradient with atomic additions. The gradient of `embedding` sorts
    the rows first, which is deterministic, but slower: it takes a dozen kernels. This function uses `embedding` on a
    CPU, where it runs on every core, and if torch's deterministic algorithms are enabled.
    """
    table = torch.cat(list(tables))
    if table.is_cuda and not torch.are_deterministic_algorithms_enabled():
        return table.index_select(0, rows.flatten()).view(*rows.shape, -1)
    return embedding(rows, table)


def fm(embeddings: Tensor) -> Tensor:
    """Return the sum of the inner products of all pairs of a sample's embeddings, (n, fields, dim) to (n,).

    The result is half of (the square of the sum minus the sum of the squares), which takes time linear in the fields.
    """
    return 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1)


def log_scaled(dense: Tensor, spans: Tensor) -> Tensor:
    """Return log(1 + count) / log(1 + span) for counts that were divided by their span, maximum minus minimum.

    Most counts are close to 0 and a few are very large, so a linear scale would hardly distinguish small counts.

    >>> log_scaled(torch.tensor([-0.5, 0.0, 0.01, 1.0]), torch.tensor(900.0)).round(decimals=2)
    tensor([0.0000, 0.0000, 0.3400, 1.0000])
    """
    counts = dense.clamp(min=0) * spans  # values below the minimum of the training rows count as the minimum
    return counts.log1p() / spans.log1p()
