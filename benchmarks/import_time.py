"""Measure the time of `from sngm import SNGM` beyond `import torch`: the median of several runs of -X importtime.

python benchmarks/import_time.py [--runs 5]    exits with 1 above the limit of 50 ms
"""

import argparse
import statistics
import subprocess
import sys

LIMIT = 50.0  # ms
PROGRAM = "import torch; import sys; print('torch is here', file=sys.stderr, flush=True); from sngm import SNGM"


def measure() -> float:
    """Return the import time in milliseconds of all modules imported after torch."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", PROGRAM], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    lines = done.stderr.partition("torch is here\n")[2].splitlines()
    return sum(int(line.split(":")[1].split("|")[0]) for line in lines if line.startswith("import time:")) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    found = [measure() for _ in range(parser.parse_args().runs)]
    median = statistics.median(found)
    print(f"from sngm import SNGM: {median:.1f} ms beyond import torch (best {min(found):.1f}, limit {LIMIT:.0f})")
    sys.exit(median > LIMIT)


if __name__ == "__main__":
    main()
