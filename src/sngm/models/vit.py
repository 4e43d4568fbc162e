"""Vision transformers of the `transformers` package, which is optional: ``pip install 'sngm[vit]'``."""

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
    """A vision transformer from pixels, numbers in 0 to 1 of shape (n, 3, height, width), to logits.

    It scales the pixels itself, by the mean and spread it was trained with, and interpolates its position embeddings
    where pictures are of another size than those. The names of its weights are those of the installed version of
    transformers: a checkpoint is loaded with the version that it was written with.
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
        """Whether it draws random numbers in training; some versions keep a rate of dropout where no layer shows it."""
        config = self.network.config
        return any(getattr(config, f"{part}_dropout_prob", 0.0) > 0 for part in ("hidden", "attention_probs"))

    @property
    def patch(self) -> int:
        """Pixels a side of what becomes one token."""
        return _side(self.network.config.patch_size)

    @property
    def size(self) -> int:
        """Pixels a side of the pictures that its position embeddings are for."""
        return _side(self.network.config.image_size)

    def forward(self, pixels: Tensor) -> Tensor:
        other = tuple(pixels.shape[-2:]) != (self.size, self.size)
        output = self.network(pixel_values=(pixels - self.mean) / self.std, interpolate_pos_encoding=other)
        return output.logits  # type: ignore[no-any-return]


def vit_b16(classes: int, image_size: int = 224) -> ViT:
    """ViT-B/16 without trained weights, for benchmarks (86,567,656 parameters with 1,000 classes)."""
    library = _transformers()
    config = library.ViTConfig(num_labels=classes, image_size=image_size)
    return ViT(_with_new_head(library.ViTForImageClassification(config)))


def load_vit(source: str, classes: int) -> ViT:
    """A trained ViT with a new head for so many classes: its weights from N(0, 0.02) cut off at 2, its biases 0.

    Args:
        source: a folder that ``save_pretrained`` wrote or ``hf download`` fetched, or a name on the Hugging Face hub.
            Of the hub, what is in its cache on this machine is taken without asking the network.
        classes: outputs.

    Raises:
        DataMissing: there is no such model, or not all of its weights are there.
    """
    library = _transformers()
    folder = Path(source).expanduser()
    if folder.is_dir():
        network = _from_folder(library, folder, classes)
        settings = folder / PREPROCESSOR
        return ViT(_with_new_head(network), *_mean_and_std(settings if settings.is_file() else None))
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise DataMissing(f"no folder {folder} that could hold a model")
    return _from_hub(library, source, classes)


def _from_folder(library: Any, folder: Path, classes: int) -> Any:
    if not (folder / "config.json").is_file():
        raise DataMissing(f"{folder} holds no model (no config.json); name a folder that save_pretrained() wrote")
    try:
        with _quiet(library):
            return _read(library, str(folder), classes, local=True)
    except Exception as error:  # of json, safetensors, pickle and torch
        raise DataMissing(f"{folder} cannot be read as a ViT: {_first_line(error)}; fetch it again") from error


def _from_hub(library: Any, name: str, classes: int) -> ViT:
    try:
        try:
            with _quiet(library):
                network, local = _read(library, name, classes, local=True), True
        except OSError:  # not in the cache: downloaded, with the library's own progress bars
            network, local = _read(library, name, classes, local=False), False
    except Exception as error:
        raise DataMissing(
            f"no folder {name}, and no such ViT from the Hugging Face hub: {_first_line(error)}; where there is a "
            f"network run 'hf download {name} --local-dir FOLDER', then say --set model=FOLDER"
        ) from error
    return ViT(_with_new_head(network), *_mean_and_std(_preprocessor_of(name, local)))


def _read(library: Any, source: str, classes: int, *, local: bool) -> Any:
    network, found = library.ViTForImageClassification.from_pretrained(
        source, num_labels=classes, ignore_mismatched_sizes=True, output_loading_info=True, local_files_only=local
    )
    # What is lacking is drawn at random with no more than a message: the run would start from scratch.
    lacking = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
    lacking = sorted(key for key in lacking if not key.startswith(HEAD))
    if lacking:
        more = f" and {len(lacking) - 1} others" if lacking[1:] else ""
        raise ValueError(f"its files lack the weights {lacking[0]}{more}")
    if network.config.num_channels != 3:
        raise ValueError(f"it is for pictures of {network.config.num_channels} channels, not 3")
    return network


def _with_new_head(network: Any) -> Any:
    network = network.float().train()
    head = getattr(network, HEAD)
    nn.init.trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return network


def _mean_and_std(file: Path | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What pixels are scaled by: as the model's file says, else 0.5 and 0.5, as Google's models were trained."""
    if file is None:
        return (0.5,) * 3, (0.5,) * 3
    try:
        settings = json.loads(file.read_text())
        mean, std = (tuple(map(float, settings.get(key, (0.5,) * 3))) for key in ("image_mean", "image_std"))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataMissing(f"{file} is broken: {_first_line(error)}; fetch it again") from error
    if not (len(mean) == len(std) == 3 and all(map(math.isfinite, mean)) and all(0 < s < math.inf for s in std)):
        raise DataMissing(f"{file}: image_mean and image_std must be 3 numbers each, got {mean} and {std}")
    return mean, std


def _preprocessor_of(name: str, local: bool) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(name, PREPROCESSOR, local_files_only=local))
    except (EntryNotFoundError, OSError):  # not every model has one
        return None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"transformers is not there ({error}); pip install 'sngm[vit]'") from error
    return transformers


@contextlib.contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Within, transformers shows no progress bars and says nothing of a head that is not loaded: it is made new."""
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


def _side(size: Any) -> int:
    return int(size if isinstance(size, int) else size[0])


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
