"""The W&B mirror of a run: the same numbers, never able to stop or slow training. No torch.

The only module that imports wandb, and only when it is not disabled. Any failure is one warning;
from then on the mirror is `degraded` and silent. The local files are complete without it.
"""

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precision_lab.config import WandbConfig, WandbMode

log = logging.getLogger("precision_lab")

# Seconds. W&B takes about 2.4 times init_timeout to give up; together they stay under 30.
INIT_TIMEOUT = 8
FINISH_TIMEOUT = 8


class Mirror:
    """One W&B run. `state` is its mode, or `degraded` once anything failed."""

    def __init__(self, asked: WandbConfig, folder: Path, **init: Any):
        """W&B's files go to `folder`/wandb, shared by all runs of a project, so that one viewer sees them all."""
        self.state = asked.mode.name
        self._run: Any = None
        if asked.mode is WandbMode.disabled:
            return
        try:
            self._run = self._start(asked, folder, init)
        except Exception as error:
            self._degrade(error)

    def _start(self, asked: WandbConfig, folder: Path, init: dict[str, Any]) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else even offline looks up a host
        import wandb

        # An id of its own for every attempt: two attempts under one id leave two fragments.
        run_id = f"{init['name'][:100]}-{time.time_ns() // 1_000_000:x}"
        run = wandb.init(
            project=asked.project,
            dir=str(folder),
            id=run_id,
            mode=asked.mode.name,
            reinit="finish_previous",
            settings=wandb.Settings(
                init_timeout=INIT_TIMEOUT,
                finish_timeout=FINISH_TIMEOUT,
                console="off",
                silent=True,
                x_disable_meta=True,  # it holds the command line, secrets too; environment.json has it redacted
            ),
            **init,
        )
        run.define_metric("*", step_metric="train/step")  # our own step: W&B's restarts at 0 on a resume
        return run

    def log(self, values: Mapping[str, Any]) -> None:
        self._try(lambda: self._run.log(dict(values)))

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        def close() -> None:
            self._run.summary.update({**summary, "status": status})
            self._run.finish(exit_code=0 if status == "completed" else 1)

        self._try(close)

    def _try(self, action: Any) -> None:
        if self._run is None:
            return
        try:
            action()
        except Exception as error:
            self._degrade(error)

    def _degrade(self, error: Exception) -> None:
        self._run, self.state = None, "degraded"
        text = str(error).strip().split("\n")[0]
        log.warning("W&B stopped (%s: %s); training goes on, the run folder is complete.", type(error).__name__, text)
