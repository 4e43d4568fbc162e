"""Time one optimizer step on the tensors of four models, compared with torch.optim, timm and pytorch_optimizer.

All contenders update the same parameters; each has its own state. Each round takes a sample of each contender, in
random order, so that other work of the machine affects all equally. On the CPU a sample is one step and the fastest
counts. On a GPU it is a loop of backward passes and steps, less the same loop without steps, and the median counts: as
in training, every step has new gradients. Compare only numbers of the same run, and do not use the machine meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results
import torch
from arena import Arena, commit, copy_bandwidth, make_folder, output_of, progress, quiet, release
from contenders import Contender, contenders
from sizes import SIZES

import sngm

EXAMPLES = """examples:
  python benchmarks/optim_step.py                       the CPU: tables, and which speed limits hold
  python benchmarks/optim_step.py --check --out build/bench   for CI: status 1 if a limit is missed; keep the results
  python benchmarks/optim_step.py --device cuda --out build/bench         a GPU: all four sizes, in three minutes
  python benchmarks/optim_step.py --sizes vit_b16 --only 'SGD fused|SNGM'     one size, some contenders
  python benchmarks/optim_step.py --write-docs build/bench/optim_step.json    put results into the docs
"""
TIMED_SHARE = 0.6  # of the time on a GPU; the rest is for profiling


def time_size(key: str, entrants: list[Contender], device: torch.device, rounds: int, end: float) -> int:
    """Measure the times of all contenders, and return the number of rounds of the first heat."""
    arena = Arena(SIZES[key], device)
    if arena.on_gpu:  # slow contenders separately, in fewer rounds
        quick, slow = ([c for c in entrants if c.slow is slow] for slow in (False, True))
        heats = [(quick, 5, rounds, 0.7), (slow, 2, max(2, rounds // 3), 1.0)]
    else:  # all together: limits compare slow contenders too
        heats = [(entrants, 1, rounds, 1.0)]
    done = []
    for heat, fewest, most, share in heats:
        for i, contender in enumerate(heat):
            progress(f"{SIZES[key].label}: building {contender.name} ({i + 1} of {len(heat)})", passing=i > 0)
            contender.unavailable = arena.prepare(contender)
        now = time.perf_counter()
        done.append(arena.race([c for c in heat if c.step], fewest, most, now + share * (end - now)))
        for contender in heat:
            contender.step = None
        release(device)
    return done[0]


def inspect_size(key: str, entrants: list[Contender], device: torch.device, end: float) -> None:
    """Measure memory and GPU activity; of slow contenders on a GPU only while there is time."""
    arena = Arena(SIZES[key], device)
    able = sorted((c for c in entrants if not c.unavailable), key=lambda c: c.slow)
    for i, contender in enumerate(able):
        if arena.on_gpu and contender.slow and time.perf_counter() > end:
            progress(f"{SIZES[key].label}: no time to inspect " + ", ".join(c.name for c in able[i:]))
            break
        progress(f"{SIZES[key].label}: inspecting {contender.name} ({i + 1} of {len(able)})", passing=i > 0)
        try:
            if not arena.prepare(contender):
                contender.peak = arena.peak_memory(contender)
                if arena.on_gpu:
                    contender.activity = arena.activity(contender)
        except Exception as error:  # keep the times measured before
            progress(f"{SIZES[key].label}: {contender.name} could not be inspected: {error!r:.300}")
        contender.step = None
        if arena.on_gpu and torch.cuda.memory_allocated(device) > 2**35:
            release(device)


def measure(options: argparse.Namespace, device: torch.device) -> results.Record:
    """Time every size first, then profile: profiling slows launches down, even some time afterwards."""
    start = time.perf_counter()
    on_gpu = device.type == "cuda"
    record: results.Record = {"about": about(options, device), "bandwidth": copy_bandwidth(device), "sizes": {}}
    release(device)
    entrants = {key: contenders(options.only) for key in options.sizes}
    timed_until = start + options.seconds * (TIMED_SHARE if on_gpu else 1.0)
    rounds = {}
    for i, key in enumerate(options.sizes):
        now = time.perf_counter()
        end = now + (timed_until - now) / (len(options.sizes) - i)
        rounds[key] = time_size(key, entrants[key], device, options.rounds, end)
    if on_gpu:  # the first profile of a process can lack events, so it is discarded
        with quiet(), torch.profiler.profile():
            torch.ones(8, device=device).add_(1)
            torch.cuda.synchronize(device)
    for i, key in enumerate(options.sizes):
        now = time.perf_counter()
        inspect_size(key, entrants[key], device, now + (start + options.seconds - now) / (len(options.sizes) - i))
        release(device)
        size = SIZES[key]
        record["sizes"][key] = {
            "label": size.label,
            "tensors": size.tensors,
            "parameters": size.parameters,
            "rounds": rounds[key],
            "contenders": {c.name: c.row() for c in entrants[key]},
        }
    progress("")
    record["about"]["seconds taken"] = round(time.perf_counter() - start)
    record["limits"] = results.judge(record)
    record["warning"] = too_busy(record)
    return record


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    named = [line for line in output_of("lscpu").splitlines() if line.startswith("Model name:")]
    model = named[0].removeprefix("Model name:").strip() if named else platform.processor()
    return f"{model} ({platform.machine()})"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def about(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    return {
        "hardware": hardware(device),
        "device": device.type,
        "statistic": "median" if device.type == "cuda" else "min",
        "dtype": "float32",
        "threads": options.threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else "",
        **{name: version(name) for name in ("triton", "timm", "pytorch_optimizer")},
        "sngm": sngm.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1),  # other work of the machine, before the first step
        "command": shlex.join(["python", "benchmarks/optim_step.py", *options.arguments]),
    }


def too_busy(record: results.Record) -> str:
    """Return a warning if other work was running on the machine, else an empty string."""
    rows = [row for size in record["sizes"].values() for row in size["contenders"].values()]
    jitters = [row["wall_us"]["median"] / row["wall_us"]["min"] for row in rows if row["wall_us"]]
    jitter = statistics.median(jitters or [1.0])
    load = record["about"]["load"] if record["about"]["device"] == "cpu" else 0.0
    if load < 1.0 and jitter < 1.5:
        return ""
    return f"Do not trust these numbers, the machine is busy: load {load}, medians {jitter:.1f}x the minimums."


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default: resnet20 resnet50 on the CPU, all on a GPU")
    parser.add_argument("--only", default="", metavar="REGEX", help="contenders whose name it finds (default: all)")
    parser.add_argument("--threads", type=int, default=2, help="threads torch may use on the CPU (default: 2)")
    parser.add_argument("--rounds", type=int, help="samples of every contender (default: 40 on the CPU, 60 on a GPU)")
    parser.add_argument("--seconds", type=float, help="about what it may take (default: 90 on the CPU, 150 on a GPU)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write optim_step.md, .json and .svg there")
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 if a limit is missed, or none could be judged"
    )
    parser.add_argument(
        "--write-docs",
        type=Path,
        nargs="+",
        metavar="JSON",
        help=f"measure nothing, put these into {results.PAGE.name}",
    )
    parser.add_argument("--force", action="store_true", help="with --write-docs: results of a busy machine too")
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    if options.write_docs:
        options.records = [read_record(parser, path, options.force) for path in options.write_docs]
        return options
    if options.force:
        parser.error("--force is for --write-docs; leave it out")
    options.device = usable_device(parser, options.device)
    on_gpu = options.device.type == "cuda"
    options.sizes = options.sizes or (list(SIZES) if on_gpu else ["resnet20", "resnet50"])
    options.rounds = (60 if on_gpu else 40) if options.rounds is None else options.rounds
    options.seconds = (150.0 if on_gpu else 90.0) if options.seconds is None else options.seconds
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    if options.threads > (most := 4 * (os.cpu_count() or 1)):
        parser.error(f"--threads {options.threads}: this machine has {os.cpu_count()} cores; use at most {most}")
    if not options.seconds > 0:  # also rejects NaN
        parser.error(f"--seconds {options.seconds:g}: must be a number above 0, such as 90")
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only {options.only}: not a regular expression ({error}); put a \\ before ( ) [ ] * + ? .")
    if not contenders(options.only):
        parser.error(
            f"--only {options.only}: no contender is called so; all: " + ", ".join(c.name for c in contenders())
        )
    if options.out:
        make_folder(options.out)
    return options


def usable_device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        parser.error(f"--device {name}: use cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            parser.error(f"--device {name}: torch sees no CUDA device here; use cpu")
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            parser.error(f"--device {name}: torch sees {count} CUDA devices here; use cuda:0 to cuda:{count - 1}")
        device = torch.device("cuda", device.index or 0)
    return device


def read_record(parser: argparse.ArgumentParser, path: Path, force: bool) -> results.Record:
    """Return saved results that may be written into the documentation; exit with an error otherwise."""
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        parser.error(f"--write-docs {path}: {error.strerror}; name the optim_step.json of a run with --out")
    except ValueError:
        parser.error(f"--write-docs {path}: not JSON; name the optim_step.json of a run with --out")
    if not (isinstance(record, dict) and {"about", "bandwidth", "sizes", "limits"} <= record.keys()):
        parser.error(f"--write-docs {path}: not results; name the optim_step.json of a run with --out")
    record.setdefault("warning", too_busy(record))
    if record["warning"] and not force:
        parser.error(f"--write-docs {path}: {record['warning']} Measure again, or add --force")
    return record


def nothing_judged(record: results.Record) -> str:
    """Return an error message if no limit could be checked, else an empty string."""
    if any(row["verdict"] != "SKIP" for row in record["limits"]):
        return ""
    on = record["about"]["device"]
    limited = {limit[0] for limit in (results.ON_CPU if on == "cpu" else results.ON_CUDA)}
    asked = [key for key in record["sizes"] if key in limited]
    if not asked:
        return ""
    return f"--check: none of the limits at {', '.join(asked)} could be judged; measure their contenders too (--only)"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.write_docs:
        for record in options.records:
            results.write_page(record)
        return 0
    torch.set_num_threads(options.threads)
    device = options.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    record = measure(options, device)
    text = results.markdown(record)
    print(text)
    if record["warning"]:
        print(record["warning"], file=sys.stderr)  # again, since the top has scrolled away
    if options.out:
        (options.out / "optim_step.md").write_text(text)
        (options.out / "optim_step.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / "optim_step.svg").write_text(results.figure(record))
    if not options.check:
        return 0
    if problem := nothing_judged(record):
        print(problem, file=sys.stderr)
        return 1
    return int(any(row["verdict"] == "MISS" for row in record["limits"]))


if __name__ == "__main__":
    sys.exit(main())
