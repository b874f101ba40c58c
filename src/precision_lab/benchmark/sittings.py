"""Sittings: all arms built anew, warmed up, and timed in rounds of alternating blocks.

`Together` holds the models of all arms in this process. `Apart` gives each block a process of its own, where the
arms do not fit into memory together: slower, and still in alternation. Both return seconds a step by column.
"""

import resource
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from precision_lab import hardware
from precision_lab.assemble import Assembly, assemble, resolve, training_batches
from precision_lab.benchmark import blocks
from precision_lab.benchmark.blocks import Contestant, Ring
from precision_lab.config import Config
from precision_lab.errors import InputError
from precision_lab.processes import Killed, ask

LEAST_ROUNDS = 4  # of a sitting
APART_S = 3.0  # seconds of rounds in a process of its own, which takes longer to start
LOOKED_AT_STEPS = 5


@dataclass(frozen=True)
class Column:
    """What is timed: an arm's step, with or without the data loader, of the eager or the compiled model."""

    arm: str
    compiled: bool = False
    with_data: bool = False


@dataclass
class Notes:
    """What the sittings found beside the times."""

    steps_of_a_block: dict[bool, int] = field(
        default_factory=dict
    )  # with data or without; in processes as the last one chose
    not_steady: int = 0  # sittings in which a warm-up hit its cap
    skipped_steps: Counter[str] = field(default_factory=Counter)  # in timed blocks, by arm
    compile_s: dict[str, float] = field(default_factory=dict)  # of the first compilation, with its step
    busy_share: dict[Column, float] = field(default_factory=dict)
    joules_a_step: dict[str, list[float]] = field(default_factory=dict)  # by arm, of each window


class Together:
    """All arms in one process: `ready`, by label, each with and without `data`, compiled or not by `kinds`."""

    def __init__(self, ready: dict[str, Assembly], data: bool, kinds: tuple[bool, ...]):
        self._ready, self._data, self._kinds = ready, data, kinds
        self._first = next(iter(ready.values()))
        self._ring = Ring(self._first)
        self._loader = training_batches(self._first)  # one for all arms: several would compete
        self._prefetched = 2 * self._first.asked.trainer.workers  # batches that stand ready when a block begins
        # Another process breaks into few steps of a block, which its median ignores. Workers that fall behind make few
        # steps long as well, and these count.
        self._typical = statistics.fmean if self._prefetched else statistics.median
        self._cost_s = blocks.clock_cost(self._first.policy.device)
        self._sittings = self._rounds = 0
        self.notes = Notes()

    def fits(self) -> bool:
        """Whether all arms fit into this machine's memory at once, going by the first; a GPU says so itself."""
        available = hardware.available_memory()
        if self._first.policy.device.type != "cpu" or available is None:
            return True
        before = _peak_resident()
        Contestant(self._first, compiled=False).steps(self._ring.from_step(0), 2)  # to compile takes long
        return (_peak_resident() - before) * len(self._ready) * len(self._kinds) < available

    def sit(self, until: float, seconds: float = 0.0) -> dict[Column, list[float]]:
        """Build, warm up, and take rounds for as long as that took, or `seconds`; each column's times.

        LEAST_ROUNDS at least; one where the time `until` is over. A model that was just built differs from
        its like by more than the rounds of one sitting do, so many short sittings tell more than few long ones.
        """
        began = time.monotonic()
        built = self._build()
        first = not self._sittings
        self._sittings += 1
        self.notes.not_steady += not blocks.warm_up(list(built.values()), self._ring, until, first)
        kinds_of_data = (False, True) if self._data else (False,)
        columns = [Column(arm, kind, data) for kind in self._kinds for arm in self._ready for data in kinds_of_data]
        self._choose_blocks(built)
        times: dict[Column, list[float]] = {column: [] for column in columns}
        ready = time.monotonic()
        ends = min(ready + max(seconds, ready - began), until)
        done = 0
        while not done or time.monotonic() < ends or (done < LEAST_ROUNDS and time.monotonic() < until):
            for column in in_turn(columns, self._rounds):
                times[column].append(self._block(built[column.arm, column.compiled], column))
            self._rounds += 1
            done += 1
        return times

    def look(self, step_s: dict[Column, float], joules: Callable[[], float] | None, window_s: float) -> None:
        """On CUDA, once all is timed: which share of a step kernels run, and joules a step by a counter in joules.

        `step_s` names what is looked at, by its seconds a step. Two windows of at least `window_s` for each arm, in
        the order ABBA.
        """
        built = {key: contestant for key, contestant in self._build().items() if Column(*key) in step_s}
        blocks.warm_up(list(built.values()), self._ring, float("inf"), first=False)
        for key, contestant in built.items():
            share = contestant.busy_share(self._ring.from_step(0), LOOKED_AT_STEPS, step_s[Column(*key)])
            if share is not None:
                self.notes.busy_share[Column(*key)] = share
        eager = [(arm, contestant) for (arm, compiled), contestant in built.items() if compiled == self._kinds[0]]
        for arm, contestant in [*eager, *reversed(eager)] if joules else []:
            taken, before, began = 0, joules(), time.monotonic()
            while not taken or time.monotonic() - began < window_s:
                contestant.steps(self._ring.from_step(0), LOOKED_AT_STEPS)  # ends when the device has done them
                taken += LOOKED_AT_STEPS
            self.notes.joules_a_step.setdefault(arm, []).append((joules() - before) / taken)

    def apart(self) -> "Apart":
        """The same arms, a process each, once what is held here is let go."""
        asked = {label: one.asked for label, one in self._ready.items()}
        self._ring = self._loader = None
        hardware.release_memory()
        return Apart(asked, self._data, self._kinds)

    def _build(self) -> dict[tuple[str, bool], Contestant]:
        built = {}
        for compiled in self._kinds:
            for arm in in_turn(list(self._ready), self._sittings):  # what is built first lies elsewhere in memory
                built[arm, compiled] = one = Contestant(self._ready[arm], compiled)
                if compiled:
                    self.notes.compile_s.setdefault(arm, one.steps(self._ring.from_step(0), 1)[0])
        return built

    def _choose_blocks(self, built: dict[tuple[str, bool], Contestant]) -> None:
        """Once, by the fastest: all sittings are alike, and so are all arms."""
        if self.notes.steps_of_a_block:
            return
        fastest = min(statistics.median(one.steps(self._ring.from_step(0), 3)) for one in built.values())
        steps = blocks.steps_of_a_block(fastest, self._cost_s)
        # so many that the batches which the loader holds ready are few among them
        self.notes.steps_of_a_block = {False: steps, True: max(steps, 4 * self._prefetched)}

    def _block(self, contestant: Contestant, column: Column) -> float:
        """Seconds a step of one block."""
        steps = self.notes.steps_of_a_block[column.with_data]
        # Meanwhile workers load again what the block before took from them, and then take no core from what is timed.
        lead_in = max(1, self._prefetched)
        batches = self._loader if column.with_data else self._ring.from_step(self._rounds)
        seconds = contestant.steps(batches, steps, lead_in)
        self.notes.skipped_steps[column.arm] += contestant.skipped_steps
        return self._typical(seconds)


class OutOfMemory(Exception):
    """An arm does not fit into memory in a process of its own."""

    def __init__(self, arm: str):
        super().__init__(arm)
        self.arm = arm


class Apart:
    """A process for each block of each arm; a sitting is one round of them. Nothing is built in this process."""

    def __init__(self, asked: dict[str, Config], data: bool, kinds: tuple[bool, ...]):
        self._asked, self._data, self._kinds = asked, data, kinds
        self._rounds = 0
        self.notes = Notes()

    def leave_out(self, arm: str) -> None:
        """Go on without an arm."""
        del self._asked[arm]

    def sit(self, until: float) -> dict[Column, list[float]]:
        """One block of each arm, each in a process that builds it anew: the median of its step times."""
        times: dict[Column, list[float]] = {}
        unsettled = False
        for compiled in self._kinds:
            for arm in in_turn(list(self._asked), self._rounds):
                told = self._alone(arm, compiled)
                for with_data, step_s, steps in told["columns"]:
                    times[Column(arm, compiled, with_data)] = [step_s]
                    self.notes.steps_of_a_block[with_data] = steps
                unsettled = unsettled or told["not_steady"] > 0
                self.notes.skipped_steps[arm] += told["skipped_steps"]
                if compiled:
                    self.notes.compile_s.setdefault(arm, told["compile_s"])
        self._rounds += 1
        self.notes.not_steady += unsettled
        return times

    def _alone(self, arm: str, compiled: bool) -> dict[str, Any]:
        try:
            told = ask(f"{__name__}:time_alone", (self._asked[arm], self._data, compiled))
        except Killed as end:
            if end.number == signal.SIGKILL:  # the kernel's own way to say that memory is over
                raise OutOfMemory(arm) from end
            raise InputError(f"{arm}: the process that timed it was killed by signal {end.number}.") from end
        if told is None:
            raise OutOfMemory(arm)
        return told


def in_turn(things: list, number: int) -> list:
    """The things in the order of round `number`: rotated, and backwards in every second round."""
    start = (number // 2) % len(things)
    order = things[start:] + things[:start]
    return order[::-1] if number % 2 else order


def _peak_resident() -> int:
    """Bytes of memory that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def time_alone(order: tuple[Config, bool, bool]) -> dict[str, Any] | None:
    """In a process of `Apart`: build one arm, warm up, time blocks for some seconds; None where memory ran out."""
    asked, data, compiled = order
    try:
        alone = Together({"": assemble(resolve(asked))}, data, (compiled,))
        times = alone.sit(float("inf"), APART_S)
    except Exception as error:
        if not hardware.is_out_of_memory(error):
            raise
        return None
    notes = alone.notes
    return {
        "columns": [
            (column.with_data, statistics.median(seconds), notes.steps_of_a_block[column.with_data])
            for column, seconds in times.items()
        ],
        "not_steady": notes.not_steady,
        "skipped_steps": notes.skipped_steps.total(),
        "compile_s": notes.compile_s.get(""),
    }
