"""The conditions that a benchmark is made under: busy cores, clocks, throttling, others on the GPU; and its energy.

NVIDIA's counters are read through NVML (package nvidia-ml-py, optional): without it they are `not measured`.
"""

import contextlib
import os
import time
from typing import Any

import torch

MOST_PROCESSES = 20
LOOK_S = 0.5


class Gpu:
    """NVML's view of one CUDA device. `available` is False without NVML; then every reading is None."""

    def __init__(self, device: torch.device):
        self._nvml, self._handle, self.why_not = None, None, ""
        if device.type != "cuda":
            self.why_not = "no CUDA device"
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            # By UUID: NVML counts all devices of the machine, CUDA those that this process is shown.
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._nvml = pynvml
        except ImportError:
            self.why_not = "nvidia-ml-py is not installed"
        except Exception as error:  # no NVIDIA driver, an AMD device, no rights
            self.why_not = f"NVML: {error}"

    @property
    def available(self) -> bool:
        return self._nvml is not None

    def joules(self) -> float | None:
        """Energy since the driver was loaded, whole device; NVML updates it about every 100 ms. Volta and newer."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def state(self) -> dict[str, Any]:
        """Clocks in MHz, temperature in C, power in W, why the clock is held down, and the processes of others."""
        nvml = self._nvml
        if nvml is None:
            return {"gpu": f"not measured: {self.why_not}"}
        pids = [one.pid for one in self._ask("nvmlDeviceGetComputeRunningProcesses") or []]
        # In a container NVML gives the host's numbers: where this process is not among them, nobody can be told apart.
        others = [pid for pid in pids if pid != os.getpid()] if os.getpid() in pids else None
        milliwatts = {
            "power_w": self._ask("nvmlDeviceGetPowerUsage"),
            "power_limit_w": self._ask("nvmlDeviceGetEnforcedPowerLimit"),
        }
        return {
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            "temperature_c": self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            **{name: None if value is None else value / 1e3 for name, value in milliwatts.items()},
            "throttled_by": self._throttle_reasons(),
            "other_processes": others and others[:MOST_PROCESSES],
        }

    def _throttle_reasons(self) -> list[str] | None:
        mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        if mask is None:
            return None
        names = [name for name in dir(self._nvml) if name.startswith("nvmlClocksThrottleReason")]
        harmless = ("None", "GpuIdle", "All")
        found = {name.removeprefix("nvmlClocksThrottleReason"): getattr(self._nvml, name) for name in names}
        return sorted(name for name, bit in found.items() if name not in harmless and mask & bit)

    def _ask(self, call: str, *arguments: Any) -> Any:
        if self._nvml is None:
            return None
        with contextlib.suppress(Exception):  # not supported by this device, or no rights
            return getattr(self._nvml, call)(self._handle, *arguments)
        return None


def conditions(gpu: Gpu) -> dict[str, Any]:
    """How the machine stands now, while this process does nothing for a moment."""
    here = {"busy_cores": _busy_cores(), "cores": os.cpu_count(), "cpu_mhz": _cpu_mhz()}
    return here | (gpu.state() if not gpu.why_not.startswith("no CUDA") else {})


def _busy_cores() -> float | None:
    """How many cores others keep busy, where the kernel tells: from its account of half a second."""
    before = _core_seconds()
    time.sleep(LOOK_S)
    after = _core_seconds()
    if not before or not after or after[1] <= before[1]:
        return None
    return round((os.cpu_count() or 1) * (after[0] - before[0]) / (after[1] - before[1]), 2)


def _core_seconds() -> tuple[int, int] | None:
    """(busy, in all) of all cores since the start, in the kernel's ticks."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]  # guests are counted within user and nice
        idle = ticks[3] + ticks[4]  # idle, and waiting for a disk
        return sum(ticks) - idle, sum(ticks)
    return None


def _cpu_mhz() -> float | None:
    """The mean clock of all cores, where the kernel tells it."""
    with contextlib.suppress(OSError, ValueError), open("/proc/cpuinfo") as file:
        clocks = [float(line.partition(":")[2]) for line in file if line.startswith("cpu MHz")]
        return round(sum(clocks) / len(clocks)) if clocks else None
    return None
