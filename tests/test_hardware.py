"""What devices are said to support, on devices that are not here: torch's answers are replaced, ours are checked."""

import builtins
import io

import pytest
import torch

from precision_lab import hardware
from precision_lab.config import DeviceConfig, DeviceType, load_precision
from precision_lab.errors import InputError

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


def device_config(kind="auto", threads=None):
    return DeviceConfig(DeviceType[kind], threads, channels_last=False, compile=False, memory_budget_gib=None)


def nvidia(monkeypatch, major, minor):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))

    def never(*_, **__):
        raise AssertionError("is_bf16_supported answers True on T4 and V100, by emulation")

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", never)


def amd(monkeypatch, bf16):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # gfx90a's, not Hopper's

    def supported(including_emulation=True):
        return True if including_emulation else bf16

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)


def mps(monkeypatch, bf16):
    def zeros(*_, dtype, device):
        assert (dtype, torch.device(device).type) == (torch.bfloat16, "mps")
        if not bf16:
            raise TypeError("BFloat16 is not supported on MPS")

    monkeypatch.setattr(hardware.torch, "zeros", zeros)


def cpu(monkeypatch, *names):
    known = ("avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
    capabilities = {name: name in names for name in {*known, *names}}
    # not every value there is a flag
    more = {"architecture": "x86_64", "num_sockets": 1, "cpu_name": "a name"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities | more, raising=False)


def cpuinfo(monkeypatch, text):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    real = builtins.open

    def fake(path, *args, **kwargs):
        if path != "/proc/cpuinfo":
            return real(path, *args, **kwargs)
        if text is None:
            raise FileNotFoundError(path)
        return io.StringIO(text)

    monkeypatch.setattr(hardware, "open", fake, raising=False)


# machine: (device, how to pretend, tf32, bfloat16, float16, the arm of precision=auto)
MACHINES = {
    "GTX 1080, sm_61": (CUDA, lambda m: nvidia(m, 6, 1), "no", "emulated", "emulated", None),
    "V100, sm_70": (CUDA, lambda m: nvidia(m, 7, 0), "no", "emulated", "native", "fp16"),
    "T4, sm_75": (CUDA, lambda m: nvidia(m, 7, 5), "no", "emulated", "native", "fp16"),
    "A100, sm_80": (CUDA, lambda m: nvidia(m, 8, 0), "native", "native", "native", "bf16"),
    "RTX 4090, sm_89": (CUDA, lambda m: nvidia(m, 8, 9), "native", "native", "native", "bf16"),
    "H100, sm_90": (CUDA, lambda m: nvidia(m, 9, 0), "native", "native", "native", "bf16"),
    "B200, sm_100": (CUDA, lambda m: nvidia(m, 10, 0), "native", "native", "native", "bf16"),
    "MI250": (CUDA, lambda m: amd(m, bf16=True), "no", "native", "native", "bf16"),
    "old AMD": (CUDA, lambda m: amd(m, bf16=False), "no", "emulated", "native", "fp16"),
    "macOS 14": (MPS, lambda m: mps(m, bf16=True), "no", "native", "native", "bf16"),
    "macOS 13": (MPS, lambda m: mps(m, bf16=False), "no", "no", "native", "fp32"),
    "CPU with AVX2 alone": (CPU, lambda m: cpu(m, "avx2"), "no", "emulated", "emulated", "fp32"),
    "CPU with AVX512": (CPU, lambda m: cpu(m, "avx2", "avx512_f"), "no", "emulated", "emulated", "fp32"),
    "Cooper Lake": (CPU, lambda m: cpu(m, "avx512_f", "avx512_bf16"), "no", "native", "emulated", "bf16"),
    "Sapphire Rapids": (CPU, lambda m: cpu(m, "amx_bf16", "avx512_fp16"), "no", "native", "native", "bf16"),
    "Granite Rapids": (CPU, lambda m: cpu(m, "amx_bf16", "amx_fp16"), "no", "native", "native", "bf16"),
    "Arm with bf16": (CPU, lambda m: cpu(m, "bf16", "fp16_arith"), "no", "native", "native", "bf16"),
    "cpuinfo, x86 without": (CPU, lambda m: cpuinfo(m, "flags\t\t: fpu avx2\n"), "no", "emulated", "emulated", "fp32"),
    "cpuinfo, x86 with": (
        *(CPU, lambda m: cpuinfo(m, "model name\t: a CPU\nflags\t\t: fpu avx512_bf16 amx_bf16 avx512_fp16\n")),
        *("no", "native", "native", "bf16"),
    ),
    "cpuinfo, Arm": (
        *(CPU, lambda m: cpuinfo(m, "processor\t: 0\nFeatures\t: fp asimd asimdhp bf16\n")),
        *("no", "native", "native", "bf16"),
    ),
    "cpuinfo, Arm without": (CPU, lambda m: cpuinfo(m, "Features\t: fp asimd\n"), "no", "emulated", "emulated", "fp32"),
    "cpuinfo without flags": (CPU, lambda m: cpuinfo(m, "processor: 0\n"), "no", "emulated", "emulated", "fp32"),
    "no cpuinfo": (CPU, lambda m: cpuinfo(m, None), "no", "emulated", "emulated", "fp32"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_what_a_machine_supports(monkeypatch, name):
    device, pretend, tf32, bfloat16, float16, arm = MACHINES[name]
    pretend(monkeypatch)
    support = hardware.dtype_support(device)
    assert support == {"float32": "native", "tf32": tf32, "bfloat16": bfloat16, "float16": float16}
    assert arm is None or hardware.choose_precision(device, support)[0] == arm


@pytest.mark.parametrize(
    ("device", "bfloat16", "arm", "reason"),
    [
        (CPU, "native", "bf16", "cpu computes bfloat16 natively, whose range needs no loss scaling"),
        (CUDA, "native", "bf16", "cuda computes bfloat16 natively, whose range needs no loss scaling"),
        (
            *(CUDA, "emulated", "fp16"),
            "this GPU has no bfloat16 units; float16 runs on its tensor cores, with loss scaling",
        ),
        (CPU, "emulated", "fp32", "cpu has no bfloat16 units, so a lower precision would only be slower"),
        (MPS, "no", "fp32", "mps has no bfloat16 units, so a lower precision would only be slower"),
    ],
)
def test_the_reason_for_the_choice(device, bfloat16, arm, reason):
    support = {"float32": "native", "tf32": "no", "bfloat16": bfloat16, "float16": "native"}
    assert hardware.choose_precision(device, support) == (arm, reason)


def test_a_gpu_without_tensor_cores_is_not_said_to_have_them(monkeypatch):
    nvidia(monkeypatch, 6, 1)
    _, reason = hardware.choose_precision(CUDA, hardware.dtype_support(CUDA))
    assert "runs on its tensor cores" not in reason


# --- refusing ----------------------------------------------------------------------------------

V100 = {"float32": "native", "tf32": "no", "bfloat16": "emulated", "float16": "native"}
OLD_MAC = {"float32": "native", "tf32": "no", "bfloat16": "no", "float16": "native"}
NOTHING = {"float32": "native", "tf32": "no", "bfloat16": "no", "float16": "no"}


@pytest.mark.parametrize(
    ("arm", "device", "support", "emulated"),
    [
        ("fp32", CPU, NOTHING, []),
        ("fp16", CUDA, V100, []),
        ("fp16_unscaled", CUDA, V100, []),
        ("bf16", CUDA, V100, ["bfloat16"]),
        ("bf16_pure", CUDA, V100, ["bfloat16"]),
        ("fp16", MPS, OLD_MAC, []),
    ],
)
def test_what_a_device_can_do_is_not_refused(arm, device, support, emulated):
    assert hardware.check_support(load_precision(arm), device, support) == emulated


@pytest.mark.parametrize(
    ("arm", "device", "support", "sentence"),
    [
        (
            *("tf32", CUDA, V100),
            "precision=tf32 needs tf32, which this cuda device does not have; it can do float32, bfloat16, float16.",
        ),
        (
            *("bf16", MPS, OLD_MAC),
            "precision=bf16 needs bfloat16, which this mps device does not have; it can do float32, float16.",
        ),
        (
            *("bf16_pure", MPS, OLD_MAC),
            "precision=bf16_pure needs bfloat16, which this mps device does not have; it can do float32, float16.",
        ),
        (
            *("fp16", CPU, NOTHING),
            "precision=fp16 needs float16, which this cpu device does not have; it can do float32.",
        ),
    ],
)
def test_a_refusal_lists_what_the_device_can_do(arm, device, support, sentence):
    with pytest.raises(InputError) as caught:
        hardware.check_support(load_precision(arm), device, support)
    assert str(caught.value) == sentence


def test_each_float32_switch_alone_needs_tf32():
    for key in ("float32_matmul", "float32_conv"):
        precision = load_precision("fp32")
        setattr(precision, key, load_precision("tf32").float32_matmul)
        with pytest.raises(InputError, match="needs tf32"):
            hardware.check_support(precision, CUDA, V100)


# --- choosing a device ---------------------------------------------------------------------------


def here(monkeypatch, *names):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in names)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in names)


@pytest.mark.parametrize(
    ("there", "wanted", "got"),
    [
        ((), "auto", "cpu"),
        (("cuda",), "auto", "cuda"),
        (("mps",), "auto", "mps"),
        (("cuda", "mps"), "auto", "cuda"),
        (("cuda",), "cpu", "cpu"),
        (("cuda",), "cuda", "cuda"),
        (("mps",), "mps", "mps"),
    ],
)
def test_the_device(monkeypatch, there, wanted, got):
    here(monkeypatch, *there)
    assert hardware.select_device(device_config(wanted)) == torch.device(got)


@pytest.mark.parametrize(
    ("there", "wanted", "sentence"),
    [
        ((), "cuda", "device=cuda is not available here; this machine has cpu."),
        ((), "mps", "device=mps is not available here; this machine has cpu."),
        (("mps",), "cuda", "device=cuda is not available here; this machine has mps, cpu."),
        (("cuda",), "mps", "device=mps is not available here; this machine has cuda, cpu."),
    ],
)
def test_a_device_that_is_not_here(monkeypatch, there, wanted, sentence):
    here(monkeypatch, *there)
    with pytest.raises(InputError) as caught:
        hardware.select_device(device_config(wanted))
    assert str(caught.value) == sentence


def test_the_threads_are_set():
    hardware.select_device(device_config("cpu", threads=2))
    assert torch.get_num_threads() == 2
    hardware.select_device(device_config("cpu", threads=None))
    assert torch.get_num_threads() == 2  # null leaves torch's own choice


# --- measuring and describing ----------------------------------------------------------------------


def test_the_slowdown_is_low_over_full(monkeypatch):
    """By a clock of ours: float32 takes 2 ms, bfloat16 5 ms, and the first try of each is thrown away."""
    took = {torch.float32: iter([90, 2, 2, 2, 2, 2]), torch.bfloat16: iter([500, 5, 5, 7, 3, 5])}
    now = [0.0]
    order = []

    class Operand:
        def __init__(self, dtype):
            self.dtype = dtype

        def to(self, dtype):
            return Operand(dtype)

        def __matmul__(self, other):
            assert other is self
            order.append(self.dtype)
            now[0] += next(took[self.dtype]) / 1e3

    monkeypatch.setattr(hardware.torch, "randn", lambda *_, **__: Operand(torch.float32))
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: now[0])
    assert hardware.slowdown(torch.bfloat16, CPU) == pytest.approx(2.5)
    assert order == [torch.float32, torch.bfloat16] * 6  # in alternation


def test_the_slowdown_draws_no_global_random_numbers():
    before = torch.get_rng_state()
    ratio = hardware.slowdown(torch.bfloat16, CPU, size=16)
    assert ratio > 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
        RuntimeError("MPS backend out of memory (MPS allocated: 5 GB, other allocations: 3 GB, max allowed: 9 GB)."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(&handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_every_device_s_way_of_running_out_of_memory(error):
    assert hardware.is_out_of_memory(error)
    told = InputError("The model does not fit.")
    assert not hardware.is_out_of_memory(told)
    told.__cause__ = error
    assert hardware.is_out_of_memory(told)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    ],
)
def test_what_else_a_library_of_cuda_s_says_is_no_want_of_memory(text):
    assert not hardware.is_out_of_memory(RuntimeError(text))


def test_the_fingerprint_of_a_cpu(monkeypatch):
    cpu(monkeypatch, "avx2", "amx_bf16", "popcnt")
    monkeypatch.setattr(hardware, "_cpu_model", lambda: "a CPU")
    monkeypatch.setattr(hardware, "total_memory", lambda: round(15.6 * 2**30))
    monkeypatch.setattr(hardware.os, "cpu_count", lambda: 8)
    assert hardware.fingerprint(CPU) == {
        "device": "cpu",
        "model": "a CPU",
        "count": 8,
        "capability": "amx_bf16,avx2",  # what speed depends on, not every flag
        "memory_gib": 16,
        "threads": 1,
    }
    words = hardware.describe(CPU, {"float32": "native", "bfloat16": "emulated"})
    assert words == "cpu: a CPU, threads: 1; float32 native, bfloat16 emulated"


def test_the_fingerprint_of_a_gpu(monkeypatch):
    class Properties:
        name, major, minor, total_memory = "NVIDIA H100", 9, 0, round(79.1 * 2**30)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hardware.fingerprint(CUDA) == {
        "device": "cuda",
        "model": "NVIDIA H100",
        "count": 1,  # that a run trains on, of the two here
        "capability": "9.0",
        "memory_gib": 79,
        "threads": 1,
    }
    assert hardware.describe(CUDA, {"float32": "native"}) == "cuda: NVIDIA H100; float32 native"


def test_the_model_of_a_cpu(monkeypatch):
    cpuinfo(monkeypatch, "processor\t: 0\nmodel name\t: A   CPU @ 2GHz\n")
    assert hardware._cpu_model() == "A CPU @ 2GHz"
