"""Scores of a whole split that are not means over samples, computed on the device of the predictions."""

import math

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def auc(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the area under the ROC curve: how often a sample of label 1 scores higher than a sample of label 0.

    A tie counts half. The result equals scikit-learn's ``roc_auc_score``. Pairs are counted in integers, so the order
    of the samples does not matter. The area is NaN if all labels are equal or a score is NaN, as for a diverged model.

    Args:
        scores: logits or probabilities, of shape (n,).
        labels: 0 or 1, of shape (n,) and any dtype.

    Returns:
        A float64 tensor without dimensions, on the device of the scores.

    >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])).item()
    0.875
    """
    _check_shapes(scores, labels)
    scores, positive = scores.detach(), labels.to(scores.device) == 1
    ones, zeros = scores[positive], scores[~positive].sort().values
    # Twice the number of correctly ordered pairs: those in which label 0 scores lower, plus those in which it scores
    # lower or equal.
    twice = torch.searchsorted(zeros, ones).sum() + torch.searchsorted(zeros, ones, right=True).sum()
    area = twice.double() / (2 * len(ones) * len(zeros))  # 0 / 0 = NaN if all labels are equal
    return torch.where(scores.isnan().any(), torch.nan, area)


def log_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of -log p, where p is the probability of the true label, in float64; NaN without samples.

    >>> round(log_loss(torch.tensor([0.0, 0.0]), torch.tensor([0, 1])).item(), 4)
    0.6931
    """
    _check_shapes(logits, labels)
    return binary_cross_entropy_with_logits(logits.detach().double(), labels.to(logits.device).double())


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss; infinity if it exceeds the largest float."""
    return math.exp(loss) if loss < 700 else math.inf


def _check_shapes(scores: Tensor, labels: Tensor) -> None:
    if scores.dim() != 1 or scores.shape != labels.shape:
        raise ValueError(
            f"scores and labels must be of the same shape (n,), got {tuple(scores.shape)} and {tuple(labels.shape)}"
        )
