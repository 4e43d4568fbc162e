"""timm: use the optimizers of this package by name in ``create_optimizer_v2`` and in the option ``--opt`` of scripts.

To run timm's training script with them: ``python -m sngm.integrations.timm train.py --opt sngm ...``
"""

from __future__ import annotations

import runpy
import sys

# names that do not replace timm's own LARS and LAMB; without "_", because timm reads "a_b" as b with the wrapper a
METHODS = {
    "sngm": ("SNGM", "SGD with momentum on normalised gradients"),
    "blocksngm": ("SNGM", "SNGM with a norm for each tensor"),
    "spectralsngm": ("SpectralSNGM", "SNGM in the spectral norm of each matrix"),
    "sngmlars": ("LARS", "LARS, as published in 2017"),
    "sngmlamb": ("LAMB", "LAMB, Algorithm 2 of its paper"),
}


def register() -> None:
    """Register the optimizers with timm, so that ``create_optimizer_v2(model, "sngm", lr=0.1)`` finds them.

    Further calls have no effect.
    """
    from timm.optim import OptimInfo, get_optimizer_info, list_optimizers
    from timm.optim._optim_factory import default_registry

    from .. import optim

    for name, (cls, about) in METHODS.items():
        info = OptimInfo(
            name=name,
            opt_class=getattr(optim, cls),
            description=about,
            has_eps=True,
            has_momentum=cls != "LAMB",
            has_betas=cls == "LAMB",
            defaults={"scope": "tensor"} if name == "blocksngm" else None,
        )
        if name not in list_optimizers() or get_optimizer_info(name).opt_class is not info.opt_class:
            default_registry.register(info)  # logs a warning if the name is already registered


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m sngm.integrations.timm SCRIPT [ARGUMENTS]")
    register()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
