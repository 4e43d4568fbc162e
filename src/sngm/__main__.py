"""``sngm`` and ``python -m sngm``, also under torchrun."""

import os
import sys


def main() -> None:
    """Run the command line, or say how to install it where only the optimizers are."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("filelock", "typer"):
            raise
        sys.exit(f"sngm: {error.name} is not installed; the command line comes with pip install 'sngm[train]'")
    run()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's summary then shows the traceback of the process that failed
        from torch.distributed.elastic.multiprocessing.errors import record

        record(main)()
    else:
        main()
