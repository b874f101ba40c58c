"""Named causes: each is found in a net that has it, and not in one that has not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoo
from precision_lab import config
from precision_lab.diagnosis.patient import NoGradient, Patient
from precision_lab.diagnosis.preflight import look, no_gradient, optimizer_state, wrong_dtypes
from zoo.case import classify, samples, seeded

BATCH = samples(8, 16)


def causes(model: nn.Module, precision: str, target: str = "cuda", task=classify, batch=None) -> set[tuple[str, str]]:
    """(code, where) of all that a look at one step names."""
    patient = Patient(model, task, BATCH(0) if batch is None else batch, config.load_precision(precision), target)
    return {(cause.code, cause.where) for cause in look(patient)}


def net(inner: nn.Module | None = None) -> nn.Module:
    make = lambda: nn.Sequential(nn.Linear(16, 16), inner or nn.ReLU(), nn.Linear(16, 10))  # noqa: E731
    return seeded(0, make)


class Does(nn.Module):
    """A module that is one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sigmoid_bce_cuda", ("sigmoid_then_bce", "criterion")),
        ("sigmoid_bce_cpu", ("sigmoid_then_bce", "criterion")),
        ("eps_too_small", ("epsilon_too_small", "blocks.2.post")),
        ("normalize_zero_rows", ("epsilon_too_small", "blocks.0.norm")),
        ("poisoned_batch_norm", ("buffers_not_finite", "blocks.1.norm")),
        ("mask_constant", ("constant_out_of_range", "blocks.1.attention.mask")),
        ("through_numpy", ("graph_ends", "neck")),
        ("own_function", ("function_without_autocast", "blocks.2.up")),
        ("rotary_by_einsum", ("integers_rounded", "blocks.1.attention.rotary")),
        ("steps_by_matmul", ("integers_rounded", "time")),
    ],
)
def test_a_fault_of_the_zoo_is_named_and_its_twin_has_none(name, expected):
    case = zoo.FAULTY[name]
    assert causes(case.build(0), case.precision, case.target, case.task, case.batch(0)) == {expected}
    mended = causes(case.mended(0), case.precision, case.target, case.task, case.batch(0))
    assert expected not in mended


SMALL = [name for name in zoo.HEALTHY if not name.startswith(("regnet", "resnet18", "efficientnet", "mobilenet"))]


@pytest.mark.parametrize(
    "name", [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in zoo.HEALTHY]
)
def test_nothing_is_named_in_a_healthy_net(name):
    case = zoo.HEALTHY[name]
    assert wrong_dtypes(case.build(0), config.load_precision(case.precision)) == []
    assert causes(case.build(0), case.precision, case.target, case.task, case.batch(0)) == set()


# --- parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype", "says"),
    [
        ("fp16", torch.float16, "refuses to unscale"),
        ("fp16", torch.bfloat16, "on a CPU it does"),
        ("bf16", torch.bfloat16, "do not change them"),
        ("bf16", torch.float64, "does not touch them"),
    ],
)
def test_parameters_in_another_dtype_are_a_fault_by_themselves(precision, dtype, says):
    model = net()
    model[2].to(dtype)
    (cause,) = wrong_dtypes(model, config.load_precision(precision))
    assert (cause.code, cause.where, cause.certain) == ("parameter_dtype", "2", True)
    assert says in cause.says


def test_what_is_wrong_as_a_whole_is_named_as_a_whole():
    arm = config.load_precision("bf16")
    assert wrong_dtypes(net(), arm) == []
    assert [cause.where for cause in wrong_dtypes(net().bfloat16(), arm)] == [""]
    nested = nn.Sequential(net(), net())
    nested[0].bfloat16()
    nested[1][2].weight.data = nested[1][2].weight.data.half()  # the bias stays float32
    assert [cause.where for cause in wrong_dtypes(nested, arm)] == ["0", "1.2"]


def test_parameters_that_nothing_uses():
    model = net()
    model.spare, model.frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    model.forward = lambda x: nn.Sequential(*list(model)[:3])(x)
    assert causes(model, "bf16") == {("unused_parameters", "spare")}


# --- a gradient that reaches nothing ------------------------------------------------------------------------


def reaches_nothing(model: nn.Module, task=classify) -> list[tuple[str, str, bool]]:
    batch = BATCH(0)
    with pytest.raises(NoGradient):
        Patient(model, task, batch, config.load_precision("fp16"), "cuda")
    return [(cause.code, cause.where, cause.certain) for cause in no_gradient(model, task, batch)]


def test_where_the_graph_ends():
    detached = nn.Sequential(net(), Does(lambda x: x.detach().requires_grad_()))
    assert reaches_nothing(detached) == [("no_gradient", "1", True)]

    def rewrapped(model, batch):
        return torch.tensor(classify(model, batch)[0].item(), requires_grad=True), {}

    assert reaches_nothing(net(), rewrapped) == [("no_gradient", "task", True)]

    def beside(model, batch):
        model(batch[0])
        return torch.ones(1, requires_grad=True).sum(), {}

    assert reaches_nothing(net(), beside) == [("no_gradient", "task", True)]

    case = zoo.FAULTY["rewrapped_loss"]
    (cause,) = no_gradient(case.build(0), case.task, case.batch(0))
    assert (cause.code, cause.where) == ("no_gradient", "criterion")


def test_the_innermost_module_is_named():
    inner = nn.Sequential(nn.Linear(16, 16), Does(lambda x: x.detach().requires_grad_()))
    assert reaches_nothing(nn.Sequential(net(), nn.Linear(10, 16), inner)) == [("no_gradient", "2.1", True)]


# --- operations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "precision", "named"),
    [
        (lambda x: x / (x.abs() + 1e-8), "fp16", True),
        (lambda x: x / torch.clamp(x.abs(), min=1e-12), "fp16", True),
        (lambda x: torch.maximum(x, torch.tensor(1e-9, dtype=x.dtype) + 1e-9), "fp16", True),
        (lambda x: x / (x.float().abs() + 1e-8), "fp16", False),
        (lambda x: x / (x.abs() + 1e-3), "fp16", False),
        (lambda x: x / (x.abs() + 1e-8), "bf16", False),  # which has float32's range
        (lambda x: x * 1e-6, "fp16", False),  # a factor is no epsilon
    ],
)
def test_epsilons(function, precision, named):
    assert (("epsilon_too_small", "1") in causes(net(Does(function)), precision)) is named


@pytest.mark.parametrize(
    ("function", "precision", "named"),
    [
        (lambda x: x.masked_fill(x > 0, -1e9), "fp16", True),
        (lambda x: x + torch.full((1,), 1e5, dtype=x.dtype), "fp16", True),
        (lambda x: x.clamp(max=1e6), "fp16", True),
        (lambda x: x.masked_fill(x > 9, -torch.inf).clamp(min=-1e4), "fp16", False),
        (lambda x: x.float().clamp(max=1e6), "fp16", False),
        (lambda x: x.clamp(max=1e6), "bf16", False),
    ],
)
def test_constants(function, precision, named):
    assert (("constant_out_of_range", "1") in causes(net(Does(function)), precision)) is named


def numbered(count: float):
    """Adds the positions 0 to `count`, in the dtype of what comes in."""
    return lambda x: x + 1e-3 * torch.linspace(0, count, 16).round().to(x.dtype)


@pytest.mark.parametrize(
    ("count", "precision", "named"),
    [(4000, "bf16", True), (4000, "fp16", True), (1000, "bf16", True), (1000, "fp16", False), (250, "bf16", False)],
)
def test_whole_numbers(count, precision, named):
    assert (("integers_rounded", "1") in causes(net(Does(numbered(count))), precision)) is named


def test_a_sigmoid_is_no_fault_without_the_loss_for_it():
    def from_logits(model, batch):
        logits = model(batch[0]).float()
        return F.binary_cross_entropy_with_logits(logits, F.one_hot(batch[1], 10).float()), {}

    def from_probabilities(model, batch):
        chances = model(batch[0]).sigmoid().float()
        return F.binary_cross_entropy(chances, F.one_hot(batch[1], 10).float()), {}

    assert causes(net(nn.Sigmoid()), "bf16", task=from_logits) == set()
    for target in ("cpu", "cuda"):
        assert causes(net(), "bf16", target, task=from_probabilities) == {("sigmoid_then_bce", "")}


class _Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return 2 * grad


def test_a_function_with_the_decorators_is_fine():
    assert causes(net(Does(_Doubled.apply)), "bf16") == set()


def test_a_loss_in_low_precision():
    def low(model, batch):
        return model(batch[0]).square().mean().to(torch.bfloat16), {}

    def wide(model, batch):
        return model(batch[0]).float().square().mean(), {}

    assert causes(net(), "bf16", task=low) == {("low_loss", "task")}
    assert causes(net(), "bf16", task=wide) == set()


def test_a_branch_that_learns_nothing_is_a_remark():
    assert causes(net(Does(lambda x: x.detach() + 0)), "bf16") == {("graph_ends", "1"), ("unused_parameters", "0")}


def test_optimizer_state():
    def build(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    model = net()
    before = [p.clone() for p in model.parameters()]
    assert optimizer_state(model, build) == []
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(model.parameters(), before, strict=True))
    (cause,) = optimizer_state(net().bfloat16(), build)
    assert (cause.code, cause.where) == ("optimizer_state", "AdamW")
    assert "exp_avg and exp_avg_sq in bfloat16" in cause.says


def test_a_look_leaves_no_trace():
    case = zoo.FAULTY["poisoned_batch_norm"]
    model = case.build(0)
    patient = Patient(model, case.task, case.batch(0), config.load_precision("fp16"), "cuda")
    state, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    assert look(patient)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert patient.task is case.task
