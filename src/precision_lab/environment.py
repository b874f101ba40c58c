"""Where and with what a run was made: hardware fingerprint, versions, git state, command."""

import contextlib
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from precision_lab import config, hardware


def environment_of(device: torch.device) -> dict[str, Any]:
    """What environment.json says of machine, process and code.

    The fingerprint decides which times may be put in one ratio.
    """
    return {
        "fingerprint": hardware.fingerprint(device),
        "host": platform.node(),
        "pid": os.getpid(),
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **_versions(), **_cuda_versions(device)},
        "git": _git(),
    }


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    for package in ("torchvision", "numpy", "hydra-core", "omegaconf", "wandb"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _cuda_versions(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    return {"cuda": torch.version.cuda or torch.version.hip, "cudnn": torch.backends.cudnn.version()}


def _git() -> dict[str, Any]:
    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(config.ROOT), *words], capture_output=True, text=True, timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changes = ask("status", "--porcelain")
    return {"sha": ask("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}
