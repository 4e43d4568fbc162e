"""A GPT-2-style language model on WikiText-2."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..data.wikitext import SPLITS, TokenCorpus, TokenText, load_wikitext2_tokens
from ..errors import UsageError
from ..models.gpt import GPT
from .base import Batch, Splits, Task, Tensors
from .scores import perplexity

TEST_PASS = 64  # windows per pass in evaluation; scores do not depend on it


class WikiText2GPT(Task):
    """A GPT-2-style decoder on WikiText-2: 10 epochs, test bits per byte of the epoch with the best validation score.

    The text is encoded as byte pairs of a vocabulary that is made from the training text. A sample is a window of
    `context` tokens, and each window is read on its own. Training leaves out the last tokens, which fill no window;
    scores cover every token of a split exactly once. The model has about 10 million parameters and 2.5 million tokens
    to train on, so it overfits when trained for long: hence the best epoch.

    Args:
        vocabulary: number of byte-pair tokens.
        context: tokens of a window.
        width: width of the residual stream.
        layers: number of transformer blocks.
        heads: attention heads per block.
        dropout: dropout probability.
    """

    dataset = "wikitext2"
    metric = "bits_per_byte"
    higher_is_better = False
    epochs = 10
    batches = (4, 32, 512)
    warmup = 1.0
    result_of = "best"
    clip = {"adam": 1.0, "adamw": 1.0, "msgd": 1.0, "nesterov": 1.0}  # noqa: RUF012  as usual for transformers
    precision_on_gpu = "bfloat16"
    micro = 16
    pass_size = 128
    pass_size_on_cpu = 16
    # around the best learning rates at batch 512, see docs/gpt.md; those of other methods are guesses
    usual_lrs = (0.03, 0.1, 0.3, 1.0)
    lrs = {  # noqa: RUF012
        "adam": (0.0003, 0.001, 0.003, 0.01),
        "adamw": (0.0003, 0.001, 0.003, 0.01),
        "muon": (0.001, 0.003, 0.01, 0.03),
        "spectral-sngm": (0.003, 0.01, 0.03, 0.1),
    }

    def __init__(
        self,
        vocabulary: int = 8192,
        context: int = 256,
        width: int = 320,
        layers: int = 6,
        heads: int = 5,
        dropout: float = 0.0,
    ) -> None:
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        self.vocabulary, self.context, self.width = vocabulary, context, width
        self.layers, self.heads, self.dropout = layers, heads, dropout

    @functools.cached_property
    def _corpus(self) -> TokenCorpus:
        return load_wikitext2_tokens(self.data_dir, self.vocabulary)

    def data(self) -> Splits:
        corpus = self._corpus
        whole = len(corpus.train.tokens) // self.context
        if not whole:
            most = len(corpus.train.tokens)
            raise UsageError(f"context must be at most {most:,}, the tokens of the training text, got {self.context}")
        train = Tensors(*(t[:whole] for t in corpus.train.windows(self.context)))
        return Splits(train, self._held_out(corpus.test), self._held_out(corpus.valid))

    def _held_out(self, text: TokenText) -> Tensors:
        return Tensors(*text.windows(self.context), *text.counts(self.context))

    def facts(self) -> dict[str, Any]:
        corpus = self._corpus
        splits = {name: getattr(corpus, name) for name in SPLITS}
        return {
            "vocabulary": len(corpus.vocabulary.tokens),
            "tokens": {name: len(text.tokens) for name, text in splits.items()},
            "bytes": {name: int(text.sizes.sum()) for name, text in splits.items()},
        }

    def model(self) -> nn.Module:
        return GPT(self.vocabulary, self.width, self.layers, self.heads, self.dropout)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cast(Tensor, model(*batch))

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the mean loss per token, and scores of the whole text: bits per byte, perplexity per word and token.

        All are computed from the loss summed over all tokens, so they do not depend on the batches.
        """
        sums: list[Tensor] = []
        for batch in batches:
            for inputs, targets, sizes, words in zip(*(torch.split(t, TEST_PASS) for t in batch), strict=True):
                loss = model(inputs, targets, reduction="sum").double()
                sums.append(torch.stack([loss, (targets >= 0).sum(), sizes.sum(), words.sum()]))
        total, tokens, size, count = torch.stack(sums).sum(0).tolist()
        return {
            "loss": total / tokens,
            "bits_per_byte": total / math.log(2) / size,
            "word_perplexity": perplexity(total / count),
            "token_perplexity": perplexity(total / tokens),
        }
