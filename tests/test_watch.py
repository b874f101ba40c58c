"""The watch: its counts against torch's own casts, cases worked out by hand, and that it leaves no trace."""

import json
import logging
import random
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

from own_code.training import (
    ConvNorm,
    TwoHeads,
    all_finite,
    mean_square,
    optimizer_tensors,
    same_bits,
    seeded,
    snapshot,
    train,
    trainer_of,
)
from precision_lab import run as run_module
from precision_lab.config import compose
from precision_lab.errors import InputError
from precision_lab.identity import experiment_signature, run_signature
from precision_lab.meter import Meter
from precision_lab.precision import backend_flags
from precision_lab.probe.predictions import lines_in
from precision_lab.probe.tally import FORMATS, Format, Range, Tallies, scale_window
from precision_lab.probe.watch import Watch
from precision_lab.recorder import Recorder
from precision_lab.torture import compared
from test_resume import attempt, killed

HALF, BRAIN = torch.float16, torch.bfloat16


def counted(*tensors: Tensor, by_power: bool = False) -> Range:
    tallies = Tallies()
    for tensor in tensors:
        tallies.add("module", "quantity", tensor, by_power)
    return tallies.read()["module", "quantity"]


def all_magnitudes(count: int = 100_000) -> Tensor:
    """Every exponent of float32, subnormal ones too, and both neighbours of every threshold."""
    draw = torch.Generator().manual_seed(0)
    exponents = torch.randint(-149, 128, (count,), generator=draw)
    values = torch.ldexp(1 + torch.rand(count, generator=draw, dtype=torch.float64), exponents).float()
    edges = torch.tensor([edge for form in FORMATS.values() for edge in (form.overflow, form.zero, form.normal)])
    low, high = torch.nextafter(edges, torch.tensor(0.0)), torch.nextafter(edges, torch.tensor(float("inf")))
    values = torch.cat([values, edges, low, high, torch.tensor([0.0, 0.0])])
    return values * (1 - 2 * torch.randint(2, values.shape, generator=draw))


class Fixed(nn.Module):
    """Multiplies by a constant that is no parameter."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Weights(nn.Module):
    """20,000 weights around 0 with a standard deviation of 0.02; each has a gradient of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(20_000))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def sum_of(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict]:
    return model(batch).float().sum(), {}


def sgd(lr: float):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, fused=False)


def watched(trainer, batches, steps: int, folder: Path, every: int = 1) -> tuple[list[dict], list[str]]:
    """Train as run.py does; the lines of ranges.jsonl, and the predictions."""
    watch = Watch(every, trainer, lambda batch: batch, Recorder(folder, []))
    batches = watch.begin(iter(batches), lambda: pytest.fail("read anew"))

    def on_log(progress, readings):
        watch.readings(progress.step)

    def pause():
        watch.look(trainer.done)

    trainer.train(batches, Meter(trainer.policy.device, 0), steps, on_log, watch.wanted, pause)
    return list(lines_in(folder / "probe" / "ranges.jsonl")), watch.predictions()


# --- the formats ---------------------------------------------------------------------------------------------------


def test_the_thresholds_are_those_that_are_known():
    assert Format.of(HALF) == Format(65504, 65520, 2.0**-25, 2.0**-14 - 2.0**-25)
    assert Format.of(BRAIN) == Format(2.0**128 - 2.0**120, 2.0**128 - 2.0**119, 2.0**-134, 2.0**-126 - 2.0**-134)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_counts_equal_those_of_a_cast(dtype):
    values, name = all_magnitudes(), str(dtype).removeprefix("torch.")
    cast = values.to(dtype).float()
    there = values != 0
    expected = (cast.isinf(), there & (cast == 0), (cast != 0) & (cast.abs() < torch.finfo(dtype).tiny))
    found = counted(values)
    assert (found.overflow[name], found.flushed[name], found.subnormal[name]) == tuple(int(x.sum()) for x in expected)
    assert all(int(x.sum()) > 100 for x in expected[dtype is BRAIN :])  # the test means something
    assert (found.values, found.nonzero, found.nonfinite) == (len(values), int(there.sum()), 0)
    assert found.largest == float(values.abs().max())


@pytest.mark.parametrize("exponent", [-24, -1, 0, 1, 16, 40, 100])
def test_what_a_loss_scale_flushes_equals_a_cast_of_what_it_scales(exponent):
    values = all_magnitudes()
    scaled = (values.double() * 2.0**exponent).to(torch.float32)  # overflows, and does not underflow, here
    expected = int(((values != 0) & (scaled.half() == 0)).sum())
    assert counted(values, by_power=True).flushed_at(exponent) == expected > 0


def test_what_is_not_finite_is_counted_and_leaves_the_rest_as_it_was():
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 70_000.0, 1.0, 0.0])
    found = counted(bad, torch.tensor([-80_000.0]), by_power=True)
    assert (found.values, found.nonfinite, found.nonzero, found.largest) == (7, 3, 3, 80_000)
    assert (found.overflow["float16"], found.overflow["bfloat16"], sum(found.by_power[1:])) == (2, 0, 3)


def test_the_gradient_of_a_sparse_embedding_is_counted_by_its_rows():
    embedding = nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    found = counted(embedding.weight.grad, by_power=True)
    assert (found.values, found.largest) == (6, 2)


# --- loss scales ---------------------------------------------------------------------------------------------------


def gradients(**tensors: Tensor) -> dict:
    return {(name, "weight_gradient"): counted(tensor, by_power=True) for name, tensor in tensors.items()}


def test_the_window_of_loss_scales_by_hand():
    # 1 * 2^15 is the last power of two below 65520; 1e-8 * 2^2 is the first above 2^-25
    window = scale_window(gradients(large=torch.ones(5), small=torch.full((5,), 1e-8)))
    assert (window.lowest, window.highest) == (2, 15)
    assert (window.below, window.above) == (("small", "weight_gradient"), ("large", "weight_gradient"))
    assert window.holds()
    assert window.holds(2.0**15)
    assert not window.holds(2.0**16)


def test_a_few_that_are_flushed_are_tolerated_in_each_quantity_by_itself():
    few = torch.cat([torch.ones(2000), torch.tensor([1e-8])])
    assert scale_window(gradients(one=few)).lowest is None
    many = {**gradients(one=few), ("one", "activation_gradient"): counted(torch.full((2,), 1e-8), by_power=True)}
    window = scale_window(many)
    assert (window.lowest, window.below) == (2, ("one", "activation_gradient"))


def test_there_may_be_no_scale_and_no_gradient():
    window = scale_window(gradients(large=torch.full((5,), 1e5), small=torch.full((5,), 1e-8)))
    assert (window.lowest, window.highest, window.holds()) == (2, -1, False)
    assert window.stored()["avoids_both"] is False
    assert scale_window(gradients(one=torch.zeros(3))) is None
    assert scale_window({}) is None


def test_gradients_that_need_a_scaler_are_seen_in_a_float32_run(tmp_path):
    """P19: the loss of a small MLP times 1e-3 has gradients that float16 flushes, unless they are scaled."""
    model = seeded(lambda: nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)))
    batch = seeded(lambda: torch.randn(64, 256))

    def small(model, batch):
        return nn.functional.cross_entropy(model(batch), torch.arange(64) % 10) * 1e-3, {}

    ((line,), predicted) = watched(trainer_of("fp32", model, small, sgd(1e-3)), [batch], 1, tmp_path)
    plain = [line["modules"][name]["weight_gradient"]["float16"]["flushed"] for name in "02"]
    assert 0.001 < max(plain) < 0.1
    assert line["loss_scale"] == 65536
    assert line["metrics"]["range/gradient_flushed_fp16"] == 0
    window = line["scale_window"]
    assert 1 < window["lowest"] <= 65536 <= window["highest"]
    assert window["avoids_both"]
    (told,) = [sentence for sentence in predicted if "loss" in sentence]
    scales = f"by {window['lowest']:,g} to {window['highest']:,g} after step 1"
    assert told.startswith(f"prediction for float16: gradients need loss scaling, {scales}; below that")
    of_bfloat16 = line["modules"]["0"]["weight_gradient"]["bfloat16"]
    assert (of_bfloat16["flushed"], of_bfloat16["overflow"]) == (0, 0)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            1e-9,
            "no loss scale suits the gradients after step 1: above a loss scale of 0.015625 the gradient of the "
            "weights of clean (Linear) overflows, and below 32 too many gradients are flushed to zero, most of them in "
            "the gradient at the output of spoiled (Linear).",
        ),
        (
            1e6,
            "above a loss scale of 0.015625 the gradient of the weights of clean (Linear) overflows after step 1, and "
            "precision.min_scale is 1.",
        ),
    ],
)
def test_where_no_loss_scale_suits_it_is_told_with_what_limits_it(tmp_path, other, told):
    def task(model, batch):  # clean's outputs have a gradient of 1e6, and its weights one of 3 * 1e6
        return (model.clean(batch) * 1e6 + model.spoiled(batch) * other).sum(), {}

    trainer = trainer_of("fp32", seeded(TwoHeads), task, sgd(1e-9))
    _, predicted = watched(trainer, [torch.ones(3, 4)], 1, tmp_path)
    assert [sentence for sentence in predicted if "loss scale" in sentence] == [f"prediction for float16: {told}"]


# --- activations, buffers, updates ---------------------------------------------------------------------------------


def test_a_module_that_would_overflow_is_named_with_its_headroom(tmp_path):
    """P37: in float32 nothing is wrong; float16 ends at 65504."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Fixed(70_000.0), Fixed(1e-5)), nn.Linear(4, 1))
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    trainer = trainer_of("fp32", model, mean_square, sgd(0.0))
    lines, predicted = watched(trainer, [torch.full((2, 4), 0.25)], 1, tmp_path)
    modules = lines[0]["modules"]
    assert modules["1.0"]["activation"]["amax"] == 70_000
    assert modules["1.0"]["activation"]["float16"]["overflow"] == 1
    assert modules["1.0"]["activation"]["float16"]["headroom"] == pytest.approx(70_000 / 65_504, rel=1e-5)
    assert modules["1.0"]["activation"]["bfloat16"]["overflow"] == 0
    assert "activation" not in modules.get("1", {})  # the container returns what 1.1 returned
    assert lines[0]["metrics"]["range/activation_headroom_fp16"] == pytest.approx(1.0686, abs=1e-4)
    (told,) = [sentence for sentence in predicted if "overflows" in sentence]
    assert told == (
        "prediction for float16: the output of 1.0 (Fixed) reaches 70,000 after step 1, 1.07 times the largest number "
        "of float16, and overflows where it is held in it; precision.fp32_modules=[1.0] keeps it in float32."
    )


def test_activation_gradients_are_those_of_autograd(tmp_path):
    model, batch = seeded(TwoHeads), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    outputs = {}
    handles = [
        getattr(model, name).register_forward_hook(lambda m, i, o, name=name: outputs.update({name: o}))
        for name in ("clean", "spoiled")
    ]
    loss = mean_square(model, batch)[0]
    expected = dict(zip(outputs, torch.autograd.grad(loss / 2, list(outputs.values())), strict=True))
    for handle in handles:
        handle.remove()
    trainer = trainer_of("fp32", model, mean_square, sgd(0.0), accumulation=2)
    lines, _ = watched(trainer, [batch, batch], 1, tmp_path)
    for name, gradient in expected.items():
        found = lines[0]["modules"][name]
        assert found["activation_gradient"]["amax"] == pytest.approx(float(gradient.abs().max()), rel=1e-5)
        scaled = found["activation_gradient_scaled"]["amax"]
        assert scaled == pytest.approx(65536 * found["activation_gradient"]["amax"], rel=1e-5)


def test_buffers_and_optimizer_state_that_a_format_cannot_hold(tmp_path):
    """P51: batch-norm statistics of large inputs; a second moment that float16 flushes to zero."""
    trainer = trainer_of("fp32", seeded(ConvNorm), mean_square)
    batch = 1e4 * seeded(lambda: torch.randn(8, 2, 8))
    lines, _ = watched(trainer, [batch] * 2, 2, tmp_path, every=2)
    norm = lines[0]["modules"]["norm"]
    variance = norm["buffer.running_var"]
    assert variance["amax"] == pytest.approx(float(trainer.model.norm.running_var.max()), rel=1e-5)
    assert variance["float16"]["headroom"] > 1
    assert variance["float16"]["overflow"] == 1
    assert "buffer.num_batches_tracked" not in norm
    conv = lines[0]["modules"]["conv"]
    second = [trainer.optimizer.state[p]["exp_avg_sq"].flatten() for p in trainer.model.conv.parameters()]
    held = torch.cat(second)[torch.cat(second) != 0]
    flushed = conv["optimizer_state.exp_avg_sq"]["float16"]["flushed"]
    assert flushed == pytest.approx(float((held.half() == 0).float().mean()), rel=1e-5)
    assert flushed > 0
    assert conv["optimizer_state.exp_avg_sq"]["bfloat16"]["flushed"] == 0
    assert "optimizer_state.step" not in conv


def test_a_buffer_that_is_not_finite_is_counted(tmp_path):
    trainer = trainer_of("fp32", seeded(ConvNorm), mean_square)
    trainer.model.norm.running_var[2] = float("inf")
    lines, _ = watched(trainer, [seeded(lambda: torch.randn(8, 2, 8))], 1, tmp_path)
    assert lines[0]["modules"]["norm"]["buffer.running_var"]["nonfinite"] == 1
    assert lines[0]["metrics"]["range/nonfinite_values"] == 0  # of the pass


@pytest.mark.parametrize(("lr", "about"), [(1e-5, 0.845), (1e-4, 0.118), (3e-4, 0.0)])
def test_lost_updates_of_weights_in_bfloat16_by_hand(tmp_path, lr, about):
    """P42: an update of less than half the distance to the next number is lost; in float32 it is predicted."""
    model = seeded(Weights)
    held = model.weight.detach().bfloat16()
    expected = float(((held.float() - lr).bfloat16() == held).float().mean())
    assert expected == pytest.approx(about, abs=0.01)
    pure, own = tmp_path / "pure", tmp_path / "fp32"
    for folder in (pure, own):
        folder.mkdir()
    one = torch.ones(1)
    (line,), told = watched(trainer_of("bf16_pure", seeded(Weights), sum_of, sgd(lr)), [one], 1, pure)
    assert line["lost_updates"] == {"asked": 20_000, "lost": pytest.approx(expected, abs=1e-6)}
    assert line["metrics"]["range/lost_updates"] == line["lost_updates"]["lost"]
    assert "range/lost_updates_bf16" not in line["metrics"]
    assert told == []
    (line,), told = watched(trainer_of("fp32", seeded(Weights), sum_of, sgd(lr)), [one], 1, own)
    assert line["lost_updates"]["lost"] == 0
    assert line["lost_updates"]["lost_bfloat16"] == pytest.approx(expected, abs=0.003)
    assert line["lost_updates"]["lost_float16"] < expected or not expected
    assert line["modules"][""]["updates"] == line["lost_updates"]
    lost = [sentence for sentence in told if "would lose" in sentence]
    assert len(lost) == (about > 0.1)
    assert all("prediction for bfloat16" in sentence for sentence in lost)


def test_one_step_after_the_other_is_lost_although_they_add_up(tmp_path):
    """w = 1 and steps of 1e-3: held in bfloat16 it stays 1, wherever the float32 weight has got to."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight)
    lines, _ = watched(trainer_of("fp32", model, sum_of, sgd(1e-3)), [-torch.ones(1, 1)] * 8, 8, tmp_path)
    assert float(model[0].weight.detach()) > 1.0039  # rounds to another number than 1
    assert [line["lost_updates"]["lost_bfloat16"] for line in lines] == [1.0] * 8


def test_of_a_skipped_step_no_update_is_lost(tmp_path):
    model = seeded(TwoHeads)
    model.bad = float("inf")
    trainer = trainer_of("fp16", model, mean_square)
    lines, _ = watched(trainer, [torch.randn(3, 4)], 1, tmp_path)
    assert lines[0]["lost_updates"] is None
    assert "range/lost_updates" not in lines[0]["metrics"]
    assert lines[0]["metrics"]["range/nonfinite_values"] > 0
    assert lines[0]["loss_scale"] == 32768  # halved by then
    unscaled = trainer_of("fp16_unscaled", seeded(TwoHeads), mean_square)
    other = tmp_path / "unscaled"
    other.mkdir()
    assert watched(unscaled, [torch.randn(3, 4)], 1, other)[0][0]["loss_scale"] == 1


# --- no trace ------------------------------------------------------------------------------------------------------


class Moody(nn.Module):
    """All that a forward may change: generators, buffers, an object in a buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.quiet = nn.Dropout(0.5).eval()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        numpy.random.rand()
        random.random()
        x += 1.0  # the batch itself
        return self.quiet(self.body(x))


def state_of(trainer) -> tuple:
    """What a pass must leave as it was; tensors by object and by value."""
    model = trainer.model
    return (
        snapshot(model),
        [(id(p), p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        [(name, id(buffer)) for name, buffer in model.named_buffers()],
        [module.training for module in model.modules()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        [tensor.clone() for tensor in optimizer_tensors(trainer.optimizer)],
        torch.get_rng_state(),
        (numpy.random.get_state()[1].tolist(), numpy.random.get_state()[2], random.getstate()),
        (backend_flags(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()),
    )


def assert_same(before: tuple, after: tuple) -> None:
    assert same_bits(before[0], after[0])
    for (i, grad, value), (j, now, _) in zip(before[1], after[1], strict=True):
        assert (i, id(grad)) == (j, id(now))
        assert value is None or torch.equal(value, now)
    assert before[2:5] == after[2:5]
    assert all(torch.equal(a, b) for a, b in zip(before[5], after[5], strict=True))
    assert torch.equal(before[6], after[6])
    assert before[7:] == after[7:]


@pytest.mark.parametrize("raises", [None, "forward", "backward"])
@pytest.mark.parametrize("arm", ["fp32", "bf16", "bf16_pure"])
def test_a_look_leaves_everything_as_it_was_also_when_it_raises(arm, raises, tmp_path, caplog):
    looking = False

    def task(model, batch):
        loss, _ = mean_square(model, batch)
        if looking and raises == "forward":
            raise RuntimeError("there is no way on\nand more")
        if looking and raises == "backward":
            loss = loss + (torch.ones(1, requires_grad=True).expand(2)[0] * loss).detach().requires_grad_()
            loss.register_hook(lambda grad: 1 / 0)
        return loss, {}

    trainer = trainer_of(arm, seeded(Moody), task)
    batches = [seeded(lambda: torch.randn(6, 4)) for _ in range(3)]
    watch = Watch(1, trainer, lambda batch: batch, Recorder(tmp_path, []))
    taken = watch.begin(iter(batches), lambda: pytest.fail("read anew"))
    trainer.model.train()
    trainer.model.quiet.eval()
    trainer.step(taken)
    trainer.done = 1
    before, looking = state_of(trainer), True
    with caplog.at_level(logging.WARNING, "precision_lab"):
        watch.look(1)
    assert_same(before, state_of(trainer))
    lines = list(lines_in(tmp_path / "probe" / "ranges.jsonl"))
    assert len(lines) == (raises is None)
    assert watch.wanted(2) is (raises is None)
    assert len(caplog.records) == (raises is not None)
    if raises == "forward":
        (told,) = caplog.messages
        assert told.startswith(
            "probe.ranges: the float32 pass after step 1 raised RuntimeError: there is no way on; it"
        )


def test_the_first_batch_is_looked_at_as_it_was(tmp_path):
    """Though the model writes into each batch that it is given."""
    trainer = trainer_of("fp32", seeded(Moody), mean_square, sgd(0.0))
    batch = seeded(lambda: torch.randn(6, 4))
    lines, _ = watched(trainer, [batch.clone(), 3 * batch, 5 * batch], 3, tmp_path)
    assert lines[0]["loss"] == lines[1]["loss"] == lines[2]["loss"]


def test_running_out_of_memory_ends_the_watch_and_not_the_training(tmp_path, caplog):
    def task(model, batch):
        if not torch.is_autocast_enabled("cpu"):
            torch.empty(2**50)
        return mean_square(model, batch)

    trainer = trainer_of("bf16", seeded(TwoHeads), task)
    with caplog.at_level(logging.WARNING, "precision_lab"):
        lines, told = watched(trainer, [torch.randn(3, 4)] * 5, 5, tmp_path)
    assert (trainer.done, lines, told) == (5, [], [])
    assert caplog.messages == ["probe.ranges: the float32 pass after step 1 ran out of memory; it is not tried again."]
    assert all_finite(trainer.model.parameters())


def test_a_step_looked_at_takes_no_more_memory_of_the_device_and_no_time(tmp_path):
    """What is kept for a look lies on the CPU, and each look is between two windows of the meter."""
    trainer = trainer_of("fp32", seeded(TwoHeads), mean_square)
    watch = Watch(2, trainer, lambda batch: batch, Recorder(tmp_path, []))
    batches = watch.begin(iter([torch.randn(3, 4)] * 4), lambda: pytest.fail("read anew"))
    now, open_windows = 0.0, []
    meter = Meter(torch.device("cpu"), 0, mark=lambda: now, elapsed_ms=lambda a, b: 1e3 * (b - a), clock=lambda: now)
    look = watch.look

    def slow_look():
        nonlocal now
        open_windows.append(bool(meter._marks))
        now += 100.0
        look(trainer.done)

    trainer.train(batches, meter, 4, lambda progress, readings: None, watch.wanted, slow_look)
    assert open_windows == [False] * 4  # after 1 and 3 the weights are kept
    assert meter.step_ms == [0.0] * 4


# --- in a run ------------------------------------------------------------------------------------------------------

TINY = {
    "cnn": ["model=cnn", "model.widths=[4,8]", "dataset=digits", "trainer.batch_size=8"],
    "gpt": [
        *("model=gpt", "model.layers=1", "model.heads=2", "model.width=16", "model.context=8", "model.dropout=0.2"),
        *("dataset=synthetic_tokens", "dataset.samples=64", "trainer.batch_size=4", "trainer.accumulation=2"),
    ],
}
RUN = ["trainer.steps=7", "trainer.log_every=3", "trainer.eval_every=5", "trainer.checkpoint_every=7", "device=cpu"]
RUN += ["device.threads=1", "probe.memory=false", "meter.warmup_steps=1", "precision.init_scale=1e7"]


def finished(outputs: Path, *words: str) -> Path:
    assert run_module.run(compose([*RUN, *words, f"paths.outputs={outputs}"])) == 0
    (folder,) = outputs.glob("runs/*/*")
    return folder


@pytest.mark.parametrize("arm", ["fp32", "bf16", "fp16", "bf16_pure", "fp16 precision.emulate=cuda"])
@pytest.mark.parametrize("model", TINY)
def test_a_run_is_bit_equal_with_and_without(tmp_path, model, arm):
    words = [*TINY[model], *f"precision={arm}".split()]
    alone = finished(tmp_path / "alone", *words)
    observed = finished(tmp_path / "watched", *words, "probe.ranges=2")
    losses = [json.loads((folder / "result.json").read_text())["hashes"]["losses"] for folder in (alone, observed)]
    assert losses[0] == losses[1]
    # weights, optimizer, generators and all figures but those of the watch
    assert [difference for difference in compared(alone, observed) if "range" not in difference] == []
    assert not (alone / "probe").exists()
    assert [line["step"] for line in lines_in(observed / "probe" / "ranges.jsonl")] == [2, 4, 6]
    logged = [json.loads(line) for line in (observed / "metrics.jsonl").read_text().splitlines()]
    with_ranges = [line["train/step"] for line in logged if "range/activation_headroom_fp16" in line]
    assert with_ranges == [3, 5, 6]
    summary = json.loads((observed / "result.json").read_text())["summary"]
    assert summary["final/range_activation_headroom_fp16"] < 1


def test_predictions_stand_in_the_log(tmp_path):
    (folder,) = [finished(tmp_path, *TINY["gpt"], "precision=fp32", "probe.ranges=7", "optimizer.lr=1e-6")]
    said = (folder / "train.log").read_text()
    assert "prediction for bfloat16: weights held in it, as in bf16_pure, would lose" in said


@pytest.mark.parametrize("step", [4, 7])
@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_is_killed_goes_on_as_if_nothing_had_been(tmp_path, every, step):
    """Killed after 4 the line of step 3 is there, and no log point has it yet."""
    words = [f"probe.ranges={every}"]
    alone = attempt(tmp_path / "alone", *words)
    assert alone.code == 0, alone.said
    killed(tmp_path / "outputs", *words, step=step)
    again = attempt(tmp_path / "outputs", *words)
    assert (again.code, again.result["resumed_at"]) == (0, [step - 1])
    assert compared(alone.folder, again.folder) == []
    ranges = [(one.folder / "probe" / "ranges.jsonl").read_bytes() for one in (alone, again)]
    assert ranges[0] == ranges[1]


def test_it_is_no_part_of_the_identity():
    plain, observed = compose([]), compose(["probe.ranges=10"])
    assert experiment_signature(plain) == experiment_signature(observed)
    assert run_signature(plain) == run_signature(observed)
    assert plain.probe.ranges is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["probe.ranges=0"], "probe.ranges=0 is too small; it must be at least 1"),
        (["probe.ranges=often"], "probe.ranges=often"),
        (["probe.ranges=5", "device.compile=true"], "which a compiled model does not run"),
    ],
)
def test_what_cannot_be_watched_is_refused(words, told):
    with pytest.raises(InputError) as refused:
        compose(words)
    assert told in str(refused.value)


def test_without_it_nothing_is_wanted(tmp_path):
    trainer = trainer_of("fp32", seeded(TwoHeads), mean_square)
    watch = Watch(None, trainer, lambda batch: batch, Recorder(tmp_path, []))
    batches = iter([torch.randn(3, 4)])
    assert watch.begin(batches, lambda: pytest.fail("read anew")) is batches
    assert not watch.wanted(0)
    train(trainer, batches, 1)
    assert (watch.readings(1), watch.predictions(), list(tmp_path.iterdir())) == ({}, [], [])
