"""The LSTM of pytorch/examples' word_language_model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..triton_support import kernels_support
from .vocabulary_loss import vocabulary_loss

Hidden = tuple[Tensor, Tensor]  # outputs and cells, each of shape (layers, batch, width)


class Layer(nn.LSTM):
    """One LSTM layer, time first, by Triton kernels if supported: cuDNN launches several kernels per time step."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)

    def forward(self, x: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:  # type: ignore[override]
        kind, weights = x.device.type, self.all_weights[0]
        own = weights[0].dtype
        if kernels_support(x, ndim=3):
            from .kernels import lstm

            low = torch.is_autocast_enabled(kind) and own != torch.float64  # autocast does not convert float64
            dtype = torch.get_autocast_dtype(kind) if low else own
            # without autocast, torch raises an error for inputs of another dtype
            if lstm.fits(x, self.hidden_size, dtype) and (low or x.dtype == own):
                self.check_forward_args(x, hidden, None)
                outputs, cell = lstm.Recur.apply(x, hidden[0][0], hidden[1][0], *weights, dtype)  # type: ignore[no-untyped-call]
                return outputs, (outputs[-1:], cell[None])
        # Under autocast, torch runs cuDNN's LSTM in float16, whatever the dtype of autocast, and small gradients
        # underflow in float16. On some CPUs oneDNN has no LSTM in bfloat16.
        with torch.autocast(kind, enabled=False):
            x, (h, c) = super().forward(x.to(own), (hidden[0].to(own), hidden[1].to(own)))
        return x, (h.view_as(hidden[0]), c.view_as(hidden[1]))  # with torch.compile, h and c have one more dimension


class WordLSTM(nn.Module):
    """A word-level language model: embedding, LSTM layers and a decoder with untied weights.

    The defaults are those of the SNGM paper and give 13,987,678 parameters: 33,278 words, all widths 200, dropout 0.2
    after the embedding and after each of two layers. With the same seed, the initial weights equal those of
    word_language_model.

    `forward` returns features. `logits` applies the decoder to features; `loss` does so without storing all logits at
    once.
    """

    def __init__(
        self, words: int = 33_278, embedding: int = 200, width: int = 200, layers: int = 2, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(words, embedding)
        # One module per layer, because in nn.LSTM(layers=2, dropout=0.2) cuDNN draws the dropout between the layers
        # with its own generator, which torch's seeds no longer affect (pytorch/pytorch#74177, #104697).
        self.rnn = nn.ModuleList(Layer(embedding if i == 0 else width, width) for i in range(layers))
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def start(self, batch: int) -> Hidden:
        """Return zeros, the recurrent state before the first word of `batch` streams."""
        shape = len(self.rnn), batch, self.decoder.in_features
        return self.decoder.weight.new_zeros(shape), self.decoder.weight.new_zeros(shape)

    def forward(self, tokens: Tensor, hidden: Hidden | None = None) -> tuple[Tensor, Hidden]:
        """Return features of shape (batch, length, width), and the recurrent state after the last token.

        Args:
            tokens: indices of words, of shape (batch, length): one stream per row.
            hidden: recurrent state from the call on the preceding tokens; detach it to truncate gradients there. None
                uses the state of `start`. The returned state has the dtype of `hidden`.
        """
        hidden = self.start(len(tokens)) if hidden is None else hidden
        x = self.drop(self.encoder(tokens.t()))  # transpose the small tensor of tokens, so that time is first
        outputs, cells = [], []
        for layer, h, c in zip(self.rnn, *hidden, strict=True):
            x, (h, c) = layer(x, (h[None], c[None]))
            x = self.drop(x)
            outputs.append(h)
            cells.append(c)
        return x.transpose(0, 1), (torch.cat(outputs).to(hidden[0].dtype), torch.cat(cells).to(hidden[1].dtype))

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of all words for each feature."""
        return self.decoder(features)  # type: ignore[no-any-return]

    def loss(self, features: Tensor, targets: Tensor, *, reduction: str = "mean", chunk: int | None = None) -> Tensor:
        """Return the cross-entropy loss of `targets`, of shape (batch, length), given the features.

        See :func:`vocabulary_loss` for `reduction` and `chunk`.
        """
        if features.shape[:-1] != targets.shape:
            raise ValueError(f"targets must be of shape {tuple(features.shape[:-1])}, got {tuple(targets.shape)}")
        # time first, the memory layout of the features
        rows = features.transpose(0, 1).reshape(-1, features.shape[-1])
        return vocabulary_loss(
            rows, self.decoder.weight, self.decoder.bias, targets.t().reshape(-1), reduction=reduction, chunk=chunk
        )
