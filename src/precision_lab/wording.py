"""Hydra's and OmegaConf's errors in one or two sentences that name the key and the valid choices."""

import difflib
import os
import re
import traceback
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import yaml
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

NO_GROUPS = ("hydra", "wandb_sweep")  # folders of conf/ that hold no choice of a run's
_COMPOSERS = [Path(find_spec(name).origin).parent for name in ("hydra", "omegaconf", "yaml")]
_OURS = Path(__file__).parent
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# How OmegaConf says that a value is of a wrong type; the value stands in the first group, where it is told.
_WRONG_VALUES = (
    r"Value '(.*)' of type '\w+' could not be converted to \w+",
    r"Value '(.*)' is not a valid bool",
    r"Invalid value '(.*)', expected one of \[",
    r"Value (.*) \(\w+\) is not a valid input for <enum",
    r"Cannot convert '\w+' to string: '(.*)'\n",
    r"Invalid value assigned: (?:\w+) is not a (?:ListConfig|DictConfig)",
    r"too large to convert to float",
    r"Cannot assign|is not a subclass of|incompatible with type hint|Invalid type assigned|Unexpected type",
)


def is_composing(error: Exception) -> bool:
    """Whether an error was raised by Hydra, OmegaConf or YAML, on what they were given, and not by code of ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if any(Path(frame.filename).is_relative_to(package) for package in _COMPOSERS):
            return True
        if Path(frame.filename).is_relative_to(_OURS):
            return False
    return False


def word(error: Exception, overrides: list[str], schema: type, conf: Path) -> str:
    """Say what is wrong, where, and what is valid.

    `overrides` are what was composed, `schema` is the root dataclass (its fields are the valid keys),
    `conf` the folder of the groups.
    """
    cause = error.__cause__ or error
    text = str(error) if cause is error else f"{error}\n{cause}"  # Hydra's own message seldom says what is valid
    key = _full_key(str(cause)) or _full_key(text)
    told = _of_key(cause, text, key, schema) or _of_group(error, text, overrides, conf) or _of_value(text, key, schema)
    if told:
        return told
    if isinstance(error, RecursionError):
        return f"{_longest(overrides)} is nested too deeply to be read."
    if override := getattr(error, "override", None):  # Hydra's OverrideParseException
        return f"{override} cannot be read; write key=value, and quote a value with spaces or =: \"key='a b'\"."
    if isinstance(error, yaml.MarkedYAMLError):
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}."
    first = str(cause).strip().split("\n")[0].rstrip(".") or type(cause).__name__
    first = re.sub(r"^\w+ raised while resolving interpolation: ", "", first)
    where = key or _guilty(first, overrides)
    return f"{first} ({where})." if where and where not in first else f"{first}."


def unknown_key(key: str, schema: type) -> str:
    """The sentence for a key that the root dataclass does not have."""
    if key.partition(".")[0] == "experiment":
        return "An experiment file must begin with the line `# @package _global_`."
    if key.partition(".")[0] == "hydra":
        return f"{key} is not a key of Hydra's; `python train.py --cfg hydra` lists them."
    return f"{key} is not a known key; {_known_keys(key, schema)}."


def _of_group(error: Exception, text: str, overrides: list[str], conf: Path) -> str:
    if "Config group override" in text or (
        isinstance(error, TypeError) and not isinstance(error, OmegaConfBaseException)
    ):
        wrong = [one for one in overrides if _is_group(one, conf) and not _names_a_choice(one)] or overrides
        return f"{' '.join(wrong)}: a config group takes the name of one of its choices."
    if match := re.search(r"Ambiguous value for argument '(.*?)'\n", text, re.S):
        return f"{match.group(1)} holds several values, and a run takes one; add -m to run them all."
    if isinstance(error, OSError) and error.filename:
        path = Path(error.filename)
        missing = str(path.relative_to(conf).with_suffix("")) if path.is_relative_to(conf) else str(path)
    else:
        missing = getattr(error, "missing_cfg_file", None)
    if isinstance(missing, str):
        group, _, choice = missing.partition("/")
        # os.path: pathlib raises for a name that is too long
        while choice and os.path.isdir(conf / group / choice.partition("/")[0]):
            inner, _, choice = choice.partition("/")
            group = f"{group}/{inner}"
        if os.path.isdir(conf / group):
            return f"{group}={choice} does not exist; {_choices(choice, _options(conf / group))}."
    if match := re.search(r"Could not override '([^']+)'", text):
        return f"{match.group(1)} is not a known config group; {_choices(match.group(1), _groups(conf))}."
    return ""


def _is_group(word: str, conf: Path) -> bool:
    return os.path.isdir(conf / word.lstrip("+~").partition("=")[0].partition("@")[0])


def _names_a_choice(word: str) -> bool:
    choice = word.partition("=")[2]
    return bool(re.fullmatch(r"[\w./-]+", choice)) and not re.fullmatch(r"null|true|false|[\d.e+-]+", choice, re.I)


def _of_key(cause: BaseException, text: str, key: str, schema: type) -> str:
    if "not in struct" in text or re.search(r"Key '.*' not in '", text, re.S):
        return unknown_key(key, schema)
    if match := re.search(r"Environment variable '(.*)' not found", text, re.S):
        return f"{key} asks for the environment variable {match.group(1)}, which is not set."
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} has no value; give it one on the command line."
    return ""


def _of_value(text: str, key: str, schema: type) -> str:
    """Of a value that is not of its key's type."""
    if " is not Optional" in text:
        return f"{key} cannot be null."
    match = next(filter(None, (re.search(pattern, text, re.S) for pattern in _WRONG_VALUES)), None)
    wanted = _type_at(key, schema)
    if not match or not wanted:
        return ""
    shown = f"{key}={match.group(1)}" if match.groups() else key
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return f"{shown} is not valid; valid are {', '.join(one.name for one in wanted)}."
    if is_dataclass(wanted) or wanted is dict:
        return f"{shown} is not valid; it holds keys of its own, such as {key}.KEY=VALUE."
    if get_origin(wanted) is list:
        (item,) = get_args(wanted)
        known = ",".join(one.name for one in item) if isinstance(item, type) and issubclass(item, Enum) else "a,b"
        return f"{shown} is not valid; it must be a list, such as {key}=[{known}]."
    return f"{shown} is not valid; it must be {_KINDS[wanted]}."


def _type_at(key: str, schema: type) -> Any:
    """What a field takes, beside null; None where the schema does not say."""
    node: Any = schema
    for part in key.split("."):
        name = part.partition("[")[0]
        types = {f.name: f.type for f in fields(node)} if is_dataclass(node) else {}
        node = types.get(name)
        if isinstance(node, UnionType):
            node = next(one for one in get_args(node) if one is not type(None))
        if "[" in part and get_origin(node) is list:
            (node,) = get_args(node)
    return node if get_origin(node) is list else get_origin(node) or node


def _guilty(text: str, overrides: list[str]) -> str:
    """The word that an error is about which names no key, as far as that is clear: the one whose key it tells."""
    words = [word for word in overrides if "=" in word or word.startswith("~")]
    keys = [word.lstrip("+~").partition("=")[0] for word in words]
    return "" if any(key and key in text for key in keys) else " ".join(words)


def _longest(overrides: list[str]) -> str:
    return max(overrides, key=len, default="")


def _full_key(text: str) -> str:
    match = re.search(r"full_key: (\S+)", text)
    return match.group(1) if match else ""


def _options(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _groups(conf: Path) -> list[str]:
    return sorted(path.name for path in conf.iterdir() if path.is_dir() and path.name not in NO_GROUPS)


def _choices(given: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(given, valid, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}Valid are {', '.join(valid)}" if near else f"valid are {', '.join(valid)}"


def _known_keys(key: str, schema: type) -> str:
    """The valid keys beside `key`, or how to add an argument to an open set."""
    *parents, last = key.split(".")
    node: Any = schema
    for parent in parents:
        types = {f.name: f.type for f in fields(node)} if is_dataclass(node) else {}
        node = types.get(parent)
    if is_dataclass(node):
        return _choices(last, [f.name for f in fields(node)])
    return f"if {parents[0]}._target_ takes it, write +{key}=VALUE"
