"""A word-level language model on WikiText-2."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..data.wikitext import BPTT, SPLITS, Corpus, Text, Windows, load_wikitext2
from ..errors import UsageError
from ..models.lstm import WordLSTM
from .base import Batch, Splits, Task
from .scores import perplexity

TEST_STREAMS = 10  # parallel streams of text in evaluation, as in pytorch/examples' word_language_model
TEST_WINDOW = 350  # tokens per window in evaluation; no effect on scores, because windows pass on the recurrent state


class WikiText2LSTM(Task):
    """A two-layer LSTM on WikiText-2: 40 epochs, test perplexity of the epoch with the best validation perplexity.

    The SNGM paper states the data, the network (200 units, 200 dimensions, dropout 0.2), the epochs, the batches, and
    that gradients are clipped for MSGD. These settings are the defaults of pytorch/examples' word_language_model, so
    this task takes the other settings from that program: windows of 35 words, untied weights, clipping to 0.25, a
    learning rate that is divided by 4 when an epoch does not improve the validation perplexity, and no weight decay.
    That program uses no momentum and lr 20, which corresponds to lr 2 with momentum 0.9. The batch size is the number
    of parallel streams of text.

    From batch 1000 on, the learning rate would be divided after too few steps, so it decays linearly instead. At batch
    2000 the linear schedule was the best of three for SNGM and MSGD, and nearly the best for LARS. The learning rates
    to try are around the best learning rates at batch 2000.

    Args:
        bptt: number of words of a window.
        width: width of embeddings and hidden layers.
        layers: number of LSTM layers.
        dropout: dropout probability after the embedding and after each layer.
    """

    dataset = "wikitext2"
    metric = "perplexity"
    higher_is_better = False
    epochs = 40
    batches = (20, 1000, 2000)
    weight_decay = 0.0
    schedule = "plateau"
    result_of = "best"
    clip = {"msgd": 0.25}  # noqa: RUF012
    precision_on_gpu = "bfloat16"
    step = "captured"
    lrs = {  # noqa: RUF012
        "msgd": (2.0, 4.0, 8.0, 16.0),
        "lars-unscaled": (2.0, 4.0, 8.0, 16.0),
        "sngm": (0.7, 1.4, 2.8, 5.6),
    }

    def __init__(self, bptt: int = BPTT, width: int = 200, layers: int = 2, dropout: float = 0.2) -> None:
        if bptt < 1 or width < 1 or layers < 1:
            raise ValueError(f"bptt, width and layers must be at least 1, got {bptt}, {width} and {layers}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be >= 0 and < 1, got {dropout}")
        self.bptt, self.width, self.layers, self.dropout = bptt, width, layers, dropout

    @classmethod
    def usual(cls, batch: int) -> dict[str, Any]:
        return {**super().usual(batch), "schedule": cls.schedule if batch < 1000 else "linear"}

    @functools.cached_property
    def _corpus(self) -> Corpus:
        return load_wikitext2(self.data_dir)

    def data(self) -> Splits:
        corpus = self._corpus
        if self.bptt >= len(corpus.train):
            raise UsageError(f"bptt must be less than {len(corpus.train):,}, the words of the text, got {self.bptt}")
        return Splits(Text(corpus.train, self.bptt), _test_windows(corpus.test), _test_windows(corpus.valid))

    def facts(self) -> dict[str, Any]:
        corpus = self._corpus
        return {"vocabulary": len(corpus.words), "tokens": {name: len(getattr(corpus, name)) for name in SPLITS}}

    def model(self) -> nn.Module:
        return WordLSTM(len(self._corpus.words), self.width, self.width, self.layers, self.dropout)

    def start(self, model: nn.Module, batch: int) -> Batch:
        return tuple(t.transpose(0, 1) for t in cast(WordLSTM, model).start(batch))

    def follow(self, model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
        model = cast(WordLSTM, model)
        features, after = _read(model, batch[0], carried)
        return model.loss(features, batch[1]), after

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the mean loss over the words of a whole text, and the perplexity, its exponential."""
        model = cast(WordLSTM, model)
        carried: Batch = ()
        sums: list[Tensor] = []
        counts: list[Tensor] = []
        for inputs, targets in batches:
            features, carried = _read(model, inputs, carried or self.start(model, len(inputs)))
            sums.append(model.loss(features, targets, reduction="sum").double())
            counts.append((targets >= 0).sum())
        loss = (torch.stack(sums).sum() / torch.stack(counts).sum()).item()
        return {"loss": loss, "perplexity": perplexity(loss)}


def _read(model: WordLSTM, inputs: Tensor, carried: Batch) -> tuple[Tensor, Batch]:
    """Return the features and the new recurrent state, transposed: streams first instead of layers first."""
    outputs, cells = (t.transpose(0, 1).contiguous() for t in carried)
    features, after = model(inputs, (outputs, cells))
    return features, tuple(t.transpose(0, 1) for t in after)


def _test_windows(tokens: Tensor) -> Windows:
    most = max(1, len(tokens) // 2)  # a stream needs 2 tokens
    return Text(tokens, TEST_WINDOW).in_streams(min(TEST_STREAMS, most))
