"""What a case of the zoo is: a net with one planted fault, or a healthy one, and what a diagnosis must say of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Build = Callable[[int], nn.Module]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW at 1e-3 over what requires a gradient."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


@dataclass(frozen=True)
class Case:
    """One net, its batch, and the arm under which it is judged.

    `build` and `mended` are functions of a seed, as is `batch`; `task` is `(model, batch) -> loss, {}`.
    `culprit`: the names that count as the right answer, best first: a path as in `named_modules()`, an operation as
    in `torch.ops.aten`, or a setting; empty for a healthy net. `cure`: "override" where settings of the precision
    heal it, "mended" where the code itself has to change. `mended` builds the same net written properly, None where
    nothing in the net is wrong, but the setting.
    """

    name: str
    source: str
    says: str
    build: Build
    task: Callable[[nn.Module, Any], tuple[Tensor, dict[str, Tensor]]]
    batch: Callable[[int], Any]
    precision: str
    target: str
    culprit: tuple[str, ...] = ()
    cure: str = "override"
    mended: Build | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` builds from this seed, whatever was drawn before; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of float32 logits [B, K]."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).float(), labels), {}


def own_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A model that computes its loss itself."""
    return model(*batch), {}


def samples(*shape: int, classes: int = 10, shift: float = 0.0, scale: float = 1.0) -> Callable[[int], Any]:
    """Of a seed: normal inputs of this shape, times `scale`, plus `shift`, and a random label for each."""

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1000 + seed)
        inputs = torch.randn(shape, generator=draw) * scale + shift
        return inputs, torch.randint(classes, shape[:1], generator=draw)

    return batch
