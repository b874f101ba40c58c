"""Arms timed in alternation: blocks, sittings, the end by rule, and the script. No test goes by a clock's time."""

import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from precision_lab.arms import arms_of
from precision_lab.assemble import assemble, resolve
from precision_lab.benchmark import blocks, measure, sittings
from precision_lab.benchmark.blocks import Contestant, Ring, covered, steps_of_a_block, warm_up
from precision_lab.benchmark.measure import Measured
from precision_lab.benchmark.sittings import Apart, Column, OutOfMemory, Together, in_turn
from precision_lab.config import ROOT, compose
from precision_lab.errors import InputError
from precision_lab.hashing import content_hash
from precision_lab.processes import Killed
from precision_lab.report.benchmarks import load
from precision_lab.settings import BenchmarkConfig, own_settings
from typed_scripts import run

WORDS = ["model=mlp", "model.hidden=[16]", "dataset=digits", "device.threads=1", "trainer.batch_size=8", "device=cpu"]
QUICK = BenchmarkConfig("fp32,bf16", "fp32", 0.01, 0.01, True, False, False)


def ready_for(precision="fp32", *words):
    return assemble(resolve(compose([*WORDS, f"precision={precision}", *words])))


def made_up(times, reference="fp32"):
    """A measurement of given times: label -> sittings of seconds a step by round."""
    one = Measured(reference, {})
    for number in range(len(times[reference])):
        one.sittings.append({Column(arm): times[arm][number] for arm in times})
    return one


# --- blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_pure"])
def test_no_step_of_a_benchmark_moves_a_weight_and_all_arms_begin_alike(precision):
    ready = ready_for(precision)
    one = Contestant(ready, compiled=False)
    before = content_hash(one._trainer.model.state_dict())
    assert len(one.steps(Ring(ready).from_step(0), 4, lead_in=2)) == 4
    assert content_hash(one._trainer.model.state_dict()) == before
    assert one._trainer.optimizer.state  # the optimizer did step
    if precision != "bf16_pure":
        assert before == content_hash(Contestant(ready_for(), compiled=False)._trainer.model.state_dict())


def test_a_step_is_the_trainers_own_whole(monkeypatch):
    calls = Counter()
    ready = ready_for("fp16", "trainer.accumulation=2")
    one = Contestant(ready, compiled=False)

    def count(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: (calls.update([f"{type(owner).__name__}.{name}"]), real(*a))[1])

    for owner, name in ((one._trainer, "step"), (one._trainer.optimizer, "step"), (one._trainer.scaler, "update")):
        count(owner, name)
    one.steps(Ring(ready).from_step(0), 3, lead_in=1)
    assert calls == {"Trainer.step": 4, "AdamW.step": 4, "GradScaler.update": 4}


def test_the_ring_holds_the_runs_first_batches_for_every_arm():
    plain, low = Ring(ready_for()), Ring(ready_for("bf16"))
    for (a, _), (b, _), _ in zip(plain.from_step(3), low.from_step(3), range(20), strict=False):
        assert torch.equal(a, b)
    first = next(plain.from_step(0))
    assert torch.equal(next(plain.from_step(blocks.STAGED_BATCHES))[0], first[0])
    assert not torch.equal(next(plain.from_step(1))[0], first[0])


@pytest.mark.parametrize(
    ("step_s", "cost_s", "steps"),
    [(0.0013, 1e-7, 5), (0.2, 1e-7, 2), (0.05, 1e-7, 2), (0.001, 49.5e-6, 50), (0.06, 119e-6, 2)],
)
def test_a_block_is_as_short_as_the_clock_allows(step_s, cost_s, steps):
    assert steps_of_a_block(step_s, cost_s) == steps


def test_kernels_that_overlap_count_once():
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.8)]) == 4
    assert covered([]) == 0


class Scripted:
    """A contestant whose step times are given, and whose first steps are skipped."""

    def __init__(self, turns, skipped=0):
        self.turns, self.left, self.taken = iter(turns), skipped, 0
        self.skipped_steps = 0

    def steps(self, batches, steps, lead_in=0):
        self.taken += steps
        self.skipped_steps, self.left = min(self.left, steps), max(0, self.left - steps)
        return [next(self.turns)] * steps


class NoRing:
    def from_step(self, step):
        return iter(())


def test_a_warm_up_ends_when_all_are_steady_and_none_skips():
    falling, steady = Scripted([9.0, 5.0, 4.0, 3.9, 3.8]), Scripted([1.0] * 5)
    assert warm_up([falling, steady], NoRing(), float("inf"), first=True)
    assert falling.taken == steady.taken == 4 * blocks.WARM_STEPS
    skipping = Scripted([1.0] * 9, skipped=3 * blocks.WARM_STEPS)
    assert warm_up([skipping], NoRing(), float("inf"), first=True)
    assert skipping.taken == 4 * blocks.WARM_STEPS


def test_a_warm_up_that_does_not_settle_says_so_at_its_cap_or_when_time_is_over():
    restless = Scripted([0.8**turn for turn in range(20)])
    assert not warm_up([restless], NoRing(), float("inf"), first=True)
    assert restless.taken == blocks.WARM_TURNS * blocks.WARM_STEPS
    later = Scripted([1.0] * 20)
    assert warm_up([later], NoRing(), float("inf"), first=False)
    assert later.taken == 2 * blocks.LATER_WARM_STEPS
    late = Scripted([0.8**turn for turn in range(20)])
    assert not warm_up([late], NoRing(), float("-inf"), first=True)
    assert late.taken == blocks.WARM_STEPS


# --- sittings -------------------------------------------------------------------------------------------------


def test_every_thing_has_every_place_equally_often_and_is_followed_backwards():
    orders = [in_turn(["a", "b", "c"], number) for number in range(6)]
    assert Counter((thing, place) for order in orders for place, thing in enumerate(order)) == {
        (thing, place): 2 for thing in "abc" for place in range(3)
    }
    assert all(orders[n + 1] == orders[n][::-1] for n in (0, 2, 4))


def test_a_sitting_times_each_column_in_each_round_and_builds_all_anew(monkeypatch):
    built = []
    monkeypatch.setattr(sittings, "Contestant", lambda *a, **k: built.append(Contestant(*a, **k)) or built[-1])
    source = Together({"fp32": ready_for(), "bf16": ready_for("bf16")}, True, (False,))
    first, second = (source.sit(0) for _ in range(2))
    assert list(first) == list(second)
    assert set(first) == {Column(arm, False, data) for arm in ("fp32", "bf16") for data in (False, True)}
    assert {len(times) for times in first.values()} == {1}  # the time is over
    assert all(time > 0 for times in first.values() for time in times)
    assert len(built) == len({id(one._trainer.model) for one in built}) == 4
    assert source.notes.skipped_steps == {"fp32": 0, "bf16": 0}
    assert source.notes.steps_of_a_block == {False: blocks.SHORT_BLOCK, True: blocks.SHORT_BLOCK}


def test_with_workers_a_block_outlasts_what_stands_loaded_already():
    source = Together({"fp32": ready_for("fp32", "trainer.workers=1")}, True, (False,))
    taken = Counter()
    real = Contestant.steps

    def counting(self, batches, steps, lead_in=0):
        taken[steps, lead_in] += 1
        return real(self, batches, steps, lead_in)

    source._loader = source._ring.from_step(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Contestant, "steps", counting)
        source.sit(0)
    assert source.notes.steps_of_a_block[True] == 8
    assert taken[8, 2] == 1


@pytest.mark.parametrize(("workers", "seconds"), [(0, 1.0), (1, 3.0)])
def test_a_blocks_median_step_counts_unless_workers_may_fall_behind(workers, seconds):
    """In the blocks with data and in those without, so that what they differ by is the data."""
    source = Together({"fp32": ready_for("fp32", f"trainer.workers={workers}")}, True, (False,))
    source._loader = source._ring.from_step(0)

    class Broken(Scripted):
        def steps(self, batches, steps, lead_in=0):
            return [1.0, 1.0, 1.0, 1.0, 11.0]

    source.notes.steps_of_a_block = {False: 5, True: 5}
    for column in (Column("fp32"), Column("fp32", with_data=True)):
        assert source._block(Broken([]), column) == seconds


def test_skipped_steps_in_timed_blocks_are_counted():
    source = Together(
        {"fp16": ready_for("fp16", "precision.init_scale=1e38", "precision.growth_interval=1")}, False, (False,)
    )
    source.sit(0)
    assert source.notes.skipped_steps["fp16"] > 0


def test_energy_is_joules_a_step_in_two_windows_of_each_arm_but_the_copy():
    source = Together({"fp32": ready_for(), "bf16": ready_for("bf16"), "fp32 again": ready_for()}, False, (False,))
    readings = iter([0.0, 30.0, 100.0, 120.0, 200.0, 220.0, 300.0, 330.0])  # fp32, bf16, bf16, fp32
    source.look({Column("fp32"): 1.0, Column("bf16"): 1.0}, lambda: next(readings), window_s=1e-9)
    steps = sittings.LOOKED_AT_STEPS
    assert source.notes.joules_a_step == {"fp32": [30 / steps, 30 / steps], "bf16": [20 / steps, 20 / steps]}
    assert source.notes.busy_share == {}  # no GPU


def test_a_module_kept_in_float32_that_is_never_called_is_refused_as_in_training():
    ready = ready_for("bf16", "precision.fp32_modules=[layers]")
    one = Contestant(ready, compiled=False)
    one._policy._kept.append("nobody")
    with pytest.raises(InputError, match="nobody is never called as a module"):
        one.steps(Ring(ready).from_step(0), 1)


@pytest.mark.slow
def test_processes_take_turns_where_arms_do_not_fit_together():
    asked = {"bf16": compose([*WORDS, "precision=bf16"])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sittings, "APART_S", 0.1)
        times = Apart(asked, False, (False,)).sit(0)
    assert {column: len(seconds) for column, seconds in times.items()} == {Column("bf16"): 1}
    assert all(seconds[0] > 0 for seconds in times.values())


def test_a_process_that_crashed_is_no_want_of_memory(monkeypatch):
    def ask(target, order):
        raise Killed(11)

    monkeypatch.setattr(sittings, "ask", ask)
    with pytest.raises(InputError, match="bf16: the process that timed it was killed by signal 11."):
        Apart({"bf16": compose(WORDS)}, False, (False,)).sit(0)


@pytest.mark.parametrize("answer", [None, Killed(9)])
def test_a_process_that_memory_runs_out_in_is_an_answer(monkeypatch, answer):
    def ask(target, order):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(sittings, "ask", ask)
    with pytest.raises(OutOfMemory, match="bf16"):
        Apart({"bf16": compose(WORDS)}, False, (False,)).sit(0)


# --- the end by rule ------------------------------------------------------------------------------------------


def steady(value, sittings_=10, rounds=5, spread=0.001):
    return [[value * (1 + spread * (-1) ** round_) for round_ in range(rounds)] for _ in range(sittings_)]


def test_a_ratio_is_the_references_time_over_the_arms_in_pairs():
    measured = made_up({"fp32": [[2.0, 4.0, 8.0]], "bf16": [[1.0, 2.0, 4.0]], "fp32 again": [[2.0, 4.0, 8.0]]})
    ratios = {arm: measured.ratio(Column(arm)).value for arm in ("bf16", "fp32 again")}
    assert ratios == pytest.approx({"bf16": 2.0, "fp32 again": 1.0})


def test_it_is_resolved_when_each_interval_is_narrow_and_the_second_copys_holds_1():
    fine = {"fp32": steady(2.0), "fp32 again": steady(2.0), "bf16": steady(1.0)}
    assert made_up(fine).resolved(0.01)
    wide = [[1.0 + 0.1 * n] * 5 for n in range(10)]
    assert not made_up(fine | {"bf16": wide}).resolved(0.01)
    assert not made_up(fine | {"fp32 again": steady(1.9)}).resolved(0.01)
    assert not made_up({arm: times[:9] for arm, times in fine.items()}).resolved(0.01)  # too few sittings
    assert not made_up({arm: [one[:1] for one in times] for arm, times in fine.items()}).resolved(0.01)  # pairs


def test_the_data_share_is_what_computing_does_not_hide():
    measured = made_up({"fp32": [[1.0, 2.0, 3.0]]})
    measured.sittings[0][Column("fp32", with_data=True)] = [4.0, 4.0, 4.0]
    assert measured.data_share(Column("fp32"))["value"] == 0.5
    assert made_up({"fp32": [[1.0]]}).data_share(Column("fp32")) is None


class Source(Together):
    """Hands out sittings; an exception in the list is raised."""

    def __init__(self, answers):
        self.answers, self.notes = iter(answers), sittings.Notes()

    def sit(self, until):
        answer = next(self.answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def sitting(**times):
    return {Column(arm.replace("_", " ")): seconds for arm, seconds in times.items()}


NARROW = sitting(fp32=[2.0] * 5, fp32_again=[2.0] * 5, bf16=[1.0] * 5)


def test_sittings_end_with_the_width_the_budget_or_ctrl_c():
    def ended(answers, budget_s):
        measured = Measured("fp32", {})
        settings = replace(QUICK, budget_s=budget_s)
        told = []
        measure.take_sittings(Source(answers), measured, settings, lambda one: told.append(len(one.sittings)))
        assert told == list(range(1, len(measured.sittings) + 1))
        return measured.stopped_by, len(measured.sittings)

    apart = sitting(fp32=[2.0] * 5, fp32_again=[1.8] * 5, bf16=[1.0] * 5)  # the copy differs, in every sitting
    assert ended([NARROW] * 19, 1e6) == ("width", measure.SETTLED_SITTINGS)
    assert ended([apart] * 9, 1e-9) == ("budget", measure.LEAST_SITTINGS)
    assert ended([NARROW, NARROW, KeyboardInterrupt()], 1e6) == ("interrupted", 2)
    with pytest.raises(KeyboardInterrupt):
        ended([KeyboardInterrupt()], 1e6)
    with pytest.raises(KeyboardInterrupt):  # one pair has no interval
        ended([sitting(fp32=[2.0], fp32_again=[2.0], bf16=[1.0]), KeyboardInterrupt()], 1e6)


def test_arms_that_do_not_fit_together_are_put_into_processes_unless_that_was_refused(monkeypatch):
    no_room = torch.OutOfMemoryError("no room")
    measured = Measured("fp32", {})
    first = Source([no_room])
    monkeypatch.setattr(Source, "apart", lambda self: Source([NARROW] * 19), raising=False)
    measure.take_sittings(first, measured, replace(QUICK, processes=None), lambda one: None)
    assert measured.apart
    assert measured.stopped_by
    with pytest.raises(InputError, match="do not fit into memory together; set processes=null"):
        measure.take_sittings(Source([no_room]), Measured("fp32", {}), QUICK, lambda one: None)


def test_what_is_held_is_let_go_before_processes_start(monkeypatch):
    """An exception holds the frames it went through, and with them the models."""
    held = []

    class Full(Source):
        def sit(self, until):
            model = torch.nn.Linear(2, 2)
            held.append(weakref.ref(model))
            raise torch.OutOfMemoryError("no room")

        def apart(self):
            gc.collect()
            assert held[0]() is None
            return Source([NARROW] * 19)

    measure.take_sittings(Full([]), Measured("fp32", {}), replace(QUICK, processes=None), lambda one: None)
    assert held


def test_a_compiled_experiment_is_timed_compiled(monkeypatch):
    kinds = []
    monkeypatch.setattr(measure, "Together", lambda ready, data, chosen: kinds.append(chosen) or Source([]))
    for words, compiled in ((["device.compile=true"], False), (["device.compile=true"], True), ([], True), ([], False)):
        ready = {"fp32": ready_for("fp32", *words)}
        measure._source(Measured("fp32", {}), ready, replace(QUICK, compiled=compiled))
    assert kinds == [(True,), (True,), (False, True), (False,)]


@pytest.mark.slow
def test_compiled_steps_are_timed_beside_eager_ones():
    source = Together({"fp32": ready_for(), "fp32 again": ready_for()}, False, (False, True))
    measured = Measured("fp32", {})
    measured.sittings = [source.sit(0) for _ in range(3)]
    assert set(measured.columns) == {Column(arm, kind) for arm in ("fp32", "fp32 again") for kind in (False, True)}
    assert source.notes.compile_s["fp32"] > max(measured.sittings[0][Column("fp32", True)])
    assert measured.ratio(Column("fp32", True), base=Column("fp32")).pairs >= 3


def test_an_arm_that_does_not_fit_by_itself_is_left_out_and_the_reference_is_refused():
    class Alone(Source):
        left = None

        def leave_out(self, arm):
            self.left = arm

    measured, alone = Measured("fp32", {}), Alone([OutOfMemory("bf16"), *[NARROW] * 19])
    measure.take_sittings(alone, measured, QUICK, lambda one: None)
    assert (alone.left, measured.without) == ("bf16", {"bf16": "out of memory"})
    with pytest.raises(InputError, match="The reference arm fp32 does not fit into memory by itself"):
        measure.take_sittings(Alone([OutOfMemory("fp32 again")]), Measured("fp32", {}), QUICK, lambda one: None)


def test_whether_all_fit_is_told_by_the_first_on_a_cpu(monkeypatch):
    source = Together({"fp32": ready_for(), "bf16": ready_for("bf16")}, False, (False,))
    monkeypatch.setattr(sittings.hardware, "available_memory", lambda: 1)
    monkeypatch.setattr(sittings, "_peak_resident", iter([0, 10]).__next__)
    assert not source.fits()
    monkeypatch.setattr(sittings.hardware, "available_memory", lambda: None)
    assert source.fits()


# --- the script -----------------------------------------------------------------------------------------------


def test_the_script_writes_beside_the_runs_of_the_experiment_and_a_comparison_finds_it(tmp_path):
    words = [*WORDS, f"paths.outputs={tmp_path}", "name=night shift", "trainer.steps=20"]
    done = run("benchmark.py", *words, "arms=[fp32,bf16[fp32_modules=layers.*]]", "budget_s=1")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "sweeps" / "night-shift" / "benchmarks").glob("*/benchmark.json")
    told = json.loads(file.read_text())
    assert list(told["arms"]) == ["fp32", "bf16[fp32_modules=layers.*]"]
    for one in told["columns"]:
        seconds = [s for sitting_ in one["seconds_a_step"] for s in sitting_]
        assert one["step_ms"] == pytest.approx(statistics.median(seconds) * 1e3, rel=1e-4)
        assert (one["ratio"] is None) == (one["arm"] == "fp32" and not one["again"])
    assert told["stopped_by"] == "budget"
    lines = done.stdout.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert [line.split()[0] for line in lines if line.endswith("noise floor")] == ["fp32", "fp32"]
    assert "ended with its time budget of 1 s" in " ".join(done.stdout.split())


@pytest.mark.slow  # it waits until sittings are done
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_what_there_is(tmp_path, number, code):
    words = [*WORDS, "arms=fp32,bf16", "budget_s=300", "half_width=0.0001", f"paths.outputs={tmp_path}"]
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as done:
        began = time.monotonic()
        while done.poll() is None and time.monotonic() - began < 25:
            time.sleep(0.5)
        done.send_signal(number)
        out, err = done.communicate(timeout=60)
    assert done.returncode == code, err
    (file,) = tmp_path.rglob("benchmark.json")
    assert json.loads(file.read_text())["stopped_by"] == "interrupted"
    assert "interrupted" in out
    assert "Traceback" not in err


@pytest.mark.slow
def test_what_data_adds_hides_a_speed_up_as_amdahl_says(tmp_path):
    """Reading a batch sleeps 20 ms, and no step in between is any faster for that."""
    words = ["dataset=custom", "dataset._target_=own_code.mine.slow_data", "+dataset.seconds=0.02"]
    words += ["model=mlp", "model.hidden=[2048,2048]", "model.channels=1", "model.image_size=8", "model.num_classes=10"]
    words += ["device.threads=1", "trainer.batch_size=64", "arms=fp32,bf16", "budget_s=60", "half_width=0.02"]
    tests = Path(__file__).parent
    done = run("benchmark.py", *words, f"paths.outputs={tmp_path}", PYTHONPATH=f"{tests}:{tests.parent / 'src'}")
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("benchmarks/*/*")
    benchmark, _ = load(str(folder))
    alone, both = benchmark.ratio("bf16"), benchmark.ratio("bf16", with_data=True)
    share = benchmark["arms"]["fp32"]["data_share"]
    assert 0.1 < share < 0.9
    assert abs(alone.value - 1) > 0.1  # else there is nothing to hide
    assert both.value == pytest.approx(1 / ((1 - share) / alone.value + share), rel=0.05)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["arms=fp32,fp33"], "precision=fp33 does not exist; did you mean fp32?"),
        (["arms=bf16,fp16"], "reference=fp32 is none of the arms, which are bf16, fp16."),
        (["budget_s=soon"], "budget_s=soon is not valid; it takes a value of type float."),
        (["budget_s=nan"], "budget_s=nan must be above 0 and finite"),
        (["precision=bf16"], "precision=bf16 sets one arm's precision; here all arms are named together"),
        (["trainer.stepz=3"], "trainer.stepz is not a known key"),
        (["-m"], "-m is no override"),
        (["arms=[fp32,bf16"], "[fp32 is no arm"),
        (
            ["arms=[fp32,fp16[emulate=cuda]]"],
            "arms: fp16[emulate=cuda] is emulated, and its time and memory say nothing about cuda; leave it out.",
        ),
        (
            ["arms=[fp32,bf16[fp32_ops=softmax]]", "compiled=true"],
            "arms: bf16[fp32_ops=softmax] keeps operations in float32, which no compiled model does",
        ),
    ],
)
def test_wrong_input_is_one_sentence_and_leaves_nothing(tmp_path, words, sentence):
    done = run("benchmark.py", *WORDS, f"paths.outputs={tmp_path / 'out'}", *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("benchmark*.json"))


def test_labels_round_trip():
    arms = arms_of("[fp32,fp16[init_scale=64.0,fp32_modules=head+*.norm]]", WORDS)
    assert list(arms) == ["fp32", "fp16[init_scale=64.0,fp32_modules=head+*.norm]"]
    assert arms_of(",".join(arms), WORDS).keys() == arms.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "arms is empty"),
        ("fp32,fp32", "names an arm twice"),
        ("fp16[x]", "x in fp16\\[x\\] is no change"),
        ("fp16[nope=1]", "precision.nope is not a known key"),
        ("fp16[init_scale=1", "is no arm"),
    ],
)
def test_arms_that_are_none(text, words):
    with pytest.raises(InputError, match=words):
        arms_of(text, WORDS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["budget_s=["], "budget_s=[ is not valid: it cannot be read as a value."),
        (["budget_s={a: 1}"], "budget_s={'a': 1} is not valid; it takes a value of type float."),
        (["processes=7.5"], "processes=7.5 is not valid"),
    ],
)
def test_settings_that_are_none(words, sentence):
    with pytest.raises(InputError) as told:
        own_settings(words, BenchmarkConfig, "benchmark.yaml")
    assert str(told.value).startswith(sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["check=true"], "check=true is for train.py, which then says what it would run; leave it out here."),
        (["seed=0,1"], "seed=0,1: one seed is enough here; several are for train.py -m."),
    ],
)
def test_overrides_that_mean_nothing_here(words, sentence):
    with pytest.raises(InputError) as told:
        arms_of("fp32", words)
    assert str(told.value) == sentence


def test_an_error_of_a_users_model_names_the_arm(monkeypatch):
    ready = ready_for("bf16")
    one = Contestant(ready, compiled=False)
    monkeypatch.setattr(one._trainer, "step", lambda batches: 1 / 0)
    with pytest.raises(ZeroDivisionError) as told:
        one.steps(Ring(ready).from_step(0), 1)
    assert told.value.__notes__ == ["raised in a step of the arm bf16"]
