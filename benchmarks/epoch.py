"""Seconds per epoch of the image tasks, through the code of `sngm train`, compared with a good plain PyTorch loop.

ResNet20 on CIFAR-10 at several batch sizes, step modes and methods, with peak memory and the lower bound from memory
bandwidth; then images per second of ResNet-50 and ViT-B/16 on synthetic images of ImageNet's size, and of the task
`tiny-imagenet-resnet50` on synthetic images of its size. No number includes evaluation or the first epoch, which
compiles.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from arena import copy_bandwidth
from cells import DOCS, by_kind, heading, measure, need_gpu, take, verdict, write_docs
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import sngm.triton_support
from sngm.data.augment import crop_flip, normalise
from sngm.data.cifar import load_cifar
from sngm.models.kernels import conv
from sngm.models.resnet import resnet50
from sngm.models.resnet_cifar import resnet20
from sngm.models.vit import vit_b16
from sngm.tasks import Splits, Task, Tensors
from sngm.tasks.cifar import MEAN, STD
from sngm.tasks.tiny_imagenet import TinyImageNetResNet50

EXAMPLES = """examples:
  python benchmarks/epoch.py --data-dir .data --out build/bench            all of it, some ten minutes on one GPU
  python benchmarks/epoch.py --batches 1024 --only mode/1024/captured       one number
  python benchmarks/epoch.py --write-docs build/bench/epoch.json           put results into docs/speed.md
"""
HERE = Path(__file__).resolve()
PAGE = DOCS / "speed.md"
MODES = ("captured", "compiled+captured", "compiled", "eager")
METHODS = ("msgd", "lars-unscaled", "clars", "extrap-sgd")
LIMITS = {8192: 0.20, 1024: 0.26, 128: 0.50}  # seconds per epoch of SNGM on one H200
GIB = 8.0  # memory limit at the largest batch
TIMES_PLAIN = 5.0
IMAGES_A_SECOND = {"resnet50": 2500.0, "vit_b16": 2000.0}
INPUTS_A_SECOND = 10e6  # images of Tiny-ImageNet, gathered, augmented and normalised
CONV_OUTPUTS = 188_416  # elements per image, in ResNet20
# Reads and writes of each element: forward, convolution 2 and BatchNorm with ReLU 3; backward, BatchNorm 3 and 3
# (gradient, input and output; a mask can be recomputed), the gradients of input and weights 2 and 2.
PASSES = 15
RESNET50_OUTPUTS = 907_264  # elements per image of 64 x 64 pixels of the convolutions of ResNet-50, stem 7x7
FLOPS = {"resnet50": 3 * 2 * 4.09e9, "vit_b16": 3 * 2 * 17.56e9}  # per image, forward and backward
KINDS = {  # kinds of kernels, by parts of their names; the first match counts
    "attention": ("flash", "fmha", "attention"),
    "convolutions and matrix products": ("gemm", "conv", "xmma", "cutlass", "nvjet", "cudnn", "wgrad", "dgrad"),
    "normalisation": ("sum_rows", "normalise", "sum_gradients", "differentiate", "norm"),
    "optimizer": ("measure", "update"),
    "copies": ("Memcpy", "copy", "Memset", "FillFunctor"),
    "sums": ("reduce",),
    "one element at a time": ("elementwise", "gelu", "pool", "softmax", "index", "cat"),
}
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # bfloat16 FLOP/s by data sheet


# ---------------------------------------------------------------- synthetic images


class Synthetic(Task):
    """Random images of 224 x 224 pixels, stored on the device."""

    epochs = 4
    batches = (256,)
    precision_on_gpu = "bfloat16"
    metric = "loss"
    higher_is_better = False

    def data(self) -> Splits:
        draw = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (2048, 3, 224, 224), dtype=torch.uint8, generator=draw)
        labels = torch.randint(0, 1000, (2048,), generator=draw)
        few = Tensors(images[:256], labels[:256])
        return Splits(Tensors(images.contiguous(memory_format=torch.channels_last), labels), few)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        images, labels = batch
        return cross_entropy(model(images.float().sub(127.0).div(64.0)).float(), labels)

    def scores(self, model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        images, labels = batch
        return {"loss": cross_entropy(model(images.float() / 64).float(), labels, reduction="none")}


class ResNet50(Synthetic):
    """ResNet-50 for images of ImageNet's size."""

    pass_size = 128

    def model(self) -> nn.Module:
        return resnet50()


class ViTB16(Synthetic):
    """ViT-B/16 with random weights."""

    pass_size = 128

    def model(self) -> nn.Module:
        return vit_b16(1000)


class TinyImages(TinyImageNetResNet50):
    """Tiny-ImageNet's task on random images, of which an epoch has 32,768."""

    images = 32_768

    def __init__(self) -> None:
        super().__init__(stem="7x7")

    def data(self) -> Splits:
        draw = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (self.images, 3, 64, 64), dtype=torch.uint8, generator=draw)
        labels = torch.randint(0, self.classes, (self.images,), generator=draw)
        few = Tensors(images[:512], labels[:512])
        return Splits(Tensors(images.contiguous(memory_format=torch.channels_last), labels), few)


# ---------------------------------------------------------------- the plain loop


class Pictures(Dataset[tuple[Tensor, int]]):
    """CIFAR-10 as in tutorials: each image cropped, flipped and normalised separately."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels.tolist()
        self.mean, self.std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        padded = nn.functional.pad(self.images[i], (4, 4, 4, 4))
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = padded[:, top : top + 32, left : left + 32]
        image = image.flip(2) if torch.rand(()) < 0.5 else image
        return (image.float() / 255 - self.mean) / self.std, self.labels[i]


def batches_of(images: Tensor, labels: Tensor, batch: int, resident: bool) -> Any:
    """Return an iterable over the batches of an epoch: a DataLoader, or images augmented on the GPU if `resident`."""
    if not resident:
        return DataLoader(
            Pictures(images, labels), batch, shuffle=True, num_workers=8, pin_memory=True, drop_last=True,
            persistent_workers=True, prefetch_factor=4, multiprocessing_context="forkserver",
        )  # fmt: skip
    images, labels = images.cuda().to(memory_format=torch.channels_last), labels.cuda()
    mean, std = torch.tensor(MEAN).cuda(), torch.tensor(STD).cuda()

    class Epoch:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            order = torch.randperm(len(images), device="cuda")
            for i in range(0, len(images) // batch * batch, batch):
                rows = order[i : i + batch]
                yield normalise(crop_flip(images, rows, 0, i), mean, std), labels[rows]

    return Epoch()


def plain_loop(data_dir: Path | None, batch: int, epochs: int, resident: bool) -> list[float]:
    """Return the seconds of each epoch with 8 DataLoader workers, pinned memory, bfloat16, channels_last and fused SGD.

    Steps are eager. BatchNorm normalises each pass of at most 4096 samples as a whole, which is less work than groups.
    """
    (images, labels), _ = load_cifar(data_dir)
    loader = batches_of(images, labels, batch, resident)
    model = with_plain_norms(resnet20()).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-4, fused=True)
    torch.backends.cudnn.benchmark = True
    seconds = []
    for _ in range(epochs):
        start = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            for part, target in zip(x.split(4096), y.split(4096), strict=True):
                inputs = part.cuda(non_blocking=True).to(memory_format=torch.channels_last)
                with torch.autocast("cuda", torch.bfloat16):
                    loss = cross_entropy(model(inputs), target.cuda(non_blocking=True))
                (loss * (len(part) / batch)).backward()
            optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


class PlainNorm(nn.BatchNorm2d):
    """torch's BatchNorm with the signature of ours."""

    def forward(self, x: Tensor, shortcut: Tensor | None = None, relu: bool = False) -> Tensor:
        x = super().forward(x)
        x = x if shortcut is None else x + shortcut
        return x.relu() if relu else x


def with_plain_norms(model: nn.Module) -> nn.Module:
    """Return the network with its layers replaced by torch's own."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, PlainNorm(child.num_features))
            elif isinstance(child, nn.Conv2d):
                sizes = child.in_channels, child.out_channels, child.kernel_size, child.stride, child.padding
                setattr(module, name, nn.Conv2d(*sizes, bias=False))
    for block in model.modules():
        if hasattr(block, "extra"):
            block.shortcut = plain_shortcut.__get__(block)
    return model


def plain_shortcut(block: Any, x: Tensor) -> Tensor:
    if block.stride == 1:
        return x
    return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, block.extra, block.extra))


# ---------------------------------------------------------------- measuring


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Use torch operations instead of the Triton kernels."""
    before, sngm.triton_support.DEVICES = sngm.triton_support.DEVICES, ()
    try:
        yield
    finally:
        sngm.triton_support.DEVICES = before


def convolutions(images: int = 4096) -> dict[str, Any]:
    """Return milliseconds of a 3 x 3 convolution and its two gradients with cuDNN and ours, and the bandwidth bound."""
    bandwidth, found = copy_bandwidth(torch.device("cuda")), {}
    torch.backends.cudnn.benchmark = True
    for channels, side in ((16, 32), (32, 16), (64, 8)):
        shape = images, channels, side, side
        x, grad = (torch.randn(shape, device="cuda").bfloat16().to(memory_format=torch.channels_last) for _ in "12")
        weight = torch.randn(channels, channels, 3, 3, device="cuda").to(memory_format=torch.channels_last)
        low, sizes = weight.bfloat16(), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

        def back(*wanted: bool, g: Tensor = grad, x: Tensor = x, w: Tensor = low, sizes: Any = sizes) -> Any:
            return torch.ops.aten.convolution_backward(g, x, w, None, *sizes, [*wanted, False])

        found[channels] = {
            "cuDNN": [
                milliseconds(functools.partial(torch.conv2d, x, low, padding=1)),
                milliseconds(functools.partial(back, True, False)),
                milliseconds(functools.partial(back, False, True)),
            ],
            "ours": [
                milliseconds(functools.partial(conv.forward, x, weight, False)),
                milliseconds(functools.partial(conv.gradient_of_input, grad, x, weight, False)),
                milliseconds(functools.partial(conv.gradient_of_weight, x, grad, weight)),
            ],
            "bound": 4e3 * x.numel() / bandwidth,
        }
    return found


def milliseconds(function: Callable[[], Any], times: int = 20) -> float:
    for _ in range(3):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def cells(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name and function of each measurement, those with limits first."""

    def resnet20(batch: int, method: str = "sngm", step: str = "captured", epochs: int = args.epochs) -> Any:
        return measure("cifar10-resnet20", method, batch, step, args.data_dir, epochs)

    def plain(batch: int, resident: bool) -> float:
        return statistics.median(plain_loop(args.data_dir, batch, 3, resident)[1:])

    def torchs(batch: int) -> Any:
        with without_kernels():
            return resnet20(batch, epochs=3)

    of = functools.partial
    yield "bandwidth", of(copy_bandwidth, torch.device("cuda"))
    for batch in args.batches:
        yield f"mode/{batch}/captured", of(resnet20, batch)
        yield f"plain/{batch}", of(plain, batch, False)
        yield f"resident/{batch}", of(plain, batch, True)
        yield f"torchs/{batch}", of(torchs, batch)
    yield "convolutions", convolutions
    for method in args.methods:
        for batch in args.batches:
            yield f"method/{batch}/{method}", of(resnet20, batch, method, "auto", 3)
    for mode in args.modes:
        for name in ("resnet50", "vit_b16"):
            yield f"pictures/{name}/{mode}", of(pictures, name, mode)
    yield "tiny/input", tiny_input
    for batch in (256, 4096):
        yield f"tiny/{batch}", of(tiny, batch)
    for name in ("resnet50", "vit_b16"):
        yield f"profile/{name}", of(profile, name)
    for mode in args.modes:
        for batch in args.batches:
            yield f"mode/{batch}/{mode}", of(resnet20, batch, step=mode)


def pictures(name: str, mode: str) -> dict[str, Any]:
    """Measure the images per second of one of the large models."""
    task = {"resnet50": "ResNet50", "vit_b16": "ViTB16"}[name]
    result: dict[str, Any] = measure(f"{HERE}:{task}", "sngm", 256, mode, None, 4, workers=1, micro=128)
    if "failed" not in result:
        result["images_a_second"] = 2048 / result["seconds_per_epoch"]
        peak = next((v for k, v in PEAK.items() if k in torch.cuda.get_device_name()), None)
        result["utilisation"] = peak and result["images_a_second"] * FLOPS[name] / peak
    return result


def tiny(batch: int) -> dict[str, Any]:
    """Measure the images per second of the task `tiny-imagenet-resnet50`, in the default step mode."""
    result: dict[str, Any] = measure(f"{HERE}:TinyImages", "sngm", batch, "auto", None, 3)
    if "failed" not in result:
        result["images_a_second"] = TinyImages.images // batch * batch / result["seconds_per_epoch"]
    return result


def tiny_input() -> float:
    """Return the images per second that are gathered, augmented and normalised on the GPU, in batches of 4096."""
    task, epoch = TinyImages(), torch.zeros((), dtype=torch.int64, device="cuda")
    samples = task.data().train.to("cuda")
    indices = torch.randperm(TinyImages.images, device="cuda")[:4096]
    with torch.autocast("cuda", torch.bfloat16):
        return 4096e3 / milliseconds(functools.partial(task.batch, samples, indices, seed=0, epoch=epoch))


def profile(name: str) -> dict[str, float]:
    """Return milliseconds per step by kind of kernel, in all kernels ("busy"), and without the profiler ("wall")."""
    wall = pictures(name, "eager")["seconds_per_epoch"]
    # the profiled run has 4 epochs of 2048 // 256 steps
    return by_kind(KINDS, lambda: pictures(name, "eager"), 4 * 2048 // 256) | {"wall": 1e3 * wall / (2048 // 256)}


# ---------------------------------------------------------------- the page


def verdicts(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield rows of the table of limits for one H200: what, the limit, the measured value, and whether it holds."""

    for batch, limit in LIMITS.items():
        ours = found.get(f"mode/{batch}/captured", {}).get("seconds_per_epoch")
        plain = found.get(f"plain/{batch}")
        yield verdict(
            f"ResNet20, SNGM, batch {batch}", f"at most {limit} s", ours, lambda v, m=limit: v <= m, "{:.3f} s"
        )
        times = plain / ours if plain and ours else None
        limit_text = f"at least {TIMES_PLAIN:g} x"
        yield verdict(f"the plain loop to it, batch {batch}", limit_text, times, lambda v: v >= TIMES_PLAIN, "{:.1f} x")
    memory = found.get("mode/8192/captured", {}).get("peak_gib")
    yield verdict("peak memory, batch 8192", f"below {GIB:g} GiB", memory, lambda v: v < GIB, "{:.2f} GiB")
    for name, least in IMAGES_A_SECOND.items():
        rates = [
            v["images_a_second"] for k, v in found.items() if k.startswith(f"pictures/{name}/") and "failed" not in v
        ]
        best = max(rates, default=None)
        yield verdict(f"{name}, images a second", f"at least {least:g}", best, lambda v, m=least: v >= m, "{:.0f}")
    inputs, least = found.get("tiny/input"), INPUTS_A_SECOND
    yield verdict("inputs of 64 x 64 pixels a second", f"at least {least:g}", inputs, lambda v: v >= least, "{:.3g}")


def page(record: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    found = record["cells"]
    lines = heading(record, verdicts(found))
    split = [key.split("/") for key in found]
    batches = list(dict.fromkeys(parts[1] for parts in split if parts[0] in ("mode", "method")))
    if any(parts[0] == "mode" for parts in split):
        modes = list(dict.fromkeys(parts[2] for parts in split if parts[0] == "mode"))
        lines += ["Seconds per epoch of ResNet20 with SNGM, by step mode; peak memory in GiB in brackets:", ""]
        heads = [*modes, "captured, torch's operations", "plain loop", "plain loop, images on the GPU"]
        keys = [*(f"mode/{{}}/{mode}" for mode in modes), "torchs/{}", "plain/{}", "resident/{}"]
        lines += table(found, batches, heads, keys)
    if "bandwidth" in found:
        bound = 50_000 * CONV_OUTPUTS * 2 * PASSES / found["bandwidth"]
        lines += [f"Bound: {PASSES} passes over {CONV_OUTPUTS:,} outputs of bfloat16 a picture at the measured "
                  f"{found['bandwidth'] / 1e12:.2f} TB/s are {bound:.3f} s.", ""]  # fmt: skip
    if methods := list(dict.fromkeys(parts[2] for parts in split if parts[0] == "method")):
        taken = dict.fromkeys(v.get("mode", "failed") for k, v in found.items() if k.startswith("method/"))
        lines += [f"Seconds per epoch of other methods, in the mode that `--step auto` takes ({', '.join(taken)}):", ""]
        lines += table(found, batches, methods, [f"method/{{}}/{method}" for method in methods])
    if times := found.get("convolutions"):
        lines += [
            "A 3 x 3 convolution of 4096 images, forward, gradient of the input, gradient of the weights, in ms:",
            "",
        ]
        lines += ["| channels | cuDNN | ours | bytes alone, each |", "|---|---|---|---|"]
        for channels, of in times.items():
            both = [", ".join(f"{t:.3f}" for t in of[who]) for who in ("cuDNN", "ours")]
            lines.append(f"| {channels} | {both[0]} | {both[1]} | {of['bound']:.3f} |")
        lines.append("")
    if large := [parts for parts in split if parts[0] == "pictures"]:
        lines += ["Pictures of 224 x 224, made up, batch 256, bfloat16, SNGM:", ""]
        lines += ["| model | mode | images/s | of the peak | GiB | first epoch, s |", "|---|---|---|---|---|---|"]
        for _, name, mode in large:
            m = found[f"pictures/{name}/{mode}"]
            if "failed" in m:
                lines.append(f"| {name} | {mode} | failed: {m['failed']} | | | |")
                continue
            used = f"{m['utilisation']:.0%}" if m["utilisation"] else ""
            lines.append(f"| {name} | {mode} | {m['images_a_second']:.0f} | {used} | {m['peak_gib']} "
                         f"| {m['first_epoch_seconds']} |")  # fmt: skip
        lines.append("")
    if runs := [parts[1] for parts in split if parts[0] == "tiny" and parts[1] != "input"]:
        lines += ["ResNet-50 on synthetic images of 64 x 64 pixels (`tiny-imagenet-resnet50`, stem 7x7), SNGM:", ""]
        lines += ["| batch | mode | images/s | of the bound | GiB |", "|---|---|---|---|---|"]
        bound = found["bandwidth"] / (RESNET50_OUTPUTS * 2 * PASSES) if "bandwidth" in found else None
        for batch in runs:
            m = found[f"tiny/{batch}"]
            if "failed" in m:
                lines.append(f"| {batch} | failed: {m['failed']} | | | |")
                continue
            share = f"{m['images_a_second'] / bound:.0%}" if bound else ""
            lines.append(f"| {batch} | {m['mode']} | {m['images_a_second']:.0f} | {share} | {m['peak_gib']} |")
        if bound:
            lines += ["", f"Bound: {PASSES} passes over {RESNET50_OUTPUTS:,} outputs of bfloat16 an image, "
                      f"{bound:,.0f} images/s."]  # fmt: skip
        lines.append("")
    if profiles := [parts[1] for parts in split if parts[0] == "profile"]:
        lines += [
            'Where the time of an eager step of 256 pictures goes, in ms. "Busy": sum of all kernels, also those of',
            'tests, of 256 pictures after every 2,048. "Wall": the time from step to step, without tests and profiler:',
            "",
            "| | " + " | ".join(profiles) + " |",
        ]
        lines += ["|---" * (len(profiles) + 1) + "|"]
        rows = sorted(found[f"profile/{profiles[0]}"])
        for kind in [*(row for row in rows if row not in ("busy", "wall")), "busy", "wall"]:
            times = [found[f"profile/{n}"][kind] for n in profiles]
            words = ["not seen" if kind == "optimizer" and not t else f"{t:.1f}" for t in times]  # it does run
            lines.append(f"| {kind} | " + " | ".join(words) + " |")
        lines.append("")
    return "\n".join(lines)


def table(found: dict[str, Any], batches: list[str], heads: list[str], keys: list[str]) -> list[str]:
    """Return the lines of a Markdown table with a row for each batch size and a column for each key."""
    lines = ["| batch | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    lines += ["| " + " | ".join([b, *(cell(found.get(key.format(b))) for key in keys)]) + " |" for b in batches]
    return [*lines, ""]


def cell(found: Any) -> str:
    if found is None or isinstance(found, float):
        return "" if found is None else f"{found:.2f}"
    if "failed" in found:
        return "failed"
    return f"{found['seconds_per_epoch']:.3f} ({found['peak_gib']})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = {"type": lambda text: [int(word) for word in text.split(",")]}
    words = {"type": lambda text: [word for word in text.split(",") if word]}
    parser.add_argument("--data-dir", type=Path, help="folder that holds cifar-10-batches-bin/ or the like")
    parser.add_argument("--batches", **numbers, default=[8192, 1024, 128], help="global batches, by commas")
    parser.add_argument("--modes", **words, default=list(MODES), help="step modes, by commas")
    parser.add_argument("--methods", **words, default=list(METHODS), help="methods beside SNGM, by commas")
    parser.add_argument("--epochs", type=int, default=6, help="of each run; the first is not counted")
    parser.add_argument("--only", default="", help="measure cells whose names match this pattern, such as mode|method")
    parser.add_argument("--out", type=Path, help="folder for epoch.json; what is in it is not measured again")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a limit is missed")
    parser.add_argument("--write-docs", type=Path, metavar="JSON", help="write results into docs/speed.md, run nothing")
    args = parser.parse_args()
    if args.write_docs:
        write_docs(parser, PAGE, args.write_docs, page)
        return
    need_gpu(parser)
    unknown = set(args.modes) - set(MODES)
    if unknown or args.epochs < 2:
        parser.error(f"modes are {', '.join(MODES)}, got {', '.join(unknown)}" if unknown else "--epochs: at least 2")
    try:
        chosen = [(name, work) for name, work in cells(args) if re.search(args.only, name)]
    except re.error as error:
        parser.error(f"--only {args.only}: not a regular expression ({error})")
    if not chosen:
        parser.error(f"--only {args.only} matches no cell: {', '.join(name for name, _ in cells(args))}")
    record = take(chosen, args.out and args.out / "epoch.json")
    print(page(record))
    if args.check and any(row[-1] == "NO" for row in verdicts(record["cells"])):
        sys.exit(1)


if __name__ == "__main__":
    main()
