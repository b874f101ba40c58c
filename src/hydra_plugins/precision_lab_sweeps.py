"""Hydra's seam for sweeps: `isolated` runs each job in a fresh process, `grid` makes the jobs and writes no secret.

Hydra imports this module at every start, so that it loads what a sweep needs only when there is one.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

MOST_JOBS = 10_000


class IsolatedLauncher(Launcher):
    """One fresh process a job."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; raises Ended with the sweep's exit code unless it is 0."""
        from precision_lab.errors import Ended
        from precision_lab.sweep import lead

        composed = [self._compose(list(words), initial_job_idx + n) for n, words in enumerate(job_overrides)]
        now = Path(self.config.hydra.sweep.dir).name
        code = lead.lead(composed, lambda sweep, secrets: write_command(self.config, sweep / "commands" / now, secrets))
        if code:
            raise Ended(code)
        return [JobReturn(overrides=list(words), status=JobStatus.COMPLETED) for words in job_overrides]

    def _compose(self, words: list[str], number: int) -> Any:
        from precision_lab.config import typed

        composed = self.hydra_context.config_loader.load_sweep_config(self.config, words)
        with open_dict(composed):
            composed.hydra.job.id, composed.hydra.job.num = str(number), number
            HydraConfig.instance().set_config(composed)  # for ${hydra:...} in a job's own values
            experiment = composed.hydra.runtime.choices.get("experiment")
            del composed["hydra"]
        return typed(composed, experiment), words


class GridSweeper(BasicSweeper):
    """Hydra's basic sweeper; multirun.yaml, which holds the command line, is written without secrets."""

    def __init__(self, params: dict[str, str] | None = None):
        super().__init__(max_batch_size=None, params=params)

    def sweep(self, arguments: list[str]) -> Any:
        from precision_lab.errors import InputError

        if isinstance(self.launcher, BasicLauncher):
            raise InputError(
                "hydra/launcher=basic runs all jobs in one process, where backend flags and memory peaks leak from one "
                "to the next; use hydra/launcher=isolated."
            )
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        jobs = math.prod(map(_count, overrides))
        if jobs > MOST_JOBS:
            raise InputError(f"The sweep has {jobs:,} jobs; at most {MOST_JOBS:,} are taken.")
        (batch,) = self.split_arguments(overrides, None)
        if not isinstance(self.launcher, IsolatedLauncher):  # which composes and checks them itself
            self.validate_batch_is_legal(batch)
            write_command(self.config, Path(self.config.hydra.sweep.dir), [])
        results = self.launcher.launch(batch, initial_job_idx=0)
        for result in results:
            _ = result.return_value  # raises what the job raised
        return [results]


def _count(override: Override) -> int:
    """How many values a word gives its key; a range is not made for it. InputError for one without values to list."""
    from precision_lab.errors import InputError

    if not override.is_sweep_override():
        return 1
    sweep = override.value()
    if isinstance(sweep, RangeSweep):
        length = (sweep.stop - sweep.start) / sweep.step if sweep.step else math.inf
        if not math.isfinite(length):
            raise InputError(
                f"{override.input_line} has no end; write range(START,STOP,STEP), with a step that is not 0."
            )
        return max(0, math.ceil(length))
    if not override.is_discrete_sweep():
        raise InputError(f"{override.input_line} lists no values; write them out, as 1,2,3, or a range(START,STOP).")
    return len(list(override.sweep_iterator()))


def write_command(config: DictConfig, folder: Path, secrets: list[str]) -> None:
    """Write `folder`/multirun.yaml: the sweep's own config with the overrides, as Hydra composed it."""
    from precision_lab.redaction import redact, secrets_in

    values = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    folder.mkdir(parents=True, exist_ok=True)
    clean = redact(values, secrets + secrets_in(os.environ, values))
    (folder / "multirun.yaml").write_text(yaml.safe_dump(clean, sort_keys=False, allow_unicode=True), encoding="utf-8")
