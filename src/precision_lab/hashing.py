"""Hashes of what a run used: data, batches, weights."""

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Chain:
    """A hash over a sequence of byte strings that can be taken up again: each link is hashed with the one before."""

    def __init__(self, state: str = "0" * 64) -> None:
        self.state = state  # 64 hex digits

    def add(self, link: bytes) -> None:
        self.state = hashlib.sha256(self.state.encode() + link).hexdigest()

    def digest(self) -> str:
        """16 hex digits."""
        return self.state[:16]


def content_hash(*parts: Any) -> str:
    """16 hex digits of sha256 over nested values."""
    digest = hashlib.sha256()
    for part in parts:
        update(digest, part)
    return digest.hexdigest()[:16]


def update(digest: Any, value: Any) -> None:
    """Feed a nested value: tensors by type, shape and bytes, all other leaves pickled."""
    if isinstance(value, Tensor) and value.layout != torch.strided:
        entries = value.detach().to_sparse().coalesce()  # made dense, a large one fills the memory
        update(digest, (str(tuple(value.shape)), entries.indices(), entries.values()))
    elif isinstance(value, Tensor):
        # a copy: a view of one element counts as contiguous whatever its stride
        flat = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for key in value:
            update(digest, key)
            update(digest, value[key])
    elif isinstance(value, tuple | list):
        for entry in value:
            update(digest, entry)
    else:
        digest.update(pickle.dumps(value, protocol=4))
