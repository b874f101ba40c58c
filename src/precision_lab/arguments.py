"""What the classes and functions shipped take: the arguments of each, by `_target_`, with their ranges.

A class of the user's own checks its own arguments; for ours this is said before torch is loaded. A test holds the
table to the signatures.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from precision_lab.errors import MOST, InputError, require


@dataclass(frozen=True)
class Takes:
    """What an argument may be: `fits` says whether a value is, `words` what it must be."""

    fits: Callable[[Any], bool]
    words: str
    required: bool = True


def _whole(low: int, high: int = MOST, null: bool = False) -> Takes:
    words = f"a whole number of at least {low}" if high == MOST else f"a whole number from {low} to {high}"
    return Takes(
        lambda value: (value is None and null) or (type(value) is int and low <= value <= high),
        f"{words}, or null" if null else words,
    )


def _number(fits: Callable[[float], bool], words: str, required: bool = True) -> Takes:
    return Takes(lambda value: is_number(value) and fits(value), words, required)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return type(value) is float and math.isfinite(value) or (type(value) is int and abs(value) < 2**1023)


def _wholes(least: int) -> Takes:
    return Takes(
        lambda value: (
            isinstance(value, list)
            and len(value) >= least
            and all(type(one) is int and 1 <= one <= MOST for one in value)
        ),
        f"a list of {'one or more ' if least else ''}whole numbers of at least 1, such as [64,64]",
    )


def _betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_number(one) and 0 <= one < 1 for one in value)


_SIZE, _SIZE_OR_NULL, _ROOMY = _whole(1), _whole(1, null=True), _whole(5)
_SEED = _whole(0, 2**63 - 1)
_NOT_BELOW_0 = _number(lambda value: value >= 0, "a finite number not below 0")
_PART = _number(lambda value: 0 < value < 1, "a number above 0 and below 1")
_FLAG = Takes(lambda value: isinstance(value, bool), "true or false")
_TEXT = Takes(lambda value: isinstance(value, str) and value != "", "text")
_ELSEWHERE = Takes(lambda value: True, "a name or a path")  # looked at in open_sets, or by torch
_IMAGE = {"channels": _SIZE_OR_NULL, "image_size": _SIZE_OR_NULL}
_CLASSES = {"num_classes": _SIZE_OR_NULL, "channels": _SIZE_OR_NULL}
_OPTIMIZER = {
    "lr": _number(lambda value: value > 0, "a finite number above 0"),
    "weight_decay": replace(_NOT_BELOW_0, required=False),
    "fused": Takes(lambda value: value is None or isinstance(value, bool), "true, false or null", required=False),
}

# All arguments of what this package brings, but for `...`: any more.
SHIPPED: dict[str, dict[Any, Takes]] = {
    "precision_lab.models.MLP": {**_CLASSES, "image_size": _SIZE_OR_NULL, "hidden": _wholes(0)},
    "precision_lab.models.CNN": {**_CLASSES, "widths": _wholes(1)},
    "precision_lab.models.GPT": {
        "vocab_size": _SIZE_OR_NULL,
        "context": _SIZE_OR_NULL,
        "layers": _whole(1, 10_000),
        "heads": _SIZE,
        "width": _SIZE,
        "dropout": _number(lambda value: 0 <= value < 1, "a number from 0 on and below 1"),
    },
    "precision_lab.models.torchvision_model": {"name": _TEXT, **_CLASSES, "image_size": _SIZE_OR_NULL, ...: _ELSEWHERE},
    "precision_lab.datasets.digits": {**_IMAGE, "train_fraction": _PART},
    "precision_lab.datasets.torchvision_dataset": {"name": _ELSEWHERE, "root": _ELSEWHERE, "download": _FLAG, **_IMAGE},
    "precision_lab.datasets.image_folder": {
        "root": _ELSEWHERE,
        **_IMAGE,
        "val_fraction": _PART,
        "on_unreadable": replace(_ELSEWHERE, required=False),
    },
    "precision_lab.datasets.synthetic_images": {
        "samples": _ROOMY,
        **_IMAGE,
        "num_classes": _SIZE_OR_NULL,
        "noise": _NOT_BELOW_0,
        "seed": _SEED,
    },
    "precision_lab.datasets.stdlib_text": {"context": _SIZE_OR_NULL, "max_bytes": _SIZE, "val_fraction": _PART},
    "precision_lab.datasets.text_file": {"path": _ELSEWHERE, "context": _SIZE_OR_NULL, "val_fraction": _PART},
    "precision_lab.datasets.synthetic_tokens": {
        "samples": _ROOMY,
        "vocab_size": _whole(2, null=True),
        "context": _SIZE_OR_NULL,
        "seed": _SEED,
    },
    "precision_lab.task.Classification": {
        "label_smoothing": _number(lambda value: 0 <= value <= 1, "a number from 0 to 1", required=False),
        "aux_weight": _number(lambda value: value >= 0, "a finite number not below 0", required=False),
    },
    "precision_lab.task.LanguageModel": {},
    "precision_lab.optim.constant": {"warmup_steps": _whole(0)},
    "precision_lab.optim.cosine": {"warmup_steps": _whole(0), "final_factor": _NOT_BELOW_0},
}
# Of torch's optimizers that have a file here, what the file states; they take more.
TORCHS: dict[str, dict[Any, Takes]] = {
    "torch.optim.AdamW": {
        **_OPTIMIZER,
        "betas": Takes(_betas, "a pair of numbers from 0 on and below 1, such as [0.9,0.999]", required=False),
        "eps": replace(_NOT_BELOW_0, required=False),
        ...: _ELSEWHERE,
    },
    "torch.optim.SGD": {**_OPTIMIZER, "momentum": replace(_NOT_BELOW_0, required=False), ...: _ELSEWHERE},
}
_OF_NO_CALL = ("_target_", "kind")
# What a dataset must be told where the model does not tell it.
_FROM_EITHER = {
    "precision_lab.datasets.image_folder": ("image_size",),
    "precision_lab.datasets.synthetic_images": ("num_classes",),
    "precision_lab.datasets.synthetic_tokens": ("vocab_size", "context"),
    "precision_lab.datasets.stdlib_text": ("context",),
    "precision_lab.datasets.text_file": ("context",),
}


def check(nodes: dict[str, dict[str, Any]]) -> None:
    """Raise InputError unless what is shipped is given what it takes. The nodes are the open sets, by group."""
    for group, node in nodes.items():
        table = SHIPPED.get(node["_target_"]) or TORCHS.get(node["_target_"])
        if table is not None or node["_target_"] in SHIPPED:
            _check_node(group, node, table or {})
    model, dataset = nodes["model"], nodes["dataset"]
    for key in _FROM_EITHER.get(dataset["_target_"], ()):
        require(
            dataset.get(key) is not None or model.get(key) is not None,
            f"dataset.{key} and model.{key} are both null; set one of them.",
        )
    if model["_target_"] == "precision_lab.models.GPT":
        require(
            model["width"] % model["heads"] == 0,
            f"model.width={model['width']} is not a multiple of model.heads={model['heads']}.",
        )
    if dataset["_target_"] == "precision_lab.datasets.stdlib_text":
        _check_windows(dataset, model)


def _check_node(group: str, node: dict[str, Any], table: dict[Any, Takes]) -> None:
    for key, takes in table.items():
        if key is ...:
            continue
        require(
            key in node or not takes.required,
            f"{group}.{key} has no value, and {node['_target_']} needs one; it must be {takes.words}.",
        )
        shown = "null" if node.get(key) is None else node[key]
        fits = key not in node or takes.fits(node[key])
        require(fits, f"{group}.{key}={shown} is not valid; it must be {takes.words}.")
    unknown = next((key for key in node if key not in table and key not in _OF_NO_CALL), None)
    if unknown is not None and ... not in table:
        valid = f"valid are {', '.join(map(str, table))}" if table else "it takes none"
        raise InputError(f"{group}.{unknown} is not an argument of {node['_target_']}; {valid}.")


def _check_windows(dataset: dict[str, Any], model: dict[str, Any]) -> None:
    context = dataset.get("context") or model["context"]
    require(_SIZE.fits(context), f"model.context={context} is not valid; it must be {_SIZE.words}.")
    held_out = round(dataset["val_fraction"] * dataset["max_bytes"])
    require(
        min(held_out, dataset["max_bytes"] - held_out) > context,
        f"dataset.max_bytes={dataset['max_bytes']} and dataset.val_fraction={dataset['val_fraction']} leave one split "
        f"no sample of context + 1 = {context + 1} bytes; take more text, another fraction or a smaller context.",
    )
