"""W&B's files on this machine, offline runs' and online ones', as W&B's own inspector tells them. No torch, no wandb.

`wandb leet inspect --summary --json FILE`, in processes of its own: the files' format is W&B's affair.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from precision_lab.errors import InputError
from precision_lab.tracking.runs import FILES, Kept, Told, told_of

# Loading W&B takes half a second, telling a file 0.1 s (0.31): a process tells several, by the same command.
_TELL_EACH = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = ["wandb", "leet", "inspect", "--summary", "--json", path]
    try:
        runpy.run_module("wandb", run_name="__main__")
    except SystemExit:
        pass
    for stream in (sys.stdout, sys.stderr):
        print("\\x1e", file=stream, flush=True)
"""
BATCH, AT_ONCE = 25, 4  # files of a process, processes
PATIENCE_S = 60  # of a process
_RUN = re.compile(r"(offline-)?run-\d{8}_\d{6}-")


def files_in(folder: Path) -> list[Path]:
    """The runs' .wandb files in a W&B folder, in `wandb` below it, or in one run's. InputError where there is none.

    `latest-run` is a link to a folder that is there as well.
    """
    if not os.path.isdir(folder):
        raise InputError(f"wandb-offline:{folder} is not a folder; name one of W&B's files, such as outputs/wandb.")
    runs = [
        one
        for top in (folder, folder / "wandb")
        for one in sorted(top.glob("*run-*"))
        if _RUN.match(one.name) and not one.is_symlink()
    ]
    found = [file for run in [*runs, folder] for file in sorted(run.glob("run-*.wandb")) if file.is_file()]
    if not found:
        raise InputError(f"wandb-offline:{folder} holds no W&B file; name a folder that does, such as outputs/wandb.")
    return found


def runs_in(folder: Path, kept: Kept) -> list[Told]:
    """What the files in a folder tell. One that the inspector cannot read is told with the problem."""
    files = files_in(folder)
    stamps = {file: _stamp(file) for file in files}  # taken before: what is written from now on is read the next time
    told = {file: kept.find(str(file.parent), _key(file), stamp) for file, stamp in stamps.items()}
    unknown = [file for file, known in told.items() if known is None]
    workers = min(AT_ONCE, os.cpu_count() or 1)
    batch = max(1, min(BATCH, -(-len(unknown) // workers)))
    batches = [unknown[n : n + batch] for n in range(0, len(unknown), batch)]
    pool = ThreadPoolExecutor(workers)
    try:
        for asked, answers in zip(batches, pool.map(_inspected, batches), strict=True):
            for file, answer in zip(asked, answers, strict=True):
                told[file] = _told(file, answer)
                if isinstance(answer, dict):
                    kept.keep(told[file], _key(file), stamps[file])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return [told[file] for file in files]


def _key(file: Path) -> str:
    return str(file.absolute())


def _stamp(file: Path) -> list[Any]:
    try:
        state = file.stat()
    except OSError:  # gone since: the inspector will say so
        return []
    return [state.st_size, state.st_mtime_ns]


def _told(file: Path, answer: dict[str, Any] | str) -> Told:
    place, run_id = str(file.parent), file.stem.removeprefix("run-")  # an empty file tells no id
    if isinstance(answer, str):
        return Told(place, run_id, FILES["train"], None, [], f"W&B's inspector cannot read its file ({answer})")
    config, summary = (value if isinstance(value := answer.get(key), dict) else {} for key in ("config", "summary"))
    # A run that was killed early told W&B nothing of itself.
    return told_of(place, run_id, config.get("job_type") if config else "train", config, summary)


def _inspected(files: list[Path]) -> list[dict[str, Any] | str]:
    """What the inspector says of each, or why it says nothing of use."""
    quiet = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", _TELL_EACH, *map(str, files)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=os.environ | quiet, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired as late:
        done = late
    both = ((text or b"").split(b"\x1e") + [b""] * len(files) for text in (done.stdout, done.stderr))
    said, complained = (parts[: len(files)] for parts in both)
    return [_object_in(text) or _last_line(error) for text, error in zip(said, complained, strict=True)]


def _object_in(text: bytes) -> dict[str, Any] | None:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="backslashreplace").strip().splitlines()
    return lines[-1].removeprefix("Error: ")[:200] if lines else "no answer"
