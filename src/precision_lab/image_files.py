"""Images that lie in files: which there are, how one is decoded and fitted, and what becomes of one that cannot be.

Knows nothing of splits, models or precision. Shape legend: N samples, C channels, H = W = image_size.
"""

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from precision_lab.errors import InputError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# What the system says of a file itself. Anything else, such as too many open files or a failing network, is no reason
# to leave the file out: another arm may be able to read it.
ABOUT_THE_FILE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
ADVICE = "Mend or remove what cannot be read, or set dataset.on_unreadable=skip to train without it."


class ImageFile(NamedTuple):
    """A file that is taken for an image."""

    path: str
    label: int  # the place of its class folder in the order of names
    size: int  # bytes


@dataclass(frozen=True)
class Listing:
    """What lies under a folder of class folders, in the order of class, folder and name."""

    classes: list[str]
    images: list[ImageFile]
    unreadable: dict[str, str]  # path -> why: empty, not a file, or not to be looked at


def list_images(root: Path, skip: bool) -> Listing:
    """Everything named like an image in root/<class>/ and its subfolders.

    InputError if a class has no image, and unless `skip` if one is known to be unreadable: nothing is decoded here.
    """
    try:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except OSError as error:
        raise InputError(f"dataset.root={root} cannot be listed ({error.strerror}).") from error
    if not classes:
        raise InputError(f"{root} is not in the layout root/<class>/<image>: it has no class folder.")
    listing, above = Listing(classes, [], {}), (os.path.realpath(root),)
    for label, name in enumerate(classes):
        paths = _named_like_images(str(root / name), listing.unreadable, above)
        for path in sorted(paths, key=os.path.split):
            _add(listing, path, label)
    _check(listing, root, skip)
    return listing


def _check(listing: Listing, root: Path, skip: bool) -> None:
    if listing.unreadable and not skip:
        first, why = next(iter(listing.unreadable.items()))
        count = len(listing.unreadable)
        others = f", and {count - 1} more of {count + len(listing.images)} under {root} cannot be read" * (count > 1)
        raise InputError(f"{first} is no image ({why}){others}. {ADVICE}")
    empty = set(range(len(listing.classes))) - {image.label for image in listing.images}
    if empty:
        raise InputError(
            f"{root} is not in the layout root/<class>/<image>: the class folder {listing.classes[min(empty)]} "
            f"has no readable file named {', '.join(EXTENSIONS)}."
        )


def _named_like_images(folder: str, unreadable: dict[str, str], above: tuple[str, ...]) -> Iterator[str]:
    """Paths in any order. `above` are the real places of the folders it lies in: a link back to one is not followed."""
    place = os.path.realpath(folder)
    if place in above:
        return
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        unreadable[folder] = error.strerror
        return
    for entry in entries:
        if entry.name.lower().endswith(EXTENSIONS):
            yield entry.path
        elif entry.is_dir():
            yield from _named_like_images(entry.path, unreadable, (*above, place))


def _add(listing: Listing, path: str, label: int) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        listing.unreadable[path] = error.strerror
        return
    if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for ever
        listing.unreadable[path] = "not a file"
    elif not status.st_size:
        listing.unreadable[path] = "empty"
    else:
        listing.images.append(ImageFile(path, label, status.st_size))


class ImageFiles(Dataset):
    """(float32 [C, H, W] in -1..1, label) of each image, decoded when it is used.

    One that cannot be decoded raises InputError; with `skip` the next in the list that can be takes its place, in
    every arm, epoch and number of data workers the same one.
    """

    def __init__(self, images: list[ImageFile], channels: int, image_size: int, skip: bool) -> None:
        self.images = images
        self._channels, self._image_size = channels, image_size
        # Shared: what a data worker finds, the others and the run know.
        self._bad = torch.zeros(len(images), dtype=torch.bool).share_memory_() if skip else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        for place in range(index, index + (1 if self._bad is None else len(self))):
            number = place % len(self)
            if self._bad is not None and self._bad[number]:
                continue
            try:
                pixels = _decoded(self.images[number].path)
            except MemoryError:
                raise
            except Exception as error:  # a decoder can raise anything
                self._note(number, error)
            else:
                image = fit(pixels.unsqueeze(0), self._channels, self._image_size)[0] / 127.5 - 1
                return image, self.images[number].label
        raise InputError(f"None of the {len(self)} images of a split can be read; the first is {self.images[0].path}.")

    def unreadable(self) -> list[str]:
        """Paths of the images that could not be decoded up to now, each once."""
        return [] if self._bad is None else [self.images[i].path for i in self._bad.nonzero().flatten()]

    def _note(self, index: int, error: Exception) -> None:
        """Remember the image, or raise InputError."""
        path, why = self.images[index].path, _reason(error)
        if isinstance(error, OSError) and error.errno not in {None, *ABOUT_THE_FILE}:
            raise InputError(f"{path} could not be read ({why}).") from error
        if self._bad is None:
            raise InputError(f"{path} cannot be read as an image ({why}). {ADVICE}") from error
        self._bad[index] = True


def _decoded(path: str) -> Tensor:
    """uint8 [3, side, side]: the image's central square."""
    from PIL import Image

    with open(path, "rb") as file, Image.open(file) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)  # [3, height, width]
    height, width = pixels.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[:, top : top + side, left : left + side]


def _reason(error: Exception) -> str:
    if type(error).__name__ == "UnidentifiedImageError":  # its text is the file object's
        return "in no format that Pillow knows"
    text = getattr(error, "strerror", None) or str(error).split("\n")[0].rstrip(".")
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"


def fit(pixels: Tensor, channels: int, image_size: int) -> Tensor:
    """A new float32 tensor [N, channels, image_size, image_size] from pixels [N, C, H, W]. InputError: 1 or 3."""
    if channels not in (1, 3):
        raise InputError(f"dataset.channels={channels} is not possible; valid are 1 and 3.")
    images = pixels.to(torch.float32, copy=True)
    if channels < images.shape[1]:
        images = images.mean(dim=1, keepdim=True)
    if images.shape[2:] != (image_size, image_size):
        images = F.interpolate(images, size=(image_size, image_size), mode="bilinear", antialias=True)
    if channels > images.shape[1]:
        images = images.repeat(1, channels, 1, 1)
    return images
