"""One step of what was asked, looked at operation by operation on the device that is here."""

import torch

from precision_lab import identity
from precision_lab.assemble import assemble, make_trainer, training_batches
from precision_lab.config import Config
from precision_lab.errors import InputError
from precision_lab.probe.ops import op_map, render


def inspect_step(asked: Config, by_module: bool, width: int) -> str:
    """The op map of the first training batch as text of at most `width` columns."""
    if asked.device.compile:
        raise InputError("A compiled model cannot be looked at operation by operation; drop device.compile=true.")
    ready = assemble(asked)
    trainer, batch = make_trainer(ready), next(training_batches(ready))
    trainer.model.train()

    def forward() -> torch.Tensor:
        with trainer.policy.autocast():
            return trainer.task(trainer.model, batch)[0]

    rows = op_map(trainer.model, forward)
    title = f"{identity.arm_label(ready.asked.precision)} on {trainer.policy.device.type}, one training step"
    return "\n".join([*ready.notes, title, "", render(rows, by_module=by_module, width=width)])
