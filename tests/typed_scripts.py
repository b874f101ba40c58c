"""A script of the repository, run as a person types it, or taken as a module."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from precision_lab.config import ROOT


def run(
    script: str, *words: Any, columns: int = 80, cwd: Path | None = None, limit_s: float = 300, **variables: str
) -> Any:
    """The finished process, with what it printed; `variables` are added to the environment."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"), "WANDB_MODE": "disabled", "COLUMNS": str(columns), "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=environment | variables, timeout=limit_s
    )


def module(script: str) -> ModuleType:
    """The script as a module of its own, with nothing run."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / "scripts" / script)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
