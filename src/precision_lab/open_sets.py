"""The open sets of a config: a `_target_` and its arguments each, checked as far as that goes without torch.

A class or function may come from anywhere, so that its own arguments are its own to check; what is
checked here is what several groups must agree on, and what the files shipped are known to need.
"""

import os
import re
from pathlib import Path
from typing import Any

from precision_lab import arguments
from precision_lab.arguments import is_number
from precision_lab.errors import InputError, require

NAMES = ("model", "dataset", "task", "optimizer", "scheduler")
# What model and dataset can tell each other: a null on one side is filled in from the other.
SHARED_FACTS = ("num_classes", "channels", "image_size", "vocab_size", "context")


def check(nodes: dict[str, dict[str, Any]]) -> None:
    """Raise InputError unless the groups, by name, make sense each and together."""
    for group, node in nodes.items():
        _check_target(group, node)
    _check_optimizer(nodes["optimizer"])
    _check_kinds(nodes["model"], nodes["dataset"], nodes["task"])
    _check_sizes(nodes["model"], nodes["dataset"])
    _check_files(nodes["dataset"])
    arguments.check(nodes)


def _check_target(group: str, node: dict[str, Any]) -> None:
    target = node.get("_target_")
    require(
        isinstance(target, str) and re.fullmatch(r"\w+(\.\w+)+", target) is not None,
        f"{group}._target_={target} does not name a class or function; "
        f"write {group}=custom {group}._target_=module.Name.",
    )
    kind = node.get("kind")
    require(
        kind in (None, "images", "tokens"),
        f"{group}.kind={kind} is unknown; valid are images, tokens and null (not checked).",
    )


def _check_optimizer(optimizer: dict[str, Any]) -> None:
    lr = optimizer.get("lr")
    require(is_number(lr) and lr > 0, f"optimizer.lr={lr} must be a finite number above 0.")
    for key in ("weight_decay", "momentum", "eps"):
        value = optimizer.get(key, 0.0)
        if isinstance(value, int | float | str):  # an optimizer of the user's may take a pair or nothing there
            wrong = f"optimizer.{key}={value} must be a finite number not below 0."
            require(is_number(value) and value >= 0, wrong)


def _check_kinds(model: dict[str, Any], dataset: dict[str, Any], task: dict[str, Any]) -> None:
    parts = {"model": model, "dataset": dataset, "task": task}
    kinds = {group: node["kind"] for group, node in parts.items() if node.get("kind")}
    if len(set(kinds.values())) > 1:
        stated = ", ".join(f"{group}={label(parts[group])} works on {kind}" for group, kind in kinds.items())
        raise InputError(f"These do not fit together: {stated}. Choose all of one kind.")


def _check_sizes(model: dict[str, Any], dataset: dict[str, Any]) -> None:
    for key in SHARED_FACTS:
        wanted, given = model.get(key), dataset.get(key)
        for group, node in (("model", model), ("dataset", dataset)):
            value, ours = node.get(key), node["_target_"].startswith("precision_lab.")
            require(  # a class of the user's may take a pair
                value is None or not ours or (type(value) is int and value >= 1),
                f"{group}.{key}={value} is not valid; it must be a whole number of at least 1, or null.",
            )
        require(
            wanted is None or given is None or wanted == given,
            f"model.{key}={wanted} and dataset.{key}={given} differ; set one of them to null to follow the other.",
        )


# What torchvision unpacks below `root`, so that missing files are told without importing it.
TORCHVISION_FILES = {
    "MNIST": "MNIST/raw/train-images-idx3-ubyte",
    "FashionMNIST": "FashionMNIST/raw/train-images-idx3-ubyte",
    "CIFAR10": "cifar-10-batches-py/data_batch_1",
    "CIFAR100": "cifar-100-python/train",
}


def _check_files(dataset: dict[str, Any]) -> None:
    target = dataset["_target_"]
    if target == "precision_lab.datasets.torchvision_dataset":
        name, root = dataset.get("name"), dataset.get("root")
        require(
            isinstance(name, str) and name in TORCHVISION_FILES,
            f"dataset.name={name} is unknown; valid are {', '.join(TORCHVISION_FILES)}.",
        )
        _may_be_read("root", root)
        require(
            bool(dataset.get("download")) or os.path.exists(Path(str(root)) / TORCHVISION_FILES[name]),
            f"{name} is not in dataset.root={root}; add dataset.download=true, or point dataset.root to it.",
        )
    elif target == "precision_lab.datasets.image_folder":
        root, choice = dataset.get("root"), dataset.get("on_unreadable", "fail")
        require(
            choice in ("fail", "skip"),
            f"dataset.on_unreadable={choice} is unknown; valid are fail and skip.",
        )
        require(
            root is not None and os.path.isdir(str(root)),
            f"dataset.root={root} is not a folder; it must hold one folder of images a class.",
        )
        _may_be_read("root", root)
    elif target == "precision_lab.datasets.text_file":
        path = dataset.get("path")
        require(
            path is not None and os.path.isfile(str(path)),
            f"dataset.path={path} is not a file; name a text file.",
        )
        _may_be_read("path", path)
        require(os.path.getsize(str(path)) > 0, f"dataset.path={path} is empty; name a text file.")


def _may_be_read(key: str, place: Any) -> None:
    needed = os.R_OK | (os.X_OK if os.path.isdir(str(place)) else 0)
    denied = os.path.exists(str(place)) and not os.access(str(place), needed)
    require(not denied, f"dataset.{key}={place} cannot be read: permission denied.")


def label(node: dict[str, Any]) -> str:
    """Short name of an open set's choice for file names: its `name`, else the last part of `_target_`."""
    return str(node.get("name") or node["_target_"].rsplit(".", 1)[-1]).lower()
