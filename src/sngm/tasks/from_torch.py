"""Tasks from PyTorch objects: a function that builds a model, and map-style datasets."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, default_collate

from ..data.tensors import Tensors, fingerprint
from ..errors import UsageError
from .base import Batch, Samples, Splits, Task, check_labels

Loss = Callable[[Any, Tensor], Tensor]
SAMPLED = 64  # samples used for the fingerprint of a dataset


class DatasetSamples:
    """The samples of a map-style dataset, each an (inputs..., target) tuple, collated by ``default_collate``."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: Tensor) -> Batch:
        return as_batch([self.dataset[i] for i in indices.tolist()])

    def fingerprint(self) -> str:
        """Return a checksum of the length and of a few samples, read with fixed seeds."""
        places = np.linspace(0, len(self) - 1, min(len(self), SAMPLED)).astype(int).tolist()
        with seeded(0, 0, 0):
            batch = self[torch.tensor(places)]
        return fingerprint([torch.tensor([len(self)]), *batch])


def as_batch(samples: Sequence[Any]) -> Batch:
    """Collate samples into a tuple of tensors."""
    if not isinstance(samples[0], (tuple, list)) or len(samples[0]) < 2:
        raise UsageError(
            f"each sample of the dataset must be a tuple (input, target), got {type(samples[0]).__name__}; "
            "wrap the dataset in one that returns tuples"
        )
    batch = default_collate([tuple(sample) for sample in samples])
    for value, part in zip(samples[0], batch, strict=True):
        if not isinstance(part, Tensor):
            raise UsageError(f"samples must hold tensors, arrays or numbers, got {type(value).__name__}")
    return tuple(batch)


class seeded:
    """Seed torch (on the CPU), NumPy and random in the body of a ``with`` statement; then restore their states."""

    def __init__(self, *key: int) -> None:
        self.seed = random.Random(repr(key)).getrandbits(32)

    def __enter__(self) -> None:
        self.states = torch.random.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        torch.default_generator.manual_seed(self.seed)  # only the CPU's generator: datasets are read on the CPU
        np.random.seed(self.seed)  # noqa: NPY002
        random.seed(self.seed)

    def __exit__(self, *_: object) -> None:
        torch.random.set_rng_state(self.states[0])
        np.random.set_state(self.states[1])  # noqa: NPY002
        random.setstate(self.states[2])


class TorchTask(Task):
    """A task built from PyTorch objects; see :meth:`sngm.Task.from_torch`."""

    parts: dict[str, Any]

    def data(self) -> Splits:
        return Splits(**{name: as_samples(name, dataset) for name, dataset in self.parts["data"].items()})

    def model(self) -> nn.Module:
        model: nn.Module = self.parts["model_fn"]()
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        *inputs, target = batch
        if self.smooths_labels or isinstance(self.parts["loss"], nn.CrossEntropyLoss):
            check_labels(target)
        more = {"label_smoothing": self.label_smoothing} if self.smooths_labels else {}
        loss: Tensor = self.parts["loss"](model(*inputs), target, **more)
        return loss

    @property
    def smooths_labels(self) -> bool:
        return self.parts["loss"] is cross_entropy

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        *inputs, target = batch
        outputs = model(*inputs)
        scores = {"loss": self.parts["loss"](outputs, target).expand(len(target))}
        metric = self.parts["metric"]
        if metric is not None:
            values = torch.as_tensor(metric(outputs, target))
            if values.numel() not in (1, len(target)) or values.ndim > 1:
                raise UsageError(
                    f"metric must return one number, or one for each of {len(target)} samples, "
                    f"got a tensor of shape {tuple(values.shape)}"
                )
            # a mean over the batch counts once for each sample of the batch
            scores[self.metric] = values if values.ndim and len(values) == len(target) else values.expand(len(target))
        return scores

    def batch(self, samples: Samples, indices: Tensor, *, seed: int, epoch: int) -> Batch:
        """Return training samples; random transforms depend only on seed, epoch and sample."""
        whole: Any = samples
        rows = indices
        while hasattr(whole, "indices"):  # a `Part`
            whole, rows = whole.samples, whole.indices[rows.cpu()]
        if not isinstance(whole, DatasetSamples):
            return samples[indices]
        found = []
        for i in rows.tolist():
            with seeded(seed, epoch, i):
                found.append(whole.dataset[i])
        return as_batch(found)

    def sources(self) -> list[Any]:
        code = [self.parts["model_fn"], self.parts["loss"], self.parts["metric"], self.holdout]
        return [*code, {name: as_samples(name, data).fingerprint() for name, data in self.parts["data"].items()}]


def as_samples(name: str, dataset: Any) -> Tensors | DatasetSamples:
    """Return a map-style dataset as samples that a task can train on."""
    if isinstance(dataset, TensorDataset):
        if len(dataset.tensors) < 2:
            raise UsageError(f"{name}_dataset must hold inputs and targets, as TensorDataset(inputs, targets) does")
        samples: Tensors | DatasetSamples = Tensors(*dataset.tensors)
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, (str, dict)):
        samples = DatasetSamples(dataset)
    else:
        raise UsageError(f"{name}_dataset must be a map-style dataset (__len__ and __getitem__), got {dataset!r}")
    if not len(samples):
        raise UsageError(f"{name}_dataset has no samples")
    return samples


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    """Return for each sample whether its largest output is that of its class, or of its largest class probability."""
    return outputs.argmax(1) == (target.argmax(1) if target.shape == outputs.shape else target)


def make(
    model_fn: Callable[[], nn.Module],
    data: dict[str, Any],
    loss: Loss,
    metric: str | Loss,
    name: str | None,
    defaults: dict[str, Any],
) -> Task:
    """Build the task of :meth:`sngm.Task.from_torch`."""
    if isinstance(model_fn, nn.Module) or not callable(model_fn):
        hint = "; pass its class, or lambda: copy.deepcopy(model)" if isinstance(model_fn, nn.Module) else ""
        raise TypeError(f"model_fn must be a function that builds a new model, got {type(model_fn).__name__}{hint}")
    if not callable(loss) or isinstance(loss, type):
        hint = f"; pass an instance: {loss.__name__}()" if isinstance(loss, type) else ""
        raise TypeError(f"loss must be a function of (outputs, target), got {loss!r}{hint}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    measure: Loss | None = accuracy if metric == "accuracy" else None
    if callable(metric):
        measure, metric = metric, getattr(metric, "__name__", type(metric).__name__)
        if metric == "loss":
            raise ValueError("metric must have another name than loss, which is the name of the loss")
        if "higher_is_better" not in defaults:
            raise TypeError(f"pass higher_is_better=True or False with the metric {metric}, or runs cannot be compared")
    elif metric not in ("accuracy", "loss"):
        raise ValueError(f"metric must be 'accuracy', 'loss' or a function of (outputs, target), got {metric!r}")
    known = [key for key in vars(Task) if not key.startswith("_") and not callable(getattr(Task, key))]
    for key in defaults:
        if key not in known:
            raise TypeError(f"Task.from_torch() has no argument {key!r}; defaults of a task are {', '.join(known)}")
    better = defaults.setdefault("higher_is_better", metric != "loss")
    if not isinstance(better, bool):
        raise TypeError(f"higher_is_better must be True or False, got {better!r}")
    if measure in (accuracy, None) and better == (metric == "loss"):
        raise ValueError(f"higher_is_better={better} is wrong for the metric {metric}")
    for part, dataset in data.items():
        as_samples(part, dataset)
    title = name or getattr(model_fn, "__name__", type(model_fn).__name__).strip("<>")
    cls = type(title, (TorchTask,), {"metric": metric, "__doc__": f"{title}, from PyTorch objects.", **defaults})
    task: TorchTask = cls()
    task.parts = {"model_fn": model_fn, "data": data, "loss": loss, "metric": measure}
    return task
