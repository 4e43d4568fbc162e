"""``python -m sngm``, also under torchrun."""

import os

from .cli import main

if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's summary then shows the traceback of the process that failed
        from torch.distributed.elastic.multiprocessing.errors import record

        record(main)()
    else:
        main()
