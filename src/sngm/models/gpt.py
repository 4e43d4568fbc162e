"""A decoder-only transformer in the style of GPT-2."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from ..errors import UsageError
from .vocabulary_loss import vocabulary_loss

BASE = 10_000.0  # of the rotary frequencies, as in RoFormer
STD = 0.02  # of initial weights, as in GPT-2

MOST_LAYERS = 1000


class GPT(nn.Module):
    """A language model of pre-norm transformer blocks. The embedding matrix also computes the logits (tied weights).

    With the defaults it has 9,998,400 parameters. It differs from GPT-2 in three points: positions are rotary, layers
    have no biases, and attention weights have no dropout. Initial weights are GPT-2's: N(0, 0.02^2). For the two
    matrices of a block that write to the residual stream, the standard deviation is 0.02 / sqrt(2 * layers).

    Args:
        tokens: size of the vocabulary.
        width: width of the residual stream, a multiple of twice the number of heads.
        layers: number of blocks.
        heads: attention heads per block.
        dropout: dropout probability of the embedding and of the outputs of attention and perceptron.
    """

    def __init__(
        self, tokens: int = 8192, width: int = 320, layers: int = 6, heads: int = 5, dropout: float = 0.0
    ) -> None:
        for name, value in {"tokens": tokens, "width": width, "layers": layers, "heads": heads}.items():
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if layers > MOST_LAYERS:  # building them would take minutes
            raise UsageError(f"layers must be at most {MOST_LAYERS:,}, got {layers:,}")
        if width % (2 * heads):
            raise UsageError(f"width must be a multiple of 2 * heads = {2 * heads}, got {width}")
        if not 0 <= dropout < 1:
            raise UsageError(f"dropout must be >= 0 and < 1, got {dropout}")
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        # Rotary rather than learned positions: they have no matrix, which Muon or spectral SNGM would orthogonalise
        # like a weight, and they do not limit the length of a text.
        self.head_size = width // heads
        nn.init.normal_(self.embedding.weight, std=STD)
        for name, p in self.blocks.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=STD / math.sqrt(2 * layers) if name.endswith(Block.OUTPUTS) else STD)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """Return the logits of the next token at each position; with `targets`, return the cross-entropy loss.

        The loss never stores all logits at once: see :func:`sngm.models.vocabulary_loss.vocabulary_loss`.

        Args:
            tokens: token numbers, of shape (batch, length).
            targets: the next tokens, of the same shape; negative ones are ignored.
            reduction: "mean" or "sum" of the loss over the targets.
        """
        x = self.drop(self.embedding(tokens))
        rotation = rotations(tokens.shape[1], self.head_size, x)
        for block in self.blocks:
            x = block(x, rotation)
        x = self.norm(x)
        weight = self.embedding.weight
        if targets is None:
            return linear(x, weight)
        if targets.shape != tokens.shape:
            raise ValueError(f"targets must be of shape {tuple(tokens.shape)}, got {tuple(targets.shape)}")
        none = weight.new_zeros(len(weight))  # the logits have no bias
        return vocabulary_loss(x.flatten(0, 1), weight, none, targets.flatten(), reduction=reduction)


class Block(nn.Module):
    """Causal attention and a perceptron of two layers; each reads a LayerNorm of the residual stream and adds to it.

    The layers `query`, `key` and `value` only hold weights: they are not called, so hooks on them have no effect.
    """

    OUTPUTS = ("out.weight", "down.weight")  # the matrices that write to the residual stream

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        # three matrices, not one: methods that normalise each matrix treat them separately
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the residual stream after this block, of shape (batch, length, width)."""
        # one product for all three, which is faster than three
        weight = torch.cat([layer.weight for layer in (self.query, self.key, self.value)])
        y = linear(self.norm1(x), weight).view(*x.shape[:2], 3, self.heads, -1)
        both, value = torch.split(y, [2, 1], dim=2)
        query, key = rotated(both, *(part.to(y.dtype) for part in rotation)).unbind(2)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value.squeeze(2)))
        y = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        y = gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.drop(self.down(y))  # type: ignore[no-any-return]


def rotations(length: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles at each position, of shape (length, 1, 1, size), for `rotated`.

    At position p, elements i and i + size / 2 of a head are rotated by ``p * BASE ** (-2 i / size)``. The
    results are on the device of `like`, in float64 if `like` is float64, else in float32.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    exponents = torch.arange(0, size, 2, dtype=dtype, device=like.device) / -size
    angles = torch.outer(torch.arange(length, dtype=dtype, device=like.device), BASE**exponents)[:, None, None]
    return angles.cos().repeat(1, 1, 1, 2), torch.cat([-angles.sin(), angles.sin()], -1)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return heads of shape (batch, length, any, any, size) with each pair (i, i + size / 2) rotated by its angle."""
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)
