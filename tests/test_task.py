"""Tasks against cross-entropy by hand, what a model may return, and how a workload is put together."""

import math
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from own_code.training import ARMS, policy_of
from precision_lab.config import compose
from precision_lab.errors import InputError
from precision_lab.hashing import content_hash
from precision_lab.task import Classification, LanguageModel, Workload, build, main_output

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


# ---- putting a workload together -------------------------------------------------------------------------


def built(*overrides: str) -> Workload:
    return build(compose(["precision=fp32", *overrides]))


def test_a_models_nulls_are_filled_from_the_dataset():
    work = built("model=mlp", "model.hidden=[5]", "dataset=digits")
    assert work.model.layers[0][0].in_features == 8 * 8
    assert work.model.head.out_features == 10
    work = built("model=gpt", "model.layers=1", "dataset=synthetic_tokens", "dataset.vocab_size=48")
    assert work.model.token_embedding.num_embeddings == 48


def test_a_datasets_nulls_are_filled_from_the_model():
    work = built("model=gpt", "model.layers=1", "model.context=12", "dataset=synthetic_tokens", "dataset.samples=20")
    assert work.data.train[0].shape == (13,)
    work = built("model=mlp", "model.channels=3", "model.image_size=11", "dataset=digits")
    assert work.data.train[0][0].shape == (3, 11, 11)
    assert work.model(work.data.train[0][0][None]).shape == (1, 10)


def test_a_fact_that_both_leave_open_takes_the_datasets_default():
    work = built("model=cnn", "model.widths=[4]", "dataset=synthetic_images", "dataset.samples=20")
    assert work.data.train[0][0].shape == (3, 32, 32)
    assert work.model.blocks[0][0].in_channels == 3


@pytest.mark.parametrize("workload", ["mlp", "gpt"])
def test_initial_weights_and_data_are_equal_in_every_arm_and_differ_by_seed(workload):
    chosen = {
        "mlp": ["model=mlp", "dataset=digits"],
        "gpt": ["model=gpt", "model.layers=1", "dataset=synthetic_tokens", "dataset.samples=20"],
    }[workload]
    made = {arm: build(compose([f"precision={arm}", "seed=3", *chosen])) for arm in ARMS}
    weights = {content_hash(work.model.state_dict()) for work in made.values()}
    assert len(weights) == 1
    assert {p.dtype for work in made.values() for p in work.model.parameters()} == {torch.float32}
    other = built("seed=4", *chosen)
    assert content_hash(other.model.state_dict()) not in weights
    assert {work.data.hash for work in made.values()} == {other.data.hash}


def test_a_custom_model_gets_the_facts_it_asks_for_with_null():
    work = built(
        "model=custom",
        "model._target_=precision_lab.models.CNN",
        "+model.num_classes=null",
        "+model.channels=null",
        "+model.widths=[3]",
        "dataset=digits",
    )
    assert work.model.head.out_features == 10
    assert work.model.blocks[0][0].in_channels == 1


def test_a_fact_that_nobody_tells_is_asked_for_in_a_sentence():
    with pytest.raises(InputError) as told:
        built("model=custom", "model._target_=precision_lab.models.GPT", "+model.vocab_size=null", "dataset=digits")
    assert str(told.value).count("model.vocab_size") == 2
    assert "dataset=digits" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_model_that_is_no_module_is_told_in_a_sentence():
    with pytest.raises(InputError, match=r"model\._target_=collections\.OrderedDict built OrderedDict"):
        built("model=custom", "model._target_=collections.OrderedDict", "dataset=digits")


@pytest.mark.parametrize("target", ["torch.nn.Linear", "no.such.Thing", "own_code.mine.regression"])
def test_a_target_that_cannot_be_built_is_told_in_a_sentence(target):
    with pytest.raises(InputError) as told:
        built("model=custom", f"model._target_={target}", "dataset=digits")
    assert target in str(told.value)
    assert "\n" not in str(told.value)


def test_a_function_task_gets_its_arguments_and_a_class_task_is_built():
    for target, weight in (("own_code.mine.Regression", 2.0), ("precision_lab.task.Classification", None)):
        extra = ["+task.weight=2.0"] if weight else []
        work = built("task=custom", f"task._target_={target}", *extra, "dataset=digits")
        assert type(work.task).__name__ == target.rsplit(".", 1)[1]
        assert getattr(work.task, "weight", None) == weight
    work = built("task=custom", "task._target_=own_code.mine.regression", "dataset=digits")
    loss, metrics = work.task(nn.Linear(2, 1), (torch.ones(3, 2), torch.ones(3, 1)))
    assert loss.shape == ()
    assert metrics == {}


@pytest.mark.parametrize("layer", ["torch.nn.LazyLinear", "torch.nn.LazyBatchNorm1d"])
def test_a_lazy_model_is_refused(layer):
    arguments = ["+model.out_features=3"] if "Linear" in layer else ["+model.affine=false"]
    with pytest.raises(InputError, match=rf"^model\._target_={layer} has lazy parameters"):
        built("model=custom", f"model._target_={layer}", *arguments)
