"""The precision policy: explicit contexts, a scaler for float16 alone, flags set whole, labels that are proved."""

import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from precision_lab import precision
from precision_lab.arm_schema import Float32Mode
from precision_lab.config import CONF, load_precision
from precision_lab.errors import InputError
from precision_lab.precision import LabelError, Policy, backend_flags, cast_floating, keep_in_float32, set_float32

CPU = torch.device("cpu")
ARMS = sorted(path.stem for path in (CONF / "precision").glob("*.yaml") if path.stem != "auto")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
AUTOCAST = {"bf16": BF16, "fp16": F16, "fp16_unscaled": F16}  # the others have none
COMPUTES_IN = {"fp32": F32, "fp32_perturbed": F32, "tf32": F32, "bf16_pure": BF16} | AUTOCAST


def policy(name, **changed):
    arm = load_precision(name)
    for key, value in changed.items():
        setattr(arm, key, value)
    return Policy(arm, CPU)


def test_the_tables_here_know_every_arm():
    assert set(ARMS) == set(COMPUTES_IN)


# --- the autocast context -----------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("outside", [None, BF16, F16])
def test_the_context_is_explicit_whatever_is_outside(arm, outside):
    """Warnings are errors here, so that torch's silent way out (a warning, then float32) would fail."""
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=outside, enabled=outside is not None):
        with policy(arm).autocast():
            assert torch.is_autocast_enabled("cpu") is (arm in AUTOCAST)
            assert (x @ x).dtype is AUTOCAST.get(arm, F32)
        assert torch.is_autocast_enabled("cpu") is (outside is not None)


@pytest.mark.parametrize("default", [BF16, F16])
@pytest.mark.parametrize("arm", ARMS)
def test_the_default_dtype_is_never_used(arm, default):
    """torch's defaults differ by device (bfloat16 on cpu, float16 on cuda), and any code may change them."""
    x = torch.randn(4, 4)
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", default)
    try:
        with policy(arm).autocast():
            assert (x @ x).dtype is AUTOCAST.get(arm, F32)
        assert torch.get_autocast_dtype("cpu") is default
    finally:
        torch.set_autocast_dtype("cpu", before)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("arm", ARMS)
def test_device_and_dtype_are_named_to_torch(monkeypatch, arm, device):
    asked = []
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: asked.append((args, kwargs)) or nullcontext())
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **kwargs: asked.append((args, kwargs)))
    one = Policy(load_precision(arm), torch.device(device))
    with one.autocast():
        pass
    one.grad_scaler()
    (context, scaler) = asked
    assert context == ((device,), {"dtype": AUTOCAST.get(arm), "enabled": arm in AUTOCAST})
    assert scaler[0] == (device,)
    assert scaler[1]["enabled"] is (arm == "fp16")


# --- the scaler ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
def test_the_scaler_is_enabled_for_fp16_alone(arm):
    assert policy(arm).grad_scaler().is_enabled() is (arm == "fp16")


def test_the_scaler_takes_the_arm_s_numbers():
    scaler = policy("fp16", init_scale=512.0, growth_interval=7).grad_scaler()
    assert scaler.get_scale() == 512
    assert scaler.get_growth_interval() == 7


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "fp16"])
def test_a_disabled_scaler_does_nothing(arm):
    scaler = policy(arm).grad_scaler()
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    loss = (weight**2).sum()
    assert scaler.scale(loss) is loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [2, 4]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0, 0]
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
    weight.grad = torch.tensor([math.inf, math.nan])  # not even a check for these
    scaler.step(optimizer)
    assert not torch.isfinite(weight).any()


# --- backend flags ------------------------------------------------------------------------------------


def flags_for(mode):
    return {
        "cuda_matmul_fp32": mode,
        "cudnn_conv_fp32": mode,
        "cudnn_rnn_fp32": mode,
        "mkldnn_matmul_fp32": "ieee",
        "mkldnn_conv_fp32": "ieee",
    }


def all_float32_switches():
    backends = torch.backends
    return {
        "cuda.matmul": backends.cuda.matmul.fp32_precision,
        "cudnn.conv": backends.cudnn.conv.fp32_precision,
        "cudnn.rnn": backends.cudnn.rnn.fp32_precision,
        **{f"mkldnn.{kind}": getattr(backends.mkldnn, kind).fp32_precision for kind in ("matmul", "conv", "rnn")},
    }


@pytest.fixture
def global_switch():
    """torch's own default for all switches that are not set one by one; put back after."""
    before = torch.backends.fp32_precision
    yield
    torch.backends.fp32_precision = before


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("before", ["ieee", "tf32", "global tf32", "global ieee"])
def test_every_switch_is_set_whatever_it_was(arm, before, global_switch):
    if before.startswith("global"):
        torch.backends.fp32_precision = before.split()[1]
    else:
        set_float32(Float32Mode[before], Float32Mode[before])
        for kind in ("matmul", "conv", "rnn"):
            getattr(torch.backends.mkldnn, kind).fp32_precision = before
    flags = policy(arm).apply_backends()
    mode = "tf32" if arm == "tf32" else "ieee"
    assert flags == flags | flags_for(mode)
    assert flags == backend_flags()
    assert all_float32_switches() == {
        **{name: mode for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")},
        **{name: "ieee" for name in ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")},
    }


def test_tf32_then_fp32_in_one_process():
    assert policy("tf32").apply_backends()["cuda_matmul_fp32"] == "tf32"
    assert policy("fp32").apply_backends() == backend_flags() | flags_for("ieee")


def test_matmul_and_convolution_are_set_apart():
    flags = policy("tf32", float32_conv=Float32Mode.ieee).apply_backends()
    assert (flags["cuda_matmul_fp32"], flags["cudnn_conv_fp32"]) == ("tf32", "ieee")
    flags = policy("tf32", float32_matmul=Float32Mode.ieee).apply_backends()
    assert (flags["cuda_matmul_fp32"], flags["cudnn_conv_fp32"]) == ("ieee", "tf32")


@pytest.mark.parametrize("lower", ["high", "medium"])
def test_fp32_is_ieee_after_the_old_switch_was_lowered(lower):
    """A user's model file that calls torch.set_float32_matmul_precision on import, the commonest one-liner."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(lower)
    try:
        one = policy("fp32")
        assert one.apply_backends() == backend_flags() | flags_for("ieee")
        assert one.prove()["linear_bits"] == 23
    finally:
        torch.set_float32_matmul_precision(before)


# --- the proof -----------------------------------------------------------------------------------------

PROOFS = {
    "fp32": ("float32", 23),
    "fp32_perturbed": ("float32", 23),
    "bf16": ("bfloat16", 7),
    "bf16_pure": ("bfloat16", 7),
    "fp16": ("float16", 10),
    "fp16_unscaled": ("float16", 10),
}


@pytest.mark.parametrize("arm", PROOFS)
def test_the_proof_of_each_arm(arm):
    one = policy(arm)
    one.apply_backends()
    before = torch.get_rng_state()
    dtype, bits = PROOFS[arm]
    assert one.prove() == {"linear_dtype": dtype, "linear_bits": bits, "conv_dtype": dtype, "conv_bits": bits}
    assert torch.equal(torch.get_rng_state(), before)


def test_tf32_on_a_cpu_is_a_label_that_does_not_hold():
    one = policy("tf32")
    one.apply_backends()
    with pytest.raises(LabelError, match="precision=tf32 should run a linear in float32 with 10 significand bits"):
        one.prove()


@pytest.mark.parametrize("arm", AUTOCAST)
def test_a_context_that_does_nothing_is_found_out(monkeypatch, arm):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    name = str(AUTOCAST[arm]).removeprefix("torch.")
    with pytest.raises(LabelError, match=f"precision={arm} should run a linear in {name} with .* but float32 with 23"):
        policy(arm).prove()


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("bits", ["bfloat16", "float16"])
def test_a_kernel_that_rounds_is_found_out(monkeypatch, kind, bits):
    """What a backend flag left on would do: float32 in and out, and fewer bits in between."""
    name = {"linear": "linear", "conv": "conv2d"}[kind]
    real = getattr(nn.functional, name)
    low = getattr(torch, bits)
    monkeypatch.setattr(nn.functional, name, lambda x, weight: real(x.to(low).float(), weight))
    count = {"bfloat16": 7, "float16": 10}[bits]
    with pytest.raises(
        LabelError, match=f"should run a {kind} in float32 with 23 significand bits, but .* {count} bits"
    ):
        policy("fp32").prove()


def test_more_bits_than_the_label_are_found_out_too(monkeypatch):
    monkeypatch.setattr(nn.functional, "linear", lambda x, weight: x)
    with pytest.raises(LabelError, match="precision=bf16 should run a linear in bfloat16"):
        policy("bf16").prove()


def test_the_other_float16_is_not_bfloat16(monkeypatch):
    real = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda device, dtype, enabled: real(device, dtype=F16, enabled=enabled))
    with pytest.raises(
        LabelError, match="should run a linear in bfloat16 with 7 significand bits, but float16 with 10"
    ):
        policy("bf16").prove()


@pytest.mark.parametrize(
    ("linear_bits", "conv_bits", "holds"),
    [(10, 10, True), (10, 23, True), (23, 10, False), (23, 23, False), (7, 10, False), (10, 7, False)],
)
def test_what_counts_as_tf32(monkeypatch, linear_bits, conv_bits, holds):
    """A linear must round to 10 bits; cuDNN may choose a convolution without tensor cores."""
    one = policy("tf32")
    measured = iter([linear_bits, conv_bits])
    monkeypatch.setattr(precision, "_surviving_bits", lambda _: next(measured))
    if holds:
        assert (one.prove()["linear_bits"], one.config.name) == (linear_bits, "tf32")
    else:
        with pytest.raises(LabelError, match="precision=tf32"):
            one.prove()


# --- float32 modules -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.seen = None

    def forward(self, x, *, more=None, label=None):
        self.seen = SimpleNamespace(x=x.dtype, more=more, label=label, autocast=torch.is_autocast_enabled("cpu"))
        return self.linear(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(x))


def dtypes_of(model, one, x):
    """Output dtype of every module in one pass under the arm's context."""
    found = {}
    hooks = [
        module.register_forward_hook(lambda m, i, o, name=name: found.__setitem__(name, o.dtype))
        for name, module in model.named_modules()
    ]
    with one.autocast():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("arm", AUTOCAST)
def test_a_kept_module_hands_on_float32_and_the_others_do_not(arm):
    one = policy(arm, fp32_modules=["blocks.0"])
    model = one.prepare(Net())
    found = dtypes_of(model, one, torch.randn(2, 4))
    assert (found["blocks.0"], found["blocks.0.linear"]) == (F32, F32)
    assert (found["blocks.1"], found["blocks.1.linear"], found["head"]) == (AUTOCAST[arm],) * 3
    assert model.blocks[0].seen.autocast is False
    assert model.blocks[1].seen.autocast is True


def test_the_inputs_are_cast_in_whatever_they_come():
    block = Block()
    keep_in_float32(nn.ModuleDict({"block": block}), ["block"], "cpu", set())
    more = {"a": torch.ones(1, dtype=BF16), "b": [torch.ones(1, dtype=F16), "text"]}
    label = torch.tensor([1, 2])
    with policy("bf16").autocast():
        out = block(torch.randn(2, 4, dtype=BF16), more=more, label=label)
    assert (out.dtype, block.seen.x) == (F32, F32)
    assert (block.seen.more["a"].dtype, block.seen.more["b"][0].dtype, block.seen.more["b"][1]) == (F32, F32, "text")
    assert block.seen.label is label  # integers stay what they are
    assert more["a"].dtype is BF16  # and the caller's own is left alone


@pytest.mark.parametrize(
    ("patterns", "matched"),
    [
        (["head"], ["head"]),
        (["blocks.*.norm"], ["blocks.0.norm", "blocks.1.norm"]),
        (["*norm"], ["blocks.0.norm", "blocks.1.norm"]),
        (["blocks.0", "blocks.0.norm"], ["blocks.0", "blocks.0.norm"]),
        (["head", "head", "h*"], ["head"]),
        (["blocks*"], ["blocks", *(f"blocks.{i}{part}" for i in (0, 1) for part in ("", ".norm", ".linear"))]),
        ([], []),
    ],
)
def test_which_modules_a_pattern_matches(patterns, matched):
    assert keep_in_float32(Net(), patterns, "cpu", set()) == matched


@pytest.mark.parametrize("patterns", [["blocks.0", "blocks.0.linear"], ["blocks.0.linear", "blocks.0"]])
def test_parent_and_child_together(patterns):
    one = policy("bf16", fp32_modules=patterns)
    alone = policy("bf16", fp32_modules=["blocks.0"])
    torch.manual_seed(0)
    model = one.prepare(Net())
    torch.manual_seed(0)
    other = alone.prepare(Net())
    x = torch.randn(2, 4)
    with one.autocast():
        assert torch.equal(model(x), other(x))


_ALL = "this model has blocks, blocks.0, blocks.0.norm, blocks.0.linear, blocks.1, blocks.1.norm, blocks.1.linear, head"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it where a graph ends
def test_a_compiled_model_keeps_its_modules_in_float32():
    torch.manual_seed(0)
    one = policy("bf16", fp32_modules=["blocks.0", "head"])
    model, x = one.prepare(Net()), torch.randn(2, 4)
    with one.autocast():
        eager = model(x)
        one._ran.clear()
        compiled = torch.compile(model, backend="aot_eager")(x)
    assert compiled.dtype is eager.dtype is torch.float32
    assert torch.equal(compiled, eager)
    one.check_float32()  # it saw them called


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("nope", _ALL),
        ("", _ALL),
        ("heads", "near is head"),
        ("blocks.*.nrm", "near are blocks.1.norm, blocks.0.norm, blocks.1.linear, blocks.0.linear, blocks.1"),
    ],
)
def test_an_unknown_pattern_is_told_the_nearest_names(pattern, told):
    with pytest.raises(InputError) as caught:
        policy("bf16", fp32_modules=["head", pattern]).prepare(Net())
    assert str(caught.value) == f"precision.fp32_modules: no module's name matches {pattern!r}; {told}."


def test_a_long_list_of_names_is_cut():
    with pytest.raises(InputError, match=r"this model has 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\."):
        keep_in_float32(nn.Sequential(*(nn.ReLU() for _ in range(9))), ["nope"], "cpu", set())


def test_a_saturated_head_stays_healed():
    """Logits beyond float16's 65504: infinite under fp16; with the head kept, finite up to the loss."""
    x, label = torch.full((2, 4), 100.0), torch.tensor([0, 1])

    def loss_of(one):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
        nn.init.constant_(model[1].weight, 200.0)
        one.prepare(model)
        with one.autocast():
            logits = model(x)
            return logits.detach(), nn.functional.cross_entropy(logits, label).item()

    logits, loss = loss_of(policy("fp16"))
    assert torch.isinf(logits).all()
    assert not math.isfinite(loss)
    logits, loss = loss_of(policy("fp16", fp32_modules=["1"]))
    assert logits.dtype is F32
    assert logits == pytest.approx(torch.full((2, 2), 80_000.0), abs=1)
    assert loss == pytest.approx(math.log(2), abs=1)


def test_gradients_flow_through_a_kept_module_in_float32():
    one = policy("fp16", fp32_modules=["blocks.0"])
    model = one.prepare(Net())
    with one.autocast():
        loss = model(torch.randn(2, 4)).float().pow(2).mean()
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype is F32, name
        assert p.grad.abs().sum() > 0, name


def test_a_copy_of_a_model_with_kept_modules_uses_its_own_weights():
    """An exponential moving average, or a user's task, copies the model."""
    one = policy("bf16", fp32_modules=["head"])
    model = one.prepare(Net())
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.head.weight)
    nn.init.zeros_(twin.head.bias)
    assert twin(torch.randn(2, 4)).tolist() == [[0, 0], [0, 0]]


# --- pure bfloat16, and the reference ------------------------------------------------------------------------


class Normed(nn.Module):
    """A linear and a batch norm: parameters and floating-point buffers, and one of integers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.seen = None

    def forward(self, x, scale=None):
        self.seen = (x.dtype, None if scale is None else scale.dtype)
        return self.norm(self.linear(x))


def bits(model):
    return {name: (value.dtype, value.clone()) for name, value in model.state_dict().items()}


def assert_same_bits(now, before):
    assert now.keys() == before.keys()
    for name, (dtype, value) in before.items():
        assert now[name][0] is dtype, name
        assert torch.equal(now[name][1], value), name


def test_pure_bfloat16_holds_everything_in_bfloat16():
    one = policy("bf16_pure")
    model = one.prepare(Normed())
    floating = {name: value.dtype for name, value in model.state_dict().items() if value.is_floating_point()}
    assert len(floating) == 6
    assert set(floating.values()) == {BF16}
    assert model.norm.num_batches_tracked.dtype is torch.int64
    with one.autocast():
        out = model(torch.randn(4, 3), scale=torch.ones(1))
    assert (out.dtype, model.seen) == (BF16, (BF16, BF16))
    out.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {BF16}


def test_pure_bfloat16_leaves_tokens_alone():
    model = policy("bf16_pure").prepare(nn.Sequential(nn.Embedding(5, 2)))
    assert model(torch.tensor([[1, 2]])).dtype is BF16


@pytest.mark.parametrize("arm", ARMS)
def test_the_reference_computes_in_ieee_float32_and_restores_everything(arm):
    torch.manual_seed(0)
    one = policy(arm)
    flags = one.apply_backends()
    model = one.prepare(Normed()).eval()
    plain = copy.deepcopy(model).float().eval()  # the same weights, exactly
    x = torch.randn(4, 3)
    before = bits(model)
    identities = {name: id(p) for name, p in model.named_parameters()}
    with one.autocast(), one.reference(model):  # whatever context is outside
        assert not torch.is_autocast_enabled("cpu")
        assert backend_flags() == flags | flags_for("ieee")
        out = model(x)
        assert model.seen[0] is F32
    assert out.dtype is F32
    assert torch.equal(out, plain(x))
    assert_same_bits(bits(model), before)
    assert {name: id(p) for name, p in model.named_parameters()} == identities  # the optimizer holds these
    assert backend_flags() == flags


def test_the_reference_differs_from_the_arm():
    """Else a test of it could not fail."""
    torch.manual_seed(0)
    for arm in ("bf16", "fp16", "bf16_pure"):
        one = policy(arm)
        model = one.prepare(Normed()).eval()
        x = torch.randn(4, 3)
        with one.autocast():
            own = model(x).float()
        with one.reference(model):
            assert not torch.equal(own, model(x))


@pytest.mark.parametrize("arm", ["tf32", "bf16_pure"])
def test_the_reference_restores_after_an_error(arm):
    one = policy(arm)
    flags = one.apply_backends()
    model = one.prepare(Normed())
    before = bits(model)

    def fail():
        with one.reference(model):
            raise RuntimeError("evaluation failed")

    with pytest.raises(RuntimeError, match="evaluation failed"):
        fail()
    assert_same_bits(bits(model), before)
    assert backend_flags() == flags


@pytest.mark.parametrize("dtype", [F16, BF16, torch.float64])
@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "bf16_pure"])
def test_a_model_that_is_not_float32_is_refused(arm, dtype):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    with pytest.raises(InputError) as caught:
        policy(arm).prepare(model)
    assert str(caught.value) == (
        f"precision={arm} holds parameters in float32, but the model's 1.weight is {dtype}; build the model in float32."
    )


# --- casting nested values -------------------------------------------------------------------------------------


def test_casting_keeps_the_shape_of_what_it_casts():
    from collections import UserDict, namedtuple

    Pair = namedtuple("Pair", "a b")
    x = torch.ones(1)
    nested = {"t": (x, [x, 3]), "n": Pair(x, None), "i": torch.tensor(1), "s": "x", "m": UserDict(x=x)}
    cast = cast_floating(nested, BF16)
    assert cast["m"]["x"].dtype is BF16
    assert isinstance(cast["t"], tuple)
    assert isinstance(cast["t"][1], list)
    assert isinstance(cast["n"], Pair)
    assert [cast["t"][0].dtype, cast["t"][1][0].dtype, cast["n"].a.dtype] == [BF16] * 3
    assert (cast["t"][1][1], cast["n"].b, cast["i"].dtype, cast["s"]) == (3, None, torch.int64, "x")
    assert x.dtype is F32


class Unrolled(nn.Module):
    """Its container has no forward, and one of its layers is never called as a module."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
        return nn.functional.linear(x, self.head.weight, self.head.bias)


def test_a_container_without_a_forward_stands_for_its_children():
    one = policy("bf16", fp32_modules=["body"])
    model = one.prepare(Unrolled())
    seen = []
    model.body[1].register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    with one.autocast():
        model(torch.ones(1, 4))
    assert seen == [(torch.float32, torch.float32)]
    one.check_float32()


def test_a_module_that_is_never_called_cannot_be_kept_in_float32():
    one = policy("bf16", fp32_modules=["head"])
    model = one.prepare(Unrolled())
    with one.autocast():
        assert model(torch.ones(1, 4)).dtype is torch.bfloat16
    sentence = r"^precision\.fp32_modules: head is never called as a module .*; name its parent\.$"
    with pytest.raises(InputError, match=sentence):
        one.check_float32()


def test_everything_may_be_kept_where_a_kept_parent_uses_a_childs_weights():
    one = policy("bf16", fp32_modules=["*"])
    attention = one.prepare(nn.ModuleDict({"attention": nn.MultiheadAttention(4, 1)}))["attention"]
    x = torch.ones(2, 1, 4)
    with one.autocast():
        assert attention(x, x, x)[0].dtype is torch.float32
    one.check_float32()  # out_proj is inside
