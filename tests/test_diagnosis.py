"""The diagnosis by its parts: what is measured is what the definitions say, what is searched is found."""

import gc
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zoo
from precision_lab.config import load_precision
from precision_lab.diagnosis.attribution import smallest
from precision_lab.diagnosis.examine import examine
from precision_lab.diagnosis.patient import NoGradient, Patient, round_significand
from precision_lab.errors import InputError
from zoo.case import adamw, classify, samples, seeded
from zoo.faults import OwnRMSNorm

BATCH = samples(16, 16)


def patient(model, precision="bf16", target="cuda", batch=None, task=classify):
    return Patient(model, task, BATCH(0) if batch is None else batch, load_precision(precision), target)


def examined(model, precision="bf16", target="cuda", batch=None, task=classify):
    batch = BATCH(0) if batch is None else batch
    return examine(model, task, batch, load_precision(precision), target, adamw)


def net(*inner: nn.Module) -> nn.Sequential:
    make = lambda: nn.Sequential(nn.Linear(16, 16), *inner, nn.Linear(16, 10))  # noqa: E731
    return seeded(0, make)


def total(model, batch):
    """A loss of which the gradient is known: the sum of all outputs."""
    return model(batch[0]).float().sum(), {}


def db(exact: torch.Tensor, other: torch.Tensor) -> float:
    exact, other = exact.double(), other.double()
    return 10 * math.log10(exact.square().sum() / (exact - other).square().sum())


@pytest.fixture(autouse=True)
def _same_weights():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


# --- the measure --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_sqnr_by_hand(precision, dtype):
    """The gradient of one linear output's sum is the input, which a low-precision matmul rounds."""
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    one = patient(nn.Linear(50, 1, bias=False), precision, batch=(x,), task=total)
    expected = db(x, x.to(dtype).float())
    outcome = one.arm()
    assert outcome.sqnr == pytest.approx(expected, abs=1e-6)
    assert one.floor == pytest.approx(expected, abs=1e-6)
    assert one.noise == math.inf
    assert one.bound == min(one.floor, one.one_rounding)
    assert one.excess(outcome) == pytest.approx(one.bound - expected, abs=1e-6)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_one_rounding_is_the_error_of_rounding_values_near_1(precision, dtype):
    values = 1 + torch.rand(100_000, generator=torch.Generator().manual_seed(0)) / 16
    assert patient(net(), precision).one_rounding == pytest.approx(db(values, values.to(dtype).float()), abs=0.4)


def test_the_bound_is_no_more_than_chance_leaves():
    one = patient(net())
    one.noise = 12.0
    assert one.bound == 12.0


def test_a_gradient_that_is_not_finite_has_no_sqnr():
    one = patient(net(Scales(1e30)), "fp16")
    outcome = one.arm()
    assert outcome.sqnr == -math.inf
    assert not outcome.finite
    assert outcome.nonfinite[0] == "1"
    assert one.excess(outcome) == math.inf


@pytest.mark.parametrize(
    ("dtype", "bits", "lowest", "highest"), [(torch.bfloat16, 7, -126, 127), (torch.float16, 10, -14, 15)]
)
def test_rounding_a_significand_is_torchs_cast_in_the_normal_range(dtype, bits, lowest, highest):
    draw = torch.Generator().manual_seed(0)
    exponents = torch.randint(lowest, highest, (200_000,), generator=draw)
    values = torch.ldexp(1 + torch.rand(200_000, generator=draw), exponents)
    ties = torch.ldexp(1 + torch.arange(0, 2 ** (bits + 1)) * 2.0 ** -(bits + 1), torch.tensor(3))
    for exact in (values, -values, ties, -ties, torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf])):
        assert torch.equal(round_significand(exact, bits), exact.to(dtype).float())
    assert round_significand(torch.tensor(math.nan), bits).isnan()


@pytest.mark.parametrize("bits", [7, 10])
def test_rounding_a_significand_knows_no_range(bits):
    values = torch.tensor([1e-38, 3.14e-30, 1e-7, 7e4, 1e30, 3e38])
    rounded = round_significand(values, bits)
    assert ((rounded - values).abs() <= values * 2.0 ** -(bits + 1)).all()
    assert not torch.equal(rounded, values)
    assert torch.equal(round_significand(values * 2.0**-3, bits)[1:], rounded[1:] * 2.0**-3)


class Scales(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def times(factor):
    def task(model, batch):
        loss, _ = classify(model, batch)
        return loss * factor, {}

    return task


@pytest.mark.parametrize("factor", [1e-3, 1.0, 37.0, 1e3])
def test_the_loss_scale_is_the_first_that_leaves_gradients_finite(factor):
    one = patient(net(), "fp16", task=times(factor))
    outcome, most = one.arm(), one.precision.init_scale
    assert outcome.finite
    assert one.excess(outcome) < 10
    assert math.log2(outcome.scale).is_integer()
    assert outcome.scale <= most
    assert (outcome.scale < most) is (factor > 1)
    if outcome.scale < most:
        larger = replace(one.precision, init_scale=4 * outcome.scale, min_scale=4 * outcome.scale)
        assert not one.under(larger).arm().finite
    assert patient(net(), "bf16", task=times(factor)).arm().scale == 1


@pytest.mark.parametrize(
    ("factor", "precision", "setting"),
    [
        (1e-10, "fp16", "precision.init_scale"),
        (1e-10, "fp16_unscaled", "precision.grad_scaling"),
        (1e8, "fp16", "precision.min_scale"),
    ],
)
def test_a_loss_too_small_or_too_large_for_its_scale_is_a_matter_of_the_scale(factor, precision, setting):
    found = examined(net(), precision, task=times(factor))
    assert found.culprits == [setting]
    assert found.excess(found.healed) < 7
    assert found.cure.init_scale == found.healed.scale
    assert found.cure.grad_scaling
    assert found.cure.fp32_modules == []


@pytest.mark.parametrize(
    ("width", "depth", "batch", "precision", "seed"),
    [(16, 2, 16, "fp16", 42), (32, 3, 16, "bf16", 15), (32, 3, 16, "fp16", 1), (64, 3, 32, "fp16", 10)],
)
def test_a_relu_that_a_rounding_turns_over_is_no_finding(width, depth, batch, precision, seed):
    """In one of some 70 small nets it costs the gradient more than 10 dB, and no floor has it."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model, data = nn.Sequential(*layers, nn.Linear(width, 10)), samples(batch, width)(seed)
    before = [p.clone() for p in model.parameters()]
    one = patient(model, precision, batch=data)
    outcome = one.arm()
    one.refine_floor()
    assert one.excess(outcome) > 10
    found = examined(model, precision, batch=data)
    assert (found.healthy, found.culprits) == (True, [])
    assert all(map(torch.equal, model.parameters(), before))


# --- a model that is not the same twice ---------------------------------------------------------------------------


class Jitters(nn.Module):
    """Draws from a generator of its own, which nothing puts back."""

    def __init__(self, size):
        super().__init__()
        self.size, self.own = size, torch.Generator().manual_seed(0)

    def forward(self, x):
        return x * (1 + self.size * torch.randn(x.shape, generator=self.own))


@pytest.mark.parametrize("size", [1e-4, 1e-2, 0.3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_chance_is_no_finding(size, precision):
    found = examined(net(Jitters(size)), precision)
    assert found.healthy
    assert found.patient.noise < 100
    assert found.patient.bound <= found.patient.noise


def test_a_fault_is_found_beside_chance():
    found = examined(net(Scales(1e6), nn.Tanh(), Jitters(1e-4)), "fp16")
    assert found.culprits == ["1"]


# --- errors of single operations ----------------------------------------------------------------------------------


class Shifts(nn.Module):
    """Takes a number far from where low-precision ones are fine, and back."""

    def forward(self, x):
        return (x + 300) - 300


def rows_of(model, precision="bf16", target="cuda", batch=None, task=classify):
    errors = patient(model, precision, target, batch, task).local_errors()
    return {(row.module, row.op, row.phase): row for row in errors.rows()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_late_module_is_not_blamed_for_an_early_one(precision):
    """Its own error is what it would be if nothing went wrong before."""
    later = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)]
    good, bad = (rows_of(net(inner, *later), precision) for inner in (nn.Identity(), Shifts()))
    compared = [key for key in good if key[0].startswith(("2.", "3.", "4.", "5.")) and key[2] == "forward"]
    assert len(compared) == 8
    for key in compared:
        assert bad[key].total == pytest.approx(good[key].total, rel=0.3), key
    shift = bad["1", "sub", "forward"]
    assert shift.total > 1000 * max(bad[key].total for key in compared)


class Does(nn.Module):
    """A module that is one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def identity(size, function):
    """A layer that changes nothing, so that the function gets low-precision values."""
    model = nn.Sequential(nn.Linear(size, size, bias=False), Does(function))
    nn.init.eye_(model[0].weight)
    return model


def _views(x):
    a, b = x.reshape(4, 4, 16).transpose(0, 1).flatten(0, 1).chunk(2, dim=1)
    return torch.cat([b.expand(16, 8), a.unsqueeze(1).squeeze(1)], dim=1).contiguous().view(16, 16)


def _in_place(x):
    y = x * 2
    y.add_(1).mul_(0.5)
    y[:, :4] += 1
    y[:, 4].zero_()
    F.relu_(y)
    return y


def _written_into_empty(x):
    y = x.new_empty(16, 16)
    y[:8] = x[8:]
    y[8:] = x[:8] * 3
    return y


def _nonzero(x):
    rows, columns = (x > 0).nonzero(as_tuple=True)
    return torch.zeros_like(x).index_put((rows, columns), x[rows, columns])


def _masked(x):
    kept = torch.masked_select(x, x > 0)
    return x + kept.sum() * 0.01 + x[x < 0].sum() * 0.01


def _integers(x):
    order = x.argsort(dim=1)
    return x.gather(1, order) + (order % 3).to(x.dtype)


def _float64(x):
    return (x.double() * 1.5).cumsum(1).to(x.dtype)


def _pooled(x):
    pooled, places = F.max_pool1d(x[:, None], 2, return_indices=True)
    return F.max_unpool1d(pooled, places, 2)[:, 0] + F.adaptive_max_pool1d(x[:, None], 16)[:, 0]


def _sparse(x):
    return torch.sparse.mm(torch.eye(16).to_sparse(), x.float())


def _split(x):
    return sum(torch.split(x, [4, 4, 8], dim=1)[2].repeat(1, 2) for _ in range(2)) + torch.stack(x.unbind(1), 1)


def _no_grad(x):
    with torch.no_grad():
        scale = x.abs().amax()
    return x / scale


def _again(x):
    inner = lambda y: F.gelu(y * 2).square()  # noqa: E731
    return checkpoint(inner, x, use_reentrant=False)


def _again_reentrant(x):
    return checkpoint(lambda y: F.gelu(y * 2).square(), x, use_reentrant=True)


def _attention(x):
    q = x.reshape(1, 2, 16, 8)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(16, 16)


def _complex(x):
    return torch.fft.irfft(torch.fft.rfft(x.float()), n=16)


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.exp())
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        x, e = ctx.saved_tensors
        return grad * 2 + 0 * x + 0 * e.log()


UNUSUAL = {
    "views": _views, "in place": _in_place, "written into empty": _written_into_empty, "nonzero": _nonzero,
    "masked_select": _masked, "integers": _integers, "float64": _float64, "max pooling": _pooled, "sparse": _sparse,
    "split": _split, "no_grad": _no_grad, "checkpoint": _again, "reentrant checkpoint": _again_reentrant,
    "attention": _attention, "complex": _complex, "saved tensors": _Saves.apply,
}  # fmt: skip


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_whatever_a_step_does_its_own_errors_are_those_of_roundings(name, precision, target):
    model = net(Does(UNUSUAL[name]), nn.Linear(16, 16), nn.ReLU())
    rows = rows_of(model, precision, target)
    assert {("0", "linear", "forward"), ("2", "linear", "backward"), ("4", "linear", "backward")} <= set(rows)
    most = 10 ** ((15 - patient(model, precision).one_rounding) / 10)  # 15 dB below a single rounding
    assert {key: row.error for key, row in rows.items() if row.error > most} == {}
    assert {key for key, row in rows.items() if row.nonfinite} == set()
    found = examined(model, precision, target)
    assert (found.healthy, found.culprits) == (True, [])


def test_an_error_of_an_operation_by_hand():
    """That of squares, on exact inputs: these are rounded as they are stored, and then the result is."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    row = rows_of(identity(16, lambda x: x * x), batch=(x,), task=total)["1", "mul", "forward"]
    low = x.to(torch.bfloat16)
    assert row.error == row.total == pytest.approx(10 ** (-db(x * x, low * low) / 10), rel=1e-4)
    assert row.amax == pytest.approx(float((x * x).max()), rel=1e-6)
    assert (row.nonfinite, row.flushed) == (0, 0)


def test_values_lost_and_flushed_are_counted():
    x = torch.tensor([[300.0, 2.0, 1e-4, 400.0]])
    row = rows_of(identity(4, lambda x: x * x), "fp16", batch=(x,), task=total)["1", "mul", "forward"]
    assert (row.nonfinite, row.flushed) == (2, 1)


def test_a_mask_of_dropout_is_drawn_once():
    """Two masks would be an error of 0 dB."""
    model = net(nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.3))
    for row in rows_of(model).values():
        assert row.error < 1e-4, row


def test_what_is_kept_beside_the_step_is_let_go():
    model = net(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(20)))
    one = patient(model, batch=samples(512, 16)(0))

    def alive() -> int:
        gc.collect()
        return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is torch.Tensor)

    before = alive()
    errors = one.local_errors()
    assert alive() - before < 512 * 16 * 4  # one activation
    assert len(errors.rows()) > 60


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_bias_before_a_batch_norm_has_no_gradient_and_no_error(precision, target):
    """Its gradient is 0 but for roundings, so that any error is larger."""

    def make():
        block = lambda c: [nn.Conv2d(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]  # noqa: E731
        return nn.Sequential(*block(3), *block(16), nn.Flatten(), nn.Linear(16 * 64, 16), nn.BatchNorm1d(16))

    for seed in range(4):
        model, batch = seeded(seed, make), samples(16, 3, 8, 8)(seed)
        rows = rows_of(model, precision, target, batch)
        assert max(row.error for row in rows.values()) < 100 * 10 ** (-patient(net(), precision).one_rounding / 10)
        assert examined(model, precision, target, batch).healthy


# --- the search ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_the_smallest_set_is_enough_and_nothing_can_be_left_out(seed):
    draw = random.Random(seed)
    units = [f"unit{i}" for i in range(draw.randint(1, 40))]
    sets = [set(draw.sample(units, min(len(units), draw.randint(1, 5)))) for _ in range(draw.randint(1, 4))]

    def enough(some):
        return any(one <= set(some) for one in sets)

    found = smallest(units, enough)
    assert enough(found)
    assert [one for one in found if enough([other for other in found if other != one])] == []
    assert found == [unit for unit in units if unit in found]  # in their order


@pytest.mark.parametrize("n", [8, 64, 1024])
def test_one_of_many_is_found_by_halving(n):
    for guilty in (0, n // 3, n - 1):
        asked = []
        assert smallest(list(range(n)), lambda some, g=guilty, a=asked: a.append(some) or g in some) == [guilty]
        assert len(asked) <= 2 * math.log2(n)


def faulty(name="squares_overflow"):
    case = zoo.FAULTY[name]
    return case, case.build(0), case.batch(0)


@pytest.mark.parametrize("name", ["squares_overflow", "one_pass_variance_bf16", "own_function", "mask_constant"])
def test_what_an_arm_keeps_already_is_respected(name):
    """A healed arm is healthy, and of what it keeps nothing is proposed again."""
    case, model, batch = faulty(name)
    found = examine(model, case.task, batch, load_precision(case.precision), case.target, case.optimizer)
    assert found.cure.fp32_modules or found.cure.fp32_ops
    again = examine(model, case.task, batch, found.cure, case.target, case.optimizer)
    assert (again.healthy, again.culprits, again.cure) == (True, [], None)
    assert again.plain.sqnr == found.healed.sqnr


def test_operations_that_an_arm_keeps_are_respected():
    case, model, batch = faulty("log_sum_exp")
    plain = load_precision(case.precision)
    plain.fp32_ops = ["exp"]
    assert examine(model, case.task, batch, plain, case.target, case.optimizer).healthy


def test_a_cure_is_added_to_what_an_arm_keeps():
    model = net(OwnRMSNorm(16, 1e-6), nn.Linear(16, 16), Scales(300.0), OwnRMSNorm(16, 1e-6))
    with torch.no_grad():
        model[0].weight.mul_(1000)
    arm = load_precision("fp16")
    arm.fp32_modules = ["1"]
    found = examine(model, classify, BATCH(0), arm, "cuda", adamw)
    assert found.cure.fp32_modules[0] == "1"
    assert len(found.cure.fp32_modules) > 1
    assert arm.fp32_modules == ["1"]


def test_an_operation_is_named_where_the_module_is_the_whole_net():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 10)

        def forward(self, x):
            return self.head(torch.tanh((self.stem(x) + 3000) - 3000))

    found = examined(Whole())
    assert found.culprits == ["sub", "stem"]  # the second one is the place of the cure
    assert found.cure.fp32_modules == ["stem"]
    found = examined(nn.Sequential(Whole()))
    assert found.culprits == ["0", "add"]
    assert (found.cure.fp32_modules, found.cure.fp32_ops) == ([], ["add"])


# --- nothing to examine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_have_diverged_are_refused(value):
    model = net()
    with torch.no_grad():
        model[0].weight[3, 3] = value
    with pytest.raises(InputError, match="diverged"):
        patient(model)


def test_a_model_of_which_nothing_is_trained_is_refused():
    for model in (nn.Flatten(), net().requires_grad_(False)):
        with pytest.raises(InputError, match="no parameter that requires a gradient"):
            patient(model)


def test_a_loss_that_is_not_one_number_is_refused():
    task = lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1], reduction="none"), {})  # noqa: E731
    with pytest.raises(InputError, match=r"^task: the loss has shape \(16,\); it must be a single number.$"):
        patient(net(), task=task)


def test_a_loss_without_a_graph_is_a_finding():
    task = lambda model, batch: (classify(model, batch)[0].detach(), {})  # noqa: E731
    with pytest.raises(NoGradient):
        patient(net(), task=task)
    found = examined(net(), task=task)
    assert (found.healthy, found.culprits, found.patient) == (False, ["task"], None)
