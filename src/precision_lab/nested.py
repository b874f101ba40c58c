"""Nested values, such as batches and the arguments of a module: tensors inside tuples, lists and mappings."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same nesting with `function` applied to each tensor; a mapping becomes a dict, all else stays."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a namedtuple's one by one
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors anywhere in a nesting that torch knows, in its order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
