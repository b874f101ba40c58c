"""What only a GPU can show, in one process, without a network. Bodies that mean something on a CPU run there too.

    make test-gpu

Written against torch 2.11 to 2.14. A precision that the GPU at hand does not have is skipped with the reason.
"""

import gc
import json
import math
import time
import warnings
from itertools import repeat

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from own_code.training import (
    ARMS,
    ConvNorm,
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
from precision_lab import hardware, run
from precision_lab.assemble import assemble, make_trainer, resolve
from precision_lab.batches import TrainBatches, batch_of, place_on
from precision_lab.config import compose
from precision_lab.datasets import TensorSamples
from precision_lab.errors import InputError
from precision_lab.inspection import peak_by_kind, step_peak
from precision_lab.meter import Meter
from precision_lab.op_maps import inspect_ops
from precision_lab.precision import backend_flags
from precision_lab.settings import InspectOpsConfig
from precision_lab.task import Classification
from precision_lab.trainer import evaluate

NAN = float("nan")
MIB = 2**20
CUDA = torch.device("cuda")
gpu = pytest.mark.gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request):
    return torch.device(request.param)


def supported(arm, device):
    """The arm's policy with its backend flags set; a skip where the device refuses the arm."""
    policy = policy_of(arm, device)
    try:
        hardware.check_support(policy.config, device, hardware.dtype_support(device))
    except InputError as error:
        pytest.skip(str(error))
    policy.apply_backends()
    return policy


# ---- the label is proved ----------------------------------------------------------------------------------

BITS = {
    "fp32": ("float32", {23}),
    "tf32": ("float32", {10}),
    "bf16": ("bfloat16", {7}),
    "fp16": ("float16", {10}),
    "fp16_unscaled": ("float16", {10}),
    "bf16_pure": ("bfloat16", {7}),
}


def prove(arm, device):
    proof = supported(arm, device).prove()
    dtype, bits = BITS[arm]
    assert proof["linear_dtype"] == proof["conv_dtype"] == dtype
    assert proof["linear_bits"] in bits
    assert proof["conv_bits"] in bits | ({23} if arm == "tf32" else set())


@pytest.mark.parametrize("arm", ARMS)
def test_the_label_is_what_executes(arm, device):
    prove(arm, device)


@gpu
def test_tf32_is_what_executes_and_is_gone_in_the_next_arm():
    for arm in ("fp32", "tf32", "fp32"):
        prove(arm, CUDA)


# ---- tf32: the flags have an effect -------------------------------------------------------------------------


def error_of(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


@gpu
@pytest.mark.parametrize("kind", ["matmul", "conv"])
def test_tf32_rounds_and_ieee_does_not(kind):
    draw = torch.Generator(CUDA).manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, device=CUDA, generator=draw)

    if kind == "matmul":
        function, operands = torch.matmul, (random(1024, 1024), random(1024, 1024))
    else:
        function, operands = F.conv2d, (random(8, 64, 32, 32), random(64, 64, 3, 3))
    exact = function(*(operand.double() for operand in operands))
    supported("fp32", CUDA)
    ieee = error_of(function(*operands), exact)
    supported("tf32", CUDA)
    tf32 = error_of(function(*operands), exact)
    supported("fp32", CUDA)
    again = error_of(function(*operands), exact)
    # inputs rounded to 10 bits: an error near 2^-11 * 0.4 * sqrt(2) = 2.8e-4, whatever the length of the sums
    assert ieee < 1e-5
    assert again < 1e-5
    assert 5e-5 < tf32 < 2e-3


@gpu
@pytest.mark.parametrize("mixed", [{"float32_matmul": "tf32"}, {"float32_conv": "tf32"}])
def test_matmul_and_convolution_are_switched_apart(mixed):
    supported("tf32", CUDA)
    asked = compose(["precision=fp32", *(f"precision.{key}={value}" for key, value in mixed.items())])
    flags = type(policy_of("fp32"))(asked.precision, CUDA).apply_backends()
    assert flags["cuda_matmul_fp32"] == ("tf32" if "float32_matmul" in mixed else "ieee")
    assert flags["cudnn_conv_fp32"] == ("tf32" if "float32_conv" in mixed else "ieee")


@gpu
def test_the_fp32_evaluation_of_a_tf32_arm_is_ieee_and_leaves_the_flags():
    policy = supported("tf32", CUDA)
    draw = torch.Generator(CUDA).manual_seed(0)
    x = torch.randn(256, 512, device=CUDA, generator=draw)
    model = seeded(lambda: nn.Linear(512, 64)).to(CUDA)
    flags = backend_flags()
    got = evaluate(policy, mean_square, model, lambda: iter([(x, len(x))]))
    assert backend_flags() == flags
    exact = F.linear(x.double(), model.weight.double(), model.bias.double()).square().mean().item()
    assert got["val/loss_fp32"] == pytest.approx(exact, rel=1e-6)
    assert got["val/loss"] != got["val/loss_fp32"]


# ---- autocast on CUDA ---------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("arm", ["bf16", "fp16"])
def test_autocast_keeps_softmax_and_layer_norm_in_float32_and_lowers_linear_and_convolution(arm):
    policy = supported(arm, CUDA)
    x = torch.randn(4, 8, device=CUDA)
    low = x.to(policy.autocast_dtype)
    with policy.autocast():
        assert F.linear(x, torch.eye(8, device=CUDA)).dtype is policy.autocast_dtype
        assert F.conv1d(x[:, None], torch.ones(1, 1, 3, device=CUDA)).dtype is policy.autocast_dtype
        assert (x @ x.T).dtype is policy.autocast_dtype
        assert F.softmax(low, -1).dtype is torch.float32
        assert F.log_softmax(low, -1).dtype is torch.float32
        assert F.layer_norm(low, (8,)).dtype is torch.float32
        assert low.exp().dtype is torch.float32
        assert low.sum().dtype is torch.float32
        assert F.relu(low).dtype is policy.autocast_dtype
        assert F.cross_entropy(low, torch.zeros(4, dtype=torch.int64, device=CUDA)).dtype is torch.float32
    assert F.linear(x, torch.eye(8, device=CUDA)).dtype is torch.float32


@gpu
@pytest.mark.parametrize("arm", ARMS)
def test_autocast_is_off_in_backward_and_in_the_optimizer(arm):
    supported(arm, CUDA)
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", torch.is_autocast_enabled("cuda")))
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            seen.append(("backward", torch.is_autocast_enabled("cuda")))
            return grad

    def task(model, batch):
        return Spy.apply(model(batch)).float().square().mean(), {}

    trainer = trainer_of(arm, seeded(TwoHeads), task, device=CUDA)
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(("step", torch.is_autocast_enabled("cuda"))))
    step(trainer, torch.ones(2, 4, device=CUDA))
    inside = trainer.policy.autocast_dtype is not None
    assert seen == [("forward", inside), ("backward", False), ("step", False)]


# ---- no host sync between log points ---------------------------------------------------------------------------


class Small(nn.Module):
    """One of everything that a step meets: convolution, batch norm, attention, dropout, layer norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 16, 3, padding=1), nn.BatchNorm1d(16)
        self.qkv, self.layer_norm = nn.Linear(16, 48), nn.LayerNorm(16)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(16, 3)

    def forward(self, x):  # [B, 2, 8]
        x = self.norm(self.conv(x)).transpose(1, 2)  # [B, 8, 16]
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(self.dropout(self.layer_norm(x + y)).mean(1))


def labelled(count=64):
    draw = torch.Generator().manual_seed(0)
    return TensorSamples(torch.randn(count, 2, 8, generator=draw), torch.randint(3, (count,), generator=draw))


def loaded(device):
    """Batches as a run gets them: pinned, copied without waiting."""
    return TrainBatches(labelled(), 16, 0, place_on(device, channels_last=False))


def watching(batches, mode, first, last):
    """Hand out batches, with CUDA's sync debugging on from before batch `first` until before batch `last`."""
    try:
        for i, batch in enumerate(batches):
            if i in (first, last):
                torch.cuda.set_sync_debug_mode(mode if i == first else "default")
            yield batch
    finally:
        torch.cuda.set_sync_debug_mode("default")


debugging = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")


@gpu
@debugging
def test_sync_debugging_notices_a_sync():
    one = torch.ones((), device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            one.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@debugging
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("arm", [*ARMS, "tf32"])
def test_no_host_sync_between_log_points(arm, optimizer):
    supported(arm, CUDA)
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
    }[optimizer]
    trainer = trainer_of(arm, seeded(Small), Classification(), make, device=CUDA, accumulation=2, grad_clip=1.0)
    assert not trainer.guard.syncs
    # 12 steps of 2 micro-batches; the first 3 load kernels, and the last is before the log point
    batches = watching(loaded(CUDA), "error", 6, 22)
    try:
        progress, readings = train(trainer, batches, 12)
    finally:
        batches.close()
    assert progress.step == 12
    assert math.isfinite(readings[-1]["train/loss"])


@gpu
@debugging
@pytest.mark.parametrize("arm", ARMS)
def test_one_host_sync_a_step_of_an_optimizer_that_takes_no_flag(arm):
    supported(arm, CUDA)
    trainer = trainer_of(
        arm, seeded(Small), Classification(), lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True), device=CUDA
    )
    assert trainer.guard.syncs
    batches = loaded(CUDA)
    trainer.model.train()
    for _ in range(3):
        trainer.step(batches)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                trainer.step(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "called a synchronizing" in str(w.message)]) == 4


# ---- non-finite steps -------------------------------------------------------------------------------------------


def test_an_fp16_overflow_skips_halves_the_scale_and_changes_nothing(device):
    trainer = trainer_of("fp16", seeded(TwoHeads), mean_square, device=device, log_every=1)
    fine, huge = torch.full((4, 4), 0.1, device=device), torch.full((4, 4), 1e5, device=device)
    step(trainer, fine)
    weights, state = snapshot(trainer.model), [t.clone() for t in optimizer_tensors(trainer.optimizer)]
    step(trainer, huge)
    assert same_bits(snapshot(trainer.model), weights)
    assert all(torch.equal(a, b) for a, b in zip(state, optimizer_tensors(trainer.optimizer), strict=True))
    assert trainer.scaler.get_scale() == 2.0**15
    step(trainer, fine)
    assert not same_bits(snapshot(trainer.model), weights)
    assert [int(flag) for flag in trainer.window._flags] == [0, 1, 0]
    assert trainer.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum", "rmsprop"])
@pytest.mark.parametrize("arm", ARMS)
def test_a_nan_batch_leaves_weights_state_and_batch_norm_as_they_were(arm, optimizer, device):
    supported(arm, device)
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    }[optimizer]
    small_scale = {"init_scale": 256.0}
    trainer = trainer_of(arm, seeded(ConvNorm), mean_square, make, device=device, precision=small_scale, grad_clip=1.0)
    draw = torch.Generator().manual_seed(0)
    fine = [torch.randn(4, 2, 8, generator=draw).to(device) for _ in range(3)]
    nan = torch.full((4, 2, 8), NAN, device=device)
    step(trainer, nan)  # a skipped first step leaves fused SGD's momentum unfilled in bare torch
    step(trainer, fine[0])
    before, state = snapshot(trainer.model), [t.clone() for t in optimizer_tensors(trainer.optimizer)]
    step(trainer, nan)
    assert [int(flag) for flag in trainer.window._flags] == [1, 0, 1]
    assert same_bits(snapshot(trainer.model), before, but=("num_batches_tracked",))
    assert all(torch.equal(a, b) for a, b in zip(state, optimizer_tensors(trainer.optimizer), strict=True))
    step(trainer, fine[1])
    assert all_finite(snapshot(trainer.model).values())
    assert all(t.abs().max() < 100 for t in optimizer_tensors(trainer.optimizer))
    figures = evaluate(trainer.policy, trainer.task, trainer.model, lambda: iter([(fine[2], 4)]))
    assert all(math.isfinite(value) for value in figures.values())


@pytest.mark.parametrize("arm", ARMS)
def test_150_nan_batches_end_as_diverged(arm, device):
    supported(arm, device)
    trainer = trainer_of(arm, seeded(ConvNorm), mean_square, device=device, log_every=30)
    progress, _ = train(trainer, repeat(torch.full((4, 2, 8), NAN, device=device)), 150)
    assert progress.diverged
    assert progress.step == (30 if arm == "fp16" else 60)
    assert all_finite(snapshot(trainer.model).values())


# ---- the peak by kind -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_kinds_of_a_peak_add_up_to_the_allocators(device, precision):
    words = [f"precision={precision}", f"device={device.type}", "model=cnn", "trainer.batch_size=256"]
    ready = assemble(resolve(compose(words)))
    trainer, batch = make_trainer(ready), batch_of(ready.workload.data.train, 256, ready.place)
    trainer.step(repeat(batch))
    gc.collect()
    plain, part = step_peak(trainer, batch), peak_by_kind(trainer, batch)
    kinds = part["by_kind"]
    assert sum(kinds.values()) == part["peak_bytes"] == pytest.approx(plain, rel=0.02)
    assert part["phase"] in ("forward", "backward")
    assert min(kinds.values()) >= 0
    assert kinds["parameters"] == sum(t.nbytes for t in [*trainer.model.parameters(), *trainer.model.buffers()])
    assert kinds["saved_activations"] > kinds["batch"] > 0
    assert part.get("reserved_bytes", math.inf) >= part["peak_bytes"]
    assert ("device_used_bytes" in part) is (device.type == "cuda")


# ---- the meter on CUDA --------------------------------------------------------------------------------------------


@gpu
def test_peak_memory_counts_from_the_end_of_the_warm_up():
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    meter = Meter(CUDA, warmup_steps=2)
    meter.start()
    for megabytes in (512, 256, 64, 32):  # the first two are warm-up
        block = torch.empty(megabytes * MIB, dtype=torch.uint8, device=CUDA)
        del block
        meter.step(1)
    assert len(meter.close()) == 2
    figures = meter.summary()
    assert figures["mem/peak_allocated_gib"] * 2**30 == pytest.approx(base + 64 * MIB, abs=2 * MIB)
    assert figures["mem/peak_reserved_gib"] >= figures["mem/peak_allocated_gib"] > 0


@gpu
def test_what_happens_between_windows_does_not_count_as_peak():
    meter = Meter(CUDA, warmup_steps=0)
    base = torch.cuda.memory_allocated()
    for _ in range(2):
        meter.start()
        block = torch.empty(16 * MIB, dtype=torch.uint8, device=CUDA)
        del block
        meter.step(1)
        meter.close()
        between = torch.empty(512 * MIB, dtype=torch.uint8, device=CUDA)
        del between
    assert meter.summary()["mem/peak_allocated_gib"] * 2**30 == pytest.approx(base + 16 * MIB, abs=2 * MIB)


def test_step_times_add_up_to_the_wall_clock(device):
    size, per_step = (4096, 5) if device.type == "cuda" else (256, 5)
    matrix = torch.randn(size, size, device=device)

    def work():
        for _ in range(per_step):
            torch.mm(matrix, matrix)

    work()
    hardware.synchronize(device)
    meter = Meter(device, warmup_steps=0)
    start = time.perf_counter()
    meter.start()
    for _ in range(20):
        work()
        meter.step(8)
    told = time.perf_counter() - start
    times = meter.close()
    hardware.synchronize(device)
    wall_ms = (time.perf_counter() - start) * 1e3
    assert len(times) == 20
    assert sum(times) <= wall_ms * 1.01
    assert sum(times) == pytest.approx(wall_ms, rel=0.1, abs=5)
    assert meter.summary()["perf/samples_per_s"] == pytest.approx(160 / sum(times) * 1e3)
    if device.type == "cuda":
        assert told * 1e3 < 0.5 * wall_ms  # the host was told long before the device was done: no step waited


# ---- a run, whole ---------------------------------------------------------------------------------------------------

RUN = ["model=cnn", "model.widths=[16,32]", "dataset=digits", "trainer.steps=30", "trainer.batch_size=64"]
RUN += ["trainer.log_every=10", "trainer.eval_every=20", "wandb.mode=disabled", "seed=5"]


def result_of(outputs, *overrides):
    assert run.run(compose([*RUN, *overrides, f"paths.outputs={outputs}"])) == 0
    (file,) = outputs.rglob("result.json")
    return json.loads(file.read_text()), json.loads((file.parent / "environment.json").read_text())


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_from_start_to_end(arm, device, tmp_path):
    supported(arm, device)
    result, environment = result_of(tmp_path, f"precision={arm}", f"device={device.type}")
    assert result["status"] == "completed"
    assert environment["fingerprint"]["device"] == device.type
    assert environment["label_proof"]["linear_dtype"] == BITS[arm][0]
    summary = result["summary"]
    assert summary["final/perf_step_ms_p50"] > 0
    assert summary["final/mem_saved_activations_mib"] > 0
    assert summary["final/mem_peak_allocated_gib"] > 0
    assert summary["final/val_loss_fp32"] < math.log(10)  # it has learnt something: better than a guess


@gpu
def test_a_run_on_cuda_starts_from_the_weights_and_batches_of_a_run_on_the_cpu(tmp_path):
    results = [
        result_of(tmp_path / name, "precision=fp32", f"device={name}", f"device.channels_last={channels_last}")[0]
        for name, channels_last in (("cpu", "false"), ("cuda", "true"))
    ]
    for key in ("data", "initial_weights", "batches"):
        assert results[0]["hashes"][key] == results[1]["hashes"][key], key
    losses = [result["summary"]["final/val_loss"] for result in results]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@gpu
def test_a_convolution_net_peaks_lower_under_bf16(tmp_path):
    supported("bf16", CUDA)
    wide = ["dataset=synthetic_images", "dataset.samples=1280", "trainer.batch_size=256", "model.widths=[64,64,64]"]
    peaks, saved = {}, {}
    for arm in ("fp32", "bf16"):
        gc.collect()
        torch.cuda.empty_cache()
        result, _ = result_of(tmp_path / arm, *wide, f"precision={arm}", "device=cuda", "trainer.eval_every=null")
        peaks[arm] = result["summary"]["final/mem_peak_allocated_gib"]
        saved[arm] = result["summary"]["final/mem_saved_activations_mib"]
    assert 0.45 < saved["bf16"] / saved["fp32"] < 0.6
    assert peaks["bf16"] < 0.8 * peaks["fp32"]


@gpu
def test_running_out_of_device_memory_is_told_apart():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**48, dtype=torch.uint8, device=CUDA)
    assert run.is_out_of_memory(caught.value)


# ---- the op map of CUDA is predicted without it -------------------------------------------------------------


@gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "model",
    [
        "model=cnn",
        "model=gpt model.layers=2 model.dropout=0.1 dataset=synthetic_tokens",
        "model=resnet18 dataset=synthetic_images dataset.channels=3 dataset.image_size=64",
    ],
)
def test_the_predicted_op_map_is_what_this_gpu_runs(model, precision, tmp_path, capsys):
    words = [*model.split(), f"precision={precision}", "trainer.batch_size=4", f"paths.outputs={tmp_path}"]
    inspect_ops(compose([*words, "wandb.mode=disabled"]), InspectOpsConfig("cuda", "operation", None), 400, words)
    assert "by torch's own kernels, agree in all" in capsys.readouterr().out
