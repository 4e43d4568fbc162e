"""Rows per second of DeepFM on synthetic rows in Criteo's form, through the code of `sngm train criteo-deepfm`.

The same run also measures a plain PyTorch loop: a DataLoader, DeepCTR-Torch's 52 tables, eager steps, torch's fused
SGD. The rows are generated as the arrays that a conversion produces; criteo_convert.py measures the conversion of text.
No number includes evaluation or the first epoch, which warms up.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arena import copy_bandwidth, progress
from cells import DOCS, heading, take, verdict, write_docs
from criteo_synthetic import CriteoLike, cardinalities
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, Dataset, RandomSampler

from sngm.data.criteo import Criteo, Rows
from sngm.data.criteo_convert import SPLITS
from sngm.data.criteo_text import CATEGORIES, INTEGERS
from sngm.models.deepfm import DeepFM, fm
from sngm.options import Execution
from sngm.tasks.criteo import CriteoDeepFM
from sngm.training import Options, resolve, train
from sngm.training.build import prepare
from sngm.training.distributed import Processes, set_numerics

EXAMPLES = """examples:
  python benchmarks/criteo_epoch.py --out build/bench                        all of it, some minutes on one GPU
  python benchmarks/criteo_epoch.py --device cpu --rows 200000 --categories 50000 --workers 2
  python benchmarks/criteo_epoch.py --out build/bench --converted few.json,many.json
                                      beside what criteo_convert.py printed for few and for many rows
  python benchmarks/criteo_epoch.py --write-docs build/bench/criteo_epoch.json    put results into docs/criteo.md
"""
HERE = Path(__file__).resolve()
PAGE = DOCS / "criteo.md"
METHODS = ("msgd", "adam", "lars-unscaled", "lamb")
MODES = ("compiled+captured", "eager")
ROWS_A_SECOND = 3e6  # of SNGM on one H200
TIMES_PLAIN = 10.0
GROWTH = 1.2  # of a conversion's memory, with many times the rows and the same categories
SHARES = dict(zip(SPLITS, (0.64, 0.16, 0.20), strict=True))
AT_ONCE = 1 << 17  # rows that a process generates at a time
LR = 1e-6  # nothing diverges with this learning rate, though the loss is a sum over the batch
ROW_BY_ROW = 100  # steps of the slow loop that collates row by row
# Bytes per parameter in a step of SNGM: 28 for its kernels (docs/sngm.md), 8 to concatenate tables, 4 to zero their
# gradient. The rest depends on the batch, and is small compared with 25 million parameters.
BYTES = 40


# ---------------------------------------------------------------- synthetic rows


def make(folder: Path, rows: int, categories: int, processes: int) -> None:
    """Write arrays as a conversion does into the folder, unless it has them."""
    sizes, done = cardinalities(categories), folder / "made.json"
    wanted = {"rows": rows, "field_sizes": [size + 2 for size in sizes]}
    if done.exists() and json.loads(done.read_text()) == wanted:
        return
    folder.mkdir(parents=True, exist_ok=True)
    jobs, first = [], 0
    for split, share in SHARES.items():
        count = round(rows * share) if split != SPLITS[-1] else rows - first
        for kind, dtype, shape in (
            ("dense", np.float32, (count, INTEGERS)),
            ("categories", np.int32, (count, CATEGORIES)),
            ("labels", np.uint8, (count,)),
        ):
            np.lib.format.open_memmap(folder / f"{split}-{kind}.npy", "w+", dtype, shape)
        made = CriteoLike(rows, sizes=sizes)
        jobs += [(folder, split, made, first, b, min(b + AT_ONCE, count)) for b in range(0, count, AT_ONCE)]
        first += count
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for i, _ in enumerate(pool.map(fill, *zip(*jobs, strict=True))):
            progress(f"made up {100 * (i + 1) // len(jobs)}% of {rows:,} rows", passing=True)
    done.write_text(json.dumps(wanted))


def fill(folder: Path, split: str, made: CriteoLike, first: int, begin: int, end: int) -> None:
    """Write rows `begin` to `end` (exclusive) of a split that starts at row `first` of the whole data.

    The content of a row is a pseudo-random function of its index, so consecutive splits are random ones.
    """
    torch.set_num_threads(1)
    block = made.block(first + begin, first + end)
    integers = np.where(block.missing[:, :INTEGERS], 0, block.integers)
    least = np.array([-2 * (column == 1) for column in range(INTEGERS)])
    numbers = np.stack([number[block.categories[:, field]] for field, number in enumerate(numbered(made.sizes))], 1)
    for kind, values in (
        ("dense", (integers - least) / 99),
        ("categories", np.where(block.missing[:, INTEGERS:], 0, numbers + 2)),  # 1: not seen in training
        ("labels", block.labels),
    ):
        np.load(folder / f"{split}-{kind}.npy", mmap_mode="r+")[begin:end] = values


@functools.cache
def numbered(sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Return each field's categories renumbered so that frequent ones are not adjacent, as after a conversion."""
    return [np.random.default_rng(field).permutation(size) for field, size in enumerate(sizes)]


def opened(folder: Path) -> Criteo:
    """Return the rows that `make` wrote, memory-mapped as converted ones are."""
    return Criteo.open(folder, json.loads((folder / "made.json").read_text()))


class MadeUp(CriteoDeepFM):
    """The task criteo-deepfm on the rows of a folder."""

    epochs = 4

    def __init__(self, folder: str, reduction: str = "sum") -> None:
        super().__init__(reduction=reduction)
        self.folder = folder

    def _rows(self) -> Criteo:
        return opened(Path(self.folder))


# ---------------------------------------------------------------- the plain loop


class PlainDeepFM(nn.Module):
    """DeepFM as DeepCTR-Torch has it: a lookup for each field and part."""

    def __init__(self, field_sizes: list[int]) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 4) for size in field_sizes)
        self.weights = nn.ModuleList(nn.Embedding(size, 1) for size in field_sizes)
        self.linear = nn.Linear(INTEGERS, 1)
        self.dnn = nn.Sequential(
            nn.Linear(4 * len(field_sizes) + INTEGERS, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
            nn.Linear(128, 1, bias=False),
        )  # fmt: skip
        for table in (*self.embeddings, *self.weights):
            nn.init.normal_(table.weight, std=1e-4)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        columns = categories.unbind(1)
        found = torch.stack([table(ids) for table, ids in zip(self.embeddings, columns, strict=True)], 1)
        weights = torch.cat([table(ids) for table, ids in zip(self.weights, columns, strict=True)], 1)
        deep = self.dnn(torch.cat([found.flatten(1), dense], 1))
        return weights.sum(1) + fm(found) + (self.linear(dense) + deep).squeeze(1)


class ByBatches(Dataset[tuple[Tensor, ...]]):
    """A dataset whose items are whole batches, gathered by one call for each tensor."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __getitem__(self, indices: np.ndarray) -> tuple[Tensor, ...]:
        return tuple(t.index_select(0, torch.from_numpy(indices)) for t in self.rows.tensors)


class RowByRow(ByBatches):
    """A dataset whose items are rows, as in a TensorDataset."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(t[index] for t in self.rows.tensors)


class Orders:
    """A sampler of the shuffled indices of each batch of an epoch."""

    def __init__(self, count: int, batch: int) -> None:
        self.count, self.batch = count, batch

    def __len__(self) -> int:
        return self.count // self.batch

    def __iter__(self) -> Iterator[np.ndarray]:
        whole = torch.randperm(self.count)[: len(self) * self.batch]
        return iter(whole.view(len(self), self.batch).numpy())  # arrays reach worker processes faster than lists


def plain_loop(folder: Path, batch: int, epochs: int, workers: int, device: torch.device, by_rows: bool) -> Any:
    """Measure the plain loop as `measure` does ours. The loss is the sum over a batch, as in DeepCTR-Torch."""
    found = opened(folder)
    how = {
        "num_workers": workers, "pin_memory": device.type == "cuda", "persistent_workers": True, "prefetch_factor": 4,
        "multiprocessing_context": "forkserver",
    }  # fmt: skip
    if by_rows:
        few = RandomSampler(range(len(found.train)), num_samples=min(ROW_BY_ROW * batch, len(found.train)))
        loader: DataLoader[Any] = DataLoader(RowByRow(found.train), batch, sampler=few, drop_last=True, **how)
    else:
        loader = DataLoader(ByBatches(found.train), None, sampler=Orders(len(found.train), batch), **how)
    set_numerics(device, deterministic=False)
    tidy(device)
    model = PlainDeepFM(found.field_sizes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), LR, 0.9, weight_decay=1e-3, fused=True)
    seconds = []
    for _ in range(epochs):
        start = time.perf_counter()
        for pieces in loader:
            dense, categories, labels = (t.to(device, non_blocking=True) for t in pieces)
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(dense, categories), labels, reduction="sum").backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return result(statistics.median(seconds[1:]), len(loader) * batch, device)


# ---------------------------------------------------------------- measuring


def measure(folder: Path, method: str, batch: int, epochs: int, step: str, device: torch.device) -> Any:
    """Return the timing that `sngm train` reports of a short run, and its peak GPU memory."""
    tidy(device)
    settings = {"folder": str(folder)}
    config = resolve(f"{HERE}:MadeUp", method, lr=LR, batch=batch, epochs=epochs, task_settings=settings)
    with tempfile.TemporaryDirectory() as place:
        try:
            record = train(config, Path(place) / "run", Options(device=str(device), step=step))
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:200]}
    timing = record["timing"]
    if "seconds_per_epoch" not in timing:
        return {"failed": record["status"]}
    trained = record["data"]["training"]["samples"] // batch * batch
    return {**result(timing["seconds_per_epoch"], trained, device), "mode": timing["step"]}


def result(seconds: float, rows: int, device: torch.device) -> dict[str, Any]:
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "rows": rows,
        "seconds_per_epoch": round(seconds, 4),
        "rows_a_second": round(rows / seconds),
        "peak_gib": peak and round(peak / 2**30, 2),
    }


def tidy(device: torch.device) -> None:
    """Free GPU memory and reset its peak statistics."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def profile(folder: Path, batch: int, device: torch.device, steps: int = 50) -> dict[str, float]:
    """Return milliseconds of an eager step of SNGM in each of the slowest kernels, and in all ("busy")."""
    config = resolve(f"{HERE}:MadeUp", "sngm", lr=LR, batch=batch, task_settings={"folder": str(folder)})
    set_numerics(device, deterministic=False)
    setup = prepare(config, Processes(0, 1, device), Execution(step="eager"))
    order = setup.data_source.begin(torch.randperm(len(setup.training)), 0, 0)

    def take(count: int) -> None:
        for i in range(count):
            setup.stepper(order[i * batch : (i + 1) * batch], epoch=0, step=i)
        torch.cuda.synchronize()

    steps = min(steps, len(order) // batch)
    take(min(3, steps))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as kernels:
        take(steps)
    found = {event.key: event.self_device_time_total / 1e3 / steps for event in kernels.key_averages()}
    most = sorted(found, key=lambda name: -found[name])[:16]
    return {"busy": sum(found.values())} | {name: found[name] for name in most}


def lookups(folder: Path, batch: int, device: torch.device, times: int = 20) -> dict[str, float]:
    """Return milliseconds of the gradient of a batch's lookups in one table of all embeddings, including zeroing it."""
    found = opened(folder)
    offsets = torch.tensor([0, *found.field_sizes[:-1]]).cumsum(0)
    rows = (found.train.tensors[1][:batch] + offsets).int().flatten().to(device)
    table = torch.zeros(sum(found.field_sizes), 4, device=device, requires_grad=True)
    results = {}
    for name, look in (
        ("index_select", lambda: table.index_select(0, rows)),
        ("embedding", lambda: nn.functional.embedding(rows, table)),
    ):
        looked = look()
        gradient = torch.ones_like(looked)
        seconds = []
        for _ in range(times):
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.autograd.grad(looked, table, gradient, retain_graph=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        results[name] = 1e3 * statistics.median(seconds[2:])
    return results


def cells(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name and function of each measurement, those with limits first."""
    of, batch, device = functools.partial, args.batch, args.device

    def ours(method: str, step: str = "auto") -> Callable[[], Any]:
        return of(measure, folder, method, batch, args.epochs, step, device)

    def plain(epochs: int, by_rows: bool) -> Callable[[], Any]:
        return of(plain_loop, folder, batch, epochs, args.workers, device, by_rows)

    yield "method/sngm", ours("sngm")
    yield "plain/by batches", plain(3, False)
    yield "plain/row by row", plain(2, True)
    yield "bandwidth", of(copy_bandwidth, device)
    for method in args.methods:
        yield f"method/{method}", ours(method)
    if device.type == "cuda":
        for mode in args.modes:
            yield f"mode/{mode}", ours("sngm", mode)
        yield "lookups", of(lookups, folder, batch, device)
        yield "profile", of(profile, folder, batch, device)
    for path in args.converted:
        yield f"conversion/{path.stem}", of(json.loads, path.read_text())


# ---------------------------------------------------------------- the page


def verdicts(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield rows of the table of limits for one H200: what, the limit, the measured value, and whether it holds."""

    ours, plain = (found.get(name, {}).get("rows_a_second") for name in ("method/sngm", "plain/by batches"))
    limit = f"at least {ROWS_A_SECOND:,.0f}"
    yield verdict("rows a second, SNGM", limit, ours, lambda v: v >= ROWS_A_SECOND, "{:,.0f}")
    times = ours / plain if ours and plain else None
    limit = f"at least {TIMES_PLAIN:g} x"
    yield verdict("to the plain loop's, by batches", limit, times, lambda v: v >= TIMES_PLAIN, "{:.1f} x")
    taken = sorted((value for key, value in found.items() if key.startswith("conversion/")), key=lambda v: v["rows"])
    growth = None
    if len(taken) > 1:
        few, many = (value["peak MB"] - value["of which before"] for value in (taken[0], taken[-1]))
        growth = many / few
    what = "memory of a conversion, many rows to few"
    yield verdict(what, f"at most {GROWTH:g} x", growth, lambda v: v <= GROWTH, "{:.2f} x")


def page(record: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    where, found = record["about"], record["cells"]
    lines = heading(record, verdicts(found))
    lines += [
        f"{where['rows']:,} made-up rows, of which 64 % are trained on, {where['parameters']:,} parameters, batch "
        f"{where['batch']}:", "",
        "| | rows/s | ms/step | s/epoch | GiB |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for key, value in found.items():
        kind, _, name = key.partition("/")
        if kind in ("method", "mode", "plain"):
            mode = f", {value.get('mode')}" if kind == "method" else ""
            name = {"method": f"{name}{mode}", "mode": f"sngm, {name}", "plain": f"plain loop, {name}"}[kind]
            lines.append(f"| {name} | {cell(value, where['batch'])} |")
    lines.append("")
    if "bandwidth" in found:
        bound = 1e3 * where["parameters"] * BYTES / found["bandwidth"]
        lines += [f"Bound: {BYTES} bytes per parameter at the measured {found['bandwidth'] / 1e12:.2f} TB/s are "
                  f"{bound:.2f} ms per step of SNGM.", ""]  # fmt: skip
    if times := found.get("lookups"):
        lines += ["The gradient of a batch's lookups in the embeddings, zeroing it included: "
                  + ", ".join(f"{value:.2f} ms by {name}" for name, value in times.items()) + ".", ""]  # fmt: skip
    if times := found.get("profile"):
        lines += ["Where the time of an eager step goes, the kernels that take most:", ""]
        lines += ["| kernel | ms |", "|---|---|"]
        lines += [f"| {name[:90].replace('|', ' ')} | {value:.3f} |" for name, value in times.items()]
        lines.append("")
    if taken := [value for key, value in found.items() if key.startswith("conversion/")]:
        lines += ["| rows converted | categories seen | rows/s | MB of memory, besides what Python and torch take |"]
        lines += ["|---|---|---|---|"]
        for v in taken:
            own = v["peak MB"] - v["of which before"]
            lines.append(f"| {v['rows']:,} | {v['categories seen']:,} | {v['rows a second']:,} | {own} |")
        lines.append("")
    return "\n".join(lines)


def cell(value: dict[str, Any], batch: int) -> str:
    if "failed" in value:
        return f"failed: {value['failed']} | | |"
    step = 1e3 * batch / value["rows_a_second"]
    return f"{value['rows_a_second']:,} | {step:.2f} | {value['seconds_per_epoch']:.2f} | {value['peak_gib'] or ''}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = {"type": lambda text: [word for word in text.split(",") if word]}
    paths = {"type": lambda text: [Path(word) for word in text.split(",") if word]}
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--rows", type=int, default=10_000_000, help="to make up; 64 %% of them are trained on")
    parser.add_argument("--categories", type=int, default=5_000_000, help="of all fields together")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=4, help="of each run; the first is not counted")
    parser.add_argument("--methods", **words, default=list(METHODS), help="beside SNGM, by commas")
    parser.add_argument("--modes", **words, default=list(MODES), help="other step modes of SNGM on a GPU, by commas")
    parser.add_argument("--workers", type=int, default=8, help="of the plain loop's DataLoader")
    parser.add_argument("--processes", type=int, default=cores, help="that make rows")
    parser.add_argument("--device", help="cpu or cuda; default: the GPU if there is one")
    parser.add_argument("--folder", type=Path, help="keep the rows here, 160 bytes each, for another run")
    parser.add_argument("--converted", **paths, default=[], help="files of what criteo_convert.py printed, by commas")
    parser.add_argument("--out", type=Path, help="folder for criteo_epoch.json; what is in it is not measured again")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a limit is missed")
    parser.add_argument("--write-docs", type=Path, metavar="JSON", help="write results into docs/criteo.md, no more")
    args = parser.parse_args()
    if args.write_docs:
        write_docs(parser, PAGE, args.write_docs, page)
        return
    args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "torch sees no GPU here; --device cpu measures the CPU\n")
    if args.epochs < 2 or min(args.workers, args.processes) < 1:
        parser.error("--epochs must be at least 2, --workers and --processes at least 1")
    if args.batch > round(args.rows * SHARES["train"]):
        parser.error(f"--batch {args.batch} is more than the rows that are trained on, 64 % of {args.rows}")
    for path in args.converted:
        if not path.is_file():
            parser.error(f"no file {path}")
    with tempfile.TemporaryDirectory() as aside:
        folder = args.folder or Path(aside)
        progress(f"making {args.rows:,} rows")
        make(folder, args.rows, args.categories, args.processes)
        about = {"rows": args.rows, "categories": args.categories, "batch": args.batch}
        with torch.device("meta"):
            about["parameters"] = sum(p.numel() for p in DeepFM(opened(folder).field_sizes).parameters())
        record = take(cells(args, folder), args.out and args.out / "criteo_epoch.json", **about)
    print(page(record))
    if args.check and any(row[-1] == "NO" for row in verdicts(record["cells"])):
        sys.exit(1)


if __name__ == "__main__":
    main()
