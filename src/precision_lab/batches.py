"""Batches: in which order a run sees its samples, and a hash that proves it.

Iterating leaves the global random streams alone, so that no arm's dropout depends on how it
loads data. Shape legend: B samples of a batch, C channels, H = W = image_size.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from precision_lab.datasets import TensorSamples
from precision_lab.errors import InputError
from precision_lab.hashing import Chain, content_hash
from precision_lab.loading import load
from precision_lab.nested import map_tensors


class TrainBatches:
    """Endless training batches whose order depends on (seed, len(dataset), batch_size) alone.

    An epoch is a fresh permutation without its last incomplete batch. `place` moves a batch to
    its device when the batch is handed out; `pin` for a CUDA device, which copies from pinned memory
    without waiting. `state` is one that an earlier object gave: the batches go on after those that it handed out.
    Raises InputError if no batch is full.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        place: Callable[[Any], Any],
        workers: int = 0,
        pin: bool = False,
        state: dict[str, Any] | None = None,
    ) -> None:
        if batch_size > len(dataset):
            raise InputError(
                f"trainer.batch_size={batch_size} is larger than the training set: choose at most {len(dataset)}."
            )
        self._handed_out: int = state["handed_out"] if state else 0
        self._hash = Chain(state["hash"]) if state else Chain()
        order = partial(_shuffled, len(dataset), batch_size, seed)
        ahead = islice(order(), self._handed_out, None)
        self._batches = _load(dataset, ahead, seed, workers, pin, self._handed_out)
        self._order = islice(order(), self._handed_out, None)  # a second pass: the loader runs ahead of the training
        self._place = place
        self._last = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if not self._handed_out:
            self._hash.add(content_hash(batch).encode())
        indices = next(self._order)
        self._hash.add(indices.numpy().tobytes())
        self._handed_out, self._last = self._handed_out + 1, indices
        return self._place(batch)

    @property
    def indices(self) -> list[int]:
        """Of the samples in the batch handed out last."""
        return self._last.tolist()

    def order_hash(self) -> str:
        """16 hex digits over the first batch's values and the indices of all batches handed out."""
        return self._hash.digest()

    def state(self) -> dict[str, Any]:
        """How far it is, as plain values, for a checkpoint."""
        return {"handed_out": self._handed_out, "hash": self._hash.state}


def eval_batches(
    dataset: Dataset, batch_size: int, place: Callable[[Any], Any], workers: int = 0, pin: bool = False
) -> Iterator[tuple[Any, int]]:
    """(batch, its number of samples): every sample once, in order; the last batch may be short."""
    order = torch.arange(len(dataset)).split(batch_size)
    for indices, batch in zip(order, _load(dataset, order, 0, workers, pin), strict=True):
        yield place(batch), len(indices)


def batch_of(dataset: Dataset, samples: int, place: Callable[[Any], Any]) -> Any:
    """One batch of any size, its samples in order and again from the first one where there are too few."""
    indices = torch.arange(samples) % len(dataset)
    return place(next(_load(dataset, [indices], 0, 0, False)))


def place_on(device: torch.device | str, channels_last: bool) -> Callable[[Any], Any]:
    """A function that moves every tensor of a nested batch to `device`, asynchronously on CUDA.

    With `channels_last`, 4-D tensors [B, C, H, W] get that memory format.
    """
    device = torch.device(device)

    def place(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()  # from pageable memory a copy waits; no-op if pinned
        layout = torch.channels_last if channels_last and tensor.dim() == 4 else torch.preserve_format
        return tensor.to(device, non_blocking=device.type == "cuda", memory_format=layout)

    return partial(map_tensors, place)


def _shuffled(length: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Index batches [B], endlessly."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(length, generator=generator)
        yield from order[: length - length % batch_size].split(batch_size)


def _load(
    dataset: Dataset, order: Iterable[Tensor], seed: int, workers: int, pin: bool, first: int = 0
) -> Iterator[Any]:
    """The batches that `order` lists, on the CPU; `first` is the number of the first one."""
    if isinstance(dataset, TensorSamples) and not workers:
        yield from (dataset[indices] for indices in order)  # one gather, no collate
        return
    numbered = ([number, *indices.tolist()] for number, indices in enumerate(order, first))
    yield from load(dataset, numbered, seed, workers, pin)
