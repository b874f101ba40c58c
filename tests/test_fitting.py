"""What fits into memory: a CPU's budget, a run that runs out of it, and the batch that it says fits."""

import json
from types import SimpleNamespace

import pytest
import torch

from own_code import mine
from precision_lab import fitting, hardware
from precision_lab import run as run_module
from precision_lab.assemble import assemble, make_trainer, resolve
from precision_lab.config import compose
from precision_lab.errors import InputError
from precision_lab.fitting import OutOfMemory, OverBudget, hold_to_budget
from precision_lab.sizes import GIB
from precision_lab.trainer import Trainer

TINY = ["model=mlp", "model.hidden=[16]", "trainer.batch_size=32", "trainer.steps=4", "trainer.log_every=2"]
CNN = ["model=cnn", "model.widths=[4,8]", "trainer.batch_size=32", "trainer.steps=4", "trainer.log_every=2"]
GPT = ["model=gpt", "dataset=synthetic_tokens", "model.layers=1", "model.width=16", "model.context=16"]
GPT += ["trainer.batch_size=4", "trainer.steps=4", "model.dropout=0.1"]
FIXED = ["device=cpu", "device.threads=1", "probe.memory=false", "meter.warmup_steps=0"]
HUGE = "device.memory_budget_gib=100"


def ready_trainer(*words):
    ready = assemble(resolve(compose([*words, *FIXED])))
    return ready, make_trainer(ready)


def result_of(tmp_path, *words, code=0):
    """result.json of a run in this process."""
    assert run_module.run(compose([*words, *FIXED, f"paths.outputs={tmp_path}"])) == code
    (path,) = tmp_path.glob("runs/*/*/result.json")
    return json.loads(path.read_text())


def gib_between(fits, does_not, *words):
    """A budget in GiB that one micro-batch of several fits and the other does not, as measured here."""
    ready, trainer = ready_trainer(*words, "trainer.accumulation=2")
    trainer.model.train()
    return sum(fitting.peak_at(trainer, ready, samples) for samples in (fits, does_not)) / 2 / GIB


# --- the budget of a CPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("words", [TINY, CNN, [*GPT, "trainer.accumulation=2"]], ids=["mlp", "cnn", "gpt"])
def test_a_budget_changes_no_bit_of_a_run(tmp_path, words, precision):
    plain = result_of(tmp_path / "plain", *words, f"precision={precision}")
    held = result_of(tmp_path / "held", *words, f"precision={precision}", HUGE)
    assert plain["status"] == held["status"] == "completed"
    assert plain["hashes"] == held["hashes"]  # of every step's loss, too
    for name in ("final/train_loss", "final/train_grad_norm", "final/val_loss", "final/val_loss_fp32"):
        assert plain["summary"][name] == held["summary"][name], name
    assert held["out_of_memory"] is None


def test_two_steps_are_measured_and_no_time_counts_them(tmp_path, monkeypatch):
    taken, own = [], fitting.measured_step
    monkeypatch.setattr(fitting, "measured_step", lambda *given: taken.append(1) or own(*given))
    held = result_of(tmp_path, *TINY, "precision=fp32", HUGE)
    assert len(taken) == 2
    assert held["summary"]["final/perf_measured_steps"] == 2  # of four, without any other warm-up


def test_without_a_budget_nothing_is_measured():
    ready, trainer = ready_trainer(*TINY, "precision=fp32")
    assert hold_to_budget(trainer, ready) == 0
    assert trainer.step.__func__ is Trainer.step


def test_the_second_step_counts_too(monkeypatch):
    """The optimizer's state is there from then on."""
    ready, trainer = ready_trainer(*TINY, "precision=fp32", "device.memory_budget_gib=1")
    peaks = iter([1000, 2 * GIB, 3 * GIB])
    monkeypatch.setattr(fitting, "measured_step", lambda *_: SimpleNamespace(peak_bytes=next(peaks), phase="optimizer"))
    assert hold_to_budget(trainer, ready) == 2
    trainer.step(iter([]))
    with pytest.raises(OverBudget, match="the peak of 2 GiB is above"):
        trainer.step(iter([]))
    assert trainer.phase == "optimizer"
    assert trainer.step.__func__ is Trainer.step  # the third is not measured


def test_a_batch_that_takes_more_is_out_of_memory_and_the_advice_fits(tmp_path):
    words = ["precision=fp32", "model=cnn", "trainer.batch_size=64", "trainer.steps=3"]
    gib = gib_between(16, 32, *words)
    budget = f"device.memory_budget_gib={gib}"
    result = result_of(tmp_path / "lost", *words, budget)
    lost = result["out_of_memory"]
    assert (result["status"], result["step"], lost["step"], lost["batch_size"]) == ("out_of_memory", 0, 1, 64)
    assert lost["phase"] in ("forward", "backward")
    assert lost["peak_bytes"] > gib * GIB
    assert lost["fits"] == 16
    advice = result["reason"].partition(" fits: ")[2].split()
    assert advice[:2] == ["trainer.batch_size=16", "trainer.accumulation=4"]
    assert result_of(tmp_path / "fits", *words[:2], *advice[:2], "trainer.steps=3", budget)["status"] == "completed"
    double = ["trainer.batch_size=32", "trainer.accumulation=2"]
    again = result_of(tmp_path / "not", *words[:2], *double, "trainer.steps=3", budget)
    assert again["status"] == "out_of_memory"


def test_a_budget_that_not_even_one_sample_fits(tmp_path):
    result = result_of(tmp_path, *TINY, "precision=fp32", "device.memory_budget_gib=0.00001")
    assert result["out_of_memory"]["fits"] == 0
    assert result["reason"].endswith("(batch 32); not even a batch of 1 fits")


def test_a_budget_and_a_compiled_model_are_refused_on_a_cpu(tmp_path):
    asked = compose([*TINY, "precision=fp32", HUGE, "device.compile=true", "device=cpu", f"paths.outputs={tmp_path}"])
    with pytest.raises(
        InputError, match=r"memory_budget_gib=100.0 and device.compile=true cannot be combined on a CPU"
    ):
        run_module.run(asked)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_allocator_of_an_accelerator_gets_the_budget_as_a_share(monkeypatch, kind):
    told = []
    properties = SimpleNamespace(total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 8 * GIB)
    monkeypatch.setattr(getattr(torch, kind), "set_per_process_memory_fraction", told.append)
    device = torch.device(kind)
    hardware.limit_memory(compose(["device.memory_budget_gib=2"]).device, device)
    hardware.limit_memory(compose([]).device, device)
    assert told == [0.25]
    with pytest.raises(InputError, match=r"^device.memory_budget_gib=9.0 is more than the 8 GiB of this device\.$"):
        hardware.limit_memory(compose(["device.memory_budget_gib=9"]).device, device)


# --- where it ran out ----------------------------------------------------------------------------------------


def greedy_beyond(samples):
    """Whether a batch is too large, as torch says it."""
    if samples > 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class _GreedyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        greedy_beyond(len(gradient))
        return gradient


class Greedy(mine.Line):
    """Takes too much memory in one phase, from a step on, where the batch has more than four samples."""

    def __init__(self, phase: str, step: int = 1):
        super().__init__()
        self.phase, self.step, self.forwards = phase, step, 0

    def forward(self, x):
        self.forwards += self.training
        now = self.forwards >= self.step
        if now and self.phase == ("forward" if self.training else "evaluation"):
            greedy_beyond(len(x))
        return _GreedyBackward.apply(self.body(x)) if now and self.phase == "backward" else self.body(x)


OWN = ["model=custom", "dataset=custom", "dataset._target_=own_code.mine.line_data", "task=custom"]
OWN += ["task._target_=own_code.mine.regression", "trainer.steps=6", "trainer.log_every=2", "precision=fp32"]


@pytest.mark.parametrize(
    ("phase", "step", "fits", "sentence"),
    [
        ("forward", 1, 4, "in the forward pass of step 1 (batch 16); a batch of 4 fits: trainer.batch_size=4 "),
        ("forward", 4, 4, "in the forward pass of step 4 (batch 16); a batch of 4 fits: "),
        ("backward", 3, 4, "in the backward pass of step 3 (batch 16); a batch of 4 fits: "),
        ("evaluation", 1, None, "in the evaluation after step 6 (batch 16)"),
    ],
)
def test_a_run_says_where_it_ran_out_of_memory_and_what_fits(tmp_path, phase, step, fits, sentence):
    model = ["model._target_=test_fitting.Greedy", f"+model.phase={phase}", f"+model.step={step}"]
    result = result_of(tmp_path, *OWN, *model, "trainer.batch_size=16")
    lost = result["out_of_memory"]
    at = 6 if phase == "evaluation" else step
    assert lost == {"step": at, "phase": phase, "peak_bytes": None, "batch_size": 16, "fits": fits}
    assert result["reason"].startswith(f"out of memory {sentence}")
    assert result["status"] == "out_of_memory"


def test_between_two_steps_it_is_said_so(tmp_path, monkeypatch):
    def write(checkpoints, done, state, troubles):
        raise MemoryError("no room for a copy")

    monkeypatch.setattr("precision_lab.checkpoint.Checkpoints.write", write)
    result = result_of(tmp_path, *TINY, "precision=fp32", "trainer.checkpoint_every=3")
    lost = {"step": 3, "phase": "between steps", "peak_bytes": None, "batch_size": 32, "fits": None}
    assert (result["status"], result["out_of_memory"]) == ("out_of_memory", lost)
    assert result["reason"] == "out of memory after step 3 (batch 32)"


def test_a_size_that_the_model_refuses_for_another_reason_ends_the_search(tmp_path):
    model = ["model._target_=test_fitting.Picky"]
    result = result_of(tmp_path, *OWN, *model, "trainer.batch_size=16")
    assert result["out_of_memory"]["fits"] is None
    assert result["reason"] == "out of memory in the forward pass of step 1 (batch 16)"


class Picky(mine.Line):
    def forward(self, x):
        if len(x) < 16:
            raise ValueError("too few")
        greedy_beyond(len(x))
        return self.body(x)


def test_a_model_that_does_not_fit_in_a_sweep_is_of_the_phase_model(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "_a_job_ran", False)
    words = [*OWN, "model._target_=own_code.mine.DoesNotFit", "name=night", *FIXED, f"paths.outputs={tmp_path}"]
    assert run_module.run(compose(words), sweep=True) == 0
    (path,) = tmp_path.glob("sweeps/night/*/result.json")
    lost = json.loads(path.read_text())["out_of_memory"]
    assert (lost["phase"], lost["step"], lost["fits"]) == ("model", 0, None)


@pytest.mark.parametrize(
    ("batch", "fits", "accumulation", "advice"),
    [
        (64, 32, 1, "a batch of 32 fits: trainer.batch_size=32 trainer.accumulation=2 keeps the step"),
        (64, 16, 3, "a batch of 16 fits: trainer.batch_size=16 trainer.accumulation=12 keeps the step"),
        (65, 16, 1, "a batch of 16 fits: trainer.batch_size=13 trainer.accumulation=5 keeps the step"),
        (61, 30, 1, "a batch of 30 fits: trainer.batch_size=30"),
        (2, 1, 1, "a batch of 1 fits: trainer.batch_size=1 trainer.accumulation=2 keeps the step"),
        (1, 0, 1, "not even a batch of 1 fits"),
    ],
)
def test_the_advice(batch, fits, accumulation, advice):
    lost = OutOfMemory(7, "optimizer", int(1.37 * GIB), batch, fits)
    where = f"out of memory in the optimizer's part of step 7 at 1.37 GiB (batch {batch}); "
    assert lost.sentence(accumulation) == where + advice


def test_the_error_of_a_budget_is_one_of_memory():
    error = OverBudget(3 * GIB, 2 * GIB)
    assert hardware.is_out_of_memory(error)
    assert str(error) == "the peak of 3 GiB is above device.memory_budget_gib, 2 GiB"
