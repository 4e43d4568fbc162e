"""Samples per second of a run on 1, 2, 4, ... processes of this machine, with one global batch.

python benchmarks/scaling.py --task digits --batch 512 --processes 1,2
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def measure(task: str, batch: int, epochs: int, processes: int, workers: int, options: list[str]) -> float:
    """Return the samples per second of training, evaluation apart, in the median epoch."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        words += ["-m", "sngm", "train", task, "--batch", str(batch), "--epochs", str(epochs), "--out", folder]
        words += ["--workers", str(workers), *options]  # the same run on any number of processes
        threads = str(max(1, (os.cpu_count() or 1) // processes))
        subprocess.run(words, env={"OMP_NUM_THREADS": threads, **os.environ}, check=True, stdout=subprocess.DEVNULL)
        record = json.loads(Path(folder, "run.json").read_text())
        steps = record["data"]["training"]["samples"] // batch
    return steps * batch / record["timing"]["seconds_per_epoch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--processes", default="1,2")
    arguments, options = parser.parse_known_args()  # others are options of sngm train
    counts = [int(count) for count in arguments.processes.split(",")]
    base = None
    print("| processes | samples/s | speed-up | efficiency |\n|---|---|---|---|")
    for count in counts:
        speed = measure(arguments.task, arguments.batch, arguments.epochs, count, max(counts), options)
        base = base or speed / count
        print(f"| {count} | {speed:,.0f} | {speed / base:.2f} | {speed / base / count:.0%} |", flush=True)


if __name__ == "__main__":
    main()
