"""Checkpoints: every kind of state comes back bit by bit, files that are not right are told, nothing in one is run."""

import os
import pickle
import random
import re
from itertools import count
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from own_code.training import mean_square, seeded, trainer_of
from precision_lab import checkpoint
from precision_lab.batches import TrainBatches
from precision_lab.checkpoint import Checkpoints, NotPlain, load_weights, written_in
from precision_lab.errors import InputError
from precision_lab.inspection import checkpoint_bytes
from precision_lab.meter import Meter
from precision_lab.recorder import CannotWrite
from precision_lab.seeds import generator_states, restore_generators, seed_globals
from precision_lab.stops import Terminated
from precision_lab.torture import differences

STEPS = 11


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """No power fails here, and waiting for the disk takes longer than all the rest."""
    monkeypatch.setattr(os, "fsync", lambda number: None)


class Everything(nn.Module):
    """[B, 2, 8] -> [B, 4]; its output depends on each kind of state that a module can have."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)
        self.head, self.again = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.again.weight = self.head.weight
        self.register_buffer("average", torch.zeros(4), persistent=False)
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("spread", torch.full((1,), 0.3).expand(4))
        self.register_buffer("dropped", torch.ones(1))
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls, "kinds": ["any", 1.5, None]}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        x = self.norm(self.conv(x)).mean(2)
        if self.training:
            self.calls += 1
            self.average.mul_(0.9).add_(x.detach().mean(0))
            if self.calls in (2, 6):  # a cache that grows, one that forward makes, one that it lets go
                self.cache = torch.cat([self.cache, self.average.mean()[None]])
            if self.calls == 2:
                self.register_buffer("made", self.average.clone(), persistent=False)
                self.dropped = None
        noise = 1 + 0.1 * random.random() + 0.1 * numpy.random.standard_normal()
        x = F.dropout(x, 0.2, self.training) * noise
        known = self.average * self.spread + self.cache.sum() + self.calls / 10
        if self.calls > 2:
            known = known + self.made
        return self.again(self.head(x + known + (0 if self.dropped is None else self.dropped)))


class InFloat32(torch.optim.Optimizer):
    """Keeps float32 copies of low-precision weights, nested values, and state that belongs to no parameter."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        shared = self.state.setdefault("shared", {"steps": 0})
        shared["steps"] += 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state |= {"master": p.float().clone(), "past": [torch.zeros_like(p, dtype=torch.float32)]}
            state["past"][0].mul_(0.9).add_(p.grad.float())
            state["master"].sub_(self.param_groups[0]["lr"] * state["past"][0] / shared["steps"])
            p.copy_(state["master"])


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "in_float32": lambda p: InFloat32(p, lr=1e-2),
}


class Run:
    """A trainer, its batches and generators, which writes a checkpoint after every step or goes on from one."""

    def __init__(self, folder, arm, optimizer, workers=0, seed=0, dataset=None, **plan):
        scale = {"init_scale": 2.0**20, "growth_interval": 2} if arm == "fp16" else {}
        model = seeded(Everything, seed)
        settings = {"log_every": 4, "grad_clip": 1.0, **plan}
        self.trainer = trainer_of(arm, model, mean_square, OPTIMIZERS[optimizer], precision=scale, **settings)
        self.dataset = dataset or TensorDataset(torch.randn(30, 2, 8, generator=torch.Generator().manual_seed(1)))
        folder.mkdir(exist_ok=True)
        self.workers, self.logged = workers, []
        self.checkpoints = Checkpoints(folder, 1, None)
        self.batches = self._batches(None)
        seed_globals(seed)

    def _batches(self, state):
        dtype = torch.bfloat16 if self.trainer.policy.config.param_dtype.name == "bfloat16" else torch.float32
        return TrainBatches(self.dataset, 4, 0, lambda batch: batch[0].to(dtype), self.workers, state=state)

    def state(self):
        return {
            "trainer": self.trainer.state(),
            "batches": self.batches.state(),
            "generators": generator_states("cpu"),
        }

    def goes_on_from(self, path):
        state = checkpoint.read(path)
        self.trainer.load_state(state["trainer"])
        self.batches = self._batches(state["batches"])
        restore_generators(state["generators"], "cpu")
        return self

    def to_the_end(self, stopped_at=None, keep=True):
        """(state at the end, readings of each log point but times); with `keep` a checkpoint after every step."""

        def on_log(progress, readings):
            if progress.step == stopped_at:
                raise Terminated("SIGTERM")
            timeless = {name: value for name, value in readings.items() if not name.startswith("perf/")}
            self.logged.append({"step": progress.step, **timeless})

        def pause():
            self.checkpoints.write(self.trainer.done, self.state(), troubles=range(STEPS + 1))

        meter = Meter(self.trainer.policy.device, 0)
        self.trainer.train(self.batches, meter, STEPS, on_log, lambda done: keep, pause if keep else lambda: None)
        return self.state(), self.logged


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("arm", ["fp32", "bf16", "fp16", "bf16_pure"])
def test_a_run_that_goes_on_from_any_checkpoint_ends_as_the_one_that_wrote_it(tmp_path, arm, optimizer):
    if arm == "bf16_pure" and optimizer == "sgd_fused":
        optimizer = "sgd"  # wrong on a CPU in some versions of torch
    first = Run(tmp_path / "first", arm, optimizer, accumulation=2)
    end, logged = first.to_the_end()
    if arm == "fp16":
        assert 3 < end["trainer"]["progress"]["skipped_steps"] < STEPS - 3
    paths = written_in(tmp_path / "first")
    assert [checkpoint.step_of(path) for path in paths] == [*range(STEPS, 0, -1)]
    for path in paths[1::3]:
        second = Run(tmp_path / path.stem, arm, optimizer, seed=1, accumulation=2).goes_on_from(path)
        assert list(differences(checkpoint.read(path), {"schema": 1, **second.state()}, path.stem)) == []
        end_of_second, logged_by_second = second.to_the_end(keep=False)
        assert list(differences(end, end_of_second, f"from {path.stem}")) == []
        to_come = [line for line in logged if line["step"] > checkpoint.step_of(path)]
        assert list(differences(to_come, logged_by_second, "logged")) == []


@pytest.mark.parametrize(
    "left_out",
    ["average", "cache", "made", "dropped", "extra", "torch", "numpy", "python", "running_mean", "exp_avg", "batches"],
)
def test_each_of_these_is_needed(tmp_path, left_out):
    """A test of the test above: were one of them in no checkpoint, it would say so."""
    run = Run(tmp_path, "fp32", "adamw_fused")
    end, _ = run.to_the_end()
    second = Run(tmp_path, "fp32", "adamw_fused", seed=1)
    fresh = second.state()
    path = tmp_path / "checkpoints" / "step_00000005.pt"
    state = checkpoint.read(path)
    if left_out in state["generators"]:
        state["generators"][left_out] = fresh["generators"][left_out]
    elif left_out == "batches":
        state["batches"] = fresh["batches"]
    elif left_out == "extra":
        state["trainer"]["model"]["extra"] = {}
    elif left_out == "exp_avg":
        for entry in state["trainer"]["optimizer"]["state"].values():
            entry["exp_avg"].zero_()
    else:
        buffers = state["trainer"]["model"]["buffers"]
        (name,) = [name for name in (*buffers, "dropped") if name.endswith(left_out)]
        buffers[name] = torch.zeros(4)
    torch.save(state, path)
    try:
        other, _ = second.goes_on_from(path).to_the_end(keep=False)
    except (AttributeError, RuntimeError, TypeError):
        return
    assert list(differences(end, other, "end"))


class Augmented(Dataset):
    """Random augmentation from every global generator; not one tensor, so that the loader is used."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        draw = torch.rand(2, 8) + random.random() + numpy.random.random()
        return (draw * (index + 1) / 30,)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_position_in_the_data_comes_back_with_workers_and_micro_batches(tmp_path, workers, accumulation):
    def run(seed):
        return Run(tmp_path, "fp32", "sgd", workers, seed, Augmented(), accumulation=accumulation)

    end, logged = run(0).to_the_end()
    assert end["batches"]["handed_out"] == STEPS * accumulation  # more than one epoch of 7
    for step in (3, 8):
        state, lines = run(1).goes_on_from(tmp_path / "checkpoints" / f"step_{step:08}.pt").to_the_end(keep=False)
        assert list(differences(end, state, f"from {step}")) == []
        assert lines == [line for line in logged if line["step"] > step]


def test_a_log_point_that_was_not_recorded_is_recorded_by_the_next_attempt(tmp_path):
    end, logged = Run(tmp_path / "whole", "fp16", "adam").to_the_end(keep=False)
    stopped = Run(tmp_path / "stopped", "fp16", "adam")
    with pytest.raises(Terminated):
        stopped.to_the_end(stopped_at=8, keep=False)
    path = stopped.checkpoints.write(stopped.trainer.done, stopped.state(), ())
    assert path.name == "step_00000008.pt"
    state, lines = Run(tmp_path / "stopped", "fp16", "adam", seed=1).goes_on_from(path).to_the_end(keep=False)
    assert list(differences(logged, stopped.logged + lines, "logged")) == []
    assert [line["step"] for line in logged] == [4, 8, 11]
    assert list(differences(end, state, "end")) == []


def test_a_compiled_model_is_stored_as_what_it_is_of(tmp_path):
    model = nn.BatchNorm1d(3)
    compiled = torch.compile(model, backend="eager")
    assert set(checkpoint.model_state(compiled)["parameters"]) == {"weight", "bias"}
    state = checkpoint.model_state(nn.BatchNorm1d(3)) | {"parameters": {"weight": torch.rand(3), "bias": torch.rand(3)}}
    checkpoint.load_model(compiled, state)
    assert torch.equal(model.weight, state["parameters"]["weight"])


def test_marks_and_hooks_on_parameters_and_buffers_keep_nothing_from_being_written(tmp_path):
    model = nn.BatchNorm1d(3)
    for tensor in (model.weight, model.running_mean):
        with_attribute(tensor, lambda value: value)
    model.weight.register_hook(lambda gradient: gradient * 2)
    path = Checkpoints(tmp_path, 1, None).write(1, checkpoint.model_state(model), ())
    read = checkpoint.read(path)
    assert torch.equal(read["parameters"]["weight"], model.weight)
    assert torch.equal(read["buffers"]["running_mean"], model.running_mean)


def test_the_size_that_is_told_beforehand_counts_every_buffer(tmp_path):
    model = nn.Linear(10, 10)
    model.register_buffer("mask", torch.zeros(500, 500), persistent=False)
    trainer = trainer_of("fp32", model, mean_square, OPTIMIZERS["sgd"])
    path = Checkpoints(tmp_path, 1, None).write(1, trainer.state(), ())
    assert checkpoint_bytes(trainer) == 4 * (110 + 500 * 500)
    assert path.stat().st_size == pytest.approx(checkpoint_bytes(trainer), rel=0.02)


def test_a_module_that_forward_made_and_is_not_there_is_told_before_anything_is_changed():
    model = nn.Linear(2, 2)
    state = checkpoint.model_state(seeded(lambda: nn.Linear(2, 2), 3))
    state["buffers"] = {"late.running_mean": torch.zeros(2)}
    before = model.weight.clone()
    with pytest.raises(InputError, match=r"^The checkpoint holds late\.running_mean, and the model has no such module"):
        checkpoint.load_model(model, state)
    assert torch.equal(model.weight, before)


def test_nonpersistent_stays_so_and_memory_layout_too():
    model = Everything()
    model.conv.weight.data = model.conv.weight.data.transpose(0, 2).contiguous().transpose(0, 2)
    layout, names = model.conv.weight.stride(), set(model.state_dict())
    checkpoint.load_model(model, checkpoint.model_state(seeded(Everything, 3)))
    assert model.conv.weight.stride() == layout
    assert set(model.state_dict()) == names
    assert torch.equal(model.conv.weight, seeded(Everything, 3).conv.weight)


# --- which are kept ----------------------------------------------------------------------------


def kept_after(folder, writes):
    """Steps of the checkpoints that are there after these: (steps done, troubles known by then)."""
    checkpoints = Checkpoints(folder, 1, None)
    for done, troubles in writes:
        checkpoints.write(done, {"done": done}, troubles)
    return [checkpoint.step_of(path) for path in written_in(folder)]


@pytest.mark.parametrize(
    ("writes", "kept"),
    [
        ([(10, []), (20, [])], [20, 10]),
        ([(10, []), (20, []), (30, [])], [30, 20]),
        ([(done, [25]) for done in (10, 20, 30, 40, 50)], [50, 40, 20]),
        ([(done, [done + 1]) for done in (10, 20, 30)], [30, 20]),  # a log point at each: none is in trouble
        # A log point at 10 alone: what has come since may have gone wrong at step 11.
        ([(done, [11]) for done in (10, 20, 30, 40)], [40, 30, 10]),
        ([(done, [11, 31]) for done in (10, 20, 30, 40, 50)], [50, 40, 30, 10]),
        ([(10, [10]), (20, [10]), (30, [10])], [30, 20]),  # a checkpoint after step 10 is not before it
        ([(10, [1]), (20, [1]), (30, [1])], [30, 20]),
    ],
)
def test_the_last_two_are_kept_and_the_last_before_each_trouble(tmp_path, writes, kept):
    assert kept_after(tmp_path, writes) == kept


@pytest.mark.parametrize(
    ("bad", "before_first", "before_streak"),
    [((5,), 4, None), ((1,), None, None), ((3, *range(9, STEPS + 1)), 2, 8), ((*range(9, STEPS + 1),), 8, 8)],
)
@pytest.mark.parametrize("log_every", [1, 4])
def test_a_run_keeps_its_checkpoint_before_the_first_bad_step_and_before_the_streak(
    tmp_path, bad, before_first, before_streak, log_every
):
    """Written after every step; the bad steps are known at the next log point."""
    steps = count(1)

    def task(model, batch):
        return mean_square(model, batch)[0] * (float("nan") if next(steps) in bad else 1.0), {}

    run = Run(tmp_path, "fp32", "adamw_fused", log_every=log_every)
    run.trainer.task = task
    seen = []

    def pause():
        run.checkpoints.write(run.trainer.done, run.state(), run.trainer.progress.troubles())
        seen.append({checkpoint.step_of(path) for path in written_in(tmp_path)})

    meter = Meter(run.trainer.policy.device, 0)
    run.trainer.train(run.batches, meter, STEPS, lambda *_: None, wanted=lambda done: True, pause=pause)
    last = seen[-1]
    assert {STEPS, STEPS - 1} <= last
    assert len(last) <= 4
    for step in filter(None, (before_first, before_streak)):
        at_or_before = [kept for kept in last if kept <= step]
        # between two log points nothing is known, so an older one than the very last may have been kept
        assert max(at_or_before) >= step - log_every + 1
    assert all(max(now) == done for done, now in enumerate(seen, 1))


def test_later_ones_are_put_aside(tmp_path):
    kept_after(tmp_path, [(10, []), (20, [])])
    (tmp_path / "checkpoints" / "step_notes.pt").write_text("a user's own")
    Checkpoints(tmp_path, 1, None).begin_after(10)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000010.pt", "step_00000020.left", "step_notes.pt"]


def test_when_one_is_due(monkeypatch, tmp_path):
    now = 1000.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    by_steps = Checkpoints(tmp_path, 7, None)
    assert [done for done in range(1, 21) if by_steps.due(done, 20)] == [7, 14, 20]
    assert not any(Checkpoints(tmp_path, None, None).due(done, 20) for done in range(1, 21))
    by_time = Checkpoints(tmp_path, None, 0.5)
    assert not by_time.due(20, 20)
    now += 30.0
    assert by_time.due(1, 20)
    by_time.write(1, {"done": 1}, ())
    assert not by_time.due(2, 20)


# --- files that are not right ------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(path, bytes) of a checkpoint"""
    folder = tmp_path_factory.mktemp("written")
    run = Run(folder, "fp16", "adamw_fused")
    path = run.checkpoints.write(7, run.state(), ())
    return path, path.read_bytes()


def is_told(path, content):
    path.write_bytes(content)
    with pytest.raises(
        InputError, match=f"^{re.escape(str(path))} (is damaged and cannot be|cannot be read|is no chec)"
    ):
        checkpoint.read(path)


def test_a_truncated_file_is_told(written, tmp_path):
    content = written[1]
    assert len(content) > 15_000
    for length in [*range(0, len(content), 1000), len(content) - 1]:
        is_told(tmp_path / "cut.pt", content[:length])


def test_a_flipped_bit_is_told_or_changes_nothing(written, tmp_path):
    path, content = tmp_path / "flipped.pt", written[1]
    good, told = checkpoint.read(written[0]), 0
    places = random.Random(0).sample(range(len(content)), 300)
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            read = checkpoint.read(path)
        except InputError:
            told += 1
        else:  # in what pads the archive, or says it a second time
            assert list(differences(good, read, "read")) == []
    assert told > 30


def test_a_flipped_bit_in_a_tensor_is_told(written, tmp_path):
    state = checkpoint.read(written[0])
    weight = state["trainer"]["model"]["parameters"]["conv.weight"].detach().numpy().tobytes()
    place = written[1].index(weight) + len(weight) // 2
    flipped = bytearray(written[1])
    flipped[place] ^= 1
    is_told(tmp_path / "flipped.pt", flipped)


class Writes:
    """What a pickle of this does when it is read: it writes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (exec, (f"import pathlib; pathlib.Path({self.path!r}).write_text('run')",))


@pytest.mark.parametrize("as_it_is", ["torch", "torch_legacy", "pickle", "in_a_checkpoint"])
@pytest.mark.parametrize("reader", ["read", "load_weights"])
def test_what_would_run_code_is_refused_and_not_run(tmp_path, written, as_it_is, reader):
    path, mark = tmp_path / "step_00000001.pt", tmp_path / "mark"
    if as_it_is == "pickle":
        path.write_bytes(pickle.dumps(Writes(mark)))
    elif as_it_is == "in_a_checkpoint":
        torch.save(checkpoint.read(written[0]) | {"more": [Writes(mark)]}, path)
    else:
        torch.save({"schema": 1, "w": Writes(mark)}, path, _use_new_zipfile_serialization=as_it_is == "torch")
    with pytest.raises(InputError, match=r"holds more than tensors and plain values|is damaged and cannot be read"):
        checkpoint.read(path) if reader == "read" else load_weights(nn.Linear(2, 2), path)
    assert not mark.exists()
    with open(path, "rb") as file:  # the file is a real one: read without care, it does what it says
        torch.load(file, weights_only=False) if as_it_is != "pickle" else pickle.load(file)
    assert mark.exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"schema": 2}, "is of a newer version of precision-lab; this one reads up to 1."),
        ({"weights": torch.ones(3)}, "is no checkpoint of a run."),
        ({"schema": "1"}, "is no checkpoint of a run."),
        (torch.ones(3), "is no checkpoint of a run."),
        (None, "is no checkpoint of a run."),
    ],
)
def test_foreign_content_and_newer_versions_are_told(tmp_path, content, sentence):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(InputError, match=f"^{re.escape(f'{tmp_path}/a.pt {sentence}')}$"):
        checkpoint.read(tmp_path / "a.pt")


def test_a_file_that_is_missing_or_a_folder_is_told(tmp_path):
    with pytest.raises(InputError, match=r"none.pt cannot be read \(No such file or directory\)\.$"):
        checkpoint.read(tmp_path / "none.pt")
    with pytest.raises(InputError, match=r"is not a file\.$"):
        checkpoint.read(tmp_path)


def with_attribute(tensor, value):
    """As a user's code marks a tensor; torch saves the mark with it."""
    tensor.made_by = value
    return tensor


class Odd(dict):
    """A dict of a user's own, which a file could not give back."""


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": {"b": [object()]}}, "a.b is of type object"),
        ({"a": numpy.float64(1.0)}, "a is of type float64"),
        ({"a": numpy.ones(2)}, "a is of type ndarray"),
        ({"a": Odd(b=1)}, "a is of type Odd"),
        ({"a": {(1, Path("x")): 2}}, "a is of type PosixPath"),
        ({"a": {1, 2}}, "a is of type set"),
        ({"a": {"b": with_attribute(torch.ones(2), object())}}, "a.b.made_by is of type object"),
    ],
)
def test_what_is_not_plain_is_refused_before_anything_is_written(tmp_path, value, told):
    with pytest.raises(NotPlain, match=f"^{told}$"):
        Checkpoints(tmp_path, 1, None).write(1, value, ())
    assert list(tmp_path.iterdir()) == []


def test_all_that_is_taken_for_plain_can_be_read_again(tmp_path):
    values = {
        "numbers": [1, -(2**70), 0.1, float("nan"), float("inf"), True, None, "text \u00e9"],
        "tuple": (1, ("b", 2.0)),
        "keys": {1: "a", (2, "b"): "c", None: 1.5},
        "tensors": [
            *(torch.ones(2, dtype=kind) for kind in (torch.bfloat16, torch.float16, torch.float64, torch.complex64)),
            *(torch.ones(2, dtype=kind) for kind in (torch.bool, torch.uint8, torch.int64, torch.float8_e4m3fn)),
            *(torch.ones(()), torch.ones(0, 3), torch.eye(3).to_sparse().to_dense(), torch.ones(1).expand(5)),
            *(torch.arange(6.0).view(2, 3).t(), nn.Parameter(torch.ones(2))),
            *(with_attribute(torch.ones(2), "me"), with_attribute(nn.Parameter(torch.ones(2)), True)),
        ],
    }
    path = Checkpoints(tmp_path, 1, None).write(1, values, ())
    assert list(differences(values, {k: v for k, v in checkpoint.read(path).items() if k != "schema"}, "read")) == []


def test_one_that_cannot_be_written_leaves_those_before_as_they_were(tmp_path, monkeypatch):
    kept_after(tmp_path, [(10, []), (20, [])])
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotWrite, match=r"step_00000030.pt cannot be written \(No space left on device\)\.$"):
        Checkpoints(tmp_path, 1, None).write(30, {"done": 30}, ())
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()} == before


# --- trainer.init_from -------------------------------------------------------------------------


def net(seed=0):
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), seed)


@pytest.mark.parametrize("kind", ["checkpoint", "weights", "bf16", "legacy"])
def test_weights_are_taken_from_a_checkpoint_or_a_file_of_weights(tmp_path, kind):
    path, theirs, mine = tmp_path / "weights.pt", net(1), net(2)
    theirs(torch.randn(8, 3))  # batch-norm statistics
    weights = theirs.state_dict()
    if kind == "checkpoint":
        state = {"trainer": {"model": checkpoint.model_state(theirs)}}
        path = Checkpoints(tmp_path, 1, None).write(1, state, ())
    elif kind == "bf16":
        torch.save(
            {name: value.bfloat16() if value.is_floating_point() else value for name, value in weights.items()}, path
        )
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=kind != "legacy")
    load_weights(mine, path)
    wanted = {k: v.bfloat16().float() if kind == "bf16" and v.is_floating_point() else v for k, v in weights.items()}
    assert list(differences(wanted, dict(mine.state_dict()), "weights")) == []
    assert mine[0].weight.requires_grad


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w | {"0.weight": torch.ones(4, 9)}, "of another model: its 0.weight is [4, 9], here it is [4, 3]."),
        (lambda w: {"2.bias.not": w.pop("2.bias"), **w}, "of another model: its 2.bias is missing, here it is [2]."),
        (lambda w: w | {"2.bias": 3}, "neither a checkpoint nor a file of weights by name."),
        (lambda w: [*w.values()], "neither a checkpoint nor a file of weights by name."),
        (lambda w: {}, "neither a checkpoint nor a file of weights by name."),
        (lambda w: {"trainer": {"steps": 3}}, "neither a checkpoint nor a file of weights by name."),
        (lambda w: {"trainer": {"model": {"parameters": 3}}}, "neither a checkpoint nor a file of weights by name."),
        (lambda w: {"trainer": torch.ones(2), 3: 4}, "neither a checkpoint nor a file of weights by name."),
        (lambda w: torch.ones(2), "neither a checkpoint nor a file of weights by name."),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_and_none_is_taken(tmp_path, change, sentence):
    path, mine = tmp_path / "weights.pt", net(2)
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    torch.save(change(dict(net(1).state_dict())), path)
    with pytest.raises(InputError, match=f"^{re.escape(f'trainer.init_from={path} is {sentence}')}$"):
        load_weights(mine, path)
    assert list(differences(before, dict(mine.state_dict()), "weights")) == []
