"""Checksums of user code notice every change that decides a result, and nothing else."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sngm
from sngm.optim.digest import digest_of

SOURCE = Path(sngm.__file__).parents[1]


def in_module(source: str, name: str):
    """Return a value of a module without a file, as in an interpreter."""
    namespace = {"__name__": "interactive", "nn": nn, "torch": torch}  # not __main__, which is pytest's
    exec(source, namespace)
    return namespace[name]


def closure(factor):
    return lambda x: factor * x


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def unsaved(value):
    module = nn.Module()
    module.register_buffer("b", torch.tensor(value), persistent=False)
    return module


PAIR = [1], [2]
PAIRS = {
    "a closure": (closure(1.0), closure(2.0)),
    "a tensor in a closure": (closure(torch.ones(3)), closure(torch.zeros(3))),
    "an array in a closure": (closure(np.ones(3)), closure(np.zeros(3))),
    "an attribute": (Scaled(1.0), Scaled(2.0)),
    "a bound method": (Scaled(1.0).__call__, Scaled(2.0).__call__),
    "a partial": (functools.partial(closure, factor=1), functools.partial(closure, factor=2)),
    "a setting of a loss": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.9)),
    "a weight of a loss": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0])),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0])),
    ),
    "a body": tuple(in_module(f"def f(x):\n    return {n} * x", "f") for n in (1, 2)),
    "a default": tuple(in_module(f"def f(x, n={n}):\n    return n * x", "f") for n in (1, 2)),
    "a global": tuple(in_module(f"n = {n}\ndef f(x):\n    return n * x", "f") for n in (1, 2)),
    "a helper": tuple(in_module(f"def h(x):\n    return {n} * x\ndef f(x):\n    return h(x)", "f") for n in (1, 2)),
    "a global of an inner function": tuple(
        in_module(f"n = {n}\ndef f():\n    return lambda x: n * x", "f") for n in (1, 2)
    ),
    "a method": tuple(
        in_module(f"class M(nn.Module):\n    def forward(self, x):\n        return {n} * x", "M") for n in (1, 2)
    ),
    "a helper of a method": tuple(
        in_module(f"def h(x):\n    return {n} * x\nclass M:\n    def forward(self, x):\n        return h(x)", "M")
        for n in (1, 2)
    ),
    "a class attribute": tuple(in_module(f"class M:\n    n = {n}", "M") for n in (1, 2)),
    "a set": ({1, 2}, {1, 3}),
    "the end of a dict": ({"x": {"a": 1}, "b": 2}, {"x": {"a": 1, "b": 2}}),
    "which of two comes again": ([PAIR[0], PAIR[1], PAIR[0]], [PAIR[0], PAIR[1], PAIR[1]]),
    "a property": tuple(
        in_module(f"class M:\n    @property\n    def p(self):\n        return {n}", "M") for n in (1, 2)
    ),
    "a wrapper": tuple(
        in_module(
            "import functools\ndef w(f):\n    @functools.wraps(f)\n    def g(x):\n"
            f"        return {n} * f(x)\n    return g\n@w\ndef f(x):\n    return x",
            "f",
        )
        for n in (1, 2)
    ),
    "a buffer that is not saved": tuple(unsaved(n) for n in (1.0, 2.0)),
    "a sparse tensor": tuple(closure((n * torch.eye(3)).to_sparse()) for n in (1, 2)),
    "a lambda of one line": (lambda x: 1 * x, lambda x: 2 * x),
    "a slot": (Slotted(1), Slotted(2)),
    "a base class": tuple(in_module(f"class B:\n    n = {n}\nclass M(B):\n    pass", "M") for n in (1, 2)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_another_value_is_another_checksum(pair):
    one, other = PAIRS[pair]
    assert digest_of(one) != digest_of(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: closure(torch.ones(3)),
        lambda: Scaled(1.0),
        lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.5])),
        lambda: in_module("n = 1\ndef f(x):\n    return f(n * x)", "f"),  # calls itself
        lambda: object(),
        lambda: {"b", "a", "c"},
        lambda: closure(torch.empty(3, device="meta")),
        lambda: nn.Sequential(nn.Linear(2, 2).double()).apply(lambda m: m.requires_grad_(False)) and nn.ReLU(),
    ],
)
def test_the_same_again_is_the_same_checksum(make):
    assert digest_of(make()) == digest_of(make())


def test_values_that_contain_themselves_end():
    values = [1]
    values.append(values)
    assert digest_of(values) == digest_of(values)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert digest_of(deep)


@pytest.mark.slow
def test_a_set_has_the_same_checksum_in_every_process():
    things = "{'a', 'b', 'c'}", "lambda x: x in {'a', 'b', 'c'}"
    code = f"from sngm.optim.digest import digest_of; print(*map(digest_of, ({', '.join(things)})))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
