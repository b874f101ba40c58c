"""Data sets that torchvision downloads, checks and unpacks: their samples, or one sentence on what is wrong."""

import os
from pathlib import Path

import torch
from torch import Tensor

from precision_lab.errors import InputError
from precision_lab.open_sets import TORCHVISION_FILES


def read(name: str, root: str, download: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int]:
    """(uint8 pixels [N, C, H, W], int64 labels [N]) of train and test, and the number of classes.

    What is downloaded has the md5 sums that torchvision knows, and what is there whole is not fetched again.
    """
    from torchvision import datasets  # costs more than a second: only who asks for it pays

    try:
        splits = [getattr(datasets, name)(root, train=train, download=download) for train in (True, False)]
        train, test = ((_channels_first(torch.as_tensor(s.data)), torch.as_tensor(s.targets)) for s in splits)
    except MemoryError:
        raise
    except Exception as error:  # what reads a damaged file can raise anything
        raise InputError(_sentence(name, root, download, error)) from error
    return train, test, len(splits[0].classes)


def _channels_first(pixels: Tensor) -> Tensor:
    """[N, H, W] or [N, H, W, C] -> [N, C, H, W]."""
    return pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)


def _sentence(name: str, root: str, download: bool, error: Exception) -> str:
    said = str(error).strip().split("\n")[-1].rstrip(".") or type(error).__name__  # of several mirrors the last
    if "not found" in said:  # also said of a wrong sum
        said = "a file is missing, or its md5 sum is not the one that torchvision knows"
    fetch = "set dataset.download=true on a machine with internet access"
    elsewhere = f"or point dataset.root to a folder that holds torchvision's {name} files."
    first = Path(root, TORCHVISION_FILES[name])
    what = "downloaded to" if download else "read from"
    if isinstance(error, OSError) and error.strerror:  # a full disk, no permission, no connection
        return f"dataset.name={name} could not be {what} {root} ({error.strerror}: {error.filename or root})."
    if os.path.exists(first):
        return f"dataset.name={name}: {first.parent} is incomplete or damaged ({said}). Delete it and {fetch}."
    if download:
        return f"dataset.name={name} could not be downloaded to {root} ({said}): {fetch}, {elsewhere}"
    return f"dataset.name={name} has no files in {root}: {fetch}, {elsewhere}"
