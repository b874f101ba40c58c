"""The loop: where autocast is on, what the scaler and the clip see, what a non-finite step leaves behind."""

import math
from collections import Counter
from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from own_code.training import (
    ARMS,
    CPU,
    TwoHeads,
    all_finite,
    mean_square,
    optimizer_tensors,
    policy_of,
    same_bits,
    seeded,
    snapshot,
    step,
    train,
    trainer_of,
)
from precision_lab import config, hardware, optim, run
from precision_lab.config import compose
from precision_lab.errors import InputError
from precision_lab.optim import constant, cosine
from precision_lab.task import Classification
from precision_lab.trainer import Progress

NAN, INF = float("nan"), float("inf")
OPTIMIZERS = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "amsgrad_fused": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    "sgd_fused_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=1e-2, foreach=True),
    "sgd_foreach_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "sgd_loop": lambda p: torch.optim.SGD(p, lr=1e-2, foreach=False),
    "sgd_loop_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}
# torch 2.11's fused Adagrad does not take found_inf; 2.14's does
FUSED = sorted(name for name in OPTIMIZERS if "fused" in name and name != "adagrad_fused")


def images(count=24, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 6, generator=draw), torch.randint(3, (8,), generator=draw)) for _ in range(count)]


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def vectors(count, seed=2):
    draw = torch.Generator().manual_seed(seed)
    return [0.25 * torch.randn(4, 4, generator=draw) for _ in range(count)]  # small: no overflow at a scale of 2^16


# ---- autocast: forward and loss, and nothing else --------------------------------------------------


class Spy(torch.autograd.Function):
    """Identity that notes whether autocast is on where its forward and its backward run."""

    seen: list = []

    @staticmethod
    def forward(ctx, x):
        Spy.note("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        Spy.note("backward")
        return grad

    @staticmethod
    def note(place):
        on = torch.is_autocast_enabled("cpu")
        Spy.seen.append((place, on, torch.get_autocast_dtype("cpu") if on else None))


@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd_loop"])
@pytest.mark.parametrize("arm", ARMS)
def test_autocast_is_on_in_forward_and_loss_and_off_in_backward_and_optimizer(arm, optimizer, monkeypatch):
    monkeypatch.setattr(Spy, "seen", [])

    class Model(nn.Linear):
        def forward(self, x):
            return Spy.apply(super().forward(x))

    def task(model, x):
        loss = mean_square(model, x)
        Spy.note("loss")
        return loss

    trainer = trainer_of(arm, seeded(lambda: Model(4, 2)), task, OPTIMIZERS[optimizer], accumulation=2, grad_clip=1.0)
    trainer.optimizer.register_step_pre_hook(lambda *_: Spy.note("optimizer"))
    step(trainer, torch.ones(3, 4))

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16_unscaled": torch.float16}.get(arm)
    inside, outside = (dtype is not None, dtype), (False, None)
    micro_batch = [("forward", *inside), ("loss", *inside), ("backward", *outside)]
    assert Spy.seen == [*micro_batch, *micro_batch, ("optimizer", *outside)]


def test_an_autocast_of_the_callers_does_not_leak_into_fp32():
    with torch.autocast("cpu", torch.bfloat16), policy_of("fp32").autocast():
        assert nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


# ---- equal to a loop written by hand ---------------------------------------------------------------


def by_hand(dtype, batches, accumulation, clip, steps):
    """The loop as one would write it down: no scaler, no guard."""
    model = seeded(mlp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    batches, losses = iter(batches), []
    torch.manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulation):
            x, y = next(batches)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
                loss = F.cross_entropy(model(x), y)
            (loss / accumulation).backward()
            losses.append(loss.detach())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, losses


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.25, 100.0])  # 100: above every norm, so it must change nothing
@pytest.mark.parametrize(("arm", "dtype"), [("fp32", None), ("bf16", torch.bfloat16)])
def test_twenty_steps_equal_a_hand_written_loop_bit_for_bit(arm, dtype, clip, accumulation):
    batches = images(20 * accumulation)
    model, losses = by_hand(dtype, batches, accumulation, clip, 20)

    seen = []

    def task(model, batch):
        loss, metrics = Classification()(model, batch)
        seen.append(loss.detach())
        return loss, metrics

    trainer = trainer_of(arm, seeded(mlp), task, accumulation=accumulation, grad_clip=clip, log_every=7)
    torch.manual_seed(5)
    progress, readings = train(trainer, batches, 20)

    assert torch.equal(torch.stack(seen), torch.stack(losses))
    assert same_bits(snapshot(trainer.model), snapshot(model))
    assert progress.step == 20
    assert progress.skipped_steps == 0
    # the window's loss is the mean over its steps, of each step's mean over its micro-batches
    last_window = torch.stack(losses).double()[14 * accumulation :].mean()
    assert readings[-1]["train/loss"] == pytest.approx(last_window.item(), rel=1e-12)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sgd_momentum"])
@pytest.mark.parametrize("arm", ["fp32", "bf16_pure"])
def test_a_fused_step_is_the_unfused_step_but_for_rounding(arm, optimizer):
    if arm == "bf16_pure" and optimizer != "adamw" and not optim._fused_sgd_is_right(torch.bfloat16):
        pytest.skip("this torch's fused SGD is wrong for bfloat16 weights, and build_optimizer refuses it")
    name = {"adamw": "adamw_loop", "sgd": "sgd_loop", "sgd_momentum": "sgd_loop_momentum"}[optimizer]
    fused = {"adamw": "adamw_fused", "sgd": "sgd_fused", "sgd_momentum": "sgd_fused_momentum"}[optimizer]
    trained = []
    for choice in (name, fused):
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 2)))
        trainer = trainer_of(arm, model, mean_square, OPTIMIZERS[choice])
        for batch in vectors(3):
            step(trainer, 4 * batch)
        trained.append(snapshot(trainer.model))
    for key, value in trained[0].items():
        close = {"rtol": 1e-5, "atol": 1e-6} if arm == "fp32" else {"rtol": 2**-7, "atol": 2**-11}
        torch.testing.assert_close(trained[1][key], value, **close)


def test_fused_sgd_is_refused_where_a_trial_shows_it_wrong(monkeypatch):
    # torch 2.11 on a CPU writes wrong values into bfloat16 weights of 16 elements and more
    node = compose(["optimizer=sgd"]).optimizer
    monkeypatch.setattr(optim, "_fused_sgd_is_right", lambda dtype: False)
    sentence = r"^Fused SGD computes wrong updates of bfloat16 parameters .*; set optimizer\.fused=false\.$"
    with pytest.raises(InputError, match=sentence):
        optim.build_optimizer(node, nn.Linear(4, 4).bfloat16())
    assert optim.build_optimizer(node, nn.Linear(4, 4)).defaults["fused"]
    assert not optim.build_optimizer(node | {"fused": False}, nn.Linear(4, 4).bfloat16()).defaults["fused"]


def test_the_reference_loop_can_tell_arms_apart():
    weights = [snapshot(by_hand(dtype, images(20), 1, None, 20)[0]) for dtype in (None, torch.bfloat16)]
    assert not same_bits(*weights)


# ---- what is held in which dtype, and who gets a scaler --------------------------------------------


@pytest.mark.parametrize("name", sorted(p.stem for p in (config.CONF / "precision").glob("*.yaml")))
def test_the_scaler_is_enabled_for_fp16_alone(name):
    assert policy_of(name).grad_scaler().is_enabled() == (name == "fp16")


def test_there_are_as_many_precisions_as_this_file_knows():
    assert {p.stem for p in (config.CONF / "precision").glob("*.yaml")} == {*ARMS, "fp32_perturbed", "tf32", "auto"}


@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd_fused_momentum", "adamw_loop"])
@pytest.mark.parametrize("arm", ARMS)
def test_weights_gradients_and_optimizer_state_are_float32_under_autocast(arm, optimizer):
    trainer = trainer_of(arm, seeded(mlp), Classification(), OPTIMIZERS[optimizer], grad_clip=1.0)
    step(trainer, images(1)[0])
    held = torch.bfloat16 if arm == "bf16_pure" else torch.float32
    parameters = list(trainer.model.parameters())
    state = [t for t in optimizer_tensors(trainer.optimizer) if t.dim()]  # step counters are float32 everywhere
    assert {p.dtype for p in parameters} == {p.grad.dtype for p in parameters} == {t.dtype for t in state} == {held}
    assert len(state) >= len(parameters)


# ---- P05: the clip sees unscaled gradients ---------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0**8, 2.0**16])
@pytest.mark.parametrize("optimizer", ["sgd_fused", "sgd_loop"])
def test_clip_sees_unscaled_gradients(scale, optimizer):
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.25, 0.125, 0.125, -0.125]]))
        model.bias.fill_(0.09375)
    # x = (1, -1, 1, -1): output 0.46875, and each of the 5 gradients is +-2 * 0.46875 = +-0.9375.
    # All of it is exact in float16, at a loss scale of 2^16 too (61440 < 65504). Norm 0.9375 * sqrt(5) = 2.0963.
    factory = {
        "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        "sgd_loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    }[optimizer]
    trainer = trainer_of("fp16", model, mean_square, factory, precision={"init_scale": scale}, grad_clip=1.0)
    before = snapshot(model)
    _, readings = train(trainer, [torch.tensor([[1.0, -1.0, 1.0, -1.0]])], 1)
    assert readings[0]["train/grad_norm"] == pytest.approx(0.9375 * math.sqrt(5), rel=1e-6)
    moved = torch.cat([(value - before[name]).flatten() for name, value in snapshot(model).items()])
    # clipped to norm 1, times the rate: 0.1 in all, 0.1 / sqrt(5) in each
    assert moved.norm().item() == pytest.approx(0.1, rel=1e-5)
    assert moved.tolist() == pytest.approx([-0.1 / math.sqrt(5) * s for s in (1, -1, 1, -1, 1)], rel=1e-5)


# ---- P06, P07, P08, P14: skips ---------------------------------------------------------------------


def test_the_learning_rate_follows_the_attempted_step_whatever_was_skipped():
    schedule = partial(cosine, warmup_steps=3, final_factor=0.1)
    bad = {0, 1, 2, 7}
    batches = [torch.full((4, 4), NAN) if i in bad else v for i, v in enumerate(vectors(30))]
    rates, applied = {}, {}
    for arm in ARMS:
        trainer = trainer_of(arm, seeded(TwoHeads), mean_square, schedule=schedule, log_every=1)
        progress, readings = train(trainer, batches, 30)
        rates[arm] = [figures["train/lr"] for figures in readings]
        applied[arm] = progress.step - progress.skipped_steps
        counters = {t.item() for t in optimizer_tensors(trainer.optimizer) if t.dim() == 0}
        assert counters == {26.0}, arm
        assert [r["amp/skipped_steps"] for r in readings][:9] == [1, 2, 3, 3, 3, 3, 3, 4, 4]
        assert progress.nonfinite_steps == 4
    expected = [1e-2 * schedule(i, 30) for i in range(30)]
    assert len(set(expected)) > 25
    assert all(rate == expected for rate in rates.values())
    assert set(applied.values()) == {26}


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("arm", ARMS)
def test_skips_are_counted_right_and_leave_weights_and_state_untouched(arm, optimizer):
    clean = vectors(10)
    bad = {0, 3, 4, 9}
    trainer = trainer_of(arm, seeded(TwoHeads), mean_square, OPTIMIZERS[optimizer], log_every=10)
    only_clean = trainer_of(arm, seeded(TwoHeads), mean_square, OPTIMIZERS[optimizer])
    watched = []

    def batches():
        for i, batch in enumerate(clean):
            watched.append((snapshot(trainer.model), [t.clone() for t in optimizer_tensors(trainer.optimizer)]))
            yield torch.full_like(batch, NAN) if i in bad else batch
        watched.append(None)

    progress, readings = train(trainer, batches(), 10)
    watched[10:] = [(snapshot(trainer.model), [t.clone() for t in optimizer_tensors(trainer.optimizer)])]
    train(only_clean, [b for i, b in enumerate(clean) if i not in bad], 6)

    assert (progress.step, progress.skipped_steps) == (10, 4)
    assert readings[-1]["amp/skipped_steps"] == 4
    for i in range(10):
        unmoved = same_bits(watched[i][0], watched[i + 1][0])
        assert unmoved == (i in bad), i
        if i in bad and i:
            assert all(torch.equal(a, b) for a, b in zip(watched[i][1], watched[i + 1][1], strict=True)), i
    # a loss scale is a power of two: at any, the gradients are the same but where float16 is subnormal
    for name, value in snapshot(only_clean.model).items():
        torch.testing.assert_close(trainer.model.state_dict()[name], value, rtol=1e-4 if arm == "fp16" else 0, atol=0)


def test_a_skip_halves_the_loss_scale_once():
    trainer = trainer_of("fp16", seeded(TwoHeads), mean_square, log_every=1)
    nan, fine = torch.full((4, 4), NAN), vectors(1)[0]
    _, readings = train(trainer, [fine, nan, fine, nan, nan], 5)
    assert [r["amp/loss_scale"] for r in readings] == [2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**13]


def test_the_scaler_state_goes_round():
    def loss_times_100(model, batch):
        return 100 * model(batch).float().mean(), {}

    def fresh():
        return trainer_of("fp16", seeded(lambda: nn.Linear(4, 1)), loss_times_100, log_every=1)

    # The bias's float16 gradient is 100 * scale: above 65504 until the scale is 2^9, after 7 skips.
    batches = [vectors(1)[0]] * 10
    first = fresh()
    assert train(first, batches, 10)[0].skipped_steps == 7
    without = fresh()
    assert train(without, batches, 10)[0].skipped_steps == 7
    resumed = fresh()
    resumed.scaler.load_state_dict(first.scaler.state_dict())
    assert train(resumed, batches, 10)[0].skipped_steps == 0
    disabled = policy_of("bf16").grad_scaler().state_dict()
    assert disabled == {}
    with pytest.raises(RuntimeError):
        fresh().scaler.load_state_dict(disabled)


# ---- P09: the scale that collapses; the limits that end a run ---------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw_loop", "sgd_fused_momentum"])
def test_a_clean_batch_after_144_nan_batches_does_not_poison_the_weights(optimizer):
    no_limit = {"max_consecutive_skips": 10**6}
    trainer = trainer_of(
        "fp16", seeded(TwoHeads), mean_square, OPTIMIZERS[optimizer], precision=no_limit, log_every=150
    )
    before = snapshot(trainer.model)
    # 2^16 halved 144 times is 2^-128, whose inverse is inf: torch reports no inf and steps (checked on 2.14.1)
    progress, _ = train(trainer, [torch.full((4, 4), NAN)] * 144 + [torch.ones(4, 4)] * 6, 150)
    assert same_bits(snapshot(trainer.model), before)
    assert all_finite(optimizer_tensors(trainer.optimizer))
    assert progress.skipped_steps == 150
    assert progress.step == 150
    assert "precision.min_scale=1" in progress.diverged
    assert "step 150" in progress.diverged


def test_torch_alone_is_poisoned_there():
    model = seeded(lambda: nn.Linear(4, 1))
    scaler, optimizer = policy_of("fp16").grad_scaler(), torch.optim.AdamW(model.parameters(), fused=True)
    for batch in [torch.full((4, 4), NAN)] * 144 + [torch.ones(4, 4)]:
        optimizer.zero_grad()
        scaler.scale(mean_square(model, batch)[0]).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert not all_finite(model.parameters())


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd_fused_momentum", "rmsprop"])
@pytest.mark.parametrize("arm", ARMS)
def test_150_nan_batches_end_as_diverged_and_touch_nothing(arm, optimizer):
    trainer = trainer_of(arm, seeded(WithNorm), mean_square, OPTIMIZERS[optimizer], grad_clip=1.0, log_every=10)
    before = snapshot(trainer.model)
    handed_out = Counter()

    def batches():
        for _ in range(150):
            handed_out["batches"] += 1
            yield torch.full((4, 4), NAN)

    progress, readings = train(trainer, batches(), 150)
    assert same_bits(snapshot(trainer.model), before, but=("num_batches_tracked",))
    assert all_finite(snapshot(trainer.model).values())
    assert all_finite(optimizer_tensors(trainer.optimizer))
    if arm == "fp16":  # 2^16 is below 1 after 17 halvings, and is read at step 20
        assert progress.step == 20
        assert progress.diverged == "loss scale 0.0625 fell below precision.min_scale=1 by step 20"
    else:
        assert progress.step == 60
        assert "precision.max_consecutive_skips=50" in progress.diverged
        assert "from step 1 on" in progress.diverged
    assert handed_out["batches"] == progress.step == progress.skipped_steps == progress.nonfinite_steps
    assert math.isnan(readings[-1]["train/loss"])


@pytest.mark.parametrize(("in_a_row", "ends"), [(5, False), (6, True)])
@pytest.mark.parametrize("log_every", [1, 2, 4, 100])
def test_skips_in_a_row_are_counted_across_log_windows(in_a_row, ends, log_every):
    nan, fine = torch.full((4, 4), NAN), vectors(1)[0]
    # three skips earlier on, parted from the streak by one clean step: they do not count
    batches = [nan] * 3 + [fine] + [nan] * in_a_row + [fine] * 20
    limit = {"max_consecutive_skips": 5}
    trainer = trainer_of("bf16", seeded(TwoHeads), mean_square, precision=limit, log_every=log_every)
    progress, _ = train(trainer, batches, len(batches))
    if ends:
        assert "precision.max_consecutive_skips=5 " in progress.diverged
        assert "from step 5 on" in progress.diverged
        assert progress.step == min(len(batches), math.ceil(10 / log_every) * log_every)
    else:
        assert progress.diverged is None
        assert progress.step == len(batches)


# ---- P17, P52: one inf gradient, in any precision ---------------------------------------------------


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("arm", ARMS)
def test_one_nonfinite_gradient_changes_no_weight_and_no_state(arm, optimizer, clip, bad):
    trainer = trainer_of(arm, seeded(TwoHeads), mean_square, OPTIMIZERS[optimizer], grad_clip=clip)
    fine = vectors(2)
    step(trainer, fine[0])
    weights = snapshot(trainer.model)
    state = [t.clone() for t in optimizer_tensors(trainer.optimizer)]
    trainer.model.bad = bad
    step(trainer, fine[0])
    assert same_bits(snapshot(trainer.model), weights)
    assert all(torch.equal(a, b) for a, b in zip(state, optimizer_tensors(trainer.optimizer), strict=True))
    trainer.model.bad = None
    step(trainer, fine[1])
    assert all_finite(trainer.model.parameters())
    assert not same_bits(snapshot(trainer.model), weights)


def test_bare_torch_writes_an_inf_gradient_into_bf16_weights():
    model = seeded(TwoHeads)
    model.bad = INF
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_square(model, vectors(1)[0])[0]
    loss.backward()
    optimizer.step()
    assert not all_finite(model.parameters())


# ---- P19: small gradients ----------------------------------------------------------------------------


def gradients_of_a_small_loss(arm):
    """Gradients of loss * 1e-3 of a 64-64-10 MLP: without scaling, a part lies below float16's range."""
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)))
    draw = torch.Generator().manual_seed(1)
    batch = torch.randn(64, 64, generator=draw), torch.randint(10, (64,), generator=draw)

    def task(model, batch):
        loss, metrics = Classification()(model, batch)
        return loss * 1e-3, metrics

    trainer = trainer_of(arm, model, task)
    step(trainer, batch)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_fp16_without_scaling_flushes_small_gradients_and_no_other_arm_does():
    exact = gradients_of_a_small_loss("fp32")
    assert (exact != 0).all()
    flushed = {arm: int((gradients_of_a_small_loss(arm) == 0).sum()) for arm in ARMS[1:]}
    assert flushed.pop("fp16_unscaled") > 10
    assert flushed == {"bf16": 0, "fp16": 0, "bf16_pure": 0}


def test_fp16_gradients_are_fp32s_but_for_rounding():
    exact, scaled = gradients_of_a_small_loss("fp32"), gradients_of_a_small_loss("fp16")
    assert ((scaled - exact).norm() / exact.norm()).item() < 2e-3


# ---- P57: fp16 where the CPU has no units for it ------------------------------------------------------


@pytest.mark.parametrize("arm", ["fp16", "fp16_unscaled"])
def test_fp16_on_a_cpu_without_units_runs_and_says_once_how_much_slower(arm, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(hardware, "cpu_features", lambda: {"avx2"})
    monkeypatch.setattr(hardware, "slowdown", lambda dtype, device: 187.0)
    asked = config.compose([f"precision={arm}", "device=cpu", "check=true", f"paths.outputs={tmp_path}"])
    assert run.run(asked) == 0
    printed = capsys.readouterr().out
    assert printed.count("187") == 1
    assert "float16 has no units of its own here" in printed
    assert "float16 emulated" in printed


def test_the_slowdown_is_measured():
    ratio = hardware.slowdown(torch.float64, CPU, size=64)
    assert 0.1 < ratio < 1000


# ---- no host sync between log points --------------------------------------------------------------------

READS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "nonzero")


class HostReads(TorchDispatchMode):
    """Counts operations that make the host wait for a device, and calls of the tensor methods that do."""

    OPS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen, self._patch = Counter(), monkeypatch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.OPS:
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        for name in READS:
            self._patch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.undo()
        return super().__exit__(*error)

    def _counting(self, name, method):
        def call(tensor, *args, **kwargs):
            self.seen[f"Tensor.{name}"] += 1
            return method(tensor, *args, **kwargs)

        return call


def reads_in_steps(arm, optimizer, batches, steps=4):
    """Host reads of `steps` steps between two log points, the first step left out: it makes the state."""
    model = seeded(WithNorm)
    small_scale = {"init_scale": 256.0}
    trainer = trainer_of(
        arm, model, mean_square, OPTIMIZERS[optimizer], precision=small_scale, grad_clip=1.0, accumulation=2
    )
    batches = iter(batches)
    trainer.model.train()
    trainer.step(batches)
    with pytest.MonkeyPatch.context() as patch, HostReads(patch) as reads:
        for _ in range(steps):
            trainer.step(batches)
    return trainer, reads.seen


@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize("arm", ARMS)
def test_no_host_read_within_a_step_of_a_fused_optimizer(arm, optimizer):
    nan = torch.full((4, 4), NAN)
    trainer, seen = reads_in_steps(arm, optimizer, vectors(6) + [nan] * 4)
    assert seen == {}
    assert not trainer.guard.syncs
    assert sum(int(flag) for flag in trainer.window._flags) == 2


@pytest.mark.parametrize("optimizer", ["sgd_foreach_momentum", "sgd_loop"])
@pytest.mark.parametrize("arm", ARMS)
def test_exactly_one_host_read_a_step_of_another_optimizer(arm, optimizer):
    nan = torch.full((4, 4), NAN)
    trainer, seen = reads_in_steps(arm, optimizer, vectors(6) + [nan] * 4)
    assert trainer.guard.syncs
    assert seen["_local_scalar_dense"] == 4, seen


@pytest.mark.parametrize("read", [lambda t: t.item(), float, bool, lambda t: t.tolist(), lambda t: t.cpu(), int])
def test_the_counter_of_host_reads_counts(read):
    with pytest.MonkeyPatch.context() as patch, HostReads(patch) as reads:
        read(torch.ones(()))
    assert sum(reads.seen.values()) >= 1
    assert not any("_counting" in str(getattr(torch.Tensor, name)) for name in READS)


def test_the_default_optimizers_are_fused():
    for name in ("adamw", "sgd"):
        asked = config.compose([f"optimizer={name}"])
        assert asked.optimizer["fused"] is True


# ---- accumulation, and models that give nothing to train -----------------------------------------------


def test_two_micro_batches_of_half_size_give_the_gradient_of_the_whole():
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(8, 6, generator=draw), torch.randint(3, (8,), generator=draw)
    grads = []
    for accumulation, batches in ((1, [(x, y)]), (2, [(x[:4], y[:4]), (x[4:], y[4:])])):
        model = seeded(lambda: nn.Linear(6, 3))
        trainer = trainer_of("fp32", model, Classification(), accumulation=accumulation)
        trainer.step(iter(batches))
        grads.append(model.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)


def test_parameters_without_a_gradient_are_left_alone():
    class HalfUsed(TwoHeads):
        def forward(self, x):
            return self.clean(x)

    for arm in ARMS:
        trainer = trainer_of(arm, seeded(HalfUsed), mean_square, grad_clip=1.0)
        before = snapshot(trainer.model)
        step(trainer, vectors(1)[0])
        after = snapshot(trainer.model)
        assert torch.equal(before["spoiled.weight"], after["spoiled.weight"])
        assert not torch.equal(before["clean.weight"], after["clean.weight"])


def test_every_parameter_group_keeps_its_own_rate():
    schedule = partial(constant, warmup_steps=1)
    model = seeded(TwoHeads)

    def groups(parameters):
        return torch.optim.SGD(
            [{"params": model.clean.parameters(), "lr": 0.5}, {"params": model.spoiled.parameters()}], lr=0.25
        )

    trainer = trainer_of("fp32", model, mean_square, groups, schedule=schedule)
    _, readings = train(trainer, vectors(2), 1)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.25, 0.125]
    assert readings[0]["train/lr"] == 0.25


def test_losses_are_hashed_step_by_step_whatever_the_log_interval():
    hashes = []
    for log_every in (1, 3, 100):
        trainer = trainer_of("bf16", seeded(TwoHeads), mean_square, log_every=log_every)
        hashes.append(train(trainer, vectors(7), 7)[0].losses.digest())
    trainer = trainer_of("bf16", seeded(TwoHeads), mean_square)
    other = train(trainer, vectors(7, seed=9), 7)[0].losses.digest()
    assert len(set(hashes)) == 1
    assert other != hashes[0]


def test_a_step_without_any_limit_reached_is_not_diverged():
    progress, _ = train(trainer_of("fp16", seeded(TwoHeads), mean_square, log_every=2), vectors(6), 6)
    assert progress.diverged is None


@pytest.mark.parametrize("factor", [-0.25, float("nan"), float("inf")])
def test_a_senseless_learning_rate_is_refused_before_and_in_a_step(factor):
    trainer = trainer_of("fp32", seeded(TwoHeads), mean_square, schedule=lambda step, total: factor)
    sentence = rf"^scheduler: the factor at step 0 is {factor}; it must be finite and not below 0\.$"
    with pytest.raises(InputError, match=sentence):
        optim.check_schedule(lambda step, total: factor, 1)
    before = snapshot(trainer.model)
    with pytest.raises(InputError, match=sentence):
        train(trainer, vectors(1), 1)
    assert same_bits(snapshot(trainer.model), before)


def test_a_schedule_that_raises_is_told_and_leaves_the_rate():
    trainer = trainer_of("fp32", seeded(TwoHeads), mean_square)
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    with pytest.raises(InputError, match=r"^scheduler: \(step, total_steps\) -> factor failed at step 9: .*zero"):
        optim.check_schedule(lambda step, total: 1 / (9 - step), 10)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == rates


def test_a_factor_that_is_a_tensor_becomes_a_number():
    trainer = trainer_of("fp32", seeded(TwoHeads), mean_square, schedule=lambda step, total: torch.tensor(0.5))
    _, readings = train(trainer, vectors(1), 1)
    assert type(readings[0]["train/lr"]) is float


def test_a_checkpoint_is_worth_keeping_before_a_loss_goes_wrong_and_not_only_before_a_scaler_s_first_skip():
    progress, limits = Progress(), policy_of("fp16").config
    losses, skipped = numpy.ones(8), numpy.zeros(8, dtype=bool)
    skipped[0] = skipped[5] = True
    losses[5] = numpy.nan
    progress.advance(losses, skipped, 1024.0, limits)
    assert progress.nonfinite() == {"first_loss": 6, "first_step": 1, "last_streak_from": None}
    assert progress.troubles() == [1, 6, 9]
