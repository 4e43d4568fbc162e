"""Tokens per second of the GPT on WikiText-2, through the code of `sngm train`, compared with a plain compiled loop.

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
from cells import DOCS, cell, epoch_parser, heading, measure, numbers, take_epochs, verdict, words
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from sngm.data.wikitext import load_wikitext2_tokens

EXAMPLES = """examples:
  python benchmarks/gpt_epoch.py --data-dir .data --out build/bench        all of it, two minutes on one GPU
  python benchmarks/gpt_epoch.py --write-docs build/bench/gpt_epoch.json   put results into docs/gpt.md
"""
PAGE = DOCS / "gpt.md"
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 8192, 256, 320, 6, 5  # of the task
COMPILED = "compiled+captured"
LIMIT = 1.3  # most times longer than the plain loop
PLAIN_SECONDS = 4.0  # least time to measure the plain loop


class PlainGPT(nn.Module):
    """A GPT-2 as nanoGPT writes it: learned positions, one matrix for query, key and value, all logits at once."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        parts = self.attention(self.norm1(x)).split(WIDTH, 2)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        y = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x)), approximate="tanh"))


def plain_loop(data_dir: Path | None, batch: int) -> dict[str, float]:
    """Measure compiled steps in bfloat16 autocast with clipping and fused AdamW, as nanoGPT trains.

    A batch of more than 128 windows is split, as in nanoGPT's gradient accumulation.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.set_float32_matmul_precision("high")
    inputs, targets = (t.cuda() for t in load_wikitext2_tokens(data_dir, VOCABULARY).train.windows(CONTEXT))
    whole = len(inputs) - 1  # the last window is not full
    plain = PlainGPT().cuda()
    model: Any = torch.compile(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-3, fused=True)
    parts = max(1, batch // 128)

    def step() -> None:
        rows = torch.randint(whole, (batch,), device="cuda")
        for some in rows.chunk(parts):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(inputs[some], targets[some]) / parts
            loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    start, taken = time.perf_counter(), 0
    while time.perf_counter() - start < PLAIN_SECONDS:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        taken += 10
    seconds = (time.perf_counter() - start) / taken * (whole // batch)
    return {"seconds_per_epoch": seconds, "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}


def cells(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name and function of each measurement."""
    of = functools.partial
    run = of(measure, "wikitext2-gpt", data_dir=args.data_dir, epochs=args.epochs)
    for batch in args.batches:
        yield f"plain/{batch}", of(plain_loop, args.data_dir, batch)
        yield f"adamw, {COMPILED}/{batch}", of(run, "adamw", batch, COMPILED, lr=1e-3)
        for method in args.methods:
            yield f"{method}, captured/{batch}", of(run, method, batch, "auto", lr=1e-3)


def verdicts(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for batch in [key.split("/")[1] for key in found if key.startswith("plain/")]:
        names = f"adamw, {COMPILED}/{batch}", f"plain/{batch}"
        ours, plain = (found.get(name, {}).get("seconds_per_epoch") for name in names)
        ratio = ours / plain if ours and plain else None
        what = f"an epoch with AdamW, {COMPILED}, batch {batch}, compared with the plain loop"
        yield verdict(what, f"at most {LIMIT}", ratio, lambda v: v <= LIMIT, "{:.2f}")


def page(record: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    found = record["cells"]
    lines = heading(record, verdicts(found))
    kinds = list(dict.fromkeys(key.split("/")[0] for key in found))
    batches = list(dict.fromkeys(key.split("/")[1] for key in found))
    lines += ["Seconds per epoch, in bfloat16; peak memory in GiB in brackets:", ""]
    lines += ["| batch | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for batch in batches:
        lines.append("| " + " | ".join([batch, *(cell(found.get(f"{kind}/{batch}")) for kind in kinds)]) + " |")
    return "\n".join([*lines, "", ""])


def main() -> None:
    parser = epoch_parser(__doc__, EXAMPLES, PAGE)
    parser.add_argument("--batches", type=numbers, default=[4, 32, 512], help="windows, by commas")
    parser.add_argument("--methods", type=words, default=["adamw", "sngm", "spectral-sngm"], help="by commas")
    take_epochs(parser, PAGE, cells, verdicts, page)


if __name__ == "__main__":
    main()
