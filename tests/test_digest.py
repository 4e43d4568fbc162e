"""Checksums of user code notice every change that decides a result, and nothing else."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from sngm.optim.digest import digest_of


def in_module(source: str, name: str):
    """Return a value of a module without a file, as in an interpreter."""
    namespace = {"__name__": "__main__", "nn": nn, "torch": torch}
    exec(source, namespace)
    return namespace[name]


def closure(factor):
    return lambda x: factor * x


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x


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
