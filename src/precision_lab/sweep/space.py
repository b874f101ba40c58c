"""Whether the disk has room for a sweep, asked before its first job. No torch, and nothing is written."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from precision_lab.errors import InputError
from precision_lab.folders import outputs
from precision_lab.sizes import MIB
from precision_lab.sweep.plan import Job

WANTED_MIB = 64  # at least, however few the jobs
JOB_MIB = 1  # without its checkpoints, which nobody knows the size of beforehand


def require_space(jobs: list[Job], disk_usage: Callable[[Path], Any] = shutil.disk_usage) -> None:
    """InputError if there is too little free space where the outputs of the jobs that wait will lie.

    OSError from a disk that does not tell.
    """
    for folder, count in Counter(outputs(job.asked) for job in jobs if job.status == "waiting").items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free, wanted = disk_usage(there).free / MIB, max(WANTED_MIB, JOB_MIB * count)
        if free < wanted:
            many = f"{count} jobs to run want" if count > 1 else "1 job to run wants"
            raise InputError(
                f"{folder} has {free:.1f} MiB of free space, and {many} at least {wanted} MiB; make room or set "
                "paths.outputs."
            )
