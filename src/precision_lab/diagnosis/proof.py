"""What a cure is worth: the arm, the cured arm and float32 trained from the same weights, and what each costs.

Knows a few training steps and their losses, what is saved for backward, and, where the arms run in their own arithmetic
on the device that is meant, their times in alternation. Refuses to form ratios of emulated times.
"""

import copy
import statistics
from dataclasses import dataclass, replace
from typing import Any

import numpy

from precision_lab.arm_schema import PrecisionConfig, Target
from precision_lab.assemble import Workload, assemble, make_trainer, resolve, training_batches
from precision_lab.benchmark.measure import measure
from precision_lab.config import Config, load_precision
from precision_lab.identity import arm_label
from precision_lab.inspection import measure_memory
from precision_lab.seeds import derive, seed_globals
from precision_lab.settings import BenchmarkConfig

_LAST = 0.25  # share of the steps whose mean loss is compared


@dataclass(frozen=True)
class Trained:
    """An arm after some steps. Losses in the arm's own arithmetic; memory in MiB, saved for backward."""

    arm: str
    losses: list[float]
    skipped: int
    saved_activations_mib: float
    saved_weight_casts_mib: float

    @property
    def loss(self) -> float:
        """The mean of the last quarter of the steps."""
        return statistics.fmean(self.losses[-max(1, round(_LAST * len(self.losses))) :])


def train_arms(
    asked: Config, workload: Workload, target: str, emulates: bool, arms: list[PrecisionConfig], steps: int
) -> list[Trained]:
    """Train float32 and each of `arms` for some steps, from the weights of `workload`, on the same batches."""
    fp32 = load_precision("fp32")
    emulated = [replace(arm, emulate=Target[target]) if emulates else arm for arm in arms]
    return [_train(replace(asked, precision=arm), workload, steps) for arm in (fp32, *emulated)]


def _train(asked: Config, workload: Workload, steps: int) -> Trained:
    ready = assemble(resolve(asked), replace(workload, model=copy.deepcopy(workload.model)))
    trainer, batches = make_trainer(ready), training_batches(ready)
    seed_globals(derive(asked.seed, "dropout"))
    trainer.model.train()
    for done in range(steps):
        trainer.rate.set(done, max(steps, ready.total_steps))
        trainer.step(batches)
    losses, _, skipped = trainer.window.read()
    memory = measure_memory(trainer, next(training_batches(ready)), compiled=False)
    return Trained(
        arm_label(asked.precision),
        numpy.asarray(losses).tolist(),
        int(skipped.sum()),
        memory["mem/saved_activations_mib"],
        memory["mem/saved_weight_casts_mib"],
    )


def time_arms(asked: Config, arms: list[PrecisionConfig], budget_s: float) -> dict[str, dict[str, Any] | None]:
    """Ratio of each arm's speed to float32's here, by label, timed in alternation; None for one that was not."""
    settings = BenchmarkConfig("", "fp32", budget_s, 0.01, False, False, None)
    by_label = {arm_label(arm): replace(asked, precision=arm) for arm in (load_precision("fp32"), *arms)}
    made = measure(by_label, settings, lambda measured: None)
    columns = {column["arm"]: column for column in made["columns"] if not column["again"]}
    return {label: columns[label]["ratio"] if label in columns else None for label in by_label if label != "fp32"}
