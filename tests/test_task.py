"""Tasks against cross-entropy by hand, and what a model may return."""

import math
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from own_code.training import ARMS, policy_of
from precision_lab.errors import InputError
from precision_lab.task import Classification, LanguageModel, main_output

# logits log(1, 2, 5) are probabilities 1/8, 2/8, 5/8
LOGITS = torch.tensor([[1.0, 2.0, 5.0], [5.0, 2.0, 1.0]]).log()
LABELS = torch.tensor([2, 1])
LOSS = -(math.log(5 / 8) + math.log(2 / 8)) / 2  # accuracy 1/2


class Returns(nn.Module):
    """Whatever it was given, whatever it is asked."""

    def __init__(self, output):
        super().__init__()
        self.output, self.asked = output, None

    def forward(self, batch):
        self.asked = batch
        return self.output


GoogLeNetOutputs = namedtuple("GoogLeNetOutputs", ["logits", "aux_logits2", "aux_logits1"])
Sequence = namedtuple("Sequence", ["first", "second"])


@dataclass
class ModelOutput:
    loss: Tensor | None
    logits: Tensor


def test_classification_is_the_mean_cross_entropy():
    loss, metrics = Classification()(Returns(LOGITS).eval(), (torch.zeros(2, 1), LABELS))
    assert loss.item() == pytest.approx(LOSS, rel=1e-6)
    assert {name: value.item() for name, value in metrics.items()} == {"accuracy": 0.5}


def test_label_smoothing_spreads_over_the_classes():
    loss, _ = Classification(label_smoothing=0.3)(Returns(LOGITS), (torch.zeros(2, 1), LABELS))
    all_classes = -(math.log(1 / 8) + math.log(2 / 8) + math.log(5 / 8)) / 3
    assert loss.item() == pytest.approx(0.7 * LOSS + 0.3 * all_classes, rel=1e-6)


def test_language_model_scores_the_next_token():
    tokens = torch.tensor([[0, 2, 1]])  # reads 0, 2; is scored on 2, 1
    model = Returns(LOGITS[None]).eval()
    loss, metrics = LanguageModel()(model, tokens)
    assert model.asked.tolist() == [[0, 2]]
    assert loss.item() == pytest.approx(LOSS, rel=1e-6)
    assert metrics["accuracy"].item() == 0.5


@pytest.mark.parametrize("arm", [*ARMS, "tf32"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, torch.float32])
def test_the_loss_is_float32_and_formed_from_float32_logits(arm, low):
    with policy_of(arm).autocast():
        images, _ = Classification()(Returns(LOGITS.to(low)), (torch.zeros(2, 1), LABELS))
        words, _ = LanguageModel()(Returns(LOGITS[None].to(low)), torch.tensor([[0, 2, 1]]))
    rounded = LOGITS.to(low).double()
    exact = -rounded.log_softmax(1)[[0, 1], LABELS].mean().item()
    for loss in (images, words):
        assert loss.dtype is torch.float32
        assert loss.item() == pytest.approx(exact, rel=1e-6)


def test_a_bf16_pure_model_gives_a_float32_loss():
    model = policy_of("bf16_pure").prepare(nn.Linear(4, 3))
    loss, _ = Classification()(model, (torch.randn(2, 4), LABELS))
    assert model.weight.dtype is torch.bfloat16
    assert loss.dtype is torch.float32
    loss.backward()
    assert model.weight.grad.dtype is torch.bfloat16


def test_metrics_are_for_evaluation_alone():
    for task, output, batch in (
        (Classification(), LOGITS, (torch.zeros(2, 1), LABELS)),
        (LanguageModel(), LOGITS[None], torch.tensor([[0, 2, 1]])),
    ):
        model = Returns(output)
        assert task(model.train(), batch)[1] == {}
        assert set(task(model.eval(), batch)[1]) == {"accuracy"}


# ---- what a model may return ----------------------------------------------------------------------------


def test_auxiliary_heads_count_with_their_weight():
    uniform = torch.zeros(2, 3)
    output = GoogLeNetOutputs(LOGITS, aux_logits2=uniform, aux_logits1=LOGITS)
    for weight in (0.3, 0.5):
        loss, metrics = Classification(aux_weight=weight)(Returns(output).eval(), (torch.zeros(2, 1), LABELS))
        assert loss.item() == pytest.approx(LOSS + weight * (math.log(3) + LOSS), rel=1e-6)
        assert metrics["accuracy"].item() == 0.5  # of the main head alone


def test_an_auxiliary_head_that_is_none_does_not_count():
    output = GoogLeNetOutputs(LOGITS, aux_logits2=None, aux_logits1=None)
    loss, _ = Classification()(Returns(output), (torch.zeros(2, 1), LABELS))
    assert loss.item() == pytest.approx(LOSS, rel=1e-6)


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        ModelOutput(None, LOGITS),
        (LOGITS, torch.ones(7)),
        [LOGITS],
        Sequence(LOGITS, None),
        GoogLeNetOutputs(LOGITS, None, None),
    ],
)
def test_outputs_that_hold_the_logits(output):
    assert main_output(output) is LOGITS
    loss, _ = Classification()(Returns(output), (torch.zeros(2, 1), LABELS))
    assert loss.item() == pytest.approx(LOSS, rel=1e-6)


@pytest.mark.parametrize("output", [{"out": LOGITS}, "text", None, (), [], ({"a": 1},), ModelOutput(LOGITS, None), 3.0])
def test_any_other_output_is_told_in_a_sentence(output):
    for task, batch in (
        (Classification(), (torch.zeros(2, 1), LABELS)),
        (LanguageModel(), torch.tensor([[0, 2, 1]])),
    ):
        with pytest.raises(InputError) as told:
            task(Returns(output), batch)
        assert type(output).__name__ in str(told.value)
        assert "task=custom" in str(told.value)
