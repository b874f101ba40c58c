"""Hydra's and OmegaConf's errors in one or two sentences that name the key and the valid choices."""

import difflib
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf.errors import MissingMandatoryValue
from yaml import MarkedYAMLError

NO_GROUPS = ("hydra", "wandb_sweep")  # folders of conf/ that hold no choice of a run's


def word(error: Exception, overrides: list[str], schema: type, conf: Path) -> str:
    """Say what is wrong, where, and what is valid.

    `overrides` are what was composed, `schema` is the root dataclass (its fields are the valid keys),
    `conf` the folder of the groups.
    """
    cause = error.__cause__ or error
    text = str(error) if cause is error else f"{error}\n{cause}"  # Hydra's own message seldom says what is valid
    if "Config group override must be" in text:
        return f"{' '.join(overrides)}: a config group takes the name of one of its choices."
    if match := re.search(r"Ambiguous value for argument '(.*?)'", text):
        return f"{match.group(1)} holds several values, and a run takes one; add -m to run them all."
    if match := re.search(r"Could not find '([\w-]+(?:/[\w-]+)*)/([^/']+)'", text):
        group, choice = match.groups()
        return f"{group}={choice} does not exist; {_choices(choice, _options(conf / group))}."
    # an unknown key: "Key 'stepz' not in 'TrainerConfig'" or "... is not in struct"
    key = _full_key(str(cause)) or _full_key(text)
    if "not in struct" in text or re.search(r"Key '.*' not in '", text):
        return unknown_key(key, schema)
    if match := re.search(r"Could not override '([^']+)'", text):
        return f"{match.group(1)} is not a known config group; {_choices(match.group(1), _groups(conf))}."
    if match := re.search(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text):
        return f"{key}={match.group(1)} is not valid; it must be {_article(match.group(2))}."
    if match := re.search(r"Value '(.*)' is not a valid bool", text):
        return f"{key}={match.group(1)} is not valid; it must be true or false."
    if match := re.search(r"Invalid value assigned: (\w+) is not a ListConfig, list or tuple", text):
        return f"{key} must be a list, such as {key}=[a,b]."
    if " is not Optional" in text:
        return f"{key} cannot be null."
    if match := re.search(r"Environment variable '(.*)' not found", text):
        return f"{key} asks for the environment variable {match.group(1)}, which is not set."
    if override := getattr(error, "override", None):  # Hydra's OverrideParseException
        return f"{override} cannot be read; write key=value, and quote a value with spaces or =: \"key='a b'\"."
    if isinstance(error, MarkedYAMLError):
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}."
    if match := re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", text):
        return f"{key}={match.group(1)} is not valid; valid are {match.group(2)}."
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} has no value; give it one on the command line."
    first = str(cause).strip().split("\n")[0].rstrip(".") or type(cause).__name__
    where = f" ({key})" if key and key not in first else ""
    return f"{first}{where}."


def unknown_key(key: str, schema: type) -> str:
    """The sentence for a key that the root dataclass does not have."""
    if key.partition(".")[0] == "experiment":
        return "An experiment file must begin with the line `# @package _global_`."
    if key.partition(".")[0] == "hydra":
        return f"{key} is not a key of Hydra's; `python train.py --cfg hydra` lists them."
    return f"{key} is not a known key; {_known_keys(key, schema)}."


def _article(kind: str) -> str:
    names = {"Float": "a number", "Integer": "a whole number", "Boolean": "true or false", "String": "text"}
    return names.get(kind, kind)


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
