"""What a run has found so far: figures, the loss over the training, files that cannot be read. No torch.

Kept by checkpoints, so that a run that goes on ends with all of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from precision_lab.losses import Curve

UNREADABLE_SHOWN = 10


@dataclass
class Findings:
    """`final` and `best` are keyed by metric name."""

    final: dict[str, float | None] = field(default_factory=dict)
    best: dict[str, float | None] = field(default_factory=dict)
    curve: Curve = field(default_factory=Curve)
    resumed_at: list[int] = field(default_factory=list)  # steps done when an attempt went on from a checkpoint
    unreadable: list[str] = field(default_factory=list)  # files of the data that were left out or replaced

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint: what `of_state` takes."""
        return vars(self) | {"curve": self.curve.points}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Findings":
        return cls(**state | {"curve": Curve(state["curve"])})

    def add_unreadable(self, names: Iterable[str]) -> None:
        self.unreadable = sorted({*self.unreadable, *names})

    def unreadable_files(self) -> dict[str, Any] | None:
        """How many they are, and the first of them, as result.json says it; None for none."""
        names = self.unreadable
        return {"count": len(names), "first": names[:UNREADABLE_SHOWN]} if names else None
