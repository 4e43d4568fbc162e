"""Scores of a whole split that are no mean over batches, computed where the predictions are."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def auc(scores: Tensor, labels: Tensor) -> Tensor:
    """The area under the ROC curve: how often a sample of label 1 scores higher than one of label 0, ties half.

    It equals scikit-learn's ``roc_auc_score``. Pairs are counted in whole numbers, so the order of the samples does
    not matter, and nothing is read back from the device. Where it is not defined the result is NaN: with labels of
    one class only, or a score that is NaN, as a diverged model gives.

    Args:
        scores: of shape (n,): logits or probabilities.
        labels: of shape (n,), 0 or 1, of any dtype.

    Returns:
        Float64 without dimensions, on the device of the scores.

    >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])).item()
    0.875
    """
    _same(scores, labels)
    values, order = scores.detach().sort()
    positive = labels.to(scores.device)[order] == 1
    negatives = (~positive).long().cumsum(0)  # up to and with each
    edge = values[1:] != values[:-1]
    outer = edge.new_ones(min(1, len(values)))
    before = negatives - (~positive).long()
    # those with the same score form a group: negatives below its first, and up to its last
    below = torch.where(torch.cat([outer, edge]), before, 0)
    upto = torch.where(torch.cat([edge, outer]), negatives, len(values))
    if len(values):
        below, upto = below.cummax(0).values, upto.flip(0).cummin(0).values.flip(0)
    twice = torch.where(positive, below + upto, 0).sum()
    ones = positive.sum()
    area = twice.double() / (2 * ones * (len(values) - ones)).double()  # 0 / 0 with one class
    return torch.where(values.isnan().any(), torch.nan, area)


def log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of -log of the probability given to the right label, in float64; NaN of nothing.

    >>> round(log_loss(torch.tensor([0.0, 0.0]), torch.tensor([0, 1])).item(), 4)
    0.6931
    """
    _same(logits, labels)
    return binary_cross_entropy_with_logits(logits.detach().double(), labels.to(logits.device).double())


def _same(scores: Tensor, labels: Tensor) -> None:
    if scores.dim() != 1 or scores.shape != labels.shape:
        raise ValueError(
            f"scores and labels must be of the same shape (n,), got {tuple(scores.shape)} and {tuple(labels.shape)}"
        )
