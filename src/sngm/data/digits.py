"""scikit-learn's handwritten digits: 1,797 grey images of 8 x 8 pixels that come with the package."""

import functools

import torch
from torch import Tensor

TRAIN = 1280  # images; the other 517 are for testing


@functools.cache
def load_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images with labels, always the same ones, scaled by the training images' mean and spread."""
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    images = torch.from_numpy(x).float().reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(y).long()
    # the files list them by writer: mixed, so that test images come from all of them
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    images = (images - images[:TRAIN].mean()) / images[:TRAIN].std()
    return (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:])
