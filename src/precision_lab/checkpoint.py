"""Checkpoints: plain values and tensors in files, written whole, read without running anything that is in them.

Knows a run's `checkpoints/` folder, and how the state of a model and of an optimizer is taken and put back bit by
bit; refuses to know loops. A file is torch.save's, read with weights_only=True, which builds tensors and plain values
and nothing else; it is a zip archive with a checksum of each of its parts, which torch writes and does not look at.
What a module or an optimizer keeps in plain Python attributes is in no checkpoint.
"""

import re
import time
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from precision_lab.errors import InputError
from precision_lab.nested import map_tensors
from precision_lab.recorder import writing, written_whole

SCHEMA_VERSION = 1
FOLDER = "checkpoints"
KEPT = 2


class NotPlain(Exception):
    """Something in a state can't be put into a checkpoint: the text says what."""


# --- the files of a run ---------------------------------------------------------------------------------------


class Checkpoints:
    """Those of one run: `checkpoints/step_00000400.pt` is its state after 400 steps."""

    def __init__(self, folder: Path, every: int | None, minutes: float | None) -> None:
        """`every` steps and `minutes` are when they are due; None: not by that. `folder` is the run's."""
        self._folder, self._every = folder / FOLDER, every
        self._seconds = minutes * 60 if minutes else float("inf")
        self._written = time.monotonic()

    def due(self, done: int, total_steps: int) -> bool:
        """Whether one is to be written after `done` steps; where they go by steps, the last one has one too."""
        by_steps = self._every is not None and (done % self._every == 0 or done == total_steps)
        return by_steps or time.monotonic() - self._written >= self._seconds

    def write(self, done: int, state: dict[str, Any], troubles: Iterable[int]) -> Path:
        """Write the state after `done` steps; keep it, the one before, and the last one before each trouble.

        Raises NotPlain, or CannotWrite.
        """
        _refuse_what_is_not_plain(state)
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step_{done:08}.pt"
        with written_whole(path) as file:
            _save({"schema": SCHEMA_VERSION, **state}, file)
        self._written = time.monotonic()
        written = written_in(self._folder.parent)
        there = [step_of(one) for one in written]
        wanted = {*there[:KEPT], *(max((step for step in there if step < t), default=None) for t in troubles)}
        for old in written:
            if step_of(old) not in wanted:
                with writing(old):
                    old.unlink()
        for left in _named(self._folder, "left"):  # the run has come as far again
            if left.is_file() and step_of(left) <= done:
                with writing(left):
                    left.unlink()
        return path

    def begin_after(self, done: int) -> None:
        """The run goes on after `done` steps, or from its start: later ones are put aside."""
        with writing(self._folder):
            for path in _named(self._folder):
                if step_of(path) > done:
                    path.rename(path.with_suffix(".left"))


class _Noting:
    """A file that keeps what a write raised: torch.save, broken off, raises an error of its own instead."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.raised = file, None
        self.flush = file.flush

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except BaseException as error:
            self.raised = error
            raise


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    noting = _Noting(file)
    try:
        torch.save(content, noting)
    except RuntimeError:
        if noting.raised:
            raise noting.raised from None
        raise


def written_in(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder, the newest first."""
    return [path for path in _named(folder / FOLDER) if not path.is_dir()]


def _named(folder: Path, suffix: str = "pt") -> list[Path]:
    found = (path for path in folder.glob(f"step_*.{suffix}") if re.fullmatch(r"step_\d{1,18}", path.stem))
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """`step_00000400.pt` -> 400."""
    return int(path.stem.removeprefix("step_"))


def read(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, on the CPU. InputError for a file that is none, damaged, or of a newer version."""
    content = _load(path)
    if not isinstance(content, dict) or not isinstance(content.get("schema"), int):
        raise InputError(f"{path} is no checkpoint of a run.")
    if content["schema"] > SCHEMA_VERSION:
        raise InputError(f"{path} is of a newer version of precision-lab; this one reads up to {SCHEMA_VERSION}.")
    return content


def _load(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a file.")
    try:
        if _sums_are_right(path):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}).") from error
    except Exception as error:  # torch, zip and pickle raise what they like for a damaged file
        if _may_be_pickled(path) and ("Unsupported" in str(error) or "weights_only" in str(error).lower()):
            raise InputError(
                f"{path} holds more than tensors and plain values, and was not read: it could run any code."
            ) from error
        raise InputError(f"{path} is damaged and cannot be read.") from error
    raise InputError(f"{path} is damaged and cannot be read.")


def _may_be_pickled(path: Path) -> bool:
    """Whether it begins as a zip archive or, in torch's older format, as a pickle does; a text does not."""
    with path.open("rb") as file:
        return file.read(2).startswith((b"PK", b"\x80"))


def _sums_are_right(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return True  # damaged, or a file of weights in torch's older format, which has none
    with zipfile.ZipFile(path) as archive:
        return archive.testzip() is None


def _refuse_what_is_not_plain(value: Any, where: str = "") -> None:
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _refuse_what_is_not_plain(key, where)
            _refuse_what_is_not_plain(item, f"{where}.{key}" if where else str(key))
    elif type(value) in (list, tuple):
        for item in value:
            _refuse_what_is_not_plain(item, where)
    elif type(value) in (Tensor, nn.Parameter):
        _refuse_what_is_not_plain(value.__dict__, where)  # attributes of the user's are saved with it
    elif type(value) not in (str, int, float, bool, type(None)):
        raise NotPlain(f"{where} is of type {type(value).__name__}")


# --- models and optimizers ---------------------------------------------------------------------------------------


def model_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Parameters, all buffers and what modules keep as extra state."""
    model = uncompiled(model)
    extra = {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}
    # detached: without hooks and without the attributes that a model gives them, which can be anything
    return {
        "parameters": {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)},
        "buffers": {name: buffer.detach() for name, buffer in model.named_buffers(remove_duplicate=False)},
        "extra": extra,
    }


def load_model(model: nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Put a `model_state` back, bit by bit. InputError, and nothing is changed, where the model is another one."""
    model = uncompiled(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_same(parameters, state["parameters"])
    _check_modules(model, state["buffers"])
    device = next(iter(parameters.values())).device
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state["parameters"][name])
        for name in {**dict(model.named_buffers(remove_duplicate=False)), **state["buffers"]}:
            owner, _, last = name.rpartition(".")
            _load_buffer(model.get_submodule(owner), last, state["buffers"].get(name), device)
    if state["extra"]:
        model.load_state_dict(state["extra"], strict=False)


def _load_buffer(module: nn.Module, name: str, saved: Tensor | None, device: torch.device) -> None:
    if not hasattr(module, name):  # registered by forward
        module.register_buffer(name, None)
    here = getattr(module, name)
    if here is not None and saved is not None and _same_kind(here, saved):
        here.copy_(saved)
    else:  # forward may have put another tensor there, as a cache that grows, or none
        setattr(module, name, saved if saved is None else saved.to(device if here is None else here.device))


def _same_kind(here: Tensor, saved: Tensor) -> bool:
    whole = here.layout == saved.layout == torch.strided and 0 not in here.stride()
    return whole and here.shape == saved.shape and here.dtype is saved.dtype


def uncompiled(model: nn.Module) -> nn.Module:
    """The module itself that torch.compile has wrapped, or what is not compiled."""
    return getattr(model, "_orig_mod", model)


def _check_same(parameters: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    here = {name: (tuple(p.shape), p.dtype) for name, p in parameters.items()}
    there = {name: (tuple(p.shape), p.dtype) for name, p in saved.items()}
    if here != there:
        name = next(name for name in (*here, *there) if here.get(name) != there.get(name))
        raise InputError(
            f"The checkpoint is of another model: its {name} is {_shown(there.get(name))}, here it is "
            f"{_shown(here.get(name))}."
        )


def _check_modules(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    there = {name for name, _ in model.named_modules(remove_duplicate=False)}
    if gone := [name for name in buffers if name.rpartition(".")[0] not in there]:
        raise InputError(
            f"The checkpoint holds {gone[0]}, and the model has no such module: one that forward makes must be there "
            "from the start for a run to go on."
        )


def _shown(kind: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return f"{list(kind[0])} in {str(kind[1]).removeprefix('torch.')}" if kind else "missing"


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put an optimizer's state back, bit by bit; it must be over the same parameters."""
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, saved in state["state"].items():
        if not isinstance(number, int):  # of no parameter
            continue
        loaded, device = optimizer.state[parameters[number]], parameters[number].device
        for key, value in saved.items():
            # torch casts to the parameter's dtype, which an optimizer's own float32 copies would not survive
            if not isinstance(value, Tensor) or loaded[key].dtype is not value.dtype:
                loaded[key] = map_tensors(lambda tensor, device=device: tensor.to(device), value)


def load_weights(model: nn.Module, path: Path) -> None:
    """Give the model the weights of a checkpoint, or of a file of weights by name.

    The dtypes may differ. InputError where names or shapes do, or for a file that holds no weights.
    """
    weights = _weights_in(_load(path))
    if not weights:
        raise InputError(f"trainer.init_from={path} is neither a checkpoint nor a file of weights by name.")
    here = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {name: tensor for name, tensor in here.items() if name in model.state_dict()}
    wrong = [name for name, tensor in wanted.items() if name not in weights or weights[name].shape != tensor.shape]
    if wrong:
        there = list(weights[wrong[0]].shape) if wrong[0] in weights else "missing"
        raise InputError(
            f"trainer.init_from={path} is of another model: its {wrong[0]} is {there}, here it is "
            f"{list(wanted[wrong[0]].shape)}."
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(weights[name])


def _weights_in(content: Any) -> dict[str, Tensor] | None:
    with suppress(KeyError, TypeError, IndexError):  # a checkpoint of a run
        model = content["trainer"]["model"]
        content = {**model["parameters"], **model["buffers"]}
    right = isinstance(content, dict) and all(isinstance(weight, Tensor) for weight in content.values())
    return content if right else None
