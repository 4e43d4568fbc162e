"""Convert synthetic rows in Criteo's form in a separate process, and measure rows per second and peak memory.

.venv/bin/python benchmarks/criteo_convert.py --rows 10000000 --categories 5000000
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from criteo_synthetic import CriteoLike, cardinalities

from sngm.data.criteo import load_criteo


def peak() -> int:
    """Return the peak memory in MB; getrusage would include that of the parent process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return round(int(found[1]) * 1024 / 1e6) if found else 0


def converted(folder: Path) -> None:
    base = peak()
    start, cpu = time.perf_counter(), time.process_time()
    found = load_criteo(folder, sorted(path.name for path in folder.glob("day_*")))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    rows = sum(found.facts["rows"].values())
    result = {
        "rows": rows,
        "categories seen": sum(found.field_sizes),
        "seconds": round(seconds, 1),
        "rows a second": round(rows / seconds),
        "CPU seconds": round(cpu, 1),
        "MB of text": round(sum(source["bytes"] for source in found.facts["sources"]) / 1e6),
        "MB converted": round(sum(array["bytes"] for array in found.facts["arrays"].values()) / 1e6),
        "peak MB": peak(),
        "of which before": base,
    }
    print(json.dumps(result, indent=2))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--categories", type=int, default=1_000_000)
    options.add_argument("--files", type=int, default=2)
    options.add_argument("--gzip", action="store_true")
    options.add_argument("--folder", type=Path, help="where to work; about 900 bytes a row for a while")
    options.add_argument("--convert", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.convert:
        converted(chosen.convert)
        return
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        made = CriteoLike(chosen.rows, sizes=cardinalities(chosen.categories))
        start, share = time.perf_counter(), -(-chosen.rows // chosen.files)
        for file in range(chosen.files):
            path = Path(name, f"day_{file:02}{'.gz' if chosen.gzip else ''}")
            made.write(path, file * share, (file + 1) * share)
        print(f"made up in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        # in a new process, whose peak memory does not include generating the rows
        subprocess.run([sys.executable, __file__, "--convert", name], check=True)


if __name__ == "__main__":
    main()
