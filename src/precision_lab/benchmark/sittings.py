"""Sittings: all arms built anew, warmed up, and timed in rounds of alternating blocks.

`Together` holds the models of all arms in this process. `Apart` gives each block a process of its own, where the
arms do not fit into memory together: slower, and still in alternation. Both return seconds a step by column.
"""

import gc
import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from precision_lab import hardware
from precision_lab.assemble import Assembly, assemble, resolve, training_batches
from precision_lab.benchmark import blocks
from precision_lab.benchmark.blocks import Contestant, Ring
from precision_lab.config import Config
from precision_lab.errors import InputError

LEAST_ROUNDS = 4  # of a sitting
APART_S = 3.0  # seconds of rounds in a process of its own, which takes longer to start
PROFILED_STEPS = 5


@dataclass(frozen=True)
class Column:
    """What is timed: an arm's step, with or without the data loader, of the eager or the compiled model."""

    arm: str
    compiled: bool = False
    with_data: bool = False

    @property
    def plain(self) -> bool:
        """Computing alone, eager."""
        return not (self.compiled or self.with_data)


@dataclass
class Notes:
    """What the sittings found beside the times."""

    steps_of_a_block: dict[Column, int] = field(default_factory=dict)
    not_steady: int = 0  # warm-ups that hit their cap
    skipped_steps: dict[str, int] = field(default_factory=dict)  # in timed blocks, by arm
    compile_s: dict[str, float] = field(default_factory=dict)  # of the first compilation, with its step
    busy_share: dict[Column, float] = field(default_factory=dict)

    def add_skipped(self, arm: str, steps: int) -> None:
        self.skipped_steps[arm] = self.skipped_steps.get(arm, 0) + steps


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
        Contestant(self._first, compiled=False).steps(self._ring.from_step(0), 2)
        return (_peak_resident() - before) * len(self._ready) * len(self._kinds) < available

    def sit(self, until: float, seconds: float = 0.0) -> dict[Column, list[float]]:
        """Build, warm up, and take rounds for as long as that took, or `seconds`; each column's times.

        LEAST_ROUNDS at least, and no more where the time `until` is over. A model that was just built differs from
        its like by more than the rounds of one sitting do, so many short sittings tell more than few long ones.
        """
        began = time.monotonic()
        built = self._build()
        first = not self._sittings
        self._sittings += 1
        self.notes.not_steady += not blocks.warm_up(list(built.values()), self._ring, until, first)
        kinds_of_data = (False, True) if self._data else (False,)
        columns = [Column(arm, kind, data) for kind in self._kinds for arm in self._ready for data in kinds_of_data]
        self._choose_blocks(built, columns)
        times: dict[Column, list[float]] = {column: [] for column in columns}
        ready = time.monotonic()
        ends = min(ready + max(seconds, ready - began), until)
        done = 0
        while done < LEAST_ROUNDS or time.monotonic() < ends:
            for column in in_turn(columns, self._rounds):
                times[column].append(self._block(built[column.arm, column.compiled], column))
            self._rounds += 1
            done += 1
        if not self.notes.busy_share:
            self._profile(built, times)
        return times

    def energy(self, joules: Callable[[], float], window_s: float) -> dict[str, float]:
        """Joules a step by arm: two windows of at least `window_s` each, in the order ABBA, by a counter in joules."""
        built = {arm: contestant for (arm, compiled), contestant in self._build().items() if not compiled}
        blocks.warm_up(list(built.values()), self._ring, float("inf"), first=False)
        spent, taken = dict.fromkeys(built, 0.0), dict.fromkeys(built, 0)
        for arm in [*built, *reversed(built)]:
            before, began = joules(), time.monotonic()
            while time.monotonic() - began < window_s:
                built[arm].steps(self._ring.from_step(0), PROFILED_STEPS)  # ends when the device has done them
                taken[arm] += PROFILED_STEPS
            spent[arm] += joules() - before
        return {arm: spent[arm] / taken[arm] for arm in built}

    def apart(self) -> "Apart":
        """The same arms, a process each, once what is held here is let go."""
        asked = {label: one.asked for label, one in self._ready.items()}
        self._ring = self._loader = None
        gc.collect()
        hardware.release_cached_memory()
        return Apart(asked, self._data, self._kinds)

    def _build(self) -> dict[tuple[str, bool], Contestant]:
        built = {}
        for compiled in self._kinds:
            for arm in in_turn(list(self._ready), self._sittings):  # what is built first lies elsewhere in memory
                built[arm, compiled] = one = Contestant(self._ready[arm], compiled)
                if compiled:
                    self.notes.compile_s.setdefault(arm, one.steps(self._ring.from_step(0), 1)[0])
        return built

    def _choose_blocks(self, built: dict[tuple[str, bool], Contestant], columns: list[Column]) -> None:
        """Once, so that all sittings are alike."""
        for column in columns:
            if column in self.notes.steps_of_a_block:
                continue
            step_s = statistics.median(built[column.arm, column.compiled].steps(self._ring.from_step(0), 3))
            steps = blocks.steps_of_a_block(step_s, self._cost_s)
            # so many that the batches which the loader holds ready are few among them
            self.notes.steps_of_a_block[column] = max(steps, 4 * self._prefetched if column.with_data else 0)

    def _block(self, contestant: Contestant, column: Column) -> float:
        """Seconds a step of one block."""
        steps = self.notes.steps_of_a_block[column]
        lead_in = max(int(steps > 1), self._prefetched if column.with_data else 0)
        batches = self._loader if column.with_data else self._ring.from_step(self._rounds)
        seconds = contestant.steps(batches, steps, lead_in)
        self.notes.add_skipped(column.arm, contestant.skipped_steps)
        return self._typical(seconds)

    def _profile(self, built: dict[tuple[str, bool], Contestant], times: dict[Column, list[float]]) -> None:
        for (arm, compiled), contestant in built.items():
            column = Column(arm, compiled)
            share = contestant.busy_share(self._ring.from_step(0), PROFILED_STEPS, statistics.median(times[column]))
            if share is not None:
                self.notes.busy_share[column] = share


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
        for compiled in self._kinds:
            for arm in in_turn(list(self._asked), self._rounds):
                told = self._alone(arm, compiled)
                for with_data, step_s, steps in told["columns"]:
                    column = Column(arm, compiled, with_data)
                    times[column], self.notes.steps_of_a_block[column] = [step_s], steps
                self.notes.not_steady += told["not_steady"]
                self.notes.add_skipped(arm, told["skipped_steps"])
                if compiled:
                    self.notes.compile_s.setdefault(arm, told["compile_s"])
        self._rounds += 1
        return times

    def _alone(self, arm: str, compiled: bool) -> dict[str, Any]:
        command = [sys.executable, "-m", "precision_lab.benchmark.sittings"]
        order = pickle.dumps((self._asked[arm], self._data, compiled))
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # a `_target_` is found as in this process
        done = subprocess.run(command, input=order, capture_output=True, env=os.environ | {"PYTHONPATH": paths})
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        said = done.stderr.decode(errors="replace").strip().splitlines() or [""]
        if said[-1] == NO_MEMORY or done.returncode == -9:  # the kernel's own way to say so
            raise OutOfMemory(arm)
        raise InputError(f"{arm}: the process that timed it ended with exit code {done.returncode}: {said[-1]}")


def in_turn(things: list, number: int) -> list:
    """The things in the order of round `number`: rotated, and backwards in every second round."""
    start = (number // 2) % len(things)
    order = things[start:] + things[:start]
    return order[::-1] if number % 2 else order


def _peak_resident() -> int:
    """Bytes of memory that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


NO_MEMORY = "out of memory"


def _block_alone() -> None:
    """A process of `Apart`: build one arm, warm up, time blocks for some seconds, print the medians as JSON."""
    asked, data, compiled = pickle.load(sys.stdin.buffer)
    try:
        alone = Together({"": assemble(resolve(asked))}, data, (compiled,))
        times = alone.sit(float("inf"), APART_S)
    except Exception as error:
        if not hardware.is_out_of_memory(error):
            raise
        sys.exit(NO_MEMORY)
    notes = alone.notes
    told = {
        "columns": [
            (column.with_data, statistics.median(seconds), notes.steps_of_a_block[column])
            for column, seconds in times.items()
        ],
        "not_steady": notes.not_steady,
        "skipped_steps": sum(notes.skipped_steps.values()),
        "compile_s": notes.compile_s.get(""),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    _block_alone()
