"""The base class of tasks: data, model, loss, scores and defaults."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data.tensors import Tensors as Tensors  # re-exported
from ..errors import UsageError

Batch = tuple[Tensor, ...]


class Samples(Protocol):
    """Interface of samples: a length, and indexing by a 1-d tensor, which returns a tuple of tensors.

    Sequential samples, such as text, also have a method ``in_streams(batch)``, which returns the samples of an epoch in
    reading order, step by step: sample i of a step continues sample i of the step before. The result has an attribute
    `streams`, the number of samples per step. A task with such samples needs both a validation and a test split, which
    are already in reading order and have this attribute.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor) -> Batch: ...


@dataclass(frozen=True, slots=True)
class Splits:
    """The samples of a task. Without `validation`, a part of `train` is held out to choose learning rates."""

    train: Samples
    test: Samples
    validation: Samples | None = None


class Task:
    """Base class of tasks. A subclass defines `data` and `model`; its name on the command line is ``file.py:Class``.

    The arguments of a subclass's ``__init__`` are its settings, for ``--set key=value``. The default `loss` and
    `scores` are for classification, with batches of (inputs, labels). Other tasks also define `loss` and `scores`.

    Attributes:
        metric: the score by which learning rates are chosen, a key of the result of `scores`.
        higher_is_better: whether a higher metric is better.
        epochs, batches, weight_decay, schedule: defaults of the options of the same name.
        lrs: learning rates to try, by method. Other methods use `usual_lrs` times a factor (msgd 1, adam 0.03).
        holdout: the fraction of the training set held out to choose learning rates, if there is no validation set.
        dataset: name of the dataset that the task needs, if ``sngm data`` supports it. Its files can then be checked
            without being loaded.
        data_dir: the folder of datasets, if the user named one.
        result_of: the epoch whose scores are the result: the "last", or the "best" by validation score.

    The following attributes are defaults of options, returned by `usual`; override `usual` if they depend on the batch:

    Attributes:
        workers: number of data-parallel workers, simulated if there are more workers than processes; under torchrun
            rounded up to a multiple of the number of processes.
        micro: the most samples of a micro-batch; None for one micro-batch per worker. The size of a micro-batch is the
            largest divisor of a worker's share of the batch that is at most `micro`.
        warmup: epochs of linear warm-up of the learning rate.
        clip: the norm that gradients are clipped to, or a dict of norms by method; None for no clipping.
        decay_on: "weights" for weight decay of all parameters except biases and normalisation layers, or "all".
        bias_lr: with LARS and CLARS, the lr of biases and normalisation layers: "scaled" by the trust coefficient, or
            "full".
        running_stats: "first" to evaluate with the running statistics of the first worker's BatchNorm, "mean" for the
            mean over all workers.
        precision_on_gpu: "float32", "float64" or "bfloat16"; on a CPU the default is always float32.

    The following attributes set how a run is executed; they change at most the last digits of results:

    Attributes:
        pass_size: the most samples of a forward-backward pass; None for one BatchNorm group per pass. Set it only if
            the loss draws no random numbers, and GhostBatchNorm2d is the only layer in which samples of a batch affect
            each other. A pass then holds several BatchNorm groups, and steps may be captured as a CUDA graph.
        pass_size_on_cpu: the limit of `pass_size` on a CPU, where larger passes are no faster and take gigabytes.
        stacks: whether a pass on a GPU may have a copy of each parameter for each micro-batch (CLARS) or worker
            (EXTRAP-SGD), which saves passes. Set it only if the model's parameters belong to nn.Linear, nn.Conv2d,
            Conv3x3 and GhostBatchNorm2d, nothing else reads them, all activations have the samples first, and neither
            gradient hooks nor activation checkpointing are used.
        loaders: number of processes that prepare batches ahead of time, if this is slow; 0 for none.
        step: how steps run on a GPU: "eager", "compiled", "captured", "compiled+captured", or "auto".
    """

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    epochs: ClassVar[int] = 10
    batches: ClassVar[tuple[int, ...]] = (32, 512)
    weight_decay: ClassVar[float] = 1e-4
    schedule: ClassVar[str] = "cosine"
    lrs: ClassVar[Mapping[str, Sequence[float]]] = {}
    usual_lrs: ClassVar[Sequence[float]] = (0.01, 0.03, 0.1, 0.3)
    holdout: ClassVar[float] = 0.2
    workers: ClassVar[int] = 1
    micro: ClassVar[int | None] = None
    warmup: ClassVar[float] = 0.0
    clip: ClassVar[float | Mapping[str, float] | None] = None
    decay_on: ClassVar[str] = "weights"
    bias_lr: ClassVar[str] = "scaled"
    running_stats: ClassVar[str] = "first"
    result_of: ClassVar[str] = "last"
    precision_on_gpu: ClassVar[str] = "float32"
    pass_size: int | None = None  # not a ClassVar: a task may set it by its settings
    pass_size_on_cpu: ClassVar[int] = 512
    stacks: ClassVar[bool] = False
    loaders: ClassVar[int] = 0
    step: ClassVar[str] = "auto"
    dataset: ClassVar[str | None] = None
    data_dir: Path | None = None
    label_smoothing: float = 0.0  # set by each run

    @property
    def smooths_labels(self) -> bool:
        """Whether the loss uses `label_smoothing`. Override it with True if your own `loss` does."""
        return type(self).loss is Task.loss and type(self).follow is Task.follow

    @classmethod
    def usual(cls, batch: int) -> dict[str, Any]:
        """Return the defaults of options at this batch size, by the names of the options.

        >>> Task.usual(512)["workers"], Task.usual(512)["schedule"]
        (1, 'cosine')
        """
        names = ("epochs", "workers", "micro", "schedule", "warmup", "clip", "weight_decay", "decay_on", "bias_lr")
        return {name: getattr(cls, name) for name in (*names, "running_stats", "precision_on_gpu")}

    @staticmethod
    def from_torch(
        model_fn: Callable[[], nn.Module],
        train_dataset: Any,
        test_dataset: Any,
        validation_dataset: Any = None,
        *,
        loss: Callable[[Any, Tensor], Tensor] = cross_entropy,
        metric: str | Callable[[Any, Tensor], Tensor] = "accuracy",
        name: str | None = None,
        **defaults: Any,
    ) -> Task:
        """Build a task from map-style datasets of (input, target) samples and a function that builds the model.

        Args:
            model_fn: builds a new model, such as ``lambda: MLP(width=64)``; torch is seeded before it is called.
            train_dataset, test_dataset: any datasets with ``__len__`` and ``__getitem__``. Random transforms are
                seeded by run, epoch and sample, so a resumed run gets the same samples.
            validation_dataset: dataset to choose learning rates with. Default: a fifth of the training samples
                (`holdout`).
            loss: function of (outputs, target) that returns the mean over the batch.
            metric: "accuracy", "loss", or a function of (outputs, target) that returns a value per sample or the mean
                of these values. The function's name is the name of the score. With a function, pass
                ``higher_is_better=True`` or ``False`` too.
            name: name of the task, for folders and tables. Default: the name of `model_fn`.
            defaults: attributes of the task, such as ``epochs=20, batches=(64, 1024), loaders=4``.

        >>> from torch.utils.data import TensorDataset
        >>> samples = TensorDataset(torch.randn(64, 3), torch.arange(64) % 2)
        >>> Task.from_torch(lambda: nn.Linear(3, 2), samples, samples, epochs=2, name="linear").epochs
        2
        """
        from .from_torch import make

        data = {"train": train_dataset, "test": test_dataset}
        data |= {} if validation_dataset is None else {"validation": validation_dataset}
        return make(model_fn, data, loss, metric, name, defaults)

    def sources(self) -> list[Any]:
        """Return the objects whose source code identifies this task, if no file does (such as in a notebook)."""
        return [type(self)]

    def data(self) -> Splits:
        """Return the samples of each split; raise :class:`sngm.errors.DataMissing` if their files are missing."""
        raise UsageError(f"{type(self).__name__} must define data()")

    def facts(self) -> dict[str, Any]:
        """Return facts about the data for ``--dry-run``, besides the number of training samples."""
        return {}

    def model(self) -> nn.Module:
        """Return a new model; torch is seeded before this is called."""
        raise UsageError(f"{type(self).__name__} must define model()")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the samples of a batch."""
        inputs, labels = batch
        check_labels(labels)
        return cross_entropy(model(inputs), labels, label_smoothing=self.label_smoothing)

    def start(self, model: nn.Module, batch: int) -> Batch:
        """Return the recurrent state at the start of an epoch: tensors whose first dimension is the batch.

        Most tasks have no recurrent state. Tasks that have it define :meth:`follow` instead of :meth:`loss`.
        """
        return ()

    def follow(self, model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
        """Return the mean loss of a batch, given the recurrent state `carried`, and the new recurrent state."""
        return self.loss(model, batch), ()

    def scale(self, batch: int) -> float:
        """Return the factor that multiplies the mean loss before backward, such as the batch size for a summed loss.

        Methods that divide by the gradient's norm depend on this factor only through weight decay. Recorded losses are
        means, without this factor.
        """
        return 1.0

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return scores per sample, to be averaged over a split, with at least the keys "loss" and `metric`."""
        inputs, labels = batch
        outputs = model(inputs)
        return {"loss": cross_entropy(outputs, labels, reduction="none"), "accuracy": outputs.argmax(1) == labels}

    def batch(self, samples: Samples, indices: Tensor, *, seed: int, epoch: int) -> Batch:
        """Return the training samples at `indices`. Override it for augmentation.

        Augmentation must depend only on seed, epoch and sample.
        """
        return samples[indices]

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the scores over a split. Override it for metrics that are not means over samples."""
        return mean_scores([self.score_sums(model, batch) for batch in batches])

    def score_sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the sums of `scores` over a batch, and the number of samples under the key "", as float64 tensors."""
        scores = self.scores(model, batch)
        values_of = scores.values() if isinstance(scores, Mapping) else [scores]
        if not isinstance(scores, Mapping) or not all(isinstance(values, Tensor) for values in values_of):
            got = " and ".join(dict.fromkeys(type(values).__name__ for values in values_of))
            raise UsageError(f"{type(self).__name__}.scores() must return a dict of tensors, got {got}")
        sums = {name: values.double().sum().to(batch[0].device) for name, values in scores.items()}
        return {"": torch.tensor(len(batch[0]), dtype=torch.float64), **sums}

    def settings(self) -> dict[str, Any]:
        """Return the settings and their values, as for ``--set``."""
        import inspect

        names = list(inspect.signature(type(self).__init__).parameters)[1:]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


def check_labels(labels: Tensor) -> None:
    """Raise UsageError for labels of a dtype that cross_entropy does not support. Torch's own error is less clear."""
    probabilities = labels.is_floating_point() and labels.ndim > 1
    if labels.dtype not in (torch.int64, torch.uint8) and not probabilities:
        kind = str(labels.dtype).removeprefix("torch.")
        raise UsageError(f"labels are {kind}, but cross-entropy takes class numbers; use labels.long()")


def mean_scores(sums: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return the mean scores over all samples, given the results of `Task.score_sums` for each batch."""
    if not sums:
        return {}
    totals = {name: functools.reduce(torch.add, [batch[name] for batch in sums]) for name in sums[0]}
    count = totals.pop("").item()
    # read all values at once, because each read synchronises with the device
    values = torch.stack(list(totals.values())).tolist() if totals else []
    return {name: value / count for name, value in zip(totals, values, strict=True)}
