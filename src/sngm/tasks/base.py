"""What a task is: data, model, loss and scores, with the settings people start from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..data.tensors import Tensors as Tensors  # handed on: tasks know it from here
from ..errors import UsageError

Batch = tuple[Tensor, ...]


class Samples(Protocol):
    """Anything that has a length and gives the samples at a 1-d tensor of indices, as a tuple of tensors.

    Samples that follow one another, such as the words of a text, have a method `in_streams` besides: given a batch, it
    returns the samples of an epoch in the order in which they are to be read, a step after the other. Sample i of each
    step goes on where sample i of the step before it stopped. Splits to validate and test on, both of which are needed
    then, are of that second kind already; its attribute `streams` says how many samples are read at a time.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor) -> Batch: ...


@dataclass(frozen=True, slots=True)
class Splits:
    """The samples of a task. Without `validation`, a part of `train` is held out where one is needed."""

    train: Samples
    test: Samples
    validation: Samples | None = None


class Task:
    """One experiment. Subclass it, write `data` and `model`, and name it on the command line as ``file.py:Class``.

    The arguments of a subclass's ``__init__`` are its settings, which ``--set key=value`` sets. As it stands a task
    is classification: batches are (inputs, labels). Other tasks write their own `loss` and `scores` too.

    Attributes:
        metric: the score that learning rates are chosen by, one of those that `scores` gives.
        higher_is_better: whether more of it is better.
        epochs, batches, weight_decay, schedule: what is used where the user says nothing.
        lrs: learning rates to try for each method. Methods that are not in it get `usual_lrs`.
        holdout: the part of the training set held out to choose learning rates, if there is no validation set.
        dataset: which of the datasets that ``sngm data`` knows it needs, if any: that verb then looks without loading.
        data_dir: the folder that holds datasets, if the user named one.

    More of what is used where the user says nothing, all to be found in `usual`, which a task may write itself if
    its defaults depend on the batch:

    Attributes:
        workers: virtual workers; under torchrun at least as many as there are processes.
        micro: the most samples of a micro-batch. The default is the largest divisor of a worker's share up to it;
            None is the whole share.
        warmup: epochs over which the learning rate first grows.
        clip: the norm that gradients are clipped to, or None; or such a norm for each method that has one.
        decay_on: weight decay acts on "weights", which biases and normalisation layers are not, or on "all".
        bias_lr: LARS and CLARS train biases and normalisation layers at a "scaled" rate, or at the "full" one.
        running_stats: whose BatchNorm statistics are kept: of the "first" worker, or their "mean".
        result_of: the scores of which epoch are the result: the "last", or the "best" by its validation score.
        precision_on_gpu: "float32", "float64" or "bfloat16"; on a CPU the default is always float32.

    And of how a run is made, which changes no more than the last digits:

    Attributes:
        pass_size: the most samples to take through the model at once, or None: one BatchNorm group at a time. Set it
            only where the loss draws no random numbers, and where samples meet in GhostBatchNorm2d alone. A pass then
            holds many BatchNorm groups, and steps may be captured as a CUDA graph.
        pass_size_on_cpu: the most there, where more images are no faster, and take gigabytes.
        loaders: processes that prepare batches ahead, where that takes long; 0 for none.
        step: how steps are made on a GPU: "eager", "compiled", "captured", "compiled+captured", or "auto".
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
    pass_size: ClassVar[int | None] = None
    pass_size_on_cpu: ClassVar[int] = 512
    loaders: ClassVar[int] = 0
    step: ClassVar[str] = "auto"
    dataset: ClassVar[str | None] = None
    data_dir: Path | None = None

    @classmethod
    def usual(cls, batch: int) -> dict[str, Any]:
        """What is used at this batch where the user says nothing, by the names of the options.

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
        """Make a task of a function that builds a model and of map-style datasets of (input, target) samples.

        Args:
            model_fn: builds a new model, such as ``lambda: MLP(width=64)``; torch is seeded before it is called.
            train_dataset, test_dataset: any datasets with ``__len__`` and ``__getitem__``. Random transforms are
                seeded by run, epoch and sample, so a resumed run sees the same samples.
            validation_dataset: chooses learning rates. Default: a fifth of the training samples (`holdout`).
            loss: function of (outputs, target) that returns the mean over the batch.
            metric: "accuracy", "loss", or a function of (outputs, target) that returns a value per sample or their
                mean. Its name is the name of the score. Pass ``higher_is_better=False`` for an error.
            name: for folders and tables. Default: the name of `model_fn`.
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
        """Return the objects whose source code defines this task, where the class is not in a file."""
        return [type(self)]

    def data(self) -> Splits:
        """The samples to train and test on. Raise :class:`sngm.errors.DataMissing` if they are not there."""
        raise UsageError(f"{type(self).__name__} must define data()")

    def facts(self) -> dict[str, Any]:
        """What ``--dry-run`` says of the data, besides how many samples there are to train on."""
        return {}

    def model(self) -> nn.Module:
        """A new model; torch's random numbers are seeded before this is called."""
        raise UsageError(f"{type(self).__name__} must define model()")

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the samples of a batch, to call `backward` on."""
        inputs, labels = batch
        return cross_entropy(model(inputs), labels)

    def start(self, model: nn.Module, batch: int) -> Batch:
        """What streams carry from step to step, as it is before an epoch's first: tensors with a row a sample.

        Most tasks carry nothing. Those that do write :meth:`follow` in place of :meth:`loss`.
        """
        return ()

    def follow(self, model: nn.Module, batch: Batch, carried: Batch) -> tuple[Tensor, Batch]:
        """The mean loss of a batch that goes on from what was carried, and what it hands on to the next."""
        return self.loss(model, batch), ()

    def scale(self, batch: int) -> float:
        """What the mean loss of a batch is multiplied by before its gradient is taken: the batch, if it shall be a sum.

        Methods that divide by the gradient's norm do not notice, but for their weight decay. Records have the mean.
        """
        return 1.0

    def scores(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """For each sample, what is averaged over the test set: at least "loss" and `metric`."""
        inputs, labels = batch
        outputs = model(inputs)
        return {"loss": cross_entropy(outputs, labels, reduction="none"), "accuracy": outputs.argmax(1) == labels}

    def batch(self, samples: Samples, indices: Tensor, *, seed: int, epoch: int) -> Batch:
        """Training samples, augmented as a function of seed, epoch and sample alone. Default: as they are."""
        return samples[indices]

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Scores over a whole split. Override it for metrics that are no mean over samples."""
        sums: dict[str, Tensor] = {}
        count = 0
        for batch in batches:
            count += len(batch[0])
            scores = self.scores(model, batch)
            values_of = scores.values() if isinstance(scores, Mapping) else [scores]
            if not isinstance(scores, Mapping) or not all(isinstance(values, Tensor) for values in values_of):
                got = " and ".join(dict.fromkeys(type(values).__name__ for values in values_of))
                raise UsageError(f"{type(self).__name__}.scores() must return a dict of tensors, got {got}")
            for name, values in scores.items():
                total = values.double().sum()
                sums[name] = sums[name] + total if name in sums else total
        # read all at once, at the end: each look makes the host wait for the device
        totals = torch.stack([total.to(batch[0].device) for total in sums.values()]).tolist() if sums else []
        return {name: total / count for name, total in zip(sums, totals, strict=True)}

    def settings(self) -> dict[str, Any]:
        """What ``--set`` may set, with the values in use."""
        import inspect

        names = list(inspect.signature(type(self).__init__).parameters)[1:]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}
