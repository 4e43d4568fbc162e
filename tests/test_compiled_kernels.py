"""The Triton kernels, compiled for absent GPUs: the compiler rejects code that the interpreter runs."""

import itertools
import re
import types

import pytest
import torch
from harness import KERNEL_CASES, make_params, make_twin, pairwise

import sngm
import sngm.triton_support
from sngm.models.lstm import Layer
from sngm.models.resnet_cifar import resnet20
from sngm.optim import kernels

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

A100, H100, MI300 = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TARGETS = pytest.mark.parametrize("target", [A100, H100, MI300], ids=["A100", "H100", "MI300"])
MEMORY = {A100: 166_912, H100: 232_448, MI300: 65_536}  # bytes of shared memory per program
SHAPES = [(7,), (40, 40), (64,)]
WORDS = (A100, H100, MI300), (50, 200), (torch.float32, torch.bfloat16)  # GPUs, widths, dtypes

pytestmark = pytest.mark.filterwarnings("ignore:AnnAssign:DeprecationWarning")  # Triton's, on Python 3.13


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Return a function that makes kernels compile for a GPU without launching, and returns the compiled kernels."""
    found = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        one = run(self, *args, grid=grid, warmup=True, **options)
        assert one.metadata.enable_fp_fusion
        found[one.hash] = one

    def use(target):
        gpu = types.SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: str(target),  # not a number, so that no other test runs these kernels
            get_current_stream=lambda device: 0,
        )
        monkeypatch.setattr(driver, "_active", gpu)
        return found

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # Triton's future default, which must not change results
    for module in (kernels, sngm.triton_support):
        monkeypatch.setattr(module, "DEVICES", ("cpu",))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    return use


def step(case, dtype, **more):
    twin = make_twin(case, "default", dtype, SHAPES, **more)
    for p in twin.params:
        p.grad = torch.ones_like(p)
    twin.optimizer.step(**({"mean_norms": [1.0] * len(SHAPES)} if twin.name == "CLARS" else {}))
    assert twin.optimizer._layout is not None


def names(found):
    return sorted({one.metadata.name for one in found.values()})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "launched"),
    [
        ("SNGM coupled global", ["measure", "update"]),
        ("LAMB", ["apply", "measure", "moments"]),
        pytest.param("LARS momentum", ["apply", "measure", "update"], marks=pytest.mark.slow),
    ],
)
def test_sums_depend_on_no_order_and_memory_is_read_in_wide_pieces(compiled, case, launched):
    found = compiled(H100)
    step(case, torch.float32)
    assert names(found) == launched
    counting = set()
    for one in found.values():
        name, code = one.metadata.name, one.asm["ptx"]
        atomics = set(re.findall(r"\b(?:atom|red)\.\S+", code))
        assert all(what.endswith(".add.u32") for what in atomics), atomics  # counters of programs only
        if atomics:
            counting.add(name)
        assert "ld.global.v4.b32" in code, name
        assert ("st.global.v4.b32" in code) == (name != "measure"), name
    assert "measure" in counting


@pytest.mark.slow
def test_other_numbers_of_tensors_and_other_addresses_compile_nothing_anew(compiled):
    found = compiled(H100)
    scales = torch.ones(8)
    for shapes, at in (([(7,)], 0), ([(7,)] * 16, 1), (SHAPES, 2)):  # Triton specialises on 1 and multiples of 16
        params = make_params(shapes=shapes)
        optimizer = sngm.SNGM(params, lr=0.1, weight_decay=1e-4)
        optimizer.grad_scale = scales[at : at + 1]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert len(found) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@TARGETS
def test_every_rule_compiles_for_every_gpu(compiled, target, dtype):
    found = compiled(target)
    for case in KERNEL_CASES:
        step(case, dtype)
    for case in ("SNGM coupled global", "LAMB", "LARS momentum") if dtype == torch.bfloat16 else ():
        step(case, dtype, stochastic_rounding=True)
    assert names(found) == ["apply", "measure", "moments", "update"]
    assert all(one.asm["cubin" if target.backend == "cuda" else "hsaco"] for one in found.values())


def check_memory(found, target):
    sizes = [(one.metadata.shared, one.metadata.name) for one in found.values()]
    assert max(sizes)[0] <= MEMORY[target], sizes


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@TARGETS
def test_kernels_of_images_compile_and_find_room_on_every_gpu(compiled, target, dtype):
    found = compiled(target)
    model = resnet20().to(memory_format=torch.channels_last)
    model.linear = torch.nn.Identity()  # not every CPU supports bfloat16 products
    images = torch.ones(16, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        model(images).float().sum().backward()
    own = ["add_parts", "convolve", "convolve_few", "correlate", "correlate_few"] if dtype == torch.bfloat16 else []
    assert names(found) == [*own, "differentiate", "normalise", "subsample", "sum_gradients", "sum_rows"]
    check_memory(found, target)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("target", "width", "dtype"),
    [
        pytest.param(*row, marks=[] if row in pairwise(*WORDS) else pytest.mark.nightly)
        for row in itertools.product(*WORDS)
    ],
    ids=str,
)
def test_kernels_of_words_compile_and_find_room_on_every_gpu(compiled, monkeypatch, target, width, dtype):
    from sngm.models.kernels import lstm, softmax

    found = compiled(target)
    monkeypatch.setattr(lstm, "fits", lambda x, width, dtype: lstm._memory(width, dtype) <= MEMORY[target])
    layer, x, hidden = Layer(width, width), torch.ones(5, 20, width), torch.zeros(1, 20, width)
    for programs in (0, 1000):
        monkeypatch.setattr(lstm, "_concurrent", lambda x, programs=programs: programs)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            layer(x, (hidden, hidden.clone()))[0].float().sum().backward()
    served = ["run_backward", "run_forward"] if lstm.fits(x, width, dtype) else []
    if served and dtype == torch.bfloat16:
        served += ["run_backward_shared", "run_forward_shared"]
    assert names(found) == sorted(served)
    softmax.cross_entropy(torch.ones(4, 1024, dtype=dtype), torch.ones(4).long(), torch.ones(4), 1000, True)
    assert names(found) == sorted([*served, "differentiate"])
    check_memory(found, target)
