"""Run Triton kernels on the CPU with Triton's interpreter."""

import contextlib
import functools
import importlib
import math
import sys

import pytest
import torch

import sngm.triton_support

STEP = tuple(f"sngm.optim.kernels.{name}" for name in ("device_tables", "triton_kernels", "device_functions"))


def unload(ours):
    names = [n for n in sys.modules if n in ours or (n.split(".")[0] == "triton" and not n.startswith("triton._C"))]
    found = {name: sys.modules.pop(name) for name in names}
    for name in ours:
        package, _, module = name.rpartition(".")
        vars(importlib.import_module(package)).pop(module, None)
    return found


def speed_up():
    """Leave out work of Triton's interpreter that takes two thirds of its time."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    semantic = importlib.import_module("triton.language.semantic").TritonSemantic
    core = importlib.import_module("triton.language.core")
    # patch the language once per function instead of at each call
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda self: None
    # build the table of dtypes once for each dtype; pointer types are not hashable and need no table
    dtype_of, cached = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda t: (dtype_of if t.scalar.is_ptr() else cached)(t.scalar)
    # do not check every sum of int32 for overflow, nor the itemsize of every array
    semantic.binary_op_sanitize_overflow_impl = lambda *_: None
    interpreter.TensorHandle.__post_init__ = lambda self: None

    @functools.cache
    def sizes(shape):
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes(type.shape if type.is_block() else ())

    core.tensor.__init__ = init  # it would make constants of the sizes for each tensor


@contextlib.contextmanager
def interpreted(*ours, chooser=sngm.triton_support):
    """Reload modules with a separate, interpreting copy of Triton, invisible to other tests of this process.

    `chooser` is the module that defines which devices the kernels support.
    """
    with pytest.MonkeyPatch.context() as patch:
        elsewhere = unload(ours)
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(chooser, "DEVICES", ("cpu",))
        speed_up()
        yield
        aside = {f"interpreted {name}": module for name, module in unload(ours).items()}
        sys.modules.update(elsewhere | aside)  # Triton's bindings fail at exit without its modules


def on_devices(*ours):
    """Return a fixture over devices: the CPU with interpreted modules, and a GPU."""

    @pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def device(request):
        if request.param == "cuda":
            if not torch.cuda.is_available():
                pytest.skip("needs a GPU")
            yield "cuda"
            return
        with interpreted(*ours):
            yield "cpu"

    return device


def close(found, wanted, tolerance):
    assert found.shape == wanted.shape
    error = (found.double().cpu() - wanted.double().cpu()).abs().max() / wanted.abs().max().cpu()
    assert error < tolerance, f"off by {error:.2e} of the largest"
