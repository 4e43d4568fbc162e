"""scikit-learn's handwritten digits: 1,797 grey images of 8 x 8 pixels, installed with scikit-learn."""

import functools

import torch
from torch import Tensor

TRAIN = 1280  # number of training images; the other 517 are the test set


@functools.cache
def load_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training and test images with labels, normalised by the mean and std of the training images."""
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    # The images are sorted by writer. They are shuffled, so that the test set has images of all writers.
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    images, labels = torch.from_numpy(x).float().reshape(-1, 1, 8, 8)[order], torch.from_numpy(y).long()[order]
    images = (images - images[:TRAIN].mean()) / images[:TRAIN].std()
    return (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:])
