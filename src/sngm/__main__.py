"""Entry point of the commands ``sngm`` and ``python -m sngm``, also under torchrun."""

import os
import sys

from . import _missing_packages


def main() -> None:
    """Run the command line; if its packages are missing, print how to install them and exit."""
    try:
        if names := _missing_packages():
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
