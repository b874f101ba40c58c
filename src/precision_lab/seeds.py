"""One seed a run, one generator a purpose: weights, data order and dropout never draw from each other."""

import hashlib
import random

import numpy
import torch


def derive(seed: int, purpose: str) -> int:
    """A 32-bit seed for one purpose, unrelated to its neighbours'."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:4], "big")


def seed_globals(seed: int) -> None:
    """Seed every global generator that a model, a dataset or dropout may draw from."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


class PrivateRandomness:
    """Around a dataset's code: its torch, numpy and random streams instead of the global ones.

    Without it a random augmentation run in this process would shift every later dropout mask.
    """

    def __init__(self, seed: int) -> None:
        self._inside = (
            torch.Generator().manual_seed(seed).get_state(),
            numpy.random.RandomState(seed).get_state(),
            random.Random(seed).getstate(),
        )

    def __enter__(self) -> None:
        self._outside = self._swap(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = self._swap(self._outside)

    @staticmethod
    def _swap(states: tuple) -> tuple:
        before = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
        torch.set_rng_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])
        return before
