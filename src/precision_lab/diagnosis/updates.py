"""Whether an optimizer's update survives in the weights: where parameters are held in low precision, small ones vanish.

Knows one optimizer step from the same gradients' arithmetic, with float32 weights and with low-precision ones. SQNR in
dB, of the change of all weights against that of float32 training.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from precision_lab.diagnosis.patient import Patient

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Updates:
    """`lost` is the share of weights that should have changed and did not; `sqnr` of what changed, `sqnr_master` of the
    same gradients applied to float32 weights."""

    lost: float
    sqnr: float
    sqnr_master: float

    @property
    def excess(self) -> float:
        """What holding the weights in low precision costs the update, in dB."""
        return self.sqnr_master - self.sqnr


def updates(patient: Patient, build: BuildOptimizer) -> Updates:
    """One optimizer step with float32's gradients, and with the arm's, on float32 weights and on those of the arm."""
    model, own = patient.model, patient.gradients()
    exact = _change(model, build, patient.reference, torch.float32)
    master = _change(model, build, own, torch.float32)
    low = _change(model, build, own, patient.dtype) if patient.pure else master
    asked = master != 0
    lost = float(((low == 0) & asked).sum() / asked.sum().clamp_min(1))
    return Updates(lost, _sqnr(exact, low), _sqnr(exact, master))


def _change(model: nn.Module, build: BuildOptimizer, gradients: list[Tensor | None], dtype: torch.dtype) -> Tensor:
    trained = copy.deepcopy(model).to(dtype)
    before = [p.detach().clone() for p in trained.parameters()]
    for p, gradient in zip(trained.parameters(), gradients, strict=True):
        p.grad = None if gradient is None else gradient.detach().to(dtype)
    build(trained).step()
    changes = zip(trained.parameters(), before, strict=True)
    return torch.cat([(p.detach().double() - old.double()).flatten() for p, old in changes])


def _sqnr(exact: Tensor, other: Tensor) -> float:
    error, power = float((exact - other).square().sum()), float(exact.square().sum())
    return math.inf if error == 0 else 10 * math.log10(power / error) if power else 0.0
