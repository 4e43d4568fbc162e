"""Run Triton kernels on the CPU with Triton's interpreter."""

import contextlib
import functools
import importlib
import sys

import pytest
import torch

import sngm.triton_support


def unload(ours):
    names = [n for n in sys.modules if n in ours or (n.split(".")[0] == "triton" and not n.startswith("triton._C"))]
    found = {name: sys.modules.pop(name) for name in names}
    for name in ours:
        package, _, module = name.rpartition(".")
        vars(importlib.import_module(package)).pop(module, None)
    return found


@contextlib.contextmanager
def interpreted(*ours, chooser=sngm.triton_support):
    """Reload modules with a separate, interpreting copy of Triton, invisible to other tests of this process.

    `chooser` is the module that defines which devices the kernels support.
    """
    with pytest.MonkeyPatch.context() as patch:
        elsewhere = unload(ours)
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(chooser, "DEVICES", ("cpu",))
        interpreter = importlib.import_module("triton.runtime.interpreter")
        # once per function instead of at each call, which would take half of the time
        patch.setattr(interpreter, "_patch_lang", functools.cache(interpreter._patch_lang))
        patch.setattr(interpreter._LangPatchScope, "restore", lambda self: None)
        # a table that is built at each call, and a check of every int32 sum, which take a third of the rest
        uncached, cached = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
        of_pointer = interpreter.tl.pointer_type  # not hashable
        patch.setattr(
            interpreter, "_get_np_dtype", lambda t: (uncached if isinstance(t.scalar, of_pointer) else cached)(t.scalar)
        )
        semantic = importlib.import_module("triton.language.semantic").TritonSemantic
        patch.setattr(semantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
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
