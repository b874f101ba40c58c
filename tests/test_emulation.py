"""Another device's autocast policy on CPU tensors: what each kind of cast does, and that torch's own is back after."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from precision_lab.emulation import kernels as kernels_module
from precision_lab.emulation import lists
from precision_lab.emulation.kernels import AutocastKernels, emulated, installed
from precision_lab.emulation.lists import TARGETS, Cast, policy_of
from precision_lab.emulation.rounding import WideArithmetic
from precision_lab.errors import InputError
from precision_lab.models import CNN, GPT
from precision_lab.probe.op_rows import OpRow
from precision_lab.probe.ops import OpRecorder

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = pytest.mark.parametrize("low", [BF16, FP16], ids=["bf16", "fp16"])
MINOR = tuple(int(part) for part in torch.__version__.split(".")[:2])


@contextmanager
def under(target: str, low: torch.dtype = BF16, fp32_ops: list[str] | None = None):
    """Autocast as on `target`; yields its kernels."""
    kernels = AutocastKernels("cpu", emulated(target, fp32_ops or []), target)
    with installed(kernels), WideArithmetic():
        with torch.autocast("cpu", dtype=low):
            yield kernels
        kernels.memory.clear()


def recorded(call) -> list[OpRow]:
    recorder = OpRecorder(nn.Module())
    with recorder:
        call()
    return recorder.rows()


# --- the lists ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_every_operation_that_torch_treats_is_known_and_exists(target):
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{target.upper()}")
    policy = policy_of(target)
    assert set(policy) == {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    for name in policy:
        base, _, overload = name.partition(".")
        assert hasattr(getattr(torch.ops.aten, base), overload or "default"), name


@pytest.mark.skipif(
    MINOR != (2, 14) or not torch.backends.cuda.is_built(), reason="the numbers are those of torch 2.14 with CUDA"
)
@pytest.mark.parametrize(
    ("target", "lower", "fp32", "widest", "refused"),
    [("cuda", 36, 73, 11, 1), ("cpu", 24, 99, 3, 0), ("mps", 27, 58, 10, 0)],
)
def test_the_lists_are_as_long_as_they_were_when_somebody_counted(target, lower, fp32, widest, refused):
    found = Counter(policy_of(target).values())
    single = found[Cast.fp32] + found[Cast.fp32_result] + found[Cast.fp32_norm]
    assert (found[Cast.lower], single, found[Cast.widest], found[Cast.refused]) == (lower, fp32, widest, refused)


def test_an_operation_that_stands_in_no_list_is_refused_and_named(monkeypatch):
    monkeypatch.setitem(lists._BESIDE, "cuda", {})
    with pytest.raises(InputError, match=r"treats \S+ under autocast on cuda in a way that is not known here"):
        policy_of("cuda")


def test_the_targets_differ_where_they_are_known_to():
    cpu, cuda, mps = (policy_of(target) for target in TARGETS)
    assert (cuda["softmax.int"], mps["softmax.int"]) == (Cast.fp32_result, Cast.fp32_result)
    assert "softmax.int" not in cpu
    assert cuda["einsum"] is Cast.lower
    assert "einsum" not in cpu
    assert "batch_norm" in mps
    assert "batch_norm" not in cuda
    assert "cat" not in cuda


# --- what a kind of cast does -----------------------------------------------------------------------------------


@LOW
@pytest.mark.parametrize(("target", "softmax"), [("cuda", FP32), ("mps", FP32), ("cpu", None)])
def test_a_matmul_is_low_and_a_softmax_of_it_as_the_target_has_it(target, softmax, low):
    a = torch.randn(4, 4)
    with under(target, low):
        product = a @ a
        probabilities = product.softmax(-1)
    assert product.dtype is low
    assert probabilities.dtype is (softmax or low)


def test_a_dtype_that_is_given_is_kept():
    low = torch.randn(4, 4).to(BF16)
    with under("cuda"):
        assert low.softmax(-1).dtype is FP32
        assert low.softmax(-1, dtype=BF16).dtype is BF16
        assert torch.softmax(low, -1, BF16).dtype is BF16
        assert torch.softmax(low, -1, torch.float64).dtype is torch.float64
        assert low.sum().dtype is FP32
        assert low.sum(dtype=BF16).dtype is BF16


def test_a_cross_entropy_keeps_its_log_softmax_low_on_cuda_and_not_on_the_cpu():
    logits, labels = torch.randn(4, 4).to(BF16), torch.tensor([0, 1, 2, 3])

    def dtype_of_log_softmax(target):
        with under(target):
            rows = recorded(lambda: F.cross_entropy(logits, labels))
        return [row.outputs for row in rows if row.op == "_log_softmax"]

    assert dtype_of_log_softmax("cuda") == [("bfloat16",)]
    assert dtype_of_log_softmax("cpu") == [("float32",)]


def test_a_norm_is_float32_by_its_other_overload():
    low, norm = torch.tensor([[3.0, 4.0], [6.0, 8.0]]).to(BF16), torch.ops.aten.norm
    with under("cuda"):
        found = [
            norm.Scalar(low),
            norm.Scalar(low, 2),
            norm.ScalarOpt_dim(low, 1, [1]),
            norm.ScalarOpt_dim(low, 2, [1], True),
        ]
        wide = norm.Scalar(torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert {value.dtype for value in found} == {FP32}
    assert found[0].item() == found[1].item() == pytest.approx(125**0.5)
    assert [value.tolist() for value in found[2:]] == [[7, 14], [[5], [10]]]
    assert wide.dtype is torch.float64


def test_widest_follows_its_widest_input():
    low, full = torch.ones(2, 2).to(BF16), torch.ones(2, 2)
    with under("cuda"):
        assert torch.addcmul(low, low, low).dtype is BF16
        assert torch.addcmul(full, low, low).dtype is FP32
        assert torch.addcmul(low, low, full).dtype is FP32
    with under("cpu"):
        assert torch.cat([low, low]).dtype is BF16
        assert torch.cat([low, full]).dtype is FP32
        assert torch.stack([full, low]).dtype is FP32


@pytest.mark.parametrize("target", TARGETS)
def test_float64_and_integers_are_left_alone(target):
    wide, whole = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.int64)
    with under(target):
        assert (wide @ wide).dtype is torch.float64
        assert wide.exp().dtype is torch.float64
        assert (whole @ whole).dtype is torch.int64
        assert whole.sum().dtype is torch.int64


def weight_casts(rows: list[OpRow]) -> int:
    return sum(row.calls for row in rows if row.is_cast)


def test_a_weight_is_cast_once_in_a_region_and_again_in_the_next():
    weight = nn.Parameter(torch.randn(4, 4))
    low = torch.randn(4, 4).to(BF16)
    kernels = AutocastKernels("cpu", emulated("cuda", []), "cuda")

    def region():
        with torch.autocast("cpu", dtype=BF16):
            F.linear(low, weight)
            (low @ weight).sum().backward()

    with installed(kernels):
        first = recorded(region)  # backward: the sum's gradient down, the weight's up
        assert [(row.phase, row.calls) for row in first if row.is_cast] == [("forward", 1), *[("backward", 1)] * 2]
        kept = weight_casts(recorded(region))
        kernels.memory.clear()
        again = weight_casts(recorded(region))
    assert again == weight_casts(first) == kept + 1


def test_what_is_no_float32_leaf_that_needs_a_gradient_is_cast_at_each_use():
    weight = nn.Parameter(torch.randn(4, 4))
    low = torch.randn(4, 4).to(BF16)
    for other in (weight.detach(), weight * 1, weight[:]):
        with under("cuda"):
            rows = recorded(lambda other=other: (F.linear(low, other), F.linear(low, other)))
        assert weight_casts(rows) == 2
    with under("cuda"), torch.no_grad():
        torch.set_autocast_cache_enabled(False)
        try:
            rows = recorded(lambda: (F.linear(low, weight), F.linear(low, weight)))
        finally:
            torch.set_autocast_cache_enabled(True)
    assert weight_casts(rows) == 2


def test_binary_cross_entropy_is_refused_where_the_target_refuses_it():
    probabilities, targets = torch.rand(4), torch.ones(4)
    with under("cuda"), pytest.raises(RuntimeError, match=r"^binary_cross_entropy is not allowed under autocast"):
        F.binary_cross_entropy(probabilities, targets)
    with under("cpu"):
        assert F.binary_cross_entropy(probabilities.to(BF16), targets).dtype is FP32
    with under("mps"):  # not on its list: no cast
        assert F.binary_cross_entropy(probabilities.to(BF16), targets.to(BF16)).dtype is BF16


@LOW
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_low_on_cuda_forward_and_backward(layer, low):
    model, x = layer(4, 5), torch.randn(3, 2, 4)
    with under("cuda", low):
        output = model(x)[0]
    output.float().sum().backward()
    assert output.dtype is low
    assert {p.grad.dtype for p in model.parameters()} == {FP32}


def test_named_operations_are_float32_and_known_as_called():
    a = torch.randn(4, 4)
    with under("cuda", fp32_ops=["matmul"]) as kernels:
        assert (a @ a).dtype is FP32
        assert F.linear(a, a).dtype is BF16
        assert kernels.current is None
    assert kernels.called == {"matmul", "linear"}


# --- as the device itself does it ---------------------------------------------------------------------------------


def gradients(model: nn.Module, batch: Tensor, low: torch.dtype = BF16) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=low):
        logits = model(batch)
        loss = F.cross_entropy(logits.flatten(0, -2), torch.zeros(logits[..., 0].numel(), dtype=torch.long))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def cnn() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return CNN(10, 1, [4, 8]), torch.randn(4, 1, 8, 8)


def gpt() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return GPT(20, 8, 1, 2, 16, 0.0), torch.randint(0, 20, (2, 8))


@pytest.mark.parametrize("made", [cnn, gpt])
def test_the_cpus_own_policy_emulated_gives_its_own_gradients_bit_for_bit(made):
    model, batch = made()
    own = gradients(model, batch)
    kernels = AutocastKernels("cpu", emulated("cpu", []), "cpu")
    with installed(kernels):
        found = gradients(model, batch)
    assert {"linear", "scaled_dot_product_attention" if made is gpt else "conv2d"} <= kernels.called
    assert all(torch.equal(a, b) for a, b in zip(own, found, strict=True))


@pytest.mark.parametrize("target", TARGETS)
def test_torchs_own_kernels_are_back_even_if_the_forward_raised(target):
    model, batch = cnn()
    own = gradients(model, batch)
    with under(target):
        found = gradients(model, batch)
    assert target == "cpu" or not all(torch.equal(a, b) for a, b in zip(own, found, strict=True))
    model.head.register_forward_hook(lambda *_: model.no_such_thing)
    with pytest.raises(AttributeError, match="no_such_thing"), under(target):
        model(batch)
    model.head._forward_hooks.clear()
    assert kernels_module._installed is None
    assert all(torch.equal(a, b) for a, b in zip(own, gradients(model, batch), strict=True))


def test_one_set_at_a_time():
    with under("cuda"), pytest.raises(RuntimeError, match="installed already"):
        AutocastKernels("cpu", emulated("mps", []), "mps").install()
    assert kernels_module._installed is None


# --- what a model says of its device's autocast ------------------------------------------------------------------


class Guarded(torch.autograd.Function):
    """As its author wrote it for CUDA: in float32 whatever is around it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x.T

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (gradient + gradient.T) @ x


@pytest.mark.parametrize("target", ["cuda", "mps", "cpu"])
def test_a_guard_holds_on_the_device_that_it_is_written_for(target):
    x = torch.randn(4, 4, requires_grad=True)
    before = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype
    with installed(AutocastKernels("cpu", emulated(target, []), target)), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cuda") is (target == "cuda")
        assert torch.is_autocast_enabled() is (target == "cuda")
        with torch.autocast("cuda", enabled=False):
            guarded = x @ x
        product = Guarded.apply(x @ x)
        product.sum().backward()
        assert (x @ x).dtype is torch.bfloat16
    expected = torch.float32 if target == "cuda" else torch.bfloat16
    assert guarded.dtype is expected
    assert product.dtype is expected
    assert x.grad.isfinite().all()
    assert (torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype) == before
