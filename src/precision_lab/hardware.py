"""What this machine is and which dtypes it has arithmetic for. Knows devices, refuses to know runs.

Support has three words: `native` (arithmetic units of its own), `emulated` (works, by conversion,
usually slower than float32), `no` (refused).
"""

import gc
import os
import platform
import re
import statistics
import time
from typing import Any

import torch

from precision_lab.arm_schema import Dtype, Float32Mode, PrecisionConfig
from precision_lab.config import DeviceConfig, DeviceType
from precision_lab.errors import InputError, require
from precision_lab.sizes import GIB


def select_device(wanted: DeviceConfig) -> torch.device:
    """The device to run on, and the CPU threads set; InputError for a device that is not here."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted.threads is not None:
        torch.set_num_threads(wanted.threads)
    if wanted.type is DeviceType.auto:
        return torch.device(next(name for name, here in available.items() if here))
    if not available[wanted.type.name]:
        here = ", ".join(name for name, there in available.items() if there)
        raise InputError(f"device={wanted.type.name} is not available here; this machine has {here}.")
    return torch.device(wanted.type.name)


def dtype_support(device: torch.device) -> dict[str, str]:
    """`{"float32": ..., "tf32": ..., "bfloat16": ..., "float16": ...}` -> native | emulated | no."""
    support = {"cpu": _cpu_support, "cuda": _cuda_support, "mps": _mps_support}[device.type]()
    return {"float32": "native", **support}


def _cpu_support() -> dict[str, str]:
    features = cpu_features()
    bf16 = features & {"avx512_bf16", "amx_bf16", "bf16"}
    fp16 = features & {"avx512_fp16", "amx_fp16", "fp16_arith", "asimdhp"}
    return {
        "tf32": "no",  # changes no bit of a CPU result
        "bfloat16": "native" if bf16 else "emulated",
        "float16": "native" if fp16 else "emulated",
    }


def _cuda_support() -> dict[str, str]:
    if torch.version.hip:
        # AMD's capability numbers are not NVIDIA's; torch answers for bf16 itself
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return {"tf32": "no", "bfloat16": "native" if bf16 else "emulated", "float16": "native"}
    # Capability, not is_bf16_supported: that one answers True on T4 and V100, by emulation.
    capability = torch.cuda.get_device_capability()
    ampere, tensor_cores = capability >= (8, 0), capability >= (7, 0)
    return {
        "tf32": "native" if ampere else "no",
        "bfloat16": "native" if ampere else "emulated",
        "float16": "native" if tensor_cores else "emulated",
    }


def _mps_support() -> dict[str, str]:
    try:
        torch.zeros(1, dtype=torch.bfloat16, device="mps")
        bf16 = "native"
    except (RuntimeError, TypeError):  # macOS before 14
        bf16 = "no"
    return {"tf32": "no", "bfloat16": bf16, "float16": "native"}


def cpu_features() -> set[str]:
    """Names of the CPU's features as torch, or on older torch the kernel, reports them."""
    if hasattr(torch.cpu, "get_capabilities"):
        return {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    try:
        with open("/proc/cpuinfo") as file:
            line = next(line for line in file if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return set()
    return set(line.partition(":")[2].split())


def choose_precision(device: torch.device, support: dict[str, str]) -> tuple[str, str]:
    """The field's rule for `precision=auto`: the arm's name and the reason in one sentence."""
    if support["bfloat16"] == "native":
        return "bf16", f"{device.type} computes bfloat16 natively, whose range needs no loss scaling"
    if device.type == "cuda" and support["float16"] == "native":
        return "fp16", "this GPU has no bfloat16 units; float16 runs on its tensor cores, with loss scaling"
    return "fp32", f"{device.type} has no bfloat16 units, so a lower precision would only be slower"


def check_support(precision: PrecisionConfig, device: torch.device, support: dict[str, str]) -> list[str]:
    """Refuse what the device cannot do; return the dtypes it only emulates. Of a target that is emulated here: none."""
    wanted = {"tf32"} if Float32Mode.tf32 in (precision.float32_matmul, precision.float32_conv) else set()
    low = {d.name for d in (precision.param_dtype, precision.autocast_dtype) if d not in (None, Dtype.float32)}
    wanted |= low if precision.emulate is None else set()
    refused = sorted(name for name in wanted if support[name] == "no")
    if refused:
        can = ", ".join(name for name, word in support.items() if word != "no")
        raise InputError(
            f"precision={precision.name} needs {', '.join(refused)}, which this {device.type} device does not have; "
            f"it can do {can}."
        )
    return sorted(name for name in wanted if support[name] == "emulated")


def slowdown(dtype: torch.dtype, device: torch.device, size: int = 256) -> float:
    """Time of one matmul of size x size in `dtype` over the same in float32 (medians of alternating tries)."""
    draw = torch.Generator(device=device).manual_seed(0)
    full_operand = torch.randn(size, size, device=device, generator=draw)
    operands = {d: full_operand.to(d) for d in (torch.float32, dtype)}
    times: dict[torch.dtype, list[float]] = {d: [] for d in operands}
    for _ in range(6):
        for kind, operand in operands.items():
            synchronize(device)
            start = time.perf_counter()
            operand @ operand
            synchronize(device)
            times[kind].append(time.perf_counter() - start)
    # the first try converts, tunes and loads
    low, full = (statistics.median(times[kind][1:]) for kind in (dtype, torch.float32))
    return low / full


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told. A CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def fingerprint(device: torch.device) -> dict[str, Any]:
    """What speed and memory depend on: equal for machines whose figures may be put in one ratio."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "device": "cuda",
            "model": properties.name,
            "count": 1,  # that a run trains on, however many this machine has
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / GIB),
            "threads": torch.get_num_threads(),
        }
    return {
        "device": device.type,
        "model": _cpu_model(),
        "count": os.cpu_count(),
        "capability": ",".join(sorted(cpu_features() & _TELLING_FEATURES)),
        "memory_gib": round(total_memory() / GIB),
        "threads": torch.get_num_threads(),
    }


_TELLING_FEATURES = {
    "avx2", "avx512_f", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16",
    "neon", "asimdhp", "bf16", "sve",
}  # fmt: skip


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return re.sub(r"\s+", " ", line.partition(":")[2]).strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def total_memory() -> int:
    """Bytes of this machine's memory; 0 where it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def available_memory() -> int | None:
    """Bytes that new processes could use without swapping, as Linux estimates it; None where nobody tells."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def limit_memory(asked: DeviceConfig, device: torch.device) -> None:
    """Have the allocator of a CUDA or MPS device refuse what goes beyond `memory_budget_gib`; InputError if it cannot.

    A CPU's allocator knows no limit: there the steps are to be measured.
    """
    fraction = memory_fraction(asked, device)
    if fraction is not None:
        hold_to_fraction(device, fraction)


def hold_to_fraction(device: torch.device, fraction: float) -> None:
    """Have the allocator of a CUDA or MPS device refuse what goes beyond this share of the device's memory."""
    {"cuda": torch.cuda, "mps": torch.mps}[device.type].set_per_process_memory_fraction(fraction)


def memory_fraction(asked: DeviceConfig, device: torch.device) -> float | None:
    """The budget as a share of a CUDA or MPS device's memory; None for no limit. InputError for what cannot be held."""
    if asked.memory_budget_gib is None:
        return None
    key = f"device.memory_budget_gib={asked.memory_budget_gib}"
    if device.type == "cpu":
        require(
            not asked.compile,
            f"{key} and device.compile=true cannot be combined on a CPU: a compiled step is not measured there.",
        )
        return None
    return fraction_of(device, int(asked.memory_budget_gib * GIB), key)


def fraction_of(device: torch.device, budget: int, key: str) -> float:
    """`budget` bytes as a share of what the device has; InputError, with the words of `key`, if that is less."""
    total = (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else torch.mps.recommended_max_memory()
    )
    require(budget <= total, f"{key} is more than the {total / GIB:.3g} GiB of this device.")
    return budget / total


def release_memory() -> None:
    """Give back to the device what nothing holds any more: tensors in cycles, and what its allocator keeps."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe(device: torch.device, support: dict[str, str]) -> str:
    """One line for the terminal: `cpu: Intel(R) Xeon(R) Processor, threads: 2; bfloat16 native, ...`."""
    machine = fingerprint(device)
    words = ", ".join(f"{name} {word}" for name, word in support.items())
    threads = f", threads: {machine['threads']}" if device.type == "cpu" else ""
    return f"{device.type}: {machine['model']}{threads}; {words}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory, said by the error itself or by the one it was raised from."""
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError) or _OUT_OF_MEMORY.search(str(one))
        for one in (error, error.__cause__)
    )


# What has no exception of its own: torch's allocators for CPU and MPS, and libraries that allocate past torch's.
# cuBLAS takes its workspace when its handle is made, on the first matmul; where none is left it says no more than
# NOT_INITIALIZED. From any other call that word is an error of another kind.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|MPS backend out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(Lt)?Create\("
)
