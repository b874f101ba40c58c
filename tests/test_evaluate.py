"""Evaluation: the exact mean over samples, in the arm's precision and in fp32, and no trace left behind."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from own_code.training import (
    ARMS,
    ConvNorm,
    mean_square,
    policy_of,
    same_bits,
    seeded,
    snapshot,
    step,
    trainer_of,
)
from precision_lab.batches import eval_batches
from precision_lab.datasets import TensorSamples
from precision_lab.errors import InputError
from precision_lab.precision import backend_flags
from precision_lab.task import Classification
from precision_lab.trainer import evaluate


class Times(nn.Module):
    """x -> x * w through a linear, so that autocast lowers it."""

    def __init__(self, weight):
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.linear.weight.fill_(weight)

    def forward(self, x):
        return self.linear(x)


def mean_output(model, batch):
    output = model(batch).float()
    return output.mean(), {"largest": output.max()}


def over(values, batch_size):
    return lambda: eval_batches(TensorSamples(values), batch_size, lambda batch: batch)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5])
def test_the_mean_counts_samples_not_batches(batch_size):
    values = torch.tensor([[3.0], [0.0], [6.0], [9.0], [12.0]])  # every batch's mean is exact in float32
    got = evaluate(policy_of("fp32"), mean_output, Times(1.0), over(values, batch_size))
    assert got["val/loss"] == got["val/loss_fp32"] == 6
    # a metric is weighted likewise: with batches of 2, maxima 3, 9 and 12 count 2, 2 and 1 times
    if batch_size == 2:
        assert got["val/largest"] == (3 * 2 + 9 * 2 + 12) / 5


def test_a_metric_of_some_batches_is_the_mean_over_their_samples():
    def task(model, batch):
        output = model(batch).float()
        return output.mean(), {"positive": output.max()} if (output > 0).all() else {}

    values = torch.tensor([[3.0], [5.0], [-1.0], [7.0], [9.0]])  # batches of 2: the second one tells nothing
    got = evaluate(policy_of("fp32"), task, Times(1.0), over(values, 2))
    assert got["val/positive"] == (5 * 2 + 9) / 3
    assert got["val/loss"] == pytest.approx(23 / 5)


def test_the_two_losses_differ_by_the_rounding_known_by_hand():
    # 1 + 2^-9 lies between the bfloat16 neighbours 1 and 1 + 2^-7; it is a float16 number
    weight = 1 + 2.0**-9
    values = torch.ones(4, 1)
    got = {arm: evaluate(policy_of(arm), mean_output, Times(weight), over(values, 3)) for arm in ARMS[:4]}
    assert {arm: figures["val/loss_fp32"] for arm, figures in got.items()} == dict.fromkeys(ARMS[:4], weight)
    assert {arm: figures["val/loss"] for arm, figures in got.items()} == {
        "fp32": weight,
        "bf16": 1.0,
        "fp16": weight,
        "fp16_unscaled": weight,
    }
    assert "val/largest_fp32" not in got["bf16"]


def test_bf16_pure_has_rounded_its_weights_for_good():
    model = policy_of("bf16_pure").prepare(Times(1 + 2.0**-9))
    got = evaluate(policy_of("bf16_pure"), mean_output, model, over(torch.ones(2, 1), 2))
    assert got["val/loss"] == got["val/loss_fp32"] == 1.0
    # the input 1 + 2^-9 is rounded in the arm's own precision and not in float32
    got = evaluate(policy_of("bf16_pure"), mean_output, model, over(torch.full((2, 1), 1 + 2.0**-9), 2))
    assert (got["val/loss"], got["val/loss_fp32"]) == (1.0, 1 + 2.0**-9)


def trained(arm):
    trainer = trainer_of(arm, seeded(ConvNorm), mean_square, precision={"init_scale": 256.0})
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        step(trainer, torch.randn(4, 2, 8, generator=draw))
    return trainer, torch.randn(11, 2, 8, generator=draw)


@pytest.mark.parametrize("arm", ARMS)
def test_both_losses_equal_a_plain_evaluation_bit_for_bit(arm):
    trainer, values = trained(arm)
    got = evaluate(trainer.policy, trainer.task, trainer.model, over(values, 4))

    model = seeded(ConvNorm)
    model.load_state_dict({name: value.float() for name, value in trainer.model.state_dict().items()})
    model.eval()
    plain = {}
    for name, dtype in (("full", None), ("arm", trainer.policy.autocast_dtype)):
        parts = []
        with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            for part in values.split(4):
                parts.append(model(part).float().square().mean().item() * len(part))
        plain[name] = sum(parts) / 11
    assert got["val/loss_fp32"] == plain["full"]
    if arm != "bf16_pure":
        assert got["val/loss"] == plain["arm"]
    assert (got["val/loss"] == got["val/loss_fp32"]) == (arm == "fp32")
    assert got["val/loss"] == pytest.approx(got["val/loss_fp32"], rel=0.02)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.frozen = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.frozen(self.norm(self.linear(x))) + torch.randn(3, device=x.device)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("arm", ARMS)
def test_evaluation_leaves_no_trace(arm, training):
    trainer = trainer_of(arm, seeded(Drawing), Classification())
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(7, 4, generator=draw), torch.randint(3, (7,), generator=draw)
    step(trainer, (x, y))
    trainer.model.train(training)
    gradients = [p.grad.clone() for p in trainer.model.parameters()]
    state = {k: v.clone() for entry in trainer.optimizer.state.values() for k, v in entry.items()}
    parameters = [id(p) for p in trainer.model.parameters()]
    weights, flags = snapshot(trainer.model), backend_flags()
    generators = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()

    first = evaluate(trainer.policy, trainer.task, trainer.model, lambda: iter([((x, y), 7)]))
    second = evaluate(trainer.policy, trainer.task, trainer.model, lambda: iter([((x, y), 7)]))

    assert first == second
    assert set(first) == {"val/loss", "val/loss_fp32", "val/accuracy"}
    assert same_bits(snapshot(trainer.model), weights)
    assert [id(p) for p in trainer.model.parameters()] == parameters
    assert {p.dtype for p in trainer.model.parameters()} == {trainer.policy.param_dtype}
    assert all(torch.equal(p.grad, g) for p, g in zip(trainer.model.parameters(), gradients, strict=True))
    assert all(torch.equal(state[k], v) for k, v in list(trainer.optimizer.state.values())[-1].items())
    assert {module.training for module in trainer.model.modules()} == {training}
    assert backend_flags() == flags
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert numpy.random.get_state()[1].tolist() == generators[1]
    assert random.getstate() == generators[2]
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_a_part_of_the_model_in_evaluation_mode_stays_in_it():
    model = Drawing()
    model.train()
    model.frozen.eval()
    batch = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    evaluate(policy_of("fp32"), Classification(), model, lambda: iter([(batch, 2)]))
    assert (model.training, model.norm.training, model.frozen.training) == (True, True, False)


@pytest.mark.parametrize("arm", ["bf16", "bf16_pure"])
def test_a_task_that_raises_leaves_the_model_as_it_was(arm):
    model = policy_of(arm).prepare(nn.Linear(2, 2))

    def raising(model, batch):
        if not torch.is_autocast_enabled("cpu") and model.weight.dtype is torch.float32:
            raise ValueError("in the float32 pass")
        return model(batch).float().sum(), {}

    before, flags = snapshot(model), backend_flags()
    with pytest.raises(ValueError, match="in the float32 pass"):
        evaluate(policy_of(arm), raising, model, lambda: iter([(torch.ones(1, 2), 1)]))
    assert same_bits(snapshot(model), before)
    assert model.training
    assert backend_flags() == flags


def test_dropout_and_gradients_are_off():
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(4, 2))

    def task(model, batch):
        loss, metrics = Classification()(model, batch)
        assert not loss.requires_grad
        return loss, metrics

    x, y = torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)
    got = evaluate(policy_of("fp32"), task, model, lambda: iter([((x, y), 5)]))
    assert got["val/loss"] == F.cross_entropy(model[1](x), y).item()


def test_the_fp32_pass_is_fp32_whatever_context_the_caller_is_in():
    model = nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16), policy_of("bf16").reference(model):
        assert model(torch.ones(1, 2)).dtype is torch.float32


@pytest.mark.parametrize("name", ["loss", "loss_fp32", "mean abs", "a/b", "2nd"])
def test_a_metric_may_not_take_the_losses_names_nor_an_odd_one(name):
    def task(model, batch):
        return mean_output(model, batch)[0], {name: torch.tensor(123.0)}

    with pytest.raises(InputError, match=r"^task: a metric is called '.*'; use letters, digits and underscores"):
        evaluate(policy_of("fp32"), task, nn.Linear(1, 1), over(torch.ones(4, 1), 2))
