"""What a benchmark asks of the machine, with a made-up NVML, and the self-check with made-up times."""

import os
import types

import pytest
import torch

from precision_lab.benchmark import conditions, measure, selfcheck
from precision_lab.benchmark.conditions import Gpu
from precision_lab.benchmark.selfcheck import Checked
from precision_lab.benchmark.sittings import Apart, Together
from precision_lab.config import compose
from precision_lab.ratios import Ratio
from precision_lab.settings import BenchmarkConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FASTER, SLOWER, SAME = Ratio(40, 1.1, 1.05, 1.15), Ratio(40, 0.8, 0.78, 0.82), Ratio(40, 1.0, 0.99, 1.01)


def nvml(pids=(), energy=True):
    """A driver whose device has two reasons to hold its clocks down, one of them none."""

    def no_energy(handle):
        raise RuntimeError("not supported")

    return types.SimpleNamespace(
        NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0,
        nvmlClocksThrottleReasonNone=0, nvmlClocksThrottleReasonGpuIdle=1, nvmlClocksThrottleReasonSwPowerCap=4,
        nvmlClocksThrottleReasonAll=7, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [types.SimpleNamespace(pid=pid) for pid in pids],
        nvmlDeviceGetPowerUsage=lambda handle: 250_000, nvmlDeviceGetEnforcedPowerLimit=lambda handle: 300_000,
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1500, 2: 2600}[kind],
        nvmlDeviceGetTemperature=lambda handle, kind: 61,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 5,
        nvmlDeviceGetTotalEnergyConsumption=(lambda handle: 7000) if energy else no_energy,
    )  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    def made(**words):
        monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml(**words))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="77"))
        return Gpu(CUDA)

    return made


def test_a_gpu_is_read_in_plain_units(gpu):
    one = gpu(pids=[os.getpid(), 5])
    assert one._handle == "GPU-77"
    assert one.joules() == 7.0
    assert one.state() == {
        "sm_clock_mhz": 1500, "memory_clock_mhz": 2600, "temperature_c": 61, "power_w": 250.0, "power_limit_w": 300.0,
        "throttled_by": ["SwPowerCap"], "other_processes": [5],
    }  # fmt: skip


def test_in_a_container_whose_numbers_are_others_nobody_is_told_apart(gpu):
    assert gpu(pids=[123456789]).state()["other_processes"] is None


def test_without_nvml_or_a_counter_it_says_why(gpu, monkeypatch):
    assert Gpu(CPU).why_not == "no CUDA device"
    assert "gpu" not in conditions.conditions(Gpu(CPU))
    assert gpu(energy=False).joules() is None
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert Gpu(CUDA).why_not == "nvidia-ml-py is not installed"
    assert Gpu(CUDA).state() == {"gpu": "not measured: nvidia-ml-py is not installed"}


def test_energy_that_is_not_measured_has_a_reason(gpu):
    interrupted, fine = measure.Measured("fp32", {}, stopped_by="interrupted"), measure.Measured("fp32", {})
    together, apart = Together.__new__(Together), Apart({}, False, (False,))
    together.look = lambda *_: None
    assert measure._look(together, fine, Gpu(CPU)) == "not measured: no CUDA device"
    assert measure._look(together, interrupted, gpu()) == "not measured: interrupted"
    assert measure._look(apart, fine, gpu()) == "not measured: arms in processes"
    assert measure._look(together, fine, gpu(energy=False)) == "not measured: this device has no energy counter"
    assert measure._look(together, fine, gpu()) == "from the device's counter"

    def fails(*_):
        raise torch.OutOfMemoryError("no room\nat all")

    together.look = fails
    assert measure._look(together, fine, gpu()) == "not measured: no room"


def test_the_worst_of_all_sittings_is_kept():
    states = [
        {"throttled_by": ["SwPowerCap"], "sm_clock_mhz": 1500, "temperature_c": 60, "power_w": 200.0},
        {"throttled_by": [], "sm_clock_mhz": 1900, "temperature_c": 70, "power_w": None, "other_processes": [5]},
    ]
    assert measure._worst(states) == {
        "throttled_by": ["SwPowerCap"], "sm_clock_mhz": 1500, "temperature_c": 70, "power_w": 200.0,
        "other_processes": [5],
    }  # fmt: skip
    assert measure._worst([])["throttled_by"] == []


# --- the self-check -------------------------------------------------------------------------------------------


def test_no_trial_is_no_evidence():
    assert not Checked().sound


def test_false_calls_and_misses_are_counted():
    one = Checked(copies=[SAME] * 39 + [FASTER], delayed={0.05: [SLOWER] * 18 + [SAME] * 2, 0.2: [SLOWER] * 20})
    one.seconds = [1.0] * 20
    assert (one.false_calls, one.false_calls_allowed, one.found(0.05), one.found(0.2)) == (1, 2, 18, 20)
    assert one.sound
    one.copies[:2] = [SLOWER, SLOWER]
    assert not one.sound
    one.copies[:2] = [SAME, SAME]
    one.delayed[0.2][0] = SAME
    assert not one.sound


def test_a_trial_times_copies_and_delays_of_one_arm(monkeypatch):
    words = ["model=mlp", "model.hidden=[64]", "dataset=digits", "device=cpu", "device.threads=1", "precision=fp32"]
    settings = BenchmarkConfig("", "fp32", 0.01, 0.01, False, False, None)
    told = []
    made = selfcheck.self_check(compose(words), 1, settings, lambda one: told.append(len(one.copies)))
    assert told == [2]
    assert {share: len(ratios) for share, ratios in made.delayed.items()} == {0.05: 1, 0.2: 1}
    assert made.delayed[0.2][0].value < made.delayed[0.05][0].value < 1.3
    monkeypatch.setattr(
        selfcheck, "take_sittings", lambda source, measured, *_: setattr(measured, "stopped_by", "interrupted")
    )
    with pytest.raises(KeyboardInterrupt):
        selfcheck.self_check(compose(words), 1, settings, told.append)
