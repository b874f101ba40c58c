"""What a model asks of its device's autocast, answered by the CPU that stands for it.

Code written for CUDA says torch.autocast("cuda", enabled=False) around what has to stay in float32, or
custom_fwd(device_type="cuda") on an autograd Function. Of CPU tensors torch would do neither.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import autocast_mode


def redirect(target: str, device_type: str) -> Callable[[], None]:
    """From now on `target` means `device_type` to torch.autocast and its kin; returns what ends that."""
    patched = [
        (autocast_mode.autocast, "__init__", 1),
        (autocast_mode, "_cast", 1),
        (torch, "is_autocast_enabled", 0),
        (torch, "get_autocast_dtype", 0),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    for owner, name, place in patched:
        setattr(owner, name, _redirected(getattr(owner, name), place, target, device_type))

    def end() -> None:
        for owner, name, original in before:
            setattr(owner, name, original)

    return end


def _redirected(original: Callable, place: int, target: str, device_type: str) -> Callable:
    """The device is the argument at `place`; a question without one is about CUDA."""

    @functools.wraps(original)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_type") == target:
            kwargs["device_type"] = device_type
        elif len(args) > place and isinstance(args[place], str) and args[place] == target:
            args = (*args[:place], device_type, *args[place + 1 :])
        elif not args and not kwargs and target == "cuda":
            args = (device_type,)
        return original(*args, **kwargs)

    return asked
