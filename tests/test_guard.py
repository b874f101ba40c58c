"""The guard: what a non-finite step wrote into buffers, momentum and counters is gone afterwards."""

import pytest
import torch
from torch import nn

from own_code.training import (
    ARMS,
    ConvNorm,
    all_finite,
    mean_square,
    optimizer_tensors,
    same_bits,
    seeded,
    snapshot,
    step,
    train,
    trainer_of,
)
from precision_lab.optim import NonFiniteGuard
from precision_lab.trainer import evaluate

NAN = float("nan")
COUNTER = ("num_batches_tracked",)
SHAPE = (4, 2, 8)
SMALL_SCALE = {"init_scale": 256.0}  # so that fp16 skips only what a test means it to
BAD = {
    "nan": torch.full(SHAPE, NAN),
    "one_inf": torch.zeros(SHAPE).index_fill(0, torch.tensor([1]), float("inf")),
    "overflow_in_fp16": torch.full(SHAPE, 1e5),
    "overflow_in_fp32": torch.full(SHAPE, 3e38),
}


def signals(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [0.5 * torch.randn(SHAPE, generator=draw) for _ in range(count)]


def sgd(**arguments):
    return lambda p: torch.optim.SGD(p, lr=0.1, **arguments)


OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "syncing": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}


# ---- P51: batch-norm statistics -----------------------------------------------------------------------


CASES = [(arm, bad) for arm in ARMS for bad in BAD if bad != "overflow_in_fp16" or arm.startswith("fp16")]


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize(("arm", "bad"), CASES)
def test_batch_norm_statistics_survive_a_nonfinite_step(arm, bad, optimizer):
    trainer = trainer_of(
        arm, seeded(ConvNorm), mean_square, OPTIMIZERS[optimizer], precision=SMALL_SCALE, grad_clip=1.0
    )
    fine = signals(3)
    step(trainer, fine[0])
    before = snapshot(trainer.model)
    assert not torch.equal(before["norm.running_mean"], torch.zeros_like(before["norm.running_mean"]))
    step(trainer, BAD[bad])
    assert int(trainer.window._flags[-1]) == 1
    assert same_bits(snapshot(trainer.model), before, but=COUNTER)
    assert all(torch.isfinite(torch.tensor(value)) for value in validated(trainer, fine).values())
    step(trainer, fine[1])
    after = snapshot(trainer.model)
    assert int(trainer.window._flags[-1]) == 0
    assert not torch.equal(after["norm.running_mean"], before["norm.running_mean"])
    assert all_finite(after.values())


def validated(trainer, batches):
    return evaluate(trainer.policy, trainer.task, trainer.model, lambda: ((batch, len(batch)) for batch in batches))


def test_torch_alone_leaves_the_statistics_poisoned():
    model = seeded(ConvNorm)
    with torch.autocast("cpu", torch.float16):
        model(BAD["overflow_in_fp16"])
    assert not all_finite(model.buffers())


@pytest.mark.parametrize("arm", ARMS)
def test_statistics_after_a_bad_batch_are_those_of_a_run_that_never_saw_it(arm):
    fine = signals(6)
    trainers = [trainer_of(arm, seeded(ConvNorm), mean_square, sgd(fused=True), precision=SMALL_SCALE) for _ in "ab"]
    train(trainers[0], [*fine[:2], BAD["nan"], *fine[2:4], BAD["one_inf"], BAD["nan"], *fine[4:]], 9)
    progress, _ = train(trainers[1], fine, 6)
    assert progress.skipped_steps == 0
    saw, never = (snapshot(trainer.model) for trainer in trainers)
    assert same_bits(saw, never, but=COUNTER) or arm == "fp16"
    for name in never:
        if not name.endswith(COUNTER):  # fp16: another loss scale, other subnormals
            torch.testing.assert_close(saw[name], never[name], rtol=1e-4 if arm == "fp16" else 0, atol=0)


def test_one_bad_micro_batch_of_two_is_enough():
    trainer = trainer_of("bf16", seeded(ConvNorm), mean_square, accumulation=2)
    trainer.model.train()
    before = snapshot(trainer.model)
    trainer.step(iter([BAD["nan"], signals(1)[0]]))
    assert same_bits(snapshot(trainer.model), before, but=COUNTER)


@pytest.mark.parametrize("arm", ARMS)
def test_statistics_survive_a_nonfinite_step_after_an_evaluation(arm):
    # An evaluation in float32 converts a bf16_pure model and back: the buffers are then other tensors.
    trainer = trainer_of(arm, seeded(ConvNorm), mean_square, precision=SMALL_SCALE)
    fine = signals(2)
    step(trainer, fine[0])
    validated(trainer, fine)
    before = snapshot(trainer.model)
    step(trainer, BAD["nan"])
    assert same_bits(snapshot(trainer.model), before, but=COUNTER)
    step(trainer, fine[1])
    assert all_finite(trainer.model.buffers())
    assert not same_bits(snapshot(trainer.model), before, but=COUNTER)


# ---- buffers of all sorts -------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Adds every batch's mean to buffers of several dtypes, shapes and layouts."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.register_buffer("full", torch.full((3,), 0.3))
        self.register_buffer("low", torch.full((2, 2), 0.3, dtype=torch.bfloat16))
        self.register_buffer("scalar", torch.tensor(0.3))
        self.register_buffer("wide", torch.full((2,), 0.3, dtype=torch.float64))
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("unsaved", torch.full((1,), 0.3), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("absent", None)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        with torch.no_grad():
            for name, buffer in self.named_buffers():
                buffer.add_(1 if name == "count" else x.mean().to(buffer.dtype))
        return self.head(x)


def test_buffers_of_several_dtypes_and_layouts_together():
    trainer = trainer_of("fp32", seeded(Buffers), mean_square)
    fine = signals(2)
    step(trainer, fine[0])
    before = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
    layouts = {name: buffer.stride() for name, buffer in trainer.model.named_buffers()}
    objects = {name: buffer.data_ptr() for name, buffer in trainer.model.named_buffers()}
    step(trainer, BAD["nan"])
    after = dict(trainer.model.named_buffers())
    assert same_bits(after, before, but=("count",))
    assert {buffer.dtype for buffer in after.values()} >= {torch.float32, torch.bfloat16, torch.float64}
    assert {name: buffer.stride() for name, buffer in after.items()} == layouts
    assert {name: buffer.data_ptr() for name, buffer in after.items()} == objects
    step(trainer, fine[1])
    moved = {n for n, b in trainer.model.named_buffers() if b.numel() and not torch.equal(b, before[n])}
    assert moved == {"full", "low", "scalar", "wide", "transposed", "unsaved", "count"}


class Reassigns(nn.Module):
    """Keeps a running mean as many people write it: the buffer is another tensor after each step."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return self.head(x)


def test_a_buffer_that_forward_replaces_is_put_back_too():
    trainer = trainer_of("bf16", seeded(Reassigns), mean_square)
    fine = signals(2)
    step(trainer, fine[0])
    before = trainer.model.mean.clone()
    step(trainer, BAD["nan"])
    assert torch.equal(trainer.model.mean, before)
    step(trainer, fine[1])
    assert trainer.model.mean.isfinite()
    assert not torch.equal(trainer.model.mean, before)


def test_a_buffer_whose_elements_share_memory_does_not_stop_the_run():
    class Expanded(nn.Linear):
        def __init__(self):
            super().__init__(8, 1)
            self.register_buffer("ones", torch.ones(1).expand(8))

        def forward(self, x):
            return super().forward(x * self.ones)

    trainer = trainer_of("fp32", seeded(Expanded), mean_square)
    step(trainer, signals(1)[0])
    step(trainer, BAD["nan"])
    assert torch.equal(trainer.model.ones, torch.ones(8))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_buffer_does_not_stop_the_run(layout):
    class Graph(nn.Linear):
        def __init__(self):
            super().__init__(8, 1)
            self.register_buffer("edges", getattr(torch.eye(8), layout)())
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += x.detach().mean()
            return super().forward(torch.sparse.mm(self.edges, x.flatten(0, -2).T).T)

    trainer = trainer_of("fp32", seeded(Graph), mean_square)
    step(trainer, signals(1)[0])
    before = trainer.model.seen.clone()
    step(trainer, BAD["nan"])
    assert torch.equal(trainer.model.seen, before)  # its neighbours stay guarded
    assert torch.equal(trainer.model.edges.to_dense(), torch.eye(8))


def test_a_model_without_buffers_costs_nothing():
    trainer = trainer_of("fp32", nn.Linear(8, 1), mean_square)
    assert trainer.guard._buffers == []


# ---- fused SGD: the momentum buffer that torch does not fill --------------------------------------------

POISON = 7.7


def poison_the_allocator(model):
    """Leave freed memory full of 7.7 in the sizes of the momentum buffers to come."""
    for _ in range(3):
        left = [torch.full_like(p, POISON) for p in model.parameters() for _ in range(20)]
        del left


def model_for_momentum():
    return seeded(lambda: nn.Sequential(nn.Linear(8, 37), nn.Tanh(), nn.Linear(37, 1)))


def test_torch_alone_steps_by_garbage_after_a_skipped_first_step():
    model = model_for_momentum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for skipped in (1.0, 0.0):
        mean_square(model, signals(1)[0])[0].backward()
        poison_the_allocator(model)
        optimizer.found_inf = torch.tensor(skipped)
        optimizer.step()
        optimizer.zero_grad()
    if all(b.abs().max() < 1 for b in optimizer_tensors(optimizer)):
        pytest.skip("this torch fills the momentum buffer, or the allocator handed out clean memory")
    # momentum 0.9 times the garbage
    assert any((b - 0.9 * POISON).abs().min() < 0.5 for b in optimizer_tensors(optimizer))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("arm", ARMS)
def test_momentum_after_a_skipped_first_step_is_that_of_a_run_that_never_saw_the_batch(arm, nesterov):
    optimizer = sgd(momentum=0.9, nesterov=nesterov, weight_decay=1e-3, fused=True)
    fine = signals(3)
    trainers = [
        trainer_of(arm, model_for_momentum(), mean_square, optimizer, precision=SMALL_SCALE, grad_clip=1.0)
        for _ in "ab"
    ]
    poison_the_allocator(trainers[0].model)
    step(trainers[0], BAD["nan"])
    poison_the_allocator(trainers[0].model)
    for trainer in trainers:
        assert not trainer.guard.syncs
        for batch in fine:
            step(trainer, batch)
    saw, never = (snapshot(trainer.model) for trainer in trainers)
    for name in never:
        torch.testing.assert_close(saw[name], never[name], rtol=1e-3 if arm == "fp16" else 0, atol=0)
    for a, b in zip(*(list(optimizer_tensors(t.optimizer)) for t in trainers), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if arm == "fp16" else 0, atol=1e-6 if arm == "fp16" else 0)
        assert b.abs().max() < 1


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_zero_momentum_buffer_changes_no_bit_of_a_run_without_skips(nesterov):
    optimizer = sgd(momentum=0.9, nesterov=nesterov, weight_decay=1e-3, fused=True)
    trainer = trainer_of("fp32", model_for_momentum(), mean_square, optimizer)
    model = model_for_momentum()
    bare = optimizer(model.parameters())
    for batch in signals(5):
        step(trainer, batch)
        bare.zero_grad()
        mean_square(model, batch)[0].backward()
        bare.step()
        assert same_bits(snapshot(trainer.model), snapshot(model))


def test_dampening_takes_the_syncing_path_and_is_torchs_own_arithmetic():
    optimizer = sgd(momentum=0.9, dampening=0.5, fused=True)
    trainer = trainer_of("bf16", model_for_momentum(), mean_square, optimizer)
    assert trainer.guard.syncs
    model = model_for_momentum()
    bare = optimizer(model.parameters())
    step(trainer, BAD["nan"])
    for batch in signals(3):
        step(trainer, batch)
        bare.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_square(model, batch)[0]
        loss.backward()
        bare.step()
    assert same_bits(snapshot(trainer.model), snapshot(model))


def test_a_group_without_momentum_gets_no_buffer():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    groups = [{"params": list(model[0].parameters()), "momentum": 0.9}, {"params": list(model[1].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.1, fused=True)
    assert not NonFiniteGuard(optimizer, model).syncs
    assert {id(p) for p in optimizer.state} == {id(p) for p in model[0].parameters()}


@pytest.mark.parametrize(
    ("make", "syncs"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), False),
        (lambda p: torch.optim.Adam(p, fused=True), False),
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), False),
        (lambda p: torch.optim.AdamW(p, foreach=True), True),
        (lambda p: torch.optim.AdamW(p), True),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), True),
        (lambda p: torch.optim.RMSprop(p), True),
    ],
)
def test_only_an_optimizer_that_takes_the_flag_goes_without_a_sync(make, syncs):
    model = nn.Linear(2, 2)
    assert NonFiniteGuard(make(model.parameters()), model).syncs is syncs


def test_the_flag_does_not_stay_on_the_optimizer():
    for arm in ("bf16", "fp16"):
        trainer = trainer_of(arm, model_for_momentum(), mean_square)
        step(trainer, BAD["nan"])
        assert getattr(trainer.optimizer, "found_inf", None) is None
        assert getattr(trainer.optimizer, "grad_scale", None) is None


class Remembers(nn.Module):
    """A batch norm beside a buffer that forward makes anew in another shape, and one that it drops."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(16, 1)
        self.register_buffer("cache", torch.zeros(0))
        self.register_buffer("once", torch.zeros(3))

    def forward(self, x):
        self.cache, self.once = x.detach().mean((1, 2)), None
        return self.head(self.norm(x).flatten(1))


def test_a_buffer_of_another_shape_is_let_go_and_the_others_stay_guarded():
    trainer = trainer_of("fp32", seeded(Remembers), mean_square)
    first, second = signals(2)
    step(trainer, first)
    before = trainer.model.norm.running_mean.clone()
    step(trainer, BAD["nan"])
    assert torch.equal(trainer.model.norm.running_mean, before)
    step(trainer, second)
    assert not torch.equal(trainer.model.norm.running_mean, before)
    assert trainer.model.cache.shape == (4,)


def test_a_buffer_of_another_dtype_or_deleted_is_let_go():
    trainer = trainer_of("fp32", seeded(ConvNorm), mean_square)
    norm = next(module for module in trainer.model.modules() if isinstance(module, nn.BatchNorm1d))
    norm.register_buffer("late", torch.zeros(2))
    trainer.model.register_buffer("gone", torch.zeros(2))
    guard = NonFiniteGuard(trainer.optimizer, trainer.model)
    norm.late, expected = norm.late.double() + 1, norm.running_mean.clone()
    del trainer.model.gone
    norm.running_mean.fill_(NAN)
    for group in guard._buffers:
        group.keep_old_where(torch.ones(()))
    assert torch.equal(norm.running_mean, expected)
    assert norm.late.tolist() == [1, 1]


def test_a_run_that_goes_on_guards_the_buffers_that_it_guarded_before():
    """One that forward makes is not guarded in a run that was never stopped, and so not in one that goes on."""

    class Counting(ConvNorm):
        def forward(self, x):
            if not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros(1))
            self.seen += 1.0
            return super().forward(x)

    alone, stopped = (trainer_of("fp32", seeded(Counting), mean_square) for _ in range(2))
    first, bad, last = signals(1)[0], BAD["nan"], signals(1, seed=1)[0]
    for trainer in (alone, stopped):
        step(trainer, first)
    fresh = trainer_of("fp32", seeded(Counting), mean_square)
    fresh.load_state(stopped.state())
    for trainer in (alone, fresh):
        step(trainer, bad)
        step(trainer, last)
    assert alone.model.seen.item() == fresh.model.seen.item() == 3.0
    assert same_bits(*(dict(sorted(snapshot(one.model).items())) for one in (alone, fresh)))
    assert fresh.guard.guarded() == alone.guard.guarded()
