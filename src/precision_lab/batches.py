"""Batches: in which order a run sees its samples, and a hash that proves it.

Iterating leaves the global random streams alone, so that no arm's dropout depends on how it
loads data. Shape legend: B samples of a batch, C channels, H = W = image_size.
"""

import hashlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from precision_lab.datasets import TensorSamples
from precision_lab.errors import InputError
from precision_lab.hashing import update
from precision_lab.nested import map_tensors
from precision_lab.seeds import PrivateRandomness, derive


class TrainBatches:
    """Endless training batches whose order depends on (seed, len(dataset), batch_size) alone.

    An epoch is a fresh permutation without its last incomplete batch. `place` moves a batch to
    its device when the batch is handed out; `pin` for a CUDA device, which copies from pinned memory
    without waiting. Raises InputError if no batch is full.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        place: Callable[[Any], Any],
        workers: int = 0,
        pin: bool = False,
    ) -> None:
        if batch_size > len(dataset):
            raise InputError(
                f"trainer.batch_size={batch_size} is larger than the training set: choose at most {len(dataset)}."
            )
        order = partial(_shuffled, len(dataset), batch_size, seed)
        self._batches = _load(dataset, order(), seed, workers, pin)
        self._indices = order()  # a second pass of its own: the loader runs ahead of the training
        self._place = place
        self._digest = hashlib.sha256()
        self._started = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if not self._started:
            update(self._digest, batch)
            self._started = True
        self._digest.update(next(self._indices).numpy())
        return self._place(batch)

    def order_hash(self) -> str:
        """16 hex digits over the first batch's values and the indices of all batches handed out."""
        return self._digest.hexdigest()[:16]


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


def _load(dataset: Dataset, order: Iterable[Tensor], seed: int, workers: int, pin: bool) -> Iterator[Any]:
    """The batches that `order` lists, on the CPU."""
    if isinstance(dataset, TensorSamples) and not workers:
        yield from (dataset[indices] for indices in order)  # one gather, no collate
        return
    loader = DataLoader(
        _SeededSamples(dataset, seed),
        batch_sampler=([number, *indices.tolist()] for number, indices in enumerate(order)),
        num_workers=workers,
        worker_init_fn=_leave_signals_to_the_run,
        generator=torch.Generator().manual_seed(seed),  # else it draws its seed from the global generator
        pin_memory=pin,  # would start a CUDA context, which a run on the CPU has no use for
    )
    yield from loader


class _SeededSamples(Dataset):
    """Samples drawn under a random stream of their batch's own, however many workers share the batches.

    So a random augmentation gives the same batch in every arm, and shifts no dropout mask.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitems__(self, numbered: list[int]) -> list[Any]:
        number, *indices = numbered
        with PrivateRandomness(derive(self._seed, f"batch {number}")):
            if hasattr(self._dataset, "__getitems__"):
                return self._dataset.__getitems__(indices)
            return [self._dataset[index] for index in indices]


def _leave_signals_to_the_run(worker: int) -> None:
    """A worker has no result to save: the run ends it, and a signal to the run's group does not reach it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the run's handler, which it inherited
    os.setpgrp()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
