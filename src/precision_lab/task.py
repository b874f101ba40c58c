"""Tasks `(model, batch) -> loss, metrics`, and what they read in a model's output.

The loss is always formed from float32 logits: near 2.9 a bfloat16 loss moves in steps of 0.0156.
Under autocast this changes nothing, since cross-entropy takes float32 there anyway.
Metrics cost time and are computed in evaluation alone: while training a task returns none.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from precision_lab.errors import InputError

Task = Callable[[nn.Module, Any], tuple[Tensor, dict[str, Tensor]]]


class Classification:
    """Cross-entropy of `model(images) -> logits [B, C]` on batches `(images [B, ...], labels [B])`.

    Auxiliary heads (a torchvision namedtuple with `aux_logits*`) add their loss times `aux_weight`.
    """

    def __init__(self, label_smoothing: float = 0.0, aux_weight: float = 0.3):
        number = isinstance(label_smoothing, int | float) and not isinstance(label_smoothing, bool)
        if not number or not 0 <= label_smoothing <= 1:
            raise InputError(f"task.label_smoothing={label_smoothing} is not valid; it must be a number from 0 to 1.")
        self.label_smoothing, self.aux_weight = label_smoothing, aux_weight

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch
        output = model(images)
        logits = main_output(output)  # [B, C]
        loss = self._cross_entropy(logits, labels)
        for name in getattr(output, "_fields", ()):
            if name.startswith("aux_logits") and getattr(output, name) is not None:
                loss = loss + self.aux_weight * self._cross_entropy(getattr(output, name), labels)
        if model.training:
            return loss, {}
        return loss, {"accuracy": (logits.argmax(-1) == labels).float().mean()}

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.label_smoothing)


class LanguageModel:
    """Next-token cross-entropy in nats a token of `model(tokens [B, T]) -> logits [B, T, V]`.

    A batch is `[B, T + 1]` tokens: the model reads the first T and is scored on the last T.
    """

    def __call__(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = main_output(model(batch[:, :-1]))  # [B, T, V]
        targets = batch[:, 1:]  # [B, T]
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        if model.training:
            return loss, {}
        return loss, {"accuracy": (logits.argmax(-1) == targets).float().mean()}


def main_output(output: Any) -> Tensor:
    """The logits in what a model returned: a tensor, an object with `.logits`, or a tuple that begins with them."""
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise InputError(
        f"The model returned {type(output).__name__}; this task reads a tensor, an object with .logits or a "
        "tuple that begins with the logits. For any other output use task=custom."
    )
