"""What tells samples from others, cheaply."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

ROWS = 256


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """Short, and another for other samples: of their number and shape, and of rows spread over all of them.

    >>> fingerprint([torch.zeros(1000)]) == fingerprint([torch.zeros(1000)]) != fingerprint([torch.ones(1000)])
    True
    """
    digest = hashlib.sha256()
    for t in tensors:
        rows = torch.arange(min(len(t), ROWS)) * max(1, len(t) // ROWS)
        digest.update(f"{tuple(t.shape)} {t.dtype}".encode())
        digest.update(t[rows.to(t.device)].cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
