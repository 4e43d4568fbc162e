"""The LSTM of pytorch/examples' word_language_model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import kernels
from .vocabulary_loss import vocabulary_loss

Hidden = tuple[Tensor, Tensor]  # outputs and cells, each of shape (layers, batch, width)


class Layer(nn.LSTM):
    """One layer of an LSTM, time first, by our own kernels where they know it: cuDNN's need some for each time step."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)

    def forward(self, x: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:  # type: ignore[override]
        kind, weights = x.device.type, self.all_weights[0]
        own = weights[0].dtype
        if kernels.serve(x, ndim=3):
            from .kernels import lstm

            low = torch.is_autocast_enabled(kind) and own != torch.float64  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(kind) if low else own
            # without autocast, inputs of another dtype are refused by torch's own
            if lstm.fits(x, self.hidden_size, dtype) and (low or x.dtype == own):
                self.check_forward_args(x, hidden, None)
                outputs, cell = lstm.Recur.apply(x, hidden[0][0], hidden[1][0], *weights, dtype)  # type: ignore[no-untyped-call]
                return outputs, (outputs[-1:], cell[None])
        # Under autocast cuDNN would get float16, whatever dtype was asked for, in which small gradients are lost. And
        # not every CPU's oneDNN has an LSTM in bfloat16.
        with torch.autocast(kind, enabled=False):
            x, (h, c) = super().forward(x.to(own), (hidden[0].to(own), hidden[1].to(own)))
        return x, (h.view_as(hidden[0]), c.view_as(hidden[1]))  # compiled by torch, they have a dimension more


class WordLSTM(nn.Module):
    """From words to the words that follow: embedding, LSTM layers and a decoder that shares no weights with it.

    As it stands it is the paper's, with 13,987,678 parameters: 33,278 words, all widths 200, dropout 0.2 after the
    embedding and after each of two layers. First weights are word_language_model's, number by number at equal seeds.

    Features are what the decoder is to be applied to, by `logits` or, without all logits at once, by `loss`.
    """

    def __init__(
        self, words: int = 33_278, embedding: int = 200, width: int = 200, layers: int = 2, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(words, embedding)
        # One module a layer: in nn.LSTM(layers=2, dropout=0.2) cuDNN draws numbers of its own between the layers,
        # from a state that torch's seeds do not reach once it is made (pytorch/pytorch#74177, #104697).
        self.rnn = nn.ModuleList(Layer(embedding if i == 0 else width, width) for i in range(layers))
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def start(self, batch: int) -> Hidden:
        """The hidden state before the first word of so many streams: zeros."""
        shape = len(self.rnn), batch, self.decoder.in_features
        return self.decoder.weight.new_zeros(shape), self.decoder.weight.new_zeros(shape)

    def forward(self, tokens: Tensor, hidden: Hidden | None = None) -> tuple[Tensor, Hidden]:
        """Features of shape (batch, length, width), and the hidden state after the last token.

        Args:
            tokens: words by their numbers, of shape (batch, length): a stream a row.
            hidden: what the call on the tokens before gave, to be detached by whoever wants gradients to end there;
                None: as `start` gives it. It comes back in the dtype in which it was given.
        """
        hidden = self.start(len(tokens)) if hidden is None else hidden
        x = self.drop(self.encoder(tokens.t()))  # the LSTM wants the time first: cheaper turned as numbers of words
        outputs, cells = [], []
        for layer, h, c in zip(self.rnn, *hidden, strict=True):
            x, (h, c) = layer(x, (h[None], c[None]))
            x = self.drop(x)
            outputs.append(h)
            cells.append(c)
        return x.transpose(0, 1), (torch.cat(outputs).to(hidden[0].dtype), torch.cat(cells).to(hidden[1].dtype))

    def logits(self, features: Tensor) -> Tensor:
        """For each feature a number for each word."""
        return self.decoder(features)  # type: ignore[no-any-return]

    def loss(self, features: Tensor, targets: Tensor, *, reduction: str = "mean", chunk: int | None = None) -> Tensor:
        """The cross entropy of targets of shape (batch, length): see :func:`vocabulary_loss`."""
        if features.shape[:-1] != targets.shape:
            raise ValueError(f"features for {tuple(features.shape[:-1])} targets, got {tuple(targets.shape)}")
        # in the order of time, in which features lie in memory
        rows = features.transpose(0, 1).reshape(-1, features.shape[-1])
        return vocabulary_loss(
            rows, self.decoder.weight, self.decoder.bias, targets.t().reshape(-1), reduction=reduction, chunk=chunk
        )
