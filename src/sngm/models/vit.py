"""Vision transformers from the optional package `transformers`: ``pip install 'sngm[vit]'``."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataMissing, UsageError

PREPROCESSOR = "preprocessor_config.json"
HEAD = "classifier"


class ViT(nn.Module):
    """A vision transformer that maps pixels in [0, 1], of shape (n, 3, height, width), to logits.

    The pixels are normalised by the mean and std used in pretraining, and position embeddings are interpolated for
    images of another size. The names of the weights depend on the installed version of transformers: load a checkpoint
    with the version that wrote it.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: Any, mean: tuple[float, ...] = (0.5,), std: tuple[float, ...] = (0.5,)) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    @property
    def draws(self) -> bool:
        """Whether training uses dropout, from the config: some versions of transformers have no dropout modules."""
        config = self.network.config
        return any(getattr(config, f"{part}_dropout_prob", 0.0) > 0 for part in ("hidden", "attention_probs"))

    @property
    def patch(self) -> int:
        """Width and height in pixels of a patch, which becomes one token."""
        size = self.network.config.patch_size
        return int(size if isinstance(size, int) else size[0])

    @property
    def size(self) -> int:
        """Width and height in pixels of the images that the position embeddings were made for."""
        size = self.network.config.image_size
        return int(size if isinstance(size, int) else size[0])

    def forward(self, pixels: Tensor) -> Tensor:
        other = tuple(pixels.shape[-2:]) != (self.size, self.size)
        output = self.network(pixel_values=(pixels - self.mean) / self.std, interpolate_pos_encoding=other)
        return output.logits  # type: ignore[no-any-return]


def vit_b16(classes: int) -> ViT:
    """Return a ViT-B/16 with random weights, for benchmarks (86,567,656 parameters with 1,000 classes)."""
    return new_vit(classes)


def new_vit(classes: int, **config: int) -> ViT:
    """Return a ViT with random weights, a ViT-B/16 unless `config` has other arguments of transformers' ViTConfig."""
    library = _transformers()
    return ViT(_with_new_head(library.ViTForImageClassification(library.ViTConfig(num_labels=classes, **config))))


def load_vit(source: str, classes: int) -> ViT:
    """Return a pretrained ViT with a new head, whose weights are from N(0, 0.02^2), truncated at +-2, and biases are 0.

    Args:
        source: a folder that ``save_pretrained`` wrote or ``hf download`` fetched, or a name on the Hugging Face hub.
            A hub model that is in the local cache is loaded without network access.
        classes: number of outputs.

    Raises:
        DataMissing: there is no such model, or some of its weights are missing.
    """
    library = _transformers()
    folder = Path(source).expanduser()
    in_folder = folder.is_dir()
    if in_folder and not (folder / "config.json").is_file():
        raise DataMissing(f"{folder} holds no model (no config.json); name a folder that save_pretrained() wrote")
    if not in_folder and (source.startswith((".", "/", "~")) or source.count("/") != 1):
        raise DataMissing(
            f"no folder {folder} that could hold a model; models of the Hugging Face hub are named owner/name, and "
            "docs/images.md says how to pretrain a small ViT"
        )
    try:
        try:
            with _quiet(library):
                network, local = _read(library, str(folder) if in_folder else source, classes, local=True), True
        except OSError:
            if in_folder:
                raise
            # the model is not in the hub's cache: download it, with the library's own progress bars
            network, local = _read(library, source, classes, local=False), False
    except Exception as error:  # any error of json, safetensors, pickle, torch or the network
        why = str(error).strip().split("\n")[0] or type(error).__name__
        if in_folder:
            raise DataMissing(f"{folder} cannot be read as a ViT: {why}; fetch it again") from error
        raise DataMissing(
            f"no folder {source}, and no such ViT from the Hugging Face hub: {why}; where there is a "
            f"network run 'hf download {source} --local-dir FOLDER', then give `settings` model=FOLDER"
        ) from error
    file = folder / PREPROCESSOR if in_folder else _preprocessor_of(source, local)
    return ViT(_with_new_head(network), *_mean_and_std(file))


def _read(library: Any, source: str, classes: int, *, local: bool) -> Any:
    network, found = library.ViTForImageClassification.from_pretrained(
        source, num_labels=classes, ignore_mismatched_sizes=True, output_loading_info=True, local_files_only=local
    )
    # transformers initialises missing weights at random and only prints a message, so check for missing weights here
    absent = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
    absent = sorted(key for key in absent if not key.startswith(HEAD))
    if absent:
        more = f" and {len(absent) - 1} others" if absent[1:] else ""
        raise ValueError(f"its files lack the weights {absent[0]}{more}")
    if network.config.num_channels != 3:
        raise ValueError(f"its images have {network.config.num_channels} channels, not 3")
    return network


def _with_new_head(network: Any) -> Any:
    network = network.float().train()
    head = getattr(network, HEAD)
    nn.init.trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return network


def _mean_and_std(file: Path | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std of pixels from the model's file. Without a file, both are 0.5, as for Google's models."""
    if file is None or not file.is_file():
        return (0.5,) * 3, (0.5,) * 3
    try:
        settings = json.loads(file.read_text())
        mean, std = (tuple(map(float, settings.get(key, (0.5,) * 3))) for key in ("image_mean", "image_std"))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataMissing(f"{file} is broken: {error}; fetch it again") from error
    if not (len(mean) == len(std) == 3 and all(map(math.isfinite, mean)) and all(0 < s < math.inf for s in std)):
        raise DataMissing(f"{file}: image_mean and image_std must be 3 numbers each, got {mean} and {std}")
    return mean, std


def _preprocessor_of(name: str, local: bool) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(name, PREPROCESSOR, local_files_only=local))
    except (EntryNotFoundError, OSError):  # not every model has this file
        return None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"transformers cannot be imported ({error}); pip install 'sngm[vit]'") from error
    return transformers


@contextlib.contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Silence transformers' progress bars and its message about the head, which is replaced anyway."""
    logging = library.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
