"""Small batch against large: train a little conv net on scikit-learn's digits with each optimizer.

Every method gets the same epochs, a cosine schedule and as many learning rates to try. The rate is chosen on the
validation images with the first seed; what is printed is the accuracy on the test images over all seeds. A batch
of 1024 is the whole training set, so an epoch is a single step: who learns enough from so few?
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import statistics
import sys
from multiprocessing import Pool
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sngm

EXAMPLES = """examples:
  python examples/digits.py                                  all methods, about a minute on two cores
  python examples/digits.py --methods msgd sngm --seeds 10   two methods, less noise
  python examples/digits.py --batches 32 128 512 --epochs 10
"""
RATES = {  # four for each, half a decade apart
    "msgd": (0.03, 0.1, 0.3, 1.0),
    "adam": (0.003, 0.01, 0.03, 0.1),
    "lars": (10.0, 30.0, 100.0, 300.0),
    "lamb": (0.003, 0.01, 0.03, 0.1),
    "sngm": (0.1, 0.3, 1.0, 3.0),
    "block-sngm": (0.03, 0.1, 0.3, 1.0),
}
WEIGHT_DECAY = 1e-4
TRAIN, TEST = 1024, 400  # images; the other 373 are for validation

Images = tuple[Tensor, Tensor]


@functools.cache
def load() -> tuple[Images, Images, Images]:
    """Training, validation and test images with their labels: always the same ones."""
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 1, 8, 8).astype("float32")
    x_rest, x_test, y_rest, y_test = train_test_split(x, y, test_size=TEST, stratify=y, random_state=0)
    x_train, x_val, y_train, y_val = train_test_split(x_rest, y_rest, train_size=TRAIN, stratify=y_rest, random_state=0)

    def tensors(x, y) -> Images:
        return torch.from_numpy((x - x_train.mean()) / x_train.std()), torch.from_numpy(y)

    return tensors(x_train, y_train), tensors(x_val, y_val), tensors(x_test, y_test)


def build_model() -> nn.Module:
    conv1 = nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False)
    conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
    head = nn.Linear(32 * 4 * 4, 10)
    return nn.Sequential(conv1, nn.BatchNorm2d(16), nn.ReLU(), conv2, nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), head)


def build_optimizer(method: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    groups = sngm.optim.decay_groups(model, WEIGHT_DECAY)
    if method == "lars":  # it multiplies the rate of weights by about 0.001, but not that of biases and BatchNorm
        groups[1]["lr"] = 0.001 * lr
    return sngm.optim.create(method, groups, lr=lr)


class Run(NamedTuple):
    method: str
    batch: int
    lr: float
    epochs: int
    seed: int


class Score(NamedTuple):
    """The best is chosen by accuracy on the validation images, then by loss there."""

    validation: float
    minus_loss: float
    test: float


def train(run: Run) -> Score:
    torch.manual_seed(run.seed)
    (x, y), validation, test = load()
    model = build_model()
    optimizer = build_optimizer(run.method, model, run.lr)
    steps = len(x) // run.batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.epochs * steps)
    for _ in range(run.epochs):
        for chosen in torch.randperm(len(x))[: steps * run.batch].split(run.batch):
            optimizer.zero_grad()
            cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    loss = cross_entropy(model(validation[0]), validation[1])
    return Score(accuracy(model, validation), -loss.item(), accuracy(model, test))


def accuracy(model: nn.Module, images: Images) -> float:
    x, y = images
    return 100.0 * (model(x).argmax(1) == y).double().mean().item()


class Result(NamedTuple):
    """Test accuracies of a method at a batch size, one for each seed, at the rate chosen."""

    lr: float
    at_edge: bool  # of the rates tried: a better one may lie beyond
    tests: list[float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.tests)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.tests) if len(self.tests) > 1 else 0.0

    def __str__(self) -> str:
        spread = f"{self.spread:.1f}" if len(self.tests) > 1 else "?"
        return f"{self.mean:.1f} ± {spread} (lr {self.lr:g}{'*' if self.at_edge else ''})"


Results = dict[tuple[str, int], Result]


def compare(options: argparse.Namespace, results: Results) -> None:
    """Fill in `results` one by one, so that those that are finished survive a Ctrl-C."""
    cells = [(method, batch) for batch in options.batches for method in options.methods]
    with Pool(min(os.cpu_count() or 1, 4), prepare_worker) as pool:
        for method, batch in cells:
            progress(f"{len(results)} of {len(cells)} done, now {method} with batch {batch}", passing=True)
            tried = [Run(method, batch, lr, options.epochs, seed=0) for lr in RATES[method]]
            first, best = max(zip(pool.map(train, tried), tried, strict=True))
            others = pool.map(train, [best._replace(seed=seed) for seed in range(1, options.seeds)])
            at_edge = best.lr in (RATES[method][0], RATES[method][-1])
            results[method, batch] = Result(best.lr, at_edge, [first.test, *(score.test for score in others)])
            progress(f"{method}, batch {batch}: {results[method, batch]}")


def prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    torch.set_num_threads(1)  # for layers this small, more threads and oneDNN cost more than they save
    torch.backends.mkldnn.set_flags(False)


def progress(text: str, passing: bool = False) -> None:
    """On a terminal, one line that the next overwrites; elsewhere lines that stay, without the passing ones."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif not passing:
        print(text, file=sys.stderr, flush=True)


def table(options: argparse.Namespace, results: Results) -> str:
    rows = [["method", *(f"B={batch}" for batch in options.batches)]]
    rows += [[m, *(str(results.get((m, batch), "-")) for batch in options.batches)] for m in options.methods]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(" | ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def conclusion(options: argparse.Namespace, results: Results) -> str:
    small, large = min(options.batches), max(options.batches)
    final = {method: results[method, large] for method in options.methods}
    best = max(final, key=lambda method: final[method].mean)
    top = final[best]
    sentence = f"At B={large}, {best} is the most accurate with {top.mean:.1f} %"
    if small < large and len(final) > 1:
        lost = {method: results[method, small].mean - result.mean for method, result in final.items()}
        least, *_, most = sorted(lost, key=lambda method: lost[method])
        sentence += (
            f"; against B={small}, {least} lost least ({lost[least]:.1f} points), {most} most ({lost[most]:.1f})"
        )
    near = [m for m, result in final.items() if m != best and top.mean - result.mean <= top.spread + result.spread]
    return sentence + (f". Too close to the best to call: {', '.join(near)}." if near else ".")


def parse() -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=layout)
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training images (default: 15)")
    parser.add_argument("--seeds", type=int, default=3, help="how many runs the test accuracy is over (default: 3)")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B", default=[32, TRAIN], help="default: 32 1024")
    parser.add_argument("--methods", nargs="+", metavar="NAME", choices=RATES, default=list(RATES), help="default: all")
    options = parser.parse_args()
    if options.epochs < 1 or options.seeds < 1:
        parser.error("--epochs and --seeds must be at least 1")
    if not all(2 <= batch <= TRAIN for batch in options.batches):
        parser.error(f"--batches must lie between 2 and {TRAIN}, the number of training images")
    return options


def main() -> int:
    options = parse()
    results: Results = {}
    interrupted = False
    try:
        compare(options, results)
    except KeyboardInterrupt:
        interrupted = True
    progress("", passing=True)
    print(f"\nTest accuracy in %, mean ± standard deviation over {options.seeds} seeds, {options.epochs} epochs\n")
    print(table(options, results))
    if any(result.at_edge for result in results.values()):
        print("\n* the smallest or the largest of the rates tried: a better one may lie beyond")
    print("\nStopped early: a dash is not measured." if interrupted else f"\n{conclusion(options, results)}")
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
