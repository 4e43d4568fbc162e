"""Addresses and layouts of tensors, read in C and in Python."""

import gc
import os
import shutil
import subprocess
import sys
from functools import reduce
from itertools import combinations
from operator import or_

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

pytest.importorskip("triton")

from sngm.optim.kernels.look import compiled, look, look_one_by_one
from sngm.optim.kernels.memory import numbers

if look is look_one_by_one and not any(map(shutil.which, ("gcc", "clang"))):
    pytest.skip("needs a C compiler", allow_module_level=True)

IN_C = compiled()
BOTH = pytest.mark.parametrize("see", [IN_C, look_one_by_one], ids=["C", "Python"])
MEMORY = torch.zeros(240)
SEEN = {
    "a vector": MEMORY[:12],
    "a shorter one": MEMORY[:11],
    "with gaps": MEMORY[:24:2],
    "later": MEMORY[1:13],
    "a matrix": MEMORY[:12].view(3, 4),
    "of another shape": MEMORY[:12].view(4, 3),
    "transposed": MEMORY[:12].view(3, 4).t(),
    "one row": MEMORY[:12].view(1, 12),
    "one column": MEMORY[:12].view(12, 1),
    "repeated": MEMORY[:1].expand(12),
    "as integers": MEMORY[:12].view(torch.int32),
    "as pairs": MEMORY[:12].view(torch.bfloat16),
    "as other pairs": MEMORY[:12].view(torch.float16),
    "as complex numbers": MEMORY[:24].view(torch.complex64),
    "as doubles": MEMORY[:24].view(torch.float64),
    "a number": MEMORY[0],
    "nothing": MEMORY[:0],
    "no rows": MEMORY[:0].view(0, 4),
    "channels first": MEMORY[:120].view(2, 3, 4, 5),
    "channels last": MEMORY[:120].view(2, 4, 5, 3).permute(0, 3, 1, 2),
    "none": None,
}


@BOTH
def test_whatever_differs_between_two_tensors_is_seen(see):
    looks = {name: see([tensor]) for name, tensor in SEEN.items()}
    for one, other in combinations(looks, 2):
        assert looks[one] != looks[other], (one, other)
    for name, tensor in SEEN.items():
        twin = tensor if tensor is None else torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        assert see((twin,)) == looks[name], name


@BOTH
def test_addresses_of_all_and_their_bits(see):
    tensors = [*SEEN.values()]
    addresses, _, bits = see(tensors)
    assert list(numbers(addresses)) == [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    assert bits == reduce(or_, numbers(addresses))
    assert see([]) == see(()) == (b"", see([])[1], 0)


@BOTH
def test_how_tensors_lie_goes_with_their_places_in_the_list(see):
    a, b = SEEN["a matrix"], SEEN["transposed"]
    assert see([a, b])[0] == see([b, a])[0]
    assert see([a, b])[1] != see([b, a])[1]
    assert see([a, None])[1] != see([None, a])[1]
    assert see([a])[1] != see([a, a])[1]


@BOTH
def test_strides_that_lead_nowhere_are_all_alike(see):
    row = MEMORY[:4].as_strided((1, 4), (4, 1))
    assert see([row]) == see([MEMORY[:4].as_strided((1, 4), (99, 1))])
    assert see([row]) != see([MEMORY[:4].as_strided((1, 4), (4, 2))])


def test_many_dimensions():
    deep = MEMORY[:2].view(2, *[1] * 60)
    assert numbers(IN_C([deep] * 50)[0])[-1] == deep.data_ptr()
    assert IN_C([deep] * 50) == IN_C((deep,) * 50)
    assert IN_C([deep] * 49 + [deep.transpose(0, 1)])[1] != IN_C([deep] * 50)[1]


@BOTH
@pytest.mark.parametrize("bad", [None, 3, MEMORY[0]])
def test_what_has_no_elements_is_refused(see, bad):
    with pytest.raises(TypeError):
        see(bad)


def test_a_list_that_is_changed_meanwhile():
    class Odd(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (3,), dispatch_sizes_strides_policy="sizes")

        @classmethod
        def __torch_dispatch__(cls, function, types, arguments=(), settings=None):
            tensors.clear()
            return NotImplemented

    tensors = [Odd(), *(torch.zeros(2) for _ in range(9))]
    with pytest.raises(BufferError):
        IN_C(tensors)
    assert not tensors


@BOTH
@pytest.mark.parametrize("other", [3, 0.5, "tensor", torch.Tensor, MEMORY.numpy(), [MEMORY]])
def test_what_is_no_tensor_lies_nowhere(see, other):
    assert see([MEMORY, other]) == see([MEMORY, None])


@BOTH
@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        TwoTensor(torch.zeros(3), torch.ones(3)),
    ],
    ids=["sparse", "meta", "wrapper"],
)
def test_a_tensor_without_memory_is_refused(see, tensor):
    with pytest.raises(BufferError, match="no memory of its own"):
        see([MEMORY, tensor])


def test_nothing_is_kept():
    tensors = [torch.zeros(3, 2) for _ in range(9)]
    odd = [tensors[0], torch.eye(3).to_sparse()]
    counts = [sys.getrefcount(tensor) for tensor in tensors]
    fresh = (bytes([1, 2]), bytes([3, 4]))
    assert [sys.getrefcount(part) for part in IN_C(tensors)[:2]] == [sys.getrefcount(part) for part in fresh[:2]]
    before = None
    for _ in range(3):
        for _ in range(3000):
            IN_C(tensors)
        for _ in range(100):
            with pytest.raises(BufferError):
                IN_C(odd)
        gc.collect()
        blocks = sys.getallocatedblocks()
        before = before or blocks
    assert blocks - before < 500
    assert [sys.getrefcount(tensor) for tensor in tensors] == counts


def test_it_is_compiled_where_a_compiler_is():
    assert look.__module__ == "sngm_look"


CHOICE = """
import torch
from sngm.optim.kernels.look import look
tensor = torch.zeros(3)
print(look.__name__, look([tensor, None])[2] == tensor.data_ptr())
"""


@pytest.mark.parametrize(
    ("missing", "name"),
    [
        ({"CC": "no-such-compiler"}, "look_one_by_one"),
        pytest.param({"CC": "false"}, "look_one_by_one", marks=pytest.mark.slow),
        pytest.param({}, "look", marks=pytest.mark.slow),
    ],
)
def test_without_a_compiler(missing, name, tmp_path):
    assert output_of_choice(TRITON_CACHE_DIR=str(tmp_path), **missing) == (f"{name} True\n", "")


@pytest.mark.slow
def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    below = str(tmp_path / "file" / "below")
    assert output_of_choice(TRITON_CACHE_DIR=below) == ("look_one_by_one True\n", "")


def output_of_choice(**environment):
    command = [sys.executable, "-c", CHOICE]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr
