"""The open sets: a `_target_` and its arguments turned into the object they name.

A `_target_` may come from any installed package, or from a file of the user's found through
PYTHONPATH. Whatever is wrong with it becomes one sentence.
"""

import sysconfig
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate as hydra_instantiate

from precision_lab.errors import InputError, OwnCodeFailed


def instantiate(group: str, node: dict[str, Any], *args: Any) -> Any:
    """Call the open set's `_target_` with its arguments. `kind` is ours and is not passed on."""
    try:
        return hydra_instantiate({"_target_": node["_target_"], **_arguments(node)}, *args, _convert_="all")
    except SystemExit as error:
        raise refusal(error, f"{group}: {node['_target_']} called sys.exit({error.code!r}).") from error
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, InputError):
            raise cause from error
        text = str(cause).split("\n")[0].rstrip(".")
        if isinstance(cause, TypeError | ValueError):
            raise refusal(cause, f"{group}: {node['_target_']} refused its arguments: {text}.") from error
        raise refusal(cause, raised(f"{group}: {node['_target_']}", cause)) from error


def bind(group: str, node: dict[str, Any]) -> Callable[..., Any]:
    """A callable for the open set: a class is instantiated, a function gets its arguments bound."""
    target = locate(group, node)
    if not callable(target):
        raise InputError(f"{group}._target_={node['_target_']} is {type(target).__name__}, not a function or class.")
    if not isinstance(target, type):
        return partial(target, **_arguments(node))
    built = instantiate(group, node)
    if not callable(built):
        raise InputError(f"{group}._target_={node['_target_']} is a class without __call__; give it one.")
    return built


def locate(group: str, node: dict[str, Any]) -> Any:
    """The class or function that `_target_` names; InputError if there is none."""
    target = node["_target_"]
    try:
        return resolve_name(target)
    except (Exception, SystemExit) as error:  # importing a user's module can raise anything
        cause = str(error).split("\n")[0].rstrip(".") or type(error).__name__
        raise refusal(
            error,
            f"{group}._target_={target} cannot be loaded ({cause}). "
            "Name an importable class or function; for a file of your own set PYTHONPATH to its folder.",
        ) from error


def raised(what: str, error: BaseException) -> str:
    """`what raised ValueError: no such gear (mine.py, line 7).`"""
    last, text = traceback.extract_tb(error.__traceback__)[-1], str(error).split("\n")[0].rstrip(".")
    return f"{what} raised {type(error).__name__}: {text} ({last.filename}, line {last.lineno})."


def refusal(error: BaseException, sentence: str) -> InputError:
    """The sentence as an InputError: OwnCodeFailed where `error` was raised in a file of the user's."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    foreign = raised_in.startswith("<") or any(Path(raised_in).is_relative_to(place) for place in _NOT_THE_USERS)
    return (InputError if foreign else OwnCodeFailed)(sentence)


_NOT_THE_USERS = [Path(__file__).parent, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]


def _arguments(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in ("_target_", "kind")}
