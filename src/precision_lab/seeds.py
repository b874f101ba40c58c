"""One seed a run, one generator a purpose: weights, data order and dropout never draw from each other."""

import hashlib
import random
from typing import Any

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


def generator_states(device: str) -> dict[str, Any]:
    """Where every global generator stands that a run on this type of device draws from: plain values and tensors."""
    name, keys, place, has_gauss, gauss = numpy.random.get_state()
    version, internal, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": [name, keys.tolist(), place, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }
    if device != "cpu":
        states[device] = getattr(torch, device).get_rng_state()
    return states


def restore_generators(states: dict[str, Any], device: str) -> None:
    """Put every global generator back to where `generator_states` found it."""
    torch.set_rng_state(states["torch"])
    numpy.random.set_state(tuple(states["numpy"]))
    version, internal, next_gauss = states["python"]
    random.setstate((version, tuple(internal), next_gauss))
    if device != "cpu":
        getattr(torch, device).set_rng_state(states[device])


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
