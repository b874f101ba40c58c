"""Datasets: which samples there are, and a hash that proves it.

Knows nothing about models, tasks or precision. What can be told of files and names without torch was
checked in open_sets. A builder returns `Data`; everything random in
it comes from seeds of its own, so that the run's seed never changes the data.

Shape legend: N samples, B of a batch, C channels, H = W = image_size, T tokens (context).
"""

import gzip
import hashlib
import importlib.util
import math
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from precision_lab import torchvision_files
from precision_lab.errors import InputError
from precision_lab.hardware import total_memory
from precision_lab.hashing import content_hash
from precision_lab.image_files import ImageFiles, fit, list_images
from precision_lab.seeds import PrivateRandomness
from precision_lab.sizes import GIB

# Not the library itself, or different on every machine with the same Python.
STDLIB_SKIPPED = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("config-*", "_sysconfigdata*"),
)
MARKOV_SUCCESSORS = 4  # the best reachable loss of synthetic_tokens is ln 4 = 1.386 nats
HASHED_SAMPLES = 256  # of each split of a dataset that is not ours


@dataclass(frozen=True)
class Data:
    """A training and a validation set, what a model must know of them, and their identity."""

    train: Dataset  # map-style
    val: Dataset
    facts: dict[str, int]  # num_classes, channels, image_size | vocab_size, context
    hash: str  # 16 hex digits of sha256 over the data used
    unreadable: Callable[[], list[str]] = list  # files left out or replaced up to now


class TensorSamples(Dataset):
    """Samples in memory: sample i is the i-th entry of every tensor, bare if there is only one."""

    def __init__(self, *tensors: Tensor) -> None:
        if len({len(tensor) for tensor in tensors}) != 1:
            raise ValueError(f"tensors of unequal length: {[len(tensor) for tensor in tensors]}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int | Tensor) -> Any:
        """One sample for an int, one batch (a copy) for an int64 tensor [B]."""
        if isinstance(index, Tensor):  # index_select takes half the time of tensor[index] here
            entries = tuple(tensor.index_select(0, index) for tensor in self.tensors)
        else:
            entries = tuple(tensor[index] for tensor in self.tensors)
        return entries if len(entries) > 1 else entries[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The list of samples that torch's DataLoader collates."""
        batch = self[torch.tensor(indices)]
        return list(zip(*batch, strict=True)) if isinstance(batch, tuple) else list(batch)


# ---- images -------------------------------------------------------------------------------------


def digits(channels: int | None, image_size: int | None, train_fraction: float) -> Data:
    """The 1,797 handwritten 8x8 digits that scikit-learn ships: real data without a download."""
    _check_fraction("train_fraction", train_fraction)
    # Found, not imported: importing scikit-learn's datasets takes 1.8 s, reading its file 0.02 s.
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise InputError(
            "dataset=digits reads a file of scikit-learn, which is not installed: "
            "pip install scikit-learn, or choose dataset=synthetic_images."
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    rows = torch.tensor(list(map(int, text.replace("\n", ",").rstrip(",").split(","))))
    rows = rows.reshape(-1, 65)  # [1797, 64 pixels + label]
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    pixels, labels = rows[:, :64].reshape(-1, 1, 8, 8).to(torch.uint8), rows[:, 64]
    cut = round(train_fraction * len(rows))
    return _image_data((pixels[:cut], labels[:cut]), (pixels[cut:], labels[cut:]), 10, channels, image_size)


def torchvision_dataset(name: str, root: str, download: bool, channels: int | None, image_size: int | None) -> Data:
    """MNIST, FashionMNIST, CIFAR10 or CIFAR100, whole in memory, without augmentation."""
    train, val, num_classes = torchvision_files.read(name, str(root), download)
    return _image_data(train, val, num_classes, channels, image_size)


def image_folder(
    root: str, channels: int | None, image_size: int | None, val_fraction: float, on_unreadable: str = "fail"
) -> Data:
    """Files root/<class>/<image>, or root/train/... and root/val/..., decoded when they are used.

    The central square of each image is resized. Without train and val folders a file's relative
    name decides its split, so that adding files moves no other. The hash covers names and sizes of the files used.
    `on_unreadable` is fail (InputError) or skip: an empty file is left out, one that cannot be decoded is replaced.
    """
    if image_size is None:
        raise InputError("image_folder needs a size to resize to: set e.g. dataset.image_size=64.")
    channels, root, skip = channels or 3, Path(str(root)), on_unreadable == "skip"
    parts = [root / name for name in ("train", "val")]
    listings = [list_images(part, skip) for part in (parts if all(part.is_dir() for part in parts) else [root])]
    images = [image for listing in listings for image in listing.images]
    if len(listings) == 2:
        if listings[0].classes != listings[1].classes:
            raise InputError(f"{parts[0]} and {parts[1]} must hold the same class folders.")
        splits = [listing.images for listing in listings]
    else:
        _check_fraction("val_fraction", val_fraction)
        splits = [[], []]
        for image in images:
            splits[_is_held_out(_relative(image.path, root), val_fraction)].append(image)
        if not all(splits):
            raise InputError(
                f"{root} has too few images ({len(images)}) for dataset.val_fraction={val_fraction}:"
                " one split is empty; make train and val folders, or change the fraction."
            )
    train, val = (ImageFiles(split, channels, image_size, skip) for split in splits)
    facts = {"num_classes": len(listings[0].classes), "channels": channels, "image_size": image_size}
    identity = [(_relative(image.path, root), image.size) for image in images]
    left_out = [path for listing in listings for path in listing.unreadable]
    return Data(
        train,
        val,
        facts,
        content_hash(len(train), len(val), identity, channels, image_size),
        lambda: [*left_out, *train.unreadable(), *val.unreadable()],
    )


def synthetic_images(
    samples: int,
    channels: int | None,
    image_size: int | None,
    num_classes: int,
    noise: float,
    seed: int,
) -> Data:
    """A smooth random prototype for each class plus white noise; the last fifth is validation.

    `noise` is its standard deviation relative to the coarse prototypes'; their sum is scaled to
    about unit variance.
    """
    if samples < 5:
        raise InputError(f"dataset.samples={samples} is too few: at least 5.")
    channels, image_size = channels or 3, image_size or 32
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(num_classes, channels, 4, 4, generator=generator)
    prototypes = F.interpolate(coarse, size=(image_size, image_size), mode="bilinear")
    labels = torch.randint(num_classes, (samples,), generator=generator)
    images = torch.randn(samples, channels, image_size, image_size, generator=generator)
    images.mul_(noise).add_(prototypes[labels]).div_(math.hypot(1, noise))  # [N, C, H, W]
    cut = samples - samples // 5
    facts = {"num_classes": num_classes, "channels": channels, "image_size": image_size}
    train = TensorSamples(images[:cut], labels[:cut])
    val = TensorSamples(images[cut:], labels[cut:])
    return Data(train, val, facts, content_hash(*train.tensors, *val.tensors))


def _image_data(
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    num_classes: int,
    channels: int | None,
    image_size: int | None,
) -> Data:
    """Standardised images in memory from (uint8 pixels [N, C, H, W], int64 labels [N])."""
    channels, image_size = channels or train[0].shape[1], image_size or train[0].shape[2]
    needed = 4 * channels * image_size**2 * (len(train[0]) + len(val[0]))  # bytes in float32
    present = total_memory()
    if 0 < present < 2 * needed:
        raise InputError(
            f"At dataset.image_size={image_size} the images need {needed / GIB:.0f} GiB, more "
            f"than half of this machine's memory ({present / GIB:.0f} GiB): choose a smaller one."
        )
    images = [fit(pixels, channels, image_size) for pixels, _ in (train, val)]
    std, mean = torch.std_mean(images[0], dim=(0, 2, 3), keepdim=True)  # [1, C, 1, 1]
    for split in images:
        split.sub_(mean).div_(std)
    facts = {"num_classes": num_classes, "channels": channels, "image_size": image_size}
    # Over the pixels as they were read: resized ones may differ in the last bit between CPUs.
    identity = content_hash(*train, *val, channels, image_size)
    return Data(TensorSamples(images[0], train[1]), TensorSamples(images[1], val[1]), facts, identity)


def _relative(path: str | Path, root: str | Path) -> str:
    return Path(path).relative_to(root).as_posix()


# ---- tokens -------------------------------------------------------------------------------------


def stdlib_text(context: int | None, max_bytes: int, val_fraction: float) -> Data:
    """Bytes of the running Python's own standard library: real text on every machine.

    Its *.py files, without tests, folder by folder in the order of their names. A file is in one
    split only, which its relative name decides; each split takes files until it has its share of
    `max_bytes`. The data hash differs between Python versions.
    """
    _check_fraction("val_fraction", val_fraction)
    sizes = {"val": round(val_fraction * max_bytes)}
    sizes["train"] = max_bytes - sizes["val"]
    texts = {"train": bytearray(), "val": bytearray()}
    root = sysconfig.get_path("stdlib")
    for path in _sources(root):
        split = "val" if _is_held_out(_relative(path, root), val_fraction) else "train"
        if room := sizes[split] - len(texts[split]):
            texts[split] += path.read_bytes()[:room]
        elif all(len(texts[name]) == sizes[name] for name in texts):
            break
    return _text_data(texts["train"], texts["val"], context, f"dataset.max_bytes={max_bytes}")


def _sources(root: str) -> Iterator[Path]:
    """The *.py files under `root`; skipped folders, which may be huge, are never listed."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(filter(_is_kept, subfolders))  # os.walk descends in this order
        yield from (Path(folder, n) for n in sorted(names) if n.endswith(".py") and _is_kept(n))


def _is_kept(name: str) -> bool:
    return not any(fnmatchcase(name, pattern) for pattern in STDLIB_SKIPPED)


def text_file(path: str, context: int | None, val_fraction: float) -> Data:
    """Bytes of one file of yours; its last part is the validation set."""
    _check_fraction("val_fraction", val_fraction)
    try:
        content = Path(str(path)).read_bytes()
    except OSError as error:
        raise InputError(f"dataset.path={path} cannot be read ({error.strerror}).") from error
    if not content:
        raise InputError(f"dataset.path={path} is empty; name a text file.")
    cut = round((1 - val_fraction) * len(content))
    return _text_data(content[:cut], content[cut:], context, f"dataset.path={path}")


def synthetic_tokens(samples: int, vocab_size: int, context: int | None, seed: int) -> Data:
    """A Markov chain of order 1: each token has 4 equally likely successors (all if fewer exist).

    Only integers are drawn, so the data are the same on every machine. The last fifth is
    validation; the lowest reachable loss is ln 4 = 1.386 nats a token.
    """
    context = _known_context(context)
    if samples < 5 or vocab_size < 2:
        raise InputError(f"dataset.samples={samples} and dataset.vocab_size={vocab_size} must be at least 5 and 2.")
    generator = torch.Generator().manual_seed(seed)
    choices = min(MARKOV_SUCCESSORS, vocab_size)
    orders = [torch.randperm(vocab_size, generator=generator) for _ in range(vocab_size)]
    successors = torch.stack(orders)[:, :choices]  # [V, choices]
    tokens = torch.empty(samples, context + 1, dtype=torch.int64)
    tokens[:, 0] = torch.randint(vocab_size, (samples,), generator=generator)
    for t in range(context):
        choice = torch.randint(choices, (samples,), generator=generator)
        tokens[:, t + 1] = successors[tokens[:, t], choice]
    cut = samples - samples // 5
    train, val = TensorSamples(tokens[:cut]), TensorSamples(tokens[cut:])
    facts = {"vocab_size": vocab_size, "context": context}
    return Data(train, val, facts, content_hash(*train.tensors, *val.tensors))


def _text_data(train: bytes, val: bytes, context: int | None, source: str) -> Data:
    """Windows of context + 1 bytes, each beginning with the last byte of the one before.

    So an epoch predicts every byte once, but for the first and a rest shorter than a window.
    `source` names the key to change when a split is shorter than a window.
    """
    context = _known_context(context)
    if min(len(train), len(val)) <= context:
        raise InputError(
            f"{source} leaves {len(train)} training and {len(val)} validation bytes, but a sample "
            f"has {context + 1}: take more text, another dataset.val_fraction or a smaller "
            "dataset.context."
        )
    windows = [
        # [N, T + 1], a view
        torch.from_numpy(np.frombuffer(split, np.uint8).astype(np.int64)).unfold(0, context + 1, context)
        for split in (train, val)
    ]
    facts = {"vocab_size": 256, "context": context}
    return Data(*map(TensorSamples, windows), facts, content_hash(bytes(train), bytes(val), context))


def _known_context(context: int | None) -> int:
    if context is None:
        raise InputError("dataset.context is null and the model has none: set dataset.context=128.")
    return context


# ---- data of others -----------------------------------------------------------------------------


def as_data(value: Any) -> Data:
    """What a user's dataset function returned, as Data.

    `value` is Data, a pair (train, val), or an object with .train and .val; the two are map-style
    datasets. Its `facts`, if any, fill in what a model leaves open. Raises InputError otherwise.
    """
    if isinstance(value, Data):
        return value
    pair = value if isinstance(value, tuple | list) else _attributes(value)
    if len(pair) != 2 or not all(_is_map_style(split) for split in pair):
        raise InputError(
            f"dataset._target_ returned {type(value).__name__}; it must return a pair "
            "(train, val) of non-empty datasets with __len__ and __getitem__, or an object with "
            "such .train and .val."
        )
    facts = getattr(value, "facts", {})
    if not isinstance(facts, Mapping):
        raise InputError(
            f"The facts that dataset._target_ returned are {type(facts).__name__}; they must be "
            'a mapping such as {"num_classes": 10}.'
        )
    with PrivateRandomness(seed=0):  # random augmentations give the same samples each time
        identity = content_hash(*(part for split in pair for part in (len(split), _spread(split))))
    return Data(*pair, dict(facts), identity)


def _attributes(value: Any) -> tuple:
    return tuple(getattr(value, name) for name in ("train", "val") if hasattr(value, name))


def _is_map_style(split: Any) -> bool:
    return hasattr(split, "__getitem__") and hasattr(split, "__len__") and len(split) > 0


def _spread(split: Any) -> list[Any]:
    """Up to 256 samples, evenly spaced from the first to the last."""
    count = min(HASHED_SAMPLES, len(split))
    return [split[i * (len(split) - 1) // max(count - 1, 1)] for i in range(count)]


# ---- splits --------------------------------------------------------------------------------------


def _is_held_out(name: str, fraction: float) -> bool:
    """Whether the file of this name is for validation: a fixed coin of its own for each name."""
    coin = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64
    return coin < fraction


def _check_fraction(key: str, value: float) -> None:
    if not 0 < value < 1:
        raise InputError(f"dataset.{key}={value} must lie between 0 and 1, both excluded.")
