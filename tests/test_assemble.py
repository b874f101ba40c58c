"""From a config to a trainer: step counts, and what is refused before anything is written."""

import logging
import os

import pytest

from precision_lab.assemble import assemble, make_trainer, resolve
from precision_lab.config import compose
from precision_lab.errors import InputError
from precision_lab.redaction import secrets_in
from precision_lab.run import _Redacting

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


def test_a_negative_warmup_is_refused_before_the_run():
    ready = assemble(resolve(compose([*SMALL, "scheduler=constant", "scheduler.warmup_steps=-5"])))
    with pytest.raises(InputError, match=r"^scheduler: the factor at step 0 is -0\.25; it must be finite"):
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
