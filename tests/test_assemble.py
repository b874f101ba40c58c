"""From a config to a workload and a trainer: step counts, and what is refused before anything is written."""

import logging
import os

import pytest
import torch
from torch import nn

from own_code.training import ARMS
from precision_lab import loading
from precision_lab.assemble import (
    Workload,
    assemble,
    build_workload,
    make_trainer,
    resolve,
    training_batches,
    validation_batches,
)
from precision_lab.config import compose
from precision_lab.errors import InputError
from precision_lab.hashing import content_hash
from precision_lab.logs import _Redacting
from precision_lab.precision import perturb
from precision_lab.redaction import secrets_in
from precision_lab.seeds import derive

SMALL = ["precision=fp32", "device=cpu", "dataset=synthetic_images", "dataset.samples=125", "dataset.image_size=8"]


def epochs(number: int, batch_size: int, accumulation: int) -> list[str]:
    plan = [f"trainer.epochs={number}", f"trainer.batch_size={batch_size}", f"trainer.accumulation={accumulation}"]
    return [*SMALL, "trainer.steps=null", *plan]


@pytest.mark.parametrize(
    ("plan", "steps"), [((1, 10, 1), 10), ((2, 30, 1), 6), ((1, 30, 3), 1), ((3, 30, 2), 4), ((1, 100, 1), 1)]
)
def test_an_epoch_is_its_full_batches(plan, steps):  # of 100 training samples
    assert assemble(resolve(compose(epochs(*plan)))).total_steps == steps


def test_epochs_that_hold_no_step_are_refused():
    with pytest.raises(InputError, match=r"^trainer\.epochs=1 of 100 samples holds no step of 3 micro-batches of 80;"):
        assemble(resolve(compose(epochs(1, 80, 3))))


def test_a_schedule_with_a_negative_factor_is_refused_before_the_run():
    ready = assemble(resolve(compose([*SMALL, "scheduler=custom", "scheduler._target_=operator.sub"])))
    with pytest.raises(InputError, match=r"^scheduler: the factor at step 0 is -400\.0; it must be finite"):
        make_trainer(ready)


def test_a_split_without_samples_is_refused():
    with pytest.raises(InputError, match=r"^dataset: 1797 training and 0 validation samples; both need some\.$"):
        assemble(resolve(compose(["precision=fp32", "device=cpu", "dataset=digits", "dataset.train_fraction=0.9999"])))


def test_a_secret_in_a_message_or_a_traceback_is_not_logged(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "supersecretvalue")
    try:
        raise RuntimeError("cannot log in with supersecretvalue")
    except RuntimeError as error:
        record = logging.getLogger("x").makeRecord(
            "x", logging.ERROR, __file__, 1, "told: %s", (error,), (type(error), error, error.__traceback__)
        )
    text = _Redacting(secrets_in(os.environ), "%(message)s").format(record)
    assert "supersecretvalue" not in text
    assert "told: cannot log in with [redacted]" in text
    assert "RuntimeError: cannot log in with [redacted]" in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_pinned_for_the_device_that_is_trained_on(monkeypatch, device):
    """A CUDA device that is not used gets no context: pinning would start one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pinned = []
    monkeypatch.setattr(loading, "DataLoader", lambda *_, pin_memory, **__: pinned.append(pin_memory) or iter([0]))
    words = ["precision=fp32", "device=cpu", "dataset=custom", "dataset._target_=own_code.mine.line_data"]
    words += ["model=custom", "model._target_=own_code.mine.Line", "trainer.batch_size=8"]
    ready = assemble(resolve(compose(words)))
    ready.policy.device = torch.device(device)
    next(training_batches(ready)._batches)
    next(validation_batches(ready))
    assert pinned == [device == "cuda"] * 2


# ---- putting a workload together -------------------------------------------------------------------------


def built(*overrides: str) -> Workload:
    return build_workload(compose(["precision=fp32", *overrides]))


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
    made = {arm: build_workload(compose([f"precision={arm}", "seed=3", *chosen])) for arm in ARMS}
    weights = {content_hash(work.model.state_dict()) for work in made.values()}
    assert len(weights) == 1
    assert {p.dtype for work in made.values() for p in work.model.parameters()} == {torch.float32}
    other = built("seed=4", *chosen)
    assert content_hash(other.model.state_dict()) not in weights
    assert {work.data.hash for work in made.values()} == {other.data.hash}


def test_a_perturbed_arm_starts_from_the_same_hash_and_trains_from_weights_that_differ_by_a_rounding():
    weights, hashes = {}, {}
    for arm in ("fp32", "fp32_perturbed", "fp32_perturbed precision.weight_noise=0.01"):
        ready = assemble(resolve(compose([*f"precision={arm}".split(), "seed=3", "device=cpu"])))
        weights[arm] = torch.cat([p.detach().flatten() for p in make_trainer(ready).model.parameters()])
        hashes[arm] = ready.workload.weights_hash
    assert len(set(hashes.values())) == 1
    plain, by_a_rounding, by_a_hundredth = weights.values()
    drawn = plain != 0
    apart = (by_a_hundredth[drawn].double() / plain[drawn].double() - 1) / 0.01
    assert (float(apart.mean()), float(apart.std())) == (pytest.approx(0, abs=0.03), pytest.approx(1, abs=0.03))
    assert 0.2 < float((by_a_rounding != plain).float().mean()) < 0.9
    torch.testing.assert_close(by_a_rounding, plain, rtol=1e-6, atol=0)


def test_the_noise_is_the_seed_s_and_moves_no_other_generator():
    before = torch.get_rng_state()
    made = {}
    for seed in (3, 3, 4):
        model = torch.nn.Linear(50, 50)
        torch.nn.init.ones_(model.weight)
        perturb(model, 0.5, derive(seed, "weight_noise"))
        made.setdefault(seed, []).append(model.weight.detach())
        torch.set_rng_state(before)
        perturb(model, 0.5, 0)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*made[3])
    assert not torch.equal(made[3][0], made[4][0])


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
        built("model=custom", "model._target_=own_code.mine.Line", "+model.vocab_size=null", "dataset=digits")
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
