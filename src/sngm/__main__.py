"""Entry point of the commands ``sngm`` and ``python -m sngm``, also under torchrun."""

import os
import sys
from importlib.util import find_spec

# modules and packages of sngm[train], without those that torch installs
NEEDS = {"matplotlib": "matplotlib", "rich": "rich", "sklearn": "scikit-learn", "scipy": "scipy", "typer": "typer"}


def lacking() -> list[str]:
    """Return the packages of sngm[train] that are not installed."""
    return [package for module, package in NEEDS.items() if find_spec(module) is None]


def main() -> None:
    """Run the command line; if its packages are missing, print how to install them and exit."""
    try:
        if names := lacking():
            sys.exit(f"sngm: {', '.join(names)} not installed; the command line comes with pip install 'sngm[train]'")
        from .cli import main as run
    except KeyboardInterrupt:
        print("sngm: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:  # so that torchrun's summary shows the traceback of the process that failed
        from torch.distributed.elastic.multiprocessing.errors import record

        record(main)()
    else:
        main()
