"""Seconds per epoch of the LSTM on WikiText-2, through the code of `sngm train`, compared with a plain PyTorch loop.

No number includes evaluation or the first epoch, which compiles.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cells import DOCS, by_kind, cell, epoch_parser, heading, measure, numbers, take_epochs, verdict, words
from torch import nn
from torch.nn.functional import cross_entropy

from sngm.data.wikitext import WORDS, Windows, load_wikitext2, streams
from sngm.options import Execution
from sngm.training import resolve
from sngm.training.build import prepare
from sngm.training.distributed import Processes, set_numerics

EXAMPLES = """examples:
  python benchmarks/language_epoch.py --data-dir .data --out build/bench       all of it, some minutes on one GPU
  python benchmarks/language_epoch.py --data-dir .data --batches 20 --only ours
  python benchmarks/language_epoch.py --write-docs build/bench/language_epoch.json   put results into docs/language.md
"""
PAGE = DOCS / "language.md"
LIMITS = {20: 4.0, 1000: 1.5, 2000: 1.1}  # seconds per epoch on one H200
PLAIN_SECONDS = 4.0  # least time to measure the plain loop
KINDS = {
    "LSTM, over time": ("go_through", "go_back"),
    "softmax": ("differentiate",),
    "optimizer": ("measure", "update"),
    "matrix products": ("gemm", "xmma", "cutlass", "nvjet", "splitK"),
    "embedding": ("embedding", "index", "sort", "Sort"),
    "dropout": ("dropout",),
    "copies and zeros": ("Memcpy", "copy", "Memset", "FillFunctor"),
}


class PlainLSTM(nn.Module):
    """The LSTM of PyTorch's word_language_model example."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(WORDS, 200)
        self.rnn = nn.LSTM(200, 200, 2, dropout=0.2)
        self.decoder = nn.Linear(200, WORDS)

    def forward(self, tokens: Any, hidden: Any) -> Any:
        x, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(x)), hidden


def plain_loop(data_dir: Path | None, batch: int, low: bool) -> dict[str, float]:
    """Measure eager steps of cuDNN's LSTM with all logits at once and clipped momentum SGD, on a part of an epoch."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.backends.cudnn.rnn.fp32_precision = "tf32"  # torch's default, which our runs turn off
    rows = Windows(streams(load_wikitext2(data_dir).train, batch), 35).to("cuda")
    order = torch.arange(len(rows), device="cuda")
    model = PlainLSTM().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1.0, 0.9, fused=True)
    hidden = None

    def step(i: int) -> None:
        nonlocal hidden
        inputs, targets = rows[order[i * batch : (i + 1) * batch]]
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            logits, hidden = model(inputs.t(), hidden)
            hidden = tuple(h.detach() for h in hidden)
            loss = cross_entropy(logits.flatten(0, 1).float(), targets.t().reshape(-1), ignore_index=-1)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()

    for i in range(3):
        step(i)
    torch.cuda.synchronize()
    start, taken = time.perf_counter(), 0
    while time.perf_counter() - start < PLAIN_SECONDS and taken < rows.count:
        step(taken)
        taken += 1
        if taken % 10 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / taken * rows.count
    return {"seconds_per_epoch": seconds, "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}


def profile(data_dir: Path | None, batch: int, steps: int = 20) -> dict[str, float]:
    """Return milliseconds of a captured step by kind of kernel, and from one step to the next."""
    device = torch.device("cuda")
    set_numerics(device)
    config = resolve("wikitext2-lstm", "sngm", lr=0.1, batch=batch, device=device)
    setup = prepare(config, Processes(0, 1, device), Execution(data_dir=data_dir))
    order = setup.data_source.begin(torch.arange(len(setup.training)), 0, 0)

    def some() -> None:
        for i in range(steps):
            setup.stepper(order[i * batch : (i + 1) * batch], epoch=0, step=i)

    some()
    torch.cuda.synchronize()
    start = time.perf_counter()
    some()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) * 1e3 / steps
    return by_kind(KINDS, some, steps) | {"wall": wall}


def cells(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name and function of each measurement, those with limits first."""
    of = functools.partial
    run = of(measure, "wikitext2-lstm", data_dir=args.data_dir, epochs=args.epochs)
    for batch in args.batches:
        yield f"ours/{batch}", of(run, "sngm", batch, "auto")
    if args.only == "ours":
        return
    for batch in args.batches:
        yield f"profile/{batch}", of(profile, args.data_dir, batch)
        yield f"plain/{batch}", of(plain_loop, args.data_dir, batch, False)
        yield f"plain-low/{batch}", of(plain_loop, args.data_dir, batch, True)
    for batch in args.batches:
        for method in args.methods:
            yield f"{method}/{batch}", of(run, method, batch, "auto")
    for batch in [b for b in args.batches if b > 100]:
        yield f"eager/{batch}", of(run, "sngm", batch, "eager")


def verdicts(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for batch, limit in LIMITS.items():
        ours = found.get(f"ours/{batch}", {}).get("seconds_per_epoch")
        yield verdict(f"an epoch, batch {batch}", f"at most {limit} s", ours, lambda v, m=limit: v <= m, "{:.2f} s")


def page(record: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    found = record["cells"]
    lines = heading(record, verdicts(found))
    kinds = list(dict.fromkeys(key.split("/")[0] for key in found if not key.startswith("profile/")))
    names = {"ours": "SNGM, captured", "plain": "plain loop, float32", "plain-low": "plain loop, autocast",
             "eager": "SNGM, eager"}  # fmt: skip
    batches = list(dict.fromkeys(key.split("/")[1] for key in found))
    lines += ["Seconds per epoch, in bfloat16 unless it says otherwise; peak memory in GiB in brackets:", ""]
    lines += ["| batch | " + " | ".join(names.get(kind, kind) for kind in kinds) + " |"]
    lines += ["|---" * (len(kinds) + 1) + "|"]
    for batch in batches:
        lines.append("| " + " | ".join([batch, *(cell(found.get(f"{kind}/{batch}")) for kind in kinds)]) + " |")
    if profiles := [key.split("/")[1] for key in found if key.startswith("profile/")]:
        lines += [
            "",
            'Where the time of a captured step goes, in ms. "Busy": the sum of all kernels; "wall": from step to step:',
            "",
        ]
        lines += [
            "| | " + " | ".join(f"batch {batch}" for batch in profiles) + " |",
            "|---" * (len(profiles) + 1) + "|",
        ]
        for kind in found[f"profile/{profiles[0]}"]:
            times = (f"{found[f'profile/{batch}'][kind]:.2f}" for batch in profiles)
            lines.append(f"| {kind} | " + " | ".join(times) + " |")
    return "\n".join([*lines, "", ""])


def main() -> None:
    parser = epoch_parser(__doc__, EXAMPLES, PAGE)
    parser.add_argument("--batches", type=numbers, default=list(LIMITS), help="streams, by commas")
    parser.add_argument("--methods", type=words, default=["msgd", "lars-unscaled"], help="beside SNGM, by commas")
    parser.add_argument("--only", choices=("ours",), help="a part of it")
    take_epochs(parser, PAGE, cells, verdicts, page)


if __name__ == "__main__":
    main()
