"""The meter's arithmetic, by a clock that the test moves: no sleeping, exact numbers."""

import pytest
import torch

from precision_lab import meter as meter_module
from precision_lab.meter import Meter, percentile
from precision_lab.sizes import GIB

CPU = torch.device("cpu")


class Clock:
    """Seconds, moved by hand. Steps of an eighth, so that sums are exact in binary."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def pass_ms(self, ms):
        self.now += ms / 1e3


class EventTimer:
    """A device's event timer: marks are events, read only after the device was waited for."""

    def __init__(self, clock):
        self.clock, self.calls = clock, []

    def mark(self):
        self.calls.append("mark")
        return Event(self.clock.now)

    def elapsed_ms(self, start, end):
        last = next(call for call in reversed(self.calls) if call != "read")
        assert last == "synchronize", "an event was read before the device was waited for"
        self.calls.append("read")
        end.wait()
        return (end.at - start.at) * 1e3


class Event:
    """As on MPS: its flag can be waited for once."""

    def __init__(self, at):
        self.at, self.waited = at, False

    def wait(self):
        assert not self.waited, "an event that was waited for before hangs"
        self.waited = True

    def synchronize(self):
        self.wait()


def cpu_meter(warmup_steps=0, untimed_steps=0):
    clock = Clock()
    elapsed = dict(mark=clock, elapsed_ms=lambda a, b: (b - a) * 1e3, clock=clock)
    meter = Meter(CPU, warmup_steps, **elapsed, untimed_steps=untimed_steps)
    return meter, clock


def take(meter, clock, *milliseconds, samples=4):
    for ms in milliseconds:
        clock.pass_ms(ms)
        meter.step(samples)


def test_steps_under_an_instrument_count_in_no_time_nor_after_a_restart():
    meter, clock = cpu_meter(warmup_steps=1, untimed_steps=3)
    meter.start()
    take(meter, clock, 8000, 8000)
    assert meter.close() == []
    meter.start()
    take(meter, clock, 8000, 125)
    assert meter.close() == [125]
    assert (meter.train_s, meter.step_ms) == (0.125, [125])
    again, clock = cpu_meter(warmup_steps=1, untimed_steps=3)
    again.load_state(meter.state())
    again.start()
    take(again, clock, 8000, 8000, 8000, 250)
    again.close()
    assert (again.train_s, again.step_ms) == (0.375, [125, 250])


def test_one_window():
    meter, clock = cpu_meter()
    meter.start()
    take(meter, clock, 125, 250, 500)
    assert meter.close() == [125, 250, 500]
    summary = meter.summary()
    assert summary["perf/step_ms_p50"] == 250
    assert summary["perf/step_ms_p95"] == 500
    assert summary["perf/samples_per_s"] == 3 * 4 / 0.875
    assert summary["perf/data_wait_share"] == 0


def test_the_time_between_windows_does_not_count():
    meter, clock = cpu_meter()
    clock.pass_ms(5000)  # before the first window
    meter.start()
    take(meter, clock, 125, 125)
    assert meter.close() == [125, 125]
    clock.pass_ms(60_000)  # evaluation, logging
    meter.start()
    take(meter, clock, 375)
    assert meter.close() == [375]
    clock.pass_ms(60_000)
    assert meter.step_ms == [125, 125, 375]
    assert meter.train_s == 0.625
    assert meter.summary()["perf/samples_per_s"] == 3 * 4 / 0.625


@pytest.mark.parametrize(
    ("warmup", "windows"),
    [
        (0, [[1, 2], [3, 4], [5, 6]]),
        (1, [[2], [3, 4], [5, 6]]),
        (2, [[], [3, 4], [5, 6]]),
        (3, [[], [4], [5, 6]]),
        (5, [[], [], [6]]),
        (6, [[], [], []]),
        (9, [[], [], []]),
    ],
)
def test_the_warm_up_steps_do_not_count(warmup, windows):
    """Wherever the warm-up ends: at a window's start, inside one, at its end, after the last."""
    meter, clock = cpu_meter(warmup)
    got = []
    for first in (1, 3, 5):
        meter.start()
        take(meter, clock, 125 * first, 125 * (first + 1))
        got.append([ms / 125 for ms in meter.close()])
    assert got == windows
    measured = sum(windows, [])
    assert meter.train_s == 0.125 * sum(range(1, 7))  # of training they are a part
    assert meter.step_ms == [125 * ms for ms in measured]
    assert meter.summary()["perf/measured_steps"] == len(measured)
    throughput = meter.summary()["perf/samples_per_s"]
    assert throughput == (pytest.approx(len(measured) * 4 / (0.125 * sum(measured))) if measured else None)


def test_steps_of_different_sizes():
    meter, clock = cpu_meter(warmup_steps=1)
    meter.start()
    take(meter, clock, 500, samples=1000)  # warm-up: neither its time nor its samples
    take(meter, clock, 250, samples=6)
    take(meter, clock, 250, samples=2)
    meter.close()
    assert meter.summary()["perf/samples_per_s"] == 16


def test_nothing_measured_is_none_not_zero():
    meter, clock = cpu_meter(warmup_steps=2)
    names = ("perf/step_ms_p50", "perf/step_ms_p95", "perf/samples_per_s", "perf/data_wait_share")
    empty = dict.fromkeys([*names, "mem/peak_allocated_gib", "mem/peak_reserved_gib"]) | {"perf/measured_steps": 0}
    assert meter.summary() == empty
    meter.start()
    assert meter.close() == []
    meter.start()
    take(meter, clock, 125, 125)
    assert meter.close() == []
    assert meter.summary() == empty


# --- waiting for data ---------------------------------------------------------------------------


def batches_that_take(clock, *milliseconds):
    for i, ms in enumerate(milliseconds):
        clock.pass_ms(ms)
        yield i


def test_the_share_of_waiting_for_data():
    meter, clock = cpu_meter()
    batches = meter.timed(batches_that_take(clock, 125, 0, 375))
    meter.start()
    for ms in (125, 500, 875):
        next(batches)
        take(meter, clock, ms)
    assert meter.close() == [250, 500, 1250]
    assert meter.summary()["perf/data_wait_share"] == 500 / 2000


def test_the_wait_of_warm_up_steps_and_between_windows_does_not_count():
    meter, clock = cpu_meter(warmup_steps=1)
    batches = meter.timed(batches_that_take(clock, 8000, 250, 0))
    meter.start()
    next(batches)
    take(meter, clock, 125)
    next(batches)
    take(meter, clock, 250)
    meter.close()
    clock.pass_ms(60_000)  # the consumer is away: that is not waiting for data
    meter.start()
    next(batches)
    take(meter, clock, 500)
    meter.close()
    assert meter.summary()["perf/data_wait_share"] == 250 / 1000


def test_the_waits_of_a_step_s_micro_batches_add_up():
    meter, clock = cpu_meter()
    batches = meter.timed(batches_that_take(clock, 125, 125, 250))
    meter.start()
    for _ in range(3):
        next(batches)
    take(meter, clock, 500)
    meter.close()
    assert meter.summary()["perf/data_wait_share"] == 0.5


def test_timed_hands_out_the_same_batches():
    meter, clock = cpu_meter()
    assert list(meter.timed(batches_that_take(clock, 1, 2, 3))) == [0, 1, 2]


# --- percentiles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [
        (1, 0.95, 1),
        (2, 0.95, 2),
        (10, 0.95, 10),
        (19, 0.95, 19),  # 0.95 * 19 = 18.05: the 19th
        (20, 0.95, 19),  # 19 of 20 values do not exceed the 19th
        (40, 0.95, 38),
        (100, 0.95, 95),
        (100, 0.5, 50),
        (3, 0.5, 2),
        (4, 1.0, 4),
    ],
)
def test_percentile_is_the_nearest_rank(count, share, expected):
    values = [float(value) for value in range(count, 0, -1)]  # order must not matter
    assert percentile(values, share) == expected
    assert sum(value <= expected for value in values) >= share * count
    assert values == [float(value) for value in range(count, 0, -1)]


# --- the device path -------------------------------------------------------------------------------


@pytest.fixture
def device_meter(monkeypatch):
    """A function of device and warm-up that gives (meter, clock, timer)."""

    def make(kind, warmup_steps=0):
        clock = Clock()
        timer = EventTimer(clock)
        monkeypatch.setattr(meter_module, "synchronize", lambda device: timer.calls.append("synchronize"))
        return Meter(torch.device(kind), warmup_steps, timer.mark, timer.elapsed_ms, clock), clock, timer

    return make


def test_a_step_never_waits_for_the_device_and_a_window_once(device_meter):
    meter, clock, timer = device_meter("mps")
    for ms in (125, 250):
        timer.calls.clear()
        meter.start()
        take(meter, clock, ms, 2 * ms)
        assert timer.calls == ["mark"] * 3
        assert meter.close() == [ms, 2 * ms]
        assert timer.calls == ["mark"] * 3 + ["synchronize", "read", "read"]
    assert meter.step_ms == [125, 250, 250, 500]


def test_every_event_is_read_as_an_end_once_in_a_warm_up_as_well(device_meter):
    meter, clock, timer = device_meter("mps", warmup_steps=2)
    meter.start()
    take(meter, clock, 125, 250, 500)
    assert meter.close() == [500]
    assert meter.train_s == 0.875
    assert timer.calls.count("read") == 3


def test_an_empty_window_waits_for_nothing(device_meter):
    meter, _, timer = device_meter("mps")
    meter.start()
    assert meter.close() == []
    assert timer.calls == ["mark"]


def test_a_device_without_memory_counters_says_none(device_meter):
    meter, clock, _ = device_meter("mps")
    meter.start()
    take(meter, clock, 125)
    meter.close()
    assert meter.summary()["mem/peak_allocated_gib"] is None
    assert meter.summary()["mem/peak_reserved_gib"] is None


class Allocator:
    """CUDA's peak counters: allocate, and see the highest level since the last reset."""

    def __init__(self, monkeypatch):
        self.now, self.peak = 0, 0
        cuda = meter_module.torch.cuda
        monkeypatch.setattr(cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(cuda, "max_memory_reserved", lambda: 2 * self.peak)

    def reset(self):
        self.peak = self.now

    def use(self, gib):
        """Rise to `gib` for a moment."""
        self.peak = max(self.peak, round(gib * GIB))


def test_the_peak_is_of_measured_steps_alone(monkeypatch, device_meter):
    memory = Allocator(monkeypatch)
    meter, clock, _ = device_meter("cuda", warmup_steps=2)
    memory.use(50)  # building the model
    meter.start()
    memory.use(9)  # the first steps tune and allocate
    take(meter, clock, 125, 125)
    memory.use(3)
    take(meter, clock, 125)
    meter.close()
    memory.use(40)  # evaluation between windows
    meter.start()
    memory.use(2)
    take(meter, clock, 125)
    meter.close()
    memory.use(60)  # and after the last
    summary = meter.summary()
    assert summary["mem/peak_allocated_gib"] == 3  # the highest of both windows
    assert summary["mem/peak_reserved_gib"] == 6


def test_a_run_that_ends_in_its_warm_up_has_no_peak(monkeypatch, device_meter):
    memory = Allocator(monkeypatch)
    meter, clock, _ = device_meter("cuda", warmup_steps=5)
    meter.start()
    memory.use(3)
    take(meter, clock, 125)
    meter.close()
    assert meter.summary()["mem/peak_allocated_gib"] is None
